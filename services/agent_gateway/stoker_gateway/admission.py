"""Whether a job may come in: its spec, read against the present cluster, jobs, nodes and clock."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from stoker_chassis.stores import Bus
from stoker_proto import Cluster, ClusterConfigured, FieldError, JobSpec, Problem, ProblemError, problem, subjects

from .fit import never_fits
from .identity import JOB_ID
from .store import Views
from .validate import SPEC, part, read_spec
from .yaml_source import YamlSource

DEADLINE: TypeAdapter[datetime] = TypeAdapter(AwareDatetime)
OF_CLUSTER = ("/compute/queue", "/compute/priority_class", "/compute/within", "/schedule/window")


class Submission(BaseModel):
    """A job to validate, plan or submit: the spec as an object or as YAML text, and the digest of its uploaded code."""

    model_config = ConfigDict(extra="forbid")

    spec: dict[str, Any] | None = None
    spec_yaml: str | None = Field(None, max_length=100_000)
    code: str | None = None


class Read(NamedTuple):
    """A well-formed spec, and why it is refused here and now, if it is."""

    spec: JobSpec
    refusal: Problem | None

    def admitted(self) -> JobSpec:
        """The spec. Raises ProblemError when it is refused."""
        if self.refusal is not None:
            raise ProblemError(self.refusal)
        return self.spec


async def read(body: Submission, bus: Bus, views: Views) -> Read:
    """The spec that was sent. Raises ProblemError with every mistake in it when it is not even well-formed."""
    if (body.spec is None) == (body.spec_yaml is None):
        raise ProblemError(problem("invalid_request", "Give exactly one of spec (an object) and spec_yaml (a text)"))
    raw: object = body.spec
    source: YamlSource | None = None
    if body.spec_yaml is not None:
        source = await asyncio.to_thread(SPEC.text, body.spec_yaml)  # a long text takes most of a second
        raw = source.value
    also = await _schedule_mistakes(raw, bus, views)
    try:
        return await _read(raw, source, bus, views, also)
    except ProblemError as refused:
        try:
            return Read(JobSpec.model_validate(raw), refused.problem)
        except ValidationError:
            raise refused from None


async def _read(raw: object, source: YamlSource | None, bus: Bus, views: Views, also: list[FieldError]) -> Read:
    known = views.cluster()[1]
    try:
        spec = read_spec(raw, source, known, also)
    except ProblemError as refused:
        if not any(e.code == "not_allowed" and e.pointer in OF_CLUSTER for e in refused.problem.errors):
            raise
        # Another gateway may have changed the cluster just now: the log itself knows.
        _, _, known = await present(bus)
        spec = read_spec(raw, source, known, also)
    return Read(spec, never_fits(spec, views.inventory(), known.labels))


async def present(bus: Bus) -> tuple[int, int, Cluster]:
    """Sequence, version and content of the configuration in force, from the log itself."""
    last = await bus.log.last(subjects.CLUSTER)
    if last is None or not isinstance(last.event, ClusterConfigured):
        return 0, 0, Cluster()
    return last.seq, last.event.version, last.event.cluster


async def _schedule_mistakes(raw: object, bus: Bus, views: Views) -> list[FieldError]:
    """Jobs to wait for that there are not, and a deadline that is over."""
    schedule = part(raw, "schedule")
    found = []
    after = schedule.get("after")
    named = {
        at: entry["job"]
        for at, entry in enumerate(after if isinstance(after, list | tuple) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("job"), str)
    }
    missing = set(named.values()) - views.known(set(named.values()))
    there = {job_id for job_id in missing if await _in_log(job_id, bus)}  # another gateway's, of just now
    for at, job_id in named.items():
        if job_id in missing - there:
            told = f"there is no job {job_id!r} to wait for"
            found.append(FieldError(pointer=f"/schedule/after/{at}/job", code="not_found", message=told))
    if schedule.get("deadline") is None:
        return found
    try:
        deadline = DEADLINE.validate_python(schedule["deadline"])
    except ValidationError:
        return found  # and told as what it is
    if deadline <= datetime.now(UTC):
        told = f"{deadline.isoformat()} is over already"
        found.append(FieldError(pointer="/schedule/deadline", code="invalid", message=told))
    return found


async def _in_log(job_id: str, bus: Bus) -> bool:
    return bool(JOB_ID.fullmatch(job_id)) and await bus.log.last(subjects.job_event(job_id, "submitted")) is not None
