"""Fixtures of tests that start servers and other processes."""

from __future__ import annotations

from engines import make_llm, make_module_llm
from http_api import make_world
from no_device import run_without_device
from quick_start import quick_engines
from shared_server import shared_server

__all__ = [
    "make_llm",
    "make_module_llm",
    "make_world",
    "quick_engines",
    "run_without_device",
    "shared_server",
]
