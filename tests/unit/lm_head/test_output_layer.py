"""The head in Megatron's output layer: which layers it can stand for, and that what it returns comes back as it was."""

import functools
from types import SimpleNamespace

import pytest
import threads
import torch
from capped_layers import Gemma2OutputLayer, put_cap_into
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

from megatron_pg.hosts.head import HostHead
from megatron_pg.lm_head.output_layer import DeferredHead, check_layer, check_softcap, compute_in_float32, softcap_of
from megatron_pg.metrics import Reduction
from megatron_pg.plan.errors import ScheduleError
from megatron_pg.step.findings import gather_found
from megatron_pg.step.loss import Diagnostics

ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
WIDTH, VOCABULARY, CAP = 8, 12, 0.5
MODES = ["forward", "recompute", "scaled_exp", None]  # None: float32 logits


def softcap(logits):
    return CAP * torch.tanh(logits / CAP)


class Capped(ColumnParallelLinear):
    """A subclass with a final softcap, as Megatron-Bridge's layers of Gemma 2 and 4 are."""

    def forward(self, *args, **kwargs):
        logits, bias = super().forward(*args, **kwargs)
        return softcap(logits), bias


class OtherProduct(ColumnParallelLinear):
    """A subclass that multiplies in its own way."""

    def _forward_impl(self, input, weight, *args, **kwargs):
        return softcap(input @ weight.t())


class Bypassing(ColumnParallelLinear):
    """A subclass whose forward does not call `_forward_impl`."""

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_ @ self.weight.t(), None


class Same(ColumnParallelLinear):
    """A subclass that adds nothing to the forward, as sharding wrappers make one."""


class WithLoss(ColumnParallelLinear):
    """Megatron's LinearCrossEntropyModule, which releases on the package registry do not have."""

    def forward(self, input_, weight=None, runtime_gather_output=None, output_cross_entropy_loss=False, labels=None):
        assert (output_cross_entropy_loss, labels) == (False, None)
        return super().forward(input_, weight, runtime_gather_output)

    forward.__module__ = "megatron.core.transformer.linear_cross_entropy"
    forward.__qualname__ = "LinearCrossEntropyModule.forward"


def layer_of(kind: type = ColumnParallelLinear) -> ColumnParallelLinear:
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, use_cpu_initialization=True)
    return kind(WIDTH, VOCABULARY, config=config, init_method=torch.nn.init.normal_, bias=False, tp_group=ALONE)


def changed_by(change: str) -> ColumnParallelLinear:
    layer = layer_of({"subclass": Capped, "product": OtherProduct}.get(change, ColumnParallelLinear))
    if change == "instance":
        original = layer.forward
        layer.forward = lambda *args, **kwargs: (softcap(original(*args, **kwargs)[0]), None)
    if change == "wraps":  # an instance attribute that has the original's name
        original = layer.forward

        @functools.wraps(original)
        def forward(*args, **kwargs):
            return softcap(original(*args, **kwargs)[0]), None

        layer.forward = forward
    if change == "instance product":
        layer._forward_impl = lambda input, weight, **rest: softcap(input @ weight.t())
    return layer


def head_in(layer: ColumnParallelLinear, mode: str | None) -> HostHead:
    settings = SimpleNamespace(float32_logits=mode is None, head_mode=mode, head_backward="bf16")
    head = HostHead(settings)
    head.install([SimpleNamespace(output_layer=layer)])
    return head


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("subclass", r"test_output_layer\.Capped has its own forward"),
        ("instance", r"megatron\.core\.tensor_parallel\.layers\.ColumnParallelLinear has its own forward"),
        ("wraps", r"layers\.ColumnParallelLinear has its own forward"),
        ("product", r"test_output_layer\.OtherProduct has its own _forward_impl"),
        ("instance product", r"layers\.ColumnParallelLinear has its own _forward_impl"),
    ],
)
def test_an_output_layer_that_does_more_than_the_product_is_refused_by_name(change, message, mode):
    layer = changed_by(change)
    if mode is None and "_forward_impl" not in message:  # what follows the product sees the float32 logits
        head_in(layer, mode)
        states = torch.randn(3, 1, WIDTH, dtype=torch.float32)
        wanted = softcap(states.double() @ layer.weight.double().t())
        torch.testing.assert_close(layer(states)[0].double(), wanted, rtol=0, atol=1e-6)
        return
    with pytest.raises(ValueError, match=message):
        head_in(layer, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, Same, WithLoss])
