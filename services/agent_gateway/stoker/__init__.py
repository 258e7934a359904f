"""What users install: `stoker.Client` for programs, `stoker` for the shell, `stoker.training` for job scripts.

Importing `stoker` imports nothing heavy, so that a training script pays for what it uses only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker_proto import ProblemError

    from .client import Client, submit

__all__ = ["Client", "ProblemError", "submit"]


def __getattr__(name: str) -> Any:
    if name in ("Client", "submit"):
        from . import client

        return getattr(client, name)
    if name == "ProblemError":
        from stoker_proto import ProblemError

        return ProblemError
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
