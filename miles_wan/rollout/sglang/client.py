"""HTTP to one SGLang server. In: samples to generate, adapters to apply. Out: checked answers, or an EngineError that says
whether the server refused, died, or hangs. It starts nothing; who runs the process tells it when that has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from miles_wan.errors import EngineError
from miles_wan.rollout.base import Answer
from miles_wan.rollout.sglang.messages import parse_answer
from miles_wan.rollout.sglang.query import SampleQuery, request_body

_ATTEMPTS = 5
_DEAD = "restart the server"  # what SGLang says once a worker has ended
_HEALTH_ATTEMPTS = 5
GENERATE_PATH = "/rollout/generate"


class _Retry(Exception):
    """The request got no answer, and sending it twice does no harm: a seed gives the same video, a push the same weights."""


class SGLangClient:
    """A client with at most ``concurrency`` requests in flight.

    ``request_timeout`` is seconds for one video. The server works on one request at a time, so it hangs if none finishes
    within the time of the largest in flight. ``failure`` returns why the process has ended, None while it runs.
    """

    def __init__(
        self, url: str, failure: Callable[[], str | None], *, concurrency: int = 4, request_timeout: float = 1800.0
    ) -> None:
        self._url = url
        self._failure = failure
        self._concurrency = concurrency
        self._timeout = request_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight: list[int] = []  # videos of each request
        self._last_progress = 0.0

    async def generate(self, query: SampleQuery) -> list[Answer]:
        """The checked answers to all samples of a query, in order. Raises EngineError."""
        response = await self.post(GENERATE_PATH, request_body(query), videos=len(query.sample_indices))
        if response.status_code != 200:
            source = query.request.record.source or query.request.record.record_id
            raise EngineError(f"the engine refused {source}: HTTP {response.status_code} {reason(response)}")
        return parse_answer(response.content, query)

    async def post(self, path: str, body: Mapping[str, Any], *, videos: int = 1) -> httpx.Response:
        """Send and return the answer, whatever its status. Transport faults and a server that warms up are retried.

        Args:
            videos: how many the request asks for; it may take the time of so many.

        Raises EngineError if the server died, cannot be reached, or hangs.
        """
        return await self._watched(lambda: self._http.post(path, json=body), videos=videos)

    async def get(self, path: str) -> httpx.Response:
        """As ``post``, without a body."""
        return await self._watched(lambda: self._http.get(path), videos=1)

    async def close(self) -> None:
        """Close the connections of the running loop."""
        if self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._loop = None

    async def _watched(self, send: Callable[[], Coroutine[Any, Any, httpx.Response]], *, videos: int) -> httpx.Response:
        self._use_running_loop()
        async with self._slots:
            if not self._in_flight:
                self._last_progress = time.monotonic()
            self._in_flight.append(videos)
            task = asyncio.ensure_future(self._retried(send))
            try:
                return await self._first_of_answer_or_timeout(task)
            finally:
                task.cancel()
                self._in_flight.remove(videos)
                self._last_progress = time.monotonic()

    async def _first_of_answer_or_timeout(self, task: asyncio.Task[httpx.Response]) -> httpx.Response:
        while True:
            videos = max(self._in_flight)
            allowed = self._timeout * videos
            waited = time.monotonic() - self._last_progress
            if waited >= allowed:
                raise EngineError(
                    f"the engine at {self._url} hangs: no request finished in {allowed:g} s (rollout.request_timeout"
                    f"{f' for {videos} videos' if videos > 1 else ''}), {len(self._in_flight)} in flight"
                )
            done, _ = await asyncio.wait({task}, timeout=allowed - waited)
            if done:
                return task.result()

    async def _retried(self, send: Callable[[], Coroutine[Any, Any, httpx.Response]]) -> httpx.Response:
        policy = AsyncRetrying(
            retry=retry_if_exception_type(_Retry),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential_jitter(initial=0.2, max=5.0),
            reraise=True,
        )
        try:
            return await policy(self._once, send)
        except _Retry as error:
            raise EngineError(
                f"the engine at {self._url} cannot be reached after {_ATTEMPTS} attempts: {error}"
            ) from error

    async def _once(self, send: Callable[[], Coroutine[Any, Any, httpx.Response]]) -> httpx.Response:
        try:
            response = await send()
        except httpx.TransportError as error:
            if (failure := self._failure()) is not None:
                raise EngineError(failure) from error
            raise _Retry(repr(error)) from error
        if response.status_code >= 500 and await self._has_dead_worker(response):
            raise EngineError(
                f"a worker of the engine at {self._url} died: {reason(response)}; --resume latest continues the run"
            )
        if response.status_code == 503:
            raise _Retry("HTTP 503, still warming up")
        return response

    async def _has_dead_worker(self, response: httpx.Response) -> bool:
        """The request that was under way answers with an error of its own; the engine's health says why, a moment later."""
        if _DEAD in response.text:
            return True
        if response.status_code == 503:
            return False
        for _ in range(_HEALTH_ATTEMPTS):
            try:
                if _DEAD in (await self._http.get("/health", timeout=5.0)).text:
                    return True
            except httpx.TransportError:
                return True
            await asyncio.sleep(0.2)
        return False

    def _use_running_loop(self) -> None:
        """Connections and locks belong to one event loop; a caller that runs another gets new ones."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._slots = asyncio.Semaphore(self._concurrency)
            self._http = httpx.AsyncClient(
                base_url=self._url, trust_env=False, timeout=httpx.Timeout(None, connect=10.0)
            )
            self._in_flight = []


def reason(response: httpx.Response) -> str:
    """What an error answer says, in one line."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:500].strip()
    if isinstance(body, dict):
        for key in ("detail", "error", "message"):
            if key in body:
                return str(body[key])[:500]
    return str(body)[:500]
