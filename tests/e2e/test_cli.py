"""The commands: what they say when they can't start, and the demo from end to end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
import tiny
import typer
from command_line import CliRunner
from engine_thread import start_in_process
from patience import PATIENCE_S
from quick_start import Forked, start_weft
from typer.core import TyperGroup, TyperOption
from typer.main import get_command

from weft.cli import demo, engines
from weft.cli.args import ServeFlags, parse_lora_modules, spread_values
from weft.cli.main import app
from weft.core.config import CacheArgs, EngineArgs, LoraArgs, ModelArgs, SchedulerArgs, engine_args
from weft.core.errors import AdapterError, ConfigError, Unauthorized
from weft.core.sizes import show_bytes
from weft.fleet.process import _Spawned
from weft.fleet.supervisor import start_supervised
from weft.registry import Sources
from weft.registry.records import SetTenant
from weft.registry.shared import SharedRegistry
from weft.registry.stores import open_store
from weft.registry.tenants_file import parse_tenants
from weft.terminal import child_server
from weft.terminal.options import (
    engine_parameters,
    parse_bytes,
    parse_weights,
    tell_start,
)

BASE = str(tiny.BASE)
SMALL = ("--num-threads", "1", "--kv-cache-memory", "16M", "--adapter-memory", "16M")


def weft(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *args],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def refusal(*args: str) -> str:
    """The one line on stderr with which the command ends, behind what it tells of a start. It runs
    in this process, which has imported all that is slow."""
    done = CliRunner().invoke(app, args)
    assert (done.exit_code, done.stdout) == (1, "")
    *told, line = done.stderr.splitlines()
    assert all("INFO" in each and " start: " in each for each in told), told
    assert line.startswith("weft: error: ")
    return line


# -- flags -----------------------------------------------------------------------------------------


def test_every_field_of_the_engine_has_a_flag_with_its_default() -> None:
    defaults = {p.name: p.default for p in engine_parameters()}
    parts = (ModelArgs, LoraArgs, CacheArgs, SchedulerArgs)
    names = {f.name for part in parts for f in fields(part)} | {f.name for f in fields(EngineArgs)}
    assert set(defaults) == names - {
        "model",
        "lora",
        "cache",
        "scheduler",
        "kv_events",
        "first_adapters",
    }
    for name in ("kv_cache_memory", "adapter_host_memory", "adapter_cache_bytes"):
        if defaults[name] is not None:
            defaults[name] = parse_bytes(defaults[name])
    defaults["tenant_weights"] = parse_weights(defaults["tenant_weights"])
    assert engine_args("x", **defaults) == EngineArgs(ModelArgs("x"))


def test_sizes() -> None:
    for text, size in (
        ("12", 12),
        ("1k", 1024),
        ("1.5M", 3 << 19),
        ("2GiB", 2 << 30),
        ("1TB", 1 << 40),
    ):
        assert parse_bytes(text) == size
    assert [show_bytes(n) for n in (5, 1 << 30, 3 << 19)] == ["5", "1G", "1536K"]
    for bad in ("", "G", "2X", "-1", "1 2", "9" * 400):
        with pytest.raises(typer.BadParameter):
            parse_bytes(bad)


def test_several_modules_may_follow_one_flag() -> None:
    flag = "--lora-modules"
    spread = spread_values([flag, "a=x", "b=y", "base", "c=z", "--port", "1", flag, "d=w"])
    assert spread == [flag, "a=x", flag, "b=y", "base", "c=z", "--port", "1", flag, "d=w"]
    assert spread_values([flag]) == [flag]
    assert spread_values([flag, "[{}]", '{"a": 1}']) == [flag, "[{}]", flag, '{"a": 1}']


def test_several_names_may_follow_one_flag_behind_the_base() -> None:
    flag = "--served-model-name"
    assert spread_values(["m", flag, "a", "b", "--port", "1"]) == [
        *("m", flag, "a", flag, "b"),
        *("--port", "1"),
    ]
    assert spread_values(["m", flag, "a", "--lora-modules", "x=y", "z=w"]) == [
        *("m", flag, "a"),
        *("--lora-modules", "x=y", "--lora-modules", "z=w"),
    ]
    for unchanged in ([flag, "a", "m"], ["m", f"{flag}=a", "b"], ["m", flag, "a", flag, "b"], []):
        assert spread_values(unchanged) == unchanged


def test_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: str) -> list[tuple[str, str]]:
        return [(module.name, module.path) for module in parse_lora_modules(text)]

    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert parse("a=/x=y") == [("a", "/x=y")]
    one = '{"name": "a", "path": "rel", "base_model_name": "b"}'
    assert parse(one) == [("a", f"{tmp_path}/rel")]
    assert parse(f'[{one}, {{"name": "b", "path": "/y"}}]') == [
        ("a", f"{tmp_path}/rel"),
        ("b", "/y"),
    ]
    assert parse("a=org/here") == [("a", f"{tmp_path}/org/here")]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for spelled in ("org/there@v1", "hf://org/there@v1"):
        [module] = parse_lora_modules(f"a={spelled}")
        assert (module.path, module.folder) == (spelled, None)
        with pytest.raises(AdapterError, match="can't be fetched") as refused:
            Sources().open(module.path)
        typed = "there is no folder org/there@v1, and " in refused.value.message
        assert typed == (spelled == "org/there@v1"), "a mistyped path is not a name on the hub"
    for bad in ("a", "=x", "a=", "{", '{"name": "a"}', "{}", "[1]", '["a"]', "[[]]"):
        with pytest.raises(ConfigError):
            parse(bad)


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    assert ServeFlags().keys() == []
    monkeypatch.setenv("WEFT_API_KEY", "one, two,")
    assert ServeFlags().keys() == ["one", "two"]
    assert ServeFlags(api_key=["three"]).keys() == ["three"]
    with pytest.raises(ConfigError, match="WEFT_API_KEY"):
        ServeFlags(tenants=Path("tenants.toml")).tenants_file()
    monkeypatch.setenv("WEFT_API_KEY", "")
    assert ServeFlags().keys() == []


@pytest.mark.parametrize("given", [",", " , ,", " ", "good,schl\u00fcssel", "name=\u00fc"])
def test_a_variable_without_good_keys_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the server would be open to all, though somebody meant it to have a key."""
    monkeypatch.setenv("WEFT_API_KEY", given)
    with pytest.raises(ConfigError, match="WEFT_API_KEY"):
        ServeFlags().keys()


