"""`--pg-stream`: what it is read as, and each rule broken alone, and its near misses. `-k E71` finds one rule."""

import pytest
from namespaces import REDUCER, accepts, arguments, breaks, constant, row

from megatron_pg.args import validate_args
from megatron_pg.declarations.streams import Stream
from megatron_pg.flags import stream_text
from megatron_pg.flags.banner import banner
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.stream_text import parse
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.fields import is_stream


def streams(*texts: str, **rest: object) -> dict[str, object]:
    return {"pg_stream": list(texts), **rest}


TAUGHT = {"pg_teacher_head": "teacher.safetensors", "pg_fused_head": "recompute"}

# Each breaks exactly one rule.
BROKEN = [
    row("E71", "a word", {"pg_stream": "sft:ce"}, "--pg-stream must be a list of texts"),
    row("E71", "nothing", {"pg_stream": []}, "--pg-stream must be a list of texts"),
    row("E71", "number", {"pg_stream": [1]}, "--pg-stream 1 does not begin with NAME:kind"),
    row("E71", "no kind", streams("sft"), "does not begin with NAME:kind"),
    row("E71", "capital", streams("Sft:ce"), "does not begin with NAME:kind"),
    row("E71", "slash", streams("a/b:ce"), "does not begin with NAME:kind"),
    row("E71", "kind", streams("sft:cross_entropy"), "has the kind 'cross_entropy', and sft can be ce"),
    row("E71", "close kind", streams("sft:entrop"), "did you mean entropy?"),
    row("E71", "objective elsewhere", streams("sft:rl"), "has the kind 'rl', and sft can be ce"),
    row("E71", "kind of the objective", streams("rl:ce"), "has the kind 'ce', and rl can be rl"),
    row(
        "E71", "option", streams("sft:ce,wieght=1"), "has 'wieght=1', which is none of weight=…", "did you mean weight?"
    ),
    row("E71", "no value", streams("sft:ce,weight"), "has 'weight', which is none of"),
    row("E71", "twice", streams("sft:ce,weight=1,weight=2"), "has weight twice"),
    row("E71", "text", streams("sft:ce,weight=big"), "has weight=big, which is no number"),
    row("E71", "underscore", streams("sft:ce,weight=1_0"), "has weight=1_0, which is no number"),
    row("E71", "another script", streams("sft:ce,weight=\u0663"), "has weight=\u0663, which is no number"),
    row("E71", "space", streams("sft:ce,weight= 1"), "has weight= 1, which is no number"),
    row("E71", "underflow", streams("sft:ce,weight=1e-400"), "has weight=1e-400, which is 0 in float64"),
    row("E71", "negative", streams("sft:ce,weight=-0.1"), "has weight=-0.1, which is not finite and >= 0"),
    row("E71", "nan", streams("sft:ce,weight=nan"), "has weight=nan, which is not finite and >= 0"),
    row("E71", "name of a flag", streams("kl:ce"), "has a name that belongs to --pg-kl-coef"),
    row("E71", "aggregation", streams("sft:ce,aggregation=mean"), "has aggregation=mean, which is none of sample_mean"),
    row("E71", "policy's weights", streams("sft:ce,aggregation=policy"), "has aggregation=policy", "add on=rl"),
    row("E71", "divisor alone", streams("sft:ce,divisor=4"), "has divisor=4, which has no effect without"),
    row("E71", "no divisor", streams("sft:ce,aggregation=constant"), "needs divisor=L in tokens"),
    row("E71", "divisor 0", streams("sft:ce,aggregation=constant,divisor=0"), "needs divisor=L in tokens"),
    row("E71", "no estimator", streams("ref:kl,on=rl"), "needs estimator=…; there is no default"),
    row("E71", "estimator of none", streams("sft:ce,estimator=k3"), "has estimator=k3, and ce is no KL divergence"),
    row(
        "E71",
        "estimator of an exact one",
        streams("t:topk_jsd,estimator=k3"),
        "needs none: it is exact over its categories",
    ),
    row(
        "E71",
        "beta of none",
        streams("t:topk_reverse_kl,beta=0.5"),
        "has beta=0.5, which topk_reverse_kl does not read",
    ),
    row(
        "E71",
        "beta of alpha",
        streams("t:topk_skew_forward,beta=0.5"),
        "which topk_skew_forward does not read; it has alpha",
    ),
    row(
        "E71", "alpha and beta", streams("t:topk_jsd,beta=0.5,alpha=0.5"), "has alpha=0.5, which topk_jsd does not read"
    ),
    row("E71", "beta of ce", streams("sft:ce,beta=0.5"), "has beta=0.5, which ce does not read"),
    row("E71", "beta 0", streams("t:topk_jsd,beta=0"), "has beta=0, which is not between 0 and 1"),
    row("E71", "alpha 1", streams("t:topk_skew_reverse,alpha=1"), "has alpha=1, which is not between 0 and 1"),
    row("E71", "alpha nan", streams("t:topk_skew_reverse,alpha=nan"), "has alpha=nan, which is not between 0 and 1"),
    row("E71", "alpha text", streams("t:topk_skew_reverse,alpha=a"), "has alpha=a, which is no number"),
    row(
        "E71",
        "temperature of opd",
        streams("t:opd,on=rl,temperature=1"),
        "has temperature=1, and opd has no teacher of whose",
    ),
    row(
        "E71",
        "objective's temperature",
        streams("rl:rl,weight=0,temperature=1", "a:ce"),
        "takes weight=0, no objective",
    ),
    row("E71", "objective's beta", streams("rl:rl,weight=0,beta=0.5", "a:ce"), "takes weight=0, no objective"),
    row("E71", "unknown estimator", streams("t:opd,estimator=k4"), "has estimator=k4, which is none of k1"),
    row(
        "E71",
        "objective's aggregation",
        streams("rl:rl,aggregation=constant,divisor=3"),
        "takes weight=0, no objective",
    ),
    row("E71", "objective's weight", streams("rl:rl,weight=2"), "takes weight=0, no objective"),
    row("E72", "twice", streams("sft:ce", "sft:opd"), "--pg-stream sft is given 2 times"),
    row(
        "E72",
        "on nothing",
        streams("t:opd,on=sft"),
        "--pg-stream t:opd,on=sft: there is no such stream; choose one of rl",
    ),
    row("E72", "on a borrower", streams("t:opd,on=rl", "h:entropy,on=t"), "on=t: t has no tokens of its own"),
    row("E71", "a correction's kind", streams("x:kl_cov,on=rl"), "has the kind 'kl_cov', and x can be ce, opd, kl"),
    row("E71", "a correction's name", streams("kl_cov:ce"), "has a name that belongs to --pg-correction kl_cov"),
    row(
        "E73",
        "a choice of nothing",
        streams("rl:rl,weight=0", "sft:ce", pg_correction="top_entropy"),
        "--pg-correction top_entropy has no effect without the objective, which",
    ),
    row(
        "E73",
        "a correction of nothing",
        streams("rl:rl,weight=0", "ref:kl,on=rl,estimator=k3", pg_correction="tis"),
        "--pg-correction tis has no effect without the objective, which --pg-stream rl:rl,weight=0 drops; remove one of the two",
    ),
    row(
        "E73",
        "a count of nothing",
        streams("rl:rl,weight=0", "ref:kl,on=rl,estimator=k3", pg_denominator="live"),
        "--pg-denominator live has no effect without the objective, which --pg-stream rl:rl,weight=0 drops; remove one of the two",
    ),
    row("E72", "on itself", streams("t:opd,on=t"), "on=t: t has no tokens of its own"),
    row(
        "E73",
        "temperature",
        streams("t:topk_jsd,on=rl", pg_temperature=0.7),
        "has a teacher at temperature 1, and --pg-temperature is 0.7",
    ),
    row(
        "E73",
        "its temperature",
        streams("t:topk_jsd,temperature=0.7"),
        "has a teacher at temperature 0.7, and --pg-temperature is 1",
    ),
    row(
        "E73",
        "floor of nothing",
        {"pg_teacher_tail_floor": 0.1},
        "--pg-teacher-tail-floor 0.1 has no effect without a --pg-stream",
    ),
    row(
        "E73",
        "floor of others",
        streams("t:opd,on=rl", pg_teacher_tail_floor=0.1),
        "has no effect without a --pg-stream",
    ),
    row(
        "E73",
        "floor without a tail",
        streams("t:topk_generalised_reverse", pg_teacher_tail_floor=0.1),
        "that has a tail",
    ),
    row(
        "E24",
        "floor 0",
        streams("t:topk_jsd", pg_teacher_tail_floor=0.0),
        "--pg-teacher-tail-floor must be between 0 and 1",
    ),
    row(
        "E24",
        "floor 1",
        streams("t:topk_jsd", pg_teacher_tail_floor=1),
        "--pg-teacher-tail-floor must be between 0 and 1",
    ),
    row(
        "E24",
        "floor text",
        streams("t:topk_jsd", pg_teacher_tail_floor="a"),
        "--pg-teacher-tail-floor must be a number",
    ),
    row("E73", "nothing left", streams("rl:rl,weight=0"), "--pg-stream rl:rl,weight=0 leaves no loss"),
    row("E73", "all dropped", streams("rl:rl,weight=0", "sft:ce,weight=0"), "leaves no loss"),
    row(
        "E73",
        "terms of the objective",
        streams("rl:rl,weight=0", "sft:ce", pg_entropy_coef=0.1),
        "--pg-kl-coef and --pg-entropy-coef are terms of the objective",
    ),
    row(
        "E73",
        "weights of the objective",
        streams("rl:rl,weight=0", "h:entropy,on=rl,aggregation=policy"),
        "--pg-stream h:entropy,aggregation=policy takes the objective's weights",
    ),
    row(
        "E71",
        "estimator of a whole one",
        streams("t:full_jsd,estimator=k3", **TAUGHT),
        "needs none: it is exact over the vocabulary",
    ),
    row("E71", "beta of a whole KL", streams("t:full_forward_kl,beta=0.5"), "full_forward_kl does not read"),
    row("E71", "alpha of a whole one", streams("t:full_jsd,alpha=0.5"), "full_jsd does not read; it has beta"),
    row("E71", "its temperature", streams("t:full_jsd,temperature=0.7"), "has no teacher of whose likeliest tokens"),
    row(
        "E73",
        "no teacher's head",
        streams("t:full_jsd", pg_fused_head="forward"),
        "--pg-stream t:full_jsd is over the whole vocabulary of a teacher",
        "add --pg-teacher-head PATH",
    ),
    row("E73", "head for nothing", {"pg_teacher_head": "h"}, "--pg-teacher-head h has no effect without a --pg-stream"),
    row("E73", "head for another", streams("t:topk_jsd", pg_teacher_head="h"), "--pg-teacher-head h has no effect"),
    row(
        "E73",
        "no head",
        streams("t:full_jsd", **TAUGHT | {"pg_teacher_head": ":"}),
        "--pg-teacher-head must be PATH or PATH:NAME",
    ),
    row("E73", "number for a head", {"pg_teacher_head": 3}, "--pg-teacher-head must be PATH or PATH:NAME, got 3"),
    row(
        "E73", "stored logits", streams("t:full_jsd", pg_teacher_head="h"), "add --pg-fused-head forward, or recompute"
    ),
    row(
        "E73",
        "two divergences",
        streams("a:full_jsd,beta=0.3", "b:full_jsd,on=rl", **TAUGHT),
        "--pg-stream b:full_jsd and --pg-stream a:full_jsd are two divergences",
    ),
    row(
        "E73",
        "two of one teacher",
        streams("a:full_jsd", "b:topk_jsd,on=rl", **TAUGHT),
        "--pg-stream a:full_jsd has the whole vocabulary of the teacher and --pg-stream b:topk_jsd its likeliest tokens",
    ),
]

