"""slime and miles: gradients and metrics of our loss in their loops, on two real ranks.

In their own code where HOSTS (or SLIME, MILES) names their checkouts, by `make prove`; in a stand-in with their hooks
always.
"""

import random
import re
from functools import partial
from typing import NamedTuple

import host_cases as hosts
import host_runs
import launches
import pytest
import rollout_hosts
import simulation
import torch
from compare import OF_RANKS
from host_runs import LIMIT
from simulation import Layout

from megatron_pg.hosts.startup import check
from megatron_pg.plan.settings import LossSettings

HOSTS = ("slime", "miles")
LAYOUTS = tuple(hosts.LAYOUTS)
OF_PASSES = 3e-6  # nats, of float32 logits divided by 0.7
OF_SCALED_EXP = 5e-6  # whose exponents are near -60 and rounded to 2^-18 in float32
_KNOWN = pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentWarning")  # about the gradient of k3


@launches.launch
def stand_in(folder, full):
    return host_runs.figures(folder, "rollout_stand_in", full=full)


def own(folder, full, host: str) -> dict | None:
    path = host_runs.checkout(host.upper())
    return path and host_runs.figures(folder, f"{host}_host", full=full, **{host.upper(): path})


@launches.launch
def slime(folder, full):
    return own(folder, full, "slime")


@launches.launch
def miles(folder, full):
    return own(folder, full, "miles")


STAND_IN = "Hosts: the hooks of slime and miles in a stand-in, gradients on 2 real ranks equal plain loops"
LOOPS = {  # whose loop, and of which host: what its gradients prove
    ("a stand-in", "slime"): STAND_IN,
    ("a stand-in", "miles"): STAND_IN,
    ("its own", "slime"): "Hosts: slime's own code, from samples to gradients on 2 real ranks, equals plain loops",
    ("its own", "miles"): "Hosts: miles' own code, from samples to gradients on 2 real ranks, equals plain loops",
}
OF_CRITICS = {  # what those of critics prove
    "a stand-in": "Hosts: a critic under slime's and miles' hooks in a stand-in, on 2 real ranks, equals plain loops",
    "its own": "Hosts: a critic in slime's and miles' own code, on 2 real ranks, equals plain loops",
}
OWN, OF_MILES = [loop for loop in LOOPS if loop[0] == "its own"], [loop for loop in LOOPS if loop[1] == "miles"]
in_each = partial(pytest.mark.parametrize, "loop", indirect=True, ids=" ".join)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


class Loop(NamedTuple):
    """A host's loop, a stand-in or its own code, and its figures by layout."""

    host: str
    found: dict


@pytest.fixture
def loop(request, stand_in, slime, miles) -> Loop:
    kind, host = request.param
    found = {"slime": slime, "miles": miles}[host] if kind == "its own" else stand_in[host]
    if found is None:
        pytest.skip(f"needs a checkout of {host}: make prove HOSTS=FOLDER, or {host.upper()} in the environment")
    return Loop(host, found)


@pytest.mark.parametrize(
    "loop",
    [pytest.param(loop, marks=pytest.mark.proof(text), id=" ".join(loop)) for loop, text in LOOPS.items()],
    indirect=True,
)
def test_gradients_are_those_of_plain_loops(loop, full, evidence):
    of_cases = [pair for layout in LAYOUTS for pair in loop.found[layout]["errors"].items()]
    errors = [error for _, error in of_cases]
    assert len(errors) >= (3 * 16 if full else 16)
    assert max(error for name, error in of_cases if ", scaled_exp, " not in name) < LIMIT
    evidence(cases=len(errors), worst=max(errors), tolerance=OF_SCALED_EXP)


@every_layout
@in_each(LOOPS)
def test_gradients_of_a_teacher_and_of_supervised_samples_are_too(loop, layout, full):
    errors = loop.found[layout]["terms"].values()
    assert len(errors) == {"slime": 14, "miles": 10}[loop.host] // (1 if full else 2)
    assert max(errors) < LIMIT


@pytest.mark.parametrize(
    "loop",
    [pytest.param(loop, marks=pytest.mark.proof(OF_CRITICS[loop[0]]), id=" ".join(loop)) for loop in LOOPS],
    indirect=True,
)
def test_gradients_and_metrics_of_a_critic_are_too(loop, full, evidence):
    errors = [error for layout in LAYOUTS for error in loop.found[layout]["critics"].values()]
    assert len(errors) == len(LAYOUTS) * ((4 if full else 2) + (loop.host == "miles"))
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


@every_layout
@in_each(OF_MILES)
def test_gradients_of_padded_rows_are_too(loop, layout):
    errors = loop.found[layout]["padded"].values()
    assert len(errors) == 3
    assert max(errors) < LIMIT


