"""A base in fp8: products against their definition, and served adapters against `peft` over the
same rounded base, in float32."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from engines import MakeLLM
from fp8_cases import as_fp8, as_fp8_weight
from peft import PeftModel
from tiny import ADAPTERS, BASE, ask
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from weft import SamplingParams
from weft.core.errors import ConfigError
from weft.kernels.linear import Weight
from weft.kernels.quant import e4m3, fp8
from weft.kernels.quant.rounded import in_fp8
from weft.text import load_tokenizer

NAMES: list[str | None] = [None, *list(ADAPTERS)[:5]]
TOKENS = 16
MAX_ERROR = {"fp8-weight-only": 1e-3, "fp8": 1.0}
"""Of a log-probability. Where inputs are rounded too, sums in another order (1e-6 apart) now and
then round one to its other neighbour, 6 % away. At most a tenth of the positions may see that."""


# -- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_product_is_that_of_the_rounded_operands(dynamic: bool) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(5, 96), torch.randn(70, 96), torch.randn(70)
    x[2] = 0
    w[3] = 0
    weight: Weight = fp8.quantize_dynamic(w) if dynamic else in_fp8(w)
    values = as_fp8(w) if dynamic else as_fp8_weight(w)
    expected = (as_fp8(x) if dynamic else x) @ values.t() + b
    torch.testing.assert_close(weight.apply(x, b), expected)
    torch.testing.assert_close(weight.apply(x, None), expected - b)
    assert weight.shape == w.shape
    assert torch.equal(weight.dequantized(torch.float32), values)


def test_a_gpu_takes_whole_units_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's share of a layer may have any number of outputs, such as a few strengths."""
    triton_fp8 = pytest.importorskip("weft.kernels.quant.triton_fp8")
    monkeypatch.setattr(triton_fp8, "quantize_rows", e4m3.quantize_rows)
    torch.manual_seed(0)
    x, w, b = (torch.randn(n, dtype=torch.bfloat16) for n in ((5, 64), (24, 64), (24,)))
    weight = replace(fp8.quantize_dynamic(w), dense_OI=None)
    assert weight.q_OI.shape == (32, 64) and weight.shape == (24, 64)
    assert torch.equal(weight.dequantized(torch.float32), as_fp8(w.float()))
    wanted = as_fp8(x.float()) @ as_fp8(w.float()).t()
    for bias, more in ((None, 0), (b, b.float())):
        y = weight.apply(x, bias)
        assert y.is_contiguous()
        torch.testing.assert_close(y.float(), wanted + more, rtol=2e-2, atol=4e-2)


def test_inputs_that_a_gpu_can_not_multiply_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="24 inputs") as caught:
        fp8.quantize_dynamic(torch.empty(32, 24, device="meta"))
    assert caught.value.param == "quantization"


def test_a_gpu_without_products_in_fp8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 has none, an L40S does."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="fp8-weight-only") as caught:
        fp8.check_products(torch.device("cuda"), 32, torch.bfloat16)
    assert caught.value.param == "quantization"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    fp8.check_products(torch.device("cuda"), 32, torch.bfloat16)
    with pytest.raises(ConfigError, match="bfloat16") as caught:
        fp8.check_products(torch.device("cuda"), 32, torch.float16)
    assert caught.value.param == "dtype"


def test_relative_error_of_rounding_is_bounded() -> None:
    """Three bits after the leading one: at most 1 / 16 of a value, or of the smallest step."""
    w = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    error = (fp8.quantize_dynamic(w).dequantized(torch.float32) - w).abs()
    smallest = w.abs().amax(1, keepdim=True) / 448 * 2**-10
    assert bool((error <= torch.maximum(w.abs() / 16, smallest) * 1.0001).all())


# -- the served model --------------------------------------------------------------------------


class Oracle:
    """peft over the example model whose layers hold rounded weights, and (dynamic) round their
    inputs; LoRA sees the inputs as they are."""

    def __init__(self, dynamic: bool) -> None:
        base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        for layer in base.model.layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    round_ = as_fp8 if dynamic else as_fp8_weight
                    module.weight.data = round_(module.weight.data)
                    if dynamic:
                        module.register_forward_pre_hook(lambda _, args: (as_fp8(args[0]),))
        with warnings.catch_warnings(action="ignore"):
            model = None
            for name in NAMES:
                if name is None:
                    continue
                if model is None:
                    model = PeftModel.from_pretrained(base, ADAPTERS[name], adapter_name=name)
                else:
                    model.load_adapter(ADAPTERS[name], adapter_name=name)
        assert model is not None
        self.model = model.eval()

    @torch.inference_mode()
    def logprobs(self, name: str | None, ids: list[int]) -> Tensor:
        """(len(ids), V)"""
        batch = torch.tensor([ids])
        if name is None:
            with self.model.disable_adapter():
                return self.model(input_ids=batch).logits[0].log_softmax(-1)
        self.model.set_adapter(name)
        return self.model(input_ids=batch).logits[0].log_softmax(-1)


@pytest.mark.parametrize("quantization", ["fp8", "fp8-weight-only"])
def test_adapters_on_an_fp8_base(quantization: str, make_llm: MakeLLM) -> None:
    llm = make_llm(quantization=quantization)
    tokenizer = load_tokenizer(str(BASE))
    prompts = [tokenizer.chat(ask(word)) for word in ("forest", "winter")]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=5, ignore_eos=True)
    cases = [(name, prompt) for prompt in prompts for name in NAMES]
    mixed = llm.generate([p for _, p in cases], params, [n for n, _ in cases])
    oracle = Oracle(dynamic=quantization == "fp8")
    errors: list[float] = []
    for (name, prompt), output in zip(cases, mixed, strict=True):
        expected = oracle.logprobs(name, prompt + output.token_ids[:-1])[len(prompt) - 1 :]
        assert output.logprobs is not None
        for row, token, entry in zip(expected, output.token_ids, output.logprobs, strict=True):
            assert entry is not None
            assert float(row[token]) >= float(row.max()) - MAX_ERROR[quantization]
            errors += [abs(logprob - float(row[other])) for other, logprob in entry.top]
    assert max(errors) < MAX_ERROR[quantization]
    assert sorted(errors)[len(errors) * 9 // 10] < 1e-3
