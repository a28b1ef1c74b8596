"""What a mesh costs is known before anything starts, and a mesh that makes no sense is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden_data import single

from miles_wan.training.mesh import GIB, MeshMemory, estimate, held_bytes, mesh_faults
from miles_wan.wan.family import family_named
from miles_wan.wan.load import load_transformer, meta_transformer
from miles_wan.wan.lora import inject_lora
from miles_wan.wan.model import WanModel

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
BASE, ADAPTERS = 5_009_863_872 - 10_076_160, 10_076_160  # the released 5B at rank 4


@pytest.fixture(scope="module")
def released() -> WanModel:
    """The released 5B in bf16 with adapters of rank 4, without weights."""
    transformer = meta_transformer(family_named("wan2.2-ti2v-5b").transformer, dtype="bf16")
    inject_lora(transformer, rank=4, alpha=4, targets=TARGETS, seed=0)
    return single(transformer)


def first_shard(parameter: torch.Tensor, ranks: int) -> int:
    """FSDP2's rule, by torch itself: the first piece of a chunk along dimension 0 is the largest."""
    return parameter.chunk(ranks)[0].numel() * parameter.element_size()


@pytest.mark.parametrize("ranks", [1, 2, 7, 64])
def test_a_rank_holds_the_first_chunk_of_every_parameter(released: WanModel, ranks: int) -> None:
    memory = estimate(released, ranks=ranks)
    shares = {parameter: first_shard(parameter, ranks) for parameter in released.parameters()}
    assert memory.weight_bytes == sum(shares.values())
    # Of a trainable weight there are four: itself, its gradient, two moments.
    extra = sum(3 * share for parameter, share in shares.items() if parameter.requires_grad)
    assert memory.rank_bytes == memory.weight_bytes + extra


def test_the_released_model_has_its_known_bytes(released: WanModel) -> None:
    memory = estimate(released, ranks=1)
    assert memory.parameters == BASE + ADAPTERS
    # Two bytes a base parameter, but four for those that diffusers keeps in float32: norms and modulation of each block
    # (norm2 with bias, 6 rows), the last modulation (2 rows), and the time embedder (256 -> 3072 -> 3072, with biases).
    d = 3072
    kept = 30 * (2 * d + 6 * d) + 2 * d + (256 * d + d) + (d * d + d)
    assert memory.weight_bytes == 2 * (BASE - kept) + 4 * kept + 4 * ADAPTERS
    assert memory.whole_bytes == memory.rank_bytes == memory.weight_bytes + 12 * ADAPTERS
    assert "2.01 bytes per parameter" in memory.text


def test_the_types_on_the_meta_device_are_those_of_loaded_weights(tiny_paths) -> None:
    loaded = load_transformer(tiny_paths.model, dtype="bf16")
    built = meta_transformer(loaded.config, dtype="bf16")
    assert {n: p.dtype for n, p in built.named_parameters()} == {n: p.dtype for n, p in loaded.named_parameters()}
    assert held_bytes(loaded) == estimate(single(built), ranks=1).weight_bytes


def memory(**changes: int) -> MeshMemory:
    gib = {"weight_bytes": 5, "rank_bytes": 6, "whole_bytes": 12, "gathered_bytes": 1, **changes}
    sizes = {name: value * GIB for name, value in gib.items() if name != "ranks"}
    return MeshMemory(ranks=changes.get("ranks", 2), parameters=5 * 10**9, **sizes)


def test_a_mesh_that_fits_has_no_fault() -> None:
    assert mesh_faults(memory(), devices=2, device_bytes=7 * GIB) == []
    assert mesh_faults(memory(ranks=1), devices=1, device_bytes=7 * GIB) == []


def test_a_mesh_that_shards_nothing_is_refused_although_it_fits() -> None:
    (fault,) = mesh_faults(memory(ranks=1), devices=4, device_bytes=80 * GIB)
    assert fault.startswith("training.dp_size = 1 with cluster.num_gpus = 4 shards nothing")
    assert "3 device(s) would not train" in fault
    assert "set it to 4" in fault


def test_a_mesh_that_does_not_fit_is_refused_with_the_ranks_it_would_take() -> None:
    (fault,) = mesh_faults(memory(), devices=2, device_bytes=5 * GIB)
    # 12 GiB in all, of each device's 5 GiB one is for the gathered block: 12 / 4 = 3 ranks.
    assert "a rank needs 7.00 GiB" in fault
    assert "has 5.00 GiB" in fault
    assert "about 3 ranks" in fault


def test_a_block_that_fits_on_no_device_is_not_answered_with_more_ranks() -> None:
    (fault,) = mesh_faults(replace(memory(), gathered_bytes=9 * GIB), devices=2, device_bytes=8 * GIB)
    assert "about" not in fault
    assert "lower model.lora_rank" in fault
