"""Fixtures that every test may ask for."""

from tests.nats import bus, nats_server

__all__ = ["bus", "nats_server"]
