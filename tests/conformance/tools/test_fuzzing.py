"""Malformed models, as a fuzzer makes them: a RefgradError or a valid result, and no name reaches the terminal as it is."""

import ast
import itertools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import onnx
import onnx.parser
import pytest
from commands import commands as every_command

from refgrad.cli import main
from refgrad.cli.output import Files, say, say_lines
from refgrad.conformance.tools.fuzzing import bases, commands, reader
from refgrad.conformance.tools.fuzzing.campaign import MEMORY, SECONDS, campaign
from refgrad.conformance.tools.fuzzing.journey import STEPS, Clock, Journey, JourneyFault, journey
from refgrad.conformance.tools.fuzzing.mutations import MUTATIONS, SPOILINGS, mutant
from refgrad.errors import InvalidModelError
from refgrad.model.checks.malformed import explained
from refgrad.worker import Worker

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
FOUND = sorted(
    (ROOT / "tests" / "data" / "fuzzing").iterdir()
)  # files that raised, took too long or too much, or ended it
NAMES = ("\x1b]0;title\x07", "a\0b", "a\u202eb", "a\nb", "a\rb", "\x9b31m", "<b>&\"'")
UNPRINTABLE = ("\x1b", "\0", "\u202e", "\r", "\x9b", "\x07")


def small() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> small (float[2, 3] input) => (float[2, 3] result) '
        "{ middle = Softmax <axis = 1> (input) result = Mul(middle, input) }"
    )


def not_utf8(what: bytes) -> bytes:
    return small().SerializeToString().replace(what, b"\xff" * len(what))


def of_reference() -> bytes:
    model = small()
    model.graph.node[0].attribute[0].ref_attr_name = "axis"
    return model.SerializeToString()


def of_sparse(dims: list[int], index: int) -> bytes:
    model = small()
    values = onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, [1], [1.0])
    indices = onnx.helper.make_tensor("i", onnx.TensorProto.INT64, [1], [index])
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, dims))
    return model.SerializeToString()


def of_element_type() -> bytes:
    model = small()
    model.graph.input[0].type.tensor_type.elem_type = -1
    return model.SerializeToString()


PAST = {
    **{
        f"{what.decode()} is not UTF-8": not_utf8(what)
        for what in (b"input", b"middle", b"result", b"Softmax", b"axis")
    },
    "a reference attribute outside of functions": of_reference(),
    "a sparse index outside": of_sparse([3], 2**31),
    "a sparse tensor of 8 GiB": of_sparse([2**31], 0),
    "sparse dims that overflow": of_sparse([2**62, 2], 0),
    "an element type below 0": of_element_type(),
}


@pytest.mark.parametrize("name", PAST)
def test_what_once_raised_is_refused(name):
    assert journey(PAST[name]).faults == ()


def test_a_text_that_is_not_utf8_is_named():
    model = onnx.ModelProto.FromString(not_utf8(b"middle"))
    with pytest.raises(InvalidModelError, match="not UTF-8"):
        STEPS["gradient"](model)


def with_weights(**fields) -> onnx.ModelProto:
    """A model whose weights are so many that onnx does not see them."""
    model = small()
    model.graph.node[1].input[0] = "w"
    model.graph.output[0].type.tensor_type.shape.dim.insert(0, onnx.TensorShapeProto.Dimension(dim_value=40))
    weights = model.graph.initializer.add(name="w", data_type=1, dims=[40, 2, 3], raw_data=bytes(960))
    for name, value in fields.items():
        weights.ClearField(name)
        if isinstance(value, list):
            getattr(weights, name).extend(value)
        elif value is not None:
            setattr(weights, name, value)
    return model


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"raw_data": bytes(959)}, "data of another size"),
        ({"raw_data": None}, "no data"),
        ({"dims": [2**31, 2, 3]}, "less data than that"),
        ({"raw_data": None, "float_data": [1.0] * 239}, "data of another size"),
        ({"float_data": [1.0] * 240}, "data in more than one field"),
        ({"raw_data": None, "float_data": [1.0] * 240, "data_type": 10}, "data in float_data, and not in int32_data"),
        ({"data_type": 8}, "no strings"),
        ({"data_type": 99}, "type 99"),
        ({"dims": [400, -2, -3]}, "a size below 0"),
        ({"data_location": 1}, "not the name of a file|data in the model as well as in a file"),
    ],
)
def test_weights_that_do_not_fit_are_refused(fields, what):
    assert journey(with_weights().SerializeToString()).differentiated
    with pytest.raises(InvalidModelError, match=what):
        STEPS["gradient"](with_weights(**fields))


