"""Publishing adapters into a shared registry from any process, without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weft.core.errors import (
    AdapterInvalid,
    AdapterNotFound,
    ConfigError,
    InvalidRequest,
    check_switches,
)
from weft.core.files import CONFIG_FILE, WEIGHT_FILES, WEIGHTS_FILE

if TYPE_CHECKING:
    from weft.registry.records import Version
    from weft.registry.shared import SharedRegistry

Files = dict[str, "bytes | memoryview"]


def publish(
    registry: str | Path | SharedRegistry,
    name: str,
    adapter: str | Path | Mapping[str, Any],
    config: Mapping[str, object] | None = None,
    *,
    release: bool = True,
    pinned: bool = False,
    base: str | Path | None = None,
    metadata: Mapping[str, str] | None = None,
    actor: str = "",
) -> Version:
    """Add a version to a name of a shared registry, whose servers have it within a second.

        weft.publish("s3://models/registry", "acme/sql", "out/checkpoint-400")

        config = model.peft_config["default"].to_dict()
        weft.publish(registry, "acme/sql", get_peft_model_state_dict(model), config)

    `adapter` is a folder, anything else that `weft check` takes, or tensors by name, which may be
    torch's or numpy's and need their `config`. All requests for the name go to the new version,
    and `pinned` says whether it stays on the devices. If `release` is False, both stay as they are,
    unless `pinned` is True. With a `base`, whose configuration is read, the adapter must be one for
    it; else only its files are checked, and servers refuse it if it does not fit theirs.

    Content that the name has already keeps its number. Raises AdapterError, GenerationConflict,
    QuotaExceeded, InvalidRequest, ConfigError, RegistryUnavailable.
    """
    from weft.registry.blobs import Blobs
    from weft.registry.records import Publish
    from weft.registry.shared import SharedRegistry
    from weft.registry.shared_names import check_shared_name
    from weft.registry.stores import open_store

    check_shared_name(name)
    if not isinstance(cast(object, registry), str | Path | SharedRegistry):
        message = f"registry must be a folder or a bucket, got {registry!r:.100}"
        raise ConfigError(message, "registry")
    check_switches(release=release, pinned=pinned)
    _check_texts(metadata, actor)
    if isinstance(adapter, Mapping):
        files, source = files_of_tensors(config, adapter), ""
    else:
        if config is not None:
            raise AdapterInvalid("config: this is for tensors; a folder has its own", "config")
        files, source = files_of_folder(str(adapter)), str(adapter)
    checked = check(files, None if base is None else str(base))
    with ExitStack() as stack:
        if isinstance(registry, SharedRegistry):
            shared = registry
        else:
            shared = stack.enter_context(SharedRegistry(open_store(str(registry))))

        def accept(new: Version) -> None:
            shared.check(Publish(name, new, release, pinned))

        put = Blobs(shared.store).put(files, accept)
        version = _described(put, source, checked, metadata or {})
        shared.change(Publish(name, version, release, pinned), actor)
    return version


def _check_texts(metadata: Mapping[str, str] | None, actor: str) -> None:
    """Raises InvalidRequest."""
    if not isinstance(cast(object, actor), str):
        raise InvalidRequest(f"actor must be a text, got {actor!r:.100}", "actor")
    if not isinstance(cast(object, metadata), Mapping | None):
        raise InvalidRequest(f"metadata must be a mapping, got {metadata!r:.100}", "metadata")
    for part in (part for item in (metadata or {}).items() for part in item):
        if not isinstance(cast(object, part), str):
            message = f"metadata must hold texts by name, got {part!r:.100}"
            raise InvalidRequest(message, "metadata")


def _described(put: Version, source: str, base: str, metadata: Mapping[str, str]) -> Version:
    from msgspec.structs import replace

    from weft.registry.allowed import shown

    return replace(put, source=shown(source), base=base, metadata=dict(metadata))


def files_of_folder(adapter: str) -> Files:
    """The files of an adapter, wherever it is. Raises AdapterError."""
    from weft.registry.blobs import read_files
    from weft.registry.sources import Sources

    with Sources().open(adapter) as folder:
        files: Files = dict(read_files(folder))
    for name in WEIGHT_FILES:
        if name not in files:
            raise AdapterNotFound(f"{adapter} has no file {name}", name)
    return files


def files_of_tensors(config: Mapping[str, object] | None, tensors: Mapping[str, Any]) -> Files:
    """The files that PEFT would save. torch is imported only for tensors of its own. Raises
    AdapterInvalid."""
    from weft.checkpoint.read import config_file, files_of

    if config is None:
        raise AdapterInvalid("config: tensors need the fields of adapter_config.json", "config")
    modules = {type(tensor).__module__.partition(".")[0] for tensor in tensors.values()}
    if "torch" in modules:
        made = files_of(config, tensors)
        return {CONFIG_FILE: made.config, WEIGHTS_FILE: made.weights}
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save

    arrays = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, np.ndarray):
            kind = type(tensor).__name__
            raise AdapterInvalid(f"{name}: must be a tensor of torch or numpy, got {kind}", name)
        plain = tensor.astype(np.float32) if tensor.dtype == np.float64 else tensor
        try:
            save({name: np.empty(0, plain.dtype)})
        except (SafetensorError, TypeError, ValueError) as error:
            raise AdapterInvalid(f"{name!r}: can't be saved: {error}", "tensors") from None
        arrays[name] = np.ascontiguousarray(plain)
    return {CONFIG_FILE: config_file(config), WEIGHTS_FILE: save(arrays, {"format": "pt"})}


def check(files: Files, base: str | None) -> str:
    """Raise AdapterInvalid for files that no server would serve, or none with this base. Returns
    the base if the adapter was checked against it, else ""."""
    import numpy as np

    from weft.checkpoint.read import AdapterFiles, parse_stored
    from weft.checkpoint.refuse import refuse
    from weft.registry.contents import check_files

    made = AdapterFiles(bytes(files[CONFIG_FILE]), files[WEIGHTS_FILE])
    check_files(made)
    if base is None:
        tensors = parse_stored(made.weights)
        if not tensors:
            refuse(WEIGHTS_FILE, "holds no tensors")
        for name, tensor in tensors.items():
            if not np.isfinite(tensor.largest()):
                refuse(name, "holds NaN or infinite values")
        return ""
    from weft.checkpoint.examine import examine
    from weft.core.config import MAX_RANK
    from weft.models.blueprint import target_table
    from weft.models.config import load_model_config

    model = load_model_config(base)
    return base if examine(made, target_table(model), model.dtype, MAX_RANK) else ""
