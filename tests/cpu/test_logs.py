"""Logs: lines for people, JSON for collectors, one line a request; the same in the engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny
import torch
from full_disk import room_for
from observed import DIGEST, PROMPT, ScriptedEngine, client_of, complete
from safetensors.torch import load_file, save_file

from weft.core.config import engine_args
from weft.core.requests import TokenEvent
from weft.fleet.process import start_process
from weft.metrics.logs import configure_logging, request_id_var


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handlers and levels are the process's: give them back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    others = {
        name: logger.level
        for name, logger in logging.Logger.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
    }
    root.handlers = []  # so that those of pytest are not closed
    monkeypatch.setattr("weft.metrics.logs._configured", None)
    yield
    root.handlers, root.level = handlers, level
    for name, logger in logging.Logger.manager.loggerDict.items():
        if isinstance(logger, logging.Logger):
            logger.setLevel(others.get(name, logging.NOTSET))


@pytest.fixture
def far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process's local time is another one than UTC."""
    with monkeypatch.context() as zone:
        zone.setenv("TZ", "Asia/Kathmandu")
        time.tzset()
        yield
    time.tzset()


Capture = pytest.CaptureFixture[str]


def objects(capsys: Capture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


logger = logging.getLogger("weft.somewhere")


def test_a_log_that_nobody_reads_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr("weft.metrics.logs.ROOM_S", 0.05)
    with os.fdopen(reader, "rb") as read, os.fdopen(writer, "w") as written:
        monkeypatch.setattr("sys.stderr", written)
        configure_logging("info", json=False)
        for number in range(1000):
            logger.info("line %d %s", number, "x" * 10_000)
        *whole, cut = os.read(read.fileno(), 1 << 20).decode().splitlines()
        assert whole and all(f"line {number} " in line for number, line in enumerate(whole))
        assert len(cut) < 10_000
        logger.info("once more")
        end, lost, *others = os.read(read.fileno(), 1 << 20).decode().splitlines()
    assert end == "" and lost.endswith(
        f": {1000 - len(whole)} lines of the log are lost, as there was no room for them"
    )
    assert [line.split(": ")[-1] for line in others] == ["once more"]


def test_a_log_goes_on_when_the_disk_was_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w") as written:
        monkeypatch.setattr("sys.stderr", written)
        configure_logging("info", json=True)
        with room_for(100):
            for number in range(3):
                logger.info("line %d", number)
        logger.info("once more")
    cut, *others = (tmp_path / "log").read_text().splitlines()
    assert len(cut) == 100
    assert [json.loads(line)["message"] for line in others] == [
        "3 lines of the log are lost, as there was no room for them",
        "once more",
    ]


def assert_is_now(at: str) -> None:
    assert re.fullmatch(r"[0-9-]{10}T[0-9:]{8}\.[0-9]{3}Z", at)
    assert abs((datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()) < 60


@pytest.mark.usefixtures("far_from_utc")
def test_text(capsys: Capture) -> None:
    configure_logging("info", json=False)
    logger.debug("not this")
    logger.info("loaded %s", "sql", extra={"version": 2})
    at, *rest = capsys.readouterr().err.split()
    assert_is_now(at)
    assert rest == ["INFO", "weft.somewhere:", "loaded", "sql", "version=2"]


def test_json(capsys: Capture) -> None:
    configure_logging("warning", json=True)
    logger.info("not this")
    logger.warning(
        "two\nlines %s",
        7,
        extra={"adapter": "a\u2028b", "path": object, "gone": None, "color_message": "x"},
    )
    [line] = objects(capsys)
    assert_is_now(line.pop("time"))
    assert line == {
        "level": "warning",
        "logger": "weft.somewhere",
        "message": "two\nlines 7",
        "adapter": "a\u2028b",
        "path": "<class 'object'>",
    }


def test_an_exception_is_one_field(capsys: Capture) -> None:
    configure_logging("info", json=True)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed", stack_info=True)
    [line] = objects(capsys)
    assert line["message"] == "it failed" and line["level"] == "error"
    assert line["exception"].splitlines()[-1] == "ValueError: broken"
    assert "test_an_exception_is_one_field" in line["stack"]


def test_extra_fields_do_not_replace_others(capsys: Capture) -> None:
    configure_logging("info", json=True)
    token = request_id_var.set("mine")
    try:
        logger.info("x", extra={"request_id": "theirs", "level": "none", "time": 0})
    finally:
        request_id_var.reset(token)
    [line] = objects(capsys)
    assert line["request_id"] == "mine" and line["level"] == "info" and line["time"] != 0


def test_a_second_call_replaces_the_first(capsys: Capture) -> None:
    configure_logging("info", json=False)
    configure_logging("info", json=True)
    logger.info("once")
    assert len(objects(capsys)) == 1


def test_requests_to_the_hub_are_not_told(capsys: Capture) -> None:
    """The hub's client is one of httpx, or in newer releases of httpx2."""
    client = type(huggingface_hub.get_session())
    library = sys.modules[client.__module__]
    configure_logging("info", json=False)
    transport = library.MockTransport(lambda _: library.Response(200))
    assert client(transport=transport).get("https://hub").is_success
    assert not capsys.readouterr().err


# -- one line a request ----------------------------------------------------------------------------


def request_lines(capsys: Capture) -> list[dict[str, Any]]:
    return [line for line in objects(capsys) if line["logger"] == "weft.request"]


async def test_a_request_is_one_line(capsys: Capture) -> None:
    configure_logging("info", json=True)
    client = client_of(ScriptedEngine())
    answer = await complete(client, "sql", **{"x-request-id": "my-id"})
    assert answer.status_code == 200, answer.text
    await complete(client, "base")
    line, base = request_lines(capsys)
    assert line.pop("id").startswith("cmpl-")
    assert 0 <= line.pop("ttft_s") <= line.pop("duration_s") < 20
    del line["time"]
    assert line == {
        "level": "info",
        "logger": "weft.request",
        "message": "request ended",
        "request_id": "my-id",
        "model": "sql",
        "adapter": "sql",
        "version": 1,
        "digest": DIGEST[:12],
        "finish_reason": "length",
        "prompt_tokens": len(PROMPT),
        "cached_tokens": 2,
        "output_tokens": 3,
        "queue_s": 0.0,
    }
    assert base["model"] == "base" and "adapter" not in base and "version" not in base
    assert base["request_id"] != "my-id"


async def test_a_request_that_fails(capsys: Capture) -> None:
    configure_logging("info", json=True)
    engine = ScriptedEngine()
    wire = ("adapter_unavailable", "it is gone", None)
    engine.script = [TokenEvent("", [], finish_reason="error", error=wire)]
    client = client_of(engine)
    assert (await complete(client)).status_code == 503
    engine.script = []
    assert (await complete(client)).status_code == 503
    first, second = request_lines(capsys)
    assert first["finish_reason"] == "error" and first["error"] == "adapter_unavailable"
    assert first["output_tokens"] == 0 and "ttft_s" not in first
    assert second["error"] == "engine_dead"


async def test_a_request_whose_client_leaves(capsys: Capture) -> None:
    configure_logging("info", json=True)
    engine = ScriptedEngine()
    engine.script, engine.hangs = engine.script[:1], True
    client = client_of(engine)
    asking = asyncio.create_task(complete(client))
    await engine.hung.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    metrics = (await client.get("/metrics")).text
    assert 'model_name="base",finished_reason="abort"} 1.0' in metrics
    [line] = request_lines(capsys)
    assert line["finish_reason"] == "abort" and line["output_tokens"] == 1


async def test_in_text_requests_are_for_debugging(capsys: Capture) -> None:
    configure_logging("info", json=False)
    client = client_of(ScriptedEngine())
    await complete(client)
    assert capsys.readouterr().err == ""
    configure_logging("debug", json=False)
    await complete(client)
    text = capsys.readouterr().err
    assert "weft.request: request ended id=cmpl-" in text
    assert "adapter=sql version=1" in text


# -- the engine ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_engines")
async def test_the_engine_process_logs_in_the_same_form(capfd: Capture, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny.BASE, base)
    tensors = load_file(base / "model.safetensors")
    save_file({**tensors, "nobody.weight": torch.zeros(1)}, base / "model.safetensors")
    configure_logging("info", json=True)
    args = engine_args(str(base), num_threads=1, num_blocks=16, adapter_memory=1 << 20)
    client = await start_process(args)
    await client.close()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    [line] = [line for line in lines if "nobody.weight" in line["message"]]
    assert line["level"] == "warning" and line["logger"] == "weft.models.loading"
