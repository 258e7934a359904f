"""The launcher's numbers."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import TypeAdapter, field_validator
from pydantic_settings import NoDecode

from stoker_chassis.settings import NodeSettings
from stoker_proto.spec import Label

LABELS = TypeAdapter(dict[Label, str])


class LauncherSettings(NodeSettings):
    """Read from the environment (STOKER_...).

    `labels` describe the node, such as STOKER_LABELS=rack=r1,rail=2, or the same as JSON.
    """

    preload: str = "torch,torch.distributed,torch.nn.parallel"
    settle_seconds: float = 1.0
    self_fence_seconds: float = 240.0
    keep_attempts_hours: float = 24.0
    labels: Annotated[dict[str, str], NoDecode] = {}  # noqa: RUF012

    @field_validator("labels", mode="before")
    @classmethod
    def _labels(cls, given: object) -> dict[str, str]:
        if isinstance(given, str) and given.lstrip().startswith("{"):
            given = json.loads(given)
        elif isinstance(given, str):
            pairs = [part.partition("=") for part in given.split(",") if part.strip()]
            if any(not middle for _, middle, _ in pairs):
                raise ValueError(f"labels are name=value,name=value, not {given!r}")
            given = {name.strip(): value.strip() for name, _, value in pairs}
        return LABELS.validate_python(given)
