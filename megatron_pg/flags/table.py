"""The flags by the groups of --help: keywords for argparse, and help texts. Needs no torch."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_pg.declarations import choices
from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.corrections import CORRECTIONS, KL_ESTIMATORS, CorrectionDeclaration
from megatron_pg.declarations.declaration import attribute_of
from megatron_pg.declarations.loss_terms import TAIL_FLOOR
from megatron_pg.declarations.objectives import DEFAULT, OBJECTIVES, ObjectiveDeclaration
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.term_text import KINDS_OF_FLAG
from megatron_pg.flags.values import choice

_SWITCH = {"action": "store_true", "default": False}
GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "megatron_pg: objective and aggregation": {
        "--loss-aggregation": {"choices": AGGREGATIONS},
        "--loss-aggregation-divisor": {"type": float, "metavar": "L"},
        "--pg-objective": {"default": DEFAULT, "metavar": "NAME[,NUMBER=X]..."},
        "--pg-clip-eps-low": {"type": float, "metavar": "EPS"},
        "--pg-clip-eps-high": {"type": float, "metavar": "EPS"},
        "--pg-correction": {"default": "none", "metavar": "NAME[,OPTION=X]..."},
        "--pg-temperature": {"type": float, "default": 1.0, "metavar": "TAU"},
        "--pg-kl-coef": {"type": float, "default": 0.0, "metavar": "BETA"},
        "--pg-kl-estimator": {"metavar": "NAME"},
        "--pg-entropy-coef": {"type": float, "default": 0.0, "metavar": "ETA"},
        "--pg-entropy-target": {"metavar": "NATS,step=X[,max=X]"},
        "--pg-role": {"choices": choices.ROLES, "default": "policy"},
        "--pg-value-clip": {"type": float, "metavar": "EPS"},
    },
    "megatron_pg: custom functions, weights and denominators": {
        "--custom-pg-loss-reducer-function-path": {"metavar": "PATH"},
        "--pg-custom-objective-path": {"metavar": "PATH[,NUMBER=X]..."},
        "--pg-denominator": {"choices": choices.DENOMINATORS, "default": "scheduled"},
        "--pg-weight-denominator": {"choices": choices.WEIGHT_DENOMINATORS, "default": "tokens"},
        "--pg-sequence-level": {"choices": choices.SEQUENCE_LEVELS, "default": "sample"},
        "--pg-aux-aggregation": {"choices": choices.AUX_AGGREGATIONS, "default": "default"},
        "--pg-mtp-aggregation": {"choices": choices.MTP_AGGREGATIONS, "default": "token_mean"},
        "--pg-mtp-target": {"choices": choices.MTP_TARGETS, "default": "token"},
        "--pg-grad-divisor": {"type": float, "default": 1.0, "metavar": "G"},
    },
    "megatron_pg: further loss terms and sampling masks": {
        "--pg-term": {"action": "append", "metavar": "NAME:KIND[,OPTION=VALUE]..."},
        "--pg-sampling-mask-missing": {"choices": choices.SAMPLING_MASK_MISSING, "default": "error"},
        "--pg-sampling-mask-entropy": {"choices": choices.SAMPLING_MASK_ENTROPIES, "default": "full"},
    },
    "megatron_pg: LM head and kernels": {
        "--fp32-lm-head": _SWITCH,
        "--pg-fused-head": {"nargs": "?", "const": choices.AUTO, "choices": (choices.AUTO, *choices.HEAD_MODES)},
        "--fp32-lm-head-backward": {"choices": choices.HEAD_BACKWARDS},
        "--pg-vocab-size": {"type": int, "metavar": "V"},
        "--pg-logit-softcap": {"type": float, "metavar": "C"},
        "--pg-kernel": {"choices": choices.IMPLEMENTATIONS},
    },
    "megatron_pg: steps of a fixed number of documents": {
        "--docs-per-step": {"type": int, "default": 0, "metavar": "N"},
        "--docs-per-step-policy": {"choices": choices.DOCS_POLICIES},
        "--docs-per-step-end": {"choices": choices.DOCS_ENDS},
        "--docs-per-step-drop-position": _SWITCH,
    },
    "megatron_pg: metrics and startup": {
        "--pg-metrics": {"choices": choices.METRIC_LEVELS, "default": "basic"},
        "--pg-no-mismatch-advice": _SWITCH,
        "--pg-dry-run": _SWITCH,
    },
}
FLAGS = {flag: keywords for flags in GROUPS.values() for flag, keywords in flags.items()}
DEFAULTS = {attribute_of(flag): keywords.get("default") for flag, keywords in FLAGS.items()}  # by argument
_HELP = {  # names in braces are those of `_shown`
    "--loss-aggregation": "Weight 1/d of a trained token, counted over the whole optimizer step. sample_mean "
    "(default): d = N_r*M_rollout (GRPO). prompt_mean: d = P*M_group (DAPO as printed). token_mean: d = T, the same as "
    "--calculate-per-token-loss, and the default with it. constant: d = N_r*L (Dr. GRPO). turn_mean: d = "
    "N_turn*M_turn. N_r rollouts, P prompts, N_turn turns, T trained tokens; M those of the rollout, group or turn.",
    "--loss-aggregation-divisor": "L of --loss-aggregation constant, in tokens: finite, > 0, no default. Dr. GRPO: the "
    "maximum response length.",
    "--pg-objective": "Objective, the loss of one token, with its numbers: {objectives}. A number in brackets has a "
    "default. docs/objectives.md has the formulas. Default grpo, the clipped surrogate of PPO.",
    "--pg-clip-eps-low": "Clip the probability ratio from below at 1 - EPS; 0 <= EPS <= 1, 1 switches it off. "
    "Default 0.2 (gspo and gspo_token: 3e-4; cispo: 1).",
    "--pg-clip-eps-high": "Clip the probability ratio from above at 1 + EPS; EPS >= 0. Default 0.2 (DAPO "
    "clip-higher: 0.28; gspo and gspo_token: 4e-4).",
    "--pg-correction": "Correction of the policy loss for a mismatch between trainer and rollout engine, with its "
    "options: {corrections}. An option in brackets has a default. docs/corrections.md has the formulas. Default none.",
    "--pg-temperature": "Sampling temperature of the rollouts, > 0: log-probabilities are those of "
    "softmax(logits / TAU). Default 1.0.",
    "--pg-kl-coef": "Add BETA times an estimate of KL(π‖π_ref) to the loss. Default 0.",
    "--pg-kl-estimator": "Estimator of --pg-kl-coef, required with it: {estimators}. k3_weighted has the right value "
    "and the right gradient.",
    "--pg-entropy-coef": "Subtract ETA times the exact entropy of softmax(logits / TAU) from the loss. Default 0.",
    "--pg-entropy-target": "Adapt the entropy coefficient to a target for the mean entropy, in nats. After each step, "
    "the coefficient rises by step if the entropy is below the target. Otherwise it falls by step, and the next step "
    "uses 0. It begins at --pg-entropy-coef and stays between 0 and max. Checkpoints contain it. Default: constant.",
    "--pg-role": "What the model is. policy (default): it returns logits. critic: it has the value head of "
    "megatron_pg.add_value_head and learns the samples' returns with PPO's value loss.",
    "--pg-value-clip": "In a critic's value loss, clip the value to within EPS of the sample's old value; EPS > 0. "
    "Default: not clipped.",
    "--custom-pg-loss-reducer-function-path": "package.module:function or package.module.function of a reducer "
    "fn({reducer_parameters}) -> Callable[[Tensor], Tensor]. It replaces --loss-aggregation for pg_loss.",
    "--pg-custom-objective-path": "package.module:function or package.module.function of a custom objective "
    "fn({objective_parameters}) -> Tensor, with its numbers. It replaces --pg-objective.",
    "--pg-denominator": "What the denominators count. scheduled (default): all rollouts and trained tokens. live: only "
    "rollouts and prompt groups with a trained token. varied: not the prompt groups of several rollouts whose rewards "
    "are all equal; these have no weight. kept: only tokens that --pg-correction does not reject, and the rollouts and "
    "groups with such a token.",
    "--pg-weight-denominator": "What the denominators sum if samples have token_weights. tokens (default): trained "
    "tokens, so a weight of 2 doubles a token. weights: the tokens' weights, so they are relative to each other within "
    "a rollout, prompt group or turn.",
    "--pg-sequence-level": "What a sequence is for sequence-level objectives, importance weights and rejections: the "
    "whole sample (default), or each of its turns.",
    "--pg-aux-aggregation": "Weights of the KL and entropy terms. default: sample_mean, or token_mean with "
    "--calculate-per-token-loss. policy: the weights of the policy loss.",
    "--pg-mtp-aggregation": "Weights of the cross-entropies of Megatron's --mtp-num-layers. token_mean (default): each "
    "depth is averaged over all tokens of the step that it can predict. policy: as --loss-aggregation.",
    "--pg-mtp-target": "What the layers of Megatron's --mtp-num-layers predict. token (default): the sample's token, "
    "by cross-entropy. policy: the policy's own distribution of that token, by the forward KL divergence, without a "
    "gradient to that distribution.",
    "--pg-grad-divisor": "Divide the gradient, but not the reported loss, by G. Default 1 (docs/objectives.md: parity "
    "with DeepSpeed).",
    "--pg-term": "Add a loss term with its own tokens and denominators. Kinds: {kinds}. Options: weight (default 1), "
    "aggregation and divisor (default: as --loss-aggregation), on (the loss term whose tokens it uses; rl is the "
    "objective), estimator (of a KL divergence), beta and alpha (of a teacher's divergence), temperature (of a top-k "
    "teacher, default 1), tail_floor (of a top-k teacher: lower bound of the probability of all other tokens, default "
    "{tail_floor:g}), head (required for full_*: PATH or PATH:NAME of the teacher's output layer [V, H] in a "
    "safetensors file, by default named weight), softcap (of the logits of a full_* teacher, 0 for none; by default "
    "that of the policy's logits). rl:rl,weight=0 drops the objective. May be repeated.",
    "--pg-sampling-mask-missing": "What to do if a trained token is not in its sampling mask. error (default): stop "
    "the step. mask: leave the token out before anything is counted.",
    "--pg-sampling-mask-entropy": "What the entropy of a token with a sampling mask is over. full (default): the whole "
    "vocabulary. kept: the sampling mask.",
    "--fp32-lm-head": "Compute logits in float32 from bfloat16 hidden states and weights, so that log-probabilities "
    "are as exact as those of a float32 sampler. All logits are stored.",
    "--pg-fused-head": "Compute the loss from the last hidden states in chunks of tokens, with float32 logits that are "
    "never stored. auto (default if no value is given) chooses one of the other three. forward: the gradient is "
    "computed together with the loss. recompute: the logits are computed again in the backward, for loss scaling and "
    "for sequence-level losses. scaled_exp: as forward, faster and with less memory, for losses without entropies on "
    "compute capability 9.0.",
    "--fp32-lm-head-backward": "Precision of the logits' gradient in the backward GEMMs. bf16 (default): rounded, as "
    "in Megatron. split: two bfloat16 parts, which give a weight gradient exact to 1e-5 at twice the cost of the "
    "GEMMs.",
    "--pg-vocab-size": "Vocabulary size of the rollout engine. Columns of the logits from V on are padding and have no "
    "probability. Default: all columns of Megatron's padded vocabulary.",
    "--pg-logit-softcap": "Cap the logits x to C·tanh(x / C) before the temperature, for a model that does not cap "
    "them itself. Megatron-Bridge's output layers of Gemma 2 and 4 do, which is detected. Default: none.",
    "--pg-kernel": "Implementation of log-probabilities and loss. Default: triton on CUDA, torch elsewhere. There is "
    "no fallback.",
    "--docs-per-step": "Train N documents (samples) per optimizer step over all data-parallel ranks, in as many "
    "micro-batches as needed. The dataset provider returns megatron_pg.Documents. Default 0: a step has "
    "--global-batch-size rows.",
    "--docs-per-step-policy": "exact (default): a step has exactly N documents; the others wait for the next step. "
    "at_least: ranks fill whole micro-batches until there are N, and surplus documents stay in the step. Rollouts are "
    "never split, nor are prompt groups with prompt_mean.",
    "--docs-per-step-end": "What to do at the end of the documents. partial (default): train the remaining ones in a "
    "smaller last step. stop: drop them. Every rank then leaves the training loop, with a checkpoint if --save is "
    "given.",
    "--docs-per-step-drop-position": "Resume a checkpoint of --docs-per-step without that flag. Its position in the "
    "documents is dropped, and the data start where the dataset provider starts.",
    "--pg-metrics": "What is logged. none: pg_loss only. basic (default): also ratio, KL, clip fraction, advantages, "
    "counts. with_entropy: also the exact entropy.",
    "--pg-no-mismatch-advice": "Do not warn when trainer and rollout engine differ for several steps. The metrics "
    "mismatch/... are still logged.",
    "--pg-dry-run": "Validate the arguments, compare them between ranks, print the effective objective and exit with "
    "code 0 before model and data are built. The same as MEGATRON_PG_DRY_RUN=1 in the environment.",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags, in their groups."""
    shown = _shown()
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag, keywords in flags.items():
            group.add_argument(flag, help=_HELP[flag].format(**shown), **keywords)


