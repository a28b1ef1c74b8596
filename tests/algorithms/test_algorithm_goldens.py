"""Every figure of the golden advantage and loss files comes out, in both precisions; the exceptions are in one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from golden_data import GOLDEN
from torch import Tensor
from torch.distributions import Normal

from miles_wan.algorithms import (
    clipped_policy_loss,
    dppo_loss,
    gaussian_kl,
    gdpo_advantages,
    group_advantages,
    guard_loss,
    nft_loss,
    weighted_rewards,
)

TOLERANCE = 1e-5  # ||a - b|| / ||b||, absolute where b is 0

# (family, case, figure): why the product has no such number. Each entry must name an existing figure that really differs.
_MICRO_BATCH_BIAS = (
    "flow_grpo reduces Guard's bias over the whole micro-batch, so that a sample's ratio depends on which others share its "
    "micro-batch; the bias here is every sample's own, as in verl-omni"
)
NOT_OFFERED = {
    ("loss_grpo_guard", case, f"flow_grpo_as_run.{figure}"): _MICRO_BATCH_BIAS
    for case in ("guard2", "guard5", "guard7", "guard11")  # the cases of more than one sample
    for figure in ("ratio", "policy_loss", "grad_wrt_prev_sample_mean")
}

Tensors = Callable[[Any], Tensor]


def flow_grpo_advantages(inputs: Mapping[str, Any], t: Tensors) -> dict[str, Tensor]:
    return {
        "advantages": group_advantages(t(inputs["rewards"]), numbered(inputs["prompts"]), normalize=normalizer(inputs))
    }


def verl_omni_advantages(inputs: Mapping[str, Any], t: Tensors) -> dict[str, Tensor]:
    normalize = normalizer(inputs) if inputs["norm_adv_by_std"] else "none"
    return {
        "advantages": group_advantages(t(inputs["rewards"]), numbered(inputs["group"]), normalize=normalize, ddof=1)
    }


def dance_advantages(inputs: Mapping[str, Any], t: Tensors) -> dict[str, Tensor]:
    rewards = t(inputs["rewards"])
    return {"advantages": group_advantages(rewards, runs_of(inputs["num_generations"], len(rewards)), ddof=1, eps=1e-8)}


def flow_factory_advantages(inputs: Mapping[str, Any], t: Tensors) -> dict[str, Tensor]:
    rewards = {name: t(values) for name, values in inputs["rewards"].items()}
    groups = runs_of(inputs["group_size"], len(next(iter(rewards.values()))))
    if inputs["method"] == "gdpo":
        return {"advantages": gdpo_advantages(rewards, groups, weights=inputs["weights"])}
    total = weighted_rewards(rewards, inputs["weights"])
    return {"advantages": group_advantages(total, groups, normalize=normalizer(inputs), eps=0.0, floor=1e-6)}


def grpo_figures(inputs: Mapping[str, Any], t: Tensors) -> dict[str, Tensor]:
    log_prob = t(inputs["log_prob_new"]).requires_grad_()
    policy = clipped_policy_loss(log_prob, t(inputs["log_prob_old"]), t(inputs["advantages"]), **clipping(inputs))
    policy.loss.backward()
    return {
        "ratio": policy.ratio,
        "policy_loss": policy.loss.detach(),
        "grad_wrt_log_prob_new": gradient(log_prob),
        "clipfrac": policy.clip_fraction,
        "approx_kl": policy.approx_kl,
    }


def kl_figures(inputs: Mapping[str, Any], t: Tensors) -> dict[str, Tensor]:
    mean = t(inputs["prev_sample_mean"]).requires_grad_()
    # sd3 leaves out sqrt(-d) and so has no KL, but the same expression of a std that is not the step's.
    std = t(inputs["std_dev_t"] * inputs.get("sqrt_minus_dt", 1.0)).expand(len(mean))
    kl = gaussian_kl(mean, t(inputs["prev_sample_mean_ref"]), std).mean()
    kl.backward()
    return {"kl_loss": kl.detach(), "grad_wrt_mean": gradient(mean)}


def dppo_figures(inputs: Mapping[str, Any], t: Tensors) -> dict[str, Tensor]:
    log_prob = t(inputs["log_prob_new"]).requires_grad_()
    policy = dppo_loss(
        log_prob,
        t(inputs["log_prob_old"]),
        t(inputs["advantages"]),
        mean=t(inputs["prev_sample_mean"]),
        old_mean=t(inputs["old_prev_sample_mean"]),
        std=t(inputs["std_dev_t"] * inputs["sqrt_minus_dt"]).expand(len(log_prob)),
        kl_threshold=inputs["kl_mask_threshold"],
    )
    policy.loss.backward()
    return {
        "loss": policy.loss.detach(),
        "masked_fraction": policy.clip_fraction,
        "grad_wrt_log_prob_new": gradient(log_prob),
    }


def guard_figures(inputs: Mapping[str, Any], t: Tensors) -> dict[str, Tensor]:
    mean, old_mean = t(inputs["prev_sample_mean"]).requires_grad_(), t(inputs["old_prev_sample_mean"])
    std = t(inputs["std_dev_t"] * inputs["sqrt_minus_dt"]).expand(len(mean))
    policy = guard_loss(
        Normal(mean, inputs["std_dev_t"] * inputs["sqrt_minus_dt"])
        .log_prob(t(inputs["prev_sample"]))
        .flatten(1)
        .mean(1),
        t(inputs["log_prob_old"]),
        t(inputs["advantages"]),
        mean=mean,
        old_mean=old_mean,
        std=std,
        d=t(-(inputs["sqrt_minus_dt"] ** 2)).expand(len(mean)),
        **clipping(inputs),
    )
    policy.loss.backward()
    ours = {"policy_loss": policy.loss.detach(), "grad_wrt_prev_sample_mean": gradient(mean)}
    figures = {
        f"{source}.{name}": value for source in ("flow_grpo_as_run", "verl_omni") for name, value in ours.items()
    }
    return figures | {
        "flow_grpo_as_run.ratio": policy.ratio,
        "flow_grpo_as_run.ratio_mean_bias": gaussian_kl(mean.detach(), old_mean, std).mean(),
        "verl_omni.ratio_mean": policy.ratio.mean(),
    }


def nft_figures(inputs: Mapping[str, Any], t: Tensors) -> dict[str, Tensor]:
    velocity = t(inputs["v_new"]).requires_grad_()
    nft = nft_loss(
        velocity,
        t(inputs["v_old"]),
        clean=t(inputs["x0"]),
        noisy=t(inputs["xt"]),
        sigma=t(inputs["t"]),
        advantages=t(inputs["advantages"]),
        adv_clip=inputs["adv_clip_max"],
        beta=inputs["beta"],
        reference_velocity=t(inputs["v_ref"]),
        reference_weight=inputs["ref_kl_coef"],
        min_error=inputs["adaptive_weight_min"],
    )
    nft.loss.backward()
    return {
        "loss": nft.loss.detach(),
        "policy_loss": nft.policy_loss,
        "flow_factory_policy_loss": nft.policy_loss,
        "ref_kl_loss": nft.reference_loss,
        "positive_loss": nft.positive_loss,
        "negative_loss": nft.negative_loss,
        "reward_prob": nft.reward_probability,
        "grad_wrt_v_new": gradient(velocity),
    }


FAMILIES: dict[str, Callable[[Mapping[str, Any], Tensors], dict[str, Tensor]]] = {
    "adv_flow_grpo": flow_grpo_advantages,
    "adv_verl_omni": verl_omni_advantages,
    "adv_dance": dance_advantages,
    "adv_flow_factory": flow_factory_advantages,
    "loss_grpo": grpo_figures,
    "loss_kl": kl_figures,
    "loss_flow_dppo": dppo_figures,
    "loss_grpo_guard": guard_figures,
    "loss_nft": nft_figures,
}


def numbered(labels: list[Any]) -> Tensor:
    order = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return torch.tensor([order[label] for label in labels])


def runs_of(size: int, count: int) -> Tensor:
    return torch.arange(count) // size


def normalizer(inputs: Mapping[str, Any]) -> str:
    return "global_std" if inputs["global_std"] else "group_std"


def clipping(inputs: Mapping[str, Any]) -> dict[str, float]:
    return {"clip_low": inputs["clip_range"], "clip_high": inputs["clip_range"], "adv_clip": inputs["adv_clip_max"]}


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def figures_of(expected: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in expected.items():
        if isinstance(value, dict):
            yield from figures_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def distance(actual: Tensor, expected: Any) -> float:
    reference = torch.tensor(expected, dtype=torch.float64)
    assert actual.shape == reference.shape
    size = float(reference.norm())
    return float((actual.double() - reference).norm()) / (size if size > 0 else 1.0)


def all_cases() -> list[Any]:
    return [
        pytest.param(family, case, id=f"{family}-{case['id']}")
        for family in FAMILIES
        for case in json.loads((GOLDEN / f"{family}.json").read_text())["cases"]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("family", "case"), all_cases())
def test_every_figure_is_that_of_the_public_implementation(family, case, dtype):
    figures = FAMILIES[family](case["inputs"], lambda values: torch.tensor(values, dtype=dtype))
    expected = dict(figures_of(case["expected"]))
    assert set(figures) == set(expected), "a figure of the file is not compared"
    distances = {name: distance(figures[name], value) for name, value in expected.items()}
    strange = {
        name: value
        for name, value in distances.items()
        if (value > TOLERANCE) != ((family, case["id"], name) in NOT_OFFERED)
    }
    assert not strange, "differs, or is listed as not offered although it does not"
    assert all(value.dtype == dtype for value in figures.values())


def test_what_is_not_offered_names_existing_figures_with_a_reason():
    known = {
        (family, case["id"], name)
        for family, case in (parameter.values for parameter in all_cases())
        for name, _ in figures_of(case["expected"])
    }
    assert set(NOT_OFFERED) <= known
    assert all(reason.strip() for reason in NOT_OFFERED.values())


def test_every_golden_file_of_advantages_and_losses_is_run():
    files = {path.stem for pattern in ("adv_*.json", "loss_*.json") for path in GOLDEN.glob(pattern)}
    assert files == set(FAMILIES)


@pytest.mark.parametrize(
    "case", [p.values[1] for p in all_cases() if p.values[0] == "loss_grpo_guard"], ids=lambda case: case["id"]
)
def test_the_log_prob_of_guards_cases_is_the_density_of_their_sample(case):
    inputs = case["inputs"]
    law = Normal(torch.tensor(inputs["prev_sample_mean"]), inputs["std_dev_t"] * inputs["sqrt_minus_dt"])
    log_prob = law.log_prob(torch.tensor(inputs["prev_sample"])).flatten(1).mean(1)
    assert distance(log_prob, inputs["log_prob_new"]) <= TOLERANCE
