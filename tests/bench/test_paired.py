"""The arithmetic behind the paired benchmarks' tables."""

from __future__ import annotations

import math

import pytest
from paired import ratio_of, write_section


def test_the_interval_is_students_over_the_logarithms():
    ratio = ratio_of([math.exp(each) for each in (0.1, -0.1, 0.3)])
    half = 4.303 * 0.2 / math.sqrt(3)
    assert ratio.mean == pytest.approx(math.exp(0.1))
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(0.1 - half), math.exp(0.1 + half)))
    assert ratio.num_pairs == 3


def test_a_ratio_and_its_inverse_cancel_out_and_one_pair_says_nothing():
    assert ratio_of([0.5, 2.0]).mean == pytest.approx(1.0)
    assert (ratio_of([0.9]).low, ratio_of([0.9]).high) == (0.0, math.inf)


def test_fifteen_pairs_of_two_percent_noise_can_tell_two_percent():
    ratio = ratio_of([1 + 0.02 * (-1) ** number for number in range(15)])
    assert ratio.high - ratio.low < 0.025
    assert ratio.low < 1 < ratio.high


def test_a_section_is_replaced_and_the_others_stay(tmp_path):
    path = tmp_path / "benchmarks.md"
    write_section(path, "one", "first")
    write_section(path, "two", "second")
    write_section(path, "one", "anew")
    text = path.read_text()
    assert text.startswith("# Benchmarks of persistence")
    assert "first" not in text
    assert text.index("anew") < text.index("second")
    write_section(path, "two", "second")
    assert path.read_text() == text
