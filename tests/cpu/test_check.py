"""`weft check`: its verdict is the server's, and it says why and what would help."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from command_line import CliRunner
from huggingface_hub import DryRunFileInfo
from safetensors.torch import load_file, save_file
from typer.testing import Result

from weft import LLM, SamplingParams
from weft.cli.main import app
from weft.core.errors import AdapterError
from weft.core.files import CONFIG_FILE

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Broken = Callable[..., Path]


def check(adapter: Path | str, *options: str, base: Path | str = tiny.BASE) -> Result:
    return CliRunner().invoke(app, ["check", str(adapter), "--base", str(base), *options])


def report(adapter: Path | str, *options: str, base: Path | str = tiny.BASE) -> dict:
    return json.loads(check(adapter, "--json", *options, base=base).stdout)


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    """A copy of an example adapter with fields of its config changed."""

    def make(name: str = "reverse", **fields: object) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny.ADAPTERS[name], folder)
        config = folder / CONFIG
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        return folder

    return make


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


# -- served ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.ADAPTERS)
def test_the_examples_are_served(name: str) -> None:
    done = check(tiny.ADAPTERS[name])
    assert done.exit_code == 0
    assert done.stdout.startswith(f"served: {tiny.ADAPTERS[name]} on {tiny.BASE}\n")


def test_the_facts_of_an_adapter() -> None:
    facts = report(tiny.ADAPTERS["repeat"])["facts"]
    size = sum((tiny.ADAPTERS["repeat"] / name).stat().st_size for name in (CONFIG, WEIGHTS))
    with LLM(tiny.BASE, {}, num_threads=1, num_blocks=64) as llm:
        assert facts["digest"] == llm.load_adapter("mine", tiny.ADAPTERS["repeat"]).digest
        llm.generate(["planet"], SamplingParams(max_tokens=1), adapter="mine")
        assert facts["device_bytes"] == llm.stats().adapter_bytes
    assert (facts["rank"], facts["alpha"], facts["rslora"]) == (8, 16, False)
    assert (facts["dtypes"], facts["file_bytes"]) == (["F32"], size)
    assert (facts["device_dtype"], facts["trained_on"]) == ("float32", "weft-tiny")
    assert [tuple(t.values()) for t in facts["targets"]] == [
        ("q_proj", "0", 4, 1.0),
        ("q_proj", "1-4", 8, 2.0),
        ("k_proj", "0-4", 8, 2.0),
        ("v_proj", "0-4", 8, 2.0),
        ("o_proj", "0-4", 8, 2.0),
        ("down_proj", "0-4", 16, 1.5),
    ]


def test_what_people_read() -> None:
    lines = [line.split() for line in check(tiny.ADAPTERS["vowels"]).stdout.splitlines()]
    assert ["kind", "LoRA,", "rank-stabilised", "(rsLoRA)"] in lines
    assert ["trained", "on", '"weft-tiny";', "make", "sure", "that", "this"] in [
        line[:7] for line in lines
    ]
    assert ["down_proj", "0-4", "16", "4"] in lines
    outside = [line.split() for line in check(tiny.ADAPTERS["numeronym"]).stdout.splitlines()]
    assert ["embed_tokens", "-", "8", "2"] in outside


def test_a_base_is_recognised_by_its_name(broken: Broken) -> None:
    assert "make sure" not in check(broken(base_model_name_or_path="weft/base")).stdout


def test_a_16_bit_base_takes_half_the_memory(tmp_path: Path) -> None:
    config = json.loads((tiny.BASE / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = report(tiny.ADAPTERS["upper"], base=tmp_path)["facts"]
    assert facts["device_dtype"] == "bfloat16"
    assert facts["device_bytes"] * 2 == report(tiny.ADAPTERS["upper"])["facts"]["device_bytes"]


def lay_loras(root: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "dora": {"use_dora": True},
        "tokens": {"trainable_token_indices": [5, 9]},
        "pissa": {"init_lora_weights": "pissa"},
        "alora": {"alora_invocation_tokens": [5, 9]},
        "head": {"modules_to_save": ["lm_head"]},
    }
    start = "base_model.model."
    for kind, fields in kinds.items():
        folder = root / kind
        shutil.copytree(tiny.ADAPTERS["reverse"], folder)
        config = folder / CONFIG
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        tensors = load_file(folder / WEIGHTS)
        if kind == "dora":
            for name in [name for name in tensors if "lora_B" in name]:
                magnitude = name.replace("lora_B.weight", "lora_magnitude_vector")
                tensors[magnitude] = torch.ones(len(tensors[name]))
        elif kind == "tokens":
            name = "model.embed_tokens.token_adapter.trainable_tokens_delta"
            tensors[start + name] = torch.ones(2, 128)
        elif kind == "head":
            tensors[start + "lm_head.weight"] = torch.ones(262, 128)
        save_file(tensors, folder / WEIGHTS)


def lay_other_kinds(root: Path) -> None:
    kinds: dict[str, dict[str, tuple[int, ...]]] = {
        "IA3": {"ia3_l": (128, 1)},
        "ADALORA": {"lora_A": (2, 128), "lora_B": (128, 2), "lora_E": (2, 1)},
        "VERA": {"vera_lambda_b": (128,), "vera_lambda_d": (2,)},
        "LOHA": {f"hada_w{i}_{s}": (128, 2) if s == "a" else (2, 128) for i in "12" for s in "ab"},
        "LOKR": {"lokr_w1": (8, 8), "lokr_w2_a": (16, 2), "lokr_w2_b": (2, 16)},
    }
    for kind, shapes in kinds.items():
        (root / kind).mkdir()
        module = "base_model.model.model.layers.0.self_attn.q_proj."
        tensors = {module + part: torch.rand(shape) for part, shape in shapes.items()}
        save_file(tensors, root / kind / WEIGHTS)
        ranks = {"IA3": {}, "ADALORA": {"init_r": 2}}.get(kind, {"r": 2})
        more = {"save_projection": False} if kind == "VERA" else {}
        config = {"peft_type": kind, "target_modules": ["q_proj"], **ranks, **more}
        (root / kind / CONFIG).write_text(json.dumps(config))


def test_torch_is_not_imported(tmp_path: Path) -> None:
    """All are served, and to say so takes no import that is slow."""
    lay_loras(tmp_path)
    lay_other_kinds(tmp_path)
    adapters = list(tmp_path.iterdir())
    calls = [["check", str(adapter), "--base", str(tiny.BASE)] for adapter in adapters]
    code = (
        "import sys; from weft.cli.main import app\n"
        f"for call in {calls}:\n"
        "    app(call, standalone_mode=False)\n"
        "    print('imported', {'torch', 'transformers'} & set(sys.modules), 'for', call[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    lines = done.stdout.splitlines()
    for adapter in adapters:
        assert f"imported set() for {adapter}" in lines, done.stdout + done.stderr
    assert sum(line.startswith("served: ") for line in lines) == len(adapters), done.stdout


def test_what_has_no_low_rank_update(tmp_path: Path) -> None:
    """(IA)^3 scales outputs, and that is all."""
    name = "base_model.model.model.layers.0.self_attn.k_proj.ia3_l"
    save_file({name: torch.full((64, 1), 1.5)}, tmp_path / WEIGHTS)
    config = {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    done = check(tmp_path)
    assert done.exit_code == 0 and "changes        k_proj" in done.stdout
    assert report(tmp_path)["facts"]["changes"] == ["k_proj"]


def test_a_verdict_that_depends_on_the_bases_weights(broken: Broken) -> None:
    folder = broken(init_lora_weights="pissa")
    done = check(folder)
    assert done.exit_code == 0 and "This depends on the base's weights too" in done.stdout
    assert report(folder)["facts"]["provisional"]
    plain = check(tiny.ADAPTERS["reverse"])
    assert "depends on" not in plain.stdout
    assert not report(tiny.ADAPTERS["reverse"])["facts"]["provisional"]


def test_another_kind_within_the_tolerance(tmp_path: Path) -> None:
    """A LoHa of rank 2, a LoRA of rank 4, of which one of rank 3 is some way off."""
    module = "base_model.model.model.layers.0.self_attn.o_proj."
    generator = torch.Generator().manual_seed(0)
    tensors = {
        module + f"hada_w{i}_{side}": torch.randn(shape, generator=generator)
        for i in (1, 2)
        for side, shape in (("a", (128, 2)), ("b", (2, 128)))
    }
    save_file(tensors, tmp_path / WEIGHTS)
    config = {"peft_type": "LOHA", "r": 2, "target_modules": ["o_proj"]}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    assert "LoHa, served with an error of 0 at worst" in check(tmp_path).stdout
    refused = check(tmp_path, "--max-lora-rank", "3")
    assert refused.exit_code == 1 and "--conversion-tolerance 0.001" in refused.stdout
    facts = report(tmp_path, "--max-lora-rank", "3", "--conversion-tolerance", "0.9")["facts"]
    assert 0.01 < facts["conversion_error"] < 0.9


# -- refused ---------------------------------------------------------------------------------------


def test_every_refused_field_is_told_at_once(broken: Broken) -> None:
    folder = broken(use_qalora=True, task_type="TOKEN_CLS", bias="some", shiny=3, r=300)
    done = check(folder)
    assert done.exit_code == 1
    refusals = report(folder)["refusals"]
    params = {"use_qalora", "task_type", "bias", "shiny", "r"}
    assert {r["param"] for r in refusals} == params and len(refusals) == len(params)
    assert "Train for CAUSAL_LM" in done.stdout and "not of one training" in done.stdout


def test_the_first_refusal_is_the_servers(broken: Broken) -> None:
    folder = broken(use_rslora="yes", lora_alpha=None)
    with (
        LLM(tiny.BASE, {}, num_threads=1, num_blocks=64) as llm,
        pytest.raises(AdapterError) as refused,
    ):
        llm.load_adapter("mine", folder)
    first = report(folder)["refusals"][0]
    assert (first["param"], first["message"]) == (refused.value.param, refused.value.message)


def test_a_rank_above_the_servers_limit() -> None:
    done = check(tiny.ADAPTERS["piglatin"], "--max-lora-rank", "8")
    assert done.exit_code == 1
    assert "r: a rank must be in [1, 8]" in done.stdout
    assert "--max-lora-rank allows up to 256" in done.stdout
    assert check(tiny.ADAPTERS["piglatin"], "--max-lora-rank", "32").exit_code == 0


def test_an_adapter_for_another_base(broken: Broken) -> None:
    folder = broken(base_model_name_or_path="other/\x1b[31mbase")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.ones(8, 7)}))
    done = check(folder)
    assert f"{name}: has the shape (8, 7)" in done.stdout
    assert 'trained on "other/\\u001b[31mbase"' in done.stdout


def test_an_adapter_for_a_base_whose_layers_differ() -> None:
    [refusal] = report(tiny.ADAPTERS["reverse"], base=tiny.HYBRID_BASE)["refusals"]
    has = refusal["message"].partition("in the base model, whose layer 0 has ")[2].split(", ")
    assert "in_proj_qkv" in has and "down_proj" in has and "k_proj" not in has


def test_a_tensor_with_nan(broken: Broken) -> None:
    folder = broken()
    change_tensors(folder, lambda tensors: next(iter(tensors.values())).fill_(float("nan")))
    assert "take an earlier checkpoint" in check(folder).stdout


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_file_that_git_lfs_has_not_downloaded(broken: Broken, name: str) -> None:
    folder = broken()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5' * 64}\nsize 9000\n"
    (folder / name).write_text(pointer)
    (refusal,) = report(folder)["refusals"]
    assert refusal["param"] == name
    assert "git lfs pull" in refusal["message"]


def test_a_config_that_is_not_pefts(broken: Broken) -> None:
    folder = broken()
    (folder / CONFIG).write_text(json.dumps({"fine_tune_type": "lora", "num_layers": 4}))
    (refusal,) = report(folder)["refusals"]
    assert refusal["param"] == "peft_type"
    assert "not PEFT's" in refusal["message"]


def test_files_that_are_missing_or_no_adapter(tmp_path: Path, broken: Broken) -> None:
    assert [(r["param"], r["help"]) for r in report(tmp_path)["refusals"]] == [(CONFIG, None)]
    folder = broken()
    [refusal] = report(tmp_path)["refusals"]
    assert refusal["help"] == "These folders in it have one: reverse."
    (folder / CONFIG).write_text("[]")
    assert [r["param"] for r in report(folder)["refusals"]] == [CONFIG]
    (folder / CONFIG).write_text('{"peft_type": "PROMPT_TUNING", "use_dora": true}')
    refusals = report(folder)["refusals"]
    assert [r["param"] for r in refusals] == ["peft_type"]
    assert "merge this adapter" in refusals[0]["help"]


# -- neither ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "base", "said"),
    [
        ("/no/such/adapter", tiny.BASE, "there is no folder /no/such/adapter"),
        (tiny.ADAPTERS["upper"] / CONFIG, tiny.BASE, f"{CONFIG} is not a folder"),
        ("org/adapter", tiny.BASE, "'org/adapter' can't be fetched from the Hugging Face hub"),
        ("hf://x", tiny.BASE, "'hf://x' is not of the form"),
        (tiny.ADAPTERS["upper"], "/no/such/base", "there is no folder /no/such/base"),
        (tiny.ADAPTERS["upper"], tiny.BASE / "config.json", "is a file, and must be a folder"),
    ],
)
def test_what_is_not_there(
    monkeypatch: pytest.MonkeyPatch, adapter: str, base: str, said: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = check(adapter, base=base)
    assert (done.exit_code, done.stdout) == (2, "")
    [line] = [each for each in done.stderr.splitlines() if each.startswith("weft: error: ")]
    assert said in line


def test_an_adapter_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, dry_run: bool = False, **_: object) -> str | list[object]:
        if dry_run:
            return [DryRunFileInfo("1" * 40, 1, CONFIG_FILE, "", False, True)]
        asked.append(name)
        return str(tiny.ADAPTERS["sort"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert check("org/sort").exit_code == 0
    assert asked == ["org/sort"]


def test_what_activates_it_is_shown(broken: Broken) -> None:
    folder = broken(alora_invocation_tokens=[5, 6])
    assert "activated by   the token ids 5, 6 in the prompt" in check(folder).output
    assert report(folder)["facts"]["invocation_token_ids"] == [5, 6]
