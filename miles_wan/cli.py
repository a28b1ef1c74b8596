"""The command line ``miles-wan``. Each command is one function; heavy imports happen inside it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from miles_wan.errors import MilesWanError
from miles_wan.tracking.failures import show_failure
from miles_wan.tracking.logs import configure_logging, console


def train(config: Path) -> None:
    """Run the training loop of a whole configuration file on the Ray cluster of RAY_ADDRESS (what the launcher submits).

    Args:
        config: the file the launcher wrote: every field, checked again here.
    """
    import ray

    from miles_wan.cluster.driver import run
    from miles_wan.cluster.pools import lost_workers_explained
    from miles_wan.configuration import load_config

    configure_logging("driver")
    settings = load_config([config], {})
    # The first failure ends the run and is told; what the other workers say of it afterwards would bury it.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    ray.init(log_to_driver=True, logging_level="warning")
    with lost_workers_explained():
        run(settings)


def tiny(out: Path, seed: int = 0, family: str = "wan2.2-ti2v-5b", trained: bool = False) -> None:
    """Make a tiny Wan2.2 checkpoint, a tiny PickScore, a tiny CLIP and a toy data set.

    Args:
        out: folder to make them in.
        seed: what the random weights and the data follow from.
        family: a tiny one of which model: wan2.2-ti2v-5b, wan2.2-t2v-a14b or wan2.2-i2v-a14b.
        trained: let them learn the moving shapes first: the toy world of docs/toy-world.md, in minutes.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries, before they are imported
    from miles_wan.tiny import make_tiny

    # What is half made is removed on the way out, as it is on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    if trained:
        configure_logging("tiny")
    paths = make_tiny(out, seed=seed, family=family, trained=trained)
    for name, path in asdict(paths).items():
        if path is not None:
            console().print(f"{name:12} {path}")


def inspect(
    model: str | None = None,
    family: str | None = None,
    lora_rank: int = 4,
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"),
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Count what a run would train: parameters, blocks, adapter tensors, layers. Loads no weights.

    Args:
        model: checkpoint folder, to count its own configuration.
        family: a released size instead, for example wan2.2-ti2v-5b.
        lora_rank: rank of the adapters.
        lora_targets: layers that get one.
        as_json: print JSON.
    """
    from miles_wan.wan.inspect import inspect_model

    counts = inspect_model(model=model, family=family, lora_rank=lora_rank, lora_targets=lora_targets)
    if as_json:
        sys.stdout.write(json.dumps(counts, indent=2) + "\n")
        return
    each = {f"  of each: {name}": value for name, value in counts.pop("each_expert", {}).items()}
    for name, value in {**counts, **each}.items():
        console().print(f"{name:32} {value:,}" if isinstance(value, int) else f"{name:32} {value}")


def export(
    model: Path,
    adapter: Path,
    out: Path,
    quantization: Literal["none", "int8", "fp8"] = "none",
    dtype: Literal["bf16", "fp32"] | None = None,
) -> None:
    """Write a whole checkpoint with the adapters of every expert folded in.

    Args:
        model: checkpoint folder that the adapter was trained on.
        adapter: folder that training wrote; of two experts it holds transformer/, transformer_2/ or both.
        out: folder to make.
        quantization: model.quantization of the training; the adapter is then folded into the dequantised weights.
        dtype: of the weights; by default what the checkpoint is stored in.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries, before they are imported
    from miles_wan.wan.export import export_checkpoint

    configure_logging("export")
    for name, file in export_checkpoint(model, adapter, out, quantization=quantization, dtype=dtype).items():
        console().print(f"{name:14} {f'merged with {file}' if file else 'as it was: there is no adapter for it'}")
    console().print(f"{'checkpoint':14} {out}")


def doctor() -> None:
    """Check data, images, model folder, configuration, devices and output folder; start nothing. It takes the flags of
    scripts/run_diffusion_grpo_wan22_ti2v.py, dotted ones included."""


def _doctor(argv: Sequence[str]) -> None:
    from miles_wan.cluster.launch import check, find_modules_in, read_flags
    from miles_wan.combinations import batch_equation

    find_modules_in(Path.cwd())
    settings = read_flags(argv, prog="miles-wan doctor")
    check(settings)
    console().print(batch_equation(settings))
    console().print("everything is in order")


@dataclass(frozen=True)
class ParityFlags:
    """Roll out a few records with the configured engine, score every kept step again as training does, and say whether the
    two agree, and if not, why. It takes the flags of scripts/run_diffusion_grpo_wan22_ti2v.py, dotted ones included, and
    needs no reward model. Exit code 0: they agree, 1: they do not, 2: bad input.
    """

    records: int = 2
    """Records rolled out; swapped conditions can be told from two on."""
    samples: int = 2
    """Samples of each record."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print the report as JSON."""


def parity() -> None:
    """Compare the rollout engine with the trainer, step by step, and name the cause where they differ. It takes --records,
    --samples, --json and the flags of scripts/run_diffusion_grpo_wan22_ti2v.py, dotted ones included."""


def _parity(argv: Sequence[str]) -> int:
    from miles_wan.cluster.launch import find_modules_in, read_flags

    prog = "miles-wan parity"
    flags, rest = tyro.cli(ParityFlags, args=argv, prog=prog, return_unknown_args=True)
    find_modules_in(Path.cwd())
    settings = read_flags([_long_name(token) for token in rest], prog=prog)
    configure_logging("parity")
    if settings.cluster.cuda_visible_devices is not None:  # before CUDA starts
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.cluster.cuda_visible_devices
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TQDM_DISABLE": "1"}

    from miles_wan.cluster.requests import RequestPlanner
    from miles_wan.parity import check_parity, show
    from miles_wan.parity.inputs import check_inputs, for_parity

    folder, dataset = check_inputs(settings, records=flags.records, samples=flags.samples)
    planned = for_parity(settings, records=min(flags.records, len(dataset)), samples=flags.samples)
    requests = RequestPlanner(planned, dataset.records, ()).training(0, policy_version=2)
    report = check_parity(planned, folder, requests)
    if flags.as_json:
        sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        show(report, Console(highlight=False))
    return 0 if report.holds else 1


def sft() -> None:
    """Supervised training on video-caption data, both experts of an A14B under one optimizer. It takes the flags of
    scripts/run_diffusion_sft_wan22.py, dotted ones included."""


def _sft(argv: Sequence[str]) -> int:
    from miles_wan.supervised.launch import main as launch

    return launch(argv, prog="miles-wan sft")


def _long_name(token: str) -> str:
    return "--data-jsonl" + token.removeprefix("--data") if token.partition("=")[0] == "--data" else token


COMMANDS: dict[str, Callable[..., Any]] = {
    "train": train,
    "sft": sft,
    "tiny": tiny,
    "inspect": inspect,
    "export": export,
    "doctor": doctor,
    "parity": parity,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit code 0, 1 for a fault of the run, 2 for bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] == ["doctor"]:  # its flags are another command's
            _doctor(given[1:])
        elif given[:1] == ["parity"]:
            sys.exit(_parity(given[1:]))
        elif given[:1] == ["sft"]:
            sys.exit(_sft(given[1:]))
        else:
            tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="miles-wan", args=given)
    except MilesWanError as error:
        sys.exit(show_failure(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
