"""Simulated GPUs: faults come from a file, and a GPU that falls off the bus takes the processes on it along.

`python -m stoker_chassis.device_simulated --dir D --node N --gpu 0 --kind xid --code 79` injects a fault as hardware
would: the devices of that node answer with it from then on, and with XID 79 every process that holds the GPU aborts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from stoker_proto import CheckResult, Frozen, Gpu, GpuSample

from .device import Poll

Kind = Literal["xid", "wrong_sum", "clear"]
LOST_CODES = (79,)
MEMORY = 80 * 2**30


class Fault(Frozen):
    """One fault of one simulated GPU, until it is cleared."""

    gpu: int
    kind: Literal["xid", "wrong_sum"]
    code: int | None = None


def read_faults(folder: Path, node: str) -> tuple[Fault, ...]:
    try:
        return tuple(Fault.model_validate(f) for f in json.loads((folder / f"{node}.json").read_text()))
    except FileNotFoundError:
        return ()


def gpu_uuid(node: str, index: int) -> str:
    return f"SIM-{node}-{index}"


def inject(folder: Path, node: str, gpu: int, kind: Kind, code: int | None = None) -> None:
    """Make a GPU fail, or (`clear`) make the node's GPUs whole again."""
    faults = [] if kind == "clear" else [*read_faults(folder, node), Fault(gpu=gpu, kind=kind, code=code)]
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{node}.part"
    part.write_text(json.dumps([f.model_dump() for f in faults]))
    part.replace(folder / f"{node}.json")
    if kind != "xid":
        return
    with (folder / f"{node}.kmsg").open("a") as kernel_log:
        kernel_log.write(f"NVRM: Xid (PCI:0000:{gpu:02x}:00): {code}, pid='<unknown>', GPU has fallen off the bus.\n")
    if code in LOST_CODES:
        for pid in holders(folder, node, gpu_uuid(node, gpu)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)


def holders(folder: Path, node: str, uuid: str) -> tuple[int, ...]:
    """Processes that opened the GPU and still live."""
    held = folder / node / uuid
    pids = []
    for entry in held.iterdir() if held.is_dir() else ():
        if _lives(int(entry.name), entry.read_text()):
            pids.append(int(entry.name))
        else:
            entry.unlink(missing_ok=True)
    return tuple(sorted(pids))


def _started(pid: int) -> str | None:
    """When the process started, which tells it from a later one with the same number; None for a dead one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def _lives(pid: int, started: str) -> bool:
    return _started(pid) == started


class SimulatedDevices:
    """`Devices` without hardware."""

    simulated = True

    def __init__(self, node: str, folder: Path, gpus: int) -> None:
        self._node = node
        self._folder = folder
        self._gpus = gpus

    def inventory(self) -> tuple[Gpu, ...]:
        return tuple(
            Gpu(uuid=gpu_uuid(self._node, i), index=i, model="SIM", name="Simulated GPU", memory_bytes=MEMORY)
            for i in range(self._gpus)
        )

    def poll(self) -> Poll:
        xids = {(f.gpu, f.code) for f in read_faults(self._folder, self._node) if f.kind == "xid"}
        results: list[CheckResult] = []
        samples: list[GpuSample] = []
        for gpu in self.inventory():
            codes = sorted(code for index, code in xids if index == gpu.index and code is not None)
            for code in codes:
                results.append(
                    CheckResult(check="xid", status="bad", entity=gpu.uuid, value=float(code), detail=f"XID {code}")
                )
            lost = any(code in LOST_CODES for code in codes)
            results.append(
                CheckResult(check="gpu_present", status="bad", entity=gpu.uuid, detail="the GPU is lost")
                if lost
                else CheckResult(check="gpu_present", status="ok", entity=gpu.uuid)
            )
            results.append(
                CheckResult(check="ecc_uncorrectable", status="error" if lost else "not_supported", entity=gpu.uuid)
            )
            if not lost:
                busy = bool(self.holders(gpu.uuid))
                samples.append(
                    GpuSample(uuid=gpu.uuid, utilization=1.0 if busy else 0.0, memory_used_bytes=0, temperature_c=40.0)
                )
        return Poll(tuple(results), tuple(samples))

    def holders(self, uuid: str) -> tuple[int, ...] | None:
        return holders(self._folder, self._node, uuid)

    def opened(self, uuid: str, pid: int) -> None:
        started = _started(pid)
        if started is None:
            return
        held = self._folder / self._node / uuid
        held.mkdir(parents=True, exist_ok=True)
        (held / str(pid)).write_text(started)

    def environment(self, uuids: Sequence[str]) -> dict[str, str]:
        wrong = {f.gpu for f in read_faults(self._folder, self._node) if f.kind == "wrong_sum"}
        corrupt = [uuid for uuid in uuids if any(uuid == gpu_uuid(self._node, gpu) for gpu in wrong)]
        return {"CUDA_VISIBLE_DEVICES": ""} | ({"STOKER_SIM_WRONG_SUM": "1"} if corrupt else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--kind", choices=("xid", "wrong_sum", "clear"), required=True)
    parser.add_argument("--code", type=int)
    arguments = parser.parse_args()
    inject(arguments.dir, arguments.node, arguments.gpu, arguments.kind, arguments.code)


if __name__ == "__main__":
    main()
