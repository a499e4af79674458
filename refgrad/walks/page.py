"""A walk as one page that needs no network: every step of the backward pass with its numbers, to be stepped through."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from refgrad.escaping import csv_cell
from refgrad.model.external import array_of
from refgrad.show.folding import folds
from refgrad.show.lanes import lanes
from refgrad.walks.formulas import formula_pieces
from refgrad.walks.records import Contribution, Element, Step, Walk

WHOLE = 4096  # elements of a tensor that is in the page as a whole
_SIDE = 32  # rows and columns of the part of a larger tensor
_PLANES = 32  # of its last two axes that are in the page, at most
_WINDOW = 64  # elements that the page shows at once: more have a histogram
_BINS = 24
_ROOM = 3 << 20  # bytes of numbers in a page
_EXACT = 1 << 53  # integers above are not exact in JavaScript
_PLACE = re.compile(r"\{\{(\w+)\}\}")
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class QuizQuestion:
    """A quiz question at a step about what it gives to the cotangent `of` a forward value: the shape, or an element.

    A node that reads the value several times gives several contributions. The question is about their sum.
    """

    step: int
    node: str
    operator: str
    of: str
    values: tuple[str, ...]  # the contributions of the step
    shape: tuple[int, ...]
    element: Element  # the element of largest magnitude
    number: float  # this element
    is_whole: bool  # no other step contributes
    asks_shape: bool

    @property
    def asked(self) -> str:
        """The words for what is asked: `∂e[1]`, `contribution to ∂X[2, 0]`, `shape of ∂e`."""
        gradient = f"∂{self.of}" if self.is_whole else f"contribution to ∂{self.of}"
        if self.asks_shape:
            return f"shape of {'' if self.is_whole else 'the '}{gradient}"
        return gradient + (str(list(self.element)) if self.element else "")

    @property
    def answer(self) -> str:
        """The answer as text."""
        return str(list(self.shape)) if self.asks_shape else f"{self.number:.6g}"


def page(walk: Walk, title: str = "", quiz: bool = False) -> str:
    """Return a walk as an HTML page that loads nothing.

    Tensors of up to 4,096 elements are in it as they are; of a larger one its extremes, a histogram, an overview and the part
    around the largest element. Where the model has up to 50 nodes of common operators, a number can be changed in the page,
    which computes what follows.

    :param title: what the page is called, such as the name of the file of the model.
    :param quiz: hide what a step contributes until the reader has guessed an element of it.
    """
    data = _packed(walk, title or walk.model.graph.name or "model", quiz)
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("interpreter.js", "page.js"))
    parts = {
        "data": data,
        "style": style,
        "script": script,
        "policy": f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
        "form-action 'none'",
    }
    template = (_FOLDER / "page.html").read_text(encoding="utf-8")
    return _PLACE.sub(lambda match: parts[match[1]], template)


def questions(walk: Walk) -> list[QuizQuestion]:
    """Return the questions of the quiz, one for each step that contributes numbers. Every third question is about a shape."""
    return [question for step in walk.steps if (question := _question(walk, step)) is not None]


def _question(walk: Walk, step: Step) -> QuizQuestion | None:
    for of in dict.fromkeys(contribution.of for contribution in step.outgoing):
        values = tuple(contribution.value for contribution in step.outgoing if contribution.of == of)
        total = _sum_of([walk.values.get(value) for value in values])
        if total is None:
            continue
        flat = int(np.abs(total).argmax())
        place = _within(np.unravel_index(flat, total.shape), total)
        return QuizQuestion(
            step=step.number,
            node=step.node,
            operator=step.operator,
            of=of,
            values=values,
            shape=total.shape,
            element=place,
            number=float(total[place]),
            is_whole=of in walk.cotangents and len(walk.cotangents[of].contributions) == len(values),
            asks_shape=step.number % 3 == 2 and total.ndim > 0,
        )
    return None


def _sum_of(arrays: Sequence[Any]) -> np.ndarray | None:
    """The sum of arrays of floats; None if one is something else, or has no elements or infinite ones."""
    if any(not isinstance(array, np.ndarray) or array.dtype.kind not in "fV" for array in arrays):
        return None
    total = np.asarray(sum(array.astype(np.float64) for array in arrays))
    return total if total.size and np.isfinite(total).all() else None


def answers(asked: Mapping[str, tuple[str, Sequence[QuizQuestion]]]) -> str:
    """Return the answers to the quizzes of several pages, as the text of a .csv file.

    :param asked: by the name of each page, what is differentiated on it (`walk.of`), and its `questions`.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("page", "differentiated", "step", "node", "operator", "asked", "answer"))
    for name, (of, of_page) in asked.items():
        for question in of_page:
            row = (name, of, question.step, question.node, question.operator, question.asked, question.answer)
            writer.writerow(map(csv_cell, row))
    return text.getvalue()


