"""Cutting stored messages off the connection in bulk gives what nats-py's own parser gives, wherever a read ends."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from nats.protocol.parser import Parser

from stoker_chassis.wire import Run, tap, untap


class Subscription:
    def __init__(self, id: int) -> None:
        self._id = id
        self._pending_queue: asyncio.Queue[Any] = asyncio.Queue()


class Client:
    """What the parser needs of a connection: it is told of messages and pings."""

    def __init__(self) -> None:
        self.stats = {"in_msgs": 0}
        self.pings = 0
        self.subscriptions = {id: Subscription(id) for id in (1, 2, 3)}
        self._ps: Any = Parser(self)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.subscriptions[sid]._pending_queue.put_nowait((sid, subject.decode(), reply.decode(), data))

    async def _process_ping(self) -> None:
        self.pings += 1


def stored(sid: int, seq: int, delivery: int, payload: bytes, headers: bytes = b"") -> bytes:
    place = b"stoker.event.node.n%d.verdict %d $JS.ACK.EVENTS.r1.1.%d.%d.1780000000000000000.%d" % (
        seq, sid, seq, delivery, 100 - delivery,
    )  # fmt: skip
    sizes = b"%d %d" % (len(headers), len(headers) + len(payload)) if headers else b"%d" % len(payload)
    return (b"HMSG " if headers else b"MSG ") + place + b" " + sizes + b"\r\n" + headers + payload + b"\r\n"


ID = b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n"
STATUS = b"NATS/1.0 408 Request Timeout\r\n\r\n"
TRAP = stored(1, 99, 99, b"inside of a payload")
WIRE = [
    stored(1, 1, 1, b"first"),
    stored(1, 2, 2, b"with headers", ID),
    b"PING\r\n",
    stored(1, 3, 3, b""),
    stored(2, 7, 1, b"for another one"),
    stored(1, 4, 4, b"x" * 300 + TRAP, ID),
    b"HMSG _INBOX.a 1 %d %d\r\n%s\r\n" % (len(STATUS), len(STATUS), STATUS),
    b"MSG _INBOX.b 3 5\r\nhello\r\n",
    stored(1, 5, 5, TRAP * 3),
    stored(1, 6, 6, b"last \r\n", ID),
    b"PING\r\n",
    stored(2, 8, 2, b"the end"),
]


def flat(queue: asyncio.Queue[Any]) -> list[tuple[int | str, bytes]]:
    """What lies in a queue, whichever way it came there: sequence (or subject, for what is not stored) and payload."""
    found: list[tuple[int | str, bytes]] = []
    while not queue.empty():
        item = queue.get_nowait()
        if isinstance(item, Run):
            assert item.last_delivery - item.first_delivery + 1 == len(item.messages)
            assert item.pending == 100 - item.last_delivery
            assert {at_ns for _, at_ns, _, _ in item.messages} == {1780000000000000000}
            assert [on.decode() for _, _, on, _ in item.messages] == [
                f"stoker.event.node.n{seq}.verdict" for seq, _, _, _ in item.messages
            ]
            found += [(seq, payload) for seq, _, _, payload in item.messages]
        else:
            _, subject, reply, payload = item
            found.append((int(reply.split(".")[5]) if reply else subject, payload))
    return found


async def received(reads: list[bytes], *tapped: int) -> tuple[dict[int, list[tuple[int | str, bytes]]], int]:
    nc: Any = Client()
    for sid in tapped:
        tap(nc, nc.subscriptions[sid])
    for data in reads:
        await nc._ps.parse(data)
    assert not nc._ps.buf
    return {sid: flat(sub._pending_queue) for sid, sub in nc.subscriptions.items()}, nc.pings


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = [*sorted(at), len(data)]
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


async def test_it_gives_what_the_parser_of_the_library_gives() -> None:
    whole = b"".join(WIRE)
    expected = await received([whole])
    assert [seq for seq, _ in expected[0][1]] == [1, 2, 3, 4, "_INBOX.a", 5, 6]
    assert expected[1] == 2
    assert await received([whole], 1) == expected
    assert await received([whole], 1, 2) == expected
    assert await received(WIRE, 1, 2) == expected


async def test_it_does_not_matter_where_reads_end() -> None:
    whole = b"".join(WIRE)
    expected = await received([whole])
    for at in range(1, len(whole)):
        assert await received(cut(whole, [at]), 1, 2) == expected, f"cut at {at}"
    chance = random.Random(1)
    for _ in range(200):
        at_ = chance.sample(range(1, len(whole)), 12)
        assert await received(cut(whole, at_), 1, 2) == expected, f"cut at {at_}"


async def test_messages_that_arrive_together_come_together() -> None:
    nc: Any = Client()
    tap(nc, nc.subscriptions[1])
    await nc._ps.parse(b"".join(stored(1, i, i, b"x") for i in range(1, 51)))
    run = nc.subscriptions[1]._pending_queue.get_nowait()
    assert (run.first_delivery, run.last_delivery, len(run.messages)) == (1, 50, 50)
    assert nc.subscriptions[1]._pending_queue.empty()


@pytest.mark.parametrize("begun", [b"", b"MSG stoker", stored(1, 1, 1, b"half of it")[:-8]])
async def test_tapping_loses_nothing_of_what_had_begun_to_arrive(begun: bytes) -> None:
    whole = stored(1, 1, 1, b"half of it") + stored(1, 2, 2, b"next")
    nc: Any = Client()
    await nc._ps.parse(begun)
    tap(nc, nc.subscriptions[1])
    await nc._ps.parse(whole.removeprefix(begun))
    assert [seq for seq, _ in flat(nc.subscriptions[1]._pending_queue)] == [1, 2]


async def test_who_is_no_longer_tapped_is_served_by_the_library() -> None:
    nc: Any = Client()
    tap(nc, nc.subscriptions[1])
    untap(nc, nc.subscriptions[1])
    await nc._ps.parse(stored(1, 1, 1, b"x"))
    assert not isinstance(nc.subscriptions[1]._pending_queue.get_nowait(), Run)
