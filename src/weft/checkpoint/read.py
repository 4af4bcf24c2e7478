"""Reads the two files of an adapter, or makes them from memory: their bytes, digest and tensors.

Each file is read once, and everything else is derived from those bytes. So the digest is that of
the served content even if somebody writes to the folder meanwhile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weft.checkpoint.refuse import refuse, refuse_pointer, show, shown_name
from weft.core.adapters import AdapterSource
from weft.core.errors import AdapterNotFound, AdapterUnavailable
from weft.core.files import CONFIG_FILE, MAX_BYTES, WEIGHTS_FILE, content_digest
from weft.core.folders import Deadline, Folder, Roots
from weft.core.targets import TargetTable

if TYPE_CHECKING:
    import torch

MAX_CONFIG_BYTES = MAX_BYTES[CONFIG_FILE]
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 1 << 17
"""The most tensors of any file; `max_tensors` has the limit for a certain base."""
MAX_DIMENSIONS = 8
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtypes in which weights may be stored: torch's names by safetensors' names."""

_KEPT_BYTES = 1 << 18
"""The parsed content of the last few headers up to this length is cached."""
_METADATA_BYTES, _METADATA_PARTS = 1 << 20, 1 << 14
"""The limits of what a header may have besides tensors: bytes; objects, and lists."""
_ENTRY_BYTES = 384
"""The most bytes of a header for each tensor."""
_ENTRY = {"dtype", "shape", "data_offsets"}
_BOUNDED = (
    (b"{", 1, _METADATA_PARTS, "objects"),
    (b"[", 2, _METADATA_PARTS, "lists"),
    (b",", MAX_DIMENSIONS + 3, _METADATA_BYTES, "values"),
)
"""How many of each sign a header may have for each tensor, and besides: parsing holds up other
threads."""
_Entry = tuple[int, int, str, tuple[int, ...], str]
"""A tensor's start and end in the data, in bytes, its dtype, its shape and its name."""

_CHUNK = 1 << 18
"""How many values are compared at a time."""
_IN_CACHE = 1 << 16
"""How many values are examined at a time, so that they stay in the processor's cache."""
Bytes = npt.NDArray[np.uint8]
Raw = npt.NDArray[Any]
"""Values of a dtype that weights are stored in: uint16 stands for bfloat16, which NumPy lacks."""
_MLX_FILE = "adapters.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class AdapterFiles:
    """The content of an adapter's folder."""

    config: bytes
    weights: bytes | memoryview

    @cached_property
    def digest(self) -> str:
        """See `content_digest`."""
        return content_digest(self.config, [self.weights], len(self.weights))


def read_adapter(
    folder: Folder,
    table: TargetTable,
    max_rank: int,
    expect_digest: str | None = None,
    deadline: Deadline | None = None,
) -> AdapterFiles:
    """The content of a folder, if its sizes can be those of an adapter for the base in `table`.

    Raises AdapterNotFound (a file is missing), AdapterPathRefused (a file is a link that leaves the
    root), AdapterUnavailable (the digest is not `expect_digest`, or reading takes too long) and
    AdapterInvalid (no regular file, pickle, of mlx-lm, too large).
    """
    deadline = deadline or Deadline()
    config = folder.read(CONFIG_FILE, MAX_CONFIG_BYTES, deadline)
    if config is None:
        raise _missing(CONFIG_FILE)
    weights = folder.read(WEIGHTS_FILE, _max_weight_bytes(table, max_rank), deadline)
    if weights is None:
        _refuse_other_formats(folder)
        raise _missing(WEIGHTS_FILE)
    files = AdapterFiles(bytes(config), weights)
    if expect_digest is not None and files.digest != expect_digest:
        raise AdapterUnavailable("the adapter changed on disk since it was loaded", "lora_path")
    return files


