"""Tables of the fastest kernel settings for each device, as `weft tune` finds them.

A table is a JSON file named after its device:

    {"version": 1, "device": "NVIDIA H200",
     "linear": [{"rows": 16, "outputs": 6144, "inputs": 4096, "step": 128, ...}],
     "lora": {"columns": 128, ...}}

`linear` holds the fields of a `Cut` for products of up to so many rows, `lora` those of `Blocks`
that differ from its defaults, which change no bit of a result. Tables in this folder come with
Weft; one in the user's cache folder goes before them, entry by entry. What no table knows is cut as
the kernels see fit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.core.errors import ConfigError

VERSION = 1
ROWS = (16, 32, 64, 128)
"""The numbers of rows that products are cut for: each serves products of up to so many rows."""
SHIPPED = Path(__file__).parent
MOST = 4096
"""No number of a cut is larger."""
_POWERS_OF_TWO = frozenset({"columns", "step", "split", "ahead", "shrink_warps", "expand_warps"})


class Key(NamedTuple):
    """A product: of up to `rows` rows, and the shape of its weight."""

    rows: int
    outputs: int
    inputs: int


MEETING_FLOATS, MEETING_TILES = 1 << 22, 1 << 12
"""Room where the parts of a product meet, if K is split."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a base product is cut for the device: see `weft.kernels.triton_linear`."""

    step: int
    """Elements of K that a program takes at a time."""
    split: int
    """How many parts K is split into."""
    stages: int
    columns: int = 64
    """Columns of the result that a program computes."""
    ahead: int = 2
    """How many lines of 128 bytes of each row of its weights a program asks for early."""

    def fits(self, num_rows: int, outputs: int, inputs: int) -> bool:
        """Whether such a product can be cut so."""
        if min(self.columns, self.step) < 16 or outputs % self.columns:
            return False
        num_floats, num_tiles = outputs * self.split * num_rows, outputs // self.columns
        meet = self.split == 1 or (num_floats <= MEETING_FLOATS and num_tiles <= MEETING_TILES)
        return meet and inputs % (self.split * self.step) == 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the LoRA kernels for many rows are cut for the device. None of it changes a result."""

    columns: int = 128
    """Columns that a program of the expand takes at a time."""
    shrink_programs: int = 2
    """Programs for each processor, as is `expand_programs`."""
    shrink_warps: int = 4
    shrink_stages: int = 3
    expand_programs: int = 4
    expand_warps: int = 4
    expand_stages: int = 4


_BLOCKS = tuple(f.name for f in fields(Blocks))


@dataclass(frozen=True)
class Table:
    """How kernels are cut on one device."""

    device: str
    """The device's own name."""
    linear: Mapping[Key, Mapping[str, int]] = field(default_factory=dict)
    lora: Mapping[str, int] = field(default_factory=dict)

    def over(self, other: Table) -> Table:
        """A table with its own entries, and those that only `other` has."""
        linear = {**other.linear, **self.linear}
        return Table(self.device, linear, {**other.lora, **self.lora})


def cut_for(device: torch.device, num_rows: int, outputs: int, inputs: int) -> Cut | None:
    """What the device's tables say of a product; None if they don't know it. Raises ConfigError for
    a file that is no table."""
    rows = next(most for most in ROWS if num_rows <= most)
    return _cuts(device).get(Key(rows, outputs, inputs))


def blocks_for(device: torch.device) -> Blocks:
    """The default blocks, but for what the device's tables say. Raises ConfigError as `cut_for`."""
    found: dict[str, int] = {}
    for path in paths(device):
        found |= read_table(path).lora
    return Blocks(**found)


@cache
def _cuts(device: torch.device) -> dict[Key, Cut]:
    found: dict[Key, Cut] = {}
    names = [f.name for f in fields(Cut)]
    for path in paths(device):
        for index, (key, numbers) in enumerate(read_table(path).linear.items()):
            at = f"linear[{index}]"
            if odd := sorted(numbers.keys() ^ set(names)):
                raise _refused(path, f"{at}.{odd[0]}", f"a cut must have the fields {names}")
            found[key] = made = Cut(**numbers)
            if not made.fits(*key):
                raise _refused(path, at, "this cut does not fit the product")
    return found


