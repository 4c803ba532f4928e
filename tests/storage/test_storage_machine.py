"""A daemon's storage over many lives, at random: ask, pin, unpin, checkpoint, crash, damage, fill the disk; against a dict of what was promised.

``crash`` lets go of the files as a SIGKILL would at a moment between two writes. What a checkpoint or an acknowledged pin promised must be there in the next life, and
every block that is hit must hold exactly its bytes (``World.ask`` asserts it).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from storage_harness import World, chain_of, crash, prompt, row_of

from kvd.cache.tenants import Selection
from kvd.storage import start_guard
from kvd.storage.tools import block_extents, check_store

pytestmark = pytest.mark.store

prompts = st.builds(prompt, st.integers(0, 3), st.sampled_from([17, 33, 65, 100]), shared=st.sampled_from([0, 16, 32]))


class StorageMachine(RuleBasedStateMachine):
    """``durable`` maps prompts to the tokens that must be restored in the next life as long as nothing is damaged and the pool has room."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvd-machine-"))
        self.pins: dict[str, bytes] = {}
        self.durable: dict[bytes, int] = {}
        self.asked: dict[bytes, int] = {}
        self.world: World | None = None
        self.was_damaged = False

    @initialize()
    def begin(self) -> None:
        self.world = World(self.directory, num_blocks=256, row_bytes=100)

    def next_life(self, *, damaged: bool = False) -> None:
        (self.directory / start_guard.MARKER_NAME).unlink(missing_ok=True)
        self.world = World(self.directory, num_blocks=256, row_bytes=100, rehydrate_max_fraction=1.0)
        assert set(self.world.storage.recipe_book.recipes()) == set(self.pins)
        if damaged:
            self.durable.clear()
        else:
            # A damaged block below another that is gone is found only when that one is back, and never was anybody's promise.
            assert self.was_damaged or self.world.report.dropped == {}
            for token_ids, num_tokens in self.durable.items():
                match = self.world.cache.match(token_ids, self.world.namespace)
                assert match.num_tokens >= num_tokens, (self.world.report, self.world.storage.status())
        self.asked.clear()
        for name, token_ids in self.pins.items():
            # As the engine does before READY: what damage took is computed. It is durable with the next checkpoint.
            self.world.ask(token_ids)
            self.world.cache.pin(name, token_ids, self.world.namespace)
        self.world.tick()

    def promise(self, prompts: Iterable[bytes]) -> None:
        for token_ids in prompts:
            self.durable[token_ids] = (len(token_ids) // 4 - 1) // 16 * 16

    @rule(token_ids=prompts, times=st.integers(1, 3))
    def ask(self, token_ids: bytes, times: int) -> None:
        for _ in range(times):
            self.world.ask(token_ids)
        self.asked[token_ids] = self.asked.get(token_ids, 0) + times

    @rule(number=st.integers(0, 2), token_ids=prompts)
    def pin(self, number: int, token_ids: bytes) -> None:
        name = f"pin-{number}"
        if name not in self.pins:
            assert self.world.pin(name, token_ids) == "recipe+bytes"
            self.pins[name] = token_ids
            self.promise([token_ids])

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.pins)))
        op_id = f"un{name}{self.world.step}".encode()
        self.world.storage.recipe_book.remove(op_id, name)
        assert not self.world.wait_for(op_id).error
        assert self.world.cache.unpin(name)
        self.world.tick()
        del self.pins[name]

    @rule(token_ids=prompts, num_blocks=st.integers(1, 6), asked_meanwhile=st.lists(prompts, max_size=2))
    def forget(self, token_ids: bytes, num_blocks: int, asked_meanwhile: list[bytes]) -> None:
        """What begins so is in no file; what has a block of its own besides, or is pinned, stays; what is asked for while it is being forgotten counts as new."""
        prefix = token_ids[: min(num_blocks * 64, len(token_ids) // 64 * 64)]
        selection = Selection("", b"", prefix)
        self.world.tick()
        self.world.cache.forget(selection)
        self.world.tick()
        op_id = b"forget%d" % self.world.step
        self.world.storage.forget(op_id, selection, {})
        for each in asked_meanwhile:
            self.world.ask(each)
        assert self.world.until(lambda: self.world.inbox.find(op_id), timeout_s=30).error == ""
        self.pins = {name: each for name, each in self.pins.items() if not each.startswith(prefix)}
        pinned = set(self.pins.values())
        for promised in (self.durable, self.asked):
            for each in list(promised):
                # What is above goes too, if nothing else hangs on it.
                is_above = prefix.startswith(each[: len(each) // 64 * 64]) and each not in pinned
                if each.startswith(prefix) or is_above:
                    del promised[each]
        for each in asked_meanwhile:
            self.asked[each] = self.asked.get(each, 0) + 1
        row = row_of(chain_of(prefix, self.world.namespace)[-1], 100)
        assert any(each.startswith(prefix) for each in asked_meanwhile) or not [
            path for path in self.directory.rglob("*") if path.is_file() and row in path.read_bytes()
        ]

    @rule()
    def checkpoint(self) -> None:
        assert not self.world.checkpoint().error
        self.promise(token_ids for token_ids, times in self.asked.items() if times >= 2)
        self.promise(self.pins.values())

    @rule()
    def crash(self) -> None:
        crash(self.world)
        self.next_life()

    @rule()
    def restart(self) -> None:
        assert self.world.stop()
        self.promise(self.asked)
        self.promise(self.pins.values())
        assert self.was_damaged or check_store(self.directory)["ok"]
        self.next_life()

    @rule(which=st.integers(0, 2**16), byte=st.integers(0, 2**16), bit=st.integers(0, 7))
    def damage_a_block(self, which: int, byte: int, bit: int) -> None:
        """The draws don't depend on how many blocks the threads have written by now: that differs from run to run."""
        self.world.stop()
        extents = list(block_extents(self.directory))
        if extents:
            path, offset, length = extents[which % len(extents)]
            content = bytearray(path.read_bytes())
            content[offset + byte % length] ^= 1 << bit
            path.write_bytes(content)
            self.was_damaged = True
        self.next_life(damaged=bool(extents))

    @rule(part=st.sampled_from(["kv", "wal", "kv/CURRENT"]))
    def lose_cache(self, part: str) -> None:
        self.world.stop()
        path = self.directory / part
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.next_life(damaged=True)

    @invariant()
    def cache_is_whole(self) -> None:
        if self.world is not None:
            self.world.cache.check_invariants()
            assert self.world.storage.stats()["lost_events"] == 0

    def teardown(self) -> None:
        if self.world is not None:
            self.world.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


class TestStorageMachine(StorageMachine.TestCase):
    settings = settings(max_examples=12, stateful_step_count=14, deadline=None, suppress_health_check=SLOW)


@pytest.mark.full
@pytest.mark.timeout(1800)
class TestStorageMachineForLong(StorageMachine.TestCase):
    settings = settings(max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=SLOW)
