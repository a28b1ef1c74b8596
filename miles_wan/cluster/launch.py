"""The launcher: command line in, exit code out. It checks the input, starts a local Ray, runs the driver on it as a job
and ends everything at the end, on Ctrl-C and on SIGTERM. It may not know what the driver does.

Exit codes: 0 done, 1 the run failed, 2 bad input (nothing was started), 128 + n ended by signal n.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import psutil
import tyro

from miles_wan.cluster.job import Job
from miles_wan.cluster.local_ray import LocalRay, StartInterruptedError, check_environment
from miles_wan.config import Config
from miles_wan.configuration import all_fields, dump_config, read_config, recipe_paths
from miles_wan.errors import InputError, MilesWanError
from miles_wan.tracking.failures import show_failure
from miles_wan.tracking.follow import follow_progress

if TYPE_CHECKING:
    from miles_wan.data import Dataset
    from miles_wan.wan.family import ModelFolder

logger = logging.getLogger(__name__)

PREVIOUS_RUN_SECONDS = 60.0
LIVE_RUN_SECONDS = 2.0  # a killed process exists for a moment longer


def _flag(metavar: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Flags:
    """Train a Wan2.2 model with Flow-GRPO on this machine: SGLang rollouts, FSDP2 LoRA training, Ray.

    A run starts from a recipe; the flags below change what differs from run to run. Every other field of the
    configuration (docs/configuration.md) has a dotted flag of its own: --algorithm.clip-range 1e-3
    --training.optimizer.lr=2e-4 --rollout.window-range "[0, 4]".
    """

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE[,...]")] = "wan22_ti2v_5b"
    """A recipe in configs/ (wan22_ti2v_5b, wan22_t2v_a14b, wan22_i2v_a14b, toy_world, tiny_ti2v, tiny_a14b) or a YAML file of your own;
    after it, with commas, what changes it:
    wan22_ti2v_5b,guard takes configs/algorithms/guard.yaml."""
    model: Annotated[str | None, _flag("DIR|HUB_ID")] = None
    """Wan2.2 checkpoint in diffusers format: a folder with model_index.json, or a hub id."""
    data_jsonl: Annotated[str | None, _flag("FILE")] = None
    """Training records, one JSON object a line: {"input": prompt, "metadata": {"image_path": file}}."""
    num_gpus: Annotated[int | None, _flag("N")] = None
    """Devices. On a CPU these are worker slots."""
    cuda_visible_devices: Annotated[str | None, _flag("LIST")] = None
    """Which GPUs, for example 0,1,2,3."""
    device: Annotated[Literal["cpu", "cuda"] | None, _flag("cpu|cuda")] = None
    """Device of engines, trainers and rewards."""
    eval_data_jsonl: Annotated[str | None, _flag("FILE")] = None
    """Validation records."""
    eval_interval: Annotated[int | None, _flag("N")] = None
    """Validate before training, every N rollouts and at the end; 0 never."""
    reward_model: Annotated[str | None, _flag("DIR|HUB_ID")] = None
    """Model and processor of the pickscore reward."""
    init_adapter: Annotated[str | None, _flag("DIR")] = None
    """Start from this LoRA adapter (diffusers format) instead of zero."""
    output_dir: Annotated[str | None, _flag("DIR")] = None
    """Metrics, videos, checkpoints and the final adapter go here."""
    resume: Annotated[Literal["latest"] | None, _flag("latest")] = None
    """Continue the run in the output folder from its newest complete checkpoint."""


# Flags whose place in the configuration has another name.
_PLACES = {
    "model": "model.path",
    "data_jsonl": "data.train",
    "num_gpus": "cluster.num_gpus",
    "cuda_visible_devices": "cluster.cuda_visible_devices",
    "device": "cluster.device",
    "eval_data_jsonl": "data.eval",
    "eval_interval": "eval.interval",
    "init_adapter": "model.init_adapter",
}


def main(argv: Sequence[str] | None = None, *, recipe: str = Flags.recipe) -> int:
    """The command line of the scripts ``run_diffusion_grpo_wan22_*.py``.

    Args:
        recipe: the one that a command line without ``--recipe`` starts from.

    Returns:
        The exit code. All faults of the input are printed together, before anything is started.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    find_modules_in(Path.cwd())
    try:
        config = read_flags(sys.argv[1:] if argv is None else argv, recipe=recipe)
        check(config)
        return launch(config)
    except MilesWanError as error:
        return show_failure(error)
    except SystemExit as end:  # tyro has printed its help (0) or what is wrong with a flag (2)
        return end.code if isinstance(end.code, int) else 2


def find_modules_in(folder: Path) -> None:
    """A reward of the user's own may lie beside the command that starts the run; every process of the run must find it."""
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def read_flags(argv: Sequence[str], *, prog: str | None = None, recipe: str = Flags.recipe) -> Config:
    """The configuration that a command line of the launcher means; ``check`` has not seen it yet. Raises InputError."""
    flags, rest = tyro.cli(Flags, args=argv, prog=prog, default=Flags(recipe=recipe), return_unknown_args=True)
    if faults := _unknown_flags(rest):
        raise InputError(faults)
    return read_config(recipe_paths(flags.recipe), _overrides(flags), rest)


