"""The loop over plain objects: order of calls, evaluation, checkpoints, resuming, counting."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean, pstdev
from typing import Any

import pytest

from miles_wan.config import Config
from miles_wan.controller import Controller, Parts, RunState
from miles_wan.records import PromptRecord, RolloutRequest, Sample, SamplingSettings, Score, TrainItem, TrainSignal

GROUPS, SAMPLES, EVAL = 3, 2, 4
SETTINGS = SamplingSettings(32, 32, 5, 8, 6, 1.0, 5.0)


class World:
    """All handles of one run. ``calls`` is what the loop asked for, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.items: list[list[TrainItem]] = []
        self.saved: list[str] = []
        self.videos_of: list[tuple[int, list[Sample]]] = []
        self._submitted: dict[tuple[int, int], Score] = {}
        self._version = -1
        self.left_out: set[int] = set()

    # Requests
    def training(self, rollout_id: int, *, policy_version: int) -> list[RolloutRequest]:
        self.calls.append(("requests", rollout_id, policy_version))
        return [self._request(rollout_id, g, policy_version, range(SAMPLES), (g, g + 1)) for g in range(GROUPS)]

    def validation(self, *, policy_version: int) -> list[RolloutRequest]:
        return [self._request(0, g, policy_version, range(1), ()) for g in range(EVAL)]

    def epoch(self, rollout_id: int) -> int:
        return rollout_id // 2

    def _request(self, rollout_id, group, version, samples, steps) -> RolloutRequest:
        record = PromptRecord(record_id=f"r{group}", prompt=f"p{group}")
        seeds = tuple(100 * rollout_id + 10 * group + index for index in samples)
        return RolloutRequest(record, seeds, SETTINGS, steps, version, rollout_id, group)

    # Rollouts: finished in any order
    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[Sample]:
        self.calls.append(("generate", requests[0].policy_version, bool(requests[0].stochastic_steps)))
        assert requests[0].policy_version == self._version, "the engines hold other weights"
        samples = [
            Sample(r.record, r.group_index, i, seed, f"frames{seed}", f"trajectory{seed}", f"text{r.group_index}")
            for r in requests
            for i, seed in enumerate(r.seeds)
        ]
        random.Random(0).shuffle(samples)
        yield from samples

    # Scorer
    def begin(self, requests: Sequence[RolloutRequest], *, validation: bool) -> None:
        self.calls.append(("begin", validation))

    def submit(self, sample: Sample) -> None:
        assert sample.frames == f"frames{sample.seed}"
        total = float(sample.group_index) if sample.group_index == 1 else float(sample.seed)
        self._submitted[sample.group_index, sample.sample_index] = Score(total, {"pickscore": total, "other": -total})

    def collect(self) -> tuple[dict[tuple[int, int], Score], float]:
        self.calls.append(("collect", len(self._submitted)))
        scores, self._submitted = self._submitted, {}
        return scores, 0.5

    # Trainer
    def signal(self, scores: Sequence[Score], group_ids: Sequence[int]) -> TrainSignal:
        rewards = [score.total for score in scores]
        self.calls.append(("signal", rewards, list(group_ids)))
        kept = [index not in self.left_out for index in range(len(rewards))]
        return TrainSignal([reward + 1 for reward in rewards], kept, {"rollout/equal_groups": 1.0})

    def update(self, items: Sequence[TrainItem], *, rollout_id: int) -> dict[str, float]:
        self.calls.append(("update", rollout_id))
        self.items.append(list(items))
        return {
            "train/log_prob_gap_max": 1e-6 * (3 - rollout_id),
            "train/log_prob_pairs": 12.0,
            "train/ratio_minus_one_max_before_update": 2e-6 * (rollout_id + 1),
        }

    # Weights
    def push(self, policy_version: int, *, weights: str) -> dict[str, float]:
        self.calls.append(("push", policy_version) if weights == "policy" else ("push", policy_version, weights))
        self._version = policy_version
        return {"sync/seconds": 0.25, "sync/tensors": 40, "sync/prefixes": 20, "sync/unmapped": 0}

    # Track
    @contextmanager
    def phase(self, name: str, *, total: int | None = None, unit: str = "") -> Iterator[None]:
        self.calls.append(("phase", name))
        yield

    def advance(self, count: int = 1) -> None: ...

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        self.logged.append((step, dict(metrics)))

    def lap(self) -> Mapping[str, float]:
        return {"time/rollout": 1.0}

    def overlap(self, name: str, seconds: float) -> None: ...

    def interval(self, values: Sequence[float]) -> float:
        return max(values) - min(values)

    # Keep
    def save(self, state: RunState) -> None:
        self.calls.append(("save", state.finished))
        self.saved.append(json.dumps(asdict(state)))

    def videos(self, step: int, samples: Sequence[Sample]) -> None:
        self.videos_of.append((step, list(samples)))

    def made(self, *names: str) -> list[Any]:
        return [call for call in self.calls if call[0] in names]


