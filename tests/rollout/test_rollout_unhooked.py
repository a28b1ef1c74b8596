"""A real server without the hooks (bfloat16, one worker, merged adapters): it shows every fault, and the check after start
sees them. It is also the server that is stopped and killed, last."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import psutil
import pytest
from conftest import Run, settings_for
from rollout_replay import (
    ALPHA,
    RANK,
    as_push,
    as_update,
    digests_differ,
    make_request,
    mappings_of_ours,
    random_adapter,
)
from test_rollout_messages import packed

from miles_wan.cluster import lifeline
from miles_wan.errors import EngineError
from miles_wan.records import PromptRecord
from miles_wan.rollout.base import Answer
from miles_wan.rollout.sglang.canary import canary_query, check_canary, check_start
from miles_wan.rollout.sglang.client import SGLangClient
from miles_wan.rollout.sglang.messages import decode_tensor, parse_answer
from miles_wan.rollout.sglang.payload import serialize_update, tensor_digest
from miles_wan.rollout.sglang.plugin import DISABLE_VARIABLE
from miles_wan.rollout.sglang.query import SampleQuery, request_body
from miles_wan.rollout.sglang.server import SGLangServer
from miles_wan.rollout.sglang.weights import adapter_layers, apply_adapter, engine_layer_names
from miles_wan.tiny import TinyPaths
from miles_wan.wan.facts import FAMILIES

pytestmark = pytest.mark.e2e

TI2V = FAMILIES["wan2.2-ti2v-5b"]
LEFT_OUT = (
    "requested_size",
    "separate_outputs",
    "given_sigmas",
    "sampled_log_prob",
    "float32_transition",
    "float32_timestep",
    "float32_start",
    "float32_guidance",
    "uint8_frames",
    "own_adapter",
)


KILLED_RUN = f"tests-killed-{os.getpid()}"


@dataclass
class Unhooked:
    server: SGLangServer
    identity: dict[str, Any]
    client: SGLangClient


@pytest.fixture(scope="module")
def unhooked(tiny_paths: TinyPaths, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unhooked]:
    settings = settings_for(
        tiny_paths.model,
        tmp_path_factory.mktemp("unhooked"),
        devices=("0",),
        tp_size=1,
        dtype="bf16",
        lora_merge_mode="merge",
        environment=((DISABLE_VARIABLE, ",".join(LEFT_OUT)), (lifeline.MARKER, KILLED_RUN)),
    )
    server = SGLangServer(settings)
    identity = server.start()
    yield Unhooked(server, identity, SGLangClient(server.url, server.failure, request_timeout=300))
    server.close()
    lifeline.remove_leftovers(KILLED_RUN, tmp_path_factory.mktemp("none"), pids=set())
    assert not [pid for pid in psutil.pids() if pid != os.getpid() and _belongs(pid, identity["pid"])]


def _belongs(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session
    except ProcessLookupError:
        return False


@pytest.fixture(scope="module")
def raw(unhooked: Unhooked, run: Run) -> dict[str, Any]:
    """The answer to the request that checks a started engine, not yet checked."""
    response = run(unhooked.client.post("/rollout/generate", request_body(first_of_canary(with_image=True))))
    return msgpack.unpackb(response.content)[0]


def first_of_canary(*, with_image: bool) -> SampleQuery:
    return replace(canary_query(TI2V, 5.0, with_image=with_image), sample_indices=(0,))


def parsed_as_if_asked(raw: dict[str, Any]) -> list[Answer]:
    """The answer, with frames as bytes and the size that came taken for the size that was asked."""
    frames = decode_tensor(raw["generated_output"], "frames")
    query = first_of_canary(with_image=True)
    sampling = replace(query.request.sampling, height=frames.shape[2], width=frames.shape[3])
    query = replace(query, request=replace(query.request, sampling=sampling))
    return parse_answer(msgpack.packb([as_bytes(raw)]), query)


def as_bytes(raw: dict[str, Any]) -> dict[str, Any]:
    frames = decode_tensor(raw["generated_output"], "frames")
    return raw | {"generated_output": packed((frames * 255).astype(np.uint8))}


def test_the_server_says_which_hooks_are_left_out(unhooked: Unhooked) -> None:
    assert {name for name, state in unhooked.identity["hooks"].items() if state == "disabled"} == set(LEFT_OUT)
    assert unhooked.identity["dit_precision"] == "bf16"


def test_without_uint8_frames_the_answer_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="its uint8_frames hook is not active"):
        parse_answer(msgpack.packb([raw]), first_of_canary(with_image=True))


def test_without_requested_size_the_answer_is_refused(raw: dict[str, Any]) -> None:
    frames = (decode_tensor(raw["generated_output"], "frames") * 255).astype(np.uint8)
    with pytest.raises(EngineError, match="asked for 64x32 and 5 frames"):
        parse_answer(msgpack.packb([raw | {"generated_output": packed(frames)}]), first_of_canary(with_image=True))


def test_without_separate_outputs_two_of_an_image_fail(unhooked: Unhooked, run: Run) -> None:
    response = run(unhooked.client.post("/rollout/generate", request_body(canary_query(TI2V, 5.0))))
    assert response.status_code == 500


def test_without_separate_outputs_the_check_after_start_fails(unhooked: Unhooked, run: Run) -> None:
    query = canary_query(TI2V, 5.0, with_image=False)
    response = run(unhooked.client.post("/rollout/generate", request_body(query)))
    samples = [as_bytes(sample) for sample in msgpack.unpackb(response.content)]
    with pytest.raises(EngineError, match="its separate_outputs or generator_noise hook is not in effect"):
        check_canary(parse_answer(msgpack.packb(samples), query), TI2V, with_image=False)


def test_without_given_sigmas_the_answer_is_refused(unhooked: Unhooked, run: Run) -> None:
    query = first_of_canary(with_image=False)
    sampling = replace(query.request.sampling, sigmas=(1.0, 0.8, 0.4, 0.0))
    query = replace(query, request=replace(query.request, sampling=sampling))
    response = run(unhooked.client.post("/rollout/generate", request_body(query)))
    samples = [as_bytes(sample) for sample in msgpack.unpackb(response.content)]
    with pytest.raises(EngineError, match=r"sigma grid: asked for \[1.0, 0.8, 0.4, 0.0\], the engine used"):
        parse_answer(msgpack.packb(samples), query)


def test_without_sampled_log_prob_the_check_after_start_fails(raw: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="its sampled_log_prob hook is not in effect"):
        check_canary(parsed_as_if_asked(raw), TI2V)


def test_without_float32_transition_the_check_after_start_fails(raw: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="its float32_transition hook is not in effect"):
        check_canary(parsed_as_if_asked(raw), TI2V, with_image=False)  # so that the unmasked log-prob is right


def test_without_float32_start_the_check_after_start_fails(raw: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="its float32_start hook is not in effect"):
        check_start(parsed_as_if_asked(raw)[0], given=1)


def test_a_merged_adapter_is_in_the_weights_rounded_once(unhooked: Unhooked, transformer: Any, run: Run) -> None:
    """The engine's merged weights are those that the trainer predicts: bfloat16(W + alpha / rank B A), bit for bit."""
    tensors = random_adapter(transformer, 1)
    payload = serialize_update(as_update(tensors), "cpu")
    report = run(apply_adapter(unhooked.client, as_push(payload)))
    payload.release()
    assert (report.tensors, report.layer_prefixes, report.unmapped) == (40, 20, 0)
    layers = adapter_layers(tensors)
    names = run(engine_layer_names(unhooked.client, layers))
    expected = {}
    for layer in layers:
        weight = transformer.get_submodule(layer).weight.detach().bfloat16().float()
        a, b = tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"]
        expected[f"{names[layer]}.base_layer.weight"] = tensor_digest(weight.addmm(b, a, alpha=ALPHA / RANK).bfloat16())
    assert digests_differ(run, unhooked.client, expected) == ""


