"""The client against servers that misbehave on the wire."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from rollout_replay import make_request

from miles_wan.errors import EngineError
from miles_wan.records import PromptRecord
from miles_wan.rollout.sglang.client import SGLangClient
from miles_wan.rollout.sglang.query import SampleQuery
from miles_wan.rollout.sglang.server import check_identity
from miles_wan.wan.facts import FAMILIES

RECORD = PromptRecord(record_id="r", prompt="a bird", source="train.jsonl:4")
Reply = Callable[[int], tuple[int, bytes]]


@contextmanager
def server(reply: Reply) -> Iterator[tuple[str, list[str]]]:
    """A server that answers request number n with ``reply(n)``; yields its address and the paths it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.append(self.path)
            status, body = reply(len(asked))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}", asked
    finally:
        httpd.shutdown()
        httpd.server_close()


def alive() -> None:
    return None


def test_a_server_that_warms_up_is_asked_again() -> None:
    with server(lambda n: (503, b"") if n < 3 else (200, b"ready")) as (url, asked):
        response = asyncio.run(SGLangClient(url, alive).post("/x", {}))
        assert (response.status_code, len(asked)) == (200, 3)


def test_a_dead_worker_is_an_error_at_once() -> None:
    body = b'{"error": "Scheduler worker exited; restart the server."}'
    for status in (503, 500):
        with server(lambda n, status=status: (status, body)) as (url, asked):
            with pytest.raises(EngineError, match=r"a worker of the engine .* died: Scheduler worker exited"):
                asyncio.run(SGLangClient(url, alive).post("/x", {}))
            assert len(asked) == 1


def test_a_request_that_dies_with_a_worker_does_not_blame_its_record() -> None:
    """The request under way gets an error of its own (a lost connection between workers); health tells why."""
    answers = [
        (500, b'{"detail": "Connection closed by peer"}'),
        (503, b"Scheduler worker exited; restart the server."),
    ]
    query = SampleQuery(FAMILIES["wan2.2-ti2v-5b"], make_request(RECORD), (0,))
    died = pytest.raises(EngineError, match=r"a worker of the engine .* died: Connection closed.*--resume latest")
    with server(lambda n: answers[min(n, 2) - 1]) as (url, _), died:
        asyncio.run(SGLangClient(url, alive).generate(query))


@pytest.mark.parametrize(
    ("status", "detail"), [(400, "Invalid sampling params"), (422, "field required"), (500, "Truncated")]
)
def test_a_refusal_is_not_repeated_and_names_the_record(status: int, detail: str) -> None:
    query = SampleQuery(FAMILIES["wan2.2-ti2v-5b"], make_request(RECORD), (0,))
    with server(lambda n: (status, f'{{"detail": "{detail}"}}'.encode())) as (url, asked):
        with pytest.raises(EngineError, match=rf"train\.jsonl:4: HTTP {status} {detail}"):
            asyncio.run(SGLangClient(url, alive).generate(query))
        assert [path for path in asked if path != "/health"] == ["/rollout/generate"]


def test_nobody_at_the_address_is_an_error_after_a_few_attempts() -> None:
    with server(lambda n: (200, b"")) as (url, _):
        pass
    with pytest.raises(EngineError, match="cannot be reached after 5 attempts"):
        asyncio.run(SGLangClient(url, alive).post("/x", {}))


def test_the_end_of_the_process_is_told_instead_of_the_refused_connection() -> None:
    with server(lambda n: (200, b"")) as (url, _):
        pass
    with pytest.raises(EngineError, match="ended with code -9"):
        asyncio.run(SGLangClient(url, lambda: "the engine process ended with code -9").post("/x", {}))


def test_a_hanging_server_is_an_error_that_says_so() -> None:
    released = threading.Event()

    def hang(_n: int) -> tuple[int, bytes]:
        released.wait(20)
        return 200, b""

    async def three(url: str) -> list[Any]:
        client = SGLangClient(url, alive, request_timeout=0.5)
        return await asyncio.gather(*(client.post("/x", {}) for _ in range(3)), return_exceptions=True)

    with server(hang) as (url, _):
        started = time.monotonic()
        results = asyncio.run(three(url))
        released.set()
    assert time.monotonic() - started < 10
    assert all(
        isinstance(result, EngineError) and "hangs: no request finished in 0.5 s" in str(result) for result in results
    )


def test_a_slow_server_that_makes_progress_is_not_hanging() -> None:
    lock = threading.Lock()

    def one_at_a_time(_n: int) -> tuple[int, bytes]:
        with lock:
            time.sleep(0.4)
        return 200, b""

    async def eight(url: str) -> list[httpx.Response]:
        client = SGLangClient(url, alive, concurrency=4, request_timeout=1.2)
        return await asyncio.gather(*(client.post("/x", {}) for _ in range(8)))

    with server(one_at_a_time) as (url, _):
        assert len(asyncio.run(eight(url))) == 8  # 3.2 s in all, more than the time of one


def test_a_request_for_several_videos_may_take_their_time() -> None:
    def slow(_n: int) -> tuple[int, bytes]:
        time.sleep(0.8)
        return 200, b""

    async def ask(url: str, videos: int) -> httpx.Response:
        return await SGLangClient(url, alive, request_timeout=0.5).post("/x", {}, videos=videos)

    with server(slow) as (url, _):
        assert asyncio.run(ask(url, 4)).status_code == 200
        with pytest.raises(EngineError, match="hangs"):
            asyncio.run(ask(url, 1))


def test_concurrency_is_bounded() -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def count(_n: int) -> tuple[int, bytes]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return 200, b""

    async def many(url: str) -> None:
        client = SGLangClient(url, alive, concurrency=3)
        await asyncio.gather(*(client.post("/x", {}) for _ in range(12)))

    with server(count) as (url, _):
        asyncio.run(many(url))
    assert most[0] == 3


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"{}", "not the one that was started here, or the plugin"),
        (200, b"hello", "gave no identity"),
        (200, b"{}", "gave no identity"),
        (200, b'{"token": "theirs"}', "another process holds its port"),
    ],
)
def test_a_foreign_server_is_refused(status: int, body: bytes, message: str) -> None:
    with server(lambda n: (status, body)) as (url, _), pytest.raises(EngineError, match=message):
        check_identity(httpx.get(f"{url}/miles_wan/identity"), "ours")
