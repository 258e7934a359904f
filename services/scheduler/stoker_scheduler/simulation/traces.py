"""Public traces as workloads: what a row says becomes a job spec, and rows that no job can be made of are refused."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from stoker_proto import Cluster, JobSpec

from .workload import MIB, MS_IN_MINUTE, START_MS, Kind, Work, Workload

TOLD = 5  # refused rows that are told one by one
PHILLY = ("job_id", "user", "num_gpu", "submit_time", "duration", "job_type")
OPENB = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec", "creation_time", "deletion_time")
NODES = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
Row = Mapping[str, str]


class BadInput(Exception):
    """The input cannot be simulated; the message says which file, which line and why."""


def read_trace(path: Path, cluster: Cluster, per_node: int) -> Workload:
    """A trace of jobs, its format told by its columns. Jobs take up to `per_node` GPUs of a node."""
    rows = list(_rows(path))
    columns = rows[0][1].keys()
    if columns >= set(PHILLY):
        made = [(line, _philly(row, cluster, per_node)) for line, row in _sound(path, rows)]
    elif columns >= set(OPENB):
        made = [(line, _openb(row, cluster)) for line, row in _sound(path, rows)]
    else:
        wanted = f"job lists have the columns {', '.join(PHILLY)}, pod lists {', '.join(OPENB)}"
        raise BadInput(f"{path}: unknown columns {', '.join(columns)}; {wanted}")
    works: list[Work] = []
    refused: list[str] = []
    for line, work in made:
        if isinstance(work, str):
            refused.append(f"line {line}: {work}")
        else:
            works.append(work)
    if not works:
        raise BadInput(f"{path}: no job is left; {refused[0]}")
    names: set[str] = set()
    for work in works:
        if work.job_id in names:
            raise BadInput(f"{path}: {work.job_id} is there twice")
        names.add(work.job_id)
    return Workload(tuple(sorted(works, key=lambda work: work.at_ms)), notes=_told(refused))


def read_nodes(path: Path) -> list[Kind]:
    """A list of nodes; those without a GPU are left out."""
    kinds: list[Kind] = []
    for line, row in _rows(path):
        missing = [name for name in NODES if not row.get(name)]
        if missing:
            raise BadInput(f"{path}: line {line} has no {missing[0]}")
        gpus = _whole(path, line, row, "gpu")
        if gpus:
            cpus, memory = _whole(path, line, row, "cpu_milli") // 1000, _whole(path, line, row, "memory_mib") * MIB
            kinds.append(Kind(row["sn"], gpus, row["model"], cpus, memory))
    if not kinds:
        raise BadInput(f"{path}: no node with a GPU")
    return kinds


def gang_of(gpus: int, per_node: int) -> tuple[int, int]:
    """(nodes, GPUs on each) for a gang, whose nodes all give alike: as few nodes as that allows."""
    share = next(n for n in range(min(gpus, per_node), 0, -1) if gpus % n == 0)
    return gpus // share, share


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} is not a CSV file: {error}") from error
    if not found:
        raise BadInput(f"{path} has no rows")
    return iter(list(enumerate(found, start=2)))


def _sound(path: Path, rows: list[tuple[int, Row]]) -> Iterator[tuple[int, Row]]:
    """Rows that have all their columns; a torn one spoils the file."""
    for line, row in rows:
        if None in row.values() or None in row:
            raise BadInput(f"{path}: line {line} has another number of columns than the header")
        yield line, row


def _whole(path: Path, line: int, row: Row, column: str) -> int:
    try:
        return int(row[column])
    except ValueError:
        raise BadInput(f"{path}: line {line}: {column} is {row[column]!r}, not a whole number") from None


def _philly(row: Row, cluster: Cluster, per_node: int) -> Work | str:
    """Minutes, GPUs and a tenant. A tenant waits in the queue of its name, if the cluster has one."""
    try:
        gpus, at, duration = int(row["num_gpu"]), float(row["submit_time"]), float(row["duration"])
    except ValueError as error:
        return f"job {row['job_id']}: {error}"
    if gpus < 1:
        return f"job {row['job_id']} asks for {gpus} GPUs; a job needs at least 1"
    if not (0 <= at < 1e9 and 0 < duration < 1e9):
        return f"job {row['job_id']} comes at {row['submit_time']} and takes {row['duration']} minutes"
    nodes, share = gang_of(gpus, per_node)
    wanted = "BEST_EFFORT" if row["job_type"] == "best" else "NORMAL"
    compute: dict[str, object] = {
        "accelerator_type": f"GPU_{share}xANY",
        "num_accelerators": nodes * share,
        "queue": _queue(cluster, row["user"]),
        "priority_class": _class(cluster, wanted),
    }
    return _work(f"job-{row['job_id']}", compute, round(at * MS_IN_MINUTE), round(duration * MS_IN_MINUTE))


def _openb(row: Row, cluster: Cluster) -> Work | str:
    """Seconds; shares of GPUs in thousandths, with cores, memory and the models that will do."""
    try:
        gpus, milli = int(row["num_gpu"]), int(row["gpu_milli"])
        cpu, memory = int(row["cpu_milli"]), int(row["memory_mib"])
        created, deleted = float(row["creation_time"]), float(row["deletion_time"])
        began = float(row.get("scheduled_time") or created)
    except ValueError as error:
        return f"pod {row['name']}: {error}"
    if gpus < 1:
        return f"pod {row['name']} asks for {gpus} GPUs; a job needs at least 1"
    if deleted <= began or not 0 <= created < 1e9:
        return f"pod {row['name']} is deleted at {row['deletion_time']}, not after it began"
    models = [model for model in row["gpu_spec"].split("|") if model]
    compute: dict[str, object] = {
        "accelerator_type": f"GPU_{gpus}x{models[0] if models else 'ANY'}",
        "num_accelerators": gpus,
        "also_accept": models[1:],
        "gpu_fraction": 1 if gpus > 1 else min(milli, 1000) / 1000,
        "cpus_per_node": cpu / 1000,
        "memory_gib_per_node": memory / 1024,
        "queue": _queue(cluster, ""),
        "priority_class": _class(cluster, "BEST_EFFORT" if row.get("qos") == "BE" else "NORMAL"),
    }
    return _work(row["name"], compute, round(created * 1000), round((deleted - began) * 1000))


def _work(job_id: str, compute: dict[str, object], at_ms: int, duration_ms: int) -> Work | str:
    try:
        spec = JobSpec.model_validate(
            {"experiment_name": "trace", "command": "true", "outputs": {"checkpoints": {}}, "compute": compute}
        )
    except ValidationError as error:
        first = error.errors()[0]
        return f"{job_id}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return Work(job_id, START_MS + at_ms, spec, duration_ms)


def _queue(cluster: Cluster, name: str) -> str:
    names = [queue.name for queue in cluster.queues]
    return next((known for known in (name, "default") if known in names), names[0])


def _class(cluster: Cluster, name: str) -> str:
    names = [known.name for known in cluster.classes]
    return name if name in names else names[0]


def _told(refused: list[str]) -> tuple[str, ...]:
    """A few of the refused rows in full, and how many there were."""
    if not refused:
        return ()
    more = len(refused) - TOLD
    told = refused[:TOLD]
    if more > 0:
        told.append(f"and {more} more like these")
    return (*told, f"{len(refused)} rows refused")
