"""Many questions on one system prompt at once: the prompt is computed once, the answers side by side.

python examples/async_many.py [--connect ENDPOINT] [--requests N]
"""

from __future__ import annotations

import argparse
import asyncio
import time

from kvd_client import AsyncClient
from kvd_client.errors import Overloaded

SYSTEM = {"role": "system", "content": "You answer with a single short sentence. " * 20}


async def ask(client: AsyncClient, number: int) -> int:
    """One question; its output tokens. A full queue is waited out: how much load is right, the caller decides."""
    messages = [SYSTEM, {"role": "user", "content": f"Say something about the number {number}."}]
    while True:
        try:
            completion = await client.chat(messages, max_tokens=32, temperature=0.7, seed=number)
        except Overloaded as error:
            await asyncio.sleep(max(error.retry_after_s, 0.1))
            continue
        print(f"{number:3}: {completion.usage.cached_tokens} of {completion.usage.prompt_tokens} prompt tokens cached: {completion.text!r}")
        return completion.usage.completion_tokens


async def run(endpoint: str | None, num_requests: int) -> None:
    async with AsyncClient(endpoint) as client:
        await client.wait_ready(timeout_s=120)
        started = time.perf_counter()
        counts = await asyncio.gather(*(ask(client, number) for number in range(num_requests)))
        seconds = time.perf_counter() - started
        print(f"{num_requests} answers, {sum(counts)} tokens in {seconds:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", metavar="ENDPOINT")
    parser.add_argument("--requests", type=int, default=32)
    arguments = parser.parse_args()
    asyncio.run(run(arguments.connect, arguments.requests))


if __name__ == "__main__":
    main()
