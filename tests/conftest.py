"""Fixtures that every test may ask for."""

from tests.nats import bus, either_bus, nats_server

__all__ = ["bus", "either_bus", "nats_server"]
