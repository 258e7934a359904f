"""What every command shares: how it is asked to print, and where it prints to."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console

from stoker_proto import ProblemError, problem

from .interrupt import interruptible

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)


class Format(StrEnum):
    table = "table"
    json = "json"


Output = Annotated[Format, typer.Option("--output", "-o", help="table for people, json for programs")]
Why = Annotated[str, typer.Option("--reason", help="kept in the log")]


def emit(document: Any) -> None:
    print(json.dumps(document), flush=True)  # noqa: T201


def show(output: Format, document: Any, table: Callable[[], None]) -> None:
    if output is Format.json:
        emit(document)
    else:
        table()


def stream(output: Format, rows: Iterator[dict[str, Any]], line: Callable[[dict[str, Any]], str]) -> None:
    with interruptible():
        for row in rows:
            if output is Format.json:
                emit(row)
            else:
                out.print(line(row), markup=False, highlight=False, soft_wrap=True)


def optional(module: str, what: str, extra: str) -> Any:
    """A module of a part that may not be installed. Raises ProblemError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        detail = f"{what} is not installed ({error.name} is missing)"
        actions = (f"pip install 'stoker[{extra}]'",)
        raise ProblemError(problem("invalid_request", detail, next_actions=actions)) from error
