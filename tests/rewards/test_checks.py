import pytest
from pydantic import TypeAdapter

from envace.errors import UserError
from envace.rewards.checks import TurnView, argument_matches, check_met, holds_fact
from envace.rewards.scorer import RuleScorer, episode_reward, require_scorable, turn_reply
from envace.types import CallRecord, Check, Message, Near, Reference, Task, ToolCall, ToolSpec

PARSE = TypeAdapter(Check)


def record(tool: str, response: object = None, error: str | None = None, **arguments: object) -> CallRecord:
    call = ToolCall(name=tool, arguments=arguments)
    return CallRecord(turn=0, call=call, response=response or {"ok": True}, responder="replay", error=error)


def met(check: dict[str, object], calls: list[CallRecord] | None = None, reply: str = "", **view: object) -> bool:
    return check_met(PARSE.validate_python(check), TurnView(calls or [], reply, **view))


CALLS = [record("find", name="Ada"), record("pay", amount=10, to={"id": "C1"}, tags=["a"], fast=True), record("close")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, True),
        ({"amount": {"equals": 10}}, True),
        ({"amount": {"equals": 10.0}}, True),
        ({"amount": {"equals": "10"}}, False),
        ({"fast": {"equals": True}}, True),
        ({"fast": {"equals": 1}}, False),
        ({"to": {"equals": {"id": "C1"}}}, True),
        ({"to": {"equals": {"id": "C2"}}}, False),
        ({"tags": {"equals": ["a"]}}, True),
        ({"amount": {"one_of": [9, 10]}}, True),
        ({"amount": {"one_of": [9, 11]}}, False),
        ({"amount": {"number": 10.4, "tolerance": 0.5}}, True),
        ({"amount": {"number": 10.6, "tolerance": 0.5}}, False),
        ({"fast": {"number": 1}}, False),
        ({"fast": {"one_of": [1, 0]}}, False),
        ({"tags": {"equals": ["a", "b"]}}, False),
        ({"to": {"equals": {"id": "C1", "more": None}}}, False),
        ({"to": {"number": 1}}, False),
        ({"to": {"regex": r'\{"id": "C\d"\}'}}, True),
        ({"amount": {"regex": "1."}}, True),
        ({"amount": {"regex": "1"}}, False),
        ({"amount": {"any": True}}, True),
        ({"missing": {"any": True}}, False),
    ],
)
def test_call_made_by_argument(arguments, expected):
    call = {"name": "pay", "arguments": arguments}
    assert met({"kind": "call_made", "call": call}, CALLS) is expected
    assert met({"kind": "call_not_made", "call": call}, CALLS) is not expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.1, True), (1.11, False), ("1.1", True), ("0.9", True), ("1,1", False), (" 1", False), ("1_0", False),
        ("one", False), ("NaN", False), (float("inf"), False), (10**400, False), ("1e999", False), (None, False),
    ],
)  # fmt: skip
def test_numbers_within_a_tolerance(value, expected):
    # 1.1 - 1 is 0.10000000000000009 in floats.
    assert argument_matches(Near(number=1, tolerance=0.1), value) is expected


@pytest.mark.parametrize(("value", "expected"), [(9007199254740000, True), (9007199254740001, False)])
def test_without_a_tolerance_the_last_digit_counts(value, expected):
    call = {"name": "pay", "arguments": {"amount": {"number": 9007199254740000}}}
    assert met({"kind": "call_made", "call": call}, [record("pay", amount=value)]) is expected


def test_a_refused_call_was_not_made():
    refused = [record("pay", error="INVALID_PARAMETERS", amount=10)]
    assert not met({"kind": "call_made", "call": {"name": "pay"}}, refused)


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["find", "pay", "close"], True), (["find", "close"], True), (["pay", "find"], False), (["find", "find"], False)],
)
def test_calls_in_order(names, expected):
    assert met({"kind": "calls_in_order", "calls": [{"name": name} for name in names]}, CALLS) is expected


def test_only_calls_refuses_what_was_not_asked():
    allowed = [{"name": "pay", "arguments": {"amount": {"equals": 10}}}]
    check = {"kind": "only_calls", "names": ["pay"], "allowed": allowed}
    assert met(check, CALLS)
    assert not met(check, [*CALLS, record("pay", amount=11)])
    assert met(check, [])


