"""Settings come from the environment of the process that starts, and not from import time."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_chassis.settings import NodeSettings, Settings


def test_fields_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_NATS_URL", "nats://elsewhere:1")
    monkeypatch.setenv("STOKER_INSTANCE", "scheduler-1")
    monkeypatch.setenv("STOKER_READY_FILE", "/somewhere/ready")
    monkeypatch.setenv("STOKER_NOT_OURS", "ignored")
    settings = Settings()
    assert settings.nats_url == "nats://elsewhere:1"
    assert settings.instance == "scheduler-1"
    assert settings.ready_file == Path("/somewhere/ready")
    assert settings.otlp_endpoint is None


def test_an_instance_without_a_name_gets_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_INSTANCE", raising=False)
    assert Settings().instance


def test_launcher_and_health_agent_of_a_node_share_its_folder(tmp_path: Path) -> None:
    settings = NodeSettings(data_dir=tmp_path, node="n1", boot_epoch="b1")
    assert settings.node_dir == tmp_path.resolve() / "nodes" / "n1"
    assert settings.warm_socket.parent == settings.node_dir
