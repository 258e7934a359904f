"""The command line for sharing the cluster: what people see, what programs get, and what is asked before a change."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import stoker_gateway.asking
from stoker import Client, ProblemError
from stoker_chassis.memory import memory_bus
from stoker_chassis.stores import Bus
from stoker_proto import ClusterConfigured, Planned, problem
from tests.integration.cli import Stoker, finished, spec, stoker
from tests.unit.client_gateway import TOKEN, Answer, Gateway, in_memory, scripted
from tests.unit.gateway_scheduler import Refusal, SchedulerTwin

__all__ = ["spec", "stoker"]

CLUSTER = """\
queues:
  - {name: default}
  - {name: research, weight: 3, gpus: {nominal: 8, limit: 16}}
windows:
  - {name: night, zone: Europe/Berlin, days: [mon, tue], start: 18:00, end: 06:00}
"""


@pytest.fixture
def scheduler() -> SchedulerTwin:
    return SchedulerTwin()


@pytest.fixture
def gateway(tmp_path: Path, scheduler: SchedulerTwin) -> Iterator[Gateway]:
    @contextlib.asynccontextmanager
    async def open_bus() -> AsyncIterator[Bus]:
        bus = memory_bus(tmp_path / "blobs")
        async with scheduler.on(bus):
            yield bus

    with Gateway(open_bus) as running:
        yield running


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Client]:
    with Client(gateway.url, TOKEN) as client:
        yield client


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_apply_shows_what_changes_asks_and_applies(
    stoker: Stoker, cluster: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer in ("n\n", ""):
        say(monkeypatch, answer)
        refused = stoker("apply", "-f", str(cluster))
        assert (refused.code, client.cluster()["version"]) == (9, 0)
        assert "nothing was changed" in refused.err
    say(monkeypatch, "y\n")
    done = stoker("apply", "-f", str(cluster), "--reason", "more for research")
    assert done.code == 0
    assert '+ /queues/research  {"weight": 3, "gpus": {"nominal": 8.0, "limit": 16.0}}' in done.out.splitlines()
    assert "version 1 is in force" in done.out
    assert "Apply as version 1?" in done.err
    again = stoker("apply", "-f", str(cluster))
    assert again.out.splitlines() == ["no difference from version 1", "version 1 is in force"]


def test_apply_goes_ahead_unasked_when_told_to_or_for_programs(
    stoker: Stoker, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "")
    assert "version 1 is in force" in stoker("apply", "-f", str(cluster), "--yes").out
    cluster.write_text("topology: [rack]\n" + CLUSTER)
    told = stoker("apply", "-f", str(cluster), "-o", "json").document
    assert (told["version"], told["changed"], [c["path"] for c in told["diff"]]) == (2, True, ["/topology"])


def test_a_dry_run_only_tells_the_difference(stoker: Stoker, cluster: Path, client: Client) -> None:
    told = stoker("apply", "-f", str(cluster), "--dry-run", "-o", "json").document
    assert set(told) == {"version", "diff"}
    assert [c["path"] for c in told["diff"]] == ["/queues/research", "/windows/night"]
    assert "+ /windows/night" in stoker("apply", "-f", str(cluster), "--dry-run").out
    assert client.cluster()["version"] == 0


def test_a_wrong_file_is_refused_with_every_mistake_and_its_line(stoker: Stoker, cluster: Path, client: Client) -> None:
    cluster.write_text(CLUSTER.replace("weight", "wieght").replace("Europe/Berlin", "Amercia/New_York"))
    said = stoker("apply", "-f", str(cluster), "--yes")
    assert (said.code, said.out) == (2, "")
    assert "line 3: /queues/1/wieght" in said.err
    assert "line 5: /windows/0/zone" in said.err
    assert "(try America/New_York)" in said.err
    assert client.cluster()["version"] == 0
    assert stoker("apply", "-f", str(cluster.parent / "none.yaml")).code == 2


def test_apply_gives_way_to_whoever_came_between(
    stoker: Stoker, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conflict = Answer(409, problem("cluster_conflict", "It is at version 4 now, not at 3").model_dump_json())
    with scripted(Answer(200, '{"version": 3, "diff": []}'), conflict) as script:
        monkeypatch.setenv("STOKER_URL", script.url)
        said = stoker("apply", "-f", str(cluster), "--yes")
    assert said.code == 6
    assert "at version 4 now" in said.err
    assert [what for what, _ in script.asked] == ["POST /v1/cluster:diff", "PUT /v1/cluster"]
    assert script.asked[1][1]["If-Match"] == '"3"'


def test_a_queue_is_changed_only_in_what_is_named(stoker: Stoker, client: Client) -> None:
    first = stoker(
        "queue", "set", "vision", "--weight", "2", "--nominal", "8", "--limit", "16", "--lend", "4", "--max-wait", "60",
        "--min-run", "5", "--model", "H100=nominal:8,limit:8", "--model", "A100=limit:2", "--reason", "new team",
    )  # fmt: skip
    assert first.code == 0
    assert first.out.startswith("+ /queues/vision ")
    stoker("queue", "set", "all", "-o", "json")
    stoker("window", "set", "night", "--zone", "UTC", "--days", "mon,tue", "--start", "18:00", "--end", "06:00")
    more = stoker(
        "queue", "set", "vision", "--parent", "all", "--window", "night", "--limit", "none", "--max-wait", "none",
        "--model", "H100=limit:none", "--model", "A100=none", "-o", "json",
    ).document  # fmt: skip
    assert {c["path"] for c in more["diff"]} == {
        "/queues/vision/parent", "/queues/vision/window", "/queues/vision/gpus/limit",
        "/queues/vision/max_wait_minutes", "/queues/vision/models/H100/limit", "/queues/vision/models/A100",
    }  # fmt: skip
    vision = next(q for q in client.cluster()["cluster"]["queues"] if q["name"] == "vision")
    assert vision == {
        "name": "vision", "parent": "all", "weight": 2, "gpus": {"nominal": 8.0, "limit": None, "lend": 4.0},
        "models": {"H100": {"nominal": 8.0, "limit": None, "lend": None}}, "window": "night",
        "max_wait_minutes": None, "min_run_minutes": 5.0,
    }  # fmt: skip
    assert "nothing to change" in stoker("queue", "set", "vision", "--weight", "2").out
    events = [e["data"] for e in client.events() if e["type"] == ClusterConfigured.type_name]
    assert [(e["version"], e["reason"]) for e in events] == [(1, "new team"), (2, ""), (3, ""), (4, "")]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["queue", "set", "q", "--nominal", "many"], "--nominal takes a number or none"),
        (["queue", "set", "q", "--model", "H100"], "--model takes MODEL=nominal:N"),
        (["queue", "set", "q", "--model", "H100=size:8"], "--model takes MODEL=nominal:N"),
        (["queue", "set", "q", "--model", "H100=limit:x"], "--model H100 limit takes a number"),
        (["queue", "set", "q", "--weight", "0"], "/queues/1/weight"),
        (["queue", "set", "q", "--limit", "2", "--nominal", "4"], "limit 2 is below nominal 4"),
        (["queue", "set", "q", "--parent", "defalt"], "(try default)"),
        (["queue", "delete", "default"], "at least one queue is needed"),
        (["class", "set", "URGENT"], "/classes/3/value"),
        (["window", "set", "w", "--zone", "UTC"], "/windows/0/days"),
    ],
)
def test_an_entry_that_makes_no_sense_changes_nothing(
    stoker: Stoker, client: Client, arguments: list[str], told: str
) -> None:
    said = stoker(*arguments)
    assert (said.code, said.out) == (2, "")
    assert told in said.err
    assert stoker(*arguments, "-o", "json").document["problem"]["kind"] == "USER"
    assert client.cluster()["version"] == 0


def test_entries_are_deleted_by_name_unless_something_needs_them(stoker: Stoker, spec: Path, cluster: Path) -> None:
    stoker("apply", "-f", str(cluster), "--yes")
    job_id = stoker("submit", str(spec), "--override", "compute.queue=research").out.strip()
    refused = stoker("queue", "delete", "research")
    assert refused.code == 2
    assert f"queue 'research' cannot go: {job_id} would be without it" in refused.err
    assert "- /windows/night" in stoker("window", "delete", "night").out
    assert "- /classes/CRITICAL" in stoker("class", "delete", "CRITICAL").out
    missing = stoker("queue", "delete", "reserch")
    assert missing.code == 5
    assert "did you mean 'research'?" in missing.err
    stoker("queue", "set", "vision", "--parent", "default")
    assert "there is no queue 'default'" in stoker("queue", "delete", "default").err


def test_classes_and_windows_are_listed(stoker: Stoker, cluster: Path) -> None:
    stoker("apply", "-f", str(cluster), "--yes")
    changed = stoker("class", "set", "URGENT", "--value", "150", "--no-preemptible", "--grace", "30", "--no-may-borrow")
    assert changed.out.startswith("+ /classes/URGENT")
    rows = [line.split() for line in stoker("class", "list").out.splitlines()]
    assert [row[0] for row in rows[1:]] == ["CRITICAL", "URGENT", "NORMAL", "BEST_EFFORT"]
    assert rows[2] == ["URGENT", "150", "no", "30", "s", "no"]
    told = stoker("class", "list", "-o", "json").document
    assert (told["version"], len(told["classes"])) == (2, 4)
    assert stoker("window", "list").out.splitlines()[1].split() == [
        "night", "mon,", "tue", "18:00", "06:00", "Europe/Berlin", "preempt",
    ]  # fmt: skip
    assert stoker("window", "list", "-o", "json").document["windows"][0]["name"] == "night"


def test_queues_are_shown_as_a_tree_with_what_they_hold_and_what_waits(
    stoker: Stoker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["queue"], ["queue", "list"]):
        lines = stoker(*arguments).out.splitlines()
        assert lines[1].split() == ["research", "65.6", "%", "10.5", "8", "2.5", "0", "4", "-", "0.0"]
        assert lines[2].startswith("  vision (closed) ")
        assert lines[2].split()[-7:] == ["-", "0", "0", "0", "3", "(24)", "12.3"]
        assert "16 GPUs, 2 free, 1.5 claimed" in lines[3]
        assert stoker(*arguments, "-o", "json").document["gpus_free"] == 2
    monkeypatch.setenv("COLUMNS", "80")
    assert "…" not in stoker("queue").out, "it fits into an ordinary terminal"


def test_one_queue_is_shown_with_its_waiting_shapes_and_why_they_wait(stoker: Stoker) -> None:
    shown = stoker("queue", "show", "vision").out
    for part in (
        "vision, below research, weight 1", "2 GPUs in 0 jobs, 2 H100", "window     closed", "1 x GPU_8xH100", "10 min",
        "job-a", "no_room: 8 GPUs [H100] are asked for, 2 are free",
    ):  # fmt: skip
        assert part in shown
    assert stoker("queue", "show", "vision", "-o", "json").document["shapes"][0]["jobs"] == 3
    missing = stoker("queue", "show", "visoin", "-o", "json")
    assert (missing.code, missing.document["problem"]["code"]) == (5, "not_found")


def test_a_dry_run_of_a_submission_tells_the_plan_and_submits_nothing(
    stoker: Stoker, spec: Path, scheduler: SchedulerTwin
) -> None:
    said = stoker("submit", str(spec), "--dry-run")
    assert said.out.splitlines() == [
        "starts later, in about 5 min, behind 2 jobs",
        "waits because no_room: 8 GPUs are asked for, 2 are free",
        "               blocked by job-x",
        "               you may wait",
        "preempts job-v (batch, BEST_EFFORT; higher_class), which loses 120 GPU-seconds",
    ]
    assert stoker("submit", str(spec), "--dry-run", "-o", "json").document["plan"]["starts"] == "later"
    scheduler.says = Planned(seq=1, at_ms=1, starts="now", nodes=("n1", "n2"))
    assert stoker("submit", str(spec), "--dry-run").out == "starts now on n1, n2\n"
    scheduler.says = Planned(seq=1, at_ms=1, starts="never")
    assert stoker("submit", str(spec), "--dry-run").out == "never starts, as the cluster is\n"
    assert stoker("list", "-o", "json").document["jobs"] == []


def test_explain_tells_the_schedulers_view_or_the_last_known_one(
    stoker: Stoker, spec: Path, scheduler: SchedulerTwin
) -> None:
    job_id = stoker("submit", str(spec)).out.strip()
    assert stoker("explain", job_id).out.splitlines() == [
        f"{job_id} is queued, in about 5 min, behind 1 job",
        "waits because no_room: 8 GPUs are asked for, 2 are free",
        "               blocked by job-x",
        "               you may wait",
        "preempts job-v (batch, BEST_EFFORT; higher_class), which loses 120 GPU-seconds",
    ]
    scheduler.says = Refusal(problem=problem("scheduler_unavailable", "The scheduler is starting"))
    said = stoker("explain", job_id)
    assert (said.code, said.out.splitlines()) == (0, [f"{job_id} is queued", "(The scheduler is starting)"])


def test_without_a_scheduler_queues_and_plans_say_try_again_and_do_not_hang(
    stoker: Stoker, spec: Path, scheduler: SchedulerTwin
) -> None:
    scheduler.says = Refusal(problem=problem("scheduler_unavailable", "The scheduler did not answer"))
    for arguments in (["queue"], ["submit", str(spec), "--dry-run"]):
        assert stoker(*arguments).code == 7
        assert stoker(*arguments, "-o", "json").document["problem"]["code"] == "scheduler_unavailable"
    assert len(scheduler.asked) == 4, "each was asked once"


def test_jobs_are_held_released_and_moved(stoker: Stoker, spec: Path, gateway: Gateway) -> None:
    job_id = stoker("submit", str(spec)).out.strip()
    assert stoker("hold", job_id, "--reason", "data").out == f"{job_id} is held (queued)\n"
    assert stoker("list").out.splitlines()[1].split()[2] == "held"
    assert stoker("release", job_id, "-o", "json").document["held"] is False
    assert stoker("priority", job_id, "-5").out == f"{job_id} has priority -5 (queued)\n"
    assert "queue default, priority -5" in stoker("get", job_id).out
    assert stoker("priority", job_id, "5000").code == 2
    gateway.tell(finished(job_id))
    for arguments in (["hold", job_id], ["release", job_id], ["priority", job_id, "1"]):
        assert stoker(*arguments, "-o", "json").document["problem"]["code"] == "job_over"
        assert stoker(*arguments).code == 6


def test_an_array_goes_by_one_id(stoker: Stoker, spec: Path) -> None:
    spec.write_text(spec.read_text() + "array: {size: 3}\n")
    array_id = stoker("submit", str(spec)).out.strip()
    assert array_id.startswith("array-")
    assert len(stoker("submit", str(spec), "-o", "json").document["jobs"]) == 3
    listed = stoker("list", "--array", array_id, "-o", "json").document
    assert [j["job_id"] for j in listed["jobs"]] == [f"{array_id}-{n}" for n in (2, 1, 0)]
    assert f"job 2 of {array_id}" in stoker("get", f"{array_id}-2").out
    assert stoker("hold", f"{array_id}-0").code == 0
    assert stoker("cancel", array_id).out == f"{array_id}: 3 unfinished jobs; each is being cancelled\n"
    watched = stoker("submit", str(spec), "--watch", "-o", "json")
    assert (watched.code, watched.document["problem"]["code"]) == (2, "invalid_request")
    assert f"stoker list --array {array_id}" in stoker("get", array_id).err


def test_the_schema_of_the_configuration_can_be_read(stoker: Stoker) -> None:
    assert stoker("schema", "--cluster").document["title"] == "Cluster"


def test_an_edit_is_made_again_when_somebody_came_between(client: Client) -> None:
    tries = 0

    def change(cluster: dict[str, object]) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            client.configure({"topology": ["row"]})
        cluster["labels"] = {"n1": {"rack": "r1"}}

    told = client.edit_cluster(change)
    assert (tries, told["version"], told["cluster"]["topology"]) == (2, 2, ["row"])

    def never(cluster: dict[str, object]) -> None:
        client.edit_cluster(lambda c: c["labels"].update({f"m{len(c['labels'])}": {}}))
        cluster["topology"] = ["rail"]

    with pytest.raises(ProblemError, match="nothing was changed"):
        client.edit_cluster(never)


def test_simulate_hands_everything_on_and_says_how_to_install_it(
    stoker: Stoker, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    command = ModuleType("stoker_scheduler.simulation.command")

    def main(arguments: list[str]) -> int:
        given.append(arguments)
        return 3

    command.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stoker_scheduler.simulation", ModuleType("stoker_scheduler.simulation"))
    monkeypatch.setitem(sys.modules, "stoker_scheduler.simulation.command", command)
    arguments = ["trace.csv", "--nodes", "n.csv", "-o", "json", "--help", "--cluster=c.yaml"]
    assert stoker("simulate", *arguments).code == 3
    assert stoker("simulate").code == 3
    assert given == [arguments, []]
    monkeypatch.setitem(sys.modules, "stoker_scheduler.simulation.command", None)
    missing = stoker("simulate", "trace.csv")
    assert missing.code == 2
    assert "pip install 'stoker[scheduler]'" in missing.err


def test_a_gateway_without_any_scheduler_answers_after_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stoker_gateway.asking, "ANSWER_S", 0.1)
    with (
        Gateway(in_memory(tmp_path / "blobs")) as alone,
        Client(alone.url, TOKEN) as client,
        pytest.raises(ProblemError) as told,
    ):
        client.queues()
    assert told.value.problem.code == "scheduler_unavailable"
