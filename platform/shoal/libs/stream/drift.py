"""Notices that the errors of a sensor have become larger: the test of Page and Hinkley, for all sensors at once.

Called by `OnlineTrainer`. Pure NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_FIELDS = ("counts", "means", "sums", "minima")


class PageHinkley:
    """Alarms when the cumulated excess of errors over their mean rises `threshold` above its lowest value.

        m_t = m_{t-1} + (e_t - mean(e_1..e_t) - tolerance);   alarm: m_t - min(m) > threshold

    Page, "Continuous inspection schemes" (1954); Gama et al., "A survey on concept drift adaptation" (2014), section
    3.2.2. After an alarm, a sensor's test begins anew.

    min_count: errors of a sensor before its first alarm
    """

    def __init__(self, tolerance: float = 0.25, threshold: float = 50.0, min_count: int = 100) -> None:
        self._tolerance, self._threshold, self._min_count = tolerance, threshold, min_count
        self.counts, self.means, self.sums, self.minima = (np.zeros(0) for _ in _FIELDS)

    def update(self, sensors: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """Which of `sensors` [B], each at most once, drift with these errors [B]."""
        self._grow(int(sensors.max(initial=-1)) + 1)
        counts = self.counts[sensors] + 1
        means = self.means[sensors] + (errors - self.means[sensors]) / counts
        sums = self.sums[sensors] + errors - means - self._tolerance
        minima = np.minimum(self.minima[sensors], sums)
        is_drifting = (sums - minima > self._threshold) & (counts >= self._min_count)
        for name, values in zip(_FIELDS, (counts, means, sums, minima), strict=True):
            getattr(self, name)[sensors] = np.where(is_drifting, 0.0, values)
        drifting: np.ndarray = sensors[is_drifting]
        return drifting

    def _grow(self, size: int) -> None:
        missing = size - len(self.counts)
        if missing > 0:
            for name in _FIELDS:
                setattr(self, name, np.pad(getattr(self, name), (0, missing)))

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).tolist() for name in _FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _FIELDS:
            setattr(self, name, np.array(state[name], np.float64))
