"""A rank's mini-batch of verl as samples."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_pg.plan.errors import StepPlanError
from megatron_pg.rollouts.sample import Sample

_OPTIONAL = {"rollout_log_probs": "rollout_logprobs", "ref_log_prob": "ref_logprobs"}
_RESPONSES = ("response_mask", "old_log_probs", "advantages", *_OPTIONAL, "rm_scores")


def samples_of(data: Any) -> list[Sample | None]:
    """The samples of a mini-batch, a TensorDict; None for the rows that verl adds as padding.

    `uid` identifies a prompt, `uid` and `session_id` a rollout; without a session every row is its own rollout.

    Raises:
        StepPlanError: the batch has an unsupported form.
    """
    if not data["response_mask"].is_nested:
        raise StepPlanError(
            "response_mask is padded, as in verl's trainers before V1, so the lengths of responses are not known; use "
            "trainer.use_v1=True"
        )
    rows = {name: data[name].cpu().unbind() for name in ("input_ids", *_RESPONSES) if name in data}
    none = [None] * len(data)
    uids, sessions = _column(data, "uid") or none, _column(data, "session_id") or none
    return [_sample(rows, i, uid, session) for i, (uid, session) in enumerate(zip(uids, sessions, strict=True))]


def _column(data: Any, name: str) -> list | None:
    """One value per row; None without such a column."""
    return data.get(name).tolist() if name in data else None


def _sample(rows: dict[str, Sequence[Tensor]], i: int, uid: Any, session: Any) -> Sample | None:
    mask = rows["response_mask"][i]
    if str(uid).startswith("pad") and not mask.any():
        return None
    optional = {field: rows[name][i] for name, field in _OPTIONAL.items() if name in rows}
    return Sample.build(
        tokens=rows["input_ids"][i],
        response_length=len(mask),
        loss_mask=mask,
        old_logprobs=rows["old_log_probs"][i],
        advantage=rows["advantages"][i],
        prompt_id=None if uid is None else str(uid),
        rollout_id=None if uid is None or session is None else f"{uid}/{session}",
        sample_id=f"{uid}/{session} (row {i})",
        reward=float(rows["rm_scores"][i].sum()) if "rm_scores" in rows else None,
        **optional,
    )
