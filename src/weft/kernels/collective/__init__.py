"""Sums and gathers over the ranks that share a model."""
