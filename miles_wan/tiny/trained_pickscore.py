"""A tiny PickScore that judges frames of the moving shapes by their captions. In: scenes, the words of captions, a seed. Out: the
CLIP model, and how well it finds the right caption of scenes it never saw. It knows no video model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import CLIPModel, CLIPTokenizer

from miles_wan.tiny.clips import FILMING
from miles_wan.tiny.dataset import ATTRIBUTES, COLOURS, Scene, draw_motion
from miles_wan.tiny.learning import FastOptimizer, reproducible
from miles_wan.tiny.pickscore import PICKSCORE_SCALE, make_image_processor, make_model

BATCH_SIZE = 128
# While it learns; the released temperature of 100 would leave no gradient once a pair is told apart by a cosine of 0.05.
LEARNING_SCALE = 10.0
# It sees the end of the way only: there, and not in the middle, the place of the shape says where it went.
LATE = (0.75, 1.0)
# Largest blur in pixels of the 64: the frames it will judge come out of a small VAE.
BLUR = 2.0


def train_pickscore(
    scenes: Sequence[Scene], tokenizer: CLIPTokenizer, *, seed: int, steps: int
) -> tuple[CLIPModel, list[float]]:
    """Train a CLIP of width 64 on late frames of ``scenes`` and their captions, as CLIP is trained: in a batch, each frame has to
    find its caption and each caption its frame.

    Every second batch holds all shapes and directions of ten pairs of colours, so that colours alone do not win it.

    Args:
        scenes: what it may see.
        tokenizer: of :func:`miles_wan.tiny.pickscore.make_tokenizer`.
        seed: of weights and frames. The global random state of torch is left as it was.
        steps: optimizer steps.

    Returns:
        The model in evaluation mode, its temperature set to that of PickScore, and the loss of each step in nats.
    """
    rng = random.Random(seed)
    with reproducible(seed):
        model = make_model(tokenizer, width=64, patch_size=4)
        model.logit_scale.data.fill_(np.log(LEARNING_SCALE))
        optimizer = FastOptimizer(model, matrix_lr=0.02, lr=3e-3, steps=steps)
        losses = []
        for step in range(steps):
            batch = _alike(scenes, rng) if step % 2 else rng.sample(scenes, min(BATCH_SIZE, len(scenes)))
            frames = [_late_frame(scene, rng, blur=rng.uniform(0, BLUR)) for scene in batch]
            logits = model.logit_scale.exp() * image_features(model, frames) @ text_features(model, tokenizer, batch).T
            targets = torch.arange(len(batch))
            losses.append(optimizer.step((cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2))
        model.logit_scale.data.fill_(np.log(PICKSCORE_SCALE))
    return model.eval().requires_grad_(False), losses


def image_features(model: CLIPModel, frames: Sequence[Image.Image]) -> Tensor:
    """Unit vectors [n, D] of frames."""
    pixels = make_image_processor()(images=list(frames), return_tensors="pt")["pixel_values"]
    return normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)


def text_features(model: CLIPModel, tokenizer: CLIPTokenizer, scenes: Sequence[Scene]) -> Tensor:
    """Unit vectors [n, D] of the captions of ``scenes``."""
    inputs = tokenizer([scene.caption for scene in scenes], padding=True, return_tensors="pt")
    return normalize(model.get_text_features(**inputs).pooler_output, dim=-1)


def choice_accuracy(
    model: CLIPModel, tokenizer: CLIPTokenizer, scenes: Sequence[Scene], frames: Sequence[Image.Image]
) -> Mapping[str, float]:
    """How often the right caption scores highest for its frame: among those that differ in one attribute only, for each attribute;
    and, as ``all``, among the captions of all ``scenes``."""
    images = image_features(model, frames)
    among_all = (images @ text_features(model, tokenizer, scenes).T).argmax(dim=1)
    result = {"all": float((among_all == torch.arange(len(scenes))).float().mean())}
    for name, values in ATTRIBUTES.items():
        right = 0
        for scene, image in zip(scenes, images, strict=True):
            others = [replace(scene, **{name: value}) for value in values]
            choices = [other for other in others if other.colour != other.background]
            right += choices[int((text_features(model, tokenizer, choices) @ image).argmax())] == scene
        result[name] = right / len(scenes)
    return result


def last_frames(scenes: Sequence[Scene], *, seed: int) -> list[Image.Image]:
    """The last frame of one clip of each scene."""
    rng = random.Random(seed)
    return [draw_motion(scene, rng, FILMING).frame(1.0) for scene in scenes]


def _alike(scenes: Sequence[Scene], rng: random.Random) -> list[Scene]:
    pairs = [(colour, background) for colour in COLOURS for background in COLOURS if colour != background]
    chosen = set(rng.sample(pairs, 10))
    return [scene for scene in scenes if (scene.colour, scene.background) in chosen]


def _late_frame(scene: Scene, rng: random.Random, *, blur: float) -> Image.Image:
    frame = draw_motion(scene, rng, FILMING).frame(rng.uniform(*LATE))
    return frame.filter(ImageFilter.GaussianBlur(blur))
