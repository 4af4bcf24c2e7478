"""Which files import which. What may import what is in `pyproject.toml`, for import-linter."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("weft", cache_dir=None)
    files = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
