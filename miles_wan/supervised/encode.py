"""Fills the cache: clips to latents, captions to embeddings, each once and split over the ranks. In: records and the clip that is
wanted of them. Out: the clips that can be trained on, every other one by name. Afterwards no encoder is in memory.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles_wan.data.clips import ClipRecord, Finding
from miles_wan.data.video import BadClipError, ClipFormat, read_clip
from miles_wan.errors import EngineError
from miles_wan.supervised.cache import EncodingCache, FileDigests, component_digest, entry_key
from miles_wan.wan.conditioning import image_channels
from miles_wan.wan.facts import ImageConditioning
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.text import PromptEncoder, padded
from miles_wan.wan.video import VideoCodec, image_pixels, pixels_of

logger = logging.getLogger(__name__)

DIGESTS = "digests.json"
# Items of a rank between two meetings of all ranks.
_ROUND = 32

# What is remembered of an entry: size and notes of a clip, tokens of a caption; or the faults of a clip that makes none.
Notes = Mapping[str, Any]
Encode = Callable[[], AbstractContextManager[Callable[[str, Any], Notes]]]


@dataclass(frozen=True)
class EncodedClip:
    """One clip in the cache: the keys of its latents and of its caption's embeddings; ``size`` (width, height) in pixels and
    ``text_tokens`` of its caption."""

    record: ClipRecord
    clip_key: str
    text_key: str
    size: tuple[int, int]
    text_tokens: int


@dataclass(frozen=True)
class ClipTensors:
    """What training takes of one clip, float32 on the CPU: ``latent`` [C, F, h, w]; ``condition`` of its first frame, [C, 1, h, w]
    or the further channels of I2V [4 + C, F, h, w], None for a checkpoint that takes none; ``prompt_embeds`` [512, D]."""

    latent: Tensor
    condition: Tensor | None
    prompt_embeds: Tensor


@dataclass(frozen=True)
class EncodedSet:
    """Clips in the order of their records. ``made`` entries are new (of ``entries``), over all ranks."""

    clips: tuple[EncodedClip, ...]
    bad: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    entries: int
    made: int


class ClipLibrary:
    """Encodes clips into a cache and reads them back.

    Args:
        cache_dir: folder of the cache, on a disk that all ranks see.
        folder: the checkpoint whose VAE and text encoder encode.
        wanted: the clip cut from each video.
        device: where to encode.
    """

    def __init__(self, cache_dir: str | Path, folder: ModelFolder, wanted: ClipFormat, *, device: torch.device) -> None:
        self._cache = EncodingCache(cache_dir)
        self._digests = FileDigests(Path(cache_dir) / DIGESTS)
        self._folder = folder
        self._wanted = wanted
        self._device = device
        self._conditioning: ImageConditioning = folder.image_conditioning
        self._encoder_digests: list[str] = []

    def encode(self, records: Sequence[ClipRecord], *, prompts: Sequence[str] = ()) -> EncodedSet:
        """Encode what the cache lacks; a collective: every rank calls it with the same records and gets the same answer.

        Args:
            prompts: texts that are no captions and shall be there, too (``text``).
        """
        videos = _shared_out([record.video_path for record in records], self._digests.of)
        vae = component_digest(self._folder.path / "vae", self._digests)
        self._encoder_digests = [
            component_digest(self._folder.path / part, self._digests) for part in ("tokenizer", "text_encoder")
        ]
        keys = [self._clip_key(record, videos.get(record.video_path), vae) for record in records]
        text_keys = [self._text_key(record.caption) for record in records]
        if _rank() == 0:
            self._digests.save()
        clips, made = self._filled(dict(zip(keys, records, strict=True)), self._clips)
        wanted = ["", *prompts, *(record.caption for record in records)]
        texts, texts_made = self._filled({self._text_key(prompt): prompt for prompt in wanted}, self._texts)
        bad, notes, encoded = [], [], []
        for record, key, text_key in zip(records, keys, text_keys, strict=True):
            found = clips[key]
            findings = [Finding(record.source, kind, text) for kind, text in found.get("bad", found.get("notes"))]
            if "bad" in found:
                bad += findings
                continue
            notes += findings
            width, height = found["size"]
            encoded.append(EncodedClip(record, key, text_key, (width, height), int(texts[text_key]["tokens"])))
        return EncodedSet(tuple(encoded), tuple(bad), tuple(notes), len(clips) + len(texts), made + texts_made)

    def load(self, clip: EncodedClip, *, with_text: bool = True) -> ClipTensors:
        """The tensors of a clip; without its text the embeddings are those of the empty prompt. Raises CheckpointError when the
        cache has lost them."""
        entry = self._cache.load(clip.clip_key)
        latent, first = entry["latent"], entry.get("first")
        condition = None
        if self._conditioning == "first_frame":
            # The VAE is causal: the first latent frame of a clip is that of its first frame alone.
            condition = first if first is not None else latent[:, :1]
        elif self._conditioning == "channels" and first is not None:
            condition = image_channels(first)
        return ClipTensors(latent, condition, self.text(clip.record.caption if with_text else ""))

    def text(self, prompt: str) -> Tensor:
        """Embeddings [512, D] of a caption or another text that was encoded. Raises CheckpointError."""
        return padded(self._cache.load(self._text_key(prompt))["embeds"])

    def _text_key(self, prompt: str) -> str:
        return entry_key("text", {"prompt": prompt, "encoder": self._encoder_digests})

    def _clip_key(self, record: ClipRecord, video: str | None, vae: str) -> str:
        wanted = self._wanted
        return entry_key(
            "clip",
            {
                "video": video if video is not None else [record.video_path],  # it has gone since it was checked
                "first": record.image_sha256,
                "vae": vae,
                "sizes": wanted.sizes,
                "num_frames": wanted.num_frames,
                "fps": wanted.fps,
                "stride": wanted.stride,
                "conditioning": self._conditioning,
            },
        )

    def _filled(self, sources: Mapping[str, Any], encode: Encode) -> tuple[dict[str, Notes], int]:
        """What is noted about each entry, encoding those that are not there, and how many these were."""
        known = _shared_out(list(sources), lambda keys: {key: self._cache.notes(key) for key in keys})
        found = {key: notes for key, notes in known.items() if notes is not None}
        missing = [key for key in sources if key not in found]
        if missing:
            with encode() as one:
                new = _shared_out(missing, lambda keys: {key: one(key, sources[key]) for key in keys}, told=True)
            _release()
            found |= new
        return found, len([key for key in missing if "bad" not in found[key]])

    @contextmanager
    def _clips(self) -> Iterator[Callable[[str, ClipRecord], Notes]]:
        """Encodes clips, with the VAE in memory inside this context."""
        codec = VideoCodec(self._folder.path, self._device)

        def one(key: str, record: ClipRecord) -> Notes:
            try:
                return self._encode_clip(record, key, codec)
            except BadClipError as error:
                return {"bad": [(error.kind, error.text)]}

        yield one

    @contextmanager
    def _texts(self) -> Iterator[Callable[[str, str], Notes]]:
        """Encodes captions, with the text encoder in memory inside this context."""
        encoder = PromptEncoder(self._folder.path, self._device)

        def one(key: str, prompt: str) -> Notes:
            (embeds,) = encoder.encode_tokens([prompt])
            notes = {"tokens": len(embeds)}
            self._cache.store(key, {"embeds": embeds}, notes)
            return notes

        with encoder.on_device():
            yield one

    def _encode_clip(self, record: ClipRecord, key: str, codec: VideoCodec) -> Notes:
        """Write the entry and return its notes. Raises BadClipError."""
        clip = read_clip(record.video_path, self._wanted)
        frames = clip.frames
        height, width = frames.shape[1:3]
        tensors = {"latent": codec.encode_frames(frames)}
        still = len(frames) if self._conditioning == "channels" else 1
        if self._conditioning != "none" and record.image_path is not None:
            try:
                tensors["first"] = codec.encode_first(image_pixels(record.image_path, width, height), still)
            except EngineError as error:
                raise BadClipError("bad_image", str(error)) from error
        elif self._conditioning == "channels":
            tensors["first"] = codec.encode_first(pixels_of(frames[0]), still)
        notes = {"size": [width, height], "notes": [list(note) for note in clip.notes]}
        self._cache.store(key, tensors, notes)
        return notes


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _shared_out(
    items: Sequence[str], work: Callable[[Sequence[str]], Mapping[str, Any]], *, told: bool = False
) -> dict[str, Any]:
    """Let the ranks do ``work`` on different ``items`` and tell all of them all results (a collective). They meet after every
    round, so that none waits longer for the others than a collective may take."""
    unique = list(dict.fromkeys(items))
    found: dict[str, Any] = {}
    ranks, size = _ranks(), _ROUND * _ranks()
    for start in range(0, len(unique), size):
        for part in _gathered(dict(work(unique[start + _rank() : start + size : ranks]))):
            found |= part
        if told and _rank() == 0:
            logger.info("encoded %d of %d new entries", min(start + size, len(unique)), len(unique))
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gathered(value: Any) -> list[Any]:
    """The value of every rank (a collective)."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