def data_of(text: str) -> tuple[dict[str, Any], bytes]:
    """Return what a page shows: the document, and the numbers that its `values` point into."""
    match = re.search(r'<script id="data" type="text/plain">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    raw = zlib.decompress(base64.b64decode(match[1]))
    size = int.from_bytes(raw[:4], "little")
    return json.loads(raw[4 : 4 + size]), raw[4 + size :]


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _packed(walk: Walk, title: str, quiz: bool) -> str:
    numbers = bytearray()
    values = _values(walk, numbers)
    document = _document(walk, title, quiz) | {"values": values}
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)  # typed arrays begin at multiples of their size
    raw = len(text).to_bytes(4, "little") + text + bytes(numbers)
    return base64.b64encode(zlib.compress(raw, 6)).decode()


# The document


def _document(walk: Walk, title: str, quiz: bool) -> dict[str, Any]:
    nodes, place = _nodes(walk)
    forward = [place[item.outputs] for item in walk.forward if item.outputs in place]
    row = {k: number for number, k in enumerate(forward)}
    reads = _reads([nodes[k] for k in forward])
    alike = [(nodes[k]["domain"], nodes[k]["operator"], str(nodes[k]["attributes"])) for k in forward]
    metadata = {item.key: item.value for item in walk.gradient.metadata_props}
    asked = {item.step: item for item in questions(walk)}
    by_output = {name: k for k in forward for name in nodes[k]["outputs"] if name}
    own = {value.name for value in walk.model.graph.input} | {item.name for item in walk.model.graph.initializer}
    own |= {item.values.name for item in walk.model.graph.sparse_initializer}
    made = {name for node in walk.model.graph.node for name in node.output}
    names = [value.name for value in walk.gradient.graph.input] + [
        item.name for item in walk.gradient.graph.initializer
    ]
    return {
        "title": title,
        "of": walk.of,
        "wrt": list(walk.wrt),
        "notes": list(walk.notes),
        "quiz": quiz,
        "nodes": nodes,
        "forward": forward,
        # outputs of forward nodes that the gradient alone reads, such as the deviation of a LayerNormalization
        "extra": [
            name
            for k in forward
            for name in nodes[k]["outputs"]
            if name and not made.isdisjoint(nodes[k]["outputs"]) and name not in made
        ],
        "lanes": lanes(reads),
        "reads": reads,
        "folds": [[item.start, item.length, item.copies] for item in folds(alike, reads)],
        "inputs": [name for name in dict.fromkeys(names) if name in own],
        "seeds": json.loads(metadata.get("refgrad.cotangents", "{}")),
        "cotangents": {
            of: {
                "value": item.value,
                "alias": item.alias,
                "contributions": [_contribution(c) for c in item.contributions],
                "complete": item.complete,
            }
            for of, item in walk.cotangents.items()
        },
        "steps": [
            {
                "number": step.number,
                "node": step.node,
                "operator": step.operator,
                "domain": step.domain,
                "formula": [
                    piece if isinstance(piece, str) else {"name": piece.name, "isGradient": piece.is_gradient}
                    for piece in formula_pieces(step)
                ],
                "inputs": list(step.inputs),
                "outputs": list(step.outputs),
                "attributes": _plain_attributes(step.attributes),
                "read": list(step.read),
                "incoming": [item.of for item in step.incoming],
                "outgoing": [_contribution(item) for item in step.outgoing],
                "kinks": [
                    {"input": item.input, "elements": [list(at) for at in item.elements[:WHOLE]], "text": item.text}
                    for item in step.kinks
                ],
                "emitted": [place[item.outputs] for item in step.emitted if item.outputs in place],
                "row": next((row[by_output[name]] for name in step.outputs if name in by_output), -1),
                "difference": None
                if step.difference is None
                else {
                    "of": step.difference.of,
                    "element": list(step.difference.element),
                    "difference": _number(step.difference.difference),
                    "gradient": _number(step.difference.gradient),
                    "error": _number(step.difference.error),
                },
                "question": None if step.number not in asked else _asked(asked[step.number]),
            }
            for step in walk.steps
        ],
    }


