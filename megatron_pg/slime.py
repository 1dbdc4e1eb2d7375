"""slime: `python3 -m megatron_pg.slime train.py …`, or `--custom-megatron-init-path megatron_pg.slime.init` (docs/hosts/slime.md)."""

import sys

from megatron_pg.hosts.slime import before_log_prob, before_train_step, init, loss, main, plan

__all__ = ["before_log_prob", "before_train_step", "init", "loss", "main", "plan"]

if __name__ == "__main__":
    main(sys.argv[1:])
