"""The fields of a line of the rollout file, each written once. Needs no torch."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Id = int | str

POLICY = "rl"  # the objective, the loss term of samples that name none
_TERM = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its JSON type, whether every line has it, and its layout."""

    accepts: Callable[[Any], bool]
    is_required: bool = True  # in samples of the objective
    is_of_policy: bool = False  # not required in samples of other loss terms
    since: int = 1  # first version of the format with it
    is_per_token: bool = False  # a list with one entry per response token
    is_logprob: bool = False  # in nats, at most 0
    is_origin: bool = False  # of the sample's log-probabilities


def plain(value: Any) -> Any:
    """The Python value of a number of numpy or of a tensor without dimensions; anything else as it is."""
    try:
        return value.item() if getattr(value, "ndim", None) == 0 else value
    except Exception:  # a tensor without data
        return value


def is_int(value: Any) -> bool:
    """Whether it is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a number in the range of float64, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be larger than any float


def is_id(value: Any) -> bool:
    """Whether it can name a rollout or prompt: ids reach logs and are hashed as UTF-8."""
    if isinstance(value, str):
        return value.isprintable()  # no control character, no lone surrogate
    return is_int(value) and abs(value) < 2**62


def is_environment(value: Any) -> bool:
    """Whether it can name an environment: it is part of the names of metrics."""
    return isinstance(value, str) and 0 < len(value) <= 100 and value.isprintable()


def is_term(value: Any) -> bool:
    """Whether it can name a loss term: a word that is valid in flags and metrics."""
    return isinstance(value, str) and _TERM.fullmatch(value) is not None


def _are_masks(value: Any) -> bool:
    """Whether it maps names of loss terms to lists of numbers."""
    return isinstance(value, dict) and all(is_term(name) and _are_numbers(mask) for name, mask in value.items())


def _are_whole(value: Any, limit: int) -> bool:
    """Whether it is a list of integers in [0, limit). Lists are long: built-in functions check items here and below."""
    return _is_list_of(value, {int}) and (not value or (min(value) >= 0 and max(value) < limit))


def _is_version(value: Any) -> bool:
    """Whether it is a number of optimizer steps, or a list of them."""
    return _are_whole(value if isinstance(value, list) else [value], 2**62)


def _are_numbers(value: Any) -> bool:
    return _is_list_of(value, {int, float}) and all(map(sys.float_info.max.__ge__, map(abs, value)))


def _are_token_sets(value: Any) -> bool:
    """Whether it is ids and log-probabilities, a list of each per token; `Sample` checks shape and range."""
    is_pair = isinstance(value, dict) and set(value) == {"ids", "logprobs"}
    if not is_pair or not all(isinstance(v, list) for v in value.values()):
        return False
    return all(_is_list_of(row, {int}) for row in value["ids"]) and all(map(_are_numbers, value["logprobs"]))


def _are_states(value: Any) -> bool:
    """Whether it is a width and a text; `Sample` checks their content."""
    if not isinstance(value, dict) or len(value) != 2 or not is_int(value.get("width")):
        return False
    return all(isinstance(value.get(name), str) for name in value if name != "width")


def _is_sampling_mask(value: Any) -> bool:
    """Whether it is two lists of integers; `Sample` checks their content."""
    is_pair = isinstance(value, dict) and set(value) == {"ids", "offsets"}
    return is_pair and all(_is_list_of(v, {int}) for v in value.values())


def _are_experts(value: Any) -> bool:
    """Whether it is a list per token, of lists per layer, of integers; `Sample` checks shape and range."""
    return isinstance(value, list) and all(
        isinstance(token, list) and all(_is_list_of(layer, {int}) for layer in token) for token in value
    )


def _is_list_of(value: object, kinds: set[type]) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= kinds


FIELDS = {
    "step": Field(lambda value: is_int(value) and 0 <= value < 2**62),
    "prompt_id": Field(is_id),
    "rollout_id": Field(is_id),
    "tokens": Field(lambda value: _are_whole(value, 2**31)),
    "response_length": Field(is_int),
    "loss_mask": Field(_are_numbers, is_per_token=True),
    "old_logprobs": Field(_are_numbers, is_of_policy=True, is_per_token=True, is_logprob=True),
    "reward": Field(is_number, is_of_policy=True),
    "advantage": Field(lambda value: is_number(value) or _are_numbers(value), is_of_policy=True),
    "rollout_logprobs": Field(_are_numbers, is_required=False, is_per_token=True, is_logprob=True),
    "ref_logprobs": Field(_are_numbers, is_required=False, is_per_token=True, is_logprob=True),
    "teacher_logprobs": Field(_are_numbers, is_required=False, is_per_token=True, is_logprob=True, since=2),
    "old_entropies": Field(_are_numbers, is_required=False, is_per_token=True, since=2),
    "values": Field(_are_numbers, is_required=False, is_per_token=True, since=3),
    "returns": Field(_are_numbers, is_required=False, is_per_token=True, since=3),
    "token_weights": Field(_are_numbers, is_required=False, is_per_token=True, since=3),
    "turns": Field(lambda value: _is_list_of(value, {int}), is_required=False, since=3),
    "teacher_topk": Field(_are_token_sets, is_required=False, since=2),
    "teacher_hidden": Field(_are_states, is_required=False, since=2),
    "sampling_mask": Field(_is_sampling_mask, is_required=False, since=3),
    "rollout_topk": Field(_are_token_sets, is_required=False, since=2),
    "term": Field(is_term, is_required=False, since=3),
    "masks": Field(_are_masks, is_required=False, since=2),
    "routed_experts": Field(_are_experts, is_required=False),
    "truncated": Field(lambda value: isinstance(value, bool), is_required=False),
    "environment": Field(is_environment, is_required=False),
    "weight_version": Field(_is_version, is_required=False, is_origin=True),
    "worker": Field(is_id, is_required=False, is_origin=True),
    "data_parallel_rank": Field(lambda value: is_int(value) and 0 <= value < 2**31, is_required=False, is_origin=True),
}
OLD_NAMES = {"stream": "term", "support": "sampling_mask"}  # of versions before 3
REQUIRED = tuple(name for name, field in FIELDS.items() if field.is_required)
REQUIRED_OF_CRITICS = tuple(name for name in REQUIRED if name not in ("old_logprobs", "advantage"))
REQUIRED_OF_ALL = tuple(name for name in REQUIRED if not FIELDS[name].is_of_policy)
OPTIONAL = tuple(name for name, field in FIELDS.items() if field.is_per_token and not field.is_required)
ORIGINS = tuple(name for name, field in FIELDS.items() if field.is_origin)
LOGPROBS = tuple(name for name, field in FIELDS.items() if field.is_logprob)
