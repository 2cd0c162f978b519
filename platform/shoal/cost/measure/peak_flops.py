"""The peak arithmetic of a device, measured with large matrix products.

Called once by the Trainer, to report a run's utilisation. Takes some hundredths of a second.
"""

from __future__ import annotations

import torch

from shoal.parallel.comm.world import read_clock_s
from shoal.parallel.layers.precision import DTYPES
from shoal.parallel.spec import Precision

_SIZE = {"cpu": 768, "cuda": 8192}
_REPEATS = 4


def measure_peak_flops(device: torch.device, precision: Precision) -> float:
    """Operations per second of square matrix products in `precision`: the fastest of a few.

    The layouts are those of a layer, forward and for its weight's gradient: in bf16 some CPUs take ten times as long
    for two matrices that are both stored by rows.
    """
    size = _SIZE.get(device.type, _SIZE["cpu"])
    left = torch.ones(size, size, dtype=DTYPES[precision], device=device)
    product = torch.empty_like(left)
    fastest_s = float("inf")
    for first, second in [(left, left.T), (left.T, left)] * _REPEATS:
        began_s = read_clock_s(device)
        torch.mm(first, second, out=product)
        fastest_s = min(fastest_s, read_clock_s(device) - began_s)
    return 2.0 * size**3 / fastest_s
