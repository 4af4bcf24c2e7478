"""Which files import which. What may import what is in `pyproject.toml`, for import-linter."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("weft", cache_dir=None)
    files = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_what_scripts_import_is_there() -> None:
    """No other test runs all of them."""
    scripts = [
        file for folder in ("benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")
    ]
    assert scripts
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft."):
                assert {alias.name for alias in node.names} <= names_in(str(node.module)), script


def names_in(module: str) -> set[str]:
    """What the module defines or imports, and the modules in it."""
    path = ROOT / "src" / module.replace(".", "/")
    inside = {file.stem for file in path.glob("*.py")} | {
        file.parent.name for file in path.glob("*/__init__.py")
    }
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            inside.add(node.id)
        elif isinstance(node, ast.alias):
            inside.add(node.asname or node.name)
    return inside
