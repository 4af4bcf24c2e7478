"""Simulates schedules of processes that share a registry, as the tests do but as many as are asked
for, and holds what clients were told against what a fresh reader finds.

    python benchmarks/registry_simulation.py --schedules 1000000 --seconds 3600

The last line is JSON. The exit status is 1 if a schedule was wrong; its seed is said.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from registry_simulation import first_violation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--schedules", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=300, help="requests and pauses of each")
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after this time")
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    begun, until = time.process_time(), time.monotonic() + args.seconds
    wrong: dict[int, str] = {}
    num_run = 0
    for seed in range(args.first_seed, args.first_seed + args.schedules):
        if time.monotonic() > until:
            break
        if violation := first_violation(seed, args.steps):
            wrong[seed] = violation
            print(f"seed {seed}: {violation}", flush=True)
        num_run += 1
        if num_run % 10_000 == 0:
            print(f"{num_run} schedules, {len(wrong)} wrong", flush=True)
    cpu_s = round(time.process_time() - begun, 1)
    result = {"schedules": num_run, "steps": args.steps, "wrong": len(wrong), "cpu_s": cpu_s}
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
