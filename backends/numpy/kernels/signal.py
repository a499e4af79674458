"""Fourier transforms. The last axis of a signal holds its real part, or that and its imaginary part."""

from __future__ import annotations

import numpy as np
from onnx import helper

from refgrad.backends.numpy.kernels.operands import check_axis
from refgrad.backends.numpy.memory import need
from refgrad.backends.numpy.registry import kernel


@kernel("DFT", since=20, in_float32=True, fresh=True)
def dft(
    x: np.ndarray,
    dft_length: np.ndarray | None = None,
    axis: np.ndarray | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> np.ndarray:
    """Σ x·exp(∓2πi·kn/N) along `axis`, /N in the inverse. One-sided: the first N/2 + 1 bins, or the real signal of those."""
    along = check_axis(-2 if axis is None else int(axis.item()), x.ndim)
    if along == x.ndim - 1 or x.shape[-1] not in (1, 2):
        raise ValueError(
            f"axis {along} of {list(x.shape)}: the last axis holds the 1 or 2 parts of each number, and cannot be transformed"
        )
    length = x.shape[along] if dft_length is None else int(dft_length.item())
    signal = _complex(x)
    if inverse and onesided:
        length = 2 * (x.shape[along] - 1) if dft_length is None else length
        return np.fft.irfft(signal, length, along)[..., np.newaxis].astype(x.dtype)
    if inverse:
        return _parts(np.fft.ifft(signal, length, along), x.dtype)
    bins = np.fft.fft(signal, length, along)
    return _parts(np.take(bins, np.arange(length // 2 + 1), along) if onesided else bins, x.dtype)


@kernel("DFT", since=17, in_float32=True, fresh=True)
def dft_17(
    x: np.ndarray, dft_length: np.ndarray | None = None, *, axis: int, inverse: int = 0, onesided: int = 0
) -> np.ndarray:
    return dft(x, dft_length, np.array(axis), inverse=inverse, onesided=onesided)


@kernel("STFT", in_float32=True, fresh=True)
def stft(
    signal: np.ndarray,
    frame_step: np.ndarray,
    window: np.ndarray | None = None,
    frame_length: np.ndarray | None = None,
    *,
    onesided: int = 1,
) -> np.ndarray:
    """The transform of every window·frame: (batch, samples, 1 or 2) to (batch, frames, bins, 2)."""
    length = signal.shape[1] if window is None else window.size
    length = length if frame_length is None else int(frame_length.item())
    if signal.ndim != 3 or signal.shape[2] not in (1, 2) or not 0 < length <= signal.shape[1] or frame_step.item() < 1:
        wanted = f"frames of {length} samples every {frame_step.item()}"
        raise ValueError(
            f"{wanted} of a signal {list(signal.shape)}: expected (batch, samples for a frame or more, 1 or 2 parts)"
        )
    if window is not None and window.shape != (length,):
        raise ValueError(f"the window has the shape {list(window.shape)}; a frame of {length} samples needs [{length}]")
    samples = _complex(signal)
    frames = np.lib.stride_tricks.sliding_window_view(samples, length, 1)[:, :: int(frame_step.item())]
    bins = np.fft.fft(frames if window is None else frames * window, axis=-1)
    return _parts(bins[..., : length // 2 + 1] if onesided else bins, signal.dtype)


def _complex(x: np.ndarray) -> np.ndarray:
    return np.asarray(x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1])


def _parts(bins: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.stack([bins.real, bins.imag], -1).astype(dtype)


_WINDOWS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


def _register_window(op_type: str, a: float, b: float, c: float) -> None:
    @kernel(op_type, fresh=True)
    def window(size: np.ndarray, *, output_datatype: int, periodic: int) -> np.ndarray:
        """A − b·cos t + c·cos 2t, where t goes round once in `size` steps if periodic, else in one step less."""
        length = int(size.item())
        if length < 0:
            raise ValueError(f"the size is {length}; it must not be negative")
        angle = np.arange(length) * (2 * np.pi / np.float64(length if periodic else length - 1))
        return _as(a - b * np.cos(angle) + c * np.cos(2 * angle), output_datatype)


for _op_type, _weights in _WINDOWS.items():
    _register_window(_op_type, *_weights)


@kernel("MelWeightMatrix", fresh=True)
def mel_weight_matrix(
    num_mel_bins: np.ndarray,
    dft_length: np.ndarray,
    sample_rate: np.ndarray,
    lower_edge_hertz: np.ndarray,
    upper_edge_hertz: np.ndarray,
    *,
    output_datatype: int,
) -> np.ndarray:
    """Triangles (⌊dft_length/2⌋ + 1, num_mel_bins) of height 1 on corners a, b, c that are evenly spaced in mel.

    As in onnx's node test the step is a share of num_mel_bins + 2, and a corner is the bin at or below its frequency.
    """
    count, length = int(num_mel_bins.item()), int(dft_length.item())
    if count < 1 or length < 1 or sample_rate.item() < 1:
        raise ValueError(f"{count} bins of {length} samples at a rate of {sample_rate.item()}; each must be at least 1")
    if not 0 <= lower_edge_hertz.item() <= upper_edge_hertz.item():
        raise ValueError(
            f"the edges {lower_edge_hertz.item()} to {upper_edge_hertz.item()} Hz are not in order, or below 0"
        )
    low, high = (2595 * np.log10(1 + edge.item() / 700) for edge in (lower_edge_hertz, upper_edge_hertz))
    need((count + 2) * (length // 2 + 1) * 6 * 8)
    mel = low + np.arange(count + 2) * ((high - low) / (count + 2))
    corners = np.floor((length + 1) * 700 * (10 ** (mel / 2595) - 1) / sample_rate.item())
    a, b, c = corners[:-2], corners[1:-1], corners[2:]
    bins = np.arange(length // 2 + 1)[:, np.newaxis]
    rising = np.where(b > a, (bins - a) / np.maximum(b - a, 1), bins == b)
    falling = (c - bins) / np.maximum(c - b, 1)
    inside = (bins >= a) & ((bins < c) | (bins == b))
    return _as(np.where(inside, np.where(bins <= b, rising, falling), 0), output_datatype)


def _as(values: np.ndarray, kind: int) -> np.ndarray:
    """`values` as the type `kind`; an integer by way of float32, where a peak of nearly 1 rounds to 1."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    return np.asarray((values.astype(np.float32) if dtype.kind in "iu" else values).astype(dtype))
