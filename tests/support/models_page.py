"""docs/models.md: `python tests/support/models_page.py > docs/models.md`.

`test_models_page.py` checks that the file is current and that each architecture is in one row.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from adapter_kinds import FAMILIES

from weft.models.blueprint import target_table
from weft.models.config import load_model_config


@dataclass(frozen=True)
class Row:
    """One family."""

    name: str
    family: str
    """In `adapter_kinds.FAMILIES`: the configuration whose projections are shown."""
    architectures: tuple[str, ...]
    """Without what they end in: ForCausalLM, or ForConditionalGeneration for `sees`."""
    sees: tuple[str, ...] = ()
    tools: str = ""
    reasoning: str = ""
    limits: str = ""

    @property
    def all_architectures(self) -> list[str]:
        return [
            *(f"{name}ForCausalLM" for name in self.architectures),
            *(f"{name}ForConditionalGeneration" for name in self.sees),
        ]

    @property
    def adapted(self) -> list[str]:
        """The last names of its projections, in the order of a layer."""
        config = copy.deepcopy(FAMILIES[self.family])
        config.architectures = [type(config).__name__.removesuffix("Config") + "ForCausalLM"]
        config.architectures = [config.architectures[0].replace("TextFor", "For")]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            table = target_table(load_model_config(Path(folder)))
        return list(dict.fromkeys(target.suffix for target in table.targets))


USUAL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OUTSIDE = ("embed_tokens", "lm_head")
"""Every family has these."""
THINK = "`<think>`"
IMAGES = "images refused"
ROWS = [
    Row("Llama 2, 3.x", "llama", ("Llama",), tools="`llama3_json`"),
    Row(
        "Llama 4",
        "llama4",
        ("Llama4",),
        sees=("Llama4",),
        tools="`pythonic`, `llama3_json`",
        limits=f"{IMAGES}; no rope type that scales cos and sin where q and k have norms; peft"
        " adapts its routers by `target_parameters` only",
    ),
    Row(
        "InternLM 3, IQuest-Coder",
        "llama",
        ("InternLM3", "IQuestCoder"),
        limits="no tools; rope of the type `dynamic` up to `max_position_embeddings`",
    ),
    Row(
        "Mistral, Ministral",
        "mistral",
        ("Mistral", "Ministral"),
        sees=("Mistral3",),
        tools="`mistral`, `mistral_v11`",
        reasoning="`[THINK]`",
        limits=IMAGES,
    ),
    Row("Ministral 3", "ministral3", ("Ministral3",), tools="`mistral_v11`", reasoning="`[THINK]`"),
    Row("Seed-OSS", "seed-oss", ("SeedOss",), tools="`seed_oss`", reasoning="`<seed:think>`"),
    Row(
        "Qwen 2, 2 VL, 2.5, 2.5 VL",
        "qwen2",
        ("Qwen2",),
        sees=("Qwen2VL", "Qwen2_5_VL"),
        tools="`hermes`",
        limits=IMAGES,
    ),
    Row("Qwen 2 MoE", "qwen2-moe", ("Qwen2Moe",), limits="no tools"),
    Row(
        "Qwen 3, 3 VL",
        "qwen3-tied",
        ("Qwen3",),
        sees=("Qwen3VL",),
        tools="`hermes`",
        reasoning=THINK,
        limits=IMAGES,
    ),
    Row(
        "Qwen 3 MoE, 3 VL MoE",
        "qwen3-moe",
        ("Qwen3Moe",),
        sees=("Qwen3VLMoe",),
        tools="`hermes`, `qwen3_coder`",
        reasoning=THINK,
        limits=IMAGES,
    ),
    Row("Qwen 3 Next", "qwen3-next", ("Qwen3Next",), tools="`hermes`", reasoning=THINK),
    Row(
        "Qwen 3.5",
        "qwen3.5",
        ("Qwen3_5",),
        sees=("Qwen3_5",),
        tools="`qwen3_coder`",
        reasoning=THINK,
        limits=IMAGES,
    ),
    Row(
        "Qwen 3.5 MoE",
        "qwen3.5-moe",
        ("Qwen3_5Moe",),
        sees=("Qwen3_5Moe",),
        tools="`qwen3_coder`",
        reasoning=THINK,
        limits=IMAGES,
    ),
    Row("Gemma 1, 2", "gemma2", ("Gemma", "Gemma2"), limits="no tools"),
    Row("VaultGemma", "vaultgemma", ("VaultGemma",), limits="no tools"),
    Row(
        "Gemma 3",
        "gemma3",
        ("Gemma3",),
        sees=("Gemma3",),
        tools="`functiongemma`",
        limits=f"{IMAGES}; tools of FunctionGemma only; no attention with a soft cap or in both"
        " directions",
    ),
    Row(
        "Gemma 4",
        "gemma4",
        ("Gemma4",),
        sees=("Gemma4",),
        tools="`gemma4`",
        reasoning="`<\\|channel>thought`",
        limits="images and sound refused; no added tokens if each layer has a token embedding;"
        " routers of MoE models are adapted as linear layers, `router.proj`",
    ),
    Row(
        "gpt-oss",
        "gpt-oss",
        ("GptOss",),
        tools="`harmony`",
        reasoning="with `harmony`",
        limits="mxfp4 takes the memory of 16 bits; biases can't be replaced by adapters",
    ),
    Row("Mixtral", "mixtral", ("Mixtral",), tools="`mistral`"),
    Row("MiniMax M2", "minimax-m2", ("MiniMaxM2",), tools="`minimax_m2`", reasoning=THINK),
    Row(
        "Phi 3, 4 mini",
        "phi3",
        ("Phi3",),
        tools="`phi4_mini_json`",
        limits="no tools for Phi 3; longrope up to its original context",
    ),
    Row("SmolLM 3", "smollm3", ("SmolLM3",), tools="`hermes`", reasoning=THINK),
    Row("OLMo 2", "olmo2", ("Olmo2",), limits="no tools"),
    Row("OLMo 3", "olmo3", ("Olmo3",), tools="`olmo3`", reasoning=THINK),
    Row("OLMo Hybrid", "olmo-hybrid", ("OlmoHybrid",)),
    Row("EXAONE 4", "exaone4", ("Exaone4",), tools="`hermes`", reasoning=THINK),
    Row(
        "K-EXAONE (EXAONE MoE)",
        "exaone-moe",
        ("ExaoneMoe", "ExaoneMoE"),
        tools="`hermes`",
        reasoning=THINK,
        limits="the head that drafts tokens is not served",
    ),
    Row(
        "Hunyuan dense",
        "hunyuan",
        ("HunYuanDenseV1",),
        tools="`hunyuan`",
        reasoning=THINK,
        limits="no rope type that scales cos and sin",
    ),
    Row("ERNIE 4.5 dense", "ernie4.5", ("Ernie4_5",), limits="no tools"),
    Row("Helium", "helium", ("Helium",), limits="no tools"),
    Row("CWM", "cwm", ("Cwm",), reasoning=THINK, limits="no tools"),
    Row("Apertus", "apertus", ("Apertus",), limits="no tools"),
    Row(
        "Nemotron 4, Minitron",
        "nemotron",
        ("Nemotron",),
        limits="no tools; norms can't be replaced by adapters",
    ),
    Row("Jais 2", "jais2", ("Jais2",), limits="no tools; norms can't be replaced by adapters"),
    Row("Arcee (AFM)", "arcee", ("Arcee",), limits="no tools"),
    Row("OLMoE", "olmoe", ("Olmoe",), limits="no tools; no `clip_qkv`"),
    Row(
        "Granite 3",
        "granite",
        ("Granite",),
        tools="`granite`",
        reasoning="`<think>`, or sentences in 3.2",
    ),
    Row("Granite SWA", "granite-swa", ("GraniteSWA",), limits="no tools"),
    Row("Granite 3 MoE", "granite-moe", ("GraniteMoe",), tools="`granite`"),
    Row(
        "Granite MoE with a shared MLP",
        "granite-moe-shared",
        ("GraniteMoeShared",),
        limits="no tools",
    ),
    Row("Granite SWA MoE", "granite-moe-swa", ("GraniteMoeSWA",), limits="no tools"),
    Row(
        "Granite 4",
        "granite4",
        ("GraniteMoeHybrid",),
        tools="`hermes`",
    ),
    Row("LFM2, LFM2.5", "lfm2", ("Lfm2",), tools="`lfm2`", reasoning=THINK),
    Row("LFM2 MoE", "lfm2-moe", ("Lfm2Moe",), tools="`lfm2`", reasoning=THINK),
    Row(
        "Nemotron-H, Nemotron Nano 2, 3 Nano, 3 Super",
        "nemotron-h",
        ("NemotronH",),
        tools="`nemotron_json`, `qwen3_coder`",
        reasoning=THINK,
        limits="no `mlp_bias` beside experts; `peft` itself refuses `out_proj`; with"
        " `moe_latent_size`, `fc1_latent_proj` and `fc2_latent_proj`, too",
    ),
    Row(
        "GLM 4 dense",
        "glm4",
        ("Glm", "Glm4"),
        tools="`glm4`",
        limits="tools of GLM-4-0414's template only",
    ),
    Row(
        "GLM 4.5, 4.6, 4.7",
        "glm4-moe",
        ("Glm4Moe",),
        tools="`glm45`, `glm47`",
        reasoning=THINK,
        limits="the head that drafts tokens is not served",
    ),
    Row(
        "DeepSeek V2",
        "deepseek-v2",
        ("DeepseekV2",),
        limits="no tools; except in Lite, `q_a_proj` and `q_b_proj` instead of `q_proj`",
    ),
    Row(
        "DeepSeek V3, R1, Kimi K2",
        "deepseek-v3",
        ("DeepseekV3",),
        tools="`deepseek_v3`, `deepseek_v31`, `kimi_k2`",
        reasoning=THINK,
        limits="the head that drafts tokens is not served",
    ),
    Row(
        "GLM 4.7 Flash",
        "glm4-moe-lite",
        ("Glm4MoeLite",),
        tools="`glm47`",
        reasoning=THINK,
        limits="the head that drafts tokens is not served",
    ),
    Row(
        "Mistral Small 4",
        "mistral4",
        ("Mistral4",),
        tools="`mistral_v11`",
        reasoning="`[THINK]`",
        limits="images refused where it is the text part of `Mistral3ForConditionalGeneration`",
    ),
    Row("Sarvam MoE", "sarvam-moe", ("SarvamMoE",), limits="no tools"),
    Row(
        "Sarvam (MLA)",
        "deepseek-v3",
        ("SarvamMLA",),
        limits="no tools; `q_proj` in the place of `q_a_proj` and `q_b_proj`",
    ),
    Row("Youtu-LLM", "youtu", ("Youtu",), reasoning=THINK, limits="no tools"),
    Row(
        "HyperCLOVA X SEED Think",
        "hyperclovax",
        ("HyperCLOVAX",),
        limits="no tools; no `use_post_norm` false",
    ),
    Row("dots.llm1", "dots1", ("Dots1",), limits="no tools"),
    Row(
        "Solar Open",
        "solar-open",
        ("SolarOpen",),
        tools="`solar_open`",
        reasoning="`<\\|think\\|>`",
    ),
    Row(
        "ERNIE 4.5 MoE",
        "ernie4.5-moe",
        ("Ernie4_5_Moe",),
        tools="`hermes`",
        reasoning=THINK,
        limits="tools and reasoning of the Thinking model only; no `use_bias`",
    ),
    Row(
        "Cohere 2 (Command R7B, A)",
        "cohere2",
        ("Cohere2",),
        tools="`cohere`",
        reasoning="`<\\|START_THINKING\\|>`",
    ),
]
HEAD = """\
# Models

