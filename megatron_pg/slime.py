"""slime: `python3 -m megatron_pg.slime train.py …` or `--custom-megatron-init-path megatron_pg.slime.init`.

See docs/hosts/slime.md.
"""

from megatron_pg.hosts.rollout.slime import HOST, init, plan
from megatron_pg.hosts.startup import run

__all__ = ["before_log_prob", "before_train_step", "init", "loss", "plan"]

loss, before_train_step, before_log_prob = HOST.loss, HOST.before_train_step, HOST.before_log_prob

if __name__ == "__main__":
    run(HOST.main)
