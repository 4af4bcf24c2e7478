"""`weft cluster`: starts nodes that serve one base together, and shows what they do."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote, urlsplit

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from weft.bench.report import FILE_WIDTH
from weft.cli.asking import ask, ask_any
from weft.cli.nodes_table import nodes_table, show_state
from weft.core.errors import ConfigError, InvalidRequest, Unreachable
from weft.core.folders import at_home, home_folder
from weft.core.ports import check_free
from weft.fleet.launchers import NODE, ClusterArgs, ClusterFolder, Launcher, Placed
from weft.fleet.launchers.found import find_nodes
from weft.fleet.launchers.local import HOST, MAX_FAILED, LocalLauncher
from weft.registry.stores import local_path, open_store
from weft.terminal.commands import Commands
from weft.terminal.options import Interval, ending_in_one_line, key_to_send

if TYPE_CHECKING:
    from weft.fleet.launchers.ray_cluster import RayCluster

LOOK_S = 0.5
"""How often the process of `weft cluster up` looks after its nodes."""
ON_RAY = "ray"
"""As --at has it."""

cluster = Commands(help="Nodes that serve one base together.", no_args_is_help=True)

Name = Annotated[
    str, typer.Option("--name", metavar="NAME", help="The cluster's name, if you have several.")
]
At = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="WHERE",
        help="Where the nodes are, if weft cluster up did not start them here: HOST:PORT,..., a"
        " file with one per line, or a HOST:PORT for which DNS has all addresses. ray: on the Ray"
        " cluster of RAY_ADDRESS, or of this machine.",
    ),
]
Key = Annotated[
    str,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="An admin's key.",
        envvar="WEFT_API_KEY",
        callback=key_to_send,
    ),
]
Node = Annotated[
    str, typer.Argument(metavar="NODE", help="The node's name in weft cluster status.")
]


@cluster.command(context_settings={"ignore_unknown_options": True})
def up(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="BASE", help="The base model.")],
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="FLAG", help="Further flags, which go to each node's weft serve."),
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="N", help="Number of nodes to start.", min=1)] = 2,
    on: Annotated[
        Literal["local", "ray"],
        typer.Option(
            help="local: processes of this machine, until this command ends. ray: actors of a"
            " Ray cluster, which stay when this command ends."
        ),
    ] = "local",
    registry: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="The registry that all nodes share. Default: a folder for this cluster.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="PORT", help="The HTTP port of the first node.", min=1, max=65000)
    ] = 8000,
    num_cpus: Annotated[float, typer.Option(metavar="N", help="Ray CPUs of each node.", min=0)] = 1,
    num_gpus: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Ray GPUs of each node, all on one machine. Default: --tensor-parallel-size if"
            " that is above 1, else 0.",
            min=0,
        ),
    ] = None,
    name: Name = "default",
) -> None:
    """Start nodes that serve one base together.

    [bold]weft cluster up[/] meta-llama/Llama-3.1-8B-Instruct [bold]--nodes[/] 4
    """
    with ending_in_one_line():
        folder = folder_of(name)
        args = ClusterArgs(
            model=str(Path(model).absolute()) if Path(model).is_dir() else model,
            num_nodes=nodes,
            registry=_registry(registry, None if on == "ray" else folder),
            port=port,
            num_cpus=num_cpus,
            flags=tuple(flags or ()),
        )
        params = _serve_params(context, args)
        if not params["served_model_name"]:  # as given, like that of weft serve
            args = replace(args, flags=("--served-model-name", model, *args.flags))
        if on == "ray":
            num_gpus = _num_gpus(num_gpus, params["tensor_parallel_size"])
            _up_ray(name, replace(args, num_gpus=num_gpus))
        else:
            with folder.held(args):
                _run_local(folder, args)


def _registry(given: str | None, folder: ClusterFolder | None) -> str:
    """The registry of all nodes, by default one in this folder. Raises ConfigError."""
    if given is None:
        if folder is None:
            raise ConfigError("--on ray needs a --registry for all machines", "registry")
        return str(folder.path / "registry")
    return given if "://" in given else str(at_home(given).absolute())


def _serve_params(context: typer.Context, args: ClusterArgs) -> dict[str, Any]:
    """The parameters of each node's `weft serve`. Raises what that says of flags that it does not
    know, before a node is started."""
    weft = context.find_root().command
    assert isinstance(weft, TyperGroup)
    return weft.commands["serve"].make_context("weft serve", [args.model, *args.flags]).params


def _num_gpus(given: float | None, num_ranks: int) -> float:
    """What a node takes of Ray's GPUs. Raises ConfigError for what does not fit its ranks."""
    if given is None:
        return num_ranks if num_ranks > 1 else 0
    if given > 1 and given != int(given):
        raise ConfigError(f"--num-gpus above 1 must be a whole number, got {given:g}", "num_gpus")
    if given and num_ranks > 1 and given != num_ranks:
        message = f"--num-gpus {given:g} does not fit --tensor-parallel-size {num_ranks}"
        raise ConfigError(message, "num_gpus")
    return given


