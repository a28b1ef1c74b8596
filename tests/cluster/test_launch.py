"""The launcher from outside: its exit codes, what ends it, and what is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from miles_wan.cluster import lifeline
from miles_wan.cluster.launch import main, output_lock
from miles_wan.config import Config
from miles_wan.errors import InputError

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_diffusion_grpo_wan22_ti2v.py"

LAUNCHER = """
import logging, sys
from miles_wan.cluster.launch import launch
from miles_wan.config import Config
logging.basicConfig(level=logging.INFO)
output, *entrypoint = sys.argv[1:]
tree = {"model": {"path": "-"}, "data": {"train": "-"}, "cluster": {"device": "cpu", "num_gpus": 2}, "output_dir": output}
sys.exit(launch(Config.model_validate(tree), entrypoint=entrypoint))
"""

# A driver with an actor that owns a server in a session of its own, as an engine does; torch's shared memory included.
DRIVER = """
import os, signal, subprocess, sys, time
import ray
ray.init()

@ray.remote(num_cpus=0, resources={"worker_slot": 2})
class Engine:
    def start(self):
        code = (
            "import torch, time; torch.multiprocessing.set_sharing_strategy('file_system');"
            "t = torch.zeros(1000).share_memory_(); print('up', flush=True); time.sleep(600)"
        )
        server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        server.stdout.readline()
        return server.pid

engine = Engine.remote()
server = ray.get(engine.start.remote())
if sys.argv[2:] == ["deaf"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write(f"{os.environ['MILES_WAN_RUN_ID']} {os.getpid()} {server}")
time.sleep(600)
"""

FOREVER = ("-c", "import time; time.sleep(600)")


def wait_for(condition: Callable[[], object], seconds: float = 240.0) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "timed out"
        time.sleep(0.1)
    return time.monotonic() - started


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class Run:
    """A launcher in a process of its own, with what is known of its driver."""

    def __init__(self, output: Path, *command: str, name: str = "run") -> None:
        self.output = output
        self.facts = output.parent / f"{name}.facts"
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(output), sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @classmethod
    def with_engine(cls, output: Path, *flags: str) -> Run:
        """Returns when the driver's engine is up."""
        run = cls(output, "-c", DRIVER, str(output.parent / "run.facts"), *flags)
        wait_for(lambda: run.facts.exists() and run.facts.read_text().count(" ") == 2)
        return run

    @property
    def run_id(self) -> str:
        return self.facts.read_text().split()[0]

    @property
    def driver(self) -> int:
        return int(self.facts.read_text().split()[1])

    @property
    def server(self) -> int:
        return int(self.facts.read_text().split()[2])

    def lines_with_times(self) -> dict[str, float]:
        assert self.process.stdout is not None
        return {line.decode().strip(): time.monotonic() for line in self.process.stdout}

    def assert_nothing_is_left(self) -> None:
        assert lifeline.members(self.run_id) == []
        assert not is_running(self.server)
        assert not (Path(tempfile.gettempdir()) / self.run_id).exists()
        assert not list(Path("/dev/shm").glob(f"torch_{self.server}_*"))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
        if run.facts.exists():
            wait_for(lambda run_id=run.run_id: not lifeline.members(run_id))  # type: ignore[misc]


@pytest.mark.e2e
def test_ctrl_c_stops_the_job_and_everything_it_started(tmp_path: Path, runs: list[Run]) -> None:
    run = Run.with_engine(tmp_path / "out")
    runs.append(run)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    assert run.process.wait(120) == 128 + signal.SIGINT
    run.assert_nothing_is_left()


@pytest.mark.e2e
def test_sigterm_stops_too_and_a_second_signal_does_not_wait_for_a_deaf_driver(tmp_path: Path, runs: list[Run]) -> None:
    run = Run.with_engine(tmp_path / "out", "deaf")
    runs.append(run)
    run.process.terminate()
    time.sleep(2)
    assert run.process.poll() is None, "the driver is given time"
    assert is_running(run.driver)
    run.process.terminate()
    assert run.process.wait(60) == 128 + signal.SIGTERM
    run.assert_nothing_is_left()


@pytest.mark.e2e
def test_after_sigkill_of_the_launcher_all_ends_within_a_minute_and_the_next_run_waits_for_it(
    tmp_path: Path, runs: list[Run]
) -> None:
    first = Run.with_engine(tmp_path / "out", "deaf")
    runs.append(first)
    folder = Path(tempfile.gettempdir()) / first.run_id
    assert folder.exists()
    first.process.kill()  # and not waited for: its parent may take its time
    started = time.monotonic()
    with output_lock(first.output):
        assert not folder.exists(), "the lock was free before the killed run had ended"
    assert time.monotonic() - started < 60
    first.assert_nothing_is_left()

    code = "import sys, time; print('one', 1, flush=True); time.sleep(3); print('two', 2); sys.exit(3)"
    second = Run(first.output, "-c", code, name="second")
    seen = second.lines_with_times()
    assert second.process.wait(120) == 3, "the driver's exit code"
    assert seen["two 2"] - seen["one 1"] > 1, "the log is shown while the job runs, not at its end"
    assert "two 2" in (second.output / "logs" / "driver.log").read_text()
    assert (second.output / "logs" / "ray" / "raylet.out").exists()


@pytest.mark.e2e
def test_after_sigkill_of_the_driver_the_launcher_ends_the_rest_and_says_so(tmp_path: Path, runs: list[Run]) -> None:
    run = Run.with_engine(tmp_path / "out")
    runs.append(run)
    os.kill(run.driver, signal.SIGKILL)
    output, _ = run.process.communicate(timeout=120)
    assert run.process.returncode == 128 + signal.SIGKILL
    assert "ended by signal 9; --resume latest" in output.decode()
    run.assert_nothing_is_left()


def test_a_second_run_in_the_same_folder_is_refused_by_name(tmp_path: Path) -> None:
    with output_lock(tmp_path):
        run = Run(tmp_path, *FOREVER)
        output, _ = run.process.communicate(timeout=120)
        assert run.process.returncode != 0
        assert f"{tmp_path} is in use by the run with process id {os.getpid()}" in output.decode()
    with output_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file/out: cannot be written"), output_lock(tmp_path / "file" / "out"):
        pass


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def test_help_explains_flags_recipes_and_dotted_overrides() -> None:
    done = script("--help")
    assert done.returncode == 0
    for text in ("--data-jsonl", "--cuda-visible-devices", "--eval-interval", "tiny_ti2v", "--algorithm.clip-range"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu"), "tpu"),
        (("--num-gpus", "two"), "two"),
        (("--resume", "best"), "best"),
        (("--model",), "--model"),
        (("--recipe", "no-such-recipe"), "no-such-recipe: no such file and no such recipe; recipes are"),
    ],
)
def test_a_wrong_flag_is_explained_and_exits_with_2(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capfd.readouterr().err


def test_all_faults_of_flags_recipe_and_overrides_are_told_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({"training": {"dp_sise": 2}}))
    arguments = ["--recipe", str(recipe), "--num-gpus", "0", "--algorithm.clip-range", "-1", "--data.shufle=no"]
    assert main(arguments) == 2
    told = capfd.readouterr().err
    for fault in (
        "training.dp_sise",
        "cluster.num_gpus",
        "algorithm.clip_range",
        "data.shufle",
        "--model",
        "--data-jsonl",
    ):
        assert fault in told


