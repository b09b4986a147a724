"""The nouns: every value that passes between the parts of EnvACE, as frozen, typed data with a JSON round trip.

``model_validate_json`` and ``model_dump_json`` (pydantic) are the round trip; ``Task.model_json_schema()`` is the JSON
Schema of the task file, one task a line. This module knows nothing of tokenizers, engines or worlds.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Role(StrEnum):
    """Which of its two roles the policy plays in a generation."""

    ACT = "act"
    REHEARSE = "rehearse"


# ---------------------------------------------------------------------------------------------- conversation


class ToolSpec(Frozen):
    """A tool the agent may call. Also accepts OpenAI's ``{"type": "function", "function": {...}}``."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON Schema of the arguments object."""
    returns: dict[str, Any] | None = None
    """JSON Schema of a response, where the tool's owner published one."""

    @model_validator(mode="before")
    @classmethod
    def _from_openai(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("function"), dict):
            function = dict(data["function"])
            function.pop("strict", None)
            return function
        return data

    def to_openai(self) -> dict[str, Any]:
        """The form chat templates and endpoints take (``returns`` has no place in it)."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolCall(Frozen):
    """One call. Also accepts OpenAI's nested form, whose arguments are a JSON string."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_openai(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("function"), dict):
            arguments = data["function"].get("arguments", {})
            if isinstance(arguments, str):
                arguments = json.loads(arguments or "{}")
            return {"name": data["function"].get("name"), "arguments": arguments, "id": data.get("id")}
        return data


class Message(Frozen):
    """One chat message. A tool message's ``content`` is the response as text (JSON for our worlds)."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _no_content(cls, value: Any) -> Any:
        return "" if value is None else value

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _no_calls(cls, value: Any) -> Any:
        return () if value is None else value


class Reference(Frozen):
    """A recorded call with the response it got. ``response`` is any JSON value."""

    call: ToolCall
    response: Any


# ---------------------------------------------------------------------------------------------------- checks


class Equals(Frozen):
    equals: Any


class OneOf(Frozen):
    one_of: tuple[Any, ...]


class Near(Frozen):
    number: float
    tolerance: float = Field(default=0.0, ge=0)


class Regex(Frozen):
    """Matched against the whole argument, as text."""

    regex: str

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str) -> str:
        re.compile(value)
        return value


class AnyValue(Frozen):
    any: Literal[True]


ArgumentMatch = Equals | OneOf | Near | Regex | AnyValue


class CallPattern(Frozen):
    """A call by name and some of its arguments. An argument that is not listed may hold anything."""

    name: str
    arguments: dict[str, ArgumentMatch] = Field(default_factory=dict)


class CheckBase(Frozen):
    id: str = ""
    weight: float = Field(default=1.0, ge=0)
    """Share within its turn; the weights of a turn are normalized to sum to 1."""
    required_for_next_turn: bool = False


class CallMade(CheckBase):
    kind: Literal["call_made"] = "call_made"
    call: CallPattern


class CallNotMade(CheckBase):
    kind: Literal["call_not_made"] = "call_not_made"
    call: CallPattern


class CallsInOrder(CheckBase):
    """Each pattern is matched by a later call than the one before it; other calls may lie between."""

    kind: Literal["calls_in_order"] = "calls_in_order"
    calls: tuple[CallPattern, ...] = Field(min_length=1)


class OnlyCalls(CheckBase):
    """Every call to one of ``names`` is matched by one of ``allowed``: what was asked happened and nothing besides."""

    kind: Literal["only_calls"] = "only_calls"
    names: tuple[str, ...] = Field(min_length=1)
    allowed: tuple[CallPattern, ...] = ()


class ReplyContains(CheckBase):
    """The turn's last assistant text holds every fact (whole words, any case)."""

    kind: Literal["reply_contains"] = "reply_contains"
    facts: tuple[str, ...] = Field(min_length=1)


class ReplyMatches(CheckBase):
    """The turn's last assistant text matches a regular expression somewhere."""

    kind: Literal["reply_matches"] = "reply_matches"
    pattern: str

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        re.compile(value)
        return value


class ResponseValid(CheckBase):
    """Every response of the turn (of ``tool``, if given) validates against the tool's ``returns`` schema."""

    kind: Literal["response_valid"] = "response_valid"
    tool: str | None = None


class ResponseConsistent(CheckBase):
    """Every response whose call is among the task's references equals the recorded response."""

    kind: Literal["response_consistent"] = "response_consistent"


class JudgeCheck(CheckBase):
    """An item for a judge model (CM2 checklist, arXiv 2602.12268)."""

    kind: Literal["judge"] = "judge"
    question: str
    focus_on: str = "assistant.content"
    pass_condition: str = ""
    failure_examples: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    dependencies: tuple[str, ...] = ()


