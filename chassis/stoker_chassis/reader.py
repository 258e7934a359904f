"""The gapless reader of a JetStream stream: overlapping pulls, every sequence checked, resumed after any loss.

nats-py's own iterators make a task and a timer per message, and its ordered consumer drops messages when the handler is
slow. Here requests for the next batch are published ahead of need to one inbox, whose queue is tapped (`wire`) and read
directly; whatever goes wrong (server gone, consumer deleted, a delivery missing) ends in a new consumer that starts
after the last message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from .clock import new_id
from .wire import Run, Stored, tap, untap

BATCH = 1000
AHEAD = 3
HEARTBEAT_S = 1.0
PAUSE_S = 0.1
log = logging.getLogger(__name__)


class Delivered(NamedTuple):
    """A stored message, and its place in the stream."""

    seq: int
    subject: str
    payload: bytes


class _Lost(Exception):
    """This consumer is of no more use; the message says why."""


class StreamGone(Exception):
    """The stream is missing (`end` is None), or it lost its tail: it ends at `end`, before what was read from it."""

    def __init__(self, message: str, end: int | None = None) -> None:
        super().__init__(message)
        self.end = end


class _Consumer:
    """One ephemeral pull consumer, with requests running ahead."""

    def __init__(self, nc: Client, stream: str, name: str, sub: Subscription, batch: int) -> None:
        self._nc = nc
        self._sub = sub
        # The queue's own deque: its get() costs more than all the rest of a read, and nothing else takes from it.
        self._waiting: deque[Msg | Run] = sub._pending_queue._queue  # type: ignore[attr-defined]
        self._batch = batch
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        self._delete = f"$JS.API.CONSUMER.DELETE.{stream}.{name}"
        self._connection = nc.stats["reconnects"]  # requests do not outlive the connection they were sent on
        self._delivered = 0
        self._asked = 0
        self._request = json.dumps(
            {"batch": batch, "expires": 30_000_000_000, "idle_heartbeat": int(HEARTBEAT_S * 1e9)}
        ).encode()

    @property
    def low(self) -> bool:
        """Whether it is time to ask for more."""
        return self._asked <= self._batch * (AHEAD - 1)

    async def ask(self) -> None:
        while self.low:
            self._asked += self._batch
            await self._nc.publish(self._next, self._request, reply=self._sub.subject)

    async def close(self) -> None:
        """Nobody waits for an answer: a consumer that is not deleted now is forgotten by the server in 30 s."""
        untap(self._nc, self._sub)
        with contextlib.suppress(NatsError, OSError):
            await self._sub.unsubscribe()
            await self._nc.publish(self._delete, reply=self._sub.subject)

    async def item(self) -> Msg | Run:
        """What comes next, or a status; _Lost when even heartbeats have stopped, or the server has forgotten us."""
        queue = self._sub._pending_queue
        for _ in range(10):
            # Not wait_for(): in Python 3.11 it can swallow a cancellation that comes with a message.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S / 4):
                    waited: Msg | Run = await queue.get()
                    return waited
            if self._nc.stats["reconnects"] != self._connection:
                raise _Lost("reconnected")
        raise _Lost("no heartbeat")

    async def take(self) -> Run | None:
        """The next stored messages, as many as arrived together; None for a heartbeat or an expired request."""
        waiting = self._waiting
        item = waiting.popleft() if waiting else await self.item()
        if not isinstance(item, Run):
            if not item.data and (headers := item.headers) and "Status" in headers:
                await self._status(headers)
                return None
            item = _run_of(item)
        # Deliveries only count up, so when both ends are right, everything in between is.
        count = len(item.messages)
        if item.first_delivery != self._delivered + 1 or item.last_delivery != self._delivered + count:
            raise _Lost(f"deliveries {item.first_delivery} to {item.last_delivery} after {self._delivered}")
        self._delivered += count
        self._asked -= count
        return item

    async def _status(self, headers: dict[str, str]) -> None:
        """A heartbeat or an expired request; _Lost for anything else."""
        status = headers["Status"]
        if status in ("404", "408"):
            self._asked = max(0, self._asked - int(headers.get("Nats-Pending-Messages", self._batch)))
            await self.ask()
        elif status != "100":
            raise _Lost(f"{status} {headers.get('Description', '')}")


def _run_of(msg: Msg) -> Run:
    """A message that nats-py itself has parsed."""
    # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time ns>.<pending>
    _, _, _, _, _, seq, delivery, at_ns, pending = msg.reply.split(".")
    message = (int(seq), int(at_ns), msg.subject.encode(), msg.data)
    return Run(int(delivery), int(delivery), int(pending), [message])


async def _end(nc: Client, stream: str, after: int) -> int:
    """The last sequence of the stream, which must not lie before what was read."""
    try:
        end: int = (await nc.jetstream(timeout=3).stream_info(stream)).state.last_seq
    except NotFoundError as error:
        raise StreamGone(f"stream {stream} does not exist") from error
    if end < after:
        raise StreamGone(f"stream {stream} ends at {end}, but was read up to {after}", end)
    return end


async def _open(nc: Client, stream: str, after: int, subject: str, batch: int) -> tuple[_Consumer, int]:
    """A consumer that starts after `after`, and how many messages wait for it now."""
    name = f"r{new_id()}"
    config = ConsumerConfig(
        name=name,
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=after + 1,
        filter_subject=subject,
        inactive_threshold=30,
        mem_storage=True,
        num_replicas=1,
        max_waiting=16,
    )
    info = await nc.jetstream(timeout=3).add_consumer(stream, config)
    sub = await nc.subscribe(nc.new_inbox(), pending_msgs_limit=0, pending_bytes_limit=0)
    tap(nc, sub)
    return _Consumer(nc, stream, name, sub, batch), info.num_pending or 0


async def follow_stream(
    nc: Client, stream: str, after: int, subject: str, *, wait: bool = True, batch: int | None = None
) -> AsyncIterator[Delivered]:
    """Every message of the stream after sequence `after` that matches `subject`, one by one: see `bursts_of`."""
    async for burst in bursts_of(nc, stream, after, subject, wait=wait, batch=batch):
        for seq, _, on, payload in burst:
            yield Delivered(seq, on.decode(), payload)


async def bursts_of(
    nc: Client,
    stream: str,
    after: int,
    subject: str,
    *,
    wait: bool = True,
    batch: int | None = None,
    verify: Callable[[int], Awaitable[None]] | None = None,
) -> AsyncIterator[list[Stored]]:
    """Every message of the stream after sequence `after` that matches `subject`, in order, as they arrive together.

    With `wait` for ever, else up to the end at the time of the call. Three times `batch` messages at most lie in
    memory; `verify(last)` is asked before each (re)start if this is still the stream that was read up to `last`.
    Raises StreamGone, and what `verify` raises.
    """
    last = after
    until: int | None = None
    while True:
        consumer: _Consumer | None = None
        try:
            end = await _end(nc, stream, last)
            if verify:
                await verify(last)
            if not wait and until is None:
                until = end
            consumer, waiting = await _open(nc, stream, last, subject, batch or BATCH)
            await consumer.ask()
            while wait or waiting:
                run = await consumer.take()
                if run is None:
                    if not wait:
                        raise _Lost("quiet before the end")
                    continue
                burst = run.messages
                if until is not None and burst[-1][0] > until:
                    if within := [stored for stored in burst if stored[0] <= until]:
                        yield within
                    return
                yield burst
                last, waiting = burst[-1][0], run.pending
                if consumer.low:
                    await consumer.ask()
            return
        except (_Lost, NatsError, TimeoutError, OSError) as error:
            log.info("reader of %s starts again after %d: %s", stream, last, error)
            await asyncio.sleep(PAUSE_S)
        finally:
            if consumer is not None:
                await consumer.close()
