"""Runs probe ranks on this node through its warm worker and collects what they read."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker_chassis.device import Devices
from stoker_chassis.warm import WarmWorker, WarmWorkerGone
from stoker_proto import AllReduceSum, CheckResult

PROBE = Path(__file__).with_name("probe.py")
POLL_S = 0.02


@dataclass(frozen=True)
class Group:
    """The probe's process group: who we are in it and where it meets."""

    key: str
    master_addr: str
    master_port: int
    first_rank: int
    world: int


@dataclass(frozen=True)
class Probed:
    """What the probe ranks of this node said; `error` when they could not measure."""

    sums: tuple[AllReduceSum, ...] = ()
    results: tuple[CheckResult, ...] = ()
    error: str | None = None


def free_port(address: str) -> int:
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


class Prober:
    """Forks one probe rank a GPU."""

    def __init__(self, worker: WarmWorker, devices: Devices, folder: Path, seconds: float) -> None:
        self._worker = worker
        self._devices = devices
        self._folder = folder
        self._seconds = seconds

    async def probe(self, gpus: Sequence[str], group: Group) -> Probed:
        """Run this node's ranks of the group to their end. A key runs once, so that a restart finds its answer."""
        folder = self._folder / group.key.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        keys = {group.first_rank + i: f"{group.key}/{group.first_rank + i}" for i in range(len(gpus))}
        try:
            await self._worker.ready(120)
            for local, (rank, key) in enumerate(keys.items()):
                await self._spawn(key, rank, gpus[local], group, folder)
            await self._ended(keys, folder)
            answer = self._read(list(keys), folder)
            for key in keys.values():
                await self._worker.forget(key)
        except WarmWorkerGone as error:
            return Probed(error=f"the warm worker went away: {error}")
        except TimeoutError:
            await self._kill(keys.values())
            return Probed(error=f"the probe did not end within {self._seconds:.0f} s")
        if answer.error is None:
            shutil.rmtree(folder, ignore_errors=True)
        return answer

    async def _spawn(self, key: str, rank: int, gpu: str, group: Group, folder: Path) -> None:
        local = group.master_addr == "127.0.0.1"
        env = {
            "PATH": os.environ.get("PATH", ""),
            "RANK": str(rank),
            "WORLD_SIZE": str(group.world),
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": str(group.master_port),
            "STOKER_PROBE_SECONDS": str(max(5.0, self._seconds - 5.0)),
            "OMP_NUM_THREADS": "1",
        }
        if local:
            env["GLOO_SOCKET_IFNAME"] = "lo"
        pid = await self._worker.spawn(
            key,
            script=PROBE,
            env=env | self._devices.environment([gpu]),
            cwd=folder,
            stdout=folder / f"{rank}.out",
            stderr=folder / f"{rank}.err",
            exit_file=folder / f"{rank}.exit",
        )
        self._devices.opened(gpu, pid)

    async def _ended(self, keys: dict[int, str], folder: Path) -> None:
        deadline = time.monotonic() + self._seconds
        checked = time.monotonic()
        while not all((folder / f"{rank}.exit").exists() for rank in keys):
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError
            if now - checked > 1.0:
                checked = now
                if not all([(await self._worker.poll(key)).known for key in keys.values()]):
                    raise WarmWorkerGone("it was started again meanwhile")
            await asyncio.sleep(POLL_S)

    async def _kill(self, keys: object) -> None:
        for key in keys:  # type: ignore[attr-defined]
            try:
                await self._worker.kill(key, signal.SIGKILL)
            except WarmWorkerGone:
                return

    def _read(self, ranks: list[int], folder: Path) -> Probed:
        sums, results = [], []
        for rank in ranks:
            out = (folder / f"{rank}.out").read_text().strip()
            if json.loads((folder / f"{rank}.exit").read_text())["code"] != 0 or not out:
                last = (folder / f"{rank}.err").read_text().strip().splitlines()[-1:] or ["no output"]
                return Probed(error=f"probe rank {rank} failed: {last[0][:300]}")
            told = json.loads(out.splitlines()[-1])
            sums.append(AllReduceSum(rank=rank, slots=tuple(told["slots"]), seconds=told["seconds"]))
            status = "ok" if told["exact"] else "bad"
            detail = "" if told["exact"] else f"the matmul checksum of rank {rank} is wrong"
            results.append(CheckResult.model_validate({"check": "matmul_checksum", "status": status, "detail": detail}))
        return Probed(tuple(sums), tuple(results))