# Each differs from a broken one by what makes it right.
NEAR_MISSES = [
    row("E71", "kinds", streams("sft:ce", "t:opd,on=rl", "ref:kl,estimator=k2,on=sft", "h:entropy,on=rl")),
    row("E71", "weight 0", streams("sft:ce,weight=0")),
    row("E71", "aggregations", streams("a:ce,aggregation=token_mean", "b:ce,aggregation=prompt_mean", "c:ce")),
    row("E71", "constant", streams("sft:ce,aggregation=constant,divisor=4096,weight=0.5")),
    row("E71", "policy's weights", streams("h:entropy,on=rl,aggregation=policy")),
    row("E72", "on a stream", streams("sft:ce", "h:entropy,on=sft")),
    row("E72", "on one of weight 0", streams("sft:ce,weight=0", "h:entropy,on=sft")),
    row(
        "E71", "mixtures", streams("a:topk_jsd,beta=0.1", "b:topk_skew_forward,alpha=0.9", "c:topk_skew_reverse,on=rl")
    ),
    row("E73", "temperature", streams("t:topk_jsd,temperature=0.7", pg_temperature=0.7)),
    row("E73", "floor", streams("t:topk_forward_kl,weight=0", pg_teacher_tail_floor=0.25)),
    row("E73", "whole vocabulary", streams("t:full_reverse_kl,on=rl", **TAUGHT)),
    row("E73", "twice the same", streams("a:full_jsd", "b:full_jsd,on=rl,weight=0.5", "c:topk_jsd,weight=0", **TAUGHT)),
    row("E73", "a weight of 0 needs none", streams("a:full_jsd,weight=0", "b:topk_jsd")),
    row("E73", "a sweep to 0", streams("a:full_jsd,weight=0", pg_teacher_head="h")),
    row("E73", "another loss", streams("rl:rl,weight=0", "t:opd,on=rl")),
    row("E73", "terms of the objective", streams("sft:ce", pg_entropy_coef=0.1)),
]


pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


@pytest.mark.parametrize(("overrides", "rule", "fragments"), BROKEN)
def test_a_broken_rule_is_named_alone_and_changes_nothing(overrides, rule, fragments):
    breaks(arguments(**overrides), rule, *fragments)


@pytest.mark.parametrize(("overrides", "rule", "fragments"), NEAR_MISSES)
def test_a_near_miss_passes(overrides, rule, fragments):
    accepts(arguments(**overrides))


def test_a_text_is_a_stream():
    assert parse("sft:ce") == Stream(name="sft", kind="ce")
    text = "teacher:opd,weight=0.5,aggregation=constant,divisor=4096,on=rl,estimator=k2"
    found = Stream(
        name="teacher", kind="opd", weight=0.5, aggregation="constant", divisor=4096.0, on="rl", estimator="k2"
    )
    assert parse(text) == found


def test_what_is_not_said_is_the_objectives():
    args = validate_args(arguments(**constant(7.0), **streams("sft:ce", "t:opd,on=rl,aggregation=token_mean")))
    sft, teacher = Facts(args).streams
    assert (sft.aggregation, sft.divisor, sft.tokens) == ("constant", 7.0, "sft")
    assert (teacher.aggregation, teacher.divisor, teacher.tokens) == ("token_mean", None, "rl")
    assert teacher.estimator == "k3_weighted"
    assert teacher.reads == ("teacher_logprobs", "old_logprobs")


