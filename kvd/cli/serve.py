"""``kvd serve``: settle the configuration and the model, then hand over to the daemon."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import click

from kvd.cli.interrupts import end_at_once, raise_again
from kvd.config import ConfigError
from kvd.settings import loader as settings
from kvd.settings import model_store
from kvd.settings.loader import Key, Settings

_SECTION_TITLES = {
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduling",
    "speculative": "Speculation",
    "engine": "Engine",
    "transport": "Endpoints and limits",
    "storage": "Persistence",
    "observe": "Logs",
}


class ServeCommand(click.Command):
    """A command with one flag for each configuration key, grouped by section in its help."""

    def __init__(self, **attributes: object) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]  # click's own
        self._options = {key: _option(key) for key in settings.all_keys()}
        self.params += self._options.values()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = [record for param in self.get_params(ctx) if param not in self._options.values() and (record := param.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl(own)
        for section, keys in groupby(self._options, key=lambda key: key.section):
            with formatter.section(f"{_SECTION_TITLES.get(section, section)} ([{section}] in the file)"):
                formatter.write_dl([record for key in keys if (record := self._options[key].get_help_record(ctx))])


def _option(key: Key) -> click.Option:
    help_text = key.doc.replace("`", "")
    if key.kind is bool:
        negative = key.flag.replace("--", "--no-", 1)
        return click.Option([f"{key.flag}/{negative}", key.name], default=None, help=f"{help_text}. [default: {str(key.default).lower()}]")
    metavar = "SIZE" if key.is_size else {int: "N", float: "X", Path: "DIR", tuple: "ENDPOINT"}.get(key.kind, "TEXT")
    default = "" if key.default in ("", (), Path()) else f" [default: {settings.toml_value(key, key.default).strip(chr(34))}]"
    return click.Option([key.flag, key.name], metavar=metavar, multiple=key.kind is tuple, help=help_text + "." + default)


@click.command(cls=ServeCommand)
@click.option("--config", "config_file", metavar="FILE", type=click.Path(path_type=Path), help="TOML file; $KVD_CONFIG otherwise.")
@click.option("--print-config", is_flag=True, help="Print the configuration with the origin of each value, and exit.")
def command(config_file: Path | None, print_config: bool, **flags: object) -> int:
    """Run the daemon in the foreground until SIGTERM, `kvd drain` or Ctrl-C.

    A value comes from the flag, else from KVD_<KEY> of the environment, else from the TOML file, else it is the default. Sizes take
    KiB, MiB, GiB, TiB; times are in seconds.
    """
    from kvd_client.endpoints import default_listen_endpoint

    loaded = settings.load(flags, config_file=config_file, default_listen=default_listen_endpoint)
    if print_config:
        click.echo(settings.render(loaded))
        return 0
    loaded = with_model(loaded)
    config = loaded.config
    end_at_once()
    gc.disable()  # imports make hundreds of thousands of objects that stay; the daemon turns it on again when its loop begins
    try:
        from kvd.daemon_process import run
        from kvd.observe import logging

        observe = config.observe
        logging.configure(level=observe.log_level, log_format=observe.log_format, log_prompts=observe.log_prompts)
        return run(config)
    except ConfigError as error:
        raise _with_origin(error, loaded.origins) from error
    finally:
        raise_again()


def _with_origin(error: ConfigError, origins: Mapping[str, str]) -> ConfigError:
    """An error about ``key = value``, with where the value came from."""
    origin = origins.get(str(error).partition(" = ")[0])
    return ConfigError(f"{error} (from {origin})") if origin else error


def with_model(loaded: Settings) -> Settings:
    """The settings with the model's name replaced by its path; on a terminal a missing model may be fetched first.

    Raises:
        ModelNotFoundError: the model is not here; the message is the one command to run.
    """
    model = loaded.config.model
    if model.executor == "fake":
        return loaded
    try:
        path = model_store.resolve_model(model.model)
    except model_store.ModelNotFoundError as error:
        is_asked = error.pull_name and sys.stdin.isatty() and sys.stderr.isatty()
        if not is_asked or not click.confirm(f"The model {error.pull_name} is not on this machine. Fetch it now?", default=True, err=True):
            raise
        from kvd.cli.pull import pull

        path = pull(error.pull_name)
    config = dataclasses.replace(loaded.config, model=dataclasses.replace(model, model=str(path)))
    if draft := config.speculative.draft_model:
        resolved = model_store.resolve_model(draft, key="speculative.draft_model")
        config = dataclasses.replace(config, speculative=dataclasses.replace(config.speculative, draft_model=str(resolved)))
    return Settings(config, loaded.origins)
