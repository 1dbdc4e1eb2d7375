"""verl, Megatron engine: `actor_rollout_ref.model.external_lib=megatron_pg.verl` (docs/hosts/verl.md)."""

from megatron_pg.hosts.verl.install import install

install()
