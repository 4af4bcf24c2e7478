"""Clients of engines, and what keeps an engine running."""
