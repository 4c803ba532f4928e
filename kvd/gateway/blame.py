"""Which of the request's fields a refusal of the daemon's is about: its messages have the names of its own protocol, ``param`` those of the API."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from kvd_client.errors import KvdError

from kvd.gateway.constraints import constraint_field
from kvd.gateway.errors import api_error
from kvd.gateway.fields import Fields

_BEGINNING = re.compile(r"(\w+) (?:is|are|has|must) ")
_WORD = re.compile(r"\w+")
_CONSTRAINT = ("constraint", "json_schema", "regex", "choice", "lark", "json")
_BEAM = frozenset({"beam", "beams"})
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "max_tokens": ("max_tokens", "max_completion_tokens"),
        "logprobs": ("top_logprobs", "logprobs"),
        "truncate_prompt": ("truncate_prompt_tokens",),
        "include_stop": ("include_stop_str_in_output",),
        "template_args": ("chat_template_kwargs",),
        "num_draft": ("speculation",),
        "acceptance": ("speculation",),
        "width": ("best_of", "n"),
        "penalties": _PENALTIES,
    }
)
"""By the daemon's word: the API's names, the likeliest first. All others have one name."""
_PROSE = frozenset({"n", "model", "prompt", "messages", "stream"})
"""Names that are words of sentences too."""


def blamed_field(message: str, fields: Fields) -> str | None:
    """The field that the daemon's message is about: the one that it begins with, else the first that it names of those that the request gives.

    None where it names none.
    """
    beginning = _BEGINNING.match(message)
    if beginning and (found := _given(beginning[1], fields)):
        return found
    words = [word for word in _WORD.findall(message) if word not in _PROSE]
    for word in words:
        if found := _given(word, fields):
            return found
    return "use_beam_search" if fields.use_beam_search and not _BEAM.isdisjoint(words) else None


@contextlib.contextmanager
def blaming(fields: Fields) -> Iterator[None]:
    """What the daemon or its client refuses of this request gets its ``param``.

    Raises:
        ApiError: in place of the failure.
    """
    try:
        yield
    except KvdError as error:
        raise api_error(error, param=blamed_field(str(error.args[0]), fields)) from error


def _given(word: str, fields: Fields) -> str | None:
    if word in _CONSTRAINT:
        return constraint_field(fields)
    names = _NAMES.get(word, (word,))
    return next((name for name in names if getattr(fields, name, None) is not None and name in fields.__struct_fields__), None)
