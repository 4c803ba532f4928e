"""kvd's cache inside of transformers' generate: the tokens of its own ``DynamicCache``, computed from what earlier calls left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cached_models import CONFIGS, GREEDY, KV, draw, make, own, padded
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, MambaConfig, Qwen3Config, T5Config

from kvd.integrations.transformers import _CACHE_ARGUMENT, KvdCacheError, KvdPool, PoolFullError

pytestmark = [pytest.mark.torch, pytest.mark.oracle]


@pytest.fixture(scope="module")
def llama():
    return make(CONFIGS["llama"])


@pytest.fixture
def pool(llama):
    pool = KvdPool(llama, kv_memory=2 << 20)
    yield pool
    pool.tables.check_invariants()
    assert pool.stats()["used_blocks"] == 0


@pytest.mark.parametrize("family", CONFIGS)
def test_growing_and_leaving_prompts_of_every_family(family):
    model = make(CONFIGS[family])
    pool = KvdPool(model, kv_memory=2 << 20)
    stem = draw(1, 1, 60)
    for number, (length, expected) in enumerate([(30, 0), (43, 30), (24, 24)]):
        prompt = torch.cat([stem[:, :length], draw(10 + number, 1, 5)], dim=1)
        with pool.cache(prompt) as cache:
            assert cache.get_seq_length() == expected
            answer = model.generate(prompt, **{_CACHE_ARGUMENT: cache}, **GREEDY)
            cache.store(answer)
        assert torch.equal(answer, own(model, prompt))
    followed = torch.cat([answer, draw(20, 1, 3)], dim=1)  # the next turn goes on from the answer
    assert pool.cache(followed).get_seq_length() == (answer.shape[1] - 1) // 16 * 16
    assert torch.equal(pool.generate(followed, **GREEDY), own(model, followed))
    pool.tables.check_invariants()


def test_batches_padded_on_the_left(llama, pool):
    stem = draw(1, 50)
    ids, mask = padded([torch.cat([stem[:length], draw(length, 4)]) for length in (46, 20, 33)])
    expected = own(llama, ids, attention_mask=mask)
    assert torch.equal(pool.generate(ids, mask, **GREEDY), expected)
    with pool.cache(ids, mask) as cache:
        assert cache.get_seq_length() == 45  # padding and two blocks of the last row; the longest has 48 of its 50
        assert cache.max_batch_size == 3
    assert torch.equal(pool.generate(ids, mask, **GREEDY), expected)
    beams = own(llama, ids, attention_mask=mask, num_beams=3, num_return_sequences=2)
    assert torch.equal(pool.generate(ids, mask, **GREEDY, num_beams=3, num_return_sequences=2), beams)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2},
        {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20},
    ],
    ids=["beams", "samples", "sampled beams", "prompt lookup"],
)
def test_every_way_to_generate(llama, pool, options):
    prompt = draw(5, 1, 12).repeat(1, 3)[:, :31]
    torch.manual_seed(1)
    expected = own(llama, prompt, **options)
    for _ in range(2):  # at first all is computed, then the prompt is there
        torch.manual_seed(1)
        assert torch.equal(pool.generate(prompt, **{**GREEDY, **options}), expected)
    assert pool.stats()["hit_tokens"] > 0


def test_a_prompt_that_is_passed_although_it_is_there_is_refused(llama, pool):
    prompt = draw(5, 1, 31)
    pool.generate(prompt, **GREEDY)
    with pool.cache(prompt) as cache:
        with pytest.raises(KvdCacheError, match="holds 30 positions already"):
            llama(prompt, **{_CACHE_ARGUMENT: cache})
        cache.reset()
        assert torch.equal(llama.generate(prompt, **{_CACHE_ARGUMENT: cache}, **GREEDY), own(llama, prompt))


@pytest.mark.parametrize("place", ["model.layers.1", "model.layers.0.self_attn.o_proj"])
def test_an_interrupted_pass_leaves_nothing_behind(llama, pool, place):
    """What its later layers did not write is nobody's prefix."""

    def fail(*_):
        raise MemoryError("here")

    prompt = draw(5, 1, 31)
    module = llama.get_submodule(place)
    handle = module.register_forward_pre_hook(fail)
    bare = pool.cache(prompt)
    with pytest.raises(MemoryError, match="here"):
        pool.generate(prompt, **GREEDY)
    with pytest.raises(MemoryError, match="here"):
        llama(prompt, **{_CACHE_ARGUMENT: bare})
    handle.remove()
    with pytest.raises(KvdCacheError, match="was interrupted"):
        llama(prompt, **{_CACHE_ARGUMENT: bare})
    bare.reset()
    assert torch.equal(llama.generate(prompt, **{_CACHE_ARGUMENT: bare}, **GREEDY), own(llama, prompt))
    bare.close()
    pool.clear()
    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="here"):
        pool.generate(prompt, **GREEDY)
    handle.remove()
    with pool.cache(prompt) as cache:
        assert cache.get_seq_length() == 0
    assert torch.equal(pool.generate(prompt, **GREEDY), own(llama, prompt))
    with pool.cache(prompt) as cache:
        assert cache.get_seq_length() == 30


