"""The gallery of trained models: its entries, and questions about a model that is made here. Nothing is downloaded."""

import json
import sys
import tomllib
from pathlib import Path

import onnx
import onnx.parser
import pytest

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]
LAYERS = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["" : 18]>
    layers (float[N, 3] x) => (float[N, 2] y)
    <float[3, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, -9, 1, -2, 3}, float[4, 2] v = {1, -1, 2, 1, 0, 1, 3, 2}> {
    a = MatMul(x, w)  h = Tanh(a)  y = MatMul(h, v) }
""")


@pytest.fixture
def gallery(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gallery

    yield gallery
    for name in ("gallery", "timing"):
        sys.modules.pop(name, None)


def test_entries_are_complete_and_the_results_are_about_them(gallery):
    entries = tomllib.loads(gallery.ENTRIES.read_text(encoding="utf-8"))["model"]
    needed = {"name", "package", "version", "file", "producer", "task", "license"}
    for entry in entries:
        assert needed <= entry.keys() <= needed | {"registry", "left_out", "dim"}
        assert entry.get("left_out", {}).keys() <= {*gallery.QUESTIONS, *gallery.PARTS}
    names = [entry["name"] for entry in entries]
    assert len(set(names)) == len(names)
    rows = json.loads((ROOT / "reports" / "results" / gallery.FILE).read_text(encoding="utf-8"))
    assert [row["name"] for row in rows] == names
    assert {answer["answer"] for row in rows for answer in row["answers"].values()} <= {*gallery.WORDS}


def test_questions_are_answered_and_one_that_hangs_is_stopped(gallery, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    onnx.save(LAYERS, tmp_path / "layers.onnx")
    found, _ = gallery.asked("train", tmp_path / "layers.onnx", None, 120)
    assert found["train"]["answer"] == "right"
    assert found["train"]["reason"].startswith("v: ")
    found, _ = gallery.asked("onnxruntime", tmp_path / "layers.onnx", None, 120)
    assert [one["answer"] for one in found.values()] == ["right", "right"]
    monkeypatch.setattr(gallery, "GRACE", 0)
    found, _ = gallery.asked("walk", tmp_path / "layers.onnx", None, 0.01)
    assert found == {"walk": {"answer": "stopped", "reason": "no answer within 0.01 s"}}
