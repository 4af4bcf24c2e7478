"""The shape of a model as one table, from its configuration.

Each row is a packed layer: the key of its weight, the projections in it as PEFT and checkpoints
name them, its sizes, and how it is cut for several ranks. This table determines what is loaded,
which targets adapters have, and which group of adapter memory belongs to which layer of the
decoder.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from weft.core.errors import ConfigError
from weft.core.shards import Shard
from weft.core.targets import Axis, Packed, TargetTable, Vector, build_table
from weft.models.config import ModelConfig
from weft.models.family import MoeConfig
from weft.models.share import share_of

EMBED, HEAD = "embed", "head"
"""Keys of the weights outside the layers."""
XIELU = tuple(f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps"))
"""What a layer calls the parameters of its MLP's activation, `weft.kernels.activations.Xielu`. The
first two have one entry each, and the others are numbers."""
IN_FLOAT32 = "A_log", "dt_bias", "correction_bias", "expert_bias", *XIELU
"""Endings of the names of vectors that are float32 whatever the model's dtype is."""
TOKEN_INPUTS = "token_inputs"
"""The key of the projection from the embedding to all layers' token inputs."""
TOKEN_EMBEDDING = "model.embed_tokens_per_layer.weight"
TOKEN_NORM = "model.per_layer_projection_norm"
"""The second embedding of tokens, and the norm of each layer's part of that projection."""
Q_LATENT_NORM, LATENT_NORM = "q_a_layernorm", "kv_a_layernorm"
"""The names, within attention, of the norms of two latents: of queries, and of keys and values."""
LAYER_SCALE, ROUTER_SCALE = "layer_scalar", "router.scale"
EXPERT_SCALES = "router.per_expert_scale"
"""Names within a layer of the factors of its output, of the router's input, and of each expert's
weight."""


def target_table(config: ModelConfig, pair_ranks: int = 1) -> TargetTable:
    """The embedding, the layers of each block, and last the head. `pair_ranks`: see `Packed`."""
    vocab, hidden = config.vocab_size, config.hidden_size
    rows = [Packed(EMBED, "embedding", vocab, (hidden,), ("model.embed_tokens",))]
    if config.token_inputs is not None:
        width = config.num_layers * config.token_inputs.width
        names = _named("model.", "per_layer_model_projection")
        rows.append(Packed(TOKEN_INPUTS, "linear", hidden, (width,), names))
    for i in range(config.num_layers):
        moe = experts_of(config, i)
        rows += _attention_rows(config, i)
        rows += _mlp(config, i) if config.has_mlp(i) else []
        rows += _experts(moe, hidden, i) if moe else []
        rows += _layer_inputs(config, i)
    rows.append(Packed(HEAD, "head", hidden, (vocab,), ("lm_head",), axis="vocab"))
    return build_table(
        [row if row.absorbed else replace(row, pair_ranks=pair_ranks) for row in rows],
        norms=_norms(config),
        tied=config.tie_word_embeddings,
        num_experts=config.moe.num_here if config.moe else 1,
        vectors=_vectors(config),
        naming=config.names.prefixes,
    )


def model_shard(
    config: ModelConfig, rank: int, size: int, *, fully_sharded_loras: bool = False
) -> Shard:
    """What one of `size` ranks has of the model. `fully_sharded_loras`: it has only a share of A
    and of B, see `weft.core.shards`. Raises ConfigError for what can't be divided."""
    pair_ranks = size if fully_sharded_loras else 1
    own = target_table(share_of(config, size), pair_ranks)
    if config.hidden_size % pair_ranks:
        message = f"--fully-sharded-loras: {size} does not divide hidden_size {config.hidden_size}"
        raise ConfigError(message, "fully_sharded_loras")
    return Shard(target_table(config), own, rank, size)


