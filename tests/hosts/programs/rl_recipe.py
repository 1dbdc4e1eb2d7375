"""examples/recipes/megatron_rl.py on real ranks (`recipe_ranks`): gradients through schedule, DDP and finalize.

The wrapped forward step is a stand-in with the batches, shapes and tuple of train_rl.py, which no wheel carries. With
MEGATRON_LM naming a checkout of Megatron-LM, whose core must be the importable one, it is train_rl.py's own.
"""

import os
import sys
from functools import partial
from types import SimpleNamespace

import stand_ins
import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron_rl import ExactLoss
from torch import Tensor

PACKAGES = ("fastapi", "httpx", "openai", "pydantic", "tqdm", "uvicorn")  # of its rollouts
ROWS, LENGTH, VOCABULARY, MICROBATCHES = 2, 9, 13, 3
EPS_LOW, EPS_HIGH, KL_BETA, DIVISOR = 0.2, 0.28, 0.05, 32.0
TRAINED = [1, 7, 2, 0, 5, 3, 8, 1, 0, 4, 6, 2]  # trained tokens of each row of the step; 0: a padding row


class Toy(MegatronModule):
    """Logits of the next token from the token and its position."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.positions = torch.nn.Parameter(torch.randn(LENGTH, VOCABULARY, generator=generator))
        self.model_type = ModelType.encoder_or_decoder
        self.pg_collection = SimpleNamespace(cp=None, pp=parallel_state.get_pipeline_model_parallel_group())

    def forward(self, tokens, position_ids, attention_mask=None, **rest):
        return self.tokens[tokens] + self.positions[position_ids]

    def set_input_tensor(self, tensor):
        pass


def whole_step() -> list[Tensor]:
    """The step's rows, in the order of train_rl.py's batches."""
    generator = torch.Generator().manual_seed(7)
    rows = len(TRAINED)
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    mask = torch.zeros(rows, LENGTH, dtype=torch.bool)
    for row, count in enumerate(TRAINED):
        mask[row, LENGTH - count :] = True
    advantages = torch.randn(rows, generator=generator)
    old, reference, inference = (-1 - 3 * torch.rand(rows, LENGTH - 1, generator=generator) for _ in range(3))
    return [tokens, advantages, old, mask, torch.arange(LENGTH).repeat(rows, 1), reference, inference]


def token_losses(model, tokens, advantages, old, position_ids, reference) -> Tensor:
    """[rows, s - 1] clipped surrogate and k3 penalty."""
    logprobs = model(tokens, position_ids)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    ratio, gap = (logprobs - old).exp(), reference - logprobs
    surrogate = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH) * advantages[:, None])
    return -surrogate + KL_BETA * (gap.exp() - gap - 1)


def stand_in(data_iterator, model):
    """Shapes and tuple of train_rl.py's forward step: the loss of a micro-batch over its own tokens."""
    tokens, advantages, old, mask, position_ids, reference, _ = next(data_iterator)
    losses = token_losses(model, tokens, advantages, old, position_ids, reference)

    def loss_func(mask, losses):
        total, count = (losses * mask).sum(), mask.sum().clamp(min=1)
        return total.clone(), count.int(), {"lm loss": torch.stack([total.detach(), count])}

    return losses, partial(loss_func, mask[:, 1:].float())


def train_rl_forward_step():
    """train_rl.py's own forward step, from the checkout that MEGATRON_LM names."""
    sys.path.insert(0, os.environ["MEGATRON_LM"])
    stand_ins.install(*PACKAGES)
    import train_rl
    from megatron.training import global_vars

    off = ("rl_use_sequence_packing", "rl_inference_logprobs_is_correction", "check_for_nan_in_loss_and_grad")
    off += ("check_for_spiky_loss", "fp16", "bf16")
    given = {"grpo_clamp_eps_lower": EPS_LOW, "grpo_clamp_eps_upper": EPS_HIGH, "grpo_kl_beta": KL_BETA}
    given |= {"grpo_entropy_term_weight": 0.0, "rl_importance_sampling_truncation_coef": None}
    global_vars.set_args(SimpleNamespace(**dict.fromkeys(off, False), **given))
    timer = SimpleNamespace(start=lambda *a, **k: None, stop=lambda *a, **k: None)
    global_vars._GLOBAL_TIMERS = lambda *args, **rest: timer
    return train_rl.forward_step


