"""What listings and pictures are tested on, and the syntax of the latter.

The first texts are what the notebook "Stochastic Gradient Descent on simple function" of onnxcustom printed.
The gradients have the names of onnx_rename_names, and no operator sets. The shapes of the regression are left out: the notebook
prints 0 for an unknown dimension and (0,) for every initializer.
"""

from __future__ import annotations

import re
import shutil

import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper

REGRESSION = """\
opset: domain='' version=14
input: name='x' type=dtype('float32')
input: name='label' type=dtype('float32')
init: name='init' type=dtype('float32') -- array([ 0.5    , -0.33333], dtype=float32)
init: name='init_1' type=dtype('float32') -- array([-2.,  3.], dtype=float32)
init: name='init_2' type=dtype('int64') -- array([1], dtype=int64)
init: name='init_3' type=dtype('int64') -- array([2], dtype=int64)
init: name='init_5' type=dtype('int64') -- array([0], dtype=int64)
init: name='init_b10' type=dtype('float32') -- array([-1.], dtype=float32)
init: name='init_b11' type=dtype('int64') -- array([-1,  1], dtype=int64)
Mul(x, x) -> out_mul_0
  Mul(out_mul_0, init) -> out_mul_0_1
Mul(x, init_1) -> out_mul_0_2
  Add(out_mul_0_2, out_mul_0_1) -> out_add_0
    Slice(out_add_0, init_2, init_3, init_2) -> out_sli_0
      Squeeze(out_sli_0, init_2) -> out_squ_0
    Slice(out_add_0, init_5, init_2, init_2) -> out_sli_0_1
      Squeeze(out_sli_0_1, init_2) -> out_squ_0_1
        Add(out_squ_0_1, out_squ_0) -> out_add_0_1
          Add(out_add_0_1, init_b10) -> out_add_0_2
            Reshape(out_add_0_2, init_b11) -> y
              Sub(y, label) -> loss_diff
                Mul(loss_diff, loss_diff) -> loss_diff_2
                  ReduceSum(loss_diff_2) -> loss
output: name='loss' type=dtype('float32')
output: name='y' type=dtype('float32')
"""

GRADIENT = """\
input: name='x' type=dtype('float32') shape=(0, 2)
input: name='init' type=dtype('float32') shape=(1, 2)
input: name='init_1' type=dtype('float32') shape=(1, 2)
input: name='init_b10' type=dtype('float32') shape=(1,)
input: name='y_grad' type=dtype('float32') shape=(0, 1)
init: name='i0' type=dtype('int64') shape=(0,) -- array([0], dtype=int64)
init: name='i1' type=dtype('int64') shape=(0,) -- array([1], dtype=int64)
init: name='i2' type=dtype('int64') shape=(0,) -- array([2], dtype=int64)
Mul(x, x) -> r0
  Mul(r0, init) -> r1
    Shape(r1) -> r32
Mul(x, init_1) -> r2
  Add(r2, r1) -> r3
    Slice(r3, i1, i2, i1) -> r4
      Squeeze(r4, i1) -> r5
        Shape(r5) -> r18
    Slice(r3, i0, i1, i1) -> r6
      Squeeze(r6, i1) -> r7
        Add(r7, r5) -> r8
          Add(r8, init_b10) -> r9
            Shape(r9) -> r10
              Reshape(y_grad, r10, allowzero=0) -> r11
Shape(init_b10) -> r12
Shape(r8) -> r13
  BroadcastGradientArgs(r13, r12) -> r14, r15
    ReduceSum(r11, r14, keepdims=1, noop_with_empty_axes=1) -> r16
  Reshape(r16, r13, allowzero=0) -> r17
Shape(r7) -> r19
  BroadcastGradientArgs(r19, r18) -> r20, r21
    ReduceSum(r17, r21, keepdims=1, noop_with_empty_axes=1) -> r22
      Reshape(r22, r18, allowzero=0) -> r23
        Unsqueeze(r23, i1) -> r24
    Shape(r3) -> r25
      SliceGrad(r24, r25, i1, i2, i1) -> r26
    ReduceSum(r17, r20, keepdims=1, noop_with_empty_axes=1) -> r27
  Reshape(r27, r19, allowzero=0) -> r28
    Unsqueeze(r28, i1) -> r29
      SliceGrad(r29, r25, i0, i1, i1) -> r30
        Sum(r30, r26) -> r31
  Shape(r2) -> r33
    BroadcastGradientArgs(r33, r32) -> r34, r35
      ReduceSum(r31, r35, keepdims=1, noop_with_empty_axes=1) -> r36
      Reshape(r36, r32, allowzero=0) -> r37
        Mul(r37, init) -> r38
Shape(init) -> r39
Shape(r0) -> r40
  BroadcastGradientArgs(r40, r39) -> r41, r42
    ReduceSum(r38, r41, keepdims=1, noop_with_empty_axes=1) -> r43
  Reshape(r43, r40, allowzero=0) -> r44
    Mul(r44, x) -> r45
ReduceSum(r31, r34, keepdims=1, noop_with_empty_axes=1) -> r46
  Reshape(r46, r33, allowzero=0) -> r47
    Mul(r47, init_1) -> r48
Shape(init_1) -> r49
Shape(x) -> r50
  BroadcastGradientArgs(r50, r49) -> r51, r52
    ReduceSum(r48, r51, keepdims=1, noop_with_empty_axes=1) -> r53
  Reshape(r53, r50, allowzero=0) -> r54
    Sum(r54, r45, r45) -> x_grad
ReduceSum(r11, r15, keepdims=1, noop_with_empty_axes=1) -> r55
  Reshape(r55, r12, allowzero=0) -> init_b10_grad
Mul(r37, r0) -> r56
  ReduceSum(r56, r42, keepdims=1, noop_with_empty_axes=1) -> r57
  Reshape(r57, r39, allowzero=0) -> init_grad
Mul(r47, x) -> r58
  ReduceSum(r58, r52, keepdims=1, noop_with_empty_axes=1) -> r59
  Reshape(r59, r49, allowzero=0) -> init_1_grad
output: name='x_grad' type=dtype('float32') shape=(0, 2)
output: name='init_grad' type=dtype('float32') shape=(1, 2)
output: name='init_1_grad' type=dtype('float32') shape=(1, 2)
output: name='init_b10_grad' type=dtype('float32') shape=(1,)
"""

