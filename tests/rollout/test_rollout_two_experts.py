"""The real server with two experts: text to video over two workers with the adapters beside the weights, image to video on one
with the adapters folded in. What it serves is what the trainer and the local engine compute, expert by expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run, record_of, settings_for
from cross_scoring import by_trainer, by_velocities, relative
from diffusers import AutoencoderKLWan
from PIL import Image
from rollout_replay import (
    ALPHA,
    RANK,
    TARGETS,
    as_push,
    as_update,
    digests_differ,
    make_request,
    random_adapter,
    zeroed,
)
from rollout_replay import push as push_to
from torch import Tensor

from miles_wan.errors import EngineError, WeightSyncError
from miles_wan.parity.parts import set_adapter
from miles_wan.records import Conditioning, PromptRecord, RolloutRequest
from miles_wan.rollout.base import Answer, SyncReport
from miles_wan.rollout.local import LocalEngine
from miles_wan.rollout.sglang.canary import check_experts, expert_queries
from miles_wan.rollout.sglang.engine import SGLangEngine
from miles_wan.rollout.sglang.payload import serialize_update, tensor_digest
from miles_wan.rollout.sglang.weights import adapter_layers
from miles_wan.tiny import TinyPaths
from miles_wan.wan.experts import Experts
from miles_wan.wan.family import ModelFolder, load_family
from miles_wan.wan.lora import inject_lora
from miles_wan.wan.model import WanModel, load_model

pytestmark = pytest.mark.e2e

HIGH, LOW = "transformer", "transformer_2"
# Steps with a timestep just beside the boundary of the family: of shift 5 and so many steps, the number of the step.
KNIFE_EDGE = {"wan2.2-t2v-a14b": (44, 18, 875.066), "wan2.2-i2v-a14b": (40, 14, 899.983)}
SERVERS = {
    "wan2.2-t2v-a14b": {"lora_merge_mode": "dynamic"},
    "wan2.2-i2v-a14b": {"lora_merge_mode": "merge", "devices": ("0",), "tp_size": 1},
}
GUIDANCE = [(1.0, 1.0), (4.0, 2.5)]


@dataclass
class Sides:
    """A server, the trainer's model with adapters, and the local engine over that model."""

    folder: ModelFolder
    engine: SGLangEngine
    model: WanModel
    local: LocalEngine
    record: PromptRecord
    workers: int

    @property
    def with_image(self) -> bool:
        return self.folder.family.needs_image

    def request(self, **changes: Any) -> RolloutRequest:
        """64x32 from a square image, in 6 steps: of the stochastic ones 0 and 1 are the high-noise expert's, 4 the other's."""
        standard = {"width": 64, "guidance_scale": 4.0, "guidance_scale_2": 2.5, "stochastic_steps": (0, 1, 2, 4)}
        return make_request(self.record, image=self.with_image, **{**standard, **changes})

    async def push(self, module: str, tensors: dict[str, Tensor], version: int = 1) -> SyncReport:
        return await push_to(self.engine, tensors, version, module=module, consumers=self.workers)

    def velocity(self, answer: Answer, step: int, conditioning: Conditioning, expert: str) -> np.ndarray:
        """What one expert makes of the state before ``step``."""
        sampling, latent = self.request().sampling, conditioning.condition_latent
        inputs = self.model.input(
            torch.from_numpy(answer.states[step])[None],
            torch.tensor([1000 * float(answer.sigmas[step])]),
            condition_latent=None if latent is None else torch.from_numpy(latent)[None],
            has_condition=torch.tensor([self.with_image]),
        )
        assert conditioning.negative_prompt_embeds is not None
        with torch.no_grad():
            velocity = self.model.velocity(
                expert,
                inputs,
                prompt_embeds=torch.from_numpy(conditioning.prompt_embeds)[None],
                negative_prompt_embeds=torch.from_numpy(conditioning.negative_prompt_embeds)[None],
                guidance_scale={HIGH: sampling.guidance_scale, LOW: sampling.guidance_scale_2}[expert],
            )
        return velocity[0].numpy()


