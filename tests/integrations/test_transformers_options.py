"""Whatever ``generate`` and forward passes are told, answers are transformers' own, and the pool keeps nothing that depends on more than tokens and their places."""

from __future__ import annotations

import copy

import pytest
import torch
from cached_models import CONFIGS, GREEDY, draw, make, own, padded
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from kvd.integrations.transformers import _CACHE_ARGUMENT, KvdCacheError, KvdPool

pytestmark = [pytest.mark.torch, pytest.mark.oracle]
PROMPT = draw(5, 1, 58)
OTHER = PROMPT % 40 + 9
LATER = torch.cat([PROMPT, draw(6, 1, 7)], dim=1)


@pytest.fixture
def model():
    return make(CONFIGS["llama"])


@pytest.fixture
def pool(model):
    pool = KvdPool(model, kv_memory=2 << 20)
    yield pool
    model.generation_config = make(CONFIGS["llama"]).generation_config
    for prompt in (PROMPT, LATER):  # whatever a test did, this is what comes of it
        assert torch.equal(pool.generate(prompt, **GREEDY), own(model, prompt))
    pool.tables.check_invariants()
    assert pool.stats()["used_blocks"] == 0


def configured(how, model, name, value):
    """Options that set one of ``generate``'s settings, in each way to say it."""
    if how == "argument":
        return {**GREEDY, name: value}
    if how == "object":
        return {"generation_config": GenerationConfig(**{**GREEDY, name: value, "pad_token_id": 0, "eos_token_id": 1})}
    setattr(model.generation_config, name, value)
    return GREEDY


@pytest.fixture(params=["argument", "object", "model"])
def how(request):
    return request.param


@pytest.fixture(params=["cold", "warm"])
def begun(request, pool):
    if request.param == "warm":
        pool.generate(PROMPT, **GREEDY)
    return pool


def test_without_a_cache_nothing_is_read_or_kept(model, begun, how):
    options = configured(how, model, "use_cache", False)
    before = begun.stats()
    assert torch.equal(begun.generate(PROMPT, **options), model.generate(PROMPT, **options))
    states = model.get_input_embeddings()(OTHER)
    assert torch.equal(begun.generate(PROMPT, inputs_embeds=states, **options), model.generate(PROMPT, inputs_embeds=states, **options))
    assert begun.stats() == before


def test_beams_and_draws_without_a_cache(model, begun):
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        torch.manual_seed(1)
        expected = own(model, PROMPT, **options, use_cache=False)
        torch.manual_seed(1)
        assert torch.equal(begun.generate(PROMPT, **{**GREEDY, **options, "use_cache": False}), expected)


def test_a_models_own_setting_for_passes_by_hand_changes_nothing(model, begun):
    model.config.use_cache = False
    assert torch.equal(begun.generate(PROMPT, **GREEDY), own(model, PROMPT))


@pytest.mark.parametrize(("name", "value"), [("assistant_early_exit", 1), ("prompt_lookup_num_tokens", 3)])
def test_assisted_generation_in_each_way_to_ask_for_it(model, begun, how, name, value):
    options = configured(how, model, name, value)
    expected = model.generate(PROMPT, **options)
    for _ in range(2):
        assert torch.equal(begun.generate(PROMPT, **options), expected)


def test_an_assistant(model, begun):
    for _ in range(2):
        assert torch.equal(begun.generate(PROMPT, **GREEDY, assistant_model=make(CONFIGS["llama"])), own(model, PROMPT))


def inputs_besides(model):
    length = PROMPT.shape[1]
    return {
        "inputs_embeds": model.get_input_embeddings()(OTHER).detach(),
        "position_ids": torch.arange(length)[None] * 3,
        "cache_position": torch.arange(length),
        "token_type_ids": torch.ones_like(PROMPT),
        "head_mask": torch.ones(2, 4),
        "pixel_values": torch.ones(1, 3, 4, 4),
        "encoder_outputs": (torch.ones(1, 4, 32),),
        "encoder_hidden_states": torch.ones(1, 4, 32),
        "decoder_input_ids": PROMPT,
        "cu_seq_lens_q": torch.tensor([0, 20, length]),
        "is_causal": False,
        "mm_token_type_ids": torch.zeros_like(PROMPT),
        "something_new": 0,
    }


