"""NeMo-RL's `LossFunction` with our loss, which its workers call on rows that the driver has planned."""

import functools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.args import ArgumentError
from megatron_pg.batch import Sequences, TokenFields
from megatron_pg.batch.zigzag import zigzag_index
from megatron_pg.hosts.nemo_rl import flags as nemo_flags
from megatron_pg.hosts.nemo_rl.rows import COLUMN, FIELDS, SUM, fields_of
from megatron_pg.hosts.startup import CheckedArguments, check, check_signature
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.loss import microbatch_loss

VERSION = "NeMo-RL 7ea279ab"  # that this was run with
_SCALING = "takes C·Σwℓ of this rank's tokens, divides by C and sums over micro-batches, packed sequences and ranks"
_IN_THE_WORKER = {
    "nemo_rl.models.megatron.train:LossPostProcessor": ("loss_fn", "cfg", "num_microbatches", "cp_normalize")
}


def checked(cfg: Any, refused: Sequence[str] = ()) -> CheckedArguments:
    """Our arguments, from NeMo-RL's `loss_fn` and its key `megatron_pg`.

    Raises:
        ArgumentError: with every violation at once.
    """
    loss_fn = cfg.model_dump()
    if missing := nemo_flags.missing(loss_fn):
        message = (
            f"loss_fn has no {', '.join(missing)}, as in {VERSION}; use that version, or a megatron_pg that supports "
            "yours"
        )
        raise ArgumentError([("E70", message)])
    usual = {name: field.get_default(call_default_factory=True) for name, field in type(cfg).model_fields.items()}
    inherited, all_refused = [*nemo_flags.inherited(loss_fn)], [*nemo_flags.refused(loss_fn, usual), *refused]
    arguments = check("NeMo-RL", nemo_flags.given(loss_fn), megatron={}, inherited=inherited, refused=all_refused)
    return CheckedArguments(
        arguments.args, [("NeMo-RL", _SCALING), *arguments.rows, ("without effect", nemo_flags.not_read(loss_fn))]
    )


class PolicyGradientLossFn:
    """NeMo-RL's `LossFunction` of vocabulary-parallel logits; it is pickled to the workers as plain arguments."""

    def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False):
        from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType

        self.args = checked(cfg).args
        self.estimator: str = cfg.reference_policy_kl_type  # of NeMo-RL's metrics
        level = LossType.TOKEN_LEVEL if self.args.loss_aggregation == "token_mean" else LossType.SEQUENCE_LEVEL
        vars(self).update({"input_type": LossInputType.LOGIT, "loss_type": level})  # which NeMo-RL reads

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("settings", "planning")}

    @functools.cached_property
    def planning(self) -> LossSettings:
        """The settings of a process that plans and computes no loss; it may have no GPU."""
        return LossSettings.from_args(Namespace(**vars(self.args) | {"pg_kernel": "torch"}))

    @functools.cached_property
    def settings(self) -> LossSettings:
        """The settings of a worker."""
        for path, parameters in _IN_THE_WORKER.items():
            check_signature(VERSION, path, parameters)
        return LossSettings.from_args(self.args)

    def __call__(
        self,
        logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        **rest: object,
    ) -> tuple[Tensor, dict[str, float]]:
        """C·S of this rank's tokens, and sums over all context-parallel ranks, every one of which must call.

        Args:
            logits: [b, s / C, V / tp], at the rollouts' temperature; b = 1 where C > 1, or sequences are packed.
            data: the same rows whole, with a token's values at its own position.
            global_valid_seqs: rows of the step; not read, because the driver's plan has the denominators.
            global_valid_toks: trained tokens of the step; not read.
            rest: not read.
        """
        from megatron.core import parallel_state

        context = parallel_state.get_context_parallel_group()
        tensor = parallel_state.get_tensor_model_parallel_group()
        fields = self._fields(logits, data, context)
        total, diagnostics = microbatch_loss(
            _rows(logits), fields, self.settings, tensor if tensor.size() > 1 else None
        )
        sums = torch.cat([total.detach().double().view(1), diagnostics.nonfinite[:1], diagnostics.partial])
        if context.size() > 1:
            torch.distributed.all_reduce(sums, group=context)
        sums = torch.cat([sums, data["sample_mask"].sum().double().view(1)])
        loss, bad, *partial, valid = sums.tolist()  # NeMo-RL's driver takes numbers, so its own loss syncs here, too
        metrics = {"loss": loss, f"{SUM}nonfinite": bad, "num_valid_samples": valid}
        return context.size() * total, metrics | {f"{SUM}{i}": value for i, value in enumerate(partial)}

    def _fields(self, logits: Tensor, data: Mapping[str, Any], context: ProcessGroup) -> TokenFields:
        """[b · s / C] each, in the order of the logits: a token's values are at the position before its own."""
        if missing := [
            name for name in ("input_ids", "token_mask", "sample_mask", *FIELDS.values()) if name not in data
        ]:
            raise ValueError(
                f"the rows have no {', '.join(missing)}, which the loss reads. Use a release of NeMo-RL that "
                "docs/hosts lists."
            )
        if COLUMN + "weights" not in data:
            raise ValueError(
                "the rows have no weights, because they did not pass the driver's Policy.train; run NeMo-RL's script "
                "by python -m megatron_pg.nemo_rl"
            )
        width = logits.shape[1] * context.size()
        index = None
        if context.size() > 1:
            index = zigzag_index([width], cp_rank=context.rank(), cp_size=context.size()).to(logits.device)

        def rows(values: Tensor) -> Tensor:
            moved = torch.nn.functional.pad(values[:, 1:], (0, width))[:, :width]
            return moved.double() if moved.is_floating_point() else moved

        mask = rows(data["token_mask"] * data["sample_mask"][:, None]) != 0
        counts = mask.sum(dim=1).clamp(min=1)
        known = {name: data[theirs] for name, theirs in fields_of(self.settings).items()}
        known |= {name.removeprefix(COLUMN): data[name] for name in data if name.startswith(COLUMN)}
        fields = {name: rows(values) for name, values in known.items()}
        fields |= {"targets": rows(data["input_ids"]), "mask": mask, "sample_weights": mask / counts[:, None].double()}
        return TokenFields.of(
            {name: (v if index is None else v[:, index]).reshape(-1) for name, v in fields.items()},
            _sequences(counts, logits.shape[1], context) if self.settings.terms.reads_sequences else None,
        )


def _rows(logits: Tensor) -> Tensor:
    """[T, V / tp]; the kernels may overwrite it with the gradient."""
    base = logits._base
    is_part = base is not None and base.numel() > logits.numel()
    return (_Part.apply(logits) if is_part else logits).reshape(-1, logits.shape[-1])


class _Part(torch.autograd.Function):
    """A sequence of a packed row, as its own tensor.

    Views of one tensor share its version counter. If a kernel overwrote one, autograd would refuse the backward of the
    next.
    """

    @staticmethod
    def forward(ctx, logits):
        return logits.data

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _sequences(counts: Tensor, length: int, context: ProcessGroup) -> Sequences:
    """Each of the b rows is a sequence, with `length` positions on this rank."""
    rows, device = len(counts), counts.device
    return Sequences(
        slots=torch.arange(rows, device=device).repeat_interleave(length, output_size=rows * length),
        order=torch.arange(rows * length, device=device),
        lengths=torch.tensor([*[length] * rows, 0]).to(device, non_blocking=True),
        counts=counts.double(),
        group=context if context.size() > 1 else None,
    )
