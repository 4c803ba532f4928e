"""Pins on a real daemon: replaced, refused, taken back, and there after every kill. And what ``usage`` says of where a prompt's KV came from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client, errors

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

RULES = "Every visitor signs the ledger before the tour begins, be it morning or noon. " * 4
OTHER = "Nobody touches the paintings, not even the curator, not even on a Sunday night. " * 3
SMALL_POOL = ("--kv-memory", "64KiB")
"""128 blocks, of which pins may hold 64."""


def block_tokens(text: str) -> int:
    """Tokens of the full blocks of a text, a byte each."""
    return len(text) // 16 * 16


def ask(client: Client, prompt: str) -> tuple[int, int, int]:
    """Ask, compare with the oracle; cached, restored and recomputed tokens."""
    answer = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == expected_tokens(prompt.encode(), 8)
    usage = answer.usage
    return usage.cached_tokens, usage.restored_tokens, usage.recomputed_tokens


def pins(client: Client) -> dict[str, dict[str, Any]]:
    return {pin["name"]: pin for pin in client.prefixes()["pins"]}


def kvd(process: DaemonProcess, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """A client command against the daemon; ``text`` is its standard input."""
    command = [sys.executable, "-m", "kvd", *arguments, "--connect", process.endpoint]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)


def test_a_pin_takes_the_place_of_the_one_of_its_name(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", RULES)
            assert client.status()["blocks"]["pinned"] == len(RULES) // 16
            replaced = client.pin("rules", OTHER)
            assert replaced.details["tokens"] == block_tokens(OTHER)
            assert client.status()["blocks"]["pinned"] == len(OTHER) // 16
            assert {name: pin["tokens"] for name, pin in pins(client).items()} == {"rules": block_tokens(OTHER)}
        process.kill()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            assert {name: (pin["tokens"], pin["state"]) for name, pin in pins(client).items()} == {"rules": (block_tokens(OTHER), "held")}
            assert ask(client, OTHER + "?") == (block_tokens(OTHER), block_tokens(OTHER), 0)


def test_what_can_not_be_pinned_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, *SMALL_POOL) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", RULES)
            before = client.status()["blocks"]["pinned"]
            allocated = client.stats()["cache"]["allocations"]
            too_large = kvd(process, "pin", "large", "--prompt-file", "-", text="y" * 16 * 50)
            assert too_large.returncode == 73, too_large.stderr
            assert all(number in too_large.stderr for number in ("50 further blocks", f"{before} of at most 64"))
            assert client.stats()["cache"]["allocations"] == allocated, "it was refused before anything was computed"
            too_short = kvd(process, "pin", "short", "--prompt-file", "-", text="z" * 15)
            assert too_short.returncode == 65, too_short.stderr
            assert all(number in too_short.stderr for number in ("15 tokens", "16"))
            unknown = kvd(process, "unpin", "nobody")
            assert unknown.returncode == 66, unknown.stderr
            assert set(pins(client)) == {"rules"}
            assert client.status()["blocks"]["pinned"] == before
            # a pin's own blocks make room for what replaces it, and shared ones are counted once
            assert client.pin("rules", "y" * 16 * 60).details["blocks"] == 60
            assert client.pin("again", "y" * 16 * 60 + "w" * 16 * 4).details["blocks"] == 64
            with pytest.raises(errors.PinCapacity):
                client.pin("more", "y" * 16 * 60 + "v" * 16)


def test_an_unpinned_prefix_is_gone_after_a_kill(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", RULES)
            client.pin("other", OTHER)
            client.unpin("rules")
        process.kill()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            assert set(pins(client)) == {"other"}
            assert client.status()["blocks"]["pinned"] == len(OTHER) // 16


def test_a_recipe_that_can_not_be_written_is_no_pin(tmp_path: Path) -> None:
    """Neither a new one, nor one that was to replace another: that stays as it was."""
    with DaemonProcess(tmp_path, env={"KVD_FAILPOINTS": "recipes.before_sync=raise@2"}) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", RULES)
            with pytest.raises(errors.StorageError) as refused:
                client.pin("rules", OTHER)
            assert "could not be written" in str(refused.value)
            assert {name: (pin["tokens"], pin["state"]) for name, pin in pins(client).items()} == {"rules": (block_tokens(RULES), "held")}
            assert client.status()["blocks"]["pinned"] == len(RULES) // 16
        process.kill()
    with DaemonProcess(tmp_path, env={"KVD_FAILPOINTS": "recipes.before_rename=raise"}) as process:
        process.wait_ready()
        refused_by_command = kvd(process, "pin", "other", "--prompt-file", "-", text=OTHER)
        assert refused_by_command.returncode == 74, refused_by_command.stderr
        with process.client() as client:
            assert {name: pin["tokens"] for name, pin in pins(client).items()} == {"rules": block_tokens(RULES)}
            assert client.status()["blocks"]["pinned"] == len(RULES) // 16
            assert client.pin("other", OTHER).details["durable"] == "recipe+bytes", "the next attempt is a new file"
        assert process.terminate() == 0


def test_a_failing_store_leaves_a_pin_its_recipe(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, env={"KVD_FAILPOINTS": "store.before_commit=raise"}) as process:
        process.wait_ready()
        with process.client() as client:
            assert client.pin("rules", RULES).details["durable"] == "recipe"
            assert ask(client, RULES + "?")[0] == block_tokens(RULES)
        process.kill()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            assert pins(client)["rules"]["state"] == "held"
            cached, restored, recomputed = ask(client, RULES + "?")
            assert cached == block_tokens(RULES) == restored + recomputed


def test_without_persistence_pins_are_kept_as_recipes(tmp_path: Path) -> None:
    for life in range(2):
        with DaemonProcess(tmp_path, "--no-persist") as process:
            process.wait_ready()
            with process.client() as client:
                if life == 0:
                    assert client.pin("rules", RULES).details["durable"] == "recipe"
                    ask(client, OTHER + "!")
                    ask(client, OTHER + "!!")
                else:
                    assert ask(client, OTHER + "?") == (0, 0, 0)
                    assert ask(client, RULES + "?") == (block_tokens(RULES), 0, block_tokens(RULES))
                store = client.status()["store"]
                assert (store["blocks"], store["reason"]) == (0, "off")
                with pytest.raises(errors.StorageError):
                    client.checkpoint()
                assert pins(client)["rules"]["residency"] == "memory"
            process.kill()
        assert not (tmp_path / "state" / "wal").exists()
        assert not (tmp_path / "state" / "kv").exists()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.checkpoint()
        process.kill()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            assert ask(client, RULES + "?") == (block_tokens(RULES), block_tokens(RULES), 0)
        assert process.terminate() == 0


def test_restored_and_recomputed_tokens_count_at_their_first_use(tmp_path: Path) -> None:
    """Each block is told once, to whom it first serves; holding it for a pin, or computing on from it, is no use."""
    half = RULES[: block_tokens(RULES) // 2 // 16 * 16]
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", RULES)
            client.pin("other", OTHER)
        process.kill()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("longer", RULES + "And these words are new, and make another block or two.")
            assert ask(client, half + "?") == (len(half), len(half), 0)
            # the tokens behind the last whole block stand in one of the longer pin's
            assert ask(client, RULES + "?") == (len(RULES), block_tokens(RULES) - len(half), 0)
            assert ask(client, RULES + "?!") == (len(RULES + "?"), 0, 0)  # and that of the answer before
            answer = client.generate(OTHER + "?", n=2, seed=1, max_tokens=2, ignore_eos=True)
            assert answer.usage.restored_tokens == answer.usage.cached_tokens == block_tokens(OTHER)
        process.kill()
    for directory in ("kv", "wal"):
        (tmp_path / "state" / directory).rename(tmp_path / directory)
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            assert ask(client, half + "?") == (len(half), 0, len(half))
            assert ask(client, RULES + "?") == (len(RULES), 0, len(RULES) - len(half))
            assert ask(client, RULES + "?!") == (len(RULES + "?"), 0, 0)  # and that of the answer before
        assert process.terminate() == 0


def test_a_pin_outlives_lives_that_have_no_room_for_it(tmp_path: Path) -> None:
    """In a smaller pool the pins of higher priority are held, the others say what they lack; with room again, all are back from disk."""
    large = "A very long rule, longer than all the others taken together, word for word. " * 12
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", RULES, priority=60)
            client.pin("large", large, priority=70)
            client.pin("other", OTHER, priority=10)
        process.kill()
    with DaemonProcess(tmp_path, "--kv-memory", "40KiB") as process:
        process.wait_ready()
        with process.client() as client:
            found = pins(client)
            assert {name: pin["state"] for name, pin in found.items()} == {"rules": "held", "large": "not_held", "other": "held"}
            assert all(number in found["large"]["reason"] for number in (f"{len(large) // 16} further blocks", "of at most 40"))
            assert found["large"]["tokens"] == block_tokens(large)
            assert ask(client, RULES + "?") == (block_tokens(RULES), block_tokens(RULES), 0)
        process.kill()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            assert {pin["state"] for pin in pins(client).values()} == {"held"}
            assert ask(client, large + "?") == (block_tokens(large), block_tokens(large), 0)
        assert process.terminate() == 0


def test_after_three_failed_starts_pins_wait_for_a_good_one(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", RULES)
        assert process.terminate() == 0
    (tmp_path / "state" / "starting").write_text("3 1\n")
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            pin = pins(client)["rules"]
            assert (pin["state"], pin["tokens"]) == ("not_held", block_tokens(RULES))
            assert "3 starts" in pin["reason"]
            rehydration = client.status()["rehydration"]
            assert rehydration["recompute_pins"] is False
            assert (rehydration["pins_pending"], rehydration["pins_not_held"]) == (0, 1)
            assert ask(client, RULES + "?") == (0, 0, 0)
            assert client.pin("rules", RULES).details["durable"] == "recipe+bytes"
            assert pins(client)["rules"]["state"] == "held"
            assert client.status()["rehydration"]["pins_not_held"] == 0
        process.kill()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            assert ask(client, RULES + "?") == (block_tokens(RULES), block_tokens(RULES), 0)
        assert process.terminate() == 0


def test_a_pin_under_a_salt_serves_its_tenant_alone(tmp_path: Path) -> None:
    options: Any = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    expected = expected_tokens((RULES + "?").encode(), 8)
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", RULES, cache_salt=b"tenant")
        process.kill()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            stranger = client.generate(RULES + "?", **options)
            tenant = client.generate(RULES + "?", cache_salt=b"tenant", **options)
            assert stranger.usage.cached_tokens == 0
            assert tenant.usage.restored_tokens == block_tokens(RULES)
            assert list(stranger.token_ids) == list(tenant.token_ids) == expected
        assert process.terminate() == 0


def test_a_life_without_persistence_leaves_the_store_as_it_is(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("rules", RULES)
        process.kill()
    with DaemonProcess(tmp_path, "--no-persist") as process:
        process.wait_ready()
        with process.client() as client:
            assert ask(client, RULES + "?") == (block_tokens(RULES), 0, block_tokens(RULES))
            client.pin("rules", OTHER)
            client.pin("second", RULES)
        process.kill()
    with DaemonProcess(tmp_path) as process:
        process.wait_ready()
        with process.client() as client:
            assert {name: pin["tokens"] for name, pin in pins(client).items()} == {
                "rules": block_tokens(OTHER),
                "second": block_tokens(RULES),
            }
            assert ask(client, RULES + "?") == (block_tokens(RULES), block_tokens(RULES), 0)
            assert ask(client, OTHER + "?") == (block_tokens(OTHER), 0, block_tokens(OTHER))
        assert process.terminate() == 0
