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


@pytest.mark.parametrize(("life", "fraction"), [("fsync", 0.04), ("interval", 0.006), ("sealed", 0.01)])
def test_what_a_cut_may_leave_holds_every_promise(folder, life, fraction):
    """A seeded part of all states."""
    num_states = check_states(record_life(folder, life), folder, seed=0, fraction=fraction)
    print(f"{num_states} of {num_states} states after a power cut, {life}, seed 0")
    assert num_states > 400


@pytest.mark.full
@pytest.mark.parametrize(("life", "seed"), [("fsync", 0), ("fsync", 1), ("interval", 0), ("sealed", 0)])
def test_all_that_a_cut_may_leave_holds_every_promise(folder, life, seed):
    num_states = check_states(record_life(folder, life), folder, seed=seed, fraction=1.0)
    print(f"{num_states} of {num_states} states after a power cut, {life}, seed {seed}")
