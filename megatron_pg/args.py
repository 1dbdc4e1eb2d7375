"""The command line: flags, the decision table that checks them, and the two reconciliations.

`add_arguments` is an `extra_args_provider` of Megatron. `validate_args` runs after the *last* merge of command
line, YAML and recipe, and before Megatron builds its model config, because that config freezes the per-token
flag into DDP. It reports every violation at once; only `reconcile` changes an argument.
"""

import argparse
import difflib
import hashlib
import json
import math
import os
import warnings
from importlib import metadata

from megatron_pg.flags.head import add_head_arguments, head_violations, head_warnings
from megatron_pg.flags.import_path import (
    ImportFailedError,
    ImportPathError,
    load_function,
    source_of,
    split_import_path,
)
from megatron_pg.flags.loss_terms import (
    OBJECTIVE_PARAMETERS,
    add_objective_arguments,
    is_finite,
    number,
    objective_violations,
    objective_warnings,
)
from megatron_pg.flags.megatron import MEGATRON_ARGUMENTS

AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")
METRIC_LEVELS = ("none", "basic", "with_entropy")
KERNELS = ("triton", "torch")
DOCS_POLICIES = ("exact", "at_least")
DOCS_ENDS = ("partial", "stop")
REDUCER_PARAMETERS = ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss=False")

# What other frameworks call the four modes, for the "did you mean" of an unknown one. Never an alias.
ELSEWHERE = {
    "grpo": "sample_mean",
    "seq_mean_token_mean": "sample_mean",
    "dapo": "token_mean or prompt_mean",
    "token": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant",
    "seq_mean_token_sum": "constant",
    "seq_mean_token_sum_norm": "constant",
}


class ArgumentError(ValueError):
    """The arguments contradict each other or cannot work. `violations` holds (id, message) pairs."""

    def __init__(self, violations: list[tuple[str, str]]):
        self.violations = violations
        lines = "\n".join(f"  [{rule}] {message}" for rule, message in violations)
        super().__init__(f"megatron_pg found {len(violations)} problem(s) in the arguments:\n{lines}")

    def __reduce__(self):
        return type(self), (self.violations,)  # so that it survives the way between processes


class ArgumentNotice(UserWarning):
    """An argument was reconciled with another one (R1, R2)."""


class ArgumentWarning(UserWarning):
    """The arguments work, with a consequence that the user should know (W1 to W10)."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add megatron_pg's flags to Megatron's parser and return it (an `extra_args_provider`)."""
    group = parser.add_argument_group("policy gradient (megatron_pg)")
    group.add_argument(
        "--loss-aggregation",
        choices=AGGREGATIONS,
        default="sample_mean",
        help="Weight 1/d of a trained token, over the whole optimizer step: sample_mean d = N_r*M_rollout (GRPO), "
        "prompt_mean d = P*M_group (DAPO as printed), token_mean d = T (the same as --calculate-per-token-loss), "
        "constant d = N_r*L (Dr. GRPO). N_r rollouts, P prompts, T trained tokens, M trained tokens of the unit.",
    )
    group.add_argument(
        "--loss-aggregation-divisor",
        type=float,
        metavar="L",
        help="L of --loss-aggregation constant, in tokens: finite, > 0, no default. Dr. GRPO: the maximum response length.",
    )
    group.add_argument(
        "--custom-pg-loss-reducer-function-path",
        metavar="PATH",
        help="package.module:function or package.module.function of a reducer "
        f"fn({', '.join(REDUCER_PARAMETERS)}) -> Callable[[Tensor], Tensor]. It replaces --loss-aggregation for pg_loss.",
    )
    group.add_argument(
        "--pg-temperature",
        type=float,
        default=1.0,
        metavar="TAU",
        help="Temperature of the rollouts, > 0: log-probabilities are of softmax(logits / TAU). Default 1.0.",
    )
    group.add_argument(
        "--pg-metrics",
        choices=METRIC_LEVELS,
        default="basic",
        help="none: pg_loss only; basic: ratio, KL, clip fraction, advantages, counts; with_entropy: and the exact entropy.",
    )
    group.add_argument(
        "--pg-kernel",
        choices=KERNELS,
        help="Implementation of log-probabilities and loss. Default: triton on CUDA, torch elsewhere; none falls back.",
    )
    add_objective_arguments(group)
    add_head_arguments(group)
    _add_documents_arguments(parser.add_argument_group("documents per step (megatron_pg)"))
    return parser


