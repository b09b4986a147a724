"""Tasks in the built-in worlds: seeded databases, requests, checks, goals and executed reference solutions.

Every world is described by a ``Scenario`` in the same terms (people own things; things are read and changed), and the
families below are written once over those terms.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from envace.chat.tools import canonical_json, same_json
from envace.errors import UserError
from envace.seeds import derive_seed
from envace.types import (
    CallMade,
    CallPattern,
    Check,
    Equals,
    Message,
    OnlyCalls,
    Reference,
    ReplyContains,
    ReplyMatches,
    ResponseConsistent,
    Task,
    ToolCall,
    WorldGoal,
    WorldState,
)
from envace.worlds import REGISTRY
from envace.worlds.calendar import DAYS

_NAMES = (
    "Ada Alan Bea Ben Carl Cora Dan Dina Elsa Emil Eva Finn Flora Gina Greta Hans Hugo Ida Ines Ivan Jana Jon Kai Karl "
    "Lara Leo Lina Lou Mara Max Mia Milo Nina Noah Olga Otto Paul Pia Ruth Sam Sara Tina Tom Ulla Vera Walt Yara Zoe"
)
NAMES = _NAMES.split()


@dataclass(frozen=True)
class Write:
    """A changing tool: how it is asked for, and its arguments besides the thing's id."""

    tool: str
    phrase: str
    """With ``{thing}`` and the names in ``choices``."""
    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    alike: bool = True
    """Whether two things can be changed in the very same way (two events cannot move to one slot)."""


@dataclass(frozen=True)
class Scenario:
    people: str
    person_id: str
    person_letter: str
    find: str
    things: str
    thing_id: str
    thing_letter: str
    listing: str
    show: str
    noun: str
    label: str
    labels: tuple[str, ...]
    fact: str
    """Field of a thing that status questions ask for."""
    ready: str
    """Value of ``status`` in which every write succeeds."""
    blocked: tuple[str, ...]
    """Values of ``status`` in which no write succeeds."""
    defaults: dict[str, tuple[Any, ...]]
    """The things' other columns and what they may hold."""
    writes: tuple[Write, ...]


SCENARIOS: dict[str, Scenario] = {
    "orders": Scenario(
        "customers", "customer_id", "C", "find_customer", "orders", "order_id", "O", "list_orders", "get_order", "order",
        "item", ("lamp", "chair", "desk", "vase", "clock", "mirror", "sofa", "rug", "kettle", "radio", "pan", "tent"),
        "status", "pending", ("shipped", "cancelled"), {"note": ("",)},
        (
            Write("cancel_order", "cancel {thing}, it is {reason}", {"reason": ("damaged", "late", "unwanted")}),
            Write("ship_order", "ship {thing} by {speed} mail", {"speed": ("normal", "express")}),
        ),
    ),
    "bank": Scenario(
        "holders", "holder_id", "H", "find_holder", "accounts", "account_id", "A", "list_accounts", "get_account", "account",
        "kind", ("checking", "savings", "credit", "travel", "business", "pension"),
        "status", "open", ("frozen",), {"balance": tuple(range(10, 90))},
        (
            Write("deposit", "put {amount} euros into {thing}", {"amount": tuple(range(11, 99))}),
            Write("freeze_account", "freeze {thing}"),
        ),
    ),
    "calendar": Scenario(
        "people", "person_id", "P", "find_person", "events", "event_id", "E", "list_events", "get_event", "event",
        "title", ("lunch", "review", "dentist", "yoga", "standup", "concert", "dinner", "meeting", "training", "party"),
        "day", "planned", ("cancelled",), {"day": DAYS[:3], "hour": (8, 9, 10, 11)},
        (
            Write("move_event", "move {thing} to {day} at {hour}", {"day": DAYS[3:], "hour": (12, 14, 15, 16)}, alike=False),
            Write("cancel_event", "cancel {thing}"),
        ),
    ),
    "library": Scenario(
        "members", "member_id", "M", "find_member", "loans", "loan_id", "L", "list_loans", "get_loan", "loan",
        "title", ("Dune", "Emma", "Ulysses", "Hamlet", "Faust", "Dracula", "Macbeth", "Walden", "Candide", "Ivanhoe"),
        "status", "borrowed", ("returned",), {"weeks": (1,), "condition": ("",)},
        (
            Write("renew_loan", "renew {thing} for {weeks} weeks", {"weeks": (2, 3, 4, 5, 6, 7, 8)}),
            Write("return_book", "return {thing} in {condition} condition", {"condition": ("good", "worn")}),
        ),
    ),
    "desk": Scenario(
        "users", "user_id", "U", "find_user", "tickets", "ticket_id", "T", "list_tickets", "get_ticket", "ticket",
        "topic", ("printer", "login", "email", "laptop", "invoice", "phone", "screen", "license", "backup", "refund"),
        "team", "open", ("closed",), {"team": ("network", "billing", "hardware"), "priority": ("low",)},
        (
            Write("assign_ticket", "assign {thing} to {team}", {"team": ("network", "billing", "hardware")}),
            Write("set_priority", "set {thing} to {priority} priority", {"priority": ("high", "urgent")}),
            Write("close_ticket", "close {thing}"),
        ),
    ),
    "hotel": Scenario(
        "guests", "guest_id", "G", "find_guest", "bookings", "booking_id", "B", "list_bookings", "get_booking", "booking",
        "room", ("single", "double", "suite", "studio", "garden", "balcony", "attic", "family"),
        "status", "booked", ("occupied", "cancelled"), {"meals": ("",)},
        (
            Write("check_in", "check in {thing} with {meals} meals", {"meals": ("none", "breakfast", "full")}),
            Write("cancel_booking", "cancel {thing}"),
        ),
    ),
}  # fmt: skip

