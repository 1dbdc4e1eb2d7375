"""The sampling settings that the user states, compared with what the log-probabilities show."""

import math
import re
from dataclasses import dataclass, replace

from megatron_pg.mismatch.causes import Answer


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?|-?\.[0-9]+")
_RANGES = {  # which numbers are valid, and in words
    "temperature": (_is_positive, "a finite number above 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "top_k": (
        lambda value: 1 <= value < math.inf and value == int(value),
        "a whole number of at least 1 (leave it out if it is off)",
    ),
}
_CLOSE = 1.02  # of temperatures


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The engine's sampling settings, and the temperature of the trainer's log-probabilities; None if not stated."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    trainer_temperature: float | None = None

    @classmethod
    def parse(cls, engine: str | None, trainer_temperature: float | None = None) -> "Settings":
        """From `temperature=0.7,top_p=0.9,top_k=50`, any of them.

        Raises:
            ValueError: an unknown or repeated name, or a number out of range.
        """
        given: dict[str, float] = {}
        for part in engine.split(",") if engine else ():
            name, equals, text = part.partition("=")
            if name not in _RANGES or not equals or name in given:
                names = ", ".join(f"{known}=…" for known in _RANGES)
                raise ValueError(f"--engine {engine}: {part!r} is not one of {names}, each given once")
            given[name] = float(text) if _NUMBER.fullmatch(text) else math.nan
            is_valid, words = _RANGES[name]
            if not is_valid(given[name]):
                raise ValueError(f"--engine {engine}: {part} is not {words}")
        count = given.pop("top_k", None)
        if (trainer_temperature is None) != ("temperature" not in given):
            raise ValueError(
                "--trainer-temperature and temperature=… of --engine are compared with each other, so give both or none"
            )
        settings = cls(**given, top_k=None if count is None else int(count), trainer_temperature=trainer_temperature)
        if settings.ratio is not None and not _is_positive(settings.ratio):
            raise ValueError(
                f"--trainer-temperature {trainer_temperature:g} is not a finite number above 0, or its ratio to the "
                f"engine's {settings.temperature:g} is not"
            )
        return settings

    @property
    def truncation(self) -> str:
        """In words; empty if nothing is truncated."""
        parts = [f"top_p {self.top_p:g}"] if self.top_p not in (None, 1.0) else []
        return " and ".join([*parts, *([f"top_k {self.top_k}"] if self.top_k is not None else [])])

    @property
    def ratio(self) -> float | None:
        """The trainer's temperature over the engine's."""
        if self.temperature is None or self.trainer_temperature is None:
            return None
        return self.trainer_temperature / self.temperature

    def __str__(self) -> str:
        known = {name: getattr(self, name) for name in (*_RANGES, "trainer_temperature")}
        return ", ".join(f"{name} {value:g}" for name, value in known.items() if value is not None)


def against(settings: Settings, tests: list[Answer], *, has_sampling_mask: bool = False) -> list[Answer]:
    """Add the settings to the results: a setting that the log-probabilities do not show is found as `sampling`.

    `has_sampling_mask`: both sides are normalized over the sampling masks, so a truncation does not show.
    """
    by_cause, unseen = {test.cause: test for test in tests}, list[str]()
    temperature, sampling = by_cause["temperature"], by_cause["sampling"]
    if (ratio := settings.ratio) is not None and temperature.outcome == "found":
        agrees = _is_close(temperature.estimate["trainer_over_engine"] / ratio)
        other = f"the settings state {ratio:.3f}, but another temperature is in effect"
        by_cause["temperature"] = _with(temperature, "as the settings state" if agrees else other)
    elif ratio is not None and not _is_close(ratio):
        both = f"{settings.temperature:g} (engine) and {settings.trainer_temperature:g} (trainer)"
        stated = f"the settings state temperatures {both}"
        if temperature.outcome == "cannot tell":
            evidence = f"{stated}; the log-probabilities are too few to show it"
            by_cause["temperature"] = Answer("temperature", "found", evidence, None, {"trainer_over_engine": ratio})
        else:
            unseen.append(
                f"{stated}, but the log-probabilities do not differ by them: one side has another temperature"
            )
    if settings.truncation and not has_sampling_mask and by_cause["truncation"].outcome == "not found":
        missing = "but no probability is missing: both sides are before the truncation"
        unseen.append(f"the settings state {settings.truncation}, {missing}")
    if sampling.outcome == "found":
        by_cause["sampling"] = _with(sampling, f"the settings state {settings}")
    elif unseen:
        by_cause["sampling"] = Answer("sampling", "found", "; ".join(unseen), None, {"settings": str(settings)})
    return list(by_cause.values())


def _is_close(ratio: float) -> bool:
    return 1 / _CLOSE < ratio < _CLOSE


def _with(test: Answer, said: str) -> Answer:
    return replace(test, evidence=f"{test.evidence}; {said}")
