"""First-frame images and clips to latents, and latents to frames, as the server engine makes them. In: an image file and a
size, frames, or a latent. Out: normalised latent, or uint8 frames. It knows no transformer and no prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from PIL import Image, ImageOps
from torch import Tensor

from miles_wan.errors import EngineError, first_line
from miles_wan.pixels import fill_size
from miles_wan.records import UInt8
from miles_wan.wan.conditioning import image_channels

_CACHED_IMAGES = 512


class VideoCodec:
    """The VAE of a checkpoint in float32, with a cache of the image latents used last.

    Args:
        model_path: folder of the checkpoint.
        device: where it computes.
    """

    def __init__(self, model_path: Path, device: torch.device) -> None:
        vae = AutoencoderKLWan.from_pretrained(
            str(model_path), subfolder="vae", torch_dtype=torch.float32, local_files_only=True
        )
        self._vae = vae.to(device).eval().requires_grad_(False)
        self._device = device
        self._mean = torch.tensor(vae.config.latents_mean, device=device).view(1, -1, 1, 1, 1)
        self._scale = 1.0 / torch.tensor(vae.config.latents_std, device=device).view(1, -1, 1, 1, 1)
        self._cache: OrderedDict[tuple[str, int, int, int, int, int], Tensor] = OrderedDict()

    def encode_image(self, path: str, width: int, height: int) -> Tensor:
        """Normalised latent [C, 1, h, w] (CPU) of an image that fills ``width`` x ``height`` pixels, cropped in the middle.

        Raises:
            EngineError: the file cannot be read as an image.
        """
        return self._image_latent(path, width, height, 1)

    def encode_image_channels(self, path: str, width: int, height: int, num_frames: int) -> Tensor:
        """The further input channels [4 + C, F, h, w] (CPU) of Wan2.2-I2V: mask and normalised latent of the image followed
        by grey frames. Raises EngineError as ``encode_image``."""
        return image_channels(self._image_latent(path, width, height, num_frames))

    def _image_latent(self, path: str, width: int, height: int, num_frames: int) -> Tensor:
        key = (path, *_file_state(path), width, height, num_frames)
        if key not in self._cache:
            self._cache[key] = self.encode_first(image_pixels(path, width, height), num_frames)
        self._cache.move_to_end(key)
        if len(self._cache) > _CACHED_IMAGES:
            self._cache.popitem(last=False)
        return self._cache[key]

    @torch.no_grad()
    def encode_frames(self, frames: UInt8) -> Tensor:
        """Normalised latent [C, F, h, w] (CPU) of a clip, frames [T, H, W, 3] with T = 4n + 1: the mode of the VAE's
        distribution, as for images."""
        unit = torch.from_numpy(frames).to(self._device).float() / 255
        return self._encode((2 * unit - 1).permute(3, 0, 1, 2)[None])

    @torch.no_grad()
    def encode_first(self, pixels: Tensor, num_frames: int) -> Tensor:
        """Normalised latent [C, F, h, w] (CPU) of ``num_frames`` frames of which only the first is given, ``pixels`` [3, H, W]
        in [-1, 1]; the others are zeros, mid-grey."""
        video = torch.zeros(1, 3, num_frames, *pixels.shape[1:], device=self._device)
        video[0, :, 0] = pixels.to(self._device)
        return self._encode(video)

    def _encode(self, video: Tensor) -> Tensor:
        latent = self._vae.encode(video).latent_dist.mode()
        return ((latent - self._mean) * self._scale)[0].cpu()

    @torch.no_grad()
    def decode(self, latent: Tensor) -> UInt8:
        """Frames [T, H, W, 3] of a normalised latent [C, F, h, w]."""
        video = self._vae.decode(latent[None].to(self._device) / self._scale + self._mean).sample[0]
        unit = (video / 2 + 0.5).clamp(0, 1)
        return unit.mul(255).round().to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu().numpy()


def image_pixels(path: str, width: int, height: int) -> Tensor:
    """Pixels [3, height, width] in [-1, 1]: upright, resized (Lanczos) until it covers the size, cropped in the middle.

    Raises:
        EngineError: the file cannot be read as an image.
    """
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # each decoder has errors of its own for damaged files
        raise EngineError(f"image {path} cannot be read ({first_line(error)}); check the file") from error
    return pixels_of(np.asarray(fill_size(image, width, height)))


def pixels_of(frame: UInt8) -> Tensor:
    """Pixels [3, H, W] in [-1, 1] of a frame [H, W, 3]."""
    return 2 * torch.from_numpy(frame.astype(np.float32) / 255).permute(2, 0, 1) - 1


def _file_state(path: str) -> tuple[int, int]:
    """Time and size: an image that was replaced is encoded anew."""
    try:
        state = Path(path).stat()
    except OSError as error:
        raise EngineError(f"image {path} cannot be read ({error.strerror}); check the path") from error
    return state.st_mtime_ns, state.st_size