def _asked(question: QuizQuestion) -> dict[str, Any]:
    return {
        "of": question.of,
        "values": list(question.values),
        "element": list(question.element),
        "number": question.number,
        "asksShape": question.asks_shape,
        "asked": question.asked,
    }


def _contribution(contribution: Contribution) -> dict[str, Any]:
    return {
        "of": contribution.of,
        "step": contribution.step,
        "position": contribution.position,
        "value": contribution.value,
        "before": contribution.before,
        "axes": list(contribution.axes),
        "summed": contribution.summed,
    }


def _nodes(walk: Walk) -> tuple[list[dict[str, Any]], dict[tuple[str, ...], int]]:
    """The nodes of the gradient model and of `walk.more` in their order, and the place of each by its outputs."""
    nodes: list[dict[str, Any]] = []
    place: dict[tuple[str, ...], int] = {}
    functions = {(item.domain, item.name) for item in walk.gradient.functions}
    told = {item.outputs: item for step in walk.steps for item in step.emitted}
    for node in (*walk.gradient.graph.node, *walk.more):
        outputs = tuple(node.output)
        place[outputs] = len(nodes)
        nodes.append(
            {
                "name": node.name,
                "operator": node.op_type,
                "domain": "" if node.domain == "ai.onnx" else node.domain,
                "inputs": list(node.input),
                "outputs": list(outputs),
                "attributes": {item.name: _attribute(item) for item in node.attribute if item.name != "doc_string"},
                "body": (node.domain, node.op_type) in functions or any(map(_has_graph, node.attribute)),
                "shape": outputs in told and told[outputs].is_shape,
            }
        )
    for item in (*walk.forward, *told.values()):
        if (
            item.outputs not in place
        ):  # it has no node of its own in the gradient model: a forward node with one more output
            mine = [
                k
                for k, node in enumerate(nodes)
                if node["name"] == item.name or set(item.outputs) & set(node["outputs"])
            ]
            place[item.outputs] = mine[0] if mine else len(nodes)
            if not mine:
                nodes.append(
                    {
                        "name": item.name,
                        "operator": item.operator,
                        "domain": "",
                        "inputs": list(item.inputs),
                        "outputs": list(item.outputs),
                        "attributes": _plain_attributes(item.attributes),
                        "body": True,
                        "shape": item.is_shape,
                    }
                )
    return nodes, place


def _has_graph(attribute: AttributeProto) -> bool:
    return attribute.HasField("g") or bool(attribute.graphs)


def _reads(nodes: list[dict[str, Any]]) -> list[list[int]]:
    number_of = {name: k for k, node in enumerate(nodes) for name in node["outputs"] if name}
    return [
        [number_of[name] for name in dict.fromkeys(node["inputs"]) if number_of.get(name, k) < k]
        for k, node in enumerate(nodes)
    ]


