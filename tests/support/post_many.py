"""Posts the same body many times at once, from a process of its own: what a server's latency is
measured under must not share the server's interpreter lock.

Usage: python -m tests.support.post_many URL TIMES < BODY; prints each answer's status.
"""

import asyncio
import io
import sys

import aiohttp


async def post_many(url: str, body: bytes, times: int) -> list[int]:
    """The statuses of the answers, once they have been read."""
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post() -> int:
            async with session.post(url, data=io.BytesIO(body), headers=headers) as response:
                await response.read()
                return response.status

        return await asyncio.gather(*(post() for _ in range(times)))


if __name__ == "__main__":
    found = asyncio.run(post_many(sys.argv[1], sys.stdin.buffer.read(), int(sys.argv[2])))
    print(*found)
