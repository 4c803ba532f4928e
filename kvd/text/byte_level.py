"""A model without files: every byte is a token. The fake executor speaks it.

Ids 0 to 255 are bytes, 256 ends a sequence and has no text, so no text can be a special token. Needs no library.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvd.text.detokenizer import PieceRules, PieceTable, byte_level_alphabet
from kvd.text.errors import ChatTemplateError
from kvd.text.special_tokens import Segment, SpecialTokens
from kvd.text.token_length import TokenReach
from kvd.text.tokenizer import TokenizerFacts

EOS_TOKEN_ID = 256
VOCAB_SIZE = 257


class ByteTokenizer:
    """UTF-8 as token ids."""

    def __init__(self) -> None:
        self.facts = TokenizerFacts(
            specials=SpecialTokens({}),
            prefix_ids=(),
            suffix_ids=(),
            eos_token_ids=(EOS_TOKEN_ID,),
            vocab_size=VOCAB_SIZE,
            reach=TokenReach(1),
            variables={},
            identity={"tokenizer": "bytes"},
        )
        self.pieces = PieceTable({byte: char for char, byte in byte_level_alphabet().items()}, PieceRules(byte_level=True))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        token_ids: list[int] = []
        for segment in segments:
            token_ids.extend((segment,) if isinstance(segment, int) else segment.encode())
        return token_ids


class ByteTemplate:
    """A line ``role: content`` for each message; before them one for the tools, where there are some."""

    source = "role: content"
    takes_tools = True

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, date: dt.date, args: Mapping[str, Any], add_generation_prompt: bool
    ) -> list[Segment]:
        """Render messages; the date and args other than ``tools`` have no place in the text.

        Raises:
            ChatTemplateError: a content is not a string, or the tools have no form in JSON.
        """
        del date
        tools = args.get("tools")
        try:
            lines = [f"tools: {json.dumps(tools)}\n"] if tools else []
        except TypeError as error:
            raise ChatTemplateError(f"the tools have no form in JSON: {error}") from error
        for message in messages:
            content = message.get("content")
            if not isinstance(content, str):
                raise ChatTemplateError("the content of a message must be a string")
            lines.append(f"{message['role']}: {content}\n")
        if add_generation_prompt:
            lines.append("assistant: ")
        return ["".join(lines)]
