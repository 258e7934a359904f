"""A spec is accepted whole, or refused with every mistake at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_gateway.validate import read_spec, read_yaml
from stoker_proto import FieldError, ProblemError

GOOD: dict[str, Any] = {
    "experiment_name": "doc-parse-lr",
    "compute": {"accelerator_type": "GPU_8xH100", "num_accelerators": 16},
    "command": "python train.py",
}


def mistakes(raw: object) -> dict[str, FieldError]:
    with pytest.raises(ProblemError) as caught:
        read_yaml(raw) if isinstance(raw, str) else read_spec(raw)
    problem = caught.value.problem
    assert problem.code == "invalid_spec"
    assert problem.status == 422
    return {e.pointer: e for e in problem.errors}


def test_a_good_spec_comes_back_with_its_defaults() -> None:
    spec = read_spec(GOOD)
    assert spec.compute.nodes == 2
    assert spec.limits.max_retries == 3
    assert spec.environment.version == "host"


def test_every_mistake_is_told_at_once_with_what_was_meant_and_where() -> None:
    text = """\
experiment_name: "has spaces"
compute:
  acelerator_type: GPU_8xH100
  num_accelerators: many
  priority_class: CRITCAL
comand: python train.py
metric: {name: loss, direction: minimise}
limits:
  max_retries: -1
"""
    found = mistakes(text)
    assert {p: (e.code, e.line) for p, e in found.items()} == {
        "/experiment_name": ("invalid", 1),
        "/compute/accelerator_type": ("missing", 2),
        "/compute/acelerator_type": ("unknown_field", 3),
        "/compute/num_accelerators": ("wrong_type", 4),
        "/compute/priority_class": ("not_allowed", 5),
        "/comand": ("unknown_field", 6),
        "/command": ("missing", 1),
        "/metric/direction": ("not_allowed", 7),
        "/limits/max_retries": ("invalid", 9),
    }
    assert found["/compute/acelerator_type"].suggestion == "accelerator_type"
    assert found["/comand"].suggestion == "command"
    assert "entrypoint" in found["/comand"].allowed
    assert found["/compute/priority_class"].suggestion == "CRITICAL"
    assert found["/compute/priority_class"].allowed == ("BEST_EFFORT", "NORMAL", "CRITICAL")
    assert found["/metric/direction"].suggestion == "minimize"
    assert "a text" in found["/compute/num_accelerators"].message


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("max_retries", "/limits/max_retries"),
        ("timeout_minutes", "/limits/timeout_minutes"),
        ("priority_class", "/compute/priority_class"),
    ],
)
def test_a_field_that_stands_elsewhere_is_pointed_at(name: str, suggestion: str) -> None:
    assert mistakes(GOOD | {name: 1})[f"/{name}"].suggestion == suggestion


def test_a_field_with_no_near_match_lists_what_there_is() -> None:
    found = mistakes(GOOD | {"zzz": 1})["/zzz"]
    assert found.suggestion is None
    assert "compute" in found.allowed


def test_one_way_to_run() -> None:
    assert mistakes(GOOD | {"entrypoint": "train.py"})["/entrypoint"].code == "invalid"
    assert "args belong to entrypoint" in mistakes(GOOD | {"args": ["--lr", "1"]})["/args"].message
    neither = {k: v for k, v in GOOD.items() if k != "command"}
    assert mistakes(neither)["/command"].code == "missing"


def test_a_gang_is_whole_nodes_and_the_neighbours_are_named() -> None:
    found = mistakes(GOOD | {"compute": {"accelerator_type": "GPU_8xH100", "num_accelerators": 12}})
    assert found["/compute/num_accelerators"].allowed == ("8", "16")
    # Beside other mistakes in the same mapping.
    compute = {"accelerator_type": "GPU_8xH100", "num_accelerators": 12, "priority_class": "HIGH"}
    assert set(mistakes(GOOD | {"compute": compute})) == {"/compute/num_accelerators", "/compute/priority_class"}


@pytest.mark.parametrize("total", ["3", 3.0])
def test_a_rule_that_only_shows_after_conversion_is_still_told(total: object) -> None:
    found = mistakes(GOOD | {"compute": {"accelerator_type": "GPU_2xSIM", "num_accelerators": total}})
    assert "not a multiple of 2" in next(iter(found.values())).message


@pytest.mark.parametrize("per_node", ["0", "²", "9" * 5000])
def test_an_impossible_node_type_is_a_mistake_and_not_a_fault(per_node: str) -> None:
    assert mistakes(GOOD | {"compute": {"accelerator_type": f"GPU_{per_node}xH100", "num_accelerators": 8}})


def test_env_variables_are_texts_with_names_that_a_shell_takes() -> None:
    found = mistakes(GOOD | {"env_variables": {"NCCL-DEBUG": "WARN", "int": 5, "OK": "x"}})
    assert set(found) == {"/env_variables/NCCL-DEBUG", "/env_variables/int"}
    assert found["/env_variables/int"].code == "wrong_type"
    assert "this is a number" in found["/env_variables/int"].message


@pytest.mark.parametrize("raw", [None, [], "text", 3])
def test_what_is_no_mapping_is_no_spec(raw: object) -> None:
    with pytest.raises(ProblemError, match="mapping"):
        read_spec(raw)


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: [1, 2", 1), ("a: 1\n b: 2\n", 2), ("a: 1\nb: {c: }}\n", 2), ("a: 2020-99-99", None), ("[" * 5000, None)],
)
def test_what_is_no_yaml_is_told_with_its_line(text: str, line: int | None) -> None:
    found = mistakes(text)[""]
    assert found.message.startswith("not YAML")
    assert found.line == line


def test_a_key_that_stands_twice_is_not_silently_dropped() -> None:
    text = "experiment_name: a\ncommand: a\ncompute: {accelerator_type: GPU_2xSIM, num_accelerators: 2}\ncommand: b\n"
    found = mistakes(text)["/command"]
    assert (found.line, "after line 2" in found.message) == (4, True)


def test_values_that_json_cannot_say_are_named() -> None:
    text = """\
