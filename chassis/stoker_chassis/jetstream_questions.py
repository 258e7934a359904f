"""Questions between services over plain NATS requests: nothing is stored, and of many who serve one answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from .eventlog import Unavailable
from .questions import Handler, QuestionFailed, answered, fits

PAUSE_S = 0.05
FAILED = "Stoker-Failed"
log = logging.getLogger(__name__)


class NatsQuestions:
    """`Questions` by request and reply in a queue group. A failure comes back as a message with the header FAILED."""

    def __init__(self, nc: Client) -> None:
        self._nc = nc

    async def ask(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        fits(f"the question {subject}", payload)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                reply = await self._nc.request(subject, payload, timeout=max(0.001, deadline - time.monotonic()))
            except NoRespondersError as error:
                # Known at once, but the one who answers may just be starting, or be back in a moment.
                if time.monotonic() + PAUSE_S > deadline:
                    raise Unavailable(f"nobody serves {subject}, for {timeout_s:g} s") from error
                await asyncio.sleep(PAUSE_S)
            except (NatsError, TimeoutError, OSError) as error:
                raise Unavailable(f"no answer to {subject} within {timeout_s:g} s") from error
            else:
                if reply.headers and FAILED in reply.headers:
                    raise QuestionFailed(reply.data.decode(errors="replace"))
                return reply.data

    async def answer(self, subject: str, handler: Handler) -> None:
        sub = await self._nc.subscribe(subject, queue="answers")
        try:
            async with asyncio.TaskGroup() as answers:
                async for msg in sub.messages:
                    answers.create_task(self._answer(msg, handler))
            raise Unavailable(f"the connection that served {subject} was closed")
        finally:
            with contextlib.suppress(NatsError, OSError):
                await sub.unsubscribe()

    async def _answer(self, msg: Msg, handler: Handler) -> None:
        headers = None
        try:
            said = await answered(msg.subject, handler, msg.data)
        except QuestionFailed as failed:
            said, headers = str(failed).encode()[:4096], {FAILED: "1"}
        try:
            await self._nc.publish(msg.reply, said, headers=headers)
        except (NatsError, OSError) as error:
            log.warning("an answer to %s could not be sent: %s", msg.subject, error)
