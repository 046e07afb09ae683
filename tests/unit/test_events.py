"""The record of an event: what is written can be read again, whatever is in it; what is wrong with a line is named."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inprocess import events
from inprocess.events import Event, Header, parse, schema, to_line
from inprocess.events.record import FORMAT, KINDS, MAX_ITEMS, MAX_LINE_BYTES, MAX_TEXT, VERSION

from . import hostile
from .hostile import fuzz

ROOT = Path(__file__).parents[2]

texts = st.text(max_size=50) | st.text(st.characters(categories=["Cc", "So"]), max_size=20)
#: with halves of characters
broken_texts = st.text(st.characters(categories=["Cs", "Cc"]), max_size=20)
attributes = st.dictionaries(
    texts,
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    max_size=5,
)
some_events = st.builds(
    Event,
    time=st.floats(0, 1e9),
    wall_time=st.floats(0, 1e10),
    call=st.integers(0, 99),
    iteration=st.integers(-1, 10**6),
    rank=st.integers(0, 10**6),
    initial_rank=st.integers(0, 10**6),
    phase=st.sampled_from(["run", "start_round"]),
    kind=st.sampled_from(sorted(KINDS)),
    attributes=attributes,
)


def event(**attributes: Any) -> Event:
    return Event(1.5, 1.7e9, 0, 2, 1, 3, "run", "raised", attributes)


def read(what: Event | Header) -> Any:
    """What a reader has of it; it is one line of a size that is promised."""
    line = to_line(what)
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and len(line) <= MAX_LINE_BYTES + 1
    assert line.decode("ascii").rstrip("\n").isprintable()
    return parse(line)


def value(thing: object) -> Any:
    return read(event(it=thing)).attributes["it"]


# --- there and back ---------------------------------------------------------------------------------------------------


@fuzz
@given(some_events)
def test_what_is_written_is_read_again(some: Event) -> None:
    assert read(some) == some


@fuzz
@given(st.builds(Header, texts, st.sampled_from(["rank", "monitor"]), st.integers(0), st.integers(1), texts))
def test_headers(header: Header) -> None:
    assert read(header) == header
    assert (header.format, header.version) == (FORMAT, VERSION)


def test_a_header_says_who_writes() -> None:
    assert [field.name for field in dataclasses.fields(Header)][:4] == ["job", "role", "initial_rank", "pid"]
    header = Header("29500", "rank", 3, 17)
    assert header.host and header.time > 0 and header.wall_time > 1e9


@fuzz
@given(hostile.anything)
def test_nothing_but_valueerror_escapes(raw: bytes | str) -> None:
    line = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    try:
        assert isinstance(parse(line), Event | Header)
    except ValueError as error:
        assert len(str(error)) < 500


@fuzz
@given(st.data())
def test_nor_from_a_damaged_line(data: st.DataObject) -> None:
    with contextlib.suppress(ValueError):
        parse(data.draw(hostile.damaged(some_events.map(to_line))))


@fuzz
@given(
    st.recursive(
        st.none() | st.floats() | texts | broken_texts | st.integers(), lambda inner: st.lists(inner) | st.tuples(inner)
    )
)
def test_whatever_is_in_it_can_be_read(thing: object) -> None:
    again = value(thing)
    assert value(again) == again


# --- what is wrong with a line ----------------------------------------------------------------------------------------

GOOD_EVENT = json.loads(to_line(event()))
GOOD_HEADER = json.loads(to_line(Header("29500", "rank", 0, 1, "node-1", 1.0, 1.7e9)))


def changed(good: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({**good, **changes}).encode()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", "Expecting value"),
        (to_line(event(where="a.py:1"))[:-20], "Unterminated string|Expecting"),
        (b"[1]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"time": 1' + b"\xff}", "codec can't decode"),
        (b"[" * 60_000, "nested"),
        (changed(GOOD_EVENT, attributes=[[[[[[[[[]]]]]]]]]), "nested deeper than 8 levels"),
        (b" " * (MAX_LINE_BYTES + 1), "more than 65536"),
        (b'{"time": 1, "time": 2}', "a name appears twice"),
        (changed(GOOD_EVENT, time=math.nan), "NaN is no number"),
        (changed(GOOD_EVENT, attributes={"x": -math.inf}), "-Infinity is no number"),
        (changed(GOOD_EVENT).replace(b"1.5", b"1e999"), "a number is infinite"),
        (changed(GOOD_EVENT, attributes={"x": [2**1023]}), "a number has more than 1023 bits"),
        (changed(GOOD_EVENT, iteration=True), "its field 'iteration' is no int"),
        (changed(GOOD_EVENT, time=False), "its field 'time' is no float"),
        (changed(GOOD_EVENT, rank=1.0), "its field 'rank' is no int"),
        (changed(GOOD_EVENT, rank=None), "its field 'rank' is no int"),
        (changed(GOOD_EVENT, phase=7), "its field 'phase' is no str"),
        (changed(GOOD_EVENT, attributes=[]), "its field 'attributes' is no Mapping"),
        (changed(GOOD_EVENT, colour="red", shape="\x1b[31m"), r"unknown fields: 'colour', 'shape'$"),
        (changed(GOOD_EVENT, **{"\x1b[31m\ud800": 1}), r"unknown fields: '\\x1b\[31m\\\\ud800'$"),
        (changed(GOOD_HEADER, version=2), "in the format inprocess-events 2; this library reads inprocess-events 1"),
        (changed(GOOD_HEADER, version=[1]), r"in the format inprocess-events \[1\]; this"),
        (
            changed(GOOD_HEADER, format="\x1b[31m" + "x" * 999),
            r"in the format \\x1b\[31mx+\S* ?1?\S*; this library reads",
        ),
        (changed(GOOD_HEADER, pid="1"), "its field 'pid' is no int"),
        (changed(GOOD_HEADER, phase="run"), "unknown fields: 'phase'"),
        *(
            (json.dumps({k: v for k, v in GOOD_EVENT.items() if k != name}).encode(), f"no field '{name}'")
            for name in GOOD_EVENT
        ),
        *(
            (json.dumps({k: v for k, v in GOOD_HEADER.items() if k != name}).encode(), f"no field '{name}'")
            for name in GOOD_HEADER
            if name not in ("format", "version")
        ),
    ],
)
def test_what_is_wrong_is_named(line: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        parse(line)
    assert len(str(error.value)) < 500


def test_every_half_of_a_line_is_refused() -> None:
    line = to_line(event(where="train.py:1 in step", lines=["a", "b"])).rstrip(b"\n")
    for length in range(len(line)):
        with pytest.raises(ValueError):
            parse(line[:length])


def test_a_whole_number_is_a_float() -> None:
    assert parse(changed(GOOD_EVENT, time=3)) == dataclasses.replace(event(), time=3)


def test_unknown_kinds_and_attributes_are_read() -> None:
    """Later versions of the library may write them."""
    later = dataclasses.replace(event(something=1), kind="invented_later")
    assert read(later) == later


# --- hostile content --------------------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Unshowable:
    def __str__(self) -> str:
        raise ValueError

    __repr__ = __str__


@pytest.mark.parametrize(
    ("thing", "becomes"),
    [
        ("\ud800 \udfff \U0001f600", r"\ud800 \udfff" + " \U0001f600"),
        ({"\udc80": ["\udc80"]}, {r"\udc80": [r"\udc80"]}),
        ("a\x00b\r\n\x85\u2028\x1b[2J\x1b]0;x\x07", "a\x00b\r\n\x85\u2028\x1b[2J\x1b]0;x\x07"),
        ({1: "a", None: "b", (2, 3): "c"}, {"1": "a", "None": "b", "(2, 3)": "c"}),
        ((1, frozenset([2])), [1, [2]]),
        (range(3), [0, 1, 2]),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (Colour.RED, 1),
        (True, True),
        (b"raw", "bytes"),
        (Unshowable(), "Unshowable"),
        (ValueError, "type"),
        (1 + 2j, "complex"),
        (2**1023 - 1, 2**1023 - 1),
        (-(2**1023), "int"),
        ("x" * MAX_TEXT, "x" * MAX_TEXT),
        ("x" * (MAX_TEXT + 1), "x" * (MAX_TEXT - 3) + "..."),
        ([0] * (MAX_ITEMS + 1), [0] * MAX_ITEMS),
        (range(10**15), list(range(MAX_ITEMS))),
    ],
)
def test_what_json_does_not_know(thing: object, becomes: object) -> None:
    assert value(thing) == becomes


def test_a_huge_number_is_none() -> None:
    """Python refuses to make text of it."""
    assert value(10**5000) == "int"


def test_a_huge_dict_is_cut() -> None:
    assert len(value({str(number): 0 for number in range(10_000)})) == MAX_ITEMS


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"x": inner}])
def test_what_is_nested_deep_can_be_read_again(wrap: Any) -> None:
    thing: Any = "core"
    for levels in range(30):
        text = json.dumps(value(thing))
        assert ("core" in text) == (levels <= 6)
        thing = wrap(thing)


def test_a_list_that_holds_itself() -> None:
    thing: list[Any] = []
    thing.append(thing)
    assert "list" in json.dumps(value(thing))


@pytest.mark.parametrize(
    "much", [{"lines": ["\U0001f600" * 4000] * 512}, {"\ud800" * 70_000: 1}, {str(n): "x" * 4000 for n in range(20)}]
)
def test_what_does_not_fit_is_left_out(much: dict[str, Any]) -> None:
    (left_out,) = read(event(**much)).attributes.items()
    assert left_out[0] == "left_out" and re.fullmatch(r"\d+ bytes were too many", left_out[1])


def test_the_longest_line() -> None:
    """One byte more is too much."""

    def filled(size: int) -> Event:
        return event(**{str(number): "x" * min(4000, size - number * 4000) for number in range(-(-size // 4000))})

    sizes = [size for size in range(65_150, 65_400) if "left_out" not in read(filled(size)).attributes]
    assert 65_150 in sizes and sizes == list(range(65_150, sizes[-1] + 1)) and 65_399 not in sizes
    assert len(to_line(filled(sizes[-1]))) == MAX_LINE_BYTES


def test_no_field_makes_a_line_too_long() -> None:
    long = "\U0001f600" * 100_000
    assert read(dataclasses.replace(event(x=1), phase=long, kind=long)).attributes.keys() == {"left_out"}
    header = read(Header(long, "rank", 0, 1, long))
    assert header.job == header.host == long[: len(header.job)] != ""


# --- the schema -------------------------------------------------------------------------------------------------------


def fits(data: Any, rule: dict[str, Any]) -> bool:
    """What JSON Schema says of the few words that `schema` uses; another word is an error."""
    types = {"number": (int, float), "integer": int, "string": str, "object": dict}
    assert rule.keys() <= {
        "$schema",
        "title",
        "oneOf",
        "type",
        "properties",
        "required",
        "additionalProperties",
        "const",
    }
    if "oneOf" in rule:
        return sum(fits(data, each) for each in rule["oneOf"]) == 1
    if "const" in rule:
        return type(data) is type(rule["const"]) and bool(data == rule["const"])
    if not isinstance(data, types[rule["type"]]) or isinstance(data, bool):
        return False
    if rule["type"] != "object" or "properties" not in rule:
        return True
    return (
        all(name in data for name in rule["required"])
        and (rule["additionalProperties"] or data.keys() <= rule["properties"].keys())
        and all(fits(data[name], each) for name, each in rule["properties"].items() if name in data)
    )


@pytest.mark.parametrize("kind", [Event, Header])
def test_the_schema_has_each_field(kind: type[Event | Header]) -> None:
    (rule,) = (rule for rule in schema()["oneOf"] if rule["title"] == kind.__name__)
    fields = [field.name for field in dataclasses.fields(kind)]
    assert list(rule["properties"]) == rule["required"] == fields
    assert rule["additionalProperties"] is False
    types = {"float": "number", "int": "integer", "str": "string", "Mapping[str, Any]": "object"}
    for field in dataclasses.fields(kind):
        rules = rule["properties"][field.name]
        assert rules == {"type": types[str(field.type)]} or rules == {"const": field.default}


@pytest.mark.parametrize("good", [GOOD_EVENT, GOOD_HEADER])
def test_the_schema_and_the_parser_agree(good: dict[str, Any]) -> None:
    assert fits(good, schema())
    wrong = [{**good, "more": 1}, *({k: v for k, v in good.items() if k != name} for name in good)]
    wrong += [
        {**good, name: other}
        for name, old in good.items()
        for other in (None, True, [], "x", 7)
        if type(other) is not type(old)
    ]
    for data in wrong:
        try:
            parse(json.dumps(data).encode())
        except ValueError:
            assert not fits(data, schema()), data
        else:
            assert fits(data, schema()), data


def test_the_schema_is_json() -> None:
    assert json.loads(json.dumps(schema())) == schema()
    assert schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"


# --- the kinds --------------------------------------------------------------------------------------------------------


def emitted() -> Iterator[str]:
    """First arguments of `emit` in the modules that import it."""
    for path in (ROOT / "inprocess").rglob("*.py"):
        source = path.read_text()
        if not re.search(r"^ *from inprocess\.system\.observers import .*\bemit\b", source, re.MULTILINE):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "emit":
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: the kind is no literal"
                yield node.args[0].value


def test_kinds_are_those_that_are_emitted() -> None:
    assert {*emitted(), "dropped"} == KINDS.keys()


def page() -> str:
    return (ROOT / "docs/events.md").read_text()


def cells(title: str) -> list[list[str]]:
    """The rows of the first table below a heading of the page."""
    section = page().split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_page_has_all_kinds() -> None:
    assert {row[0].strip("`"): row[-1] for row in cells("Kinds")} == KINDS
    assert [row[0].strip("`") for row in cells("Kinds")] == list(KINDS)


@pytest.mark.parametrize(("kind", "title"), [(Event, "A line"), (Header, "The first line")])
def test_the_page_has_all_fields(kind: type, title: str) -> None:
    names = [(field.name, str(field.type)) for field in dataclasses.fields(kind)]
    types = {"number": "float", "integer": "int", "text": "str", "object": "Mapping[str, Any]"}
    assert [(row[0].strip("`"), types[row[1]]) for row in cells(title)] == names


def test_lines_of_the_page_can_be_read() -> None:
    lines = re.findall(r"^\{.*\}$", page(), re.MULTILINE)
    assert {type(parse(line.encode())) for line in lines} == {Event, Header}


def test_public_names() -> None:
    assert all(hasattr(events, name) for name in events.__all__)
    assert events.VERSION == VERSION == 1