@pytest.fixture(scope="module", params=SERVERS)
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[Sides]:
    family: str = request.param
    tiny: TinyPaths = request.getfixturevalue("i2v_paths" if "i2v" in family else "t2v_paths")
    folder = load_family(tiny.model)
    settings = settings_for(
        tiny.model, tmp_path_factory.mktemp("log"), model_id=folder.family.engine_model_id, **SERVERS[family]
    )
    model = load_model(folder, dtype="fp32")
    for seed, (_, transformer) in enumerate(model.items()):
        inject_lora(transformer, rank=RANK, alpha=ALPHA, targets=TARGETS, seed=seed)
    engine = SGLangEngine(settings)
    engine.start()
    local = LocalEngine(folder, model, device=torch.device("cpu"))
    yield Sides(folder, engine, model, local, record_of(tiny), settings.world_size)
    run(engine.close())


def assert_agree(sides: Sides, run: Run, request: RolloutRequest) -> None:
    """Both engines make the same samples, and each one's are as likely to the other side."""
    theirs = run(sides.engine.generate_debug(request, [1, 0]))
    ours = sides.local.generate_debug(request, [1, 0])
    for our, their in zip(ours, theirs, strict=True):
        served, made = their.output.trajectory, our.output.trajectory
        assert our.output.seed == their.output.seed
        assert np.abs(our.output.frames.astype(int) - their.output.frames).max() <= 1
        for index, state in their.states.items():
            assert relative(our.states[index], state) <= 1e-5
        assert relative(made.final_latent, served.final_latent) <= 1e-5
        np.testing.assert_array_equal(made.timesteps, served.timesteps)
        np.testing.assert_array_equal(our.debug.noises, their.debug.noises)
        for our_velocity, their_velocity in zip(our.debug.model_outputs, their.debug.model_outputs, strict=True):
            assert relative(our_velocity, their_velocity) <= 1e-5
        np.testing.assert_allclose(made.log_probs, served.log_probs, rtol=0, atol=1e-5)
        scored = by_trainer(sides.model, served, theirs[0].output.conditioning, request.sampling)
        np.testing.assert_allclose(served.log_probs, scored, rtol=0, atol=1e-5)
        scored = by_velocities(sides.model, their.debug.model_outputs, made, request.sampling)
        np.testing.assert_allclose(made.log_probs, scored, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "steps"), [("flow_sde", (0, 1, 2, 4)), ("cps", (0, 1, 2, 4)), ("ode", ())])
@pytest.mark.parametrize(("guidance", "guidance_2"), GUIDANCE)
def test_both_engines_make_the_same_samples(
    sides: Sides, run: Run, guidance: float, guidance_2: float, kind: str, steps: tuple[int, ...]
) -> None:
    request = sides.request(
        seeds=(7, 100),
        guidance_scale=guidance,
        guidance_scale_2=guidance_2,
        kind=kind,
        stochastic_steps=steps,
        keep_final=True,
    )
    assert_agree(sides, run, request)


def test_the_step_beside_the_boundary_is_the_experts_that_the_trainer_takes(sides: Sides, run: Run) -> None:
    """One inference rule, int(t) >= 1000 boundary, on all sides; beside the boundary the other expert is another model."""
    num_steps, edge, timestep = KNIFE_EDGE[sides.folder.family.name]
    steps = (edge - 1, edge, edge + 1)
    request = sides.request(num_inference_steps=num_steps, stochastic_steps=steps)
    answer = run(sides.engine.generate_debug(request, [0]))[0]
    trajectory = answer.output.trajectory
    assert trajectory.timesteps[1] == pytest.approx(timestep, abs=1e-3)
    boundary = sides.folder.boundary_ratio
    assert abs(trajectory.timesteps[1] - 1000 * boundary) < 0.1
    found = [sides.model.experts.of(float(value)) for value in trajectory.timesteps]
    assert found == [HIGH if int(value) >= 1000 * boundary else LOW for value in trajectory.timesteps]
    assert set(found) == {HIGH, LOW}
    for step, expert in zip(steps, found, strict=True):
        other = LOW if expert == HIGH else HIGH
        right, wrong = (sides.velocity(answer, step, answer.output.conditioning, name) for name in (expert, other))
        assert relative(right, answer.debug.model_outputs[step]) < 1e-5
        assert relative(wrong, answer.debug.model_outputs[step]) > 0.1
    scored = by_trainer(sides.model, trajectory, answer.output.conditioning, request.sampling)
    np.testing.assert_allclose(trajectory.log_probs, scored, rtol=0, atol=1e-5)


