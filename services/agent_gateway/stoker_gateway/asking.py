"""Questions to the scheduler, and what no answer means."""

from __future__ import annotations

import logging
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from stoker_chassis.eventlog import Unavailable
from stoker_chassis.questions import QuestionFailed
from stoker_chassis.stores import Bus
from stoker_proto import Problem, ProblemError, problem, subjects

ANSWER_S = 5.0
A = TypeVar("A", bound=BaseModel)
log = logging.getLogger(__name__)


async def ask(bus: Bus, verb: str, asked: BaseModel | None, answer: type[A]) -> A:
    """What the scheduler answers. Raises ProblemError: its own, or scheduler_unavailable when it is silent."""
    subject = subjects.question("scheduler", verb)
    try:
        said = await bus.questions.ask(subject, asked.model_dump_json().encode() if asked else b"", ANSWER_S)
        raw = from_json(said)
        if isinstance(raw, dict) and "problem" in raw:
            raise ProblemError(Problem.model_validate(raw["problem"]))
        return answer.model_validate(raw)
    except Unavailable as error:
        detail = f"The scheduler did not answer within {ANSWER_S:g} s"
        actions = ("try again in a moment", "check that a scheduler runs")
        raise ProblemError(problem("scheduler_unavailable", detail, retry_after_s=2, next_actions=actions)) from error
    except (QuestionFailed, ValueError, ValidationError) as error:
        log.error("%s: %s", subject, error)
        raise ProblemError(problem("internal", f"The scheduler could not answer: {error}")) from error
