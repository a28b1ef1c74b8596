"""Processes and ports: nothing outlives its parent, and two engines never share a port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from miles_wan.errors import EngineError, InputError
from miles_wan.rollout.ports import PortLease
from miles_wan.rollout.sglang.hooks import DETERMINISTIC_VARIABLE
from miles_wan.rollout.sglang.server import SGLangServer
from miles_wan.rollout.sglang.settings import EngineSettings, server_command, server_environment

SUPERVISE = [sys.executable, "-m", "miles_wan.rollout.sglang.supervisor"]
FAMILY = "sleep 300 & echo $! > {file}; trap '' INT; wait; wait"  # a shell with a child, deaf to interrupts


def wait_until(condition: object, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def grandchild(file: Path) -> int:
    assert wait_until(lambda: file.exists() and file.read_text().strip())
    return int(file.read_text())


def test_the_command_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen({SUPERVISE!r} + [str(os.getpid()), 'sh', '-c', {FAMILY.format(file=file)!r}])\n"
        "time.sleep(300)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    pid = grandchild(file)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not psutil.pid_exists(pid))


def test_the_command_ends_when_its_supervisor_is_killed_or_told_to_stop(tmp_path: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        file = tmp_path / f"pid{number}"
        command = [
            *SUPERVISE,
            str(os.getpid()),
            "sh",
            "-c",
            f"echo $$ > {file}; trap '' INT; while true; do sleep 0.1; done",
        ]
        supervisor = subprocess.Popen(command)
        pid = grandchild(file)
        supervisor.send_signal(number)
        supervisor.wait(timeout=30)
        assert wait_until(lambda pid=pid: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


def test_the_exit_code_of_the_command_is_passed_on() -> None:
    assert subprocess.run([*SUPERVISE, str(os.getpid()), "sh", "-c", "exit 7"]).returncode == 7


def test_a_parent_that_is_gone_starts_nothing(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    file = tmp_path / "made"
    assert subprocess.run([*SUPERVISE, str(gone.pid), "touch", str(file)]).returncode == 1
    assert not file.exists()


def test_leases_are_disjoint_between_processes() -> None:
    code = (
        "from miles_wan.rollout.ports import PortLease\n"
        "lease = PortLease(2)\n"  # a lease without a name would end with the line
        "print(*lease.ports, flush=True)\n"
        "input()"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    taken = [int(port) for other in others for port in other.stdout.readline().split()]  # type: ignore[union-attr]
    ours = [PortLease(2) for _ in range(20)]
    everything = taken + [port for lease in ours for port in lease.ports]
    assert len(set(everything)) == len(everything) == 44
    for other in others:
        other.communicate("\n")
    for lease in ours:
        lease.release()


def test_a_port_that_somebody_listens_on_is_not_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        port = foreign.getsockname()[1]
        monkeypatch.setattr("miles_wan.rollout.ports._candidates", lambda count: iter([port, port - 1]))
        with pytest.raises(EngineError, match="no 2 free neighbouring ports"):
            PortLease(2)


def test_a_server_that_cannot_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    settings = EngineSettings(
        model_path=str(tmp_path / "nothing"),
        model_id="Wan2.2-TI2V-5B-Diffusers",
        devices=("0",),
        device="cpu",
        log_dir=tmp_path,
        server_args=("--no-such-option",),
        start_timeout=120.0,
    )
    server = SGLangServer(settings)
    with pytest.raises(
        EngineError, match=r"(?s)did not start: the engine process ended with code.*last lines of .*no-such-option"
    ):
        server.start()
    assert server.failure() is not None


def test_sglang_gets_device_numbers_in_the_order_that_nvml_counts(tmp_path: Path) -> None:
    settings = EngineSettings(model_path="m", model_id="i", devices=("5", "7"), log_dir=tmp_path, tp_size=2)
    environment = server_environment(
        settings, "token", {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    )
    assert environment["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    with pytest.raises(InputError, match=r"as numbers, not as GPU-aa"):  # it would fail with int("GPU-aa")
        EngineSettings(model_path="m", model_id="i", devices=("GPU-aa",), log_dir=tmp_path)


def test_a_deterministic_server_is_told_so_and_takes_the_attention_that_torch_controls(tmp_path: Path) -> None:
    plain = EngineSettings(model_path="m", model_id="i", devices=("0",), log_dir=tmp_path)
    strict = replace(plain, deterministic=True)
    assert DETERMINISTIC_VARIABLE not in server_environment(plain, "token", {})
    environment = server_environment(strict, "token", {})
    assert environment[DETERMINISTIC_VARIABLE] == "1"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # of torch's two legal values the fast one
    ports = {"port": 1, "scheduler_port": 2, "master_port": 3}
    command = server_command(strict, **ports)
    assert command[command.index("--attention-backend") + 1] == "torch_sdpa"
    assert "--attention-backend" not in server_command(plain, **ports)


def test_devices_must_fit_the_parallel_sizes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"3 devices \(4, 5, 6\) for tp_size 2 x sp_size 2; give it exactly 4"):
        EngineSettings(model_path="m", model_id="i", devices=("4", "5", "6"), log_dir=tmp_path, tp_size=2, sp_size=2)


def test_a_worker_that_ends_while_the_server_loads_is_noticed(tmp_path: Path) -> None:
    """As the server leaves it: a child that has ended and that nobody asks for."""
    worker = "import ctypes; ctypes.CDLL(None).prctl(15, b'sgl_diffusion::scheduler', 0, 0, 0)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {worker!r}]); time.sleep(60)"
    server = SGLangServer(EngineSettings(model_path="m", model_id="i", devices=("0",), log_dir=tmp_path))
    server._process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while (dead := server._dead_worker()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert dead.startswith("sgl_diffusion")
    finally:
        server.close()
