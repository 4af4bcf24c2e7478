"""Lists the fields of configurations that are read, and those that don't matter. All others must be
at their default: a model that sets one is refused with the field's name, never served
approximately. Numbers that no model can have are refused here, too."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

from weft.core.errors import ConfigError
from weft.models.family import ActivationName, Family

logger = logging.getLogger(__name__)

READ = frozenset(
    {
        "architectures",
        "attention_bias",
        "attention_k_eq_v",
        "attention_multiplier",
        "attention_out_bias",
        "attention_chunk_size",
        "attn_logit_softcapping",
        "attn_scale",
        "attn_temperature_tuning",
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
        "conv_L_cache",
        "conv_bias",
        "conv_kernel",
        "decoder_sparse_step",
        "dtype",
        "embedding_multiplier",
        "enable_moe_block",
        "eos_token_id",
        "final_logit_softcapping",
        "first_k_dense_replace",
        "floor_scale",
        "global_head_dim",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "hidden_size",
        "hidden_size_per_layer_input",
        "interleave_moe_layer_step",
        "intermediate_size",
        "intermediate_size_mlp",
        "kv_lora_rank",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layer_rope_theta",
        "layer_types",
        "layers_block_type",
        "linear_allow_neg_eigval",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "logit_scale",
        "logits_scaling",
        "mamba_conv_bias",
        "mamba_d_conv",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_head_dim",
        "mamba_n_groups",
        "mamba_n_heads",
        "mamba_num_heads",
        "mamba_proj_bias",
        "max_position_embeddings",
        "mlp_bias",
        "mlp_hidden_act",
        "mlp_layer_types",
        "mlp_only_layers",
        "model_type",
        "moe_intermediate_size",
        "moe_k",
        "moe_latent_size",
        "moe_layers",
        "moe_layer_end_index",
        "moe_layer_interval",
        "moe_layer_start_index",
        "moe_num_experts",
        "moe_num_shared_experts",
        "moe_shared_expert_intermediate_size",
        "n_group",
        "n_groups",
        "n_routed_experts",
        "n_shared_experts",
        "no_rope_layers",
        "norm_eps",
        "norm_topk_prob",
        "num_attention_heads",
        "num_dense_layers",
        "num_experts",
        "num_experts_per_tok",
        "num_global_key_value_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_kv_shared_layers",
        "num_local_experts",
        "num_shared_experts",
        "original_max_position_embeddings",
        "per_layer_config",
        "position_embedding_type",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "qkv_bias",
        "quantization_config",
        "query_pre_attn_scalar",
        "residual_multiplier",
        "rms_norm_eps",
        "rope_interleave",
        "rope_parameters",
        "rotary_dim",
        "routed_scaling_factor",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "sliding_window",
        "sliding_window_pattern",
        "ssm_state_size",
        "swiglu_alpha",
        "swiglu_limit",
        "tie_word_embeddings",
        "time_step_min",
        "top_k_experts",
        "topk_group",
        "topk_method",
        "use_bias",
        "use_bidirectional_attention",
        "use_conv_bias",
        "use_double_wide_mlp",
        "use_expert_bias",
        "use_qk_norm",
        "use_sliding_window",
        "v_head_dim",
        "vocab_size",
        "vocab_size_per_layer_input",
    }
)
"""Fields that decide what is computed, here or in transformers' reading of other fields."""

WITHOUT_EFFECT = frozenset(
    {
        # what transformers makes of other fields that are read
        "_sliding_window_pattern",
        "full_attention_interval",
        "full_attn_idxs",
        "max_window_layers",
        "no_rope_layer_interval",
        "mamba_expand",
        "expand",
        # sizes that LFM2's files state twice
        "block_dim",
        "block_norm_eps",
        "conv_dim",
        "conv_dim_out",
        "num_heads",
        # the tokenizer's or the request's part
        "bos_token_id",
        "eod_token_id",
        "pad_token_id",
        # training
        "linear_a_log_max",
        "linear_a_log_min",
        "linear_dt_init_floor",
        "linear_dt_max",
        "linear_dt_min",
        "rescale_prenorm_residual",
        "time_step_floor",
        "time_step_max",
        "time_step_rank",
        "hidden_dropout",
        "attention_dropout",
        "aux_loss_alpha",
        "block_mlp_init_scale",
        "block_out_init_scale",
        "block_use_xavier_init",
        "conv_use_xavier_init",
        "embedding_initializer_range",
        "embd_pdrop",
        "initializer_range",
        "output_router_logits",
        "resid_pdrop",
        "residual_dropout",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        # how transformers computes or answers, not what
        "mamba_chunk_size",
        "mamba_ssm_cache_dtype",  # states are float32 here
        "chunk_size",
        "moe_shared_expert_overlap",
        "num_logits_to_keep",
        "use_mamba_kernels",
        "auto_map",
        "_attn_implementation_autoset",
        "cache_implementation",
        "chunk_size_feed_forward",
        "ep_size",
        "use_parallel_embedding",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "transformers_version",
        "use_cache",
        "_name_or_path",
        # what the tensors of a prediction head say
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        # prediction heads that are not served
        "mtp_layers_block_type",
        "mtp_transformer_layers",
        "num_mtp_layers",
        "num_mtp_modules",
        "num_nextn_predict_layers",
        "use_mtp",
    }
)

