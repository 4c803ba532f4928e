"""What one sequence drafts with, and how that went so far."""

from __future__ import annotations

from kvd.config import SpeculativeConfig
from kvd.speculative.acceptance import LookupAcceptance, ModelAcceptance
from kvd.speculative.ngram import NgramIndex
from kvd.types import TOKEN_BYTES

_MOST_INDEXED = 1 << 15
"""Of a longer prompt the last so many tokens are looked at."""
_FIRST_PAUSE_TOKENS = 32


class Drafter:
    """Prompt lookup, a draft model, both or neither."""

    __slots__ = ("forced", "index", "lookup", "model", "num_idle", "pause_tokens", "pause_until")

    def __init__(self, index: NgramIndex | None, model: ModelAcceptance | None) -> None:
        self.index = index
        self.lookup = LookupAcceptance()
        self.forced = ModelAcceptance()
        """Of tokens that a constraint leaves no choice about; the model may spell them with others."""
        self.model = model
        self.num_idle = 0
        """Steps on end for which the sequence waited for its tokens, and drafted nothing."""
        self.pause_until = 0
        """Length of the sequence from which on the draft model is asked again."""
        self.pause_tokens = _FIRST_PAUSE_TOKENS

    @classmethod
    def make(cls, config: SpeculativeConfig, *, looks_up: bool, has_model: bool) -> Drafter:
        return cls(NgramIndex(config.ngram_min, config.ngram_max) if looks_up else None, ModelAcceptance() if has_model else None)

    def learn(self, tokens: bytearray, num_prompt_tokens: int, most_tokens: int) -> int:
        """Look at up to ``most_tokens`` more of the known ``tokens`` (packed); how many they were."""
        index = self.index
        if index is None:
            return 0
        num_known = len(tokens) // TOKEN_BYTES
        if not len(index) and num_known > _MOST_INDEXED:
            index.skip(num_known - _MOST_INDEXED)
        begin = len(index)
        end = min(num_known, begin + most_tokens)
        if begin < (end_of_prompt := min(end, num_prompt_tokens)):
            index.add(tokens[begin * TOKEN_BYTES : end_of_prompt * TOKEN_BYTES])
        for place in range(len(index), end):
            token_id = int.from_bytes(tokens[place * TOKEN_BYTES : (place + 1) * TOKEN_BYTES], "little")
            if index.length:
                self.lookup.learn(index, token_id)
            index.add_token(token_id)
        return end - begin


NOBODY = Drafter(None, None)
"""Of a sequence that does not draft."""
