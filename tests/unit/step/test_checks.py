"""What is refused before a step runs, on every rank: model-parallel peers are threads here."""

import contextlib
import dataclasses
import types

import pytest
import simulation
import threads
import torch
from megatron.core.distributed import DistributedDataParallel, TorchFullyShardedDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from samples import plain_sample

from megatron_pg import ContextRanks, Sample, StepPlan, pack
from megatron_pg.plan.errors import ScheduleError, StepPlanError
from megatron_pg.step import checks, schedule
from megatron_pg.step.context_groups import ContextGroups
from megatron_pg.step.findings import before_finalize
from megatron_pg.step.schedule import ScheduleCall


def refused(message: str | None) -> contextlib.AbstractContextManager:
    """A ScheduleError with the message; None: no error."""
    return contextlib.nullcontext() if message is None else pytest.raises(ScheduleError, match=message)


def sample(**changed: object) -> Sample:
    values = {"rollout_logprobs": [-1.5, -2.5], "ref_logprobs": [-1.25, -2.25], "advantage": [0.5, -0.5]}
    known = {"tokens": [1, 2, 3, 4], "old_logprobs": [-1.0, -2.0], "routed_experts": [[[0, 1]], [[2, 3]], [[4, 5]]]}
    return plain_sample(2, **known | values | changed)


def plan(denominator: float = 2.0) -> StepPlan:
    counted = ("samples", "rollouts", "tokens", "trained", "response_tokens", "positions")
    counts = {f"num_{name}": 1 for name in counted}
    denominators = torch.tensor([denominator], dtype=torch.float64)
    rest = dict.fromkeys(("divisor", "num_prompts", "facts")) | {"num_microbatches": 1, "number": 1}
    return StepPlan(aggregation="sample_mean", denominators=denominators, **counts, **rest)


@pytest.fixture
def one_part(monkeypatch):
    """Neither context nor pipeline parallelism."""
    for name in ("get_context_parallel_world_size", "get_pipeline_model_parallel_world_size"):
        monkeypatch.setattr(checks.parallel_state, name, lambda: 1)


def model_of(kind: str = "rope", **config: object) -> types.SimpleNamespace:
    """With 8 tokens and 4 positions."""
    shape = {"vocab_size": 8, "position_embedding_type": kind, "max_sequence_length": 4}
    return types.SimpleNamespace(config=types.SimpleNamespace(**config), **shape)


def schedule_call(model, **sizes: int) -> ScheduleCall:
    return ScheduleCall.of({"model": model, "data_iterator": None, "num_microbatches": 1, **sizes})


ALONE = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # a data-parallel group: all other ranks are peers


CHANGES = [
    *({}, {"tokens": [1, 2, 3, 5]}, {"tokens": [2, 2, 3, 4]}, {"loss_mask": [1, 0]}, {"old_logprobs": [-1.0, -2.125]}),
    *({"advantage": [0.5, 0.5]}, {"rollout_logprobs": [-1.5, -2.625]}, {"rollout_logprobs": None}),
    *({"ref_logprobs": [-1.25, -2.375]}, {"ref_logprobs": None}, {"reward": 1.0}, {"truncated": True}),
    *({"routed_experts": [[[0, 1]], [[2, 3]], [[4, 6]]]}, {"routed_experts": None}),
    *({"denominator": 4.0}, {"agreed": 7}, {"qkv_format": "bshd"}, {"weight_version": 3}, {"weight_version": [3, 4]}),
]


@pytest.mark.parametrize("changed", CHANGES, ids=str)
def test_peers_that_read_anything_else_stop_every_rank(changed):
    layouts = {"thd": {}, "bshd": {"max_seq_len": 4}}

    def work(rank: int) -> None:
        own = dict(changed) if rank else {}
        found, qkv_format = plan(own.pop("denominator", 2.0)), own.pop("qkv_format", "thd")
        found = dataclasses.replace(found, agreed=own.pop("agreed", 0))
        batch = pack([sample(**own)], qkv_format=qkv_format, **layouts[qkv_format])
        checks.check_agreement([batch.digest], found, None, ALONE)

    with refused("step plan differs between ranks 0 and 1" if changed else None):
        threads.run(2, work)


def test_a_token_id_outside_the_vocabulary_is_refused_in_the_padding_too(one_part):
    """An embedding is looked up for every position."""
    batch = pack([sample()], qkv_format="bshd", max_seq_len=6, rows=2)
    call = schedule_call(model_of(variable_seq_lengths=False), micro_batch_size=2, seq_length=6)
    checks.check_batches([batch], call)
    for row, position in [(0, 5), (1, 0)]:
        tokens = batch.tokens.clone()
        tokens[row, position] = 8
        with pytest.raises(ScheduleError, match="micro-batch 0 contains token id 8, and the vocabulary has 8"):
            checks.check_batches([dataclasses.replace(batch, tokens=tokens)], call)


