"""A small world around storage: the real cache and executor thread over a pool whose bytes are a function of the block's identity.

Run as a script, ``victim DIR`` is what the kill tests kill: it works on a state directory in a fixed way and prints what it was promised.
``golden DIR`` and ``golden_sealed DIR`` make the golden files of the present format. ``full DIR`` and ``readonly DIR`` live on a disk that takes nothing more.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

from kvd.cache.hashing import Namespace, block_hash
from kvd.cache.manager import CacheManager
from kvd.cache.tenants import tenant_salt
from kvd.commands import CheckpointDone, Recipe, RecipeDurable
from kvd.config import StorageConfig
from kvd.executor.worker import ExecutorThread
from kvd.storage.keys import KeyRing
from kvd.storage.persistence import Storage
from kvd.storage.rehydration_report import RehydrationReport
from kvd.storage.tools import check_store
from kvd.types import KvGroup, pack_tokens

FINGERPRINT = b"f" * 32
SALTED = Namespace(FINGERPRINT, tenant_salt("", b"the tenant's salt"))
"""A tenant's namespace."""
BLOCK_TOKENS = 16
ROW_BYTES = 1000


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()


class QuietLog:
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict]] = []

    def info(self, event, **fields):
        self.entries.append((event, fields))

    warning = error = debug = info

    def named(self, event: str) -> list[dict]:
        return [fields for name, fields in self.entries if name == event]


class Inbox:
    def __init__(self) -> None:
        self.commands: list[CheckpointDone | RecipeDurable] = []

    def put_internal(self, command) -> None:
        self.commands.append(command)

    def find(self, op_id: bytes):
        return next((command for command in list(self.commands) if getattr(command, "op_id", None) == op_id), None)


class PoolRunner:
    """A pool of opaque rows."""

    def __init__(self, num_blocks: int, row_bytes: int, fingerprint: bytes) -> None:
        self.row_bytes = row_bytes
        self.fingerprint = fingerprint
        self.memory = bytearray(num_blocks * row_bytes)
        self.fail_reads = False
        self.gate = threading.Event()
        """Copies out wait while it is not set."""
        self.gate.set()

    def groups(self):
        return (KvGroup("target", self.row_bytes, self.fingerprint),)

    def execute(self, step):
        raise AssertionError("no steps here")

    def read_blocks(self, group, block_ids, memory):
        if self.fail_reads:
            raise RuntimeError("device lost")
        assert self.gate.wait(30)
        for index, block_id in enumerate(block_ids):
            memory[index * self.row_bytes : (index + 1) * self.row_bytes] = self.row(block_id)

    def write_blocks(self, group, block_ids, memory):
        for index, block_id in enumerate(block_ids):
            self.row(block_id)[:] = memory[index * self.row_bytes : (index + 1) * self.row_bytes]

    def row(self, block_id) -> memoryview:
        return memoryview(self.memory)[block_id * self.row_bytes : (block_id + 1) * self.row_bytes]


def row_of(key: bytes, row_bytes: int = ROW_BYTES) -> bytes:
    """The bytes that block ``key`` must have."""
    return hashlib.shake_128(key).digest(row_bytes)


def prompt(number: int, num_tokens: int, shared: int = 0) -> bytes:
    """Packed tokens: ``shared`` common ones, then ones of this number."""
    return pack_tokens([*range(shared), *(1000 * (number + 1) + index for index in range(num_tokens - shared))])


def chain_of(token_ids: bytes, namespace: Namespace) -> list[bytes]:
    parent, chain = namespace.root, []
    for start in range(0, len(token_ids) - 4 * BLOCK_TOKENS + 1, 4 * BLOCK_TOKENS):
        parent = block_hash(parent, token_ids[start : start + 4 * BLOCK_TOKENS])
        chain.append(parent)
    return chain


