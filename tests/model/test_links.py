"""Links to external data: those of the hub's cache and those into named folders are followed, and no other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper, parser

import refgrad
from refgrad import cli, links
from refgrad.backends import available, get_backend
from refgrad.backends.base import load_model
from refgrad.errors import InvalidModelError, OptionError, RefgradError
from refgrad.model import external
from refgrad.model.writing import fingerprint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.interpreter,
    pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there"),
]

WEIGHTS = np.arange(6, dtype=np.float32).reshape(2, 3)
SECRET = b"key=hunter2! key=hunter2"  # as many bytes
FED = {"x": np.ones((1, 2), np.float32)}


def written(path: Path, location: str) -> Path:
    """A model y = x·w at `path`, whose weights lie at `location`."""
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[1, 2] x) => (float[1, 3] y) { y = MatMul(x, w) }'
    )
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    model.graph.initializer.append(tensor)
    path.write_bytes(model.SerializeToString())
    return path


class Cache:
    """A repository in the hub's cache, beside another one and a secret."""

    def __init__(self, at: Path, inner: str = "") -> None:
        self.hub = at / "hub"
        self.repository = self.hub / "models--org--name"
        self.blobs = self.repository / "blobs"
        self.snapshot = self.repository / "snapshots" / "0123abc"
        self.folder = self.snapshot / inner
        self.up = "../" * (2 + bool(inner))
        for folder in (self.blobs, self.folder, self.hub / "models--org--other" / "blobs"):
            folder.mkdir(parents=True)
        self.secret = at / "secret.bin"
        self.secret.write_bytes(SECRET)
        (self.hub / "models--org--other" / "blobs" / "cc").write_bytes(SECRET)
        (self.blobs / "bb").write_bytes(WEIGHTS.tobytes())
        written(self.blobs / "aa", "model.onnx_data")
        self.model = self.folder / "model.onnx"
        self.model.symlink_to(f"{self.up}blobs/aa")
        self.data = self.folder / "model.onnx_data"
        self.data.symlink_to(f"{self.up}blobs/bb")

    def relink(self, target: str | Path) -> None:
        self.data.unlink()
        self.data.symlink_to(target)


@pytest.fixture(params=["", "onnx"], ids=["snapshot", "folder of a snapshot"])
def cache(request, tmp_path) -> Cache:
    return Cache(tmp_path, request.param)


@pytest.fixture(params=[True, False], ids=["by descriptor", "by path"])
def from_folder(request, monkeypatch) -> None:
    monkeypatch.setattr(external, "_FROM_FOLDER", external._FROM_FOLDER and request.param)


def weights_of(model: Path) -> np.ndarray:
    (tensor,) = load_model(model).graph.initializer
    return numpy_helper.to_array(tensor)


@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_a_model_in_the_cache_is_read(cache, absolute, from_folder, capsys):
    if absolute:
        cache.relink(cache.blobs / "bb")
    assert np.array_equal(weights_of(cache.model), WEIGHTS)
    for name in sorted({"numpy", "ort-cpu"} & set(available())):
        assert np.array_equal(get_backend(name).prepare(cache.model).run(FED)["y"], FED["x"] @ WEIGHTS)
    assert refgrad.gradient(cache.model, max_seconds=60) == refgrad.gradient(cache.model)
    assert refgrad.weights(cache.model).trainable
    assert cli.main(["check", str(cache.model)]) == 0, capsys.readouterr()
    assert fingerprint(cache.model)


def test_a_cache_behind_a_link_is_read(cache, tmp_path):
    (tmp_path / "home").symlink_to(cache.hub)
    behind = tmp_path / "home" / cache.model.relative_to(cache.hub)
    assert np.array_equal(weights_of(behind), WEIGHTS)
    cache.relink(tmp_path / "home" / "models--org--name" / "blobs" / "bb")
    assert np.array_equal(weights_of(cache.model), WEIGHTS)


def test_the_data_of_a_cache_may_lie_in_folders(cache):
    (cache.folder / "deep" / "er").mkdir(parents=True)
    (cache.folder / "deep" / "er" / "w").symlink_to(f"../../{cache.up}blobs/bb")
    model = written(cache.folder / "own.onnx", "deep/er/w")
    assert np.array_equal(weights_of(model), WEIGHTS)