def run(world: World | None = None, *, state: RunState | None = None, **changes: Any) -> tuple[World, Controller]:
    settings = {"num_rollouts": 4, "eval": 2, "checkpoint": 3, "sign": 1, "loss": "grpo", **changes}
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t", "eval": "e"},
            "eval": {"interval": settings["eval"], "save_videos": 2},
            "checkpoint": {"interval": settings["checkpoint"]},
            "algorithm": {"advantage_sign": settings["sign"], "loss": settings["loss"]},
            "num_rollouts": settings["num_rollouts"],
        }
    )
    world = world or World()
    controller = Controller(config, Parts(*[world] * 7), state or RunState())  # type: ignore[arg-type]
    controller.run()
    return world, controller


def test_a_rollout_is_generated_scored_trained_and_pushed_in_that_order():
    world, _ = run(num_rollouts=1, eval=0, checkpoint=0)
    names = [call[0] for call in world.calls if call[0] != "phase"]
    assert names == ["push", "requests", "begin", "generate", "collect", "signal", "update", "push"]


def test_weights_are_pushed_before_the_first_video_and_once_after_every_update():
    world, controller = run(num_rollouts=3, eval=0, checkpoint=0)
    assert world.made("push") == [("push", 0), ("push", 1), ("push", 2), ("push", 3)]
    assert world.made("requests") == [("requests", 0, 0), ("requests", 1, 1), ("requests", 2, 2)]
    assert world.made("update") == [("update", 0), ("update", 1), ("update", 2)]
    assert (controller.state.policy_version, controller.state.syncs) == (3, 4)
    assert controller.state.sync_seconds == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rollouts", "interval", "expected"),
    [(4, 2, [0, 2, 4]), (5, 2, [0, 2, 4, 5]), (3, 10, [0, 3]), (2, 1, [0, 1, 2]), (3, 0, [])],
)
def test_evaluation_is_before_training_every_interval_and_at_the_end(rollouts, interval, expected):
    world, controller = run(num_rollouts=rollouts, eval=interval, checkpoint=0)
    assert [step for step, metrics in world.logged if "eval/reward_mean" in metrics] == expected
    assert [step for step, _ in world.videos_of] == expected
    assert controller.state.eval_last_step == (expected[-1] if expected else -1)


def test_evaluation_uses_the_weights_that_were_just_pushed():
    world, _ = run(num_rollouts=2, eval=1, checkpoint=0)
    # World.generate refuses a version that is not the pushed one; validation requests have no stochastic step.
    assert world.made("generate") == [
        ("generate", 0, False),
        ("generate", 0, True),
        ("generate", 1, False),
        ("generate", 1, True),
        ("generate", 2, False),
    ]
    assert [call[1] for call in world.made("begin")] == [True, False, True, False, True]


@pytest.mark.parametrize(("rollouts", "interval", "expected"), [(5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 0, [])])
def test_checkpoints_are_saved_every_interval_and_at_the_end(rollouts, interval, expected):
    world, _ = run(num_rollouts=rollouts, eval=0, checkpoint=interval)
    assert world.made("save") == [("save", step) for step in expected]


def test_samples_reach_the_trainer_in_order_with_their_own_advantage():
    world, _ = run(num_rollouts=2, eval=0, checkpoint=0)
    items = world.items[1]
    seeds = [100 + 10 * group + index for group in range(GROUPS) for index in range(SAMPLES)]
    assert [item.trajectory for item in items] == [f"trajectory{seed}" for seed in seeds]
    assert [item.conditioning for item in items] == ["text0", "text0", "text1", "text1", "text2", "text2"]
    assert [(item.record_id, item.sample_index) for item in items] == [
        (f"r{group}", index) for group in range(GROUPS) for index in range(SAMPLES)
    ]
    rewards = [100.0, 101.0, 1.0, 1.0, 120.0, 121.0]
    assert world.made("signal")[1] == ("signal", rewards, [0, 0, 1, 1, 2, 2])
    assert [item.advantage for item in items] == [reward + 1 for reward in rewards]


def test_the_flipped_control_flips_every_advantage_and_nothing_else():
    plain, _ = run(num_rollouts=1, eval=0, checkpoint=0)
    flipped, _ = run(num_rollouts=1, eval=0, checkpoint=0, sign=-1)
    assert [item.advantage for item in flipped.items[0]] == [-item.advantage for item in plain.items[0]]
    assert [item.trajectory for item in flipped.items[0]] == [item.trajectory for item in plain.items[0]]
    assert flipped.made("signal") == plain.made("signal")


def test_the_metrics_of_a_rollout_follow_from_its_scores():
    world, _ = run(num_rollouts=2, eval=0, checkpoint=0)
    step, metrics = world.logged[1]
    rewards = [100.0, 101.0, 1.0, 1.0, 120.0, 121.0]
    assert step == 2
    assert metrics["rollout/reward_mean"] == pytest.approx(fmean(rewards))
    assert metrics["rollout/reward/pickscore"] == pytest.approx(fmean(rewards))
    assert metrics["rollout/reward/other"] == pytest.approx(-fmean(rewards))
    assert metrics["rollout/reward_std"] == pytest.approx(pstdev(rewards))
    assert metrics["rollout/reward_group_std"] == pytest.approx((0.5 + 0.0 + 0.5) / 3)
    assert metrics["rollout/equal_groups"] == 1
    assert (metrics["rollout/videos"], metrics["rollout/groups"]) == (6, 3)
    assert metrics["rollout/dropped_samples"] == 0
    assert metrics["rollout/policy_version"] == 1
    assert metrics["rollout/window_start"] == pytest.approx(1.0)
    assert metrics["rollout/epoch"] == 0
    assert metrics["sync/tensors"] == 40
    assert metrics["time/rollout"] == 1.0


