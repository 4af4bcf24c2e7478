"""`weft migrate`: translates the command of another server into one of Weft."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from weft.cli.args import ServeFlags, parse_lora_modules
from weft.cli.other_servers import SERVERS, VARIABLES, ServerCommand, server_command
from weft.core.errors import ConfigError, WeftError
from weft.terminal.options import ending_in_one_line
from weft.terminal.plain import plain

BASE = ("--model", "--model-path", "--model-id")
"""The flags by which other servers take the base model, which is an argument here."""

RENAMED = {
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--context-length": "--max-model-len",
    "--disable-overlap-schedule": "--no-overlap",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--hostname": "--host",
    "--lora-extra-vocab-size": "--max-added-tokens",
    "--lora-paths": "--lora-modules",
    "--max-active-adapters": "--max-loras",
    "--max-batch-prefill-tokens": "--max-num-batched-tokens",
    "--max-loras-per-batch": "--max-loras",
    "--max-running-requests": "--max-num-seqs",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--num-shard": "--tensor-parallel-size",
    "--page-size": "--block-size",
    "--quantize": "--quantization",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "-p": "--port",
    "-tp": "--tensor-parallel-size",
}

NEEDLESS = {
    "--async-scheduling": "it is the default (--overlap)",
    "--attention-backend": "the best kernels for the device are chosen",
    "--compilation-config": "kernels and CUDA graphs need no settings",
    "--disable-cuda-graph": "CUDA graphs are captured in seconds and change no result",
    "--disable-log-requests": "requests are logged only with --log-level debug",
    "--disable-log-stats": "figures are at /metrics, and not in the log",
    "--distributed-executor-backend": "each GPU has a process of this server",
    "--enable-auto-tool-choice": "tools work wherever the chat template takes them",
    "--enable-chunked-prefill": "long prompts are always read in chunks",
    "--enable-lora": "adapters are always served",
    "--enable-metrics": "metrics are always at /metrics",
    "--enforce-eager": "CUDA graphs are captured in seconds and change no result",
    "--grammar-backend": "structured outputs always use xgrammar",
    "--guided-decoding-backend": "structured outputs always use xgrammar",
    "--lora-backend": "the best kernels for the device are chosen",
    "--lora-dtype": "adapters are in the model's precision",
    "--lora-target-modules": "an adapter may be on any projection of the model",
    "--max-cpu-loras": "adapters on the host are bounded in bytes, by --adapter-host-memory",
    "--max-loaded-loras": "adapters on the host are bounded in bytes, by --adapter-host-memory",
    "--max-seq-len-to-capture": "CUDA graphs serve requests of any length",
    "--no-enable-chunked-prefill": "long prompts are always read in chunks",
    "--random-seed": "each request without a seed gets one of its own",
    "--sampling-backend": "the best kernels for the device are chosen",
    "--schedule-policy": "tenants take turns by weight (--tenant-weights)",
    "--scheduling-policy": "tenants take turns by weight (--tenant-weights)",
    "--sharded": "--tensor-parallel-size alone says it",
    "--seed": "each request without a seed gets one of its own",
    "--structured-outputs-config": "structured outputs always use xgrammar",
    "--swap-space": "requests that lose their KV cache are computed again",
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--uvicorn-log-level": "--log-level sets it for all",
}
"""Flags that are left out, and why nothing is lost."""

STATED = {
    "--kv-cache-dtype": ("auto",),
    "--load-format": ("safetensors",),
    "--quantization": ("awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin"),
    "--reasoning-parser": (
        *("deepseek-r1", "deepseek_r1", "deepseek-v3", "deepseek_v3", "ernie45", "glm45", "glm47"),
        *("gpt-oss", "hunyuan", "hunyuan_a13b", "kimi", "kimi_k2", "minimax", "minimax_m2"),
        *("nemotron_3", "nemotron_v3", "olmo3", "openai_gptoss", "qwen3", "qwen3-thinking"),
    ),
    "--tool-call-parser": (
        *("deepseekv3", "deepseekv31", "glm", "gpt-oss", "granite4", "hunyuan_a13b", "llama3"),
        *("llama4_json", "llama4_pythonic", "minimax-m2", "openai", "qwen", "qwen25", "qwen3_xml"),
    ),
}
"""Values that say what the checkpoint itself says, so that they are left out. Among them are names
that Weft does not know for formats of calls and of reasoning, as the model's chat template shows
which format it is."""

_DATA_PARALLEL = "start a server for each copy of the model; they can share a registry"
_PIPELINE = "a model is spread over GPUs by --tensor-parallel-size"
_DRAFTS = (
    "there are no draft models; --speculative guesses from the text (ngram) or by the model's own"
    " head (mtp)"
)
_PRELOADED = "name each adapter as NAME=PATH in --lora-modules"
MISSING = {
    "--adapter-cycle-time-s": "--max-adapter-wait bounds how long a request waits for its adapter",
    "--adapter-id": _PRELOADED,
    "--adapter-source": "adapters come from --lora-root or from --registry",
    "--chat-template": "the template of the checkpoint, or of the adapter, is used",
    "--data-parallel-size": _DATA_PARALLEL,
    "--dp": _DATA_PARALLEL,
    "--dp-size": _DATA_PARALLEL,
    "--hf-overrides": "put the changed config.json beside the weights",
    "--kv-cache-dtype": "the KV cache has the precision of the model",
    "--kv-transfer-config": "prompts and answers are computed by the same server",
    "--limit-mm-per-prompt": "images are not served; the text part of such a model is",
    "--max-concurrent-requests": "--max-num-seqs bounds the requests that run, and --max-queue"
    " those that wait",
    "--max-input-length": "--max-model-len bounds prompt and answer together",
    "--max-total-tokens": "--max-model-len bounds a request and --kv-cache-memory the cache",
    "--nnodes": "a model is spread over the GPUs of one machine",
    "--pipeline-parallel-size": _PIPELINE,
    "--pp": _PIPELINE,
    "--pp-size": _PIPELINE,
    "--preload-adapter-ids": _PRELOADED,
    "--rope-scaling": "put it into config.json",
    "--speculative-algorithm": _DRAFTS,
    "--speculative-config": _DRAFTS,
    "--ssl-certfile": "let a proxy in front of the server speak TLS",
    "--ssl-keyfile": "let a proxy in front of the server speak TLS",
    "--tokenizer": "the tokenizer beside the weights is used",
    "--tokenizer-path": "the tokenizer beside the weights is used",
    "-dp": _DATA_PARALLEL,
    "-pp": _PIPELINE,
}
"""Flags of which something is lost, and what to do."""

_SWITCHES = {
    "--async-scheduling",
    "--disable-cuda-graph",
    "--disable-log-requests",
    "--disable-log-stats",
    "--disable-overlap-schedule",
    "--disable-radix-cache",
    "--enable-auto-tool-choice",
    "--enable-chunked-prefill",
    "--enable-lora",
    "--enable-metrics",
    "--enforce-eager",
    "--no-enable-chunked-prefill",
    "--trust-remote-code",
}
"""Those of the flags above that take no value."""

_REPEATED = {"--api-key", "--served-model-name"}
"""Flags that take several values, and that `weft serve` has once for each."""
_LISTS = {
    "--lora-modules",
    "--lora-paths",
    "--lora-target-modules",
    "--preload-adapter-ids",
    *_REPEATED,
}
"""Flags that take several values."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A command for Weft, and what became of the flags that it does not have."""

    base: str
    args: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Flags without which nothing is lost, and why."""
    missing: dict[str, str] = field(default_factory=dict)
    """Flags that would be needed, and what to do instead."""
    notes: list[str] = field(default_factory=list)
    """What is different without a flag."""
    expanded: list[str] = field(default_factory=list)
    """Words of the command with variables, which a shell expands."""

    @property
    def command(self) -> str:
        return " ".join(["weft serve", *map(self.quoted, (self.base, *self.args))])

    def is_expanded(self, word: str) -> bool:
        """Whether a shell expands variables in the word, so that nobody knows yet what it says."""
        return "$" in word and any(word in other for other in self.expanded)

    def quoted(self, word: str) -> str:
        """The word as a shell takes it. Its variables are expanded if the command's were."""
        if self.is_expanded(word):
            return '"' + re.sub(r'["\\`]', r"\\\g<0>", word) + '"'
        return shlex.quote(word)


