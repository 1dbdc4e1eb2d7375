"""An argument error that is found before there is a process group is shown exactly once (late_arguments.py)."""

import launches
import processes
import pytest

CASES = {
    (0, 1): "--loss-aggregation constant needs a divisor, which has no default. Give --loss-aggregation-divisor",
    (1,): "ranks disagree on loss_aggregation: rank 0 has 'sample_mean', rank 1 has 'constant'",
}


@launches.launch
def printed(folder, full):
    """What the two ranks print, by the ranks whose arguments are invalid."""
    found = {}
    for ranks in CASES:
        place = folder / "_".join(map(str, ranks))
        place.mkdir()
        script = processes.TESTS / "ranks/programs/late_arguments.py"
        processes.run_warm(str(script), str(place), *map(str, ranks))
        found[ranks] = "".join((place / f"{rank}.err").read_text(encoding="utf-8") for rank in range(2))
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_the_reason_is_shown_exactly_once(printed, ranks):
    assert printed[ranks].count("ArgumentError: ") == 1, printed[ranks]
    assert printed[ranks].count(CASES[ranks]) == 1, printed[ranks]
