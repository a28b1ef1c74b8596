"""The process of one SGLang server. In: its settings. Out: a server that answers under ``url`` and that we know to be ours,
or an EngineError with the end of its log. It ends with ``close``, and with this process, whatever happens to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import time
from collections import deque
from typing import Any

import httpx
import psutil

from miles_wan.errors import EngineError
from miles_wan.rollout.ports import PortLease
from miles_wan.rollout.sglang.identity import PATH
from miles_wan.rollout.sglang.settings import EngineSettings, server_command, server_environment

logger = logging.getLogger(__name__)

_LOG_LINES = 30
_POLL_SECONDS = 0.25
_STOP_SECONDS = 20.0
_TELL_SECONDS = 20.0
_WORKER = "sgl_diffusion"  # begins the names of the engine's workers


class SGLangServer:
    """One server process and everything it starts."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._token = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._leases: list[PortLease] = []
        self._port = 0
        self._log_path = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def log_path(self) -> str:
        return self._log_path

    @property
    def pid(self) -> int:
        """Process id of the supervisor; the server is its only child."""
        if self._process is None:
            raise EngineError("the engine is not started")
        return self._process.pid

    def start(self) -> dict[str, Any]:
        """Start the server and wait until it is ready; returns its identity answer.

        Raises EngineError if it ends early, is not ready in time, or if somebody else answers on its port.
        """
        self._spawn()
        try:
            self._wait_until_healthy()
            return self.check_identity(httpx.get(f"{self.url}{PATH}", trust_env=False, timeout=30.0))
        except httpx.TransportError as error:
            self.close()
            raise EngineError(f"the engine stopped answering after its start: {error!r}; {self.log_tail()}") from error
        except BaseException:
            self.close()
            raise

    def check_identity(self, response: httpx.Response) -> dict[str, Any]:
        """The identity in an answer to ``GET /miles_wan/identity``. Raises EngineError if it is not our server's."""
        return check_identity(response, self._token)

    def failure(self) -> str | None:
        """Why the process cannot answer any more, or None while it runs."""
        if self._process is None:
            return "the engine is not started"
        code = self._process.poll()
        return None if code is None else f"the engine process ended with code {code}\n{self.log_tail()}"

    def _dead_worker(self) -> str | None:
        """A process of the engine that has ended and that nobody asks for: the server would wait for it for ever."""
        assert self._process is not None
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                if process.status() == psutil.STATUS_ZOMBIE and _WORKER in process.name():
                    return process.name()
        return None

    def log_tail(self) -> str:
        """The last lines of the server's log, with its path."""
        with contextlib.suppress(OSError), open(self._log_path, encoding="utf-8", errors="replace") as log:
            return f"last lines of {self._log_path}:\n" + "".join(deque(log, _LOG_LINES))
        return f"no log at {self._log_path}"

    def close(self) -> None:
        """End the server and its workers, and wait for it. Safe to call twice."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the server dies with its supervisor, the workers with the server
                self._process.wait()
        for lease in self._leases:
            lease.release()
        self._leases = []

    def _spawn(self) -> None:
        http, inner = PortLease(2), PortLease(2)
        self._leases = [http, inner]
        self._port = http.first
        command = server_command(
            self._settings, port=http.first, scheduler_port=inner.ports[0], master_port=inner.ports[1]
        )
        environment = server_environment(self._settings, self._token, os.environ)
        self._settings.log_dir.mkdir(parents=True, exist_ok=True)
        self._log_path = str(self._settings.log_dir / f"engine-{self._port}-{os.getpid()}.log")
        supervisor = [sys.executable, "-m", "miles_wan.rollout.sglang.supervisor", str(os.getpid())]
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                [*supervisor, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        logger.info("engine starts on %s (a minute or more), log %s", self.url, self._log_path)

    def _wait_until_healthy(self) -> None:
        started = told = time.monotonic()
        deadline = started + self._settings.start_timeout
        with httpx.Client(base_url=self.url, trust_env=False, timeout=5.0) as client:
            while True:
                if (failure := self.failure()) is not None:
                    raise EngineError(f"the engine did not start: {failure}")
                if dead := self._dead_worker():
                    raise EngineError(
                        f"the engine did not start: its process {dead} has ended (out of memory?); {self.log_tail()}"
                    )
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        return
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the engine was not ready after {self._settings.start_timeout:g} s (rollout.start_timeout); "
                        f"{self.log_tail()}"
                    )
                if time.monotonic() > told + _TELL_SECONDS:
                    told = time.monotonic()
                    logger.info("engine on %s: loading for %.0f s", self.url, told - started)
                time.sleep(_POLL_SECONDS)


def check_identity(response: httpx.Response, token: str) -> dict[str, Any]:
    """The identity in an answer to ``GET /miles_wan/identity``; EngineError unless the server knows ``token``."""
    where = f"the server at {response.url.netloc.decode()}"
    if response.status_code != 200:
        raise EngineError(
            f"{where} does not know {PATH} (HTTP {response.status_code}): it is not the one that was started here, or "
            "the plugin of this project is not installed where SGLang runs"
        )
    try:
        answer: dict[str, Any] = response.json()
        same = secrets.compare_digest(str(answer["token"]), token)
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{where} gave no identity: {response.text[:200]!r}") from error
    if not same:
        raise EngineError(f"{where} is not the one that was started here: another process holds its port")
    return answer
