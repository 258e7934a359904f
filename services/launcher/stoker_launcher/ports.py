"""A free port for the ranks to meet on, outside the range that outgoing connections take theirs from."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Collection

FIRST, LAST = 20_000, 29_999


def free_port(address: str, seed: str, taken: Collection[int] = ()) -> int:
    """A port that nothing listens on, nor will: `taken` are given out already. The seed spreads attempts over them."""
    span = LAST - FIRST + 1
    start = zlib.crc32(seed.encode()) % span
    for offset in range(span):
        port = FIRST + (start + offset) % span
        if port in taken:
            continue
        with socket.socket() as sock:
            try:
                sock.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {FIRST} and {LAST} on {address}")
