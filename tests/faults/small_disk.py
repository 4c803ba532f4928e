"""A daemon on a real small disk, in a mount namespace of its own: ``small_disk.py SCENARIO ROOT``, where ROOT/state is a tmpfs of 48 MiB.

Prints what held, line by line; an assertion ends it.
"""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client, errors

ARGUMENTS = ("--checkpoint-interval-s", "0.1", "--store-max-bytes", "32MiB", "--wal-max-bytes", "2MiB", "--wal-segment-bytes", "64KiB")
BLOCKS = 20
SYSTEM = "The pinned rules of the house. ".ljust(16 * BLOCKS, "s")
MANY_BLOCKS = 1200


def ask(client: Client, prompt: str) -> int:
    """The right tokens; how many prompt tokens were restored from disk."""
    answer = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert list(answer.token_ids) == expected_tokens(prompt.encode(), 8)
    return answer.usage.restored_tokens


def ask_hot(client: Client, number: int, num_blocks: int = BLOCKS) -> None:
    prefix = f"prompt {number}. ".ljust(16 * num_blocks, "x")
    ask(client, prefix + " one")
    ask(client, prefix + " two")


def pin(client: Client, name: str, prompt: str) -> str:
    try:
        return str(client.pin(name, prompt).details["durable"])
    except errors.StorageError as error:
        return str(error)


def store(client: Client) -> dict:
    return client.status()["store"]


def until(client: Client, condition: Callable[[dict], object], timeout_s: float = 60.0) -> dict:
    end = time.monotonic() + timeout_s
    while not condition(status := store(client)):
        assert time.monotonic() < end, status
        time.sleep(0.02)
    return status


def fill(state_dir: Path) -> None:
    with (state_dir / "fill").open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC, error  # noqa: PT017


def pins_until_refused(client: Client, state_dir: Path) -> list[str]:
    """Pins that were acknowledged on a disk that is filled up again and again, for kvd itself gives room back, until one is refused."""
    kept = []
    while True:
        fill(state_dir)
        name = f"other-{len(kept)}"
        durable = pin(client, name, f"another pin {name} ".ljust(16 * BLOCKS, "o"))
        if durable not in {"recipe", "recipe+bytes"}:
            assert "enospc: the disk is full" in durable, durable
            return kept
        kept.append(name)
        assert len(kept) < 40


def first_life(root: Path) -> None:
    """A pin and a hot prefix on disk, ended by SIGKILL."""
    with DaemonProcess(root, *ARGUMENTS) as process:
        process.wait_ready()
        with process.client() as client:
            assert pin(client, "rules", SYSTEM) == "recipe+bytes"
            ask_hot(client, 0)
            until(client, lambda status: status["blocks"] >= 2 * BLOCKS)
        process.kill()


def check(root: Path, *pins: str) -> None:
    """A last start without a fault, and the check of what it leaves."""
    with DaemonProcess(root, *ARGUMENTS) as process:
        process.wait_ready()
        with process.client() as client:
            assert {each["name"]: each["state"] for each in client.prefixes()["pins"]} == dict.fromkeys(pins, "held")
            assert not store(client)["degraded"], store(client)
            assert ask(client, SYSTEM + "?") == 16 * BLOCKS
        assert process.terminate() == 0
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "store", "check", "--state-dir", str(root / "state")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def events(process: DaemonProcess, event: str) -> int:
    return process.log().count(f'"event": "{event}"')


def fills_up(root: Path) -> None:
    """The disk is full while the daemon serves, and has room again."""
    state_dir = root / "state"
    with DaemonProcess(root, *ARGUMENTS) as process:
        process.wait_ready()
        with process.client() as client:
            assert pin(client, "rules", SYSTEM) == "recipe+bytes"
            fill(state_dir)
            number = 0
            while not store(client)["degraded"]:
                number += 1
                assert number < 400
                ask_hot(client, number)
            status = until(client, lambda status: status["degraded"])
            assert status["reason"].startswith("enospc: the disk is full"), status
            kept = pins_until_refused(client, state_dir)
            for _ in range(20):  # several tries of log and store
                number += 1
                ask_hot(client, number)
                time.sleep(0.1)
                assert store(client)["degraded"]
            assert events(process, "storage.degraded") <= 1
            assert events(process, "wal.failed") <= 1
            assert events(process, "recipes.failed") == 1
            print("serves on a disk that fills up", flush=True)
            (state_dir / "fill").unlink()
            until(client, lambda status: not status["degraded"])
            assert pin(client, "after", "a pin after it ".ljust(16 * BLOCKS, "a")) == "recipe+bytes"
            assert events(process, "storage.resumed") == events(process, "storage.degraded")
            assert events(process, "wal.resumed") == events(process, "wal.failed")
            print("goes on when there is room", flush=True)
        process.kill()
    check(root, "rules", "after", *kept)