def another_repository(cache: Cache) -> None:
    cache.relink(f"{cache.up}../models--org--other/blobs/cc")


def another_repository_absolute(cache: Cache) -> None:
    cache.relink(cache.hub / "models--org--other" / "blobs" / "cc")


def upwards(cache: Cache) -> None:
    cache.relink(f"{cache.up}../../secret.bin")


def far_upwards(cache: Cache) -> None:
    cache.relink("../" * 40 + str(cache.secret).lstrip("/"))


def through_blobs(cache: Cache) -> None:
    cache.relink(f"{cache.up}blobs/../../../secret.bin")


def absolute(cache: Cache) -> None:
    cache.relink(cache.secret)


def absolute_through_blobs(cache: Cache) -> None:
    cache.relink(f"{cache.blobs}/../../../secret.bin")


def chain_from_a_blob(cache: Cache) -> None:
    (cache.blobs / "bb").unlink()
    (cache.blobs / "bb").symlink_to(cache.secret)


def chain_within_blobs(cache: Cache) -> None:
    (cache.blobs / "dd").symlink_to("bb")
    cache.relink(f"{cache.up}blobs/dd")


def chain_within_the_snapshot(cache: Cache) -> None:
    (cache.folder / "other").symlink_to(f"{cache.up}blobs/bb")
    cache.relink("other")


def blobs_are_a_link(cache: Cache) -> None:
    cache.blobs.rename(cache.repository / "real")
    cache.blobs.symlink_to("real")
    cache.model.unlink()
    written(cache.model, "model.onnx_data")


def blobs_are_a_link_out(cache: Cache) -> None:
    blobs_are_a_link(cache)
    cache.blobs.unlink()
    cache.blobs.symlink_to(cache.hub / "models--org--other" / "blobs")
    cache.relink(f"{cache.up}blobs/cc")


def not_in_blobs(cache: Cache) -> None:
    (cache.repository / "refs").mkdir()
    (cache.repository / "refs" / "main").write_bytes(SECRET)
    cache.relink(f"{cache.up}refs/main")


def deep_in_blobs(cache: Cache) -> None:
    (cache.blobs / "in").mkdir()
    (cache.blobs / "in" / "ee").write_bytes(SECRET)
    cache.relink(f"{cache.up}blobs/in/ee")


def the_folder_of_blobs(cache: Cache) -> None:
    cache.relink(f"{cache.up}blobs")


def a_parent_as_blob(cache: Cache) -> None:
    cache.relink(f"{cache.up}blobs/..")


def a_folder_as_blob(cache: Cache) -> None:
    (cache.blobs / "ff").mkdir()
    cache.relink(f"{cache.up}blobs/ff")


def a_fifo_as_blob(cache: Cache) -> None:
    os.mkfifo(cache.blobs / "ff")
    cache.relink(f"{cache.up}blobs/ff")


def a_device_as_blob(cache: Cache) -> None:
    (cache.blobs / "ff").symlink_to("/dev/zero")
    cache.relink(f"{cache.up}blobs/ff")


def a_hard_link_as_blob(cache: Cache) -> None:
    os.link(cache.secret, cache.blobs / "ff")
    cache.relink(f"{cache.up}blobs/ff")


def a_loop(cache: Cache) -> None:
    cache.relink("model.onnx_data")


def moved(cache: Cache, name: str, place: str) -> None:
    """The repository under another name, or with another folder in the place of `snapshots`."""
    (cache.repository / "snapshots").rename(cache.repository / place)
    renamed = cache.hub / name
    cache.repository.rename(renamed)
    cache.model = renamed / place / cache.model.relative_to(cache.repository / "snapshots")


def no_repository(cache: Cache) -> None:
    moved(cache, "downloads", "snapshots")


def no_snapshots(cache: Cache) -> None:
    moved(cache, "models--org--name", "revisions")


def a_linked_folder(cache: Cache) -> None:
    (cache.folder / "in").symlink_to(f"{cache.up}blobs")
    cache.model.unlink()
    written(cache.model, "in/bb")


