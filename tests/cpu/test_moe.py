"""Mixtures of experts: their kernels, their checkpoints, and adapters of routers and experts.

How the base models compute is in test_models.py, and that adapters answer as peft's do in
test_fidelity.py.
"""

from __future__ import annotations

import itertools
import json
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_adapters import EXPERT_ADAPTERS, EXPERTS, save_single, write_adapter
from load_image import load_image
from lora_pools import batch_of, random_pool
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tables import build_table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Lfm2MoeConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from weft import LLM, SamplingParams
from weft.checkpoint.pack import AdapterImage
from weft.core.errors import AdapterInvalid, AdapterQuarantined, ConfigError
from weft.core.targets import ImageLayout, TargetTable, aligned, layout_of
from weft.kernels.lora import AdapterPool, LoraBackend, make_backend
from weft.kernels.lora.oracle import ImageStep
from weft.llm import RequestOutput
from weft.models.blueprint import target_table
from weft.models.config import load_model_config
from weft.models.loading import load_weights
from weft.models.moe import check_width, route
from weft.worker.compared import ComparedStep

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 37, 20
TABLE: TargetTable = build_table(
    [
        ("linear", HIDDEN, [("router", NUM_EXPERTS)]),
        ("experts", HIDDEN, [("gate", INNER), ("up", INNER)]),
        ("experts", HIDDEN, [("gate_up", 2 * INNER)]),
        ("experts", INNER, [("down", HIDDEN)]),
    ],
    num_experts=NUM_EXPERTS,
)
RANKS = ((1, 3, 4, 0, 5), (0, 0, 0, 17, 16), (2, 8, 0, 0, 0))


def matrix(pool: AdapterPool, start: int, expert: int, rows: int, columns: int) -> Tensor:
    """Where the layout's definition says that an expert's matrix is, as float64."""
    start += expert * aligned(rows * columns)
    return pool.arena[start : start + rows * columns].view(rows, columns).double()


def expected_row(
    pool: AdapterPool, start: int, layout: ImageLayout, group: int, expert: int, x_I: Tensor
) -> Tensor:
    """B A x of one adapter, float64."""
    g = TABLE.groups[group]
    out = torch.zeros(g.out_features, dtype=torch.float64)
    total = sum(layout.rank[s.slice] for s in g.slices)
    done = 0
    for s in g.slices:
        rank = layout.rank[s.slice]
        if not rank:
            continue
        a = matrix(pool, start + layout.a_offset[group], expert, total, g.in_features)
        b = matrix(pool, start + layout.b_offset[s.slice], expert, s.out_features, rank)
        out[s.offset : s.offset + s.out_features] = b @ a[done : done + rank] @ x_I.double()
        done += rank
    return out


def check_added(
    pool: AdapterPool,
    group: int,
    owners: list[tuple[int, int]],
    x: Tensor,
    before: Tensor,
    y: Tensor,
) -> None:
    """y is `before` and what the adapter and expert that own each row, -1 for none, add to it."""
    layouts = [layout_of(TABLE, ranks) for ranks in RANKS]
    starts = [0, *itertools.accumulate(layout.num_elements for layout in layouts)]
    for p, (slot, expert) in enumerate(owners):
        if min(slot, expert) < 0:
            assert torch.equal(y[p], before[p]), "a row that no adapter changes was touched"
            continue
        delta = expected_row(pool, starts[slot], layouts[slot], group, expert, x[p])
        torch.testing.assert_close(y[p].double(), before[p] + delta, atol=1e-4, rtol=1e-5)


