"""What strangers do to the files that they hand in."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def becomes(path: Path, what: str) -> None:
    """Put something else in the place of a file, at once."""
    new = path.with_name("new")
    match what:
        case "link":
            new.symlink_to(path.parents[2] / "outside/bot" / path.name)
        case "absolute link inside":
            new.symlink_to(path.parents[1] / "other" / path.name)
        case "FIFO":
            os.mkfifo(new)
        case "folder":
            path.unlink()
            new.mkdir()
        case "text":
            new.write_text("mine")
        case "device":
            new.symlink_to("/dev/zero")
    new.replace(path)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Files = dict[str, bytes]


def packed(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


VALUES: list[bytes] = [
    *(b"NaN", b"-Infinity", b"1e400", b"-1", b"9" * 5000, b"18446744073709551616", b"0.5", b"null"),
    *(b'""', b'"\\ud800"', b'"' + b"x" * 70_000 + b'"', b'"(a+)+$"', b"[]", b"{}", b"[[[]]]"),
    b"[" + b"1," * 5000 + b"1]",
    nested(100),
    b'{"(a|a)*b": 4}',
    b'{"": 0}',
]
"""JSON, or nearly, for any field of a config."""
FIELDS = [
    *("peft_type", "task_type", "r", "lora_alpha", "target_modules", "exclude_modules", "bias"),
    *("rank_pattern", "alpha_pattern", "layers_to_transform", "modules_to_save", "use_dora"),
    *("trainable_token_indices", "alora_invocation_tokens", "unheard_of"),
]
TEXTS: list[bytes] = [
    *(
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\x00}\x00",
        b'{"r": "\xff"}',
        b"\0" * 99,
    ),
    *(b'{"peft_type": "LORA", "peft_type": "IA3"}', nested(200_000), b" " * (1 << 20) + b"{}"),
    b"[" * 100_000,
]
"""What may stand where JSON should."""
PLACES = ["folder", "FIFO", "socket", "device", "/dev/null", "/proc/self/mem", "/etc/passwd"]
PLACES += ["link to itself", "link to nothing", "link outside", "empty", "endless", "unreadable"]
"""What may lie where a file should."""


def hostile_contents(good: Files) -> Iterator[tuple[str, Files]]:
    """Folders by a name that says what is wrong, made of a good adapter's two files."""
    config, weights = good[CONFIG], good[WEIGHTS]
    fields = json.loads(config)
    for field in FIELDS:
        rest = json.dumps({key: value for key, value in fields.items() if key != field})[:-1]
        for i, value in enumerate(VALUES):
            text = f'{rest}, "{field}": '.encode() + value + b"}"
            yield f"config: {field} {i}", good | {CONFIG: text}
    for i, text in enumerate(TEXTS):
        yield f"config: text {i}", good | {CONFIG: text}
        yield f"header: text {i}", good | {WEIGHTS: packed(text)}
    for name, content in _hostile_weights(weights):
        yield name, good | {WEIGHTS: content}
    pickle = b"\x80\x04cos\nsystem\n(S'touch /tmp/weft-was-here'\ntR."
    for name in ("adapter_model.bin", "adapter_model.pt", "weights.pkl"):
        yield f"pickle: {name}", {CONFIG: config, name: pickle}
    yield "pickle: inside", good | {WEIGHTS: pickle}
    yield "no weights", {CONFIG: config}
    yield "no config", {WEIGHTS: weights}


def _hostile_weights(weights: bytes) -> Iterator[tuple[str, bytes]]:
    end = 8 + int.from_bytes(weights[:8], "little")
    header, data = json.loads(weights[8:end]), weights[end:]
    first = next(name for name in header if name != "__metadata__")
    entry = header[first]
    begin, stop = entry["data_offsets"]
    changes: dict[str, list[Any]] = {
        "dtype": ["F64", "I8", "BOOL", "F8_E4M3", "", None, 5, ["F32"], "f32", "BF16"],
        "shape": [[], [0], [-1], [1 << 62, 1 << 62], [1.5], ["2"], None, 7, [1] * 5000, [True, 2]],
        "data_offsets": [
            *([], [0], [stop, begin], [begin, stop + 4], [-4, stop], [0, 1 << 63], [0.0, stop]),
            *(None, "0", [begin, stop, stop], [begin + 1, stop + 1], [[0], [1]]),
        ],
        "more": [1],
    }
    for key, values in changes.items():
        for i, value in enumerate(values):
            changed = header | {first: entry | {key: value}}
            yield f"header: {key} {i}", packed(changed, data)
    for i, name in enumerate(("", "\0", "../../x", "a" * 100_000, "\ud800", "__metadata__", "x.y")):
        changed = {(name if key == first else key): value for key, value in header.items()}
        yield f"header: name {i}", packed(changed, data)
    for key in entry:
        left = {name: value for name, value in entry.items() if name != key}
        yield f"header: no {key}", packed(header | {first: left}, data)
    for i, value in enumerate((None, [], 5, "x", {}, True)):
        yield f"header: entry {i}", packed(header | {first: value}, data)
        yield f"header: metadata {i}", packed(header | {"__metadata__": value}, data)
    for i, length in enumerate((0, 1, 7, end, len(weights), 1 << 24, 1 << 40, (1 << 64) - 1)):
        yield f"sizes: header's length {i}", packed(weights[8:end], data, length)
    for i in range(16):
        yield f"sizes: cut {i}", weights[: len(weights) * i // 16]
    for i, more in enumerate((b"\0", b"\0" * 4096, weights)):
        yield f"sizes: more {i}", weights + more
    for i, number in enumerate((0x7FC00000, 0x7F800000, 0xFFFFFFFF, 0x7F7FFFFF, 0x00000001)):
        yield f"values {i}", weights[:end] + number.to_bytes(4, "little") * (len(data) // 4)


def lay(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def displace(path: Path, what: str) -> None:
    """Put something that is no file to be read where one is expected."""
    path.unlink(missing_ok=True)
    match what:
        case "folder":
            path.mkdir()
        case "FIFO":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(path.parent):
                listening.bind(path.name)
        case "device":
            with contextlib.suppress(PermissionError):
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        case "link to itself":
            path.symlink_to(path.name)
        case "link to nothing":
            path.symlink_to("nothing")
        case "link outside":
            path.symlink_to("../../outside")
        case "empty":
            path.touch()
        case "endless":
            path.touch()
            os.truncate(path, 1 << 40)
        case "unreadable":
            path.touch(0)
        case _:
            path.symlink_to(what)
