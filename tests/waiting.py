"""Waiting on conditions with a deadline, never on hope."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 10) -> None:
    """Return once the condition holds; fails when it does not hold in time."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.02)


async def take(source: AsyncIterator[T], count: int, seconds: float = 20) -> list[T]:
    """The next `count` items; fails when they do not come in time."""
    taken: list[T] = []
    async with asyncio.timeout(seconds):
        while len(taken) < count:
            taken.append(await anext(source))
    return taken
