"""The scripts in examples/training run on the core install, quickly, and print what the source documents print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "training"
WITHOUT = ("torch", "sklearn", "skl2onnx", "onnxruntime")  # a module that is None cannot be imported
START = """
import runpy, sys
sys.modules.update(dict.fromkeys({without}))
runpy.run_path({path!r}, run_name="__main__")
"""


def printed(name):
    command = START.format(without=WITHOUT, path=str(FOLDER / f"{name}.py"))
    done = subprocess.run([sys.executable, "-W", "error", "-c", command], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    assert done.returncode == 0
    return done.stdout


# Every script, and lines that it prints.
EXPECTED = {
    "regression": [
        "at five points: [-1.         -2.5         1.66667",
        "operators: Add BroadcastGradientArgs Mul ReduceSum Reshape Shape Slice SliceGrad Squeeze Sum Unsqueeze",
        "['loss', 'y']",
        "init = [[0.5, -0.333]]",
        "init_1 = [[-2.0, 3.0]]",
        "init_b10 = [-1.0]",
    ],
    "derivative_options": [
        "YieldOp(Y, full_shape_outputs=[0]) -> Y_grad",
        "input: name='Y_grad' type=dtype('float32') shape=(?, 10)",
        "ConstantOfShape(cotangent_Grad/Shape_0, value=[1.]) -> Y_grad",
        "output: name='Y' type=dtype('float32') shape=(?, 10)",
        "output: name='loss' type=dtype('float32') shape=(1, 1)",
        "digraph{",
        "Random feeds: {'X': (3, 10), 'Ad_Addcst': (1,), 'Y_grad': (3, 10)}",
    ],
    "losses": [
        "What is trained: {'coef': (10, 1), 'intercept': (1,)}",
        "Add(loss_l1_2, loss_l2_2) -> final_loss",
        "Add(penalty_reshape, loss_reshape) -> loss",
        "The nodes of one penalty: Reshape Abs ReduceSum Mul and its constants: 2",
        "the log loss of a classifier: ",
    ],
    "forward_backward": [
        "The weights: {'coefficient': (2, 1), 'intercepts': (1, 1)}",
        "output: name='predicted_grad' type=dtype('float32') shape=(?, 1)",
        "Sub(weight, step) -> moved",
        "The weights: {'coefficient': [51.0, 81.0], 'intercepts': [2.0]}",
    ],
    "optimizers": [
        "learning_rate=LearningRateSGD(eta0=0.1, alpha=0.0001, power_t=0.25, learning_rate='invscaling'), "
        "value=0.03162277660168379, device='cpu', warm_start=False",
        "The loss falls: True",
        "Expected a bias of -1.0, got [-1.0].",
        "The score is minus the mean error of the trained model: True",
        'weights_to_train="[\'I0_coeff..."',
        "momentum=0.9, nesterov=True)",
        "Nesterov: the loss falls: True",
        "Mul(Z, beta) -> ahead",
    ],
}


def test_every_script_is_tried():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_script_prints(name):
    text = printed(name)
    for line in EXPECTED[name]:
        assert line in text


def test_the_numbers_of_the_notebook():
    text = printed("regression")
    for name, expected in {
        "loss": [532.5546],
        "init_grad": [193.33316, 186.66649],
        "init_1_grad": [109.333244, 102.666565],
        "init_b10_grad": [76.6666],
        "label_grad": [-4, -12, -5.33332, -13.333321, -41.99996],
        "x_grad": [2, 1.33332, 54, 3.99996, 2.66666, 33.777676, 59.999943, 84.44432, 356.99966, 517.9994],
    }.items():
        [row] = re.findall(rf"^{name} = (.*)", text, re.MULTILINE)
        np.testing.assert_allclose([float(number) for number in re.findall(r"[-\d.]+", row)], expected, rtol=3e-7)
