"""NeMo-RL: `python -m megatron_pg.nemo_rl examples/run_grpo.py …` (docs/hosts/nemo_rl.md)."""

import sys

from megatron_pg.hosts.nemo_rl import PolicyGradientLossFn, install, main

__all__ = ["PolicyGradientLossFn", "install", "main"]

if __name__ == "__main__":
    main(sys.argv[1:])
