"""From exec to READY and to the first token of a pinned prompt, after SIGKILL, with what the start spent its time on and the memory that it took.

    python tests/bench/bench_startup.py [--starts 7] [--kv-memory 512MiB] [--model FILE] [--json FILE]

A daemon pins a system prompt of some 1,500 tokens. Then, as often as asked: SIGKILL, start, wait for READY, one chat on the prompt whose whole blocks must have come
from disk. Times are those of a client that was there before; the breakdown is the line that the daemon logs at READY, its parts partly beside each other.
``peak_unshared_mib`` is RssAnon + RssShmem at their most until the answer was there. Medians and ranges. Run it on a quiet machine: nearly all of a start is one
thread's imports.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from daemon_process import DaemonProcess
from peak_memory import PeakMemory

from kvd.bench.machine import machine, today

SENTENCE = "Rule {}: the customer must confirm the order number before closing the conversation."
SYSTEM = "You are a careful assistant. " + " ".join(SENTENCE.format(number) for number in range(88))
MEMORY = ("VmHWM", "RssAnon", "RssShmem")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--kv-memory", default="512MiB")
    parser.add_argument("--model", default="", help="the default model without it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    flags = ["--kv-memory", arguments.kv_memory, *(["--model", arguments.model] if arguments.model else [])]
    with tempfile.TemporaryDirectory(prefix="kvd-start-") as folder:
        root = Path(folder)
        _prepare(root, flags)
        starts = [_start(root, flags, number) for number in range(arguments.starts)]
    names = list(dict.fromkeys(name for start in starts for name in start))
    print(f"{machine()}; {today()}; pool {arguments.kv_memory}; {len(starts)} starts after SIGKILL")
    for name in names:
        values = [start[name] for start in starts if name in start]
        print(f"{name:24} {median(values):10.3f}   {min(values):.3f} to {max(values):.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "kv_memory": arguments.kv_memory, "starts": starts}, indent=1))
    return 0


def _prepare(root: Path, flags: list[str]) -> None:
    with DaemonProcess(root, *flags, fake=False) as daemon:
        daemon.wait_ready()
        with daemon.client() as client:
            pinned = client.pin("support", messages=[{"role": "system", "content": SYSTEM}])
            assert pinned.details["durable"] == "recipe+bytes", pinned
            client.chat(_question(0), max_tokens=1, temperature=0.0)
        daemon.kill()


def _start(root: Path, flags: list[str], number: int) -> dict[str, float]:
    """One start and its first answer; seconds and MiB by name."""
    with DaemonProcess(root, *flags, fake=False) as daemon, PeakMemory(lambda: daemon.process.pid) as peak:
        ready_s = daemon.wait_ready()
        with daemon.client() as client:
            stream = client.chat(_question(number), stream=True, max_tokens=8, temperature=0.0)
            next(stream)
            first_token_s = time.monotonic() - daemon.started_s
            for _ in stream:
                pass
            usage = stream.completion.usage
            assert usage.restored_tokens >= usage.prompt_tokens - 64, usage
        memory = {"peak_unshared_mib": peak.peak_bytes / 2**20, **_memory(daemon.process.pid)}
        record = next(record for record in map(_json, daemon.log().splitlines()) if record.get("event") == "ready")
        daemon.kill()
    parts = {name: value for name, value in record.items() if name.endswith("_s")}
    return {"ready": ready_s, "first_token": first_token_s, **parts, **memory}


def _question(number: int) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What does rule {number} say?"}]


def _json(line: str) -> dict[str, Any]:
    return json.loads(line) if line.startswith("{") else {}


def _memory(pid: int) -> dict[str, float]:
    """What the process has now, and the most that it had with files' pages counted."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {f"{name}_mib": int(fields[name].split()[0]) / 1024 for name in MEMORY}


if __name__ == "__main__":
    sys.exit(main())
