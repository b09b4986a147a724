import asyncio
import itertools
import socket
from collections.abc import Callable, Sequence

import pytest

from envace.chat.tools import canonical_json
from envace.episode import EpisodeRunner, Limits
from envace.errors import UserError
from envace.responders import make_responder
from envace.responders.base import Response
from envace.responders.environment import EnvironmentResponder
from envace.rewards.scorer import RuleScorer
from envace.roles.generate import RoleSampling
from envace.roles.rehearse import RehearsePrompt
from envace.seeds import derive_seed
from envace.types import CheckResult, EndReason, Episode, Role, Task, TurnScore
from envace.worlds import REGISTRY, World
from envace.worlds.tasks import build_tasks
from tests.scripted import ANSWERS, GOOD, RENDERER, TASK, Scripted, call, follow, result

PROMPT = RehearsePrompt("brief")
SAMPLING = RoleSampling(temperature=0.7)


def runner(sampler: Scripted, responder: object = "rehearsal", **options: object) -> EpisodeRunner:
    if isinstance(responder, str):
        second = Scripted([], sampler.rehearses)
        responder = make_responder(responder, sampler, RENDERER, PROMPT, SAMPLING, simulator=lambda: (second, RENDERER))
    return EpisodeRunner(sampler, RENDERER, responder, options.pop("scorer", RuleScorer()), **options)


async def run(
    acts: Sequence[str | Exception], rehearses: Sequence[str] = (), task: Task = TASK, **options: object
) -> Episode:
    return await runner(Scripted(acts, rehearses), **options).run(task, 0, 5)


async def test_two_turns_by_rehearsal():
    sampler = Scripted(GOOD, ANSWERS)
    episode = await runner(sampler).run(TASK, 1, 5)
    assert (episode.end, episode.reward, episode.external_calls) == (EndReason.COMPLETED, 1.0, 0)
    assert [g.role.value for g in episode.generations] == ["act", "rehearse", "act"] * 2
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


@pytest.mark.parametrize("responder", ["rehearsal", "simulator"])
async def test_the_kth_generation_has_the_kth_seed_whoever_answers(responder):
    sampler = Scripted(GOOD, ANSWERS)
    await runner(sampler, responder).run(TASK, 0, 5)
    policy = range(6) if responder == "rehearsal" else (0, 2, 3, 5)  # the simulator draws with the others
    assert [params.seed for params in sampler.params] == [derive_seed(5, k) for k in policy]


ASKED = [call()] * 9
FOUND = [result({"id": 1})] * 9


@pytest.mark.parametrize(
    ("acts", "rehearses", "options", "end", "code"),
    [
        (["<tool_call>x</tool_call>"], [], {}, EndReason.ACT_ERROR, "INVALID_TOOL_CALL_FORMAT"),
        ([call(tool="look")], [], {}, EndReason.CALL_ERROR, "TOOL_NOT_AVAILABLE"),
        ([call(name=3)], [], {}, EndReason.CALL_ERROR, "INVALID_PARAMETERS"),
        ([call()], ["nothing"], {}, EndReason.RESPONSE_ERROR, "NO_EXECUTION_RESULT_TAG_FOUND"),
        ([call()], [result({"id": 1}) + " and on …"], {}, EndReason.RESPONSE_ERROR, "TRUNCATED"),
        ([call()], [result({"error_tool_call": {"code": "X"}})], {}, EndReason.CALL_ERROR, "X"),
        ([call(tool="look")], [result({"error_tool_call": {"code": "Y"}})], {"check_calls": False}, EndReason.CALL_ERROR, "Y"),
        ([call("Eve")], [], {"responder": "replay"}, EndReason.RESPONSE_ERROR, "REPLAY_MISS"),
        (["so then …"], [], {}, EndReason.TRUNCATED, None),
        (["so then"], [], {"act": RoleSampling(max_tokens=4)}, EndReason.TRUNCATED, None),
        (ASKED, FOUND, {"limits": Limits(assistant_turns=2)}, EndReason.MAX_ASSISTANT_TURNS, None),
        (ASKED, FOUND, {"limits": Limits(calls=2)}, EndReason.MAX_CALLS, None),
        ([call() * 3], [], {"limits": Limits(parallel_calls=2)}, EndReason.MAX_CALLS, None),
        (ASKED, FOUND, {"limits": Limits(generations=3)}, EndReason.MAX_GENERATIONS, None),
        (ASKED, FOUND, {"limits": Limits(generations=3), "responder": "simulator"}, EndReason.MAX_GENERATIONS, None),
        (ASKED, FOUND, {"limits": Limits(context_tokens=200)}, EndReason.MAX_TOKENS, None),
        (ASKED, FOUND, {"limits": Limits(prompt_tokens=200)}, EndReason.MAX_TOKENS, None),
    ],
)  # fmt: skip
async def test_every_cut_has_its_reason_and_no_reward(acts, rehearses, options, end, code):
    episode = await run(acts, rehearses, **options)
    assert (episode.end, episode.reward, episode.success) == (end, 0.0, None)
    assert (episode.error.code if episode.error else None) == code
    assert [turn.reward for turn in episode.turns] == [0.0]


