"""A rollout without an engine: it samples from the table of logits that the trainer's latest weights make."""

from typing import Any

import toy

policy: Any = None  # NeMo-RL's Policy, when it is made


class Synchronizer:
    """Takes the weights from the trainer."""

    is_stale = True

    def __init__(self, generation: "Generation"):
        self._generation = generation

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> dict:
        self._generation.update_weights_via_ipc_zmq()
        return {}


class Generation:
    """NeMo-RL's generation interface."""

    def __init__(self, cluster: Any, config: Any, **rest: Any):
        self.cfg, self.table, self.number = config, None, 0
        self.weight_synchronizer = Synchronizer(self)

    def finish_generation(self, *rest: Any, **more: Any) -> bool:
        return True

    prepare_for_generation = shutdown = invalidate_kv_cache = prepare_refit_info = finish_generation

    def update_weights_via_ipc_zmq(self) -> list:
        """NeMo-RL v0.7.0 calls it itself, after the trainer has been asked to send."""
        self.table = policy.run_all_workers_single_data("table")[0]
        self.number += 1
        return []

    def clear_logger_metrics(self) -> None:
        pass

    def get_logger_metrics(self) -> dict:
        return {}

    def generate(self, data: Any, greedy: bool = False) -> Any:
        import torch
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        rows, logs, sizes = [], [], []
        for place, (row, length) in enumerate(
            zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
        ):
            tokens, logprobs = toy.sample(self.table, row[length - 1], f"{self.number} {place}")
            rows.append(torch.tensor(row[:length] + tokens))
            logs.append(torch.tensor([0.0] * length + logprobs))
            sizes.append(len(tokens))

        def padded(values: list, fill: float) -> Any:
            return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)

        lengths = torch.tensor(sizes)
        return BatchedDataDict(
            output_ids=padded(rows, self.cfg["_pad_token_id"]),
            logprobs=padded(logs, 0.0),
            generation_lengths=lengths,
            unpadded_sequence_lengths=data["input_lengths"] + lengths,
            truncated=torch.zeros(len(rows), dtype=torch.bool),
        )
