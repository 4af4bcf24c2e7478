"""`weft bench kernels` and `weft tune`: what they say and write, and that tables are used."""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import weft

pytest.importorskip("triton")

from weft.bench import bed, tune
from weft.bench.kernels import KernelPlan, measure_kernels
from weft.bench.presets import PRESETS
from weft.core.errors import ConfigError
from weft.kernels import triton_linear, tuned
from weft.kernels.linear import DenseWeight
from weft.kernels.lora.triton import TritonBackend
from weft.kernels.tuned import Blocks, Cut, Key, Table

interpreted = pytest.mark.skipif(
    not triton_linear.INTERPRETED, reason="compiled kernels are for a GPU"
)
CPU = torch.device("cpu")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's table for a CPU, which is not there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuned.forget()
    yield tmp_path / "cache" / "weft" / "tuned" / "cpu.json"
    tuned.forget()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one product, (128, 128)."""
    monkeypatch.setitem(PRESETS, "small", PRESETS["tiny"] | {"num_hidden_layers": 1})
    monkeypatch.setattr(bed, "PRODUCTS", ("o",))


# -- weft bench kernels ----------------------------------------------------------------------------


def test_kernels(tmp_path: Path) -> None:
    plot, history = tmp_path / "kernels.png", tmp_path / "history.jsonl"
    done = weft(
        *("bench", "kernels", "--model", "tiny", "--device", "cpu", "--batch", "3", "--rank", "4"),
        *("--pattern", "none,distinct", "--repeats", "2"),
        *("--plot", str(plot), "--record", str(history)),
    )
    assert done.exit_code == 0, (done.output, done.exception)
    assert "Punica" in done.stdout and plot.read_bytes().startswith(PNG)
    found = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(history.read_text()) == found
    assert (found["ok"], found["benchmark"], found["device"]) == (True, "kernels", "CPU")
    rows = {(row["kernel"], row["product"]): row for row in found["results"]}
    names = ["qkv", "o", "gate_up", "down", "layer"]
    assert list(rows) == [(kernel, name) for kernel in ("base", "linear") for name in names]
    hidden, inner, rank = 128, 384, 4
    base = 4 * (hidden * inner + 3 * (hidden + inner))
    assert rows["base", "down"]["bytes"] == base
    assert rows["linear", "down"]["bytes"] == base + 3 * 4 * rank * (hidden + inner)
    for (kernel, name), row in rows.items():
        assert row["num_adapters"] == (0 if kernel == "base" else 3), name
        assert row["deviation"] <= found["config"]["tolerance"]
        assert row["floor_us"] == pytest.approx(
            1e6 * row["bytes"] / found["config"]["bytes_per_s"], rel=1e-3, abs=1e-3
        )
        assert row["us"] == pytest.approx(1e6 * row["bytes"] / row["bytes_per_s"], rel=1e-2)
        parts = sum(rows[kernel, part]["bytes"] for part in names[:-1])
        assert rows[kernel, "layer"]["bytes"] == parts


def test_a_time_is_that_of_one_launch() -> None:
    """A layer's is that of its four products, whose launches take turns over two layers."""
    calls: list[Callable[[], object]] = []

    def timer(body: Callable[[], object]) -> float:
        calls.append(body)
        return 1e-3

    plan = KernelPlan((2,), ("none", "identical"), rank=4, repeats=1, seed=0)
    with torch.inference_mode():
        rows = measure_kernels(bed.Bed("tiny", CPU, 4, 1), "torch", plan, timer, lambda: None)
    assert [row.kernel for row in rows] == ["base", "linear"]
    assert {timing.us for row in rows for timing in row.timings.values()} == {500.0}
    assert len(calls) == 10


def test_products_of_rounded_matrices_are_compared_with_their_values() -> None:
    plan = KernelPlan((2,), ("identical",), rank=4, repeats=1, seed=0, quantization="int4")
    with torch.inference_mode():
        tiny = bed.Bed("tiny", CPU, 4, 1)
        before = tiny.products[0].weights[0].clone()
        (row,) = measure_kernels(tiny, "torch", plan, lambda body: 1e-3, lambda: None)
    assert row.deviation <= tiny.tolerance
    assert 0.01 < (tiny.products[0].weights[0] - before).abs().max() / before.abs().max() < 0.1


