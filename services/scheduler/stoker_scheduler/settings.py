"""The scheduler's numbers."""

from __future__ import annotations

from stoker_chassis.settings import Settings


class SchedulerSettings(Settings):
    """Read from the environment (STOKER_...)."""

    preflight_fresh_seconds: float = 600
    start_deadline_seconds: float = 180
    fence_after_seconds: float = 300
    check_invariants_every: int = 10_000  # events; 0: never
    snapshot_every: int = 50_000  # events
