"""A second decision table: which rules refuse a combination of arguments, or what it becomes and what is said.

Written from the rules as they are documented, not from megatron_pg/args.py; it takes a plain dict and imports nothing
of the package.
"""

import math
from collections.abc import Collection, Mapping

_REJECT = ("icepop", "rejection", "m2po", "clip_cov", "top_entropy")
MODES = {"sample_mean", "prompt_mean", "token_mean", "constant"}
REDUCERS = {"user_reducers:turn_mean": None, "user_nothing:f": "E14", "user_package.turns:three": "E15"}


def refusals(given: Mapping, *, core: tuple[int, ...]) -> list[str]:
    """The ids of the rules that refuse the combination, sorted, once per offending argument; empty when it is
    accepted."""
    rules = (_mode, _flag, _divisor, _path, _own, _documents, _terms, _objective, _correction, _auxiliary, _denominator)
    found = [rule for part in (*rules, _head, _megatron) for rule in part(given)]
    found += _graphs(given) * (core < (0, 19)) + _sharded(given, core)
    return sorted(found)


def outcome(given: Mapping) -> tuple[str, bool, list[str]]:
    """Mode and flag after reconciliation, and the sorted ids of what is said, for an accepted combination."""
    mode, flag = given["mode"], given["flag"]
    said = []
    if mode == "token_mean" and not flag:
        said.append("R1")
    if flag and mode is None:
        said.append("R2")
    resolved = "token_mean" if flag else mode or "sample_mean"
    on = resolved == "token_mean"
    if given["path"] is not None:
        said += ["W2"] if mode is None else ["W1", "W2"]
    if given["fp16"] and on and given["experts"]:
        said.append("W4")
    if given["experts"] and given["aux"] and given["balancing"] == "global_aux_loss" and given["ranks"] > 1:
        said.append("W5")
    if given["experts"]:
        said += ["W5"] * ((given["capacity"] is not None) + (given["balancing"] == "sinkhorn"))
    if given["own"] is not None:
        said.append("W9")
    elif given["objective"] in ("gspo", "gmpo"):
        said += ["W3"] if resolved != "sample_mean" else []
    if given["own"] is None and given["objective"] == "gspo":
        said += ["W8"] if max(given["low"] or 0, given["high"] or 0) > 0.05 else []
    # published without a clip, and no objective of this table is that one
    said += ["W12"] * (given["own"] is None and given["correction"] in ("m2po", "kl_cov"))
    if given["beta"] and given["estimator"] == "k1":
        said.append("W7")
    if given["parameters"] == "torch.float32":
        said += ["W10"] * (given["stored"] + (given["backward"] is not None))
    return resolved, on, sorted(said)


def _mode(given: Mapping) -> list[str]:
    if not isinstance(given["mode"], str | None):
        return ["E2"]
    return [] if given["mode"] in (None, *MODES) else ["E3"]


def _flag(given: Mapping) -> list[str]:
    mode, flag = given["mode"], given["flag"]
    found = [] if flag is True or flag is False else ["E4"]
    return found + ["E11"] * (flag is True and mode in ("constant", "prompt_mean", "sample_mean"))


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
    elif mode in (None, *MODES) and mode != "constant":
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
    found += ["E24"] * (given["low"] is not None and not 0 <= low <= 1)
    found += ["E24"] * (given["high"] is not None and not 0 <= high < math.inf)
    found += ["E24"] * (not 0 < temperature < math.inf)
    found += ["E24"] * (given["softcap"] is not None and not 1 <= _number(given["softcap"]) <= 1000)
    found += ["E25"] * (given["metrics"] not in ("none", "basic", "with_entropy"))
    found += ["E25"] * (given["kernel"] not in ("torch", "triton"))
    return found


