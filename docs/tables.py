"""The tables and counts on the pages that come from the code or from docs/*.json: `python docs/tables.py`, which `make
docs` runs.

A count in prose stands between markers, `<!-- count: objectives -->17<!-- -->`; its name is a key of `counts()`.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from megatron_pg.args import add_arguments, own_arguments
from megatron_pg.cli import SUBCOMMANDS
from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.corrections import CORRECTIONS, KL_ESTIMATORS
from megatron_pg.declarations.declaration import Reads
from megatron_pg.declarations.loss_terms import KINDS
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.metrics.limits import SIGNS
from megatron_pg.metrics.table import METRICS, Metric
from megatron_pg.mismatch.causes import CAUSES

DOCS = Path(__file__).parent
WITH_COUNTS = [DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FRAMEWORKS = ("slime, miles", "verl", "TRL", "NeMo-RL", "PipelineRL")
ELSEWHERE = {  # what a metric is called there
    "pg_loss": {"slime, miles": "pg_loss", "verl": "actor/pg_loss"},
    "loss": {"slime, miles": "loss", "TRL": "loss", "NeMo-RL": "loss", "PipelineRL": "rl/loss"},
    "kl_loss": {"slime, miles": "kl_loss", "verl": "actor/kl_loss"},
    "entropy_loss": {"slime, miles": "entropy_loss", "verl": "actor/entropy_loss"},
    "reward": {"slime, miles": "rollout/raw_reward", "verl": "critic/rewards/mean", "TRL": "reward"},
    "reward_std": {"TRL": "reward_std (of groups)"},
    "max_reward": {"verl": "critic/rewards/max"},
    "min_reward": {"verl": "critic/rewards/min"},
    "zero_variance_fraction": {"TRL": "frac_reward_zero_std"},
    "response_length": {
        "slime, miles": "rollout/response_len/mean",
        "verl": "response_length/mean",
        "TRL": "completions/mean_length",
    },
    "max_response_length": {
        "slime, miles": "rollout/response_len/max",
        "verl": "response_length/max",
        "TRL": "completions/max_length",
    },
    "truncated_fraction": {
        "slime, miles": "rollout/truncated_ratio",
        "verl": "response_length/clip_ratio (at the limit)",
        "TRL": "completions/clipped_ratio",
    },
    "num_tokens": {"PipelineRL": "rl/num_output_tokens_sum"},
    "num_samples": {"NeMo-RL": "num_valid_samples"},
    "new_logprobs": {"PipelineRL": "rl/new_logprobs"},
    "old_logprobs": {"PipelineRL": "rl/old_logprobs"},
    "ratio_new_old": {"NeMo-RL": "probs_ratio", "PipelineRL": "rl/ratio_new_old"},
    "ratio_new_old_sum": {"PipelineRL": "rl/ratio_new_old_sum"},
    "ratio_new_old_squared_sum": {"PipelineRL": "rl/ratio_new_old_squared_sum"},
    "ess": {"slime, miles": "ess_ratio (miles: a mean over samples)", "PipelineRL": "rl/ess"},
    "mean_abs_log_ratio": {"PipelineRL": "rl/mean_abs_log_ratio_new_old"},
    "kl_new_old": {"slime, miles": "ppo_kl (k1)", "verl": "actor/ppo_kl (k1)", "PipelineRL": "rl/kl_new_old"},
    "clipped_ratio_fraction": {
        "slime, miles": "pg_clipfrac (sign-aware)",
        "verl": "actor/pg_clipfrac (sign-aware)",
        "TRL": "clip_ratio/region_mean (sign-aware)",
        "PipelineRL": "rl/clamp_log_ratio_new_old_indicator",
    },
    "clipped_high_fraction": {"TRL": "clip_ratio/high_mean"},
    "clipped_low_fraction": {"TRL": "clip_ratio/low_mean"},
    "segment_ratio_sum": {"PipelineRL": "rl/ratio_new_old_sum (gspo)"},
    "segment_ratio_squared_sum": {"PipelineRL": "rl/ratio_new_old_squared_sum (gspo)"},
    "correction_factor": {
        "slime, miles": "tis (not truncated)",
        "verl": "rollout_corr/rollout_is_mean",
        "TRL": "sampling/importance_sampling_ratio/mean",
        "NeMo-RL": "sampling_importance_ratio",
    },
    "rejected_fraction": {
        "slime, miles": "tis_clipfrac (icepop)",
        "verl": "rollout_corr/rollout_rs_masked_fraction",
        "NeMo-RL": "is_oob_ratio (icepop)",
    },
    "advantage": {"verl": "critic/advantages/mean", "PipelineRL": "rl/advantage"},
    "max_advantage": {"verl": "critic/advantages/max", "PipelineRL": "rl/max_advantage"},
    "min_advantage": {"verl": "critic/advantages/min", "PipelineRL": "rl/min_advantage"},
    "kl_new_ref": {
        "slime, miles": "kl_loss",
        "verl": "actor/kl_loss",
        "TRL": "kl",
        "NeMo-RL": "kl_penalty",
        "PipelineRL": "rl/kl",
    },
    "ratio_new_ref": {"PipelineRL": "rl/ratio_ref_new (inverse)"},
    "mismatch_kl": {
        "slime, miles": "train_rollout_kl (miles); train_rollout_logprob_abs_diff (mean gap)",
        "verl": "rollout_corr/k3_kl; rollout_corr/kl (k1)",
        "TRL": "sampling/sampling_logp_difference/mean (mean gap)",
        "NeMo-RL": "gen_kl_error",
    },
    "mismatch_max": {"verl": "training/rollout_probs_diff_max (probabilities)"},
    "entropy": {
        "slime, miles": "entropy_loss",
        "verl": "actor/entropy",
        "TRL": "entropy",
        "NeMo-RL": "approx_entropy (sampled)",
        "PipelineRL": "rl/entropy",
    },
}
ONLY_WITH = {
    "further": "with a KL or entropy term, `--pg-term` or `--mtp-num-layers` only",
    "kl": "with a KL term only",
    "entropy": "with an entropy term only",
    "adaptive_entropy": "with `--pg-entropy-target` only",
    "mtp": "with `--mtp-num-layers` only",
    "sequence": "with a sequence-level objective only (gspo, gspo_token, topr, vespo, gmpo, custom)",
    "correction": "with a correction only, except token selections",
    "selection": "with a token selection only (m2po, clip_cov, kl_cov, top_entropy)",
    "kl_cov": "with `--pg-correction kl_cov` only",
    "clip": "not with objectives that have no bounds",
    "sampling_mask_missing": "with `--pg-sampling-mask-missing mask` only",
}
DIVIDED_BY = {
    "mean": "over samples",
    "sum": "none",
    "all": "none",
    "total": "none",
    "max": "none (maximum)",
    "min": "none (minimum)",
    "step": "none (of the plan)",
    "rollout": "over rollouts",
    "ratio": "formed from reduced sums",
    "rank": "formed from each rank's sums",
}
# The formulas of the declarations in LaTeX. An entry that is missing here is shown as it is declared.
LOSSES_OF_AGGREGATIONS = {
    "sample_mean": (
        r"\frac{1}{N_r}\sum_{\mathrm{rollouts}}\frac{\sum_t m_t\,\ell_t}{M_{\mathrm{rollout}}}",
        r"N_r\,M_{\mathrm{rollout}}",
    ),
    "prompt_mean": (
        r"\frac{1}{P}\sum_{\mathrm{prompts}}\frac{\sum_t m_t\,\ell_t}{M_{\mathrm{group}}}",
        r"P\,M_{\mathrm{group}}",
    ),
    "token_mean": (r"\frac{1}{T}\sum_t m_t\,\ell_t", "T"),
    "constant": (r"\frac{1}{N_r\,L}\sum_t m_t\,\ell_t", r"N_r\,L"),
    "turn_mean": (
        r"\frac{1}{N_{\mathrm{turn}}}\sum_{\mathrm{turns}}\frac{\sum_t m_t\,\ell_t}{M_{\mathrm{turn}}}",
        r"N_{\mathrm{turn}}\,M_{\mathrm{turn}}",
    ),
}
_PI_OLD = r"\pi_{\mathrm{old}}"
LOSSES = {
    "grpo": r"$-\min(rA,\ \mathrm{clip}(r)\,A)$",
    "dual_clip": r"$\ell_{\mathrm{grpo}}$; if $A<0$: $\min(\ell_{\mathrm{grpo}},\ -cA)$, c = `cap`",
    "gspo": r"$-\min(R\bar A,\ \mathrm{clip}(R)\,\bar A)$",
    "gspo_token": r"$-\min(sA,\ \mathrm{clip}(s)\,A)$, $s=\mathrm{sg}[R]\,\pi/\mathrm{sg}[\pi]$",
    "cispo": r"$-\mathrm{sg}[\min(\max(r,\,1-\varepsilon_{\mathrm{low}}),\,c)]\,A\log\pi$, c = `cap`",
    "sapo": r"$-\frac{4}{\tau}\,\sigma(\tau(r-1))\,A$, τ by the sign of A",
    "dppo_tv": r"$-\mathrm{sg}[\min(r,c)]\,A\log\pi$, or 0 if A pushes π further out of "
    rf"$\lvert\pi-{_PI_OLD}\rvert\le\delta$; c = `cap`",
    "dppo_kl": r"as `dppo_tv`, with $D\le\delta$, D the KL divergence of the token against all others",
    "reinforce": r"$-A\log\pi$",
    "reinforce_is": "$-rA$",
    "dro": r"$-A\log\pi+\frac{\beta}{2}(\log r)^2$, β = `beta`",
    "topr": r"$-\mathrm{sg}[c]\,A\log\pi$, $c=1$ if $A\ge 0$, else $\min(W,1)$",
    "topr_token": r"$-\mathrm{sg}[c]\,A\log\pi$, $c=1$ if $A\ge 0$, else $\min(r,1)$",
    "ipo": rf"$-rA\,[-\delta_{{\mathrm{{low}}}}\le\pi-{_PI_OLD}\le\delta_{{\mathrm{{high}}}}]+\tau(\log r)^2$",
    "vespo": r"$-\mathrm{sg}[W^{k}e^{\lambda(1-W)}]\,A\log\pi$, k and λ by the sign of A",
    "gmpo": r"$-GA$, G = geometric mean of the clipped r over the sequence",
}
FACTORS = {
    "tis": r"times $\min(\max(\rho,\mathrm{low}),\mathrm{high})$",
    "seq_tis": r"times $\min(\max(P,\mathrm{low}),\mathrm{high})$",
    "icepop": r"times ρ if $\mathrm{low}\le\rho\le\mathrm{high}$, else 0",
    "kpop": r"times ρ if the KL of $\pi_{\mathrm{old}}$, $\pi_{\mathrm{rollout}}$ over (token, all others) is at most "
    "high both ways",
    "mis": r"times P if $\mathrm{low}\le P\le\mathrm{high}$, else 0",
    "seq_mask_tis": r"times ρ if the sequence's geometric mean of ρ is in $[\mathrm{low},\mathrm{high}]$, else 0",
    "opsm": r"0 if $A<0$ and the sequence's mean of $\log\pi_{\mathrm{rollout}}-\log\pi$ exceeds high",
    "opsm_old": r"0 if $A<0$ and the sequence's mean of $\log\pi_{\mathrm{old}}-\log\pi$ exceeds high",
    "rejection": r"0 unless `estimator` of log ρ at `level` is in $[\mathrm{low},\mathrm{high}]$",
    "m2po": r"0 for the tokens with the largest $(\log\rho)^2$, as few as bring its mean to at most high",
    "clip_cov": r"0 for $\lfloor fT\rfloor$ tokens, drawn from those with $\mathrm{low}<\mathrm{cov}<\mathrm{high}$",
    "kl_cov": r"plus $\beta\lvert\log r\rvert$ for the $\lfloor fT\rfloor$ tokens with the largest cov, β = `coef`",
    "top_entropy": r"0 for the tokens whose $H_{\mathrm{old}}$ is below the $1-f$ quantile of the step",
}
Rows = list[tuple[str, ...]]


def table(head: tuple[str, ...], rows: Rows) -> str:
    """Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


