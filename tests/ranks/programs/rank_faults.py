"""Mistakes seeded into one step on real ranks, mostly on rank 1 alone; `ranks.py` asks for them by name."""

import argparse
import dataclasses
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import namespaces
import torch
from loss_terms import kl_and_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from rank_model import VOCABULARY, WIDTH
from samples import make_sample

from megatron_pg import add_value_head
from megatron_pg.batch import pack
from megatron_pg.declarations.corrections import PENALTY
from megatron_pg.declarations.loss_terms import AS_POLICY, LossTerm
from megatron_pg.kernels import LossTerms
from megatron_pg.objectives import objective_of
from megatron_pg.objectives.corrections.correction import Correction
from megatron_pg.plan.settings import LossSettings, metrics_of
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.payloads.topk import TokenSets
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.forward_step import PolicyGradientStep
from megatron_pg.step.mtp import DepthLoss


def on_rank_1() -> bool:
    return torch.distributed.get_rank() == 1


def settings(fault: str, loss: LossSettings) -> LossSettings:
    """The settings with the fault; those of klcov and gspo are no mistakes."""
    on_rl = {"aggregation": "token_mean", "on": "rl"}
    further = {
        "noref": lambda: kl_and_entropy(kl_coef=0.1, kl_estimator="k3"),
        "kepttaught": lambda: [LossTerm(name="teacher", kind="ce", **on_rl)],
        "noteacher": lambda: [LossTerm(name="teacher", kind="opd", estimator="k2", **on_rl)],
        "topk": lambda: [LossTerm(name="wide", kind="topk_forward_kl", tail_floor=1e-6, **on_rl)],
    }
    changes = {
        "reducer": lambda: {"reducer": breaking_reducer},
        "flag": lambda: {"per_token": False},
        "depths": lambda: {"mtp_depths": 2},
        "columns": lambda: {"vocab_size": VOCABULARY + 1},
        "wholecolumns": lambda: {"teacher_head": dataclasses.replace(loss.teacher_head, rows=VOCABULARY - 1)},
        "norollout": lambda: {"correction": Correction(name="tis", low=0.0, high=2.0)},
        "huge": lambda: {"correction": Correction(name="clip_cov", low=1.0, high=5.0, fraction=0.1)},
        "klcov": lambda: _penalty(loss),
        "gspo": lambda: {"terms": _sequences(loss)},
    }
    name = "topk" if fault.startswith("topk") else fault
    if name in further:
        return dataclasses.replace(loss, terms=dataclasses.replace(loss.terms, further=tuple(further[name]())))
    return dataclasses.replace(loss, **changes[name]()) if name in changes else loss


def _penalty(loss: LossSettings) -> dict[str, object]:
    """Tokens that are chosen from the whole step."""
    penalty = LossTerm(name=PENALTY, kind=PENALTY, weight=0.5, on="rl", aggregation=AS_POLICY, estimator="abs")
    terms = dataclasses.replace(loss.terms, objective=objective_of("reinforce_is"), further=(penalty,))
    correction = Correction(name=PENALTY, fraction=0.25, coef=0.5)
    return {"correction": correction, "terms": terms, "metrics": metrics_of("with_entropy", terms, correction)}


def _sequences(loss: LossSettings) -> LossTerms:
    """A term of whole sequences and one with its own weights."""
    gspo = objective_of("gspo", clip_eps_low=0.9, clip_eps_high=9.0)
    return dataclasses.replace(loss.terms, objective=gspo, further=kl_and_entropy(entropy_coef=0.1))


def breaking_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """A user's reducer that fails on the data of one rank."""
    if on_rank_1():
        raise RuntimeError("my reducer broke")
    return lambda x: sum((part * mask).sum() for part, mask in zip(x.split(response_lengths), loss_masks, strict=True))


