"""The cluster configuration changes whole, by one writer at a time, or stays as it is with every mistake named."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_chassis.memory import MemoryLog, memory_bus
from stoker_chassis.stores import Bus
from stoker_gateway.configuration import CLUSTER, Change, diff, read_cluster
from stoker_proto import (
    Cluster,
    ClusterConfigured,
    FieldError,
    JobFinished,
    PriorityClass,
    ProblemError,
    Queue,
    Quota,
    Recorded,
    Window,
)
from tests.unit.gateway_api import SPEC, Gateway, gateway

ZONES = {"Europe/Berlin", "UTC", "America/New_York"}
WEEKEND: dict[str, Any] = {
    "name": "weekend", "zone": "Europe/Berlin", "days": ["sat", "sun"], "start": "18:00", "end": "08:00",
}  # fmt: skip
GOOD: dict[str, Any] = {
    "queues": [
        {"name": "default"},
        {"name": "research", "weight": 3, "gpus": {"nominal": 8, "limit": 16, "lend": 4}},
        {"name": "vision", "parent": "research", "models": {"H100": {"nominal": 4}}, "window": "weekend"},
    ],
    "windows": [WEEKEND],
}


@pytest.fixture
def memory(tmp_path: Path) -> Bus:
    return memory_bus(tmp_path / "blobs")


def mistakes(raw: object) -> dict[str, FieldError]:
    with pytest.raises(ProblemError) as caught:
        if isinstance(raw, str):
            source = CLUSTER.text(raw)
            read_cluster(source.value, ZONES, source)
        else:
            read_cluster(raw, ZONES)
    told = caught.value.problem
    assert (told.code, told.status) == ("invalid_cluster", 422)
    return {e.pointer: e for e in told.errors}


def test_every_mistake_is_told_at_once_with_its_place_and_what_was_meant() -> None:
    found = mistakes("""\
queues:
  - {name: a, parent: resarch, weight: -1, wieght: 2}
  - {name: research, gpus: {nominal: 4, limit: 2}, window: wekend}
  - {name: research, max_wait_minutes: 0}
windows:
  - {name: weekend, zone: Europe/Berln, days: [sat, sun], start: 18:00, end: "24:00"}
classes:
  - {name: NORMAL, value: high}
topolgy: [rack]
scheduling:
  min_run_minutes: -1
  min_run_minutes: 2
