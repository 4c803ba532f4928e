"""The loader of the configuration: flag > ``KVD_*`` environment > TOML file > default, with the origin of each value.

The keys are the fields of ``kvd.config``'s dataclasses; their flat names give the flag (``--max-running``), the variable
(``KVD_MAX_RUNNING``) and the key in the file (``[scheduler] max_running``). What a key may hold stands in ``kvd.settings.rules``.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from kvd.config import ConfigError, DaemonConfig
from kvd.settings.rules import Rule, conflicts, rule_of
from kvd.settings.units import format_size, parse_size

OTHER_VARIABLES = frozenset(
    {
        "KVD_CONFIG",
        "KVD_CONNECT",
        "KVD_TIMEOUT",
        "KVD_SERVER_KEY",
        "KVD_CLIENT_KEY_FILE",
        "KVD_MODELS_DIR",
        "KVD_FAILPOINTS",
        "KVD_API_KEY",
        "KVD_BENCH_VISIT",
        "KVD_CPU_ISA",
    }
)
"""Variables of the environment that are no configuration keys."""

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Key:
    """A configuration key. ``kind`` is the type of its value; a size is an int that is written with units."""

    section: str
    name: str
    kind: type
    default: Any
    doc: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "KVD_" + self.name.upper()

    @property
    def is_size(self) -> bool:
        return self.kind is int and (self.name == "kv_memory" or "_bytes" in self.name)

    @property
    def rule(self) -> Rule:
        return rule_of(self.name, self.kind)


@dataclass(frozen=True, slots=True)
class Settings:
    """The result: the configuration and, by flat key name, where each value comes from."""

    config: DaemonConfig
    origins: Mapping[str, str]


def all_keys() -> Iterator[Key]:
    """Every key, in the order of ``kvd.config``."""
    for section, room in _rooms().items():
        for field in dataclasses.fields(room):
            yield Key(
                section, field.name, Path if isinstance(field.default, Path) else type(field.default), field.default, field.metadata["doc"]
            )


def load(
    flags: Mapping[str, object],
    *,
    environ: Mapping[str, str] = os.environ,
    config_file: Path | None = None,
    default_listen: Callable[[], str] | None = None,
    origin_of: Callable[[Key], str] = lambda key: f"flag {key.flag}",
) -> Settings:
    """Read, check and merge the configuration.

    Args:
        flags: by flat key name, what the caller gave: text as on the command line, or a value of the key's kind; None: not given.
        environ: the environment.
        config_file: the TOML file; None: the one that ``KVD_CONFIG`` names, if any.
        default_listen: the endpoint to use when none is configured.
        origin_of: where a value of ``flags`` is said to come from.

    Raises:
        ConfigError: a wrong key or value; the message names it, where it stands and what is allowed.
    """
    known = {key.name: key for key in all_keys()}
    if config_file is None and environ.get("KVD_CONFIG"):
        config_file = Path(environ["KVD_CONFIG"])
    _check_variables(environ, known)
    values: dict[str, Any] = {key.name: key.default for key in known.values()}
    origins = dict.fromkeys(known, "default")

    def accept(key: Key, value: Any, origin: str) -> None:
        if not key.rule.holds(value) or (key.kind is float and not math.isfinite(value)):
            raise _wrong(key, value, origin)
        values[key.name], origins[key.name] = value, origin

    for key, raw in _from_file(config_file, known) if config_file else ():
        origin = f"{config_file}:{key.section}.{key.name}"
        accept(key, _from_toml(key, raw, origin), origin)
    for key in known.values():
        if text := environ.get(key.variable):  # an empty variable is an unset one, as everywhere in systemd and shells
            accept(key, _from_text(key, text, f"env {key.variable}"), f"env {key.variable}")
    for name, given in flags.items():
        if given is not None and given != ():
            key = known[name]
            accept(key, _from_flag(key, given, origin_of(key)), origin_of(key))
    _fill_places(values, origins, environ, default_listen)
    config = _build(values)
    for conflict in conflicts(config):
        places = ", ".join(f"{name} from {origins[name]}" for name in conflict.keys)
        raise ConfigError(f"{_full_name(known[conflict.keys[0]])}: {conflict.message} ({places})")
    return Settings(config, origins)


def render(settings: Settings) -> str:
    """The configuration as TOML, each value with its origin in a comment."""
    lines: list[str] = []
    section = ""
    for key in all_keys():
        if key.section != section:
            section = key.section
            lines.append(f"\n[{section}]" if lines else f"[{section}]")
        value = getattr(getattr(settings.config, section), key.name)
        lines.append(f"{f'{key.name} = {toml_value(key, value)}':<60} # {settings.origins[key.name]}")
    return "\n".join(lines)


def toml_value(key: Key, value: Any) -> str:
    """A value as it stands in the file."""
    if key.is_size:
        text = format_size(value)
        return text if text.isdigit() else f'"{text}"'
    if key.kind is bool:
        return str(value).lower()
    if key.kind is tuple:
        return json.dumps(list(value), ensure_ascii=False)
    if key.kind is Path:
        return json.dumps("" if value == Path() else str(value), ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if key.kind is str else repr(value)


def _from_file(path: Path, known: Mapping[str, Key]) -> Iterator[tuple[Key, Any]]:
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path}: {error}") from error
    sections = list(dict.fromkeys(key.section for key in known.values()))
    for section, table in tables.items():
        if not isinstance(table, dict):
            home = f"it belongs under [{known[section].section}]" if section in known else _nearest(section, known)
            raise ConfigError(f"{path}: key {section} stands outside of a section; {home}")
        if section not in sections:
            raise ConfigError(f"{path}: unknown section [{section}]; {_nearest(section, sections)}")
        for name, raw in table.items():
            key = known.get(name)
            if key is None:
                here = [other.name for other in known.values() if other.section == section]
                raise ConfigError(f"{path}: unknown key {section}.{name}; {_nearest(name, known, shown=here)}")
            if key.section != section:
                raise ConfigError(f"{path}: key {name} stands under [{section}]; it belongs under [{key.section}]")
            yield key, raw


def _check_variables(environ: Mapping[str, str], known: Mapping[str, Key]) -> None:
    """Refuse a misspelt variable. Those that resemble no key are other people's: orchestrators set KVD_PORT and the like for a service named kvd."""
    names = {key.variable for key in known.values()} | OTHER_VARIABLES
    for variable in environ:
        if variable.startswith("KVD_") and variable not in names and difflib.get_close_matches(variable, names, cutoff=0.85):
            raise ConfigError(f"environment: unknown variable {variable}; {_nearest(variable, names)}")


