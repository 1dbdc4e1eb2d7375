"""verl's worker with our engine on real ranks (`recipe_ranks`): gradients and metrics against plain loops in float64.

verl and its wheels are on PYTHONPATH.
"""

import itertools
import json
import math
import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import metric_oracle
import numpy as np
import stand_ins
import step_oracle
import token_oracle
import torch
import value_oracle
import verl_host as host
from host_cases import critic_documents, critic_values, through_head
from megatron.core import parallel_state
from step_oracle import Document, Settings
from torch import Tensor

from megatron_pg.hosts.step import HostStep
from megatron_pg.hosts.verl.options import MODES as MODES_OF_VERL
from megatron_pg.hosts.verl.options import checked
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.loss import microbatch_logprobs_loss

LAYOUTS = {
    "dp2": {},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2, whole sequences": {"tensor_model_parallel_size": 2},  # without sequence parallelism
}
LENGTHS = [3, 7, 3, 9, 5, 4, 8, 2, 6, 4, 6, 4]  # of the responses
MASKED = 5  # this sample trains no token
EPS = {"pg_clip_eps_low": 0.2, "pg_clip_eps_high": 0.28}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"pg_objective": "grpo", **EPS},
    "gspo": {"pg_objective": "gspo", **EPS},
    "cispo, TIS": {"pg_objective": "cispo,cap=1.3", "pg_correction": "tis,high=1.5"},
    "KL and entropy": {
        **{"pg_objective": "grpo", **EPS, "pg_kl_coef": 0.1, "pg_kl_estimator": "k3_weighted", "pg_entropy_coef": 0.05}
    },
}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    **{name: {"loss_aggregation": name} for name in ("sample_mean", "prompt_mean", "token_mean")},
    "constant": {"loss_aggregation": "constant", "loss_aggregation_divisor": 7.0},
}
STEPS = (1, 3)  # mini-batches of a batch
FAST = [  # of the cases: objective, aggregation, fused head, per-token flag, steps
    ("grpo", "sample_mean", False, False, 3),
    ("grpo", "constant", True, True, 1),
    ("gspo", "prompt_mean", True, False, 1),
    ("cispo, TIS", "token_mean", False, True, 3),
    ("KL and entropy", "token_mean", True, True, 3),
    ("KL and entropy", "sample_mean", False, False, 1),
]
TRITON = [  # through the interpreter, which is slow
    ("KL and entropy", "sample_mean", fused, False, 1, "triton") for fused in (False, True)
]


# --- the batch, and what the gradients should be ---


def embedding_and_head() -> tuple[np.ndarray, np.ndarray]:
    return tuple(each.double().numpy() for each in host.parameters())


def logprobs_of(tokens: Sequence[int], start: int) -> list[float]:
    """Log-probabilities of the tokens from `start` on, of the model that is trained."""
    embedding, head = embedding_and_head()
    rows = [head @ embedding[tokens[k - 1]] for k in range(start, len(tokens))]
    return [float(token_oracle.log_softmax(row, 1.0)[tokens[start + k]]) for k, row in enumerate(rows)]


def batch(*, one_each: bool = False) -> list[Sample]:
    """Three prompts with two rollouts, one of three samples on two ranks; with `one_each` each sample is a rollout."""
    rng, samples = random.Random(11), []
    for i, length in enumerate(LENGTHS):
        start = rng.randrange(1, 5)
        tokens = [rng.randrange(host.VOCABULARY) for _ in range(start + length)]
        new = logprobs_of(tokens, start)
        old = [min(x + rng.uniform(-0.5, 0.5), 0.0) for x in new]
        mask = [int(k == 0 or rng.random() < 0.7) for k in range(length)]
        reward = rng.uniform(-1.0, 1.0)  # of the row: a reward model may score every row of a rollout
        samples.append(
            Sample.build(
                tokens=tokens,
                response_length=length,
                loss_mask=[0] * length if i == MASKED else mask,
                old_logprobs=_float32(old),
                rollout_logprobs=_float32([min(x + rng.uniform(-0.6, 0.6), 0.0) for x in old]),
                ref_logprobs=_float32([min(x + rng.uniform(-0.5, 0.5), 0.0) for x in new]),
                advantage=_float32([reward + rng.uniform(-0.2, 0.2) for _ in mask]),
                reward=_float32([reward])[0],
                prompt_id=f"p{i // 4}",
                rollout_id=f"p{i // 4}/{i % 4 if one_each else int(i % 4 == 3)}",
                sample_id=str(i),
            )
        )
    return samples


