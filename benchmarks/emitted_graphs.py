"""Are the gradients that two states of refgrad write the same, node by node? For a change that must not change any.

    python benchmarks/emitted_graphs.py write before.zip     # in the state before the change
    python benchmarks/emitted_graphs.py compare before.zip   # in the state after it

Every case of the tables and every node test of onnx, in both dialects, with the backward pass computed again, and with the
other derivatives of quantization. Two graphs are the same if their protobufs are; a refusal is compared by its kind.
"""

from __future__ import annotations

import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from onnx import ModelProto

import refgrad
from refgrad.conformance import Case, tables
from refgrad.errors import RefgradError

OPTIONS = {
    "onnx": {},
    "ort": {"dialect": "ort", "keep_outputs": True},
    "recomputed": {"recompute": True},
    "clipped": {"quantization": "clipped", "kinks": "torch"},
    "yielded": {"dialect": "ort", "cotangent": "yield", "kinks": "onnxruntime"},
}


def cases() -> Iterator[Case]:
    """Every case, the node tests last."""
    yield from tables()
    for module in ("refgrad.conformance.judge.running.sources", "refgrad.conformance.judge.running.sources"):
        try:
            sources = __import__(module, fromlist=["node_tests"])
        except ImportError:
            continue
        yield from sources.node_tests()
        return


def graphs() -> Iterator[tuple[str, bytes]]:
    """The name of each case and variant, and its gradient as bytes, or the name of its refusal."""
    for case in cases():
        for variant, options in OPTIONS.items():
            if variant == "yielded" and len(case.model.graph.node) > 1:
                continue
            try:
                made = refgrad.gradient(case.model, case.wrt, case.outputs, **options)
                text = made.SerializeToString(deterministic=True)
            except RefgradError as error:
                text = type(error).__name__.encode()
            yield f"{case.name}/{variant}", text


def write(path: Path) -> None:
    """Write every graph into an archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in graphs():
            archive.writestr(name, text)
        print(f"{len(archive.namelist())} graphs in {path}")


def compare(path: Path) -> int:
    """Compare every graph with the one in the archive; how many differ, are new or are gone."""
    found: Counter[str] = Counter()
    with zipfile.ZipFile(path) as archive:
        left = set(archive.namelist())
        for name, text in graphs():
            if name not in left:
                found["new"] += 1
                print(f"new: {name}")
                continue
            left.remove(name)
            before = archive.read(name)
            found["same" if before == text else "different"] += 1
            if before != text:
                print(f"different: {name}: {_difference(before, text)}")
    for name in sorted(left):
        found["gone"] += 1
        print(f"gone: {name}")
    print(dict(found))
    return sum(found.values()) - found["same"]


def _difference(before: bytes, after: bytes) -> str:
    """The first node that differs, or what else does."""
    if len(before) < 40 or len(after) < 40:
        return f"{before[:40]!r} became {after[:40]!r}"
    one, other = ModelProto.FromString(before), ModelProto.FromString(after)
    for position, (a, b) in enumerate(zip(one.graph.node, other.graph.node, strict=False)):
        if a != b:
            return f"node {position}: {a.op_type} {a.name!r}, {b.op_type} {b.name!r}"
    return f"{len(one.graph.node)} and {len(other.graph.node)} nodes"


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "compare"):
        sys.exit("usage: python benchmarks/emitted_graphs.py write|compare ARCHIVE")
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        sys.exit(1 if compare(Path(sys.argv[2])) else 0)
