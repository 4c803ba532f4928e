"""A power cut at any moment: every state that it may leave on disk is started from, and held to what had been promised by then."""

from __future__ import annotations

import shutil

import pytest
from power_harness import check_states, record_life, scratch

pytestmark = pytest.mark.store


@pytest.fixture
def folder(tmp_path):
    place = scratch(tmp_path)
    yield place
    shutil.rmtree(place)


@pytest.mark.parametrize(("durability", "fraction"), [("fsync", 0.06), ("interval", 0.015)])
def test_what_a_cut_may_leave_holds_every_promise(folder, durability, fraction):
    """A seeded part of all states."""
    num_states = check_states(record_life(folder, durability), folder, seed=0, fraction=fraction)
    print(f"{num_states} of {num_states} states after a power cut, seed 0")
    assert num_states > 500


@pytest.mark.full
@pytest.mark.parametrize("durability", ["fsync", "interval"])
@pytest.mark.parametrize("seed", range(3))
def test_all_that_a_cut_may_leave_holds_every_promise(folder, durability, seed):
    num_states = check_states(record_life(folder, durability), folder, seed=seed, fraction=1.0)
    print(f"{num_states} of {num_states} states after a power cut, seed {seed}")
