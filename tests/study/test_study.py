"""Reports from hand-made run folders with hand-worked figures; then a small study that is killed and goes on."""

import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from envace.cli import app
from envace.cli.study import _took
from envace.config import TrainSettings, dump_settings, load_settings
from envace.errors import UserError
from envace.study.page import render
from envace.study.report import spread, study_report
from envace.study.runs import plan, seeds_of
from envace.types import Episode, Message
from tests.chatml import save_policy


def evaluation(step: int, success: float, fidelity: float) -> dict:
    def by(value: float) -> dict:
        return {"in_training": {"share": value}, "family:<script>": {"share": value}}

    return {
        "step": step,
        "seconds": 3.0,
        "external_calls": 7,
        "sampled": {"by": by(success)},
        "greedy": {"by": by(success + 0.1)},
        "rehearsed": {"by": by(fidelity)},
        "rehearsed_greedy": {"by": by(fidelity)},
    }


def step(number: int) -> dict:
    return {
        "step": number, "seconds": 2.0, "external_calls": 0, "not_scored": 1, "tokens_sampled": 100, "tokens_trained": 80.0,
        "tokens_computed": 300.0, "reward": 0.5, "reward_act": 0.5, "reward_rehearse": None, "response_validity": 1.0,
        "tokens_per_second": 50.0,
    }  # fmt: skip


@pytest.fixture
def config(tmp_path) -> Path:
    file = tmp_path / "settings.yaml"
    file.write_text(
        yaml.safe_dump(
            {"model": "none", "tasks": {"worlds": ["orders"]}, "steps": 2, "evaluation": {"worlds": ["orders"]}}
        )
    )
    return file


def make_runs(config: Path, out: Path, results: list[tuple[float, float]], *overrides: str) -> None:
    for seed, (before, after) in enumerate(results):
        folder = out / f"seed-{seed}"
        (folder / "evaluations").mkdir(parents=True)
        (folder / "checkpoints" / "step-000002").mkdir(parents=True)
        settings = load_settings(TrainSettings, config, [*overrides, f"seed={seed}"])
        (folder / "settings.yaml").write_text(dump_settings(settings))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step(number)) + "\n" for number in (1, 2)))
        for number, value in ((0, before), (2, after)):
            file = folder / "evaluations" / f"step-{number:06d}.json"
            file.write_text(json.dumps(evaluation(number, value, 0.9)))


def test_the_report_holds_means_and_spread_over_seeds(config, tmp_path):
    make_runs(config, tmp_path / "out", [(0.25, 0.5), (0.35, 0.7)])
    report = study_report(plan(config, [], [], [0, 1], tmp_path / "out"))
    assert report["success_before"] == pytest.approx(0.3)
    assert report["success_after"] == pytest.approx(0.6)
    # Gains of 25 and 35 points: mean 30, sample deviation sqrt((25 + 25) / 1).
    gain = report["gain_points"]
    assert gain["per_seed"] == pytest.approx([25, 35])
    assert (gain["mean"], gain["std"]) == pytest.approx((30, 50**0.5))
    assert report["greedy_after"] == pytest.approx(0.7)
    assert report["fidelity_gain_points"]["mean"] == pytest.approx(0)
    assert (report["external_calls_training"], report["external_calls_evaluation"]) == (0, 28)
    assert (report["not_scored"], report["tokens_sampled"], report["tokens_trained"]) == (4, 400, 320)
    assert report["finished"] is True
    # Two steps of 2 s and two evaluations of 3 s.
    assert [run["seconds"] for run in report["runs"]] == [10, 10]


def test_what_was_not_measured_is_none_and_never_zero(config, tmp_path):
    make_runs(config, tmp_path / "out", [(0.25, 0.5)])
    (tmp_path / "out" / "seed-0" / "evaluations" / "step-000002.json").unlink()
    report = study_report(plan(config, [], [], [0, 1], tmp_path / "out"))
    assert report["held_out_before"] is None
    assert report["success_after"] is None
    assert report["gain_points"]["mean"] is None
    assert report["finished"] is False
    assert "not finished" in render(report, "title")
    assert spread([1.0, None]) == {"mean": 1.0, "std": None, "min": 1.0, "max": 1.0, "per_seed": [1.0, None]}


