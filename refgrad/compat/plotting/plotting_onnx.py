"""Names of `onnxcustom.plotting.plotting_onnx`."""

from refgrad.show.plot import plot_onnxs

__all__ = ["plot_onnxs"]
