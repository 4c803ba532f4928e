"""What a start computes, as the present model reads it: recipes kept as messages or text are rendered anew at every start, and ids that it does not know never reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvd.commands import Recipe, Submit
from kvd.executor.adapter_files import AdapterError
from kvd.storage.rehydration_report import RehydrationReport
from kvd.text.errors import TextError
from kvd.text.model import TextModel
from kvd.types import TOKEN_BYTES, pack_tokens, unpack_tokens


class Log(Protocol):
    """A structured log, as structlog's."""

    def warning(self, event: str, **fields: Any) -> Any: ...


def current_recipes(
    recipes: dict[str, Recipe],
    report: RehydrationReport,
    *,
    load_text: Callable[[], TextModel],
    vocab_size: int,
    template_date: str,
    adapter_digest: Callable[[str], bytes] | None,
    log: Log,
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """The recipes with the ids that this model's text side and the digests that the adapters on disk give them today; and those that are not to be computed, with the reason."""
    if not recipes:
        return {}, {}
    if not (report.recompute_pins or report.failed_computations):  # starts that died: not even their templates are touched
        log.warning("pins_not_computed", num_pins=len(recipes), failed_starts=report.failed_starts)
        return {}, dict.fromkeys(recipes, f"not computed, for the {report.failed_starts} starts before died early; pin it again")
    text = load_text()
    current, not_computed = {}, {}
    for name, recipe in recipes.items():
        try:
            token_ids, adapter = _render(recipe, text, template_date), _adapter(recipe, adapter_digest)
            rendered = msgspec.structs.replace(recipe, token_ids=token_ids, adapter=adapter)
            _check_ids(token_ids, vocab_size)
        except (TextError, AdapterError) as error:
            not_computed[name] = str(error)
            log.warning("pin_not_computed", name=name, reason=str(error))
            continue
        if not report.recompute_pins and (name in report.pins_pending or rendered != recipe):
            not_computed[name] = (
                f"not computed, for the executor failed in {report.failed_computations} starts that computed pins; pin it again"
            )
        else:
            current[name] = rendered
    if not report.recompute_pins:
        log.warning("pins_not_computed", num_pins=len(not_computed), failed_computations=report.failed_computations)
    return current, not_computed


def known_ids(submits: Sequence[Submit], vocab_size: int, log: Log) -> tuple[Submit, ...]:
    """Those of the prefixes to be computed anew whose ids the model knows: what stands on disk may come from a pin set that was made by hand."""
    known = []
    for submit in submits:
        try:
            _check_ids(submit.token_ids, vocab_size)
        except TextError as error:
            log.warning("prefix_not_computed", reason=str(error))
        else:
            known.append(submit)
    return tuple(known)


def _check_ids(token_ids: bytes, vocab_size: int) -> None:
    """Raises:
    TextError: they are no tokens of a vocabulary of so many.
    """
    if len(token_ids) % TOKEN_BYTES:
        raise TextError(f"{len(token_ids)} bytes are no whole tokens")
    highest = max(unpack_tokens(token_ids), default=0)
    if highest >= vocab_size:
        raise TextError(f"token id {highest} is beyond the model's vocabulary of {vocab_size}")


def _adapter(recipe: Recipe, adapter_digest: Callable[[str], bytes] | None) -> bytes:
    """The digest of what the recipe's adapter is today.

    Raises:
        AdapterError: it is not there any more, or can't be read.
    """
    if not recipe.adapter_name:
        return recipe.adapter
    if adapter_digest is None:
        raise AdapterError(f"it needs the adapter {recipe.adapter_name}, and the daemon was started without adapter_dir")
    return adapter_digest(recipe.adapter_name)


def _render(recipe: Recipe, text: TextModel, template_date: str) -> bytes:
    """The recipe's ids. Messages are always rendered: the template's date moves on though nothing else has changed.

    Raises:
        TextError: the template refuses the messages, or ids of another text side are all there is.
    """
    if recipe.messages is not None:
        return pack_tokens(text.system_prefix(recipe.messages, date=template_date, args=recipe.template_args))
    if recipe.tokenizer_digest == text.digest:
        return recipe.token_ids
    if recipe.text is not None:
        return pack_tokens(text.encode(recipe.text))
    raise TextError("made of token ids under another tokenizer or chat template; pin it again from text or messages")