def test_each_expert_has_its_own_guidance(sides: Sides, run: Run) -> None:
    request = sides.request(guidance_scale=6.0, guidance_scale_2=1.5)
    answer = run(sides.engine.generate_debug(request, [0]))[0]
    trajectory, conditioning = answer.output.trajectory, answer.output.conditioning
    scored = by_trainer(sides.model, trajectory, conditioning, request.sampling)
    np.testing.assert_allclose(trajectory.log_probs, scored, rtol=0, atol=1e-5)
    with_one = by_trainer(sides.model, trajectory, conditioning, replace(request.sampling, guidance_scale_2=6.0))
    routed = np.array([sides.model.experts.of(float(timestep)) for timestep in trajectory.timesteps])
    np.testing.assert_array_equal(scored[routed == HIGH], with_one[routed == HIGH])
    assert np.abs(scored - with_one)[routed == LOW].max() > 1e-4


def test_a_server_with_another_boundary_is_refused(sides: Sides) -> None:
    folder = sides.folder
    queries = expert_queries(folder.family, 5.0, folder.routing)
    answers = [sides.engine._first_answers(query)[0] for query in queries]
    check_experts(answers, folder.routing)
    wrong = Experts(folder.experts, 0.6)  # what the checkpoint would say of a server that follows another rule
    with pytest.raises(EngineError, match=r"from timestep .* on to the low-noise expert, by the boundary 0.6"):
        check_experts(answers, wrong)
    with pytest.raises(EngineError, match="the engine never used that expert"):
        check_experts([answers[0], answers[0]], folder.routing)


def test_several_samples_of_a_request_are_those_of_single_requests(sides: Sides, run: Run) -> None:
    request = sides.request(seeds=(21, 5, 2**62), keep_final=True)
    together = run(sides.engine.generate(request, [0, 1, 2], return_conditioning=True))
    for index, output in enumerate(together):
        [alone] = run(sides.engine.generate(request, [index], return_conditioning=index == 0))
        np.testing.assert_array_equal(output.frames, alone.frames)
        for name, value in vars(alone.trajectory).items():
            np.testing.assert_array_equal(getattr(output.trajectory, name), value, err_msg=name)
    assert [output.conditioning is None for output in together] == [False, True, True]
    only = run(sides.engine.generate(request, [0], return_conditioning=True))[0].conditioning
    for name, value in vars(only).items():
        np.testing.assert_array_equal(getattr(together[0].conditioning, name), value, err_msg=name)


@pytest.mark.parametrize(("width", "height", "frames"), [(64, 32, 5), (32, 80, 9), (48, 16, 1)])
def test_the_requested_size_is_honoured(sides: Sides, run: Run, width: int, height: int, frames: int) -> None:
    request = sides.request(width=width, height=height, num_frames=frames)
    output = run(sides.engine.generate(request, [0], return_conditioning=True))[0]
    assert output.frames.shape == (frames, height, width, 3)
    conditioning = output.conditioning
    if not sides.with_image:
        assert conditioning.condition_latent is None
        return
    latent_frames = (frames - 1) // 4 + 1
    assert conditioning.condition_latent.shape == (20, latent_frames, height // 8, width // 8)
    np.testing.assert_array_equal(conditioning.condition_latent[:4, :1], 1)
    np.testing.assert_array_equal(conditioning.condition_latent[:4, 1:], 0)
    encoded = encoded_image(sides, width=width, height=height, frames=frames)
    np.testing.assert_allclose(conditioning.condition_latent[4:], encoded, rtol=0, atol=1e-5)
    mine = sides.local.generate(request, [0], return_conditioning=True)[0].conditioning
    np.testing.assert_allclose(conditioning.condition_latent, mine.condition_latent, rtol=0, atol=1e-5)


def encoded_image(sides: Sides, *, width: int, height: int, frames: int) -> np.ndarray:
    """The VAE's mode of the image, covering the size and cropped in the middle, and grey frames after it (mean 0, std 1)."""
    image = Image.open(sides.record.image_path or "").convert("RGB")
    scale = max(width / image.width, height / image.height)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height))).copy()
    video = torch.zeros(1, 3, frames, height, width)
    video[0, :, 0] = torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1
    vae = AutoencoderKLWan.from_pretrained(sides.folder.path / "vae", torch_dtype=torch.float32)
    with torch.no_grad():
        encoded: np.ndarray = vae.encode(video).latent_dist.mode()[0].numpy()
    return encoded


def test_a_size_that_the_model_cannot_make_is_an_error(sides: Sides, run: Run) -> None:
    message = "100x64 is not a multiple of 16x16" if sides.with_image else "asked for 100x64"
    with pytest.raises(EngineError, match=message):
        run(sides.engine.generate(sides.request(width=100, height=64), [0]))


