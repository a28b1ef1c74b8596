"""SGLang's plugin of this project: a table of hooks, each with the engine fault it cures. SGLang calls ``register`` in its
command line, workers and HTTP process. A hook whose fault the installed engine no longer has is left out; what was done
is told by the server's identity route. A hook that SGLang cannot apply is only logged there, so the client checks.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles_wan.rollout.sglang import hooks

logger = logging.getLogger(__name__)

DISABLE_VARIABLE = "MILES_WAN_SGLANG_DISABLE"  # names of hooks, separated by commas; for the tests of the hooks
_RUNTIME = "multimodal_gen/runtime"
_ROOT = "sglang.multimodal_gen.runtime"

HookState = Literal["active", "failed", "disabled", "not needed"]


@dataclass(frozen=True)
class Patch:
    """One function of the engine and what is put before, after, around or instead of it."""

    target: str
    kind: Literal["before", "after", "around", "replace"]
    function: Callable[..., Any]


@dataclass(frozen=True)
class Hook:
    """A cure. ``file`` (inside the sglang package) holds ``marker`` as long as the engine has the fault."""

    name: str
    fault: str
    patches: tuple[Patch, ...]
    file: str
    marker: str

    def still_needed(self) -> bool:
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            return False
        path = Path(next(iter(spec.submodule_search_locations))) / self.file
        return path.is_file() and self.marker in path.read_text(encoding="utf-8")


HOOKS: tuple[Hook, ...] = (
    Hook(
        name="identity",
        fault="a stale or foreign server on the port answers as if it were ours",
        patches=(Patch(f"{_ROOT}.entrypoints.http_server.create_app", "after", hooks.add_identity_routes),),
        file=f"{_RUNTIME}/entrypoints/http_server.py",
        marker="def create_app(",
    ),
    Hook(
        name="requested_size",
        fault="with a first image (TI2V) the requested width and height are ignored",
        patches=(
            Patch(
                f"{_ROOT}.pipelines_core.stages.input_validation.InputValidationStage.preprocess_condition_image",
                "around",
                hooks.remember_requested_size,
            ),
            Patch(
                f"{_ROOT}.pipelines_core.stages.input_validation._best_output_size",
                "around",
                hooks.requested_output_size,
            ),
        ),
        file=f"{_RUNTIME}/pipelines_core/stages/input_validation.py",
        marker="max_area = 704 * 1280",
    ),
    Hook(
        name="requested_image_size",
        fault="with a first image (I2V) the video has the shape of the image, whatever size is requested",
        patches=(
            Patch(
                f"{_ROOT}.pipelines_core.stages.input_validation.InputValidationStage.preprocess_condition_image",
                "before",
                hooks.cover_requested_size,
            ),
        ),
        file=f"{_RUNTIME}/pipelines_core/stages/input_validation.py",
        marker="batch.condition_image = batch.condition_image.resize((width, height))",
    ),
    Hook(
        name="separate_outputs",
        fault="several outputs of a request fail with a first image (TI2V), else get other noise than their seeds give",
        patches=tuple(
            Patch(
                f"sglang.multimodal_gen.configs.pipeline_configs.wan.{name}.supports_sequential_multi_output_inference",
                "replace",
                hooks.one_output_at_a_time,
            )
            for name in ("Wan2_2_TI2V_5B_Config", "Wan2_2_T2V_A14B_Config", "Wan2_2_I2V_A14B_Config")
        ),
        file=f"{_RUNTIME}/post_training/flow_rollout_controller.py",
        marker="                self.latents_shape,\n                out=buffer[i : i + 1],",
    ),
    Hook(
        name="given_sigmas",
        fault="a request cannot give its sigma grid, only the closed form with the server's flow shift is offered",
        patches=(
            Patch(
                f"{_ROOT}.pipelines_core.stages.timestep_preparation.TimestepPreparationStage.forward",
                "before",
                hooks.given_sigmas,
            ),
        ),
        file=f"{_RUNTIME}/pipelines_core/stages/timestep_preparation.py",
        marker="scheduler = get_or_create_rollout_request_scheduler(batch, self.scheduler)",
    ),
    Hook(
        name="condition_latent",
        fault="an answer lacks what a first image gives the input (I2V): mask and latents beside the state",
        patches=(
            Patch(f"{_ROOT}.post_training.rollout_hooks.prepare_rollout_if_enabled", "after", hooks.remember_condition),
            Patch(f"{_ROOT}.post_training.rollout_hooks.init_rollout_env_if_enabled", "before", hooks.return_condition),
        ),
        file=f"{_RUNTIME}/post_training/rollout_hooks.py",
        marker="image_kwargs=_kwargs_to_cpu(image_kwargs),",
    ),
    Hook(
        name="sampled_log_prob",
        fault="the log-prob counts latent frame 0, which was given by the image and not sampled",
        patches=(
            Patch(
                f"{_ROOT}.post_training.rollout_hooks.prepare_rollout_if_enabled",
                "after",
                hooks.mark_conditioned_rollout,
            ),
            Patch(
                f"{_ROOT}.post_training.flow_rollout_controller.FlowRolloutController.append_local_rollout_log_probs",
                "before",
                hooks.mask_given_frame,
            ),
        ),
        file=f"{_RUNTIME}/post_training/flow_rollout_controller.py",
        marker="log_prob_no_const_val = -((full_variance_noise * noise_std_dev) ** 2)",
    ),
    Hook(
        name="generator_noise",
        fault="on a GPU the noise of a step cannot be drawn from a CPU generator, so it would depend on the device",
        patches=(
            Patch(
                f"{_ROOT}.post_training.flow_rollout_controller.FlowRolloutController._rollout_variance_noise",
                "around",
                hooks.noise_of_the_generator,
            ),
        ),
        file=f"{_RUNTIME}/post_training/flow_rollout_controller.py",
        marker="out=buffer[i : i + 1],",
    ),
    Hook(
        name="float32_transition",
        fault="the next state of a rollout is rounded to the model's dtype: its log-prob is off by 5e-3 at a late step",
        patches=(
            Patch(
                f"{_ROOT}.models.schedulers.scheduling_flow_match_euler_discrete.FlowMatchEulerDiscreteScheduler.step",
                "before",
                hooks.float32_transition,
            ),
        ),
        file=f"{_RUNTIME}/models/schedulers/scheduling_flow_match_euler_discrete.py",
        marker="prev_sample = prev_sample.to(model_output.dtype)",
    ),
    Hook(
        name="float32_timestep",
        fault="with a first image (TI2V) the timestep is rounded to the model's dtype: 909.7 becomes 908",
        patches=(
            Patch(
                f"{_ROOT}.pipelines_core.stages.model_specific_stages.wan_ti2v.expand_wan_ti2v_timestep",
                "before",
                hooks.float32_timestep,
            ),
        ),
        file=f"{_RUNTIME}/pipelines_core/stages/model_specific_stages/wan_ti2v.py",
        marker="t_device_rounded = t_device.to(target_dtype)",
    ),
    Hook(
        name="float32_start",
        fault="with a first image (TI2V) the initial noise is rounded to the model's dtype: it is not what the seed gives",
        patches=(
            Patch(
                f"{_ROOT}.pipelines_core.stages.model_specific_stages.wan_ti2v.prepare_wan_ti2v_latents",
                "before",
                hooks.float32_start,
            ),
        ),
        file=f"{_RUNTIME}/pipelines_core/stages/model_specific_stages/wan_ti2v.py",
        marker="latent_model_input = latents.to(target_dtype)",
    ),
    Hook(
        name="float32_guidance",
        fault="classifier-free guidance is computed in the model's dtype: three roundings that the trainer does not have",
        patches=(Patch(f"{_ROOT}.distributed.cfg_policy.CFGPolicy.combine", "before", hooks.float32_guidance),),
        file=f"{_RUNTIME}/distributed/cfg_policy.py",
        marker="results = [n + cfg_scale * (p - n) for p, n in zip(pos_t, neg_t)]",
    ),
    Hook(
        name="uint8_frames",
        fault="frames are answered as float32: 1.3 GB for a video of 704x1280x121",
        patches=(
            Patch(f"{_ROOT}.entrypoints.post_training.rollout_api._build_response", "before", hooks.uint8_frames),
        ),
        file=f"{_RUNTIME}/entrypoints/post_training/rollout_api.py",
        marker="serialized_generated_output = _maybe_serialize(out_i)",
    ),
    Hook(
        name="run_shared_memory",
        fault="a killed engine leaves videos in shared memory under names that do not tell whose they are",
        patches=(Patch(f"{_ROOT}.ipc_array._array_ipc_dir", "after", hooks.shared_memory_of_the_run),),
        file=f"{_RUNTIME}/ipc_array.py",
        marker='shm_path = Path("/dev/shm")',
    ),
    Hook(
        name="own_adapter",
        fault="adapters are kept as views of the sender's shared memory, and copied to the device at every forward",
        patches=(Patch(f"{_ROOT}.layers.lora.linear.BaseLayerWithLoRA.set_lora_weights", "before", hooks.own_adapter),),
        file=f"{_RUNTIME}/layers/lora/linear.py",
        marker="# share storage with weights in the pipeline",
    ),
    Hook(
        name="float32_adapter",
        fault="a float32 adapter that is not merged fails on a bfloat16 model: autocast changes one factor of its product",
        patches=(
            Patch(f"{_ROOT}.layers.lora.linear.BaseLayerWithLoRA._add_lora_delta", "around", hooks.float32_adapter),
        ),
        file=f"{_RUNTIME}/layers/lora/linear.py",
        marker="target.addmm_(rows, b.t())",
    ),
    Hook(
        name="idle_wait",
        fault="with several workers --sleep-on-idle does nothing: every idle worker keeps a core busy",
        patches=(Patch(f"{_ROOT}.managers.scheduler.Scheduler.recv_reqs", "before", hooks.wait_for_requests),),
        file=f"{_RUNTIME}/managers/scheduler.py",
        marker="and not self._is_multi_rank()",
    ),
    Hook(
        name="quick_collection",
        fault="every push of weights collects garbage over the engine's million objects: half a second of a core per worker",
        patches=(
            Patch(
                f"{_ROOT}.post_training.weights_updater.WeightsUpdater.update_weights_from_tensor",
                "before",
                hooks.freeze_heap,
            ),
        ),
        file=f"{_RUNTIME}/post_training/weights_updater.py",
        marker="gc.collect()",
    ),
    Hook(
        name="determinism",
        fault="the engine has no strict deterministic mode",
        patches=(
            Patch(f"{_ROOT}.managers.gpu_worker.GPUWorker.init_device_and_model", "before", hooks.be_deterministic),
        ),
        file=f"{_RUNTIME}/managers/gpu_worker.py",
        marker="def init_device_and_model(",
    ),
    Hook(
        name="cpu_kernels",
        fault="two fused norm kernels are missing in the wheel, so every denoising step fails on a CPU",
        patches=tuple(
            Patch(f"{_ROOT}.layers.layernorm.{name}.forward_cpu", "before", hooks.ensure_cpu_kernels)
            for name in ("_NormScaleShift", "_ScaleResidualNormScaleShift")
        ),
        file=f"{_RUNTIME}/layers/layernorm.py",
        marker="torch.ops.sgl_kernel.fused_norm_scale_shift_cpu",
    ),
)


def disabled_hooks() -> frozenset[str]:
    """Names in the environment variable; ValueError for one that no hook has."""
    names = frozenset(filter(None, (name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(","))))
    unknown = names - {hook.name for hook in HOOKS}
    if unknown:
        raise ValueError(f"{DISABLE_VARIABLE}: no hook is called {', '.join(sorted(unknown))}")
    return names


def register() -> None:
    """Register every hook that is needed and not disabled. Entry point of ``sglang.multimodal_gen.plugins``."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    disabled = disabled_hooks()
    for hook in HOOKS:
        if hook.name in disabled:
            continue
        if not hook.still_needed():
            logger.warning("hook %s left out: this SGLang does not have the fault (%s)", hook.name, hook.fault)
            continue
        for patch in hook.patches:
            HookRegistry.register(patch.target, patch.function, HookType(patch.kind))


def hook_states() -> dict[str, HookState]:
    """What became of every hook in this process: active, failed, disabled or not needed."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    disabled = disabled_hooks()
    states: dict[str, HookState] = {}
    for hook in HOOKS:
        if hook.name in disabled:
            states[hook.name] = "disabled"
        elif not hook.still_needed():
            states[hook.name] = "not needed"
        else:
            applied = all(patch.target in HookRegistry._patched for patch in hook.patches)
            states[hook.name] = "active" if applied else "failed"
    return states