def triton_backend(pool: AdapterPool) -> LoraBackend:
    """With little to do for Triton's interpreter."""
    pytest.importorskip("triton")
    from weft.kernels.lora.triton import TritonBackend, Tuning
    from weft.kernels.tuned import Blocks

    blocks = Blocks(shrink_programs=4, columns=64, expand_programs=6)
    return TritonBackend(pool, Tuning(part=64, blocks=blocks))


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("first", [None, 1], ids=["all", "some"])
@pytest.mark.parametrize("counts", [(2, 3, 1, 4), (0, 1, 0, 0), (3, 5, 40, 0)], ids=str)
def test_experts_add_what_their_adapters_say(
    backend: str, counts: tuple[int, ...], first: int | None
) -> None:
    """Rows of the base, then of slots 0, 1 and 2. With `first`, experts of a lower number are
    elsewhere, and add nothing."""
    pool = random_pool(TABLE, RANKS)
    slots = [slot for slot, count in zip((-1, 0, 1, 2), counts, strict=True) for _ in range(count)]
    made = triton_backend(pool) if backend == "triton" else make_backend(backend, pool)
    step = made.begin(batch_of(slots))
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand((len(slots), NUM_EXPERTS - 1), generator=generator)
    expert_TK = scores.topk(TOP_K).indices - (first or 0)
    routing = route(expert_TK, NUM_EXPERTS, some=first is not None)
    token_P = routing.order_P // TOP_K
    experts = step.experts(token_P, routing.expert_P)
    of_tokens = [slots[token] for token in token_P.tolist()]
    owners = list(zip(of_tokens, routing.expert_P.tolist(), strict=True))
    for group in TABLE.groups[1:]:
        x = torch.randn((len(token_P), group.in_features), generator=generator)
        y = torch.randn((len(token_P), group.out_features), generator=generator)
        before = y.clone()
        experts.linear(y, x, group.index)
        check_added(pool, group.index, owners, x, before, y)


