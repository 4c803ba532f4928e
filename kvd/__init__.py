"""kvd: an inference daemon whose KV cache survives restarts. The rooms are described in docs/architecture.md.

``kvd.LLM`` is the engine inside of an application; it is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvd.llm import LLM as LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvd.llm import LLM

    return LLM
