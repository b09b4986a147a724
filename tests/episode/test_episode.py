import asyncio
import itertools
import json
from collections.abc import Callable

import pytest

from envace.chat.render import ChatRenderer
from envace.engines.base import Sample, SamplingParams
from envace.episode import EpisodeRunner, Limits
from envace.responders.base import Response
from envace.responders.environment import EnvironmentResponder
from envace.responders.rehearsal import RehearsalResponder, RoleSampling
from envace.responders.replay import ReplayResponder
from envace.rewards.scorer import RuleScorer
from envace.roles.rehearse import RehearsePrompt
from envace.types import EndReason, Episode, Role, Task
from tests.chatml import tokenizer

RENDERER = ChatRenderer(tokenizer())
FIND = {
    "name": "find",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}
TASK = Task.model_validate(
    {
        "id": "t",
        "messages": [{"role": "user", "content": "Who is Ada?"}],
        "tools": [FIND],
        "user_turns": ["And Bob?"],
        "checks": [
            [
                {"kind": "call_made", "call": {"name": "find", "arguments": {"name": {"equals": "Ada"}}}},
                {"kind": "reply_contains", "facts": ["C1"], "required_for_next_turn": True},
            ],
            [{"kind": "reply_contains", "facts": ["C2"]}],
        ],
        "references": [
            {"call": {"name": "find", "arguments": {"name": "Ada"}}, "response": {"id": "C1"}},
            {"call": {"name": "find", "arguments": {"name": "Bob"}}, "response": {"id": "C2"}},
        ],
    }
)


def call(name: str = "Ada", tool: str = "find") -> str:
    return "<tool_call>\n" + json.dumps({"name": tool, "arguments": {"name": name}}) + "\n</tool_call>"


def result(value: object) -> str:
    return f"<execution_result>\n{json.dumps(value)}\n</execution_result>"


class Scripted:
    """Plays both roles from a script: the k-th Act, the k-th Rehearse completion of every episode."""

    def __init__(self, acts: list[str | Exception], rehearses: list[str] = ()) -> None:
        self.acts, self.rehearses = list(acts), list(rehearses)
        self.prompts: list[str] = []
        self.in_flight: set[str] = set()
        self.seen_together = 0
        self._now = 0

    async def sample(self, prompt_ids, params: SamplingParams) -> Sample:
        text = RENDERER.decode(prompt_ids)
        self.prompts.append(text)
        rehearsing = "You are the tools." in text
        script = self.rehearses if rehearsing else self.acts
        said = script[text.count("<|im_start|>assistant") - 1]
        self._now += 1
        self.seen_together = max(self.seen_together, self._now)
        await asyncio.sleep(0.001)
        self._now -= 1
        if isinstance(said, Exception):
            raise said
        ids = RENDERER.encode(said)
        if said.endswith("…"):
            return Sample(ids, (-1.0,) * len(ids), "length")
        ids = (*ids, RENDERER.stop_ids[0])
        return Sample(ids, (-1.0,) * len(ids), "stop", 3)


def runner(sampler: Scripted, responder: object = None, **options: object) -> EpisodeRunner:
    rehearsal = RehearsalResponder(sampler, RENDERER, RehearsePrompt("brief"), RoleSampling(temperature=0.7))
    return EpisodeRunner(sampler, RENDERER, responder or rehearsal, RuleScorer(), **options)


async def run(acts: list[str | Exception], rehearses: list[str] = (), task: Task = TASK, **options: object) -> Episode:
    return await runner(Scripted(acts, rehearses), **options).run(task, 0, 5)


GOOD = [call("Ada"), "Ada is C1.", call("Bob"), "Bob is C2."]
ANSWERS = [result({"id": "C1"}), result({"id": "C2"})]


async def test_two_turns_by_rehearsal():
    sampler = Scripted(GOOD, ANSWERS)
    episode = await runner(sampler).run(TASK, 1, 5)
    assert (episode.end, episode.reward, episode.external_calls) == (EndReason.COMPLETED, 1.0, 0)
    assert [g.role for g in episode.generations] == [
        Role.ACT,
        Role.REHEARSE,
        Role.ACT,
        Role.ACT,
        Role.REHEARSE,
        Role.ACT,
    ]
    assert [g.turn for g in episode.generations] == [0, 0, 0, 1, 1, 1]
    assert {g.temperature for g in episode.generations if g.role is Role.REHEARSE} == {0.7}
    assert {g.policy_version for g in episode.generations} == {3}
    assert [m.role for m in episode.messages] == ["user", "assistant", "tool", "assistant"] * 2
    assert Episode.model_validate_json(episode.model_dump_json()) == episode
    for role in Role:  # each role's context grows by appending alone
        own = [g for g in episode.generations if g.role is role]
        for earlier, later in itertools.pairwise(own):
            sequence = earlier.prompt_ids + earlier.completion_ids
            assert later.prompt_ids[: len(sequence)] == sequence
    # What the policy is told in its Rehearse role: records, what was said since the last call, the pending call.
    last = next(p for p in reversed(sampler.prompts) if "You are the tools." in p)
    assert '{"name": "find", "arguments": {"name": "Bob"}} -> {"id": "C2"}' in last
    assert "assistant: Ada is C1.\nuser: And Bob?\ncall: " in last
    assert last.count("Who is Ada?") == 1


async def test_an_unmet_requirement_ends_the_episode_before_the_next_turn():
    episode = await run([call("Ada"), "No idea."], ANSWERS)
    assert (episode.end, episode.reward) == (EndReason.REQUIREMENT_UNMET, 0.25)
    assert len(episode.turns) == 1


