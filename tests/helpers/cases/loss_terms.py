"""The loss terms that the flags of the KL and entropy terms stand for."""

from megatron_pg.declarations.loss_terms import LossTerm


def kl_and_entropy(
    *, kl_coef: float = 0.0, kl_estimator: str | None = None, entropy_coef: float = 0.0, aggregation: str = "policy"
) -> tuple[LossTerm, ...]:
    terms = (
        LossTerm(name="kl", kind="kl", weight=kl_coef, estimator=kl_estimator, aggregation=aggregation, on="rl"),
        LossTerm(name="entropy", kind="entropy", weight=entropy_coef, aggregation=aggregation, on="rl"),
    )
    return tuple(term for term in terms if term.weight)