def change_model(fault: str, model: torch.nn.Module) -> None:
    """NaN logits for one token id or a layer with a state, on rank 1 only; or an output layer, where there is one,
    that the float32
    head cannot replace."""
    if fault == "bias" and model.post_process:
        model.output_layer.bias = torch.nn.Parameter(torch.zeros(len(model.output_layer.weight)))
    if fault == "telayer" and model.post_process:
        model.output_layer = TELayer(model.output_layer)
    if fault == "softcap" and model.post_process:
        model.output_layer.__class__ = Capped
    if fault == "bypassed" and model.post_process:
        model.output_layer.__class__ = Bypassing
    if fault == "valued":
        add_value_head(model)
    if fault == "scaled" and model.post_process:
        model.output_layer.register_forward_hook(lambda layer, inputs, output: (output[0] * 0.5, output[1]))
    if fault == "mtpnan" and on_rank_1():
        torch.nn.init.constant_(model.mtp.layers[0].eh_proj.weight, float("nan"))
    if fault == "state" and on_rank_1():
        model.mixer = type("MambaMixer", (torch.nn.Module,), {})()
    if fault != "nan" or not on_rank_1():
        return
    original = model.output_layer.forward

    def forward(*args, **kwargs):
        logits, bias = original(*args, **kwargs)
        return logits * torch.where(torch.arange(logits.shape[-1]) == 3, float("nan"), 1.0), bias

    model.output_layer.forward = forward


def change_prediction(fault: str, step: PolicyGradientStep, model: torch.nn.Module) -> None:
    """ "plain": multi-token prediction trains by Megatron's own losses and divisors."""
    if "plain" not in fault:
        return

    def of_depth(forward, labels, logits, deferred):
        losses = type(model).compute_language_model_loss(model, labels, logits)
        forward.depths.append(DepthLoss(torch.zeros(()), losses, torch.zeros((), dtype=torch.int64)))
        return losses

    step._loss._of_depth = of_depth


class Capped(ColumnParallelLinear):
    """Caps the logits after the product, as the output layers of Gemma 2 and 4 do."""

    def forward(self, *args, **kwargs):
        logits, bias = super().forward(*args, **kwargs)
        return 30.0 * torch.tanh(logits / 30.0), bias


class Bypassing(ColumnParallelLinear):
    """Makes its logits without the product that a head replaces."""

    def forward(self, states, weight=None, runtime_gather_output=None):
        return states @ (self.weight if weight is None else weight).t(), None


class TELayer(torch.nn.Module):
    """Makes logits in its own way, as Transformer Engine's layer of --fp8-output-proj does."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.weight = layer.weight

    def forward(self, states, weight=None, runtime_gather_output=None):
        return states @ self.weight.t(), None


def batches(fault: str, parts: list[list], pack_all: Callable[[list[list]], list]) -> Iterator:
    """The step's micro-batches, with the fault in them; what fails to build fails inside the iterator."""
    parts = taught(parts) if fault.startswith("topk") else parts
    parts = with_sampling_masks(parts) if fault.startswith("kept") else parts
    change = DATA_FAULTS.get(fault)
    if change is not None and (on_rank_1() or fault in ON_EVERY_RANK):
        parts = change(parts)
    if fault == "positions":
        long = make_sample(prompt_length=WIDTH - 1, mask=[1, 1], rng=random.Random(0), prompt_id=0, rollout_id="r")
        yield from [pack([long], qkv_format="bshd", max_seq_len=WIDTH + 1, rows=1) for _ in range(2)]
    elif fault == "dict" and on_rank_1():
        yield {"tokens": [1, 2, 3]}
    else:
        yield from pack_all(parts)


def groups(fault: str, found: list[list[Sample]]) -> list[list[Sample]]:
    """The groups of one data-parallel rank; "unequal": tensor- or pipeline-parallel peers have them in another
    order."""
    if fault == "unequal" and on_rank_1():
        return found[::-1]
    if fault == "divided":  # the first sample of rank 1 belongs to a prompt group of rank 0
        return change_all(found[:1], prompt_id="shared") + found[1:]
    return found


def documents(fault: str, found: list[list[Sample]]) -> Iterator[list[Sample]]:
    """The documents of a rank, with the fault in them."""
    if fault == "masked":
        found = mask_everything(found)
    for number, group in enumerate(found):
        if on_rank_1() and number == len(found) - 1:
            if fault == "breaks":
                raise RuntimeError("the sampler broke")
            if fault == "toolong":
                mask = [1] * (3 * WIDTH)
                yield [make_sample(prompt_length=1, mask=mask, rng=random.Random(0), sample_id="a long one")]
        yield group


def arguments(fault: str, given: dict) -> dict:
    if fault == "shape":
        return given | {"seq_length": WIDTH + 8}
    if fault == "more" and on_rank_1():
        return given | {"num_microbatches": 3}
    if fault == "replaced" and on_rank_1():
        return given | {"forward_step_func": partial(with_another_loss_function, given["forward_step_func"])}
    return given


