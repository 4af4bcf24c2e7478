"""Checks, field by field, what config.json says about a checkpoint's quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.core.errors import ConfigError

_FIELD, _OLDER_FIELD = "quantization_config", "compression_config"
_NOT_SPARSE = (None, "dense")
"""The formats of a sparsity_config that store all values."""


class _Anything:
    """The allowed values of a field that has no effect on the stored values: all."""

    def __contains__(self, value: object) -> bool:
        return True


_ANY = _Anything()
_Allowed = Mapping[str, Any]
_NAMES = dict.fromkeys(("modules_to_not_convert", "ignored_layers"), _ANY)

# What tells how a checkpoint was made, or how other programs should compute with it.
_GPTQ_HINTS = (
    *("act_group_aware", "backend", "batch_size", "block_name_to_quantize"),
    *("cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "desc_act"),
    *("exllama_config", "group_size", "hyb_act", "lm_head", "max_input_length", "meta"),
    *("model_file_base_name", "model_name_or_path", "model_seqlen", "mse", "pad_token_id"),
    *("module_name_preceding_first_block", "modules_in_block_to_quantize", "quantizer"),
    *("static_groups", "sym", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama"),
)
_BITSANDBYTES_HINTS = (
    *("_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype"),
    *("bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_threshold"),
    *("llm_int8_has_fp16_weight", "llm_int8_skip_modules"),
)

_AUTO_ROUND_HINTS = (
    *("amp", "autoround_version", "batch_size", "enable_minmax_tuning", "enable_norm_bias_tuning"),
    *("enable_quanted_input", "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr"),
    *("minmax_lr", "nsamples", "provider", "scale_dtype", "seqlen", "to_quant_block_names"),
)
_AUTO_ROUND: _Allowed = {**dict.fromkeys(_AUTO_ROUND_HINTS, _ANY), "data_type": ("int", None)}
"""What AutoRound writes besides the fields of the format in which it saves."""

_FP8: _Allowed = {
    **_NAMES,
    "activation_scheme": ("dynamic", "static", None),
    "dequantize": _ANY,
    "expert_dtype": ("fp8", None),
    "fmt": ("e4m3", None),
    "kv_cache_scheme": _ANY,
    "modules_to_convert": _ANY,
    "scale_fmt": ("float", "ue8m0", None),
    "weight_block_size": _ANY,
}
_GPTQ: _Allowed = {
    **_NAMES,
    **_AUTO_ROUND,
    **dict.fromkeys(_GPTQ_HINTS, _ANY),
    "bits": (2, 4, 8),
    "checkpoint_format": ("gptq", "gptq_v2", None),
    "format": ("gptq", "gptq_v2", None),
    "method": ("gptq", None),
    "pack_dtype": ("int32", None),
}
_AWQ: _Allowed = {
    **_NAMES,
    **_AUTO_ROUND,
    **dict.fromkeys(("do_fuse", "fuse_max_seq_len", "modules_to_fuse", *_GPTQ_HINTS), _ANY),
    "bits": (4,),
    "checkpoint_format": ("gemm", None),
    "format": ("gemm", None),
    "method": ("awq", None),
    "pack_dtype": ("int32", None),
    "version": ("gemm", "GEMM", None),
    "zero_point": (True,),
}
_BITSANDBYTES: _Allowed = {
    **_NAMES,
    **dict.fromkeys(_BITSANDBYTES_HINTS, _ANY),
    "bnb_4bit_quant_type": ("nf4", "fp4", None),
    "bnb_4bit_quant_storage": ("uint8", None),
}
_COMPRESSED: _Allowed = {
    "config_groups": _ANY,
    "format": (
        *("dense", "float-quantized", "int-quantized", "mixed-precision", "naive-quantized"),
        "pack-quantized",
    ),
    **dict.fromkeys(("global_compression_ratio", "ignore", "kv_cache_scheme", "version"), _ANY),
    "sparsity_config": _ANY,
    "quantization_status": ("compressed", "frozen"),
}
_GROUP_WEIGHTS: _Allowed = {
    **dict.fromkeys(("block_structure", "group_size", "observer", "observer_kwargs"), _ANY),
    **dict.fromkeys(("symmetric", "scale_dtype", "zp_dtype"), _ANY),
    "actorder": ("group", "weight", "static", None),
    "num_bits": (4, 8),
    "strategy": ("tensor", "channel", "group", "block"),
    "type": ("int", "float"),
}
_METHODS: dict[str, _Allowed] = {
    "awq": _AWQ,
    "bitsandbytes": _BITSANDBYTES,
    "compressed-tensors": _COMPRESSED,
    "fp8": _FP8,
    "gptq": _GPTQ,
}
"""By `quant_method`: the allowed fields, and the values that each may have. Any other field must be
without a value."""


def read_quantization(raw: Mapping[str, Any], mxfp4: bool) -> Mapping[str, Any] | None:
    """`quantization_config` of a config.json or of its `text_config`, None for a checkpoint that is
    not quantized. What older versions of compressed-tensors state in `compression_config` is
    returned as current ones state it.

    `mxfp4`: whether the family's experts may be in that format. Raises ConfigError, naming the
    field, for a method that is not read and for a setting that would change the values."""
    text = raw.get("text_config")
    of_text = text if isinstance(text, dict) else {}
    key = _FIELD
    stated = raw.get(key) or of_text.get(key)
    if not stated:
        key = _OLDER_FIELD
        stated = _as_current(raw.get(key) or of_text.get(key))
    if not stated:
        return None
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if isinstance(stated, dict):
        if method == "mxfp4" and mxfp4:
            return stated
        if isinstance(method, str) and method in _METHODS:
            if method == "compressed-tensors":
                _check_sparsity(stated, key)
                _check_groups(stated, key)
            _check(stated, _METHODS[method], f"{key} of {method}", key)
            return stated
    read = ", ".join(_METHODS)
    message = f"{key} is set: checkpoints quantized by {method} are not served, only by {read}"
    raise ConfigError(message, key)


def _as_current(stated: Any) -> Any:
    """The `compression_config` of an older version of compressed-tensors, which was a part of
    SparseML, as a `quantization_config`: the fields of that may lie in a field of its name. None if
    matrices are neither quantized nor sparse."""
    if not isinstance(stated, dict):
        return stated
    sparsity = stated.get("sparsity_config")
    inner = stated.get(_FIELD, {name: stated[name] for name in stated if name != "sparsity_config"})
    if not inner and (not isinstance(sparsity, dict) or sparsity.get("format") in _NOT_SPARSE):
        return None
    if not isinstance(inner, dict):
        inner = {"config_groups": inner}
    method = inner.get("quant_method")
    named = "compressed-tensors" if method in (None, "sparseml") else method
    return inner | {"quant_method": named, "sparsity_config": sparsity}


def _check_sparsity(stated: Mapping[str, Any], key: str) -> None:
    """Raises ConfigError for matrices that are stored without their zeros."""
    sparsity = stated.get("sparsity_config")
    form = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    if form not in _NOT_SPARSE:
        message = f"{key}: sparsity_config has the format {form!r}, and only 'dense' is served"
        raise ConfigError(message, f"{key}.sparsity_config")


def _check_groups(stated: Mapping[str, Any], key: str) -> None:
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{key} has no config_groups", f"{key}.config_groups")
    for name, group in groups.items():
        where = f"{key}.config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ConfigError(f"{where} says nothing of weights", where)
        _check(weights, _GROUP_WEIGHTS, where, key)
        if weights.get("type") == "float" and weights.get("num_bits") != 8:
            raise ConfigError(f"{where}: floats of 4 bits are not served", where)


def _check(stated: Mapping[str, Any], allowed: _Allowed, where: str, key: str) -> None:
    for field, values in allowed.items():
        if values is not _ANY and stated.get(field) not in values:
            wanted = " or ".join(map(repr, values))
            message = f"{where}: {field} is {stated.get(field)!r}, and only {wanted} is served"
            raise ConfigError(message, f"{key}.{field}")
    for field, value in stated.items():
        if field not in allowed and field != "quant_method" and value not in _EMPTY:
            message = f"{where}: Weft does not know the field {field}, which is {value!r}"
            raise ConfigError(message, f"{key}.{field}")


_EMPTY: tuple[object, ...] = (None, False, 0, "", {}, [])