def read_source(
    source: AdapterSource, table: TargetTable, max_rank: int, deadline: Deadline
) -> AdapterFiles:
    """The content of a source's folder.

    Raises what `read_adapter` does, AdapterNotFound if there is no such folder, and
    AdapterUnavailable if its path has come to mean another.
    """
    try:
        folder = Folder(source.path, Roots([source.root]))
    except OSError as error:
        message = f"the adapter's path is not a folder: {error.strerror}"
        raise AdapterNotFound(message, "lora_path") from None
    with folder:
        if source.identity not in (None, folder.identity):
            raise AdapterUnavailable("the adapter was exchanged while it was loaded", "lora_path")
        return read_adapter(folder, table, max_rank, source.digest, deadline)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor as it lies in the file."""

    name: str
    dtype: str
    """torch's name of it."""
    shape: tuple[int, ...]
    data: Bytes

    @property
    def array(self) -> Raw:
        """The tensor in the file's dtype: a view of the file."""
        dtype = "uint16" if self.dtype == "bfloat16" else self.dtype
        return self.data.view(dtype).reshape(self.shape)

    def values(self) -> npt.NDArray[np.float32]:
        """The values in the tensor's shape; a view of the file if that is float32."""
        return self._values(0, None).reshape(self.shape)

    def largest(self) -> np.float32:
        # All bits but the sign are ordered as the magnitudes are.
        assert self.dtype in DTYPES.values()
        wide = self.dtype == "float32"
        bits: npt.NDArray[np.unsignedinteger[Any]]
        bits = self.data.view(np.uint32 if wide else np.uint16)
        mask = np.uint32(0x7FFFFFFF) if wide else np.uint16(0x7FFF)
        chunks = (bits[i : i + _IN_CACHE] for i in range(0, len(bits), _IN_CACHE))
        largest = max((int((chunk & mask).max()) for chunk in chunks), default=0)
        if self.dtype == "float16":
            return np.float32(np.uint16(largest).view(np.float16))
        return np.uint32(largest if wide else largest << 16).view(np.float32)

    def transposed(self) -> Stored:
        """The transposed matrix, in float32."""
        turned = np.ascontiguousarray(self.values().T)
        return Stored(self.name, "float32", turned.shape, turned.reshape(-1).view(np.uint8))

    def equals(self, other: Stored | None) -> bool:
        """Whether the other has the same shape and values, NaN being equal to nothing."""
        if other is None or self.shape != other.shape:
            return False
        chunks = ((i, i + _CHUNK) for i in range(0, math.prod(self.shape), _CHUNK))
        return all(np.array_equal(self._values(*c), other._values(*c)) for c in chunks)

    def _values(self, start: int, end: int | None) -> npt.NDArray[np.float32]:
        """Some of the values, in the file's order."""
        if self.dtype == "bfloat16":
            return (self.data.view(np.uint16)[start:end].astype(np.uint32) << 16).view(np.float32)
        return self.data.view(np.dtype(self.dtype))[start:end].astype(np.float32, copy=False)


def parse_stored(
    weights: bytes | memoryview, table: TargetTable | None = None
) -> dict[str, Stored]:
    """The tensors of a safetensors file by name; with the `table` of a base, no header is looked
    into that no adapter for that base can have.

    They are views of `weights`, or of one copy if that is read-only: other threads can run while
    one large copy is made, but not while libraries make many small ones.
    Raises AdapterInvalid for a malformed file or a dtype other than float32, float16, bfloat16.
    """
    refuse_pointer(WEIGHTS_FILE, weights)
    length = int.from_bytes(weights[:8], "little")
    if len(weights) < 8 or length > len(weights) - 8:
        refuse(WEIGHTS_FILE, "malformed: it ends before its header does")
    most = max_tensors(table) if table else MAX_TENSORS
    if length > min(MAX_HEADER_BYTES, _METADATA_BYTES + most * _ENTRY_BYTES):
        refuse(WEIGHTS_FILE, f"malformed: its header has {length} bytes")
    parse = _entries if length <= _KEPT_BYTES else _entries.__wrapped__
    entries = parse(bytes(weights[8 : 8 + length]), most)
    data = np.frombuffer(weights, np.uint8, offset=8 + length)
    if not data.flags.writeable:
        data = data.copy()
    end = 0
    found: dict[str, Stored] = {}
    for begin, stop, dtype, shape, name in entries:
        if begin != end or stop > len(data):
            where = "overlap others, leave a hole or exceed the file"
            refuse(WEIGHTS_FILE, f"malformed: the data of {shown_name(name)} {where}")
        end = stop
        found[name] = Stored(name, dtype, shape, data[begin:stop])
    if end != len(data):
        refuse(WEIGHTS_FILE, "malformed: it is longer than its tensors")
    return found


def max_tensors(table: TargetTable) -> int:
    """An upper bound for the tensors of any adapter. No kind has more than eight for a target, or
    two for each of its experts; the rest is room for kinds from outside."""
    targets = sum(12 + 2 * (table.copies(t.kind) - 1) for t in table.targets)
    return min(MAX_TENSORS, 64 + targets + 4 * len(table.norms))


def _max_weight_bytes(table: TargetTable, max_rank: int) -> int:
    """An upper bound for the file of any adapter of at most `max_rank`, in float32: with some
    vectors for each target and norm, and with the whole weights of embedding and head, which may
    be larger than the base's and are there up to three times."""
    targets = table.targets
    features = sum((t.in_features + t.out_features) * table.copies(t.kind) for t in targets)
    whole = [t.in_features * t.out_features for t in targets if t.kind in ("embedding", "head")]
    vectors = 4 * features + sum(norm.size for norm in table.norms)
    return 4 * (max_rank * features + 4 * sum(whole) + vectors) + 2 * MAX_HEADER_BYTES


def _missing(name: str) -> AdapterNotFound:
    return AdapterNotFound(f"the adapter's folder has no file {name}", name)