def migrate(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="The command that starts vLLM, SGLang or LoRAX, best in quotes: then the shell"
            " changes nothing in it.",
        ),
    ],
) -> None:
    """Translate the command that starts another server, and check its adapters.

    [bold]weft migrate[/] 'vllm serve ./llama --enable-lora --lora-modules sql=./sql'

    Exit status: 0 all translated, 1 a flag, variable or adapter is lost, 2 no command of these
    servers.
    """
    with ending_in_one_line(status=2):
        assert context.parent is not None
        whole = command[0] if len(command) == 1 else shlex.join(command)
        found = translated(whole, Options(context.parent.command))
    typer.echo(found.command)
    for title, flags in (("Left out", found.left_out), ("Missing", found.missing)):
        if flags:
            typer.echo(f"\n{title}:")
        for flag, why in flags.items():
            typer.echo(f"  {flag}: {why}")
    verdicts = list(_verdicts(found))
    if verdicts:
        typer.echo("\nAdapters:")
    for name, _, told in verdicts:
        typer.echo(f"  {name}: {plain(told)}")
    if found.notes:
        typer.echo("\n" + "\n".join(found.notes))
    typer.echo(f"\nTo see what fits into which GPUs: weft plan {found.quoted(found.base)}")
    raise typer.Exit(1 if found.missing or not all(good for _, good, _ in verdicts) else 0)


