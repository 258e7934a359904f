"""--override: single fields of a spec file, changed from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.overrides import override
from stoker_proto import ProblemError


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text("experiment_name: e\nparameters: {lr: 0.1}\nlimits:\n")
    return path


def test_values_are_yaml_and_paths_lead_into_mappings(spec: Path) -> None:
    changes = ["parameters.lr=0.5", "parameters.names=[a, b]", "limits.max_retries=0", "labels.who=me=you"]
    assert override(spec, changes) == {
        "experiment_name": "e",
        "parameters": {"lr": 0.5, "names": ["a", "b"]},
        "limits": {"max_retries": 0},
        "labels": {"who": "me=you"},
    }


def test_a_later_change_wins(spec: Path) -> None:
    assert override(spec, ["experiment_name=a", "experiment_name=b"])["experiment_name"] == "b"


@pytest.mark.parametrize("change", ["parameters.lr", "=1", "parameters..lr=1", ".lr=1"])
def test_a_change_of_another_form_is_a_problem(spec: Path, change: str) -> None:
    with pytest.raises(ProblemError, match=r"field\.path=value"):
        override(spec, [change])


def test_a_path_through_a_value_is_a_problem(spec: Path) -> None:
    with pytest.raises(ProblemError, match="experiment_name is no mapping"):
        override(spec, ["experiment_name.x=1"])


def test_a_value_or_file_that_is_not_yaml_is_a_problem_with_its_line(spec: Path) -> None:
    with pytest.raises(ProblemError, match="not YAML"):
        override(spec, ["parameters.lr=[1"])
    spec.write_text("a: 1\nb: [\n")
    with pytest.raises(ProblemError, match="not YAML") as told:
        override(spec, [])
    assert told.value.problem.errors[0].line == 3
    spec.write_text("- a\n")
    with pytest.raises(ProblemError, match="mapping"):
        override(spec, [])
