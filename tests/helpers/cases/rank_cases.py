"""What is run on real ranks by `ranks.py`: layouts with options, documents, and faults with the message that they end
in."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from processes import gradients, report, worst_difference

from megatron_pg.args import own_arguments
from megatron_pg.flags.megatron import RULE_ARGUMENTS

MODES = ["sample_mean", "prompt_mean", "token_mean", "constant"]
EVERY_MODE = " ".join(MODES)
LIMIT = 2e-6
words = str.split


def crossed(*parts: str) -> list[str]:
    """Cases of every combination of a word of each part; a dot is a word that is left out."""
    combinations = product(*map(words, parts))
    return ["-".join(word for word in combination if word != ".") for combination in combinations]


# t: packed rows, s: sequence parallel, v: two virtual stages, tied: embeddings shared with the head, dist: distributed
# optimizer, overlap: overlapped gradient reduction, fp32: float32 logits, fused, scaled_exp and recompute: the fused
# head, experts: a mixture of experts, ep: distributed over data-parallel ranks, uneven: all samples on one
# data-parallel rank, turns: of tokens with weights, hybrid: a HybridModel of the GPTModel's layers, capped: logits with
# a softcap, by the flag, gemma: by the forward of the output layer, which is detected, kept: samples say what could be
# sampled, whole: loss terms over a teacher's whole vocabulary, in the fused head.
FAST = [
    *crossed("dp2", EVERY_MODE),
    *words("""
    cp2-sample_mean cp2-token_mean tp2-constant tp2s-sample_mean tp2s-token_mean-tied
    pp2-prompt_mean pp2-token_mean pp2v-sample_mean-tied cp2t-token_mean dp2t-constant
    dp2-constant-gspo cp2-sample_mean-gspo cp2t-token_mean-gspo
    tp2-sample_mean-fused-tied tp2s-token_mean-recompute-tied tp2s-constant-fp32-tied
    pp2-prompt_mean-fused-tied pp2v-token_mean-fused cp2t-sample_mean-fused dp2-constant-fused-dist-overlap
    tp2-constant-fp32-dist-overlap dp2-sample_mean-recompute-tied-dist-overlap
    cp2t-sample_mean-gspo-recompute tp2s-constant-gspo-recompute
    ep2-sample_mean-experts ep2-token_mean-experts-dist-overlap ep2-constant-experts-fused
    dp2-constant-terms cp2t-token_mean-recompute-terms pp2v-sample_mean-terms tp2s-prompt_mean-fused-terms
    cp2t-sample_mean-recompute-whole tp2s-token_mean-fused-whole
    pp2v-prompt_mean-fused-whole tp2-constant-recompute-whole-tied
    tp2s-constant-fused-kept cp2t-sample_mean-kept tp2-token_mean-recompute-kept
    dp2-constant-klcov cp2t-token_mean-klcov tp2s-sample_mean-fused-klcov pp2v-prompt_mean-klcov
    dp2t-turn_mean-turns tp2s-turn_mean-recompute-turns
    dp2-prompt_mean-dist dp2-constant-tied-dist-overlap dp2-sample_mean-uneven
    cp2t-token_mean-capped tp2s-constant-capped-fused-tied pp2-prompt_mean-gemma tp2-sample_mean-gemma-fused
    """),
]
# without the entropy that the other cases report
SCALED_EXP = words("""
    tp2s-constant-scaled_exp tp2-sample_mean-scaled_exp-tied pp2v-token_mean-scaled_exp
    dp2-constant-scaled_exp-dist-overlap tp2s-constant-capped-scaled_exp pp2-sample_mean-gemma-scaled_exp
