"""``kvd bench`` as a user calls it, on real daemons with the fake executor and on the gateway."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from held_port import HeldPort

from kvd.cli.exits import Exit

pytestmark = pytest.mark.e2e

SMALL = ["--output-tokens", "8", "--requests", "4", "--prefix-tokens", "300", "--prompt-tokens", "400", "--warmup", "1", "--rounds", "2"]


def bench(*arguments, timeout=120, env=None):
    command = [sys.executable, "-m", "kvd", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **(env or {})})


@contextlib.contextmanager
def gateway(endpoint):
    with HeldPort() as port:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvd", "gateway", "--connect", endpoint, "--port", str(port.number)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield f"http://127.0.0.1:{port.number}"
        finally:
            process.kill()
            process.wait()


def test_a_daemon_and_its_gateway_in_turns(tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "out.svg"
    # steps take some time, or no two streams would run at once
    with DaemonProcess(tmp_path, "--fake-step-ms", "2") as daemon, gateway(daemon.endpoint) as url:
        daemon.wait_ready()
        scenarios = ["prefill", "decode", "shared-prefix", "prefix-hit", "mixed", "multi-turn"]
        targets = ["--compare", f"kvd={daemon.endpoint}", "--compare", f"gateway={url}", "--wait", "30"]
        done = bench("run", *scenarios, *targets, *SMALL, "--concurrency", "1,2", "--out", out, "--plot", plot, "--json")
        assert done.returncode == Exit.OK, done.stderr
        again = bench("run", *scenarios, *targets, *SMALL, "--concurrency", "1,2", "--out", out)
        pid = daemon.process.pid
    found = json.loads(done.stdout)
    assert {each["target"] for each in found["samples"]} == {"kvd", "gateway"}
    assert found["failures"] == []
    assert [each["metrics"] for each in json.loads(out.read_text())["samples"]] == [each["metrics"] for each in found["samples"]]
    for key in {each["key"] for each in found["samples"] if each["point"]["scenario"] != "multi-turn"}:
        counts = [
            [request["prompt_tokens"] for request in each["requests"]]
            for each in found["samples"]
            if each["key"] == key and each["round"] == 0
        ]
        assert counts[0] == counts[1], key  # the same work for both
    hits = [each["metrics"]["hit_rate"] for each in found["samples"] if each["point"]["scenario"] == "prefix-hit"]
    assert min(hits) > 0.3
    assert all(each["resident_bytes"]["unshared"] > 1 << 20 for each in found["samples"] if each["target"] == "kvd"), pid
    assert {each["baseline"] for each in found["ratios"]} == {"kvd"}
    assert plot.read_text().count("<polyline") >= 4
    assert again.returncode == Exit.OK
    assert again.stderr == "nothing is left to measure\n"
    assert "Times better than kvd" in again.stdout
    other = bench("run", *scenarios, *targets, *SMALL, "--concurrency", "1,2", "--out", out, "--seed", "1")
    assert (other.returncode, "measured with seed 0" in other.stderr) == (Exit.USAGE, True)
    report = bench("report", out)
    assert report.stdout == again.stdout


def test_a_restart_finds_the_pinned_prompt_again(tmp_path):
    endpoint = f"ipc://{tmp_path}/s.sock"
    command = shlex.join([sys.executable, "-m", "kvd", "serve", "--executor", "fake", "--listen", endpoint, "--state-dir"])
    done = bench(
        "run", "restart", "--compare", f"kvd={endpoint}", "--server-command", f"kvd={command} {tmp_path}/$KVD_BENCH_VISIT", *SMALL, "--rounds", "1", "--settle", "0.5", "--json"
    )  # fmt: skip
    assert done.returncode == Exit.OK, done.stderr
    metrics = json.loads(done.stdout)["samples"][0]["metrics"]
    assert metrics["reused_tokens"] > 200
    assert 0 < metrics["ready_s"] <= metrics["first_token_s"]


def test_a_trace_is_replayed(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 30 * number, "input_length": 700, "output_length": 40, "hash_ids": [1, 2 + number]} for number in range(5)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with DaemonProcess(tmp_path) as daemon:
        daemon.wait_ready()
        done = bench(
            "run",
            "trace",
            "--connect",
            daemon.endpoint,
            "--trace",
            trace,
            "--requests",
            "5",
            "--length-scale",
            "0.5",
            "--rounds",
            "1",
            "--json",
        )
    assert done.returncode == Exit.OK, done.stderr
    assert json.loads(done.stdout)["samples"][0]["metrics"]["hit_rate"] > 0.2


def test_ways_of_sharing_are_compared():
    done = bench(
        "sweep",
        "sharing",
        "--executor",
        "fake",
        "--kv-memory",
        "64MiB",
        "--rounds",
        "1",
        "--width",
        "4",
        "--prefix-tokens",
        "300",
        "--output-tokens",
        "32",
        "--json",
    )
    assert done.returncode == Exit.OK, done.stderr
    metrics = {each["target"]: each["metrics"] for each in json.loads(done.stdout)["samples"]}
    assert metrics["off"]["hit_rate"] == 0
    assert metrics["prefixes"]["hit_rate"] > 0.5


def test_beams_and_samples_are_compared_by_the_blocks_that_sharing_saves():
    sizes = ("--prefix-tokens", "300", "--output-tokens", "32", "--values", "4", "--rounds", "1")
    # steps take some time, or nobody would look while the answers grow
    done = bench("sweep", "beam-width", "--executor", "fake", "--kv-memory", "64MiB", *sizes, "--json", env={"KVD_FAKE_STEP_MS": "5"})
    assert done.returncode == Exit.OK, done.stderr
    saved = {each["target"]: each["metrics"]["blocks_saved"] for each in json.loads(done.stdout)["samples"]}
    assert saved.keys() == {"samples-4", "beams-4"}
    assert 0.4 < saved["samples-4"] < saved["beams-4"] < 0.75


def test_what_the_generation_features_bring_is_one_run_and_a_page(tmp_path):
    out, page, again = tmp_path / "out.json", tmp_path / "page.md", tmp_path / "again.md"
    # steps take some time, or no stream would run while a prompt arrives
    sizes = ("--output-tokens", "12", "--arriving-tokens", "1200", "--streams", "2", "--rounds", "1")
    done = bench(
        *("generation", "--executor", "fake", "--kv-memory", "64MiB", *sizes, "--out", out, "--page", page, "--json"),
        env={"KVD_FAKE_STEP_MS": "2"},
    )
    assert done.returncode == Exit.OK, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    # one daemon for all modes, and one for all widths
    assert [each["target"] for each in found["starts"]] == ["off", "unchunked", "chunked", "bound-200", "samples-2"]
    speculated = [each for each in found["samples"] if each["point"]["scenario"] == "repetitive"]
    assert {each["target"] for each in speculated if "acceptance" in each["metrics"]} <= {"ngram", "auto"}
    assert all(each["metrics"]["hit_rate"] > 0.8 for each in speculated)
    assert {each["baseline"] for each in found["ratios"]} == {"off", "unchunked", "samples-2"}
    text = page.read_text()
    assert "answered differently" not in text
    for heading in ("## Speculation", "## Streams beside arriving prompts", "## Blocks that beams and samples save", "## All figures"):
        assert heading in text
    report = bench("report", out, "--page", again)
    assert report.returncode == Exit.OK, report.stderr
    assert again.read_text() == text


def test_a_running_daemon_is_measured_in_the_modes_that_are_named(tmp_path):
    with DaemonProcess(tmp_path) as daemon:
        daemon.wait_ready()
        run = ("run", "random", "--connect", daemon.endpoint, "--concurrency", "2", "--output-tokens", "8", "--rounds", "1")
        done = bench(*run, "--speculation", "off,ngram", "--json")
        assert done.returncode == Exit.OK, done.stderr
        refused = bench(*run, "--speculation", "draft")
    assert [each["target"] for each in json.loads(done.stdout)["samples"]] == ["off", "ngram"]
    assert (refused.returncode, "draft" in refused.stderr) == (Exit.DATA, True)


def test_ctrl_c_ends_it_and_the_server_that_it_started(tmp_path):
    endpoint, child = f"ipc://{tmp_path}/s.sock", tmp_path / "child"
    serve = shlex.join(
        [
            sys.executable,
            "-m",
            "kvd",
            "serve",
            "--executor",
            "fake",
            "--fake-step-ms",
            "2",
            "--no-persist",
            "--listen",
            endpoint,
            "--state-dir",
            str(tmp_path),
        ]
    )
    arguments = [
        "run",
        "decode",
        "--compare",
        f"kvd={endpoint}",
        "--server-command",
        f"kvd=echo $$ > {child}; exec {serve}",
        "--rounds",
        "1000",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvd", "bench", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if "round 2" in line:
            break
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=60)
    assert process.returncode == Exit.INTERRUPTED
    assert "Traceback" not in rest
    assert out == ""
    assert not Path(f"/proc/{child.read_text().strip()}").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "decode", "--connect", "ipc:///nowhere/s.sock"], Exit.UNAVAILABLE, "no server that is ready at ipc:///nowhere/s.sock"),
        (["run", "decode", "--compare", "a=http://127.0.0.1:9"], Exit.UNAVAILABLE, "a: no server that is ready"),
        (["run", "decode", "--compare", "a=ftp://x"], Exit.USAGE, "ftp"),
        (["run", "decode", "--compare", "nonsense"], Exit.USAGE, "NAME=VALUE"),
        (["run", "decode", "--server-command", "b=true", "--compare", "a=http://127.0.0.1:9"], Exit.USAGE, "no target is named b"),
        (["run", "decode", "--concurrency", "0"], Exit.USAGE, "list of positive numbers"),
        (["run", "trace"], Exit.USAGE, "--trace FILE"),
        (["run", "dance"], Exit.USAGE, "dance"),
        (["report", "gone.json"], Exit.USAGE, "gone.json"),
        (["sweep", "head-dim", "--values", "48"], Exit.USAGE, "does not divide"),
        (["sweep", "sharing", "--draft-model", "m"], Exit.USAGE, "--draft-model is for the sweep speculation"),
        (["generation", "--parts", "beams"], Exit.USAGE, "'beams' is none of speculation, inter-token, beam-width"),
        (["generation", "--parts", "beam-width", "--draft-model", "m"], Exit.USAGE, "--draft-model is for the part speculation"),
        (["run", "random", "--speculation", "off,fast"], Exit.USAGE, "'fast' is none of off, ngram, auto, draft"),
        (["run", "random", "--speculation", "off", "--compare", "a=http://127.0.0.1:9"], Exit.USAGE, "leave out --compare"),
        (
            ["run", "decode", "--compare", "a=http://127.0.0.1:9", "--server-command", "a=echo no such model >&2; exit 3"],
            Exit.TEMPORARY,
            "no such model",
        ),
    ],
    ids=lambda value: None if isinstance(value, str | Exit) else value[1],
)
def test_what_is_wrong_is_one_line_and_an_exit_code(arguments, code, message):
    done = bench(*arguments)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
