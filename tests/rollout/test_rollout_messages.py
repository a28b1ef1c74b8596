"""The wire format: what is asked, and every way in which an answer is not what was asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import safetensors.numpy
from rollout_replay import make_request

from miles_wan.errors import EngineError, InputError
from miles_wan.flow import shifted_sigmas
from miles_wan.records import PromptRecord
from miles_wan.rollout.sglang.messages import parse_answer
from miles_wan.rollout.sglang.query import SampleQuery, request_body
from miles_wan.wan.facts import FAMILIES, WanFamily

IMAGE = PromptRecord(record_id="r", prompt="a bird", image_path="/data/bird.png", source="train.jsonl:1")
TEXT = PromptRecord(record_id="r", prompt="a bird")
TI2V, T2V, I2V = (FAMILIES[name] for name in ("wan2.2-ti2v-5b", "wan2.2-t2v-a14b", "wan2.2-i2v-a14b"))
Answer = dict[str, Any]


def query(
    record: PromptRecord = IMAGE,
    *,
    family: WanFamily = TI2V,
    indices: tuple[int, ...] = (1,),
    conditioning: bool = True,
    **changes: Any,
) -> SampleQuery:
    request = make_request(record, **{"seeds": (7, 8, 9), "stochastic_steps": (1, 2), **changes})
    return SampleQuery(family, request, indices, return_conditioning=conditioning)


def packed(array: np.ndarray) -> dict[str, Any]:
    """A tensor as SGLang packs it."""
    data = safetensors.numpy.save({"t": np.ascontiguousarray(array)})
    return {"__tensor__": True, "data": data, "shape": list(array.shape), "dtype": f"torch.{array.dtype}"}


def latents() -> np.ndarray:
    """States 1, 2 and 3 of [48, 2, 2, 2]."""
    return np.arange(3 * 48 * 8, dtype=np.float32).reshape(3, 48, 2, 2, 2)


def answer() -> Answer:
    """What SGLang sends for ``query()``: 6 steps of which 1 and 2 are stochastic, 32x32x5, seed 8."""
    text = {"encoder_hidden_states": packed(np.ones((1, 512, 32), np.float32)), "encoder_hidden_states_2": None}
    return {
        "request_id": "1",
        "prompt": "a bird",
        "seed": 8,
        "generated_output": packed(np.arange(3 * 5 * 32 * 32).reshape(3, 5, 32, 32).astype(np.uint8)),
        "rollout_log_probs": packed(np.array([0, -1.1, -1.2, 0, 0, 0], np.float32)),
        "rollout_debug_tensors": None,
        "denoising_env": {"pos_cond_kwargs": text, "neg_cond_kwargs": text, "image_kwargs": None, "guidance": None},
        "dit_trajectory": {
            "latents": packed(latents()),
            "timesteps": packed(1000 * shifted_sigmas(6, 5.0).numpy()[1:4]),
            "sigmas": packed(shifted_sigmas(6, 5.0).numpy()),
        },
        "inference_time_s": 0.5,
        "peak_memory_mb": None,
    }


def encoded(*answers: Answer) -> bytes:
    return bytes(msgpack.packb(list(answers)))


def test_a_good_answer_becomes_records() -> None:
    output = parse_answer(encoded(answer()), query())[0].output
    trajectory, conditioning = output.trajectory, output.conditioning
    assert (output.seed, output.seconds) == (8, 0.5)
    assert output.frames.shape == (5, 32, 32, 3)
    assert output.frames[1, 2, 3, 0] == (1 * 32 * 32 + 2 * 32 + 3) % 256  # frame, row, column, channel
    assert trajectory is not None
    assert trajectory.steps == (1, 2)
    np.testing.assert_array_equal(trajectory.latents, np.stack([latents()[:2], latents()[1:]]))
    np.testing.assert_array_equal(trajectory.log_probs, np.array([-1.1, -1.2], np.float32))
    assert trajectory.sigmas.shape == (7,)
    np.testing.assert_array_equal(trajectory.timesteps, 1000 * shifted_sigmas(6, 5.0).numpy()[1:3])
    assert (trajectory.has_condition, trajectory.policy_version) == (True, 3)
    assert conditioning is not None
    assert conditioning.prompt_embeds.shape == (512, 32)
    assert conditioning.negative_prompt_embeds is not None
    np.testing.assert_array_equal(conditioning.condition_latent, latents()[0][:, :1])


def test_only_what_was_asked_for_is_kept() -> None:
    content = encoded(answer())
    assert parse_answer(content, query(conditioning=False))[0].output.conditioning is None
    text_only = parse_answer(content, query(TEXT, image=False))[0].output
    assert text_only.conditioning is not None
    assert text_only.conditioning.condition_latent is None
    assert text_only.trajectory is not None
    assert not text_only.trajectory.has_condition


def broken(change: Callable[[Answer], Any]) -> bytes:
    value = answer()
    change(value)
    return encoded(value)


def with_nan(array: np.ndarray) -> np.ndarray:
    array.flat[5] = np.nan
    return array


BAD = {
    "not msgpack": (b"\xc1", "not msgpack"),
    "two videos": (encoded(answer(), answer()), r"asked for 1 videos, seeds \(8,\); the engine sent a list of 2"),
    "no map": (msgpack.packb(["x"]), r"asked for 1 videos, seeds \(8,\); the engine sent a list of 1"),
    "an error page": (msgpack.packb({"detail": "x"}), r"asked for 1 videos, seeds \(8,\); the engine sent dict"),
    "another seed": (broken(lambda a: a.update(seed=7)), "asked for seed 8, the engine answered for seed 7"),
    "float frames": (
        broken(lambda a: a.update(generated_output=packed(np.ones((3, 5, 32, 32), np.float32)))),
        "expected uint8, the engine sent float32: its uint8_frames hook",
    ),
    "another size": (
        broken(lambda a: a.update(generated_output=packed(np.ones((3, 5, 928, 960), np.uint8)))),
        "asked for 32x32 and 5 frames",
    ),
    "no log-probs": (broken(lambda a: a.update(rollout_log_probs=None)), "lacks rollout_log_probs"),
    "no trajectory": (broken(lambda a: a.update(dit_trajectory=None)), "lacks dit_trajectory"),
    "no embeddings": (broken(lambda a: a.update(denoising_env=None)), "lacks denoising_env"),
    "no guidance": (
        broken(lambda a: a["denoising_env"].update(neg_cond_kwargs=None)),
        "negative prompt embedding that is missing",
    ),
    "nan latent": (
        broken(lambda a: a["dit_trajectory"].update(latents=packed(with_nan(latents())))),
        "seed 8: latents: 1 of 1152 values are not finite",
    ),
    "half latents": (
        broken(lambda a: a["dit_trajectory"].update(latents=packed(latents().astype(np.float16)))),
        "latents: expected float32, the engine sent float16",
    ),
    "a state too few": (
        broken(lambda a: a["dit_trajectory"].update(latents=packed(latents()[:2]))),
        r"asked for states \(1, 2, 3\), the engine sent \(2, 48, 2, 2, 2\)",
    ),
    "another latent size": (
        broken(lambda a: a["dit_trajectory"].update(latents=packed(np.zeros((3, 48, 2, 3, 2), np.float32)))),
        "do not belong to 32x32x5",
    ),
    "another grid": (
        broken(lambda a: a["dit_trajectory"].update(sigmas=packed(shifted_sigmas(6, 3.0).numpy()))),
        "6 steps with flow_shift 5 give",
    ),
    "rounded timesteps": (
        broken(lambda a: a["dit_trajectory"].update(timesteps=packed(np.array([909, 717, 540], np.float32)))),
        r"timesteps: the sigmas give \[952.6.*, the engine used \[909",
    ),
    "another step scored": (
        broken(lambda a: a.update(rollout_log_probs=packed(np.array([-1, -1, 0, 0, 0, 0], np.float32)))),
        r"asked for stochastic steps \(1, 2\), the engine scored \(0, 1\)",
    ),
    "a torn tensor": (broken(lambda a: a["rollout_log_probs"].update(data=b"torn")), "cannot be read"),
    "a lying shape": (broken(lambda a: a["rollout_log_probs"].update(shape=[7])), r"says shape \[7\] and sent \[6\]"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_answer_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_answer(content, query())


def of_another_seed() -> Answer:
    """The second output of a request for seeds 8 and 9: SGLang repeats the first seed, and a leading 1 may stay."""
    value = answer()
    value["dit_trajectory"]["latents"] = packed(latents() + 1)
    return value


def test_several_answers_are_in_the_order_of_their_seeds() -> None:
    first, second = parse_answer(encoded(answer(), of_another_seed()), query(indices=(1, 2)))
    assert (first.output.seed, second.output.seed) == (8, 9)
    assert first.output.trajectory is not None
    assert second.output.trajectory is not None
    assert (first.output.trajectory.seed, second.output.trajectory.seed) == (8, 9)
    np.testing.assert_array_equal(second.output.trajectory.latents, first.output.trajectory.latents + 1)
    assert first.output.conditioning is not None
    assert second.output.conditioning is None
    assert first.output.seconds == 0.25  # of the 0.5 for both


def test_what_is_wrong_with_one_of_several_answers_names_its_seed() -> None:
    bad = of_another_seed()
    bad["dit_trajectory"]["latents"] = packed(with_nan(latents()))
    with pytest.raises(EngineError, match="seed 9: latents: 1 of 1152 values are not finite"):
        parse_answer(encoded(answer(), bad), query(indices=(1, 2)))
    with pytest.raises(EngineError, match=r"asked for 2 videos, seeds \(8, 9\); the engine sent a list of 1"):
        parse_answer(encoded(answer()), query(indices=(1, 2)))


def test_the_final_latent_is_kept_if_asked_for() -> None:
    value = answer()
    value["dit_trajectory"]["latents"] = packed(np.concatenate([latents(), latents()[:1] + 5]))
    value["dit_trajectory"]["timesteps"] = packed(1000 * shifted_sigmas(6, 5.0).numpy()[[1, 2, 3, 6]])
    [got] = parse_answer(encoded(value), query(keep_final=True))
    assert got.output.trajectory is not None
    np.testing.assert_array_equal(got.output.trajectory.final_latent, latents()[0] + 5)
    np.testing.assert_array_equal(got.output.trajectory.latents, np.stack([latents()[:2], latents()[1:]]))


def test_a_rollout_of_a_final_latent_alone_has_no_steps() -> None:
    value = answer() | {"rollout_log_probs": packed(np.zeros(6, np.float32))}
    value["dit_trajectory"] |= {"latents": packed(latents()[:1]), "timesteps": packed(np.zeros(1, np.float32))}
    asked = query(keep_final=True, stochastic_steps=())
    output = parse_answer(encoded(value), asked)[0].output
    assert request_body(asked)["rollout_return_step_indices"] == [6]
    assert output.trajectory is not None
    assert (output.trajectory.latents.shape, output.trajectory.log_probs.shape) == ((0, 2, 48, 2, 2, 2), (0,))
    np.testing.assert_array_equal(output.trajectory.final_latent, latents()[0])
    assert output.conditioning is not None
    np.testing.assert_array_equal(output.conditioning.condition_latent, latents()[0][:, :1])
    assert parse_answer(encoded(value), query(stochastic_steps=()))[0].output.trajectory is None


def test_a_grid_that_is_not_the_named_one_is_refused() -> None:
    named = query(sigmas=(1.0, 0.9, 0.8, 0.5, 0.3, 0.1, 0.0))
    assert request_body(named)["extra_sampling_params"] == {
        "diffusers_kwargs": {"miles_wan_sigmas": [1.0, 0.9, 0.8, 0.5, 0.3, 0.1, 0.0]}
    }
    with pytest.raises(EngineError, match=r"asked for \[1.0, 0.9.*the engine used \[1.0, 0.9"):
        parse_answer(encoded(answer()), named)


def test_a_sampler_that_the_engine_lacks_is_bad_input() -> None:
    for kind in ("dance_sde", "flow_grpo_wan"):
        with pytest.raises(InputError, match=f"{kind} is none of SGLang's .*needs rollout.engine: local"):
            query(kind=kind)
        query(kind=kind, stochastic_steps=())  # nothing of it is used


def test_one_seed_is_asked_for_as_such_and_several_as_a_list() -> None:
    assert "extra_sampling_params" not in request_body(query())
    body = request_body(query(indices=(2, 0)))
    assert (body["seed"], body["num_outputs_per_prompt"]) == (9, 2)
    assert body["extra_sampling_params"] == {"seed": [9, 7]}


def test_squared_error_of_cps_is_asked_for_without_constants() -> None:
    assert request_body(query(kind="cps", cps_log_prob="squared_error"))["rollout_log_prob_no_const"]
    assert not request_body(query(kind="cps"))["rollout_log_prob_no_const"]
    assert not request_body(query(cps_log_prob="squared_error"))["rollout_log_prob_no_const"]  # flow_sde has one law


def test_the_body_asks_for_the_kept_steps_and_cpu_noise() -> None:
    body = request_body(query())
    assert (body["seed"], body["generator_device"], body["num_outputs_per_prompt"]) == (8, "cpu", 1)
    assert body["rollout_sde_type"] == "sde"
    assert body["rollout_sde_step_indices"] == [1, 2]
    assert body["rollout_return_step_indices"] == [1, 2, 3]
    assert body["image_path"] == ["/data/bird.png"]
    assert not body["rollout_debug_mode"]
    assert "negative_prompt" not in body
    named = PromptRecord(record_id="r", prompt="a bird", negative_prompt="")
    assert request_body(query(named, image=False))["negative_prompt"] == ""
    assert "image_path" not in request_body(query(named, image=False))


def test_a_validation_body_is_deterministic_on_the_rollout_grid() -> None:
    body = request_body(query(stochastic_steps=()))
    assert (body["rollout"], body["rollout_sde_type"], body["rollout_log_prob_no_const"]) == (True, "ode", True)
    assert body["rollout_return_step_indices"] == [6]


def of_i2v(condition: np.ndarray | None) -> Answer:
    """As ``answer()``, of I2V: states [16, 2, 4, 4], and what the image gave."""
    value = answer()
    states = np.arange(3 * 16 * 32, dtype=np.float32).reshape(3, 16, 2, 4, 4)
    value["dit_trajectory"]["latents"] = packed(states)
    value["denoising_env"]["image_kwargs"] = {} if condition is None else {"image_latent": packed(condition)}
    return value


@pytest.mark.parametrize("leading", [(), (1,)])
def test_what_an_image_of_i2v_gives_is_read_from_the_answer(leading: tuple[int, ...]) -> None:
    asked = query(family=I2V, guidance_scale_2=2.0)
    assert request_body(asked)["extra_sampling_params"] == {"guidance_scale_2": 2.0}
    channels = np.random.default_rng(0).standard_normal((20, 2, 4, 4), np.float32)
    [got] = parse_answer(encoded(of_i2v(channels.reshape(*leading, 20, 2, 4, 4))), asked)
    assert got.output.conditioning is not None
    np.testing.assert_array_equal(got.output.conditioning.condition_latent, channels)
    assert got.output.trajectory is not None
    assert got.output.trajectory.has_condition


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (None, "lacks image_latent: its condition_latent hook is not active"),
        (np.zeros((16, 2, 4, 4), np.float32), r"image_latent: expected shape \(20, 2, 4, 4\), the engine sent \(16"),
        (with_nan(np.zeros((20, 2, 4, 4), np.float32)), "image_latent: 1 of 640 values are not finite"),
    ],
)
def test_an_image_of_i2v_that_is_not_answered_is_refused(condition: np.ndarray | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_answer(encoded(of_i2v(condition)), query(family=I2V, guidance_scale_2=2.0))


@pytest.mark.parametrize(
    ("family", "scales", "message"),
    [
        (T2V, {}, "2 expert.s. with guidance scales 3 and None"),
        (TI2V, {"guidance_scale_2": 2.0}, "1 expert.s. with guidance scales 3 and 2"),
        (T2V, {"guidance_scale_2": 1.0}, "guidance is on for both experts"),
        (T2V, {"guidance_scale": 1.0, "guidance_scale_2": 3.0}, "guidance is on for both experts"),
    ],
)
def test_each_expert_is_asked_for_with_its_own_guidance(
    family: WanFamily, scales: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        query(TEXT, family=family, image=False, **scales)
