"""A real daemon with a key file: killed, restarted, restored, with nothing of what it was told in clear on disk; and the starts that are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import DaemonDiedError, DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client

pytestmark = [pytest.mark.e2e, pytest.mark.socket, pytest.mark.store]

RULES = "Every visitor signs the ledger before the tour begins, be it morning or noon. " * 4
CHAT = [{"role": "system", "content": "Whoever asks about the vault is told of the weather in Lisbon instead, every single time. " * 3}]
STORY = "The lighthouse keeper counted seven ships, and wrote an eighth into the book for luck. " * 4
SECRETS = {
    "tokens": b"".join(byte.to_bytes(4, "little") for byte in STORY[:16].encode()),
    "tokens of the pin": b"".join(byte.to_bytes(4, "little") for byte in RULES[:24].encode()),
    "text of the pin": RULES[:40].encode(),
    "messages": b"weather in Lisbon",
    "name": b"museum-rules",
}


def keygen(path: Path) -> str:
    subprocess.run([sys.executable, "-m", "kvd", "store", "keygen", str(path)], check=True, timeout=60)
    return str(path)


def ask(client: Client, text: str) -> tuple[int, int]:
    answer = client.generate(text, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == expected_tokens(text.encode(), 8)
    return answer.usage.cached_tokens, answer.usage.restored_tokens


def standing(state: Path) -> set[str]:
    """Which of the secrets stand in a file, or in a name."""
    everything = [path.read_bytes() for path in state.rglob("*") if path.is_file()] + ["\n".join(map(str, state.rglob("*"))).encode()]
    return {what for what, secret in SECRETS.items() if any(secret in data for data in everything)}


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "encrypted"])
def test_a_killed_daemon_comes_back_warm_and_nothing_stands_in_clear(tmp_path: Path, is_sealed: bool) -> None:
    options = ("--store-encryption-key-file", keygen(tmp_path / "master.key")) if is_sealed else ()
    expected = set() if is_sealed else set(SECRETS)
    with DaemonProcess(tmp_path, *options) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("museum-rules", RULES)
            client.pin("weather", messages=CHAT)
            for _ in range(2):
                ask(client, STORY)
            client.checkpoint()
            ask(client, "known to the log alone " * 4)
        process.kill()
    assert standing(process.state_dir) == expected
    with DaemonProcess(tmp_path, *options) as process:
        process.wait_ready()
        with process.client() as client:
            assert {pin["name"] for pin in client.prefixes()["pins"] if pin["state"] == "held"} == {"museum-rules", "weather"}
            whole = len(RULES) // 16 * 16
            assert ask(client, RULES + "?") == (whole, whole)
            cached, restored = ask(client, STORY)
            assert cached == restored > 300
        assert process.terminate() == 0
    assert standing(process.state_dir) == expected
    modes = {str(path): path.stat().st_mode & 0o077 for path in [process.state_dir, *process.state_dir.rglob("*")]}
    assert not any(modes.values()), modes


def test_a_key_that_is_missing_or_wrong_is_exit_78_and_costs_nothing(tmp_path: Path) -> None:
    key, other = keygen(tmp_path / "master.key"), keygen(tmp_path / "other.key")
    flag = "--store-encryption-key-file"
    with DaemonProcess(tmp_path, flag, key) as process:
        process.wait_ready()
        with process.client() as client:
            client.pin("museum-rules", RULES)
        assert process.terminate() == 0
    for options, says in (
        ((), "is encrypted; store_encryption_key_file must name"),
        ((flag, other), "this is not the key that the state directory is encrypted with"),
        ((flag, str(tmp_path / "none.key")), "No such file"),
    ):
        with DaemonProcess(tmp_path, *options) as process:
            with pytest.raises(DaemonDiedError):
                process.wait_ready()
            assert process.wait_dead() == 78
            assert says in process.log()
            assert (tmp_path / "master.key").read_text().strip() not in process.log()
    with DaemonProcess(tmp_path, flag, key) as process:
        process.wait_ready()
        with process.client() as client:
            assert client.status()["store"]["damage"] == []
            assert ask(client, RULES + "?")[1] > 0
