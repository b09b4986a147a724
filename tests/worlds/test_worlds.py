"""Tools by hand-worked cases; tasks by executing them anew."""

import json

import pytest

from envace.errors import UserError
from envace.rewards.state import final_state
from envace.types import Message, Task, ToolCall
from envace.worlds import HELD_OUT, REGISTRY, worlds_of
from envace.worlds.demonstrator import demonstrate, probe_calls
from envace.worlds.environment import WorldEnvironment, require_world
from envace.worlds.tasks import FAMILIES, build_tasks

STATES = {
    "orders": {
        "customers": [
            {"customer_id": "C1", "name": "Ada"},
            {"customer_id": "C2", "name": "Bo"},
            {"customer_id": "C3", "name": "Bo"},
        ],
        "orders": [
            {"order_id": "O1", "customer_id": "C1", "item": "lamp", "status": "pending", "note": ""},
            {"order_id": "O2", "customer_id": "C1", "item": "rug", "status": "shipped", "note": ""},
        ],
    },
    "bank": {
        "holders": [{"holder_id": "H1", "name": "Ada"}],
        "accounts": [
            {"account_id": "A1", "holder_id": "H1", "kind": "savings", "balance": 50, "status": "open"},
            {"account_id": "A2", "holder_id": "H1", "kind": "credit", "balance": 5, "status": "open"},
            {"account_id": "A3", "holder_id": "H1", "kind": "travel", "balance": 5, "status": "frozen"},
        ],
    },
    "calendar": {
        "people": [{"person_id": "P1", "name": "Ada"}],
        "events": [
            {"event_id": "E1", "person_id": "P1", "title": "yoga", "day": "Monday", "hour": 9, "status": "planned"},
            {"event_id": "E2", "person_id": "P1", "title": "lunch", "day": "Friday", "hour": 12, "status": "planned"},
            {"event_id": "E3", "person_id": "P1", "title": "party", "day": "Friday", "hour": 13, "status": "cancelled"},
        ],
    },
    "library": {
        "members": [{"member_id": "M1", "name": "Ada"}],
        "loans": [
            {"loan_id": "L1", "member_id": "M1", "title": "Emma", "status": "borrowed", "weeks": 1, "condition": ""},
            {
                "loan_id": "L2",
                "member_id": "M1",
                "title": "Dune",
                "status": "returned",
                "weeks": 1,
                "condition": "good",
            },
        ],
    },
    "desk": {
        "users": [{"user_id": "U1", "name": "Ada"}],
        "tickets": [
            {
                "ticket_id": "T1",
                "user_id": "U1",
                "topic": "login",
                "status": "open",
                "team": "billing",
                "priority": "low",
            },
            {
                "ticket_id": "T2",
                "user_id": "U1",
                "topic": "email",
                "status": "closed",
                "team": "billing",
                "priority": "low",
            },
        ],
    },
    "hotel": {
        "guests": [{"guest_id": "G1", "name": "Ada"}],
        "bookings": [
            {"booking_id": "B1", "guest_id": "G1", "room": "suite", "status": "booked", "meals": ""},
            {"booking_id": "B2", "guest_id": "G1", "room": "attic", "status": "occupied", "meals": "full"},
        ],
    },
}


def error(code: str, message: str) -> dict[str, object]:
    return {"error": {"code": code, "message": message}}


