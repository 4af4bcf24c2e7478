"""Families as data, one decoder for all of them, the layers that adapters change, loading."""
