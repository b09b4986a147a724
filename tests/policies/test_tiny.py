"""The policy that ships: its size, and that it acts with headroom and rehearses what the real worlds answer."""

import asyncio
from pathlib import Path

import torch

from envace.chat.render import ChatRenderer
from envace.config import TrainSettings, load_settings
from envace.engines.local.loading import load_policy, resolve
from envace.engines.local.sampler import LocalSampler
from envace.evaluation.evaluate import EvaluationPlan, evaluate
from envace.roles.rehearse import RehearsePrompt
from envace.worlds import HELD_OUT, REGISTRY
from envace.worlds.tasks import build_tasks


def test_it_is_small():
    model, _ = load_policy("tiny", torch.float32, "cpu")
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 5_000_000
    assert sum(file.stat().st_size for file in resolve("tiny").iterdir()) <= 12_000_000


def test_its_prompts_grow_by_appending():
    _, tokenizer = load_policy("tiny", torch.float32, "cpu")
    assert ChatRenderer(tokenizer).append_only


def test_it_acts_with_headroom_and_rehearses_truly():
    settings = load_settings(TrainSettings, Path("quickstart"))
    model, tokenizer = load_policy(settings.model, torch.float32, "cpu")
    worlds = [name for name in REGISTRY if name not in HELD_OUT]
    tasks = [task for world in worlds for task in build_tasks(world, 16, 3, "test")]
    plan = EvaluationPlan(
        settings.act_sampling, settings.rehearse_sampling, RehearsePrompt(settings.rehearse.prompt), settings.limits
    )
    result = asyncio.run(evaluate(LocalSampler(model), ChatRenderer(tokenizer), tasks, plan))
    # 80 tasks and 320 calls: within three standard errors of 0.33 and 0.91.
    assert 0.17 <= result.sampled.success <= 0.5
    assert result.rehearsed_greedy.fidelity >= 0.85
