"""Submit to first user line with torch imported: warm, two ranks, one node; beside torchrun in the same run.

The line is timed where the user sees it: as it arrives on the followed log. The clock starts before the HTTP request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stoker import Client
from stoker_local.supervisor import Plan, running

SCRIPT = """
import os, torch
print("first line", torch.__version__, os.environ["RANK"], flush=True)
"""
SPEC = {
    "experiment_name": "launch-bench",
    "compute": {"accelerator_type": "GPU_2xSIM", "num_accelerators": 2},
    "code_source": {"root_path": "."},
    "entrypoint": "first_line.py",
}


def through_stoker(client: Client, code: Path) -> float:
    began = time.perf_counter()
    job = client.submit(SPEC, code_root=code)
    job_id = str(job["job_id"])
    for line in client.logs(job_id, follow=True):
        if line["line"].startswith("first line"):
            seconds = time.perf_counter() - began
            client.wait(job_id, timeout=60)
            return seconds
    raise RuntimeError(f"{job_id} ended without its line")


def through_torchrun(code: Path) -> float:
    """Cold, as every torchrun is."""
    began = time.perf_counter()
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen([*argv, str(code / "first_line.py")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"first line"):
            seconds = time.perf_counter() - began
            process.wait()
            return seconds
    raise RuntimeError("torchrun ended without the line")


async def measure(jobs: int, colds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        code = Path(folder) / "code"
        code.mkdir()
        (code / "first_line.py").write_text(SCRIPT)
        plan = Plan(data=Path(folder) / "data", nodes=1, gpus_per_node=2, mlflow=False)
        async with running(plan, lambda line: print(line, file=sys.stderr)) as system:
            client = Client(system.card.url, system.card.token)
            await asyncio.to_thread(through_stoker, client, code)
            warm = [await asyncio.to_thread(through_stoker, client, code) for _ in range(jobs)]
        cold = [await asyncio.to_thread(through_torchrun, code) for _ in range(colds)]
    warm.sort()
    p50, p95 = statistics.median(warm), warm[int(len(warm) * 0.95) - 1]
    torchrun = statistics.median(cold)
    return {
        "jobs": jobs,
        "p50_s": round(p50, 4),
        "p95_s": round(p95, 4),
        "torchrun_p50_s": round(torchrun, 3),
        "torchrun_over_stoker": round(torchrun / p50, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--colds", type=int, default=5)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.jobs, arguments.colds))))


if __name__ == "__main__":
    main()