def _refuse_other_formats(folder: Folder) -> None:
    """Raise AdapterInvalid if the folder holds weights in a format that is not served."""
    for name in folder.names():
        if name == _MLX_FILE:
            refuse(name, "mlx-lm's format is not served; make a base of it with `mlx_lm.fuse`")
        if name.endswith(_PICKLES):
            remedy = f"save the adapter as {WEIGHTS_FILE} (safe_serialization=True)"
            refuse(name, f"pickle files are never opened here; {remedy}")
        if name.endswith(".safetensors"):
            refuse(name, f"is not read: an adapter's weights are in {WEIGHTS_FILE}")


@lru_cache(16)
def _entries(text: bytes, max_tensors: int) -> tuple[_Entry, ...]:
    """A header's entries, in the order of the data. It must not name a tensor twice."""
    if text.count(b'"data_offsets"') > max_tensors:
        refuse(WEIGHTS_FILE, f"holds more tensors than any adapter for this base ({max_tensors})")
    for sign, each, besides, what in _BOUNDED:
        if text.count(sign) > each * max_tensors + besides:
            refuse(WEIGHTS_FILE, f"malformed: its header has too many {what}")
    try:
        header = json.loads(text, object_pairs_hook=_distinct)
    except RecursionError:
        refuse(WEIGHTS_FILE, "malformed: its header is nested too deeply")
    except ValueError as error:
        refuse(WEIGHTS_FILE, f"malformed: its header is not JSON ({shown_name(str(error))})")
    if not isinstance(header, dict):
        refuse(WEIGHTS_FILE, "malformed: its header is not an object")
    header.pop("__metadata__", None)
    return tuple(sorted(_entry(name, spec) for name, spec in header.items()))


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(name: str, spec: object) -> _Entry:
    if not isinstance(spec, dict) or spec.keys() != _ENTRY:
        refuse(name, "malformed: it needs dtype, shape and data_offsets")
    dtype = DTYPES.get(spec["dtype"]) if isinstance(spec["dtype"], str) else None
    if dtype is None:
        refuse(name, f"has the dtype {show(spec['dtype'])}; only {', '.join(DTYPES)} are served")
    shape, offsets = _sizes(spec["shape"]), _sizes(spec["data_offsets"])
    if shape is None or offsets is None or len(offsets) != 2:
        refuse(name, "malformed: its shape or its place is not a list of sizes")
    if math.prod(shape) * item_bytes(dtype) != offsets[1] - offsets[0]:
        refuse(name, f"malformed: its data do not have the size of the shape {show(shape)}")
    return offsets[0], offsets[1], dtype, shape, name


def item_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _sizes(value: object) -> tuple[int, ...] | None:
    """A shape; None unless it is a short list of integers that can be sizes in memory."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return None
    for size in value:
        if type(size) is not int or not 0 <= size < 1 << 48:
            return None
    return tuple(value)


# -- an adapter in memory --------------------------------------------------------------------------


def files_of(config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> AdapterFiles:
    """The files of `peft_config.to_dict()` and `get_peft_model_state_dict(model)`.

    The bytes depend on the arguments alone. PEFT's own files can differ in the config, as saving
    sets some of its fields, such as `inference_mode`. Tensors may be on any device; those of other
    floating types than are served become float32. Raises AdapterInvalid for what can't be in such
    files.
    """
    from safetensors.torch import save

    _check_mapping("config", config)
    _check_mapping("tensors", tensors)
    copies = {_checked(name): _copy(name, tensor) for name, tensor in tensors.items()}
    return AdapterFiles(config_file(config), save(copies, {"format": "pt"}))


def config_file(config: Mapping[str, object]) -> bytes:
    """The bytes of adapter_config.json with these fields. Raises AdapterInvalid, naming the field
    that can't be in it."""
    _check_mapping("config", config)
    for field, value in config.items():
        try:
            json.dumps(value, default=_listed)
        except (TypeError, ValueError, RecursionError) as error:
            refuse(_checked(field), f"can't be in a {CONFIG_FILE}: {error}")
        _checked(field)
    return json.dumps(dict(config), default=_listed, indent=2, sort_keys=True).encode()


def _check_mapping(what: str, given: object) -> None:
    if not isinstance(given, Mapping):
        refuse(what, f"must be a mapping by name, got {given!r:.100}")


def _listed(value: object) -> list[object]:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _checked(name: object) -> str:
    if not isinstance(name, str) or not name.isprintable():
        refuse(show(str(name)), "a name must be a printable string")
    return name


def _copy(name: str, tensor: object) -> torch.Tensor:
    """A copy on the CPU, in memory of its own, as files can't hold views."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        refuse(name, f"must be a dense tensor, got {show(str(kind))}")
    if tensor.is_quantized:
        refuse(name, f"must not be quantized, got {show(str(tensor.dtype))}")
    served = {getattr(torch, dtype) for dtype in DTYPES.values()}
    odd = tensor.is_floating_point() and tensor.dtype not in served
    dtype = torch.float32 if odd else tensor.dtype
    try:
        copy = tensor.detach().to("cpu", dtype, copy=True)
    except RuntimeError as error:
        refuse(name, f"can't be copied: {error}")
    return copy.contiguous()
