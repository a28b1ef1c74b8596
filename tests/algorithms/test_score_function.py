"""The gradient of the GRPO objective is the policy gradient of the expected reward.

A toy flow: three chained steps, velocity a x + b with three parameters, reward quadratic in the last state. The expected
reward and its gradient are then known in closed form, from the Gaussian moments alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from miles_wan.algorithms import clipped_policy_loss, group_advantages
from miles_wan.flow import transition

SIGMAS = (0.9, 0.7, 0.5, 0.3)
STEPS = len(SIGMAS) - 1
ELEMENTS = 2
ETA = 0.6
KINDS = ("flow_sde", "dance_sde", "cps")
TARGET = torch.tensor([0.6, -0.2], dtype=torch.float64)


@dataclass(frozen=True)
class Step:
    """Mean = of_state x + of_velocity v, and the std: the published laws, written out for numbers."""

    of_state: float
    of_velocity: float
    std: float


def law(kind: str, s: float, n: float) -> Step:
    d = n - s
    if kind == "cps":
        std = n * math.sin(ETA * math.pi / 2)
        noise = math.sqrt(n**2 - std**2)  # mean = (1 - n) (x - s v) + noise (x + (1 - s) v)
        return Step((1 - n) + noise, -(1 - n) * s + noise * (1 - s), std)
    g = ETA * math.sqrt(s / (1 - s)) if kind == "flow_sde" else ETA
    return Step(1 + g**2 * d / (2 * s), (1 + g**2 * (1 - s) / (2 * s)) * d, g * math.sqrt(-d))


def laws(kind: str) -> list[Step]:
    return [law(kind, s, n) for s, n in itertools.pairwise(SIGMAS)]


def parameters() -> Tensor:
    """a, and b of both elements."""
    return torch.tensor([0.3, -0.4, 0.5], dtype=torch.float64, requires_grad=True)


def velocity(theta: Tensor, x: Tensor) -> Tensor:
    return theta[0] * x + theta[1:]


def reward(x: Tensor) -> Tensor:
    return -((x - TARGET) ** 2).sum(-1)


def expected_reward(theta: Tensor, kind: str) -> Tensor:
    """E of ``reward``: mean and variance of a linear chain from a unit normal, carried step by step."""
    mean, variance = torch.zeros(ELEMENTS, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for step in laws(kind):
        slope = step.of_state + step.of_velocity * theta[0]
        mean, variance = slope * mean + step.of_velocity * theta[1:], slope**2 * variance + step.std**2
    return -((mean - TARGET) ** 2).sum() - ELEMENTS * variance


def product_step(kind: str, theta: Tensor, x: Tensor, k: int, **source):
    return transition(
        kind,
        x,
        velocity(theta, x),
        sigma=SIGMAS[k],
        sigma_next=SIGMAS[k + 1],
        sigma_max=SIGMAS[0],
        noise_level=ETA,
        **source,
    )


def sample_paths(kind: str, theta: Tensor, count: int, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    """States [count, elements], one more than steps, and the old log-probs [count] of the steps."""
    states, log_probs = [torch.randn(count, ELEMENTS, generator=generator, dtype=torch.float64)], []
    with torch.no_grad():
        for k in range(STEPS):
            taken = product_step(kind, theta, states[-1], k, generator=generator)
            states.append(taken.next_sample)
            log_probs.append(taken.log_prob)
    return states, log_probs


def grpo_gradient(kind: str, theta: Tensor, states: list[Tensor], old: list[Tensor], groups: Tensor) -> Tensor:
    """Of the objective to be maximised, over all (sample, step) pairs, as the loop forms it."""
    advantages = group_advantages(reward(states[-1]), groups, normalize="none")
    scored = [product_step(kind, theta, states[k], k, next_sample=states[k + 1]).log_prob for k in range(STEPS)]
    policy = clipped_policy_loss(
        torch.cat(scored), torch.cat(old), advantages.repeat(STEPS), clip_low=1e-3, clip_high=1e-3, adv_clip=math.inf
    )
    assert float(policy.clip_fraction) == 0.0
    (gradient,) = torch.autograd.grad(-policy.loss, theta)
    # A log-prob is a mean over elements and the loss a mean over steps: the likelihood of a path is a sum over both.
    return gradient * ELEMENTS * STEPS


def score_function_gradient(kind: str, theta: Tensor, states: list[Tensor], group_size: int) -> Tensor:
    """Brute force: mean (reward - mean of the group) d ln p(path) / d theta, densities by torch.distributions."""
    log_density = torch.zeros(len(states[0]), dtype=torch.float64)
    for k, step in enumerate(laws(kind)):
        mean = step.of_state * states[k] + step.of_velocity * velocity(theta, states[k])
        log_density = log_density + Normal(mean, step.std).log_prob(states[k + 1]).sum(-1)
    rewards = reward(states[-1]).reshape(-1, group_size)
    centred = (rewards - rewards.mean(1, keepdim=True)).flatten()
    (gradient,) = torch.autograd.grad((centred * log_density).mean(), theta)
    return gradient


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_same_samples_it_is_the_score_function_gradient(kind):
    theta, group_size = parameters(), 6
    states, old = sample_paths(kind, theta, 10 * group_size, torch.Generator().manual_seed(0))
    groups = torch.arange(10).repeat_interleave(group_size)
    actual = grpo_gradient(kind, theta, states, old, groups)
    expected = score_function_gradient(kind, theta, states, group_size)
    assert float((actual - expected).norm() / expected.norm()) <= 1e-10


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_in_expectation_it_is_the_gradient_of_the_expected_reward(kind, group_size):
    """Up to 1 - 1 / G: the mean of a group holds the sample itself, and takes that share of its own reward away."""
    theta, blocks, groups_per_block = parameters(), 40, 120
    (true_gradient,) = torch.autograd.grad(expected_reward(theta, kind), theta)
    generator = torch.Generator().manual_seed(1)
    groups = torch.arange(groups_per_block).repeat_interleave(group_size)
    estimates = []
    for _ in range(blocks):
        states, old = sample_paths(kind, theta, len(groups), generator)
        estimates.append(grpo_gradient(kind, theta, states, old, groups))
    found = torch.stack(estimates)
    mean, error = found.mean(0), found.std(0) / blocks**0.5
    away = ((mean - (1 - 1 / group_size) * true_gradient) / error).abs()
    assert float(away.max()) < 3.5  # 40 blocks, 3 parameters
    # The interval is narrow enough to see the factor, and so any fault of its size.
    assert float(((mean - true_gradient) / error).abs().max()) > 7
