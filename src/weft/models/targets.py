"""The projections of a decoder that LoRA may adapt, derived from its configuration."""

from __future__ import annotations

from weft.core.targets import Kind, TargetTable, build_table
from weft.models.config import ModelConfig

GROUPS_PER_LAYER = 4
"""Packed layers of one decoder layer, in the order qkv, o, gate_up, down."""


def target_table(config: ModelConfig) -> TargetTable:
    """Group 0 is the embedding, then `GROUPS_PER_LAYER` for each layer, last the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows: list[tuple[Kind, int, list[tuple[str, int]]]] = [
        ("embedding", config.vocab_size, [("model.embed_tokens", hidden)])
    ]
    for i in range(config.num_layers):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        q, k, v = (attn + "q_proj", q_size), (attn + "k_proj", kv_size), (attn + "v_proj", kv_size)
        rows.append(("linear", hidden, [q, k, v]))
        rows.append(("linear", q_size, [(attn + "o_proj", hidden)]))
        rows.append(("linear", hidden, [(mlp + "gate_proj", inner), (mlp + "up_proj", inner)]))
        rows.append(("linear", inner, [(mlp + "down_proj", hidden)]))
    rows.append(("head", hidden, [("lm_head", config.vocab_size)]))
    return build_table(rows)
