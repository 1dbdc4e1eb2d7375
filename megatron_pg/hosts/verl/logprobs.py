"""verl's log-probabilities and entropies by our kernel and our head, in training and in the passes before it."""

from dataclasses import replace

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.label_logprobs import label_logprobs
from megatron_pg.lm_head import Head
from megatron_pg.lm_head.heads import rows_of
from megatron_pg.lm_head.inputs import enter
from megatron_pg.plan.settings import LossSettings


class Logprobs:
    """Log-probabilities of labels at one temperature; the settings give kernel, head and padded columns."""

    def __init__(self, settings: LossSettings):
        self._settings = settings
        self.temperature = 1.0  # of the micro-batch in progress
        self.softcap: float | None = None  # of the output layer, which the fused head does not call
        self.sequence_parallel = False

    def of_logits(
        self, logits: Tensor, label: Tensor, tp_group: ProcessGroup, *, calculate_entropy: bool
    ) -> dict[str, Tensor]:
        """Log-probabilities and entropies from vocabulary-parallel logits [..., V / tp], which are not modified."""
        rows = logits.flatten(0, -2)
        vocabulary = self._vocabulary(rows.shape[1], tp_group)
        logprobs, entropy = label_logprobs(rows, label.flatten(), vocabulary, impl=self._settings.impl)
        outputs = {"log_probs": logprobs.view(label.shape)}
        return outputs | ({"entropy": entropy.view(label.shape)} if calculate_entropy else {})

    def linear_cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        reduction: str = "none",
        dist_process_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Our fused head for verl's [T, 1, H]: chunks of float32 logits, which the backward recomputes."""
        vocabulary = replace(self._vocabulary(len(weight), dist_process_group), softcap=self.softcap)
        head = Head(mode="recompute", backward=self._settings.head_backward, impl=self._settings.impl)
        if not self.sequence_parallel:  # else verl has gathered them, and its backward reduce-scatters
            hidden = enter(hidden, vocabulary.tp_group, False)
        logprobs, entropy, _ = rows_of(hidden.flatten(0, -2), weight, labels.flatten(), None, vocabulary, head)
        return logprobs, entropy

    def _vocabulary(self, columns: int, group: ProcessGroup | None) -> Vocabulary:
        group = group if group is not None and group.size() > 1 else None
        size = self._settings.vocab_size
        return Vocabulary.of(columns, temperature=self.temperature, vocab_size=size, tp_group=group)
