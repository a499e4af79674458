"""Draw the pictures of README.md.

python docs/pictures.py            # writes docs/pictures/walk.png, by way of Chromium
docs/generate.py writes docs/pictures/in_and_out.svg, and says when it is stale.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx.parser

import refgrad
from refgrad.escaping import html

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
MODEL = """
    <ir_version: 10, opset_import: ["" : 21]>
    layer (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { m = MatMul(x, w)  y = Tanh(m) }
"""
STEP = 3  # of the page of a walk: the Tanh of README.md's network, which is its step 2
SIZE = (1060, 520)  # pixels of walk.png
_WIDTH, _HEIGHT, _BOX, _ROW = 720, 132, (290, 140), 26
_STYLE = (
    "text{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328}.t{font:bold 14px ui-sans-serif,system-ui,sans-serif}"
    ".s{font:12px ui-sans-serif,system-ui,sans-serif;fill:#57606a}path{fill:none;stroke:#57606a;stroke-width:1.3}"
)


def in_and_out() -> str:
    """A picture, as SVG, of what goes into a model and comes out, and of what goes into its gradient and comes out."""
    model = onnx.parser.parse_model(MODEL)
    gradient = refgrad.gradient(model)
    weights = [weight.name for weight in model.graph.initializer]
    ins = [value.name for value in model.graph.input]
    blocks = [
        _block(
            "model.onnx", "your model", "#dceaff", "#2f6fb7", 0, [*ins, *weights], [v.name for v in model.graph.output]
        ),
        _block(
            "gradient.onnx",
            "written by refgrad",
            "#ffe6d1",
            "#c2681c",
            _HEIGHT,
            _weights_before_cotangents([v.name for v in gradient.graph.input], ins, weights),
            [v.name for v in gradient.graph.output],
        ),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {2 * _HEIGHT}" width="{_WIDTH}" '
        f'height="{2 * _HEIGHT}" role="img" aria-label="What goes into a model and its gradient, and what comes out">'
    )
    arrow = (
        '<defs><marker id="a" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M1 1 L7 4 L1 7"/></marker></defs>'
    )
    background = f'<rect width="{_WIDTH}" height="{2 * _HEIGHT}" fill="#fff"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", arrow, background, *blocks, "</svg>", ""])


def _weights_before_cotangents(names: list[str], ins: list[str], weights: list[str]) -> list[str]:
    """The names in the order in which people write them: what the model reads, and then cotangents."""
    return [*ins, *weights, *(name for name in names if name not in (*ins, *weights))]


def _block(title: str, subtitle: str, fill: str, stroke: str, top: float, inputs: list[str], outputs: list[str]) -> str:
    """A model as a box between the names of its inputs and those of its outputs."""
    left, width = _BOX
    middle = top + _HEIGHT / 2
    lines = [
        f'<rect x="{left}" y="{top + 22}" width="{width}" height="{_HEIGHT - 44}" rx="6" fill="{fill}" stroke="{stroke}"/>',
        f'<text class="t" x="{left + width / 2}" y="{middle - 2}" text-anchor="middle">{html(title)}</text>',
        f'<text class="s" x="{left + width / 2}" y="{middle + 16}" text-anchor="middle">{html(subtitle)}</text>',
    ]
    for names, start, end, anchor, side in (
        (inputs, 214, left, "end", 206),
        (outputs, left + width, 506, "start", 514),
    ):
        first = middle - (len(names) - 1) * _ROW / 2
        for k, name in enumerate(names):
            y = first + k * _ROW
            lines.append(f'<text x="{side}" y="{y + 5}" text-anchor="{anchor}">{html(name)}</text>')
            lines.append(f'<path d="M{start} {y} H{end}" marker-end="url(#a)"/>')
    return "\n".join(lines)


def walk() -> bytes:
    """A picture, as PNG, of a step of the page that `refgrad walk` writes of README.md's network.

    :raises RuntimeError: there is no Chromium.
    """
    from PIL import Image

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise RuntimeError("The picture of a walk needs Chromium or Chrome, which is not there.")
    script = re.search(
        r"```python\n(# by_hand\.py\n.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert script is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "by_hand.py").write_text(script[1], encoding="utf-8")
        for command in (
            [sys.executable, "by_hand.py"],
            [sys.executable, "-m", "refgrad", "walk", "network.onnx", "--feeds", "feeds.npz", "--html", "page.html"],
            [
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--window-size={SIZE[0]},{SIZE[1]}",
                "--screenshot=walk.png",
                f"file://{folder}/page.html#step={STEP}",
            ],
        ):
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        with Image.open(Path(folder, "walk.png")) as image:
            small = io.BytesIO()
            image.convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    return small.getvalue()


def main() -> None:
    """Write the picture of a walk."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "walk.png").write_bytes(walk())


if __name__ == "__main__":
    main()
