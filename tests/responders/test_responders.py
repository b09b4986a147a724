import itertools

import pytest

from envace.episode import Limits
from envace.errors import UserError
from envace.responders import make_responder
from envace.roles.generate import DoesNotFit, RoleSampling, TokenLimits
from envace.roles.rehearse import RehearsePrompt
from envace.types import Message, Reference, Role, Task, ToolCall
from tests.scripted import ANSWERS, RENDERER, TASK, Scripted, result

PROMPT = RehearsePrompt("brief")
SAMPLING = RoleSampling(temperature=0.5, top_p=0.9, top_k=7, max_tokens=300)
ADA, BOB = (ToolCall(name="find", arguments={"name": name}) for name in ("Ada", "Bob"))


def asks(*calls: ToolCall) -> Message:
    return Message(role="assistant", tool_calls=calls)


async def rehearse(*said: str, **options: object):
    """The responses to as many calls, one after the other, with the sampler that was asked."""
    sampler = Scripted([], said)
    responder = make_responder("rehearsal", sampler, RENDERER, PROMPT, SAMPLING)
    session = await responder.open(TASK, options.get("limits", Limits()))
    messages = [*TASK.messages, asks(*[ADA] * len(said))]
    answers = []
    for number in range(len(said)):
        answers.append(await session.respond(ADA, messages, 0, 100 + number))
        messages.append(Message(role="tool", content="{}"))
    return answers, sampler


async def test_a_rehearsed_response_is_the_policys_own_and_a_training_row():
    (answer,), sampler = await rehearse(ANSWERS[0])
    assert (answer.content, answer.error, answer.external, answer.sampled) == ({"id": "C1"}, None, False, True)
    row = answer.generation
    assert (row.role, row.turn, row.temperature, row.policy_version) == (Role.REHEARSE, 0, 0.5, 3)
    assert RENDERER.decode(row.completion_ids) == ANSWERS[0]
    params = sampler.params[0]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 300)
    assert (params.seed, params.stop_ids) == (100, RENDERER.stop_ids)


async def test_the_rehearse_conversation_grows_by_appending_and_tells_each_thing_once():
    answers, sampler = await rehearse(*ANSWERS, ANSWERS[0])
    for one, two in itertools.pairwise(answers):
        sequence = one.generation.prompt_ids + one.generation.completion_ids
        assert two.generation.prompt_ids[: len(sequence)] == sequence
    last = sampler.prompts[-1]
    assert last.count("Who is Ada?") == 1
    assert last.count("call: {") == 3
    assert last.count("<execution_result>") == 2  # its own earlier answers; what Act was shown is not said again


async def test_calls_of_the_tasks_first_messages_stand_there_as_answered():
    begun = (
        *TASK.messages,
        Message(role="assistant", content="Let me see.", tool_calls=(ADA,)),
        Message(role="tool", content='{"id": "C1"}', name="find"),
        Message(role="assistant", content="Ada is C1."),
        Message(role="user", content="And once more?"),
    )
    sampler = Scripted([], ["", ANSWERS[0]])  # the script counts the answer before as the first
    responder = make_responder("rehearsal", sampler, RENDERER, PROMPT, SAMPLING)
    session = await responder.open(TASK.model_copy(update={"messages": begun}), Limits())
    answer = await session.respond(ADA, begun, 0, 1)
    assert answer.content == {"id": "C1"}
    (prompt,) = sampler.prompts
    texts = ["Who is Ada?", "Let me see.", "call: {", ANSWERS[0], "Ada is C1.", "And once more?"]
    assert [prompt.count(text) for text in texts] == [1, 1, 2, 1, 1, 1]
    assert sorted(texts, key=prompt.index) == texts


@pytest.mark.parametrize(
    ("said", "code", "malformed"),
    [
        ("", "EMPTY_RESPONSE", True),
        ("It is C1.", "NO_EXECUTION_RESULT_TAG_FOUND", True),
        ("<execution_result>", "EXECUTION_RESULT_TAG_MALFORMED", True),
        ("<execution_result>{</execution_result>", "JSON_DECODE_ERROR", True),
        (result({}), "INVALID_EXECUTION_RESULT_TYPE", True),
        (result({"id": "C1"}) + "…", "TRUNCATED", True),
        (result({"error_tool_call": {"code": "INVALID_PARAMETERS", "message": ""}}), "INVALID_PARAMETERS", False),
        (result({"error_tool_call": "no"}), "ERROR", False),
        (result({"error": {"code": "NOT_FOUND"}}), None, False),
    ],
)
async def test_what_counts_as_an_answer(said, code, malformed):
    (answer,), _ = await rehearse(said)
    assert (answer.error, answer.malformed) == (code, malformed)
    assert answer.generation is not None  # a bad answer is a training row too
    if malformed:
        assert answer.content["error_tool_call"]["code"] == code


