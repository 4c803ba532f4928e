r"""The durable pins: ``recipes/recipes.<generation>``, small checksummed files that are written anew for every change.

Two files hold the same content whenever a change is acknowledged: generation *n* and then *n*+1, each by temporary file, sync, rename and sync of the
directory; then those of the state before are removed. So one damaged file costs nothing, and at every moment between a whole file holds the old or the new state.
A write that fails takes back what it got done. Changes that arrive while a write is under way share the next one.

    8 bytes "KVDRCP\r\n", u32 format version, u64 generation, u64 length, msgpack list of recipes, u32 crc32c of all before
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from crc32c import crc32c

from kvd.commands import Recipe, RecipeDurable
from kvd.observe.failpoints import declare, failpoint
from kvd.storage.errors import RecipesUnreadableError, UnknownFormatError
from kvd.storage.ports import Log, StorageInbox
from kvd.wal.durable import read_regular, remove_any, replace_file, sync_directory
from kvd.wal.quarantine import QUARANTINE_NAME, set_aside

declare(
    "recipes.before_sync",
    "recipes.before_rename",
    "recipes.after_rename",
    "recipes.copy.before_sync",
    "recipes.copy.before_rename",
    "recipes.copy.after_rename",
    "recipes.before_unlink",
    "recipes.restore.before_quarantine",
)

RECIPES_NAME = "recipes"
FORMAT_VERSION = 1
MAX_RECIPES = 4096
MAX_NESTING = 100
"""Levels of lists and maps in a recipe: far below what a decoder's stack bears, at a start as well."""
COPIES = 2
_MAGIC = b"KVDRCP\r\n"
_HEADER = struct.Struct("<8sIQQ")
_CRC = struct.Struct("<I")
_NAME = re.compile(r"^recipes\.(\d+)$")
_POINTS = (
    ("recipes.before_sync", "recipes.before_rename", "recipes.after_rename"),
    ("recipes.copy.before_sync", "recipes.copy.before_rename", "recipes.copy.after_rename"),
)
_QUARANTINE_MAX_BYTES = 64 << 20
_RETRY_S = 10.0
_DECODING_FAILURES = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, ArithmeticError)


class RecipeFileError(Exception):
    """A generation that is damaged."""


