"""One rank of the test of a sharded quantized base, started as ``python quantized_ranks.py RANK WORLD_SIZE FOLDER``: reads
FOLDER/model, writes what it saw to FOLDER/results_RANK.pt. Nothing is judged here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from golden_data import single
from quantized_base import adapted, gradients_of, output_of

from miles_wan.training.mesh import estimate, held_bytes
from miles_wan.training.sharding import full_tensor, init_process_group, shard_transformer
from miles_wan.wan.lora import trainable_parameters
from miles_wan.wan.merge import merged_weights, save_merged

SCHEMES = ("int8", "fp8")
LEARNING_RATE = 1e-3


def step(transformer: WanTransformer3DModel) -> dict[str, Any]:
    """Output, gradients and adapters after one optimizer step, whole."""
    with torch.no_grad():
        output = output_of(transformer)
    optimizer = torch.optim.AdamW([parameter for _, parameter in trainable_parameters(transformer)], lr=LEARNING_RATE)
    gradients = gradients_of(transformer)
    optimizer.step()
    after = {name: full_tensor(parameter.detach()) for name, parameter in trainable_parameters(transformer)}
    return {"output": output, "gradients": gradients, "after": after}


def sharded(folder: Path, scheme: str, *, checkpointing: bool, rank: int) -> dict[str, Any]:
    transformer = adapted(folder / "model", quantization=scheme)
    share = estimate(single(transformer), ranks=dist.get_world_size()).weight_bytes
    shard_transformer(transformer, device=torch.device("cpu"), activation_checkpointing=checkpointing)
    transformer.train()
    rows = transformer.blocks[0].ffn.net[0].proj.base_layer.weight.to_local().shape[0]
    seen = {"share": share, "held": held_bytes(transformer), "rows": rows, **step(transformer)}
    seen["merged"] = dict(merged_weights(transformer))
    save_merged(transformer, folder / f"merged-{scheme}-{checkpointing}", write=rank == 0)
    return seen


def main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    init_process_group(
        device=torch.device("cpu"), rank=rank, world_size=world_size, init_method=f"file://{folder / 'meeting'}"
    )
    seen = {
        (scheme, checkpointing): sharded(folder, scheme, checkpointing=checkpointing, rank=rank)
        for scheme in SCHEMES
        for checkpointing in (False, True)
    }
    torch.save(seen, folder / f"results_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
