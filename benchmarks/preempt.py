"""A CRITICAL job over a victim that leaves at once: submit to its start, and free room to the victim's restart.

The whole local system; times are the log's own, from before the HTTP request to the event that says that ranks run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from stoker import Client
from stoker_chassis.jetstream import connect
from stoker_local.supervisor import Plan, System, running
from stoker_proto import AttemptReleased, AttemptStarted, Recorded

COMPUTE = {"accelerator_type": "GPU_2xSIM", "num_accelerators": 2}
VICTIM = {
    "experiment_name": "preempt-bench",
    "compute": COMPUTE | {"priority_class": "BEST_EFFORT"},
    "code_source": {"root_path": "."},
    "entrypoint": "victim.py",
}
URGENT = {
    "experiment_name": "preempt-bench",
    "compute": COMPUTE | {"priority_class": "CRITICAL"},
    "command": "true",
}
# The victim may be taken at once and as often as it is asked.
CLUSTER = {"scheduling": {"min_run_minutes": 0, "first_checkpoint_minutes": 0, "max_preemptions": 1000}}
LIMIT_S = 30.0


class Story:
    """The log as it comes."""

    def __init__(self, events: AsyncIterator[Recorded]) -> None:
        self._events = events

    async def until(self, kind: type[Any], **wanted: object) -> Recorded:
        """The next event of this kind with these fields."""
        async with asyncio.timeout(LIMIT_S):
            async for recorded in self._events:
                event = recorded.event
                if isinstance(event, kind) and all(getattr(event, k) == v for k, v in wanted.items()):
                    return recorded
        raise RuntimeError("the log ended")


async def measure(rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        code = Path(folder) / "code"
        code.mkdir()
        (code / "victim.py").write_text("import time\ntime.sleep(3600)\n")
        plan = Plan(data=Path(folder) / "data", nodes=1, gpus_per_node=2, mlflow=False)
        async with running(plan, lambda line: print(line, file=sys.stderr)) as system:
            starts, restarts = await _preempt(system, code, rounds)
    starts.sort()
    restarts.sort()
    return {
        "preemptions": len(starts),
        "start_p50_s": _at(starts, 0.5),
        "start_p95_s": _at(starts, 0.95),
        "restart_p50_s": _at(restarts, 0.5),
        "restart_p95_s": _at(restarts, 0.95),
    }


async def _preempt(system: System, code: Path, rounds: int) -> tuple[list[float], list[float]]:
    starts: list[float] = []
    restarts: list[float] = []
    with Client(system.card.url, system.card.token) as client:
        client.configure(CLUSTER)
        async with connect(system.card.nats_url, "bench") as bus:
            story = Story(bus.log.follow())
            victim = str((await _in_thread(lambda: client.submit(VICTIM, code_root=code)))["job_id"])
            await story.until(AttemptStarted, job_id=victim)
            for number in range(rounds + 1):
                began_ms = time.time() * 1000
                urgent = str((await _in_thread(lambda: client.submit(URGENT)))["job_id"])
                started = await story.until(AttemptStarted, job_id=urgent)
                free = await story.until(AttemptReleased, job_id=urgent)
                again = await story.until(AttemptStarted, job_id=victim)
                if number:  # the first one warms everything
                    starts.append((started.at_ms - began_ms) / 1000)
                    restarts.append((again.at_ms - free.at_ms) / 1000)
    return starts, restarts


async def _in_thread(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return await asyncio.to_thread(call)


def _at(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    print(json.dumps(asyncio.run(measure(parser.parse_args().rounds))))


if __name__ == "__main__":
    main()
