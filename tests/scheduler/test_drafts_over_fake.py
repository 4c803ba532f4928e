"""Whatever a daemon drafts, and however its steps' times make it adapt, it says what it says without; by rejection, what the model's distribution says."""

from __future__ import annotations

import random
from collections import Counter

from beam_world import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.config import SpeculativeConfig
from kvd.types import SamplingParams, Speculation

PROMPT = list(b"the rain in spain, the rain in spain, the ")
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, num_logprobs=2, banned_token_ids=(101, 116)),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, seed=9, num_logprobs=1, logit_bias=((101, 2.0),), bad_words=((101, 101),)),
]
requests = st.lists(
    st.fixed_dictionaries(
        {
            "sampling": st.sampled_from(SAMPLINGS),
            "max_tokens": st.integers(1, 30),
            "num_choices": st.sampled_from([1, 1, 2]),
            "min_tokens": st.sampled_from([0, 4]),
            "stop_token_ids": st.sampled_from([(), (97, 105)]),
            "cut": st.integers(0, 20),
        }
    ),
    min_size=1,
    max_size=4,
)


def said(world, wishes, seconds):
    """What each request says, with each step taking so long as ``seconds`` says."""
    ids = []
    for wish in wishes:
        options = dict(wish)
        ids.append(world.submit(PROMPT[options.pop("cut") :], **options))
    take, note = world.scheduler.update, world.scheduler.note_step_time

    def update(step, output):
        note(step, seconds())
        return take(step, output)

    world.scheduler.update = update
    world.finish()
    return [(world.told[each], {choice: end.reason for choice, end in world.ends[each].items()}) for each in ids]


@given(
    wishes=requests,
    seed=st.integers(0, 1 << 20),
    mode=st.sampled_from(["auto", "ngram", "draft"]),
    shape=st.sampled_from([(200, 4, 64), (26, 4, 9), (200, 16, 30)]),
    max_in_flight=st.integers(1, 2),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_adapting_changes_no_token(wishes, seed, mode, shape, max_in_flight):
    num_blocks, block_size, budget = shape
    limits = {"block_size": block_size, "max_model_len": 80, "max_tokens_per_step": budget}
    plain = said(World(num_blocks=200, **limits), wishes, lambda: 1.0)
    draw = random.Random(seed)
    config = SpeculativeConfig(speculation=mode, num_draft=draw.randint(1, 8), ngram_min=draw.randint(1, 3))
    world = World(num_blocks=num_blocks, **limits, max_in_flight=max_in_flight, speculative=config, has_draft_model=mode != "ngram")
    assert said(world, wishes, lambda: draw.choice([0.1, 1.0, 5.0])) == plain


def test_a_good_draft_model_halves_the_steps():
    wish = {"sampling": SAMPLINGS[2], "max_tokens": 60, "cut": 0}
    plain, drafting = World(), World(speculative=SpeculativeConfig(speculation="draft", num_draft=4), has_draft_model=True)
    assert said(plain, [wish], lambda: 1.0) == said(drafting, [wish], lambda: 1.0)
    assert len(drafting.steps) < 0.6 * len(plain.steps)
    stats = drafting.scheduler.stats()
    assert 0.5 < stats["accepted_tokens"] / stats["drafted_tokens"] < 0.95


def test_rejection_draws_from_the_models_distribution():
    """The first tokens after a prompt over many seeds, by a chi-square test against the same requests without drafts."""

    def counts(speculation, first_seed):
        world = World(
            num_blocks=3000,
            block_size=16,
            max_waiting=1000,
            speculative=SpeculativeConfig(speculation="off"),
            has_draft_model=True,
        )
        ids = []
        for seed in range(600):
            sampling = SamplingParams(temperature=0.8, seed=first_seed + seed)
            ids.append(world.submit(PROMPT, sampling=sampling, max_tokens=3, speculation=speculation))
        world.finish(20000)
        heard = [tuple(token for token, _ in world.told[each][0]) for each in ids]
        return [Counter(each[place] for each in heard if len(each) > place) for place in range(3)], world

    plain, _ = counts(Speculation("off"), 0)
    drafted, world = counts(Speculation("draft", 3, "rejection"), 5000)
    assert world.scheduler.stats()["accepted_tokens"] > 0
    assert world.scheduler.stats()["accepted_tokens"] < world.scheduler.stats()["drafted_tokens"]
    for ours, theirs in zip(drafted, plain, strict=True):
        common = [token for token in ours | theirs if ours[token] + theirs[token] >= 10]
        chi_square = sum((ours[token] - theirs[token]) ** 2 / (ours[token] + theirs[token]) for token in common)
        assert chi_square < len(common) + 4 * (2 * len(common)) ** 0.5
