"""The command line as text: commands, flags and exit codes. `python -m tests.unit.client_surface` prints it."""

from __future__ import annotations

import inspect
import typing

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


def surface() -> str:
    lines = []
    for command in sorted(app.registered_commands, key=lambda c: c.name or c.callback.__name__):  # type: ignore[union-attr]
        assert command.callback is not None
        hints = typing.get_type_hints(command.callback, include_extras=True)
        lines.append(f"stoker {command.name or command.callback.__name__}")
        lines += [_line(p, hints[n]) for n, p in inspect.signature(command.callback).parameters.items()]
    exits = EXIT_OF_STATE | EXIT_OF_KIND | {"wait timed out": TIMED_OUT}
    return "\n".join([*lines, "exit codes", *(f"  {what}: {code}" for what, code in exits.items())]) + "\n"


if __name__ == "__main__":
    print(surface(), end="")
