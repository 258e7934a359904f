"""Health's numbers."""

from __future__ import annotations

from stoker_chassis.settings import NodeSettings


class HealthSettings(NodeSettings):
    """Read from the environment (STOKER_...)."""

    poll_seconds: float | None = None
    heartbeat_seconds: float = 1.0
    silence_seconds: float = 10.0
    probe_seconds: float = 30.0

    @property
    def poll_s(self) -> float:
        """Simulated devices are cheap to ask."""
        return self.poll_seconds or (0.2 if self.sim_dir else 1.0)
