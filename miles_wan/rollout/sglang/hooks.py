"""The bodies of the engine hooks that ``plugin.py`` lists. In: the arguments of SGLang functions. Out: changed arguments
or results. They run inside the engine's processes and know SGLang's objects; torch and SGLang are imported when a hook
runs, because this file is loaded while the engine is still choosing its platform.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

Args = tuple[tuple[Any, ...], dict[str, Any]]

SIGMAS_KEY = "miles_wan_sigmas"  # in a request's diffusers_kwargs, which reach a stage untouched
RUN_VARIABLE = "MILES_WAN_RUN_ID"  # the launcher's: what bears its value is removed when the run ends

CONDITION_KEY = "image_latent"  # among the image_kwargs of an answer's denoising_env
_CONDITION_EXTRA = "miles_wan_image_latent"

DETERMINISTIC_VARIABLE = "MILES_WAN_DETERMINISTIC"
_requested = threading.local()
_VISUAL_STREAM = "visual"
_IDLE_POLL_MILLISECONDS = 500


def remember_requested_size(original: Callable[..., Any], stage: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``InputValidationStage.preprocess_condition_image``: width and height, if the request names both."""
    explicit = batch.extra.get("explicit_fields", ())
    _requested.size = (batch.width, batch.height) if {"width", "height"} <= set(explicit) else None
    try:
        return original(stage, batch, *args, **kwargs)
    finally:
        _requested.size = None


def requested_output_size(
    original: Callable[..., Any], width: int, height: int, step_w: int, step_h: int, area: int
) -> Any:
    """Around ``_best_output_size``: the requested size instead of 704 x 1280 pixels in the image's shape."""
    size = getattr(_requested, "size", None)  # a thread that never handled a request has no attribute yet
    if size is None:
        return original(width, height, step_w, step_h, area)
    _check_multiple(size, step_w, step_h)
    return size