def test_a_new_key_is_printed_with_the_lines_for_the_file() -> None:
    flags = ["--role", "use", "--role", "publish", "--days", "3"]
    made = CliRunner().invoke(app, ["key", "new", "acme", *flags])
    assert made.exit_code == 0, made.output
    secret, _, lines = made.output.partition("\n\n")
    keys = parse_tenants(lines).keychain()
    caller = keys.caller(secret.encode(), datetime.now(UTC))
    assert (caller.tenant, caller.roles) == ("acme", {"use", "publish"})
    assert secret not in lines and len(secret) > 40
    with pytest.raises(Unauthorized, match="Expired"):
        keys.caller(secret.encode(), datetime.now(UTC) + timedelta(days=4))
    dotted = CliRunner().invoke(app, ["key", "new", "a.b", "--id", "x"])
    assert parse_tenants(dotted.output.partition("\n\n")[2]).members["a.b"].keys[0].id == "x"
    assert CliRunner().invoke(app, ["key", "new", "a/b"]).exit_code == 1


def test_keys_that_cannot_be_made() -> None:
    for flags, told in (
        (
            ["ac me"],
            'the file can\'t have such a key: tenants."ac me": it must be letters and digits',
        ),
        (["acme", "--role", "boss"], "--role takes use, publish or admin, got 'boss'"),
        (["acme", "--days", "999999999"], "'999999999' is too large"),
        (["acme", "--id", 'a"b'], "the file can't have such a key: tenants.acme.keys[0].id"),
    ):
        done = CliRunner().invoke(app, ["key", "new", *flags])
        shown = " ".join((done.output + done.stderr).replace("│", " ").split())
        assert done.exit_code in (1, 2) and told in shown, shown


def test_a_server_that_is_not_there_is_named() -> None:
    line = refusal("push", str(tiny.ADAPTERS["upper"]), "up", "--url", "127.0.0.1:9")
    assert "can't reach http://127.0.0.1:9: Connection refused" in line


def test_a_stdout_that_nobody_reads_is_no_reason_not_to_serve(tmp_path: Path) -> None:
    code = "from weft.cli.serve import show; show('ready'); import sys; sys.stderr.write('serves')"
    unread, out = os.pipe()
    os.close(unread)
    log, link = tmp_path / "log", os.open(os.devnull, os.O_RDONLY)
    with log.open("wb") as errors:
        process = Forked(out, errors.fileno(), link, code=code)
    os.close(out)
    os.close(link)
    assert process.wait(PATIENCE_S) == 0
    assert log.read_text() == "serves"