def starts_full(root: Path) -> None:
    """A start on a full disk uses what is there, and goes on in the same generation."""
    first_life(root)
    fill(root / "state")
    with DaemonProcess(root, *ARGUMENTS) as process:
        process.wait_ready()
        with process.client() as client:
            assert ask(client, SYSTEM + "?") == 16 * BLOCKS
            assert store(client)["blocks"] >= 2 * BLOCKS, store(client)
            kept = pins_until_refused(client, root / "state")
            status = until(client, lambda status: status["degraded"])
            assert status["reason"].startswith("enospc: "), status
            assert store(client)["blocks"] >= 2 * BLOCKS, store(client)
            print("starts warm on a full disk", flush=True)
            (root / "state" / "fill").unlink()
            assert pin(client, "after", "a pin after it ".ljust(16 * BLOCKS, "a")) in {"recipe", "recipe+bytes"}
            until(client, lambda status: not status["degraded"])
        process.kill()
    assert (root / "state" / "kv" / "1").is_dir()
    check(root, "rules", "after", *kept)


def starts_readonly(root: Path) -> None:
    """A start on a read-only disk uses what is there, and goes on in the same generation when it can be written."""
    first_life(root)
    subprocess.run(["mount", "-o", "remount,ro", str(root / "state")], check=True)
    with DaemonProcess(root, *ARGUMENTS) as process:
        process.wait_ready()
        with process.client() as client:
            status = store(client)
            assert status["degraded"]
            assert status["reason"].startswith("erofs: the file system is read-only"), status
            assert status["blocks"] >= 2 * BLOCKS, status
            assert ask(client, SYSTEM + "?") == 16 * BLOCKS
            ask_hot(client, 7)
            assert "erofs" in pin(client, "other", "another pin ".ljust(16 * BLOCKS, "o"))
            time.sleep(2)
            assert events(process, "storage.degraded") == 1
            assert store(client)["blocks"] >= 2 * BLOCKS
            print("starts warm on a read-only disk", flush=True)
            subprocess.run(["mount", "-o", "remount,rw", str(root / "state")], check=True)
            assert pin(client, "after", "a pin after it ".ljust(16 * BLOCKS, "a")) in {"recipe", "recipe+bytes"}
            until(client, lambda status: not status["degraded"])
            assert events(process, "storage.degraded") == events(process, "storage.resumed") == 1
        process.kill()
    assert (root / "state" / "kv" / "1").is_dir()
    check(root, "rules", "after")


def no_descriptors(root: Path) -> None:
    """The process has no descriptor left, and then has again; of itself it takes as many as it may.

    No client connects meanwhile: libzmq aborts the process when it can't accept an ipc connection, which is why the limit is raised at the start.
    """
    first_life(root)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with DaemonProcess(root, *ARGUMENTS) as process:
        process.wait_ready()
        with process.client() as client:
            ask_hot(client, 1)
            pid = process.process.pid
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            assert before[0] >= min(before[1], 65536) > 256, before
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(list(Path(f"/proc/{pid}/fd").iterdir())), before[1]))
            refused = pin(client, "other", "another pin ".ljust(16 * BLOCKS, "o"))
            assert "emfile: this process has no file descriptors left" in refused, refused
            for number in range(10):
                ask_hot(client, 10 + number)
            status = until(client, lambda status: status["degraded"])
            assert status["reason"].startswith("emfile: "), status
            print("serves without a descriptor", flush=True)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            assert pin(client, "after", "a pin after it ".ljust(16 * BLOCKS, "a")) == "recipe+bytes"
            until(client, lambda status: not status["degraded"])
            for _ in range(20):
                with process.client() as late:
                    ask(late, "late but answered")
        assert process.terminate() == 0
    check(root, "rules", "after")


if __name__ == "__main__":
    {"fills-up": fills_up, "starts-full": starts_full, "starts-readonly": starts_readonly, "no-descriptors": no_descriptors}[sys.argv[1]](
        Path(sys.argv[2])
    )
    print("healed", flush=True)