def _shown() -> dict[str, Any]:
    """What help texts show of the declarations."""
    return {
        "objectives": _listed(OBJECTIVES),
        "corrections": _listed(CORRECTIONS),
        "estimators": ", ".join(KL_ESTIMATORS),
        "kinds": ", ".join(KINDS_OF_FLAG),
        "tail_floor": TAIL_FLOOR,
        "reducer_parameters": ", ".join(choices.REDUCER_PARAMETERS),
        "objective_parameters": ", ".join(choices.OBJECTIVE_PARAMETERS),
    }


def _listed(table: Mapping[str, ObjectiveDeclaration] | Mapping[str, CorrectionDeclaration]) -> str:
    """The names of a table with their options; those with a default are in brackets."""
    return ", ".join(f"{name}{_options_of(declared)}" for name, declared in table.items())


def _options_of(declared: ObjectiveDeclaration | CorrectionDeclaration) -> str:
    words = declared.words if isinstance(declared, CorrectionDeclaration) else {}
    required = [f",{option}={'|'.join(choices)}" for option, choices in words.items()]
    options = [(number.name, default) for number, default in declared.numbers.items() if number.flag is None]
    return "".join([*required, *(f",{name}=" if default is None else f"[,{name}=]" for name, default in options)])


def word_rules(args: argparse.Namespace, *flags: str, **rest: Any) -> Violations:
    """Rule E25 of `choice`, with the `rest` of its arguments, for flags with choices; a flag may be left out."""
    for flag in flags:
        value = vars(args)[attribute_of(flag)]
        if value is not None or "default" in FLAGS[flag]:
            yield from choice(flag, value, FLAGS[flag]["choices"], **rest)


def switch_rules(args: argparse.Namespace, *flags: str, rule: str = "E25") -> Violations:
    """Rule E25 (E50 of the head) for switches, which are true or false."""
    for flag in flags:
        value = vars(args)[attribute_of(flag)]
        if not isinstance(value, bool):
            yield f"{rule} {flag} is {value!r}. It must be true or false."
