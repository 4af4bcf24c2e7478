"""A start up to the first token, within the process that starts: see `weft.bench.startup`."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict

from weft.core.errors import WeftError, to_wire

PROMPT_TOKENS = 128


def main() -> None:
    """The order is on stdin: `began`, when the process was started; `model`; `adapter`, a folder;
    `options` of the engine. The answer is the last line of stdout."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command that started it answers Ctrl-C
    order = json.load(sys.stdin)
    try:
        answer = _start(order)
    except WeftError as error:
        answer = {"error": to_wire(error)}
    print(json.dumps(answer))


def _start(order: dict[str, object]) -> dict[str, object]:
    from weft.worker.spawn import spawn_ahead  # imports are part of what is measured

    options = dict(order["options"])  # type: ignore[call-overload]
    spawn_ahead(options.get("tensor_parallel_size") or 1)  # as an engine's process does
    from weft.bench.drive import Job, driving
    from weft.core.stages import Stages

    seconds = {"imports": time.time() - float(str(order["began"]))}
    with driving(str(order["model"]), **options) as driver:
        stages = Stages()
        adapter = driver.register(str(order["adapter"]))
        stages.end("adapter")
        ids = [i % driver.engine.info.vocab_size for i in range(PROMPT_TOKENS)]
        driver.run([Job(ids, 1, adapter)])
        stages.end("first token")
        return {
            "seconds": seconds | driver.engine.info.start_s | stages.seconds,
            "info": asdict(driver.engine.info),
        }


if __name__ == "__main__":
    main()