def test_weights_of_tenants() -> None:
    assert parse_weights('{"acme": 2, "b": 0.5}') == {"acme": 2.0, "b": 0.5}
    assert engine_args("m", tenant_weights={"a": 2.0}).scheduler.tenant_weights == {"a": 2.0}
    for bad in (
        *("acme=2", "[1]", '{"acme": "2"}', '{"acme": true}', '{"acme": null}'),
        *("[" * 100_000, f'{{"acme": {"9" * 400}}}'),
    ):
        with pytest.raises(typer.BadParameter):
            parse_weights(bad)
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError):
            SchedulerArgs(tenant_weights={"a": weight})
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError):
            LoraArgs(max_adapter_wait=seconds)


# -- refusals --------------------------------------------------------------------------------------


def test_help_and_version() -> None:
    assert re.fullmatch(r"weft \d+\.\d+\.\d+\n", weft("--version").stdout)
    assert "--lora-modules" in CliRunner().invoke(app, ["serve", "--help"]).stdout


@pytest.mark.parametrize("names", [[], ["bench"], ["cluster"], ["registry"]])
def test_help_of_a_group_says_what_each_command_is_for(names: list[str]) -> None:
    shown = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "80"}).stdout
    group = get_command(app)
    for name in names:
        assert isinstance(group, TyperGroup)
        group = group.commands[name]
    assert isinstance(group, TyperGroup)
    words = " ".join(shown.split())
    for name, command in group.commands.items():
        first = " ".join((command.help or "").split("\n\n")[0].split())
        assert first and f" {name} {first}" in words
    assert words.endswith("Show this message and exit.") and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("command", ["serve", "eval", "plan"])
def test_help_cuts_nothing(command: str) -> None:
    """These have the longest names."""
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"<(int|str|float|bool)|\(\d+[KMG]\)|\{BASE\}", shown)
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    for option in group.commands[command].params:
        if isinstance(option, TyperOption) and not option.hidden:
            assert all(f"{name} " in shown.replace("\n", " ") for name in option.opts)


def test_flags_of_other_servers_are_answered_with_what_takes_their_place() -> None:
    for flag, instead in (
        ("--model=x", "weft serve BASE"),
        ("--modle=x", "weft serve BASE"),
        ("--max-cpu-loras", "host-memory"),
        ("--lora-paths", "is --lora-modules"),
        ("--trust-remote-code", "leave it out"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
    ):
        done = CliRunner().invoke(app, ["serve", BASE, flag, "3"])
        told = " ".join(done.output.replace("│", " ").split())
        assert done.exit_code == 2 and instead in told, told


def test_an_unknown_flag_is_a_usage_error() -> None:
    done = CliRunner().invoke(app, ["serve", BASE, "--max-lorass", "3"])
    assert done.exit_code == 2 and "--max-lorass" in done.stderr


def test_a_long_start_is_told_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_start("getting ready")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tell_start("working it out")
    assert capsys.readouterr() == ("", "weft: working it out\n")


def test_values_of_the_wrong_kind_are_named_with_what_is_allowed() -> None:
    for command, flag, value, told in (
        ("serve", "--quantization", "int5", "'int5' is not one of 'fp8', "),
        ("serve", "--max-num-seqs", "many", "'many' is not a whole number."),
        ("top", "--interval", "x", "'x' is not a number."),
        ("top", "--interval", "0", "'0' is too small: it takes 0.1 or more."),
        ("top", "--interval", "inf", "'inf' is too large: it takes 86400.0 or less."),
        ("chat", "--temperature", "inf", "'inf' is too large: it takes 100.0 or less."),
        ("check", "--max-lora-rank", "999", "'999' is too large: it takes 256 or less."),
        ("plan", "--rank", "999", "'999' is too large: it takes 256 or less."),
    ):
        done = CliRunner().invoke(app, [command, BASE, flag, value])
        shown = " ".join(done.output.replace("│", " ").split())
        assert done.exit_code == 2 and f"Invalid value for '{flag}': {told}" in shown, shown


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("serve", ["BASE"]),
        (f"serve {BASE}", ["--served-model-name", "--lora-modules", "--adapter-cache-dir"]),
        ("push folder", ["NAME"]),
        ("push folder name", ["--url", "--registry"]),
        ("chat", ["MODEL", "--url", "--system"]),
        ("top", ["URL"]),
        ("label name --registry folder", ["KEY=VALUE..."]),
    ],
)
def test_texts_that_are_not_utf_8_or_empty_are_named(command: str, names: list[str]) -> None:
    for name in names:
        flag = [name] if name.startswith("-") else []
        done = CliRunner().invoke(app, [*command.split(), *flag, "a=\udcff"])
        assert done.exit_code == 2
        assert f"Invalid value for '{name}': it must be UTF-8." in done.stderr
        if not flag:
            done = CliRunner().invoke(app, [*command.split(), ""])
            assert f"Invalid value for '{name}': it must not be empty." in done.stderr


