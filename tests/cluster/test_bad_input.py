"""Bad input ends the launcher with exit code 2 and clear messages before Ray or an engine is started."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from miles_wan import cli
from miles_wan.cluster import launch as launcher
from miles_wan.cluster.checkpoints import CheckpointStore
from miles_wan.cluster.resume import remembered
from miles_wan.data import load_records
from miles_wan.tiny import TinyPaths


def faultless(tiny_paths: TinyPaths, tmp_path: Path) -> dict[str, str]:
    return {
        "--recipe": "tiny_ti2v",
        "--model": str(tiny_paths.model),
        "--reward-model": str(tiny_paths.reward),
        "--data-jsonl": str(tiny_paths.train_jsonl),
        "--eval-data-jsonl": str(tiny_paths.eval_jsonl),
        "--output-dir": str(tmp_path / "run"),
    }


@pytest.fixture
def refused(tiny_paths: TinyPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the launcher with changed flags; return what it printed. It must refuse with 2 and start nothing."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started in spite of bad input")

    monkeypatch.setattr(launcher, "LocalRay", started)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    flags = faultless(tiny_paths, tmp_path)

    def run(changes: dict[str, str | None]) -> str:
        merged = {name: value for name, value in {**flags, **changes}.items() if value is not None}
        code = launcher.main([token for item in merged.items() for token in item])
        printed = capsys.readouterr().err
        assert code == 2, printed
        assert not (tmp_path / "run" / "logs").exists()
        return printed

    return run


def test_all_faults_of_a_data_file_are_told_together(refused, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\nnot an image")
    lines = [
        '{"input": "a red ball"',
        json.dumps({"input": ""}),
        json.dumps({"input": "a", "metadata": {"image_path": "missing.png"}}),
        json.dumps({"input": "b", "metadata": {"image_path": "bad.png"}}),
        json.dumps({"prompt": "wrong key"}),
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    printed = refused({"--data-jsonl": str(tmp_path / "train.jsonl")})
    for number in range(1, 6):
        assert f"train.jsonl:{number}:" in printed
    assert "missing.png" in printed
    assert "bad.png" in printed


def test_a_missing_data_file_is_named(refused, tmp_path: Path) -> None:
    assert str(tmp_path / "nothing.jsonl") in refused({"--data-jsonl": str(tmp_path / "nothing.jsonl")})


def test_wrong_frame_count_and_size_name_the_nearest_legal_values(refused) -> None:
    printed = refused({"--rollout.num-frames": "6", "--rollout.width": "40"})
    assert "5" in printed
    assert "9" in printed
    assert "32" in printed
    assert "64" in printed


def test_a_folder_without_model_index_is_refused(refused, tmp_path: Path) -> None:
    assert "model_index.json" in refused({"--model": str(tmp_path)})


def test_a_missing_component_is_named(refused, tiny_paths: TinyPaths, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(tiny_paths.model, copy)
    shutil.rmtree(copy / "vae")
    assert str(copy / "vae") in refused({"--model": str(copy)})


def test_an_eval_interval_needs_eval_data(refused) -> None:
    printed = refused({"--eval-interval": "5", "--eval-data-jsonl": None})
    assert "eval.interval" in printed
    assert "--eval-data-jsonl" in printed


def test_more_devices_than_exist_are_refused(refused) -> None:
    printed = refused({"--device": "cuda", "--num-gpus": "64"})
    assert "64" in printed


def test_an_unwritable_output_folder_is_refused(refused, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refused({"--output-dir": str(tmp_path / "file" / "run")})


def test_unknown_fields_are_refused_with_a_suggestion(refused) -> None:
    assert "algorithm.clip_range" in refused({"--algorithm.clip-rnge": "1e-3"})


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers(refused) -> None:
    printed = refused({"--training.micro-batch-size": "7"})
    assert "training.micro_batch_size = 7" in printed
    assert "48" in printed


def test_a_foreign_ray_cluster_is_refused(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "RAY_ADDRESS" in refused({})


def test_faults_of_different_kinds_come_together(refused, tmp_path: Path) -> None:
    changes = {
        "--data-jsonl": str(tmp_path / "nothing.jsonl"),
        "--reward-model": str(tmp_path),
        "--rollout.num-frames": "6",
    }
    printed = refused(changes)
    assert "nothing.jsonl" in printed
    assert f"{tmp_path}:" in printed
    assert "num_frames" in printed


def test_what_no_path_can_be_is_refused_and_a_pipe_is_not_waited_for(refused, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    paths = ["pipe.png", "loop.png", "a\0b.png", "~nosuchuser/a.png"]
    lines = [json.dumps({"input": "a", "metadata": {"image_path": path}}) for path in paths]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    printed = refused({"--data-jsonl": str(tmp_path / "train.jsonl")})
    for number in range(1, 5):
        assert f"train.jsonl:{number}:" in printed


@pytest.mark.parametrize(
    "changes",
    [
        {"--output-dir": "x" * 300},
        {"--model": "x" * 5000},
        {"--recipe": "x" * 300},
        {"--data-jsonl": "~nosuchuser/x"},
        {"--seed": "2020-99-99"},
        {"--seed": str(2**64)},
        {"--training.optimizer.betas": "[2, 3]"},
        {"--model.lora-targets": "[]"},
        {"--reward.functions.²": "1"},
    ],
)
def test_strange_values_are_faults_and_not_tracebacks(refused, changes: dict[str, str]) -> None:
    refused(changes)


def test_a_reward_module_that_exits_is_a_fault(refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(5)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "")
    assert "exits:score" in refused({"--reward.functions": '[{"name": "exits:score"}]', "--reward-model": None})


def test_a_value_is_printed_as_it_was_given(refused) -> None:
    assert "/d/:fire:/x.jsonl" in refused({"--data-jsonl": "/d/:fire:/x.jsonl"})


def test_faults_of_configuration_and_data_are_told_together(refused, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"input": ""}\n')
    printed = refused({"--data-jsonl": str(tmp_path / "train.jsonl"), "--training.micro-batch-size": "7"})
    assert "2 faults in the input" in printed
    assert "training.micro_batch_size = 7 does not divide" in printed
    assert "train.jsonl:1: input is empty" in printed


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--eval-data", "--eval-data-jsonl"),
        ("--data", "--data-jsonl"),
        ("--lr", "--training.optimizer.lr"),
        ("--evalinterval", "--eval-interval"),
        ("--clip-range", "--algorithm.clip-range"),
        ("--lora-rank", "--model.lora-rank"),
    ],
)
def test_a_flag_that_does_not_exist_is_answered_with_the_one_that_may_be_meant(refused, flag: str, meant: str) -> None:
    assert f"{flag}: no such flag; did you mean {meant}?" in refused({flag: "3"})


def test_fields_outside_all_sections_need_no_dot(tiny_paths: TinyPaths, tmp_path: Path) -> None:
    flags = {**faultless(tiny_paths, tmp_path), "--num-rollouts": "3", "--seed": "7"}
    config = launcher.read_flags([token for item in flags.items() for token in item])
    assert (config.num_rollouts, config.seed) == (3, 7)


def test_thousands_of_faults_are_counted_not_printed(refused, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"input": ""}\n' * 3000)
    printed = refused({"--data-jsonl": str(tmp_path / "train.jsonl")})
    assert "3000 faults in the input" in printed
    assert printed.count("input is empty") == 200
    assert "... and 2800 more" in printed


@pytest.mark.parametrize("flag", ["--model", "--data-jsonl", "--output-dir"])
def test_an_empty_path_is_a_fault_of_its_flag(refused, flag: str) -> None:
    assert "string should have at least 1 character" in refused({flag: ""})


def test_doctor_takes_the_flags_of_the_launcher_and_starts_nothing(
    tiny_paths: TinyPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {**faultless(tiny_paths, tmp_path), "--rollout.num-frames": "6"}
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *(token for item in flags.items() for token in item)])
    assert ended.value.code == 2
    assert "rollout.num_frames: 6" in capsys.readouterr().err
    flags["--rollout.num-frames"] = "9"
    cli.main(["doctor", *(token for item in flags.items() for token in item)])
    printed = capsys.readouterr()
    assert "everything is in order" in printed.out + printed.err
    assert list(tmp_path.iterdir()) == []


def test_more_reward_workers_than_a_device_holds(refused) -> None:
    assert "reward.num_workers = 31" in refused({"--reward.num-workers": "31", "--num-gpus": "1"})


def test_a_resumed_run_keeps_its_settings(refused, tiny_paths: TinyPaths, tmp_path: Path) -> None:
    flags = {**faultless(tiny_paths, tmp_path), "--resume": "latest"}
    config = launcher.read_flags([token for item in flags.items() for token in item])
    train, evaluation = (load_records(path).records for path in (tiny_paths.train_jsonl, tiny_paths.eval_jsonl))
    settings = remembered(config, train, evaluation, weights=[tiny_paths.model / "transformer"])
    content = {"run": {"finished": 1}, "clock": {}, "settings": settings}
    CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=1).save(1, content, lambda _: None)
    launcher.check(config)
    assert "--resume: seed is 7, the run was started with 0" in refused({"--resume": "latest", "--seed": "7"})
    state = tmp_path / "run" / "checkpoints" / "rollout_000001" / "state.json"
    state.write_text("{")
    assert "cannot be read" in refused({"--resume": "latest"})
    state.unlink()
    assert "lacks its state.json" in refused({"--resume": "latest"})
