"""One rank of the training tests, started as ``python ranks.py RANK WORLD_SIZE FOLDER``: runs every scenario with real
FSDP2 workers over gloo and writes what it saw to FOLDER/results_RANK.pt. The tests read it; nothing is judged here.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from golden_data import described, single, ti2v_item, ti2v_rollout
from torch import Tensor

from miles_wan.config import Config
from miles_wan.errors import MilesWanError
from miles_wan.flow import shifted_sigmas
from miles_wan.records import TrainItem
from miles_wan.training import worker as worker_module
from miles_wan.training.mesh import MeshMemory, estimate, held_bytes
from miles_wan.training.sharding import full_tensor
from miles_wan.training.worker import Rank, TrainingWorker
from miles_wan.wan.load import load_transformer, meta_transformer
from miles_wan.wan.lora import inject_lora, trainable_parameters

# Every rank's items: (kept steps, advantage). Two samples of two kept steps each, different on either rank.
ITEMS = {0: [((0, 1), 1.0), ((2, 3), -0.5)], 1: [((1, 2), 2.0), ((3, 4), -1.5)]}

CLIP_LOW, CLIP_HIGH = 1e-3, 1e-1
DPPO_THRESHOLD = 1e-3
NFT = {"beta": 0.5, "sigmas_per_sample": 2, "reference_weight": 0.1}
NFT_SCALE = 1.5  # of the policy's adapter over its average

PERTURBED = "blocks.1.ffn.net.0.proj.lora_B.weight"


def make_config(folder: Path, **changes: Any) -> Config:
    """The golden rollout's settings; ``changes`` are dotted."""
    tree: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "dtype": "fp32", "lora_rank": 4, "lora_alpha": 6},
        "data": {"train": "train.jsonl"},
        "rollout": {"guidance_scale": 3.0, "num_inference_steps": 6, "flow_shift": 5.0, "noise_level": 0.7},
        "algorithm": {"max_log_prob_gap": 1e-5, "clip_range": 0.5, "old_log_prob": "engine"},
        "training": {
            "dp_size": 2,
            "micro_batch_size": 2,
            "activation_checkpointing": False,
            "optimizer": {"lr": 0.0, "max_grad_norm": 1e9, "weight_decay": 0.0},
        },
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return Config.model_validate(tree)


