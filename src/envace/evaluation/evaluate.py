"""Success in the real worlds and fidelity of rehearsed responses, on tasks that are never trained on.

It sees a sampler and a renderer, never an engine or a run: what is measured here is not part of training.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

from pydantic import Field

from envace.chat.parse import parse_execution_result
from envace.chat.render import ChatRenderer
from envace.chat.tools import same_json
from envace.engines.base import Sampler
from envace.episode import EpisodeRunner, Limits
from envace.responders.environment import EnvironmentResponder
from envace.rewards.scorer import RuleScorer
from envace.roles.generate import RoleSampling
from envace.roles.rehearse import RehearseContext, RehearsePrompt
from envace.seeds import derive_seed
from envace.types import Episode, Frozen, Reference, Task
from envace.worlds import HELD_OUT
from envace.worlds.demonstrator import probe_calls
from envace.worlds.environment import WorldEnvironment

BOOTSTRAP_DRAWS = 1000


class Share(Frozen):
    """How many of ``count`` were right, with a 95 % interval."""

    share: float
    low: float
    high: float
    count: int


class Success(Frozen):
    """Final-state success of episodes executed in their worlds."""

    success: float
    interval: tuple[float, float]
    tasks: int
    episodes: int
    not_scored: int
    by: dict[str, Share]
    """``world:NAME``, ``family:NAME``, and ``held_out`` and ``in_training``: worlds that are never or may be trained on."""
    ends: dict[str, int]
    external_calls: int
    shown: tuple[Episode, ...] = Field(default=(), exclude=True)
    """The first task's episode of each family, to be read by people; it is no part of the JSON."""


class Fidelity(Frozen):
    """Rehearsed responses that equal the real world's."""

    fidelity: float
    interval: tuple[float, float]
    calls: int
    malformed: int
    """Responses that could not be parsed; they count as wrong."""
    by: dict[str, Share]
    """``tool:NAME``, ``world:NAME``, ``answers`` and ``errors`` (what the world said), ``held_out`` and ``in_training``."""


class EvaluationResult(Frozen):
    sampled: Success
    greedy: Success
    rehearsed: Fidelity
    rehearsed_greedy: Fidelity
    external_calls: int
    """Calls executed in worlds for this evaluation, the probes' true answers included."""


@dataclass(frozen=True)
class EvaluationPlan:
    """How a policy is measured: ``act`` and ``rehearse`` are sampled so, and greedily besides."""

    act: RoleSampling
    rehearse: RoleSampling
    prompt: RehearsePrompt
    limits: Limits
    samples: int = 1
    """Episodes a task at the temperature of ``act``; greedily always one."""
    probes: int = 4
    """Probe calls a task."""
    seed: int = 0


async def evaluate(
    sampler: Sampler, renderer: ChatRenderer, tasks: Sequence[Task], plan: EvaluationPlan
) -> EvaluationResult:
    """Both measures, each at the plan's temperature and greedily.

    Raises:
        UserError: a task without a built-in world.
    """
    act, rehearse = (of.model_copy(update={"temperature": 0.0}) for of in (plan.act, plan.rehearse))
    probes = [probe_calls(task, plan.seed, plan.probes) for task in tasks]
    sampled = await real_success(sampler, renderer, tasks, plan.act, plan.limits, plan.seed, plan.samples)
    greedy = await real_success(sampler, renderer, tasks, act, plan.limits, plan.seed)
    return EvaluationResult(
        sampled=sampled,
        greedy=greedy,
        rehearsed=await fidelity(sampler, renderer, tasks, probes, plan.prompt, plan.rehearse, plan.seed),
        rehearsed_greedy=await fidelity(sampler, renderer, tasks, probes, plan.prompt, rehearse, plan.seed),
        external_calls=sampled.external_calls + greedy.external_calls + sum(map(len, probes)),
    )


async def real_success(
    sampler: Sampler,
    renderer: ChatRenderer,
    tasks: Sequence[Task],
    sampling: RoleSampling,
    limits: Limits,
    seed: int,
    samples: int = 1,
) -> Success:
    """``samples`` episodes a task, executed in its world."""
    runner = EpisodeRunner(
        sampler, renderer, EnvironmentResponder(WorldEnvironment), RuleScorer(), act=sampling, limits=limits
    )
    groups = await asyncio.gather(*(runner.run_group(task, samples, derive_seed("evaluation", seed)) for task in tasks))
    episodes = [episode for group in groups for episode in group.episodes]
    tallies: dict[str, list[list[bool]]] = defaultdict(list)
    for group in groups:
        own = [episode.success for episode in group.episodes if episode.success is not None]
        for key in ("all", *_kinds(group.task), f"family:{group.task.metadata.get('family', 'none')}"):
            tallies[key].append(own)
    overall = share(tallies.pop("all", []))
    return Success(
        success=overall.share,
        interval=(overall.low, overall.high),
        tasks=len(tasks),
        episodes=len(episodes),
        not_scored=len(episodes) - overall.count,
        by={key: share(own) for key, own in sorted(tallies.items())},
        ends=dict(sorted(Counter(episode.end.value for episode in episodes).items())),
        external_calls=sum(episode.external_calls for episode in episodes),
        shown=tuple({group.task.metadata.get("family"): group.episodes[0] for group in reversed(groups)}.values()),
    )


