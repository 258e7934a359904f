"""Nodes for tests: real health processes and warm workers with torch, on a real nats-server; simulated GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from stoker_chassis.clock import stamp
from stoker_chassis.device_simulated import SimulatedDevices
from stoker_chassis.stores import Bus
from stoker_chassis.warm import WarmWorker
from stoker_proto import Event, NodeJoined, Recorded

T = TypeVar("T", bound=Event)
GPUS = 2


@dataclass
class Nodes:
    """Starts, kills and asks."""

    bus: Bus
    nats_url: str
    folder: Path
    lifeline: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def sim(self) -> Path:
        return self.folder / "sim"

    def _start(self, name: str, *argv: str, **env: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("STOKER_")}
        with (self.folder / f"{name}.log").open("ab") as out:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", *argv], env=kept | env, stdout=out, stderr=out, pass_fds=(self.lifeline,)
            )

    def agent(self, node: str) -> None:
        """Start the node's health process: its agent, and the leader in one of them."""
        self._start(
            f"health-{node}", "stoker_health",
            STOKER_NODE=node, STOKER_NATS_URL=self.nats_url, STOKER_DATA_DIR=str(self.folder), STOKER_BOOT_EPOCH="b1",
            STOKER_SIM_DIR=str(self.sim), STOKER_SIM_GPUS=str(GPUS), STOKER_INSTANCE=f"health-{node}",
            STOKER_SILENCE_SECONDS="4", STOKER_HEARTBEAT_SECONDS="0.5",
        )  # fmt: skip

    def kill(self, node: str) -> None:
        process = self.processes.pop(f"health-{node}")
        process.send_signal(signal.SIGKILL)
        process.wait()

    async def join(self, *nodes: str) -> None:
        """Nodes with a warm worker, a health process, and a launcher's word that they are there."""
        sockets = [self.folder / "nodes" / node / "warm.sock" for node in nodes]
        for node, socket in zip(nodes, sockets, strict=True):
            argv = ("stoker_chassis.forkserver", "--socket", str(socket), "--preload", "torch,torch.distributed")
            self._start(f"warm-{node}", *argv, STOKER_LIFELINE_FD=str(self.lifeline))
            self.agent(node)
        for socket in sockets:
            await WarmWorker(socket).ready(60)
        for node in nodes:
            gpus = SimulatedDevices(node, self.sim, GPUS).inventory()
            event = NodeJoined(node=node, boot_epoch="b1", gpus=gpus, cpus=1, memory_bytes=1, simulated=True)
            await self.tell(event)

    async def tell(self, event: Event) -> int:
        return (await self.bus.log.append(stamp(event, "test"))).seq

    async def records(self, after: int = 0) -> list[Recorded]:
        return [r async for r in self.bus.log.read(after)]

    async def told(
        self, kind: type[T], count: int = 1, *, after: int = 0, seconds: float = 45, **wanted: object
    ) -> list[T]:
        """The first `count` events of a kind with these fields, as soon as they are in the log."""
        found: list[T] = []
        deadline = time.monotonic() + seconds
        while len(found) < count:
            assert time.monotonic() < deadline, [type(r.event).__name__ for r in await self.records(after)]
            found = [
                r.event
                for r in await self.records(after)
                if isinstance(r.event, kind) and all(getattr(r.event, k) == v for k, v in wanted.items())
            ]
            await asyncio.sleep(0.05)
        return found


@asynccontextmanager
async def health_nodes(bus: Bus, nats_url: str, folder: Path) -> AsyncIterator[Nodes]:
    reader, writer = os.pipe()
    nodes = Nodes(bus, nats_url, folder, reader)
    try:
        yield nodes
    finally:
        os.close(writer)
        os.close(reader)
        for process in nodes.processes.values():
            process.terminate()
        for process in nodes.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
