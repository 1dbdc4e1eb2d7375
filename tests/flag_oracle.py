"""A second decision table: which rules refuse a combination of arguments, or what it becomes and what is said.

Written from the rules as they are documented, not from megatron_pg/args.py; it takes a plain dict and imports nothing
of the package.
"""

import math
from collections.abc import Mapping

MODES = {"sample_mean", "prompt_mean", "token_mean", "constant"}
REDUCERS = {"user_reducers:turn_mean": None, "user_nothing:f": "E14", "user_package.turns:three": "E15"}


def refusals(given: Mapping) -> list[str]:
    """The ids of the rules that refuse the combination, sorted, once per offending argument; empty when it is accepted."""
    found = [*_mode(given), *_flag(given), *_divisor(given), *_path(given), *_own(given), *_megatron(given)]
    return sorted(found)


def outcome(given: Mapping, *, core_before_0_19: bool) -> tuple[str, bool, list[str]]:
    """Mode and flag after reconciliation, and the sorted ids of what is said, for an accepted combination."""
    mode, flag = given["mode"], given["flag"]
    said = []
    if mode == "token_mean" and not flag:
        said.append("R1")
    if flag and mode == "sample_mean":
        said.append("R2")
    resolved = "token_mean" if flag else mode
    on = resolved == "token_mean"
    if given["path"] is not None:
        said += ["W2"] if mode == "sample_mean" else ["W1", "W2"]
    if given["fp16"] and on:
        said.append("W4")
    has_router_loss = given["experts"] and (given["aux"] or given["z"])
    if on and has_router_loss and given["tp"] * given["cp"] > 1 and core_before_0_19:
        said.append("W5")
    if given["mtp"] and not on:
        said.append("W6")
    return resolved, on, sorted(said)


def _mode(given: Mapping) -> list[str]:
    if not isinstance(given["mode"], str):
        return ["E2"]
    return [] if given["mode"] in MODES else ["E3"]


def _flag(given: Mapping) -> list[str]:
    mode, flag, hybrid = given["mode"], given["flag"], given["hybrid"]
    found = [] if flag is True or flag is False else ["E4"]
    effective = "token_mean" if flag is True and mode == "sample_mean" else mode
    if hybrid and effective != "token_mean":  # an unknown mode too: the message says which one to choose
        found.append("E12")
    elif flag is True and mode in ("constant", "prompt_mean"):
        found.append("E11")  # E12 replaces it
    return found


def _divisor(given: Mapping) -> list[str]:
    mode, divisor, has_path = given["mode"], given["divisor"], given["path"] is not None
    if divisor is None:
        return ["E5"] if mode == "constant" and not has_path else []
    found = []
    if isinstance(divisor, bool):
        found.append("E6")
    elif not isinstance(divisor, (int, float)):
        found.append("E7")
    elif not (math.isfinite(divisor) and divisor > 0 and 2.0**-126 <= 1 / divisor < 2.0**128):
        found.append("E8")
    if has_path:
        found.append("E10")  # replaces E9
    elif mode in MODES and mode != "constant":
        found.append("E9")
    return found


def _path(given: Mapping) -> list[str]:
    if given["path"] is None:
        return []
    rule = REDUCERS.get(given["path"], "E13")
    return [rule] if rule else []


def _own(given: Mapping) -> list[str]:
    low, high, temperature = (_number(given[name]) for name in ("low", "high", "temperature"))
    found = []
    found += ["E24"] * (not 0 <= low <= 1)
    found += ["E24"] * (not 0 <= high < math.inf)
    found += ["E24"] * (not 0 < temperature < math.inf)
    found += ["E25"] * (given["metrics"] not in ("none", "basic", "with_entropy"))
    found += ["E25"] * (given["kernel"] not in ("torch", "triton"))
    return found


def _number(value: object) -> float:
    """NaN, which is in no range, for what is no number."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _megatron(given: Mapping) -> list[str]:
    on = given["flag"] is True or given["mode"] == "token_mean"
    found = []
    found += ["E18"] * bool(given["average"] and on)
    found += ["E19"] * (bool(given["fsdp"]) + bool(given["fsdp2"]))
    graph = [given["graph"], *given["scope"], *given["modules"]]
    found += ["E20"] * ("full_iteration" in graph)
    found += ["E21"] * bool(given["mtp"] and on)
    found += ["E27"] * bool(given["overlap"])
    found += ["E28"] * bool(given["gtp"] and given["gtp"] > 1)
    found += ["E29"] * (given["loader"] != "external")
    found += ["E30"] * (bool(given["rl"]) + bool(given["sft"]) + bool(given["skip"]))
    return found
