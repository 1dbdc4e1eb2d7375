"""Divergences as kernels compute them: their source, in torch, against the forms that are the specification."""

import pytest
import torch

from megatron_pg.declarations.loss_terms import KINDS
from megatron_pg.kernels.triton import divergences
from megatron_pg.objectives.interface.token_kernel import in_torch
from megatron_pg.objectives.terms import topk

FORMS = [kind.function for kind in KINDS.values() if kind.reads_topk]
COUNT = 200_000
LIMIT = 4e-16  # of what the value is a sum of


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """log Q and log P of many categories: likely ones, unlikely ones, certain ones, equal ones, Q = 0."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.1, 2.0, 20.0, 300.0], dtype=torch.float64).repeat(COUNT // 4)
    log_q, log_p = (-scale * torch.rand(COUNT, dtype=torch.float64, generator=generator) for _ in range(2))
    log_p[:1000] = log_q[:1000]
    log_q[1000:2000] = 0.0
    log_p[2000:3000] = 0.0
    log_q[3000:4000] = -torch.inf
    log_p[4000:5000] = log_q[4000:5000] + 1e-9 * torch.randn(1000, dtype=torch.float64, generator=generator)
    return log_q, log_p


@pytest.mark.proof("Divergences of kernels against their forms in torch, 200,000 categories in float64: within 4e-16")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("share", [0.1, 0.5, 1 - 1e-6])
def test_a_row_is_the_form(name, share, evidence):
    log_q, log_p = drawn()
    expected = getattr(topk, name).__wrapped__(log_q, log_p, share)
    found = in_torch(getattr(divergences, name))(log_q, log_p, divergences.numbers_of(share))
    finite = log_q.clamp(min=-800)
    magnitude = torch.maximum(log_q, log_p).exp() * (1 + finite.abs() + log_p.abs())
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        errors = ((ours - theirs).abs() / magnitude)[theirs.isfinite()]
        worst = max(worst, float(errors.max()))
    evidence(cases=COUNT, worst=worst, tolerance=LIMIT)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("bad", [0, 1])
def test_what_is_not_a_number_is_seen(name, bad):
    values = [torch.tensor([-1.0, -30.0, 0.0], dtype=torch.float64) for _ in range(2)]
    values[bad] = values[bad] * torch.nan
    found, _ = in_torch(getattr(divergences, name))(*values, divergences.numbers_of(0.3))
    assert found.isnan().all()


@pytest.mark.parametrize("name", FORMS)
def test_it_is_finite_where_nothing_is(name):
    """A kernel evaluates categories that do not exist at 0 and 0, and drops what it finds."""
    nothing = torch.zeros(3, dtype=torch.float64)
    assert (
        torch.cat(in_torch(getattr(divergences, name))(nothing, nothing, divergences.numbers_of(None))).isfinite().all()
    )
