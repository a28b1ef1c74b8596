"""Tiny Wan2.2 checkpoints of every family. In: a folder, a family and a seed. Out: the released diffusers layout, a few
megabytes of random weights. It knows nothing of rewards or data sets; the words its tokenizer must know are handed in.

The shapes are the released ones in every way the code can see (channels, compression, patch, experts, boundary, per-token
timesteps), only narrower.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from miles_wan.wan.facts import WanFamily, family_named

TEXT_VOCAB_SIZE = 256
TEXT_WIDTH = 32
DEFAULT_FAMILY = "wan2.2-ti2v-5b"


def write_checkpoint(folder: Path, words: Sequence[str], *, seed: int, family: str = DEFAULT_FAMILY) -> None:
    """Write transformers, vae, text_encoder, tokenizer, scheduler and model_index.json into ``folder``.

    Args:
        folder: created if needed.
        words: lower-case words that become one token each; other text falls apart into letters.
        seed: of all weights. The global random state of torch is left as it was.
        family: a released model.

    Raises:
        InputError: an unknown family.
    """
    facts = family_named(family)
    tokenizer = make_tokenizer(words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The order of these draws is part of the format: reference numbers were recorded with it.
        experts = [make_transformer(facts) for _ in facts.experts]
        vae = make_vae() if facts.spatial_stride == 16 else make_small_stride_vae()
        text_encoder = make_text_encoder()
    save_checkpoint(folder, facts, tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, experts=experts)


def save_checkpoint(
    folder: Path,
    family: WanFamily,
    *,
    tokenizer: T5Tokenizer,
    text_encoder: UMT5EncoderModel,
    vae: AutoencoderKLWan,
    experts: Sequence[WanTransformer3DModel],
) -> None:
    """Write the parts, a scheduler and model_index.json into ``folder``; ``experts`` as many as the family has."""
    parts = {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "vae": vae,
        "scheduler": make_scheduler(family.flow_shift),
        "transformer": experts[0],
        "transformer_2": experts[1] if len(experts) > 1 else None,
        "boundary_ratio": family.boundary_ratio,
        "expand_timesteps": family.expand_timesteps,
    }
    if family.needs_image:
        pipeline = WanImageToVideoPipeline(**parts, image_encoder=None, image_processor=None)
    else:
        pipeline = WanPipeline(**parts)
    pipeline.save_pretrained(folder)


def make_transformer(
    family: WanFamily | None = None, *, heads: int = 2, ffn_width: int = 64, layers: int = 2
) -> WanTransformer3DModel:
    """Blocks of heads of 24, drawn from the global random state; by default two blocks of width 48, of a TI2V model."""
    family = family_named(DEFAULT_FAMILY) if family is None else family
    return WanTransformer3DModel(
        patch_size=family.patch_size,
        num_attention_heads=heads,
        attention_head_dim=24,
        in_channels=family.in_channels,
        out_channels=family.latent_channels,
        text_dim=TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=ffn_width,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=1024,
    )


def make_vae() -> AutoencoderKLWan:
    """The VAE of TI2V with 16 base channels: [3, 4n+1, 16a, 16b] pixels to [48, n+1, a, b] latents."""
    return AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=16,
        z_dim=48,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
        latents_mean=[0.0] * 48,
        latents_std=[1.0] * 48,
    )


def make_small_stride_vae() -> AutoencoderKLWan:
    """The VAE of the A14B models with 16 base channels: [3, 4n+1, 8a, 8b] pixels to [16, n+1, a, b] latents."""
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )


def make_text_encoder() -> UMT5EncoderModel:
    """A UMT5 encoder of two layers and width 32."""
    config = UMT5Config(
        vocab_size=TEXT_VOCAB_SIZE,
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=8,
        feed_forward_proj="gated-gelu",
    )
    return UMT5EncoderModel(config)


def make_scheduler(flow_shift: float) -> UniPCMultistepScheduler:
    """The released scheduler: flow matching with this shift."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift)


def make_tokenizer(words: Sequence[str]) -> T5Tokenizer:
    """A Unigram tokenizer: one token per word of ``words``, letters for the rest, ``</s>`` at the end.

    Raises:
        ValueError: the vocabulary would not fit the text encoder.
    """
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    # A whole word costs less than its letters, so it always wins.
    whole = [(f"▁{word}", -1.0) for word in dict.fromkeys(words)]
    letters = [(piece, -10.0) for piece in ("▁", *string.ascii_lowercase) if piece not in dict(whole)]
    vocabulary = special + whole + letters
    if len(vocabulary) > TEXT_VOCAB_SIZE:
        raise ValueError(f"{len(vocabulary)} tokens do not fit a text encoder of {TEXT_VOCAB_SIZE}; use fewer words")
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)
