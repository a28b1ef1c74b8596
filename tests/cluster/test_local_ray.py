"""Two Rays of one machine's user do not meet: what each has of its own, what it hands out, and what it leaves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from miles_wan.cluster import lifeline
from miles_wan.cluster.job import Job
from miles_wan.cluster.local_ray import LocalRay, _TransientStartError, check_environment
from miles_wan.errors import InputError, MilesWanError

DRIVER = """
import json, os, sys, ray
ray.init(log_to_driver=False)
gpus, slots = json.loads(sys.argv[1])

@ray.remote(num_cpus=0, num_gpus=gpus, resources=slots)
class Worker:
    def devices(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

workers = [Worker.remote() for _ in range(2)]
devices = sorted(ray.get([worker.devices.remote() for worker in workers]))
names = ("GPU", "worker_slot")
left = {name: ray.available_resources().get(name, 0) for name in names}
facts = {"devices": devices, "nodes": len(ray.nodes()), "left": left, "cwd": os.getcwd(), "python": sys.executable}
print("FACTS" + json.dumps(facts))
"""

pytestmark = pytest.mark.e2e


def run_job(ray: LocalRay, *command: str) -> tuple[int | None, str]:
    copy = io.BytesIO()
    code = Job(ray, command, copy=copy).run(stopping=lambda: False, forced=lambda: False)
    return code, copy.getvalue().decode()


def facts(ray: LocalRay, gpus: int, slots: dict[str, int]) -> dict[str, object]:
    code, output = run_job(ray, sys.executable, "-c", DRIVER, json.dumps([gpus, slots]))
    assert code == 0, output
    found: dict[str, object] = json.loads(re.findall(r"FACTS({.*)", output)[0])
    return found


def listening_ports(ray: LocalRay) -> set[int]:
    ports = set()
    for process in lifeline.members(ray.run_id):
        # Ray starts and ends short-lived helpers all the time: one may end between the list and the question.
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = process.net_connections(kind="inet")
            ports |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return ports


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalRay, LocalRay]]:
    """A Ray with two worker slots and one with two GPUs (which it only counts), started at the same time."""
    folder = tmp_path_factory.mktemp("rays")
    rays = (
        LocalRay(2, "cpu", log_path=folder / "cpu.log"),
        LocalRay(2, "cuda", log_path=folder / "cuda.log", cuda_visible_devices="3,5"),
    )
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(LocalRay.__enter__, rays))
        yield rays
    finally:
        for ray in rays:
            ray.stop()


def test_worker_slots_stand_for_devices_on_a_cpu_and_gpus_are_hidden(pair: tuple[LocalRay, LocalRay]) -> None:
    found = facts(pair[0], 0, {"worker_slot": 1})
    assert found["devices"] == ["", ""]
    assert found["left"] == {"GPU": 0, "worker_slot": 0}
    assert found["nodes"] == 1


def test_actors_get_their_devices_from_the_list_given_before_the_start(pair: tuple[LocalRay, LocalRay]) -> None:
    found = facts(pair[1], 1, {})
    assert found["devices"] == ["3", "5"]
    assert found["left"] == {"GPU": 0, "worker_slot": 0}
    assert found["nodes"] == 1


def test_two_rays_share_no_folder_port_or_process(pair: tuple[LocalRay, LocalRay]) -> None:
    first, second = pair
    assert first.folder != second.folder
    ports = [listening_ports(ray) for ray in pair]
    assert all(
        len(each) >= 8 for each in ports
    )  # GCS, raylet, object manager, agents, dashboard, ...; all up after a job
    assert not ports[0] & ports[1]
    processes = [{process.pid for process in lifeline.members(ray.run_id)} for ray in pair]
    assert not processes[0] & processes[1]


def test_no_port_is_a_default_of_ray_that_another_cluster_would_want(pair: tuple[LocalRay, LocalRay]) -> None:
    defaults = {6379, 8265, 10001, 44217, 44227, 52365}
    assert not defaults & (listening_ports(pair[0]) | listening_ports(pair[1]))


def test_the_driver_runs_with_this_interpreter_in_this_folder(pair: tuple[LocalRay, LocalRay]) -> None:
    code, output = run_job(pair[0], sys.executable, "-c", "import os, sys; print(os.getcwd(), sys.executable)")
    assert code == 0
    assert f"{os.getcwd()} {sys.executable}" in output


@pytest.mark.parametrize(
    ("ending", "expected"),
    [("sys.exit(3)", 3), ("sys.exit('bad')", 1), ("os.kill(os.getpid(), 9)", 128 + 9)],
)
def test_the_exit_code_is_the_drivers(pair: tuple[LocalRay, LocalRay], ending: str, expected: int) -> None:
    code, output = run_job(
        pair[0], sys.executable, "-c", f"import os, sys; print('last', 'words', flush=True); {ending}"
    )
    assert code == expected
    assert "last words" in output


def test_the_job_api_wants_this_runs_token(pair: tuple[LocalRay, LocalRay]) -> None:
    first, second = pair
    token = (second.folder / "auth_token").read_text()
    assert (second.folder / "auth_token").stat().st_mode & 0o077 == 0
    for headers in ({}, {"Authorization": f"Bearer {token}"}):
        assert httpx.get(f"{first.dashboard_url}/api/jobs/", headers=headers).status_code in (401, 403)


def test_ending_one_leaves_nothing_of_it_and_all_of_the_other(pair: tuple[LocalRay, LocalRay]) -> None:
    first, second = pair
    before = {process.pid for process in lifeline.members(second.run_id) if "ray" in " ".join(process.cmdline())}
    run_id, folder = first.run_id, first.folder
    first.stop()
    assert lifeline.members(run_id) == []
    assert not folder.exists()
    code, output = run_job(second, sys.executable, "-c", "print(6 * 7)")
    assert code == 0
    assert "\n42\n" in output
    infrastructure = {process.pid for process in lifeline.members(second.run_id)}
    assert len(before & infrastructure) > 10


def test_a_ray_that_dies_is_noticed_with_the_reason(pair: tuple[LocalRay, LocalRay]) -> None:
    ray = pair[1]
    [server] = [process for process in lifeline.members(ray.run_id) if process.name() == "gcs_server"]
    server.kill()
    with pytest.raises(MilesWanError, match=r"(?s)Ray ended unexpectedly.*gcs_server"):
        run_job(ray, sys.executable, "-c", "import time; time.sleep(600)")
    ray.stop()
    assert lifeline.members(ray.run_id) == []
    assert not ray.folder.exists()


def test_a_foreign_cluster_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    with pytest.raises(InputError, match=r"RAY_ADDRESS=10\.0\.0\.7:6379.*unset RAY_ADDRESS"):
        LocalRay(1, "cpu", log_path=tmp_path / "ray.log")
    assert check_environment({}) == []


def test_a_start_that_takes_too_long_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    ray = LocalRay(2, "cpu", log_path=tmp_path / "ray.log", start_timeout=1.0)
    with pytest.raises(MilesWanError, match="Ray did not start within 1 s"):
        ray.__enter__()
    assert not ray.folder.exists()
    assert lifeline.members(ray.run_id) == []


@pytest.mark.parametrize(
    "sign", ["RuntimeError: Failed to bind to address 10.0.0.1:34825", "port 6379 already occupied"]
)
def test_a_port_that_another_process_took_first_is_tried_again(tmp_path: Path, sign: str) -> None:
    ray = LocalRay(1, "cpu", log_path=tmp_path / "ray.log")
    ray.log_path.write_text(f"starting\n{sign}\nRemaining processes will be killed.\n")
    assert isinstance(ray._start_error("Ray did not start"), _TransientStartError)
    ray.log_path.write_text("ImportError: no module named ray\n")
    assert not isinstance(ray._start_error("Ray did not start"), _TransientStartError)
