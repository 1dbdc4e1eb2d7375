"""`megatron-pg explain`: the objective in force as a formula with numbers, and which factor comes from where."""

import argparse
import shlex
from collections.abc import Iterator, Sequence

from megatron_pg.args import default_arguments, own_arguments
from megatron_pg.cli.launch import Launch, Layout, add_launch_options, layout_of, read_arguments, read_launch
from megatron_pg.cli.terminal import InputError, say, show_json, table
from megatron_pg.cli.validate import check
from megatron_pg.declarations.aggregations import AGGREGATIONS, is_by_turn
from megatron_pg.declarations.choices import DENOMINATORS
from megatron_pg.flags.banner import banner, banner_of, describe
from megatron_pg.flags.facts import Facts

Rows = list[tuple[str, str]]  # name and text


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    add_launch_options(parser)
    lengths = "trained tokens of the answers whose weight is shown (default 10,100,1000)"
    parser.add_argument("--lengths", type=_lengths, default=(10, 100, 1000), metavar="N,N,…", help=lengths)


def run(options: argparse.Namespace) -> int:
    """Print the objective."""
    launch = read_launch(options)
    violations, remarks = check(launch)
    if violations:
        raise InputError("; ".join(f"[{rule}] {message}" for rule, message in violations))
    layout = layout_of(launch)
    if layout.data is not None:
        launch.args.data_parallel_size = layout.data
    factors, weights = factor_rows(launch.args, layout), weight_rows(launch.args, layout, options.lengths)
    if options.json:
        show_json(_document(launch, layout, remarks, factors, weights))
        return 0
    say(banner(launch.args))
    say(banner_of(factors, "the numbers of one optimizer step"))
    _say_weights(launch.args, layout, weights)
    say(banner_of(_origin(launch, remarks), "read from"))
    return 0


def factor_rows(args: argparse.Namespace, layout: Layout) -> Rows:
    """The factors that the loss returns and those that Megatron removes, with the numbers that are known."""
    rows = [
        ("N_r", _rollouts_text(args, layout)),
        ("K", _microbatches_text(args, layout)),
        (
            "D, C",
            "data-parallel and context-parallel ranks; D is unknown, --world-size gives it"
            if layout.data is None
            else f"{layout.data} data-parallel and {layout.context} context-parallel ranks of {layout.world}",
        ),
        *_denominator_rows(args, layout),
    ]
    divisor, micro, data, context = args.pg_grad_divisor, layout.microbatches, layout.data, layout.context
    gradient = "∇Σ w·ℓ, exactly" if divisor == 1 else f"∇Σ w·ℓ / {divisor:g}  (--pg-grad-divisor)"
    if vars(args).get("calculate_per_token_loss", False):
        product = f" = {micro * data * context}" if micro and data and context else ""
        counted = "n its positions, Q = Σ n" if vars(args).get("num_experts") else f"n = 1, Q = Σ n = K·D·C{product}"
        return [
            *rows,
            ("returned", f"Q·S and n: S = Σ w·ℓ of the rank and micro-batch, {counted}"),
            ("schedule, DDP", "× 1"),
            ("finalize", f"÷ Q, so the gradient is {gradient}"),
        ]
    product = f" = {micro}·{data}·S = {micro * data}·S" if micro and data else ""
    return [
        *rows,
        ("returned", f"K·D·S{product}, S = Σ w·ℓ of the rank and micro-batch"),
        ("schedule", f"× C{_equal(context)}, ÷ K{_equal(micro)}"),
        ("DDP", f"÷ (D·C){_equal(data and context and data * context)}, then the sum over ranks: {gradient}"),
    ]


def weight_rows(args: argparse.Namespace, layout: Layout, lengths: tuple[int, ...]) -> list[dict[str, float]]:
    """Weight of a token and of a whole answer for each length, in a step with equally many answers of each length.

    Under turn_mean answers are turns. Without the number of rollouts or turns the weights are in units of its inverse.
    """
    if args.custom_pg_loss_reducer_function_path is not None or not Facts(args).has_objective:
        return []
    mean = sum(lengths) / len(lengths)
    declared, rollouts = AGGREGATIONS[args.loss_aggregation], _fixed_rollouts(args, layout) or 1
    tokens = [1 / (rollouts * declared.per_rollout(n, mean, args.loss_aggregation_divisor)) for n in lengths]
    answers = [token * length for token, length in zip(tokens, lengths, strict=True)]
    return [
        {"length": length, "token": token, "answer": answer, "share": answer / sum(answers)}
        for length, token, answer in zip(lengths, tokens, answers, strict=True)
    ]


def _fixed_rollouts(args: argparse.Namespace, layout: Layout) -> int | None:
    """N_r, or None if the step decides what is counted.

    So it does if only rollouts with a trained or kept token count, if turns count, or if some samples are of other loss
    terms.
    """
    is_fixed = args.pg_denominator == "scheduled" and not is_by_turn(args.loss_aggregation)
    return layout.batch if is_fixed and not _has_other_samples(args) else None


def _has_other_samples(args: argparse.Namespace) -> bool:
    """Whether samples can be of a loss term that is not the objective."""
    return len(Facts(args).terms_of_samples) > 1


def _unit(args: argparse.Namespace) -> str:
    return "1/N_turn" if is_by_turn(args.loss_aggregation) else "1/N_r"


def _equal(value: int | None) -> str:
    return "" if value is None else f" = {value}"


