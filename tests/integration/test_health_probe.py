"""The probe over a real warm worker: it measures, or says that it could not; it never hangs and never leaves ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest_asyncio

from stoker_chassis.device_simulated import SimulatedDevices, inject
from stoker_chassis.warm import WarmWorker
from stoker_health.allreduce import wrong_ranks
from stoker_health.prober import Group, Prober, free_port

ADDRESS = "127.0.0.1"


@dataclass
class Bench:
    folder: Path
    process: subprocess.Popen[bytes]
    devices: SimulatedDevices

    def prober(self, seconds: float = 20) -> Prober:
        return Prober(WarmWorker(self.folder / "warm.sock"), self.devices, self.folder / "probes", seconds)

    @property
    def gpus(self) -> list[str]:
        return [g.uuid for g in self.devices.inventory()]

    def held(self) -> list[int]:
        return [pid for gpu in self.gpus for pid in self.devices.holders(gpu) or ()]


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    argv = [sys.executable, "-m", "stoker_chassis.forkserver", "--socket", str(tmp_path / "warm.sock")]
    process = subprocess.Popen([*argv, "--preload", "torch,torch.distributed"])
    await WarmWorker(tmp_path / "warm.sock").ready(60)
    yield Bench(tmp_path, process, SimulatedDevices("n1", tmp_path / "sim", 2))
    process.kill()
    process.wait()


async def until_held(bench: Bench, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(bench.held()) != count:
        assert time.monotonic() < deadline, "the probe ranks never held the GPUs"
        await asyncio.sleep(0.02)


async def test_it_measures_names_the_gpu_that_adds_wrong_and_says_when_its_peers_never_come(bench: Bench) -> None:
    right = await bench.prober().probe(bench.gpus, Group("a", ADDRESS, free_port(ADDRESS), 0, 2))
    assert right.error is None
    assert {r.status for r in right.results} == {"ok"}
    assert wrong_ranks({s.rank: s.slots for s in right.sums}, 2) == (frozenset(), False)

    inject(bench.folder / "sim", "n1", 1, "wrong_sum")
    wrong = await bench.prober().probe(bench.gpus, Group("b", ADDRESS, free_port(ADDRESS), 0, 2))
    assert wrong_ranks({s.rank: s.slots for s in wrong.sums}, 2) == (frozenset({1}), True)

    alone = await bench.prober(seconds=2).probe(bench.gpus, Group("c", ADDRESS, free_port(ADDRESS), 0, 4))
    assert alone.error == "the probe did not end within 2 s"
    await until_held(bench, 0)


async def test_a_probe_begun_before_the_agent_was_killed_is_found_again_and_not_begun_twice(bench: Bench) -> None:
    group = Group("again", ADDRESS, free_port(ADDRESS), 0, 3)
    first = asyncio.create_task(bench.prober().probe(bench.gpus, group))
    await until_held(bench, 2)
    before = bench.held()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    mark = bench.folder / "sim" / "n1" / bench.gpus[1] / str(before[1])
    mark.write_text(mark.read_text() + " ")

    second = asyncio.create_task(bench.prober().probe(bench.gpus, group))
    await until_held(bench, 2)  # the mark is mended when the same process is handed out again
    assert bench.held() == before
    third = bench.prober().probe(bench.gpus[:1], Group("peer", ADDRESS, group.master_port, 2, 3))
    told, peer = await asyncio.gather(second, third)
    assert (told.error, peer.error) == (None, None)
    assert [s.rank for s in told.sums] == [0, 1]


async def test_a_rank_that_dies_and_a_worker_that_dies_are_answers_and_not_crashes(bench: Bench) -> None:
    group = Group("dies", ADDRESS, free_port(ADDRESS), 0, 4)
    probing = asyncio.create_task(bench.prober().probe(bench.gpus, group))
    await until_held(bench, 2)
    for pid in bench.held():
        os.kill(pid, signal.SIGKILL)
    told = await probing
    assert told.error is not None
    assert "rank 0" in told.error

    probing = asyncio.create_task(bench.prober().probe(bench.gpus, Group("worker", ADDRESS, group.master_port, 0, 4)))
    await until_held(bench, 2)
    bench.process.kill()
    told = await probing
    assert told.error is not None
    assert "warm worker" in told.error
    await until_held(bench, 0)
