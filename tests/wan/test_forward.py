"""The trainer's forward is the engine's: model outputs and log-probs of a real rollout are reproduced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_data import padded_embeds, ti2v_rollout, write_model_folder
from torch import Tensor, nn

from miles_wan.flow import transition
from miles_wan.wan.conditioning import ModelInput, build_model_input
from miles_wan.wan.forward import guided_velocity
from miles_wan.wan.load import load_transformer

STEPS = range(6)


@pytest.fixture(scope="module")
def transformer(tmp_path_factory) -> nn.Module:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("forward") / "model")
    return load_transformer(folder, dtype="fp32").requires_grad_(False)


def model_input(step: int, *, condition_latent: Tensor | None = None) -> ModelInput:
    rollout = ti2v_rollout()
    latents = rollout["trajectory.latents"]
    given = latents[0][:, :1] if condition_latent is None else condition_latent
    return build_model_input(
        latents[step][None],
        rollout["trajectory.sigmas"][step][None] * 1000,
        condition_latent=given[None],
        has_condition=torch.tensor([True]),
        image_conditioning="first_frame",
    )


def velocity_of(transformer, inputs: ModelInput, *, guidance: float = 3.0) -> Tensor:
    return guided_velocity(
        transformer,
        inputs,
        prompt_embeds=padded_embeds("prompt_embeds")[None],
        negative_prompt_embeds=padded_embeds("negative_prompt_embeds")[None],
        guidance_scale=guidance,
        dtype=torch.float32,
    )


def log_prob_gap(transformer, step: int, **changes) -> float:
    rollout, inputs = ti2v_rollout(), model_input(step, **changes)
    sigmas = rollout["trajectory.sigmas"]
    scored = transition(
        "flow_sde",
        inputs.hidden_states,
        velocity_of(transformer, inputs),
        sigma=sigmas[step],
        sigma_next=sigmas[step + 1],
        sigma_max=sigmas[1],
        noise_level=0.7,
        next_sample=rollout["trajectory.latents"][step + 1][None],
        mask=inputs.mask,
    )
    return abs(float(scored.log_prob) - float(rollout["log_probs.first_frame_masked"][step]))


@pytest.mark.parametrize("step", STEPS)
def test_model_outputs_with_guidance_are_the_engines(transformer, step):
    output = velocity_of(transformer, model_input(step))[0]
    torch.testing.assert_close(output, ti2v_rollout()["debug.rollout_model_outputs"][step], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", STEPS)
def test_log_probs_without_the_first_frame_are_the_engines(transformer, step):
    # The last step's std is 0.017: float noise of the model is divided by it.
    assert log_prob_gap(transformer, step) <= (1e-6 if step < 5 else 1e-5)


def test_another_samples_image_shows_as_a_gap(transformer):
    other = -ti2v_rollout()["trajectory.latents"][0][:, :1]
    assert max(log_prob_gap(transformer, step, condition_latent=other) for step in STEPS) > 1e-4


def test_the_log_prob_over_all_frames_is_not_the_engines(transformer):
    rollout = ti2v_rollout()
    difference = rollout["log_probs.server_unmasked"] - rollout["log_probs.first_frame_masked"]
    assert float(difference.abs().max()) > 1e-4


def test_guidance_is_the_line_from_negative_to_positive(transformer):
    inputs = model_input(1)
    positive = velocity_of(transformer, inputs, guidance=1.0)
    three, two = (velocity_of(transformer, inputs, guidance=w) for w in (3.0, 2.0))
    torch.testing.assert_close(three - positive, 2 * (two - positive), rtol=1e-4, atol=1e-5)
    assert float((three - positive).abs().max()) > 1e-3


def test_guidance_off_is_one_forward_without_a_negative_prompt(transformer):
    inputs, calls = model_input(1), []
    handle = transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        for scale, forwards in ((1.0, 1), (0.0, 1), (3.0, 2)):
            calls.clear()
            velocity_of(transformer, inputs, guidance=scale)
            assert len(calls) == forwards
    finally:
        handle.remove()


def test_guidance_without_a_negative_prompt_is_an_error(transformer):
    with pytest.raises(ValueError, match=r"guidance_scale 3\.0 needs negative prompt embeddings"):
        guided_velocity(
            transformer,
            model_input(1),
            prompt_embeds=padded_embeds("prompt_embeds")[None],
            negative_prompt_embeds=None,
            guidance_scale=3.0,
            dtype=torch.float32,
        )


def test_a_bf16_load_keeps_the_precision_critical_parts_in_float32(tmp_path):
    model = load_transformer(write_model_folder(tmp_path / "model"), dtype="bf16")
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert model.rope.freqs_cos.dtype in (torch.float32, torch.float64)
    assert model.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32
    assert model.scale_shift_table.dtype == torch.float32
