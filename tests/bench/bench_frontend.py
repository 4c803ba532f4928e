"""Thread or process for transport and text: what rendering and tokenising long chats does to running streams.

    python tests/bench/bench_frontend.py [--seconds 20] [--json FILE]

Eight streams decode on the default model; p99 of their inter-token latency is measured with nothing else going on, and with chats of about 8,000
tokens rendered and tokenised at ten a second (`tokenize` requests, so that no other engine work is added). Both frontends, interleaved; the ratio is the
figure of docs/decisions/0003-frontend-thread-or-process.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvd_client import Client

from kvd.cli import model_store
from kvd.cli.demo_run import Daemon, system_prompt

STREAMS = 8
CHAT_TOKENS = 8000
CHATS_PER_S = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200, help="Tokens of each stream in a phase.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = [(frontend, *measure(frontend, options.tokens)) for _ in range(options.rounds) for frontend in ("thread", "process")]
    result = {}
    for frontend in ("thread", "process"):
        alone = sorted(a for name, a, _ in rounds if name == frontend)
        beside = sorted(b for name, _, b in rounds if name == frontend)
        ratios = sorted(b / a for name, a, b in rounds if name == frontend)
        result[frontend] = {"p99_ms_alone": alone, "p99_ms_beside_chats": beside, "ratio": ratios}
        middle = len(ratios) // 2
        print(
            f"{frontend:8} p99 ITL alone {alone[middle]:.1f} ms, beside chats {beside[middle]:.1f} ms, ratios {[round(r, 2) for r in ratios]}"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(frontend: str, num_tokens: int) -> tuple[float, float]:
    """p99 inter-token latency in milliseconds of the eight streams: alone, and beside the chats."""
    root = Path(tempfile.mkdtemp(prefix="kvd-bench-"))
    arguments = ["--model", str(model_store.resolve_model("")), "--kv-memory", "512MiB", "--frontend", frontend]
    daemon = Daemon(root / "state", root / "log", arguments, None)
    try:
        with Client(daemon.endpoint, timeout_s=600) as client, Client(daemon.endpoint, timeout_s=600) as other:
            daemon.wait_ready(client)
            chat = [
                {"role": "user", "content": _text_of(other, CHAT_TOKENS)},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": "Go on."},
            ]
            p99(client, 20)
            alone = p99(client, num_tokens)
            stop = threading.Event()
            asking = threading.Thread(target=ask_at_rate, args=(other, chat, stop))
            asking.start()
            beside = p99(client, num_tokens)
            stop.set()
            asking.join()
    finally:
        daemon.kill()
        shutil.rmtree(root, ignore_errors=True)
    return alone, beside


def _text_of(client: Client, num_tokens: int) -> str:
    text = system_prompt(1, num_tokens // 14)
    have = len(client.tokenize(text))
    return system_prompt(1, num_tokens // 14 * num_tokens // have)


def ask_at_rate(client: Client, chat: list[dict[str, str]], stop: threading.Event) -> None:
    """Ten chats a second, whether or not the earlier ones are answered."""
    with ThreadPoolExecutor(16) as pool:
        next_s = time.monotonic()
        while not stop.is_set():
            pool.submit(client.tokenize, messages=chat)
            next_s += 1 / CHATS_PER_S
            time.sleep(max(0.0, next_s - time.monotonic()))


def p99(client: Client, num_tokens: int) -> float:
    def gaps(number: int) -> list[float]:
        times = [
            time.perf_counter()
            for _ in client.generate(f"Story {number}.", stream=True, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, text=False)
        ]
        return [later - earlier for earlier, later in itertools.pairwise(times[4:])]

    with ThreadPoolExecutor(STREAMS) as pool:
        waits = sorted(gap for stream in pool.map(gaps, range(STREAMS)) for gap in stream)
    return waits[int(len(waits) * 0.99)] * 1000


if __name__ == "__main__":
    main()
