"""Assembles the matrices of linear layers while a model is loaded.

A matrix gets its memory with its first tensor, and is put into its final format with its last one.
So only one matrix at a time is in memory in both. If there are kernels for a quantized checkpoint's
tensors, these are packed as they come, and never expanded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from weft.kernels.linear import DenseWeight, Weight
from weft.kernels.quant import Format
from weft.kernels.quant.packed import Codes
from weft.kernels.quant.packed_weight import PackedWeight, concatenated, pack
from weft.models.quantized.values import Dequantized
from weft.models.weights import Place


class LinearMatrices:
    """Takes the tensors of linear layers, and puts their matrices into `matrices` by key."""

    def __init__(
        self,
        matrices: dict[str, Weight],
        places: Iterable[Place],
        form: Format | None,
        empty: Callable[[str], Tensor],
        fits: Callable[[Codes, torch.dtype], bool] | None,
    ) -> None:
        """`form`: the format of the matrices. `empty`: makes a dense matrix, by key. `fits`:
        tells which quantized tensors are packed for a dtype of inputs; None: no tensors are."""
        self._matrices, self._form, self._empty, self._fits = matrices, form, empty, fits
        self._missing = Counter(place.of[0] for place in places if place.of is not None)
        self._dense: dict[str, Tensor] = {}
        self._packed: dict[str, dict[int, PackedWeight]] = {}
        """By the matrix's key, and by first row."""

    def take(self, place: Place, stored: Any) -> None:
        """Take a tensor whose place is in a linear layer."""
        assert place.of is not None
        key, start = place.of
        packed = self._pack(place, stored)
        if packed is not None:
            self._packed.setdefault(key, {})[start] = packed
        else:
            self._fill(place, stored)
        self._missing[key] -= 1
        if not self._missing[key]:
            self._matrices[key] = self._whole(key)

    def _pack(self, place: Place, stored: Any) -> PackedWeight | None:
        """This rank's part of a tensor, packed; None if it can't be packed."""
        assert place.view is not None
        if self._fits is None or not isinstance(stored, Dequantized):
            return None
        codes = stored.codes()
        if codes is None:
            return None
        codes = codes.rows(place.rows)
        if place.columns is not None:
            codes = codes.columns(place.columns)
        dtype = place.view.dtype
        return None if codes is None or not self._fits(codes, dtype) else pack(codes, dtype)

    def _fill(self, place: Place, stored: Any) -> None:
        assert place.of is not None and place.view is not None
        (key, start), rows = place.of, len(place.view)
        if key not in self._dense:
            self._dense[key] = self._empty(key)
        place._replace(view=self._dense[key][start : start + rows]).fill(stored)

    def _whole(self, key: str) -> Weight:
        """A matrix whose tensors have all come, in its final format."""
        packed = self._packed.pop(key, {})
        dense = self._dense.pop(key, None)
        if dense is None:
            whole = concatenated([packed[start] for start in sorted(packed)])
            if whole is not None:
                return whole
            dense = self._empty(key)
        for start, part in packed.items():
            dense[start : start + part.shape[0]] = part.dequantized(dense.dtype)
        return DenseWeight(dense) if self._form is None else self._form.quantize(dense)
