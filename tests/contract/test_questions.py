"""What questions between services promise, asked of the twin in memory and of NATS alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stoker_chassis.eventlog import Unavailable
from stoker_chassis.jetstream import connect
from stoker_chassis.questions import MAX_SAID, Handler, QuestionFailed
from stoker_chassis.stores import Bus
from stoker_local.nats import EmbeddedNats
from stoker_proto.subjects import question
from tests.waiting import until

ECHO = question("tester", "echo")


@asynccontextmanager
async def answering(bus: Bus, handler: Handler, subject: str = ECHO) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(bus.questions.answer(subject, handler))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def later(payload: bytes) -> bytes:
    await asyncio.sleep(0)
    return b"later " + payload


async def test_a_question_is_answered_by_plain_and_by_awaiting_handlers(either_bus: Bus) -> None:
    ask = either_bus.questions.ask
    async with answering(either_bus, lambda payload: b"at once " + payload):
        assert await ask(ECHO, b"1", 5) == b"at once 1"
    async with answering(either_bus, later):
        assert await ask(ECHO, b"2", 5) == b"later 2"
    async with answering(either_bus, lambda payload: payload):
        assert await ask(ECHO, b"", 5) == b""


async def test_each_question_gets_its_own_answer_from_one_of_those_who_serve(either_bus: Bus) -> None:
    served: list[bytes] = []

    def echo(payload: bytes) -> bytes:
        served.append(payload)
        return payload

    asked = [b"%d" % i for i in range(40)]
    async with answering(either_bus, echo), answering(either_bus, echo), answering(either_bus, echo):
        assert await asyncio.gather(*(either_bus.questions.ask(ECHO, each, 5) for each in asked)) == asked
    assert sorted(served) == sorted(asked)


async def test_questions_on_other_subjects_are_not_heard(either_bus: Bus) -> None:
    other = question("tester", "other")
    async with answering(either_bus, lambda _: b"echo"), answering(either_bus, lambda _: b"other", other):
        assert await either_bus.questions.ask(other, b"", 5) == b"other"
        assert await either_bus.questions.ask(ECHO, b"", 5) == b"echo"


async def test_a_slow_answer_keeps_no_other_question_waiting(either_bus: Bus) -> None:
    release = asyncio.Event()

    async def handler(payload: bytes) -> bytes:
        if payload == b"slow":
            await release.wait()
        return payload

    async with answering(either_bus, handler):
        slow = asyncio.create_task(either_bus.questions.ask(ECHO, b"slow", 5))
        await asyncio.sleep(0)
        assert await either_bus.questions.ask(ECHO, b"quick", 5) == b"quick"
        assert not slow.done()
        release.set()
        assert await slow == b"slow"


async def test_when_nobody_answers_in_time_the_error_says_who_was_asked(either_bus: Bus) -> None:
    with pytest.raises(Unavailable, match=ECHO):
        await either_bus.questions.ask(ECHO, b"", 0.1)


async def test_an_answer_that_comes_too_late_is_no_answer(either_bus: Bus) -> None:
    release = asyncio.Event()

    async def handler(payload: bytes) -> bytes:
        await release.wait()
        return payload

    async with answering(either_bus, handler):
        with pytest.raises(Unavailable, match=ECHO):
            await either_bus.questions.ask(ECHO, b"first", 0.1)
        release.set()
        assert await either_bus.questions.ask(ECHO, b"second", 5) == b"second"


async def test_a_question_waits_for_somebody_who_is_just_starting(either_bus: Bus) -> None:
    asking = asyncio.create_task(either_bus.questions.ask(ECHO, b"1", 10))
    await asyncio.sleep(0.1)
    assert not asking.done()
    async with answering(either_bus, lambda payload: payload):
        assert await asking == b"1"


async def test_another_instance_answers_when_one_has_stopped(either_bus: Bus) -> None:
    async with answering(either_bus, lambda _: b"a") as first, answering(either_bus, lambda _: b"b"):
        await until(lambda: answers(either_bus, b"a"))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert {await either_bus.questions.ask(ECHO, b"", 5) for _ in range(10)} == {b"b"}


async def answers(bus: Bus, wanted: bytes) -> bool:
    return await bus.questions.ask(ECHO, b"", 5) == wanted


async def test_a_handler_that_fails_tells_the_asker_and_serves_on(
    either_bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(payload: bytes) -> bytes:
        return b"%d" % (10 // int(payload))

    async with answering(either_bus, handler):
        with pytest.raises(QuestionFailed, match="ZeroDivisionError"):
            await either_bus.questions.ask(ECHO, b"0", 5)
        assert "ZeroDivisionError" in caplog.text
        assert await either_bus.questions.ask(ECHO, b"5", 5) == b"2"


async def test_what_no_message_carries_is_refused_on_either_side(either_bus: Bus) -> None:
    async with answering(either_bus, lambda payload: payload * 2):
        with pytest.raises(QuestionFailed, match=f"question {ECHO} has {MAX_SAID + 1} bytes"):
            await either_bus.questions.ask(ECHO, b"x" * (MAX_SAID + 1), 5)
        with pytest.raises(QuestionFailed, match=f"answer to {ECHO} has {MAX_SAID + 2} bytes"):
            await either_bus.questions.ask(ECHO, b"x" * (MAX_SAID // 2 + 1), 5)
        assert len(await either_bus.questions.ask(ECHO, b"x" * (MAX_SAID // 2), 5)) == MAX_SAID


async def test_one_who_serves_is_found_again_after_the_server_was_killed(nats_server: EmbeddedNats, bus: Bus) -> None:
    async with connect(nats_server.url, "asker") as asker, answering(bus, lambda payload: payload):
        assert await asker.questions.ask(ECHO, b"1", 5) == b"1"
        nats_server.kill9()
        await until(lambda: nats_server.restarts == 1)
        assert await asker.questions.ask(ECHO, b"2", 10) == b"2"


async def test_who_serves_learns_that_its_connection_was_closed(nats_server: EmbeddedNats) -> None:
    async with connect(nats_server.url, "server") as bus:
        serving = asyncio.create_task(bus.questions.answer(ECHO, lambda payload: payload))
        assert await bus.questions.ask(ECHO, b"1", 5) == b"1"
    with pytest.raises(Unavailable, match="closed"):
        await asyncio.wait_for(serving, 5)
