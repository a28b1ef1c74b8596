"""One rank of the two-expert tests, started as ``python expert_ranks.py RANK FOLDER T2V I2V``: real FSDP2 workers over gloo.
Writes what it saw to FOLDER/results_RANK.pt; nothing is judged here.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from expert_items import GUIDANCE, items
from torch import Tensor

from miles_wan.config import Config
from miles_wan.training.sharding import full_tensor
from miles_wan.training.worker import Rank, TrainingWorker
from miles_wan.wan.family import load_family
from miles_wan.wan.lora import trainable_parameters

LR, DECAY = 1e-3, 0.5
_meetings = itertools.count()


def build(folder: Path, model: str, rank: int, *, train_experts: str = "both") -> TrainingWorker:
    tree: dict[str, Any] = {
        "model": {
            "path": model,
            "dtype": "fp32",
            "init_adapter": str(folder / f"adapter_{train_experts}"),
            "train_experts": train_experts,
        },
        "data": {"train": "train.jsonl"},
        "rollout": {
            "num_inference_steps": 10,
            "guidance_scale": GUIDANCE["transformer"],
            "guidance_scale_2": GUIDANCE["transformer_2"],
        },
        "algorithm": {"max_log_prob_gap": 1e9},
        "training": {
            "dp_size": 2,
            "micro_batch_size": 2,
            "activation_checkpointing": False,
            "optimizer": {"lr": LR, "max_grad_norm": 1e9, "weight_decay": DECAY},
        },
    }
    place = Rank(rank, 2, f"file://{folder}/meeting{next(_meetings)}", "cpu")
    return TrainingWorker(Config.model_validate(tree), place, folder=load_family(model))


def step(worker: TrainingWorker, own: list[Any]) -> dict[str, Any]:
    """One update, with the gradients it had and the weights before and after."""
    caught: dict[str, dict[str, Tensor]] = {}

    def catch(*_: Any) -> None:
        for expert in worker.trained:
            named = trainable_parameters(worker.model[expert])
            caught[expert] = {n: full_tensor(p.grad).clone() for n, p in named if p.grad is not None}

    handle = worker.optimizer.register_step_pre_hook(catch)
    before = worker.adapters()
    metrics = worker.update([own], rollout_id=0)
    handle.remove()
    return {"gradients": caught, "metrics": metrics, "before": before, "after": worker.adapters()}


def main() -> None:
    rank, folder, t2v, i2v = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    for scenario in ("mixed", "one side each", "high alone"):
        worker = build(folder, t2v, rank)
        seen[scenario] = step(worker, items(scenario, rank))
        if scenario == "high alone":  # the other expert has had no step yet
            worker.save_checkpoint(folder / "checkpoint", rollout_id=1)
            worker.export(folder / "exported")
            continued = step(worker, items("mixed", rank))
        worker.close()
    other = build(folder, t2v, rank)
    other.load_checkpoint(folder / "checkpoint")
    seen["continued"], seen["again"] = continued, step(other, items("mixed", rank))
    other.close()
    worker = build(folder, i2v, rank)
    seen["i2v"] = step(worker, items("mixed", rank, channels=20))
    worker.close()
    worker = build(folder, t2v, rank, train_experts="high")
    seen["half"] = {"trained": worker.trained, "loaded": worker.model.names, "report": worker.report}
    seen["half"] |= step(worker, items("high alone", rank))
    worker.close()
    torch.save(seen, folder / f"results_{rank}.pt")


if __name__ == "__main__":
    main()
