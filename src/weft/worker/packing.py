"""From adapters' folders to images for this model. Any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from weft.checkpoint.compose import Summand, check_sum, sum_images
from weft.checkpoint.pack import AdapterImage, pack_image
from weft.checkpoint.read import AdapterFiles, read_adapter
from weft.core.config import LoraArgs
from weft.worker.loader import LoadedModel


class Packer:
    """Reads, validates, packs and sums adapters of one base model."""

    def __init__(self, model: LoadedModel, args: LoraArgs) -> None:
        self._model = model
        self._args = args

    def read_adapter(self, path: str, expect_digest: str | None) -> AdapterFiles:
        """The content of an adapter's folder, which must have this digest if one is given.
        Raises AdapterError."""
        return read_adapter(Path(path), self._model.table, self._args.max_lora_rank, expect_digest)

    def pack_adapter(self, files: AdapterFiles) -> AdapterImage:
        """Validate what was read, and pack it for the kernels. Raises AdapterInvalid."""
        with self._aside():
            return pack_image(
                files,
                self._model.table,
                self._model.dtype,
                self._args.max_lora_rank,
                self._model.weights,
                self._args.conversion_tolerance,
                self._args.max_added_tokens,
            )

    def check_sum(self, parts: Sequence[tuple[str, Summand]]) -> int:
        """Elements that the sum of adapters, by name, takes. Raises InvalidRequest."""
        return check_sum(parts, self._model.table, self._args.max_lora_rank, self._model.dtype)

    def sum_adapters(
        self, digest: str, parts: Sequence[tuple[AdapterImage, float]], into: torch.Tensor | None
    ) -> AdapterImage:
        """The weighted sum of images; see `sum_images`. Raises InvalidRequest."""
        return sum_images(digest, parts, self._model.table, self._model.dtype, into)

    def _aside(self) -> contextlib.AbstractContextManager[object]:
        """A stream that steps are not on, for what is computed from the base's weights."""
        if self._model.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._model.device))  # type: ignore[no-untyped-call]
