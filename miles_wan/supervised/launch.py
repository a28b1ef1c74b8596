"""The launcher of supervised training: command line in, exit code out. It checks the input and starts one process per rank on
this machine; under torchrun (WORLD_SIZE is set) this process is a rank itself. It may not know what a rank does.

Exit codes: 0 done, 1 the run failed, 2 bad input (nothing was trained), 128 + n ended by signal n.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import tyro

from miles_wan.cluster.launch import output_lock
from miles_wan.configuration import dump_config
from miles_wan.data.clips import load_clips, summarised
from miles_wan.doctor.machine import cuda_device_bytes
from miles_wan.doctor.output import output_faults
from miles_wan.errors import InputError, MilesWanError
from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.model_check import model_faults
from miles_wan.supervised.settings import batch_equation, plan, read_settings, recipe_path
from miles_wan.tracking.failures import show_failure
from miles_wan.tracking.logs import configure_logging
from miles_wan.wan.family import load_family, resolve_model

logger = logging.getLogger(__name__)


def _flag(metavar: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class SftFlags:
    """Train a Wan2.2 model on video-caption data on this machine: both experts of an A14B under one optimizer in one program.

    A run starts from a recipe; the flags below change what differs from run to run. Every other field (docs/supervised.md) has
    a dotted flag of its own: --training.optimizer.lr=1e-4 --timesteps.shift 5 --data.num-frames 81.
    """

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "wan22_t2v_a14b"
    """A recipe in configs/sft/ or a YAML file of your own."""
    model: Annotated[str | None, _flag("DIR|HUB_ID")] = None
    """Wan2.2 checkpoint in diffusers format: a folder with model_index.json, or a hub id."""
    data_jsonl: Annotated[str | None, _flag("FILE")] = None
    """Training clips, one JSON object a line: {"video_path": file, "input": caption}."""
    eval_data_jsonl: Annotated[str | None, _flag("FILE")] = None
    """Validation clips."""
    eval_interval: Annotated[int | None, _flag("N")] = None
    """Validate before training, every N steps and at the end; 0 never."""
    num_gpus: Annotated[int | None, _flag("N")] = None
    """FSDP2 ranks, one per device. On a CPU these are processes."""
    cuda_visible_devices: Annotated[str | None, _flag("LIST")] = None
    """Which GPUs, for example 0,1,2,3."""
    device: Annotated[Literal["cpu", "cuda"] | None, _flag("cpu|cuda")] = None
    """Device of the ranks."""
    num_steps: Annotated[int | None, _flag("N")] = None
    """Optimizer steps."""
    init_adapter: Annotated[str | None, _flag("DIR")] = None
    """Start from this LoRA adapter (diffusers format) instead of zero."""
    output_dir: Annotated[str | None, _flag("DIR")] = None
    """Metrics, videos, checkpoints and the trained weights go here."""
    resume: Annotated[Literal["latest"] | None, _flag("latest")] = None
    """Continue the run in the output folder from its newest complete checkpoint."""


_PLACES = {
    "model": "model.path",
    "data_jsonl": "data.train",
    "eval_data_jsonl": "data.eval",
    "eval_interval": "eval.interval",
    "num_gpus": "training.dp_size",
    "num_steps": "training.num_steps",
    "init_adapter": "model.init_adapter",
}


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """The command line of ``miles-wan sft`` and ``scripts/run_diffusion_sft_wan22.py``; the exit code. All faults of the input
    are printed together, before anything is started."""
    configure_logging("sft")
    try:
        config = read_flags(sys.argv[1:] if argv is None else argv, prog=prog)
        if "WORLD_SIZE" in os.environ:
            return _be_a_rank(config)
        check(config)
        with output_lock(Path(config.output_dir)):
            path = Path(config.output_dir) / "config.yaml"
            dump_config(config, path)
            return _start_ranks(config, path)
    except MilesWanError as error:
        return show_failure(error)
    except SystemExit as end:  # tyro has printed its help (0) or what is wrong with a flag (2)
        return end.code if isinstance(end.code, int) else 2


def read_flags(argv: Sequence[str], *, prog: str | None = None) -> SftConfig:
    """The configuration that a command line means; ``check`` has not seen it yet. Raises InputError."""
    flags, rest = tyro.cli(SftFlags, args=argv, prog=prog, return_unknown_args=True)
    unknown = [token for token in rest if token.startswith("--") and not _is_field(token)]
    if unknown:
        raise InputError([f"{token.partition('=')[0]}: no such flag; see --help" for token in unknown])
    given = {name: value for name, value in vars(flags).items() if value is not None and name != "recipe"}
    places: dict[str, Any] = {_PLACES.get(name, name): value for name, value in given.items()}
    if "WORLD_SIZE" in os.environ:  # torchrun says how many ranks there are
        places["training.dp_size"] = int(os.environ["WORLD_SIZE"])
    return read_settings([recipe_path(flags.recipe)], places, rest)


def _is_field(token: str) -> bool:
    name = token.partition("=")[0].removeprefix("--").replace("-", "_")
    return "." in name or name in SftConfig.model_fields


def check(config: SftConfig) -> None:
    """All that can be known before anything starts. What can be trained on without is told and left out.

    Raises:
        InputError: with every fault of model, data, devices and output folder.
    """
    faults = _data_faults(config)
    device_bytes = _device_bytes(config, faults)
    try:
        folder = load_family(resolve_model(config.model.path))
        meaning = plan(config, folder)
        faults += model_faults(config, folder, meaning.trained, device_bytes=device_bytes)
    except InputError as error:
        faults += [fault if "." in fault.partition(":")[0] else f"model.path: {fault}" for fault in error.faults]
    faults += output_faults(Path(config.output_dir), resume=config.resume is not None)
    if faults:
        raise InputError(list(dict.fromkeys(faults)))
    logger.info("%s", batch_equation(config))


def _data_faults(config: SftConfig) -> list[str]:
    """Faults of the data files. Records that cannot be used are told as warnings."""
    faults: list[str] = []
    for name, path in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if path is None:
            continue
        try:
            clips = load_clips(path)
        except InputError as error:
            faults += [f"{name}: {fault}" for fault in error.faults]
        else:
            for sentence in summarised(clips.bad):
                logger.warning("%s: left out: %s", name, sentence)
    try:
        Path(config.data.cache_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        faults.append(
            f"data.cache_dir: {config.data.cache_dir} cannot be made ({error.strerror}); choose another folder"
        )
    return faults


def _device_bytes(config: SftConfig, faults: list[str]) -> int | None:
    """Memory that one rank may use; None where there is no device for it."""
    ranks = config.training.dp_size
    if config.device == "cpu":
        return int(psutil.virtual_memory().total) // ranks
    environment = dict(os.environ)
    if config.cuda_visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = config.cuda_visible_devices
    found = cuda_device_bytes(environment)
    if len(found) < ranks:
        faults.append(
            f"training.dp_size: {ranks} ranks need as many CUDA devices, this machine shows {len(found)}; lower --num-gpus, or "
            "choose --device cpu"
        )
    return min(found, default=None)


def _start_ranks(config: SftConfig, path: Path) -> int:
    """One process per rank under torch's elastic agent; the exit code."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _prepare_environment(config)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.training.dp_size,
        run_id=f"sft-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(settings, sys.executable)("-u", "-m", "miles_wan.supervised", str(path))
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return 2 if 2 in codes else 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _be_a_rank(config: SftConfig) -> int:
    """Under torchrun: the first rank checks, the others wait for it in the process group."""
    from miles_wan.supervised.run import run_rank

    if os.environ["RANK"] == "0":
        check(config)
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        dump_config(config, Path(config.output_dir) / "config.yaml")
    return run_rank(config)


def _prepare_environment(config: SftConfig) -> None:
    if config.cuda_visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.cuda_visible_devices
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.training.dp_size)))
