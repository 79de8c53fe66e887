"""What a schema may cost a sampler, which compiles it before it answers anybody else."""

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from skyrl_tinker.protocol import answer_schemas
from skyrl_tinker.protocol.answer_schemas import (
    MAX_BRANCHES,
    MAX_DIGITS,
    MAX_ITEMS,
    MAX_LENGTH,
    MAX_LENGTHS,
    MAX_PAIRS,
    MAX_PATTERNS,
    MAX_REFERENCES,
    MAX_SCHEMA,
    MAX_URIS,
    check_schemas,
    pattern_size,
    require_read,
)
from skyrl_tinker.protocol.schemas.chats import ChatCompletionRequest
from skyrl_tinker.protocol.schemas.openai import FieldError, parse_openai


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class If(BaseModel):
    """A branch of a union."""

    type: Literal["if"]
    then: "list[If | Not]"


class Not(BaseModel):
    type: Literal["not"] = "not"
    of: Color | None = Field(None, description="A color")
    share: Annotated[float, Field(ge=0)] = 1


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tree: Annotated[If | Not, Field(discriminator="type")]
    colors: dict[str, Color]
    point: tuple[int, str]


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        (r"\d[a-z\]{3}]", 2),
        ("a{3}b", 4),
        ("[a-z]{2,7}", 7),
        ("a{4,}", 4),
        ("a{0}", 1),
        ("(ab{3}){10}c", 41),
        ("((a{10}){10}){10}", 1000),
        ("{3}a{,3}", 5),
        (")a", 2),
        ("(a", 1),
        (r"\(a\)", 3),
        (f"a{{{'9' * 10_000}}}", 10**6),
        ("(" * 50 + "a" + "{999999})" * 50, 10**12),
    ],
)
def test_what_repeats_counts_each_time(pattern: str, size: int) -> None:
    assert pattern_size(pattern) == size


def test_a_class_without_an_end_is_searched_once_for_it() -> None:
    """Each of its brackets began a search to the end, which took hours for so many."""
    assert pattern_size("a[" * 10**6) == 2
    assert pattern_size(r"[\]" * 10**6) == 1


def of(pattern: str, count: int = 1) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"pattern": pattern} for n in range(count)}}


