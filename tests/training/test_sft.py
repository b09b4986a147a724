"""The warm start: interrupted, killed, finished, it never loses or adds a step."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from envace.engines.local.trainer import Trainer
from envace.errors import UserError
from envace.training.sft import SftSettings, warm_start
from envace.training.supervised import Trajectory
from envace.worlds.tasks import build_tasks
from tests.chatml import save_policy


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> SftSettings:
    folder = tmp_path_factory.mktemp("warm")
    save_policy(folder / "model", size=32, intermediate=48, layers=2, scale=0.2)
    lines = [
        Trajectory(task=task, messages=task.solution).model_dump_json() for task in build_tasks("orders", 8, 0, "train")
    ]
    (folder / "trajectories.jsonl").write_text("\n".join(lines) + "\n")
    return SftSettings.model_validate(
        {
            "model": str(folder / "model"),
            "trajectories": folder / "trajectories.jsonl",
            "rehearse_prompt": "brief",
            "tokens_per_step": 4000,
            "checkpoint_every": 1,
            "engine": {"lr": 1e-3, "device": "cpu"},
        }
    )


def quiet(line: str) -> None:
    pass


def run(settings: SftSettings, out: Path, resume: bool = False) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Steps in the log, and the weights at the end."""
    policy = warm_start(settings, out, resume, progress=quiet)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return steps, load_file(policy / "model.safetensors")


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory) -> tuple[list[int], dict[str, torch.Tensor]]:
    steps, weights = run(settings, tmp_path_factory.mktemp("undisturbed") / "run")
    assert len(steps) >= 3
    return steps, weights


def test_an_interrupt_finishes_the_step_and_a_resumed_run_equals_an_undisturbed_one(settings, undisturbed, tmp_path):
    original = Trainer.step

    def interrupted(self, rows):
        if self.steps == 1:
            signal.raise_signal(signal.SIGINT)
        return original(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        assert run(settings, tmp_path / "run")[0] == [1, 2]
    steps, weights = run(settings, tmp_path / "run", resume=True)
    assert steps == undisturbed[0] and same(weights, undisturbed[1])


def test_a_save_that_was_cut_off_costs_its_step_alone(settings, undisturbed, tmp_path):
    saved, original = 0, torch.save

    def cut(*args):
        nonlocal saved
        saved += 1
        if saved == 2:
            raise KeyboardInterrupt
        original(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", cut)
        run(settings, tmp_path / "run")
    steps, weights = run(settings, tmp_path / "run", resume=True)
    assert steps == undisturbed[0] and same(weights, undisturbed[1])


@pytest.mark.parametrize("limit", [None, 2])
def test_a_finished_run_resumed_trains_nothing_more(settings, tmp_path, limit):
    settings = settings.model_copy(update={"max_steps": limit})
    steps, weights = run(settings, tmp_path / "run")
    assert limit is None or steps == [1, 2]
    again, resumed = run(settings, tmp_path / "run", resume=True)
    assert again == steps and same(weights, resumed)


def test_an_earlier_run_is_not_written_over(settings, tmp_path):
    first = settings.model_copy(update={"max_steps": 1})
    run(first, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="there is a run in it already"):
        run(first, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_bad_last_line_is_told_before_anything_is_trained_or_written(settings, tmp_path):
    (tmp_path / "bad.jsonl").write_text(settings.trajectories.read_text() + "{}\n")
    with pytest.raises(UserError, match=r"bad\.jsonl, line 9: task"):
        run(settings.model_copy(update={"trajectories": tmp_path / "bad.jsonl"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rows_too_long_are_counted(settings, tmp_path):
    with pytest.raises(UserError, match="no row of at most 10 tokens"):
        run(settings.model_copy(update={"max_tokens": 10}), tmp_path / "none")
    run(settings.model_copy(update={"max_tokens": 600, "tokens_per_step": 10**9}), tmp_path / "run")
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    # A trajectory gives a row a role.
    assert (
        record["trajectories"] == 8 and record["rows"] + record["rows_left_out"] == 16 and record["rows_left_out"] > 0
    )
