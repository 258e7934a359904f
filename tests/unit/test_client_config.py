"""Where the client looks for its server, and what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.config import Server, find_server
from stoker_proto import ProblemError


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STOKER_URL", "STOKER_TOKEN", "STOKER_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def card(folder: Path) -> None:
    folder.mkdir()
    (folder / "stoker.json").write_text(json.dumps({"url": "http://here", "token": "t", "nats_url": "nats://here"}))


def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card(tmp_path / "stoker-data")
    monkeypatch.setenv("STOKER_URL", "http://there")
    monkeypatch.setenv("STOKER_TOKEN", "u")
    assert find_server() == Server("http://there", "u")


def test_else_the_local_system_in_this_folder_is_found(tmp_path: Path) -> None:
    card(tmp_path / "stoker-data")
    assert find_server() == Server("http://here", "t")


def test_or_the_one_in_the_named_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card(tmp_path / "elsewhere")
    monkeypatch.setenv("STOKER_DATA_DIR", str(tmp_path / "elsewhere"))
    assert find_server() == Server("http://here", "t")


def test_with_neither_the_problem_says_how_to_get_one() -> None:
    with pytest.raises(ProblemError, match="STOKER_URL is not set") as told:
        find_server()
    assert told.value.problem.retryable
    assert "stoker up" in told.value.problem.next_actions[0]


def test_the_exports_are_what_all_says_and_nothing_else() -> None:
    assert dir(stoker) == sorted(stoker.__all__)
    for name in stoker.__all__:
        assert getattr(stoker, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = stoker.nothing_such


def test_a_training_script_imports_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import stoker.training;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "['stoker']"


def test_the_command_line_imports_nothing_of_the_services() -> None:
    heavy = ("torch", "nats", "faststream", "fastapi", "mlflow", "stoker_chassis", "stoker_gateway", "stoker_local")
    code = f"import sys; import stoker.cli; print([m for m in {heavy} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
