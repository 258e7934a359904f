"""Where the client finds its server: the environment first, then the local system's card."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from stoker_proto import ProblemError, problem


@dataclass(frozen=True)
class Server:
    """A gateway and the token for it."""

    url: str
    token: str


def find_server() -> Server:
    """STOKER_URL and STOKER_TOKEN, else stoker.json of a local system. Raises ProblemError when there is neither."""
    url = os.environ.get("STOKER_URL")
    if url:
        return Server(url, os.environ.get("STOKER_TOKEN", ""))
    folder = Path(os.environ.get("STOKER_DATA_DIR", "stoker-data"))
    card = folder / "stoker.json"
    try:
        told = json.loads(card.read_text())
        return Server(told["url"], told["token"])
    except (OSError, ValueError, KeyError):
        detail = f"STOKER_URL is not set, and no local system runs in {folder}"
        actions = ("start one with `stoker up`", "or set STOKER_URL and STOKER_TOKEN")
        raise ProblemError(problem("log_unavailable", detail, next_actions=actions)) from None
