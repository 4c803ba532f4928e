"""The tokens of a model, as the library wants them: what bytes each id stands for, and which ids end a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MASK_WORD_BITS = 32

_LETTERS = "[a-zA-Z ]{1,30}"
"""Where a constraint allows all texts like this one, the library takes the mask of these tokens, most of a vocabulary, as a whole, and looks at the others only. Its own
slices are those of JSON strings: classes of characters that leave out a few of those, as in most regular expressions, took it ten times as long.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """``token_bytes[id]`` are the bytes of a token, none for special tokens and ids without text.

    ``special_texts`` names special tokens as a Lark grammar may (``<|im_end|>``). ``vocab_size`` is the model's: it may be larger than the tokenizer's, or
    smaller; ids that only one of them has are never allowed. ``encode`` tokenises text as the model is used to.
    """

    token_bytes: Sequence[bytes]
    special_texts: Mapping[int, str]
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    encode: Callable[[str], list[int]]

    @property
    def num_words(self) -> int:
        """u32 of a mask."""
        return -(-self.vocab_size // MASK_WORD_BITS)


def index(vocabulary: Vocabulary) -> Any:
    """The library's tokenizer (``LLTokenizer``) over a vocabulary. Takes a tenth of a second for 50,000 tokens, and holds the interpreter.

    Raises:
        GrammarError: the model has no token that ends a sequence, or the library is not installed.
    """
    from kvd.grammar.errors import GrammarError

    if not vocabulary.eos_token_ids:
        raise GrammarError("the model's files name no token that ends a sequence; a constraint needs one")
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise GrammarError(f"constraints need the library llguidance, which is not installed here: {error}") from error
    tokens: Any = _Tokens(vocabulary)
    slices = [*LLTokenizer.general_slices(), _LETTERS]
    return LLTokenizer(tokens, n_vocab=vocabulary.vocab_size, eos_token=list(vocabulary.eos_token_ids), slices=slices)


class _Tokens:
    """What ``LLTokenizer`` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = dict.fromkeys(vocabulary.eos_token_ids, "") | dict(vocabulary.special_texts)
        self.eos_token_id = vocabulary.eos_token_ids[0]
        known = [*vocabulary.token_bytes[: vocabulary.vocab_size]]
        known += [b""] * (vocabulary.vocab_size - len(known))
        self.special_token_ids = sorted(token_id for token_id in special if token_id < len(known))
        names = {token_id: (text or f"<|{token_id}|>").encode() for token_id, text in special.items()}
        self.tokens = [names.get(token_id, text) for token_id, text in enumerate(known)]
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))