def test_megatrons_own_forward_is_accepted_and_stays_so_with_the_head_in_it(kind, mode):
    layer = layer_of(kind)
    head = head_in(layer, mode)
    head.install([SimpleNamespace(output_layer=layer)])
    check_layer(layer, is_fused=mode is not None)
    check_softcap(layer, CAP)
    states = torch.randn(3, 1, WIDTH)
    returned, _ = layer(states)
    if mode is None:
        torch.testing.assert_close(returned, states @ layer.weight.t())
    else:
        torch.testing.assert_close(head.take(returned).hidden, states, rtol=0, atol=0)


def test_a_product_that_is_replaced_over_the_head_is_refused():
    layer = layer_of()
    head = head_in(layer, "forward")
    layer._forward_impl = lambda **arguments: arguments["input"]
    with pytest.raises(ValueError, match="has its own _forward_impl"):
        head.install([SimpleNamespace(output_layer=layer)])


CHANGES = {
    "softcap": lambda logits: 1000.0 * torch.tanh(logits / 1000.0),
    "scale": lambda logits: logits * 0.99,
    "bias": lambda logits: logits + 1e-3,
    "clamp": lambda logits: logits.clamp(max=5e3),
    "columns": lambda logits: torch.cat([logits, logits], dim=-1),
}
KEPT = {
    "itself": lambda logits: logits,
    "layout": lambda logits: logits.transpose(0, 1).contiguous(),
    "float32": lambda logits: logits.float(),
    "host": lambda logits: logits.transpose(0, 1).contiguous().float(),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("change", [*CHANGES, *KEPT])
def test_a_change_of_what_the_layer_returned_is_noticed_in_every_layout_and_dtype(change, dtype):
    layer, deferred = layer_of().to(dtype), DeferredHead()
    compute_in_float32(layer, backward="bf16")
    deferred.put_into(layer, lambda: True)
    states = torch.randn(3, 2, WIDTH, dtype=dtype)
    stand_in, _ = layer(states)
    call = deferred.take((CHANGES | KEPT)[change](stand_in))
    assert torch.equal(call.hidden, states)
    assert bool(call.is_changed) == (change in CHANGES)
    stand_in, _ = layer(states)
    assert bool(deferred.take(stand_in).is_changed) == (change in CHANGES)


@pytest.mark.parametrize("changes", [True, False])
def test_a_forward_hook_is_noticed_where_it_changes_the_output(changes):
    layer, deferred = layer_of(), DeferredHead()
    deferred.put_into(layer, lambda: True)
    layer.register_forward_hook(lambda module, inputs, output: (softcap(output[0]), None) if changes else None)
    check_layer(layer, is_fused=True)
    call = deferred.take(layer(torch.randn(3, 2, WIDTH))[0])
    assert bool(call.is_changed) == changes


def bridge_layer(cap: float = CAP) -> ColumnParallelLinear:
    layer = layer_of()
    put_cap_into(layer, cap)
    return layer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cap", [0.3, 30.1, 1e6])
def test_the_softcap_of_megatron_bridge_is_detected_and_belongs_to_the_call(cap, dtype):
    """It is not a change of what the layer returned; one more change is."""
    layer = bridge_layer(cap).to(dtype)
    assert softcap_of(layer) == cap
    head, states = head_in(layer, "forward"), torch.randn(3, 2, WIDTH, dtype=dtype)
    for change, is_changed in ((torch.Tensor.float, False), (lambda logits: logits * 0.9, True)):
        call = head.take(change(layer(states)[0]))
        assert call.softcap == cap
        assert bool(call.is_changed) == is_changed


def test_a_softcap_that_is_not_megatron_bridges_is_unknown():
    unknown, instance, none = bridge_layer(), bridge_layer(), bridge_layer(0.0)
    unknown.__class__ = type("ColumnParallelLinear", (Gemma2OutputLayer, Capped), {})  # caps a second time
    own = instance.forward
    instance.forward = lambda *args: own(*args)
    assert [softcap_of(each) for each in (layer_of(), layer_of(Capped), unknown, instance, none)] == [None] * 5
    for layer in (unknown, instance):
        with pytest.raises(ValueError, match="computes the product of the output layer and a known softcap"):
            check_layer(layer, is_fused=True)


def test_the_flag_is_refused_where_the_layer_caps_or_may_cap():
    for layer in (layer_of(), layer_of(Same)):
        check_softcap(layer, 30.0)
    check_softcap(layer_of(Capped), None)
    with pytest.raises(
        ValueError, match=r"^--pg-logit-softcap 30 .* ColumnParallelLinear caps logits at 0.5\. Remove the flag"
    ):
        check_softcap(bridge_layer(), 30.0)
    with pytest.raises(ValueError, match=r"^--pg-logit-softcap 30 .* may change logits. Remove the flag"):
        check_softcap(layer_of(Capped), 30.0)


def test_two_models_in_turn_have_their_own_calls():
    """A host may train two models in one process, each of which was given the head once."""
    layers = [layer_of(), layer_of()]
    head = head_in(layers[0], "forward")
    head.install([SimpleNamespace(output_layer=layers[1])])
    for layer in (*layers, *layers):
        states = torch.randn(3, 2, WIDTH)
        call = head.take(layer(states)[0])
        assert torch.equal(call.hidden, states)
        assert call.weight is layer.weight
        assert not call.is_changed
    assert not head.is_waiting
    stand_in, _ = layers[0].eval()(states)  # the pass before training, which takes no logits either
    assert head.is_waiting
    assert torch.equal(head.take(stand_in).hidden, states)
    assert not head.is_waiting


def test_a_refusal_on_the_last_stage_stops_every_rank():
    """The first stage has no output layer and would wait in the step's exchange."""
    layer = layer_of(Capped)

    def work(rank: int) -> str:
        head = HostHead(SimpleNamespace(float32_logits=False, head_mode="forward", head_backward="bf16"))
        chunk = SimpleNamespace(output_layer=layer) if rank else SimpleNamespace()
        group = [torch.distributed.new_group([each]) for each in range(2)][rank]
        with pytest.raises(ValueError, match="has its own forward") as error:
            head.install([chunk], group)
        return type(error.value).__name__

    assert threads.run(2, work) == ["StepPlanError"] * 2


@pytest.mark.parametrize("kind", [ColumnParallelLinear, Capped, Bypassing])
def test_a_forward_without_the_float32_product_is_noticed_in_every_forward(kind):
    layers = [layer_of(kind), layer_of(kind)]
    head = head_in(layers[0], None)
    head.install([SimpleNamespace(output_layer=layers[1])])
    for layer in (*layers, *layers):
        layer(torch.randn(3, 1, WIDTH))
        assert head.is_bypassed() == (kind is Bypassing)
    assert head.is_bypassed()  # no forward since the last question


def test_a_layer_without_a_head_is_never_bypassed():
    settings = SimpleNamespace(float32_logits=False, head_mode=None, head_backward="bf16")
    head = HostHead(settings)
    head.install([SimpleNamespace(output_layer=layer_of(Bypassing))])
    assert not head.is_bypassed()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"is_changed": torch.tensor(True)}, "--pg-fused-head takes the hidden states"),
        ({"is_bypassed": True}, "--fp32-lm-head and --pg-fused-head replace the product"),
    ],
)
def test_a_mistake_on_one_rank_is_a_named_error_of_the_step_on_every_rank(mistake, message):
    local, metrics = object(), Reduction("none")

    def work(rank: int) -> str:
        nothing = torch.tensor([0.0, torch.inf, 0.0], dtype=torch.float64)
        partial = torch.zeros(metrics.width, dtype=torch.float64)
        found = {local: Diagnostics(None, partial, nothing, **(mistake if rank else {}))}
        with pytest.raises(ScheduleError, match=rf"^{message} .* \(rank 1, 1 ranks\)") as error:
            gather_found(found, metrics, reports=True)
        return type(error.value).__name__

    assert threads.run(2, work) == ["ScheduleError"] * 2
