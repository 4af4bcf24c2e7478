"""An adapter that is in memory, as the files that would hold it."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from safetensors.torch import save

from weft.checkpoint.read import DTYPES, AdapterFiles
from weft.checkpoint.refuse import refuse, show
from weft.core.files import CONFIG_FILE


def files_of(config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> AdapterFiles:
    """What PEFT would save: `peft_config.to_dict()` and `get_peft_model_state_dict(model)`.

    The bytes depend on the content alone, and are those of PEFT's own files as long as these keep
    its order of a config's lists. Tensors may be on any device; those of other floating types than
    are served become float32. Raises AdapterInvalid for what can't be in such files.
    """
    copies = {_checked(name): _copy(name, tensor) for name, tensor in tensors.items()}
    return AdapterFiles(_config_file(config), save(copies, {"format": "pt"}))


def _config_file(config: Mapping[str, object]) -> bytes:
    for field, value in config.items():
        try:
            json.dumps(value, default=_listed)
        except (TypeError, ValueError, RecursionError) as error:
            refuse(_checked(field), f"can't be in a {CONFIG_FILE}: {error}")
        _checked(field)
    return json.dumps(dict(config), default=_listed, indent=2, sort_keys=True).encode()


def _listed(value: object) -> list[object]:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _checked(name: object) -> str:
    if not isinstance(name, str):
        refuse(show(str(name)), "a name must be a string")
    return name


def _copy(name: str, tensor: object) -> torch.Tensor:
    """On the CPU, and in memory of its own, as a file takes no views."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        refuse(name, f"must be a dense tensor, got {show(str(kind))}")
    served = {getattr(torch, dtype) for dtype in DTYPES.values()}
    odd = tensor.is_floating_point() and tensor.dtype not in served
    dtype = torch.float32 if odd else tensor.dtype
    try:
        copy = tensor.detach().to("cpu", dtype, copy=True)
    except RuntimeError as error:
        refuse(name, f"can't be copied: {error}")
    return copy.contiguous()
