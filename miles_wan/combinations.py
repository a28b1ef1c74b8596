"""Which fields of a configuration go together, and the batch equation. In: a ``Config`` whose fields are legal each for
itself. Out: faults of combinations. It checks what can be known without touching the data, a model or a device.
"""

from __future__ import annotations

import logging

from miles_wan.config import Config

logger = logging.getLogger(__name__)

_LARGEST_DIVISOR = 4096  # a micro-batch above it is nobody's


def pairs_per_sample(config: Config) -> int:
    """Pairs that one video is trained on: (sample, kept step), or for nft (sample, noise level)."""
    rollout = config.rollout
    if config.algorithm.loss == "nft":
        return config.algorithm.nft.sigmas_per_sample
    if rollout.step_selection == "all":
        first, end = step_range(config)
        return end - first
    if rollout.step_selection == "given":
        return len(rollout.steps or ())
    return rollout.window_size


def step_range(config: Config) -> tuple[int, int]:
    """The steps [first, end) that may be stochastic."""
    rollout = config.rollout
    return rollout.window_range if rollout.window_range is not None else (0, rollout.num_inference_steps - 1)


def samples_trained(config: Config) -> int:
    """Samples of a rollout that are trained on, before groups of too little spread are left out."""
    rollout, best = config.rollout, config.algorithm.best_of_n
    per_group = rollout.samples_per_prompt if best is None else min(2 * best, rollout.samples_per_prompt)
    return rollout.prompts_per_rollout * per_group


def batch_equation(config: Config) -> str:
    """The equation that ties the batch knobs together, with this run's numbers."""
    rollout, steps, ranks = config.rollout, config.algorithm.optimizer_steps_per_rollout, config.training.dp_size
    total, kept = samples_trained(config), pairs_per_sample(config)
    per_step = total // steps
    pairs = per_step // ranks * kept
    best = config.algorithm.best_of_n
    chosen = "" if best is None else f" (of {rollout.samples_per_prompt} at most {best} best and {best} worst)"
    unit = "noise levels" if config.algorithm.loss == "nft" else "kept steps"
    return (
        f"{rollout.prompts_per_rollout} prompts x {total // rollout.prompts_per_rollout} samples per prompt{chosen} = "
        f"{total} samples = {per_step} samples per optimizer step x {steps} optimizer steps; a step has "
        f"{per_step // ranks} samples x {kept} {unit} = {pairs} pairs on each of {ranks} ranks, in "
        f"{pairs // config.training.micro_batch_size} micro-batches of {config.training.micro_batch_size}"
    )


def check_config(config: Config) -> list[str]:
    """Faults of combinations of fields; each names the fields, their values and the remedy."""
    return [
        *_step_faults(config),
        *_batch_faults(config),
        *_sampler_faults(config),
        *_algorithm_faults(config),
        *_device_faults(config),
        *_other_faults(config),
    ]


def _batch_faults(config: Config) -> list[str]:
    steps, ranks = config.algorithm.optimizer_steps_per_rollout, config.training.dp_size
    total, kept = samples_trained(config), pairs_per_sample(config)
    named = "rollout.prompts_per_rollout x " + (
        "rollout.samples_per_prompt" if config.algorithm.best_of_n is None else "2 algorithm.best_of_n"
    )
    if total % steps:
        return [f"{named} = {total} is not divisible by algorithm.optimizer_steps_per_rollout = {steps}"]
    if total // steps % ranks:
        return [
            f"{named} = {total} / {steps} optimizer steps = {total // steps} is not divisible by training.dp_size = {ranks}"
        ]
    pairs, micro = total // steps // ranks * kept, config.training.micro_batch_size
    if pairs % micro:
        divisors = [size for size in range(1, min(pairs, _LARGEST_DIVISOR) + 1) if pairs % size == 0]
        return [
            f"training.micro_batch_size = {micro} does not divide the {pairs} (sample, step) pairs of a rank and "
            f"optimizer step; it can be {', '.join(map(str, divisors))}"
        ]
    return []


def _step_faults(config: Config) -> list[str]:
    rollout = config.rollout
    steps, strategy = rollout.num_inference_steps, rollout.step_selection
    first, end = step_range(config)
    faults = []
    if rollout.steps is not None and strategy != "given":
        faults.append(f"rollout.steps = {list(rollout.steps)} with step_selection = {strategy}; set that to given")
    if config.algorithm.loss == "nft":
        if strategy != "window":
            faults.append(f"rollout.step_selection = {strategy} with algorithm.loss = nft: it has no stochastic steps")
        levels = config.algorithm.nft.sigmas_per_sample
        if levels > steps:
            faults.append(f"algorithm.nft.sigmas_per_sample = {levels} of the {steps} sigmas of the grid; lower it")
        return faults
    if not 0 <= first < end <= steps - 1:
        return [
            *faults,
            f"rollout.window_range = [{first}, {end}) must lie in steps [0, {steps - 1}): the last of the "
            f"rollout.num_inference_steps = {steps} steps is never stochastic",
        ]
    if strategy in ("window", "subset", "sliding") and rollout.window_size > end - first:
        faults.append(
            f"rollout.window_size = {rollout.window_size} does not fit into the {end - first} steps [{first}, {end}); "
            "lower it or raise rollout.num_inference_steps"
        )
    if strategy == "given":
        given = rollout.steps or ()
        if not given or len(set(given)) < len(given) or not all(first <= step < end for step in given):
            faults.append(
                f"rollout.steps = {list(given)}: step_selection = given needs different steps in [{first}, {end})"
            )
    return faults


