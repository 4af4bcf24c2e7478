"""A fleet of cells, simulated coarsely: 1,000 nodes and 100,000 adapters by default.

    python benchmarks/cells.py --nodes 1000 --cell 64 --adapters 100000

Each cell is one queue with the seats of its nodes; what goes on inside of it is for
`weft bench simulate --fleet` to say. Whoever chooses cells knows their loads as they were a second
ago. Adapters are asked for by Zipf's law, and each has a tenant. Compared are a cell for each pair
of tenant and adapter, with and without overflow to the second one, and a random cell for each
request. The last line is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque

import numpy as np

from weft.fleet.cells import choose_cell

SEATS = 8
"""Fewer than a node has, so that there are fewer requests."""
ANSWER_S = 1.0
"""The mean time for which a request has a seat."""
TICK_S, TOLD_AFTER_S, SECONDS, WARM_S = 0.1, 1.0, 20.0, 8.0
TENANTS = 5_000
POLICIES = ("random", "one cell", "overflow")


def simulate(
    policy: str, nodes: list[int], num_adapters: int, exponent: float, load: float
) -> dict[str, float]:
    """How loaded cells are, how long requests wait, and how many adapters a cell gets."""
    rng = np.random.default_rng(0)
    names = [f"cell-{k}" for k in range(len(nodes))]
    index = {name: k for k, name in enumerate(names)}
    seats = SEATS * np.array(nodes)
    popularity = np.arange(1, num_adapters + 1) ** -exponent
    popularity /= popularity.sum()
    per_tick = load * seats.sum() / ANSWER_S * TICK_S
    open_ = np.zeros(len(nodes))
    told = deque([np.zeros(len(nodes))] * round(TOLD_AFTER_S / TICK_S))
    asked: list[set[int]] = [set() for _ in nodes]
    loads, waits = [], []
    for tick in range(round(SECONDS / TICK_S)):
        known = dict(zip(names, told.popleft().tolist(), strict=True))
        if policy == "one cell":
            known = dict.fromkeys(names, 0.0)
        arrived = rng.choice(num_adapters, rng.poisson(per_tick), p=popularity)
        for number, adapter in enumerate(arrived.tolist()):
            if policy == "random":
                cell = int(rng.integers(len(nodes)))
            else:
                pair = f"tenant-{adapter % TENANTS}", f"adapter-{adapter}"
                cell = index[choose_cell(*pair, f"{tick}/{number}", known)]
            open_[cell] += 1
            asked[cell].add(adapter)
        open_ -= rng.binomial(np.minimum(open_, seats).astype(int), TICK_S / ANSWER_S)
        told.append(open_ / seats)
        if tick * TICK_S >= WARM_S:
            loads.append(open_ / seats)
            waits.append(np.maximum(open_ - seats, 0) / seats * ANSWER_S)
    weights = seats / seats.sum()
    return {
        "mean load": float(np.mean(loads @ weights)),
        "fullest cell": float(np.mean(np.max(loads, axis=1))),
        "wait s": float(np.mean(waits @ weights)),
        "wait s in the fullest cell": float(np.mean(np.max(waits, axis=1))),
        "most adapters of a cell": float(max(len(each) for each in asked)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--cell", type=int, default=64, help="nodes of a cell")
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--loads", default="0.6,0.75")
    args = parser.parse_args()
    count = -(-args.nodes // args.cell)
    nodes = [args.nodes // count + (k < args.nodes % count) for k in range(count)]
    results = {}
    for load in map(float, args.loads.split(",")):
        for policy in POLICIES:
            start = time.process_time()
            row = simulate(policy, nodes, args.adapters, args.exponent, load)
            row["cpu s"] = time.process_time() - start
            results[f"{load} {policy}"] = row = {k: round(v, 3) for k, v in row.items()}
            print(f"{load:.2f} {policy:>9}  " + "  ".join(f"{k} {v:g}" for k, v in row.items()))
    print(json.dumps({"benchmark": "cells", "config": vars(args), "results": results}))


if __name__ == "__main__":
    main()
