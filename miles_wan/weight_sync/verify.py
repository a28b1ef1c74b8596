"""Decides whether every engine holds what was sent. In: the engines' reports. Out: sync metrics, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles_wan.errors import WeightSyncError


class Report(Protocol):
    """What an engine says after applying an update."""

    @property
    def tensors(self) -> int: ...
    @property
    def layer_prefixes(self) -> int: ...
    @property
    def unmapped(self) -> int: ...
    @property
    def policy_version(self) -> int: ...


def verify_reports(reports: Sequence[Report], *, tensors: int, layer_prefixes: int, policy_version: int) -> None:
    """Compare every report with what was sent.

    Raises:
        WeightSyncError: no report, or one that differs in tensors, layers, unmapped names or version.
    """
    if not reports:
        raise WeightSyncError("no engine reported on the weight update")
    expected = (tensors, layer_prefixes, 0, policy_version)
    for index, report in enumerate(reports):
        got = (report.tensors, report.layer_prefixes, report.unmapped, report.policy_version)
        if got != expected:
            raise WeightSyncError(
                f"engine {index} applied (tensors, layers, unmapped, version) = {got}, sent were {expected}: "
                "it does not hold the trainer's weights; the run stops, resume it with --resume latest"
            )
