"""The configuration of supervised training: one typed tree beside that of reinforcement learning, from the same parts. Plain
data; ``settings`` loads and checks it. The descriptions are the reference in docs/supervised.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles_wan.config import LocalPath, ModelConfig, NonNegative, OptimizerConfig, Positive, Section

# The field's validation timesteps.
TIMESTEPS = (125.0, 250.0, 375.0, 500.0, 625.0, 750.0, 875.0)


class ClipConfig(Section):
    train: LocalPath = Field(description="Training clips, JSON lines.")
    eval: LocalPath | None = Field(
        None, description="Validation clips, JSON lines. Needed when eval.interval is above 0."
    )
    width: Positive | None = Field(None, description="Video width in pixels; by default the model's.")
    height: Positive | None = Field(None, description="Video height in pixels; by default the model's.")
    buckets: tuple[tuple[int, int], ...] = Field(
        (),
        description="Aspect buckets [width, height] in place of width and height: each clip is cropped to the one whose shape is "
        "nearest to its own.",
    )
    num_frames: Positive | None = Field(None, description="Frames of a clip, 4n + 1; by default the model's.")
    fps: float | None = Field(
        None,
        gt=0,
        description="Frames per second that the model sees, taken by the video's time stamps; by default every frame of the "
        "video at its own rate.",
    )
    stride: Positive = Field(1, description="Take every so many frames (of fps, or of the video).")
    image_share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the samples that train image-to-video, their first frame given. TI2V: 0.5 by default; "
        "T2V-A14B takes none (0), I2V-A14B always one (1).",
    )
    text_dropout: float = Field(
        0.1, ge=0, lt=1, description="Share of the samples that train without their caption, for guidance."
    )
    skip_other_languages: bool = Field(
        False, description="Leave out captions in another script than most; they are named and counted either way."
    )
    shuffle: bool = Field(True, description="Draw the clips of each epoch in a seeded random order.")
    cache_dir: LocalPath = Field(
        "runs/cache",
        description="Latents and embeddings by content, for all runs: another VAE, size or stride is another entry.",
    )


class TimestepConfig(Section):
    law: Literal["uniform", "logit_normal"] = Field("uniform", description="Law of u before the shift.")
    shift: float | None = Field(
        None, gt=0, description="Time shift of the draws; by default the model's flow shift (5; T2V-A14B 12)."
    )
    mean: float = Field(0.0, description="logit_normal: mean of logit(u).")
    std: float = Field(1.0, gt=0, description="logit_normal: std of logit(u).")
    high_share: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="A14B: share of the draws for the expert of high noise; by default it follows from law, shift and boundary "
        "(uniform, shift 5, boundary 0.875: 41.7 %). With one trained expert all draws are its own.",
    )
    weighting: Literal["none", "cosmap"] = Field(
        "none", description="Weight of the loss by sigma: none, or cosmap (SD3), 2 / (pi (1 - 2 s + 2 s^2))."
    )


class SupervisedTrainingConfig(Section):
    method: Literal["lora", "full"] = Field(
        "lora", description="Train adapters on the frozen model, or the whole transformers (float32 weights)."
    )
    num_steps: Positive = Field(1000, description="Optimizer steps of the run, each over all trained experts.")
    batch_size: Positive = Field(
        8,
        description="Samples of one optimizer step, over all ranks: dp_size x micro-batches x micro_batch_size. The gradient is "
        "accumulated over the micro-batches.",
    )
    dp_size: Positive = Field(1, description="FSDP2 ranks: parameters are sharded and samples split over them.")
    micro_batch_size: Positive = Field(
        1, description="Samples of one expert and one size in one forward and backward of a rank."
    )
    activation_checkpointing: bool = Field(True, description="Recompute block activations in the backward pass.")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and its schedule.")
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="Peak of one device in 10^12 floating point operations per second, for the utilisation; by default that of "
        "known GPUs in bf16, and no utilisation elsewhere.",
    )


class SupervisedEvalConfig(Section):
    interval: NonNegative = Field(
        0, description="Validate before training, every so many steps and at the end; 0 turns it off."
    )
    timesteps: tuple[float, ...] = Field(TIMESTEPS, description="Fixed timesteps of the validation loss.")
    quantiles: tuple[float, ...] = Field(
        (0.1, 0.3, 0.5, 0.7, 0.9), description="And these places inside the range of each expert, from 0 to 1."
    )
    max_records: Positive | None = Field(None, description="Use only the first so many validation clips.")
    seed: NonNegative = Field(1234, description="Seed of the validation noise: the same for every validation and run.")
    videos: NonNegative = Field(
        0,
        description="Sample videos of the first so many validation clips, made at every validation (with timesteps.shift).",
    )
    num_inference_steps: Positive = Field(20, description="Denoising steps of a sample video.")
    guidance_scale: float | None = Field(
        None, ge=0, description="Guidance of sample videos (A14B: of the high-noise expert); by default the model's."
    )
    guidance_scale_2: float | None = Field(
        None, ge=0, description="A14B: guidance of the low-noise expert; by default the model's."
    )


class SupervisedCheckpointConfig(Section):
    interval: NonNegative = Field(500, description="Save every so many steps (and at the end); 0 turns it off.")
    keep_last: Positive = Field(2, description="Complete checkpoints kept.")


class SftConfig(Section):
    """Everything a supervised run is made of."""

    model: ModelConfig
    data: ClipConfig
    timesteps: TimestepConfig = Field(default_factory=TimestepConfig)
    training: SupervisedTrainingConfig = Field(default_factory=SupervisedTrainingConfig)
    eval: SupervisedEvalConfig = Field(default_factory=SupervisedEvalConfig)
    checkpoint: SupervisedCheckpointConfig = Field(default_factory=SupervisedCheckpointConfig)
    device: Literal["cpu", "cuda"] = Field("cuda", description="Device of all ranks.")
    cuda_visible_devices: str | None = Field(None, description="Device list, as CUDA_VISIBLE_DEVICES.")
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Run seed: data order, noise, timesteps and adapter initialisation follow from it.",
    )
    output_dir: LocalPath = Field(
        "runs/sft", description="Folder of metrics, videos, checkpoints and the trained weights."
    )
    resume: Literal["latest"] | None = Field(
        None, description="latest: continue the run in output_dir from its newest complete checkpoint."
    )
