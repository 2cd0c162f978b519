"""docs/protocol.md and the code say the same: every word of the protocol is on the page, and none besides; and the
bytes of its example are the bytes that the code writes."""

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import msgpack
import msgspec
import numpy as np
import pytest
import zmq

import shoal.rl.first_game
import shoal.rl.gateway.gateway
import shoal.rl.gateway.handshake
import shoal.rl.gateway.sessions
import shoal.wire.messages
import shoal.wire.segment
from shoal.actor.policy import make_policy
from shoal.errors import ConfigError
from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.handshake import _FATAL
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.part_specs import GatewaySpec
from shoal.rl.spec import RLSpec, experience_spec
from shoal.weights import WeightSnapshot, WeightStore, decode_tensors
from shoal.wire import (
    PROTOCOL_VERSION,
    DropReason,
    EpisodeSummary,
    ExperienceSpec,
    ExtraSpec,
    MessageLimits,
    PolicySpec,
    Segment,
    SegmentMessage,
    TensorHeader,
    TensorSpec,
    WeightsMessage,
    Welcome,
    decode,
    encode,
    pack_segment,
    unpack_segment,
)
from shoal.wire.experience_spec import DTYPES, ConvolutionSpec, SpaceSpec
from shoal.wire.messages import Message, RefusedRow

EXCHANGE = json.loads((Path(__file__).parents[2] / "docs" / "protocol-example.json").read_text())
PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
KINDS = {kind.__struct_config__.tag: kind for kind in Message.__args__}
NESTED = {
    "episode summary": EpisodeSummary,
    "tensor header": TensorHeader,
    "refused row": RefusedRow,
    "experience spec": ExperienceSpec,
    "extra spec": ExtraSpec,
    "tensor spec": TensorSpec,
    "policy spec": PolicySpec,
    "space spec": SpaceSpec,
    "convolution spec": ConvolutionSpec,
}
TYPES = {
    int: "int",
    str: "str",
    bool: "bool",
    bytes: "bin",
    float: "float",
    float | None: "float or nil",
    int | None: "int or nil",
    int | list[int | float] | None: "int, array of number or nil",
    int | float | list[int | float] | msgspec.UnsetType: "number or array of number",
    bool | None: "bool or nil",
    bool | msgspec.UnsetType: "bool",
    int | msgspec.UnsetType: "int",
    str | msgspec.UnsetType: "str",
    tuple[int, ...]: "array of int",
    tuple[float, ...]: "array of float",
    tuple[str, ...]: "array of str",
    tuple[TensorHeader, ...]: "array of tensor header",
    dict[str, Any]: "map",
    Mapping[str, bool | int | float | str]: "map",
    Mapping[str, bool | int | float | str] | msgspec.UnsetType: "map",
    tuple[RefusedRow, ...]: "array of refused row",
    tuple[EpisodeSummary, ...] | msgspec.UnsetType: "array of episode summary",
    tuple[tuple[str, str], ...]: "array of [str, str]",
    ExperienceSpec: "experience spec",
    TensorSpec: "tensor spec",
    PolicySpec: "policy spec",
    SpaceSpec | None: "space spec or nil",
    tuple[SpaceSpec, ...]: "array of space spec",
    tuple[ConvolutionSpec, ...]: "array of convolution spec",
    tuple[ExtraSpec, ...]: "array of extra spec",
}


def section(title: str) -> str:
    """What stands under the heading `title`, up to the next heading."""
    found = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", PAGE, re.M | re.S)
    assert len(found) == 1, f"one section {title!r} on the page, not {len(found)}"
    return str(found[0])