""")
# the gradient of the router's own losses alone, in a step of PARTS micro-batches; each is run alone for comparison
PARTS = 4
BALANCED = crossed("dp2t tp2s cp2t", "sample_mean token_mean", "experts-balance")
LOSSES = "balance balance-activations auxloss seqauxloss zloss"  # of the router
BALANCED_FULL = crossed("dp2 dp2t tp2s tp2ts cp2 cp2t pp2", "sample_mean token_mean", "experts", LOSSES)
HEADS = ". fused recompute"
TWO = "dp2 dp2t tp2 tp2s tp2t pp2 pp2v cp2 cp2t"
FOUR = "dp4 tp4s pp4 cp4 dp2cp2 dp2cp2t tp2pp2 tp2pp2sv dp2tp2s dp2pp2v tp2cp2 pp2cp2"
SIX = "dp2 dp2t tp2s pp2 cp2 cp2t"
# the experts are the samples', other ones for every token and layer
REPLAYED = ["tp2s-sample_mean-experts-replay", "cp2t-token_mean-experts-replay-activations"]
REPLAYED_FULL = crossed(
    "dp2 dp2t tp2s tp2ts cp2 cp2t pp2 pp2v ep2", "sample_mean token_mean", "experts-replay", ". activations"
)
FULL = [
    *crossed("dp2 dp2t tp2 pp2 cp2 cp2t", EVERY_MODE, "gspo", ". recompute"),
    *crossed(SIX, EVERY_MODE, "terms", HEADS),
    *crossed(SIX, EVERY_MODE, "whole", "fused recompute"),
    *crossed(SIX, EVERY_MODE, "kept", HEADS),
    *crossed(SIX, f"{EVERY_MODE} turn_mean", "turns", ". recompute"),
    *crossed("ep2 ep2t", EVERY_MODE, "experts", ". dist-overlap"),
    *crossed("cp2", EVERY_MODE, "experts"),
    *crossed(TWO, EVERY_MODE, ". tied dist overlap tied-dist-overlap"),
    *crossed(TWO, EVERY_MODE, "fused recompute", ". tied-dist-overlap"),
    *crossed(TWO, EVERY_MODE, "fp32-tied-dist-overlap"),
    *words("dp2-token_mean-uneven pp2v-token_mean-turns"),
    *words("pp2v-token_mean-gemma-recompute tp2s-constant-gemma-fp32-tied dp2-sample_mean-gemma-gspo-recompute"),
]
FULL_4 = crossed(FOUR, EVERY_MODE, ". tied-dist-overlap fused-tied-dist-overlap")
FULL_4 += crossed("ep4 dp4ep2 ep2pp2 ep2cp2", EVERY_MODE, "experts", ". dist-overlap")
# with a HybridModel and without: every mode and option once
ALIKE = words("dp1-sample_mean dp1-prompt_mean-tied dp1-token_mean-gspo dp1-constant-experts")
# mtp and mtp2: one and two depths of multi-token prediction, own: with the weights of the aggregation, policy: the
# target is the policy's own distribution
MTP = words("""
    dp2-token_mean-mtp dp2-token_mean-mtp-uneven dp2t-prompt_mean-mtp-own
    dp2-constant-mtp-fused-dist-overlap dp2-sample_mean-mtp2-own
    cp2-constant-mtp cp2t-token_mean-mtp2 cp2t-token_mean-mtp-fused cp2t-constant-mtp-own
    tp2-constant-mtp-fp32-tied tp2s-token_mean-mtp-fused tp2s-sample_mean-mtp2-recompute
    pp2-token_mean-mtp pp2-prompt_mean-mtp-tied pp2-token_mean-mtp-tied-fused pp2v-sample_mean-mtp-tied-recompute
    ep2-token_mean-experts-mtp ep2-sample_mean-experts-mtp-fused
    dp2-token_mean-mtp-hybrid cp2t-token_mean-mtp-fused-hybrid pp2-constant-mtp2-hybrid
    tp2s-constant-mtp2-recompute-hybrid
    dp2-token_mean-mtp-policy cp2t-token_mean-mtp2-policy-fused tp2s-constant-mtp2-policy-recompute
    pp2-token_mean-mtp-policy
