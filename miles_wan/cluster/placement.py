"""Which actor sits where, as a pure plan, and the placement group that holds the slots for it.

A slot is one device (a GPU, or a worker slot of a CPU machine). Engines, training ranks and reward workers share slots:
rollout and training take turns. Slots are always requested from Ray, so that no second pool can wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_wan.config import Config
from miles_wan.errors import InputError

SLOT = "worker_slot"
TRAINER_SHARE, ENGINE_SHARE, REWARD_SHARE = 0.4, 0.3, 0.02


@dataclass(frozen=True)
class Layout:
    """Slots of every actor: ``trainers`` one slot a rank, ``engines`` the slots of each engine, ``rewards`` one each."""

    slots: int
    trainers: tuple[int, ...]
    engines: tuple[tuple[int, ...], ...]
    rewards: tuple[int, ...]


def plan_layout(config: Config) -> Layout:
    """Spread ranks, engines and reward workers over the slots.

    Raises:
        InputError: more reward workers on a slot than its share holds.
    """
    slots = config.cluster.num_gpus
    per_engine = config.rollout.tp_size * config.rollout.sp_size
    engines = config.rollout.num_engines if config.rollout.engine == "sglang" else 0  # local: the ranks generate
    rewards = tuple(index % slots for index in range(config.reward.num_workers))
    room = round((1 - TRAINER_SHARE - ENGINE_SHARE) / REWARD_SHARE)
    crowded = max((rewards.count(slot) for slot in set(rewards)), default=0)
    if crowded > room:
        raise InputError(
            [f"reward.num_workers = {config.reward.num_workers} puts {crowded} on one device, at most {room} fit"]
        )
    return Layout(
        slots=slots,
        trainers=tuple(range(config.training.dp_size)),
        engines=tuple(tuple(range(index * per_engine, (index + 1) * per_engine)) for index in range(engines)),
        rewards=rewards,
    )


def reserve(layout: Layout, *, device: str, timeout: float = 60.0) -> PlacementGroup:
    """One bundle per slot, on one node.

    Raises:
        InputError: the cluster has fewer slots.
    """
    resource = "GPU" if device == "cuda" else SLOT
    group = placement_group([{resource: 1, "CPU": 1}] * layout.slots, strategy="STRICT_PACK")
    if not group.wait(timeout):
        have = ray.cluster_resources().get(resource, 0)
        raise InputError(
            [f"cluster.num_gpus = {layout.slots}: the Ray cluster offers {have:g} {resource} on its nodes"]
        )
    return group


def actor_options(group: PlacementGroup, slot: int, *, share: float, device: str) -> dict[str, Any]:
    """Ray options of an actor that uses ``share`` of a slot."""
    resources: dict[str, Any] = {"num_gpus": share} if device == "cuda" else {"resources": {SLOT: share}}
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=slot)
    return {"num_cpus": 0, "scheduling_strategy": strategy, "max_restarts": 0, **resources}
