"""Compare kvd with other servers on the same weights, and write docs/benchmarks.md.

    python tests/bench/bench_peers_table.py --peer vllm=http://127.0.0.1:8101 --server-command vllm='…' --peer llama=http://127.0.0.1:8102 \\
        --server-command llama='…' --peer-quantised llama-q41=http://127.0.0.1:8104 --server-command llama-q41='…' --out peers.json --page docs/benchmarks.md

kvd itself is started by this script: ``kvd`` (its own endpoint), ``kvd-gateway`` (the same daemon behind ``kvd gateway``) and, where a peer serves quantised
weights, ``kvd-q41``; ``--serve`` and ``--serve-quantised`` have the arguments of ``kvd serve``. A server is started, measured and killed before the next one
starts. The result is written after each measurement: run the same command again, with more rounds if wanted, and it goes on, on the same machine, with the same
code of kvd and the same commands; anything else is refused. A target that is added later has pairs in the rounds after that. ``--only NAME=ROW,ROW`` leaves out
rows that a target is known to lose or takes minutes for. Exec to first token is held against the first ``--peer``. ``--page-only`` writes the page from what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvd.bench.kvd_server import KvdServer
from kvd.bench.launching import Launched
from kvd.bench.measuring import BenchError
from kvd.bench.openai_server import OpenAiServer
from kvd.bench.plan import Point
from kvd.bench.plot import plot
from kvd.bench.report import PEAK_MEMORY, Claim, page, text_tables
from kvd.bench.results import Result, open_result, read_result
from kvd.bench.running import Entry, Progress, Runner, Target

# The restart comes first: it finds the state of a daemon that holds one system prompt.
ROWS: dict[str, Point] = {
    "restart": Point("restart", 1500, 16, 1, 4),
    "prefill-1550": Point("prefill", 1550, 1, 1, 3),
    "prefill-4075": Point("prefill", 4075, 1, 1, 1),
    "decode-1": Point("decode", 0, 128, 1, 1),
    "decode-8": Point("decode", 0, 128, 8, 8),
    "decode-16": Point("decode", 0, 128, 16, 16),
    "hit": Point("prefix-hit", 1530, 16, 1, 6),
    "shared-1": Point("shared-prefix", 1000, 64, 1, 16),
    "shared-4": Point("shared-prefix", 1000, 64, 4, 16),
    "shared-8": Point("shared-prefix", 1000, 64, 8, 16),
    "shared-16": Point("shared-prefix", 1000, 64, 16, 16),
    "shared-4000-16": Point("shared-prefix", 4000, 64, 16, 16),
    "unseen-16": Point("shared-prefix", 1000, 64, 16, 16, primed=False),
}
QUANTISED_ROWS = ("decode-1", "decode-16")
# A measurement of a second or two is noisier than one of half a minute.
REPEATS = {"decode-1": 3, "decode-8": 2, "decode-16": 2, "shared-16": 2, "hit": 2, "prefill-4075": 2}


def main() -> None:
    options = parsed()
    try:
        run(options)
    except BenchError as error:
        sys.exit(f"bench_peers_table: {error}")


def run(options: argparse.Namespace) -> None:
    result = read_result(options.out) if options.page_only else open_result(options.out, options.seed)
    if not options.page_only:
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kvd-peers-") as root:
            start_ourselves(options, Path(root))
            result = asyncio.run(measure(options, result, options.logs or Path(root)))
        print(text_tables(result))
    if options.page:
        text = page(result, sections(options), command="tests/bench/bench_peers_table.py")
        with contextlib.suppress(ValueError):  # too little was measured for a plot
            picture = options.page.with_suffix(".svg")
            picture.write_text(plot(result), encoding="utf-8")
            text += f"\n![throughput and TTFT over the number of requests at once]({picture.name})\n"
        options.page.write_text(text, encoding="utf-8")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--serve", default="--dtype bfloat16 --weights dequantised --kv-memory 512MiB", metavar="ARGUMENTS", help="of kvd serve")
    add("--serve-quantised", default="--kv-memory 512MiB", metavar="ARGUMENTS", help="of kvd serve for the quantised weights")
    add("--gateway-port", type=int, default=8190, help="0: kvd is not measured through its gateway")
    add("--peer", action="append", default=[], metavar="NAME=URL")
    add("--peer-quantised", action="append", default=[], metavar="NAME=URL")
    add("--server-command", action="append", default=[], metavar="NAME=COMMAND")
    add("--only", action="append", default=[], metavar="NAME=ROW,ROW", help=f"of {', '.join(ROWS)}")
    add("--rows", default=",".join(ROWS), help="rows to measure now")
    add("--rounds", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--settle", type=float, default=3.0)
    add("--timeout", type=float, default=300.0)
    add("--out", type=Path, required=True)
    add("--page", type=Path)
    add("--page-only", action="store_true")
    add("--logs", type=Path, help="a folder for the servers' output")
    options = parser.parse_args(arguments)
    for name in ("peer", "peer_quantised", "server_command", "only"):
        setattr(options, name, dict(each.split("=", 1) for each in getattr(options, name)))
    options.ours = {"kvd": ""} | ({"kvd-gateway": f"http://127.0.0.1:{options.gateway_port}"} if options.gateway_port else {})
    options.ours_quantised = {"kvd-q41": ""} if options.peer_quantised else {}
    # Without a pin, which the API has no word for, a restart through the gateway shows nothing that the endpoint doesn't.
    options.only.setdefault("kvd-gateway", ",".join(row for row in ROWS if row != "restart"))
    return options


def start_ourselves(options: argparse.Namespace, root: Path) -> None:
    """Endpoints and commands of kvd's own targets: one endpoint, since one server is alive at a time, and a state directory for each visit."""
    endpoint = f"ipc://{root}/s.sock"
    kvd = f"{shlex.quote(sys.executable)} -m kvd"
    serve = f"{kvd} serve --listen {endpoint} --state-dir {root}/$KVD_BENCH_VISIT"
    options.ours["kvd"] = endpoint
    options.shown = {"kvd": f"kvd serve {options.serve}"}
    options.server_command |= {"kvd": f"exec {serve} {options.serve}"}
    if options.gateway_port:
        options.server_command["kvd-gateway"] = (
            f"{serve} {options.serve} & exec {kvd} gateway --connect {endpoint} --port {options.gateway_port}"
        )
        options.shown["kvd-gateway"] = f"kvd serve {options.serve} & kvd gateway"
    if options.ours_quantised:
        options.ours_quantised["kvd-q41"] = endpoint
        options.server_command["kvd-q41"] = f"exec {serve} {options.serve_quantised}"
        options.shown["kvd-q41"] = f"kvd serve {options.serve_quantised}"