""")
MTP_FULL = [
    *crossed(TWO, EVERY_MODE, "mtp mtp2", ". fused recompute fp32-tied"),
    *crossed("ep2 ep2t", EVERY_MODE, "experts-mtp", ". fused-dist-overlap"),
    *crossed("dp2t cp2t tp2s pp2", EVERY_MODE, "mtp-own"),
    *words("cp2t-token_mean-mtp-terms pp2-token_mean-mtp-fused-terms cp2t-token_mean-mtp-fused-whole"),
    *words("dp2t-prompt_mean-mtp-own-policy-uneven cp2-constant-mtp2-policy cp2t-constant-mtp-own-policy"),
    *words("tp2-token_mean-mtp-policy-gemma-fused cp2t-token_mean-mtp-policy-gemma"),
]
# of one process, which are compared with loops over the samples; the default tier has every third
MTP_ORACLES = [
    *crossed("dp1", EVERY_MODE, "mtp mtp2 mtp-own mtp2-own", "oracle"),
    *words("dp1-token_mean-mtp-hybrid-oracle dp1-constant-mtp2-hybrid-oracle"),
    *crossed("dp1-token_mean-mtp dp1-prompt_mean-mtp-own dp1-constant-mtp2 dp1-constant-mtp-own", "policy-oracle"),
]
# apart: the predictions' gradient ends at their own layers, from 0.19.2.
MTP_LATER = ["dp2-token_mean-mtp-apart", "cp2t-token_mean-mtp-apart-fused", "tp2s-token_mean-mtp-apart-recompute"]
MTP_LATER_ORACLES = ["dp1-token_mean-mtp-apart-oracle"]
# plain: Megatron's own losses of multi-token prediction and its divisors, compared with ours.
MTP_PLAIN = [*crossed("dp2 cp2t pp2", "sample_mean-mtp-plain"), "dp2-sample_mean-mtp-unevenplain"]


def hybrid(cases: list[str]) -> list[str]:
    """The cases with a HybridModel in the place of the GPTModel."""
    return [f"{case}-hybrid" for case in cases]


def in_pieces(cases: list[str]) -> list[str]:
    return [f"{case}-pieces" for case in cases]


# pieces: the model runs by a schedule plan, together with another backward (--overlap-moe-expert-parallel-comm).
PIECES = words("""
    ep2-sample_mean-experts ep2-token_mean-experts ep2-constant-experts-fused ep2-token_mean-experts-mtp
    ep2-sample_mean-experts-mtp-fused
""")
PIECES_4 = ["ep2pp2v-sample_mean-experts", "ep2pp2v-token_mean-experts-mtp", "ep2pp2v-constant-experts-fused"]
# critic: a value head, with samples that have values and returns
CRITICS = words("""
    dp2-sample_mean-critic cp2t-token_mean-critic tp2s-token_mean-critic-dist-overlap pp2v-sample_mean-critic
    dp2t-token_mean-critic-docs dp2-constant-critic-hybrid cp2t-prompt_mean-critic-rope-dynamic
    ep2-constant-critic-experts
""")
CRITICS_FULL = [
    *crossed(TWO, EVERY_MODE, "critic", ". dist-overlap activations"),
    *crossed("dp2t cp2t tp2s pp2", EVERY_MODE, "critic-hybrid"),
    *crossed("dp2t cp2t tp2ts", EVERY_MODE, "critic-docs"),
    *words("tp2ts-prompt_mean-critic-activations dp2-token_mean-critic-uneven"),
]
CRITICS_4 = crossed("dp2cp2t tp2pp2sv dp2tp2s tp2cp2", EVERY_MODE, "critic")
# dynamic: every micro-batch is cut over its own ranks; rope: with rotary embeddings, which Megatron's layers slice
# themselves.
DYNAMIC = ["dp2t-sample_mean-rope-dynamic", "cp2t-token_mean-rope-dynamic"]
DYNAMIC_DOCUMENTS = ["dp2t-constant-rope-dynamic-docs", "cp2t-prompt_mean-rope-dynamic-docs"]
DYNAMIC_FULL = [
    *crossed("dp2t cp2t", EVERY_MODE, ". rope rope-fused-dist-overlap gspo rope-activations", "dynamic"),
    "dp2t-constant-rope-dynamic-terms",
]
DYNAMIC_4 = crossed("dp4t dp2cp2t dp2tp2ts", EVERY_MODE, "rope", ". recompute-dist-overlap", "dynamic")
# Megatron-FSDP, which shards everything (mfsdp), gradients and optimizer (mfsdp2), or the optimizer's state (mfsdp1)
FSDP = words("""
    ep2-token_mean-experts-mfsdp ep2-constant-experts-mfsdp1
    dp2-sample_mean-mfsdp-fp32-tied dp2-token_mean-mfsdp2-experts dp2t-token_mean-mfsdp1-fp32
    cp2-token_mean-mfsdp-fp32 cp2-constant-mfsdp2-tied cp2t-prompt_mean-mfsdp-overlap-mtp
