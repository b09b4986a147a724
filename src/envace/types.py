"""The nouns: every value that passes between the parts of EnvACE, as frozen, typed data with a JSON round trip.

``model_validate_json`` and ``model_dump_json`` (pydantic) are the round trip; ``Task.model_json_schema()`` is the JSON
Schema of the task file, one task a line. This module knows nothing of tokenizers, engines or worlds.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from envace.schemas import argument_refusal, compiles, validator
from envace.strict_json import json_value, parse_json


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Json = Annotated[Any, AfterValidator(json_value)]
"""Any JSON value that can be written back."""
JsonObject = dict[Annotated[str, AfterValidator(json_value)], Json]


class Role(StrEnum):
    """Which of its two roles the policy plays in a generation."""

    ACT = "act"
    REHEARSE = "rehearse"


# ---------------------------------------------------------------------------------------------- conversation


def _applicable(schema: dict[str, Any]) -> dict[str, Any]:
    validator(schema)
    return schema


Schema = Annotated[JsonObject, AfterValidator(_applicable)]


class ToolSpec(Frozen):
    """A tool the agent may call. Also accepts OpenAI's ``{"type": "function", "function": {...}}``."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: Schema = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON Schema of the arguments object."""
    returns: Schema | None = None
    """JSON Schema of a response, where the tool's owner published one."""

    @model_validator(mode="before")
    @classmethod
    def _from_openai(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("function"), dict):
            function = dict(data["function"])
            function.pop("strict", None)
            return function
        return data

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        kinds = schema.get("type", "object")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not any(kind in ("object", "any") or isinstance(kind, dict) for kind in kinds):
            raise ValueError(f"arguments are an object, so its type must be 'object', not {schema['type']!r}")
        return schema

    def to_openai(self) -> dict[str, Any]:
        """The form chat templates and endpoints take (``returns`` has no place in it)."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolCall(Frozen):
    """One call. Also accepts OpenAI's nested form, whose arguments are a JSON string."""

    name: str
    arguments: JsonObject = Field(default_factory=dict)
    id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_openai(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("function"), dict):
            arguments = data["function"].get("arguments", {})
            if isinstance(arguments, str):
                try:
                    arguments = parse_json(arguments or "{}")
                except ValueError as fault:
                    raise ValueError(f"function.arguments: not JSON: {fault}") from None
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
    response: Json


# ---------------------------------------------------------------------------------------------------- checks


Pattern = Annotated[str, AfterValidator(compiles)]
"""A regular expression."""


class Equals(Frozen):
    equals: Json


class OneOf(Frozen):
    one_of: tuple[Json, ...] = Field(min_length=1)


class Near(Frozen):
    number: float
    tolerance: float = Field(default=0.0, ge=0)


class Regex(Frozen):
    """Matched against the whole argument, as text."""

    regex: Pattern


class AnyValue(Frozen):
    any: Literal[True]


def _way(match: Any) -> str | None:
    held = type(match).model_fields if isinstance(match, Frozen) else match if isinstance(match, dict) else ()
    return next((way for way in ("equals", "one_of", "number", "regex", "any") if way in held), None)


ArgumentMatch = Annotated[
    Annotated[Equals, Tag("equals")]
    | Annotated[OneOf, Tag("one_of")]
    | Annotated[Near, Tag("number")]
    | Annotated[Regex, Tag("regex")]
    | Annotated[AnyValue, Tag("any")],
    Discriminator(
        _way,
        custom_error_type="argument_match",
        custom_error_message="write one of equals, one_of, number, regex, any",
    ),
]


class CallPattern(Frozen):
    """A call by name and some of its arguments. An argument that is not listed may hold anything."""

    name: str
    arguments: dict[str, ArgumentMatch] = Field(default_factory=dict)


class CheckBase(Frozen):
    id: str = ""
    weight: float = Field(default=1.0, ge=0, le=1e6)
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


def _says_something(fact: str) -> str:
    if not fact.strip():
        raise ValueError("a fact without a word is in every reply")
    return fact


Fact = Annotated[str, AfterValidator(_says_something)]


class ReplyContains(CheckBase):
    """The turn's last assistant text holds every fact (whole words, any case)."""

    kind: Literal["reply_contains"] = "reply_contains"
    facts: tuple[Fact, ...] = Field(min_length=1)


class ReplyMatches(CheckBase):
    """The turn's last assistant text matches a regular expression somewhere."""

    kind: Literal["reply_matches"] = "reply_matches"
    pattern: Pattern


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

WorldState = dict[str, list[JsonObject]]
"""Table name to rows."""


class WorldGoal(Frozen):
    """For evaluation in a built-in world. Training by rehearsal never reads it."""

    name: str
    state: WorldState
    """Rows the world starts with."""
    goal: WorldState
    """Rows a perfect execution ends with."""
    facts: tuple[tuple[Fact, ...], ...] = ()
    """Per user turn, what the reply has to hold."""


def unasked(messages: Sequence[Message]) -> int | None:
    """The position of the first tool message that answers no call of the assistant message before it."""
    waiting = 0
    for position, message in enumerate(messages):
        if message.role == "assistant":
            waiting = len(message.tool_calls)
        elif message.role == "tool":
            waiting -= 1
            if waiting < 0:
                return position
    return None


def _unmeetable(check: Check, tools: Sequence[ToolSpec]) -> str | None:
    """What ``check`` names that no call of an agent with ``tools`` can have: a tool, or an argument; else ``None``."""
    match check:
        case CallMade():
            named, patterns = [check.call.name], [check.call]
        case CallNotMade():  # arguments that the schema refuses are what it may forbid
            named, patterns = [check.call.name], []
        case CallsInOrder():
            named, patterns = [pattern.name for pattern in check.calls], list(check.calls)
        case OnlyCalls():
            named, patterns = [*check.names, *(pattern.name for pattern in check.allowed)], list(check.allowed)
        case _:
            return None
    specs = {tool.name: tool for tool in tools}
    for name in named:
        if name not in specs:
            return f"the task declares no tool {name!r}; it has {', '.join(specs) or 'none'}"
    for pattern in patterns:
        for name, match in pattern.arguments.items():
            values = (match.equals,) if isinstance(match, Equals) else getattr(match, "one_of", None)
            refusal = argument_refusal(name, values, specs[pattern.name].parameters)
            if refusal is not None:
                return f"{pattern.name}: no call can have this argument {name!r}: {refusal}"
    return None


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
    metadata: JsonObject = Field(default_factory=dict)
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
        for field, messages in (("messages", self.messages), ("solution", self.solution)):
            if (position := unasked(messages)) is not None:
                raise ValueError(f"{field}.{position}: a tool message that answers no call before it")
        if self.world is not None and len(self.world.facts) > self.turns:
            raise ValueError(f"world.facts: {len(self.world.facts)} entries for {self.turns} user turns")
        for turn, checks in enumerate(self.checks):
            for position, check in enumerate(checks):
                if (fault := _unmeetable(check, self.tools)) is not None:
                    raise ValueError(f"checks.{turn}.{position}.{check.kind}: {fault}")
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
    response: Json
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
