"""Arrays without data: kernels that make views give with them what they give with data."""

import numpy as np
import pytest

from refgrad.backends.numpy.abstract import AbstractArray
from refgrad.backends.numpy.layout import MemoryLayout
from refgrad.backends.numpy.memory import owner
from refgrad.backends.numpy.registry import find, in_tuple

pytestmark = pytest.mark.interpreter

INTS = {
    "Expand": [[2, 4, 6, 3]],
    "Reshape": [[6, -1]],
    "Slice": [[0, 1], [5, -1], [0, 2], [2, 1]],
    "Split": [[1, 3]],
    "Squeeze": [[1]],
    "Unsqueeze": [[0, 3]],
}
VIEWS = {
    "Identity": {},
    "Reshape": {},
    "Flatten": {"axis": 2},
    "Transpose": {"perm": [2, 0, 1]},
    "Squeeze": {},
    "Unsqueeze": {},
    "Expand": {},
    "Slice": {},
    "Split": {"axis": 0, "_wanted": (True, True)},
}


def without_data(array: np.ndarray) -> AbstractArray:
    return AbstractArray(MemoryLayout(array.shape, tuple(s // array.itemsize for s in array.strides)), array.dtype)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("op_type", VIEWS)
def test_a_view_without_data_lies_as_one_with_data(op_type, order):
    shape = (4, 1, 3) if op_type in ("Squeeze", "Expand") else (4, 6, 3)
    data = np.zeros([shape[k] for k in order], np.float32).transpose(np.argsort(order).tolist())
    kernel = find("", op_type, 21)
    assert kernel is not None
    assert kernel.abstract is not None
    rest = [np.array(value, np.int64) for value in INTS.get(op_type, ())]
    abstract = without_data(data)
    wanted = in_tuple(kernel.function(data, *rest, **VIEWS[op_type]))
    found = in_tuple(kernel.abstract(abstract, *rest, **VIEWS[op_type]))
    assert len(found) == len(wanted)
    for mine, array in zip(found, wanted, strict=True):
        if mine is None:  # a new array
            assert not np.shares_memory(array, data)
            continue
        assert mine.shape == array.shape
        assert (owner(mine) is abstract) == np.shares_memory(array, data)
        assert [s for n, s in zip(mine.shape, mine.strides, strict=True) if n > 1] == [
            s for n, s in zip(array.shape, array.strides, strict=True) if n > 1
        ]
