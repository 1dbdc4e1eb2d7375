"""miles: `python3 -m megatron_pg.miles train.py …`, or `--custom-megatron-init-path megatron_pg.miles.init` (docs/hosts/miles.md)."""

import sys

from megatron_pg.hosts.miles import HOST, before_train_step, init

__all__ = ["before_log_prob", "before_train_step", "init", "loss"]

loss, before_log_prob = HOST.loss, HOST.before_log_prob

if __name__ == "__main__":
    HOST.main(sys.argv[1:])
