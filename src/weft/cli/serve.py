"""`weft serve`: an engine process, the HTTP application over it, and their common end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from rich.console import Console, RenderableType

from weft.api import ApiSettings, create_app
from weft.api.http import READER_TIMEOUT_S
from weft.api.settings import parse_key
from weft.cli.access_control import AccessControl
from weft.cli.args import LoraModule, ServeFlags
from weft.cli.connections import ConnectionLimits, connection_limits, http_config, served_beside
from weft.cli.deadline import end_within, end_without_threads
from weft.cli.engines import leave_fleet, start_engine, until_empty
from weft.cli.first_adapters import bring_to_device, load_adapters
from weft.cli.summary import num_shared, start_in_words, summary
from weft.core.config import EngineArgs, ModelArgs
from weft.core.errors import ConfigError, WeftError
from weft.core.ports import port_refused
from weft.core.processes import freeze_heap, leave_out_torch
from weft.core.tenants import Tenant
from weft.fleet.supervisor import Supervisor
from weft.metrics.logs import configure_logging
from weft.models.config import load_model_config, resolve_model, sampling_defaults
from weft.registry import AdapterRegistry, AdapterRoots, Sources
from weft.registry.allowed import Allowed
from weft.registry.blobs import Blobs
from weft.registry.contents import Contents, cache_folder
from weft.registry.shared import SharedRegistry
from weft.serving import LoopExecutor, Publisher
from weft.serving.embedding import EmbeddingRule, embedding_rule
from weft.serving.follower import Follower
from weft.serving.publisher import sources_of
from weft.text import AdapterTokenizers, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from weft.fleet.fleet_client import FleetClient
    from weft.fleet.start import FleetArgs
    from weft.metrics.traces import Traces

logger = logging.getLogger(__name__)

FORCED_S = 3
"""How long after the shut-down time-out connections are cut."""
HARD_END_S = 5
"""How long after the shut-down time-out, or a second Ctrl-C, the process is ended, whatever
hangs."""
HURRIED_S = 1
"""How long after a second Ctrl-C connections are cut."""


@dataclass(frozen=True, slots=True)
class _Start:
    """What the server starts with, all of it checked."""

    engine: EngineArgs
    flags: ServeFlags
    api: ApiSettings
    modules: list[LoraModule]
    """The adapters to load before serving."""
    roots: AdapterRoots
    allowed: Allowed
    access: AccessControl
    connections: ConnectionLimits
    shared: SharedRegistry | None
    """What it follows."""
    fleet: FleetArgs | None
    begun_s: float


def run(engine: EngineArgs, flags: ServeFlags, begun_s: float) -> None:
    """Serve until SIGTERM or SIGINT, which are a normal end. `begun_s`: when the command began.
    Raises WeftError when that can't start."""
    leave_out_torch()  # the engine's process has it
    flags.check_needed()
    flags.check_ports()
    configure_logging(flags.log_level, flags.log_format == "json")
    engine = replace(engine, kv_events=flags.kv_events())
    api = _api_settings(engine, flags)
    modules = flags.modules(api.served_model_names)
    limits = connection_limits(flags.max_connections_per_address)
    roots, shared = flags.roots(modules), flags.shared_registry()
    fleet = flags.fleet_args()
    tenants = flags.tenants_file() if shared is None else flags.shared_tenants(shared)
    api = replace(api, page=flags.page(tenants))
    access = AccessControl(tenants, flags.audit_log)
    allowed = flags.allowed()
    start = _Start(
        engine, flags, api, modules, roots, allowed, access, limits, shared, fleet, begun_s
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_run_server(start))
        end_without_threads()


