"""Distances of layer profiles and spikes of a trace, on values made by hand."""

from __future__ import annotations

import math

import pytest

from byov.studies.measurements.layer_profiles import largest_rise, log_distance, log_ratios


def test_a_layer_twice_as_large_and_one_half_as_large_are_both_a_factor_of_two_away() -> None:
    a, b = {"one": 2.0, "two": 0.5, "three": 3.0}, {"one": 1.0, "two": 1.0, "three": 3.0}
    assert log_ratios(a, b) == pytest.approx({"one": math.log(2), "two": -math.log(2), "three": 0.0})
    assert log_distance(a, b) == pytest.approx(2 / 3 * math.log(2))
    assert log_distance(a, b) == log_distance(b, a)
    assert log_distance({k: 10 * v for k, v in a.items()}, a) == pytest.approx(math.log(10))


def test_only_layers_that_both_have_are_compared() -> None:
    assert log_ratios({"one": 1.0, "two": 2.0}, {"two": 1.0, "three": 5.0}) == pytest.approx({"two": math.log(2)})
    with pytest.raises(ValueError, match="no layer in common"):
        log_distance({"one": 1.0}, {"two": 1.0})
    with pytest.raises(ValueError, match="positive"):
        log_distance({"one": 0.0}, {"one": 1.0})


def test_a_spike_is_found_on_a_slow_trend_and_at_any_scale() -> None:
    trend = [100 * 0.99**i for i in range(100)]
    assert largest_rise(trend) == pytest.approx(5.5 * math.log(0.99), rel=1e-2)  # each lies below the ten before it
    spiky = [value * (8 if i == 60 else 1) for i, value in enumerate(trend)]
    assert largest_rise(spiky) == pytest.approx(math.log(8) + 5.5 * math.log(0.99), rel=1e-2)
    assert largest_rise([1000 * value for value in spiky]) == pytest.approx(largest_rise(spiky))


def test_the_start_of_a_trace_is_no_spike_and_a_short_one_has_none() -> None:
    assert largest_rise([50.0, 20.0, *[1.0] * 20]) == 0.0
    assert largest_rise([1.0] * 10) is None
    assert largest_rise([1.0] * 20 + [0.0]) is None
