"""The local engine with two experts: diffusers' own pipelines make the same videos, the trainer finds the same log-probs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline
from local_parts import NEGATIVE, deterministic, local_engine, model_of, rescored
from PIL import Image
from transformers import AutoTokenizer, UMT5EncoderModel

from miles_wan.errors import EngineError
from miles_wan.records import PromptRecord, RolloutRequest
from miles_wan.rollout.local import LocalEngine
from miles_wan.tiny import TinyPaths
from miles_wan.wan.model import WanModel

FAMILIES = ("t2v", "i2v")


@dataclass
class Scene:
    paths: TinyPaths
    model: WanModel
    engine: LocalEngine
    with_image: bool


@pytest.fixture(scope="module", params=FAMILIES)
def scene(request: pytest.FixtureRequest) -> Scene:
    paths: TinyPaths = request.getfixturevalue(f"{request.param}_paths")
    model = model_of(paths)
    return Scene(paths, model, local_engine(paths, model), request.param == "i2v")


@pytest.fixture
def ask(scene: Scene, make_request: Any) -> Any:
    """Requests to the model of the scene: 4 / 2.5 guides, steps 0 and 1 are the high-noise expert's, 3 the other's."""

    def ask(**changes: Any) -> RolloutRequest:
        standard = {"guidance_scale": 4.0, "guidance_scale_2": 2.5, "image": scene.with_image}
        request: RolloutRequest = make_request(**(standard | changes))
        return request

    return ask


@pytest.mark.parametrize(("guidance", "guidance_2"), [(1.0, 1.0), (4.0, 2.5)])
def test_a_video_is_diffusers(scene: Scene, ask: Any, guidance: float, guidance_2: float) -> None:
    """Bit for bit, the boundary included: both experts have steps."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    request = deterministic(ask, scheduler, guidance_scale=guidance, guidance_scale_2=guidance_2)
    folder, sampling = scene.paths.model, request.sampling
    routed = scene.model.experts.route([1000 * sigma for sigma in sampling.sigmas[:-1]])
    assert all(routed.values())
    parts = {
        "tokenizer": AutoTokenizer.from_pretrained(folder / "tokenizer"),
        "text_encoder": UMT5EncoderModel.from_pretrained(folder / "text_encoder"),
        "vae": AutoencoderKLWan.from_pretrained(folder / "vae", torch_dtype=torch.float32),
        "scheduler": scheduler,
        "boundary_ratio": scene.model.experts.boundary,
        **dict(scene.model.items()),
    }
    inputs: dict[str, Any] = {}
    if scene.with_image:
        pipeline: Any = WanImageToVideoPipeline(**parts, image_processor=None, image_encoder=None)
        with Image.open(request.record.image_path) as image:  # square, as the video: nothing is cropped
            assert image.width == image.height
            inputs = {"image": image.convert("RGB")}
    else:
        pipeline = WanPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        prompt=request.record.prompt,
        negative_prompt=NEGATIVE,
        height=sampling.height,
        width=sampling.width,
        num_frames=sampling.num_frames,
        num_inference_steps=sampling.num_inference_steps,
        guidance_scale=guidance,
        guidance_scale_2=guidance_2,
        generator=torch.Generator().manual_seed(7),
        max_sequence_length=512,
        output_type="latent",
        **inputs,
    ).frames[0]
    trajectory = scene.engine.generate(request, [0])[0].trajectory
    assert trajectory is not None
    np.testing.assert_array_equal(trajectory.final_latent, expected.numpy())


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps", "flow_grpo_wan"])
@pytest.mark.parametrize(("guidance", "guidance_2"), [(1.0, 1.0), (4.0, 2.5)])
def test_the_trainer_finds_the_log_probs_of_the_trajectory(
    scene: Scene, ask: Any, kind: str, guidance: float, guidance_2: float
) -> None:
    request = ask(kind=kind, guidance_scale=guidance, guidance_scale_2=guidance_2)
    output = scene.engine.generate(request, [0], return_conditioning=True)[0]
    trajectory = output.trajectory
    assert trajectory is not None
    assert trajectory.has_condition is scene.with_image
    assert {scene.model.experts.of(float(timestep)) for timestep in trajectory.timesteps} == set(scene.model.names)
    np.testing.assert_array_equal(trajectory.log_probs, rescored(scene.model, request, output))


def test_every_frame_is_sampled(scene: Scene, ask: Any) -> None:
    """An image of I2V is beside the state: no frame of the state is given, and one frame alone can be sampled."""
    answer = scene.engine.generate_debug(ask(), [0])[0]
    generator = torch.Generator().manual_seed(7)
    np.testing.assert_array_equal(answer.states[0], torch.randn(1, 16, 2, 4, 4, generator=generator)[0].numpy())
    for step in (0, 1, 3):
        state = answer.debug.means[step] + answer.debug.stds[step] * answer.debug.noises[step]
        np.testing.assert_allclose(answer.states[step + 1], state, rtol=0, atol=1e-5)
        assert answer.debug.noises[step][:, 0].any()
    assert scene.engine.generate(ask(num_frames=1), [0])[0].frames.shape == (1, 32, 32, 3)


def test_a_request_that_does_not_fit_the_family_is_refused(scene: Scene, ask: Any, record: PromptRecord) -> None:
    other = replace(record, image_path=None if scene.with_image else record.image_path)
    message = "needs a first image" if scene.with_image else "takes no first image"
    with pytest.raises(EngineError, match=rf"train\.jsonl:1: .*{message}"):
        scene.engine.generate(replace(ask(), record=other), [0])
    for change in ({"guidance_scale_2": None}, {"guidance_scale": 1.0}, {"guidance_scale_2": 1.0}):
        with pytest.raises(EngineError, match=r"train\.jsonl:1: .*guidance scales"):
            scene.engine.generate(ask(**change), [0])
    with pytest.raises(EngineError, match=r"40x32.*multiples of 16"):
        scene.engine.generate(ask(width=40), [0])


@pytest.mark.parametrize("scene", ["i2v"], indirect=True)
def test_an_image_of_another_shape_is_cropped_in_the_middle(scene: Scene, ask: Any, tmp_path: Path) -> None:
    """32x32 from the middle of 64x32: what is left and right of it does not matter."""
    middle = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)

    def conditioned(border: int) -> np.ndarray:
        path = tmp_path / f"{border}.png"
        Image.fromarray(np.pad(middle, ((0, 0), (16, 16), (0, 0)), constant_values=border)).save(path)
        request = ask()
        request = replace(request, record=replace(request.record, image_path=str(path)))
        latent = scene.engine.generate(request, [0], return_conditioning=True)[0].conditioning.condition_latent
        assert latent.shape == (20, 2, 4, 4)
        return latent

    np.testing.assert_array_equal(conditioned(0), conditioned(200))
