"""Which values of hyper-parameters a search may try: a distribution for each, written as a word or as an object.

    SearchSpace.parse({"optimizer.learning_rate": "log(1e-4,1e-1)", "optimizer.name": ["adam", "sgd"]})
    SearchSpace.from_overrides(["augmentation.shift=int(0,4)"])

| word                  | values                                                        |
| --------------------- | ------------------------------------------------------------- |
| `uniform(0, 0.3)`     | real numbers from the first to the second                     |
| `log(1e-4, 1e-1)`     | real numbers whose logarithm is uniform; both are above zero  |
| `int(0, 4)`           | integers, both ends included                                  |
| `logint(8, 256)`      | integers whose logarithm is uniform; both are above zero      |
| `choice(adam, sgd)`   | one of the options                                            |

Populations, sweeps and their plots call it. It holds no state: every draw takes the caller's generator.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import yaml

from shoal.errors import ConfigError
from shoal.yaml_text import parse_yaml

WORDS = "uniform(low,high), log(low,high), int(low,high), logint(low,high) or choice(first,second)"
FACTORS = (0.8, 1.2)  # 1711.09846, section 4.1
SMALLEST_BASE = 0.1  # of a linear interval's width: what is perturbed by a factor counts as at least this large

_CALL = re.compile(r"\s*([A-Za-z_]+)\s*\((.*)\)\s*", re.DOTALL)
_INTERVALS = {"uniform": (False, False), "log": (True, False), "int": (False, True), "logint": (True, True)}


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`, both included, uniform in themselves or (`is_log`) in their logarithm.

    The unit interval stands for the whole range: an integer owns the part of it that rounds to that integer.
    """

    low: float
    high: float
    is_log: bool = False
    is_integer: bool = False

    def validate(self, path: str) -> None:
        """Raises ConfigError for ends that are not finite numbers, are the wrong way round, or have no logarithm."""
        for end in (self.low, self.high):
            if isinstance(end, bool) or not isinstance(end, int | float) or not math.isfinite(end):
                raise ConfigError(path, end, "is not a finite number", "give two numbers, as in uniform(0,0.3)")
            if self.is_integer and end != int(end):
                raise ConfigError(path, end, "is not an integer", "use uniform or log for real numbers")
        if self.low >= self.high:
            problem = f"the lower end {self.low:g} is not below the upper end {self.high:g}"
            raise ConfigError(path, str(self), problem, "give the smaller number first, or fix the value instead")
        if self.is_log and self.low <= 0:
            remedy = f"start above zero, or use {'int' if self.is_integer else 'uniform'}"
            raise ConfigError(path, str(self), f"{self.low:g} has no logarithm", remedy)

    def to_unit(self, value: object) -> float:
        """The position of a value in [0, 1]; outside values are clipped."""
        assert isinstance(value, int | float)
        low, high = self._unit_ends()
        position = math.log(max(value, self.low)) if self.is_log else value
        return min(max((position - low) / (high - low), 0.0), 1.0)

    def from_unit(self, unit: float) -> float | int:
        """The value at a position in [0, 1]; an end as it was given, since exp(log(x)) has other digits than x."""
        low, high = self._unit_ends()
        position = low + unit * (high - low)
        inner = math.exp(position) if self.is_log else position
        return self._clip(self.ends[int(unit)] if unit in (0.0, 1.0) else inner)

    def perturb(self, value: object, rng: np.random.Generator, factors: Sequence[float]) -> float | int:
        """The value times one of the factors, clipped to the interval.

        Of the paper (1711.09846, section 4.1) but for two cases where a factor moves nothing: a value near zero in a
        linear interval counts as a tenth of its width, and an integer moves by one at least.
        """
        assert isinstance(value, int | float)
        factor = factors[int(rng.integers(len(factors)))]
        if self.is_log:
            moved = value * factor
        else:
            moved = value + (factor - 1) * max(abs(value), SMALLEST_BASE * (self.high - self.low))
        if self.is_integer and round(moved) == value:
            moved = value + (1 if factor > 1 else -1)
        return self._clip(moved)

    def include(self, value: object) -> Interval:
        """This, or as much wider as it has to be to have the value."""
        assert isinstance(value, int | float)
        return replace(self, low=min(self.low, value), high=max(self.high, value))

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value."""
        return self.low, self.high

    def _unit_ends(self) -> tuple[float, float]:
        margin = 0.5 if self.is_integer else 0.0
        low, high = self.low - margin, self.high + margin
        return (math.log(low), math.log(high)) if self.is_log else (low, high)

    def _clip(self, value: float) -> float | int:
        clipped = min(max(value, self.low), self.high)
        return round(clipped) if self.is_integer else float(clipped)

    def __str__(self) -> str:
        word = next(name for name, kind in _INTERVALS.items() if kind == (self.is_log, self.is_integer))
        return f"{word}({self.low!r},{self.high!r})"


@dataclass(frozen=True)
class Options:
    """One of several options: texts, numbers, booleans or lists of them, all equally likely."""

    options: tuple[object, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the options are numbers, so that each has neighbours."""
        return all(isinstance(each, int | float) and not isinstance(each, bool) for each in self.options)

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value, where all options are numbers."""
        numbers = [float(str(each)) for each in self.options]
        return min(numbers), max(numbers)

    def validate(self, path: str) -> None:
        """Raises ConfigError where there is nothing to choose."""
        if not self.options:
            raise ConfigError(path, str(self), "has no option", "name two at least, as in choice(adam,sgd)")
        if any(each in self.options[:index] for index, each in enumerate(self.options)):
            raise ConfigError(path, str(self), "names an option twice", "name each option once")
        if len(self.options) == 1:
            raise ConfigError(path, str(self), "has one option", "name two at least, or fix the value instead")

    def to_unit(self, value: object) -> float:
        """The middle of the option's share of [0, 1]."""
        return (self.options.index(value) + 0.5) / len(self.options)

    def from_unit(self, unit: float) -> object:
        """The option whose share holds the position."""
        return self.options[min(int(unit * len(self.options)), len(self.options) - 1)]

    def perturb(self, value: object, rng: np.random.Generator, factors: Sequence[float]) -> object:
        """A neighbour, in the order of size, if all options are numbers; other options change by resampling only."""
        factor = factors[int(rng.integers(len(factors)))]
        if not self.is_ordered:
            return value
        ordered = sorted(self.options, key=lambda each: float(str(each)))
        index = ordered.index(value) + (1 if factor > 1 else -1)
        return ordered[min(max(index, 0), len(ordered) - 1)]

    def include(self, value: object) -> Options:
        """This, or with the value as a further option."""
        return self if value in self.options else Options((*self.options, value))

    def __str__(self) -> str:
        return f"choice({','.join(json.dumps(each) for each in self.options)})"


