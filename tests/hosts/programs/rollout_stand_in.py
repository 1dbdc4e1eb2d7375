"""A trainer with the hooks of slime or of miles and none of their code, for proofs where no checkout is at hand.

It cuts a rollout into steps and micro-batches, calls the hooks where those two call them, with their names and
arguments, and multiplies what the loss function returns as they do.
"""

import argparse
import sys
import weakref
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import host_cases as hosts
import rollout_hosts
import torch
from host_cases import Case
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_pg.cp_utils import response_index, slice_with_cp
from megatron_pg.rollouts.sample import Sample

KEPT = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
MULTIPLE_OF = 4  # of a row's length
_logged: list[dict] = []


# --- what both have under their own names ---


def load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def log(args, metrics, step_key):
    _logged.append(dict(metrics))


def parse_args(add_custom_arguments=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--custom-pg-loss-reducer-function-path")
    if add_custom_arguments is not None:
        parser = add_custom_arguments(parser)
    given, _ = parser.parse_known_args()  # unknown flags are left unread
    own = rollout_hosts.arguments("slime", Case(), custom_megatron_init_path=None)
    return Namespace(**vars(own) | {k: v for k, v in vars(given).items() if v is not None or k not in vars(own)})


class Iterator:
    def __init__(self, data: dict, *, copies: bool = False):
        self.rollout_data, self.copies, self.next = data, copies, 0

    def get_next(self, keys: Sequence[str]) -> dict:
        data = self.rollout_data
        members, self.next = data["micro_batch_indices"][self.next], self.next + 1
        batch = {key: [data[key][i] for i in members] for key in keys if data.get(key) is not None}
        return batch | ({"tokens": [tokens.clone() for tokens in batch["tokens"]]} if self.copies else {})


def batch_of(iterator: Iterator) -> dict:
    """The row of this context-parallel rank: documents cut in zigzag, then padding; or a padded row for each."""
    batch = iterator.get_next(["tokens", "total_lengths", "response_lengths", "loss_masks", "max_seq_lens", *KEPT])
    batch["unconcat_tokens"] = batch["tokens"]
    if "max_seq_lens" in batch:
        width = batch["max_seq_lens"][0]
        batch["tokens"] = torch.stack([slice_with_cp(tokens, 0, "bshd", width) for tokens in batch["tokens"]])
        return batch | {"packed_seq_params": None}
    parts = [slice_with_cp(tokens, 0) for tokens in batch["tokens"]]
    row = torch.cat(parts)
    unit = MULTIPLE_OF * parallel_state.get_tensor_model_parallel_world_size()
    batch["tokens"] = torch.nn.functional.pad(row, (0, -len(row) % unit))[None]
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).int()
    batch["packed_seq_params"] = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    return batch


def scaled(args: Namespace, batch: dict, count: int, rollouts: int, logits: Tensor) -> tuple:
    """The loss that the user's function returns, as both scale it."""
    if args.loss_type == "policy_loss":  # slime's, replaced by ours
        function = sys.modules["slime.backends.megatron_utils.loss"].policy_loss_function
    elif args.loss_type == "value_loss":
        function = sys.modules[import_module(args.custom_loss_function_path.removesuffix(".loss")).HOST.losses]
        function = function.value_loss_function
    else:
        function = load_function(args.custom_loss_function_path)
    loss, found = function(args, batch, logits, None)
    tokens = sum(mask.sum().clamp(min=1) for mask in batch["loss_masks"])
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if args.calculate_per_token_loss:
        return loss * parallel_state.get_context_parallel_world_size(), tokens.int(), found
    return loss * count / rollouts * ranks, torch.tensor(1, dtype=torch.int), found


def train_one_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    data_iterator: list,
    model: list,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_microbatches: int,
    rollouts: int,
    own: Any = None,
) -> tuple[dict, float]:
    """An optimizer step; with `own`, by that loss of the trainer instead of the one that it was told."""
    model[0].zero_grad_buffer()

    def forward_step(iterator, chunk):
        batch = batch_of(iterator)
        output = chunk(input_ids=batch["tokens"], packed_seq_params=batch["packed_seq_params"])
        return output, own or partial(scaled, args, batch, num_microbatches, rollouts)

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        seq_length=16,
        micro_batch_size=1,
        forward_only=False,
    )
    _, grad_norm, _ = optimizer.step()
    opt_param_scheduler.step(increment=rollouts)
    return {}, grad_norm


# --- a rollout ---


