import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest
import yaml

from envace.cli import main
from envace.config import TrainSettings, dump_settings, load_settings
from envace.errors import UserError
from envace.types import Task
from envace.worlds.tasks import build_tasks
from tests.chatml import save_policy


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def envace(monkeypatch, capsys):
    """The command line within this process: importing torch anew for each message would take minutes."""

    def run(*arguments: object, cwd: Path | None = None) -> Done:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["envace", *map(str, arguments)])
            if cwd:
                patch.chdir(cwd)
            with pytest.raises(SystemExit) as ended:
                main()
        said = capsys.readouterr()
        return Done(ended.value.code or 0, said.out, said.err)

    return run


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
        (GOOD, ["engine.lora={r: 4, alhpa: 3}"], "did you mean 'alpha'?"),
        (
            GOOD,
            ["evaluation.samplse=3"],
            "override 'evaluation.samplse=3': unknown key 'evaluation.samplse'; did you mean 'samples'?",
        ),
        (GOOD + "stepz: 3\n", ["steps=3"], "settings.yaml: unknown key 'stepz'; did you mean 'steps'?"),
        (GOOD, ["steps=many"], "override 'steps=many': steps: "),
        (GOOD, ["=3"], "override '=3': write it as key=value"),
        (GOOD, ["model.name=3"], "'model' is a value, not a group of keys"),
        (GOOD, ["steps=["], "the value is not YAML"),
        (
            "model: m\nseed: 2024-13-45\n",
            [],
            "settings.yaml, line 2: not YAML: '2024-13-45' is no timestamp; put quotes",
        ),
        ("seed: !!float abc\n", [], "line 1: not YAML: 'abc' is no float"),
        ("seed: !!int x\n", [], "line 1: not YAML: 'x' is no int"),
        ("seed: !!bool x\n", [], "line 1: not YAML: 'x' is no bool"),
        ("seed: !!timestamp x\n", [], "line 1: not YAML: 'x' is no timestamp"),
        ("seed: " + "1" * 5000, [], "line 1: not YAML: '111111111111...1111111111111' is no int"),
        ("model: m\nseed: " + "[" * 5000, [], "line 2: not YAML: nested too deeply"),
        ("model: m\nseed: \0\n", [], "line 2: not YAML: a character U+0000"),
        ("model: m\nengine:\n  lr: 1\n  lr: 2\n", [], "line 4: not YAML: the key 'lr' was given on line 3 too"),
        ("model: m\nnull: 3\n", [], "line 2: not YAML: keys are names, not null"),
        ("?\n: 3\n", [], "line 1: not YAML: keys are names, not nothing"),
        ("engine: {1: 3}\n", [], "line 1: not YAML: keys are names, not 1"),
        ("? [a]\n: 3\n", [], "line 1: not YAML: keys are names, not a list or a group of keys"),
        (GOOD, ["seed=2024-13-45"], "override 'seed=2024-13-45': the value is not YAML: '2024-13-45' is no timestamp"),
        (GOOD, ["seed=!!float abc"], "override 'seed=!!float abc': the value is not YAML: 'abc' is no float"),
        (GOOD, ["seed=" + "[" * 5000], "the value is not YAML: nested too deeply"),
        (GOOD, ["engine={lr: 1, lr: 2}"], "the key 'lr' was given on line 1 too"),
        (GOOD, ["engine={1: 3}"], "the value is not YAML: keys are names, not 1"),
        (GOOD, ["refill_rounds=1"], "set algorithm.drop_no_variance too"),
        (GOOD, ["trackers=[excel]"], "trackers.0: "),
        (GOOD, ["steps"], "override 'steps': write it as key=value"),
        (GOOD, ["responder=oracle"], "responder: "),
        (
            GOOD,
            ["tasks.worlds=[moon]"],
            "override 'tasks.worlds=[moon]': tasks.worlds: no built-in world 'moon'; there are orders, bank, calendar, ",
        ),
        (GOOD, ["tasks.worlds=[bank, bank]"], "tasks.worlds: world 'bank' is named twice"),
        (GOOD, ["evaluation.worlds=[moon]"], "evaluation.worlds: no built-in world 'moon'; there are orders, "),
        (GOOD, ["evaluation.worlds=[bank, desk, bank]"], "evaluation.worlds: world 'bank' is named twice"),
        (GOOD, ["tasks.worlds=[hotel]"], "held out"),
        (GOOD, ["tasks.file=missing.jsonl"], "missing.jsonl: no such file of tasks"),
    ],
)
def test_bad_settings_are_one_message_and_exit_code_2(envace, tmp_path, text, overrides, message):
    (tmp_path / "settings.yaml").write_text(text)
    done = envace("train", "settings.yaml", *overrides, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_bad_line_of_a_task_file_is_named(envace, tmp_path):
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
    task = json.loads(lines[0])
    task["tools"][1]["parameters"]["properties"] = {"x": {"type": "int"}}
    (tmp_path / "tasks.jsonl").write_text("\n".join([*lines[1:6], lines[7], json.dumps(task)]))
    stderr = envace("tasks", "validate", tmp_path / "tasks.jsonl").stderr
    assert "tasks.jsonl, line 7: tools.1.parameters: not a JSON Schema: properties/x/type:" in stderr
    (tmp_path / "tasks.jsonl").write_text("\n".join([lines[0], lines[0]]))
    assert (
        "line 2: id: 'orders-train-0-0' was used on line 1"
        in envace("tasks", "validate", tmp_path / "tasks.jsonl").stderr
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: (model / "chat_template.jinja").unlink(), "has no chat template"),
        (
            lambda model: (model / "chat_template.jinja").write_text(
                "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            ),
            "its chat template ignores tools, calls or their responses",
        ),
        (lambda model: os.truncate(model / "model.safetensors", 100), "transformers cannot load it"),
        (lambda model: (model / "config.json").write_text("{"), "transformers cannot load it"),
        (
            lambda model: [(model / f"tokenizer{end}.json").unlink() for end in ("", "_config")],
            "the folder has no tokenizer",
        ),
        (lambda model: (model / "config.json").unlink(), "the folder has no config.json"),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_message(envace, tmp_path, spoil, message):
    save_policy(tmp_path / "model")
    spoil(tmp_path / "model")
    (tmp_path / "settings.yaml").write_text(GOOD.replace("nowhere", str(tmp_path / "model")))
    done = envace("train", tmp_path / "settings.yaml", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 4


def test_training_on_a_file_with_a_bad_line_names_it(envace, tmp_path):
    save_policy(tmp_path / "model")
    lines = [task.model_dump_json() for task in build_tasks("orders", 9, 0, "train")]
    (tmp_path / "tasks.jsonl").write_text("\n".join([*lines[:6], '{"id": "x"}', *lines[7:]]))
    (tmp_path / "settings.yaml").write_text(f"model: {tmp_path}/model\ntasks: {{file: {tmp_path}/tasks.jsonl}}\n")
    done = envace("train", tmp_path / "settings.yaml", "--out", tmp_path / "run")
    assert (done.returncode, "tasks.jsonl, line 7: messages" in done.stderr) == (2, True)


def test_built_tasks_validate_and_fit_the_exported_schema(envace, tmp_path):
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


def test_worlds_can_be_tried_by_hand(envace):
    assert "hotel (held out" in envace("worlds", "list").stdout
    done = envace("worlds", "try", "orders", "--call", 'find_customer {"name": "Nobody"}')
    assert json.loads(done.stdout) == {"error": {"code": "NOT_FOUND", "message": "no customer Nobody"}}
    bad = envace("worlds", "try", "orders", "--call", "find_customer {name}")
    assert (bad.returncode, "arguments are not JSON" in bad.stderr) == (2, True)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ('find_customer {"name": NaN}', "NaN is not JSON"),
        ('find_customer {"name": -Infinity}', "-Infinity is not JSON"),
        ('find_customer {"name": 1e400}', "a number out of range"),
        ('find_customer {"name": ' + "[" * 100_000, "nested more than 100 deep"),
        ('find_customer {"name": ' + "[" * 200 + "]" * 200 + "}", "nested more than 100 deep"),
        ("find_customer [1]", "the arguments must be a JSON object"),
    ],
)
def test_arguments_that_no_service_could_be_sent_are_one_message(envace, call, reason):
    done = envace("worlds", "try", "orders", "--call", call)
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, "")
    assert reason in done.stderr