class Scenarios:
    """What every scenario needs: this rank, the folder, fresh workers."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self._meetings = itertools.count()

    def worker(self, **changes: Any) -> TrainingWorker:
        meeting = self.folder / f"meeting #{next(self._meetings)}?"
        place = Rank(self.rank, self.world_size, f"file://{meeting}", "cpu")
        config = make_config(self.folder, **changes)
        return TrainingWorker(config, place, folder=described(Path(config.model.path)))

    def adapted(self, **changes: Any) -> TrainingWorker:
        """A worker whose adapters are not zero; they move the log-probs, so the bound is wide."""
        start = {"model__init_adapter": str(self.folder / "adapter"), "algorithm__max_log_prob_gap": 100.0}
        return self.worker(**{**start, **changes})

    def items(self) -> list[TrainItem]:
        return [ti2v_item(steps, advantage=advantage) for steps, advantage in ITEMS[self.rank]]

    # The golden trajectories under the weights that made them.
    def parity(self) -> dict[str, Any]:
        seen = {}
        for steps in (1, 2):
            worker = self.worker(algorithm__optimizer_steps_per_rollout=steps, training__optimizer__lr=0.1)
            before = adapter_of(worker)
            items = self.items()
            share = len(items) // steps
            dealt = [items[start : start + share] for start in range(0, len(items), share)]
            metrics = worker.update(dealt, rollout_id=0)
            seen[steps] = {"metrics": metrics, "moved": moved(before, adapter_of(worker))}
            worker.close()
        return seen

    def sharding(self) -> dict[str, Any]:
        worker = self.worker()
        local = sum(p.to_local().numel() for p in worker.model["transformer"].parameters())
        seen = {"local": local, "report": worker.report, "sharded_blocks": worker.sharded_blocks}
        worker.close()
        for dtype in ("fp32", "bf16"):
            worker, logged = self.logged_worker(model__dtype=dtype)
            seen[dtype] = {
                "held": held_bytes(worker.model),
                "logged": logged,
                "text": self.expected_memory(dtype).text,
                "share": self.expected_memory(dtype).weight_bytes,
            }
            worker.close()
        return seen

    def expected_memory(self, dtype: str) -> MeshMemory:
        """What is known without a process group."""
        model = make_config(self.folder).model
        config = load_transformer(Path(model.path), dtype="fp32").config
        transformer = meta_transformer(config, dtype=dtype)
        inject_lora(transformer, rank=model.lora_rank, alpha=model.lora_alpha, targets=model.lora_targets, seed=0)
        return estimate(single(transformer), ranks=self.world_size)

    def logged_worker(self, **changes: Any) -> tuple[TrainingWorker, list[str]]:
        """A worker, and what it said while it was built."""
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logger = logging.getLogger("miles_wan.training")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        worker = self.worker(**changes)
        logger.removeHandler(handler)
        return worker, [record.getMessage() for record in records]

    def unsharded(self) -> str | None:
        """A mesh that shards nothing: what building the worker says."""
        sharded = worker_module.shard_transformer
        worker_module.shard_transformer = lambda *_, **__: None  # type: ignore[assignment]
        error = error_of(self.worker)
        worker_module.shard_transformer = sharded
        torch.distributed.destroy_process_group()
        return error

    def gradients(self) -> dict[str, Any]:
        """Gradients of one optimizer step, by case."""
        cases: dict[str, dict[str, Any]] = {
            "micro 1": {"training__micro_batch_size": 1},
            "micro 2": {"training__micro_batch_size": 2},
            "micro 4": {"training__micro_batch_size": 4},
            "checkpointing": {"training__activation_checkpointing": True},
            "no guidance": {"rollout__guidance_scale": 1.0},
            "kl": {"algorithm__kl_beta": 0.3},
            "kl checkpointing": {"algorithm__kl_beta": 0.3, "training__activation_checkpointing": True},
            "kl negligible": {"algorithm__kl_beta": 1e-12},
            "guard": {"algorithm__loss": "guard"},
            "dppo": {"algorithm__loss": "dppo", "algorithm__kl_threshold": DPPO_THRESHOLD},
            "clip higher": {"algorithm__clip_range": CLIP_LOW, "algorithm__clip_range_high": CLIP_HIGH},
            "noise level": {"algorithm__step_weight": "noise_level"},
            "recompute": {"algorithm__old_log_prob": "recompute"},
            "guard recompute": {"algorithm__loss": "guard", "algorithm__old_log_prob": "recompute"},
            "bf16": {"model__dtype": "bf16"},
            "bf16 checkpointing": {"model__dtype": "bf16", "training__activation_checkpointing": True},
        }
        seen = {}
        for name, changes in cases.items():
            worker = self.adapted(training__optimizer__lr=1e-5, **changes)
            caught: dict[str, Tensor] = {}
            times: list[Tensor] = []

            def catch(*_: Any, worker: TrainingWorker = worker, caught: dict[str, Tensor] = caught) -> None:
                caught.update(
                    {n: full_tensor(p.grad).clone() for n, p in trainable_parameters(worker.model["transformer"])}
                )

            def watch(_: Any, args: Any, times: list[Tensor] = times) -> None:
                times.append(args[0].detach().clone())

            worker.optimizer.register_step_pre_hook(catch)
            worker.model["transformer"].condition_embedder.timesteps_proj.register_forward_pre_hook(watch)
            before = adapter_of(worker)
            metrics = worker.update([self.items()], rollout_id=0)
            seen[name] = {
                "gradients": caught,
                "metrics": metrics,
                "moved": moved(before, adapter_of(worker)),
                "moments": {state["exp_avg"].dtype for state in worker.optimizer.state.values()},
                "times": times[0],
                "adapter": before,
                "trainable": len(list(trainable_parameters(worker.model["transformer"]))),
            }
            worker.close()
        return seen

    def nft(self) -> dict[str, Any]:
        """One DiffusionNFT step with a policy that is not its average."""
        changes = {f"algorithm__nft__{name}": value for name, value in NFT.items()}
        worker = self.adapted(
            algorithm__loss="nft",
            rollout__sampler="ode",
            rollout__guidance_scale=1.0,
            training__ema_decay=0.9,
            **changes,
        )
        with torch.no_grad():
            for _, parameter in trainable_parameters(worker.model["transformer"]):
                parameter.data.to_local().mul_(NFT_SCALE)
        caught: dict[str, Tensor] = {}

        def catch(*_: Any) -> None:
            caught.update(
                {n: full_tensor(p.grad).clone() for n, p in trainable_parameters(worker.model["transformer"])}
            )

        worker.optimizer.register_step_pre_hook(catch)
        before = {weights: adapter_of(worker, weights) for weights in ("policy", "ema")}
        metrics = worker.update([[finished(item) for item in self.items()]], rollout_id=3)
        seen = {"gradients": caught, "metrics": metrics, "before": before, "policy": adapter_of(worker)}
        worker.close()
        return seen

    def kl_to_the_average(self) -> dict[str, Any]:
        """One step with a KL to an average that the policy has left."""
        seen: dict[str, Any] = {}
        for checkpointing in (False, True):
            worker = self.adapted(
                algorithm__kl_beta=0.3,
                algorithm__kl_reference="ema",
                training__ema_decay=0.9,
                training__activation_checkpointing=checkpointing,
            )
            with torch.no_grad():
                for _, parameter in trainable_parameters(worker.model["transformer"]):
                    parameter.data.to_local().mul_(NFT_SCALE)
            caught: dict[str, Tensor] = {}

            def catch(*_: Any, worker: TrainingWorker = worker, caught: dict[str, Tensor] = caught) -> None:
                caught.update(
                    {n: full_tensor(p.grad).clone() for n, p in trainable_parameters(worker.model["transformer"])}
                )

            worker.optimizer.register_step_pre_hook(catch)
            worker.update([self.items()], rollout_id=0)
            seen[str(checkpointing)] = caught
            worker.close()
        return seen

    def average(self) -> dict[str, Any]:
        """The adapters after each of three steps, and their averages."""
        seen: dict[str, Any] = {}
        for rise in (None, 0.3):
            worker = self.adapted(
                training__optimizer__lr=1e-2, training__ema_decay=0.75, training__ema_rise=rise, num_rollouts=3
            )
            history = [(adapter_of(worker), adapter_of(worker, "ema"))]
            for rollout_id in range(3):
                worker.update([self.items()], rollout_id=rollout_id)
                history.append((adapter_of(worker), adapter_of(worker, "ema")))
            worker.export(self.folder / f"exported average {rise}", weights="ema")
            seen[str(rise)] = history
            worker.close()
        return seen

    def old_policies(self) -> dict[str, Any]:
        """Two optimizer steps under weights that are not the engine's, by where the old log-probs come from."""
        seen = {}
        for old in ("engine", "recompute"):
            worker = self.adapted(
                algorithm__old_log_prob=old,
                algorithm__optimizer_steps_per_rollout=2,
                training__optimizer__lr=1e-2,
            )
            seen[old] = worker.update([[item] for item in self.items()], rollout_id=0)
            worker.close()
        return seen

    def agreement(self) -> dict[str, Any]:
        worker = self.adapted(training__optimizer__lr=1e-2)
        before = worker.check_ranks_agree(worker.adapters(), policy_version=0)
        worker.update([self.items()], rollout_id=0)
        adapter = adapter_of(worker)
        seen = {"before": before, "after": worker.check_ranks_agree({"transformer": adapter}, policy_version=1)}
        if self.rank == 1:
            next(iter(adapter.values())).view(-1)[0] += 1e-7
        seen["error"] = error_of(lambda: worker.check_ranks_agree({"transformer": adapter}, policy_version=1))
        worker.close()
        return seen

    def resume(self) -> dict[str, Any]:
        changes: dict[str, Any] = {
            "training__optimizer__lr": 1e-2,
            "training__optimizer__schedule": "cosine",
            "training__optimizer__warmup_steps": 1,
            "training__optimizer__weight_decay": 0.1,
            "training__optimizer__max_grad_norm": 1e-3,
            "training__ema_decay": 0.5,
            "num_rollouts": 4,
        }
        first = self.adapted(**changes)
        rates = [first.update([self.items()], rollout_id=n)["train/lr"] for n in range(2)]
        torch.manual_seed(100 + self.rank)
        folder = self.folder / "checkpoint"
        first.save_checkpoint(folder, rollout_id=2)
        saved = state_of(first)
        continued = first.update([self.items()], rollout_id=2)
        after = state_of(first)
        first.close()
        second = self.adapted(**changes, model__init_adapter=None)
        second.load_checkpoint(folder)
        loaded = state_of(second)
        again = second.update([self.items()], rollout_id=2)
        seen = {"saved": saved, "loaded": loaded, "continued": continued, "again": again, "rates": rates}
        seen |= {"after": after, "after_again": state_of(second)}
        second.close()
        other = self.worker(model__lora_rank=8)
        seen["other rank"] = error_of(lambda: other.load_checkpoint(folder))
        seen["nothing"] = error_of(lambda: other.load_checkpoint(self.folder / "nowhere"))
        other.close()
        return seen

    def export(self) -> dict[str, Any]:
        worker = self.worker()
        for _, parameter in trainable_parameters(worker.model["transformer"]):
            parameter.data.to_local().fill_(self.rank + 1)
        worker.export(self.folder / "exported")
        worker.close()
        return {}

    def refusals(self) -> dict[str, Any]:
        """Updates that must be refused, each on all ranks and without moving a weight."""

        def wrong_log_prob(item: TrainItem) -> TrainItem:
            old = item.trajectory
            return replace(item, trajectory=replace(old, log_probs=old.log_probs + (0.01 if self.rank == 1 else 0.0)))

        def nan_log_prob(item: TrainItem) -> TrainItem:
            old = item.trajectory
            return replace(item, trajectory=replace(old, log_probs=old.log_probs * float("nan")))

        def other_grid(item: TrainItem) -> TrainItem:
            return replace(item, trajectory=replace(item.trajectory, sigmas=shifted_sigmas(6, 4.9).numpy()))

        def other_image(item: TrainItem) -> TrainItem:
            latent = item.conditioning.condition_latent
            return replace(item, conditioning=replace(item.conditioning, condition_latent=-latent))

        def nan_advantage(item: TrainItem) -> TrainItem:
            return replace(item, advantage=float("nan")) if self.rank == 1 else item

        kinds: dict[str, Callable[[TrainItem], TrainItem]] = {
            "wrong log-prob": wrong_log_prob,
            "nan log-prob": nan_log_prob,
            "other grid": other_grid,
            "other image": other_image,
            "nan advantage": nan_advantage,
        }
        seen = {}
        for name, spoil in kinds.items():
            worker = self.worker(training__optimizer__lr=0.1, algorithm__max_log_prob_gap=1e-4)
            seen[name] = self._refusal(worker, [spoil(item) for item in self.items()])
        worker = self.worker(training__optimizer__lr=0.1, algorithm__max_log_prob_gap=1e-4)
        with torch.no_grad():
            dict(trainable_parameters(worker.model["transformer"]))[PERTURBED].data.to_local().fill_(1.0)
        seen["perturbed adapter"] = self._refusal(worker, self.items())
        return seen

    def warnings(self) -> dict[str, Any]:
        """What an update logs when the engine's log-probs are 0.01 off, by clip range."""
        seen = {}
        for clip_range in (1e-3, 0.1):
            worker = self.worker(algorithm__max_log_prob_gap=1.0, algorithm__clip_range=clip_range)
            items = [
                replace(item, trajectory=replace(item.trajectory, log_probs=item.trajectory.log_probs + 0.01))
                for item in self.items()
            ]
            records: list[logging.LogRecord] = []
            handler = logging.Handler()
            handler.emit = records.append  # type: ignore[method-assign]
            logging.getLogger("miles_wan.training").addHandler(handler)
            worker.update([items], rollout_id=0)
            logging.getLogger("miles_wan.training").removeHandler(handler)
            seen[clip_range] = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
            worker.close()
        return seen

    def _refusal(self, worker: TrainingWorker, items: list[TrainItem]) -> dict[str, Any]:
        before = adapter_of(worker)
        error = error_of(lambda: worker.update([items], rollout_id=0))
        seen = {"error": error, "moved": moved(before, adapter_of(worker))}
        worker.close()
        return seen


