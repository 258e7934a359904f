"""NVLink 5 errors (XIDs 144 to 150): decoded by unit, sub-code and error status. The rules are data/nvlink5.toml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from .data import rows

LINE = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_]+(?:/[A-Z0-9_]+)?)\s+(?P<severity>Nonfatal|Fatal)\s+XC\d+\s+i\d+\s+Link\s+(?P<link>-?\d+)\s+"
    r"\((?P<info>0x[0-9a-fA-F]+)\s+(?P<status>0x[0-9a-fA-F]+)"
)
UNIT_CODE, SUBCODE = 0x7F, 0x3F


@dataclass(frozen=True, slots=True)
class LinkError:
    """One decoded line. `action` is None where no rule knows it."""

    unit: str
    subcode: int
    status: int
    link: int
    fatal: bool
    action: Literal["none", "reset_gpu", "follow_154"] | None

    @property
    def name(self) -> str:
        return f"{self.unit} sub-code {self.subcode} status {self.status:#x} on link {self.link}"


def _rules() -> dict[tuple[int, str, int, int], Literal["none", "reset_gpu", "follow_154"]]:
    return {
        (row["xid"], row["unit"], subcode, status): row["action"]
        for row in rows("nvlink5.toml", "rule")
        for subcode in row["subcodes"]
        for status in row["status"]
    }


def _units() -> dict[tuple[int, int], str]:
    return {(row["xid"], row["unit_code"]): row["unit"] for row in rows("nvlink5.toml", "rule")}


RULES = _rules()
UNITS = _units()


def decode(code: int, text: str) -> LinkError | None:
    """What the line says; None when it does not say it, as with NVML events, which carry the bare code."""
    found = LINE.search(text)
    if found is None:
        return None
    info, status = int(found["info"], 16), int(found["status"], 16)
    subcode = info >> 20 & SUBCODE
    # Drivers write the unit alone or with its group; a unit that they rename is found by its number.
    names = [*reversed(found["unit"].split("/")), UNITS.get((code, info & UNIT_CODE), "")]
    known = [name for name in names if (code, name, subcode, status) in RULES]
    action = RULES[code, known[0], subcode, status] if known else None
    unit = known[0] if known else found["unit"]
    return LinkError(unit, subcode, status, int(found["link"]), found["severity"] == "Fatal", action)
