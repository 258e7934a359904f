"""What failures cost a job agrees with the published tables."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cli_reliability import reliability
from stoker.reliability import DAY_S, best_interval, forecast, goodput
from stoker.shell import Format
from stoker_proto import ProblemError


@pytest.mark.parametrize(
    ("rate", "gpus", "probability"),
    [
        (0.01, 8, 0.007), (0.01, 64, 0.051), (0.01, 256, 0.190), (0.01, 512, 0.34), (0.01, 1024, 0.569),
        (0.01, 4096, 0.97), (0.10, 8, 0.064), (0.10, 64, 0.41), (0.10, 256, 0.88), (0.17, 8, 0.106),
        (0.17, 64, 0.59), (0.17, 256, 0.97), (0.30, 8, 0.18), (0.30, 64, 0.79), (0.30, 256, 0.998),
    ],
)  # fmt: skip
def test_thirty_days_fail_as_often_as_the_table_says(rate: float, gpus: int, probability: float) -> None:
    told = forecast(gpus, 30, rate, save_s=60, restart_s=600)
    assert told.failure_probability == pytest.approx(probability, abs=0.006)


@pytest.mark.parametrize(
    ("hours", "save_s", "minutes"), [(7.9, 60, 30.8), (7.9, 9, 11.9), (28.8, 60, 58.8), (1.8, 30, 10.4)]
)
def test_the_best_interval_is_that_of_young_and_daly(hours: float, save_s: float, minutes: float) -> None:
    assert best_interval(save_s, hours * 3600) / 60 == pytest.approx(minutes, abs=0.06)


@pytest.mark.parametrize(
    ("nodes", "interval_s", "share"),
    [
        (32, 300, 0.969),
        (32, 3600, 0.992),
        (128, 300, 0.964),
        (128, 3600, 0.975),
        (2048, 300, 0.859),
        (2048, 3600, 0.629),
    ],
)
def test_goodput_is_that_of_meta_s_formula(nodes: int, interval_s: float, share: float) -> None:
    assert goodput(nodes * 6.5e-3 / DAY_S, interval_s, 9, 600) == pytest.approx(share, abs=0.001)


@given(st.integers(1, 100_000), st.floats(0.1, 365), st.floats(0, 5))
def test_shares_are_shares_and_more_gpus_never_fail_less(gpus: int, days: float, rate: float) -> None:
    one, two = (forecast(n, days, rate, save_s=60, restart_s=600) for n in (gpus, gpus * 2))
    assert 0 <= one.failure_probability <= two.failure_probability <= 1
    assert 0 <= two.expected_goodput <= one.expected_goodput <= 1


def test_the_command_says_which_rate_it_used(capsys: pytest.CaptureFixture[str]) -> None:
    reliability(gpus=256, days=30, output=Format.json)
    assumed = json.loads(capsys.readouterr().out)
    reliability(gpus=256, days=30, rate=0.17, output=Format.json)
    given_ = json.loads(capsys.readouterr().out)
    assert (assumed["rate_source"], assumed["rate_per_gpu_year"]) == ("assumed", 0.01)
    assert (given_["rate_source"], given_["rate_per_gpu_year"]) == ("given", 0.17)


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused_by_name(rate: float) -> None:
    with pytest.raises(ProblemError, match="--rate"):
        reliability(gpus=1, days=1, rate=rate)