@pytest.mark.parametrize("name", list(inputs_besides(make(CONFIGS["llama"]))))
def test_inputs_besides_tokens_are_refused_by_name(model, begun, name):
    value = inputs_besides(model)[name]
    with pytest.raises(KvdCacheError, match=f"^{name}: outside the pool, .* call model.generate"):
        begun.generate(PROMPT, **GREEDY, **{name: value})
    if name in ("position_ids", "something_new"):
        assert torch.equal(begun.generate(PROMPT, **GREEDY, **{name: None}), own(model, PROMPT))
    if name == "cache_position":  # to a pass by hand the right ones may be given
        value = value + 1
    with begun.cache(PROMPT) as cache:
        start = cache.get_seq_length()
        is_of_positions = name in ("position_ids", "inputs_embeds", "token_type_ids", "cache_position")
        given = value if not is_of_positions else value[start:] if value.ndim == 1 else value[:, start:]
        with pytest.raises(KvdCacheError, match=f"^{name}: "):
            model(input_ids=PROMPT[:, start:], **{_CACHE_ARGUMENT: cache, name: given})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("past_key_values", None),
        ("cache", None),
        ("inputs", PROMPT),
        ("synced_gpus", True),
        ("custom_generate", lambda *_, **__: PROMPT),
        ("cache_implementation", "static"),
        ("token_healing", True),
    ],
)
def test_other_ways_to_generate_are_refused_by_name(begun, name, value):
    with begun.cache(draw(9, 1, 20)) as other, pytest.raises(KvdCacheError, match=f"^{name}: outside the pool"):
        begun.generate(PROMPT, **GREEDY, **{name: other if value is None else value})


def test_settings_of_configurations_are_refused_by_name(model, begun):
    for how, name, value in [("object", "cache_implementation", "static"), ("model", "token_healing", True)]:
        with pytest.raises(KvdCacheError, match=f"^{name}: outside the pool"):
            begun.generate(PROMPT, **configured(how, model, name, value))


def test_what_chooses_among_tokens_is_served(model, begun):
    def ban(_, scores):
        scores[:, ::2] = -torch.inf
        return scores

    for options in (
        {"logits_processor": LogitsProcessorList([ban])},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, _: torch.full((len(ids),), ids.shape[1] > 60)])},
        {"prefix_allowed_tokens_fn": lambda _, ids: [(len(ids) * 7) % 90 + 2]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [5, 6]},
        {"guidance_scale": 1.7, "negative_prompt_ids": draw(8, 1, 9)},
        {"max_length": 63, "max_new_tokens": None, "min_new_tokens": 2},
        {"prefill_chunk_size": 7},
    ):
        assert torch.equal(begun.generate(PROMPT, **{**GREEDY, **options}), own(model, PROMPT, **options))
    told = begun.generate(PROMPT, **GREEDY, return_dict_in_generate=True, output_scores=True, output_hidden_states=True)
    assert torch.equal(told.sequences, own(model, PROMPT))
    assert len(told.scores) == len(told.hidden_states) == GREEDY["max_new_tokens"]


def test_generate_by_hand_refuses_the_same(model, begun):
    """As ``pool.generate`` does, but that a cache was asked for and is refused rather than left aside."""
    states = model.get_input_embeddings()(OTHER)
    for options, said in [
        ({"use_cache": False}, "use_cache=False, and a cache"),
        ({"inputs_embeds": states}, "inputs_embeds: "),
        ({"position_ids": torch.arange(58)[None] * 3}, "position_ids: "),
    ]:
        with begun.cache(PROMPT) as cache, pytest.raises(KvdCacheError, match=said):
            model.generate(PROMPT, **GREEDY, **options, **{_CACHE_ARGUMENT: cache})