async def test_parallel_calls_are_answered_in_order():
    both = call("Ada") + "\n" + call("Bob")
    episode = await run([both, "C1 and C2", "C2"], ANSWERS)
    assert [(r.call.arguments["name"], r.response["id"]) for r in episode.calls] == [("Ada", "C1"), ("Bob", "C2")]
    assert [m.role for m in episode.messages[:5]] == ["user", "assistant", "tool", "tool", "assistant"]
    assert episode.reward == 1.0


@pytest.mark.parametrize(
    ("acts", "rehearses", "options", "end", "code"),
    [
        (["<tool_call>x</tool_call>"], [], {}, EndReason.ACT_ERROR, "INVALID_TOOL_CALL_FORMAT"),
        ([call(tool="look")], [], {}, EndReason.CALL_ERROR, "TOOL_NOT_AVAILABLE"),
        ([call(name=3)], [], {}, EndReason.CALL_ERROR, "INVALID_PARAMETERS"),
        ([call()], ["nothing"], {}, EndReason.RESPONSE_ERROR, "NO_EXECUTION_RESULT_TAG_FOUND"),
        ([call()], [result({"error_tool_call": {"code": "X"}})], {}, EndReason.CALL_ERROR, "X"),
        ([call(tool="look")], [result({"error_tool_call": {"code": "Y"}})], {"check_calls": False}, EndReason.CALL_ERROR, "Y"),
        (["so then …"], [], {}, EndReason.TRUNCATED, None),
        ([call()] * 9, [result({"id": 1})] * 9, {"limits": Limits(assistant_turns=2)}, EndReason.MAX_ASSISTANT_TURNS, None),
        ([call()] * 9, [result({"id": 1})] * 9, {"limits": Limits(calls=2)}, EndReason.MAX_CALLS, None),
        ([call() * 3], [], {"limits": Limits(parallel_calls=2)}, EndReason.MAX_CALLS, None),
        ([call()] * 9, [result({"id": 1})] * 9, {"limits": Limits(generations=3)}, EndReason.MAX_GENERATIONS, None),
        ([call()] * 9, [result({"id": 1})] * 9, {"limits": Limits(context_tokens=200)}, EndReason.MAX_TOKENS, None),
    ],
)  # fmt: skip
async def test_every_cut_has_its_reason_and_no_reward(acts, rehearses, options, end, code):
    episode = await run(acts, rehearses, **options)
    assert (episode.end, episode.reward) == (end, 0.0)
    assert (episode.error.code if episode.error else None) == code


async def test_a_worlds_own_error_is_a_response_and_the_episode_goes_on():
    episode = await run([call("Ada"), "C1 C2", "C2"], [result({"error": {"code": "NOT_FOUND"}})])
    assert episode.end is EndReason.COMPLETED


async def test_faults_are_not_scored_and_never_failed():
    episode = await run([ConnectionError("engine is gone")])
    assert (episode.end, episode.reward) == (EndReason.FAILED, None)
    assert episode.error.message == "engine is gone"


async def test_an_episode_out_of_time_is_not_scored():
    episode = await run([call()] * 30, [result({"id": 1})] * 30, limits=Limits(seconds=0.01))
    assert (episode.end, episode.reward) == (EndReason.TIME_LIMIT, None)


async def test_replay_answers_what_was_recorded_and_nothing_else():
    episode = await run(GOOD, responder=ReplayResponder())
    assert (episode.reward, episode.external_calls, {g.role for g in episode.generations}) == (1.0, 0, {Role.ACT})
    missed = await run([call("Eve")], responder=ReplayResponder())
    assert (missed.end, missed.error.code, missed.reward) == (EndReason.RESPONSE_ERROR, "REPLAY_MISS", 0.0)


class World:
    """A real world's seam, with a fault to order."""

    tools = TASK.tools

    def __init__(self, answer: Callable[[str], object]) -> None:
        self.answer, self.closed = answer, False

    async def call(self, made):
        return self.answer(made.arguments["name"])

    def success(self, replies):
        return replies == ["Ada is C1.", "Bob is C2."]

    async def close(self):
        self.closed = True


async def test_an_environment_answers_and_every_call_is_counted():
    world = World({"Ada": {"id": "C1"}, "Bob": {"id": "C2"}}.__getitem__)
    episode = await run(GOOD, responder=EnvironmentResponder(lambda task: world))
    assert (episode.reward, episode.success, episode.external_calls, world.closed) == (1.0, True, 2, True)
    broken = World({}.__getitem__)
    episode = await run(GOOD, responder=EnvironmentResponder(lambda task: broken))
    assert (episode.end, episode.reward, episode.success, broken.closed) == (EndReason.FAILED, None, None, True)


async def test_a_simulator_is_external_and_gives_no_training_rows():
    second = Scripted([], ANSWERS)
    simulator = RehearsalResponder(second, RENDERER, RehearsePrompt("brief"), RoleSampling(), simulator=True)
    episode = await run(GOOD, responder=simulator)
    assert (episode.reward, episode.external_calls, {g.role for g in episode.generations}) == (1.0, 2, {Role.ACT})


async def test_hundreds_of_episodes_share_a_sampler_each_in_its_own_role():
    sampler = Scripted(GOOD, ANSWERS)
    group = await runner(sampler).run_group(TASK, 300, seed=1)
    assert [episode.reward for episode in group.episodes] == [1.0] * 300
    assert [episode.index for episode in group.episodes] == list(range(300))
    assert len({episode.seed for episode in group.episodes}) == 300
    assert sampler.seen_together > 200


async def test_cancelling_closes_the_session():
    closed = asyncio.Event()

    class Slow:
        name = "slow"

        async def open(self, task):
            return self

        async def respond(self, *args) -> Response:
            await asyncio.sleep(60)

        async def close(self):
            closed.set()

    running = asyncio.ensure_future(run(GOOD, responder=Slow()))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert closed.is_set()
