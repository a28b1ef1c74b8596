"""What a model with two experts, or one that needs images, asks of a configuration is told before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_cases import faults_of, only_fault
from safetensors.torch import load_file, save_file

from miles_wan.config import Config
from miles_wan.doctor import check
from miles_wan.errors import InputError
from miles_wan.parity.inputs import check_inputs
from miles_wan.supervised.model_check import model_faults
from miles_wan.supervised.settings import plan, read_settings
from miles_wan.tiny import TinyPaths
from miles_wan.wan.family import load_family
from miles_wan.wan.lora import add_adapters, save_adapter, trainable_parameters
from miles_wan.wan.model import meta_model


def use(tree: dict[str, Any], paths: TinyPaths, **rollout: Any) -> dict[str, Any]:
    tree["model"]["path"] = str(paths.model)
    tree["data"] = {"train": str(paths.train_jsonl), "eval": str(paths.eval_jsonl)}
    tree["rollout"] |= {"guidance_scale": 4.0, "guidance_scale_2": 3.0, "num_inference_steps": 10, **rollout}
    return tree


@pytest.fixture
def t2v(tree: dict[str, Any], t2v_paths: TinyPaths) -> dict[str, Any]:
    """A configuration without a fault. Shift 5, 10 steps, boundary .875: steps 0 to 3 are high noise."""
    return use(tree, t2v_paths)


def test_both_families_pass(t2v: dict[str, Any], i2v_paths: TinyPaths) -> None:
    assert check(Config.model_validate(t2v)).model.family.name == "wan2.2-t2v-a14b"
    assert check(Config.model_validate(use(t2v, i2v_paths))).model.family.name == "wan2.2-i2v-a14b"


def test_a_second_guidance_scale_is_needed_and_has_no_default(t2v: dict[str, Any]) -> None:
    del t2v["rollout"]["guidance_scale_2"]
    assert only_fault(t2v) == (
        "rollout.guidance_scale, rollout.guidance_scale_2: 2 expert(s) with guidance scales 4 and None: give one for each "
        "(wan2.2-t2v-a14b was released with 4 and 3)"
    )


def test_one_expert_takes_one_guidance_scale(tree: dict[str, Any]) -> None:
    tree["rollout"]["guidance_scale_2"] = 3.0
    assert only_fault(tree).endswith(" and 3.0: give one for each (wan2.2-ti2v-5b was released with 5)")


def test_guidance_is_on_for_both_or_for_neither(t2v: dict[str, Any]) -> None:
    t2v["rollout"]["guidance_scale_2"] = 1.0
    assert "guidance is on for both experts" in only_fault(t2v)
    t2v["rollout"]["guidance_scale"] = 1.0
    check(Config.model_validate(t2v))


def test_the_steps_are_those_of_the_trained_expert(t2v: dict[str, Any]) -> None:
    t2v["model"]["train_experts"] = "high"
    fault = only_fault(t2v)
    assert "steps 4 to 8 of rollout.window_range belong to the expert that is not trained" in fault
    assert "high 0 to 3, low 4 to 9" in fault
    t2v["rollout"]["window_range"] = [0, 4]
    check(Config.model_validate(t2v))
    t2v["model"]["train_experts"] = "low"
    assert any("steps 0 to 3" in fault for fault in faults_of(t2v))
    t2v["rollout"]["window_range"] = [4, 9]
    check(Config.model_validate(t2v))


def test_an_expert_that_would_never_be_trained_is_named(t2v: dict[str, Any]) -> None:
    t2v["rollout"]["window_range"] = [0, 4]
    fault = only_fault(t2v)
    assert "no step of rollout.window_range belongs to the expert of low noise, which would never be trained" in fault
    t2v["rollout"] |= {"window_range": None, "step_selection": "given", "steps": [5, 6]}
    assert "no step of rollout.steps belongs to the expert of high noise" in only_fault(t2v)


def test_forward_process_training_needs_levels_of_the_trained_expert(t2v: dict[str, Any]) -> None:
    t2v["rollout"] |= {"sampler": "ode", "guidance_scale": 1.0, "guidance_scale_2": 1.0}
    t2v["algorithm"] = {"loss": "nft", "nft": {"sigmas_per_sample": 5}}
    t2v["training"] = {"ema_decay": 0.9}
    t2v["model"]["train_experts"] = "high"
    assert "sigmas_per_sample = 5: the trained experts have 4 steps" in only_fault(t2v)


def test_one_expert_has_no_half(tree: dict[str, Any]) -> None:
    tree["model"]["train_experts"] = "low"
    assert "there is no expert of low noise in a model with a single transformer" in only_fault(tree)


def test_records_and_model_agree_about_images(t2v: dict[str, Any], i2v_paths: TinyPaths, t2v_paths: TinyPaths) -> None:
    t2v["data"] = {"train": str(i2v_paths.train_jsonl)}
    t2v["eval"]["interval"] = 0
    fault = only_fault(t2v)
    assert fault.startswith("64 of 64 records have a first image, which it does not take")
    use(t2v, i2v_paths)["data"] = {"train": str(t2v_paths.train_jsonl)}
    assert "64 of 64 records have no first image, which it needs" in only_fault(t2v)


def test_weights_of_the_second_expert_are_checked_too(t2v: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(t2v["model"]["path"], tmp_path / "model"))
    t2v["model"]["path"] = str(folder)
    (file,) = (folder / "transformer_2").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["blocks.0.attn1.to_q.weight"]
    save_file(tensors, file)
    assert f"{folder / 'transformer_2'}: the weights do not fit config.json (1 missing" in only_fault(t2v)


def test_a_start_adapter_of_one_expert_alone_is_not_enough_for_both(t2v: dict[str, Any], tmp_path: Path) -> None:
    t2v["model"]["init_adapter"] = str(tmp_path)
    faults = faults_of(t2v)
    assert [fault.split(": ")[1] for fault in faults] == [
        str(tmp_path / name) for name in ("transformer", "transformer_2")
    ]


def test_a_start_adapter_of_an_expert_that_is_not_trained_is_not_left_out_silently(
    t2v: dict[str, Any], tmp_path: Path
) -> None:
    folder, adapters = load_family(Path(t2v["model"]["path"])), tmp_path / "adapter"
    settings = Config.model_validate(t2v).model
    model = meta_model(folder, dtype="fp32")
    add_adapters(model, settings, names=model.names, seed=0)
    for name, transformer in model.items():
        tensors = {key: torch.zeros(tensor.shape) for key, tensor in trainable_parameters(transformer)}
        save_adapter(adapters / name, tensors, rank=settings.lora_rank, alpha=settings.lora_alpha)
    t2v["model"] |= {"init_adapter": str(adapters), "train_experts": "low"}
    t2v["rollout"]["window_range"] = [4, 9]
    fault = only_fault(t2v)
    assert fault.startswith(f"model.init_adapter: {adapters / 'transformer'} is the adapter of an expert that is not")
    assert "(model.train_experts = low)" in fault
    assert "merge it into the checkpoint (miles-wan export), train both experts, or move this folder away" in fault
    config = Config.model_validate(t2v)
    with pytest.raises(InputError) as raised:
        check_inputs(config, records=1, samples=1)  # of the parity command
    assert raised.value.faults == (fault,)
    supervised = read_settings([], {"model": t2v["model"], "data.train": "t"})
    assert model_faults(supervised, folder, plan(supervised, folder), device_bytes=None) == [fault]
    with pytest.raises(InputError) as raised:
        add_adapters(meta_model(folder, dtype="fp32"), config.model, names=["transformer_2"], seed=0)
    assert raised.value.faults == (fault,)
    shutil.rmtree(adapters / "transformer")
    check(config)
    assert model_faults(supervised, folder, plan(supervised, folder), device_bytes=None) == []
