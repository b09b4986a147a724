import gzip
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from envace.config import TrainSettings, load_settings
from envace.errors import UserError
from envace.training.checkpoint import RunFolder
from envace.training.loop import train
from envace.types import Episode, Role
from envace.worlds.base import World
from tests.chatml import save_policy

DRIVER = Path(__file__).with_name("driver.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    """Three steps of a small random model; its episodes end at once or after some calls that nobody understands."""
    folder = tmp_path_factory.mktemp("policy")
    save_policy(folder / "model", size=32, intermediate=48, layers=2, scale=0.2)
    data = {
        "model": str(folder / "model"),
        "tasks": {"worlds": ["orders"], "count": 6},
        "rehearse": {"prompt": "brief"},
        "act_sampling": {"max_tokens": 150},
        "rehearse_sampling": {"max_tokens": 14},
        "group_size": 4,
        "tasks_per_step": 2,
        "steps": 3,
        "checkpoint_every": 1,
        "engine": {"lr": 1e-3, "device": "cpu"},
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(data))
    return folder / "settings.yaml"


def run_driver(settings: Path, out: Path, moment: str, resume: bool = False) -> int:
    command = [sys.executable, str(DRIVER), str(settings), str(out), moment, "resume" if resume else "new"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False).returncode


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "step-000003" / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    train(load_settings(TrainSettings, settings), out, progress=lambda line: None)
    return out


@pytest.mark.parametrize("moment", ["sampling", "update", "checkpoint"])
def test_killed_and_resumed_equals_undisturbed_to_the_last_bit(settings, undisturbed, tmp_path, moment):
    out = tmp_path / "run"
    assert run_driver(settings, out, moment) == -signal.SIGKILL
    # Where it died: in step 2, before its rollouts were written, or with its checkpoint half written.
    left = sorted(folder.name for folder in (out / "checkpoints").iterdir())
    assert left == ["step-000001"] + ["step-000002.partial"] * (moment == "checkpoint")
    assert (out / "rollouts" / "step-000002.jsonl.gz").exists() == (moment == "checkpoint")
    train(load_settings(TrainSettings, out / "settings.yaml"), out, resume=True, progress=lambda line: None)
    expected, got = final_weights(undisturbed), final_weights(out)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for step in (1, 2, 3):
        pair = [
            gzip.decompress((run / "rollouts" / f"step-{step:06d}.jsonl.gz").read_bytes()) for run in (undisturbed, out)
        ]
        first, second = ([json.loads(line)["generations"] for line in data.splitlines()] for data in pair)
        assert first == second
    assert sorted(folder.name for folder in (out / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    optimizers = [
        torch.load(run / "checkpoints" / "step-000003" / "trainer_state.pt", weights_only=True)["optimizer"]["parts"]
        for run in (undisturbed, out)
    ]
    for one, other in zip(*optimizers, strict=True):
        for number, state in one["state"].items():
            assert all(torch.equal(value, other["state"][number][name]) for name, value in state.items())


def test_training_moves_the_weights(settings, undisturbed):
    start = load_file(settings.parent / "model" / "model.safetensors")
    assert any(not torch.equal(start[name], value) for name, value in final_weights(undisturbed).items())


def test_every_episode_is_on_disk_with_its_log_probabilities(undisturbed):
    data = gzip.decompress((undisturbed / "rollouts" / "step-000002.jsonl.gz").read_bytes())
    episodes = [Episode.model_validate_json(line) for line in data.splitlines()]
    assert len(episodes) == 8
    assert all(generation.policy_version == 1 for episode in episodes for generation in episode.generations)
    metrics = json.loads((undisturbed / "metrics.jsonl").read_text().splitlines()[1])
    assert metrics["mismatch_max"] < 1e-3


def solution_script(monkeypatch) -> None:
    """Makes the policy say the reference solution: Act's messages, and the recorded response to each call."""
    import envace.episode as episode_module
    import envace.responders.rehearsal as rehearsal_module
    from envace.chat.parse import ParsedAssistant, ParsedResponse
    from envace.engines.base import Sample

    async def sample(self, prompt_ids, params):
        return Sample((5, params.stop_ids[0]), (-1.0, -1.0), "stop", self.policy_version)

    monkeypatch.setattr("envace.engines.local.sampler.LocalSampler.sample", sample)
    acting = episode_module._Run._act

    async def act(self, context):
        solution = [message for message in self.task.solution if message.role == "assistant"]
        monkeypatch.setattr(episode_module, "parse_assistant", lambda *_: ParsedAssistant(solution[self.acted - 1]))
        return await acting(self, context)

    monkeypatch.setattr(episode_module._Run, "_act", act)
    monkeypatch.setattr(rehearsal_module, "parse_execution_result", lambda _: ParsedResponse({"ok": True}))


def test_no_world_is_executed_and_no_socket_opened_in_training_by_rehearsal(settings, tmp_path, monkeypatch):
    import envace.training.loop as loop

    wanted = load_settings(TrainSettings, settings, ["steps=2", "tasks_per_step=6"])
    tasks = loop.load_tasks(wanted.tasks)  # recorded when the set is built, before training
    monkeypatch.setattr(loop, "load_tasks", lambda _: tasks)
    solution_script(monkeypatch)

    def refuse(*args, **kwargs):
        raise AssertionError("training touched something real")

    monkeypatch.setattr(World, "__init__", refuse)
    monkeypatch.setattr(World, "call", refuse)
    monkeypatch.setattr("sqlite3.connect", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    run = train(wanted, tmp_path / "run", progress=lambda line: None)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert sum(line["external_calls"] for line in lines) == 0
    data = gzip.decompress((run.path / "rollouts" / "step-000001.jsonl.gz").read_bytes())
    episodes = [Episode.model_validate_json(line) for line in data.splitlines()]
    assert all(episode.end != "failed" for episode in episodes)
    rehearsed = [g for episode in episodes for g in episode.generations if g.role is Role.REHEARSE]
    assert len(rehearsed) > 20
    # The refusal is a real one: the environment responder runs into it.
    with pytest.raises(UserError, match=r"none of its 24 episodes could be scored.*training touched something real"):
        train(wanted.model_copy(update={"responder": "environment"}), tmp_path / "real", progress=lambda line: None)


@pytest.mark.parametrize("responder", ["simulator", "environment", "replay"])
def test_one_setting_switches_who_answers(settings, tmp_path, monkeypatch, responder):
    solution_script(monkeypatch)
    wanted = load_settings(TrainSettings, settings, [f"responder={responder}", "steps=1", "tasks_per_step=6"])
    run = train(wanted, tmp_path / "run", progress=lambda line: None)
    metrics = json.loads(run.metrics.read_text())
    assert (metrics["external_calls"] > 0) == (responder != "replay")
    assert metrics["reward_rehearse"] is None
    if responder != "simulator":
        assert metrics["reward"] == 1.0


def test_an_interrupt_finishes_the_step_and_saves(settings, tmp_path):
    out = tmp_path / "run"
    slow = load_settings(TrainSettings, settings).model_dump(mode="json") | {"steps": 10_000, "checkpoint_every": 5_000}
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(slow))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, str(DRIVER), str(tmp_path / "slow.yaml"), str(out), "never", "new"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for _ in range(600):
        if (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").read_text().count("\n") >= 2:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0, process.stderr.read()
    steps = (out / "metrics.jsonl").read_text().count("\n")
    assert (out / "checkpoints" / f"step-{steps:06d}" / "trainer_state.pt").is_file()
    assert f"stopped after step {steps}; go on with: envace train --resume {out}" in (out / "log.txt").read_text()


def test_a_second_interrupt_stops_at_once(settings, tmp_path, monkeypatch, capfd):
    def twice(self, rows):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("envace.engines.local.trainer.Trainer.step", twice)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(load_settings(TrainSettings, settings), tmp_path / "run", progress=lambda line: None)
    assert "finishing the step, then saving; press Ctrl-C again to stop at once" in capfd.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_step_says_how_it_went_and_where_its_time_went(undisturbed):
    metrics = json.loads((undisturbed / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["tokens_trained"] == metrics["tokens_sampled"] > 0
    assert metrics["tokens_computed"] >= metrics["tokens_trained"]
    assert sum(metrics["ends"].values()) == metrics["episodes"] == 8
    parts = metrics["sampling_seconds"] + metrics["update_seconds"] + metrics["other_seconds"]
    assert parts == pytest.approx(metrics["seconds"], abs=0.01)
    assert {"mismatch_mean", "advantage_act_std", "groups_without_variance", "not_scored"} <= metrics.keys()
    assert list((undisturbed / "tensorboard").iterdir())
    assert "step 3/3: reward" in (undisturbed / "log.txt").read_text()


def test_groups_without_variance_are_refilled_by_other_tasks(settings, tmp_path, monkeypatch):
    """Tasks are all without variance: two rounds refill two groups each, and no task comes twice."""
    wanted = load_settings(
        TrainSettings, settings, ["steps=1", "refill_rounds=2", "algorithm.drop_no_variance=true", "tasks.count=5"]
    )
    solution_script(monkeypatch)  # every episode has reward 1
    run = train(wanted, tmp_path / "run", progress=lambda line: None)
    data = gzip.decompress((run.path / "rollouts" / "step-000001.jsonl.gz").read_bytes())
    tried = [json.loads(line)["task_id"] for line in data.splitlines()]
    assert len(tried) == 5 * 4  # 2 tasks, then 2, then the only one left
    assert len(set(tried)) == 5
    metrics = json.loads(run.metrics.read_text())
    assert (metrics["groups_without_variance"], metrics["tokens_trained"]) == (5, 0)


def test_each_epoch_is_a_permutation_that_depends_on_seed_and_epoch_alone(settings):
    from envace.training.loop import load_tasks, tasks_of_step

    wanted = load_settings(TrainSettings, settings, ["tasks_per_step=4"])  # 6 tasks: epochs end within steps
    tasks = load_tasks(wanted.tasks)
    order = [task.id for step in range(1, 7) for task in tasks_of_step(tasks, wanted, step)]
    epochs = [order[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(epoch) == sorted(task.id for task in tasks) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    other = wanted.model_copy(update={"seed": 1})
    assert [task.id for step in range(1, 7) for task in tasks_of_step(tasks, other, step)] != order


def test_an_evaluation_missed_by_a_kill_is_made_up_for(settings, undisturbed, tmp_path):
    import shutil

    shutil.copytree(undisturbed, tmp_path / "run")
    wanted = load_settings(TrainSettings, settings, ["evaluation={worlds: [orders], count: 2, probes: 1}"])
    weights = final_weights(tmp_path / "run")
    train(wanted, tmp_path / "run", resume=True, progress=lambda line: None)
    result = json.loads((tmp_path / "run" / "evaluations" / "step-000003.json").read_text())
    assert (result["step"], result["sampled"]["tasks"], result["rehearsed"]["calls"]) == (3, 2, 2)
    assert all(torch.equal(value, weights[name]) for name, value in final_weights(tmp_path / "run").items())


def test_a_disk_that_fills_up_loses_nothing(settings, tmp_path, monkeypatch):
    """The third checkpoint meets a limit on file sizes; the run goes on from the second one later."""
    wanted = load_settings(TrainSettings, settings)
    out = tmp_path / "run"
    write = RunFolder.write_checkpoint

    def cramped(self, step, save, keep):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if step == 3 else soft, hard))
        try:
            write(self, step, save, keep)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_checkpoint", cramped)
        with pytest.raises(
            UserError, match=r"step-000003\.partial: cannot be written: .*nothing written before is lost"
        ):
            train(wanted, out, progress=lambda line: None)
    assert sorted(folder.name for folder in (out / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    train(wanted, out, resume=True, progress=lambda line: None)
    assert (out / "checkpoints" / "step-000003" / "model.safetensors").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_metrics_that_find_no_room_are_one_message(settings, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written: No space left on device"):
        train(load_settings(TrainSettings, settings), tmp_path / "run", progress=lambda line: None)


def test_a_tracker_that_is_not_installed_is_named(settings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    wanted = load_settings(TrainSettings, settings, ["trackers=[wandb]"])
    with pytest.raises(UserError, match="wandb is not installed"):
        train(wanted, tmp_path / "run", progress=lambda line: None)


def test_what_could_be_refused_is_refused_before_the_first_result(settings, tmp_path, monkeypatch):
    """So that the corrected command finds the folder free."""
    evaluated = {"worlds": ["orders"], "count": 1}
    monkeypatch.setitem(sys.modules, "wandb", None)
    for wrong in ("trackers=[wandb]", "simulator_model=/no/such/model"):
        overrides = [f"evaluation={json.dumps(evaluated)}", "responder=simulator", wrong]
        with pytest.raises(UserError, match=r"wandb is not installed|no such folder"):
            train(load_settings(TrainSettings, settings, overrides), tmp_path / "run", progress=lambda line: None)
    train(load_settings(TrainSettings, settings, ["steps=1"]), tmp_path / "run", progress=lambda line: None)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("limits.context_tokens=5", "none of its 8 episodes had room for a single token (max_tokens)"),
        ("engine.max_context=1", "none of its 8 episodes had room for a single token (truncated)"),
        ("limits.seconds=1e-9", "none of its 8 episodes could be scored"),
    ],
)
def test_a_step_that_can_teach_nothing_ends_the_run(settings, tmp_path, wrong, reason):
    with pytest.raises(UserError, match=re.escape(reason)) as told:
        train(load_settings(TrainSettings, settings, [wrong]), tmp_path / "run", progress=lambda line: None)
    assert "orders-train-0-" in str(told.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_reader_that_goes_away_ends_no_run(settings, tmp_path):
    def gone(line):
        raise BrokenPipeError(32, "Broken pipe")

    run = train(load_settings(TrainSettings, settings, ["steps=2"]), tmp_path / "run", progress=gone)
    log = run.log.read_text()
    assert run.checkpoints() == [1, 2]
    assert log.count("progress cannot be printed any more (Broken pipe)") == 1 and "step 2/2" in log


def test_held_out_worlds_are_refused(settings, tmp_path):
    wanted = load_settings(TrainSettings, settings, ["tasks.worlds=[hotel]"])
    with pytest.raises(UserError, match="held out to measure transfer"):
        train(wanted, tmp_path / "run")
