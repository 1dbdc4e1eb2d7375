"""The LM head in the sampler's precision: float32 logits at tensor-core speed, and a head that never stores them.

Hidden states and weight stay in bfloat16; their products accumulate in float32 and are not rounded below it, so that
log-probabilities equal those of float32 logits to 1e-5, where bfloat16 logits are off by 1e-1.

    fp32_logits            all logits by one product; the backward rounds their gradient to bfloat16, or splits it
    logprobs_and_entropy   from chunks of tokens; the backward makes each chunk's logits again (8 N V H operations)
    grpo_head_loss         the loss, its gradient made chunk by chunk in the forward (6 N V H), or by the function above

Tokens that are not trained are left out before the products. Weight gradients are added in float32, to Megatron's
`main_grad` where there is one. On a CPU the same steps run with float32 products, for tests.
"""

from megatron_pg.lm_head.heads import fp32_logits, head_cross_entropy, logprobs_and_entropy
from megatron_pg.lm_head.inputs import Head
from megatron_pg.lm_head.loss import grpo_head_loss, policy_gradient_head_loss

__all__ = [
    "Head",
    "fp32_logits",
    "grpo_head_loss",
    "head_cross_entropy",
    "logprobs_and_entropy",
    "policy_gradient_head_loss",
]
