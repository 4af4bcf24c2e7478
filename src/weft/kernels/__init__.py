"""Kernels: functions over tensors, each with a plain-torch oracle of the same signature."""
