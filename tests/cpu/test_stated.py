"""A base's configuration read without transformers: what transformers reads, or no answer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from weft.bench.presets import PRESETS
from weft.core.errors import ConfigError
from weft.models.config import ModelConfig, _build, _hf_config
from weft.models.families import FAMILIES, family_of
from weft.models.stated import read_stated

Raw = dict[str, Any]

SIZES: Raw = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "vocab_size": 99,
}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
EXPERTS: Raw = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [2],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN: Raw = {"sliding_window": 32, "use_sliding_window": False, "rope_theta": 1000000.0}


def published(architecture: str, *parts: Raw, **fields: Any) -> Raw:
    found: Raw = {"architectures": [architecture], "model_type": FAMILIES[architecture].model_type}
    for part in (SIZES, *parts, fields):
        found |= part
    return found


PUBLISHED: dict[str, Raw] = {
    "Llama 3": published("LlamaForCausalLM", rope_theta=5e5, rope_scaling=None),
    "Llama 3.2": published(
        "LlamaForCausalLM",
        rope_theta=5e5,
        rope_scaling=LLAMA3,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "linear": published(
        "LlamaForCausalLM", rope_theta=10000, rope_scaling={"type": "linear", "factor": 2}
    ),
    "Mistral 0.1": published("MistralForCausalLM", sliding_window=32, rope_theta=1e4),
    "Mistral 0.3": published("MistralForCausalLM", sliding_window=None, rope_theta=1e6),
    "Qwen 2.5": published("Qwen2ForCausalLM", QWEN, max_window_layers=2),
    "Qwen 2.5, windows": published(
        "Qwen2ForCausalLM", QWEN, use_sliding_window=True, max_window_layers=2
    ),
    "Qwen 2.5, yarn": published(
        "Qwen2ForCausalLM", QWEN, rope_scaling={"type": "yarn", "factor": 4.0}
    ),
    "Qwen 3": published("Qwen3ForCausalLM", QWEN, head_dim=16, attention_bias=False),
    "Qwen 3, windows": published(
        "Qwen3ForCausalLM",
        QWEN,
        head_dim=16,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"] * 2,
    ),
    "Qwen 3 MoE": published("Qwen3MoeForCausalLM", QWEN, EXPERTS, head_dim=16),
    "Mixtral": published(
        "MixtralForCausalLM",
        sliding_window=None,
        rope_theta=1e6,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2],
    "long_factor": [1.5, 2.5, 4.0],
}
PUBLISHED |= {
    "Phi 3": published(
        "Phi3ForCausalLM",
        rope_theta=1e4,
        rope_scaling=None,
        sliding_window=33,
        attention_bias=False,
        original_max_position_embeddings=64,
    ),
    "Phi 4 mini": published(
        "Phi3ForCausalLM",
        rope_theta=1e4,
        rope_scaling=LONGROPE,
        sliding_window=512,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=64,
        tie_word_embeddings=True,
    ),
    "OLMo 2": published("Olmo2ForCausalLM", rope_theta=5e5, rope_scaling=None),
}
EVERY = pytest.mark.parametrize("raw", PUBLISHED.values(), ids=PUBLISHED.keys())


def outcome(raw: Raw, read: Callable[[], Any]) -> ModelConfig | None:
    """None: refused."""
    try:
        architecture = raw["architectures"][0]
        return _build(architecture, family_of(architecture, raw), read(), raw, ())
    except ConfigError:
        return None


def theirs(raw: Raw, folder: Path) -> ModelConfig | None:
    (folder / "config.json").write_text(json.dumps(raw))
    return outcome(raw, lambda: by_transformers(raw, folder))


def by_transformers(raw: Raw, folder: Path) -> Any:
    return _hf_config(folder, raw, family_of(raw["architectures"][0], raw))


@EVERY
def test_published_files_are_read_as_transformers_reads_them(raw: Raw, tmp_path: Path) -> None:
    ours = outcome(raw, lambda: read_stated(raw))
    assert ours is not None and ours == theirs(raw, tmp_path)


@EVERY
def test_saved_files_are_too(raw: Raw, tmp_path: Path) -> None:
    """What transformers writes today of the same."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    by_transformers(raw, tmp_path).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    ours = outcome(saved, lambda: read_stated(saved))
    assert ours is not None and ours == theirs(saved, tmp_path)


OTHER = [None, 0, -1, 3, 2.5, True, "x", ["full_attention"] * 4, {"rope_type": "linear"}]
MORE: Raw = {
    "head_dim": 6,
    "layer_types": ["sliding_attention"] * 4,
    "num_local_experts": 4,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
    "per_layer_config": {"1": {"num_key_value_heads": 2}},
    "rope_parameters": {"rope_theta": 9.0, "rope_type": "yarn", "factor": 2.0},
    "rope_scaling": {"full_attention": {"rope_theta": 9.0, "rope_type": "default"}},
    "rope_theta": 123.0,
    "sliding_window": 16,
    "tie_word_embeddings": True,
}


@EVERY
def test_other_files_are_read_as_transformers_does_or_not_at_all(raw: Raw, tmp_path: Path) -> None:
    """With any field left out, of another value or type, or added."""
    plain = set(SIZES) - {"hidden_act", "torch_dtype"}
    fields = [name for name in raw if name not in ("architectures", "model_type", "torch_dtype")]
    if raw is not PUBLISHED["Llama 3"]:  # once is enough for what all families share
        fields = [name for name in fields if name not in plain]
    changed = [{k: v for k, v in raw.items() if k != name} for name in fields]
    changed += [raw | {name: value} for name in fields for value in OTHER]
    changed += [raw | {name: value} for name, value in MORE.items()]
    answered = 0
    for each in changed:
        if (stated := read_stated(each)) is not None:
            answered += 1
            found = outcome(each, lambda stated=stated: stated)
            assert found == theirs(each, tmp_path), each
    assert answered


def test_what_phi_3_can_not_have_is_left_to_transformers() -> None:
    partial = {"rope_scaling": {**LONGROPE, "partial_rotary_factor": []}}
    for change in ({"num_attention_heads": 0}, {"partial_rotary_factor": math.nan}, partial):
        assert read_stated(PUBLISHED["Phi 4 mini"] | change) is None


@pytest.mark.parametrize("field", ["is_encoder_decoder", "of_a_later_release"])
def test_fields_that_are_not_listed_are_left_to_transformers(field: str) -> None:
    """It may refuse them, and knows of which ones to warn."""
    assert read_stated(PUBLISHED["Llama 3"] | {field: True}) is None


def test_presets_have_what_published_files_have(tmp_path: Path) -> None:
    """Else a start that is measured would import transformers, and take seconds longer."""
    types = {raw["model_type"] for raw in PUBLISHED.values()}
    for raw in PRESETS.values():
        if raw["model_type"] in types:
            ours = outcome(raw, lambda raw=raw: read_stated(raw))
            assert ours is not None and ours == theirs(raw, tmp_path)


def test_transformers_is_not_imported() -> None:
    code = (
        "import sys; from weft.models.config import load_model_config;"
        f"load_model_config({str(tiny.BASE)!r}); print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.stdout == "False\n", done.stderr
