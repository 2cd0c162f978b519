"""The hardware that a plan is made for: hosts, devices, network, with their units. Pure values."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from shoal.config import Spec

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z/]+)")
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_rate(value: object) -> object:
    """Bytes per second of `10Gbit`, `10Gbit/s`, `10Gb` (bits) or `1.2GB` (bytes). Raises ValueError."""
    matched = _match(value, r"([kKMGT]?)(bit|b|B)(?:/s|ps)?")
    if matched is None:
        raise ValueError("is no rate: write 10Gbit, or 1.2GB for bytes, each a second")
    number, prefix, unit = matched
    return number * _DECIMAL[prefix.lower()] / (1 if unit == "B" else 8)


def parse_size(value: object) -> object:
    """Bytes of `16GB` or `512MiB`; prefixes are powers of 1024. Raises ValueError."""
    matched = _match(value, r"([kKMGT]?)(?:i?(B))?")
    if matched is None:
        raise ValueError("is no amount of memory: write 512MB or 16GB")
    number, prefix, _ = matched
    return round(number * _BINARY[prefix.lower()])


def parse_duration(value: object) -> object:
    """Seconds of `50us`, `0.2ms` or `1s`. Raises ValueError."""
    matched = _match(value, r"([mu]?)(s)")
    if matched is None:
        raise ValueError("is no duration: write 50us or 0.2ms")
    number, prefix, _ = matched
    return number * {"": 1.0, "m": 1e-3, "u": 1e-6}[prefix]


def parse_flops(value: object) -> object:
    """Operations per second of `300GFLOP` or `20TFLOP/s`. Raises ValueError."""
    matched = _match(value, r"([kKMGTP]?)(FLOPs?|FLOPS)(?:/s|ps)?")
    if matched is None:
        raise ValueError("is no speed: write 300GFLOP or 20TFLOP, each a second")
    number, prefix, _ = matched
    return number * _DECIMAL[prefix.lower()]


def _match(value: object, unit: str) -> tuple[float, str, str] | None:
    """Number, prefix and unit of a positive quantity."""
    found = _QUANTITY.fullmatch(str(value).strip())
    named = re.fullmatch(unit, found[2]) if found is not None else None
    if found is None or named is None or not float(found[1]):
        return None
    return float(found[1]), named[1], named[2] or ""


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
    network: Annotated[float | None, BeforeValidator(lambda value: value and parse_rate(value))] = None
    latency: Annotated[float | None, BeforeValidator(lambda value: value and parse_duration(value))] = None
    device_memory: Annotated[int | None, BeforeValidator(lambda value: value and parse_size(value))] = None
    device_flops: Annotated[float | None, BeforeValidator(lambda value: value and parse_flops(value))] = None
    device_bandwidth: Annotated[float | None, BeforeValidator(lambda value: value and parse_rate(value))] = None
