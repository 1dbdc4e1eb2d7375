"""The lines of a rollout file: their ends, their header, one JSON object each. Malformed ones: test_untrusted_input."""

import itertools
import json

import pytest
from rollout_files import HEADER, RECORD

from megatron_pg.rollouts import lines
from megatron_pg.rollouts.lines import RolloutFileError, check_header, parse_line, raw_lines, read_records

CONTENT = b"".join(json.dumps(line).encode() + b"\n" for line in (HEADER, RECORD, {"x_note": "Σ"}, RECORD))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(CONTENT)
    return path


def test_records_come_with_their_line_numbers_and_without_the_header(path):
    assert list(read_records(path)) == [(2, RECORD), (3, {"x_note": "Σ"}), (4, RECORD)]


@pytest.mark.parametrize("content", [CONTENT, CONTENT[:-1], b"\n\n\n", b"no end", b""])
def test_the_lines_are_the_file_and_the_bytes_that_are_read_are_told(tmp_path, content):
    path, told = tmp_path / "lines.jsonl", []
    path.write_bytes(content)
    whole = content.splitlines(keepends=True)
    assert list(raw_lines(path, update=told.append)) == list(raw_lines(path)) == whole
    assert told == list(itertools.accumulate(map(len, whole)))


def test_a_line_without_end_is_not_read_into_memory(path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 40)
    first, *_ = raw_lines(path)
    assert len(first) == 41
    with pytest.raises(RolloutFileError, match="here: line is longer than 40 bytes"):
        parse_line(first, "here")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "duplicate field 'a'"),
        (b'{"a": {"b": 1, "b": 1}}', "duplicate field 'b'"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": [-Infinity]}', "-Infinity is not a JSON number"),
        (b"[1]\n", "is a JSON list, not an object"),
        (b'{"a": "\xff"}', r"is not UTF-8 \(byte 7\)"),
        (b'{"a": 1}{"a": 1}\n', "Write one object per line, without empty lines\\.$"),
        (b"\n", "Write one object per line, without empty lines\\.$"),
        (b'{"a": 1', "The line has no end: if its writer was killed, delete it"),
    ],
)
def test_a_line_that_is_not_one_object_is_refused_with_its_place(line, message):
    with pytest.raises(RolloutFileError, match=r"^r.jsonl:7: ") as caught:
        parse_line(line, "r.jsonl:7")
    assert caught.match(message)


@pytest.mark.parametrize("change", [{"version": 4}, {"version": "2"}, {"format": "other"}, {"note": 1}])
def test_a_header_of_something_else_is_refused(change):
    check_header(HEADER | {"x_note": 1}, "r.jsonl")
    with pytest.raises(RolloutFileError, match=r"^r.jsonl:1: .*header"):
        check_header(HEADER | change, "r.jsonl")


def test_a_file_that_cannot_be_read_is_named_without_its_control_characters(tmp_path):
    with pytest.raises(RolloutFileError, match=r"no\\nfile: cannot be read \(No such file"):
        list(raw_lines(tmp_path / "no\nfile"))
    with pytest.raises(RolloutFileError, match="no file can have this name"):
        list(raw_lines("a\0b"))


def test_a_field_that_is_given_twice_among_many_is_found():
    names = [*map(str, range(20_000)), "19999"]
    line = "{" + ", ".join(f'"{name}": 0' for name in names) + "}\n"  # a count for each name would take minutes
    with pytest.raises(RolloutFileError, match="duplicate field '19999'"):
        parse_line(line.encode(), "here")