def finished(item: TrainItem) -> TrainItem:
    """The same video without kept steps, as a rollout without noise returns it."""
    final = ti2v_rollout()["trajectory.latents"][-1].numpy()
    return replace(
        ti2v_item((), advantage=item.advantage),
        trajectory=replace(ti2v_item((), advantage=0.0).trajectory, final_latent=final),
    )


def error_of(call: Callable[[], Any]) -> str | None:
    """``Class: message`` of the project's error that ``call`` raises, or None."""
    try:
        call()
    except MilesWanError as error:
        return f"{type(error).__name__}: {error}"
    return None


def adapter_of(worker: TrainingWorker, weights: str = "policy") -> dict[str, Tensor]:
    """The adapter of the only expert."""
    return worker.adapters(weights)["transformer"]


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def state_of(worker: TrainingWorker) -> dict[str, Any]:
    """This rank's whole training state: weights, Adam's moments and step counts, schedule, random state."""
    named = list(trainable_parameters(worker.model["transformer"]))
    return {
        "weights": {name: p.detach().to_local().clone() for name, p in named},
        "moments": {
            (name, key): (value.to_local() if hasattr(value, "to_local") else value).clone()
            for name, p in named
            for key, value in worker.optimizer.state[p].items()
        },
        "average": {}
        if worker.average is None
        else dict(enumerate(t.to_local().clone() for t in worker.average.tensors)),
        "scheduler": {k: v for k, v in worker.scheduler.state_dict().items() if k != "lr_lambdas"},
        "lr": [group["lr"] for group in worker.optimizer.param_groups],
        "random": torch.get_rng_state(),
    }


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    scenarios = Scenarios(rank, world_size, folder)
    names = sys.argv[4:] or [
        "sharding",
        "unsharded",
        "parity",
        "gradients",
        "nft",
        "kl_to_the_average",
        "average",
        "old_policies",
        "agreement",
        "resume",
        "export",
        "refusals",
        "warnings",
    ]
    torch.save({name: getattr(scenarios, name)() for name in names}, folder / f"results_{rank}.pt")


if __name__ == "__main__":
    main()