""")
    assert {p: (e.code, e.line) for p, e in found.items()} == {
        "/queues/0/parent": ("not_allowed", 2),
        "/queues/0/weight": ("invalid", 2),
        "/queues/0/wieght": ("unknown_field", 2),
        "/queues/1/gpus": ("invalid", 3),
        "/queues/1/window": ("not_allowed", 3),
        "/queues/2/name": ("invalid", 4),
        "/queues/2/max_wait_minutes": ("invalid", 4),
        "/windows/0/zone": ("not_allowed", 6),
        "/windows/0/end": ("invalid", 6),
        "/classes/0/value": ("wrong_type", 8),
        "/topolgy": ("unknown_field", 9),
        "/scheduling/min_run_minutes": ("invalid", 12),
    }
    assert {p: e.suggestion for p, e in found.items() if e.suggestion} == {
        "/queues/0/parent": "research",
        "/queues/0/wieght": "weight",
        "/queues/1/window": "weekend",
        "/windows/0/zone": "Europe/Berlin",
        "/topolgy": "topology",
    }
    assert "limit 2 is below nominal 4" in found["/queues/1/gpus"].message
    assert "after line 11" in found["/scheduling/min_run_minutes"].message


def test_a_queue_above_itself_is_named() -> None:
    found = mistakes({"queues": [{"name": "a", "parent": "b"}, {"name": "b", "parent": "a"}, {"name": "c"}]})
    assert set(found) == {"/queues/0/parent", "/queues/1/parent"}
    assert "above itself" in found["/queues/0/parent"].message


@pytest.mark.parametrize(("part", "told"), [("queues", "one queue"), ("classes", "one class")])
def test_a_cluster_without_queues_or_classes_is_none(part: str, told: str) -> None:
    assert told in mistakes({part: []})[f"/{part}"].message


def test_a_part_of_the_wrong_kind_does_not_hide_the_other_mistakes() -> None:
    found = mistakes({"queues": [{"name": ["x"]}, 3, {"name": "q", "window": "w"}], "windows": 7, "topology": [1]})
    assert set(found) == {"/queues/0/name", "/queues/1", "/windows", "/topology/0"}
    assert set(mistakes({"queues": [{"name": "q", "window": "w", "parent": 3}], "windows": 7})) == {
        "/queues/0/parent",
        "/windows",
    }


def test_anchors_that_grow_without_end_are_one_mistake_and_not_a_hundred_thousand() -> None:
    wrong = ", ".join(f"a b{n}: 1" for n in range(400))
    text = f"labels:\n  n0: &x {{{wrong}}}\n" + "".join(f"  n{n}: *x\n" for n in range(1, 300))
    assert "values at most" in mistakes(text)[""].message
    assert len(mistakes(text)) == 1


def test_times_of_day_need_no_quotes() -> None:
    source = CLUSTER.text("windows: [{name: night, zone: UTC, days: [mon], start: 18:30, end: 06:00}]")
    assert read_cluster(source.value, ZONES, source).windows[0].start == "18:30"


@pytest.mark.parametrize("raw", [None, [], "text", 3])
def test_what_is_no_mapping_is_no_cluster(raw: object) -> None:
    with pytest.raises(ProblemError, match="mapping"):
        read_cluster(raw, ZONES)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["a", "b", "Europe/Berlin", "mon", "18:00"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "parent", "window", "zone", "days", "gpus", "nominal", "weight"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from([*Cluster.model_fields, "x"]), JSON, max_size=5))
def test_whatever_is_sent_is_a_cluster_or_named_mistakes(raw: dict[str, Any]) -> None:
    try:
        cluster = read_cluster(raw, ZONES)
    except ProblemError as error:
        assert error.problem.errors
    else:
        assert read_cluster(cluster.model_dump(mode="json"), ZONES) == cluster


def test_a_difference_is_one_line_for_each_thing_that_changed() -> None:
    old = read_cluster(GOOD, ZONES)
    new = old.model_copy(
        update={
            "queues": (
                old.queues[0],
                old.queues[1].model_copy(update={"weight": 5, "gpus": Quota(nominal=8, limit=16)}),
                Queue(name="speech", parent="research", weight=2),
            ),
            "topology": ("row", "rack"),
            "labels": {"n1": {"rack": "r1"}},
            "scheduling": old.scheduling.model_copy(update={"reservations": 1}),
        }
    )
    assert diff(old, new) == [
        Change("/queues/vision", "removed", old={"parent": "research", "models": {"H100": {"nominal": 4.0}},
                                                 "window": "weekend"}),
        Change("/queues/speech", "added", new={"parent": "research", "weight": 2}),
        Change("/queues/research/weight", "changed", 3, 5),
        Change("/queues/research/gpus/lend", "changed", 4.0, None),
        Change("/topology", "changed", ["rack", "rail"], ["row", "rack"]),
        Change("/labels/n1", "added", new={"rack": "r1"}),
        Change("/scheduling/reservations", "changed", old.scheduling.reservations, 1),
    ]  # fmt: skip


def test_another_order_is_a_difference_too() -> None:
    a, b, c = (Queue(name=n) for n in "abc")
    assert diff(Cluster(queues=(a, b)), Cluster(queues=(b, a, c))) == [
        Change("/queues/c", "added", new={}),
        Change("/queues", "changed", ["a", "b"], ["b", "a", "c"]),
    ]


names = st.sampled_from(["a", "b", "c"])
clusters = st.builds(
    Cluster,
    queues=st.lists(st.builds(Queue, name=names, weight=st.integers(1, 2)), min_size=1, unique_by=lambda q: q.name).map(
        tuple
    ),
    classes=st.lists(
        st.builds(PriorityClass, name=names, value=st.integers(0, 1)), min_size=1, unique_by=lambda c: c.name
    ).map(tuple),
    labels=st.dictionaries(names, st.dictionaries(names, names, max_size=2), max_size=2),
)


@given(clusters, clusters)
def test_nothing_differs_exactly_when_they_are_the_same(old: Cluster, new: Cluster) -> None:
    assert (diff(old, new) == []) == (old == new)
    assert len({c.path for c in diff(old, new)}) == len(diff(old, new))


async def events(bus: Bus) -> list[ClusterConfigured]:
    return [r.event async for r in bus.log.read() if isinstance(r.event, ClusterConfigured)]


async def put(api: Gateway, cluster: dict[str, Any], version: int | None = None) -> Any:
    headers = {} if version is None else {"If-Match": f'"{version}"'}
    return await api.http.put("/v1/cluster", json={"cluster": cluster, "reason": "because"}, headers=headers)


async def test_the_built_in_configuration_is_version_nought_and_each_change_the_next(memory: Bus) -> None:
    async with gateway(memory) as api:
        first = await api.http.get("/v1/cluster")
        assert (first.json()["version"], first.headers["ETag"]) == (0, '"0"')
        assert Cluster.model_validate(first.json()["cluster"]) == Cluster()
        done = await put(api, GOOD, 0)
        assert (done.status_code, done.json()["version"], done.json()["changed"]) == (200, 1, True)
        assert [c["path"] for c in done.json()["diff"]] == ["/queues/research", "/queues/vision", "/windows/weekend"]
        now = await api.http.get("/v1/cluster")
        assert (now.json()["version"], now.headers["ETag"]) == (1, '"1"')
        assert (await put(api, now.json()["cluster"] | {"topology": ["rack"]})).json()["version"] == 2
    told = await events(memory)
    assert [(e.version, e.reason) for e in told] == [(1, "because"), (2, "because")]


async def test_what_is_the_same_already_changes_nothing_even_when_its_answer_was_lost(memory: Bus) -> None:
    async with gateway(memory) as api:
        await put(api, GOOD, 0)
        again = await put(api, GOOD, 0)
        assert (again.status_code, again.json()["version"], again.json()["changed"]) == (200, 1, False)
    assert len(await events(memory)) == 1


class SlowLog(MemoryLog):
    """Answers its five readers together."""

    def __init__(self) -> None:
        super().__init__()
        self._readers = asyncio.Barrier(5)

    async def last(self, subject: str) -> Recorded | None:
        found = await super().last(subject)
        await self._readers.wait()
        return found


async def test_whoever_read_before_somebody_else_wrote_writes_nothing(memory: Bus) -> None:
    slow = dataclasses.replace(memory, log=SlowLog())
    async with gateway(slow) as api:
        answers = await asyncio.gather(*(put(api, GOOD | {"topology": [f"level-{n}"]}) for n in range(5)))
    assert sorted(a.status_code for a in answers) == [200] + [409] * 4
    assert {a.json()["facts"]["version"] for a in answers if a.status_code == 409} == {1}
    assert len(await events(slow)) == 1


async def test_of_two_who_read_the_same_version_one_writes(memory: Bus) -> None:
    async with gateway(memory) as one, gateway(memory) as two:
        bodies = [GOOD | {"topology": [f"level-{n}"]} for n in range(10)]
        answers = await asyncio.gather(*(put((one, two)[n % 2], body, 0) for n, body in enumerate(bodies)))
        assert sorted(a.status_code for a in answers) == [200] + [409] * 9
        lost = next(a.json() for a in answers if a.status_code == 409)
        assert (lost["code"], lost["facts"]) == ("cluster_conflict", {"version": 1})
        # Without a version it is still one after the other.
        more = await asyncio.gather(*(put(one, GOOD | {"topology": [f"more-{n}"]}) for n in range(3)))
        assert {a.status_code for a in more} <= {200, 409}
    assert [e.version for e in await events(memory)] == list(range(1, len(await events(memory)) + 1))


@pytest.mark.parametrize(
    "body",
    [
        {"cluster": {"queues": []}},
        {"cluster_yaml": "queues: [{name: default, weight: 0}]"},
        {"cluster_yaml": "queues: [1, 2"},
        {"cluster_yaml": ""},
        {"cluster": GOOD | {"windows": [WEEKEND | {"zone": "Nowhere/Else"}]}},
    ],
)
async def test_a_wrong_configuration_leaves_the_old_one_in_force(memory: Bus, body: dict[str, Any]) -> None:
    async with gateway(memory) as api:
        await put(api, GOOD)
        before = (await api.http.get("/v1/cluster")).json()
        for method, path in (("PUT", "/v1/cluster"), ("POST", "/v1/cluster:diff")):
            refused = await api.http.request(method, path, json=body)
            assert (refused.status_code, refused.json()["code"]) == (422, "invalid_cluster")
        assert (await api.http.get("/v1/cluster")).json() == before
        job = await api.http.post("/v1/jobs", json={"spec": SPEC | {"compute": SPEC["compute"] | {"queue": "vision"}}})
        assert job.status_code == 201
    assert len(await events(memory)) == 1


async def test_a_version_that_is_no_number_and_two_configurations_at_once_are_refused(memory: Bus) -> None:
    async with gateway(memory) as api:
        for body, headers in (
            ({"cluster": GOOD}, {"If-Match": "latest"}),
            ({"cluster": GOOD, "cluster_yaml": "a: 1"}, {}),
            ({}, {}),
        ):
            refused = await api.http.put("/v1/cluster", json=body, headers=headers)
            assert refused.json()["code"] == "invalid_request"
    assert await events(memory) == []


async def test_a_difference_is_told_and_nothing_is_changed(memory: Bus) -> None:
    text = "queues: [{name: default, weight: 2}]\n"
    async with gateway(memory) as api:
        told = (await api.http.post("/v1/cluster:diff", json={"cluster_yaml": text})).json()
    assert told == {
        "version": 0, "diff": [{"path": "/queues/default/weight", "kind": "changed", "old": 1, "new": 2}],
    }  # fmt: skip
    assert await events(memory) == []


async def test_what_unfinished_jobs_need_cannot_go_until_they_are_over(memory: Bus) -> None:
    rich = GOOD | {"classes": [{"name": "NORMAL", "value": 1}, {"name": "URGENT", "value": 2}]}
    poor: dict[str, Any] = {"queues": [{"name": "default"}], "classes": [{"name": "NORMAL", "value": 1}]}
    async with gateway(memory) as api:
        assert (await put(api, rich)).status_code == 200
        compute = SPEC["compute"] | {"queue": "vision", "priority_class": "URGENT"}
        jobs = [await api.submit(compute=compute, schedule={"window": "weekend"}) for _ in range(2)]
        for method, path in (("PUT", "/v1/cluster"), ("POST", "/v1/cluster:diff")):
            refused = (await api.http.request(method, path, json={"cluster": poor})).json()
            assert refused["code"] == "invalid_cluster"
            assert {(e["pointer"], e["code"]) for e in refused["errors"]} == {
                (f"/{part}", "in_use") for part in ("queues", "classes", "windows")
            }
            assert f"{min(jobs)} and 1 more" in refused["errors"][0]["message"]
        over = [JobFinished(job_id=j, state="cancelled", outcome="cancelled", attempts=0, gpu_ms=0) for j in jobs]
        await api.say(*over)
        assert (await put(api, poor)).status_code == 200


async def test_a_gateway_that_starts_anew_knows_the_cluster(memory: Bus) -> None:
    async with gateway(memory) as api:
        await put(api, GOOD)
    compute = SPEC["compute"] | {"queue": "vision"}
    async with gateway(memory) as api:
        assert api.views.cluster()[0] == 1
        assert (await api.http.post("/v1/jobs:validate", json={"spec": SPEC | {"compute": compute}})).status_code == 200


async def test_a_gateway_that_is_behind_asks_the_log_before_it_refuses_a_name(memory: Bus) -> None:
    compute = SPEC["compute"] | {"queue": "vision"}
    async with gateway(memory) as api:
        api.views.fold = lambda burst: None  # type: ignore[method-assign]
        await put(api, GOOD)
        assert (await api.http.post("/v1/jobs:validate", json={"spec": SPEC | {"compute": compute}})).status_code == 200


def test_the_configuration_in_the_readme_is_one() -> None:
    blocks = re.findall(r"```yaml\n(queues:.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL)
    for text in blocks:
        source = CLUSTER.text(text)
        assert read_cluster(source.value, ZONES, source).queues
    assert blocks


def test_windows_on_the_wall_clock_are_kept_as_they_were_written() -> None:
    assert read_cluster(GOOD, ZONES).windows == (Window(**WEEKEND),)
