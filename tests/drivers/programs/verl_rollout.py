"""A rollout without an engine: it samples from the table of logits that the trainer's latest weights make."""

from typing import Any

import job
import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

NAME = "table_server"


class Receiver(BaseRollout):
    """The trainer's side: passes the weights on."""

    replica_rank, is_leader_rank = 0, True

    async def resume(self, tags: Any) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Any, global_steps: int | None = None, **rest: Any) -> None:
        import torch

        table = job.model.table_of(dict(weights))
        if torch.distributed.get_rank() == 0:
            await ray.get_actor(NAME).receive.remote(table, global_steps or 0)


@ray.remote(num_cpus=0)
class Server:
    """A response depends on the weights, the step, the prompt, and the number of the sample among its prompt's."""

    def __init__(self) -> None:
        self._table, self._steps = None, 0

    async def receive(self, table: Any, steps: int) -> None:
        self._table, self._steps = table, steps

    async def wake_up(self) -> None:
        pass

    async def sleep(self) -> None:
        pass

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict, **rest: Any) -> TokenOutput:
        seed = f"{self._steps} {prompt_ids} {sampling_params['session']}"
        tokens, logprobs = job.model.sample(self._table, prompt_ids[-1], seed)
        return TokenOutput(
            token_ids=tokens, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": self._steps}
        )


class Replica(RolloutReplica):
    async def launch_servers(self) -> None:
        server = Server.options(name=NAME, get_if_exists=True).remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"127.0.0.1:{9000 + self.replica_rank}"