def flags() -> str:
    """Every flag with its default and its help text, by group."""
    parts = []
    for group in add_arguments(argparse.ArgumentParser(add_help=False))._action_groups:
        rows = [_flag_row(action) for action in group._group_actions if action.help != argparse.SUPPRESS]
        if rows:
            title = f"{group.title}".removeprefix("megatron_pg: ")
            parts.append(f"### {title[:1].upper()}{title[1:]}\n\n{table(('flag', 'default', 'meaning'), rows)}")
    return "\n".join(parts)


def _flag_row(action: argparse.Action) -> tuple[str, str, str]:
    choices = f" ({', '.join(f'`{choice}`' for choice in action.choices)})" if action.choices else ""
    default = "–" if action.default is None else "off" if action.default is False else f"`{action.default}`"
    return f"`{action.option_strings[0]}`{choices}", default, f"{action.help}"


def metrics() -> str:
    """What every metric is; metrics with the same text, one for each age, share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in (_metric_row(m) for m in METRICS if m.is_reported):
        rows.setdefault(tuple(rest), []).append(name)
    found = [(", ".join(names), *rest) for rest, names in rows.items()]
    return table(("metric", "meaning", "formula", "divided by"), found)


def _metric_row(m: Metric) -> tuple[str, ...]:
    needs = f"; needs `{m.needs}`" if m.needs else f"; {ONLY_WITH[m.only_with]}" if m.only_with else ""
    needs += "; with `--pg-role critic` only" if m.role == "critic" else ""
    level = "" if m.level == "basic" else f"; from level `{m.level}`"
    return f"`{m.name}`", f"{m.meaning} [{m.unit}]{needs}{level}", m.equation, DIVIDED_BY[m.kind]


def signs() -> str:
    """How a metric looks in a healthy run, and in one that is not."""
    return table(("metric", "healthy", "red flag"), [(f"`{name}`", *map(str, pair)) for name, pair in SIGNS.items()])


def metric_names() -> str:
    """What it is called elsewhere, where two frameworks or more have it."""
    shown = [m.name for m in METRICS if m.is_reported]
    if unknown := ELSEWHERE.keys() - shown:
        raise ValueError(f"{', '.join(sorted(unknown))}: no metric has this name")
    rows = [
        (f"`{name}`", *(ELSEWHERE[name].get(each, "–") for each in FRAMEWORKS))
        for name in shown
        if len(ELSEWHERE.get(name, ())) > 1
    ]
    return table(("metric", *FRAMEWORKS), rows)


def aggregations() -> str:
    """Loss and denominator of every aggregation."""
    rows = [
        (f"`{name}`", *_math(LOSSES_OF_AGGREGATIONS.get(name, (each.formula, each.denominator))), each.elsewhere)
        for name, each in AGGREGATIONS.items()
    ]
    return table(("`--loss-aggregation`", "policy loss", "δ of a sample", "elsewhere"), rows)


def _math(formulas: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"${formula}$" for formula in formulas)


def _numbers(reads: Reads) -> str:
    """Flags and options that set the numbers, each with its default."""
    default = lambda value: "…" if value is None else f"{value:g}".replace("inf", "∞")  # noqa: E731
    shown = (f"`{number.flag or number.name}{' ' if number.flag else '='}{default(v)}`" for number, v in reads.items())
    return ", ".join(shown) or "–"


def objectives() -> str:
    """Formula and numbers of every objective."""
    rows = [(f"`{name}`", LOSSES.get(name, each.formula), _numbers(each.numbers)) for name, each in OBJECTIVES.items()]
    return table(("objective", "loss ℓ of a token", "numbers and defaults (…: required)"), rows)


def corrections() -> str:
    """Effect and options of every correction."""
    rejects = {None: "no", "data": "yes", "model": "yes, known after the forward"}
    rows = []
    for name, each in CORRECTIONS.items():
        if name != "none":
            words = "".join(f"`{word}=…`, " for word in each.words)
            effect = FACTORS.get(name, each.formula)
            rows.append((f"`{name}`", effect, words + _numbers(each.numbers), rejects[each.rejects]))
    return table(("correction", "what it does to ℓ", "options and defaults (…: required)", "rejects tokens"), rows)


def causes() -> str:
    """The causes of a mismatch and what to do."""
    return table(
        ("cause", "is", "what to do"), [(f"`{name}`", each.title, each.advice) for name, each in CAUSES.items()]
    )


def commands() -> str:
    """The subcommands of megatron-pg."""
    return table(("command", "what it does"), [(f"`{name}`", summary) for name, summary in SUBCOMMANDS.items()])


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "flags.md": {"flags": flags},
    "cli.md": {"commands": commands},
    "metrics.md": {"metrics": metrics, "signs": signs, "metric names": metric_names},
    "mismatch.md": {"causes": causes},
    "aggregation.md": {"aggregations": aggregations},
    "objectives.md": {"objectives": objectives},
    "corrections.md": {"corrections": corrections},
}


def written(page: str, makers: dict[str, Callable[[], str]]) -> str:
    """The page with today's tables between their markers."""
    for name, make in makers.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, rest = page.split(begin)
        page = before + begin + make() + end + rest.split(end)[1]
    return page