def _add_documents_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--docs-per-step",
        type=int,
        default=0,
        metavar="N",
        help="An optimizer step is N documents (samples), over all data-parallel ranks, in as many micro-batches as they "
        "take; the dataset provider returns megatron_pg.Documents. Default 0: a step is --global-batch-size rows.",
    )
    group.add_argument(
        "--docs-per-step-policy",
        choices=DOCS_POLICIES,
        help="exact (default): a step has exactly N documents, further ones wait for the next step. at_least: ranks fill whole "
        "micro-batches until there are N, and surplus documents stay in the step. Rollouts, and with prompt_mean prompt "
        "groups, are never cut.",
    )
    group.add_argument(
        "--docs-per-step-end",
        choices=DOCS_ENDS,
        help="When all documents have ended: partial (default) trains those that are too few for a step in a last one; stop "
        "leaves them. Either way every rank then leaves the loop, with a checkpoint where --save is given.",
    )


def own_arguments() -> tuple[str, ...]:
    """Names of the attributes that `add_arguments` defines."""
    defaults = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])
    return tuple(vars(defaults))


def validate_args(args: argparse.Namespace) -> argparse.Namespace:
    """Check every rule, reconcile `token_mean` with the per-token flag, and return `args`.

    Call it after Megatron's own validation and after the last merge; it may be called again.

    Raises:
        ArgumentError: with every violation of the decision table at once.
    """
    found = vars(args)
    if missing := [name for name in own_arguments() if name not in found]:
        message = f"megatron_pg arguments are missing (--yaml-cfg replaces the parsed namespace): set {', '.join(missing)} in the YAML file"
        raise ArgumentError([("E1", message)])
    facts = _Facts(args)
    validated_before = "megatron_pg_validated" in found
    if violations := (_late_changes(args) if validated_before else []) or _violations(facts):
        raise ArgumentError(violations)
    if validated_before:
        return args
    notices = reconcile(args)
    _say(ArgumentNotice, notices)
    _say(ArgumentWarning, _warnings(facts))
    args.megatron_pg_validated = json.dumps(snapshot(args))  # primitive: Megatron stores it in checkpoints
    return args


def reconcile(args: argparse.Namespace) -> list[str]:
    """Make `token_mean` and the per-token flag, two names of one objective, agree (R1, R2); say what changed."""
    per_token = vars(args).get("calculate_per_token_loss", False)
    if args.loss_aggregation == "token_mean" and not per_token:
        args.calculate_per_token_loss = True
        return ["token_mean: --calculate-per-token-loss switched on"]
    if per_token and args.loss_aggregation == "sample_mean":
        args.loss_aggregation = "token_mean"
        return ["--calculate-per-token-loss: --loss-aggregation is token_mean, not sample_mean"]
    return []


def disagreement(per_rank: list[dict[str, str | None]]) -> str | None:
    """The first name on which the ranks' texts differ, as the message of rule E23; None when they agree."""
    for name in sorted(set().union(*per_rank)):
        for rank, values in enumerate(per_rank[1:], start=1):
            if values.get(name) != per_rank[0].get(name):
                return (
                    f"ranks disagree on {name}: rank 0 has {per_rank[0].get(name)}, rank {rank} has {values.get(name)}"
                )
    return None


class _Facts:
    """What the rules read, under the names of the decision table."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.mode = args.loss_aggregation
        self.divisor = args.loss_aggregation_divisor
        self.path = args.custom_pg_loss_reducer_function_path
        self.objective_path = args.pg_custom_objective_path
        self.per_token = vars(args).get("calculate_per_token_loss", False)

    def megatron(self, name: str, default: object = None) -> object:
        """Megatron's argument, or `default` where this release does not have it."""
        if name not in MEGATRON_ARGUMENTS:
            raise KeyError(name)
        return vars(self.args).get(name, default)

    @property
    def resolved_mode(self) -> object:
        """The mode after R2."""
        return "token_mean" if self.per_token is True and self.mode == "sample_mean" else self.mode