experiment_name: e
command: c
compute: {accelerator_type: GPU_2xSIM, num_accelerators: 2}
parameters:
  day: 2026-01-01
  rate: .nan
  1: one
  all: !!set {a, b}
"""
    found = mistakes(text)
    assert set(found) == {"/parameters", "/parameters/day", "/parameters/rate", "/parameters/all"}
    assert found["/parameters/day"].line == 5


def test_anchors_may_be_used_but_not_to_grow_without_end() -> None:
    good = "experiment_name: e\ncommand: c\ncompute: {accelerator_type: GPU_2xSIM, num_accelerators: 2}\nparameters:\n"
    assert read_yaml(good + "  a: &x {lr: 1}\n  b: *x\n").parameters == {"a": {"lr": 1}, "b": {"lr": 1}}
    bomb = "".join(f"  l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 10)}]\n" for n in range(9))
    assert "values at most" in mistakes(good + "  l0: &l0 lol\n" + bomb)[""].message
    assert "levels deep" in mistakes(good + "  a: &a [*a]\n")[""].message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["apiVersion", "experiment_name", "compute", "environment", "code_source", "command", "entrypoint", "args",
     "parameters", "env_variables", "metric", "outputs", "limits", "labels", "idempotency_token", "accelerator_type",
     "num_accelerators", "comand"]
)  # fmt: skip


@given(st.dictionaries(FIELDS | st.text(max_size=5), JSON | st.dictionaries(FIELDS, JSON, max_size=4), max_size=6))
def test_whatever_is_sent_is_a_spec_or_named_mistakes(raw: dict[str, Any]) -> None:
    for body in (raw, GOOD | raw):
        try:
            spec = read_spec(body)
        except ProblemError as error:
            assert error.problem.errors
            assert error.problem.model_dump_json()
        else:
            assert read_spec(spec.model_dump(mode="json")) == spec