@pytest.mark.parametrize("first", [0, 2], ids=["all", "some"])
@pytest.mark.parametrize("slots", [[1], [-1, 0, 0, 2, 2, 1]], ids=["one row", "rows"])
def test_adapters_add_to_pairs_as_they_come(slots: list[int], first: int) -> None:
    """With `first`, the other experts are elsewhere, and add nothing."""
    pool = random_pool(TABLE, RANKS)
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand((len(slots), NUM_EXPERTS + 1), generator=generator)
    expert_TK = scores.topk(TOP_K).indices - first
    step = triton_backend(pool).begin(batch_of(slots)).pairs(expert_TK, NUM_EXPERTS - 1)
    assert step is not None
    here = [e if e < NUM_EXPERTS - 1 else -1 for e in expert_TK.flatten().tolist()]
    owners = [(slots[p // TOP_K], expert) for p, expert in enumerate(here)]
    for group in TABLE.groups[1:]:
        x = torch.randn((expert_TK.numel(), group.in_features), generator=generator)
        y = torch.randn((expert_TK.numel(), group.out_features), generator=generator)
        before = y.clone()
        step.linear(y, x, group.index)
        check_added(pool, group.index, owners, x, before, y)


@pytest.mark.parametrize("is_wrong", [False, True], ids=["right", "wrong"])
def test_the_check_of_adapters_compares_pairs(is_wrong: bool) -> None:
    """Two rows of the base, and two of an adapter; the last expert is elsewhere."""
    pool, layout = random_pool(TABLE, RANKS[:1]), layout_of(TABLE, RANKS[0])
    image = pool.arena.clone()
    served = triton_backend(pool).begin(batch_of([-1, -1, 0, 0]))
    compared = ComparedStep(served, ImageStep(TABLE, layout, image, 2, 2, 4), pool, 4)
    expert_TK = torch.tensor([[0, 1], [2, 4], [3, 0], [4, 1]])
    pairs = compared.pairs(expert_TK, NUM_EXPERTS - 1)
    assert pairs is not None
    if is_wrong:
        pool.arena.mul_(1.1)
    for group in TABLE.groups[1:]:
        x = torch.randn((8, group.in_features), generator=torch.Generator().manual_seed(0))
        pairs.linear(torch.zeros(8, group.out_features), x, group.index)
    expected: AbstractContextManager[object] = nullcontext()
    if is_wrong:
        expected = pytest.raises(AdapterQuarantined, match="gate, up was off by")
    with expected:
        compared.check()


def test_routing_orders_pairs_by_expert_then_by_token() -> None:
    expert_TK = torch.tensor([[3, 0], [0, 4], [3, 4], [0, 3]])
    routing = route(expert_TK, 6)
    assert routing.expert_P.tolist() == [0, 0, 0, 3, 3, 3, 4, 4]
    assert (routing.order_P // 2).tolist() == [0, 1, 3, 0, 2, 3, 1, 2]
    assert routing.order_P[routing.place_P].tolist() == list(range(8))
    assert routing.ends_E.tolist() == [3, 3, 3, 6, 8, 8]


def test_pairs_whose_expert_is_elsewhere_come_last() -> None:
    expert_TK = torch.tensor([[3, 0], [0, 4], [3, 5], [1, 3]])
    routing = route(expert_TK - 3, 2, some=True)
    assert routing.expert_P.tolist() == [0, 0, 0, 1, -1, -1, -1, -1]
    assert (routing.order_P // 2).tolist() == [0, 2, 3, 1, 0, 1, 2, 3]
    assert routing.order_P[routing.place_P].tolist() == list(range(8))
    assert routing.ends_E.tolist() == [3, 4]


# -- whole models ----------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    # The first layer is dense.
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    # The first layer is dense.
    "glm4-moe": Glm4MoeConfig(
        **SIZES,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}
LFM2 = Lfm2MoeConfig(
    **SIZES,
    layer_types=["conv", "full_attention", "full_attention"],
    num_dense_layers=1,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
)
FAMILIES = pytest.mark.parametrize("family", CONFIGS, scope="module")
PROMPTS = [[3, 17, 41, 9, 60, 22, 5], list(range(8, 40)), [33]]
FIRST = SamplingParams(max_tokens=16, temperature=0.0, logprobs=20, ignore_eos=True)


def save_adapter(base: Path, folder: Path, settings: dict[str, Any]) -> None:
    """An adapter with random weights, as PEFT saves it."""
    torch.manual_seed(len(folder.name))
    model = AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings(action="ignore"):
        config = LoraConfig(task_type="CAUSAL_LM", **{"lora_alpha": 8, **settings})
        adapted = get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.15)
        adapted.save_pretrained(folder)


@torch.no_grad()
def logits_of(model: PreTrainedModel | PeftModel, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@dataclass
class World:
    """A base, its adapters, and models by the name of an adapter; None: the base alone."""

    base: Path
    adapters: dict[str, Path]
    models: dict[str | None, PreTrainedModel | PeftModel]

    def check(self, name: str | None, output: RequestOutput) -> None:
        """The log-probabilities of the first token, and that each token is PEFT's choice."""
        assert output.logprobs is not None and len(output.token_ids) == FIRST.max_tokens
        ids = output.prompt_token_ids + output.token_ids
        logits = logits_of(self.models[name], ids)[len(output.prompt_token_ids) - 1 : -1]
        first = logits[0].log_softmax(0)
        for token, value in output.logprobs[0].top:
            assert value == pytest.approx(float(first[token]), abs=1e-3)
        assert output.token_ids == logits.argmax(1).tolist()
        if name is not None:
            base = logits_of(self.models[None], ids)[len(output.prompt_token_ids) - 1]
            assert (base - logits[0]).abs().max() > 0.05


@pytest.fixture(scope="module")
def world(family: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp(family)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(root / "base")
    for name, settings in EXPERT_ADAPTERS.items():
        save_adapter(root / "base", root / name, settings)
    save_single(root / "base", root / "single", family)
    adapters = {name: root / name for name in [*EXPERT_ADAPTERS, "single"]}
    models: dict[str | None, Any] = {None: AutoModelForCausalLM.from_pretrained(root / "base")}
    return World(root / "base", adapters, models)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture
def base(family: str, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(folder: Path, quantization: Any = None) -> list[Tensor]:
    config = load_model_config(folder)
    weights = load_weights(folder, config, torch.float32, "cpu", quantization)
    return [weights.dense(f"1.{key}") for key in ("router", "experts_gate_up", "experts_down")]


@FAMILIES
def test_stacked_experts_load_as_single_ones_do(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = load_file(tmp_path / "stacked" / "model.safetensors")
    assert names["model.layers.1.mlp.experts.gate_up_proj"].dim() == 3
    mlp = model.model.layers[1].mlp
    expected = [mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj]
    for folder in (base, tmp_path / "stacked"):
        for ours, theirs in zip(load(folder), expected, strict=True):
            assert torch.equal(ours, theirs)


def change_weights(folder: Path, name: str, value: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if value is None else {name: value}), folder / "model.safetensors")


@pytest.mark.parametrize("family", ["mixtral"])
def test_experts_that_do_not_fit_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    change_weights(base, name, torch.zeros(24, 31))
    with pytest.raises(ConfigError, match=r"experts\.2\.w3\.weight has shape \(24, 31\)"):
        load(base)
    change_weights(base, name, None)
    with pytest.raises(ConfigError, match=r"lacks model.*experts\.2\.w3\.weight"):
        load(base)


@pytest.mark.parametrize(
    ("family", "changes", "param"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
        ("mixtral", {"model_type": "mistral"}, "model_type"),
    ],
)
def test_configurations_that_would_be_wrong_are_refused(
    base: Path, changes: dict[str, Any], param: str
) -> None:
    edit_config(base, **changes)
    with pytest.raises(ConfigError) as caught:
        load_model_config(base)
    assert caught.value.param == param


def test_experts_that_a_gpu_cannot_read_are_refused() -> None:
    with FakeTensorMode():
        for dtype, width in ((torch.float32, 20), (torch.bfloat16, 24)):
            check_width(torch.empty(4, 8, width, dtype=dtype, device="cuda"))
        check_width(torch.empty(4, 8, 20, dtype=torch.bfloat16))
        with pytest.raises(ConfigError, match="a multiple of 8") as caught:
            check_width(torch.empty(4, 8, 20, dtype=torch.bfloat16, device="cuda"))
    assert caught.value.param == "moe_intermediate_size"


@FAMILIES
def test_quantized_experts_are_refused(base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(base, "fp8")
    assert caught.value.param == "quantization"


# -- adapters --------------------------------------------------------------------------------------


def read(world: World, folder: Path) -> AdapterImage:
    table = target_table(load_model_config(world.base))
    return load_image(folder, table, torch.float32, 256)


@FAMILIES
def test_images_hold_what_files_hold(world: World) -> None:
    """Nothing is there twice; what lies between matrices is zero."""
    for name, folder in world.adapters.items():
        numbers = sum(t.numel() for t in load_file(folder / "adapter_model.safetensors").values())
        image = read(world, folder)
        assert image.data.count_nonzero() == numbers, name


def test_single_experts_and_routers_of_lfm2(tmp_path: Path) -> None:
    """Their names lie in `feed_forward`. As if their deltas were in the base's weights."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LFM2)
    model.save_pretrained(tmp_path / "base")
    save_single(tmp_path / "base", tmp_path / "single", "lfm2-moe")
    stored = load_file(tmp_path / "single" / "adapter_model.safetensors")
    for name in [name for name in stored if name.endswith("lora_A.weight")]:
        delta = 3 * stored[name.replace("lora_A", "lora_B")] @ stored[name]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        place, is_expert, one = module.partition(".experts.")
        if not is_expert:
            model.get_submodule(module).weight.data += delta
            continue
        experts, (number, projection) = model.get_submodule(place).experts, one.split(".")
        gate_up = experts.gate_up_proj.data[int(number)].chunk(2)
        views = {"w1": gate_up[0], "w3": gate_up[1], "w2": experts.down_proj.data[int(number)]}
        views[projection] += delta
    options = {"num_blocks": 64, "num_threads": 1, "skip_tokenizer_init": True}
    adapters = {"single": tmp_path / "single"}
    with LLM(tmp_path / "base", adapters, device="cpu", **options) as llm:
        (output,) = llm.generate(PROMPTS[0], FIRST, "single")
    World(tmp_path, {}, {None: model}).check(None, output)


@pytest.mark.parametrize("family", ["glm4-moe"], scope="module")
def test_a_router_in_float32_with_16_bits_around_it(world: World) -> None:
    """An adapter of nothing else changes what it does in float32, beside one that has no part in it
    and the base."""
    names = [None, "attention", "router"]
    adapters = {name: world.adapters[name] for name in names if name is not None}
    options = {"num_blocks": 64, "num_threads": 1, "skip_tokenizer_init": True}
    found: list[list[dict[int, float]]] = []
    for dtype in ("float32", "bfloat16"):
        with LLM(world.base, adapters, device="cpu", dtype=dtype, **options) as llm:
            outputs = llm.generate([PROMPTS[0]] * 3, FIRST, names)
        found.append([dict(output.logprobs[0].top) for output in outputs if output.logprobs])
    for exact, rounded in zip(*found, strict=True):
        assert max(abs(rounded[t] - exact[t]) for t in exact.keys() & rounded.keys()) < 0.1
    base, _, router = found[1]
    assert max(abs(router[t] - base[t]) for t in base.keys() & router.keys()) > 0.5


@FAMILIES
def test_some_experts_of_several_ranks(world: World, family: str, tmp_path: Path) -> None:
    """As if their deltas were in the base's weights."""
    moe = load_model_config(world.base).moe
    assert moe is not None
    mlp, gate, _, down = moe.names
    model = AutoModelForCausalLM.from_pretrained(world.base)
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for expert, projection, rank, scale in ((3, gate, 2, 1.5), (1, gate, 3, 2), (3, down, 3, 2)):
        experts = model.model.layers[1].mlp.experts
        if projection == down:
            weight = experts.down_proj.data[expert]
        else:
            weight, _ = experts.gate_up_proj.data[expert].chunk(2)
        a = torch.randn((rank, weight.shape[1]), generator=generator)
        b = torch.randn((weight.shape[0], rank), generator=generator)
        weight += scale * b @ a
        module = f"base_model.model.model.layers.1.{mlp}.experts.{expert}.{projection}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    write_adapter(
        tmp_path / "some",
        tensors,
        r=3,
        lora_alpha=6,
        target_modules=[gate, down],
        rank_pattern={f"3.{gate}": 2},
        alpha_pattern={f"experts.3.{gate}": 3},
    )
    options = {"num_blocks": 64, "num_threads": 1, "skip_tokenizer_init": True}
    with LLM(world.base, {"some": tmp_path / "some"}, device="cpu", **options) as llm:
        (output,) = llm.generate(PROMPTS[0], FIRST, "some")
    world.models["some"] = model
    world.check("some", output)
    del world.models["some"]


GOOD = {"r": 2, "target_modules": [], "target_parameters": EXPERTS}
LAYER = "base_model.model.model.layers.1.mlp."
GATE_UP = {"target_parameters": EXPERTS[:1]}
SINGLE = {"experts.lora": "experts.3.up_proj.lora", "experts.base_layer.": "experts."}


@pytest.mark.parametrize(
    ("settings", "rename", "param"),
    [
        # the config does not say that experts are adapted, or only one of the two, or a third
        ({"target_parameters": None}, {}, LAYER + "experts"),
        ({"target_parameters": EXPERTS[:1]}, {}, LAYER + "experts.base_layer"),
        ({"target_parameters": [*EXPERTS, "mlp.gate.weight"]}, {}, "target_parameters"),
        ({"target_parameters": "mlp.experts.down_proj"}, {}, "target_parameters"),
        ({"r": 3}, {}, LAYER + "experts"),
        ({"rank_pattern": {"experts.down_proj": 1}}, {}, LAYER + "experts.lora"),
        # what is there is not what it should be
        ({}, {"experts.base_layer.": None}, "target_parameters"),
        ({}, {"experts.lora_A": None}, LAYER + "experts.lora_B.weight"),
        ({}, {"experts.lora_B": "experts.lora_magnitude_vector"}, LAYER + "experts.lora_magn"),
        (GATE_UP, SINGLE | {"3.up_proj": "3.w9"}, LAYER + "experts.3.w9.lora"),
        (GATE_UP, SINGLE | {"3.up_proj": "6.up_proj"}, LAYER + "experts.6.up_proj.lora"),
        (GATE_UP, SINGLE, LAYER + "experts.3.up_proj.lora"),
        # the layer is dense, or not there
        ({}, {"layers.1.": "layers.0."}, LAYER.replace("1", "0") + "experts"),
        ({}, {"layers.1.": "layers.9."}, LAYER.replace("1", "9") + "experts"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3-moe"], scope="module")
def test_adapters_of_experts_are_refused_by_name(
    world: World,
    settings: dict[str, Any],
    rename: dict[str, str | None],
    param: str,
    tmp_path: Path,
) -> None:
    """From an adapter of the experts of layer 1, changed."""
    tensors = {
        f"{LAYER}experts.base_layer.lora_A.weight": torch.ones(12, 32),
        f"{LAYER}experts.base_layer.lora_B.weight": torch.ones(40, 12),
        f"{LAYER}experts.lora_A.weight": torch.ones(12, 20),
        f"{LAYER}experts.lora_B.weight": torch.ones(32, 12),
    }
    write_adapter(tmp_path / "good", tensors, **GOOD)
    read(world, tmp_path / "good")
    for old, new in rename.items():
        found = {name: name.replace(old, new or "") for name in tensors if old in name}
        for name, renamed in found.items():
            tensor = tensors.pop(name)
            if new is not None:
                tensors[renamed] = tensor
    write_adapter(tmp_path / "bad", tensors, **GOOD | settings)
    with pytest.raises(AdapterInvalid) as caught:
        read(world, tmp_path / "bad")
    assert str(caught.value.param).startswith(param)


@pytest.mark.parametrize("family", ["mixtral"], scope="module")
def test_one_matrix_in_two_forms_is_refused(world: World, tmp_path: Path) -> None:
    tensors = {
        f"{LAYER}{name}.lora_{part}.weight": torch.ones(shape)
        for name in ("gate", "experts.0.w1", "experts.0.gate_proj")
        for part, shape in (("A", (2, 32)), ("B", (4 if name == "gate" else 24, 2)))
    }
    fields = {"r": 2, "target_modules": ["gate", "w1", "gate_proj"]}
    write_adapter(tmp_path / "twice", tensors, **fields)
    with pytest.raises(AdapterInvalid, match="occurs twice") as caught:
        read(world, tmp_path / "twice")
    assert str(caught.value.param).startswith(LAYER + "experts.0.")


@pytest.mark.parametrize("family", ["mixtral"], scope="module")
def test_experts_that_the_config_selects_are_in_the_file(world: World, tmp_path: Path) -> None:
    name = LAYER.replace("mlp.", "self_attn.q_proj.lora_")
    tensors = {f"{name}A.weight": torch.ones(2, 32), f"{name}B.weight": torch.ones(32, 2)}
    for projection in ("w1", "gate_proj"):
        fields = {"r": 2, "target_modules": ["q_proj", projection]}
        write_adapter(tmp_path / projection, tensors, **fields)
        with pytest.raises(AdapterInvalid, match=f'no tensor of the file is for "{projection}"'):
            read(world, tmp_path / projection)
        without = tmp_path / f"without {projection}"
        write_adapter(without, tensors, **fields, exclude_modules=r".*\.mlp\..*")
        read(world, without)


@pytest.mark.parametrize("rank", [2, 20])
def test_few_experts_that_would_take_the_room_of_all(rank: int, tmp_path: Path) -> None:
    """Before anything of that size is allocated."""
    table = build_table(
        [
            ("embedding", 32, [("model.embed_tokens", 8)]),
            ("experts", 8, [("model.layers.0.mlp.experts.gate_proj", 8)]),
            ("head", 8, [("lm_head", 32)]),
        ],
        num_experts=200,
    )
    tensors: dict[str, Tensor] = {}
    for expert, r in ((0, rank), (1, 1), (2, 1)):
        module = f"base_model.model.model.layers.0.mlp.experts.{expert}.gate_proj"
        tensors[f"{module}.lora_A.weight"] = torch.ones(r, 8)
        tensors[f"{module}.lora_B.weight"] = torch.ones(8, r)
    patterns = {"0.gate_proj": rank}
    fields = {"r": 1, "target_modules": ["gate_proj"], "rank_pattern": patterns}
    write_adapter(tmp_path / "few", tensors, **fields)
    with pytest.raises(AdapterInvalid, match=f"3 of 200 experts .* up to {rank}\\. .* 64 times"):
        load_image(tmp_path / "few", table, torch.float32, 32)