@pytest.mark.parametrize("kind", [MambaMixer, GatedDeltaNet])
def test_layers_with_a_state_get_no_packed_rows(kind):
    """Wherever they lie; they need packages that run on a GPU only, so these have their class alone."""
    layer = type("Layer", (kind,), {"__init__": torch.nn.Module.__init__})()
    chunks = [torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1), layer)]
    padded, packed = pack([sample()], qkv_format="bshd", max_seq_len=4), pack([sample()], qkv_format="thd")
    checks.check_packing([padded, padded], chunks)
    checks.check_packing([packed], chunks[:1])
    with pytest.raises(ScheduleError, match=rf"has {kind.__name__} layers, whose state .* Give padded rows"):
        checks.check_packing([padded, packed], chunks)
    chunks[1].hybrid_layer_pattern = "*-|M-"
    with pytest.raises(ScheduleError, match=r"layers \(--hybrid-layer-pattern \*-\|M-\), whose"):
        checks.check_packing([packed], chunks)


@pytest.mark.parametrize(
    ("kind", "length", "is_refused"),
    [("learned_absolute", 4, False), ("learned_absolute", 5, True), ("rope", 5, False)],
)
def test_a_document_has_as_many_positions_as_the_model_has_learned_and_no_more(one_part, kind, length, is_refused):
    batch = pack([sample(), sample(tokens=[1] * length, routed_experts=None)], qkv_format="thd")
    call = schedule_call(model_of(kind, variable_seq_lengths=True), micro_batch_size=1, seq_length=4)
    with refused("micro-batch 0 contains a sample of 5 positions, and the model has 4" if is_refused else None):
        checks.check_batches([batch], call)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_leaves_the_models_config_as_it_was(fails):
    """Or every step would wrap the function of the one before once more."""
    calls, config = [], types.SimpleNamespace()
    original = config.finalize_model_grads_func = lambda *given: calls.append("finalize")

    def run() -> None:
        with before_finalize(config, lambda: calls.append("check")):
            config.finalize_model_grads_func([])
            if fails:
                raise ScheduleError("a mistake")

    for number in range(1, 3):
        with refused("a mistake" if fails else None):
            run()
        assert config.finalize_model_grads_func is original
        assert calls == ["check", "finalize"] * number


@pytest.mark.parametrize(
    ("changed", "stages", "message"),
    [
        ({"mtp_num_layers": 2}, 1, "mtp_num_layers of the model is 2, and that of the arguments is 1"),
        ({"mtp_num_layers": None}, 1, "mtp_num_layers of the model is 0, and that of the arguments is 1"),
        ({"mtp_grad_scale_func": abs}, 1, "config.mtp_grad_scale_func is set"),
        ({}, 2, "multi-token prediction with learned positions and pipeline parallelism"),
        ({}, 1, None),
    ],
)
def test_multi_token_prediction_that_would_escape_its_weights_is_refused(monkeypatch, changed, stages, message):
    monkeypatch.setattr(checks.parallel_state, "get_pipeline_model_parallel_world_size", lambda: stages)
    config = {"mtp_num_layers": 1, "calculate_per_token_loss": False, "finalize_model_grads_func": print} | changed
    model = model_of("learned_absolute", **config)
    model.post_process = True
    loss = dataclasses.replace(simulation.settings("sample_mean", per_token=False), mtp_depths=1)
    with refused(message):
        checks.check_model([model], loss, forward_only=False, is_attached=True)


@pytest.mark.parametrize(
    ("stages", "is_first", "group", "is_lost"),
    [(4, False, None, True), (4, False, ALONE, False), (4, True, None, False), (1, False, None, False)],
)
def test_an_embedding_whose_gradient_megatron_would_not_add_is_refused(monkeypatch, stages, is_first, group, is_lost):
    """A stage with predictions, in the middle of a layout, is not in the embedding group that Megatron makes itself."""
    monkeypatch.setattr(checks.parallel_state, "get_pipeline_model_parallel_world_size", lambda: stages)
    monkeypatch.setattr(checks.parallel_state, "get_embedding_group", lambda check_initialized: group)
    config = {"mtp_num_layers": 1, "calculate_per_token_loss": False, "finalize_model_grads_func": print}
    first, last = model_of(**config), model_of(**config)
    for chunk, has_predictions in ((first, False), (last, True)):
        vars(chunk).update(post_process=False, pre_process=is_first, mtp_process=has_predictions)
    loss = dataclasses.replace(simulation.settings("sample_mean", per_token=False), mtp_depths=1)
    with refused("outside Megatron's embedding group" if is_lost else None):
        checks.check_model([first, last], loss, forward_only=False, is_attached=True)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 2), (2, 0)])
