"""Flags made from the fields of `weft.core.config`, spelled as vLLM spells them, and how a command
ends that can't go on."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from functools import partial, wraps
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import typer

from weft.core import sizes
from weft.core.config import (
    BYTES,
    CacheArgs,
    EngineArgs,
    LoraArgs,
    ModelArgs,
    SchedulerArgs,
    engine_args,
)
from weft.core.errors import ConfigError, WeftError
from weft.kernels.quant import FORMATS
from weft.schedule.policy import POLICIES
from weft.terminal.plain import plain

T = TypeVar("T")

MODEL, ADAPTERS, MEMORY, BATCH = "Base model", "Adapters", "Memory", "Batching"
model_option = partial(typer.Option, rich_help_panel=MODEL)
adapters_option = partial(typer.Option, rich_help_panel=ADAPTERS)


def key_to_send(context: typer.Context, param: typer.CallbackParam, given: str | None) -> str:
    """The key to send, or "" for none. WEFT_API_KEY may hold a server's list, `NAME=KEY,KEY`; then
    the first key is sent, without its name. A key that no header can hold is refused."""
    source = context.get_parameter_source(param.name or "")
    key = given or ""
    if source is not None and source.name == "ENVIRONMENT":
        key = next((part.strip() for part in key.split(",") if part.strip()), "")
        if "=" in key:
            from weft.api.settings import parse_key  # what else is there takes long to import

            try:
                return parse_key(key, "WEFT_API_KEY").secret
            except ConfigError as error:
                raise typer.BadParameter(error.message) from None
    if not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("a key must be printable ASCII")
    return key


def refusal_of(status: int, message: str) -> str:
    """A server's error message, and for 401 how a command is given the key that lacks."""
    return f"{message} (weft sends that of --api-key or WEFT_API_KEY)" if status == 401 else message


ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="The key to send as the bearer token.",
        envvar="WEFT_API_KEY",
        callback=key_to_send,
    ),
]
Base = Annotated[
    str,
    typer.Argument(
        metavar="BASE", help="The base model: a Hugging Face folder, or a name on the hub."
    ),
]
Adapter = Annotated[
    str, typer.Argument(metavar="ADAPTER", help="The adapter: a PEFT folder, a hub name, or a URI.")
]
Interval = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Seconds between two readings.", min=0.1, max=86_400),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")]

