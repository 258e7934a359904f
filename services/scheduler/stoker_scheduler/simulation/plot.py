"""A picture of a simulation: use of the GPUs over time, and who waits how long. Alone in importing matplotlib."""

from __future__ import annotations

import html
import io
from typing import Any

import matplotlib

matplotlib.use("agg")  # before pyplot: no display is needed

from matplotlib.figure import Figure

from .measure import Result, Waits

HOUR_S = 3600
# The same result gives the same bytes: no date, no random ids.
REPEATABLE: Any = {"svg.hashsalt": "stoker"}


def draw(result: Result, title: str, *, page: bool) -> bytes:
    """A PNG, or an HTML page that needs nothing else."""
    if not page:
        return _png(result, title)
    figures = [_use(result), _waits("queue time by gang size (GPUs)", result.waits_by_gpus)]
    if len(result.waits_by_class) > 1:
        figures.append(_waits("queue time by class", result.waits_by_class))
    if len(result.waits_by_queue) > 1:
        figures.append(_waits("queue time by queue", result.waits_by_queue))
    return _page(figures, title).encode()


def _axes(figure: Figure, *where: int) -> Any:
    return figure.add_subplot(*where)


def _use(result: Result) -> Figure:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    _draw_use(_axes(figure, 1, 1, 1), result)
    return figure


def _waits(title: str, groups: dict[str, Waits]) -> Figure:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    _draw_waits(_axes(figure, 1, 1, 1), title, groups)
    return figure


def _draw_use(axes: Any, result: Result) -> None:
    hours = [point.at_s / HOUR_S for point in result.over_time]
    for name in ("allocated", "running", "fragmented"):
        axes.plot(hours, [100 * getattr(point, name) for point in result.over_time], label=name, linewidth=1)
    axes.set(xlabel="hours", ylabel="% of GPUs", ylim=(0, 103), title="GPUs over time")
    axes.legend(loc="upper right")


def _draw_waits(axes: Any, title: str, groups: dict[str, Waits]) -> None:
    names = list(groups)
    for at, name in enumerate(("mean_s", "p99_s", "max_s")):
        hours = [getattr(groups[group], name) / HOUR_S for group in names]
        axes.bar([place + 0.27 * (at - 1) for place in range(len(names))], hours, 0.25, label=name[:-2])
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="hours", title=title)
    axes.legend(loc="upper left")


def _png(result: Result, title: str) -> bytes:
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    figure.suptitle(title)
    _draw_use(_axes(figure, 2, 1, 1), result)
    _draw_waits(_axes(figure, 2, 1, 2), "queue time by gang size (GPUs)", result.waits_by_gpus)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
    return out.getvalue()


def _page(figures: list[Figure], title: str) -> str:
    drawings = []
    with matplotlib.rc_context(REPEATABLE):
        for figure in figures:
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
            drawings.append(out.getvalue()[out.getvalue().index("<svg") :])
    body = "\n".join(f"<figure>{drawing}</figure>" for drawing in drawings)
    style = "body{font-family:sans-serif;margin:2em auto;max-width:60em}figure{margin:1em 0}"
    head = f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style>'
    return f"{head}<h1>{html.escape(title)}</h1>\n{body}\n"