def _sampler_faults(config: Config) -> list[str]:
    rollout = config.rollout
    faults = []
    if rollout.engine == "sglang" and rollout.sampler in ("dance_sde", "flow_grpo_wan"):
        faults.append(
            f"rollout.sampler = {rollout.sampler}: SGLang has no such law; use rollout.engine = local, flow_sde or cps"
        )
    if rollout.sampler == "cps" and rollout.noise_level > 1:
        faults.append(
            f"rollout.noise_level = {rollout.noise_level} with sampler cps: at most 1 (its std is sigma sin(eta pi / 2))"
        )
    if rollout.cps_log_prob != "density" and rollout.sampler != "cps":
        faults.append(
            f"rollout.cps_log_prob = {rollout.cps_log_prob} with sampler {rollout.sampler}: only cps reads it"
        )
    if rollout.sigmas is not None:
        wanted = rollout.num_inference_steps + 1
        if len(rollout.sigmas) != wanted:
            faults.append(f"rollout.sigmas: {len(rollout.sigmas)} values, rollout.num_inference_steps + 1 = {wanted}")
        if config.eval.num_inference_steps not in (None, rollout.num_inference_steps):
            faults.append("eval.num_inference_steps with rollout.sigmas: validation takes that grid, too; leave it out")
        from miles_wan.flow import explicit_sigmas  # torch takes seconds, and few give a grid of their own

        try:
            explicit_sigmas(rollout.sigmas)
        except ValueError as error:
            faults.append(f"rollout.sigmas: {error}")
    return faults


def _algorithm_faults(config: Config) -> list[str]:
    algorithm, rollout = config.algorithm, config.rollout
    faults = []
    if (rollout.sampler == "ode") != (algorithm.loss == "nft"):
        faults.append(
            f"algorithm.loss = {algorithm.loss} with rollout.sampler = {rollout.sampler}: nft learns from rollouts without "
            "noise (ode), the others from the likelihood of stochastic steps"
        )
    if algorithm.loss == "nft":
        if rollout.guidance_scale > 1:
            faults.append(
                f"rollout.guidance_scale = {rollout.guidance_scale:g} with algorithm.loss = nft: DiffusionNFT trains the "
                "velocity itself and samples without guidance; set it to 1"
            )
        if config.training.ema_decay is None:
            faults.append("algorithm.loss = nft: its old policy is an average of the adapter; set training.ema_decay")
        if algorithm.kl_beta > 0:
            faults.append("algorithm.kl_beta with loss nft: there are no steps to compare; use nft.reference_weight")
    if algorithm.loss in ("guard", "nft") and algorithm.step_weight != "none":
        faults.append(
            f"algorithm.step_weight = {algorithm.step_weight} with loss {algorithm.loss}: it weights the steps itself; set none"
        )
    if config.training.ema_decay is None:
        for field, wants in (
            ("algorithm.kl_reference", algorithm.kl_reference == "ema"),
            ("eval.weights", config.eval.weights == "ema"),
        ):
            if wants:
                faults.append(f"{field} = ema needs training.ema_decay")
        if config.training.ema_rise is not None:
            faults.append(f"training.ema_rise = {config.training.ema_rise:g} needs training.ema_decay")
    if algorithm.loss in ("guard", "dppo") and rollout.cps_log_prob != "density":
        faults.append(f"rollout.cps_log_prob = {rollout.cps_log_prob} with loss {algorithm.loss}: it needs the density")
    if algorithm.loss == "dppo" and algorithm.optimizer_steps_per_rollout == 1:
        logger.warning(
            "algorithm.loss = dppo with algorithm.optimizer_steps_per_rollout = 1: the policy has not moved when it is "
            "trained, so that the trust region never acts"
        )
    return faults


def _device_faults(config: Config) -> list[str]:
    rollout, cluster = config.rollout, config.cluster
    faults = []
    engines = rollout.num_engines * rollout.tp_size * rollout.sp_size
    if rollout.engine == "sglang" and engines > cluster.num_gpus:
        faults.append(
            f"rollout.num_engines x tp_size x sp_size = {engines} devices, cluster.num_gpus is {cluster.num_gpus}; "
            "lower the former or raise --num-gpus"
        )
    if config.training.dp_size > cluster.num_gpus:
        faults.append(f"training.dp_size = {config.training.dp_size} is above cluster.num_gpus = {cluster.num_gpus}")
    listed = cluster.cuda_visible_devices
    if listed is not None and cluster.device == "cpu":
        faults.append(f"cluster.cuda_visible_devices = {listed!r} with cluster.device = cpu; leave it out")
    elif listed is not None and len([entry for entry in listed.split(",") if entry.strip()]) < cluster.num_gpus:
        faults.append(
            f"cluster.cuda_visible_devices = {listed!r} lists fewer than cluster.num_gpus = {cluster.num_gpus} devices"
        )
    if config.sync.transport == "cuda_ipc" and cluster.device == "cpu":
        faults.append("sync.transport = cuda_ipc needs cluster.device = cuda; use auto")
    return faults


def _other_faults(config: Config) -> list[str]:
    faults = []
    if config.eval.interval > 0 and config.data.eval is None:
        faults.append(
            f"eval.interval = {config.eval.interval} needs validation records: give data.eval (--eval-data-jsonl), or set it to 0"
        )
    if config.deterministic and any("attention-backend" in argument for argument in config.rollout.server_args):
        faults.append(
            "rollout.server_args chooses an attention backend and deterministic = true: only torch's own attention is known "
            "to be it, and is chosen then; leave one of them out"
        )
    names = [function.name for function in config.reward.functions]
    if len(set(names)) < len(names):
        faults.append(f"reward.functions: names must differ, got {', '.join(names)}")
    if not any(function.weight for function in config.reward.functions):
        faults.append("reward.functions: every weight is 0, so nothing is trained; give one reward a weight")
    return faults
