import gzip
import json
import os
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
from transformers import Qwen3Config, Qwen3ForCausalLM

from envace.config import TrainSettings, load_settings
from envace.errors import UserError
from envace.training.loop import train
from envace.types import Episode, Role
from envace.worlds.base import World
from tests.chatml import tokenizer

DRIVER = Path(__file__).with_name("driver.py")


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    """Three steps of a small random model; its episodes end at once or after some calls that nobody understands."""
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2, eos_token_id=words.eos_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
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
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
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
    assert not (out / "checkpoints" / "step-000003").exists()
    assert run_driver(settings, out, "never", resume=True) == 0
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
    assert not list((out / "checkpoints").glob("*.partial"))


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
    executed = train(
        wanted.model_copy(update={"responder": "environment"}), tmp_path / "real", progress=lambda line: None
    )
    assert json.loads(executed.metrics.read_text().splitlines()[0])["not_scored"] == 24


@pytest.mark.parametrize("responder", ["simulator", "environment", "replay"])
def test_one_setting_switches_who_answers(settings, tmp_path, monkeypatch, responder):
    solution_script(monkeypatch)
    wanted = load_settings(TrainSettings, settings, [f"responder={responder}", "steps=1", "tasks_per_step=6"])
    run = train(wanted, tmp_path / "run", progress=lambda line: None)
    metrics = json.loads(run.metrics.read_text())
    assert (metrics["external_calls"] > 0) == (responder != "replay")
    assert metrics["reward_rehearse"] == 0
    if responder != "simulator":
        assert metrics["reward"] == 1.0


def test_an_interrupt_finishes_the_step_and_saves(settings, tmp_path):
    out = tmp_path / "run"
    slow = load_settings(TrainSettings, settings).model_dump(mode="json") | {"steps": 10_000, "checkpoint_every": 5_000}
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump(slow))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
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


def test_held_out_worlds_are_refused(settings, tmp_path):
    wanted = load_settings(TrainSettings, settings, ["tasks.worlds=[hotel]"])
    with pytest.raises(UserError, match="held out to measure transfer"):
        train(wanted, tmp_path / "run")
