"""`make prove HOSTS="…@COMMIT"`: which versions it names, and the rows of the page that it writes."""

from xml.etree import ElementTree

import pytest
import versions

REPORT = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><skipped message="x"/></testcase>
<testcase name="c"><failure message="m">E  AssertionError: a log's last lines
E    assert x
E  [rank1]: x.y.HostError: slime:f takes (a | b)
E  torch.distributed.elastic.ChildFailedError: 1</failure></testcase><testcase><error>E  KeyError: 1</error></testcase>
</testsuite></testsuites>"""


def test_a_word_is_a_checkout_with_a_commit_or_without(tmp_path):
    (tmp_path / "slime@v1").mkdir()
    assert versions.split(f"{tmp_path}/slime@v1") == (f"{tmp_path}/slime@v1", "slime", "HEAD")
    assert versions.split(f"{tmp_path}/slime@v1@abc") == (f"{tmp_path}/slime@v1", "slime", "abc")
    for word in (f"{tmp_path}/miles@v1", f"{tmp_path}", f"{tmp_path}@v1"):
        with pytest.raises(ValueError, match="HOSTS has"):
            versions.split(word)


def test_a_report_becomes_a_row_in_the_place_of_that_of_the_same_commit():
    found = versions.counted(ElementTree.ElementTree(ElementTree.fromstring(REPORT)))
    assert found == ("1", "2", "x.y.HostError: slime:f takes (a / b)")
    page = f"before\n{versions.HEAD}| slime | v1 | old |\n| miles | v1 | kept |\nafter | x |\n"
    row = "| slime | v1 | new |\n"
    expected = page.replace("| slime | v1 | old |\n", "").replace("kept |\n", f"kept |\n{row}")
    assert versions.page_with(page, ("slime", "v1", "new")) == expected


def test_the_page_has_the_table():
    assert versions.HEAD in versions.PAGE.read_text("utf-8")