def folder_of(name: str) -> ClusterFolder:
    if not name.replace("-", "").isalnum():
        raise ConfigError(f"--name takes letters, digits and -, got {name!r}", "name")
    if state := home_folder("XDG_STATE_HOME", ".local/state"):
        return ClusterFolder(state / "weft/clusters" / name)
    raise ConfigError("the cluster's folder needs HOME or XDG_STATE_HOME", "name")


def reconcile(launcher: Launcher, there: Sequence[str], wanted: Sequence[str]) -> None:
    """Start what is wanted and not there; stop what is there and not wanted, the newest first."""
    for name in wanted:
        if name not in there:
            launcher.start(name)
    for name in reversed(there):
        if name not in wanted:
            launcher.stop(name)


def _run_local(folder: ClusterFolder, args: ClusterArgs) -> None:
    """Keep the nodes running until there are to be none, or until a signal comes."""
    console, shown = Console(markup=False), dict[str, str]()
    launcher = LocalLauncher(folder, args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # it is not under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    console.print(f"Nodes write to {folder.path}/*.log; Ctrl-C ends them all.", soft_wrap=True)
    try:
        if local_path(args.registry) is not None:  # nodes make none: it may not be mounted there
            open_store(args.registry)
        for node_name in args.names:
            # What another program answers there would be taken for the node's.
            check_free(HOST, args.port_of(node_name), "--port")
        while (wanted := folder.read()).num_nodes:
            reconcile(launcher, [node.name for node in launcher.list()], wanted.names)
            launcher.tend()
            for node in launcher.list():
                show_state(console, shown, node, node.why)
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        console.print("Ending the nodes")
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # when a terminal is closed, it comes twice
        folder.scale(0)
        launcher.stop_all()


def _up_ray(name: str, args: ClusterArgs) -> None:
    if not args.resources:
        message = "Ray finds no room for a node with --num-cpus 0 and --num-gpus 0"
        raise ConfigError(message, "num_cpus")
    console, cluster = Console(markup=False), _on_ray(name)
    cluster.create(args)
    folder_of(name).point_to_ray()
    console.print("Ray keeps the nodes. This command only waits until all are up.", soft_wrap=True)
    shown, seen_up = dict[str, str](), False
    needed = " and ".join(f"{number:g} {kind}" for kind, number in args.resources.items())
    while sum(state == "up" for state in shown.values()) < args.num_nodes:
        for node in cluster.list():
            seen_up |= node.state == "up"
            if node.restarts >= MAX_FAILED and not seen_up:
                cluster.scale(0)
                message = f"{node.name} has ended {node.restarts} times before it was ready"
                raise ConfigError(f"{message}; Ray's logs of its workers say why")
            lacks = f"waits for a machine with {needed} free"
            show_state(console, shown, node, lacks if node.state == "unplaced" else "")
        time.sleep(LOOK_S)


def _on_ray(name: str) -> RayCluster:
    from weft.fleet.launchers.ray_cluster import RayCluster  # few have Ray

    return RayCluster(name)


def placed(name: str, at: str | None) -> Sequence[Placed]:
    """The nodes of a cluster, whoever started them. Raises ConfigError if there are none, and
    Unreachable."""
    folder = folder_of(name)
    if at is not None and at != ON_RAY:
        return find_nodes(at)
    nodes: Sequence[Placed]
    if at == ON_RAY or folder.is_on_ray:
        nodes = _on_ray(name).list()
    else:
        args = folder.read()
        where = ",".join(f"{HOST}:{args.port + index}" for index in range(args.num_nodes))
        nodes = [
            replace(node, name=f"{NODE}{int(node.url.rpartition(':')[2]) - args.port}")
            for node in (find_nodes(where) if where else ())
        ]
    if not nodes:
        message = f"the cluster {name} has no nodes; weft cluster up starts some"
        raise ConfigError(message, "name")
    return nodes


def _under_its_own_name(node: Placed, key: str) -> Placed:
    """A node that is known by its address, under the name that it has in its fleet, if it says."""
    with contextlib.suppress(Unreachable, InvalidRequest):
        for each in ask(node.url, "/fleet", key)["nodes"]:
            if each["own"]:
                return replace(node, name=each["node"])
    return node


@cluster.command()
def status(name: Name = "default", at: At = None, api_key: Key = "") -> None:
    """Show the nodes, their load and their adapters. The exit status is 1 if none answers."""
    with ending_in_one_line():
        nodes = placed(name, at)
        if at is not None and at != ON_RAY:
            nodes = [_under_its_own_name(node, api_key) for node in nodes]
        console, said = Console(markup=False), dict[str, Any]()
        console.width = max(console.width, FILE_WIDTH)
        with contextlib.suppress(Unreachable):  # while all nodes start
            said = ask_any(nodes, "/fleet", api_key)
        console.print(nodes_table(nodes, {each["node"]: each for each in said.get("nodes", ())}))
        for pin in said.get("pins", ()):
            lacking = f", and {pin['missing']} nodes more should have it" if pin["missing"] else ""
            names, on = ", ".join(pin["adapters"]), ", ".join(pin["on"]) or "no node"
            console.print(f"{names} ({pin['labels']}): on {on}{lacking}", soft_wrap=True)
        if all(node.state in ("no answer", "unplaced", "ended") for node in nodes):
            raise typer.Exit(1)


@cluster.command()
def drain(
    node: Node,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    name: Name = "default",
    at: At = None,
    api_key: Key = "",
) -> None:
    """Move all requests away from a node, and send it no more."""
    with ending_in_one_line():
        body = {"node": node, "draining": not undo}
        ask_any(placed(name, at), "/fleet/drain", api_key, body)
        moves = "takes no more requests; those that it has move to other nodes"
        typer.echo(f"{node} {'takes requests again' if undo else moves}.")


@cluster.command()
def scale(
    nodes: Annotated[
        int, typer.Argument(metavar="N", help="Number of nodes. 0 ends the cluster.", min=0)
    ],
    name: Name = "default",
    at: At = None,
) -> None:
    """Start or end nodes until there are N."""
    with ending_in_one_line():
        folder = folder_of(name)
        if at == ON_RAY or (at is None and folder.is_on_ray):
            _on_ray(name).scale(nodes)
        elif at is not None:
            raise ConfigError(f"scale the nodes at {at} where they were started", "at")
        else:
            folder.scale(nodes)
        what = f"starts or ends nodes until there are {nodes}" if nodes else "ends"
        typer.echo(f"The cluster {what}.")


@cluster.command()
def why(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="The request's id, as in its answer.")
    ],
    name: Name = "default",
    at: At = None,
    api_key: Key = "",
) -> None:
    """Explain why a request went to its node: what each node would have cost, in seconds."""
    with ending_in_one_line():
        for each in _placements(placed(name, at), request_id, api_key):
            costs = each["costs"]
            reasons = "; ".join(filter(None, (each["why"], each["pins"])))
            table = Table(title=f"{each['request_id']}: {each['node']} ({reasons})", box=None)
            for title in costs[0] if costs else ():
                table.add_column(title, justify="left" if title == "node" else "right")
            for terms in costs:
                table.add_row(
                    *(f"{v:.4f}" if isinstance(v, float) else str(v) for v in terms.values())
                )
            Console(markup=False).print(table)