def test_values_that_are_refused_before_anything_loads(tmp_path: Path) -> None:
    modules = ("--lora-modules", f"a={tmp_path}", f"a={tmp_path}")
    os.mkfifo(pipe := tmp_path / "pipe")
    (key := tmp_path / "key").write_bytes(bytes(32))
    for flags, message in (
        (("--max-loras", "0"), "--max-loras must be at least 1"),
        (("--lora-root", f"{tmp_path}/nowhere"), "nowhere: no such folder"),
        (("--lora-root", "~nobody-here"), "~nobody-here: no such folder"),
        (("--lora-modules", "upper"), "takes name=path"),
        (("--lora-modules", f"a={tmp_path}/nowhere"), f"'a' ({tmp_path}/nowhere): no such folder"),
        (modules, "the name is given twice"),
        (("--lora-modules", f"{BASE}={tmp_path}"), "this is a name of the base model"),
        (("--max-num-seqs", "99999999999999999999"), "--max-num-seqs must be at most"),
        (("--num-threads", "0"), "--num-threads must be at least 1"),
        (("--kv-cache-memory", "0"), "--kv-cache-memory must be at least 1"),
        (("--api-key", ""), "--api-key must be"),
        (("--max-body-size", "0"), "--max-body-size must be at least 1"),
        (("--port=0", "--metrics-port=0", "--metrics-host=a b"), "--metrics-host a b: "),
        (("--port=9", "--metrics-port=9"), "--metrics-port has the same port as --port: 9"),
        (
            ("--port=9", "--metrics-port=9", "--metrics-host=0.0.0.0"),
            "--metrics-port has the same port as --port: 9",
        ),
        (
            ("--port=9", "--fleet=x:1", "--fleet-key=k", "--fleet-listen=0.0.0.0:9"),
            "--fleet-listen has the same port as --port: 9",
        ),
        (("--metrics-host", "0.0.0.0"), "--metrics-host needs --metrics-port too"),
        (("--registry-boot", "eager"), "--registry-boot needs --registry too"),
        (("--fleet-listen", "127.0.0.1:7071"), "--fleet-listen needs --fleet too"),
        (("--no-api",), "--no-api needs --fleet too"),
        (("--fleet", "nodes"), "--fleet needs --fleet-key too"),
        (("--request-timeout", "0"), "--request-timeout must be more than 0"),
        (("--lora-root", f"{tmp_path}/\udcff"), "--lora-root must be UTF-8"),
        (("--audit-log", str(pipe)), f"--audit-log {pipe}: it is a pipe that nobody reads"),
        (("--tenants", str(pipe)), f"--tenants {pipe}: it is no regular file"),
        ((f"--fleet={pipe}", f"--fleet-key={key}"), f"--fleet {pipe}: no regular file"),
        (("--fleet=x:1", f"--fleet-key={pipe}"), f"--fleet-key {pipe}: it is no regular file"),
        (("--fleet=x:1", "--fleet-key=/dev/zero"), "--fleet-key /dev/zero: it is no regular file"),
    ):
        assert message in refusal("serve", BASE, *flags)


def test_a_taken_port_is_refused_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ("--metrics-port", "0", "--port", "0")
        for flag in ("--port", "--metrics-port"):
            line = refusal("serve", "/no/such/model", *flags, flag, port)
            assert f"can't listen on 127.0.0.1:{port}: Address already in use ({flag})" in line
    line = refusal("serve", "/no/such/model", "--port=0", "--host=192.0.2.1")
    assert "can't listen on 192.0.2.1:0: Cannot assign requested address (--host)" in line


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    line = refusal("serve", BASE, "--port=0")
    assert line == "weft: error: the working folder: No such file or directory"


