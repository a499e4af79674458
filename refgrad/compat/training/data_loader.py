"""The batches of onnxcustom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.compat.training.arrays import array_from, ort_value_from
from refgrad.compat.utils.onnxruntime_helper import device_of
from refgrad.errors import FeedError
from refgrad.ranges import checked

__all__ = ["OrtDataLoader"]


class OrtDataLoader:
    """Batches of consecutive samples, as many as it takes to have as many samples as there are.

    A batch starts at random, from NumPy's global generator, so that a sample may come twice or not at all. Without
    `random_iter` the batches follow each other, and the last one ends with the last sample.

    :param X: [N, ...].
    :param y: [N] or [N, 1]; the batches have [n, 1].
    :param sample_weight: [N] or [N, 1]; the batches have [n].
    :param device: "cpu", "cuda", "cuda:1" or an OrtDevice. It has no effect: the batches are on the CPU.
    :raises FeedError: the lengths differ.
    :raises OptionError: there is no such device.

    >>> import numpy as np
    >>> from refgrad.compat.training.data_loader import OrtDataLoader
    >>> loader = OrtDataLoader(np.arange(10).reshape(5, 2), np.arange(5), batch_size=2, random_iter=False)
    >>> [y.ravel().tolist() for X, y in loader.iter_numpy()]
    [[0, 1], [2, 3], [3, 4]]
    """

    def __init__(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        batch_size: int = 20,
        device: Any = "cpu",
        random_iter: bool = True,
    ) -> None:
        checked("batch_size", batch_size)
        if isinstance(device, str):
            device_of(device)
        self.batch_size, self.device, self.random_iter = batch_size, device, random_iter
        self._arrays = [array_from(X), array_from(y).reshape(-1, 1)]
        if sample_weight is not None:
            self._arrays.append(array_from(sample_weight).reshape(-1))
        for name, array in zip(("y", "sample_weight"), self._arrays[1:], strict=False):
            if len(array) != len(self):
                raise FeedError(f"X has {len(self)} samples, and {name} has {len(array)}.")

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._arrays[0])

    def __repr__(self) -> str:
        """The arguments."""
        return f"{type(self).__name__}(..., ..., batch_size={self.batch_size!r}, device={self.device!r})"

    @property
    def data_np(self) -> tuple[np.ndarray, ...]:
        """X, y and the weights if there are any."""
        return tuple(self._arrays)

    @property
    def data_ort(self) -> tuple[Any, ...]:
        """The same arrays as OrtValues. Without onnxruntime they are arrays with the method `numpy()`."""
        return tuple(map(ort_value_from, self._arrays))

    @property
    def desc(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """The shape and the type of each array."""
        return [(array.shape, array.dtype) for array in self._arrays]

    def iter_numpy(self) -> Iterator[tuple[np.ndarray, ...]]:
        """The batches of one epoch: X, y and the weights if there are any."""
        last = max(len(self) - self.batch_size, 0)
        for start in range(0, len(self), self.batch_size):
            first = int(np.random.randint(0, last + 1)) if self.random_iter else min(start, last)
            yield tuple(array[first : first + self.batch_size] for array in self._arrays)

    def iter_ortvalue(self) -> Iterator[tuple[Any, ...]]:
        """The same batches as OrtValues. Without onnxruntime they are arrays with the method `numpy()`."""
        for batch in self.iter_numpy():
            yield tuple(map(ort_value_from, batch))
