"""Every transition is the published law, its log-prob the true Gaussian density over the sampled elements only."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from golden_data import cases, tensor

from miles_wan.flow import shifted_sigmas, transition

SHAPE = (2, 3, 4, 2, 2)  # B, C, F, h, w


def pair(seed: int, *, shape=SHAPE, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for _ in range(3))


def step(kind, x, v, *, sigma=0.8, sigma_next=0.6, sigma_max=0.95, noise_level=0.7, **source):
    return transition(
        kind, x, v, sigma=sigma, sigma_next=sigma_next, sigma_max=sigma_max, noise_level=noise_level, **source
    )


def golden_step(kind, inputs, velocity, **source):
    sigmas, k = tensor(inputs["sigmas"]), inputs["step_index"]
    return transition(
        kind,
        tensor(inputs["sample"]),
        velocity,
        sigma=sigmas[k],
        sigma_next=sigmas[k + 1],
        sigma_max=sigmas[1],
        noise_level=inputs["noise_level"],
        **source,
    )


def assert_close(actual, expected, *, rtol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("case", cases("step_flow_sde"), ids=lambda case: case["id"])
def test_flow_sde_is_that_of_flow_grpo(case):
    inputs, expected = case["inputs"], case["expected"]
    velocity = tensor(inputs["model_output"]).requires_grad_()
    scored = golden_step("flow_sde", inputs, velocity, next_sample=tensor(inputs["prev_sample"]))
    sigmas, k = inputs["sigmas"], inputs["step_index"]
    assert_close(scored.mean, tensor(expected["prev_sample_mean"]))
    # Flow-GRPO returns g; the noise it adds is g sqrt(-d).
    assert_close(scored.std, tensor(expected["std_dev_t"]) * math.sqrt(sigmas[k] - sigmas[k + 1]))
    assert_close(scored.log_prob, tensor(expected["log_prob"]))
    scored.log_prob.sum().backward()
    assert_close(velocity.grad, tensor(expected["grad_sum_log_prob_wrt_model_output"]))


@pytest.mark.parametrize(
    "case", [c for c in cases("step_dance_sde") if c["inputs"]["sde_solver"]], ids=lambda case: case["id"]
)
def test_dance_sde_is_that_of_dance_grpo(case):
    inputs, expected = case["inputs"], case["expected"]
    velocity = tensor(inputs["model_output"]).requires_grad_()
    scored = golden_step("dance_sde", inputs, velocity, next_sample=tensor(inputs["prev_sample"]))
    assert_close(scored.mean, tensor(expected["prev_sample_mean"]))
    assert_close(scored.std, torch.full((len(scored.std),), expected["std_dev_t"]))
    assert_close(scored.log_prob, tensor(expected["log_prob"]))
    scored.log_prob.sum().backward()
    assert_close(velocity.grad, tensor(expected["grad_sum_log_prob_wrt_model_output"]))


@pytest.mark.parametrize("case", cases("step_flow_cps"), ids=lambda case: case["id"])
def test_cps_is_that_of_flow_cps_with_a_true_density(case):
    inputs, expected = case["inputs"], case["expected"]
    y = tensor(inputs["prev_sample"])
    scored = golden_step("cps", inputs, tensor(inputs["model_output"]), next_sample=y)
    assert_close(scored.mean, tensor(expected["prev_sample_mean"]))
    assert_close(scored.std, tensor(expected["std_dev_t"]))
    # Its log-prob is -(y - mean)^2 without variance and constants; ours is the density, so ours follows from it.
    std = tensor(expected["std_dev_t"])
    density = tensor(expected["log_prob"]) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    assert_close(scored.log_prob, density, rtol=1e-4)


SGLANG_KINDS = {"sde": "flow_sde", "cps": "cps", "ode": "ode"}


@pytest.mark.parametrize("case", cases("step_sglang"), ids=lambda case: case["id"])
def test_sampling_is_that_of_the_engine(case):
    inputs, expected = case["inputs"], case["expected"]
    stochastic = inputs["sde_step_indices"] is None or inputs["step_index"] in inputs["sde_step_indices"]
    kind = SGLANG_KINDS[inputs["sde_type"]] if stochastic else "ode"
    std = tensor(expected["noise_std_dev"])
    velocity, noise = tensor(inputs["model_output"]), tensor(inputs["variance_noise"])
    if kind != "ode" and bool((std == 0).any()):
        with pytest.raises(ValueError, match="no density"):
            golden_step(kind, inputs, velocity, noise=noise)
        return
    sampled = golden_step(kind, inputs, velocity, noise=noise)
    assert_close(sampled.mean, tensor(expected["prev_sample_mean"]))
    assert_close(sampled.next_sample, tensor(expected["prev_sample"]))
    assert_close(sampled.std, std.expand_as(sampled.std))
    if not inputs["log_prob_no_const"]:
        torch.testing.assert_close(sampled.log_prob, tensor(expected["log_prob"]), rtol=1e-5, atol=2e-6)


def closed_form_std(kind: str, s: float, n: float, top: float, eta: float) -> float:
    if kind == "flow_sde":
        return eta * math.sqrt(s / (1 - (top if s == 1 else s))) * math.sqrt(s - n)
    if kind == "dance_sde":
        return eta * math.sqrt(s - n)
    return n * math.sin(eta * math.pi / 2)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize("sigma", [0.1, 0.5, 0.8, 1.0])
def test_the_law_of_the_noise_has_its_closed_form(kind, sigma):
    x, v, y = pair(0)
    scored = step(kind, x, v, sigma=sigma, sigma_next=sigma / 2, sigma_max=0.9, next_sample=y)
    expected = closed_form_std(kind, sigma, sigma / 2, 0.9, 0.7)
    torch.testing.assert_close(scored.std, torch.full((2,), expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
def test_log_prob_is_the_gaussian_density(kind):
    x, v, y = pair(1)
    scored = step(kind, x, v, next_sample=y)
    std = scored.std.reshape(-1, 1, 1, 1, 1)
    density = torch.distributions.Normal(scored.mean, std).log_prob(y).flatten(1).mean(1)
    torch.testing.assert_close(scored.log_prob, density, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
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


def test_ode_is_eulers_step_bitwise():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(6)
    x, v, _ = pair(5)
    for k, timestep in enumerate(scheduler.timesteps):
        euler = scheduler.step(v, timestep, x, return_dict=False)[0]
        ours = step(
            "ode", x, v, sigma=scheduler.sigmas[k], sigma_next=scheduler.sigmas[k + 1], noise=torch.zeros_like(x)
        )
        assert torch.equal(ours.next_sample, euler)
        assert torch.equal(ours.log_prob, torch.zeros(2))


def test_flow_sde_without_noise_is_the_ode():
    x, v, y = pair(6, dtype=torch.float64)
    ode = step("ode", x.double(), v.double(), next_sample=y.double())
    eta = 1e-6
    sde = step("flow_sde", x.double(), v.double(), noise_level=eta, next_sample=y.double())
    # mean(sde) - mean(ode) = g^2 d / (2 s) (x + (1 - s) v) = O(eta^2)
    torch.testing.assert_close(sde.mean, ode.mean, rtol=0, atol=10 * eta**2)


def test_cps_without_noise_is_the_ode():
    x, v, y = (t.double() for t in pair(7))
    torch.testing.assert_close(
        step("cps", x, v, noise_level=1e-9, next_sample=y).mean, step("ode", x, v, next_sample=y).mean
    )


def first_frame_given() -> torch.Tensor:
    mask = torch.ones(2, 1, 4, 2, 2)
    mask[:, :, 0] = 0
    return mask


@pytest.mark.parametrize("kind", ["flow_sde", "cps"])
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


def test_low_precision_inputs_are_computed_in_float32():
    x, v, y = pair(11, dtype=torch.bfloat16)
    low = step("flow_sde", x, v, next_sample=y)
    exact = step("flow_sde", x.float(), v.float(), next_sample=y.float())
    assert low.log_prob.dtype == low.mean.dtype == low.std.dtype == torch.float32
    assert torch.equal(low.log_prob, exact.log_prob)
    assert step("flow_sde", x.double(), v, next_sample=y).log_prob.dtype == torch.float64


def test_cps_at_the_last_step_has_no_density_and_is_refused():
    x, v, y = pair(12)
    with pytest.raises(ValueError, match="no density"):
        step("cps", x, v, sigma=0.02, sigma_next=0.0, next_sample=y)


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
    with pytest.raises(ValueError, match="'sde'; known: flow_sde, dance_sde, cps, ode"):
        step("sde", x, v, next_sample=y)
