"""Reads and checks a checkpoint's configuration, and finds or downloads the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.core.errors import ConfigError, InvalidRequest
from weft.core.sampling import SamplingParams
from weft.models.families import FAMILIES, family_of
from weft.models.family import (
    MLP_NAMES,
    NORM_NAMES,
    UNSCALED,
    USUAL_NAMES,
    ActivationName,
    Blocks,
    Family,
    LayerShape,
    Mixer,
    MoeConfig,
    PartNames,
    QkNorm,
    RopeParameters,
    Scales,
    TokenInputsConfig,
)
from weft.models.fields import check_activation, check_fields, check_numbers
from weft.models.quantized.stated import read_quantization
from weft.models.rope_config import QueryGrowth, RopeConfig, context_limit, read_rope
from weft.models.state_config import LatentConfig, LinearConfig, ShortConvConfig
from weft.models.stated import read_stated


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of one of the `FAMILIES`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether q, k and v have a bias."""
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm | None
    """Over what q and k are RMS-normed; None: not at all."""
    windows: tuple[int | None, ...]
    """Per layer: how many positions a token sees, its own included; None: all."""
    ropes: tuple[RopeConfig | None, ...]
    """Per layer; None: positions are not rotated."""
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's: "float32", "float16" or "bfloat16"."""
    chunked: bool = False
    """Whether windows begin at multiples of their size."""
    growths: tuple[QueryGrowth | None, ...] = ()
    """How queries grow with their position, per layer; (): in no layer."""
    moe: MoeConfig | None = None
    """None: all layers are dense."""
    linear: LinearConfig | ShortConvConfig | None = None
    """The layers with a recurrent state; None: there are none."""
    latent: LatentConfig | None = None
    """The shape of attention to latents; None: the cache holds keys and values. With latents, the
    cache holds one vector for each token, as if it were the key of an only head: `num_kv_heads` is
    1, and `head_dim` is the vector's width."""
    output_gate: bool = False
    """Whether q_proj's output has a gate behind each head's query."""
    fused_qkv: bool = False
    """Whether checkpoints and adapters have one projection for q, k and v."""
    mlp_names: tuple[str, ...] = MLP_NAMES
    """What checkpoints and adapters call gate, up and down of a layer; two names if they have one
    projection for gate and up, or no gate."""
    names: PartNames = USUAL_NAMES
    mixers: tuple[Mixer, ...] = ()
    """What each layer consists of, if layers are a single mixer; (): each layer has both attention,
    or a recurrent state, and an MLP."""
    blocks: Blocks = "pre"
    norm_names: tuple[str, ...] = ()
    """See `norm_names_of`, for layers where nothing else is said there."""
    activation: ActivationName = "silu"
    scales: Scales = UNSCALED
    norm_offset: float = 0.0
    """What is added to the weights of norms before they multiply."""
    centered_norms: bool = False
    """Whether norms are LayerNorms; else they are RMS norms."""
    norm_bias: bool = False
    """Whether norms have biases."""
    sinks: bool = False
    """Whether attention has sinks: a score for each head, without a value, in its softmax."""
    layers: tuple[LayerShape, ...] = ()
    """The shape of each layer, if they differ within the model; see `layer`."""
    value_norm: bool = False
    """Whether each head's values have an RMS norm without weights."""
    token_inputs: TokenInputsConfig | None = None
    mtp_head: bool = False
    """Whether the multi-token prediction head is served: see `weft.models.mtp`."""
    quantized: Mapping[str, Any] | None = field(default=None, hash=False)
    """How the checkpoint's matrices are quantized, as config.json says; None: they are not."""

    def __post_init__(self) -> None:
        for i, rope in enumerate(self.ropes):
            layer = self.layer(i)
            if layer.num_kv_heads < 1 or self.num_heads % layer.num_kv_heads:
                raise ConfigError(
                    f"num_key_value_heads {layer.num_kv_heads} does not divide "
                    f"num_attention_heads {self.num_heads}",
                    "num_key_value_heads",
                )
            if self.rope_dim(i) % 2 or not 2 <= layer.head_dim < 1 << 31:
                message = f"head_dim must be even, positive and below 2**31, got {layer.head_dim}"
                raise ConfigError(message, "head_dim")
            if rope is not None:
                rope.check(self.rope_dim(i))

    def layer(self, index: int) -> LayerShape:
        """The shape of a layer."""
        if self.layers:
            return self.layers[index]
        return LayerShape(self.num_kv_heads, self.head_dim, self.intermediate_size, index)

    def rope_dim(self, index: int) -> int:
        """The size of what rope is applied to in a head: all of the head, or with attention to
        latents the part of it that has positions."""
        return self.layer(index).head_dim if self.latent is None else self.latent.rope_dim

    @property
    def is_gated(self) -> bool:
        """Whether the model's MLPs have a gate beside up."""
        return self.activation not in ("relu2", "xielu")

    def has_attention(self, index: int) -> bool:
        """Whether a layer has attention over a KV cache."""
        if self.mixers:
            return self.mixers[index] == "attention"
        return self.linear is None or not self.linear.layers[index]

    def has_mlp(self, index: int) -> bool:
        """Whether a layer has a dense MLP."""
        if self.mixers:
            return self.mixers[index] == "mlp"
        return self.moe is None or self.moe.beside_mlp or not self.moe.layers[index]

    def norm_names_of(self, index: int) -> tuple[str, ...]:
        """What a layer calls the norms around attention and MLP, in the order of their use."""
        is_post = self.blocks == "mixed" and self.has_attention(index)
        return NORM_NAMES["post"] if is_post else self.norm_names

    def check_context(self, asked: int | None) -> None:
        """Raises ConfigError for a context longer than the model's own."""
        limit = self.max_position_embeddings
        if asked is not None and asked > limit:
            message = f"--max-model-len {asked} is more than the model's own limit of {limit}"
            raise ConfigError(f"{message} tokens", "max_model_len")

    @property
    def most_groups(self) -> int:
        """The most query heads that one key head has, of all layers."""
        return self.num_heads // min(self.layer(i).num_kv_heads for i in range(self.num_layers))