HELP: dict[str, str] = {
    "dtype": "The precision of the weights. auto: the checkpoint's on a GPU, float32 on a CPU.",
    "max_model_len": "The longest prompt and answer together, in tokens. Default: what the model"
    " allows.",
    "load_format": "dummy: use random weights instead of the checkpoint's, to measure speed.",
    "quantization": "Convert the base's matrices when they are loaded. "
    + "".join(f"{name}: {form.help}. " for name, form in FORMATS.items())
    + "Adapters stay in the model's precision.",
    "speculative": "Guess the next tokens, and check several in one step. The answers stay the"
    " same. ngram: guess that the text repeats itself. mtp: use the checkpoint's own head for"
    " this, which Qwen3.5 and Qwen3-Next have. A request's field 'speculative' overrides this.",
    "device": "The device to run on. auto: a CUDA GPU if there is one.",
    "revision": "The branch, tag or commit of a model from the Hugging Face hub.",
    "tensor_parallel_size": "Number of GPUs to spread the model over. Each has its own process"
    " and holds a share of the base, of every adapter and of the KV cache.",
    "deterministic": "Give each request the same bits whatever else is in the batch, even if it"
    " moves to another node. Slower for long contexts, and not for all models: see docs/fleet.md.",
    "max_loras": "Number of different adapters that one batch may have.",
    "adapter_host_memory": "Host memory for adapters, such as 4G. Those that do not fit are read"
    " from disk when they are used. Default: 4G, but at most an eighth of the memory.",
    "adapter_cache_dir": "Folder in which packed adapters are kept, so that they load faster the"
    " next time. none: keep none. Default: weft/adapters in the user's cache folder.",
    "adapter_cache_bytes": "Disk space for packed adapters. Those that were used least recently"
    " are removed.",
    "max_lora_rank": "The highest rank that an adapter may have.",
    "max_added_tokens": "Number of tokens that an adapter may add to the base model's vocabulary.",
    "conversion_tolerance": "Accept a LoHa or LoKr whose rank is too high if the nearest LoRA of"
    " --max-lora-rank has at most this relative error (Frobenius norm).",
    "adapter_memory": "Device memory for adapters: bytes, such as 500MB or 12GiB, or a fraction of"
    " the device's memory, such as 0.1. Default: an eighth of a GPU's free memory, 2G on a CPU.",
    "eviction_policy": "Which adapters are evicted first. "
    + " ".join(
        f"{name}: {inspect.getdoc(policy)}".split("\n")[0] for name, policy in POLICIES.items()
    ),
    "max_adapter_wait": "Seconds that a request may wait for room for its adapter. After that,"
    " running requests of other adapters are paused.",
    "self_check": "When an adapter is loaded, compare the device's results with plain"
    " computation, and refuse the adapter if they differ.",
    "fully_sharded_loras": "On several GPUs, divide both matrices of each adapter, not just one."
    " Saves memory, for one more exchange in each layer: see docs/parallel.md.",
    "lora_backend": "The kernels that apply adapters: torch, triton, reference, or those of a"
    " plug-in. auto: the best for the device.",
    "block_size": "Tokens in one block of the KV cache.",
    "num_blocks": "The size of the KV cache in blocks, instead of --kv-cache-memory and"
    " --gpu-memory-utilization.",
    "kv_cache_memory": "Memory for the KV cache of each device, such as 512M or 20G. Default: what"
    " --gpu-memory-utilization leaves on a GPU, and 1G on a CPU.",
    "gpu_memory_utilization": "The share of a GPU's memory to use, from 0 to 1.",
    "enable_prefix_caching": "Reuse the KV cache of prompts that begin alike.",
    "snapshot_memory": "For models with recurrent states, such as Qwen3.5 and LFM2: memory for"
    " their states at the end of cached prefixes, such as 2G. Default: an eighth of what the KV"
    " cache would have.",
    "max_num_seqs": "Number of requests that run at the same time. Further ones wait.",
    "max_chunk_delay": "Milliseconds by which reading a chunk of a prompt may delay running"
    " streams. Lower values give steadier streams and later first tokens. Default: no limit.",
    "max_num_batched_tokens": "Tokens that one step may compute. Longer prompts are read in"
    " chunks.",
    "overlap": "Plan the next step while one runs (asynchronous scheduling).",
    "tenant_weights": "How much service tenants get compared with others while requests wait, as"
    " JSON such as '{\"acme\": 2}'. Others get 1. --api-key NAME=KEY names a tenant.",
    "num_threads": "CPU threads to compute with. Default: torch's choice.",
}
_PANEL = {ModelArgs: MODEL, LoraArgs: ADAPTERS, CacheArgs: MEMORY, SchedulerArgs: BATCH}
_SPELLED = {"num_blocks": "num_gpu_blocks_override", "eviction_policy": "lora_eviction_policy"}
"""Fields whose flag has another name."""


@contextmanager
def ending_in_one_line(status: int = 1, traceback: bool = False) -> Iterator[None]:
    """Errors that Weft raises on purpose, those of files, and a lack of memory end the command with
    one line on stderr and this exit status, or pass through where a `traceback` is wanted. Ctrl-C
    ends the command quietly."""
    try:
        yield
    except WeftError as error:
        if traceback:
            raise
        sys.stderr.write(f"weft: error: {plain(' '.join(str(error).split()))}\n")
        raise typer.Exit(status) from None
    except OSError as error:
        where = error.filename
        if where is None and isinstance(error, FileNotFoundError):  # by os.getcwd alone
            where = "the working folder"
        if traceback or where is None:
            raise
        sys.stderr.write(f"weft: error: {plain(str(where))}: {error.strerror}\n")
        raise typer.Exit(status) from None
    except MemoryError as error:
        if traceback:
            raise
        sys.stderr.write(f"weft: error: there is not enough memory. {error}\n")
        raise typer.Exit(status) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def tell_start(what: str) -> None:
    """Tell a person who looks at the terminal what takes the next seconds. Say it before anything
    slow is imported."""
    if sys.stderr.isatty():
        sys.stderr.write(f"weft: {what}\n")


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let `command`, which takes **options, have a flag for every field of EngineArgs' parts."""
    return with_parameters(command, engine_parameters())


