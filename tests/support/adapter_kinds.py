"""The kinds of adapters that are compared with `peft`, and bases of every family for them."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
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
    Jais2Config,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
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
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SarvamMoEConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    VaultGemmaConfig,
    YoutuConfig,
)

# A card is text for people, and takes longer than all else that peft saves.
PeftModel.create_or_update_model_card = lambda *_: None

VOCAB = 80

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
SMALL = {n: v for n, v in SIZES.items() if n != "intermediate_size"}
"""The sizes of models without dense MLPs."""
ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
}
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
SCALES: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
}
WINDOW_AND_ALL = ["sliding_attention", "full_attention"]
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    # The first layer is dense, and has rope and chunks of positions.
    "llama4": Llama4TextConfig(
        **SIZES | {"intermediate_size": 20},
        pad_token_id=None,
        intermediate_size_mlp=48,
        head_dim=16,
        num_local_experts=6,
        moe_layers=[1],
        no_rope_layers=[1, 0],
        attention_chunk_size=24,
        floor_scale=16,
        attn_scale=0.3,
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=24),
    "arcee": ArceeConfig(**SIZES | {"eos_token_id": []}, mlp_bias=True),
    "nemotron": NemotronConfig(**SIZES, head_dim=16),
    "jais2": Jais2Config(**SIZES),
    "apertus": ApertusConfig(
        **SIZES,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    ),
    "ministral3": Ministral3Config(
        **SIZES,
        pad_token_id=None,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "seed-oss": SeedOssConfig(
        **SIZES, pad_token_id=None, head_dim=16, attention_out_bias=True, mlp_bias=True
    ),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "phi3": Phi3Config(
        **SIZES,
        pad_token_id=None,
        sliding_window=24,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        tie_word_embeddings=False,
    ),
    "olmo2": Olmo2Config(**SIZES, pad_token_id=None, tie_word_embeddings=False),
    "olmo3": Olmo3Config(**SIZES, pad_token_id=None, sliding_window=24, layer_types=WINDOW_AND_ALL),
    "olmo-hybrid": OlmoHybridConfig(
        **SIZES | {"initializer_range": 0.1},
        pad_token_id=None,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=16,
    ),
    "ernie4.5": Ernie4_5Config(**SIZES, pad_token_id=None, head_dim=16, use_bias=True),
    "helium": HeliumConfig(**SIZES | {"bos_token_id": 1, "eos_token_id": []}, head_dim=8),
    "cwm": CwmConfig(
        **SIZES | {"bos_token_id": 1, "eos_token_id": []},
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        head_dim=16,
        sliding_window=24,
        layer_types=WINDOW_AND_ALL,
    ),
    "hunyuan": HunYuanDenseV1Config(
        **SIZES | {"eod_token_id": None, "pad_token_id": None}, head_dim=16
    ),
    "exaone4": Exaone4Config(
        **SIZES, pad_token_id=None, sliding_window=24, layer_types=WINDOW_AND_ALL
    ),
    # The first layer is dense.
    "exaone-moe": ExaoneMoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        num_shared_experts=2,
        sliding_window=24,
        layer_types=WINDOW_AND_ALL,
    ),
    "smollm3": SmolLM3Config(**SIZES, pad_token_id=None, no_rope_layers=[1, 0]),
    "granite": GraniteConfig(
        **SIZES,
        pad_token_id=None,
        **SCALES,
    ),
    "granite-moe": GraniteMoeConfig(
        **SIZES | {"intermediate_size": 20},
        pad_token_id=None,
        num_local_experts=5,
        num_experts_per_tok=2,
        **SCALES,
    ),
    "granite-swa": GraniteSWAConfig(
        **SIZES,
        sliding_window=24,
        layer_types=WINDOW_AND_ALL,
        layer_rope_theta=[1e4, 0],
        **SCALES,
    ),
    "granite-moe-shared": GraniteMoeSharedConfig(
        **SIZES | {"intermediate_size": 20},
        **SCALES,
        pad_token_id=None,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
    ),
    "granite-moe-swa": GraniteMoeSWAConfig(
        **SIZES | {"intermediate_size": 20},
        **SCALES,
        pad_token_id=None,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
        sliding_window=24,
        layer_types=WINDOW_AND_ALL,
        layer_rope_theta=[1e4, 0],
    ),
    "hyperclovax": HyperCLOVAXConfig(
        **SIZES, **SCALES, pad_token_id=None, head_dim=16, tie_word_embeddings=False
    ),
    "granite4": GraniteMoeHybridConfig(
        **SIZES,
        pad_token_id=None,
        layer_types=["linear_attention", "full_attention"],
        position_embedding_type="rope",
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
        mamba_n_heads=4,
        mamba_d_state=8,
        **SCALES,
    ),
    "lfm2": Lfm2Config(
        **SIZES, pad_token_id=None, layer_types=["conv", "full_attention"], block_multiple_of=8
    ),
    # The first layer is dense.
    "lfm2-moe": Lfm2MoeConfig(
        **SIZES,
        pad_token_id=None,
        layer_types=["full_attention", "conv"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        tie_word_embeddings=False,
    ),
    "glm4": Glm4Config(
        **SIZES | {"pad_token_id": None, "eos_token_id": []}, head_dim=16, rms_norm_eps=1e-5
    ),
    "cohere2": Cohere2Config(
        **SIZES, pad_token_id=None, sliding_window=24, layer_types=WINDOW_AND_ALL
    ),
    "qwen3.5": Qwen3_5TextConfig(
        **SIZES | {"initializer_range": 0.1},
        **HYBRID,
        tie_word_embeddings=False,
    ),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **SMALL | {"initializer_range": 0.1},
        **HYBRID,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=12,
        tie_word_embeddings=False,
    ),
    # The first layer is dense.
    "qwen3-next": Qwen3NextConfig(
        **SIZES | {"initializer_range": 0.1},
        **HYBRID,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=12,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    ),
    "gemma": GemmaConfig(**SIZES, head_dim=16),
    "gemma2": Gemma2Config(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=8,
        sliding_window=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=20.0,
    ),
    "vaultgemma": VaultGemmaConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=8,
        sliding_window=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=8,
        sliding_window=24,
        layer_types=WINDOW_AND_ALL,
    ),
    # The last two layers read the caches of the others.
    "gemma4": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        pad_token_id=None,
        head_dim=8,
        global_head_dim=16,
        sliding_window=24,
        layer_types=WINDOW_AND_ALL * 2,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
    ),
    # With so large an epsilon, a norm of twice its input differs.
    "gemma4-moe": Gemma4TextConfig(
        **SIZES,
        rms_norm_eps=0.1,
        pad_token_id=None,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=24,
        layer_types=WINDOW_AND_ALL,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=20,
        tie_word_embeddings=False,
    ),
    # The first layer is dense.
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    ),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=12,
    ),
    "olmoe": OlmoeConfig(
        **SIZES | {"intermediate_size": 20},
        pad_token_id=None,
        num_experts=6,
        num_experts_per_tok=2,
    ),
    "minimax-m2": MiniMaxM2Config(
        **SIZES | {"intermediate_size": 20},
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    # The first layer is dense.
    "glm4-moe": Glm4MoeConfig(
        **SIZES,
        head_dim=16,
        use_qk_norm=True,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    # The first layer is dense.
    "sarvam-moe": SarvamMoEConfig(**SIZES, **ROUTED, pad_token_id=None, head_dim=16),
    "dots1": Dots1Config(
        **SIZES,
        **ROUTED,
        head_dim=16,
        first_k_dense_replace=1,
        sliding_window=24,
        max_window_layers=1,
    ),
    # The first layer of each of these three is dense.
    "deepseek-v2": DeepseekV2Config(
        **SIZES | LATENTS,
        **ROUTED,
        q_lora_rank=None,
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek-v3": DeepseekV3Config(
        **SIZES | LATENTS,
        **ROUTED | {"n_routed_experts": 8},
        q_lora_rank=24,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=10.0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "glm4-moe-lite": Glm4MoeLiteConfig(**SIZES | LATENTS, **ROUTED, q_lora_rank=24),
    "mistral4": Mistral4Config(
        **SIZES | LATENTS,
        **ROUTED,
        q_lora_rank=24,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "youtu": YoutuConfig(**SIZES | LATENTS, q_lora_rank=24),
    "solar-open": SolarOpenConfig(**SMALL, **ROUTED, head_dim=16),
    # The first layer is dense.
    "ernie4.5-moe": Ernie4_5_MoeConfig(
        **SIZES,
        moe_num_experts=6,
        moe_k=2,
        moe_intermediate_size=20,
    ),
    # Two ranks have a part of every expert, and four of them whole experts.
    "gpt-oss": GptOssConfig(
        **SIZES | {"intermediate_size": 64},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    ),
    "nemotron-h": NemotronHConfig(
        **{n: v for n, v in SIZES.items() if n != "num_hidden_layers"},
        **ROUTED,
        pad_token_id=None,
        layers_block_type=["linear_attention", "full_attention", "moe", "mlp"],
        head_dim=16,
        n_groups=2,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        time_step_min=0.5,
        moe_shared_expert_intermediate_size=24,
        routed_scaling_factor=1.5,
    ),
    "nemotron-h-latents": NemotronHConfig(
        **{n: v for n, v in SIZES.items() if n != "num_hidden_layers"},
        **ROUTED,
        pad_token_id=None,
        layers_block_type=["full_attention", "moe", "mlp"],
        head_dim=16,
        moe_shared_expert_intermediate_size=24,
        moe_latent_size=16,
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
IN_FOUR = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
LINEAR = {
    "granite4": ["in_proj", "out_proj"],
    "lfm2": ["in_proj"],
    "lfm2-moe": ["in_proj"],
    "nemotron-h": ["in_proj"],
    "olmo-hybrid": ["g_proj", "b_proj", "a_proj"],
    "qwen3.5": IN_FOUR,
    "qwen3.5-moe": [*IN_FOUR, "shared_expert_gate"],
    "qwen3-next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"],
}
"""Families with recurrent states, and what they have beside the projections of others."""
LATENT = {
    "deepseek-v2": ["kv_a_proj_with_mqa"],
    "deepseek-v3": ["q_a_proj", "kv_a_proj_with_mqa"],
    "glm4-moe-lite": ["q_a_proj", "kv_a_proj_with_mqa"],
    "mistral4": ["q_a_proj", "kv_a_proj_with_mqa"],
    "youtu": ["q_a_proj", "kv_a_proj_with_mqa"],
}
"""Families with attention to latents, and their projections to these."""
BIASED = ("qwen2", "qwen2-moe", "glm4", "seed-oss", "ernie4.5", "arcee")
MIXTURES = (
    *("qwen3-moe", "qwen3.5-moe", "qwen3-next", "qwen2-moe", "olmoe", "glm4-moe", "gemma4-moe"),
    *("granite4", "gpt-oss", "mixtral", "minimax-m2", "dots1", "solar-open"),
    *("ernie4.5-moe", "granite-moe", "deepseek-v2", "deepseek-v3", "glm4-moe-lite", "lfm2-moe"),
    *("nemotron-h", "mistral4", "exaone-moe", "granite-moe-shared", "granite-moe-swa", "llama4"),
    *("sarvam-moe", "nemotron-h-latents"),
)
ONLY_EXPERTS = ("olmoe", "gpt-oss", "mixtral", "minimax-m2", "solar-open", "granite-moe")
"""The families whose layers have no MLP but experts. peft takes the names of the projections of
Solar Open's shared experts for those of the others, and can't give these a rank of their own."""
CONVERTED = (
    *("qwen3-moe", "olmoe", "glm4-moe", "mixtral", "minimax-m2", "dots1", "solar-open"),
    *("ernie4.5-moe", "deepseek-v2", "deepseek-v3", "glm4-moe-lite", "exaone-moe"),
)
"""The families for which peft too reads adapters of single experts."""
UNTIED = (
    *(
        "llama",
        "mistral",
        "ministral3",
        "qwen2",
        "phi3",
        "olmo2",
        "olmo3",
        "granite",
        "glm4",
        "seed-oss",
        "exaone4",
        "hunyuan",
        "cwm",
        "arcee",
        "hyperclovax",
        "apertus",
        "helium",
        "nemotron",
        "jais2",
        "olmo-hybrid",
        "qwen3.5",
    ),
    *MIXTURES,
)
UNBIASED_NORMS = tuple(name for name in FAMILIES if name not in ("nemotron", "jais2"))
"""The families whose norms adapters can replace. Those of others have biases, too."""
NEWER = (
    *("olmo3", "smollm3", "granite", "gemma", "gemma2", "gemma3", "gemma4", "glm4"),
    *("cohere2", "seed-oss", "exaone4", "hunyuan", "ernie4.5", "cwm", "granite-swa"),
    *("arcee", "hyperclovax", "youtu", "apertus", "helium", "vaultgemma"),
    *("nemotron", "jais2"),
    *("qwen3.5", "lfm2", "olmo-hybrid"),
)
ALWAYS = ("qwen2", "phi3", "gemma3", "qwen3-next", "deepseek-v3")
"""The families that differ most in what adapters meet. Each kind is tried on some of these;
`make exhaustive` tries all kinds on all families."""
SERVED = (
    "llama-tied",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3-tied",
    "phi3",
    "olmo2",
    *NEWER,
    *MIXTURES,
)
"""One of each architecture."""


@dataclass(frozen=True)
class Kind:
    """A way to adapt a model, as fields of a config."""

    options: Mapping[str, Any]
    families: tuple[str, ...] = tuple(FAMILIES)
    save: Mapping[str, Any] = field(default_factory=dict)
    """Options of save_pretrained."""
    change: Callable[[PeftModel], None] = lambda model: None
    """Changes the model after its weights were made random."""
    config: type[PeftConfig] = LoraConfig
    resize: int = 0
    """How many tokens were added to the base's; negative: taken away."""
    dtype: torch.dtype = torch.float32
    """The dtype of the file's tensors."""
    invocation: tuple[int, ...] = ()
    """Tokens that must be in a prompt."""

    @property
    def changes_ends(self) -> bool:
        """Whether it says anything of the embedding or the head."""
        named = any(end in repr(self.options) for end in (*ENDS, "trainable_token_indices"))
        return named or bool(self.save or self.resize)

    def options_on(self, family: str) -> dict[str, Any]:
        """The options as a family can have them: Mixtral and gpt-oss have no MLP but their experts,
        peft has no DoRA of experts, Phi-3 has one projection for q, k and v, and one for gate and
        up, as GLM-4 and Granite 4 have, LFM2 has names of its own, and the norm of linear attention
        is none of those that can be saved. Attention to latents has one projection to keys and
        values, which no aLoRA can change. The input of Apertus' down_proj can't be scaled."""
        options = dict(self.options)
        if family in LINEAR:
            if (
                isinstance(options["target_modules"], list)
                and "o_proj" in options["target_modules"]
            ):
                options["target_modules"] = [*options["target_modules"], *LINEAR[family]]
                if "alora_invocation_tokens" in options:  # peft fails where rows are flat
                    options["target_modules"] = [
                        t for t in options["target_modules"] if t != "shared_expert_gate"
                    ]
            if options.get("modules_to_save") == ["norm"] and family not in LFM2:
                options["modules_to_save"] = ["layernorm", "q_norm", "k_norm", "model.norm"]
        if family in LATENT and "o_proj" in (options["target_modules"] or ""):
            options["target_modules"] = [*options["target_modules"], *LATENT[family]]
            if "alora_invocation_tokens" in options:
                others = [t for t in options["target_modules"] if t not in ("k_proj", "v_proj")]
                options["target_modules"] = others
        adapts_attention = "o_proj" in (options["target_modules"] or "")
        rows_are_flat = "alora_invocation_tokens" in options  # where peft fails
        if family == "nemotron-h-latents" and adapts_attention and not rows_are_flat:
            around_experts = ["fc1_latent_proj", "fc2_latent_proj"]
            options["target_modules"] = [*options["target_modules"], *around_experts]
        for names in FUSED.get(family, ()):
            options = {name: fused(value, *names) for name, value in options.items()}
        targets, parameters = options["target_modules"], options.get("target_parameters")
        if family in NEMOTRON and targets == "all-linear":
            options["exclude_modules"] = ["out_proj"]  # which peft refuses in this family
        if family == "llama4" and targets == "all-linear":
            options["exclude_modules"] = ["router"]  # whose two outputs peft can't add to
        if family == "gemma4-moe" and targets == "all-linear" and parameters:
            # Its router is a linear layer, and so among these.
            options["target_parameters"] = [p for p in parameters if "router" not in p]
        no_mlp = family in ONLY_EXPERTS or (family in MIXTURES and options.get("use_dora"))
        if no_mlp and isinstance(targets, list) and targets:
            options["target_modules"] = [t for t in targets if t not in MLP] or ATTENTION
        if (family in ONLY_EXPERTS or family == "apertus") and "feedforward_modules" in options:
            options["feedforward_modules"] = []
        return options


