"""Words that reach into specs: through fields and mappings of specs, and what is said of those that fit nothing."""

import math
from typing import Any, ClassVar

import pytest
import yaml
from pydantic import Field, SecretStr, field_validator

from shoal.config import Spec, format_override, last_override
from shoal.errors import ConfigError


class Wheel(Spec):
    size: int = 16
    colour: str = "black"


class Axle(Spec):
    wheel: Wheel = Wheel()
    length: int = 100


class Cart(Spec):
    front: Wheel = Wheel()
    spare: Wheel | None = None
    wheels: dict[str, Wheel] = Field(default_factory=dict)
    axles: dict[str, Axle] = Field(default_factory=dict)
    notes: dict[str, str] = Field(default_factory=dict)
    more: list[Wheel] = Field(default_factory=list)


def test_words_reach_into_mappings_of_specs() -> None:
    cart = Cart().override(["wheels.left.size=20", "wheels.left.colour=red", "wheels.right.size=18"])
    assert cart.wheels == {"left": Wheel(size=20, colour="red"), "right": Wheel(size=18)}
    assert cart.override(["wheels.left.size=3"]).wheels["left"] == Wheel(size=3, colour="red")
    assert Cart().override(["wheels={left: {size: 2}}"]).wheels == {"left": Wheel(size=2)}
    axles = Cart().override(["axles.rear.wheel.size=20", "axles.rear.wheel.colour=red"]).axles
    assert axles == {"rear": Axle(wheel=Wheel(size=20, colour="red"))}
    dotted = Cart().override(["wheels.v2.5-left.size=20", "wheels.v2.5-left.colour=red", "axles.a.b.wheel.size=3"])
    assert dotted.wheels == {"v2.5-left": Wheel(size=20, colour="red")}
    assert dotted.axles == {"a.b": Axle(wheel=Wheel(size=3))}
    assert Cart().override(["notes.anything=goes"]).notes == {"anything": "goes"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"frnt": Wheel()}, "frnt = Wheel(size=16, colour='black'): no such field. did you mean 'front'?"),
        ({"front": {"size": "big"}}, "front.size = 'big': Input should be a valid integer"),
        ({"more": [Wheel(), 3]}, "more.1 = 3: Input should be a valid dictionary or instance of Wheel"),
    ],
)
def test_a_spec_that_is_made_in_python_is_refused_in_the_same_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Cart(**values)
    assert str(caught.value).startswith(message)


class Scale(Spec):
    mass: float | None = None
    marks: dict[str, int] = Field(default_factory=dict)
    spares: list[Wheel] = Field(default_factory=list)
    is_level: bool = True
    label: int | bool = 3
    notes: dict[str, Any] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("values", "field"),
    [({"mass": True}, "mass"), ({"marks": {"a": 1, "b": False}}, "marks"), ({"spares": [{"size": True}]}, "size")],
)
def test_a_boolean_is_no_number(values: dict[str, Any], field: str) -> None:
    for make in (Scale.parse, lambda given: Scale(**given)):
        with pytest.raises(ConfigError, match="is a boolean, and the field takes numbers") as caught:
            make(values)
        assert caught.value.field.endswith(field)
    assert Scale.parse({"is_level": False, "label": True, "notes": {"a": True}}).label is True


def test_a_spec_that_is_refused_in_python_tells_no_secret() -> None:
    for values in ({"name": 3, "key": "hush"}, {"key": "hush"}):
        with pytest.raises(ConfigError) as caught:
            Door(**values)  # type: ignore[arg-type]
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("frnt.size=1", "frnt.size = 1: no such field. did you mean 'front'?"),
        ("wheels.left.sise=1", "wheels.left.sise = 1: no such field. did you mean 'wheels.left.size'?"),
        ("wheels={left: {sise: 1}}", "wheels.left.sise = 1: no such field. did you mean 'wheels.left.size'?"),
        ("colour=red", "colour = 'red': no such field. did you mean 'front.colour'?"),
        ("more=[{sise: 1}]", "more.0.sise = 1: no such field"),
        ("wheels.left.size=big", "wheels.left.size = 'big'"),
        ("axles.rear.wheel.sise=1", "axles.rear.wheel.sise = 1: no such field. did you mean 'axles.rear.wheel.size'?"),
        ("axles.rear.length.more=1", "'length' has no fields of its own"),
        ("front.size.more=1", "'size' has no fields of its own"),
        ("wheels.left=fast", "wheels.left = 'fast'"),
    ],
)
def test_what_fits_nothing_is_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Cart().override([word])
    assert message in str(refused.value)


