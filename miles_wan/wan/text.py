"""Prompts to embeddings, as the server engine makes them. In: strings. Out: [512, D] float32 on the CPU, exact zeros beyond
the tokens. It knows no transformer; the text encoder is on the device only while it encodes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from miles_wan.records import PromptRecord
from miles_wan.wan.facts import DEFAULT_NEGATIVE_PROMPT

logger = logging.getLogger(__name__)

MAX_TOKENS = 512
_CACHED_PROMPTS = 512


class PromptEncoder:
    """Tokenizer and UMT5 encoder (float32) of a checkpoint, with a cache of the prompts used last.

    Args:
        model_path: folder of the checkpoint.
        device: where prompts are encoded; at all other times the encoder is on the CPU.
    """

    def __init__(self, model_path: Path, device: torch.device) -> None:
        self._device = device
        self._tokenizer = AutoTokenizer.from_pretrained(str(model_path / "tokenizer"), local_files_only=True)
        encoder = UMT5EncoderModel.from_pretrained(
            str(model_path / "text_encoder"), dtype=torch.float32, local_files_only=True
        )
        self._encoder: torch.nn.Module = encoder.eval().requires_grad_(False)
        self._cache: OrderedDict[str, Tensor] = OrderedDict()
        self._held = 0

    def encode(self, prompts: Sequence[str]) -> list[Tensor]:
        """Embeddings [512, D] of each prompt. Several new ones move the encoder to the device once."""
        return [padded(rows) for rows in self.encode_tokens(prompts)]

    def encode_tokens(self, prompts: Sequence[str]) -> list[Tensor]:
        """As ``encode``, only the rows of the tokens of each prompt [L, D]: the others are zeros."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._cache]
        valid = self._encode(missing) if missing else {}
        for prompt in dict.fromkeys(prompts):
            valid.setdefault(prompt, self._cache.get(prompt, torch.empty(0)))
            self._cache[prompt] = valid[prompt]
            self._cache.move_to_end(prompt)
        while len(self._cache) > _CACHED_PROMPTS:
            self._cache.popitem(last=False)
        return [valid[prompt] for prompt in prompts]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The encoder stays on the device inside this context, whatever is encoded."""
        self._held += 1
        self._encoder.to(self._device)
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self._encoder.to("cpu")

    @torch.no_grad()
    def _encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """The rows of the tokens of each prompt, encoded one by one: an embedding depends on its own prompt alone."""
        with self.on_device():
            return {prompt: self._encode_one(prompt) for prompt in prompts}

    def _encode_one(self, prompt: str) -> Tensor:
        tokens = len(self._tokenizer(prompt, verbose=False).input_ids)
        if tokens > MAX_TOKENS:
            logger.warning("a prompt of %d tokens is cut to %d: %.60s...", tokens, MAX_TOKENS, prompt)
        # No cleaning of the text, and padding before the encoder rather than after: the server engine does the same.
        inputs = self._tokenizer(
            [prompt], padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
        ).to(self._device)
        hidden = self._encoder(inputs.input_ids, inputs.attention_mask).last_hidden_state[0]
        return hidden[: int(inputs.attention_mask.sum())].cpu()


def prompts_of(record: PromptRecord, guidance_scale: float) -> list[str]:
    """What is encoded for a record: its prompt, and with guidance its negative one."""
    if guidance_scale <= 1:
        return [record.prompt]
    negative = record.negative_prompt
    return [record.prompt, DEFAULT_NEGATIVE_PROMPT if negative is None else engine_negative_prompt(negative)]


def engine_negative_prompt(negative_prompt: str) -> str:
    """The negative prompt as the server engine encodes it: without white space at its ends, unless it is nothing else."""
    return negative_prompt if negative_prompt.isspace() else negative_prompt.strip()


def padded(valid: Tensor) -> Tensor:
    """Embeddings [512, D] of the rows [L, D] of a prompt's tokens."""
    return torch.cat([valid, valid.new_zeros(MAX_TOKENS - len(valid), valid.shape[1])])
