"""The recovery action that the driver asks for, by its number or by the words of XID 154 (recovery_actions.toml)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stoker_proto.nodes import Severity

from .data import rows
from .xids import ActionName

CHANGED = re.compile(r"\bto (?P<code>0x[0-9a-fA-F]+|\d+) \((?P<words>[^)]*)\)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Recovery:
    name: str
    severity: Severity
    action: ActionName


BY_CODE = {r["code"]: Recovery(r["name"], r["severity"], r["action"]) for r in rows("recovery_actions.toml", "action")}
BY_WORDS = [(r["text"], BY_CODE[r["code"]]) for r in rows("recovery_actions.toml", "action")]


def recovery(code: int) -> Recovery:
    """What the number asks for; an unknown one is degraded, since it is not "nothing"."""
    return BY_CODE.get(code) or Recovery(f"recovery action {code}, which we do not know", "degraded", "inspect")


def announced(text: str) -> Recovery | None:
    """What XID 154's line announces: its words decide, then its number; None when it says neither."""
    found = CHANGED.search(text)
    if found is None:
        return None
    words = found["words"].lower()
    named = [row for mark, row in BY_WORDS if mark in words]
    return named[0] if named else recovery(int(found["code"], 0))
