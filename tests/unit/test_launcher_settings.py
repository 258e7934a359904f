"""A node's labels are read from one variable, in either way of writing them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from stoker_launcher.ports import free_port
from stoker_launcher.settings import LauncherSettings


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("rack=r1,rail=2", {"rack": "r1", "rail": "2"}),
        (" zone/rack = r-1 ,\n", {"zone/rack": "r-1"}),
        ('{"rack": "r1", "rail": "2"}', {"rack": "r1", "rail": "2"}),
        ("", {}),
    ],
)
def test_labels_are_pairs_or_json(monkeypatch: pytest.MonkeyPatch, text: str, labels: dict[str, str]) -> None:
    monkeypatch.setenv("STOKER_LABELS", text)
    assert LauncherSettings().labels == labels


@pytest.mark.parametrize("text", ["rack", "rack=1,rail", "a b=c", '{"rack": {"deep": 1}}'])
def test_what_is_no_label_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("STOKER_LABELS", text)
    with pytest.raises(ValidationError, match="labels"):
        LauncherSettings()


def test_a_port_that_was_given_out_is_not_given_again_before_anybody_listens_on_it() -> None:
    first = free_port("127.0.0.1", "job-1-7")
    assert free_port("127.0.0.1", "job-1-7") == first
    assert free_port("127.0.0.1", "job-1-7", {first}) != first