@dataclass(frozen=True, slots=True)
class DamagedRecipes:
    """A file that can't be used, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True, slots=True)
class RecipeGenerations:
    """What was found: the recipes of the newest readable generation, its number (0: none yet), and the damaged files.

    ``highest`` is the highest number in use, ``num_files`` the number of files, ``num_copies`` of those that hold ``recipes``.
    """

    recipes: dict[str, Recipe]
    generation: int
    highest: int
    num_files: int
    num_copies: int
    damaged: tuple[DamagedRecipes, ...]

    @property
    def is_settled(self) -> bool:
        """Whether there are exactly the copies that an acknowledged change leaves."""
        return self.num_files == self.num_copies and self.num_copies in {0, COPIES}


def encode_recipes(generation: int, recipes: dict[str, Recipe]) -> bytes:
    payload = msgspec.msgpack.encode(list(recipes.values()))
    body = _HEADER.pack(_MAGIC, FORMAT_VERSION, generation, len(payload)) + payload
    return body + _CRC.pack(crc32c(body))


def decode_recipes(data: bytes) -> tuple[int, dict[str, Recipe]]:
    """Generation and recipes of a file.

    Raises:
        RecipeFileError: damaged.
        UnknownFormatError: whole, but of another format.
    """
    if len(data) < _HEADER.size + _CRC.size or _CRC.unpack(data[-_CRC.size :])[0] != crc32c(data[: -_CRC.size]):
        raise RecipeFileError("its checksum does not match")
    magic, version, generation, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise RecipeFileError("it is no recipes file")
    if version != FORMAT_VERSION:
        raise UnknownFormatError(f"recipes of format {version}; this version reads format {FORMAT_VERSION}")
    payload = data[_HEADER.size : -_CRC.size]
    if len(payload) != length:
        raise RecipeFileError("its length is not what it says")
    try:
        recipes = msgspec.msgpack.decode(payload, type=list[Recipe])
    except _DECODING_FAILURES as error:
        raise RecipeFileError(f"it does not decode: {error}") from error
    return generation, {recipe.name: recipe for recipe in recipes}


def list_recipe_files(state_dir: Path) -> list[tuple[int, Path]]:
    """The (generation, path) of everything under a recipes file's name, newest first.

    Raises:
        OSError: the directory can't be listed.
    """
    directory = state_dir / RECIPES_NAME
    if not os.path.lexists(directory):
        return []
    paths = list(directory.iterdir())
    return sorted(((int(match[1]), path) for path in paths if (match := _NAME.match(path.name))), reverse=True)


def read_recipe_file(generation: int, path: Path) -> dict[str, Recipe]:
    """The recipes of one file.

    Raises:
        RecipeFileError: damaged, or another generation's.
        UnknownFormatError: whole, but of another format.
        OSError: it can't be read, or is no regular file.
    """
    found, recipes = decode_recipes(read_regular(path))
    if found != generation:
        raise RecipeFileError(f"it says generation {found}")
    return recipes


def read_recipes(state_dir: Path) -> RecipeGenerations:
    """The newest readable generation.

    Raises:
        RecipesUnreadableError: there are some, and none can be read; or it can't be told.
        UnknownFormatError: the newest whole one is of another format.
    """
    try:
        files = list_recipe_files(state_dir)
    except OSError as error:
        raise RecipesUnreadableError(f"the recipes (pins) can't be listed: {error}") from error
    newest: dict[str, Recipe] | None = None
    generation = num_copies = 0
    damaged: list[DamagedRecipes] = []
    for number, path in files:
        try:
            recipes = read_recipe_file(number, path)
        except (RecipeFileError, OSError) as error:
            if not os.path.lexists(path):
                return read_recipes(state_dir)  # a live daemon has written newer ones meanwhile
            damaged.append(DamagedRecipes(path, str(error)))
            continue
        except UnknownFormatError as error:
            if newest is None:
                raise
            damaged.append(DamagedRecipes(path, str(error)))
            continue
        if newest is None:
            newest, generation = recipes, number
        num_copies += recipes == newest
    if files and newest is None:
        raise RecipesUnreadableError(
            f"no generation of the recipes (pins) can be read: {'; '.join(map(str, damaged))}. Restore one, or remove them to lose the pins"
        )
    return RecipeGenerations(newest or {}, generation, files[0][0] if files else 0, len(files), num_copies, tuple(damaged))


def write_copies(state_dir: Path, first: int, recipes: dict[str, Recipe]) -> None:
    """Write ``recipes`` to the generations ``first`` and the next, both durable on return.

    Raises:
        OSError: it could not be written; what was, is taken back as far as possible.
        Exception: the recipes can't be encoded; nothing was touched.
    """
    directory = state_dir / RECIPES_NAME
    contents = [encode_recipes(first + copy, recipes) for copy in range(COPIES)]
    directory.mkdir(mode=0o700, exist_ok=True)
    try:
        for copy, data in enumerate(contents):
            replace_file(_path(state_dir, first + copy), data, points=_POINTS[copy])
    except OSError:
        with contextlib.suppress(OSError):
            for copy in range(COPIES):
                _path(state_dir, first + copy).unlink(missing_ok=True)
            sync_directory(directory)
        raise


def restore_copies(state_dir: Path, found: RecipeGenerations) -> int:
    """Make two files of what was found, and put damaged ones into quarantine; the number of the newest file.

    Raises:
        OSError: it could not be done; what was readable still is.
    """
    if found.is_settled:
        return found.highest
    first = found.highest + 1
    write_copies(state_dir, first, found.recipes)
    for damaged in found.damaged:
        failpoint("recipes.restore.before_quarantine")
        set_aside(damaged.path, state_dir / QUARANTINE_NAME, _QUARANTINE_MAX_BYTES)
    _remove_before(state_dir, first)
    return first + COPIES - 1


def _remove_before(state_dir: Path, first: int) -> None:
    failpoint("recipes.before_unlink")
    for number, path in list_recipe_files(state_dir):
        if not first <= number < first + COPIES:
            remove_any(path)
    sync_directory(state_dir / RECIPES_NAME)


def _path(state_dir: Path, generation: int) -> Path:
    return state_dir / RECIPES_NAME / f"recipes.{generation}"


@dataclass(frozen=True, slots=True)
class _Change:
    op_id: bytes
    name: str
    recipe: Recipe | None


class RecipeStore:
    """Implements the engine's ``RecipeBook``. ``recipes``, ``put`` and ``remove`` return at once; a thread writes and acknowledges.

    ``notes`` says, as sentences, what was found damaged at the start; ``fault`` why the files on disk are not as they should be at the moment.

    Raises:
        RecipesUnreadableError, UnknownFormatError: as ``read_recipes``.
    """

    def __init__(self, state_dir: Path, *, inbox: StorageInbox, log: Log) -> None:
        self._state_dir = state_dir
        self._inbox = inbox
        self._log = log
        found = read_recipes(state_dir)
        self.notes = tuple(f"a file of the recipes (pins) was set aside: {damaged}" for damaged in found.damaged)
        self.fault = ""
        for damaged in found.damaged:
            log.error("recipes.damaged", file=str(damaged), using_generation=found.generation)
        self._durable = dict(found.recipes)
        self._generation = found.highest
        try:
            self._generation = restore_copies(state_dir, found)
        except Exception as error:  # what could be read is served; the thread tries again
            self._generation += COPIES
            self._set_fault(error)
        self._pending: list[_Change] = []
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvd-recipes", daemon=True)
        self._thread.start()

    @property
    def generation(self) -> int:
        """Number of the newest file."""
        return self._generation

    def recipes(self) -> dict[str, Recipe]:
        with self._wake:
            return _changed(self._durable, self._pending)

    def put(self, op_id: bytes, recipe: Recipe) -> None:
        with self._wake:
            known = _changed(self._durable, self._pending)
            if recipe.name not in known and len(known) >= MAX_RECIPES:
                self._inbox.put_internal(RecipeDurable(op_id, f"there are {MAX_RECIPES} pins, no more are kept"))
                return
            self._pending.append(_Change(op_id, recipe.name, recipe))
            self._wake.notify_all()

    def remove(self, op_id: bytes, name: str) -> None:
        with self._wake:
            self._pending.append(_Change(op_id, name, None))
            self._wake.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Write what waits and end the thread; whether it ended in time."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: bool(self._pending) or self._closing, _RETRY_S if self.fault else None)
                batch, closing = list(self._pending), self._closing
            if batch:
                self._take(batch)
            elif closing:
                return
            else:
                self._write(self._durable)

    def _take(self, batch: list[_Change]) -> None:
        refusals = [_refusal(change.recipe) for change in batch]
        accepted = [change for change, refusal in zip(batch, refusals, strict=True) if not refusal]
        recipes = _changed(self._durable, accepted)
        error = self._write(recipes) if accepted else ""
        with self._wake:
            if not error:
                self._durable = recipes
            del self._pending[: len(batch)]
        for change, refusal in zip(batch, refusals, strict=True):
            self._inbox.put_internal(RecipeDurable(change.op_id, refusal or error))

    def _write(self, recipes: dict[str, Recipe]) -> str:
        """Have both files hold ``recipes``; empty, or why they do not."""
        first = self._generation + 1
        self._generation += COPIES  # an attempt that failed may stand on disk all the same: its numbers are used up
        try:
            write_copies(self._state_dir, first, recipes)
        except Exception as error:  # whoever waits is answered, whatever it was, and the thread lives on
            self._log.error("recipes.write_failed", error=repr(error))
            if any(os.path.lexists(_path(self._state_dir, first + copy)) for copy in range(COPIES)):
                self._set_fault(error)
            return str(error) or repr(error)
        self.fault = ""
        try:
            _remove_before(self._state_dir, first)
        except OSError as error:  # they are older than both that count; the next change tries again
            self._log.warning("recipes.old_files_stay", error=str(error))
        return ""

    def _set_fault(self, error: Exception) -> None:
        self.fault = f"the recipes (pins) on disk are not as they should be: {error}"
        self._log.error("recipes.not_restored", error=str(error))


def _refusal(recipe: Recipe | None) -> str:
    """Why a recipe can't be kept; empty if it can. What one reader can't take would cost all pins of a file."""
    if recipe is None:
        return ""
    if _nesting(recipe.messages, recipe.template_args) > MAX_NESTING:
        return f"lists and maps are nested more than {MAX_NESTING} deep"
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(recipe), type=Recipe)
    except Exception as error:  # of one change; the others go on
        return f"it can't be encoded: {error!r}"
    return ""


def _nesting(*values: Any) -> int:
    """Levels of lists and maps, counted as far as one above the bound."""
    level, depth = [each for each in values if isinstance(each, list | tuple | dict)], 0
    while level and depth <= MAX_NESTING:
        depth += 1
        inner = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        level = [part for part in inner if isinstance(part, list | tuple | dict)]
    return depth


def _changed(recipes: dict[str, Recipe], changes: list[_Change]) -> dict[str, Recipe]:
    result = dict(recipes)
    for change in changes:
        if change.recipe is None:
            result.pop(change.name, None)
        else:
            result[change.name] = change.recipe
    return result
