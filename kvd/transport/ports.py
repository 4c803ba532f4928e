"""What the edge needs of the text room and of the engine's side; nobody who implements these imports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvd.commands import Command, Event


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text, piece by piece; never yields an unfinished character."""

    def push(self, token_ids: Sequence[int], /) -> str: ...

    def flush(self) -> str:
        """The text still held back, at the end."""


class Text(Protocol):
    """The tokenizer and chat template of the model (kvd/text/model.py)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    @property
    def digest(self) -> bytes: ...

    def fewest_tokens(self, text: bytes, /) -> int:
        """How many tokens a text has at least, told without tokenising it: by the longest of the vocabulary; 0 if nothing is known."""

    def encode(self, text: str, /) -> list[int]: ...

    def encode_inside(self, text: str, /) -> list[int]:
        """The ids of a text in the middle of another."""

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        date: str,
        args: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        check_length: Callable[[int], None] | None = None,
    ) -> list[int]:
        """``check_length`` is told how many tokens there are at least, before the text is tokenised; what it raises is passed on."""

    def system_prefix(self, messages: list[dict[str, Any]], /, *, date: str, args: Mapping[str, Any]) -> list[int]: ...

    def token_bytes(self, token_ids: Sequence[int], /) -> list[bytes]: ...

    def detokenizer(self, prompt_ids: Sequence[int], /) -> Detokenizer: ...


class CommandSink(Protocol):
    """The engine's inbox, from the edge."""

    def put(self, command: Command, /) -> bool:
        """False: full, the command was not taken."""


class EventSource(Protocol):
    """The engine's outbox, from the edge."""

    def drain(self) -> list[Event]: ...
