"""The inference rule decides the expert: int(t) >= 1000 boundary is high noise."""

from __future__ import annotations

import pytest

from miles_wan.flow import shifted_sigmas
from miles_wan.wan.experts import Experts

NAMES = ("transformer", "transformer_2")
T2V, I2V, ONE = Experts(NAMES, 0.875), Experts(NAMES, 0.9), Experts(NAMES[:1], None)


@pytest.mark.parametrize(
    ("experts", "timestep", "expected"),
    [
        (T2V, 875.0, "transformer"),
        (T2V, 874.9999, "transformer_2"),
        (T2V, 1000.0, "transformer"),
        (I2V, 899.98, "transformer_2"),
        (I2V, 900.0, "transformer"),
        (Experts(NAMES, 0.8755), 875.9, "transformer_2"),
        (Experts(NAMES, 0.8755), 876.0, "transformer"),
        (ONE, 3.0, "transformer"),
    ],
)
def test_the_expert_of_a_timestep(experts: Experts, timestep: float, expected: str) -> None:
    assert experts.of(timestep) == expected


def test_knife_edges_of_real_grids() -> None:
    """Shift 5: 40 steps have one at 899.98, 44 steps one at 875.07."""
    forty, other = shifted_sigmas(40, 5.0) * 1000, shifted_sigmas(44, 5.0) * 1000
    (edge,) = [t for t in forty.tolist() if abs(t - 900) < 0.5]
    assert edge == pytest.approx(899.98, abs=0.01)
    assert I2V.of(edge) == "transformer_2"
    (edge,) = [t for t in other.tolist() if abs(t - 875) < 0.5]
    assert edge == pytest.approx(875.07, abs=0.01)
    assert T2V.of(edge) == "transformer"


@pytest.mark.parametrize("experts", [T2V, I2V, ONE, Experts(NAMES, 0.8755)])
def test_a_timestep_lies_in_the_range_of_its_expert(experts: Experts) -> None:
    for tenth in range(10_000):
        low, high = experts.ranges()[experts.of(tenth / 10)]
        assert low <= tenth / 10 < high


def test_a_mixed_batch_is_split_per_sample() -> None:
    assert T2V.route([999.0, 10.0, 875.0, 874.0]) == {"transformer": [0, 2], "transformer_2": [1, 3]}
    assert T2V.route([1.0]) == {"transformer": [], "transformer_2": [0]}


def test_each_expert_has_its_own_guidance_and_there_is_no_fallback() -> None:
    assert T2V.guidance(4.0, 3.0) == {"transformer": 4.0, "transformer_2": 3.0}
    assert ONE.guidance(5.0, None) == {"transformer": 5.0}
    with pytest.raises(ValueError, match="2 expert"):
        T2V.guidance(4.0, None)
    with pytest.raises(ValueError, match="1 expert"):
        ONE.guidance(4.0, 3.0)


def test_labels_and_choices() -> None:
    assert [T2V.label(name) for name in NAMES] == ["high", "low"]
    assert ONE.label("transformer") == "model"
    assert (T2V.chosen("both"), T2V.chosen("high"), T2V.chosen("low")) == (NAMES, NAMES[:1], NAMES[1:])
    assert ONE.chosen("both") == NAMES[:1]
    with pytest.raises(ValueError, match="single transformer"):
        ONE.chosen("low")


def test_a_boundary_belongs_to_two_experts() -> None:
    for names, boundary in ((NAMES, None), (NAMES[:1], 0.9)):
        with pytest.raises(ValueError, match="boundary"):
            Experts(names, boundary)
