"""What is refused before a step runs, on every rank: model-parallel peers are threads here."""

import dataclasses
import types

import pytest
import threads
import torch

from megatron_pg import Sample, StepPlan, pack
from megatron_pg.step import checks
from megatron_pg.step.errors import ContractError
from megatron_pg.step.forward_step import PolicyGradientStep


def sample(**changed: object) -> Sample:
    fields = {
        "tokens": [1, 2, 3, 4],
        "response_length": 2,
        "loss_mask": [1, 1],
        "old_logprobs": [-1.0, -2.0],
        "advantage": [0.5, -0.5],
        "rollout_logprobs": [-1.5, -2.5],
        "ref_logprobs": [-1.25, -2.25],
    }
    return Sample.build(**fields | changed)


def plan(denominator: float = 2.0) -> StepPlan:
    counts = dict.fromkeys(("num_samples", "num_rollouts", "num_tokens", "num_response_tokens", "num_positions"), 1)
    denominators = torch.tensor([denominator], dtype=torch.float64)
    rest = {"aggregation": "sample_mean", "divisor": None, "num_prompts": None, "num_microbatches": 1, "facts": None}
    return StepPlan(denominators=denominators, **counts, **rest)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"tokens": [1, 2, 3, 5]},
        {"tokens": [2, 2, 3, 4]},
        {"loss_mask": [1, 0]},
        {"old_logprobs": [-1.0, -2.125]},
        {"advantage": [0.5, 0.5]},
        {"rollout_logprobs": [-1.5, -2.625]},
        {"rollout_logprobs": None},
        {"ref_logprobs": [-1.25, -2.375]},
        {"ref_logprobs": None},
        {"reward": 1.0},
        {"truncated": True},
        {"denominator": 4.0},
        {"qkv_format": "bshd"},
    ],
    ids=str,
)
def test_peers_that_read_anything_else_stop_every_rank(monkeypatch, changed):
    monkeypatch.setattr(checks.parallel_state, "get_data_parallel_world_size", lambda: 1)
    monkeypatch.setattr(checks.parallel_state, "get_data_parallel_rank", lambda: 0)
    layouts = {"thd": {}, "bshd": {"max_seq_len": 4}}

    def work(rank: int) -> None:
        own = dict(changed) if rank else {}
        found, qkv_format = plan(own.pop("denominator", 2.0)), own.pop("qkv_format", "thd")
        batch = pack([sample(**own)], qkv_format=qkv_format, **layouts[qkv_format])
        checks.agree([batch], found, None)

    if not changed:
        threads.run(2, work)
        return
    with pytest.raises(ContractError, match="step plan differs between ranks 0 and 1"):
        threads.run(2, work)


def test_a_token_id_outside_the_vocabulary_is_refused_in_the_padding_too(monkeypatch):
    """An embedding is looked up for every position."""
    for name in ("get_context_parallel_world_size", "get_pipeline_model_parallel_world_size"):
        monkeypatch.setattr(checks.parallel_state, name, lambda: 1)
    config = types.SimpleNamespace(variable_seq_lengths=False)
    model = types.SimpleNamespace(vocab_size=8, position_embedding_type="rope", max_sequence_length=4, config=config)
    batch = pack([sample()], qkv_format="bshd", max_seq_len=6, rows=2)
    arguments = {"micro_batch_size": 2, "seq_length": 6}
    checks.check_batches([batch], model, arguments)
    for row, position in [(0, 5), (1, 0)]:
        tokens = batch.tokens.clone()
        tokens[row, position] = 8
        with pytest.raises(ContractError, match="micro-batch 0 holds token id 8, the vocabulary has 8"):
            checks.check_batches([dataclasses.replace(batch, tokens=tokens)], model, arguments)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_leaves_the_models_config_as_it_was(monkeypatch, fails):
    """Or every step would wrap the function of the one before once more."""
    calls = []
    step, config = PolicyGradientStep(types.SimpleNamespace()), types.SimpleNamespace()
    original = config.finalize_model_grads_func = lambda *given: calls.append("finalize")
    monkeypatch.setattr(step, "_gather_and_check", lambda: calls.append("check"))

    def run() -> None:
        with step._checked_before_finalize(config, []):
            config.finalize_model_grads_func([])
            if fails:
                raise ContractError("a mistake")

    for number in range(1, 3):
        if fails:
            with pytest.raises(ContractError):
                run()
        else:
            run()
        assert config.finalize_model_grads_func is original
        assert calls == ["check", "finalize"] * number