def test_a_missing_base(tmp_path: Path) -> None:
    line = refusal("serve", str(tmp_path / "none"), "--port", "0")
    assert f"there is no folder {tmp_path / 'none'}" in line
    assert "is no base model" in refusal("serve", str(tmp_path), "--port", "0")
    line = refusal("serve", str(tiny.ADAPTERS["upper"]), "--port", "0")
    assert (
        "upper is an adapter, not a base model; weft serve takes adapters with --lora-modules"
        in line
    )
    too_long = "a" * 300
    assert too_long in refusal("serve", too_long, "--port", "0")


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    for file in tiny.BASE.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    line = refusal("serve", str(tmp_path), "--port", "0", *SMALL)
    assert "tokenizer" in line and "--skip-tokenizer-init" in line


def test_a_file_that_has_no_tenants_makes_no_registry(tmp_path: Path) -> None:
    file, registry = tmp_path / "tenants.toml", tmp_path / "registry"
    wrong = (
        (b"\xff\xfe", "it is not UTF-8"),
        (b"[", "it is not TOML"),
        (b"", "it has no tenants, and an import"),
    )
    for content, why in wrong:
        file.write_bytes(content)
        line = refusal("tenants", "import", str(file), "--registry", str(registry))
        assert f"error: {file}: {why}" in line and not registry.exists()
    file.unlink()
    os.mkfifo(file)
    line = refusal("tenants", "import", str(file), "--registry", str(registry))
    assert f"error: {file}: it is no regular file" in line and not registry.exists()


def test_what_a_registry_has_of_tenants_is_logged_like_all_else(tmp_path: Path) -> None:
    registry = str(tmp_path / "registry")
    with SharedRegistry(open_store(registry)) as shared:
        shared.change(SetTenant("acme", '{"burst": 3}'), "")
    flags = ("--registry", registry, "--port", "0", "--log-format", "json")
    done = CliRunner().invoke(app, ["serve", f"{tmp_path}/none", *flags])
    said = [json.loads(line)["message"] for line in done.stderr.splitlines() if line[:1] == "{"]
    assert any("tenant acme is left out: tenants.acme.burst" in message for message in said)


