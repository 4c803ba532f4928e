"""The adapters' store: reads beside the steps, and puts in and takes out between them."""

from __future__ import annotations

import queue

import pytest
from lora_directories import make_adapter

from kvd.executor.adapter_files import AdapterError
from kvd.executor.adapter_store import AdapterStore, ReadAdapter
from kvd.executor.fake import FakeRunner
from kvd.executor.worker import ExecutorThread
from kvd.step import ContinuedRows, SchedulerOutput, StartedRow
from kvd.types import SamplingParams, pack_tokens

SIZES = {"model.layers.0.self_attn.q_proj": (16, 16)}


def start(row, digest):
    row = StartedRow(row, pack_tokens(list(b"Once upon a time")), 16, 0, 16, (row,), SamplingParams(temperature=0.0), adapter=digest)
    return SchedulerOutput(row.row, (row,), ContinuedRows())


class World:
    def __init__(self, directory, step_ms=0.0):
        self.runner = FakeRunner(16, 16, max_rows=8, step_ms=step_ms)
        self.executor = ExecutorThread(self.runner)
        self.reads: queue.SimpleQueue[tuple[int, ReadAdapter]] = queue.SimpleQueue()
        self.names = queue.SimpleQueue()
        self.store = AdapterStore(
            directory,
            self.runner,
            in_order=self.executor.call,
            on_read=lambda read_id, result: self.reads.put((read_id, result)),
            on_names=lambda op_id, names, error: self.names.put((op_id, names, error)),
        )

    def read(self, name, read_id=7):
        self.store.read(read_id, name)
        of, result = self.reads.get(timeout=60)
        assert of == read_id
        return result

    def close(self):
        self.store.close()
        assert self.executor.close(60)


@pytest.fixture
def world(tmp_path):
    make_adapter(tmp_path / "poet", SIZES)
    world = World(tmp_path, step_ms=30.0)
    yield world
    world.close()


def test_a_step_on_its_way_begins_rows_with_an_adapter_that_is_gone_meanwhile(world):
    poet = world.read("poet")
    world.store.install(7, poet.digest)
    tickets = [world.executor.submit(start(row, poet.digest if row else b"")) for row in range(3)]
    world.store.remove(poet.digest)
    outputs = [world.executor.collect(ticket).token_ids for ticket in tickets]
    assert outputs[1] == outputs[2] != outputs[0]
    assert world.read("poet").digest == poet.digest
    world.store.install(7, poet.digest)
    assert world.executor.collect(world.executor.submit(start(4, poet.digest))).token_ids == outputs[1]


def test_what_a_read_has_brought_stays_its_own_whatever_leaves_meanwhile(world):
    poet = world.read("poet", 1)
    world.store.install(1, poet.digest)
    assert [world.read("poet", read_id) for read_id in (2, 3)] == [poet, poet]
    world.store.remove(poet.digest)
    world.store.install(2, poet.digest)
    world.store.discard(3)
    assert world.executor.collect(world.executor.submit(start(0, poet.digest))).token_ids
    with pytest.raises(KeyError):
        world.store.install(3, poet.digest)


def test_a_row_without_its_adapter_ends_the_executor_and_nothing_waits_for_it(world):
    poet = world.read("poet")
    with pytest.raises(KeyError, match="not loaded"):
        world.executor.collect(world.executor.submit(start(0, poet.digest)))
    world.store.install(7, poet.digest)
    world.store.remove(poet.digest)


def test_what_goes_wrong_is_told(world, tmp_path, monkeypatch, capsys):
    missing = world.read("nobody")
    assert (missing.is_missing, missing.digest) == (True, b"")
    (tmp_path / "poet" / "adapter_config.json").write_text("{")
    damaged = world.read("poet")
    assert not damaged.is_missing
    assert "not JSON" in damaged.error
    make_adapter(tmp_path / "poet", SIZES)
    monkeypatch.setattr(world.runner, "pack_adapter", lambda _: 1 / 0)
    assert "a fault of its own: ZeroDivisionError" in world.read("poet").error
    with pytest.raises(AdapterError, match="no such directory"):
        World(tmp_path / "nowhere")


def test_names_and_digests(world, tmp_path):
    make_adapter(tmp_path / "clerk", SIZES, seed=1)
    world.store.list_names(b"op")
    assert world.names.get(timeout=60) == (b"op", ["clerk", "poet"], "")
    assert world.store.digest_of("poet") == world.read("poet").digest != world.store.digest_of("clerk")
