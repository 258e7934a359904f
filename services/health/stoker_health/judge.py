"""What the health leader says of nodes: the verdict that follows from what is known of each. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from stoker_proto import (
    Event,
    FindingRecorded,
    NodeDegraded,
    NodeQuarantined,
    NodeReady,
    NodeReleased,
    NodeUnknown,
)

from .verdict import Health, Node

HARD = ("degraded", "fatal")


@dataclass(frozen=True, slots=True)
class Ruling:
    """An event to append. A verdict is guarded by the last verdict of its node; `id` makes the rest land once."""

    event: Event
    id: str | None = None
    verdict_seq: int | None = None


def rule_nodes(health: Health, silent: Set[str]) -> list[Ruling]:
    """Verdicts that follow from what is known of each node."""
    return [ruling for node in health.nodes.values() if (ruling := _rule(node, node.name in silent))]


def _rule(node: Node, silent: bool) -> Ruling | None:
    bad = [f for seq, f in node.findings if seq > node.released_seq]
    fatal = [f for f in bad if f.result.severity == "fatal"]
    degraded = [f for f in bad if f.result.severity == "degraded"]
    tested_seq, tested = node.tested or (0, None)
    if node.verdict != "quarantined":
        if fatal:
            return _said(NodeQuarantined, node, f"finding:{fatal[0].result.check}", _why(fatal), _ids(fatal))
        results = tested.results if tested is not None and not tested.passed else ()
        failed = [r for r in results if r.status == "bad" and r.severity in HARD]
        if failed and tested_seq > node.released_seq:
            why = "; ".join(f"{r.check}: {r.detail or r.status}" for r in failed) or "the self-test failed"
            return _said(NodeQuarantined, node, "self-test", why, ())
    if node.verdict == "unknown":
        return None if silent else _heard_again(node, degraded)
    if silent and node.verdict != "quarantined":
        return _said(NodeUnknown, node, "silence", "no heartbeat", ())
    if degraded and node.verdict in ("validating", "ready", "suspect"):
        return _said(NodeDegraded, node, f"finding:{degraded[0].result.check}", _why(degraded), _ids(degraded))
    if tested is None or not tested.passed:
        return None
    if node.verdict == "validating" and tested_seq > node.fault_seq:
        return _said(NodeReady, node, "self-test", "the self-test passed", ())
    answered = tested.cause == "retest" and tested.began_seq >= node.retest_seq > node.fault_seq
    if node.verdict in ("quarantined", "degraded", "suspect") and answered:
        return _said(NodeReleased, node, "re-test", "a re-test begun after the last fault passed", ())
    return None


def _heard_again(node: Node, degraded: list[FindingRecorded]) -> Ruling | None:
    if degraded:
        return _said(NodeDegraded, node, f"finding:{degraded[0].result.check}", _why(degraded), _ids(degraded))
    if node.before_unknown == "ready":
        return _said(NodeReady, node, "heard-again", "heartbeats are back and nothing was found", ())
    if node.before_unknown in ("degraded", "suspect"):
        return _said(NodeDegraded, node, "heard-again", f"heartbeats are back; it was {node.before_unknown}", ())
    tested = node.tested[1] if node.tested else None
    if tested is not None and tested.passed:
        return _said(NodeReady, node, "self-test", "the self-test passed", ())
    return None


def _said(
    kind: type[NodeReady] | type[NodeReleased] | type[NodeQuarantined] | type[NodeDegraded] | type[NodeUnknown],
    node: Node,
    rule: str,
    reason: str,
    evidence: tuple[str, ...],
) -> Ruling:
    event = kind(node=node.name, boot_epoch=node.epoch, rule=rule, reason=reason, evidence=evidence)
    return Ruling(event, verdict_seq=node.verdict_seq)


def _why(findings: list[FindingRecorded]) -> str:
    return "; ".join(dict.fromkeys(f.result.detail or f.result.check for f in findings))


def _ids(findings: list[FindingRecorded]) -> tuple[str, ...]:
    return tuple(f.finding_id for f in findings)