def test_without_own_adapter_the_engine_keeps_our_memory(unhooked: Unhooked, transformer: Any, run: Run) -> None:
    payload = serialize_update(as_update(random_adapter(transformer, 2)), "cpu")
    run(apply_adapter(unhooked.client, as_push(payload)))
    payload.release()
    assert mappings_of_ours(unhooked.identity["pid"])


def test_an_engine_with_a_hook_left_out_is_refused(tiny_paths: TinyPaths, unhooked: Unhooked, tmp_path: Path) -> None:
    from miles_wan.rollout.sglang.engine import SGLangEngine

    settings = settings_for(tiny_paths.model, tmp_path, devices=("0",), tp_size=1)
    with pytest.raises(EngineError, match="hook requested_size disabled"):
        SGLangEngine(settings)._check_identity(unhooked.identity)
    with pytest.raises(EngineError, match=r"dit_precision 'bf16' instead of 'fp32'.*lora_merge_mode 'merge'"):
        SGLangEngine(settings)._check_identity(unhooked.identity)


def slow_query(record: PromptRecord) -> SampleQuery:
    """Without an image, of many steps: it is still running when the server is hurt."""
    return SampleQuery(TI2V, make_request(record, image=False, num_inference_steps=400), (0,))


def test_a_stopped_server_hangs_and_that_is_told(unhooked: Unhooked, record: PromptRecord, run: Run) -> None:
    client = SGLangClient(unhooked.server.url, unhooked.server.failure, request_timeout=3.0)
    os.killpg(unhooked.identity["pid"], signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match=r"hangs: no request finished in 3 s \(rollout.request_timeout\)"):
            run(client.generate(slow_query(record)))
    finally:
        os.killpg(unhooked.identity["pid"], signal.SIGCONT)
    assert run(unhooked.client.get("/health")).status_code == 200


def test_a_killed_worker_is_told_at_once(unhooked: Unhooked, record: PromptRecord, run: Run) -> None:
    workers = [p for p in psutil.Process(unhooked.identity["pid"]).children(recursive=True) if "scheduler" in p.name()]

    async def kill_in_flight() -> float:
        task = asyncio.ensure_future(unhooked.client.generate(slow_query(record)))
        await asyncio.sleep(1.0)
        workers[0].kill()
        killed = time.monotonic()
        with pytest.raises(EngineError, match="Scheduler worker exited"):
            await task
        return time.monotonic() - killed

    assert len(workers) == 1
    assert run(kill_in_flight()) < 20
    with pytest.raises(EngineError, match="Scheduler worker exited"):
        run(unhooked.client.get("/health"))


def test_a_killed_server_is_told_with_the_end_of_its_log(unhooked: Unhooked, record: PromptRecord, run: Run) -> None:
    os.kill(unhooked.identity["pid"], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"(?s)the engine process ended with code 137.*last lines of"):
        run(unhooked.client.generate(slow_query(record)))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{unhooked.server.url}/health", trust_env=False)
    assert Path(f"/dev/shm/sglang-{KILLED_RUN}").is_dir()  # whatever it had there lies in here
