"""The decoder against transformers, for every family; and what loading refuses."""

from __future__ import annotations

import copy
import json
import math
import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kinds import auto_class
from safetensors.torch import load_file, save_file
from transformers import (
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    CwmConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HyperCLOVAXConfig,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OlmoHybridConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SarvamMLAConfig,
    SarvamMoEConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    VaultGemmaConfig,
    YoutuConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weft.core.config import ModelArgs
from weft.core.errors import ConfigError
from weft.core.units import MAX_GUESSES
from weft.kernels.attention import make_batch
from weft.kernels.collective.base import ALONE
from weft.kernels.delta import StateCache, StateRows
from weft.kernels.lora import LoraStep
from weft.kernels.ops import Ops
from weft.models.blueprint import num_parameters, target_table
from weft.models.builder import LayerBuilder
from weft.models.config import (
    ModelConfig,
    load_model_config,
    resolve_model,
    sampling_defaults,
)
from weft.models.decoder import Decoder, StepContext, allocate_kv_cache, kv_bytes_per_block
from weft.models.families import FAMILIES, OTHERS
from weft.models.fields import READ, WITHOUT_EFFECT, check_fields
from weft.models.files import sample_hash
from weft.models.loading import dummy_weights, load_weights
from weft.models.rope import inverse_frequencies
from weft.models.weights import Weights

BLOCK = 4
LENGTHS = [37, 9, 22, 1, 50]
SIZES: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **more}}


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
YARN_FULL = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=4.0,
    beta_slow=2.0,
    mscale=1.0,
    mscale_all_dim=0.5,
    truncate=False,
)
GROWING = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    max_position_embeddings=64,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.3,
)
PARTLY = {"partial_rotary_factor": 0.5}

NO_PAD: dict[str, Any] = {"pad_token_id": None}
WITHOUT_MLP = {n: v for n, v in SIZES.items() if n != "intermediate_size"}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROUTED = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}

VISION = {"hidden_size": 8, "intermediate_size": 8, "depth": 1, "num_heads": 2, "patch_size": 2}
MROPE = rope("default", mrope_section=[4, 1, 3], mrope_interleaved=True)
"""Positions of images have three parts, in turns or one after the other; those of text are alike in
all parts."""

SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 8.0,
}
GRANITE4 = {
    "layer_types": ["full_attention"] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
}
"""The inner width of the MLP is not `intermediate_size`."""
NEMOTRON_H = {
    **{n: v for n, v in SIZES.items() if n != "num_hidden_layers"},
    **ROUTED,
    "moe_shared_expert_intermediate_size": 28,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 12,
    "conv_kernel": 3,
}
"""How many layers there are follows from their types."""

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-mha": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama3-tied": LlamaConfig(**SIZES, **LLAMA3, tie_word_embeddings=True),
    "llama-linear": LlamaConfig(**SIZES, **rope("linear", factor=2.5)),
    "llama-yarn": LlamaConfig(**SIZES, **YARN),
    "llama-yarn-full": LlamaConfig(**SIZES, **YARN_FULL),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=12),
    "llama4": Llama4TextConfig(
        **SIZES | {"num_hidden_layers": 4, "intermediate_size": 20},
        **NO_PAD,
        **LLAMA3,
        intermediate_size_mlp=48,
        head_dim=8,
        num_local_experts=5,
        interleave_moe_layer_step=2,
        attention_chunk_size=8,
        floor_scale=6,
        attn_scale=0.8,
    ),
    # The experts' matrices are square, so that their shape does not tell that they are transposed.
    "llama4-layers-named": Llama4TextConfig(
        **SIZES | {"intermediate_size": 16},
        **NO_PAD,
        intermediate_size_mlp=48,
        head_dim=12,
        num_local_experts=4,
        moe_layers=[0, 2],
        no_rope_layers=[0, 1, 0],
        layer_types=["chunked_attention", "full_attention", "full_attention"],
        attention_chunk_size=5,
        attn_temperature_tuning=False,
        use_qk_norm=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "llama4-dense-yarn": Llama4TextConfig(
        **SIZES,
        **NO_PAD,
        **YARN,
        intermediate_size_mlp=40,
        head_dim=8,
        moe_layers=[],
        attention_chunk_size=None,
        floor_scale=50,
        use_qk_norm=False,
    ),
    "internlm3-dynamic": InternLM3Config(**SIZES, **rope("dynamic", factor=6.0), head_dim=12),
    "iquest-coder": IQuestCoderConfig(**SIZES, head_dim=8, tie_word_embeddings=True),
    "arcee": ArceeConfig(**SIZES, **YARN, head_dim=12),
    "arcee-tied-bias": ArceeConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "nemotron": NemotronConfig(**SIZES),
    "nemotron-tied-bias": NemotronConfig(
        **SIZES,
        **rope("linear", factor=2.5, partial_rotary_factor=0.25),
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "jais2": Jais2Config(**SIZES),
    "jais2-tied-without-biases": Jais2Config(
        **SIZES,
        **YARN,
        head_dim=12,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
    ),
    "apertus": ApertusConfig(**SIZES, head_dim=12),
    "apertus-tied-bias": ApertusConfig(
        **SIZES, **YARN, attention_bias=True, tie_word_embeddings=True
    ),
    "seed-oss": SeedOssConfig(**SIZES, head_dim=12),
    "seed-oss-other-biases-tied": SeedOssConfig(
        **SIZES,
        **YARN,
        head_dim=16,
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": MistralConfig(**SIZES, sliding_window=7),
    "ministral": MinistralConfig(
        **SIZES,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "ministral3": Ministral3Config(
        **SIZES,
        **NO_PAD,
        **GROWING,
        head_dim=16,
    ),
    "ministral3-window-tied": Ministral3Config(
        **SIZES,
        **NO_PAD,
        **rope("default", original_max_position_embeddings=5, llama_4_scaling_beta=0.1),
        head_dim=8,
        sliding_window=7,
        tie_word_embeddings=True,
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-window": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=12, mlp_only_layers=[1]
    ),
    "qwen2-moe-window-tied": Qwen2MoeConfig(
        **SIZES,
        **EXPERTS,
        shared_expert_intermediate_size=24,
        norm_topk_prob=True,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=6,
        tie_word_embeddings=True,
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3-tied-bias": Qwen3Config(
        **SIZES, head_dim=16, tie_word_embeddings=True, attention_bias=True, **YARN
    ),
    "qwen3-window": Qwen3Config(
        **SIZES,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16),
    "qwen3-moe-mixed": Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 5},
        **EXPERTS,
        head_dim=16,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=True,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3-moe-window": Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=16, use_sliding_window=True, sliding_window=5
    ),
    "qwen3-moe-dense": Qwen3MoeConfig(**SIZES, head_dim=16, mlp_only_layers=[0, 1, 2]),
    "qwen2-vl": Qwen2VLConfig(
        text_config={**SIZES, **rope("default", mrope_section=[1, 1, 2])},
        vision_config=VISION | {"embed_dim": 8},
        tie_word_embeddings=True,
    ),
    "qwen2.5-vl": Qwen2_5_VLConfig(
        text_config={**SIZES, **rope("default", mrope_section=[1, 1, 2])}, vision_config=VISION
    ),
    "qwen2.5-vl-yarn-window-tied": Qwen2_5_VLConfig(
        text_config={
            **SIZES,
            "rope_parameters": {**YARN["rope_parameters"], "mrope_section": [2, 1, 1]},
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
        vision_config=VISION,
        tie_word_embeddings=True,
    ),
    "qwen3-vl-bias": Qwen3VLConfig(
        text_config={**SIZES, **MROPE, "head_dim": 16, "attention_bias": True},
        vision_config=VISION,
        tie_word_embeddings=True,
    ),
    "qwen3-vl-moe": Qwen3VLMoeConfig(
        text_config={**SIZES, **EXPERTS, **MROPE, "head_dim": 16, "mlp_only_layers": [1]},
        vision_config=VISION,
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "mixtral-window": MixtralConfig(
        **SIZES, num_local_experts=3, num_experts_per_tok=3, sliding_window=7, head_dim=12
    ),
    "minimax-m2": MiniMaxM2Config(
        **SIZES,
        **rope("default", partial_rotary_factor=0.5),
        num_local_experts=6,
        num_experts_per_tok=3,
        head_dim=12,
        tie_word_embeddings=True,
    ),
    "phi3": Phi3Config(**SIZES, **NO_PAD, sliding_window=7),
    "phi3-partial-tied": Phi3Config(
        **SIZES, **NO_PAD, **rope("default", partial_rotary_factor=0.75), tie_word_embeddings=True
    ),
    "phi3-longrope": Phi3Config(
        **SIZES | {"max_position_embeddings": 256},
        **NO_PAD,
        **rope(
            "longrope",
            short_factor=[1.0, 1.5, 2.5],
            long_factor=[2.0, 4.0, 8.0],
            partial_rotary_factor=0.75,
        ),
        original_max_position_embeddings=64,
    ),
    "phi3-longrope-equal": Phi3Config(
        **SIZES,
        **NO_PAD,
        **rope("longrope", short_factor=[1.0, 1.5, 2.5, 3.0], long_factor=[1.0, 1.5, 2.5, 3.0]),
        original_max_position_embeddings=16,
    ),
    "olmo2": Olmo2Config(**SIZES, **NO_PAD),
    "olmo2-tied-bias": Olmo2Config(
        **SIZES | {"num_key_value_heads": 4},
        **NO_PAD,
        **YARN,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "olmo3": Olmo3Config(
        **SIZES | {"num_hidden_layers": 4},
        **NO_PAD,
        sliding_window=6,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": YARN["rope_parameters"],
        },
    ),
    "olmoe": OlmoeConfig(**SIZES, **NO_PAD, num_experts=5, num_experts_per_tok=2),
    "olmoe-normalized-tied-bias": OlmoeConfig(
        **SIZES,
        **NO_PAD,
        num_experts=4,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "ernie4.5": Ernie4_5Config(**SIZES, head_dim=12),
    "ernie4.5-untied-bias": Ernie4_5Config(
        **SIZES, **YARN, head_dim=8, use_bias=True, tie_word_embeddings=False
    ),
    "helium": HeliumConfig(**SIZES, head_dim=8),
    "helium-tied-bias": HeliumConfig(
        **SIZES,
        **YARN,
        head_dim=8,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "cwm": CwmConfig(**SIZES | {"num_hidden_layers": 5}, **LLAMA3, head_dim=12, sliding_window=6),
    "cwm-tied-bias": CwmConfig(
        **SIZES,
        **rope("default"),
        head_dim=8,
        sliding_window=50,
        layer_types=["sliding_attention"] * 3,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    # With larger weights, what transformers computes in one go differs from what it computes token
    # by token: states whose changes overshoot carry the roundings of each on.
    "olmo-hybrid": OlmoHybridConfig(
        **SIZES | {"num_hidden_layers": 4, "initializer_range": 0.1},
        **NO_PAD,
        rope_parameters={"rope_theta": None},
        linear_key_head_dim=12,
        linear_value_head_dim=20,
    ),
    "olmo-hybrid-post-first": OlmoHybridConfig(
        **SIZES | {"num_hidden_layers": 5},
        **NO_PAD,
        **YARN,
        layer_types=[*["full_attention", "linear_attention"] * 2, "linear_attention"],
        linear_allow_neg_eigval=False,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_conv_kernel_dim=3,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "hunyuan": HunYuanDenseV1Config(
        **SIZES, **rope("dynamic", alpha=50.0, factor=1.0), head_dim=12
    ),
    "hunyuan-tied-bias": HunYuanDenseV1Config(
        **SIZES, **LLAMA3, head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
    "exaone4": Exaone4Config(**SIZES | {"num_hidden_layers": 4}, **NO_PAD, sliding_window=6),
    "exaone4-without-windows-tied": Exaone4Config(
        **SIZES,
        **NO_PAD,
        **LLAMA3,
        head_dim=12,
        sliding_window=None,
        layer_types=["full_attention"] * 3,
        tie_word_embeddings=True,
    ),
    "exaone-moe": ExaoneMoeConfig(
        **SIZES | {"num_hidden_layers": 4},
        **EXPERTS,
        head_dim=12,
        sliding_window=6,
        first_k_dense_replace=2,
        num_shared_experts=2,
        routed_scaling_factor=0.5,
    ),
    "exaone-moe-groups-tied": ExaoneMoeConfig(
        **SIZES,
        **YARN,
        **EXPERTS | {"num_experts": 8},
        sliding_window=50,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"],
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
    "smollm3": SmolLM3Config(**SIZES | {"num_hidden_layers": 4}, **NO_PAD),
    "smollm3-window-bias": SmolLM3Config(
        **SIZES,
        **NO_PAD,
        **YARN,
        no_rope_layers=[0, 1, 0],
        use_sliding_window=True,
        sliding_window=5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "granite": GraniteConfig(
        **SIZES,
        **NO_PAD,
        **SCALES,
    ),
    "granite-tied-bias": GraniteConfig(
        **SIZES, **NO_PAD, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "granite-swa": GraniteSWAConfig(
        **SIZES | {"num_hidden_layers": 4},
        **YARN,
        sliding_window=6,
        layer_rope_theta=[0, 1000.0, 50.0, 0],
        **SCALES | {"attention_multiplier": 0.25},
    ),
    "granite-swa-untied-bias": GraniteSWAConfig(
        **SIZES,
        layer_types=["sliding_attention"] * 3,
        attention_multiplier=0.5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "granite4": GraniteMoeHybridConfig(
        **SIZES,
        **NO_PAD,
        **GRANITE4,
        position_embedding_type="rope",
        **SCALES,
    ),
    "granite4-without-rope-tied-bias": GraniteMoeHybridConfig(
        **SIZES, **NO_PAD, **GRANITE4, attention_bias=True, tie_word_embeddings=True
    ),
    "granite4-hybrid": GraniteMoeHybridConfig(
        **SIZES,
        **NO_PAD,
        **GRANITE4 | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        mamba_d_state=12,
        residual_multiplier=0.5,
    ),
    "granite-moe": GraniteMoeConfig(
        **SIZES, **NO_PAD, num_local_experts=5, num_experts_per_tok=2, attention_bias=True
    ),
    "granite-moe-shared": GraniteMoeSharedConfig(
        **SIZES,
        **SCALES,
        **NO_PAD,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=28,
    ),
    "granite-moe-shared-none-tied-bias": GraniteMoeSharedConfig(
        **SIZES, **NO_PAD, attention_bias=True, tie_word_embeddings=True
    ),
    "granite-moe-swa": GraniteMoeSWAConfig(
        **SIZES | {"num_hidden_layers": 4},
        **SCALES,
        **YARN,
        **NO_PAD,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=28,
        sliding_window=6,
        layer_rope_theta=[0, 1000.0, 50.0, 0],
    ),
    "hyperclovax": HyperCLOVAXConfig(
        **SIZES, **SCALES | {"attention_multiplier": 0.5}, **NO_PAD, head_dim=12
    ),
    "hyperclovax-tied-bias": HyperCLOVAXConfig(
        **SIZES,
        **YARN,
        **NO_PAD,
        residual_multiplier=0.5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "granite4-experts": GraniteMoeHybridConfig(
        **SIZES,
        **NO_PAD,
        **GRANITE4
        | {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
        | {"num_local_experts": 5},
        num_experts_per_tok=2,
        mamba_d_state=8,
    ),
    "granite4-hybrid-groups": GraniteMoeHybridConfig(
        **SIZES,
        **NO_PAD,
        **GRANITE4 | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        mamba_d_state=8,
        mamba_d_conv=2,
        mamba_n_groups=2,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        tie_word_embeddings=True,
    ),
    "lfm2": Lfm2Config(
        **SIZES,
        **NO_PAD,
        layer_types=["conv", "full_attention", "conv"],
        block_multiple_of=12,
        block_ffn_dim_multiplier=1.3,
    ),
    "lfm2-bias-untied": Lfm2Config(
        **SIZES,
        **NO_PAD,
        **YARN,
        full_attn_idxs=[2],
        conv_bias=True,
        conv_L_cache=4,
        tie_word_embeddings=False,
    ),
    "lfm2-without-conv": Lfm2Config(**SIZES, **NO_PAD, block_auto_adjust_ff_dim=False),
    "lfm2-moe": Lfm2MoeConfig(
        **SIZES | {"num_hidden_layers": 4},
        **EXPERTS,
        **NO_PAD,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
    "lfm2-moe-without-biases": Lfm2MoeConfig(
        **SIZES,
        **EXPERTS,
        **NO_PAD,
        layer_types=["full_attention", "conv", "conv"],
        num_dense_layers=0,
        use_expert_bias=False,
        norm_topk_prob=False,
        conv_L_cache=2,
        tie_word_embeddings=False,
    ),
    "nemotron-h": NemotronHConfig(
        **NEMOTRON_H,
        layers_block_type=[*("linear_attention", "moe") * 2, "full_attention", "mlp", "moe"],
        n_groups=2,
        head_dim=12,
        routed_scaling_factor=2.5,
    ),
    "nemotron-h-latents": NemotronHConfig(
        **NEMOTRON_H, layers_block_type=["full_attention", "moe", "moe"], moe_latent_size=16
    ),
    "nemotron-h-dense-biases": NemotronHConfig(
        **NEMOTRON_H,
        layers_block_type=["full_attention", "mlp", "linear_attention", "full_attention"],
        n_groups=1,
        head_dim=8,
        time_step_min=0.5,
        mlp_bias=True,
        use_bias=True,
        use_conv_bias=False,
    ),
    "nemotron-h-groups": NemotronHConfig(
        **NEMOTRON_H,
        layers_block_type=["moe", "full_attention", "linear_attention"],
        n_groups=4,
        head_dim=8,
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
    ),
    # No state outlives a step.
    "nemotron-h-long-steps": NemotronHConfig(
        **NEMOTRON_H,
        layers_block_type=["linear_attention", "full_attention"],
        n_groups=2,
        head_dim=8,
        time_step_min=800.0,
    ),
    "glm": GlmConfig(**SIZES, **NO_PAD, head_dim=12, rms_norm_eps=1e-5),
    "glm4": Glm4Config(**SIZES, **NO_PAD, head_dim=16, rms_norm_eps=1e-5),
    "glm4-whole-rope-tied": Glm4Config(
        **SIZES,
        **NO_PAD,
        **rope("default", partial_rotary_factor=1.0),
        head_dim=8,
        attention_bias=False,
        tie_word_embeddings=True,
    ),
    "glm4-moe": Glm4MoeConfig(
        **SIZES,
        **ROUTED,
        head_dim=12,
        attention_bias=True,
        first_k_dense_replace=1,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "glm4-moe-groups": Glm4MoeConfig(
        **SIZES | {"num_hidden_layers": 2},
        **ROUTED,
        first_k_dense_replace=0,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
    "glm4-moe-dense": Glm4MoeConfig(**SIZES, first_k_dense_replace=3, head_dim=16),
    "dots1": Dots1Config(
        **SIZES,
        **ROUTED,
        head_dim=12,
        first_k_dense_replace=1,
        n_shared_experts=2,
        n_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        sliding_window=6,
        max_window_layers=1,
        attention_bias=True,
    ),
    "deepseek-v2-lite": DeepseekV2Config(
        **SIZES | LATENT,
        **ROUTED,
        **YARN_FULL,
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_shared_experts=2,
    ),
    "deepseek-v2-bias": DeepseekV2Config(
        **SIZES | LATENT,
        **ROUTED,
        q_lora_rank=24,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=3.0,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "deepseek-v3": DeepseekV3Config(
        **SIZES | LATENT,
        **ROUTED,
        **YARN_FULL,
        q_lora_rank=24,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
    ),
    "deepseek-v3-halves-tied-bias": DeepseekV3Config(
        **SIZES | LATENT,
        **ROUTED,
        **rope("linear", factor=2.0, mscale_all_dim=0.7),
        q_lora_rank=None,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "glm4-moe-lite": Glm4MoeLiteConfig(
        **SIZES | LATENT,
        **ROUTED,
        q_lora_rank=16,
        mlp_layer_types=["sparse", "dense", "sparse"],
        rms_norm_eps=0.05,
    ),
    "mistral4": Mistral4Config(
        **SIZES | LATENT,
        **ROUTED,
        **copy.deepcopy(GROWING),  # to which it adds
        q_lora_rank=24,
        first_k_dense_replace=1,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        rms_norm_eps=0.05,
    ),
    "mistral4-groups-tied-bias": Mistral4Config(
        **SIZES | LATENT,
        **ROUTED,
        **rope("linear", factor=2.0, original_max_position_embeddings=5, llama_4_scaling_beta=0.1),
        q_lora_rank=None,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "sarvam-mla": SarvamMLAConfig(
        **SIZES | LATENT, **ROUTED, **YARN_FULL, q_lora_rank=None, n_shared_experts=2
    ),
    "sarvam-moe": SarvamMoEConfig(
        **SIZES,
        **ROUTED,
        head_dim=8,
        attention_bias=True,
        n_group=4,
        topk_group=2,
        tie_word_embeddings=True,
    ),
    "youtu": YoutuConfig(**SIZES | LATENT, q_lora_rank=24),
    "youtu-untied-bias": YoutuConfig(
        **SIZES | LATENT,
        **YARN_FULL,
        q_lora_rank=None,
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "solar-open": SolarOpenConfig(
        **WITHOUT_MLP,
        **ROUTED,
        head_dim=12,
        attention_bias=True,
        n_shared_experts=2,
        routed_scaling_factor=0.5,
        n_group=6,
        topk_group=3,
    ),
    "ernie4.5-moe": Ernie4_5_MoeConfig(
        **SIZES | {"num_hidden_layers": 5},
        moe_num_experts=6,
        moe_k=3,
        moe_intermediate_size=20,
        moe_layer_start_index=1,
        moe_layer_end_index=3,
    ),
    "ernie4.5-moe-untied-without-shared": Ernie4_5_MoeConfig(
        **SIZES,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=20,
        moe_num_shared_experts=0,
        moe_layer_interval=2,
        tie_word_embeddings=False,
    ),
    "cohere2": Cohere2Config(
        **SIZES | {"num_hidden_layers": 4}, **NO_PAD, sliding_window=6, logit_scale=0.25
    ),
    "cohere2-untied-bias": Cohere2Config(
        **SIZES,
        **NO_PAD,
        **YARN,
        sliding_window=50,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gpt-oss": GptOssConfig(
        **SIZES | {"num_hidden_layers": 4},
        **rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        head_dim=16,
        sliding_window=6,
        num_local_experts=5,
        num_experts_per_tok=3,
    ),
    "gpt-oss-clamped": GptOssConfig(
        **SIZES,
        **rope("default"),
        head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=1,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=50,
        attention_bias=False,
        swiglu_alpha=1.1,
        swiglu_limit=0.4,
        tie_word_embeddings=True,
    ),
    "qwen3.5": Qwen3_5TextConfig(
        **SIZES | {"num_hidden_layers": 4, "initializer_range": 0.04},
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=12,
    ),
    "qwen3.5-tied-bias": Qwen3_5TextConfig(
        **SIZES | {"initializer_range": 0.1},
        head_dim=8,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=4,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=2,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **WITHOUT_MLP | {"initializer_range": 0.04},
        **EXPERTS,
        shared_expert_intermediate_size=12,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=12,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        tie_word_embeddings=True,
    ),
    "qwen3-next": Qwen3NextConfig(
        **SIZES | {"num_hidden_layers": 4, "initializer_range": 0.04},
        **EXPERTS,
        shared_expert_intermediate_size=12,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=12,
        mlp_only_layers=[1],
    ),
    "gemma": GemmaConfig(**SIZES, head_dim=12),
    "gemma-untied-bias": GemmaConfig(
        **SIZES, **YARN, head_dim=8, attention_bias=True, tie_word_embeddings=False
    ),
    "gemma2": Gemma2Config(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=12,
        query_pre_attn_scalar=3,
        sliding_window=6,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=5.0,
    ),
    "gemma2-untied-bias": Gemma2Config(
        **SIZES | {"num_key_value_heads": 4},
        head_dim=8,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=50,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "vaultgemma": VaultGemmaConfig(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=12,
        query_pre_attn_scalar=3,
        sliding_window=6,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=5.0,
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7},
        head_dim=12,
        query_pre_attn_scalar=20,
        sliding_window=6,
        final_logit_softcapping=5.0,
    ),
    "gemma3-ropes": Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        sliding_window=5,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
        },
    ),
    "gemma4": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 6},
        head_dim=8,
        global_head_dim=16,
        sliding_window=6,
        final_logit_softcapping=5.0,
        vocab_size_per_layer_input=71,
        hidden_size_per_layer_input=12,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "gemma4-keys-are-values": Gemma4TextConfig(
        **SIZES,
        head_dim=12,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=5,
        hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision",
        attention_bias=True,
        tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "gemma4-moe": Gemma4TextConfig(
        **SIZES | {"initializer_range": 0.1},
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        sliding_window=5,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=80,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=20,
    ),
}


def make_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights everywhere, biases and norms too."""
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif name.endswith(("sinks", "alpha_p", "alpha_n")):
            torch.nn.init.normal_(parameter, std=2.0)
        elif "norm" in name or name.endswith("scale"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        elif name.endswith(("correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, std=0.3)
    return model.to(dtype)


def load(
    folder: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32
) -> tuple[ModelConfig, Weights, Decoder]:
    config = load_model_config(folder)
    weights = load_weights(folder, config, dtype, "cpu")
    return config, weights, Decoder(config, weights, ops or Ops(), 64)


def make_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in LENGTHS]


@torch.no_grad()
def expected_logits(model: PreTrainedModel, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]


def run_chunked(
    decoder: Decoder, prompts: list[list[int]], chunks: list[list[int]]
) -> list[torch.Tensor]:
    """Logits at every position. `chunks[s]` are the lengths in which sequence s goes through;
    in step i, sequences take their i-th chunk, and those that have none left sit out."""
    ids = list(range(sum(-(-len(p) // BLOCK) for p in prompts) + 3))
    random.Random(1).shuffle(ids)
    tables = [[ids.pop() for _ in range(-(-len(p) // BLOCK))] for p in prompts]
    num_blocks = max(map(max, tables)) + 1
    kv = allocate_kv_cache(decoder.config, num_blocks, BLOCK, decoder.dtype, "cpu", len(prompts))
    for cache in kv:
        if isinstance(cache, StateCache):  # what another sequence has left
            cache.inputs.fill_(torch.nan)
            cache.delta.fill_(torch.nan)
    done = [0] * len(prompts)
    out: list[list[torch.Tensor]] = [[] for _ in prompts]
    for i in range(max(map(len, chunks))):
        active = [s for s in range(len(prompts)) if i < len(chunks[s])]
        queries = [chunks[s][i] for s in active]
        spans = [range(done[s], done[s] + q) for s, q in zip(active, queries, strict=True)]
        batch = make_batch(queries, [r.stop for r in spans], [tables[s] for s in active], BLOCK)
        positions = torch.tensor([p for r in spans for p in r])
        states = StateRows(active, batch.query_start)
        step = StepContext(positions, batch, None, states=states)
        tokens = [prompts[s][p] for s, r in zip(active, spans, strict=True) for p in r]
        logits = decoder.logits(decoder.forward(torch.tensor(tokens), step, kv), step)
        for s, part, r in zip(active, logits.split(queries), spans, strict=True):
            out[s].append(part)
            done[s] = r.stop
    return [torch.cat(parts) for parts in out]


def uneven_chunks(length: int, seed: int) -> list[int]:
    """Chunks of 1 to 30 tokens, every other one a decode."""
    rng = random.Random(seed)
    chunks: list[int] = []
    while (left := length - sum(chunks)) > 0:
        chunks.append(min(left, 1 if len(chunks) % 2 == seed % 2 else rng.randint(2, 30)))
    return chunks


def assert_logits(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


AGAIN = {
    "llama-mha",
    "qwen3-window",
    "qwen3-moe-window",
    "mixtral-window",
    "olmo2-tied-bias",
    "granite-tied-bias",
    "cohere2-untied-bias",
    "gemma-untied-bias",
    "gemma2-untied-bias",
    "ernie4.5-untied-bias",
    "cwm-tied-bias",
    "arcee-tied-bias",
    "apertus-tied-bias",
    "granite-swa-untied-bias",
    "hyperclovax-tied-bias",
    "youtu-untied-bias",
    "helium-tied-bias",
    "nemotron-tied-bias",
    "jais2-tied-without-biases",
}
"""Configurations whose features others have too, in other families."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive) if name in AGAIN else name
        for name in CONFIGS
    ],
)
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    model = make_model(CONFIGS[name])
    sharded = name.startswith("qwen")
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "5GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    config, weights, decoder = load(tmp_path)
    ours = ("layer_scalar", "correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps")
    scalars = sum(b.numel() for name, b in model.named_buffers() if name.endswith(ours))
    seeing = sum(p.numel() for name, p in model.named_parameters() if ".visual." in name)
    assert num_parameters(weights.table) == model.num_parameters() - seeing + scalars
    prompts = make_prompts(config.vocab_size)
    expected = expected_logits(model, prompts)
    assert_logits(run_chunked(decoder, prompts, [[n] for n in LENGTHS]), expected)
    uneven = [uneven_chunks(n, s) for s, n in enumerate(LENGTHS)]
    assert_logits(run_chunked(decoder, prompts, uneven), expected)
    # Decodes alone after a prefill, the commonest kind of step.
    decodes = [[max(n - 3, 1), *[1] * (n - max(n - 3, 1))] for n in LENGTHS]
    assert_logits(run_chunked(decoder, prompts, decodes), expected)


@torch.no_grad()
def run_guessing(decoder: Decoder, prompts: list[list[int]], seed: int) -> list[torch.Tensor]:
    """Logits at every position, two sequences side by side: the first half of each in one step,
    and then decodes with guesses of which some are right."""
    rng, length = random.Random(seed), min(map(len, prompts))
    num_blocks = -(-(length + MAX_GUESSES) // BLOCK)
    tables = [list(range(i * num_blocks, (i + 1) * num_blocks)) for i in range(len(prompts))]
    size = len(prompts) * num_blocks
    kv = allocate_kv_cache(decoder.config, size, BLOCK, decoder.dtype, "cpu", len(prompts))
    out: list[list[torch.Tensor]] = [[] for _ in prompts]

    def run(entries: list[tuple[int, int, list[int], int]]) -> tuple[torch.Tensor, ...]:
        """The logits of each entry: sequence, first position, tokens, and what its state lacks."""
        each, firsts, tokens, lags = (list(column) for column in zip(*entries, strict=True))
        counts = [len(t) for t in tokens]
        ends = [first + count for first, count in zip(firsts, counts, strict=True)]
        batch = make_batch(counts, ends, [tables[s] for s in each], BLOCK)
        states = StateRows(each, batch.query_start, lags=lags)
        spans = zip(firsts, ends, strict=True)
        positions = torch.tensor([p for first, end in spans for p in range(first, end)])
        step = StepContext(positions, batch, None, states=states)
        ids = torch.tensor([token for part in tokens for token in part])
        return decoder.logits(decoder.forward(ids, step, kv), step).split(counts)

    half = length // 2
    for s, part in enumerate(run([(s, 0, p[:half], 0) for s, p in enumerate(prompts)])):
        out[s].append(part)
    done, lags = [half] * len(prompts), [0] * len(prompts)
    while active := [s for s in range(len(prompts)) if done[s] < length]:
        entries, rights = [], []
        for s in active:
            right = prompts[s][done[s] : done[s] + 1 + rng.randint(0, MAX_GUESSES)]
            right = right[: length - done[s]]
            wrong = [prompts[s][0]] * rng.randint(0, MAX_GUESSES + 1 - len(right))
            for i, token in enumerate(right + wrong):
                entries.append((s, done[s] + i, [token], 0 if i else lags[s]))
            rights.append(len(right))
        parts = run(entries)
        for s, num in zip(active, rights, strict=True):
            at = next(i for i, entry in enumerate(entries) if entry[0] == s)
            out[s] += parts[at : at + num]
            done[s], lags[s] = done[s] + num, num - 1
    return [torch.cat(parts) for parts in out]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-next",
        "lfm2-bias-untied",
        "nemotron-h",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("granite4-hybrid", "qwen3.5")),
    ],
)
def test_guesses_leave_recurrent_states_right(name: str, tmp_path: Path) -> None:
    model = make_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    config, _, decoder = load(tmp_path)
    rng = random.Random(2)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(48)] for _ in range(2)]
    expected = expected_logits(model, prompts)
    for seed in range(3):
        assert_logits(run_guessing(decoder, prompts, seed), expected)


LONGROPE = rope(
    "longrope",
    short_factor=[1.0 + i / 8 for i in range(32)],
    long_factor=[3.0] * 32,
    original_max_position_embeddings=16,
)


@pytest.mark.parametrize(
    "settings", [LLAMA3, YARN, YARN_FULL, rope("linear", factor=3.0), LONGROPE]
)
def test_rope_frequencies_agree_with_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    hf = LlamaConfig(**SIZES, **settings, head_dim=64, architectures=["LlamaForCausalLM"])
    hf.save_pretrained(tmp_path)
    ours, scale = inverse_frequencies(load_model_config(tmp_path).ropes[0], 64)
    kind = settings["rope_parameters"]["rope_type"]
    expected, expected_scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(expected_scale)


def test_windows_and_flags_are_read_per_family(tmp_path: Path) -> None:
    def read(name: str) -> ModelConfig:
        CONFIGS[name].architectures = [f"{type(CONFIGS[name]).__name__[:-6]}ForCausalLM"]
        CONFIGS[name].save_pretrained(tmp_path)
        return load_model_config(tmp_path)

    assert read("mistral").windows == (None,) * 3
    assert read("mistral-window").windows == (7,) * 3
    assert read("qwen2-window").windows == (None, 6, 6)
    assert read("qwen3-window").windows == (5, None, 5)
    llama, qwen2, qwen3 = read("llama-bias"), read("qwen2"), read("qwen3")
    assert (llama.attention_bias, llama.attention_out_bias, llama.mlp_bias) == (True, True, True)
    assert (qwen2.attention_bias, qwen2.attention_out_bias, qwen2.qk_norm) == (True, False, None)
    assert (qwen3.attention_bias, qwen3.head_dim, qwen3.qk_norm) == (False, 16, "head")
    assert qwen2.eos_token_ids == (2,)


def test_contexts_in_which_longrope_would_change_are_not_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def limit(name: str) -> int:
        CONFIGS[name].architectures = ["Phi3ForCausalLM"]
        CONFIGS[name].save_pretrained(tmp_path)
        return load_model_config(tmp_path).max_position_embeddings

    assert limit("phi3-longrope-equal") == 64
    assert not caplog.records
    assert limit("phi3-longrope") == 64, "and not 256"
    assert "up to 64 tokens are served, not of 256" in caplog.text


@pytest.mark.parametrize(
    "kind", dict.fromkeys(type(config.get_text_config()) for config in CONFIGS.values())
)
def test_every_field_is_read_or_without_effect_or_at_its_default(
    kind: type[PreTrainedConfig], caplog: pytest.LogCaptureFixture
) -> None:
    check_fields(kind())
    for name in kind().to_dict().keys() - READ - WITHOUT_EFFECT:
        config = kind()
        config.__dict__[name] = "other"
        with pytest.raises(ConfigError, match="is not served") as caught:
            check_fields(config)
        assert caught.value.param == name
    config = kind()
    config.new_in_some_release = 1
    check_fields(config)
    assert "new_in_some_release is not known to transformers" in caplog.text


@pytest.mark.parametrize(
    ("architecture", "model_type", "published", "other"),
    [
        (
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            {
                "attn_output_gate": True,
                "full_attention_interval": 4,
                "layer_types": ["full_attention"],
                "mamba_ssm_dtype": "float32",
                "mlp_only_layers": [],
                "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": False,
                "num_hidden_layers": 1,
                "output_gate_type": "swish",
            },
            {"attn_output_gate": False},
        ),
        (
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            {
                "num_mtp_modules": 3,
                "qk_norm_type": "per_layer",
                "rotary_dim": 64,
                "scoring_func": "sigmoid",
                "shared_intermediate_size": 0,
                "sliding_window": None,
                "use_mtp": True,
                "use_qk_norm": True,
                "use_routing_bias": True,
            },
            {"scoring_func": "softmax"},
        ),
        (
            "ApertusForCausalLM",
            "apertus",
            {"mlp_bias": False, "post_norm": False, "qk_norm": True},
            {"qk_norm": False},
        ),
        (
            "Cohere2ForCausalLM",
            "cohere2",
            {
                "cache_implementation": "hybrid",
                "layer_switch": 4,
                "order_of_interleaved_layers": "local_attn_first",
                "position_embedding_type": "rope_gptj",
                "rotary_pct": 1.0,
                "sliding_window_pattern": 4,
                "use_embedding_sharing": True,
                "use_gated_activation": True,
                "use_parallel_block": True,
                "use_parallel_embedding": True,
                "use_qk_norm": False,
            },
            {"position_embedding_type": "alibi"},
        ),
        (
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            {
                "init_method": "mup",
                "layer_types": ["attention"],
                "normalization_function": "rmsnorm",
                "num_hidden_layers": 1,
                "num_local_experts": 0,
                "position_embedding_type": "rope",
            },
            {"normalization_function": "layernorm"},
        ),
        (
            "NemotronHForCausalLM",
            "nemotron_h",
            {
                "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
                "expand": 2,
                "attention_head_dim": 128,
                "hybrid_override_pattern": "M-M*",
                "mamba_n_groups": 8,
                "mamba_ssm_cache_dtype": "float16",
                "num_hidden_layers": 4,
                "partial_rotary_factor": 1.0,
                "rms_norm_eps": 1e-05,
                "rope_theta": 10000,
                "time_step_limit": [0.0, math.inf],
                "time_step_rank": 256,
            },
            {"residual_scale": 0.5},
        ),
        (
            "Lfm2ForCausalLM",
            "lfm2",
            {
                "block_ff_dim": 12288,
                "full_attn_idxs": [0],
                "num_heads": 32,
                "num_hidden_layers": 2,
                "theta": 1000000.0,
                "tie_embedding": True,
            },
            {"block_use_swiglu": False},
        ),
        (
            "Glm4MoeLiteForCausalLM",
            "glm4_moe_lite",
            {
                "first_k_dense_replace": 1,
                "num_nextn_predict_layers": 1,
                "partial_rotary_factor": 1.0,
                "rope_scaling": None,
                "topk_method": "noaux_tc",
            },
            {"index_topk": 2048},
        ),
    ],
)
def test_published_fields_that_say_what_is_computed_are_no_warnings(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    model_type: str,
    published: dict[str, Any],
    other: dict[str, Any],
) -> None:
    config = {"architectures": [architecture], "model_type": model_type, **published}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_model_config(tmp_path)
    assert not caplog.records
    (tmp_path / "config.json").write_text(json.dumps(config | other))
    load_model_config(tmp_path)
    assert f"{next(iter(other))} is not known to transformers" in caplog.text


def test_fields_of_published_gemmas(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transformers makes the layers' types of the pattern, but has no such field."""
    config = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    published = {"sliding_window_pattern": 2, "cache_implementation": "hybrid"}
    sizes = {"num_hidden_layers": 4, "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | published | sizes))
    assert load_model_config(tmp_path).windows == (8, None, 8, None)
    assert not caplog.records


def test_every_family_is_among_the_configurations() -> None:
    """So the fields of each are walked, and its logits compared."""
    assert {config.get_text_config().model_type for config in CONFIGS.values()} == {
        family.model_type for family in (*FAMILIES.values(), *chain(*OTHERS.values()))
    }


def test_half_precision_stays_close(tmp_path: Path) -> None:
    check_in_half_precision(make_model(CONFIGS["qwen3"], torch.bfloat16), tmp_path)


def test_corrections_of_experts_stay_float32(tmp_path: Path) -> None:
    """They differ by what 16 bits don't tell, and alone decide."""
    model = make_model(CONFIGS["glm4-moe"], torch.bfloat16)
    for layer in model.model.layers[1:]:
        layer.mlp.gate.weight.data.zero_()
        layer.mlp.gate.e_score_correction_bias = 1 + 0.001 * torch.rand(12)
    check_in_half_precision(model, tmp_path)


@pytest.mark.parametrize("adapted", [False, True])
@torch.no_grad()
def test_routers_are_computed_in_float32_where_transformers_does(
    adapted: bool, tmp_path: Path
) -> None:
    model = make_model(CONFIGS["glm4-moe"], torch.bfloat16)
    model.model.layers[1].mlp.gate.float()
    model.save_pretrained(tmp_path)
    _, weights, decoder = load(tmp_path, dtype=torch.bfloat16)
    parts = LayerBuilder(decoder.config, weights, Ops(), ALONE)
    x_TI = torch.randn(5, 32).bfloat16()
    lora = RecordingLora() if adapted else None
    step = StepContext(torch.arange(5), make_batch([5], [5], [[1, 0]], BLOCK), lora)
    wanted_TE = model.model.layers[1].mlp.gate(x_TI)[0]
    if adapted:
        wanted_TE += torch.tensor(0.01 * (parts.group("1.router") + 1)).bfloat16()
    found_TE = parts.mlp(1)._logits(x_TI, step).whole()
    assert found_TE.dtype == torch.float32
    torch.testing.assert_close(found_TE, wanted_TE, rtol=1e-5, atol=1e-5)


def check_in_half_precision(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    config, _, decoder = load(tmp_path, dtype=torch.bfloat16)
    assert config.dtype == "bfloat16"
    prompts = make_prompts(config.vocab_size)[:3]
    got = run_chunked(decoder, prompts, [uneven_chunks(len(p), s) for s, p in enumerate(prompts)])
    scale = max(t.float().abs().max() for t in got)
    for a, b in zip(got, expected_logits(model, prompts), strict=True):
        assert (a - b).float().abs().max() < 0.06 * scale


class RecordingLora(LoraStep):
    """A LoraStep that adds `group + 1` and records what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, tuple[int, ...], tuple[int, ...]]] = []

    def _add(self, kind: str, y: torch.Tensor, x: torch.Tensor, group: int) -> None:
        self.calls.append((kind, group, tuple(y.shape), tuple(x.shape)))
        y += 0.01 * (group + 1)

    def linear(self, y_TO: torch.Tensor, x_TI: torch.Tensor, group: int) -> None:
        self._add("linear", y_TO, x_TI, group)

    def embedding(self, y_TO: torch.Tensor, ids_T: torch.Tensor, group: int) -> None:
        self._add("embedding", y_TO, ids_T, group)

    def head(self, y_NV: torch.Tensor, x_NI: torch.Tensor, group: int) -> None:
        self._add("head", y_NV, x_NI, group)


@pytest.mark.parametrize("name", ["llama3-tied", "qwen3", "phi3", "olmo2", "arcee"])
def test_the_seam_calls_every_group_of_the_table_once(name: str, tmp_path: Path) -> None:
    make_model(CONFIGS[name]).save_pretrained(tmp_path)
    config, weights, decoder = load(tmp_path)
    before = weights.embed.clone()
    table, lora = target_table(config), RecordingLora()
    batch = make_batch([5], [5], [[1, 0]], BLOCK)
    step = StepContext(torch.arange(5), batch, lora)
    kv = allocate_kv_cache(config, 2, BLOCK, torch.float32, "cpu")
    decoder.logits(decoder.forward(torch.arange(5), step, kv)[-2:], step)
    assert [(c[0], c[1]) for c in lora.calls] == [(g.kind, g.index) for g in table.groups]
    for (kind, _, y, x), g in zip(lora.calls, table.groups, strict=True):
        assert y == (2 if kind == "head" else 5, g.out_features)
        assert kind == "embedding" or x[1] == g.in_features
    assert torch.equal(weights.embed, before)


@pytest.mark.parametrize("name", ["qwen3", "phi3", "olmo2", "arcee"])
def test_the_table_names_every_projection_and_norm_of_the_model(name: str, tmp_path: Path) -> None:
    model = make_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    modules = dict(model.named_modules())
    table = target_table(load_model_config(tmp_path))
    for target in table.targets:
        shape = modules[target.name].weight.shape
        if target.kind == "embedding":
            assert shape == (target.in_features, target.out_features)
        else:
            assert shape == (target.out_features, target.in_features)
    assert {t.name for t in table.targets} == {
        name
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }
    norms = {n.name: (n.size,) for n in table.norms}
    assert norms == {
        n: m.weight.shape for n, m in modules.items() if type(m).__name__[-4:] == "Norm"
    }


@pytest.mark.parametrize("name", ["qwen3", "phi3", "olmo2", "qwen3-moe"])
def test_what_each_of_two_devices_has_fits_together(name: str, tmp_path: Path) -> None:
    """A share of each part of a column layer's output is what the row layer behind it takes."""
    make_model(CONFIGS[name]).save_pretrained(tmp_path)
    table = target_table(load_model_config(tmp_path))
    axes = {key: group.packed.axis for key, (group, *_) in table.by_key.items()}
    assert (axes["embed"], axes["head"]) == (None, "vocab")
    for i in range(3):
        (qkv,), (o,) = table.by_key[f"{i}.qkv"], table.by_key[f"{i}.o"]
        assert (axes[f"{i}.qkv"], axes[f"{i}.o"]) == ("column", "row")
        q, k, v = qkv.packed.parts
        assert (q, k) == (o.in_features, v)
        if "moe" in name:
            assert axes[f"{i}.router"] is None
            assert (axes[f"{i}.experts_gate_up"], axes[f"{i}.experts_down"]) == ("column", "row")
            continue
        (gate_up,), (down,) = table.by_key[f"{i}.gate_up"], table.by_key[f"{i}.down"]
        assert (axes[f"{i}.gate_up"], axes[f"{i}.down"]) == ("column", "row")
        assert gate_up.packed.parts == (down.in_features,) * 2


@pytest.mark.parametrize("name", ["phi3", "olmo2"])
def test_the_layers_can_be_quantized(name: str, tmp_path: Path) -> None:
    model = make_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    weights = load_weights(tmp_path, config, torch.float32, "cpu", "fp8-weight-only")
    for target in weights.table.targets:
        if target.kind == "linear":
            wanted = model.get_submodule(target.name).weight
            assert (weights.weight(target) - wanted).abs().max() < 0.07 * wanted.abs().max()
    decoder = Decoder(config, weights, Ops(), 64)
    prompts = make_prompts(config.vocab_size)[1:3]
    for logits in run_chunked(decoder, prompts, [[len(p)] for p in prompts]):
        assert logits.isfinite().all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(CONFIGS["llama"]).save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not DROP}))


DROP = object()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    where = tmp_path_factory.mktemp("tiny")
    CONFIGS["llama"].architectures = ["LlamaForCausalLM"]
    CONFIGS["llama"].save_pretrained(where)
    return load_model_config(where)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": DROP}, "architectures"),
        ({"model_type": "qwen2"}, "model_type"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": "relu2"}, "hidden_act"),
        ({"dtype": "float64"}, "dtype"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 0.0}}, "rope_parameters"),
        ({"rope_parameters": DROP, "rope_scaling": {"type": "su"}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "model"),
        ({**LONGROPE, "head_dim": 32}, "rope_parameters"),
        (rope("yarn", original_max_position_embeddings=0), "rope_parameters"),
        ({"hidden_size": "many"}, "model"),
        ({"is_causal": False}, "is_causal"),
        ({"is_causal": None}, "is_causal"),
        ({"architectures": 1}, "architectures"),
        ({"architectures": [[]]}, "architectures"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"head_dim": -2}, "head_dim"),
        ({"intermediate_size": -1}, "intermediate_size"),
        ({"intermediate_size": 2**70}, "intermediate_size"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        (rope("linear", factor=[2.0]), "rope_parameters"),
        (rope("linear", factor=0), "rope_parameters"),
        (rope("yarn", original_max_position_embeddings=16, beta_fast=math.inf), "rope_parameters"),
        ({"num_hidden_layers": 2**70}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
    ],
)
def test_configurations_that_would_be_wrong_are_refused(
    folder: Path, changes: dict[str, Any], param: str
) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ConfigError) as caught:
        load_model_config(folder)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral-window", {"layer_types": ["full_attention"] * 3}),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}),
        ("qwen3", {"layer_types": ["full_attention"] * 2}),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}),
    ],
)
def test_layer_types_that_disagree_are_refused(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    CONFIGS[name].architectures = [f"{type(CONFIGS[name]).__name__[:-6]}ForCausalLM"]
    CONFIGS[name].save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma4", "use_bidirectional_attention", "all"),
        ("gemma4", "num_kv_shared_layers", 5),
        ("gemma4", "vocab_size_per_layer_input", 70),
        ("gemma4", "per_layer_config", {"1": {"num_attention_heads": 2}}),
        ("gemma4", "per_layer_config", {"5": {"head_dim": 4}}),
        ("gemma4-moe", "top_k_experts", None),
        ("llama", "per_layer_config", {"1": {"head_dim": 4}}),
        ("qwen3.5", "layer_types", ["linear_attention"] * 4),
        ("gemma", "use_bidirectional_attention", True),
        ("gemma2", "attn_logit_softcapping", 0.0),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "query_pre_attn_scalar", 0),
        ("gemma3", "final_logit_softcapping", math.nan),
        ("gemma4", "rope_parameters", {}),
        ("granite", "residual_multiplier", math.inf),
        ("granite", "logits_scaling", 0.0),
        ("granite-swa", "layer_rope_theta", [1.0]),
        ("hunyuan", "rope_parameters", YARN["rope_parameters"]),
        ("hunyuan", "rope_parameters", rope("dynamic", factor=2.0)["rope_parameters"]),
        ("granite4", "layer_types", ["attention", "mamba", "moe"]),
        ("granite4-hybrid", "layer_types", ["mamba"] * 3),
        ("granite4-hybrid", "time_step_limit", [0.0, 0.1]),
        ("granite4-hybrid", "mamba_d_state", 0),
        ("granite4-hybrid", "mamba_n_groups", 3),
        ("nemotron-h", "layers_block_type", ["mlp", "linear_attention"]),
        ("nemotron-h", "mlp_bias", True),
        ("nemotron-h", "moe_latent_size", 0),
        ("nemotron-h", "moe_shared_expert_intermediate_size", 0),
        ("nemotron-h", "n_group", 5),
        ("nemotron-h", "n_groups", 3),
        ("nemotron-h", "time_step_min", -0.1),
        ("nemotron-h", "time_step_limit", [0.0, 0.1]),
        ("nemotron-h", "attention_head_dim", 8),
        ("granite4", "num_local_experts", None),
        ("granite-moe", "num_local_experts", 0),
        ("granite4-experts", "num_experts_per_tok", 6),
        ("granite4", "shared_intermediate_size", 0),
        ("granite4", "attention_multiplier", None),
        ("lfm2", "layer_types", ["conv"] * 3),
        ("lfm2", "layer_types", ["conv", "full_attention", "sliding_attention"]),
        ("lfm2", "conv_L_cache", 0),
        ("lfm2", "block_multiple_of", 0),
        ("lfm2", "block_ffn_dim_multiplier", -1.0),
        ("lfm2", "intermediate_size", 1),
        ("lfm2", "hidden_act", "gelu"),
        ("lfm2", "norm_eps", -1.0),
        ("lfm2", "theta", 10000.0),
        ("lfm2-moe", "layer_types", None),
        ("lfm2-moe", "num_dense_layers", -1),
        ("lfm2-moe", "num_experts_per_tok", 7),
        ("glm", "num_key_value_heads", None),
        ("olmoe", "clip_qkv", 8.0),
        ("dots1", "n_group", None),
        ("deepseek-v2-bias", "topk_method", "noaux_tc"),
        ("deepseek-v2-bias", "n_group", None),
        ("deepseek-v2-bias", "topk_group", 5),
        ("deepseek-v2-lite", "norm_topk_prob", True),
        ("deepseek-v2-lite", "mlp_bias", True),
        ("deepseek-v2-lite", "scoring_func", "sigmoid"),
        ("deepseek-v2-lite", "num_experts_per_tok", None),
        ("deepseek-v2-lite", "moe_layer_freq", 2),
        ("deepseek-v3", "first_k_dense_replace", None),
        ("deepseek-v3", "scoring_func", "softmax"),
        ("deepseek-v3", "topk_method", "greedy"),
        ("deepseek-v3", "num_key_value_heads", 2),
        ("deepseek-v3", "v_head_dim", None),
        ("deepseek-v3", "kv_lora_rank", 0),
        ("deepseek-v3", "qk_rope_head_dim", 7),
        ("deepseek-v3", "rope_parameters", YARN["rope_parameters"] | {"mscale_all_dim": -1.0}),
        ("mistral4", "first_k_dense_replace", -1),
        ("mistral4", "n_group", None),
        ("mistral4", "num_key_value_heads", 2),
        ("mistral4", "rope_parameters", YARN["rope_parameters"]),
        ("mistral4", "rope_parameters", GROWING["rope_parameters"] | {"rope_type": "default"}),
        ("mistral4", "rope_parameters", {**GROWING["rope_parameters"], **PARTLY}),
        ("glm4-moe-lite", "mlp_layer_types", ["sparse"] * 2),
        ("glm4-moe-lite", "topk_method", "greedy"),
        ("glm4-moe-lite", "first_k_dense_replace", 1),
        ("exaone-moe", "num_shared_experts", 0),
        ("exaone-moe", "scoring_func", "softmax"),
        ("granite-moe-shared", "shared_intermediate_size", -1),
        ("granite-moe-swa", "layer_rope_theta", [1.0]),
        ("hyperclovax", "logits_scaling", 0.0),
        ("hyperclovax", "use_post_norm", False),
        ("apertus", "hidden_act", "silu"),
        ("ernie4.5-moe", "use_bias", True),
        ("ernie4.5-moe", "moe_layer_interval", 0),
        ("ernie4.5-moe", "moe_num_shared_experts", -1),
        ("ernie4.5-moe", "moe_norm_min", 0.5),
        ("glm4-moe-groups", "n_group", 5),
        ("glm4-moe-groups", "n_group", 12),
        ("glm4-moe-groups", "n_group", 0),
        ("glm4-moe-groups", "topk_group", 0),
        ("glm4-moe-groups", "topk_group", 5),
        ("glm4-moe", "n_shared_experts", 0),
        ("glm4-moe", "routed_scaling_factor", math.inf),
        ("llama4", "num_experts_per_tok", 2),
        ("llama4", "num_local_experts", 0),
        ("llama4", "attention_chunk_size", 0),
        ("llama4", "attention_chunk_size", None),
        ("llama4", "layer_types", ["sliding_attention"] * 4),
        ("llama4", "no_rope_layers", [1]),
        ("llama4", "rope_parameters", YARN["rope_parameters"]),
        ("llama4", "floor_scale", 0),
        ("llama4", "attn_scale", math.inf),
        ("llama4", "intermediate_size_mlp", 0),
        ("olmo-hybrid", "layer_types", ["linear_attention", "sliding_attention"] * 2),
        ("olmo-hybrid", "linear_num_value_heads", 2),
        ("mistral-window", "sliding_window", 0),
        ("qwen3.5", "linear_num_key_heads", 0),
        ("qwen3.5", "linear_conv_kernel_dim", 0),
    ],
)
def test_layers_that_would_be_computed_wrongly_are_refused(
    name: str, field: str, value: object, tmp_path: Path
) -> None:
    kind = type(CONFIGS[name]).__name__.removesuffix("Config").removesuffix("Text")
    CONFIGS[name].architectures = [f"{kind}ForCausalLM"]
    CONFIGS[name].save_pretrained(tmp_path)
    load_model_config(tmp_path)
    edit_config(tmp_path, **{field: value})
    with pytest.raises(ConfigError) as caught:
        load_model_config(tmp_path)
    assert caught.value.param == field


def test_a_kimi_k2_is_read_as_a_deepseek_v3(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = copy.deepcopy(CONFIGS["deepseek-v3"])
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(tmp_path)
    as_deepseek = load_model_config(tmp_path)
    stated = config.rope_parameters
    scaling = {"type": "yarn", **{n: v for n, v in stated.items() if not n.startswith("rope_")}}
    edit_config(
        tmp_path,
        model_type="kimi_k2",
        auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        rope_parameters=DROP,
        rope_theta=stated["rope_theta"],
        rope_scaling=scaling,
        ep_size=1,
        moe_layer_freq=1,
        num_nextn_predict_layers=0,
        scoring_func="sigmoid",
        seq_aux=True,
        topk_method="noaux_tc",
    )
    assert load_model_config(tmp_path) == as_deepseek
    assert not caplog.records
    edit_config(tmp_path, architectures=["Glm4MoeLiteForCausalLM"])
    with pytest.raises(ConfigError, match="'kimi_k2' does not belong to Glm4MoeLite"):
        load_model_config(tmp_path)


def test_how_many_experts_there_are_is_a_number_under_its_other_name_too(tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIGS["qwen3-moe"])
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    edit_config(tmp_path, num_local_experts=None)
    with pytest.raises(ConfigError) as caught:
        load_model_config(tmp_path)
    assert caught.value.param == "num_experts"


def test_old_style_rope_fields_are_read(folder: Path) -> None:
    scaling = {"rope_type": "llama3", **LLAMA3["rope_parameters"]}
    del scaling["rope_theta"]
    edit_config(folder, rope_parameters=DROP, rope_theta=5000.0, rope_scaling=scaling)
    rope_config = load_model_config(folder).ropes[0]
    assert (rope_config.type, rope_config.theta, rope_config.factor) == ("llama3", 5000.0, 8.0)
    edit_config(folder, rope_scaling={"type": "linear", "factor": 3.0})
    rope_config = load_model_config(folder).ropes[0]
    assert (rope_config.type, rope_config.theta, rope_config.factor) == ("linear", 5000.0, 3.0)


def test_eos_ids_come_from_the_generation_config_first(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load_model_config(folder).eos_token_ids == (5, 7)
    (folder / "generation_config.json").unlink()
    assert load_model_config(folder).eos_token_ids == (2,)
    edit_config(folder, eos_token_id=None)
    assert load_model_config(folder).eos_token_ids == ()


@pytest.mark.parametrize("stated", ["2", [2, -1], True, {}])
def test_eos_ids_that_are_none_are_refused(folder: Path, stated: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    with pytest.raises(ConfigError) as caught:
        load_model_config(folder)
    assert caught.value.param == "eos_token_id"


def test_how_the_makers_of_a_model_sample(folder: Path) -> None:
    assert sampling_defaults(folder) == {}
    stated = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    assert sampling_defaults(folder) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(("field", "value"), [("temperature", "hot"), ("top_p", 2), ("top_k", [])])
def test_a_wrong_way_to_sample_is_refused(folder: Path, field: str, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ConfigError, match=r"generation_config\.json") as caught:
        sampling_defaults(folder)
    assert caught.value.param == field


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Keys with "__" for "."; None drops a tensor."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path)


def reload(folder: Path) -> Weights:
    return load_weights(folder, load_model_config(folder), torch.float32, "cpu")


def test_weights_that_do_not_fit_are_refused_by_name(folder: Path) -> None:
    change_weights(folder, model__layers__1__self_attn__k_proj__weight=torch.zeros(3, 32))
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.k_proj\.weight has shape"):
        reload(folder)
    zeros = torch.zeros(16, 32, dtype=torch.int8)
    change_weights(folder, model__layers__1__self_attn__k_proj__weight=zeros)
    with pytest.raises(ConfigError, match="dtype I8"):
        reload(folder)
    change_weights(folder, model__layers__1__self_attn__k_proj__weight=None)
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        reload(folder)


def test_extra_tensors(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    freq = torch.zeros(4)
    change_weights(folder, model__layers__0__self_attn__rotary_emb__inv_freq=freq)
    reload(folder)
    assert not caplog.records
    change_weights(folder, model__strange=freq)
    reload(folder)
    assert "model.strange" in caplog.text


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_of_a_tensor_in_two_files_the_last_counts(folder: Path, quantization: str | None) -> None:
    config = load_model_config(folder)
    wanted = load_weights(folder, config, torch.float32, "cpu", quantization)
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qk"]
    first = {n: t + 1 for n, t in load_file(folder / "b.safetensors").items() if n in names}
    save_file(first, folder / "a.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load_weights(folder, config, torch.float32, "cpu", quantization)
    for key, matrix in wanted.matrices.items():
        values = found.matrices[key].dequantized(torch.float32)
        assert torch.equal(values, matrix.dequantized(torch.float32)), key


def test_a_model_saved_over_one_in_several_files_is_read(tmp_path: Path) -> None:
    model = make_model(CONFIGS["llama"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(reload(tmp_path).embed, model.get_input_embeddings().weight)


def test_the_hash_of_a_base_tells_models_of_one_shape_apart(tmp_path: Path) -> None:
    """It is that of the weights, whatever the folder is called and however it is divided."""
    model, found = make_model(CONFIGS["llama"]), []
    for number, size in enumerate(("5GB", "20KB")):
        model.save_pretrained(tmp_path / str(number), max_shard_size=size)
        found.append(sample_hash(ModelArgs(str(tmp_path / str(number)))))
    assert found[0] == found[1] != ""
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "tuned")
    assert sample_hash(ModelArgs(str(tmp_path / "tuned"))) not in found
    assert sample_hash(ModelArgs(str(tmp_path / "0"), load_format="dummy")) == ""


def test_a_tied_head_may_be_stored_but_must_be_equal(tmp_path: Path) -> None:
    make_model(CONFIGS["llama3-tied"]).save_pretrained(tmp_path)
    embed = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(tmp_path, lm_head__weight=embed.clone())
    weights = reload(tmp_path)
    assert weights.head.data_ptr() == weights.embed.data_ptr()
    change_weights(tmp_path, lm_head__weight=embed + 1)
    with pytest.raises(ConfigError, match="differs"):
        reload(tmp_path)


def test_pickles_missing_files_and_wild_indexes_are_refused(folder: Path) -> None:
    config = load_model_config(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: only safetensors"):
        load_weights(folder, config, torch.float32, "cpu")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        load_weights(folder, config, torch.float32, "cpu")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match="can't read"):
        load_weights(folder, config, torch.float32, "cpu")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    too_long, wrong = f"{'x' * 5000}.safetensors", ("../model.safetensors", "model.bin", 3, [])
    for name in (*wrong, "missing.safetensors", too_long):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ConfigError, match=r"index|missing|too long"):
            load_weights(folder, config, torch.float32, "cpu")


def test_folders_that_are_not_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        resolve_model(tmp_path / "absent")
    for name, wanted in ((f"/{'x' * 5000}", "too long"), ("~nobody-here/base", "home directory")):
        with pytest.raises(ConfigError, match=wanted):
            resolve_model(name)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="can't read"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="--revision is for models from the hub"):
        load_model_config(tmp_path, "main")


def test_dummy_weights_are_reproducible_and_run(tiny: ModelConfig) -> None:
    a, b = (dummy_weights(tiny, torch.float32, "cpu", seed=3) for _ in range(2))
    assert torch.equal(a.dense("1.qkv"), b.dense("1.qkv"))
    assert not torch.equal(a.embed, dummy_weights(tiny, torch.float32, "cpu").embed)
    assert num_parameters(a.table) == make_model(CONFIGS["llama"]).num_parameters()
    decoder = Decoder(tiny, a, Ops(), 64)
    (logits,) = run_chunked(decoder, [[1, 2, 3]], [[2, 1]])
    assert logits.shape == (3, tiny.vocab_size)
    assert logits.isfinite().all()


def test_kv_cache_has_the_size_that_is_planned(tiny: ModelConfig) -> None:
    kv = allocate_kv_cache(tiny, 5, BLOCK, torch.bfloat16, "cpu")
    held = sum(t.nbytes for c in kv for t in (c.k, c.v))
    assert held == 5 * kv_bytes_per_block(tiny, BLOCK, torch.bfloat16)
    assert kv[0].k.shape == (5, BLOCK, tiny.num_kv_heads, tiny.head_dim)
