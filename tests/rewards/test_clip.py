"""The CLIP score is the cosine that transformers gives for the same weights, over frames spread evenly."""

from __future__ import annotations

import gzip
import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from miles_wan.config import RewardConfig, RewardFunction
from miles_wan.errors import InputError, RewardError
from miles_wan.records import RewardInput
from miles_wan.rewards.clip import ClipReward, from_config, open_clip_source, quiet_open_clip
from miles_wan.rewards.composite import RewardModel
from miles_wan.tiny import TinyPaths

CPU = torch.device("cpu")
LONG = "a red circle moves right " * 40  # far more than 77 tokens


def load(folder: Path, *, num_frames: int = 4, dtype: torch.dtype = torch.float32) -> ClipReward:
    return from_config(RewardFunction(name="clip", model=str(folder), num_frames=num_frames), device=CPU, dtype=dtype)


@pytest.fixture(scope="module")
def reward(tiny_paths: TinyPaths) -> ClipReward:
    return load(tiny_paths.clip)


@pytest.fixture(scope="module")
def other(tiny_paths: TinyPaths) -> CLIPModel:
    """The CLIP of transformers with the tiny weights."""
    config = json.loads((tiny_paths.clip / "open_clip_config.json").read_text())["model_cfg"]
    return as_transformers(config, load_file(tiny_paths.clip / "open_clip_model.safetensors"))


@pytest.fixture(scope="module")
def tokenizer() -> CLIPTokenizer:
    """The tokenizer of transformers with the vocabulary that open_clip ships."""
    packed = (Path(open_clip.__file__).parent / "bpe_simple_vocab_16e6.txt.gz").read_bytes()
    lines = gzip.decompress(packed).decode().split("\n")
    merges = [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]
    letters = list(open_clip.tokenizer.bytes_to_unicode().values())
    pieces = letters + [letter + "</w>" for letter in letters] + ["".join(pair) for pair in merges]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, model_max_length=77)


