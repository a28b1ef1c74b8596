"""The model of the reward clip is checked before a run starts, by headers: each fault is told with its remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_cases import check, faults_of, only_fault
from safetensors.torch import load_file, save_file

from miles_wan.doctor import clip
from miles_wan.tiny import TinyPaths


@pytest.fixture
def folder(tree: dict[str, Any], tiny_paths: TinyPaths, tmp_path: Path) -> Path:
    """A copy of the tiny CLIP that is the only reward of ``tree``."""
    copy = Path(shutil.copytree(tiny_paths.clip, tmp_path / "clip"))
    tree["reward"]["functions"] = [{"name": "clip", "model": str(copy)}]
    return copy


def use(tree: dict[str, Any], model: str) -> None:
    tree["reward"]["functions"] = [{"name": "clip", "model": model}]


def change_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "open_clip_config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_a_whole_folder_has_no_fault(tree: dict[str, Any], folder: Path) -> None:
    check(tree)
    use(tree, f"local-dir:{folder}")
    check(tree)


@pytest.mark.parametrize("model", ["{}/absent", "absent", "local-dir:{}/absent"])
def test_the_folder_must_exist(tree: dict[str, Any], tmp_path: Path, model: str) -> None:
    use(tree, model.format(tmp_path))
    assert only_fault(tree) == (
        f"reward.functions: clip: model {model.format(tmp_path)}: no such folder; give a folder in the format of open_clip "
        "(open_clip_config.json and weights), a hub id or architecture:tag"
    )


def test_a_file_is_no_folder(tree: dict[str, Any], folder: Path) -> None:
    use(tree, str(folder / "open_clip_config.json"))
    assert "is a file; give the folder that holds it" in only_fault(tree)


def test_all_faults_are_told_together(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["reward"]["functions"] = [{"name": "clip", "model": str(tmp_path), "processor": "x"}]
    tree["rollout"]["width"] = 33
    faults = faults_of(tree)
    assert len(faults) == 4
    assert faults[0].startswith("rollout.width, rollout.height: ")
    assert "holds no open_clip_config.json; give a folder in the format of open_clip" in faults[1]
    assert "holds no weights (open_clip_model.safetensors); fetch the model again" in faults[2]
    assert faults[3] == "reward.functions: clip: processor x: the model brings its own; remove this line"


def test_the_format_of_transformers_is_recognised(tree: dict[str, Any], tiny_paths: TinyPaths) -> None:
    use(tree, str(tiny_paths.reward))
    assert "holds no open_clip_config.json (this is the format of transformers; the reward pickscore" in only_fault(
        tree
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "open_clip_config.json is not readable"),
        ("[]", "it is none of open_clip"),
        ('{"model_type": "clip"}', "it is none of open_clip"),
        ('{"model_cfg": {"embed_dim": 16, "vision_cfg": {}}}', "it is none of open_clip"),
        ('{"model_cfg": {"vision_cfg": {}, "text_cfg": {"width": 7}}}', "open_clip_config.json describes no CLIP"),
    ],
)
def test_the_configuration_must_be_one_of_open_clip(tree: dict[str, Any], folder: Path, text: str, words: str) -> None:
    (folder / "open_clip_config.json").write_text(text)
    assert words in only_fault(tree)


def test_weights_must_be_whole(tree: dict[str, Any], folder: Path) -> None:
    weights = folder / "open_clip_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"{weights}: is not a whole weight file" in only_fault(tree)


def test_weights_must_fit_the_configuration(tree: dict[str, Any], folder: Path) -> None:
    file = folder / "open_clip_model.safetensors"
    weights = load_file(file)
    del weights["visual.proj"]
    save_file({**weights, "extra": torch.zeros(1), "ln_final.bias": torch.zeros(9)}, file)
    assert only_fault(tree) == (
        f"reward.functions: clip: model {folder}: {folder}: the weights do not fit open_clip_config.json (1 missing, first "
        "visual.proj; 1 unexpected, first extra; 1 of another shape, first ln_final.bias); download the folder again"
    )
    change_config(folder, lambda config: config["model_cfg"]["text_cfg"].update(width=16))
    assert "of another shape, first ln_final.bias" in only_fault(tree)


def test_a_tokenizer_that_the_configuration_names_must_be_there(tree: dict[str, Any], folder: Path) -> None:
    change_config(folder, lambda config: config["model_cfg"]["text_cfg"].update(hf_tokenizer_name="some/tokenizer"))
    assert "its tokenizer" in only_fault(tree)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("ViT-L14:openai", "open_clip has no architecture 'ViT-L14' (known here: ViT-L-14)"),
        ("ViT-L-14:opnai", "open_clip has no tag 'opnai' (known here: openai)"),
        ("ViT-L-14:zzz", "open_clip has no tag 'zzz' (known here: openai, "),
    ],
)
def test_architecture_and_tag_must_be_known(tree: dict[str, Any], model: str, words: str) -> None:
    use(tree, model)
    assert words in only_fault(tree)


@pytest.mark.parametrize("model", ["ViT-L-14:openai", "some/clip", "hf-hub:some/clip"])
def test_released_models_are_faults_only_when_they_cannot_come(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    use(tree, model)
    cached: set[str] = set()
    monkeypatch.setattr(clip, "try_to_load_from_cache", lambda _, name: name if name in cached else None)
    monkeypatch.setattr(clip, "is_offline_mode", lambda: True)
    assert "is not whole in the cache of the model hub while HF_HUB_OFFLINE is set; give a folder" in only_fault(tree)
    cached.add("open_clip_config.json")
    assert "is not whole" in only_fault(tree)
    cached.add("open_clip_model.safetensors")
    check(tree)
    cached.clear()
    monkeypatch.setattr(clip, "is_offline_mode", lambda: False)
    check(tree)
