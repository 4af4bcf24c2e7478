"""Heads for several tokens: written into checkpoints, and computed by plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

Tensors = dict[str, Tensor]


def add_head(folder: Path, *, right: bool, factor: float = 0.0) -> Tensors:
    """Give a checkpoint a head whose layer is shaped as the base's last one. If `right`, and the
    base's layers add nothing, it drafts what the base would choose, as far as its own layer, scaled
    by `factor`, adds nothing. Else it is random. Returns its tensors."""
    file = folder / "model.safetensors"
    base = load_file(file)
    norm, size = base["model.norm.weight"], len(base["model.norm.weight"])
    generator = torch.Generator().manual_seed(5)
    head = {
        name.replace("model.layers.1.", "mtp.layers.0."): _random(tensor, generator)
        for name, tensor in base.items()
        if name.startswith("model.layers.1.")
    }
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head[f"mtp.{name}.weight"] = _random(norm, generator)
    head["mtp.fc.weight"] = _random(torch.empty(size, 2 * size), generator)
    if right:
        _add_nothing(head, factor)
        head["mtp.fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
        head["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(size)
        head["mtp.norm.weight"] = norm.clone()
    save_file(base | head, file, metadata={"format": "pt"})
    return head


def quiet_layers(model: PreTrainedModel, factor: float) -> None:
    """Scale what the layers of a base add to the residual stream. Without that, a token follows
    from the last one alone."""
    _add_nothing(dict(model.named_parameters()), factor)


def _add_nothing(tensors: dict[str, Tensor], factor: float = 0.0) -> None:
    for name, tensor in tensors.items():
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            tensor.data *= factor


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return 0.3 * torch.randn(like.shape, generator=generator)


@torch.no_grad()
def drafts_of(model: PreTrainedModel, head: Tensors, tokens: list[int], num: int) -> list[int]:
    """The drafts behind `tokens`, the last of which was just sampled."""
    w = {name.removeprefix("mtp."): tensor for name, tensor in head.items()}
    embed, out = model.get_input_embeddings(), model.get_output_embeddings()
    ids = torch.tensor(tokens)
    states = model.model(ids[None, :-1]).last_hidden_state[0]  # after the last norm
    ids, drafts = ids[1:], []
    for _ in range(num):
        both = torch.cat(
            (
                _norm(embed(ids), w["pre_fc_norm_embedding.weight"], model),
                _norm(states, w["pre_fc_norm_hidden.weight"], model),
            ),
            -1,
        )
        x = _norm(_layer(both @ w["fc.weight"].T, w, model), w["norm.weight"], model)
        drafts.append(int(out(x[-1]).argmax()))
        # What came of the drafts' own states stays, and so do the states behind it.
        ids = torch.cat((ids, torch.tensor(drafts[-1:])))
        states = torch.cat((states, x[-1:]))
    return drafts


def _norm(x: Tensor, weight: Tensor, model: PreTrainedModel) -> Tensor:
    eps = model.config.rms_norm_eps
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight)


def _layer(x: Tensor, w: Tensors, model: PreTrainedModel) -> Tensor:
    w = {n.removeprefix("layers.0."): t for n, t in w.items() if n.startswith("layers.0.")}
    x = x + _attention(_norm(x, w["input_layernorm.weight"], model), w, model)
    normed = _norm(x, w["post_attention_layernorm.weight"], model)
    mixture = "mlp.gate.weight" in w
    return x + (_mixture(normed, w, model) if mixture else _mlp(normed, w, "mlp."))


def _attention(x: Tensor, w: Tensors, model: PreTrainedModel) -> Tensor:
    config, length = model.config, len(x)
    D, of = config.head_dim, "self_attn."
    q, gate = (x @ w[of + "q_proj.weight"].T).view(length, -1, 2 * D).chunk(2, -1)
    k, v = ((x @ w[f"{of}{n}_proj.weight"].T).view(length, -1, D) for n in "kv")
    q = _rotate(_norm(q, w[of + "q_norm.weight"], model), model)
    k = _rotate(_norm(k, w[of + "k_norm.weight"], model), model)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / D**0.5
    seen = torch.ones(length, length).tril().bool()
    y = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return (y * gate.sigmoid()).flatten(1) @ w[of + "o_proj.weight"].T


def _rotate(x: Tensor, model: PreTrainedModel) -> Tensor:
    rope = model.config.rope_parameters
    size = int(model.config.head_dim * rope["partial_rotary_factor"])
    angles = torch.arange(len(x))[:, None] / rope["rope_theta"] ** (torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : size // 2], x[..., size // 2 : size]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., size:]), -1)


def _mlp(x: Tensor, w: Tensors, of: str) -> Tensor:
    gate, up = (x @ w[f"{of}{n}_proj.weight"].T for n in ("gate", "up"))
    return (F.silu(gate) * up) @ w[of + "down_proj.weight"].T


def _mixture(x: Tensor, w: Tensors, model: PreTrainedModel) -> Tensor:
    shares, chosen = (x @ w["mlp.gate.weight"].T).softmax(-1).topk(model.config.num_experts_per_tok)
    shares = shares / shares.sum(-1, keepdim=True)
    y = (x @ w["mlp.shared_expert_gate.weight"].T).sigmoid() * _mlp(x, w, "mlp.shared_expert.")
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        y[rows] += shares[rows, places, None] * _mlp(x[rows], w, f"mlp.experts.{expert}.")
    return y
