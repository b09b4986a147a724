import pytest

from envace.strict_json import json_value, parse_json


def nested(depth: int) -> list[object]:
    return [nested(depth - 1)] if depth > 1 else []


@pytest.mark.parametrize(
    "value", [None, True, 10**400, -0.5, "é😀\x00", [], {"a": [1, {"b": None}]}, ("a", 1), nested(100)]
)
def test_what_can_be_written_is_kept(value):
    assert json_value(value) is value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "nan is not a number"),
        ({"a": [1.0, float("-inf")]}, "-inf is not a number"),
        (["a\ud800"], r"lone surrogate\) in 'a\\ud800'"),
        ({"\udfff": 1}, "lone surrogate"),
        ({1: 2}, "the key 1 is not text"),
        ({"a": {1, 2}}, "type set is not JSON"),
        (b"a", "type bytes is not JSON"),
        (nested(101), "nested more than 100 deep"),
    ],
)
def test_what_cannot_be_written_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        json_value(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": {"b": 1, "c": 2, "b": 1}}', "'b' is given more than once"), ("[" * 5000, "nested more"), ("{", "line 1")],
)
def test_text_that_is_not_one_value_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)
    assert parse_json('{"a": [1, {"a": 2}]}') == {"a": [1, {"a": 2}]}
