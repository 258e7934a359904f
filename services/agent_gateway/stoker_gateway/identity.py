"""Hashes that say what is the same: a spec, a request, and the job that a key stands for. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from stoker_proto import JobSpec

DIGEST = re.compile(r"[0-9a-f]{64}")  # of a blob
JOB_ID = re.compile(r"[a-z0-9-]{1,64}")  # safe as one token of a subject
NOT_WHAT_RUNS = {"experiment_name", "mlflow_run_name", "labels", "idempotency_token"}


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def spec_hash(spec: JobSpec, code: str | None) -> str:
    """What will run: the spec and its code, without names, labels and keys."""
    body = spec.model_dump(mode="json")
    return digest({"spec": {k: v for k, v in body.items() if k not in NOT_WHAT_RUNS}, "code": code})


def fingerprint(spec: JobSpec, code: str | None) -> str:
    """The whole request, to tell a replay from another use of the same key."""
    return digest({"spec": spec.model_dump(mode="json"), "code": code})


def keyed_job_id(principal: str, key: str) -> str:
    """The job id that a principal's key stands for: the same in every gateway, so the log itself keeps it single."""
    return "job-" + _keyed(principal, key)


def keyed_array_id(principal: str, key: str) -> str:
    """The same for an array."""
    return "array-" + _keyed(principal, key)


def element_id(array_id: str, index: int) -> str:
    """The id of one job of an array."""
    return f"{array_id}-{index}"


def _keyed(principal: str, key: str) -> str:
    return hashlib.sha256(f"{principal}\n{key}".encode()).hexdigest()[:16]
