"""The console line."""

from megatron_pg.metrics.reporting import console_line


def test_the_console_line_shows_negative_values():
    line = console_line(12, {"pg_loss": -0.0123, "grad_norm": 0.5, "num_tokens": 7})
    assert line == "pg     12 | pg_loss -0.0123 | grad_norm +0.5"
