"""`weft env` and shell completion: what they print, and what they never do."""

from __future__ import annotations

import errno
import importlib.metadata
import io
import json
import os
import subprocess
import sys

import pytest
from command_line import CliRunner
from patience import PATIENCE_S

import weft
from weft.__main__ import main
from weft.cli.main import app
from weft.terminal import environment as env


def test_what_it_says_of_this_machine() -> None:
    done = CliRunner().invoke(app, ["env"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert f"weft: {weft.__version__}" in lines
    assert f"torch: {importlib.metadata.version('torch')}" in lines
    names = [line.partition(": ")[0] for line in lines]
    assert {"python", "system", "cpu", "cores", "memory", "driver"} <= set(names)


def test_json() -> None:
    sections = json.loads(CliRunner().invoke(app, ["env", "--json"]).stdout)
    assert sections["weft"]["weft"] == weft.__version__
    assert set(sections) == {"weft", "machine", "gpu", "environment"}


def test_a_full_disk_ends_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "argv", ["weft", "env"])
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert (
        capsys.readouterr().err == "weft: error: can't write the output: No space left on device\n"
    )


def test_secrets_are_hidden_and_strangers_left_out() -> None:
    shown = env.shown_variables(
        {
            "HF_TOKEN": "hf_secret",
            "WEFT_API_KEY": "secret",
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
            "https_proxy": "http://me:secret@proxy:3128",
            "CUDA_VISIBLE_DEVICES": "1",
            "HF_HOME": "/models",
            "AWS_REGION": "secret",
            "HOME": "secret",
        }
    )
    assert "secret" not in str(shown)
    assert shown["CUDA_VISIBLE_DEVICES"] == "1" and shown["HF_HOME"] == "/models"
    assert shown["HF_TOKEN"] == shown["WEFT_API_KEY"] == env.HIDDEN
    assert shown["https_proxy"] == f"http://{env.HIDDEN}@proxy:3128"
    assert "HOME" not in shown and "AWS_REGION" not in shown


def test_nothing_that_is_missing_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(env.Path, "read_text", _fails)
    monkeypatch.setattr(env.os, "sysconf", _fails)
    monkeypatch.setattr(env.platform, "freedesktop_os_release", _fails)
    monkeypatch.setattr(env, "PACKAGES", "no-such-package")
    sections = env.collect()
    assert sections["weft"]["commit"] is None and sections["weft"]["no-such-package"] is None
    assert "ModuleNotFoundError" in str(sections["gpu"]["torch"])
    assert "no-such-package: -" in env.show_text(sections).splitlines()


def _fails(*_: object, **__: object) -> str:
    raise OSError("not here")


# -- completion ------------------------------------------------------------------------------------


def complete(line: str) -> list[str]:
    """What bash is offered for the last word of a line."""
    words = line.split(" ")
    request = {"_WEFT_COMPLETE": "complete_bash", "COMP_WORDS": line}
    script = (
        "import sys; from weft.cli.main import app\n"
        "try: app(prog_name='weft')\n"
        "finally: assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **request, "COMP_CWORD": str(len(words) - 1)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_completion_knows_commands_options_and_values() -> None:
    assert {"serve", "demo", "check", "env"} <= set(complete("weft "))
    assert complete("weft serve --max-lora-r") == ["--max-lora-rank"]
    assert complete("weft serve --dtype b") == ["bfloat16"]