""")
FSDP_FULL = crossed(
    "dp2 dp2t cp2 cp2t", EVERY_MODE, "mfsdp mfsdp2 mfsdp1", ". fp32 tied overlap-fp32 experts mtp mtp-tied"
)
# from 0.19.2: the fused head under it, and torch's FSDP2 (unit: the output layer is its own unit)
FSDP_LATER = [
    *crossed("dp2 cp2", EVERY_MODE, "mfsdp mfsdp2 mfsdp1 mfsdp0", "fused recompute"),
    *crossed("dp2 cp2 cp2t", EVERY_MODE, "fsdp2", ". unit fp32 unit-fp32 mtp unit-mtp"),
    *crossed("dp2 cp2", "sample_mean prompt_mean constant", "fsdp2-experts"),
]
# docs: the same samples as a step of --docs-per-step
DOCUMENTS = words("""
    dp2t-sample_mean-docs dp2-prompt_mean-docs dp2t-constant-dist-overlap-docs
    tp2t-constant-docs tp2ts-prompt_mean-docs pp2t-token_mean-docs pp2v-constant-docs
    cp2t-prompt_mean-docs cp2-constant-docs
    dp2t-token_mean-mtp-docs cp2t-constant-mtp2-fused-docs dp2t-constant-docs-terms dp2t-constant-docs-klcov
    pp2tv-token_mean-fused-docs cp2t-sample_mean-gspo-recompute-docs
    pp2tv-sample_mean-hybrid-docs
""")
DOCUMENTS_FULL = words("""
    dp2t-token_mean-docs tp2s-token_mean-docs pp2-sample_mean-docs pp2tv-token_mean-docs cp2t-token_mean-docs
    dp2t-constant-fused-docs
