r"""The durable pins: ``recipes/recipes.<generation>``, small checksummed files that are written anew for every change.

Two files hold the same content whenever a change is acknowledged: generation *n* and then *n*+1, each by temporary file, sync, rename and sync of the
directory; then those of the state before are removed. So one damaged file costs nothing, and at every moment between a whole file holds the old or the new state.
A write that fails takes back what it got done. Changes that arrive while a write is under way share the next one.

    8 bytes "KVDRCP\r\n", u32 format version, u64 generation, u64 length, msgpack list of recipes, u32 crc32c of all before
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from crc32c import crc32c

from kvd.cache.tenants import pin_salt
from kvd.commands import Recipe, RecipeDurable
from kvd.observe.failpoints import declare
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.errors import RecipesUnreadableError
from kvd.storage.ports import Log, StorageInbox
from kvd.storage.schema import BadRowError, check_format
from kvd.storage.two_copies import COPIES, CopyDamagedError, Found, TwoCopies
from kvd.wal.disk_faults import fault_sentence
from kvd.wal.durable import read_regular

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
_MAGIC = b"KVDRCP\r\n"
_HEADER = struct.Struct("<8sIQQ")
_CRC = struct.Struct("<I")
_RETRY_S = 10.0
_UNBOUNDED = 1 << 62
_FRAME_BYTES = 64
_RECIPE_FRAME_BYTES = 256
"""More than encryption adds to a recipe."""
_DECODING_FAILURES = (BadRowError, msgspec.MsgspecError, RecursionError, ValueError, TypeError, ArithmeticError)


class RecipeFileError(CopyDamagedError):
    """A generation that is damaged."""


def encode_recipes(generation: int, recipes: dict[str, Recipe], codec: Codec = PLAIN) -> bytes:
    payload = codec.pack_recipes(generation, list(recipes.values()))
    body = _HEADER.pack(_MAGIC, codec.format_of(FORMAT_VERSION), generation, len(payload)) + payload
    return body + _CRC.pack(crc32c(body))


def decode_recipes(data: bytes, codec: Codec = PLAIN) -> tuple[int, dict[str, Recipe]]:
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
    check_format("recipes", version, codec.format_of(FORMAT_VERSION))
    payload = data[_HEADER.size : -_CRC.size]
    if len(payload) != length:
        raise RecipeFileError("its length is not what it says")
    try:
        recipes = codec.unpack_recipes(generation, payload)
    except _DECODING_FAILURES as error:
        raise RecipeFileError(f"it does not decode: {error}") from error
    return generation, {recipe.name: recipe for recipe in recipes}


def recipe_files(state_dir: Path) -> TwoCopies:
    """The two files of the recipes."""
    return TwoCopies(state_dir, RECIPES_NAME)


def list_recipe_files(state_dir: Path) -> list[tuple[int, Path]]:
    """As ``TwoCopies.files``."""
    return recipe_files(state_dir).files()


def read_recipe_file(generation: int, path: Path, codec: Codec = PLAIN) -> dict[str, Recipe]:
    """The recipes of one file.

    Raises:
        RecipeFileError: damaged, or another generation's.
        UnknownFormatError: whole, but of another format.
        OSError: it can't be read, or is no regular file.
    """
    return _decode(generation, read_regular(path), codec)


def _decode(generation: int, data: bytes, codec: Codec) -> dict[str, Recipe]:
    found, recipes = decode_recipes(data, codec)
    if found != generation:
        raise RecipeFileError(f"it says generation {found}")
    return recipes


def read_recipes(state_dir: Path, codec: Codec = PLAIN) -> Found[dict[str, Recipe]]:
    """The newest readable generation; its ``value`` is None if there is none yet.

    Raises:
        RecipesUnreadableError: there are some, and none can be read; or it can't be told.
        UnknownFormatError: the newest whole one is of another format.
    """
    files = recipe_files(state_dir)
    try:
        found = files.read(lambda number, data: _decode(number, data, codec))
        found = files.read_unsynced(found, lambda data: decode_recipes(data, codec))
    except OSError as error:
        raise RecipesUnreadableError(f"the recipes (pins) can't be listed: {error}") from error
    if found.damaged and found.value is None:
        raise RecipesUnreadableError(
            f"no generation of the recipes (pins) can be read: {'; '.join(map(str, found.damaged))}. Restore one, or remove them to lose the pins"
        )
    return found


def restore_recipes(state_dir: Path, found: Found[dict[str, Recipe]], codec: Codec = PLAIN) -> int:
    """Make two files of what was found, and put damaged ones into quarantine; the number of the newest file.

    Raises:
        OSError: it could not be done; what was readable still is.
    """
    return recipe_files(state_dir).restore(found, lambda number: encode_recipes(number, found.value or {}, codec))


@dataclass(frozen=True, slots=True)
class _Change:
    op_id: bytes
    name: str
    recipe: Recipe | None
    must_sync: bool
    on_done: Callable[[str], None] | None = None
    """Told instead of the engine."""
    takes: Callable[[Recipe], bool] | None = None
    """What goes from memory, whatever the disk says."""


class RecipeStore:
    """Implements the engine's ``RecipeBook``. ``recipes``, ``put`` and ``remove`` return at once; a thread writes and acknowledges.

    ``notes`` says, as sentences, what was found damaged at the start; ``fault`` why the files on disk can't be written, or are not as they should be, at the
    moment: it is tried again with the next change, and every ten seconds. ``max_bytes`` bounds a file: a pin that would make it larger is refused.

    With ``unsynced_max_s`` a change is acknowledged when it is written, and synced with all others so long after the first of them; until then the two files of the
    state before stand.

    Raises:
        RecipesUnreadableError, UnknownFormatError: as ``read_recipes``.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        inbox: StorageInbox,
        log: Log,
        max_bytes: int = _UNBOUNDED,
        unsynced_max_s: float = 0.0,
        codec: Codec = PLAIN,
    ) -> None:
        self._unsynced_max_s = unsynced_max_s
        self._unsynced_since_s: float | None = None
        self._files = recipe_files(state_dir)
        self._max_bytes = max_bytes
        self._codec = codec
        self._inbox = inbox
        self._log = log
        found = _with_salts_of_today(read_recipes(state_dir, codec))
        self.notes = tuple(f"a file of the recipes (pins) was set aside: {damaged}" for damaged in found.damaged)
        self.fault = ""
        for damaged in found.damaged:
            log.error("recipes.damaged", file=str(damaged), using_generation=found.generation)
        self._durable = dict(found.value or {})
        codec.hold_tenants(_tenants(self._durable))
        self._sizes = {name: _about_bytes(recipe) for name, recipe in self._durable.items()}
        self._generation = found.highest
        try:
            self._generation = restore_recipes(state_dir, found, codec)
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

    @property
    def file_bytes(self) -> int:
        """At least what one file of the present recipes takes."""
        return _FRAME_BYTES + sum(self._sizes.values())

    def recipes(self) -> dict[str, Recipe]:
        with self._wake:
            return _changed(self._durable, self._pending)

    def put(self, op_id: bytes, recipe: Recipe) -> None:
        with self._wake:
            known = _changed(self._durable, self._pending)
            if recipe.name not in known and len(known) >= MAX_RECIPES:
                self._inbox.put_internal(RecipeDurable(op_id, f"there are {MAX_RECIPES} pins, no more are kept"))
                return
            self._pending.append(_Change(op_id, recipe.name, recipe, must_sync=False))
            self._wake.notify_all()

    def remove(self, op_id: bytes, name: str, *, must_sync: bool = False) -> None:
        """``must_sync``: durable when acknowledged, whatever ``unsynced_max_s`` allows."""
        with self._wake:
            self._pending.append(_Change(op_id, name, None, must_sync=must_sync))
            self._wake.notify_all()

    def forget(self, takes: Callable[[Recipe], bool]) -> str:
        """Remove the pins that ``takes`` takes, and every file that may hold one removed before; waits for it. Empty, or why not: then they are gone from memory alone."""
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        with self._wake:
            names = [name for name, recipe in _changed(self._durable, self._pending).items() if takes(recipe)]
            self._pending += [_Change(b"", name, None, must_sync=True, on_done=lambda _: None) for name in names]
            self._pending.append(_Change(b"", "", None, must_sync=True, on_done=done.put, takes=takes))
            self._wake.notify_all()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                return done.get(timeout=1.0) or self.fault
        return "the recipes' thread has ended"

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
                self._wake.wait_for(lambda: bool(self._pending) or self._closing, self._wait_s())
                batch, closing = list(self._pending), self._closing
            if batch:
                self._take(batch)
            elif closing:
                if self._unsynced_since_s is not None:
                    self._write(self._durable)
                return
            elif self.fault or self._wait_s() == 0.0:
                self._write(self._durable)

    def _wait_s(self) -> float | None:
        """How long the thread may sleep; None if nothing is to be written without a change."""
        if self.fault:
            return _RETRY_S
        if self._unsynced_since_s is None:
            return None
        return max(0.0, self._unsynced_since_s + self._unsynced_max_s - time.monotonic())

    def _take(self, batch: list[_Change]) -> None:
        sizes = dict(self._sizes)
        whys = [refusal(change.recipe) or self._fit(change, sizes) for change in batch]
        accepted = [change for change, why in zip(batch, whys, strict=True) if not why]
        recipes = _changed(self._durable, accepted)
        error = ""
        if accepted:
            may_wait = (
                self._unsynced_max_s > 0 and not self.fault and self._wait_s() != 0.0 and not any(change.must_sync for change in accepted)
            )
            error = self._write_unsynced(recipes) if may_wait else self._write(recipes)
        with self._wake:
            if not error:
                self._durable, self._sizes = recipes, sizes
            else:  # what is forgotten is served no more: every later write is without it, and a start takes it out again
                for takes in [change.takes for change in batch if change.takes is not None]:
                    self._durable = {name: recipe for name, recipe in self._durable.items() if not takes(recipe)}
                    self._sizes = {name: size for name, size in self._sizes.items() if name in self._durable}
            del self._pending[: len(batch)]
        for change, why in zip(batch, whys, strict=True):
            if change.on_done is not None:
                change.on_done(why or error)
            else:
                self._inbox.put_internal(RecipeDurable(change.op_id, why or error))

    def _fit(self, change: _Change, sizes: dict[str, int]) -> str:
        """Count a change in; why not, if the recipes would take more than their part. What makes them smaller always may."""
        if change.recipe is None:
            sizes.pop(change.name, None)
            return ""
        before = sizes.get(change.name, 0)
        after = _about_bytes(change.recipe)
        total = _FRAME_BYTES + sum(sizes.values()) - before + after
        if after > before and total > self._max_bytes:
            return f"the recipes of all pins would take {total} bytes; store_max_bytes leaves them {self._max_bytes}"
        sizes[change.name] = after
        return ""

    def _write_unsynced(self, recipes: dict[str, Recipe]) -> str:
        """Have the unsynced file hold ``recipes``; empty, or why it does not."""
        self._generation += 1
        self._codec.hold_tenants(_tenants(self._durable) | _tenants(recipes))
        try:
            self._files.write_unsynced(encode_recipes(self._generation, recipes, self._codec))
        except Exception as error:  # whoever waits is answered, whatever it was, and the thread lives on
            self._set_fault(error)
            return fault_sentence(error)
        if self._unsynced_since_s is None:
            self._unsynced_since_s = time.monotonic()
        return ""

    def _write(self, recipes: dict[str, Recipe]) -> str:
        """Have both files hold ``recipes``; empty, or why they do not."""
        first = self._generation + 1
        self._generation += COPIES  # an attempt that failed may stand on disk all the same: its numbers are used up
        self._codec.hold_tenants(_tenants(self._durable) | _tenants(recipes))
        try:
            self._files.write(first, lambda number: encode_recipes(number, recipes, self._codec))
        except Exception as error:  # whoever waits is answered, whatever it was, and the thread lives on
            self._set_fault(error)
            return fault_sentence(error)
        self._unsynced_since_s = None
        self._codec.hold_tenants(_tenants(recipes))
        try:
            self._files.remove_before(first)
        except OSError as error:  # they are older than both that count; the next try removes them
            self._set_fault(error)
            return ""
        if self.fault:
            self._log.info("recipes.resumed")
        self.fault = ""
        return ""

    def _set_fault(self, error: Exception) -> None:
        if not self.fault:
            self._log.error("recipes.failed", error=fault_sentence(error))
        self.fault = f"{fault_sentence(error)}: the recipes (pins) on disk can't be written, or are not as they should be"


def _with_salts_of_today(found: Found[dict[str, Recipe]]) -> Found[dict[str, Recipe]]:
    """What was found, for ``restore_recipes`` to write anew if 0.1.0 wrote a salt of it: no request would have that one."""
    recipes = {
        name: msgspec.structs.replace(recipe, tenant_salt=pin_salt(name, recipe.tenant_salt))
        for name, recipe in (found.value or {}).items()
    }
    return found if recipes == (found.value or {}) else replace(found, value=recipes, num_copies=0)


def _tenants(recipes: dict[str, Recipe]) -> set[bytes]:
    return {recipe.tenant_salt for recipe in recipes.values()}


def refusal(recipe: Recipe | None) -> str:
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


def _about_bytes(recipe: Recipe) -> int:
    """At least what a recipe takes in a file."""
    return _RECIPE_FRAME_BYTES + len(msgspec.msgpack.encode(recipe))


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