def _float32(values: Sequence[float]) -> list[float]:
    """What verl's columns hold of them."""
    return torch.tensor(values, dtype=torch.float32).double().tolist()


def of_step(samples: Sequence[Sample], number: int, steps: int) -> Sequence[Sample]:
    size = len(samples) // steps
    return samples[number * size : (number + 1) * size]


def settings_of(options: dict[str, Any]) -> Settings:
    """The oracle's words for our options."""
    words = {name.removeprefix("pg_"): value for name, value in options.items()}
    words["objective"], numbers = _parted(words["objective"])
    words["correction"], bounds = _parted(words.get("correction", "none"))
    words |= {f"correction_{name}": value for name, value in bounds.items()}
    words["numbers"] = numbers | {name: words.pop(name) for name in token_oracle.RANGES if name in words}
    aggregation = words.pop("loss_aggregation")
    if divisor := words.pop("loss_aggregation_divisor", None):
        words["divisor"] = divisor
    return Settings(aggregation=aggregation, per_token=aggregation == "token_mean", **words)


def _parted(text: str) -> tuple[str, dict[str, float]]:
    """The name and the numbers of an objective or correction."""
    name, *options = text.split(",")
    return name, {option: float(value) for option, _, value in (each.partition("=") for each in options)}


def documents_of(samples: Sequence[Sample]) -> list[Document]:
    embedding, head = embedding_and_head()
    documents = []
    for sample in samples:
        start = len(sample.tokens) - sample.response_length
        fields = {"rollout": sample.rollout_logprobs, "ref": sample.ref_logprobs, "old": sample.old_logprobs}
        documents.append(
            Document(
                logits=embedding[sample.tokens[start - 1 : -1].numpy()] @ head.T,
                targets=sample.tokens[start:].numpy(),
                mask=sample.loss_mask.numpy(),
                advantages=sample.advantages.numpy(),
                rollout_id=sample.rollout_id,
                prompt_id=sample.prompt_id,
                **{name: values.numpy() for name, values in fields.items()},
            )
        )
    return documents


def expected(samples: Sequence[Sample], settings: Settings) -> tuple[list[Tensor], dict[str, float]]:
    """Gradients of embedding and head, and the metrics."""
    embedding, head = embedding_and_head()
    documents, nothing = documents_of(samples), [None] * len(samples)
    result = step_oracle.run(documents, settings)
    inputs = [sample.tokens[-sample.response_length - 1 : -1].numpy() for sample in samples]
    rewards = [sample.reward for sample in samples]
    metrics = metric_oracle.step_metrics(documents, settings, result.terms["rl"], rewards, nothing)
    metrics["pg_loss"] = result.pg_loss
    if settings.kl_coef:
        metrics |= {"loss": result.loss, "kl_loss": result.kl_loss, "entropy_loss": result.entropy_loss}
    return through_head(inputs, result.gradients, embedding, head), metrics


# --- one batch through verl ---


def error(found: dict[int, Tensor], wanted: Sequence[Tensor]) -> float:
    """Largest over parameters and ranks of the largest difference over the largest entry."""
    pairs = [(each, wanted[i]) for i, each in found.items()]
    return worst_of(max(float((f.double() - host.mine(e)).abs().max() / e.abs().max()) for f, e in pairs))


def worst_of(value: float) -> float:
    """Over the ranks; NaN stays."""
    every: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, value)
    return max(every, key=lambda each: math.inf if math.isnan(each) else each)


def train(
    verl: SimpleNamespace, worker: Any, samples: Sequence[Sample], steps: int, *, weighs: bool = False
) -> dict[str, float]:
    """Metrics of the steps over the batch, as verl's trainer logs them; the optimizer has the gradients.

    `weighs`: with weights of `algorithm.rollout_correction`.
    """
    ranks = parallel_state.get_data_parallel_world_size()
    own = samples[parallel_state.get_data_parallel_rank() :: ranks]
    size = len(samples) // steps
    data = host.batch_of(verl, own, actor_of(worker), mini_batch_size=size)
    if weighs:
        weights = [(sample.old_logprobs - sample.rollout_logprobs).exp().clamp(max=1.2).float() for sample in own]
        data["rollout_is_weights"] = host.nested(weights)
    output = worker.train_mini_batch(data)
    return {} if output is None else verl.metrics.reduce_metrics(verl.tensordicts.get(output, "metrics"))


