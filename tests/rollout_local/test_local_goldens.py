"""The denoising loop against rollouts that the server engine really made: from the seed alone, the same trajectory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_data import GOLDEN, TEXT_LENGTH, write_model_folder
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from miles_wan.records import Conditioning, SamplingSettings
from miles_wan.rollout.local.sampler import Step, denoise
from miles_wan.wan.experts import Experts
from miles_wan.wan.load import load_transformer
from miles_wan.wan.model import WanModel

NAMES = ("rollout_ti2v", "rollout_ti2v_window", "rollout_ti2v_cps", "rollout_ti2v_lora")
_KINDS = {"sde": "flow_sde", "cps": "cps"}


def golden(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and request of one rollout."""
    with safe_open(GOLDEN / f"{name}.safetensors", framework="pt") as file:
        return load_file(GOLDEN / f"{name}.safetensors"), json.loads(file.metadata()["request"])


def padded(valid: Tensor) -> Any:
    return torch.cat([valid, valid.new_zeros(TEXT_LENGTH - len(valid), valid.shape[1])]).numpy()


def steps_of(name: str, folder: Path) -> list[Step]:
    """The steps of our loop with the golden embeddings and first frame."""
    tensors, request = golden(name)
    transformer = load_transformer(write_model_folder(folder / "model"), dtype="fp32")
    model = WanModel(
        {"transformer": transformer},
        experts=Experts(("transformer",), None),
        image_conditioning="first_frame",
        dtype=torch.float32,
    )
    for key, value in tensors.items():
        if key.endswith(".lora_B"):  # merged with alpha 8, rank 4
            layer = transformer.get_submodule(key.removeprefix("lora.").removesuffix(".lora_B"))
            layer.weight.data += 2 * value @ tensors[key.removesuffix("B") + "A"]
    guided = request["guidance_scale"] > 1
    latents = tensors["trajectory.latents"]
    steps = request["num_inference_steps"]
    return list(
        denoise(
            model,
            Conditioning(
                prompt_embeds=padded(tensors["prompt_embeds.valid"]),
                negative_prompt_embeds=padded(tensors["negative_prompt_embeds.valid"]) if guided else None,
                condition_latent=latents[0, :, :1].numpy(),
            ),
            SamplingSettings(
                width=request["width"],
                height=request["height"],
                num_frames=request["num_frames"],
                fps=request["fps"],
                num_inference_steps=steps,
                guidance_scale=request["guidance_scale"],
                flow_shift=5.0,
                kind=_KINDS[request["rollout_sde_type"]],
                noise_level=request["rollout_noise_level"],
            ),
            seeds=[request["seed"]],
            stochastic_steps=request.get("rollout_sde_step_indices", range(steps)),
            latent_shape=tuple(latents.shape[1:]),
            device=torch.device("cpu"),
        )
    )


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm()) if bool(b.any()) else float(a.norm())


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_gives_the_engines_trajectory(name: str, tmp_path: Path) -> None:
    tensors, _ = golden(name)
    latents = tensors["trajectory.latents"]
    steps = steps_of(name, tmp_path)
    assert len(steps) == len(latents) - 1
    torch.testing.assert_close(steps[0].state[0], latents[0], rtol=0, atol=0)
    for k, step in enumerate(steps):
        assert relative(step.next_state[0], latents[k + 1]) <= 1e-5
        assert relative(step.velocity[0], tensors["debug.rollout_model_outputs"][k]) <= 1e-5
        assert relative(step.mean[0], tensors["debug.rollout_prev_sample_means"][k]) <= 1e-5
        torch.testing.assert_close(step.noise[0], tensors["debug.rollout_variance_noises"][k], rtol=0, atol=0)
        torch.testing.assert_close(step.std, tensors["debug.rollout_noise_std_devs"][k], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_are_the_engines_over_the_sampled_frames(name: str, tmp_path: Path) -> None:
    tensors, _ = golden(name)
    log_probs = torch.cat([step.log_prob for step in steps_of(name, tmp_path)])
    np.testing.assert_allclose(log_probs, tensors["log_probs.first_frame_masked"], rtol=0, atol=1e-5)