def rollout(case: Case, found: Sequence[Sample], qkv_format: str) -> dict[str, Any]:
    """This data-parallel rank's part: every second sample of each step, two by two."""
    rank, size = (f() for f in (parallel_state.get_data_parallel_rank, parallel_state.get_data_parallel_world_size))
    mine, indices, counts, rollouts = [], [], [], []
    for members in hosts.steps_of(found, case):
        most = -(-len(members[::size]) // 2)
        own = members[rank::size]
        cuts = [own[k * len(own) // most : (k + 1) * len(own) // most] for k in range(most)]
        for cut in cuts:
            indices.append(list(range(len(mine), len(mine) + len(cut))))
            mine += cut
        counts.append(most)
        rollouts.append(len({sample.rollout_id for sample in members}))
    part = {"log_probs": "old_logprobs", "ref_log_probs": "ref_logprobs", "rollout_log_probs": "rollout_logprobs"}
    part |= {"teacher_log_probs": "teacher_logprobs", "advantages": "advantages"}
    part = part if case.objective != "value" else {"values": "values", "returns": "returns"}
    width = -(-max(len(sample.tokens) for sample in mine) // 8) * 8
    layout = (qkv_format, width if qkv_format == "bshd" else None)
    local = [response_index(len(sample.tokens), sample.response_length, *layout) for sample in mine]
    return {
        **({"max_seq_lens": [width] * len(mine)} if qkv_format == "bshd" else {}),
        "tokens": [sample.tokens for sample in mine],
        "total_lengths": [len(sample.tokens) for sample in mine],
        "response_lengths": [sample.response_length for sample in mine],
        "loss_masks": [sample.loss_mask.int() for sample in mine],
        "rollout_ids": [sample.rollout_id for sample in mine],
        "sample_indices": [sample.rollout_id for sample in mine],
        "local_raw_reward": [sample.reward for sample in mine],
        "truncated": [0 for _ in mine],
        **(_kept(mine) if case.objective == "top_p" else {}),
        "source_names": [hosts.source_of(sample) for sample in mine],
        **{
            key: [getattr(sample, name).float()[index] for sample, index in zip(mine, local, strict=True)]
            for key, name in part.items()
        },
        "micro_batch_indices": indices,
        "num_microbatches": counts,
        "global_batch_sizes": rollouts,
        "num_rollouts": rollouts,
    }


def _kept(samples: Sequence[Sample]) -> dict[str, list[Tensor]]:
    """As slime ships what its engine could have sampled: whole, on every context-parallel rank."""
    found = [hosts.kept_of(sample) for sample in samples]
    ids = [torch.tensor([i for row in rows for i in row], dtype=torch.int32) for rows in found]
    return dict(zip(KEPT, (ids, [torch.tensor([0, *map(len, rows)]).cumsum(0).int() for rows in found]), strict=True))


def train(
    host: str,
    case: Case,
    found: Sequence[Sample],
    args: Namespace,
    own: Any = None,
    copies: bool = False,
    bypasses: bool = False,
    own_pass: bool = False,
) -> tuple[list[list[Tensor]], list[dict]]:
    """Gradients of every optimizer step of a rollout, and what the logger was given.

    `own`: as for `train_one_step`; `copies`: the trainer copies the samples' tokens into its batches; `bypasses`: the
    model makes its logits without the product of its output layer; `own_pass`: the trainer computes log-probabilities
    by itself.
    """
    _logged.clear()
    model = begun(host, case, args)
    optimizer, scheduler = hosts.Optimizer(model), hosts.Scheduler()
    if bypasses and model.module.post_process:
        layer = model.module.output_layer
        layer.forward = lambda states: (states @ layer.weight.t(), None)
    if own_pass:
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
    data = rollout(case, found, args.qkv_format)
    if host == "miles":  # which has neither
        del data["local_raw_reward"], data["source_names"]
    iterators = [Iterator(data, copies=copies)]  # fields are added to the data later
    if args.loss_type == "policy_loss" and case.num_steps == 1 and not args.use_critic:
        del data["log_probs"]  # they are the loss's own
    if not args.compute_advantages_and_returns:
        for name in ("advantages", "log_probs", "ref_log_probs", "teacher_log_probs"):
            data.pop(name, None)
    if case.objective == "value":
        args.loss_type = "value_loss"
    model.module.config.finalize_model_grads_func = finalize_model_grads
    train_step = sys.modules[f"{host}.backends.megatron_utils.model"].train_one_step
    counts = zip(data["num_microbatches"], data["num_rollouts"], strict=True)
    for number, (count, rollouts) in enumerate(counts):
        train_step(args, 0, number, iterators, [model], optimizer, scheduler, count, rollouts, own)
    mask = weakref.ref(data["loss_masks"][0])
    del data, iterators
    assert mask() is None, "a rollout's data are kept while the rollout engine needs the memory"
    return optimizer.found, list(_logged)


def begun(host: str, case: Case, args: Namespace) -> Any:
    """The model, which the host builds after the adapter's init."""
    actor = sys.modules[f"{host}.backends.megatron_utils.actor"]
    actor.initialize_model_and_optimizer = lambda args, role: (
        [hosts.model(per_token=case.per_token, critic=role == "critic")],
    )
    load_function(args.custom_megatron_init_path)(args)
    (model,), *_ = actor.initialize_model_and_optimizer(args, "critic" if case.objective == "value" else "actor")
    return model


def passed(host: str, case: Case, **more: Any) -> float:
    """Largest error of log-probabilities and entropies, computed before training, against float64 logits."""
    args = rollout_hosts.arguments(host, case, rollout_temperature=0.7, **more)
    model, found = begun(host, case, args).eval(), hosts.samples()
    data = rollout(case, found, args.qkv_format)
    compute = sys.modules[f"{host}.backends.megatron_utils.actor"].get_log_probs_and_entropy
    outputs: list[dict] = []

    def forward_step(iterator, chunk):
        batch = batch_of(iterator)
        output = chunk(input_ids=batch["tokens"], packed_seq_params=batch["packed_seq_params"])
        wanted = ("unconcat_tokens", "total_lengths", "response_lengths", "max_seq_lens", *KEPT)
        given = {name.removeprefix("rollout_"): batch[name] for name in wanted if name in batch}
        return output, lambda logits, **rest: outputs.append(compute(logits, args=args, with_entropy=True, **given))

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[Iterator(data)],
            model=[model],
            num_microbatches=sum(data["num_microbatches"]),
            seq_length=16,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    whole = [output[1] if host == "slime" else output for output in outputs]
    mine = {name: [each for output in whole for each in output[name]] for name in ("log_probs", "entropy")}
    by_tokens = {tuple(sample.tokens.tolist()): sample for sample in found}
    errors = [torch.zeros(1)]
    for number, tokens in enumerate(data["tokens"] if outputs else ()):
        sample, layout = by_tokens[tuple(tokens.tolist())], (args.qkv_format, *data.get("max_seq_lens", [None])[:1])
        index = response_index(len(tokens), sample.response_length, *layout)
        for name, expected in hosts.distribution(sample, case, args.rollout_temperature).items():
            errors.append((mine[name][number] - expected[index]).abs().float())
    worst = torch.cat(errors).max()
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return float(worst)


# --- their modules ---


def install(host: str) -> None:
    """Make the host's modules importable, with functions of its parameters where the adapter looks at them."""
    real = {"log": log, "parse_args": parse_args, "train_one_step": train_one_step}
    declared = import_module(f"megatron_pg.{host}").HOST.all_signatures()
    for signature in [*declared, f"{host}.utils.arguments:parse_args(add_custom_arguments)"]:
        module, _, function = signature.rpartition("|")[2].partition(":")
        name, _, parameters = function.partition("(")
        setattr(_module(module), name, real.get(name) or _with(parameters.rstrip(")")))


def _with(parameters: str) -> Any:
    scope: dict[str, Any] = {}
    exec(f"def function({parameters}): raise AssertionError('called')", scope)
    return scope["function"]


def _module(name: str) -> ModuleType:
    parent, _, last = name.rpartition(".")
    if name not in sys.modules:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
        if parent:
            setattr(_module(parent), last, sys.modules[name])
    return sys.modules[name]


def figures() -> dict[str, object]:
    """Of both."""
    found = {}
    for host in ("slime", "miles"):
        install(host)
        found[host] = rollout_hosts.figures(partial(train, host), host, passed=partial(passed, host))
        found[host]["refused"] = {name: refusal(host, **fault) for name, fault in FAULTS.items()}
    return found


def _their_loss(logits: Tensor) -> tuple:
    return logits.mean(), torch.tensor(1, dtype=torch.int), {}


FAULTS = {
    "their own loss": {"own": _their_loss},
    "copied tokens": {"copies": True},
    "bypassed head": {"bypasses": True},
    "their own pass": {"own_pass": True},
}


def refusal(host: str, **fault: Any) -> list[str]:
    """What every rank raises for a fault of the trainer, and how many optimizer steps it has done by then."""
    stages = 1 if fault.keys() & {"copies", "own_pass"} else 2
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    case, said, model = Case(rollouts_per_step=4), "nothing", hosts.Optimizer.step
    flags = {"fp32_lm_head": True} if "bypasses" in fault else {}
    flags |= {"pg_fused_head": "forward"} if "own_pass" in fault else {}
    steps: list = []
    hosts.Optimizer.step = lambda self: steps.append(1) or model(self)
    try:
        train(host, case, hosts.samples(), rollout_hosts.arguments(host, case, **flags), **fault)
    except ValueError as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        hosts.Optimizer.step = model
    every: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, f"{said} ({len(steps)} steps)")
    parallel_state.destroy_model_parallel()
    return every
