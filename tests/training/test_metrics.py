"""Numbers of a step, worked out by hand."""

import json
import sqlite3
import sys
import types
from pathlib import Path

import pytest

from envace.engines.base import TrainingRow
from envace.errors import UserError
from envace.training.metrics import Trackers, advantage_metrics, step_metrics
from envace.types import EndReason, Episode, Generation, Group, Message, Role, Task

TASK = Task(id="t", messages=(Message(role="user", content="hello"),))


def generation(role: Role, tokens: int) -> Generation:
    return Generation(
        role=role, turn=0, prompt_ids=(1,), completion_ids=(2,) * tokens, logprobs=(-1.0,) * tokens, stop_reason="stop"
    )


def episode(
    reward: float | None, end: EndReason, roles: str, responder: str = "rehearsal", external: int = 0
) -> Episode:
    made = tuple(generation(Role.ACT if letter == "a" else Role.REHEARSE, 3) for letter in roles)
    return Episode(
        id="e", task_id="t", index=0, seed=0, responder=responder, messages=TASK.messages, generations=made, end=end,
        reward=reward, external_calls=external,
    )  # fmt: skip


def test_a_step_by_hand():
    groups = [
        Group(
            task=TASK,
            episodes=(
                episode(1.0, EndReason.COMPLETED, "arra"),
                episode(0.0, EndReason.RESPONSE_ERROR, "ar"),
                episode(None, EndReason.FAILED, "ar"),
            ),
        ),
        Group(task=TASK, episodes=(episode(0.5, EndReason.COMPLETED, "a"), episode(0.5, EndReason.COMPLETED, "a"))),
    ]
    metrics = step_metrics(groups)
    assert metrics["episodes"] == 5
    assert metrics["not_scored"] == 1
    assert metrics["reward"] == 0.5  # (1 + 0 + 0.5 + 0.5) / 4
    assert metrics["reward_act"] == 0.5
    assert metrics["reward_rehearse"] == 0.5  # (1 + 0) / 2: the last two episodes never rehearsed
    assert (metrics["generations_act"], metrics["generations_rehearse"]) == (6, 4)
    assert metrics["response_validity"] == 0.75  # one of four
    assert metrics["groups_with_variance"] == 1
    assert metrics["tokens_sampled"] == 30
    assert metrics["ends"] == {"completed": 3, "response_error": 1, "failed": 1}


def test_validity_is_of_responses_asked_of_a_model():
    simulated = Group(task=TASK, episodes=(episode(0.0, EndReason.RESPONSE_ERROR, "a", "simulator", external=4),))
    assert step_metrics([simulated])["response_validity"] == 0.75
    replayed = Group(task=TASK, episodes=(episode(0.0, EndReason.RESPONSE_ERROR, "a", "replay"),))
    assert step_metrics([replayed])["response_validity"] is None


def test_what_there_was_none_of_is_none():
    metrics = step_metrics([Group(task=TASK, episodes=(episode(None, EndReason.FAILED, ""),))])
    assert metrics["reward"] is metrics["reward_act"] is metrics["response_validity"] is None


def test_advantages_are_weighed_by_token():
    act = TrainingRow((1, 2, 3, 4), (0, 1, 1, 1), (0.0, 0.5, 0.5, -1.0), (0.0,) * 4, "act")
    metrics = advantage_metrics([act])
    assert metrics["advantage_act_mean"] == 0.0
    assert metrics["advantage_act_std"] == pytest.approx(0.5**0.5)  # sqrt((0.25 + 0.25 + 1) / 3)
    assert (metrics["advantage_act_min"], metrics["advantage_act_max"]) == (-1.0, 0.5)
    assert "advantage_rehearse_mean" not in metrics


def test_trackers_are_sent_numbers_alone(monkeypatch, tmp_path):
    sent: list[tuple[dict[str, float], int]] = []
    service = types.SimpleNamespace(
        init=lambda **given: sent.append(({"settings": float(given["config"]["steps"])}, -1)),
        log=lambda numbers, step: sent.append((numbers, step)),
        finish=lambda: sent.append(({}, -2)),
    )
    monkeypatch.setitem(sys.modules, "wandb", service)
    trackers = Trackers(tmp_path / "tensorboard", ["wandb"], "run", {"steps": 9}, first=1)
    trackers.log(4, {"step": 4, "reward": 0.25, "validity": None, "norm": float("nan"), "ends": {"completed": 3}})
    trackers.close()
    assert sent == [({"settings": 9.0}, -1), ({"reward": 0.25, "ends/completed": 3.0}, 4), ({}, -2)]
    assert [file.name.startswith("events") for file in Path(tmp_path / "tensorboard").iterdir()] == [True]


def test_a_tracker_that_fails_ends_no_run(monkeypatch, tmp_path, caplog):
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    service = types.SimpleNamespace(init=lambda **_: None, log=refuse, finish=refuse)
    monkeypatch.setitem(sys.modules, "wandb", service)
    trackers = Trackers(tmp_path / "tensorboard", ["wandb"], "run", {}, first=1)
    trackers.log(1, {"reward": 0.5})
    trackers.log(2, {"reward": 0.5})
    trackers.close()
    assert [record.getMessage() for record in caplog.records] == [
        "wandb fails (no route) and is told no more; metrics.jsonl has everything"
    ]
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    with pytest.raises(UserError, match="wandb does not start: no route"):
        Trackers(tmp_path / "tensorboard", ["wandb"], "run", {}, first=1)


def test_trackio_itself_keeps_what_it_is_sent(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    trackers = Trackers(tmp_path / "tensorboard", ["trackio"], "run", {"steps": 2}, first=1)
    trackers.log(1, {"reward": 0.25, "ends": {"completed": 3}})
    trackers.log(2, {"reward": 0.5})
    trackers.close()
    with sqlite3.connect(tmp_path / "trackio" / "envace.db") as database:
        kept = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by step")]
    assert [line["reward"] for line in kept] == [0.25, 0.5]
    assert kept[0]["ends/completed"] == 3.0


def test_wandb_itself_keeps_what_it_is_sent(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    pytest.importorskip("wandb")
    trackers = Trackers(tmp_path / "tensorboard", ["wandb"], "run", {"steps": 2}, first=1)
    trackers.log(1, {"reward": 0.25})
    trackers.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
