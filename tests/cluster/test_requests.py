"""Seeds and windows are functions of (run seed, rollout, record, occurrence, sample) and of nothing else."""

from __future__ import annotations

from collections import Counter

import torch

from miles_wan.cluster.requests import RequestPlanner
from miles_wan.config import Config
from miles_wan.records import PromptRecord


def records(count: int, *, prefix: str = "train") -> list[PromptRecord]:
    return [PromptRecord(record_id=f"{prefix}{n}", prompt=f"prompt {n}") for n in range(count)]


def config(*, seed: int = 0, **rollout) -> Config:
    settings = {
        "num_inference_steps": 10,
        "window_size": 3,
        "window_range": (1, 8),
        "prompts_per_rollout": 4,
        "samples_per_prompt": 3,
        **rollout,
    }
    return Config.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": "train.jsonl", "shuffle": settings.pop("shuffle", True)},
            "rollout": settings,
            "eval": {"seed": 5, "max_records": 6, "num_inference_steps": 20},
            "seed": seed,
        }
    )


def planner(count: int = 8, **changes) -> RequestPlanner:
    return RequestPlanner(config(**changes), records(count), records(9, prefix="eval"))


def drawn(plan: RequestPlanner, rollouts: int) -> list:
    return [request for n in range(rollouts) for request in plan.training(n, policy_version=n)]


def test_no_two_samples_of_a_run_share_a_seed():
    # Eight records and four a rollout: five times each, so occurrences matter too.
    seeds = [seed for request in drawn(planner(), 10) for seed in request.seeds]
    assert len(seeds) == 10 * 4 * 3
    assert len(set(seeds)) == len(seeds)


def test_a_record_drawn_twice_in_one_rollout_has_other_noise_each_time():
    requests = planner(3).training(0, policy_version=0)
    assert max(Counter(request.record.record_id for request in requests).values()) == 2
    assert len({seed for request in requests for seed in request.seeds}) == 12


def test_records_that_differ_in_metadata_alone_have_noise_of_their_own():
    twins = [PromptRecord(record_id="same", prompt="p", metadata={"target": n}) for n in range(3)]
    for requests in (RequestPlanner(config(), twins, []).training(n, policy_version=0) for n in range(2)):
        seeds = [seed for request in requests for seed in request.seeds]
        assert len(set(seeds)) == len(seeds) == 12


def test_any_rollout_can_be_planned_again_alone():
    run = planner()
    everything = [run.training(n, policy_version=n) for n in range(6)]
    torch.manual_seed(123)
    assert planner().training(4, policy_version=4) == everything[4]
    assert planner().training(2, policy_version=2) == everything[2]


def test_seeds_do_not_follow_from_the_shape_of_the_cluster_or_the_policy():
    changed = planner(num_engines=2, tp_size=2, concurrency=9).training(3, policy_version=8)
    plain = planner().training(3, policy_version=3)
    assert [request.seeds for request in changed] == [request.seeds for request in plain]
    assert [request.stochastic_steps for request in changed] == [request.stochastic_steps for request in plain]


def test_more_samples_of_a_record_keep_the_first_ones():
    few, many = planner().training(0, policy_version=0), planner(samples_per_prompt=5).training(0, policy_version=0)
    assert [request.seeds for request in few] == [request.seeds[:3] for request in many]


def test_another_run_seed_draws_other_noise_windows_and_order():
    first, second = drawn(planner(), 5), drawn(planner(seed=1), 5)
    assert not {s for request in first for s in request.seeds} & {s for request in second for s in request.seeds}
    assert [r.stochastic_steps for r in first] != [r.stochastic_steps for r in second]
    assert [r.record.record_id for r in first] != [r.record.record_id for r in second]


def test_windows_are_contiguous_inside_the_range_and_vary():
    windows = {request.stochastic_steps for request in drawn(planner(), 40)}
    assert windows == {(start, start + 1, start + 2) for start in range(1, 6)}
    default = {step for request in drawn(planner(window_range=None), 40) for step in request.stochastic_steps}
    assert default == set(range(9))  # never the last step, 9


def test_requests_name_their_place_and_how_to_sample():
    requests = planner().training(2, policy_version=7)
    assert [request.group_index for request in requests] == [0, 1, 2, 3]
    assert {(request.rollout_id, request.policy_version) for request in requests} == {(2, 7)}
    sampling = requests[0].sampling
    assert (sampling.kind, sampling.num_inference_steps, sampling.noise_level) == ("flow_sde", 10, 0.7)


def test_epochs_are_counted_by_draws():
    plan = planner(8)
    assert [plan.epoch(n) for n in range(5)] == [0, 0, 1, 1, 2]


def test_without_shuffling_records_come_in_the_order_of_the_file():
    requests = drawn(planner(shuffle=False), 3)
    assert [request.record.record_id for request in requests] == [f"train{n % 8}" for n in range(12)]


def test_validation_is_the_same_every_time_and_adds_no_noise():
    first = planner().validation(policy_version=0)
    later = planner(seed=9).validation(policy_version=4)
    assert [request.record.record_id for request in first] == [f"eval{n}" for n in range(6)]
    assert [request.seeds for request in first] == [request.seeds for request in later]
    assert len({request.seeds[0] for request in first}) == 6
    assert {len(request.seeds) for request in first} == {1}
    assert {request.stochastic_steps for request in first} == {()}
    assert {(request.sampling.kind, request.sampling.num_inference_steps) for request in first} == {("ode", 20)}
    assert {request.policy_version for request in later} == {4}


def test_validation_noise_is_not_that_of_training():
    plan = planner()
    training = {seed for request in drawn(plan, 10) for seed in request.seeds}
    assert not training & {request.seeds[0] for request in plan.validation(policy_version=0)}