def _violations(facts: _Facts) -> list[tuple[str, str]]:
    rules = (
        _mode_rules,
        _divisor_rules,
        _alias_rules,
        _path_rules,
        _number_rules,
        _objective_rules,
        _head_rules,
        _choice_rules,
        _documents_rules,
        _data_rules,
        _megatron_rules,
    )
    return [violation for rule in rules for violation in rule(facts)]


def _mode_rules(facts: _Facts):
    if not isinstance(facts.mode, str):
        yield "E2", f"--loss-aggregation must be a string, got {facts.mode!r}"
    elif facts.mode not in AGGREGATIONS:
        yield (
            "E3",
            f"--loss-aggregation {facts.mode!r} is not one of {', '.join(AGGREGATIONS)}{_did_you_mean(facts.mode)}",
        )
    if not isinstance(facts.per_token, bool):
        yield "E4", f"calculate_per_token_loss must be true or false, got {facts.per_token!r}"


def _did_you_mean(mode: str) -> str:
    key = mode.lower().replace("-", "_")
    close = difflib.get_close_matches(key, [*AGGREGATIONS, *ELSEWHERE], n=1)
    guess = key if key in ELSEWHERE else (close[0] if close else None)
    return f"; did you mean {ELSEWHERE.get(guess, guess)}?" if guess else ""


def _divisor_rules(facts: _Facts):
    divisor, flag = facts.divisor, "--loss-aggregation-divisor"
    if divisor is None:
        if facts.mode == "constant" and facts.path is None:
            yield (
                "E5",
                f"--loss-aggregation constant needs {flag} L > 0 (Dr. GRPO: the maximum context or response length, "
                "all turns together); there is no default",
            )
        return
    if isinstance(divisor, str):
        yield "E7", f"{flag} must be a number, got {divisor!r}; write it without quotes"
    elif isinstance(divisor, bool):
        yield "E6", f"{flag} must be a number, got {divisor!r}"
    elif not isinstance(divisor, (int, float)):
        yield "E7", f"{flag} must be a number, got {divisor!r}"
    elif not _is_usable_divisor(divisor):
        yield "E8", f"{flag} must be finite and > 0, got {divisor}"
    if facts.path is not None:
        yield (
            "E10",
            f"{flag} has no effect with --custom-pg-loss-reducer-function-path (the reducer owns its denominator); remove one",
        )
    elif facts.mode in AGGREGATIONS and facts.mode != "constant":
        yield "E9", f"{flag} has no effect with --loss-aggregation {facts.mode}; remove it or choose constant"


def _is_usable_divisor(divisor: float) -> bool:
    """Whether L is finite and positive and 1/L is a normal float32, so that no weight is 0 or inf."""
    if not (is_finite(divisor) and divisor > 0):
        return False
    return 2.0**-126 <= 1.0 / divisor <= (2 - 2.0**-23) * 2.0**127


def _alias_rules(facts: _Facts):
    if facts.per_token is True and facts.mode in ("constant", "prompt_mean"):
        yield (
            "E11",
            "--calculate-per-token-loss is the older spelling of --loss-aggregation token_mean and contradicts "
            f"{facts.mode}; remove one",
        )


def _path_rules(facts: _Facts):
    yield from _path("--custom-pg-loss-reducer-function-path", facts.path, REDUCER_PARAMETERS)
    yield from _path("--pg-custom-objective-path", facts.objective_path, OBJECTIVE_PARAMETERS)


def _path(flag: str, path: object, parameters: tuple[str, ...]):
    if path is None:
        return
    try:
        split_import_path(path)
    except ImportPathError as error:
        yield "E13", f"{flag} {error}"
        return
    try:
        load_function(path, parameters)
    except ImportPathError as error:
        yield "E14" if isinstance(error, ImportFailedError) else "E15", f"{flag} {path!r} {error}"


