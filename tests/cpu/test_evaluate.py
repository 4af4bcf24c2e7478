"""`weft eval`: the harness over several models in one batch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tiny import ADAPTERS, BASE, ROOT
from typer.testing import CliRunner

from weft.cli.main import app

SMALL = ["--kv-cache-memory", "64M", "--adapter-memory", "64M", "--num-threads", "1"]


def test_it_says_what_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["eval", str(BASE), "--tasks", "tiny_reverse"])
    assert result.exit_code == 1 and "weft[eval]" in result.output


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