def test_a_world_answers_odd_calls_as_a_service_does(envace):
    calls = (
        r'find_customer {"name": "\ud800"}',
        'find_customer {"name": "\udcff"}',  # what Python makes of a byte that is no UTF-8
        "find\udcff {}",
        "",
        "get_order\t{}",
        'get_order {"order_id": 1' + "0" * 30 + "}",
    )
    done = envace("worlds", "try", "orders", *(part for call in calls for part in ("--call", call)))
    first, second, third, fourth, fifth, sixth = (json.loads(line)["error"] for line in done.stdout.splitlines())
    assert first == second == {"code": "NOT_FOUND", "message": "no customer \ufffd"}
    assert (third["code"], fourth["code"]) == ("TOOL_NOT_AVAILABLE", "TOOL_NOT_AVAILABLE")
    assert fifth == {"code": "INVALID_PARAMETERS", "message": "'order_id' is a required property"}
    assert sixth["code"] == "INVALID_PARAMETERS"
    huge = envace("worlds", "try", "bank", "--call", 'deposit {"account_id": "A1", "amount": 1' + "0" * 30 + "}")
    assert json.loads(huge.stdout)["error"]["code"] == "INVALID_PARAMETERS"
    moon = envace("worlds", "try", "moon", "--call", "find_customer {}")
    assert (
        moon.returncode,
        moon.stderr.count("\n"),
        "no built-in world 'moon'; there are orders, " in moon.stderr,
    ) == (
        2,
        1,
        True,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_message(envace):
    done = envace("tasks", "build", "/dev/full", "--count", 1)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/version").exists(), reason="needs a folder nobody can write to"
)
def test_a_folder_that_cannot_be_written_is_one_message(envace):
    done = envace("tasks", "build", "/proc/nowhere/tasks.jsonl", "--count", 1)
    assert done.returncode == 2
    assert "/proc/nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    for command in ("train", "study"):
        done = envace(command, "quickstart", "--out", "/proc/nowhere/run")
        assert (done.returncode, "/proc/nowhere" in done.stderr) == (2, True)
        assert "Traceback" not in done.stderr


