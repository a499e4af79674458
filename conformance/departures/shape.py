"""Departures of the operators that change the shape of a tensor."""

from __future__ import annotations

from refgrad.conformance.departures.departure import Departure

DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "Concat Split",
        "form",
        "It splits or joins a single part. refgrad hands it on.",
        cases=r"-2x3-axis=0|num_outputs=1",
    ),
    Departure(
        "Squeeze Unsqueeze",
        "form",
        "It takes the axes that only the run knows for some. They may be none, of which runtimes think "
        "differently, so refgrad reshapes to the shape of the input.",
        cases=r"symbolic|unknown",
    ),
    Departure(
        "Expand",
        "wrong",
        "It takes sizes of different names for sizes that do not broadcast, so that the gradient is not "
        "summed. refgrad decides at run time.",
        cases=r"symbolic|batch",
    ),
    Departure(
        "Expand",
        "fails",
        "It takes sizes of different names for sizes that do not broadcast, so that the gradient is not "
        "summed. refgrad decides at run time.",
        cases=r"symbolic|batch",
    ),
    Departure(
        "Expand",
        "form",
        "It takes sizes of different names for sizes that do not broadcast, which here they are not. refgrad "
        "decides at run time.",
        cases=r"symbolic|batch",
    ),
    Departure(
        "Expand",
        "form",
        "It takes an axis of size 0 for one of unknown size, and finds the axes to sum at run time. refgrad "
        "knows them.",
        cases=r"1x3,2-constant=shape-static",
    ),
    Departure(
        "Pad",
        "refused",
        "It has no gradient of the value that it pads with. refgrad has.",
        cases=r"scalar|test_constant_pad",
    ),
    Departure(
        "Pad",
        "refused",
        "It knows no mode but constant. refgrad knows all.",
        cases=r"mode=(reflect|edge|wrap)|(reflect|edge|wrap)_pad",
    ),
    Departure(
        "Pad",
        "fails",
        "It forgets the axes.",
        cases=r"mode=constant.*opset18|axes",
    ),
    Departure(
        "Pad",
        "kernel",
        "The kernel of Pad refuses a scalar, in the model itself.",
        cases=r"scalar,0",
    ),
    Departure(
        "Slice",
        "fails",
        "Its SliceGrad fails on a negative step along the last axis. refgrad puts the elements back by "
        "ai.onnx operators.",
        cases=r",2,2,2,2-|neg_steps",
    ),
    Departure(
        "Slice",
        "form",
        "A step that only the run tells, or one along an axis that may be the last, can be negative there, on "
        "which SliceGrad fails. refgrad puts the elements back by ai.onnx operators.",
        cases=r"x\d,\d,\d,\d,\d-(static|symbolic|unknown)|unknown|^test_slice",
    ),
    Departure(
        "Tile",
        "fails",
        "The kernel of Tile refuses a scalar, in the model itself, which its gradient runs.",
        cases=r"scalar,0",
    ),
    Departure(
        "Tile",
        "kernel",
        "The kernel of Tile refuses a scalar, in the model itself.",
        cases=r"scalar,0-.*unknown",
    ),
    Departure(
        "Gather GatherND TopK Transpose Trilu Tile Reshape",
        "fails",
        "Its Reshape takes a size 0 for the size of another tensor. refgrad sets allowzero where a size may be 0.",
        cases=r"unknown|allowzero|none|0x|x0",
    ),
    Departure(
        "PadAndUnflatten FlattenAndUnpad",
        "fails",
        "There are no kernels for the two on the CPU. refgrad differentiates them through ai.onnx operators.",
    ),
)