def test_a_wrong_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(weight: DenseWeight, x: torch.Tensor, _bias: None) -> torch.Tensor:
        return x[:, 1:] @ weight.values_OI[:, 1:].t()

    monkeypatch.setattr(DenseWeight, "apply", lacking)
    done = weft(
        *("bench", "kernels", "--model", "tiny", "--device", "cpu", "--batch", "1"),
        *("--pattern", "none", "--repeats", "1", "--no-plot"),
    )
    assert done.exit_code == 1
    assert json.loads(done.stdout.splitlines()[-1])["ok"] is False


def test_results_that_are_no_numbers_deviate() -> None:
    want = torch.ones(2, 2)
    assert bed.deviation(want * 1.25, want) == 0.25
    assert bed.deviation(want * torch.nan, want) == torch.inf


@interpreted
@pytest.mark.usefixtures("small")
def test_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for few rows; beyond, the halves apart too. Timings leave no trace in results."""

    def timer(body: Callable[[], object]) -> float:
        body()
        return 1e-6

    monkeypatch.setattr(triton_linear, "MOST_ROWS", 2)
    plan = KernelPlan((2, 3), ("identical",), rank=4, repeats=1, seed=0)
    with torch.inference_mode():
        ground = bed.Bed("small", CPU, 4, 1)
        rows = measure_kernels(ground, "triton", plan, timer, lambda: None)
    assert [(row.batch, row.kernel) for row in rows] == [
        *((2, "linear"), (3, "linear"), (3, "shrink"), (3, "expand")),
    ]
    assert all(0 < row.deviation <= ground.tolerance for row in rows)
    shrink, expand = (row.timings["o"].num_bytes for row in rows[2:])
    assert shrink == 4 * (4 * 128 + 3 * 128) + 4 * 3 * 4
    assert expand == 4 * (4 * 128 + 2 * 3 * 128) + 4 * 3 * 4


def test_bad_options_of_kernels() -> None:
    for option, value, status in (
        ("--batch", "0", 1),
        ("--pattern", "nona", 1),
        ("--rank", "300", 2),
    ):
        done = weft("bench", "kernels", "--device", "cpu", "--no-plot", option, value)
        assert done.exit_code == status and option in done.stderr, (option, done.output)


# -- tables ----------------------------------------------------------------------------------------

KEY = Key(16, 128, 128)
CUT = Cut(32, 2, 2, columns=32)


@interpreted
def test_a_table_is_used(cache: Path) -> None:
    """For up to so many rows, and for that product alone; the product is the same."""
    x, weight = torch.randn(5, 128), torch.randn(128, 128)
    by_rule = triton_linear.cut_of(x, weight)
    assert by_rule not in (None, CUT)
    tuned.write_table(cache, Table("cpu", {KEY: asdict(CUT)}))
    tuned.forget()
    assert triton_linear.cut_of(x, weight) == CUT
    assert triton_linear.cut_of(torch.randn(17, 128), weight) != CUT
    assert triton_linear.cut_of(x, torch.randn(192, 128)) != CUT
    torch.testing.assert_close(triton_linear.linear(x, weight, None), x @ weight.t())


@interpreted
@pytest.mark.usefixtures("small")
def test_blocks_of_a_table_are_used(cache: Path) -> None:
    """And change no bit."""
    ground = bed.Bed("small", CPU, 4, 1)
    by_rule = TritonBackend(ground.pool)
    tuned.write_table(
        cache, Table("cpu", lora={"columns": 64, "expand_programs": 2, "shrink_programs": 3})
    )
    backend = TritonBackend(ground.pool)
    assert by_rule.tuning.blocks == Blocks()
    assert backend.tuning.blocks == replace(
        Blocks(), columns=64, expand_programs=2, shrink_programs=3
    )
    x, batch, group = ground.random(20, 128), ground.batch([0] * 20), ground.products[0].groups[0]
    made = []
    for each in (by_rule, backend):
        made.append(torch.zeros(20, 128))
        each.begin(batch).linear(made[-1], x, group.index)
    assert torch.equal(*made) and made[0].abs().max() > 0


def test_the_users_own_table_goes_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    other = KEY._replace(rows=32)
    tuned.write_table(
        tmp_path / "cpu.json",
        Table("cpu", {KEY: asdict(Cut(64, 1, 2)), other: asdict(Cut(64, 1, 3))}, {"columns": 32}),
    )
    tuned.write_table(cache, Table("cpu", {KEY: asdict(CUT)}, {"expand_programs": 2}))
    assert tuned.cut_for(CPU, 16, 128, 128) == CUT
    assert tuned.cut_for(CPU, 17, 128, 128) == Cut(64, 1, 3)
    assert tuned.cut_for(CPU, 64, 128, 128) is None
    assert tuned.blocks_for(CPU) == replace(Blocks(), columns=32, expand_programs=2)


def test_no_home_and_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")

    def home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", home)
    assert tuned.cut_for(CPU, 1, 128, 128) is None


def whole(**changed: object) -> dict[str, object]:
    entry = {**KEY._asdict(), **asdict(CUT)}
    table = {"version": 1, "device": "cpu", "linear": [entry], "lora": {"columns": 64}}
    return table | changed


def entry(**changed: object) -> dict[str, object]:
    made: dict[str, object] = {**KEY._asdict(), **asdict(CUT), **changed}
    return whole(linear=[{name: value for name, value in made.items() if value is not None}])


@pytest.mark.parametrize(
    ("found", "field"),
    [
        ("{", "table"),
        ("\xff", "table"),
        ([], "table"),
        ({}, "version"),
        (whole(version=2), "version"),
        (whole(device=None), "device"),
        (whole(more=1), "more"),
        (whole(linear={}), "linear"),
        (whole(linear=[3]), "linear[0]"),
        (whole(linear=[{**KEY._asdict(), **asdict(CUT)}] * 2), "linear"),
        (entry(rows=17), "linear[0].rows"),
        (entry(rows=None), "linear[0].rows"),
        (entry(outputs="128"), "linear[0].outputs"),
        (entry(inputs=True), "linear[0].inputs"),
        (entry(step=48), "linear[0].step"),
        (entry(split=0), "linear[0].split"),
        (entry(stages=2.0), "linear[0].stages"),
        (entry(ahead=-1), "linear[0].ahead"),
        (entry(ahead=3), "linear[0].ahead"),
        (entry(columns=1 << 40), "linear[0].columns"),
        (entry(stages=None), "linear[0].stages"),
        (entry(warps=4), "linear[0].warps"),
        (entry(step=128), "linear[0]"),
        (entry(columns=256), "linear[0]"),
        (entry(columns=8), "linear[0]"),
        (entry(split=4096, step=16, inputs=1 << 16), "linear[0]"),
        (whole(lora=[]), "lora"),
        (whole(lora={"ranks": 32}), "lora.ranks"),
        (whole(lora={"columns": 0}), "lora.columns"),
        (whole(lora={"expand_warps": 3}), "lora.expand_warps"),
    ],
)
def test_a_malformed_table_is_refused(cache: Path, found: object, field: str) -> None:
    cache.parent.mkdir(parents=True)
    text = found if isinstance(found, str) else json.dumps(found)
    cache.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as refused:
        tuned.cut_for(CPU, 1, 128, 128)
    assert str(cache) in refused.value.message and refused.value.param == field
    if field == "table" or "." not in field:
        return
    assert field in refused.value.message


def test_tables_that_come_with_weft() -> None:
    for path in tuned.SHIPPED.glob("*.json"):
        table = tuned.read_table(path)
        assert path.stem == re.sub(r"\W+", "_", table.device)
        for key, numbers in table.linear.items():
            assert Cut(**numbers).fits(*key[:3]), (path.name, key)


# -- weft tune -------------------------------------------------------------------------------------


@pytest.fixture
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which takes a tenth less time than the one before."""
    times = itertools.accumulate(itertools.repeat(0.9), operator.mul)
    monkeypatch.setattr(tune, "timer_of", lambda device, repeats: lambda body: next(times))
    monkeypatch.setattr(tuned, "ROWS", (2, 64))
    monkeypatch.setattr(tune, "ROWS", (2,))
    monkeypatch.setattr(tune, "FORMS", (Cut(64, 1, 2), Cut(32, 1, 3)))
    monkeypatch.setattr(tune, "SPLITS", (1,))
    monkeypatch.setattr(tune, "AHEAD", (4,))
    monkeypatch.setattr(tune, "MANY_ROWS", (3,))
    monkeypatch.setattr(tune, "BLOCKS", {"columns": (32, 64), "expand_programs": (8,)})


