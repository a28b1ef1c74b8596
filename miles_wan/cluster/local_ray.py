"""A Ray head of this run's own, on this machine. In: number of devices and kind. Out: a job client and the log folder;
when the ``with`` block ends, however it ends, nothing of it is left. It may not know what runs on it.

Two runs never meet, and a Ray cluster of the user's is neither joined nor touched: own session folder, own ports, own
token, and only processes that bear this run's marker are ever ended (by the lifeline, even if the launcher is killed).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import httpx
import psutil

from miles_wan.cluster import lifeline
from miles_wan.errors import InputError, MilesWanError
from miles_wan.rollout.ports import PortLease

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

logger = logging.getLogger(__name__)

WORKER_SLOT = "worker_slot"
"""The custom resource that stands for a device where there is none: ``num_slots`` of them on a CPU machine."""

START_ATTEMPTS = 3
STOP_SECONDS = lifeline.GRACE_SECONDS + 2 * lifeline.KILL_SECONDS
# Longest that Ray appends to its folder, and the longest name of a Unix socket (108 bytes with the final zero).
_RAY_SOCKET_PATH = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.0")
_UNIX_SOCKET_PATH = 107

# What a head with the dashboard would otherwise do at fixed ports, in the background or in shared places.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "DASHBOARD_METRIC_PORT": "0",
    # One idle worker per declared CPU would be started with the first driver.
    "RAY_prestart_worker_first_driver": "0",
    # Launched with `uv run`, Ray would rebuild the environment for every worker.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # A machine that is busy loading models is not a dead node.
    "RAY_health_check_failure_threshold": "40",
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_worker_register_timeout_seconds": "180",
    # A driver gets this long between SIGTERM and SIGKILL.
    "RAY_JOB_STOP_WAIT_TIME_S": "10",
    # On SIGTERM a head would wait for its node to drain; the run is over by then.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # setproctitle would overwrite the environment area of a process, and with it the marker.
    "SPT_NOENV": "1",
    # Logs are kept in files: no colours, no bars of the libraries.
    "RAY_COLOR_PREFIX": "0",
    "TQDM_DISABLE": "1",
}
# Settings of another cluster of the user's, which must not leak into this one. With the last one Ray would give no actor a
# device list, and all of them would sit on the first device.
_FOREIGN = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_TOKEN",
    "RAY_NAMESPACE",
    "RAY_START_HOOK",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
)


class StartInterruptedError(MilesWanError):
    """The user asked to stop while Ray was starting."""


def check_environment(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Faults of the environment that forbid a local Ray."""
    address = environment.get("RAY_ADDRESS")
    if not address:
        return []
    return [
        f"RAY_ADDRESS={address} points to an existing Ray cluster; this command starts its own Ray on this machine and "
        "cannot use another cluster yet: unset RAY_ADDRESS"
    ]