def test_expressions_count_together_wherever_they_are() -> None:
    check_schemas(of("a" * (MAX_PATTERNS // 10), 10))
    check_schemas({"type": "object", "properties": {"pattern": {"type": "string"}}})
    wrong = (
        "10100 characters of regular expressions, those that repeat counted each time, expected at most 1000"
    )
    for schema in (
        of("(.{100}){10}[0-9]{100}[a-z]{9000}"),
        of("(.{10}){10}x", 100),
        {"anyOf": [{"items": of("a{10100}")}]},
        {"patternProperties": {"a{10100}": {}}},
    ):
        with pytest.raises(ValueError, match=wrong):
            check_schemas(schema)


def of_lengths(*lengths: int) -> dict[str, Any]:
    return {"properties": {f"p{n}": {"items": {"maxLength": each}} for n, each in enumerate(lengths)}}


def objects(count: int) -> list[Any]:
    return [{"properties": {f"p{n}": {}}} for n in range(count)]


def with_properties(count: int, schema: Any, required: int = 0) -> dict[str, Any]:
    names = [f"p{n}" for n in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, schema), "required": names[:required]}


@pytest.mark.parametrize(
    ("most", "more", "found"),
    [
        (
            with_properties(
                100, {"type": "number", "minimum": 12345678901234567, "exclusiveMaximum": 0.25}, 100
            ),
            with_properties(
                100, {"type": "number", "minimum": 12345678901234567, "exclusiveMaximum": 0.125}, 100
            ),
            f"2100 digits of minimum and maximum, expected at most {MAX_DIGITS}",
        ),
        (
            with_properties(200, {"type": "string"}),
            with_properties(201, {"type": "string"}),
            f"20100 pairs of optional properties of one object, expected at most {MAX_PAIRS}",
        ),
        (
            with_properties(1000, {"type": "string"}, 800),
            with_properties(1000, {"type": "string"}, 799),
            "20100 pairs",
        ),
        (
            {"anyOf": [with_properties(100, {}) for _ in range(4)]},
            {"anyOf": [with_properties(100, {}) for _ in range(5)]},
            "24750 pairs",
        ),
        (
            {"prefixItems": [{"items": {"$ref": "#"}}] * MAX_REFERENCES},
            {"prefixItems": [{"items": {"$ref": "#"}}] * (MAX_REFERENCES + 1)},
            rf"251 \$ref, expected at most {MAX_REFERENCES}",
        ),
        (
            {"prefixItems": [{"format": "uri"}] * MAX_URIS + [{"format": "date"}] * 100},
            {"prefixItems": [{"format": "uri"}] * MAX_URIS + [{"format": "uri-reference"}]},
            f"21 strings of format uri, expected at most {MAX_URIS}",
        ),
        (
            of_lengths(100, 100, 100, 10**9, 500, 60, 40),
            of_lengths(100, 100, 100, 10**9, 500, 60, 41),
            f"601 characters of different minLength and maxLength, .*, expected at most {MAX_LENGTHS}",
        ),
        (
            {"prefixItems": [{"minLength": n} for n in (MAX_LENGTH, MAX_LENGTH + 1, MAX_LENGTH + 2)]},
            {"prefixItems": [{"minLength": n, "maxLength": 150} for n in range(5)]},
            "750 characters of different minLength",
        ),
        (
            {"maxItems": MAX_ITEMS - 1, "items": {"maxItems": 1}},
            {"maxItems": MAX_ITEMS, "items": {"maxItems": 1e300}},
            f"1020000 items of maxItems, expected at most {MAX_ITEMS}",
        ),
        (
            {"maxItems": MAX_ITEMS, "items": {"maxItems": -1}},
            {"maxItems": MAX_ITEMS + 1, "items": {"maxItems": -(10**6)}},
            "20001 items of maxItems",
        ),
        (
            {"items": {"oneOf": objects(100)}},
            {"items": {"oneOf": objects(101)}},
            f"5050 pairs of branches of one anyOf or oneOf .*, expected at most {MAX_BRANCHES}",
        ),
        (
            {"anyOf": [{"anyOf": objects(5)} for _ in range(19)]},
            {"anyOf": [{"anyOf": objects(5)} for _ in range(21)]},
            "5460 pairs of branches",
        ),
    ],
)
def test_parts_that_are_slow_to_compile_have_bounds(most: Any, more: Any, found: str) -> None:
    check_schemas(most)
    with pytest.raises(ValueError, match=found):
        check_schemas(more)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value{n}" for n in range(4000)]},
        {"oneOf": [{"const": n, "title": "a"} for n in range(1000)]},
        with_properties(400, {"anyOf": [{"type": "string", "maxLength": 200}, {"type": "null"}]}, 400),
        with_properties(100, {"type": "array", "minItems": 10**6, "maxItems": MAX_ITEMS // 100}, 100),
        with_properties(3, {"minLength": "a", "maxLength": -1}),
        with_properties(3, {"anyOf": {}}),
        with_properties(3, {"oneOf": [1]}),
        {"type": 5},
        with_properties(1000, {"type": "string"}, 1000),
        with_properties(400, {"type": "integer", "minimum": 0, "maximum": 100}, 400),
        {"$ref": 5},
        {"required": [[]], "properties": {"a": 1, "format": {}}, "format": 1, "minimum": "a"},
        with_properties(5, {"properties": ["a"], "required": "a", "pattern": 1, "patternProperties": 1}),
    ],
)
def test_other_schemas_are_the_samplers_to_judge(schema: Any) -> None:
    check_schemas(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "not": {"minimum": 0}}, "not is not supported"),
        ({"items": {"if": {"const": 1}, "then": {}}}, "if is not supported"),
        ({"properties": {"a": {"dependentRequired": {"a": ["b"]}}}}, "dependentRequired is not supported"),
        ({"$defs": {"if": {"dependentSchemas": {}}}}, "dependentSchemas is not supported"),
        ({"const": 5, "type": "string"}, "const beside type: const alone would be read"),
        ({"enum": ["a", 1], "type": ["string", "null"]}, "enum beside type"),
        ({"enum": [True], "type": "integer"}, "enum beside type"),
        ({"enum": [1, 5], "type": "integer", "minimum": 3}, "enum beside minimum"),
        ({"anyOf": [{"minimum": 5}], "type": "integer"}, "anyOf beside type"),
        ({"type": "object", "anyOf": [{"type": "object"}, {"type": "null"}]}, "anyOf beside type"),
        ({"oneOf": [{"type": "object"}], "properties": {}}, "oneOf beside properties"),
        ({"allOf": [{"type": "integer"}], "minimum": 3}, "allOf beside minimum"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "maximum": 3}, r"\$ref beside maximum"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "type": "string"}, r"\$ref beside type"),
        ({"anyOf": [{"type": 5}, 1], "type": 5}, "anyOf beside type"),
        ({"anyOf": []}, "anyOf is empty"),
        ({"type": "object", "required": ["z"]}, "required: 'z' is none of the properties"),
        ({"properties": {"a": {}}, "required": ["a", "b"]}, "required: 'b' is none of the properties"),
    ],
)
def test_what_no_grammar_would_read_is_refused(schema: Any, message: str) -> None:
    """The sampler would answer with what does not fit."""
    with pytest.raises(ValueError, match=message):
        require_read(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"not": {"const": 1, "type": "integer"}, "if": {"enum": [2.0], "type": "integer"}}},
        {"enum": ["a", None, [1], {"not": 1}], "type": ["string", "null", "array", "object"]},
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": None, "title": "a"},
        {"anyOf": [{"type": "integer"}, {"type": ["null"]}], "type": ["integer", "null"]},
        {
            "items": {"$ref": "#/$defs/a", "type": "integer", "description": "b"},
            "$defs": {"a": {"type": "integer"}},
        },
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "integer"}}, "default": 1},
        {"const": "a", "enum": ["a"], "type": "string"},
        {"type": "string", "oneOf": [{"const": "a", "description": "first"}, {"enum": ["b"]}]},
        {"type": "number", "anyOf": [{"type": "integer"}, {"const": 1.5}]},
        {"type": "object", "oneOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "object"}}},
        {
            "oneOf": [{"type": "null"}],
            "discriminator": {
                "propertyName": "type",
                "mapping": {"if": "#/$defs/If", "enum": "#/$defs/E"},
            },
        },
        {"type": ["integer", *(f"no type {n}" for n in range(2000))], "enum": [1] * 5000},
    ],
)
def test_what_says_the_same_twice_or_restricts_nothing_is_taken(schema: Any) -> None:
    check_schemas(schema)
    require_read(schema)


