"""The command line as text: commands, flags and exit codes. `python -m tests.unit.client_surface` prints it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator

import typer
from typer.models import ArgumentInfo

from stoker.cli import EXIT_OF_KIND, EXIT_OF_STATE, TIMED_OUT, app


def _line(param: inspect.Parameter, hint: typing.Any) -> str:
    """One argument or flag, from the command function's own signature: typer's inside changes between versions."""
    kind, info = typing.get_args(hint)[:2]
    required = param.default is param.empty
    if isinstance(info, ArgumentInfo):
        return f"  {param.name.upper()}" if required else f"  [{param.name.upper()}]"
    # Inside Annotated typer takes the first flag for a default.
    given = [d for d in (info.default, *(info.param_decls or ())) if isinstance(d, str)]
    flags = ", ".join(given or [f"--{param.name.replace('_', '-')}"])
    takes = "" if kind is bool else f" {getattr(kind, '__name__', kind)}"
    default = "" if required or param.default in (None, False, "") else f" = {param.default}"
    return f"  {flags}{takes}{default}"


def _commands(app: typer.Typer, prefix: str) -> Iterator[tuple[str, Callable[..., object]]]:
    """Every command's words and function, those of groups among them."""
    for command in app.registered_commands:
        assert command.callback is not None
        yield f"{prefix} {command.name or command.callback.__name__}", command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        if group.typer_instance.registered_callback is not None:
            assert group.typer_instance.registered_callback.callback is not None
            yield f"{prefix} {group.name}", group.typer_instance.registered_callback.callback
        yield from _commands(group.typer_instance, f"{prefix} {group.name}")


def surface() -> str:
    lines = []
    for words, function in sorted(_commands(app, "stoker"), key=lambda c: c[0]):
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = {n: p for n, p in inspect.signature(function).parameters.items() if hints[n] is not typer.Context}
        lines.append(words)
        lines += [_line(p, hints[n]) for n, p in parameters.items()]
    exits = EXIT_OF_STATE | EXIT_OF_KIND | {"wait timed out": TIMED_OUT}
    return "\n".join([*lines, "exit codes", *(f"  {what}: {code}" for what, code in exits.items())]) + "\n"


if __name__ == "__main__":
    print(surface(), end="")
