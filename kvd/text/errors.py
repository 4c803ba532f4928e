"""What can go wrong with text. All of it is the caller's text or the model's files, never the daemon's state."""

from __future__ import annotations


class TextError(Exception):
    """Base of the room's errors; the message is for people."""


class TokenizerError(TextError):
    """The model's vocabulary cannot be read, or is of a kind that is not supported."""


class ChatTemplateError(TextError):
    """The model has no chat template, or the template refused the messages."""
