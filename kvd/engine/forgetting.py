"""Forgetting on the engine's side: pins and cache at once, then the disk; the answer comes when that is durable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.cache.tenants import Selection
from kvd.commands import Event, ForgetDone, ForgetPrefixes, OpDone, OpFailed, Recipe
from kvd.engine.adapters import Adapters
from kvd.engine.pins import Pins
from kvd.engine.ports import CacheObserver
from kvd.scheduler.scheduler import Scheduler
from kvd.types import TOKEN_BYTES, ErrorCode

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class _Open:
    selection: Selection
    num_blocks: int
    num_pins: int


class Forgetting:
    """Used by the engine thread alone."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        pins: Pins,
        adapters: Adapters,
        observer: CacheObserver,
        observe: Callable[[], None],
        block_size_tokens: int,
    ) -> None:
        """``observe`` hands the cache's events on."""
        self._scheduler = scheduler
        self._pins = pins
        self._adapters = adapters
        self._observer = observer
        self._observe = observe
        self._block_bytes = block_size_tokens * TOKEN_BYTES
        self._open: dict[bytes, _Open] = {}

    @property
    def has_open_operations(self) -> bool:
        """Whether somebody waits for a forget."""
        return bool(self._open)

    def begin(self, command: ForgetPrefixes) -> tuple[list[Event], list[Event]]:
        """Memory forgets now, and storage is told once it has heard all that happened before. The scheduler's events and this room's own."""
        whole = command.token_ids[: len(command.token_ids) // self._block_bytes * self._block_bytes]
        if command.token_ids and not whole:
            return [], [OpFailed(command.op_id, ErrorCode.PIN_TOO_SHORT, "the prefix holds no full block, so nothing is kept under it")]
        if not self._observer.may_forget:
            return [], [OpFailed(command.op_id, ErrorCode.OVERLOADED, "too many forgets are not done yet", _RETRY_AFTER_S)]
        selection = Selection(command.tenant, command.tenant_salt, whole)
        events = self._adapters.forget(selection)  # first: what the rest ends may let a pin go on that waits for its adapter
        recipes, computing, own = self._pins.forget(selection)
        for request_id in computing:
            events += self._adapters.abort(request_id) or self._scheduler.abort(request_id)
        num_blocks, more = self._scheduler.forget(selection)
        self._open[command.op_id] = _Open(selection, num_blocks, len(recipes))
        self._observe()
        self._observer.forget(command.op_id, selection, recipes)
        return events + more, own

    def refuse_pin(self, op_id: bytes, recipe: Recipe) -> OpFailed | None:
        """A pin of what is being forgotten waits for the end of that: it would be forgotten too, by what goes on or by what completes a forget that failed."""
        is_open = any(each.selection.holds(recipe.tenant_salt, recipe.token_ids) for each in self._open.values())
        if is_open or self._observer.is_forgetting(recipe):
            return OpFailed(op_id, ErrorCode.OVERLOADED, "the prefix is being forgotten", _RETRY_AFTER_S)
        return None

    def on_done(self, command: ForgetDone) -> list[Event]:
        """The disk's part is over."""
        self._pins.release_unrecorded()
        done = self._open.pop(command.op_id, None)
        if done is None:
            return []
        if command.error:
            return [
                OpFailed(
                    command.op_id,
                    ErrorCode.STORAGE_ERROR,
                    f"it has left memory, not (all of) the disk; the daemon tries again by itself, ask again to know: {command.error}",
                )
            ]
        return [OpDone(command.op_id, {"blocks": max(done.num_blocks, command.num_blocks), "pins": done.num_pins})]
