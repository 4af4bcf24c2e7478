"""Adapters of kinds other than LoRA, as PEFT saves them, and the base that they are made on."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from peft import (
    AdaLoraConfig,
    LoHaConfig,
    LoKrConfig,
    PeftConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from transformers import LlamaConfig, LlamaForCausalLM

from weft.core.targets import TargetTable
from weft.models.blueprint import target_table
from weft.models.config import load_model_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
    )
    return LlamaForCausalLM(config)


def make_table(folder: Path) -> TargetTable:
    """Of the base, whose configuration is saved to `folder`."""
    make_base().config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForCausalLM"]})
    )
    return target_table(load_model_config(folder))


Kind = Callable[[], PeftConfig]


def make(kind: type[PeftConfig], **options: object) -> Kind:
    return partial(kind, task_type="CAUSAL_LM", **options)


def make_adapter(folder: Path, config: Kind) -> PeftModel:
    """Save an adapter with random tensors, load it again by PEFT."""
    with warnings.catch_warnings(action="ignore"):  # of other libraries, about each other
        model = get_peft_model(make_base(), config())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, mean=float("ia3" in name), std=0.3)
        model.save_pretrained(folder, save_embedding_layers=False)
        return PeftModel.from_pretrained(make_base(), folder)


KINDS: dict[str, Kind] = {
    "adalora": make(AdaLoraConfig, init_r=6, lora_alpha=5, total_step=9, target_modules=ALL),
    "adalora, head": make(AdaLoraConfig, init_r=2, total_step=9, target_modules=["lm_head"]),
    "adalora, no alpha": make(
        AdaLoraConfig,
        init_r=3,
        lora_alpha=0,
        total_step=9,
        target_modules=["q_proj"],
        layers_to_transform=[1],
    ),
    "vera": make(VeraConfig, r=7, target_modules=ALL),
    "vera, drawn": make(
        VeraConfig,
        r=5,
        target_modules=["q_proj", "down_proj"],
        save_projection=False,
        projection_prng_key=77,
    ),
    "loha": make(
        LoHaConfig, r=4, alpha=3, target_modules=ALL, rank_dropout=0.5, module_dropout=0.5
    ),
    "loha, patterns": make(
        LoHaConfig,
        r=4,
        target_modules=ALL,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"layers.1.mlp.*": 5},
    ),
    "loha, full": make(LoHaConfig, r=7, target_modules=["k_proj", "o_proj", "down_proj"]),
    "lokr": make(LoKrConfig, r=2, alpha=3, target_modules=ALL),
    "lokr, both": make(LoKrConfig, r=1, target_modules=ALL, decompose_both=True, alpha=-2),
    "lokr, both or one": make(LoKrConfig, r=3, target_modules=ALL, decompose_both=True),
    "lokr, factor": make(LoKrConfig, r=3, target_modules=ALL, decompose_factor=4),
    "lokr, odd factor": make(LoKrConfig, r=3, target_modules=ALL, decompose_factor=6),
    "lokr, whole": make(LoKrConfig, r=1000, target_modules=ALL, rank_dropout_scale=True),
    "lokr, excluded": make(LoKrConfig, r=2, target_modules=ALL, exclude_modules=r".*\.0\..*"),
}
