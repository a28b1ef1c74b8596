"""Which transitions keep the marginals of the flow? Exact figures on Gaussian data, no sampling.

    python benchmarks/marginals.py --out docs/images/marginals.png

With data x0 ~ N(m, c^2) and noise e ~ N(0, 1), the state x = (1 - s) x0 + s e is Gaussian with mean (1 - s) m and
variance V(s) = (1 - s)^2 c^2 + s^2, and (x0, e, x) are jointly Gaussian. The exact velocity is affine in x:
E[e - x0 | x] = -m + (s - (1 - s) c^2) / V(s) (x - (1 - s) m). So is the mean of every transition, which makes the
recursion of mean and variance closed: mean' = a mean + b, variance' = a^2 variance + std^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
import tyro
from torch import Tensor

from miles_wan.flow import shift_sigma, transition

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"ode": "tab:gray", "dance_sde": "tab:green", "flow_sde": "tab:blue", "cps": "tab:red"}


@dataclass(frozen=True)
class GaussianData:
    """x0 ~ N(mean, std^2)."""

    mean: float = 0.8
    std: float = 0.5

    def marginal(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the state at ``sigma``."""
        return (1 - sigma) * self.mean, (1 - sigma) ** 2 * self.std**2 + sigma**2

    def velocity(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The exact velocity E[e - x0 | x]."""
        mean, variance = self.marginal(sigma)
        return -self.mean + (sigma - (1 - sigma) * self.std**2) / variance * (x - mean)


def propagate(kind: str, sigmas: Tensor, *, noise_level: float, data: GaussianData) -> tuple[Tensor, Tensor]:
    """Mean and variance [N + 1] of the state at every one of ``sigmas`` [N + 1] (float64), from the exact marginal at
    the first. The last step is the ode's, as in training: cps has no density there."""
    mean, variance = data.marginal(sigmas[0])
    means, variances = [mean], [variance]
    probe = torch.tensor([[0.0], [1.0]], dtype=sigmas.dtype)
    for k in range(len(sigmas) - 1):
        step = transition(
            "ode" if k == len(sigmas) - 2 else kind,
            probe,
            data.velocity(probe, sigmas[k]),
            sigma=sigmas[k],
            sigma_next=sigmas[k + 1],
            sigma_max=sigmas[1],
            noise_level=noise_level,
            noise=torch.zeros_like(probe),
        )
        offset = step.mean[0, 0]
        slope = step.mean[1, 0] - offset
        mean, variance = slope * mean + offset, slope**2 * variance + step.std[0] ** 2
        means.append(mean)
        variances.append(variance)
    return torch.stack(means), torch.stack(variances)


def grid(num_steps: int, *, shift: float = 1.0, first: float = 1.0) -> Tensor:
    """A float64 grid [N + 1] all of whose steps shrink with N (the product's keeps its last sigma)."""
    return shift_sigma(torch.linspace(first, 0, num_steps + 1, dtype=torch.float64), shift)


def variance_bias(kind: str, sigmas: Tensor, *, noise_level: float, data: GaussianData) -> Tensor:
    """Relative error of the variance at every sigma."""
    _, exact = data.marginal(sigmas)
    return propagate(kind, sigmas, noise_level=noise_level, data=data)[1] / exact - 1


def final_bias(
    kind: str, num_steps: int, *, noise_level: float, data: GaussianData, shift: float = 1.0, first: float = 1.0
) -> float:
    """Relative error of the variance at sigma 0."""
    return float(variance_bias(kind, grid(num_steps, shift=shift, first=first), noise_level=noise_level, data=data)[-1])


def draw(out: Path, *, noise_level: float, shift: float, data: GaussianData) -> None:
    """Left: bias along one rollout. Right: bias of the result against the number of steps."""
    figure, (along, against) = plt.subplots(1, 2, figsize=(12, 4))
    sigmas = grid(50, shift=shift)
    counts = (10, 25, 50, 100, 200, 400, 800)

    def show(kind: str, label: str, *, style: str, first: float) -> None:
        final = [final_bias(kind, n, noise_level=noise_level, data=data, shift=shift, first=first) for n in counts]
        against.loglog(counts, [abs(bias) for bias in final], style, color=COLOURS[kind], marker=".", label=label)

    for kind, colour in COLOURS.items():
        bias = variance_bias(kind, sigmas, noise_level=noise_level, data=data)
        along.plot(sigmas, 100 * bias, color=colour, marker=".", label=kind)
        show(kind, kind, style="-", first=1.0)
    show("flow_sde", "flow_sde from sigma 0.9 on", style="--", first=0.9)
    against.loglog(counts, [0.5 / n for n in counts], color="black", linestyle=":", label="slope of 1/N")
    along.invert_xaxis()
    along.set(xlabel="sigma (a rollout runs to the right)", ylabel="error of the variance, %", title="50 steps")
    against.set(xlabel="steps N", ylabel="|relative error of the variance| at sigma 0", title="more steps")
    along.legend()
    against.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.suptitle(f"Gaussian data, exact velocity, eta {noise_level:g}, shift {shift:g}")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


@dataclass(frozen=True)
class Arguments:
    """What to draw."""

    out: Path = Path("docs/images/marginals.png")
    """The figure."""
    noise_level: float = 0.7
    """eta."""
    shift: float = 1.0
    """Shift of the grid."""


def main(arguments: Arguments) -> None:
    data = GaussianData()
    draw(arguments.out, noise_level=arguments.noise_level, shift=arguments.shift, data=data)
    for kind in (*COLOURS, "flow_grpo_wan"):
        for shift in (1.0, 5.0):
            final = [
                final_bias(kind, n, noise_level=arguments.noise_level, data=data, shift=shift)
                for n in (10, 50, 100, 200, 400)
            ]
            print(f"{kind:13} shift {shift:g}: " + "  ".join(f"{100 * value:+.2f} %" for value in final))


if __name__ == "__main__":
    main(tyro.cli(Arguments))