def _number_rules(facts: _Facts):
    yield from number("--pg-temperature", facts.args.pg_temperature, 2.0**-126, math.inf, "finite and > 0")


def _objective_rules(facts: _Facts):
    yield from objective_violations(facts.args, facts.resolved_mode == "token_mean")


def _head_rules(facts: _Facts):
    yield from head_violations(facts.args, facts.megatron)


def _choice_rules(facts: _Facts):
    args = facts.args
    if args.pg_metrics not in METRIC_LEVELS:
        yield "E25", f"--pg-metrics {args.pg_metrics!r} is not one of {', '.join(METRIC_LEVELS)}"
    if args.pg_kernel is not None and args.pg_kernel not in KERNELS:
        yield "E25", f"--pg-kernel {args.pg_kernel!r} is not one of {', '.join(KERNELS)}"


def _documents_rules(facts: _Facts):
    args, documents = facts.args, facts.args.docs_per_step
    is_count = isinstance(documents, int) and not isinstance(documents, bool) and documents >= 0
    if not is_count:
        yield "E60", f"--docs-per-step must be a whole number of documents, or 0 for off, got {documents!r}"
    for name, choices in (("policy", DOCS_POLICIES), ("end", DOCS_ENDS)):
        flag, value = f"--docs-per-step-{name}", vars(args)[f"docs_per_step_{name}"]
        if value is not None and value not in choices:
            yield "E25", f"{flag} {value!r} is not one of {', '.join(choices)}"
        elif value is not None and is_count and documents == 0:
            yield "E61", f"{flag} {value} has no effect without --docs-per-step; remove it"
    for name, what in _FIXED_STEPS.items():
        if is_count and documents > 0 and facts.megatron(name) not in (None, False, "none"):
            yield (
                "E62",
                f"--{name.replace('_', '-')} {what}, and with --docs-per-step every step has its own number of micro-batches; remove it",
            )


_FIXED_STEPS = {  # what counts on a number of micro-batches, and how
    "rampup_batch_size": "sets the number of micro-batches by a schedule",
    "decrease_batch_size_if_needed": "changes the number of micro-batches",
    "train_samples": "is divided by --global-batch-size into steps (use --train-iters)",
    "cuda_graph_impl": "captures a number of micro-batches of one shape",
}