def test_a_rank_whose_pipeline_stages_are_empty_has_a_device(monkeypatch, sizes):
    """As with `--pipeline-model-parallel-layout "E||tt|L"`."""
    monkeypatch.setattr(schedule, "device_of", lambda group: torch.device("cpu"))
    kinds = ([torch.nn.Linear(1, 1, device="meta")] * size for size in sizes)
    found = schedule_call([torch.nn.Sequential(*layers) for layers in kinds], seq_length=1, micro_batch_size=1).device
    assert found.type == ("meta" if any(sizes) else "cpu")


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize(("release", "granularity"), [("0.17.1", "full"), ("0.17.1", "selective"), ("0.19.2", "full")])
def test_recomputed_predictions_of_packed_rows_are_refused_where_megatron_fails(
    monkeypatch, one_part, qkv_format, release, granularity
):
    monkeypatch.setattr(checks, "core_version", lambda: tuple(map(int, release.split("."))))
    model = model_of(variable_seq_lengths=False, mtp_num_layers=1, recompute_granularity=granularity)
    batch = pack([sample()], qkv_format=qkv_format, max_seq_len=6)
    call = schedule_call(model, micro_batch_size=1, seq_length=6)
    fails = (qkv_format, release, granularity) == ("thd", "0.17.1", "full")
    with refused("raises a TypeError for packed rows" if fails else None):
        checks.check_batches([batch], call)


def test_a_peer_that_cannot_plan_is_named_on_every_rank():
    def work(rank: int) -> None:
        failure = StepPlanError("the sampler broke") if rank == 1 else None
        with pytest.raises(StepPlanError, match=r"^rank 1: the sampler broke$"):
            checks.check_agreement([], None if failure else plan(), failure, ALONE)

    threads.run(3, work)