class Door(Spec):
    """Its locks open with a key, which is no mask."""

    name: str
    key: SecretStr

    @field_validator("key")
    @classmethod
    def _not_masked(cls, key: SecretStr) -> SecretStr:
        if not key.get_secret_value().strip("*"):
            raise ValueError("it was masked")
        return key


class House(Spec):
    doors: list[Door] = Field(default_factory=list)
    cellar: Door | None = None
    floors: int = 1


def test_a_recorded_spec_is_read_with_its_secrets_given_again() -> None:
    doors = "doors=[{name: front, key: hush}]"
    house = House().override([doors, "cellar.name=cellar", "cellar.key=hushed", "floors=2"])
    again = House.from_record(house.to_yaml(), ["cellar.key=other", doors])
    assert (again.floors, again.doors) == (2, house.doors)
    assert again.cellar == Door(name="cellar", key=SecretStr("other"))
    assert House.from_record("floors: 3\n", []) == House(floors=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "doors = '**********': is a secret, which no record holds. give it again, as in doors=..."),
        (["doors=[]"], "cellar.key = '**********': is a secret, which no record holds. give it again, as in cellar.k"),
        (["doors=[]", "cellar.key=x", "floors=many"], "floors = 'many'"),
        (["doors=[{name: front}]", "cellar.key=x"], "doors.0.key"),
    ],
)
def test_a_recorded_secret_that_is_not_given_again_is_named(words: list[str], message: str) -> None:
    house = House().override(["doors=[{name: front, key: hush}]", "cellar={name: cellar, key: hushed}"])
    with pytest.raises(ConfigError) as refused:
        House.from_record(house.to_yaml(), words)
    assert message in str(refused.value)


AWKWARD = [
    "plain",
    "a b",
    "on",
    "1",
    "1e3",
    "1e-3",
    "1:30",
    "null",
    "a: b #1",
    "it's",
    '"',
    " x ",
    "[x",
    "@x",
    "\N{GRINNING FACE}",
    "",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_a_word_that_is_built_says_exactly_its_value(text: str) -> None:
    built = format_override("front.colour", text)
    assert Cart().override([built]).front.colour == text
    assert last_override(["front.colour=other", built], "front.colour") == text


def test_a_list_is_built_of_texts() -> None:
    class Columns(Spec):
        columns: list[str] = Field(default_factory=list)

    assert Columns().override([format_override("columns", AWKWARD)]).columns == AWKWARD
    assert format_override("columns", "a/b.c") == "columns=a/b.c"


class Free(Spec):
    args: dict[str, object] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-3", 1e-3), ("-2E5", -2e5), ("+1.5e3", 1500.0), (".5e1", 5.0), (".5", 0.5), ("2.", 2.0), ("1_0.5", 10.5)),
        *((".inf", math.inf), ("-.INF", -math.inf), ("17", 17), ("-0x10", -16), ("1_000", 1000), ("010", 8)),
        *((each, each) for each in ("1:30", "1:30.5", "e3", ".", ".e3", "1e", "08", "1.2.3", "inf")),
        *(("on", True), ("~", None), ("[1e3, 1:30]", [1000.0, "1:30"])),
    ],
)
def test_numbers_are_read_as_they_are_commonly_written(text: str, value: object) -> None:
    for spec in (Free().override([f"args.x={text}"]), Free.from_yaml(f"args: {{x: {text}}}")):
        assert (spec.args["x"], type(spec.args["x"])) == (value, type(value))


def test_the_last_word_counts_and_what_is_no_text_is_as_it_was_written() -> None:
    assert last_override(["a=1", "b=x", "a=0x10"], "a") == "0x10"
    assert last_override(["b=x"], "a") == ""


