"""What can only be checked on GPUs, in one short run: does the CUDA path give the CPU path's numbers?

    python benchmarks/device_check.py --out device_check.json

Checks, each with its figures in the report: the transformer's forward on CUDA against the CPU in float32 and bfloat16,
FSDP2 over nccl on one rank with gradients against the CPU, one tensor sent to another process over CUDA IPC and read back,
and a whole run of two rollouts on the tiny checkpoint: engine, trainer, reward and weight sync share the GPU, and the gap
between engine and trainer is in its summary. Needs one GPU; ``--no-run`` leaves the whole run, which needs SGLang, out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from diffusers import WanTransformer3DModel
from torch import Tensor

from miles_wan.flow import shifted_sigmas, transition
from miles_wan.tiny import make_tiny
from miles_wan.training.sharding import full_tensor, init_process_group, shard_transformer
from miles_wan.wan.conditioning import build_model_input
from miles_wan.wan.forward import guided_velocity
from miles_wan.wan.lora import inject_lora, trainable_parameters

LAUNCHER = Path(__file__).resolve().parent.parent / "scripts" / "run_diffusion_grpo_wan22_ti2v.py"
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")


@dataclass(frozen=True)
class Arguments:
    """Where the report goes."""

    out: Path = Path("device_check.json")
    """Report, JSON."""
    run: bool = True
    """Whether to make the whole run, too."""


def main() -> int:
    """Run all checks; exit code 1 if one is out of bounds, 2 without a GPU."""
    arguments = tyro.cli(Arguments)
    if not torch.cuda.is_available():
        print("no CUDA device here; nothing was checked")
        return 2
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    torch.backends.cuda.matmul.allow_tf32 = False
    reference, gradients = _loss_and_gradients(torch.device("cpu"), torch.float32, sharded=False)
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        value, found = _loss_and_gradients(torch.device("cuda:0"), dtype, sharded=False)
        report[f"forward_{dtype}"] = _row(abs(value - reference) / abs(reference), bound)
        report[f"gradient_{dtype}"] = _row(_relative(found, gradients), bound)
    with tempfile.TemporaryDirectory() as folder:
        init_process_group(device=torch.device("cuda:0"), rank=0, world_size=1, init_method=f"file://{folder}/meet")
        _, found = _loss_and_gradients(torch.device("cuda:0"), torch.float32, sharded=True)
        report["gradient_fsdp2_nccl"] = _row(_relative(found, gradients), 1e-4)
        torch.distributed.destroy_process_group()
    report["cuda_ipc"] = _row(float(not _ipc_round_trip()), 0.5)
    if arguments.run:
        for engine in ("sglang", "local"):
            report |= {f"{engine}_{name}": row for name, row in _whole_run("cuda", engine).items()}
    arguments.out.write_text(json.dumps(report, indent=2))
    print(json.dumps(report, indent=2))
    return 0 if all(row.get("holds", True) for row in report.values() if isinstance(row, dict)) else 1


def _row(value: float, bound: float) -> dict[str, Any]:
    return {"value": value, "bound": bound, "holds": value <= bound}


def _loss_and_gradients(device: torch.device, dtype: torch.dtype, *, sharded: bool) -> tuple[float, dict[str, Tensor]]:
    """Minus the masked log-prob of one stored step under a small random transformer, and its adapter gradients."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=64, in_channels=48, out_channels=48,
        text_dim=128, freq_dim=64, ffn_dim=512, num_layers=4, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=1024,
    )  # fmt: skip
    transformer = _stored(transformer, dtype)
    inject_lora(transformer, rank=4, alpha=8, targets=TARGETS, seed=0)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(trainable_parameters(transformer)):
            if "lora_B" in name:
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(index))
    transformer.to(device)
    if sharded:
        shard_transformer(transformer, device=device, activation_checkpointing=True)
    draw = torch.Generator().manual_seed(1)
    latents, following = (torch.randn(2, 48, 3, 8, 8, generator=draw).to(device) for _ in range(2))
    condition = torch.randn(2, 48, 1, 8, 8, generator=draw).to(device)
    sigmas = shifted_sigmas(8, 5.0)
    inputs = build_model_input(
        latents,
        torch.full((2,), 1000 * float(sigmas[2]), device=device),
        condition_latent=condition,
        has_condition=torch.tensor([True, True], device=device),
        image_conditioning="first_frame",
    )
    velocity = guided_velocity(
        transformer,
        inputs,
        prompt_embeds=torch.randn(2, 16, 128, generator=draw).to(device),
        negative_prompt_embeds=None,
        guidance_scale=1.0,
        dtype=dtype,
    )
    step = transition(
        "flow_sde", inputs.hidden_states, velocity, sigma=float(sigmas[2]), sigma_next=float(sigmas[3]),
        sigma_max=float(sigmas[1]), noise_level=0.7, next_sample=following, mask=inputs.mask,
    )  # fmt: skip
    loss = -step.log_prob.mean()
    loss.backward()
    return float(loss), {
        name: full_tensor(parameter.grad).cpu()
        for name, parameter in trainable_parameters(transformer)
        if parameter.grad is not None
    }


def _stored(transformer: WanTransformer3DModel, dtype: torch.dtype) -> WanTransformer3DModel:
    """Through a file, as a run loads it: ``from_pretrained`` keeps what must stay float32."""
    with tempfile.TemporaryDirectory() as folder:
        transformer.save_pretrained(folder)
        return WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype).eval()


def _relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    difference = sum(float(((found[name] - expected[name]) ** 2).sum()) for name in expected)
    return (difference / sum(float((tensor**2).sum()) for tensor in expected.values())) ** 0.5


def _ipc_round_trip() -> bool:
    """Another process opens a CUDA tensor of this one and sees the same bytes."""
    context = torch.multiprocessing.get_context("spawn")
    tensor = torch.arange(1 << 16, dtype=torch.float32, device="cuda:0")
    sums = context.Queue()
    child = context.Process(target=_sum_of, args=(tensor, sums))
    child.start()
    value = sums.get(timeout=120)
    child.join()
    return value == float(tensor.double().sum())


def _whole_run(device: str, engine: str) -> dict[str, Any]:
    """Two rollouts of the launcher on the tiny checkpoint in float32: what its summary says about sync and parity."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder) / "tiny", eval_records=4)
        options = {
            "--recipe": "tiny_ti2v",
            "--model": str(tiny.model),
            "--data-jsonl": str(tiny.train_jsonl),
            "--eval-data-jsonl": str(tiny.eval_jsonl),
            "--reward-model": str(tiny.reward),
            "--device": device,
            "--num-gpus": "1",
            "--rollout.engine": engine,
            "--deterministic": "true" if engine == "local" else "false",
            "--num-rollouts": "2",
            "--eval-interval": "2",
            "--output-dir": f"{folder}/run",
        }
        command = [sys.executable, str(LAUNCHER), *(token for item in options.items() for token in item)]
        ended = subprocess.run(command, check=False)
        if ended.returncode:
            return {"run_exit_code": _row(float(ended.returncode), 0.0)}
        summary = json.loads(Path(f"{folder}/run/summary.json").read_text())
        return {
            "run_exit_code": _row(0.0, 0.0),
            "run_max_log_prob_gap": _row(summary["max_log_prob_gap"], 1e-4),
            "run_unmapped": _row(summary["unmapped"], 0.0),
            "run_seconds_by_phase": summary["seconds_by_phase"],
        }


def _sum_of(tensor: Tensor, sums: Any) -> None:
    sums.put(float(tensor.double().sum()))


if __name__ == "__main__":
    sys.exit(main())