@pytest.mark.parametrize(
    ("world", "call", "expected"),
    [
        ("orders", ("find_customer", {"name": "Ada"}), {"name": "Ada", "customer_id": "C1"}),
        ("orders", ("find_customer", {"name": "Eve"}), error("NOT_FOUND", "no customer Eve")),
        ("orders", ("find_customer", {"name": "Bo"}), error("AMBIGUOUS", "2 of customer Bo")),
        ("orders", ("list_orders", {"customer_id": "C1"}), {"customer_id": "C1", "orders": [{"item": "lamp", "order_id": "O1"}, {"item": "rug", "order_id": "O2"}]}),
        ("orders", ("list_orders", {"customer_id": "C2"}), {"customer_id": "C2", "orders": []}),
        ("orders", ("list_orders", {"customer_id": "C9"}), error("NOT_FOUND", "no customer C9")),
        ("orders", ("get_order", {"order_id": "O2"}), {"item": "rug", "order_id": "O2", "status": "shipped"}),
        ("orders", ("cancel_order", {"order_id": "O1", "reason": "late"}), {"order_id": "O1", "status": "cancelled"}),
        ("orders", ("cancel_order", {"order_id": "O2", "reason": "late"}), error("ALREADY_SHIPPED", "order O2 is shipped")),
        ("orders", ("cancel_order", {"order_id": "O7", "reason": "late"}), error("NOT_FOUND", "no order O7")),
        ("orders", ("cancel_order", {"order_id": "O1", "reason": "fun"}), error("INVALID_PARAMETERS", "reason: 'fun' is not one of ['damaged', 'late', 'unwanted']")),
        ("orders", ("ship_order", {"order_id": "O1", "speed": "express"}), {"order_id": "O1", "status": "shipped"}),
        ("bank", ("get_account", {"account_id": "A1"}), {"kind": "savings", "account_id": "A1", "balance": 50, "status": "open"}),
        ("bank", ("deposit", {"account_id": "A1", "amount": 9}), {"account_id": "A1", "deposited": 9}),
        ("bank", ("deposit", {"account_id": "A3", "amount": 9}), error("ACCOUNT_FROZEN", "account A3 is frozen")),
        ("bank", ("transfer", {"from_account": "A1", "to_account": "A2", "amount": 50}), {"from_account": "A1", "to_account": "A2", "amount": 50}),
        ("bank", ("transfer", {"from_account": "A1", "to_account": "A2", "amount": 51}), error("INSUFFICIENT_FUNDS", "account A1 holds 50")),
        ("bank", ("transfer", {"from_account": "A1", "to_account": "A3", "amount": 1}), error("ACCOUNT_FROZEN", "account A3 is frozen")),
        ("bank", ("freeze_account", {"account_id": "A1"}), {"account_id": "A1", "status": "frozen"}),
        ("calendar", ("move_event", {"event_id": "E1", "day": "Friday", "hour": 12}), error("SLOT_TAKEN", "event E2 is then")),
        ("calendar", ("move_event", {"event_id": "E1", "day": "Friday", "hour": 13}), {"event_id": "E1", "day": "Friday", "hour": 13}),
        ("calendar", ("cancel_event", {"event_id": "E3"}), error("ALREADY_CANCELLED", "event E3 is cancelled")),
        ("library", ("renew_loan", {"loan_id": "L1", "weeks": 3}), {"loan_id": "L1", "weeks": 3}),
        ("library", ("renew_loan", {"loan_id": "L2", "weeks": 3}), error("LOAN_RETURNED", "loan L2 is returned")),
        ("library", ("return_book", {"loan_id": "L1", "condition": "worn"}), {"loan_id": "L1", "status": "returned"}),
        ("desk", ("assign_ticket", {"ticket_id": "T1", "team": "network"}), {"ticket_id": "T1", "team": "network"}),
        ("desk", ("set_priority", {"ticket_id": "T2", "priority": "high"}), error("ALREADY_CLOSED", "ticket T2 is closed")),
        ("desk", ("close_ticket", {"ticket_id": "T1"}), {"ticket_id": "T1", "status": "closed"}),
        ("hotel", ("check_in", {"booking_id": "B1", "meals": "full"}), {"booking_id": "B1", "status": "occupied"}),
        ("hotel", ("cancel_booking", {"booking_id": "B2"}), error("ALREADY_OCCUPIED", "booking B2 is occupied")),
    ],
)  # fmt: skip
def test_tools(world, call, expected):
    name, arguments = call
    made = REGISTRY[world](STATES[world])
    before = made.snapshot()
    assert made.call(ToolCall(name=name, arguments=arguments)) == expected
    assert (made.snapshot() == before) == ("error" in expected or name.startswith(("find", "list", "get")))


def test_money_moves_and_later_reads_see_it():
    bank = REGISTRY["bank"](STATES["bank"])
    bank.call(ToolCall(name="transfer", arguments={"from_account": "A1", "to_account": "A2", "amount": 20}))
    balances = {row["account_id"]: row["balance"] for row in bank.snapshot()["accounts"]}
    assert balances == {"A1": 30, "A2": 25, "A3": 5}


