"""What the tests of hosts share: a model, samples, settings and the gradients and metrics that they should have.

The gradients come from the oracle of the objectives, plain loops over documents, through a model of an embedding and a
head by hand.
"""

import itertools
import random
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import step_oracle as oracle
import torch
import value_oracle
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor

from megatron_pg.declarations.choices import AT_ONCE, AUTO, HEAD_MODES
from megatron_pg.rollouts.sample import Sample

VOCABULARY, WIDTH = 14, 6
LENGTHS = [1, 7, 2, 9, 5, 3, 8, 1, 6, 4, 6, 2]  # of the responses
PROMPT = 4  # samples of a prompt
LAYOUTS = {  # sizes that are not 1
    "dp2": {},
    "cp2": {"context_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
AGGREGATIONS = {name: {"loss_aggregation": name} for name in ("sample_mean", "prompt_mean", "token_mean")} | {
    "constant": {"loss_aggregation": "constant", "loss_aggregation_divisor": 4096.0}
}
HEADS = {"logits": {}} | {mode: {"pg_fused_head": mode} for mode in (*HEAD_MODES, AUTO)}
SFT_WEIGHT = 0.25
TIS, CAP = (0.9, 1.2), 1.1
GAMMA, LAMBDA, VALUE_CLIP = 0.97, 0.9, 0.3
NUMBERS = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
_CLIP = {f"pg_{name}": number for name, number in NUMBERS.items()}
OBJECTIVES = {
    "grpo": (_CLIP, {}),
    "gspo": ({"pg_objective": "gspo", **_CLIP}, {"objective": "gspo"}),
    "cispo, tis": (
        {"pg_objective": "cispo,cap=1.3", "pg_correction": "tis,high=1.1"},
        {"objective": "cispo", "numbers": {"cap": 1.3}, "correction": "tis", "correction_high": 1.1},
    ),
    "kl": ({**_CLIP, "pg_kl_coef": 0.3, "pg_kl_estimator": "k3"}, {"kl_coef": 0.3, "kl_estimator": "k3"}),
}
TERMS = {  # for hosts whose batches contain a teacher's log-probabilities and the samples' origins
    "opd": (
        {**_CLIP, "pg_term": ["teacher:opd,on=rl,weight=0.3,aggregation=policy"]},
        {"kl_coef": 0.3, "kl_estimator": "k3_weighted", "aux_aggregation": "policy"},
    ),
    "sft": ({**_CLIP, "pg_term": [f"sft:ce,weight={SFT_WEIGHT}"]}, {}),
    "top_p": (_CLIP, {}),  # whose samples say what could be sampled
    # by the host's flags
    "their tis": (_CLIP, {"correction": "tis", "correction_low": TIS[0], "correction_high": TIS[1]}),
    "their gspo": (_CLIP, {"objective": "gspo"}),
    "their dual clip": (_CLIP, {"objective": "dual_clip", "numbers": NUMBERS | {"cap": CAP}}),
    "their sft": ({}, {"objective": "reinforce"}),
    "their ppo": (_CLIP, {}),
    # of a critic, on a command line with flags of its policy
    "value": ({**_CLIP, "pg_correction": "icepop,high=2", "pg_metrics": "with_entropy"}, {}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step's or several steps' gradients under one loss."""

    aggregation: str = "sample_mean"
    objective: str = "grpo"
    head: str = "logits"
    per_token: bool = False
    rollouts_per_step: int = 12
    fan_out: bool = False  # two samples a rollout

    @property
    def flags(self) -> dict[str, object]:
        """Our arguments."""
        return AGGREGATIONS[self.aggregation] | (OBJECTIVES | TERMS)[self.objective][0] | HEADS[self.head]

    @property
    def settings(self) -> oracle.Settings:
        """The oracle's."""
        words = {"numbers": NUMBERS} | (OBJECTIVES | TERMS)[self.objective][1]
        divisor = AGGREGATIONS[self.aggregation].get("loss_aggregation_divisor")
        per_token = self.per_token or self.aggregation == "token_mean"
        return oracle.Settings(aggregation=self.aggregation, divisor=divisor, per_token=per_token, **words)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a rollout."""
        return 12 // (2 if self.fan_out else 1) // self.rollouts_per_step

    @property
    def name(self) -> str:
        """For figures."""
        steps = self.num_steps
        flag, fan = ("on" if self.per_token else "off"), ("2" if self.fan_out else "1")
        return f"{self.aggregation}, {self.objective}, {self.head}, flag {flag}, {steps} steps, {fan} a rollout"


def cases(full: bool) -> Iterator[Case]:
    """Every combination; or one in which every value occurs with every other kind's, as far as 16 cases allow."""
    steps = [(12, False), (4, False), (6, True), (2, True)]
    drawn: list[tuple] = list(itertools.product(AGGREGATIONS, OBJECTIVES, HEADS, (False, True), steps))
    if not full:
        pairs = enumerate(itertools.product(AGGREGATIONS, OBJECTIVES))
        heads = list(HEADS)
        drawn = [(*pair, heads[i % 4 ^ i // 4], i % 3 == 0, steps[(i + i // 4) % 4]) for i, pair in pairs]  # not auto
    names = ("aggregation", "objective", "head", "per_token", "rollouts_per_step", "fan_out")
    for *words, steps_of in drawn:
        case = Case(**dict(zip(names, (*words, *steps_of), strict=True)))
        if case.head not in AT_ONCE or case.objective != "gspo":
            yield case
        elif not full:
            yield replace(case, head=AUTO)  # which chooses recompute


def cases_of(layout: str, *, full: bool) -> list[Case]:
    """Every case; in the default tier those of one layout, because each case runs in one of them."""
    return [*cases(full=True)] if full else [*cases(full=False)][[*LAYOUTS].index(layout) :: len(LAYOUTS)]


def samples(*, fan_out: bool = False, masked: int | None = 6) -> list[Sample]:
    """A rollout with holes in its masks, sample `masked` fully masked, and three different log-probabilities."""
    rng, found = random.Random(5), []
    for i, length in enumerate(LENGTHS):
        mask = [int(k == 0 or rng.random() < 0.7) for k in range(length)]
        reward = rng.uniform(-1.0, 1.0)  # of the sample, with `fan_out` too
        old = [rng.uniform(-4.0, -1.0) for _ in mask]
        near = lambda: [min(x + rng.uniform(-0.4, 0.4), 0.0) for x in old]  # noqa: B023, E731
        found.append(
            Sample.build(
                tokens=[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 5) + length)],
                response_length=length,
                loss_mask=[0] * length if i == masked else mask,
                old_logprobs=old,
                rollout_logprobs=near(),
                ref_logprobs=near(),
                teacher_logprobs=[0.5 * x - 0.7 for x in old],
                advantage=reward,
                reward=reward,
                rollout_id=i // 2 if fan_out else i,
                prompt_id=i // PROMPT,
                sample_id=str(i),
            )
        )
    return found


def with_returns(found: Sequence[Sample], *, skips: bool) -> list[Sample]:
    """The samples with a critic's old values, and advantages and returns by GAE from a reward at the end.

    `skips`: masked tokens are not steps.
    """
    rng, critics = random.Random(7), []
    for sample, values in zip(found, critic_values(found, *parameters(critic=True)), strict=True):
        old = [float(np.float32(value + rng.uniform(-0.6, 0.6))) for value in values]
        rewards = [*[0.0] * (len(old) - 1), sample.reward]
        mask = sample.loss_mask.tolist() if skips else [1] * len(old)
        advantages, returns = np.zeros(len(old)), np.zeros(len(old))
        if any(mask):
            tokens, *steps = value_oracle.steps_of(rewards, old, mask)
            advantages[tokens] = value_oracle.gae(*steps, GAMMA, LAMBDA)
            returns[tokens] = advantages[tokens] + steps[1]
        made = {"values": np.array(old), "advantages": advantages, "returns": returns}
        critics.append(replace(sample, **{name: torch.from_numpy(each) for name, each in made.items()}))
    return critics


def critic_values(found: Sequence[Sample], embedding: Tensor, head: Tensor) -> list[np.ndarray]:
    """[R] each, in float64, of a toy with an embedding [V, H] and a head [1, H]."""
    table, row = embedding.double().numpy(), head.double().numpy()[0]
    return [table[sample.tokens[-sample.response_length - 1 : -1].numpy()] @ row for sample in found]


# --- the model ---


class Toy(MegatronModule):
    """Logits of the next token from the token only, so that context parallelism needs no attention.

    Pipeline stages have the embedding or the output layer. A critic has a value of the next token instead of logits.
    """

    def __init__(self, config: TransformerConfig, critic: bool = False):
        super().__init__(config)
        embedding, head = parameters(critic=critic)
        self.is_critic = critic
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = parallel_state.is_pipeline_first_stage()
        self.post_process = parallel_state.is_pipeline_last_stage()
        self.share_embeddings_and_output_weights, self.position_embedding_type = False, "none"  # finalize reads them
        self.vocab_size = VOCABULARY
        self._given = None  # by the stage before
        if self.pre_process:
            self.embedding = torch.nn.Parameter(embedding.float())
        if self.post_process and critic:
            self.output_layer = ValueLayer(head)
        elif self.post_process:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                WIDTH, VOCABULARY, config=config, init_method=lambda w: w, bias=False, gather_output=False
            )
            rank, size = (f() for f in (parallel_state.get_tensor_model_parallel_rank, _tp_size))
            self.output_layer.weight.data.copy_(head.chunk(size)[rank])

    def forward(self, input_ids, position_ids=None, attention_mask=None, *, labels=None, **rest):
        hidden = self.embedding[input_ids].transpose(0, 1).contiguous() if self.pre_process else self._given
        if not self.post_process:
            return hidden
        logits, _ = self.output_layer(hidden)
        if labels is not None:
            return self.compute_language_model_loss(labels, logits.float())
        return logits.transpose(0, 1).contiguous().float()

    def compute_language_model_loss(self, labels, logits):
        raise NotImplementedError("a policy-gradient step replaces it")

    def set_input_tensor(self, tensor):
        self._given = tensor[0] if isinstance(tensor, list) else tensor


class ValueLayer(torch.nn.Linear):
    """What the hosts put in the place of a critic's output layer."""

    def __init__(self, weight: Tensor, *, sequence_parallel: bool = False):
        super().__init__(WIDTH, 1, bias=False)
        self.weight.data.copy_(weight)
        self.sequence_parallel = self.weight.sequence_parallel = sequence_parallel

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        values = super().forward(hidden).float()
        if self.sequence_parallel:
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def parameters(*, critic: bool = False) -> tuple[Tensor, Tensor]:
    """Embedding and head, whole, in float64 with float32's values."""
    generator = torch.Generator().manual_seed(3)
    embedding, head = (torch.randn(VOCABULARY, WIDTH, generator=generator).double() for _ in range(2))
    return embedding, head[:1] if critic else head


def model(
    *, per_token: bool, wrap: Callable = DistributedDataParallel, critic: bool = False
) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        calculate_per_token_loss=per_token,
        use_cpu_initialization=True,
        tensor_model_parallel_size=_tp_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for by the line above, experts or none
        finalize_model_grads_func=finalize_model_grads,
    )
    return wrap(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module=Toy(config, critic))


def gradients(model: DistributedDataParallel) -> list[Tensor]:
    """Of embedding and head, whole, after finalize."""
    toy, stages = model.module, parallel_state.get_pipeline_model_parallel_group()
    whole = [torch.zeros(each.shape) for each in parameters(critic=toy.is_critic)]
    if toy.pre_process:
        whole[0] += toy.embedding.main_grad
    if toy.post_process and toy.is_critic:
        whole[1] += toy.output_layer.weight.main_grad
    elif toy.post_process:
        head = toy.output_layer.weight.main_grad
        parts = [torch.empty_like(head) for _ in range(_tp_size())]
        torch.distributed.all_gather(parts, head, group=parallel_state.get_tensor_model_parallel_group())
        whole[1] += torch.cat(parts)
    for each in whole:
        torch.distributed.all_reduce(each, group=stages)  # each has one owner
    return whole


def _tp_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


# --- what should come out ---


def expected(found: Sequence[Sample], case: Case, *, on_policy: bool = False) -> tuple[list[Tensor], float]:
    """Gradients of embedding and head, and pg_loss, of one optimizer step over these samples.

    `on_policy`: the sampling policy's log-probabilities are the model's own.
    """
    if case.objective == "value":
        found_here = of_critic(found, case)
        inputs = [sample.tokens[-sample.response_length - 1 : -1].numpy() for sample in found]
        slopes = [2 * slope[:, None] for slope in found_here.gradients]  # their loss has no 1/2
        through = through_head(inputs, slopes, *(each.numpy() for each in parameters(critic=True)))
        return through, found_here.loss
    if case.objective == "sft":
        rollouts, demonstrations = (
            [each for each in found if (source_of(each) == "sft") == is_sft] for is_sft in (False, True)
        )
        of_policy, pg_loss = _expected(rollouts, case, case.settings, on_policy=on_policy)
        of_sft, _ = _expected(demonstrations, case, replace(case.settings, objective="reinforce"), advantage=1.0)
        return [own + SFT_WEIGHT * theirs for own, theirs in zip(of_policy, of_sft, strict=True)], pg_loss
    advantage = 1.0 if case.objective == "their sft" else None
    return _expected(found, case, case.settings, on_policy=on_policy or advantage is not None, advantage=advantage)


def of_critic(found: Sequence[Sample], case: Case) -> value_oracle.CriticResult:
    """Loss, gradients of the values and metrics of one optimizer step."""
    return value_oracle.run(critic_documents(found, *parameters(critic=True)), case.settings, VALUE_CLIP)


def critic_documents(found: Sequence[Sample], embedding: Tensor, head: Tensor) -> list[value_oracle.CriticDocument]:
    """The samples for the oracle, with the values of the toy with these weights."""
    return [
        value_oracle.CriticDocument(
            values=values,
            old=sample.values.numpy(),
            returns=sample.returns.numpy(),
            mask=sample.loss_mask.numpy(),
            rollout_id=sample.rollout_id,
            prompt_id=sample.prompt_id,
        )
        for sample, values in zip(found, critic_values(found, embedding, head), strict=True)
    ]


def kept_of(sample: Sample) -> list[list[int]]:
    """The ids that a response token could be sampled from."""
    tokens = sample.tokens[-sample.response_length :].tolist()
    return [sorted({token, (token + 1) % VOCABULARY, (3 * token + k) % VOCABULARY}) for k, token in enumerate(tokens)]


def distribution(sample: Sample, case: Case, temperature: float) -> dict[str, Tensor]:
    """[R] each: log-probabilities of a response's tokens, over what could be sampled, and entropies over all tokens."""
    embedding, head = parameters()
    length = sample.response_length
    logits = embedding[sample.tokens[-length - 1 : -1]] @ head.T / temperature
    every, kept = logits.log_softmax(-1), torch.zeros_like(logits)
    for row, ids in zip(kept, kept_of(sample) if case.objective == "top_p" else (), strict=case.objective == "top_p"):
        row[[token for token in range(VOCABULARY) if token not in ids]] = -torch.inf
    answers = (logits + kept).log_softmax(-1)[range(length), sample.tokens[-length:]]
    return {"log_probs": answers, "entropy": -(every.exp() * every).sum(-1)}


def source_of(sample: Sample) -> str:
    """What a user of the host calls the sample's origin."""
    return "sft" if int(sample.sample_id) % 3 == 1 else "unknown"


def _expected(
    found: Sequence[Sample],
    case: Case,
    settings: oracle.Settings,
    *,
    on_policy: bool = False,
    advantage: float | None = None,
) -> tuple[list[Tensor], float]:
    embedding, head = (each.numpy() for each in parameters())
    documents, inputs = [], []
    for sample in found:
        tokens, length = sample.tokens.numpy(), sample.response_length
        before, targets = tokens[-length - 1 : -1], tokens[-length:]
        inputs.append(before)
        logits = embedding[before] @ head.T
        if case.objective == "top_p":
            kept = np.zeros(logits.shape, bool)
            for row, ids in zip(kept, kept_of(sample), strict=True):
                row[ids] = True
            logits = np.where(kept, logits, -np.inf)
        own = logits[range(length), targets] - np.log(np.exp(logits).sum(axis=1))
        documents.append(
            oracle.Document(
                logits=logits,
                targets=targets,
                mask=sample.loss_mask.numpy(),
                old=own if on_policy else sample.old_logprobs.numpy(),
                advantages=sample.advantages.numpy() if advantage is None else np.full(length, advantage),
                rollout=sample.rollout_logprobs.numpy(),
                ref=(sample.teacher_logprobs if case.objective == "opd" else sample.ref_logprobs).numpy(),
                rollout_id=sample.rollout_id,
                prompt_id=sample.prompt_id,
            )
        )
    result = oracle.run(documents, settings)
    return through_head(inputs, result.gradients, embedding, head), result.pg_loss


def through_head(
    inputs: Sequence, slopes: Sequence[np.ndarray], embedding: np.ndarray, head: np.ndarray
) -> list[Tensor]:
    """Gradients of an embedding and a head, from the input tokens of each sample and the gradients of its logits."""
    of_embedding, of_head = np.zeros_like(embedding), np.zeros_like(head)
    for before, slope in zip(inputs, slopes, strict=True):
        np.add.at(of_embedding, before, slope @ head)
        of_head += slope.T @ embedding[before]
    return [torch.from_numpy(of_embedding), torch.from_numpy(of_head)]


def steps_of(found: Sequence[Sample], case: Case) -> list[list[Sample]]:
    """The samples of each optimizer step: so many rollouts, in their order."""
    ids = list(dict.fromkeys(sample.rollout_id for sample in found))
    cuts = [set(ids[k : k + case.rollouts_per_step]) for k in range(0, len(ids), case.rollouts_per_step)]
    return [[sample for sample in found if sample.rollout_id in cut] for cut in cuts]


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest over the parameters of the largest difference over the largest entry."""
    pairs = zip(found, wanted, strict=True)
    return max(float((f.double() - w).abs().max() / w.abs().max()) for f, w in pairs)


class Optimizer:
    """Keeps the gradients of each step that it is asked for."""

    param_groups = ()
    chained_optimizers = ()

    def __init__(self, model: DistributedDataParallel):
        self._model = model
        self.found: list[list[Tensor]] = []

    def zero_grad(self) -> None:
        pass

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def step(self) -> tuple[bool, float, int]:
        self.found.append(gradients(self._model))
        return True, 0.0, 0


class Scheduler:
    """Counts, as Megatron's."""

    num_steps = 0

    def step(self, increment: int = 0) -> None:
        self.num_steps += increment

    def get_lr(self, group: dict) -> float:
        return 0.0


def inherited_flags(host: str) -> list[tuple[dict, dict, str]]:
    """Options of a host, our arguments and a part of the banner: the lines of its section in inherited_flags.txt."""
    return [(literal_eval(given), literal_eval(ours), text) for given, ours, text in _table("inherited_flags", host)]


def refused_flags(host: str) -> list[tuple[dict, str]]:
    """Options that a host refuses and a part of the message: the lines of its section in refused_flags.txt."""
    return [(literal_eval(given), message) for given, message in _table("refused_flags", host)]


def _table(name: str, host: str) -> list[list[str]]:
    text = (Path(__file__).parents[1] / f"{name}.txt").read_text(encoding="utf-8")
    (section,) = (part for part in text.split("== ")[1:] if part.startswith(f"{host}\n"))
    return [[part.strip() for part in line.split(" |")] for line in section.splitlines() if " |" in line]
