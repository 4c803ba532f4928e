"""The command line's root: a registry of commands that are imported when they are called, and the one place that turns errors into exit codes.

``kvd --help`` and ``kvd version`` import neither torch nor zmq nor structlog.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import click

from kvd.cli.exits import CommandError, Exit, exit_of_failure
from kvd.cli.interrupts import raise_again
from kvd.config import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command lives (``module:attribute``) and its line in ``kvd --help``."""

    target: str
    summary: str


COMMANDS: Mapping[str, Entry] = MappingProxyType(
    {
        "serve": Entry("kvd.cli.serve:command", "Run the daemon."),
        "gateway": Entry("kvd.cli.gateway:command", "Serve the OpenAI API over HTTP in front of a daemon."),
        "demo": Entry("kvd.cli.demo:command", "Kill a daemon and watch it come back warm."),
        "pull": Entry("kvd.cli.pull:command", "Fetch a model."),
        "generate": Entry("kvd.cli.generate:command", "Complete a text."),
        "chat": Entry("kvd.cli.chat:command", "Talk with the model."),
        "tokenize": Entry("kvd.cli.tokenize:command", "Show a text's token ids."),
        "pin": Entry("kvd.cli.pins:pin_command", "Compute a prefix, keep it in memory and on disk."),
        "unpin": Entry("kvd.cli.pins:unpin_command", "Let a pinned prefix go."),
        "forget": Entry("kvd.cli.forget:forget_command", "Have a prefix, a salt or a tenant leave memory and disk for good."),
        "adapter": Entry("kvd.cli.adapters:group", "List, load and unload LoRA adapters."),
        "prefixes": Entry("kvd.cli.pins:prefixes_command", "List the pins and the hottest prefixes."),
        "status": Entry("kvd.cli.status:status_command", "Show the daemon's state."),
        "stats": Entry("kvd.cli.status:stats_command", "Show counters and rates."),
        "ping": Entry("kvd.cli.status:ping_command", "Ask whether a daemon answers and is ready."),
        "checkpoint": Entry("kvd.cli.control:checkpoint_command", "Write every hot block to disk now."),
        "drain": Entry("kvd.cli.control:drain_command", "Stop the daemon gracefully."),
        "store": Entry("kvd.cli.store_keys:group", "Check, measure, dump, export, import or encrypt a state directory."),
        "bench": Entry("kvd.cli.bench:group", "Measure a daemon, or any OpenAI-compatible server, or several in turns."),
        "doctor": Entry("kvd.cli.doctor:command", "Look at this machine with kvd's eyes."),
        "version": Entry("kvd.cli.version:command", "Show the version."),
    }
)


class LazyGroup(click.Group):
    """A group whose commands are imported when one of them is called."""

    def __init__(self, entries: Mapping[str, Entry], **attributes: object) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]  # click's own
        self._entries = entries

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = self._entries.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Once the command is imported, Ctrl-C is its own affair."""
        resolved = super().resolve_command(ctx, args)
        raise_again()
        return resolved

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self._entries.items()])


def _show_version(ctx: click.Context, _param: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        from kvd.cli.version import version

        click.echo(f"kvd {version()}")
        ctx.exit()


root = LazyGroup(
    COMMANDS,
    name="kvd",
    params=[
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version and exit."
        )
    ],
    help="kvd: an inference daemon whose KV cache survives restarts.",
    epilog="docs/operations.md describes every command, key and exit code. `kvd COMMAND --help` shows a command's options.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; whatever fails is one line on standard error."""
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except click.exceptions.Exit as end:  # --help is done
        return end.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter's last flush finds no broken pipe
        return Exit.BROKEN_PIPE
    except (click.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return Exit.USAGE
    except ConfigError as error:
        return _fail(str(error), Exit.CONFIG)
    except CommandError as error:
        return _fail(str(error), error.exit_code)
    except Exception as error:
        failure = getattr(error, "code", None)
        if not isinstance(failure, str):  # a fault of our own: its traceback is the message
            traceback.print_exc()
            return Exit.SOFTWARE
        return _fail(str(error), exit_of_failure(failure, retryable=bool(getattr(error, "retryable", False))))
    return code if isinstance(code, int) else Exit.OK


def _run(arguments: Sequence[str]) -> object:
    """What ``root.main`` does, without its own ideas about errors."""
    if instruction := os.environ.get("_KVD_COMPLETE"):
        from click.shell_completion import shell_complete

        return shell_complete(root, {}, "kvd", "_KVD_COMPLETE", instruction)
    with root.make_context("kvd", list(arguments)) as context:
        return root.invoke(context)


def _fail(message: str, code: Exit) -> int:
    click.echo(f"kvd: {message}", err=True)
    return code
