"""`weft migrate`: commands of other servers."""

from __future__ import annotations

import re
import shlex
from functools import cache

import pytest
from command_line import CliRunner
from typer.main import get_command

from weft.cli import other_flags
from weft.cli.main import app
from weft.cli.migrate import Options, translated
from weft.cli.other_servers import VARIABLES
from weft.core.errors import ConfigError


@cache
def options() -> Options:
    return Options(get_command(app))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "vllm serve org/m --enable-lora --lora-modules a=./a b=./b --max-loras 8 --port=8001",
            "org/m --lora-modules a=./a b=./b --max-loras 8 --port 8001",
        ),
        (
            "CUDA_VISIBLE_DEVICES=1 python3 -m vllm.entrypoints.openai.api_server --model m"
            " --max_model_len 4096 -tp 2 --trust-remote-code",
            "m --max-model-len 4096 --tensor-parallel-size 2",
        ),
        (
            "python -m sglang.launch_server --model-path m --lora-paths x=./x ./y \\\n"
            "  --max-loras-per-batch 4 --mem-fraction-static 0.8 --disable-radix-cache",
            "m --lora-modules x=./x ./y=./y --max-loras 4 --gpu-memory-utilization 0.8"
            " --no-enable-prefix-caching",
        ),
        ("lorax-launcher --model-id m --port 80", "m --port 80"),
        (
            "vllm serve m --tool-call-parser llama4_pythonic --reasoning-parser deepseek_r1",
            "m",
        ),
        ("vllm serve m --tool-call-parser pythonic", "m --tool-call-parser pythonic"),
        ("vllm serve m \\\n  --port 80 \\", "m --port 80"),
        ("vllm serve m --model m --port 80", "m --port 80"),
        ("sudo vllm serve m --port 1", "m --port 1"),
        ("sudo -E docker run -p 80:80 vllm/vllm-openai --model m", "m"),
        ("HF_TOKEN=x uv run vllm serve m", "m"),
        ("env A=b nohup /opt/vllm/bin/python3.12 -m sglang.launch_server --model-path m", "m"),
        (
            "vllm serve m --served-model-name x y --api-key k l --port 1",
            "m --served-model-name x --served-model-name y --api-key k --api-key l --port 1",
        ),
        (
            "python -m sglang.launch_server --lora-target-modules q_proj k_proj --model-path m"
            " --max-seq-len-to-capture 8192",
            "m",
        ),
        (
            "docker run --gpus all -v ~/.cache:/root/.cache -p 8000:8000 --ipc=host"
            " vllm/vllm-openai:latest --model m --enable-lora --seed 0",
            "m",
        ),
        (
            "docker run --gpus all lmsysorg/sglang:latest python3 -m sglang.launch_server"
            " --model-path m --lora-paths x=./x --page-size 16",
            "m --lora-modules x=./x --block-size 16",
        ),
        (
            "uv run --with vllm vllm serve m --quantization awq --kv-cache-memory-bytes 8G",
            "m --kv-cache-memory 8G",
        ),
        ("cd /srv && nohup vllm serve m --port 1 > vllm.log 2>&1 &", "m --port 1"),
        ("python -m sglang.launch_server --model-path m 2>errors.log; echo done", "m"),
        ("/bin/sh -c 'cd /srv; exec vllm serve m --port 1'", "m --port 1"),
        ("docker run --entrypoint sh vllm/vllm-openai -c 'vllm serve m'", "m"),
        ("docker run --env-file deploy/vllm.env rocm/vllm:latest vllm serve m", "m"),
        ("docker run -v ./vllm:/models vllm/vllm-openai@sha256:0a --model m", "m"),
        ("docker run --rm registry.example.com/server:1 vllm serve m", "m"),
        (
            "lorax-launcher --model-id m --num-shard 2 --hostname 0.0.0.0 -p 80 --quantize awq"
            " --max-active-adapters 64 --max-batch-prefill-tokens 4096 --sharded true",
            "m --tensor-parallel-size 2 --host 0.0.0.0 --port 80 --max-loras 64"
            " --max-num-batched-tokens 4096",
        ),
        (
            "sglang serve --model-path m --lora-paths"
            """ '{"lora_name": "a", "lora_path": "./a", "pinned": false}'""",
            """m --lora-modules '{"name": "a", "path": "./a"}'""",
        ),
        (
            """vllm serve m --lora-modules '{"name": "a", "path": "./a"}'""",
            """m --lora-modules '{"name": "a", "path": "./a"}'""",
        ),
        (
            """vllm serve m --generation-config vllm --allowed-origins '["http://a","http://b"]'""",
            "m --generation-config none --allowed-origins http://a --allowed-origins http://b",
        ),
        (
            "sglang serve --model-path m --enable-deterministic-inference --is-embedding"
            " --sampling-defaults openai",
            "m --deterministic --generation-config none",
        ),
    ],
)
def test_commands_of_other_servers(command: str, expected: str) -> None:
    found = translated(command, options())
    assert shlex.split(found.command) == shlex.split(f"weft serve {expected}")
    assert not found.missing


