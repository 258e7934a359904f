"""What users install: `stoker.Client` for programs, `stoker` for the shell, `stoker.training` for job scripts.

Importing `stoker` imports nothing heavy, so that a training script pays for what it uses only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from .client import Client

        return Client
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
