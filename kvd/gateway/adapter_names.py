"""Which LoRA adapters the daemon has: their names are names of models here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvd_client.aio import AsyncClient
from kvd_client.errors import KvdError

from kvd.gateway.errors import api_error

_KEPT_S = 1.0
"""How long a list is believed when it lacks a name: made-up names must not cost the daemon a look at its disk each."""
_TIMEOUT_S = 5.0


class AdapterNames:
    """The names as last heard. Used by one event loop."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._names: tuple[str, ...] = ()
        self._heard_s = float("-inf")

    async def names(self, client: AsyncClient, *, wanted: str | None = None, fresh: bool = False) -> tuple[str, ...]:
        """The daemon's adapters: asked anew if ``fresh``, or if ``wanted`` is not among those known and these are not of this moment.

        Raises:
            ApiError: the daemon does not answer.
        """
        is_old = self._now() - self._heard_s >= _KEPT_S
        if fresh or (is_old and wanted not in self._names):
            try:
                self._names = tuple(each.name for each in await client.adapters(timeout_s=_TIMEOUT_S))
            except KvdError as error:
                raise api_error(error) from error
            self._heard_s = self._now()
        return self._names
