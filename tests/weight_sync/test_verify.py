"""A sync counts only if every engine reports exactly what was sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from miles_wan.errors import WeightSyncError
from miles_wan.weight_sync import verify_reports


@dataclass(frozen=True)
class Report:
    tensors: int = 40
    layer_prefixes: int = 20
    unmapped: int = 0
    policy_version: int = 7


def verify(*reports):
    verify_reports(reports, tensors=40, layer_prefixes=20, policy_version=7)


def test_equal_reports_pass():
    verify(Report(), Report())


@pytest.mark.parametrize(
    "change",
    [{"tensors": 0}, {"tensors": 38}, {"layer_prefixes": 7}, {"unmapped": 1}, {"policy_version": 6}],
)
@pytest.mark.parametrize("place", [0, 1])
def test_any_deviation_of_any_engine_stops_the_run(change, place):
    reports = [Report(), Report()]
    reports[place] = replace(Report(), **change)
    with pytest.raises(WeightSyncError, match=f"engine {place} applied .* does not hold the trainer's weights"):
        verify(*reports)


def test_no_report_at_all_is_an_error():
    with pytest.raises(WeightSyncError, match="no engine reported"):
        verify()
