"""One rank of the test of a sharded rollout, started as ``python local_ranks.py RANK WORLD_SIZE FOLDER``: reads
FOLDER/job.pt, rolls out its own sample with its share of the transformer, writes FOLDER/results_RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_wan.rollout.local import LocalEngine
from miles_wan.training.sharding import init_process_group, shard_transformer
from miles_wan.wan.family import ModelFolder, load_family
from miles_wan.wan.lora import inject_lora, trainable_parameters
from miles_wan.wan.model import WanModel, load_model


def adapted_model(folder: ModelFolder) -> WanModel:
    """The tiny model with adapters that are not zero."""
    model = load_model(folder, dtype="fp32")
    for seed, (_, transformer) in enumerate(model.items(), start=1):
        inject_lora(transformer, rank=4, alpha=8, targets=("to_q", "to_v", "ffn.net.2"), seed=seed)
        with torch.no_grad():
            for name, parameter in trainable_parameters(transformer):
                if "lora_B" in name:
                    draw = torch.Generator().manual_seed(seed + 1)
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


def gradient_norm(model: WanModel) -> Any:
    """Of a loss of the first transformer whose value is the same on every rank."""
    transformer = model[model.names[0]]
    channels = transformer.config.in_channels
    generator = torch.Generator().manual_seed(4)
    output = transformer(
        hidden_states=torch.randn(1, channels, 2, 2, 2, generator=generator),
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=torch.randn(1, 512, 32, generator=generator),
        return_dict=False,
    )[0]
    output.square().mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for _, p in trainable_parameters(transformer)])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    job = torch.load(folder / "job.pt", weights_only=False)
    device = torch.device("cpu")
    init_process_group(device=device, rank=rank, world_size=world_size, init_method=f"file://{folder / 'meeting'}")
    folder_of_model = load_family(job["model"])
    model = adapted_model(folder_of_model)
    for _, transformer in model.items():
        shard_transformer(transformer, device=device, activation_checkpointing=True)
    engine = LocalEngine(folder_of_model, model, device=device)
    outputs = engine.generate(job["requests"][rank], [0, 1], return_conditioning=True)
    torch.save({"outputs": outputs, "gradient_norm": gradient_norm(model)}, folder / f"results_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
