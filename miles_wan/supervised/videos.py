"""Sample videos of validation clips, by the weights that are being trained. In: encoded clips. Out: mp4 files. The VAE is in memory
only while they are decoded; what guides them comes from the cache.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from miles_wan.errors import MilesWanError
from miles_wan.records import Conditioning, SamplingSettings, derived_seed
from miles_wan.rollout.local.sampler import denoise
from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.encode import ClipLibrary, EncodedClip
from miles_wan.supervised.settings import Plan
from miles_wan.supervised.trainer import SupervisedTrainer
from miles_wan.tracking.media import write_video
from miles_wan.wan.facts import DEFAULT_NEGATIVE_PROMPT
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.video import VideoCodec

logger = logging.getLogger(__name__)


class SampleVideos:
    """Makes the videos of one run: the same clips, seeds and settings every time.

    Args:
        config: of the run.
        plan: what it means for this checkpoint.
        trainer: with all experts loaded.
    """

    def __init__(
        self,
        config: SftConfig,
        plan: Plan,
        folder: ModelFolder,
        library: ClipLibrary,
        trainer: SupervisedTrainer,
        *,
        device: torch.device,
    ) -> None:
        self._config, self._plan, self._folder = config, plan, folder
        self._library, self._trainer, self._device = library, trainer, device

    def write(self, clips: Sequence[EncodedClip], directory: Path) -> list[Path]:
        """One video of each of ``clips`` into ``directory`` (a collective; every rank makes its share). The paths of this rank.

        Raises:
            MilesWanError: values that are not finite.
        """
        ranks, rank = dist.get_world_size(), dist.get_rank()
        latents: dict[int, torch.Tensor] = {}
        for start in range(0, len(clips), ranks):
            place = min(
                start + rank, len(clips) - 1
            )  # forwards are collectives: a rank without a video makes one again
            latent = self._sample(clips[place], place)
            if start + rank < len(clips):
                latents[place] = latent
        if not latents:
            return []
        codec = VideoCodec(self._folder.path, self._device)
        paths = [
            write_video(directory / f"{place:02d}.mp4", codec.decode(latent), self._fps())
            for place, latent in latents.items()
        ]
        del codec
        gc.collect()
        return paths

    def _sample(self, clip: EncodedClip, place: int) -> torch.Tensor:
        """The last latent [C, F, h, w]."""
        sampling = self.settings(clip.size)
        tensors = self._library.load(clip)
        given = self._plan.image_share > 0 and tensors.condition is not None
        conditioning = Conditioning(
            prompt_embeds=tensors.prompt_embeds.numpy(),
            negative_prompt_embeds=self._library.text(DEFAULT_NEGATIVE_PROMPT).numpy(),
            condition_latent=tensors.condition.numpy() if given and tensors.condition is not None else None,
        )
        state = None
        with self._trainer.computing():
            for step in denoise(
                self._trainer.model,
                conditioning,
                sampling,
                seeds=[derived_seed(self._config.eval.seed, "video", place)],
                stochastic_steps=(),
                latent_shape=self._folder.family.latent_shape(sampling.num_frames, sampling.height, sampling.width),
                device=self._device,
            ):
                state = step.next_state
        if state is None or not bool(torch.isfinite(state).all()):
            raise MilesWanError(f"the sample video of {clip.record.source} holds values that are not finite")
        return state[0].cpu()

    def settings(self, size: tuple[int, int]) -> SamplingSettings:
        """How a video of this size is sampled: without noise, on the grid of the model's own flow shift."""
        family, evaluation = self._folder.family, self._config.eval
        second = evaluation.guidance_scale_2
        return SamplingSettings(
            width=size[0],
            height=size[1],
            num_frames=self._plan.clip.num_frames,
            fps=round(self._fps()),
            num_inference_steps=evaluation.num_inference_steps,
            guidance_scale=family.guidance_scale if evaluation.guidance_scale is None else evaluation.guidance_scale,
            guidance_scale_2=family.guidance_scale_2 if second is None else second,
            flow_shift=self._plan.shift,
            kind="ode",
        )

    def _fps(self) -> float:
        rate = self._config.data.fps
        return self._folder.family.fps if rate is None else rate / self._config.data.stride
