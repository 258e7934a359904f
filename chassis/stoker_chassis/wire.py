"""A faster way off the connection for readers of streams: a whole network read at a time instead of message by message.

nats-py spends two thirds of a rebuild on its own bookkeeping: a coroutine, a header table, a queue and a parse of the
acknowledgement subject for each message. A reader needs none of that, so its subscriptions are tapped: runs of complete
stored messages for them are cut out of what arrived and put into the subscription's queue as one `Run`. Everything
else, and whatever does not look exactly as expected, is left to nats-py's parser.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

Stored = tuple[int, int, bytes, bytes]
"""A stored message: its sequence, the server's time of storing it in nanoseconds, its subject and its payload."""


class Run(NamedTuple):
    """Stored messages that arrived together. Deliveries count what a consumer was given, `pending` what it was not."""

    first_delivery: int
    last_delivery: int
    pending: int
    messages: list[Stored]


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
        """How many bytes were taken, and whether the rest is the beginning of a message for a tap.

        The line before a message is `MSG <subject> <sid> <reply> <size>`, or `HMSG <subject> <sid> <reply> <size of
        headers> <size of all>`. Splitting it costs half of what a regular expression does.
        """
        at, size = 0, len(data)
        messages: list[Stored] = []
        tapped, first, last = b"", [b""], [b""]
        while (eol := data.find(b"\r\n", at)) > 0:
            words = data[at:eol].split()
            if len(words) == 6 and words[0] == b"HMSG":
                headers, length = int(words[4]), int(words[5])
            elif len(words) == 5 and words[0] == b"MSG":
                headers, length = 0, int(words[4])
            else:
                break
            sid = words[2]
            place = words[3].split(b".")
            if sid not in self.taps or len(place) != 9 or place[1] != b"ACK":
                break
            end = eol + 2 + length
            if end + 2 > size:
                self._put(tapped, first, last, messages)
                return at, True
            if sid != tapped:
                self._put(tapped, first, last, messages)
                tapped, first, messages = sid, place, []
            last = place
            messages.append((int(place[5]), int(place[7]), words[1], data[eol + 2 + headers : end]))
            at = end + 2
        self._put(tapped, first, last, messages)
        return at, False

    def _put(self, sid: bytes, first: list[bytes], last: list[bytes], messages: list[Stored]) -> None:
        if messages:
            # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time ns>.<pending>
            self.taps[sid].put_nowait(Run(int(first[6]), int(last[6]), int(last[8]), messages))
            self.nc.stats["in_msgs"] += len(messages)


def _sid(sub: Subscription) -> bytes:
    return str(sub._id).encode()


def tap(nc: Client, sub: Subscription) -> None:
    """From now on stored messages may come into the subscription's queue as `Run`s."""
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
