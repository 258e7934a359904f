"""`stoker simulate`: a trace or a past log on simulated nodes, by the very scheduler that decides for real."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import yaml
from pydantic import ValidationError
from rich.console import Console

from stoker_proto import Cluster
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.windows import turn

from .breakdowns import breakdowns
from .history import read_log
from .measure import Ledger, Result
from .report import as_json, show
from .traces import BadInput, read_nodes, read_trace
from .workload import (
    Happening,
    Kind,
    Workload,
    alike,
    configured,
    joining,
    with_limits,
    without_limits,
)
from .world import Options, World

DEFAULT_MODEL = "SIM"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
SPARE_MS = 30 * 86_400_000  # breakdowns are drawn for so long after the last arrival
GPUS_PER_NODE = 8


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where to read more."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message}; see {self.prog} --help")


def main(args: list[str]) -> int:
    """Simulate, and print the figures: 0. Bad input is told on standard error, and nothing is written: 2."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        asked = _parser().parse_args(args)
        drawing = _drawing(asked.plot) if asked.plot else None
        cluster = _cluster(asked.cluster)
        workload = _workload(asked, cluster)
    except BadInput as error:
        errors.print(f"error: {error}", markup=False)
        return 2
    for note in workload.notes:
        errors.print(note, markup=False)
    result = simulate(workload, _options(asked, workload.start_ms))
    if drawing is not None:
        title = f"{(asked.trace or asked.log).name} on {result.nodes} nodes, {result.gpus:g} GPUs"
        picture = drawing.draw(result, title, page=asked.plot.suffix == ".html")
        try:
            asked.plot.write_bytes(picture)
        except OSError as error:
            errors.print(f"error: --plot {asked.plot}: {error.strerror}", markup=False)
            return 2
    if asked.output == "json":
        print(as_json(result, workload.notes))  # noqa: T201  (what was asked for)
    else:
        show(Console(soft_wrap=True), result)
    return 0


def simulate(workload: Workload, options: Options) -> Result:
    """Play the workload, and measure it. Windows turn by the virtual clock; why jobs wait is nobody's question here."""
    ledger = Ledger(workload.start_ms)
    world = World(Scheduler(Timing(), turn, tells=False), workload, options, ledger)
    world.play()
    return ledger.result(world.now_ms)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="stoker simulate", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="CSV", help="jobs: a list of jobs (Philly) or of pods (openb)")
    source.add_argument("--log", type=Path, metavar="NDJSON", help="an exported Stoker log: its jobs, as they went")
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument("--nodes", type=_count, metavar="N", help="so many nodes; a log brings its own")
    machines.add_argument(
        "--node-list", type=Path, metavar="CSV", help="nodes as in openb: sn,cpu_milli,memory_mib,gpu,model"
    )
    parser.add_argument("--gpus", type=_count, default=GPUS_PER_NODE, metavar="N", help="GPUs of each node (8)")
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME", help="their model (SIM)")
    parser.add_argument("--cluster", type=Path, metavar="YAML", help="the configuration; a log brings its own")
    parser.add_argument(
        "--durations", choices=("known", "unknown"),
        help="known: each job's true duration is its time limit (for traces); unknown: no limits; else as logged",
    )  # fmt: skip
    parser.add_argument("--until", type=_span, metavar="SPAN", help="stop after so much virtual time, as 36h or 14d")
    parser.add_argument("--seed", type=int, default=0, help="of what happens by chance (0)")
    parser.add_argument("--break-every", type=_span, metavar="SPAN", help="each node breaks down so often, on average")
    parser.add_argument("--repair", type=_span, default=_span("1h"), metavar="SPAN", help="and is back after (1h)")
    parser.add_argument(
        "--checkpoint-every",
        type=_span,
        default=_span("30m"),
        metavar="SPAN",
        help="jobs save so often (30m), 100 times at most; 0s: never",
    )
    parser.add_argument(
        "--stop-takes", type=_span, default=0, metavar="SPAN",
        help="jobs asked to stop save once more in so long, if their grace allows; 0s: they just leave (0s)",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, or .html with everything inside")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 100000")
    return int(text)


def _span(text: str) -> int:
    """Milliseconds."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a span of time such as 90s, 30m, 36h or 14d")
    return round(float(found[1]) * UNITS[found[2]] * 1000)


def _drawing(path: Path) -> ModuleType:
    """The module that draws; asked for early, so that nothing is simulated for a picture that cannot be made."""
    if path.suffix not in (".png", ".html"):
        raise BadInput(f"--plot {path}: the name must end in .png or .html")
    if not path.parent.is_dir():
        raise BadInput(f"--plot {path}: there is no folder {path.parent}")
    try:
        from . import plot
    except ImportError as error:
        raise BadInput(f"--plot needs matplotlib ({error}): pip install 'stoker[simulate]'") from error
    return plot


def _cluster(path: Path | None) -> Cluster | None:
    if path is None:
        return None
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Cluster.model_validate(raw)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'cluster'}: {e['msg']}" for e in error.errors())
        raise BadInput(f"{path}: {told}") from error


def _workload(asked: argparse.Namespace, cluster: Cluster | None) -> Workload:
    kinds = _kinds(asked)
    if asked.log is not None:
        found = read_log(asked.log, nodes=not kinds, cluster=cluster is None)
    elif not kinds:
        raise BadInput("a trace brings no nodes: give --nodes or --node-list")
    else:
        found = read_trace(asked.trace, cluster or Cluster(), max(kind.gpus for kind in kinds))
    durations = asked.durations or ("known" if asked.trace else None)
    if durations is not None:
        limit = with_limits if durations == "known" else without_limits
        found = Workload(tuple(limit(work) for work in found.works), found.happenings, found.notes)
    start_ms = found.start_ms
    setting: tuple[Happening, ...] = ()
    if cluster is not None or asked.log is None:
        setting = (configured(cluster or Cluster(), start_ms),)
    if asked.break_every and not kinds:
        raise BadInput("--break-every needs --nodes or --node-list: a log brings the breakdowns that there were")
    broken: tuple[Happening, ...] = ()
    if asked.break_every:
        end_ms = max(work.at_ms for work in found.works) + SPARE_MS
        broken = breakdowns(kinds, start_ms, end_ms, asked.break_every, asked.repair, asked.seed)
    return found.plus((*setting, *joining(kinds, start_ms), *broken))


def _kinds(asked: argparse.Namespace) -> list[Kind]:
    if asked.node_list is not None:
        return read_nodes(asked.node_list)
    if not re.fullmatch(r"[A-Za-z0-9-]{1,50}", asked.model):
        raise BadInput(f"--model {asked.model!r}: letters, digits and - only")
    return alike(asked.nodes, asked.gpus, asked.model) if asked.nodes else []


def _options(asked: argparse.Namespace, start_ms: int) -> Options:
    until_ms = None if asked.until is None else start_ms + asked.until
    return Options(checkpoint_ms=asked.checkpoint_every, stop_ms=asked.stop_takes, until_ms=until_ms)
