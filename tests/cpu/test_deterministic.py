"""With --deterministic, bits depend on nothing but the request: not on its neighbours, nor on which
of its tokens were computed together."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_kinds import FAMILIES, KINDS, make_adapter, make_base
from continuing import assert_same_bits_at_any_cut, run
from engines import MakeLLM
from handed_in import CONFIG, WEIGHTS

from weft import SamplingParams
from weft.checkpoint.read import AdapterFiles
from weft.core.config import ModelArgs
from weft.core.errors import ConfigError
from weft.core.requests import EngineRequest, Pooling
from weft.kernels.linear import product

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="compiled kernels are for a GPU"
)


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)]
)
def test_any_cut_gives_the_same_bits(make_llm: MakeLLM, dtype: str) -> None:
    assert_same_bits_at_any_cut(make_llm, dtype=dtype)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_any_chunks_give_a_vector_of_the_same_bits(make_llm: MakeLLM, pooling: Pooling) -> None:
    prompt = [(7 * i) % 60 + 4 for i in range(45)]
    request = EngineRequest("a", prompt, SamplingParams(max_tokens=1), seed=0, pooling=pooling)
    vectors = set[bytes | None]()
    for most in (64, 12, 7):
        options = {"max_num_batched_tokens": most, "max_num_seqs": 2}
        llm = make_llm(adapters={}, dtype="float32", deterministic=True, **options)
        (events,) = run(llm, [request]).values()
        vectors.add(events[0].vector)
    assert None not in vectors
    assert len(vectors) == 1


def test_an_image_has_the_same_bits_wherever_the_file_is_in_memory(
    make_llm: MakeLLM, tmp_path: Path
) -> None:
    base = make_base(FAMILIES["llama"], tmp_path / "base")
    make_adapter(base, KINDS["DoRA"], tmp_path / "dora")
    config, weights = ((tmp_path / "dora" / name).read_bytes() for name in (CONFIG, WEIGHTS))
    llm = make_llm(tmp_path / "base", {}, skip_tokenizer_init=True, deterministic=True)
    images = set[bytes]()
    for start in range(0, 64, 4):
        memory = np.zeros(len(weights) + 128, np.uint8)
        begin = start - memory.ctypes.data % 64 + 64
        memory[begin : begin + len(weights)] = np.frombuffer(weights, np.uint8)
        files = AdapterFiles(config, memoryview(memory)[begin : begin + len(weights)])
        image = llm._client.engine._worker.adapters.packer.pack_adapter(files)
        images.add(image.data.view(torch.uint8).numpy().tobytes())
    assert len(images) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_product_does_not_see_the_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_TI, weight_OI, bias_O = (torch.randn(n, dtype=dtype) for n in ((70, 200), (130, 200), (130,)))
    whole_TO = product(x_TI, weight_OI, bias_O, deterministic=True)
    for part in (slice(0, 1), slice(3, 20), slice(5, 70)):
        assert torch.equal(product(x_TI[part], weight_OI, bias_O, True), whole_TO[part])


@pytest.mark.parametrize(
    "option",
    [{"quantization": "fp8"}, {"tensor_parallel_size": 2}],
    ids=lambda each: next(iter(each)),
)
def test_what_can_not_be_deterministic_is_refused(option: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--deterministic") as raised:
        ModelArgs("model", deterministic=True, **option)
    assert raised.value.param == "deterministic"


def test_backends_that_are_not_are_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(ConfigError, match="'torch'"):
        make_llm(deterministic=True, lora_backend="torch")


@INTERPRETED
@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(128, 256), (70, 200)], ids=["cut", "odd"])
def test_rows_of_triton_products_do_not_see_the_others(shape: tuple[int, int]) -> None:
    from deterministic_cases import assert_rows_of_products_are_alone

    numbers = [1, 16, 17, 64, 65]
    assert_rows_of_products_are_alone(torch.device("cpu"), torch.float32, shape, numbers)


@INTERPRETED
@pytest.mark.parametrize(
    ("window", "chunked"),
    [
        pytest.param(None, False, marks=pytest.mark.exhaustive),
        (50, False),
        pytest.param(50, True, marks=pytest.mark.exhaustive),
    ],
)
def test_rows_of_triton_attention_do_not_see_the_others(window: int | None, chunked: bool) -> None:
    from deterministic_cases import assert_rows_of_attention_are_alone

    heads, cuts = (4, 2, 16), [[40, 100]]
    device, dtype = torch.device("cpu"), torch.float32
    assert_rows_of_attention_are_alone(device, dtype, heads, window, 150, cuts, chunked)
