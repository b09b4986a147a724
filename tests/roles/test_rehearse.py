import pytest

from envace.chat.parse import parse_execution_result
from envace.errors import UserError
from envace.roles.rehearse import RehearsePrompt, call_text, rehearse_message
from envace.types import Message, Reference, ToolCall, ToolSpec

FIND = ToolSpec(
    name="find",
    description="Finds a person.",
    parameters={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
)
CLOSE = ToolSpec(name="close")
CALL = ToolCall(name="find", arguments={"name": "Zoë"}, id="call-7")
CALL_TEXT = '{"name": "find", "arguments": {"name": "Zoë"}}'
RECORD = Reference(call=CALL, response={"id": 3, "vip": True})
SAID = [
    Message(role="system", content="Today is Monday."),
    Message(role="user", content="Find Zoë."),
    Message(role="assistant", content="Looking.", reasoning="She asks for Zoë.", tool_calls=(CALL,)),
    Message(role="tool", content='{"id": 3}', name="find"),
]


def test_brief_is_one_line_a_tool_and_one_a_record():
    prompt = RehearsePrompt("brief")
    assert prompt.system([FIND, CLOSE], [RECORD]) == Message(
        role="system",
        content=f'You are the tools.\nfind(name: string)\nclose()\nRecorded:\n{CALL_TEXT} -> {{"id": 3, "vip": true}}\n',
    )
    assert prompt.system([CLOSE], []).content == "You are the tools.\nclose()\n"
    assert prompt.pending(SAID, CALL, FIND) == Message(
        role="user", content=f"user: Find Zoë.\nassistant: Looking.\ncall: {CALL_TEXT}"
    )
    assert prompt.pending([], CALL, FIND).content == f"call: {CALL_TEXT}"


def test_full_shows_rules_schemas_records_and_what_was_said():
    prompt = RehearsePrompt("full")
    system = prompt.system([FIND], [RECORD]).content
    for text in (
        "INVALID_TOOL_CALL_FORMAT",
        "TOOL_NOT_AVAILABLE",
        "INVALID_PARAMETERS",
        "<execution_result>",
        '"description": "Finds a person."',
        f'{CALL_TEXT} -> {{"id": 3, "vip": true}}',
    ):
        assert text in system
    pending = prompt.pending(SAID, CALL, FIND).content
    for text in ("Today is Monday.", "Find Zoë.", "Looking.", CALL_TEXT, '"required": ["name"]'):
        assert text in pending
    assert "She asks" not in pending
    assert '{"id": 3}' not in pending
    assert "no tool of this name" in prompt.pending([], CALL, None).content


@pytest.mark.parametrize("style", ["full", "brief"])
def test_a_pending_call_has_the_text_of_its_record(style):
    prompt = RehearsePrompt(style)
    assert call_text(CALL) == CALL_TEXT
    assert CALL_TEXT in prompt.system([FIND], [RECORD]).content
    assert CALL_TEXT in prompt.pending([], CALL.model_copy(update={"id": None}), FIND).content


@pytest.mark.parametrize("style", ["full", "brief"])
def test_records_can_be_withheld(style):
    system = RehearsePrompt(style, references=False).system([FIND], [RECORD]).content
    assert "Recorded" not in system
    assert "Zoë" not in system


def test_prompts_of_ones_own(tmp_path):
    (tmp_path / "system.jinja").write_text("{{ signatures | join(';') }} {{ references | length }}", encoding="utf-8")
    (tmp_path / "pending.jinja").write_text("{{ messages | length }}/{{ schema }}/{{ call }}", encoding="utf-8")
    prompt = RehearsePrompt(str(tmp_path))
    assert prompt.system([FIND, CLOSE], [RECORD]).content == "find(name: string);close() 1"
    assert prompt.pending(SAID[1:], CALL, CLOSE).content == (f'2/{{"type": "object", "properties": {{}}}}/{CALL_TEXT}')


@pytest.mark.parametrize(
    ("pending", "message"),
    [
        ("{% for %}", r"pending\.jinja: line 1"),
        ("{{ calls }}", "'calls' is undefined"),
        ("{{ messages[0].content }}", "has no element 0"),
        (None, "neither full nor brief nor a folder"),
    ],
)
def test_a_broken_prompt_is_named(tmp_path, pending, message):
    (tmp_path / "system.jinja").write_text("x")
    if pending is not None:
        (tmp_path / "pending.jinja").write_text(pending)
    with pytest.raises(UserError, match=message):
        RehearsePrompt(str(tmp_path))


def test_a_style_that_does_not_exist():
    with pytest.raises(UserError, match="'breif'"):
        RehearsePrompt("breif")


def test_a_supervised_answer_parses_back():
    answer = rehearse_message({"name": "Zoë", "ids": [1, 2]})
    assert answer.content == '<execution_result>\n{"name": "Zoë", "ids": [1, 2]}\n</execution_result>'
    assert parse_execution_result(answer.content).response == {"name": "Zoë", "ids": [1, 2]}
