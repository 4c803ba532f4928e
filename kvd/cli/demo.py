"""``kvd demo``: a daemon is killed and comes back warm, with every claim checked."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import click

from kvd.cli.exits import CommandError, Exit
from kvd.settings import model_store

_STEP_KEYS = ("running", "num_tokens", "blocks_used", "blocks_shared", "blocks_cached", "blocks_free")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--steps", is_flag=True, help="Print a line for each engine step: running, tokens, blocks used, shared, cached, free.")
@click.option("--dtype", default="auto", show_default=True, help="As for `kvd serve`.")
@click.option("--kv-memory", default="512MiB", show_default=True, metavar="SIZE", help="As for `kvd serve`.")
@click.option("--keep", is_flag=True, help="Keep the state directories and the daemons' log in any case, and say where.")
def command(as_json: bool, steps: bool, dtype: str, kv_memory: str, keep: bool) -> int:
    """Serve a real model, kill the daemon with SIGKILL, restart it, and show that the system prompt is still warm.

    Ends with exit code 1 if one of the facts does not hold; then, as after any failure, state and logs are kept.
    """
    from kvd.cli.demo_run import Demo, DemoError

    model = model_store.resolve_model("")
    root = Path(tempfile.mkdtemp(prefix="kvd-demo-"))
    arguments = ["--model", str(model), "--dtype", dtype, "--kv-memory", kv_memory, *(["--log-steps"] if steps else [])]
    demo = Demo(root, arguments, say=lambda line: click.echo(line, err=True), on_line=_print_step if steps else None)
    is_kept = True  # whatever goes wrong can be looked into
    try:
        result = demo.run()
        is_kept = keep or not result.holds
    except KeyboardInterrupt:
        is_kept = keep
        raise
    except DemoError as error:
        raise CommandError(str(error), Exit.SOFTWARE) from error
    finally:
        if is_kept:
            click.echo(f"kept: {root}", err=True)
        else:
            shutil.rmtree(root, ignore_errors=True)
    click.echo(json.dumps(result.as_dict(), indent=2) if as_json else _table(result.as_dict()))
    return Exit.OK if result.holds else 1


def _print_step(line: str) -> None:
    try:
        record = json.loads(line)
    except ValueError:
        return
    if record.get("event") == "step":
        click.echo("step " + " ".join(f"{key.removeprefix('num_')}={record[key]}" for key in _STEP_KEYS), err=True)


def _table(result: dict[str, object]) -> str:
    lines = ["", f"{'':34}{'TTFT ms':>9}{'prompt':>8}{'cached':>8}{'restored':>10}{'recomputed':>12}"]
    rows = result["rows"]
    assert isinstance(rows, list)
    for row in rows:
        ttft, prompt, cached = row["ttft_ms_median"], row["prompt_tokens"], row["cached_tokens"]
        lines.append(f"{row['name']:34}{ttft:>9.0f}{prompt:>8}{cached:>8}{row['restored_tokens']:>10}{row['recomputed_tokens']:>12}")
    ready, facts = result["ready_s"], result["facts"]
    assert isinstance(ready, dict)
    assert isinstance(facts, dict)
    lines += [
        "",
        "seconds from exec to READY: " + "; ".join(f"{name} {', '.join(f'{s:.1f}' for s in times)}" for name, times in ready.items()),
    ]
    lines += [f"shared prefix: {result['prefix_tokens']} tokens; read back from the store: {result['restored_bytes']} bytes", ""]
    lines += [f"{'ok  ' if fact['holds'] else 'FAIL'}  {name} ({fact['figures']})" for name, fact in facts.items()]
    return "\n".join(lines)