def test_a_top_k_divergence_has_its_mixture_and_the_floor_of_its_tail():
    texts = ("a:topk_jsd,beta=0.1", "b:topk_skew_reverse,on=rl", "c:topk_generalised_reverse", "d:ce")
    found = Facts(validate_args(arguments(**streams(*texts, pg_teacher_tail_floor=1e-3)))).streams
    assert [(each.mixture, each.tail_floor) for each in found] == [(0.1, 1e-3), (0.1, 1e-3), (None, None), (None, None)]
    assert [each.reads for each in found] == [*[("teacher_topk",)] * 3, ()]
    (whole,) = Facts(validate_args(arguments(**streams("a:full_jsd", **TAUGHT)))).streams
    assert (whole.reads, whole.mixture, whole.tail_floor) == (("teacher_hidden",), 0.5, None)
    shown = banner(validate_args(arguments(**streams("a:full_jsd", **TAUGHT))))
    assert "m = βP + (1-β)Q, β = 0.5, over the whole vocabulary)" in shown
    assert "logits of its hidden states, by teacher.safetensors  (--pg-teacher-head)" in shown
    (plain,) = Facts(validate_args(arguments(**streams("a:topk_jsd")))).streams
    assert (plain.mixture, plain.tail_floor) == (0.5, 1e-6)
    text = banner(validate_args(arguments(**streams(*texts, pg_teacher_tail_floor=1e-3))))
    assert (
        "m = βP + (1-β)Q, β = 0.1, over the teacher's likeliest tokens and all others as one, which it gives at least 0.001"
        in text
    )
    assert "α = 0.1" in text


@pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentWarning")
def test_under_a_custom_reducer_the_default_is_the_step_mean():
    args = validate_args(arguments(custom_pg_loss_reducer_function_path=REDUCER, **streams("sft:ce")))
    assert Facts(args).streams[0].aggregation == "sample_mean"


def test_a_weight_of_0_drops_a_stream_and_the_shorthands_are_streams():
    args = validate_args(arguments(pg_kl_coef=0.1, pg_kl_estimator="k2", **streams("sft:ce,weight=0", "b:ce")))
    assert [(stream.name, stream.weight, stream.tokens) for stream in Facts(args).streams] == [
        ("kl", 0.1, "rl"),
        ("b", 1.0, "b"),
    ]


def test_the_banner_says_the_whole_sum():
    args = arguments(**streams("sft:ce,weight=0.1,aggregation=token_mean", "t:opd,on=rl,aggregation=policy"))
    text = banner(validate_args(args))
    assert "+ 0.1 Σ v·(-log π) over the tokens of sft, counted alone: v = 1/δ, δ = T" in text
    assert "+ 1 Σ v·(KL(π‖π_teacher)) by k3_weighted over the tokens of rl, with v = the weights of pg_loss" in text
    assert "--pg-stream sft:ce" in text
    alone = banner(validate_args(arguments(**streams("rl:rl,weight=0", "sft:ce"))))
    assert "objective" in alone
    assert "none  (--pg-stream rl:rl,weight=0)" in alone
    assert "pg_loss" not in alone.partition("δ = ")[0]


def test_a_text_is_parsed_once_in_a_startup(monkeypatch):
    texts, parsed = ("once_a:ce", "once_b:opd,on=rl", "once_c:entropy,on=rl"), []
    monkeypatch.setattr(stream_text, "is_stream", lambda name: parsed.append(name) or is_stream(name))
    args = validate_args(arguments(**streams(*texts, pg_kernel="torch", pg_entropy_support="kept")))
    banner(args)
    LossSettings.from_args(args)
    validate_args(args)
    assert parsed == ["once_a", "once_b", "once_c"]