def load_model_config(path_or_id: str | Path, revision: str | None = None) -> ModelConfig:
    """Read config.json (and generation_config.json) of a local folder or a hub id.

    Raises ConfigError, naming the field, for what Weft can't serve.
    """
    folder = resolve_model(path_or_id, revision, weights=False)
    raw = _read_json(folder / "config.json")
    architecture = _architecture_of(raw)
    family = family_of(architecture, raw)
    hf = read_stated(raw)
    if hf is None:
        hf = _hf_config(folder, raw, family)
        if family.text_of:
            tied, hf = hf.tie_word_embeddings, hf.text_config
            if not family.tied_by_text:
                hf.tie_word_embeddings = tied
        check_fields(hf)
    eos = _eos_token_ids(folder, raw, hf.eos_token_id if family.text_of else None)
    return _build(architecture, family, hf, raw, eos)


MAX_LAYERS = 1000
"""The most layers of a model. Published ones have at most a few hundred."""
_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


def resolve_model(
    path_or_id: str | Path, revision: str | None = None, *, weights: bool = True
) -> Path:
    """The local folder of a model, which is downloaded if the name is a hub id.

    `weights` False: without the safetensors files. Raises ConfigError when there is no such model.
    """
    try:
        path = Path(path_or_id).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, or of an unknown user's home
        raise ConfigError(f"can't read {path_or_id}: {error}", "model") from error
    if is_folder:
        if not (path / "config.json").is_file():
            what = "is no base model: it has no config.json"
            if (path / "adapter_config.json").is_file():
                what = (
                    "is an adapter, not a base model; weft serve takes adapters with"
                    " --lora-modules, and weft.LLM as adapters"
                )
            raise ConfigError(f"{path} {what}", "model")
        if revision is not None:
            message = f"--revision is for models from the hub, and {path} is a folder"
            raise ConfigError(message, "revision")
        return path
    name = str(path_or_id)
    if path.is_file():
        raise ConfigError(f"{name} is a file, and must be a folder", "model")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConfigError(f"there is no folder {name}", "model")
    return _download(name, revision, weights)


def _download(name: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL_FILES, *(["*.safetensors"] if weights else [])]
    at = f" at revision {revision}" if revision else ""
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of many kinds, from several libraries
        raise ConfigError(
            f"{name}{at} is neither a local folder nor a model that can be downloaded: {error}",
            "model",
        ) from error
    if not folder.is_dir():  # as the repository has no such files
        raise ConfigError(f"{name}{at} is no base model: it has no config.json", "model")
    return resolve_model(folder)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read {path}: {error}", "model") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object", "model")
    return value


def _architecture_of(raw: dict[str, Any]) -> str:
    """The architecture, after checking the fields that rule a checkpoint out."""
    architectures: Any = raw.get("architectures")
    only_one = isinstance(architectures, list) and len(architectures) == 1
    name = architectures[0] if only_one else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"architectures {architectures} is not served; these are: {', '.join(FAMILIES)}",
            "architectures",
        )
    family = family_of(name, raw)
    stated = raw.get("model_type")
    if stated not in family.other_types:
        _check_model_type(raw, family.text_of or family.model_type, name)
    if family.text_of and "text_config" in raw:  # older files have its fields in the whole's place
        raw = _text_part(raw)
        _check_model_type(raw, family.model_type, name)
    layers = raw.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:  # before lists of layers are made
        message = f"num_hidden_layers must be at most {MAX_LAYERS}, got {layers}"
        raise ConfigError(message, "num_hidden_layers")
    if not raw.get("is_causal", True):
        message = "is_causal false is not served: tokens would see those after them"
        raise ConfigError(message, "is_causal")
    return name


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """What config.json says of the text part of a larger model."""
    text = raw.get("text_config")
    return text if isinstance(text, dict) else {}


