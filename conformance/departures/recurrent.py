"""Departures of LSTM and GRU."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "LSTM GRU",
        "refused",
        "GradientGraphBuilder has a gradient for LSTMTraining and GRUTraining alone, which OrtModuleGraphBuilder makes of LSTM "
        "and GRU before it differentiates. refgrad's forward node becomes the same, and its adjoint the same LSTMGrad or "
        "GRUGrad, where their kernels compute it: in float, forwards, with the default activations, without clip, "
        "sequence_lens, peepholes, input_forget or layout 1. They refuse the others, or end the process; and of peepholes "
        "LSTMGrad knows nothing. There refgrad writes ai.onnx operators and a Scan.",
    ),
)
