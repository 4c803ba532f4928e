"""Inter-token latency of 8 streams while long chats are rendered and tokenised, against none: the figures behind ``frontend``'s default.

    python tests/bench/bench_frontend.py [--model PATH] [--repeats 3] [--tokens 192] [--chat-tokens 8000] [--rate 10] [--json FILE]

For each mode a daemon of its own on the real model; in it, runs without and with the load alternate, so that both meet the same machine. The load
comes from a process of its own, through ``tokenize``: it renders and tokenises as a ``chat`` does, and nothing of it reaches the engine. Run it on a
quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from kvd_client import Client

NUM_STREAMS = 8
MODES = ("thread", "process")
WORDS = "the quick brown fox jumps over the lazy dog and writes 12 letters to Grüße street while nobody is watching "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--chat-tokens", type=int, default=8000)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        make_load(arguments.load, arguments.chat_tokens, arguments.rate)
        return
    report = {
        "load_average_before": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "modes": {mode: measure(mode, arguments) for mode in MODES},
    }
    for mode, figures in report["modes"].items():
        print(
            f"{mode:8} p99 {figures['p99_ms_alone']:7.2f} ms alone {figures['p99_ms_loaded']:7.2f} ms loaded, ratio {figures['p99_ratio']:.2f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


def measure(mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as root:
        endpoint = f"ipc://{root}/s.sock"
        model = ["--model", arguments.model] if arguments.model else []
        serve = [sys.executable, "-m", "kvd", "serve", *model, "--state-dir", f"{root}/state", "--listen", endpoint, "--frontend", mode]
        daemon = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with Client(endpoint, timeout_s=600) as client:
                client.wait_ready(timeout_s=300)
                run_streams(client, arguments.tokens)
                alone, loaded = [], []
                for _ in range(arguments.repeats):
                    alone.append(run_streams(client, arguments.tokens))
                    loaded.append(run_loaded(client, endpoint, arguments))
        finally:
            daemon.terminate()
            daemon.wait(60)
    return {
        **summary("alone", alone),
        **summary("loaded", loaded),
        "p99_ratio": statistics.median(percentile(run, 0.99) for run in loaded) / statistics.median(percentile(run, 0.99) for run in alone),
    }


def run_loaded(client: Client, endpoint: str, arguments: argparse.Namespace) -> list[float]:
    command = [sys.executable, __file__, "--load", endpoint, "--chat-tokens", str(arguments.chat_tokens), "--rate", str(arguments.rate)]
    load = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert load.stdout is not None
        load.stdout.readline()
        return run_streams(client, arguments.tokens)
    finally:
        load.kill()
        load.wait()


def run_streams(client: Client, num_tokens: int) -> list[float]:
    """Seconds between the tokens of each of the streams, once all of them are past their first token."""
    arrivals: list[list[float]] = [[] for _ in range(NUM_STREAMS)]

    def follow(index: int) -> None:
        for _ in client.generate(f"{index} bottles of", stream=True, max_tokens=num_tokens, temperature=0, ignore_eos=True):
            arrivals[index].append(time.perf_counter())

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    return [later - earlier for times in arrivals for earlier, later in itertools.pairwise(times) if begin <= earlier and later <= end]


def make_load(endpoint: str, chat_tokens: int, rate: float) -> None:
    """Chats of about so many tokens at a steady rate, whether or not the last one is answered, until killed."""
    with Client(endpoint, timeout_s=600) as client:
        content = WORDS
        while len(client.tokenize(messages=[{"role": "user", "content": content}])) < chat_tokens:
            content += WORDS * 20
        print("ready", flush=True)
        due = time.monotonic()
        for number in range(1 << 30):
            chat = [{"role": "user", "content": f"{number} {content}"}]
            threading.Thread(target=client.tokenize, kwargs={"messages": chat}, daemon=True).start()
            due += 1 / rate
            time.sleep(max(0.0, due - time.monotonic()))


def summary(name: str, runs: list[list[float]]) -> dict[str, float]:
    return {f"p{round(q * 100)}_ms_{name}": round(statistics.median(percentile(run, q) for run in runs) * 1000, 3) for q in (0.5, 0.99)}


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


if __name__ == "__main__":
    main()
