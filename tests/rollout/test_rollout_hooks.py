"""Each hook against the engine's own function: the fault without it, the cure with it. What a running server shows is in
``test_rollout_engine`` (all hooks) and ``test_rollout_unhooked`` (hooks left out)."""

from __future__ import annotations

import gc
import math
import os
import pkgutil
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from miles_wan.cluster import lifeline
from miles_wan.flow import shifted_sigmas
from miles_wan.rollout.sglang import hooks, plugin
from miles_wan.rollout.sglang.engine import _CONFIGS
from miles_wan.rollout.sglang.plugin import HOOKS, Hook

HOOK = {hook.name: hook for hook in HOOKS}


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Applies one hook as the engine's registry does, for the length of a test."""
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    def apply(hook: Hook) -> None:
        for patch in hook.patches:
            owner, attribute = patch.target.rsplit(".", 1)
            place = pkgutil.resolve_name(owner)
            wrapped = _wrap_fn(getattr(place, attribute), patch.function, HookType(patch.kind))
            monkeypatch.setattr(place, attribute, wrapped)

    return apply


def test_the_installed_engine_has_every_fault_and_every_target() -> None:
    for hook in HOOKS:
        assert hook.still_needed(), hook.name
        for patch in hook.patches:
            owner, attribute = patch.target.rsplit(".", 1)
            assert callable(getattr(pkgutil.resolve_name(owner), attribute)), patch.target


def test_a_hook_whose_fault_is_gone_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    cured = replace(HOOK["uint8_frames"], marker="a line that the engine does not have")
    gone = replace(HOOK["requested_size"], file="multimodal_gen/no_such_file.py")
    kept = HOOK["float32_timestep"]
    monkeypatch.setattr(plugin, "HOOKS", (cured, gone, kept))
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    plugin.register()
    assert set(HookRegistry._hooks) == {kept.patches[0].target}
    assert plugin.hook_states() == {
        "uint8_frames": "not needed",
        "requested_size": "not needed",
        "float32_timestep": "failed",  # registered, but nothing applied it
    }


def test_a_hook_that_does_not_exist_cannot_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.DISABLE_VARIABLE, "uint8_frames,uint9_frames")
    with pytest.raises(ValueError, match="no hook is called uint9_frames"):
        plugin.disabled_hooks()


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    code = "import sys, miles_wan.rollout.sglang.plugin; print(sorted({'torch', 'ray', 'sglang', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


SIGMAS = (1.0, 0.9, 0.7, 0.0)
SHAPE = (1, 3, 4, 2, 2)


def controller(**changes: Any) -> Any:
    from sglang.multimodal_gen.runtime.post_training.flow_rollout_controller import FlowRolloutController

    values: dict[str, Any] = {
        "sde_type": "sde",
        "noise_level": 0.7,
        "log_prob_no_const": False,
        "debug_mode": True,
        "sde_step_indices": None,
        "generator": [torch.Generator().manual_seed(3)],
        "return_dit_trajectory": False,
        "return_step_indices": None,
        "shard_for_sp": lambda _batch, tensor: tensor,
        "gather_for_sp": lambda _batch, tensor: tensor,
        "sigmas": torch.tensor(SIGMAS),
        "latents_shape": SHAPE,
    }
    return FlowRolloutController(**(values | changes))


def one_step(subject: Any, step: int = 1) -> tuple[float, torch.Tensor, float]:
    """Served log-prob, noise and std of one step."""
    generator = torch.Generator().manual_seed(1)
    subject.flow_sde_sampling(
        None,
        torch.randn(SHAPE, generator=generator),
        torch.randn(SHAPE, generator=generator),
        torch.tensor(SIGMAS[step]),
        torch.tensor(SIGMAS[step + 1]),
        step,
    )
    total, count = subject.consume_local_rollout_log_probs()
    return float(total / count), subject.local_variance_noises[0].double(), float(subject.local_noise_std_devs[0])