ATTACKS: tuple[Callable[[Cache], None], ...] = (
    another_repository, another_repository_absolute, upwards, far_upwards, through_blobs, absolute, absolute_through_blobs,
    chain_from_a_blob, chain_within_blobs, chain_within_the_snapshot, blobs_are_a_link, blobs_are_a_link_out, not_in_blobs,
    deep_in_blobs, the_folder_of_blobs, a_parent_as_blob, a_folder_as_blob, a_fifo_as_blob, a_device_as_blob,
    a_hard_link_as_blob, a_loop, no_repository, no_snapshots, a_linked_folder,
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_any_other_link_in_a_cache_is_refused(attack, cache, from_folder, capsys):
    attack(cache)
    for read in (load_model, refgrad.gradient, get_backend("numpy").prepare):
        with pytest.raises(InvalidModelError, match="The external data of tensor 'w'") as caught:
            read(cache.model)
        assert "Put the data itself" not in str(caught.value)
    assert cli.main(["run", str(cache.model)]) == 2
    said = capsys.readouterr()
    assert "hunter2" not in said.out + said.err


def to_secret(cache: Cache) -> None:
    (cache.blobs / "bb").unlink()
    (cache.blobs / "bb").symlink_to(cache.secret)


def to_other_link(cache: Cache) -> None:
    cache.relink(cache.secret)


def to_other_blobs(cache: Cache) -> None:
    (cache.hub / "models--org--other" / "blobs" / "bb").write_bytes(SECRET)
    cache.blobs.rename(cache.repository / "before")
    cache.blobs.symlink_to(cache.hub / "models--org--other" / "blobs")


@pytest.mark.parametrize("swap", [to_secret, to_other_link, to_other_blobs])
@pytest.mark.parametrize("named", [False, True], ids=["cache", "named"])
def test_what_changes_between_the_check_and_the_opening_is_not_followed(swap, named, cache, monkeypatch):
    found = links.places

    def changed(*arguments):
        listed = list(found(*arguments))
        swap(cache)
        return iter(listed)

    monkeypatch.setattr(links, "places", changed)
    try:
        read = load_model(cache.model, data_folders=[cache.blobs] if named else None).graph.initializer[0].raw_data
    except InvalidModelError:
        return
    assert read == WEIGHTS.tobytes()


@pytest.fixture
def linked(tmp_path) -> Path:
    """A model whose weights are a link into the folder `weights`, which has a folder in it and a neighbour."""
    for name in ("models", "weights/deep", "weights2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "weights" / "deep" / "w").write_bytes(WEIGHTS.tobytes())
    (tmp_path / "weights2" / "w").write_bytes(SECRET)
    (tmp_path / "models" / "w").symlink_to("../weights/deep/w")
    return written(tmp_path / "models" / "m.onnx", "w")


def test_links_into_a_named_folder_are_followed(linked, tmp_path, from_folder, monkeypatch, capsys):
    weights = tmp_path / "weights"
    with pytest.raises(
        InvalidModelError, match=r"data_folders=\[\.\.\.\], or the environment variable REFGRAD_DATA_FOLDERS"
    ):
        refgrad.gradient(linked)
    assert cli.main(["run", str(linked)]) == 2
    assert "--data-folder" in capsys.readouterr().err
    for folder in (weights, weights / "deep", tmp_path):
        made = refgrad.gradient(linked, data_folders=[folder])
        assert refgrad.gradient(linked, data_folders=[str(folder)], max_seconds=60) == made
        with refgrad.data_in([folder]):
            assert refgrad.gradient(linked) == made == refgrad.gradient(linked, max_seconds=60)
            assert refgrad.weights(linked).trainable
        for name in sorted({"numpy", "ort-cpu"} & set(available())):
            prepared = get_backend(name).prepare(linked, data_folders=[folder])
            assert np.array_equal(prepared.run(FED)["y"], FED["x"] @ WEIGHTS)
        assert cli.main(["check", str(linked), "--data-folder", str(folder)]) == 0
    capsys.readouterr()
    monkeypatch.setenv(links.VARIABLE, os.pathsep.join(["/nowhere", str(weights), ""]))
    assert cli.main(["check", str(linked)]) == 0
    assert np.array_equal(weights_of(linked), WEIGHTS)


def test_a_chain_and_a_linked_folder_may_stay_within_a_named_folder(linked, tmp_path):
    (tmp_path / "weights" / "again").symlink_to("deep")
    (tmp_path / "models" / "in").symlink_to(tmp_path / "weights" / "again")
    model = written(tmp_path / "models" / "n.onnx", "in/w")
    with refgrad.data_in([tmp_path / "weights"]):
        assert np.array_equal(weights_of(model), WEIGHTS)
    with refgrad.data_in([tmp_path / "models"]), pytest.raises(InvalidModelError, match="'in' is a link"):
        weights_of(model)


@pytest.mark.parametrize(
    "target",
    ["../weights2/w", "../weights/../weights2/w", "../weights/out", "../weights/fifo", "../weights/hard", "../weights"],
)
def test_links_out_of_a_named_folder_are_refused(target, linked, tmp_path):
    (tmp_path / "weights" / "out").symlink_to("../weights2/w")
    os.mkfifo(tmp_path / "weights" / "fifo")
    os.link(tmp_path / "weights2" / "w", tmp_path / "weights" / "hard")
    (tmp_path / "models" / "w").unlink()
    (tmp_path / "models" / "w").symlink_to(target)
    with pytest.raises(InvalidModelError, match="'w'"):
        load_model(linked, data_folders=[tmp_path / "weights"])
    assert links.named() == ()


def test_a_named_folder_is_one(linked, tmp_path, capsys):
    for wrong in ([linked], ["/nowhere/at/all"], str(tmp_path)):
        with pytest.raises(OptionError, match="data_folders"):
            refgrad.gradient(linked, data_folders=wrong)
    assert cli.main(["run", str(linked), "--data-folder", "/nowhere/at/all"]) == 2
    assert "--data-folder: there is no folder '/nowhere/at/all'" in capsys.readouterr().err


def test_nothing_is_written_into_a_cache(cache, tmp_path, capsys):
    before = {path.name: path.read_bytes() for path in cache.blobs.iterdir()}
    for name in ("aa", "bb"):
        assert cli.main(["grad", str(cache.model), "-o", str(cache.blobs / name)]) == 2
    for taken in (cache.model, cache.data):
        assert cli.main(["grad", str(cache.model), "-o", str(taken)]) == 2
    capsys.readouterr()
    other = cache.folder / "other.onnx"  # a link to a blob that the command does not read is replaced, and not the blob
    for taken, blob in ((other, "yy"), (cache.folder / "other.onnx.data", "zz")):
        before[blob] = b"another file"
        (cache.blobs / blob).write_bytes(before[blob])
        taken.symlink_to(f"{cache.up}blobs/{blob}")
    for output in (other, cache.folder / "gradient.onnx", tmp_path / "g.onnx"):
        assert cli.main(["grad", str(cache.model), "-o", str(output)]) == 0
        data = output.with_name(f"{output.name}.data")
        assert not output.is_symlink()
        assert not data.is_symlink()  # runtimes refuse the link of the cache beside it
        assert data.read_bytes() == WEIGHTS.tobytes()
        assert refgrad.gradient(output, ["x"])
    np.savez(tmp_path / "d.npz", x=np.ones((4, 2), np.float32), label=np.ones((4, 3), np.float32))
    words = ["train", str(cache.model), "--data", str(tmp_path / "d.npz"), "--epochs", "1", "-o"]
    assert cli.main([*words, str(cache.data)]) == 2
    assert cli.main([*words, str(cache.folder / "trained.onnx")]) == 0, capsys.readouterr()
    assert {path.name: path.read_bytes() for path in cache.blobs.iterdir()} == before


def test_a_partial_download_is_said(cache):
    (cache.blobs / "bb").unlink()
    with pytest.raises(RefgradError, match="it is missing"):
        load_model(cache.model)
    assert cli.main(["show", str(cache.model)]) == 0
    onnx.load(cache.model, load_external_data=False)


@pytest.mark.parametrize("folders", [[3], 3, [b"weights"], [""], "weights"])
def test_folders_are_a_list_of_paths(folders: Any) -> None:
    with pytest.raises(OptionError, match="data_folders="):
        links.checked(folders)