def instead_of(flag: str, own: Iterable[str]) -> str | None:
    """Advice on what to use instead of another server's flag, even if it is misspelled. None for a
    flag that resembles none of those, or one of `own` more."""
    others = {*BASE, *RENAMED, *NEEDLESS, *MISSING}.difference(own)
    if flag not in others:
        flag = next(iter(get_close_matches(flag, [*own, *others], n=1, cutoff=0.75)), "")
    if flag not in others:
        return None
    if flag in BASE:
        return "the base model is the command's argument: weft serve BASE"
    if flag in RENAMED:
        return f"{flag} of other servers is {RENAMED[flag]}"
    if flag in NEEDLESS:
        return f"leave it out, as {NEEDLESS[flag]}"
    return MISSING[flag]


class Options:
    """The options of `weft serve`."""

    def __init__(self, group: object) -> None:
        """`group`: all commands, as typer has them."""
        assert isinstance(group, TyperGroup)
        serve = group.commands["serve"]
        assert isinstance(serve, TyperCommand)
        self._serve = serve
        options = [param for param in serve.params if isinstance(param, TyperOption)]
        self._by_name = {name: o for o in options for name in (*o.opts, *o.secondary_opts)}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def takes_no_value(self, name: str) -> bool:
        return name in self._by_name and bool(self._by_name[name].is_flag)

    def trouble(self, name: str, values: list[str]) -> str | None:
        """Why an option does not take its values; None if it does."""
        if self.takes_no_value(name) == bool(values):
            return "it takes no value" if values else "its value is missing"
        given = [word for value in values for word in (name, value)] or [name]
        try:
            self._serve.make_context("serve", ["BASE", *given])
        except typer.BadParameter as error:
            return error.message
        return None


def translated(command: str, options: Options) -> Translation:
    """The command as one of Weft. Raises ConfigError."""
    server = server_command(command)
    bases, flags = list[tuple[str, str]](), list[tuple[str, list[str]]]()
    for name, values in _flags(server.args, options):
        if name in BASE or not name:
            bases += [(name, value) for value in values if value]
        else:
            flags.append((name, values))
    if not bases:
        raise ConfigError("the command names no base model", "command")
    found = Translation(bases[0][1], expanded=server.expanded)
    found.missing.update((name, VARIABLES[name]) for name in server.variables)
    for name, value in bases[1:]:
        if value != found.base:
            shown = shlex.join([name, value] if name else [value])
            found.missing[shown] = f"there is one base model, which is {found.base}"
    for name, values in flags:
        _translate(found, name, values, options)
    found.notes.extend(_notes(server, found.args))
    return found