def actor_of(worker: Any) -> Any:
    return worker.loss_fn.keywords["config"]


def case(
    verl: SimpleNamespace,
    folder: Path,
    objective: str,
    aggregation: str,
    fused: bool,
    per_token: bool,
    steps: int,
    kernel: str = "torch",
) -> dict[str, float]:
    options = OBJECTIVES[objective] | AGGREGATIONS[aggregation]
    path = folder / "metrics.jsonl"
    given = options | {"pg_metrics": "with_entropy", "pg_metrics_file": str(path), "pg_kernel": kernel}
    worker = host.worker(verl, host.actor_config(verl, options=given), per_token=per_token, fused=fused)
    samples = batch()
    logged = train(verl, worker, samples, steps)
    torch.distributed.barrier()
    worst, of_metrics, rows = 0.0, 0.0, []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [record["iteration"] for record in records] == list(range(1, steps + 1))
    for number in range(steps):
        part = of_step(samples, number, steps)
        gradients, metrics = expected(part, settings_of(options))
        worst = max(worst, error(worker.engine.optimizer.found[number], gradients))
        rows.append(metrics)
        of_metrics = max(of_metrics, _worst_metric(records[number], rows[-1]))
    if logged:
        reduced = {name: _over_steps(name, [row[name] for row in rows]) for name in rows[0]}
        of_metrics = max(of_metrics, _worst_metric({n.removeprefix("pg/"): v for n, v in logged.items()}, reduced))
    torch.distributed.barrier()
    if worker.engine._log is not None:
        worker.engine._log._file.close()
        path.unlink()
    return {"gradient": worst, "metrics": worst_of(of_metrics)}


def _worst_metric(found: dict[str, float], wanted: dict[str, float]) -> float:
    missing = wanted.keys() - found.keys()
    assert not missing, missing
    return max(abs(found[name] - value) / max(abs(value), 1.0) for name, value in wanted.items())


def _over_steps(name: str, values: list[float]) -> float:
    """What verl makes of a metric of several steps."""
    return max(values) if "max" in name else min(values) if "min" in name else sum(values) / len(values)


def cases(full: bool, layout: str) -> list[tuple]:
    every = itertools.product(OBJECTIVES, AGGREGATIONS, (False, True), (False, True), STEPS)
    whole = [each for each in every if not (each[1] == "prompt_mean" and each[4] > 1)]
    return [*whole, *(TRITON if layout in ("dp2", "tp2") else [])] if full else FAST[[*LAYOUTS].index(layout) % 2 :: 2]


# --- verl's own loss compared with ours ---

THEIRS: dict[str, dict[str, Any]] = {
    "default": {},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum-norm, clip-higher": {
        **{"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 64, "clip_ratio_high": 0.28}
    },
    "seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "KL and entropy": {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.05},
    "KL without a coefficient": {"use_kl_loss": True, "kl_loss_coef": 0.0},
    "rollout correction": {"weighs": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
}


def beside(verl: SimpleNamespace, flags: dict[str, Any], *, per_token: bool, steps: int) -> dict[str, Any]:
    """One configuration of verl in its own engine and in ours, without any option of ours."""
    found, flags = {}, dict(flags)
    weighs = flags.pop("weighs", False)
    for name, engine in (("theirs", verl.engine.MegatronEngineWithLMHead), ("ours", None)):
        worker = host.worker(verl, host.actor_config(verl, **flags), per_token=per_token, engine=engine)
        logged = train(verl, worker, batch(one_each=True), steps, weighs=weighs)
        found[name] = worker.engine.optimizer.found, logged
    both = zip(found["ours"][0], found["theirs"][0], strict=True)
    pairs = [(ours[i], theirs[i]) for ours, theirs in both for i in theirs]
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    losses = [logged.get("loss", 0.0) for _, logged in found.values()]
    jump = worst_of(abs(losses[0] - losses[1]) / max(abs(losses[0]), 1.0))
    return {"gradient": worst_of(worst), "loss": jump, "losses": losses}  # of rank 0


_NUMBERS = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.6, "tau_pos": 1.5, "tau_neg": 0.7}