def test_help_is_quick_to_read_and_names_every_command(envace):
    text = envace("--help").stdout
    assert all(name in text for name in ("train", "eval", "sft", "tasks", "worlds"))


def test_resuming_what_is_no_run(envace, tmp_path):
    done = envace("train", "--resume", tmp_path)
    assert (done.returncode, "nothing to resume" in done.stderr) == (2, True)
    both = envace("train", "settings.yaml", "--resume", tmp_path)
    assert (both.returncode, "give --resume RUN alone" in both.stderr) == (2, True)


def test_shipped_settings_are_found_by_name_and_read(envace, tmp_path):
    settings = load_settings(TrainSettings, Path("quickstart"), ["steps=7"])
    assert (settings.model, settings.steps, settings.responder) == ("tiny", 7, "rehearsal")
    with pytest.raises(UserError, match=r"quickstrat: no such settings file; did you mean 'quickstart'\?"):
        load_settings(TrainSettings, Path("quickstrat"))
    done = envace("train", "moon", cwd=tmp_path)
    assert (done.returncode, "moon: no such settings file; shipped ones: quickstart" in done.stderr) == (2, True)


def test_settings_written_out_are_the_settings_read_back(tmp_path):
    settings = load_settings(TrainSettings, Path("quickstart"), ["engine.lora={r: 4}", "algorithm.freeze=[rehearse]"])
    (tmp_path / "settings.yaml").write_text(dump_settings(settings))
    assert load_settings(TrainSettings, tmp_path / "settings.yaml") == settings
    assert yaml.safe_load(dump_settings(settings))["evaluation"]["probes"] == 4  # defaults are written out


