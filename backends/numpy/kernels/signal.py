"""Fourier transforms. The last axis of a signal holds its real part, or that and its imaginary part."""

from __future__ import annotations

import numpy as np

from refgrad.backends.numpy.registry import kernel


@kernel("DFT", since=20, in_float32=True)
def dft(
    x: np.ndarray,
    dft_length: np.ndarray | None = None,
    axis: np.ndarray | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> np.ndarray:
    """Σ x·exp(∓2πi·kn/N) along `axis`, /N in the inverse. One-sided: the first N/2 + 1 bins, or the real signal of those."""
    along = (-2 if axis is None else int(axis.item())) % x.ndim
    length = x.shape[along] if dft_length is None else int(dft_length.item())
    signal = _complex(x)
    if inverse and onesided:
        length = 2 * (x.shape[along] - 1) if dft_length is None else length
        return np.fft.irfft(signal, length, along)[..., np.newaxis].astype(x.dtype)
    if inverse:
        return _parts(np.fft.ifft(signal, length, along), x.dtype)
    bins = np.fft.fft(signal, length, along)
    return _parts(np.take(bins, np.arange(length // 2 + 1), along) if onesided else bins, x.dtype)


@kernel("DFT", since=17, in_float32=True)
def dft_17(
    x: np.ndarray, dft_length: np.ndarray | None = None, *, axis: int, inverse: int = 0, onesided: int = 0
) -> np.ndarray:
    return dft(x, dft_length, np.array(axis), inverse=inverse, onesided=onesided)


@kernel("STFT", in_float32=True)
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
    samples = _complex(signal)
    frames = np.lib.stride_tricks.sliding_window_view(samples, length, 1)[:, :: int(frame_step.item())]
    bins = np.fft.fft(frames if window is None else frames * window, axis=-1)
    return _parts(bins[..., : length // 2 + 1] if onesided else bins, signal.dtype)


def _complex(x: np.ndarray) -> np.ndarray:
    return np.asarray(x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1])


def _parts(bins: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.stack([bins.real, bins.imag], -1).astype(dtype)