def test_every_flag_reaches_its_place_in_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("rollout: {prompts_per_rollout: 4}\n")
    seen: list[Config] = []
    monkeypatch.setattr("miles_wan.cluster.launch.check", seen.append)
    monkeypatch.setattr("miles_wan.cluster.launch.launch", lambda config: 0)
    flags = {
        "--model": "m", "--data-jsonl": "d.jsonl", "--num-gpus": "2", "--cuda-visible-devices": "4,7", "--device": "cuda",
        "--eval-data-jsonl": "e.jsonl", "--eval-interval": "5", "--reward-model": "r", "--init-adapter": "a",
        "--output-dir": "o", "--resume": "latest", "--recipe": str(recipe), "--training.optimizer.lr": "2e-4",
    }  # fmt: skip
    assert main([token for pair in flags.items() for token in pair]) == 0
    [config] = seen
    assert (config.model.path, config.model.init_adapter) == ("m", "a")
    assert (config.data.train, config.data.eval, config.eval.interval) == ("d.jsonl", "e.jsonl", 5)
    cluster = config.cluster
    assert (cluster.num_gpus, cluster.cuda_visible_devices, cluster.device) == (2, "4,7", "cuda")
    assert (config.output_dir, config.resume) == ("o", "latest")
    assert {(function.model, function.processor) for function in config.reward.functions} == {("r", "r")}
    assert config.training.optimizer.lr == 2e-4
    assert config.rollout.prompts_per_rollout == 4


def test_a_foreign_cluster_is_refused_with_the_other_faults_before_anything_starts(tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = script(
        *(
            "--recipe",
            "tiny_ti2v",
            "--device",
            "cpu",
            "--model",
            str(tmp_path / "no-model"),
            "--output-dir",
            str(output),
        ),
        *("--data-jsonl", str(tmp_path / "no.jsonl"), "--eval-data-jsonl", str(tmp_path / "none.jsonl")),
        RAY_ADDRESS="10.0.0.7:6379",
    )
    assert done.returncode == 2
    for fault in ("RAY_ADDRESS=10.0.0.7:6379", "no-model", "no.jsonl"):
        assert fault in done.stderr
    assert not (output / "logs").exists()