@pytest.mark.parametrize("no_const", [False, True])
@pytest.mark.parametrize("sde_type", ["sde", "cps"])
def test_sampled_log_prob(apply: Any, sde_type: str, no_const: bool) -> None:
    def formula(noise: torch.Tensor, std: float) -> float:
        if no_const:
            return -float((noise * std).square().mean())
        return -float(noise.square().mean()) / 2 - math.log(std) - math.log(math.sqrt(2 * math.pi))

    served, noise, std = one_step(controller(sde_type=sde_type, log_prob_no_const=no_const))
    assert served == pytest.approx(formula(noise, std), abs=1e-5)  # all frames: the fault
    apply(HOOK["sampled_log_prob"])
    given = controller(sde_type=sde_type, log_prob_no_const=no_const)
    given.miles_wan_given_frames = 1
    served, noise, std = one_step(given)
    assert served == pytest.approx(formula(noise[:, :, 1:], std), abs=1e-5)
    unconditioned, noise, std = one_step(controller(sde_type=sde_type, log_prob_no_const=no_const))
    assert unconditioned == pytest.approx(formula(noise, std), abs=1e-5)


def test_sampled_log_prob_leaves_deterministic_steps_alone(apply: Any) -> None:
    apply(HOOK["sampled_log_prob"])
    given = controller(sde_step_indices=[0])
    given.miles_wan_given_frames = 1
    assert one_step(given, step=1)[0] == 0.0


def test_separate_outputs(apply: Any) -> None:
    """The engine's noise of two outputs at once: from the second step on it is not that of the seed alone."""
    from sglang.multimodal_gen.configs.pipeline_configs import wan

    shape = (2, *SHAPE[1:])
    seeded = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    both = controller(generator=seeded, latents_shape=shape)
    alone = controller()
    for _ in range(2):
        noise = both._rollout_variance_noise(None, torch.zeros(shape))[0].clone()
        expected = alone._rollout_variance_noise(None, torch.zeros(SHAPE))[0].clone()
    assert not torch.equal(noise, expected)
    configs = [getattr(wan, patch.target.split(".")[-2]) for patch in HOOK["separate_outputs"].patches]
    assert {config.__name__ for config in configs} == set(_CONFIGS.values())
    assert not any(config().supports_sequential_multi_output_inference() for config in configs)
    apply(HOOK["separate_outputs"])
    assert all(config().supports_sequential_multi_output_inference() for config in configs)


def test_given_sigmas(apply: Any) -> None:
    from sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_unipc_multistep import (
        FlowUniPCMultistepScheduler,
    )
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
    from sglang.multimodal_gen.runtime.pipelines_core.stages import timestep_preparation

    served = FlowUniPCMultistepScheduler(shift=5.0)
    stage = timestep_preparation.TimestepPreparationStage.__new__(timestep_preparation.TimestepPreparationStage)
    stage.scheduler, stage.prepare_extra_set_timesteps_kwargs = served, []
    arguments = SimpleNamespace(pipeline_config=SimpleNamespace(prepare_sigmas=lambda sigmas, _steps: sigmas))

    def grid(sigmas: list[float] | None) -> list[float]:
        batch = Req(num_inference_steps=3, rollout=True)
        batch.extra = {} if sigmas is None else {"diffusers_kwargs": {hooks.SIGMAS_KEY: sigmas}}
        batch = stage.forward(batch, arguments)
        torch.testing.assert_close(batch.timesteps, 1000 * batch.scheduler.sigmas[:-1])
        return batch.scheduler.sigmas.tolist()

    named = torch.tensor([1.0, 0.7, 0.3, 0.0]).tolist()
    closed = grid(None)
    assert closed == pytest.approx(shifted_sigmas(3, 5.0).tolist())
    assert grid(named) == closed  # the fault: nobody reads it
    apply(HOOK["given_sigmas"])
    assert grid(named) == named
    assert grid(None) == closed
    with pytest.raises(ValueError, match="3 steps need as many sigmas and a last 0"):
        grid([1.0, 0.5, 0.0])