@pytest.mark.usefixtures("quick_engines")
def test_an_engine_that_cannot_start(capfd: pytest.CaptureFixture[str]) -> None:
    """Its process says nothing of its own."""
    few = ("--max-model-len", "100", "--num-gpu-blocks-override", "2")
    line = refusal("serve", BASE, "--port", "0", *SMALL, *few)
    assert "--max-model-len 100 does not fit in a KV cache of 32 tokens" in line
    written = capfd.readouterr()
    assert written.out == ""
    told = written.err.splitlines()
    assert all(" WARNING " in each or " INFO weft.core.stages: start: " in each for each in told)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora-backend", "nope"), "--lora-backend nope: there is none of this name, only auto,"),
        (("--max-num-batched-tokens", "9"), "must be at least --max-num-seqs 256, got 9"),
        (("--max-model-len", "513"), "--max-model-len 513 is more than the model's own limit of"),
    ],
)
def test_what_no_engine_can_do_is_refused_before_one_has_started(
    flags: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr("weft.cli.serve.start_engine", never)
    assert message in refusal("serve", BASE, "--port", "0", *SMALL, *flags)


def test_a_hangup_during_the_start_does_not_end_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when logs are rotated; a terminal that is closed ends it."""
    found: list[object] = []
    monkeypatch.setattr(
        "weft.cli.serve.run", lambda *_: found.append(signal.getsignal(signal.SIGHUP))
    )
    before = signal.getsignal(signal.SIGHUP)
    for has_terminal, flags in ((False, []), (True, []), (True, ["--audit-log", "-"])):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        monkeypatch.setattr("os.isatty", lambda _, has_terminal=has_terminal: has_terminal)
        assert CliRunner().invoke(app, ["serve", BASE, *flags]).exit_code == 0
    signal.signal(signal.SIGHUP, before)
    assert found == [signal.SIG_IGN, signal.SIG_DFL, signal.SIG_IGN]


@pytest.mark.usefixtures("quick_engines")
def test_an_adapter_larger_than_adapter_memory_is_told_in_bytes() -> None:
    adapter = ("--lora-modules", f"reverse={tiny.ADAPTERS['reverse']}", "--adapter-memory", "1K")
    line = refusal("serve", BASE, "--port", "0", *SMALL[:4], *adapter)
    assert "takes 143360 bytes of adapter memory, which has 1024 bytes" in line


def test_a_broken_adapter_at_the_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engines, "start_supervised", partial(start_supervised, start=start_in_process)
    )
    for file in tiny.ADAPTERS["upper"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    flags = ("--log-level", "warning", "--lora-modules", f"mine={tmp_path}")
    line = refusal("serve", BASE, "--port", "0", *SMALL, *flags)
    assert f"adapter 'mine' ({tmp_path}): use_dora" in line


def test_what_a_command_opens_is_never_taken_for_a_closed_stream(tmp_path: Path) -> None:
    """A server whose stderr is closed logs to nowhere, and not into a connection."""
    program = f"""
import sys
from weft.__main__ import main
sys.argv = ["weft", "--version"]
try:
    main()
except SystemExit:
    with open({str(tmp_path / "fds")!r}, "w") as file:
        print("lost", file=sys.stderr)
        file.write(str(file.fileno()))
"""
    closed = 'exec "$0" -c "$1" <&- >&- 2>&-'
    command = ["bash", "-c", closed, sys.executable, program]
    done = subprocess.run(command, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0 and int((tmp_path / "fds").read_text()) > 2


# -- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "status"), [("default_int_handler", -2), ("SIG_IGN", 0)])
def test_ctrl_c_while_a_command_imports_ends_it_quietly(action: str, status: int) -> None:
    """Where the shell has it ignored, as for jobs in the background, it stays ignored."""
    program = f"""
import os, signal, sys
from weft.__main__ import main
signal.signal(signal.SIGINT, signal.{action})
class CtrlC:
    def find_spec(self, *_):
        sys.meta_path.remove(self)
        os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
sys.argv = ["weft", "--version"]
main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (status, "")


def test_ctrl_c_does_not_reach_an_engine_that_imports() -> None:
    spawned = _Spawned(1)
    try:
        [line] = re.findall(
            r"SigBlk:\t(\w+)", Path(f"/proc/{spawned.process.pid}/status").read_text()
        )
        assert int(line, 16) & 1 << (signal.SIGINT - 1)
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        spawned.process.kill()
        spawned.process.join()
        spawned.folder.remove()


# -- the demo --------------------------------------------------------------------------------------


def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks few questions here. Its server is a process, as always, but imports nothing."""

    def start(command: list[str], stdout: BinaryIO, stderr: int) -> Forked:
        assert command[:3] == [sys.executable, "-m", "weft"] and stderr == subprocess.STDOUT
        return start_weft(command[3:], stdout)

    # The module itself is everybody's, and `start_weft` needs its Popen.
    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    monkeypatch.setattr(child_server, "subprocess", replaced)
    monkeypatch.setattr(demo, "WORDS_EACH", 1)
    monkeypatch.setattr(demo, "REPEATS", 1)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 0, done.output
    check_demo(done.stdout, num_answers=3 * 12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [(), ("--hybrid",)], ids=["dense", "hybrid"])
def test_the_whole_demo(options: tuple[str, ...]) -> None:
    done = weft("demo", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    check_demo(done.stdout, num_answers=7 * 8 * 12)


def check_demo(printed: str, num_answers: int) -> None:
    report = json.loads(printed.splitlines()[-1])
    assert report["ok"] is True and report["adapters"] == 11
    assert report["right"] == report["answers"] == num_answers
    assert report["status_after_unload"] == 404
    assert report["mixed_tokens_per_s"] > 0 and report["one_at_a_time_tokens_per_s"] > 0


def test_demo_without_its_examples(tmp_path: Path) -> None:
    assert "--examples path/to/examples/tiny" in refusal("demo", "--examples", str(tmp_path))


def test_the_demo_asks_no_other_server() -> None:
    """One that already listens on the port would be taken for its own."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refusal("demo", "--port", port)
    assert line.endswith(f"can't listen on 127.0.0.1:{port}: Address already in use (--port)")


def test_a_wheel_brings_what_the_demo_serves() -> None:
    project = tomllib.loads((tiny.ROOT.parents[1] / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["data-files"]
    expected = {"share/weft/tiny": ["examples/tiny/tasks.py"]}
    for part in ("base", *(f"adapters/{name}" for name in tiny.ADAPTERS)):
        expected[f"share/weft/tiny/{part}"] = [f"examples/tiny/{part}/*"]
    assert folders == expected


def test_traces_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "weft.metrics.traces", raising=False)
    serve = ("serve", "/no/such", "--port", "0")
    assert "pip install weft[otel]" in refusal(*serve, "--otlp-endpoint", "http://x")
    assert "there is no folder /no/such" in refusal(*serve)
