"""A tiny text encoder that tells captions apart. In: scenes, a tokenizer, a seed. Out: the encoder, and how well a linear layer
reads colour, shape, direction and background from its embeddings. It knows no pixels.

A random encoder hardly mixes its tokens: "red ... on blue" and "blue ... on red" come out as nearly the same set, and the
cross-attention of Wan sees a set.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, UMT5EncoderModel

from miles_wan.tiny.checkpoint import TEXT_WIDTH, make_text_encoder
from miles_wan.tiny.dataset import ATTRIBUTES, Scene
from miles_wan.tiny.learning import FastOptimizer, reproducible

BATCH_SIZE = 64


class CaptionReader(nn.Module):
    """A text encoder with one linear layer for each attribute on the mean of its embeddings."""

    def __init__(self, encoder: UMT5EncoderModel) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict({name: nn.Linear(TEXT_WIDTH, len(values)) for name, values in ATTRIBUTES.items()})

    def forward(self, token_ids: Tensor) -> Mapping[str, Tensor]:
        """Scores [B, values] of each attribute for captions [B, L] of one length."""
        means = self.encoder(token_ids).last_hidden_state.mean(dim=1)
        return {name: head(means) for name, head in self.heads.items()}


def train_text_encoder(
    scenes: Sequence[Scene], tokenizer: PreTrainedTokenizerBase, *, seed: int, steps: int
) -> tuple[CaptionReader, list[float]]:
    """Train encoder and linear layers on the captions of ``scenes``; return them and the loss of each step.

    Args:
        scenes: what it may see.
        tokenizer: gives every caption the same number of tokens.
        seed: of weights and draws. The global random state of torch is left as it was.
        steps: optimizer steps.
    """
    rng = random.Random(seed)
    with reproducible(seed):
        reader = CaptionReader(make_text_encoder())
        optimizer = FastOptimizer(reader, matrix_lr=0.02, lr=3e-3, steps=steps)
        losses = []
        for _ in range(steps):
            batch = rng.choices(scenes, k=BATCH_SIZE)
            scores = reader(_token_ids(tokenizer, batch))
            each = [cross_entropy(scores[name], _values(batch, name)) for name in ATTRIBUTES]
            losses.append(optimizer.step(torch.stack(each).mean()))
    return reader.eval().requires_grad_(False), losses


def reading_accuracy(
    reader: CaptionReader, tokenizer: PreTrainedTokenizerBase, scenes: Sequence[Scene]
) -> Mapping[str, float]:
    """The share of captions whose attribute the linear layer names rightly, for each attribute."""
    scores = reader(_token_ids(tokenizer, scenes))
    return {name: float((scores[name].argmax(1) == _values(scenes, name)).float().mean()) for name in ATTRIBUTES}


def _token_ids(tokenizer: PreTrainedTokenizerBase, scenes: Sequence[Scene]) -> Tensor:
    return tokenizer([scene.caption for scene in scenes], return_tensors="pt").input_ids


def _values(scenes: Sequence[Scene], attribute: str) -> Tensor:
    return torch.tensor([ATTRIBUTES[attribute].index(getattr(scene, attribute)) for scene in scenes])