def cover_requested_size(stage: Any, batch: Any, server_args: Any, image_width: int, image_height: int) -> Args | None:
    """Before ``InputValidationStage.preprocess_condition_image``, for I2V: an image that has the requested size already, since
    it covers it and is cropped in the middle, as TI2V has it. What the engine derives from its shape is then that size."""
    from sglang.multimodal_gen.configs.pipeline_configs.wan import Wan2_2_I2V_A14B_Config

    config = server_args.pipeline_config
    explicit = set(batch.extra.get("explicit_fields", ()))
    if not isinstance(config, Wan2_2_I2V_A14B_Config) or not {"width", "height"} <= explicit:
        return None
    from PIL.Image import Resampling

    patch, stride = config.dit_config.arch_config.patch_size, config.vae_config.arch_config.scale_factor_spatial
    width, height = batch.width, batch.height
    _check_multiple((width, height), patch[2] * stride, patch[1] * stride)
    scale = max(width / image_width, height / image_height)
    image = batch.condition_image[0] if isinstance(batch.condition_image, list) else batch.condition_image
    image = image.resize((round(image_width * scale), round(image_height * scale)), Resampling.LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    batch.condition_image = image.crop((left, top, left + width, top + height))
    return (stage, batch, server_args, width, height), {}


def _check_multiple(size: tuple[int, int], step_w: int, step_h: int) -> None:
    if size[0] % step_w or size[1] % step_h:
        raise ValueError(f"requested size {size[0]}x{size[1]} is not a multiple of {step_w}x{step_h} pixels")


def one_output_at_a_time(_config: Any) -> bool:
    """Instead of ``supports_sequential_multi_output_inference``: several outputs are computed as so many requests."""
    return True


def given_sigmas(stage: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before ``TimestepPreparationStage.forward``: the grid that the request names, number by number. The stage leaves a
    request alone that has its timesteps."""
    sigmas = (batch.extra.get("diffusers_kwargs") or {}).get(SIGMAS_KEY)
    if sigmas is None:
        return
    from sglang.multimodal_gen.runtime.distributed import get_local_torch_device
    from sglang.multimodal_gen.runtime.post_training.rollout_scheduler import get_or_create_rollout_request_scheduler

    if len(sigmas) != batch.num_inference_steps + 1 or sigmas[-1] != 0:
        raise ValueError(f"{batch.num_inference_steps} steps need as many sigmas and a last 0, not {sigmas}")
    scheduler = get_or_create_rollout_request_scheduler(batch, stage.scheduler, isolate=True)
    scheduler.set_shift(1.0)
    scheduler.set_timesteps(sigmas=sigmas[:-1], device=get_local_torch_device())
    batch.timesteps = scheduler.timesteps


def mark_conditioned_rollout(_result: None, *, batch: Any, pipeline_config: Any, **_kwargs: Any) -> None:
    """After ``prepare_rollout_if_enabled``: tell the controller that latent frame 0 is given, not sampled."""
    from sglang.multimodal_gen.configs.pipeline_configs.wan import Wan2_2_TI2V_5B_Config

    if not batch.rollout or type(pipeline_config) is not Wan2_2_TI2V_5B_Config or batch.condition_image is None:
        return
    controller = batch.rollout_controllers[_VISUAL_STREAM]
    if controller.latents_shape[2] < 2:
        raise ValueError("one latent frame with a condition image leaves nothing to sample; ask for at least 5 frames")
    controller.miles_wan_given_frames = 1


def remember_condition(_result: None, *, batch: Any, **_kwargs: Any) -> None:
    """After ``prepare_rollout_if_enabled``: what I2V puts beside the state, before sequence parallelism splits it."""
    if batch.rollout and batch.rollout_return_denoising_env and batch.image_latent is not None:
        batch.extra[_CONDITION_EXTRA] = batch.image_latent


def return_condition(*, batch: Any, image_kwargs: dict[str, Any], **kwargs: Any) -> Args | None:
    """Before ``init_rollout_env_if_enabled``: the further input channels [B, 20, F, h, w] of I2V are answered."""
    condition = batch.extra.pop(_CONDITION_EXTRA, None)
    if condition is None:
        return None
    return (), {"batch": batch, "image_kwargs": image_kwargs | {CONDITION_KEY: condition}, **kwargs}


def mask_given_frame(controller: Any, log_prob_sum: Any, log_prob_count: Any) -> Args | None:
    """Before ``append_local_rollout_log_probs``: sum and count over the sampled frames only.

    The engine sums -noise^2 / 2 - K over all frames, where K = ln(std) + ln(sqrt(2 pi)). K follows from its sum and the
    noise it still holds, so the masked sum needs no knowledge of the sampler.
    """
    given = getattr(controller, "miles_wan_given_frames", 0)  # set by mark_conditioned_rollout, else all frames count
    if not given or bool((log_prob_sum == 0).all()):  # a deterministic step
        return None
    squares = controller.noise_buffer.double().square()
    everything = squares.sum(dim=(1, 2, 3, 4))
    sampled = squares[:, :, given:].sum(dim=(1, 2, 3, 4))
    frames = squares.shape[2]
    count = log_prob_count * (frames - given) / frames
    if controller.log_prob_no_const:
        total = log_prob_sum.double() * sampled / everything
    else:
        constant = -(log_prob_sum.double() + everything / 2) / log_prob_count.double()
        total = -sampled / 2 - constant * count.double()
    return (controller, total.to(log_prob_sum.dtype), count), {}


def noise_of_the_generator(original: Callable[..., Any], controller: Any, batch: Any, model_output: Any) -> Any:
    """Around ``_rollout_variance_noise``: draw where the generator lives, then move. On a GPU a CPU generator, the only
    kind that gives the same noise everywhere, would be refused."""
    import torch

    generators = controller.generator
    first = generators if isinstance(generators, torch.Generator) else generators[0]
    if first.device.type == model_output.device.type:
        return original(controller, batch, model_output)
    drawn = original(controller, batch, torch.empty_like(model_output, device=first.device))
    controller.noise_buffer = controller.noise_buffer.to(model_output.device)  # the log-prob reads it
    return drawn.to(model_output.device)


def float32_transition(_scheduler: Any, *args: Any, **kwargs: Any) -> Args | None:
    """Before the Euler ``step``: a rollout's next state is returned in the dtype of the model output, so raise that."""
    if kwargs.get("transition") is None:
        return None
    if args:
        return (_scheduler, args[0].float(), *args[1:]), kwargs
    return (_scheduler,), kwargs | {"model_output": kwargs["model_output"].float()}


def float32_timestep(
    batch: Any, t_device: Any, target_dtype: Any, seq_len: int, reserved_frames_mask: Any, patch_size: Any
) -> Args:
    """Before ``expand_wan_ti2v_timestep``: 909.7 must not become 908 in bfloat16."""
    import torch

    mask = None if reserved_frames_mask is None else reserved_frames_mask.float()
    return (batch, t_device, torch.float32, seq_len, mask, patch_size), {}


def float32_start(vae: Any, latents: Any, _target_dtype: Any, *args: Any, **kwargs: Any) -> Args:
    """Before ``prepare_wan_ti2v_latents``: the first state is the noise of the seed, unrounded, as it is without an image.
    The loop casts what it hands to the model itself."""
    import torch

    return (vae, latents, torch.float32, *args), kwargs


def float32_guidance(policy: Any, predictions: Any, batch: Any, *args: Any, **kwargs: Any) -> Args | None:
    """Before ``CFGPolicy.combine``: in a rollout guidance is arithmetic of its own, as in the trainer, not the model's."""
    if not batch.rollout:
        return None
    return (policy, [prediction.float() for prediction in predictions], batch, *args), kwargs


def uint8_frames(request_id: str, prompt: str, seed: int, rollout: bool, result: Any) -> None:
    """Before ``_build_response``: frames [B, 3, T, H, W] as bytes, a quarter of the answer's size."""
    import torch

    if isinstance(result.output, torch.Tensor) and result.output.is_floating_point():
        result.output = result.output.mul(255.0).round_().clamp_(0, 255).to(torch.uint8)


def shared_memory_of_the_run(directory: str | None) -> str | None:
    """After ``_array_ipc_dir``: a folder of the run, which goes with it also when the engine is killed."""
    run_id = os.environ.get(RUN_VARIABLE)
    if directory is None or not run_id:
        return None
    folder = os.path.join(directory, f"sglang-{run_id}")
    with contextlib.suppress(OSError):  # no space: the engine has a way without
        os.makedirs(folder, exist_ok=True)
        return folder
    return None


def own_adapter(layer: Any, A: Any, B: Any, *args: Any, **kwargs: Any) -> Args:
    """Before ``set_lora_weights``: the layer keeps its own copy, on its device, not a view of the sender's memory."""
    from sglang.multimodal_gen.runtime.distributed import get_local_torch_device

    device = get_local_torch_device()
    return (layer, A.to(device, copy=True), B.to(device, copy=True), *args), kwargs


def float32_adapter(original: Callable[..., Any], layer: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``_add_lora_delta``: without autocast, so that a float32 adapter is computed in float32, as it is trained."""
    import torch

    with torch.autocast(out.device.type, enabled=False):
        return original(layer, out, *args, **kwargs)


def wait_for_requests(scheduler: Any) -> None:
    """Before ``recv_reqs``: the first of several workers sleeps until a request comes; the others wait for its word."""
    if scheduler.receiver is None or not scheduler._is_multi_rank() or not scheduler.server_args.sleep_on_idle:
        return
    if scheduler.waiting_queue or scheduler._inflight_finalizes:
        return
    with scheduler._socket_lock:
        scheduler._poller.poll(timeout=_IDLE_POLL_MILLISECONDS)


def freeze_heap(*_args: Any, **_kwargs: Any) -> None:
    """Before ``update_weights_from_tensor``: the first time, take what is loaded out of every later collection."""
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()


def be_deterministic(_worker: Any) -> None:
    """Before ``init_device_and_model``: if the run asks for it, only operations with the same result in every run."""
    if os.environ.get(DETERMINISTIC_VARIABLE) != "1":
        return
    import torch

    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def ensure_cpu_kernels(*_args: Any, **_kwargs: Any) -> None:
    """Before the ``forward_cpu`` of the fused norms: define the kernels that the wheel lacks."""
    from miles_wan.rollout.sglang.cpu_kernels import define_missing_kernels

    define_missing_kernels()


def add_identity_routes(app: Any, server_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """After ``create_app``: who this server is, and what it calls the trainer's layers."""
    from miles_wan.rollout.sglang.identity import LAYER_NAMES_PATH, PATH, describe_server, server_layer_names

    async def identity() -> dict[str, Any]:
        return describe_server(server_args)

    async def layer_names(body: dict[str, list[str]]) -> Mapping[str, str | None]:
        return server_layer_names(server_args, body["names"])

    app.add_api_route(PATH, identity, methods=["GET"])
    app.add_api_route(LAYER_NAMES_PATH, layer_names, methods=["POST"])