def from_arguments(arguments: Mapping[str, object]) -> DaemonConfig:
    """The configuration of an embedded daemon: by flat key name what the application says, else the defaults. Neither environment nor files have a say.

    Raises:
        TypeError: there is no such key.
        ConfigError: a wrong value.
    """
    known = {key.name: key for key in all_keys()}
    for name in arguments:
        if name not in known:
            raise TypeError(f"unknown setting {name!r}; {_nearest(name, known)}")
    return load(arguments, environ={}, origin_of=lambda key: f"argument {key.name}").config


def _from_flag(key: Key, given: object, origin: str) -> Any:
    if isinstance(given, str):
        return _from_text(key, given, origin)
    if key.kind is float and type(given) is int:
        return float(given)
    if key.kind is Path and isinstance(given, Path):
        return given.expanduser().absolute()
    if key.kind is tuple and isinstance(given, Sequence):
        return tuple(given)
    if type(given) is not key.kind:
        raise _wrong(key, given, origin)
    return given


def _from_text(key: Key, text: str, origin: str) -> Any:
    """The value of a flag or a variable."""
    try:
        if key.kind is bool:
            return _WORDS[text.strip().lower()]
        if key.kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if key.is_size:
            return parse_size(text)
        if key.kind is Path:
            return _path(text)
        return key.kind(text)
    except (KeyError, ValueError, OverflowError) as error:
        raise _wrong(key, text, origin) from error


def _from_toml(key: Key, raw: Any, origin: str) -> Any:
    """The value of a key in the file; a text is a number nowhere but in sizes."""
    if key.is_size and isinstance(raw, str):
        return _from_text(key, raw, origin)
    if key.kind is Path and isinstance(raw, str):
        return _path(raw)
    if key.kind is tuple and isinstance(raw, list) and all(isinstance(item, str) for item in raw):
        return tuple(raw)
    if key.kind is float and type(raw) is int:
        return float(raw)
    if type(raw) is not key.kind:
        raise _wrong(key, raw, origin)
    return raw


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute() if text else Path()


def _fill_places(
    values: dict[str, Any], origins: dict[str, str], environ: Mapping[str, str], default_listen: Callable[[], str] | None
) -> None:
    """The two defaults that depend on where the daemon runs."""
    if values["state_dir"] == Path():
        values["state_dir"], origins["state_dir"] = default_state_dir(environ)
    if not values["listen"] and default_listen is not None:
        values["listen"] = (default_listen(),)
        origins["listen"] = "default"


def default_state_dir(environ: Mapping[str, str]) -> tuple[Path, str]:
    """The state directory when none is configured, and why it is that one."""
    if managed := environ.get("STATE_DIRECTORY"):
        return Path(managed.partition(":")[0]), "env STATE_DIRECTORY"
    if home := environ.get("XDG_STATE_HOME"):
        return Path(home) / "kvd", "env XDG_STATE_HOME"
    return Path("~/.local/state/kvd").expanduser(), "default"


def _build(values: Mapping[str, Any]) -> DaemonConfig:
    return DaemonConfig(
        **{section: room(**{field.name: values[field.name] for field in dataclasses.fields(room)}) for section, room in _rooms().items()}
    )


def _rooms() -> dict[str, type]:
    """The sections and their dataclasses."""
    return get_type_hints(DaemonConfig)


def _full_name(key: Key) -> str:
    return f"{key.section}.{key.name}"


def _wrong(key: Key, value: Any, origin: str) -> ConfigError:
    kind = "a size in bytes, or with KiB, MiB, GiB, TiB" if key.is_size else {int: "a whole number", float: "a number"}.get(key.kind, "")
    allowed = ", ".join(filter(None, (kind, key.rule.allowed)))
    return ConfigError(f"{_full_name(key)}: {value!r} (from {origin}) is not allowed; allowed: {allowed}")


def _nearest(name: str, candidates: Sequence[str] | Mapping[str, Key] | set[str] | frozenset[str], *, shown: Sequence[str] = ()) -> str:
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return "known: " + ", ".join(shown or sorted(candidates))
