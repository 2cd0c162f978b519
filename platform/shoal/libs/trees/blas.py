"""Matrix products of NumPy arrays on CPU: by the quicker of NumPy's library and torch's, on as many threads as torch.

The wheels of both bring libraries of their own (OpenBLAS and MKL), and which one is quicker depends on the processor:
by a factor of two on some. Called by the cells that are written in NumPy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

Matrix = np.ndarray
Product = Callable[[Matrix, Matrix], Matrix]
_SIZE, _NUM_TRIALS = (512, 150, 450), 8  # some 20 ms


def multiply_by_numpy(a: Matrix, b: Matrix) -> Matrix:
    """[m, k] @ [k, n]."""
    product: Matrix = a @ b
    return product


def multiply_by_torch(a: Matrix, b: Matrix) -> Matrix:
    """[m, k] @ [k, n]."""
    product: Matrix = torch.mm(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    return product


@cache
def find_fastest_product(num_threads: int) -> Product:
    """Try the three products of a layer in float32, once in a process for each number of threads."""
    nodes, inputs, units = _SIZE
    random = np.random.default_rng(0)
    x, d, weight = (
        random.standard_normal(shape, np.float32) for shape in ((nodes, inputs), (nodes, units), (units, inputs))
    )
    products = ((x, weight.T), (d, weight), (d.T, x))  # forward, gradient of x, of the weight
    best = {multiply: [np.inf] * len(products) for multiply in (multiply_by_numpy, multiply_by_torch)}
    for _ in range(_NUM_TRIALS):
        for index, factors in enumerate(products):
            for multiply, times in best.items():
                began_s = time.perf_counter()
                multiply(*factors)
                times[index] = min(times[index], time.perf_counter() - began_s)
    return min(best, key=lambda multiply: sum(best[multiply]))


@contextmanager
def use_torch_threads() -> Iterator[Product]:
    """Within, NumPy's library takes as many threads as torch may; gives the product to use.

    torch's setting does not bind NumPy's library, whose threads then fight those of other processes. The library has
    one setting for all threads of a process: where several are within, the last one decides, and the setting from
    before the first comes back after all of them.
    """
    num_threads = torch.get_num_threads()
    _numpy_threads.enter(num_threads)
    try:
        yield find_fastest_product(num_threads)
    finally:
        _numpy_threads.leave()


class _NumpyThreads:
    """The threads of NumPy's library, while any thread is within `use_torch_threads`."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin again in a forked process, which has none of the other threads."""
        self._lock = Lock()
        self._num_within = 0
        self._before = list[int]()

    def enter(self, num_threads: int) -> None:
        with self._lock:
            if not self._num_within:
                self._before = [library.get_num_threads() for library in _numpy_libraries()]
            self._num_within += 1
            _set_threads([num_threads] * len(self._before))

    def leave(self) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                _set_threads(self._before)


_numpy_threads = _NumpyThreads()
os.register_at_fork(after_in_child=_numpy_threads.forget)


def _set_threads(numbers: list[int]) -> None:
    for library, number in zip(_numpy_libraries(), numbers, strict=True):
        if library.get_num_threads() != number:
            library.set_num_threads(number)


@cache
def _numpy_libraries() -> list[Any]:
    """NumPy's BLAS among the libraries of this process; a library of torch's follows torch's setting already."""
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    return [each for each in libraries if "numpy" in each.filepath]
