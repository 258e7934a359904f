"""The launcher's numbers."""

from __future__ import annotations

from stoker_chassis.settings import NodeSettings


class LauncherSettings(NodeSettings):
    """Read from the environment (STOKER_...)."""

    preload: str = "torch,torch.distributed,torch.nn.parallel"
    settle_seconds: float = 1.0
    self_fence_seconds: float = 240.0
    labels: dict[str, str] = {}  # noqa: RUF012
