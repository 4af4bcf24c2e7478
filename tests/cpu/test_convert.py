"""Other kinds of PEFT adapters as plain LoRA: PEFT's own layers are the oracle."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from other_kinds import CONFIG, KINDS, WEIGHTS, Kind, make, make_adapter
from peft import (
    AdaLoraConfig,
    IA3Config,
    PeftModel,
)
from peft.tuners.lokr.layer import factorization
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save

from weft.checkpoint.base import tensor_of
from weft.checkpoint.kinds import sort_adapter
from weft.checkpoint.kinds.lokr import sides
from weft.checkpoint.parts import AdapterParts
from weft.checkpoint.read import AdapterFiles
from weft.core.errors import AdapterInvalid
from weft.core.targets import Packed, TargetTable, build_table

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN0 = "base_model.model.model.layers.0.mlp.down_proj"

Tensors = dict[str, torch.Tensor]


def convert(
    config: dict | Path,
    table: TargetTable,
    tensors: Tensors | None = None,
    max_rank: int = 64,
    tolerance: float = 1e-3,
) -> AdapterParts:
    folder = config if isinstance(config, Path) else None
    text = (folder / CONFIG).read_bytes() if folder else json.dumps(config).encode()
    tensors = load_file(folder / WEIGHTS) if folder and tensors is None else tensors
    return sort_adapter(AdapterFiles(text, save(tensors)), table, max_rank, tolerance)[1]


def deltas(parts: AdapterParts) -> Tensors:
    found = {}
    for each in parts.targets:
        assert each.a is not None and each.b is not None
        a, b = tensor_of(each.a.array).double(), tensor_of(each.b.array).double()
        found[each.target.name] = each.scaling * b @ a
    return found


def pefts(model: PeftModel) -> Tensors:
    found = {}
    with torch.no_grad():
        for name, module in model.double().base_model.model.named_modules():
            if isinstance(module, BaseTunerLayer):
                found[name] = module.get_delta_weight("default")
    return found


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS.keys())
def test_deltas_are_pefts(tmp_path: Path, table: TargetTable, config: Kind) -> None:
    expected = pefts(make_adapter(tmp_path, config))
    parts = convert(tmp_path, table)
    actual = deltas(parts)
    assert actual.keys() == expected.keys()
    assert list(actual) == [t.name for t in table.targets if t.name in actual]
    for name, delta in actual.items():
        torch.testing.assert_close(delta, expected[name], rtol=1e-4, atol=1e-6)
    assert parts.worst[0] < 1e-6


def test_adalora_with_ranks_that_training_left(tmp_path: Path, table: TargetTable) -> None:
    config = AdaLoraConfig(
        init_r=4, total_step=9, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    masks = {"q_proj": [True, False, True, True], "v_proj": [False] * 4}
    config.rank_pattern = {
        f"model.layers.{layer}.self_attn.{name}.lora_E": mask
        for layer in range(2)
        for name, mask in masks.items()
    }
    expected = pefts(make_adapter(tmp_path, lambda: config))
    actual = deltas(convert(tmp_path, table))
    assert {name.rpartition(".")[2] for name in actual} == {"q_proj"}
    for name, delta in actual.items():
        torch.testing.assert_close(delta, expected[name], rtol=1e-4, atol=1e-6)
        assert not expected[name.replace("q_proj", "v_proj")].any()


def test_vera_is_drawn_as_torch_draws(table: TargetTable) -> None:
    for seed in (0, 77, -5, (1 << 40) + 3):
        config = {"peft_type": "VERA", "r": 3, "target_modules": ["q_proj"]}
        config |= {"save_projection": False, "projection_prng_key": seed}
        ones = {f"{Q0}.vera_lambda_b": torch.ones(48), f"{Q0}.vera_lambda_d": torch.ones(3)}
        (parts,) = convert(config | {"layers_to_transform": [0]}, table, ones).targets
        generator = torch.Generator().manual_seed(seed)
        for named, size in ((parts.a, 40), (parts.b, 3)):
            assert named is not None
            bound = math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(size))
            drawn = torch.empty(named.shape).uniform_(-bound, bound, generator=generator)
            torch.testing.assert_close(tensor_of(named.array), drawn, rtol=0.0, atol=1e-7)


def test_ia3_scales_outputs(tmp_path: Path, table: TargetTable) -> None:
    options = {"feedforward_modules": ["down_proj"]}
    kind = make(IA3Config, target_modules=["k_proj", "up_proj", "down_proj", "lm_head"], **options)
    make_adapter(tmp_path, kind)
    tensors = load_file(tmp_path / WEIGHTS)
    found = {p.target.name: p for p in convert(tmp_path, table).targets}
    assert len(found) == 5 and all(p.rank == 0 for p in found.values())
    mlp = "base_model.model.model.layers.1.mlp."
    both = tensors[mlp + "up_proj.ia3_l"].view(-1) * tensors[mlp + "down_proj.ia3_l"].view(-1)
    up, key = (
        found["model.layers.1.mlp.up_proj"].gain,
        found["model.layers.0.self_attn.k_proj"].gain,
    )
    assert up is not None and torch.equal(tensor_of(up.array), both)
    k_name = "base_model.model.model.layers.0.self_attn.k_proj.ia3_l"
    assert key is not None and torch.equal(tensor_of(key.array), tensors[k_name].view(-1))


def test_ia3_of_what_is_squared_scales_by_roots() -> None:
    """The input of down_proj is the square of a ReLU, which has no gate."""
    mlp = "model.layers.0.mlp."
    up = Packed("0.up", "linear", 4, (3,), (mlp + "up_proj",), degree=2)
    down = Packed("0.down", "linear", 3, (4,), (mlp + "down_proj",))
    table, targets = build_table([up, down]), ["up_proj", "down_proj"]
    config = {"peft_type": "IA3", "target_modules": targets, "feedforward_modules": targets[1:]}
    own, squared = torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([[4.0, 0.25, 0.0]])
    tensors = {f"base_model.model.{mlp}up_proj.ia3_l": own, f"{DOWN0}.ia3_l": squared}
    (found,) = convert(config, table, tensors).targets
    assert found.target.name == mlp + "up_proj" and found.gain is not None
    assert tensor_of(found.gain.array).tolist() == [4.0, -0.5, 0.0]
    with pytest.raises(AdapterInvalid) as caught:
        convert(config, table, tensors | {f"{DOWN0}.ia3_l": -squared})
    assert caught.value.param == f"{DOWN0}.ia3_l"
    of_no_power = build_table([replace(up, degree=0), down])
    with pytest.raises(AdapterInvalid, match="its input can't be scaled") as caught:
        convert(config, of_no_power, tensors)
    assert caught.value.param == "feedforward_modules"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files(tmp_path: Path, table: TargetTable, dtype: torch.dtype) -> None:
    make_adapter(tmp_path, KINDS["loha"])
    narrow = {name: t.to(dtype) for name, t in load_file(tmp_path / WEIGHTS).items()}
    wide = {name: t.float() for name, t in narrow.items()}
    actual, expected = (
        deltas(convert(json.loads((tmp_path / CONFIG).read_text()), table, tensors))
        for tensors in (narrow, wide)
    )
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# approximations -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_the_error_is_that_of_the_best_approximation(
    tmp_path: Path, table: TargetTable, kind: str
) -> None:
    expected = pefts(make_adapter(tmp_path, KINDS[kind]))
    parts = convert(tmp_path, table, max_rank=6, tolerance=1.0)
    errors, best = {}, {}
    for name, delta in deltas(parts).items():
        errors[name] = float((delta - expected[name]).norm() / expected[name].norm())
        s = torch.linalg.svdvals(expected[name])
        best[name] = float(s[6:].norm() / s.norm())
    assert errors == pytest.approx(best, abs=1e-5) and max(best.values()) > 0.1
    worst = max(best, key=best.__getitem__)
    assert parts.worst == (pytest.approx(best[worst], abs=1e-6), worst)
    assert all(part.rank == 6 for part in parts.targets)


def test_an_error_above_the_tolerance_is_refused(tmp_path: Path, table: TargetTable) -> None:
    make_adapter(tmp_path, KINDS["loha"])
    error, _ = convert(tmp_path, table, max_rank=10, tolerance=1.0).worst
    convert(tmp_path, table, max_rank=10, tolerance=error)
    with pytest.raises(AdapterInvalid) as caught:
        convert(tmp_path, table, max_rank=10)
    assert caught.value.param is not None and ".hada_w1_a" in caught.value.param
    assert "off by 0." in caught.value.message and "--max-lora-rank 16" in caught.value.message
    convert(tmp_path, table, max_rank=16)


def test_a_matrix_of_small_rank_is_exact_at_any_limit(tmp_path: Path, table: TargetTable) -> None:
    make_adapter(tmp_path, KINDS["lokr, whole"])
    tensors = load_file(tmp_path / WEIGHTS)
    for name, tensor in tensors.items():
        tensors[name] = tensor[:, :1] @ tensor[:1]  # of rank 1
    config = json.loads((tmp_path / CONFIG).read_text())
    parts = convert(config, table, tensors, max_rank=2)
    assert [part.rank for part in parts.targets] == [1] * len(parts.targets)
    assert parts.worst == (0.0, "")


def test_dimensions_are_split_as_peft_does() -> None:
    for features in (1, 2, 7, 12, 36, 64, 97, 640, 1000, 4096, 11008, 14336):
        for factor in (-5, -1, 0, 1, 2, 3, 5, 6, 7, 8, 16, 30, 100, 5000):
            assert sides(features, factor) == factorization(features, factor)


# refusals -------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("adalora", {"bias": "lora_only"}, "bias"),
    ("adalora", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ("adalora", {"use_dora": True}, "use_dora"),
    ("adalora", {"layer_replication": [[0, 1]]}, "layer_replication"),
    ("adalora", {"init_r": 65}, "init_r"),
    ("adalora", {"init_r": 0}, "init_r"),
    ("adalora", {"rank_pattern": [1]}, "rank_pattern"),
    ("adalora", {"rank_pattern": {"x.lora_E": 3}}, "rank_pattern"),
    ("adalora", {"rank_pattern": {"x.lora_E": [True]}}, "rank_pattern"),
    (
        "adalora",
        {"rank_pattern": {"model.layers.0.self_attn.q_proj.lora_E": [True] * 5 + [False]}},
        f"{Q0}.lora_A",
    ),
    ("adalora", {"lora_alpha": float("nan")}, "lora_alpha"),
    ("adalora", {"target_modules": ["q_proj"]}, "target_modules"),
    ("adalora", {"layers_to_transform": [0]}, "layers_to_transform"),
    ("adalora", {"brand_new": 1}, "brand_new"),
    ("vera", {"r": 65}, "r"),
    ("vera", {"r": 6}, "base_model.vera_A"),
    ("vera", {"bias": "vera_only"}, "bias"),
    ("vera", {"save_projection": False}, "base_model.vera_A"),
    ("vera", {"save_projection": 1}, "save_projection"),
    ("vera", {"fan_in_fan_out": True}, "fan_in_fan_out"),
    ("vera", {"exclude_modules": ["q_proj"]}, "exclude_modules"),
    ("vera, drawn", {"save_projection": True}, "base_model.vera_A"),
    ("vera, drawn", {"projection_prng_key": "7"}, "projection_prng_key"),
    ("vera, drawn", {"projection_prng_key": 1 << 70}, "projection_prng_key"),
    ("loha", {"r": 3}, f"{DOWN0}.hada_w1_a"),
    ("loha", {"r": 0}, "r"),
    ("loha", {"alpha": True}, "alpha"),
    ("loha", {"lora_alpha": 4}, "lora_alpha"),
    ("loha", {"rank_pattern": {"q_proj": 3}}, f"{Q0}.hada_w1_a"),
    ("loha", {"exclude_modules": ["q_proj"]}, "exclude_modules"),
    ("loha", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ("loha", {"task_type": "TOKEN_CLS"}, "task_type"),
    ("lokr", {"decompose_both": "yes"}, "decompose_both"),
    ("lokr", {"decompose_factor": 4}, f"{DOWN0}.lokr_w1"),
    ("lokr", {"decompose_factor": None}, "decompose_factor"),
    ("lokr", {"decompose_factor": 2.0}, "decompose_factor"),
    ("lokr", {"r": 1 << 30}, "r"),
    ("lokr", {"r": 900}, f"{DOWN0}.lokr_w1"),
    ("ia3", {"feedforward_modules": []}, f"{DOWN0}.ia3_l"),
    ("ia3", {"feedforward_modules": ["o_proj", "down_proj"]}, "feedforward_modules"),
    ("ia3", {"feedforward_modules": ["mlp.down_proj"]}, "feedforward_modules"),
    ("ia3", {"feedforward_modules": "("}, "feedforward_modules"),
    ("ia3", {"feedforward_modules": 1}, "feedforward_modules"),
    ("ia3", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ("ia3", {"r": 8}, "r"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict, Tensors]]:
    """Config and tensors of a good adapter of a kind, to spoil."""
    folders: dict[str, Path] = {}
    kinds = KINDS | {
        "ia3": make(
            IA3Config,
            target_modules=["k_proj", "o_proj", "down_proj"],
            feedforward_modules=["down_proj"],
        )
    }

    def load(kind: str) -> tuple[dict, Tensors]:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("adapter")
            make_adapter(folders[kind], kinds[kind])
        return json.loads((folders[kind] / CONFIG).read_text()), load_file(folders[kind] / WEIGHTS)

    return load


@pytest.mark.parametrize(
    ("kind", "change", "param"), REFUSED, ids=[f"{k} {json.dumps(c)[:40]}" for k, c, _ in REFUSED]
)
def test_fields_are_refused_by_name(
    saved: Callable, table: TargetTable, kind: str, change: dict, param: str
) -> None:
    config, tensors = saved(kind)
    with pytest.raises(AdapterInvalid) as caught:
        convert(config | change, table, tensors)
    assert caught.value.param == param, caught.value.message


@pytest.mark.parametrize("kind", ["adalora", "vera", "loha", "lokr", "ia3"])
def test_tensors_are_refused_by_name(saved: Callable, table: TargetTable, kind: str) -> None:
    config, tensors = saved(kind)

    def refused(changed: Tensors) -> AdapterInvalid:
        with pytest.raises(AdapterInvalid) as caught:
            convert(config, table, changed)
        return caught.value

    first = min(name for name in tensors if "vera_A" not in name and "vera_B" not in name)
    assert refused(tensors | {first: torch.full_like(tensors[first], torch.nan)}).param == first
    assert refused(tensors | {first: torch.ones(3, 3)}).param == first
    extra = first.rpartition(".")[0] + ".weight"
    error = refused(tensors | {extra: torch.ones(3)})
    assert error.param == extra and "save_embedding_layers" in error.message
    far = first.replace("layers.0", "layers.9")
    error = refused(tensors | {far: tensors[first].clone()})
    assert error.param == far and "which has 2 layers" in error.message
    without = {name: t for name, t in tensors.items() if name != first}
    assert kind == "ia3" or refused(without).param is not None


def test_loha_of_a_rank_far_above_the_limit_is_refused(saved: Callable, table: TargetTable) -> None:
    config, tensors = saved("loha")
    with pytest.raises(AdapterInvalid) as caught:
        convert(config, table, tensors, max_rank=3, tolerance=9.0)
    assert caught.value.param == "r" and "rank 16" in caught.value.message
