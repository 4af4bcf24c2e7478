"""How large a class, a file and a function may be, so that each can be read at once."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import weft

ROOT = Path(weft.__file__).parent
CLASS_LINES, CLASS_ATTRIBUTES, FILE_LINES, FUNCTION_LINES = 350, 15, 450, 60
MAX_EXCEPTIONS = 10
ALL_LINES = 56_000
"""How many lines all files may have together, benchmarks aside."""
EXCEPTIONS: dict[str, str] = {}
"""By path and name: why it is larger."""
SHARED_NAMES = {
    "Matcher": "the protocol that plans know a grammar by, and the one that xgrammar's fills",
    "Release": "an engine lets go of an adapter; a shared registry lets requests go to a version",
}
"""Names of several classes: why they are the same."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True)
class File:
    name: str
    num_lines: int
    tree: ast.Module
    classes: list[ast.ClassDef]
    functions: list[Function]


def read(path: Path) -> File:
    text = path.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in nodes if isinstance(node, Function)]
    return File(str(path.relative_to(ROOT)), text.count("\n"), tree, classes, functions)


@functools.cache
def all_files() -> list[File]:
    return [read(path) for path in sorted(ROOT.rglob("*.py"))]


def num_lines(node: Definition) -> int:
    return node.end_lineno - node.lineno + 1


def attributes(node: Definition) -> set[str]:
    """What the methods assign on self, and the fields of a dataclass that is not frozen."""
    found = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if any(mark.startswith("dataclass") and "frozen=True" not in mark for mark in marks):
        found |= {p.target.id for p in node.body if isinstance(p, ast.AnnAssign)}
    return found


def is_kernel(node: Definition) -> bool:
    return any("jit" in ast.unparse(mark) for mark in node.decorator_list)


@functools.cache
def larger() -> dict[str, str]:
    """By path, or path and name: what is larger than it may be, and how large it is."""
    found = {f.name: f"{f.num_lines} lines" for f in all_files() if f.num_lines > FILE_LINES}
    for file in all_files():
        for node in file.classes:
            lines, width = num_lines(node), len(attributes(node))
            if lines > CLASS_LINES or width > CLASS_ATTRIBUTES:
                found[f"{file.name}:{node.name}"] = f"{lines} lines, {width} attributes"
        for node in file.functions:
            if num_lines(node) > FUNCTION_LINES and not is_kernel(node):
                found[f"{file.name}:{node.name}"] = f"{num_lines(node)} lines"
    return found


def test_nothing_is_larger_than_it_may_be() -> None:
    found = larger()
    assert not {name: size for name, size in found.items() if name not in EXCEPTIONS}


def test_exceptions_are_few_and_needed() -> None:
    assert EXCEPTIONS.keys() <= larger().keys()
    assert len(EXCEPTIONS) <= MAX_EXCEPTIONS


def test_all_of_it_stays_small() -> None:
    lines = sum(f.num_lines for f in all_files() if not f.name.startswith("bench/"))
    assert lines <= ALL_LINES


def test_a_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for file in all_files():
        for node in file.classes:
            places[node.name].append(file.name)
    several = {name: files for name, files in places.items() if len(files) > 1}
    assert not {name: files for name, files in several.items() if name not in SHARED_NAMES}


def test_docstrings_are_sentences() -> None:
    """None begins as if it went on from somewhere else."""
    for file in all_files():
        for node in (file.tree, *file.classes, *file.functions):
            text = ast.get_docstring(node) or ""
            assert not text.startswith("Of "), f"{file.name}: {text.splitlines()[0]}"