def with_another_loss_function(forward_step: Callable, *positional: object, **keywords: object) -> tuple:
    """A user's own forward step, which scales the loss itself."""
    output, _ = forward_step(*positional, **keywords)
    return output, lambda total: (total, torch.ones((), dtype=torch.int32), {"pg_loss": total.detach().expand(2)})


# --- data ---


def trained(parts: list[list[Sample]]) -> Sample:
    """The sample that a fault changes: the first with a trained token."""
    return next(sample for part in parts for sample in part if sample.num_trained)


def poison(field: str, parts: list[list[Sample]]) -> list[list[Sample]]:
    """NaN at a trained token of a sample that has passed its own checks."""
    sample = trained(parts)
    values = getattr(sample, field).clone()
    values[int(sample.loss_mask.nonzero()[0])] = float("nan")
    object.__setattr__(sample, field, values)
    return parts


def rebuilt(parts: list[list[Sample]], **changes: object) -> list[list[Sample]]:
    """The changed sample, built as a user builds it."""
    sample = trained(parts)
    fields = {
        "tokens": sample.tokens.tolist(),
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask.int().tolist(),
        "old_logprobs": [-1.0] * sample.response_length,
        "advantage": 1.0,
        "rollout_id": sample.rollout_id,
        "prompt_id": sample.prompt_id,
        "sample_id": sample.sample_id,
    }
    new = Sample.build(**fields | {name: change(fields[name]) for name, change in changes.items()})
    return [[new if sample is old else old for old in part] for part in parts]


def change_all(parts: list[list[Sample]], **fields: object) -> list[list[Sample]]:
    for part in parts:
        for sample in part:
            for name, value in fields.items():
                object.__setattr__(sample, name, value)
    return parts


def change_one(parts: list[list[Sample]], **fields: object) -> list[list[Sample]]:
    change_all([[trained(parts)]], **fields)
    return parts


def scale_advantages(parts: list[list[Sample]]) -> list[list[Sample]]:
    for part in parts:
        for sample in part:
            sample.advantages.mul_(-3.0)
    return parts


def mask_everything(parts: list[list[Sample]]) -> list[list[Sample]]:
    for part in parts:
        for sample in part:
            sample.loss_mask.zero_()
    return parts


def taught(parts: list[list[Sample]], token: int = 0) -> list[list[Sample]]:
    """With a teacher that names one token everywhere."""
    for sample in (sample for part in parts for sample in part):
        shape = sample.response_length, 1
        sets = TokenSets(ids=torch.full(shape, token, dtype=torch.int32), logprobs=torch.full(shape, -1.0))
        object.__setattr__(sample, "teacher_topk", sets)
    return parts


def poisoned_states(parts: list[list[Sample]]) -> list[list[Sample]]:
    """The sample built again, as a user builds it, with a number that is not finite."""
    states = trained(parts).teacher_hidden
    rest = {name: getattr(trained(parts), name) for name in ("tokens", "response_length", "loss_mask", "sample_id")}
    Sample.build(**rest, term="sft", teacher_hidden=torch.full_like(states, torch.nan))
    raise AssertionError("a number that is not finite was taken")


def with_sampling_masks(parts: list[list[Sample]]) -> list[list[Sample]]:
    """With the sampled token and another for each response token."""
    for sample in (sample for part in parts for sample in part):
        sets = [[token, (token + 1) % VOCABULARY] for token in sample.tokens[-sample.response_length :].tolist()]
        object.__setattr__(sample, "sampling_mask", PAYLOADS["sampling_mask"].of(sets, sample.sample_id))
    return parts


def sampling_mask_changed(parts: list[list[Sample]], change: Callable[[int], list[int]]) -> list[list[Sample]]:
    """At every response token of one sample: its set, from the token."""
    sample = trained(parts)
    sets = list(map(change, sample.tokens[-sample.response_length :].tolist()))
    object.__setattr__(sample, "sampling_mask", PAYLOADS["sampling_mask"].of(sets, sample.sample_id))
    return parts


def unknown_token(parts: list[list[Sample]]) -> list[list[Sample]]:
    parts[0][0].tokens[-1] = VOCABULARY
    return parts


def break_sampler(parts: list[list[Sample]]) -> list[list[Sample]]:
    raise RuntimeError("the sampler broke")


