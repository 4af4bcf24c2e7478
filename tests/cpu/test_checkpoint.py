"""Adapters from disk to image: PEFT is the oracle, and what is not served is refused by name."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from load_image import load_image
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save, save_file
from tables import build_table
from transformers import LlamaConfig, LlamaForCausalLM

from weft.checkpoint.base import BaseWeights, array_of
from weft.checkpoint.fields import PatternError, Work, compile_pattern
from weft.checkpoint.pack import AdapterImage, fill, pack_image
from weft.checkpoint.read import AdapterFiles
from weft.core.errors import AdapterError, AdapterInvalid, AdapterNotFound, AdapterUnavailable
from weft.core.targets import Norm, Target, TargetTable

HIDDEN, KV, MLP, VOCAB, LAYERS = 32, 16, 48, 64, 2
MAX_RANK = 16
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"

Tensors = dict[str, torch.Tensor]


def make_table() -> TargetTable:
    rows: list = [("embedding", VOCAB, [("model.embed_tokens", HIDDEN)])]
    for i in range(LAYERS):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        qkv = [(attn + "q_proj", HIDDEN), (attn + "k_proj", KV), (attn + "v_proj", KV)]
        rows.append(("linear", HIDDEN, qkv))
        rows.append(("linear", HIDDEN, [(attn + "o_proj", HIDDEN)]))
        rows.append(("linear", HIDDEN, [(mlp + "gate_proj", MLP), (mlp + "up_proj", MLP)]))
        rows.append(("linear", MLP, [(mlp + "down_proj", HIDDEN)]))
    rows.append(("head", HIDDEN, [("lm_head", VOCAB)]))
    return build_table(rows, norms=[("model.norm", HIDDEN)])


TABLE = make_table()


def make_adapter(folder: Path, **options: object):
    """Save an adapter with random matrices by PEFT; returns the PEFT model."""
    with warnings.catch_warnings(action="ignore"):  # of other libraries, about each other
        return _make_adapter(folder, **options)


def _make_adapter(folder: Path, **options: object):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lora = LoraConfig(task_type="CAUSAL_LM", **{"init_lora_weights": False, **options})
    model = get_peft_model(LlamaForCausalLM(config), lora)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


def delta(image: AdapterImage, name: str) -> torch.Tensor:
    """What the image adds to the weight of a target: (out, in); embedding: (vocab, hidden)."""
    target = TABLE.by_name[name]
    group = TABLE.groups[target.group]
    rank = image.layout.rank[target.slice]
    row = sum(image.layout.rank[s.slice] for s in group.slices if s.slice < target.slice)
    start = image.layout.a_offset[group.index]
    b_start = image.layout.b_offset[target.slice]
    b = image.data[b_start : b_start + rank * target.out_features].view(-1, rank).double()
    if target.kind == "embedding":
        a = image.data[start : start + rank * target.in_features].view(-1, rank).double()
        return a @ b.T
    start += row * target.in_features
    a = image.data[start : start + rank * target.in_features].view(rank, -1).double()
    return b @ a


# PEFT as the oracle ---------------------------------------------------------------------------

RANK_PATTERN = {"q_proj": 3, r"layers\.1\.mlp\..*": 5, "^model.layers.0.mlp.down_proj": 7}
ALPHA_PATTERN = {"layers.1.self_attn.q_proj": 5, "(k|v)_proj": 2.5, ".*up_proj": 1}
SERVED: dict[str, dict] = {
    "attention": {"r": 4, "target_modules": ATTENTION},
    "one": {"r": 1, "target_modules": ["v_proj"], "lora_alpha": 3},
    "mlp": {"r": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "all-linear": {"r": 4, "target_modules": "all-linear", "lora_alpha": 16},
    "regex": {"r": 4, "target_modules": r".*layers\.1\..*(q|v)_proj"},
    "lookahead": {"r": 4, "target_modules": r"(?!.*vision).*(q|v)_proj"},
    "full names": {"r": 4, "target_modules": ["model.layers.1.mlp.up_proj", "o_proj"]},
    "other models' names too": {"r": 4, "target_modules": ["q_proj", "qkv_proj", "w1"]},
    "rslora": {"r": 9, "target_modules": ALL_LINEAR, "use_rslora": True},
    "rank_pattern": {"r": 4, "target_modules": ALL_LINEAR, "rank_pattern": RANK_PATTERN},
    "alpha_pattern": {"r": 4, "target_modules": ALL_LINEAR, "alpha_pattern": ALPHA_PATTERN},
    "both, rslora": {
        "r": 4,
        "target_modules": ALL_LINEAR,
        "rank_pattern": RANK_PATTERN,
        "alpha_pattern": ALPHA_PATTERN,
        "use_rslora": True,
    },
    "embedding and head": {"r": 4, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "embedding alone": {"r": 2, "target_modules": ["embed_tokens"]},
    "layers": {"r": 4, "target_modules": ["q_proj"], "layers_to_transform": [1]},
    "layers_pattern": {
        "r": 4,
        "target_modules": ["q_proj"],
        "layers_to_transform": 1,
        "layers_pattern": "layers",
    },
    "excluded": {"r": 4, "target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*"},
    "a saved pattern saves nothing": {
        "r": 4,
        "target_modules": ALL_LINEAR,
        "modules_to_save": [r"mlp\.(gate|up)_proj", "self.attn", r"0\.mlp|^no"],
    },
    "gaussian": {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED.keys())
def test_image_is_pefts_delta(tmp_path: Path, options: dict):
    model = make_adapter(tmp_path, **options).double()
    image = load_image(tmp_path, TABLE, torch.float32, MAX_RANK)
    seen = set()
    for name, module in model.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            expected = module.get_delta_weight("default")
            torch.testing.assert_close(delta(image, name), expected, rtol=1e-5, atol=1e-6)
            seen.add(name)
    assert seen == {t.name for t in TABLE.targets if image.layout.rank[t.slice]}
    suffixes = [t.suffix for t in TABLE.targets if t.name in seen]
    assert image.targets == tuple(dict.fromkeys(suffixes))
    assert image.num_bytes == 4 * image.layout.num_elements == 4 * image.data.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scale_is_folded_in_float32(plain: tuple[dict, Tensors], dtype: torch.dtype):
    config, tensors = plain
    config["lora_alpha"] = 0.7
    image = pack(config, tensors, dtype=dtype)
    target = TABLE.by_name["model.layers.0.self_attn.q_proj"]
    start = image.layout.b_offset[target.slice]
    b = image.data[start : start + 4 * HIDDEN].view(HIDDEN, 4)
    assert image.data.dtype == dtype and image.num_bytes == 2 * image.layout.num_elements
    assert torch.equal(b, (tensors[Q0 + ".lora_B.weight"] * (0.7 / 4)).to(dtype))


def test_gaps_are_zero(plain: tuple[dict, Tensors]):
    image = pack(*plain)
    covered = torch.zeros(image.layout.num_elements, dtype=torch.bool)
    for group in TABLE.groups:
        start = image.layout.a_offset[group.index]
        total = sum(image.layout.rank[s.slice] for s in group.slices)
        covered[start : start + total * group.in_features] = total > 0
        for s in group.slices:
            start, rank = image.layout.b_offset[s.slice], image.layout.rank[s.slice]
            covered[start : start + rank * s.out_features] = rank > 0
    assert not image.data[~covered].any()


def test_half_precision_files(plain: tuple[dict, Tensors]):
    config, tensors = plain
    for dtype in (torch.float16, torch.bfloat16):
        narrow = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        wide = {name: tensor.float() for name, tensor in narrow.items()}
        assert torch.equal(pack(config, narrow).data, pack(config, wide).data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_is_scaled_in_float32_and_rounded_once(dtype: torch.dtype):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    values = torch.cat([bits[bits.isfinite()], torch.zeros(3, dtype=dtype)])
    for scale in (2.0, 0.7 / 4, 1e30, 1e-30):
        for columns in (1, 3, 16):
            source = values[: len(values) // columns * columns].view(-1, columns)
            dest = torch.zeros(len(source), columns + 5, dtype=dtype)[:, 2 : 2 + columns]
            fill(array_of(dest), array_of(source), scale)
            expected = (source.float() * scale).to(dtype)
            assert torch.equal(dest.contiguous().view(torch.int16), expected.view(torch.int16))


# refusals -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    make_adapter(folder, r=4, target_modules=["q_proj", "v_proj"])
    return folder


@pytest.fixture
def plain(saved: Path) -> tuple[dict, Tensors]:
    """Config and tensors of a good adapter, to spoil."""
    return json.loads((saved / CONFIG).read_text()), load_file(saved / WEIGHTS)


def pack(config: object, tensors: Tensors | bytes, dtype: torch.dtype = torch.float32):
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    weights = tensors if isinstance(tensors, bytes) else save(tensors)
    return pack_image(AdapterFiles(text, weights), TABLE, dtype, MAX_RANK)


def refused(param: str, config: object, tensors: Tensors | bytes, **options) -> str:
    with pytest.raises(AdapterInvalid) as caught:
        pack(config, tensors, **options)
    assert caught.value.param == param, caught.value.message
    assert caught.value.message.encode() and len(caught.value.message) < 1000
    return caught.value.message


FIELDS = [
    ("peft_type", "PROMPT_TUNING"),
    ("peft_type", None),
    ("task_type", "TOKEN_CLS"),
    ("task_type", []),
    ("bias", "some"),
    ("bias", 1),
    ("bias", ["all"]),
    ("use_dora", True),
    ("use_dora", "yes"),
    ("lora_bias", True),
    ("lora_bias", 1),
    ("modules_to_save", ["lm_head"]),
    ("modules_to_save", ["norm"]),
    ("modules_to_save", ["mlp"]),
    ("modules_to_save", ["[kq]_proj"]),
    ("modules_to_save", ["self.attn"]),
    ("modules_to_save", ["("]),
    ("modules_to_save", ["q)|(_proj"]),
    ("modules_to_save", "lm_head"),
    ("modules_to_save", [""]),
    ("modules_to_save", [1]),
    ("modules_to_save", 0),
    ("trainable_token_indices", [1, 2]),
    ("trainable_token_indices", {"embed_tokens": [1]}),
    ("trainable_token_indices", {"lm_head": [1]}),
    ("trainable_token_indices", {"q_proj": [1]}),
    ("trainable_token_indices", {"embed_tokens": [1], "model.embed_tokens": [2]}),
    ("trainable_token_indices", [-1]),
    ("trainable_token_indices", [1, 1]),
    ("trainable_token_indices", [1.0]),
    ("trainable_token_indices", [True]),
    ("trainable_token_indices", 1),
    ("trainable_token_indices", "1"),
    ("ensure_weight_tying", 1),
    ("alora_invocation_tokens", "5"),
    ("alora_invocation_tokens", 5),
    ("alora_invocation_tokens", [-1]),
    ("alora_invocation_tokens", [True]),
    ("alora_invocation_tokens", [1.0]),
    ("alora_invocation_tokens", [1, 10**9]),
    ("alora_invocation_tokens", [1] * 300),
    ("layer_replication", [[0, 2], [1, 2]]),
    ("arrow_config", {"top_k": 3}),
    ("use_bdlora", {"nblocks": 2}),
    ("use_qalora", True),
    ("target_parameters", ["experts.gate_up_proj"]),
    ("kasa_config", {"beta": 1}),
    ("kasa_config", {}),
    ("velora_config", {"num_groups": 2}),
    ("monteclora_config", {"num_samples": 2}),
    ("init_lora_weights", "loftq"),
    ("init_lora_weights", "lora_ga"),
    ("init_lora_weights", "magic"),
    ("init_lora_weights", 3),
    ("a_new_field", 1),
    ("a_new_field", {"x": None}),
    ("a_new_field", 0),
    ("r", 0),
    ("r", -1),
    ("r", MAX_RANK + 1),
    ("r", 5),
    ("r", 4.0),
    ("r", True),
    ("r", "4"),
    ("r", None),
    ("lora_alpha", "8"),
    ("lora_alpha", True),
    ("lora_alpha", None),
    ("lora_alpha", float("nan")),
    ("lora_alpha", float("inf")),
    ("lora_alpha", 10**400),
    ("use_rslora", 1),
    ("use_rslora", "true"),
    ("rank_pattern", []),
    ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", {"q_proj": MAX_RANK + 1}),
    ("rank_pattern", {"q_proj": "4"}),
    ("rank_pattern", {"(q_proj": 4}),
    ("rank_pattern", {"q_proj)|(.*": 4}),
    ("rank_pattern", {"*q_proj": 4}),
    ("rank_pattern", {"(?i)q_proj": 4}),
    ("rank_pattern", {"(?:q_proj){e<=1}": 4}),
    ("rank_pattern", {"[[:alpha:]]": 4}),
    ("rank_pattern", {"q" * 2000: 4}),
    ("rank_pattern", {f"q{i}": 4 for i in range(3000)}),
    ("rank_pattern", {"\ud800(": 4}),
    ("alpha_pattern", {"q_proj": None}),
    ("alpha_pattern", {"q_proj": float("nan")}),
    ("alpha_pattern", {"[": 1}),
    ("target_modules", ["q_proj"]),
    ("target_modules", ["q_proj", "v_proj", "o_proj"]),
    ("target_modules", []),
    ("target_modules", ["proj"]),
    ("target_modules", "q_proj|v_proj"),
    ("target_modules", ".*q_proj"),
    ("target_modules", {"q_proj": 1}),
    ("target_modules", [1]),
    ("exclude_modules", ["q_proj"]),
    ("exclude_modules", r".*\.1\..*"),
    ("layers_to_transform", [0]),
    ("layers_to_transform", 0),
    ("layers_to_transform", "0"),
    ("layers_pattern", ["blocks"]),
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda v: json.dumps(v)[:40])
def test_fields_are_refused_by_name(plain: tuple[dict, Tensors], field: str, value: object):
    config, tensors = plain
    config[field] = value
    param = f"{Q0}.lora_A.weight" if (field, value) == ("r", 5) else field
    refused(param, config, tensors)


def test_odd_field_names_are_escaped(plain: tuple[dict, Tensors]):
    config, tensors = plain
    refused(r"\ud800\n", {**config, "\ud800\n": 1}, tensors)


def test_unknown_fields_are_refused_with_a_way_out(plain: tuple[dict, Tensors]):
    config, tensors = plain
    assert "remove it if" in refused("purpose", {**config, "purpose": "to answer"}, tensors)


OFF = {"none": None, "false": False, "empty": "", "list": [], "object": {}}


@pytest.mark.parametrize("value", OFF.values(), ids=OFF.keys())
def test_fields_that_hold_nothing_are_accepted(plain: tuple[dict, Tensors], value: object):
    config, tensors = plain
    pack({**config, "a_new_field": value, "use_dora": value}, tensors)


def test_fields_without_effect_are_accepted(plain: tuple[dict, Tensors]):
    config, tensors = plain
    extra = {
        "lora_dropout": 0.5,
        "megatron_core": "x",
        "loftq_config": {"loftq_bits": 4},
        "eva_config": {"rho": 2.0},
        "init_lora_weights": "eva",
        "base_model_name_or_path": "/somewhere",
        "inference_mode": True,
        "target_modules": None,
    }
    pack({**config, **extra}, tensors)
    pack({"peft_type": "LORA", "r": 4}, tensors)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'{"r": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"\xff\xfe\x00",
        b'{"a": ' * 100_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_malformed_config(plain: tuple[dict, Tensors], text: bytes):
    refused(CONFIG, text, plain[1])


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


def poke(name: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].view(-1)[3].fill_(value)


O0 = Q0.replace("q_proj", "o_proj")
DELTA = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
A, B, P = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight", "base_model.model."
TENSORS: list[tuple[str, Callable[[Tensors], object], str]] = [
    (A, put(A, 4, HIDDEN + 1), "(4, 32)"),
    (A, put(A, 5, HIDDEN), "(4, 32)"),
    (A, put(A, 0, HIDDEN), "(4, 32)"),
    (A, put(A, 4 * HIDDEN), "(4, 32)"),
    (A, put(A), "(4, 32)"),
    (B, put(B, 4, HIDDEN), "(32, 4)"),
    (A, drop(B), "B matrix"),
    (B, drop(A), "A matrix"),
    (A, put(A, 4, HIDDEN, dtype=torch.float64), "F64"),
    (B, put(B, HIDDEN, 4, dtype=torch.int32), "I32"),
    (A, poke(A, float("nan")), "NaN"),
    (B, poke(B, float("inf")), "NaN"),
    (f"{Q0}.lora_B.bias", put(f"{Q0}.lora_B.bias", HIDDEN), "lora_bias is not set"),
    (f"{Q0}.lora_magnitude_vector", put(f"{Q0}.lora_magnitude_vector", HIDDEN), "use_dora"),
    (f"{Q0}.lora_E", put(f"{Q0}.lora_E", 4, 1), "only"),
    (f"{Q0}.base_layer.bias", put(f"{Q0}.base_layer.bias", HIDDEN), "no bias"),
    (f"{Q0}.bias", put(f"{Q0}.bias", HIDDEN), "PEFT would ignore"),
    (f"{Q0}.weight", put(f"{Q0}.weight", HIDDEN, HIDDEN), "only whole weights of"),
    (f"{O0}.base_layer.bias", put(f"{O0}.base_layer.bias", HIDDEN), "PEFT would ignore"),
    (f"{O0}.lora_B.bias", put(f"{O0}.lora_B.bias", HIDDEN), "PEFT would ignore"),
    (f"{P}model.norm.weight", put(f"{P}model.norm.weight", HIDDEN + 1), "(32,)"),
    (f"{P}model.norm.bias", put(f"{P}model.norm.bias", HIDDEN), "only the weight"),
    *(
        (name, put(name, 4, HIDDEN), "save_pretrained")
        for name in (
            f"{Q0}.lora_A.default.weight",
            f"module.{Q0}.lora_A.weight",
            f"_orig_mod.{Q0}.lora_A.weight",
            f"{P}model.layers.0._fsdp_wrapped_module.self_attn.q_proj.lora_A.weight",
            f"{P}model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.lora_A.weight",
        )
    ),
    (f"{Q0}.lora_embedding_A", put(f"{Q0}.lora_embedding_A", 4, HIDDEN), "linear"),
    (f"{P}lm_head.weight", put(f"{P}lm_head.weight", VOCAB + 2, HIDDEN), "2 more than the base"),
    (f"{P}lm_head.weight", put(f"{P}lm_head.weight", VOCAB, HIDDEN + 1), "(64, 32)"),
    (f"{P}lm_head.weight", put(f"{P}lm_head.weight", VOCAB), "(64, 32)"),
    (DELTA, put(DELTA, 2, HIDDEN), "does not say which tokens"),
    (
        f"{P}model.embed_tokens.base_layer.weight",
        put(f"{P}model.embed_tokens.base_layer.weight", VOCAB, HIDDEN),
        "PEFT would ignore",
    ),
    (
        f"{P}model.embed_tokens.lora_A.weight",
        put(f"{P}model.embed_tokens.lora_A.weight", 4, VOCAB),
        "embedding",
    ),
    (
        f"{P}model.layers.2.self_attn.q_proj.lora_A.weight",
        put(f"{P}model.layers.2.self_attn.q_proj.lora_A.weight", 4, HIDDEN),
        "2 layers",
    ),
    (
        f"{P}model.layers.0.self_attn.c_attn.lora_A.weight",
        put(f"{P}model.layers.0.self_attn.c_attn.lora_A.weight", 4, HIDDEN),
        "q_proj",
    ),
    ("q_proj.lora_A.weight", put("q_proj.lora_A.weight", 4, HIDDEN), "base_model.model."),
    (WEIGHTS, dict.clear, "no tensors"),
    (WEIGHTS, lambda t: [t[n].zero_() for n in t if "lora_B" in n], "change nothing"),
    (WEIGHTS, lambda t: [t[n].zero_() for n in t if "lora_A" in n], "change nothing"),
]


@pytest.mark.parametrize(
    ("param", "spoil", "says"), TENSORS, ids=[f"{p[-30:]} {s}" for p, _, s in TENSORS]
)
def test_tensors_are_refused_by_name(
    plain: tuple[dict, Tensors], param: str, spoil: Callable[[Tensors], object], says: str
):
    config, tensors = plain
    spoil(tensors)
    assert says in refused(param, config, tensors)


def test_overflow_in_a_narrow_dtype_is_refused(plain: tuple[dict, Tensors]):
    config, tensors = plain
    tensors[A][0, 0] = 1e6
    pack(config, tensors, torch.bfloat16)
    assert "float16" in refused(A, config, tensors, dtype=torch.float16)
    tensors[A][0, 0] = 1.0
    refused(f"{Q0}.lora_B.weight", {**config, "lora_alpha": 1e30}, tensors, dtype=torch.float16)


def test_an_adapter_without_effect_is_refused(plain: tuple[dict, Tensors]):
    config, tensors = plain
    refused(WEIGHTS, {**config, "lora_alpha": 0}, tensors)
    refused(WEIGHTS, {**config, "lora_alpha": 1e-200}, tensors)


def test_a_rank_that_the_pattern_denies(plain: tuple[dict, Tensors]):
    config, tensors = plain
    refused(A, {**config, "rank_pattern": {"q_proj": 5}}, tensors)


# what comes beside A and B; that it is right is shown in test_fidelity.py ----------------------


class Base(BaseWeights):
    """BaseWeights with the values that are given, and ones elsewhere."""

    def __init__(self, dtype: torch.dtype, **weights: torch.Tensor) -> None:
        self.dtype = dtype
        self.weights = weights

    def weight(self, target: Target) -> torch.Tensor:
        found = self.weights.get(target.suffix)
        if found is None:
            found = torch.ones(target.out_features, target.in_features)
        return found.to(self.dtype)

    def bias(self, target: Target) -> torch.Tensor | None:
        return None

    def norm(self, norm: Norm) -> torch.Tensor:
        return torch.ones(norm.size, dtype=self.dtype)


def pack_on(base: Base, config: object, tensors: Tensors, table: TargetTable = TABLE):
    files = AdapterFiles(json.dumps(config).encode(), save(tensors))
    return pack_image(files, table, base.dtype, MAX_RANK, base)


def vector(image: AdapterImage, offset: int, size: int) -> torch.Tensor:
    words = size * 4 // image.data.element_size()
    return image.data[offset : offset + words].view(torch.float32)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture
def with_bias(plain: tuple[dict, Tensors]) -> tuple[dict, Tensors]:
    """An adapter with a bias on each B."""
    config, tensors = plain
    for name in [name for name in tensors if "lora_B" in name]:
        tensors[name.replace(".weight", ".bias")] = torch.randn(len(tensors[name]))
    return {**config, "lora_bias": True}, tensors


@DTYPES
def test_vectors_keep_their_bits(with_bias: tuple[dict, Tensors], dtype: torch.dtype):
    config, tensors = with_bias
    plain = pack_on(Base(dtype), {**config, "lora_bias": False}, _without(tensors, "bias"))
    image = pack_on(Base(dtype), config, tensors)
    target = TABLE.by_name["model.layers.0.self_attn.q_proj"]
    shift = vector(image, image.layout.shift_offset[target.slice], HIDDEN)
    assert torch.equal(shift, tensors[f"{Q0}.lora_B.bias"] * (config["lora_alpha"] / 4))
    assert torch.equal(image.data[: len(plain.data)], plain.data)
    assert not image.provisional and not image.layout.scale_offset
    assert plain.num_bytes + 4 * LAYERS * (HIDDEN + KV) <= image.num_bytes < plain.num_bytes + 2000


def _without(tensors: Tensors, part: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


HEAD = f"{P}lm_head.weight"
TIED = replace(TABLE, tied=True)


@DTYPES
def test_only_rows_that_differ_are_kept(plain: tuple[dict, Tensors], dtype: torch.dtype):
    config, tensors = plain
    config["modules_to_save"] = ["lm_head"]
    own = torch.randn(VOCAB, HIDDEN)
    base = Base(dtype, lm_head=own)
    tensors[HEAD] = own.clone()
    assert not pack_on(base, config, tensors).layout.has_extras
    tensors[HEAD][[3, 60]] += 1
    image = pack_on(base, config, tensors)
    start, at, num = image.layout.head_rows
    words = num * 4 // dtype.itemsize
    assert image.data[at : at + words].view(torch.int32).tolist() == [3, 60]
    rows = image.data[start : start + num * HIDDEN].view(num, HIDDEN)
    assert torch.equal(rows, tensors[HEAD][[3, 60]].to(dtype))
    tensors[HEAD] = own + 1
    assert pack_on(base, config, tensors).layout.head_rows[1:] == (-1, VOCAB)


def test_saved_modules_that_the_base_lacks_are_ignored(plain: tuple[dict, Tensors]):
    """As PEFT does, unless the file has something for them."""
    config, tensors = plain
    image = pack(config, tensors)
    config["modules_to_save"] = ["classifier", "score"]
    assert torch.equal(pack(config, tensors).data, image.data)
    tensors[f"{P}score.weight"] = torch.ones(2, HIDDEN)
    refused(f"{P}score.weight", config, tensors)


def test_rows_of_tied_weights_are_there_once(plain: tuple[dict, Tensors]):
    config, tensors = plain
    config["trainable_token_indices"] = [9, 4]
    tensors[DELTA] = torch.randn(2, HIDDEN)
    image = pack_on(Base(torch.float32), config, tensors, TIED)
    assert image.layout.head_rows == image.layout.embedding_rows
    start, _, num = image.layout.head_rows
    rows = image.data[start : start + num * HIDDEN].view(num, HIDDEN)
    assert torch.equal(rows, tensors[DELTA].flip(0)), "in the order of ids"
    assert not pack_on(Base(torch.float32), config, tensors).layout.head_rows


def test_what_the_base_has_too_is_no_change(plain: tuple[dict, Tensors]):
    config, tensors = plain
    base = Base(torch.float32)
    for name in [name for name in tensors if "lora_B" in name]:
        tensors[name].zero_()
        length = torch.full((len(tensors[name]),), HIDDEN**0.5)
        tensors[name.replace(".lora_B.weight", ".lora_magnitude_vector")] = length
    tensors |= {f"{P}model.norm.weight": torch.ones(HIDDEN), HEAD: torch.ones(VOCAB, HIDDEN)}
    config |= {"use_dora": True, "modules_to_save": ["lm_head", "norm"]}
    with pytest.raises(AdapterInvalid, match="change nothing"):
        pack_on(base, config, tensors)
    tensors[f"{P}model.norm.weight"][0] = 2
    assert pack_on(base, config, tensors).targets == ("q_proj", "v_proj", "lm_head", "norm")


def test_without_a_base_the_image_is_provisional(plain: tuple[dict, Tensors]):
    config, tensors = plain
    assert not pack(config, tensors).provisional
    config["modules_to_save"] = ["lm_head"]
    tensors[HEAD] = torch.ones(VOCAB, HIDDEN)
    image = pack(config, tensors)
    assert image.provisional
    assert image.num_bytes >= pack_on(Base(torch.float32), config, tensors).num_bytes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
@pytest.mark.parametrize("part", ["bias", HEAD, f"{P}model.norm.weight", DELTA])
def test_values_that_are_no_numbers_are_refused(
    with_bias: tuple[dict, Tensors], part: str, value: float
):
    config, tensors = with_bias
    config |= {"modules_to_save": ["lm_head", "norm"], "trainable_token_indices": [1]}
    tensors |= {
        HEAD: torch.ones(VOCAB, HIDDEN),
        f"{P}model.norm.weight": torch.ones(HIDDEN),
        DELTA: torch.zeros(1, HIDDEN),
    }
    name = f"{Q0}.lora_B.bias" if part == "bias" else part
    tensors[name].view(-1)[5] = value
    if part == "bias" and value == 1e6:
        assert pack(config, tensors, torch.float16), "fp32, whatever the serving dtype"
    else:
        refused(name, config, tensors, dtype=torch.float16)


def test_rows_of_no_length_have_no_direction(plain: tuple[dict, Tensors]):
    config, tensors = plain
    config["use_dora"] = True
    for name in [name for name in tensors if "lora_B" in name]:
        magnitude = torch.ones(len(tensors[name]))
        tensors[name.replace(".lora_B.weight", ".lora_magnitude_vector")] = magnitude
    tensors[f"{Q0}.lora_B.weight"][7] = 0
    base = Base(torch.float32, q_proj=torch.zeros(HIDDEN, HIDDEN))
    with pytest.raises(AdapterInvalid, match="zero") as caught:
        pack_on(base, config, tensors)
    assert caught.value.param == f"{Q0}.lora_magnitude_vector"


def test_tensors_of_tied_weights_that_differ_are_refused(plain: tuple[dict, Tensors]):
    config, tensors = plain
    embedding = f"{P}model.embed_tokens.weight"
    tensors |= {HEAD: torch.ones(VOCAB, HIDDEN), embedding: torch.zeros(VOCAB, HIDDEN)}
    base = Base(torch.float32)
    assert pack_on(base, config, tensors)
    for options, param in (
        ({}, HEAD),
        ({"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"]}, "ensure_weight_tying"),
    ):
        with pytest.raises(AdapterInvalid) as caught:
            pack_on(base, config | options, tensors, TIED)
        assert caught.value.param == param


# files ----------------------------------------------------------------------------------------


def copy(saved: Path, folder: Path) -> Path:
    for name in (CONFIG, WEIGHTS):
        (folder / name).write_bytes((saved / name).read_bytes())
    return folder


def load(folder: Path, **options) -> AdapterImage:
    return load_image(folder, TABLE, torch.float32, MAX_RANK, **options)


def test_digest_tells_contents_apart(saved: Path, tmp_path: Path):
    digest = load(saved).digest
    folder = copy(saved, tmp_path)
    assert load(folder).digest == digest == load(folder, expect_digest=digest).digest
    assert re.fullmatch(r"[0-9a-f]{64}", digest)
    (folder / CONFIG).write_bytes((folder / CONFIG).read_bytes() + b" ")
    assert load(folder).digest != digest
    with pytest.raises(AdapterUnavailable, match="changed on disk"):
        load(folder, expect_digest=digest)
    assert AdapterFiles(b"ab", b"c").digest != AdapterFiles(b"a", b"bc").digest


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_missing_files_are_named(saved: Path, tmp_path: Path, name: str):
    (copy(saved, tmp_path) / name).unlink()
    with pytest.raises(AdapterNotFound, match=name) as caught:
        load(tmp_path)
    assert caught.value.param == name
    (tmp_path / name).mkdir()
    with pytest.raises(AdapterInvalid, match=f"{name}: it is no regular file"):
        load(tmp_path)


@pytest.mark.parametrize("path", ["none", "a\0b", "x" * 300, f"{CONFIG}/x"])
def test_missing_folder(tmp_path: Path, path: str):
    (tmp_path / CONFIG).touch()
    with pytest.raises(AdapterNotFound):
        load(tmp_path / path)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "weights.pkl"])
def test_pickles_are_refused(saved: Path, tmp_path: Path, name: str):
    (copy(saved, tmp_path) / WEIGHTS).rename(tmp_path / name)
    with pytest.raises(AdapterInvalid, match="safetensors") as caught:
        load(tmp_path)
    assert caught.value.param == name


def test_files_of_mlx_are_refused(saved: Path, tmp_path: Path):
    (copy(saved, tmp_path) / WEIGHTS).rename(tmp_path / "adapters.safetensors")
    with pytest.raises(AdapterInvalid, match="mlx_lm") as caught:
        load(tmp_path)
    assert caught.value.param == "adapters.safetensors"


def test_weights_of_another_name_are_refused(saved: Path, tmp_path: Path):
    (copy(saved, tmp_path) / WEIGHTS).rename(tmp_path / "model.safetensors")
    with pytest.raises(AdapterInvalid, match=WEIGHTS) as caught:
        load(tmp_path)
    assert caught.value.param == "model.safetensors"


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_enormous_files_are_not_read(saved: Path, tmp_path: Path, name: str):
    with (copy(saved, tmp_path) / name).open("r+b") as file:
        file.truncate(1 << 40 if name == CONFIG else 1 << 28)
    with pytest.raises(AdapterInvalid) as caught:
        load(tmp_path)
    assert caught.value.param == name


def with_header(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: list[int]) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


MALFORMED = {
    "empty": b"",
    "short": b"\1\0",
    "no header": (0).to_bytes(8, "little"),
    "header beyond the end": with_header(b"{}", length=1 << 62),
    "header too large": with_header(b"{}", b"\0" * (17 << 20), length=16 << 20 | 1),
    "not JSON": with_header(b"{x}"),
    "not an object": with_header([]),
    "not UTF-8": with_header(b'{"\xff": 1}'),
    "deep": with_header(b'{"a":' * 100_000),
    "name twice": with_header(b'{"a": 1, "a": 2}'),
    "overlap": with_header({A: entry(0, 8, [2]), B: entry(4, 12, [2])}, b"\0" * 12),
    "hole": with_header({A: entry(0, 4, [1]), B: entry(8, 12, [1])}, b"\0" * 12),
    "beyond the end": with_header({A: entry(0, 1 << 40, [1 << 38])}, b"\0" * 12),
    "negative": with_header({A: entry(-4, 4, [2])}, b"\0" * 12),
    "shape and size differ": with_header({A: entry(0, 8, [3])}, b"\0" * 8),
    "shape overflows": with_header({A: entry(0, 8, [1 << 62, 1 << 62])}, b"\0" * 8),
    "huge and empty": with_header({A: entry(0, 0, [1 << 62, 0])}),
    "unknown dtype": with_header({A: {**entry(0, 4, [1]), "dtype": "Q4"}}, b"\0" * 4),
    "left over": with_header({A: entry(0, 4, [1])}, b"\0" * 8),
}


def test_what_is_known_of_a_header_says_nothing_of_the_data(plain: tuple[dict, Tensors]):
    config, tensors = plain
    first, again = pack(config, tensors), pack(config, {n: 3 * t for n, t in tensors.items()})
    assert first.layout == again.layout and not torch.equal(first.data, again.data)
    weights = save(tensors)
    for changed in (weights[:-4], weights + b"\0" * 4):
        with pytest.raises(AdapterInvalid, match="malformed"):
            pack(config, changed)
    with pytest.raises(AdapterInvalid, match="NaN"):
        pack(config, {n: t * float("nan") for n, t in tensors.items()})
    smaller = replace(TABLE, groups=(*TABLE.groups[:5], TABLE.groups[-1]))
    with pytest.raises(AdapterInvalid, match="which has 1 layers"):
        files = AdapterFiles(json.dumps(config).encode(), weights)
        pack_image(files, smaller, torch.float32, MAX_RANK)


@pytest.mark.parametrize("weights", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_weights(plain: tuple[dict, Tensors], weights: bytes):
    with pytest.raises(AdapterInvalid) as caught:
        pack(plain[0], weights)
    assert caught.value.param in (WEIGHTS, A)


MUTATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), st.floats(0, 1), st.integers(0, 0)),
        st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
        st.tuples(st.just("flip in header"), st.floats(0, 1), st.integers(1, 255)),
        st.tuples(st.just("insert"), st.floats(0, 1), st.integers(0, 255)),
        st.tuples(st.just("extend"), st.floats(0, 1), st.integers(0, 255)),
    ),
    min_size=1,
    max_size=4,
)


def mutate(content: bytes, mutations: list[tuple[str, float, int]], header: int) -> bytes:
    for kind, where, byte in mutations:
        span = min(header, len(content)) if kind == "flip in header" else len(content)
        at = min(int(where * span), max(0, len(content) - 1))
        if kind == "cut":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + bytes([byte]) + content[at:]
        elif kind == "extend":
            content += bytes([byte]) * (1 + int(where * 100))
        elif content:
            content = content[:at] + bytes([content[at] ^ byte]) + content[at + 1 :]
    return content


@settings(max_examples=80, deadline=None)
@given(mutations=MUTATIONS, of_config=st.booleans())
def test_mutated_files_raise_nothing_else(saved: Path, mutations, of_config: bool):
    config, weights = (saved / CONFIG).read_bytes(), (saved / WEIGHTS).read_bytes()
    if of_config:
        config = mutate(config, mutations, len(config))
    else:
        header = 8 + int.from_bytes(weights[:8], "little")
        weights = mutate(weights, mutations, header)
    try:
        pack(config, weights)
    except AdapterError as error:
        assert error.param is not None
        assert error.message.encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), value=JSON)
def test_any_value_in_any_field_raises_nothing_else(saved: Path, data: st.DataObject, value):
    config = json.loads((saved / CONFIG).read_text())
    config[data.draw(st.sampled_from(sorted(config)))] = value
    try:
        pack(config, (saved / WEIGHTS).read_bytes())
    except AdapterError as error:
        assert error.param is not None


# patterns -------------------------------------------------------------------------------------

PIECES = ["a", "b", ".", r"\.", r"\d", "1", "(", "(?:", ")", "|", "*", "+", "?", "{1,2}", "{2}"]
PIECES += ["{,1}", "[ab]", "[^a]", "[", "]", "^", "$", r"\b", r"\w", "-", "}"]


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=9), name=st.text("ab1._", max_size=8))
def test_patterns_mean_the_same_as_in_re(pieces: list[str], name: str):
    source = "".join(pieces)
    try:
        pattern = compile_pattern(source, Work("field"))
    except PatternError:
        return
    assert pattern.fullmatch(name) == (re.fullmatch(source, name) is not None)
    expected = re.match(rf"(.*\.)?({source})$", name) is not None
    assert pattern.matches_module(name) == expected


@pytest.mark.parametrize("source", ["q_proj", r"model\.layers\.(0|1)\..*", "^model.*(q|v)_proj$"])
def test_common_patterns_compile(source: str):
    assert compile_pattern(source, Work("field")).matches_module("model.layers.1.self_attn.q_proj")


@pytest.mark.parametrize("source", ["(a+)+b", "(a|a)*b", "(.*)*b", "(((a*)*)*)*b", "(.|.)*b"])
def test_no_pattern_takes_long(source: str):
    start = time.process_time()
    try:
        assert not compile_pattern(source, Work("field", 0.1)).matches_module("a" * 60)
    except AdapterInvalid as error:
        assert error.param == "field"
    assert time.process_time() - start < 5


def test_first_hit_wins(plain: tuple[dict, Tensors], tmp_path: Path):
    config, tensors = plain
    config["alpha_pattern"] = {"q_proj": 2, "layers.0.self_attn.q_proj": 100, ".*": 8}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(config))
    image = load(tmp_path)
    expected = (tensors[B] @ tensors[A]).double() * (2 / 4)
    actual = delta(image, "model.layers.0.self_attn.q_proj")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
