"""What a sample carries in addition to one number per token. A new kind is one module and one line of the table."""

from megatron_pg.rollouts.payloads.base import Payload, Rows
from megatron_pg.rollouts.payloads.experts import RoutedExperts
from megatron_pg.rollouts.payloads.hidden_states import HiddenStates
from megatron_pg.rollouts.payloads.sampling_masks import SampledTokens
from megatron_pg.rollouts.payloads.topk import TopKTokens

PAYLOADS: dict[str, Payload] = {
    payload.name: payload
    for payload in (
        TopKTokens("teacher_topk"),
        HiddenStates("teacher_hidden"),
        SampledTokens("sampling_mask"),
        TopKTokens("rollout_topk"),
        RoutedExperts("routed_experts"),
    )
}

__all__ = ["PAYLOADS", "Payload", "Rows"]
