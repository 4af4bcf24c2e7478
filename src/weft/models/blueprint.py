"""The shape of a model as one table, from its configuration.

Each row is a packed layer: the key of its weight, the projections in it as PEFT and checkpoints
name them, its sizes, and how it is cut for several ranks. What is loaded, which targets adapters
have, which group of the adapters' memory belongs to which layer of the decoder: all of it is read
from this table.
"""

from __future__ import annotations

from dataclasses import replace

from weft.core.shards import Shard
from weft.core.targets import Packed, TargetTable, build_table
from weft.models.config import ModelConfig, share_of
from weft.models.families import MoeConfig

EMBED, HEAD, LAST_NORM = "embed", "head", "model.norm"
"""Keys of the weights outside the layers, and the name of the last norm."""


def target_table(config: ModelConfig) -> TargetTable:
    """The embedding, the layers of each block, and last the head."""
    vocab, hidden = config.vocab_size, config.hidden_size
    rows = [Packed(EMBED, "embedding", vocab, (hidden,), ("model.embed_tokens",))]
    for i in range(config.num_layers):
        moe = experts_of(config, i)
        rows += _attention(config, i)
        rows += _experts(moe, hidden, i) if moe else _mlp(config, i)
    rows.append(Packed(HEAD, "head", hidden, (vocab,), ("lm_head",), axis="vocab"))
    return build_table(
        rows,
        norms=_norms(config),
        tied=config.tie_word_embeddings,
        num_experts=config.moe.num_experts if config.moe else 1,
    )


def model_shard(config: ModelConfig, rank: int, size: int) -> Shard:
    """What one of `size` ranks has of the model. Raises ConfigError for what can't be divided."""
    return Shard(target_table(config), target_table(share_of(config, size)), rank, size)


def num_parameters(table: TargetTable) -> int:
    """How many parameters a model of this table has; a tied head counts once."""
    found = sum(norm.size for norm in table.norms)
    for group, *_ in table.by_key.values():
        if group.kind != "head" or not table.tied:
            found += table.copies(group.kind) * group.in_features * group.out_features
        found += group.out_features if group.packed.bias else 0
    return found


def experts_of(config: ModelConfig, layer: int) -> MoeConfig | None:
    """The mixture of experts in place of a layer's MLP; None where the MLP is dense."""
    return config.moe if config.moe is not None and config.moe.layers[layer] else None


def layer_norms(config: ModelConfig) -> tuple[str, ...]:
    """The names within a layer of the norms around attention and MLP, in the order of their use."""
    match config.blocks:
        case "pre":
            return "input_layernorm", "post_attention_layernorm"
        case "post":
            return "post_attention_layernorm", "post_feedforward_layernorm"
        case "both":
            first, second = "input_layernorm", "pre_feedforward_layernorm"
            return first, "post_attention_layernorm", second, "post_feedforward_layernorm"


def _attention(config: ModelConfig, i: int) -> list[Packed]:
    name, hidden, head = f"model.layers.{i}.self_attn.", config.hidden_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    qkv = _named(name, "qkv_proj") if config.fused else _named(name, "q_proj", "k_proj", "v_proj")
    bias, out_bias = config.attention_bias, config.attention_out_bias
    return [
        Packed(f"{i}.qkv", "linear", hidden, (q, kv, kv), qkv, bias, "column"),
        Packed(f"{i}.o", "linear", q, (hidden,), _named(name, "o_proj"), out_bias, "row"),
    ]


def _mlp(config: ModelConfig, i: int) -> list[Packed]:
    name, hidden, inner = f"model.layers.{i}.mlp.", config.hidden_size, config.intermediate_size
    fused, bias = config.fused, config.mlp_bias
    gate_up = _named(name, "gate_up_proj") if fused else _named(name, "gate_proj", "up_proj")
    return [
        Packed(f"{i}.gate_up", "linear", hidden, (inner, inner), gate_up, bias, "column"),
        Packed(f"{i}.down", "linear", inner, (hidden,), _named(name, "down_proj"), bias, "row"),
    ]


def _experts(moe: MoeConfig, hidden: int, i: int) -> list[Packed]:
    """Router and experts. Some adapters see the experts' gate and up as one projection, so that
    their weight is there twice."""
    name, inner = f"model.layers.{i}.mlp.", moe.intermediate_size
    pair = _named(name, "experts.gate_proj", "experts.up_proj")
    one, down = _named(name, "experts.gate_up_proj"), _named(name, "experts.down_proj")
    gate_up = Packed(f"{i}.experts_gate_up", "experts", hidden, (inner, inner), pair, axis="column")
    return [
        Packed(f"{i}.router", "linear", hidden, (moe.num_experts,), _named(name, "gate")),
        gate_up,
        replace(gate_up, names=one),
        Packed(f"{i}.experts_down", "experts", inner, (hidden,), down, axis="row"),
    ]


def _named(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in names)


def _norms(config: ModelConfig) -> list[tuple[str, int]]:
    """(name, size) of each layer's norms, and of the last one."""
    hidden, head = config.hidden_size, config.head_dim
    of_layer = [(name, hidden) for name in layer_norms(config)]
    if config.qk_norm is not None:
        each = config.qk_norm == "head"
        of_layer += [
            ("self_attn.q_norm", head if each else config.num_heads * head),
            ("self_attn.k_norm", head if each else config.num_kv_heads * head),
        ]
    layers = [f"model.layers.{i}." for i in range(config.num_layers)]
    return [(layer + n, size) for layer in layers for n, size in of_layer] + [(LAST_NORM, hidden)]
