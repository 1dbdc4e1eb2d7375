"""`python -m megatron_pg` is the command `megatron-pg`."""

import sys

from megatron_pg.cli import main

if __name__ == "__main__":
    sys.exit(main())
