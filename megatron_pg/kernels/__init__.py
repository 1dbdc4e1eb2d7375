"""From logits to the policy-gradient loss: torch, the reference, and Triton."""

from megatron_pg.kernels.api import GRPOLoss, grpo_loss, policy_gradient_loss
from megatron_pg.kernels.checks import may_be_overwritten
from megatron_pg.kernels.cross_entropy import CrossEntropy, cross_entropy
from megatron_pg.kernels.policy_loss import LossTerms, PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.vocabulary import Vocabulary

__all__ = [
    "CrossEntropy",
    "GRPOLoss",
    "LossTerms",
    "PolicyGradientLoss",
    "PolicyLoss",
    "Vocabulary",
    "cross_entropy",
    "grpo_loss",
    "may_be_overwritten",
    "policy_gradient_loss",
]
