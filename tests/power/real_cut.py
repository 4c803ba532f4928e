"""One real power cut: ``real_cut.py FOLDER SEED instant|any``, as root in a mount and process namespace of its own (``test_real_cuts.py`` makes them).

A real daemon works on an ext4 file system of its own on a loop device. The file system is shut down without writing anything more (EXT4_IOC_SHUTDOWN), which is
what a power cut leaves: only what the device had got. Then the daemon is killed, the file system is mounted again (its journal is replayed), and a second daemon is
held to what had been promised. Prints one line of JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from daemon_process import DaemonProcess
from fake_oracle import expected_tokens
from kvd_client import Client, KvdError

from kvd.storage.tools import check_store

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
DISK_BYTES = 96 << 20
FLAGS = (
    "--store-max-bytes",
    "48MiB",
    "--wal-segment-bytes",
    "64KiB",
    "--wal-max-bytes",
    "1MiB",
    "--kv-memory",
    "4MiB",
    "--checkpoint-interval-s",
    "0.1",
)
WORDS = ("rules", "ledger", "curator", "tour", "visitor", "painting", "signs", "never")
BLOCK = 16


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


UNSYNCED = b"never synced" * 512


def shut_down(mounted: Path) -> None:
    (mounted / "unsynced").write_bytes(UNSYNCED)
    fd = os.open(mounted, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    finally:
        os.close(fd)


class Work:
    """Pins, unpins and prompts by one client. ``pins`` is what may be found of each: its text, or None for no such pin."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pins: dict[str, set[str | None]] = {}
        self.num_acknowledged = 0

    def step(self, client: Client) -> None:
        name = f"pin-{self.rng.randrange(5)}"
        kind = self.rng.random()
        if kind < 0.2 and None not in self.pins.get(name, {None}):
            self._change(name, None, lambda: client.unpin(name))
        elif kind < 0.7:
            text = " ".join(self.rng.choices(WORDS, k=self.rng.randint(4, 60)))
            self._change(name, text, lambda: client.pin(name, text))
        else:
            client.generate("the house says " + " ".join(self.rng.choices(WORDS[:2], k=12)), max_tokens=2, temperature=0.0, ignore_eos=True)

    def _change(self, name: str, text: str | None, call) -> None:
        self.pins[name] = self.pins.get(name, {None}) | {text}
        call()
        self.pins[name] = {text}
        self.num_acknowledged += 1


def main(folder: Path, seed: int, moment: str) -> None:
    rng = random.Random(seed)
    image, root = folder / "disk", folder / "root"
    mounted = root / "state"
    mounted.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    run("mkfs.ext4", "-q", "-F", image)
    run("mount", "-o", "loop", image, mounted)
    work = Work(rng)
    process = DaemonProcess(root, *FLAGS)
    process.wait_ready()
    with process.client(timeout_s=8) as client:
        if moment == "instant":
            for _ in range(rng.randint(0, 15)):
                work.step(client)
            text = " ".join(rng.choices(WORDS, k=rng.randint(4, 60)))
            work.pins["last"] = {text}
            client.pin("last", text)
            shut_down(mounted)
            possible = work.pins
        else:
            over = threading.Event()

            def go_on() -> None:
                try:
                    while not over.is_set():
                        work.step(client)
                except KvdError:
                    assert over.is_set()

            worker = threading.Thread(target=go_on)
            worker.start()
            time.sleep(rng.uniform(0.05, 1.5))
            over.set()
            possible = {name: set(texts) for name, texts in list(work.pins.items())}
            shut_down(mounted)
            # what the worker began meanwhile may be there as well
            process.kill()
            worker.join()
            for name, texts in work.pins.items():
                possible[name] = possible.get(name, {None}) | texts
    if process.process.poll() is None:
        process.kill()
    run("umount", mounted)
    run("mount", "-o", "loop", image, mounted)
    left = mounted / "unsynced"
    assert not left.exists() or left.read_bytes() != UNSYNCED, "this was no power cut"
    left.unlink(missing_ok=True)
    print(json.dumps({"acknowledged": work.num_acknowledged, "wrong": check(root, possible)}))
    run("umount", mounted)


def check(root: Path, possible: dict[str, set[str | None]]) -> list[str]:
    wrong = []
    with DaemonProcess(root, *FLAGS) as process:
        process.wait_ready()
        with process.client() as client:
            found = {pin["name"]: pin for pin in client.prefixes()["pins"]}
            wrong += [f"{name}: {pin['state']}" for name, pin in found.items() if pin["state"] != "held" or name not in possible]
            for name, texts in possible.items():
                if name not in found:
                    wrong += [] if None in texts else [f"{name} is lost"]
                    continue
                num_tokens = found[name]["tokens"]
                held = [text for text in texts if text is not None and len(text) // BLOCK * BLOCK == num_tokens]
                cached = [client.generate(text + " pinned?", max_tokens=1, temperature=0.0).usage.cached_tokens for text in held]
                if not any(each >= num_tokens for each in cached):
                    wrong.append(f"{name} holds {num_tokens} tokens of something else")
                for text in held:
                    answer = client.generate(text + " say", max_tokens=8, temperature=0.0, ignore_eos=True)
                    if list(answer.token_ids) != expected_tokens((text + " say").encode(), 8):
                        wrong.append(f"{name}: a wrong token")
            store = client.status()["store"]
            if store["damage"] or store["degraded"]:
                wrong.append(f"damage: {store['damage']} {store['reason']}")
        if process.terminate():
            wrong.append("the second daemon did not end well")
    report = check_store(root / "state")
    return wrong + report["problems"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