@pytest.mark.parametrize(
    ("text", "fact", "expected"),
    [
        ("Order O17 is shipped.", "o17", True),
        ("Order O175 is shipped.", "O17", False),
        ("It costs 17.", "17", True),
        ("It costs 17.50", "17", False),
        ("It costs 1.17", "17", False),
        ("It costs (17), really", "17", True),
        ("STRASSE", "straße", True),
        ("Order O17", "17", False),
        ("Total: 17, thanks", "17", True),
        ("It costs 1,017", "17", False),
        ("**17**", "17", True),
        ("ÉCLAIR ordered", "éclair", True),
        ("cafe\u0301 table", "café", True),
        ("cafe\u0301 table", "cafe", False),
        ("in Room\u00a0\n 12.", "room 12", True),
        ("Ann's order", "Ann", True),
        ("a+b", "a+b", True),
        ("aab", "a+b", False),
        ("", "17", False),
    ],
)
def test_facts_are_whole_words_in_any_case(text, fact, expected):
    assert holds_fact(text, fact) is expected


def test_reply_checks():
    assert met({"kind": "reply_contains", "facts": ["O17", "late"]}, reply="O17 is late")
    assert not met({"kind": "reply_contains", "facts": ["O17", "late"]}, reply="O17 is on time")
    assert met({"kind": "reply_matches", "pattern": r"which \w+\?"}, reply="Please say which order?")


def test_responses_against_schema_and_records():
    tool = ToolSpec(name="find", returns={"type": "object", "required": ["id"]})
    assert met({"kind": "response_valid"}, [record("find", {"id": 1})], tools=[tool])
    assert not met({"kind": "response_valid", "tool": "find"}, [record("find", {"x": 1})], tools=[tool])
    with pytest.raises(UserError, match="'pay' has no `returns`"):
        met({"kind": "response_valid", "tool": "pay"}, CALLS, tools=[tool])
    # A refused call or a malformed response is not a valid one, but only of the tool asked about.
    assert not met({"kind": "response_valid"}, [record("pay", error="INVALID_PARAMETERS")], tools=[tool])
    assert met({"kind": "response_valid", "tool": "find"}, [record("pay", error="X")], tools=[tool])
    for returns, reason in (({"$ref": "#/$defs/none"}, r"mend its \$ref"), ({"type": "thing"}, "not a JSON Schema")):
        with pytest.raises(UserError, match=f"tool 'find', returns: .*{reason}"):
            met({"kind": "response_valid"}, [record("find", {})], tools=[tool.model_copy(update={"returns": returns})])
    known = Reference(call=ToolCall(name="find", arguments={"a": 1}), response={"id": 1})
    assert met({"kind": "response_consistent"}, [record("find", {"id": 1}, a=1)], references=[known])
    assert not met({"kind": "response_consistent"}, [record("find", {"id": 2}, a=1)], references=[known])
    assert met({"kind": "response_consistent"}, [record("find", {"id": 2}, a=2)], references=[known])


def task(*turns: list[dict[str, object]]) -> Task:
    return Task.model_validate(
        {
            "id": "t",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"name": "pay"}],
            "user_turns": ["and?"] * (len(turns) - 1),
            "checks": turns,
        }
    )


SAID = [Message(role="user", content="hi"), Message(role="assistant", content="O17 it is")]
FOUND = {"kind": "reply_contains", "facts": ["O17"], "weight": 3}
PAID = {"kind": "call_made", "call": {"name": "pay"}, "weight": 1, "required_for_next_turn": True}
JUDGED = {"kind": "judge", "question": "polite?", "weight": 1}


async def test_turn_reward_is_the_met_share_of_the_weights():
    score = await RuleScorer().score_turn(task([FOUND, PAID]), 0, SAID, [])
    assert score.reward == 0.75
    assert not score.may_continue
    assert (await RuleScorer("all").score_turn(task([FOUND, PAID]), 0, SAID, [])).reward == 0
    assert (await RuleScorer("all").score_turn(task([FOUND]), 0, SAID, [])).reward == 1


