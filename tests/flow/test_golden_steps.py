"""Every published step of the golden files, in float32 and float64: mean, std, sample, log-prob and its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from golden_data import cases
from torch import Tensor

from miles_wan.flow import transition

FAMILIES = (
    "step_flow_sde",
    "step_dance_sde",
    "step_flow_cps",
    "step_flow_grpo_wan",
    "step_flow_factory",
    "step_verl_omni",
    "step_sglang",
)
KINDS = {"sde": "flow_sde", "Flow-SDE": "flow_sde", "Dance-SDE": "dance_sde", "CPS": "cps", "flow_cps": "cps"}
GRADIENT = "grad_sum_log_prob_wrt_model_output"

NO_DRIFT = "sde_solver=false adds the noise without the drift that pays for it: the marginals are not kept"
NO_NORMALISER = "leaves out constants: ratios, gradients and KL are those of the density, so it is no choice"
NO_VARIANCE = (
    "squared error with flow_sde: the right clip range would change with every step's std; offered for cps only"
)
NOT_OFFERED = {
    ("step_dance_sde", "431", "prev_sample_mean"): NO_DRIFT,
    ("step_dance_sde", "431", "log_prob"): NO_DRIFT,
    ("step_dance_sde", "431", GRADIENT): NO_DRIFT,
    ("step_verl_omni", "611", "log_prob"): NO_NORMALISER,
    ("step_verl_omni", "631", "log_prob"): NO_NORMALISER,
    ("step_sglang", "750", "log_prob"): NO_VARIANCE,
    ("step_sglang", "752", "log_prob"): NO_VARIANCE,
    ("step_sglang", "755", "log_prob"): NO_VARIANCE,
}
# Offered, but the file holds it less exactly than 1e-5: with sigma = 1 - 1e-6 taken as it is, std is 486 on a state of
# size 4.5e5, so that y - mean keeps 15 of the 24 bits of float32. From the file's own mean its gradient follows.
ROUNDED = ("step_flow_factory", "511", GRADIENT)


@dataclass(frozen=True)
class Step:
    """A case as tensors of one dtype, and how its library calls our law."""

    family: str
    case: Any
    dtype: torch.dtype

    def tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=self.dtype)

    @property
    def kind(self) -> str:
        inputs = self.case["inputs"]
        name = inputs.get("dynamics_type") or inputs.get("sde_type") or self.family.removeprefix("step_")
        outside = inputs.get("sde_step_indices") is not None and inputs["step_index"] not in inputs["sde_step_indices"]
        return "ode" if outside else KINDS.get(name, name)

    @property
    def cps_log_prob(self) -> str:
        """The engine serves the density unless told otherwise; the other libraries know the squared error only."""
        return "squared_error" if self.case["inputs"].get("log_prob_no_const", True) else "density"

    @property
    def sigma_max(self) -> float:
        """The grid's second value, except where Flow-Factory asks whether sigma is exactly 1: UniPC's grid starts at
        1 - 1e-6, which we take for 1 and it does not, so that it uses sigma itself."""
        sigmas, inputs = self.case["inputs"]["sigmas"], self.case["inputs"]
        exact = self.family == "step_flow_factory" and inputs["step_index"] == 0 and sigmas[0] < 1
        return sigmas[0] if exact else sigmas[1]

    @property
    def published_std(self) -> float:
        """What the library returns as std, in units of ours: some leave out the factor sqrt(sigma - sigma_next)."""
        sigmas, k = self.case["inputs"]["sigmas"], self.case["inputs"]["step_index"]
        without_step_length = {
            "step_flow_sde": ("flow_sde",),
            "step_verl_omni": ("flow_sde",),
            "step_flow_factory": ("flow_sde", "dance_sde"),
        }
        return 1 / math.sqrt(sigmas[k] - sigmas[k + 1]) if self.kind in without_step_length.get(self.family, ()) else 1

    def run(self) -> dict[str, Tensor]:
        """Our results under the file's names."""
        inputs = self.case["inputs"]
        k = inputs["step_index"]
        velocity = self.tensor(inputs["model_output"]).requires_grad_()
        source = {"next_sample": "prev_sample"} if "prev_sample" in inputs else {"noise": "variance_noise"}
        ours = transition(
            self.kind,
            self.tensor(inputs["sample"]),
            velocity,
            sigma=inputs["sigmas"][k],
            sigma_next=inputs["sigmas"][k + 1],
            sigma_max=self.sigma_max,
            noise_level=inputs.get("noise_level", math.nan),
            cps_log_prob=self.cps_log_prob,
            **{ours: self.tensor(inputs[theirs]) for ours, theirs in source.items()},
        )
        results = {
            "prev_sample": ours.next_sample.detach(),
            "prev_sample_mean": ours.mean.detach(),
            "std_dev_t": ours.std * self.published_std,
            "noise_std_dev": ours.std,
            "log_prob": ours.log_prob.detach(),
        }
        if GRADIENT in self.case["expected"]:
            (results[GRADIENT],) = torch.autograd.grad(ours.log_prob.sum(), velocity)
        return results


STEPS = [(family, case) for family in FAMILIES for case in cases(family)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||a - b|| / ||b||, absolute where b is 0."""
    norm = float(expected.norm())
    return float((actual - expected).norm()) / (norm if norm else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("family", "case"), STEPS, ids=[f"{family}-{case['id']}" for family, case in STEPS])
def test_every_published_step_is_ours(family, case, dtype):
    step = Step(family, case, dtype)
    results = step.run()
    errors = {}
    for name, values in case["expected"].items():
        if (family, case["id"], name) in NOT_OFFERED:
            continue
        assert results[name].dtype == dtype
        expected = step.tensor(values)
        if (family, case["id"], name) == ROUNDED:
            y, file_mean = results["prev_sample"], step.tensor(case["expected"]["prev_sample_mean"])
            results[name] = results[name] * (y - file_mean) / (y - results["prev_sample_mean"])
        errors[name] = relative_error(results[name], expected.expand_as(results[name]))
    assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}


def test_what_is_not_offered_is_in_the_files():
    there = {(family, case["id"], name) for family, case in STEPS for name in case["expected"]}
    assert {*NOT_OFFERED, ROUNDED} <= there


def test_what_is_not_offered_really_differs():
    for family, case in STEPS:
        step = Step(family, case, torch.float64)
        for name, values in case["expected"].items():
            if (family, case["id"], name) in NOT_OFFERED:
                expected = step.tensor(values)
                assert relative_error(step.run()[name].expand_as(expected), expected) > 1e-3


@pytest.mark.parametrize(
    "case", [c for c in cases("step_verl_omni") if c["id"] in ("611", "631")], ids=lambda c: c["id"]
)
def test_the_log_prob_without_normaliser_is_ours_plus_a_constant(case):
    step = Step("step_verl_omni", case, torch.float64)
    ours = step.run()
    constant = torch.log(ours["noise_std_dev"]) + 0.5 * math.log(2 * math.pi)
    assert relative_error(ours["log_prob"] + constant, step.tensor(case["expected"]["log_prob"])) <= 1e-5


@pytest.mark.parametrize(
    "case", [c for c in cases("step_sglang") if c["id"] in ("750", "752", "755")], ids=lambda c: c["id"]
)
def test_the_squared_error_of_flow_sde_follows_from_its_sample(case):
    step = Step("step_sglang", case, torch.float64)
    ours = step.run()
    squared_error = -((ours["prev_sample"] - ours["prev_sample_mean"]) ** 2).flatten(1).mean(1)
    assert relative_error(squared_error, step.tensor(case["expected"]["log_prob"])) <= 1e-5
