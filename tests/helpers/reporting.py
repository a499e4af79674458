"""Results for the tests of reports: every verdict, details of every kind, gaps, and names that mean something to a reader."""

import random

import onnx.parser

from refgrad.conformance.judge.rows import ResultRow
from refgrad.conformance.judge.running.results import About, Results
from refgrad.conformance.verdicts import REFUSED, RIGHT, UNDECIDED, VERDICTS

MODEL = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
)
PAIRS = [("refgrad", "numpy"), ("refgrad", "ort-cpu"), ("onnx-ad", "numpy"), ("onnx-ad", "ort-cpu")]
VERSIONS = {
    "refgrad": "refgrad 0.1.0",
    "onnx-ad": "onnx-ad 0.3.0",
    "numpy": "numpy 2.3.1",
    "ort-cpu": "onnxruntime 1.31.1",
}
HOSTILE = "<script>alert(1)</script> | [bold]it's</bold> `_*_` \x1b[31m\x00"


def made(count=40, pairs=PAIRS, seed=0):
    """Results with every verdict, details of every kind, and a gap here and there."""
    draw = random.Random(seed)
    cases = {f"Op{k % 7}-{k}": About(f"Op{k % 7}", 13 + k % 3, "float32", "smooth", "table") for k in range(count)}
    cases[HOSTILE] = About("com.microsoft.<b>", 1, "float16", "kink", "")
    rows = []
    for name in cases:
        for pair in pairs:
            verdict = draw.choice(list(VERDICTS))
            numbers = (
                (draw.choice([0.0, 1.2345678e-7, 3.3, float("inf")]), 1e-6) if verdict != REFUSED else (None, None)
            )
            against = ("torch",) if verdict == UNDECIDED else ()
            note = "" if verdict == RIGHT else draw.choice(["", f"note of {pair[0]}", HOSTILE])
            if draw.random() < 0.95:
                rows.append(
                    ResultRow(
                        name, *pair, verdict, ("differences", "reference"), against, *numbers, note, draw.random()
                    )
                )
    return Results({"seed": 3, "sources": ["tables", "node-tests"], "dtype": None}, VERSIONS, cases, tuple(rows))


RESULTS = made()

# https://www.w3.org/TR/WCAG22/#contrast-minimum: 4.5 between a text and what is behind it
LOW_CONTRAST = """() => {
  const linear = part => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(part => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = one => {
    const color = one ? getComputedStyle(one).backgroundColor : "rgb(255, 255, 255)";
    return color === "rgba(0, 0, 0, 0)" ? behind(one.parentElement) : color;
  };
  const low = new Set();
  for (const one of document.querySelectorAll("body *")) {
    const text = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!text || !one.offsetParent || one.closest(".dim, .hidden, option")) continue;
    const colors = [getComputedStyle(one).color, behind(one)];
    const [less, more] = colors.map(light).sort((x, y) => x - y);
    if ((more + 0.05) / (less + 0.05) < 4.5) low.add(`${one.tagName}.${one.className}: ${colors.join(" on ")}`);
  }
  return [...low];
}"""