def test_a_long_name_is_not_repeated():
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> m (float[4, 2, 3] x, float[1, 8, 3] w, float[1, 8, 2] r)
        => (float[4, 1, 2, 2] y) { y = LSTM<hidden_size = 2>(x, w, r) }"""
    )
    model.graph.node[0].name = "n" * 100_000
    short = {name: STEPS[name](model).ByteSize() for name in ("gradient", "jvp", "hvp")}
    assert short["gradient"] < 500_000
    assert max(short.values()) < 3_000_000


def test_functions_are_checked_whatever_the_version_of_the_file():
    model = onnx.parser.parse_model(
        """<ir_version: 7, opset_import: ["": 16, "d": 1]> m (float[2] x) => (float[2] y) { y = d.f(x) }
        <domain: "d", opset_import: ["": 16]> f (a) => (b) { b = Add(a, nowhere) }"""
    )
    with pytest.raises(InvalidModelError, match="nowhere"):
        STEPS["gradient"](model)


def test_a_bug_of_refgrad_stays_one():
    @explained
    def broken(model):
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        broken(small())


def test_a_mutant_depends_on_its_seed_alone():
    base = small().SerializeToString()
    made = [mutant(seed, base) for seed in range(100)]
    assert made == [mutant(seed, base) for seed in range(100)]
    assert len(set(made)) > 50


@pytest.mark.parametrize("seed", range(40))
def test_mutants_of_a_small_model(seed):
    assert journey(mutant(seed, small().SerializeToString())).faults == ()


@pytest.fixture(scope="module")
def travel():
    """The faults of a model in a process with limits: what it once did would end this one."""
    with Worker(SECONDS, room=4 * MEMORY) as worker:
        yield lambda written: worker.call(journey, written)


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_what_fuzzing_found_stays_mended(file, travel):
    done = travel(file.read_bytes())
    assert done.faults == ()
    assert done.peak < MEMORY


def test_what_fuzzing_found_is_refused_by_commands_too():
    if not sys.platform.startswith("linux"):
        pytest.skip("commands are typed in copies of a process, which Linux alone makes")
    with Worker(60.0) as worker:
        for file, words in zip(FOUND, itertools.cycle(commands.COMMANDS[:8])):
            assert worker.call(commands.typed, file.read_bytes(), (words,)).faults == ()


@pytest.mark.parametrize("name", bases.written())
def test_a_written_base_has_a_gradient(name):
    done = journey(bases.written()[name].SerializeToString())
    assert done.differentiated
    assert done.faults == ()


def test_exported_bases_have_a_gradient():
    files = sorted(Path(bases.__file__).with_name("exported").glob("*.onnx"))
    assert len(files) == 7
    assert sum(file.stat().st_size for file in files) < 200_000
    for file in files:
        assert journey(file.read_bytes(), ("gradient",)).differentiated


@pytest.mark.parametrize("change", dict.fromkeys(MUTATIONS), ids=lambda change: change.__name__)
def test_a_mutation_changes_models(change):
    changed = 0
    for seed, (_, base) in zip(range(100), itertools.cycle(small_bases()), strict=False):
        model = onnx.ModelProto.FromString(base)
        change(random.Random(seed), model)
        changed += model.SerializePartialToString() != base
    assert changed


def small_bases() -> list[tuple[str, bytes]]:
    return [("small", small().SerializeToString()), *((n, m.SerializeToString()) for n, m in bases.written().items())]


@pytest.mark.parametrize("change", dict.fromkeys(SPOILINGS), ids=lambda change: change.__name__)
def test_a_file_is_spoilt(change):
    written = small().SerializeToString()
    assert any(change(random.Random(seed), small(), written) != written for seed in range(20))


def wait(written: bytes, steps: tuple[str, ...]) -> Journey:
    time.sleep(60)
    return Journey()


def report(written: bytes, steps: tuple[str, ...]) -> Journey:
    faults = (JourneyFault("gradient", "KeyError", "a.py f", ""),) if written == b"b" else ()
    return Journey(True, faults, 0.5, "gradient", 7 << 20, "jvp")


def die(written: bytes, steps: tuple[str, ...]) -> Journey:
    if "jvp" in steps:
        os._exit(3)
    return Journey()


def test_a_campaign_keeps_its_time():
    start = time.monotonic()
    tally = campaign(((f"m{k}", b"", ("gradient",)) for k in itertools.count()), wait, seconds=1.5, jobs=2)
    assert time.monotonic() - start < 8
    assert tally.mutants == 0
    assert not tally.classes


def test_a_campaign_reports_faults_time_and_memory():
    tally = campaign([(name, name.encode(), ("gradient",)) for name in "abc"], report, seconds=60)
    assert (tally.mutants, tally.differentiated) == (3, 3)
    lines = list(tally.lines())
    assert lines[1] == "the longest took 0.50 s: gradient of c"
    assert lines[2].startswith("the largest took 7 MiB")
    assert [line.split() for line in lines[3:]] == [["1", "KeyError", "a.py", "f", "[gradient]", "b:"]]


def test_a_campaign_names_the_step_that_ends_the_process():
    tally = campaign([("m", b"", ("gradient", "jvp"))], die, seconds=60)
    assert [(one.fault.step, one.fault.kind) for one in tally.classes.values()] == [("jvp", "crashed")]


def test_a_campaign_reports_where_it_is_interrupted():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    try:
        threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
        tally = campaign(((f"m{k}", b"", ("gradient",)) for k in itertools.count()), report, seconds=60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert 0.5 < tally.seconds < 10
    assert not tally.classes


def test_a_clock_tells_the_largest_step():
    clock = Clock()
    if not clock.is_exact:
        pytest.skip("this system does not tell how large a process was")
    clock.lap("before")
    held = bytearray(100 << 20)
    clock.lap("large")
    del held
    assert clock.largest == "large"
    assert clock.peak > 100 << 20


def test_a_corpus_covers_much_with_little():
    plain, other = small().SerializeToString(), bases.written()["functions"].SerializeToString()
    longer = small()
    longer.doc_string = "d" * 1000
    assert list(reader.smallest([longer.SerializeToString(), plain, other, plain])) == [plain, other]
    assert list(reader.smallest([plain, other], room=len(plain))) == [plain]


def test_the_corpus_is_small():
    files = list(Path(reader.__file__).with_name("corpus").iterdir())
    assert len(files) > 100
    assert sum(file.stat().st_size for file in files) < 200_000


def test_without_atheris_nothing_is_fuzzed(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "atheris", None)
    monkeypatch.setattr(sys, "argv", ["reader", "--found", str(tmp_path)])
    assert reader.main() == 0
    assert "pip install atheris" in capsys.readouterr().out


def test_every_command_that_reads_a_model_is_typed():
    before = {words.partition(" m.onnx")[0] for words in commands.COMMANDS}
    typed = {words.removesuffix(" --source").removesuffix(" os:getcwd --model") for words in before}
    assert typed == {one.name for one in every_command() if one.of_role(Files.MODEL)}
    assert {words for turn in commands.TURNS for words in turn} == set(commands.COMMANDS)


COMMANDS = (
    ("grad", "MODEL", "-o", "OUT"),
    ("grad", "MODEL", "-o", "OUT", "--json"),
    ("grad", "MODEL", "-o", "OUT", "--wrt", "\x1b[31m\u202e"),
    ("lower", "MODEL", "-o", "OUT"),
    ("expand", "MODEL", "-o", "OUT"),
    ("jvp", "MODEL", "-o", "OUT"),
    ("hvp", "MODEL", "-o", "OUT"),
    ("preflight", "MODEL"),
    ("preflight", "MODEL", "--json"),
    ("show", "MODEL"),
    ("show", "MODEL", "--dot"),
    ("run", "MODEL", "--random"),
    ("check", "MODEL"),
    ("explain", "\x1b]0;\u202e"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(map(ascii, words)))
def test_no_command_prints_a_control_character(words, tmp_path, capsys):
    model = small()
    nodes = [model.graph.input[0], model.graph.output[0], *model.graph.node]
    names = dict(zip(("input", "result", "middle"), NAMES, strict=False))
    for value in nodes:
        value.name = names.get(value.name, NAMES[5])
    for node in model.graph.node:
        for part in (node.input, node.output):
            part[:] = [names.get(name, name) for name in part]
    onnx.save(model, tmp_path / "m.onnx")
    files = {"MODEL": str(tmp_path / "m.onnx"), "OUT": str(tmp_path / "out.onnx")}
    main([files.get(word, word) for word in words])
    printed = capsys.readouterr()
    for letter in UNPRINTABLE:
        assert letter not in printed.out + printed.err


def test_a_line_keeps_its_breaks_and_nothing_else_that_a_terminal_obeys(capsys):
    say("a\n  b", "\x1b[2J\u202e")
    assert capsys.readouterr().out == "a\ufffd  b \ufffd[2J\ufffd\n"
    say_lines("a\n  b\x1b[2J\u202e")
    assert capsys.readouterr().out == "a\n  b\ufffd[2J\ufffd\n"


def test_commands_print_in_one_place():
    found = {
        file.name
        for file in (ROOT / "refgrad" / "cli").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    }
    assert found == {"output.py"}


def test_recipes_and_checks_say_what_is_wrong_with_a_model(tmp_path, capsys):
    (tmp_path / "m.onnx").write_bytes(of_reference())
    for command in ("recipe forces MODEL -o OUT", "check MODEL", "conformance cases --source MODEL --show"):
        words = command.replace("MODEL", str(tmp_path / "m.onnx")).replace("OUT", str(tmp_path / "out.onnx")).split()
        main(words)
        assert "unexpected" not in capsys.readouterr().err


def test_nothing_is_written_where_its_names_cannot_be_printed(tmp_path, capsys):
    (tmp_path / "m.onnx").write_bytes(not_utf8(b"result"))
    assert main(["expand", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "out.onnx")]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "out.onnx").exists()
