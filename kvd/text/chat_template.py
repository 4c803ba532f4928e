"""The model's chat template: messages in, ordinary text and special tokens out."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvd.text.errors import ChatTemplateError
from kvd.text.shield import Guard, Shield
from kvd.text.special_tokens import Segment, SpecialTokens

MAX_RENDERED_CHARS = 16 << 20
"""A template's output may be so long."""

_ESCAPED = re.compile("[^\x00-\x7f\ue000-\uf8ff\U000f0000-\U0010ffff]")
"""What ``tojson(ensure_ascii=true)`` escapes: private-use characters are left, they may be stand-ins."""


class ChatTemplate:
    """A Jinja template in a sandbox, with what Hugging Face chat templates expect.

    They expect ``messages``, ``add_generation_prompt``, the special tokens' texts (``bos_token``, ``eos_token``, …), ``raise_exception``,
    ``strftime_now``, a ``tojson`` that leaves non-ASCII text alone, loop controls, and trimmed blocks. Rendering is free of state
    and may run in several threads.

    Raises:
        ChatTemplateError: the source is not a Jinja template.
    """

    def __init__(self, source: str, specials: SpecialTokens, variables: Mapping[str, str]) -> None:
        self.source = source
        self._specials = specials
        self._variables = dict(variables)
        self._shield = Shield(specials.ids, source)
        self.takes_tools = "tools" in source
        """Whether tools given to the template can be seen by the model."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"the model's chat template, line {error.lineno}: {error.message}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, date: dt.date, args: Mapping[str, Any], add_generation_prompt: bool
    ) -> list[Segment]:
        """Render messages; strings in them and in ``args`` never become special tokens, the template's own do.

        Raises:
            ChatTemplateError: the template refused the messages, failed, or wrote too much; or text in a message would add
                or remove a special token in a way that cannot be told apart from the template's own.
        """
        guard = self._shield.guard(messages, args)

        def rendered(protect: Callable[[object], Any]) -> list[Segment]:
            context = {
                **protect(args),
                **self._variables,
                "messages": protect(messages),
                "add_generation_prompt": add_generation_prompt,
                "strftime_now": date.strftime,
            }
            return list(self._specials.split(self._write(context, guard)))

        segments = rendered(guard.light)
        if guard.is_strict_needed and _token_ids(rendered(guard.strict)) != _token_ids(segments):
            raise ChatTemplateError("text in a message would change the special tokens of the prompt")
        return [guard.reveal(segment) if isinstance(segment, str) else segment for segment in segments]

    def _write(self, context: dict[str, Any], guard: Guard) -> str:
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    break
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {guard.reveal(str(error.message))}") from error
        except Exception as error:  # a template is a program and raises what it likes
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {guard.reveal(str(error))}") from error
        if num_chars > MAX_RENDERED_CHARS:
            raise ChatTemplateError(f"the chat template wrote more than {MAX_RENDERED_CHARS} characters")
        return "".join(pieces)


def _token_ids(segments: Sequence[Segment]) -> list[int]:
    return [segment for segment in segments if isinstance(segment, int)]


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; here its body counts alone."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
