"""Every invariant after every event of random histories: joins, faults, cancels, reboots, quotas, windows, time."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from stoker_proto import (
    CancelRequested,
    CheckpointSaved,
    Claim,
    Cluster,
    ClusterConfigured,
    DecisionBatch,
    Event,
    HoldReleased,
    HoldRequested,
    JobFailureAttributed,
    JobSubmitted,
    NodeQuarantined,
    NodeReleased,
    NodeUnknown,
    Place,
    PriorityChanged,
    Stop,
    problem,
)
from stoker_scheduler.board import Timing
from stoker_scheduler.core import Scheduler
from stoker_scheduler.evolve import evolve
from stoker_scheduler.invariants import violations
from stoker_scheduler.state import Job, State, state_hash
from stoker_scheduler.windows import Turn
from tests.builders import exited, joined, ready, released, sealed, spec, started, submitted
from tests.unit.scheduler_cluster import Cluster as Harness

NODES = ("n1", "n2", "n3", "n4")
GPUS = {"n1": 2, "n2": 2, "n3": 4, "n4": 4}
MODELS = {"n1": "SIM", "n2": "SIM", "n3": "SIM", "n4": "BIG"}
TIMING = Timing(fresh_ms=60_000, start_deadline_ms=60_000, fence_ms=30_000)
QUEUES = ("default", "team", "agents", "night")
WINDOW_MS = 70_000

quota = st.fixed_dictionaries(
    {},
    optional={
        "nominal": st.sampled_from([0, 1, 2, 4]),
        "limit": st.sampled_from([4, 6, 8]),
    },
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Queues in a tree, with quotas that do not contradict themselves."""
    guaranteed = draw(quota)
    if "nominal" in guaranteed and draw(st.booleans()):
        guaranteed["lend"] = draw(st.integers(0, guaranteed["nominal"]))
    return Cluster.model_validate(
        {
            "queues": [
                {"name": "default", "gpus": draw(quota), "weight": draw(st.integers(1, 3))},
                {"name": "team", "gpus": guaranteed, "models": {"BIG": draw(quota)}},
                {"name": "agents", "parent": "team", "gpus": draw(quota), "min_run_minutes": 0},
                {"name": "night", "parent": "team", "window": "night", "max_wait_minutes": 1},
            ],
            "windows": [
                {"name": "night", "zone": "UTC", "days": ["mon"], "start": "20:00", "end": "06:00",
                 "on_close": draw(st.sampled_from(["preempt", "finish"]))}
            ],
            "topology": ["rack"],
            "labels": {"n1": {"rack": "r1"}, "n2": {"rack": "r1"}, "n3": {"rack": "r2"}, "n4": {"rack": "r2"}},
            "scheduling": {
                "min_run_minutes": draw(st.sampled_from([0, 0.5])),
                "max_preemptions": draw(st.integers(1, 3)),
                "reservations": draw(st.integers(0, 2)),
                "preempt_after_seconds": draw(st.sampled_from([0, 20])),
            },
        }
    )  # fmt: skip


