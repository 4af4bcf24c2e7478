"""Reads the options of `weft serve` from its command line and the environment."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from weft.cli.formats import ReasoningParser, ToolCallParser, names_of
from weft.core.config import KvEventsArgs
from weft.core.errors import ConfigError, RegistryReadOnly
from weft.core.folders import at_home
from weft.core.interrupts import interrupts_at_once
from weft.core.ports import check_different
from weft.registry import AdapterRoots, Sources
from weft.registry.allowed import Allowed
from weft.registry.contents import MAX_ADAPTER_BYTES
from weft.terminal.options import ADAPTERS, MODEL, parse_bytes

if TYPE_CHECKING:
    from weft.fleet.start import FleetArgs
    from weft.registry.shared import SharedRegistry
    from weft.registry.shared_tenants import SharedTenants
    from weft.registry.tenants_file import TenantsFile

logger = logging.getLogger(__name__)

ONLY_READ = (
    "%s: this server serves what is there, and refuses changes as long as nothing can be written;"
    " meanwhile, weft registry gc does not know which versions it serves"
)
HTTP = "HTTP server"
FLEET = "Fleet"
NEEDED = {
    "fleet": "fleet_key",
    "fleet_key": "fleet",
    "fleet_listen": "fleet",
    "node_name": "fleet",
    "node_label": "fleet",
    "consolidate": "fleet",
    "scale_webhook": "fleet",
    "no_engine": "fleet",
    "no_api": "fleet",
    "metrics_host": "metrics_port",
    "registry_boot": "registry",
}
"""The flags that have no effect without another one, and that one."""

_HELP = {
    "--host": "The address to listen on. 0.0.0.0: all addresses.",
    "--port": "The port to listen on. 0: any free one.",
    "--served-model-name": "The base model's names in requests. Repeatable; several may follow one"
    " flag if BASE comes before it. Default: BASE as given.",
    "--api-key": "Serve only requests that have this key as their bearer token. NAME=KEY also"
    " names the key's tenant; write =KEY if a key without a name contains a =. Repeatable. Others"
    " can see a command line, so prefer WEFT_API_KEY=KEY,KEY in the environment.",
    "--tenants": "A TOML file of the tenants who share the server, with their keys, roles,"
    " weights and grants. SIGHUP reads it again. It replaces --api-key.",
    "--ui/--no-ui": "Serve a web page at / to chat and to manage adapters. Default: yes, unless"
    " there are keys or tenants.",
    "--audit-log": "Log each change of adapters or tenants to this file, as a line of JSON: who,"
    " when, from where. SIGHUP opens it again. -: stderr.",
    "--metrics-port": "Serve /metrics and /health on this port, without a key. /metrics is then"
    " served only there.",
    "--metrics-host": "The address of --metrics-port.",
    "--allowed-origins": "Let web pages of this origin call the server from a browser. *: all."
    " Repeatable. Default: none.",
    "--max-queue": "Number of requests that may wait, beyond --max-num-seqs. Further ones get"
    " status 429. Default: four times --max-num-seqs.",
    "--max-body-size": "The largest body of a request, such as 512K or 4M. Reading a body delays"
    " all other requests.",
    "--response-store": "Memory for finished responses, which later requests name as"
    " previous_response_id. The oldest are dropped first. 0: keep none.",
    "--strict-fields": "Refuse requests with unknown fields. Otherwise the answer's header"
    " x-weft-ignored names these fields.",
    "--allow-request-templates": "Let requests bring their own chat_template. It runs with the"
    " same limits as adapters' templates.",
    "--request-timeout": "Abort answers that take longer than this. Default: no limit.",
    "--max-connections-per-address": "Number of connections that one address may have. 0: any"
    " number, for servers behind a proxy. Default: half of what the limit of open files allows.",
    "--tool-call-parser": "The format of the model's tool calls. auto: recognise it by the chat"
    f" template. none: refuse requests with tools. Others: {names_of(ToolCallParser)}.",
    "--reasoning-parser": "How the model marks its reasoning, so that it is kept apart from the"
    " answer. auto: recognise it by the chat template. none: leave it in the answer. Others:"
    f" {names_of(ReasoningParser)}. think is <think> and </think>.",
    "--generation-config": "The defaults of sampling. auto: temperature, top_k, top_p, min_p and"
    " repetition_penalty as the model's generation_config.json has them. none: those of the API.",
    "--shutdown-timeout": "On shutdown, wait this long for open requests to finish.",
    "--watchdog-timeout": "Restart the engine if one step takes longer than this, because it"
    " hangs. 0: never.",
    "--log-level": "How much to log. debug: each request too.",
    "--log-format": "The format of logs on stderr. json: one object per line, including one for"
    " each request.",
    "--kv-events-config": "Publish over ZeroMQ which prefixes are cached, for routers. A JSON"
    " object as in vLLM, with endpoint, replay_endpoint, topic, buffer_steps and hwm.",
    "--otlp-endpoint": "Send a trace of each request to this OTLP collector, over HTTP. Needs"
    " [bold]pip install weft\\[otel][/].",
    "--skip-tokenizer-init": "Load no tokenizer: prompts and answers are token ids.",
    "--lora-modules": "Adapters to load at the start, from folders, the Hugging Face hub or URIs."
    " Requests use NAME as their model. vLLM's form as JSON objects works too.",
    "--lora-root": "Let clients load adapters from below this folder while the server runs."
    " Repeatable. Default: only from the folders of --lora-modules.",
    "--allow-sources": "Let clients load adapters from other sources: hf (the Hugging Face hub),"
    " https, http, s3, gs, az, or all below a URI such as s3://bucket/adapters. Hosts with"
    " internal addresses must be named in a URI. Repeatable, or separated by commas.",
    "--max-adapter-size": "The largest adapter that may be uploaded or downloaded, packed or"
    " unpacked, such as 500M or 4G.",
    "--registry": "A folder or s3://BUCKET/PREFIX (gs, az) with the adapters, versions and"
    " tenants of all servers that share it.",
    "--registry-boot": "When to load a registry's adapters. lazy: when they are first used."
    " eager: all at the start. Pinned ones are always loaded at the start.",
    "--fleet": "Serve together with other nodes. A file with a node's HOST:PORT in each line, or"
    " a HOST:PORT for which DNS has all addresses. It is read again every second.",
    "--fleet-key": "A file with at least 32 random bytes, the same on all nodes. It encrypts the"
    " links between them.",
    "--fleet-listen": "Where other nodes reach this one. Port 0: any free one.",
    "--node-name": "The name of this node, different from all others. Default: the host's name"
    " and the port of --fleet-listen.",
    "--node-label": "A property of this node, such as gpu=h200 or zone=a. weft label keeps"
    " adapters on nodes with certain labels. Repeatable.",
    "--consolidate": "Fill this share of a node's seats (--max-num-seqs), such as 0.5, before"
    " another node gets requests. Other nodes are idle. Default: all nodes serve.",
    "--scale-webhook": "POST the wanted number of nodes to this URL whenever it changes.",
    "--no-engine": "Run only the HTTP server. Requests run on other nodes of the fleet.",
    "--no-api": "Run only the engine, for other nodes of the fleet, without HTTP except"
    " --metrics-port.",
    "--kernels": "The folder of compiled kernels, such as weft compile writes. Default: Triton's"
    " cache in your home folder.",
    "--adapter-templates": "Use the tokenizers and chat templates that adapters bring, in"
    " processes with limits. off: use the base's for all, and refuse adapters that add tokens.",
}


def _flag(name: str, metavar: str | None = None, panel: str = HTTP, **limits: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=_HELP[name], rich_help_panel=panel, **limits)


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """The flags of `weft serve` beside those of the engine."""

    host: Annotated[str, _flag("--host")] = "127.0.0.1"
    port: Annotated[int, _flag("--port", "PORT", min=0, max=65535)] = 8000
    served_model_name: Annotated[list[str] | None, _flag("--served-model-name", "NAME...")] = None
    api_key: Annotated[list[str] | None, _flag("--api-key", "KEY")] = None
    tenants: Annotated[Path | None, _flag("--tenants", "FILE")] = None
    ui: Annotated[bool | None, _flag("--ui/--no-ui")] = None
    audit_log: Annotated[Path | None, _flag("--audit-log", "FILE")] = None
    metrics_port: Annotated[int | None, _flag("--metrics-port", "PORT", min=0, max=65535)] = None
    metrics_host: Annotated[str, _flag("--metrics-host")] = "127.0.0.1"
    allowed_origins: Annotated[list[str] | None, _flag("--allowed-origins", "ORIGIN")] = None
    max_queue: Annotated[int | None, _flag("--max-queue", "N", min=0)] = None
    request_timeout: Annotated[float | None, _flag("--request-timeout", "SECONDS")] = None
    max_body_size: Annotated[
        int, _flag("--max-body-size", "BYTES", parser=parse_bytes, show_default="1M")
    ] = 1 << 20
    response_store: Annotated[
        int, _flag("--response-store", "BYTES", parser=parse_bytes, show_default="64M")
    ] = 64 << 20
    strict_fields: Annotated[bool, _flag("--strict-fields")] = False
    allow_request_templates: Annotated[bool, _flag("--allow-request-templates")] = False
    max_connections_per_address: Annotated[
        int | None, _flag("--max-connections-per-address", "N", min=0)
    ] = None
    tool_call_parser: Annotated[ToolCallParser, _flag("--tool-call-parser", "FORMAT")] = "auto"
    reasoning_parser: Annotated[ReasoningParser, _flag("--reasoning-parser", "FORMAT")] = "auto"
    generation_config: Annotated[Literal["auto", "none"], _flag("--generation-config")] = "auto"
    shutdown_timeout: Annotated[int, _flag("--shutdown-timeout", "SECONDS", min=0)] = 20
    watchdog_timeout: Annotated[float, _flag("--watchdog-timeout", "SECONDS", min=0)] = 300
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _flag("--log-level")] = (
        "info"
    )
    log_format: Annotated[Literal["text", "json"], _flag("--log-format")] = "text"
    otlp_endpoint: Annotated[str | None, _flag("--otlp-endpoint", "URL")] = None
    kv_events_config: Annotated[str | None, _flag("--kv-events-config", "JSON")] = None
    kernels: Annotated[Path | None, _flag("--kernels", "FOLDER", panel=MODEL)] = None
    skip_tokenizer_init: Annotated[bool, _flag("--skip-tokenizer-init", panel=MODEL)] = False
    lora_modules: Annotated[list[str] | None, _flag("--lora-modules", "NAME=PATH...", ADAPTERS)] = (
        None
    )
    lora_root: Annotated[list[Path] | None, _flag("--lora-root", "FOLDER", ADAPTERS)] = None
    allow_sources: Annotated[list[str] | None, _flag("--allow-sources", "SOURCE", ADAPTERS)] = None
    max_adapter_size: Annotated[
        int, _flag("--max-adapter-size", "BYTES", ADAPTERS, parser=parse_bytes, show_default="4G")
    ] = MAX_ADAPTER_BYTES
    registry: Annotated[str | None, _flag("--registry", "URI", ADAPTERS)] = None
    registry_boot: Annotated[Literal["lazy", "eager"], _flag("--registry-boot", panel=ADAPTERS)] = (
        "lazy"
    )
    adapter_templates: Annotated[
        Literal["on", "off"], _flag("--adapter-templates", panel=ADAPTERS)
    ] = "on"
    fleet: Annotated[str | None, _flag("--fleet", "WHERE", FLEET)] = None
    fleet_key: Annotated[Path | None, _flag("--fleet-key", "FILE", FLEET)] = None
    fleet_listen: Annotated[str, _flag("--fleet-listen", "HOST:PORT", FLEET)] = "0.0.0.0:7070"
    node_name: Annotated[str | None, _flag("--node-name", "NAME", FLEET)] = None
    node_label: Annotated[list[str] | None, _flag("--node-label", "KEY=VALUE", FLEET)] = None
    consolidate: Annotated[float | None, _flag("--consolidate", "PART", FLEET)] = None
    scale_webhook: Annotated[str | None, _flag("--scale-webhook", "URL", FLEET)] = None
    no_engine: Annotated[bool, _flag("--no-engine", panel=FLEET)] = False
    no_api: Annotated[bool, _flag("--no-api", panel=FLEET)] = False
    enable_lora: Annotated[bool, typer.Option("--enable-lora", hidden=True)] = False

    def check_needed(self) -> None:
        """Raise ConfigError for a flag that has no effect, because another one is not given."""
        for field in fields(self):
            needed = NEEDED.get(field.name)
            given = getattr(self, field.name) not in (field.default, [])
            if needed is not None and given and getattr(self, needed) is None:
                flag, missing = (f"--{name.replace('_', '-')}" for name in (field.name, needed))
                raise ConfigError(f"{flag} needs {missing} too", needed)

    def check_ports(self) -> None:
        """Raise ConfigError for flags that want the same port."""
        places = {} if self.no_api else {"--port": (self.host, self.port)}
        if self.metrics_port is not None:
            places["--metrics-port"] = (self.metrics_host, self.metrics_port)
        host, _, port = self.fleet_listen.rpartition(":")
        if self.fleet is not None and not self.no_engine and port.isdecimal():
            places["--fleet-listen"] = (host, int(port))
        check_different(places)

    def kv_events(self) -> KvEventsArgs | None:
        """Where to publish which prefixes are cached. Raises ConfigError."""
        return None if self.kv_events_config is None else parse_kv_events(self.kv_events_config)

    def modules(self, served: Collection[str]) -> list[LoraModule]:
        """The adapters to load at the start; `served` are the base's names. Raises ConfigError."""
        return modules_of(self.lora_modules or (), served)

    def allowed(self) -> Allowed:
        """The URIs from which clients may load adapters. Raises ConfigError."""
        return Allowed(e for given in self.allow_sources or () for e in given.split(",") if e)

    def keeps_on_hangup(self) -> bool:
        """Whether SIGHUP does not end the server: it renews something, or there is no terminal."""
        return self.tenants is not None or self.audit_log is not None or not os.isatty(0)

    def tenants_file(self) -> TenantsFile | None:
        """Who shares the server. Raises ConfigError."""
        if self.tenants is None:
            return None
        if self.keys():
            message = "--tenants has all keys; give none with --api-key or WEFT_API_KEY"
            raise ConfigError(message, "tenants")
        from weft.registry.tenants_file import TenantsFile  # pydantic takes its time to import

        roots = [at_home(root).absolute() for root in self.lora_root or ()]
        return TenantsFile(self.tenants, roots)

    def fleet_args(self) -> FleetArgs | None:
        """The server's part in a fleet; None if it is alone. Raises ConfigError."""
        if self.fleet is None or self.fleet_key is None:
            return None
        from weft.fleet.curve import read_fleet_key  # it needs ZeroMQ's authentication
        from weft.fleet.start import FleetArgs

        return FleetArgs(
            where=self.fleet,
            key=read_fleet_key(self.fleet_key),
            listen=self.fleet_listen,
            name=self.node_name,
            labels=tuple(self.node_label or ()),
            target=self.consolidate,
            webhook=self.scale_webhook,
            has_engine=not self.no_engine,
            has_api=not self.no_api,
        )

    def shared_registry(self) -> SharedRegistry | None:
        """Open and read the registry that this server follows. If that can't be written, the log
        says so, and the server only reads it. Raises ConfigError, RegistryUnavailable."""
        if self.registry is None:
            return None
        for given, name, instead in (
            (self.lora_modules, "--lora-modules", "publish adapters into the registry"),
            (self.tenants, "--tenants", "copy the file there once with weft tenants import"),
            (self._named_keys(), "--api-key NAME=KEY", "the tenants are in the registry"),
        ):
            if given:
                param = name.removeprefix("--").partition(" ")[0].replace("-", "_")
                raise ConfigError(f"{name} can't be given with --registry: {instead}", param)
        from weft.registry.shared import SharedRegistry  # not every server has one
        from weft.registry.stores import is_new_folder, open_store

        if is_new_folder(self.registry):  # it may not be mounted yet
            message = "there is no such folder; mount it, or make it if a new registry begins there"
            raise ConfigError(f"--registry {self.registry}: {message}", "registry")
        with interrupts_at_once():
            store = open_store(self.registry)
            try:
                return SharedRegistry(store)
            except RegistryReadOnly as error:
                logger.warning(ONLY_READ, error)
                return SharedRegistry(store, writes=False)

    def shared_tenants(self, shared: SharedRegistry) -> SharedTenants:
        """The tenants of that registry. Keys of --api-key are the operator's, and may do
        everything."""
        from weft.api.settings import parse_key
        from weft.registry.shared_tenants import SharedTenants

        secrets = [parse_key(key).secret.encode() for key in self.keys()]
        roots = [at_home(root).absolute() for root in self.lora_root or ()]
        return SharedTenants(shared, [sha256(secret).digest() for secret in secrets], roots)

    def page(self, tenants: TenantsFile | SharedTenants | None) -> bool:
        """Whether there is a page for people: as --ui says, else unless requests need a key."""
        if self.ui is not None:
            return self.ui
        return not self.keys() and (tenants is None or tenants.keychain is None)

    def _named_keys(self) -> list[str]:
        from weft.api.settings import parse_key

        return [name for key in self.keys() if (name := parse_key(key).name)]

    def keys(self) -> list[str]:
        """The keys of the command line, else those in WEFT_API_KEY, separated by commas; a variable
        that is empty counts as not set. Raises ConfigError for one that has no key."""
        given = os.environ.get("WEFT_API_KEY", "")
        if self.api_key or not given:
            return self.api_key or []
        from weft.api.settings import parse_key

        keys = [key.strip() for key in given.split(",") if key.strip()]
        for key in keys or [""]:
            parse_key(key, "WEFT_API_KEY")
        return keys

    def roots(self, modules: Iterable[LoraModule]) -> AdapterRoots:
        """The folders that a running server may read: --lora-root, and those of the modules."""
        roots = [at_home(root) for root in self.lora_root or ()]
        for root in roots:
            if not root.is_dir():
                raise ConfigError(f"--lora-root {root}: no such folder", "lora_root")
        return AdapterRoots([*roots, *(m.folder for m in modules if m.folder is not None)])


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter that is loaded before serving."""

    name: str
    path: str
    """An absolute path, or where else it is: `org/name` on the hub, or a URI."""

    @property
    def folder(self) -> Path | None:
        """None for one that is not on this machine."""
        return Path(self.path) if self.path.startswith("/") else None

    def refused(self, why: str) -> ConfigError:
        return ConfigError(f"adapter {self.name!r} ({self.path}): {why}", "lora_modules")


def parse_kv_events(text: str) -> KvEventsArgs | None:
    """vLLM's JSON form; None if it says that there are to be no events. Raises ConfigError."""
    name = "kv_events_config"
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        enabled = given.pop("enable_kv_cache_events", True)
        publisher = given.pop("publisher", "zmq")
        if publisher not in ("zmq", "null") or not isinstance(enabled, bool):
            raise msgspec.ValidationError("publisher must be zmq or null, and enable_... a bool")
        if unknown := given.keys() - {field.name for field in fields(KvEventsArgs)}:
            raise msgspec.ValidationError(f"there is no field {min(unknown)!r}")
        args = msgspec.convert(given, KvEventsArgs)
    except (msgspec.MsgspecError, ConfigError) as error:
        raise ConfigError(f"--kv-events-config: {error}", name) from None
    return args if enabled and publisher == "zmq" else None