def _megatron_rules(facts: _Facts):
    token_mean = facts.resolved_mode == "token_mean" or facts.per_token is True
    if token_mean and facts.megatron("ddp_average_in_collective", False):
        yield "E18", "--ddp-average-in-collective divides by ranks and cannot be combined with token_mean"
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if facts.megatron(name, False):
            yield (
                "E19",
                f"gradient scaling under --{name.replace('_', '-')} is not verified for --loss-aggregation; remove it",
            )
    graph = [facts.megatron(name) for name in ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules")]
    if any(name in ("full_iteration", "CudaGraphScope.full_iteration") for name in _flatten(graph)):
        yield "E20", "--cuda-graph-impl full_iteration freezes the step's normaliser; capture layers instead"
    if token_mean and facts.megatron("mtp_num_layers"):
        yield (
            "E21",
            "--mtp-num-layers cannot be combined with token_mean: the MTP loss would be divided by a count that is not its own",
        )
    if facts.megatron("overlap_moe_expert_parallel_comm", False):
        yield (
            "E27",
            "--overlap-moe-expert-parallel-comm builds its own schedule plan, so the policy-gradient loss would never be "
            "called; remove it",
        )
    if (facts.megatron("gtp_weight_remat_size", 1) or 1) > 1:
        yield (
            "E28",
            "--tensor-parallel-num-weight-shards > 1 is not verified for --loss-aggregation; remove it",
        )


def _data_rules(facts: _Facts):
    loader = facts.megatron("dataloader_type", "external")
    if facts.megatron("hybrid_context_parallel"):  # whatever the loader
        yield (
            "E12",
            "--hybrid-context-parallel takes samples from Megatron's own data loader (--dataloader-type single) and distributes them "
            "itself, so packed micro-batches cannot reach it; remove it (--context-parallel-size alone works)",
        )
    if loader != "external":
        yield (
            "E29",
            f"--dataloader-type {loader} would wrap the iterator of packed micro-batches in a data loader; use --dataloader-type "
            "external",
        )
    for name in ("perform_rl_step", "sft", "iterations_to_skip"):
        if facts.megatron(name):
            yield (
                "E30",
                f"--{name.replace('_', '-')} reads its own kind of batches and cannot be combined with megatron_pg; remove it",
            )


def _flatten(values: list[object]) -> list[str]:
    items = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [part.strip() for item in items for part in str(item).split(",")]


def _warnings(facts: _Facts) -> list[str]:
    messages = []
    token_mean = facts.resolved_mode == "token_mean"
    if facts.path is not None:
        if facts.mode != "sample_mean":
            messages.append(
                "--custom-pg-loss-reducer-function-path takes precedence: "
                f"--loss-aggregation {facts.mode} does not shape pg_loss"
            )
        unit = "1/T" if token_mean else "1/N_r"
        file, digest = source_of(load_function(facts.path, REDUCER_PARAMETERS))
        messages.append(f"pg_loss = ({unit})·Σ reducer(ℓ), reducer {facts.path} ({file}, sha256 {digest[:12]})")
    if token_mean and facts.megatron("fp16", False):
        messages.append(
            "--fp16: gradients hold a sum over all trained tokens of the step until finalize; the loss scale must absorb it"
        )
    if token_mean and _has_moe_losses(facts) and _model_ranks(facts) > 1 and _core_version() < (0, 19):
        messages.append("this Megatron mis-scales MoE auxiliary losses by TP·CP (Megatron-LM#5047)")
    if not token_mean and facts.megatron("mtp_num_layers"):
        messages.append("MTP trains by cross-entropy on loss-masked tokens, outside --loss-aggregation")
    if facts.objective_path is not None:
        file, digest = source_of(load_function(facts.objective_path, OBJECTIVE_PARAMETERS))
        messages.append(f"ℓ is the objective {facts.objective_path} ({file}, sha256 {digest[:12]})")
    messages += objective_warnings(facts.args, facts.resolved_mode)
    return messages + head_warnings(facts.args, facts.megatron)


def _has_moe_losses(facts: _Facts) -> bool:
    if not facts.megatron("num_experts"):
        return False
    coefficients = [facts.megatron(name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")]
    return any(value not in ("None", "0", "0.0") for value in _flatten(coefficients))


def _model_ranks(facts: _Facts) -> int:
    return (facts.megatron("tensor_model_parallel_size") or 1) * (facts.megatron("context_parallel_size") or 1)


def _core_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):  # a source tree: newer than every release
        return (99, 0)


def snapshot(args: argparse.Namespace) -> dict[str, object]:
    """The arguments that decide the loss, by name: what is compared between calls and between ranks."""
    names = (*own_arguments(), "calculate_per_token_loss")
    return {name: vars(args).get(name, False) for name in names}


def rank_snapshot(args: argparse.Namespace) -> dict[str, str]:
    """Every argument that a rule reads, by name, as text, before validation: what must agree between the ranks."""
    names = (*own_arguments(), *MEGATRON_ARGUMENTS)
    return {name: _as_text(vars(args)[name]) for name in names if name in vars(args)}


def _as_text(value: object) -> str:
    """The value as it is written; of a long one the begin and a hash, because the message that carries it has a size."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:40]}… ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _late_changes(args: argparse.Namespace) -> list[tuple[str, str]]:
    before, now = json.loads(args.megatron_pg_validated), snapshot(args)
    changed = [n for n in now if now[n] != before.get(n) or isinstance(now[n], bool) != isinstance(before.get(n), bool)]
    advice = "call validate_args after the last merge"
    return [("E22", f"{n} was {before.get(n)!r} when validated and is {now[n]!r} now; {advice}") for n in changed]


def _say(category: type[Warning], messages: list[str]) -> None:
    if os.environ.get("RANK", "0") == "0":
        for message in messages:
            warnings.warn(message, category, stacklevel=3)