@pytest.mark.parametrize(
    ("flags", "shown", "told"),
    [
        ("--generation-config ./mine --port 1", "--generation-config ./mine", "not one of"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size 2", "--tensor-parallel-size"),
        ("--quantization modelopt --port 1", "--quantization modelopt", "modelopt"),
        ("--no-such-sizes 1 2 4 --port 1", "--no-such-sizes 1 2 4", "does not know"),
        ("--tool-call-parser jamba --port 1", "--tool-call-parser jamba", "not one of 'auto'"),
        ("--max-model-len many", "--max-model-len many", "whole number"),
        ("--no-such-flag x --port 1", "--no-such-flag x", "does not know"),
        ("--dtype half", "--dtype half", "half"),
        ("--port 1 --max-model-len", "--max-model-len", "its value is missing"),
        ("--port 1 --lora-modules", "--lora-modules", "its value is missing"),
        ("--overlap=true --port 1", "--overlap true", "takes no value"),
        ("'a word' --port 1", "'a word'", "one base model, which is m"),
        ("--model other --port 1", "--model other", "one base model, which is m"),
    ],
)
def test_what_is_missing_is_named(flags: str, shown: str, told: str) -> None:
    found = translated(f"vllm serve m {flags}", options())
    ((flag, why),) = found.missing.items()
    assert flag == shown and told in why
    assert found.command == ("weft serve m --port 1" if "--port" in flags else "weft serve m")


@pytest.mark.parametrize(
    "command",
    ["VLLM_API_KEY=secret vllm serve m", "docker run -e VLLM_API_KEY vllm/vllm-openai --model m"],
)
def test_a_key_in_the_environment_is_not_lost_silently(command: str) -> None:
    found = translated(command, options())
    assert list(found.missing) == ["VLLM_API_KEY"]
    assert "WEFT_API_KEY" in found.missing["VLLM_API_KEY"]


def test_variables_stay_variables() -> None:
    line = "vllm serve $MODEL --api-key=${KEY} --revision '$x' -tp ${TP:-2}"
    found = translated(line, options())
    kept = """"$MODEL" --api-key "${KEY}" --revision '$x' --tensor-parallel-size "${TP:-2}" """
    assert found.command == f"weft serve {kept.strip()}" and not found.missing


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("vllm serve m", ["vLLM listens on all addresses"]),
        ("vllm serve m --host 127.0.0.1", []),
        ("python -m sglang.launch_server --model-path m", ["add --port 30000"]),
        ("python -m sglang.launch_server --model-path m --port 1", []),
        ("lorax-launcher --model-id m", ["LoRAX listens on all addresses", "add --port 3000"]),
        (
            "docker run lmsysorg/sglang python3 -m sglang.launch_server --model m",
            ["Ports, volumes"],
        ),
    ],
)
def test_where_the_other_server_listens_is_told(command: str, told: list[str]) -> None:
    notes = translated(command, options()).notes
    assert len(notes) == len(told)
    assert all(words in note for words, note in zip(told, notes, strict=True))


def test_a_pin_of_sglang_is_not_lost_silently() -> None:
    adapter = """'{"lora_name": "a", "lora_path": "./a", "pinned": true}'"""
    found = translated(f"sglang serve --model-path m --lora-paths {adapter}", options())
    assert list(found.missing) == ["pinned of a"]


def test_a_flag_of_adapters_with_a_word_that_is_none_is_shown_with_the_others() -> None:
    found = translated("vllm serve m --lora-modules a=./a b=./b c", options())
    assert found.command == "weft serve m --lora-modules a=./a b=./b c" and not found.missing


def test_the_table_leads_to_flags_that_there_are() -> None:
    assert all(name in options() for name in other_flags.RENAMED.values())
    for text in (other_flags.NEEDLESS | other_flags.MISSING | VARIABLES).values():
        for word in re.sub("[(),]", " ", text).split():
            if word.startswith("--"):
                assert word in options(), word


@pytest.mark.parametrize(
    "command",
    [
        "",
        "vllm serve",
        "vllm serve ''",
        "vllm serve 'x",
        "vllm serve --port 1",
        "python serve.py llama",
        "vllm bench serve --model m",
        "vllm chat --url http://127.0.0.1:8000",
        "python -m sglang.bench_serving --model m",
        "kubectl run x --image=vllm/vllm-openai -- --model m",
        '["vllm", "serve", "m"]',
    ],
)
def test_what_is_no_such_command(command: str) -> None:
    with pytest.raises(ConfigError):
        translated(command, options())


def test_adapters_are_checked() -> None:
    tiny, runner = "examples/tiny", CliRunner()
    command = f"vllm serve {tiny}/base --enable-lora --lora-modules up={tiny}/adapters/upper"
    done = runner.invoke(app, ["migrate", command])
    assert done.exit_code == 0, done.output
    assert "  --enable-lora: adapters are always served\n" in done.stdout
    assert "  up: served\n" in done.stdout
    assert runner.invoke(app, ["migrate", *command.split()]).stdout == done.stdout
    done = runner.invoke(app, ["migrate", f"{command} no={tiny}/adapters/none"])
    assert done.exit_code == 1 and "  no: not checked: " in done.stdout
    assert runner.invoke(app, ["migrate", "vllm"]).exit_code == 2