QKV, GATE_UP = (r"\b[qkv]_proj", "qkv_proj"), (r"\b(gate|up)_proj", "gate_up_proj")
ROUTER = r"\bmlp\.gate\.", "mlp.router."
OF_LAYER = (r"\bmlp\.gate\b", "router.proj"), (r"\bmlp\.experts\b", "experts")
SHARED_MLP = (
    (r"\b(gate|up)_proj", "input_linear"),
    (r"(?<!experts\.)\bdown_proj", "output_linear"),
    (r"\bmlp\b", "shared_mlp"),
)
SPARSE = (
    (r"\bmlp\.gate\b", "block_sparse_moe.router"),
    (r"\bmlp\.experts\b", "block_sparse_moe.experts"),
)
KEYS_AND_VALUES, QUERIES = (r"\b[kv]_proj", "kv_b_proj"), (r"\bq_proj", "q_b_proj")
LFM2 = dict.fromkeys(
    ("lfm2", "lfm2-moe"),
    (
        (r"\bo_proj", "out_proj"),
        (r"\bgate_proj", "w1"),
        (r"\bup_proj", "w3"),
        (r"(?<!experts\.)\bdown_proj", "w2"),
        (r"\bmlp\b", "feed_forward"),
        (r"^model\.norm", "model.embedding_norm"),
    ),
)
NEMOTRON = dict.fromkeys(
    ("nemotron-h", "nemotron-h-latents"),
    (
        (r"\b(self_attn|mlp)\b", "mixer"),
        (r"\bgate_up_proj\b", "up_proj"),
        (r"\bembed_tokens\b", "embeddings"),
        (r"^layernorm$", "1.norm"),
        (r"^model\.norm$", "norm_f"),
    ),
)
FUSED = {
    **LFM2,
    "deepseek-v2": (KEYS_AND_VALUES,),
    "deepseek-v3": (KEYS_AND_VALUES, QUERIES),
    "glm4-moe-lite": (KEYS_AND_VALUES, QUERIES),
    "mistral4": (KEYS_AND_VALUES, QUERIES),
    "youtu": (KEYS_AND_VALUES, QUERIES),
    "phi3": (QKV, GATE_UP),
    "glm4": (GATE_UP,),
    "granite-moe": SPARSE,
    **dict.fromkeys(("granite4", "granite-moe-shared", "granite-moe-swa"), (*SPARSE, *SHARED_MLP)),
    "gpt-oss": (ROUTER,),
    **NEMOTRON,
    "gemma4-moe": OF_LAYER,
    "llama4": ((r"\bmlp\.gate\.", "feed_forward.router."), (r"\bmlp\b", "feed_forward")),
}
"""By family: a pattern for the projections that it lacks, and the one that it has instead."""
GROWING = tuple(name for name in FAMILIES if name != "gemma4")
"""The families to which tokens can be added. gemma4's second embedding has no rows for them."""


