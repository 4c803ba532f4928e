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
        self._usable: tuple[str, ...] = ()
        self._heard_s = float("-inf")

    async def names(self, client: AsyncClient, *, wanted: str) -> tuple[str, ...]:
        """The daemon's adapters, unusable ones too: a request that names one hears why. Asked anew if ``wanted`` is not among those known and these are not of this
        moment.

        Raises:
            ApiError: the daemon does not answer.
        """
        if wanted not in self._names and self._now() - self._heard_s >= _KEPT_S:
            await self._ask(client)
        return self._names

    async def usable(self, client: AsyncClient) -> tuple[str, ...]:
        """Those that could be loaded when that was last tried, or were never tried; asked anew.

        Raises:
            ApiError: the daemon does not answer.
        """
        await self._ask(client)
        return self._usable

    async def _ask(self, client: AsyncClient) -> None:
        try:
            adapters = await client.adapters(timeout_s=_TIMEOUT_S)
        except KvdError as error:
            raise api_error(error) from error
        self._names = tuple(each.name for each in adapters)
        self._usable = tuple(each.name for each in adapters if each.state != "unusable")
        self._heard_s = self._now()
