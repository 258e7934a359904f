"""The health leader as the leader loop sees it, and the ear for heartbeats."""

from __future__ import annotations

import time

from stoker_chassis.eventlog import Expect
from stoker_chassis.service import Decision
from stoker_chassis.stores import Telemetry
from stoker_proto import DeviceSample, Recorded, subjects

from .judge import due_ms, rule_gangs, rule_nodes
from .verdict import Health, evolve


class Ear:
    """Hears heartbeats by this process's monotonic clock; a new ear waits a whole window before it calls silence."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._since = time.monotonic()
        self._heard: dict[tuple[str, str], float] = {}

    async def listen(self, telemetry: Telemetry, after: int) -> None:
        async for sample in telemetry.follow(subjects.device("*"), after):
            beat = DeviceSample.model_validate_json(sample.payload)
            self._heard[(beat.node, beat.boot_epoch)] = time.monotonic()

    def silent(self, health: Health) -> set[str]:
        """Nodes not heard in their present boot epoch for the whole window."""
        limit = time.monotonic() - self._silence_s
        if self._since > limit:
            return set()
        return {n.name for n in health.nodes.values() if self._heard.get((n.name, n.epoch), 0.0) < limit}


class HealthLeader:
    """Folds the log and rules."""

    def __init__(self, ear: Ear) -> None:
        self.health = Health()
        self._ear = ear

    def evolve(self, recorded: Recorded) -> None:
        self.health = evolve(self.health, recorded)

    def decide(self, now_ms: int) -> list[Decision]:
        rulings = [*rule_nodes(self.health, self._ear.silent(self.health)), *rule_gangs(self.health, now_ms)]
        decisions = []
        for ruling in rulings:
            guard = None
            if ruling.verdict_seq is not None:
                guard = Expect(ruling.event.subject(), ruling.verdict_seq)
            decisions.append(Decision(ruling.event, guard, ruling.id))
        return decisions

    def due_ms(self, now_ms: int) -> int | None:
        return due_ms(self.health)
