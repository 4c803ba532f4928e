"""A server that answers at once, of words and without a socket: what scenarios ask of it can be looked at."""

from __future__ import annotations

import asyncio
import time

from kvd.bench.measuring import Answer, Ask


class ScriptedServer:
    """A prompt token is a word. It remembers prompts by their whole words, and finds the longest common beginning.

    Args:
        token_s: seconds a token takes.
        prompt_token_s: seconds that a prompt token takes which is not cached.
    """

    def __init__(self, *, token_s: float = 0.0005, prompt_token_s: float = 0.0, forgets: bool = False) -> None:
        self.asked: list[Ask] = []
        self.pins: list[str] = []
        self.at_once = self.most_at_once = 0
        self.is_up = True
        self._token_s = token_s
        self._prompt_token_s = prompt_token_s
        self._forgets = forgets
        self._known: list[list[str]] = []

    async def ask(self, ask: Ask) -> Answer:
        self.asked.append(ask)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        words = " ".join(message["content"] for message in ask.messages).split()
        answer = Answer(time.perf_counter(), prompt_tokens=len(words))
        answer.cached_tokens = max((common(words, known) for known in self._known), default=0)
        if not self._forgets:
            self._known.append(words)
        await asyncio.sleep(self._prompt_token_s * (len(words) - answer.cached_tokens))
        for _ in range(ask.max_tokens):
            await self.token()
            answer.took(ask, ask.n)
        answer.ended_s = time.perf_counter()
        answer.text = "word " * ask.max_tokens
        answer.completion_tokens = ask.max_tokens * ask.n
        self.at_once -= 1
        return answer

    async def token(self) -> None:
        """The time until an answer's next token."""
        await asyncio.sleep(self._token_s)

    async def is_ready(self) -> bool:
        return self.is_up

    async def version(self) -> str:
        return "scripted 1"

    async def pin(self, name: str, messages: object) -> bool:
        self.pins.append(name)
        return True

    async def pid(self) -> int | None:
        return None

    async def figures(self) -> dict[str, float]:
        return {}

    async def aclose(self) -> None:
        self.is_up = False


def common(one: list[str], other: list[str]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
