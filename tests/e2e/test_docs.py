"""What the documentation shows is run, and what it lists is complete.

Python blocks and bash blocks of a page are run in order, in the root of the checkout, against one
server: the one that quickstart.md starts. A `text` block right after a block is its output, in
which `...` stands for anything. Blocks marked `.not-run` are not run; `NOT_RUN` counts them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import pytest
from command_line import CliRunner
from patience import PATIENCE_S
from quick_start import start_weft

from weft import RequestOutput, SamplingParams
from weft.cli.main import app
from weft.cli.reference import reference
from weft.core.config import engine_args
from weft.core.errors import ConfigError, InvalidRequest, Unreachable, WeftError, type_of_kind

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(.*)\n((?:(?!```).*\n)*)^```\n(\n*)", re.MULTILINE)
SERVE = "weft serve "
SMALL = ("--num-threads", "1", "--kv-cache-memory", "64M", "--adapter-memory", "64M")
NOT_RUN = {"quickstart.md": 1, "api.md": 1, "evaluating.md": 1, "fleet.md": 1}
"""Blocks that need what a test lacks: an empty machine, a model that calls tools, an extra, free
ports."""


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    runs: bool
    output: str | None
    """What it is said to print."""


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    end = None
    for fence in FENCE.finditer(page.read_text()):
        language, *marks = re.findall(r"[\w-]+", fence[1]) or [""]
        if language == "text" and found and fence.start() == end:
            found[-1] = Block(found[-1].language, found[-1].code, found[-1].runs, fence[2])
        else:
            found.append(Block(language, fence[2], "not-run" not in marks, None))
        end = fence.end()
    return found


BLOCKS = {page: blocks_of(page) for page in PAGES}
RUN = [page for page in PAGES if any(b.language in ("python", "bash") for b in BLOCKS[page])]


@dataclass(frozen=True)
class Server:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    def adapters(self) -> set[str]:
        return set(json.loads(self.get("/v1/loras"))["loras"])

    def unload(self, name: str) -> None:
        request = urllib.request.Request(f"{self.url}/v1/loras/{name}", method="DELETE")
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of quickstart.md, on a free port."""
    quickstart = BLOCKS[DOCS / "quickstart.md"]
    line = next(b.code for b in quickstart if b.code.startswith(SERVE)).replace("\\\n", " ")
    args = [*shlex.split(line)[1:], "--port", "0", *SMALL]
    log = tmp_path_factory.mktemp("server") / "log"
    with contextlib.chdir(ROOT), log.open("wb") as out:
        process = start_weft(args, out)
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while (found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        yield Server(int(found[1]))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


# -- blocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        # What this page runs, test_bench.py and test_bench_adapters.py run with less work.
        pytest.param(page, marks=[pytest.mark.exhaustive] if page.stem == "benchmarks" else [])
        for page in RUN
    ],
    ids=lambda page: page.stem,
)
def test_blocks_of(page: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that a page leaves loaded are not there for the next one. Models have less memory
    than they take unless told otherwise, as it takes time to clear it."""
    monkeypatch.chdir(ROOT)
    small = partial(engine_args, kv_cache_memory=64 << 20)
    monkeypatch.setattr("weft.llm.engine_args", small)
    names: dict[str, object] = {}
    before = server.adapters()
    for block in BLOCKS[page]:
        if not block.runs or block.language not in ("python", "bash"):
            continue
        code = block.code.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        printed = run_python(code, names) if block.language == "python" else run_bash(code)
        if block.output is not None:
            pattern = re.escape(block.output.strip()).replace(r"\.\.\.", ".*")
            assert re.fullmatch(pattern, printed.strip(), re.DOTALL), printed
        if page.name == "README.md" and block.language == "python":
            assert "tenalp" in printed
    for name in server.adapters() - before:
        server.unload(name)


def run_python(code: str, names: dict[str, object]) -> str:
    """What it prints; pages share their names between blocks."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "block", "exec"), names)
    close = getattr(names.pop("client", None), "close", lambda: None)
    close()
    return printed.getvalue()


def run_bash(code: str) -> str:
    """What it prints."""
    if code.startswith("weft "):
        return run_weft(shlex.split(code.replace("\\\n", " "))[1:])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, code + done.stdout + done.stderr
    return done.stdout


def run_weft(args: list[str]) -> str:
    """In this process, which has imported all that is slow. Of a server's command line only the
    flags are checked."""
    done = CliRunner().invoke(app, [*args, "--help"] if args[0] == "serve" else args)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_few_blocks_are_not_run() -> None:
    counts = {page.name: sum(not b.runs for b in blocks) for page, blocks in BLOCKS.items()}
    assert {name: count for name, count in counts.items() if count} == NOT_RUN


# -- completeness ----------------------------------------------------------------------------------


def test_commands_are_current() -> None:
    """If not: python -m weft.cli.reference > docs/cli.md"""
    assert (DOCS / "cli.md").read_text() == reference(app)


def test_api_lists_every_route_and_field(server: Server) -> None:
    page = (DOCS / "api.md").read_text()
    api = json.loads(server.get("/openapi.json"))
    documented = set(re.findall(r"`(?:(?:GET|POST|PUT|DELETE) )?(/[^ `]*)`", page))
    assert documented == {*api["paths"], "/openapi.json"}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        body = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for field in body["properties"]:
            assert f"`{field}`" in page, f"{path}: {field}"


def test_python_lists_every_field() -> None:
    page = (DOCS / "python.md").read_text()
    for kind in (SamplingParams, RequestOutput):
        for field in fields(kind):
            assert f"`{field.name}`" in page, f"{kind.__name__}.{field.name}"


def test_api_lists_every_error() -> None:
    page = (DOCS / "api.md").read_text()
    unlisted = (InvalidRequest, WeftError, ConfigError, Unreachable)
    for kind, error in type_of_kind.items():
        if error not in unlisted:
            assert f"| {error.status} | `{kind}` |" in page


def test_operations_lists_every_metric(server: Server) -> None:
    page = (DOCS / "operations.md").read_text()
    names = re.findall(r"^# TYPE ((?:weft|vllm):\S+)", server.get("/metrics"), re.MULTILINE)
    missing = [n for n in names if f"`{n}`" not in page and not n.endswith("_created")]
    assert names and not missing
    assert not set(re.findall(r"`((?:weft|vllm):\w+)`", page)) - set(names)


def test_troubleshooting_quotes_real_messages() -> None:
    """Each piece of a heading's message, between what differs, is in the source."""
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    told = re.sub(r'"\s*\n\s*f?"', "", sources)  # texts that go on in the next line
    shown = re.findall(r"^### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    pieces = [piece.strip() for text in shown for piece in text.split("…") if len(piece) > 3]
    missing = [piece for piece in pieces if piece not in told and "command not found" not in piece]
    assert len(pieces) > 20 and not missing


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_site_builds(tmp_path: Path) -> None:
    """Also: every page is in the navigation, and nothing is loaded from elsewhere."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "straight line" in (tmp_path / "architecture" / "index.html").read_text()
    html = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.?https?:[^>]+", html)
