"""NeMo-RL: `python -m megatron_pg.nemo_rl examples/run_grpo.py …` (docs/hosts/nemo_rl.md)."""

from megatron_pg.hosts.nemo_rl.launcher import PolicyGradientLossFn, install, main
from megatron_pg.hosts.patching import run

__all__ = ["PolicyGradientLossFn", "install", "main"]

if __name__ == "__main__":
    run(main)