def test_layers_that_use_another_ones_keys_do_not_count():
    """As Gemma 3n's and 4's last ones do."""
    config = LlamaConfig(**{**KV, "num_hidden_layers": 3}, num_kv_shared_layers=1)
    pool = KvdPool(model := make(config), kv_memory=2 << 20)
    states = torch.ones(1, 2, 33, 8)
    with pool.cache(prompt := draw(5, 1, 33)) as cache:
        cache.begin_pass(model, {"input_ids": prompt})
        for layer in (0, 1):
            cache.update(states, states, layer)
    assert pool.cache(prompt).get_seq_length() == 32


def test_the_pad_token_is_padding_where_nobody_says_more(llama, pool):
    prompt = torch.cat([torch.zeros(1, 5, dtype=torch.long), draw(5, 1, 31)], dim=1)
    everything = torch.ones_like(prompt)
    for _ in range(2):  # what the one has computed is not the other's
        assert torch.equal(pool.generate(prompt, **GREEDY), own(llama, prompt))
        assert torch.equal(pool.generate(prompt, everything, **GREEDY), own(llama, prompt, attention_mask=everything))
        assert torch.equal(pool.generate(prompt, **GREEDY, pad_token_id=1), own(llama, prompt, pad_token_id=1))
    with pytest.raises(KvdCacheError, match="pad token is in a prompt"):
        pool.cache(prompt)
    with pytest.raises(KvdCacheError, match="pad on the left"):
        pool.generate(prompt.flip(1), **GREEDY)


def test_beams_share_their_blocks(llama, pool):
    prompt = draw(2, 1, 64)
    with pool.cache(prompt) as cache:
        llama.generate(prompt, **{_CACHE_ARGUMENT: cache}, **GREEDY, num_beams=6)
        assert cache.max_batch_size == 6
        assert pool.stats()["used_blocks"] <= 4 + 6
        assert pool.tables.num_shared >= 4


def test_what_is_cropped_is_computed_anew(llama, pool):
    """Forward passes by hand, beside transformers' own cache, with logits."""
    prompt = draw(6, 1, 40)
    ours, theirs = pool.cache(prompt), DynamicCache()
    with torch.no_grad():
        for step, (tokens, crop) in enumerate([(prompt, -9), (draw(7, 1, 9), -24), (draw(8, 1, 3), -2), (draw(9, 1, 5), -1)]):
            got = llama(tokens, **{_CACHE_ARGUMENT: ours}).logits
            expected = llama(tokens, **{_CACHE_ARGUMENT: theirs}).logits
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=f"step {step}")
            ours.crop(crop)
            theirs.crop(crop)
            assert ours.get_seq_length() == theirs.get_seq_length() == ours.get_mask_sizes(3, 0)[0] - 3
    ours.close()
    with pool.cache(torch.cat([prompt[:, :20], draw(3, 1, 9)], dim=1)) as other:  # of the replaced tokens nothing is found
        assert other.get_seq_length() == 20
    with pool.cache(torch.cat([prompt[:, :31], draw(7, 1, 9)], dim=1)) as replaced:
        assert replaced.get_seq_length() == 31


