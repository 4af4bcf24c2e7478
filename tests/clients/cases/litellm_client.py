"""litellm as OpenAI's provider and as vLLM's, and its proxy in front of the server."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import litellm
import openai
from shared import MODEL, REVERSED, URL, WORD, Paint, run

ASK: Any = [{"role": "user", "content": WORD}]
KEY = f"sk-{secrets.token_hex(32)}"
"""The proxy does not start without a key."""
PROVIDERS = ("openai", "hosted_vllm")


def ask(provider: str, messages: Any = ASK, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 400, "num_retries": 0} | options
    return litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=f"{URL}/v1",
        api_key="none",
        messages=messages,
        **options,
    )


def one() -> None:
    for provider in PROVIDERS:
        assert ask(provider).choices[0].message.content == REVERSED
        try:
            ask(provider, [{"role": "user", "content": WORD * 1000}])
        except litellm.ContextWindowExceededError:  # a fallback would be asked
            continue
        raise AssertionError


def turns() -> None:
    for provider in PROVIDERS:
        messages = list(ASK)
        for _ in range(3):
            messages += [ask(provider, messages).choices[0].message.model_dump(), *ASK]


def stream() -> None:
    for provider in PROVIDERS:
        chunks = ask(provider, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == REVERSED


def tools() -> None:
    tool = {
        "type": "function",
        "function": {"name": "Paint", "parameters": Paint.model_json_schema()},
    }
    for provider in PROVIDERS:
        answer = ask(provider, tools=[tool], tool_choice="required")
        (call,) = answer.choices[0].message.tool_calls
        Paint.model_validate_json(call.function.arguments)
        back = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        ask(provider, [*ASK, answer.choices[0].message.model_dump(), back], tools=[tool])


def forms() -> None:
    for provider in PROVIDERS:
        answer = ask(provider, response_format=Paint)
        Paint.model_validate_json(answer.choices[0].message.content)


def proxy() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "litellm"), "--model", f"hosted_vllm/{MODEL}"]
    command += ["--api_base", f"{URL}/v1", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(
        command, stdout=sys.stderr, env=os.environ | {"LITELLM_MASTER_KEY": KEY}
    )
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
        deadline = time.monotonic() + 300
        while True:
            try:
                client.models.list()
                break
            except openai.APIError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.5)
        asked: Any = {"model": MODEL, "messages": ASK, "temperature": 0}
        answer = client.chat.completions.create(**asked)
        assert answer.choices[0].message.content == REVERSED
        chunks: Any = client.chat.completions.create(**asked, stream=True)
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == REVERSED
    finally:
        server.terminate()
        server.wait(60)


run(one=one, turns=turns, stream=stream, tools=tools, forms=forms, proxy=proxy)