Distribution: TypeAlias = Interval | Options
Values: TypeAlias = dict[str, Any]  # by path: numbers, texts, or whatever a choice offers


class SearchSpace(dict[str, Distribution]):
    """Hyper-parameters by the path of their field, each with its distribution, in the order of definition."""

    def __init__(self, distributions: Mapping[str, Distribution]) -> None:
        if not distributions:
            raise ConfigError("space", {}, "is empty", f"name a field and {WORDS}")
        for path, distribution in distributions.items():
            if not all(path.split(".")):
                raise ConfigError("space", path, "is no path of a field", "write names joined by dots")
            distribution.validate(path)
        super().__init__(distributions)

    @classmethod
    def parse(cls, space: Mapping[str, object]) -> SearchSpace:
        """From `{path: word, list of options, or Distribution}`. Raises ConfigError naming the path."""
        return cls({path: _parse_distribution(path, given) for path, given in space.items()})

    @classmethod
    def from_overrides(cls, overrides: Iterable[str]) -> SearchSpace:
        """From `path=word`, as on the command line. Raises ConfigError."""
        space: dict[str, object] = {}
        for override in overrides:
            path, equals, word = override.partition("=")
            if not equals:
                raise ConfigError("space", override, "has no `=`", f"write path= and {WORDS}")
            if path in space:
                raise ConfigError("space", path, "is given twice", "keep one of the two")
            space[path] = word
        return cls.parse(space)

    def describe(self) -> dict[str, str]:
        """The space as words; `parse` reads it back."""
        return {path: str(each) for path, each in self.items()}

    def sample(self, rng: np.random.Generator) -> Values:
        """One value of each, independently."""
        return {path: each.from_unit(float(rng.random())) for path, each in self.items()}

    def resample(self, values: Mapping[str, Any], rng: np.random.Generator, probability: float) -> Values:
        """Each value drawn anew with this probability (1711.09846, section 4.1), else as it was."""
        drawn = self.sample(rng)
        return {path: drawn[path] if rng.random() < probability else values[path] for path in self}

    def perturb(
        self, values: Mapping[str, Any], rng: np.random.Generator, factors: Sequence[float] = FACTORS
    ) -> Values:
        """Each value times one of the factors, independently, within the space (1711.09846, section 4.1)."""
        return {path: each.perturb(values[path], rng, factors) for path, each in self.items()}

    def to_unit(self, values: Mapping[str, Any]) -> np.ndarray:
        """Positions in [0, 1], float64 [number of hyper-parameters]."""
        return np.array([each.to_unit(values[path]) for path, each in self.items()])

    def from_unit(self, units: Sequence[float] | np.ndarray) -> Values:
        """The values at positions in [0, 1]."""
        return {path: each.from_unit(float(unit)) for (path, each), unit in zip(self.items(), units, strict=True)}

    def __repr__(self) -> str:
        return f"SearchSpace({self.describe()})"


def _parse_distribution(path: str, given: object) -> Distribution:
    if isinstance(given, Interval | Options):
        return given
    if isinstance(given, list | tuple):
        return Options(tuple(given))
    call = _CALL.fullmatch(given) if isinstance(given, str) else None
    if call is None:
        raise ConfigError(path, given, "is no distribution", f"write {WORDS}")
    name, written = call.groups()
    try:
        arguments = parse_yaml(f"[{written}]")
    except yaml.YAMLError:
        raise ConfigError(path, given, "cannot be read", f"write {WORDS}") from None
    if name == "choice":
        return Options(tuple(arguments))
    if name not in _INTERVALS:
        raise ConfigError(path, given, f"{name!r} is no distribution", f"write {WORDS}")
    if len(arguments) != 2:
        problem = f"has {len(arguments)} numbers"
        raise ConfigError(path, given, problem, f"give the lower and the upper end, as in {name}(1,10)")
    is_log, is_integer = _INTERVALS[name]
    return Interval(arguments[0], arguments[1], is_log, is_integer)


def flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"a": {"b": 1}}` as `a.b`, 1; nothing of an empty mapping."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nest(parameters: Mapping[str, object]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    nested: dict[str, Any] = {}
    for path, value in parameters.items():
        *parents, leaf = path.split(".")
        node = nested
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return nested
