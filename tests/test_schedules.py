import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from byov import schedules

PROGRESS = st.floats(0, 1)


@pytest.mark.parametrize(("progress", "expected"), [(0, 0.99), (0.5, 0.995), (1, 1.0), (1 / 3, 1 - 0.01 * 0.75)])
def test_tau_by_hand(progress: float, expected: float) -> None:
    assert schedules.tau(progress, 0.99) == pytest.approx(expected)


@given(PROGRESS, st.floats(0, 1))
def test_tau_is_the_papers_formula(progress: float, start: float) -> None:
    assert schedules.tau(progress, start) == pytest.approx(1 - (1 - start) * (math.cos(math.pi * progress) + 1) / 2)


@given(PROGRESS, PROGRESS)
def test_beta_rises_from_start_to_end(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0 <= schedules.beta(low) <= schedules.beta(high) <= 1
    assert schedules.beta(a, 0.3, 0.3) == pytest.approx(0.3)


def test_beta_ends() -> None:
    assert schedules.beta(0.0) == 0 and schedules.beta(1.0) == 1 and schedules.beta(0.5, 0, 0.3) == pytest.approx(0.15)


def test_learning_rate_by_hand() -> None:
    assert schedules.learning_rate(0, 2.0, 0.1) == 0
    assert schedules.learning_rate(0.05, 2.0, 0.1) == pytest.approx(1.0)
    assert schedules.learning_rate(0.1, 2.0, 0.1) == pytest.approx(2.0)
    assert schedules.learning_rate(0.55, 2.0, 0.1) == pytest.approx(1.0)
    assert schedules.learning_rate(1.0, 2.0, 0.1) == pytest.approx(0.0, abs=1e-12)
    assert schedules.learning_rate(0.0, 2.0, 0.0) == 2.0


@given(PROGRESS, st.floats(0, 0.9))
def test_learning_rate_stays_within_its_peak(progress: float, warmup: float) -> None:
    assert -1e-12 <= schedules.learning_rate(progress, 1.5, warmup) <= 1.5 + 1e-12


@pytest.mark.parametrize("steps", [100, 1560, 10_000])
def test_a_log_variance_travels_4_in_a_run_of_any_length(steps: int) -> None:
    peak = schedules.log_variance_rate(steps)
    travelled = sum(schedules.learning_rate(k / steps, peak, 0.1) for k in range(steps))
    assert travelled == pytest.approx(
        4, rel=0.01
    )  # the area under a triangle and a half cosine, in sums of 100 and more
    assert schedules.log_variance_rate(steps, softplus=True) == pytest.approx(peak / 2)