async def fidelity(
    sampler: Sampler,
    renderer: ChatRenderer,
    tasks: Sequence[Task],
    probes: Sequence[Sequence[Reference]],
    prompt: RehearsePrompt,
    sampling: RoleSampling,
    seed: int,
) -> Fidelity:
    """The share of rehearsed responses that equal the real world's to each task's probe calls.

    Each probe is asked after the world's own answers to the probes before it, so one wrong answer spoils no other.
    """

    async def one(task: Task, made: Sequence[Reference]) -> list[tuple[bool, bool]]:
        context = RehearseContext(renderer, prompt, task)
        results = []
        for number, probe in enumerate(made):
            context.ask(probe.call)
            own = derive_seed("fidelity", seed, task.id, number)
            sample = await sampler.sample(context.chat.prompt_ids(), sampling.params(own, renderer.stop_ids))
            parsed = parse_execution_result(renderer.decode(sample.completion_ids))
            results.append((parsed.error is None, parsed.error is None and same_json(parsed.response, probe.response)))
            context.tell(probe.response)
        return results

    answers = await asyncio.gather(*(one(task, made) for task, made in zip(tasks, probes, strict=True)))
    tallies: dict[str, list[list[bool]]] = defaultdict(list)
    for task, made, results in zip(tasks, probes, answers, strict=True):
        own: dict[str, list[bool]] = defaultdict(list)
        for probe, (_, right) in zip(made, results, strict=True):
            refused = isinstance(probe.response, dict) and "error" in probe.response
            for key in ("all", *_kinds(task), f"tool:{probe.call.name}", "errors" if refused else "answers"):
                own[key].append(right)
        for key, values in own.items():
            tallies[key].append(values)
    overall = share(tallies.pop("all", []))
    return Fidelity(
        fidelity=overall.share,
        interval=(overall.low, overall.high),
        calls=overall.count,
        malformed=sum(not parsed for results in answers for parsed, _ in results),
        by={key: share(values) for key, values in sorted(tallies.items())},
    )


def _kinds(task: Task) -> tuple[str, str]:
    name = task.world.name if task.world is not None else "none"
    return f"world:{name}", "held_out" if name in HELD_OUT else "in_training"


def share(outcomes: Iterable[Sequence[bool]]) -> Share:
    """Share of the right ones; ``outcomes`` is a sequence a task, since one task's outcomes are not independent.

    The interval is Wilson's where each task has one outcome, and otherwise that of a bootstrap over tasks. Where all
    outcomes agree a bootstrap sees no spread, and Wilson's over as many trials as tasks is taken.
    """
    tasks = [own for own in outcomes if own]
    right, count = sum(map(sum, tasks)), sum(map(len, tasks))
    if count == 0:
        return Share(share=0.0, low=0.0, high=1.0, count=0)
    mean = right / count
    if len(tasks) == count or right in (0, count):
        low, high = wilson(round(mean * len(tasks)), len(tasks))
    else:
        low, high = bootstrap(tasks)
    return Share(share=mean, low=low, high=high, count=count)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), z = 1.96."""
    if trials == 0:
        return 0.0, 1.0
    p, z = successes / trials, 1.959964
    middle = p + z * z / (2 * trials)
    spread = z * sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    low, high = (middle - spread) / (1 + z * z / trials), (middle + spread) / (1 + z * z / trials)
    return max(0.0, low), min(1.0, high)


def bootstrap(tasks: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """95 % percentile interval of the pooled share, resampling whole tasks (a cluster bootstrap; draws are seeded)."""
    rng = random.Random(derive_seed("bootstrap"))
    pairs = [(sum(own), len(own)) for own in tasks]
    means = []
    for _ in range(BOOTSTRAP_DRAWS):
        drawn = rng.choices(pairs, k=len(pairs))
        means.append(sum(right for right, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    edge = round(0.025 * BOOTSTRAP_DRAWS)
    return means[edge], means[-1 - edge]
