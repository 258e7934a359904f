"""The event log on NATS JetStream, and the connection under it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

import nats
from stoker_proto import Envelope, Recorded, decode, decoder, encode, event_id, subjects

from . import jetstream_batch
from .eventlog import START, Appended, Burst, Conflict, Diverged, Expect, Position, Refused, Unavailable
from .jetstream_batch import Message
from .jetstream_questions import NatsQuestions
from .jetstream_stores import JetStreamBlobs, JetStreamBoard, JetStreamLease, JetStreamTelemetry
from .reader import StreamGone, bursts_of
from .snapshots import StoredSnapshots
from .stores import Bus
from .streams import ensure
from .telemetry import with_trace

APPEND_S = 10.0
TRY_S = 1.0
RESOLVE_S = 3.0
MS = 1_000_000  # nanoseconds
WRONG_LAST_SEQUENCE = 10071
WRONG_LAST_SEQUENCE_BUSY = 10164
REFUSED = {10054: "it is larger than the log takes", 10077: "the log is full"}
log = logging.getLogger(__name__)


class JetStreamLog:
    """An `EventLog` on one stream."""

    def __init__(self, nc: Client) -> None:
        self._nc = nc
        self._js = nc.jetstream(timeout=TRY_S)

    async def append(self, envelope: Envelope, expect: Expect | None = None) -> Appended:
        headers = {"Nats-Msg-Id": envelope.id}
        if expect:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expect.seq)
            headers["Nats-Expected-Last-Subject-Sequence-Subject"] = expect.subject
        payload = encode(with_trace(envelope))
        deadline = time.monotonic() + APPEND_S
        pause = 0.02
        while True:
            try:
                ack = await self._js.publish(envelope.subject, payload, timeout=TRY_S, headers=headers)
            except MaxPayloadError as error:
                raise Refused(f"{envelope.type}: {REFUSED[10054]} ({len(payload)} bytes)") from error
            except APIError as error:
                if error.err_code in REFUSED:
                    raise Refused(f"{envelope.type}: {REFUSED[error.err_code]}") from error
                if error.err_code == WRONG_LAST_SEQUENCE and expect:
                    landed = await self._landed(envelope, expect)
                    if landed is not None:
                        return landed
                trouble: Exception = error
            except (NatsError, NoStreamResponseError, TimeoutError, OSError) as error:
                # Ambiguous: it may have landed. The next try carries the same id, so it cannot land twice.
                trouble = error
            else:
                return Appended(ack.seq, duplicate=bool(ack.duplicate))
            if time.monotonic() > deadline:
                raise Unavailable(f"the log did not take {envelope.type} within {APPEND_S:.0f} s: {trouble}")
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 2)

    async def append_all(self, envelopes: Sequence[Envelope]) -> list[Appended]:
        landed: list[Appended] = []
        for first in range(0, len(envelopes), jetstream_batch.MOST):
            some = envelopes[first : first + jetstream_batch.MOST]
            upto = await self._commit(some) if len(some) >= jetstream_batch.LEAST else None
            if upto is None:
                landed += await asyncio.gather(*(self.append(envelope) for envelope in some))
            else:
                landed += [Appended(seq) for seq in range(upto - len(some) + 1, upto + 1)]
        return landed

    async def _commit(self, envelopes: Sequence[Envelope]) -> int | None:
        messages = [Message(e.subject, encode(with_trace(e)), e.id) for e in envelopes]
        return await jetstream_batch.commit(self._nc, messages)

    async def _landed(self, envelope: Envelope, expect: Expect) -> Appended | None:
        """After a refused guard: did an earlier try of ours land? One replica checks the guard before the id.

        Ours need not be the last one: somebody may have written after it. Raises Conflict when it did not land; None
        when that could not be found out yet.
        """
        try:
            latest = await self.last(expect.subject)
            own = latest if expect.subject == envelope.subject else await self.last(envelope.subject)
            if own and own.envelope.id == envelope.id:
                return Appended(own.seq, duplicate=True)
            async with asyncio.timeout(RESOLVE_S):
                async for recorded in self.read(expect.seq, envelope.subject):
                    if recorded.envelope.id == envelope.id:
                        return Appended(recorded.seq, duplicate=True)
        except (Unavailable, TimeoutError):
            return None
        raise Conflict(expect, latest.seq if latest else 0)

    async def end(self) -> int:
        try:
            return (await self._js.stream_info(subjects.EVENTS)).state.last_seq
        except (NatsError, TimeoutError, OSError) as error:
            raise Unavailable(f"the log's end could not be read: {error}") from error

    async def last(self, subject: str) -> Recorded | None:
        try:
            msg = await self._js.get_last_msg(subjects.EVENTS, subject)
        except NotFoundError:
            return None
        except (NatsError, TimeoutError, OSError) as error:
            raise Unavailable(f"{subject} could not be read: {error}") from error
        at_ms = int(msg.time.timestamp() * 1000) if msg.time else 0
        return decode(msg.data or b"", seq=int(msg.seq or 0), at_ms=at_ms)

    async def read(self, after: int = 0, subject: str = ">") -> AsyncIterator[Recorded]:
        try:
            async for arrived in bursts_of(self._nc, subjects.EVENTS, after, subject, wait=False):
                for seq, at_ns, _, payload in arrived:
                    yield decode(payload, seq=seq, at_ms=at_ns // MS)
        except StreamGone as error:
            if error.end is None:
                raise Unavailable(str(error)) from error

    async def follow(self, position: Position = START) -> AsyncIterator[Recorded]:
        async for burst in self.bursts(position):
            for recorded in burst.recorded:
                yield recorded

    async def bursts(self, position: Position = START, wants: frozenset[str] | None = None) -> AsyncIterator[Burst]:
        read = decoder(wants)
        at_ms = position.at_ms

        async def verify(seq: int) -> None:
            """A log that lost its tail reuses sequences; the id at the checkpoint tells if it is still the same one."""
            if seq and position.event_id:
                await self._check(position)

        try:
            async for arrived in bursts_of(self._nc, subjects.EVENTS, position.seq, ">", verify=verify):
                last, found = position.seq, []
                for seq, at_ns, _, payload in arrived:
                    if seq != last + 1:
                        raise Diverged(f"events {last + 1} to {seq - 1} are missing from the log")
                    last = seq
                    if at_ns > at_ms * MS:
                        at_ms = at_ns // MS
                    recorded = read(payload, seq, at_ms)
                    if recorded is not None:
                        found.append(recorded)
                position = Position(last, event_id(arrived[-1][3]), at_ms)
                yield Burst(found, position)
        except StreamGone as error:
            raise Diverged(str(error)) from error

    async def _check(self, position: Position) -> None:
        try:
            msg = await self._js.get_msg(subjects.EVENTS, position.seq)
        except NotFoundError as error:
            raise Diverged(f"event {position.seq} is missing from the log") from error
        found = event_id(msg.data or b"")
        if found != position.event_id:
            raise Diverged(f"event {position.seq} is {found}, not {position.event_id}")


async def bus_on(nc: Client, replicas: int = 1) -> Bus:
    """Everything that services share, on a connection that somebody else owns."""
    await ensure(nc, replicas)
    blobs = JetStreamBlobs(nc, await nc.jetstream(timeout=5).object_store(subjects.BLOBS))
    return Bus(
        log=JetStreamLog(nc),
        blobs=blobs,
        assignments=JetStreamBoard(nc, subjects.ASSIGNMENTS),
        lease=JetStreamLease(nc, subjects.LEASES),
        telemetry=JetStreamTelemetry(nc),
        questions=NatsQuestions(nc),
        snapshots=StoredSnapshots(blobs, JetStreamBoard(nc, subjects.SNAPSHOTS)),
    )


@contextlib.asynccontextmanager
async def connect(url: str, name: str, *, replicas: int = 1) -> AsyncIterator[Bus]:
    """A bus over a connection of its own that reconnects for ever. Raises Unavailable after 30 seconds without one."""

    async def quiet(error: Exception) -> None:
        log.debug("nats: %s", error)

    async def opened() -> Client:
        return await nats.connect(
            url,
            name=name,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            ping_interval=10,
            pending_size=32 * 2**20,
            error_cb=quiet,
        )

    nc = await connected_within(opened, url)
    try:
        yield await bus_on(nc, replicas)
    finally:
        # Not drain(): it waits on readers' queues, which nobody empties any more.
        with contextlib.suppress(NatsError, TimeoutError, OSError):
            await nc.flush(2)
        await nc.close()


async def connected_within(opened: Callable[[], Awaitable[Client]], url: str, seconds: float = 30) -> Client:
    """Keep trying to connect. Raises Unavailable when there is no server for that long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await opened()
        except (NatsError, OSError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"no NATS server at {url}: {error}") from error
            await asyncio.sleep(0.2)