def with_some_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Do as `with_engine_options`, for the fields of these names alone."""
    chosen = [p for p in engine_parameters() if p.name in names]
    return lambda command: with_parameters(command, chosen)


def with_parameters(
    command: Callable[..., None], more: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Let `command`, which takes **options, have a flag for each of these parameters."""
    own = inspect.signature(command, eval_str=True)
    kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [*kept, *more]
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Let `command` have a flag for every field of the dataclass that its parameter `flags` is;
    the fields are annotated as parameters of commands are."""
    own = inspect.signature(command, eval_str=True)
    flags = own.parameters["flags"].annotation
    hints = get_type_hints(flags, include_extras=True)
    made = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(flags)
    ]

    @wraps(command)
    def run(**given: object) -> None:
        command(flags=flags(**{each.name: given.pop(each.name) for each in made}), **given)

    parameters: list[inspect.Parameter] = []
    for parameter in own.parameters.values():
        parameters += made if parameter.name == "flags" else [parameter]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def engine_parameters() -> list[inspect.Parameter]:
    found: list[inspect.Parameter] = []
    for part, panel in _PANEL.items():
        hints = get_type_hints(part)
        found += [_parameter(hints[f.name], f, panel) for f in fields(part) if f.name != "model"]
    threads = next(f for f in fields(EngineArgs) if f.name == "num_threads")
    return [*found, _parameter(get_type_hints(EngineArgs)["num_threads"], threads, BATCH)]


def engine_flags(options: Mapping[str, object]) -> list[str]:
    """The flags that give these options, by field name, as far as they are not the defaults."""
    args, flags = engine_args(""), list[str]()
    parts = (args.model, args.lora, args.cache, args.scheduler, args)
    defaults = {f.name: getattr(part, f.name) for part in parts for f in fields(part)}
    for name, value in options.items():
        if value is None or value == defaults[name]:
            continue
        flag = _SPELLED.get(name, name).replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            shown = json.dumps(value) if isinstance(value, dict) else value
            flags.append(f"--{flag}={shown}")
    return flags


def _parameter(hint: Any, field: Field[Any], panel: str) -> inspect.Parameter:
    flag = "--" + _SPELLED.get(field.name, field.name).replace("_", "-")
    names = f"{flag}/--no-{flag.removeprefix('--')}" if hint is bool else flag
    special: dict[str, Any] = {}
    default: Any = field.default
    if field.name in BYTES:
        special = {"parser": parse_bytes, "metavar": "BYTES"}
        if float in get_args(hint):
            special = {"parser": parse_memory, "metavar": "BYTES|FRACTION"}
            hint = float | None  # of unions, typer takes only these
        default = default if default is None else sizes.show_bytes(default)
    if field.name == "quantization":
        hint = Literal[tuple(FORMATS)] | None
    if field.name == "eviction_policy":
        hint = Literal[tuple(POLICIES)]
    if field.name == "tenant_weights":
        hint, default = dict, "{}"
        special = {"parser": parse_weights, "metavar": "JSON", "show_default": False}
    assert default is not MISSING, field.name
    option = typer.Option(names, help=HELP[field.name], rich_help_panel=panel, **special)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, option],
    )


def parse_weights(text: str | dict[str, float]) -> dict[str, float]:
    """A JSON object of numbers by name."""
    try:
        given = json.loads(text) if isinstance(text, str) else text
        return {name: _number(weight) for name, weight in given.items()}
    except (ValueError, AttributeError, OverflowError, RecursionError):
        message = f'{text!r:.200} is not a JSON object of numbers such as {{"acme": 2}}'
        raise typer.BadParameter(message) from None


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def parse_bytes(text: str | int) -> int:
    """`weft.core.sizes.parse_bytes` for a flag."""
    return _parsed(sizes.parse_bytes, text)


def parse_memory(text: str | float) -> int | float:
    """`weft.core.sizes.parse_memory` for a flag."""
    return _parsed(sizes.parse_memory, text)


def _parsed(parse: Callable[[str], T], text: object) -> T:
    try:
        return parse(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
