"""The real SmolLM2 in a pool with room for one of three prompts: by the measurements reading is quicker than computing, and the tokens are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_smollm2_oracle import EARLY, ask, ask_together, assert_same, full_blocks, is_found, serve

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.socket, pytest.mark.store, pytest.mark.torch]

BLOCK_BYTES = 30 * 2 * 16 * 3 * 64 * 4
NUM_TOKENS = 6


@pytest.mark.timeout(300)
def test_prompts_that_fell_out_of_memory_are_read_from_disk_and_answer_the_same(smollm2: Path, tmp_path: Path) -> None:
    sizes = [full_blocks(name) // 16 for name in EARLY]
    kv_memory = (max(sizes) + 3) * BLOCK_BYTES
    flags = ("--kv-memory", str(kv_memory), "--max-loading-fraction", "1.0", "--write-policy", "through")
    with serve(tmp_path, smollm2, *flags) as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            for name in EARLY:
                assert_same(name, ask(client, name, NUM_TOKENS))
                client.checkpoint()
            for name in EARLY:
                again = ask(client, name, NUM_TOKENS)
                assert_same(name, again)
                assert is_found(name, again.usage.cached_tokens), client.stats()["store"]
                assert again.usage.restored_tokens >= full_blocks(name) - 16 * 2
            for name, answer in ask_together(client, EARLY, NUM_TOKENS, at_once=3).items():
                assert_same(name, answer)
            stats = client.stats()
            print({key: value for key, value in stats["store"].items() if key.startswith(("cold", "prefill"))})
            assert stats["store"]["cold_loaded_blocks"] >= sum(sizes) - 2 * len(sizes)
            assert stats["store"]["cold_refused_slower"] == 0
            assert stats["store"]["cold_failed_blocks"] == 0
            assert client.status()["blocks"]["used"] == 0
        assert daemon.terminate() == 0
