import gzip
import json
import os
import threading

import pytest

from envace.data.tasks import read_tasks, write_tasks
from envace.errors import UserError
from envace.training.sft import read_trajectories
from envace.worlds.tasks import build_tasks

TASKS = list(build_tasks("orders", 3, 0, "train"))
LINES = [task.model_dump_json() for task in TASKS]


@pytest.fixture(params=["tasks.jsonl", "tasks.jsonl.gz"])
def file(request, tmp_path):
    return tmp_path / request.param


def test_tasks_written_are_the_tasks_read(file):
    assert write_tasks(file, iter(TASKS)) == 3
    assert list(read_tasks(file, scorable=True)) == TASKS
    assert [one.name for one in file.parent.iterdir()] == [file.name]


def test_an_older_file_stays_until_the_new_one_is_whole(file):
    write_tasks(file, TASKS)

    def broken():
        yield TASKS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tasks(file, broken())
    assert list(read_tasks(file)) == TASKS
    assert [one.name for one in file.parent.iterdir()] == [file.name]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    write_tasks(tmp_path / "link.jsonl", TASKS)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert list(read_tasks(tmp_path / "real.jsonl")) == TASKS


def test_a_pipe_is_written_and_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=write_tasks, args=(tmp_path / "pipe", TASKS))
    writer.start()
    assert list(read_tasks(tmp_path / "pipe")) == TASKS
    writer.join()


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path):
    (tmp_path / "tasks.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(LINES).encode())
    assert list(read_tasks(tmp_path / "tasks.jsonl")) == TASKS


WHOLE = gzip.compress("\n".join(LINES).encode())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "it holds no tasks"),
        ("a.jsonl", b"\n \n", "it holds no tasks"),
        ("a.jsonl", LINES[0].encode() + b"\n\xff", "line 2: not a JSONL file of tasks: .*invalid start byte"),
        ("a.jsonl", "".join(LINES).encode("utf-16"), "line 1: not a JSONL file of tasks"),
        ("a.jsonl.gz", LINES[0].encode(), "not gzip"),
        ("a.jsonl.gz", WHOLE[:-200], "damaged after line"),
        ("a.jsonl.gz", WHOLE[:200] + bytes(20) + WHOLE[220:], "damaged after line"),
        ("a.jsonl", b"\n" + b"[" * 100_000, "line 2: Invalid JSON: recursion limit"),
        ("a.jsonl", b"\n" + b'{"id": "' + b"a" * 1_000_000, "line 2: Invalid JSON: EOF"),
        ("a.jsonl", b'{"id": "\\ud800"}', "line 1: Invalid JSON: unexpected end of hex escape"),
        ("a.jsonl", LINES[0][:-1].encode() + b', "id": "b"}', "line 1: 'id' is given more than once"),
        ("a.jsonl", LINES[0].replace('"metadata":{', '"metadata":{"x":NaN,').encode(), "line 1: metadata.x: nan is not"),
        ("a.jsonl", LINES[0].replace('"checks":[', '"checks":[[],').encode(), "line 1: checks: 2 entries"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_tasks_is_one_message(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*{message}") as raised:
        list(read_tasks(tmp_path / name))
    assert len(str(raised.value)) < 500 and "\n" not in str(raised.value)


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(UserError, match="no such file of tasks"):
        list(read_tasks(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="a folder, not a file of tasks"):
        list(read_tasks(tmp_path))
    with pytest.raises(UserError, match=r"tasks\.jsonl: cannot be read: "):
        (tmp_path / "tasks.jsonl").symlink_to("tasks.jsonl")
        list(read_tasks(tmp_path / "tasks.jsonl"))


def spoilt(change):
    task = json.loads(LINES[1])
    change(task)
    return json.dumps(task)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda task: task.update(checks=[]), "it has no checks"),
        (lambda task: task["world"].update(name="moon"), "no built-in world 'moon'"),
        (lambda task: task["world"]["state"]["orders"][1].pop("item"), r"world.state.orders.1: it has the columns"),
        (lambda task: task["world"]["goal"].update(moons=[]), "world.goal.moons: world 'orders' has no such table"),
    ],
)
def test_a_task_that_cannot_be_played_is_named_with_its_line(tmp_path, change, message):
    (tmp_path / "tasks.jsonl").write_text("\n\n".join([LINES[0], spoilt(change)]))
    with pytest.raises(UserError, match=f"tasks.jsonl, line 3: task 'orders-train-0-1': {message}"):
        list(read_tasks(tmp_path / "tasks.jsonl", scorable=True))


def test_a_bad_trajectory_is_named(tmp_path):
    file = tmp_path / "trajectories.jsonl"
    good = {"task": json.loads(LINES[0]), "messages": [{"role": "assistant", "content": "Done."}]}
    file.write_text(json.dumps(good))
    assert [one.task for one in read_trajectories(file)] == TASKS[:1]
    tool = {**good["task"], "tools": [{"name": "f", "parameters": {"type": "objekt"}}]}
    for bad, message in (
        ({**good, "messages": [{"role": "tool"}]}, "messages.0: a tool message that answers no call"),
        ({**good, "task": tool}, "task.tools.0.parameters: not a JSON Schema"),
    ):
        file.write_text(json.dumps(good) + "\n" + json.dumps(bad))
        with pytest.raises(UserError, match=f"trajectories.jsonl, line 2: {message}"):
            list(read_trajectories(file))
    file.write_text("")
    with pytest.raises(UserError, match="it holds no trajectories"):
        list(read_trajectories(file))
