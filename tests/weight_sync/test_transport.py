"""Devices are told apart by what they are, not by an index; CUDA IPC only where every engine device has a trainer."""

from __future__ import annotations

import pytest

from miles_wan.errors import InputError
from miles_wan.weight_sync import choose_transport, device_numbers, sharing_ranks

NODE = [f"GPU-{index}" for index in range(8)]


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        ("4,5,6,7", ["4", "5", "6", "7"]),
        ("5,7", ["5", "7"]),
        ("7,4", ["7", "4"]),
        ("6", ["6"]),
        ("0", ["0"]),
    ],
)
def test_the_devices_of_a_visible_list_get_their_numbers_on_the_node(visible, numbers):
    assert device_numbers([f"GPU-{index}" for index in visible.split(",")], NODE) == numbers


def test_two_slots_on_one_device_are_refused():
    with pytest.raises(InputError, match="device GPU-0 holds two slots"):
        device_numbers(["GPU-0", "GPU-0"], NODE)


def test_a_device_of_another_node_is_refused():
    with pytest.raises(InputError, match="device GPU-x is not among those of the node: GPU-0, GPU-1"):
        device_numbers(["GPU-x"], NODE[:2])


@pytest.mark.parametrize(
    ("transport", "trainers", "expected"),
    [
        ("cuda_ipc", ["a", "b", "c", "d"], [True, True, False, False]),  # nobody would free what c and d share
        ("cuda_ipc", ["b", "a"], [True, True]),
        ("shared_memory", ["a", "b"], [False, False]),
        ("shared_memory", [None, None], [False, False]),
    ],
)
def test_only_ranks_on_an_engines_device_share_over_cuda_ipc(transport, trainers, expected):
    assert sharing_ranks(transport, engine_uuids=["a", "b"], trainer_uuids=trainers) == expected


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
