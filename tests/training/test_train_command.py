"""`refgrad train` and `refgrad training-model`: what they write, print and refuse."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.training import SGD, Training, step_model

pytestmark = pytest.mark.interpreter

X = np.random.default_rng(0).standard_normal((120, 2)).astype(np.float32)
CLASSES = (X[:, 0] + X[:, 1] > 0).astype(np.int64)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    line = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
        "<float[2, 1] a = {0, 0}, float[1] b = {0}> { z = MatMul(x, a) y = Add(z, b) }"
    )
    two = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> two (float[N, 2] x) => (float[N, 2] y) '
        "<float[2, 2] a = {0, 0, 0, 0}, float[2] b = {0, 0}> { z = MatMul(x, a) y = Add(z, b) }"
    )
    onnx.save(line, "line.onnx")
    onnx.save(two, "two.onnx")
    np.savez("line.npz", X=X, y=X @ [1.0, 2.0] + 3)
    np.savez("two.npz", X=X, y=CLASSES)
    return tmp_path


def weights(path: str) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def test_a_line_is_found(folder, capsys):
    words = "train line.onnx --data line.npz -o t.onnx --optimizer nesterov --rate 0.02 --epochs 40 --schedule cosine"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    np.testing.assert_allclose(weights("t.onnx")["a"].ravel(), [1, 2], atol=1e-3)
    np.testing.assert_allclose(weights("t.onnx")["b"], [3], atol=1e-3)
    assert out.count("|") == 10
    assert out.count("*") == 40
    assert "in 40 epochs, 160 steps" in out
    assert out.splitlines()[-1] == "t.onnx"


def test_a_classifier_is_trained_with_validation(folder, capsys):
    words = (
        "train two.onnx --data two.npz -o t.onnx --loss cross_entropy --rate 0.1 --epochs 20 --validation 0.2 --json"
    )
    assert main([*words.split(), "--warmup", "5", "--clip-norm", "1", "--penalty", "a=0,1e-5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epochs"] == len(found["losses"]) == len(found["validation_losses"]) == 20
    assert found["losses"][0] == pytest.approx(np.log(2), abs=0.1)
    assert found["validation_losses"][-1] < 0.2
    scores = get_backend("numpy").prepare("t.onnx").run({"x": X})["y"]
    assert (scores.argmax(1) == CLASSES).mean() > 0.95


def test_what_is_not_trained_stays(folder):
    words = "train line.onnx --data line.npz -o t.onnx --trainable b --epochs 2 --optimizer sgd --quiet"
    assert main(words.split()) == 0
    assert not weights("t.onnx")["a"].any()
    assert weights("t.onnx")["b"].all()


OTHERS = {  # the options of a resumed training, and the message about each
    "--rate 0.5": "--rate 0.001 then, and --rate 0.5 now. Give what was given then.",
    "--batch-size 16": "--batch-size 32 then, and --batch-size 16 now.",
    "--loss absolute_error": "--loss squared_error then, and --loss absolute_error now.",
    "--no-shuffle": "--seed 0 then, and samples in their order now.",
    "--validation 0.5": "no validation data then, and validation data of 60 samples (",
    "--accumulate 2": "--accumulate 1 then, and --accumulate 2 now.",
    "--clip-norm 1": "--clip-norm none then, and --clip-norm 1.0 now.",
    "--trainable a": "3 numbers in 'a', 'b' to train then, and 2 numbers in 'a' to train now.",
    "--epochs 5": "has done 6 epochs. Give --epochs 6 to write its model, or more to go on.",
}


@pytest.mark.parametrize("option", ["a", "a*", "[!b]"])
def test_what_is_frozen_stays(option, folder, capsys):
    words = "train line.onnx --data line.npz -o t.onnx --epochs 2 --quiet --freeze"
    assert main([*words.split(), option]) == 0
    assert not weights("t.onnx")["a"].any()
    assert weights("t.onnx")["b"].all()
    assert main(["training-model", "line.onnx", "-o", "s.onnx", "--json", "--freeze", option]) == 0
    [noted] = [json.loads(p.value) for p in onnx.load("s.onnx").metadata_props if p.key == "refgrad.training"]
    assert list(noted["layout"]) == ["b"]


def test_training_goes_on_from_a_checkpoint(folder, capsys):
    pytest.importorskip("safetensors")
    words = "train line.onnx --data line.npz --quiet --optimizer adam --checkpoint c.safetensors --epochs"
    assert main([*words.split(), "6", "-o", "whole.onnx"]) == 0
    Path("c.safetensors").unlink()
    assert main([*words.split(), "2", "-o", "part.onnx"]) == 0
    assert main([*words.split(), "6", "-o", "going.onnx"]) == 2
    assert "exists. Continue from it with --resume" in capsys.readouterr().err
    assert main([*words.split(), "6", "-o", "going.onnx", "--resume"]) == 0
    for name, value in weights("whole.onnx").items():
        np.testing.assert_array_equal(weights("going.onnx")[name], value)
    for option, said in OTHERS.items():
        assert main([*words.split(), "8", "-o", "other.onnx", "--resume", *option.split()]) == 2, option
        assert said in " ".join(capsys.readouterr().err.split())
        assert not Path("other.onnx").exists()


def test_a_training_that_diverges_writes_no_model_and_keeps_the_checkpoint(folder, capsys):
    words = (
        "train line.onnx --data line.npz -o t.onnx --optimizer sgd --rate 1e9 --checkpoint c.safetensors --epochs 50"
    )
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert "step" in said
    assert "'t.onnx' is not written. " in said
    assert "Traceback" not in said
    assert not Path("t.onnx").exists()


WRONG = {
    "--optimizer lion": "'lion' is not known. There are 'sgd'",
    "--schedule steps": "'steps' is not known. There are 'constant'",
    "--loss hinge": "'hinge' is not known. There are",
    "--trainable c": "'c' in --trainable is no float initializer. There are: 'a', 'b'.",
    "--trainable c*": "The pattern 'c*' in --trainable matches no float input",
    "--lora c*": "The pattern 'c*' in --lora matches no float input",
    "--trainable ,": "--trainable '' trains nothing. Leave it out to train every parameter.",
    "--freeze c": "'c' in --freeze is no float initializer. There are: 'a', 'b'.",
    "--freeze *": "--freeze '*' leaves nothing to train. Without it these are: 'a', 'b'.",
    "--rank 4": "--rank 4 needs --lora NAMES: it is the rank of the adapters. Give both, or leave it out.",
    "--momentum 0.9": "does not work with adamw",
    "--penalty a": "give a pattern and two numbers",
    "--data nowhere.npz": "There is no file 'nowhere.npz'",
    "--label z": "There is no array 'z'; there are 'X', 'y'",
    "--backend tpu": "'tpu'",
    "--rate 0": "above 0",
    "--rate -1": "above 0",
    "--patience 2": "validation",
    "--resume": "checkpoint",
    "--validation 1.5": "between 0 and 1",
    "--validation 1": "between 0 and 1",
    "--data table.csv": "t = numpy.genfromtxt('table.csv', delimiter=',', names=True); *xs, y = t.dtype.names;",
    "--loss cross_entropy": "needs a logit for each class, and 'y' has 1 for each sample, as for two classes: use --loss "
    "binary_cross_entropy_with_logits with labels 0 and 1",
    "--loss huber --loss-setting delta": "--loss-setting 'delta': give a name and numbers",
    "--loss huber --loss-setting beta=1": "The score 'huber' has no setting 'beta'; it has 'delta'",
    "--loss none --loss-setting delta=1": "--loss none has no settings, such as 'delta'",
    "--loss none": "--loss none needs an output that is one number, and 'y' has the shape [N, 1]",
    "--validation nowhere.npz": "Validation data: There is no file 'nowhere.npz'",
    "--data shards --validation 0.5": "keeps back a part of an .npz file or of a folder of .npy files",
}


@pytest.mark.parametrize("option", WRONG)
def test_what_does_not_fit_is_refused(option, folder, capsys):
    words = "train line.onnx --data line.npz -o t.onnx --epochs 1"
    Path("table.csv").write_text("a,b,y\n1,2,3\n4,5,6\n")
    Path("shards").mkdir()
    np.savez("shards/0.npz", X=X, y=X[:, 0])
    assert main([*words.split(), *option.split()]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert WRONG[option] in said
    assert "Traceback" not in said
    assert "unexpected" not in said
    assert not Path("t.onnx").exists()


def test_settings_of_the_loss_count(folder, capsys):
    """As the same settings in Python do."""
    network = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[N, 2] x) => (float[N, 3] z) '
        "<float[2, 3] w = {1, -1, 0, 0.5, 1, -2}> { z = MatMul(x, w) }"
    )
    onnx.save(network, "network.onnx")
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((50, 2)).astype(np.float32), rng.integers(-1, 3, 50)
    np.savez("classes.npz", x=x, label=labels)
    words = "train network.onnx --data classes.npz -o t.onnx --loss cross_entropy --optimizer sgd --batch-size 50 --epochs 3"
    given = "--loss-setting class_weights=1,2,.5 --loss-setting ignore_index=-1 --loss-setting label_smoothing=1e-1"
    assert main([*words.split(), *given.split(), "--json"]) == 0
    losses = json.loads(capsys.readouterr().out)["losses"]
    settings = {"class_weights": [1, 2, 0.5], "ignore_index": -1, "label_smoothing": 0.1}
    training = Training(step_model(network, "cross_entropy", SGD(), loss_settings=settings), 0.01)
    expected = [training.train_on({"x": x, "label": labels}, 0.01) for _ in range(3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_table_in_text_is_converted_as_the_message_says(folder, capsys):
    Path("table.csv").write_text("a,b,y\n" + "\n".join(f"{a},{b},{a + 2 * b}" for a, b in X[:50]))
    words = "train line.onnx -o t.onnx --epochs 1 --data"
    assert main([*words.split(), "table.csv"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    exec(said.partition("first line: ")[2].removesuffix("."), {"numpy": np})
    assert main([*words.split(), "data.npz"]) == 0


def test_the_end_of_the_time_names_the_step_and_the_checkpoint(folder, capsys):
    pytest.importorskip("safetensors")
    words = "train line.onnx --data line.npz -o t.onnx --epochs 1000000 --max-seconds 1 --checkpoint c.safetensors"
    assert main(words.split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"--max-seconds stopped the training after step \d+\. 't\.onnx' is not written\.", said)
    assert "The checkpoint 'c.safetensors' has the last good weights; --resume goes on with them." in said
    assert not Path("t.onnx").exists()


def test_an_output_is_chosen_by_of(folder, capsys):
    two = onnx.load("line.onnx")
    two.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("z", 1, ["N", 1]))
    onnx.save(two, "two.onnx")
    assert main(["train", "two.onnx", "--data", "line.npz", "-o", "t.onnx"]) == 2
    assert "Name the one to train: --of y, of 'y', 'z'." in capsys.readouterr().err


def test_a_label_among_the_feeds_of_a_run_is_named(folder, capsys):
    np.savez("data.npz", x=X, label=CLASSES)
    assert main(["run", "line.onnx", "--feeds", "data.npz"]) == 2
    assert (
        "The feeds have 'label', but the model has no such input. Its inputs are 'x'. Leave 'label' out."
        in capsys.readouterr().err
    )


def test_a_model_may_have_an_input_called_label(folder):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[N, 2] x, float[N, 1] label) => (float[N, 1] y) '
        "<float[2, 1] a = {0, 0}> { z = MatMul(x, a)  y = Add(z, label) }"
    )
    onnx.save(model, "m.onnx")
    np.savez("m.npz", x=X, label=X[:, :1], wanted=X @ [[2.0], [2.0]])
    words = "train m.onnx --data m.npz --label wanted --optimizer sgd --rate 0.1 --epochs 40 --quiet -o t.onnx"
    assert main(words.split()) == 0
    np.testing.assert_allclose(weights("t.onnx")["a"].ravel(), [1, 2], atol=1e-3)


@pytest.mark.parametrize("loss", ["squared_error", "huber", "cross_entropy"])
def test_a_model_that_returns_its_loss_is_told_so(loss, folder, capsys):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[N, 2] x, float[N, 1] label) => (float total) '
        "<float[2, 1] a = {0, 0}> { y = MatMul(x, a)  d = Sub(y, label)  s = Mul(d, d)  total = ReduceMean<keepdims=0>(s) }"
    )
    onnx.save(model, "m.onnx")
    np.savez("m.npz", x=X, label=X[:, :1])
    words = f"train m.onnx --data m.npz -o t.onnx --epochs 1 --quiet --loss {loss}".split()
    assert main(words) == 2
    assert "'total' is one number. If it is the loss itself, take --loss none." in capsys.readouterr().err
    assert main([*words[:-1], "none"]) == 0


def test_an_interrupt_names_the_checkpoint(folder):
    pytest.importorskip("safetensors")
    words = "train line.onnx --data line.npz -o t.onnx --checkpoint c.safetensors --epochs 1000000 --checkpoint-every 1"
    reset = "import signal, os, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", reset, sys.executable, "-m", "refgrad", *words.split()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # a suite in the background ignores SIGINT
    while not Path("c.safetensors").exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert "Interrupted after step " in said
    assert "The checkpoint 'c.safetensors' has the last good weights" in said
    assert "Traceback" not in said
    assert not Path("t.onnx").exists()


def test_the_documentation_runs_from_an_empty_folder(tmp_path, monkeypatch, capsys):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("skl2onnx")
    page = (Path(__file__).parents[2] / "docs" / "train_command.md").read_text()
    names, commands = {}, 0
    for language, block in re.findall(r"```(python|console)\n(.*?)```", page, re.DOTALL):
        capsys.readouterr()
        if language == "python":
            exec(block, names)
            if said := re.search(r"# (\(.*)", block):
                assert capsys.readouterr().out.strip() == said[1]
            continue
        for line in re.findall(r"^\$ refgrad (.*)", block.replace("\\\n", ""), re.MULTILINE):
            assert main(shlex.split(line)) == 0, line
            commands += 1
    assert commands == 5
    assert Path("again.onnx").read_bytes() == Path("trained.onnx").read_bytes()
    label = (
        get_backend("numpy").prepare(onnx.load("better.onnx")).run({"X": names["x"]}, ["output_label"])["output_label"]
    )
    assert (label == names["names"]).mean() > 0.9


def test_a_step_model_trains_by_its_metadata_alone(folder, capsys):
    """Any runtime: feed what `next` names back to its input."""
    words = "training-model line.onnx -o step.onnx --state start.npz --optimizer nesterov --json"
    assert main(words.split()) == 0
    printed = json.loads(capsys.readouterr().out)
    onnx.checker.check_model("step.onnx", full_check=True)
    [noted] = [json.loads(p.value) for p in onnx.load("step.onnx").metadata_props if p.key == "refgrad.training"]
    assert printed["next"] == noted["next"]
    state = dict(np.load("start.npz"))
    run, y, losses = get_backend("numpy").prepare("step.onnx"), X @ np.float32([[1], [2]]) + 3, []
    for _ in range(200):
        results = run.run({"x": X, "label": y, "learning_rate": np.float32(0.02), **state})
        state = {name: results[output] for name, output in noted["next"].items()}
        losses.append(results[noted["loss"]])
    assert losses[0] > 1
    assert losses[-1] < 1e-6
    start, shape = noted["layout"]["a"]
    np.testing.assert_allclose(state["weights"][start : start + 2].reshape(shape), [[1], [2]], atol=1e-3)


def test_one_epoch_has_one_loss(folder, capsys):
    assert (
        main(["train", "line.onnx", "--data", "line.npz", "-o", "t.onnx", "--epochs", "1", "--validation", "0.25"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert all(" -> " not in line for line in lines)
    assert re.fullmatch(r"loss [0-9.]+ in 1 epoch, 3 steps", lines[0])
    assert re.fullmatch(r"validation loss ([0-9.]+), the lowest \1 in epoch 1", lines[1])


def test_updates_that_accumulate_are_counted(folder, capsys):
    words = "train line.onnx --data line.npz -o t.onnx --epochs 2 --accumulate"
    assert main([*words.split(), "3"]) == 0
    assert "in 2 epochs, 8 steps, 2 updates" in capsys.readouterr().out
    assert main([*words.split(), "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["updates"], printed["data"], printed["external_data"]) == (2, "line.npz", None)
    Path("t.onnx").unlink()
    assert main([*words.split(), "9"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "No weight has changed: --accumulate 9 updates once in so many steps, and there were 8." in said
    assert not Path("t.onnx").exists()


NOTICES = {
    "--data two.npz --data line.npz": "--data takes one value, and is given 3 times: 'line.npz' is taken.",
    "--lora a": "--rank 8 is more than the weight 'a' needs",
    "--lora a --rank 1": "",
    "--optimizer sgd --rate 10": "The loss rose from",
    "--trainable a --trainable b": "",
}


@pytest.mark.parametrize("options", NOTICES)
def test_what_has_no_effect_or_a_bad_one_is_noticed(options, folder, capsys):
    words = "train line.onnx --data line.npz -o t.onnx --epochs 2"
    assert main([*words.split(), *options.split()]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert ("notice" in said) == bool(NOTICES[options])
    assert NOTICES[options] in said


def test_weight_decay_by_pattern(folder, capsys):
    common = "training-model line.onnx -o step.onnx --optimizer sgd --weight-decay"
    assert main([*common.split(), "0.5", "--weight-decay", "a=0.25"]) == 0
    assert main([*common.split(), "half"]) == 2
    assert "--weight-decay 'half': give a number, or a pattern and a number" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main([*common.split(), "zz=0.5"]) == 2
    assert "zz" in capsys.readouterr().err
