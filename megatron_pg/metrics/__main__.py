"""`python -m megatron_pg.metrics docs/metrics.md` writes the declarations into the page, between its two markers."""

import sys
from pathlib import Path

from megatron_pg.metrics.docs import replace_tables

page = Path(sys.argv[1])
page.write_text(replace_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
