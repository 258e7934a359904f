"""What the services of a simulated node are told about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_launcher.settings import LauncherSettings
from stoker_local.layout import Layout
from stoker_local.supervisor import Plan, node_env


def labels(plan: Plan, number: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in node_env(plan, Layout(plan.data), number).items():
        monkeypatch.setenv(name, value)
    return LauncherSettings().labels


def test_simulated_nodes_stand_in_racks_of_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(data=tmp_path, nodes=9)
    racks = [labels(plan, number, monkeypatch)["rack"] for number in range(1, 10)]
    assert racks == ["rack-0"] * 4 + ["rack-1"] * 4 + ["rack-2"]


def test_a_real_node_has_the_labels_that_its_host_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_LABELS", raising=False)
    assert labels(Plan(data=tmp_path, nodes=1, gpus_per_node=None), 1, monkeypatch) == {}