def forget() -> None:
    """Read tables again when they are next asked for."""
    _cuts.cache_clear()


# -- files -----------------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def paths(device: torch.device) -> list[Path]:
    """The device's tables that exist; entries of later ones take precedence."""
    found = (SHIPPED / _file_name(device), user_table(device))
    return [path for path in found if path and path.is_file()]


def user_table(device: torch.device) -> Path | None:
    """Where the user's own table is, or would be; None where there is no home folder."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return folder / "weft" / "tuned" / _file_name(device)


def _file_name(device: torch.device) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", device_name(device)).strip("_") + ".json"


def write_table(path: Path, table: Table) -> None:
    """Write a table, one entry a line. Raises ConfigError when the file can't be written."""
    rows = [{**key._asdict(), **numbers} for key, numbers in sorted(table.linear.items())]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    text = (
        f'{{\n  "version": {VERSION},\n  "device": {json.dumps(table.device)},\n'
        f'  "linear": [\n{lines}\n  ],\n  "lora": {json.dumps(dict(table.lora))}\n}}\n'
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", "output") from None


def read_table(path: Path) -> Table:
    """Read a table. Raises ConfigError that names the file and the field."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", "table") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", "table") from None
    whole = _object(path, "table", found, ("version", "device", "linear", "lora"))
    if whole["version"] != VERSION:
        raise _refused(path, "version", f"this version of Weft reads {VERSION}")
    if not isinstance(whole["device"], str):
        raise _refused(path, "device", "must be a string")
    if not isinstance(whole["linear"], list):
        raise _refused(path, "linear", "must be a list of cuts")
    linear = dict(_entry(path, f"linear[{i}]", e) for i, e in enumerate(whole["linear"]))
    if len(linear) < len(whole["linear"]):
        raise _refused(path, "linear", "has two cuts for one product")
    lora = _object(path, "lora", whole["lora"], _BLOCKS, complete=False)
    return Table(whole["device"], linear, _numbers(path, "lora", lora))


def _entry(path: Path, at: str, found: object) -> tuple[Key, Mapping[str, int]]:
    entry = _object(path, at, found, Key._fields, exact=False)
    rows, outputs, inputs = (entry.pop(name) for name in Key._fields)
    if rows not in ROWS:
        raise _refused(path, f"{at}.rows", f"must be one of {ROWS}")
    for name, size in (("outputs", outputs), ("inputs", inputs)):
        if type(size) is not int or size < 1:
            raise _refused(path, f"{at}.{name}", "must be an integer of at least 1")
    return Key(rows, outputs, inputs), _numbers(path, at, entry)


def _numbers(path: Path, at: str, found: Mapping[str, object]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for name, value in found.items():
        least = 0 if name == "ahead" else 1
        if type(value) is not int or not least <= value <= MOST:
            raise _refused(path, f"{at}.{name}", f"must be an integer from {least} to {MOST}")
        if name in _POWERS_OF_TWO and value & (value - 1):
            raise _refused(path, f"{at}.{name}", "must be a power of two")
        numbers[name] = value
    return numbers


def _object(
    path: Path,
    at: str,
    found: object,
    names: Sequence[str],
    *,
    complete: bool = True,
    exact: bool = True,
) -> dict[str, Any]:
    """A copy of a JSON object. `complete`: it must have all of `names`; `exact`: and no others."""
    if not isinstance(found, dict):
        raise _refused(path, at, "must be a JSON object")
    lacking = [name for name in names if complete and name not in found]
    beyond = [name for name in found if exact and name not in names]
    for name in (*lacking, *beyond):
        what = "is missing" if name in lacking else f"is unknown; known are {', '.join(names)}"
        raise _refused(path, f"{at}.{name}" if at != "table" else name, what)
    return dict(found)


def _refused(path: Path, at: str, why: str) -> ConfigError:
    return ConfigError(f"the table {path} can't be used: {at}: {why}", at)
