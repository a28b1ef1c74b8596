"""Clips and captions are encoded once; another VAE, size or stride is another entry; an interrupted cache goes on."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_files import write_clip, write_sound
from diffusers import AutoencoderKLWan
from PIL import Image
from safetensors.torch import load_file, save_file
from toy_clips import write_toy_clips
from transformers import UMT5EncoderModel

from miles_wan.data import ClipRecord, load_clips
from miles_wan.data.clips import counted
from miles_wan.data.video import ClipFormat, read_clip
from miles_wan.errors import CheckpointError
from miles_wan.supervised.cache import EncodingCache, FileDigests, entry_key
from miles_wan.supervised.encode import ClipLibrary, EncodedSet
from miles_wan.tiny import make_tiny
from miles_wan.wan.family import ModelFolder, load_family
from miles_wan.wan.text import PromptEncoder
from miles_wan.wan.video import VideoCodec

CPU = torch.device("cpu")
WANTED = ClipFormat(sizes=((32, 32),), num_frames=5, fps=None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFolder]:
    folder = tmp_path_factory.mktemp("models")
    names = ("wan2.2-ti2v-5b", "wan2.2-t2v-a14b", "wan2.2-i2v-a14b")
    return {
        name: load_family(make_tiny(folder / name, family=name, train_records=1, eval_records=1).model)
        for name in names
    }


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> tuple[ClipRecord, ...]:
    train, _ = write_toy_clips(tmp_path_factory.mktemp("clips"), train=3, evaluation=1)
    return load_clips(train).records


def library(cache: Path, model: ModelFolder, wanted: ClipFormat = WANTED) -> ClipLibrary:
    return ClipLibrary(cache, model, wanted, device=CPU)


def encode(cache: Path, model: ModelFolder, records: tuple[ClipRecord, ...], wanted: ClipFormat = WANTED) -> EncodedSet:
    return library(cache, model, wanted).encode(records)


def test_entries_are_what_the_encoders_give(models, clips, tmp_path: Path) -> None:
    model = models["wan2.2-t2v-a14b"]
    shelf = library(tmp_path, model)
    encoded = shelf.encode(clips)
    assert (encoded.entries, encoded.made) == (7, 7)  # three clips, their captions, and the empty one
    codec, text = VideoCodec(model.path, CPU), PromptEncoder(model.path, CPU)
    for clip, record in zip(encoded.clips, clips, strict=True):
        tensors = shelf.load(clip)
        assert torch.equal(tensors.latent, codec.encode_frames(read_clip(record.video_path, WANTED).frames))
        assert tensors.latent.shape == (16, 2, 4, 4)
        assert tensors.condition is None
        assert torch.equal(tensors.prompt_embeds, text.encode([record.caption])[0])
        assert clip.text_tokens == int((tensors.prompt_embeds != 0).any(1).sum())
        assert torch.equal(shelf.load(clip, with_text=False).prompt_embeds, text.encode([""])[0])


def test_the_latent_of_a_clip_is_that_of_its_pixels_normalised(models, clips, tmp_path: Path) -> None:
    model = models["wan2.2-t2v-a14b"]
    shelf = library(tmp_path, model)
    (clip,) = shelf.encode(clips[:1]).clips
    vae = AutoencoderKLWan.from_pretrained(model.path / "vae", torch_dtype=torch.float32)
    frames = read_clip(clips[0].video_path, WANTED).frames
    pixels = torch.from_numpy(frames / 127.5 - 1).float().permute(3, 0, 1, 2)[None]
    with torch.no_grad():
        mode = vae.encode(pixels).latent_dist.mode()[0]
    mean, std = (torch.tensor(vae.config[key]).view(-1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    assert torch.allclose(shelf.load(clip).latent, (mode - mean) / std, atol=1e-5)


def test_nothing_is_encoded_twice(models, clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models["wan2.2-t2v-a14b"]
    first = encode(tmp_path, model, clips)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an encoder was loaded")

    monkeypatch.setattr(VideoCodec, "__init__", refuse)
    monkeypatch.setattr(PromptEncoder, "__init__", refuse)
    again = encode(tmp_path, model, clips)
    assert again.made == 0
    assert again.clips == first.clips
    # the same bytes under another name are the same clip
    moved = tmp_path / "moved.mp4"
    shutil.copy(clips[0].video_path, moved)
    (clip,) = encode(tmp_path, model, (ClipRecord(clips[0].caption, str(moved), "x:1"),)).clips
    assert clip.clip_key == first.clips[0].clip_key


def test_another_vae_size_stride_or_caption_is_another_entry(models, clips, tmp_path: Path) -> None:
    model, cache = models["wan2.2-t2v-a14b"], tmp_path / "cache"
    first = encode(cache, model, clips)
    others = {
        "size": ClipFormat(sizes=((48, 32),), num_frames=5, fps=None),
        "frames": ClipFormat(sizes=((32, 32),), num_frames=9, fps=None),
        "stride": ClipFormat(sizes=((32, 32),), num_frames=5, fps=None, stride=2),
        "rate": ClipFormat(sizes=((32, 32),), num_frames=5, fps=8.0),
    }
    keys = {clip.clip_key for clip in first.clips}
    for name, wanted in others.items():
        found = encode(cache, model, clips, wanted)
        assert found.made == 3, name  # the captions are there
        assert not keys & {clip.clip_key for clip in found.clips}, name
        keys |= {clip.clip_key for clip in found.clips}
    other = tmp_path / "other model"
    shutil.copytree(model.path, other)
    weights = other / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] += 1e-3  # one number
    save_file(tensors, weights, metadata={"format": "pt"})
    found = encode(cache, load_family(other), clips)
    assert found.made == 3
    assert not keys & {clip.clip_key for clip in found.clips}
    other_caption = (ClipRecord("another caption", clips[0].video_path, "x:1"),)
    found = encode(cache, model, other_caption)
    assert found.made == 1
    assert found.clips[0].clip_key == first.clips[0].clip_key


def test_an_interrupted_cache_goes_on(models, clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models["wan2.2-t2v-a14b"]
    whole, encoded = VideoCodec.encode_frames, []

    def killed(self: VideoCodec, frames: np.ndarray) -> torch.Tensor:
        if len(encoded) == 2:
            raise KeyboardInterrupt
        encoded.append(frames)
        return whole(self, frames)

    monkeypatch.setattr(VideoCodec, "encode_frames", killed)
    with pytest.raises(KeyboardInterrupt):
        encode(tmp_path, model, clips)
    monkeypatch.undo()
    assert encode(tmp_path, model, clips).made == 1 + 4  # the third clip, and all captions
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_damaged_entry_is_made_again(models, clips, tmp_path: Path) -> None:
    model = models["wan2.2-t2v-a14b"]
    shelf = library(tmp_path, model)
    (clip,) = shelf.encode(clips[:1]).clips
    expected = shelf.load(clip).latent.clone()
    path = EncodingCache(tmp_path).path(clip.clip_key)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"cannot be read .* remove it and resume"):
        shelf.load(clip)
    assert shelf.encode(clips[:1]).made == 1
    assert torch.equal(shelf.load(clip).latent, expected)


def test_no_encoder_stays_in_memory(models, clips, tmp_path: Path) -> None:
    def encoders() -> set[int]:
        gc.collect()
        return {id(thing) for thing in gc.get_objects() if isinstance(thing, AutoencoderKLWan | UMT5EncoderModel)}

    before = encoders()  # of other tests of this process
    shelf = library(tmp_path, models["wan2.2-i2v-a14b"])
    assert shelf.encode(clips).made == 7
    assert encoders() <= before


def test_the_first_latent_frame_is_that_of_the_first_frame_alone(models, clips, tmp_path: Path) -> None:
    model = models["wan2.2-ti2v-5b"]
    shelf = library(tmp_path, model)
    (clip,) = shelf.encode(clips[:1]).clips
    Image.fromarray(read_clip(clips[0].video_path, WANTED).frames[0]).save(tmp_path / "first.png")
    alone = VideoCodec(model.path, CPU).encode_image(str(tmp_path / "first.png"), 32, 32)
    condition = shelf.load(clip).condition
    assert condition is not None
    assert torch.allclose(condition, alone, atol=1e-5)


@pytest.mark.parametrize("family", ["wan2.2-ti2v-5b", "wan2.2-i2v-a14b"])
def test_a_first_frame_of_its_own_takes_the_place_of_the_videos(models, clips, tmp_path: Path, family: str) -> None:
    model, image = models[family], tmp_path / "first.png"
    Image.new("RGB", (40, 40), (200, 30, 90)).save(image)
    record = ClipRecord(clips[0].caption, clips[0].video_path, "x:1", str(image), "its digest")
    shelf = library(tmp_path, model)
    own, given = shelf.encode((clips[0], record)).clips
    codec = VideoCodec(model.path, CPU)
    if family == "wan2.2-ti2v-5b":
        expected = codec.encode_image(str(image), 32, 32)
    else:
        expected = codec.encode_image_channels(str(image), 32, 32, 5)
        # the video's own first frame, followed by grey: 4 channels of the mask, then its latent
        condition = shelf.load(own).condition
        assert condition is not None
        assert condition.shape == (20, 2, 4, 4)
        assert torch.equal(condition[:4, 0], torch.ones(4, 4, 4))
        assert torch.equal(condition[:4, 1], torch.zeros(4, 4, 4))
    assert torch.equal(shelf.load(given).latent, shelf.load(own).latent)
    found = shelf.load(given).condition
    assert found is not None
    assert torch.equal(found, expected)
    assert not torch.allclose(found, shelf.load(own).condition)


def test_videos_that_give_no_clip_are_named_for_each_record(models, clips, tmp_path: Path) -> None:
    sound = write_sound(tmp_path / "sound.mp4")
    short = write_clip(tmp_path / "short.mp4", np.zeros((3, 32, 32, 3), dtype=np.uint8))
    records = (
        ClipRecord("a", str(sound), "x:1"),
        clips[0],
        ClipRecord("b", str(short), "x:3"),
        ClipRecord("c", str(short), "x:4"),
        ClipRecord("d", str(tmp_path / "gone.mp4"), "x:5"),
    )
    encoded = encode(tmp_path / "cache", models["wan2.2-t2v-a14b"], records)
    assert [clip.record for clip in encoded.clips] == [clips[0]]
    assert [finding.source for finding in encoded.bad] == ["x:1", "x:3", "x:4", "x:5"]
    assert counted(encoded.bad) == {"no_video_stream": 1, "too_few_frames": 2, "unreadable": 1}


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    file, memory = tmp_path / "video.mp4", tmp_path / "digests.json"
    file.write_bytes(b"one")
    digests = FileDigests(memory)
    first = digests.of([str(file), str(tmp_path / "absent")])
    assert first.keys() == {str(file)}
    digests.save()
    assert FileDigests(memory).of([str(file)]) == first
    file.write_bytes(b"another")
    assert FileDigests(memory).of([str(file)]) != first
    memory.write_text("{torn")
    assert FileDigests(memory).of([str(file)]).keys() == {str(file)}


def test_a_key_follows_from_every_part() -> None:
    assert entry_key("text", {"prompt": "a"}) == entry_key("text", {"prompt": "a"})
    assert (
        len(
            {entry_key("text", {"prompt": "a"}), entry_key("text", {"prompt": "b"}), entry_key("clip", {"prompt": "a"})}
        )
        == 3
    )
