"""The tracker's numbers."""

from __future__ import annotations

from pathlib import Path

from stoker_chassis.settings import Settings


class TrackerSettings(Settings):
    """Read from the environment (STOKER_...)."""

    mlflow_url: str = "http://127.0.0.1:5000"
    batch_seconds: float = 0.5

    @property
    def checkpoint_path(self) -> Path:
        return (self.data_dir / "tracker" / "checkpoint.json").resolve()