class LocalRay:
    """Context manager around ``ray start --head``.

    Args:
        num_slots: devices; GPUs on cuda, ``worker_slot`` resources on cpu.
        device: cpu or cuda.
        log_path: file that gets the output of ``ray start`` and of the lifeline (appended).
        cuda_visible_devices: device list for the raylet, which hands them out; by default that of this process.
        start_timeout: seconds Ray may take until it accepts jobs.
        interrupted: asked while waiting for the start; true ends it with ``StartInterruptedError``.
        keep_open: file descriptors (locks) that stay open until the last process of the run has ended.

    Attributes:
        run_id: the marker that every process of this run carries in its environment.
        folder: Ray's session folder and ``TMPDIR`` of all its processes; removed at the end.
        dashboard_url: address of the job API, valid inside the ``with`` block.

    Raises:
        InputError: RAY_ADDRESS is set.
        MilesWanError: Ray did not start in time; the message ends with the tail of its log.
    """

    def __init__(
        self,
        num_slots: int,
        device: Literal["cpu", "cuda"],
        *,
        log_path: Path,
        cuda_visible_devices: str | None = None,
        start_timeout: float = 180.0,
        interrupted: Callable[[], bool] = lambda: False,
        keep_open: Sequence[int] = (),
    ) -> None:
        if faults := check_environment():
            raise InputError(faults)
        self.num_slots = num_slots
        self.device = device
        self.log_path = log_path
        self.cuda_visible_devices = cuda_visible_devices
        self.start_timeout = start_timeout
        self._interrupted = interrupted
        self._keep_open = tuple(keep_open)
        self._token = secrets.token_hex(32)
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: PortLease | None = None
        self._log_start = 0
        self.run_id = ""
        self.folder = Path()
        self.dashboard_url = ""

    def __enter__(self) -> LocalRay:
        started = time.monotonic()
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._start()
                self._wait_until_ready(started + self.start_timeout)
            except _TransientStartError:
                self.stop()
                if attempt == START_ATTEMPTS:
                    raise
                logger.warning("Ray did not start; trying again (see %s)", self.log_path)
            except BaseException:
                self.stop()
                raise
            else:
                break
        logger.info("Ray started in %.1f s, session folder %s", time.monotonic() - started, self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def session_logs(self) -> Path:
        """Ray's log folder; gone after the ``with`` block."""
        return self.folder / "session_latest" / "logs"

    def job_log(self, job_id: str) -> Path:
        """The file that holds the output of a submitted job."""
        return self.session_logs / f"job-driver-{job_id}.log"

    def client(self) -> JobSubmissionClient:
        """A client of the job API, authenticated with this run's token."""
        from ray.job_submission import JobSubmissionClient

        os.environ |= _loopback_without_proxy(os.environ)  # the client follows the proxy settings of this process
        return JobSubmissionClient(self.dashboard_url, headers={"Authorization": f"Bearer {self._token}"})

    def ensure_alive(self) -> None:
        """Raise ``MilesWanError`` with the tail of the log if Ray has ended by itself."""
        if self._process is None or self._process.poll() is not None:
            raise MilesWanError(f"Ray ended unexpectedly; the end of {self.log_path}:\n{self.log_tail()}")

    def stop(self) -> None:
        """End everything this Ray ever started and wait for it. Harmless when repeated."""
        if self._process is None:
            return
        started = time.monotonic()
        self._say(lifeline.STOP)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error("the end of run %s takes long; it goes on in the background", self.run_id)
        if self._process.returncode:  # Ray ended by itself, or the lifeline was killed: the rest is done here
            lifeline.remove_leftovers(self.run_id, self.folder, pids=lifeline.end_members(self.run_id))
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None
        if self._ports is not None:
            self._ports.release()
        logger.info("Ray and all it started ended in %.1f s", time.monotonic() - started)

    def force(self) -> None:
        """Cut the graceful part of a stop short. May be called from a signal handler."""
        self._say(lifeline.FORCE)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of this start's log."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def _say(self, word: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            os.write(self._process.stdin.fileno(), word)
        except OSError:
            logger.debug("the lifeline has ended already")

    def _start(self) -> None:
        self.folder = _session_folder()
        self.run_id = self.folder.name
        token_path = self.folder / "auth_token"
        token_path.touch(mode=0o600)
        token_path.write_text(self._token)
        self._ports = PortLease(2)
        dashboard_port, client_port = self._ports.ports
        self.dashboard_url = f"http://127.0.0.1:{dashboard_port}"
        command = self._command(dashboard_port, client_port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "miles_wan.cluster.lifeline", self.run_id, str(self.folder), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment(token_path),
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher alone, which ends things in order
                pass_fds=self._keep_open,
            )

    def _command(self, dashboard_port: int, client_port: int) -> list[str]:
        """``ray start``. Port 0 leaves the choice to the kernel, which no other process can race."""
        any_port = ["port", "node-manager-port", "object-manager-port", "min-worker-port", "max-worker-port"]
        any_port += ["dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port"]
        any_port += ["metrics-export-port"]
        gpus = self.num_slots if self.device == "cuda" else 0
        slots = {} if self.device == "cuda" else {WORKER_SLOT: self.num_slots}
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            *(f"--{name}=0" for name in any_port),
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"),
            *(f"--ray-client-server-port={client_port}", f"--temp-dir={self.folder}", "--no-monitor"),
            # Placement is by device; CPUs are only counted, and must never be what an actor waits for.
            *(f"--num-cpus={max(64, os.cpu_count() or 1)}", f"--num-gpus={gpus}", f"--resources={json.dumps(slots)}"),
            f"--object-store-memory={_object_store_bytes(self.device)}",
            *("--log-style=record", "--log-color=false"),
        ]

    def _environment(self, token_path: Path) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        # Compiled kernels are kept from run to run, unlike the rest of the temporary folder.
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "miles_wan" / "torchinductor"))
        environment |= _QUIET
        environment |= _loopback_without_proxy(environment)
        environment |= {lifeline.MARKER: self.run_id, "TMPDIR": str(self.folder), "RAY_TMPDIR": str(self.folder)}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_path)}
        if self.cuda_visible_devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.cuda_visible_devices
        elif self.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment

    def _wait_until_ready(self, deadline: float) -> None:
        """``ray start`` writes the address file when all its parts have registered; the job API may be up before."""
        headers = {"Authorization": f"Bearer {self._token}"}
        address_file = self.folder / "ray_current_cluster"
        with httpx.Client(base_url=self.dashboard_url, headers=headers, timeout=5.0, trust_env=False) as client:
            while not (address_file.exists() and _serves_jobs(client)):
                if self._interrupted():
                    raise StartInterruptedError("stopped while Ray was starting")
                if self._process is None or self._process.poll() is not None:
                    raise self._start_error("Ray did not start")
                if time.monotonic() > deadline:
                    raise self._start_error(f"Ray did not start within {self.start_timeout:.0f} s")
                time.sleep(0.2)

    def _start_error(self, what: str) -> MilesWanError:
        tail = self.log_tail()
        transient = any(
            sign in tail for sign in ("already occupied", "in use", "Failed to bind", "timed out during startup")
        )
        return (_TransientStartError if transient else MilesWanError)(f"{what}; the end of {self.log_path}:\n{tail}")


class _TransientStartError(MilesWanError):
    """Another process was faster with a port, or the machine too busy; another try may do."""


def _loopback_without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Proxy settings under which calls to this machine stay on it."""
    named = [environment[name] for name in ("NO_PROXY", "no_proxy") if environment.get(name)]
    hosts = ",".join(dict.fromkeys([*",".join(named).split(","), "127.0.0.1", "localhost"])).strip(",")
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def _serves_jobs(client: httpx.Client) -> bool:
    try:
        return client.get("/api/jobs/").status_code == 200
    except httpx.HTTPError:
        return False


def _session_folder() -> Path:
    """A new folder whose name is short enough for Ray's sockets, in the user's temporary folder if that allows it."""
    base = tempfile.gettempdir()
    if len(base) + len("/mw-12345678") + _RAY_SOCKET_PATH > _UNIX_SOCKET_PATH:
        base = "/tmp"
    while True:
        folder = Path(base) / f"mw-{secrets.token_hex(4)}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder


def _object_store_bytes(device: str) -> int:
    """A third of what shared memory and main memory have free, bounded; videos and latents pass through it."""
    free = psutil.virtual_memory().available
    if Path("/dev/shm").is_dir():
        free = min(free, shutil.disk_usage("/dev/shm").free)
    upper = 2 * 1024**3 if device == "cpu" else 64 * 1024**3
    return max(128 * 1024**2, min(upper, free // 3))