@interpreted
@pytest.mark.usefixtures("small", "few_trials")
def test_tune(cache: Path) -> None:
    """The best of each round goes to the next; what is known of other products is kept."""
    other = Key(64, 512, 512)
    tuned.write_table(cache, Table("cpu", {other: asdict(CUT)}))
    done = weft("tune", "--model", "small", "--device", "cpu", "--rank", "4", "--repeats", "1")
    assert done.exit_code == 0, (done.output, done.exception)
    assert str(cache) in done.stdout.replace("\n", "")
    table = tuned.read_table(cache)
    best = asdict(Cut(32, 1, 3, ahead=4))
    key = KEY._replace(rows=2)
    assert table.linear[key] == best
    assert table.linear[other] == asdict(CUT) and len(table.linear) == 2
    together = replace(Blocks(), columns=64, expand_programs=8)
    assert table.lora == asdict(together)
    assert triton_linear.cut_of(torch.zeros(1, 128), torch.zeros(128, 128)) == Cut(**best)


@interpreted
@pytest.mark.usefixtures("small", "few_trials")
def test_what_is_hardly_better_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(1000, -1)
    ground = bed.Bed("small", CPU, 4, 16)
    found = tune.tune_products(ground, lambda body: next(times))
    [best] = found.values()
    assert best.cut == Cut(128, 1, 4) and best.us == best.before_us
    assert tune.tune_blocks(ground, lambda body: next(times)) == (Blocks(), 1.0)


