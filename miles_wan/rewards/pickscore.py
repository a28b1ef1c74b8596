"""PickScore (Kirstain et al. 2023, arXiv 2305.01569): how well frames fit their prompt, as people prefer. In: a CLIP
model with its processor, videos with prompts. Out: one score a video. It knows no other reward and no worker.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPModel, CLIPProcessor

from miles_wan.config import RewardFunction
from miles_wan.errors import InputError, first_line
from miles_wan.records import RewardInput, UInt8
from miles_wan.rewards.cosine import frame_cosines
from miles_wan.rewards.prompts import CutPrompts

# The text length of CLIP: longer prompts are cut, as the reference implementation does.
MAX_TOKENS = 77
# Scales PickScore (about 20 to 25) to about 1, as Flow-GRPO does.
SCALE = 26.0


class PickScoreReward:
    """score = mean over frames of exp(logit_scale) cos(text, frame) / 26.

    Args:
        model: the CLIP that scores; it is moved to ``device`` in ``dtype`` and frozen.
        processor: its tokenizer and image processor.
        num_frames: frames of a video that are scored, spaced evenly; a shorter video is scored on all it has.
    """

    def __init__(
        self, model: CLIPModel, processor: CLIPProcessor, *, num_frames: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        # Before the cast: bf16 would round the logit scale, and with it every score, by 1 %.
        self.scale = float(model.logit_scale.detach().float().exp()) / SCALE
        self.model = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self.processor = processor
        self.num_frames = num_frames
        self.device = device
        self.dtype = dtype
        self.cut_prompts = CutPrompts("pickscore", MAX_TOKENS)

    @torch.no_grad()
    def __call__(self, batch: Sequence[RewardInput]) -> list[float]:
        """One score per video. Raises RewardError if frames are not uint8 [T, H, W, 3]."""
        cosines = frame_cosines(
            batch, self.num_frames, encode_frames=self._image_features, encode_prompts=self._text_features
        )
        return [(self.scale * cosines_of_video).mean().item() for cosines_of_video in cosines]

    def _image_features(self, frames: Sequence[UInt8]) -> Tensor:
        """Unit vectors [n, D] in float32 of frames uint8 [H, W, 3]."""
        # A copy: frames from the object store are read-only, and torch wants to own what it sees.
        pixels = [torch.from_numpy(frame.copy()).permute(2, 0, 1) for frame in frames]
        inputs = self.processor.image_processor(images=pixels, return_tensors="pt").to(self.device)
        return _unit_vectors(self.model.get_image_features(pixel_values=inputs["pixel_values"].to(self.dtype)))

    def _text_features(self, prompts: Sequence[str]) -> Tensor:
        """Unit vectors [B, D] in float32. All texts are padded to full length: no prompt's score depends on another."""
        tokenizer = self.processor.tokenizer
        self.cut_prompts.note(prompts, [len(tokenizer.tokenize(prompt)) > MAX_TOKENS - 2 for prompt in prompts])
        inputs = tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(self.device)
        features = self.model.get_text_features(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return _unit_vectors(features)


def from_config(function: RewardFunction, *, device: torch.device, dtype: torch.dtype) -> PickScoreReward:
    """PickScore with the model and processor that ``function`` names. Raises InputError if either cannot be loaded."""
    model, info = _load(CLIPModel, function.model, what="model", dtype=torch.float32, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise InputError([_fault(function.model, "model", f"lacks {len(missing)} weights, first {missing[0]}")])
    processor = _load(CLIPProcessor, function.processor, what="processor")
    return PickScoreReward(model, processor, num_frames=function.num_frames, device=device, dtype=dtype)


def _load(kind: Any, source: str, *, what: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(os.path.expanduser(source), **options)
    except Exception as error:  # the libraries below raise errors of their own: hub, JSON, safetensors, disk
        raise InputError([_fault(source, what, f"does not load ({first_line(error)})")]) from error


def _fault(source: str, what: str, fault: str) -> str:
    return f"reward 'pickscore': {what} {source} {fault}; give a CLIP folder, or a hub id that can be reached"


def _unit_vectors(features: Any) -> Tensor:
    # transformers 5 returns an output object whose pooler_output is the projected feature; older ones the feature itself.
    projected = features if torch.is_tensor(features) else features.pooler_output
    return normalize(projected.float(), dim=-1)