SYSTEM = "Use the tools."


@dataclass
class _Draft:
    """A task being written: the seeded database, and turn by turn what is said, called and checked."""

    world: str
    rng: random.Random
    state: WorldState
    said: list[str] = field(default_factory=list)
    solution: list[Message] = field(default_factory=list)
    checks: list[tuple[Check, ...]] = field(default_factory=list)
    facts: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def of(self) -> Scenario:
        return SCENARIOS[self.world]

    def person(self, thing: dict[str, Any]) -> dict[str, Any]:
        key = self.of.person_id
        return next(person for person in self.state[self.of.people] if person[key] == thing[key])

    def named(self, thing: dict[str, Any]) -> str:
        return f"the {thing[self.of.label]} {self.of.noun} of {self.person(thing)['name']}"

    def look_up(self, thing: dict[str, Any]) -> list[list[ToolCall]]:
        person = self.person(thing)
        return [
            [ToolCall(name=self.of.find, arguments={"name": person["name"]})],
            [ToolCall(name=self.of.listing, arguments={self.of.person_id: person[self.of.person_id]})],
        ]

    def show(self, thing: dict[str, Any]) -> list[ToolCall]:
        return [ToolCall(name=self.of.show, arguments={self.of.thing_id: thing[self.of.thing_id]})]

    def write(self, thing: dict[str, Any], write: Write, chosen: dict[str, Any]) -> ToolCall:
        return ToolCall(name=write.tool, arguments={self.of.thing_id: thing[self.of.thing_id], **chosen})

    def choose(self, write: Write, thing: dict[str, Any]) -> dict[str, Any]:
        """Arguments that change something: the present value of a column of the same name is not chosen."""
        return {
            name: self.rng.choice([value for value in values if value != thing.get(name)])
            for name, values in write.choices.items()
        }

    def turn(
        self,
        said: str,
        steps: list[list[ToolCall]],
        reply: str,
        *,
        writes: tuple[ToolCall, ...] = (),
        facts: tuple[str, ...] = (),
        pattern: str | None = None,
    ) -> None:
        """One user turn: what is said, the calls that answer it (a list a message), the reply, and what is checked."""
        self.said.append(said[0].upper() + said[1:])
        self.solution += [Message(role="assistant", tool_calls=tuple(step)) for step in steps]
        self.solution.append(Message(role="assistant", content=reply))
        patterns = tuple(
            CallPattern(name=call.name, arguments={key: Equals(equals=value) for key, value in call.arguments.items()})
            for call in writes
        )
        names = tuple(write.tool for write in self.of.writes)
        checks: list[Check] = [OnlyCalls(id="nothing_else", names=names, allowed=patterns, required_for_next_turn=True)]
        checks += [CallMade(id=f"made_{number}", call=made, weight=2) for number, made in enumerate(patterns)]
        if facts:
            checks.append(ReplyContains(id="facts", facts=facts, weight=2, required_for_next_turn=True))
        if pattern:
            checks.append(ReplyMatches(id="reply", pattern=pattern, weight=2, required_for_next_turn=True))
        # What succeeds in an imagined world that contradicts the records is no success.
        checks.append(ResponseConsistent(id="records"))
        self.checks.append(tuple(checks))
        self.facts.append(facts)


