"""The instant in which a client reads the acknowledgement of its pin: SIGKILL then, and the pin is served restored, or was computed again before READY."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

FLAGS = ("--kv-memory", "4MiB", "--max-pinned-fraction", "1", "--wal-segment-bytes", "64KiB")
BLOCK = 16


def run_trials(root: Path, num_trials: int) -> None:
    """Lives that each pin once more. In every third the disk takes no bytes, so that the recipe alone is durable and the next start has to compute."""
    num_restored = num_computed = 0
    newest, durable = "", ""
    for trial in range(num_trials + 1):
        fails = {"KVD_FAILPOINTS": "store.before_put=raise"} if trial % 3 == 2 else {}
        with DaemonProcess(root, *FLAGS, env=fails) as process:
            process.wait_ready()
            with process.client() as client:
                pins = {pin["name"]: pin["state"] for pin in client.prefixes()["pins"]}
                assert pins == {f"pin-{number}": "held" for number in range(trial)}
                if newest:
                    prompt = newest + "?"
                    answer = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
                    num_tokens = len(newest) // BLOCK * BLOCK
                    assert list(answer.token_ids) == expected_tokens(prompt.encode(), 8)
                    assert answer.usage.cached_tokens == num_tokens
                    assert answer.usage.restored_tokens == num_tokens or durable == "recipe"
                    num_restored += answer.usage.restored_tokens == num_tokens
                    num_computed += answer.usage.restored_tokens < num_tokens
                newest = f"In trial {trial} the house rule is a new one, and it says so at some length. " * (1 + trial % 4)
                durable = client.pin(f"pin-{trial}", newest).details["durable"]
                process.kill()
            assert durable == ("recipe" if fails else "recipe+bytes")
    print(
        f"{num_restored + num_computed} of {num_trials} acknowledged pins were there after SIGKILL: {num_restored} restored, {num_computed} computed"
    )
    assert num_restored + num_computed == num_trials


def test_killed_in_the_instant_after_the_acknowledgement(tmp_path: Path) -> None:
    run_trials(tmp_path, 5)


@pytest.mark.full
def test_killed_a_hundred_times_in_the_instant_after_the_acknowledgement(tmp_path: Path) -> None:
    run_trials(tmp_path, 100)
