"""Which settings the float32 head goes with: each rule broken alone, and its near misses. `-k E55` finds one rule."""

import pytest
from namespaces import accepts, arguments, breaks, correction, head, pg, row


def scaled_exp(**more: object) -> dict:
    return head(**more) | {"pg_fused_head": "scaled_exp"}


# Each breaks exactly one rule.
BROKEN = [
    row("E50", "float32", {"fp32_lm_head": "yes"}, "--fp32-lm-head must be true or false, got 'yes'"),
    row(
        "E50", "fused", {"pg_fused_head": "both"}, "--pg-fused-head 'both' is not one of forward, recompute, scaled_exp"
    ),
    row(
        "E50",
        "backward",
        head(fp32_lm_head_backward="exact"),
        "--fp32-lm-head-backward 'exact' is not one of bf16, split",
    ),
    row("E51", "no head", {"fp32_lm_head_backward": "split"}, "--fp32-lm-head-backward split has no effect without"),
    row("E52", "zero", {"pg_vocab_size": 0}, "--pg-vocab-size must be a whole number >= 1, got 0"),
    row("E52", "float", {"pg_vocab_size": 8.0}, "--pg-vocab-size must be a whole number >= 1, got 8.0"),
    row("E52", "bool", {"pg_vocab_size": True}, "--pg-vocab-size must be a whole number >= 1, got True"),
    row("E52", "more", {"pg_vocab_size": 151937}, "--pg-vocab-size 151937 is more than the 151936 columns"),
    row("E53", "deferred", head(defer_embedding_wgrad_compute=True), "--defer-embedding-wgrad-compute computes"),
    row(
        "E53",
        "dtype",
        {"fp32_lm_head": True, "output_logit_dtype": "fp32"},
        "--output-logit-dtype fp32 is Megatron's own",
    ),
    row("E53", "fp8", head(fp8_output_proj=True), "--fp8-output-proj makes the output layer one of Transformer Engine"),
    row("E53", "fp8, stored", {"fp32_lm_head": True, "fp8_output_proj": True}, "--fp8-output-proj makes the output"),
    row("E54", "mup", head(use_mup=True), "--use-mup scales the logits"),
    row("E54", "fusion", head(cross_entropy_loss_fusion=True), "--cross-entropy-loss-fusion is a loss over logits"),
    row("E55", "fp16", head(fp16=True), "--fp16 brings a loss scale", "use --pg-fused-head recompute"),
    row("E55", "loss scale", head(loss_scale=128.0), "--loss-scale brings a loss scale"),
    row("E55", "gspo", head(**pg("gspo")), "--pg-objective gspo reads whole sequences"),
    row("E55", "gspo_token", head(**pg("gspo_token")), "--pg-objective gspo_token reads whole sequences"),
    row("E55", "topr", head(**pg("topr")), "--pg-objective topr reads whole sequences"),
    row("E55", "vespo", head(**pg("vespo")), "--pg-objective vespo reads whole sequences"),
    row("E55", "gmpo", head(**pg("gmpo")), "--pg-objective gmpo reads whole sequences"),
    row("E55", "opsm", head(**correction("opsm", high=0.1)), "--pg-correction opsm reads whole sequences"),
    row(
        "E55", "scaled_exp, fp16", scaled_exp(fp16=True), "--fp16 brings a loss scale", "use --pg-fused-head recompute"
    ),
    row(
        "E55",
        "scaled_exp, gspo",
        scaled_exp(**pg("gspo")),
        "--pg-fused-head scaled_exp makes",
        "--pg-objective gspo reads whole sequences",
    ),
    row(
        "E56", "bonus", scaled_exp(pg_entropy_coef=0.1), "--pg-entropy-coef 0.1 reads more; use --pg-fused-head forward"
    ),
    row("E56", "metric", scaled_exp(pg_metrics="with_entropy"), "--pg-metrics with_entropy reads more"),
    row("E56", "term", scaled_exp(pg_term=["calm:entropy,on=rl"]), "--pg-term calm:entropy reads more"),
    row(
        "E56",
        "whole teacher",
        scaled_exp(pg_term=["teacher:full_jsd,on=rl"], pg_teacher_head="h"),
        "--pg-fused-head scaled_exp keeps of a row what log-probabilities need, and --pg-term teacher:full_jsd reads more",
    ),
    row("E56", "teacher", scaled_exp(pg_term=["teacher:topk_forward_kl,on=rl"]), "topk_forward_kl reads more"),
    row("E56", "split", scaled_exp(fp32_lm_head_backward="split"), "--fp32-lm-head-backward split would be"),
    row("E55", "opsm_old", head(**correction("opsm_old", high=0.1)), "--pg-correction opsm_old reads whole sequences"),
]

NEAR_MISSES = [
    row("E50", "both heads", head(fp32_lm_head=True)),
    row("E50", "recompute", {"pg_fused_head": "recompute", "fp32_lm_head_backward": "split"}),
    row("E51", "float32 logits", {"fp32_lm_head": True, "fp32_lm_head_backward": "bf16"}),
    row("E52", "all columns", {"pg_vocab_size": 151936}),
    row("E52", "not known yet", {"pg_vocab_size": 151937, "padded_vocab_size": None}),
    row(
        "E53", "no head", {"defer_embedding_wgrad_compute": True, "output_logit_dtype": "fp32", "fp8_output_proj": True}
    ),
    row("E54", "mtp", head(mtp_num_layers=1)),
    row("E54", "float32 logits", {"fp32_lm_head": True, "use_mup": True, "cross_entropy_loss_fusion": True}),
    row("E55", "fp16", {"pg_fused_head": "recompute", "fp16": True}),
    row("E55", "gspo", {"pg_fused_head": "recompute", **pg("gspo")}),
    row("E56", "scaled_exp", scaled_exp(fp32_lm_head_backward="bf16", pg_kl_coef=0.1, pg_kl_estimator="k3")),
    row("E56", "no weight", scaled_exp(pg_term=["calm:entropy,on=rl,weight=0"])),
    row("E56", "entropy", head(pg_entropy_coef=0.1, pg_metrics="with_entropy")),
    row("E55", "topr by token", head(**pg("topr_token"))),
    # whether it reads whole sequences is known once it was tried
    row("E55", "custom objective", head(**pg("grpo", custom_objective_path="user_package.turns:two"))),
]


pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


@pytest.mark.parametrize(("overrides", "rule", "fragments"), BROKEN)
def test_a_broken_rule_is_named_alone_and_changes_nothing(overrides, rule, fragments):
    breaks(arguments(**overrides), rule, *fragments)


@pytest.mark.parametrize(("overrides", "rule", "fragments"), NEAR_MISSES)
def test_a_near_miss_passes(overrides, rule, fragments):
    accepts(arguments(**overrides))