@pytest.mark.parametrize("world", REGISTRY)
def test_every_world_has_four_to_eight_tools_with_schemas(world):
    tools = REGISTRY[world].tools
    assert 4 <= len(tools) <= 8
    assert all(tool.description and tool.parameters["required"] and tool.returns for tool in tools)


def executed(task: Task, messages: tuple[Message, ...]) -> tuple[dict[str, list[dict[str, object]]], list[str]]:
    """Runs a trajectory's calls in a fresh world; its final state and the replies. Responses must be the recorded ones."""
    world, replies, answers = REGISTRY[task.world.name](task.world.state), [], []
    for message in messages:
        for call in message.tool_calls:
            answers.append(world.call(call))
        if message.role == "tool":
            assert json.loads(message.content) == answers.pop(0)
        if message.role == "assistant" and not message.tool_calls:
            replies.append(message.content)
    return world.snapshot(), replies


@pytest.mark.parametrize("world", REGISTRY)
def test_reference_solutions_reach_their_goals_and_lesser_ones_do_not(world):
    families = set()
    for task in build_tasks(world, 48, 3, "test"):
        families.add(task.metadata["family"])
        state, replies = executed(task, task.solution)
        assert state == task.world.goal
        assert final_state(task.world, state, replies).success
        assert Task.model_validate_json(task.model_dump_json()) == task
        nothing = final_state(task.world, task.world.state, [""] * task.turns)
        asks_only = task.metadata["family"] in ("status", "checked") and task.world.goal == task.world.state
        assert nothing.success is False
        assert nothing.goal_reached is asks_only
    assert families == set(FAMILIES)


def test_a_change_besides_the_goal_is_noticed():
    task = next(build_tasks("orders", 1, 0, "test"))
    state, replies = executed(task, task.solution)
    state["customers"][0]["name"] = "Eve"
    result = final_state(task.world, state, replies)
    assert (result.goal_reached, result.nothing_else_changed, result.success) == (True, False, False)


def test_a_fact_left_untold_is_noticed():
    task = list(build_tasks("orders", 4, 0, "test"))[3]
    assert task.metadata["family"] == "status"
    assert not final_state(task.world, task.world.goal, ["Done."]).success
    assert not final_state(task.world, task.world.goal, []).success


def test_the_same_arguments_give_the_same_tasks_and_splits_share_none():
    assert list(build_tasks("desk", 16, 1, "train")) == list(build_tasks("desk", 16, 1, "train"))
    states = [json.dumps(task.world.state) for split in ("train", "test") for task in build_tasks("desk", 64, 1, split)]
    assert len(set(states)) == len(states)


def test_families_have_one_to_five_calls_some_parallel_some_with_two_turns():
    tasks = list(build_tasks("library", 48, 0, "train"))
    calls = {sum(len(message.tool_calls) for message in task.solution) for task in tasks}
    assert {1, 3, 4, 5} <= calls
    assert any(len(message.tool_calls) == 2 for task in tasks for message in task.solution)
    assert {task.turns for task in tasks} == {1, 2}


@pytest.mark.parametrize("world", REGISTRY)
def test_no_answer_is_the_same_in_every_task_of_a_family(world):
    said = {}
    for task in build_tasks(world, 160, 0, "train"):
        told = [message.content for message in task.solution if message.content.startswith("It is ")]
        said.setdefault(task.metadata["family"], set()).update(told)
    assert all(len(said[family]) > 1 for family in ("status", "five", "two_turns"))


def test_asking_is_right_when_no_name_or_a_name_of_two_is_given():
    asked = [task for task in build_tasks("orders", 160, 0, "train") if task.metadata["family"] == "ask"]
    ambiguous = [task for task in asked if "AMBIGUOUS" in task.model_dump_json(include={"solution"})]
    assert 0 < len(ambiguous) < len(asked)
    for task in asked:
        assert bool(task.solution[0].tool_calls) == (task in ambiguous)
        people = [person["name"] for person in task.world.state["customers"]]
        assert (len(set(people)) < len(people)) == (task in ambiguous)