def test_schemas_that_pydantic_makes_are_read() -> None:
    schema = Answer.model_json_schema()
    check_schemas(schema)
    require_read(schema)


def test_a_reference_leads_to_a_part_of_its_own_schema() -> None:
    parts = {"a~/b c": {"anyOf": [{"properties": {"$ref": {"type": "integer"}}}, {"$ref": "#"}]}}
    for place in ("#", "#/$defs", "#/$defs/a~0~1b c", "#/$defs/a~0~1b%20c/anyOf/1"):
        check_schemas({"items": {"$ref": place}, "$defs": parts}, {})
    for place in ("http://127.0.0.1/a", "#a", "a", "", "#/a", "#/$defs/a~0~1b%20c/anyOf/2", "#/items/$ref/a"):
        with pytest.raises(ValueError, match=r"\$ref '.*' leads nowhere, expected '#/' and names"):
            check_schemas({"$defs": parts}, {"items": {"$ref": place}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
    ],
)
def test_a_reference_that_only_leads_to_itself_is_none(schema: Any) -> None:
    with pytest.raises(ValueError, match="leads back to itself"):
        check_schemas(schema)


def test_a_chain_of_references_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []
    part = answer_schemas._part
    monkeypatch.setattr(
        answer_schemas, "_part", lambda place, schema: followed.append(place) or part(place, schema)
    )
    chain = [{"$ref": f"#/prefixItems/{n}"} for n in range(1, MAX_REFERENCES)]
    check_schemas({"prefixItems": [*chain, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "null"}}})
    assert len(followed) == MAX_REFERENCES


def test_a_reference_in_data_is_none() -> None:
    lost = {"$ref": "#/nowhere"}
    data = {"const": lost, "default": {"a": lost}, "examples": lost}
    check_schemas(data, {"enum": [lost]}, {"items": {"properties": {"properties": data}}})
    check_schemas({"$defs": {"$defs": data}})
    names = ("const", "enum", "default", "examples")
    named = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    check_schemas({"properties": named, "$defs": {name: {"type": "null"} for name in names}})
    for schema in (
        {"properties": data},
        {"$ref": "#/default", "default": {"type": "null"}},
        {"items": {"default": {"type": "null"}}, "then": {"$ref": "#/items/default"}},
        {"properties": [{"default": {"type": "null"}}], "then": {"$ref": "#/properties/0/default"}},
    ):
        with pytest.raises(ValueError, match="leads nowhere"):
            check_schemas(schema)


def test_a_schema_has_a_length() -> None:
    with pytest.raises(ValueError, match=f"expected at most {MAX_SCHEMA}"):
        check_schemas({"const": "x" * MAX_SCHEMA})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": of(".{9999}")},
                }
            },
            "response_format",
        ),
        ({"tools": [{"function": {"name": "a", "strict": True, "parameters": of(".{9999}")}}]}, "tools"),
        (
            {
                "tools": [{"function": {"name": "a", "parameters": of(".{9999}")}}],
                "parallel_tool_calls": False,
            },
            "tools",
        ),
    ],
)
def test_it_is_refused_where_it_would_be_compiled(fields: dict[str, Any], named: str) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(FieldError, match=rf"{named}.*: 9999 characters of regular expressions") as refused:
        parse_openai(ChatCompletionRequest, asked | fields)
    assert refused.value.field == named
    parse_openai(
        ChatCompletionRequest, asked | {"tools": [{"function": {"name": "a", "parameters": of(".{9999}")}}]}
    )


def test_only_strict_tools_must_be_read() -> None:
    """The arguments of others are as the model writes them."""
    loose = {"function": {"name": "a", "parameters": {"type": "object", "not": {}}}}
    strict = {"function": {**loose["function"], "name": "b", "strict": True}}
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}], "parallel_tool_calls": False}
    parse_openai(ChatCompletionRequest, {**asked, "tools": [loose]})
    with pytest.raises(FieldError, match=r"tools.*: parameters: not is not supported"):
        parse_openai(ChatCompletionRequest, {**asked, "tools": [loose, strict]})


def test_tools_are_no_branches_of_one_schema() -> None:
    """An answer's calls begin with the names of theirs."""
    tools = [{"function": {"name": f"a{n}", "strict": True, "parameters": {}}} for n in range(128)]
    asked = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    parse_openai(ChatCompletionRequest, asked | {"tools": tools})