def test_passes_over_other_tokens_than_the_cache_was_made_for(model, begun):
    with begun.cache(PROMPT) as cache, pytest.raises(KvdCacheError, match="row 0: the pass brings other tokens"):
        model(OTHER[:, cache.get_seq_length() :], **{_CACHE_ARGUMENT: cache})
    with begun.cache(PROMPT) as cache:
        answer = model.generate(PROMPT, **GREEDY, **{_CACHE_ARGUMENT: cache})
        answer[0, -3] += 1 if answer[0, -3] < 90 else -1
        with pytest.raises(KvdCacheError, match="store: a sequence is not what the model was given"):
            cache.store(answer)


def test_masks_and_positions_of_passes_by_hand(model, pool):
    """A padded row whose positions count from the padding on would be another's prefix at other angles."""
    ids, mask = padded([PROMPT[0], PROMPT[0, :40]])
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    length = ids.shape[1]
    seen_all = torch.zeros(2, 1, length, length)
    hole = mask.clone()
    hole[0, 7] = 0
    for told, said in [
        ({}, "pass their attention_mask"),
        ({"attention_mask": mask}, "position_ids that count"),
        ({"attention_mask": torch.ones_like(mask), "position_ids": places}, "attention_mask: another padding"),
        ({"attention_mask": hole, "position_ids": places}, "attention_mask: another padding"),
        ({"attention_mask": seen_all, "position_ids": places}, "wants an attention_mask of 0 and 1"),
        ({"attention_mask": mask[:, :-1], "position_ids": places}, "wants an attention_mask of 0 and 1"),
        ({"attention_mask": mask, "position_ids": torch.arange(length)[None]}, "position_ids: "),
        ({"attention_mask": mask, "position_ids": places[:, 1:]}, "position_ids: "),
    ]:
        with pool.cache(ids, mask) as cache, pytest.raises(KvdCacheError, match=said):
            model(ids, **told, **{_CACHE_ARGUMENT: cache})
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=places).logits
        with pool.cache(ids, mask) as cache:
            told = {"attention_mask": mask, "position_ids": places, "cache_position": torch.arange(length)}
            torch.testing.assert_close(model(ids, **told, **{_CACHE_ARGUMENT: cache}).logits[mask == 1], expected[mask == 1])
    with pool.cache(PROMPT) as cache:
        assert cache.get_seq_length() == 48
    with pytest.raises(KvdCacheError, match="nothing but padding"):
        pool.cache(ids, torch.stack([mask[0], mask[0] * 0]))


def test_chance_is_refused(pool, model):
    model.train()
    with pytest.raises(KvdCacheError, match=r"call model.eval\(\)"):
        pool.generate(PROMPT, **GREEDY)
    model.eval()


def test_a_pass_that_failed_tells_nothing_of_the_next(model, pool):
    with pool.cache(PROMPT) as cache:
        model(PROMPT[:, :20], **{_CACHE_ARGUMENT: cache})

        def fails(*_):
            raise RuntimeError("before the first layer")

        hook = model.get_input_embeddings().register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="before the first layer"):
            model(PROMPT[:, 20:], **{_CACHE_ARGUMENT: cache})
        hook.remove()
        model.forward(OTHER[:, 20:], **{_CACHE_ARGUMENT: cache})  # nobody sees of what
        cache.store(PROMPT)
    with pool.cache(PROMPT) as cache:
        assert cache.get_seq_length() == 16, "of whole blocks, what was seen"


@pytest.mark.parametrize("away", ["another model", "round the call"])
def test_what_was_not_seen_is_not_recorded(model, pool, away):
    other = copy.deepcopy(model) if away == "another model" else model
    with torch.no_grad():
        other.lm_head.weight.mul_(1.0)
        if away == "another model":
            for weight in other.parameters():
                weight.mul_(1.5)
    pool.generate(PROMPT[:, :20], **GREEDY)
    with pool.cache(PROMPT) as cache:
        start = cache.get_seq_length()
        call = other if away == "another model" else other.forward
        call(PROMPT[:, start:], **{_CACHE_ARGUMENT: cache})
        model(draw(3, 1, 20), **{_CACHE_ARGUMENT: cache})
        cache.store(torch.cat([PROMPT, draw(3, 1, 20)], dim=1))
    with pool.cache(PROMPT) as cache:
        assert cache.get_seq_length() == start == 16