def test_records_show_what_refusals_look_like():
    for task in build_tasks("bank", 40, 0, "train"):
        codes = [reference.response.get("error", {}).get("code") for reference in task.references]
        assert codes.count("NOT_FOUND") == 2
        frozen = any(account["status"] == "frozen" for account in task.world.state["accounts"])
        assert codes.count("ACCOUNT_FROZEN") == frozen


def success_rate(care: float) -> float:
    tasks = [task for world in REGISTRY for task in build_tasks(world, 40, 5, "test")]
    won = [final_state(task.world, *executed(task, demonstrate(task, 0, care))).success for task in tasks]
    return sum(won) / len(won)


def test_care_decides_how_often_the_demonstrator_succeeds():
    assert success_rate(1.0) == 1.0
    assert 0.25 <= success_rate(0.4) <= 0.55
    assert success_rate(0.0) <= 0.25


def test_probes_are_answered_by_the_world_in_their_order():
    kinds = set()
    for task in build_tasks("orders", 40, 2, "test"):
        world = REGISTRY["orders"](task.world.state)
        for made in probe_calls(task, 0):
            assert world.call(made.call) == made.response
            kinds.add(made.response.get("error", {}).get("code", "fine"))
    assert {"fine", "NOT_FOUND", "ALREADY_CANCELLED", "ALREADY_SHIPPED"} <= kinds


async def test_a_task_runs_in_its_own_world():
    task = next(build_tasks("bank", 1, 0, "test"))
    environment = WorldEnvironment(task)
    assert environment.success(["Done."]) is False
    for message in task.solution:
        for call in message.tool_calls:
            await environment.call(call)
    assert environment.success(["Done."]) is True
    await environment.close()
    with pytest.raises(UserError, match="has no `world`"):
        WorldEnvironment(task.model_copy(update={"world": None}))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"moons": []}, "moons: world 'calendar' has no such table; it has events, people"),
        ({"people": [{}]}, "people.0: it has the columns none, and needs person_id, name"),
        ({"people": [{"person_id": "P1"}]}, "people.0: it has the columns person_id, and needs person_id, name"),
        ({"people": [{"person_id": "P1", "name": 3}]}, "people.0.name: it must be text, not 3"),
        ({"people": [{"person_id": None, "name": "Ada"}]}, "people.0.person_id: it must be text, not null"),
        ({"people": [{"person_id": "P1", "name": name} for name in ("Ada", "Bo")]}, "people.1: UNIQUE constraint failed"),
        ({"events": [{**STATES["calendar"]["events"][0], "hour": True}]}, "events.0.hour: it must be a whole number, not true"),
        ({"events": [{**STATES["calendar"]["events"][0], "hour": 2**64}]}, "events.0: Python int too large"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_the_world_is_named(state, message):
    with pytest.raises(UserError, match=message):
        REGISTRY["calendar"](state)
    task = next(build_tasks("calendar", 1, 0, "test"))
    for field in ("state", "goal"):
        bad = task.model_copy(update={"world": task.world.model_copy(update={field: state})})
        with pytest.raises(UserError, match=f"task '{task.id}': world.{field}.{message}"):
            require_world(bad)
        if field == "state":
            with pytest.raises(UserError, match=message):
                WorldEnvironment(bad)


@pytest.mark.parametrize("world", REGISTRY)
def test_built_tasks_fit_their_worlds(world):
    for task in build_tasks(world, 20, 0, "train"):
        require_world(task)
    made = REGISTRY[world](STATES[world])
    assert made.snapshot() == STATES[world]


def test_the_held_out_world_is_one_of_the_worlds():
    assert set(HELD_OUT) < set(REGISTRY)
    with pytest.raises(UserError, match="no built-in world 'moon'"):
        next(build_tasks("moon", 1, 0, "test"))


def test_worlds_are_named_once_each_with_spaces_allowed():
    assert worlds_of(" orders, bank ,desk") == ("orders", "bank", "desk")
    for text, message in (
        ("moon", "no built-in world 'moon'; there are orders, bank, calendar, library, desk, hotel"),
        ("orders,,bank", "no built-in world ''"),
        ("", "no built-in world ''"),
        ("bank,orders, bank", "world 'bank' is named twice"),
    ):
        with pytest.raises(UserError, match=f"^--worlds: {message}"):
            worlds_of(text)