def _api_settings(engine: EngineArgs, flags: ServeFlags) -> ApiSettings:
    running = engine.scheduler.max_num_seqs
    waiting = 4 * running if flags.max_queue is None else flags.max_queue
    tools, reasoning = flags.tool_call_parser, flags.reasoning_parser
    keys = tuple(flags.keys())
    weights = engine.scheduler.tenant_weights
    if weights and flags.tenants is not None:
        message = "--tenant-weights: the file of --tenants has the weights"
        raise ConfigError(message, "tenant_weights")
    named = {parse_key(key).name for key in keys} - {""}
    return ApiSettings(
        served_model_names=tuple(flags.served_model_name or [engine.model.model]),
        max_open=running + waiting,
        request_timeout_s=flags.request_timeout,
        api_keys=keys,
        tenants={name: Tenant(name, weights.get(name, 1.0)) for name in named},
        metrics_apart=flags.metrics_port is not None,
        allowed_origins=tuple(flags.allowed_origins or ()),
        max_body_bytes=flags.max_body_size,
        response_store_bytes=flags.response_store,
        strict_fields=flags.strict_fields,
        allow_request_templates=flags.allow_request_templates,
        tool_call_parser=None if tools == "none" else tools,
        reasoning_parser=None if reasoning == "none" else reasoning,
    )


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where that is installed."""
    loops = importlib.import_module("uvloop" if importlib.util.find_spec("uvloop") else "asyncio")
    loop: asyncio.AbstractEventLoop = loops.new_event_loop()
    return loop


async def _run_server(start: _Start) -> None:
    """Before serving, signals cancel this task. While uvicorn serves it has the signals, and
    raises them once more afterwards: they must do nothing then, so that the engine can end."""
    flags = start.flags
    traces = None
    if flags.otlp_endpoint is not None:
        from weft.metrics.traces import open_traces  # needs an extra

        traces = open_traces(flags.otlp_endpoint)
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        end_within(flags.shutdown_timeout + HARD_END_S)
        task.cancel()

    _on_signals(stop)
    if flags.keeps_on_hangup():
        start.access.on_hangup()
    with contextlib.ExitStack() as bound:
        listener = None
        if not flags.no_api:
            listener = bound.enter_context(contextlib.closing(_bind(flags.host, flags.port)))
        beside = None
        if flags.metrics_port is not None:
            beside = _bind(flags.metrics_host, flags.metrics_port, "metrics-")
            bound.enter_context(contextlib.closing(beside))
        try:
            await _start_and_serve(start, listener, beside, traces)
        except asyncio.CancelledError:
            logger.info("stopped before the start was complete")
        finally:
            if traces is not None:
                await asyncio.to_thread(traces.close)


async def _start_and_serve(
    start: _Start,
    listener: socket.socket | None,
    beside: socket.socket | None,
    traces: Traces | None,
) -> None:
    shared = start.shared
    model, lora = start.engine.model.model, start.engine.lora
    registry = AdapterRegistry(start.api.served_model_names, model)
    kept = cache_folder(lora.adapter_cache_dir)
    contents = Contents(kept, lora.adapter_cache_bytes, registry.digests)
    blobs = None if shared is None else Blobs(shared.store, contents)
    engine, tokenizer, defaults = await _load(start, contents, blobs)
    fleet = None if isinstance(engine, Supervisor) else engine
    tokenizers = AdapterTokenizers(tokenizer, start.flags.adapter_templates == "off")
    try:
        if start.api.tenants:
            await engine.set_tenants(list(start.api.tenants.values()))
        await start.access.tell(engine)
        rule = await asyncio.to_thread(_embedding_rule, start.engine.model)
        app = create_app(
            engine,
            registry,
            tokenizers,
            Sources(start.roots, start.allowed, contents, start.flags.max_adapter_size),
            replace(start.api, embedding=rule, sampling_defaults=defaults),
            traces=traces,
            tenants=start.access.tenants,
            audit=start.access.audit,
            shared=None if shared is None or blobs is None else (shared, blobs),
            fleet=fleet,
        )
        if fleet is not None and app.state.follower is not None:
            fleet.adapters.pins = app.state.follower.pins.by_digest
        # The operator's own adapters may lie anywhere, so this has sources of its own.
        own = Sources(contents=contents)
        publisher = Publisher(engine, registry, tokenizers, own, LoopExecutor())
        await load_adapters(start.modules, publisher, registry)
        if start.modules:
            await bring_to_device(engine, registry)
        if shared is not None:
            await _follow(start, shared, app.state.follower)
        flags = start.flags
        metrics_url = None if beside is None else _url(flags.metrics_host, beside)
        shares = None if shared is None else f"{flags.registry} (adapters: {num_shared(shared)})"
        url = None if listener is None else _url(flags.host, listener)
        engine_s = None if flags.no_engine else engine.info.start_s
        took = start_in_words(time.monotonic() - start.begun_s, engine_s)
        shown = summary(engine.info, registry, url, start.api.page, metrics_url, shares, took)
        _on_signals(lambda: None)
        async with served_beside(app.state.metrics_app, beside):
            if listener is None:
                show(shown)
                await _serve_nodes(app, engine, flags.shutdown_timeout)
            else:
                start.access.warn_if_open(flags.keys(), listener.getsockname()[0])
                await _serve_http(app, start, engine, listener, lambda: show(shown))
    finally:
        await engine.close()


def show(shown: RenderableType) -> None:
    """Print to stdout. If nobody reads that any more, the server goes on without it."""
    with contextlib.suppress(OSError, SystemExit):  # rich raises the latter for a broken pipe
        Console().print(shown)


# -- the start -----------------------------------------------------------------------------------


def _bind(host: str, port: int, which: str = "") -> socket.socket:
    """Take the port before anything slow happens. `which`: how the flags' names begin that have the
    host and the port. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        param = f"{which}host".replace("-", "_")
        raise ConfigError(f"--{which}host {host}: {error.strerror or error}", param) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it: unsent data of one that nobody reads must not keep it open.
            timeout_ms = int(READER_TIMEOUT_S * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    except OSError as error:
        listener.close()
        raise port_refused(host, port, f"--{which}port", error) from error
    return listener


def _url(host: str, listener: socket.socket) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


def _on_signals(call: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, call)


async def _load(
    start: _Start, contents: Contents, blobs: Blobs | None
) -> tuple[Supervisor | FleetClient, Tokenizer | None, dict[str, float]]:
    """The engine's process and the tokenizer, which load side by side; and `sampling_defaults`."""
    model = start.engine.model
    await asyncio.to_thread(resolve_model, model.model, model.revision, weights=False)
    logger.info("start: loading %s", model.model)
    watchdog_s = start.flags.watchdog_timeout
    first = await asyncio.to_thread(sources_of, [module.path for module in start.modules])
    args = replace(start.engine, first_adapters=first)
    engine = asyncio.create_task(start_engine(args, start.fleet, watchdog_s, contents, blobs))
    try:
        config = await asyncio.to_thread(load_model_config, model.model, model.revision)
        config.check_context(model.max_model_len)  # the engine's process imports torch before that
        defaults = await asyncio.to_thread(_sampling_defaults, start)
        tokenizer = None
        if not start.flags.skip_tokenizer_init:
            tokenizer = await asyncio.to_thread(load_tokenizer, model.model, model.revision)
        return await engine, tokenizer, defaults
    except BaseException:
        engine.cancel()
        with contextlib.suppress(asyncio.CancelledError, WeftError):
            await (await engine).close()
        raise


def _embedding_rule(model: ModelArgs) -> EmbeddingRule:
    """How the model's folder wants vectors to be made."""
    return embedding_rule(resolve_model(model.model, model.revision, weights=False))


def _sampling_defaults(start: _Start) -> dict[str, float]:
    """The model's own defaults of sampling, unless `--generation-config none` leaves them out."""
    if start.flags.generation_config == "none":
        return {}
    defaults = sampling_defaults(start.engine.model.model, start.engine.model.revision)
    if defaults:
        told = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        logger.info("the defaults of sampling are those of generation_config.json: %s", told)
    return defaults


async def _follow(start: _Start, shared: SharedRegistry, follower: Follower) -> None:
    loop = asyncio.get_running_loop()

    def told(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(start.access.follow)

    shared.listen(told)
    logger.info("start: adapters of the registry")
    await follower.start(start.flags.registry_boot == "eager")
    start.access.follow()
    if shared.state.seq == 0:  # perhaps a file system is not mounted yet
        rest = ", so requests need no key" if start.access.is_open(start.flags.keys()) else ""
        message = "the registry %s is empty: it has neither adapters nor tenants%s"
        logger.warning(message, start.flags.registry, rest)


# -- serving -------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """Calls back when it listens; at shut-down it ends slow requests in good order."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: Supervisor | FleetClient,
        shutdown_timeout_s: float,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_started = on_started
        self._loop = asyncio.get_running_loop()
        self._hurried = asyncio.Event()
        """Set by a second Ctrl-C."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        freeze_heap()
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            end_within(self._shutdown_timeout_s + HARD_END_S)
            super().handle_exit(sig, frame)
        elif sig == signal.SIGINT:
            end_within(HARD_END_S)
            self._loop.call_soon_threadsafe(self._hurried.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info(
            "stopping: open requests have %g s to finish; a second Ctrl-C ends them at once",
            self._shutdown_timeout_s,
        )
        leave_fleet(self._engine)
        close_later = asyncio.create_task(self._close_engine_later())
        await super().shutdown(sockets)
        close_later.cancel()
        if self.force_exit:
            await self.lifespan.shutdown()  # which uvicorn leaves out then

    async def _close_engine_later(self) -> None:
        """Open requests then end with finish_reason "abort"."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), self._shutdown_timeout_s)
        await self._engine.close()
        if self._hurried.is_set():
            await asyncio.sleep(HURRIED_S)
            self.force_exit = True


async def _serve_nodes(
    app: FastAPI, engine: Supervisor | FleetClient, shutdown_timeout_s: float
) -> None:
    """Serve other nodes alone, until a signal; then until they have taken their requests away."""
    stopped = asyncio.Event()
    _on_signals(stopped.set)
    async with app.router.lifespan_context(app):
        freeze_heap()
        await stopped.wait()
        end_within(shutdown_timeout_s + HARD_END_S)
        leave_fleet(engine)
        await until_empty(engine, shutdown_timeout_s)


async def _serve_http(
    app: FastAPI,
    start: _Start,
    engine: Supervisor | FleetClient,
    listener: socket.socket,
    on_started: Callable[[], None],
) -> None:
    flags = start.flags
    config = http_config(
        app,
        start.connections,
        log_level="info" if flags.log_level == "debug" else "warning",
        access_log=flags.log_level == "debug",  # as each costs time
        timeout_graceful_shutdown=flags.shutdown_timeout + FORCED_S,
    )
    try:
        server = _Server(config, engine, flags.shutdown_timeout, on_started)
        await server.serve([listener])
        logger.info("stopped")
    except OSError as error:
        raise port_refused(flags.host, flags.port, "--port", error) from error
