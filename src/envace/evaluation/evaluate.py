"""Success in the real worlds and fidelity of rehearsed responses, on tasks that are never trained on."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from math import sqrt
from typing import Any

from envace.chat.parse import parse_execution_result
from envace.chat.render import ChatRenderer
from envace.chat.tools import canonical_json, same_json
from envace.engines.base import Sampler
from envace.episode import EpisodeRunner, Limits
from envace.responders.environment import EnvironmentResponder
from envace.responders.rehearsal import RoleSampling
from envace.rewards.scorer import RuleScorer
from envace.roles.rehearse import RehearsePrompt, rehearse_message
from envace.seeds import derive_seed
from envace.types import Message, Task
from envace.worlds.demonstrator import probe_calls
from envace.worlds.environment import WorldEnvironment


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), z = 1.96."""
    if trials == 0:
        return 0.0, 1.0
    p, z = successes / trials, 1.959964
    middle = p + z * z / (2 * trials)
    spread = z * sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return (middle - spread) / (1 + z * z / trials), (middle + spread) / (1 + z * z / trials)


async def real_success(
    sampler: Sampler, renderer: ChatRenderer, tasks: Sequence[Task], sampling: RoleSampling, limits: Limits, seed: int
) -> dict[str, Any]:
    """One episode a task, executed in its world: shares of final-state success, overall, by world and by family."""
    runner = EpisodeRunner(
        sampler, renderer, EnvironmentResponder(WorldEnvironment), RuleScorer(), act=sampling, limits=limits
    )
    episodes = await asyncio.gather(*(runner.run(task, 0, derive_seed("evaluation", seed, task.id)) for task in tasks))
    tallies: dict[str, list[bool]] = defaultdict(list)
    for task, episode in zip(tasks, episodes, strict=True):
        if episode.success is None:
            continue
        for key in ("all", f"world:{task.metadata['domain']}", f"family:{task.metadata['family']}"):
            tallies[key].append(episode.success)
    ends: dict[str, int] = defaultdict(int)
    for episode in episodes:
        ends[episode.end.value] += 1
    won = tallies["all"]
    return {
        "success": sum(won) / max(1, len(won)),
        "interval": wilson(sum(won), len(won)),
        "tasks": len(tasks),
        "not_scored": len(tasks) - len(won),
        "by": {key: sum(values) / len(values) for key, values in sorted(tallies.items()) if key != "all"},
        "ends": dict(sorted(ends.items())),
        "external_calls": sum(episode.external_calls for episode in episodes),
    }


async def fidelity(
    sampler: Sampler,
    renderer: ChatRenderer,
    tasks: Sequence[Task],
    prompt: RehearsePrompt,
    sampling: RoleSampling,
    seed: int,
) -> dict[str, Any]:
    """The share of rehearsed responses that equal the real world's, on probe calls; by tool and for errors apart.

    Each probe is asked after the world's own answers to the probes before it, so one wrong answer spoils no other.
    """

    async def one(task: Task) -> list[tuple[str, bool, bool]]:
        specs = {tool.name: tool for tool in task.tools}
        context = renderer.start([prompt.system(task.tools, task.references)])
        said: list[Message] = list(task.messages)
        results = []
        for number, made in enumerate(probe_calls(task, seed)):
            context.add_messages([prompt.pending(said, made.call, specs[made.call.name])])
            own = derive_seed("fidelity", seed, task.id, number)
            sample = await sampler.sample(context.prompt_ids(), sampling.params(own, renderer.stop_ids))
            parsed = parse_execution_result(renderer.decode(sample.completion_ids))
            right = parsed.error is None and same_json(parsed.response, made.response)
            results.append((made.call.name, "error" in made.response, right))
            truth = rehearse_message(made.response)
            context.add_completion(renderer.completion_ids(truth), truth)
            said = []
        return results

    results = [result for task in await asyncio.gather(*map(one, tasks)) for result in task]
    tallies: dict[str, list[bool]] = defaultdict(list)
    for tool, is_error, right in results:
        for key in ("all", f"tool:{tool}", "errors" if is_error else "answers"):
            tallies[key].append(right)
    matched = tallies["all"]
    return {
        "fidelity": sum(matched) / max(1, len(matched)),
        "interval": wilson(sum(matched), len(matched)),
        "calls": len(matched),
        "by": {key: sum(values) / len(values) for key, values in sorted(tallies.items()) if key != "all"},
    }


def summary(result: dict[str, Any]) -> str:
    """One line for a terminal."""
    return canonical_json({key: value for key, value in result.items() if not isinstance(value, dict)})
