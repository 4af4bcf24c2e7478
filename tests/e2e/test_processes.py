"""All processes of a real server: what hangs is seen, and none outlives another's end."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest
from patience import PATIENCE_S
from quick_start import children_of, command_of
from serving import Server, serving, until
from tiny import ADAPTERS

from weft.engine.serve import PULSE_S
from weft.fleet.vitals import HANG_S

TEMPLATE = "{{ messages[0].content }}"
FORK_SERVER = b"import main; main()"
"""What the commands of processes have that fork others."""


def family_of(pid: int) -> list[int]:
    """The processes below this one."""
    return [each for child in children_of(pid) for each in (child, *family_of(child))]


def use_all(server: Server) -> None:
    """Ask for what needs a process of its own: an adapter's template, and a form."""
    messages = [{"role": "user", "content": "planet"}]
    body = {"messages": messages, "max_tokens": 4, "structured_outputs": {"regex": "[a-z]{3}"}}
    for model in ("own", "base"):
        answer = server.post("/v1/chat/completions", model=model, **body)
        assert answer.status_code == 200, answer.text


@pytest.mark.exhaustive
def test_what_hangs_is_seen_and_nothing_is_left_behind(tmp_path: Path) -> None:
    own = Path(shutil.copytree(ADAPTERS["upper"], tmp_path / "own"))
    (own / "chat_template.jinja").write_text(TEMPLATE)
    with serving(tmp_path, adapters={"own": own}) as server:
        ready = f"{server.url}/ready"
        use_all(server)
        engine = server.engine_pid()
        for parent in (server.process.pid, engine):
            forking = [pid for pid in children_of(parent) if FORK_SERVER in command_of(pid)]
            assert forking
            below = [each for pid in forking for each in (pid, *family_of(pid))]
            for pid in forking:
                os.kill(pid, signal.SIGKILL)
            until(lambda pids=below: not any(map(command_of, pids)), "an orphan")  # type: ignore[misc]
            use_all(server)

        assert httpx.get(ready, timeout=PATIENCE_S).status_code == 200
        os.kill(engine, signal.SIGSTOP)
        assert HANG_S + PULSE_S < 10
        until(lambda: httpx.get(ready, timeout=PATIENCE_S).status_code == 503, "it is not seen")
        assert "no sign of life" in httpx.get(ready, timeout=PATIENCE_S).text
        os.kill(engine, signal.SIGCONT)
        until(lambda: httpx.get(ready, timeout=PATIENCE_S).status_code == 200, "it stays so")
        use_all(server)

        os.kill(engine, signal.SIGSTOP)
        below = family_of(server.process.pid)
        assert len(below) >= 4, "the engine, two that fork, and a worker"
        server.process.kill()
        until(lambda: not any(map(command_of, below)), "an orphan")
