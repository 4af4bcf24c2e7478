"""`weft bench simulate`: policies of one node's adapter memory, or of a fleet's routing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from weft.bench.cli.options import Measure, Ranks, Seed, measuring, workload_option
from weft.terminal.options import parse_bytes, with_flags

if TYPE_CHECKING:
    from weft.bench.fleet_simulate import FleetPlan
    from weft.bench.simulate import SimulationPlan

fleet_option = partial(typer.Option, rich_help_panel="Fleet")


@dataclass(frozen=True, kw_only=True)
class FleetFlags:
    """The flags of `weft bench simulate --fleet`."""

    fleet: Annotated[
        int | None,
        fleet_option(
            metavar="NODES",
            help="Simulate the routing of a fleet with this many nodes, each with the real"
            " scheduler. Default: simulate the adapter memory of one node.",
            min=1,
        ),
    ] = None
    seconds: Annotated[float, fleet_option(help="Seconds to simulate.", min=1, max=86_400)] = 30.0
    answer: Annotated[float, fleet_option(help="Mean tokens of an answer.", min=1, max=1e6)] = 128.0
    seats: Annotated[int, fleet_option(help="Requests that run on a node at a time.", min=1)] = 64
    routers: Annotated[
        int | None,
        fleet_option(
            metavar="N",
            help="Nodes that route, each an equal share of the requests. Default: all.",
            min=1,
        ),
    ] = None
    reports: Annotated[
        float,
        fleet_option(metavar="SECONDS", help="The time between two reports of a node.", min=0.001),
    ] = 0.1
    target: Annotated[
        float | None,
        fleet_option(
            metavar="PART",
            help="Fill this share of a node's seats before another node gets requests. Default:"
            " all nodes get requests.",
            min=0.05,
            max=1.0,
        ),
    ] = None
    faults: Annotated[
        float | None,
        fleet_option(
            metavar="SECONDS",
            help="The mean time between faults: a node dies or hangs, or a link is cut.",
            min=0.1,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SimulateFlags(FleetFlags):
    """The flags of `weft bench simulate`."""

    trace: Annotated[
        str | None,
        workload_option(
            metavar="NAME,...",
            help="zipf:EXPONENT, the first adapters much more often; uniform; bursts, 16 requests"
            " at once of which half ask for one adapter; flood, one tenant of eight sends half of"
            " all requests at once; crowd, a hundred tenants who always wait. Default:"
            " zipf:1.0,uniform,bursts,flood. Of a fleet: zipf:EXPONENT; uniform; bursts, three"
            " times the rate for 1 s of every 10; day, a wave; ramp, up and down. Default:"
            " zipf:1.0.",
        ),
    ] = None
    adapters: Annotated[
        str | None,
        workload_option(
            metavar="N,...",
            help="Numbers of adapters, one replay for each. Default: 64,256,1024,10000. A fleet"
            " takes one number. Default: 2000.",
        ),
    ] = None
    ranks: Ranks = "16"
    policy: Annotated[
        str | None,
        workload_option(
            metavar="NAME,...",
            help="The eviction policies to compare; for a fleet, the routing policies. Default:"
            " all.",
        ),
    ] = None
    adapter_memory: Annotated[
        int,
        workload_option(
            parser=parse_bytes, metavar="BYTES", help="Memory for adapters on the device."
        ),
    ] = "5G"  # type: ignore[assignment]
    adapter_host_memory: Annotated[
        int,
        workload_option(
            parser=parse_bytes, metavar="BYTES", help="Memory for adapters on the host."
        ),
    ] = "32G"  # type: ignore[assignment]
    num_requests: Annotated[int, workload_option(help="Requests of each replay.", min=1)] = 1000
    rate: Annotated[
        float | None,
        workload_option(
            help="Requests that arrive per second. Default: 80. For a fleet: per node, at the"
            " peak. Default: 28.",
            min=0.001,
            max=1e6,
        ),
    ] = None
    shares: Annotated[
        bool,
        workload_option(
            help="Tenants share seats, as those with keys do, and not only the order of service."
        ),
    ] = False
    seed: Seed = 0


@measuring
@with_flags
def simulate(measure: Measure, flags: SimulateFlags) -> None:
    """Simulate an engine that serves a trace, with its real scheduler and policies and a modelled
    device. With --fleet, simulate many nodes and their router.

    Needs no device and no model, and takes seconds. The same options give the same figures. The
    column "best" is the hit rate of a cache that knows the future (Belady's MIN; for mixed ranks a
    greedy variant).
    """
    if flags.fleet is None:
        from weft.bench.simulate import run_simulate

        measure(run_simulate, _memory(flags))
    from weft.bench.fleet_simulate import run_fleet

    measure(run_fleet, _fleet(flags, flags.fleet))


def _memory(flags: SimulateFlags) -> SimulationPlan:
    from weft.bench.simulate import SimulationPlan
    from weft.bench.simulator import Memory
    from weft.bench.traces import TraceKind
    from weft.bench.workload import parse_counts, parse_names
    from weft.schedule.policy import POLICIES

    known = tuple(POLICIES)
    traces = flags.trace or "zipf:1.0,uniform,bursts,flood"
    return SimulationPlan(
        traces=tuple(TraceKind.parse(name) for name in traces.split(",")),
        adapters=parse_counts(flags.adapters or "64,256,1024,10000", "adapters"),
        ranks=parse_counts(flags.ranks, "ranks"),
        policies=known if flags.policy is None else parse_names(flags.policy, known, "policy"),
        memory=Memory(flags.adapter_memory, flags.adapter_host_memory),
        num_requests=flags.num_requests,
        rate=flags.rate or 80.0,
        seed=flags.seed,
        shares=flags.shares,
    )


def _fleet(flags: SimulateFlags, num_nodes: int) -> FleetPlan:
    from weft.bench.fleet_simulate import OMNISCIENT, FleetPlan
    from weft.bench.fleet_trace import FleetTrace
    from weft.bench.workload import parse_counts, parse_names
    from weft.core.errors import ConfigError
    from weft.fleet.route import POLICIES

    known = (*POLICIES, OMNISCIENT)
    adapters = parse_counts(flags.adapters or "2000", "adapters")
    if len(adapters) != 1:
        raise ConfigError("--adapters takes one number with --fleet", "adapters")
    return FleetPlan(
        traces=tuple(FleetTrace.parse(name) for name in (flags.trace or "zipf:1.0").split(",")),
        policies=known if flags.policy is None else parse_names(flags.policy, known, "policy"),
        num_nodes=num_nodes,
        num_adapters=adapters[0],
        seats=flags.seats,
        rate=flags.rate or 28.0,
        answer=flags.answer,
        seconds=flags.seconds,
        num_routers=flags.routers or num_nodes,
        report_s=flags.reports,
        target=flags.target,
        faults_each_s=flags.faults,
        seed=flags.seed,
    )
