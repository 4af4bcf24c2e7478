"""Reads adapters that were trained for other tasks than continuing a text.

A model that classifies texts (SEQ_CLS) is the base without its head, and with a `score` layer that
reads the hidden state of the last token. PEFT saves that layer whole, beside the adapter:

    base_model.model.score.weight          (labels, hidden)

A model for features (FEATURE_EXTRACTION) is the base alone, whose modules then have names without
the `model.` in front.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.checkpoint.fields import Fields, load_object
from weft.checkpoint.parts import PREFIX
from weft.checkpoint.read import MAX_CONFIG_BYTES, AdapterFiles, Stored, parse_stored
from weft.checkpoint.refuse import refuse, show
from weft.core.adapters import ClassHead
from weft.core.errors import AdapterUnavailable
from weft.core.files import CONFIG_FILE, WEIGHTS_FILE
from weft.core.folders import Deadline, Folder
from weft.core.targets import TargetTable, vocabulary

TASKS = ("CAUSAL_LM", "SEQ_CLS", "FEATURE_EXTRACTION")
_SCORE = f"{PREFIX}score.weight"
_HEADS = ("score", "classifier")
"""What PEFT itself lists in `modules_to_save` for SEQ_CLS; decoders only have the first."""
MAX_LABELS = 1 << 14


def check_task(fields: Fields) -> None:
    """Raise AdapterInvalid for a task that is not served."""
    task = fields.get("task_type")
    if task not in (None, *TASKS):
        refuse("task_type", f"only {', '.join(TASKS)} are served, got {show(task)}")


def classifies(fields: Fields) -> bool:
    return fields.get("task_type") == "SEQ_CLS"


def without_heads(fields: Fields) -> Fields:
    """The fields without the heads that PEFT adds, as of an adapter for the base alone."""
    saved = fields.get("modules_to_save")
    if not (classifies(fields) and isinstance(saved, list)):
        return fields
    return {**fields, "modules_to_save": [name for name in saved if name not in _HEADS] or None}


def base_part(
    fields: Fields, tensors: Mapping[str, Stored], table: TargetTable | None
) -> tuple[Mapping[str, Stored], Mapping[str, str]]:
    """The tensors that are for modules of the base, by the names that these have in a language
    model, and what becomes of the beginnings of names in the model that was trained. Raises
    AdapterInvalid unless a classifier has a head that fits the `table`."""
    if classifies(fields):
        hidden = None if table is None else vocabulary(table, "head")[1]
        _head_of(tensors, hidden)
        return {name: tensor for name, tensor in tensors.items() if name != _SCORE}, {}
    bare = [name for name in tensors if not name.startswith(PREFIX + "model.")]
    if fields.get("task_type") != "FEATURE_EXTRACTION" or len(bare) < len(tensors):
        return tensors, {}
    renamed = {  # VeRA's shared matrices are of no module, and keep their names
        name.replace(PREFIX, f"{PREFIX}model.", 1): tensor for name, tensor in tensors.items()
    }
    return renamed, {"model.": ""}


def read_head(folder: Folder, digest: str, max_bytes: int, deadline: Deadline) -> ClassHead | None:
    """The head of an adapter that was accepted with this digest, from its folder; None if it is for
    another task. Raises AdapterUnavailable if the folder's content has changed."""
    config = folder.read(CONFIG_FILE, MAX_CONFIG_BYTES, deadline)
    if config is None or not classifies(load_object(bytes(config))):
        return None
    weights = folder.read(WEIGHTS_FILE, max_bytes, deadline)
    if weights is None or AdapterFiles(bytes(config), weights).digest != digest:
        raise AdapterUnavailable("the adapter's files changed while it was loaded", "lora_path")
    head = _head_of(parse_stored(weights), None)
    values = np.ascontiguousarray(head.values(), "<f4")
    return ClassHead(head.shape[0], values.tobytes())


def _head_of(tensors: Mapping[str, Stored], hidden: int | None) -> Stored:
    head = tensors.get(_SCORE)
    if head is None:
        refuse("task_type", f"is SEQ_CLS, but the file lacks {_SCORE}, the layer that classifies")
    fits = len(head.shape) == 2 and hidden in (None, head.shape[1])
    if not fits or not 1 <= head.shape[0] <= MAX_LABELS:
        wanted = f"(labels, {hidden})" if hidden else "(labels, hidden)"
        refuse(_SCORE, f"has the shape {show(head.shape)}, and the base model makes {wanted}")
    if not np.isfinite(head.largest()):
        refuse(_SCORE, "holds NaN or infinite values")
    return head