def test_pushed_adapters_are_what_each_expert_computes_with(sides: Sides, run: Run) -> None:
    """First into the low-noise expert alone, then into the other, then another one into the first again."""
    request = sides.request(stochastic_steps=(), seeds=(7, 100), keep_final=True)
    adapters = {name: random_adapter(plain(sides.model, name), seed) for seed, name in enumerate((HIGH, LOW), start=1)}
    nothing = {name: zeroed(tensors) for name, tensors in adapters.items()}
    base = run(sides.engine.generate_debug(request, [0]))[0].debug.model_outputs
    first_low = next(
        step for step, sigma in enumerate(base_sigmas(sides, run)) if sides.model.experts.of(1000 * sigma) == LOW
    )
    set_adapter(sides.model, nothing)
    try:
        for module, version in ((LOW, 4), (HIGH, 5)):
            report = run(sides.push(module, adapters[module], version))
            assert (report.tensors, report.layer_prefixes, report.unmapped) == (40, 20, 0)
            assert report.policy_version == version
            held = nothing | {name: adapters[name] for name in ((LOW,) if module == LOW else (HIGH, LOW))}
            set_adapter(sides.model, held)
            for name, tensors in held.items():
                if name in (LOW, module):  # the first push is still there after the second
                    assert digests_differ(run, sides.engine._started, expected(run, sides, tensors), module=name) == ""
            moved = run(sides.engine.generate_debug(request, [0]))[0].debug.model_outputs
            high, low = (relative(moved[part], base[part]) for part in (slice(0, 1), slice(first_low, None)))
            assert low > 1e-3
            assert (high > 1e-3) == (module == HIGH)
            assert_agree(sides, run, request)
            assert_agree(sides, run, sides.request(seeds=(7, 100), keep_final=True))
        again = random_adapter(plain(sides.model, HIGH), 9)
        run(sides.push(HIGH, again))
        set_adapter(sides.model, {HIGH: again, LOW: adapters[LOW]})
        assert_agree(
            sides, run, sides.request(seeds=(7, 100), keep_final=True, guidance_scale=1.0, guidance_scale_2=1.0)
        )
    finally:
        set_adapter(sides.model, nothing)
        for module, tensors in nothing.items():
            run(sides.push(module, tensors))


def plain(model: WanModel, name: str) -> torch.nn.Module:
    """The transformer with its own layers where the adapters are."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel.from_config(model[name].config)


def base_sigmas(sides: Sides, run: Run) -> np.ndarray:
    answer: Answer = run(sides.engine.generate_debug(sides.request(stochastic_steps=()), [0]))[0]
    return answer.sigmas[:-1]


def expected(run: Run, sides: Sides, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Digests of an adapter by the engine's own names."""
    names = run(sides.engine.layer_names(adapter_layers(tensors)))
    digests = {}
    for name, tensor in tensors.items():
        layer, factor, _ = name.rsplit(".", 2)
        digests[f"{names[layer]}.{factor}"] = tensor_digest(tensor)
    return digests


@pytest.mark.parametrize("module", [HIGH, LOW])
def test_one_changed_value_of_an_expert_is_an_error(sides: Sides, run: Run, module: str) -> None:
    tensors = zeroed(random_adapter(plain(sides.model, module), 1))
    payload = serialize_update(as_update(tensors, module=module), "cpu", consumers=sides.workers)
    tensors["blocks.0.attn1.to_q.lora_A.weight"][0, 0] += 1e-6
    changed = serialize_update(as_update(tensors, module=module), "cpu", consumers=sides.workers)
    with pytest.raises(WeightSyncError, match=r"checksum mismatch for 1 tensor\(s\): blocks.0.to_q.lora_A"):
        run(sides.engine.apply_weights(replace(as_push(payload), payloads=changed.texts)))
    payload.release()
    changed.release()


@pytest.mark.parametrize("change", [{"guidance_scale_2": None}, {"guidance_scale": 1.0}, {"guidance_scale_2": 0.5}])
def test_guidance_that_only_one_side_can_compute_is_refused(sides: Sides, run: Run, change: dict[str, Any]) -> None:
    request = sides.request(**change)
    for generate in (lambda: run(sides.engine.generate(request, [0])), lambda: sides.local.generate(request, [0])):
        with pytest.raises(Exception, match="guidance scales"):
            generate()
