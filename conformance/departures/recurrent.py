"""Departures of LSTM and GRU, compared in the training form that OrtModuleGraphBuilder gives them before it differentiates."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "LSTM GRU",
        "refused",
        "Where an initial state or the bias is absent, the inputs of its LSTMGrad or GRUGrad slip out of their places, and it "
        "refuses the graph that it made; and the training forms have no layout. refgrad passes what is absent as absent, and "
        "with layout 1 writes ai.onnx operators.",
    ),
    Departure(
        "LSTM GRU",
        "fails",
        "The kernels of LSTMTraining and GRUTraining run forwards alone, with the default activations, without clip, "
        "sequence_lens and input_forget, over at least one step of a batch that is not empty. Where it is otherwise they "
        "refuse to run or end the process. refgrad writes ai.onnx operators and a Scan there.",
    ),
    Departure(
        "LSTM",
        "wrong",
        "LSTMGrad knows nothing of peepholes: no gradient of theirs, and wrong ones of everything else. refgrad "
        "writes ai.onnx operators and a Scan.",
    ),
)