class WatchedCluster(Harness):
    """A cluster that checks every promise after every single event, its own decisions included."""

    def __init__(self) -> None:
        super().__init__(TIMING)
        self.scheduler = Scheduler(TIMING, calendar=self.turn)
        self.attempts_seen: dict[str, int] = {}
        self.fences_seen: dict[str, int] = {}
        self.cancelled_at: dict[str, int] = {}

    @staticmethod
    def turn(window: object, now_ms: int) -> Turn:
        """Windows open and shut in turn, so that histories meet both."""
        round_, _ = divmod(now_ms, WINDOW_MS)
        return Turn(round_ % 2 == 0, round_ * WINDOW_MS, (round_ + 1) * WINDOW_MS)

    def fold(self, event: Event) -> None:
        before = dict(self.state.jobs)
        if isinstance(event, DecisionBatch):
            self.check_batch(event)
        super().fold(event)
        assert violations(self.state) == []
        for job in self.state.jobs.values():
            assert job.attempts >= self.attempts_seen.get(job.id, 0), "INV2 attempt numbers only rise"
            self.attempts_seen[job.id] = job.attempts
            if job.attempt is not None:
                assert job.attempt.fence >= self.fences_seen.get(job.id, 0), "INV2 fences only rise"
                self.fences_seen[job.id] = job.attempt.fence
            if job.cancel:
                assert self.cancelled_at.setdefault(job.id, job.attempts) == job.attempts, "INV10"
            was = before.get(job.id)
            if was is not None and was.state == "queued" and job.state == "active":
                assert not was.gated, "INV10 nothing gated starts"

    def check_batch(self, batch: DecisionBatch) -> None:
        """INV6, INV7 and INV8, on what the leader decided at this very state."""
        claims = {a.job_id: a for a in batch.actions if isinstance(a, Claim)}
        for action in batch.actions:
            if isinstance(action, Place):
                for allocation in action.allocations:
                    node = self.state.nodes[allocation.node]
                    assert node.takes_work and node.boot_epoch == allocation.boot_epoch, "INV6"
            if isinstance(action, Stop) and action.reason == "preempted":
                assert action.by is not None and action.by in claims, "INV7 no preemption without a claim"
                assert claims[action.by].kind == "preempt"
                self.check_victim(self.state.jobs[action.job_id])

    def check_victim(self, victim: Job) -> None:
        numbers = self.state.cluster.scheduling
        classes = {c.name: c for c in self.state.cluster.classes}
        queues = {q.name: q for q in self.state.cluster.queues}
        assert classes[victim.class_name].preemptible, "INV8"
        assert not victim.boosted and victim.preemptions < numbers.max_preemptions, "INV8"
        assert victim.attempt is not None
        minutes = queues[victim.queue].min_run_minutes
        lasting = numbers.min_run_minutes if minutes is None else minutes
        began = victim.attempt.running_ms
        assert lasting == 0 or (began is not None and self.log.at_ms >= began + lasting * 60_000), "INV8"


