"""Models that are small enough to be walked by hand: what the tests of the page show."""

import numpy as np
import onnx
import onnx.parser

HOSTILE = "</script><img src=x onerror=alert(1)>{{data}}"


def numbers(size: int, seed: int = 0) -> str:
    return ", ".join(f"{x:.2f}" for x in np.random.default_rng(seed).normal(size=size))


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')


def regression() -> onnx.ModelProto:
    """The linear regression of onnxcustom's notebook, with its loss."""
    return parsed(
        """line (float[N, 2] X, float[N, 1] label) => (float loss)
        <float[2, 1] coefficient = {0.5, -1}, float[1, 1] intercepts = {0.25}, int64[2] shape_tensor = {-1, 1}> {
            p = MatMul(X, coefficient)
            s = Add(p, intercepts)
            variable = Reshape(s, shape_tensor)
            error = Sub(variable, label)
            square = Mul(error, error)
            loss = ReduceSum <keepdims = 0> (square)
        }"""
    )


def mlp() -> onnx.ModelProto:
    return parsed(
        f"""mlp (float[4, 3] x, int64[4] label) => (float loss)
        <float[3, 5] W1 = {{{numbers(15)}}}, float[5] b1 = {{{numbers(5, 1)}}}, float[5, 2] W2 = {{{numbers(10, 2)}}}> {{
            h = MatMul(x, W1)
            hb = Add(h, b1)
            a = Relu(hb)
            s = Gemm(a, W2)
            loss = SoftmaxCrossEntropyLoss(s, label)
        }}"""
    )


def attention() -> onnx.ModelProto:
    """One head of attention with a residual connection: fan-outs, a softmax, a norm, an activation."""
    return parsed(
        f"""attention (float[3, 4] x) => (float loss)
        <float[4, 4] Q = {{{numbers(16)}}}, float[4, 4] K = {{{numbers(16, 1)}}}, float[4, 4] V = {{{numbers(16, 2)}}},
         float[4] g = {{1, 0.5, 2, 1}}, float scale = {{0.5}}> {{
            q = MatMul(x, Q)
            k = MatMul(x, K)
            v = MatMul(x, V)
            kt = Transpose <perm = [1, 0]> (k)
            raw = MatMul(q, kt)
            scores = Mul(raw, scale)
            p = Softmax <axis = -1> (scores)
            mixed = MatMul(p, v)
            residual = Add(mixed, x)
            normed = LayerNormalization <axis = -1> (residual, g)
            active = Tanh(normed)
            loss = ReduceMean <keepdims = 0> (active)
        }}"""
    )


def convolution() -> onnx.ModelProto:
    return parsed(
        f"""convolution (float[1, 2, 6, 6] x) => (float loss)
        <float[3, 2, 3, 3] W = {{{numbers(54)}}}, float[3] b = {{0.1, -0.2, 0.3}}> {{
            c = Conv <pads = [1, 1, 1, 1], strides = [1, 1]> (x, W, b)
            a = Sigmoid(c)
            m = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)
            loss = ReduceMean <keepdims = 0> (m)
        }}"""
    )


def lstm() -> onnx.ModelProto:
    return parsed(
        f"""lstm (float[3, 2, 2] x) => (float loss)
        <float[1, 12, 2] W = {{{numbers(24)}}}, float[1, 12, 3] R = {{{numbers(36, 1)}}}> {{
            Y, Y_h = LSTM <hidden_size = 3> (x, W, R)
            square = Mul(Y_h, Y_h)
            loss = ReduceSum <keepdims = 0> (square)
        }}"""
    )


def loop() -> onnx.ModelProto:
    """x, multiplied by w as often as the loop runs."""
    return parsed(
        """loop (float[2] x, float[2] w) => (float loss) <int64 three = {3}, bool yes = {1}> {
            last = Loop (three, yes, x) <body = body (int64 i, bool go, float[2] state) => (bool on, float[2] next) {
                on = Identity(go)
                next = Mul(state, w)
            }>
            loss = ReduceSum <keepdims = 0> (last)
        }"""
    )


def hostile() -> onnx.ModelProto:
    """A model whose names are markup, and what the page's template replaces."""
    model = parsed("agraph (float[2] x) => (float loss) { y = Exp(x) loss = ReduceSum <keepdims = 0> (y) }")
    model.graph.name = HOSTILE
    for node in model.graph.node:
        node.name = f"{node.op_type}{HOSTILE}"
        node.input[:] = [f"{name}{HOSTILE}" if name in ("x", "y") else name for name in node.input]
        node.output[:] = [f"{name}{HOSTILE}" if name == "y" else name for name in node.output]
    model.graph.input[0].name += HOSTILE
    return model


def long(count: int = 2000) -> onnx.ModelProto:
    """A chain of blocks that repeat."""
    lines, before = [], "x"
    for k in range(count // 4):
        lines.append(f"a{k} = Mul({before}, w) b{k} = Tanh(a{k}) c{k} = Add(b{k}, {before}) d{k} = Sin(c{k})")
        before = f"d{k}"
    text = " ".join(lines)
    return parsed(
        f"long (float[2, 4] x) => (float loss) <float[4] w = {{1, -1, 0.5, 2}}> "
        f"{{ {text} loss = ReduceSum <keepdims = 0> ({before}) }}"
    )


MODELS = {one.__name__: one for one in (regression, mlp, attention, convolution, lstm, loop)}