def _check_model_type(raw: dict[str, Any], wanted: str, architecture: str) -> None:
    found = raw.get("model_type")
    if found != wanted:
        message = f"model_type {found!r} does not belong to {architecture}, which has {wanted!r}"
        raise ConfigError(message, "model_type")


def _hf_config(folder: Path, raw: dict[str, Any], family: Family) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        if raw["model_type"] in family.other_types:
            fields = {n: v for n, v in raw.items() if n not in ("auto_map", "model_type")}
            return CONFIG_MAPPING[family.model_type].from_dict(fields)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{folder / 'config.json'} is not valid: {error}", "model") from error


def _build(
    architecture: str, family: Family, hf: Any, raw: dict[str, Any], eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    ropes = family.ropes(hf)
    distinct = [p for i, p in enumerate(ropes) if p not in ropes[:i]]
    check_activation(hf, family)
    layers, windows = family.layers(hf), family.windows(hf)
    check_numbers(hf, windows)
    shape, latent = layers[0] if layers else None, family.latent(hf)
    num_kv_heads = shape.num_kv_heads if shape else hf.num_key_value_heads or 0
    head_dim = shape.head_dim if shape else _head_dim(hf)
    if latent is not None:
        num_kv_heads, head_dim = 1, latent.width
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=family.mlp_width(hf),
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=getattr(hf, family.norm_eps),
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        attention_bias=_flag(hf, family.attention_bias),
        attention_out_bias=_flag(hf, family.attention_out_bias),
        mlp_bias=_flag(hf, family.mlp_bias),
        qk_norm=family.qk_norm if _flag(hf, family.qk_norm_if) else None,
        windows=windows,
        ropes=tuple(None if p is None else _rope(p, hf, family) for p in ropes),
        max_position_embeddings=min(context_limit(p, hf) for p in distinct),
        eos_token_ids=eos_token_ids,
        dtype=_dtype(raw),
        chunked=family.chunked,
        growths=family.growths(hf),
        moe=family.moe(hf),
        linear=family.linear(hf),
        latent=latent,
        output_gate=family.output_gate,
        fused_qkv=family.fused_qkv,
        mixers=family.mixers(hf),
        mlp_names=family.mlp_names,
        names=family.names,
        blocks=family.blocks,
        norm_names=family.norm_names(hf) if family.norm_names else NORM_NAMES[family.blocks],
        activation=family.activation,
        scales=family.scales(hf),
        norm_offset=family.norm_offset,
        centered_norms=family.centered_norms,
        norm_bias=family.norm_bias,
        sinks=family.sinks,
        layers=layers,
        value_norm=family.value_norm,
        token_inputs=family.token_inputs(hf),
        quantized=read_quantization(raw, family.mxfp4),
    )


def _head_dim(hf: Any) -> int:
    stated: int | None = getattr(hf, "head_dim", None)
    return stated or hf.hidden_size // hf.num_attention_heads


def _rope(parameters: RopeParameters, hf: Any, family: Family) -> RopeConfig:
    interleaved = _flag(hf, family.interleaved_rope)
    return read_rope(parameters, hf, family.partial_rotary, interleaved)


def _flag(hf: Any, value: bool | str) -> bool:
    return value if isinstance(value, bool) else bool(getattr(hf, value))


_SAMPLED_BY = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(path_or_id: str | Path, revision: str | None = None) -> dict[str, float]:
    """How the makers of a model want tokens to be chosen: those fields of `SamplingParams` that
    generation_config.json of a local folder or a hub id has. Raises ConfigError, naming the field.
    """
    folder = resolve_model(path_or_id, revision, weights=False)
    raw = _generation_config(folder)
    stated = {name: raw[name] for name in _SAMPLED_BY if raw.get(name) is not None}
    try:
        SamplingParams(**stated)
    except InvalidRequest as error:
        told = f"{folder}/generation_config.json: {error.message}"
        raise ConfigError(told, error.param) from error
    return stated


def _generation_config(folder: Path) -> dict[str, Any]:
    """What generation_config.json in a model's folder holds; nothing if there is no such file."""
    path = folder / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def _dtype(raw: dict[str, Any]) -> str:
    stated = [part.get("dtype") or part.get("torch_dtype") for part in (raw, _text_part(raw))]
    dtype: str = stated[0] or stated[1] or "float32"
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ConfigError(f"dtype {dtype!r} is not served", "dtype")
    return dtype


def _eos_token_ids(folder: Path, raw: dict[str, Any], of_text: object) -> tuple[int, ...]:
    """`of_text`: what the text part says, where the files say nothing of the whole model."""
    value = _generation_config(folder).get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        value = of_text
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(each) is not int or each < 0 for each in ids):
        raise ConfigError(f"eos_token_id must be token ids, got {value!r:.80}", "eos_token_id")
    return tuple(ids)
