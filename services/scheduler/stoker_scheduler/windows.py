"""Windows on the wall clock of their zone: open or shut at an instant, and when that changes next.

Outside the pure cores, since zone data comes from files. What it finds becomes an event, with the instant and the
version of the zone data, and folds read only that.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stoker_proto import Window

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True)
class Turn:
    """A window's state at an instant, since when, and until when (milliseconds since 1970)."""

    opened: bool
    since_ms: int
    until_ms: int


def turn(window: Window, now_ms: int) -> Turn | None:
    """What the window is now; None when its zone is not known here.

    A time that a change to summer time leaves out counts as the instant after the gap; one that comes twice, as the
    first. Stretches that touch or overlap are one.
    """
    try:
        zone = ZoneInfo(window.zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return None
    today = datetime.fromtimestamp(now_ms / 1000, UTC).astimezone(zone).date()
    stretches: list[tuple[int, int]] = []
    for offset in range(-9, 10):
        day = today + timedelta(days=offset)
        if DAYS[day.weekday()] in window.days:
            opens = _instant(day, window.start, zone)
            last = day if window.end > window.start else day + timedelta(days=1)
            shuts = _instant(last, window.end, zone)
            if stretches and opens <= stretches[-1][1]:
                stretches[-1] = (stretches[-1][0], max(shuts, stretches[-1][1]))
            else:
                stretches.append((opens, shuts))
    before = max((shuts for _, shuts in stretches if shuts <= now_ms), default=now_ms)
    for opens, shuts in stretches:
        if opens <= now_ms < shuts:
            return Turn(True, opens, shuts)
        if opens > now_ms:
            return Turn(False, before, opens)
    return Turn(False, before, now_ms + 7 * 86_400_000)


def _instant(day: date, clock: str, zone: ZoneInfo) -> int:
    hour, minute = clock.split(":")
    local = datetime.combine(day, time(int(hour), int(minute)), zone)
    return int(local.astimezone(UTC).timestamp() * 1000)


def zone_data() -> str:
    """Which version of the zone data this is."""
    try:
        return importlib.metadata.version("tzdata")
    except importlib.metadata.PackageNotFoundError:
        return "system"
