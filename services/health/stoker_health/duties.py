"""What an agent owes: folded from the log, so that an agent that was killed goes on where it stopped. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stoker_proto import (
    AttemptExited,
    AttemptPlaced,
    FindingRecorded,
    JobFailureAttributed,
    JobFinished,
    JobRequeued,
    NodeJoined,
    NodeReady,
    NodeReleased,
    NodeScanned,
    PreflightFailed,
    PreflightPassed,
    PreflightReported,
    PreflightStarted,
    Recorded,
    RetestRequested,
    SelfTested,
)

Key = tuple[str, int]


@dataclass(slots=True)
class Preflight:
    """A gang's preflight that this node takes part in."""

    placed: AttemptPlaced
    head: dict[int, PreflightStarted] = field(default_factory=dict)
    reports: dict[int, dict[str, PreflightReported]] = field(default_factory=dict)


@dataclass(slots=True)
class Duties:
    """The open duties of one node's agent."""

    node: str
    epoch: str
    seq: int = 0
    joined: NodeJoined | None = None
    tests: int = 0
    retest_seq: int = 0
    gangs: dict[Key, AttemptPlaced] = field(default_factory=dict)
    preflights: dict[Key, Preflight] = field(default_factory=dict)
    scans: dict[Key, None] = field(default_factory=dict)
    found: dict[str, int] = field(default_factory=dict)
    standing: set[str] = field(default_factory=set)

    @property
    def due_test(self) -> Literal["joined", "retest"] | None:
        if self.retest_seq:
            return "retest"
        return "joined" if self.joined is not None and not self.tests else None


def evolve(duties: Duties, recorded: Recorded) -> Duties:
    event, duties.seq = recorded.event, recorded.seq
    match event:
        case NodeJoined() if event.node == duties.node:
            duties.joined = event if event.boot_epoch == duties.epoch else None
            duties.retest_seq = 0  # the test after a boot is a re-test of its own
        case SelfTested() if event.node == duties.node and event.boot_epoch == duties.epoch:
            duties.tests += 1
            if event.began_seq >= duties.retest_seq:
                duties.retest_seq = 0
        case RetestRequested() if event.node == duties.node and duties.joined is not None:
            duties.retest_seq = recorded.seq
        case FindingRecorded() if event.node == duties.node and event.boot_epoch == duties.epoch:
            fault = event.finding_id.rsplit("#", 1)[0]
            duties.found[fault] = duties.found.get(fault, 0) + 1
            duties.standing.add(fault)
        case NodeReady() | NodeReleased() if event.node == duties.node:
            duties.standing.clear()
        case AttemptPlaced():
            mine = [a for a in event.allocations if a.node == duties.node and a.boot_epoch == duties.epoch]
            if mine:
                duties.gangs[(event.job_id, event.attempt)] = event
                if event.preflight == "required":
                    duties.preflights[(event.job_id, event.attempt)] = Preflight(event)
        case PreflightStarted() | PreflightReported():
            preflight = duties.preflights.get((event.job_id, event.attempt))
            if preflight is not None:
                _told(preflight, event)
        case PreflightPassed() | PreflightFailed():
            duties.preflights.pop((event.job_id, event.attempt), None)
        case AttemptExited():
            key = (event.job_id, event.attempt)
            if key in duties.gangs and event.failed:
                duties.scans.setdefault(key)
        case NodeScanned() if event.node == duties.node:
            # Kept out for good: a second exit of the same gang asks for no second scan.
            duties.gangs.pop((event.job_id, event.attempt), None)
            duties.scans.pop((event.job_id, event.attempt), None)
        case JobFailureAttributed() | JobRequeued():
            _over(duties, (event.job_id, event.attempt))
        case JobFinished():
            for key in [k for k in duties.gangs if k[0] == event.job_id]:
                _over(duties, key)
    return duties


def _told(preflight: Preflight, event: PreflightStarted | PreflightReported) -> None:
    if isinstance(event, PreflightReported):
        preflight.reports.setdefault(event.round, {})[event.node] = event
    elif event.master_port is not None:
        preflight.head[event.round] = event


def _over(duties: Duties, key: Key) -> None:
    duties.gangs.pop(key, None)
    duties.preflights.pop(key, None)
    duties.scans.pop(key, None)
