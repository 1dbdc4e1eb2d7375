"""The probes of `doctor`, each in its own process: an import may fail, hang or end the interpreter.

    python -m megatron_pg.cli.probe torch | triton | megatron | gloo RANK FILE

prints JSON objects, one per line, each as soon as it is known.
"""

import inspect
import json
import sys
from importlib import import_module
from types import SimpleNamespace

from megatron_pg.declarations.installation import missing_piece


def torch_facts() -> None:
    """Version, CUDA build and devices, and the device and kernel of the loss."""
    torch = import_module("torch")
    _tell(version=torch.__version__, cuda=torch.version.cuda)
    available = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if available else []
    distributed = torch.distributed.is_available()
    capability = torch.cuda.get_device_capability() if available else None
    _tell(capability=capability, devices=names, nccl=distributed and torch.distributed.is_nccl_available())
    choice = import_module("megatron_pg.kernels.device").chosen()
    _tell(kernel=choice.kernel, chosen=str(choice))


def triton_facts() -> None:
    """Triton's version."""
    _tell(version=import_module("triton").__version__)


def megatron_facts() -> None:
    """Megatron's version, what its schedule does with our two return values, and where `pretrain` takes flags."""
    _tell(version=import_module("megatron.core").__version__)
    try:
        _tell(per_microbatch=_scaled(per_token=False), per_token=_scaled(per_token=True))
    except Exception as error:  # another signature
        _tell(scaling_error=f"{type(error).__name__}: {error}")
    try:
        training = import_module("megatron.training.training")
        arguments = import_module("megatron.training.arguments")
        hook = "extra_args_provider" in inspect.signature(training.pretrain).parameters
        _tell(pretrain_hook=hook, parse_hook=hasattr(arguments, "parse_and_validate_args"))
    except ImportError as error:
        _tell(training_error=missing_piece(error))
    except Exception as error:  # a broken installation
        _tell(training_error=f"{type(error).__name__}: {error}")


def _scaled(*, per_token: bool) -> list[float]:
    """The schedule's results for a returned loss of 1 and a count of 3, with K = 4 micro-batches and C = 2."""
    torch = import_module("torch")
    schedules = import_module("megatron.core.pipeline_parallel.schedules")
    fields = {"timers": None, "num_moe_experts": None, "mtp_num_layers": None, "grad_scale_func": None}
    one, count = torch.ones((), requires_grad=True), torch.tensor(3, dtype=torch.int32)
    config = SimpleNamespace(**fields, calculate_per_token_loss=per_token)

    def loss_function(output):
        return (output * 1.0, count, {}) if per_token else (output * 1.0, {})

    sizes = {"cp_group_size": 2, "is_last_stage": True}
    loss, counted = schedules.forward_step_calc_loss(None, one, loss_function, config, None, False, 4, [], **sizes)
    return [float(loss.detach()), float(counted)]


def gloo_sum() -> None:
    """One all-reduce between two processes."""
    torch = import_module("torch")
    rank, file = int(sys.argv[2]), sys.argv[3]
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    value = torch.ones(1)
    torch.distributed.all_reduce(value)
    _tell(sum=float(value))
    torch.distributed.destroy_process_group()


def _tell(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"torch": torch_facts, "triton": triton_facts, "megatron": megatron_facts, "gloo": gloo_sum}[sys.argv[1]]()