def test_the_state_counts_the_whole_run():
    _, controller = run(num_rollouts=3, eval=3, checkpoint=0)
    state = controller.state
    assert state.videos_scored == 3 * GROUPS * SAMPLES + 2 * EVAL
    assert state.dropped_samples == 0
    assert state.max_log_prob_gap == pytest.approx(3e-6)
    assert state.log_prob_pairs_compared == 36
    assert state.max_ratio_minus_one_before_update == pytest.approx(6e-6)
    assert (state.lora_tensors, state.layer_prefixes, state.unmapped) == (40, 20, 0)


def test_the_first_and_the_last_evaluation_are_kept_in_the_order_of_the_records():
    world, controller = run(num_rollouts=4, eval=2, checkpoint=0)
    expected = [0.0, 1.0, 20.0, 30.0]
    assert controller.state.eval_first == expected
    assert controller.state.eval_last == expected
    _, metrics = world.logged[0]
    assert metrics["eval/reward_mean"] == pytest.approx(fmean(expected))
    assert metrics["eval/reward_ci95"] == 30.0
    assert metrics["eval/videos"] == EVAL


def test_only_the_videos_that_will_be_written_are_kept():
    world, _ = run(num_rollouts=1, eval=1, checkpoint=0)
    for _, samples in world.videos_of:
        assert [sample.frames for sample in samples] == ["frames0", "frames10"]


def test_a_resumed_run_goes_on_where_the_checkpoint_was():
    whole, finished = run(num_rollouts=5, eval=2, checkpoint=2)
    state = RunState(**json.loads(whole.saved[0]))
    assert (state.finished, state.policy_version) == (2, 2)
    rest, resumed = run(state=state, num_rollouts=5, eval=2, checkpoint=2)
    assert rest.made("push")[0] == ("push", 2)  # the engines start without the adapter
    assert rest.made("update") == [("update", 2), ("update", 3), ("update", 4)]
    assert rest.logged == whole.logged[3:]  # no second evaluation before training
    assert rest.saved[-1] != whole.saved[-1]  # one more sync
    left, right = asdict(resumed.state), asdict(finished.state)
    assert (left.pop("syncs"), right.pop("syncs")) == (7, 6)
    assert (left.pop("sync_seconds"), right.pop("sync_seconds")) == (pytest.approx(1.75), pytest.approx(1.5))
    assert left == right


def test_a_finished_run_has_nothing_left_to_do():
    whole, _ = run(num_rollouts=2, eval=2, checkpoint=2)
    again, _ = run(state=RunState(**json.loads(whole.saved[-1])), num_rollouts=2, eval=2, checkpoint=2)
    assert not again.made("generate", "update", "save")


def test_the_state_survives_json():
    whole, controller = run(num_rollouts=2, eval=1, checkpoint=1)
    assert RunState(**json.loads(whole.saved[-1])) == controller.state


def test_every_part_of_the_loop_is_a_named_phase():
    world, _ = run(num_rollouts=1, eval=1, checkpoint=1)
    phases = {call[1] for call in world.made("phase")}
    assert phases == {"sync", "eval", "score", "media", "rollout", "train", "log", "checkpoint"}


def test_nothing_left_to_train_moves_no_weight_and_the_run_goes_on(caplog):
    world = World()
    world.left_out = set(range(GROUPS * SAMPLES))
    run(world, num_rollouts=2, eval=0)
    assert not any(call[0] == "update" for call in world.calls)
    assert [call for call in world.calls if call[0] == "push"] == [("push", 0)]
    assert "every sample was left out" in caplog.text
    assert world.logged[-1][0] == 2


def test_samples_that_are_left_out_are_not_trained():
    world = World()
    world.left_out = {1, 4}
    run(world, num_rollouts=1, eval=0)
    assert [(item.record_id, item.sample_index) for item in world.items[0]] == [
        ("r0", 0),
        ("r1", 0),
        ("r1", 1),
        ("r2", 1),
    ]


def test_the_averaged_weights_generate_for_nft_and_the_policy_is_validated():
    world = World()
    run(world, num_rollouts=1, loss="nft", eval=1)
    order = [call for call in world.calls if call[0] in ("push", "generate")]
    assert order == [
        ("push", 0, "ema"),
        ("push", 0),
        ("generate", 0, False),
        ("push", 0, "ema"),
        ("generate", 0, True),
        ("push", 1, "ema"),
        ("push", 1),
        ("generate", 1, False),
    ]
