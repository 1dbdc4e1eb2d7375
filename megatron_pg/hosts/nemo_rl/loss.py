"""NeMo-RL's `LossFunction` with our loss, which its workers call on rows that the driver has planned."""

import functools
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import Sequences, TokenFields
from megatron_pg.batch.zigzag import zigzag_index
from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.hosts.nemo_rl import flags as nemo_flags
from megatron_pg.hosts.nemo_rl.rows import COLUMN, FIELDS, SUM, fields_of, mismatch
from megatron_pg.hosts.patching import check_signatures
from megatron_pg.hosts.startup import CheckedArguments, check, refuse
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.loss import microbatch_logprobs_loss, microbatch_loss

VERSION = "NeMo-RL 7ea279ab"  # that this was run with
SCALING = "takes C·Σwℓ of this rank's tokens, divides by C and sums over micro-batches, packed sequences and ranks"
_IN_THE_WORKER = "nemo_rl.models.megatron.train:LossPostProcessor(loss_fn, cfg, num_microbatches, cp_normalize)"


def checked(cfg: Any, refused: Sequence[str] = ()) -> CheckedArguments:
    """Our arguments, from NeMo-RL's `loss_fn` and its key `megatron_pg`."""
    loss_fn = cfg.model_dump()
    if missing := sorted(nemo_flags.KNOWN - loss_fn.keys()):
        fix = "Use that version, or a megatron_pg that supports yours."
        refuse(f"loss_fn has no {', '.join(missing)}, as in {VERSION}. {fix}")
    usual = {name: field.get_default(call_default_factory=True) for name, field in type(cfg).model_fields.items()}
    answers = [*nemo_flags.answers(loss_fn, usual), *refused]
    return check("NeMo-RL", nemo_flags.given(loss_fn), megatron={}, answers=answers)


class PolicyGradientLossFn:
    """NeMo-RL's `LossFunction` of vocabulary-parallel logits, or of its log-probabilities.

    It is pickled to the workers as plain arguments.
    """

    def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False):
        from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType

        self.args = checked(cfg).args
        self.estimator: str = cfg.reference_policy_kl_type  # of NeMo-RL's metrics
        self.on_policy: bool = getattr(cfg, nemo_flags.ON_POLICY)  # the old log-probabilities are the current ones
        # which NeMo-RL reads
        self.loss_type = LossType.TOKEN_LEVEL if self.args.loss_aggregation == "token_mean" else LossType.SEQUENCE_LEVEL
        self.use_fused_linear_logprobs, self.input_type = use_fused_linear_logprobs, LossInputType.LOGIT
        if self.on_policy:
            self.take_logprobs()

    def take_logprobs(self) -> None:
        """From now on the loss is one of NeMo-RL's log-probabilities."""
        self.input_type = type(self.input_type).LOGPROB

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("settings", "planning")}

    @functools.cached_property
    def planning(self) -> LossSettings:
        """The settings of a process that plans and computes no loss; it may have no GPU."""
        return LossSettings.from_args(Namespace(**vars(self.args) | {"pg_kernel": "torch"}))

    @functools.cached_property
    def settings(self) -> LossSettings:
        """The settings of a worker."""
        check_signatures(VERSION, [_IN_THE_WORKER])
        return LossSettings.from_args(self.args)

    def __call__(
        self,
        *,
        data: Mapping[str, Any],  # whole rows, with a token's values at its own position
        global_valid_toks: Tensor,  # [] trained tokens of the step, for NeMo-RL's metrics only
        logits: Tensor | None = None,  # [b, s / C, V / tp], at the rollouts' temperature; b = 1 if C > 1 or packed
        next_token_logprobs: Tensor | None = None,  # [b, s - 1] nats instead, of whole rows
        **rest: object,
    ) -> tuple[Tensor, dict[str, float]]:
        """C·S of this rank's tokens, and sums over all context-parallel ranks, every one of which must call.

        Given log-probabilities, NeMo-RL adds gradients up over context-parallel ranks, and divides by C.
        """
        from megatron.core import parallel_state

        groups = parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group()
        context, tensor = (group if group.size() > 1 else None for group in groups)
        if next_token_logprobs is not None:
            context, logprobs = None, next_token_logprobs.reshape(-1)
            fields = self._fields(next_token_logprobs, data, context)
            fields = self._on_policy(fields, logprobs.detach()) if self.on_policy else fields
            total, diagnostics = microbatch_logprobs_loss(logprobs, None, fields, self.settings)
        else:
            logits = cast(Tensor, logits)
            fields = self._fields(logits, data, context)
            total, diagnostics = microbatch_loss(_rows(logits), fields, self.settings, tensor)
        theirs = mismatch(fields, self.estimator)
        parts = [total.detach(), diagnostics.nonfinite[0], *theirs.values()]
        sums = torch.cat([torch.stack([part.double() for part in parts]), diagnostics.partial])
        if context is not None:
            torch.distributed.all_reduce(sums, group=context)
        sums = torch.cat([sums, torch.stack([data["sample_mask"].sum(), global_valid_toks.view(())]).double()])
        # NeMo-RL's driver takes numbers, so its own loss syncs here, too
        loss, bad, *found, num_rows, num_tokens = sums.tolist()
        metrics = {"loss": loss, f"{SUM}nonfinite": bad, "num_valid_samples": num_rows}
        metrics |= {name: value / num_tokens for name, value in zip(theirs, found, strict=False)}
        metrics |= {f"{SUM}{i}": value for i, value in enumerate(found[len(theirs) :])}
        return total * (1 if context is None else context.size()), metrics

    def _on_policy(self, fields: TokenFields, logprobs: Tensor) -> TokenFields:
        """The fields where the current policy has sampled; the driver planned without its log-probabilities."""
        correction = self.settings.correction
        if factors := CORRECTIONS[correction.name].load():
            log_rho = torch.where(fields.mask, logprobs - cast(Tensor, fields.rollout_logprobs), 0).double()
            fields = replace(fields, corrections=factors(log_rho, correction.low, correction.high)[0])
        return replace(fields, old_logprobs=logprobs)

    def _fields(self, output: Tensor, data: Mapping[str, Any], context: ProcessGroup | None) -> TokenFields:
        """[b · s / C] each, in the order of the output: a token's values are at the position before its own."""
        reads = ("input_ids", "token_mask", "sample_mask", *FIELDS.values(), f"{COLUMN}weights")
        if missing := ", ".join(name for name in reads if name not in data):
            raise ValueError(
                f"the rows have no {missing}, which the driver's Policy.train passes on. Run NeMo-RL's script by "
                "python -m megatron_pg.nemo_rl, with a release of NeMo-RL that docs/hosts lists."
            )
        width, index = output.shape[1], None
        if context is not None:
            width *= context.size()
            index = zigzag_index([width], cp_rank=context.rank(), cp_size=context.size()).to(output.device)

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
            _sequences(counts, output.shape[1], context) if self.settings.terms.reads_sequences else None,
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


def _sequences(counts: Tensor, length: int, context: ProcessGroup | None) -> Sequences:
    """Each of the b rows is a sequence, with `length` positions on this rank."""
    rows, device = len(counts), counts.device
    return Sequences(
        slots=torch.arange(rows, device=device).repeat_interleave(length, output_size=rows * length),
        order=torch.arange(rows * length, device=device),
        lengths=torch.tensor([*[length] * rows, 0]).to(device, non_blocking=True),
        counts=counts.double(),
        group=context,
    )
