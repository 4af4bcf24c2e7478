"""The projections of a decoder that LoRA may adapt, derived from its configuration."""

from __future__ import annotations

from weft.core.targets import Kind, TargetTable, build_table
from weft.models.config import ModelConfig

Row = tuple[Kind, int, list[tuple[str, int]]]


def target_table(config: ModelConfig) -> TargetTable:
    """Group 0 is the embedding, then those of each layer, last the head.

    A layer has qkv, o, gate_up and down; or, with experts, qkv, o, the router, the experts' gate
    and up, both of them as one projection (which is how some adapters see them), and down.
    """
    rows: list[Row] = [
        ("embedding", config.vocab_size, [("model.embed_tokens", config.hidden_size)])
    ]
    for i in range(config.num_layers):
        rows += _attention(config, f"model.layers.{i}.self_attn.") + _mlp(config, i)
    rows.append(("head", config.hidden_size, [("lm_head", config.vocab_size)]))
    return build_table(
        rows,
        norms=_norms(config),
        biased=_biased(config, rows),
        tied=config.tie_word_embeddings,
        num_experts=config.moe.num_experts if config.moe else 1,
    )


LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)
"""In the table's order; the last two are there in some families."""


def norms_per_layer(config: ModelConfig) -> int:
    return 4 if config.qk_norm else 2


def _norms(config: ModelConfig) -> list[tuple[str, int]]:
    """Those of each layer, and the last one."""
    sizes = (config.hidden_size, config.hidden_size, config.head_dim, config.head_dim)
    of_layer = list(zip(LAYER_NORMS, sizes, strict=True))[: norms_per_layer(config)]
    layers = [f"model.layers.{i}." for i in range(config.num_layers)]
    norms = [(layer + name, size) for layer in layers for name, size in of_layer]
    return [*norms, ("model.norm", config.hidden_size)]


def _biased(config: ModelConfig, rows: list[Row]) -> list[str]:
    """Names of the projections that have a bias."""
    suffixes = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.attention_bias),
        "o_proj": config.attention_out_bias,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), config.mlp_bias),
    }
    names = [name for kind, _, slices in rows if kind == "linear" for name, _ in slices]
    return [name for name in names if suffixes.get(name.rpartition(".")[2])]


def first_group(table: TargetTable, layer: int) -> int:
    """The group that a layer's groups begin with."""
    return table.by_name[f"model.layers.{layer}.self_attn.q_proj"].group


def _attention(config: ModelConfig, name: str) -> list[Row]:
    hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    qkv = [(name + "q_proj", q_size), (name + "k_proj", kv_size), (name + "v_proj", kv_size)]
    return [("linear", hidden, qkv), ("linear", q_size, [(name + "o_proj", hidden)])]


def _mlp(config: ModelConfig, layer: int) -> list[Row]:
    name, hidden, moe = f"model.layers.{layer}.mlp.", config.hidden_size, config.moe
    if moe is None or not moe.layers[layer]:
        return _gated("linear", name, hidden, config.intermediate_size)
    gate_up, down = _gated("experts", name + "experts.", hidden, moe.intermediate_size)
    both = (name + "experts.gate_up_proj", 2 * moe.intermediate_size)
    router = (name + "gate", moe.num_experts)
    return [("linear", hidden, [router]), gate_up, ("experts", hidden, [both]), down]


def _gated(kind: Kind, name: str, hidden: int, inner: int) -> list[Row]:
    gate_up = [(name + "gate_proj", inner), (name + "up_proj", inner)]
    return [(kind, hidden, gate_up), (kind, inner, [(name + "down_proj", hidden)])]