# --- counts in prose ---

COUNT = re.compile(r"<!-- count: ([^>]+) -->([^<]*)<!-- -->")


def counts() -> dict[str, int]:
    """What the pages count, by the name that a marker gives."""
    mutants = (DOCS.parent / "tests/mutants/source_mutants.txt").read_text(encoding="utf-8")
    rows = json.loads((DOCS / "proof.json").read_text(encoding="utf-8"))["rows"]
    cases = {name: rows[row]["cases"] for name, row in PROVED.items()}
    return {
        "objectives": len(OBJECTIVES),
        "aggregations": len(AGGREGATIONS),
        "corrections": len(CORRECTIONS) - 1,  # without `none`
        "KL estimators": len(KL_ESTIMATORS),
        "loss term kinds": len(KINDS),
        "causes": len(CAUSES),
        "metrics": sum(metric.is_reported for metric in METRICS),
        "flags": len(own_arguments()),
        "source mutants": len(re.findall(r"^[^-+=\n].* \| .*$", mutants, re.MULTILINE)),
        "proof rows": len(rows),
        **cases,
        "proved steps of an objective": cases["proved objective steps"] // len(OBJECTIVES),
    }


PROVED = {  # rows of docs/proof.md, of which pages quote the number of cases
    "proved partitions": "partitions, float64: gradients within 1e-12",
    "proved objective steps": "objectives × aggregation × correction × KL × entropy over layouts, float64: within "
    "1e-12 of the oracle",
    "killed source mutants": "Mutants of the source killed by the default tier",
}


def counted(page: str, found: dict[str, int]) -> str:
    """The page with today's counts between their markers."""
    return COUNT.sub(lambda match: f"<!-- count: {match[1]} -->{found[match[1]]:,}<!-- -->", page)


if __name__ == "__main__":
    for file, makers in PAGES.items():
        path = DOCS / file
        path.write_text(written(path.read_text(encoding="utf-8"), makers), encoding="utf-8")
    known = counts()
    for path in WITH_COUNTS:
        path.write_text(counted(path.read_text(encoding="utf-8"), known), encoding="utf-8")