def _seeded(world: str, rng: random.Random) -> WorldState:
    """Two or three people with two or three things each; labels are unique, ids are random."""
    of = SCENARIOS[world]
    people = rng.randint(2, 3)
    counts = [rng.randint(2, 3 if people == 2 else 2) for _ in range(people)]
    person_ids = [f"{of.person_letter}{number}" for number in rng.sample(range(10, 100), people)]
    thing_ids = iter([f"{of.thing_letter}{number}" for number in rng.sample(range(10, 100), sum(counts))])
    names = rng.sample(NAMES, people)
    labels = iter(rng.sample(of.labels, sum(counts)))
    owners = [{of.person_id: person_id, "name": name} for person_id, name in zip(person_ids, names, strict=True)]
    things = [
        {
            of.thing_id: next(thing_ids),
            of.person_id: owner,
            of.label: next(labels),
            "status": of.ready,
            **{column: rng.choice(values) for column, values in of.defaults.items()},
        }
        for owner, count in zip(person_ids, counts, strict=True)
        for _ in range(count)
    ]
    for thing in things:
        if rng.random() < 0.3:
            thing["status"] = rng.choice(of.blocked)
    return {of.people: owners, of.things: things}


def _ready(draft: _Draft, count: int = 1) -> list[dict[str, Any]]:
    """``count`` things of one person, made ready for writing."""
    of = draft.of
    owner = draft.rng.choice(draft.state[of.people])[of.person_id]
    own = [thing for thing in draft.state[of.things] if thing[of.person_id] == owner]
    chosen = draft.rng.sample(own, count)
    for thing in chosen:
        thing["status"] = of.ready
    return chosen


def _perhaps_blocked(draft: _Draft, thing: dict[str, Any]) -> None:
    if draft.rng.random() < 0.5:
        thing["status"] = draft.rng.choice(draft.of.blocked)


def _direct(draft: _Draft) -> None:
    (thing,), write = _ready(draft), draft.rng.choice(draft.of.writes)
    chosen = draft.choose(write, thing)
    call = draft.write(thing, write, chosen)
    named = f"{draft.of.noun} {thing[draft.of.thing_id]}"
    draft.turn(write.phrase.format(thing=named, **chosen) + ".", [[call]], "Done.", writes=(call,))


def _change(draft: _Draft) -> None:
    (thing,), write = _ready(draft), draft.rng.choice(draft.of.writes)
    chosen = draft.choose(write, thing)
    call = draft.write(thing, write, chosen)
    said = write.phrase.format(thing=draft.named(thing), **chosen) + "."
    draft.turn(said, [*draft.look_up(thing), [call]], "Done.", writes=(call,))


def _checked(draft: _Draft) -> None:
    """Look first: done if it can be, declined if it cannot."""
    (thing,), write = _ready(draft), draft.rng.choice(draft.of.writes)
    blocked = draft.rng.random() < 0.5
    if blocked:
        thing["status"] = draft.rng.choice(draft.of.blocked)
    chosen = draft.choose(write, thing)
    call = draft.write(thing, write, chosen)
    said = f"if it is {draft.of.ready}, " + write.phrase.format(thing=draft.named(thing), **chosen) + "."
    steps = [*draft.look_up(thing), draft.show(thing)]
    if blocked:
        status = str(thing["status"])
        draft.turn(said, steps, f"I cannot, it is {status}.", facts=(status,), pattern="(?i)cannot")
    else:
        draft.turn(said, [*steps, [call]], "Done.", writes=(call,))


