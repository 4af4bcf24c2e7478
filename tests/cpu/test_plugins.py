"""A LoRA backend and a format of the base's matrices as somebody else would add them: each is what
is here and nothing more, served by `LLM` under its own name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from engines import MakeLLM
from tiny import ADAPTERS, BASE, ask
from torch import Tensor

from weft import SamplingParams
from weft.core.config import backend_names
from weft.core.errors import ConfigError
from weft.kernels.lora import AdapterPool, LoraBatch, LoraStep, Segment
from weft.kernels.quant import FORMATS, Format
from weft.terminal.options import engine_parameters
from weft.text import load_tokenizer

NAMES = [None, *list(ADAPTERS)[:3]]


# -- a backend: a product for each segment ----------------------------------------------------


class PlainBackend:
    begun = 0

    def __init__(self, pool: AdapterPool) -> None:
        self._pool = pool

    def reserve(self, num_rows: int) -> bool:
        return False

    def begin(self, batch: LoraBatch) -> PlainStep:
        PlainBackend.begun += 1
        return PlainStep(self._pool, batch)


class PlainStep(LoraStep):
    def __init__(self, pool: AdapterPool, batch: LoraBatch) -> None:
        self._pool, self._batch = pool, batch

    def linear(self, y_TO: Tensor, x_TI: Tensor, group: int) -> None:
        self._add(self._batch.segments, y_TO, x_TI, group)

    def head(self, y_NV: Tensor, x_NI: Tensor, group: int) -> None:
        self._add(self._batch.sampled_segments, y_NV, x_NI, group)

    def embedding(self, y_TO: Tensor, ids_T: Tensor, group: int) -> None:
        for slot, start, stop in self._batch.segments:
            if view := self._pool.view(slot, group):
                y_TO[start:stop] += view.a_RI[ids_T[start:stop]] @ view.slices[0].b_OR.t()

    def experts(self, token_P: Tensor, expert_P: Tensor) -> None:
        raise NotImplementedError

    def _add(self, segments: tuple[Segment, ...], y: Tensor, x: Tensor, group: int) -> None:
        for slot, start, stop in segments:
            if view := self._pool.view(slot, group):
                v_TR = x[start:stop] @ view.a_RI.t()
                for s in view.slices:
                    part = y[start:stop, s.out_start : s.out_stop]
                    part += v_TR[:, s.r_start : s.r_stop] @ s.b_OR.t()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that announces the backend as `plain`."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[weft.lora_backends]\nplain = {__name__}:PlainBackend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def generate(make_llm: MakeLLM, **options: object) -> list[list[int]]:
    llm = make_llm(**options)
    prompts = [load_tokenizer(str(BASE)).chat(ask("forest"))] * len(NAMES)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts, params, NAMES)]


@pytest.mark.usefixtures("installed")
def test_a_backend_of_another_distribution_serves(make_llm: MakeLLM) -> None:
    assert backend_names()[-1] == "plain"
    expected = generate(make_llm, lora_backend="torch")
    PlainBackend.begun = 0
    assert generate(make_llm, lora_backend="plain") == expected
    assert PlainBackend.begun >= 8


# -- a format: every value as its half ---------------------------------------------------------


@dataclass(frozen=True)
class HalvedWeight:
    half_OI: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.half_OI.shape

    def apply(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        y_TO = 2 * F.linear(x_TI, self.half_OI)
        return y_TO if bias_O is None else y_TO + bias_O

    def launch(self, x_TI: Tensor, bias_O: Tensor | None, flags: Tensor) -> None:
        return None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return (2 * self.half_OI).to(dtype)


def halve(matrix_OI: Tensor) -> HalvedWeight:
    halved.append(tuple(matrix_OI.shape))
    return HalvedWeight(matrix_OI / 2)


halved: list[tuple[int, ...]] = []


def test_a_format_is_a_row(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(make_llm)
    monkeypatch.setitem(FORMATS, "halved", Format(f"{__name__}:halve", False, "halves of values"))
    halved.clear()
    assert generate(make_llm, quantization="halved") == expected
    assert halved
    flag = next(p for p in engine_parameters() if p.name == "quantization")
    choices, none = get_args(get_args(flag.annotation)[0])
    assert get_args(choices) == (*list(FORMATS)[:-1], "halved")
    assert none is type(None)


def test_an_unknown_format_is_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match=r"'nonesuch'.*fp8, fp8-weight-only") as caught:
        make_llm(quantization="nonesuch")
    assert caught.value.param == "quantization"
