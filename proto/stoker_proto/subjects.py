"""Every stream, subject and bucket name, once."""

from __future__ import annotations

EVENTS = "EVENTS"
EVENTS_SUBJECTS = "stoker.event.>"
TELEMETRY = "TELEMETRY"
TELEMETRY_SUBJECTS = ("stoker.log.>", "stoker.metric.>", "stoker.device.>")
ASSIGNMENTS = "assignments"  # KV: key node, value the node's desired state
LEASES = "leases"  # KV: key service, value the holder
SNAPSHOTS = "snapshots"  # KV: key service, value where its newest snapshot lies
BLOBS = "blobs"  # object store: name is the SHA-256 of the content

DECISIONS = "stoker.event.scheduler.decisions"
CLUSTER = "stoker.event.cluster.configured"


def job_event(job_id: str, verb: str) -> str:
    return f"stoker.event.job.{job_id}.{verb}"


def job_events(job_id: str) -> str:
    return f"stoker.event.job.{job_id}.>"


def node_event(node: str, verb: str) -> str:
    return f"stoker.event.node.{node}.{verb}"


def service_event(service: str, verb: str) -> str:
    return f"stoker.event.service.{service}.{verb}"


def window_event(name: str, verb: str) -> str:
    return f"stoker.event.window.{name}.{verb}"


def log(job_id: str, attempt: int, node: str, rank: int) -> str:
    return f"stoker.log.{job_id}.{attempt}.{node}.{rank}"


def logs(job_id: str) -> str:
    return f"stoker.log.{job_id}.>"


def metric(job_id: str, attempt: int) -> str:
    return f"stoker.metric.{job_id}.{attempt}"


def metrics(job_id: str) -> str:
    return f"stoker.metric.{job_id}.>"


def device(node: str) -> str:
    return f"stoker.device.{node}"


def question(service: str, verb: str) -> str:
    return f"stoker.ask.{service}.{verb}"
