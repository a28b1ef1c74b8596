"""One rank of the trainer's tests, started as ``python sft_ranks.py RANK WORLD_SIZE FOLDER``: runs every scenario with the real
trainer over gloo and writes what it saw to FOLDER/seen_WORLD_RANK.pt. The tests read it; nothing is judged here.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles_wan.data import load_clips
from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.draws import Draw, TrainingDraws
from miles_wan.supervised.encode import ClipLibrary, EncodedClip
from miles_wan.supervised.export import export_adapters, export_transformers
from miles_wan.supervised.settings import plan
from miles_wan.supervised.trainer import SupervisedTrainer
from miles_wan.training import checkpoint
from miles_wan.training.sharding import full_tensor
from miles_wan.wan.family import load_family
from miles_wan.wan.lora import trainable_parameters

FAMILIES = {"ti2v": "wan2.2-ti2v-5b", "t2v": "wan2.2-t2v-a14b", "i2v": "wan2.2-i2v-a14b"}
BATCH = 6
STEPS = 2


def make_config(folder: Path, family: str, **changes: Any) -> SftConfig:
    """Small and exact; ``changes`` are dotted with two underscores."""
    tree: dict[str, Any] = {
        "model": {"path": str(folder / family), "dtype": "fp32", "lora_rank": 4, "lora_alpha": 6},
        "data": {
            "train": str(folder / "clips" / "train.jsonl"),
            "buckets": [[32, 32], [64, 32]],
            "num_frames": 5,
            "text_dropout": 0.3,
            "cache_dir": str(folder / "cache"),
        },
        "timesteps": {"shift": 3.0},
        "training": {
            "batch_size": BATCH,
            "micro_batch_size": 2,
            "activation_checkpointing": False,
            # a large epsilon: an update follows the size of the gradient, not the sign of its rounding
            "optimizer": {"lr": 0.01, "eps": 0.1, "weight_decay": 0.01, "max_grad_norm": 1e9},
        },
        "device": "cpu",
    }
    if family != "ti2v":
        tree["timesteps"]["high_share"] = 0.5
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return SftConfig.model_validate(tree)


class Bench:
    """One trainer with its clips."""

    def __init__(self, folder: Path, family: str, **changes: Any) -> None:
        self.config = make_config(folder, family, **changes)
        self.folder = load_family(folder / family)
        self.plan = plan(self.config, self.folder)
        device = torch.device("cpu")
        library = ClipLibrary(self.config.data.cache_dir, self.folder, self.plan.clip, device=device)
        self.clips: tuple[EncodedClip, ...] = library.encode(load_clips(self.config.data.train).records).clips
        self.trainer = SupervisedTrainer(self.config, self.folder, library, device=device, everything=False)
        self.source = TrainingDraws(
            self.config,
            len(self.clips),
            experts=self.folder.routing,
            trained=self.plan.trained,
            shift=self.plan.shift,
            image_share=self.plan.image_share,
        )

    def weights(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": full_tensor(value.detach()).clone()
            for name in self.trainer.trained
            for key, value in trainable_parameters(self.trainer.model[name])
        }

    def gradients(self, draws: Sequence[Draw]) -> tuple[list[float], dict[str, Tensor]]:
        """Losses and gradients of a step that moves nothing."""
        seen: dict[str, Tensor] = {}

        def note(*_: Any, **__: Any) -> None:
            for name in self.trainer.trained:
                for key, value in trainable_parameters(self.trainer.model[name]):
                    if value.grad is not None:
                        seen[f"{name}.{key}"] = full_tensor(value.grad).clone()

        moving, self.trainer.optimizer.step = self.trainer.optimizer.step, note  # type: ignore[method-assign]
        with warnings.catch_warnings(action="ignore"):  # torch sees that the step was replaced
            step = self.trainer.step(draws, self.clips, number=0)
        self.trainer.optimizer.step = moving  # type: ignore[method-assign]
        return step.losses, seen


def scenario_families(folder: Path) -> dict[str, Any]:
    """Gradients of a mixed batch, then a few steps, for every family and method."""
    seen = {}
    for family in FAMILIES:
        for method in ("lora", "full"):
            bench = Bench(folder, family, training__method=method)
            batch = bench.source.batch(0)
            losses, gradients = bench.gradients(batch)
            curve = [bench.trainer.step(bench.source.batch(n), bench.clips, number=n).losses for n in range(STEPS)]
            out = folder / f"export {family} {method} {dist.get_world_size()}"
            if method == "lora":
                export_adapters(out, bench.trainer.model, bench.config.model, names=bench.trainer.trained)
            else:
                export_transformers(
                    out, bench.trainer.model, bench.folder, bench.config.model, names=bench.trainer.trained
                )
            seen[family, method] = {
                "draws": batch,
                "sizes": [bench.clips[draw.clip].size for draw in batch],
                "losses": losses,
                "gradients": gradients,
                "curve": curve,
                "weights": bench.weights(),
                "validation": bench.trainer.losses(batch, bench.clips),
            }
    return seen


def scenario_settings(folder: Path) -> dict[str, Any]:
    """The same gradients under settings that must not change them."""
    seen = {}
    for name, changes in {
        "one at a time": {"training__micro_batch_size": 1},
        "all at once": {"training__micro_batch_size": 6},
        "checkpointing": {"training__activation_checkpointing": True},
    }.items():
        bench = Bench(folder, "t2v", **changes)
        seen[name] = bench.gradients(bench.source.batch(0))
    return seen


def scenario_samples(folder: Path) -> dict[str, Any]:
    """A mixed batch, and each of its samples alone."""
    seen = {}
    for family in FAMILIES:
        bench = Bench(folder, family)
        batch = bench.source.batch(1)
        alone = [bench.gradients([replace(draw, position=0)]) for draw in batch]
        seen[family] = {"draws": batch, "mixed": bench.gradients(batch), "alone": alone}
    return seen


def scenario_one_sided(folder: Path) -> dict[str, Any]:
    """Steps in which one expert has nothing to do, and such in which every rank has samples of one expert only."""
    bench = Bench(folder, "t2v", training__optimizer__weight_decay=0.5, training__optimizer__eps=1e-8)
    base = bench.source.batch(0)
    before = bench.weights()
    low = [replace(draw, timestep=300.0, expert="transformer_2") for draw in base]
    step = bench.trainer.step(low, bench.clips, number=0)
    middle = bench.weights()
    pair = [
        replace(base[0], position=0, timestep=950.0, expert="transformer"),
        replace(base[1], position=1, timestep=100.0, expert="transformer_2"),
    ]
    bench.trainer.step(pair, bench.clips, number=1)
    return {"before": before, "middle": middle, "after": bench.weights(), "norms": step.grad_norms}


def scenario_resume(folder: Path) -> dict[str, Any]:
    """Two steps more after a checkpoint, by the trainer that wrote it and by a new one."""
    place = folder / f"checkpoint {dist.get_world_size()}"
    bench = Bench(folder, "t2v")
    low = [replace(d, timestep=300.0, expert="transformer_2") for d in bench.source.batch(0)]
    bench.trainer.step(low, bench.clips, number=0)  # the other expert has no moments yet
    checkpoint.save(place, bench.trainer.state(), rollout_id=1)
    again = Bench(folder, "t2v")
    checkpoint.load(place, again.trainer.state())
    curves = [[b.trainer.step(b.source.batch(n), b.clips, number=n).losses for n in (1, 2)] for b in (bench, again)]
    return {"curves": curves, "weights": [bench.weights(), again.weights()]}


def scenario_half_precision(folder: Path) -> dict[str, Any]:
    """Full fine-tuning computes in bf16 with float32 weights."""
    seen = {}
    for dtype in ("fp32", "bf16"):
        bench = Bench(
            folder, "t2v", training__method="full", model__dtype=dtype, training__activation_checkpointing=True
        )
        losses, gradients = bench.gradients(bench.source.batch(0))
        types = {value.dtype for value in bench.weights().values()} | {value.dtype for value in gradients.values()}
        seen[dtype] = {"losses": losses, "gradients": gradients, "types": types}
    return seen


# One rank is what two are compared with; everything else is shown on two.
SCENARIOS = (
    scenario_families,
    scenario_settings,
    scenario_samples,
    scenario_one_sided,
    scenario_resume,
    scenario_half_precision,
)


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"meeting {world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    chosen = SCENARIOS if world_size > 1 else SCENARIOS[:1]
    seen = {scenario.__name__.removeprefix("scenario_"): scenario(folder) for scenario in chosen}
    torch.save(seen, folder / f"seen_{world_size}_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
