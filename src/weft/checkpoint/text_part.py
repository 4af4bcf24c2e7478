"""Renames the tensors of adapters for models that see images, if they adapt the text model.

In such a model, the modules of the text model have other names than in the text model alone. So do
the tensors of an adapter that was trained on it:

    base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight
    base_model.model.language_model.model.layers.0.mlp.up_proj.lora_A.weight   (older)
    base_model.model.language_model.layers.0.mlp.up_proj.lora_A.weight         without a head
    base_model.model.model.layers.0.mlp.up_proj.lora_A.weight                  the text model alone
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.checkpoint.parts import PREFIX
from weft.checkpoint.read import Stored
from weft.checkpoint.refuse import refuse
from weft.core.targets import TEXT_PREFIXES, text_name

Naming = Mapping[str, str]
"""Prefixes of module names in the text model alone, mapped to those in the trained model."""


def text_part(tensors: Mapping[str, Stored]) -> tuple[dict[str, Stored], Naming]:
    """The tensors by their names for the text model alone, and the prefixes in the trained model.
    Raises AdapterInvalid for a tensor of another part than the text model."""
    found: dict[str, Stored] = {}
    naming: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            found[name] = tensor
            continue
        module = name.removeprefix(PREFIX)
        own = text_name(module)
        if own is None:
            refuse(name, "belongs to the part that sees images, and only the text model is served")
        if own in found:
            refuse(name, f"is for the same weights as {found[own].name}")
        found[PREFIX + own] = tensor
        if own != module:
            start, to = next(each for each in TEXT_PREFIXES if module.startswith(each[0]))
            naming |= {to: start} if to else {}
    return found, naming
