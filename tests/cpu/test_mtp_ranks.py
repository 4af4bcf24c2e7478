"""The head for several tokens is divided over ranks as the layers of its base are."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kinds import FAMILIES, VOCAB, make_base
from mtp_heads import add_head
from rank_threads import on_ranks

from weft import LLM
from weft.core.config import ModelArgs
from weft.core.errors import ConfigError
from weft.kernels.attention import KVCache, make_batch
from weft.kernels.collective.base import ALONE, Ranks
from weft.kernels.linear import DenseWeight
from weft.kernels.ops import Ops
from weft.models import loading
from weft.models.decoder import Decoder, StepContext, allocate_kv_cache
from weft.models.loading import LoadedModel, load_model
from weft.models.mtp import MtpHead, head_config

TOKENS = 11


class Counted:
    """A tensor in a file, of which is counted what is read."""

    def __init__(self, stored: Any, read: list[int]) -> None:
        self._stored, self._read = stored, read
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, where: Any) -> torch.Tensor:
        part: torch.Tensor = self._stored[where]
        self._read.append(part.numel())
        return part


def draft(model: LoadedModel, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a rank's head behind any states of the base, and the keys that it keeps."""
    assert model.mtp_head is not None
    decoder = Decoder(model.config, model.weights, Ops(), 64, ranks)
    (cache,) = allocate_kv_cache(head_config(model.config), 6, 4, model.dtype, model.device)
    assert isinstance(cache, KVCache)
    batch = make_batch([TOKENS] * 2, [TOKENS] * 2, [[0, 1, 2], [3, 4, 5]], 4)
    step = StepContext(torch.arange(TOKENS).repeat(2), batch, None, changes_experts=False)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (2 * TOKENS,), generator=random)
    states = torch.randn(2 * TOKENS, model.config.hidden_size, generator=random)
    head = MtpHead(decoder, model.mtp_head, Ops())
    with torch.inference_mode():
        return head.logits(head.forward(ids, states, step, cache), step), cache.k


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize(
    ("family", "num_keys", "quantization"),
    [
        pytest.param("qwen3.5", 2, None, id="dense"),
        pytest.param("qwen3.5", 1, None, id="a key head on both ranks"),
        pytest.param("qwen3.5", 2, "fp8", id="a quantized base"),
        pytest.param("qwen3.5-moe", 2, None, id="experts by width"),
        pytest.param("qwen3-next", 2, None, id="whole experts"),
    ],
)
def test_each_rank_reads_and_computes_its_share(
    family: str,
    num_keys: int,
    quantization: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the base's dtype, however the base is quantized. The keys are those of its own heads."""
    shape = copy.deepcopy(FAMILIES[family])
    shape.num_key_value_heads = num_keys
    make_base(shape, tmp_path)
    tensors = add_head(tmp_path, right=False)
    read: list[int] = []
    stored_tensors = loading.stored_tensors

    def counted(*args: Any) -> dict[str, Any]:
        return {
            name: Counted(stored, read) if name.startswith("mtp.") else stored
            for name, stored in stored_tensors(*args).items()
        }

    monkeypatch.setattr(loading, "stored_tensors", counted)
    args = ModelArgs(str(tmp_path), device="cpu", dtype="float32", quantization=quantization)
    whole_logits, whole_keys = draft(load_model(args, mtp_head=True), ALONE)
    replicated = ["fc.weight", "gate.weight", *(["k_proj", "v_proj"] if num_keys == 1 else [])]
    on_both = sum(
        tensor.numel()
        for name, tensor in tensors.items()
        if tensor.dim() == 1 or any(part in name for part in replicated)
    )
    divided = sum(tensor.numel() for tensor in tensors.values()) - on_both
    models = []
    for rank in range(2):
        read.clear()
        model = load_model(replace(args, tensor_parallel_size=2), rank, mtp_head=True)
        assert model.mtp_head is not None
        assert all(isinstance(m, DenseWeight) for m in model.mtp_head.matrices.values())
        assert sum(read) == on_both + divided // 2
        assert model.mtp_head.num_bytes == sum(read) * model.dtype.itemsize
        models.append(model)
    found = on_ranks(2, lambda ranks: draft(models[ranks.rank], ranks))
    for rank, (logits, keys) in enumerate(found):
        torch.testing.assert_close(logits, whole_logits, atol=1e-4, rtol=1e-4)
        assert torch.equal(logits, found[0][0])
        own = rank * num_keys // 2
        torch.testing.assert_close(keys, whole_keys[:, :, own : own + 1])


def test_a_model_without_a_head_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_base(FAMILIES["llama"], tmp_path)
    monkeypatch.setattr("weft.worker.build.Peers", None)
    with pytest.raises(ConfigError, match="Llama") as caught:
        LLM(tmp_path, speculative="mtp", tensor_parallel_size=2, skip_tokenizer_init=True)
    assert caught.value.param == "speculative"
