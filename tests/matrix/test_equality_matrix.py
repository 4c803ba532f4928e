"""Equality over the whole matrix on two-layer models: the same tokens, wherever the prefix came from, whoever drafted, in whatever company, in which chunks.

Half of the requests draw. With the native kernels all cells run here; with torch's those of a Latin square, in which each value meets each value of every other axis, and the others with the full tests.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch

from matrix_world import CHUNKS, COMPANIES, MODES, SOURCES, Pair, Tally, all_cells, covering_cells, make_jobs  # noqa: E402
from tiny_models import make_model, perturb  # noqa: E402

from kvd.executor.kernels.cpu import native  # noqa: E402

NUM_BLOCKS = 120
FEW_BLOCKS = 23
NUM_TOKENS = 40
HAS_NATIVE = pytest.mark.skipif(native.status().isa is None, reason="the native kernels are not there")


@pytest.fixture(scope="module")
def tallies(tmp_path_factory):
    made = {}

    def tally(kernels):
        if kernels not in made:
            root = tmp_path_factory.mktemp(kernels)
            target = make_model(root / "target")
            pair = Pair(target, perturb(target, root / "draft", 0.1), root, num_blocks=NUM_BLOCKS, kernels=kernels)
            jobs = make_jobs(pair.vocab_size, 8, num_tokens=NUM_TOKENS)
            made[kernels] = Tally(f"two layers, {kernels}", pair, jobs, num_blocks=NUM_BLOCKS, few_blocks=FEW_BLOCKS)
        return made[kernels]

    yield tally
    for each in made.values():
        each.close()


def cells():
    yield from (pytest.param("native", *cell, marks=HAS_NATIVE) for cell in all_cells())
    covering = set(covering_cells())
    yield from (pytest.param("torch", *cell, marks=() if cell in covering else pytest.mark.full) for cell in all_cells())


@pytest.mark.parametrize(("kernels", "source", "mode", "company", "chunks"), list(cells()))
def test_cell(tallies, kernels, source, mode, company, chunks):
    result, differing = tallies(kernels).run(source, mode, company, chunks)
    assert differing == []
    assert (result.accepted > 0) == (mode != "plain")
    assert (result.preemptions > 0) == (company == "preempted")
    assert result.cached_tokens > 0 or source == "cold"
    assert (result.restored_tokens > 0) == (source in ("restored", "disk"))
    assert (result.most_rows > 1) == (company != "alone")


def test_the_covering_cells_meet_every_pair_of_values():
    axes = (SOURCES, MODES, COMPANIES, CHUNKS)
    covering = covering_cells()
    assert len(all_cells()) == 72
    assert len(covering) == 12
    for first, ones in enumerate(axes):
        for second in range(first + 1, len(axes)):
            pairs = {(cell[first], cell[second]) for cell in covering}
            assert pairs == {(one, other) for one in ones for other in axes[second]}
