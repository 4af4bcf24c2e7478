"""How large a class, a file and a function may be, so that each can be read at once."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import weft

ROOT = Path(weft.__file__).parent
CLASS_LINES, CLASS_ATTRIBUTES, FILE_LINES, FUNCTION_LINES = 350, 15, 450, 60
MAX_EXCEPTIONS = 10
ALL_LINES = 76_440
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
class Part:
    """A class or a function."""

    name: str
    is_class: bool
    num_lines: int
    num_attributes: int
    is_kernel: bool
    docstring: str


@dataclass(frozen=True)
class File:
    name: str
    num_lines: int
    docstring: str
    parts: list[Part]

    @property
    def classes(self) -> list[Part]:
        return [part for part in self.parts if part.is_class]


def read(path: Path) -> File:
    text = path.read_text()
    tree = ast.parse(text)
    parts = [part_of(node) for node in definitions(tree.body)]
    name = str(path.relative_to(ROOT))
    return File(name, text.count("\n"), ast.get_docstring(tree) or "", parts)


def definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """At any depth; no expression holds one."""
    for node in body:
        if isinstance(node, Definition):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from definitions(getattr(node, field, []))


def part_of(node: Definition) -> Part:
    is_class = isinstance(node, ast.ClassDef)
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    return Part(
        node.name,
        is_class,
        node.end_lineno - node.lineno + 1,
        len(attributes(node, marks)) if is_class else 0,
        any("jit" in mark for mark in marks),
        ast.get_docstring(node) or "",
    )


@functools.cache
def all_files() -> list[File]:
    return [read(path) for path in sorted(ROOT.rglob("*.py"))]


def attributes(node: ast.ClassDef, marks: list[str]) -> set[str]:
    """What the methods assign on self, and the fields of a dataclass that is not frozen."""
    found = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    if any(mark.startswith("dataclass") and "frozen=True" not in mark for mark in marks):
        found |= {p.target.id for p in node.body if isinstance(p, ast.AnnAssign)}
    return found


@functools.cache
def larger() -> dict[str, str]:
    """By path, or path and name: what is larger than it may be, and how large it is."""
    found = {f.name: f"{f.num_lines} lines" for f in all_files() if f.num_lines > FILE_LINES}
    for file in all_files():
        for part in file.parts:
            lines, width = part.num_lines, part.num_attributes
            if part.is_class and (lines > CLASS_LINES or width > CLASS_ATTRIBUTES):
                found[f"{file.name}:{part.name}"] = f"{lines} lines, {width} attributes"
            if not part.is_class and lines > FUNCTION_LINES and not part.is_kernel:
                found[f"{file.name}:{part.name}"] = f"{lines} lines"
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
        for part in file.classes:
            places[part.name].append(file.name)
    several = {name: files for name, files in places.items() if len(files) > 1}
    assert not {name: files for name, files in several.items() if name not in SHARED_NAMES}


def test_docstrings_are_sentences() -> None:
    """None begins as if it went on from somewhere else."""
    for file in all_files():
        for text in (file.docstring, *(part.docstring for part in file.parts)):
            assert not text.startswith("Of "), f"{file.name}: {text.splitlines()[0]}"