def fused(value: Any, parts: str, whole: str) -> Any:
    """An option, with the fused projection `whole` in place of its `parts`."""
    if isinstance(value, list):
        return list(dict.fromkeys(fused(entry, parts, whole) for entry in value))
    if isinstance(value, dict):
        return {fused(name, parts, whole): entry for name, entry in value.items()}
    if not isinstance(value, str):
        return value
    return re.sub(parts, whole, value.replace("(q|gate|up)_proj", "(q_proj|gate_proj|up_proj)"))


def lora(targets: list[str] | str = ATTENTION, **options: Any) -> dict[str, Any]:
    return {"r": 3, "lora_alpha": 4, "target_modules": targets, **options}


def change_embeddings(model: PeftModel) -> None:
    """Change some rows of the base's embedding and head, as if these had been trained too."""
    base = model.get_base_model()
    for module in (base.get_input_embeddings(), base.get_output_embeddings()):
        weight = getattr(module, "base_layer", module).weight
        weight.data[::3] += 0.1


def restore_most_rows(model: PeftModel) -> None:
    base = model.get_base_model()
    for module in (base.get_input_embeddings(), base.get_output_embeddings()):
        module.modules_to_save["default"].weight.data[5:] = module.original_module.weight[5:]


ENDS = ["embed_tokens", "lm_head"]
KINDS: dict[str, Kind] = {
    "LoRA": Kind(lora([*ATTENTION, *MLP], rank_pattern={"k_proj": 5}, use_rslora=True)),
    "alpha_pattern": Kind(lora(alpha_pattern={"q_proj": 7, "1.self_attn.*": 2})),
    "rank_pattern and alpha_pattern": Kind(
        lora(MLP, rank_pattern={"^model.layers.0.*": 33}, alpha_pattern={"up_proj": 1})
    ),
    "expression": Kind(lora(r".*\.(q|gate|up)_proj", exclude_modules=r".*\.0\.mlp\..*")),
    "all-linear": Kind(lora("all-linear", r=1)),
    "layers_to_transform": Kind(lora(["o_proj"], layers_to_transform=[1])),
    "exclude_modules": Kind(lora(exclude_modules=["v_proj"])),
    "gaussian": Kind(lora(init_lora_weights="gaussian")),
    "LoRA of embedding and head": Kind(
        lora(["q_proj", *ENDS]), save={"save_embedding_layers": False}
    ),
    "DoRA": Kind(lora([*ATTENTION, *MLP], use_dora=True)),
    "DoRA of embedding and head": Kind(lora(["v_proj", *ENDS], use_dora=True)),
    "lora_bias": Kind(lora(["q_proj", "v_proj", "lm_head"], lora_bias=True)),
    "bias: lora_only": Kind(lora(["q_proj", "k_proj"], bias="lora_only"), BIASED),
    "bias: all": Kind(lora(["q_proj", "gate_proj"], bias="all"), BIASED),
    "bias: all and lora_bias": Kind(lora(["v_proj"], bias="all", lora_bias=True), BIASED),
    "DoRA and bias: all": Kind(lora(ATTENTION, bias="all", use_dora=True), BIASED),
    "modules_to_save: head": Kind(lora(modules_to_save=["lm_head"])),
    "modules_to_save: embedding": Kind(lora(modules_to_save=["embed_tokens"])),
    # peft makes no LoRA of targets that are saved.
    "modules_to_save: both": Kind(lora([*ATTENTION, *ENDS], modules_to_save=ENDS, use_dora=True)),
    "modules_to_save: a few rows": Kind(lora(modules_to_save=ENDS), change=restore_most_rows),
    "modules_to_save: norms": Kind(lora(modules_to_save=["norm"]), UNBIASED_NORMS),
    "modules_to_save: last norm": Kind(lora(modules_to_save=["model.norm"]), UNBIASED_NORMS),
    "trainable_token_indices": Kind(lora(trainable_token_indices=[7, 3, 79])),
    "trainable_token_indices of both": Kind(
        lora(trainable_token_indices={"embed_tokens": [5, 0], "lm_head": [1, 30, 2]})
    ),
    "trainable_token_indices of both alike": Kind(
        lora(trainable_token_indices={"embed_tokens": [5, 0], "lm_head": [5, 0]})
    ),
    "trainable_token_indices of the head": Kind(lora(trainable_token_indices={"lm_head": [1, 30]})),
    "trainable_token_indices and saved": Kind(
        lora(trainable_token_indices=[7, 3]), save={"save_embedding_layers": True}
    ),
    "embeddings saved along": Kind(lora(), save={"save_embedding_layers": True}),
    "embeddings trained and saved along": Kind(
        lora(), save={"save_embedding_layers": True}, change=change_embeddings
    ),
    "LoRA of embedding trained and saved along": Kind(
        lora(["q_proj", "embed_tokens"], use_dora=True),
        save={"save_embedding_layers": True},
        change=change_embeddings,
    ),
    "ensure_weight_tying: LoRA": Kind(lora(["q_proj", *ENDS], ensure_weight_tying=True)),
    "ensure_weight_tying: DoRA": Kind(
        lora(["q_proj", "embed_tokens"], ensure_weight_tying=True, use_dora=True)
    ),
    "ensure_weight_tying: modules_to_save": Kind(
        lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    ),
    "ensure_weight_tying: trainable_token_indices": Kind(
        lora(trainable_token_indices=[7, 3], ensure_weight_tying=True)
    ),
    "fan_in_fan_out": Kind(lora(["q_proj", *ENDS], use_dora=True, fan_in_fan_out=True)),
    "AdaLoRA": Kind(
        {"init_r": 4, "total_step": 9, "target_modules": [*ATTENTION, *MLP]}, config=AdaLoraConfig
    ),
    "VeRA": Kind({"r": 6, "target_modules": [*ATTENTION, *MLP]}, config=VeraConfig),
    "VeRA without its projections": Kind(
        {"r": 6, "target_modules": ["q_proj", "down_proj"], "save_projection": False},
        config=VeraConfig,
    ),
    "LoHa": Kind({"r": 3, "target_modules": [*ATTENTION, *MLP]}, config=LoHaConfig),
    "LoKr": Kind({"r": 2, "target_modules": [*ATTENTION, *MLP]}, config=LoKrConfig),
    "IA3": Kind(
        {"target_modules": [*ATTENTION, *MLP], "feedforward_modules": ["down_proj"]},
        config=IA3Config,
    ),
    "IA3 of the head": Kind(
        {"target_modules": ["lm_head"], "feedforward_modules": []},
        UNTIED,
        save={"save_embedding_layers": False},
        config=IA3Config,
    ),
}


