"""`--pg-term`: what it is read as, and each rule broken alone, and its near misses. `-k E71` finds one rule."""

import pytest
from namespaces import REDUCER, arguments, constant

from megatron_pg.args import validate_args
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.flags import term_text
from megatron_pg.flags.banner import banner
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.term_text import parse
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.fields import is_term


def terms(*texts: str, **rest: object) -> dict[str, object]:
    return {"pg_term": list(texts), **rest}


TEACHER = "head=teacher.safetensors"

pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


def test_a_text_is_a_term():
    assert parse("sft:ce") == LossTerm(name="sft", kind="ce")
    text = "teacher:opd,weight=0.5,aggregation=constant,divisor=4096,on=rl,estimator=k2"
    found = LossTerm(
        name="teacher", kind="opd", weight=0.5, aggregation="constant", divisor=4096.0, on="rl", estimator="k2"
    )
    assert parse(text) == found


def test_what_is_not_said_is_the_objectives():
    args = validate_args(arguments(**constant(7.0), **terms("sft:ce", "t:opd,on=rl,aggregation=token_mean")))
    sft, teacher = Facts(args).further
    assert (sft.aggregation, sft.divisor, sft.tokens) == ("constant", 7.0, "sft")
    assert (teacher.aggregation, teacher.divisor, teacher.tokens) == ("token_mean", None, "rl")
    assert teacher.estimator == "k3_weighted"
    assert teacher.reads == ("teacher_logprobs", "old_logprobs")


def test_a_top_k_divergence_has_its_mixture_and_the_floor_of_its_tail():
    texts = (
        "a:topk_jsd,beta=0.1,tail_floor=1e-3",
        "b:topk_skew_reverse,on=rl,tail_floor=2e-3",
        "c:topk_generalised_reverse",
        "d:ce",
    )
    found = Facts(validate_args(arguments(**terms(*texts)))).further
    assert [(each.mixture, each.tail_floor) for each in found] == [(0.1, 1e-3), (0.1, 2e-3), (None, None), (None, None)]
    assert [each.reads for each in found] == [*[("teacher_topk",)] * 3, ()]
    (whole,) = Facts(validate_args(arguments(**terms(f"a:full_jsd,{TEACHER}", pg_fused_head="recompute")))).further
    assert (whole.reads, whole.mixture, whole.tail_floor) == (("teacher_hidden",), 0.5, None)
    shown = banner(validate_args(arguments(**terms(f"a:full_jsd,{TEACHER}", pg_fused_head="recompute"))))
    assert "m = βP + (1-β)Q, β = 0.5, over the whole vocabulary)" in shown
    assert "logits of its hidden states, by teacher.safetensors  (--pg-term …,head=)" in shown
    (plain,) = Facts(validate_args(arguments(**terms("a:topk_jsd")))).further
    assert (plain.mixture, plain.tail_floor) == (0.5, 1e-6)
    text = banner(validate_args(arguments(**terms(*texts))))
    assert (
        "m = βP + (1-β)Q, β = 0.1, over the teacher's top-k tokens and all others as one, of probability at least 0.001"
        in text
    )
    assert "α = 0.1" in text


@pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentWarning")
def test_under_a_custom_reducer_the_default_is_the_step_mean():
    args = validate_args(arguments(custom_pg_loss_reducer_function_path=REDUCER, **terms("sft:ce")))
    assert Facts(args).further[0].aggregation == "sample_mean"


def test_a_weight_of_0_drops_a_term_and_the_shorthands_are_terms():
    args = validate_args(arguments(pg_kl_coef=0.1, pg_kl_estimator="k2", **terms("sft:ce,weight=0", "b:ce")))
    assert [(term.name, term.weight, term.tokens) for term in Facts(args).further] == [
        ("kl", 0.1, "rl"),
        ("b", 1.0, "b"),
    ]


def test_the_banner_says_the_whole_sum():
    args = arguments(**terms("sft:ce,weight=0.1,aggregation=token_mean", "t:opd,on=rl,aggregation=policy"))
    text = banner(validate_args(args))
    assert "+ 0.1 Σ v·(-log π) over the tokens of sft, counted alone: v = 1/δ, δ = T" in text
    assert "+ 1 Σ v·(KL(π‖π_teacher)) by k3_weighted over the tokens of rl, with v = the weights of pg_loss" in text
    assert "--pg-term sft:ce" in text
    alone = banner(validate_args(arguments(**terms("rl:rl,weight=0", "sft:ce"))))
    assert "objective" in alone
    assert "none  (--pg-term rl:rl,weight=0)" in alone
    assert "pg_loss" not in alone.partition("δ = ")[0]


def test_a_text_is_parsed_once_in_a_startup(monkeypatch):
    texts, parsed = ("once_a:ce", "once_b:opd,on=rl", "once_c:entropy,on=rl"), []
    monkeypatch.setattr(term_text, "is_term", lambda name: parsed.append(name) or is_term(name))
    args = validate_args(arguments(**terms(*texts, pg_kernel="torch", pg_sampling_mask_entropy="kept")))
    banner(args)
    LossSettings.from_args(args)
    validate_args(args)
    assert parsed == ["once_a", "once_b", "once_c"]
