"""The facts of the released Wan2.2 models and what they allow: names, strides, channels, defaults, legal sizes. Plain
data and arithmetic, good for the meta device and for checks; it reads no file and imports no model code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from miles_wan.errors import InputError

# How a first image enters the transformer: not at all, as the clean first latent frame (TI2V), or as further input
# channels (I2V: 4 of a mask, then the latent of the image followed by grey frames).
ImageConditioning = Literal["none", "first_frame", "channels"]


@dataclass(frozen=True)
class WanFamily:
    """The facts of one released model.

    ``engine_model_id`` is the name by which the rollout engine picks its model class. Strides are pixels per latent
    element, ``patch_size`` latent elements per token (time, height, width). ``trained_sizes`` are (width, height).
    ``transformer`` is the full-size configuration, good for ``WanTransformer3DModel(**family.transformer)``.
    """

    name: str
    engine_model_id: str
    pipeline_classes: tuple[str, ...]
    experts: tuple[str, ...]
    in_channels: int
    latent_channels: int
    temporal_stride: int
    spatial_stride: int
    patch_size: tuple[int, int, int]
    expand_timesteps: bool
    boundary_ratio: float | None
    flow_shift: float
    guidance_scale: float
    guidance_scale_2: float | None
    width: int
    height: int
    num_frames: int
    fps: int
    trained_sizes: tuple[tuple[int, int], ...]
    transformer: Mapping[str, Any]

    @property
    def image_conditioning(self) -> ImageConditioning:
        """How a first image enters."""
        if self.expand_timesteps:
            return "first_frame"
        return "channels" if self.needs_image else "none"

    @property
    def needs_image(self) -> bool:
        """Whether the input has channels that only an image fills."""
        return self.in_channels > self.latent_channels

    @property
    def condition_channels(self) -> int:
        """Channels of the latent of a first image: those of a latent frame, or with a mask those beside the state."""
        return self.in_channels - self.latent_channels if self.needs_image else self.latent_channels

    @property
    def size_multiple(self) -> int:
        """Width and height of a video are multiples of this (pixels)."""
        return self.spatial_stride * self.patch_size[2]

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, h, w) of the latent of a video of legal size."""
        frames = (num_frames - 1) // self.temporal_stride + 1
        return self.latent_channels, frames, height // self.spatial_stride, width // self.spatial_stride


def _transformer(*, layers: int, heads: int, ffn_dim: int, in_channels: int, out_channels: int) -> dict[str, Any]:
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "in_channels": in_channels,
        "out_channels": out_channels,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": ffn_dim,
        "num_layers": layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
    }


_TI2V_5B = WanFamily(
    name="wan2.2-ti2v-5b",
    engine_model_id="Wan2.2-TI2V-5B-Diffusers",
    pipeline_classes=("WanPipeline", "WanImageToVideoPipeline"),
    experts=("transformer",),
    in_channels=48,
    latent_channels=48,
    temporal_stride=4,
    spatial_stride=16,
    patch_size=(1, 2, 2),
    expand_timesteps=True,
    boundary_ratio=None,
    flow_shift=5.0,
    guidance_scale=5.0,
    guidance_scale_2=None,
    width=1280,
    height=704,
    num_frames=121,
    fps=24,
    trained_sizes=((1280, 704), (704, 1280)),
    transformer=_transformer(layers=30, heads=24, ffn_dim=14336, in_channels=48, out_channels=48),
)
_A14B_SIZES = ((1280, 720), (720, 1280), (832, 480), (480, 832))
_T2V_A14B = WanFamily(
    name="wan2.2-t2v-a14b",
    engine_model_id="Wan2.2-T2V-A14B-Diffusers",
    pipeline_classes=("WanPipeline",),
    experts=("transformer", "transformer_2"),
    in_channels=16,
    latent_channels=16,
    temporal_stride=4,
    spatial_stride=8,
    patch_size=(1, 2, 2),
    expand_timesteps=False,
    boundary_ratio=0.875,
    flow_shift=12.0,
    guidance_scale=4.0,
    guidance_scale_2=3.0,
    width=1280,
    height=720,
    num_frames=81,
    fps=16,
    trained_sizes=_A14B_SIZES,
    transformer=_transformer(layers=40, heads=40, ffn_dim=13824, in_channels=16, out_channels=16),
)
_I2V_A14B = WanFamily(
    name="wan2.2-i2v-a14b",
    engine_model_id="Wan2.2-I2V-A14B-Diffusers",
    pipeline_classes=("WanImageToVideoPipeline",),
    experts=("transformer", "transformer_2"),
    in_channels=36,  # 16 noise + 4 mask + 16 image latents
    latent_channels=16,
    temporal_stride=4,
    spatial_stride=8,
    patch_size=(1, 2, 2),
    expand_timesteps=False,
    boundary_ratio=0.9,
    flow_shift=5.0,
    guidance_scale=3.5,
    guidance_scale_2=3.5,
    width=1280,
    height=720,
    num_frames=81,
    fps=16,
    trained_sizes=_A14B_SIZES,
    transformer=_transformer(layers=40, heads=40, ffn_dim=13824, in_channels=36, out_channels=16),
)
# What an engine guides away from where a record names no negative prompt and guidance is on: ``sample_neg_prompt`` of the
# released models' wan/configs/shared_config.py, also the default of SGLang.
DEFAULT_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，"
    "背景人很多，倒着走"
)
FAMILIES: Mapping[str, WanFamily] = {family.name: family for family in (_TI2V_5B, _T2V_A14B, _I2V_A14B)}


def family_named(name: str) -> WanFamily:
    """The family called ``name``; InputError with the known names otherwise."""
    if name not in FAMILIES:
        raise InputError([f"family: {name!r} is not known; choose one of {', '.join(FAMILIES)}"])
    return FAMILIES[name]


def legal_frames(num_frames: int, family: WanFamily, *, with_image: bool = False) -> str | None:
    """None if videos of ``num_frames`` frames can be trained, else the fault with the nearest legal values.

    With a first image the first latent frame is given, so that one frame leaves nothing to sample.
    """
    stride = family.temporal_stride
    below = (num_frames - 1) // stride * stride + 1
    if num_frames < 1 or below != num_frames:
        nearest = _nearest(max(below, 1 + stride if with_image else 1), below + stride)
        return f"{num_frames} frames: {family.name} makes {stride}n + 1 frames; the nearest legal values are {nearest}"
    if num_frames == 1 and with_image:
        return (
            f"1 frame: with a first image the only latent frame is given and nothing is sampled; "
            f"use at least {stride + 1} frames, or records without image_path"
        )
    return None


def legal_size(width: int, height: int, family: WanFamily) -> str | None:
    """None if ``width`` x ``height`` pixels is legal, else the fault with the nearest legal values."""
    multiple = family.size_multiple
    wrong = [(name, value) for name, value in (("width", width), ("height", height)) if value < 1 or value % multiple]
    if not wrong:
        return None
    hints = []
    for name, value in wrong:
        below = value // multiple * multiple
        hints.append(f"{name} {value} -> {_nearest(max(below, multiple), below + multiple)}")
    return f"{width}x{height}: {family.name} needs multiples of {multiple}; nearest legal values: {', '.join(hints)}"


def _nearest(below: int, above: int) -> str:
    return str(below) if below == above else f"{below} and {above}"
