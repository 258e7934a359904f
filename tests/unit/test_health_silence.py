"""Silence is called only by an ear that hears, and only after a whole window."""

from __future__ import annotations

from stoker_health.leader import Ear
from stoker_health.verdict import Health, Node


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def heard(ear: Ear, clock: Clock, seconds: float, *nodes: str) -> None:
    """Time goes by with a beat a second from these nodes."""
    for _ in range(round(seconds)):
        clock.now += 1.0
        for node in nodes:
            ear.hear(node, "b1")


def cluster(*nodes: str) -> Health:
    return Health(nodes={n: Node(n, "b1") for n in nodes})


def test_a_node_is_silent_a_whole_window_after_its_last_beat() -> None:
    clock = Clock()
    ear, health = Ear(10.0, clock), cluster("n1", "n2")
    heard(ear, clock, 3, "n1", "n2")
    heard(ear, clock, 10, "n1")
    assert ear.silent(health) == set()
    heard(ear, clock, 1, "n1")
    assert ear.silent(health) == {"n2"}


def test_a_node_that_has_just_joined_has_a_whole_window_to_be_heard() -> None:
    clock = Clock()
    ear = Ear(10.0, clock)
    heard(ear, clock, 60, "n1")
    assert ear.silent(cluster("n1", "n2")) == set()
    heard(ear, clock, 11, "n1")
    assert ear.silent(cluster("n1", "n2")) == {"n2"}


def test_beats_of_an_earlier_boot_do_not_count() -> None:
    clock = Clock()
    ear, health = Ear(10.0, clock), Health(nodes={"n1": Node("n1", "b1"), "n2": Node("n2", "b2")})
    ear.silent(health)
    heard(ear, clock, 11, "n1", "n2")
    assert ear.silent(health) == {"n2"}


def test_an_ear_that_hears_nobody_calls_nobody_silent() -> None:
    clock = Clock()
    ear, health = Ear(10.0, clock), cluster("n1", "n2")
    heard(ear, clock, 5, "n1", "n2")
    clock.now += 60
    assert ear.silent(health) == set()


def test_after_an_outage_of_the_log_every_node_has_a_whole_window_again() -> None:
    clock = Clock()
    ear, health = Ear(10.0, clock), cluster("n1", "n2")
    heard(ear, clock, 5, "n1", "n2")
    clock.now += 60
    heard(ear, clock, 1, "n1")
    assert ear.silent(health) == set()
    heard(ear, clock, 9, "n1")
    assert ear.silent(health) == set()
    heard(ear, clock, 2, "n1")
    assert ear.silent(health) == {"n2"}
