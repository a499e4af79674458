"""The course: right answers pass, wrong ones get the hint that fits, and whatever else an answer does is said in words.

The answers are written in operators of ONNX, the planted mistakes in NumPy: nothing here reads a planted mistake.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from refgrad.cli import main
from refgrad.conformance.oracles.forwards import fault
from refgrad.errors import OptionError, OutputFileError
from refgrad.tables import registry
from refgrad.tables.registry import RULES, rule
from refgrad.teaching import CHAPTERS, Chapter, Mistake, Verdict, chapter_of, judge, start
from refgrad.teaching.examination import judge_here
from refgrad.teaching.operators import register
from refgrad.teaching.recognition import Tried, hints
from refgrad.teaching.trials import Trial, close, plain

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "course").glob("*.md"))

HEADS = {
    1: "op, d_z, x, y",
    2: "op, d_Y, X, b",
    3: "op, d_Y, A, B",
    4: "op, d_loss, scores, target",
    5: "op, d_y, x, w, *, stride=1",
    6: "op, d_Y, Q, K, V, mask, *, scale=1.0",
}
# What stands before the lines of an answer: the parts that a reader gets right.
BEFORE = {
    4: """
    p = op.Softmax(scores, axis=-1)
    t = op.CastLike(target, scores)
    N = op.CastLike(op.Shape(scores, start=0, end=1), scores)
    """,
    6: """
    S = op.Mul(op.MatMul(Q, op.Transpose(K)), scale)
    P = op.Softmax(op.Where(mask, S, float("-inf")), axis=-1)
    dP = op.MatMul(d_Y, op.Transpose(V))
    dS = op.Mul(P, op.Sub(dP, op.ReduceSum(op.Mul(P, dP), [1], keepdims=1)))
    dQ = op.Mul(op.MatMul(dS, K), scale)
    dK = op.Mul(op.MatMul(op.Transpose(dS), Q), scale)
    dV = op.MatMul(op.Transpose(P), d_Y)
    """,
}
RIGHT = {
    1: ["return op.Mul(d_z, op.Add(y, 1.0)), op.Mul(x, d_z)"],
    2: [
        """
        first = op.CastLike(op.GreaterOrEqual(X, b), X)
        dX = op.Mul(first, d_Y)
        return dX, op.ReduceSum(op.Sub(d_Y, dX), [0], keepdims=0)
        """,
        """
        share = op.Div(op.Add(op.Sign(op.Sub(X, b)), 1.0), 2.0)
        return op.Mul(share, d_Y), op.ReduceSum(op.Mul(op.Sub(1.0, share), d_Y), [0], keepdims=0)
        """,
    ],
    3: [
        """
        return op.Gemm(d_Y, B, transB=1), op.Gemm(A, d_Y, transA=1)
        """,
        """
        return op.Transpose(op.MatMul(B, op.Transpose(d_Y))), op.Transpose(op.MatMul(op.Transpose(d_Y), A))
        """,
    ],
    4: ["return op.Div(op.Sub(op.Mul(p, d_loss), op.Mul(t, d_loss)), N)", "return op.Mul(op.Sub(p, t), op.Div(d_loss, N))"],
    5: [
        "return op.ConvTranspose(d_y, w, strides=[stride]), op.Conv(x, d_y, dilations=[stride])",
    ],
    6: ["return dQ, dK, dV"],
}
_FLIP = "op.Slice({}, [-1], [-1000], [2], [-1])"
# By chapter: the lines of an answer, and what its hint has to say.
WRONG = {
    1: {
        "return op.Mul(y, d_z), op.Mul(x, d_z)": "dx: Only one contribution.*the sum's is missing",
        "return d_z, op.Mul(x, d_z)": "dx: Only one contribution.*the product's is missing",
        "return op.Mul(op.Mul(y, d_z), d_z), op.Mul(x, d_z)": "dx: The contributions add.*multiplies",
        "return op.ReduceMean(op.Concat(op.Unsqueeze(d_z, [0]), op.Unsqueeze(op.Mul(y, d_z), [0]), axis=0), [0], keepdims=0), "
        "op.Mul(x, d_z)": "dx: The contributions add.*mean, a factor of ½",
        "return op.Add(y, 1.0), op.Mul(x, d_z)": "dx: The cotangent dz is missing",
        "return op.Add(op.Mul(y, d_z), d_z), x": "dy: The cotangent dz is missing",
        "return op.Add(op.Mul(y, d_z), d_z), op.Mul(y, d_z)": "dy: .* by y is x, and yours has y",
        "return op.Mul(op.Add(x, 1.0), d_z), op.Mul(x, d_z)": "dx: .* by x is y, and yours has x",
        "return op.Mul(x, d_z), op.Add(op.Mul(y, d_z), d_z)": "dx: .*wrong order",
        "return op.Add(op.Mul(y, d_z), d_z), op.Mul(op.Add(x, 1.0), d_z)": "dy: One contribution too many",
        "return op.Mul(op.Mul(d_z, 2.0), op.Add(y, 1.0)), op.Mul(x, d_z)": "dx: A factor of 2 too many",
        "return op.Add(op.Mul(y, d_z), d_z), op.Neg(op.Mul(x, d_z))": "dy: The sign is wrong",
        "return op.Add(op.Mul(y, d_z), d_z), None": "dy: It is 0 everywhere",
        "return op.Add(op.Mul(op.Mul(y, 3.0), d_z), op.Mul(d_z, 3.0)), op.Mul(x, d_z)": "dx: It is 3 times as large",
        "return op.Add(op.Add(op.Add(op.Mul(x, y), x), op.Neg(x)), op.Sub(d_z, d_z)), op.Mul(x, d_z)": "dx: None of the known",
    },
    2: {
        "o = op.Less(X, b)\nreturn op.Where(o, 0.0, d_Y), op.Where(o, d_Y, 0.0)": "db: The sum over the broadcast axis is missing",
        "o = op.Less(X, b)\nreturn op.Where(o, 0.0, d_Y), op.ReduceSum(op.Where(o, d_Y, 0.0), [1], keepdims=0)": "db: .*axis 1",
        "o = op.Less(X, b)\nreturn op.Where(o, 0.0, d_Y), op.ReduceMean(op.Where(o, d_Y, 0.0), [0], keepdims=0)": "db: .*mean",
        "o = op.Less(X, b)\nreturn op.Where(o, 0.0, d_Y), op.ReduceSum(op.Where(o, d_Y, 0.0), [0])": "db: .*kept the summed axis",
        "o = op.Less(X, b)\nreturn op.Where(o, 0.0, d_Y), op.ReduceSum(d_Y, [0], keepdims=0)": "db: The mask is forgotten",
        "o = op.Less(X, b)\nreturn d_Y, op.ReduceSum(op.Where(o, d_Y, 0.0), [0], keepdims=0)": "dX: The mask is forgotten",
        "o = op.Less(X, b)\nreturn op.Where(o, d_Y, 0.0), op.ReduceSum(op.Where(o, 0.0, d_Y), [0], keepdims=0)": "dX: .*wrong way",
        "o = op.CastLike(op.Less(X, b), X)\nreturn op.Sub(1.0, o), op.ReduceSum(op.Mul(o, d_Y), [0], keepdims=0)": "dX: The cotangent",
        "return op.Where(op.Greater(X, b), d_Y, 0.0), op.ReduceSum(op.Where(op.Less(X, b), d_Y, 0.0), [0], keepdims=0)": (
            "Right, except at ties.*neither"
        ),
        "return op.Where(op.GreaterOrEqual(X, b), d_Y, 0.0), op.ReduceSum(op.Where(op.LessOrEqual(X, b), d_Y, 0.0), [0], keepdims=0)": (
            "Right, except at ties.*each"
        ),
        "o = op.Less(X, b)\nreturn op.Where(o, 0.0, d_Y), op.ReduceSum(op.Mul(op.Where(o, d_Y, 0.0), -2.0), [0], keepdims=0)": (
            "db: The sign is wrong, and a factor of 2"
        ),
        "o = op.Less(X, b)\nreturn op.Where(o, 0.0, d_Y), op.Mul(op.Where(o, d_Y, 0.0), 2.0)": "db: The sum .* missing.*A factor of 2",
        "o = op.Less(X, b)\nreturn op.Where(o, 0.0, d_Y), op.Squeeze(op.Slice(op.Where(o, d_Y, 0.0), [0], [1]), [0])": "Only the first row",
    },
    3: {
        "return op.Gemm(d_Y, B), op.Gemm(A, d_Y, transA=1)": "dA: B is not transposed",
        "return op.Gemm(d_Y, B, transB=1), op.Gemm(A, d_Y)": "dB: A is not transposed",
        "return op.Gemm(B, d_Y, transA=1), op.Gemm(A, d_Y, transA=1)": "dA: The operands are swapped: matrices",
        "return op.Gemm(d_Y, B, transB=1), op.Gemm(d_Y, A, transB=1)": "dB: The operands are swapped: matrices",
        "return op.Gemm(B, d_Y), op.Gemm(A, d_Y, transA=1)": "dA: The operands are swapped, and B is not",
        "return op.Gemm(B, d_Y, transB=1), op.Gemm(A, d_Y, transA=1)": "dA: Yours is the transpose of dA",
        "return op.Gemm(A, d_Y, transA=1), op.Gemm(d_Y, B, transB=1)": "dA: Yours is dB.*order",
        "return op.Transpose(B), op.Gemm(A, d_Y, transA=1)": "dA: The cotangent dY is missing",
        "return op.Gemm(d_Y, B, transB=1, alpha=0.5), op.Gemm(A, d_Y, transA=1)": "dA: A factor of ½",
        "return op.Mul(d_Y, B), op.Gemm(A, d_Y, transA=1)": "dA: Yours multiplies element by element",
        "return op.Gemm(d_Y, B, transB=1), op.Gemm(A, d_Y, transA=1, alpha=-1.0)": "dB: The sign is wrong",
        "return op.Gemm(d_Y, op.Neg(B)), op.Gemm(A, d_Y, transA=1)": "dA: B is not transposed.*The sign is wrong",
    },
    4: {
        "return op.Mul(d_loss, op.Sub(p, t))": "The division by N is missing",
        "return op.Mul(op.Div(d_loss, N), op.Sub(t, p))": "The sign is wrong",
        "return op.Neg(op.Mul(op.Div(d_loss, N), t))": "The softmax's sum term is missing",
        "return op.Mul(op.Div(d_loss, N), p)": "The target is missing",
        "return op.Div(op.Sub(p, t), N)": "The cotangent dloss is missing",
        "return op.Mul(op.Div(d_loss, op.Neg(N)), op.Div(t, p))": "stops at the probabilities",
        "q = op.Softmax(scores, axis=0)\nreturn op.Mul(op.Div(d_loss, N), op.Sub(q, t))": "goes over the rows",
        "return op.Mul(op.Div(d_loss, N), op.Sub(op.Exp(scores), t))": "not divided by their sum",
        "return op.Mul(op.Div(d_loss, N), op.Sub(op.Sigmoid(scores), t))": "sigmoid",
        "C = op.CastLike(op.Shape(scores, start=1), scores)\nreturn op.Mul(op.Div(d_loss, C), op.Sub(p, t))": "number of classes",
        "return op.Mul(op.Div(op.Add(d_loss, d_loss), N), op.Sub(p, t))": "A factor of 2",
        "return op.Mul(op.Div(d_loss, N), op.Mul(op.Sub(p, 1.0), t))": "Only the diagonal",
        "return op.Mul(op.Div(d_loss, N), op.Sub(op.LogSoftmax(scores, axis=-1), t))": "log p",
    },
    5: {
        f"return op.ConvTranspose(d_y, {_FLIP.format('w')}, strides=[stride]), op.Conv(x, d_y, dilations=[stride])": "dx: The kernel",
        "return op.ConvTranspose(d_y, w), op.Conv(x, d_y, dilations=[stride])": "dx: The strides are ignored",
        "return op.ConvTranspose(d_y, w, strides=[stride]), op.Conv(x, d_y)": "dw: The strides are ignored",
        "return op.ConvTranspose(d_y, w, strides=[stride]), op.Conv(x, d_y, strides=[stride])": "dw: .*a dilation",
        f"return op.ConvTranspose(d_y, w, strides=[stride]), op.Conv(x, {_FLIP.format('d_y')}, dilations=[stride])": "dw: dy is flipped",
        "dw = op.Conv(x, d_y, dilations=[stride])\n"
        f"return op.ConvTranspose(d_y, w, strides=[stride]), {_FLIP.format('dw')}": "dw: The kernel is the wrong way",
        "return op.Conv(x, d_y, dilations=[stride]), op.ConvTranspose(d_y, w, strides=[stride])": "dx: Yours is dw.*order",
        "return op.ConvTranspose(op.Sub(0.0, d_y), w, strides=[stride]), op.Conv(x, d_y, dilations=[stride])": "dx: The sign",
        "ones = op.Exp(op.Mul(d_y, 0.0))\n"
        "return op.ConvTranspose(d_y, w, strides=[stride]), op.Conv(x, ones, dilations=[stride])": "dw: The cotangent",
        "M = op.CastLike(op.Size(d_y), d_y)\n"
        "return op.ConvTranspose(d_y, w, strides=[stride]), op.Conv(x, op.Div(d_y, M), dilations=[stride])": "dw: Yours is the mean",
        "return op.ConvTranspose(d_y, x, strides=[stride]), op.Conv(x, d_y, dilations=[stride])": "dx: Yours has the input",
    },
    6: {
        "p = op.Softmax(S, axis=-1)\nreturn dQ, dK, op.MatMul(op.Transpose(p), d_Y)": "dV: The mask is forgotten",
        "p = op.Softmax(S, axis=-1)\ns = op.Mul(p, op.Sub(dP, op.ReduceSum(op.Mul(p, dP), [1])))\n"
        "return op.Mul(op.MatMul(s, K), scale), dK, dV": "dQ: The mask is forgotten",
        "return op.MatMul(dS, K), dK, dV": "dQ: The scale is forgotten: S",
        "return dQ, op.MatMul(op.Transpose(dS), Q), dV": "dK: The scale is forgotten: S",
        "s = op.Mul(P, dP)\nreturn op.MatMul(s, op.Mul(K, scale)), dK, dV": "dQ: The softmax's sum term is missing",
        "return dQ, dK, op.MatMul(P, d_Y)": "dV: P is not transposed",
        "return dQ, op.Mul(op.MatMul(dS, Q), scale), dV": "dK: dS is not transposed",
        "return dK, dQ, dV": "dQ: Yours is dK.*order",
        "s = op.Mul(P, op.Sub(dP, op.ReduceSum(dP, [1])))\nreturn op.MatMul(s, op.Mul(K, scale)), dK, dV": "dQ: .*yours is Σ dP",
        "s = op.Mul(P, op.Sub(dP, op.ReduceSum(op.Mul(P, dP), [0])))\nreturn op.MatMul(s, op.Mul(K, scale)), dK, dV": "dQ: .*axis 0",
        "return op.Mul(op.MatMul(dP, K), scale), dK, dV": "dQ: The derivative of softmax is missing",
        "return op.Mul(dQ, scale), dK, dV": "dQ: The scale .* twice",
        "return dQ, dK, op.Mul(dV, 2.0)": "dV: A factor of 2",
    },
}


@pytest.fixture
def answer(tmp_path):
    """Write an answer to a chapter from its lines, or from its whole text. Returns the path."""

    def write(number: int, lines: str = "", text: str = "", decorator: str = "") -> Path:
        chapter = chapter_of(number)
        if not text:
            body = _indented(BEFORE.get(number, "")) + _indented(lines)
            with_rule = decorator or f'@rule("{chapter.operator}", domain="course")'
            text = f"from refgrad.extend import rule\n\n{with_rule}\ndef answered({HEADS[number]}):\n{body}"
        path = tmp_path / "answer.py"
        path.write_text(text)
        return path

    return write


def _indented(text: str) -> str:
    return "".join(f"    {line.strip()}\n" for line in text.strip().splitlines())


@pytest.fixture
def here(monkeypatch):
    """Judge in this process, and forget the rule."""

    def run(number: int, path: Path) -> Verdict:
        before = dict(RULES)
        try:
            return judge_here(number, str(path))
        finally:
            RULES.clear()
            RULES.update(before)
            sys.path[:] = [folder for folder in sys.path if folder != str(path.parent)]
            sys.modules.pop("answer", None)

    return run


@pytest.mark.parametrize(("number", "lines"), [(n, one) for n, several in RIGHT.items() for one in several])
def test_a_right_answer_passes(number, lines, answer, here):
    verdict = here(number, answer(number, lines))
    assert verdict.right, verdict
    assert verdict.hints == ()
    assert verdict.example is None
    assert {"differences", "complex-step"} <= set(verdict.witnesses)
    assert verdict.trials > len(CHAPTERS[number].points)


@pytest.mark.parametrize(("number", "lines"), [(n, one) for n, several in WRONG.items() for one in several])
def test_a_wrong_answer_gets_the_hint_that_fits(number, lines, answer, here):
    verdict = here(number, answer(number, lines))
    assert not verdict.right
    assert re.search(WRONG[number][lines], " ".join(verdict.hints)), verdict.hints
    if verdict.example is not None:
        got, due = verdict.example.answered, verdict.example.expected
        assert not close(got, due)