""")
DOCUMENTS_4 = crossed("dp2cp2 dp2cp2t", EVERY_MODE, "docs")
EVALUATIONS = ["dp2-constant-evaluate", "tp2s-constant-fused-evaluate", "pp2-prompt_mean-fused-evaluate"]
# arguments that rank 1 has otherwise: all that are the package's, and those that its rules read
STARTUP = sorted({*own_arguments(), *RULE_ARGUMENTS})
# case: what every rank's message says, in order of the ranks (one text: the same on both)
FAULTS = {
    **dict.fromkeys(
        words("dp2-constant-nan pp2-token_mean-nan pp2v-token_mean-nan"),
        "NonFiniteLossError: non-finite loss at rank 1, sample",
    ),
    "dp2-constant-mtp-mtpnan": "NonFiniteLossError: non-finite loss of multi-token prediction at rank 1 (1 ranks)",
    "dp2-constant-mtp-depths": "mtp_num_layers of the model is 1, and that of the arguments is 2, so predictions have "
    "no weight",
    **dict.fromkeys(
        words("""
        tp2-constant-peers cp2-sample_mean-peers tp2-constant-advantages tp2-constant-nanold
        tp2-constant-whole-wholeother tp2-constant-keptother tp2t-constant-docs-unequal
        """),
        "ScheduleError: step plan differs between ranks 0 and 1",
    ),
    "dp2-constant-ended": "rank 1: the data ended after 1 of the 2 micro-batches of this step",
    "tp2-constant-ended": "the data ended after 1 of the 2 micro-batches of this step",
    **dict.fromkeys(
        words("pp2-token_mean-raises tp2t-constant-docs-breaks pp2t-token_mean-docs-breaks"),
        "RuntimeError: the sampler broke",
    ),
    "dp2-token_mean-masked": "the step has no trained token",
    **dict.fromkeys(
        words("dp2-constant-detached pp2-token_mean-detached pp2-token_mean-docs-detached"),
        "Call PolicyGradientStep.attach",
    ),
    **dict.fromkeys(words("dp2-constant-replaced pp2-token_mean-replaced"), "the step's loss function has counted "),
    "dp2-sample_mean-reducer": "rank 1: RuntimeError: my reducer broke",
    "tp2-constant-vocabulary": "contains token id 16, and the vocabulary has 16",
    "dp2-constant-positions": "contains a sample of 25 positions, and the model has 24",
    "dp2-constant-unreduced": "config.finalize_model_grads_func is None",
    "pp2-constant-columns": "--pg-vocab-size 17 is more than the 16 columns of the model's logits",
    **dict.fromkeys(
        words("pp2-constant-fused-bias pp2-constant-fp32-bias"),
        "the output layer has a bias, which the float32 head would leave out",
    ),
    "pp2-constant-fused-telayer": "need Megatron's ColumnParallelLinear as the output "
    "layer, and it is rank_faults.TELayer",
    "pp2-constant-fused-softcap": "--pg-fused-head computes the product of the output layer "
    "and a known softcap, and rank_faults.Capped has",
    "pp2-constant-capped-softcap": "--pg-logit-softcap 1 is for logits that the model has not capped, and",
    **dict.fromkeys(
        words("pp2-constant-fused-scaled tp2-constant-fused-scaled dp2-constant-mtp-fused-scaled"),
        "ScheduleError: --pg-fused-head takes the hidden states of the output layer, and the model changes",
    ),
    **dict.fromkeys(
        words("pp2-constant-fp32-bypassed dp2-constant-mtp-fp32-bypassed"),
        "ScheduleError: --fp32-lm-head and --pg-fused-head replace the product of the output layer, and the model",
    ),
    "dp2t-constant-state": "the rows are packed (thd), and the model has MambaMixer layers, whose state must be reset",
    "pp2-token_mean-shape": "pipeline stages exchange (",
    "dp2-token_mean-flag": "calculate_per_token_loss of the model is True, and that of the arguments is False",
    "dp2-sample_mean-nanold": "non-finite loss at rank 1, sample 1 (number 0 of its "
    "micro-batch), response token 0 with old_logprobs nan",
    "dp2-token_mean-nanadvantage": "non-finite loss at rank 1, sample 1 (number 0 of its "
    "micro-batch), response token 0 with old_logprobs -",
    "dp2-constant-buildold": "rank 1: old_logprobs of sample 1 is nan at response token 0",
    "dp2-constant-buildadvantage": "rank 1: advantages of sample 1 is inf at response token 0",
    "dp2-constant-positive": "rank 1: old_logprobs of sample 1 reach 0.7",
    "dp2-constant-masklength": "rank 1: loss_mask of sample 1 has",
    "dp2-constant-oldlength": "rank 1: old_logprobs of sample 1 has",
    "pp2-constant-oldlength": "old_logprobs of sample",
    "dp2-constant-fraction": "rank 1: loss_mask of sample 1 contains 0.5, and it must be 0 or 1",
    "dp2-prompt_mean-noprompt": "rank 1: sample 1 has no prompt_id",
    "dp2-sample_mean-noids": "rank 0 has rollout_ids and rank 1 has none",
    "dp2-sample_mean-duplicate": "rollout '0/0' belongs to prompt groups",
    "dp2-constant-more": "rank 0 has 2 micro-batches, rank 1 has 3",
    "pp2-constant-valued": "the model has a value head, and the loss is that of a policy",
    "dp2-constant-critic-novalues": "rank 1: sample 1 has no values, which --pg-role critic needs",
    "dp2-constant-criticalone": "rank 1: sample 1 has returns for a critic and no old_logprobs or no advantages",
    "dp2-constant-noref": "rank 0: sample 0 has no ref_logprobs, which --pg-kl-coef 0.1 needs",
    "dp2-constant-noteacher": "rank 0: sample 0 has no teacher_logprobs, which --pg-term teacher:opd needs",
    "dp2-constant-topkabsent": "rank 1: sample 1 has no teacher_topk, which --pg-term wide:topk_forward_kl needs",
    "dp2-constant-topkempty": "rank 1: teacher_topk of sample 1 has no id at response token",
    "tp2-constant-topkbeyond": "contains token id 16 at response token",
    "dp2-constant-whole-wholeabsent": "rank 1: sample 1 has no teacher_hidden, which --pg-term wide:full_jsd needs",
    "dp2-constant-whole-wholewidth": "rank 1: teacher_hidden of sample 1 have width 5, and "
    "the rows of the teacher's head have 6",
    "dp2-constant-whole-wholenan": "rank 1: teacher_hidden of sample 1 contain a number "
    "that is not finite at response token",
    "pp2-constant-whole-wholecolumns": "has 15 rows and the student 16 columns",
    "dp2-constant-keptnowhere": "data-parallel rank 0 has samples with a sampling mask and rank 1 has none",
    "dp2-constant-keptabsent": "rank 1: sample 1 has no sampling mask while others of the step have one",
    "dp2-constant-keptoutside": "rank 1: sampling_mask of sample 1 does not hold token",
    "pp2-token_mean-keptoutside": "rank 1: sampling_mask of sample 0 does not hold token",
    "dp2-constant-keptbeyond": "rank 1: sampling_mask of sample 1 holds token id 16 at response token",
    "dp2-constant-keptwhole": "rank 1: old_logprobs of sample 1 is -",
    "dp2-constant-kepttaught": "--pg-term teacher:ce reads log-probabilities over the "
    "whole vocabulary at response token",
    "pp2-token_mean-norollout": "has no rollout_logprobs, which --pg-correction tis needs",
    "dp2-constant-huge": "rank 1: advantages of sample 1 is 1e+200 at response token",
    "dp2-constant-dict": "rank 1: the data iterator gave a dict, not a PackedBatch",
    "dp2t-constant-docs-breaks": "rank 1: RuntimeError: the sampler broke",
    "dp2t-constant-docs-masked": "the step has no trained token. Leave fully masked samples out",
    "dp2t-constant-docs-toolong": "rank 1: document a long one has 73 tokens and a micro-batch holds 12",
    "dp2t-prompt_mean-docs-divided": "has samples on data-parallel ranks 0 and 1. Give all its samples to one rank",
    "dp2-token_mean-docs-short": "EndOfDocuments: the documents have ended: 0 were trained, ",
}


@dataclass(frozen=True)
class Group:
    """Cases that are compared with one process."""

    row: str  # of docs/proof.md
    two: Sequence[str]  # on two ranks
    full: Sequence[str] = ()  # further ones in the full tier
    four: Sequence[str] = ()  # on four ranks, in the full tier
    row_of_four: str = ""
    has_metrics: bool = True  # which are compared, too
    limit: float = LIMIT

    def cases(self, full: bool) -> list[str]:
        """On two ranks."""
        return list(dict.fromkeys([*self.two, *(self.full if full else [])]))


PLAIN = Group(
    "Real ranks: every parameter's gradient on 2 ranks equals one process",
    FAST, FULL, FULL_4, "Real ranks: every parameter's gradient on 4 ranks equals one process", has_metrics=False,
)  # fmt: skip
# The default tier has a fourth of the cases with a HybridModel: its loss is the same code.
GROUPS = [
    PLAIN,
    Group(
        "Real ranks, documents per step: every parameter's gradient on 2 ranks equals one process",
        [*DOCUMENTS, *DYNAMIC_DOCUMENTS], DOCUMENTS_FULL, DOCUMENTS_4,
        "Real ranks, documents per step: every parameter's gradient on DP2 x CP2 equals one process",
    ),
    Group(
        "Real ranks, fused head without logits: every parameter's gradient on 2 ranks equals one process",
        SCALED_EXP, has_metrics=False,
    ),
    Group(
        "Real ranks, HybridModel: every parameter's gradient on 2 ranks equals one process's GPTModel",
        hybrid(FAST[::4]), hybrid(FULL), hybrid([case for case in FULL_4 if "-constant" in case]),
        "Real ranks, HybridModel: every parameter's gradient on 4 ranks equals one process's GPTModel",
        has_metrics=False,
    ),
    Group(
        "Real ranks, mixture of experts: gradients with replayed experts on 2 ranks equal one process",
        REPLAYED, REPLAYED_FULL, has_metrics=False,
    ),
    Group(
        "Real ranks, micro-batches on their own ranks: gradient and metrics on 2 ranks equal one process",
        DYNAMIC, DYNAMIC_FULL, DYNAMIC_4,
        "Real ranks, micro-batches on their own ranks: gradient and metrics on 4 ranks equal one process",
    ),
    Group(
        "Real ranks, critics: gradient and metrics on 2 ranks equal one process",
        CRITICS, CRITICS_FULL, CRITICS_4, "Real ranks, critics: gradient and metrics on 4 ranks equal one process",
    ),
    Group(  # a tied weight has the rounding of the embedding, the policy's logits and those of every depth
        "Multi-token prediction: every parameter's gradient on 2 ranks equals one process", MTP, MTP_FULL, limit=3e-6
    ),
    Group(
        "Megatron-FSDP: every parameter's gradient on 2 ranks equals one process", FSDP, FSDP_FULL, has_metrics=False
    ),
]  # fmt: skip


def reference_of(case: str) -> str:
    parts = case.split("-")
    known = words("tied capped gspo experts replay rope mtp mtp2 own policy apart terms whole klcov kept critic turns")
    found = ["capped" if part == "gemma" else part for part in parts[2:]]  # the same softcap
    options = [name for name in known if name in found]
    predicts = {"mtp", "mtp2"}.intersection(options)
    if predicts and "hybrid" in parts:  # its layers of prediction are others than a GPTModel's
        options.append("hybrid")
    return "-".join(["dp1", parts[1], *options])


def references_of(cases: Iterable[str], oracles: Sequence[str] = ()) -> list[str]:
    """What one process runs for a comparison with it, and with oracles."""
    return sorted({*map(reference_of, cases), *oracles, *(case.removesuffix("-oracle") for case in oracles)})


def compare(folder, references, cases: list[str], limit: float = LIMIT) -> float:
    """Worst gradient error of the cases; every case that misses the limit is named."""
    expected = {name: gradients(references, name) for name in set(map(reference_of, cases))}
    errors = {case: worst_difference(gradients(folder, case), expected[reference_of(case)]) for case in cases}
    return worst_of(errors, limit)


def compare_oracles(references, oracles: Sequence[str]) -> float:
    """Worst gradient error of the cases in one process."""
    pairs = {
        case: (gradients(references, case.removesuffix("-oracle")), gradients(references, case)) for case in oracles
    }
    return worst_of({case: worst_difference(*pair) for case, pair in pairs.items()})


def worst_of(errors: dict[str, float], limit: float = LIMIT) -> float:
    assert {case: error for case, error in errors.items() if not error <= limit} == {}
    return max(errors.values())


def compare_metrics(folder, references, cases: list[str], ranks: int) -> None:
    """Every rank reports the metrics of one process; of a step of documents also their counts."""
    for case in cases:
        expected = report(references, reference_of(case), 0)
        first, *others = (report(folder, case, rank) | {"reported": None} for rank in range(ranks))
        assert all(other == first for other in others), case
        assert first["num_tokens"] == expected["num_tokens"], case
        metrics = without_documents(first) if "docs" in case.split("-") else first["metrics"]
        assert metrics == pytest.approx(expected["metrics"], rel=2e-5, abs=2e-6), case


def without_documents(found: dict) -> dict:
    """The metrics without the counts of documents, which are those of one step after which nothing is left."""
    metrics = dict(found["metrics"])
    total = metrics["num_documents"]
    assert found["farewell"] == f"the documents have ended: {total} were trained"
    assert metrics.pop("num_microbatches") > 1
    counts = {"num_documents": total, "documents_seen": total, "documents_surplus": 0, "documents_waiting": 0}
    assert {name: metrics.pop(name) for name in counts} == counts
    return metrics


def compare_alike(folder, cases: list[str]) -> None:
    """On one rank a HybridModel does what the GPTModel of its layers does, to the last bit."""
    for case, other in zip(cases, hybrid(cases), strict=True):
        assert worst_difference(gradients(folder, other), gradients(folder, case)) == 0, case
        assert report(folder, other, 0)["metrics"] == report(folder, case, 0)["metrics"], case


def compare_pieces(folder, cases: list[str]) -> float:
    """Worst difference of the schedules; 0 but for multi-token prediction, whose gradients meet in another order."""
    assert all(report(folder, f"{case}-pieces", 0)["plans"] > report(folder, case, 0)["plans"] == 0 for case in cases)
    errors = {case: worst_difference(gradients(folder, f"{case}-pieces"), gradients(folder, case)) for case in cases}
    assert {case: error for case, error in errors.items() if error > (LIMIT if "mtp" in case else 0)} == {}
    return max(errors.values(), default=0.0)


def parts_of(cases: list[str]) -> list[str]:
    """The micro-batches of the cases of `BALANCED`, each alone, where nothing divides the router's losses."""
    rows = sorted({(_is_packed(case), case.split("-")[3]) for case in cases})
    return [f"dp1{'t' * packed}-sample_mean-experts-{loss}-part{k}" for packed, loss in rows for k in range(PARTS)]


def compare_balanced(folder, parts, cases: list[str]) -> float:
    """Worst error of the router's gradients against their mean over the micro-batches, by positions under the
    per-token contract."""
    worst = {}
    for case in cases:
        alone = parts_of([case])
        found = [gradients(parts, name) for name in alone]
        weights = [report(parts, name, 0)["num_positions"] if "token_mean" in case else 1 for name in alone]
        expected = {
            name: [sum(w * each[name][0] for w, each in zip(weights, found, strict=True)) / sum(weights)]
            for name in found[0]
        }
        worst[case] = worst_difference(gradients(folder, case), expected)
    return worst_of(worst)


def _is_packed(case: str) -> bool:
    return "t" in re.fullmatch(r"[a-z]+\d(\w*)", case.split("-")[0])[1]
