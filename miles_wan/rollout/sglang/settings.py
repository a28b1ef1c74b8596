"""How one SGLang server is run. In: the configuration, the devices it gets and a folder for its log. Out: frozen settings,
and from them the command line and the environment of the server. It starts nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles_wan.config import Config
from miles_wan.errors import InputError
from miles_wan.rollout.sglang.hooks import DETERMINISTIC_VARIABLE
from miles_wan.rollout.sglang.identity import TOKEN_VARIABLE
from miles_wan.wan.family import ModelFolder, load_family, resolve_model

DETERMINISTIC_ATTENTION = "torch_sdpa"  # the only one of the engine's backends that torch's strict mode controls


@dataclass(frozen=True)
class EngineSettings:
    """One server on ``tp_size * sp_size`` devices.

    ``model_id`` names the model class (``Wan2.2-TI2V-5B-Diffusers``); SGLang would go by the folder's name otherwise.
    ``devices`` are numbers in the order of the PCI bus (SGLang reads them as such); on a CPU only their count matters. ``threads`` is per worker on a CPU,
    by default the machine's cores divided by the workers. Timeouts in seconds; ``request_timeout`` is for one video.
    """

    model_path: str
    model_id: str
    devices: tuple[str, ...]
    log_dir: Path
    tp_size: int = 1
    sp_size: int = 1
    device: Literal["cpu", "cuda"] = "cuda"
    dtype: Literal["bf16", "fp32"] = "bf16"
    flow_shift: float = 5.0
    lora_merge_mode: Literal["dynamic", "merge"] = "dynamic"
    concurrency: int = 4
    request_timeout: float = 1800.0
    start_timeout: float = 1200.0
    server_args: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    threads: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if len(self.devices) != self.world_size:
            raise InputError(
                [
                    f"engine: {len(self.devices)} devices ({', '.join(self.devices)}) for tp_size {self.tp_size} x "
                    f"sp_size {self.sp_size}; give it exactly {self.world_size}"
                ]
            )
        named = [device for device in self.devices if not device.isdecimal()]
        if self.device == "cuda" and named:
            raise InputError([f"engine: SGLang takes CUDA devices as numbers, not as {', '.join(named)}"])

    @property
    def world_size(self) -> int:
        """Worker processes of the server, one per device."""
        return self.tp_size * self.sp_size


def engine_checkpoint(config: Config, folder: ModelFolder) -> Path:
    """The checkpoint that engines load: that of the run, or with a quantized base a copy in the output folder that holds what
    the trainer computes with, so that both sides are one policy. It is made once and kept.

    Raises:
        InputError: no place for it, or weights that cannot be quantized.
        MilesWanError: it could not be written.
    """
    from miles_wan.wan.dequantised import dequantised_checkpoint  # loads diffusers

    settings = config.model
    out = Path(config.output_dir) / "engine_checkpoint"
    return dequantised_checkpoint(folder, settings.quantization, settings.dtype, out)


def engine_settings(
    config: Config, devices: Sequence[str], log_dir: str | Path, *, checkpoint: Path | None = None
) -> EngineSettings:
    """The settings of one engine of a run. Raises InputError if the model folder is not whole.

    Args:
        checkpoint: from ``engine_checkpoint``; by default that of the run.
    """
    folder = checkpoint if checkpoint is not None else resolve_model(config.model.path)
    rollout = config.rollout
    return EngineSettings(
        model_path=str(folder.resolve()),
        model_id=load_family(folder).family.engine_model_id,
        devices=tuple(devices),
        log_dir=Path(log_dir),
        tp_size=rollout.tp_size,
        sp_size=rollout.sp_size,
        device=config.cluster.device,
        dtype=rollout.dtype,
        flow_shift=rollout.flow_shift,
        lora_merge_mode=rollout.lora_merge_mode,
        concurrency=rollout.concurrency,
        request_timeout=rollout.request_timeout,
        start_timeout=rollout.start_timeout,
        server_args=rollout.server_args,
        deterministic=config.deterministic,
    )


def server_command(settings: EngineSettings, *, port: int, scheduler_port: int, master_port: int) -> list[str]:
    """The command line of the server. ``port + 1`` is used as well, for its request broker."""
    options: dict[str, object] = {
        "--model-path": settings.model_path,
        "--model-id": settings.model_id,
        "--host": "127.0.0.1",
        "--port": port,
        "--scheduler-port": scheduler_port,
        "--master-port": master_port,
        "--num-gpus": settings.world_size,
        "--tp-size": settings.tp_size,
        "--sp-degree": settings.sp_size,
        "--ulysses-degree": settings.sp_size,
        "--cfg-parallel-size": 1,  # SGLang would turn it on by itself, and it combines guidance by another formula
        "--dit-precision": settings.dtype,
        "--flow-shift": settings.flow_shift,
        "--lora-merge-mode": settings.lora_merge_mode,
        "--warmup-mode": "off",
    }
    if settings.deterministic and settings.device == "cuda":
        options["--attention-backend"] = DETERMINISTIC_ATTENTION
    flags = [text for name, value in options.items() for text in (name, str(value))]
    main = "from sglang.cli.main import main; main()"  # a module that workers re-import would load too early
    return [
        sys.executable,
        "-c",
        main,
        "serve",
        "--model-type",
        "diffusion",
        *flags,
        "--strict-ports",
        "--sleep-on-idle",
        *settings.server_args,
    ]


def server_environment(settings: EngineSettings, token: str, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: ``base`` with the devices, the identity token and, on a CPU, the thread count."""
    environment = dict(base) | {TOKEN_VARIABLE: token, "PYTHONUNBUFFERED": "1"}
    if settings.device == "cuda":
        # One numbering for CUDA and NVML: SGLang uses the same number with both.
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(settings.devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    else:
        threads = settings.threads or max(1, (os.cpu_count() or 1) // settings.world_size)
        environment |= {
            "CUDA_VISIBLE_DEVICES": "",
            "SGLANG_DIFFUSION_PLATFORM_OVERRIDE": "cpu",
            "OMP_NUM_THREADS": str(threads),
            "TORCHDYNAMO_DISABLE": "1",  # compiling costs minutes of a CPU and gives tiny models nothing
        }
    if settings.deterministic:
        environment |= {DETERMINISTIC_VARIABLE: "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return environment | dict(settings.environment)
