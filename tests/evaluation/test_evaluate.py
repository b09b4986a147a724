"""Measures over policies whose answers are known beforehand, and intervals worked out by hand."""

import pytest

from envace.chat.render import ChatRenderer
from envace.engines.base import Sample
from envace.episode import Limits
from envace.evaluation.evaluate import EvaluationPlan, bootstrap, evaluate, share, wilson
from envace.roles.generate import RoleSampling
from envace.roles.rehearse import RehearsePrompt, rehearse_message
from envace.types import Message
from envace.worlds.demonstrator import probe_calls
from envace.worlds.tasks import build_tasks
from tests.chatml import tokenizer


def test_wilson_by_hand():
    # p = 0.5, n = 100, z² = 3.841439: middle 0.5, spread sqrt(0.25 + 3.841439 / 400) * 1.959964 / 10, over 1.03841439
    low, high = wilson(50, 100)
    assert (low, high) == (pytest.approx(0.403832, abs=1e-5), pytest.approx(0.596168, abs=1e-5))
    # p = 0: 0 to z² / (n + z²)
    assert wilson(0, 10) == (0.0, pytest.approx(3.841459 / 13.841459, abs=1e-5))
    assert wilson(0, 0) == (0.0, 1.0)


def test_several_outcomes_of_a_task_are_not_as_many_independent_ones():
    once = share([[True], [False]] * 25)
    assert (once.share, once.count, (once.low, once.high)) == (0.5, 50, wilson(25, 50))
    # The same outcome four times says no more than once: the interval must not shrink by half.
    fourfold = share([[True] * 4, [False] * 4] * 25)
    assert (fourfold.share, fourfold.count) == (0.5, 200)
    assert fourfold.high - fourfold.low == pytest.approx(once.high - once.low, rel=0.2)
    assert share([[True, True]] * 5).low == wilson(5, 5)[0]
    assert share([[], []]).count == 0


def test_bootstrap_is_seeded_and_near_the_normal_interval():
    outcomes = [[True], [False]] * 50  # standard error sqrt(0.25 / 100) = 0.05
    low, high = bootstrap(outcomes)
    assert (low, high) == bootstrap(outcomes)
    assert (low, high) == (pytest.approx(0.402, abs=0.025), pytest.approx(0.598, abs=0.025))


class Scripted:
    """Says what a table of prompts says. A prompt that is not in it was never expected."""

    def __init__(self, table: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self.table = table

    async def sample(self, prompt_ids, params):
        said = self.table[tuple(prompt_ids)]
        return Sample(said, (0.0,) * len(said), "stop")


def solutions(renderer, tasks, table):
    """The prompts Act will see when it follows the reference solution, with the solution's messages."""
    for task in tasks:
        context = renderer.start(task.messages, task.tools)
        waiting: list[Message] = []
        for message in task.solution:
            if message.role != "assistant":
                waiting.append(message)
                continue
            if waiting:
                context.add_messages(waiting)
                waiting = []
            said = renderer.completion_ids(message)
            table[context.prompt_ids()] = said
            context.add_completion(said, message)


def responses(renderer, tasks, prompt, plan_seed, count, wrong, table):
    for task in tasks:
        context = renderer.start([prompt.system(task.tools, task.references)])
        said = list(task.messages)
        specs = {tool.name: tool for tool in task.tools}
        for number, probe in enumerate(probe_calls(task, plan_seed, count)):
            context.add_messages([prompt.pending(said, probe.call, specs[probe.call.name])])
            truth = rehearse_message(probe.response)
            answer = Message(role="assistant", content="no idea") if number in wrong else truth
            table[context.prompt_ids()] = renderer.completion_ids(answer)
            context.add_completion(renderer.completion_ids(truth), truth)
            said = []


async def test_a_policy_that_follows_the_solution_succeeds_and_its_responses_are_compared():
    renderer = ChatRenderer(tokenizer())
    prompt = RehearsePrompt("brief")
    tasks = [task for world in ("orders", "hotel") for task in build_tasks(world, 3, 7, "test")]
    sampling = RoleSampling(max_tokens=4000)
    plan = EvaluationPlan(sampling, sampling, prompt, Limits(), samples=2, probes=4, seed=1)
    table: dict[tuple[int, ...], tuple[int, ...]] = {}
    solutions(renderer, tasks, table)
    responses(renderer, tasks, prompt, 1, 4, {3}, table)
    result = await evaluate(Scripted(table), renderer, tasks, plan)
    assert (result.sampled.success, result.sampled.episodes, result.greedy.episodes) == (1.0, 12, 6)
    assert result.sampled.by["held_out"].count == result.sampled.by["in_training"].count == 6
    assert result.sampled.ends == {"completed": 12}
    assert (result.rehearsed.fidelity, result.rehearsed.calls, result.rehearsed.malformed) == (0.75, 24, 6)
    assert result.rehearsed.by["world:hotel"].share == 0.75
    assert result.rehearsed.by["answers"].count + result.rehearsed.by["errors"].count == 24
    calls = sum(len(message.tool_calls) for task in tasks for message in task.solution)
    assert result.sampled.external_calls == 2 * calls
    assert result.external_calls == 3 * calls + 24
