"""A user without a name and without a home folder, as containers run them."""

from __future__ import annotations

import os
import pwd

import pytest
from command_line import CliRunner

from weft.cli.main import app
from weft.registry.contents import cache_folder


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    names = ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
    for name in names:
        monkeypatch.delenv(name, raising=False)


def test_push_says_who_by_number(tmp_path_factory: pytest.TempPathFactory) -> None:
    registry = str(tmp_path_factory.mktemp("registry"))
    adapter = "examples/tiny/adapters/upper"
    done = CliRunner().invoke(app, ["push", adapter, "acme/upper", "--registry", registry])
    assert done.exit_code == 0, done.output
    shown = CliRunner().invoke(app, ["history", "acme/upper", "--registry", registry])
    assert f"{os.getuid()}@" in shown.stdout


def test_downloads_are_not_kept() -> None:
    assert cache_folder() is None


def test_a_cluster_needs_a_folder() -> None:
    done = CliRunner().invoke(app, ["cluster", "status"])
    assert done.exit_code == 1
    assert "the cluster's folder needs HOME or XDG_STATE_HOME" in done.stderr
