"""The grammar room over the model's text side, with its answers going into the engine's inbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvd.commands import Command, ConstraintCompiled
from kvd.config import DaemonConfig
from kvd.engine.loading import StartThread
from kvd.executor.host_cores import compute_threads
from kvd.grammar.compiler import GrammarCompiler
from kvd.grammar.errors import GrammarError
from kvd.grammar.vocabulary import Vocabulary
from kvd.text.model import TextError, TextModel

_MAX_MASK_THREADS = 4


class Inbox(Protocol):
    """The engine's, from inside the daemon."""

    def put_internal(self, command: Command, /) -> None: ...


def open_constraints(
    config: DaemonConfig, vocab_size: int, load_text: Callable[[], TextModel], inbox: Inbox, now_s: Callable[[], float]
) -> GrammarCompiler | None:
    """The compiler of constraints for a model with ``vocab_size`` tokens; None where the configuration wants none."""
    if not config.grammar.constraints:
        return None
    return GrammarCompiler(
        config.grammar,
        lambda: vocabulary_of(load_text(), vocab_size),
        now_s=now_s,
        on_done=lambda: inbox.put_internal(ConstraintCompiled()),
        num_threads=min(_MAX_MASK_THREADS, compute_threads(config.model.threads)),
    )


def vocabulary_of(text: TextModel, vocab_size: int) -> Vocabulary:
    """The tokens of a text model, for a model that samples ``vocab_size`` ids."""
    return Vocabulary(
        token_bytes=text.token_bytes(range(text.vocab_size)),
        special_texts={token_id: name for name, token_id in text.special_tokens.items()},
        eos_token_ids=tuple(token_id for token_id in text.eos_token_ids if token_id < vocab_size),
        vocab_size=vocab_size,
        encode=text.encode_inside,
    )


def preparation(compiler: GrammarCompiler | None, log: Any) -> StartThread[None]:
    """Indexes the vocabulary beside the start. Where that fails the daemon serves all the same: whoever wants a constraint is told why there is none."""

    def prepare() -> None:
        if compiler is None:
            return
        try:
            compiler.prepare()
        except (GrammarError, TextError, OSError) as error:
            log.warning("no_constraints", reason=str(error))

    return StartThread("kvd-vocabulary", prepare)