CALL = (70, 71, 72)
KINDS |= {
    "added tokens": Kind(lora(), GROWING, save={"save_embedding_layers": True}, resize=5),
    "added tokens: trained": Kind(
        lora(trainable_token_indices=[7, *range(VOCAB, VOCAB + 3)]),
        GROWING,
        save={"save_embedding_layers": True},
        resize=3,
    ),
    "fewer tokens": Kind(lora(), save={"save_embedding_layers": True}, resize=-9),
    "fewer tokens: LoRA of both": Kind(
        lora(["q_proj", *ENDS], use_dora=True), save={"save_embedding_layers": True}, resize=-30
    ),
    "fewer tokens: saved": Kind(lora(modules_to_save=ENDS), resize=-1),
    "fewer tokens: trained": Kind(
        lora(trainable_token_indices=[7, 30]), save={"save_embedding_layers": True}, resize=-20
    ),
    "float16": Kind(lora(), dtype=torch.float16),
    "bfloat16": Kind(lora(), dtype=torch.bfloat16),
    "aLoRA": Kind(lora(alora_invocation_tokens=list(CALL)), invocation=CALL),
}


SEEDS = {"qwen3_5_moe_text": 1}
"""Of bases, by the type of their model, where it is not 0. With 0, two experts of this one have the
same probability but for the last bits, in a prompt of one kind of adapter: either may be chosen."""


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes models with a head for tokens of this configuration:
    some models without eyes are among those that see."""
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def make_base(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    torch.manual_seed(SEEDS.get(config.model_type, 0))
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
    model.save_pretrained(folder)
    return model


def make_adapter(
    base: PreTrainedModel, kind: Kind, folder: Path, family: str = "llama"
) -> PeftModel:
    """Save an adapter to `folder`. Returns what peft loads from there."""
    with warnings.catch_warnings(action="ignore"):  # peft's, of what is tied, saved along and so on
        resized = copy.deepcopy(base)
        if kind.resize:
            torch.manual_seed(3)
            resized.resize_token_embeddings(VOCAB + kind.resize, mean_resizing=False)
        config = kind.config(task_type="CAUSAL_LM", **kind.options_on(family))
        model = get_peft_model(copy.deepcopy(resized), config)
        randomise(model)
        kind.change(model)
        model.save_pretrained(folder, **kind.save)
        if kind.dtype != torch.float32:
            weights = folder / "adapter_model.safetensors"
            save_file({k: v.to(kind.dtype) for k, v in load_file(weights).items()}, weights)
        return PeftModel.from_pretrained(resized, folder).eval()


def randomise(model: PeftModel) -> None:
    """Make all weights random that training would change."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "magnitude" in name:
            parameter.data *= torch.empty_like(parameter).uniform_(0.5, 1.5)
        elif "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            parameter.data += 0.2 * torch.randn(parameter.shape)
