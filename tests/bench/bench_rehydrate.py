"""How fast blocks come back from disk, against reading, copying and checksumming the same bytes from a plain file.

    python tests/bench/bench_rehydrate.py [--pairs 15] [--mib 512] [--encrypt] [--out FILE.md] [--json FILE]

A store with blocks of the default model's size is written once, and a plain file with the same rows. Then, in interleaved pairs, a storage is opened on it and
rehydrates into a real pool through the real executor thread (the time is the one that the daemon reports: ranking, reading, every check, the copies into the
pool, the tree), and the plain file is read into one buffer, checksummed there with CRC32C row by row, and copied into memory of the pool's size. Both are in
the page cache. Run it on a quiet machine. With --encrypt the store is encrypted, the plain file is not; the speed of AES-256-GCM alone is told besides.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import structlog
import torch
from crc32c import crc32c
from paired import commit, write_section

from kvd.bench.machine import machine, today
from kvd.bench.ratios import Ratio, ratio_of
from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager
from kvd.config import StorageConfig
from kvd.executor.kv_pool import KvPool
from kvd.executor.worker import ExecutorThread
from kvd.storage.cipher import KEY_BYTES, NONCE_BYTES, TAG_BYTES, Cipher
from kvd.storage.key_file import write_key_file
from kvd.storage.persistence import Storage
from kvd.types import KvGroup, pack_tokens

SECTION = "speed of rehydration"
ENCRYPTED_SECTION = "speed of rehydration under encryption"
SMOLLM2 = SimpleNamespace(num_layers=30, num_kv_heads=3, head_dim=64)
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 64
FINGERPRINT = b"f" * 32
NAMESPACE = Namespace(FINGERPRINT)
WAIT_S = 600.0


class Clock:
    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()


class PoolRunner:
    """The real pool behind the executor's thread; no steps are run."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def groups(self) -> tuple[KvGroup, ...]:
        return (KvGroup("target", self._pool.row_bytes, FINGERPRINT),)

    def execute(self, _step: Any) -> Any:
        raise AssertionError("no steps here")

    def read_blocks(self, _group: str, block_ids: Any, memory: memoryview) -> None:
        self._pool.read_blocks(block_ids, memory)

    def write_blocks(self, _group: str, block_ids: Any, memory: memoryview) -> None:
        self._pool.write_blocks(block_ids, memory)


class Inbox:
    def __init__(self) -> None:
        self.commands: list[Any] = []

    def put_internal(self, command: Any) -> None:
        self.commands.append(command)


