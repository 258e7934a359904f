"""Wires the launcher of one node."""

from __future__ import annotations

from stoker_chassis.devices_open import open_devices
from stoker_chassis.hosting import host

from .node import Node
from .settings import LauncherSettings


def main() -> None:
    settings = LauncherSettings()
    devices = open_devices(settings.node, settings.sim_dir, settings.sim_gpus)
    host("launcher", settings, lambda bus, ready: Node(bus, devices, settings).run(ready))


if __name__ == "__main__":
    main()