def grouped(**changed: object) -> tuple[types.SimpleNamespace, types.SimpleNamespace]:
    """A model of one attention layer that supports micro-batches with their own ranks, with changes; and settings."""
    known = {"num_moe_experts": None, "multi_latent_attention": False, "cuda_graph_impl": "none"}
    core = types.SimpleNamespace(**({"cp_stream": changed.pop("cp_stream")} if "cp_stream" in changed else {}))
    settings = types.SimpleNamespace(mtp_depths=changed.pop("mtp_depths", 0))
    layer, wrapper = types.SimpleNamespace(core_attention=core), changed.pop("wrapper", {})
    config = types.SimpleNamespace(**known | changed)
    return types.SimpleNamespace(config=config, modules=lambda: [layer, types.SimpleNamespace()], **wrapper), settings


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, None),
        ({"cp_stream": "a stream"}, None),
        ({"mtp_depths": 1}, "multi-token prediction"),
        ({"num_moe_experts": 4}, "a mixture of experts"),
        ({"multi_latent_attention": True}, "multi-latent attention"),
        ({"cuda_graph_impl": "local"}, "captured layers"),
        ({"cp_stream": None}, "Transformer Engine with --context-parallel-size 1"),
        ({"documents": True}, "a DocumentAccumulator"),
        ({"stages": 2}, "pipeline parallelism"),
        ({"wrapper": {"param_and_grad_buffer": "a buffer"}}, "a wrapper that shards weights"),
    ],
    ids=str,
)
def test_what_ignores_a_micro_batchs_own_ranks_is_refused(monkeypatch, changed, named):
    changed = dict(changed)
    stages, documents = changed.pop("stages", 1), changed.pop("documents", False)
    monkeypatch.setattr(checks.parallel_state, "get_pipeline_model_parallel_world_size", lambda: stages)
    model, settings = grouped(**changed)
    with refused(named and f"cannot be combined with {named}"):
        checks.check_dynamic_cp([model], settings, takes_documents=documents)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, None),
        ({"num_moe_experts": 4, "moe_aux_loss_coeff": 0.0}, None),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "none"}, None),
        ({"num_moe_experts": 4}, "the router's own losses"),
        ({"num_moe_experts": 4, "moe_aux_loss_coeff": [0.0, 0.1]}, "the router's own losses"),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1}, "the router's own"),
        ({"expert_model_parallel_size": 2}, "expert parallelism"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"cuda_graph_impl": "local"}, "captured layers"),
        ({"wrapper": {"param_and_grad_buffer": "a buffer"}}, "FSDP"),
        ({"wrapper": {"ddp_config": types.SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=True)}}, "reuse_grad_buf"),
        ({"documents": True}, "--docs-per-step"),
        ({"dynamic_cp": True}, "dynamic_cp"),
    ],
    ids=str,
)
def test_what_joins_data_parallel_ranks_before_an_open_step_closes_is_refused(changed, named):
    changed = dict(changed)
    given = {"takes_documents": changed.pop("documents", False), "dynamic_cp": changed.pop("dynamic_cp", False)}
    wrapper = changed.pop("wrapper", {})
    usual = {"num_moe_experts": None, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    config = types.SimpleNamespace(**usual | {"moe_z_loss_coeff": None, "expert_model_parallel_size": 1} | changed)
    model = types.SimpleNamespace(config=config, **wrapper)
    with refused(named and f"cannot be combined with {named}"):
        checks.check_open([model], **given)


def test_a_micro_batch_may_have_its_own_ranks_only_in_a_step_that_uses_them():
    plain = pack([sample()], qkv_format="thd")
    own = {(f, n): pack([sample()], qkv_format="thd", cp_ranks=ContextRanks(f, n)) for f, n in [(1, 1), (0, 2), (0, 1)]}
    checks.check_cuts([plain, plain], None)
    with refused(r"micro-batch 1 has cp_ranks=ContextRanks\(first=0, size=2\), and the step uses"):
        checks.check_cuts([plain, own[0, 2]], None)

    def work(rank: int) -> None:
        groups = ContextGroups(torch.distributed.group.WORLD)
        checks.check_cuts([own[0, 2], own[rank, 1]], groups)
        assert [groups.of(own[0, 2]).size(), groups.of(own[rank, 1]).size()] == [2, 1]
        for wrong in (plain, own[1 - rank, 1]):
            with refused(r"micro-batch 1 has cp_ranks=.* under dynamic_cp, which is not a run"):
                checks.check_cuts([own[0, 2], wrong], groups)

    threads.run(2, work)


def test_layers_go_by_the_micro_batchs_group_while_a_step_runs_and_only_then():
    layers = [torch.nn.Linear(1, 1) for _ in range(2)]
    shared = types.SimpleNamespace(cp="Megatron's", tp="a")
    for layer in layers:
        layer.core_attention, layer.pg_collection = torch.nn.Identity(), shared
    model = torch.nn.Sequential(*layers)

    def work(rank: int) -> None:
        groups = ContextGroups(torch.distributed.group.WORLD)
        batch = pack([sample()], qkv_format="thd", cp_ranks=ContextRanks(0, 1))
        with groups.in_layers([model]):
            assert groups.use(batch) is groups.of(batch)
            assert all((each.pg_collection.cp, each.pg_collection.tp) == (groups.of(batch), "a") for each in layers)
            assert shared.cp == "Megatron's"
        assert all(each.pg_collection is shared for each in layers)

    threads.run(1, work)


def wrapped(kind: type, **config: object) -> object:
    """A wrapper of that kind, without the model in it."""
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = types.SimpleNamespace(**config)
    if kind is FullyShardedDataParallel:  # what its constructor sets
        model.param_and_grad_buffer, model.scale_gradients = object(), lambda factor: None
    return model


@pytest.mark.parametrize(
    ("kind", "release", "settings", "experts", "message"),
    [
        (TorchFullyShardedDataParallel, (0, 19, 2), {"per_token": True}, 8, "Use Megatron-FSDP"),
        (TorchFullyShardedDataParallel, (0, 19, 2), {"per_token": True}, None, None),
        (TorchFullyShardedDataParallel, (0, 19, 2), {"per_token": False}, 8, None),
        (TorchFullyShardedDataParallel, (0, 19, 2), {"head_mode": "recompute"}, None, "the fused head reads it later"),
        (FullyShardedDataParallel, (0, 19, 1), {"head_mode": "forward"}, None, "loses gradients"),
        (FullyShardedDataParallel, (0, 19, 2), {"head_mode": "forward"}, None, None),
        (FullyShardedDataParallel, (0, 16, 1), {"per_token": True}, 8, None),
        (DistributedDataParallel, (0, 16, 1), {"per_token": True, "head_mode": "forward"}, 8, None),
    ],
)
def test_what_a_sharding_wrapper_would_get_wrong_is_refused(monkeypatch, kind, release, settings, experts, message):
    monkeypatch.setattr(checks, "core_version", lambda: release)
    given = types.SimpleNamespace(**{"per_token": False, "head_mode": None} | settings)
    model = wrapped(kind, num_moe_experts=experts)
    assert checks.always_averages(model) == (kind is TorchFullyShardedDataParallel)
    with refused(message):
        checks._check_wrapper(model, given)
