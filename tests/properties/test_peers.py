"""docs/migrating.md and the last columns of docs/objectives.md and docs/corrections.md, row by row: our flags compared
with the other side's formula.

The formulas are written out in plain float64 torch over padded [B, T] rows, as the other frameworks hold them. Our side
goes the whole way from flags to the gradient of the logits. What the pages call the same must agree in loss and
gradient; what they call different must differ by what they say.

Where the other side was read, at the commits that docs/migrating.md lists:
slime: slime/utils/arguments.py, slime/backends/megatron_utils/{loss,cp_utils}.py, slime/utils/ppo_utils.py,
    slime/ray/rollout.py (normalized rewards)
miles: miles/utils/{arguments,misc}.py, miles/backends/training_utils/loss_hub/{losses,math_utils,corrections}.py
verl: verl/trainer/ppo/core_algos.py (agg_loss), verl/workers/config/actor.py, verl/trainer/config/algorithm.py,
    verl/trainer/ppo/rollout_corr_helper.py
TRL: trl/trainer/{grpo_config,grpo_trainer}.py
NeMo-RL: nemo_rl/algorithms/loss/loss_functions.py, nemo_rl/algorithms/utils.py (calculate_kl)
Megatron-LM: train_rl.py, megatron/rl/rl_utils.py, megatron/training/arguments.py
"""

import dataclasses
import functools
import re
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_pg import add_arguments, validate_args
from megatron_pg.batch import pack
from megatron_pg.metrics.table import METRICS
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.loss import microbatch_loss

pytestmark = pytest.mark.filterwarnings("ignore::megatron_pg.ArgumentWarning", "ignore::megatron_pg.ArgumentNotice")

DOCS = Path(__file__).parents[2] / "docs"
LENGTHS = (1, 7, 3, 5, 2, 4)
VOCABULARY = 5
LIMIT = 1e-12


@dataclasses.dataclass
class Batch:
    """[B, T] of one step, right-padded. Each row has one prompt token, and one advantage for all its response
    tokens."""

    logits: Tensor  # [B, T, V], a leaf
    tokens: Tensor  # int64
    mask: Tensor  # 1 on trained tokens
    old: Tensor
    rollout: Tensor
    ref: Tensor
    A: Tensor
    lengths: tuple[int, ...]
    rollout_ids: list[str]
    prompt_ids: list[str]
    temperature: float = 1.0

    @property
    def log_softmax(self) -> Tensor:
        return (self.logits / self.temperature).log_softmax(-1)

    @property
    def new(self) -> Tensor:
        return self.log_softmax.gather(2, self.tokens[..., None])[..., 0]

    @property
    def entropy(self) -> Tensor:
        return -(self.log_softmax.exp() * self.log_softmax).sum(-1)

    @property
    def r(self) -> Tensor:
        return (self.new - self.old).exp()

    @property
    def rho(self) -> Tensor:
        return (self.old - self.rollout).exp()

    def sum_rows(self, x: Tensor) -> Tensor:
        """[B]."""
        return (x * self.mask).sum(1)

    @property
    def counts(self) -> Tensor:
        return self.mask.sum(1)

    def samples(self) -> list[Sample]:
        fields = {
            "old_logprobs": self.old,
            "rollout_logprobs": self.rollout,
            "ref_logprobs": self.ref,
            "advantage": self.A,
        }
        return [
            Sample.build(
                tokens=[0, *self.tokens[i, :n].tolist()],
                response_length=n,
                loss_mask=self.mask[i, :n].int().tolist(),
                rollout_id=self.rollout_ids[i],
                prompt_id=self.prompt_ids[i],
                **{name: values[i, :n].tolist() for name, values in fields.items()},
            )
            for i, n in enumerate(self.lengths)
        ]


def random_batch(seed: int = 16, **changes) -> Batch:
    """Six rows of two prompts, holes in the masks, policies far enough apart that every clip and correction acts."""
    generator = torch.Generator().manual_seed(seed)
    size = len(LENGTHS), max(LENGTHS)
    normal = lambda *shape: torch.randn(*(shape or size), dtype=torch.float64, generator=generator)  # noqa: E731
    logits = normal(*size, VOCABULARY).requires_grad_()
    tokens = torch.randint(0, VOCABULARY, size, generator=generator)
    within = torch.arange(size[1]) < torch.tensor(LENGTHS)[:, None]
    mask = within & (torch.rand(size, generator=generator) < 0.8)
    mask[:, 0] = True
    new = logits.detach().log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    old = (new + 0.5 * normal()).clamp(max=-1e-3)
    batch = Batch(
        logits=logits,
        tokens=tokens,
        mask=mask.double(),
        old=old,
        rollout=(old + 0.5 * normal()).clamp(max=-1e-3),
        ref=(new + 0.8 * normal()).clamp(max=-1e-3),
        A=normal(size[0], 1).expand(size),
        lengths=LENGTHS,
        rollout_ids=list("abcdef"),
        prompt_ids=list("xxxxyy"),
    )
    return dataclasses.replace(batch, **changes)


