"""`stoker up`: the local system in the foreground until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from stoker_chassis.jetstream import connect
from stoker_proto import ProblemError, problem

from .layout import Card
from .scenario import Scenario, after_a_while, at_checkpoints, read_scenario
from .supervisor import Plan, System, running


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def real_gpus() -> int:
    """How many GPUs NVML finds on this machine; 0 without a driver."""
    from stoker_chassis.device import DevicesUnavailable
    from stoker_chassis.devices_open import open_devices

    try:
        return len(open_devices("local", None, 0).inventory())
    except DevicesUnavailable:
        return 0


def make_plan(data: Path, nodes: int | None, gpus: int | None, port: int = 0) -> Plan:
    """Real GPUs as one node when there are some and no shape was asked for; else simulated nodes."""
    if nodes is None and gpus is None and real_gpus():
        return Plan(data=data, nodes=1, gpus_per_node=None, port=port)
    return Plan(data=data, nodes=nodes or 3, gpus_per_node=gpus or 2, port=port)


async def play(scenario: Scenario, system: System) -> None:
    """Inject the scenario's faults as their moments come."""
    timed = [after_a_while(f, system.layout.sim) for f in scenario.faults if f.after_seconds is not None]
    counted = tuple(f for f in scenario.faults if f.after_checkpoints is not None)
    async with connect(system.card.nats_url, "scenario") as bus:
        await asyncio.gather(*timed, at_checkpoints(counted, system.layout.sim, bus.log.follow()))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM cancel what runs inside, at any moment; it then stops everything that it has started."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    yield


@contextlib.asynccontextmanager
async def playing(scenario: Scenario, system: System) -> AsyncIterator[None]:
    """Play the scenario meanwhile; a fault that cannot be injected is said, and ends nothing."""

    def told(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            say(f"the scenario stopped: {task.exception()}")

    task = asyncio.create_task(play(scenario, system))
    task.add_done_callback(told)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _up(plan: Plan, scenario: Scenario, ready: Callable[[Card], None]) -> None:
    if scenario.faults and plan.gpus_per_node is None:
        raise ProblemError(problem("invalid_request", "A scenario needs simulated GPUs: give --nodes and --gpus"))
    with ended_by_signals():
        async with running(plan, say) as system, playing(scenario, system):
            ready(system.card)
            await asyncio.Event().wait()


def told_to_people(card: Card) -> None:
    say(f"\nStoker is up: {card.url}\nMLflow:       {card.mlflow_url} (takes some seconds more)")
    say(f"data:         {card.data_dir}\nCtrl-C stops everything.")


def up(
    *, nodes: int | None = None, gpus: int | None = None, scenario: Path | None = None,
    data: Path = Path("stoker-data"), port: int = 0, ready: Callable[[Card], None] = told_to_people,
) -> None:  # fmt: skip
    """Run the local system until Ctrl-C; `ready` is told when it serves. Raises ProblemError when it cannot start."""
    plan = make_plan(data, nodes, gpus, port)
    faults = read_scenario(scenario) if scenario else Scenario()
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_up(plan, faults, ready))
