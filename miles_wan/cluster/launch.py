"""The launcher: command line in, exit code out. It starts a local Ray, submits the driver as a Ray job, shows its log and
ends everything at the end, on Ctrl-C and on SIGTERM. It may not know what the driver does.

Exit codes: 0 done, 1 the run failed, 2 bad input (nothing was started), 128 + n ended by signal n.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from miles_wan.cluster.local_ray import LocalRay, StartInterruptedError
from miles_wan.config import Config
from miles_wan.configuration import dump_config
from miles_wan.errors import InputError, MilesWanError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
STATUS_SECONDS = 1.0
STOP_JOB_SECONDS = 20.0
UNREACHABLE_SECONDS = 60.0
PREVIOUS_RUN_SECONDS = 60.0


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGHUP instead of raising, so that no clean-up is cut in two.

    ``received`` is the first signal or None. From the second one on, ``force`` of the given Ray is called.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.ray: LocalRay | None = None
        self.forced = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # started with nohup
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """What a shell reports for a program that this signal ended."""
        return 128 + (self.received or signal.SIGTERM)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            return
        self.forced = True
        if self.ray is not None:
            self.ray.force()


def launch(config: Config, *, entrypoint: list[str] | None = None) -> int:
    """Run the driver on a Ray of its own and wait for it.

    Args:
        config: checked configuration; written to ``output_dir/config.yaml`` for the driver.
        entrypoint: command of the driver, by default ``miles-wan train`` on that file. It runs with this interpreter,
            in this working directory.

    Returns:
        The driver's exit code, or 128 + n when signal n ended it or this process.

    Raises:
        InputError: another run uses the output folder, or RAY_ADDRESS is set.
        MilesWanError: Ray did not start or ended unexpectedly.
    """
    output_dir = Path(config.output_dir)
    logs = output_dir / "logs"
    with output_lock(output_dir) as lock, StopSignals() as signals:
        logs.mkdir(exist_ok=True)
        if entrypoint is None:
            config_path = output_dir.resolve() / "config.yaml"
            dump_config(config, config_path)
            entrypoint = [sys.executable, "-m", "miles_wan.cli", "train", "--config", str(config_path)]
        ray = LocalRay(
            config.cluster.num_gpus,
            config.cluster.device,
            cuda_visible_devices=config.cluster.cuda_visible_devices,
            log_path=logs / "ray.log",
            interrupted=lambda: bool(signals),
            keep_open=[lock],
        )
        signals.ray = ray
        try:
            with ray, (logs / "driver.log").open("ab") as copy:
                code = _run_job(ray, entrypoint, signals=signals, copy=copy)
                if code not in (0, 2) and not signals:
                    _keep_ray_logs(ray, logs / "ray")
        except StartInterruptedError:
            logger.info("stopped before the driver was started")
        return signals.exit_code if signals else code


@contextmanager
def output_lock(output_dir: Path) -> Iterator[int]:
    """Hold the output folder for one run. The lock is shared with the lifeline, so that it stays taken until the last
    process of a killed run has ended; a successor waits for that.

    Yields:
        The file descriptor of the lock.

    Raises:
        InputError: a live run holds it, or the folder cannot be written.
    """
    path = output_dir / ".lock"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError([f"--output-dir {output_dir}: cannot be written ({error.strerror})"]) from None
    try:
        _take(descriptor, output_dir)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _take(descriptor: int, output_dir: Path) -> None:
    deadline = time.monotonic() + PREVIOUS_RUN_SECONDS
    announced = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError as error:
            logger.warning("%s cannot be locked (%s): start no second run in it", output_dir, error.strerror)
            return
        holder = os.pread(descriptor, 20, 0).decode().strip()
        if holder.isdigit() and psutil.pid_exists(int(holder)):
            remedy = "wait for it, end it, or give another --output-dir"
            raise InputError([f"--output-dir {output_dir} is in use by a run with process id {holder}: {remedy}"])
        if time.monotonic() > deadline:
            raise InputError([f"--output-dir {output_dir}: a previous run (process id {holder}) has not ended yet"])
        if not announced:
            logger.info("waiting for what a previous run (process id %s) left behind to end", holder)
            announced = True
        time.sleep(POLL_SECONDS)


def _run_job(ray: LocalRay, entrypoint: Sequence[str], *, signals: StopSignals, copy: BinaryIO) -> int:
    """Submit the driver, show its log, return its exit code. A signal stops the job."""
    client = ray.client()
    job_id = client.submit_job(entrypoint=_shell_line(entrypoint))
    log = _LogFollower(ray.job_log(job_id), copy)
    stop_deadline = unreachable_since = None
    while not signals.forced:
        if signals and stop_deadline is None:
            logger.info("stopping the run; once more ends it at once")
            stop_deadline = time.monotonic() + STOP_JOB_SECONDS
            _ask_to_stop(client, job_id)
        details = _job_details(client, job_id)
        log.pump()
        if details is not None and details.status.is_terminal():
            log.pump()
            return signals.exit_code if signals else _exit_code(details)
        ray.ensure_alive()
        now = time.monotonic()
        unreachable_since = None if details is not None else (unreachable_since or now)
        if unreachable_since is not None and now - unreachable_since > UNREACHABLE_SECONDS:
            raise MilesWanError(f"Ray's job API has not answered for {UNREACHABLE_SECONDS:.0f} s")
        if stop_deadline is not None and now > stop_deadline:
            break
        _show_log(log, signals, seconds=STATUS_SECONDS, stopping=stop_deadline is not None)
    return signals.exit_code


def _show_log(log: _LogFollower, signals: StopSignals, *, seconds: float, stopping: bool) -> None:
    """Follow the log until the job's status is due again, or a signal has come in."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not signals.forced and (stopping or not signals):
        time.sleep(POLL_SECONDS)
        log.pump()


