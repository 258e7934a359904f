"""What a queue may still take: limits, guarantees, lending and borrowing, at every level of the tree.

A queue is asked from itself upwards. Inside its nominal it may always take. Beyond it, it borrows: never more than its
limit, never what another queue keeps from lending, only for classes that may borrow, and only for jobs that may be
preempted, so that what was lent can be had back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stoker_proto import Cluster, PriorityClass, Queue
from stoker_proto import Quota as QuotaSpec

from .state import Job
from .usage import ALL, Usage

ROOT = ""
NO_CLASS = PriorityClass(name="-", value=0)


class Bound(NamedTuple):
    """A quota in thousandths of a GPU."""

    nominal: int | None
    limit: int | None
    lend: int | None

    @property
    def kept(self) -> int:
        """What of an unused nominal is not lent."""
        return 0 if self.nominal is None or self.lend is None else self.nominal - self.lend


class Refusal(NamedTuple):
    """Why a queue may not take more: the code of the reason, which queue says so, and its numbers."""

    code: str
    queue: str
    model: str
    used: int
    asked: int
    bound: int


def _milli(gpus: float | None) -> int | None:
    return None if gpus is None else round(gpus * 1000)


def _bound(quota: QuotaSpec) -> Bound:
    return Bound(_milli(quota.nominal), _milli(quota.limit), _milli(quota.lend))


@dataclass(frozen=True)
class Tree:
    """The configured queues, ready to be asked."""

    queues: dict[str, Queue]
    children: dict[str, tuple[str, ...]]
    bounds: dict[str, dict[str, Bound]]
    classes: dict[str, PriorityClass]
    kept: bool

    @classmethod
    def of(cls, cluster: Cluster) -> Tree:
        queues = {queue.name: queue for queue in cluster.queues}
        children: dict[str, tuple[str, ...]] = {}
        for queue in cluster.queues:
            above = queue.parent or ROOT
            children[above] = (*children.get(above, ()), queue.name)
        bounds = {
            name: {ALL: _bound(queue.gpus), **{model: _bound(quota) for model, quota in queue.models.items()}}
            for name, queue in queues.items()
        }
        kept = any(bound.kept for by_model in bounds.values() for bound in by_model.values())
        return cls(queues, children, bounds, {c.name: c for c in cluster.classes}, kept)

    def class_of(self, job: Job) -> PriorityClass:
        return self.classes.get(job.class_name, NO_CLASS)

    def parent(self, name: str) -> str:
        return self.queues[name].parent or ROOT


def refusal(
    tree: Tree, usage: Usage, capacity: Mapping[str, int], queue: str, priority: PriorityClass,
    asked: Iterable[tuple[str, int]],
) -> Refusal | None:  # fmt: skip
    """Why the queue may not take this much (by model, ALL among them) for a job of this class, or None."""
    for model, milli in asked:
        name = queue
        while name != ROOT:
            bound = tree.bounds[name].get(model)
            if bound is not None:
                told = _within(tree, usage, name, model, bound, milli, priority)
                if told is not None:
                    return told
            if tree.kept:
                told = _left_by_others(tree, usage, capacity, name, model, milli)
                if told is not None:
                    return told
            name = tree.parent(name)
    return None


def _within(
    tree: Tree, usage: Usage, name: str, model: str, bound: Bound, milli: int, priority: PriorityClass
) -> Refusal | None:
    used = usage.of(name, model)
    if bound.limit is not None and used + milli > bound.limit:
        return Refusal("queue_limit", name, model, used, milli, bound.limit)
    if bound.nominal is None:
        return None
    if not priority.may_borrow and used + milli > bound.nominal:
        return Refusal("class_may_not_borrow", name, model, used, milli, bound.nominal)
    firm = usage.firm_of(name, model)
    if not priority.preemptible and firm + milli > bound.nominal:
        return Refusal("not_preemptible_beyond_nominal", name, model, firm, milli, bound.nominal)
    return None


def _left_by_others(
    tree: Tree, usage: Usage, capacity: Mapping[str, int], name: str, model: str, milli: int
) -> Refusal | None:
    """What siblings keep from lending may not be taken by one that goes beyond its own nominal."""
    above = tree.parent(name)
    own = tree.bounds[name].get(model)
    used = usage.of(name, model)
    if own is not None and own.nominal is not None and used + milli <= own.nominal:
        return None
    if above == ROOT:
        total = capacity.get(model, 0)
        taken = sum(usage.of(q, model) for q in tree.children[ROOT])
    else:
        bound = tree.bounds[above].get(model)
        if bound is None or bound.nominal is None:
            return None
        total, taken = bound.nominal, usage.of(above, model)
        if taken + milli > total:
            return None  # the queue above borrows: its own level decides
    kept = 0
    for sibling in tree.children[above]:
        other = tree.bounds[sibling].get(model)
        if sibling != name and other is not None:
            kept += max(0, other.kept - usage.of(sibling, model))
    if kept and taken + milli > total - kept:
        return Refusal("kept_by_others", name, model, taken, milli, total - kept)
    return None


def borrowed(tree: Tree, usage: Usage, name: str) -> int:
    """How far the queue is above its nominal, over all models or for the model where it is most."""
    most = 0
    for model, bound in tree.bounds[name].items():
        if bound.nominal is not None:
            most = max(most, usage.of(name, model) - bound.nominal)
    return most


def own_held(tree: Tree, usage: Usage, name: str, model: str = ALL) -> int:
    """What jobs right in the queue hold, beside those of the queues below it."""
    return usage.of(name, model) - sum(usage.of(child, model) for child in tree.children.get(name, ()))


def own_nominal(tree: Tree, name: str, model: str = ALL) -> int | None:
    """What is guaranteed to jobs right in the queue: what its nominal leaves beside those of the queues below it."""
    bound = tree.bounds[name].get(model)
    if bound is None or bound.nominal is None:
        return None
    below = (tree.bounds[child].get(model) for child in tree.children.get(name, ()))
    return max(0, bound.nominal - sum(b.nominal or 0 for b in below if b is not None))


def own_borrowed(tree: Tree, usage: Usage, name: str) -> int:
    """How far jobs right in the queue are above what is guaranteed to them."""
    most = 0
    for model in tree.bounds[name]:
        nominal = own_nominal(tree, name, model)
        if nominal is not None:
            most = max(most, own_held(tree, usage, name, model) - nominal)
    return most


def share(
    tree: Tree, usage: Usage, capacity: Mapping[str, int], name: str, extra: Mapping[str, int], now_ms: int,
    half_life_ms: int,
) -> int:  # fmt: skip
    """The queue's weighted dominant share in millionths of the cluster: what it holds, would take, and has held."""
    most = 0
    for model, milli in usage.held.get(name, {}).items():
        if model != ALL:
            most = max(most, (milli + extra.get(model, 0)) * 1_000_000 // max(1, capacity.get(model, 0)))
    for model, milli in extra.items():
        most = max(most, (usage.of(name, model) + milli) * 1_000_000 // max(1, capacity.get(model, 0)))
    past = usage.past_of(name, now_ms, half_life_ms)
    spent = past * 1_000_000 // max(1, half_life_ms * capacity.get(ALL, 0))
    return (most + spent) // tree.queues[name].weight