def one_token(*, new: float, old: float | None = None, A: float = 0.0, ref: float = -1.0) -> Batch:
    """One row of one token with these log-probabilities, over two columns."""
    fill = lambda x: torch.full((1, 1), x, dtype=torch.float64)  # noqa: E731
    odds = fill(new) - torch.log(-torch.expm1(fill(new)))
    logits = torch.stack([odds, torch.zeros_like(odds)], -1).requires_grad_()
    anchor = fill(new if old is None else old)
    rest = {"old": anchor, "rollout": anchor, "ref": fill(ref), "A": fill(A), "mask": fill(1.0)}
    ids = {"lengths": (1,), "rollout_ids": ["a"], "prompt_ids": ["x"]}
    return Batch(logits=logits, tokens=torch.zeros(1, 1, dtype=torch.int64), **rest, **ids)


@functools.cache
def settings_of(flags: str) -> LossSettings:
    parser = add_arguments(ArgumentParser(allow_abbrev=False))
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--dataloader-type", default="external")
    return LossSettings.from_args(validate_args(parser.parse_args([*flags.split(), "--pg-kernel", "torch"])))


def ours(batch: Batch, flags: str) -> tuple[Tensor, Tensor]:
    """Loss of the step and its gradient by the logits, from flags of ours."""
    packed, settings = pack(batch.samples(), qkv_format="thd"), settings_of(flags)
    (local,) = PlannedStep.of(lambda: [packed], settings, group=None).slices(lambda _: None)
    last = batch.logits.shape[1] - 1
    rows = batch.logits[packed.sample_index[0].clamp(min=0), packed.position_ids[0].clamp(max=last)]
    return _with_gradient(microbatch_loss(rows, local.fields, settings, None)[0], batch)


def theirs(batch: Batch, mean, loss) -> tuple[Tensor, Tensor]:
    """Of their loss of each token [B, T] and their mean over the step."""
    return _with_gradient(mean(batch, loss(batch)), batch)


