"""Trajectories become micro-batches of (sample, step) pairs; an image without its latent is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_data import ti2v_item, ti2v_rollout

from miles_wan.training.batch import micro_batches

CPU = torch.device("cpu")


def text_only(steps: tuple[int, ...], *, advantage: float):
    item = ti2v_item(steps, advantage=advantage)
    return replace(
        item,
        trajectory=replace(item.trajectory, has_condition=False),
        conditioning=replace(item.conditioning, condition_latent=None),
    )


def test_every_kept_step_is_one_pair_with_its_own_sigmas():
    items = [ti2v_item((0, 2), advantage=1.5), ti2v_item((1, 3, 4), advantage=-2.0)]
    batches = list(micro_batches(items, size=2, device=CPU))
    assert [len(batch.sigma) for batch in batches] == [2, 2, 1]
    rollout, steps = ti2v_rollout(), [0, 2, 1, 3, 4]
    sigmas = rollout["trajectory.sigmas"]

    def whole(name):
        return torch.cat([getattr(batch, name) for batch in batches])

    assert torch.equal(whole("sigma"), sigmas[steps])
    assert torch.equal(whole("sigma_next"), sigmas[[k + 1 for k in steps]])
    assert torch.equal(whole("sigma_max"), sigmas[[1] * 5])
    assert torch.equal(whole("latents"), rollout["trajectory.latents"][steps])
    assert torch.equal(whole("next_latents"), rollout["trajectory.latents"][[k + 1 for k in steps]])
    assert torch.equal(whole("old_log_prob"), rollout["log_probs.first_frame_masked"][steps])
    assert torch.equal(whole("advantages"), torch.tensor([1.5, 1.5, -2.0, -2.0, -2.0]))
    assert torch.equal(whole("condition_latent"), rollout["trajectory.latents"][[0] * 5][:, :, :1])
    assert whole("prompt_embeds").shape == (5, 512, 32)


def test_an_image_without_its_latent_is_refused_with_the_record():
    item = ti2v_item((0, 1), advantage=1.0)
    broken = replace(item, conditioning=replace(item.conditioning, condition_latent=None), record_id="kite")
    with pytest.raises(ValueError, match="record kite has an image, and its first-frame latent is missing"):
        list(micro_batches([item, broken], size=4, device=CPU))


def test_records_with_and_without_an_image_share_a_batch():
    (batch,) = micro_batches([ti2v_item((0,), advantage=1.0), text_only((1,), advantage=1.0)], size=2, device=CPU)
    assert batch.has_condition.tolist() == [True, False]
    assert torch.equal(batch.condition_latent[1], torch.zeros_like(batch.condition_latent[1]))


def test_text_alone_has_no_condition_latent():
    (batch,) = micro_batches([text_only((0, 1), advantage=1.0)], size=2, device=CPU)
    assert batch.condition_latent is None
    assert not bool(batch.has_condition.any())


def test_without_guidance_there_is_no_negative_prompt():
    item = ti2v_item((0,), advantage=1.0)
    without = replace(item, conditioning=replace(item.conditioning, negative_prompt_embeds=None))
    (batch,) = micro_batches([without], size=1, device=CPU)
    assert batch.negative_prompt_embeds is None


def test_read_only_arrays_are_not_written_to():
    item = ti2v_item((0, 1), advantage=1.0)
    latents = item.trajectory.latents.copy()
    latents.flags.writeable = False
    frozen = replace(item, trajectory=replace(item.trajectory, latents=latents))
    (batch,) = micro_batches([frozen], size=2, device=CPU)
    batch.latents.zero_()
    assert bool(np.abs(latents).sum() > 0)
