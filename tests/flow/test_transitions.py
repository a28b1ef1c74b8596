"""Every transition is the published law, its log-prob the true Gaussian density over the sampled elements only."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from miles_wan.flow import shifted_sigmas, transition

SHAPE = (2, 3, 4, 2, 2)  # B, C, F, h, w


def pair(seed: int, *, shape=SHAPE, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for _ in range(3))


def step(kind, x, v, *, sigma=0.8, sigma_next=0.6, sigma_max=0.95, noise_level=0.7, **source):
    return transition(
        kind, x, v, sigma=sigma, sigma_next=sigma_next, sigma_max=sigma_max, noise_level=noise_level, **source
    )


LAWS = ("flow_sde", "dance_sde", "cps", "flow_grpo_wan")


def closed_form_std(kind: str, s: float, n: float, top: float, eta: float) -> float:
    if kind == "flow_grpo_wan":
        return top * s * math.sqrt(s - n)
    if kind == "flow_sde":
        return eta * math.sqrt(s / (1 - (top if s == 1 else s))) * math.sqrt(s - n)
    if kind == "dance_sde":
        return eta * math.sqrt(s - n)
    return n * math.sin(eta * math.pi / 2)


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("sigma", [0.1, 0.5, 0.8, 1.0])
def test_the_law_of_the_noise_has_its_closed_form(kind, sigma):
    x, v, y = pair(0)
    scored = step(kind, x, v, sigma=sigma, sigma_next=sigma / 2, sigma_max=0.9, next_sample=y)
    expected = closed_form_std(kind, sigma, sigma / 2, 0.9, 0.7)
    torch.testing.assert_close(scored.std, torch.full((2,), expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("masked", [False, True])
def test_log_prob_is_the_gaussian_density_of_the_sampled_elements(kind, masked):
    x, v, y = (t.double() for t in pair(1))
    mask = first_frame_given() if masked else None
    # Each row of the batch at its own step, one of them the first of a rollout.
    scored = step(
        kind, x, v, sigma=torch.tensor([1.0, 0.5]), sigma_next=torch.tensor([0.9, 0.3]), next_sample=y, mask=mask
    )
    law = torch.distributions.Normal(scored.mean, scored.std.reshape(-1, 1, 1, 1, 1))
    density = law.log_prob(y)[:, :, 1:] if masked else law.log_prob(y)
    torch.testing.assert_close(scored.log_prob, density.flatten(1).mean(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", LAWS)
def test_the_sample_has_the_mean_and_std_it_is_scored_with(kind):
    x, v, _ = pair(2, shape=(1, 200_000))
    sampled = step(kind, x, v, generator=torch.Generator().manual_seed(0))
    residual = sampled.next_sample - sampled.mean
    assert float(residual.std()) == pytest.approx(float(sampled.std), rel=0.01)
    scored = step(kind, x, v, next_sample=sampled.next_sample)
    torch.testing.assert_close(scored.log_prob, sampled.log_prob)


@pytest.mark.parametrize("parts", [2, 4])
def test_log_prob_over_all_elements_is_that_over_their_shards(parts):
    x, v, y = pair(3)
    whole = step("flow_sde", x, v, next_sample=y).log_prob
    split = [
        step("flow_sde", a, b, next_sample=c).log_prob
        for a, b, c in zip(x.chunk(parts, 2), v.chunk(parts, 2), y.chunk(parts, 2), strict=True)
    ]
    torch.testing.assert_close(torch.stack(split).mean(0), whole, rtol=1e-6, atol=1e-6)


def test_log_prob_of_a_batch_is_that_of_its_rows():
    x, v, y = pair(4)
    sigma, sigma_next = torch.tensor([1.0, 0.5]), torch.tensor([0.9, 0.3])
    both = step("flow_sde", x, v, sigma=sigma, sigma_next=sigma_next, next_sample=y)
    for row in range(2):
        one = step(
            "flow_sde",
            x[row : row + 1],
            v[row : row + 1],
            sigma=float(sigma[row]),
            sigma_next=float(sigma_next[row]),
            next_sample=y[row : row + 1],
        )
        torch.testing.assert_close(both.log_prob[row : row + 1], one.log_prob)
        torch.testing.assert_close(both.mean[row : row + 1], one.mean)


@pytest.mark.parametrize(("shift", "steps"), [(1.0, 4), (3.0, 10), (5.0, 6), (12.0, 40)])
def test_ode_is_eulers_step_bitwise(shift, steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    x, v, _ = pair(5)
    for k, timestep in enumerate(scheduler.timesteps):
        euler = scheduler.step(v, timestep, x, return_dict=False)[0]
        ours = step(
            "ode", x, v, sigma=scheduler.sigmas[k], sigma_next=scheduler.sigmas[k + 1], noise=torch.zeros_like(x)
        )
        assert torch.equal(ours.next_sample, euler)
        assert torch.equal(ours.log_prob, torch.zeros(2))


def test_a_whole_ode_rollout_is_that_of_diffusers_bitwise():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(10)
    theirs, direction, _ = pair(17)
    ours = theirs
    for k, timestep in enumerate(scheduler.timesteps):
        theirs = scheduler.step(theirs * direction, timestep, theirs, return_dict=False)[0]
        n = scheduler.sigmas[k + 1]
        ours = step("ode", ours, ours * direction, sigma=scheduler.sigmas[k], sigma_next=n, next_sample=ours).mean
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize("sigma", [1.0, 0.8])
def test_without_noise_every_law_with_an_eta_is_the_ode(kind, sigma):
    x, v, y = (t.double() for t in pair(6))
    ode = step("ode", x, v, sigma=sigma, next_sample=y)
    taken = step(kind, x, v, sigma=sigma, noise_level=0.0, noise=y)
    torch.testing.assert_close(taken.next_sample, ode.mean, rtol=0, atol=1e-14)
    assert torch.equal(taken.log_prob, torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="noise level 0"):
        step(kind, x, v, sigma=sigma, noise_level=0.0, next_sample=y)
    # mean(sde) - mean(ode) = g^2 d / (2 s) (x + (1 - s) v), and cps differs by (cos(eta pi / 2) - 1) n x1: O(eta^2).
    eta = 1e-6
    torch.testing.assert_close(
        step(kind, x, v, sigma=sigma, noise_level=eta, next_sample=y).mean, ode.mean, rtol=0, atol=100 * eta**2
    )


def test_flow_grpo_wan_has_no_eta():
    x, v, y = pair(7)
    assert torch.equal(
        step("flow_grpo_wan", x, v, noise_level=0.0, next_sample=y).log_prob,
        step("flow_grpo_wan", x, v, noise_level=5.0, next_sample=y).log_prob,
    )


def first_frame_given() -> torch.Tensor:
    mask = torch.ones(2, 1, 4, 2, 2)
    mask[:, :, 0] = 0
    return mask


@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize("odd", [123.0, float("nan"), float("inf")])
def test_a_given_first_frame_moves_neither_log_prob_nor_gradient(kind, odd):
    x, v, y = pair(8)
    mask = first_frame_given()
    v.requires_grad_()
    scored = step(kind, x, v, next_sample=y, mask=mask)
    moved = y.clone()
    moved[:, :, 0] = odd
    again = step(kind, x, v, next_sample=moved, mask=mask)
    assert torch.equal(scored.log_prob, again.log_prob)
    again.log_prob.sum().backward()
    assert torch.equal(v.grad[:, :, 0], torch.zeros_like(v.grad[:, :, 0]))
    assert bool((v.grad[:, :, 1:] != 0).any())


def test_the_masked_mean_is_over_the_sampled_elements_only():
    x, v, y = pair(9)
    masked = step("flow_sde", x, v, next_sample=y, mask=first_frame_given())
    rest = step("flow_sde", x[:, :, 1:], v[:, :, 1:], next_sample=y[:, :, 1:])
    torch.testing.assert_close(masked.log_prob, rest.log_prob, rtol=1e-6, atol=1e-6)


def test_a_mask_without_sampled_elements_is_refused():
    x, v, y = pair(10)
    with pytest.raises(ValueError, match="no sampled element"):
        step("flow_sde", x, v, next_sample=y, mask=torch.zeros(2, 1, 4, 2, 2))


@pytest.mark.parametrize("kind", [*LAWS, "ode"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_float32(kind, low):
    x, v, y = pair(11, dtype=low)
    sigma, sigma_next = torch.tensor(0.8, dtype=low), torch.tensor(0.6, dtype=low)
    scored = step(kind, x, v, sigma=sigma, sigma_next=sigma_next, next_sample=y)
    exact = step(kind, x.float(), v.float(), sigma=sigma.float(), sigma_next=sigma_next.float(), next_sample=y.float())
    for name in ("mean", "std", "next_sample", "log_prob"):
        assert getattr(scored, name).dtype == torch.float32
        assert torch.equal(getattr(scored, name), getattr(exact, name))


@pytest.mark.parametrize("kind", [*LAWS, "ode"])
@pytest.mark.parametrize("double", ["sample", "velocity"])
def test_float64_stays_float64(kind, double):
    x, v, _ = pair(11)
    x, v = (x.double(), v) if double == "sample" else (x, v.double())
    sampled = step(kind, x, v, generator=torch.Generator().manual_seed(0))
    for name in ("mean", "std", "next_sample", "log_prob"):
        assert getattr(sampled, name).dtype == torch.float64


def test_the_squared_error_of_cps_has_neither_variance_nor_constants():
    x, v, y = pair(18)
    mask = first_frame_given()
    scored = step("cps", x, v, next_sample=y, mask=mask, cps_log_prob="squared_error")
    assert torch.equal(scored.mean, step("cps", x, v, next_sample=y).mean)
    torch.testing.assert_close(scored.log_prob, -((y - scored.mean) ** 2)[:, :, 1:].flatten(1).mean(1))


def test_the_option_of_cps_leaves_the_other_laws_alone():
    x, v, y = pair(19)
    for kind in ("flow_sde", "dance_sde", "flow_grpo_wan", "ode"):
        plain = step(kind, x, v, next_sample=y)
        assert torch.equal(step(kind, x, v, next_sample=y, cps_log_prob="squared_error").log_prob, plain.log_prob)
    with pytest.raises(ValueError, match="'mse'; known: density, squared_error"):
        step("cps", x, v, next_sample=y, cps_log_prob="mse")


@pytest.mark.parametrize("source", ["next_sample", "noise"])
@pytest.mark.parametrize("cps_log_prob", ["density", "squared_error"])
def test_cps_at_the_last_step_has_no_density_and_is_refused(source, cps_log_prob):
    x, v, y = pair(12)
    with pytest.raises(ValueError, match=r"to \[0.6.*, 0.0\]: no density; take this step with ode"):
        step("cps", x, v, sigma=0.8, sigma_next=torch.tensor([0.6, 0.0]), cps_log_prob=cps_log_prob, **{source: y})


def test_the_last_step_of_flow_sde_still_has_a_density():
    sigmas = shifted_sigmas(6, 5.0)
    x, v, y = pair(13)
    scored = step("flow_sde", x, v, sigma=sigmas[-2], sigma_next=0.0, sigma_max=sigmas[1], next_sample=y)
    assert bool(torch.isfinite(scored.log_prob).all())


@pytest.mark.parametrize("names", [(), ("next_sample", "noise"), ("noise", "generator")])
def test_exactly_one_source_of_the_next_sample(names):
    x, v, y = pair(14)
    sources = {"next_sample": y, "noise": y, "generator": torch.Generator()}
    with pytest.raises(ValueError, match="exactly one"):
        step("flow_sde", x, v, **{name: sources[name] for name in names})


def test_an_unknown_law_is_refused_by_name():
    x, v, y = pair(15)
    with pytest.raises(ValueError, match="'sde'; known: flow_sde, dance_sde, cps, ode, flow_grpo_wan"):
        step("sde", x, v, next_sample=y)
