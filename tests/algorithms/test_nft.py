"""DiffusionNFT pulls towards good samples and pushes from bad ones, on sampled elements only."""

from __future__ import annotations

import pytest
import torch

from miles_wan.algorithms import nft_loss

SHAPE = (3, 2, 4, 2, 2)  # B, C, F, h, w
ADV_CLIP = 5.0


def batch(*, shape=SHAPE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    clean, noise, old = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    sigma = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    wide = sigma.reshape(-1, 1, 1, 1, 1)
    return {"clean": clean, "noisy": (1 - wide) * clean + wide * noise, "sigma": sigma}, old


@pytest.mark.parametrize("beta", [0.1, 1.0, 2.0])
def test_at_the_old_policy_every_sample_is_regressed_with_its_advantage_as_weight(beta):
    """dL/dv = mean A' dl/dv, A' = clamp(A): signed flow matching. A fault in r, v+ or v- shows here."""
    state, old = batch()
    advantages = torch.tensor([2.0, -1.0, 9.0], dtype=torch.float64)
    velocity = old.clone().requires_grad_()
    nft_loss(velocity, old, **state, advantages=advantages, adv_clip=ADV_CLIP, beta=beta).loss.backward()
    again = old.clone().requires_grad_()
    error = state["noisy"] - state["sigma"].reshape(-1, 1, 1, 1, 1) * again - state["clean"]
    size = error.detach().abs().flatten(1).mean(1)
    regression = (error**2).flatten(1).mean(1) / size
    (expected,) = torch.autograd.grad((torch.tensor([2.0, -1.0, 5.0]) * regression).mean(), again)
    torch.testing.assert_close(velocity.grad, expected, rtol=1e-10, atol=1e-14)


def test_the_probability_of_a_sample_to_be_good_is_half_at_the_mean_and_saturates():
    state, old = batch()
    advantages = torch.tensor([0.0, -7.0, 2.5], dtype=torch.float64)
    nft = nft_loss(old, old, **state, advantages=advantages, adv_clip=ADV_CLIP, beta=1.0)
    torch.testing.assert_close(nft.reward_probability, torch.tensor([0.5, 0.0, 0.75], dtype=torch.float64))


def test_the_exact_velocity_has_no_loss_and_no_division_by_zero():
    state, _ = batch()
    exact = ((state["noisy"] - state["clean"]) / state["sigma"].reshape(-1, 1, 1, 1, 1)).requires_grad_()
    nft = nft_loss(exact, exact.detach(), **state, advantages=torch.ones(3), adv_clip=ADV_CLIP, beta=1.0)
    nft.loss.backward()
    assert float(nft.loss.detach()) == pytest.approx(0.0, abs=1e-20)
    assert bool(torch.isfinite(exact.grad).all())


def test_the_reference_pulls_back_by_its_weight():
    state, old = batch()
    reference = old + 0.5
    velocity = old.clone().requires_grad_()
    knobs = {**state, "advantages": torch.zeros(3), "adv_clip": ADV_CLIP, "beta": 1.0}
    with_pull = nft_loss(velocity, old, **knobs, reference_velocity=reference, reference_weight=0.1)
    without = nft_loss(velocity, old, **knobs)
    assert float((with_pull.loss - without.loss).detach()) == pytest.approx(0.1 * 0.25)
    assert float(with_pull.reference_loss) == pytest.approx(0.25)
    (pull,) = torch.autograd.grad(with_pull.loss - without.loss, velocity)
    torch.testing.assert_close(pull, 0.1 * 2 * (velocity.detach() - reference) / velocity.numel())


def test_a_given_first_frame_is_in_no_mean_even_if_it_is_not_a_number():
    state, old = batch()
    generator = torch.Generator().manual_seed(9)
    velocity = old + 0.1 * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    knobs = {"advantages": advantages, "adv_clip": ADV_CLIP, "beta": 0.5, "reference_weight": 0.1}

    def later(values):
        return values[:, :, 1:]

    expected = nft_loss(
        later(velocity),
        later(old),
        clean=later(state["clean"]),
        noisy=later(state["noisy"]),
        sigma=state["sigma"],
        reference_velocity=later(old),
        **knobs,
    )
    mask = torch.ones(3, 1, 4, 2, 2)
    mask[:, :, 0] = 0
    velocity[:, :, 0] = torch.nan
    velocity.requires_grad_()
    nft = nft_loss(velocity, old, **state, reference_velocity=old, mask=mask, **knobs)
    for name in ("loss", "policy_loss", "reference_loss", "positive_loss", "negative_loss"):
        torch.testing.assert_close(getattr(nft, name).detach(), getattr(expected, name).detach())
    nft.loss.backward()
    assert torch.equal(velocity.grad[:, :, 0], torch.zeros_like(velocity.grad[:, :, 0]))


def test_no_gradient_goes_into_the_old_policy():
    state, old = batch()
    old.requires_grad_()
    velocity = old.detach().clone().requires_grad_()
    nft_loss(velocity, old, **state, advantages=torch.ones(3), adv_clip=ADV_CLIP, beta=1.0).loss.backward()
    assert old.grad is None


def test_half_precision_is_computed_in_float32():
    state, old = batch()
    half = {name: value.bfloat16() for name, value in state.items()}
    velocities = (old.bfloat16() + 1, old.bfloat16())
    knobs = {"advantages": torch.ones(3), "adv_clip": ADV_CLIP, "beta": 0.3}
    nft = nft_loss(*velocities, **half, **knobs)
    single = {name: value.float() for name, value in half.items()}
    again = nft_loss(velocities[0].float(), velocities[1].float(), **single, **knobs)
    assert nft.loss.dtype == torch.float32
    assert torch.equal(nft.loss, again.loss)


def test_knobs_without_a_meaning_are_refused():
    state, old = batch()
    with pytest.raises(ValueError, match="beta must be above 0, got 0"):
        nft_loss(old, old, **state, advantages=torch.ones(3), adv_clip=ADV_CLIP, beta=0.0)
    with pytest.raises(ValueError, match=r"reference_weight 0.1 needs reference_velocity"):
        nft_loss(old, old, **state, advantages=torch.ones(3), adv_clip=ADV_CLIP, beta=1.0, reference_weight=0.1)