def test_a_step_that_two_runs_wrote_counts_once(config, tmp_path):
    make_runs(config, tmp_path / "out", [(0.25, 0.5)])
    lines = [step(1) | {"tokens_sampled": 7}, step(1), step(2), step(2) | {"not_scored": 3, "reward_act": 0.75}]
    (tmp_path / "out" / "seed-0" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = study_report(plan(config, [], [], [0], tmp_path / "out"))
    assert report["runs"][0]["steps"] == 2
    assert (report["tokens_sampled"], report["not_scored"]) == (200, 1 + 3)
    # Two steps of 2 s and two evaluations of 3 s.
    assert report["runs"][0]["seconds"] == 10


WHOLE = json.dumps(evaluation(2, 0.5, 0.9))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "evaluations/step-000002.json",
            WHOLE[:-30],
            r"step-000002\.json: damaged: Invalid JSON.*; delete it, and the same",
        ),
        ("evaluations/step-000002.json", "", r"step-000002\.json: damaged: Invalid JSON"),
        ("evaluations/step-000000.json", "[]", r"step-000000\.json: damaged: Input should be an object"),
        ("evaluations/step-000002.json", WHOLE.replace('"greedy"', '"greedi"'), "damaged: greedy: Field required"),
        (
            "evaluations/step-000002.json",
            WHOLE.replace('{"share": 0.5}', "0.5"),
            "damaged: sampled.by.in_training: Input",
        ),
        (
            "evaluations/step-000002.json",
            WHOLE.replace("0.9}", "NaN}"),
            "damaged: rehearsed.by.in_training.share: Input",
        ),
        (
            "metrics.jsonl",
            json.dumps(step(1)) + '\n{"step": 2}\n',
            r"metrics\.jsonl, line 2: damaged: seconds: Field req",
        ),
        ("metrics.jsonl", "3\n", r"metrics\.jsonl, line 1: damaged: not the record of a step"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(config, tmp_path, file, text, message):
    make_runs(config, tmp_path / "out", [(0.25, 0.5)])
    (tmp_path / "out" / "seed-0" / file).write_text(text)
    with pytest.raises(UserError, match=message):
        study_report(plan(config, [], [], [0], tmp_path / "out"))


@pytest.mark.parametrize(
    "data",
    [b"no archive", gzip.compress(b"{}\n", mtime=0), gzip.compress(b"[" * 999, mtime=0)[:-9]],
    ids=["no archive", "no episode", "cut"],
)
def test_a_damaged_file_of_episodes_is_named(config, tmp_path, data):
    make_runs(config, tmp_path / "out", [(0.25, 0.5)])
    for number in (0, 2):
        (tmp_path / "out" / "seed-0" / "evaluations" / f"step-{number:06d}.episodes.jsonl.gz").write_bytes(data)
    report = study_report(plan(config, [], [], [0], tmp_path / "out"))
    with pytest.raises(UserError, match=r"step-000000\.episodes\.jsonl\.gz: damaged: .*; delete it"):
        render(report, "title")


def test_the_same_task_is_shown_before_and_after(config, tmp_path):
    make_runs(config, tmp_path / "out", [(0.25, 0.5)])
    for number, success in ((0, False), (2, True)):
        episode = Episode(
            id="e", task_id="t", index=0, seed=0, responder="environment", generations=(), end="completed", reward=1.0,
            messages=(Message(role="user", content="Cancel <it>."),), success=success,
        )  # fmt: skip
        file = tmp_path / "out" / "seed-0" / "evaluations" / f"step-{number:06d}.episodes.jsonl.gz"
        file.write_bytes(gzip.compress(episode.model_dump_json().encode() + b"\n"))
    page = render(study_report(plan(config, [], [], [0], tmp_path / "out")), "title")
    assert "Before: not solved</b> (completed)" in page
    assert "After: solved</b> (completed)" in page
    assert "Cancel &lt;it&gt;." in page


def test_dollars_in_a_variant_are_text_in_its_curves(config, tmp_path):
    for value in ("a$x^$b", "c"):
        folder = tmp_path / "out" / f"model={value.replace('$', '_').replace('^', '_')}"
        make_runs(config, folder, [(0.2, 0.4)], f"model={value}")
    render(study_report(plan(config, [], ["model=a$x^$b,c"], [0], tmp_path / "out")), "title")


@pytest.mark.parametrize(
    ("earlier", "expected", "said"),
    [
        (None, 3.0, ""),
        ('{"wall_seconds": 4.5, "peak_memory_mb": 1e6, "more": []}', 7.5, ""),
        ('{"wall_seconds": 4', 3.0, "report.json: damaged"),
        ("[]", 3.0, "report.json: damaged"),
        ('{"wall_seconds": NaN}', 3.0, "report.json: damaged"),
        ('{"wall_seconds": "long"}', 3.0, "report.json: damaged"),
        ("[" * 100_000, 3.0, "report.json: damaged"),
    ],
)
def test_a_damaged_earlier_report_costs_its_times_alone(tmp_path, capsys, earlier, expected, said):
    if earlier is not None:
        (tmp_path / "report.json").write_text(earlier)
    took = _took(tmp_path, 3.0, 1)
    assert took["wall_seconds"] == expected
    assert took["peak_memory_mb"] == 1e6 if expected == 7.5 else 0 < took["peak_memory_mb"] < 1e6
    assert said in capsys.readouterr().out


def test_variants_are_reported_apart_and_text_is_escaped(config, tmp_path):
    for value in ("rehearsal", "replay"):
        make_runs(config, tmp_path / "out" / f"responder={value}", [(0.2, 0.4)], f"responder={value}")
    runs = plan(config, [], ["responder=rehearsal,replay"], [0], tmp_path / "out")
    report = study_report(runs)
    assert [block["variant"] for block in report["variants"]] == [["responder=rehearsal"], ["responder=replay"]]
    page = render(report, "<b>title</b>")
    assert "family:&lt;script&gt;" in page
    assert "<script" not in page
    assert "<b>title</b>" not in page
    assert page.count("<svg") == 1


def test_wrong_arguments_are_named(config, tmp_path):
    with pytest.raises(UserError, match="--seeds 'one': give whole numbers"):
        seeds_of("one")
    with pytest.raises(UserError, match="--seeds: give different"):
        plan(config, [], [], [1, 1], tmp_path)
    with pytest.raises(UserError, match="--vary 'responder': write it as key=value,value"):
        plan(config, [], ["responder"], [0], tmp_path)
    with pytest.raises(UserError, match="unknown key 'respondr'"):
        plan(config, [], ["respondr=replay"], [0], tmp_path)


def test_a_varied_value_may_hold_commas_and_its_folder_has_a_plain_name(config, tmp_path):
    vary = ["engine.betas=[0.9,0.98],[0.9,0.95]", "engine.lora={r: 4, target_modules: [a, b]},null"]
    runs = plan(config, [], [*vary, "model='a,b',c/d"], [0], tmp_path / "out")
    assert len(runs) == 8
    assert runs[0].settings.engine.betas == (0.9, 0.98)
    assert runs[-1].settings.engine.betas == (0.9, 0.95)
    assert runs[0].settings.engine.lora.target_modules == ("a", "b")
    assert [run.settings.model for run in runs[:2]] == ["a,b", "c/d"]
    lora = "engine.lora=_r__4,_target_modules___a,_b__"
    assert runs[0].folder == tmp_path / "out" / "engine.betas=_0.9,0.98_" / lora / "model=_a,b_" / "seed-0"
    assert runs[-1].variant == ("engine.betas=[0.9,0.95]", "engine.lora=null", "model=c/d")
    assert runs[-1].folder == tmp_path / "out" / "engine.betas=_0.9,0.95_" / "engine.lora=null" / "model=c_d" / "seed-0"


@pytest.mark.parametrize(
    ("overrides", "vary", "message"),
    [
        ([], ["steps=1,1"], "--vary: steps=1 and steps=1 have the same settings; leave one out"),
        ([], ["steps=1,01"], "--vary: steps=1 and steps=01 have the same settings"),
        ([], ["engine.lr=1e-4,2e-4,0.0001"], "--vary: engine.lr=1e-4 and engine.lr=0.0001 have the same settings"),
        ([], ["steps=1,2", "steps=3"], "--vary 'steps=3': steps is varied twice; name all its values in one --vary"),
        (
            [],
            ["engine.lr=1,2", "engine={lr: 3}"],
            "--vary: engine.lr=1 engine={lr: 3} and engine.lr=2 engine={lr: 3} have",
        ),
        ([], ["model=a/b,a_b"], "--vary: model=a/b and model=a_b have the same folder, "),
        ([], ["seed=1,2"], "seed: a study's seeds are given by --seeds"),
        (["seed=1"], [], "seed: a study's seeds are given by --seeds"),
        ([], ["steps=1,"], "--vary 'steps=1,': write it as key=value,value; a value with a comma in it stands in"),
        ([], ["steps=1,,2"], "--vary 'steps=1,,2': write it as"),
        ([], ["steps="], "--vary 'steps=': write it as"),
        ([], ["=1,2"], "--vary '=1,2': write it as"),
        ([], ["engine.betas=[0.9,0.98"], "--vary 'engine.betas=[0.9,0.98': write it as"),
        ([], ["steps=1],[2"], "--vary 'steps=1],[2': write it as"),
        ([], ["steps=" + "[" * 5000], "write it as"),
    ],
)
def test_a_variant_that_is_none_or_there_twice_is_refused(config, tmp_path, overrides, vary, message):
    with pytest.raises(UserError) as refused:
        plan(config, overrides, vary, [0, 1], tmp_path / "out")
    assert message in str(refused.value)


@pytest.fixture
def trainable(tmp_path) -> Path:
    save_policy(tmp_path / "model")
    data = {
        "model": str(tmp_path / "model"), "tasks": {"worlds": ["orders"], "count": 4}, "rehearse": {"prompt": "brief"},
        "act_sampling": {"max_tokens": 20}, "rehearse_sampling": {"max_tokens": 10}, "group_size": 2, "tasks_per_step": 2,
        "steps": 30, "checkpoint_every": 1, "engine": {"lr": 1e-3, "device": "cpu"},
    }  # fmt: skip
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(data))
    return tmp_path / "small.yaml"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_killed_study_leaves_no_run_behind_and_goes_on_keeping_what_is_finished(trainable, tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "envace", "study", str(trainable), "--seeds", "0,1", "--jobs", "1", "--out", str(out),
    ]  # fmt: skip
    metrics = out / "seed-0" / "metrics.jsonl"
    kill_once(command, lambda: True)  # its run is a Python that has not imported anything yet
    kill_once(command, lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= 2)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 0: resumed" in done.stdout
    report = json.loads((out / "report.json").read_text())
    assert report["finished"] is True
    assert [run["steps"] for run in report["runs"]] == [30, 30]
    assert report["success_after"] is None
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "seed 0: finished before, kept" in again.stdout
    changed = subprocess.run([*command, "steps=31"], capture_output=True, text=True, timeout=120, check=False)
    assert changed.returncode == 2
    assert "holds a run with other settings" in changed.stderr


