"""Runs a command as a Ray job and shows its output. In: a running LocalRay and a command. Out: the command's exit code.
It may not know what the command does, nor how it came to be stopped.
"""

from __future__ import annotations

import codecs
import logging
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from miles_wan.cluster.local_ray import LocalRay
from miles_wan.errors import MilesWanError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
STATUS_SECONDS = 1.0
SUBMIT_SECONDS = 120.0
STOP_SECONDS = 20.0
UNREACHABLE_SECONDS = 60.0


class Job:
    """A command that runs on a Ray of this machine.

    Args:
        ray: where it runs.
        command: program and arguments; it runs in this working directory, with a terminal's width and colours if
            standard output is one.
        copy: file that gets the output besides standard output.
    """

    def __init__(self, ray: LocalRay, command: Sequence[str], *, copy: BinaryIO) -> None:
        self._ray = ray
        self._client = ray.client()
        self._id = f"{ray.run_id}-{secrets.token_hex(2)}"
        self._stop_deadline: float | None = None
        self._line = _shell_line(command)
        self._log = _LogFollower(ray.job_log(self._id), copy)

    def run(self, *, stopping: Callable[[], bool], forced: Callable[[], bool]) -> int | None:
        """Submit the job and follow it to its end.

        Args:
            stopping: true asks the job to end (SIGTERM, then SIGKILL).
            forced: true abandons it at once.

        Returns:
            Its exit code (128 + n when signal n ended it), or None when it was stopped or abandoned.

        Raises:
            MilesWanError: Ray ended, refused the job, or no longer answers.
        """
        self._submit(stopping)
        unreachable_since = None
        while not forced():
            details = self._details()
            self._log.pump()
            if details is not None and details.status.is_terminal():
                self._log.pump()  # the job ended before this state was set, so its output is complete
                return None if stopping() else _exit_code(details)
            now = time.monotonic()
            if stopping() and self._stop_deadline is None:
                self._stop_deadline = now + STOP_SECONDS
                self._ask_to_stop()
            elif self._stop_deadline is not None and now > self._stop_deadline:
                return None
            unreachable_since = None if details is not None else (unreachable_since or now)
            self._check_reachable(unreachable_since)
            self._follow_log(lambda: forced() or (stopping() and self._stop_deadline is None))
        return None

    def _submit(self, stopping: Callable[[], bool]) -> None:
        """A head that has just started may not be ready to place a job; a try whose answer was lost counts."""
        deadline = time.monotonic() + SUBMIT_SECONDS
        while not stopping():
            try:
                self._client.submit_job(entrypoint=self._line, submission_id=self._id)
                return
            except (RuntimeError, OSError) as error:
                self._ray.ensure_alive()
                if self._details() is not None:
                    return
                if time.monotonic() > deadline:
                    raise MilesWanError(f"Ray did not accept the job: {error}") from error
                logger.debug("the job was not accepted yet: %s", error)
                time.sleep(1.0)

    def _details(self) -> JobDetails | None:
        """The job's state, or None when the job API does not answer right now."""
        try:
            return self._client.get_job_info(self._id)
        except (RuntimeError, OSError) as error:  # requests' exceptions are OSErrors
            logger.debug("job API: %s", error)
            return None

    def _ask_to_stop(self) -> None:
        try:
            self._client.stop_job(self._id)
        except (RuntimeError, OSError) as error:
            logger.warning("the job could not be asked to stop (%s); it is ended with Ray", error)

    def _check_reachable(self, unreachable_since: float | None) -> None:
        self._ray.ensure_alive()
        if unreachable_since is not None and time.monotonic() - unreachable_since > UNREACHABLE_SECONDS:
            raise MilesWanError(f"Ray's job API has not answered for {UNREACHABLE_SECONDS:.0f} s")

    def _follow_log(self, interrupted: Callable[[], bool]) -> None:
        """Show the log until the state is due again."""
        deadline = time.monotonic() + STATUS_SECONDS
        while time.monotonic() < deadline and not interrupted():
            time.sleep(POLL_SECONDS)
            self._log.pump()


class _LogFollower:
    """Copies what a growing file gets to standard output and to another file, byte for byte."""

    def __init__(self, source: Path, copy: BinaryIO) -> None:
        self._source = source
        self._copy = copy
        self._position = 0
        self._shown = True
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def pump(self) -> None:
        """Copy what is new."""
        try:
            with self._source.open("rb") as source:
                source.seek(self._position)
                fresh = source.read()
                self._position = source.tell()
        except FileNotFoundError:
            return
        if not fresh:
            return
        self._copy.write(fresh)
        self._copy.flush()
        if self._shown:
            self._show(fresh)

    def _show(self, fresh: bytes) -> None:
        try:
            if sys.stdout.isatty():  # as text: live bars below it must know of every line
                sys.stdout.write(self._decoder.decode(fresh))
                sys.stdout.flush()
            else:
                sys.stdout.buffer.write(fresh)
                sys.stdout.buffer.flush()
        except BrokenPipeError:
            self._shown = False  # nobody reads any more; the run goes on
            logger.warning("standard output is closed; the log goes on in %s", self._copy.name)


def _shell_line(command: Sequence[str]) -> str:
    """The job's command line. ``exec``: the shell in between would hide what signal ended the driver."""
    variables: dict[str, str] = {}
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        variables = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}
        variables |= {"COLUMNS": str(size.columns), "LINES": str(size.lines)}
    return f"exec {shlex.join(['env', *(f'{name}={value}' for name, value in variables.items()), *command])}"


def _exit_code(details: JobDetails) -> int:
    code = details.driver_exit_code
    if code is None:
        logger.error("the driver ended without an exit code (%s): %s", details.status.value, details.message)
        return 1
    if code < 0:
        logger.error("the driver was ended by signal %d; --resume latest continues the run", -code)
        return 128 - code
    return int(code)
