"""`refgrad train --processes` and `Training(processes=)`: several processes of one machine, and the death of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from refgrad.cli import main
from refgrad.errors import FeedError, OptionError, TrainingError
from refgrad.training import Adam, Training, batches, step_model
from refgrad.training.steps import StepModel

pytestmark = pytest.mark.interpreter

RNG = np.random.default_rng(0)
X = RNG.standard_normal((150, 3)).astype(np.float32)
CLASSES = (X[:, 0] + X[:, 1] > 0).astype(np.int64)
EQUAL = 1e-6
TRAIN = (
    "train net.onnx --data data.npz --loss cross_entropy --optimizer adam --rate 0.01 --batch-size 32 --penalty w=0,0.01 "
    "--validation 0.2"
)


def network(size: str = "N") -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> net (float[{size}, 3] x) => (float[{size}, 2] y) '
        "{ a = MatMul(x, w)  h = Tanh(a)  y = MatMul(h, v) }"
    )
    rng = np.random.default_rng(1)
    for name, shape in (("w", (3, 8)), ("v", (8, 2))):
        weight = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(network(), "net.onnx")
    np.savez("data.npz", x=X, y=CLASSES)
    return tmp_path


def weights(path: str) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def check_equal(path: str, other: str, tolerance: float = EQUAL) -> None:
    expected = weights(other)
    for name, value in weights(path).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=tolerance, err_msg=name)


def test_the_command_ends_at_the_weights_of_one_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for count in (1, 2):
        assert main(f"{TRAIN} --epochs 5 --processes {count} -o t{count}.onnx".split()) == 0
        printed.append(capsys.readouterr().out.replace(f"t{count}", "t").splitlines())
    assert printed[0][-4:] == printed[1][-4:]
    check_equal("t2.onnx", "t1.onnx")


def descendants(pid: int) -> list[int]:
    children = [int(n) for file in Path(f"/proc/{pid}/task").glob("*/children") for n in file.read_text().split()]
    return [one for child in children for one in (child, *descendants(child))]


def worker_of(pid: int) -> int | None:
    """The process that computes for a command, which is a copy of the process that was started."""
    for one in descendants(pid):
        if b"refgrad.worker" in Path(f"/proc/{one}/cmdline").read_bytes():
            return one
    return None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells which processes there are")
def test_a_training_resumes_after_a_process_was_killed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{TRAIN} --epochs 12 --processes 2 -o whole.onnx".split()) == 0
    # Steps wait, so that there is time to kill: for the loss nothing changes.
    slow = folder / "slow.py"
    slow.write_text(
        "import time\nfrom refgrad.training.runs import Run\nafter = Run._after_step\n"
        "def slowly(run):\n    after(run)\n    time.sleep(0.1)\nRun._after_step = slowly\n"
    )
    words = f"--import slow {TRAIN} --epochs 12 --processes 2 --checkpoint c.safetensors --checkpoint-every 3 -o t.onnx"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    with subprocess.Popen(
        [sys.executable, "-m", "refgrad", *words.split()], stderr=subprocess.PIPE, text=True, env=env
    ) as command:
        end = time.monotonic() + 60
        while not Path("c.safetensors").exists() and time.monotonic() < end:
            time.sleep(0.05)
        worker = worker_of(command.pid)
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        said = command.communicate(timeout=60)[1]
    assert command.returncode == 2
    assert "Process 1 (of 0 to 1) failed, so the training stopped: its process ended with -9 (SIGKILL)" in said
    assert "'t.onnx' is not written. The checkpoint 'c.safetensors' has the last good weights; --resume goes on" in said
    assert not Path("t.onnx").exists()
    capsys.readouterr()
    for count in (2, 1):  # the checkpoint belongs to no number of processes
        copy = f"c{count}.safetensors"
        Path(copy).write_bytes(Path("c.safetensors").read_bytes())
        resumed = f"{TRAIN} --epochs 12 --processes {count} --checkpoint {copy} --resume -o t{count}.onnx"
        assert main(resumed.split()) == 0
    check_equal("t2.onnx", "whole.onnx", 0)
    check_equal("t1.onnx", "whole.onnx")


def trained(**settings: Any) -> Training:
    return Training(step_model(network(), "cross_entropy", Adam()), 0.01, processes=2, **settings)


def test_a_batch_may_be_smaller_than_the_number_of_processes() -> None:
    training = trained()
    alone = Training(training.step, 0.01)
    data = {"x": X[:33], "label": CLASSES[:33]}
    for one in (training, alone):
        one.epoch(batches(data, 32))
    training.close()
    np.testing.assert_allclose(training.weights["w"], alone.weights["w"], atol=EQUAL)
    assert training.progress[:5] == alone.progress[:5]


def test_what_one_process_refuses_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepModel, "refuse_labels", lambda step, batch: None)  # so that the executor refuses one
    training = trained()
    data = {"x": X[:32], "label": CLASSES[:32]}
    before = training.weights
    with pytest.raises(FeedError, match="float64"):
        training.epoch([{**data, "x": data["x"].astype(np.float64)}])
    wrong = data["label"].copy()
    wrong[-1] = 7  # in the part of the other process
    with pytest.raises(TrainingError, match=r"^Process 1 \(of 0 to 1\) failed: .*7"):
        training.epoch([{**data, "label": wrong}])
    assert training.epoch([data]) > 0  # it goes on
    assert not np.array_equal(training.weights["w"], before["w"])
    training.close()


def test_a_batch_of_a_fixed_size_is_not_shared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(network("30"), "net.onnx")
    assert main(f"{TRAIN} --processes 2 -o t.onnx".replace("32", "30").split()) == 2
    assert "batches of 30 samples ('x'), which 2 processes cannot share" in capsys.readouterr().err
    with pytest.raises(OptionError, match="processes is an integer above 0"):
        Training(step_model(network(), "cross_entropy"), processes=0)