Weft computes a model as transformers does, or refuses it with an error that names the field of its
configuration at fault. Every field is either read, known to have no effect, or refused unless it
has its default. Fields that transformers does not know are ignored, and the log names them.
Architectures that are not in the table are refused too.

Sizes are read from the configuration, so all sizes of a family are served alike.

- **Projections** are the layers for which adapters may have a LoRA, beside `embed_tokens` and
  `lm_head`, which all families have. *The usual* are `q_proj`, `k_proj`, `v_proj`, `o_proj`,
  `gate_proj`, `up_proj` and `down_proj`. Experts (`model.layers.N.mlp.experts.*`) and routers are
  adapted by `target_parameters`. [Fidelity](fidelity.md) lists what else adapters may have.
- **Tools** is the format of the model's tool calls. `--tool-call-parser auto` recognises it by
  the chat template; see [API](api.md#tools). Without a format, requests with tools are refused.
- **Reasoning** is how the model marks its reasoning, which is then kept apart from the answer.

| family | architectures | projections | tools | reasoning | limits |
|---|---|---|---|---|---|
"""
FOOT = """
For architectures that end in `ForConditionalGeneration`, the text model is served. Adapters of
the parts that see images are refused, and the error names their tensor.

**How this is tested.** The tests compare random models of a few layers, several of each family,
with transformers in float32: the logits at every position, for whole prompts and for chunks mixed
with decodes, agree within 0.0001. Published checkpoints are not part of the tests. Two bases of a
million parameters have trained adapters: a Llama, and a Qwen 3.5 that `weft demo --hybrid` serves.

## Quantized checkpoints

A quantized checkpoint is served with exactly the values that its bits stand for. So an adapter
meets the same weights on which it was trained.

| `quant_method` | what is read | stays in its own bits on a GPU, in bfloat16 or float16 |
|---|---|---|
| `awq` | 4 bits in the `gemm` layout | yes |
| `bitsandbytes` | nf4 and fp4, with and without double quantization, and int8 | no |
| `compressed-tensors` | integers of 4 and 8 bits, and fp8, by tensor, output, group or block; \
also as older versions state it, in `compression_config` \
| yes |
| `fp8` | by tensor, by output, or by block, experts one by one or in one tensor | yes |
| `gptq` | 2, 4 and 8 bits, both versions, with and without reordered inputs \
| 4 and 8 bits without reordered inputs; 2 bits take the memory of 4 |
| `mxfp4` | the experts of gpt-oss | no |

Where the last column says yes, linear layers keep their 4 or 8 bits in GPU memory, and products
turn them into 16-bit values as they multiply. Everything else takes the memory of 16 bits: the
experts of MoE models, embedding and head, and all layers on a CPU or with `--deterministic`. So
does a matrix

- whose outputs are not a multiple of 64, or whose inputs are not a multiple of 256 (4 bits) or
  128 (8 bits);
- whose groups are not a multiple of 32 inputs, or neither divide those 256 or 128 inputs nor are
  a multiple of them;
- whose scales are float32 beside integers, bfloat16 in a model served in float16, or float16
  beside fp8;
- that several GPUs would cut within a group.

`weft plan` counts quantized matrices in their own bits, as far as config.json says.

Products of up to 1,024 rows on Hopper GPUs, and of up to 256 rows on others, make the values as
they multiply. Larger ones write a matrix's values to memory first. From 65 rows on, both ways take
longer than a 16-bit matrix: [Benchmarks](benchmarks.md#kernels-alone) compares them.
`--quantization values` holds the whole checkpoint in 16 bits instead. Up to 64 rows, a row's
result does not depend on the other rows in its step.

Inputs of layers are not rounded, even if a checkpoint asks for it. Adapters are computed as
beside a 16-bit matrix; those that need the base's values, such as DoRA, get them. Other settings
of a checkpoint's `quantization_config` are refused, and the error names the field. The tests
compare each row of the table with the format's own library, bit by bit.

## Quantizing a 16-bit checkpoint

`--quantization` converts the layers' matrices while they are loaded, in all families except MoE
models:

| value | result |
|---|---|
| `fp8-weight-only` | 8-bit floating point, with a scale for each output |
| `int4` | 4-bit integers, with a scale for each 128 inputs of an output |
| `fp8` | 8-bit floating point, and the inputs are rounded to 8 bits too |
| `nf4-values` | the values of `bitsandbytes`' 4 bits with double quantization, in 16 bits |

Weights are rounded to the nearest value. A GPU keeps 8-bit and 4-bit matrices in their own bits,
as above. `fp8` needs a GPU that multiplies 8-bit numbers, such as an L40S or an H100. QLoRA
adapters are usually trained on the values of `nf4-values`.

A checkpoint that was quantized with calibration data keeps more quality in 4 bits. Weft warns if
an adapter's `base_model_name_or_path` names a 4-bit checkpoint but the base has 16 bits.
"""


def page() -> str:
    return HEAD + "\n".join(map(_line, ROWS)) + "\n" + FOOT


def _line(row: Row) -> str:
    found = row.adapted
    assert set(OUTSIDE) <= set(found)
    is_usual = set(USUAL) <= set(found)
    left_out = (*OUTSIDE, *USUAL) if is_usual else OUTSIDE
    names = [f"`{name}`" for name in found if name not in left_out]
    adapted = ", ".join(["the usual", *names] if is_usual else names)
    architectures = ", ".join(f"`{name}`" for name in row.all_architectures)
    cells = (row.name, architectures, adapted, row.tools, row.reasoning, row.limits)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
