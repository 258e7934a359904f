"""A free port for the ranks to meet on, outside the range that outgoing connections take theirs from."""

from __future__ import annotations

import socket
import zlib

FIRST, LAST = 20_000, 29_999


def free_port(address: str, seed: str) -> int:
    """A port that nothing listens on; the seed spreads attempts that ask at the same moment."""
    span = LAST - FIRST + 1
    start = zlib.crc32(seed.encode()) % span
    for offset in range(span):
        port = FIRST + (start + offset) % span
        with socket.socket() as sock:
            try:
                sock.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {FIRST} and {LAST} on {address}")