def _attribute(attribute: AttributeProto) -> Any:
    """An attribute as the page reads it: a tensor of numbers is {"dims", "data", "kind"}, a graph the text of its nodes."""
    if attribute.type == AttributeProto.GRAPH:
        return {"graph": [_line(node) for node in attribute.g.node]}
    if attribute.type == AttributeProto.TENSOR:
        return _tensor(attribute.t)
    try:
        return _plain(helper.get_attribute_value(attribute))
    except (TypeError, ValueError):
        return {"text": "…"}


def _line(node: NodeProto) -> str:
    outputs, inputs = ", ".join(node.output), ", ".join(node.input)
    return f"{outputs} = {node.op_type}({inputs})"


def _tensor(tensor: TensorProto) -> dict[str, Any]:
    array = array_of(tensor)
    kind = _kind(array)
    if array.size > WHOLE or not kind:
        return {"text": f"a tensor of shape {list(array.shape)}"}
    return {"dims": list(array.shape), "data": [_number(x) for x in array.astype(np.float64).flat], "kind": kind}


def _plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in attributes.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return _number(value)
    if isinstance(value, TensorProto):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return _tensor(numpy_helper.from_array(value))
    if isinstance(value, Iterable):
        return [_plain(item) for item in value]
    return {"text": type(value).__name__}


