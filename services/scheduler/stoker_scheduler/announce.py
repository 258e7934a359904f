"""What held and is not yet told: each decision that changed a job is told once, by whoever leads then."""

from __future__ import annotations

from stoker_proto import AttemptPlaced, Event, JobBoosted, JobFinished, JobRequeued

from .state import State

Announced = AttemptPlaced | JobRequeued | JobFinished | JobBoosted
ANNOUNCED: dict[type[Event], str] = {
    AttemptPlaced: "placed", JobRequeued: "requeued", JobFinished: "finished", JobBoosted: "boosted",
}  # fmt: skip


def announcement_key(event: Announced) -> str:
    """Which announcement this is; also its event id, so that two leaders announce once."""
    number = getattr(event, "attempt", None)
    name = ANNOUNCED[type(event)]
    return f"{name}:{event.job_id}" if number is None else f"{name}:{event.job_id}:{number}"


def announce(state: State, event: Announced) -> None:
    state.to_announce[announcement_key(event)] = event


def announcements(state: State) -> list[tuple[str, Event]]:
    """What held and is not yet told, as (event id, event)."""
    return list(state.to_announce.items())