KILLED = """
import sys, time
from sglang.multimodal_gen.runtime import ipc_array
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from miles_wan.rollout.sglang.plugin import HOOKS

if sys.argv[1] == "hooked":
    [patch] = next(hook for hook in HOOKS if hook.name == "run_shared_memory").patches
    ipc_array._array_ipc_dir = _wrap_fn(ipc_array._array_ipc_dir, patch.function, HookType(patch.kind))
with ipc_array.array_ipc_request("tcp://127.0.0.1:1") as identity:
    print(identity.decode(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("hooked", [False, True])
def test_run_shared_memory(tmp_path: Path, hooked: bool) -> None:
    run_id = f"tests-{secrets.token_hex(4)}"
    command = [sys.executable, "-c", KILLED, "hooked" if hooked else "bare"]
    environment = {**os.environ, lifeline.MARKER: run_id}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    folder = process.stdout.readlines(1)[-1].strip()
    process.kill()
    process.wait()
    shared = Path("/dev/shm")
    assert [path.parent.name for path in shared.rglob(folder)] == [f"sglang-{run_id}" if hooked else "shm"]
    lifeline.remove_leftovers(run_id, tmp_path / "none", pids={process.pid})
    left = list(shared.rglob(folder))
    for path in left:
        path.rmdir()
    assert bool(left) is not hooked


def test_a_server_outside_of_a_run_keeps_the_engines_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lifeline.MARKER, raising=False)
    assert hooks.RUN_VARIABLE == lifeline.MARKER
    assert hooks.shared_memory_of_the_run("/dev/shm") is None


def test_generator_noise(apply: Any) -> None:
    """On another device than its generator's, the engine does not draw from the generator. ``meta`` stands for that
    device; a GPU refuses outright."""
    elsewhere = torch.empty(SHAPE, device="meta")

    def next_number(subject: Any) -> float:
        for _ in range(2):
            assert subject._rollout_variance_noise(None, elsewhere).device.type == "meta"
        assert subject.noise_buffer.device.type == "meta"
        return float(torch.rand(1, generator=subject.generator[0]))

    expected = torch.Generator().manual_seed(3)
    for _ in range(2):
        torch.randn(SHAPE, generator=expected)
    third = float(torch.rand(1, generator=expected))
    assert next_number(controller()) != third
    apply(HOOK["generator_noise"])
    assert next_number(controller()) == third


def test_float32_transition(apply: Any) -> None:
    from sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_match_euler_discrete import (
        FlowMatchEulerDiscreteScheduler,
    )

    def step(transition: Any) -> torch.Tensor:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
        scheduler.set_timesteps(num_inference_steps=4)
        output = torch.ones(1, 2, 1, 2, 2, dtype=torch.bfloat16)
        return scheduler.step(
            model_output=output,
            timestep=scheduler.timesteps[0],
            sample=output,
            transition=transition,
            return_dict=False,
        )[0]

    def exact(**_kwargs: Any) -> torch.Tensor:
        return torch.full((1, 2, 1, 2, 2), 1.001)

    assert step(exact).dtype == torch.bfloat16  # 1.001 becomes 1
    apply(HOOK["float32_transition"])
    assert torch.equal(step(exact), exact())
    assert step(None).dtype == torch.bfloat16  # requests that are no rollouts are served as before


def test_float32_timestep(apply: Any) -> None:
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import wan_ti2v

    batch = SimpleNamespace(raw_latent_shape=(1, 48, 2, 4, 4), latents=torch.zeros(1, 48, 2, 4, 4))
    mask = torch.ones(48, 2, 4, 4, dtype=torch.bfloat16)
    mask[:, 0] = 0

    def expand() -> list[float]:
        timestep = torch.tensor(909.7)
        return (
            wan_ti2v.expand_wan_ti2v_timestep(batch, timestep, torch.bfloat16, 8, mask, (1, 2, 2))[0].float().tolist()
        )

    assert expand() == [0.0] * 4 + [908.0] * 4
    apply(HOOK["float32_timestep"])
    assert expand() == pytest.approx([0.0] * 4 + [909.7] * 4, rel=1e-7)


def test_float32_start(apply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages import wan_ti2v

    for name, value in (("get_local_torch_device", torch.device("cpu")), ("get_sp_world_size", 1)):
        monkeypatch.setattr(wan_ti2v, name, lambda value=value: value)
    image_latent = torch.full((1, 48, 1, 2, 2), 0.3)
    vae = SimpleNamespace(encode=lambda _image: SimpleNamespace(mean=image_latent), shift_factor=None, scaling_factor=1)
    scales = SimpleNamespace(scale_factor_temporal=4, scale_factor_spatial=16)
    config = SimpleNamespace(
        vae_config=SimpleNamespace(arch_config=scales),
        dit_config=SimpleNamespace(arch_config=SimpleNamespace(patch_size=(1, 2, 2))),
    )
    noise = torch.randn(1, 48, 2, 2, 2, generator=torch.Generator().manual_seed(3))

    def start() -> torch.Tensor:
        batch = SimpleNamespace(
            image_latent=None, condition_image=torch.zeros(1, 3, 1, 32, 32), num_frames=5, height=32, width=32
        )
        arguments = SimpleNamespace(pipeline_config=config)
        wan_ti2v.prepare_wan_ti2v_latents(vae, noise, torch.bfloat16, torch.float32, batch, arguments)
        assert torch.equal(batch.latents[:, :, :1], image_latent)
        return batch.latents[:, :, 1:]

    assert torch.equal(start(), noise[:, :, 1:].bfloat16().float())
    apply(HOOK["float32_start"])
    assert torch.equal(start(), noise[:, :, 1:])


def test_float32_guidance(apply: Any) -> None:
    from sglang.multimodal_gen.runtime.distributed.cfg_policy import CFGPolicy

    config = SimpleNamespace(postprocess_cfg_noise=lambda _batch, combined, _positive: combined)
    positive, negative = (torch.tensor([value], dtype=torch.bfloat16) for value in (1.0078125, 1.0))

    def guided(*, rollout: bool) -> torch.Tensor:
        batch = SimpleNamespace(rollout=rollout, cfg_normalization=0, guidance_rescale=0.0)
        return CFGPolicy().combine([positive, negative], batch, 1.5, config)

    exact = torch.tensor([1.0 + 1.5 * 0.0078125])
    assert torch.equal(guided(rollout=True), exact.bfloat16())
    apply(HOOK["float32_guidance"])
    assert torch.equal(guided(rollout=True), exact)
    assert torch.equal(guided(rollout=False), exact.bfloat16())  # other requests are served as before


def test_float32_adapter(apply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.multimodal_gen.runtime.layers.lora import linear

    monkeypatch.setattr(linear, "_request_allows_lossless", lambda: True)  # the engine's default for a request
    torch.manual_seed(0)
    layer = linear.BaseLayerWithLoRA(torch.nn.Linear(6, 5, dtype=torch.bfloat16), lora_rank=4, lora_alpha=8)
    layer.lora_A, layer.lora_B = torch.nn.Parameter(torch.randn(4, 6)), torch.nn.Parameter(torch.randn(5, 4))
    base, x = torch.randn(3, 5).bfloat16(), torch.randn(3, 6).bfloat16()

    @torch.no_grad()
    def adapted() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer._add_lora_delta(base.clone(), x, 1.0)

    with pytest.raises(RuntimeError, match="must have the same dtype"):
        adapted()
    apply(HOOK["float32_adapter"])
    expected = base.double() + 8 / 4 * x.double() @ layer.lora_A.double().T @ layer.lora_B.double().T
    assert torch.equal(adapted(), expected.bfloat16())


def test_quick_collection(apply: Any) -> None:
    from sglang.multimodal_gen.runtime.post_training.weights_updater import WeightsUpdater

    def push() -> int:
        updater = WeightsUpdater(SimpleNamespace())
        assert not updater.update_weights_from_tensor([], weight_update_mode="lora_merge")[0]  # no such pipeline
        return gc.get_freeze_count()

    assert push() == 0
    apply(HOOK["quick_collection"])
    try:
        frozen = push()
        assert frozen > 100_000
        assert push() <= frozen
    finally:
        gc.unfreeze()


KERNELS = """
import torch
from torch.nn.functional import layer_norm
from sglang.multimodal_gen.runtime.layers import layernorm
from miles_wan.rollout.sglang.cpu_kernels import define_missing_kernels

torch.manual_seed(0)
x, residual, gate, scale, shift = (torch.randn(2, 5, 8) for _ in range(5))
norm = layernorm.LayerNormScaleShift(8, eps=1e-6)
after = layernorm.ScaleResidualLayerNormScaleShift(8, eps=1e-6)
try:
    norm.forward_cpu(x, shift, scale)
except AttributeError as error:
    print("missing:", "fused_norm_scale_shift_cpu" in str(error))
print("defined:", define_missing_kernels())
expected = layer_norm(x, (8,), eps=1e-6) * (1 + scale) + shift
print("norm:", torch.allclose(norm.forward_cpu(x, shift, scale), expected, atol=1e-6))
total = residual + gate * x
modulated, summed = after.forward_cpu(residual, x, gate, shift, scale)
print("residual:", torch.allclose(summed, total, atol=1e-6))
print("residual norm:", torch.allclose(modulated, layer_norm(total, (8,), eps=1e-6) * (1 + scale) + shift, atol=1e-6))
low = norm.forward_cpu(x.bfloat16(), shift, scale)
reference = (layer_norm(x.bfloat16().float(), (8,), eps=1e-6) * (1 + scale) + shift).bfloat16()
print("bfloat16:", low.dtype == torch.bfloat16 and torch.equal(low, reference))
"""


def test_cpu_kernels() -> None:
    result = subprocess.run([sys.executable, "-c", KERNELS], capture_output=True, text=True)
    printed = [line for line in result.stdout.splitlines() if ": " in line]
    assert printed == [
        "missing: True",
        "defined: ('fused_norm_scale_shift_cpu', 'fused_scale_residual_norm_scale_shift_cpu')",
        "norm: True",
        "residual: True",
        "residual norm: True",
        "bfloat16: True",
    ], result.stderr[-2000:]


def test_strict_determinism_is_for_runs_that_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        monkeypatch.delenv(hooks.DETERMINISTIC_VARIABLE, raising=False)
        hooks.be_deterministic(None)
        assert not torch.are_deterministic_algorithms_enabled()
        monkeypatch.setenv(hooks.DETERMINISTIC_VARIABLE, "1")
        hooks.be_deterministic(None)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_requested_image_size(apply: Any) -> None:
    """I2V, 64x32 of a 48x48 image whose rows differ: the engine makes 32x32 or so of the whole image, the hook the middle."""
    from PIL import Image
    from sglang.multimodal_gen.configs.pipeline_configs.wan import Wan2_2_I2V_A14B_Config, Wan2_2_TI2V_5B_Config
    from sglang.multimodal_gen.runtime.pipelines_core.stages.input_validation import InputValidationStage

    config = Wan2_2_I2V_A14B_Config()
    stage = InputValidationStage.__new__(InputValidationStage)
    image = Image.fromarray(np.repeat(np.arange(0, 240, 5, dtype=np.uint8)[:, None], 48, axis=1)).convert("RGB")

    def prepared(width: int, height: int, *fields: str) -> Any:
        batch = SimpleNamespace(condition_image=[image], width=width, height=height, task_type=config.task_type)
        batch.extra = {"explicit_fields": list(fields)}
        stage.preprocess_condition_image(batch, SimpleNamespace(pipeline_config=config), image.width, image.height)
        assert batch.condition_image.size == (batch.width, batch.height)
        return batch

    assert prepared(64, 32, "width", "height").condition_image.size == (32, 32)  # sqrt(64 * 32) = 45, in steps of 16
    apply(HOOK["requested_image_size"])
    asked = prepared(64, 32, "width", "height").condition_image
    assert asked.size == (64, 32)
    covered = image.resize((64, 64), Image.Resampling.LANCZOS).crop((0, 16, 64, 48))
    np.testing.assert_array_equal(np.asarray(asked), np.asarray(covered))
    assert prepared(64, 32, "width").condition_image.size == (32, 32)  # only what is asked for in full
    with pytest.raises(ValueError, match="100x64 is not a multiple of 16x16"):
        prepared(100, 64, "width", "height")
    other = SimpleNamespace(extra={"explicit_fields": ["width", "height"]}, width=64, height=32)
    arguments = SimpleNamespace(pipeline_config=Wan2_2_TI2V_5B_Config())
    assert hooks.cover_requested_size(stage, other, arguments, 48, 48) is None  # TI2V has a hook of its own


def test_condition_latent(apply: Any) -> None:
    """What I2V puts beside the state is answered as it was before sequence parallelism split it."""
    from sglang.multimodal_gen.runtime.post_training import rollout_hooks

    whole = torch.randn(1, 20, 4, 2, 2)

    def answered(image_latent: Any, *, environment: bool = True) -> dict[str, Any] | None:
        batch = SimpleNamespace(rollout=True, image_latent=image_latent, extra={}, condition_image=None)
        batch.rollout_return_denoising_env, batch.rollout_return_dit_trajectory = environment, True
        rollout_hooks.prepare_rollout_if_enabled(
            batch=batch, pipeline_config=None, build_controller=lambda **_: SimpleNamespace()
        )
        batch.image_latent = None if image_latent is None else image_latent[:, :, :2]  # as split for one of two workers
        rollout_hooks.init_rollout_env_if_enabled(
            batch=batch, image_kwargs={"encoder": None}, pos_cond_kwargs={}, neg_cond_kwargs={}, guidance=None
        )
        assert not batch.extra
        env = batch._rollout_denoising_env_state["env"]
        return None if env is None else env.image_kwargs

    assert answered(whole) == {"encoder": None}
    apply(HOOK["condition_latent"])
    kwargs = answered(whole)
    assert kwargs is not None
    assert torch.equal(kwargs[hooks.CONDITION_KEY], whole)
    assert answered(None) == {"encoder": None}
    assert answered(whole, environment=False) is None
