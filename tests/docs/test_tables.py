"""What docs/tables.py writes on the pages: its tables and its counts are those of today, and none is typed by hand."""

import re

import pytest
import source_mutants
import tables

PAGE = pytest.mark.parametrize("page", tables.WITH_COUNTS, ids=lambda path: path.name)
STALE = "run .venv/bin/python docs/tables.py"
NUMBERS = "eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen|twenty|thirty|forty|fifty"
COUNTED = "objectives|aggregations|corrections|estimators|causes|mutants|metrics|proof rows"


@pytest.mark.parametrize("file", tables.PAGES)
def test_the_generated_tables_are_those_of_the_declarations(file):
    page = (tables.DOCS / file).read_text(encoding="utf-8")
    assert tables.written(page, tables.PAGES[file]) == page, STALE


@PAGE
def test_the_counts_on_a_page_are_those_of_today(page):
    text = page.read_text(encoding="utf-8")
    assert tables.counted(text, tables.counts()) == text, STALE
    assert text.count("<!-- count: ") == len(tables.COUNT.findall(text)), "a marker without its end"


@PAGE
def test_no_page_types_a_count_by_hand(page):
    typed = rf"\b(\d[\d,]*\d|{NUMBERS}) \[?({COUNTED})\b"
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    if page == tables.DOCS / "proof.md":  # written from docs/proof.json
        return
    assert [match[0] for match in re.finditer(typed, text, re.IGNORECASE)] == [], tables.__doc__


def test_a_stale_count_is_replaced_and_an_unknown_one_is_an_error():
    page = "has <!-- count: a -->eleven<!-- --> of <!-- count: b -->1<!-- -->."
    assert tables.counted(page, {"a": 17, "b": 9486}) == (
        "has <!-- count: a -->17<!-- --> of <!-- count: b -->9,486<!-- -->."
    )
    with pytest.raises(KeyError):
        tables.counted(page, {"a": 17})


def test_counts_are_those_of_the_code():
    found = tables.counts()
    assert found["source mutants"] == len(source_mutants.MUTANTS)
    assert all(number > 0 for number in found.values())
