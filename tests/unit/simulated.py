"""Small worlds for tests of the simulator: jobs in minutes, and who started when."""

from __future__ import annotations

from typing import Any

from stoker_proto import AttemptPlaced, Cluster, JobFinished, JobSpec, Recorded
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.simulation.measure import Ledger, Result
from stoker_scheduler.simulation.workload import (
    MS_IN_MINUTE,
    START_MS,
    Happening,
    Work,
    Workload,
    alike,
    configured,
    joining,
)
from stoker_scheduler.simulation.world import Options, World


def work(
    name: str, at: float, gpus: int, minutes: float, *, per_node: int = 2, limit: bool = True, **compute: Any
) -> Work:
    """A job that comes at this minute; up to `per_node` GPUs are one node's share."""
    share = min(gpus, per_node)
    spec = JobSpec.model_validate(
        {
            "experiment_name": "exp",
            "command": "true",
            "compute": {"accelerator_type": f"GPU_{share}xSIM", "num_accelerators": gpus, **compute},
            "limits": {"timeout_minutes": minutes} if limit else {},
        }
    )
    return Work(name, START_MS + round(at * MS_IN_MINUTE), spec, round(minutes * MS_IN_MINUTE))


class Play:
    """A played world: its result, the minutes of starts and ends, and every event."""

    def __init__(
        self, works: list[Work], nodes: int = 1, *, gpus: int = 2, cluster: Cluster | None = None,
        options: Options | None = None, happenings: tuple[Happening, ...] = (), check: Any = None,
    ) -> None:  # fmt: skip
        self.records: list[Recorded] = []
        self.ledger = Ledger(START_MS)
        self.check = check
        given = (configured(cluster or Cluster(), START_MS), *joining(alike(nodes, gpus, "SIM"), START_MS))
        workload = Workload(tuple(works)).plus((*given, *happenings))
        self.scheduler = Scheduler(Timing(), tells=False)
        self.world = World(self.scheduler, workload, options or Options(), self.ledger, self._saw)
        self.world.play()

    def _saw(self, recorded: Recorded) -> None:
        self.records.append(recorded)
        if self.check is not None:
            self.check(self.scheduler.state)

    @property
    def result(self) -> Result:
        return self.ledger.result(self.world.now_ms)

    @property
    def starts(self) -> dict[str, list[float]]:
        """By job, the minutes at which its attempts were placed."""
        found: dict[str, list[float]] = {}
        for record in self.records:
            if isinstance(record.event, AttemptPlaced):
                found.setdefault(record.event.job_id, []).append(minutes(record.at_ms))
        return found

    @property
    def ends(self) -> dict[str, float]:
        return {r.event.job_id: minutes(r.at_ms) for r in self.records if isinstance(r.event, JobFinished)}


def minutes(at_ms: int) -> float:
    return round((at_ms - START_MS) / MS_IN_MINUTE, 4)
