"""Pins on the engine's side: compute a recipe's prefix, hold it in the tree, make it durable, and only then acknowledge.

A pin goes through these stages, each begun by the end of the one before:

    computing   an internal request of the scheduler fills the blocks
    holding     ``cache.pin`` (done while the blocks are still referenced, so that none can leave in between)
    recorded    the recipe is written and fsynced (``RecipeDurable``)
    persisted   a checkpoint holds the bytes (``CheckpointDone``); a failing store degrades the acknowledgement to ``recipe``

At start the stages up to *holding* are run for every recipe on disk; what rehydration restored is held without computing. A pin of a name that
exists takes the place of the old one: in memory when it is held, on disk when its recipe is durable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvd.cache.events import BlockOrigin
from kvd.cache.hashing import Namespace
from kvd.cache.manager import CacheManager, PinCapacityError, PinNotReadyError
from kvd.cache.tenants import Selection, pin_label, pin_tenant
from kvd.commands import (
    CheckpointDone,
    Event,
    OpDone,
    OpFailed,
    PinPrefix,
    Recipe,
    RecipeDurable,
    RequestDone,
    RequestFailed,
    Submit,
    Unpin,
)
from kvd.engine.adapters import FORGOTTEN, Adapters
from kvd.engine.ports import CacheObserver, RecipeBook
from kvd.types import TOKEN_BYTES, ErrorCode, SamplingParams

_EXPIRY_RETRY_ROUNDS = 30
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class _Pending:
    """A pin on its way: ``op_id`` is empty for one that the start restores."""

    op_id: bytes
    recipe: Recipe
    num_blocks: int
    is_superseded: bool = False
    """Its name was unpinned or pinned anew before the start had computed it, or its prefix was forgotten."""
    is_disturbed: bool = False
    """A longer prefix was forgotten while it was computed: its blocks may have gone with that, and are computed once more."""


def _is_in(selection: Selection, pending: _Pending) -> bool:
    return selection.holds(pending.recipe.tenant_salt, pending.recipe.token_ids)


class Pins:
    """All pins of the daemon. Used by the engine thread alone; every method that may end an operation returns its events."""

    def __init__(
        self,
        *,
        cache: CacheManager,
        adapters: Adapters,
        recipes: RecipeBook,
        observer: CacheObserver,
        namespace_of: Callable[[bytes, bytes], Namespace],
    ) -> None:
        self._cache = cache
        self._adapters = adapters
        self._recipes = recipes
        self._observer = observer
        self._namespace_of = namespace_of
        self._block_bytes = cache.block_size_tokens * TOKEN_BYTES
        self._computing: dict[bytes, _Pending] = {}
        self._recording: dict[bytes, _Pending] = {}
        self._persisting: dict[bytes, _Pending] = {}
        self._unpinning: dict[bytes, str] = {}
        self._expiring: set[bytes] = set()
        self._num_rounds_to_skip = 0
        self._not_held: dict[str, str] = {}
        self._is_draining = False

    # -------------------------------------------------------------------------------- operations

    def pin(self, command: PinPrefix) -> list[Event]:
        """Begin a pin; ``OpDone`` or ``OpFailed`` follows when its fate is known."""
        recipe = command.recipe
        num_blocks = len(recipe.token_ids) // self._block_bytes
        refusal = self._refuse(recipe, num_blocks)
        if refusal is not None:
            return [OpFailed(command.op_id, *refusal)]
        pending = _Pending(command.op_id, recipe, num_blocks)
        if self._hold(pending):
            return self._record(pending)
        return self._compute(pending, BlockOrigin.COMPUTED, background=False)

    def unpin(self, command: Unpin) -> list[Event]:
        """Forget a pin, durably; its blocks stay cached and may be evicted from now on."""
        if command.name not in self._recipes.recipes():
            return [OpFailed(command.op_id, ErrorCode.NOT_FOUND, f"no pin is named {pin_label(command.name)!r}")]
        self._remove(command.op_id, command.name)
        return []

    def expire(self, now_unix_s: float) -> None:
        """End the pins whose time is over as ``unpin`` would. Called about once a second; a removal that the disk refused is tried again later."""
        if self._num_rounds_to_skip:
            self._num_rounds_to_skip -= 1
            return
        for name, recipe in self._recipes.recipes().items():
            if recipe.has_expired(now_unix_s):
                op_id = os.urandom(16)
                self._expiring.add(op_id)
                self._remove(op_id, name)

    def forget(self, selection: Selection) -> tuple[dict[str, Recipe], list[bytes], list[Event]]:
        """A selection is being forgotten: its recipes, the requests that compute pins of it, and the answers to those who wait for one.

        The blocks are still held: the cache lets go of them when it forgets.
        """
        held = self._cache.pins()
        recipes = {
            name: recipe
            for name, recipe in self._recipes.recipes().items()
            if selection.holds(recipe.tenant_salt, recipe.token_ids)
            or (name in held and selection.holds(held[name].namespace.tenant_salt, held[name].token_ids))
        }
        computing = [key for key, each in self._computing.items() if _is_in(selection, each) and not each.is_superseded]
        events: list[Event] = []
        for stage in (self._computing, self._recording, self._persisting):
            for key in [key for key, each in stage.items() if _is_in(selection, each) and not each.is_superseded]:
                pending = stage[key]
                pending.is_superseded = True
                if pending.op_id:
                    events.append(OpFailed(pending.op_id, ErrorCode.NOT_FOUND, FORGOTTEN))
        for pending in self._computing.values():
            prefix = pending.recipe.token_ids[: pending.num_blocks * self._block_bytes]
            pending.is_disturbed |= not pending.is_superseded and selection.may_hold(pending.recipe.tenant_salt, prefix)
        for name in recipes:
            self._not_held.pop(name, None)
        return recipes, computing, events

    def release_unrecorded(self) -> None:
        """Let go of what is held for recipes that storage has not any more: a forget took them."""
        kept = self._recipes.recipes().keys() | {pending.recipe.name for pending in self._recording.values()}
        for name in [name for name in self._cache.pins() if name not in kept]:
            self._cache.unpin(name)

    def restore(self, recipes: dict[str, Recipe], not_computed: Mapping[str, str] = _NOTHING) -> list[Event]:
        """Hold every recipe's prefix again at start; computes what rehydration did not bring back. Highest priority first.

        ``not_computed`` names the recipes that are kept as they are, and says why.
        """
        self._not_held.update(not_computed)
        events: list[Event] = []
        leaving = set(self._unpinning.values())
        for recipe in sorted(recipes.values(), key=lambda each: (-each.priority, each.created_unix_s)):
            if recipe.name in leaving or self._observer.is_forgetting(recipe):
                continue
            num_blocks = len(recipe.token_ids) // self._block_bytes
            refusal = self._refuse(recipe, num_blocks)
            if refusal is not None:
                self._not_held[recipe.name] = refusal[1]
                continue
            pending = _Pending(b"", recipe, num_blocks)
            if not self._hold(pending):
                events += self._compute(pending, BlockOrigin.RECOMPUTED, background=True)
        return events

    def drain(self) -> list[bytes]:
        """The daemon ends: the requests that compute what the start had to restore, which nobody waits for any more."""
        self._is_draining = True
        return [request_id for request_id, pending in self._computing.items() if not pending.op_id]

    # -------------------------------------------------------------------------------- what comes back

    def owns(self, request_id: bytes) -> bool:
        """Whether an event of the scheduler belongs to a pin's computation, not to a client."""
        return request_id in self._computing

    def on_request_event(self, event: RequestDone | RequestFailed) -> list[Event]:
        """The end of an internal request that ``owns`` it."""
        pending = self._computing.pop(event.request_id)
        if pending.is_superseded:
            return []
        if isinstance(event, RequestFailed):
            return self._fail(pending, event.code, event.message)
        try:
            held = self._hold(pending)
        except PinCapacityError as error:
            return self._fail(pending, ErrorCode.PIN_CAPACITY, str(error))
        if not held and self._is_draining:
            return self._fail(pending, ErrorCode.DRAINING, "the daemon is shutting down")
        if not held and pending.is_disturbed:
            pending.is_disturbed = False
            if pending.op_id:
                return self._compute(pending, BlockOrigin.COMPUTED, background=False)
            return self._compute(pending, BlockOrigin.RECOMPUTED, background=True)
        if not held:
            return self._fail(pending, ErrorCode.KV_CAPACITY, "the prefix left the pool before it could be held; raise kv_memory")
        return self._record(pending) if pending.op_id else []

    def on_recipe_durable(self, command: RecipeDurable) -> list[Event]:
        name = self._unpinning.pop(command.op_id, None)
        if command.op_id in self._expiring:
            self._expiring.remove(command.op_id)
            self._num_rounds_to_skip = _EXPIRY_RETRY_ROUNDS if command.error else 0
            return []
        if name is not None:
            if command.error:
                return self._keep(command.op_id, name, command.error)
            return [OpDone(command.op_id, {"name": name})]
        pending = self._recording.pop(command.op_id, None)
        if pending is None or pending.is_superseded:
            return []
        if command.error:
            return self._take_back(pending, f"the recipe could not be written: {command.error}")
        self._persisting[pending.op_id] = pending
        self._observer.checkpoint_now(pending.op_id)
        return []

    def on_checkpoint_done(self, command: CheckpointDone) -> list[Event] | None:
        """The acknowledgement, or None if the checkpoint was not a pin's."""
        pending = self._persisting.pop(command.op_id, None)
        if pending is None:
            return None
        if pending.is_superseded:
            return []
        return [
            OpDone(
                pending.op_id,
                {
                    "name": pending.recipe.name,
                    "tokens": pending.num_blocks * self._cache.block_size_tokens,
                    "blocks": pending.num_blocks,
                    "durable": "recipe" if command.error else "recipe+bytes",
                    **({"expires_unix_s": pending.recipe.expires_unix_s} if pending.recipe.expires_unix_s else {}),
                },
            )
        ]

    # -------------------------------------------------------------------------------- reports

    @property
    def num_pending(self) -> int:
        """Recipes whose prefix this start has still to compute."""
        return sum(1 for pending in self._computing.values() if not pending.op_id)

    @property
    def num_not_held(self) -> int:
        """Recipes whose prefix is neither held nor being computed."""
        names = set(self._recipes.recipes()).difference(self._unpinning.values(), self._cache.pins())
        return len(names.difference(pending.recipe.name for pending in self._computing.values()))

    @property
    def has_open_operations(self) -> bool:
        """Whether a client waits for the fate of a pin or unpin."""
        return bool(self._computing or self._recording or self._persisting or self._unpinning)

    def report(self, now_unix_s: float) -> list[dict[str, Any]]:
        """One entry a recipe, for ``kvd prefixes``. ``expires_in_s`` is None for one that does not end by itself."""
        held = self._cache.pins()
        computing = {pending.recipe.name: pending for pending in self._computing.values()}
        size = self._cache.block_size_tokens
        entries = []
        for name, recipe in self._recipes.recipes().items():
            if name in held:
                state, num_tokens = "held", held[name].num_tokens
            elif name in computing:
                state, num_tokens = "computing", computing[name].num_blocks * size
            else:
                state, num_tokens = "not_held", len(recipe.token_ids) // self._block_bytes * size
            entries.append(
                {
                    "name": name,
                    "tokens": num_tokens,
                    "priority": recipe.priority,
                    "adapter": recipe.adapter_name,
                    "state": state,
                    "reason": self._not_held.get(name, "") if state == "not_held" else "",
                    "created_unix_s": recipe.created_unix_s,
                    "expires_in_s": round(max(0.0, recipe.expires_unix_s - now_unix_s), 1) if recipe.expires_unix_s else None,
                    "hits": held[name].uses if state == "held" else 0,
                }
            )
        return entries

    # -------------------------------------------------------------------------------- within

    def _refuse(self, recipe: Recipe, num_blocks: int) -> tuple[str, str] | None:
        size = self._cache.block_size_tokens
        if num_blocks == 0:
            num_tokens = len(recipe.token_ids) // TOKEN_BYTES
            return (ErrorCode.PIN_TOO_SHORT, f"a pin needs at least one full block of {size} tokens, this prefix has {num_tokens}")
        try:
            self._cache.check_pin(recipe.name, recipe.token_ids, self._namespace_of(recipe.tenant_salt, recipe.adapter))
        except PinCapacityError as error:
            return (ErrorCode.PIN_CAPACITY, f"{error}; raise kv_memory or max_pinned_fraction")
        return None

    def _hold(self, pending: _Pending) -> bool:
        """Pin the blocks if all of them are there and ready.

        Raises:
            PinCapacityError: the pins before it leave too little.
        """
        recipe = pending.recipe
        try:
            self._cache.pin(recipe.name, recipe.token_ids, self._namespace_of(recipe.tenant_salt, recipe.adapter))
        except PinNotReadyError:
            return False
        return True

    def _record(self, pending: _Pending) -> list[Event]:
        self._supersede(pending.recipe.name)
        self._recording[pending.op_id] = pending
        self._recipes.put(pending.op_id, pending.recipe)
        return []

    def _remove(self, op_id: bytes, name: str) -> None:
        if name in self._cache.pins():
            self._cache.unpin(name)
        self._supersede(name)
        self._unpinning[op_id] = name
        self._recipes.remove(op_id, name)

    def _supersede(self, name: str) -> None:
        """The recipe of this name changes: what the start knows of the old one, or still computes for it, counts no more."""
        self._not_held.pop(name, None)
        for pending in self._computing.values():
            if pending.recipe.name == name and not pending.op_id:
                pending.is_superseded = True

    def _compute(self, pending: _Pending, origin: BlockOrigin, *, background: bool) -> list[Event]:
        request_id = os.urandom(16)
        self._computing[request_id] = pending
        recipe = pending.recipe
        # One token past the last full block: a match never covers a whole prompt, so that without it the last block would be computed aside
        # while somebody else is still filling it, and could not be held at the end.
        prefix = recipe.token_ids[: pending.num_blocks * self._block_bytes]
        command = Submit(
            request_id=request_id,
            token_ids=prefix + prefix[-TOKEN_BYTES:],
            sampling=SamplingParams(temperature=0.0),
            max_tokens=1,
            credit_tokens=1,
            tenant_salt=recipe.tenant_salt,
            tenant=pin_tenant(recipe.name),
            adapter=recipe.adapter,
            adapter_name=recipe.adapter_name,
        )
        return self._adapters.submit(command, internal=True, background=background, origin=origin)

    def _keep(self, op_id: bytes, name: str, error: str) -> list[Event]:
        """An unpin that the disk refused did not happen: what is on disk is held."""
        failed = OpFailed(op_id, ErrorCode.STORAGE_ERROR, f"the pin could not be removed from disk and stays: {error}")
        kept = self._recipes.recipes().get(name)
        return [failed, *(self.restore({name: kept}) if kept is not None and name not in self._cache.pins() else [])]

    def _take_back(self, pending: _Pending, message: str) -> list[Event]:
        """The pin can't be made durable: release it, and hold again what it replaced."""
        name = pending.recipe.name
        events = self._fail(pending, ErrorCode.STORAGE_ERROR, message)
        if any(later.recipe.name == name and not later.is_superseded for later in self._recording.values()):
            return events  # what is held is a later pin's, of which the disk has not spoken yet
        self._cache.unpin(name)
        replaced = self._recipes.recipes().get(name)
        if replaced is None:
            return events
        if replaced.tokenizer_digest != pending.recipe.tokenizer_digest:
            return events + self.restore({}, {name: "another pin was to replace it, which could not be written"})
        return events + self.restore({name: replaced})

    def _fail(self, pending: _Pending, code: str, message: str) -> list[Event]:
        if pending.op_id:
            return [OpFailed(pending.op_id, code, message)]
        self._not_held[pending.recipe.name] = message
        return []
