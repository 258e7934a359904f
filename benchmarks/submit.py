"""Accepted submissions, durable before the answer, at a steady rate: how long the client waits."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import httpx

from stoker_local.supervisor import Plan, running

SPEC = {
    "experiment_name": "submit-bench",
    "compute": {"accelerator_type": "GPU_2xSIM", "num_accelerators": 2},
    "command": "true",
}


async def measure(rate: float, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        plan = Plan(data=Path(folder), nodes=1, gpus_per_node=2, mlflow=False)
        async with running(plan, lambda line: print(line, file=sys.stderr)) as system:
            headers = {"Authorization": f"Bearer {system.card.token}"}
            limits = httpx.Limits(max_connections=32, max_keepalive_connections=32)
            async with httpx.AsyncClient(base_url=system.card.url, headers=headers, limits=limits) as client:
                waits = await _at_rate(client, rate, seconds)
    waits.sort()
    return {
        "submitted": len(waits),
        "rate_per_s": rate,
        "p50_ms": round(waits[len(waits) // 2] * 1000, 2),
        "p99_ms": round(waits[int(len(waits) * 0.99)] * 1000, 2),
    }


async def _at_rate(client: httpx.AsyncClient, rate: float, seconds: float) -> list[float]:
    """One request each 1/rate seconds, however long the others take: latency counts from when it was due."""
    waits: list[float] = []

    async def one(due: float) -> None:
        answer = await client.post("/v1/jobs", json={"spec": SPEC})
        answer.raise_for_status()
        waits.append(time.perf_counter() - due)

    await client.post("/v1/jobs", json={"spec": SPEC})
    began = time.perf_counter()
    tasks = []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(max(due, time.perf_counter() - 0.002))))
    await asyncio.gather(*tasks)
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--seconds", type=float, default=15)
    arguments = parser.parse_args()
    print(json.dumps(asyncio.run(measure(arguments.rate, arguments.seconds))))


if __name__ == "__main__":
    main()
