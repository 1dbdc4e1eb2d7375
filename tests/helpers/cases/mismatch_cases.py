"""Rollouts of a small GPT with a known fault between trainer and engine, at three strengths; and clean ones.

Both sides are computed from logits: the engine's are those that drew the tokens, the trainer's have the fault. What is
drawn is drawn from the engine's distribution, as in reality. The package is not used.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from language import PROMPT, Parameters, Text, head, hidden, sample
from torch import Tensor

STRENGTHS = ("weak", "medium", "strong")
LENGTH = 128


@dataclass
class Drawn:
    """Documents of one step of sampling, and both sides' log-probabilities of their response tokens."""

    tokens: Tensor  # [B, PROMPT + L]
    engine: Tensor  # [B, L] float64 log-probabilities
    trainer: Tensor  # [B, L]
    step: list[int]
    weight_version: list[int | None]
    worker: list[str | None]
    rank: list[int | None]
    topk: tuple[Tensor, Tensor] | None = None  # [B, L, K] ids and log-probabilities of the engine's top-k tokens
    group: int = 1  # documents of a prompt
    truth: dict[str, str] = field(default_factory=dict)  # cause: strength

    def records(self) -> list[dict]:
        """The samples as lines of a rollout file."""
        length = self.engine.shape[1]
        origins = {"weight_version": self.weight_version, "worker": self.worker, "data_parallel_rank": self.rank}
        return [
            {
                "step": self.step[i],
                "prompt_id": i // self.group,
                "rollout_id": i,
                "tokens": self.tokens[i].tolist(),
                "response_length": length,
                "loss_mask": [1] * length,
                "old_logprobs": self.trainer[i].tolist(),
                "rollout_logprobs": self.engine[i].tolist(),
                "reward": 0.0,
                "advantage": 0.0,
            }
            | {name: values[i] for name, values in origins.items() if values[i] is not None}
            | ({} if self.topk is None else {"rollout_topk": self._topk(i)})
            for i in range(len(self.step))
        ]

    def _topk(self, i: int) -> dict[str, Tensor]:
        ids, logprobs = (each[i] for each in self.topk)
        return {"ids": torch.where(logprobs > -torch.inf, ids, -1).int(), "logprobs": logprobs.clamp(min=-1e30)}


@dataclass(eq=False)
class World:
    """A model, how sharp its distributions are, and how noisy its arithmetic."""

    text: Text
    parameters: Parameters
    sharpness: float = 2.0
    noise: float = 1.0  # 1: of a bfloat16 forward against a float32 one
    documents: int = 128
    seed: int = 0
    length: int = LENGTH
    group: int = 1  # documents of a prompt

    def generator(self, salt: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + salt)

    def prompts(self) -> Tensor:
        begin = torch.randint(0, len(self.text.ids) - PROMPT, (self.documents,), generator=self.generator(1))
        begin = begin[:: self.group].repeat_interleave(self.group)[: self.documents]
        return self.text.ids[begin[:, None] + torch.arange(PROMPT)]

    def drawn(self, choose: Callable[[Tensor], Tensor]) -> Tensor:
        sharp = lambda logits: choose(self.sharpness * logits)  # noqa: E731
        return sample(self.parameters, self.prompts(), self.length, self.generator(2), sharp)

    def logits(self, tokens: Tensor, parameters: Parameters | None = None, drop: Callable = lambda x: x) -> Tensor:
        """[B, L, V] float32, of the response tokens."""
        parameters = parameters or self.parameters
        return self.sharpness * head(parameters, hidden(parameters, tokens[:, :-1], drop=drop)[:, PROMPT - 1 :])

    def disturbed(self, size: float, generator: torch.Generator) -> Parameters:
        """Other weights: a step of random directions and of this size."""
        draw = lambda value: torch.randn(value.shape, generator=generator) * value.std()  # noqa: E731
        return {name: value + size * draw(value) for name, value in self.parameters.items()}

    def noisy_logits(self, tokens: Tensor) -> Tensor:
        """Those of a forward in bfloat16, its error scaled by `noise`."""
        rounded = {name: value.bfloat16() for name, value in self.parameters.items()}
        exact = hidden(self.parameters, tokens[:, :-1])
        states = exact + self.noise * (hidden(rounded, tokens[:, :-1]).float() - exact)
        return self.sharpness * head(self.parameters, states[:, PROMPT - 1 :])


def of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """[B, L] float64 log-probabilities of the response tokens."""
    return logits.double().log_softmax(-1).gather(2, tokens[:, PROMPT:, None])[..., 0]


# --- what a side does to its logits ---


def top_p(share: float) -> Callable[[Tensor], Tensor]:
    def choose(logits: Tensor) -> Tensor:
        ordered, index = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        return logits.scatter(-1, index, ordered.masked_fill(before >= share, -torch.inf))

    return choose


def top_k(count: int) -> Callable[[Tensor], Tensor]:
    return lambda logits: logits.masked_fill(logits < logits.topk(count).values[..., -1:], -torch.inf)


