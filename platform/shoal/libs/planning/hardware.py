"""The hardware that a plan is made for: hosts, devices, network, with their units. Pure values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator, Field

from shoal.config import Spec

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z/]+)")
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _read(unit: str, convert: Callable[[float, str, str], float], problem: str) -> BeforeValidator:
    """A reader of a positive number with a prefix and a unit; None passes.

    unit:    as a regular expression, with groups for the prefix and for the unit
    convert: number, prefix and unit
    """

    def parse(value: object) -> object:
        if not value:
            return value
        quantity = _QUANTITY.fullmatch(str(value).strip())
        named = re.fullmatch(unit, quantity[2]) if quantity is not None else None
        if quantity is None or named is None or not float(quantity[1]):
            raise ValueError(problem)
        return convert(float(quantity[1]), named[1], named[2] or "")

    return BeforeValidator(parse)


# Bytes a second of `10Gbit`, `10Gbit/s`, `10Gb` (bits) or `1.2GB` (bytes); bytes of `16GB` or `512MiB`, in powers of
# 1024; seconds of `50us`, `0.2ms` or `1s`; operations a second of `300GFLOP` or `20TFLOP/s`.
Rate = Annotated[
    float | None,
    _read(
        r"([kKMGT]?)(bit|b|B)(?:/s|ps)?",
        lambda number, prefix, unit: number * _DECIMAL[prefix.lower()] / (1 if unit == "B" else 8),
        "is no rate: write 10Gbit, or 1.2GB for bytes, each a second",
    ),
]
Size = Annotated[
    int | None,
    _read(
        r"([kKMGT]?)(?:i?(B))?",
        lambda number, prefix, _: round(number * _BINARY[prefix.lower()]),
        "is no amount of memory: write 512MB or 16GB",
    ),
]
Duration = Annotated[
    float | None,
    _read(
        r"([mu]?)(s)",
        lambda number, prefix, _: number * {"": 1.0, "m": 1e-3, "u": 1e-6}[prefix],
        "is no duration: write 50us or 0.2ms",
    ),
]
Speed = Annotated[
    float | None,
    _read(
        r"([kKMGTP]?)(FLOPs?|FLOPS)(?:/s|ps)?",
        lambda number, prefix, _: number * _DECIMAL[prefix.lower()],
        "is no speed: write 300GFLOP or 20TFLOP, each a second",
    ),
]


class HardwareSpec(Spec):
    """`hosts=4 devices=8 network=10Gbit device_memory=16GB`.

    hosts:            machines
    devices:          on each: GPUs, or equal parts of the cores; None: those of this machine
    network:          bytes per second from host to host, in each direction; needed with several hosts
    latency:          seconds of a message from host to host; None: that of this machine's loopback, the least it can be
    device_memory:    bytes on each; None: that of this machine's GPU, or the device's part of this machine's memory
    device_flops:     operations per second of each, in large matrix products; None: as fast as a device of this machine
    device_bandwidth: bytes per second between devices of a host; None: as measured between processes of this machine
    """

    hosts: int = Field(default=1, ge=1)
    devices: int | None = Field(default=None, ge=1)
    network: Rate = None
    latency: Duration = None
    device_memory: Size = None
    device_flops: Speed = None
    device_bandwidth: Rate = None
