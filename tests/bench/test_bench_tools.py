"""The tools that make pages: what they start by default, what they judge, and steps that are noted by a real daemon."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import bench_budgets
import bench_peers_table
import pytest
from kvd_client.errors import KvdError
from neighbour import busy_neighbour, processor_s
from peak_memory import PeakMemory
from timed_serve import STEP, read_gaps

from kvd.bench.build import build
from kvd.bench.generation import PARTS, generation_plan
from kvd.bench.measuring import Ask
from kvd.bench.plan import HEADLINE
from kvd.bench.results import Result
from kvd.bench.sharing_server import SharingServer
from kvd.bench.sweeps import KINDS, Sweep

pytestmark = pytest.mark.e2e


def parsed(*arguments):
    return bench_peers_table.parsed(["--out", "x.json", *arguments])


def test_the_weights_of_bfloat16_rows_are_not_quantised_ones():
    assert "--weights dequantised" in parsed().serve
    assert "--weights" not in parsed().serve_quantised


def test_each_of_our_targets_tells_its_command_without_a_folder(tmp_path):
    options = parsed("--peer-quantised", "llama=http://127.0.0.1:1")
    bench_peers_table.start_ourselves(options, tmp_path)
    for name in ("kvd", "kvd-gateway", "kvd-q41"):
        target = bench_peers_table.target_of(name, f"ipc://{tmp_path}/s.sock", options, tmp_path)
        assert target.command.startswith("kvd serve --")
        assert str(tmp_path) not in target.command
        assert target.launched is not None


def test_the_table_judges_memory_of_the_daemons():
    options = parsed("--peer", "vllm=http://127.0.0.1:1", "--peer-quantised", "llama=http://127.0.0.1:2")
    judged = {heading.split(" ")[0]: [claim.metric for claim in claims] for heading, claims in bench_peers_table.sections(options).items()}
    assert [name for name, metrics in judged.items() if "peak_memory_gib" in metrics] == ["kvd", "kvd-q41"]


def test_block_sizes_are_swept_with_the_same_kernels(tmp_path):
    async def commands():
        return [target.command for target in await closed(Sweep("block-size", (8, 16), (), tmp_path, 1000, 64, 8).targets)]

    assert all("--kernels torch" in command for command in asyncio.run(commands()))


async def closed(make):
    """Targets, made within a loop, whose clients are closed."""
    targets = make()
    for target in targets:
        await target.server.aclose()
    return targets


@pytest.mark.parametrize("kind", KINDS)
def test_every_sweep_has_targets_and_figures(kind, tmp_path):
    sweep = Sweep(kind, KINDS[kind].values[:1], (), tmp_path, 100, 8, 2)
    targets = asyncio.run(closed(sweep.targets))
    assert len({target.name for target in targets}) == len(targets) >= 1
    assert all(entry.point.scenario in HEADLINE for entry in sweep.entries())


def test_the_plan_of_the_generation_features_has_a_daemon_for_all_modes_and_for_all_widths(tmp_path):
    options = {"arriving_tokens": 4000, "output_tokens": 64, "streams": 8, "draft_model": "small"}

    async def planned():
        targets, entries = generation_plan(PARTS, ("--executor", "fake"), tmp_path, rounds=4, **options)
        return await closed(lambda: targets), entries

    targets, entries = asyncio.run(planned())
    assert [target.name for target in targets if target.launched is targets[0].launched] == ["off", "ngram", "auto", "draft"]
    assert len({id(target.launched) for target in targets}) == 1 + 3 + 1
    assert {entry.point.scenario: entry.rounds for entry in entries} == {"repetitive": 4, "random": 4, "arriving": 2, "shared-prefix": 2}
    commands = {target.name: target.command for target in targets}
    assert "--draft-model small" in commands["off"]
    assert int(commands["unchunked"].split("--max-tokens-per-step ")[1]) > 4000 + 8
    assert commands["bound-200"].endswith("--max-inter-token-ms 200")


def test_the_build_is_the_code():
    assert build() == build() == Result.begun(0).facts["build"]


def test_a_poll_that_failed_leaves_no_figure(tmp_path):
    class Client:
        async def status(self):
            raise KvdError("gone", code="unavailable")

        async def aclose(self):
            pass

    class Slow(SharingServer):
        async def _stream(self, ask, cache_salt):
            await asyncio.sleep(0.01)
            return await asyncio.sleep(0, "an answer")

    async def both():
        server = Slow(f"ipc://{tmp_path}/none.sock", "copy-on-write")
        await server.aclose()
        server._client = Client()
        assert await server.ask(Ask([], 1)) == "an answer"
        return await server.figures()

    assert asyncio.run(both()) == {}


def test_only_gaps_within_a_stream_count(tmp_path):
    steps = [(0.0, 1.0, False), (1.25, 2.0, True), (5.0, 6.0, False), (6.5, 7.0, True)]
    (tmp_path / "steps").write_bytes(b"".join(STEP.pack(*step) for step in steps))
    assert read_gaps(tmp_path / "steps") == [0.25, 0.5]


def test_a_neighbour_takes_time_only_while_it_runs():
    with busy_neighbour() as neighbour:
        with neighbour.running() as taken:
            sum(range(10_000_000))
        assert taken.share > 0
        before_s = processor_s(neighbour.pid)
        sum(range(3_000_000))
        assert processor_s(neighbour.pid) <= before_s + 0.01


def test_the_peak_is_of_the_whole_tree():
    code = "import subprocess, sys; held = bytearray(b'x') * (40 << 20); subprocess.run([sys.executable, '-c', \"held = bytearray(b'x') * (40 << 20)\\nimport sys; sys.stdin.read()\"])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process, PeakMemory(lambda: process.pid) as memory:
        until_s = time.monotonic() + 60
        while memory.peak_bytes <= 80 << 20 and time.monotonic() < until_s:
            time.sleep(0.01)
        process.communicate()  # the end of its input
    assert memory.peak_bytes > 80 << 20


def test_a_daemon_is_held_against_its_budgets(tmp_path):
    tool = Path(bench_budgets.__file__)
    serve = "--executor fake --fake-step-ms 2 --kv-memory 64MiB"
    arguments = ["--serve", serve, "--rounds", "1", "--tokens", "96", "--prompt-tokens", "600", "--idle", "0.5"]
    files = ["--json", str(tmp_path / "found.json"), "--out", str(tmp_path / "page.md")]
    done = subprocess.run([sys.executable, tool, *arguments, *files], capture_output=True, text=True, timeout=120, check=False)
    assert (tmp_path / "found.json").exists(), done.stderr
    found = {each["what"].split(",")[0].split(":")[0]: each for each in json.loads((tmp_path / "found.json").read_text())["found"]}
    assert {"peak RssAnon + RssShmem until ready", "gap between two steps"} <= found.keys(), done.stderr
    assert 0 < found["peak RssAnon + RssShmem until ready"]["value"] < 1.2
    assert 0 < found["gap between two steps"]["value"] < 50
    assert done.returncode == int(any(each["holds"] is False for each in json.loads((tmp_path / "found.json").read_text())["found"]))
    assert f"`kvd serve {serve}`" in (tmp_path / "page.md").read_text()
