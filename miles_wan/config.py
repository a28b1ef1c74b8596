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
    quantization: Literal["none", "int8", "fp8"] = Field(
        "none",
        description="Storage of the frozen linear layers inside the transformer blocks: 8 bits with a scale per output "
        "channel. They compute in dtype (docs/quantization.md).",
    )
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
        None,
        description="Start from this adapter (diffusers format) instead of zero; with two experts a folder that holds one in "
        "transformer/ and one in transformer_2/.",
    )
    train_experts: Literal["both", "high", "low"] = Field(
        "both",
        description="A14B: the experts that are trained, of high or low noise; the other one stays as it is, and "
        "rollout.window_range must lie in the steps of those that are.",
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
    engine: Literal["sglang", "local"] = Field(
        "sglang",
        description="sglang: servers with a copy of the model; local: the FSDP ranks generate with the weights they hold.",
    )
    width: Positive = Field(1280, description="Video width in pixels.")
    height: Positive = Field(704, description="Video height in pixels.")
    num_frames: Positive = Field(121, description="Video frames, 4n + 1.")
    fps: Positive = Field(24, description="Frames per second of the written videos.")
    num_inference_steps: int = Field(10, ge=2, description="Denoising steps of a training rollout.")
    guidance_scale: float = Field(
        5.0, ge=0, description="Classifier-free guidance; 1 or less turns it off (one forward a step)."
    )
    guidance_scale_2: float | None = Field(
        None,
        ge=0,
        description="A14B: guidance of the low-noise expert; guidance_scale is that of the other. No default.",
    )
    flow_shift: float = Field(5.0, gt=0, description="Time shift of the sigma grid.")
    sigmas: tuple[float, ...] | None = Field(
        None,
        description="The grid number by number, from 1 to the terminal 0, in place of flow_shift: num_inference_steps + 1 "
        "values.",
    )
    sampler: Literal["flow_sde", "dance_sde", "cps", "flow_grpo_wan", "ode"] = Field(
        "flow_sde",
        description="Law of the stochastic steps (docs/transitions.md). dance_sde and flow_grpo_wan: local engine only; "
        "ode: no noise, for algorithm.loss nft.",
    )
    noise_level: float = Field(
        0.7, gt=0, le=10, description="eta of the stochastic steps; flow_grpo_wan and ode have none."
    )
    cps_log_prob: Literal["density", "squared_error"] = Field(
        "density", description="cps: the true density, or minus the squared error as in Flow-CPS."
    )
    step_selection: Literal["window", "subset", "sliding", "all", "given"] = Field(
        "window",
        description="Which steps are stochastic, kept and trained: a random window, a random subset, a window that moves "
        "with training (MixGRPO), all of window_range, or those of steps.",
    )
    window_size: Positive = Field(2, description="Steps per sample of a window, subset or sliding window.")
    window_range: tuple[int, int] | None = Field(
        None, description="The steps lie in [first, end); by default everywhere but the last step."
    )
    window_interval: Positive = Field(25, description="sliding: rollouts that the window stays where it is.")
    window_stride: Positive = Field(1, description="sliding: steps that it then moves towards the clean end.")
    window_wrap: bool = Field(False, description="sliding: begin again after the last window instead of staying there.")
    steps: tuple[int, ...] | None = Field(None, description="given: the step indices.")
    samples_per_call: Positive = Field(
        1,
        description="Samples of one record that an engine makes together. sglang: outputs of one request, one after the "
        "other; local: one batch, whose float noise depends on this number.",
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


class NftConfig(Section):
    beta: float = Field(
        1.0, gt=0, description="How far v+ and v- are from the old velocity: v+- = v_old +- beta (v - v_old)."
    )
    sigmas_per_sample: Positive = Field(
        2, description="Noise levels of the rollout's grid that each video is noised to, drawn anew in each rollout."
    )
    reference_weight: float = Field(0.0, ge=0, description="Weight of mean (v - v_base)^2; 0 saves its forward.")


class AlgorithmConfig(Section):
    loss: Literal["grpo", "guard", "dppo", "nft"] = Field(
        "grpo", description="Flow-GRPO, GRPO-Guard, Flow-DPPO or DiffusionNFT (docs/algorithms.md)."
    )
    combine_rewards: Literal["sum", "gdpo"] = Field(
        "sum",
        description="Several rewards: sum them with their weights, then normalise; or normalise each, then sum with "
        "weights and normalise over the rollout (GDPO).",
    )
    advantage_std: Literal["group", "global", "none"] = Field(
        "group",
        description="Divide the centred rewards by the std of the group, of the whole rollout, or not (Dr.GRPO).",
    )
    advantage_ddof: Literal[0, 1] = Field(0, description="The std divides by n - this.")
    advantage_eps: float = Field(1e-4, ge=0, description="Added to the std.")
    advantage_floor: float = Field(0.0, ge=0, description="A smaller std counts as this.")
    advantage_clip: float = Field(5.0, gt=0, description="Advantages are clamped to +- this.")
    advantage_sign: Literal[1, -1] = Field(
        1, description="-1 flips every advantage: a control run that must get worse."
    )
    best_of_n: Positive | None = Field(
        None, description="Train on the so many best and so many worst samples of each group alone."
    )
    min_group_std: float | None = Field(
        None, gt=0, description="Leave out groups whose rewards spread by less than this (std)."
    )
    clip_range: float = Field(
        1e-3,
        gt=0,
        description="grpo, guard: the ratio is clipped to 1 +- this. Log-probs are means over elements, hence small values.",
    )
    clip_range_high: float | None = Field(
        None, gt=0, description="The upper clip range where it is another one (clip-higher)."
    )
    kl_threshold: float = Field(
        1e-6, gt=0, description="dppo: samples that moved by more than this KL per element are not moved on."
    )
    step_weight: Literal["none", "noise_level"] = Field(
        "none", description="noise_level: steps count by the std of their noise (TempFlow-GRPO)."
    )
    old_log_prob: Literal["engine", "recompute"] = Field(
        "recompute",
        description="The old policy's log-probs and means: the engine's, or the trainer's own before the first update, so "
        "that every ratio begins at exactly 1. Both cost the same.",
    )
    kl_beta: float = Field(0.0, ge=0, description="Weight of the KL to the reference; 0 saves its forward.")
    kl_reference: Literal["base", "ema"] = Field(
        "base", description="The reference: the frozen base (adapter off), or the average of training.ema_decay."
    )
    nft: NftConfig = Field(NftConfig(), description="DiffusionNFT.")
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
    ema_decay: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Keep an average of the adapter: new = decay x old + (1 - decay) x adapter after each optimizer step. "
        "Exported as adapter_ema/; the old policy of algorithm.loss nft, which generates then.",
    )
    ema_rise: float | None = Field(
        None, gt=0, description="The decay of optimizer step i (from 1) is at most this x i (DiffusionNFT: 0.001)."
    )
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
    weights: Literal["policy", "ema"] = Field(
        "policy", description="Validate the trained adapter, or the average of training.ema_decay."
    )
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
    deterministic: bool = Field(
        False,
        description="Strict: only operations whose result is the same bit for bit in every run; one without such a form "
        "ends the run.",
    )
    num_rollouts: Positive = Field(100, description="Length of the run.")
    output_dir: LocalPath = Field(
        "runs/run", description="Folder of metrics, videos, checkpoints and the final adapter."
    )
    resume: Literal["latest"] | None = Field(
        None, description="latest: continue the run in output_dir from its newest complete checkpoint."
    )
