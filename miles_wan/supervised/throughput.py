"""How fast a step was, from the real lengths of its samples. In: draws and seconds. Out: metrics. It measures nothing itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from miles_wan.supervised.config import SftConfig
from miles_wan.supervised.draws import Draw
from miles_wan.supervised.encode import EncodedClip
from miles_wan.supervised.flops import Operations, Shape, forward_operations, known_peak
from miles_wan.supervised.settings import plan
from miles_wan.wan.family import ModelFolder
from miles_wan.wan.text import MAX_TOKENS

logger = logging.getLogger(__name__)


class Throughput:
    """Metrics of a step's speed.

    Args:
        config: of the run.
        folder: the checkpoint.
        device: of this rank; all are alike.
    """

    def __init__(self, config: SftConfig, folder: ModelFolder, *, device: torch.device) -> None:
        self._is_full = config.training.method == "full"
        self._transformer = dict(folder.transformer)
        self._family = folder.family
        self._num_frames = plan(config, folder).clip.num_frames
        self._ranks = dist.get_world_size()
        self._peak = config.training.peak_tflops
        if self._peak is None and device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            self._peak = known_peak(name)
            if self._peak is None:
                logger.warning("the peak of %s is not known: no utilisation; set training.peak_tflops", name)

    def metrics(self, draws: Sequence[Draw], clips: Sequence[EncodedClip], seconds: float) -> dict[str, float]:
        """``sft/...`` of one step over ``draws``."""
        shapes = [self.shape(clips[draw.clip].size, with_image=draw.with_image) for draw in draws]
        total = sum(self.operations(shape).training(full=self._is_full) for shape in shapes)
        per_device = total / seconds / self._ranks / 1e12
        metrics = {
            "sft/step_seconds": seconds,
            "sft/samples_per_second": len(draws) / seconds,
            "sft/tokens_per_second": sum(shape.tokens for shape in shapes) / seconds,
            "sft/tflops_per_device": per_device,
        }
        return metrics if self._peak is None else {**metrics, "sft/utilisation": per_device / self._peak}

    def shape(self, size: tuple[int, int], *, with_image: bool) -> Shape:
        """Lengths of a sample of this video size. The text is as long as the model sees it: the released models attend to the
        zeros behind a caption, too."""
        _, frames, height, width = self._family.latent_shape(self._num_frames, size[1], size[0])
        depth, rows, columns = self._family.patch_size
        tokens = frames // depth * (height // rows) * (width // columns)
        per_token = with_image and self._family.expand_timesteps
        return Shape(tokens=tokens, text=MAX_TOKENS, timesteps=tokens if per_token else 1)

    def operations(self, shape: Shape) -> Operations:
        """Forward operations of one sample."""
        return forward_operations(self._transformer, shape)
