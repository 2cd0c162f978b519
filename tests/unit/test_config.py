"""Words that reach into specs: through fields and mappings of specs, and what is said of those that fit nothing."""

from __future__ import annotations

import pytest
from pydantic import Field

from shoal.config import Spec
from shoal.errors import ConfigError


class Wheel(Spec):
    size: int = 16
    colour: str = "black"


class Cart(Spec):
    front: Wheel = Wheel()
    spare: Wheel | None = None
    wheels: dict[str, Wheel] = Field(default_factory=dict)
    notes: dict[str, str] = Field(default_factory=dict)
    more: list[Wheel] = Field(default_factory=list)


def test_words_reach_into_fields() -> None:
    cart = Cart().override(["front.size=20", "spare.size=18"])
    assert (cart.front.size, cart.spare) == (20, Wheel(size=18))


def test_words_reach_into_mappings_of_specs() -> None:
    cart = Cart().override(["wheels.left.size=20", "wheels.left.colour=red", "wheels.right.size=18"])
    assert cart.wheels == {"left": Wheel(size=20, colour="red"), "right": Wheel(size=18)}
    assert cart.override(["wheels.left.size=3"]).wheels["left"] == Wheel(size=3, colour="red")
    assert Cart().override(["wheels={left: {size: 2}}"]).wheels == {"left": Wheel(size=2)}
    assert Cart().override(["notes.anything=goes"]).notes == {"anything": "goes"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("frnt.size=1", "frnt.size = 1: no such field. did you mean 'front'?"),
        ("wheels.left.sise=1", "wheels.left.sise = 1: no such field. did you mean 'size'?"),
        ("wheels={left: {sise: 1}}", "wheels.left.sise = 1: no such field. did you mean 'size'?"),
        ("more=[{sise: 1}]", "more.0.sise = 1: no such field"),
        ("wheels.left.size=big", "wheels.left.size = 'big'"),
        ("front.size.more=1", "'size' has no fields of its own"),
    ],
)
def test_what_fits_nothing_is_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Cart().override([word])
    assert message in str(refused.value)
