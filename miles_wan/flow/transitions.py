"""One denoising step as a probability law: mean, std, sample and log-likelihood, for a batch of (sample, step) pairs.

In: state x, velocity v, the two sigmas. Out: ``Transition``. Everything is computed in float32 or better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ETA_KINDS = ("flow_sde", "dance_sde", "cps")
KINDS = (*ETA_KINDS, "ode", "flow_grpo_wan")
CPS_LOG_PROBS = ("density", "squared_error")


@dataclass(frozen=True)
class Transition:
    """``mean`` [B, ...]; ``std`` [B] of the noise actually added; ``next_sample`` [B, ...]; ``log_prob`` [B], the true
    Gaussian log-density, mean over the sampled elements (0 for ode). float32, or float64 where an input was."""

    mean: Tensor
    std: Tensor
    next_sample: Tensor
    log_prob: Tensor


def transition(
    kind: str,
    sample: Tensor,
    velocity: Tensor,
    *,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    sigma_max: Tensor | float,
    noise_level: float,
    next_sample: Tensor | None = None,
    noise: Tensor | None = None,
    generator: torch.Generator | None = None,
    mask: Tensor | None = None,
    cps_log_prob: str = "density",
) -> Transition:
    """Score or sample the step from ``sigma`` to ``sigma_next``.

    Args:
        kind: ``flow_sde`` (Flow-GRPO), ``dance_sde`` (DanceGRPO), ``cps`` (coefficient-preserving), ``ode`` (Euler),
            ``flow_grpo_wan`` (the law of Flow-GRPO's Wan script, which has no eta). Formulas: docs/transitions.md.
        sample: x [B, ...] at ``sigma``.
        velocity: v [B, ...], after guidance.
        sigma, sigma_next: scalars or [B].
        sigma_max: the grid's second value. ``flow_sde`` puts it for sigma into 1 / (1 - sigma) where sigma is 1;
            ``flow_grpo_wan`` scales its noise by it.
        noise_level: eta; ``ode`` and ``flow_grpo_wan`` do not read it. At 0 a step can be taken (it is then the
            ode's, with log_prob 0) but not scored.
        next_sample, noise, generator: exactly one. ``next_sample`` is scored; ``noise`` (unit normal) or draws from
            ``generator`` make the next sample.
        mask: broadcastable to [B, ...], 1 where an element was sampled, 0 where it was given. Given elements do not
            count in ``log_prob``.
        cps_log_prob: ``density``, or ``squared_error`` for -(y - mean)^2 without variance and constants, as in
            Flow-CPS and the curves published with it. The other kinds do not read it.

    Raises:
        ValueError: unknown kind or option, not exactly one source, or a law without a density (std 0) at this step.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown transition {kind!r}; known: {', '.join(KINDS)}")
    if cps_log_prob not in CPS_LOG_PROBS:
        raise ValueError(f"unknown cps_log_prob {cps_log_prob!r}; known: {', '.join(CPS_LOG_PROBS)}")
    if sum(value is not None for value in (next_sample, noise, generator)) != 1:
        raise ValueError("give exactly one of next_sample (to score it), noise or generator (to sample)")
    dtype = torch.promote_types(torch.promote_types(sample.dtype, velocity.dtype), torch.float32)
    x, v = sample.to(dtype), velocity.to(dtype)
    s, n, top = (_per_sample(value, x) for value in (sigma, sigma_next, sigma_max))
    mean, std = _law(kind, x, v, s=s, n=n, top=top, eta=noise_level)
    flat_std = std.reshape(-1)
    # Without noise the step is Euler's, algebraically: it can be taken, but there is no density to score it with.
    deterministic = kind == "ode" or (kind in ETA_KINDS and noise_level == 0 and next_sample is None)
    if next_sample is None:
        if noise is None:
            noise = torch.randn(x.shape, generator=generator, dtype=dtype, device=x.device)
        next_sample = mean + std * noise.to(dtype)
    y = next_sample.to(dtype)
    if deterministic:
        return Transition(mean, flat_std, y, torch.zeros_like(flat_std))
    if not bool((flat_std > 0).all()):
        raise ValueError(
            f"{kind} with noise level {noise_level} adds no noise from sigma {s.flatten().tolist()} to"
            f" {n.flatten().tolist()}: no density; take this step with ode"
        )
    residual = y - mean
    if mask is not None:
        # Before the square, so that a given element (also a NaN) moves neither the value nor a gradient.
        residual = torch.where(mask.expand_as(residual) > 0, residual, torch.zeros_like(residual))
    if kind == "cps" and cps_log_prob == "squared_error":
        return Transition(mean, flat_std, y, masked_mean(-(residual**2), mask))
    log_density = -(residual**2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return Transition(mean, flat_std, y, masked_mean(log_density, mask))


def step_std(kind: str, *, sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor, noise_level: float) -> Tensor:
    """The std [B] of the noise that a step of ``kind`` adds: it follows from the sigmas [B] alone."""
    if kind not in KINDS:
        raise ValueError(f"unknown transition {kind!r}; known: {', '.join(KINDS)}")
    state = torch.zeros(sigma.shape[0], 1, dtype=sigma.dtype, device=sigma.device)
    s, n, top = (_per_sample(value, state) for value in (sigma, sigma_next, sigma_max))
    return _law(kind, state, state, s=s, n=n, top=top, eta=noise_level)[1].reshape(-1)


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of ``values`` [B, ...] per sample over the elements where ``mask`` is 1."""
    if mask is None:
        return values.flatten(1).mean(1)
    weight = mask.to(values.dtype).expand_as(values)
    count = weight.flatten(1).sum(1)
    if not bool((count > 0).all()):
        raise ValueError(
            "the mask leaves no sampled element: a one-frame video with a given first frame has no likelihood"
        )
    return (values * weight).flatten(1).sum(1) / count


def _per_sample(value: Tensor | float, like: Tensor) -> Tensor:
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1)
    return tensor.expand(like.shape[0]).reshape(-1, *[1] * (like.dim() - 1))


def _law(kind: str, x: Tensor, v: Tensor, *, s: Tensor, n: Tensor, top: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Mean [B, ...] and std [B, 1, ...] of the next state."""
    d = n - s
    if kind == "ode":
        return x + d * v, torch.zeros_like(s)
    if kind == "cps":
        std = n * math.sin(eta * math.pi / 2)
        x0, x1 = x - s * v, x + (1 - s) * v
        return (1 - n) * x0 + torch.sqrt(n**2 - std**2) * x1, std
    if kind == "flow_sde":
        away_from_one = torch.where(torch.isclose(s, torch.ones_like(s)), top, s)
        g = eta * torch.sqrt(s / (1 - away_from_one))
    elif kind == "dance_sde":
        g = torch.full_like(s, eta)
    else:
        g = top * s  # flow_grpo_wan: sigma_last + (sigma_1 - sigma_last) s, on a grid that ends at 0
    # Anderson's reverse SDE with the flow's marginals: drift v + g^2 / (2 s) (x + (1 - s) v).
    mean = x * (1 + g**2 * d / (2 * s)) + v * (1 + g**2 * (1 - s) / (2 * s)) * d
    return mean, g * torch.sqrt(-d)
