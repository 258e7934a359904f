"""What failures cost a job of many GPUs: how likely, how many, how often to save, and what share of time is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY_S = 86_400.0
YEAR_S = 365 * DAY_S
# Databricks 2026-07 plans with 1 % a GPU-year; Llama 3 (arXiv 2407.21783) saw 17 %, Meta's RSC-1 (2410.21680) 30 %.
ASSUMED_RATE = 0.01


@dataclass(frozen=True)
class Reliability:
    """The forecast for one job; times are None where nothing ever fails."""

    failure_probability: float
    expected_interruptions: float
    mean_time_to_failure_s: float | None
    checkpoint_interval_s: float | None
    expected_goodput: float


def forecast(gpus: int, days: float, rate: float, *, save_s: float, restart_s: float) -> Reliability:
    """Failures come independently at `rate` a GPU-year; goodput is that of saving at the best interval."""
    expected = gpus * days * DAY_S * rate / YEAR_S
    per_s = gpus * rate / YEAR_S
    if per_s == 0:
        return Reliability(0.0, 0.0, None, None, 1.0)
    interval = best_interval(save_s, 1 / per_s)
    return Reliability(
        failure_probability=-math.expm1(-expected),
        expected_interruptions=expected,
        mean_time_to_failure_s=1 / per_s,
        checkpoint_interval_s=interval,
        expected_goodput=goodput(per_s, interval, save_s, restart_s),
    )


def best_interval(save_s: float, mean_time_to_failure_s: float) -> float:
    """Young and Daly: what saving costs and what a failure loses are in balance."""
    return math.sqrt(2 * save_s * mean_time_to_failure_s)


def goodput(failures_per_s: float, interval_s: float, save_s: float, restart_s: float) -> float:
    """The share of time that trains (Meta, arXiv 2410.21680): a failure costs a restart and half an interval."""
    kept = 1 - failures_per_s * (restart_s + interval_s / 2)
    return max(0.0, kept / (1 + save_s / interval_s))
