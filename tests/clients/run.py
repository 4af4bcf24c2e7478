"""Libraries that people use, each in an environment of its own, against one real server.

    run.py PYTHON [--envs DIR] [NAME ...]

PYTHON has Weft. DIR keeps the environments, which are made as they are needed. Without names, all
clients are tried. What works is printed as the table of docs/clients.md; the exit status is 1 if
something does not.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import tools
from tools import CASE_S, TINY, Case

HERE = Path(__file__).parent
START_S = 240.0
TEMPLATE = """\
{{ bos_token }}{% if tools and messages[0].role == 'system' %}<|system|>{{ tools | tojson }}<|end|>\
{% endif %}{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}\
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\
<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
"""It shows that the model calls tools."""

Results = dict[str, bool]
COLUMNS = {
    "one": "one turn",
    "turns": "several turns",
    "stream": "stream",
    "tools": "tools",
    "forms": "forms",
    "other": "other",
}


class Client(NamedTuple):
    """A library, and what is installed for it: the first package is the library itself."""

    title: str
    packages: tuple[str, ...]
    script: str
    """The cases, in Python, or in JavaScript for a package of npm."""

    @property
    def of_node(self) -> bool:
        return self.script.endswith(".mjs")


class Tool(NamedTuple):
    """A program that measures or evaluates servers."""

    title: str
    packages: tuple[str, ...]
    cases: dict[str, Case]
    """What it does, by the table's column."""
    of_node: bool = False


CLIENTS: dict[str, Client | Tool] = {
    "openai": Client("openai", ("openai==3.57.0",), "openai_client.py"),
    "anthropic": Client("anthropic", ("anthropic==2.14.0",), "anthropic_client.py"),
    "litellm": Client("litellm, and its proxy", ("litellm[proxy]==1.106.2",), "litellm_client.py"),
    "langchain": Client("LangChain", ("langchain-openai==1.7.4",), "langchain_client.py"),
    "llamaindex": Client(
        "LlamaIndex", ("llama-index-llms-openai-like==0.8.1",), "llamaindex_client.py"
    ),
    "instructor": Client("instructor", ("instructor==1.17.0",), "instructor_client.py"),
    "pydantic-ai": Client(
        "Pydantic AI", ("pydantic-ai-slim[openai]==2.68.0",), "pydantic_ai_client.py"
    ),
    "openai-agents": Client("openai-agents", ("openai-agents==0.24.0",), "openai_agents_client.py"),
    "ai-sdk": Client(
        "Vercel AI SDK",
        ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7"),
        "ai_sdk.mjs",
    ),
    "guidellm": Tool(
        "guidellm", ("guidellm==0.8.1",), {"turns": tools.guidellm_turns, "stream": tools.guidellm}
    ),
    "aiperf": Tool(
        "aiperf", ("aiperf==0.13.0",), {"turns": tools.aiperf_turns, "stream": tools.aiperf}
    ),
    "lm-eval": Tool(
        "lm-evaluation-harness",
        ("lm-eval[api]==0.4.13", "transformers"),
        {"one": tools.lm_eval},
    ),
    "promptfoo": Tool(
        "promptfoo",
        ("promptfoo@0.121.19",),
        {
            "one": tools.promptfoo,
            "turns": tools.promptfoo_turns,
            "tools": tools.promptfoo_tools,
            "forms": tools.promptfoo_forms,
        },
        of_node=True,
    ),
}


def environment(name: str, folder: Path) -> Path:
    """The client's environment, which is made anew if it does not hold the client's packages."""
    packages = CLIENTS[name].packages
    installed = folder / "installed.json"
    if installed.exists() and json.loads(installed.read_text()) == [*packages]:
        return folder
    if CLIENTS[name].of_node:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--no-audit", "--no-fund", *packages]
        subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
    else:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        command = [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*command, *packages, "pydantic"], check=True)
    installed.write_text(json.dumps(packages))
    return folder


def tried(name: str, env: Path, url: str) -> Results:
    """What works, by the case's name."""
    client = CLIENTS[name]
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(client, Tool):
            return {
                column: works(case, env, url, Path(folder, column))
                for column, case in client.cases.items()
            }
        script = HERE / "cases" / client.script
        program = str(env / "bin" / "python")
        if client.of_node:
            program, script = "node", Path(shutil.copy(script, env))  # where its packages are
        command = [program, str(script), url]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=CASE_S)
        lines = ran.stdout.splitlines()
        found: Results = json.loads(lines[-1]) if lines else {"one": False}
        return found


def works(case: Case, env: Path, url: str, folder: Path) -> bool:
    folder.mkdir()
    try:
        case(env, url, folder)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        print(f"--- {case.__name__}: {error}", file=sys.stderr)
        return False
    return True


def version_of(name: str, env: Path) -> str:
    if CLIENTS[name].of_node:
        return CLIENTS[name].packages[0].rpartition("@")[2]
    package = re.split(r"[\[=]", CLIENTS[name].packages[0])[0]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    command = [str(env / "bin" / "python"), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def row(name: str, version: str, results: Results) -> str:
    more = {key for key in results if key not in COLUMNS}
    shown = {True: "yes", False: "NO", None: ""}
    cells = [shown[results.get(case)] for case in COLUMNS]
    if more:
        cells[-1] = ", ".join(f"{each}: {shown[results[each]]}" for each in sorted(more))
    return f"| {CLIENTS[name].title} | {version} | {' | '.join(cells)} |"


def serve(weft: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server of the tiny base, whose context is long enough for what clients add, and its
    address."""
    model = Path(shutil.copytree(TINY / "base", folder / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps(config))
    log = folder / "server.log"
    command = [weft, "-m", "weft", "serve", str(model), "--port", "0"]
    command += ["--num-threads", "1", "--kv-cache-memory", "64M", "--adapter-memory", "64M"]
    command += ["--served-model-name", "base"]
    command += ["--lora-modules", f"reverse={TINY / 'adapters' / 'reverse'}"]
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"(http://[0-9.]+:\d+)/v1", log.read_text()):
            return server, found[1]
        time.sleep(0.1)
    server.kill()
    raise SystemExit(log.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    parser.add_argument("--envs", type=Path, default=Path(".venv-clients").absolute())
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    given = parser.parse_intermixed_args()
    fine = True
    print(f"| client | version | {' | '.join(COLUMNS.values())} |")
    print("|" + "---|" * (2 + len(COLUMNS)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        server, url = serve(given.python, Path(folder))
        try:
            for name in given.names or CLIENTS:
                env = environment(name, given.envs.absolute() / name)
                results = tried(name, env, url)
                fine = fine and all(results.values())
                print(row(name, version_of(name, env), results), flush=True)
        finally:
            server.terminate()
            server.wait(60)
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()
