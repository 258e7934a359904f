"""Says what must be said: trying on while the log is away, under ids that make repeats harmless."""

from __future__ import annotations

import asyncio
import logging

from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Unavailable
from stoker_chassis.stores import Bus
from stoker_proto import Event, LogBatch, MetricBatch, subjects

log = logging.getLogger(__name__)


class Reports:
    """The launcher's voice."""

    def __init__(self, bus: Bus, node: str) -> None:
        self._bus = bus
        self._source = f"launcher/{node}"

    async def say(self, event: Event, *key: object) -> None:
        """Append, however long it takes. The id is the event's type and `key`."""
        id = ":".join([event.type_name, *map(str, key)])
        while True:
            try:
                await self._bus.log.append(stamp(event, self._source, id=id))
            except Unavailable as error:
                log.warning("%s", error)
                await asyncio.sleep(1)
            else:
                return

    async def lines(self, batch: LogBatch) -> None:
        subject = subjects.log(batch.job_id, batch.attempt, batch.node, batch.rank)
        await self._publish(subject, batch.model_dump_json(), f"{subject}:{batch.stream}:{batch.first}")

    async def points(self, batch: MetricBatch, node: str) -> None:
        subject = subjects.metric(batch.job_id, batch.attempt)
        await self._publish(subject, batch.model_dump_json(), f"{subject}:{node}:{batch.rank}:{batch.first}")

    async def _publish(self, subject: str, body: str, id: str) -> None:
        while True:
            try:
                await self._bus.telemetry.publish(subject, body.encode(), id)
            except Unavailable as error:
                log.warning("%s", error)
            else:
                return
