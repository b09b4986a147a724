import urllib.request

import pytest

from envace.errors import UserError
from envace.schemas import argument_refusal, compiles, schema_error, validator

DRAFT_3, DRAFT_4, DRAFT_7 = (f"http://json-schema.org/draft-0{number}/schema#" for number in (3, 4, 7))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "not a JSON Schema: type: 'objekt'"),
        ({"properties": {"x": 5}}, "not a JSON Schema: properties/x: 5"),
        ({"$schema": 5}, r"\$schema: 5 is no draft"),
        ({"$schema": ["x"]}, r"\$schema: \['x'\] is no draft"),
        ({"$schema": "urn:mine"}, r"\$schema: 'urn:mine' is no draft"),
        ({"$schema": "http://["}, r"\$schema: 'http://\[' is no draft"),
        ({"properties": {"x": {"$ref": "#/$defs/none"}}}, "'#/\\$defs/none' leads nowhere"),
        ({"type": "object", "properties": {"x": {"$ref": "#/type/none"}}}, r"mend its \$ref"),
        ({"properties": {"x": {"$ref": "http://example.invalid/a.json"}}}, "leads nowhere"),
        ({"properties": {"x": {"$dynamicRef": "#none"}}}, "leads nowhere"),
        ({"properties": {"x": {"minimum": 3}}, "$ref": "#/properties/x/minimum"}, "not a JSON Schema"),
        ({"$ref": "#/shared/x", "shared": {"x": {"type": "objekt"}}}, "not a JSON Schema: type: 'objekt'"),
        ({"$ref": "#/shared/x", "shared": {"x": {"$ref": "#/none"}}}, "'#/none' leads nowhere"),
        ({"$ref": "#"}, "back to itself"),
        ({"$recursiveRef": "#"}, "back to itself"),
        ({"$dynamicAnchor": "me", "anyOf": [{"$dynamicRef": "#me"}]}, "back to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"not": {"$ref": "#/$defs/a"}}}}, "back to itself"),
        ({"dependentSchemas": {"x": {"$ref": "#"}}}, "back to itself"),
        ({"$schema": DRAFT_3, "properties": {"a": {"extends": {"$ref": "#/properties/a"}}}}, "back to itself"),
        ({"properties": {"x": {"pattern": "("}}}, "properties/x/pattern: '\\(' is not a 'regex'"),
        ({"patternProperties": {"a{99999999999}": {}}}, "repetition"),
        ({"$schema": DRAFT_4, "patternProperties": {"(": {}}}, "'\\(' is not a regular expression"),
    ],
)
def test_a_schema_that_cannot_be_applied_is_refused_and_nothing_fetched(schema, message, monkeypatch):
    fetched = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda request, *rest: fetched.append(request))
    with pytest.raises(ValueError, match=message):
        validator(schema)
    with pytest.raises(UserError, match=f"tool 'f': .*{message}"):
        schema_error({}, schema, "tool 'f'")
    assert not fetched


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"next": {"$ref": "#"}}}, {"next": {"next": {}}}, None),
        (
            {"properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["next"]},
            {"next": {"next": None}},
            {"next": {}},
        ),
        ({"$anchor": "me", "properties": {"x": {"$ref": "#me"}}, "type": "object"}, {"x": {}}, {"x": 1}),
        ({"properties": {"$ref": {"type": "string"}}}, {"$ref": "#/none"}, {"$ref": 1}),
        ({"const": {"$ref": "#/none"}}, {"$ref": "#/none"}, {}),
        (
            {
                "$schema": DRAFT_7.rstrip("#"),
                "definitions": {"o": {"properties": {"x": {"type": "null"}}}},
                "$ref": "#/definitions/o",
            },
            {"x": None},
            {"x": 1},
        ),
        ({"$schema": DRAFT_3, "properties": {"x": {"type": "string", "required": True}}}, {"x": ""}, {}),
    ],
)
def test_schemas_of_every_draft_are_applied(schema, good, bad):
    assert schema_error(good, schema, "tool") is None
    assert bad is None or schema_error(bad, schema, "tool") is not None


def test_a_value_too_large_to_be_checked_is_wrong_and_no_fault():
    assert schema_error(10**400, {"multipleOf": 0.5}, "tool") is not None
    assert argument_refusal("n", (10**400,), {"properties": {"n": {"multipleOf": 0.5}}}) is None


CLOSED = {
    "properties": {"n": {"type": "integer"}, "how": {"enum": ["late", "lost"]}},
    "patternProperties": {"^x-": {"type": "string"}},
    "additionalProperties": False,
    "required": ["n"],
}


@pytest.mark.parametrize(
    ("name", "values", "schema", "reason"),
    [
        ("n", (3,), CLOSED, None),
        ("n", ("3",), CLOSED, "'3' is not of type 'integer'"),
        ("n", None, CLOSED, None),
        ("m", None, CLOSED, "'m' does not match any of the regexes: '^x-'"),
        ("m", (3,), CLOSED, "'m' does not match any of the regexes: '^x-'"),
        ("x-m", ("a",), CLOSED, None),
        ("how", ("fun", "lost"), CLOSED, None),
        ("how", ("fun", "joy"), CLOSED, "'fun' is not one of ['late', 'lost']"),
        ("m", (3,), {"properties": {"n": {}}}, None),
        ("m", None, {"additionalProperties": {"type": "string"}}, None),
        ("m", (3,), {"additionalProperties": {"type": "string"}}, "3 is not of type 'string'"),
        # What another argument decides is not known from this one.
        ("n", (3,), {"if": {"properties": {"mode": {"const": 1}}}, "then": {"properties": {"n": {"const": 4}}}}, None),
        ("n", (3,), {"anyOf": [{"required": ["m"]}, {"properties": {"n": {"const": 4}}}]}, None),
    ],
)
def test_arguments_that_no_call_can_have(name, values, schema, reason):
    assert argument_refusal(name, values, schema) == reason


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(" * 5000 + ")" * 5000])
def test_what_is_no_regular_expression(pattern):
    with pytest.raises(ValueError, match="is not a regular expression"):
        compiles(pattern)
    assert compiles(r"a+") == "a+"