def min_p(share: float) -> Callable[[Tensor], Tensor]:
    return lambda logits: logits.masked_fill(
        logits.softmax(-1) < share * logits.softmax(-1).amax(-1, keepdim=True), -torch.inf
    )


def with_padding(logits: Tensor, mass: float) -> Tensor:
    """Columns of one constant logit that take `mass` of the probability on average."""
    level = (logits.logsumexp(-1).neg().exp().mean() / mass).log().neg()
    return torch.cat([logits, level.expand(*logits.shape[:-1], 1)], dim=-1)


def rounded(values: Tensor, bits: int) -> Tensor:
    """Values with so many bits after the leading one."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent)


# --- faults ---


def as_it_is(logits: Tensor) -> Tensor:
    return logits


@functools.lru_cache(maxsize=4)  # the faults of a world share its documents
def clean(
    world: World, choose: Callable[[Tensor], Tensor] = as_it_is, reports: Callable[[Tensor], Tensor] | None = None
) -> Drawn:
    """Documents of which only rounding differs; the engine draws as it chooses, and reports that or something else."""
    rng, count = random.Random(world.seed), world.documents
    tokens = world.drawn(choose)
    reported = (reports or choose)(world.logits(tokens))
    engine, trainer = of_tokens(reported, tokens), of_tokens(world.noisy_logits(tokens), tokens)
    with_workers = rng.random() < 0.7
    likeliest = reported.double().log_softmax(-1).topk(20)
    steps = sorted(rng.randrange(8) for _ in range(count))
    return Drawn(
        tokens=tokens,
        engine=engine.float().double(),
        trainer=trainer.float().double(),
        step=steps,
        weight_version=[max(step - rng.randrange(4), 0) for step in steps] if rng.random() < 0.7 else [None] * count,
        worker=[f"engine-{rng.randrange(6)}" if with_workers else None for _ in range(count)],
        rank=[rng.randrange(4) if with_workers else None for _ in range(count)],
        topk=(likeliest.indices, likeliest.values.float()) if reports is not None or rng.random() < 0.5 else None,
        group=world.group,
    )


def temperature(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    """The trainer's temperature is the engine's times `size` or its inverse."""
    scale = size if rng.random() < 0.5 else 1 / size
    return replace(drawn, trainer=of_tokens(world.noisy_logits(drawn.tokens) / scale, drawn.tokens))


def padding(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    return replace(drawn, trainer=of_tokens(with_padding(world.noisy_logits(drawn.tokens), size), drawn.tokens))


def shift(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    lag, chosen = rng.choice([1, -1]), _documents(drawn, size, rng)
    return replace(drawn, trainer=torch.where(chosen, drawn.trainer.roll(lag, dims=1), drawn.trainer))


def template(world: World, drawn: Drawn, size: int, rng: random.Random) -> Drawn:
    """So many tokens of the prompt are others for the trainer."""
    generator, other = world.generator(5), drawn.tokens.clone()
    other[:, PROMPT - size : PROMPT] = torch.randint(0, world.text.vocabulary, (1, size), generator=generator)
    return _moved(world, drawn, of_tokens(world.logits(other), drawn.tokens))


def staleness(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    """The trainer's weights have gone on since the engine's, by a step of random directions for each version."""
    versions = [max(step - rng.randrange(8), 0) for step in drawn.step]
    trainer = drawn.trainer.clone()
    for lag in {a - b for a, b in zip(drawn.step, versions, strict=True)} - {0}:
        rows = torch.tensor([a - b == lag for a, b in zip(drawn.step, versions, strict=True)])
        later = world.disturbed(size * lag, world.generator(6))
        new = of_tokens(world.logits(drawn.tokens[rows], later), drawn.tokens[rows])
        trainer[rows] = _moved(world, replace(drawn, tokens=drawn.tokens[rows], trainer=trainer[rows]), new).trainer
    return replace(drawn, trainer=trainer, weight_version=versions)


def head_precision(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    """The trainer's logits lie around `size` and are rounded to bfloat16."""
    return replace(drawn, trainer=of_tokens(rounded(world.noisy_logits(drawn.tokens) + size, 7), drawn.tokens))