class FakeJudge:
    def __init__(self, verdict: object) -> None:
        self.verdict = verdict

    async def judge(self, *args: object) -> list[object]:
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict


@pytest.mark.parametrize("verdict", [[None], None, [], [True, True], TimeoutError(), ValueError("bad JSON")])
async def test_an_undecided_check_is_not_scored_and_never_failed(verdict):
    score = await RuleScorer(judge=FakeJudge(verdict)).score_turn(task([FOUND, JUDGED]), 0, SAID, [])
    assert score.reward is None
    assert score.results[1].met is None
    assert episode_reward([score], 2) is None


@pytest.mark.parametrize(("verdict", "reward"), [([True], 1.0), ([False], 0.75)])
async def test_a_judges_verdict_counts(verdict, reward):
    score = await RuleScorer(judge=FakeJudge(verdict)).score_turn(task([FOUND, JUDGED]), 0, SAID, [])
    assert score.reward == reward


class PoliteJudge:
    """Says yes to one question alone."""

    async def judge(self, task, turn, messages, calls, items):
        return [item.question == "polite?" for item in items]


async def test_verdicts_go_to_their_own_items_among_rule_checks():
    checks = [{**JUDGED, "id": "manners"}, PAID, {**JUDGED, "question": "rude?", "weight": 2}, FOUND]
    score = await RuleScorer(judge=PoliteJudge()).score_turn(task(checks), 0, SAID, [])
    assert [(result.check, result.met) for result in score.results] == [
        ("manners", True), ("call_made-1", False), ("judge-2", False), ("reply_contains-3", True),
    ]  # fmt: skip
    assert score.reward == pytest.approx(4 / 7)


@pytest.mark.parametrize("reward", ["fraction", "all"])
async def test_without_anything_to_score_by_a_turn_is_not_scored(reward):
    for checks in ([], [{**FOUND, "weight": 0}]):
        assert (await RuleScorer(reward).score_turn(task(checks), 0, SAID, [])).reward is None
    assert (await RuleScorer(reward).score_turn(task([]).model_copy(update={"checks": ()}), 0, SAID, [])).reward is None


async def test_a_check_of_weight_zero_gates_without_paying():
    score = await RuleScorer().score_turn(task([FOUND, {**PAID, "weight": 0}]), 0, SAID, [])
    assert (score.reward, score.may_continue) == (1, False)


async def test_an_undecided_requirement_does_not_let_the_episode_go_on():
    gate = {**JUDGED, "required_for_next_turn": True}
    score = await RuleScorer(judge=FakeJudge([None])).score_turn(task([FOUND, gate]), 0, SAID, [])
    assert not score.may_continue


async def test_turns_never_reached_add_nothing():
    score = await RuleScorer().score_turn(task([FOUND, PAID], [PAID]), 0, SAID, [])
    assert episode_reward([score], 2) == 0.375
    assert episode_reward([], 2) == 0


def test_tasks_that_cannot_be_scored_are_named_before_anything_runs():
    with pytest.raises(UserError, match="'t', turn 1: it needs a check"):
        require_scorable([task([FOUND], [])])
    with pytest.raises(UserError, match="no judge is set"):
        require_scorable([task([JUDGED])])
    require_scorable([task([JUDGED])], FakeJudge([True]))
    bare, typed = ({"name": "a"}, {"name": "b", "returns": {"type": "object"}})
    checked = task([FOUND, {"kind": "response_valid", "tool": "a"}]).model_dump()
    for tool in ("a", "c", None):
        checked["checks"][0][1]["tool"] = tool
        with pytest.raises(UserError, match="no `returns` schema"):
            require_scorable([Task.model_validate({**checked, "tools": [bare] if tool is None else [bare, typed]})])
    checked["checks"][0][1]["tool"] = "b"
    require_scorable([Task.model_validate({**checked, "tools": [bare, typed]})])


def test_the_reply_is_of_this_turn_alone():
    assert turn_reply([*SAID, Message(role="user", content="more")]) == ""
    assert turn_reply(SAID) == "O17 it is"
