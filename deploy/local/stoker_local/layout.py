"""What runs on this machine and where its files lie: the local system as one value."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from stoker_proto import Frozen


@dataclass(frozen=True)
class Layout:
    """One data folder, and everything in it."""

    data: Path

    @property
    def nats(self) -> Path:
        return self.data / "nats"

    @property
    def mlflow(self) -> Path:
        return self.data / "mlflow"

    @property
    def sim(self) -> Path:
        return self.data / "sim"

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    @property
    def ready(self) -> Path:
        return self.data / "ready"

    @property
    def lock(self) -> Path:
        return self.data / ".supervisor"

    @property
    def card(self) -> Path:
        return self.data / "stoker.json"

    def make(self) -> None:
        for folder in (self.nats, self.mlflow, self.sim, self.logs, self.ready):
            folder.mkdir(parents=True, exist_ok=True)


class Card(Frozen):
    """How to reach a running local system; kept in the data folder, readable by its owner only."""

    url: str
    token: str
    mlflow_url: str
    nats_url: str
    data_dir: str
    pids: dict[str, int] = Field(default_factory=dict)

    def write(self, path: Path) -> None:
        new = path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(self.model_dump(), indent=1))
        new.replace(path)


def read_card(path: Path) -> Card:
    return Card.model_validate_json(path.read_text())
