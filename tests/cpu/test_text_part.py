"""Checkpoints and adapters of models that also see images: their text model is served, and nothing
else of them."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_kinds import WINDOW_AND_ALL, randomise
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Llama4Config,
    Mistral3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from weft import LLM, SamplingParams
from weft.core.errors import AdapterInvalid, ConfigError
from weft.core.targets import text_name
from weft.models.config import load_model_config
from weft.models.loading import load_weights

TEXT: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 2, 1]}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2.5-vl": Qwen2_5_VLConfig(
        text_config=TEXT | {"head_dim": None, "rope_parameters": MROPE},
        vision_config=QWEN_VISION | {"patch_size": 4},
    ),
    "qwen3-vl": Qwen3VLConfig(text_config=TEXT, vision_config=QWEN_VISION | {"patch_size": 4}),
    "gemma3": Gemma3Config(
        text_config=TEXT | {"layer_types": WINDOW_AND_ALL, "sliding_window": 24},
        vision_config=VISION | {"model_type": "siglip_vision_model"},
        image_token_index=79,
        boi_token_index=78,
        eoi_token_index=77,
        mm_tokens_per_image=4,
    ),
    "gemma4": Gemma4Config(
        text_config=TEXT
        | {
            "layer_types": WINDOW_AND_ALL,
            "sliding_window": 24,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 80,
            "hidden_size_per_layer_input": 8,
        },
        vision_config=VISION | {"num_key_value_heads": 2, "position_embedding_size": 16},
        audio_config=None,
        image_token_id=79,
        video_token_id=78,
        audio_token_id=77,
    ),
    "mistral3": Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config=VISION | {"model_type": "pixtral"},
        image_token_index=79,
        tie_word_embeddings=False,
    ),
    "ministral3": Mistral3Config(
        text_config=TEXT | {"model_type": "ministral3"},
        vision_config=VISION | {"model_type": "pixtral"},
        image_token_index=79,
        tie_word_embeddings=False,
    ),
    "mistral4": Mistral3Config(
        text_config=TEXT
        | {
            "model_type": "mistral4",
            "num_key_value_heads": 4,
            "kv_lora_rank": 20,
            "q_lora_rank": None,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        vision_config=VISION | {"model_type": "pixtral"},
        image_token_index=79,
        tie_word_embeddings=False,
    ),
}
AGAIN = ("gemma4", "mistral3", "qwen3-vl")
"""Whose names are like those of others."""
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "num_threads": 1,
    "num_blocks": 64,
}
PROMPT = [7, 1, 44, 9, 23, 6]
STEPS = 8


Base = tuple[PreTrainedModel, Path]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.exhaustive if name in AGAIN else [])
        for name in CONFIGS
    ],
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        CONFIGS[request.param], attn_implementation="eager"
    ).eval()
    model.save_pretrained(folder)
    return model, folder


@torch.inference_mode()
def greedy(model: torch.nn.Module) -> list[int]:
    ids = list(PROMPT)
    for _ in range(STEPS):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def adapt(
    base: Base, folder: Path, targets: str, text: str = "model.language_model", **fields: Any
) -> PeftModel:
    """An adapter with random weights, and in one module a rank and an alpha of its own. `text`: the
    name of the text model."""
    one = f"{text}.layers.0.self_attn.q_proj"
    config = LoraConfig(
        r=3, target_modules=targets, rank_pattern={f"^{one}$": 5}, alpha_pattern={one: 32}, **fields
    )
    with warnings.catch_warnings(action="ignore"):  # of other libraries, about each other
        model = get_peft_model(copy.deepcopy(base[0]), config)
        randomise(model)
        model.save_pretrained(folder)
    return model.eval()


def test_text_is_answered_as_by_the_whole_model(base: Base, tmp_path: Path) -> None:
    model, folder = base
    adapted = adapt(base, tmp_path, r".*language_model.*\.(q|v|up|down)_proj")
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    with LLM(folder, {"adapted": tmp_path}, **OPTIONS) as llm:
        own, other = llm.generate([PROMPT] * 2, params, [None, "adapted"])
    assert own.token_ids == greedy(model)
    assert other.token_ids == greedy(adapted) != own.token_ids


TEXT_MODEL = "model.language_model"


def check_next_token(base: Base, adapted: torch.nn.Module, folder: Path) -> None:
    """The adapter in `folder` gives the log-probabilities of `adapted`, and the base others."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, ignore_eos=True)
    with LLM(base[1], {"adapted": folder}, **OPTIONS) as llm:
        outputs = llm.generate([PROMPT] * 2, params, [None, "adapted"])
    with torch.inference_mode():
        wanted = adapted(input_ids=torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    own, other = (dict(out.logprobs[0].top) for out in outputs if out.logprobs)
    assert other == pytest.approx({token: float(wanted[token]) for token in other}, abs=1e-4)
    assert own != pytest.approx({token: float(wanted[token]) for token in own}, abs=1e-2)


@pytest.mark.parametrize(
    "fields",
    [
        {"modules_to_save": [f"{TEXT_MODEL}.embed_tokens", "language_model.norm"]},
        {"trainable_token_indices": {f"{TEXT_MODEL}.embed_tokens": [6, 7, 44]}},
    ],
    ids=["modules", "tokens"],
)
def test_whole_modules_and_tokens_may_have_their_full_names(
    base: Base, tmp_path: Path, fields: dict[str, Any]
) -> None:
    adapted = adapt(base, tmp_path, r".*language_model.*\.(q|up)_proj", **fields)
    check_next_token(base, adapted, tmp_path)


@pytest.mark.parametrize("task", [None, "FEATURE_EXTRACTION"])
def test_an_adapter_may_be_trained_on_a_model_without_a_head(
    base: Base, tmp_path: Path, task: str | None
) -> None:
    """Its names begin with language_model."""
    own, one = base[0].model, "language_model.layers.0.self_attn.q_proj"
    targets = r"language_model\.layers\.\d\..*\.(q|up)_proj"
    config = LoraConfig(
        r=3,
        target_modules=targets,
        rank_pattern={f"^{one}$": 5},
        modules_to_save=["language_model.norm"],
        task_type=task,
    )
    with warnings.catch_warnings(action="ignore"):  # of other libraries, about each other
        trained = get_peft_model(copy.deepcopy(own), config)
    randomise(trained)
    trained.save_pretrained(tmp_path)
    whole = copy.deepcopy(base[0])
    whole.model = trained
    check_next_token(base, whole.eval(), tmp_path)


@pytest.mark.parametrize("part", ["vision_tower", "visual", "embed_audio"])
def test_a_part_of_a_model_without_a_head_that_sees_or_hears_is_no_text(part: str) -> None:
    assert text_name(f"{part}.layers.0.q_proj") is None


@pytest.mark.parametrize("kind", [Qwen3_5MoeConfig, Qwen3VLMoeConfig])
def test_experts_may_have_their_full_names(kind: type[PreTrainedConfig], tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shared = {"shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * 2}
    own = shared if kind is Qwen3_5MoeConfig else {}
    config = kind(text_config=TEXT | experts | own, vision_config=QWEN_VISION)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(tmp_path / "base")
    names = [f"{TEXT_MODEL}.layers.1.mlp.experts.{n}" for n in ("gate_up_proj", "down_proj")]
    base = model, tmp_path / "base"
    adapted = adapt(base, tmp_path / "adapted", r".*\.q_proj", target_parameters=names)
    check_next_token(base, adapted, tmp_path / "adapted")


def test_a_text_model_may_have_its_own_head(tmp_path: Path) -> None:
    """As Llama 4's has. Its experts' matrices are stored as (experts, in, out)."""
    sizes = {"intermediate_size": 20, "intermediate_size_mlp": 48, "num_local_experts": 4}
    layers = {"moe_layers": [1], "no_rope_layers": [1, 0]}
    positions = {"attention_chunk_size": 4, "floor_scale": 4}
    widths = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 16)
    config = Llama4Config(
        text_config=TEXT | sizes | layers | positions,
        vision_config=VISION | widths | {"pixel_shuffle_ratio": 0.5},
        image_token_index=79,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path / "base")
    base, text = (model, tmp_path / "base"), "language_model.model"
    fields = {
        "text": text,
        "modules_to_save": [f"{text}.norm"],
        "trainable_token_indices": {f"{text}.embed_tokens": [6, 7, 44]},
        "target_parameters": [
            f"{text}.layers.1.feed_forward.{name}"
            for name in ("experts.gate_up_proj", "experts.down_proj", "router.weight")
        ],
    }
    adapted = adapt(base, tmp_path / "one", r".*language_model.*\.(q|up)_proj", **fields)
    # Without an image, the whole model fails in transformers.
    check_next_token(base, adapted.get_base_model().language_model, tmp_path / "one")
    adapt(base, tmp_path / "seeing", r"vision_model.*\.q_proj")
    refused = pytest.raises(AdapterInvalid, match="only the text model is served")
    with LLM(base[1], {}, **OPTIONS) as llm, refused as caught:
        llm.load_adapter("seeing", tmp_path / "seeing")
    assert "vision_model" in str(caught.value.param)


def test_what_sees_images_is_not_served(base: Base, tmp_path: Path) -> None:
    kind = base[0].config.model_type
    part = "visual" if kind.startswith("qwen") else "vision_tower"
    inner = r"\.linear" if kind == "gemma4" else ""
    adapt(base, tmp_path, rf".*{part}.*\.(q_proj|qkv)" + inner)
    refused = pytest.raises(AdapterInvalid, match="only the text model is served")
    with LLM(base[1], {}, **OPTIONS) as llm, refused as caught:
        llm.load_adapter("seeing", tmp_path)
    assert part in str(caught.value.param)


def test_older_files_have_the_fields_of_the_text_part_in_the_place_of_the_whole(
    tmp_path: Path,
) -> None:
    CONFIGS["qwen2.5-vl"].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], **json.loads(path.read_text())}
    path.write_text(json.dumps(raw))
    new = load_model_config(tmp_path)
    text = raw.pop("text_config")
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    older = {"rope_scaling": rope, "rope_theta": text.pop("rope_parameters")["rope_theta"]}
    path.write_text(json.dumps(text | raw | older))
    assert load_model_config(tmp_path) == new


