"""The API described: `python -m stoker_gateway.openapi FILE` writes it; a test fails when the file is not current."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from stoker_chassis.memory import memory_bus

from .answers import OPEN, PROBLEM
from .app import create_app
from .store import Views, open_engine


def document() -> str:
    """OpenAPI 3.1, with the token and the Problem that every path can answer."""
    with tempfile.TemporaryDirectory() as folder:
        api = create_app(memory_bus(Path(folder)), Views(open_engine(None)), "").openapi()
    api["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    api["security"] = [{"token": []}]
    for path, methods in api["paths"].items():
        for operation in methods.values():
            refused = operation["responses"]["default"]
            refused["content"] = {PROBLEM: refused["content"]["application/json"]}
            if path in OPEN:
                operation["security"] = []
    return json.dumps(api, indent=1, sort_keys=True) + "\n"


def main() -> None:
    Path(sys.argv[1]).write_text(document())


if __name__ == "__main__":
    main()