def _unknown_flags(rest: Sequence[str]) -> list[str]:
    """Flags without a dot that are neither ours nor a field outside all sections, with what may have been meant: one of
    ours, or a field that ends so."""
    outside = {name for name in all_fields() if "." not in name} - {"model", "data"}
    known = {field.name: field.name for field in fields(Flags)}
    known |= {
        name.rpartition(".")[2]: name for name in all_fields() if "." in name and name.rpartition(".")[2] not in known
    }
    faults = []
    for token in rest:
        written = token.partition("=")[0]
        name = written.removeprefix("--").replace("-", "_")
        if not token.startswith("--") or "." in name or name in outside:
            continue
        close = get_close_matches(name, known, n=1, cutoff=0.55)
        meant = f"; did you mean --{known[close[0]].replace('_', '-')}?" if close else "; see --help"
        faults.append(f"{written}: no such flag{meant}")
    return faults


def _overrides(flags: Flags) -> Mapping[str, Any]:
    given = {name: value for name, value in vars(flags).items() if value is not None and name != "recipe"}
    return {_PLACES.get(name, name): value for name, value in given.items()}


def check(config: Config) -> None:
    """All that can be known before anything starts. Raises InputError with every fault."""
    from miles_wan import doctor  # slow to import, and not needed for --help
    from miles_wan.cluster.placement import plan_layout
    from miles_wan.cluster.resume import saved_faults

    faults = check_environment()
    try:
        plan_layout(config)
    except InputError as error:
        faults += error.faults

    def further(model: ModelFolder, train: Dataset, evaluation: Dataset | None) -> list[str]:
        if config.resume is None:
            return []
        return saved_faults(
            config, train.records, evaluation.records if evaluation else (), weights=model.transformer_folders
        )

    try:
        doctor.check(config, further)
    except InputError as error:
        faults += error.faults
    if faults:
        raise InputError(faults)


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
        _make_folder(logs)
        ray = LocalRay(
            config.cluster.num_gpus,
            config.cluster.device,
            cuda_visible_devices=config.cluster.cuda_visible_devices,
            log_path=logs / "ray.log",
            interrupted=lambda: signals.received is not None,
            keep_open=[lock],
        )
        signals.ray = ray
        try:
            with ray, follow_progress(output_dir / "progress.json"):
                return _run_driver(ray, entrypoint or _driver(config), signals=signals, logs=logs)
        except StartInterruptedError:
            return signals.exit_code


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError([f"output_dir: {path} cannot be made ({error.strerror}); choose another folder"]) from error


def _driver(config: Config) -> list[str]:
    path = Path(config.output_dir).resolve() / "config.yaml"
    dump_config(config, path)
    return [sys.executable, "-m", "miles_wan.cli", "train", "--config", str(path)]


def _run_driver(ray: LocalRay, command: list[str], *, signals: StopSignals, logs: Path) -> int:
    with (logs / "driver.log").open("ab") as copy:
        job = Job(ray, command, copy=copy)
        try:
            code = job.run(stopping=lambda: signals.received is not None, forced=lambda: signals.forced)
        except MilesWanError:
            _keep_ray_logs(ray, logs / "ray")
            raise
    if code is None:
        return signals.exit_code
    if code not in (0, 2):
        _keep_ray_logs(ray, logs / "ray")
    return code


def _keep_ray_logs(ray: LocalRay, target: Path) -> None:
    """After a failure, what the actors wrote is worth reading; the folder of Ray itself goes."""
    ignored = shutil.ignore_patterns("dashboard*", "event*", "metrics*", "nsight", "profiles", "rocprof*", "*client*")
    try:
        shutil.copytree(ray.session_logs, target, dirs_exist_ok=True, ignore=ignored)
    except OSError as error:
        logger.debug("some of Ray's logs were not copied: %s", error)
    logger.info("Ray's logs are in %s", target)


class StopSignals:
    """Notes SIGINT, SIGTERM and SIGHUP instead of raising, so that no clean-up is cut in two.

    ``received`` is the first of them or None; from the second one on ``forced`` is true and ``ray`` is told to hurry.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.forced = False
        self.ray: LocalRay | None = None
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

    @property
    def exit_code(self) -> int:
        """What a shell reports for a program that this signal ended."""
        return 128 + (self.received or signal.SIGTERM)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            with suppress(OSError):  # Ctrl-C has ended the reader of our output, too
                os.write(sys.stderr.fileno(), b"\nstopping the run; once more ends it at once\n")
            return
        self.forced = True
        if self.ray is not None:
            self.ray.force()


@contextmanager
def output_lock(output_dir: Path) -> Iterator[int]:
    """Hold the output folder for one run. The lifeline shares the lock, so that it stays taken until the last process
    of a killed run has ended; its successor waits for that.

    Yields:
        The file descriptor of the lock.

    Raises:
        InputError: a live run holds it, or the folder cannot be written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(output_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
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
    started = time.monotonic()
    announced = False
    while not _lock(descriptor, output_dir):
        waited = time.monotonic() - started
        holder = os.pread(descriptor, 20, 0).decode().strip()
        if waited > LIVE_RUN_SECONDS and holder.isdigit() and _is_running(int(holder)):
            remedy = "wait for it, end it, or give another --output-dir"
            raise InputError([f"--output-dir {output_dir} is in use by the run with process id {holder}: {remedy}"])
        if waited > PREVIOUS_RUN_SECONDS:
            raise InputError([f"--output-dir {output_dir}: the previous run (process id {holder}) has not ended yet"])
        if waited > LIVE_RUN_SECONDS and not announced:
            logger.info("waiting for what the previous run (process id %s) left behind to end", holder)
            announced = True
        time.sleep(0.2)


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _lock(descriptor: int, output_dir: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems
        logger.warning("%s cannot be locked (%s): do not start a second run in it", output_dir, error.strerror)
    return True