def _microbatches_text(args: argparse.Namespace, layout: Layout) -> str:
    if args.docs_per_step:
        return "as many micro-batches as the step's documents need"
    batch, micro, data = layout.batch or "samples", layout.micro or "micro-batch size", layout.data or "D"
    count = f"{layout.microbatches} = " if layout.microbatches else ""
    return f"{count}{batch} / ({micro}·{data}) micro-batches"


def _rollouts_text(args: argparse.Namespace, layout: Layout) -> str:
    counted = DENOMINATORS[args.pg_denominator][0]
    if layout.batch is None:
        return f"rollouts of the step{counted}, counted at its start; their number is not fixed"
    those = f"{' of the objective' if _has_other_samples(args) else ''}{counted}"
    rollouts = f"the rollouts{those} among {layout.batch}" if those else f"{layout.batch} rollouts"
    return f"{rollouts}, one sample each; counted again in every step"


def _denominator_rows(args: argparse.Namespace, layout: Layout) -> Rows:
    if args.custom_pg_loss_reducer_function_path is not None or layout.batch is None:
        return []
    counted, tokens, _ = DENOMINATORS[args.pg_denominator]
    declared, divisor = AGGREGATIONS[args.loss_aggregation], args.loss_aggregation_divisor
    is_fixed = _fixed_rollouts(args, layout) is not None
    text = (declared.known_numbers if is_fixed else None) or declared.numbers
    numbers = {"divisor": divisor, "rollouts": layout.batch, "product": layout.batch * (divisor or 1)}
    return [("denominator", text.format(counted=counted, tokens=tokens, **numbers))]


def _say_weights(args: argparse.Namespace, layout: Layout, weights: list[dict[str, float]]) -> None:
    kind = "turn" if is_by_turn(args.loss_aggregation) else "answer"
    unit = "" if _fixed_rollouts(args, layout) else f", in units of {_unit(args)}"
    say(f"── what {'a turn' if kind == 'turn' else 'an answer'} weighs{unit} ──")
    if not Facts(args).has_objective:
        say("  the objective is dropped and gives no weight; the denominators of each loss term are above")
        return
    if not weights:
        say("  the derivative of the custom reducer, divided by N_r (by T with --calculate-per-token-loss)")
        return
    cells = [
        (f"{row['length']} tokens", f"{row['token']:.4g}", f"{row['answer']:.4g}", f"{row['share']:.1%}")
        for row in weights
    ]
    say(table((f"{kind} of", "one token", f"whole {kind}", "share of the step"), cells))
    say(f"  {_assumption(args)}")


def _assumption(args: argparse.Namespace) -> str:
    kind = "turns" if is_by_turn(args.loss_aggregation) else "answers"
    text = f"in a step with equally many {kind} of these lengths"
    if args.pg_weight_denominator == "weights":
        text += ", counted by their tokens' weights"
    if args.pg_denominator == "kept":
        text += ", without rejected tokens"
    if args.loss_aggregation == "prompt_mean":
        text += ", each prompt group of one length; in a group of several lengths, answers weigh as under token_mean"
    return text


def _origin(launch: Launch, remarks: tuple[str, ...]) -> Rows:
    ours = [name for name, default in default_arguments().items() if vars(launch.args)[name] != default]
    canonical = shlex.join(word for flag in _flags(launch.args, ours) for word in flag)
    return [
        ("arguments", launch.source),
        ("flags", canonical or "none; every flag has its default"),
        ("elsewhere", _elsewhere(launch.args)),
        *(("note", text) for text in remarks),
        ("given", _as_flags(launch.args, launch.given) or "nothing that is read here"),
        ("default", _as_flags(launch.args, [name for name in own_arguments() if name not in launch.given])),
        *([("not read", launch.unread)] if launch.unread else []),
    ]


def _elsewhere(args: argparse.Namespace) -> str:
    if args.custom_pg_loss_reducer_function_path is not None:
        return "slime, miles: the same flag and the same function; verl, TRL, NeMo-RL: no such flag"
    return AGGREGATIONS[args.loss_aggregation].elsewhere


def _as_flags(args: argparse.Namespace, names: Sequence[str]) -> str:
    return ", ".join(" ".join(flag) for flag in _flags(args, names))


def _flags(args: argparse.Namespace, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The arguments as the words of their flags, without those that are off or not set."""
    for name in names:
        value, flag = vars(args)[name], f"--{name.replace('_', '-')}"
        if name == "pg_term":
            yield from ((flag, text) for text in value or ())
        elif value is not None and value is not False:
            words = value if isinstance(value, list) else [] if value is True else [value]
            yield flag, *(str(word).removesuffix(".0") for word in words)


def _document(
    launch: Launch, layout: Layout, remarks: tuple[str, ...], factors: Rows, weights: list[dict[str, float]]
) -> dict[str, object]:
    ours, rollouts = {name: vars(launch.args)[name] for name in own_arguments()}, _fixed_rollouts(launch.args, layout)
    sizes = {"world": layout.world, "D": layout.data, "C": layout.context, "K": layout.microbatches, "N_r": rollouts}
    return {
        "source": launch.source,
        "arguments": ours,
        "given": list(launch.given),
        "megatron_arguments": {name: value for name, value in read_arguments(launch).items() if name not in ours},
        "objective": dict(describe(launch.args)),
        "sizes": sizes,
        "factors": dict(factors),
        "weights_unit": "1" if rollouts else _unit(launch.args),
        "weights": weights,
        "elsewhere": _elsewhere(launch.args),
        "remarks": list(remarks),
        "other_arguments": list(launch.others),
    }


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = (0,)
    if not all(0 < length < 2**31 for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive lengths such as 10,1000")
    return lengths
