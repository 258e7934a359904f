"""The Problem: one error object (RFC 9457) for HTTP, CLI, events and failed jobs. Codes are a closed list.

kind        retryable  meaning
USER        no         the request or the job's own code is at fault
AUTH        no         token missing or without the right
NOT_FOUND   no         no such thing
CONFLICT    no         it clashes with what is already there
TRANSIENT   yes        the same request may succeed later
INFRA       yes        a machine failed; the platform retries by itself
INTERNAL    no         a fault of Stoker
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .envelope import Frozen

Kind = Literal["USER", "AUTH", "NOT_FOUND", "CONFLICT", "TRANSIENT", "INFRA", "INTERNAL"]
Origin = Literal["user", "platform", "hardware"]

# code -> (kind, HTTP status, title, retryable, origin)
CODES: dict[str, tuple[Kind, int, str, bool, Origin]] = {
    "invalid_spec": ("USER", 422, "The job spec is not valid", False, "user"),
    "invalid_request": ("USER", 422, "The request is not valid", False, "user"),
    "never_fits": ("USER", 422, "No set of nodes here can ever hold this job", False, "user"),
    "code_missing": ("USER", 422, "The code blob was not uploaded", False, "user"),
    "blob_mismatch": ("USER", 422, "The blob's content does not have the digest it was sent under", False, "user"),
    "blob_too_large": ("USER", 413, "The blob is too large", False, "user"),
    "unauthorized": ("AUTH", 401, "A valid token is needed", False, "user"),
    "not_found": ("NOT_FOUND", 404, "There is no such thing", False, "user"),
    "method_not_allowed": ("USER", 405, "This path does not take this method", False, "user"),
    "idempotency_key_reused": ("CONFLICT", 422, "This idempotency key was used with another body", False, "user"),
    "invalid_cluster": ("USER", 422, "The cluster configuration has mistakes", False, "user"),
    "cluster_conflict": ("CONFLICT", 409, "Somebody else changed the cluster configuration", True, "user"),
    "job_over": ("CONFLICT", 409, "The job is over", False, "user"),
    "dependency_failed": ("USER", 422, "A job that this one waits for ended otherwise", False, "user"),
    "deadline_passed": ("USER", 422, "The job was not over by its deadline", False, "user"),
    "scheduler_unavailable": ("TRANSIENT", 503, "No scheduler answers", True, "platform"),
    "log_unavailable": ("TRANSIENT", 503, "The event log cannot be reached", True, "platform"),
    "internal": ("INTERNAL", 500, "A fault of Stoker", False, "platform"),
    "python_exception": ("USER", 422, "The job's code raised an exception", False, "user"),
    "exit_code": ("USER", 422, "The job ended with a non-zero exit code", False, "user"),
    "killed_by_signal": ("USER", 422, "A process of the job was killed by a signal", False, "user"),
    "command_not_found": ("USER", 422, "The command or entrypoint was not found", False, "user"),
    "host_oom": ("USER", 422, "The job ran out of host memory", False, "user"),
    "cuda_oom": ("USER", 422, "The job ran out of GPU memory", False, "user"),
    "timeout": ("USER", 422, "The job ran longer than its limit", False, "user"),
    "cancelled": ("USER", 409, "The job was cancelled", False, "user"),
    "gpu_fault": ("INFRA", 503, "A GPU failed", True, "hardware"),
    "comm_fault": ("INFRA", 503, "Communication between ranks failed", True, "hardware"),
    "node_lost": ("INFRA", 503, "A node was lost", True, "hardware"),
    "storage_fault": ("INFRA", 503, "Storage failed", True, "hardware"),
    "launch_rejected": ("INFRA", 503, "A node could not start the job", True, "platform"),
    "preflight_failed": ("INFRA", 503, "A node failed its preflight", True, "hardware"),
}


class FieldError(Frozen):
    """One mistake in a request: where it is, what is wrong, and how to mend it."""

    pointer: str
    code: str
    message: str
    line: int | None = None
    suggestion: str | None = None
    allowed: tuple[str, ...] = ()


class Evidence(Frozen):
    """A line that shows the cause, and where it stands."""

    stream: str
    line: str


class Problem(Frozen):
    """What failed, where, whose fault it is, and what to do next."""

    type: str
    title: str
    status: int
    code: str
    kind: Kind
    detail: str
    retryable: bool
    origin: Origin
    instance: str | None = None
    retry_after_s: float | None = None
    errors: tuple[FieldError, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    next_actions: tuple[str, ...] = ()
    facts: dict[str, Any] = Field(default_factory=dict)


def problem(code: str, detail: str, **more: Any) -> Problem:
    """Make a Problem from the closed list of codes; raises KeyError for a code that is not on it."""
    kind, status, title, retryable, origin = CODES[code]
    fields: dict[str, Any] = {
        "type": f"urn:stoker:problem:{code}", "title": title, "status": status, "code": code, "kind": kind,
        "detail": detail, "retryable": retryable, "origin": origin,
    }  # fmt: skip
    return Problem(**(fields | more))


class ProblemError(Exception):
    """A Problem on its way to whoever asked."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.code}: {problem.detail}")
        self.problem = problem
