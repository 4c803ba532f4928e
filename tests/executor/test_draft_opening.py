"""A draft model beside its target, as the daemon opens them: memory, vocabulary, kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

import numpy as np  # noqa: E402
from tiny_models import make_model  # noqa: E402

from kvd.config import CacheConfig, ConfigError, DaemonConfig, ModelConfig, SchedulerConfig, SpeculativeConfig  # noqa: E402
from kvd.executor.assemble import open_model  # noqa: E402
from kvd.executor.head_start import HeadStart  # noqa: E402
from kvd.executor.kernels.cpu import native  # noqa: E402
from kvd.executor.models.inspect import inspect_model  # noqa: E402
from kvd.executor.native_kv_pool import NativeKvPool  # noqa: E402
from kvd.executor.pool_memory import PoolMemory  # noqa: E402
from kvd.model_opening import describe_draft  # noqa: E402
from kvd.types import BlockId  # noqa: E402

KERNELS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(native.status().isa is None, reason="the native kernels are not there")),
]


def open_pair(tmp_path: Path, *, kernels="torch", kv_memory=1 << 20, head_start=None, **draft_config):
    target = make_model(tmp_path / "target")
    draft = make_model(tmp_path / "draft", seed=1, **{"num_hidden_layers": 1, **draft_config})
    return open_model(
        target,
        inspect_model(target),
        ModelConfig(device="cpu", dtype="float32", kernels=kernels),
        CacheConfig(kv_memory=kv_memory),
        SchedulerConfig(max_running=4),
        threads=1,
        digest_cache=tmp_path / "digests.json",
        head_start=head_start,
        draft=(draft, inspect_model(draft)),
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_number_of_blocks_fills_the_pools_memory_with_both_models_rows(tmp_path, kernels):
    opened = open_pair(tmp_path, kernels=kernels)
    assert opened.draft_pool.num_blocks == opened.num_blocks
    assert opened.draft.block_bytes == opened.draft_pool.row_bytes == opened.pool.row_bytes // 2
    both = opened.pool.row_bytes + opened.draft_pool.row_bytes
    assert opened.num_blocks == ((1 << 20) - 4096) // both
    assert isinstance(opened.draft_pool, NativeKvPool) == (kernels == "native")


def test_the_memory_that_was_touched_early_holds_both_pools_side_by_side(tmp_path):
    memory = PoolMemory(1 << 20)
    opened = open_pair(tmp_path, head_start=HeadStart(memory=memory))
    opened.pool.rows.fill_(1)
    opened.draft_pool.rows.fill_(2)
    held = np.frombuffer(memory.buffer, dtype=np.uint8)
    assert (held == 1).sum() == opened.num_blocks * opened.pool.row_bytes
    assert (held == 2).sum() == opened.num_blocks * opened.draft_pool.row_bytes


@pytest.mark.parametrize("kernels", KERNELS)
def test_loading_attaches_the_draft_and_blocks_from_disk_take_its_rows_away(tmp_path, kernels):
    opened = open_pair(tmp_path, kernels=kernels)
    opened.load(lambda _done, _total: None)
    assert opened.times["draft"] > 0
    draft = opened.runner._runner._draft
    draft._num_valid[[2, 3]] = 16
    opened.runner.write_blocks("target", [BlockId(3)], memoryview(bytearray(opened.pool.row_bytes)))
    assert draft._num_valid[[2, 3]].tolist() == [16, 0]
    assert [group.name for group in opened.runner.groups()] == ["target"]  # what is kept on disk


def test_too_little_memory_for_both_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"kv_memory: 20000 bytes hold 1 blocks of 12288 bytes; give at least 28672"):
        open_pair(tmp_path, kv_memory=20_000)


def test_another_size_of_vocabulary_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"draft_model = .*draft: it has a vocabulary of 384 tokens, the model one of 320; .* same family"
    ):
        open_pair(tmp_path, vocab_size=384)


def test_a_shorter_draft_drafts_up_to_its_own_length(tmp_path):
    assert open_pair(tmp_path, max_position_embeddings=128).draft.max_positions == 128


@pytest.mark.skipif(native.status().isa is None, reason="the native kernels are not there")
def test_a_draft_that_the_native_kernels_do_not_compute_is_refused_where_they_were_asked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"draft_model = .*draft: kernels = 'native': "):
        open_pair(tmp_path, kernels="native", head_dim=20)


def describe(target: Path, draft: Path):
    return describe_draft(DaemonConfig(model=ModelConfig(model=str(target)), speculative=SpeculativeConfig(draft_model=str(draft))))


def test_the_same_tokens_under_the_same_ids_are_asked_for(tmp_path):
    target, near = make_model(tmp_path / "target"), make_model(tmp_path / "near", seed=3)
    assert describe(target, near)[0] == near
    assert describe(target, target)[0] == target
    other = make_model(tmp_path / "other", corpus=("zebras quickly jump over the lazy fox", "pack my box with five dozen jugs"))
    with pytest.raises(
        ConfigError, match=r"draft_model = .*other: another vocabulary than the model's \(it has \d+ tokens and the model \d+"
    ):
        describe(target, other)
    tokenizer = json.loads((near / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (near / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"near: another vocabulary than the model's \(token \d+ is b'b' there and b'a' in the model"):
        describe(target, near)


def test_a_draft_that_is_no_model_is_refused_by_its_key(tmp_path):
    target = make_model(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"draft_model = .*nowhere"):
        describe(target, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"draft_model = .*empty"):
        describe(target, tmp_path / "empty")
