"""Each token's bytes, asked of the daemon once: log probabilities name tokens by their text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvd_client.protocol.messages import TokenLogprob

if TYPE_CHECKING:
    from kvd_client.aio import AsyncClient

_MAX_IDS_AT_ONCE = 4096


class TokenTexts:
    """Bytes by token id, of one daemon's model: bounded by its vocabulary."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Of an id that was learned."""
        return self._bytes[token_id]

    async def learn(self, logprobs: Iterable[TokenLogprob]) -> None:
        """Ask for the ids that are not known yet.

        Raises:
            KvdError: the daemon did not answer.
        """
        wanted = {token_id for each in logprobs for token_id in (each.token_id, *(top[0] for top in each.top))} - self._bytes.keys()
        if not wanted:
            return
        token_ids = sorted(wanted)
        for start in range(0, len(token_ids), _MAX_IDS_AT_ONCE):
            some = token_ids[start : start + _MAX_IDS_AT_ONCE]
            self._bytes.update(zip(some, await self._client.detokenize(some), strict=True))


def chat_text(data: bytes) -> str:
    """A token's text in a chat's log probabilities; its exact bytes stand beside it."""
    return data.decode("utf-8", "replace")


def completion_text(data: bytes) -> str:
    """A token's text in a completion's log probabilities, where it is all there is: an unfinished character is spelt as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
