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
from refgrad.teaching.trials import AnswerTrial, close, plain

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
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
    1: """
    dx = op.Add(op.Mul(y, d_z), d_z)
    dy = op.Mul(x, d_z)
    """,
    2: """
    o = op.Less(X, b)
    high, low = op.Where(o, 0.0, d_Y), op.Where(o, d_Y, 0.0)
    db = op.ReduceSum(low, [0], keepdims=0)
    """,
    3: """
    dA, dB = op.Gemm(d_Y, B, transB=1), op.Gemm(A, d_Y, transA=1)
    """,
    5: """
    dx, dw = op.ConvTranspose(d_y, w, strides=[stride]), op.Conv(x, d_y, dilations=[stride])
    """,
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
        """
        share = op.Where(op.Greater(X, b), 1.0, op.Where(op.Equal(X, b), 0.5, 0.0))
        return op.Mul(share, d_Y), op.ReduceSum(op.Mul(op.Sub(1.0, share), d_Y), [0], keepdims=0)
        """,
        """
        first = op.Where(op.Greater(X, b), 1, 0)
        return op.Mul(first, d_Y), op.ReduceSum(op.Mul(op.Sub(1, first), d_Y), [0], keepdims=0)
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
    4: [
        "return op.Div(op.Sub(op.Mul(p, d_loss), op.Mul(t, d_loss)), N)",
        "return op.Mul(op.Sub(p, t), op.Div(d_loss, N))",
    ],
    5: [
        "return op.ConvTranspose(d_y, w, strides=[stride]), op.Conv(x, d_y, dilations=[stride])",
    ],
    6: ["return dQ, dK, dV"],
}
_FLIP = "op.Slice({}, [-1], [-1000], [2], [-1])"
# By chapter: the lines of an answer, and what its hint has to say.
WRONG = {
    1: {
        "return op.Mul(y, d_z), dy": "dx: Only one contribution.*the sum's is missing",
        "return d_z, dy": "dx: Only one contribution.*the product's is missing",
        "return op.Mul(op.Mul(y, d_z), d_z), dy": "dx: The contributions add.*multiplies",
        "return op.ReduceMean(op.Concat(op.Unsqueeze(d_z, [0]), op.Unsqueeze(op.Mul(y, d_z), [0]), axis=0), [0], keepdims=0), "
        "dy": "dx: The contributions add.*mean, a factor of ½",
        "return op.Add(y, 1.0), dy": "dx: The cotangent dz is missing",
        "return dx, x": "dy: The cotangent dz is missing",
        "return dx, op.Mul(y, d_z)": "dy: .* by y is x, and yours has y",
        "return op.Mul(op.Add(x, 1.0), d_z), dy": "dx: .* by x is y, and yours has x",
        "return dy, dx": "dx: .*wrong order",
        "return dx, op.Mul(op.Add(x, 1.0), d_z)": "dy: One contribution too many",
        "return op.Mul(op.Mul(d_z, 2.0), op.Add(y, 1.0)), dy": "dx: A factor of 2 too many",
        "return dx, op.Neg(dy)": "dy: The sign is wrong",
        "return dx, None": "dy: It is 0 everywhere",
        "return op.Add(op.Mul(op.Mul(y, 3.0), d_z), op.Mul(d_z, 3.0)), dy": "dx: It is 3 times as large",
        "return op.Add(op.Add(op.Add(op.Mul(x, y), x), op.Neg(x)), op.Sub(d_z, d_z)), dy": "dx: None of the known",
    },
    2: {
        "return high, low": "db: The sum over the broadcast axis is missing",
        "return high, op.ReduceSum(low, [1], keepdims=0)": "db: .*axis 1",
        "return high, op.ReduceMean(low, [0], keepdims=0)": "db: .*mean",
        "return high, op.ReduceSum(low, [0])": "db: .*kept the summed axis",
        "return high, op.ReduceSum(d_Y, [0], keepdims=0)": "db: The mask is forgotten",
        "return d_Y, db": "dX: The mask is forgotten",
        "return low, op.ReduceSum(high, [0], keepdims=0)": "dX: .*wrong way",
        "return op.Sub(1.0, op.CastLike(o, X)), db": "dX: The cotangent",
        "return op.Where(op.Greater(X, b), d_Y, 0.0), op.ReduceSum(op.Where(op.Less(X, b), d_Y, 0.0), [0], keepdims=0)": (
            "Right, except at ties.*neither"
        ),
        "e = op.Where(op.LessOrEqual(X, b), d_Y, 0.0)\nreturn high, op.ReduceSum(e, [0], keepdims=0)": (
            "Right, except at ties.*each"
        ),
        "return high, op.ReduceSum(op.Mul(low, -2.0), [0], keepdims=0)": ("db: The sign is wrong, and a factor of 2"),
        "return high, op.Mul(low, 2.0)": "db: The sum .* missing.*A factor of 2",
        "return high, op.Squeeze(op.Slice(low, [0], [1]), [0])": "Only the first row",
    },
    3: {
        "return op.Gemm(d_Y, B), dB": "dA: B is not transposed",
        "return dA, op.Gemm(A, d_Y)": "dB: A is not transposed",
        "return op.Gemm(B, d_Y, transA=1), dB": "dA: The operands are swapped: matrices",
        "return dA, op.Gemm(d_Y, A, transB=1)": "dB: The operands are swapped: matrices",
        "return op.Gemm(B, d_Y), dB": "dA: The operands are swapped, and B is not",
        "return op.Gemm(B, d_Y, transB=1), dB": "dA: Yours is the transpose of dA",
        "return dB, dA": "dA: Yours is dB.*order",
        "return op.Transpose(B), dB": "dA: The cotangent dY is missing",
        "return op.Gemm(d_Y, B, transB=1, alpha=0.5), dB": "dA: A factor of ½",
        "return op.Mul(d_Y, B), dB": "dA: Yours multiplies element by element",
        "return dA, op.Gemm(A, d_Y, transA=1, alpha=-1.0)": "dB: The sign is wrong",
        "return op.Gemm(d_Y, op.Neg(B)), dB": "dA: B is not transposed.*The sign is wrong",
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
        "C = op.CastLike(op.Shape(scores, start=1), scores)\nreturn op.Mul(op.Div(d_loss, C), op.Sub(p, t))": "of classes",
        "return op.Mul(op.Div(op.Add(d_loss, d_loss), N), op.Sub(p, t))": "A factor of 2",
        "return op.Mul(op.Div(d_loss, N), op.Mul(op.Sub(p, 1.0), t))": "Only the diagonal",
        "return op.Mul(op.Div(d_loss, N), op.Sub(op.LogSoftmax(scores, axis=-1), t))": "log p",
    },
    5: {
        f"return op.ConvTranspose(d_y, {_FLIP.format('w')}, strides=[stride]), dw": "dx: The kernel",
        "return op.ConvTranspose(d_y, w), dw": "dx: The strides are ignored",
        "return dx, op.Conv(x, d_y)": "dw: The strides are ignored",
        "return dx, op.Conv(x, d_y, strides=[stride])": "dw: .*a dilation",
        f"return dx, op.Conv(x, {_FLIP.format('d_y')}, dilations=[stride])": "dw: dy is flipped",
        f"return dx, {_FLIP.format('dw')}": "dw: The kernel is the wrong way",
        "return dw, dx": "dx: Yours is dw.*order",
        "return op.ConvTranspose(op.Sub(0.0, d_y), w, strides=[stride]), dw": "dx: The sign",
        "ones = op.Exp(op.Mul(d_y, 0.0))\nreturn dx, op.Conv(x, ones, dilations=[stride])": "dw: The cotangent",
        "M = op.CastLike(op.Size(d_y), d_y)\n"
        "return dx, op.Conv(x, op.Div(d_y, M), dilations=[stride])": "dw: Yours is the mean",
        "return op.ConvTranspose(d_y, x, strides=[stride]), dw": "dx: Yours has the input",
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
        "s = op.Mul(P, op.Sub(dP, op.ReduceSum(dP, [1])))\nreturn op.MatMul(s, op.Mul(K, scale)), dK, dV": "yours is Σ dP",
        "s = op.Sub(dP, op.ReduceSum(op.Mul(P, dP), [0]))\nreturn op.MatMul(op.Mul(P, s), op.Mul(K, scale)), dK, dV": "axis 0",
        "return op.Mul(op.MatMul(dP, K), scale), dK, dV": "dQ: The derivative of softmax is missing",
        "return op.Mul(dQ, scale), dK, dV": "dQ: The scale .* twice",
        "return dQ, dK, op.Mul(dV, 2.0)": "dV: A factor of 2",
        "p = op.Softmax(op.Where(mask, S, float('-inf')), axis=0)\n"
        "s = op.Mul(p, op.Sub(dP, op.ReduceSum(op.Mul(p, dP), [1], keepdims=1)))\n"
        "return op.Mul(op.MatMul(s, K), scale), op.Mul(op.MatMul(op.Transpose(s), Q), scale), "
        "op.MatMul(op.Transpose(p), d_Y)": "dQ: The sum of softmax.*dK: The sum of softmax.*dV: The sum of softmax",
        "p = op.Softmax(op.Where(mask, S, 0.0), axis=-1)\n"
        "s = op.Mul(p, op.Sub(dP, op.ReduceSum(op.Mul(p, dP), [1], keepdims=1)))\n"
        "return op.Mul(op.MatMul(s, K), scale), op.Mul(op.MatMul(op.Transpose(s), Q), scale), "
        "op.MatMul(op.Transpose(p), d_Y)": "dQ: Where the mask is False.*dK: Where the mask.*dV: Where the mask",
        "p = op.Softmax(op.Where(mask, S, float('-inf')), axis=-1)\n"
        "s = op.Mul(p, op.Sub(dP, op.ReduceSum(op.Mul(p, dP), [1], keepdims=0)))\n"
        "return op.Mul(op.MatMul(s, K), scale), op.Mul(op.MatMul(op.Transpose(s), Q), scale), "
        "op.MatMul(op.Transpose(p), d_Y)": "dQ: The sum term is a column.*dK: The sum term is a column",
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


# The pages


def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}


def test_every_chapter_has_its_page_and_no_page_is_left_over():
    assert [str(page.relative_to(ROOT)) for page in PAGES] == [chapter.page for chapter in CHAPTERS.values()]
    assert list(CHAPTERS) == [chapter.number for chapter in CHAPTERS.values()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_chapter_print_what_they_say(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for code in blocks:
        exec(code, names)
        printed = capsys.readouterr().out
        assert printed.splitlines() == re.findall(r"^(?:print.*?  )?# (.*)", code, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_chapter_print_what_they_say(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
    for turn in re.split(r"^\$ refgrad ", block, flags=re.MULTILINE)[1:]:
        words, _, said = turn.partition("\n")
        main(words.split())
        assert capsys.readouterr().out == said


# The planted mistakes


def _made(chapter: Chapter, mistake: Mistake, trials: list[AnswerTrial]) -> list[np.ndarray | None]:
    made: list[np.ndarray | None] = []
    for trial in trials:
        try:
            with np.errstate(all="ignore"):
                made.append(np.asarray(mistake.wrong(trial.point.named(chapter.output)), np.float64))
        except (ValueError, IndexError):
            made.append(None)
    return made


def _alike(one: list[np.ndarray | None], other: list[np.ndarray | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and close(a, b))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=lambda chapter: chapter.operator)
def test_every_planted_mistake_is_wrong_and_no_two_hints_belong_to_one(chapter):
    register(chapter)
    trials = [trial for trial in plain(chapter) if not trial.point.is_empty]
    made = [(mistake, _made(chapter, mistake, trials)) for mistake in chapter.mistakes]
    for k, (mistake, values) in enumerate(made):
        assert any(value is not None for value in values), mistake.hint
        assert not _alike(values, [trial.expected[mistake.of] for trial in trials]), mistake.hint
        for other, others in made[:k]:
            if other.of == mistake.of and other.hint != mistake.hint:
                assert not _alike(values, others), (mistake.hint, other.hint)


@pytest.mark.parametrize("chapter", CHAPTERS.values(), ids=lambda chapter: chapter.operator)
def test_the_kernel_and_the_forward_of_an_operator_agree_and_differences_confirm_what_is_expected(chapter):
    register(chapter)
    for trial in plain(chapter):
        assert fault(trial.case) == ""
        point, cotangent = trial.point, trial.point.cotangent.astype(np.float64)
        wide = {n: v.astype(np.float64) if n in chapter.floats else v for n, v in point.inputs.items()}
        for name in chapter.floats:
            for place in np.ndindex(wide[name].shape):
                step = np.zeros(wide[name].shape)
                step[place] = 1e-5
                ahead, back = (
                    chapter.kernel(**wide | {name: wide[name] + move}, **point.attributes) for move in (step, -step)
                )
                slope = np.sum(cotangent * (ahead - back)) / 2e-5
                assert trial.expected[name][place] == pytest.approx(slope, abs=1e-7)


def test_points_have_every_input_in_order_and_are_of_float32():
    for chapter in CHAPTERS.values():
        for point in chapter.points:
            assert {point.inputs[name].dtype for name in chapter.floats} == {np.dtype(np.float32)}
            assert list(point.inputs) == list(chapter.inputs)


def test_what_no_planted_mistake_explains_is_looked_for_among_the_mutants_of_the_suite(answer, here):
    verdict = here(4, answer(4, "q = op.Mul(op.Div(d_loss, N), op.Sub(p, t))\nreturn op.Mul(q, 1.01)"))
    assert "1.01 times" in verdict.hints[0]
    chapter = chapter_of(1)
    register(chapter)
    rolled = [Tried(t, {n: np.roll(g, 1).astype(np.float32) for n, g in t.expected.items()}) for t in plain(chapter)]
    before = dict(RULES)
    try:
        rule(chapter.operator, domain="course", replace=True)(chapter.solution)
        assert hints(chapter, rolled, ["x"]) == [
            "dx: These are the numbers of a right rule with one change, in the cotangent of x: rolled by one."
        ]
    finally:
        RULES.clear()
        RULES.update(before)


# Whatever else an answer does

_FAULTS = {
    "not Python": ("def rule(:", "This is not Python: line 1: invalid syntax"),
    "null bytes": ("x = 1\0", "This is not Python"),
    "nothing": ("", r"Expected a rule for course\.AtLeast, got no rule"),
    "another operator": (
        'from refgrad.extend import rule\n@rule("Most", domain="course")\ndef f(op, d_y, x):\n    return d_y\n',
        r"Expected a rule for course\.AtLeast, got course\.Most",
    ),
    "a missing module": ("import nowhere_to_be_found", "Line 1 raises ModuleNotFoundError"),
    "an exit": ("import sys\nsys.exit(0)", "Line 2 ends the program"),
    "an interrupt": ("raise KeyboardInterrupt", "Line 1 ends the program"),
    "no operator's name": ("from refgrad.extend import rule\n@rule\ndef f(op): pass", "@rule needs the name"),
}
_RULES = {  # lines of a rule for chapter 2
    "raises": ("raise ValueError('so')", "Line 8 raises ValueError: so"),
    "not written": ("raise NotImplementedError", "not written yet: line 8"),
    "exits": ("raise SystemExit(0)", "Line 8 ends the program"),
    "waits": ("input('a number: ')", r"Line 8 waits for somebody to type, as input\(\) does"),
    "an axis, not a list": (
        "return d_Y, op.ReduceSum(d_Y, 0, keepdims=0)",
        r"^The gradient does not run .* ReduceSum failed on .*the axes are 0; they must be a list: write \[0\]\.$",
    ),
    "a list within": ("return [d_Y], b", r"returned a list of 1 for input X, .*Return dX itself, not a list with it"),
    "recursion": ("return answered(op, d_Y, X, b)", "calls itself without end"),
    "one cotangent": (
        "return op.Mul(d_Y, X)",
        "returned one name; expected one each for .* returns dX, db, in this order",
    ),
    "three cotangents": ("return d_Y, d_Y, d_Y", "The rule returns dX, db, in this order"),
    "nothing": ("pass", "returned None.*The rule returns dX, db"),
    "a number": ("return 1.0, d_Y", "returned the number 1.0 for input X"),
    "an array": ("import numpy as np\nreturn np.ones(3), d_Y", "names of tensors, not arrays"),
    "NumPy's product": ("return d_Y * X, d_Y", "raises TypeError.*names of tensors, not arrays"),
    "NumPy's sum": (
        "return d_Y + X, d_Y",
        r"returned the text 'Y_gradX', which is the name of no tensor\. The parameters of a rule are names of tensors",
    ),
    "NumPy's sum, inside": ("return op.Neg(d_Y + X), d_Y", "reads the text 'Y_gradX', which is the name of no tensor"),
    "NumPy's method": ("return d_Y, d_Y.sum(0)", "names of tensors, not arrays"),
    "NumPy's function": ("import numpy as np\nreturn np.where(X > b, d_Y, 0), d_Y", "names of tensors|raises"),
    "an unknown operator": ("return op.Maximum(X, b), d_Y", "uses op.Maximum"),
    "a misspelt operator": ("return op.Mull(X, b), d_Y", r"uses op\.Mull, .* Did you mean op\.Mul\?$"),
    "an unknown name": ("return dX, db", r"Line 8 raises NameError: name 'dX' is not defined\.$"),
    "a misspelt name": ("return dY, d_Y", r"name 'dY' is not defined\. Did you mean 'd_Y'\?"),
    "a wrong attribute": ("return d_Y, op.ReduceSum(d_Y, axis=0)", "the attribute 'axis'"),
    "sizes that never fit": ("return op.MatMul(X, op.Transpose(op.Concat(X, X, axis=1))), b", "does not run.*MatMul"),
    "integers": ("return d_Y, op.Cast(b, to=7)", "db: Its elements are int64"),
    "NaN": ("return op.Log(op.Sub(X, X)), b", "dX: It is infinite or NaN"),
    "another shape": ("return op.Reshape(d_Y, [-1]), b", r"dX: It has shape \(\d+,\), and X has"),
}


@pytest.mark.parametrize("what", _FAULTS)
def test_an_answer_that_gives_no_rule(what, answer, here):
    text, expected = _FAULTS[what]
    verdict = here(2, answer(2, text=text or "\n"))
    assert not verdict.right
    assert re.search(expected, " ".join(verdict.hints)), verdict.hints
    assert "Traceback" not in " ".join(verdict.hints)


@pytest.mark.parametrize("what", _RULES)
def test_a_rule_that_gives_no_gradient(what, answer, here):
    lines, expected = _RULES[what]
    verdict = here(2, answer(2, lines))
    assert not verdict.right
    assert re.search(expected, " ".join(verdict.hints), re.DOTALL), verdict.hints
    assert "'node'" not in " ".join(verdict.hints)


def test_a_node_that_does_not_run_is_found_in_the_answer(answer, here):
    text = 'from refgrad.extend import rule\n@rule("AtLeast", domain="course")\n'
    text += "def f(op, d_Y, X, b):\n    return d_Y, op.ReduceSum(d_Y, 0, keepdims=0)\n"
    assert here(2, answer(2, text=text)).hints[1].startswith("Line 4: ReduceSum failed on inputs float32")


def test_wrong_parameters_and_broadcast(answer, here):
    text = (
        'from refgrad.extend import rule\n@rule("AtLeast", domain="course")\ndef f(op, d_Z, X, b):\n    return X, b\n'
    )
    assert "(op, d_Y, X, b)" in " ".join(here(2, answer(2, text=text)).hints)
    right = "o = op.Less(X, b)\nreturn op.Where(o, 0.0, d_Y), op.Where(o, d_Y, 0.0)"
    summed = here(2, answer(2, right, decorator='@rule("AtLeast", domain="course", broadcast=True)'))
    assert not summed.right
    assert "Leave it out" in summed.hints[0]


def test_what_holds_for_float32_or_known_sizes_alone(answer, here):
    lines = "return op.Cast(high, to=1), db"
    verdict = here(2, answer(2, lines))
    assert re.search("float64.*dX is float32", verdict.hints[0]), verdict.hints
    known = "rows, columns = op.static(X)\ndX = op.Where(op.Greater(X, b), d_Y, 0.0)\n"
    known += "return dX, op.ReduceSum(op.Sub(d_Y, dX), [0], keepdims=0)"
    verdict = here(2, answer(2, known))
    assert re.search("sizes are symbols.*TypeError", " ".join(verdict.hints)), verdict.hints


def test_a_small_error_is_not_rounding(answer, here):
    verdict = here(3, answer(3, "return op.Gemm(d_Y, B, transB=1, alpha=1.00004), op.Gemm(A, d_Y, transA=1)"))
    assert not verdict.right
    assert "Nearly right" in verdict.hints[0]


def test_a_second_derivative_that_is_missing_or_wrong(answer, here):
    """The rule calls an operator of its own, which NumPy computes: it has no rule, or a wrong one."""
    chapter = chapter_of(6)
    own = """
