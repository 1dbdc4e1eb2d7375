"""A mistake in the source fails a test: chosen mistakes, and those that were once overlooked."""

import ast
import re

import pytest
import source_mutants
from source_mutants import BROKEN, MUTANTS, REPOSITORY


@pytest.mark.parametrize("path", sorted({mutant.path for mutant in MUTANTS}))
def test_every_mutant_changes_one_place_of_a_program(path):
    text = (REPOSITORY / "megatron_pg" / path).read_text(encoding="utf-8")
    program = ast.dump(ast.parse(text))
    for mutant in MUTANTS:
        if mutant.path == path:
            assert text.count(mutant.old) == 1, (
                f"{mutant.what}: its text occurs {text.count(mutant.old)} times in {path}"
            )
            assert ast.dump(ast.parse(text.replace(mutant.old, mutant.new))) != program, mutant.what


def test_every_mutant_names_a_test_that_there_is():
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        file, _, name = mutant.test.partition("::")
        text = (REPOSITORY / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {re.escape(name.partition('[')[0])}\(", text, re.MULTILINE), mutant.test


@pytest.mark.full_tier("a test for each of them is run by `make prove`")
@pytest.mark.proof("Mutants of the source killed by the default tier")
def test_every_mutant_is_noticed_by_its_test(tmp_path, evidence):
    found = source_mutants.noticed(tmp_path)
    assert found.pop("") == []  # the tests hold without a mistake
    unnoticed = [what for what, errors in found.items() if not errors]
    assert not unnoticed, "\n".join(unnoticed)
    broken = [f"{what}: {', '.join(errors)}" for what, errors in found.items() if BROKEN.intersection(errors)]
    assert not broken, "\n".join(broken)
    evidence(cases=len(found))
