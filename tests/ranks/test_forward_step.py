"""The whole step through Megatron's schedules, DDP and finalize, on real ranks over gloo."""

import argparse
import types
from itertools import product

import launches
import processes
import pytest
import torch
from processes import gradients, report, worst_difference

from megatron_pg.args import MEGATRON_ARGUMENTS, add_arguments
from megatron_pg.step.forward_step import PolicyGradientStep
from megatron_pg.step.loss import LossSettings

MODES = ["sample_mean", "prompt_mean", "token_mean", "constant"]
LIMIT = 2e-6
# t: packed rows, s: sequence parallel, v: two virtual stages, tied: embeddings shared with the head, dist: distributed
# optimizer, overlap: overlapped gradient reduction, fp32: float32 logits, fused and recompute: the fused head, experts: a
# mixture of experts, ep: distributed over data-parallel ranks, uneven: all samples on one data-parallel rank.
FAST = [
    *(f"{layout}-{mode}" for layout in ("dp2", "cp2") for mode in MODES),
    *("tp2-constant", "tp2-token_mean", "tp2s-sample_mean", "tp2s-token_mean-tied"),
    *("pp2-prompt_mean", "pp2-token_mean", "pp2v-sample_mean-tied", "pp2v-token_mean"),
    *("cp2t-sample_mean", "cp2t-token_mean", "dp2t-constant"),
    *("dp2-constant-gspo", "cp2-sample_mean-gspo", "cp2t-token_mean-gspo", "tp2-sample_mean-gspo"),
    *("tp2s-constant-fused", "tp2-sample_mean-fused-tied", "tp2s-token_mean-recompute-tied", "tp2s-constant-fp32-tied"),
    *(
        "pp2-prompt_mean-fused-tied",
        "pp2v-token_mean-fused",
        "cp2t-sample_mean-fused",
        "dp2-constant-fused-dist-overlap",
    ),
    *("tp2-constant-fp32-dist-overlap", "dp2-sample_mean-recompute-tied-dist-overlap"),
    *("cp2t-sample_mean-gspo-recompute", "tp2s-constant-gspo-recompute"),
    *("ep2-sample_mean-experts", "ep2-token_mean-experts-dist-overlap", "ep2-constant-experts-fused"),
    *("dp2-prompt_mean-dist", "dp2-constant-tied-dist-overlap", "dp2-token_mean-overlap", "dp2-sample_mean-uneven"),
]
OPTIONS = ["", "-tied", "-dist", "-overlap", "-tied-dist-overlap"]
HEADS = [
    *("-fused", "-fused-tied-dist-overlap", "-recompute", "-recompute-tied-dist-overlap", "-fp32-tied-dist-overlap"),
]
TWO = ["dp2", "dp2t", "tp2", "tp2s", "tp2t", "pp2", "pp2v", "cp2", "cp2t"]
FOUR = [
    "dp4",
    "tp4s",
    "pp4",
    "cp4",
    "dp2cp2",
    "dp2cp2t",
    "tp2pp2",
    "tp2pp2sv",
    "dp2tp2s",
    "dp2pp2v",
    "tp2cp2",
    "pp2cp2",
]
GSPO = [
    f"{layout}-{mode}-gspo{head}"
    for layout in ("dp2", "dp2t", "tp2", "pp2", "cp2", "cp2t")
    for mode in MODES
    for head in ("", "-recompute")
]
EXPERTS = [
    f"ep2{kind}-{mode}-experts{option}" for kind in ("", "t") for mode in MODES for option in ("", "-dist-overlap")
]
FULL = [
    *GSPO,
    *EXPERTS,
    *(f"cp2-{mode}-experts" for mode in MODES),
    *("-".join(parts) + option for parts in product(TWO, MODES) for option in [*OPTIONS, *HEADS]),
    "dp2-token_mean-uneven",
]
FULL_4 = [
    "-".join(parts) + option
    for parts in product(FOUR, MODES)
    for option in ("", "-tied-dist-overlap", "-fused-tied-dist-overlap")
]
FULL_4 += [
    f"{layout}-{mode}-experts{option}"
    for layout in ("ep4", "dp4ep2", "ep2pp2", "ep2cp2")
    for mode in MODES
    for option in ("", "-dist-overlap")
]
REFERENCES = [f"dp1-{mode}{option}" for mode in MODES for option in ("", "-tied", "-gspo", "-experts")]
# docs: the same samples as a step of --docs-per-step
DOCUMENTS = [
    *("dp2t-sample_mean-docs", "dp2-prompt_mean-docs", "dp2t-token_mean-docs", "dp2t-constant-dist-overlap-docs"),
    *("tp2t-constant-docs", "tp2s-token_mean-docs", "tp2ts-prompt_mean-docs"),
    *("pp2-sample_mean-docs", "pp2t-token_mean-docs", "pp2v-constant-docs", "pp2tv-token_mean-docs"),
    *("cp2t-prompt_mean-docs", "cp2-constant-docs", "cp2t-token_mean-docs"),
    *("dp2t-constant-fused-docs", "pp2tv-token_mean-fused-docs", "cp2t-sample_mean-gspo-recompute-docs"),
]
DOCUMENTS_4 = [f"dp2cp2{kind}-{mode}-docs" for kind in ("", "t") for mode in MODES]
EVALUATIONS = ["dp2-constant-evaluate", "tp2s-constant-fused-evaluate", "pp2-prompt_mean-fused-evaluate"]
STARTUP = [  # arguments that rank 1 has otherwise; source: the reducer's file
    *(
        "loss_aggregation",
        "loss_aggregation_divisor",
        "custom_pg_loss_reducer_function_path",
        "calculate_per_token_loss",
    ),
    *("pg_clip_eps_low", "pg_clip_eps_high", "pg_temperature", "pg_metrics", "pg_kernel", "pg_objective"),
    *("pg_custom_objective_path", "pg_dual_clip", "pg_delta", "pg_cispo_cap", "pg_sapo_tau_pos", "pg_sapo_tau_neg"),
    *("pg_dppo_delta_low", "pg_dppo_delta_high", "pg_correction", "pg_correction_low", "pg_correction_high"),
    *("pg_denominator", "pg_kl_coef", "pg_kl_estimator", "pg_entropy_coef", "pg_aux_aggregation", "pg_grad_divisor"),
    *("docs_per_step", "docs_per_step_policy", "docs_per_step_end"),
    *("context_parallel_size", "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope", "dataloader_type"),
    *("ddp_average_in_collective", "fp16", "gtp_weight_remat_size", "hybrid_context_parallel", "iterations_to_skip"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_num_layers", "num_experts", "overlap_moe_expert_parallel_comm"),
    *("decrease_batch_size_if_needed", "rampup_batch_size", "train_samples"),
    *("perform_rl_step", "sft", "tensor_model_parallel_size", "use_megatron_fsdp", "use_torch_fsdp2"),
    *("fp32_lm_head", "fp32_lm_head_backward", "pg_fused_head", "pg_vocab_size", "cross_entropy_loss_fusion"),
    *("defer_embedding_wgrad_compute", "loss_scale", "output_logit_dtype", "padded_vocab_size", "use_mup"),
    *("fp8_output_proj", "params_dtype"),
]
# case: what every rank's message says, in order of the ranks (one text: the same on both)
FAULTS = {
    "dp2-constant-nan": "NonFiniteLossError: non-finite loss at rank 1, sample",
    "pp2-token_mean-nan": "NonFiniteLossError: non-finite loss at rank 1, sample",
    "pp2v-token_mean-nan": "NonFiniteLossError: non-finite loss at rank 1, sample",
    "tp2-constant-peers": "ContractError: step plan differs between ranks 0 and 1",
    "cp2-sample_mean-peers": "ContractError: step plan differs between ranks 0 and 1",
    "dp2-constant-ended": "rank 1: the data ended after 1 of the 2 micro-batches of this step",
    "tp2-constant-ended": "the data ended after 1 of the 2 micro-batches of this step",
    "pp2-token_mean-raises": "RuntimeError: the sampler broke",
    "dp2-token_mean-masked": "the step has no trained token",
    "dp2-constant-detached": "call PolicyGradientStep.attach",
    "pp2-token_mean-detached": "call PolicyGradientStep.attach",
    "dp2-sample_mean-reducer": "rank 1: RuntimeError: my reducer broke",
    "tp2-constant-advantages": "ContractError: step plan differs between ranks 0 and 1",
    "tp2-constant-vocabulary": "holds token id 16, the vocabulary has 16",
    "dp2-constant-positions": "holds a document of 25 positions, the model has 24",
    "dp2-constant-unreduced": "config.finalize_model_grads_func is None",
    "pp2-constant-columns": "--pg-vocab-size 17 is more than the 16 columns of the model's logits",
    "pp2-constant-fused-bias": "the output layer has a bias, which the float32 head would leave out",
    "pp2-constant-fp32-bias": "the output layer has a bias, which the float32 head would leave out",
    "pp2-constant-fused-telayer": "the output layer is a TELayer, not Megatron's ColumnParallelLinear",
    "pp2-token_mean-shape": "pipeline parallelism sends (",
    "dp2-token_mean-flag": "built with calculate_per_token_loss=True, the arguments say False",
    "dp2-sample_mean-nanold": "non-finite loss at rank 1, sample 1 (number 0 of its micro-batch), response token 0 with old_logprobs nan",
    "dp2-token_mean-nanadvantage": "non-finite loss at rank 1, sample 1 (number 0 of its micro-batch), response token 0 with old_logprobs -",
    "tp2-constant-nanold": "ContractError: step plan differs between ranks 0 and 1",
    "dp2-constant-buildold": "rank 1: old_logprobs of sample 1 is nan at response token 0",
    "dp2-constant-buildadvantage": "rank 1: advantages of sample 1 is inf at response token 0",
    "dp2-constant-positive": "rank 1: old_logprobs of sample 1 reach 0.7",
    "dp2-constant-masklength": "rank 1: loss_mask of sample 1 has",
    "dp2-constant-oldlength": "rank 1: old_logprobs of sample 1 has",
    "pp2-constant-oldlength": "old_logprobs of sample",
    "dp2-constant-fraction": "rank 1: loss_mask of sample 1 must be 0 or 1, got 0.5",
    "dp2-prompt_mean-noprompt": "rank 1: sample 1 has no prompt_id",
    "dp2-sample_mean-noids": "rank 0 has rollout_ids and rank 1 has none",
    "dp2-sample_mean-duplicate": "rollout with the string-id hash",
    "dp2-constant-more": "rank 0 has 2 micro-batches, rank 1 has 3",
    "dp2-constant-noref": "rank 0: sample 0 has no ref_logprobs, which --pg-kl-coef 0.1 needs",
    "pp2-token_mean-norollout": "has no rollout_logprobs, which --pg-correction tis needs",
    "dp2-constant-dict": "rank 1: the data iterator gave a dict, not a PackedBatch",
    "dp2t-constant-docs-breaks": "rank 1: RuntimeError: the sampler broke",
    "tp2t-constant-docs-breaks": "RuntimeError: the sampler broke",
    "pp2t-token_mean-docs-breaks": "RuntimeError: the sampler broke",
    "dp2t-constant-docs-masked": "the step has no trained token, so nothing can be learned from it. Leave fully masked samples out",
    "dp2t-constant-docs-toolong": "rank 1: document a long one has 73 tokens and a micro-batch holds 12",
    "tp2t-constant-docs-unequal": "ContractError: step plan differs between ranks 0 and 1",
    "dp2t-prompt_mean-docs-divided": "has samples on data-parallel ranks 0 and 1, so steps of a number of documents could cut it",
    "pp2-token_mean-docs-detached": "call PolicyGradientStep.attach",
    "dp2-token_mean-docs-short": "EndOfDocuments: the documents have ended: 0 were trained, ",
}


@pytest.fixture(scope="module")
def cases(full):
    return FULL if full else FAST


@launches.launch
def results(folder, full):
    """Folders of one launch of two ranks and one of a single rank, which run beside each other."""
    two, one = folder / "two", folder / "one"
    two.mkdir()
    one.mkdir()
    # cases of one layout and option behind each other share its groups
    cases = sorted([*(FULL if full else FAST), *DOCUMENTS, *EVALUATIONS], key=lambda case: case.split("-")[0])
    with processes.finished([processes.start(2, two, cases), processes.start(1, one, REFERENCES)]):
        return two, one


@launches.launch
def faulty(folder, full):
    """The folder of a launch of two ranks, one of which makes mistakes."""
    startups = [f"startup-{name}" for name in [*STARTUP, "source", "nothing", "sourceless", "nan"]]
    with processes.finished([processes.start(2, folder, [*FAULTS, *startups])]):
        return folder


def reference_of(case: str) -> str:
    option = next((f"-{name}" for name in ("tied", "gspo", "experts") if name in case), "")
    return f"dp1-{case.split('-')[1]}{option}"


@pytest.mark.proof("Real ranks, documents per step: every parameter's gradient on 2 ranks equals one process")
def test_a_step_of_documents_has_the_gradient_and_metrics_of_one_process(results, evidence):
    two, one = results
    evidence(cases=len(DOCUMENTS), worst=compare(two, one, DOCUMENTS))
    check_documents(two, one, DOCUMENTS, ranks=2)


@pytest.mark.proof("Real ranks, documents per step: every parameter's gradient on DP2 x CP2 equals one process")
def test_a_step_of_documents_on_four_ranks_equals_one_process(results, tmp_path, full, evidence):
    if not full:
        pytest.skip("four ranks are started by `make prove`")
    with processes.finished([processes.start(4, tmp_path, DOCUMENTS_4)]):
        evidence(cases=len(DOCUMENTS_4), worst=compare(tmp_path, results[1], DOCUMENTS_4))
        check_documents(tmp_path, results[1], DOCUMENTS_4, ranks=4)


def check_documents(folder, references, cases: list[str], ranks: int) -> None:
    """Every rank has the metrics of one process, the counts of the documents, and the same end behind the step."""
    for case in cases:
        expected = report(references, reference_of(case), 0)["metrics"]
        found = [report(folder, case, rank) for rank in range(ranks)]
        assert all(other == found[0] for other in ({**r, "reported": found[0]["reported"]} for r in found)), case
        counts = {name: value for name, value in found[0]["metrics"].items() if name not in expected}
        assert counts.pop("num_microbatches") > 1
        total = counts["num_documents"]
        assert counts == dict.fromkeys(("num_documents", "documents_seen"), total) | {
            "documents_surplus": 0,
            "documents_waiting": 0,
        }
        assert found[0]["farewell"] == f"the documents have ended: {total} were trained"
        for name, value in expected.items():
            assert found[0]["metrics"][name] == pytest.approx(value, rel=2e-5, abs=2e-6), (case, name)


def compare(folder, references, cases: list[str]) -> float:
    """Worst gradient error of the cases; every case that misses the limit is named."""
    worst = {
        case: worst_difference(gradients(folder, case), gradients(references, reference_of(case))) for case in cases
    }
    assert {case: error for case, error in worst.items() if not error <= LIMIT} == {}
    return max(worst.values())


@pytest.mark.proof("Real ranks: every parameter's gradient on 2 ranks equals one process")
def test_every_parameters_gradient_equals_that_of_one_process(results, cases, evidence):
    two, one = results
    evidence(cases=len(cases), worst=compare(two, one, cases))


@pytest.mark.proof("Real ranks: every parameter's gradient on 4 ranks equals one process")
def test_gradients_on_four_ranks_equal_those_of_one_process(results, tmp_path, full, evidence):
    if not full:
        pytest.skip("four ranks are started by `make prove`")
    with processes.finished([processes.start(4, tmp_path, FULL_4)]):
        evidence(cases=len(FULL_4), worst=compare(tmp_path, results[1], FULL_4))


@pytest.mark.proof("Real ranks: every rank reports the metrics of one process")
def test_every_rank_reports_the_metrics_of_one_process(results, cases, evidence):
    two, one = results
    for case in cases:
        expected, first = report(one, reference_of(case), 0), report(two, case, 0)
        assert first["metrics"] == report(two, case, 1)["metrics"], case
        assert first["num_tokens"] == expected["num_tokens"], case
        assert first["metrics"].keys() == expected["metrics"].keys(), case
        for name, value in expected["metrics"].items():
            assert first["metrics"][name] == pytest.approx(value, rel=2e-5, abs=2e-6), (case, name)
    evidence(cases=len(cases))


@pytest.mark.parametrize("mode", MODES)
def test_megatrons_own_average_of_the_report_is_the_objective(results, mode):
    two, _ = results
    reported = [pair for rank in (0, 1) for pair in report(two, f"dp2-{mode}", rank)["reported"]]
    value = sum(a for a, _ in reported) / sum(b for _, b in reported)
    assert value == pytest.approx(report(two, f"dp2-{mode}", 0)["metrics"]["pg_loss"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("case", EVALUATIONS)
def test_evaluation_reports_the_metrics_of_a_training_step_and_leaves_no_gradient(results, case):
    two, one = results
    expected = report(one, reference_of(case), 0)["metrics"]
    assert report(two, case, 0)["metrics"] == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert all(not copy.any() for copies in gradients(two, case).values() for copy in copies)


def test_a_missing_or_nan_gradient_passes_no_comparison(results):
    good = gradients(results[1], "dp1-constant")
    name = next(iter(good))
    assert worst_difference(good, good) == 0
    assert worst_difference({k: v for k, v in good.items() if k != name}, good) == float("inf")
    assert worst_difference(good | {name: [good[name][0] * float("nan")]}, good) == float("inf")
    assert worst_difference(good, good | {name: [good[name][0] * float("nan")]}) == float("inf")
    assert worst_difference(good | {name: [good[name][0] * 1.01]}, good) > LIMIT
    assert worst_difference(good | {name: [good[name][0], good[name][0] + 1]}, good) > LIMIT


@pytest.mark.proof("Faults: a mistake on one rank is a named error on every rank (worst: seconds until the last one)")
@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_on_one_rank_is_a_named_error_on_every_rank(faulty, case, evidence):
    errors = processes.errors(faulty, case, ranks=2)
    for error in errors:
        assert FAULTS[case] in error["message"]
    evidence(cases=1, worst=max(error["seconds"] for error in errors))


@pytest.mark.proof("Faults: an argument or a reducer's source that differs between ranks stops every rank at startup")
@pytest.mark.parametrize("name", [*STARTUP, "source"])
def test_an_argument_that_differs_between_ranks_stops_every_rank_at_startup(faulty, name, evidence):
    shown = "source of the custom reducer" if name == "source" else name
    for error in processes.errors(faulty, f"startup-{name}", ranks=2):
        assert f"[E23] ranks disagree on {shown}: rank 0 has " in error["message"]
        assert ", rank 1 has " in error["message"]
    evidence(cases=1)


def test_every_argument_that_a_rule_reads_is_compared_between_the_ranks():
    own = vars(add_arguments(argparse.ArgumentParser()).parse_args([]))
    assert set(STARTUP) == {*own, *MEGATRON_ARGUMENTS}


def test_one_ranks_own_mistake_stops_every_rank_at_startup(faulty):
    errors = processes.errors(faulty, "startup-sourceless", ranks=2)
    assert "[E23] rank 1: " in errors[0]["message"]
    for error in errors:
        assert "'rank_reducer:reducer' cannot be imported" in error["message"]


def test_equal_arguments_start(faulty):
    assert not list(faulty.glob("startup-nothing.*.error"))


def test_values_that_are_equal_and_refused_meet_their_own_rule(faulty):
    for error in processes.errors(faulty, "startup-nan", ranks=2):
        assert "[E8] --loss-aggregation-divisor must be finite and > 0, got nan" in error["message"]


@pytest.mark.parametrize("words", [["--pg-fused-head"], ["--fp32-lm-head"], ["--fp32-lm-head", "--pg-fused-head"], []])
def test_logits_without_a_loss_have_the_precision_of_the_loss(words):
    """What a sampler reads: rounded, they would put the ratio of an on-policy step off 1."""
    layer = types.SimpleNamespace(_forward_impl=lambda *, input, weight, **_: input @ weight.t())
    model = types.SimpleNamespace(output_layer=layer, compute_language_model_loss=None)
    args = add_arguments(argparse.ArgumentParser()).parse_args(words)
    PolicyGradientStep(LossSettings.from_args(args)).attach(model)
    states, weight = (torch.randn(3, 1, 8, dtype=torch.bfloat16), torch.randn(5, 8, dtype=torch.bfloat16))
    options = dict.fromkeys(("bias", "grad_output_buffer", "sequence_parallel", "tp_group"), None)
    logits = layer._forward_impl(input=states, weight=weight, **options)
    exact = states.double() @ weight.double().t()
    assert logits.dtype == (torch.float32 if words else torch.bfloat16)
    assert ((logits.double() - exact).abs().max() < 1e-5) == bool(words)
