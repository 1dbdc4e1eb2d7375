"""The documents of a run under --docs-per-step: where they begin, what a checkpoint holds of them, how they end.

Megatron counts its own number of micro-batches; the positions that were processed take its place in the count of
operations and in its log line.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_pg.args import ArgumentError
from megatron_pg.batch import PackedBatch, cut_over_ranks
from megatron_pg.plan.documents import DocumentAccumulator, Documents, Packing, Position, StepRule
from megatron_pg.plan.shared_documents import SharedDocumentAccumulator
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.findings import StepReport

_POSITION = "megatron_pg_documents"  # the argument that carries the position of the documents through a checkpoint


class RunDocuments:
    """The position in the documents of one run, and the counts that follow from it.

    Args:
        dynamic_cp: every micro-batch has its own context-parallel ranks.
        say: prints a text; called on rank 0.
    """

    def __init__(self, say: Callable[[str], None], *, dynamic_cp: bool = False):
        self.have_ended = False
        self._say, self._dynamic_cp = say, dynamic_cp
        self._saved_position: str | None = None  # in the checkpoint that was loaded
        self._num_positions: list[int] = []  # of each step since Megatron's last log line
        self._counted_positions: float | None = None  # what Megatron counts operations for

    def begin(
        self, documents: Documents, args: Namespace
    ) -> tuple[DocumentAccumulator | SharedDocumentAccumulator, Iterator[Sample | Sequence[Sample]]]:
        """The accumulator that cuts steps, and this rank's documents from where the loaded checkpoint stopped."""
        if args.iteration > 0 and self._saved_position is None and torch.distributed.get_rank() == 0:
            self._say(
                "the checkpoint holds no position of documents: they begin with the first, and documents_seen with 0"
            )
        if self._dynamic_cp:
            shared = self._shared_accumulator(args)
            return shared, documents.begin(shared.position.documents_seen)
        tp_size, cp_size = args.tensor_model_parallel_size, args.context_parallel_size
        position = Position.from_text(self._saved_position, parallel_state.get_data_parallel_world_size())
        packing = Packing(
            qkv_format=documents.qkv_format,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            cp_size=cp_size,
            multiple_of=tp_size * cp_size if args.sequence_parallel else 1,
            is_static=args.pipeline_model_parallel_size > 1 and not args.variable_seq_lengths,
        )
        accumulator = DocumentAccumulator(rule=_step_rule(args), packing=packing, position=position)
        return accumulator, documents.begin(position.per_rank[parallel_state.get_data_parallel_rank()])

    def _shared_accumulator(self, args: Namespace) -> SharedDocumentAccumulator:
        """For documents that every rank holds, in micro-batches with their own context-parallel ranks."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        max_tokens = args.micro_batch_size * args.seq_length

        def cut(samples: Sequence[Sample], num_microbatches: int) -> list[PackedBatch]:
            return cut_over_ranks(
                samples,
                num_microbatches=num_microbatches,
                rank=group.rank(),
                num_ranks=group.size(),
                max_tokens=max_tokens,
                attention_length=12.0 * args.hidden_size,
                multiple_of=args.tensor_model_parallel_size if args.sequence_parallel else 1,
            )

        position = Position.from_text(self._saved_position, num_ranks=1)
        room = group.size() * max_tokens
        return SharedDocumentAccumulator(rule=_step_rule(args), cut=cut, room=room, position=position)

    def load(self, checkpoint_args: Namespace, args: Namespace) -> None:
        """Take the position from a checkpoint's arguments.

        Raises:
            ArgumentError: rule E62, if the checkpoint has a position that this run would lose.
        """
        self._saved_position = vars(checkpoint_args).get(_POSITION)
        if self._saved_position is None or args.docs_per_step or args.docs_per_step_drop_position:
            return
        message = (
            f"--docs-per-step is not set, but the checkpoint was trained with --docs-per-step "
            f"{checkpoint_args.docs_per_step} and contains the position in its documents. A run without it would train "
            "data twice or never. Set it, or drop the position with --docs-per-step-drop-position."
        )
        raise ArgumentError([("E62", message)])

    def end(self, message: str, args: Namespace) -> None:
        """Have Megatron leave its loop before the optimizer, with a checkpoint, as its rerun machinery does."""
        if torch.distributed.get_rank() == 0:
            self._say(message)
        is_saved = args.save_interval and args.curr_iteration % args.save_interval == 0
        needs_checkpoint = bool(args.save) and args.curr_iteration > args.iteration and not is_saved
        get_rerun_state_machine().should_checkpoint_and_exit = lambda: (needs_checkpoint, True, 0)
        self.have_ended = True

    def batch_size(self, batch_size: float, args: Namespace) -> float:
        """Rows that Megatron counts operations for: those of the positions that were processed."""
        return batch_size if self._counted_positions is None else self._counted_positions / args.seq_length

    def count(self, report: StepReport) -> None:
        """A step has been computed."""
        if report.documents is not None:
            self._counted_positions = report.plan.num_positions

    def save(self, position: Position, report: StepReport, args: Namespace) -> None:
        """A step has been trained: set what the next checkpoint holds, and Megatron's own count of samples."""
        setattr(args, _POSITION, position.to_text())
        args.consumed_train_samples = position.documents_seen
        self._num_positions.append(report.plan.num_positions)
        # Megatron's log line describes a mean step.
        self._counted_positions = sum(self._num_positions) / len(self._num_positions)

    def log_line_written(self) -> None:
        """Megatron starts its means after every log line, and so do we."""
        self._num_positions.clear()


def _step_rule(args: Namespace) -> StepRule:
    return StepRule(
        num_documents=args.docs_per_step,
        policy=args.docs_per_step_policy or "exact",
        end=args.docs_per_step_end or "partial",
    )
