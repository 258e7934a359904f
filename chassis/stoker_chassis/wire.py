"""A faster way off the connection for readers of streams: a whole network read at a time instead of message by message.

nats-py spends two thirds of a rebuild on its own bookkeeping: a coroutine, a header table, a queue and a parse of the
acknowledgement subject for each message. A reader needs none of that, so its subscriptions are tapped: runs of complete
stored messages for them are cut out of what arrived by one expression each and put into the subscription's queue as one
list. Everything else, and whatever does not look exactly as expected, is left to nats-py's parser.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, NamedTuple

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

# A stored message: $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time ns>.<pending>
_STORED = re.compile(
    rb"H?MSG (\S+) (\d+) \$JS\.ACK\.[^. ]+\.[^. ]+\.\d+\.(\d+)\.(\d+)\.(\d+)\.(\d+) (?:(\d+) )?(\d+)\r\n"
)


class Delivered(NamedTuple):
    """A stored message and its place: stream sequence, the server's time of storing it, and how many come after it.

    `delivery` counts what its consumer was given.
    """

    seq: int
    delivery: int
    pending: int
    at_ms: int
    subject: str
    payload: bytes


class _TappedParser(Parser):
    """nats-py's parser, which cuts runs of messages for tapped subscriptions out before it looks."""

    taps: dict[bytes, asyncio.Queue[Any]]

    async def parse(self, data: bytes = b"") -> None:
        if self.taps and self.state == AWAITING_CONTROL_LINE:
            if self.buf:
                data = bytes(self.buf) + data
                self.buf = bytearray()
            taken, partial = self._cut(data)
            data = data[taken:]
            if partial:
                self.buf = bytearray(data)
                return
        await super().parse(data)

    def _cut(self, data: bytes) -> tuple[int, bool]:
        """How many bytes were taken, and whether the rest is the beginning of a message for a tap."""
        at, size = 0, len(data)
        run: list[Delivered] = []
        running = b""
        partial = False
        while head := _STORED.match(data, at):
            subject, sid, seq, delivery, at_ns, pending, headers, length = head.groups()
            if sid not in self.taps:
                break
            start = head.end()
            end = start + int(length)
            if end + 2 > size:
                partial = True
                break
            if sid != running:
                self._put(running, run)
                run, running = [], sid
            if headers:
                start += int(headers)
            run.append(Delivered(
                int(seq), int(delivery), int(pending), int(at_ns) // 1_000_000, subject.decode(), data[start:end]
            ))  # fmt: skip
            at = end + 2
        self._put(running, run)
        return at, partial

    def _put(self, sid: bytes, run: list[Delivered]) -> None:
        if run:
            self.taps[sid].put_nowait(run)
            self.nc.stats["in_msgs"] += len(run)


def _sid(sub: Subscription) -> bytes:
    return str(sub._id).encode()


def tap(nc: Client, sub: Subscription) -> None:
    """From now on runs of stored messages may come into the subscription's queue as lists of `Delivered`."""
    parser = nc._ps
    if type(parser) is Parser:
        tapped = _TappedParser(nc)
        # The same state, not a copy: the old one may be waiting in the middle of a read, which it will then finish.
        tapped.__dict__ = parser.__dict__
        tapped.taps = {}
        nc._ps = parser = tapped
    if isinstance(parser, _TappedParser):
        parser.taps[_sid(sub)] = sub._pending_queue


def untap(nc: Client, sub: Subscription) -> None:
    if isinstance(nc._ps, _TappedParser):
        nc._ps.taps.pop(_sid(sub), None)