def test_rows_are_selected_and_repeated_like_tensors(llama, pool):
    prompts = draw(4, 3, 21)
    ours, theirs = pool.cache(prompts), DynamicCache()
    choices = torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        for cache in (ours, theirs):
            llama(prompts, **{_CACHE_ARGUMENT: cache})
            cache.reorder_cache(choices)
            llama(draw(5, 4, 2), **{_CACHE_ARGUMENT: cache})
            cache.batch_select_indices(torch.tensor([True, True, False, True]))
            cache.batch_repeat_interleave(2)
        got, expected = (llama(draw(6, 6, 1), **{_CACHE_ARGUMENT: cache}).logits for cache in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    ours.store(draw(7, 6, 30))  # nobody knows any more which row is whose
    ours.reset()
    assert ours.get_seq_length() == 0
    ours.close()


def test_several_caches_live_over_one_pool(llama, pool):
    prompt = draw(8, 1, 37)
    llama.generate(prompt, **{_CACHE_ARGUMENT: (first := pool.cache(prompt))}, **GREEDY)
    first.store(own(llama, prompt))
    others = [pool.cache(torch.cat([prompt, draw(number, 1, 2)], dim=1)) for number in range(3)]
    for number, cache in enumerate(others):
        asked = torch.cat([prompt, draw(number, 1, 2)], dim=1)
        assert cache.get_seq_length() == 37 - 37 % 16
        assert torch.equal(llama.generate(asked, **{_CACHE_ARGUMENT: cache}, **GREEDY), own(llama, asked))
    for salt in (b"another adapter", "another adapter"):
        with pool.cache(prompt, salt=salt) as cache:
            assert cache.get_seq_length() == 0
    assert pool.stats()["used_blocks"] < 4 * 3
    for cache in (first, *others):
        cache.close()
        cache.close()
    with pytest.raises(KvdCacheError, match="closed"):
        llama(prompt, **{_CACHE_ARGUMENT: first})
    pool.clear()
    assert pool.stats()["cached_blocks"] == 0


def test_a_pool_gives_way_and_says_when_it_can_not(llama):
    pool = KvdPool(llama, kv_memory=8 * 16 * 2 * 2 * 16 * 4)
    assert pool.num_blocks == 8
    for seed in range(5):  # more than it holds: what nobody uses leaves
        prompt = draw(seed, 1, 50)
        assert torch.equal(pool.generate(prompt, **GREEDY), own(llama, prompt))
    assert pool.stats()["evictions"] > 0
    prompt = draw(0, 1, 90)
    with pool.cache(prompt) as cache:
        llama(prompt, **{_CACHE_ARGUMENT: cache})
        with pytest.raises(PoolFullError, match="6 of 8 blocks are held by living caches"), pool.cache(draw(9, 1, 60)) as other:
            llama(draw(9, 1, 60), **{_CACHE_ARGUMENT: other})
    assert pool.stats()["used_blocks"] == 0
    dropped = pool.cache(prompt)
    del dropped
    assert pool.stats()["used_blocks"] == 0
    pool.tables.check_invariants()


def test_a_pool_that_is_smaller_than_a_prompt_says_so(llama):
    pool = KvdPool(llama, kv_memory=8 * 16 * 2 * 2 * 16 * 4)
    with pytest.raises(
        PoolFullError, match="a prompt of 200 tokens needs 13 blocks of 16 tokens, and the pool has 8: give it more kv_memory"
    ):
        pool.generate(draw(0, 1, 200), **GREEDY)
    assert pool.stats()["used_blocks"] == 0


def test_what_can_not_be_served_is_refused(llama, pool):
    prompt = draw(1, 1, 20)
    with pool.cache(prompt) as cache, pytest.raises(KvdCacheError, match="does not begin with its row's prompt"):
        cache.store(draw(2, 1, 25))
    with pytest.raises(KvdCacheError, match="pad on the left"):
        pool.cache(prompt, torch.tensor([[1] * 15 + [0] * 5]))
    with pool.cache(draw(1, 2, 9)) as cache, pytest.raises(KvdCacheError, match="3 rows for a cache of 2 prompts"):
        llama(draw(1, 3, 9), **{_CACHE_ARGUMENT: cache})
    other = make(Qwen3Config(**KV, head_dim=32))
    with pool.cache(prompt) as cache, pytest.raises(KvdCacheError, match="2 heads of 32 values"):
        other(prompt, **{_CACHE_ARGUMENT: cache})
    with pytest.raises(KvdCacheError, match="at least two"):
        KvdPool(llama, kv_memory=100)

    class Described:
        dtype, device = torch.float32, torch.device("cpu")

        def __init__(self, config):
            self.config = config

    for config in (
        T5Config(),
        MambaConfig(),
        LlamaConfig(**KV, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    ):
        with pytest.raises(KvdCacheError, match=r"are served|rotary"):
            KvdPool(Described(config))


@pytest.mark.model
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_smollm2_says_the_same(smollm2: Path):
    model = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()
    assert AutoConfig.from_pretrained(smollm2.parent, gguf_file=smollm2.name).num_hidden_layers == 30
    pool = KvdPool(model, kv_memory=64 << 20)
    stem = torch.arange(1000, 1040)[None]
    for number, tail in enumerate(([5, 6, 7], [5, 6, 9, 10], [5, 6, 7, 8])):
        prompt = torch.cat([stem, torch.tensor([tail])], dim=1)
        expected = own(model, prompt)
        with pool.cache(prompt) as cache:
            assert cache.get_seq_length() == (0, 42, 43)[number]
        assert torch.equal(pool.generate(prompt, **GREEDY), expected)
    assert torch.equal(pool.generate(prompt, **GREEDY, num_beams=2), own(model, prompt, num_beams=2))