@interpreted
@pytest.mark.usefixtures("small", "few_trials")
def test_a_cut_whose_result_is_wrong_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(x: Any, weight: Any, bias: Any, cut: Cut, flags: Any) -> triton_linear.Launched:
        y = x @ weight.t()
        return triton_linear.Launched(y if cut.step != 32 else y * 1.01, 0, None, 1)

    monkeypatch.setattr(tune, "launch", launch)
    times = itertools.count(100, -1)
    ground = bed.Bed("small", CPU, 4, 16)
    found = tune.tune_products(ground, lambda body: next(times))
    assert found[KEY._replace(rows=2)].cut == Cut(64, 1, 2, ahead=4)


@interpreted
@pytest.mark.usefixtures("small")
def test_blocks_that_change_a_bit_are_out() -> None:
    ground = bed.Bed("small", CPU, 4, 2)
    work = tune._ManyRows(ground, ground.products[0], 3)
    assert work.time(Blocks(), lambda body: 2.0) == work.time(Blocks(), lambda body: 2.0) == 2.0
    ground.pool.arena.mul_(1.0 + 2.0**-20)
    assert work.time(Blocks(), lambda body: 2.0) == torch.inf


def test_the_shapes_of_a_share() -> None:
    """On one of two GPUs, column layers have half of their outputs, row layers of their inputs."""
    whole, share = (bed.Bed("tiny", CPU, 4, 1, num_gpus).products for num_gpus in (1, 2))
    for name, (outputs, inputs) in ((each.name, each.shape) for each in whole):
        is_row = name in ("o", "down")
        halved = (outputs, inputs // 2) if is_row else (outputs // 2, inputs)
        assert next(each.shape for each in share if each.name == name) == halved
    with pytest.raises(ConfigError, match="num_attention_heads"):
        bed.Bed("tiny", CPU, 4, 1, 3)


def test_candidates_for_a_gpu() -> None:
    """All can be, and give most processors something to do."""
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        for rows in tuned.ROWS:
            cuts = tune.candidates(Key(rows, outputs, inputs), 132)
            assert len(cuts) == len(set(cuts)) >= 4
            assert all(cut.fits(rows, outputs, inputs) for cut in cuts)
            assert all(outputs // cut.columns * cut.split >= 118 for cut in cuts)


def test_tune_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: str) -> str:
        done = weft("tune", "--model", "tiny", "--device", "cpu", *args)
        assert done.exit_code == 1, done.output
        return done.stderr

    malformed = tmp_path / "table.json"
    malformed.write_text("[]")
    monkeypatch.setattr(tune, "INTERPRETED", True)
    assert "--output" in refused("--output", str(tmp_path))
    assert "table.json" in refused("--output", str(malformed))
    assert "--output" in refused("--output", str(malformed / "table.json"))
    tuned.write_table(malformed, Table("NVIDIA H200"))
    assert "a table of NVIDIA H200" in refused("--output", str(malformed))
    monkeypatch.setattr(tune, "INTERPRETED", False)
    assert "GPU" in refused()
