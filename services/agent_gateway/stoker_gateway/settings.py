"""The gateway's numbers."""

from __future__ import annotations

from pathlib import Path

from stoker_chassis.settings import Settings


class GatewaySettings(Settings):
    """Read from the environment (STOKER_...). Without a token nobody gets in."""

    host: str = "127.0.0.1"
    port: int = 8750
    token: str = ""
    database: Path | None = None

    @property
    def database_path(self) -> Path:
        return (self.database or self.data_dir / "gateway" / "views.db").resolve()