def modes(verl: SimpleNamespace) -> dict[str, list[float]]:
    """By mode: errors of loss and gradient of our objective against verl's policy loss, random tokens, float64."""
    alone = [torch.distributed.new_group([r]) for r in range(torch.distributed.get_world_size())]
    mine, found = alone[torch.distributed.get_rank()], {}
    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([3, 7, 5, 6, 1, 7])
    mask = (torch.arange(7) < lengths[:, None]) & (torch.rand(6, 7, generator=generator) < 0.8)
    mask[:, 0] = True
    old, advantages = (torch.randn(6, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    old = -old.abs() - 0.1
    new = (old + 0.5 * torch.randn(6, 7, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    for mode in MODES_OF_VERL:
        policy_loss = verl.config.PolicyLossConfig(loss_mode=mode, dro_beta=0.3)
        actor = host.actor_config(verl, policy_loss=policy_loss, loss_agg_mode="seq-mean-token-mean", **_NUMBERS)
        theirs = new.clone().requires_grad_()
        loss, _ = verl.core_algos.get_policy_loss_fn(mode)(
            old, theirs, advantages, mask, "seq-mean-token-mean", actor, None
        )
        loss.backward()
        model = SimpleNamespace(mtp=SimpleNamespace(enable=False))
        actor.engine.use_remove_padding = True
        settings = LossSettings.from_args(checked(actor.engine, model, actor).args)
        samples = [
            Sample.build(tokens=[1] * (n + 1), response_length=n, loss_mask=m[:n], old_logprobs=o[:n], advantage=a[:n])
            for n, m, o, a in zip(lengths.tolist(), mask, old, advantages, strict=True)
        ]
        step = HostStep(settings, lambda samples=samples: samples, data=mine)
        ours = [row[:n].clone().requires_grad_() for n, row in zip(lengths.tolist(), new, strict=True)]
        local = step.slice(range(6), (lengths + 1).tolist())
        output = torch.cat([torch.nn.functional.pad(row, (0, 1)) for row in ours])
        own = step.keep(local, microbatch_logprobs_loss(output, None, local.fields, settings))
        own.backward()
        gradients = [(o.grad - t[: len(o)]).abs().max() for o, t in zip(ours, theirs.grad, strict=True)]
        assert min(float(row.grad.abs().max()) for row in ours) > 1e-4
        found[mode] = [float((own - loss).detach().abs()), float(max(gradients))]
    return found


def floor(verl: SimpleNamespace) -> float:
    """Error of verl's own engine and token mean with the per-token flag: its count of tokens is rounded down."""
    flags = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}
    worker = host.worker(
        verl, host.actor_config(verl, **flags), per_token=True, engine=verl.engine.MegatronEngineWithLMHead
    )
    train(verl, worker, batch(), 1)
    gradients, _ = expected(batch(), settings_of(OBJECTIVES["grpo"] | AGGREGATIONS["token_mean"]))
    return error(worker.engine.optimizer.found[0], gradients)


# --- critics ---

CRITICS = [  # aggregation, per-token flag, steps
    *itertools.product(AGGREGATIONS, (False, True), STEPS)
]
CLIP = 0.3
THEIR_CRITICS = [{}, {"loss_agg_mode": "seq-mean-token-mean"}, {"loss_agg_mode": "seq-mean-token-sum"}]


def with_values(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with a critic's old values and returns."""
    rng, found = random.Random(13), []
    for sample, values in zip(samples, critic_values(samples, *host.parameters(critic=True)), strict=True):
        old = [value + rng.uniform(-0.6, 0.6) for value in values]
        made = {"values": old, "returns": [rng.uniform(-1.0, 1.0) for _ in values]}
        found.append(replace(sample, **{k: torch.tensor(_float32(v)).double() for k, v in made.items()}))
    return found


def expected_of_critic(samples: Sequence[Sample], options: dict[str, Any]) -> tuple[list[Tensor], dict[str, float]]:
    documents = critic_documents(samples, *host.parameters(critic=True))
    found = value_oracle.run(documents, settings_of({"pg_objective": "grpo", **options}), CLIP)
    inputs = [sample.tokens[-sample.response_length - 1 : -1].numpy() for sample in samples]
    slopes = [slope[:, None] for slope in found.gradients]
    parameters = (each.double().numpy() for each in host.parameters(critic=True))
    assert 0 < found.metrics["value_clipped_fraction"] < 1
    return through_head(inputs, slopes, *parameters), found.metrics


def critic(verl: SimpleNamespace, folder: Path, aggregation: str, per_token: bool, steps: int) -> dict[str, float]:
    """Errors of gradients and metrics of a batch."""
    path, options = folder / "critic.jsonl", AGGREGATIONS[aggregation]
    config = host.critic_config(verl, options=options | {"pg_metrics_file": str(path)}, cliprange_value=CLIP)
    worker, samples = host.worker(verl, config, per_token=per_token), with_values(batch())
    logged = train(verl, worker, samples, steps)
    torch.distributed.barrier()
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    wanted = [expected_of_critic(of_step(samples, number, steps), options) for number in range(steps)]
    both = zip(worker.engine.optimizer.found, wanted, strict=True)
    worst = max(error(found, gradients) for found, (gradients, _) in both)
    of_metrics = max(_worst_metric(r, metrics) for r, (_, metrics) in zip(records, wanted, strict=True))
    if logged:
        mean = sum(metrics["value_loss"] for _, metrics in wanted) / steps
        of_metrics = max(of_metrics, *(abs(logged[name] - mean) for name in ("critic/vf_loss", "pg/value_loss")))
    torch.distributed.barrier()
    if worker.engine._log is not None:
        worker.engine._log._file.close()
        path.unlink()
    return {"gradient": worst, "metrics": worst_of(of_metrics)}


def critic_beside(verl: SimpleNamespace, flags: dict[str, Any], *, per_token: bool, steps: int) -> float:
    """Largest difference of the gradients of verl's own critic from those of ours, without any option of ours."""
    found = []
    for engine in (verl.engine.MegatronEngineWithValueHead, None):
        config = host.critic_config(verl, cliprange_value=CLIP, **flags)
        worker = host.worker(verl, config, per_token=per_token, engine=engine)
        assert hasattr(worker.engine, "_rows") == (engine is None)  # ours
        train(verl, worker, with_values(batch(one_each=True)), steps)
        found.append(worker.engine.optimizer.found)
    pairs = [(ours[i], theirs[i]) for theirs, ours in zip(*found, strict=True) for i in theirs]
    return worst_of(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))


# --- filling rows, log-probability passes, refusals ---


def filled(verl: SimpleNamespace, kinds: Sequence[tuple[bool, bool]]) -> float:
    """With rows that fill a batch up, which are not rollouts: at the start and in the middle, or all that a rank has.

    Each kind is whether they are in the middle, and whether rows are padded to one width (`use_remove_padding=False`).
    """
    options = OBJECTIVES["grpo"] | AGGREGATIONS["sample_mean"]
    samples, filling = batch(), [_filling(i) for i in range(12)]
    gradients, _ = expected(samples, settings_of(options))
    mixed = [*filling[:2], *samples[:6], *filling[2:4], *samples[6:]]
    apart = list(itertools.chain.from_iterable(zip(samples, filling, strict=True)))
    worst = 0.0
    for is_mixed, padded in kinds:
        rows = mixed if is_mixed else apart
        worker = host.worker(verl, host.actor_config(verl, options=options), padded=padded)
        train(verl, worker, rows, 1)
        worst = max(worst, error(worker.engine.optimizer.found[0], gradients))
    return worst


def _filling(number: int) -> Sample:
    zeros = {name: [0.0] for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")}
    ids = {"prompt_id": "pad0", "rollout_id": f"pad0/{number}"}
    return Sample.build(tokens=[1, 1, 1], response_length=1, loss_mask=[0], advantage=0.0, reward=0.0, **zeros, **ids)


def passes(verl: SimpleNamespace, *, temperature: float, **kind: bool) -> float:
    """Largest relative error of the log-probabilities and entropies that verl's pass before training makes."""
    worker = host.worker(verl, host.actor_config(verl, options={}), **kind)
    samples = batch()[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    data = host.batch_of(verl, samples, actor_of(worker), mini_batch_size=12)
    verl.tensordicts.assign_non_tensor(data, calculate_entropy=True, compute_loss=False, temperature=temperature)
    output = worker.infer_batch(data)
    if output is None:
        return worst_of(0.0)
    embedding, head = embedding_and_head()
    worst = 0.0
    rows = output["log_probs"].unbind(), output["entropy"].unbind()
    for sample, logprobs, entropies in zip(samples, *rows, strict=True):
        tokens = sample.tokens.tolist()
        for k in range(len(tokens) - 1):
            row = token_oracle.log_softmax(head @ embedding[tokens[k]], temperature)
            entropy = -math.fsum(math.exp(x) * x for x in row)
            pairs = (float(logprobs[k]), row[tokens[k + 1]]), (float(entropies[k]), entropy)
            worst = max(worst, *(abs(found - wanted) / max(abs(wanted), 1.0) for found, wanted in pairs))
    return worst_of(worst)


def resumed(verl: SimpleNamespace, folder: Path) -> list[list[int]]:
    """The steps in metrics.jsonl of a run and of its continuation, and the superseded steps."""
    path = folder / "resumed.jsonl"
    for is_first in (True, False):
        worker = host.worker(verl, host.actor_config(verl, options={"pg_metrics_file": str(path)}))
        if not is_first:
            worker.engine.load_checkpoint("checkpoints/global_step_1/actor")
        for _ in range(2 if is_first else 1):  # batches, the second of which is after the checkpoint
            train(verl, worker, batch(), 3)
        if worker.engine._log is not None:
            worker.engine._log._file.close()
        torch.distributed.barrier()
    both = (path, path.with_name("resumed.jsonl.1"))
    return [[json.loads(line)["iteration"] for line in each.read_text(encoding="utf-8").splitlines()] for each in both]


def worker_configured(verl: SimpleNamespace) -> dict[str, Any]:
    """What verl's worker makes of its configurations before it builds a model."""
    import hydra
    import verl as package

    convert, found = verl.workers.omega_conf_to_dataclass, {}
    folder = Path(package.__file__).parent / "trainer" / "config"
    means = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        whole = hydra.compose("ppo_megatron_trainer", ["data.max_response_length=77", means, *_SIZES])
        fsdp = hydra.compose("ppo_trainer", _SIZES)
    actor = convert(whole.actor_rollout_ref.actor)
    settings = host.worker(verl, actor).engine._settings
    found["divisor"] = [settings.aggregation, settings.divisor]
    whole.distillation.enabled = True
    theirs = verl.config.McoreCriticConfig(use_dynamic_bsz=True, model=SimpleNamespace(external_lib=None))
    found["verl's own critic"] = [name for name in vars(theirs.engine) if "megatron_pg" in name]
    model = SimpleNamespace(external_lib="megatron_pg.verl")
    for name, make in {
        "fsdp": lambda: convert(fsdp.actor_rollout_ref.actor),
        "distillation": lambda: convert(whole.distillation),
        "critic": lambda: verl.config.FSDPCriticConfig(use_dynamic_bsz=True, model=model),
    }.items():
        try:
            make()
        except ValueError as refused:
            found[name] = str(refused)
    return found


_SIZES = ["actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.model.path=toy"]


def configured(verl: SimpleNamespace) -> dict[str, Any]:
    """What our engine is told by the lines of docs/hosts/verl.md, composed by hydra from verl's own files."""
    import hydra
    import verl as package
    from verl.utils.config import omega_conf_to_dataclass

    page = (Path(__file__).parents[3] / "docs" / "hosts" / "verl.md").read_text(encoding="utf-8")
    page = page.replace("$PG", re.search(r"^PG=(.*)$", page, re.MULTILINE)[1])  # a variable of the page's script
    lines = re.findall(r"^    (\"?\+?actor_rollout_ref.*?)(?: \\)?$", page, re.MULTILINE)
    own = [line.strip('"') for line in lines]
    theirs = ["actor.clip_ratio_high=0.28", "actor.use_kl_loss=True", "actor.kl_loss_type=mse"]
    more = [f"actor_rollout_ref.{each}" for each in (*theirs, "actor.use_dynamic_bsz=True", "model.path=toy")]
    folder = Path(package.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        whole = hydra.compose("ppo_megatron_trainer", overrides=[*own, *more])
    actor = omega_conf_to_dataclass(whole.actor_rollout_ref.actor)
    actor.engine.override_mcore_model_config["megatron_pg"]["pg_correction"] = "tis"
    found = host.worker(verl, actor).engine._settings
    return {
        "aggregation": [found.aggregation, found.divisor],
        "objective": [found.terms.objective.name, found.terms.objective.parameters.clip_eps_high],
        "correction": found.correction.name,
        "kl_coef": found.terms.further[0].weight if found.terms.further else 0.0,
    }


def refusals(verl: SimpleNamespace) -> dict[str, str]:
    """What the first batch is refused for."""

    def of(change=lambda data, worker: None, steps: int = 1, **options: Any) -> str:
        worker = host.worker(verl, host.actor_config(verl, options=options))
        own = batch()[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
        data = host.batch_of(verl, own, actor_of(worker), mini_batch_size=12 // steps)
        change(data, worker)
        try:
            worker.train_mini_batch(data)
        except ValueError as refused:
            return str(refused)
        return "accepted"

    def weigh(data, worker) -> None:
        data["rollout_is_weights"] = data["advantages"]

    def distill(data, worker) -> None:
        worker.loss_fn = verl.losses.sft_loss

    def spoil(data, worker) -> None:
        if torch.distributed.get_rank() == 0:
            worker.engine.module[0].module.output_layer.weight.data[0, 0] = math.nan

    return {
        "several mini-batches": of(steps=3, loss_aggregation="prompt_mean"),
        "rollout correction": of(weigh, pg_correction="tis"),
        "another loss": of(distill),
        "not finite": of(spoil),
    }


def figures() -> dict[str, Any]:
    """By layout, and what does not depend on it."""
    folder, full = Path(sys.argv[1]), "FULL" in os.environ
    verl = host.load()
    import megatron_pg.verl  # noqa: F401, what model.external_lib does

    found: dict[str, Any] = {}
    for layout, sizes in LAYOUTS.items():
        parallel_state.initialize_model_parallel(**sizes)
        host.SEQUENCE_PARALLEL = layout != "tp2, whole sequences"
        of_cases = {", ".join(map(str, each)): case(verl, folder, *each) for each in cases(full, layout)}
        number, kinds = [*LAYOUTS].index(layout), [*itertools.product((True, False), repeat=2)]
        found[layout] = {"cases": of_cases, "filled": filled(verl, kinds if full else [kinds[number % 4]])}
        if full or layout in ("dp2", "cp2"):
            found[layout]["floor"] = floor(verl)
        critics = CRITICS if full else [CRITICS[number], CRITICS[-1 - number]]
        critics = [each for each in critics if not (each[0] == "prompt_mean" and each[2] > 1)]
        found[layout]["critics"] = {str(each): critic(verl, folder, *each) for each in critics}
        kinds = [*itertools.product((False, True), STEPS)] if full else [(number % 2 == 0, 3)]
        found[layout]["critics compared"] = [
            critic_beside(verl, flags, per_token=per_token, steps=steps)
            for flags in (THEIR_CRITICS if full else [THEIR_CRITICS[number % 3]])
            for per_token, steps in kinds
            if not (per_token and layout == "cp2")  # see `floor`
        ]
        temperatures = (1.0, 0.7) if full else (0.7,)
        pairs = itertools.product(({}, {"fused": True}, {"padded": True}), temperatures)
        found[layout]["passes"] = [passes(verl, **kind, temperature=tau) for kind, tau in pairs]
        of_theirs = THEIRS if full else {name: THEIRS[name] for name in [("default", "rollout correction")[number % 2]]}
        kinds = [(False, 1), (False, 3), (True, 1), (True, 3)] if full else [(False, 3)]
        found[layout]["compared"] = {
            f"{name}, {per_token}, {steps}": beside(verl, flags, per_token=per_token, steps=steps)
            for name, flags in of_theirs.items()
            for per_token, steps in kinds
            if not (per_token and layout == "cp2")  # see `floor`
        }
        if layout == "dp2":
            found["configured"], found["modes"] = configured(verl), modes(verl)
            found["worker"] = worker_configured(verl)
            found["refused"], found["resumed"] = refusals(verl), resumed(verl, folder)
        parallel_state.destroy_model_parallel()
    return found | {"absent": sorted(stand_ins.USED)}
