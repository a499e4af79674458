"""The model of a step in the making: around a gradient, weights that come in, penalties, clipping and updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from refgrad import traits
from refgrad.builder.function import FunctionEmitter
from refgrad.errors import OptionError, RefgradError, UnknownNameError, raised
from refgrad.protos.traverse import captures_of, fresh, names_of, versions_of
from refgrad.ranges import FINITE as FINITE_NUMBER
from refgrad.reverse.assembly import names_in, note
from refgrad.training.normalization import Statistic
from refgrad.training.optimizers import Optimizer
from refgrad.training.precision import (
    DYNAMIC,
    FINITE,
    GOOD_STEPS,
    SCALE,
    UPDATES,
    all_finite,
    first_states,
    is_narrow,
    master,
    next_states,
    unscaled,
)
from refgrad.training.slimming import slim, uses
from refgrad.training.steps import RATE, STEP, VECTOR, Cut, StepModel

_CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class StepRequest:
    """The settings that a step is made by.

    :param loss: the name of the loss in the gradient model, and `label` the name of the expected values.
    :param decays: l1 and l2 of the penalty by weight; `shared` says whether the samples of a step share it.
    :param weight_decay: λ by weight, where it is not the optimizer's.
    :param clip: the largest element of the gradient, and its largest norm.
    :param draws: whether the model reads the number of the step, as Dropout does.
    :param scale: the loss scale, which the gradient model reads as an input; None: it is not scaled.
    """

    optimizer: Optimizer
    loss: str
    label: str
    decays: Mapping[str, tuple[float, float]]
    shared: bool
    weight_decay: Mapping[str, float]
    clip: tuple[float | None, float | None]
    flat: bool
    unbiased: bool
    accumulate: int
    draws: bool
    scale: float | str | None = None


class Assembly:
    """The step model in the making."""

    def __init__(
        self,
        made: ModelProto,
        weights: Mapping[str, np.ndarray],
        running: Mapping[Statistic, np.ndarray],
        asked: StepRequest,
    ) -> None:
        """A step by the gradient model `made`, of these weights and running statistics."""
        self.made, self.weights, self.running, self.asked = made, weights, running, asked
        taken = names_of(made.graph) | {RATE, STEP, SCALE, GOOD_STEPS, UPDATES}
        self.vector = fresh(VECTOR, taken) if asked.flat else ""
        owners = {self.vector: ""} if asked.flat else {name: f"{name}." for name in weights}
        kinds = states_of(asked.optimizer)  # each is a state for each owner; the sum of gradients is another one
        self.names = {name: {kind: fresh(owner + kind, taken) for kind in kinds} for name, owner in owners.items()}
        self.sums = {name: fresh(f"{owner}gradient", taken) for name, owner in owners.items() if asked.accumulate > 1}
        taken.update(node.name for node in made.graph.node)
        opset = versions_of(made)[""]
        self.first, self.last = (FunctionEmitter.into_graph(opset, part, taken) for part in ("weights", "update"))
        self.taken, self.count = taken, ""  # the number of the samples of a step, where it is asked for
        self.uses = uses(made.graph)
        self.inputs: list[ValueInfoProto] = []
        self.state: dict[str, np.ndarray] = {}
        held = {} if asked.flat else dict(weights)
        held |= {statistic.name: value for statistic, value in running.items()}
        self.masters = {name: fresh(f"{name}.master", taken) for name, value in held.items() if is_narrow(value)}

    def step(self) -> StepModel:
        """The step."""
        op = self.last
        _, gradients = names_in(self.made)
        moved = {*self.weights, *(statistic.name for statistic in self.running)}
        if self.asked.draws:
            moved.add(STEP)
        if self.asked.scale is not None:
            moved.add(SCALE)
        data = [value for value in self.made.graph.input if value.name not in moved]
        if clash := next((v.name for v in data if v.name in (RATE, STEP)), ""):
            raise UnknownNameError(f"The model has an input {clash!r}, a name that the step needs. Rename the input.")
        loss = next(value for value in self.made.graph.output if value.name == self.asked.loss)
        op.types[self.asked.loss] = (loss.type.tensor_type.elem_type, None)
        layout: dict[str, tuple[int, tuple[int, ...]]] = {}
        if self.asked.flat:
            layout = self._unpacked()
            parts = {self.vector: np.concatenate([master(value).ravel() for value in self.weights.values()])}
            slopes = {self.vector: self._packed(gradients)}
        else:
            parts = {name: master(value) for name, value in self.weights.items()}
            slopes = {name: self._widened(name, gradients[name]) for name in self.weights}
        for name, value in parts.items():
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            op.types[self._held(name)] = op.types[slopes[name]] = (kind, value.ndim)
        slopes = self._told_apart(slopes)
        ends = dict(slopes)
        values = dict(self.weights) | {statistic.name: value for statistic, value in self.running.items()}
        for name, held in self.masters.items():
            self._narrowed(name, held, values[name])
        finite = ""
        if self.asked.scale is not None:
            op.types[SCALE] = (TensorProto.FLOAT, 0)
            slopes = unscaled(op, slopes)
            finite = all_finite(op, slopes)
            if self.asked.accumulate > 1:
                slopes = {name: op.Where(finite, g, op.const(0.0, like=g)) for name, g in slopes.items()}
        total, counted = self.asked.loss, ""
        if self.asked.shared and self.asked.decays:
            counted = self._count(data)
            self.count = op.Cast(counted, to=TensorProto.DOUBLE)
        for name in parts:
            slopes[name], total = self._penalized(name, slopes[name], total)
        kinds = {op.type(self._held(name)) for name in parts}
        one_kind = kinds.pop() if len(kinds) == 1 else int(TensorProto.DOUBLE)
        op.types[RATE], op.types[STEP] = (one_kind, 0), (TensorProto.INT64, 0)
        self.inputs.append(helper.make_tensor_value_info(RATE, one_kind, []))
        self._begin(STEP, np.array(0, np.int64))
        results = {STEP: op.Add(STEP, 1)}
        number, due = results[STEP], ""
        if self.asked.accumulate > 1:
            number, due = op.Div(number, self.asked.accumulate), op.Equal(op.Mod(number, self.asked.accumulate), 0)
            results |= self._accumulated(slopes, due)
        slopes = self._clipped(slopes)
        applies = due
        if finite:
            applies, scaled = self._applies(finite, due)
            results |= scaled
            number = op.Add(UPDATES, 1) if UPDATES in scaled else number
        t = op.Cast(number, to=TensorProto.DOUBLE)
        if due:  # it is 0 before the first update
            t = op.Max(t, 1.0)
        for name, value in parts.items():
            results |= self._update(name, value, slopes[name], t, applies)
        counts = number == results[STEP] and any(t in node.inputs for node in op.nodes)
        if not due and not self.asked.draws and not counts:  # no update asks how many there were
            del results[STEP], self.state[STEP]
            self.inputs = [value for value in self.inputs if value.name != STEP]
        for statistic, value in self.running.items():
            held, first = self._held(statistic.name), master(value)
            op.types[held] = (helper.np_dtype_to_tensor_dtype(first.dtype), 1)
            self._begin(held, first)
            results[held] = statistic.following(op, self.asked.unbiased, held)
        if not self._is_scalar(self.asked.loss):
            total = op.Reshape(total, np.zeros(0, np.int64))
        cut = Cut({self._held(name): slope for name, slope in ends.items()}, self.asked.loss, counted)
        return self._assembled(data, results, total, layout, finite, cut)

    def _told_apart(self, slopes: Mapping[str, str]) -> dict[str, str]:
        """The gradients, each of them the result of a node and of no other weight."""
        computed = {name for node in self.made.graph.node for name in node.output}
        computed.update(name for node in self.last.nodes for name in node.outputs)
        found: dict[str, str] = {}
        for name, slope in slopes.items():
            is_own = slope in computed and slope not in found.values()
            found[name] = slope if is_own else self.last.Identity(slope)
            self.last.types[found[name]] = self.last.types[slope]
        return found

    def _held(self, name: str) -> str:
        """The state that holds a weight or a statistic: itself, or its master."""
        return self.masters.get(name, name)

    def _narrowed(self, name: str, held: str, value: np.ndarray) -> None:
        """Cast a master to the 16-bit type that the model reads."""
        if held != name:
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            self.first.builder.append("Cast", [held], [name], f"weights/{name}", attributes={"to": kind})

    def _widened(self, name: str, gradient: str) -> str:
        """The gradient of a weight in the type in which the weight is trained."""
        return str(self.last.Cast(gradient, to=TensorProto.FLOAT)) if is_narrow(self.weights[name]) else gradient

    def _applies(self, finite: str, due: str) -> tuple[str, dict[str, str]]:
        """A bool, true if this step changes the weights, and the next states of the loss scale.

        The gradients of all steps that the update accumulates have to be finite.
        """
        op = self.last
        states = first_states(self.asked.scale or DYNAMIC)
        if not states:
            return (op.And(due, finite) if due else finite), {}
        for name, value in states.items():
            self._begin(name, value)
            op.types[name] = (helper.np_dtype_to_tensor_dtype(value.dtype), 0)
        results = next_states(op, finite)
        applies = finite
        if due:
            applies = op.And(due, op.Not(op.Less(results[GOOD_STEPS], self.asked.accumulate)))
        results[UPDATES] = op.Add(UPDATES, op.Cast(applies, to=TensorProto.INT64))
        return applies, results

    def _begin(self, name: str, value: np.ndarray) -> None:
        """An input that the step returns changed, and with what it begins."""
        self.state[name] = value
        self.inputs.append(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        )

    def _unpacked(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Take the weights out of their vector."""
        op, layout, start = self.first, dict[str, tuple[int, tuple[int, ...]]](), 0
        sizes = [value.size for value in self.weights.values()]
        rows = op.Split(self.vector, sizes, outputs=len(sizes)) if len(sizes) > 1 else (self.vector,)
        for row, (name, value) in zip(rows, self.weights.items(), strict=True):
            layout[name] = (start, value.shape)
            start += value.size
            held = fresh(f"{name}.master", self.taken) if is_narrow(value) else name
            if value.ndim == 1 and len(sizes) > 1:
                split = op.nodes[0]
                op.nodes[0] = split._replace(outputs=tuple(held if one == row else one for one in split.outputs))
            else:
                op.builder.append("Reshape", [row, op.const(list(value.shape))], [held], f"weights/{held}")
            self._narrowed(name, held, value)
        return layout

    def _packed(self, gradients: Mapping[str, str]) -> str:
        flat = {name: self.weights[name].ndim == 1 or self._sums_to_row(name, gradients) for name in self.weights}
        rows = [gradients[name] if flat[name] else self.last.Reshape(gradients[name], [-1]) for name in self.weights]
        packed: str = self.last.Concat(*rows, axis=0) if len(rows) > 1 else rows[0]
        return self._widened(next(iter(self.weights)), packed)

    def _sums_to_row(self, name: str, gradients: Mapping[str, str]) -> bool:
        """True if the gradient is a sum that nothing else reads and that is a row without the axes of size 1 it keeps."""
        graph, gradient = self.made.graph, gradients[name]
        node = next((node for node in graph.node if gradient in node.output), None)
        if node is None or node.op_type != "ReduceSum" or len(node.input) != 2 or self.uses[gradient]:
            return False
        axes = next((tensor for tensor in graph.initializer if tensor.name == node.input[1]), None)
        keepdims = next((attribute for attribute in node.attribute if attribute.name == "keepdims"), None)
        if axes is None or keepdims is None or not keepdims.i or list(gradients.values()).count(gradient) > 1:
            return False
        if self.weights[name].ndim - math.prod(axes.dims) != 1:
            return False
        keepdims.i = 0
        return True

    def _is_scalar(self, name: str) -> bool:
        """True if a value is the sum or the mean of all of a tensor; no inner graph reads it."""
        node = next((node for node in self.made.graph.node if name in node.output), None)
        return (
            node is not None
            and not any(name in captures_of(reader) for reader in self.made.graph.node)
            and node.op_type in ("ReduceMean", "ReduceSum")
            and len(node.input) == 1
            and [(attribute.name, attribute.i) for attribute in node.attribute] == [("keepdims", 0)]
        )

    def _penalized(self, name: str, slope: str, total: str) -> tuple[str, str]:
        """The gradient and the loss with l1·Σ|w| + l2·Σw²."""
        op, w = self.last, self._held(name)
        members = list(self.weights) if self.asked.flat else [name]
        for place in (0, 1):
            amounts = [self.asked.decays.get(member, (0.0, 0.0))[place] for member in members]
            if not any(amounts):
                continue
            amount: Any = amounts[0]
            if len(set(amounts)) > 1:
                rows = [
                    np.full(self.weights[m].size, a, master(self.weights[m]).dtype)
                    for m, a in zip(members, amounts, strict=True)
                ]
                amount = op.const(np.concatenate(rows))
            if self.asked.shared:
                amount = op.Div(amount if isinstance(amount, str) else op.const(amount, like=w), self._in_type(w))
            if place == 0:
                slope = op.Add(slope, op.Mul(op.Sign(w), amount))
                part = op.Mul(op.Abs(w), amount)
            else:
                weighted = op.Mul(w, amount)
                slope = op.Add(slope, op.Add(weighted, weighted))
                part = op.Mul(w, weighted)
            summed = op.ReduceSum(part, keepdims=0)
            total = op.Add(total, summed if op.type(total) == op.type(w) else op.Cast(summed, to=op.type(total)))
        return slope, total

    def _count(self, data: Sequence[ValueInfoProto]) -> str:
        """The number of samples of a step."""
        axes = {value.name: len(value.type.tensor_type.shape.dim) for value in data}
        first = next((name for name in (self.asked.label, *axes) if axes.get(name)), "")
        if not first:
            raise OptionError('penalty_by="sample" needs an input whose first axis counts the samples. Take "step".')
        return str(self.last.Gather(self.last.Shape(first), 0))

    def _in_type(self, name: str) -> str:
        return str(self.last.Cast(self.count, to=self.last.type(name)))

    def _clipped(self, slopes: Mapping[str, str]) -> dict[str, str]:
        op, (value, most) = self.last, self.asked.clip
        clipped = dict(slopes)
        if value is not None:
            clipped = {name: op.Max(op.Min(g, float(value)), -float(value)) for name, g in clipped.items()}
        if most is not None:
            squares = [op.Cast(op.ReduceSum(op.Mul(g, g), keepdims=0), to=TensorProto.DOUBLE) for g in clipped.values()]
            norm = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
            factor = op.Min(op.Div(op.const(float(most), like=norm), op.Add(norm, _CLIP_EPSILON)), 1.0)
            clipped = {name: op.Mul(g, op.Cast(factor, to=op.type(g))) for name, g in clipped.items()}
        return clipped

    def _accumulated(self, slopes: dict[str, str], due: str) -> dict[str, str]:
        """Add up gradients, and put their mean in place of each. Return the sums to keep, 0 where the update is `due`."""
        op, kept = self.last, {}
        for name, slope in slopes.items():
            kind, rank = op.types[self._held(name)]
            state = self.sums[name]
            size = sum(v.size for v in self.weights.values()) if self.asked.flat else self.weights[name].shape
            self._begin(state, np.zeros(size, helper.tensor_dtype_to_np_dtype(kind)))
            op.types[state] = (kind, rank)
            total = op.Add(state, slope)
            slopes[name] = op.Mul(total, 1 / self.asked.accumulate)
            kept[state] = op.Where(due, op.const(0.0, like=total), total)
        return kept

    def _update(self, name: str, value: np.ndarray, slope: str, t: str, applies: str) -> dict[str, str]:
        op, kind, w = self.last, helper.np_dtype_to_tensor_dtype(value.dtype), self._held(name)
        self._begin(w, value)
        states = self.names[name]
        for state, begin in states_of(self.asked.optimizer).items():
            self._begin(states[state], np.full(value.shape, begin, value.dtype))
            op.types[states[state]] = (kind, value.ndim)
        rate = RATE if op.type(RATE) == kind else op.Cast(RATE, to=kind)
        arguments = (slope, rate, t, states, self._decay(name, value))
        moved, new = updated(self.asked.optimizer, op, w, states, kind, arguments)
        if applies:
            moved = op.Where(applies, moved, w)
            new = {state: op.Where(applies, made, states[state]) for state, made in new.items()}
        return {w: moved} | {states[state]: made for state, made in new.items()}

    def _decay(self, name: str, value: np.ndarray) -> float | str:
        """The weight decay of a weight, or of each element of the vector of all; one number where they are the same."""
        usual = float(getattr(self.asked.optimizer, "weight_decay", 0.0))
        amounts = [
            self.asked.weight_decay.get(member, usual) for member in (self.weights if self.asked.flat else [name])
        ]
        if len(set(amounts)) == 1:
            return amounts[0]
        rows = [np.full(w.size, amount, value.dtype) for w, amount in zip(self.weights.values(), amounts, strict=True)]
        return self.last.const(np.concatenate(rows))

    def _assembled(
        self,
        data: Sequence[ValueInfoProto],
        results: Mapping[str, str],
        total: str,
        layout: Mapping[str, tuple[int, tuple[int, ...]]],
        finite: str,
        cut: Cut,
    ) -> StepModel:
        made, source = ModelProto(), self.made.graph
        made.CopyFrom(self.made)
        result = fresh("loss", self.taken)
        final = {total: result} | {name: fresh(f"{state}_next", self.taken) for state, name in results.items()}
        if finite:
            final[finite] = fresh(FINITE, self.taken)
        graph = made.graph
        for field_name in ("input", "output", "node", "initializer"):
            graph.ClearField(field_name)
        graph.name = "step"
        graph.input.extend([*data, *self.inputs])
        graph.node.extend([*self.first.builder.take(), *source.node, *self.last.builder.take()])
        for node in graph.node:
            node.input[:] = [final.get(name, name) for name in node.input]
            node.output[:] = [final.get(name, name) for name in node.output]
        graph.initializer.extend(source.initializer)
        for op in (self.first, self.last):
            graph.initializer.extend(op.builder.constants.values())
        if isinstance(self.asked.scale, float):
            graph.initializer.append(numpy_helper.from_array(np.array(self.asked.scale, np.float32), SCALE))
        graph.output.append(helper.make_tensor_value_info(result, self.last.type(self.asked.loss), []))
        types = {value.name: value.type for value in graph.input}
        graph.output.extend(helper.make_value_info(final[name], types[state]) for state, name in results.items())
        if finite:
            graph.output.append(helper.make_tensor_value_info(final[finite], TensorProto.BOOL, []))
        ends = {name: final.get(name, name) for name in (*cut.gradients.values(), cut.loss, cut.count)}
        kept = slim(made, set(ends.values()))
        ends = {name: kept[value] for name, value in ends.items()}
        following = {state: final[name] for state, name in results.items()}
        rows = {name: [start, list(shape)] for name, (start, shape) in layout.items()}
        noted: dict[str, Any] = {"next": following, "loss": result, "label": self.asked.label, "layout": rows}
        vector = "" if self.vector == VECTOR else self.vector
        further = {"masters": self.masters, "finite": final.get(finite, ""), "vector": vector}
        noted |= {key: value for key, value in further.items() if value}
        note(made, self.made, training=noted)
        return StepModel(
            made,
            dict(self.weights),
            dict(self.state),
            following,
            tuple(value.name for value in data if value.name != self.asked.label),
            self.asked.label,
            result,
            self.asked.flat,
            dict(layout),
            statistics=tuple(statistic.name for statistic in self.running),
            masters=dict(self.masters),
            vector=self.vector,
            finite=final.get(finite, ""),
            cut=Cut({state: ends[name] for state, name in cut.gradients.items()}, ends[cut.loss], ends[cut.count]),
        )


