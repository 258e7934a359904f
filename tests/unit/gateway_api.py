"""A gateway without sockets: the application on a bus, its projector beside it, and a client that calls it directly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from stoker_chassis.clock import stamp
from stoker_chassis.stores import Bus
from stoker_gateway.app import create_app
from stoker_gateway.projector import project
from stoker_gateway.store import Views, open_engine
from stoker_proto import Event, LogBatch, subjects

TOKEN = "secret"
SPEC: dict[str, Any] = {
    "experiment_name": "doc-parse-lr",
    "compute": {"accelerator_type": "GPU_2xSIM", "num_accelerators": 2},
    "command": "python train.py",
}


@dataclass
class Gateway:
    """`say` appends an event and waits until the gateway has read it."""

    bus: Bus
    views: Views
    http: httpx.AsyncClient

    async def say(self, *events: Event) -> int:
        seq = 0
        for event in events:
            seq = (await self.bus.log.append(stamp(event, "test"))).seq
        assert await self.views.reached(seq, 5)
        return seq

    async def print(self, job_id: str, rank: int, first: int, *lines: str, stream: str = "stdout") -> None:
        batch = LogBatch(job_id=job_id, attempt=1, node="n1", rank=rank, stream=stream, first=first, lines=lines)
        subject = subjects.log(job_id, 1, "n1", rank)
        payload = batch.model_dump_json().encode()
        await self.bus.telemetry.publish(subject, payload, f"{job_id}:{rank}:{stream}:{first}")

    async def submit(self, key: str | None = None, **more: Any) -> str:
        headers = {"Idempotency-Key": key} if key else {}
        answer = await self.http.post("/v1/jobs", json={"spec": SPEC | more}, headers=headers)
        assert answer.status_code == 201, answer.text
        job_id: str = answer.json()["job_id"]
        return job_id


@contextlib.asynccontextmanager
async def gateway(bus: Bus, database: Path | None = None) -> AsyncIterator[Gateway]:
    engine = open_engine(database)
    views = Views(engine)
    caught_up = asyncio.Event()
    projecting = asyncio.create_task(project(bus.log, views, caught_up.set))
    await asyncio.wait_for(caught_up.wait(), 10)
    transport = httpx.ASGITransport(create_app(bus, views, TOKEN), raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
        yield Gateway(bus, views, http)
    projecting.cancel()
    await asyncio.gather(projecting, return_exceptions=True)
    engine.dispose()
