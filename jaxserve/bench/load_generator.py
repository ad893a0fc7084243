"""Sends a workload to a server, by an arrival schedule and under a concurrency limit."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from jaxserve.bench.load_client import Outcome, Target, send
from jaxserve.bench.workload import BenchRequest
from jaxserve.errors import EngineDeadError

CONNECT_SECONDS = 30
SILENCE_SECONDS = 600  # no byte for so long: the request counts as failed


@dataclass(frozen=True)
class LoadResult:
    """Outcomes in the order of the requests; duration from the first send to the last end."""

    outcomes: list[Outcome]
    duration: float


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    send_times: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[Outcome], None],
) -> LoadResult:
    """Send every request; `on_done` hears of each one as it ends.

    A request that must wait for a free slot starts its clock when it gets one, so a limit of 1
    measures requests one after another.
    """
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    async with _session() as session:
        start = time.perf_counter()

        async def one(request: BenchRequest, send_time: float) -> Outcome:
            await asyncio.sleep(max(0.0, start + send_time - time.perf_counter()))
            if slots is None:
                outcome = await send(session, target, request)
            else:
                async with slots:
                    outcome = await send(session, target, request)
            on_done(outcome)
            return outcome

        pairs = zip(requests, send_times, strict=True)
        outcomes = await asyncio.gather(*(one(request, at) for request, at in pairs))
        return LoadResult(list(outcomes), time.perf_counter() - start)


async def check_target(target: Target) -> None:
    """Send one tiny request; raises EngineDeadError with the reason when it fails."""
    async with _session() as session:
        outcome = await send(session, target, BenchRequest(max_tokens=1, text="Hello"))
    if outcome.error is not None:
        raise EngineDeadError(
            f"a first request to {target.url} failed: {outcome.error}. "
            "Check --base-url, --endpoint and --model"
        )


async def first_model(base_url: str, headers: dict[str, str]) -> str:
    """The name of the first model the server lists; raises EngineDeadError when it lists none."""
    url = f"{base_url}/v1/models"
    try:
        async with _session() as session, session.get(url, headers=headers) as response:
            if response.status != 200:
                raise EngineDeadError(f"{url} answered HTTP {response.status}; give --model")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise EngineDeadError(f"no server answers at {base_url} ({reason})") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise EngineDeadError(f"{url} lists no models; give --model") from None


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS
    )
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=1 << 20
    )