def test_paths_that_exist_are_kept_absolute_so_a_run_resumes_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "chat.jinja").write_text("")
    (tmp_path / "settings.yaml").write_text(
        "model: models/tiny\nsimulator_model: tiny\ntasks: {file: tasks.jsonl}\n"
        "rehearse: {prompt: ./nowhere}\nchat: {template: ./chat.jinja}\n"
    )
    settings = load_settings(TrainSettings, Path("settings.yaml"))
    assert (settings.model, settings.tasks.file) == (str(tmp_path / "models" / "tiny"), tmp_path / "tasks.jsonl")
    assert (settings.simulator_model, settings.rehearse.prompt) == ("tiny", "./nowhere")
    assert settings.chat.template == str(tmp_path / "chat.jinja")


def test_overrides_are_yaml_and_make_the_groups_they_need(tmp_path):
    (tmp_path / "settings.yaml").write_text("model: m\ntasks: {worlds: [orders]}\nengine:\n")
    settings = load_settings(
        TrainSettings,
        tmp_path / "settings.yaml",
        ["engine.lr=1e-4", "tasks.worlds=[bank, desk]", "rehearse.references=no"],
    )
    assert settings.engine.lr == 0.0001
    assert settings.tasks.worlds == ("bank", "desk")
    assert settings.rehearse.references is False


@pytest.mark.parametrize(
    "field",
    [
        "engine.lr",
        "engine.weight_decay",
        "engine.max_grad_norm",
        "engine.betas.0",
        "algorithm.clip_high",
        "algorithm.act_weight",
        "algorithm.rehearse_kl",
        "act_sampling.temperature",
        "rehearse_sampling.temperature",
        "evaluation.temperature",
        "limits.seconds",
    ],
)
@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_a_number_in_settings_is_finite(tmp_path, field, value):
    (tmp_path / "settings.yaml").write_text(GOOD)
    override = f"engine.betas=[{value}, 0.9]" if field == "engine.betas.0" else f"{field}={value}"
    with pytest.raises(UserError, match=f"{field}: Input should be a finite number"):
        load_settings(TrainSettings, tmp_path / "settings.yaml", [override])


def test_temperatures_of_an_evaluation_are_finite(envace, tmp_path):
    for option in ("--temperature", "--rehearse-temperature"):
        done = envace("eval", tmp_path, option, "inf")
        assert (done.returncode, "temperature: Input should be a finite number" in done.stderr) == (2, True)


def test_groups_can_be_merged_and_an_override_leaves_their_aliases_alone(tmp_path):
    (tmp_path / "settings.yaml").write_text(
        "model: m\nchat: {}\ntasks: {worlds: [orders]}\n"
        "act_sampling: &act\n  <<: &all {top_k: 5, max_tokens: 64}\n  max_tokens: 32\nrehearse_sampling: *act\n"
        "limits: {}\n"
    )
    settings = load_settings(TrainSettings, tmp_path / "settings.yaml", ["act_sampling.top_k=7"])
    assert (settings.act_sampling.top_k, settings.act_sampling.max_tokens) == (7, 32)
    assert (settings.rehearse_sampling.top_k, settings.rehearse_sampling.max_tokens) == (5, 32)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_no_part_of_the_settings(tmp_path, encoding):
    (tmp_path / "settings.yaml").write_text("model: é\ntasks: {worlds: [orders]}\n", encoding=encoding)
    assert load_settings(TrainSettings, tmp_path / "settings.yaml").model == "é"


def test_a_path_that_is_no_file_of_settings_is_named_for_what_it_is(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="a folder; name a settings file"):
        load_settings(TrainSettings, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UserError, match=f"{path}: a pipe or a device"):
            load_settings(TrainSettings, path)
    with pytest.raises(UserError, match="cannot be read: File name too long"):
        load_settings(TrainSettings, tmp_path / ("x" * 300))
    (tmp_path / "latin.yaml").write_bytes("model: m\nseed: é\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.yaml, line 2: not YAML: neither UTF-8 nor UTF-16 text"):
        load_settings(TrainSettings, tmp_path / "latin.yaml")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"latin\.yaml: cannot be read: Permission denied"):
        load_settings(TrainSettings, tmp_path / "latin.yaml")