def modules_of(texts: Iterable[str], bases: Collection[str]) -> list[LoraModule]:
    """The adapters of all --lora-modules; `bases` are the base's names. Raises ConfigError."""
    modules = [module for text in texts for module in parse_lora_modules(text)]
    names = set[str]()
    for module in modules:
        if module.folder is not None and not module.folder.is_dir():
            raise module.refused("no such folder")
        if module.name in bases:
            raise module.refused("this is a name of the base model")
        if module.name in names:
            raise module.refused("the name is given twice")
        names.add(module.name)
    return modules


def parse_lora_modules(text: str) -> list[LoraModule]:
    """`name=path`, or vLLM's JSON form: an object, or a list of them. Raises ConfigError."""
    if text.lstrip().startswith(("{", "[")):
        pairs = _from_json(text)
    else:
        name, _, path = text.partition("=")
        pairs = [(name, path)]
    if not all(name and path for name, path in pairs):
        raise ConfigError(f"--lora-modules takes name=path, got {text!r}", "lora_modules")
    return [LoraModule(name, Sources().absolute(path)) for name, path in pairs]


def _from_json(text: str) -> list[tuple[str, str]]:
    try:
        given = json.loads(text)
        modules = given if isinstance(given, list) else [given]
        return [(str(module["name"]), str(module["path"])) for module in modules]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            "--lora-modules takes name=path, an object with name and path, or a list of such"
            f" objects, got {text!r}",
            "lora_modules",
        ) from None


def spread_values(args: list[str]) -> list[str]:
    """The arguments, with a flag before each of several values: `--lora-modules a=x b=y` becomes
    `--lora-modules a=x --lora-modules b=y`, and so does `--served-model-name a b`, if the base
    comes before all flags. Otherwise, the base may be the word behind the name."""
    modules, names = "--lora-modules", "--served-model-name"
    base_is_first = bool(args) and not args[0].startswith("-")
    spread: list[str] = []
    flag = ""
    for arg in args:
        is_first = bool(flag) and spread[-1] == flag
        is_more = _is_module(arg) if flag == modules else base_is_first and not arg.startswith("-")
        if flag and is_more and not is_first:
            spread += [flag, arg]
            continue
        if not is_first:
            flag = arg if arg in (modules, names) else ""
        spread.append(arg)
    return spread


def _is_module(arg: str) -> bool:
    return not arg.startswith("-") and ("=" in arg or arg.lstrip().startswith(("{", "[")))
