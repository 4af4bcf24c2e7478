"""docs/fidelity.md: `python tests/support/fidelity_page.py > docs/fidelity.md`.

`test_fidelity.py` checks that the file is current, that each row claimed to be exact is compared
with `peft` by a test, and that each row claimed to be refused is refused by that name.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import adapter_kinds
from adapter_kinds import KINDS, SERVED

NAMES = dict(
    zip(
        SERVED,
        (
            *(
                "Llama",
                "Mistral",
                "Ministral 3",
                "Qwen 2",
                "Qwen 3",
                "Phi 3",
                "OLMo 2",
                "OLMo 3",
                "SmolLM 3",
            ),
            *("Granite 3", "Gemma 1", "Gemma 2", "Gemma 3", "Gemma 4", "GLM 4"),
            *("Cohere 2", "Seed-OSS", "EXAONE 4", "Hunyuan", "ERNIE 4.5", "CWM"),
            *("Granite SWA", "Arcee", "HyperCLOVA X", "Youtu", "Apertus", "Helium", "VaultGemma"),
            *("Nemotron", "Jais 2"),
            *("Qwen 3.5", "LFM2", "OLMo Hybrid"),
            *("Qwen 3 MoE", "Qwen 3.5 MoE", "Qwen 3 Next", "Qwen 2 MoE", "OLMoE"),
            *("GLM 4 MoE", "Gemma 4 MoE"),
            *("Granite 4", "gpt-oss", "Mixtral", "MiniMax M2", "dots.llm1", "Solar Open"),
            *("ERNIE 4.5 MoE", "Granite 3 MoE", "DeepSeek V2", "DeepSeek V3", "GLM 4.7 Flash"),
            *("LFM2 MoE", "Nemotron-H", "Mistral 4", "K-EXAONE"),
            *("Granite MoE with a shared MLP", "Granite SWA MoE", "Llama 4", "Sarvam MoE"),
            "Nemotron 3 Super",
        ),
        strict=True,
    )
)
MIXTURES, CONVERTED = (
    ", ".join(NAMES[family] for family in families)
    for families in (adapter_kinds.MIXTURES, adapter_kinds.CONVERTED)
)

HEAD = """\
# Fidelity

Weft computes an adapter as `peft` does, or refuses to load it, with an error that names the field
or tensor. Weft refuses whatever it does not know or does not use. So no adapter is served with a
part of it silently left out.

**Exact** means: the greedy tokens are those of `peft`, and their log-probabilities differ by less
than 0.001. The tests use tiny random bases of all families in float32, and adapters with random
weights that `peft` itself has saved and the server has loaded over HTTP. They compare each kind
alone, with its prompt already in the prefix cache, and among concurrent requests of all other
kinds (`make exhaustive`). 16-bit types compute the same, with their rounding.
"""
ALL = f"**Families.** *All* are {', '.join([*NAMES.values()][:-1])} and {[*NAMES.values()][-1]}."
FAMILIES = """\
- In the last 27, the mixtures of experts, these kinds apply to attention, dense layers and
  shared experts. Experts have rows of their own.
- In Phi 3, q, k and v are one projection, and so are gate and up; in GLM 4, Granite 4
  and Granite's mixtures with a shared MLP, only gate and up are. Arcee,
  Apertus, Nemotron, Jais 2 and Nemotron-H have no gate.
- In Qwen 3.5, its mixture, Qwen 3 Next and OLMo Hybrid, the kinds apply to linear attention too, in
  Granite 4 and Nemotron-H to Mamba layers, and in LFM2 and its mixture to the projections of short
  convolutions.
- In DeepSeek V2, DeepSeek V3, GLM 4.7 Flash, Mistral 4 and Youtu, keys and values are projected
  from latents. The kinds apply to all of these projections, except that an activated LoRA of
  `kv_b_proj` is refused ([why](decisions/0025-the-cache-holds-latents.md)).
- `bias` applies to the biases that Qwen 2, its mixture, GLM 4, Seed-OSS, ERNIE 4.5 and Arcee have.
  Those of gpt-oss can't be replaced, because `peft` saves the biases of its experts with them.
- (IA)³ of the head needs a head that is not tied to the embedding. In Arcee, a
  factor below 0 of the input of `down_proj` is refused, and in Apertus any factor of it.