async def test_a_cut_turn_shows_what_was_met_and_keeps_the_earlier_turns():
    episode = await run([*GOOD[:3], "<tool_call>"], ANSWERS)
    assert (episode.end, episode.reward) == (EndReason.ACT_ERROR, 0.5)
    episode = await run([call("Ada"), "<tool_call>"], ANSWERS)
    assert [result.met for result in episode.turns[0].results] == [True, False]
    assert (episode.turns[0].reward, episode.reward) == (0.0, 0.0)


async def test_token_limits_bind_every_generation_of_both_roles():
    free = await run(GOOD, ANSWERS)
    first, rehearsal = free.generations[0], free.generations[1]
    # Room for the whole first completion but not for the Rehearse prompt, which is longer here.
    size = len(first.prompt_ids) + len(first.completion_ids) + 1
    assert len(rehearsal.prompt_ids) > size
    cut = await run(GOOD, ANSWERS, limits=Limits(context_tokens=size))
    assert (cut.end, [g.role for g in cut.generations]) == (EndReason.MAX_TOKENS, [Role.ACT])
    # What is left of the context is all that may be sampled, and filling it is a limit of the context's.
    sampler = Scripted(GOOD, ANSWERS)
    cut = await runner(sampler, limits=Limits(context_tokens=len(first.prompt_ids) + 5)).run(TASK)
    assert (cut.end, sampler.params[0].max_tokens) == (EndReason.MAX_TOKENS, 5)


async def test_user_turns_past_the_limit_are_not_played():
    episode = await run(GOOD, ANSWERS, limits=Limits(user_turns=1))
    assert (episode.end, episode.reward, len(episode.turns)) == (EndReason.MAX_USER_TURNS, 0.5, 1)


async def test_a_worlds_own_error_is_a_response_and_the_episode_goes_on():
    episode = await run([call("Ada"), "C1 C2", "C2"], [result({"error": {"code": "NOT_FOUND"}})])
    assert episode.end is EndReason.COMPLETED


class Raising:
    """A scorer whose judge is gone."""

    async def score_turn(self, *args: object) -> TurnScore:
        raise ConnectionError("judge is gone")


@pytest.mark.parametrize(
    ("acts", "options", "code"),
    [
        ([ConnectionError("gone")], {}, "ConnectionError"),
        ([TimeoutError("a request's own time-out")], {"limits": Limits(seconds=60)}, "TimeoutError"),
        (["Hello."], {"scorer": Raising()}, "ConnectionError"),
        (["<tool_call>"], {"scorer": Raising()}, "ConnectionError"),
    ],
)
async def test_faults_are_not_scored_and_never_failed(acts, options, code):
    episode = await run(acts, **options)
    assert (episode.end, episode.reward, episode.success, episode.error.code) == (EndReason.FAILED, None, None, code)


class Undecided:
    def __init__(self, required: bool) -> None:
        self.required = required

    async def score_turn(self, *args: object) -> TurnScore:
        own = CheckResult(check="judged", met=None, weight=1, required_for_next_turn=self.required)
        return TurnScore(results=(own,), reward=None)


async def test_an_undecided_requirement_is_a_failure_and_another_undecided_check_only_unscored():
    episode = await run(GOOD, ANSWERS, scorer=Undecided(required=True))
    assert (episode.end, episode.error.code, episode.reward) == (EndReason.FAILED, "UNDECIDED", None)
    assert (len(episode.turns), "judged" in episode.error.message) == (1, True)
    episode = await run(GOOD, ANSWERS, scorer=Undecided(required=False))
    assert (episode.end, episode.reward, len(episode.turns)) == (EndReason.COMPLETED, None, 2)


async def test_a_task_without_checks_is_played_to_its_end():
    episode = await run(GOOD, ANSWERS, task=TASK.model_copy(update={"checks": ()}))
    assert (episode.end, episode.reward) == (EndReason.COMPLETED, None)


async def test_an_episode_out_of_time_is_not_scored():
    episode = await run([call()] * 30, [result({"id": 1})] * 30, limits=Limits(seconds=0.01))
    assert (episode.end, episode.reward) == (EndReason.TIME_LIMIT, None)


class Real:
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
    world = Real({"Ada": {"id": "C1"}, "Bob": {"id": "C2"}}.__getitem__)
    episode = await run(GOOD, responder=EnvironmentResponder(lambda task: world))
    assert (episode.reward, episode.success, episode.external_calls, world.closed) == (1.0, True, 2, True)
    broken = Real({}.__getitem__)
    episode = await run(GOOD, responder=EnvironmentResponder(lambda task: broken))
    assert (episode.end, episode.reward, episode.success, broken.closed) == (EndReason.FAILED, None, None, True)
    cut = Real({"Ada": {"id": "C1"}}.__getitem__)
    episode = await run([call("Ada"), "<tool_call>"], responder=EnvironmentResponder(lambda task: cut))
    assert (episode.end, episode.success, cut.closed) == (EndReason.ACT_ERROR, False, True)