def states_of(optimizer: Optimizer) -> dict[str, float]:
    """The states of an optimizer, which may be another package's, and the number that each begins with.

    :raises OptionError: they are something else.
    """
    states: Any = optimizer.states
    if not isinstance(states, Mapping) or any(
        not isinstance(name, str) or FINITE_NUMBER.why_not(begin) for name, begin in states.items()
    ):
        raise OptionError(
            f"states of {type(optimizer).__name__} is a dict of numbers, such as {{'momentum': 0.0}}, not {states!r}."
        )
    return dict(states)


def updated(
    optimizer: Optimizer,
    op: FunctionEmitter,
    name: str,
    states: Mapping[str, str],
    kind: int,
    arguments: tuple[Any, ...],
) -> tuple[str, Mapping[str, str]]:
    """The new weight and the new states of the weight `name`, of type `kind`.

    :param arguments: the arguments of `Optimizer.update` after the weight.
    :raises OptionError: the update of the optimizer, which may be another package's, returns something else.
    """
    before = len(op.nodes)
    where = f"update of {type(optimizer).__name__}"
    try:
        found: Any = optimizer.update(op, name, *arguments)
    except RefgradError:
        raise
    except Exception as error:
        names = " Values are names: op.Sub(w, g) is their difference." if isinstance(error, TypeError) else ""
        raise OptionError(f"{where} raises {raised(error)}.{names}") from error
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
        raise OptionError(f"{where} returns the new weight and a dict of the new states, not {found!r}.")
    moved, new = found
    if new.keys() != states.keys():
        raise OptionError(f"{where} returns the states {sorted(new)}; the optimizer has {sorted(states)}.")
    known = {name, *arguments[:3], *states.values(), *(made for node in op.nodes for made in node.outputs)}
    if odd := [value for value in (moved, *new.values()) if not isinstance(value, str) or value not in known]:
        raise OptionError(f"{where} returns {odd[0]!r}, which is no value that a method of op returned.")
    types = [{op.type(read) for read in node.inputs} for node in op.nodes[before:] if node.op_type in traits.ARITHMETIC]
    mixed = any(len(some - {0}) > 1 for some in types)
    if mixed or not {op.type(value) for value in (moved, *new.values())} <= {0, kind}:
        raise OptionError(
            f"{where} mixes element types, or returns another one than the weight {name!r} has. t is a scalar in double: "
            "cast it, as in op.CastLike(t, w)."
        )
    if optimizer.elementwise and (mixing := [n.op_type for n in op.nodes[before:] if n.op_type in traits.MIXING]):
        raise OptionError(
            f"{where} emits {mixing[0]}, whose result depends on several elements. Leave elementwise out: then an update "
            "gets a whole weight."
        )
    taken = {name, *arguments[:3], *states.values()}  # each result is an output of its own

    def own(value: str) -> str:
        value = str(op.Identity(value)) if value in taken else value
        taken.add(value)
        return value

    return own(moved), {state: own(value) for state, value in new.items()}