class World:
    """One life of a daemon's storage over ``state_dir``."""

    def __init__(
        self,
        state_dir: Path,
        *,
        num_blocks: int = 64,
        fingerprint: bytes = FINGERPRINT,
        row_bytes: int = ROW_BYTES,
        deadline_s: float = 30.0,
        clock=None,
        **config,
    ) -> None:
        settings = {
            "store_max_bytes": 64 << 20,
            "checkpoint_interval_s": 0.02,
            "wal_sync_interval_ms": 0.0,
            "wal_segment_bytes": 1 << 16,
        } | config
        self.config = StorageConfig(state_dir=state_dir, **settings)
        self.log = QuietLog()
        self.inbox = Inbox()
        self.runner = PoolRunner(num_blocks, row_bytes, fingerprint)
        self.row_bytes = row_bytes
        self.executor = ExecutorThread(self.runner)
        self.cache = CacheManager(num_blocks=num_blocks, block_size_tokens=BLOCK_TOKENS, free_watermark=0.0, max_pinned_fraction=0.5)
        self.namespace = Namespace(fingerprint)
        self.clock = clock or SystemClock()
        self.progress: list[tuple[int, int]] = []
        self.storage = Storage.lock(self.config, clock=self.clock, log=self.log)
        try:
            self.storage.open(
                namespace_fingerprint=fingerprint, groups=self.runner.groups(), inbox=self.inbox, leases=self.cache, block_io=self.executor
            )
            self.report: RehydrationReport = self.storage.rehydrate(
                self.cache, self.executor, self.clock.monotonic() + deadline_s, lambda done, total: self.progress.append((done, total))
            )
        except BaseException:
            self.executor.close(5)
            self.storage.close(clean=False)
            raise
        self.step = 0

    def tick(self) -> None:
        self.step += 1
        self.storage.on_step(self.step, self.cache.take_events())

    def ask(self, token_ids: bytes, namespace: Namespace | None = None) -> int:
        """Run a prompt: every matched block must hold the right bytes, the rest is computed. The number of matched tokens."""
        table = self.cache.allocate(self.cache.match(token_ids, namespace or self.namespace), len(token_ids) // 4)
        assert table is not None
        chain = chain_of(token_ids, namespace or self.namespace)
        num_matched = table.num_cached_tokens // BLOCK_TOKENS
        for block_id, key in zip(table.block_ids[:num_matched], chain, strict=False):
            assert bytes(self.runner.row(block_id)) == row_of(key, self.row_bytes)
        for node in list(table.fills):
            self.runner.row(node.block_id)[:] = row_of(node.block_hash, self.row_bytes)
        self.cache.complete_fill(list(table.fills))
        self.num_restored = table.num_restored_tokens
        cached = table.num_cached_tokens
        self.cache.release(table)
        self.tick()
        return cached

    def pin(self, name: str, token_ids: bytes) -> str:
        """As the engine does: compute, hold, write the recipe, checkpoint; how durable it is."""
        self.ask(token_ids)
        self.cache.pin(name, token_ids, self.namespace)
        self.tick()
        op_id = b"recipe-%s-%d" % (name.encode(), self.step)
        self.storage.recipe_book.put(op_id, Recipe(name=name, token_ids=token_ids, tokenizer_digest=b""))
        done = self.wait_for(op_id)
        return "failed" if done.error else "recipe" if self.checkpoint().error else "recipe+bytes"

    def checkpoint(self, op_id: bytes = b"") -> CheckpointDone:
        self._ops = getattr(self, "_ops", 0) + 1
        op_id = op_id or b"op-%d" % self._ops
        self.storage.checkpoint_now(op_id)
        return self.wait_for(op_id)

    def wait_for(self, op_id: bytes):
        return self.until(lambda: self.inbox.find(op_id))

    def until(self, condition, timeout_s: float = 60.0):
        """Go on stepping until ``condition`` holds; its value."""
        end = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < end, f"waited in vain; {self.storage.status()} {self.storage.stats()} {self.log.entries}"
            self.tick()
            time.sleep(min(0.002, self.storage.idle_delay_s()))
        return value

    def until_logged(self) -> None:
        """Until the log has what was told of on disk: the planner first has to hear of it."""
        running = self.storage._running
        self.until(lambda: not running.planner.is_busy)
        self.until(lambda: running.wal.durable_lsn == running.wal.last_lsn)

    def stop(self, *, clean: bool = True) -> bool:
        """End as a daemon does that was asked to (or, with ``clean`` False, that failed)."""
        done = self.storage.shutdown_checkpoint(time.monotonic() + 30) if clean else False
        self.executor.close(10)
        self.storage.close(clean=clean)
        self.cache.check_invariants()
        return done


def crash(world: World) -> None:
    """Let go of the process's hold on the files without writing anything more: what is durable now is what the next start finds."""
    world.executor.close(10)
    world.storage._forgetting.stop(0)
    running = world.storage._running
    if running is not None:
        if running.cold_tier is not None:
            running.cold_tier.stop(10)
        running.planner.stop(10)
        running.store._changes.clear()
        running.store._staged.clear()
        txn = running.store._txn
        running.store.stop(10) if txn is None else _abandon(running.store)
        running.wal._on_error = lambda _: None
        running.wal.close(10)
    world.storage._recipes.close(10)
    world.storage._lock.release()


def _abandon(store_thread) -> None:
    def drop() -> None:
        store_thread._txn.abort()
        store_thread._txn = None

    store_thread._commit = drop
    store_thread.stop(10)


def warm(state_dir: Path, *numbers: int, num_tokens: int = 81, **config) -> None:
    """A life in which each prompt was asked twice and checkpointed."""
    world = World(state_dir, **config)
    for number in numbers:
        world.ask(prompt(number, num_tokens, shared=32))
        world.ask(prompt(number, num_tokens, shared=32))
    assert not world.checkpoint().error
    assert world.stop()


def found(state: Path, secrets: dict[str, bytes]) -> set[str]:
    """Which of the secrets stand in any file of a state directory, or in a name."""
    everything = [path.read_bytes() for path in state.rglob("*") if path.is_file()]
    everything.append("\n".join(map(str, state.rglob("*"))).encode())
    return {what for what, secret in secrets.items() if any(secret in data for data in everything)}


def victim(state_dir: Path) -> None:
    """Two prompts that share a prefix, a pin, checkpoints. Each line printed is a promise that must hold after a kill."""
    world = World(state_dir)
    for number in range(3):
        for _ in range(2):
            world.ask(prompt(number, 80, shared=48))
        print(f"asked {number}", flush=True)
        name = f"pin-{number}"
        how = world.pin(name, prompt(10 + number, 64, shared=16))
        print(f"{how} {name}", flush=True)
        if number == 1:
            world.storage.recipe_book.remove(b"unpin", "pin-0")
            assert not world.wait_for(b"unpin").error
            world.cache.unpin("pin-0")
            world.tick()
            print("unpinned pin-0", flush=True)
    world.stop()
    print("stopped", flush=True)


GOLDEN_KEY = bytes(range(32))


def golden_sealed(state_dir: Path) -> None:
    """As ``golden``, under ``GOLDEN_KEY``, with nonces and keys that are the same each time."""
    number = itertools.count()
    KeyRing.__init__.__kwdefaults__["random"] = lambda num_bytes: hashlib.shake_128(b"%d" % next(number)).digest(num_bytes)
    key_file = state_dir.with_name(f"{state_dir.name}.key")
    key_file.write_bytes(GOLDEN_KEY)
    key_file.chmod(0o600)
    golden(state_dir, store_encryption_key_file=str(key_file))


def golden(state_dir: Path, **options) -> None:
    """Make the state directory that is committed as the golden files of a format: a pin, a hot prompt, and one that only the log knows."""
    world = World(state_dir, row_bytes=200, **options)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    for _ in range(3):
        world.ask(prompt(0, 49, shared=16))
    assert not world.checkpoint().error
    world.stop()
    world = World(state_dir, row_bytes=200, checkpoint_interval_s=1000.0, **options)
    world.ask(prompt(1, 33))
    world.until_logged()
    crash(world)


def full(state_dir: Path) -> None:
    """Lives on a disk of ``state_dir``'s folder that is filled up meanwhile: what is printed worked."""
    _fill(state_dir.parent)
    world = World(state_dir)
    world.until(lambda: world.storage.status()["degraded"])
    assert world.pin("system", prompt(9, 48)) == "failed"
    crash(world)
    print("a first start served", flush=True)
    _empty(state_dir.parent)
    crash(_first_life(state_dir))
    _fill(state_dir.parent)
    _life_without_disk(state_dir, "No space left")
    print("served on a full disk", flush=True)
    _empty(state_dir.parent)
    _life_after(state_dir)


def readonly(state_dir: Path) -> None:
    """As ``full``, on a disk that has become read-only."""
    crash(_first_life(state_dir))
    subprocess.run(["mount", "-o", "remount,ro", str(state_dir.parent)], check=True)
    _life_without_disk(state_dir, "Read-only file system")
    print("served on a read-only disk", flush=True)
    subprocess.run(["mount", "-o", "remount,rw", str(state_dir.parent)], check=True)
    _life_after(state_dir)


def _first_life(state_dir: Path) -> World:
    world = World(state_dir, store_max_bytes=8 << 20)
    assert world.pin("system", prompt(9, 48)) == "recipe+bytes"
    for _ in range(2):
        world.ask(prompt(0, 81))
    assert not world.checkpoint().error
    return world


def _life_without_disk(state_dir: Path, reason: str) -> None:
    for _ in range(2):
        world = World(state_dir, store_max_bytes=8 << 20)
        status = world.storage.status()
        assert status["degraded"], status
        assert reason in status["reason"], status
        assert list(world.storage.recipe_book.recipes()) == ["system"]
        world.ask(prompt(0, 81))
        world.ask(prompt(1, 81))
        assert world.ask(prompt(1, 81)) == 80
        assert world.pin("other", prompt(2, 64)) == "failed"
        assert list(world.storage.recipe_book.recipes()) == ["system"]
        check_store(state_dir)
        crash(world)


def _life_after(state_dir: Path) -> None:
    world = World(state_dir, store_max_bytes=8 << 20)
    assert list(world.storage.recipe_book.recipes()) == ["system"]
    assert world.pin("other", prompt(2, 64)) == "recipe+bytes"
    assert not world.storage.status()["degraded"]
    assert world.stop()
    report = check_store(state_dir)
    assert report["ok"], report
    print("healed", flush=True)


def _fill(folder: Path) -> None:
    with (folder / "fill").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC, error  # noqa: PT017


def _empty(folder: Path) -> None:
    (folder / "fill").unlink()


if __name__ == "__main__":
    {"victim": victim, "golden": golden, "golden_sealed": golden_sealed, "full": full, "readonly": readonly}[sys.argv[1]](Path(sys.argv[2]))
