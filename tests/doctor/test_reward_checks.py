"""Rewards are checked before a run starts: folders, vocabularies, functions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_cases import check, faults_of, only_fault
from safetensors.torch import load_file, save_file

from miles_wan.doctor import rewards


@pytest.mark.parametrize("field", ["model", "processor"])
def test_reward_folders_must_exist(tree: dict[str, Any], tmp_path: Path, field: str) -> None:
    tree["reward"]["functions"][0][field] = str(tmp_path / "absent")
    assert only_fault(tree) == (
        f"reward.functions: pickscore: {field} {tmp_path / 'absent'}: no such folder; give a CLIP folder or a hub id"
    )


@pytest.mark.parametrize(("field", "words"), [("model", "holds no config.json"), ("processor", "holds none of")])
def test_reward_folders_must_hold_what_they_are_for(
    tree: dict[str, Any], tmp_path: Path, field: str, words: str
) -> None:
    tree["reward"]["functions"][0][field] = str(tmp_path)
    assert words in only_fault(tree)


def test_a_reward_folder_must_be_a_whole_clip(tree: dict[str, Any], tmp_path: Path) -> None:
    source, copy = tree["reward"]["functions"][0]["model"], tmp_path / "reward"
    shutil.copytree(source, copy)
    tree["reward"]["functions"][0].update(model=str(copy), processor=str(copy))
    (weights,) = copy.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    (copy / "tokenizer.json").unlink()
    assert "cannot tell texts apart" in faults_of(tree)[1]
    (copy / "tokenizer.json").write_text("{")
    faults = faults_of(tree)
    assert len(faults) == 2
    assert f"{weights}: is not a whole weight file" in faults[0]
    assert "does not load as a CLIP processor" in faults[1]
    (copy / "config.json").write_text('{"model_type": "bert"}')
    assert "is a model of type 'bert'" in faults_of(tree)[0]


def test_the_weights_of_pickscore_must_fit_its_configuration(tree: dict[str, Any], tmp_path: Path) -> None:
    source, copy = tree["reward"]["functions"][0]["model"], tmp_path / "reward"
    shutil.copytree(source, copy)
    tree["reward"]["functions"][0].update(model=str(copy))
    weights = load_file(copy / "model.safetensors")
    more = {**weights, "text_model.embeddings.position_ids": torch.arange(77)[None]}  # as old files have it
    save_file(more, copy / "model.safetensors", metadata={"format": "pt"})
    check(tree)
    del weights["text_projection.weight"]
    save_file({**weights, "logit_scale": torch.ones(2)}, copy / "model.safetensors", metadata={"format": "pt"})
    assert only_fault(tree) == (
        f"reward.functions: pickscore: model {copy}: {copy}: the weights do not fit config.json (1 missing, first "
        "text_projection.weight; 1 of another shape, first logit_scale); download the folder again"
    )
    (copy / "config.json").write_text('{"model_type": "clip", "text_config": {"hidden_size": 7}}')
    assert "config.json describes no CLIP" in only_fault(tree)


def test_hub_ids_of_rewards_are_faults_only_when_they_cannot_come(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["reward"]["functions"] = [{"name": "pickscore"}]  # the released model and processor, by hub id
    monkeypatch.setattr(rewards, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(rewards, "is_offline_mode", lambda: True)
    faults = faults_of(tree)
    assert len(faults) == 2
    assert all("HF_HUB_OFFLINE" in fault for fault in faults)
    monkeypatch.setattr(rewards, "is_offline_mode", lambda: False)
    check(tree)


def test_a_users_reward_must_be_importable(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_for_doctor.py").write_text("def good(batch): return [0.0] * len(batch)\n")
    monkeypatch.syspath_prepend(tmp_path)
    tree["reward"]["functions"] = [{"name": "mine_for_doctor:good"}]
    check(tree)
    tree["reward"]["functions"] = [{"name": "mine_for_doctor:bad"}]
    assert "has no 'bad'" in only_fault(tree)
