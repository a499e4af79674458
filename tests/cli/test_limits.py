"""Limits are kept: of calls in a process of their own, of the command line, of feeds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import Command, commands
from onnx import ModelProto, numpy_helper, parser

import refgrad
from refgrad import cli
from refgrad.backends import get_backend
from refgrad.backends.base import graph_inputs
from refgrad.cli import own_code
from refgrad.cli.output import Files
from refgrad.conformance import Results
from refgrad.conformance.problems.feeds import random_feeds, read_feeds
from refgrad.errors import (
    FeedError,
    InvalidModelError,
    ModelWarning,
    NoGradientError,
    OptionError,
    UnknownNameError,
    WorkerError,
)
from refgrad.model.writing import fingerprint
from refgrad.worker import Worker, limited

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

MIB = 1 << 20


def _model(text: str) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')


SQUARE = _model("m (float[N] x) => (float[N] y) { y = Mul(x, x) }")


def _long(nodes: int) -> ModelProto:
    """A model whose gradient takes tens of megabytes."""
    chained = " ".join(f"v{k} = Mul({f'v{k - 1}' if k else 'x'}, x)" for k in range(nodes))
    return _model(f"m (float[N] x) => (float[N] y) {{ {chained} y = Mul(v{nodes - 1}, x) }}")


def test_a_gradient_within_limits_is_the_same_and_names_what_it_met():
    assert refgrad.gradient(SQUARE, max_memory=256 * MIB, max_seconds=60) == refgrad.gradient(SQUARE)
    with pytest.raises(WorkerError, match=r"gradient needs more than max_memory=\d+, 20 MiB") as met:
        refgrad.gradient(_long(20_000), max_memory=20 * MIB)
    assert met.value.verdict == "out of memory"
    with pytest.raises(WorkerError, match=r"hvp did not finish within max_seconds=0\.2") as met:
        refgrad.hvp(_long(20_000), max_seconds=0.2)
    assert met.value.verdict == "timed out"


def test_a_refusal_is_the_same_within_limits():
    with pytest.raises(UnknownNameError, match="'q' in wrt"):
        refgrad.gradient(SQUARE, ["q"], max_seconds=60)
    model = _model("m (float[N] x) => (float[N] y) { y = Softmax(x) z = d.unheard(x) }")
    model.opset_import.add(domain="d", version=1)
    model.graph.output.add().CopyFrom(model.graph.output[0])
    model.graph.output[1].name = "z"
    with pytest.raises(NoGradientError) as error:
        refgrad.gradient(model, max_seconds=60)
    assert error.value.nodes


def test_a_warning_is_the_same_within_limits():
    model = _model("m (float[2] x) => (float[7] y) { y = Relu(x) }")
    with pytest.warns(ModelWarning, match="declares 'y'") as here:
        refgrad.gradient(model)
    with pytest.warns(ModelWarning, match="declares 'y'") as there:
        refgrad.gradient(model, max_seconds=60)
    assert [str(one.message) for one in here] == [str(one.message) for one in there]
    assert there[0].filename == __file__


@pytest.mark.parametrize("limits", [{"max_memory": 0}, {"max_memory": 1.5}, {"max_seconds": 0}, {"max_seconds": "1"}])
def test_a_limit_is_a_number_above_0(limits):
    with pytest.raises(OptionError, match="above 0"):
        refgrad.gradient(SQUARE, **limits)


def test_a_crash_within_a_limit_of_memory_may_be_for_want_of_it():
    with pytest.raises(
        WorkerError, match=r"_crash needs more than max_memory=\d+, 256 MiB \(its process ended with -6"
    ) as met:
        _crash(max_memory=256 * MIB)
    assert met.value.verdict == "out of memory"


def test_a_crash_is_an_error():
    with pytest.raises(WorkerError, match=r"_crash crashed in a process of its own: its process ended with -6"):
        _crash(max_seconds=60)


@limited
def _crash(*, max_seconds: float | None = None) -> None:
    os.abort()


# --- the command line ---


def _command(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    said = f"import sys; from refgrad import cli\n{program}\nsys.argv = ['refgrad', *{list(arguments)!r}]; sys.exit(cli.main())"
    return subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a command has no process of its own")
@pytest.mark.parametrize(
    ("death", "said"),
    [
        ("import os; os.abort()", "died in normalise of <string>: Aborted"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was killed. The system does that when memory"),
    ],
)
def test_a_crash_is_exit_2_with_a_message(tmp_path, death, said):
    onnx.save(SQUARE, tmp_path / "m.onnx")
    program = (
        "import refgrad.reverse.writing\n"
        f"def normalise(*a, **k):\n    {death}\n"
        "sys.modules['refgrad.reverse.writing'].normalise = normalise"
    )
    done = _command(program, "grad", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "g.onnx"))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a command has no process of its own")
def test_a_command_that_dies_or_hangs_names_the_executor_of_ones_own(tmp_path):
    onnx.save(SQUARE, tmp_path / "m.onnx")
    (tmp_path / "mine.py").write_text(
        "import os\nclass Dying:\n    def prepare(self, model, device):\n        os.abort()\n"
        "class Hanging:\n    def prepare(self, model, device):\n        while True: pass\n"
        "Dying, Hanging = Dying(), Hanging()\n"
    )
    path = ["import os", f"os.chdir({str(tmp_path)!r})"]
    done = _command("\n".join(path), "run", "m.onnx", "--backend=mine:Dying")
    assert done.returncode == 2
    assert "Aborted. The code of 'mine:Dying' may have ended it. Or a file that it read is malformed" in done.stderr
    done = _command("\n".join(path), "check", "m.onnx", "--backend", "mine:Hanging", "--max-seconds", "8")
    assert done.returncode == 2
    assert "on mine:Hanging, out of time" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["check", "m.onnx", "--backend", "numpy,mine:Class"], ["mine:Class"]),
        (["compare", "m:x", "--a", "refgrad:ort@ort-cpu:float16", "--b=my.b:f@my.rt:Class:float64"], ["my.b:f", "my.rt:Class"]),
        (["compare", "--a", "onnxruntime:raw@numpy:float64", "--b", "gradients.npz"], []),
    ],
)  # fmt: skip
def test_code_of_ones_own_in_a_command_line(arguments, names):
    assert own_code.of_arguments(arguments) == names


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a command has no process of its own")
def test_the_process_of_a_command_ends_with_it(tmp_path):
    program = (
        "import os, time\n"
        "def run(*a, **k): print(os.getpid(), flush=True); time.sleep(60)\n"
        "cli._carry_out = run; sys.argv = ['refgrad']; cli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; from refgrad import cli\n{program}"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, process.stdout:
        child = int(process.stdout.readline())
        assert child != process.pid
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == ""  # the copy is gone: nobody holds the pipe any more


def _called(command: Command, folder: Path, *more: str) -> list[str]:
    """The command line of `command` on a model in `folder`, with what it writes in there."""
    given = dict.fromkeys(command.of_role(Files.MODEL), folder / "m.onnx")
    given |= dict.fromkeys(command.of_role(Files.WRITTEN_MODEL), folder / "out.onnx")
    return command.words(given, more)


@pytest.mark.parametrize("command", [c for c in commands() if c.of_role(Files.MODEL)], ids=str)
def test_every_command_that_reads_a_model_takes_limits(command: Command, tmp_path, capsys):
    onnx.save(SQUARE, tmp_path / "m.onnx")
    for words, said in (
        (("--max-memory", "20"), " bytes, and --max-memory is 20"),
        (("--max-memory", "much"), "--max-memory 'much' is not a size"),
        (("--max-seconds", "0"), "--max-seconds must be a number of seconds above 0, not 0"),
        (("--max-seconds", "nan"), "--max-seconds must be a number of seconds above 0, not nan"),
        (("--max-seconds", "0.000001"), "This did not finish within --max-seconds 1e-06"),
    ):
        assert cli.main(_called(command, tmp_path, *words)) == 2
        assert said in capsys.readouterr().err
        assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_a_report_of_results_that_name_a_model_takes_limits(tmp_path, capsys):
    onnx.save(_model("m (float[40000, 30000] x) => (float[40000, 30000] y) { y = Neg(x) }"), tmp_path / "m.onnx")
    model = tmp_path / "m.onnx"
    named = {"sources": [str(model)], "seed": 0, "contents": {str(model): fingerprint(model)}}
    Results(named, {}, {}).save(tmp_path / "r.json")
    words = ["conformance", "report", str(tmp_path / "r.json"), "-o", str(tmp_path / "page.html")]
    assert cli.main([*words, "--max-memory", "50M"]) == 2
    assert "drawn at random, and --max-memory is 52428800" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


FOREVER = """m (float x) => (float y) { n = Constant<value_int=4611686018427387904>() c = Constant<value=bool{1}>()
    y = Loop<body = b (int64 i, bool d, float s) => (bool e, float t) { e = Identity(d) t = Add(s, x) }>(n, c, x) }"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a command has no process of its own")
