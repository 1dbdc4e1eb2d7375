"""The rules over arguments, as rules.txt lists them: each one broken alone, and its near misses. `-k E55` selects one
rule."""

import re
from decimal import Decimal
from math import inf, nan
from pathlib import Path

import pytest
from namespaces import GRAPHS, REDUCER, CudaGraphScope, accepts, arguments, breaks

import megatron_pg
from megatron_pg.flags import compatibility

NAMES = {"GRAPHS": GRAPHS, "REDUCER": REDUCER, "Decimal": Decimal, "inf": inf, "nan": nan}
NAMES["CudaGraphScope"] = CudaGraphScope
TEXT = (Path(__file__).parent / "rules.txt").read_text(encoding="utf-8")
RULES = [line for line in TEXT.replace("\n    ", " ").splitlines() if line and not line.startswith("#")]

pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


@pytest.mark.parametrize("line", RULES)
def test_a_broken_rule_is_named_alone_and_a_near_miss_passes(line, monkeypatch):
    monkeypatch.setattr(compatibility, "core_version", lambda: (0, 17, 1))
    given, _, fragments = line.partition(" -> ")
    rule, words = given.split(" ", 1)
    args = arguments(**eval(f"dict({words.removeprefix('ok ')})", dict(NAMES)))
    if words.startswith("ok "):
        accepts(args)
    else:
        breaks(args, rule, *fragments.split(" && "))


def test_every_rule_has_a_broken_example_and_a_near_miss():
    package = Path(megatron_pg.__file__).parent
    sources = [package / "args.py", *(package / "flags").glob("*.py")]
    rules = {rule for source in sources for rule in re.findall(r'"(E\d+)[" ]', source.read_text(encoding="utf-8"))}
    near = {line.split(" ")[0] for line in RULES if line.split(" ")[1] == "ok"}
    broken = {line.split(" ")[0] for line in RULES if " -> " in line}
    assert broken == near == rules - {"E1", "E21", "E22"}  # these have their own tests