def routing(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    """A share of the tokens went through other experts: their logits are those of disturbed weights."""
    generator = world.generator(7)
    later = world.disturbed(0.15, generator)
    moved = _moved(world, drawn, of_tokens(world.logits(drawn.tokens, later), drawn.tokens)).trainer
    rates = torch.tensor([[size * rng.choice([0.2, 0.5, 2.3])] for _ in drawn.step])
    hit = torch.rand(drawn.engine.shape, generator=generator) < rates
    return replace(drawn, trainer=torch.where(hit, moved, drawn.trainer))


def bfloat16_grid(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    chosen = _documents(drawn, size, rng)
    coarse = lambda values: torch.where(chosen, values.bfloat16().double(), values)  # noqa: E731
    if rng.random() < 0.5:
        return replace(drawn, engine=coarse(drawn.engine))
    return replace(drawn, trainer=coarse(drawn.trainer))


def group(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    """One engine of six, or one rank of four, computes with disturbed weights."""
    by_worker = rng.random() < 0.5
    workers = [f"engine-{rng.randrange(6)}" for _ in drawn.step]
    ranks = [rng.randrange(4) for _ in drawn.step]
    bad = [w == "engine-3" if by_worker else r == 2 for w, r in zip(workers, ranks, strict=True)]
    later = world.disturbed(size, world.generator(8))
    moved = _moved(world, drawn, of_tokens(world.logits(drawn.tokens, later), drawn.tokens)).trainer
    trainer = torch.where(torch.tensor(bad)[:, None], moved, drawn.trainer)
    return replace(drawn, trainer=trainer, worker=workers, rank=ranks)


def other_samples(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    """A share of the documents have the trainer's values of one another."""
    rows = rng.sample(range(len(drawn.step)), max(round(size * len(drawn.step)), 2))
    trainer = drawn.trainer.clone()
    trainer[rows] = drawn.trainer[rows[1:] + rows[:1]]
    return replace(drawn, trainer=trainer)


def dropout(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    """The trainer's forward drops a share of its activations, others at every position."""
    generator = world.generator(10)
    drop = lambda x: x * (torch.rand(x.shape, generator=generator) >= size) / (1 - size)  # noqa: E731
    return _moved(world, drawn, of_tokens(world.logits(drawn.tokens, drop=drop), drawn.tokens))


def vocabulary(world: World, drawn: Drawn, size: float, rng: random.Random) -> Drawn:
    """A share of the token ids means another token to the trainer."""
    generator, ids = world.generator(9), torch.arange(world.text.vocabulary)
    other = ids[torch.rand(len(ids), generator=generator) < size]
    meaning = ids.clone()
    meaning[other] = other[torch.randperm(len(other), generator=generator)]
    theirs = meaning[drawn.tokens]
    return replace(drawn, trainer=of_tokens(world.noisy_logits(theirs), theirs))


FAULTS: dict[str, tuple[Callable, tuple]] = {  # and its size when weak, medium and strong
    "temperature": (temperature, (1.02, 1.1, 1.3)),
    "padding": (padding, (0.003, 0.03, 0.1)),
    "shift": (shift, (0.02, 0.3, 1.0)),
    "template": (template, (1, 3, 8)),
    "staleness": (staleness, (0.0005, 0.003, 0.015)),
    "head_precision": (head_precision, (0.0, 24.0, 48.0)),
    "routing": (routing, (0.001, 0.01, 0.05)),
    "bfloat16_grid": (bfloat16_grid, (0.03, 0.3, 1.0)),
    "group": (group, (0.002, 0.01, 0.05)),
    "vocabulary": (vocabulary, (0.005, 0.1, 1.0)),
    "dropout": (dropout, (0.01, 0.05, 0.1)),
    "other_samples": (other_samples, (0.02, 0.25, 1.0)),
}
TRUNCATIONS = {
    "weak": (top_p(0.995), top_k(200), min_p(0.0005)),
    "medium": (top_p(0.95), top_k(20), min_p(0.02)),
    "strong": (top_p(0.8), top_k(4), min_p(0.2)),
}


WAYS = {  # of drawing, where the engine reports another
    "weak": (lambda logits: logits / 0.98, top_p(0.997), top_k(200)),
    "medium": (lambda logits: logits / 0.85, top_p(0.95), top_k(20), lambda logits: top_p(0.97)(logits / 1.1)),
    "strong": (lambda logits: logits / 0.6, top_p(0.8), top_k(4), lambda logits: top_p(0.9)(logits / 0.7)),
}


def faulty(world: World, faults: dict[str, str]) -> Drawn:
    """Documents with these faults at these strengths."""
    rng = random.Random(world.seed + 17)
    choose = rng.choice(TRUNCATIONS[faults["truncation"]]) if "truncation" in faults else as_it_is
    drawn = clean(world, choose)
    if "sampling" in faults:
        way = rng.choice(WAYS[faults["sampling"]])
        drawn = clean(world, lambda logits: way(choose(logits)), reports=choose)
    order = "temperature padding head_precision vocabulary dropout template staleness routing group bfloat16_grid shift"
    for cause in [*order.split(), "other_samples"]:
        if cause in faults:
            fault, sizes = FAULTS[cause]
            drawn = fault(world, drawn, sizes[STRENGTHS.index(faults[cause])], rng)
    return replace(drawn, truth=dict(faults))


def _moved(world: World, drawn: Drawn, new: Tensor) -> Drawn:
    """The trainer's values moved by what a change of the exact logits makes of them."""
    before = of_tokens(world.logits(drawn.tokens), drawn.tokens)
    return replace(drawn, trainer=(drawn.trainer + new - before).clamp(max=0.0))


def _documents(drawn: Drawn, share: float, rng: random.Random) -> Tensor:
    chosen = [True] * max(round(share * len(drawn.step)), 1)
    chosen += [False] * (len(drawn.step) - len(chosen))
    rng.shuffle(chosen)
    return torch.tensor(chosen)[:, None]
