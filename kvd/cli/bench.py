"""``kvd bench run``: measure a daemon, or any OpenAI-compatible server, or several of them in turns."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvd.cli.connect import Connection, connection_options, json_option
from kvd.cli.exits import CommandError, Exit
from kvd.cli.output import print_json

if TYPE_CHECKING:
    from kvd.bench.measuring import Server
    from kvd.bench.results import Result
    from kvd.bench.running import Runner, Target
    from kvd.bench.speculating_server import Mode

_EXITS = {"unavailable": Exit.UNAVAILABLE, "refused": Exit.DATA, "output": Exit.CANNOT_CREATE, "failed": Exit.TEMPORARY}
_READY_TIMEOUT_S = 600.0
_FILE = click.Path(path_type=Path, dir_okay=False)
_SCENARIOS = (
    *("prefill", "decode", "shared-prefix", "prefix-hit", "mixed", "multi-turn"),
    *("repetitive", "random", "arriving", "restart", "trace"),
)
_SWEEPS = ("block-size", "head-dim", "sharing", "beam-width", "speculation", "inter-token")
_PARTS = ("speculation", "inter-token", "beam-width")
_MODES = ("off", "ngram", "auto", "draft")


@contextmanager
def bench_errors() -> Iterator[None]:
    """Turn what a benchmark could not do into one line and an exit code."""
    from kvd.bench.measuring import BenchError

    try:
        yield
    except BenchError as error:
        if error.kind == "usage":
            raise click.UsageError(str(error)) from error
        raise CommandError(str(error), _EXITS[error.kind]) from error


def _numbers(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Positive whole numbers with commas between them; none where nothing was given."""
    if value is None:
        return ()
    try:
        found = tuple(int(each) for each in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{value!r} is not a list of positive numbers such as 1,4,16")
    return found


def _words(allowed: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    """Some of these words with commas between them."""

    def read(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[str, ...]:
        found = tuple(value.split(",")) if value else ()
        if unknown := [each for each in found if each not in allowed]:
            raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return found

    return read


def _named(_ctx: click.Context, _param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, any number of times."""
    found = {}
    for value in values:
        name, sign, rest = value.partition("=")
        if not sign or not name or not rest:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE")
        found[name] = rest
    return found


@click.group()
def group() -> None:
    """Measure kvd, or any OpenAI-compatible server, or several in turns."""


@group.command("run")
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO...", type=click.Choice(_SCENARIOS))
@click.option("--compare", "compared", multiple=True, callback=_named, metavar="NAME=URL", help="A target, http(s)://… or a kvd endpoint; several are measured in turns, and ratios are against the first. Without it the daemon of --connect.")  # fmt: skip
@click.option("--server-command", "commands", multiple=True, callback=_named, metavar="NAME=COMMAND", help="Start a target by this command line, measure it, and kill it before the next one starts: two servers never share the processors.")  # fmt: skip
@click.option("--pid", "pids", multiple=True, callback=_named, metavar="NAME=PID", help="A target's process, for memory and processor time; known without it for --server-command and ipc endpoints.")  # fmt: skip
@click.option("--model", default="", metavar="NAME", help="The model's name in OpenAI requests. [default: the first that is listed]")
@click.option(
    "--concurrency",
    callback=_numbers,
    metavar="N,N,…",
    default="1,4,8,16",
    show_default=True,
    help="Requests under way at once; the sweep.",
)
@click.option(
    "--prompt-tokens",
    callback=_numbers,
    metavar="N,N,…",
    default="1550",
    show_default=True,
    help="Prompt lengths of prefill, mixed and arriving.",
)
@click.option("--prefix-tokens", callback=_numbers, metavar="N,N,…", default="1000", show_default=True, help="System prompt lengths of shared-prefix, prefix-hit, multi-turn and restart.")  # fmt: skip
@click.option("--output-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens of an answer; decode, repetitive and random take twice as many, the streams of arriving four times.")  # fmt: skip
@click.option("--speculation", "modes", callback=_words(_MODES), metavar="MODE,MODE,…", default="", help="Measure the daemon of --connect in these modes in turns (off, ngram, auto, draft), the first one the baseline. [default: as it is set up]")  # fmt: skip
@click.option("--requests", type=click.IntRange(min=1), default=16, show_default=True, help="Requests of shared-prefix, mixed and trace.")
@click.option("--turns", type=click.IntRange(min=2), default=4, show_default=True, help="Turns of each conversation of multi-turn.")
@click.option("--cold", is_flag=True, help="shared-prefix: no earlier request has brought the prefix into the cache.")
@click.option("--trace", "trace_file", type=_FILE, metavar="FILE", help="JSONL in the Mooncake format, gzipped or not.")
@click.option("--time-scale", type=click.FloatRange(min=0), default=1.0, show_default=True, help="trace: what its times are multiplied by.")
@click.option("--length-scale", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="trace: what its lengths are multiplied by.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Visits of each target, in turns.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Measurements of each point within a visit.")
@click.option("--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Requests before the first measurement.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the prompts; another one for a server that knows them already.")
@click.option("--settle", "settle_s", type=click.FloatRange(min=0), default=3.0, show_default=True, help="restart: seconds before the kill, for what a target writes by itself.")  # fmt: skip
@click.option(
    "--out", type=_FILE, metavar="FILE", help="Write the result as JSON after each measurement; a file that is there is gone on with."
)
@click.option("--plot", "plot_file", type=_FILE, metavar="FILE", help="Write an SVG of throughput and TTFT over concurrency.")
@click.option("--timeout", "timeout_s", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True, help="Time of one request.")  # fmt: skip
@click.option("--wait", "wait_s", metavar="SECONDS", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Wait so long for a target that is not ready yet.")  # fmt: skip
@click.option("--keep-going", is_flag=True, help="Note a measurement that fails and go on.")
@json_option
@connection_options
def run_command(*, connection: Connection, as_json: bool, plot_file: Path | None, **options: Any) -> int:
    """Run scenarios and print medians and ratios.

    \b
    prefill        prompts never seen, one token of output
    decode         short prompts, long answers; only the time in which all streams run counts
    shared-prefix  requests with one long system prompt and a question each; --cold: never seen before
    prefix-hit     one system prompt: its first question, then others one after another
    mixed          three chats for each long prompt, side by side
    multi-turn     conversations that grow, several users side by side
    repetitive     as decode, of answers that repeat their prompts: what speculation brings
    random         as decode, of answers drawn at temperature 1: what it costs
    arriving       streams that decode while long prompts arrive: the gaps between their tokens
    restart        SIGKILL, a new start, and the first question on a known system prompt (needs --server-command)
    trace          arrivals, lengths and shared prefixes of a recorded hour (needs --trace)
    """  # noqa: D301  click's mark
    with bench_errors(), tempfile.TemporaryDirectory(prefix="kvd-bench-") as logs:
        result = asyncio.run(_run(connection, Path(logs), options))
        _show(result, as_json=as_json)
        if plot_file is not None:
            write_plot(result, plot_file)
    return Exit.OK


async def _run(connection: Connection, logs: Path, options: Mapping[str, Any]) -> Result:
    """Within a loop from the start: the clients belong to it."""
    from kvd.bench.plan import expand
    from kvd.bench.results import open_result
    from kvd.bench.running import Entry, Runner

    names = ("concurrency", "prompt_tokens", "prefix_tokens", "output_tokens", "requests", "turns", "cold", "time_scale", "length_scale")
    trace = str(options["trace_file"] or "")
    points = expand(options["scenarios"], trace=trace, **{name: options[name] for name in names})
    out: Path | None = options["out"]
    result = open_result(out, options["seed"])
    targets = make_targets(connection, logs, options)
    runner = Runner(
        [Entry(point, repeats=options["repeats"]) for point in points],
        targets,
        options["rounds"],
        result,
        out=out,
        warmup_requests=options["warmup"],
        settle_s=options["settle_s"],
        keeps_going=options["keep_going"],
        wait_s=options["wait_s"],
    )
    return await with_progress(runner)


def make_targets(connection: Connection, logs: Path, options: Mapping[str, Any]) -> list[Target]:
    """The targets of a command line, the first one the baseline."""
    from kvd.bench.launching import Launched
    from kvd.bench.running import Target

    if modes := options["modes"]:
        if options["compared"] or options["commands"] or options["pids"]:
            raise click.UsageError("--speculation is for the daemon of --connect: leave out --compare, --server-command and --pid")
        return [_in_mode(mode, connection, options["timeout_s"]) for mode in dict.fromkeys(modes)]
    urls = options["compared"] or {"kvd": connection.endpoint or ""}
    commands, pids = options["commands"], options["pids"]
    if unknown := (commands.keys() | pids.keys()) - urls.keys():
        raise click.UsageError(f"no target is named {min(unknown)}: --compare {min(unknown)}=URL says where it answers")
    if not all(pid.isdigit() for pid in pids.values()):
        raise click.UsageError("--pid takes NAME=PID, a number")
    targets: list[Target] = []
    for name, url in urls.items():
        server = server_at(url, connection, options["model"], options["timeout_s"])
        launched = None
        if name in commands:
            launched = Launched(name, commands[name], logs / f"{len(targets)}.log", ready_timeout_s=_READY_TIMEOUT_S)
        pid = int(pids[name]) if name in pids else None
        targets.append(Target(name, server, url or "the default endpoint", launched, pid, commands.get(name, "")))
    return targets


def _in_mode(mode: Mode, connection: Connection, timeout_s: float) -> Target:
    from kvd.bench.running import Target
    from kvd.bench.speculating_server import SpeculatingServer

    url = connection.endpoint or ""
    return Target(mode, SpeculatingServer(url or None, mode, timeout_s=timeout_s, **_keys(url, connection)), url or "the default endpoint")


def _keys(url: str, connection: Connection) -> dict[str, Any]:
    """The keys of a tcp endpoint."""
    return {} if url.startswith("ipc://") else {"server_key": connection.server_key, "client_key_file": connection.client_key_file}


def server_at(url: str, connection: Connection, model: str, timeout_s: float) -> Server:
    """A client for an address: HTTP, or kvd's own protocol."""
    from kvd.bench.kvd_server import KvdServer
    from kvd.bench.openai_server import OpenAiServer

    if url.startswith(("http://", "https://")):
        return OpenAiServer(url, model=model, timeout_s=timeout_s, api_key=os.environ.get("OPENAI_API_KEY", ""))
    return KvdServer(url or None, timeout_s=timeout_s, **_keys(url, connection))


async def with_progress(runner: Runner) -> Result:
    """Run with a bar on a terminal, else with a line on standard error for each measurement."""
    from kvd.bench.running import Progress

    if not sys.stderr.isatty():
        runner.progress = Progress(said=lambda line: click.echo(line, err=True))
        return await runner.run()
    bar: Any
    with click.progressbar(
        length=runner.total(), label="kvd bench", item_show_func=lambda line: str(line or "")[:60], update_min_steps=0, file=sys.stderr
    ) as bar:
        runner.progress = Progress(said=lambda line: bar.update(0, line), advanced=bar.update)
        return await runner.run()


def _show(result: Result, *, as_json: bool) -> None:
    from kvd.bench.report import comparison_dicts, text_tables

    if as_json:
        print_json({**result.as_dict(), "ratios": comparison_dicts(result)})
    else:
        click.echo(text_tables(result))


def write_plot(result: Result, path: Path) -> None:
    """The SVG of a result."""
    from kvd.bench.plot import plot

    try:
        path.write_text(plot(result), encoding="utf-8")
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise CommandError(f"the plot can't be written: {error}", Exit.CANNOT_CREATE) from error


def read_results(files: Sequence[Path]) -> Result:
    """Result files of one machine as one result."""
    from kvd.bench.results import merged, read_result

    return merged([read_result(file) for file in files])


@group.command("report")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=_FILE)
@click.option("--plot", "plot_file", type=_FILE, metavar="FILE", help="Write an SVG of throughput and TTFT over concurrency.")
@click.option("--page", "page_file", type=_FILE, metavar="FILE", help="Write the Markdown page of what `kvd bench generation` measured.")
@json_option
def report_command(*, files: tuple[Path, ...], plot_file: Path | None, page_file: Path | None, as_json: bool) -> int:
    """Print the tables of results that `kvd bench run --out` wrote, of several as one."""
    with bench_errors():
        result = read_results(files)
        _show(result, as_json=as_json)
        if plot_file is not None:
            write_plot(result, plot_file)
        if page_file is not None:
            write_page(result, page_file)
    return Exit.OK


def write_page(result: Result, path: Path) -> None:
    """The page about generation features."""
    from kvd.bench.generation_page import generation_page

    try:
        path.write_text(generation_page(result), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"the page can't be written: {error}", Exit.CANNOT_CREATE) from error


def _served(command: Callable[..., int]) -> Callable[..., int]:
    """The options of commands that start their own daemons."""
    options = (
        click.option("--model", default="", metavar="MODEL", help="As for `kvd serve`; head-dim has models of its own. [default: the default model]"),
        click.option("--executor", default="torch", show_default=True, help="As for `kvd serve`."),
        click.option("--kv-memory", default="512MiB", show_default=True, metavar="SIZE", help="As for `kvd serve`."),
        click.option("--draft-model", default="", metavar="MODEL", help="speculation: as for `kvd serve`; with one the mode draft is measured too."),
        click.option("--output-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens of an answer; decode, repetitive and random take twice as many, the streams of arriving four times."),
        click.option("--seed", type=int, default=0, show_default=True, help="Draws the prompts."),
        click.option("--out", type=_FILE, metavar="FILE", help="Write the result as JSON after each measurement; a file that is there is gone on with."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def _serve_arguments(options: Mapping[str, Any]) -> tuple[str, ...]:
    model = ("--model", options["model"]) if options["model"] else ()
    return (*model, "--executor", options["executor"], "--kv-memory", options["kv_memory"])


@group.command("sweep")
@click.argument("kind", metavar="KIND", type=click.Choice(_SWEEPS))
@click.option(
    "--values",
    callback=_numbers,
    metavar="N,N,…",
    help="What is swept over. [default: 8,16,32,64 for block-size, 32,64,128 for head-dim, 2,4,6 for beam-width, 1,8 for speculation, 200 for inter-token]",
)
@_served
@click.option("--prefix-tokens", type=click.IntRange(min=1), help="Prompt and prefix length. [default: 1000; 4000 for inter-token]")
@click.option("--width", type=click.IntRange(min=1), default=8, show_default=True, help="Streams at once; sharing: answers of each prompt.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Visits of each variant, in turns.")
@json_option
def sweep_command(*, kind: str, as_json: bool, **options: Any) -> int:
    """Start a daemon for each variant, in turns, and compare them.

    \b
    block-size   positions in a block
    head-dim     random models of the same size whose heads have other dimensions
    sharing      several answers to one prompt: nothing shared, prefixes only, with copy-on-write
    beam-width   beams, and as many samples, on one daemon: requests a second, and the blocks that sharing saves
    speculation  its modes on one daemon, over answers that repeat their prompts and answers that don't; values: streams at once
    inter-token  streams while long prompts arrive: whole prompts in a step, pieces, pieces by a bound; values: bounds in ms
    """  # noqa: D301  click's mark
    if options["draft_model"] and kind != "speculation":
        raise click.UsageError("--draft-model is for the sweep speculation")
    with bench_errors(), tempfile.TemporaryDirectory(prefix="kvd-sweep-") as root:
        _show(asyncio.run(_sweep(kind, Path(root), options)), as_json=as_json)
    return Exit.OK


async def _sweep(kind: str, root: Path, options: Mapping[str, Any]) -> Result:
    from kvd.bench.results import open_result
    from kvd.bench.running import Runner
    from kvd.bench.sweeps import KINDS, Sweep

    arguments = _serve_arguments({**options, "model": "" if kind == "head-dim" else options["model"]})
    prefix_tokens = options["prefix_tokens"] or KINDS[kind].prefix_tokens
    values = options["values"] or KINDS[kind].values
    sweep = Sweep(kind, values, arguments, root, prefix_tokens, options["output_tokens"], options["width"], options["draft_model"])
    runner = Runner(sweep.entries(), sweep.targets(), options["rounds"], open_result(options["out"], options["seed"]), out=options["out"])
    return await with_progress(runner)


@group.command("generation")
@click.option("--parts", callback=_words(_PARTS), metavar="PART,PART,…", default=",".join(_PARTS), show_default=True, help="What is measured.")  # fmt: skip
@_served
@click.option("--arriving-tokens", type=click.IntRange(min=1), default=4000, show_default=True, help="Length of the prompts that arrive beside the streams.")  # fmt: skip
@click.option("--streams", type=click.IntRange(min=1), default=8, show_default=True, help="Streams at once; speculation is measured with one besides.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="Rounds of speculation; the other parts have half as many.")  # fmt: skip
@click.option("--page", "page_file", type=_FILE, metavar="FILE", help="Write the Markdown page of the result.")
@json_option
def generation_command(*, page_file: Path | None, as_json: bool, **options: Any) -> int:
    """Measure what the generation features bring, on daemons that it starts: three sweeps as one run, and a page of them.

    \b
    speculation  tokens a second by mode, over a repetitive and a random set of prompts; acceptance
    inter-token  gaps of running streams while long prompts arrive, with and without a bound, and unchunked
    beam-width   blocks that samples and beams save by sharing
    """  # noqa: D301  click's mark
    if options["draft_model"] and "speculation" not in options["parts"]:
        raise click.UsageError("--draft-model is for the part speculation")
    with bench_errors(), tempfile.TemporaryDirectory(prefix="kvd-generation-") as root:
        result = asyncio.run(_generation(Path(root), options))
        _show(result, as_json=as_json)
        if page_file is not None:
            write_page(result, page_file)
    return Exit.OK


async def _generation(root: Path, options: Mapping[str, Any]) -> Result:
    from kvd.bench.generation import generation_plan
    from kvd.bench.results import open_result
    from kvd.bench.running import Runner

    names = ("rounds", "arriving_tokens", "output_tokens", "streams", "draft_model")
    targets, entries = generation_plan(options["parts"], _serve_arguments(options), root, **{name: options[name] for name in names})
    runner = Runner(entries, targets, options["rounds"], open_result(options["out"], options["seed"]), out=options["out"])
    return await with_progress(runner)
