"""Settings that every service has, read from the environment when the process starts and not before."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from .resume import EVERY


class Settings(BaseSettings):
    """Environment variables STOKER_<FIELD>."""

    model_config = SettingsConfigDict(env_prefix="STOKER_", extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    data_dir: Path = Path("stoker-data")
    instance: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    ready_file: Path | None = None
    otlp_endpoint: str | None = None
    snapshot_every: int = Field(default=EVERY, ge=1)  # events, in services that keep snapshots


class NodeSettings(Settings):
    """Settings that the launcher and the health agent of one node share."""

    node: str = Field(default_factory=socket.gethostname)
    address: str = "127.0.0.1"
    boot_epoch: str = Field(default_factory=lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    sim_dir: Path | None = None
    sim_gpus: int = 2

    @property
    def node_dir(self) -> Path:
        return (self.data_dir / "nodes" / self.node).resolve()

    @property
    def warm_socket(self) -> Path:
        return self.node_dir / "warm.sock"