def _number(value: object) -> float:
    """NaN, which is in no range, for what is not a number."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _terms(given: Mapping) -> list[str]:
    """Choices and numbers that are wrong by themselves."""
    choices = {
        "objective": ("grpo", "gspo", "cispo", "dual_clip", "reinforce", "dro", "gmpo"),
        "correction": ("none", "tis", "icepop", "opsm", "rejection", "m2po", "clip_cov", "kl_cov", "top_entropy"),
        "denominator": ("scheduled", "live", "kept"),
        "estimator": (None, "k1", "k3_weighted"),
        "auxiliary": ("default", "policy"),
        "predicted": ("token_mean", "policy"),
        "target": ("token", "policy"),
    }
    found = ["E25" for name, allowed in choices.items() if given[name] not in allowed]
    for name, least in {"beta": 0.0, "eta": 0.0, "gradient": 1e-300}.items():
        if not least <= _number(given[name]) < math.inf:
            found.append("E24")
    return found


def _options(given: Mapping, reads: Mapping[str, tuple[float, float]], names: Collection[str]) -> list[str]:
    """Options that are not read, and numbers outside of the range of one that is read, ends excluded."""
    found = []
    for name in names:
        if given[name] is not None and name not in reads:
            found.append("E40")
        elif given[name] is not None and not reads[name][0] < _number(given[name]) < reads[name][1]:
            found.append("E24")
    return found


def _objective(given: Mapping) -> list[str]:
    found = []
    if given["own"] is not None:
        found += {"a.py": ["E13"], "user_nothing:f": ["E14"], "user_reducers:turn_mean": ["E15"]}.get(given["own"], [])
        has_options = given["objective"] is not None and (given["cap"] is not None or given["pull"] is not None)
        return found + ["E44"] * (given["objective"] != "grpo" or has_options)
    clip = {"grpo": "low high", "gspo": "low high", "cispo": "low", "dual_clip": "low high"}.get(given["objective"], "")
    numbers = {
        "cispo": {"cap": (1 - 1e-15, math.inf)},
        "dual_clip": {"cap": (1.0, math.inf)},
        "dro": {"pull": (0.0, math.inf)},
    }.get(given["objective"], {})
    if given["objective"] not in ("grpo", "gspo", "cispo", "dual_clip", "reinforce", "dro", "gmpo"):
        return []
    found += ["E40" for name in ("low", "high") if given[name] is not None and name not in clip.split()]
    found += _options(given, numbers, ("cap", "pull"))
    return found + ["E41" for name in numbers if given[name] is None]


def _correction(given: Mapping) -> list[str]:
    name, bottom, top = given["correction"], given["bottom"], given["top"]
    reads = {
        "none": "",
        "tis": "bottom top",
        "icepop": "bottom top",
        "opsm": "top",
        "rejection": "bottom top",
        "m2po": "top",
        "clip_cov": "bottom top share",
        "kl_cov": "share force",
        "top_entropy": "share",
    }.get(name)
    if reads is None:
        return []
    anything, above = (-math.inf, math.inf), (0.0, math.inf)
    ranges = {"bottom": anything, "top": anything, "share": (0.0, 1.0), "force": above}
    found = _options(given, {each: ranges[each] for each in reads.split()}, [*ranges])
    found += _words(given)
    found += ["E41"] * (name in ("opsm", "rejection") and top is None)
    found += ["E42"] * (name == "m2po" and _number(top) <= 0)
    if "bottom" in reads:
        usual = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "clip_cov": (1.0, 5.0), "rejection": (-math.inf, math.nan)}
        low, high = (_number(usual[name][i] if x in (None, "two") else x) for i, x in enumerate((bottom, top)))
        found += ["E42"] * (low >= high)
    return found


def _words(given: Mapping) -> list[str]:
    """The level and the divergence of a rejection."""
    level, divergence = given["level"], given["divergence"]
    if given["correction"] != "rejection":
        return ["E40"] * ((level is not None) + (divergence is not None))
    found = ["E41"] * ((level is None) + (divergence is None))
    found += ["E25"] * (level not in (None, "token", "seq_sum"))
    found += ["E25"] * (divergence not in (None, "k1", "k3"))
    return found + ["E40"] * (divergence == "k3" and given["bottom"] is not None)


def _auxiliary(given: Mapping) -> list[str]:
    has_kl, has_entropy = given["beta"] != 0, given["eta"] != 0
    found = ["E41"] * (has_kl and given["estimator"] is None)
    found += ["E40"] * (not has_kl and given["estimator"] is not None)
    if given["predicted"] == "policy":
        found += ["E40"] * (not given["mtp"]) + ["E43"] * (given["path"] is not None)
    found += ["E40"] * (given["target"] == "policy" and not given["mtp"])
    return found + ["E40"] * (given["auxiliary"] == "policy" and not has_kl and not has_entropy)


def _denominator(given: Mapping) -> list[str]:
    denominator = given["denominator"]
    if denominator not in ("live", "kept"):
        return []
    on = given["mode"] == "token_mean" or (given["flag"] is True and given["mode"] is None)
    found = ["E43"] * (given["path"] is not None)
    found += ["E43"] * (denominator == "live" and on)
    return found + ["E43"] * (denominator == "kept" and given["correction"] not in _REJECT)


def _documents(given: Mapping) -> list[str]:
    number, policy, end = given["docs"], given["policy"], given["end"]
    is_count = type(number) is int and 0 <= number < 2**62
    found = [] if is_count else ["E60"]
    for value, known in ((policy, ("exact", "at_least")), (end, ("partial", "stop"))):
        if value is not None:
            found += ["E25"] if value not in known else ["E61"] if is_count and number == 0 else []
    if is_count and number > 0:
        fixed = [given["rampup"], given["decrease"], given["samples"], given["graph"] != "none"]
        found += ["E62"] * sum(map(bool, fixed))
    return found


def _head(given: Mapping) -> list[str]:
    stored, fused, backward, columns = (given[name] for name in ("stored", "fused", "backward", "columns"))
    found = ["E50"] * (stored not in (True, False))
    found += ["E50"] * (fused not in (None, "auto", "forward", "scaled_exp", "recompute"))
    found += ["E50"] * (backward not in (None, "bf16", "split"))
    if not stored and not fused:
        found += ["E51"] * (backward is not None)
    else:
        found += ["E53"] * (bool(given["deferred"]) + bool(given["fp8"]) + (given["logits"] is not None))
    if columns is not None:
        found += ["E52"] * (type(columns) is not int or not 1 <= columns <= 151936)
    if fused is None:
        return found
    found += ["E54"] * (bool(given["mup"]) + bool(given["fusion"]))
    if fused == "scaled_exp":
        found += ["E56"] * ((given["eta"] != 0) + (given["metrics"] == "with_entropy") + (backward == "split"))
    if fused not in ("forward", "scaled_exp"):
        return found
    found += ["E55"] * (bool(given["fp16"]) + bool(given["scale"]))
    reads_sequences = given["own"] is None and given["objective"] in ("gspo", "gmpo")
    return found + ["E55"] * (reads_sequences + (given["correction"] == "opsm"))


def head_mode(given: Mapping) -> str:
    """The mode of a fused head without one, on a GPU that has every kernel, for an accepted combination."""
    is_sequence_level = given["own"] is None and given["objective"] in ("gspo", "gmpo")
    if is_sequence_level or given["correction"] == "opsm" or given["fp16"] or given["scale"]:
        return "recompute"
    reads_more = given["eta"] != 0 or given["metrics"] == "with_entropy"
    rules_out = given["backward"] == "split", given["kernel"] == "torch", given["fsdp"]
    return "forward" if reads_more or any(rules_out) else "scaled_exp"


def _graphs(given: Mapping) -> list[str]:
    """Of a release whose router's losses are scaled while the step runs, which a captured router would not see."""
    on = given["flag"] is True or given["mode"] == "token_mean"
    parts = [*given["scope"], *given["modules"]]
    is_captured = given["graph"] == "transformer_engine" and (not parts or "moe_router" in parts)
    balances = given["aux"] and given["balancing"] not in ("none", "sinkhorn")
    ranks = given["tp"] * given["cp"]
    is_small = (balances and given["balancing"] == "seq_aux_loss") or (ranks > 1 and (balances or given["z"]))
    return ["E65"] * bool(on and is_captured and given["experts"] and is_small)


