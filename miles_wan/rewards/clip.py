"""CLIP score (Hessel et al. 2021, arXiv 2104.08718) through open_clip: how well frames fit their prompt. In: an open_clip
model, videos with prompts. Out: one score a video. It knows no other reward and no worker.
"""

from __future__ import annotations

import logging
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import open_clip
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from miles_wan.config import RewardFunction
from miles_wan.errors import InputError
from miles_wan.records import RewardInput, UInt8
from miles_wan.rewards.cosine import frame_cosines
from miles_wan.rewards.prompts import CutPrompts

# bf16 as open_clip does it: linear layers, convolutions and projections in bfloat16, layer norms in float32.
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class ClipReward:
    """score = mean over frames of cos(text, frame), in -1..1.

    The plain cosine: neither clamped at 0 nor multiplied by the paper's 2.5 (its CLIP-S = 2.5 max(cos, 0)) nor by the
    logit scale. Advantages do not change with a factor, but ``weight`` counts in this unit, and real pairs give
    mostly 0 to 0.4.

    Args:
        model: an open_clip model on ``device`` in the precision of ``dtype``; it is frozen.
        preprocess: its inference transform: a PIL image to pixels float32 [3, S, S].
        tokenizer: texts to token ids [B, L], padded and cut to ``tokenizer.context_length``.
        num_frames: frames of a video that are scored, spaced evenly; a shorter video is scored on all it has.
    """

    def __init__(
        self,
        model: Any,
        preprocess: Callable[[Image.Image], Tensor],
        tokenizer: Any,
        *,
        num_frames: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model = model.eval().requires_grad_(False)  # as loaded it would drop patches where its training did
        self.preprocess = preprocess
        self.tokenizer = tokenizer
        self.num_frames = num_frames
        self.device = device
        self.dtype = dtype
        self.cut_prompts = CutPrompts("clip", tokenizer.context_length)

    @torch.no_grad()
    def __call__(self, batch: Sequence[RewardInput]) -> list[float]:
        """One score per video. Raises RewardError if frames are not uint8 [T, H, W, 3]."""
        cosines = frame_cosines(
            batch, self.num_frames, encode_frames=self._image_features, encode_prompts=self._text_features
        )
        return [cosines_of_video.mean().item() for cosines_of_video in cosines]

    def _image_features(self, frames: Sequence[UInt8]) -> Tensor:
        """Unit vectors [n, D] in float32 of frames uint8 [H, W, 3]."""
        pixels = torch.stack([self.preprocess(Image.fromarray(frame)) for frame in frames])
        return normalize(self.model.encode_image(pixels.to(self.device, self.dtype)).float(), dim=-1)

    def _text_features(self, prompts: Sequence[str]) -> Tensor:
        """Unit vectors [B, D] in float32. All texts are padded to full length: no prompt's score depends on another."""
        tokens = self.tokenizer(list(prompts))
        length = self.tokenizer.context_length
        # With room for one more token, a text that was cut keeps a word where the cut put the end.
        roomier = self.tokenizer(list(prompts), context_length=length + 1)
        self.cut_prompts.note(prompts, (tokens != roomier[:, :length]).any(dim=1).tolist())
        return normalize(self.model.encode_text(tokens.to(self.device)).float(), dim=-1)


def from_config(function: RewardFunction, *, device: torch.device, dtype: torch.dtype) -> ClipReward:
    """The CLIP score with the model that ``function`` names. Raises InputError if it cannot be loaded."""
    source = open_clip_source(function.model)
    try:
        with quiet_open_clip():
            model, preprocess = open_clip.create_model_from_pretrained(
                **source, precision=_PRECISIONS[dtype], device=device
            )
            tokenizer = open_clip.get_tokenizer(source["model_name"])
    except Exception as error:  # the libraries below raise errors of their own: hub, JSON, torch, disk
        detail = textwrap.shorten(str(error) or type(error).__name__, 300)
        raise InputError(
            [
                f"reward 'clip': model {function.model} does not load ({detail}); give a folder in the format of "
                "open_clip, a hub id that can be reached, or architecture:tag"
            ]
        ) from error
    return ClipReward(model, preprocess, tokenizer, num_frames=function.num_frames, device=device, dtype=dtype)


def open_clip_source(model: str) -> dict[str, Any]:
    """The arguments with which open_clip finds ``model``: a folder, a hub id or ``architecture:tag``; a name with
    open_clip's own prefix (``hf-hub:``, ``local-dir:``) stays as it is."""
    path = os.path.expanduser(model.removeprefix("local-dir:"))
    if os.path.isdir(path):
        return {"model_name": f"local-dir:{path}"}
    if model.startswith(("hf-hub:", "local-dir:")):
        return {"model_name": model}
    if "/" in model:
        return {"model_name": f"hf-hub:{model}"}
    architecture, _, tag = model.partition(":")
    trained = open_clip.get_pretrained_cfg(architecture, tag)
    # Weights of OpenAI and others were trained with another GELU than the architecture of that name has; open_clip would
    # only warn, and give other features.
    quick = bool(trained.get("quick_gelu", False))
    return {"model_name": architecture, "pretrained": tag or None, "force_quick_gelu": quick}


@contextmanager
def quiet_open_clip() -> Iterator[None]:
    """Keep open_clip's progress out of the log. It speaks on the root logger, and where that has no handler, Python would
    add one for good; what matters comes as an exception."""
    root, sink = logging.getLogger(), logging.NullHandler()
    root.addHandler(sink)
    root.addFilter(_not_of_open_clip)
    try:
        yield
    finally:
        root.removeFilter(_not_of_open_clip)
        root.removeHandler(sink)


def _not_of_open_clip(record: logging.LogRecord) -> bool:
    return os.path.basename(os.path.dirname(record.pathname)) != "open_clip"