# The loss alone is differentiated, with a cotangent of 1, and kept.
GRADIENT_OF_LOSS = """\
input: name='x' type=dtype('float32') shape=(0, 2)
input: name='label' type=dtype('float32') shape=(0, 1)
input: name='init' type=dtype('float32') shape=(1, 2)
input: name='init_1' type=dtype('float32') shape=(1, 2)
input: name='init_b10' type=dtype('float32') shape=(1,)
init: name='i0' type=dtype('int64') shape=(0,) -- array([-1,  1], dtype=int64)
init: name='i1' type=dtype('int64') shape=(0,) -- array([0], dtype=int64)
init: name='i2' type=dtype('int64') shape=(0,) -- array([1], dtype=int64)
init: name='i3' type=dtype('int64') shape=(0,) -- array([2], dtype=int64)
Mul(x, init_1) -> r0
  Shape(r0) -> r47
Mul(x, x) -> r1
  Mul(r1, init) -> r2
  Add(r0, r2) -> r3
    Slice(r3, i1, i2, i2) -> r4
      Squeeze(r4, i2) -> r5
        Shape(r5) -> r33
    Slice(r3, i2, i3, i2) -> r6
      Squeeze(r6, i2) -> r7
        Add(r5, r7) -> r8
          Add(r8, init_b10) -> r9
            Reshape(r9, i0, allowzero=0) -> r10
              Sub(r10, label) -> r11
                Mul(r11, r11) -> r12
                  ReduceSum(r12, keepdims=1, noop_with_empty_axes=0) -> loss
                    Shape(loss) -> r76
                      ConstantOfShape(r76) -> r14
                  Shape(r12) -> r13
                    Expand(r14, r13) -> r15
                Mul(r15, r11) -> r16
                  Sum(r16, r16) -> r17
Shape(label) -> r18
Shape(r10) -> r19
  BroadcastGradientArgs(r19, r18) -> r20, r21
    ReduceSum(r17, r20, keepdims=1, noop_with_empty_axes=1) -> r22
  Reshape(r22, r19, allowzero=0) -> r23
Shape(r9) -> r24
  Reshape(r23, r24, allowzero=0) -> r25
Shape(init_b10) -> r26
Shape(r8) -> r27
  BroadcastGradientArgs(r27, r26) -> r28, r29
    ReduceSum(r25, r28, keepdims=1, noop_with_empty_axes=1) -> r30
  Reshape(r30, r27, allowzero=0) -> r31
Shape(r7) -> r32
  BroadcastGradientArgs(r33, r32) -> r34, r35
    ReduceSum(r31, r34, keepdims=1, noop_with_empty_axes=1) -> r36
      Reshape(r36, r33, allowzero=0) -> r37
        Unsqueeze(r37, i2) -> r38
    Shape(r3) -> r39
      SliceGrad(r38, r39, i1, i2, i2) -> r40
    ReduceSum(r31, r35, keepdims=1, noop_with_empty_axes=1) -> r41
  Reshape(r41, r32, allowzero=0) -> r42
    Unsqueeze(r42, i2) -> r43
      SliceGrad(r43, r39, i2, i3, i2) -> r44
        Sum(r44, r40) -> r45
    Shape(r2) -> r46
    BroadcastGradientArgs(r47, r46) -> r48, r49
      ReduceSum(r45, r48, keepdims=1, noop_with_empty_axes=1) -> r50
    Reshape(r50, r47, allowzero=0) -> r51
      Mul(r51, init_1) -> r52
Shape(init_1) -> r53
Shape(x) -> r54
  BroadcastGradientArgs(r54, r53) -> r55, r56
    ReduceSum(r52, r55, keepdims=1, noop_with_empty_axes=1) -> r57
  Reshape(r57, r54, allowzero=0) -> r58
ReduceSum(r45, r49, keepdims=1, noop_with_empty_axes=1) -> r59
  Reshape(r59, r46, allowzero=0) -> r60
    Mul(r60, init) -> r61
Shape(init) -> r62
Shape(r1) -> r63
  BroadcastGradientArgs(r63, r62) -> r64, r65
    ReduceSum(r61, r64, keepdims=1, noop_with_empty_axes=1) -> r66
  Reshape(r66, r63, allowzero=0) -> r67
    Mul(r67, x) -> r68
    Sum(r68, r68, r58) -> x_grad
ReduceSum(r17, r21, keepdims=1, noop_with_empty_axes=1) -> r69
  Reshape(r69, r18, allowzero=0) -> r70
    Neg(r70) -> label_grad
ReduceSum(r25, r29, keepdims=1, noop_with_empty_axes=1) -> r71
  Reshape(r71, r26, allowzero=0) -> init_b10_grad
Mul(r51, x) -> r72
  ReduceSum(r72, r56, keepdims=1, noop_with_empty_axes=1) -> r73
  Reshape(r73, r53, allowzero=0) -> init_1_grad
Mul(r60, r1) -> r74
  ReduceSum(r74, r65, keepdims=1, noop_with_empty_axes=1) -> r75
  Reshape(r75, r62, allowzero=0) -> init_grad
output: name='x_grad' type=dtype('float32') shape=(0, 2)
output: name='label_grad' type=dtype('float32') shape=(0, 1)
output: name='init_grad' type=dtype('float32') shape=(1, 2)
output: name='init_1_grad' type=dtype('float32') shape=(1, 2)
output: name='init_b10_grad' type=dtype('float32') shape=(1,)
output: name='loss' type=dtype('float32') shape=(1, 1)
"""


