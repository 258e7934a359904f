"""XIDs: what each code means, how bad it is, what to do and whose fault it is by itself (data/xids.toml)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stoker_proto.nodes import Severity

from .data import rows

ActionName = Literal["none", "restart_app", "reset_gpu", "reboot", "drain", "inspect"]
Blame = Literal["user", "node", "network", "unknown"]
Role = Literal["cause", "collateral", "carrier", "detail", "link"]
BURST_S = 180.0


@dataclass(frozen=True, slots=True)
class Repeats:
    """What it means when a code comes back on one GPU within a day.

    `severity` once it came under two jobs that have nothing to do with each other (`jobs`), or at all (`gpu`); `again`
    when it came twice, whoever ran there.
    """

    across: Literal["jobs", "gpu"]
    severity: Severity
    again: Severity = "info"


@dataclass(frozen=True, slots=True)
class Xid:
    """One code. Within `burst_s` the same code of the same GPU is the same fault."""

    code: int
    meaning: str
    severity: Severity
    action: ActionName
    blame: Blame
    source: str
    role: Role = "cause"
    burst_s: float = BURST_S
    repeats: Repeats | None = None


def _table() -> dict[int, Xid]:
    table: dict[int, Xid] = {}
    for row in rows("xids.toml", "xid"):
        repeats = Repeats(**row.pop("repeats")) if "repeats" in row else None
        for code in row.pop("codes"):
            if code in table:
                raise ValueError(f"XID {code} stands twice in xids.toml")
            table[code] = Xid(code=code, repeats=repeats, **row)
    return dict(sorted(table.items()))


XIDS = _table()


def xid(code: int) -> Xid:
    """The code's row; a code that nobody told us about is suspect and for inspection, never ignored."""
    return XIDS.get(code) or Xid(code, "not in the catalogue", "suspect", "inspect", "unknown", "D: unknown code")
