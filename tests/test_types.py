import pytest
from pydantic import TypeAdapter, ValidationError

from envace.types import Check, Generation, Message, Reference, Role, Task, ToolCall, ToolSpec

PAY = {
    "name": "pay",
    "parameters": {
        "properties": {"amount": {"type": "integer"}},
        "required": ["amount"],
        "additionalProperties": False,
    },
}
GOOD = {
    "id": "t",
    "messages": [{"role": "user", "content": "Pay."}],
    "tools": [PAY],
    "checks": [[{"kind": "call_made", "call": {"name": "pay"}}]],
}


def refusal(kind, value) -> str:
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(kind).validate_python(value)
    error = raised.value.errors()[0]
    return ".".join(map(str, error["loc"])) + ": " + error["msg"].removeprefix("Value error, ")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_no_number_is_infinite(bad):
    assert refusal(Check, {"kind": "judge", "question": "?", "weight": bad}).startswith("judge.weight: ")
    assert refusal(Reference, {"call": {"name": "f"}, "response": [bad]}).startswith("response: ")
    assert refusal(ToolCall, {"name": "f", "arguments": {"x": bad}}).startswith("arguments.x: ")
    assert refusal(Task, {**GOOD, "metadata": {"x": bad}}).startswith("metadata.x: ")
    world = {"name": "orders", "state": {"orders": [{"order_id": bad}]}, "goal": {}}
    assert refusal(Task, {**GOOD, "world": world}).startswith("world.state.orders.0.order_id: ")
    drawn = {"turn": 0, "prompt_ids": (), "completion_ids": (1,), "logprobs": (bad,), "stop_reason": "stop"}
    assert refusal(Generation, {"role": Role.ACT, **drawn}).startswith("logprobs.0: ")
    with pytest.raises(ValidationError, match="response"):
        Reference.model_validate_json('{"call": {"name": "f"}, "response": 1e999}')


def test_weights_can_be_added_up():
    assert refusal(Check, {"kind": "judge", "question": "?", "weight": 1e308}).startswith("judge.weight: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"x": "\\ud800"}', "arguments.x: half a character"),
        ('{"\\ud800": 1}', "arguments.\ufffd\ufffd\ufffd.[key]: half a character"),
        ('{"x": ' + "[" * 200 + "]" * 200 + "}", "arguments.x: nested more than 100 deep"),
        ("[" * 5000, ": function.arguments: not JSON: nested more than 100 deep"),
        ('{"x": NaN}', "arguments.x: nan is not a number"),
        ('{"x": 1e999}', "arguments.x: inf is not a number"),
        ('{"x": 1, "x": 2}', ": function.arguments: not JSON: 'x' is given more than once"),
        ("[1]", "arguments: Input should be a valid dictionary"),
        ("{x}", ": function.arguments: not JSON: Expecting property name"),
    ],
)
def test_arguments_in_text_that_are_no_object_are_named(arguments, message):
    assert refusal(ToolCall, {"id": "c", "function": {"name": "f", "arguments": arguments}}).startswith(message)


def test_openais_form_of_a_call():
    call = ToolCall.model_validate({"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}})
    assert call == ToolCall(name="f", arguments={"x": 1}, id="c")
    assert ToolCall.model_validate({"function": {"name": "f", "arguments": ""}}).arguments == {}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "array"}, "parameters: arguments are an object, so its type must be 'object', not 'array'"),
        ({"type": ["string", "null"]}, "parameters: arguments are an object"),
        (True, "parameters: Input should be a valid dictionary"),
        ({"properties": {"x": {"type": "int"}}}, "parameters: not a JSON Schema: properties/x/type: "),
        ({"default": float("nan")}, "parameters.default: nan is not a number"),
    ],
)
def test_a_tool_whose_schema_is_none_is_named(parameters, message):
    assert refusal(ToolSpec, {"name": "f", "parameters": parameters}).startswith(message)
    assert refusal(Task, {**GOOD, "tools": [{"function": {"name": "f", "parameters": parameters}}]}).startswith(
        "tools.0." + message
    )


