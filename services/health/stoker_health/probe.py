"""The probe that one rank of a preflight runs: exact integer matmul, then an all-reduce that shows each contribution.

Run by the warm worker with the standard rendezvous environment. Prints one JSON line; any exception means "could not
measure". The only importer of torch in this service.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

STRIDE = 1_000_003  # as in allreduce.py, which this script cannot import in the job's environment
SIZE = 96
WARM_BYTES = 1 << 20


def checksum(device: torch.device) -> bool:
    """Whether an integer-valued matmul is exact: every product and sum fits a float32 without rounding."""
    a = (torch.arange(SIZE * SIZE, device=device, dtype=torch.float32).reshape(SIZE, SIZE) * 7 + 3) % 11
    b = (torch.arange(SIZE * SIZE, device=device, dtype=torch.float32).reshape(SIZE, SIZE) * 5 + 1) % 13
    exact = a.cpu().to(torch.int64) @ b.cpu().to(torch.int64)
    return bool(torch.equal((a @ b).cpu().to(torch.int64), exact))


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    exact = checksum(device)
    wait = timedelta(seconds=float(os.environ.get("STOKER_PROBE_SECONDS", "20")))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=wait)
    slots = torch.zeros(world, dtype=torch.int64, device=device)
    # A simulated GPU that computes wrong adds one to what it contributes.
    slots[rank] = (rank + 1) * STRIDE + int(os.environ.get("STOKER_SIM_WRONG_SUM", "0"))
    dist.all_reduce(slots)
    load = torch.ones(WARM_BYTES // 4, device=device)
    began = time.perf_counter()
    dist.all_reduce(load)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    print(json.dumps({"rank": rank, "slots": slots.tolist(), "seconds": seconds, "exact": exact}), flush=True)  # noqa: T201
    dist.destroy_process_group()


main()
