"""REINFORCE with a clipped importance weight: clipping limits a token's gradient and never drops it."""

from torch import Tensor

from megatron_pg.objectives.interface.tokens import Parameters, Tokens


def cispo(tokens: Tokens, parameters: Parameters) -> Tensor:
    """Loss of each token.

        loss = -sg[min(max(r, 1 - clip_eps_low), cap)] A log π

    The cap is absolute: 5.0 means r <= 5, not 1 + 5. The paper has no lower bound: clip_eps_low = 1, the default.

    Source: MiniMax-M1, arXiv 2506.13585.
    """
    weights = tokens.ratios.detach().clamp(1.0 - parameters.clip_eps_low, parameters.cap)
    return -weights * tokens.advantages * tokens.weighable_logprobs


def outside(tokens: Tokens, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """[T] bool each: where the weight is the cap, and where it is the lower bound."""
    return tokens.ratios > parameters.cap, tokens.ratios < 1.0 - parameters.clip_eps_low
