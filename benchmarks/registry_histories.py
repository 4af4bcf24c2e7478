"""Lets real processes share a registry, kills and stops them at random, and checks that what they
were told is linearizable.

    python benchmarks/registry_histories.py --minutes 5 directory
    python benchmarks/registry_histories.py --minutes 5 s3

The last line is JSON. The exit status is 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from buckets import new_bucket, s3_server
from registry_histories import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("store", choices=["directory", "s3"])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "told").mkdir()
        uri = str(folder / "registry")
        if args.store == "s3":
            stack.enter_context(s3_server())
            uri = new_bucket()
        outcome = run(uri, folder / "told", 60 * args.minutes, args.processes, args.seed)
    for what in outcome.wrong[:20]:
        print(what)
    load = round(os.getloadavg()[0], 1)
    summary = {"store": args.store, "minutes": args.minutes, "processes": args.processes}
    print(json.dumps({**summary, "load": load, "wrong": len(outcome.wrong), **outcome.counts}))
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
