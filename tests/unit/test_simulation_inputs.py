"""Inputs and outputs of `stoker simulate`: traces, node lists, past logs, bad files, and the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker_proto import Cluster, Recorded, seal, to_line
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.simulation.command import main
from stoker_scheduler.simulation.history import read_log
from stoker_scheduler.simulation.traces import gang_of, read_nodes, read_trace
from stoker_scheduler.simulation.workload import MS_IN_MINUTE, START_MS, Work
from stoker_scheduler.simulation.world import Options, World
from tests.unit.simulated import Play, minutes
from tests.unit.test_simulation_world import SHARED, contention

PHILLY = "job_id,user,num_gpu,submit_time,iterations,model_name,duration,interval,job_type\n"
OPENB = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)
GOLDEN = Path(__file__).parents[1] / "replay" / "golden" / "v1-xid79.jsonl"


@pytest.fixture
def philly(tmp_path: Path) -> Path:
    path = tmp_path / "philly.csv"
    rows = [
        f"{n},team-{n % 2},{gpus},{n},9,vgg,{5 + n},1,{'best' if n % 3 == 0 else 'strict'}\n"
        for n, gpus in enumerate([1, 16, 0, 4, 12, 8, 8, 2, 0, 1])
    ]
    path.write_text(PHILLY + "".join(rows))
    return path


def test_a_list_of_jobs_becomes_gangs_in_the_queue_and_class_that_there_are(philly: Path) -> None:
    cluster = Cluster.model_validate({"queues": [{"name": "default"}, {"name": "team-1"}]})
    found = read_trace(philly, cluster, 8)
    first, gang, mixed = found.works[0], found.works[1], found.works[3]
    assert (first.at_ms, first.duration_ms) == (START_MS, 5 * MS_IN_MINUTE)
    assert (first.spec.compute.queue, first.spec.compute.priority_class) == ("default", "BEST_EFFORT")
    assert (gang.spec.compute.queue, gang.spec.compute.priority_class) == ("team-1", "NORMAL")
    assert (gang.spec.compute.nodes, gang.spec.compute.per_node) == (2, 8)
    assert (mixed.spec.compute.nodes, mixed.spec.compute.per_node) == (2, 6)
    assert found.notes == (
        "line 4: job 2 asks for 0 GPUs; a job needs at least 1",
        "line 10: job 8 asks for 0 GPUs; a job needs at least 1",
        "2 rows refused",
    )


@pytest.mark.parametrize(
    ("gpus", "shape"), [(1, (1, 1)), (8, (1, 8)), (12, (2, 6)), (20, (4, 5)), (7, (1, 7)), (11, (11, 1))]
)
def test_a_gang_takes_as_few_nodes_as_equal_shares_allow(gpus: int, shape: tuple[int, int]) -> None:
    assert gang_of(gpus, 8) == shape


def test_a_list_of_pods_brings_shares_cores_and_models(tmp_path: Path) -> None:
    path = tmp_path / "pods.csv"
    path.write_text(
        OPENB
        + "p0,6000,12288,1,460,T4|G2,LS,Running,100,700,160\n"
        + "p1,6000,12288,2,1000,,BE,Running,100,700,\n"
        + "p2,6000,12288,0,0,,LS,Running,100,700,160\n"
        + "p3,6000,12288,1,1000,,LS,Pending,100,90,\n"
    )
    found = read_trace(path, Cluster(), 8)
    part, whole = found.works
    compute = part.spec.compute
    assert (compute.models, compute.milli, compute.cpus_per_node, compute.memory_gib_per_node) == (
        ("T4", "G2"),
        460,
        6,
        12,
    )
    assert (part.at_ms - START_MS, part.duration_ms) == (100_000, 540_000)
    assert (whole.spec.compute.models, whole.spec.compute.priority_class, whole.duration_ms) == (
        (),
        "BEST_EFFORT",
        600_000,
    )
    assert found.notes[-1] == "2 rows refused"


def test_a_list_of_nodes_leaves_out_those_without_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text("sn,cpu_milli,memory_mib,gpu,model\nn0,64000,1024,2,P100\nn1,64000,1024,0,-\n")
    (kind,) = read_nodes(path)
    assert (kind.name, kind.gpus, kind.model, kind.cpus, kind.memory_bytes) == ("n0", 2, "P100", 64, 1 << 30)


def exported(play: Play, path: Path) -> None:
    lines = []
    for record in play.records:
        envelope = seal(record.event, id=f"e{record.seq}", source="s", time="2026-01-05T00:00:00Z", actor="s")
        lines.append(to_line(Recorded(record.seq, record.at_ms, envelope, record.event)) + "\n")
    path.write_text("".join(lines))


@pytest.mark.parametrize("seed", range(3))
def test_an_exported_log_simulated_as_it_was_starts_the_same_jobs_at_the_same_times(seed: int, tmp_path: Path) -> None:
    slow: list[Work] = [work._replace(launch_ms=1_500, release_ms=700) for work in contention(seed)]
    play = Play(slow, 4, gpus=4, cluster=SHARED)
    assert play.result.preemptions > 0
    exported(play, tmp_path / "log.ndjson")
    again = read_log(tmp_path / "log.ndjson", nodes=True, cluster=True)
    records: list[Recorded] = []
    world = World(Scheduler(Timing(), tells=False), again, Options(), on_event=records.append)
    world.play()
    kinds = ("stoker.attempt.placed.v1", "stoker.attempt.started.v1", "stoker.job.finished.v1")

    def told(seen: list[Recorded]) -> list[tuple[float, str, str]]:
        return [
            (minutes(r.at_ms), r.event.type_name, r.event.job_id)  # type: ignore[attr-defined]
            for r in seen
            if r.event.type_name in kinds
        ]

    assert told(records) == told(play.records)


def test_an_old_log_can_be_simulated_with_its_own_nodes_and_with_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--log", str(GOLDEN), "-o", "json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert main(["--log", str(GOLDEN), "--nodes", "9", "--gpus", "4", "-o", "json"]) == 0
    more = json.loads(capsys.readouterr().out)
    assert own["jobs"] == own["finished"] == more["finished"] > 0
    assert (more["nodes"], more["gpus"]) == (9, 36)


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(
    philly: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outs = []
    for seed in ("1", "1", "2"):
        args = ["--trace", str(philly), "--nodes", "2", "--break-every", "20m", "--repair", "5m", "--seed", seed]
        assert main([*args, "-o", "json"]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2]
    body = json.loads(outs[0])
    assert body["jobs"] == 8
    assert body["over_time"][0].keys() == {"at_s", "allocated", "running", "fragmented"}
    assert set(body["waits_by_gpus"]) == {"1", "2", "4", "8", "12", "16"}


def test_the_table_names_the_figures(philly: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(philly), "--nodes", "2", "--durations", "unknown"]) == 0
    told = capsys.readouterr()
    for name in (
        "allocation",
        "fragmentation",
        "preemptions",
        "wasted",
        "mean slowdown",
        "makespan",
        "GPUs 16",
        "class NORMAL",
    ):
        assert name in told.out
    assert "2 rows refused" in told.err


def test_pictures_are_whole_and_the_same_every_time(philly: Path, tmp_path: Path) -> None:
    pages = []
    for name in ("a.html", "b.html", "c.png"):
        assert main(["--trace", str(philly), "--nodes", "2", "--plot", str(tmp_path / name)]) == 0
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]
    assert pages[0].count(b"<svg") == 3
    assert b"<img" not in pages[0]
    assert b"<script" not in pages[0]
    assert pages[2].startswith(b"\x89PNG")


TORN = PHILLY + "0,team,1,0,9,vgg,5,1\n"
BAD = {
    "no such file": (None, ["--nodes", "1"], "No such file"),
    "no rows": (PHILLY, ["--nodes", "1"], "has no rows"),
    "unknown columns": ("a,b\n1,2\n", ["--nodes", "1"], "unknown columns a, b"),
    "no times": ("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1,1,1,1000\n", ["--nodes", "1"], "unknown columns"),
    "a torn row": (TORN, ["--nodes", "1"], "line 2 has another number of columns"),
    "only bad rows": (PHILLY + "0,t,0,0,9,vgg,5,1,best\n", ["--nodes", "1"], "no job is left"),
    "no nodes": (PHILLY + "0,t,1,0,9,vgg,5,1,best\n", [], "give --nodes or --node-list"),
    "no number": (PHILLY + "0,t,1,0,9,vgg,5,1,best\n", ["--nodes", "many"], "'many' is not a number"),
    "no span": (PHILLY + "0,t,1,0,9,vgg,5,1,best\n", ["--nodes", "1", "--until", "soon"], "is not a span of time"),
    "no picture": (PHILLY + "0,t,1,0,9,vgg,5,1,best\n", ["--nodes", "1", "--plot", "x.pdf"], ".png or .html"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_line_and_nothing_is_written(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, more, told = BAD[case]
    path = tmp_path / "in.csv"
    if text is not None:
        path.write_text(text)
    picture = [] if "--plot" in more else ["--plot", str(tmp_path / "out.html")]
    assert main(["--trace", str(path), *more, *picture]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [("no json\n", "line 1 is no event"), ("", "no job was submitted"), ('{"a": 1}\n', "line 1 is no event")],
)
def test_a_file_that_is_no_log_is_refused(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(text)
    assert main(["--log", str(tmp_path / "log")]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("text", "told"), [("queues: [", "is not YAML"), ("queues:\n- nam: x\n", "queues.0.name")])
def test_a_bad_configuration_is_refused(
    text: str, told: str, philly: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(text)
    assert main(["--trace", str(philly), "--nodes", "2", "--cluster", str(tmp_path / "cluster.yaml")]) == 2
    assert told in capsys.readouterr().err
