"""A failing graph made smaller: outputs, nodes and inputs are left out while the fault stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from refgrad.conformance.oracles.evaluator import initializers
from refgrad.conformance.tools.fuzzing.graphs.evaluation import UNKNOWN, Forward, wide_feeds
from refgrad.conformance.tools.fuzzing.graphs.growing import Sample, prune
from refgrad.conformance.tools.fuzzing.graphs.verdicts import FOREIGN, STEPS, GraphVerdict, judge
from refgrad.model import native
from refgrad.protos.traverse import reads_of, versions_of

_SECONDS = 20.0


def shrink(sample: Sample, verdict: GraphVerdict, seconds: float = _SECONDS) -> Sample:
    """The smallest graph found that has a verdict of the same step and kind, at the same place."""
    steps = tuple(step for step in STEPS if step in ("gradient", verdict.step, _NEEDS.get(verdict.step)))
    if verdict.kind == FOREIGN:
        steps = ("gradient", "onnxruntime")

    def fails(candidate: Sample) -> bool:
        if not candidate.wrt:
            return False
        try:
            found = judge(candidate, steps).verdicts
        except Exception:  # a candidate is not valid
            return False
        return any((one.step, one.kind, one.place) == (verdict.step, verdict.kind, verdict.place) for one in found)

    end = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for candidate in _smaller(sample):
            if time.monotonic() > end:
                break
            if fails(candidate):
                sample, changed = candidate, True
                break
    return sample


_NEEDS = {"lower": "ort dialect"}


def _smaller(sample: Sample) -> Iterator[Sample]:
    model = sample.model
    if len(sample.outputs) > 1:
        for name in sample.outputs:
            yield _with(sample, partial(_keep_output, name=name), outputs=(name,))
    try:
        values = _values(sample)
    except UNKNOWN:
        values = {}
    kinds = _kinds(model)
    made = [name for node in model.graph.node for name in node.output]
    for name in made if len(sample.outputs) == 1 else ():
        value = values.get(name)
        if name not in sample.outputs and isinstance(value, np.ndarray) and value.dtype.kind == "f" and name in kinds:
            info = helper.make_tensor_value_info(name, kinds[name], [None] * value.ndim)
            yield _with(sample, partial(_return, info=info), outputs=(name,))
    for number in reversed(range(len(model.graph.node))):
        node = model.graph.node[number]
        results = [name for name in node.output if name]
        if all(isinstance(values.get(name), np.ndarray) for name in results):
            yield _cut(sample, number, values)
        for change in _bypasses(node, values):
            yield _with(sample, partial(_bypass_within, path=(), number=number, result=change[0], instead=change[1]))
    for path in _bodies(model.graph):
        body = _at(model.graph, path)
        for number in reversed(range(len(body.node))):
            node = body.node[number]
            for result in node.output:
                for name in dict.fromkeys(reads_of(node)):
                    yield _with(
                        sample,
                        partial(_bypass_within, path=path, number=number, result=result, instead=name),
                    )
    if len(sample.wrt) > 1:
        for name in sample.wrt:
            yield replace(sample, wrt=(name,))


def _values(sample: Sample) -> dict[str, Any]:
    model = sample.model
    known = {**initializers(model.graph), **wide_feeds(sample.feeds)}
    with np.errstate(all="ignore"):
        return Forward(versions_of(model), model.functions).compute(model.graph.node, known)


def _with(sample: Sample, change: Callable[[ModelProto], None], **more: Any) -> Sample:
    made = ModelProto()
    made.CopyFrom(sample.model)
    change(made)
    try:
        prune(made)
    except Exception:
        return replace(sample, wrt=())
    names = {v.name for v in made.graph.input} | {t.name for t in made.graph.initializer}
    more.setdefault("wrt", tuple(name for name in sample.wrt if name in names))
    feeds = more.pop("feeds", sample.feeds)
    return replace(sample, model=made, feeds={n: x for n, x in feeds.items() if n in names}, **more)


def _keep_output(model: ModelProto, name: str) -> None:
    [kept] = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in model.graph.output if v.name == name]
    del model.graph.output[:]
    model.graph.output.append(kept)


def _return(model: ModelProto, info: onnx.ValueInfoProto) -> None:
    del model.graph.output[:]
    model.graph.output.append(info)


def _cut(sample: Sample, number: int, values: dict[str, Any]) -> Sample:
    """Make the outputs of a node inputs, which are fed the values that they have."""
    kinds = _kinds(sample.model)
    node = sample.model.graph.node[number]
    feeds, wrt, infos = dict(sample.feeds), list(sample.wrt), []
    outputs = set(sample.outputs)
    for name in node.output:
        if not name or name in outputs:
            if name in outputs:
                return replace(sample, wrt=())
            continue
        value = np.real(values[name])
        kind = kinds.get(name, helper.np_dtype_to_tensor_dtype(value.dtype))
        if value.dtype.kind == "f" and name not in kinds:
            kind = next((k for k in kinds.values() if k in (1, 10, 11)), kind)
        feeds[name] = value.astype(helper.tensor_dtype_to_np_dtype(kind))
        infos.append(helper.make_tensor_value_info(name, kind, value.shape))
        if value.dtype.kind == "f":
            wrt.append(name)

    def change(model: ModelProto) -> None:
        del model.graph.node[number]
        model.graph.input.extend(infos)

    made = _with(sample, change, feeds=feeds, wrt=tuple(wrt))
    names = {v.name for v in made.model.graph.input} | {t.name for t in made.model.graph.initializer}
    return replace(made, wrt=tuple(name for name in made.wrt if name in names))


def _kinds(model: ModelProto) -> dict[str, int]:
    try:
        graph = native.infer_shapes(model).graph
    except Exception:
        graph = model.graph
    found = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input, *graph.output)}
    return {name: kind for name, kind in found.items() if kind} | {t.name: t.data_type for t in graph.initializer}


def _bypasses(node: NodeProto, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for result in node.output:
        made = values.get(result)
        if not isinstance(made, np.ndarray):
            continue
        for name in dict.fromkeys(node.input):
            given = values.get(name)
            if isinstance(given, np.ndarray) and given.shape == made.shape and given.dtype.kind == made.dtype.kind:
                yield result, name


def _bypass_within(model: ModelProto, path: Path, number: int, result: str, instead: str) -> None:
    _bypass(_at(model.graph, path), number, result, instead)


def _bypass(graph: GraphProto, number: int, result: str, instead: str) -> None:
    """Let everything behind a node read another value than its result."""
    if any(value.name == result for value in graph.output):
        node = graph.node[number]
        if len(node.output) == 1 and node.op_type != "Identity":
            node.CopyFrom(helper.make_node("Identity", [instead], [result]))
        return
    for node in graph.node[number + 1 :]:
        _rename(node, result, instead)
    if not any(result in reads_of(node) for node in graph.node) and len(graph.node[number].output) == 1:
        del graph.node[number]


def _rename(node: NodeProto, old: str, new: str) -> None:
    for k, name in enumerate(node.input):
        if name == old:
            node.input[k] = new
    for attribute in node.attribute:
        if attribute.HasField("g"):
            for inner in attribute.g.node:
                _rename(inner, old, new)


Path = tuple[tuple[int, str], ...]


def _bodies(graph: GraphProto, path: Path = ()) -> Iterator[Path]:
    for number, node in enumerate(graph.node):
        for attribute in node.attribute:
            if attribute.HasField("g"):
                inner = (*path, (number, attribute.name))
                yield inner
                yield from _bodies(attribute.g, inner)


def _at(graph: GraphProto, path: Path) -> GraphProto:
    for number, name in path:
        graph = next(a.g for a in graph.node[number].attribute if a.name == name)
    return graph


def described(sample: Sample) -> str:
    """A graph as text, with what to feed it and what to differentiate."""
    lines = [native.to_text(sample.model)]
    lines += [f"feeds {name}: {x.dtype} {x.tolist()}" for name, x in sample.feeds.items()]
    lines.append(f"wrt {', '.join(sample.wrt)}; outputs {', '.join(sample.outputs)}")
    return "\n".join(lines)


__all__ = ["described", "numpy_helper", "shrink"]