async def test_a_rehearse_prompt_past_the_limits_asks_nothing():
    with pytest.raises(DoesNotFit):
        await rehearse(ANSWERS[0], limits=TokenLimits(prompt_tokens=20))


async def test_a_simulator_is_external_and_gives_no_training_rows():
    policy, second = Scripted([]), Scripted([], ANSWERS)
    responder = make_responder("simulator", policy, RENDERER, PROMPT, SAMPLING, simulator=lambda: (second, RENDERER))
    session = await responder.open(TASK, Limits())
    answer = await session.respond(ADA, [*TASK.messages, asks(ADA)], 0, 1)
    assert (answer.content, answer.generation, answer.sampled, answer.external) == ({"id": "C1"}, None, True, True)
    assert (responder.name, len(policy.prompts), len(second.prompts)) == ("simulator", 0, 1)


def replayed(*references: tuple[ToolCall, object]) -> Task:
    recorded = tuple(Reference(call=call, response=response) for call, response in references)
    return TASK.model_copy(update={"references": recorded})


async def test_a_replay_answers_equal_calls_as_often_as_they_come_and_no_others():
    recorded = ToolCall(name="find", arguments={"n": 1, "deep": {"a": [1, 2], "b": None}})
    responder = make_responder("replay", Scripted([]), RENDERER, PROMPT, SAMPLING)
    session = await responder.open(replayed((recorded, {"id": 7}), (ADA, [])), Limits())

    async def ask(name: str, arguments: dict[str, object]):
        call = ToolCall(name=name, arguments=arguments)
        return await session.respond(call, [*TASK.messages, asks(call)], 0, 1)

    for same in ({"n": 1, "deep": {"a": [1, 2], "b": None}}, {"deep": {"b": None, "a": [1, 2]}, "n": 1.0}):
        answer = await ask("find", same)
        assert (answer.content, answer.error, answer.external, answer.sampled) == ({"id": 7}, None, False, False)
    assert (await ask("find", {"name": "Ada"})).content == []
    for name, other in (
        ("find", {"n": True, "deep": {"a": [1, 2], "b": None}}),
        ("find", {"n": 1, "deep": {"a": [2, 1], "b": None}}),
        ("find", {"n": 1}),
        ("look", {"name": "Ada"}),
    ):
        miss = await ask(name, other)
        assert (miss.error, miss.malformed) == ("REPLAY_MISS", True)
        assert miss.content["error_tool_call"]["code"] == "REPLAY_MISS"


async def test_an_environment_of_ones_own_is_opened_once_an_episode():
    class Service:
        tools = TASK.tools

        def __init__(self, task: Task) -> None:
            self.task, self.asked = task, []
            opened.append(self)

        async def call(self, call: ToolCall) -> object:
            self.asked.append(call)
            return {"n": len(self.asked)}

        def success(self, replies):
            return len(replies) == 1

        async def close(self) -> None:
            opened.remove(self)

    opened: list[Service] = []
    responder = make_responder("environment", Scripted([]), RENDERER, PROMPT, SAMPLING, environment=Service)
    one, two = await responder.open(TASK, Limits()), await responder.open(TASK, Limits())
    for session, count in ((one, 1), (one, 2), (two, 1)):
        answer = await session.respond(BOB, [], 0, 1)
        assert (answer.content, answer.external, answer.sampled) == ({"n": count}, True, False)
    assert (one.success(["x"]), one.success([])) == (True, False)
    await one.close()
    assert len(opened) == 1


def test_a_responder_that_cannot_be_made_says_why():
    with pytest.raises(UserError, match="second model"):
        make_responder("simulator", Scripted([]), RENDERER, PROMPT, SAMPLING)
    with pytest.raises(UserError, match="there are rehearsal, simulator, environment, replay"):
        make_responder("oracle", Scripted([]), RENDERER, PROMPT, SAMPLING)
