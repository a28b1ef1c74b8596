"""A tiny PickScore. In: a folder and a seed. Out: files that ``CLIPModel`` and ``CLIPProcessor`` load. It knows
nothing of Wan; the words its tokenizer should hold whole are handed in.

The weights are CLIP's own random start, and that is enough to learn from: its features follow the image smoothly, and
over the toy first frames the score has a standard deviation of some tenths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

IMAGE_SIZE = 32
PATCH_SIZE = 8
MAX_TOKENS = 77
# PickScore's own temperature: scores are 100 cos.
PICKSCORE_SCALE = 100.0
START, END = "<|startoftext|>", "<|endoftext|>"
WORD_END = "</w>"


def write_pickscore(folder: Path, words: Sequence[str], *, seed: int) -> None:
    """Write model, tokenizer and image processor into ``folder``.

    Args:
        folder: created if needed.
        words: lower-case words that become one token each; other text falls apart into bytes.
        seed: of the weights. The global random state of torch is left as it was.
    """
    tokenizer = make_tokenizer(words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model(tokenizer)
    model.save_pretrained(folder)
    save_processor(folder, tokenizer)


def save_processor(folder: Path, tokenizer: CLIPTokenizer) -> None:
    """Write tokenizer and image processor into ``folder``."""
    CLIPProcessor(image_processor=make_image_processor(), tokenizer=tokenizer).save_pretrained(folder)


def make_image_processor() -> CLIPImageProcessor:
    """CLIP's own, to IMAGE_SIZE squared."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=size)


def make_model(tokenizer: CLIPTokenizer, *, width: int = 32, patch_size: int = PATCH_SIZE) -> CLIPModel:
    """A CLIP of two layers in each tower, drawn from the global random state."""
    tower = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={
            **tower,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": MAX_TOKENS,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={**tower, "image_size": IMAGE_SIZE, "patch_size": patch_size},
        projection_dim=32,
        logit_scale_init_value=math.log(PICKSCORE_SCALE),
    )
    return CLIPModel(config)


def make_tokenizer(words: Sequence[str]) -> CLIPTokenizer:
    """CLIP's byte-level BPE: every byte, every byte at a word's end, and the merges that make each word whole."""
    alphabet = sorted(ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in dict.fromkeys(words):
        merges += _merges_for(word, known=merges)
    pieces = [*alphabet, *(byte + WORD_END for byte in alphabet), *(left + right for left, right in merges)]
    vocabulary = {piece: index for index, piece in enumerate([*dict.fromkeys(pieces), START, END])}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)


def _merges_for(word: str, *, known: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The merges to add, at the lowest priority, so that ``word`` becomes one token. Earlier words stay whole."""
    pieces = [*word[:-1], word[-1] + WORD_END]
    for pair in known:
        pieces = _merge(pieces, pair)
    added = []
    while len(pieces) > 1:
        added.append((pieces[0], pieces[1]))
        pieces = _merge(pieces, added[-1])
    return added


def _merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged
