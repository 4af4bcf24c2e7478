"""litellm in several turns, and guidellm, against a real server. They need other packages than
Weft, so `make test-clients` runs this in an environment of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[2] / "examples" / "tiny"
START_S = 240.0


def main(weft: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        command = [weft, "-m", "weft", "serve", str(TINY / "base"), "--port", "0"]
        command += ["--num-threads", "1", "--kv-cache-memory", "64M", "--adapter-memory", "64M"]
        command += ["--served-model-name", "base"]
        command += ["--lora-modules", f"reverse={TINY / 'adapters' / 'reverse'}"]
        with log.open("wb") as out:
            server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            url = address(server, log)
            several_turns(url)
            load(url, Path(folder))
        finally:
            server.terminate()
            server.wait(60)


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        if found := re.search(r"(http://[0-9.]+:\d+)/v1", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(log.read_text())


def several_turns(url: str) -> None:
    """Each turn sends back the messages of the answers before it, as litellm made them."""
    import litellm

    for provider in ("openai", "hosted_vllm"):
        messages: list[Any] = []
        for word in ("planet", "garden", "window"):
            messages.append({"role": "user", "content": word})
            answer = litellm.completion(
                model=f"{provider}/reverse",
                api_base=f"{url}/v1",
                api_key="none",
                messages=messages,
                temperature=0,
                max_tokens=12,
                num_retries=0,
            )
            message = answer.choices[0].message
            messages.append(message.model_dump())
        assert messages[1]["content"] == "tenalp", messages[1]
        print(f"litellm as {provider}: {len(messages) // 2} turns")


def load(url: str, folder: Path) -> None:
    """A short run of guidellm, all of whose requests must succeed."""
    report = folder / "report.json"
    command = [str(Path(sys.executable).parent / "guidellm"), "run"]
    command += ["--backend", f"kind=openai_http,target={url},model=reverse"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", "kind=max_requests,count=8"]
    command += ["--tokenizer", f"kind=hf_auto,model={TINY / 'base'}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"]
    command += ["--output", f"kind=json,path={report}", "--disable-console-interactive"]
    subprocess.run(command, check=True)
    for benchmark in json.loads(report.read_text())["benchmarks"]:
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] == 8 and not totals["errored"], totals
        print(f"guidellm: {totals['successful']} requests")


if __name__ == "__main__":
    main(sys.argv[1])
