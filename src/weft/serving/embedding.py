"""Turns hidden states into the vector of a text, by the pooling rule in the model's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.adapters import ClassHead
from weft.core.errors import ConfigError, InvalidRequest
from weft.core.requests import Pooling

Vectors = NDArray[np.float32]

_MODES: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_ENCODERS = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EmbeddingRule:
    """How hidden states become a vector, from the files that sentence-transformers saves with a
    model. The defaults are for a plain decoder, whose last token has seen all others."""

    pooling: Pooling = "last"
    normalize: bool = True
    """Whether vectors are scaled to length 1."""
    refused: str = ""
    """Why this model's vectors can't be made correctly here; "" if they can."""

    def check(self) -> None:
        """Raise InvalidRequest if vectors of this model are not served."""
        if self.refused:
            raise InvalidRequest(f"vectors of this model are not served: {self.refused}", "model")


def embedding_rule(folder: Path) -> EmbeddingRule:
    """Read the rule from `modules.json` in a model's folder and the pooling config that it names.
    Raises ConfigError for a file that is not JSON of the right form."""
    pooling_folder, normalize = "1_Pooling", True
    if (modules := _read(folder / "modules.json")) is not None:
        try:
            kinds = {str(each["type"]).rpartition(".")[2]: str(each["path"]) for each in modules}
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{folder}/modules.json is not a list of modules", "model") from error
        if other := [kind for kind in kinds if kind not in _ENCODERS]:
            return EmbeddingRule(refused=f"modules.json asks for {other[0]}")
        pooling_folder, normalize = kinds.get("Pooling", pooling_folder), "Normalize" in kinds
    stated = _read(folder / pooling_folder / "config.json")
    if stated is None:
        return EmbeddingRule(normalize=normalize)
    if not isinstance(stated, dict):
        raise ConfigError(f"{folder}/{pooling_folder}/config.json is no JSON object", "model")
    modes = _modes(stated)
    served = [_MODES[mode] for mode in modes if mode in _MODES]
    if len(modes) != 1 or not served:
        said = " and ".join(modes) or "none"
        why = f"its pooling is {said}, and only lasttoken and mean are served"
        return EmbeddingRule(refused=why)
    return EmbeddingRule(served[0], normalize)


def _modes(stated: Mapping[str, Any]) -> list[str]:
    """The pooling modes that a config switches on, in its newer or its older form."""
    if isinstance(mode := stated.get("pooling_mode"), str):
        return [mode]
    prefix = "pooling_mode_"
    return [k.removeprefix(prefix) for k, on in stated.items() if k.startswith(prefix) and on]


def _read(path: Path) -> Any:
    """The content of a JSON file; None if there is no file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}", "model") from error


DECODER = EmbeddingRule()
"""The rule for a model whose folder has none."""


def as_vectors(pooled: list[bytes]) -> Vectors:
    """The engine's answers (float32 as bytes) as an array with one row per request."""
    return np.stack([np.frombuffer(each, "<f4") for each in pooled])


def normalized(vectors: Vectors) -> Vectors:
    """The rows scaled to length 1; a row of zeros stays as it is."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return scaled


def shortened(vectors: Vectors, dimensions: int | None) -> Vectors:
    """The first `dimensions` numbers of each row (None: all). Raises InvalidRequest if a row has
    fewer."""
    size = vectors.shape[1]
    if dimensions is not None and dimensions > size:
        message = f"dimensions must be at most {size}, the model's hidden size, got {dimensions}"
        raise InvalidRequest(message, "dimensions")
    return vectors[:, :dimensions]


def probabilities(head: ClassHead, vectors: Vectors) -> Vectors:
    """The probability of each label, (texts, labels), from the hidden states of the texts' last
    tokens: a softmax over several labels, the sigmoid of a single one."""
    weight_LI = np.frombuffer(head.weight, "<f4").reshape(head.num_labels, -1)
    logits = vectors @ weight_LI.T
    if head.num_labels == 1:
        sure: Vectors = 0.5 + 0.5 * np.tanh(logits / 2)
        return sure
    powers = np.exp(logits - logits.max(1, keepdims=True))
    shares: Vectors = powers / powers.sum(1, keepdims=True)
    return shares
