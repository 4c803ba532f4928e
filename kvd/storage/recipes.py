r"""The durable pins: ``recipes/recipes.<generation>``, a small checksummed file that is written anew for every change.

A change is acknowledged when the new generation is on disk: temporary file, sync, rename, sync of the directory. The generation before it is kept, and read when the
newest is damaged. Changes that arrive while a write is under way share the next one.

    8 bytes "KVDRCP\r\n", u32 format version, u64 generation, u64 length, msgpack list of recipes, u32 crc32c of all before
"""

from __future__ import annotations

import re
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec
from crc32c import crc32c

from kvd.commands import Recipe, RecipeDurable
from kvd.observe.failpoints import declare, failpoint
from kvd.storage.errors import RecipesUnreadableError, UnknownFormatError
from kvd.storage.ports import Log, StorageInbox
from kvd.wal.durable import replace_file, sync_directory

declare("recipes.before_sync", "recipes.before_rename", "recipes.after_rename", "recipes.before_unlink")

RECIPES_NAME = "recipes"
FORMAT_VERSION = 1
MAX_RECIPES = 4096
_MAGIC = b"KVDRCP\r\n"
_HEADER = struct.Struct("<8sIQQ")
_CRC = struct.Struct("<I")
_NAME = re.compile(r"^recipes\.(\d+)$")
_POINTS = ("recipes.before_sync", "recipes.before_rename", "recipes.after_rename")


class RecipeFileError(Exception):
    """A generation that is damaged."""


@dataclass(frozen=True, slots=True)
class RecipeGenerations:
    """What was found: the recipes of the newest readable generation, its number (0: none yet), and the damaged ones' names."""

    recipes: dict[str, Recipe]
    generation: int
    highest: int
    damaged: tuple[str, ...]


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
    except msgspec.MsgspecError as error:
        raise RecipeFileError(f"it does not decode: {error}") from error
    return generation, {recipe.name: recipe for recipe in recipes}


def list_recipe_files(state_dir: Path) -> list[tuple[int, Path]]:
    """The (generation, path) of every recipes file, newest first."""
    directory = state_dir / RECIPES_NAME
    if not directory.is_dir():
        return []
    return sorted(((int(match[1]), path) for path in directory.iterdir() if (match := _NAME.match(path.name))), reverse=True)


def read_recipes(state_dir: Path) -> RecipeGenerations:
    """The newest readable generation.

    Raises:
        RecipesUnreadableError: there are some, and none can be read.
        UnknownFormatError: the newest whole one is of another format.
    """
    files = list_recipe_files(state_dir)
    damaged: list[str] = []
    for generation, path in files:
        try:
            found, recipes = decode_recipes(path.read_bytes())
            if found == generation:
                return RecipeGenerations(recipes, generation, files[0][0], tuple(damaged))
            damaged.append(f"{path}: it says generation {found}")
        except (RecipeFileError, OSError) as error:
            damaged.append(f"{path}: {error}")
    if files:
        raise RecipesUnreadableError(
            f"no generation of the recipes (pins) can be read: {'; '.join(damaged)}. Restore one, or remove them to lose the pins"
        )
    return RecipeGenerations({}, 0, 0, ())


@dataclass(frozen=True, slots=True)
class _Change:
    op_id: bytes
    name: str
    recipe: Recipe | None


class RecipeStore:
    """Implements the engine's ``RecipeBook``. ``recipes``, ``put`` and ``remove`` return at once; a thread writes and acknowledges.

    Raises:
        RecipesUnreadableError, UnknownFormatError: as ``read_recipes``.
        OSError: the directory can't be made.
    """

    def __init__(self, state_dir: Path, *, inbox: StorageInbox, log: Log) -> None:
        self._directory = state_dir / RECIPES_NAME
        self._directory.mkdir(mode=0o700, exist_ok=True)
        found = read_recipes(state_dir)
        for damage in found.damaged:
            log.error("recipes.damaged", file=damage, using_generation=found.generation)
        self.damaged = found.damaged
        self._inbox = inbox
        self._log = log
        self._durable = dict(found.recipes)
        self._readable = found.generation
        self._generation = found.highest
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
                self._wake.wait_for(lambda: bool(self._pending) or self._closing)
                batch = list(self._pending)
            if not batch:
                return
            recipes = _changed(self._durable, batch)
            error = ""
            try:
                self._write(recipes)
            except OSError as caught:
                error = str(caught)
                self._log.error("recipes.write_failed", error=error)
            with self._wake:
                if not error:
                    self._durable = recipes
                del self._pending[: len(batch)]
            for change in batch:
                self._inbox.put_internal(RecipeDurable(change.op_id, error))

    def _write(self, recipes: dict[str, Recipe]) -> None:
        generation = self._generation + 1
        self._generation = generation  # an attempt that failed after its rename may stand on disk: its number is used up
        replace_file(self._directory / f"recipes.{generation}", encode_recipes(generation, recipes), points=_POINTS)
        previous, self._readable = self._readable, generation
        failpoint("recipes.before_unlink")
        for number, path in list_recipe_files(self._directory.parent):
            if number not in {generation, previous}:
                path.unlink(missing_ok=True)
        sync_directory(self._directory)


def _changed(recipes: dict[str, Recipe], changes: list[_Change]) -> dict[str, Recipe]:
    result = dict(recipes)
    for change in changes:
        if change.recipe is None:
            result.pop(change.name, None)
        else:
            result[change.name] = change.recipe
    return result