class World:
    """A pool that lives through all measurements, and a state directory that each of them opens."""

    def __init__(self, root: Path, num_blocks: int, *, encrypt: bool) -> None:
        if encrypt:
            write_key_file(root / "key")
        self.num_blocks = num_blocks
        self.pool = KvPool(SMOLLM2, num_blocks, BLOCK_TOKENS, torch.bfloat16, "cpu")
        self.rows = self.pool.planes.view(num_blocks, -1).view(torch.uint8).numpy()
        self.runner = PoolRunner(self.pool)
        self.executor = ExecutorThread(self.runner)
        self.config = StorageConfig(
            state_dir=root / "state",
            write_policy="through",
            store_max_bytes=4 * num_blocks * self.pool.row_bytes + (64 << 20),
            rehydrate_max_fraction=1.0,
            checkpoint_bytes_per_s=1 << 40,
            cold_tier="never",
            store_encryption_key_file=str(root / "key") if encrypt else "",
        )

    def open(self) -> tuple[Storage, CacheManager, Inbox]:
        cache = CacheManager(num_blocks=self.num_blocks, block_size_tokens=BLOCK_TOKENS, free_watermark=0.0, max_pinned_fraction=0.5)
        inbox = Inbox()
        storage = Storage.lock(self.config, clock=Clock())
        storage.open(namespace_fingerprint=FINGERPRINT, groups=self.runner.groups(), inbox=inbox, leases=cache, block_io=self.executor)
        return storage, cache, inbox

    def fill(self) -> None:
        """Write every block of the pool, each with bytes of its own, to disk."""
        generator = np.random.default_rng(1)
        storage, cache, inbox = self.open()
        storage.rehydrate(cache, self.executor, time.monotonic() + WAIT_S, lambda _done, _total: None)
        for chain in range(self.num_blocks // CHAIN_BLOCKS):
            first = chain * CHAIN_BLOCKS * BLOCK_TOKENS
            tokens = pack_tokens(range(first, first + CHAIN_BLOCKS * BLOCK_TOKENS))
            table = cache.allocate(cache.match(tokens, NAMESPACE), CHAIN_BLOCKS * BLOCK_TOKENS)
            assert table is not None
            for node in table.fills:
                self.rows[node.block_id] = np.frombuffer(generator.bytes(self.pool.row_bytes), dtype=np.uint8)
            cache.complete_fill(list(table.fills))
            cache.release(table)
            storage.on_step(chain, cache.take_events())
        storage.checkpoint_now(b"fill")
        end_s = time.monotonic() + WAIT_S
        while not inbox.commands:
            assert time.monotonic() < end_s, storage.stats()
            storage.on_step(0, cache.take_events())
            time.sleep(0.001)
        assert not inbox.commands[0].error, inbox.commands
        storage.close(clean=True)

    def rehydrate(self) -> tuple[float, int]:
        """Seconds and bytes of one rehydration, as the daemon reports them."""
        storage, cache, _ = self.open()
        report = storage.rehydrate(cache, self.executor, time.monotonic() + WAIT_S, lambda _done, _total: None)
        storage.close(clean=True)
        assert not report.dropped
        return report.seconds, report.num_bytes


class PlainFile:
    """The same rows one after the other, and the checksum of each."""

    def __init__(self, path: Path, rows: np.ndarray, buffer_bytes: int) -> None:
        self._path = path
        self._row_bytes = rows.shape[1]
        self._buffer = np.zeros((max(1, buffer_bytes // self._row_bytes), self._row_bytes), dtype=np.uint8)
        self._target = np.full_like(rows, 1)
        self._checksums = [crc32c(row) for row in rows]
        with path.open("wb") as file:
            file.write(rows.tobytes())

    def read(self) -> tuple[float, int]:
        """Seconds and bytes of one read, check and copy of everything."""
        began_s = time.monotonic()
        done = 0
        with self._path.open("rb", buffering=0) as file:
            while num_bytes := file.readinto(memoryview(self._buffer).cast("B")):
                count = num_bytes // self._row_bytes
                for index in range(count):
                    if crc32c(self._buffer[index]) != self._checksums[done + index]:
                        raise AssertionError(f"row {done + index}")
                self._target[done : done + count] = self._buffer[:count]
                done += count
        return time.monotonic() - began_s, done * self._row_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--encrypt", action="store_true", help="encrypt the store")
    parser.add_argument("--root", type=Path, help="where the files are made; default: the system's temporary directory")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=options.root) as root:
        figures = measure(Path(root), options)
    result = {
        "date": today(),
        "machine": machine(),
        "commit": commit(),
        "load_before": round(load, 2),
        "command": "python tests/bench/bench_rehydrate.py " + " ".join(sys.argv[1:]),
        **figures,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    text = table(result)
    print(text)
    if options.out:
        write_section(options.out, ENCRYPTED_SECTION if options.encrypt else SECTION, text)


def aes_gcm_bytes_per_s(row_bytes: int) -> float:
    """Opening sealed rows in one buffer, on one core."""
    cipher, nonce = Cipher(os.urandom(KEY_BYTES)), os.urandom(NONCE_BYTES)
    row, sealed = memoryview(bytearray(row_bytes)), memoryview(bytearray(row_bytes + TAG_BYTES))
    cipher.seal_into(nonce, memoryview(os.urandom(row_bytes)), b"", sealed)
    rows = (256 << 20) // row_bytes
    began_s = time.monotonic()
    for _ in range(rows):
        cipher.open_into(nonce, sealed, b"", row)
    return rows * row_bytes / (time.monotonic() - began_s)


def measure(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    row_bytes = SMOLLM2.num_layers * 2 * BLOCK_TOKENS * SMOLLM2.num_kv_heads * SMOLLM2.head_dim * 2
    world = World(root, max(1, (options.mib << 20) // row_bytes // CHAIN_BLOCKS) * CHAIN_BLOCKS, encrypt=options.encrypt)
    world.fill()
    plain = PlainFile(root / "plain", world.rows, world.config.checkpoint_bytes_per_step)
    expected = world.rows.copy()
    world.rows[:] = 0
    world.rehydrate()
    plain.read()
    assert sorted(map(crc32c, world.rows)) == sorted(map(crc32c, expected)), "not the bytes that were written"
    del expected
    rates: dict[str, list[float]] = {"rehydrate": [], "plain": []}
    runs = {"rehydrate": world.rehydrate, "plain": plain.read}
    num_bytes = world.num_blocks * row_bytes
    for pair in range(options.pairs):
        for name in ("rehydrate", "plain") if pair % 2 == 0 else ("plain", "rehydrate"):
            gc.collect()
            seconds, moved = runs[name]()
            assert moved == num_bytes
            rates[name].append(moved / seconds)
        print(
            f"pair {pair + 1} of {options.pairs}: rehydration {rates['rehydrate'][-1] / 1e6:.0f} MB/s, plain {rates['plain'][-1] / 1e6:.0f} MB/s, "
            f"ratio {rates['rehydrate'][-1] / rates['plain'][-1]:.3f}",
            file=sys.stderr,
            flush=True,
        )
    world.executor.close(WAIT_S)
    ratio = ratio_of([one / other for one, other in zip(rates["rehydrate"], rates["plain"], strict=True)])
    figures = {"num_blocks": world.num_blocks, "row_bytes": row_bytes, "rates": rates, "ratio": [ratio.mean, ratio.low, ratio.high]}
    return figures | ({"aes_gcm_bytes_per_s": aes_gcm_bytes_per_s(row_bytes)} if options.encrypt else {})


def table(result: dict[str, Any]) -> str:
    """The section of docs/benchmarks-persistence.md."""
    rates = result["rates"]
    pairs = len(rates["plain"])
    means = {name: sum(values) / len(values) / 1e6 for name, values in rates.items()}
    aes_gcm = result.get("aes_gcm_bytes_per_s")
    return "\n".join(
        [
            "## Speed of rehydration" + (" under encryption" if aes_gcm else ""),
            "",
            f"* date: {result['date']}; commit {result['commit']}; load before the run: {result['load_before']}",
            f"* machine: {result['machine']}",
            f"* {result['num_blocks']} blocks of {result['row_bytes']} bytes, {result['num_blocks'] * result['row_bytes'] / 1e6:.0f} MB, warm page cache",
            f"* command: `{result['command']}`; {pairs} interleaved pairs, ratio as geometric mean with its 95 % interval",
            *([f"* AES-256-GCM alone, opening one row again and again: {aes_gcm / 1e6:.0f} MB/s"] if aes_gcm else []),
            "",
            "| rehydration, MB/s | read + CRC32C + copy of a plain file, MB/s | ratio |",
            "|---|---|---|",
            f"| {means['rehydrate']:.0f} | {means['plain']:.0f} | {Ratio(*result['ratio'], pairs)} |",
        ]
    )


if __name__ == "__main__":
    main()
