import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from envace.worlds.tasks import build_tasks


def envace(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "envace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


GOOD = "model: nowhere\ntasks: {worlds: [orders], count: 2}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (GOOD, [], "model 'nowhere': no such folder or .gguf file"),
        ("model: [\n", [], "line 2: not YAML"),
        ("- a\n", [], "must be keys with values"),
        (GOOD, ["group_sise=3"], "unknown key 'group_sise'; did you mean 'group_size'?"),
        (GOOD, ["engine.learning_rate=3"], "unknown key 'engine.learning_rate'"),
        (GOOD, ["algorithm.clip_hi=3"], "did you mean 'clip_high'?"),
        (GOOD, ["steps=many"], "steps: "),
        (GOOD, ["steps"], "override 'steps': write it as key=value"),
        (GOOD, ["responder=oracle"], "responder: "),
        (GOOD, ["tasks.worlds=[moon]"], "no built-in world 'moon'"),
        (GOOD, ["tasks.worlds=[hotel]"], "held out"),
        (GOOD, ["tasks.file=missing.jsonl"], "missing.jsonl: no such file of tasks"),
    ],
)
def test_bad_settings_are_one_message_and_exit_code_2(tmp_path, text, overrides, message):
    (tmp_path / "settings.yaml").write_text(text)
    done = envace("train", "settings.yaml", *overrides, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_bad_line_of_a_task_file_is_named(tmp_path):
    lines = [task.model_dump_json() for task in build_tasks("orders", 9, 0, "train")]
    broken = json.loads(lines[6])
    broken["checks"][0][0]["weight"] = -1
    lines[6] = json.dumps(broken)
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    done = envace("tasks", "validate", tmp_path / "tasks.jsonl")
    assert done.returncode == 2
    assert (
        "tasks.jsonl, line 7: checks.0.0.only_calls.weight: Input should be greater than or equal to 0" in done.stderr
    )
    (tmp_path / "tasks.jsonl").write_text("\n".join([*lines[:6], "{", *lines[7:]]))
    assert "tasks.jsonl, line 7: Invalid JSON" in envace("tasks", "validate", tmp_path / "tasks.jsonl").stderr
    (tmp_path / "tasks.jsonl").write_text("\n".join([lines[0], lines[0]]))
    assert (
        "line 2: id: 'orders-train-0-0' was used on line 1"
        in envace("tasks", "validate", tmp_path / "tasks.jsonl").stderr
    )


def test_built_tasks_validate_and_fit_the_exported_schema(tmp_path):
    file = tmp_path / "tasks.jsonl"
    assert envace("tasks", "build", file, "--count", 8, "--worlds", "orders,desk").returncode == 0
    done = envace("tasks", "validate", file)
    assert (done.returncode, "16 tasks, all valid" in done.stdout) == (0, True)
    schema = json.loads(envace("tasks", "schema").stdout)
    for line in file.read_text().splitlines():
        jsonschema.validate(json.loads(line), schema)
    shown = envace("tasks", "show", file, "--id", "desk-train-0-1").stdout
    assert "task desk-train-0-1" in shown
    assert "find_user(name: string)" in shown


def test_worlds_can_be_tried_by_hand():
    assert "hotel (held out" in envace("worlds", "list").stdout
    done = envace("worlds", "try", "orders", "--call", 'find_customer {"name": "Nobody"}')
    assert json.loads(done.stdout) == {"error": {"code": "NOT_FOUND", "message": "no customer Nobody"}}
    bad = envace("worlds", "try", "orders", "--call", "find_customer {name}")
    assert (bad.returncode, "arguments are not JSON" in bad.stderr) == (2, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_message():
    done = envace("tasks", "build", "/dev/full", "--count", 1)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/version").exists(), reason="needs a folder nobody can write to"
)
def test_a_folder_that_cannot_be_written_is_one_message():
    done = envace("tasks", "build", "/proc/nowhere/tasks.jsonl", "--count", 1)
    assert done.returncode == 2
    assert "/proc/nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_quick_to_read_and_names_every_command():
    text = envace("--help").stdout
    assert all(name in text for name in ("train", "eval", "sft", "tasks", "worlds"))


def test_resuming_what_is_no_run(tmp_path):
    done = envace("train", "--resume", tmp_path)
    assert (done.returncode, "nothing to resume" in done.stderr) == (2, True)