Check = Annotated[
    CallMade | CallNotMade | CallsInOrder | OnlyCalls | ReplyContains | ReplyMatches | ResponseValid
    | ResponseConsistent | JudgeCheck,
    Field(discriminator="kind"),
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ task

WorldState = dict[str, list[dict[str, Any]]]
"""Table name to rows."""


class WorldGoal(Frozen):
    """For evaluation in a built-in world. Training by rehearsal never reads it."""

    name: str
    state: WorldState
    """Rows the world starts with."""
    goal: WorldState
    """Rows a perfect execution ends with."""
    facts: tuple[tuple[str, ...], ...] = ()
    """Per user turn, what the reply has to hold."""


class Task(Frozen):
    id: str = Field(min_length=1)
    messages: tuple[Message, ...] = Field(min_length=1)
    """What the conversation starts with; the last one is the first user turn."""
    tools: tuple[ToolSpec, ...] = ()
    user_turns: tuple[str, ...] = ()
    """Scripted later user messages, each sent once the checks it requires are met."""
    checks: tuple[tuple[Check, ...], ...] = ()
    """Per user turn; empty, or one entry a turn."""
    references: tuple[Reference, ...] = ()
    solution: tuple[Message, ...] = ()
    """A reference trajectory after ``messages``: assistant, tool and user messages."""
    world: WorldGoal | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Free form; ``domain``, ``split`` and ``family`` are read by reports."""

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.messages[-1].role != "user":
            raise ValueError("messages: the last one must be the first user turn")
        if self.checks and len(self.checks) != self.turns:
            raise ValueError(f"checks: {len(self.checks)} entries for {self.turns} user turns")
        names = [tool.name for tool in self.tools]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"tools: {doubled[0]!r} is declared more than once")
        return self

    @property
    def turns(self) -> int:
        """How many user turns the task has."""
        return 1 + len(self.user_turns)


# ----------------------------------------------------------------------------------------- what a run produces


class Generation(Frozen):
    """One sampled completion: one training row.

    ``logprobs`` are of the sampled tokens under the distribution they were drawn from (after ``temperature``).
    ``completion_ids`` includes the stop token when ``stop_reason`` is ``stop``.
    """

    role: Role
    turn: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]
    temperature: float = 1.0
    policy_version: int = 0

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if len(self.logprobs) != len(self.completion_ids):
            raise ValueError("logprobs and completion_ids differ in length")
        return self


class CallRecord(Frozen):
    """A call of the episode with the response the agent saw."""

    turn: int
    call: ToolCall
    response: Any
    responder: str
    error: str | None = None
    """Code of an ``error_tool_call`` or of a malformed response; a world's own error (not found …) is not one."""


class CheckResult(Frozen):
    check: str
    """The check's id, or its kind and position."""
    met: bool | None
    """``None``: could not be decided, so the episode is not scored."""
    weight: float
    required_for_next_turn: bool = False
    detail: str = ""


class TurnScore(Frozen):
    results: tuple[CheckResult, ...]
    reward: float | None
    """In [0, 1]; ``None`` is "not scored"."""

    @property
    def may_continue(self) -> bool:
        """Whether every check that the next turn requires is met."""
        return all(result.met for result in self.results if result.required_for_next_turn)


class EndReason(StrEnum):
    """Why an episode ended."""

    COMPLETED = "completed"
    REQUIREMENT_UNMET = "requirement_unmet"
    ACT_ERROR = "act_error"
    """The assistant message could not be parsed."""
    CALL_ERROR = "call_error"
    """A call was refused: unknown tool, arguments against the schema, or the responder said so."""
    RESPONSE_ERROR = "response_error"
    """A rehearsed response was malformed, or a replay had no recording."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    MAX_USER_TURNS = "max_user_turns"
    MAX_CALLS = "max_calls"
    MAX_GENERATIONS = "max_generations"
    MAX_TOKENS = "max_tokens"
    TIME_LIMIT = "time_limit"
    TRUNCATED = "truncated"
    """A generation reached its token limit without a stop token."""
    FAILED = "failed"
    """A sampler, judge, network or world failure: never the policy's fault, never scored."""


class EpisodeError(Frozen):
    code: str
    message: str


class Episode(Frozen):
    id: str
    task_id: str
    index: int
    """Position in its group."""
    seed: int
    responder: str
    messages: tuple[Message, ...]
    generations: tuple[Generation, ...]
    calls: tuple[CallRecord, ...] = ()
    turns: tuple[TurnScore, ...] = ()
    end: EndReason
    error: EpisodeError | None = None
    reward: float | None
    """In [0, 1]; ``None`` is "not scored": left out of every baseline, loss and mean, and counted."""
    success: bool | None = None
    """Final state, nothing else changed, facts in the reply; only where the episode ran in a real world."""
    external_calls: int = 0
    """Calls answered by anything outside the policy (a world, a server, a second model)."""
    seconds: float = 0.0

    @property
    def scored(self) -> bool:
        return self.reward is not None


class Group(Frozen):
    """The G episodes sampled for one task in one step."""

    task: Task
    episodes: tuple[Episode, ...]
