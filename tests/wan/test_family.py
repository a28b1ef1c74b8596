"""A model folder is known by what its files say, and every fault of it is told at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_wan.errors import InputError
from miles_wan.tiny import TinyPaths
from miles_wan.wan.family import (
    FAMILIES,
    check_model_folder,
    family_named,
    legal_frames,
    legal_size,
    load_family,
    looks_like_hub_id,
    resolve_model,
)

TI2V, T2V, I2V = (FAMILIES[name] for name in ("wan2.2-ti2v-5b", "wan2.2-t2v-a14b", "wan2.2-i2v-a14b"))


@pytest.fixture
def folder(tiny_paths: TinyPaths, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that may be damaged. Its name says nothing about the model."""
    return Path(shutil.copytree(tiny_paths.model, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; the value ``...`` removes the key."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def make_a14b(folder: Path, *, in_channels: int, pipeline: str) -> None:
    """Turn the configuration files of a TI2V copy into those of a two-expert model."""
    edit(folder / "transformer" / "config.json", in_channels=in_channels, out_channels=16)
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    edit(folder / "vae" / "config.json", z_dim=16, scale_factor_spatial=8)
    edit(
        folder / "model_index.json",
        _class_name=pipeline,
        transformer_2=["diffusers", "WanTransformer3DModel"],
        boundary_ratio=0.9,
        expand_timesteps=False,
    )


def only_fault(folder: Path) -> str:
    faults = check_model_folder(folder)
    assert len(faults) == 1, faults
    with pytest.raises(InputError) as raised:
        load_family(folder)
    assert list(raised.value.faults) == faults
    return faults[0]


# --- which model it is


def test_the_tiny_checkpoint_is_a_ti2v_whatever_its_folder_is_called(folder: Path) -> None:
    model = load_family(folder)
    assert model.family is TI2V
    assert model.expand_timesteps is True
    assert model.boundary_ratio is None
    assert model.experts == ("transformer",)
    assert not model.is_full_size
    assert check_model_folder(folder) == []


@pytest.mark.parametrize(
    ("in_channels", "pipeline", "family"), [(16, "WanPipeline", T2V), (36, "WanImageToVideoPipeline", I2V)]
)
def test_two_experts_are_told_apart_by_their_input_channels(
    folder: Path, in_channels: int, pipeline: str, family: object
) -> None:
    make_a14b(folder, in_channels=in_channels, pipeline=pipeline)
    model = load_family(folder)
    assert model.family is family
    assert model.boundary_ratio == 0.9
    assert model.experts == ("transformer", "transformer_2")
    assert model.expand_timesteps is False


@pytest.mark.parametrize("value", [..., False, None])
def test_48_channels_without_expand_timesteps_contradict(folder: Path, value: object) -> None:
    edit(folder / "model_index.json", expand_timesteps=value)
    fault = only_fault(folder)
    assert "expand_timesteps" in fault
    assert "model_index.json" in fault
    assert "wan2.2-ti2v-5b" in fault


def test_expand_timesteps_of_the_transformer_configuration_counts_for_nothing(folder: Path) -> None:
    edit(folder / "model_index.json", expand_timesteps=...)
    edit(folder / "transformer" / "config.json", expand_timesteps=True)
    assert "missing (that means false)" in only_fault(folder)


def test_expand_timesteps_with_16_channels_contradicts(folder: Path) -> None:
    make_a14b(folder, in_channels=16, pipeline="WanPipeline")
    edit(folder / "model_index.json", expand_timesteps=True)
    assert "expand_timesteps is True" in only_fault(folder)


def test_expand_timesteps_missing_is_false_for_a14b(folder: Path) -> None:
    make_a14b(folder, in_channels=16, pipeline="WanPipeline")
    edit(folder / "model_index.json", expand_timesteps=...)
    assert load_family(folder).expand_timesteps is False


def test_a_single_expert_with_16_channels_is_unsupported_and_the_supported_ones_are_named(folder: Path) -> None:
    edit(folder / "transformer" / "config.json", in_channels=16, out_channels=16)
    edit(folder / "model_index.json", expand_timesteps=False)
    fault = only_fault(folder)
    assert all(name in fault for name in FAMILIES)


def test_a_vae_of_another_model_contradicts(folder: Path) -> None:
    edit(folder / "vae" / "config.json", z_dim=16, scale_factor_spatial=8)
    faults = check_model_folder(folder)
    assert len(faults) == 2
    assert "z_dim is 16; wan2.2-ti2v-5b has 48" in faults[0]
    assert "scale_factor_spatial is 8; wan2.2-ti2v-5b has 16" in faults[1]


def test_two_experts_need_a_boundary_and_one_has_none(folder: Path, tmp_path: Path) -> None:
    edit(folder / "model_index.json", boundary_ratio=0.9)
    assert "boundary_ratio is 0.9, but there is only one expert" in only_fault(folder)
    make_a14b(folder, in_channels=16, pipeline="WanPipeline")
    edit(folder / "model_index.json", boundary_ratio=None)
    assert "0.875 as released" in only_fault(folder)


def test_experts_of_two_sizes_are_not_one_model(folder: Path) -> None:
    make_a14b(folder, in_channels=16, pipeline="WanPipeline")
    edit(folder / "transformer_2" / "config.json", num_layers=7)
    assert "num_layers" in only_fault(folder)


# --- damaged folders


def test_no_folder(tmp_path: Path) -> None:
    assert "no such model folder" in only_fault(tmp_path / "absent")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file" in only_fault(tmp_path / "file")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "model_index.json").unlink(), ("model_index.json", "missing")),
        (lambda f: (f / "model_index.json").write_text("{"), ("model_index.json", "not readable JSON")),
        (lambda f: (f / "model_index.json").write_text("[1]"), ("model_index.json", "list")),
        (lambda f: shutil.rmtree(f / "vae"), ("/vae", "missing")),
        (lambda f: shutil.rmtree(f / "tokenizer"), ("/tokenizer", "missing")),
        (lambda f: shutil.rmtree(f / "scheduler"), ("/scheduler", "missing")),
        (lambda f: empty(f / "text_encoder"), ("/text_encoder", "empty")),
        (lambda f: (f / "transformer" / "config.json").unlink(), ("transformer/config.json", "missing")),
        (lambda f: (f / "vae" / "diffusion_pytorch_model.safetensors").unlink(), ("/vae", "no weights")),
        (lambda f: (f / "tokenizer" / "tokenizer.json").unlink(), ("/tokenizer", "no vocabulary")),
        (lambda f: truncate(f / "vae" / "diffusion_pytorch_model.safetensors"), ("/vae/", "not a whole weight file")),
        (lambda f: lose_a_shard(f / "transformer"), ("/transformer", "1 of 2 weight files", "b.safetensors")),
        (lambda f: edit(f / "model_index.json", vae=[None, None]), ("model_index.json", "names no vae")),
        (lambda f: edit(f / "model_index.json", _class_name="FluxPipeline"), ("FluxPipeline", "WanPipeline")),
    ],
)
def test_a_damaged_folder_is_one_clear_fault(
    folder: Path, damage: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    damage(folder)
    fault = only_fault(folder)
    assert str(folder) in fault
    assert all(word in fault for word in words)


def test_all_faults_are_told_together(folder: Path) -> None:
    shutil.rmtree(folder / "vae")
    empty(folder / "text_encoder")
    (folder / "scheduler" / "scheduler_config.json").unlink()
    assert len(check_model_folder(folder)) == 3


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def truncate(file: Path) -> None:
    """What an interrupted download leaves."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def lose_a_shard(folder: Path) -> None:
    weights = next(folder.glob("*.safetensors"))
    weights.rename(folder / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


# --- what is legal


@pytest.mark.parametrize("frames", [1, 5, 81, 121])
def test_4n_plus_1_frames_are_legal(frames: int) -> None:
    assert legal_frames(frames, TI2V) is None


@pytest.mark.parametrize(
    ("frames", "nearest"), [(6, "5 and 9"), (120, "117 and 121"), (2, "1 and 5"), (84, "81 and 85")]
)
def test_other_frame_counts_name_the_nearest_legal_ones(frames: int, nearest: str) -> None:
    fault = legal_frames(frames, TI2V)
    assert fault is not None
    assert fault.startswith(f"{frames} frames")
    assert fault.endswith(nearest)


def test_one_frame_with_an_image_leaves_nothing_to_sample() -> None:
    assert "at least 5 frames" in str(legal_frames(1, TI2V, with_image=True))
    assert str(legal_frames(3, TI2V, with_image=True)).endswith("values are 5")


@pytest.mark.parametrize(
    ("width", "height", "family"), [(1280, 704, TI2V), (32, 64, TI2V), (1280, 720, T2V), (832, 480, I2V)]
)
def test_multiples_of_vae_stride_and_patch_are_legal(width: int, height: int, family: object) -> None:
    assert legal_size(width, height, family) is None  # type: ignore[arg-type]


def test_other_sizes_name_the_nearest_legal_ones() -> None:
    fault = legal_size(1280, 720, TI2V)
    assert fault is not None
    assert "multiples of 32" in fault
    assert fault.endswith("height 720 -> 704 and 736")
    assert str(legal_size(100, 8, TI2V)).endswith("width 100 -> 96 and 128, height 8 -> 32")
    assert "width 1000 -> 992 and 1008" in str(legal_size(1000, 720, T2V))


# --- the facts


@pytest.mark.parametrize(
    ("family", "parameters"), [(TI2V, 4_999_787_712), (T2V, 14_288_491_584), (I2V, 14_288_901_184)]
)
def test_the_full_size_transformer_has_the_released_number_of_parameters(family: object, parameters: int) -> None:
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(**family.transformer)  # type: ignore[attr-defined]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_the_latent_shape_is_what_the_vae_gives(tiny_paths: TinyPaths) -> None:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(tiny_paths.model / "vae")
    with torch.no_grad():
        latent = vae.encode(torch.zeros(1, 3, 9, 64, 96)).latent_dist.mode()
    assert TI2V.latent_shape(9, 64, 96) == tuple(latent.shape[1:])


def test_an_unknown_family_names_the_known_ones() -> None:
    assert family_named("wan2.2-ti2v-5b") is TI2V
    with pytest.raises(InputError, match=r"'wan3'.*wan2\.2-ti2v-5b, wan2\.2-t2v-a14b, wan2\.2-i2v-a14b"):
        family_named("wan3")


# --- where it is


def test_an_existing_folder_is_taken_before_any_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    relative = f"{folder.parent.name}/{folder.name}"
    assert looks_like_hub_id(relative)
    assert resolve_model(relative) == Path(relative)


@pytest.mark.parametrize("value", ["/absent/model", "model", "a/b/c", "./a/b", "a b/c", "../x"])
def test_a_path_that_does_not_exist_is_no_hub_id(value: str) -> None:
    with pytest.raises(InputError, match="no such folder"):
        resolve_model(value)


def test_a_hub_id_that_cannot_be_fetched_is_a_clear_fault() -> None:
    with pytest.raises(InputError) as raised:  # the tests run with HF_HUB_OFFLINE
        resolve_model("some-organisation/Wan2.2-TI2V-5B-Diffusers")
    (fault,) = raised.value.faults
    assert "some-organisation/Wan2.2-TI2V-5B-Diffusers" in fault
    assert "HF_HUB_OFFLINE" in fault