def nodes_of(listing: str) -> list[str]:
    """The lines of the nodes."""
    return [line for line in listing.splitlines() if " -> " in line]


needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")


def parse(body: str, inputs: str = "float[N] x", outputs: str = "float[N] y", rest: str = "") -> ModelProto:
    head = '<ir_version: 10, opset_import: ["": 18, "local": 1, "com.microsoft": 1, "ai.onnx.ml": 3]>'
    return onnx.parser.parse_model(f"{head} g ({inputs}) => ({outputs}) {{ {body} }} {rest}")


BRANCHES = parse(
    "a = Exp(x)  y = If(c) <"
    "then_branch = t () => (float[N] u) { u = Neg(a) }, "
    "else_branch = e () => (float[N] v) { p = local.f<alpha = 2.0>(a)  v = com.microsoft.Gelu(p) }>",
    "float[N] x, bool c",
    rest='<domain: "local", opset_import: ["": 18]> f <alpha: float = 1.0> (s) => (t) '
    "{ t = Elu<alpha: float = @alpha>(s) }",
)


def initialized(*tensors: TensorProto, sparse: bool = False) -> ModelProto:
    graph = helper.make_graph([], "g", [], [], list(tensors))
    if sparse:
        values = helper.make_tensor("s", TensorProto.FLOAT, [2], [1, 2])
        indices = helper.make_tensor("", TensorProto.INT64, [2], [3, 5])
        graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [100]))
    return helper.make_model(graph)


_IDENTIFIER = r'([A-Za-z_]\w*|"(?:[^"\\]|\\.)*")'
_BOX = re.compile(rf'{_IDENTIFIER} \[(?:\w+=(?:\w+|"(?:[^"\\]|\\.)*") ?)+\];', re.DOTALL)
_ARROW = re.compile(rf"{_IDENTIFIER} -> {_IDENTIFIER}(?: \[style=dashed\])?;", re.DOTALL)
_OTHER = re.compile(r'digraph\{|subgraph cluster_\d+ \{|\}|\w+=[\w.]+;|label="(?:[^"\\]|\\.)*" fontsize=10;')


def assert_dot(picture: str) -> list[str]:
    """Fail unless every line is a statement, no two boxes share an identifier, and arrows touch boxes only; the boxes."""
    boxes, ends = [], set()
    for line in filter(None, map(str.strip, picture.splitlines())):
        if box := _BOX.fullmatch(line):
            boxes.append(box[1])
        elif arrow := _ARROW.fullmatch(line):
            ends.update(arrow.groups())
        else:
            assert _OTHER.fullmatch(line), line
    assert len(boxes) == len(set(boxes))
    assert ends <= set(boxes)
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", picture)
    assert bare.count("{") == bare.count("}")
    return boxes