def _placements(nodes: Sequence[Placed], request_id: str, key: str) -> Any:
    """Only the node to which the client talked knows."""
    return ask_any(nodes, f"/fleet/why/{quote(request_id, safe='')}", key)["placed"]


@cluster.command()
def endpoints(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write.")],
    name: Name = "default",
    at: At = None,
) -> None:
    """Write the addresses of all nodes to a file that llm-d's file discovery reads."""
    with ending_in_one_line():
        found = [
            {"name": node.name.replace(":", "-"), "address": address, "port": str(port)}
            for node in placed(name, at)
            for address, port in [_ipv4(node)]
        ]
        part = file.parent / f".{file.name}.new"
        try:
            part.write_text(json.dumps({"endpoints": found}, indent=1) + "\n")
            part.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise ConfigError(f"{file} can't be written: {error.strerror}", "file") from None


def _ipv4(node: Placed) -> tuple[str, int]:
    """llm-d takes no other addresses. Raises ConfigError."""
    parts = urlsplit(node.url)
    with contextlib.suppress(ValueError):
        return str(IPv4Address(parts.hostname or "")), parts.port or 80
    raise ConfigError(f"node {node.name} has no IPv4 address, but {parts.hostname}", "at")


@cluster.command()
def top(
    name: Name = "default",
    at: At = None,
    api_key: Key = "",
    interval: Interval = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
) -> None:
    """Watch a cluster: its nodes, load, latency, and its busiest adapters."""
    from weft.cli.cluster_top import run_cluster_top

    with ending_in_one_line(), contextlib.suppress(KeyboardInterrupt):
        nodes = placed(name, at)
        run_cluster_top(nodes, lambda: reports_of(nodes, api_key), interval, once, api_key)


def reports_of(nodes: Sequence[Placed], key: str) -> dict[str, Any]:
    """What `/fleet` says of each node, by its name. Raises Unreachable, InvalidRequest."""
    return {each["node"]: each for each in ask_any(nodes, "/fleet", key)["nodes"]}
