"""The smallest model that shows a failure: a test in onnx's layout, a script and a report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from planting import Planted, builder_with, network, scaled

from refgrad.cli import main
from refgrad.conformance.locating import reducing
from refgrad.conformance.locating.sides import Live
from refgrad.errors import BuilderError, FeedError

pytestmark = pytest.mark.interpreter


def test_a_wrong_kernel_is_reduced(tmp_path: Path) -> None:
    model, feeds = network()
    side = Live("refgrad", Planted("Tanh_1", lambda y: 1.01 * y))
    reduced = reducing.reduce(model, side, feeds)
    assert reduced.failure.operators == ("Tanh",)
    assert reduced.failure.nodes == ("Tanh_1",)
    assert [node.op_type for node in reduced.failure.model.graph.node] == ["Tanh"]
    assert all(value.size == 1 for value in reduced.failure.feeds.values())
    reducing.write(reduced, tmp_path / "made")
    onnx.checker.check_model(onnx.load(tmp_path / "made" / "model.onnx"), full_check=True)
    data = tmp_path / "made" / "test_data_set_0"
    due, came = (numpy_helper.to_array(onnx.load_tensor(data / f"{kind}_0.pb")) for kind in ("output", "actual"))
    np.testing.assert_allclose(came, 1.01 * due, rtol=1e-6)
    assert "In the original model: 'Tanh_1'" in (tmp_path / "made" / "REPORT.md").read_text(encoding="utf-8")


def test_a_wrong_rule_is_reduced_and_reproduced_without_refgrad(tmp_path: Path) -> None:
    model, feeds = network()
    reduced = reducing.reduce(model, Live(builder_with(scaled("Tanh_1", 1.5)), "numpy"), feeds)
    assert reduced.failure.kind == "rule"
    assert reduced.failure.nodes == ("Tanh_1",)
    reducing.write(reduced, tmp_path / "made")
    script = (tmp_path / "made" / "reproduce.py").read_text(encoding="utf-8")
    assert "refgrad" not in script
    done = subprocess.run(
        [sys.executable, "reproduce.py"], cwd=tmp_path / "made", capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "largest error" in done.stdout
    assert "still there" in done.stdout
    assert not done.stderr


def test_a_wrong_builder_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program exits with 1 as long as the builder is wrong, and with 0 once it is mended."""
    monkeypatch.chdir(tmp_path)
    model, feeds = network()
    onnx.save(model, "m.onnx")
    np.savez("f.npz", **feeds)
    text = (
        "import os\nimport refgrad\n\n\ndef build(model, wrt, outputs):\n"
        "    made = refgrad.gradient(model, wrt, outputs)\n"
        "    for node in made.graph.node:\n"
        "        if node.name.startswith('Tanh_1_Grad/') and node.op_type == 'Sub' and 'MENDED' not in os.environ:\n"
        "            node.op_type = 'Add'\n"
        "    return made\n"
    )
    Path("wrong_tanh.py").write_text(text)
    words = ["reduce", "m.onnx", "--feeds", "f.npz", "-o", "made", "--side", "wrong_tanh:build@numpy"]
    assert main(words) == 0
    for environment, code in (({}, 1), ({"MENDED": "1"}, 0)):
        done = subprocess.run(
            [sys.executable, "made/reproduce.py"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])} | environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr


def test_a_fault_that_is_infinite_is_still_there(tmp_path: Path) -> None:
    model, feeds = network()
    reduced = reducing.reduce(model, Live("refgrad", Planted("Tanh_1", lambda y: y * np.float32(np.nan))), feeds)
    reducing.write(reduced, tmp_path / "made")
    data = tmp_path / "made" / "test_data_set_0"
    assert np.isnan(numpy_helper.to_array(onnx.load_tensor(data / "actual_0.pb"))).any()
    script = (tmp_path / "made" / "reproduce.py").read_text(encoding="utf-8")
    assert "0 < errors[0] == errors[1]" in script


def test_a_refusal_keeps_its_message() -> None:
    model, feeds = network()

    def refuses(problem: Any) -> Any:
        if any(node.op_type == "LayerNormalization" for node in problem.model.graph.node):
            raise BuilderError("refused", "no rule for LayerNormalization")
        return builder_with(lambda made: None)(problem)

    reduced = reducing.reduce(model, Live(refuses, "numpy"), feeds)
    assert (reduced.failure.how, reduced.failure.operators) == ("refused", ("LayerNormalization",))
    assert "no rule for LayerNormalization" in reducing.report(reduced)
    assert reduced.gradient is None


def test_an_interrupted_reduction_keeps_what_it_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    model, feeds = network()

    def progress(what: str, done: int, total: int | None) -> None:
        if what == "smaller models" and done == 3:
            raise KeyboardInterrupt

    reduced = reducing.reduce(model, Live("refgrad", Planted("Tanh_1", lambda y: 2 * y)), feeds, progress=progress)
    assert reduced.stopped == "interrupted"
    assert reduced.failure.operators == ("Tanh",)
    assert "interrupted" in reducing.report(reduced)


def test_what_does_not_fail_is_not_reduced() -> None:
    model, feeds = network()
    with pytest.raises(FeedError, match="Nothing fails"):
        reducing.reduce(model, Live("refgrad", "numpy"), feeds)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    model, feeds = network()
    onnx.save(model, "m.onnx")
    np.savez("f.npz", **feeds)
    Path("no_tanh.py").write_text(
        "import refgrad\n\n\ndef build(model, wrt, outputs):\n"
        "    if any(node.op_type == 'Tanh' for node in model.graph.node):\n"
        "        raise NotImplementedError('no rule for Tanh')\n"
        "    return refgrad.gradient(model, wrt, outputs)\n"
    )
    words = ["reduce", "m.onnx", "--feeds", "f.npz", "-o", "made"]
    assert main([*words, "--side", "no_tanh:build@numpy"]) == 0
    assert "no rule for Tanh" in capsys.readouterr().out
    assert {file.name for file in Path("made").iterdir()} == {
        "model.onnx", "forward.onnx", "reproduce.py", "REPORT.md", "test_data_set_0"
    }  # fmt: skip
    assert main([*words, "--side", "no_tanh:build@numpy"]) == 2  # the folder exists
    assert main(["reduce", "m.onnx", "--side", "f.npz", "-o", "other"]) == 2
    assert main(["reduce", "m.onnx", "--side", "refgrad@numpy", "-o", "other"]) == 2
    assert not Path("other").exists()