ON_EVERY_RANK = ("masked", "vocabulary")
DATA_FAULTS = {
    "peers": lambda parts: [parts[0][1:], parts[1]],
    "ended": lambda parts: parts[:1],
    "more": lambda parts: [*parts, []],
    "raises": break_sampler,
    "advantages": scale_advantages,
    "vocabulary": unknown_token,
    "masked": mask_everything,
    "nanold": lambda parts: poison("old_logprobs", parts),
    "nanadvantage": lambda parts: poison("advantages", parts),
    "buildold": lambda parts: rebuilt(parts, old_logprobs=lambda values: [float("nan")] * len(values)),
    "buildadvantage": lambda parts: rebuilt(parts, advantage=lambda value: float("inf")),
    "huge": lambda parts: rebuilt(parts, advantage=lambda value: 1e200),
    "positive": lambda parts: rebuilt(parts, old_logprobs=lambda values: [0.7] * len(values)),
    "masklength": lambda parts: rebuilt(parts, loss_mask=lambda values: [*values, 1]),
    "oldlength": lambda parts: rebuilt(parts, old_logprobs=lambda values: [*values, -1.0]),
    "fraction": lambda parts: rebuilt(parts, loss_mask=lambda values: [0.5] * len(values)),
    "noprompt": lambda parts: change_one(parts, prompt_id=None),
    "norollout": lambda parts: change_one(parts, rollout_logprobs=None),
    "noids": lambda parts: change_all(parts, rollout_id=None),
    "duplicate": lambda parts: change_one(parts, rollout_id="0/0", prompt_id=99),
    "novalues": lambda parts: change_one(parts, values=None),
    "criticalone": lambda parts: change_one(
        parts, **dict.fromkeys(("old_logprobs", "advantages")), returns=trained(parts).advantages
    ),
    "topkabsent": lambda parts: change_one(parts, teacher_topk=None),
    "topkempty": lambda parts: taught(parts, token=-1),
    "wholeabsent": lambda parts: change_one(parts, teacher_hidden=None),
    "wholewidth": lambda parts: change_one(parts, teacher_hidden=trained(parts).teacher_hidden[:, :5]),
    "wholeother": lambda parts: change_one(parts, teacher_hidden=trained(parts).teacher_hidden * 2),
    "wholenan": poisoned_states,
    "keptnowhere": lambda parts: change_all(parts, sampling_mask=None),
    "keptabsent": lambda parts: change_one(parts, sampling_mask=None),
    "keptoutside": lambda parts: sampling_mask_changed(parts, lambda token: [(token + 1) % VOCABULARY]),
    "keptbeyond": lambda parts: sampling_mask_changed(parts, lambda token: [token, VOCABULARY]),
    "keptother": lambda parts: sampling_mask_changed(parts, lambda token: [token, (token + 2) % VOCABULARY]),
    "keptwhole": lambda parts: sampling_mask_changed(parts, lambda token: [token]),
    "topkbeyond": lambda parts: taught(parts, token=VOCABULARY),
}


# --- startup ---

REDUCER = """\
def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    return lambda x: sum((p * m).sum() for p, m in zip(x.split(response_lengths), loss_masks, strict=True))
"""


def start_with(name: str, out: Path) -> None:
    """What `pretrain` does before the model is built, with an argument (or the reducer's source) that rank 1 has
    otherwise."""
    from megatron_pg.pretrain.startup import start

    args = namespaces.arguments()
    _change(args, name)
    rank = torch.distributed.get_rank()
    folder = out / f"{name}-{rank}"
    folder.mkdir()
    if not (name == "sourceless" and rank == 1):
        note = f"# {rank}\n" if name == "source" else ""
        (folder / "rank_reducer.py").write_text(REDUCER + note, encoding="utf-8")
    sys.path.insert(0, str(folder))
    sys.modules.pop("rank_reducer", None)
    importlib.invalidate_caches()
    try:
        start(args, lambda text: None, lambda: None)
    finally:
        sys.path.remove(str(folder))


def _change(args: argparse.Namespace, name: str) -> None:
    if name == "nan":  # refused by rule E8 on every rank, and equal
        args.loss_aggregation, args.loss_aggregation_divisor = "constant", float("nan")
    if name in ("source", "sourceless"):
        args.custom_pg_loss_reducer_function_path = "rank_reducer:reducer"
    if name in vars(args) and on_rank_1():  # the ranks are compared before a rule refuses the value
        setattr(args, name, True)