def _notes(server: ServerCommand, args: list[str]) -> Iterator[str]:
    """Where Weft listens, if that is somewhere else than where the other server does."""
    if server.in_container:
        yield "Ports, volumes and other variables of the container are not translated."
    title, all_addresses, port = SERVERS[server.server]
    if all_addresses and "--host" not in args:
        yield (
            f"{title} listens on all addresses, and Weft on 127.0.0.1: add --host 0.0.0.0 for"
            " clients on other machines."
        )
    if port != ServeFlags.port and "--port" not in args and not server.in_container:
        yield (
            f"{title} listens on port {port}, and Weft on {ServeFlags.port}: add --port {port}"
            " to keep it."
        )


def _flags(words: list[str], options: Options) -> Iterator[tuple[str, list[str]]]:
    """Each flag with its values; an argument has no name."""
    known = {*BASE, *RENAMED, *NEEDLESS, *MISSING}
    base_is_first = bool(words) and not words[0].startswith("-")
    base_has_flag = any(word.partition("=")[0].replace("_", "-") in BASE for word in words)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-"):
            yield "", [word]
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if equals:
            yield name, [value]
            continue
        if name in _SWITCHES or options.takes_no_value(RENAMED.get(name, name)):
            yield name, []
            continue
        is_unknown = name not in known and name not in options
        takes_all = name in _LISTS or (is_unknown and (base_is_first or base_has_flag))
        values: list[str] = []
        while at < len(words) and not re.match(r"--?[A-Za-z]", words[at]):
            values.append(words[at])
            at += 1
            if not takes_all:
                break
        if name in _REPEATED and values:
            yield from ((name, [value]) for value in values)
        else:
            yield name, values


def _translate(found: Translation, name: str, values: list[str], options: Options) -> None:
    own = RENAMED.get(name, name)
    shown = shlex.join([name, *values])
    if name == "--lora-paths":  # one without a name is called by its path
        values = [_named(found, value) for value in values]
    if own in STATED and values and values[0] in STATED[own]:
        found.left_out[shown] = "the checkpoint itself says it"
    elif name in NEEDLESS:
        found.left_out[shown] = NEEDLESS[name]
    elif name in MISSING:
        found.missing[shown] = MISSING[name]
    elif own not in options:
        found.missing[shown] = "Weft does not know it"
    elif any(map(found.is_expanded, values)):
        found.args.extend([own, *values])
    elif (trouble := options.trouble(own, values)) is not None:
        found.missing[shown] = trouble
    else:
        found.args.extend([own, *values])


def _named(found: Translation, adapter: str) -> str:
    """An adapter as SGLang takes it, as `--lora-modules` does."""
    try:
        given = json.loads(adapter)
        own = json.dumps({"name": given["lora_name"], "path": given["lora_path"]})
    except (ValueError, KeyError, TypeError):
        return adapter if "=" in adapter or adapter[:1] == "{" else f"{adapter}={adapter}"
    if given.get("pinned"):
        again = 'load it again with "pinned": true when the server runs'
        found.missing[f"pinned of {given['lora_name']}"] = again
    return own


def _verdicts(found: Translation) -> Iterator[tuple[str, bool, str]]:
    """Each adapter of `--lora-modules`, whether it would be served, and why not."""
    from weft.cli.check import check_adapter
    from weft.core.config import MAX_RANK, LoraArgs

    inside = False
    for word in found.args:
        if word.startswith("-"):
            inside = word == "--lora-modules"
            continue
        try:
            modules = parse_lora_modules(word) if inside else []
        except ConfigError as error:
            yield word, False, error.message
            continue
        for module in modules:
            try:
                tolerance = LoraArgs().conversion_tolerance
                report = check_adapter(module.path, found.base, MAX_RANK, tolerance)
            except WeftError as error:
                yield module.name, False, f"not checked: {error.message}"
                continue
            reasons = "; ".join(refusal.message for refusal in report.refusals)
            yield module.name, report.served, "served" if report.served else f"refused: {reasons}"
