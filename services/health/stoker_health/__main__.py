"""Wires the health agent of one node, and the leader in whichever agent holds the lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stoker_chassis.devices_open import open_devices
from stoker_chassis.hosting import host
from stoker_chassis.service import lead
from stoker_chassis.stores import Bus
from stoker_chassis.warm import WarmWorker

from .agent import Agent
from .leader import Ear, HealthLeader
from .prober import Prober
from .settings import HealthSettings


async def serve(bus: Bus, ready: Callable[[], None], settings: HealthSettings) -> None:
    devices = open_devices(settings.node, settings.sim_dir, settings.sim_gpus)
    prober = Prober(WarmWorker(settings.warm_socket), devices, settings.node_dir / "probes", settings.probe_seconds)
    agent = Agent(bus, devices, prober, settings)
    ear = Ear(settings.silence_seconds)
    newest = 0
    async for sample in bus.telemetry.follow(f"stoker.device.{settings.node}", wait=False):
        newest = sample.seq
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ear.listen(bus.telemetry, newest))
        tasks.create_task(agent.run(ready))
        tasks.create_task(lead(bus, "health", settings.instance, HealthLeader(ear), poll_s=1.0))


def main() -> None:
    settings = HealthSettings()
    host("health", settings, lambda bus, ready: serve(bus, ready, settings))


if __name__ == "__main__":
    main()