@pytest.mark.parametrize(
    ("name", "external", "roles"),
    [
        ("rehearsal", 0, {Role.ACT, Role.REHEARSE}),
        ("simulator", 2, {Role.ACT}),
        ("replay", 0, {Role.ACT}),
    ],
)
async def test_one_name_switches_who_answers(name, external, roles):
    episode = await run(GOOD, ANSWERS, responder=name)
    assert (episode.responder, episode.reward, episode.external_calls) == (name, 1.0, external)
    assert {g.role for g in episode.generations} == roles
    assert [record.response for record in episode.calls] == [{"id": "C1"}, {"id": "C2"}]


def of_worlds() -> list[Task]:
    return [task for world in REGISTRY for task in build_tasks(world, 8, 3, "test")]


async def test_the_reference_solution_succeeds_in_its_real_world():
    tasks = of_worlds()
    assert {len(task.user_turns) for task in tasks} == {0, 1}
    assert max(len(message.tool_calls) for task in tasks for message in task.solution) > 1
    for task in tasks:
        episode = await runner(follow(task), "environment").run(task)
        assert (episode.end, episode.reward, episode.success) == (EndReason.COMPLETED, 1.0, True), task.id
        assert [m.content for m in episode.messages if m.role == "tool"] == [
            m.content for m in task.solution if m.role == "tool"
        ]
        assert episode.external_calls == len(episode.calls)
    silent = await runner(Scripted(["Done."] * 3), "environment").run(
        next(t for t in tasks if t.world.goal != t.world.state)
    )
    assert silent.success is False


async def test_rehearsal_touches_no_world_and_no_network(monkeypatch):
    tasks = of_worlds()

    def forbidden(*args: object, **options: object) -> object:
        raise AssertionError("rehearsal reached outside the policy")

    monkeypatch.setattr(World, "__init__", forbidden)
    monkeypatch.setattr(World, "call", forbidden)
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    for task in tasks:
        episode = await runner(follow(task)).run(task)
        assert (episode.reward, episode.external_calls, episode.success) == (1.0, 0, None), task.id
        assert [canonical_json(r.response) for r in episode.calls] == [
            m.content for m in task.solution if m.role == "tool"
        ]
    guarded = await runner(follow(tasks[0]), "environment").run(tasks[0])
    assert (guarded.end, guarded.error.code) == (EndReason.FAILED, "AssertionError")


async def test_hundreds_of_episodes_share_a_sampler_each_in_its_own_role():
    sampler = Scripted(GOOD, ANSWERS)
    group = await runner(sampler).run_group(TASK, 300, seed=1)
    assert [episode.reward for episode in group.episodes] == [1.0] * 300
    assert [episode.index for episode in group.episodes] == list(range(300))
    assert [episode.seed for episode in group.episodes] == [derive_seed(1, "t", index) for index in range(300)]
    assert sampler.most[Role.ACT] > 200
    assert sampler.mixed > 20
    assert len({params.seed for params in sampler.params}) == 300 * 6


class Slow:
    """Answers nothing for a minute."""

    name = "slow"

    def __init__(self) -> None:
        self.opened = self.closed = 0

    async def open(self, task, limits):
        self.opened += 1
        return self

    async def respond(self, *args) -> Response:
        await asyncio.sleep(60)
        raise AssertionError

    async def close(self):
        self.closed += 1


async def test_cancelling_closes_every_session():
    slow = Slow()
    running = asyncio.ensure_future(runner(Scripted(GOOD), slow).run_group(TASK, 3, 0))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert slow.opened == slow.closed == 3


async def test_what_a_user_can_mend_stops_the_group_as_one_error():
    slow = Slow()

    class Missing(Scripted):
        async def sample(self, prompt_ids, params):
            if params.seed == derive_seed(derive_seed(0, "t", 2), 0):
                await asyncio.sleep(0.02)
                raise UserError("no such model")
            return await super().sample(prompt_ids, params)

    with pytest.raises(UserError, match="no such model"):
        await runner(Missing(GOOD), slow).run_group(TASK, 3, 0)
    assert slow.opened == slow.closed == 3


async def test_a_task_without_a_world_has_nothing_real_to_run_in():
    with pytest.raises(UserError, match="no `world`"):
        await run(GOOD, responder="environment")


async def test_a_rehearsal_session_holds_no_environment():
    responder = make_responder("rehearsal", Scripted([]), RENDERER, PROMPT, SAMPLING, environment=Real)
    session = await responder.open(TASK, Limits())
    assert set(vars(responder)) == {"name", "sampler", "renderer", "prompt", "sampling", "simulator"}
    assert set(vars(session)) == {"_responder", "_limits", "_context", "_seen"}
