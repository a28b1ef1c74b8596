"""Devices are told apart by what they are, not by an index; CUDA IPC only where every engine device has a trainer."""

from __future__ import annotations

import pytest

from miles_wan.errors import InputError
from miles_wan.weight_sync import choose_transport, physical_devices


@pytest.mark.parametrize(
    ("indices", "visible", "expected"),
    [
        ([0, 1, 2, 3], "4,5,6,7", ["4", "5", "6", "7"]),
        ([1, 3], "4,5,6,7", ["5", "7"]),
        ([3, 0], "4,5,6,7", ["7", "4"]),
        ([0], "6", ["6"]),
        ([0], "0", ["0"]),
        ([1], " 2 , 5 ", ["5"]),
        ([0, 1], "GPU-aa,GPU-bb", ["GPU-aa", "GPU-bb"]),
        ([0, 2], None, ["0", "2"]),
        ([], "4,5", []),
    ],
)
def test_local_indices_become_the_cards_of_the_visible_list(indices, visible, expected):
    assert physical_devices(indices, visible) == expected


@pytest.mark.parametrize(("indices", "visible"), [([4], "4,5,6,7"), ([0], ""), ([-1], "4,5"), ([0, 1], "6")])
def test_an_index_beyond_the_list_is_refused_with_both(indices, visible):
    with pytest.raises(InputError, match=f"device index {indices[-1]} is not in CUDA_VISIBLE_DEVICES='{visible}'"):
        physical_devices(indices, visible)


@pytest.mark.parametrize(
    ("configured", "engines", "trainers", "expected"),
    [
        ("auto", ["a", "b"], ["b", "a"], "cuda_ipc"),
        ("auto", ["a"], ["a", "b"], "cuda_ipc"),
        ("auto", ["a", "c"], ["a", "b"], "shared_memory"),
        ("auto", [], [], "shared_memory"),  # CPU
        ("shared_memory", ["a"], ["a"], "shared_memory"),
        ("cuda_ipc", ["a"], ["a"], "cuda_ipc"),
    ],
)
def test_the_transport_follows_from_who_sits_where(configured, engines, trainers, expected):
    assert choose_transport(configured, engine_uuids=engines, trainer_uuids=trainers) == expected


@pytest.mark.parametrize(("engines", "named"), [(["a", "c"], r"\['c'\]"), ([], "on a CPU")])
def test_cuda_ipc_is_refused_where_it_is_impossible(engines, named):
    with pytest.raises(InputError, match=f"no trainer holds engine devices {named}; use auto"):
        choose_transport("cuda_ipc", engine_uuids=engines, trainer_uuids=["a"])
