"""One rank of the test of a sharded rollout, started as ``python local_ranks.py RANK WORLD_SIZE FOLDER``: reads
FOLDER/job.pt, rolls out its own sample with its share of the transformer, writes FOLDER/results_RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel

from miles_wan.rollout.local import LocalEngine
from miles_wan.training.sharding import init_process_group, shard_transformer
from miles_wan.wan.load import load_transformer
from miles_wan.wan.lora import inject_lora, trainable_parameters


def adapted_transformer(model: Path) -> WanTransformer3DModel:
    """The tiny transformer with adapters that are not zero."""
    transformer = load_transformer(model, dtype="fp32")
    inject_lora(transformer, rank=4, alpha=8, targets=("to_q", "to_v", "ffn.net.2"), seed=1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(transformer):
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    return transformer


def gradient_norm(transformer: WanTransformer3DModel) -> Any:
    """Of a loss whose value is the same on every rank."""
    generator = torch.Generator().manual_seed(4)
    output = transformer(
        hidden_states=torch.randn(1, 48, 2, 2, 2, generator=generator),
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
    transformer = adapted_transformer(job["model"])
    shard_transformer(transformer, device=device, activation_checkpointing=True)
    engine = LocalEngine(job["model"], transformer, dtype="fp32", expand_timesteps=True, device=device)
    outputs = engine.generate(job["requests"][rank], [0, 1], return_conditioning=True)
    torch.save({"outputs": outputs, "gradient_norm": gradient_norm(transformer)}, folder / f"results_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
