"""Run folders: whole or not there."""

import json
import subprocess
import sys

import pytest

from envace.errors import UserError
from envace.training.checkpoint import RunFolder, newest_checkpoint, open_run


def save(folder):
    folder.mkdir()
    (folder / "weights").write_text("w")


def test_the_newest_are_kept_and_a_partial_one_is_none(tmp_path):
    run = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match="no checkpoint yet"):
        newest_checkpoint(tmp_path / "run")
    for step in (2, 4, 10):
        run.write_checkpoint(step, save, keep=2)
    (run.path / "checkpoints" / "step-000012.partial").mkdir()
    (run.path / "checkpoints" / ".DS_Store").touch()
    assert run.checkpoints() == [4, 10]
    assert newest_checkpoint(run.path) == run.checkpoint(10)


def test_what_came_after_a_checkpoint_is_forgotten_and_a_cut_line_too(tmp_path):
    run = RunFolder(tmp_path / "run")
    for step in (1, 2, 3):
        run.write_rollouts(step, [])
        run.write_metrics({"step": step})
        run.write_evaluation(step, {"step": step})
        run.write_checkpoint(step, save, keep=9)
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "rew')
    run.forget_after(2)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2]
    for folder in ("rollouts", "evaluations", "checkpoints"):
        steps = sorted({path.name.partition(".")[0] for path in (run.path / folder).iterdir()})
        assert steps == ["step-000001", "step-000002"]


def test_a_number_that_is_none_is_null(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.write_metrics({"step": 1, "grad_norm": float("inf"), "deep": {"one": [float("nan"), 2.0]}})
    assert run.metrics.read_text() == '{"step": 1, "grad_norm": null, "deep": {"one": [null, 2.0]}}\n'


def test_a_save_that_fails_leaves_the_last_checkpoint(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.write_checkpoint(1, save, keep=1)

    def refused(folder):
        save(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"step-000002\.partial: cannot be written: No space left on device"):
        run.write_checkpoint(2, refused, keep=1)
    assert [folder.name for folder in (run.path / "checkpoints").iterdir()] == ["step-000001"]


def test_what_the_system_refused_a_serializer_is_said_in_its_words(tmp_path):
    run = RunFolder(tmp_path / "run")

    def refused(folder):
        folder.mkdir()
        for _ in range(2):
            try:
                raise OSError(28, "No space left on device")
            except OSError:
                raise RuntimeError("[enforce fail at somewhere.cc]")  # noqa: B904

    with pytest.raises(UserError, match=r"partial: cannot be written: No space left on device; free the disk, nothing"):
        run.write_checkpoint(1, refused, keep=1)

    def faulty(folder):
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="a shape is wrong"):
        run.write_checkpoint(1, faulty, keep=1)


def test_an_old_run_is_not_written_over_and_no_run_is_not_resumed(tmp_path):
    with open_run(tmp_path / "run", "a: 0\n", resume=False):
        pass  # ended before its first result
    with open_run(tmp_path / "run", "a: 1\n", resume=False) as run:
        run.write_metrics({"step": 1})
    with (
        pytest.raises(UserError, match="there is a run in it already"),
        open_run(tmp_path / "run", "a: 2\n", resume=False),
    ):
        pass
    assert (tmp_path / "run" / "settings.yaml").read_text() == "a: 1\n"
    with pytest.raises(UserError, match="nothing to resume"), open_run(tmp_path / "other", "", resume=True):
        pass
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"cannot be written: .*; a file is where a folder should be"),
        open_run(tmp_path / "file", "", resume=False),
    ):
        pass


def test_a_run_folder_is_one_process_alone(tmp_path):
    hold = "import sys, time; from pathlib import Path; from envace.training.checkpoint import locked\n"
    hold += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "run")], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        with (
            pytest.raises(UserError, match="another process is at work in it"),
            open_run(tmp_path / "run", "", resume=False),
        ):
            pass
        assert not (tmp_path / "run" / "settings.yaml").exists()
    finally:
        other.kill()
        other.wait()
    with open_run(tmp_path / "run", "", resume=False):  # a lock ends with its process, however that ended
        pass


@pytest.mark.parametrize("line", ["17", "[]", '{"reward": 1}', '{"step": "1"}', "{", "[" * 2000], ids=range(6))
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    run = RunFolder(tmp_path)
    run.metrics.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: damaged: not the record of a step"):
        run.read_metrics()
