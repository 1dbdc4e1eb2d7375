"""The streams that the flags of the KL and entropy terms stand for."""

from megatron_pg.declarations.streams import Stream


def kl_and_entropy(
    *, kl_coef: float = 0.0, kl_estimator: str | None = None, entropy_coef: float = 0.0, aggregation: str = "policy"
) -> tuple[Stream, ...]:
    streams = (
        Stream(name="kl", kind="kl", weight=kl_coef, estimator=kl_estimator, aggregation=aggregation, on="rl"),
        Stream(name="entropy", kind="entropy", weight=entropy_coef, aggregation=aggregation, on="rl"),
    )
    return tuple(stream for stream in streams if stream.weight)
