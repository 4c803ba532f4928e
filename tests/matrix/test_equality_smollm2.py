"""The equality matrix on SmolLM2 in float32, drafting for itself: two cells of the diagonal for every change, every cell with the full tests."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.model]

from matrix_world import GREEDY, Job, Pair, Tally, all_cells  # noqa: E402

from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.text.model import load_text_model  # noqa: E402
from kvd.types import SamplingParams  # noqa: E402

if native.status().isa is None:
    pytest.skip(native.status().reason, allow_module_level=True)

NUM_BLOCKS = 60
FEW_BLOCKS = 12
TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "One two three four five. One two three four five. One two three",
    "Write a short story about a lighthouse keeper who",
    "A list of colours: red, green, blue, red, green, blue, red,",
    "The tour begins at ten in the great hall. The tour ends at noon in the great",
    "Question: What is the colour of the sky? Answer: blue. Question: What is the colour of grass? Answer:",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name":',
)
SHARED = "You are a helpful assistant. Answer briefly and in plain words, and repeat nothing that was said before. "


@pytest.fixture(scope="module")
def tally(smollm2, tmp_path_factory):
    text = load_text_model(str(smollm2))
    jobs = []
    for number, each in enumerate(TEXTS):
        sampling = SamplingParams(temperature=0.7, top_p=0.9 if number % 4 == 3 else 1.0, seed=number) if number % 2 else GREEDY
        jobs.append(Job(tuple(text.encode(SHARED + each)), 28, sampling))
    pair = Pair(smollm2, smollm2, tmp_path_factory.mktemp("smollm2"), num_blocks=NUM_BLOCKS, kernels="native", threads=2)
    made = Tally("SmolLM2", pair, jobs, num_blocks=NUM_BLOCKS, few_blocks=FEW_BLOCKS)
    yield made
    made.close()


DIAGONAL = [("restored", "draft", "batch", "chunked"), ("hit", "ngram", "preempted", "chunked")]


@pytest.mark.parametrize(
    ("source", "mode", "company", "chunks"),
    [pytest.param(*cell, marks=() if cell in DIAGONAL else pytest.mark.full) for cell in all_cells()],
)
def test_cell(tally, source, mode, company, chunks):
    result, differing = tally.run(source, mode, company, chunks)
    assert differing == []
    if mode == "draft":
        assert result.drafted == result.accepted > 0
    assert (result.preemptions > 0) == (
        company == "preempted"
    ) or mode == "draft"  # rows whose drafts are all accepted are over before they crowd
    assert (result.restored_tokens > 0) == (source in ("restored", "disk"))
