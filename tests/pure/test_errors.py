"""The tree of errors is the one that its module draws, and all of it crosses a process boundary."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import sys

import pytest

from weft import core
from weft.core import errors
from weft.core.errors import WeftError, from_wire, to_wire


def tree(cls: type[WeftError], depth: int = 0) -> list[tuple[int, str, int]]:
    """Depth, name and status of an error and all below it that `weft.core.errors` has."""
    found = [(depth, cls.__name__, cls.status)]
    for sub in cls.__subclasses__():
        if sub.__module__ == errors.__name__:
            found += tree(sub, depth + 1)
    return found


def test_the_tree_is_as_drawn() -> None:
    drawn = [
        (len(branch) // 4, name, int(status))
        for branch, name, status in re.findall(
            r"^    ([ │├└─]*)(\w+) +(\d{3})  \w", errors.__doc__ or "", re.MULTILINE
        )
    ]
    assert drawn == tree(WeftError)[1:]


def test_no_other_module_has_branches_of_its_own() -> None:
    """Among all modules that have been imported by now, and those that raise most of them."""
    for package in ("weft.api", "weft.cli", "weft.registry", "weft.serving", "weft.text"):
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            with contextlib.suppress(ModuleNotFoundError):  # of an optional package
                importlib.import_module(found.name)
    seen = [WeftError]
    for each in seen:
        seen += each.__subclasses__()
    assert {each.__module__ for each in seen} == {errors.__name__}
    assert len({each.kind for each in seen}) == len(seen), "two errors of one kind"


@pytest.mark.parametrize("kind", sorted(errors.type_of_kind))
def test_an_error_crosses_the_boundary(kind: str) -> None:
    error = errors.type_of_kind[kind]("it went wrong", "field")
    again = from_wire(to_wire(error))
    assert type(again) is type(error)
    assert (again.message, again.param, again.status) == ("it went wrong", "field", error.status)
    assert str(again) == "it went wrong"


def test_other_errors_are_server_errors() -> None:
    assert to_wire(OSError("no")) == ("server_error", "OSError: no", None)
    unknown = from_wire(("of another version", "what", None))
    assert type(unknown) is WeftError and unknown.message == "what"


def test_systems_that_are_not_served_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ImportError, match="Weft runs on Linux, and this is darwin"):
        importlib.reload(core)
