"""A small Wan2.2 VAE that reconstructs the moving shapes. In: scenes, a seed, a number of steps. Out: the VAE, with the statistics
of its latents in its configuration, and its quality on scenes it never saw. It knows no transformer and no reward.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor, nn

from miles_wan.tiny.checkpoint import make_vae
from miles_wan.tiny.clips import DIMMING, FILMING, NUM_FRAMES
from miles_wan.tiny.dataset import Scene, draw_motion
from miles_wan.tiny.learning import FastOptimizer, reproducible

THREADS = 2
# (clips, frames) of successive steps. A chunk of the causal VAE is the first frame, the first four after it, or later ones;
# each kind passes through the caches in its own way and has to be seen.
BATCHES = ((4, 5), (4, 9), (8, 1), (4, 5), (4, 9))
# Standard deviation of the noise that is added to the latents, whose own is 1 to 2: the decoder has to bear the small errors of
# a video model.
LATENT_NOISE = 0.05
MEASURED_CLIPS = 128


def train_vae(scenes: Sequence[Scene], *, seed: int, steps: int) -> tuple[AutoencoderKLWan, list[float]]:
    """Train the VAE of a TI2V checkpoint on clips of ``scenes``.

    Args:
        scenes: what it may see.
        seed: of weights and clips. The global random state of torch is left as it was.
        steps: optimizer steps.

    Returns:
        The VAE in evaluation mode, and the loss of each step: mean squared error of pixels in [-1, 1].
    """
    rng = random.Random(seed)
    with reproducible(seed, threads=THREADS):
        vae = make_vae()
        _unit_gain(vae)
        optimizer = FastOptimizer(vae, matrix_lr=0.01, lr=4e-3, steps=steps)
        losses = []
        for step in range(steps):
            count, num_frames = BATCHES[step % len(BATCHES)]
            pixels = _windows(scenes, rng, count=count, num_frames=num_frames)
            latents = vae.encode(pixels).latent_dist.mode()
            rebuilt = _decode_unclamped(vae, latents + LATENT_NOISE * torch.randn_like(latents))
            losses.append(optimizer.step((rebuilt - pixels).square().mean()))
        vae.eval().requires_grad_(False)
        _note_statistics(vae, scenes, rng=rng)
    return vae, losses


def reconstruction_psnr(vae: AutoencoderKLWan, scenes: Sequence[Scene], *, seed: int) -> float:
    """Peak signal-to-noise ratio in decibels of one clip of each scene after the VAE and back; mean over the clips."""
    rng = random.Random(seed)
    values = []
    with reproducible(seed, threads=THREADS), torch.no_grad():
        for scene in scenes:
            pixels = _windows([scene], rng, count=1, num_frames=NUM_FRAMES)
            error = vae.decode(vae.encode(pixels).latent_dist.mode()).sample - pixels
            values.append(10 * torch.log10(4 / error.square().mean()))  # the range [-1, 1] is 2 wide
    return float(torch.stack(values).mean())


def _windows(scenes: Sequence[Scene], rng: random.Random, *, count: int, num_frames: int) -> Tensor:
    """Successive frames of clips of scenes drawn from ``scenes``: [B, 3, T, H, W] in [-1, 1]."""
    clips = []
    for _ in range(count):
        clip = draw_motion(rng.choice(scenes), rng, FILMING).clip(NUM_FRAMES, dimming=rng.uniform(0.0, DIMMING[1]))
        first = rng.randint(0, NUM_FRAMES - num_frames)
        clips.append(torch.from_numpy(clip[first : first + num_frames]))
    return torch.stack(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def _unit_gain(vae: AutoencoderKLWan) -> None:
    """Draw all convolutions anew so that variance passes through them. With torch's own start, a sixth of it, the same steps lead
    nowhere."""
    for layer in vae.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            # What lies before the first frame is zero, so that one of the three taps in time counts there.
            taps = layer.kernel_size[0] if isinstance(layer, nn.Conv3d) else 1
            nn.init.normal_(layer.weight, std=(layer.weight[0].numel() / taps) ** -0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _decode_unclamped(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """What the decoder says before it is cut to [-1, 1], where no gradient comes back from."""
    chunks: list[Tensor] = []
    hook = vae.decoder.register_forward_hook(lambda module, args, output: chunks.append(output))
    try:
        vae.decode(latents)
    finally:
        hook.remove()
    return unpatchify(torch.cat(chunks, dim=2), vae.config.patch_size)


@torch.no_grad()
def _note_statistics(vae: AutoencoderKLWan, scenes: Sequence[Scene], *, rng: random.Random) -> None:
    """Put mean and standard deviation of each latent channel into the configuration, where everybody reads them."""
    batches = [_windows(scenes, rng, count=8, num_frames=NUM_FRAMES) for _ in range(MEASURED_CLIPS // 8)]
    latents = torch.cat([vae.encode(pixels).latent_dist.mode() for pixels in batches]).transpose(0, 1).flatten(1)
    vae.register_to_config(latents_mean=latents.mean(dim=1).tolist(), latents_std=latents.std(dim=1).tolist())