def pack_bins(mine: list[Tensor]) -> list[tuple[Tensor]]:
    """The rows of a rank as bins of four rows, two rows, and none, in train_rl.py's packing context."""
    from megatron.rl.rl_utils import get_rl_runtime_state
    from megatron.training import get_args

    get_args().rl_use_sequence_packing = True
    get_args().rl_sequence_packing_max_sequences_per_bin = 4
    tokens, advantages, old, mask, position_ids, reference, _ = mine
    bins = [[0, 1, 2, 3], [4, 5], []]  # rows; train_rl.py fills up with empty bins
    size = 4 * LENGTH + 2

    def packed(field: Tensor, width: int) -> Tensor:
        rows = torch.zeros(len(bins), width, dtype=field.dtype)
        for row, members in zip(rows, bins, strict=True):
            for k, member in enumerate(members):
                row[k * LENGTH : k * LENGTH + field.shape[1]] = field[member]
        return rows

    get_rl_runtime_state().packing_context = SimpleNamespace(
        packed_trajs=packed(tokens, size),
        packed_position_ids=packed(position_ids, size),
        packed_loss_mask=packed(mask.float(), size),
        old_logprobs=packed(old, size - 1),
        ref_logprobs=packed(reference, size - 1),
        packing_info=SimpleNamespace(
            bin_seq_indices=bins,
            seq_starts={b: [k * LENGTH for k in range(len(members))] for b, members in enumerate(bins)},
            seq_lengths=[LENGTH] * len(tokens),
        ),
        bin_advantages=[advantages[members] for members in bins],
        cached_packed_seq_params=[None] * len(bins),
    )
    return [(torch.tensor(index),) for index in range(len(bins))]


def config(*, per_token: bool) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=per_token)


def gradient(forward_step, *, per_token: bool, bins: bool = False) -> Tensor:
    """All parameters' gradients after finalize, for this rank's part of the step."""
    settings = config(per_token=per_token)
    settings.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(settings, DistributedDataParallelConfig(grad_reduce_in_fp32=True), Toy(settings))
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = [field[rank::size] for field in whole_step()]
    batches = [tuple(field[k * ROWS : (k + 1) * ROWS] for field in mine) for k in range(MICROBATCHES)]
    if bins:
        batches = pack_bins(mine)
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    return torch.cat([parameter.main_grad.flatten() for parameter in model.module.parameters()])


def oracle(aggregation: str) -> Tensor:
    """The same gradients from the whole step at once, by plain loops."""
    tokens, advantages, old, mask, position_ids, reference, _ = whole_step()
    model = Toy(config(per_token=False))
    losses = token_losses(model, tokens, advantages, old, position_ids, reference)
    live = sum(count > 0 for count in TRAINED)
    total = 0.0
    for row, count in enumerate(TRAINED):
        divisor = {"sample_mean": live * count, "token_mean": sum(TRAINED), "constant": live * DIVISOR}[aggregation]
        for position in range(LENGTH - 1):
            if mask[row, position + 1]:
                total = total + losses[row, position] / divisor
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def figures() -> dict[str, float]:
    """Errors by aggregation and flag; "as it is": the script's own loss, against the token mean of the step."""
    parallel_state.initialize_model_parallel()
    size = torch.distributed.get_world_size()
    num_microbatches_calculator.init_num_microbatches_calculator(
        torch.distributed.get_rank(), None, ROWS * MICROBATCHES * size, ROWS, size
    )
    forward_step = train_rl_forward_step() if "MEGATRON_LM" in os.environ else stand_in
    errors = {"as it is": error(gradient(forward_step, per_token=False), oracle("token_mean"))}
    wrapped = {
        aggregation: ExactLoss(aggregation, DIVISOR if aggregation == "constant" else None)(forward_step)
        for aggregation in ("sample_mean", "constant", "token_mean")
    }
    for aggregation, exact in wrapped.items():
        for per_token in (False, True):
            found = gradient(exact, per_token=per_token)
            errors[f"{aggregation}, flag {'on' if per_token else 'off'}"] = error(found, oracle(aggregation))
    if "MEGATRON_LM" in os.environ:
        for aggregation, exact in wrapped.items():
            found = gradient(exact, per_token=False, bins=True)
            errors[f"{aggregation}, packed"] = error(found, oracle(aggregation))
    parallel_state.destroy_model_parallel()
    return errors
