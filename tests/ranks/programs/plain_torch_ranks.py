"""examples/plain_torch.py on the ranks of a launch, in processes that cannot import Megatron.

python plain_torch_ranks.py FOLDER AGGREGATION NUM_SAMPLES

trains with each wrapper and head, and writes the gradient of one step of NUM_SAMPLES to FOLDER.
"""

import os
import sys
from itertools import product
from pathlib import Path

import numpy as np


class NoMegatron:
    """Importing megatron or a module of it is an error, as where it is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ModuleNotFoundError(f"{name} was imported")


sys.meta_path.insert(0, NoMegatron())

import plain_torch
import torch.distributed as dist


def gradient(wrap: str, head: str, aggregation: str, num_samples: int) -> dict[str, np.ndarray]:
    """The whole gradient by parameter, from the shards of all ranks where there are any."""
    policy = plain_torch.build(wrap, head)
    samples = plain_torch.read_steps(plain_torch.ROLLOUTS)[0][:num_samples]
    objective = plain_torch.accumulate(policy, plain_torch.cut(samples, rows=4, aggregation=aggregation))
    found = {"objective": np.array(objective)}
    for name, parameter in policy.named_parameters():
        whole = getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)()
        found[name.removeprefix("module.")] = whole.cpu().numpy()
    return found


def main(folder: Path, aggregation: str, num_samples: int) -> None:
    plain_torch.start_processes()
    for wrap, head in product(plain_torch.WRAPPERS, plain_torch.LOSSES):
        plain_torch.train(plain_torch.parse_arguments(["--wrap", wrap, "--head", head]))
        found = gradient(wrap, head, aggregation, num_samples)
        if dist.get_rank() == 0:
            np.savez(folder / f"{wrap}_{head}.npz", **found)
    dist.barrier()
    # FSDP2 keeps the process group, and with it gloo's threads. If one of them frees a tensor while the interpreter
    # shuts down, the process aborts. So this one ends without a shutdown.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