import numpy as np
from refgrad.extend import kernel, rule, Emitter

@kernel("Weights{n}", domain="course")
def weights(S):
    powers = np.exp(S - S.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)

{more}

@rule("Attend", domain="course")
def answered(op, d_Y, Q, K, V, mask, *, scale=1.0):
    S = op.Where(mask, op.Mul(op.MatMul(Q, op.Transpose(K)), scale), float("-inf"))
    P = op.emit("Weights{n}", "course", [S], 1, {{}})
    dP = op.MatMul(d_Y, op.Transpose(V))
    dS = op.Mul(op.Mul(P, op.Sub(dP, op.ReduceSum(op.Mul(P, dP), [1]))), scale)
    return op.MatMul(dS, K), op.MatMul(op.Transpose(dS), Q), op.MatMul(op.Transpose(P), d_Y)
"""
    declared = '@rule("Weights{n}", domain="course")\ndef of_weights(op, d_P, P, S):\n    return {returned}\n'
    right = "op.Mul(P, op.Sub(d_P, op.ReduceSum(op.Mul(P, d_P), [1])))"
    wrong = declared.format(n=1, returned="op.Mul(P, d_P)")
    assert here(6, answer(6, text=own.format(n=0, more=declared.format(n=0, returned=right)))).right
    verdict = here(6, answer(6, text=own.format(n=1, more=wrong)))
    assert not verdict.right
    assert "the second is wrong" in verdict.hints[0]
    stop = "from refgrad.extend import no_derivative\n"
    stop += 'no_derivative("Weights2", "nobody wrote it", domain="course", inputs=["S"], outputs=["P"])'
    verdict = here(6, answer(6, text=own.format(n=2, more=stop)))
    assert not verdict.right
    assert "the second is missing" in verdict.hints[0]
    assert chapter.second


def test_what_an_answer_prints_is_shown_once(answer, here):
    verdict = here(1, answer(1, "print('the name is', x)\nreturn op.Mul(d_z, op.Add(y, 1.0)), op.Mul(x, d_z)"))
    assert verdict.right
    assert verdict.printed == "the name is x\n"
    long = here(1, answer(1, "print('no end ' * 10_000)\nreturn d_z, d_z"))
    assert len(long.printed) == 2000


# In a process of its own


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("while True: pass", "did not finish within 6 s"),
        ("kept = [bytes(1 << 28) for _ in range(100)]", "uses up the memory"),
        ("import os; os._exit(0)", "ended its process"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended its process|memory"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="memory is not limited there")
def test_an_answer_that_ends_or_never_ends(lines, expected, answer):
    verdict = judge(1, answer(1, lines), seconds=6)
    assert not verdict.right
    assert re.search(expected, verdict.hints[0])


def test_judge_leaves_no_rule_behind(answer):
    assert judge(1, answer(1, RIGHT[1][0])).right
    assert ("course", "MulAdd") not in registry.RULES


# The command


@pytest.fixture
def teach(capsys):
    def run(*words: object) -> tuple[int, str, str]:
        code = main(["teach", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def test_teach_lists_the_chapters_and_says_how_to_begin(teach):
    code, out, _ = teach()
    assert code == 0
    assert all(chapter.title in out for chapter in CHAPTERS.values())
    code, out, _ = teach("--json")
    assert [row["chapter"] for row in json.loads(out)] == list(CHAPTERS)
    code, out, _ = teach(3)
    assert "refgrad teach 3 --start answer.py" in out
    assert json.loads(teach(3, "--json")[1])["exercise"] == "Y = A·B"


def test_teach_writes_a_skeleton_and_never_over_a_file(teach, tmp_path):
    path = tmp_path / "mine.py"
    code, _, _ = teach(4, "--start", path)
    assert code == 0
    assert path.read_text() == chapter_of(4).skeleton
    path.write_text("precious")
    code, _, err = teach(4, "--start", path)
    assert code == 2
    assert "may be an answer" in err
    assert path.read_text() == "precious"
    with pytest.raises(OutputFileError, match="no folder"):
        start(1, tmp_path / "nowhere" / "answer.py")
    assert json.loads(teach(4, "--start", tmp_path / "other.py", "--json")[1])["chapter"] == 4
    assert teach(4, path, "--start", tmp_path / "third.py")[0] == 2


def test_teach_judges(teach, answer):
    path = answer(2, "o = op.Less(X, b)\nreturn op.Where(o, 0.0, d_Y), op.Where(o, d_Y, 0.0)")
    code, out, err = teach(2, path)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "Not right yet.",
        "db: The sum over the broadcast axis is missing. Y reads b once in every row, and contributions add: db is the sum "
        "over the rows, axis 0.",
        "The smallest input that shows it:",
        "  X        = [[1.],",
        "              [4.]]",
        "  b        = [2.]",
        "  dY       = [[3.],",
        "              [5.]]",
        "  your db  = [[3.],",
        "              [0.]]",
        "  right db = [3.]",
        f"The right formula: refgrad teach 2 {path} --formula",
    ]
    code, out, _ = teach(2, path, "--formula")
    assert code == 1
    assert out.splitlines()[-1] == f"Right: {chapter_of(2).derivative}"
    found = json.loads(teach(2, path, "--json")[1])
    assert found["right"] is False
    assert found["example"]["expected"] == [3.0]
    code, out, _ = teach(2, answer(2, RIGHT[2][0]))
    assert code == 0
    assert re.match(r"Right at all \d+ inputs tried, by 3 methods: complex steps, finite differences, ", out)
    assert out.endswith("Next: refgrad teach 3\n")


def test_teach_judges_several_answers_in_a_line_each(teach, answer, tmp_path):
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(answer(1, RIGHT[1][0]).read_text())
    wrong.write_text(answer(1, "return d_z, op.Mul(x, d_z)").read_text())
    code, out, err = teach(1, right, wrong)
    assert (code, err) == (1, "")
    first, second = out.splitlines()
    assert first == f"{right}: right"
    assert second.startswith(f"{wrong}: not right. dx: Only one contribution")
    documents = json.loads(teach(1, right, wrong, "--json")[1])
    assert [(one["answer"], one["right"]) for one in documents] == [(str(right), True), (str(wrong), False)]
    assert teach(1, right, right)[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--start", "a0.py"), "Give a chapter, too: refgrad teach 1 --start a0.py"),
        (("mine.py",), "Give a chapter first: refgrad teach 1 mine.py"),
        (("x", "mine.py"), "There is no chapter x. A chapter is a number, 1 to 6."),
        (("0",), "There is no chapter 0; there are 1 to 6."),
    ],
)
def test_teach_without_a_chapter_says_so(teach, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = teach(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", CHAPTERS)
def test_no_hint_has_the_formula_which_is_given_on_request(number, teach):
    chapter = CHAPTERS[number]
    parts = [part.partition(" = ")[2] for part in re.split(r"[,;] (?=d)", chapter.derivative)]
    if number in (3, 4, 6):
        assert not [mistake.hint for mistake in chapter.mistakes for part in parts if part and part in mistake.hint]
    assert f"Right: {chapter.derivative}" in teach(number, "--formula")[1]


def test_bad_input(teach, tmp_path, answer):
    missing = tmp_path / "nowhere.py"
    assert teach(1, missing)[0] == 2
    for number in (0, 7, -1):
        with pytest.raises(OptionError, match="there are 1 to 6"):
            chapter_of(number)
    for path, expected in ((missing, "There is no file"), (tmp_path, "is a folder"), (Path("a\0b"), "cannot|no file")):
        with pytest.raises(OptionError, match=expected):
            judge(1, path)
    large = tmp_path / "large.py"
    large.write_bytes(b"#" * (1 << 21))
    with pytest.raises(OptionError, match="larger than 1 MB"):
        judge(1, large)
    hostile = answer(1, "raise ValueError('\\x1b[2J\\nrefgrad: all is well')")
    code, out, _ = teach(1, hostile)
    assert code == 1
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2


def test_the_command_runs_as_a_program_from_an_empty_folder(tmp_path):
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "refgrad", "teach", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)

    assert run("1", "--start", "answer.py").returncode == 0
    done = run("1", "answer.py")
    assert done.returncode == 1
    assert "not written yet" in done.stdout
    assert done.stderr == ""