def num_parameters(table: TargetTable) -> int:
    """How many parameters a model of this table has; a tied head counts once."""
    found = sum(norm.size for norm in table.norms)
    found += sum(prod(vector.shape) for vector in table.vectors)
    for group, *_ in table.by_key.values():
        if group.kind != "head" or not table.tied:
            found += table.copies(group.kind) * group.in_features * group.out_features
        found += table.copies(group.kind) * group.out_features if group.packed.bias else 0
    return found


def experts_of(config: ModelConfig, layer: int) -> MoeConfig | None:
    """The mixture of experts in place of a layer's MLP; None where the MLP is dense."""
    return config.moe if config.moe is not None and config.moe.layers[layer] else None


def is_linear(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has a recurrent state in place of a KV cache."""
    return config.linear is not None and config.linear.layers[layer]


def sinks_of(layer: int) -> str:
    """The name of a layer's attention sinks: a score for each head, without a value."""
    return f"model.layers.{layer}.self_attn.sinks"


def _attention_rows(config: ModelConfig, i: int) -> list[Packed]:
    if is_linear(config, i):
        return _linear_attention(config, i)
    if not config.has_attention(i):
        return []
    return _attention(config, i) if config.latent is None else _latent_attention(config, i)


def _latent_attention(config: ModelConfig, i: int) -> list[Packed]:
    """The projections of attention to latents. Each rank has the projections to latents whole, as
    all heads need all of a latent."""
    name, hidden, latent = f"model.layers.{i}.self_attn.", config.hidden_size, config.latent
    assert latent is not None
    bias, heads = config.attention_bias, config.num_heads
    queries, values = heads * (latent.key_dim + latent.rope_dim), heads * latent.value_dim
    of_query, of_keys = _named(name, "q_a_proj", "kv_a_proj_with_mqa")
    if latent.query_rank is None:
        q, into = _named(name, "q_proj"), hidden
        a = Packed(f"{i}.a", "linear", hidden, (latent.width,), (of_keys,), bias)
    else:
        q, into = _named(name, "q_b_proj"), latent.query_rank
        widths = into, latent.width
        a = Packed(f"{i}.a", "linear", hidden, widths, (of_query, of_keys), bias)
    b, out_bias = heads * latent.key_dim + values, config.attention_out_bias
    kv_b, o = _named(name, "kv_b_proj"), _named(name, "o_proj")
    return [
        a,
        Packed(f"{i}.q", "linear", into, (queries,), q, axis="column"),
        Packed(f"{i}.kv_b", "linear", latent.rank, (b,), kv_b, axis="column", absorbed=True),
        Packed(f"{i}.o", "linear", values, (hidden,), o, out_bias, "row"),
    ]


def _attention(config: ModelConfig, i: int) -> list[Packed]:
    name, hidden = f"model.layers.{i}.{config.names.attention}.", config.hidden_size
    shape = config.layer(i)
    q, kv = config.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    bias, out_bias = config.attention_bias, config.attention_out_bias
    widths: tuple[int, ...] = (2 * q if config.output_gate else q, kv, kv)
    projections = "q_proj", "k_proj", "v_proj"
    if shape.cache != i:
        widths = widths[:1]
    elif shape.keys_are_values:
        widths = widths[:2]
    fused, out = config.fused_qkv, _named(name, config.names.attention_out)
    qkv = _named(name, "qkv_proj") if fused else _named(name, *projections[: len(widths)])
    return [
        Packed(f"{i}.qkv", "linear", hidden, widths, qkv, bias, "column"),
        Packed(f"{i}.o", "linear", q, (hidden,), out, out_bias, "row"),
    ]


def _linear_attention(config: ModelConfig, i: int) -> list[Packed]:
    hidden, shape = config.hidden_size, config.linear
    assert shape is not None
    name, into, bias = f"model.layers.{i}.{shape.name}.", shape.projections, shape.projection_bias
    names, parts = _named(name, *into), tuple(part for parts in into.values() for part in parts)
    out = _named(name, shape.out)
    return [
        Packed(f"{i}.in", "linear", hidden, parts, names, bias, "column"),
        Packed(f"{i}.out", "linear", shape.values, (hidden,), out, bias, "row"),
    ]


def _vectors(config: ModelConfig) -> list[Vector]:
    """The tensors besides projections and norms, which no adapter changes."""
    shape, heads = config.linear, config.num_heads
    if config.blocks == "gemma4":
        return _gemma4_vectors(config)
    if config.sinks:
        return [Vector(sinks_of(i), (heads,), (heads,)) for i in range(config.num_layers)]
    if config.activation == "xielu":
        of_layers = [f"model.layers.{i}.{name}" for i in range(config.num_layers) for name in XIELU]
        shapes = [(1,) if ".alpha_" in name else () for name in of_layers]
        return [Vector(name, shape, shape) for name, shape in zip(of_layers, shapes, strict=True)]
    found: list[Vector] = []
    if config.norm_bias:
        found += [Vector(f"{name}.bias", (size,), (size,)) for name, size in _norms(config)]
    if config.moe is not None and config.moe.correction:
        moe = config.moe
        size = (*(1,) * (moe.correction_dims - 1), moe.num_experts)
        layers = [i for i, has_experts in enumerate(moe.layers) if has_experts]
        found += [Vector(moe.correction_of(i), size, size[:1]) for i in layers]
    if shape is not None:
        found += [
            Vector(f"model.layers.{i}.{shape.name}.{name}", (sum(parts), *more), parts)
            for i in range(config.num_layers)
            if is_linear(config, i)
            for name, (more, parts) in shape.vectors.items()
        ]
    return found


def _gemma4_vectors(config: ModelConfig) -> list[Vector]:
    layers, hidden, inputs = range(config.num_layers), config.hidden_size, config.token_inputs
    found = [Vector(f"model.layers.{i}.{LAYER_SCALE}", (1,), (1,)) for i in layers]
    for i in layers:
        moe = experts_of(config, i)
        if moe is not None:
            sizes = {ROUTER_SCALE: hidden, EXPERT_SCALES: moe.num_experts}
            found += [Vector(f"model.layers.{i}.{n}", (s,), (s,)) for n, s in sizes.items()]
    if inputs is not None:
        vocab, width = inputs
        shape = vocab, config.num_layers * width
        found.append(Vector(TOKEN_EMBEDDING, shape, (vocab,), of_tokens=True))
    return found


def _layer_inputs(config: ModelConfig, i: int) -> list[Packed]:
    """The projections of a layer's part of the second embedding into the residual stream."""
    if config.token_inputs is None:
        return []
    hidden, width = config.hidden_size, config.token_inputs.width
    gate, projection = _named(f"model.layers.{i}.", "per_layer_input_gate", "per_layer_projection")
    return [
        Packed(f"{i}.input_gate", "linear", hidden, (width,), (gate,)),
        Packed(f"{i}.input_projection", "linear", width, (hidden,), (projection,)),
    ]


def _mlp(config: ModelConfig, i: int) -> list[Packed]:
    hidden, inner, bias = config.hidden_size, config.layer(i).intermediate_size, config.mlp_bias
    *gate_up, down = _named(f"model.layers.{i}.", *config.mlp_names)
    parts = (inner, inner) if config.is_gated else (inner,)
    degree = {"relu2": 2, "xielu": 0}.get(config.activation, 1)
    into = Packed(f"{i}.gate_up", "linear", hidden, parts, tuple(gate_up), bias, "column")
    return [
        replace(into, degree=degree),
        Packed(f"{i}.down", "linear", inner, (hidden,), (down,), bias, "row"),
    ]


def _experts(moe: MoeConfig, hidden: int, i: int) -> list[Packed]:
    """Router and experts. Some adapters see the experts' gate and up as one projection, so the
    table has them twice, as two projections and as one, with the same weight. Experts without a
    gate have up only, once."""
    name, inner = f"model.layers.{i}.{moe.place}", moe.intermediate_size
    pair = _named(name, "experts.gate_proj", "experts.up_proj")
    one, down = _named(name, "experts.gate_up_proj"), _named(name, "experts.down_proj")
    parts = (inner, inner) if moe.clamped_swiglu is None else (2 * inner,)
    if not moe.gated:
        one, parts = pair[1:], (inner,)
    key, bias, wide = f"{i}.experts_gate_up", moe.biased, moe.latent_size or hidden
    axes: tuple[Axis, Axis] = ("column", "row") if moe.expert_ranks == 1 else ("expert", "expert")
    turned = moe.transposed
    gate_up = Packed(key, "experts", wide, parts, one, bias, axes[0], transposed=turned)
    weighs = ("shared_expert_gate",) if moe.weighs_shared else ()
    router, outputs = _named(name, moe.router, *weighs), (moe.num_experts, *(1 for _ in weighs))
    return [
        Packed(f"{i}.router", "linear", hidden, outputs, router, bias, float32=moe.exact_router),
        *([replace(gate_up, names=pair)] if len(parts) == 2 else []),
        gate_up,
        Packed(
            *(f"{i}.experts_down", "experts", inner, (wide,), down, bias, axes[1]),
            transposed=turned,
        ),
        *(_latents(moe.latent_size, name, hidden, i) if moe.latent_size else ()),
        *(_shared_expert(moe, name, hidden, i) if moe.shared_size else ()),
    ]


def _latents(size: int, name: str, hidden: int, i: int) -> list[Packed]:
    """The projections of a layer's input to what experts read, and of what they give to the layer's
    output. Each rank has both whole."""
    into, out = _named(name, "fc1_latent_proj"), _named(name, "fc2_latent_proj")
    return [
        Packed(f"{i}.latent_in", "linear", hidden, (size,), into),
        Packed(f"{i}.latent_out", "linear", size, (hidden,), out),
    ]


def _shared_expert(moe: MoeConfig, name: str, hidden: int, i: int) -> list[Packed]:
    """The expert that all tokens go through."""
    inner, own = moe.shared_size, "shared_expert" if moe.shared_gated else moe.shared_name
    gate_up = _named(f"{name}{own}.", *(("gate_proj",) if moe.gated else ()), "up_proj")
    down, parts = _named(f"{name}{own}.", "down_proj"), (inner,) * len(gate_up)
    return [
        Packed(
            *(f"{i}.shared_gate_up", "linear", hidden, parts, gate_up),
            axis="column",
            degree=1 if moe.gated else 2,
        ),
        Packed(f"{i}.shared_down", "linear", inner, (hidden,), down, axis="row"),
    ]


def _named(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in names)


def _norms(config: ModelConfig) -> list[tuple[str, int]]:
    """(name, size) of each layer's norms, and of the last one."""
    hidden, of_heads = config.hidden_size, config.qk_norm != "width"
    found: list[tuple[str, int]] = []
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        found += [(layer + name, hidden) for name in config.norm_names_of(i)]
        if config.qk_norm not in (None, "unit") and config.has_attention(i):
            shape = config.layer(i)
            q_norm, k_norm = config.names.qk_norms
            head, heads = shape.head_dim, {q_norm: config.num_heads}
            if shape.cache == i:
                heads[k_norm] = shape.num_kv_heads
            found += [
                (f"{layer}{config.names.attention}.{name}", head if of_heads else head * num)
                for name, num in heads.items()
            ]
        if config.latent is not None:
            norms = {Q_LATENT_NORM: config.latent.query_rank, LATENT_NORM: config.latent.rank}
            found += [(f"{layer}self_attn.{name}", size) for name, size in norms.items() if size]
    if config.token_inputs is not None:
        found.append((TOKEN_NORM, config.token_inputs.width))
    return [*found, (config.names.last_norm, hidden)]
