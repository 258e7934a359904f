"""Starvation and order: how other schedulers keep jobs waiting for ever, as tests of this one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_proto import Cluster as Configuration
from stoker_proto import ClusterConfigured, DecisionBatch, JobSubmitted, Place, PriorityChanged, PriorityClass
from stoker_proto.spec import Compute
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.displacing import MOST_HUNTS
from stoker_scheduler.invariants import violations
from stoker_scheduler.reserve import RELEASE_MS
from tests.builders import ListLog, joined, ready, spec, submitted
from tests.unit.scheduler_cluster import Cluster

MINUTE = 60_000
GRACE_MS = 10_000


def starts(cluster: Cluster) -> list[str]:
    """Jobs in the order in which they were placed."""
    batches = [r.event for r in cluster.log.records if isinstance(r.event, DecisionBatch)]
    return [a.job_id for b in batches for a in b.actions if isinstance(a, Place)]


@pytest.mark.parametrize("limits", [False, True], ids=["nobody-knows-for-how-long", "all-with-time-limits"])
@pytest.mark.parametrize("queue", ["default", "other"])
def test_B1_endless_small_jobs_do_not_keep_a_large_gang_waiting(limits: bool, queue: str) -> None:
    nodes, gpus, longest = 4, 4, 8
    cluster = Cluster(check=True)
    cluster.configure(queues=[{"name": "default"}, {"name": "other", "weight": 100}])
    for number in range(nodes):
        cluster.nodes(f"n{number}", gpus=gpus)
    count, ends = 0, {}

    def submit(minutes: int) -> None:
        nonlocal count
        more = {"limits": {"timeout_minutes": minutes}} if limits else {}
        cluster.tell(submitted(f"s{count}", per_node=1, queue=queue, **more))
        ends[f"s{count}"] = minutes
        count += 1

    for number in range(nodes * gpus):
        submit(1 + number % longest)
    began = cluster.log.at_ms
    running: dict[str, int] = {}
    cluster.tell(submitted("gang", nodes=nodes, per_node=gpus))
    while not cluster.places("gang"):
        for job_id in cluster.state.active:
            if job_id not in running:
                running[job_id] = cluster.log.at_ms + ends[job_id] * MINUTE
        for job_id in [j for j in running if cluster.attempt(j).running_ms is None]:
            cluster.start(job_id)
        cluster.later(MINUTE)
        for job_id in [j for j, end in running.items() if end <= cluster.log.at_ms]:
            del running[job_id]
            cluster.end(job_id)
            submit(1 + count % longest)
        assert cluster.log.at_ms <= began + longest * MINUTE + GRACE_MS + RELEASE_MS, "the longest job and its grace"
    assert (running == {}) and len(cluster.places("gang")) == nodes
    late = starts(cluster)[nodes * gpus : -1]
    assert bool(late) == limits, "only who is known to be gone in time may use what is kept"


def test_B1_a_gang_that_only_its_queues_limit_holds_up_starts_once_the_queue_has_let_it_wait_long_enough() -> None:
    cluster = Cluster(check=True)
    cluster.configure(queues=[{"name": "default", "gpus": {"limit": 4}, "max_wait_minutes": 10}])
    cluster.nodes("n1", gpus=8)
    for number in range(4):
        cluster.run(submitted(f"s{number}", per_node=1))
    cluster.tell(submitted("gang", per_node=4))
    for number in range(4, 30):
        cluster.tell(submitted(f"s{number}", per_node=1))
        if cluster.places("gang"):
            break
        oldest = next(iter(cluster.state.active))
        cluster.start(oldest)
        cluster.end(oldest)
        cluster.later(MINUTE)
    assert cluster.places("gang") == ("n1",)
    assert starts(cluster)[4:] == [*(f"s{n}" for n in range(4, 14)), "gang"], (
        "ten in ten minutes, then nobody before it"
    )


def test_B2_a_fitting_job_behind_ten_thousand_that_do_not_fit_starts_at_once() -> None:
    log, scheduler = ListLog(), Scheduler(Timing())
    unfit, small = spec(per_node=8, model="H100"), spec(per_node=1, model="A100")
    told = [joined("h", 8, model="H100"), ready("h"), joined("a", 8, model="A100"), ready("a")]
    for event in (*told, *(JobSubmitted(job_id=f"u{n}", spec=unfit, spec_hash="h") for n in range(10_001))):
        scheduler.evolve(log.append(event))
    scheduler.evolve(log.append(JobSubmitted(job_id="fits", spec=small, spec_hash="h")))
    for passes in range(1, 4):
        log.at_ms += 1_000
        scheduler.evolve(log.append(joined(f"late{passes}", 0)))
        assert len(scheduler.cycle(log.at_ms).out.reasons) < 20, "a pass looks at shapes, not at jobs"
        for decision in scheduler.decide(log.at_ms):
            scheduler.evolve(log.append(decision.event))
        if scheduler.state.jobs["fits"].state == "active":
            break
    assert passes <= 2
    assert list(scheduler.state.active) == ["u0", "fits"]
    assert violations(scheduler.state) == []


def test_B2_shapes_that_look_for_victims_in_vain_do_not_keep_others_from_looking() -> None:
    cluster = Cluster(check=True)
    cluster.configure(scheduling={"min_run_minutes": 0, "reservations": 0})
    cluster.nodes("n1", "n2")
    cluster.run(submitted("low1", priority_class="BEST_EFFORT"), submitted("low2", priority_class="BEST_EFFORT"))
    cluster.tell(*(submitted(f"vain{n}", nodes=2, cpus_per_node=4.1 + n) for n in range(60)), submitted("able"))
    for _ in range(60 // MOST_HUNTS + 1):
        due = cluster.scheduler.due_ms(cluster.log.at_ms)
        assert due is not None and due <= cluster.log.at_ms + 1_000
        cluster.later(due - cluster.log.at_ms)
        if cluster.preempted():
            break
    assert cluster.preempted() == ["low1"]
    while (due := cluster.scheduler.due_ms(cluster.log.at_ms)) is not None and due < cluster.log.at_ms + MINUTE:
        assert cluster.log.at_ms < 1_000_000 + MINUTE, "it comes to rest"
        cluster.later(due - cluster.log.at_ms)


def test_B4_a_higher_number_goes_first_everywhere() -> None:
    cluster = Cluster(check=True)
    cluster.tell(
        submitted("ten", priority=10), submitted("twenty", priority=20), submitted("later", priority=10),
        submitted("raised"), submitted("critical", priority_class="CRITICAL", priority=-5),
    )  # fmt: skip
    cluster.tell(PriorityChanged(job_id="raised", priority=15))
    cluster.nodes("n1")
    for _ in range(5):
        (running,) = cluster.state.active
        cluster.start(running)
        cluster.end(running)
    assert starts(cluster) == ["critical", "twenty", "raised", "ten", "later"]
    documented = [Compute.model_fields["priority"], PriorityClass.model_fields["value"]]
    assert all("a higher number goes first" in (field.description or "") for field in documented)
    assert "a higher number goes first" in (PriorityChanged.__doc__ or "")


TREE = {
    "queues": [
        {"name": "lab", "gpus": {"nominal": 6}},
        {"name": "vision", "parent": "lab", "weight": 2, "gpus": {"nominal": 2}},
        {"name": "speech", "parent": "lab", "gpus": {"nominal": 2}},
        {"name": "guests", "gpus": {"nominal": 0}},
    ]
}


def contended(*, check: bool) -> Cluster:
    """Jobs of all classes in a tree of queues, more than there is room for."""
    cluster = Cluster(check=check)
    cluster.fold(ClusterConfigured(version=1, cluster=Configuration.model_validate(TREE)))
    for name in ("n1", "n2"):
        cluster.fold(joined(name, 4))
        cluster.fold(ready(name))
    for number in range(5):
        for queue in ("speech", "guests", "vision", "lab"):
            for kind in ("BEST_EFFORT", "NORMAL", "CRITICAL"):
                job = submitted(f"{queue}-{kind}-{number}", per_node=1, queue=queue, priority_class=kind)
                cluster.fold(job)
    return cluster


def decided(cluster: Cluster) -> str:
    """What a fresh scheduler decides after reading the same log, as one hash."""
    scheduler = Scheduler(Timing())
    for recorded in cluster.log.records:
        scheduler.evolve(recorded)
    told = [d.event.model_dump_json() for d in scheduler.decide(cluster.log.at_ms)]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def test_B5_the_same_log_gives_the_same_order_every_time_and_classes_hold_inside_a_queue() -> None:
    cluster = contended(check=True)
    assert len({decided(cluster) for _ in range(20)}) == 1
    cluster.decide()
    order = starts(cluster)
    assert len(order) == 8
    for queue in ("lab", "vision", "speech", "guests"):
        kinds = [job_id.split("-")[1] for job_id in order if job_id.startswith(queue)]
        assert kinds == sorted(kinds, key=["CRITICAL", "NORMAL", "BEST_EFFORT"].index)
    held = {queue: cluster.state.usage.of(queue) for queue in ("lab", "vision", "speech", "guests")}
    assert held["vision"] >= 2000, "what is guaranteed below another queue is guaranteed"
    assert held["speech"] >= 2000
    assert held["lab"] >= 6000


def test_B5_the_order_does_not_hang_on_the_hash_seed_of_the_process() -> None:
    here = Path(__file__).parents[2]
    code = "from tests.unit import test_scheduler_scenarios_b as b; print(b.decided(b.contended(check=False)), end='')"
    env = os.environ | {"PYTHONHASHSEED": "1"}
    told = subprocess.run([sys.executable, "-c", code], cwd=here, env=env, capture_output=True, check=True, text=True)
    assert told.stdout == decided(contended(check=False))


def test_what_is_guaranteed_to_a_queue_below_is_had_back_from_the_one_above_and_the_other_way_round() -> None:
    cluster = Cluster(check=True)
    cluster.configure(
        scheduling={"min_run_minutes": 0},
        queues=[{"name": "lab", "gpus": {"nominal": 3}}, {"name": "team", "parent": "lab", "gpus": {"nominal": 2}}],
    )
    cluster.nodes("n1", gpus=3)
    cluster.run(*(submitted(f"lab{n}", per_node=1, queue="lab") for n in range(3)))
    cluster.tell(*(submitted(f"team{n}", per_node=1, queue="team") for n in range(3)))
    assert len(cluster.preempted()) == 2, "the lab's own jobs have what its teams leave: one GPU"
    for victim in cluster.preempted():
        cluster.stopped(victim)
    assert (cluster.state.usage.of("team"), cluster.state.usage.of("lab")) == (2000, 3000)
    cluster.later(10 * MINUTE)
    assert len(cluster.preempted()) == 2
    (mine,) = [j for j in cluster.state.active if j.startswith("lab")]
    for job_id in cluster.state.active:
        cluster.start(job_id)
    cluster.end(mine)
    assert len([j for j in cluster.state.active if j.startswith("lab")]) == 1, "the team would borrow"


def test_B7_a_head_that_waits_for_one_model_is_passed_by_others_and_by_its_own_only_in_time() -> None:
    cluster = Cluster(check=True)
    cluster.tell(*(e for n in ("h1", "h2") for e in (joined(n, model="H100"), ready(n))))
    cluster.tell(joined("a1", 4, model="A100"), ready("a1"))
    cluster.run(submitted("running", model="H100", limits={"timeout_minutes": 10}))
    cluster.tell(submitted("head", model="H100", nodes=2))
    cluster.tell(submitted("a", model="A100"), submitted("b", model="A100"))
    assert (cluster.places("a"), cluster.places("b")) == (("a1",), ("a1",)), "other GPUs are nothing to the head"
    cluster.tell(submitted("endless", model="H100"), submitted("long", model="H100", limits={"timeout_minutes": 11}))
    assert (cluster.places("endless"), cluster.places("long")) == ((), ())
    cluster.tell(submitted("short", model="H100", limits={"timeout_minutes": 9}))
    assert len(cluster.places("short")) == 1, "it will be gone before the head can start"
    cluster.start("short")
    cluster.later(9 * MINUTE)
    cluster.stopped("short")
    cluster.end("running")
    assert len(cluster.places("head")) == 2
