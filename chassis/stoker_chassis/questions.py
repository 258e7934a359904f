"""How a question is answered, the same over every wire: what the handler says, or why there is no answer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable

MAX_SAID = 1_000_000
Handler = Callable[[bytes], Awaitable[bytes] | bytes]
log = logging.getLogger(__name__)


class QuestionFailed(Exception):
    """Asking again will not help: the one who was asked failed, or a side said more than MAX_SAID bytes."""


def fits(what: str, payload: bytes) -> bytes:
    """The payload, when a message can carry it."""
    if len(payload) > MAX_SAID:
        raise QuestionFailed(f"{what} has {len(payload)} bytes, and a message carries {MAX_SAID} at most")
    return payload


async def answered(subject: str, handler: Handler, payload: bytes) -> bytes:
    """What the handler answers. Whatever goes wrong in it is logged here and told to the asker as QuestionFailed."""
    try:
        said = handler(payload)
        return fits(f"the answer to {subject}", await said if inspect.isawaitable(said) else said)
    except QuestionFailed as failed:
        log.error("%s", failed)
        raise
    except Exception as error:
        log.exception("%s could not be answered", subject)
        raise QuestionFailed(f"{subject} could not be answered: {type(error).__name__}: {error}") from error
