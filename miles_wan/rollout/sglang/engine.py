"""The SGLang implementation of ``RolloutEngine``: one server and one client. In: settings, then requests and adapters.
Out: videos with trajectories, sync reports. A plain class; who runs it in an actor is not its business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from miles_wan.errors import EngineError
from miles_wan.records import RolloutOutput, RolloutRequest
from miles_wan.rollout.base import Answer, EngineInfo, EngineMismatchError, SyncReport, WeightPush
from miles_wan.rollout.sglang.canary import canary_query, check_canary, check_experts, expert_queries
from miles_wan.rollout.sglang.client import GENERATE_PATH, SGLangClient, reason
from miles_wan.rollout.sglang.identity import PATH as IDENTITY_PATH
from miles_wan.rollout.sglang.messages import parse_answer
from miles_wan.rollout.sglang.query import SampleQuery, request_body
from miles_wan.rollout.sglang.server import SGLangServer
from miles_wan.rollout.sglang.settings import EngineSettings
from miles_wan.rollout.sglang.weights import apply_adapter, engine_layer_names
from miles_wan.wan.family import load_family

logger = logging.getLogger(__name__)

# The engine's pipeline configuration for each model id. Another one computes another model without a word.
_CONFIGS = {
    "Wan2.2-TI2V-5B-Diffusers": "Wan2_2_TI2V_5B_Config",
    "Wan2.2-T2V-A14B-Diffusers": "Wan2_2_T2V_A14B_Config",
    "Wan2.2-I2V-A14B-Diffusers": "Wan2_2_I2V_A14B_Config",
}


class SGLangEngine:
    """One SGLang server that rolls out with the adapters it was last given. Raises InputError if its model folder is not
    whole."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._folder = load_family(settings.model_path)
        self._server = SGLangServer(settings)
        self._client: SGLangClient | None = None

    def start(self) -> EngineInfo:
        """Start the server, check that it is ours, runs the right model with our hooks, and computes with them.

        Blocks until then. Raises EngineError; nothing is left running.
        """
        started = time.monotonic()
        identity = self._server.start()
        try:
            self._check_identity(identity)
            self._check_computation()
        except BaseException:
            self._server.close()
            raise
        self._client = SGLangClient(
            self._server.url,
            self._server.failure,
            concurrency=self._settings.concurrency,
            request_timeout=self._settings.request_timeout,
        )
        info = self._info(identity, time.monotonic() - started)
        logger.debug("engine ready after %.1f s: %s", info.start_seconds, info)
        return info

    async def generate(
        self, request: RolloutRequest, sample_indices: Sequence[int], *, return_conditioning: bool = False
    ) -> list[RolloutOutput]:
        """The videos of ``request.seeds[i]`` for every i of ``sample_indices``, in that order, in one engine request; the
        first with the conditioning of their record if asked.

        Raises:
            EngineError: the engine refused, died, hangs or answered something else.
            InputError: SGLang lacks the sampler.
        """
        query = SampleQuery(
            self._folder.family, request, tuple(sample_indices), return_conditioning=return_conditioning
        )
        return [answer.output for answer in await self._started.generate(query)]

    async def generate_debug(self, request: RolloutRequest, sample_indices: Sequence[int]) -> list[Answer]:
        """As ``generate``, with the conditioning and what the engine did in every step: for comparisons, it is large."""
        query = SampleQuery(self._folder.family, request, tuple(sample_indices), return_conditioning=True, debug=True)
        return await self._started.generate(query)

    async def apply_weights(self, push: WeightPush) -> SyncReport:
        """Replace the adapter and prove it. No rollout may be in flight. Raises WeightSyncError, EngineError."""
        return await apply_adapter(self._started, push)

    async def layer_names(self, layers: Sequence[str]) -> Mapping[str, str]:
        """The engine's own name of each layer of the diffusers transformer. Raises WeightSyncError."""
        return await engine_layer_names(self._started, layers)

    async def identity(self) -> dict[str, Any]:
        """What the server says about itself. Raises EngineError if it is not the one that was started here."""
        return self._server.check_identity(await self._started.get(IDENTITY_PATH))

    async def health(self) -> None:
        """Raises EngineError if the server has died, hangs, or is somebody else's."""
        if (failure := self._server.failure()) is not None:
            raise EngineError(failure)
        response = await self._started.get("/health")
        if response.status_code != 200:
            raise EngineError(f"the engine is not healthy: {reason(response)}")
        await self.identity()

    async def close(self) -> None:
        """End the server and everything it started. Safe to call twice, and before ``start``."""
        if self._client is not None:
            await self._client.close()
        await asyncio.to_thread(self._server.close)

    @property
    def _started(self) -> SGLangClient:
        if self._client is None:
            raise EngineError("the engine is not started")
        return self._client

    def _check_identity(self, identity: Mapping[str, Any]) -> None:
        settings = self._settings
        wanted = {
            "pipeline_config": _CONFIGS.get(settings.model_id),
            "flow_shift": settings.flow_shift,
            "dit_precision": settings.dtype,
            "tp_size": settings.tp_size,
            "sp_size": settings.sp_size,
            "lora_merge_mode": settings.lora_merge_mode,
        }
        differing = {key: identity.get(key) for key, value in wanted.items() if identity.get(key) != value}
        idle = {name: state for name, state in identity["hooks"].items() if state in ("failed", "disabled")}
        faults = [f"{key} {value!r} instead of {wanted[key]!r}" for key, value in differing.items()]
        faults += [f"hook {name} {state}" for name, state in idle.items()]
        if faults:
            raise EngineMismatchError(
                f"the engine runs with {'; '.join(faults)}; see {self._server.log_path}",
                differing | {f"hook.{name}": state for name, state in idle.items()},
                {key: wanted[key] for key in differing} | {f"hook.{name}": "active" for name in idle},
            )

    def _check_computation(self) -> None:
        family, shift = self._folder.family, self._settings.flow_shift
        check_canary(self._first_answers(canary_query(family, shift)), family)
        if len(family.experts) == 2:
            routing = self._folder.routing
            queries = expert_queries(family, shift, routing)
            check_experts([self._first_answers(query)[0] for query in queries], routing)

    def _first_answers(self, query: SampleQuery) -> list[Answer]:
        """Before there is an event loop."""
        timeout = self._settings.request_timeout
        try:
            response = httpx.post(
                f"{self._server.url}{GENERATE_PATH}", json=request_body(query), trust_env=False, timeout=timeout
            )
        except httpx.TransportError as error:
            raise EngineError(
                f"the engine did not answer its first request: {error!r}; {self._server.log_tail()}"
            ) from error
        if response.status_code != 200:
            raise EngineError(f"the engine failed its first request: {reason(response)}; {self._server.log_tail()}")
        return parse_answer(response.content, query)

    def _info(self, identity: Mapping[str, Any], seconds: float) -> EngineInfo:
        return EngineInfo(
            url=self._server.url,
            pid=self._server.pid,
            version=str(identity["engine_version"]),
            pipeline_config=str(identity["pipeline_config"]),
            flow_shift=float(identity["flow_shift"]),
            dtype=str(identity["dit_precision"]),
            tp_size=int(identity["tp_size"]),
            sp_size=int(identity["sp_size"]),
            lora_merge_mode=str(identity["lora_merge_mode"]),
            hooks=dict(identity["hooks"]),
            log_path=self._server.log_path,
            start_seconds=seconds,
        )