def as_transformers(config: dict, stored: dict[str, Tensor]) -> CLIPModel:
    def tower(settings: dict, heads: int) -> dict:
        width = settings["width"]
        sizes = {"hidden_size": width, "intermediate_size": int(width * settings["mlp_ratio"]), "hidden_act": "gelu"}
        return {**sizes, "num_hidden_layers": settings["layers"], "num_attention_heads": heads}

    vision, text = config["vision_cfg"], config["text_cfg"]
    model = CLIPModel(
        CLIPConfig(
            vision_config={
                **tower(vision, vision["width"] // vision["head_width"]),
                **{name: vision[name] for name in ("image_size", "patch_size")},
            },
            text_config={
                **tower(text, text["heads"]),
                "vocab_size": text["vocab_size"],
                "max_position_embeddings": text["context_length"],
                "eos_token_id": 49407,
            },
            projection_dim=config["embed_dim"],
        )
    )
    weights = dict(renamed(name, value) for key, tensor in stored.items() for name, value in split(key, tensor.float()))
    model.load_state_dict(weights, strict=True)
    return model.eval()


def split(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """One fused projection is three in transformers."""
    fused = re.fullmatch(r"(.*)\.attn\.in_proj_(weight|bias)", name)
    if fused is None:
        return [(name, value)]
    return [
        (f"{fused[1]}.self_attn.{part}_proj.{fused[2]}", third)
        for part, third in zip("qkv", value.chunk(3), strict=True)
    ]


def renamed(name: str, value: Tensor) -> tuple[str, Tensor]:
    whole = {
        "text_projection": "text_projection.weight",
        "visual.proj": "visual_projection.weight",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "visual.class_embedding": "vision_model.embeddings.class_embedding",
    }
    if name in whole:
        return whole[name], value.T.contiguous() if name in ("text_projection", "visual.proj") else value
    for pattern, replacement in (
        (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
        (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
        (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
        (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
        (r"^ln_final\.", "text_model.final_layer_norm."),
        (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
        (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
        (r"\.ln_(\d)\.", r".layer_norm\1."),
        (r"\.mlp\.c_fc\.", ".mlp.fc1."),
        (r"\.mlp\.c_proj\.", ".mlp.fc2."),
        (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    ):
        name = re.sub(pattern, replacement, name)
    return name, value


def video(prompt: str, *, frames: int = 9, height: int = 32, width: int = 32, seed: int = 0) -> RewardInput:
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return RewardInput(prompt=prompt, frames=pixels, fps=24, image_path=None, metadata={})


def pixels(frame: np.ndarray) -> Tensor:
    """The preprocessing of CLIP by PIL and numpy: short edge to 32 (bicubic), centre, mean and std of its data."""
    image = Image.fromarray(frame)
    short = min(image.size)
    wide, high = (32 * edge // short for edge in image.size)
    left, top = round((wide - 32) / 2), round((high - 32) / 2)
    image = image.resize((wide, high), Image.Resampling.BICUBIC).crop((left, top, left + 32, top + 32))
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return torch.from_numpy(((np.asarray(image) / 255 - mean) / std).astype(np.float32)).permute(2, 0, 1)


def reference(model: CLIPModel, tokenizer: CLIPTokenizer, item: RewardInput, chosen: Sequence[int]) -> float:
    """Mean over frames of u v / (|u| |v|)."""
    tokens = tokenizer(item.prompt, truncation=True, max_length=77, return_tensors="pt")
    with torch.no_grad():
        text = model.get_text_features(**tokens).pooler_output[0]
        images = model.get_image_features(torch.stack([pixels(item.frames[index]) for index in chosen])).pooler_output
    return np.mean([(text @ image / (text.norm() * image.norm())).item() for image in images]).item()


def test_scores_are_those_of_another_library(other: CLIPModel, tokenizer: CLIPTokenizer, reward: ClipReward) -> None:
    batch = [
        video("A red circle moves right on a blue background", seed=1),
        video(LONG, seed=2),
        video("words no tokenizer knows: xqzzyq", height=48, width=96, seed=3),
        video("a", frames=5, height=70, width=50, seed=4),
    ]
    chosen = [[0, 3, 5, 8], [0, 3, 5, 8], [0, 3, 5, 8], [0, 1, 3, 4]]  # linspace(0, T - 1, 4), rounded
    expected = [reference(other, tokenizer, item, frames) for item, frames in zip(batch, chosen, strict=True)]
    assert reward(batch) == pytest.approx(expected, abs=1e-5)
    assert np.ptp(expected) > 0.01  # or the comparison would say nothing


def test_a_video_scores_the_same_alone_and_in_a_batch(reward: ClipReward) -> None:
    batch = [video("a red circle", seed=5), video(LONG, seed=6), video("a", frames=1, seed=7)]
    assert reward(batch) == pytest.approx([reward([item])[0] for item in batch], abs=1e-5)
    assert reward(batch[::-1]) == pytest.approx(reward(batch)[::-1], abs=1e-5)
    assert reward(batch) == reward(batch)  # equal batches, equal bits


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_a_short_video_is_scored_on_all_its_frames(
    other: CLIPModel, tokenizer: CLIPTokenizer, reward: ClipReward, frames: int
) -> None:
    item = video("a red circle", frames=frames)
    assert reward([item]) == pytest.approx([reference(other, tokenizer, item, range(frames))], abs=1e-5)


def test_a_prompt_of_77_tokens_is_whole_and_a_longer_one_is_told_once(
    tiny_paths: TinyPaths, caplog: pytest.LogCaptureFixture
) -> None:
    reward = load(tiny_paths.clip)
    caplog.set_level(logging.WARNING)
    reward([video("red " * 75), video("a")])  # with start and end: 77
    assert (reward.cut_prompts.count, caplog.messages) == (0, [])
    first, second = reward([video("red " * 76), video("red " * 75 + "circle")])
    assert first == pytest.approx(second, abs=1e-6)  # what is beyond does not count
    reward([video("red " * 76), video(LONG)])
    assert reward.cut_prompts.count == 3
    (message,) = caplog.messages
    assert "reads 77 tokens of a prompt: 2 of these 2 prompts are cut, first 'red red" in message


def test_read_only_frames_are_fine(reward: ClipReward, recwarn: pytest.WarningsRecorder) -> None:
    item = video("a red circle")
    item.frames.setflags(write=False)  # as they come out of an object store
    reward([item])
    assert not [warning for warning in recwarn if "writable" in str(warning.message)]


def test_an_empty_batch_has_no_scores(reward: ClipReward) -> None:
    assert reward([]) == []


def test_frames_of_another_layout_are_refused(reward: ClipReward) -> None:
    frames = np.zeros((9, 3, 32, 40), dtype=np.uint8)
    with pytest.raises(RewardError, match=r"looks like \[T, C, H, W\]"):
        reward([RewardInput(prompt="a", frames=frames, fps=24, image_path=None, metadata={})])


def test_bf16_is_close_to_fp32(tiny_paths: TinyPaths, reward: ClipReward) -> None:
    half = load(tiny_paths.clip, dtype=torch.bfloat16)
    assert half.model.visual.transformer.resblocks[0].mlp.c_fc.weight.dtype == torch.bfloat16
    batch = [video("a red circle", seed=8), video("a blue square", seed=9)]
    assert half(batch) == pytest.approx(reward(batch), abs=2**-8 * 4)  # 8 bits of mantissa
    # Divided in float32, a vector has length 1; divided in bf16 it misses by up to 2e-3.
    for features in (half._text_features(["a red circle"]), half._image_features([batch[0].frames[0]])):
        assert features.double().norm().item() == pytest.approx(1, abs=1e-6)


def test_patches_are_dropped_in_training_only(tiny_paths: TinyPaths, tmp_path: Path, reward: ClipReward) -> None:
    folder = shutil.copytree(tiny_paths.clip, tmp_path / "clip")
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["vision_cfg"]["patch_dropout"] = 0.5
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    batch = [video("a red circle", seed=1)]
    assert load(folder)(batch) == reward(batch)


def test_clip_and_pickscore_together(tiny_paths: TinyPaths) -> None:
    both = (
        RewardFunction(name="clip", weight=2.0, model=str(tiny_paths.clip)),
        RewardFunction(name="pickscore", weight=0.5, model=str(tiny_paths.reward), processor=str(tiny_paths.reward)),
    )
    batch = [video("a red circle", seed=1), video("a blue square", seed=2)]
    alone = [RewardModel(RewardConfig(functions=(function,)), CPU).score(batch) for function in both]
    for score, first, second in zip(RewardModel(RewardConfig(functions=both), CPU).score(batch), *alone, strict=True):
        assert score.parts == {**first.parts, **second.parts}
        assert score.total == pytest.approx(2 * score.parts["clip"] + 0.5 * score.parts["pickscore"])


# --- finding and loading


def test_every_way_to_name_a_model(tiny_paths: TinyPaths) -> None:
    folder = f"local-dir:{tiny_paths.clip}"
    assert open_clip_source(str(tiny_paths.clip)) == {"model_name": folder}
    assert open_clip_source(folder) == {"model_name": folder}
    assert open_clip_source("laion/some-clip") == {"model_name": "hf-hub:laion/some-clip"}
    assert open_clip_source("hf-hub:laion/some-clip") == {"model_name": "hf-hub:laion/some-clip"}
    released = open_clip_source("ViT-B-32:laion2b_s34b_b79k")
    assert (released["model_name"], released["pretrained"]) == ("ViT-B-32", "laion2b_s34b_b79k")


@pytest.mark.parametrize(("tag", "activation"), [("openai", "QuickGELU"), ("laion2b_s34b_b79k", "GELU")])
def test_a_released_model_gets_the_activation_it_was_trained_with(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, tag: str, activation: str
) -> None:
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *_, **__: "not downloaded")
    with torch.device("meta"):
        model = open_clip.create_model(**open_clip_source(f"ViT-B-32:{tag}"), load_weights=False, device="meta")
    assert type(model.visual.transformer.resblocks[0].mlp.gelu).__name__ == activation
    assert not [warning for warning in recwarn if "QuickGELU" in str(warning.message)]


def test_by_default_a_released_clip_scores() -> None:
    function = RewardFunction(name="clip")
    assert (function.model, function.processor) == ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "")
    assert RewardFunction.model_validate(function.model_dump()) == function


def test_what_does_not_load_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(f"model {tmp_path} does not load")):
        load(tmp_path)


def test_weights_that_are_missing_are_named_not_filled_with_noise(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_paths.clip, tmp_path / "clip")
    weights = load_file(folder / "open_clip_model.safetensors")
    del weights["visual.proj"]
    save_file(weights, folder / "open_clip_model.safetensors")
    with pytest.raises(InputError, match=r'Missing key\(s\) in state_dict: "visual.proj"'):
        load(folder)
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(InputError, match="could not be loaded"):
        load(folder)


def test_loading_leaves_the_root_logger_as_it_was(
    tiny_paths: TinyPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    load(tiny_paths.clip)
    assert (root.handlers, root.filters) == ([], [])


def test_others_may_speak_while_open_clip_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    with quiet_open_clip():
        logging.getLogger("miles_wan").warning("one")
        logging.warning("two")
    assert caplog.messages == ["one", "two"]
