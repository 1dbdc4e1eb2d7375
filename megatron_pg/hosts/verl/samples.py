"""A rank's mini-batch of verl as samples."""

from typing import Any

from megatron_pg.plan.errors import StepPlanError
from megatron_pg.rollouts.sample import Sample

_FIELDS = {
    **{"old_log_probs": "old_logprobs", "rollout_log_probs": "rollout_logprobs", "ref_log_prob": "ref_logprobs"},
    **{"advantages": "advantage", "values": "values", "returns": "returns"},
}
_ROWS = ("input_ids", "response_mask", *_FIELDS, "rm_scores")


def samples_of(data: Any) -> dict[int, Sample]:
    """The samples of a mini-batch, a TensorDict, by row; the rows that verl adds as padding have none.

    `uid` identifies a prompt, `uid` and `session_id` a rollout; without a session every row is its own rollout.
    """
    if not data["response_mask"].is_nested:
        raise StepPlanError(
            "response_mask is padded, as in verl's trainers before V1, so the lengths of responses are not known. Use "
            "trainer.use_v1=True."
        )
    columns = {name: data[name].cpu().unbind() for name in _ROWS if name in data}
    uids, sessions = (data.get(name).tolist() if name in data else [None] * len(data) for name in ("uid", "session_id"))
    samples = {}
    for i, (uid, session, *values) in enumerate(zip(uids, sessions, *columns.values(), strict=True)):
        row = dict(zip(columns, values, strict=True))
        mask = row["response_mask"]
        if str(uid).startswith("pad") and not mask.any():
            continue
        samples[i] = Sample.build(
            tokens=row["input_ids"],
            response_length=len(mask),
            loss_mask=mask,
            prompt_id=None if uid is None else str(uid),
            rollout_id=None if uid is None or session is None else f"{uid}/{session}",
            sample_id=f"{uid}/{session} (row {i})",
            reward=float(row["rm_scores"].sum()) if "rm_scores" in row else None,
            **{field: row[name] for name, field in _FIELDS.items() if name in row},
        )
    return samples
