"""`weft eval`: the harness over several models in one batch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import ADAPTERS, BASE, ROOT
from typer.testing import CliRunner

from weft.cli.main import app
from weft.core.errors import WeftError
from weft.text import load_tokenizer

SMALL = ["--kv-cache-memory", "64M", "--adapter-memory", "64M", "--num-threads", "1"]


def test_it_says_what_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["eval", str(BASE), "--tasks", "tiny_reverse"])
    assert result.exit_code == 1 and "weft[eval]" in result.output


def test_wrong_arguments_are_named() -> None:
    """An adapter of a name that another or the base has would take its row."""
    upper = f"={ADAPTERS['upper']}"
    for flags, told in (
        (["--tasks", ","], "--tasks names no task"),
        (["--tasks", "t", "--lora-modules", f"base{upper}"], "'base'"),
        (["--tasks", "t", *["--lora-modules", f"a{upper}"] * 2], "the name is given twice"),
        (["--tasks", "t", "--lora-modules", "a=nowhere"], "no such folder"),
        (["--tasks", "t", "--include-path", "nowhere"], "'--include-path'"),
    ):
        result = CliRunner().invoke(app, ["eval", str(BASE), *flags])
        assert result.exit_code in (1, 2) and told in result.output


@pytest.mark.exhaustive
def test_the_scores_are_those_of_each_model_alone(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    command = ["eval", str(BASE), *SMALL, "--tasks", "tiny_reverse,tiny_choice", "--compare"]
    command += ["--include-path", str(ROOT / "eval"), "--apply-chat-template", "--limit", "5"]
    for name in ("reverse", "upper"):
        command += ["--lora-modules", f"{name}={ADAPTERS[name]}"]
    result = CliRunner().invoke(app, [*command, "--json"])
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["same_scores"] and report["num_requests"] == 3 * (5 + 5 * 4)
    scores = report["scores"]
    assert scores["reverse"]["tiny_reverse"]["exact_match"] == 1
    assert scores["reverse"]["tiny_choice"]["acc"] == 1
    assert scores["upper"]["tiny_reverse"]["exact_match"] == 0
    unknown = CliRunner().invoke(app, ["eval", str(BASE), *SMALL, "--tasks", "nothing"])
    assert unknown.exit_code == 1 and "'nothing'" in unknown.output
    many = CliRunner().invoke(app, [*command[:-4], "--limit", "1", "--num-fewshot", "500"])
    assert many.exit_code == 1 and "weft: error: the tasks can't be run like this" in many.output


@pytest.fixture
def harness() -> Any:
    pytest.importorskip("lm_eval", reason="the extra eval is not installed")
    from weft.cli import harness

    return harness


def asked(*args: object) -> list[Any]:
    return [SimpleNamespace(args=args)]


def test_every_token_of_a_long_text_is_scored_behind_another(harness: Any) -> None:
    """The first one behind the token that begins texts."""
    tokenizer, text = load_tokenizer(str(BASE)), "abcdefghij" * 4
    recorder = harness._Recorder(tokenizer, 16)
    recorder.loglikelihood_rolling(asked(text))
    ids = [prompt.ids for prompt in recorder.prompts]
    assert len(ids) == 3 and max(map(len, ids)) < 16 and ids[0][0] == tokenizer.bos_id == 1
    one = SimpleNamespace(logprob=-1.0, rank=1)
    said = [harness.Said("", [None, *[one] * (len(each) - 1)]) for each in ids]
    player = harness._Player(tokenizer, 16, said)
    assert player.loglikelihood_rolling(asked(text)) == [-len(tokenizer.encode(text, False))]


def test_an_answer_that_can_not_be_scored_whole_is_refused(harness: Any) -> None:
    recorder = harness._Recorder(load_tokenizer(str(BASE)), 16)
    recorder._loglikelihood_tokens([("", [1], [2] * 14)])
    with pytest.raises(WeftError, match="15 tokens"):
        recorder._loglikelihood_tokens([("", [1], [2] * 15)])


def test_repeats_of_a_question_are_drawn_apart(harness: Any) -> None:
    recorder = harness._Recorder(load_tokenizer(str(BASE)), 64)
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 4}
    recorder.generate_until(asked("a", options) * 3)
    assert len({prompt.params.seed for prompt in recorder.prompts}) == 3


def test_no_stop_string_of_a_task_is_left_out(harness: Any) -> None:
    recorder = harness._Recorder(load_tokenizer(str(BASE)), 64)
    with pytest.raises(WeftError, match="stop"):
        recorder.generate_until(asked("a", {"until": [chr(65 + n) for n in range(17)]}))