@pytest.mark.parametrize(
    "program", ["", "import time; from refgrad.cli import containment, running; containment._GRACE = 0.1\n"]
)
def test_a_loop_without_end_ends(tmp_path, program):
    if program:  # native code, which looks at no signal
        program += (
            "def run_check(*_, **__): signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(60)\n"
            "import signal; running.run_check = run_check"
        )
    onnx.save(_model(FOREVER), tmp_path / "m.onnx")
    done = _command(program, "check" if program else "run", str(tmp_path / "m.onnx"), "--max-seconds", "1")
    assert done.returncode == 2
    assert "refgrad: This did not finish within --max-seconds 1. Give it more time" in done.stderr
    less = "small random inputs (--dim 1), some gradients (--wrt NAMES) or a part of the model."
    assert ("such as " + (less if program else "small random inputs (--dim 1) or a part of the model.")) in done.stderr
    assert done.stderr.count("\n") == 1


def test_external_data_is_measured_before_it_is_read(tmp_path):
    weights = numpy_helper.from_array(np.zeros(1 << 16, np.float32), "w")
    model = _model("m (float[N] x) => (float[N] y) { y = Mul(x, w) }")
    for name in ("w", "v", "u"):  # the same bytes, three times
        model.graph.initializer.add().CopyFrom(weights)
        model.graph.initializer[-1].name = name
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[1].value = "0"
    onnx.save(model, path)
    with pytest.raises(
        InvalidModelError, match=r"With tensor 'u' the external data .* takes 786432 bytes, and max_memory is 70000"
    ):
        get_backend("numpy").prepare(path, max_memory=700000)
    assert get_backend("numpy").prepare(path, max_memory=800000)