def test_an_older_task_file_outlives_a_fault(envace, tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("precious\n")
    assert envace("tasks", "build", file, "--worlds", "moon").returncode == 2
    assert envace("tasks", "build", file, "--count", 1, "--worlds", "orders,moon").returncode == 2
    assert file.read_text() == "precious\n"
    assert [one.name for one in tmp_path.iterdir()] == ["tasks.jsonl"]


def test_long_work_is_told_of(envace, monkeypatch, tmp_path):
    monkeypatch.setattr("envace.cli.tasks.TOLD_EVERY", 0)
    done = envace("tasks", "build", tmp_path / "tasks.jsonl", "--count", 2, "--worlds", "orders,desk")
    assert done.stderr.splitlines() == [f"{number} of 4 tasks" for number in (1, 2, 3, 4)]


def test_a_failed_check_of_values_is_one_message(envace, monkeypatch, tmp_path):
    monkeypatch.setattr("envace.data.tasks.read_tasks", lambda file, scorable: [Task(id="", messages=())])
    done = envace("tasks", "validate", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "envace: Task.id: " in done.stderr


def test_ctrl_c_leaves_with_130(envace, monkeypatch, tmp_path):
    def interrupted(file, scorable):
        raise KeyboardInterrupt

    monkeypatch.setattr("envace.data.tasks.read_tasks", interrupted)
    assert envace("tasks", "validate", tmp_path).returncode == 130


def test_worlds_can_be_tried_on_standard_input(envace, monkeypatch):
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b'find_customer {"name": "Nobody"}\n\xff {}\nbad {\n\nnever {}\n'))
    )
    lines = envace("worlds", "try", "orders").stdout.splitlines()
    assert '{"error": {"code": "NOT_FOUND", "message": "no customer Nobody"}}' in lines
    assert "no tool '\ufffd'" in lines[-2]
    assert "arguments are not JSON" in lines[-1]


def test_help_imports_no_torch():
    code = "import sys; import envace.cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_policy_and_a_run_are_evaluated(envace, tmp_path):
    save_policy(tmp_path / "model")
    asked = ("--worlds", "orders,hotel", "--tasks", 2, "--probes", 2, "--prompt", "brief")
    done = envace("eval", tmp_path / "model", *asked, "--max-tokens", 8, "--json")
    result = json.loads(done.stdout)
    assert (result["sampled"]["tasks"], result["sampled"]["success"], result["rehearsed"]["calls"]) == (4, 0.0, 8)
    # The model says nothing that is a call, so the only calls in worlds are those that the probes' answers took.
    assert result["external_calls"] == 8
    assert result["rehearsed"]["by"]["held_out"]["count"] == 4
    missing = envace("eval", tmp_path / "nothing", *asked)
    assert (missing.returncode, "no such folder" in missing.stderr) == (2, True)
    for worlds, message in (
        ("moon", "--worlds: no built-in world 'moon'; there are orders, bank, "),
        ("orders, moon", "--worlds: no built-in world 'moon'"),
        ("orders,", "--worlds: no built-in world ''"),
        ("orders, bank ,orders", "--worlds: world 'orders' is named twice"),
    ):
        refused = envace("eval", tmp_path / "model", "--worlds", worlds)
        assert (refused.returncode, message in refused.stderr) == (2, True)

    (tmp_path / "settings.yaml").write_text(
        f"model: {tmp_path / 'model'}\ntasks: {{worlds: [orders], count: 2}}\nrehearse: {{prompt: brief}}\n"
        "act_sampling: {max_tokens: 8}\nrehearse_sampling: {max_tokens: 8}\nsteps: 1\ntasks_per_step: 1\ngroup_size: 2\n"
        "engine: {device: cpu}\nevaluation: {worlds: [orders], count: 1, probes: 1}\n"
    )
    trained = envace("train", tmp_path / "settings.yaml", "--out", tmp_path / "run")
    assert "step 1/1: reward" in trained.stdout, trained.stderr
    assert "evaluation after step 1: real success 0.000 sampled" in trained.stdout
    told = envace("eval", tmp_path / "run", "--worlds", "orders", "--tasks", 1, "--probes", 1)
    assert (told.returncode, "external calls: 1" in told.stdout) == (0, True), told.stderr
    again = envace("train", tmp_path / "settings.yaml", "--out", tmp_path / "run")
    assert (again.returncode, "there is a run in it already" in again.stderr) == (2, True)
