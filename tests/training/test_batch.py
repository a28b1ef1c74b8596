"""Trajectories become micro-batches of (sample, step) pairs; an image without its latent is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_data import ONE, ti2v_item, ti2v_rollout

from miles_wan.timesteps import timestep_of
from miles_wan.training.batch import (
    ForwardBatch,
    PairBatch,
    by_expert,
    micro_batches,
    noise_pairs,
    stack_noised,
    stack_steps,
    step_pairs,
)
from miles_wan.wan.experts import Experts

CPU = torch.device("cpu")


def step_batches(items, *, size: int) -> list[PairBatch]:
    pairs = by_expert(step_pairs(items), ONE)
    counts = {"transformer": -(-len(pairs["transformer"]) // size)}
    return list(micro_batches(pairs, stack_steps, counts=counts, size=size, device=CPU))


def noise_batches(items, *, levels: int, size: int, seed: int) -> list[ForwardBatch]:
    pairs = by_expert(noise_pairs(items, levels=levels, seed=seed), ONE)
    counts = {"transformer": -(-len(pairs["transformer"]) // size)}
    return list(micro_batches(pairs, stack_noised, counts=counts, size=size, device=CPU))


def text_only(steps: tuple[int, ...], *, advantage: float):
    item = ti2v_item(steps, advantage=advantage)
    return replace(
        item,
        trajectory=replace(item.trajectory, has_condition=False),
        conditioning=replace(item.conditioning, condition_latent=None),
    )


def test_every_kept_step_is_one_pair_with_its_own_sigmas():
    items = [ti2v_item((0, 2), advantage=1.5), ti2v_item((1, 3, 4), advantage=-2.0)]
    batches = step_batches(items, size=2)
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
    assert torch.equal(whole("engine_log_prob"), rollout["log_probs.first_frame_masked"][steps])
    assert torch.equal(whole("advantages"), torch.tensor([1.5, 1.5, -2.0, -2.0, -2.0]))
    assert torch.equal(whole("weight"), torch.ones(5))
    assert [step for batch in batches for step in batch.steps] == steps
    conditions = [batch.condition for batch in batches]
    given = torch.cat([condition.latent for condition in conditions])
    assert torch.equal(given, rollout["trajectory.latents"][[0] * 5][:, :, :1])
    assert torch.cat([condition.prompt_embeds for condition in conditions]).shape == (5, 512, 32)


def test_the_noise_of_every_kept_step_follows_from_the_seed():
    # The engine's own record of a rollout in which every step was stochastic.
    batches = step_batches([ti2v_item((0, 1, 2, 3, 4), advantage=1.0)], size=2)
    noise = torch.cat([batch.noise for batch in batches])
    assert torch.equal(noise, ti2v_rollout()["debug.rollout_variance_noises"][:5])


def test_an_image_without_its_latent_is_refused_with_the_record():
    item = ti2v_item((0, 1), advantage=1.0)
    broken = replace(item, conditioning=replace(item.conditioning, condition_latent=None), record_id="kite")
    with pytest.raises(ValueError, match="record kite has an image, and its first-frame latent is missing"):
        list(step_batches([item, broken], size=4))


def test_records_with_and_without_an_image_share_a_batch():
    (batch,) = step_batches([ti2v_item((0,), advantage=1.0), text_only((1,), advantage=1.0)], size=2)
    assert batch.condition.given.tolist() == [True, False]
    assert torch.equal(batch.condition.latent[1], torch.zeros_like(batch.condition.latent[1]))


def test_text_alone_has_no_condition_latent():
    (batch,) = step_batches([text_only((0, 1), advantage=1.0)], size=2)
    assert batch.condition.latent is None
    assert not bool(batch.condition.given.any())


def test_without_guidance_there_is_no_negative_prompt():
    item = ti2v_item((0,), advantage=1.0)
    without = replace(item, conditioning=replace(item.conditioning, negative_prompt_embeds=None))
    (batch,) = step_batches([without], size=1)
    assert batch.condition.negative_prompt_embeds is None


def test_read_only_arrays_are_not_written_to():
    item = ti2v_item((0, 1), advantage=1.0)
    latents = item.trajectory.latents.copy()
    latents.flags.writeable = False
    frozen = replace(item, trajectory=replace(item.trajectory, latents=latents))
    (batch,) = step_batches([frozen], size=2)
    batch.latents.zero_()
    assert bool(np.abs(latents).sum() > 0)


def finished(*, seed: int):
    """An item without kept steps, but with its last latent."""
    item = ti2v_item((), advantage=0.5)
    final = ti2v_rollout()["trajectory.latents"][-1].numpy()
    return replace(item, trajectory=replace(item.trajectory, final_latent=final, seed=seed))


def test_a_finished_video_is_noised_to_levels_of_its_own_grid():
    items = [finished(seed=1), finished(seed=2)]
    batches = list(noise_batches(items, levels=3, size=4, seed=9))
    assert [batch.size for batch in batches] == [4, 2]
    sigma = torch.cat([batch.sigma for batch in batches])
    grid = ti2v_rollout()["trajectory.sigmas"][:-1]
    assert all(bool((value == grid).any()) for value in sigma)
    assert all(len(set(part.tolist())) == 3 for part in sigma.split(3))
    clean = torch.cat([batch.clean for batch in batches])
    noisy = torch.cat([batch.noisy for batch in batches])
    scale = sigma.reshape(-1, 1, 1, 1, 1)
    noise = (noisy - (1 - scale) * clean) / scale
    assert abs(float(noise.mean())) < 0.05
    assert float(noise.std()) == pytest.approx(1, abs=0.05)
    assert all(float((noise[a] - noise[b]).abs().max()) > 1 for a in range(6) for b in range(a))


def test_noise_levels_depend_on_the_sample_and_the_rollout_alone():
    def noisy(items, *, seed: int, size: int) -> list[torch.Tensor]:
        batches = list(noise_batches(items, levels=2, size=size, seed=seed))
        return list(torch.cat([batch.noisy for batch in batches]))

    first = noisy([finished(seed=1), finished(seed=2)], seed=9, size=4)
    turned = noisy([finished(seed=2), finished(seed=1)], seed=9, size=1)
    assert all(torch.equal(a, b) for a, b in zip(first, [*turned[2:], *turned[:2]], strict=True))
    assert not torch.equal(first[0], noisy([finished(seed=1)], seed=10, size=4)[0])


def test_a_video_without_its_last_latent_is_refused_with_the_record():
    with pytest.raises(ValueError, match="record golden: forward-process training needs the last latent"):
        list(noise_batches([ti2v_item((0,), advantage=1.0)], levels=1, size=1, seed=0))


def with_steps(steps: tuple[int, ...], timesteps: tuple[float, ...], *, advantage: float = 1.0):
    item = ti2v_item(steps, advantage=advantage)
    return replace(item, trajectory=replace(item.trajectory, timesteps=np.array(timesteps, np.float32)))


TWO = Experts(("transformer", "transformer_2"), 0.9)


def test_every_pair_goes_to_the_expert_of_its_own_recorded_timestep():
    items = [with_steps((0, 1), (1000.0, 899.98)), with_steps((2, 3), (900.0, 24.0))]
    routed = by_expert(step_pairs(items), TWO)
    assert [pair.timestep for pair in routed["transformer"]] == [1000.0, 900.0]
    assert [pair.timestep for pair in routed["transformer_2"]] == pytest.approx([899.98, 24.0])


def test_a_rank_with_fewer_micro_batches_fills_up_with_pairs_that_count_for_nothing():
    pairs = by_expert(step_pairs([with_steps((0, 1, 2), (950.0, 930.0, 910.0))]), TWO)
    counts = {"transformer": 3, "transformer_2": 2}
    batches = list(micro_batches(pairs, stack_steps, counts=counts, size=2, device=CPU))
    assert [(batch.expert, batch.size) for batch in batches] == [
        ("transformer", 2),
        ("transformer", 1),
        ("transformer", 0),
        ("transformer_2", 0),
        ("transformer_2", 0),
    ]
    assert [batch.weight.tolist() for batch in batches] == [[1.0, 1.0], [1.0], [0.0], [0.0], [0.0]]


def test_noise_levels_can_be_kept_to_those_of_a_trained_expert():
    grid = ti2v_rollout()["trajectory.sigmas"]
    pairs = noise_pairs([finished(seed=1), finished(seed=2)], levels=2, seed=0, among=[1, 4])
    assert [sorted(pair.sigma for pair in pairs[start : start + 2]) for start in (0, 2)] == [
        pytest.approx(sorted(grid[[1, 4]].tolist()))
    ] * 2


def test_a_noise_level_belongs_to_the_expert_that_the_rollout_called_there():
    """float32 0.9 lies below 0.9: in float64 its timestep is 899.99998, in the engine's float32 it is 900."""
    experts = Experts(("transformer", "transformer_2"), 0.9)
    sigmas = np.array([1, 0.9, 0], dtype=np.float32)
    item = finished(seed=1)
    item = replace(item, trajectory=replace(item.trajectory, sigmas=sigmas))
    pairs = noise_pairs([item], levels=2, seed=0)
    assert sorted(pair.timestep for pair in pairs) == sorted((sigmas[:-1] * np.float32(1000)).tolist()) == [900, 1000]
    assert len(by_expert(pairs, experts)["transformer"]) == 2
    batch = stack_noised("transformer", 2, pairs, CPU)
    assert timestep_of(batch.sigma).tolist() == [pair.timestep for pair in pairs]
