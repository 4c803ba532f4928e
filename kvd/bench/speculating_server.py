"""A kvd daemon whose requests say how tokens are proposed ahead of the model, to see what speculation is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvd.bench.kvd_server import KvdServer
from kvd.bench.measuring import Answer, Ask

Mode = Literal["off", "ngram", "auto", "draft"]
MODES: tuple[Mode, ...] = ("off", "ngram", "auto", "draft")


class SpeculatingServer(KvdServer):
    """Every request asks for one mode. Each mode has a salt of its own: several may be measured on one daemon, and none finds what another one computed."""

    def __init__(
        self,
        endpoint: str | None,
        mode: Mode,
        *,
        timeout_s: float = 600.0,
        server_key: str | None = None,
        client_key_file: Path | None = None,
    ) -> None:
        super().__init__(endpoint, timeout_s=timeout_s, server_key=server_key, client_key_file=client_key_file)
        self._mode: Mode = mode

    async def ask(self, ask: Ask) -> Answer:
        """See ``Server``."""
        return await self._stream(ask, speculation=self._mode, cache_salt=self._mode)