def table(title: str) -> list[list[str]]:
    """The rows of the table under a heading, without its head; each cell without its backquotes."""
    rows = [line.strip("|").split("|") for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def column(title: str) -> list[str]:
    return [row[0] for row in table(title)]


def _describe_default(default: object) -> str:
    return default.decode() if isinstance(default, bytes) else "absent"


def fields(struct: type[msgspec.Struct]) -> list[list[str]]:
    """The same table, out of the code: name, type, default."""
    rows = []
    for field in msgspec.structs.fields(struct):
        value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        default = "required" if field.required else json.dumps(value, default=_describe_default)
        default = default.replace("null", "nil").replace('"absent"', "absent")
        rows.append([field.name, TYPES[field.type], default])
    return rows


def headings() -> dict[str, str]:
    """kind -> direction, from the headings of the messages."""
    return dict(re.findall(r"^### (\w+) \((.*)\)$", PAGE, re.M))


# -- words ------------------------------------------------------------------------------------------------------------


def test_every_kind_has_a_section_with_its_direction_and_there_are_no_others() -> None:
    assert headings().keys() == KINDS.keys()
    for kind, direction in headings().items():
        documentation = KINDS[kind].__doc__ or ""
        assert documentation.lower().startswith(direction) or (kind, direction) == ("pong", "either way")


@pytest.mark.parametrize("kind", KINDS)
def test_fields_types_and_defaults_of_a_message(kind: str) -> None:
    assert [row[:3] for row in table(f"{kind} ({headings()[kind]})")] == fields(KINDS[kind])


@pytest.mark.parametrize("name", NESTED)
def test_fields_types_and_defaults_of_a_part(name: str) -> None:
    assert [row[:3] for row in table(name)] == fields(NESTED[name])


def test_dtypes_and_their_sizes() -> None:
    sizes = {name: np.dtype(code).itemsize for name, code in DTYPES.items()}
    assert {row[0]: int(row[1]) for row in table("Tensors")} == sizes


def test_tensors_of_a_segment_are_those_that_it_has() -> None:
    arrays = [field for field in Segment.__dataclass_fields__.values() if field.type == "np.ndarray"]
    assert column("Experience") == [field.name for field in arrays]
    specs = {row[0]: row[1] for row in table("Experience")}
    assert specs["rewards"] == shoal.wire.segment.REWARD.dtype
    assert specs["log_probabilities"] == shoal.wire.segment._LOG_PROBABILITY.dtype
    assert specs["versions"] == shoal.wire.segment._VERSION.dtype
    assert f"at most {shoal.wire.segment._LOG_PROBABILITY.high}" in section("Experience")


def test_drop_reasons() -> None:
    assert set(column("Drop reasons")) == set(DropReason)


def test_acknowledgement_statuses() -> None:
    tree = ast.parse(Path(shoal.rl.gateway.gateway.__file__).read_text())
    method = next(node for node in ast.walk(tree) if getattr(node, "name", "") == "_on_segment")
    words = {node.value for node in ast.walk(method) if isinstance(node, ast.Constant) and node.value}
    assert set(column("Acknowledgements")) == {word for word in words if re.fullmatch("[a-z]+", str(word))}


def codes_in(module: object, function: str, position: int) -> set[str]:
    """The constants that a module passes at `position` to a function of that name."""
    tree = ast.parse(Path(module.__file__).read_text())  # type: ignore[attr-defined]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) == function]
    arguments = [call.args[position] for call in named]
    return {argument.value for argument in arguments if isinstance(argument, ast.Constant)}


def test_error_codes_and_which_of_them_are_fatal() -> None:
    codes = codes_in(shoal.wire.messages, "ProtocolViolation", 0)
    codes |= codes_in(shoal.rl.gateway.gateway, "reject", 1) | codes_in(shoal.rl.gateway.handshake, "reject", 1)
    codes |= codes_in(shoal.rl.gateway.handshake, "_reject_hello", 2)
    codes |= codes_in(shoal.rl.first_game, "ProtocolViolation", 0)
    hello = next(
        node
        for node in ast.walk(ast.parse(Path(shoal.rl.gateway.sessions.__file__).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "find_hello_problem"
    )
    found = [node.value.elts[0] for node in ast.walk(hello) if isinstance(getattr(node, "value", None), ast.Tuple)]  # type: ignore[attr-defined]
    codes |= {each.value for each in found if isinstance(each, ast.Constant)}
    assert len(codes) > 5
    assert set(column("Errors")) == codes
    assert {row[0] for row in table("Errors") if row[1] == "yes"} == set(_FATAL)


def test_policies_that_the_page_describes_are_those_that_the_actor_knows() -> None:
    kinds, activations = table("policy spec")[0][3], table("policy spec")[1][3]
    for kind in re.findall(r'"(\w+)"', kinds):
        assert kind.startswith("mlp_")
        for activation in re.findall(r'"(\w+)"', activations):
            assert make_policy(PolicySpec(kind, activation, ())).kind == kind
            recurrent = PolicySpec(kind.replace("mlp_", "recurrent_"), activation, (), core="gru")
            assert make_policy(recurrent).kind == recurrent.kind
        with pytest.raises(ConfigError):
            make_policy(PolicySpec(kind, "swish", ()))


def test_versions_limits_and_defaults() -> None:
    settings = GatewaySpec()
    assert f"version {PROTOCOL_VERSION}\n" in PAGE
    limits = {row[0]: row[1] for row in table("Limits")}
    assert limits["header"] == f"{MessageLimits().max_header_bytes} bytes"
    assert limits["frames of a message, with the header"] == str(MessageLimits().max_frames)
    assert f"({settings.max_message_bytes} unless" in limits["message, all frames together"]
    words = " ".join(section("Limits").split())
    assert f"`heartbeat_s` {settings.heartbeat_s}, `timeout_s` {settings.timeout_s}" in words
    assert f"at most {settings.max_credits} segments" in words
    assert f"at most {settings.max_version_lag} behind" in words


# -- bytes ------------------------------------------------------------------------------------------------------------


def example(kind: str) -> list[bytes]:
    """The frames of one message of the worked example."""
    (block,) = re.findall(rf"^```hex {kind}\n(.*?)^```", PAGE, re.M | re.S)
    frames = re.split(r"^# frame \d.*\n", block, flags=re.M)[1:]
    return [bytes.fromhex("".join(line.partition("#")[0] for line in frame.splitlines())) for frame in frames]


def cart_pole() -> ExperienceSpec:
    """What a run with a policy of one layer says in `welcome`."""
    environment = gymnasium.make("CartPole-v1")
    return experience_spec(
        environment.observation_space, environment.action_space, RLSpec(hidden=(), segment_length=128)
    )


EXAMPLES = re.findall(r"^```hex (\w+)$", PAGE, re.M)


def test_the_example_has_every_message_of_a_first_exchange_and_goes_on() -> None:
    further = ["error_malformed", "error_gap", "pull_again", "ack_again", "bye"]
    assert ["hello", "welcome", "pull", "weights", "segment", "ack", *further] == EXAMPLES


def test_the_bytes_of_the_page_are_those_of_the_file() -> None:
    messages = [bytes.fromhex("".join(message["frames"])) for message in EXCHANGE]
    positions = [0, 1, 2, 3, 4, 5, 8, 9, 12, 14, 15]
    assert [messages[position] for position in positions] == [b"".join(example(name)) for name in EXAMPLES]
    assert [message["kind"] for message in EXCHANGE[:6]] == EXAMPLES[:6]


def test_a_gateway_answers_the_actor_of_the_file_with_the_bytes_of_the_file() -> None:
    store = WeightStore()
    ledger = Ledger()
    context = zmq.Context[zmq.Socket[bytes]]()
    store.publish(WeightSnapshot.of(1, decode_tensors(example("weights")[1])))
    queue = ExperienceQueue(64, ledger)
    gateway = Gateway(GatewaySetting(GatewaySpec(max_credits=16), cart_pole(), "secret", "run-1"), queue, store)
    gateway.start()
    try:
        for number in (1, 2):
            with context.socket(zmq.DEALER) as socket:
                socket.connect(gateway.address)
                for message in (each for each in EXCHANGE if each["connection"] == number):
                    frames = [bytes.fromhex(frame) for frame in message["frames"]]
                    if message["from"] == "actor":
                        socket.send_multipart(frames)
                    else:
                        assert socket.poll(60_000), message["kind"]
                        assert socket.recv_multipart() == frames
        totals = ledger.get_totals()
        assert (totals.received, totals.duplicates, totals.dropped.total()) == (2, 0, 0)
    finally:
        context.destroy(linger=0)
        store.close()
        gateway.close()
        ledger.close()


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_bytes_of_the_example_are_those_that_the_code_writes(kind: str) -> None:
    header = example(kind)[0]
    message = decode(example(kind), MessageLimits())
    assert isinstance(message, KINDS[kind.partition("_")[0]])
    if isinstance(message, Welcome):  # a whole number among low and high was decoded as a float: take what is sent
        message = msgspec.structs.replace(message, spec=cart_pole())
    assert encode(message) == header
    by_hand = msgpack.unpackb(header)
    assert by_hand == json.loads(json.dumps(msgspec.to_builtins(message)))
    assert msgpack.packb(by_hand) == header, "no other library would write it differently"


def test_the_segment_of_the_example_fits_its_welcome_and_is_written_the_same() -> None:
    frames = example("segment")
    message, welcome = decode(frames, MessageLimits()), decode(example("welcome"), MessageLimits())
    assert isinstance(message, SegmentMessage)
    assert isinstance(welcome, Welcome)
    segment = unpack_segment(message, frames[1:], welcome.spec)
    assert [bytes(frame) for frame in pack_segment(segment, message.seq)] == frames
    assert segment.num_steps == 1


def test_the_weights_of_the_example_give_the_log_probability_of_its_segment() -> None:
    """By the equations of the page, in NumPy."""
    frames, segment = example("weights"), example("segment")
    message = decode(frames, MessageLimits())
    assert isinstance(message, WeightsMessage)
    assert hashlib.sha256(frames[1]).hexdigest() == message.sha256
    tensors = decode_tensors(frames[1])
    policy = msgpack.unpackb(example("welcome")[0])["spec"]["policy"]
    assert (policy["kind"], policy["activation"]) == ("mlp_categorical", "tanh")
    outputs = np.frombuffer(segment[1][:16], "<f4").astype(np.float64)
    for number, (weight, bias) in enumerate(policy["layers"]):
        outputs = tensors[weight].astype(np.float64) @ (np.tanh(outputs) if number else outputs) + tensors[bias]
    (action,) = np.frombuffer(segment[2], "<i8")
    computed = outputs[action] - np.log(np.exp(outputs).sum())
    assert np.float32(computed).tobytes() == segment[4]
    assert f"{np.frombuffer(segment[4], '<f4')[0]:.6f}" in PAGE