def _status(draft: _Draft) -> None:
    thing = draft.rng.choice(draft.state[draft.of.things])
    fact = str(thing[draft.of.fact])
    said = f"what is the {draft.of.fact} of {draft.named(thing)}?"
    draft.turn(said, [*draft.look_up(thing), draft.show(thing)], f"It is {fact}.", facts=(fact,))


def _parallel(draft: _Draft) -> None:
    """The same change to two things, both calls in one message."""
    things, write = _ready(draft, 2), draft.rng.choice([write for write in draft.of.writes if write.alike])
    shared = {name: {thing.get(name) for thing in things} for name in write.choices}
    chosen = {
        name: draft.rng.choice([value for value in values if value not in shared[name]])
        for name, values in write.choices.items()
    }
    calls = [draft.write(thing, write, chosen) for thing in things]
    one, two = (thing[draft.of.label] for thing in things)
    named = f"the {one} and the {two} {draft.of.noun} of {draft.person(things[0])['name']}"
    said = write.phrase.format(thing=named, **chosen).replace(", it is", ", both are") + "."
    draft.turn(said, [*draft.look_up(things[0]), calls], "Done.", writes=tuple(calls))


def _five(draft: _Draft) -> None:
    """Five dependent calls: look one thing up, change it, then tell the fact of another."""
    (thing, other), write = _ready(draft, 2), draft.rng.choice(draft.of.writes)
    _perhaps_blocked(draft, other)
    chosen = draft.choose(write, thing)
    call = draft.write(thing, write, chosen)
    fact = str(other[draft.of.fact])
    said = (
        f"if it is {draft.of.ready}, {write.phrase.format(thing=draft.named(thing), **chosen)}, "
        f"then tell the {draft.of.fact} of the {other[draft.of.label]} {draft.of.noun}."
    )
    steps = [*draft.look_up(thing), draft.show(thing), [call], draft.show(other)]
    draft.turn(said, steps, f"It is {fact}.", writes=(call,), facts=(fact,))


def _two_turns(draft: _Draft) -> None:
    """Asks about one thing, then has another changed, whose id the first turn's listing gave."""
    (other, thing), write = _ready(draft, 2), draft.rng.choice(draft.of.writes)
    _perhaps_blocked(draft, other)
    fact, chosen = str(other[draft.of.fact]), draft.choose(write, thing)
    call = draft.write(thing, write, chosen)
    said = f"what is the {draft.of.fact} of {draft.named(other)}?"
    draft.turn(said, [*draft.look_up(other), draft.show(other)], f"It is {fact}.", facts=(fact,))
    named = f"the {thing[draft.of.label]} {draft.of.noun}"
    draft.turn("then " + write.phrase.format(thing=named, **chosen) + ".", [[call]], "Done.", writes=(call,))


def _ask(draft: _Draft) -> None:
    """Only the user can tell who is meant: asking is right, and the user then says."""
    (thing,), write = _ready(draft), draft.rng.choice(draft.of.writes)
    chosen = draft.choose(write, thing)
    call = draft.write(thing, write, chosen)
    owner = draft.person(thing)
    find, listing = draft.look_up(thing)
    if draft.rng.random() < 0.5:
        said = write.phrase.format(thing=f"the {thing[draft.of.label]} {draft.of.noun}", **chosen) + "."
        draft.turn(said, [], f"Whose {draft.of.noun} is it?", pattern=r"(?i)\b(whose|who)\b.*\?")
        draft.turn(f"It is {owner['name']}.", [find, listing, [call]], "Done.", writes=(call,))
        return
    draft.rng.choice([one for one in draft.state[draft.of.people] if one is not owner])["name"] = owner["name"]
    said = write.phrase.format(thing=draft.named(thing), **chosen) + "."
    draft.turn(said, [find], f"Which {owner['name']}?", pattern=r"(?i)\bwhich\b.*\?")
    told = f"{draft.of.person_id.removesuffix('_id')} {owner[draft.of.person_id]}."
    draft.turn(told, [listing, [call]], "Done.", writes=(call,))


