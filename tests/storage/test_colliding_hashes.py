"""Block hashes of eight bits: collisions abound, and each is a miss. In memory, on disk, after a restart, read back from the cold tier, and on a real daemon."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from storage_harness import BLOCK_TOKENS, World, crash, row_of

from kvd.cache import hashing
from kvd.types import pack_tokens

pytestmark = [pytest.mark.store, pytest.mark.socket, pytest.mark.e2e]

WEAK = """
import hashlib
from kvd.cache import hashing

class Weak:
    def __init__(self, data):
        self.data = data
    def digest(self):
        return hashlib.sha256(self.data).digest()[:1] + bytes(31)

hashing._digest = Weak
"""


class ByTokens:
    """Prompts over a world whose rows are a function of the whole prefix, not of the block's hash: who takes one for another is found out."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_hit = self.num_restored = 0

    def ask(self, token_ids: list[int]) -> None:
        world, packed = self.world, pack_tokens(token_ids)
        table = world.cache.allocate(world.cache.match(packed, world.namespace), len(token_ids))
        assert table is not None
        rows = [
            row_of(hashlib.sha256(packed[: 4 * BLOCK_TOKENS * (index + 1)]).digest()) for index in range(len(token_ids) // BLOCK_TOKENS)
        ]
        num_matched = table.num_cached_tokens // BLOCK_TOKENS
        for block_id, row in zip(table.block_ids[:num_matched], rows, strict=False):
            assert bytes(world.runner.row(block_id)) == row, "another block's bytes"
        for node in list(table.fills):
            world.runner.row(node.block_id)[:] = rows[node.depth]
        world.cache.complete_fill(list(table.fills))
        self.num_hit += num_matched
        self.num_restored += table.num_restored_tokens // BLOCK_TOKENS
        world.cache.release(table)
        world.tick()


@pytest.fixture
def weak(monkeypatch: pytest.MonkeyPatch) -> None:
    real = hashing._digest
    monkeypatch.setattr(hashing, "_digest", real)  # before it is replaced: this is what comes back
    exec(WEAK, {})
    assert hashing._digest is not real


def prompts(rng: random.Random, num_prompts: int) -> list[list[int]]:
    """Chains that share beginnings: with 256 hashes nearly every one collides with another somewhere."""
    heads = [[rng.randrange(1 << 20) for _ in range(BLOCK_TOKENS * rng.randint(1, 3))] for _ in range(8)]
    return [rng.choice(heads) + [rng.randrange(1 << 20) for _ in range(BLOCK_TOKENS * rng.randint(1, 4) + 1)] for _ in range(num_prompts)]


@pytest.mark.parametrize("seed", range(6))
def test_collisions_are_misses_in_memory_on_disk_and_after_restarts(tmp_path: Path, weak: None, seed: int) -> None:
    rng = random.Random(seed)
    every = prompts(rng, 120)
    num_lost = num_restored = 0
    for life in range(4):
        world = World(tmp_path, num_blocks=96)
        by_tokens = ByTokens(world)
        for _ in range(150):
            by_tokens.ask(rng.choice(every))
            if rng.random() < 0.05:
                world.checkpoint()
        assert by_tokens.num_hit > 0
        num_lost += world.storage.stats()["lost_events"]
        num_restored += by_tokens.num_restored
        if life % 2:
            crash(world)
            (tmp_path / "starting").unlink(missing_ok=True)
        else:
            world.stop()
    assert num_lost > 50, "collisions that storage noticed"
    assert num_restored > 0


def test_a_daemon_with_hashes_of_eight_bits_answers_rightly(tmp_path: Path) -> None:
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "sitecustomize.py").write_text(WEAK)
    rng = random.Random(1)
    texts = ["".join(chr(rng.randrange(97, 123)) for _ in range(16 * rng.randint(2, 6))) for _ in range(90)]
    num_restored = 0
    for life in range(3):
        with DaemonProcess(
            tmp_path, "--kv-memory", "128KiB", "--checkpoint-interval-s", "0.1", env={"PYTHONPATH": str(tmp_path / "patch")}
        ) as process:
            process.wait_ready()
            with process.client() as client:
                if life == 0:
                    client.pin("rules", texts[0] * 2)
                for _ in range(160):
                    text = rng.choice(texts) + rng.choice(("", "", "?", "!"))
                    answer = client.generate(text, max_tokens=4, temperature=0.0, ignore_eos=True)
                    assert list(answer.token_ids) == expected_tokens(text.encode(), 4)
                    num_restored += answer.usage.restored_tokens
                assert client.generate(texts[0] * 2 + "?", max_tokens=1).usage.cached_tokens >= len(texts[0] * 2) // 16 * 16
                assert client.stats()["store"]["lost_events"] > 0, "the patch works, and storage notices"
            if life:
                assert process.terminate() == 0
            else:
                process.kill()
    assert num_restored > 0
