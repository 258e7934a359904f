"""Wires the tracker."""

from __future__ import annotations

from collections.abc import Callable

from stoker_chassis.hosting import host
from stoker_chassis.stores import Bus

from .checkpoint import Checkpoint
from .mirror import Mirror
from .settings import TrackerSettings
from .tracker import Tracker


async def serve(bus: Bus, ready: Callable[[], None], settings: TrackerSettings) -> None:
    tracker = Tracker(bus, Mirror(settings.mlflow_url), Checkpoint(settings.checkpoint_path), settings.batch_seconds)
    ready()
    await tracker.run()


def main() -> None:
    settings = TrackerSettings()
    host("tracker", settings, lambda bus, ready: serve(bus, ready, settings))


if __name__ == "__main__":
    main()