def _with_gradient(loss: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(loss, batch.logits)
    return loss.detach(), gradient


def slope(found: tuple[Tensor, Tensor], batch: Batch) -> float:
    """Derivative by log π of a batch of one token."""
    return float(found[1][0, 0, 0] / -torch.expm1(batch.new.detach()))


def apart(batch: Batch, flags: str, mean, loss) -> tuple[float, float]:
    """Distance of loss and of gradient, each over the size of the other side's."""
    (found, gradient), (their_loss, their_gradient) = ours(batch, flags), theirs(batch, mean, loss)
    return (
        float((found - their_loss).abs() / their_loss.abs()),
        float((gradient - their_gradient).norm() / their_gradient.norm()),
    )


def is_same(batch: Batch, flags: str, mean, loss) -> bool:
    return max(apart(batch, flags, mean, loss)) < LIMIT


def differs(batch: Batch, flags: str, mean, loss) -> bool:
    return apart(batch, flags, mean, loss)[1] > 0.01


# --- means of a step ---


def of_rows(b: Batch, x: Tensor) -> Tensor:
    return (b.sum_rows(x) / b.counts).sum() / len(b.mask)


def of_tokens(b: Batch, x: Tensor) -> Tensor:
    return b.sum_rows(x).sum() / b.counts.sum()


def of_rollouts(b: Batch, x: Tensor) -> Tensor:
    """slime, miles: a row over the trained tokens of its rollout, over the rollouts."""
    same = torch.tensor([[a == c for c in b.rollout_ids] for a in b.rollout_ids]).double()
    return (b.sum_rows(x) / (same @ b.counts)).sum() / len(set(b.rollout_ids))


def of_prompts(b: Batch, x: Tensor) -> Tensor:
    """DAPO as printed."""
    groups = [[i for i, prompt in enumerate(b.prompt_ids) if prompt == each] for each in sorted(set(b.prompt_ids))]
    return sum(b.sum_rows(x)[g].sum() / b.counts[g].sum() for g in groups) / len(groups)


def whole(b: Batch, x: Tensor) -> Tensor:
    """Of what is a loss of the step already, or of one token."""
    return x.sum()


def sums_over(divisor: float):
    return lambda b, x: b.sum_rows(x).sum() / (len(b.mask) * divisor)


def of_microbatches(*cut: list[int]):
    """TRL's grpo: the mean of the rows of each micro-batch, over the accumulation steps."""
    return lambda b, x: sum((b.sum_rows(x) / b.counts)[rows].mean() for rows in cut) / len(cut)


def of_processes(b: Batch, x: Tensor) -> Tensor:
    """TRL's dapo: two processes, whose gradients are averaged, each over the tokens of all, divided by two."""
    halves = b.sum_rows(x)[:2].sum(), b.sum_rows(x)[2:].sum()
    return sum(half / (b.counts.sum() / 2) for half in halves) / 2


# --- losses of a token ---


def clip(b: Batch, low: float = 0.2, high: float = 0.2, r: Tensor | None = None) -> Tensor:
    r = b.r if r is None else r
    return torch.maximum(-b.A * r, -b.A * r.clamp(1 - low, 1 + high))


def dual(b: Batch, c: float) -> Tensor:
    """slime, miles, verl, NeMo-RL."""
    return torch.where(b.A < 0, torch.minimum(-b.A * c, clip(b)), clip(b))


def delta(b: Batch, d: float) -> Tensor:
    """TRL."""
    return -torch.minimum(b.r.clamp(max=d) * b.A, b.r.clamp(0.8, 1.2) * b.A)


def sequence_ratio(b: Batch) -> Tensor:
    """[B, 1], with the gradient of the mean: slime, miles, TRL, NeMo-RL."""
    return (b.sum_rows(b.new - b.old) / b.counts).exp()[:, None]


def gspo(b: Batch) -> Tensor:
    return clip(b, 3e-4, 4e-4, sequence_ratio(b).expand_as(b.A))


def gspo_by_token(b: Batch) -> Tensor:
    """verl: the value of the sequence's ratio, the gradient of the token's."""
    return clip(b, 3e-4, 4e-4, sequence_ratio(b).detach() * (b.new - b.new.detach()).exp())


def cispo(low: float, cap: float):
    return lambda b: -b.r.clamp(low, cap).detach() * b.A * b.new


def sapo(b: Batch) -> Tensor:
    """verl, TRL."""
    tau = 1.05 - 0.05 * (b.A > 0).double()
    return -torch.sigmoid(tau * (b.r - 1)) * 4 / tau * b.A


def dro(beta: float):
    """verl."""
    return lambda b: -(b.new * b.A - 0.5 * beta * (b.new - b.old) ** 2)


def topr(b: Batch) -> Tensor:
    """The paper, a sum over trajectories: plain where A >= 0, the trajectory's ratio up to 1 where A < 0."""
    trajectory = (b.sum_rows(b.new) - b.sum_rows(b.old)).exp()[:, None].clamp(0, 1).detach()
    return -b.sum_rows(torch.where(b.A >= 0, b.A, trajectory * b.A) * b.new).sum() / len(b.mask)


def topr_by_token(b: Batch) -> Tensor:
    return -torch.where(b.A >= 0, 1, b.r.clamp(0, 1).detach()) * b.A * b.new


def ipo(low: float, high: float, tau: float):
    """prime-rl, with ipo_mask_low, ipo_mask_high and kl_tau."""

    def loss(b: Batch) -> Tensor:
        shift = b.new.exp() - b.old.exp()
        kept = ((shift <= high) & (shift >= -low)).double()
        return -kept * b.A * b.r + tau * (b.new - b.old) ** 2

    return loss


def vespo(b: Batch) -> Tensor:
    """TRL: the logarithm of a gamma density's shape of W, without its clamps."""
    log_w = b.sum_rows(b.new - b.old)[:, None].detach()
    k, rate = torch.where(b.A >= 0, 2.0, 3.0).double(), torch.where(b.A >= 0, 3.0, 2.0).double()
    return -(rate + k * log_w - rate * log_w.exp()).exp() * b.A * b.new


def gmpo(b: Batch) -> Tensor:
    """verl: its clip range bounds the log-ratio; A of a row is the mean of its tokens'."""
    d, sign = b.new - b.old, b.A.sign()
    kept = sign * torch.minimum(sign * d, sign * d.clamp(-0.1, 0.2))
    ratio = (b.sum_rows(kept) / b.counts).exp()
    return (-b.sum_rows(b.A) / b.counts * ratio).sum() / len(b.mask)


def dppo_flags(distance: str, size: float) -> str:
    return f"--pg-objective dppo_{distance},delta_low={size},delta_high={size}"


def dppo(distance: str, size: float, c: float):
    """verl; without the 1e-8 that it adds inside of its logarithm."""

    def loss(b: Batch) -> Tensor:
        new, old = b.new.exp(), b.old.exp()
        if distance == "tv":
            kept = torch.where(b.A > 0, new - old <= size, new - old >= -size)
        else:
            kl = old * (b.old - b.new) + (1 - old) * ((1 - old) / (1 - new)).log()
            kept = (kl <= size) | torch.where(b.A > 0, new <= old, new >= old)
        return -b.A * b.r.clamp(max=c).detach() * b.new * kept

    return loss


# --- factors of a correction, and terms ---


def hot(b: Batch) -> Batch:
    return dataclasses.replace(b, temperature=0.7)


def with_kl(estimator):
    return lambda b: clip(b) + 0.3 * estimator(b)


def with_bonus(b: Batch) -> Tensor:
    return clip(b) - 0.3 * b.entropy


def truncated_gspo_by_token(b: Batch) -> Tensor:
    return b.rho.clamp(max=2.0) * gspo_by_token(b)


def masked_by_geometric_mean(b: Batch) -> Tensor:
    kept = within(product(b) ** (1 / b.counts[:, None]), 0.9, 1.1) > 0
    return clip(b) * b.rho * kept.double()


def product(b: Batch) -> Tensor:
    return b.sum_rows(b.old - b.rollout).exp()[:, None]


def within(x: Tensor, low: float, high: float) -> Tensor:
    return torch.where((x >= low) & (x <= high), x, 0.0)


def stays(b: Batch, anchor: Tensor, threshold: float) -> Tensor:
    """opsm."""
    strays = (b.sum_rows(anchor - b.new.detach()) / b.counts)[:, None] > threshold
    return 1.0 - ((b.A < 0) & strays).double()


# --- estimators of the KL term ---


def k1(b: Batch) -> Tensor:
    return b.new - b.ref


def k2(b: Batch) -> Tensor:
    return (b.new - b.ref).square() / 2


def k3(b: Batch) -> Tensor:
    return (b.ref - b.new).exp() - 1 - (b.ref - b.new)


def once(b: Batch) -> Tensor:
    """NeMo-RL's weight of the KL term: 1, with the gradient of log π."""
    return (b.new - b.new.detach()).exp()


def straight_through(b: Batch) -> Tensor:
    """verl's k3+: the value of k3, the gradient of k2."""
    return k2(b) - k2(b).detach() + k3(b).detach()


def on_policy(seed: int = 16) -> Batch:
    batch = random_batch(seed)
    return dataclasses.replace(batch, old=batch.new.detach())


def shared_rollouts() -> Batch:
    return random_batch(rollout_ids=list("aabcdd"))


TOKENS = "--loss-aggregation token_mean"
POLICY = "--pg-aux-aggregation policy"
CONSTANT = "--loss-aggregation constant --loss-aggregation-divisor"
SIXTEEN = f"{CONSTANT} 16 {POLICY}"
NARROW = "--pg-clip-eps-low 0.01 --pg-clip-eps-high 0.01"
DUAL = "--pg-objective dual_clip,cap=1.25"
GSPO = "--pg-objective gspo"
CISPO = "--pg-objective cispo,cap="
IPO = "--pg-objective ipo,delta_low=0.02,delta_high=0.03,tau=0.1"
RHO = "--pg-correction"
NEAR = "low=0.9,high=1.1"
UNCAPPED = "high=1e9"
ICEPOP = f"{RHO} icepop,low=0.8,high=1.25"
OPSM = f"{RHO} opsm,high=0.05"
OPSM_OLD = f"{RHO} opsm_old,high=0.05"
KL = "--pg-kl-coef 0.3 --pg-kl-estimator"
ENTROPY = "--pg-entropy-coef 0.3"

# (row of a page, who, our flags, their mean over the step, their loss of a token)
SAME = [
    ("`sample_mean`", "slime miles", "", of_rollouts, clip),
    ("`sample_mean`", "verl NeMo-RL", "", of_rows, clip),
    ("`sample_mean`", "TRL", "", of_microbatches([0, 1, 2], [3, 4, 5]), clip),
    ("`prompt_mean`", "the paper", "--loss-aggregation prompt_mean", of_prompts, clip),
    ("`token_mean`", "slime miles verl NeMo-RL Megatron", TOKENS, of_tokens, clip),
    ("`token_mean`", "the flag", "--calculate-per-token-loss", of_tokens, clip),
    ("`token_mean`", "TRL", TOKENS, of_processes, clip),
    ("`constant`, L", "verl TRL", f"{CONSTANT} 16", sums_over(16), clip),
    ("`constant`, L = 1", "verl", f"{CONSTANT} 1", sums_over(1), clip),
    ("`--pg-clip-eps-low`", "slime miles", "--pg-clip-eps-high 0.28", of_rollouts, lambda b: clip(b, 0.2, 0.28)),
    ("`--pg-clip-eps-low`", "Megatron", f"{NARROW} {TOKENS}", of_tokens, lambda b: clip(b, 0.01, 0.01)),
    ("`--pg-temperature`", "all", "--pg-temperature 0.7", of_rows, lambda b: clip(hot(b))),
    ("`dual_clip`", "all", DUAL, of_rows, lambda b: dual(b, 1.25)),
    ("`dual_clip`", "TRL", DUAL, of_rows, lambda b: delta(b, 1.25)),
    ("`gspo`", "slime miles TRL NeMo-RL", GSPO, of_rollouts, gspo),
    ("`gspo_token`", "verl TRL", f"{GSPO}_token", of_rows, gspo_by_token),
    ("`gspo_token`", "is gspo here", GSPO, of_rows, gspo_by_token),
    ("`gspo`", "with token_truncate", f"{GSPO} {RHO} tis", of_rows, lambda b: b.rho.clamp(max=2.0) * gspo(b)),
    ("`gspo`", "with token_mask", f"{GSPO} {RHO} icepop", of_rows, lambda b: within(b.rho, 0.5, 5.0) * gspo(b)),
    ("`gspo`", "with sequence_mask", f"{GSPO} {RHO} mis", of_rows, lambda b: within(product(b), 0.0, 3.0) * gspo(b)),
    ("`gspo`", "with opsm", f"{GSPO} {OPSM_OLD}", of_rows, lambda b: stays(b, b.old, 0.05) * gspo(b)),
    ("`gspo_token`", "verl with rollout_is token", f"{GSPO}_token {RHO} tis", of_rows, truncated_gspo_by_token),
    ("`cispo`", "TRL", f"{CISPO}1.28 {TOKENS}", of_processes, cispo(0.0, 1.28)),
    ("`cispo`", "verl slime NeMo-RL", f"{CISPO}1.2 --pg-clip-eps-low 0.2 {TOKENS}", of_tokens, cispo(0.8, 1.2)),
    ("`sapo`", "verl TRL", "--pg-objective sapo", of_rows, sapo),
    ("`dppo_tv`", "verl", f"{dppo_flags('tv', 0.05)},cap=1.3 {TOKENS}", of_tokens, dppo("tv", 0.05, 1.3)),
    ("`dppo_kl`", "verl", f"{dppo_flags('kl', 0.02)},cap=1.3 {TOKENS}", of_tokens, dppo("kl", 0.02, 1.3)),
    ("`dro`", "verl", f"--pg-objective dro,beta=0.3 {TOKENS}", of_tokens, dro(0.3)),
    ("`topr`", "the paper", f"--pg-objective topr {CONSTANT} 1", whole, topr),
    ("`topr_token`", "by token", f"--pg-objective topr_token {TOKENS}", of_tokens, topr_by_token),
    ("`ipo`", "prime-rl", f"{IPO} {TOKENS}", of_tokens, ipo(0.02, 0.03, 0.1)),
    ("`vespo`", "TRL", f"--pg-objective vespo {TOKENS}", of_processes, vespo),
    ("`gmpo`", "verl", "--pg-objective gmpo,eps_low=0.1,eps_high=0.2", whole, gmpo),
    ("`reinforce`", "verl NeMo-RL", f"--pg-objective reinforce {TOKENS}", of_tokens, lambda b: -b.A * b.new),
    ("`reinforce_is`", "the formula", "--pg-objective reinforce_is", of_rows, lambda b: -b.A * b.r),
    ("`tis`", "slime miles", f"{RHO} tis", of_rollouts, lambda b: clip(b) * b.rho.clamp(0, 2)),
    (
        "`tis`",
        "TRL NeMo-RL, with a lower bound",
        f"{RHO} tis,{NEAR}",
        of_rows,
        lambda b: clip(b) * b.rho.clamp(0.9, 1.1),
    ),
    ("`tis`", "verl", f"{RHO} tis {TOKENS}", of_tokens, lambda b: clip(b) * b.rho.clamp(max=2.0)),
    ("`tis`", "NeMo-RL Megatron, not capped", f"{RHO} tis,{UNCAPPED} {TOKENS}", of_tokens, lambda b: clip(b) * b.rho),
    ("`seq_tis`", "TRL verl", f"{RHO} seq_tis", of_rows, lambda b: clip(b) * product(b).clamp(max=2.0)),
    (
        "`seq_tis`",
        "NeMo-RL gspo, not capped",
        f"{GSPO} {RHO} seq_tis,{UNCAPPED}",
        of_rows,
        lambda b: gspo(b) * product(b),
    ),
    ("`icepop`", "slime miles TRL NeMo-RL verl", ICEPOP, of_rows, lambda b: clip(b) * within(b.rho, 0.8, 1.25)),
    ("`mis`", "TRL", f"{RHO} mis", of_rows, lambda b: clip(b) * within(product(b), 0.0, 3.0)),
    ("`seq_mask_tis`", "NeMo-RL", f"{RHO} seq_mask_tis,{NEAR} {TOKENS}", of_tokens, masked_by_geometric_mean),
    ("`opsm`", "TRL", OPSM, of_rows, lambda b: clip(b) * stays(b, b.rollout, 0.05)),
    ("`opsm_old`", "slime miles", OPSM_OLD, of_rollouts, lambda b: clip(b) * stays(b, b.old, 0.05)),
    ("`--pg-kl-coef`", "slime miles k1 k2 k3", f"{KL} k3", of_rollouts, with_kl(k3)),
    ("`--pg-kl-coef`", "k1", f"{KL} k1", of_rows, with_kl(k1)),
    ("`--pg-kl-coef`", "k2", f"{KL} k2", of_rows, with_kl(k2)),
    (
        "`--pg-kl-coef`",
        "slime miles --use-unbiased-kl k1",
        f"{KL} k1_weighted",
        of_rollouts,
        with_kl(lambda b: b.r * k1(b)),
    ),
    (
        "`--pg-kl-coef`",
        "slime miles --use-unbiased-kl k3, TRL use_bias_correction_kl",
        f"{KL} k3_weighted",
        of_rows,
        with_kl(lambda b: b.r * k3(b)),
    ),
    ("`--pg-kl-coef`", "verl TRL, weighed like the policy loss", f"{KL} k3 {SIXTEEN}", sums_over(16), with_kl(k3)),
    ("`--pg-kl-coef`", "Megatron", f"{KL} k3 {TOKENS}", of_tokens, with_kl(k3)),
    ("`--pg-entropy-coef`", "slime miles", ENTROPY, of_rollouts, with_bonus),
    ("`--pg-entropy-coef`", "verl", f"{ENTROPY} {SIXTEEN}", sums_over(16), with_bonus),
    ("`--pg-entropy-coef`", "TRL, where loss_type is dapo", f"{ENTROPY} {TOKENS}", of_processes, with_bonus),
]


@pytest.mark.parametrize(
    ("flags", "mean", "loss"), [row[2:] for row in SAME], ids=[f"{row} {who}" for row, who, *_ in SAME]
)
def test_what_is_called_the_same_has_the_same_loss_and_gradient(flags, mean, loss):
    for batch in (random_batch(), random_batch(40)):
        assert is_same(batch, flags, mean, loss)


def test_the_rows_are_told_apart():
    """A clip or factor that acted on no token of the batch would make a row equal to one without it."""
    batch, losses = random_batch(), {}
    for _, who, flags, mean, loss in SAME:
        value = float(mean(batch, loss(batch)).detach())
        losses.setdefault(f"{value:.12g}", set()).add(flags if "gspo" not in flags else who)
    assert {frozenset(found) for found in losses.values() if len(found) > 1} == {
        frozenset({TOKENS, "--calculate-per-token-loss"}),
        frozenset({"slime miles TRL NeMo-RL", "verl TRL", "is gspo here"}),
        frozenset({"with token_truncate", "verl with rollout_is token"}),
    }


def first_cells(page: str) -> set[str]:
    """The word in backticks that a row of a table of the page begins with."""
    text = (DOCS / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*?) \|(?!.*\n\| ?---)", text, re.MULTILINE)
    names = {re.match(r"`[^`]*`(, L( = 1)?)?", row)[0] for row in rows}
    return {re.sub(r",[^`]*`$", "`", name) for name in names}  # without options: `tis,high=…` is `tis`


def test_every_row_of_the_pages_has_a_test():
    tested = {row for row, *_ in SAME}
    tested |= {
        "`--custom-pg-loss-reducer-function-path`",  # tests/ranks/test_recipes.py
        *("`--pg-objective`", "`--pg-correction`"),  # their values have rows
        "`grpo`",  # as `--pg-clip-eps-low`
        *("`m2po`", "`clip_cov`", "`kl_cov`", "`top_entropy`"),  # of whole steps: tests/properties/test_selections.py
        "`rejection`",  # below
        *("`scheduled`", "`live`", "`kept`", "`varied`"),
        "`kpop`",  # tests/properties/test_weights_and_turns.py
        *("`k1`", "`k2`", "`k3`", "`abs`", "`k1_weighted`", "`k3_weighted`"),
    }
    assert first_cells("migrating.md") | first_cells("objectives.md") | first_cells("corrections.md") <= tested


# --- what is called the same and is not: the last columns of docs/migrating.md ---

PAGE = (DOCS / "migrating.md").read_text(encoding="utf-8")


def stated(*figures: float, digits: int) -> bool:
    """Whether a bullet of the page has these figures."""
    words = [re.escape(f"{figure:.{digits}f}".replace("-", "−")) for figure in figures]
    bullets = re.split(r"\n(?=[*\n|])", PAGE)
    return any(all(re.search(rf"(?<![\d.−]){word}(?!\d|\.\d)", each) for word in words) for each in bullets)


MICRO_BATCHES = [0, 1], [2, 3, 4, 5]


def token_means_of_microbatches(b: Batch, x: Tensor) -> Tensor:
    return sum(b.sum_rows(x)[rows].sum() / b.counts[rows].sum() for rows in MICRO_BATCHES) / 2


def of_padded_widths(b: Batch, x: Tensor) -> Tensor:
    """Of micro-batches of three rows."""
    return (b.sum_rows(x) / torch.tensor([7.0, 7, 7, 5, 5, 5]).double()).sum() / 6


# (what another framework does under our name, our flags, its mean over the step, its loss of a token)
DIFFERENT = [
    ("TRL's bnpo and train_rl.py with unequal micro-batches", TOKENS, token_means_of_microbatches, clip),
    ("TRL's grpo with unequal micro-batches", "", of_microbatches(*MICRO_BATCHES), clip),
    ("verl's sum norm with several padded widths", f"{CONSTANT} 7", of_padded_widths, clip),
    ("verl's gspo has one aggregation", f"{GSPO} {TOKENS}", of_rows, gspo_by_token),
    ("verl's sapo has one aggregation", f"--pg-objective sapo {TOKENS}", of_rows, sapo),
    ("verl's gspo with a token-level correction", f"{GSPO} {RHO} tis", of_rows, truncated_gspo_by_token),
    ("verl's k3+ off policy", f"{KL} k3_weighted", of_rows, with_kl(straight_through)),
    ("TRL's bias correction", f"{GSPO} {KL} k3_weighted", of_rows, lambda b: gspo(b) + 0.3 * sequence_ratio(b) * k3(b)),
    ("train_rl.py's entropy", f"{ENTROPY} {TOKENS}", of_tokens, lambda b: clip(b) + 0.3 * b.new.exp() * b.new),
]


@pytest.mark.parametrize(("flags", "mean", "loss"), [row[1:] for row in DIFFERENT], ids=[row[0] for row in DIFFERENT])
def test_what_is_called_the_same_and_is_not(flags, mean, loss):
    assert differs(random_batch(), flags, mean, loss)


def test_rows_and_rollouts():
    batch = shared_rollouts()
    assert is_same(batch, "", of_rollouts, clip)
    assert differs(batch, "", of_rows, clip)


def test_trl_dapo_divides_by_the_generation_batch():
    """Here as many tokens are in the next step."""
    batch = random_batch()
    (_, gradient), (_, half) = ours(batch, TOKENS), theirs(batch, lambda b, x: of_tokens(b, x) / 2, clip)
    assert torch.allclose(gradient, 2 * half, rtol=LIMIT, atol=0)


def test_verl_sum_norm_divides_by_the_padded_width():
    assert is_same(random_batch(), f"{CONSTANT} {max(LENGTHS)}", sums_over(max(LENGTHS)), clip)


def test_verl_drops_fully_masked_rows_where_no_batch_size_is_given():
    batch = random_batch()
    batch.mask[1] = 0
    live = lambda b, x: (b.sum_rows(x) / b.counts.clamp(min=1)).sum() / 5  # noqa: E731
    assert is_same(batch, "--pg-denominator live", live, clip)
    assert apart(batch, "", live, clip)[1] == pytest.approx(1 / 6)


def test_verl_gspo_with_a_token_level_correction_has_the_value_of_gspo():
    assert apart(random_batch(), f"{GSPO} {RHO} tis", of_rows, truncated_gspo_by_token)[0] < LIMIT


NEMO = {"k1": k1, "k2": k2, "k3": k3}


def nemo_kl(kind: str, weight=once):
    return with_kl(lambda b: (weight(b) * NEMO[kind](b)).clamp(-10, 10))


@pytest.mark.parametrize("kind", NEMO)
def test_nemo_weighs_its_kl_once(kind):
    estimators = ("k1", "k2", "k3", "k1_weighted", "k3_weighted")
    equal = [f"{kind}_weighted"] if kind != "k2" else []
    on, off = (
        {e: apart(b, f"{KL} {e} {TOKENS}", of_tokens, nemo_kl(kind)) for e in estimators}
        for b in (on_policy(), random_batch())
    )
    assert [e for e in estimators if max(on[e]) < LIMIT] == equal
    assert all(off[e][0] > 0.01 or off[e][1] > 0.01 for e in estimators)
    assert [e for e in estimators if off[e][1] < LIMIT] == (["k2"] if kind == "k3" else [])  # the gradient alone
    if equal:  # use_on_policy_kl_approximation, with the rollout engine for the old policy
        batch = random_batch()
        batch = dataclasses.replace(batch, old=batch.rollout)
        approximation = nemo_kl(kind, lambda b: (b.new - b.rollout).exp())
        assert is_same(batch, f"{KL} {equal[0]} {TOKENS}", of_tokens, approximation)


def test_nemo_k3_has_the_value_of_k3_and_another_gradient():
    batch = one_token(new=-1.0, ref=-1.5)
    nemo, k3_here = theirs(batch, whole, lambda b: once(b) * k3(b)), ours(batch, "--pg-kl-coef 1 --pg-kl-estimator k3")
    assert float(nemo[0]) == pytest.approx(float(k3_here[0]), rel=1e-12)
    assert stated(slope(k3_here, batch), slope(nemo, batch), digits=2)


def test_low_var_kl_is_clamped():
    batch = one_token(new=-4.0, ref=-1.0)
    plain = ours(batch, "--pg-kl-coef 1 --pg-kl-estimator k3")
    clamped = theirs(batch, whole, lambda b: k3(b).clamp(-10, 10))
    assert stated(float(plain[0]), slope(plain, batch), digits=2)
    assert (float(clamped[0]), slope(clamped, batch)) == (10, 0)


def test_verl_k3_plus_is_k3_weighted_on_policy_and_has_the_gradient_of_k2_on_any_samples():
    assert is_same(on_policy(), f"{KL} k3_weighted", of_rows, with_kl(straight_through))
    assert apart(random_batch(), f"{KL} k2", of_rows, with_kl(straight_through))[1] < LIMIT


def test_verl_dppo_caps_the_weight():
    batch = one_token(new=-4.7, old=-6.7, A=-1.0)
    flags = dppo_flags("tv", 0.2)
    plain, capped = (float(ours(batch, flags + more)[0]) for more in ("", ",cap=3"))
    assert float(theirs(batch, whole, dppo("tv", 0.2, 3.0))[0]) == pytest.approx(capped, rel=1e-12)
    assert stated(capped, plain, digits=1)
    up = one_token(new=-4.7, old=-6.7, A=1.0)  # the cap asks for no sign
    assert float(ours(up, flags + ",cap=3")[0]) == pytest.approx(-capped, rel=1e-12)


def test_cispo_has_a_lower_bound_elsewhere():
    batch = one_token(new=-2.0, old=-2.0 + torch.tensor(2.0).log().item(), A=1.0)
    here, there = ours(batch, f"{CISPO}1.2"), theirs(batch, whole, cispo(0.8, 1.2))
    assert stated(-slope(there, batch), -slope(here, batch), digits=1)


def test_the_upper_clip_follows_the_lower_elsewhere():
    batch = one_token(new=-2.0, old=-2.0 - torch.tensor(1.15).log().item(), A=1.0)
    assert slope(ours(batch, "--pg-clip-eps-low 0.1"), batch) == pytest.approx(-1.15)
    assert slope(theirs(batch, whole, lambda b: clip(b, 0.1, 0.1)), batch) == 0


def test_trl_entropy_is_a_mean_of_tokens():
    """Rows of 1 and 6 tokens, ln 2 and nearly 0 nats each."""
    fill = lambda x: torch.full((2, 6), x, dtype=torch.float64)  # noqa: E731
    logits = torch.zeros(2, 6, 2, dtype=torch.float64)
    logits[1, :, 0] = 40.0
    mask = fill(1.0)
    mask[0, 1:] = 0
    names = dict.fromkeys(("old", "rollout", "ref"), fill(-1.0)) | {"A": fill(0.0)}
    ids = {"lengths": (1, 6), "rollout_ids": list("ab"), "prompt_ids": list("xy")}
    batch = Batch(
        logits=logits.requires_grad_(), tokens=torch.zeros(2, 6, dtype=torch.int64), mask=mask, **names, **ids
    )
    here = float(ours(batch, "--pg-entropy-coef 1")[0])
    formula = lambda b: of_rows(b, clip(b)) - of_tokens(b, b.entropy)  # noqa: E731
    there = float(theirs(batch, whole, formula)[0])
    assert stated(there, here, digits=3)
    assert differs(random_batch(), "--pg-entropy-coef 1", whole, formula)


def test_the_sampled_entropy_of_train_rl_lowers_the_entropy():
    logits = torch.zeros(1000, dtype=torch.float64)
    logits[0] = 4.0
    p = logits.softmax(0)
    exact = -p * (p.log() - (p * p.log()).sum())
    sampled = sum(p[y] * -p[y] * (1 + p[y].log()) * (torch.eye(1000)[y] - p) for y in range(1000))  # E of the gradient
    assert torch.cosine_similarity(exact, sampled, dim=0) < -0.99


# --- verl's rejections leave its denominators ---


def kept_by_verl(b: Batch, upper: float = 1.25) -> Tensor:
    """rollout_rs token_k1 with one number: 1 / upper <= 1 / ρ <= upper."""
    return b.mask * ((1 / b.rho <= upper) & (1 / b.rho >= 1 / upper))


BOUND = torch.tensor(1.25).double().log().item()
REJECTED = f"{RHO} rejection,level=token,estimator=k1,low={-BOUND},high={BOUND}"


def of_kept(mean, keep=kept_by_verl):
    """A mean over the tokens that are kept alone."""
    return lambda b, x: mean(dataclasses.replace(b, mask=keep(b)), x)


def seq_mean(b: Batch, x: Tensor) -> Tensor:
    """verl's seq-mean-token-mean with a batch size: rows without a token count."""
    return (b.sum_rows(x) / b.counts.clamp(min=1)).sum() / len(b.mask)


def test_verl_token_mean_counts_the_kept_tokens():
    assert is_same(random_batch(), f"{REJECTED} {TOKENS} --pg-denominator kept", of_kept(of_tokens), clip)
    assert differs(random_batch(), f"{REJECTED} {TOKENS}", of_kept(of_tokens), clip)


def test_verl_means_of_rows_under_a_rejection_of_tokens():
    batch, mean = random_batch(), of_kept(seq_mean)
    every = dataclasses.replace(batch, rollout=torch.where(torch.arange(7) == 0, batch.old - 0.01, batch.rollout))
    batch.rollout[0] = batch.old[0] - 0.5
    assert (kept_by_verl(batch).sum(1) > 0).tolist() == [False] + [True] * 5
    assert all(differs(batch, f"{REJECTED} --pg-denominator {d}", mean, clip) for d in ("scheduled", "live", "kept"))
    assert is_same(every, f"{REJECTED} --pg-denominator kept", mean, clip)  # every row keeps a token


def test_verl_rejections_under_a_sum_norm_are_scheduled():
    assert is_same(random_batch(), f"{REJECTED} {CONSTANT} 16", of_kept(sums_over(16)), clip)


@pytest.mark.parametrize("level", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_verl_rejections_of_whole_sequences_are_scheduled_under_a_mean_of_rows(level, kind):
    def kept(b: Batch) -> Tensor:
        divergence = (b.old - b.rollout).square() / 2 if kind == "k2" else b.rho - 1 - b.rho.log()
        of_row = b.sum_rows(divergence) / (b.counts if level == "mean" else 1)
        return b.mask * (of_row <= 0.08)[:, None]

    flags = f"{RHO} rejection,level=seq_{level},estimator={kind},high=0.08"
    assert is_same(random_batch(), flags, of_kept(seq_mean, kept), clip)
    assert is_same(random_batch(), f"{flags} {TOKENS} --pg-denominator kept", of_kept(of_tokens, kept), clip)


@pytest.mark.parametrize("aggregation", ["", POLICY])
def test_verl_rejections_reach_kl_and_entropy(aggregation):
    flags = f"{REJECTED} {TOKENS} --pg-denominator kept {KL} k3 {ENTROPY} {aggregation}"
    assert differs(random_batch(), flags, of_kept(of_tokens), lambda b: with_bonus(b) + 0.3 * k3(b))


# --- the second table of docs/metrics.md ---


def test_mismatch_metrics_of_others():
    """verl's rollout_corr/kl is k1, its k3_kl and miles' train_rollout_kl are k3."""
    b = random_batch()
    values = SimpleNamespace(fields=SimpleNamespace(rollout_logprobs=b.rollout, old_logprobs=b.old))
    (metric,) = (m for m in METRICS if m.name == "mismatch_kl")
    mine, log_ratio = metric.formula(values), b.old - b.rollout
    assert torch.allclose(mine, log_ratio.exp() - log_ratio - 1, atol=1e-14)
    assert (of_tokens(b, b.rollout - b.old) - of_tokens(b, mine)).abs() > 0.01


def test_ess_of_miles_is_a_mean_over_samples():
    (metric,) = (m for m in METRICS if m.name == "ess")
    ratios = torch.tensor([[1.0, 1.0], [4.0, 4.0]])
    sums = {"ratio_new_old_sum": ratios.sum(), "ratio_new_old_squared_sum": ratios.square().sum(), "num_tokens": 4}
    assert float(metric.formula(sums)) == pytest.approx(100 / 136)
    assert float((ratios.sum(1).square() / (2 * ratios.square().sum(1))).mean()) == 1
