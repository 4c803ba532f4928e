"""``forget`` on disk: one thread, one forget after the other, each step durable before the next.

    1  the intent is on disk: from here on a start completes what a crash interrupts
    2  the nodes have left index and store, no copy of them is under way, and the log goes on in a new segment
    3  the recipes of its pins are gone from both files, older files too
    4  a whole tenant of an encrypted store: its keys are destroyed; else all rows that stay are in a new generation and the old one is unlinked
    5  the log's segments that may hold it are unlinked, and so are generations set aside and what is in quarantine; of an encrypted store, what stays of a tenant was
       sealed with a fresh key since before step 2, and the old one is destroyed
    6  the intent is gone, and whoever asked is told

A forget that fails is not told as done; its intent stays, and its work is done with the next forget, at the next start, or when it is tried again after growing
pauses. Until then it would take any pin of what it forgets, so no such pin is accepted. A store that can't be written is no reason: it gives way to an empty one,
and what is in memory is written anew.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvd.cache.hashing import Namespace
from kvd.cache.tenants import Selection
from kvd.commands import ForgetDone, Recipe
from kvd.observe.failpoints import declare, failpoint
from kvd.storage.codec import PLAIN, Codec
from kvd.storage.forget_intent import Mark, mark_of, read_intent, write_intent
from kvd.storage.generations import STORE_NAME
from kvd.storage.keys import KeyRing
from kvd.storage.node_forgetting import ForgetNodes
from kvd.storage.ports import Log, StorageInbox
from kvd.storage.recipes import RecipeStore
from kvd.storage.running import Running
from kvd.wal.disk_faults import fault_sentence
from kvd.wal.durable import erase, sync_directory
from kvd.wal.quarantine import QUARANTINE_NAME

declare(
    "forget.before_intent",
    "forget.before_nodes",
    "forget.before_recipes",
    "forget.before_rewrite",
    "forget.before_log",
    "forget.before_quarantine",
    "forget.before_done",
    "forget.after_done",
)

_NODES_S = 120.0
_LOG_S = 60.0
_POLL_S = 0.01
_RETRY_MIN_S = 60.0
_RETRY_MAX_S = 3600.0
_NUM_TRIES = 3
MAX_UNFINISHED = 256
MAX_UNFINISHED_BYTES = 4 << 20
"""Of the hashes that the intent names."""


@dataclass(frozen=True, slots=True)
class _Asked:
    op_id: bytes
    selection: Selection | None
    """None: what is unfinished alone."""
    pins: dict[str, Recipe]


class ForgetError(Exception):
    """A step that could not be done."""


class Parts(Protocol):
    """What the steps work on; ``running`` is None where nothing is persisted."""

    @property
    def running(self) -> Running | None: ...

    @property
    def keys(self) -> KeyRing | None: ...


class Forgetting:
    """``request`` returns at once; ``ForgetDone`` comes through the inbox."""

    def __init__(
        self,
        state_dir: Path,
        parts: Parts,
        *,
        recipes: RecipeStore,
        inbox: StorageInbox,
        log: Log,
        fingerprint: bytes,
        block_bytes: int,
        codec: Codec = PLAIN,
    ) -> None:
        """``block_bytes``: of a block's packed tokens. Pins of what an earlier life was forgetting are gone on return.

        Raises:
            UnknownFormatError: the intent is of another format.
        """
        self._state_dir = state_dir
        self._parts = parts
        self._recipes = recipes
        self._inbox = inbox
        self._log = log
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._codec = codec
        self._marks, damage = read_intent(state_dir, codec)
        if damage:
            log.warning("storage.damage", what=damage)
        if self._marks:
            self._forget_recipes(tuple(self._marks), {}, must_succeed=False)
        self._is_written = True
        """Whether the intent on disk names all of them."""
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._begun: dict[bytes, Selection] = {}
        """What was asked for and is not answered."""
        self._stopping = threading.Event()
        self._retry_s = _RETRY_MIN_S
        self._reported = ""
        self._thread = threading.Thread(target=self._run, name="kvd-forget", daemon=True)

    @property
    def unfinished(self) -> tuple[Mark, ...]:
        """What was begun and is not done: at a start, what is not to be believed of store and log."""
        return tuple(self._marks)

    def start(self) -> None:
        """Begin, with what the start found unfinished."""
        self._thread.start()
        if self._marks:
            self._asked.put(_Asked(b"", None, {}))

    def request(self, op_id: bytes, selection: Selection, pins: dict[str, Recipe]) -> None:
        """``pins``: recipes that are in the selection by what they are today, whatever tokens they state."""
        self._begun[op_id] = selection
        self._asked.put(_Asked(op_id, selection, pins))

    def takes(self, recipe: Recipe) -> bool:
        """Whether what is not done yet would take this pin; from any thread."""
        return any(each.holds(recipe.tenant_salt, recipe.token_ids) for each in tuple(self._begun.values())) or any(
            mark.takes(recipe, self._fingerprint, self._block_bytes) for mark in tuple(self._marks)
        )

    @property
    def has_room(self) -> bool:
        """Whether another forget may be asked for: what is not done yet stays in memory and on disk until it is."""
        marks = tuple(self._marks)
        num_bytes = sum(len(key) for mark in marks for chain in mark.chains for key in chain)
        return len(marks) + len(self._begun) < MAX_UNFINISHED and num_bytes < MAX_UNFINISHED_BYTES

    def stop(self, timeout_s: float) -> bool:
        """End after what is under way, or in the middle of it after ``timeout_s``: the next start completes it."""
        self._stopping.set()
        self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while (asked := self._next()) is not None:
            num_blocks, num_marks, error = 0, len(self._marks), ""
            try:
                num_blocks = self._forget(asked)
            except ForgetError as failure:
                error = str(failure)
            except Exception as failure:  # whoever waits is answered, whatever it was
                error = fault_sentence(failure)
            if error and error != self._reported:
                self._log.error("forget.failed", error=error)
            elif not error and num_marks:
                self._log.info("forget.completed", num_marks=num_marks)
            self._reported = error
            self._begun.pop(asked.op_id, None)
            self._inbox.put_internal(ForgetDone(asked.op_id, num_blocks, error))

    def _next(self) -> _Asked | None:
        """What is asked for next; after a while without anything, what is left of a forget that failed."""
        if not self._marks:
            self._retry_s = _RETRY_MIN_S
        try:
            return self._asked.get(timeout=self._retry_s if self._marks else None)
        except queue.Empty:
            self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
            return _Asked(b"", None, {})

    def _forget(self, asked: _Asked) -> int:
        running = self._parts.running
        self._refuse_unopened(running)
        failpoint("forget.before_intent")
        if asked.selection is not None:
            mark = mark_of(asked.selection, self._namespaces(asked.selection, running), self._block_bytes)
            if mark not in self._marks:
                self._marks.append(mark)  # before it is written down: what can't be is tried again while this process lives
                self._is_written = False
        if not self._is_written:
            write_intent(self._state_dir, self._marks, self._codec)
            self._is_written = True
        marks = tuple(self._marks)
        failpoint("forget.before_nodes")
        superseded = self._renew_keys(marks)
        num_nodes, lsn = self._forget_nodes(running, marks) if running is not None else (0, 0)
        failpoint("forget.before_recipes")
        salts = self._forget_recipes(marks, asked.pins)
        failpoint("forget.before_rewrite")
        if running is not None:
            self._rewrite(running, marks, salts)
        failpoint("forget.before_log")
        if running is not None:
            self._wait_for_log(running, lsn)
        if superseded and self._parts.keys is not None:
            self._parts.keys.drop_superseded(superseded)
        failpoint("forget.before_quarantine")
        self._erase_what_was_set_aside(running)
        failpoint("forget.before_done")
        write_intent(self._state_dir, [])
        failpoint("forget.after_done")
        self._marks.clear()
        return num_nodes

    def _renew_keys(self, marks: tuple[Mark, ...]) -> set[bytes]:
        """For the prefix of a tenant that stays: what stays of it, and what comes, is sealed with a fresh key, and the old one can be destroyed."""
        keys = self._parts.keys
        if keys is None or not any(mark.chains for mark in marks):
            return set()
        salts = {salt for salt in keys.tenants() if any(mark.has_salt(salt) for mark in marks)}
        keys.renew(salts)
        return salts

    def _refuse_unopened(self, running: Running | None) -> None:
        if running is None and any((self._state_dir / name).exists() for name in (STORE_NAME, "wal")):
            raise ForgetError(
                "nothing is persisted (persist = false), but an earlier start left a store; remove kv/ and wal/, or start with persist"
            )

    def _namespaces(self, selection: Selection, running: Running | None) -> set[Namespace]:
        known = set() if running is None else set(running.recovered.index.namespaces.copy().values())
        return known | ({Namespace(self._fingerprint, selection.salt)} if selection.salt is not None else set())

    def _forget_nodes(self, running: Running, marks: tuple[Mark, ...]) -> tuple[int, int]:
        total = 0
        for _ in range(_NUM_TRIES):
            done: queue.SimpleQueue[tuple[int, int, str]] = queue.SimpleQueue()
            running.planner.post(ForgetNodes(marks, lambda *result, done=done: done.put(result)))
            num_nodes, lsn, error = self._wait_for(done, running)
            total += num_nodes
            if not error:
                return total, lsn
            if why := running.store.begin_anew():
                error = why
                break
        raise ForgetError(error)

    def _wait_for(self, done: queue.SimpleQueue[tuple[int, int, str]], running: Running) -> tuple[int, int, str]:
        deadline_s = time.monotonic() + _NODES_S
        while time.monotonic() < deadline_s and running.planner.is_alive and not self._stopping.is_set():
            try:
                return done.get(timeout=0.5)
            except queue.Empty:
                continue
        raise ForgetError("the checkpoint without it did not come")

    def _forget_recipes(self, marks: tuple[Mark, ...], pins: dict[str, Recipe], *, must_succeed: bool = True) -> set[bytes]:
        """Remove the pins; the salts that they were under."""
        salts: set[bytes] = set()

        def takes(recipe: Recipe) -> bool:
            taken = pins.get(recipe.name) == recipe or any(mark.takes(recipe, self._fingerprint, self._block_bytes) for mark in marks)
            if taken:
                salts.add(recipe.tenant_salt)
            return taken

        if (error := self._recipes.forget(takes)) and must_succeed:
            raise ForgetError(error)
        return salts

    def _rewrite(self, running: Running, marks: tuple[Mark, ...], salts: set[bytes]) -> None:
        keys = self._parts.keys
        whole = [mark for mark in marks if not mark.chains]
        if keys is not None and whole:
            if not running.wal.flush(_LOG_S):  # what is written from here on is sealed with fresh keys
                raise ForgetError(f"the log could not be written: {running.wal.fault}")
            for salt in {*keys.tenants(), *salts}:
                if any(mark.has_salt(salt) for mark in whole):
                    keys.destroy(salt)
            if len(whole) == len(marks):
                return
        if error := running.store.rewrite():
            raise ForgetError(error)

    def _wait_for_log(self, running: Running, lsn: int) -> None:
        deadline_s = time.monotonic() + _LOG_S
        while running.wal.lowest_last_lsn <= lsn:
            if time.monotonic() >= deadline_s or self._stopping.is_set():
                raise ForgetError(f"the log's old segments are still there{running.wal.fault and ': '}{running.wal.fault}")
            time.sleep(_POLL_S)

    def _erase_what_was_set_aside(self, running: Running | None) -> None:
        if running is not None and (error := running.store.erase_others()):
            raise ForgetError(error)
        quarantine = self._state_dir / QUARANTINE_NAME
        if quarantine.exists():
            erase(quarantine)
            sync_directory(self._state_dir)
