"""Objectives: the loss of one token from its log-probability. No mean, no selection of tokens and no collective inside."""

from megatron_pg.objectives.grpo import grpo

__all__ = ["grpo"]