class _LogFollower:
    """Copies what a growing file gets to the terminal and to another file, byte for byte."""

    def __init__(self, source: Path, copy: BinaryIO) -> None:
        self._source = source
        self._copy = copy
        self._position = 0
        self._shown = True

    def pump(self) -> None:
        """Copy what is new."""
        if not self._source.exists():
            return
        with self._source.open("rb") as source:
            source.seek(self._position)
            fresh = source.read()
            self._position = source.tell()
        if not fresh:
            return
        self._copy.write(fresh)
        self._copy.flush()
        if self._shown:
            self._show(fresh)

    def _show(self, fresh: bytes) -> None:
        try:
            sys.stdout.buffer.write(fresh)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            self._shown = False  # nobody reads any more; the run goes on
            logger.warning("standard output is closed; the log goes on in %s", self._copy.name)


def _shell_line(entrypoint: Sequence[str]) -> str:
    """The job's command. ``exec``: the shell in between would hide by what signal the driver ended."""
    variables = {}
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        variables = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}
        variables |= {"COLUMNS": str(size.columns), "LINES": str(size.lines)}
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return f"exec {shlex.join(['env', *assignments, *entrypoint])}"


def _job_details(client: JobSubmissionClient, job_id: str) -> JobDetails | None:
    """The job's state, or None when the job API does not answer right now."""
    try:
        return client.get_job_info(job_id)
    except (RuntimeError, OSError) as error:  # requests' exceptions are OSErrors
        logger.debug("job API: %s", error)
        return None


def _ask_to_stop(client: JobSubmissionClient, job_id: str) -> None:
    try:
        client.stop_job(job_id)
    except (RuntimeError, OSError) as error:
        logger.warning("the job could not be asked to stop (%s); it is ended with Ray", error)


def _exit_code(details: JobDetails) -> int:
    code = details.driver_exit_code
    if code is None:
        logger.error("the driver ended without an exit code (%s): %s", details.status.value, details.message)
        return 1
    if code < 0:
        logger.error("the driver was ended by signal %d; continue the run with --resume latest", -code)
        return 128 - code
    return int(code)


def _keep_ray_logs(ray: LocalRay, target: Path) -> None:
    """After a failure, the logs of all actors are worth reading."""
    shutil.copytree(ray.session_logs, target, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    logger.info("Ray's logs are in %s", target)