class Histories(RuleBasedStateMachine):
    jobs: Bundle[str] = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.cluster = WatchedCluster()
        self.count = 0
        self.version = 0
        self.epochs = dict.fromkeys(NODES, 0)

    def epoch(self, node: str) -> str:
        return f"b{self.epochs[node]}"

    def known(self, job_id: str) -> Job | None:
        return self.cluster.state.jobs.get(job_id)

    @rule(cluster=clusters())
    def configure(self, cluster: Cluster) -> None:
        self.version += 1
        self.cluster.tell(ClusterConfigured(version=self.version, cluster=cluster))

    @rule(node=st.sampled_from(NODES))
    def reboot(self, node: str) -> None:
        self.epochs[node] += 1
        self.cluster.tell(joined(node, GPUS[node], epoch=self.epoch(node), model=MODELS[node]))

    @rule(node=st.sampled_from(NODES), kind=st.sampled_from(["ready", "ready", "quarantined", "released", "unknown"]))
    def verdict(self, node: str, kind: str) -> None:
        fields = {"node": node, "boot_epoch": self.epoch(node), "rule": "r", "reason": "why"}
        made: dict[str, Event] = {
            "ready": ready(node, self.epoch(node)),
            "quarantined": NodeQuarantined.model_validate(fields),
            "released": NodeReleased.model_validate(fields),
            "unknown": NodeUnknown.model_validate(fields),
        }
        self.cluster.tell(made[kind])

    @rule()
    def all_ready(self) -> None:
        for node in NODES:
            if node in self.cluster.state.nodes:
                self.cluster.tell(ready(node, self.epoch(node)))
            else:
                self.reboot(node)

    def submit_one(self, **fields: Any) -> str:
        self.count += 1
        job_id = f"j{self.count}"
        self.cluster.tell(submitted(job_id, **fields))
        return job_id

    @rule(
        target=jobs,
        nodes=st.integers(1, 3),
        per_node=st.integers(1, 4),
        model=st.sampled_from(["SIM", "SIM", "ANY", "BIG"]),
        queue=st.sampled_from(QUEUES),
        priority_class=st.sampled_from(["BEST_EFFORT", "NORMAL", "CRITICAL"]),
        extra=st.fixed_dictionaries(
            {},
            optional={
                "timeout": st.sampled_from([0.2, 1]),
                "fraction": st.sampled_from([0.25, 0.5]),
                "within": st.just("rack"),
                "priority": st.integers(-1, 1),
                "window": st.just("night"),
                "hold": st.just(True),
                "cpus": st.sampled_from([1, 3]),
                "checkpoints": st.just(True),
                "retries": st.just({"user_error": 1}),
            },
        ),
    )
    def submit(
        self, nodes: int, per_node: int, model: str, queue: str, priority_class: str, extra: dict[str, Any]
    ) -> str:
        body = spec(nodes, per_node, model).model_dump()
        body["compute"] |= {
            "queue": queue, "priority_class": priority_class, "gpu_fraction": extra.get("fraction", 1.0),
            "within": extra.get("within"), "priority": extra.get("priority", 0), "cpus_per_node": extra.get("cpus", 0),
        }  # fmt: skip
        body["limits"] |= {"timeout_minutes": extra.get("timeout"), "retries": extra.get("retries", {})}
        body["schedule"] |= {"window": extra.get("window"), "hold": extra.get("hold", False)}
        if extra.get("checkpoints"):
            body["outputs"] = {"checkpoints": {"keep": 1}}
        return self.submit_one(**{k: body[k] for k in ("compute", "limits", "schedule", "outputs")})

    @initialize(bring_up=st.booleans(), cluster=clusters())
    def begin(self, bring_up: bool, cluster: Cluster) -> None:
        self.configure(cluster)
        if bring_up:
            self.all_ready()
            self.all_ready()

    @rule(
        target=jobs,
        count=st.integers(2, 6),
        per_node=st.integers(1, 2),
        queue=st.sampled_from(QUEUES),
        priority_class=st.sampled_from(["BEST_EFFORT", "BEST_EFFORT", "NORMAL"]),
        timeout=st.sampled_from([None, None, 5]),
    )
    def fill(self, count: int, per_node: int, queue: str, priority_class: str, timeout: float | None) -> str:
        """Many small jobs, all started, that have run for a while."""
        compute = spec(1, per_node, "ANY").model_dump()["compute"] | {"queue": queue, "priority_class": priority_class}
        for _ in range(count):
            last = self.submit_one(compute=compute, limits={"timeout_minutes": timeout})
            self.start(last)
        self.cluster.later(31_000)
        return last

    @rule()
    def start_all(self) -> None:
        for job_id in list(self.cluster.state.active):
            self.start(job_id)

    @rule()
    def obey(self) -> None:
        """Whoever was asked to stop does."""
        for job_id in list(self.cluster.state.active):
            job = self.known(job_id)
            if job is not None and job.attempt is not None and job.attempt.stop is not None:
                self.cluster.stopped(job_id)

    @rule(target=jobs, after=jobs, on=st.sampled_from(["success", "failure", "end"]))
    def submit_dependent(self, after: str, on: str) -> str:
        return self.submit_one(schedule={"after": [{"job": after, "on": on}]})

    @rule(target=jobs, size=st.integers(2, 3), at_once=st.integers(1, 2))
    def submit_array(self, size: int, at_once: int) -> str:
        self.count += 1
        name = f"a{self.count}"
        asked = spec(1, 1, array={"size": size, "at_once": at_once})
        for index in range(size):
            self.cluster.tell(
                JobSubmitted(job_id=f"{name}-{index}", spec=asked, spec_hash="h", array_id=name, array_index=index)
            )
        return f"{name}-0"

    @rule(job_id=consumes(jobs))
    def cancel(self, job_id: str) -> None:
        self.cluster.tell(CancelRequested(job_id=job_id))

    @rule(job_id=jobs, hold=st.booleans())
    def hold(self, job_id: str, hold: bool) -> None:
        self.cluster.tell(HoldRequested(job_id=job_id) if hold else HoldReleased(job_id=job_id))

    @rule(job_id=jobs, priority=st.integers(-2, 2))
    def prioritise(self, job_id: str, priority: int) -> None:
        self.cluster.tell(PriorityChanged(job_id=job_id, priority=priority))

    @rule(job_id=jobs)
    def start(self, job_id: str) -> None:
        job = self.known(job_id)
        if job is not None and job.attempt is not None:
            for part in job.attempt.parts:
                self.cluster.tell(started(job_id, job.attempt.number, part.allocation.node, job.attempt.fence))

    @rule(job_id=jobs)
    def save(self, job_id: str) -> None:
        job = self.known(job_id)
        if job is not None and job.attempt is not None:
            number = job.attempt.number
            self.cluster.tell(CheckpointSaved(job_id=job_id, attempt=number, step=1, path="p", bytes=1))

    @rule(
        job_id=jobs,
        which=st.integers(0, 2),
        how=st.sampled_from(["ok", "user_error", "infra_gpu", "launch_rejected"]),
        own=st.booleans(),
        stale=st.booleans(),
    )
    def end_part(
        self,
        job_id: str,
        which: int,
        how: Literal["ok", "user_error", "infra_gpu", "launch_rejected"],
        own: bool,
        stale: bool,
    ) -> None:
        job = self.known(job_id)
        attempt = job.attempt if job else None
        if attempt is None:
            return
        node = attempt.parts[which % len(attempt.parts)].allocation.node
        number, fence = (attempt.number, attempt.fence) if not stale else (attempt.number - 1, attempt.fence - 1)
        if attempt.stop is not None:
            self.cluster.tell(exited(job_id, number, node, fence, how if own else "cancelled", asked=attempt.stop))
        else:
            self.cluster.tell(exited(job_id, number, node, fence, how))
        self.cluster.tell(released(job_id, number, node, fence))
        self.cluster.tell(sealed(job_id, number, node, fence))

    @rule(job_id=jobs)
    def end(self, job_id: str) -> None:
        """All that is left of the attempt ends as it should, and at once."""
        job = self.known(job_id)
        attempt = job.attempt if job else None
        if attempt is None:
            return
        for part in attempt.parts:
            node = part.allocation.node
            for made in (
                exited(job_id, attempt.number, node, attempt.fence, asked=attempt.stop),
                released(job_id, attempt.number, node, attempt.fence),
                sealed(job_id, attempt.number, node, attempt.fence),
            ):
                self.cluster.tell(made)

    @rule(job_id=jobs, retry=st.booleans(), confidence=st.sampled_from(["established", "hypothesis"]))
    def attribute(self, job_id: str, retry: bool, confidence: str) -> None:
        job = self.known(job_id)
        if job is None or job.attempt is None or job.attempt.failed is None:
            return
        node = job.attempt.failed.node
        fields = {
            "job_id": job_id, "attempt": job.attempt.number, "outcome": "infra_gpu" if retry else "user_error",
            "blame": "unknown", "confidence": confidence, "retry": retry, "exclude_nodes": (node,) if retry else (),
            "problem": problem("gpu_fault" if retry else "python_exception", "because"),
        }  # fmt: skip
        self.cluster.tell(JobFailureAttributed.model_validate(fields))

    @rule(ms=st.integers(1, 100_000))
    def wait(self, ms: int) -> None:
        self.cluster.later(ms)

    @rule()
    def another_leader(self) -> None:
        """It folds the same log, comes to the same state, and goes on."""
        other = Scheduler(TIMING, calendar=self.cluster.turn)
        for recorded in self.cluster.log.records:
            other.evolve(recorded)
        assert state_hash(other.state) == state_hash(self.cluster.state), "INV11"
        self.cluster.scheduler = other
        self.cluster.decide()

    @rule()
    def restart_from_a_snapshot(self) -> None:
        other = Scheduler(TIMING, calendar=self.cluster.turn)
        other.load(self.cluster.scheduler.dump())
        assert violations(other.state) == []
        assert state_hash(other.state) == state_hash(self.cluster.state), "INV11"
        self.cluster.scheduler = other
        self.cluster.decide()

    @invariant()
    def deciding_again_without_news_decides_nothing(self) -> None:
        assert self.cluster.scheduler.decide(self.cluster.log.at_ms) == [], "INV12"

    @invariant()
    def every_waiting_job_has_a_reason(self) -> None:
        waiting = [j for j in self.cluster.state.jobs.values() if j.state == "queued"]
        assert all(job.reasons for job in waiting), "INV13"

    def teardown(self) -> None:
        """The whole history folds to the same state again."""
        fresh = State()
        for recorded in self.cluster.log.records:
            fresh = evolve(fresh, recorded)
        assert state_hash(fresh) == state_hash(self.cluster.state), "INV11"


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_second_scheduler_agrees_after_every_event() -> None:
    cluster = Harness()
    cluster.nodes("n1", "n2", "n3")
    cluster.tell(submitted("a", nodes=2), submitted("b"), submitted("c", nodes=3))
    cluster.start("a")
    cluster.end("a")
    one, two = Scheduler(Timing()), Scheduler(Timing())
    for recorded in cluster.log.records:
        one.evolve(recorded)
        two.evolve(recorded)
        assert state_hash(one.state) == state_hash(two.state)
