"""A critic's value head: float32 values, which model it fits, and that nothing needs Megatron to compute it."""

from types import SimpleNamespace

import pytest
import threads
import torch

from megatron_pg import add_value_head
from megatron_pg.lm_head.value_head import ValueHead, check_role

WIDTH = 8


class Layer(torch.nn.Module):
    """What a head reads of a ColumnParallelLinear."""

    def __init__(self, dtype=torch.float32, sequence_parallel=False, tp_group=None):
        super().__init__()
        self.config, self.input_size = SimpleNamespace(params_dtype=dtype), WIDTH
        self.sequence_parallel, self.tp_group = sequence_parallel, tp_group
        self.weight = torch.nn.Parameter(torch.ones(3, WIDTH, dtype=dtype))


class Model(torch.nn.Module):
    def __init__(self, *, post_process=True, tied=False, **layer):
        super().__init__()
        self.output_layer = Layer(**layer)
        self.post_process, self.share_embeddings_and_output_weights = post_process, tied


def test_values_of_bfloat16_states_are_their_float32_product():
    model = add_value_head(Model(dtype=torch.bfloat16))
    head, hidden = model.output_layer, torch.randn(5, 2, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert head.weight.dtype == torch.bfloat16
    assert not head.weight.any()  # the same on every rank, without random numbers
    head.weight.data.copy_(torch.linspace(-1, 1, WIDTH))
    values, bias = head(hidden, weight=None, runtime_gather_output=None)
    assert bias is None
    assert (values.shape, values.dtype) == ((5, 2, 1), torch.float32)
    expected = (hidden.double() * head.weight.detach().double()).sum(-1, keepdim=True)
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)


def test_under_sequence_parallelism_every_rank_has_all_values_and_the_gradient_of_its_own_positions():
    hidden = torch.randn(6, 1, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    factors = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None, None]

    def work(rank):
        group = threads.subgroup(lambda r: 0, 2, rank)
        head = ValueHead(Layer(torch.float64, True, group), torch.device("cpu"))
        head.weight.data.fill_(0.5)
        mine = hidden.chunk(2)[rank].clone().requires_grad_()
        values, _ = head(mine)
        (values * factors).sum().backward()
        return values.detach(), mine.grad, head.weight.grad, head.weight.sequence_parallel

    ranks = threads.run(2, work)
    for values, *_, is_summed in ranks:
        torch.testing.assert_close(values, 0.5 * hidden.sum(-1, keepdim=True), rtol=1e-12, atol=1e-12)
        assert is_summed  # by Megatron, over tensor-parallel ranks
    torch.testing.assert_close(torch.cat([grad for _, grad, *_ in ranks]), factors.expand_as(hidden) * 0.5)
    whole = (hidden * factors).sum((0, 1))[None]
    torch.testing.assert_close(sum(grad for _, _, grad, _ in ranks), whole, rtol=1e-12, atol=1e-12)


def test_a_stage_without_an_output_layer_stays_as_it_is():
    model = Model(post_process=False)
    layer = model.output_layer
    assert add_value_head(model).output_layer is layer


def test_a_head_that_is_the_embedding_is_refused():
    with pytest.raises(ValueError, match=r"shares the weight of its embedding.*--untie-embeddings-and-output-weights"):
        add_value_head(Model(tied=True))


def test_a_model_has_the_output_layer_of_its_role():
    head = add_value_head(Model()).output_layer
    check_role(head, is_critic=True)
    check_role(Layer(), is_critic=False)
    with pytest.raises(ValueError, match="needs a model with a value head, and its output layer is a Layer"):
        check_role(Layer(), is_critic=True)
    with pytest.raises(ValueError, match="has a value head, and the loss is that of a policy"):
        check_role(head, is_critic=False)