def _number(value: Any) -> Any:
    """A number that JSON has, else its text."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


# The numbers


def _kind(array: np.ndarray) -> str:
    if array.dtype.kind == "b":
        return "b"
    if array.dtype.kind in "iu" or array.dtype.name.startswith(("int", "uint")):
        return "i"
    return "f" if array.dtype.kind in "fV" or "float" in array.dtype.name else ""


def _values(walk: Walk, numbers: bytearray) -> list[dict[str, Any]]:
    arrays: dict[str, Any] = {**walk.feeds, **walk.values}
    large = [array for array in arrays.values() if isinstance(array, np.ndarray) and array.size > WHOLE]
    small = sum(array.nbytes for array in arrays.values() if isinstance(array, np.ndarray) and array.size <= WHOLE)
    side = _SIDE
    while side > 4 and len(large) * 4 * 3 * side * side > max(_ROOM - small, 0):  # the overview and two parts
        side -= 4
    return [_value(name, array, side, numbers) for name, array in arrays.items() if name]


def _value(name: str, array: Any, side: int, numbers: bytearray) -> dict[str, Any]:
    if not isinstance(array, np.ndarray | np.generic) or not _kind(np.asarray(array)):
        return {"name": name, "text": _told(array)}
    array = np.asarray(array)
    document: dict[str, Any] = {
        "name": name,
        "type": array.dtype.name,
        "kind": _kind(array),
        "shape": list(array.shape),
    }
    if array.size <= _WINDOW:
        return document | _stored(array, numbers)
    wide = array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)
    least, most = wide.min(), wide.max()
    infinite = 0
    if not (np.isfinite(least) and np.isfinite(most)):
        infinite = int(wide.size - np.isfinite(wide).sum())
        wide = np.where(np.isfinite(wide), wide, 0)
        least, most = wide.min(), wide.max()
    largest = int(wide.argmax() if most >= -least else wide.argmin())
    at = _within(np.unravel_index(largest, array.shape), array)
    if document["kind"] == "f":
        counts = np.histogram(wide, _BINS, (least, most))[0].tolist()
        document["histogram"] = {"counts": counts, "least": float(least), "most": float(most)} if least < most else None
        document["top"] = _top(wide) if array.ndim > 1 else None
    if array.size <= WHOLE:
        return document | _stored(array, numbers)
    document["statistics"] = {
        "least": float(least),
        "most": float(most),
        "mean": float(wide.mean(dtype=np.float64)),
        "zeros": int(array.size - np.count_nonzero(wide)) - infinite,
        "infinite": infinite,
        "largest": list(at),
    }
    document["overview"] = _overview(wide, at, side, numbers)
    around = _part(array, at, side, numbers)
    planes = max(1, min(_PLANES, side * side // max(1, math.prod(array.shape[-2:]))))
    leads = [np.unravel_index(k, array.shape[:-2]) for k in range(min(planes, math.prod(array.shape[:-2])))]
    shown = [(*_within(lead, array[..., 0, 0]), 0, 0) if array.ndim > 1 else (0,) for lead in leads]
    others = [_part(array, element, side, numbers) for element in shown]
    where = around["lead"], around["from"]
    return document | {"parts": [around, *(part for part in others if (part["lead"], part["from"]) != where)]}


def _top(wide: np.ndarray) -> dict[str, Any]:
    """The channel of images, or the row of another tensor, with the largest norm; and the norms of it and of the tensor."""
    is_image = wide.ndim > 3
    norms = np.sqrt(np.square(wide, dtype=np.float64).sum(axis=tuple(range(2, wide.ndim)) if is_image else -1))
    index = [int(k) for k in np.unravel_index(int(norms.argmax()), norms.shape)]
    whole = float(np.linalg.norm(norms))
    return {
        "what": "channel" if is_image else "row",
        "index": index,
        "norm": _number(norms[tuple(index)]),
        "whole": _number(whole),
    }


def _overview(wide: np.ndarray, at: Element, side: int, numbers: bytearray) -> dict[str, Any]:
    """The plane of the last two axes that has the element `at`; of each block of it the element of largest magnitude."""
    plane = wide[at[:-2]] if wide.ndim > 1 else wide[None]
    least = most = plane
    for axis in range(2):
        size = plane.shape[axis]
        starts = np.arange(min(side, size)) * size // min(side, size)
        most, least = np.maximum.reduceat(most, starts, axis), np.minimum.reduceat(least, starts, axis)
    blocks = np.where(most >= -least, most, least)
    return {"lead": list(at[:-2]), "size": list(blocks.shape)} | _stored(blocks, numbers)


def _part(array: np.ndarray, at: Element, side: int, numbers: bytearray) -> dict[str, Any]:
    """The part of the last two axes that has the element `at`, as close to its middle as the edges allow."""
    lead = at[:-2]
    plane = array[lead] if array.ndim >= 2 else array[None]
    wanted = (0, *at)[-2:]
    side = side if array.ndim >= 2 else side * side
    sizes = [min(side if k or array.ndim >= 2 else 1, plane.shape[k]) for k in range(2)]
    start = [min(max(wanted[k] - sizes[k] // 2, 0), plane.shape[k] - sizes[k]) for k in range(2)]
    part = plane[start[0] : start[0] + sizes[0], start[1] : start[1] + sizes[1]]
    return {"lead": list(lead), "from": start, "size": list(part.shape)} | _stored(part, numbers)


def _stored(array: np.ndarray, numbers: bytearray) -> dict[str, Any]:
    """Append the exact numbers of an array to `numbers`; return where they are. Integers too large for that become text."""
    kind = _kind(array)
    if kind == "f":
        code = "f8" if array.dtype == np.float64 else "f4"
    elif kind == "b":
        code = "u1"
    else:
        if array.size and (int(array.max()) >= _EXACT or int(array.min()) <= -_EXACT):
            return {"whole": [str(int(x)) for x in array.flat]}
        code = "i4" if not array.size or (array.max() < 1 << 31 and array.min() >= -(1 << 31)) else "f8"
    numbers += b"\0" * (-len(numbers) % 8)
    at = len(numbers)
    numbers += np.ascontiguousarray(array).astype(f"<{code}").tobytes()
    return {"code": code, "at": at, "count": int(array.size)}


def _told(value: Any) -> str:
    if value is None:
        return "no value (an optional that is empty)"
    if isinstance(value, list | tuple):
        return f"a sequence of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name} of shape {list(value.shape)}: " + ", ".join(map(str, value.flat[:8]))
    return type(value).__name__


def _within(element: Any, array: np.ndarray) -> tuple[int, ...]:
    return tuple(int(k) for k in element) if array.ndim else ()
