"""The whole configuration: one typed tree, one frozen model per room. Plain data; ``configuration`` loads and checks it.

The field descriptions here are the reference: ``docs/configuration.md`` is generated from them.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of every section: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)


def _expanded(path: str) -> str:
    """An unknown user stays as it is: the check of the path names it."""
    return os.path.expanduser(path)


LocalPath = Annotated[str, Field(min_length=1), AfterValidator(_expanded)]
Positive = Annotated[int, Field(ge=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[int, Field(ge=0)]

# The released models of the built-in rewards.
PICKSCORE_MODEL = "yuvalkirstain/PickScore_v1"
PICKSCORE_PROCESSOR = CLIP_MODEL = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class ModelConfig(Section):
    path: LocalPath = Field(
        description="Folder of a diffusers-format Wan2.2 checkpoint (it holds model_index.json), or a hub id."
    )
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="Storage and compute type of the frozen base weights.")
    lora_rank: Positive = Field(4, description="Rank r of every adapter pair.")
    lora_alpha: Positive = Field(
        8, description="Adapters are scaled by alpha / r. A whole number: the engine takes no other."
    )
    lora_targets: tuple[str, ...] = Field(
        ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"),
        min_length=1,
        description="Layers inside the transformer blocks that get an adapter (names end with one of these).",
    )
    init_adapter: LocalPath | None = Field(
        None, description="Start from this adapter (diffusers format) instead of zero."
    )


class DataConfig(Section):
    train: LocalPath = Field(description="Training records, JSON lines.")
    eval: LocalPath | None = Field(
        None, description="Validation records, JSON lines. Needed when eval.interval is above 0."
    )
    shuffle: bool = Field(True, description="Draw the records of each epoch in a seeded random order.")
    crop_warning_ratio: float = Field(
        1.25,
        ge=1,
        description="An image whose aspect ratio differs from the working size by more than this factor is "
        "counted and named: it is cropped.",
    )


class RolloutConfig(Section):
    width: Positive = Field(1280, description="Video width in pixels.")
    height: Positive = Field(704, description="Video height in pixels.")
    num_frames: Positive = Field(121, description="Video frames, 4n + 1.")
    fps: Positive = Field(24, description="Frames per second of the written videos.")
    num_inference_steps: int = Field(10, ge=2, description="Denoising steps of a training rollout.")
    guidance_scale: float = Field(
        5.0, ge=0, description="Classifier-free guidance; 1 or less turns it off (one forward a step)."
    )
    flow_shift: float = Field(5.0, gt=0, description="Time shift of the sigma grid.")
    sampler: Literal["flow_sde", "cps"] = Field("flow_sde", description="Law of the stochastic steps.")
    noise_level: float = Field(0.7, gt=0, description="eta of the stochastic steps.")
    window_size: Positive = Field(
        2, description="Stochastic, kept and trained steps per sample: one contiguous window."
    )
    window_range: tuple[int, int] | None = Field(
        None, description="The window lies in steps [first, end); by default everywhere but the last step."
    )
    prompts_per_rollout: Positive = Field(8, description="Records per rollout.")
    samples_per_prompt: int = Field(8, ge=2, description="Samples per record: one group.")
    num_engines: Positive = Field(1, description="SGLang servers; each takes tp_size x sp_size devices.")
    tp_size: Positive = Field(1, description="Tensor-parallel size of each engine.")
    sp_size: Positive = Field(1, description="Sequence-parallel (Ulysses) size of each engine.")
    concurrency: Positive = Field(4, description="Requests in flight per engine.")
    request_timeout: float = Field(1800.0, gt=0, description="Seconds for one video before the engine counts as hung.")
    start_timeout: float = Field(1200.0, gt=0, description="Seconds an engine may take to start.")
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="Precision of the engine's transformer.")
    lora_merge_mode: Literal["dynamic", "merge"] = Field(
        "dynamic",
        description="dynamic: the engine adds the adapter at run time, as the trainer does; merge: it is folded into the weights.",
    )
    server_args: tuple[str, ...] = Field(
        (), description="Further command line arguments of the SGLang server, as they are."
    )


class RewardFunction(Section):
    name: str = Field(description="A built-in reward (pickscore, clip) or package.module:function.")
    weight: float = Field(1.0, description="Weight in the training reward; 0 is measured at validation only.")
    model: str = Field(
        default_factory=str,
        description="pickscore: a CLIP folder in the format of transformers, or a hub id (default: "
        f"{PICKSCORE_MODEL}). clip: a folder in the format of open_clip (open_clip_config.json and weights), a hub id, or "
        f"architecture:tag as open_clip lists them, such as ViT-L-14:openai (default: {CLIP_MODEL}).",
    )
    processor: str = Field(
        default_factory=str,
        description=f"pickscore: processor folder or hub id (default: {PICKSCORE_PROCESSOR}). clip takes none.",
    )
    num_frames: Positive = Field(
        4, description="pickscore, clip: frames scored per video, chosen uniformly; their mean is the score."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        """Each built-in reward has a released model of its own."""
        if not isinstance(values, dict):
            return values
        if values.get("name") == "pickscore":
            return {"model": PICKSCORE_MODEL, "processor": PICKSCORE_PROCESSOR, **values}
        return {"model": CLIP_MODEL, **values} if values.get("name") == "clip" else values


class RewardConfig(Section):
    functions: tuple[RewardFunction, ...] = Field(
        (RewardFunction(name="pickscore"),), description="Rewards that are summed with their weights."
    )
    num_workers: Positive = Field(1, description="Reward actors.")
    batch_size: Positive = Field(
        8, description="Videos scored together. Fixed batches, so that equal videos get equal numbers."
    )
    dtype: Literal["bf16", "fp32"] = Field("fp32", description="Precision of the reward models.")


class AlgorithmConfig(Section):
    advantage_std: Literal["group", "global", "none"] = Field(
        "group",
        description="Divide the centred rewards by the std of the group, of the whole rollout, or not (Dr.GRPO).",
    )
    advantage_clip: float = Field(5.0, gt=0, description="Advantages are clamped to +- this.")
    advantage_sign: Literal[1, -1] = Field(
        1, description="-1 flips every advantage: a control run that must get worse."
    )
    clip_range: float = Field(
        1e-3,
        gt=0,
        description="The ratio is clipped to 1 +- this. Log-probs are means over elements, hence small values.",
    )
    kl_beta: float = Field(
        0.0, ge=0, description="Weight of the KL to the reference (adapter off); 0 saves its forward."
    )
    optimizer_steps_per_rollout: Positive = Field(1, description="Optimizer steps that share one rollout.")
    max_log_prob_gap: float = Field(
        0.05,
        gt=0,
        description="Abort when engine and trainer differ by more than this about a log-prob before an update.",
    )


class OptimizerConfig(Section):
    lr: float = Field(1e-4, ge=0, description="Peak learning rate of AdamW.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW betas.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(1e-4, ge=0, description="Decoupled weight decay of the adapters.")
    warmup_steps: NonNegative = Field(
        0, description="Linear warm-up from 0, in optimizer steps; the first of them has rate 0."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Decay after the warm-up, to 0 at the last step."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm is clipped to this.")


class TrainingConfig(Section):
    dp_size: Positive = Field(1, description="FSDP2 ranks: parameters are sharded and samples split over them.")
    micro_batch_size: Positive = Field(1, description="(sample, step) pairs in one forward and backward of a rank.")
    activation_checkpointing: bool = Field(True, description="Recompute block activations in the backward pass.")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="AdamW and its schedule.")


class EvalConfig(Section):
    interval: NonNegative = Field(
        0, description="Validate before training, every so many rollouts, and at the end; 0 turns it off."
    )
    num_inference_steps: Positive | None = Field(
        None, description="Steps of a validation video; by default those of the rollout."
    )
    seed: NonNegative = Field(1234, description="Seed of the validation noise: the same for every validation and run.")
    max_records: Positive | None = Field(None, description="Use only the first so many validation records.")
    save_videos: NonNegative = Field(4, description="Validation videos written as mp4 each time.")


class CheckpointConfig(Section):
    interval: NonNegative = Field(10, description="Save every so many rollouts (and at the end); 0 turns it off.")
    keep_last: Positive = Field(2, description="Complete checkpoints kept.")


class SyncConfig(Section):
    transport: Literal["auto", "cuda_ipc", "shared_memory"] = Field(
        "auto",
        description="How adapters reach the engines: CUDA IPC where every engine device is also a trainer's, else shared memory of the node.",
    )


class ClusterConfig(Section):
    device: Literal["cpu", "cuda"] = Field("cuda", description="Device of engines, trainers and rewards.")
    num_gpus: Positive = Field(1, description="Devices used. On a CPU these are worker slots.")
    cuda_visible_devices: str | None = Field(
        None, description="Device list, as CUDA_VISIBLE_DEVICES; set before Ray starts."
    )


class Config(Section):
    """Everything a training run is made of."""

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    seed: int = Field(
        0, ge=0, lt=2**63, description="Run seed: data order, noise, windows and adapter initialisation follow from it."
    )
    num_rollouts: Positive = Field(100, description="Length of the run.")
    output_dir: LocalPath = Field(
        "runs/run", description="Folder of metrics, videos, checkpoints and the final adapter."
    )
    resume: Literal["latest"] | None = Field(
        None, description="latest: continue the run in output_dir from its newest complete checkpoint."
    )
