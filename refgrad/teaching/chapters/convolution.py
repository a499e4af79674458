"""Chapter 5: the gradient of a convolution scatters what the convolution gathered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from refgrad.extend import Emitter
from refgrad.teaching.chapter import Chapter, ExercisePoint, Mistake, halves

SKELETON = '''\
"""Chapter 5: y[i] = Σ_k x[stride·i + k]·w[k], a convolution of one channel. Write dx and dw."""

from refgrad.extend import rule


@rule("Convolve", domain="course")
def convolve(op, d_y, x, w, *, stride=1):
    """The derivative of y[i] = Σ_k x[stride·i + k]·w[k]: returns dx and dw.

    x has shape (1, 1, L), w (1, 1, K), and d_y (1, 1, M) with L = stride·(M - 1) + K: the last window ends where x ends.
    stride is a number. Useful: op.Conv(a, b, strides=[s], dilations=[d]) has y[i] = Σ_k a[s·i + d·k]·b[k], and
    op.ConvTranspose(a, b, strides=[s]) puts a[i]·b[k] at the place s·i + k and adds what falls on one place.
    """
    raise NotImplementedError("write dx and dw")
    return dx, dw
'''


def _kernel(x: np.ndarray, w: np.ndarray, *, stride: int = 1) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(x[0, 0], w.size)[::stride]
    return np.asarray(windows @ w[0, 0])[None, None]


def _forward(x: np.ndarray, w: np.ndarray, stride: int = 1) -> Any:
    count = (x.size - w.size) // stride + 1
    return sum(x[..., k : k + stride * (count - 1) + 1 : stride] * w[..., k : k + 1] for k in range(w.size))


def _solution(op: Emitter, d_y: str, x: str, w: str, *, stride: int = 1) -> tuple[str, str]:
    """Dx[s·i + k] += dy[i]·w[k], dw[k] = Σ_i x[s·i + k]·dy[i]."""
    return op.ConvTranspose(d_y, w, strides=[stride]), op.Conv(x, d_y, dilations=[stride])


def _points() -> list[ExercisePoint]:
    rng = np.random.default_rng(8)

    def at(count: int, width: int, stride: int) -> ExercisePoint:
        length = stride * (count - 1) + width
        arrays = {"x": halves(rng, 1, 1, length), "w": halves(rng, 1, 1, width)}
        return ExercisePoint(arrays, halves(rng, 1, 1, count), {"stride": stride})

    return [
        at(*size) for size in [(1, 2, 1), (2, 2, 1), (2, 2, 2), (2, 1, 2), (3, 2, 1), (3, 3, 2), (4, 3, 1), (2, 3, 3)]
    ]


def _scattered(d_y: np.ndarray, w: np.ndarray, stride: int) -> np.ndarray:
    """The gradient of gathering: dy[i]·w[k] is added at stride·i + k."""
    made = np.zeros(stride * (d_y.size - 1) + w.size)
    for i, cotangent in enumerate(d_y.ravel()):
        made[stride * i : stride * i + w.size] += cotangent * w.ravel()
    return made[None, None]


def _correlated(x: np.ndarray, d_y: np.ndarray, stride: int) -> np.ndarray:
    """Σ_i x[stride·i + k]·dy[i] for every k at which the last window ends within x."""
    count = x.size - stride * (d_y.size - 1)
    if count < 1:
        raise ValueError("no window fits")
    places = np.arange(count)[:, None] + stride * np.arange(d_y.size)
    return np.asarray(x.ravel()[places] @ d_y.ravel())[None, None]


def _dw(p: SimpleNamespace) -> np.ndarray:
    return _correlated(p.x, p.d_y, p.stride)


def _first_tap(p: SimpleNamespace) -> np.ndarray:
    made = np.zeros(p.x.shape)
    made[..., :: p.stride][..., : p.d_y.size] = p.d_y * p.w[..., :1]
    return made


_X = "y[i] reads x[stride·i + k] with the weight w[k], so dy[i]·w[k] goes to that place"
_W = "w[k] is read by every window: dw[k] = Σ_i x[stride·i + k]·dy[i]"
_MISTAKES = (
    Mistake(
        "x",
        f"The kernel is the wrong way round: a convolution of dy flips it, and a ConvTranspose does not. {_X}.",
        lambda p: _scattered(p.d_y, p.w[..., ::-1], p.stride),
    ),
    Mistake("x", f"The strides are ignored. {_X}.", lambda p: _scattered(p.d_y, p.w, 1)),
    Mistake(
        "x",
        f"The strides are ignored, and the kernel is the wrong way round. {_X}.",
        lambda p: _scattered(p.d_y, p.w[..., ::-1], 1),
    ),
    Mistake(
        "x",
        f"Yours gathers where the gradient has to scatter: it is shorter than x. {_X}.",
        lambda p: _correlated(p.d_y, p.w, 1),
    ),
    Mistake(
        "x",
        f"Yours gathers where the gradient has to scatter: it is shorter than x. {_X}.",
        lambda p: _correlated(p.d_y, p.w, 1)[..., :: p.stride],
    ),
    Mistake("x", f"Only the first weight contributes to yours. {_X}.", _first_tap),
    Mistake("x", "Yours is dw: the two cotangents may be in the wrong order. Return dx, dw.", _dw),
    Mistake("x", f"Yours has the input in the place of the weights. {_X}.", lambda p: _scattered(p.d_y, p.x, p.stride)),
    Mistake(
        "w",
        f"The strides are ignored: windows begin stride apart, so dy has to be spread by dilations=[stride]. {_W}.",
        lambda p: _correlated(p.x, p.d_y, 1),
    ),
    Mistake(
        "w",
        f"The strides are ignored: windows begin stride apart, so dy has to be spread by dilations=[stride]. {_W}.",
        lambda p: _correlated(p.x, p.d_y, 1)[..., : p.w.size],
    ),
    Mistake(
        "w",
        f"The stride is one of dy within x, a dilation: yours moves by it from one weight to the next. {_W}.",
        lambda p: _correlated(p.x, p.d_y, 1)[..., :: p.stride],
    ),
    Mistake(
        "w",
        f"The kernel is the wrong way round: yours has dw from its last element to its first. {_W}.",
        lambda p: _dw(p)[..., ::-1],
    ),
    Mistake(
        "w",
        f"dy is flipped, and the derivative by the weights flips nothing. {_W}.",
        lambda p: _correlated(p.x, p.d_y[..., ::-1], p.stride),
    ),
    Mistake("w", f"Yours is the mean over the windows. {_W}, and nothing is divided.", lambda p: _dw(p) / p.d_y.size),
    Mistake("w", f"Only the first window contributes to yours. {_W}.", lambda p: p.x[..., : p.w.size] * p.d_y[..., :1]),
    Mistake(
        "w", f"Yours multiplies the first window by the sum of dy. {_W}.", lambda p: p.x[..., : p.w.size] * p.d_y.sum()
    ),
    Mistake(
        "w",
        "Yours is dx: the two cotangents may be in the wrong order. Return dx, dw.",
        lambda p: _scattered(p.d_y, p.w, p.stride),
    ),
    Mistake(
        "w",
        f"Yours scatters where the derivative by the weights gathers: it is longer than w. {_W}.",
        lambda p: _scattered(p.d_y, p.x, p.stride),
    ),
    Mistake(
        "w",
        f"Yours scatters where the derivative by the weights gathers: it is longer than w. {_W}.",
        lambda p: _scattered(p.x, p.d_y, p.stride),
    ),
)

CHAPTER = Chapter(
    number=5,
    title="Convolution, gathered and scattered",
    page="docs/course/5_convolution.md",
    operator="Convolve",
    derivative="dx[stride·i + k] += dy[i]·w[k], dw[k] = Σ_i x[stride·i + k]·dy[i]",
    formula="y[i] = Σ_k x[stride·i + k]·w[k]",
    inputs={"x": 3, "w": 3},
    floats=("x", "w"),
    output="y",
    rank=3,
    attributes={"stride": 1},
    skeleton=SKELETON,
    kernel=_kernel,
    forward=_forward,
    solution=_solution,
    points=_points(),
    mistakes=_MISTAKES,
)
