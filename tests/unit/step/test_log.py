"""The console lines of a run."""

from megatron_pg.step.log import Console


def lines_of(times: list[float] | None, *, last: int) -> list[str]:
    lines: list[str] = []
    console = Console(lines.append, None if times is None else iter(times).__next__)
    for iteration in (5, 6, 7):
        console.step({"iteration": iteration, "pg_loss": 0.5}, last=last)
    return lines


def test_a_line_on_a_terminal_ends_with_the_time_left():
    lines = lines_of([10.0, 12.0, 20.0], last=1000)
    assert lines[0] == "pg      5 | pg_loss +0.5"  # of one step, nothing is known
    assert lines[1] == "pg      6 | pg_loss +0.5 | 0:33:08 left"  # 2 s a step, 994 steps
    assert lines[2] == "pg      7 | pg_loss +0.5 | 1:22:45 left"  # 5 s a step, 993 steps


def test_without_a_terminal_or_an_end_lines_have_no_time():
    assert lines_of(None, last=1000)[2] == lines_of([1.0, 2.0, 3.0], last=0)[2] == "pg      7 | pg_loss +0.5"
    assert lines_of([1.0, 2.0, 3.0], last=7)[2] == "pg      7 | pg_loss +0.5"
