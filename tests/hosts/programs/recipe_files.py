"""Two files of a user of slime or miles: our reducers from docs/migrating.md, and a reducer in their own form."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text(encoding="utf-8")

THEIR_DIVISOR = 1000.0
THEIRS = f"""
from megatron.core import mpu

DIVISOR = {THEIR_DIVISOR}

def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    assert mpu.get_context_parallel_world_size() == 1
    def token_sum(x):
        parts = zip(x.split(response_lengths, dim=0), loss_masks, strict=False)
        return sum((part * mask).sum() for part, mask in parts)
    return token_sum if calculate_per_token_loss else lambda x: token_sum(x) / DIVISOR
"""


def block_of(page: str, first_line: str) -> str:
    """The code block of a page that begins with this line."""
    (found,) = (b for b in re.findall(r"```[^\n]*\n(.*?)```", page, re.DOTALL) if b.startswith(first_line))
    return found


def write(folder: Path) -> None:
    """`my_reducers` and `their_reducer`, importable from the folder."""
    (folder / "my_reducers.py").write_text(block_of(PAGE, "# my_reducers.py"), encoding="utf-8")
    (folder / "their_reducer.py").write_text(THEIRS, encoding="utf-8")
