"""Many events as one write: an atomic batch, for which the client library has no call.

A server that syncs every write to disk syncs each single event; a batch costs it a few syncs, however large it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from nats.aio.client import Client
from nats.errors import Error as NatsError
from pydantic_core import from_json

from .clock import new_id

LEAST = 12  # events from which on a batch is cheaper than so many single writes that are under way together
MOST = 500  # in one batch; the server takes 1,000
COMMIT_S = 5.0


class Message(NamedTuple):
    subject: str
    payload: bytes
    id: str


async def commit(nc: Client, messages: Sequence[Message]) -> int | None:
    """Store all of them in a row, and say where the last one lies.

    None when the server refused or did not answer, and nobody knows what it did: it refuses a whole batch when it
    holds an event of the same id. Sent again one by one with their ids, none is stored twice.
    """
    batch, last = new_id(), len(messages)
    with contextlib.suppress(NatsError, TimeoutError, OSError, ValueError):
        for at, message in enumerate(messages, 1):
            headers = {"Nats-Msg-Id": message.id, "Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(at)}
            if at < last:
                await nc.publish(message.subject, message.payload, headers=headers)
                continue
            headers["Nats-Batch-Commit"] = "1"
            answer = await nc.request(message.subject, message.payload, timeout=COMMIT_S, headers=headers)
            told = from_json(answer.data)
            if told.get("count") == last and "seq" in told:
                return int(told["seq"])
    return None
