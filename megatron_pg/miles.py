"""miles: `python3 -m megatron_pg.miles train.py …` or `--custom-megatron-init-path megatron_pg.miles.init`.

See docs/hosts/miles.md.
"""

from megatron_pg.hosts.rollout.miles import HOST, before_train_step, init
from megatron_pg.hosts.startup import run

__all__ = ["before_log_prob", "before_train_step", "init", "loss"]

loss, before_log_prob = HOST.loss, HOST.before_log_prob

if __name__ == "__main__":
    run(HOST.main)