def kill_once(command: list[str], true: Callable[[], bool]) -> None:
    """Starts a study, kills it when it has a run and ``true`` is, and sees the run end."""
    study = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    until(lambda: study.poll() is not None or (bool(children(study.pid)) and true()))
    runs = children(study.pid)
    study.kill()
    assert study.wait() == -signal.SIGKILL
    assert runs
    until(lambda: all(parent_of(run) is None for run in runs))


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(parent: int) -> list[int]:
    processes = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [process for process in processes if parent_of(process) == parent]


def parent_of(process: int) -> int | None:
    """``None``: it has ended, be it that nobody has asked for its exit code yet."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def test_a_failed_run_is_named_with_its_last_lines(config, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    command = ["study", str(config), f"model={tmp_path}/model", "--seeds", "0", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError)
    assert "seed 0 failed" in str(result.exception)
    assert "transformers cannot load it" in str(result.exception)


def test_a_fault_of_the_last_variant_is_told_before_the_first_starts(config, tmp_path):
    command = ["study", str(config), "--vary", "model=tiny,none", "--seeds", "0", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError) and "model 'none': no such folder" in str(result.exception)
    assert "started" not in result.output and not list((tmp_path / "out").glob("model*"))


def test_a_study_folder_is_one_process_alone(config, tmp_path):
    held = "import sys, time; from pathlib import Path; from envace.training.checkpoint import locked\n"
    held += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", held, str(tmp_path / "out")], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        result = CliRunner().invoke(app, ["study", str(config), "model=tiny", "--out", str(tmp_path / "out")])
    finally:
        other.kill()
        other.wait()
    assert isinstance(result.exception, UserError) and "another process is at work in it" in str(result.exception)