def test_stacked_experts_may_be_transposed(tmp_path: Path) -> None:
    """As published files of Qwen 3 VL have them."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    config = Qwen3VLMoeConfig(text_config=TEXT | experts, vision_config=QWEN_VISION)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    as_saved = dense_experts(tmp_path)
    path = tmp_path / "model.safetensors"
    turned = {n: t.mT.contiguous() if ".experts." in n else t for n, t in load_file(path).items()}
    save_file(turned, path)
    for one, other in zip(dense_experts(tmp_path), as_saved, strict=True):
        assert torch.equal(one, other)


def dense_experts(folder: Path) -> list[torch.Tensor]:
    weights = load_weights(folder, load_model_config(folder), torch.float32, "cpu")
    return [weights.dense(f"1.experts_{key}") for key in ("gate_up", "down")]


def test_the_text_model_alone_may_be_said_to_be_quantized(base: Base, tmp_path: Path) -> None:
    config = json.loads((base[1] / "config.json").read_text())
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config["text_config"]["quantization_config"] = stated
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(tmp_path).quantized == stated


def test_a_text_model_of_another_kind_is_refused(base: Base, tmp_path: Path) -> None:
    config = json.loads((base[1] / "config.json").read_text())
    config["text_config"]["model_type"] = "llama"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        load_model_config(tmp_path)
    assert caught.value.param == "model_type"


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_part_of_mistral_says_whether_its_head_is_tied(tied: bool, tmp_path: Path) -> None:
    """Published files say nothing of that for the whole model, whose default is that it is."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS["mistral3"])
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["tie_word_embeddings"]
    path.write_text(json.dumps(raw))
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    with LLM(tmp_path, {}, **OPTIONS) as llm:
        (own,) = llm.generate([PROMPT], params)
    assert own.token_ids == greedy(model)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_what_only_the_text_part_says_is_read(kind: str, tmp_path: Path) -> None:
    CONFIGS[kind].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["architectures"] = [f"{kind.capitalize()}ForConditionalGeneration"]
    raw.pop("eos_token_id", None)
    raw["text_config"] |= {"dtype": "float16", "eos_token_id": [3, 5]}
    path.write_text(json.dumps({k: v for k, v in raw.items() if k != "dtype"}))
    config = load_model_config(tmp_path)
    assert (config.dtype, config.eos_token_ids) == ("float16", (3, 5))
    path.write_text(json.dumps(raw | {"dtype": "bfloat16", "eos_token_id": 7}))
    config = load_model_config(tmp_path)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (7,))
    del raw["text_config"]["eos_token_id"]  # then it is that of all models of the text part's type
    path.write_text(json.dumps(raw))
    assert load_model_config(tmp_path).eos_token_ids == ((1,) if kind == "gemma3" else (2,))