def _sharded(given: Mapping, core: tuple[int, ...]) -> list[str]:
    """Of the two wrappers that shard parameters."""
    on, is_old = given["flag"] is True or given["mode"] == "token_mean", core < (0, 19, 2)
    found = 0
    if given["fsdp2"]:
        found += is_old + (given["fused"] is not None) + bool(on and given["experts"])
    if given["fsdp"]:
        found += is_old and given["fused"] is not None
        found += core < (0, 18, 2) and given["strategy"] in ("no_shard",) + (None,) * (core < (0, 18))
        found += bool(given["average"]) + [given[name] for name in ("instances", "tp", "pp")].count(2)
        found += given["ep"] == 2 and not on and given["strategy"] != "optim"
    return ["E19"] * found


def _megatron(given: Mapping) -> list[str]:
    on = given["flag"] is True or given["mode"] == "token_mean"
    found = []
    if given["deferred"]:
        found += ["E17"] * ((given["overlap"] and given["ranks"] * given["cp"] > 1) + bool(given["mtp"]))
    found += ["E18"] * bool(given["average"] and on)
    graph = [given["graph"], *given["scope"], *given["modules"]]
    found += ["E20"] * ("full_iteration" in graph)
    found += ["E28"] * bool(given["gtp"] and given["gtp"] > 1)
    found += ["E12"] * bool(given["hybrid"]) + ["E29"] * (given["loader"] != "external")
    found += ["E30"] * (bool(given["rl"]) + bool(given["sft"]) + bool(given["skip"]))
    found += ["E30"] * bool(given["sets"] and given["virtual"])
    return found
