"""How the members of a population learn from each other: a field of a population's spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from shoal.config import Spec

EvolutionName = Literal["pbt", "halving", "random_search"]

_FIELDS: dict[str, tuple[str, ...]] = {
    "pbt": ("every", "quantile", "factors", "resample"),
    "halving": ("every", "reduction", "refill"),
    "random_search": (),
}


class EvolutionSpec(Spec):
    """`evolution=pbt`, or `evolution.name=pbt evolution.quantile=0.2`.

    name:     pbt: the worst members copy the best ones and perturb their hyper-parameters (1711.09846)
              halving: the best 1/`reduction` of each age goes on, others make room for new ones (1810.05934)
              random_search: each keeps the hyper-parameters that it drew
    every:    rounds between two decisions; halving: the age of a member in rounds when it is first compared
    quantile: of the members, those that are replaced, and those that are copied
    factors:  with one of which a perturbed hyper-parameter is multiplied
    resample: the probability that a hyper-parameter is drawn anew instead
    reduction: halving: η of the paper
    refill:   halving: whether a new member takes the row of one that was stopped
    """

    recorded_always = ("name",)  # which `from_override` compares

    name: EvolutionName = "pbt"
    every: int = Field(default=1, ge=1)
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    factors: tuple[float, float] = (0.8, 1.2)
    resample: float = Field(default=0.25, ge=0, le=1)
    reduction: int = Field(default=3, ge=2)
    refill: bool = True

    @model_validator(mode="before")
    @classmethod
    def _parse_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def from_override(cls, text: str, before: Mapping[str, Any]) -> object:
        """Another evolution begins with its own defaults."""
        return before if text == before.get("name") else {"name": text}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        low, high = self.factors
        if not 0 < low < 1 < high:
            raise ValueError(f"factors = {list(self.factors)}: give one below 1 and one above, as in [0.8, 1.2]")
        for field, info in type(self).model_fields.items():
            if field != "name" and field not in _FIELDS[self.name] and getattr(self, field) != info.default:
                names = " or ".join(name for name, fields in _FIELDS.items() if field in fields)
                raise ValueError(f"{field}: only with evolution.name={names}")
        return self
