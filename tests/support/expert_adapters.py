"""Adapters of the routers and experts of mixtures, as PEFT saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from weft.models.blueprint import target_table
from weft.models.config import load_model_config

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = ["mlp.gate.weight"]
EXPERT_ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj"]},
    # So strong that it chooses other experts: the weights of two alone may hardly change.
    "router": {"r": 3, "lora_alpha": 32, "target_modules": [], "target_parameters": ROUTER},
    "gate-up": {"r": 2, "target_modules": [], "target_parameters": EXPERTS[:1]},
    "down": {"r": 5, "target_modules": [], "target_parameters": EXPERTS[1:], "use_rslora": True},
    "all": {
        "r": 4,
        "target_modules": "all-linear",
        "target_parameters": EXPERTS + ROUTER,
        "rank_pattern": {"experts.down_proj": 7, "mlp.gate.weight": 1, "q_proj": 2},
        "alpha_pattern": {"1.mlp.experts.gate_up_proj": 11, "mlp.gate.weight": 5},
    },
}


def save_single(base: Path, folder: Path, family: str) -> None:
    """An adapter of each expert by itself, named as before experts were stacked."""
    config = load_model_config(base)
    moe = config.moe
    assert moe is not None
    mlp, gate, up, down = moe.names
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    targets = target_table(config).by_name
    of_latents = any(name.endswith(".q_b_proj") for name in targets)
    queries = "q_b_proj" if of_latents else "q_proj"
    sparse = [i for i, has_experts in enumerate(moe.layers) if has_experts]

    def add(module: str, in_size: int, out: int) -> None:
        for part, shape in (("A", (3, in_size)), ("B", (out, 3))):
            name = f"base_model.model.model.layers.{module}.lora_{part}.weight"
            tensors[name] = 0.15 * torch.randn(shape, generator=generator)

    for i in sparse:
        target = targets[f"model.layers.{i}.self_attn.{queries}"]
        add(f"{i}.self_attn.{queries}", target.in_features, target.out_features)
        add(f"{i}.{mlp}.gate", 32, moe.num_experts)
        for expert in range(moe.num_experts):
            name = f"{i}.{mlp}.experts.{expert}."
            add(name + gate, 32, moe.intermediate_size)
            add(name + up, 32, moe.intermediate_size)
            add(name + down, moe.intermediate_size, 32)
    write_adapter(
        folder,
        tensors,
        r=3,
        lora_alpha=9,
        target_modules=[queries, "gate", gate, up, down],
        layers_to_transform=sparse,
    )


def write_adapter(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> None:
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
