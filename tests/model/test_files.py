"""Files that are damaged or contradict themselves. Each is read, or refused with its name, by one reader that never waits."""

import ast
import json
import os
import socket
import struct
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import typer
from commands import commands

from refgrad import cli
from refgrad.cli.output import Files
from refgrad.conformance.tools.fuzzing.files.campaign import taken
from refgrad.conformance.tools.fuzzing.files.readers import READERS, place
from refgrad.errors import FeedError, InvalidModelError, OutputFileError, ResultsError
from refgrad.protos.arrays import mapped_array, read_arrays
from refgrad.protos.documents import parse_json, record_of
from refgrad.protos.inputs import open_regular, read_text
from refgrad.protos.memory import at_most
from refgrad.protos.safetensors import read_safetensors
from refgrad.training import SGD, Run, Training, lora, open_data, step_model
from refgrad.training.adapters import adapters_of
from refgrad.training.checkpoints import load_checkpoint
from refgrad.training.data import ahead
from refgrad.training.schedules import Progress

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LINE = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    "<float[2, 1] a = {0.5, 1}> { y = MatMul(x, a) }"
)
NET = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 21]> net (float[N, M, 2] x) => (float[N, M, 3] z) '
    "<float[2, 3] w = {1, 2, 3, 4, 5, 6}> { z = MatMul(x, w) }"
)