def test_schemas_that_describe_an_object_among_others():
    for parameters in ({}, {"type": ["object", "null"]}, {"type": "object"}, {"properties": {}}):
        assert ToolSpec(name="f", parameters=parameters).parameters == parameters
    assert refusal(ToolSpec, {"name": "f", "returns": {"type": "thing"}}).startswith("returns: not a JSON Schema")
    assert ToolSpec(name="f", returns={"type": "array"}).returns == {"type": "array"}


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"kind": "reply_matches", "pattern": "("}, "reply_matches.pattern: '(' is not a regular expression: "),
        (
            {"kind": "call_made", "call": {"name": "f", "arguments": {"x": {"regex": "a{99999999999}"}}}},
            "call_made.call.arguments.x.regex.regex: 'a{99999999999}' is not a regular expression: ",
        ),
        (
            {"kind": "call_made", "call": {"name": "f", "arguments": {"x": {"equal": 1}}}},
            "call_made.call.arguments.x: write one of equals, one_of, number, regex, any",
        ),
        (
            {"kind": "call_made", "call": {"name": "f", "arguments": {"x": 1}}},
            "call_made.call.arguments.x: write one of equals, one_of, number, regex, any",
        ),
        (
            {"kind": "call_made", "call": {"name": "f", "arguments": {"x": {"one_of": []}}}},
            "call_made.call.arguments.x.one_of.one_of: ",
        ),
        ({"kind": "reply_contains", "facts": ["a", " \n"]}, "reply_contains.facts.1: a fact without a word"),
    ],
)
def test_a_check_that_nothing_could_meet_is_named(check, message):
    assert refusal(Check, check).startswith(message)


def pay(**arguments):
    return {"name": "pay", "arguments": arguments}


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"kind": "call_made", "call": {"name": "play"}}, "call_made: the task declares no tool 'play'; it has pay"),
        ({"kind": "call_not_made", "call": {"name": "play"}}, "call_not_made: the task declares no tool 'play'"),
        ({"kind": "calls_in_order", "calls": [pay(), {"name": "play"}]}, "calls_in_order: the task declares no tool"),
        ({"kind": "only_calls", "names": ["play"]}, "only_calls: the task declares no tool 'play'"),
        ({"kind": "only_calls", "names": ["pay"], "allowed": [{"name": "play"}]}, "only_calls: the task declares no"),
        (
            {"kind": "call_made", "call": pay(amuont={"any": True})},
            "call_made: pay: no call can have this argument 'amuont': ",
        ),
        (
            {"kind": "calls_in_order", "calls": [pay(amount={"equals": "3"})]},
            "calls_in_order: pay: no call can have this argument 'amount': '3' is",
        ),
        (
            {"kind": "only_calls", "names": ["pay"], "allowed": [pay(amount={"one_of": [None]})]},
            "only_calls: pay: no call",
        ),
    ],
)
def test_a_check_beside_the_tasks_tools_is_named(check, message):
    assert refusal(Task, {**GOOD, "checks": [[{"kind": "judge", "question": "?"}, check]]}).startswith(
        ": checks.0.1." + message
    )


@pytest.mark.parametrize(
    "check",
    [
        {"kind": "call_made", "call": pay(amount={"equals": 3})},
        {"kind": "call_made", "call": pay(amount={"one_of": ["3", 3]})},
        {"kind": "call_made", "call": pay(amount={"number": 3})},
        {"kind": "call_made", "call": pay(amount={"regex": "3"})},
        {"kind": "call_not_made", "call": pay(amount={"equals": "all"})},
        {"kind": "only_calls", "names": ["pay"]},
    ],
)
def test_a_check_that_can_be_met_is_kept(check):
    task = Task.model_validate({**GOOD, "checks": [[check]]})
    assert Task.model_validate_json(task.model_dump_json()) == task
    assert Task.model_validate(task.__dict__) == task


CALLED = {"role": "assistant", "tool_calls": [pay(amount=1), pay(amount=2)]}
TOLD = {"role": "tool", "content": "{}"}
USER = {"role": "user", "content": "Pay."}


def test_a_response_to_no_call_is_named():
    kept = Task.model_validate({**GOOD, "messages": [USER, CALLED, TOLD, TOLD, USER], "solution": [CALLED, TOLD]})
    assert kept.messages[3] == Message(role="tool", content="{}")
    for messages, position in (([TOLD, USER], 0), ([USER, CALLED, TOLD, TOLD, TOLD, USER], 4)):
        assert refusal(Task, {**GOOD, "messages": messages}).startswith(f": messages.{position}: a tool message that")
    assert refusal(Task, {**GOOD, "solution": [TOLD]}).startswith(": solution.0: a tool message that")


def test_facts_for_turns_there_are_not_are_named():
    world = {"name": "orders", "state": {}, "goal": {}, "facts": [["a"], ["b"]]}
    assert refusal(Task, {**GOOD, "world": world}) == ": world.facts: 2 entries for 1 user turns"