"""
COLUMNS = """\
**Other servers.** The last two columns show what the released loaders of vLLM 0.33 and SGLang
0.5.23 did with real adapters. *Wrong* means that the adapter was accepted and then answered like
another one, without an error. An empty cell was not tried. SGLang was wrong with 11 of 35 kinds,
and 5 more passed its loader and failed in the first forward pass.
"""
FOOT = """\
(1) A LoHa of rank r is a LoRA of rank r times r. A LoKr is a LoRA whose rank is the product of its
factors' ranks. If that is above `--max-lora-rank`, the nearest LoRA of that rank is served,
provided that its relative error is at most `--conversion-tolerance`; `weft check` prints the
error. Otherwise the adapter is refused, and the error names the rank that would make it exact.

(2) PiSSA, OLoRA and CorDA change the base model when training begins. An adapter saved as trained
is right only on that changed (residual) base, which Weft recognises by the weights. Saved with
`peft`'s `path_initial_model_for_weight_conversion`, it is a plain LoRA for the original base.

`weft check` gives the verdict for your adapter, without a GPU and without the base's weights; see
[Adapters](adapters.md#would-mine-be-served).
"""


@dataclass(frozen=True)
class Exact:
    """Kinds that are served as `peft` computes them."""

    name: str
    shown_by: tuple[str, ...]
    """Keys of the tables of kinds, or test functions as `test_file.py::test_name`."""
    vllm: str = ""
    sglang: str = ""
    note: str = ""
    families: str = ""
    """Where `shown_by` does not say it."""

    @property
    def on(self) -> str:
        """The families on which it is shown."""
        kinds = [KINDS[key] for key in self.shown_by if key in KINDS]
        on = [name for family, name in NAMES.items() if any(family in k.families for k in kinds)]
        return self.families or ("all" if len(on) == len(NAMES) else ", ".join(on))


@dataclass(frozen=True)
class Refused:
    """What is refused, by the name of `field`, when a good adapter's config has `changes`."""

    name: str
    field: str
    changes: Mapping[str, Any]
    vllm: str = ""
    sglang: str = ""
    note: str = ""


SECTIONS: dict[str, list[Exact]] = {
    "LoRA": [
        Exact("any linear layers of any layer, any rank", ("LoRA", "all-linear"), "yes", "yes"),
        Exact("`use_rslora`", ("LoRA",), "", "wrong"),
        Exact("`rank_pattern`", ("LoRA", "rank_pattern and alpha_pattern")),
        Exact("`alpha_pattern`", ("alpha_pattern", "rank_pattern and alpha_pattern"), "", "wrong"),
        Exact(
            "targets as expressions, `exclude_modules`, `layers_to_transform`",
            ("expression", "exclude_modules", "layers_to_transform", "all-linear"),
        ),
        Exact("initialisations that leave the base alone", ("gaussian",)),
        Exact("embedding and head", ("LoRA of embedding and head",)),
        Exact(
            "DoRA",
            ("DoRA", "DoRA of embedding and head", "fan_in_fan_out"),
            "refused",
            "not served",
        ),
        Exact("`lora_bias`", ("lora_bias",), "refused", "wrong"),
        Exact(
            "`bias`: `lora_only`, `all`",
            ("bias: lora_only", "bias: all", "bias: all and lora_bias", "DoRA and bias: all"),
            "",
            "wrong",
        ),
        Exact(
            "aLoRA (`alora_invocation_tokens`)",
            ("aLoRA", "test_alora.py::test_alone_and_once_more", "test_alora.py::test_reuse"),
            "refused",
            "wrong",
        ),
        Exact(
            "PiSSA and OLoRA on their residual base",
            ("residual: pissa", "residual: pissa_niter_4", "residual: olora"),
            note="2",
            families="Llama",
        ),
        Exact(
            "the same, and CorDA, converted on saving",
            ("test_residual.py::test_served_on_the_original_once_converted",),
            note="2",
            families="Llama",
        ),
        Exact(
            "files in float32, float16, bfloat16",
            ("LoRA", "float16", "bfloat16"),
        ),
    ],
    "Beside the LoRA matrices": [
        Exact(
            "`modules_to_save`: head",
            ("modules_to_save: head", "modules_to_save: both", "modules_to_save: a few rows"),
            "refused",
            "wrong",
        ),
        Exact(
            "`modules_to_save`: embedding",
            ("modules_to_save: embedding", "modules_to_save: both"),
            "",
            "wrong",
        ),
        Exact(
            "`modules_to_save`: norms",
            ("modules_to_save: norms", "modules_to_save: last norm"),
            "",
            "wrong",
        ),
        Exact(
            "`trainable_token_indices`",
            (
                "trainable_token_indices",
                "trainable_token_indices of both",
                "trainable_token_indices of both alike",
                "trainable_token_indices of the head",
                "trainable_token_indices and saved",
            ),
            "",
            "wrong",
        ),
        Exact(
            "added tokens: rows beyond the base's vocabulary",
            ("added tokens", "added tokens: trained", "test_added_tokens.py::test_mixed"),
        ),
        Exact(
            "a smaller vocabulary than the base's",
            (
                "fewer tokens",
                "fewer tokens: LoRA of both",
                "fewer tokens: saved",
                "fewer tokens: trained",
            ),
        ),
        Exact(
            "embeddings saved with it",
            (
                "embeddings saved along",
                "embeddings trained and saved along",
                "LoRA of embedding trained and saved along",
            ),
        ),
        Exact(
            "`ensure_weight_tying`",
            (
                "ensure_weight_tying: LoRA",
                "ensure_weight_tying: DoRA",
                "ensure_weight_tying: modules_to_save",
                "ensure_weight_tying: trainable_token_indices",
            ),
        ),
    ],
    "Other kinds": [
        Exact("AdaLoRA", ("AdaLoRA",)),
        Exact("VeRA", ("VeRA", "VeRA without its projections")),
        Exact("LoHa", ("LoHa",), note="1"),
        Exact("LoKr", ("LoKr",), note="1"),
        Exact("(IA)³", ("IA3",)),
        Exact("(IA)³ of the head", ("IA3 of the head",)),
    ],
    "Mixtures of experts": [
        Exact("attention", ("experts: attention", "experts: all"), families=MIXTURES),
        Exact("router", ("experts: router", "experts: all"), families=MIXTURES),
        Exact(
            "experts, by `target_parameters`",
            ("experts: gate-up", "experts: down", "experts: all"),
            families=MIXTURES,
        ),
        Exact("experts, a tensor for each", ("experts: single",), families=CONVERTED),
    ],
    "Several at once": [
        Exact(
            "a weighted sum of adapters, by request",
            ("a weighted sum", "test_composition.py::test_mixed_as_peft"),
            families="all",
        ),
    ],
}
_INIT = "init_lora_weights"
REFUSED: list[Refused] = [
    Refused("PiSSA on another base", _INIT, {_INIT: "pissa"}, "", "wrong", "2"),
    Refused("OLoRA on another base", _INIT, {_INIT: "olora"}, "", "wrong", "2"),
    Refused("CorDA on another base", _INIT, {_INIT: "corda"}, note="2"),
    Refused("LoftQ", _INIT, {_INIT: "loftq"}),
    Refused("LoRA-GA, not converted", _INIT, {_INIT: "lora_ga"}),
    Refused("layer replication", "layer_replication", {"layer_replication": [[0, 2], [1, 3]]}),
    Refused("BD-LoRA", "use_bdlora", {"use_bdlora": {"nblocks": 2}}),
    Refused("QALoRA", "use_qalora", {"use_qalora": True}),
    Refused("Arrow", "arrow_config", {"arrow_config": {"top_k": 2}}),
    Refused("KaSA", "kasa_config", {"kasa_config": {"beta": 1e-4}}),
    Refused("MonteCLoRA", "monteclora_config", {"monteclora_config": {"num_samples": 4}}),
    Refused("VeLoRA", "velora_config", {"velora_config": {"num_groups": 4}}),
    Refused("OFT, BOFT, prompts and all other types", "peft_type", {"peft_type": "BOFT"}),
    Refused("tasks with a label for each token", "task_type", {"task_type": "TOKEN_CLS"}),
    Refused("whole linear layers", "modules_to_save", {"modules_to_save": ["q_proj"]}),
    Refused("tensors that the file lacks", "use_dora", {"use_dora": True}),
    Refused("an unknown field that is set", "its name", {"shiny": True}),
]


def page() -> str:
    lines = [
        HEAD,
        textwrap.fill(ALL, 100),
        "",
        FAMILIES,
        COLUMNS,
        "| kind | Weft | families | vLLM 0.33 | SGLang 0.5.23 |",
        "|---|---|---|---|---|",
    ]
    for section, rows in SECTIONS.items():
        lines.append(f"| **{section}** | | | | |")
        lines += [_line(row, "exact") for row in rows]
    lines.append("| **Not served** | | | | |")
    for row in REFUSED:
        field = row.field if " " in row.field else f"`{row.field}`"
        lines.append(_line(row, f"refused: {field}"))
    return "\n".join([*lines, "", FOOT])


def _line(row: Exact | Refused, weft: str) -> str:
    note = f" ({row.note})" if row.note else ""
    families = row.on if isinstance(row, Exact) else ""
    return f"| {row.name} | {weft}{note} | {families} | {row.vllm} | {row.sglang} |"


if __name__ == "__main__":
    sys.stdout.write(page())