# --- feeds ---


def _inputs(text: str) -> tuple:
    return graph_inputs(_model(text).graph)


def test_random_feeds_are_measured_before_they_are_drawn():
    inputs = _inputs("m (float[40000, 30000] x) => (float[40000, 30000] y) { y = Neg(x) }")
    with pytest.raises(FeedError, match="14400000000 bytes, drawn at random, and max_memory is 1048576"):
        random_feeds(inputs, max_memory=MIB)
    assert random_feeds(_inputs("m (float[N] x) => (float[N] y) { y = Neg(x) }"), max_memory=MIB)["x"].size == 4


def test_feeds_are_measured_before_they_are_unpacked(tmp_path):
    inputs = _inputs("m (float[N] x) => (float[N] y) { y = Neg(x) }")
    file = tmp_path / "feeds.npz"
    np.savez_compressed(file, x=np.zeros(1 << 22, np.float32))
    assert file.stat().st_size < MIB
    with pytest.raises(FeedError, match=r"holds 1677\d+ bytes or more when it is unpacked, and max_memory is 1048576"):
        read_feeds(file, inputs, MIB)
    assert read_feeds(file, inputs, 32 * MIB)["x"].size == 1 << 22
    with zipfile.ZipFile(file, "w") as archive, archive.open("x.npy", "w") as entry:  # a header that lies
        np.lib.format.write_array_header_1_0(entry, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    with pytest.raises(FeedError, match=f"holds {1 << 42} bytes or more"):
        read_feeds(file, inputs, MIB)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a command has no process of its own")
def test_what_is_not_counted_meets_the_limit_of_the_process(tmp_path):
    body = "a = Constant<value_ints=[30000, 30000]>() e = ConstantOfShape(a) y = ReduceMax<keepdims=0>(e)"
    onnx.save(_model(f"m (float[1] x) => (float y) {{ {body} }}"), tmp_path / "m.onnx")
    blind = "from refgrad.backends.numpy.memory import Watch; Watch.reserve = Watch.replace = lambda *_: None"
    done = _command(blind, "run", str(tmp_path / "m.onnx"), "--max-memory", "50M")
    assert done.returncode == 2
    assert "Unable to allocate 3.35 GiB" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process says its last words to a file")
def test_commands_and_workers_need_no_folder_for_temporary_files() -> None:
    program = "import tempfile; tempfile.tempdir = '/nowhere/at/all'"
    worker = "from refgrad.worker import Worker\nwith Worker() as worker: print(worker._started()[1].seekable())"
    command = "from refgrad.cli import main; import sys; sys.argv[1:] = ['--version']; main()"
    for rest in (worker, command):
        done = subprocess.run([sys.executable, "-c", f"{program}\n{rest}"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there commands have no process of their own")
def test_an_interruption_of_the_command_alone_reaches_it(tmp_path):
    """Not from the terminal, which tells both processes."""
    onnx.save(
        _model(
            "m (float[2] x, int64 n, bool c) => (float[2] y) { y = Loop(n, c, x) <body = b (int64 i, bool d, float[2] v) => "
            "(bool e, float[2] w) { e = Identity(d) w = Tanh(v) }> }"
        ),
        tmp_path / "m.onnx",
    )
    np.savez(tmp_path / "f.npz", x=np.zeros(2, np.float32), n=np.array(2**40), c=np.array(True))
    words = [sys.executable, "-m", "refgrad", "run", str(tmp_path / "m.onnx"), "--feeds", str(tmp_path / "f.npz")]
    reset = "import signal, os, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", reset, *words], stderr=subprocess.PIPE, text=True)
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in said


def test_what_cannot_be_handed_to_another_process_is_said():
    model = _model("m (float[2] x) => (float[2] y) { y = Tanh(x) }")
    with pytest.raises(OptionError, match="has to be pickled"):
        refgrad.gradient(model, (name for name in ["x"]), max_seconds=20)
    for limit in ({"max_memory": True}, {"max_seconds": True}):
        with pytest.raises(OptionError, match=r"True is not a number"):
            refgrad.gradient(model, **limit)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a command has no process of its own")
def test_a_command_whose_time_is_over_may_write_what_it_has(tmp_path):
    onnx.save(SQUARE, tmp_path / "m.onnx")
    np.savez(tmp_path / "r.npz", x=np.float32([1, 2]), x_grad=np.float32([1, 9]))
    program = (
        "import time; from refgrad.cli import containment; from refgrad.conformance.reports import comparisons\n"
        "from refgrad.conformance.locating import work; containment._GRACE = 0.1\n"
        "def search(self): self._progress = None; time.sleep(60)\n"
        "def text_of(comparison): time.sleep(1); return text(comparison)\n"
        "text, comparisons.text_of, work.Work.search = comparisons.text_of, text_of, search"
    )
    sides = ["--a", "refgrad@numpy", "--b", str(tmp_path / "r.npz")]
    report = tmp_path / "o.json"
    done = _command(program, "compare", str(tmp_path / "m.onnx"), *sides, "-o", str(report), "--max-seconds", "10")
    assert (done.returncode, done.stderr) == (1, "")
    assert '"stopped": "out of time"' in report.read_text()


def test_an_interrupted_call_is_not_the_answer_to_the_next():
    with Worker() as worker:
        assert worker.call(os.getpid) != os.getpid()
        before = signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            with pytest.raises(KeyboardInterrupt):
                worker.call(time.sleep, 2)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert worker.call(len, "abc") == 3


def _stop(number, frame):
    raise KeyboardInterrupt