def test_a_word_that_is_no_yaml_is_refused_without_being_shown() -> None:
    for text in ("[{key: S3CRET", "a: b: S3CRET", "S3CRET\x7f"):
        with pytest.raises(ConfigError, match=r"front.colour = '...': is not YAML: .*put it in quotes") as caught:
            Cart().override([f"front.colour={text}"])
        assert "S3CRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("2026-02-30", "day is out of range for month"),
        ("0x_", "invalid literal for int"),
        ("9" * 5000, "Exceeds the limit"),
        ("{size: 1, colour: red, size: 2}", "'size' stands twice in it"),
    ],
)
def test_what_only_looks_like_a_value_is_refused_by_its_field(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"front = '...': is not YAML: {problem}"):
        Cart().override([f"front={text}"])
    with pytest.raises(ConfigError, match=problem):
        Cart.from_yaml(f"front: {text}")
    assert Cart().override([format_override("notes.x", text)]).notes == {"x": text}


def test_a_part_that_stands_twice_in_a_file_is_refused_and_one_that_is_merged_is_not() -> None:
    with pytest.raises(ConfigError, match="'front' stands twice in it"):
        Cart.from_yaml("front: {size: 2}\nspare: {size: 1}\nfront: {colour: red}\n")
    merged = "front: &wheel {size: 2, colour: red}\nmore: [{<<: *wheel, size: 3}, *wheel]\nspare: {<<: *wheel}\n"
    assert Cart.from_yaml(merged).more == [Wheel(size=3, colour="red"), Wheel(size=2, colour="red")]


class Engine(Spec):
    """Of a release in which `power_kw` had another name."""

    recorded_always: ClassVar = ("fuel",)

    fuel: str = "petrol"
    power: float = 40.0
    cylinders: int = 4


class Car(Spec):
    engine: Engine = Engine(cylinders=6)
    spare: Engine | None = None
    seats: int = 5
    key: SecretStr = SecretStr("")


class RenamedEngine(Spec):
    fuel: str = "petrol"
    power_kw: float = 50.0
    cylinders: int = 4


class RenamedCar(Spec):
    engine: RenamedEngine = RenamedEngine(cylinders=6)
    seats: int = 5


def test_a_record_has_what_was_set_and_no_default() -> None:
    assert Car().to_record() == "{}\n"
    assert Car().override(["seats=5"]).to_record() == "seats: 5\n"  # a later release may have another default
    car = Car().override(["engine.power=9"]).override(["seats=2"])
    assert yaml.safe_load(car.to_record()) == {"engine": {"fuel": "petrol", "power": 9.0, "cylinders": 6}, "seats": 2}
    assert Car.from_record(car.to_record()) == car
    assert Car.from_record("seats: 2\n", ["engine.power=9"]) == car
    assert Car().update({"engine": {"power": 9.0}, "seats": 2}) == car
    assert Car().update({"engine": {"power": 9.0}}).engine.cylinders == 6


def test_a_record_outlives_a_field_that_was_not_set_and_has_another_name_now(caplog: pytest.LogCaptureFixture) -> None:
    record = Car().override(["engine.cylinders=8"]).to_record()
    assert RenamedCar.from_record(record).engine == RenamedEngine(cylinders=8)
    assert not caplog.records


def test_fields_of_a_record_that_no_longer_exist_are_named_and_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    record = Car().override(["engine.power=9", "spare={}", "key=hush"]).to_yaml()
    again = RenamedCar.from_record(record, ["engine.power_kw=7"])
    assert again == RenamedCar(engine=RenamedEngine(cylinders=6, power_kw=7.0))
    (said,) = [each.getMessage() for each in caplog.records]
    assert said.endswith(
        "they have no effect: engine.power=9.0, spare={'fuel': 'petrol', 'power': 40.0, 'cylinders': 4}, key=**********"
    )
    with pytest.raises(ConfigError, match=r"seats = 'many'"):
        RenamedCar.from_record(f"{record}seats: many\n".replace("seats: 5\n", ""))
    with pytest.raises(ConfigError, match="no such field"):
        RenamedCar.from_yaml(record)


def test_a_masked_secret_may_be_left_out() -> None:
    house = House().override(["doors=[{name: front, key: hush}]", "floors=2"])
    assert House.from_record(house.to_record(), leave_out=["doors"]) == House(floors=2)
