"""Configuration: every fault together, with the place and the remedy, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from miles_wan.combinations import batch_equation, check_config
from miles_wan.config import Config
from miles_wan.configuration import (
    RECIPES,
    all_fields,
    dump_config,
    load_config,
    recipe_names,
    recipe_paths,
)
from miles_wan.errors import InputError
from miles_wan.flow import shifted_sigmas
from miles_wan.wan.experts import Experts
from miles_wan.wan.facts import family_named, legal_frames, legal_size

NEEDED = {"model.path": "model", "data.train": "train.jsonl"}
BATCH = {
    "rollout.prompts_per_rollout": 4,
    "rollout.samples_per_prompt": 6,
    "rollout.window_size": 3,
    "algorithm.optimizer_steps_per_rollout": 2,
    "training.dp_size": 2,
    "training.micro_batch_size": 9,
    "cluster.num_gpus": 2,
}


def listed(recipe: Path | Sequence[Path] | None) -> Sequence[Path]:
    return () if recipe is None else [recipe] if isinstance(recipe, Path) else recipe


def load(*args: str, recipe: Path | Sequence[Path] | None = None, **overrides) -> Config:
    return load_config(listed(recipe), {**NEEDED, **overrides}, list(args))


def faults(*args: str, needed=NEEDED, recipe: Path | Sequence[Path] | None = None, **overrides) -> tuple[str, ...]:
    with pytest.raises(InputError) as error:
        load_config(listed(recipe), {**needed, **overrides}, list(args))
    return error.value.faults


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_overrides_win_over_the_recipe_and_the_command_line_over_both(tmp_path):
    recipe = write(tmp_path, "seed: 1\nnum_rollouts: 2\nrollout: {fps: 3, width: 64}\n")
    config = load("--seed", "5", "--rollout.fps=9", recipe=recipe, seed=4, num_rollouts=7)
    assert (config.seed, config.num_rollouts, config.rollout.fps, config.rollout.width) == (5, 7, 9, 64)


def test_command_line_values_have_the_type_of_their_field():
    config = load(
        "--algorithm.clip-range", "1e-3",
        "--rollout.window-range", "[0, 4]",
        "--algorithm.advantage-sign", "-1",
        "--training.activation-checkpointing=false",
        "--model.lora-targets", "[to_q, to_k]",
        "--training.optimizer.betas", "[0.8, 0.9]",
        "--eval.max-records", "null",
        "--output-dir", "runs/a b",
    )  # fmt: skip
    assert config.algorithm.clip_range == 1e-3
    assert config.rollout.window_range == (0, 4)
    assert config.algorithm.advantage_sign == -1
    assert config.training.activation_checkpointing is False
    assert config.model.lora_targets == ("to_q", "to_k")
    assert config.training.optimizer.betas == (0.8, 0.9)
    assert config.eval.max_records is None
    assert config.output_dir == "runs/a b"


def test_one_field_of_a_listed_reward_can_be_overridden(tmp_path):
    recipe = write(tmp_path, "reward: {functions: [{name: pickscore}, {name: 'mine:score', weight: 0}]}\n")
    config = load("--reward.functions.1.weight", "0.5", recipe=recipe, reward_model="folder")
    first, second = config.reward.functions
    assert (first.model, first.processor) == ("folder", "folder")
    assert (second.weight, second.model) == (0.5, "")


def test_parallel_sizes_follow_the_number_of_devices():
    config = load("--cluster.num-gpus", "4")
    assert (config.rollout.tp_size, config.training.dp_size) == (4, 4)
    config = load("--cluster.num-gpus", "8", "--rollout.num-engines", "2", "--rollout.sp-size", "2")
    assert config.rollout.tp_size == 2
    assert load("--cluster.num-gpus", "4", "--rollout.tp-size", "1", "--training.dp-size", "2").training.dp_size == 2


def test_unknown_keys_are_faults_with_the_nearest_name(tmp_path):
    recipe = write(tmp_path, "rollout: {num_inference_step: 4}\nalgorithm: {clip_rang: 1}\nzzz: 1\n")
    found = faults("--training.optimizer.learning_rate_", "1", recipe=recipe)
    assert "rollout.num_inference_step: no such field; did you mean rollout.num_inference_steps?" in found
    assert "algorithm.clip_rang: no such field; did you mean algorithm.clip_range?" in found
    assert "zzz: no such field" in found
    assert any(fault.startswith("training.optimizer.learning_rate_: no such field") for fault in found)


def test_faults_of_every_source_come_together(tmp_path):
    recipe = write(tmp_path, "rollout: {fps: fast, noise_level: -1}\nsead: 3\n")
    found = faults("stray", "--seed", "--num_rollouts", "0", needed={}, recipe=recipe)
    expected = [
        "'stray': expected a flag",
        "--seed: a value is missing",
        "model: required and not given; pass --model",
        "data: required and not given; pass --data-jsonl",
        "rollout.fps = 'fast'",
        "rollout.noise_level = -1: input should be greater than 0",
        "num_rollouts = 0: input should be greater than or equal to 1",
        "sead: no such field; did you mean seed?",
    ]
    for start in expected:
        assert any(fault.startswith(start) for fault in found), start
    assert len(found) == len(expected)


def test_nan_is_not_a_number_here():
    assert faults("--training.optimizer.lr", ".nan")


def test_a_section_that_comes_twice_in_a_recipe_is_refused(tmp_path):
    recipe = tmp_path / "twice.yaml"
    recipe.write_text("rollout: {width: 32}\nseed: 1\nrollout: {height: 32}\n")
    with pytest.raises(InputError, match="rollout comes twice"):
        load_config([recipe], NEEDED)


@pytest.mark.parametrize("text", ["- a\n- b\n", "", "a: [1\n", "just words"])
def test_a_file_that_is_no_recipe_is_refused_by_name(tmp_path, text):
    recipe = write(tmp_path, text)
    assert any(f"recipe {recipe}: " in fault for fault in faults(recipe=recipe))


def test_a_recipe_is_found_by_name_or_path(tmp_path):
    assert recipe_paths("tiny_ti2v") == (RECIPES / "tiny_ti2v.yaml",)
    mine = write(tmp_path, "seed: 1\n")
    assert recipe_paths(str(mine)) == (mine,)
    with pytest.raises(
        InputError,
        match="no such recipe; recipes are tiny_a14b, tiny_ti2v, toy_world, wan22_i2v_a14b, wan22_t2v_a14b, wan22_ti2v_5b, and",
    ):
        recipe_paths("nothing")


def test_the_batch_equation_states_this_runs_numbers():
    assert batch_equation(load(**BATCH)) == (
        "4 prompts x 6 samples per prompt = 24 samples = 12 samples per optimizer step x 2 optimizer steps; "
        "a step has 6 samples x 3 kept steps = 18 pairs on each of 2 ranks, in 2 micro-batches of 9"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.optimizer_steps_per_rollout": 5}, "= 24 is not divisible by algorithm.optimizer_steps_per_rollout = 5"),
        ({"training.dp_size": 5, "cluster.num_gpus": 5}, "24 / 2 optimizer steps = 12 is not divisible by training.dp_size = 5"),
        ({"training.micro_batch_size": 4}, "= 4 does not divide the 18 (sample, step) pairs of a rank and optimizer step; it can be 1, 2, 3, 6, 9, 18"),
        ({"rollout.window_range": [0, 10]}, "rollout.window_range = [0, 10) must lie in steps [0, 9)"),
        ({"rollout.window_range": [4, 4]}, "must lie in steps"),
        ({"rollout.window_range": [-1, 4]}, "must lie in steps"),
        ({"rollout.window_range": [2, 4]}, "rollout.window_size = 3 does not fit into the 2 steps [2, 4)"),
        ({"rollout.num_inference_steps": 3}, "rollout.window_size = 3 does not fit into the 2 steps [0, 2)"),
        ({"rollout.num_engines": 3, "rollout.tp_size": 1}, "rollout.num_engines x tp_size x sp_size = 3 devices, cluster.num_gpus is 2"),
        ({"rollout.tp_size": 2, "rollout.sp_size": 2}, "= 4 devices, cluster.num_gpus is 2"),
        ({"training.dp_size": 4}, "training.dp_size = 4 is above cluster.num_gpus = 2"),
        ({"cluster.device": "cpu", "cluster.cuda_visible_devices": "0,1"}, "cluster.cuda_visible_devices = '0,1' with cluster.device = cpu"),
        ({"cluster.cuda_visible_devices": "3,"}, "lists fewer than cluster.num_gpus = 2 devices"),
        ({"cluster.device": "cpu", "sync.transport": "cuda_ipc"}, "sync.transport = cuda_ipc needs cluster.device = cuda"),
        ({"eval.interval": 5}, "eval.interval = 5 needs validation records: give data.eval (--eval-data-jsonl)"),
        ({"reward.functions": [{"name": "a:b"}, {"name": "a:b"}]}, "reward.functions: names must differ, got a:b, a:b"),
        ({"reward.functions": [{"name": "a:b", "weight": 0}]}, "every weight is 0"),
        ({"reward.functions": []}, "every weight is 0"),
        ({"rollout.sampler": "cps", "rollout.noise_level": 1.2}, "rollout.noise_level = 1.2 with sampler cps: at most 1"),
    ],
)  # fmt: skip
def test_an_illegal_combination_is_one_fault_with_its_numbers(changes, message):
    found = faults(**{**BATCH, **changes})
    assert any(message in fault for fault in found), found


def test_the_legal_neighbours_of_those_are_accepted():
    assert check_config(load(**BATCH)) == []
    load(**{**BATCH, "eval.interval": 5, "data.eval": "eval.jsonl"})
    load(**{**BATCH, "cluster.cuda_visible_devices": "4,5,6"})
    load(**{**BATCH, "rollout.sampler": "cps", "rollout.noise_level": 1.0})
    load(**{**BATCH, "rollout.window_range": [0, 9]})


NFT = {
    "algorithm.loss": "nft",
    "rollout.sampler": "ode",
    "rollout.guidance_scale": 1.0,
    "training.ema_decay": 0.5,
}
LOCAL = {"rollout.engine": "local"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout.sampler": "dance_sde"},
            "rollout.sampler = dance_sde: SGLang has no such law; use rollout.engine = local",
        ),
        ({"rollout.sampler": "flow_grpo_wan"}, "rollout.sampler = flow_grpo_wan: SGLang has no such law"),
        (
            {"rollout.sampler": "ode"},
            "algorithm.loss = grpo with rollout.sampler = ode: nft learns from rollouts without noise",
        ),
        ({**NFT, "rollout.sampler": "flow_sde"}, "algorithm.loss = nft with rollout.sampler = flow_sde"),
        ({**NFT, "rollout.guidance_scale": 5.0}, "rollout.guidance_scale = 5 with algorithm.loss = nft"),
        ({**NFT, "training.ema_decay": None}, "its old policy is an average of the adapter; set training.ema_decay"),
        ({**NFT, "algorithm.kl_beta": 0.1}, "algorithm.kl_beta with loss nft"),
        ({**NFT, "algorithm.nft.sigmas_per_sample": 11}, "sigmas_per_sample = 11 of the 10 sigmas of the grid"),
        ({**NFT, "algorithm.step_weight": "noise_level"}, "algorithm.step_weight = noise_level with loss nft"),
        (
            {"algorithm.loss": "guard", "algorithm.step_weight": "noise_level"},
            "algorithm.step_weight = noise_level with loss guard",
        ),
        ({"rollout.cps_log_prob": "squared_error"}, "rollout.cps_log_prob = squared_error with sampler flow_sde"),
        (
            {"algorithm.loss": "dppo", "rollout.sampler": "cps", "rollout.cps_log_prob": "squared_error"},
            "rollout.cps_log_prob = squared_error with loss dppo: it needs the density",
        ),
        ({"algorithm.kl_reference": "ema"}, "algorithm.kl_reference = ema needs training.ema_decay"),
        ({"eval.weights": "ema"}, "eval.weights = ema needs training.ema_decay"),
        ({"training.ema_rise": 0.001}, "training.ema_rise = 0.001 needs training.ema_decay"),
        ({"rollout.steps": [1, 2]}, "rollout.steps = [1, 2] with step_selection = window; set that to given"),
        (
            {"rollout.step_selection": "given"},
            "rollout.steps = []: step_selection = given needs different steps in [0, 9)",
        ),
        (
            {"rollout.step_selection": "given", "rollout.steps": [1, 9]},
            "rollout.steps = [1, 9]: step_selection = given",
        ),
        ({"rollout.sigmas": [1.0, 0.5, 0.0]}, "rollout.sigmas: 3 values, rollout.num_inference_steps + 1 = 11"),
        ({"rollout.sigmas": [1.0] * 11}, "it does not fall"),
        (
            {"algorithm.best_of_n": 1, "algorithm.optimizer_steps_per_rollout": 3},
            "2 algorithm.best_of_n = 8 is not divisible",
        ),
        (
            {"deterministic": True, "rollout.server_args": ["--attention-backend", "fa"]},
            "rollout.server_args chooses an attention backend and deterministic = true",
        ),
    ],
)
def test_settings_of_algorithms_and_samplers_that_do_not_go_together(changes, message):
    found = faults(**{**BATCH, "training.micro_batch_size": 1, **changes})
    assert any(message in fault for fault in found), found


def test_the_local_engine_has_every_law_and_needs_no_device_of_its_own():
    load(**{**BATCH, **LOCAL, "rollout.sampler": "dance_sde"})
    load(**{**BATCH, **LOCAL, "rollout.num_engines": 9})


@pytest.mark.parametrize(
    ("changes", "pairs"),
    [
        ({}, "6 samples x 3 kept steps = 18 pairs"),
        ({"rollout.step_selection": "all"}, "6 samples x 9 kept steps = 54 pairs"),
        ({"rollout.step_selection": "given", "rollout.steps": [0, 4]}, "6 samples x 2 kept steps = 12 pairs"),
        ({"rollout.step_selection": "subset"}, "6 samples x 3 kept steps = 18 pairs"),
        ({**NFT, "algorithm.nft.sigmas_per_sample": 4}, "6 samples x 4 noise levels = 24 pairs"),
        ({"algorithm.best_of_n": 1}, "2 samples x 3 kept steps = 6 pairs"),
    ],
)
def test_the_batch_equation_counts_what_is_trained(changes, pairs):
    assert pairs in batch_equation(load(**{**BATCH, "training.micro_batch_size": 1, **changes}))


def test_independent_illegal_combinations_come_together():
    found = faults(**{**BATCH, "training.micro_batch_size": 4, "eval.interval": 5, "rollout.window_range": [0, 99]})
    assert len(found) == 3


def test_a_dumped_configuration_loads_equal(tmp_path):
    config = load("--rollout.window-range", "[0, 4]", "--model.init-adapter", "some folder", **BATCH)
    path = tmp_path / "config.yaml"
    dump_config(config, path)
    assert load_config([path], {}) == config
    assert yaml.safe_load(path.read_text())["rollout"]["window_range"] == [0, 4]


def test_a_home_folder_is_expanded():
    assert load("--output-dir", "~/run").output_dir == str(Path.home() / "run")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name):
    config = load(recipe=recipe_paths(name), **{"data.eval": "eval.jsonl"})
    assert config.eval.interval > 0
    assert config.checkpoint.interval > 0
    assert "micro-batches" in batch_equation(config)


@pytest.mark.parametrize("base", recipe_names())
@pytest.mark.parametrize("algorithm", recipe_names("algorithms"))
def test_every_algorithm_goes_with_every_recipe(algorithm, base):
    plain = load(recipe=recipe_paths(base), **{"data.eval": "eval.jsonl"})
    config = load(recipe=recipe_paths(f"{base},{algorithm}"), **{"data.eval": "eval.jsonl"})
    assert config != plain
    assert config.rollout.num_inference_steps == plain.rollout.num_inference_steps


def test_a_later_recipe_goes_over_an_earlier_one_section_by_section(tmp_path):
    first = write(
        tmp_path, "seed: 1\nrollout: {fps: 3, width: 64}\nreward: {functions: [{name: pickscore}, {name: clip}]}\n"
    )
    second = tmp_path / "second.yaml"
    second.write_text("rollout: {fps: 9}\nreward: {functions: [{name: clip}]}\n")
    config = load(recipe=recipe_paths(f"{first},{second}"))
    assert (config.seed, config.rollout.fps, config.rollout.width) == (1, 9, 64)
    assert [function.name for function in config.reward.functions] == ["clip"]


def test_every_recipe_that_is_missing_is_named():
    with pytest.raises(InputError) as caught:
        recipe_paths("tiny_ti2v,nothing,nowhere")
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["--recipe nothing", "--recipe nowhere"]


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("wan22_ti2v_5b", "wan2.2-ti2v-5b"),
        ("wan22_t2v_a14b", "wan2.2-t2v-a14b"),
        ("wan22_i2v_a14b", "wan2.2-i2v-a14b"),
    ],
)
def test_the_recipes_for_real_weights_are_at_sizes_they_were_trained_on(recipe, name):
    config = load(recipe=recipe_paths(recipe), **{"data.eval": "eval.jsonl"})
    family, rollout = family_named(name), config.rollout
    assert (rollout.width, rollout.height) in family.trained_sizes
    assert legal_size(rollout.width, rollout.height, family) is None
    assert legal_frames(rollout.num_frames, family, with_image=True) is None
    # T2V at 480 pixels is made with a shift of 3 to 5, not with the 12 of large sizes.
    assert rollout.flow_shift == family.flow_shift or (name == "wan2.2-t2v-a14b" and 3 <= rollout.flow_shift <= 5)
    experts = Experts(family.experts, family.boundary_ratio)
    experts.guidance(rollout.guidance_scale, rollout.guidance_scale_2)
    trained = {
        experts.of(1000 * float(s)) for s in shifted_sigmas(10, rollout.flow_shift)[slice(*rollout.window_range)]
    }
    assert len(family.experts) == 1 or trained == set(family.experts)


def test_every_field_is_described_and_listed():
    names = all_fields()
    assert {"model.path", "training.optimizer.lr", "reward.functions.0.weight", "seed"} <= set(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("guard", "--recipe guard: changes a whole recipe; give that one before it (tiny_ti2v,guard)"),
        ("guard,tiny_ti2v", "--recipe guard: changes a whole recipe"),
        ("tiny_ti2v,guard,nft", "--recipe guard,nft: algorithm.loss is 'guard' in one and 'nft' in the other; choose"),
        (",", "--recipe ',' names none; recipes are"),
    ],
)
def test_recipes_that_do_not_go_together_are_refused(names, message):
    with pytest.raises(InputError) as caught:
        recipe_paths(names)
    assert message in " ".join(caught.value.faults)


def test_spaces_and_a_last_comma_between_recipes_do_not_matter():
    assert [path.stem for path in recipe_paths("tiny_ti2v, temp_flow,kl,")] == ["tiny_ti2v", "temp_flow", "kl"]


def test_nft_has_no_stochastic_steps_to_choose():
    found = faults(**{**BATCH, "training.micro_batch_size": 1, **NFT, "rollout.step_selection": "sliding"})
    assert any("rollout.step_selection = sliding with algorithm.loss = nft" in fault for fault in found)