def npy(header: str, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    text = header.encode("latin1")
    packed = struct.pack("<H" if version == b"\1\0" else "<I", len(text))
    return b"\x93NUMPY" + version + packed + text + data


def described(shape: str = "(2,)", descr: str = "'<f4'", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


ARRAYS = {
    "a shape of 2^70": (npy(described(f"({2**70},)")), "which no array has"),
    "a shape of 2^62 beside 0": (npy(described(f"(0, {2**62}, 8)")), "which no array has"),
    "a size below 0": (npy(described("(-3, -2)"), bytes(24)), "at least 0"),
    "a size that is a boolean": (npy(described("(True, 2)"), bytes(8)), "at least 0"),
    "a size that is a float": (npy(described("(2.0,)"), bytes(8)), "at least 0"),
    "a shape that is a list": (npy(described("[2]"), bytes(8)), "at least 0"),
    "objects": (npy(described(descr="'|O'"), bytes(16)), "never unpickled"),
    "fields": (npy(described(descr="[('a', '<f4')]"), bytes(8)), "several fields"),
    "dates": (npy(described(descr="'<M8[ns]'"), bytes(16)), "no type of numbers"),
    "a type that does not exist": (npy(described(descr="'<f3'"), bytes(6)), "does not exist"),
    "an order that is a number": (npy(described(order="1"), bytes(8)), "True or False"),
    "a header cut off": (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (64,2"), "header cannot be read"),
    "a header nested deeply": (npy(described("(" * 300 + ")" * 300)), "header cannot be read"),
    "a header of minus signs": (npy(described("-" * 9000 + "1")), "header cannot be read"),
    "a header that calls": (npy("__import__('os').abort()"), "header cannot be read"),
    "a header that is a list": (npy("[1, 2]"), "does not say type"),
    "a key too many": (npy(described().replace("}", "'x': 1}")), "does not say type"),
    "a version of the future": (npy(described(), bytes(8), b"\x09\0"), "version 9.0"),
    "fewer numbers": (npy(described("(64, 2)"), bytes(8)), "bytes"),
    "more numbers": (npy(described(), bytes(12)), "bytes"),
    "booleans of 2": (npy(described(descr="'|b1'"), b"\1\2"), "neither true nor false"),
    "characters beyond Unicode": (npy(described(descr="'<U1'"), b"\xff" * 8), "characters"),
    "halves of characters": (npy(described(descr="'<U1'"), struct.pack("<2I", 0xD800, 65)), "characters"),
    "nothing": (b"", "does not begin"),
    "text": (b"hello, world", "does not begin"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_is_none(name: str, tmp_path: Path) -> None:
    content, said = ARRAYS[name]
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(FeedError, match=said) as caught:
        mapped_array(tmp_path / "x.npy")
    assert "x.npy" in str(caught.value)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", content)
    for limit in (None, 1 << 20):
        with pytest.raises(FeedError, match=r"x\.npz") as caught:
            read_arrays(tmp_path / "x.npz", "Feeds", limit)
        assert said in str(caught.value) or limit


def flags(made: bytearray, flag: int) -> None:
    made[6] |= flag
    made[made.find(b"PK\1\2") + 8] |= flag


def directory(made: bytearray, offset: int, value: bytes) -> None:
    start = made.find(b"PK\1\2") + offset
    made[start : start + len(value)] = value


LIES = {
    "encrypted": lambda made: flags(made, 1),
    "encrypted, says the directory": lambda made: directory(made, 8, b"\1"),
    "strongly encrypted": lambda made: flags(made, 0x40),
    "patched": lambda made: flags(made, 0x20),
    "another method": lambda made: directory(made, 10, b"\x63"),
    "stored, says the directory": lambda made: directory(made, 10, b"\0"),
    "another checksum": lambda made: directory(made, 16, b"\0\0\0\0"),
    "shorter": lambda made: directory(made, 24, b"\x81\0\0\0"),
    "of 2 GB": lambda made: directory(made, 24, b"\0\0\0\x7f"),
    "another place": lambda made: directory(made, 42, b"\x10\0\0\0"),
    "beyond the file": lambda made: directory(made, 42, b"\xff\xff\xff\x7f"),
    "flipped bits": lambda made: made.__setitem__(slice(90, 120), bytes(b ^ 255 for b in made[90:120])),
    "cut off": lambda made: made.__delitem__(slice(len(made) // 2, None)),
    "another name": lambda made: made.__setitem__(30, ord("y")),
}


@pytest.mark.parametrize("name", LIES)
def test_an_archive_that_lies(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).standard_normal(400))
    made = bytearray(path.read_bytes())
    LIES[name](made)
    path.write_bytes(made)
    for limit in (None, 1 << 20):
        with pytest.raises(FeedError, match=r"x\.npz"):
            read_arrays(path, "Feeds", limit)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_that_are_there_twice_or_are_no_arrays(tmp_path: Path) -> None:
    path, array = tmp_path / "x.npz", npy(described(), bytes(8))
    for names, said in (
        (("x.npy", "x.npy"), "twice"),
        (("x.npy", "x"), "is no array"),
        (("readme.txt",), "is no array"),
        (("../../x.npy", "/etc/x.npy", ".npy"), ""),
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, array)
        if said:
            with pytest.raises(FeedError, match=said):
                read_arrays(path, "Feeds")
        else:  # a name is only a name
            assert list(read_arrays(path, "Feeds")) == ["../../x", "/etc/x", ""]
    assert [one.name for one in tmp_path.iterdir()] == ["x.npz"]


def test_an_archive_that_unpacks_to_more_than_it_may(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", **{f"x{k}": np.zeros(1 << 20) for k in range(4)})
    with at_most(20 << 20), pytest.raises(FeedError, match="max_memory is 20971520"):
        read_arrays(tmp_path / "x.npz", "Feeds")
    with at_most(40 << 20):
        assert len(read_arrays(tmp_path / "x.npz", "Feeds")) == 4


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    arrays = {
        "numbers": np.arange(6.0).reshape(2, 3),
        "by columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "big-endian": np.arange(3, dtype=">f4"),
        "booleans": np.array([True, False]),
        "texts": np.array(["ä", "bc"]),
        "a scalar": np.array(3),
        "none": np.zeros((0, 3)),
        "/a/../name": np.ones(2, np.float16),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **arrays)
        found = read_arrays(tmp_path / "x.npz", "Feeds")
        assert list(found) == list(arrays)
        for name, array in found.items():
            np.testing.assert_array_equal(array, arrays[name])
            assert array.dtype.isnative
            assert array.flags.writeable
    for name, array in arrays.items():
        np.save(tmp_path / "x.npy", array)
        np.testing.assert_array_equal(mapped_array(tmp_path / "x.npy"), arrays[name])


DOCUMENTS = {
    b'{"a": 1, "a": 2}': "twice",
    b'{"a": NaN}': "no number of JSON",
    b'{"a": -Infinity}': "no number of JSON",
    b'{"a": 1e400}': "larger than any number",
    b'{"a": ' + b"9" * 5000 + b"}": "5000 digits",
    b'{"a": "\\ud800"}': "half a character",
    b"[" * 100000 + b"]" * 100000: "nested too deeply",
    b'\xef\xbb\xbf{"a": 1}': "BOM",
    b'{"a": "\xff"}': "utf-8",
    '{"a": 1}'.encode("utf-16"): "utf-8",
    b"": "Expecting value",
    b"{": "Expecting",
}


@pytest.mark.parametrize("text", DOCUMENTS, ids=lambda text: repr(text[:12]))
def test_json_that_is_none(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=DOCUMENTS[text]):
        parse_json(text)
    path = tmp_path / "r.json"
    path.write_bytes(text)
    from refgrad.conformance.judge.running.results import load

    with pytest.raises(ResultsError, match=r"r\.json"):
        load(path)


def test_a_record_has_the_types_of_its_fields() -> None:
    assert record_of(Progress, {"epoch": 1, "losses": [1, 0.5]}) == Progress(epoch=1, losses=(1.0, 0.5))
    for wrong, said in (
        ({"epoch": "1"}, "whole number"),
        ({"epoch": True}, "whole number"),
        ({"epoch": 1.0}, "whole number"),
        ({"epoch": None}, "whole number"),
        ({"losses": ["1"]}, r"losses\[0\]"),
        ({"losses": 3}, "a list"),
        ({"total": "x"}, "a number"),
        ({"nothing": 1}, "not known"),
        ([], "an object"),
    ):
        with pytest.raises(ValueError, match=said):
            record_of(Progress, wrong)


def test_what_safetensors_reads_is_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    import safetensors.numpy

    path = tmp_path / "x.safetensors"
    tensors = {"w": np.float32([[1, 2]]), "none": np.zeros((0, 3)), "b": np.array([True]), "s": np.array(3)}
    safetensors.numpy.save_file(tensors, path, {"k": "v"})
    found, metadata = read_safetensors(path, FeedError, "is wrong", "")
    assert metadata == {"k": "v"}
    assert found.keys() == tensors.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, tensors[name], strict=True)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]

    def written(change) -> None:
        made = json.loads(json.dumps(header))
        change(made)
        text = json.dumps(made).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)

    for change in (
        lambda made: made["w"].update(shape=[-1, -2]),
        lambda made: made["w"].update(shape=[2**62, 4]),
        lambda made: made["w"].update(shape=[True, 2]),
        lambda made: made["w"].update(dtype="F99"),
        lambda made: made["w"].update(dtype=3),
        lambda made: made["w"].update(data_offsets=[0, 2**62]),
        lambda made: made["w"].update(data_offsets=[8, 0]),
        lambda made: made["w"].update(data_offsets=[]),
        lambda made: made.update(again=made["w"]),
        lambda made: made.pop("w"),
        lambda made: made.update(__metadata__={"k": 1}),
        lambda made: made.update(w=[]),
    ):
        written(change)
        with pytest.raises(FeedError, match=r"x\.safetensors.* is wrong"):
            read_safetensors(path, FeedError, "is wrong", "")
    for torn in (b"", content[:7], content[:-1], content + b"\0", b"\xff" * 64, content[:8] + b"[" * length + data):
        path.write_bytes(torn)
        with pytest.raises(FeedError, match=r"x\.safetensors.* is wrong"):
            read_safetensors(path, FeedError, "is wrong", "")


@pytest.mark.parametrize("name", READERS)
def test_every_reader_reads_or_refuses_by_name(name: str, tmp_path: Path) -> None:
    """`python -m refgrad.conformance.tools.fuzzing --files` does this with thousands."""
    reader = READERS[name]
    if reader.kind == "safetensors":
        pytest.importorskip("safetensors")
    file = place(reader, tmp_path)
    file.write_bytes(reader.whole())
    assert reader.read(file) is not None
    for seed in range(12):
        outcome, why, _ = taken(reader, seed)
        assert outcome in ("read", "refused"), (seed, why)


# Files that have no end


SPECIAL = ("a FIFO", "a socket", "a device", "a folder")


@pytest.fixture
def special(tmp_path: Path):
    """Every kind of file that is not regular, by its name in an error."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no FIFOs")
    os.mkfifo(tmp_path / "fifo.npz")
    here = os.getcwd()
    os.chdir(tmp_path)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket.npz")
        os.chdir(here)
        (tmp_path / "folder.npz").mkdir()
        paths = (tmp_path / "fifo.npz", tmp_path / "socket.npz", Path("/dev/zero"), tmp_path / "folder.npz")
        yield dict(zip(SPECIAL, paths, strict=True))


def test_what_has_no_end_is_refused(special) -> None:
    for what, path in special.items():
        with pytest.raises(FeedError, match=f"is {what}, and no regular file"):
            open_regular(path, FeedError)
        with pytest.raises(ResultsError, match=f"is {what}, and no regular file"):
            read_text(path, ResultsError)
        with pytest.raises(FeedError, match=f"is {what}"):
            read_arrays(path, "Feeds")
    with pytest.raises(FeedError, match="no file can have this name"):
        open_regular("a\0b", FeedError)


@pytest.mark.parametrize("command", [one for one in commands() if one.name != "teach"], ids=str)
@pytest.mark.parametrize("what", ["a FIFO", "a device"])
def test_no_command_waits_for_a_file(command, what, special, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli, "app", typer.main.get_command(cli.app))
    monkeypatch.chdir(tmp_path)
    onnx.save(LINE, "m.onnx")
    for name in command.of_role(Files.READ, Files.MODEL, Files.JOURNAL):
        given = dict.fromkeys(command.of_role(Files.MODEL), Path("m.onnx"))
        given |= {key: Path(f"{key}.json") for key in command.of_role(Files.WRITTEN, Files.WRITTEN_MODEL)}
        given |= {name: special[what]}
        # /dev/zero would be read for ever: that a command ends says that it was not read
        code, said = cli.main(command.words(given)), capsys.readouterr()
        if code == 0:  # a file that this call has no use for
            Path("output.json").unlink(missing_ok=True)
            continue
        assert code == 2, (name, said.err)
        assert "unexpected" not in said.err, (name, said.err)
    assert not {"output.json", "m.onnx.data"} & {one.name for one in tmp_path.iterdir()} or command.name == "lower"


def test_a_fifo_among_the_data(special, tmp_path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    np.savez(data / "a.npz", x=np.ones((4, 2)), label=np.ones((4, 1)))
    os.mkfifo(data / "b.npz")
    with pytest.raises(FeedError, match=r"b\.npz' is a FIFO"):
        open_data(step_model(LINE), data)
    os.mkfifo(tmp_path / "m.onnx")
    with pytest.raises(InvalidModelError, match="no regular file"):
        step_model(tmp_path / "m.onnx")


# Training


def test_shards_of_other_sizes_are_refused_before_training(tmp_path: Path) -> None:
    step = step_model(NET)
    for number, length in enumerate((4, 4, 5)):
        np.savez(tmp_path / f"{number}.npz", x=np.ones((3, length, 2)), label=np.ones((3, length, 3)))
    with pytest.raises(FeedError, match=r"2\.npz': 'x' has the size 5 on axis 1, and 4 in '0\.npz'"):
        open_data(step, tmp_path)
    np.savez(tmp_path / "2.npz", x=np.ones((3, 4, 2)), label=np.ones((3, 4)))
    with pytest.raises(FeedError, match=r"2\.npz': Expected \[N, \?, 3\], got \[3, 4\] for 'label'"):
        open_data(step, tmp_path)
    np.savez(tmp_path / "2.npz", x=np.ones((3, 4, 2)), label=np.ones((2, 4, 3)))
    with pytest.raises(FeedError, match=r"2\.npz': All arrays need the same number of samples"):
        open_data(step, tmp_path)
    np.savez(tmp_path / "2.npz", x=np.ones((3, 4, 2)), label=np.ones((3, 4, 3)))
    data = open_data(step, tmp_path)
    assert sum(len(batch["x"]) for batch in data.batches(2)) == 9
    np.savez(tmp_path / "2.npz", x=np.ones((3, 6, 2)), label=np.ones((3, 6, 3)))
    with pytest.raises(FeedError, match="sizes changed while it was read"):
        list(data.batches(2))


def test_a_checkpoint_among_the_data_is_refused_before_training(tmp_path: Path) -> None:
    step = step_model(LINE)
    data = tmp_path / "data"
    (data / "within").mkdir(parents=True)
    np.savez(data / "0.npz", x=np.ones((4, 2)), label=np.ones((4, 1)))
    link = tmp_path / "link"
    link.symlink_to(data)
    given = open_data(step, data)
    for place_of in (data / "c.npz", data / "within" / "c", link / "c", tmp_path / "x" / ".." / "data" / "c"):
        with pytest.raises(OutputFileError, match="lies in the folder of the data"):
            Run(Training(step), given, checkpoint=place_of)
    with pytest.raises(OutputFileError, match="lies in the folder of the data"):
        Run(Training(step), open_data(step, data / "0.npz"), validation=given, checkpoint=data / "c")
    Run(Training(step), given, checkpoint=tmp_path / "c")


def test_shards_meet_the_limit_of_memory_in_their_thread() -> None:
    from refgrad.protos.memory import allowed

    with at_most(7):
        assert list(ahead(allowed() for _ in range(3))) == [7, 7, 7]


METADATA = {
    "progress": {
        "a step of 2^62": {"step": 2**62},
        "a step of 2^80": {"step": 2**80},
        "epochs below 0": {"epoch": -5, "losses": []},
        "fewer losses than epochs": {"losses": []},
        "losses that are texts": {"losses": ["1", "2"]},
        "losses that are no list": {"losses": "12"},
        "an epoch that began later": {"epoch_step": 2**40},
        "an epoch of no step": {"epoch_step": 0},
        "samples below 0": {"sample": -1},
        "a step that is a number with a point": {"step": 8.0},
        "a step that is true": {"step": True},
        "another key": {"speed": 1},
    },
    "shuffle": {
        "an even increment": {"state": {"state": 1, "inc": 4}},
        "a state of 2^128": {"state": {"state": 2**128, "inc": 1}},
        "another generator": {"bit_generator": "MT19937"},
        "no state": {"state": {}},
        "a half that is 7": {"has_uint32": 7},
    },
}


def test_a_checkpoint_that_says_what_no_training_does(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    import safetensors.numpy

    step, path = step_model(LINE, optimizer=SGD(momentum=0.9)), tmp_path / "c.safetensors"
    data = tmp_path / "d.npz"
    np.savez(data, x=np.ones((8, 2)), label=np.ones((8, 1)))

    def run(**options) -> Run:
        return Run(Training(step, 0.01), open_data(step, data), 3, 2, checkpoint=path, **options)

    Run(Training(step, 0.01), open_data(step, data), 2, 2, checkpoint=path).run()
    with safetensors.safe_open(path, "numpy") as opened:
        known = opened.metadata()
    tensors = safetensors.numpy.load_file(path)

    def refused(metadata: dict[str, str], state=tensors) -> None:
        safetensors.numpy.save_file(state, path, metadata)
        with pytest.raises(FeedError, match=r"c\.safetensors"):
            run(resume=True).run()

    for key, changes in METADATA.items():
        for change in changes.values():
            refused({**known, key: json.dumps(json.loads(known[key]) | change)})
    for key in ("progress", "shuffle", "validation", "settings", "format", "step"):
        refused({name: value for name, value in known.items() if name != key})
        for text in ("", "[" * 100000, "null", '"x"', "-1", "{}", '{"a": 1, "a": 1}', "NaN", "[[]]"):
            if (key, text) != ("validation", "[]"):
                refused({**known, key: text})
    refused(known, {name: np.full_like(value, np.nan) for name, value in tensors.items()})
    # it has done more steps of this epoch than there are batches: right in itself, and of other data
    begun = json.loads(known["progress"]) | {"step": 8 + 10**6}
    refused({**known, "progress": json.dumps(begun)})
    safetensors.numpy.save_file(tensors, path, known)
    assert load_checkpoint(path, step).progress.epoch == 2
    assert len(run(resume=True).run()) == 3


def test_metadata_of_adapters_that_lie() -> None:
    made = lora(LINE, "a", rank=1)
    [entry] = [one for one in made.metadata_props if one.key == "refgrad.adapters"]
    whole = json.loads(entry.value)
    assert len(adapters_of(made)) == 2
    for change in ({"factor": "x"}, {"frozen": []}, {"added": "x"}, {"A": 1}, {"transposed": 0}):
        entry.value = json.dumps({"a": whole["a"] | change})
        assert adapters_of(made) == []  # somebody else's
    entry.value = "[" * 100000
    assert adapters_of(made) == []


# One reader for each format

DOORS = {
    "np.load": (),
    "np.memmap": ("refgrad/protos/arrays.py",),
    "zipfile.is_zipfile": ("refgrad/protos/arrays.py",),
    "json.load": (),
    "json.loads": (
        "refgrad/protos/documents.py",
        "refgrad/tables/runtime_operators.py",  # our own files
        "conformance/tools/exporting/known.py",
        "conformance/tools/exporting/pytest_plugin.py",  # what another process of pytest sent
        "conformance/reports/html.py",  # what we wrote just before
        "refgrad/walks/page.py",
        "conformance/judge/running/journal.py",
    ),
    "tomllib.loads": (
        "conformance/known/records.py",
        "refgrad/tables/plugins.py",
    ),  # the second: its own pyproject.toml
    "pickle.load": ("refgrad/worker.py",),  # between processes of ours
    "safetensors.deserialize": (),
    "safetensors.safe_open": (),
}
APART = (
    "conformance/tools/fuzzing",
    "conformance/tools/exporting/runners",
)  # what damages, and programs without refgrad


def test_each_format_has_one_reader() -> None:
    for top in ("refgrad", "conformance", "backends"):
        for file in (ROOT / top).rglob("*.py"):
            name = file.relative_to(ROOT).as_posix()
            if name.startswith(APART):
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in DOORS:
                    assert name in DOORS[called], f"{name}, line {node.lineno}: {called}"
