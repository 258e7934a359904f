"""/v1/cluster and /v1/queues: how the cluster is shared, changed by one writer at a time, and how it goes."""

from __future__ import annotations

import asyncio
import functools
import re
import zoneinfo
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Response
from pydantic import BaseModel, ConfigDict, Field

from stoker_chassis.clock import stamp
from stoker_chassis.eventlog import Conflict, Expect
from stoker_chassis.stores import Bus
from stoker_proto import Cluster, ClusterConfigured, ProblemError, QueuesTold, problem, subjects

from .admission import present
from .asking import ask
from .configuration import CLUSTER, Change, diff, read_cluster, still_needed
from .given import READ_YOUR_WRITES_S, BusOf, PrincipalOf, ViewsOf, caught_up
from .store import Views
from .submission import SOURCE

router = APIRouter(prefix="/v1", tags=["cluster"])
TAG = re.compile(r'(?:W/)?"([0-9]{1,18})"|([0-9]{1,18})')


class Configuration(BaseModel):
    """A cluster configuration, as an object or as YAML text."""

    model_config = ConfigDict(extra="forbid")

    cluster: dict[str, Any] | None = None
    cluster_yaml: str | None = Field(None, max_length=1_000_000)
    reason: str = Field("", max_length=1000, description="kept in the log")

    async def read(self) -> Cluster:
        if (self.cluster is None) == (self.cluster_yaml is None):
            told = "Give exactly one of cluster (an object) and cluster_yaml (a text)"
            raise ProblemError(problem("invalid_request", told))
        return await asyncio.to_thread(self._read)  # a long text takes its time

    def _read(self) -> Cluster:
        if self.cluster_yaml is None:
            return read_cluster(self.cluster, zones())
        source = CLUSTER.text(self.cluster_yaml)
        return read_cluster(source.value, zones(), source)


class ChangeView(BaseModel):
    """One difference; `path` is a JSON Pointer in which entries of lists go by their names."""

    path: str
    kind: Literal["added", "removed", "changed"]
    old: Any = None
    new: Any = None


class ClusterView(BaseModel):
    """The configuration in force. Version 0 is the built-in one."""

    version: int
    cluster: Cluster


class ClusterDiff(BaseModel):
    """What a configuration would change in that of `version`."""

    version: int
    diff: list[ChangeView]


class Configured(ClusterView):
    """The configuration in force after the request, and what the request changed in it."""

    changed: bool
    diff: list[ChangeView]


@functools.cache
def zones() -> frozenset[str]:
    """The IANA time zones that there are here."""
    return frozenset(zoneinfo.available_timezones())


def _tag(response: Response, version: int) -> None:
    response.headers["ETag"] = f'"{version}"'


def _shown(changes: list[Change]) -> list[ChangeView]:
    return [ChangeView(**change._asdict()) for change in changes]


@router.get("/cluster")
async def get_cluster(bus: BusOf, response: Response) -> ClusterView:
    """The configuration in force."""
    _, version, cluster = await present(bus)
    _tag(response, version)
    return ClusterView(version=version, cluster=cluster)


@router.post("/cluster:diff")
async def diff_cluster(body: Configuration, bus: BusOf, views: ViewsOf, response: Response) -> ClusterDiff:
    """What this configuration would change, or every mistake in it. Nothing is changed."""
    wanted = await body.read()
    _, version, cluster = await present(bus)
    await _nothing_orphaned(bus, views, cluster, wanted)
    _tag(response, version)
    return ClusterDiff(version=version, diff=_shown(diff(cluster, wanted)))


@router.put("/cluster")
async def put_cluster(
    body: Configuration,
    bus: BusOf,
    views: ViewsOf,
    principal: PrincipalOf,
    response: Response,
    if_match: Annotated[str | None, Header(max_length=100, description="the version that was read")] = None,
) -> Configured:
    """Put this configuration in force, whole, or refuse it and leave the present one as it is."""
    expected = _version_of(if_match)
    wanted = await body.read()
    seq, version, cluster = await present(bus)
    changes = diff(cluster, wanted)
    if not changes:  # also what a repeated request finds after its answer was lost
        _tag(response, version)
        return Configured(version=version, cluster=cluster, changed=False, diff=[])
    if expected not in (None, version):
        raise _changed_meanwhile(f"It is at version {version} now, not at {expected}", version)
    await _nothing_orphaned(bus, views, cluster, wanted)
    event = ClusterConfigured(version=version + 1, cluster=wanted, reason=body.reason)
    try:
        landed = await bus.log.append(stamp(event, SOURCE, actor=principal), Expect(subjects.CLUSTER, seq))
    except Conflict:
        raise _changed_meanwhile(f"Version {version + 1} was written by somebody else just now", version + 1) from None
    await views.reached(landed.seq, READ_YOUR_WRITES_S)
    _tag(response, event.version)
    return Configured(version=event.version, cluster=wanted, changed=True, diff=_shown(changes))


def _version_of(if_match: str | None) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    match = TAG.fullmatch(if_match.strip())
    if match is None:
        raise ProblemError(problem("invalid_request", f'If-Match takes a version such as "3", not {if_match!r}'))
    return int(match[1] or match[2])


def _changed_meanwhile(why: str, version: int) -> ProblemError:
    actions = ("read it again (GET /v1/cluster), look at the difference, and send the change again",)
    told = f"{why}; nothing was changed"
    return ProblemError(problem("cluster_conflict", told, facts={"version": version}, next_actions=actions))


async def _nothing_orphaned(bus: Bus, views: Views, old: Cluster, new: Cluster) -> None:
    """Raises ProblemError when a queue, class or window would go that unfinished jobs name."""
    gone = [
        {e.name for e in getattr(old, part)} - {e.name for e in getattr(new, part)}
        for part in ("queues", "classes", "windows")
    ]
    if not any(gone):
        return
    await caught_up(bus, views)
    errors = still_needed(old, new, views.in_use())
    if errors:
        raise CLUSTER.refusal(errors)


@router.get("/queues")
async def get_queues(bus: BusOf) -> QueuesTold:
    """Every queue with its share, what it holds and what waits in it, as the scheduler sees it."""
    return await ask(bus, "queues", None, QueuesTold)
