"""`weft bench startup` and `weft bench profile`: a start in stages, and what kernels take."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import CliRunner, weft

from weft.bench import startup
from weft.bench.profile import ProfileRow, Span, profile_row, profile_table, with_lora_part
from weft.cli.compile import KERNELS, use_kernels
from weft.cli.main import app
from weft.core.errors import ConfigError
from weft.core.stages import Stages, in_words

TINY = ("--model", "tiny", "--device", "cpu", "--num-threads", "1", "--kv-cache-memory", "16M")


BLOCK = """\
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in "fastapi starlette uvicorn zmq prometheus_client".split():
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""


def test_startup_tells_each_stage_of_two_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts of an engine do without the packages that only a server needs, which can't be imported
    here. As a start takes seconds, one process is run, and its answer counts for both starts. The
    second one has to look for kernels where the first has left them."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    started: list[subprocess.CompletedProcess[str]] = []
    kernels: list[str] = []

    def start(*args: Any, env: dict[str, str], **more: Any) -> subprocess.CompletedProcess[str]:
        kernels.append(env["TRITON_CACHE_DIR"])
        if not started:
            started.append(subprocess.run(*args, env=env, **more))
        return started[0]

    processes = SimpleNamespace(run=start, PIPE=subprocess.PIPE)
    monkeypatch.setattr(startup, "subprocess", processes)
    plot, record = tmp_path / "plot.png", tmp_path / "history.jsonl"
    done = weft(
        "bench", "startup", *TINY, "--rank", "4", "--plot", str(plot), "--record", str(record)
    )
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads(record.read_text())
    assert report == json.loads(done.stdout.splitlines()[-1])
    assert report["benchmark"] == "startup" and report["device"] == "CPU"
    assert report["config"]["rank"] == 4
    assert [start["run"] for start in report["results"]] == ["cold", "warm"]
    for start in report["results"]:
        seconds = start["seconds"]
        assert list(seconds) == ["imports", "model", "memory", "adapter", "first token"]
        assert min(seconds.values()) >= 0 and seconds["imports"] > 0.1
        assert start["total_s"] == pytest.approx(sum(seconds.values()), abs=0.01)
    assert len(kernels) == 2 and len(set(kernels)) == 1
    assert plot.stat().st_size > 1000
    assert "first token" in done.stdout


@pytest.mark.exhaustive
def test_a_start_that_fails_says_why_in_one_line() -> None:
    done = weft("bench", "startup", *TINY, "--max-model-len", "4096", "--no-plot")
    assert done.exit_code == 1
    [line] = done.stderr.splitlines()
    assert "--max-model-len 4096" in line


def test_kernels_are_compiled_on_gpus_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS, "elsewhere")
    done = CliRunner().invoke(app, ["compile", "tiny", "--kernels", str(tmp_path / "k")])
    assert done.exit_code == 1
    assert done.stderr == "weft: error: weft compile needs a GPU: nothing is compiled for CPUs\n"
    assert os.environ[KERNELS] == str(tmp_path / "k")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        use_kernels(tmp_path / "file")
    assert caught.value.param == "kernels"


@pytest.mark.exhaustive
def test_a_server_is_ready_and_answers_its_rounds(tmp_path: Path) -> None:
    record = tmp_path / "history.jsonl"
    sizes = ("--input-len", "8", "--output-len", "4", "--concurrency", "3", "--rounds", "1")
    more = ("--rank", "4", "--adapters", "2", "--pattern", "base,uniform", "--no-plot")
    done = weft("bench", "ready", *TINY, *sizes, *more, "--record", str(record))
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads(record.read_text())
    assert [run["run"] for run in report["results"]] == ["cold", "warm"]
    for run in report["results"]:
        assert run["ready_s"] > 0 and run["compiled_late"] == 0
        assert [each["pattern"] for each in run["rounds"]] == ["base", "uniform"]
        assert not any(each["errors"] for each in run["rounds"])
        assert any("2 of 2 adapters" in line for line in run["log"])


def test_profile_needs_a_gpu() -> None:
    done = weft("bench", "profile", *TINY, "--no-plot")
    assert done.exit_code == 1
    assert done.stderr == "weft: error: weft bench profile needs a GPU: it measures its kernels\n"


def row(pattern: str, *spans: tuple[str, float, float], steps: int = 1) -> ProfileRow:
    filler = [(f"short {i}", 0.0, 0.0) for i in range(8 * steps)]
    return profile_row(pattern, 0, 1.0, [Span(*s) for s in [*filler, *spans]], steps)


def test_kernels_take_what_they_add_to_those_before() -> None:
    """The picture in the module's docstring, over two steps, not in order."""
    found = row("none", ("c", 22, 28), ("a", 0, 12), ("b", 7, 16), ("a", 28, 40), steps=2)
    assert found.ms == pytest.approx(0.020)
    assert found.idle_share == pytest.approx(6 / 40)
    kernels = {kernel.name: kernel for kernel in found.kernels}
    assert list(kernels)[:3] == ["a", "c", "b"]
    assert kernels["a"].us == pytest.approx(12) and kernels["a"].per_step == 1
    assert kernels["b"].us == pytest.approx(4) and kernels["b"].per_step == 0.5
    assert kernels["b"].share == pytest.approx(4 / 40)
    assert len(found.kernels) == 10


def test_a_kernel_within_another_adds_nothing() -> None:
    found = row("none", ("long", 0, 10), ("within", 2, 5), ("after", 10, 12))
    assert {k.name: k.us for k in found.kernels if k.share} == {"long": 10, "after": 2}
    assert found.idle_share == pytest.approx(0)


def test_loras_part_is_the_difference_to_none() -> None:
    none, one = row("none", ("base", 0, 8_000)), row("identical", ("base", 0, 8_500))
    assert [r.lora_ms for r in with_lora_part([none, one])] == pytest.approx([0.0, 0.5])
    [alone] = with_lora_part([one])
    assert alone.lora_ms is None
    assert profile_table([alone]).row_count == 1


def test_kernels_within_graphs_must_be_seen() -> None:
    with pytest.raises(ConfigError, match="in 1 steps the profiler saw 3 kernels"):
        profile_row("none", 0, 1.0, [Span("a", 0, 1)] * 3, 1)


def test_stages_are_told_in_their_order() -> None:
    stages = Stages()
    for name in ("one", "another"):
        stages.end(name)
    stages.seconds["another"] = 2.26
    assert list(stages.seconds) == ["one", "another"]
    assert in_words(stages.seconds) == "2.3 s: one 0.0, another 2.3"