COMPUTED = {
    # Qwen 3.5
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "output_gate_type": "swish",
    # Qwen 3 VL MoE
    "norm_topk_prob": True,
    # MiniMax M2, dots.llm1, DeepSeek V3
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    # Granite 4
    "init_method": "mup",
    "normalization_function": "rmsnorm",
    # LFM2
    "block_use_swiglu": True,
    "theta": 1e6,
    "use_pos_enc": True,
    # Apertus
    "qk_norm": True,
    # Cohere 2
    "layer_switch": 4,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
}
"""Fields that transformers does not know, and the values that say what is computed in any case."""
_COMPUTED_OTHERWISE: dict[str, dict[str, object]] = {
    "deepseek_v2": {"scoring_func": "softmax"},
    # It rotates nothing, and what transformers calls head_dim is 128 if it is not stated.
    "nemotron_h": {"attention_head_dim": 128, "partial_rotary_factor": 1.0, "rope_theta": 10000},
}
"""Values in place of those in COMPUTED, by `model_type`."""


def check_fields(hf: Any) -> None:
    """Check all fields of a configuration of transformers. Raises ConfigError for a field that is
    not at its default, unless it is read or has no effect."""
    defaults, stated = type(hf)().to_dict(), hf.to_dict()
    computed = COMPUTED | _COMPUTED_OTHERWISE.get(hf.model_type, {})
    if "per_layer_config" in stated.keys() - defaults.keys():
        raise ConfigError(f"per_layer_config is not served for {hf.model_type}", "per_layer_config")
    for name, value in stated.items():
        is_known = name in defaults
        if (name in READ or name in WITHOUT_EFFECT) and (is_known or name not in COMPUTED):
            continue
        if is_known and value != defaults[name]:
            message = f"{name} {value!r} is not served, only {defaults[name]!r}"
            raise ConfigError(message, name)
        if not is_known and (value != computed[name] if name in computed else value):
            logger.warning("config.json: %s is not known to transformers; it is ignored", name)


_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size"),
    *("attention_chunk_size", "floor_scale"),
    *("block_multiple_of", "conv_L_cache"),
    *("max_position_embeddings", "n_shared_experts"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "vocab_size_per_layer_input"),
    *("conv_kernel", "mamba_head_dim", "mamba_num_heads", "n_groups", "ssm_state_size"),
    *("moe_latent_size", "moe_shared_expert_intermediate_size"),
    *("mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_n_heads"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_NUMBERS = (
    *("attention_multiplier", "attn_logit_softcapping", "attn_scale"),
    "block_ffn_dim_multiplier",
    *("embedding_multiplier", "final_logit_softcapping", "norm_eps"),
    *("layer_norm_eps", "logit_scale", "logits_scaling", "query_pre_attn_scalar"),
    *("residual_multiplier", "rms_norm_eps", "routed_scaling_factor"),
    *("layer_norm_epsilon", "swiglu_alpha", "swiglu_limit", "time_step_min"),
)
"""Fields that must be finite where a configuration has them."""
_FACTORS = "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"
"""Fields that must not be null either."""


def check_numbers(hf: Any, windows: Iterable[int | None]) -> None:
    """Check the sizes and other numbers of a configuration, and the layers' `windows`, which must
    be sizes too. Raises ConfigError for one that no model can have."""
    sizes = [(name, getattr(hf, name, None)) for name in _SIZES]
    for name, size in (*sizes, *(("sliding_window", window) for window in set(windows))):
        if size is not None and not 1 <= size < 1 << 31:
            raise ConfigError(f"{name} must be at least 1 and below 2**31, got {size}", name)
    for name in _FACTORS:
        if getattr(hf, name, 0) is None:
            raise ConfigError(f"{name} must be a number, got null", name)
    for name in _NUMBERS:
        number = getattr(hf, name, None) or 0.0
        is_negative = number < 0 and name.endswith(("_eps", "_epsilon", "_min"))
        if not abs(number) <= sys.float_info.max or is_negative:
            raise ConfigError(f"{name} can't be {number!r:.80}", name)


_ACTIVATIONS: dict[ActivationName, str] = {
    "silu": "silu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""The names of activations in configurations."""


def check_activation(hf: Any, family: Family) -> None:
    """Raises ConfigError for an activation that is not served for the family."""
    field, wanted = family.activation_field, _ACTIVATIONS[family.activation]
    found = getattr(hf, field, wanted)  # some families have no such field
    if found != wanted:
        raise ConfigError(f"{field} {found!r} is not served, only {wanted}", field)
