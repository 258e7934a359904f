"""The health leader as the leader loop sees it, and the ear for heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable

from stoker_chassis.eventlog import Expect
from stoker_chassis.service import Decision
from stoker_chassis.stores import Telemetry
from stoker_proto import DeviceSample, Recorded, subjects

from .judge import rule_nodes
from .judge_gang import due_ms, rule_gangs
from .verdict import Health, evolve


class Ear:
    """Hears heartbeats by this process's monotonic clock.

    A node counts as silent a whole window after it was heard last, or first asked about. An ear that hears nobody, not
    even the agent it belongs to, is deaf itself: it calls nobody silent, and every window begins anew when it is back.
    """

    def __init__(self, silence_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._silence_s = silence_s
        self._deaf_s = silence_s / 3
        self._now_s = now_s
        self._last = now_s()
        self._heard: dict[tuple[str, str], float] = {}

    async def listen(self, telemetry: Telemetry, after: int) -> None:
        async for sample in telemetry.follow(subjects.device("*"), after):
            beat = DeviceSample.model_validate_json(sample.payload)
            self.hear(beat.node, beat.boot_epoch)

    def hear(self, node: str, boot_epoch: str) -> None:
        now = self._now_s()
        if now - self._last > self._deaf_s:
            self._heard.clear()
        self._last = self._heard[(node, boot_epoch)] = now

    def silent(self, health: Health) -> set[str]:
        """Nodes not heard in their present boot epoch for the whole window."""
        now = self._now_s()
        if now - self._last > self._deaf_s:
            return set()
        heard = {n.name: self._heard.setdefault((n.name, n.epoch), now) for n in health.nodes.values()}
        return {name for name, at in heard.items() if now - at > self._silence_s}


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
