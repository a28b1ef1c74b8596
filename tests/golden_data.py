"""Reference numbers of independent public implementations and of the engine itself, as tensors and records."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from miles_wan.records import Conditioning, TrainItem, Trajectory
from miles_wan.wan.experts import Experts
from miles_wan.wan.facts import family_named
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.model import WanModel

GOLDEN = Path(__file__).parent / "golden"
TEXT_LENGTH = 512


def cases(family: str) -> list[Any]:
    """The cases of one JSON file."""
    return json.loads((GOLDEN / f"{family}.json").read_text())["cases"]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


@lru_cache
def ti2v_rollout() -> dict[str, Tensor]:
    """A real rollout of the engine from the tiny transformer: 6 steps, flow_sde with eta 0.7, guidance 3, with an image."""
    return load_file(GOLDEN / "rollout_ti2v.safetensors")


def ti2v_seed() -> int:
    """The seed of the rollout, from the request that made it."""
    with safe_open(GOLDEN / "rollout_ti2v.safetensors", framework="pt") as file:
        return int(json.loads(file.metadata()["request"])["seed"])


def padded_embeds(name: str) -> Tensor:
    """Prompt embeddings [512, D] of the rollout, zero beyond the valid tokens, as the engine hands them to the model."""
    valid = ti2v_rollout()[f"{name}.valid"]
    return torch.cat([valid, valid.new_zeros(TEXT_LENGTH - len(valid), valid.shape[1])])


def ti2v_conditioning() -> Conditioning:
    return Conditioning(
        prompt_embeds=padded_embeds("prompt_embeds").numpy(),
        negative_prompt_embeds=padded_embeds("negative_prompt_embeds").numpy(),
        condition_latent=ti2v_rollout()["trajectory.latents"][0, :, :1].numpy(),
    )


def ti2v_item(steps: tuple[int, ...], *, advantage: float) -> TrainItem:
    """The kept ``steps`` of the rollout as a training item, with the engine's own first-frame-free log-probs."""
    rollout = ti2v_rollout()
    latents = rollout["trajectory.latents"]
    return TrainItem(
        trajectory=Trajectory(
            latents=torch.stack([latents[list(steps)], latents[[k + 1 for k in steps]]], dim=1).numpy(),
            steps=steps,
            sigmas=rollout["trajectory.sigmas"].numpy(),
            timesteps=rollout["trajectory.timesteps"][list(steps)].numpy(),
            log_probs=rollout["log_probs.first_frame_masked"][list(steps)].numpy(),
            has_condition=True,
            policy_version=0,
            seed=ti2v_seed(),
            noise_draws=steps,  # every step of that rollout was stochastic
        ),
        conditioning=ti2v_conditioning(),
        advantage=advantage,
        record_id="golden",
        sample_index=0,
    )


ONE = Experts(("transformer",), None)


def single(transformer: WanTransformer3DModel) -> WanModel:
    """A model of this transformer alone, with first-frame conditioning."""
    return WanModel(
        {"transformer": transformer}, experts=ONE, image_conditioning="first_frame", dtype=transformer.dtype
    )


def described(folder: Path) -> ModelFolder:
    """What ``write_model_folder`` wrote, as the checkpoint it is a part of would describe it."""
    config = json.loads((folder / "transformer" / "config.json").read_text())
    return ModelFolder(folder, family_named("wan2.2-ti2v-5b"), "WanPipeline", True, None, config, {})


def write_model_folder(folder: Path) -> Path:
    """A model folder that holds the transformer of the golden rollout, and no other component."""
    target = folder / "transformer"
    target.mkdir(parents=True)
    shutil.copy(GOLDEN / "tiny_ti2v_transformer_config.json", target / "config.json")
    shutil.copy(GOLDEN / "tiny_ti2v_transformer.safetensors", target / "diffusion_pytorch_model.safetensors")
    return folder
