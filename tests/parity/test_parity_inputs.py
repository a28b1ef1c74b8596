"""What a parity check makes of a run's configuration."""

from __future__ import annotations

from miles_wan.cluster.requests import RequestPlanner
from miles_wan.configuration import load_config, recipe_paths
from miles_wan.parity.inputs import for_parity
from miles_wan.records import PromptRecord


def test_a_run_without_noise_is_checked_in_every_step_that_may_be_stochastic() -> None:
    overrides = {"model.path": "m", "data.train": "t", "data.eval": "e", "rollout.num_inference_steps": 4}
    overrides |= {"training.micro_batch_size": 1}
    config = load_config(recipe_paths("tiny_ti2v,nft"), overrides)  # its window_range [0, 4] is not read by nft
    planned = for_parity(config, records=1, samples=2)
    (request,) = RequestPlanner(planned, [PromptRecord("r", "p")], ()).training(0, policy_version=2)
    assert request.sampling.kind == "flow_sde"
    assert request.stochastic_steps == (0, 1, 2)
    assert len(request.seeds) == 2


def test_a_run_with_noise_is_checked_in_its_own_steps() -> None:
    overrides = {"model.path": "m", "data.train": "t", "data.eval": "e"}
    planned = for_parity(load_config(recipe_paths("tiny_ti2v"), overrides), records=2, samples=1)
    requests = RequestPlanner(planned, [PromptRecord(f"r{n}", "p") for n in range(2)], ()).training(0, policy_version=2)
    assert [len(request.stochastic_steps) for request in requests] == [3, 3]