async def measure(options: argparse.Namespace, result: Result, logs: Path) -> Result:
    bf16, quantised = {**options.ours, **options.peer}, {**options.ours_quantised, **options.peer_quantised}
    targets = [target_of(name, url, options, logs) for name, url in {**bf16, **quantised}.items()]
    wanted = options.rows.split(",")
    entries = []
    for row, point in ROWS.items():
        if row in wanted:
            names = {name for name in bf16 if name not in options.only or row in options.only[name].split(",")}
            names |= quantised.keys() if row in QUANTISED_ROWS else set()
            entries.append(Entry(point, frozenset(names), REPEATS.get(row, 1)))
    runner = Runner(
        entries,
        targets,
        options.rounds,
        result,
        out=options.out,
        settle_s=options.settle,
        keeps_going=True,
        progress=Progress(said=lambda line: print(line, flush=True)),
    )
    return await runner.run()


def target_of(name: str, url: str, options: argparse.Namespace, logs: Path) -> Target:
    is_http = url.startswith(("http://", "https://"))
    server = OpenAiServer(url, timeout_s=options.timeout) if is_http else KvdServer(url, timeout_s=options.timeout)
    command = options.server_command.get(name)
    launched = Launched(name, command, logs / f"{name}.log", ready_timeout_s=options.timeout) if command else None
    return Target(name, server, url, launched, command=options.shown.get(name, command or ""))


def sections(options: argparse.Namespace) -> dict[str, list[Claim]]:
    """What is wanted of each row, for each way to ask kvd."""
    peers, quantised_peers = tuple(options.peer), tuple(options.peer_quantised)
    found = {}
    for name in options.ours:
        keys = {ROWS[row].key for row in options.only.get(name, ",".join(ROWS)).split(",")}
        found[f"{name} against the better peer of each row"] = [each for each in claims(name, peers) if each.key in keys]
    for name in options.ours_quantised:
        found[f"{name} against the better peer of each row, Q4_1 weights served quantised"] = [
            wanted("decode, 1 stream, tokens/s", "decode-1", "decode_tokens_per_s", name, quantised_peers, 1.3),
            wanted("decode, 16 streams, tokens/s", "decode-16", "decode_tokens_per_s", name, quantised_peers, 2.5),
            peak_memory(name),
        ]
    return found


def claims(name: str, peers: tuple[str, ...]) -> list[Claim]:
    rate, time = "output_tokens_per_s", "first_token_s"
    return [
        wanted("prefill of 1,550 tokens", "prefill-1550", "prefill_tokens_per_s", name, peers, 1.1),
        wanted("prefill of 4,075 tokens", "prefill-4075", "prefill_tokens_per_s", name, peers, 1.1),
        wanted("decode, 1 stream", "decode-1", "decode_tokens_per_s", name, peers, 0.97),
        wanted("decode, 8 streams", "decode-8", "decode_tokens_per_s", name, peers, 1.2),
        wanted("decode, 16 streams", "decode-16", "decode_tokens_per_s", name, peers, 1.2),
        *(
            wanted(f"16 requests on one 1,000-token prefix, {width} at once", f"shared-{width}", rate, name, peers, least)
            for width, least in ((1, 1.2), (4, 1.5), (8, 1.8), (16, 2.0))
        ),
        wanted("the same on a 4,000-token prefix, 16 at once", "shared-4000-16", rate, name, peers, 3.0),
        wanted("the same, 1,000-token prefix never seen, 16 at once", "unseen-16", rate, name, peers, 1.5),
        wanted("TTFT of a prefix hit, 1,530 tokens", "hit", "hit_ttft_s", name, peers, 1.0),
        wanted(
            "TTFT of the first question after SIGKILL, against the hit before",
            "restart",
            "restored_ttft_s",
            name,
            (),
            1 / 1.2,
            own="before_kill_ttft_s",
        ),
        Claim("exec to READY after SIGKILL", ROWS["restart"].key, "ready_s", name, bound=2.5),
        wanted("exec to first token after SIGKILL, against the first peer", "restart", time, name, peers[:1], 10.0),
        wanted("exec to first token after SIGKILL, against the better peer", "restart", time, name, peers, None),
        peak_memory(name),
    ]


def peak_memory(name: str) -> Claim:
    """Of a daemon by itself: the row is that of the restart, which the gateway has none of."""
    return Claim("peak RssAnon + RssShmem, start and load, 512 MiB pool", ROWS["restart"].key, PEAK_MEMORY, name, bound=1.2)


def wanted(text: str, row: str, metric: str, ours: str, peers: tuple[str, ...], least: float | None, *, own: str | None = None) -> Claim:
    return Claim(text, ROWS[row].key, metric, ours, peers, least, own)


if __name__ == "__main__":
    main()