@pytest.mark.proof("Hosts: slime's and miles' passes before training by the fused head: logprobs and entropies")
@in_each([loop for loop in LOOPS if loop not in OWN])
def test_a_fused_head_computes_log_probabilities_and_entropies_before_training(loop, evidence):
    errors = [error for layout in LAYOUTS for error in loop.found[layout]["passes"].values()]
    assert len(errors) == 2 * len(LAYOUTS)
    evidence(cases=len(errors), worst=max(errors), tolerance=OF_PASSES)


@every_layout
@in_each(OWN)
def test_the_hosts_own_default_and_ours_are_one_loss(loop, layout):
    """So a user can switch without a jump."""
    assert loop.found[layout]["jump"] < LIMIT


@_KNOWN
@every_layout
@in_each(LOOPS)
def test_metrics_are_those_of_one_process_on_the_same_samples(loop, layout):
    compare(loop.found[layout]["metrics"], without=_REWARDS if loop.host == "miles" else set())


def refused(stand_in: dict, host: str, fault: str) -> str:
    """The error of every rank."""
    (text,) = set(stand_in[host]["refused"][fault])
    return text


@pytest.mark.parametrize("host", HOSTS)
def test_a_trainer_that_computes_another_loss_stops_on_every_rank_before_the_optimizer_moves(stand_in, host):
    text = refused(stand_in, host, "their own loss")
    assert re.match(r"HostLossError: megatron_pg's loss was not computed exactly once .*\(0 steps\)$", text)


@pytest.mark.parametrize("host", HOSTS)
def test_a_trainer_that_copies_its_samples_stops_on_every_rank(stand_in, host):
    for text in stand_in[host]["refused"]["copied tokens"]:
        assert re.match(r"HostLossError: .*has copied the samples' tokens.*\(0 steps\)$", text)


@pytest.mark.parametrize("host", HOSTS)
def test_a_model_that_bypasses_the_float32_head_stops_every_rank_before_the_optimizer_moves(stand_in, host):
    expected = (
        r"ScheduleError: --fp32-lm-head and --pg-fused-head replace the product.*\(rank 1, 1 ranks\).*\(0 steps\)$"
    )
    assert re.match(expected, refused(stand_in, host, "bypassed head"))


@pytest.mark.parametrize("host", HOSTS)
def test_a_trainer_that_computes_log_probabilities_itself_under_the_fused_head_stops_on_every_rank(stand_in, host):
    text = refused(stand_in, host, "their own pass")
    assert re.match(r"HostLossError: .* by another function than megatron_pg's, .*\(0 steps\)$", text)


# Metrics that miles cannot have: its trainer has no rewards.
_REWARDS = {"reward", "reward_std", "max_reward", "min_reward", "num_rewards", "zero_variance_fraction"}


def compare(logged: list[dict], without: set[str]) -> None:
    case = rollout_hosts.MEASURED
    args = rollout_hosts.arguments("slime", case, pg_metrics="with_entropy")
    given = case.flags | {"pg_metrics": args.pg_metrics, "pg_clip_eps_high": args.eps_clip_high}
    settings = LossSettings.from_args(check("slime", given, megatron={}).args)
    steps = hosts.steps_of(hosts.samples(), case)
    assert len(logged) == len(steps) == 3
    embedding, head = hosts.parameters()
    for number, (found, samples) in enumerate(zip(logged, steps, strict=True)):
        logits = [embedding[sample.tokens] @ head.T for sample in samples]
        expected = simulation.run_step(samples, logits, Layout(), settings, random.Random(1)).metrics
        mine = {name.removeprefix("train/pg/"): value for name, value in found.items() if name != "train/step"}
        assert number == found["train/step"]  # as both number their steps
        assert mine.keys() - {"truncated_fraction"} - OF_RANKS == expected.keys() - without  # these samples do not say
        for name in mine.keys() & expected.keys():
            assert mine[name] == pytest.approx(expected[name], rel=2e-5, abs=2e-6), name


def test_documents_of_a_row_are_cut_as_the_host_cuts_them():
    """The padding is split by itself: otherwise positions of the last document would move between ranks."""
    from megatron_pg.batch import pack_row, slice_batch

    samples = hosts.samples()[:3]
    lengths = [-(-len(sample.tokens) // 4) * 4 for sample in samples]
    batch = pack_row(samples, [*lengths, 8])
    for rank in range(2):
        local = slice_batch(batch, {"weights": batch.loss_mask.double()}, cp_rank=rank, cp_size=2)
        parts = [
            torch.nn.functional.pad(s.tokens, (0, n - len(s.tokens))) for s, n in zip(samples, lengths, strict=True)
        ]
        cut = torch.cat([part.view(4, -1)[[rank, 3 - rank]].flatten() for part in [*parts, torch.zeros(8).long()]])
        assert torch.equal(local.inputs.tokens[0], cut)
