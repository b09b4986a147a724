"""Chat templates chosen by a setting."""

import pytest
from transformers import AutoTokenizer

from envace.chat.settings import ChatSettings
from envace.engines.local.engine import LocalEngine, LocalEngineSettings
from envace.errors import UserError
from envace.types import Message, ToolCall, ToolSpec
from tests.chatml import save_policy, tokenizer

BARE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # noqa: E501
TOOL = ToolSpec(
    name="find", description="Finds.", parameters={"type": "object", "properties": {"name": {"type": "string"}}}
)
ASKED = [Message(role="system", content="Be brief."), Message(role="user", content="Who is Ada?")]
CALLED = Message(role="assistant", content="", tool_calls=(ToolCall(name="find", arguments={"name": "Ada"}),) * 2)


def bare():
    without = tokenizer()
    without.chat_template = BARE
    return without


def test_a_model_whose_template_ignores_tools_gets_one_that_shows_them():
    assert not ChatSettings().renderer(bare()).supports_tools
    renderer = ChatSettings(template="chatml-tools").renderer(bare())
    assert renderer.supports_tools and renderer.append_only
    told = [Message(role="tool", content='{"id":"C1"}'), Message(role="tool", content="{}")]
    text = renderer.render([*ASKED, CALLED, *told], [TOOL], prompt=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools.")
    assert '{"name": "find", "description": "Finds.", "parameters": {"type": "object"' in text
    call = '<tool_call>\n{"name": "find", "arguments": {"name": "Ada"}}\n</tool_call>'
    response = "<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n".replace("{}", '{"id":"C1"}')
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n{response}" in text
    assert text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert renderer.render(ASKED[1:], prompt=False) == "<|im_start|>user\nWho is Ada?<|im_end|>\n"


def test_a_template_of_ones_own_goes_with_what_is_saved(tmp_path):
    (tmp_path / "mine.jinja").write_text(BARE.replace("<|im_start|>{{", "<|im_start|>the {{"))
    own = tokenizer()
    renderer = ChatSettings(template=str(tmp_path / "mine.jinja")).renderer(own)
    own.save_pretrained(tmp_path / "saved")
    again = ChatSettings().renderer(AutoTokenizer.from_pretrained(tmp_path / "saved"))
    assert renderer.render(ASKED[1:], prompt=False) == again.render(ASKED[1:], prompt=False)
    assert again.render(ASKED[1:], prompt=False) == "<|im_start|>the user\nWho is Ada?<|im_end|>\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"mine\.jinja: no such file; shipped ones: chatml-tools"),
        ("{% for m in messages %}\n\n{{ m.role }", r"mine\.jinja, line 3: "),
        (b"\xff\xfe\x00", r"mine\.jinja: not UTF-8"),
        ("nothing", "renders no assistant message"),
    ],
)
def test_a_template_that_cannot_be_used(tmp_path, text, message):
    if text is not None:
        (tmp_path / "mine.jinja").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        ChatSettings(template=str(tmp_path / "mine.jinja")).renderer(tokenizer())


def test_thinking_is_told_to_the_template():
    own = tokenizer()
    own.chat_template = BARE + "{% if enable_thinking is defined and not enable_thinking %}<|quiet|>{% endif %}"
    assert "<|quiet|>" in ChatSettings(enable_thinking=False).renderer(own).render(ASKED, prompt=True)
    assert "<|quiet|>" not in ChatSettings().renderer(own).render(ASKED, prompt=True)


@pytest.mark.parametrize(("eos", "expected"), [(5, (5,)), ([5, 7], (5, 7)), (None, ())])
def test_generation_settings_end_a_completion_too(tmp_path, eos, expected):
    save_policy(tmp_path / "model")
    engine = LocalEngine(str(tmp_path / "model"), LocalEngineSettings(device="cpu"))
    engine.model.generation_config.eos_token_id = eos
    assert engine.eos_ids == expected
    stops = ChatSettings().renderer(engine.tokenizer, engine.eos_ids).stop_ids
    assert set(expected) <= set(stops)
    assert set(stops) - set(expected) == set(ChatSettings().renderer(engine.tokenizer).stop_ids) - set(expected)
