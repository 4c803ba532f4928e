"""Work that may wait beside questions that may not: classes, deadlines, and what to do when the daemon is busy.

python examples/deadlines.py [--connect ENDPOINT]
"""

from __future__ import annotations

import argparse
import asyncio

from kvd_client import AsyncClient, errors


async def question(client: AsyncClient) -> None:
    """Ask something that somebody waits for; once more if the queue was too long."""
    for _ in range(2):
        try:
            answer = await client.generate("Three uses of a brick:", max_tokens=24, priority=-1, queue_timeout_s=10.0, deadline_s=60.0)
        except errors.QueueTimeout as busy:
            print(f"busy; again in {busy.retry_after_s:.1f} s")
            await asyncio.sleep(busy.retry_after_s)
        except errors.DeadlineExceeded:
            print("too late")
            return
        else:
            print(f"the question, after {answer.timings.total_ms:.0f} ms: {answer.text!r}")
            return


async def summary(client: AsyncClient, number: int) -> None:
    """Work in the background of everybody's questions."""
    answer = await client.generate(f"In the year {1900 + number}", max_tokens=24, priority=5)
    print(f"summary {number}, after {answer.timings.total_ms:.0f} ms, of which it waited {answer.timings.queue_ms:.0f}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connect", metavar="ENDPOINT")
    arguments = parser.parse_args()

    async with AsyncClient(arguments.connect) as client:
        await client.wait_ready(timeout_s=120)
        await asyncio.gather(*(summary(client, number) for number in range(6)), question(client))


if __name__ == "__main__":
    asyncio.run(main())
