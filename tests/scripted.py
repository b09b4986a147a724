"""A sampler that plays both roles from a script, over a real tokenizer and chat template, and a task of two user turns."""

import asyncio
import json
from collections.abc import Sequence

from envace.chat.render import ChatRenderer
from envace.engines.base import Sample, SamplingParams
from envace.types import Message, Role, Task
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

    def __init__(self, acts: Sequence[str | Exception], rehearses: Sequence[str] = ()) -> None:
        self.acts, self.rehearses = list(acts), list(rehearses)
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.most = dict.fromkeys(Role, 0)
        """The most requests of each role that were under way at once."""
        self.mixed = 0
        """The most requests of both roles at once: this many of each."""
        self._now = dict.fromkeys(Role, 0)

    async def sample(self, prompt_ids, params: SamplingParams) -> Sample:
        text = RENDERER.decode(prompt_ids)
        self.prompts.append(text)
        self.params.append(params)
        role = Role.REHEARSE if "You are the tools." in text else Role.ACT
        script = self.rehearses if role is Role.REHEARSE else self.acts
        turn = text.count("<|im_start|>assistant") - 1
        said = script[turn]
        self._now[role] += 1
        self.most = {one: max(self.most[one], self._now[one]) for one in Role}
        self.mixed = max(self.mixed, min(self._now.values()))
        # Episodes fall out of step, as they do when completions differ in length.
        await asyncio.sleep(0.001 * (1 + params.seed % 4))
        self._now[role] -= 1
        if isinstance(said, Exception):
            raise said
        ids = RENDERER.encode(said)
        if said.endswith("…") or len(ids) >= params.max_tokens:
            ids = ids[: params.max_tokens]
            return Sample(ids, (-1.0,) * len(ids), "length", 3)
        ids = (*ids, RENDERER.stop_ids[0])
        return Sample(ids, (-1.0,) * len(ids), "stop", 3)


GOOD = [call("Ada"), "Ada is C1.", call("Bob"), "Bob is C2."]
ANSWERS = [result({"id": "C1"}), result({"id": "C2"})]


def follow(task: Task) -> Scripted:
    """Plays a task's reference solution in both roles."""

    def text(message: Message) -> str:
        return RENDERER.decode(RENDERER.completion_ids(message))

    acts = [text(message) for message in task.solution if message.role == "assistant"]
    return Scripted(acts, [result(json.loads(message.content)) for message in task.solution if message.role == "tool"])