FAMILIES = {
    "direct": _direct,
    "change": _change,
    "checked": _checked,
    "status": _status,
    "parallel": _parallel,
    "five": _five,
    "two_turns": _two_turns,
    "ask": _ask,
}


def build_tasks(world: str, count: int, seed: int, split: str) -> Iterator[Task]:
    """``count`` tasks, families in turn. The same arguments give the same tasks; different splits share no seed.

    Raises:
        UserError: no such world.
    """
    if world not in REGISTRY:
        raise UserError(f"no built-in world {world!r}; there are {', '.join(REGISTRY)}")
    families = list(FAMILIES)
    for number in range(count):
        family = families[number % len(families)]
        rng = random.Random(derive_seed("task", world, split, seed, number))
        draft = _Draft(world, rng, _seeded(world, rng))
        FAMILIES[family](draft)
        yield _finish(draft, family, f"{world}-{split}-{seed}-{number}", split)


def _finish(draft: _Draft, family: str, name: str, split: str) -> Task:
    """Executes the solution in the world: its responses, its records and the goal are what the world says."""
    world = REGISTRY[draft.world](draft.state)
    start = world.snapshot()
    references = _explored(draft)
    solution: list[Message] = []
    turns = iter(draft.said[1:])
    for position, message in enumerate(draft.solution):
        solution.append(message)
        for call in message.tool_calls:
            response = world.call(call)
            if "error" in response and response["error"]["code"] != "AMBIGUOUS":
                raise AssertionError(f"{name}: the reference solution fails at {call.name}: {response}")
            solution.append(Message(role="tool", name=call.name, content=canonical_json(response)))
            if not any(same_call(call, known.call) for known in references):
                references.append(Reference(call=call, response=response))
        if not message.tool_calls and position + 1 < len(draft.solution):
            solution.append(Message(role="user", content=next(turns)))
    goal = world.snapshot()
    world.close()
    draft.rng.shuffle(references)
    return Task(
        id=name,
        messages=(Message(role="system", content=SYSTEM), Message(role="user", content=draft.said[0])),
        tools=REGISTRY[draft.world].tools,
        user_turns=tuple(draft.said[1:]),
        checks=tuple(draft.checks),
        references=tuple(references),
        solution=tuple(solution),
        world=WorldGoal(name=draft.world, state=start, goal=goal, facts=tuple(draft.facts)),
        metadata={"domain": draft.world, "split": split, "family": family},
    )


def same_call(one: ToolCall, other: ToolCall) -> bool:
    return one.name == other.name and same_json(one.arguments, other.arguments)


def _explored(draft: _Draft) -> list[Reference]:
    """What someone tried before: every person, every listing, every thing; a name and an id that are nobody's, and a
    change that is refused, where there is one: they show what the service's errors look like."""
    of, rng = draft.of, draft.rng
    people, things = draft.state[of.people], draft.state[of.things]
    names = [person["name"] for person in people]
    known = {thing[of.thing_id] for thing in things}
    absent = rng.choice([name for name in (f"{of.thing_letter}{n}" for n in range(10, 100)) if name not in known])
    calls = [ToolCall(name=of.find, arguments={"name": rng.choice([name for name in NAMES if name not in names])})]
    calls += [ToolCall(name=of.find, arguments={"name": name}) for name in dict.fromkeys(names)]
    calls += [ToolCall(name=of.listing, arguments={of.person_id: person[of.person_id]}) for person in people]
    calls += [ToolCall(name=of.show, arguments={of.thing_id: name}) for name in (*sorted(known), absent)]
    if blocked := [thing for thing in things if thing["status"] in of.blocked]:
        thing, write = rng.choice(blocked), rng.choice(of.writes)
        calls.append(draft.write(thing, write, draft.choose(write, thing)))
    world = REGISTRY[draft.world](draft.state)
    references = [Reference(call=call, response=world.call(call)) for call in calls]
    world.close()
    return references
