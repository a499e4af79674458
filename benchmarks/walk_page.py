"""The page of a walk in headless Chromium: its size, the time to its first step, and the time of a step.

python examples/torch_models.py FOLDER --all
python benchmarks/walk_page.py FOLDER        # needs playwright and Chromium; REFGRAD_BROWSER may name its program
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from timing import save

import refgrad
from refgrad.walks.page import page

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXPORTS = {"resnet18": "output[0, 0]", "bert": "output[0, 0, 0]", "gpt2": "output[0, 0, 0]", "lstm": "output[0, 0]"}
LOADED = "performance.getEntriesByType('navigation')[0].domComplete"
# Milliseconds of a step: the median of a way back, and of three of these the least, since other programs run too
STEPS_MS = """async () => {
  const medians = [], last = walkPage.document().steps.length + 1;
  for (let round = 0; round < 3; round++) {
    const times = [];
    for (let k = 0; k <= last; k += Math.ceil(last / 80)) {
      const start = performance.now();
      walkPage.go(k);
      document.body.offsetHeight;
      times.push(performance.now() - start);
      await new Promise(done => setTimeout(done));
    }
    medians.push(times.sort((a, b) => a - b)[Math.floor(times.length / 2)]);
  }
  return Math.min(...medians);
}"""


def walks(folder: Path) -> Iterator[tuple[str, Any]]:
    """The walks of the table by name."""
    from walked_models import long

    for name, of in EXPORTS.items():
        model, saved = onnx.load(folder / f"{name}.onnx"), np.load(folder / f"{name}.npz")
        feeds = {
            value.name: saved[f"feed/{value.name}"] for value in model.graph.input if f"feed/{value.name}" in saved
        }
        yield name, refgrad.walk(model, feeds, of=of, differences=False)
    yield "a chain of 2,000 nodes", refgrad.walk(long(2000), differences=False)


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where examples/torch_models.py wrote the models")
    folder = parser.parse_args().folder
    program = os.environ.get("REFGRAD_BROWSER") or next(filter(None, map(shutil.which, NAMES)))
    rows = []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as place:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, walk in walks(folder):
            file = Path(place, "page.html")
            file.write_text(page(walk), encoding="utf-8")
            shown = browser.new_page()
            shown.goto(f"{file.as_uri()}#step=1")
            shown.wait_for_selector("html[data-editable]")
            rows.append(
                {
                    "model": name,
                    "steps": len(walk.steps),
                    "page MB": round(file.stat().st_size / 1e6, 2),
                    "first step s": round(shown.evaluate(LOADED) / 1e3, 2),
                    "step ms": round(shown.evaluate(STEPS_MS), 1),
                }
            )
            shown.close()
        browser.close()
    save("walk_page", rows)


if __name__ == "__main__":
    main()
