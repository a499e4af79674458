# Written by docs/generate.py from the schemas of ai.onnx.
"""`op.Mul(a, b)`: a method for every operator of ai.onnx."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np
from onnx import GraphProto, SparseTensorProto, TensorProto, TypeProto

Argument = str | float | Sequence[int] | np.ndarray | np.generic | None

class Operators:
    """One method per operator: it adds a node of ai.onnx and returns the name of its output, or a tuple of names."""

    @property
    def rule(self) -> str: ...
    @property
    def node(self) -> str: ...
    def emit(
        self,
        op_type: str,
        domain: str,
        inputs: Sequence[Argument],
        outputs: int,
        attributes: dict[str, Any],
        optional_outputs: bool = False,
    ) -> Any: ...
    @overload
    def com_microsoft(self, op_type: str, *inputs: Argument, outputs: Literal[1] = 1, **attributes: Any) -> str: ...
    @overload
    def com_microsoft(
        self, op_type: str, *inputs: Argument, outputs: Literal[2], **attributes: Any
    ) -> tuple[str, str]: ...
    @overload
    def com_microsoft(
        self, op_type: str, *inputs: Argument, outputs: Literal[3], **attributes: Any
    ) -> tuple[str, str, str]: ...
    @overload
    def com_microsoft(self, op_type: str, *inputs: Argument, outputs: int, **attributes: Any) -> Any: ...
    def Abs(self, X: Argument, /) -> str: ...
    def Acos(self, input: Argument, /) -> str: ...
    def Acosh(self, input: Argument, /) -> str: ...
    def Add(self, A: Argument, B: Argument, /) -> str: ...
    def AffineGrid(self, theta: Argument, size: Argument, /, *, align_corners: int | None = None) -> str: ...
    def And(self, A: Argument, B: Argument, /) -> str: ...
    def ArgMax(
        self,
        data: Argument,
        /,
        *,
        axis: int | None = None,
        keepdims: int | None = None,
        select_last_index: int | None = None,
    ) -> str: ...
    def ArgMin(
        self,
        data: Argument,
        /,
        *,
        axis: int | None = None,
        keepdims: int | None = None,
        select_last_index: int | None = None,
    ) -> str: ...
    def Asin(self, input: Argument, /) -> str: ...
    def Asinh(self, input: Argument, /) -> str: ...
    def Atan(self, input: Argument, /) -> str: ...
    def Atanh(self, input: Argument, /) -> str: ...
    @overload
    def Attention(
        self,
        Q: Argument,
        K: Argument,
        V: Argument,
        attn_mask: Argument = None,
        past_key: Argument = None,
        past_value: Argument = None,
        nonpad_kv_seqlen: Argument = None,
        /,
        *,
        outputs: Literal[1] = 1,
        is_causal: int | None = None,
        kv_num_heads: int | None = None,
        left_window_size: int | None = None,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int | None = None,
        right_window_size: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        softmax_precision: int | None = None,
    ) -> str: ...
    @overload
    def Attention(
        self,
        Q: Argument,
        K: Argument,
        V: Argument,
        attn_mask: Argument = None,
        past_key: Argument = None,
        past_value: Argument = None,
        nonpad_kv_seqlen: Argument = None,
        /,
        *,
        outputs: Literal[2],
        is_causal: int | None = None,
        kv_num_heads: int | None = None,
        left_window_size: int | None = None,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int | None = None,
        right_window_size: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        softmax_precision: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def Attention(
        self,
        Q: Argument,
        K: Argument,
        V: Argument,
        attn_mask: Argument = None,
        past_key: Argument = None,
        past_value: Argument = None,
        nonpad_kv_seqlen: Argument = None,
        /,
        *,
        outputs: Literal[3],
        is_causal: int | None = None,
        kv_num_heads: int | None = None,
        left_window_size: int | None = None,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int | None = None,
        right_window_size: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        softmax_precision: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def Attention(
        self,
        Q: Argument,
        K: Argument,
        V: Argument,
        attn_mask: Argument = None,
        past_key: Argument = None,
        past_value: Argument = None,
        nonpad_kv_seqlen: Argument = None,
        /,
        *,
        outputs: int,
        is_causal: int | None = None,
        kv_num_heads: int | None = None,
        left_window_size: int | None = None,
        q_num_heads: int | None = None,
        qk_matmul_output_mode: int | None = None,
        right_window_size: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        softmax_precision: int | None = None,
    ) -> str | tuple[str, ...]: ...
    def AveragePool(
        self,
        X: Argument,
        /,
        *,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        count_include_pad: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> str: ...
    @overload
    def BatchNormalization(
        self,
        X: Argument,
        scale: Argument,
        B: Argument,
        input_mean: Argument,
        input_var: Argument,
        /,
        *,
        outputs: Literal[1] = 1,
        epsilon: float | None = None,
        momentum: float | None = None,
        training_mode: int | None = None,
    ) -> str: ...
    @overload
    def BatchNormalization(
        self,
        X: Argument,
        scale: Argument,
        B: Argument,
        input_mean: Argument,
        input_var: Argument,
        /,
        *,
        outputs: Literal[2],
        epsilon: float | None = None,
        momentum: float | None = None,
        training_mode: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def BatchNormalization(
        self,
        X: Argument,
        scale: Argument,
        B: Argument,
        input_mean: Argument,
        input_var: Argument,
        /,
        *,
        outputs: Literal[3],
        epsilon: float | None = None,
        momentum: float | None = None,
        training_mode: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def BatchNormalization(
        self,
        X: Argument,
        scale: Argument,
        B: Argument,
        input_mean: Argument,
        input_var: Argument,
        /,
        *,
        outputs: int,
        epsilon: float | None = None,
        momentum: float | None = None,
        training_mode: int | None = None,
    ) -> str | tuple[str, ...]: ...
    def Bernoulli(self, input: Argument, /, *, dtype: int | None = None, seed: float | None = None) -> str: ...
    def BitCast(self, input: Argument, /, *, to: int | None = None) -> str: ...
    def BitShift(self, X: Argument, Y: Argument, /, *, direction: str | None = None) -> str: ...
    def BitwiseAnd(self, A: Argument, B: Argument, /) -> str: ...
    def BitwiseNot(self, X: Argument, /) -> str: ...
    def BitwiseOr(self, A: Argument, B: Argument, /) -> str: ...
    def BitwiseXor(self, A: Argument, B: Argument, /) -> str: ...
    def BlackmanWindow(
        self,
        size: Argument,
        /,
        *,
        output_datatype: int | None = None,
        periodic: int | None = None,
    ) -> str: ...
    def Cast(
        self,
        input: Argument,
        /,
        *,
        round_mode: str | None = None,
        saturate: int | None = None,
        to: int | None = None,
    ) -> str: ...
    def CastLike(
        self,
        input: Argument,
        target_type: Argument,
        /,
        *,
        round_mode: str | None = None,
        saturate: int | None = None,
    ) -> str: ...
    @overload
    def CausalConvWithState(
        self,
        input: Argument,
        weight: Argument,
        bias: Argument = None,
        past_state: Argument = None,
        /,
        *,
        outputs: Literal[1] = 1,
        activation: str | None = None,
    ) -> str: ...
    @overload
    def CausalConvWithState(
        self,
        input: Argument,
        weight: Argument,
        bias: Argument = None,
        past_state: Argument = None,
        /,
        *,
        outputs: Literal[2],
        activation: str | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def CausalConvWithState(
        self,
        input: Argument,
        weight: Argument,
        bias: Argument = None,
        past_state: Argument = None,
        /,
        *,
        outputs: Literal[3],
        activation: str | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def CausalConvWithState(
        self,
        input: Argument,
        weight: Argument,
        bias: Argument = None,
        past_state: Argument = None,
        /,
        *,
        outputs: int,
        activation: str | None = None,
    ) -> str | tuple[str, ...]: ...
    def Ceil(self, X: Argument, /) -> str: ...
    def Celu(self, X: Argument, /, *, alpha: float | None = None) -> str: ...
    def CenterCropPad(self, input_data: Argument, shape: Argument, /, *, axes: Sequence[int] | None = None) -> str: ...
    def Clip(self, input: Argument, min: Argument = None, max: Argument = None, /) -> str: ...
    def Col2Im(
        self,
        input: Argument,
        image_shape: Argument,
        block_shape: Argument,
        /,
        *,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> str: ...
    def Compress(self, input: Argument, condition: Argument, /, *, axis: int | None = None) -> str: ...
    def Concat(self, *inputs: Argument, axis: int | None = None) -> str: ...
    def ConcatFromSequence(
        self,
        input_sequence: Argument,
        /,
        *,
        axis: int | None = None,
        new_axis: int | None = None,
    ) -> str: ...
    def Constant(
        self,
        *,
        sparse_value: SparseTensorProto | None = None,
        value: TensorProto | None = None,
        value_float: float | None = None,
        value_floats: Sequence[float] | None = None,
        value_int: int | None = None,
        value_ints: Sequence[int] | None = None,
        value_string: str | None = None,
        value_strings: Sequence[str] | None = None,
    ) -> str: ...
    def ConstantOfShape(self, input: Argument, /, *, value: TensorProto | None = None) -> str: ...
    def Conv(
        self,
        X: Argument,
        W: Argument,
        B: Argument = None,
        /,
        *,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> str: ...
    def ConvInteger(
        self,
        x: Argument,
        w: Argument,
        x_zero_point: Argument = None,
        w_zero_point: Argument = None,
        /,
        *,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> str: ...
    def ConvTranspose(
        self,
        X: Argument,
        W: Argument,
        B: Argument = None,
        /,
        *,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        output_padding: Sequence[int] | None = None,
        output_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> str: ...
    def Cos(self, input: Argument, /) -> str: ...
    def Cosh(self, input: Argument, /) -> str: ...
    def CumProd(
        self,
        x: Argument,
        axis: Argument,
        /,
        *,
        exclusive: int | None = None,
        reverse: int | None = None,
    ) -> str: ...
    def CumSum(
        self,
        x: Argument,
        axis: Argument,
        /,
        *,
        exclusive: int | None = None,
        reverse: int | None = None,
    ) -> str: ...
    def DFT(
        self,
        input: Argument,
        dft_length: Argument = None,
        axis_: Argument = None,
        /,
        *,
        axis: int | None = None,
        inverse: int | None = None,
        onesided: int | None = None,
    ) -> str: ...
    def DeformConv(
        self,
        X: Argument,
        W: Argument,
        offset: Argument,
        B: Argument = None,
        mask: Argument = None,
        /,
        *,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        offset_group: int | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> str: ...
    def DepthToSpace(self, input: Argument, /, *, blocksize: int | None = None, mode: str | None = None) -> str: ...
    def DequantizeLinear(
        self,
        x: Argument,
        x_scale: Argument,
        x_zero_point: Argument = None,
        /,
        *,
        axis: int | None = None,
        block_size: int | None = None,
        output_dtype: int | None = None,
    ) -> str: ...
    def Det(self, X: Argument, /) -> str: ...
    def Div(self, A: Argument, B: Argument, /) -> str: ...
    @overload
    def Dropout(
        self,
        data: Argument,
        ratio: Argument = None,
        training_mode: Argument = None,
        /,
        *,
        outputs: Literal[1] = 1,
        seed: int | None = None,
    ) -> str: ...
    @overload
    def Dropout(
        self,
        data: Argument,
        ratio: Argument = None,
        training_mode: Argument = None,
        /,
        *,
        outputs: Literal[2],
        seed: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def Dropout(
        self,
        data: Argument,
        ratio: Argument = None,
        training_mode: Argument = None,
        /,
        *,
        outputs: Literal[3],
        seed: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def Dropout(
        self,
        data: Argument,
        ratio: Argument = None,
        training_mode: Argument = None,
        /,
        *,
        outputs: int,
        seed: int | None = None,
    ) -> str | tuple[str, ...]: ...
    @overload
    def DynamicQuantizeLinear(self, x: Argument, /, *, outputs: Literal[1] = 1) -> str: ...
    @overload
    def DynamicQuantizeLinear(self, x: Argument, /, *, outputs: Literal[2]) -> tuple[str, str]: ...
    @overload
    def DynamicQuantizeLinear(self, x: Argument, /, *, outputs: Literal[3]) -> tuple[str, str, str]: ...
    @overload
    def DynamicQuantizeLinear(self, x: Argument, /, *, outputs: int) -> str | tuple[str, ...]: ...
    def Einsum(self, *Inputs: Argument, equation: str | None = None) -> str: ...
    def Elu(self, X: Argument, /, *, alpha: float | None = None) -> str: ...
    def Equal(self, A: Argument, B: Argument, /) -> str: ...
    def Erf(self, input: Argument, /) -> str: ...
    def Exp(self, input: Argument, /) -> str: ...
    def Expand(self, input: Argument, shape: Argument, /) -> str: ...
    def EyeLike(self, input: Argument, /, *, dtype: int | None = None, k: int | None = None) -> str: ...
    def Flatten(self, input: Argument, /, *, axis: int | None = None) -> str: ...
    def Floor(self, X: Argument, /) -> str: ...
    @overload
    def GRU(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        /,
        *,
        outputs: Literal[1] = 1,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        layout: int | None = None,
        linear_before_reset: int | None = None,
    ) -> str: ...
    @overload
    def GRU(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        /,
        *,
        outputs: Literal[2],
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        layout: int | None = None,
        linear_before_reset: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def GRU(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        /,
        *,
        outputs: Literal[3],
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        layout: int | None = None,
        linear_before_reset: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def GRU(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        /,
        *,
        outputs: int,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        layout: int | None = None,
        linear_before_reset: int | None = None,
    ) -> str | tuple[str, ...]: ...
    def Gather(self, data: Argument, indices: Argument, /, *, axis: int | None = None) -> str: ...
    def GatherElements(self, data: Argument, indices: Argument, /, *, axis: int | None = None) -> str: ...
    def GatherND(self, data: Argument, indices: Argument, /, *, batch_dims: int | None = None) -> str: ...
    def Gelu(self, X: Argument, /, *, approximate: str | None = None) -> str: ...
    def Gemm(
        self,
        A: Argument,
        B: Argument,
        C: Argument = None,
        /,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        transA: int | None = None,
        transB: int | None = None,
    ) -> str: ...
    def GlobalAveragePool(self, X: Argument, /) -> str: ...
    def GlobalLpPool(self, X: Argument, /, *, p: int | None = None) -> str: ...
    def GlobalMaxPool(self, X: Argument, /) -> str: ...
    def Greater(self, A: Argument, B: Argument, /) -> str: ...
    def GreaterOrEqual(self, A: Argument, B: Argument, /) -> str: ...
    def GridSample(
        self,
        X: Argument,
        grid: Argument,
        /,
        *,
        align_corners: int | None = None,
        mode: str | None = None,
        padding_mode: str | None = None,
    ) -> str: ...
    def GroupNormalization(
        self,
        X: Argument,
        scale: Argument,
        bias: Argument,
        /,
        *,
        epsilon: float | None = None,
        num_groups: int | None = None,
        stash_type: int | None = None,
    ) -> str: ...
    def HammingWindow(
        self,
        size: Argument,
        /,
        *,
        output_datatype: int | None = None,
        periodic: int | None = None,
    ) -> str: ...
    def HannWindow(
        self,
        size: Argument,
        /,
        *,
        output_datatype: int | None = None,
        periodic: int | None = None,
    ) -> str: ...
    def HardSigmoid(self, X: Argument, /, *, alpha: float | None = None, beta: float | None = None) -> str: ...
    def HardSwish(self, X: Argument, /) -> str: ...
    def Hardmax(self, input: Argument, /, *, axis: int | None = None) -> str: ...
    def Identity(self, input: Argument, /) -> str: ...
    @overload
    def If(
        self,
        cond: Argument,
        /,
        *,
        outputs: Literal[1] = 1,
        else_branch: GraphProto | None = None,
        then_branch: GraphProto | None = None,
    ) -> str: ...
    @overload
    def If(
        self,
        cond: Argument,
        /,
        *,
        outputs: Literal[2],
        else_branch: GraphProto | None = None,
        then_branch: GraphProto | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def If(
        self,
        cond: Argument,
        /,
        *,
        outputs: Literal[3],
        else_branch: GraphProto | None = None,
        then_branch: GraphProto | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def If(
        self,
        cond: Argument,
        /,
        *,
        outputs: int,
        else_branch: GraphProto | None = None,
        then_branch: GraphProto | None = None,
    ) -> str | tuple[str, ...]: ...
    def ImageDecoder(self, encoded_stream: Argument, /, *, pixel_format: str | None = None) -> str: ...
    def InstanceNormalization(
        self,
        input: Argument,
        scale: Argument,
        B: Argument,
        /,
        *,
        epsilon: float | None = None,
    ) -> str: ...
    def IsInf(
        self,
        X: Argument,
        /,
        *,
        detect_negative: int | None = None,
        detect_positive: int | None = None,
    ) -> str: ...
    def IsNaN(self, X: Argument, /) -> str: ...
    def LRN(
        self,
        X: Argument,
        /,
        *,
        alpha: float | None = None,
        beta: float | None = None,
        bias: float | None = None,
        size: int | None = None,
    ) -> str: ...
    @overload
    def LSTM(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        initial_c: Argument = None,
        P: Argument = None,
        /,
        *,
        outputs: Literal[1] = 1,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        input_forget: int | None = None,
        layout: int | None = None,
    ) -> str: ...
    @overload
    def LSTM(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        initial_c: Argument = None,
        P: Argument = None,
        /,
        *,
        outputs: Literal[2],
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        input_forget: int | None = None,
        layout: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def LSTM(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        initial_c: Argument = None,
        P: Argument = None,
        /,
        *,
        outputs: Literal[3],
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        input_forget: int | None = None,
        layout: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def LSTM(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        initial_c: Argument = None,
        P: Argument = None,
        /,
        *,
        outputs: int,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        input_forget: int | None = None,
        layout: int | None = None,
    ) -> str | tuple[str, ...]: ...
    @overload
    def LayerNormalization(
        self,
        X: Argument,
        Scale: Argument,
        B: Argument = None,
        /,
        *,
        outputs: Literal[1] = 1,
        axis: int | None = None,
        epsilon: float | None = None,
        stash_type: int | None = None,
    ) -> str: ...
    @overload
    def LayerNormalization(
        self,
        X: Argument,
        Scale: Argument,
        B: Argument = None,
        /,
        *,
        outputs: Literal[2],
        axis: int | None = None,
        epsilon: float | None = None,
        stash_type: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def LayerNormalization(
        self,
        X: Argument,
        Scale: Argument,
        B: Argument = None,
        /,
        *,
        outputs: Literal[3],
        axis: int | None = None,
        epsilon: float | None = None,
        stash_type: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def LayerNormalization(
        self,
        X: Argument,
        Scale: Argument,
        B: Argument = None,
        /,
        *,
        outputs: int,
        axis: int | None = None,
        epsilon: float | None = None,
        stash_type: int | None = None,
    ) -> str | tuple[str, ...]: ...
    def LeakyRelu(self, X: Argument, /, *, alpha: float | None = None) -> str: ...
    def Less(self, A: Argument, B: Argument, /) -> str: ...
    def LessOrEqual(self, A: Argument, B: Argument, /) -> str: ...
    @overload
    def LinearAttention(
        self,
        query: Argument,
        key: Argument,
        value: Argument,
        past_state: Argument = None,
        decay: Argument = None,
        beta: Argument = None,
        /,
        *,
        outputs: Literal[1] = 1,
        chunk_size: int | None = None,
        kv_num_heads: int | None = None,
        q_num_heads: int | None = None,
        scale: float | None = None,
        update_rule: str | None = None,
    ) -> str: ...
    @overload
    def LinearAttention(
        self,
        query: Argument,
        key: Argument,
        value: Argument,
        past_state: Argument = None,
        decay: Argument = None,
        beta: Argument = None,
        /,
        *,
        outputs: Literal[2],
        chunk_size: int | None = None,
        kv_num_heads: int | None = None,
        q_num_heads: int | None = None,
        scale: float | None = None,
        update_rule: str | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def LinearAttention(
        self,
        query: Argument,
        key: Argument,
        value: Argument,
        past_state: Argument = None,
        decay: Argument = None,
        beta: Argument = None,
        /,
        *,
        outputs: Literal[3],
        chunk_size: int | None = None,
        kv_num_heads: int | None = None,
        q_num_heads: int | None = None,
        scale: float | None = None,
        update_rule: str | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def LinearAttention(
        self,
        query: Argument,
        key: Argument,
        value: Argument,
        past_state: Argument = None,
        decay: Argument = None,
        beta: Argument = None,
        /,
        *,
        outputs: int,
        chunk_size: int | None = None,
        kv_num_heads: int | None = None,
        q_num_heads: int | None = None,
        scale: float | None = None,
        update_rule: str | None = None,
    ) -> str | tuple[str, ...]: ...
    def Log(self, input: Argument, /) -> str: ...
    def LogSoftmax(self, input: Argument, /, *, axis: int | None = None) -> str: ...
    @overload
    def Loop(
        self,
        M: Argument = None,
        cond: Argument = None,
        *v_initial: Argument,
        outputs: Literal[1] = 1,
        body: GraphProto | None = None,
    ) -> str: ...
    @overload
    def Loop(
        self,
        M: Argument = None,
        cond: Argument = None,
        *v_initial: Argument,
        outputs: Literal[2],
        body: GraphProto | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def Loop(
        self,
        M: Argument = None,
        cond: Argument = None,
        *v_initial: Argument,
        outputs: Literal[3],
        body: GraphProto | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def Loop(
        self,
        M: Argument = None,
        cond: Argument = None,
        *v_initial: Argument,
        outputs: int,
        body: GraphProto | None = None,
    ) -> str | tuple[str, ...]: ...
    def LpNormalization(self, input: Argument, /, *, axis: int | None = None, p: int | None = None) -> str: ...
    def LpPool(
        self,
        X: Argument,
        /,
        *,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] | None = None,
        p: int | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> str: ...
    def MatMul(self, A: Argument, B: Argument, /) -> str: ...
    def MatMulInteger(
        self,
        A: Argument,
        B: Argument,
        a_zero_point: Argument = None,
        b_zero_point: Argument = None,
        /,
    ) -> str: ...
    def Max(self, *data_0: Argument) -> str: ...
    @overload
    def MaxPool(
        self,
        X: Argument,
        /,
        *,
        outputs: Literal[1] = 1,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        storage_order: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> str: ...
    @overload
    def MaxPool(
        self,
        X: Argument,
        /,
        *,
        outputs: Literal[2],
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        storage_order: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def MaxPool(
        self,
        X: Argument,
        /,
        *,
        outputs: Literal[3],
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        storage_order: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def MaxPool(
        self,
        X: Argument,
        /,
        *,
        outputs: int,
        auto_pad: str | None = None,
        ceil_mode: int | None = None,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        storage_order: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> str | tuple[str, ...]: ...
    def MaxRoiPool(
        self,
        X: Argument,
        rois: Argument,
        /,
        *,
        pooled_shape: Sequence[int] | None = None,
        spatial_scale: float | None = None,
    ) -> str: ...
    def MaxUnpool(
        self,
        X: Argument,
        I: Argument,
        output_shape: Argument = None,
        /,
        *,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> str: ...
    def Mean(self, *data_0: Argument) -> str: ...
    def MeanVarianceNormalization(self, X: Argument, /, *, axes: Sequence[int] | None = None) -> str: ...
    def MelWeightMatrix(
        self,
        num_mel_bins: Argument,
        dft_length: Argument,
        sample_rate: Argument,
        lower_edge_hertz: Argument,
        upper_edge_hertz: Argument,
        /,
        *,
        output_datatype: int | None = None,
    ) -> str: ...
    def Min(self, *data_0: Argument) -> str: ...
    def Mish(self, X: Argument, /) -> str: ...
    def Mod(self, A: Argument, B: Argument, /, *, fmod: int | None = None) -> str: ...
    def Mul(self, A: Argument, B: Argument, /) -> str: ...
    def Multinomial(
        self,
        input: Argument,
        /,
        *,
        dtype: int | None = None,
        sample_size: int | None = None,
        seed: float | None = None,
    ) -> str: ...
    def Neg(self, X: Argument, /) -> str: ...
    def NegativeLogLikelihoodLoss(
        self,
        input: Argument,
        target: Argument,
        weight: Argument = None,
        /,
        *,
        ignore_index: int | None = None,
        reduction: str | None = None,
    ) -> str: ...
    def NonMaxSuppression(
        self,
        boxes: Argument,
        scores: Argument,
        max_output_boxes_per_class: Argument = None,
        iou_threshold: Argument = None,
        score_threshold: Argument = None,
        /,
        *,
        center_point_box: int | None = None,
    ) -> str: ...
    def NonZero(self, X: Argument, /) -> str: ...
    def Not(self, X: Argument, /) -> str: ...
    def OneHot(self, indices: Argument, depth: Argument, values: Argument, /, *, axis: int | None = None) -> str: ...
    def Optional(self, input: Argument = None, /, *, type: TypeProto | None = None) -> str: ...
    def OptionalGetElement(self, input: Argument, /) -> str: ...
    def OptionalHasElement(self, input: Argument = None, /) -> str: ...
    def Or(self, A: Argument, B: Argument, /) -> str: ...
    def PRelu(self, X: Argument, slope: Argument, /) -> str: ...
    def Pad(
        self,
        data: Argument,
        pads: Argument,
        constant_value: Argument = None,
        axes: Argument = None,
        /,
        *,
        mode: str | None = None,
    ) -> str: ...
    def Pow(self, X: Argument, Y: Argument, /) -> str: ...
    def QLinearConv(
        self,
        x: Argument,
        x_scale: Argument,
        x_zero_point: Argument,
        w: Argument,
        w_scale: Argument,
        w_zero_point: Argument,
        y_scale: Argument,
        y_zero_point: Argument,
        B: Argument = None,
        /,
        *,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> str: ...
    def QLinearMatMul(
        self,
        a: Argument,
        a_scale: Argument,
        a_zero_point: Argument,
        b: Argument,
        b_scale: Argument,
        b_zero_point: Argument,
        y_scale: Argument,
        y_zero_point: Argument,
        /,
    ) -> str: ...
    def QuantizeLinear(
        self,
        x: Argument,
        y_scale: Argument,
        y_zero_point: Argument = None,
        /,
        *,
        axis: int | None = None,
        block_size: int | None = None,
        output_dtype: int | None = None,
        precision: int | None = None,
        saturate: int | None = None,
    ) -> str: ...
    def RMSNormalization(
        self,
        X: Argument,
        scale: Argument,
        /,
        *,
        axis: int | None = None,
        epsilon: float | None = None,
        stash_type: int | None = None,
    ) -> str: ...
    @overload
    def RNN(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        /,
        *,
        outputs: Literal[1] = 1,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        layout: int | None = None,
    ) -> str: ...
    @overload
    def RNN(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        /,
        *,
        outputs: Literal[2],
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        layout: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def RNN(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        /,
        *,
        outputs: Literal[3],
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        layout: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def RNN(
        self,
        X: Argument,
        W: Argument,
        R: Argument,
        B: Argument = None,
        sequence_lens: Argument = None,
        initial_h: Argument = None,
        /,
        *,
        outputs: int,
        activation_alpha: Sequence[float] | None = None,
        activation_beta: Sequence[float] | None = None,
        activations: Sequence[str] | None = None,
        clip: float | None = None,
        direction: str | None = None,
        hidden_size: int | None = None,
        layout: int | None = None,
    ) -> str | tuple[str, ...]: ...
    def RandomNormal(
        self,
        *,
        dtype: int | None = None,
        mean: float | None = None,
        scale: float | None = None,
        seed: float | None = None,
        shape: Sequence[int] | None = None,
    ) -> str: ...
    def RandomNormalLike(
        self,
        input: Argument,
        /,
        *,
        dtype: int | None = None,
        mean: float | None = None,
        scale: float | None = None,
        seed: float | None = None,
    ) -> str: ...
    def RandomUniform(
        self,
        *,
        dtype: int | None = None,
        high: float | None = None,
        low: float | None = None,
        seed: float | None = None,
        shape: Sequence[int] | None = None,
    ) -> str: ...
    def RandomUniformLike(
        self,
        input: Argument,
        /,
        *,
        dtype: int | None = None,
        high: float | None = None,
        low: float | None = None,
        seed: float | None = None,
    ) -> str: ...
    def Range(self, start: Argument, limit: Argument, delta: Argument, /, *, stash_type: int | None = None) -> str: ...
    def Reciprocal(self, X: Argument, /) -> str: ...
    def ReduceL1(
        self,
        data: Argument,
        axes_: Argument = None,
        /,
        *,
        axes: Sequence[int] | None = None,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> str: ...
    def ReduceL2(
        self,
        data: Argument,
        axes_: Argument = None,
        /,
        *,
        axes: Sequence[int] | None = None,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> str: ...
    def ReduceLogSum(
        self,
        data: Argument,
        axes_: Argument = None,
        /,
        *,
        axes: Sequence[int] | None = None,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> str: ...
    def ReduceLogSumExp(
        self,
        data: Argument,
        axes_: Argument = None,
        /,
        *,
        axes: Sequence[int] | None = None,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> str: ...
    def ReduceMax(
        self,
        data: Argument,
        axes_: Argument = None,
        /,
        *,
        axes: Sequence[int] | None = None,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> str: ...
    def ReduceMean(
        self,
        data: Argument,
        axes_: Argument = None,
        /,
        *,
        axes: Sequence[int] | None = None,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> str: ...
    def ReduceMin(
        self,
        data: Argument,
        axes_: Argument = None,
        /,
        *,
        axes: Sequence[int] | None = None,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> str: ...
    def ReduceProd(
        self,
        data: Argument,
        axes_: Argument = None,
        /,
        *,
        axes: Sequence[int] | None = None,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> str: ...
    def ReduceSum(
        self,
        data: Argument,
        axes: Argument = None,
        /,
        *,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> str: ...
    def ReduceSumSquare(
        self,
        data: Argument,
        axes_: Argument = None,
        /,
        *,
        axes: Sequence[int] | None = None,
        keepdims: int | None = None,
        noop_with_empty_axes: int | None = None,
    ) -> str: ...
    def RegexFullMatch(self, X: Argument, /, *, pattern: str | None = None) -> str: ...
    def Relu(self, X: Argument, /) -> str: ...
    def Reshape(self, data: Argument, shape: Argument, /, *, allowzero: int | None = None) -> str: ...
    def Resize(
        self,
        X: Argument,
        roi: Argument = None,
        scales: Argument = None,
        sizes: Argument = None,
        /,
        *,
        antialias: int | None = None,
        axes: Sequence[int] | None = None,
        coordinate_transformation_mode: str | None = None,
        cubic_coeff_a: float | None = None,
        exclude_outside: int | None = None,
        extrapolation_value: float | None = None,
        keep_aspect_ratio_policy: str | None = None,
        mode: str | None = None,
        nearest_mode: str | None = None,
    ) -> str: ...
    def ReverseSequence(
        self,
        input: Argument,
        sequence_lens: Argument,
        /,
        *,
        batch_axis: int | None = None,
        time_axis: int | None = None,
    ) -> str: ...
    def RoiAlign(
        self,
        X: Argument,
        rois: Argument,
        batch_indices: Argument,
        /,
        *,
        coordinate_transformation_mode: str | None = None,
        mode: str | None = None,
        output_height: int | None = None,
        output_width: int | None = None,
        sampling_ratio: int | None = None,
        spatial_scale: float | None = None,
    ) -> str: ...
    def RotaryEmbedding(
        self,
        X: Argument,
        cos_cache: Argument,
        sin_cache: Argument,
        position_ids: Argument = None,
        /,
        *,
        interleaved: int | None = None,
        num_heads: int | None = None,
        rotary_embedding_dim: int | None = None,
    ) -> str: ...
    def Round(self, X: Argument, /) -> str: ...
    def STFT(
        self,
        signal: Argument,
        frame_step: Argument,
        window: Argument = None,
        frame_length: Argument = None,
        /,
        *,
        onesided: int | None = None,
    ) -> str: ...
    @overload
    def Scan(
        self,
        *initial_state_and_scan_inputs: Argument,
        outputs: Literal[1] = 1,
        body: GraphProto | None = None,
        num_scan_inputs: int | None = None,
        scan_input_axes: Sequence[int] | None = None,
        scan_input_directions: Sequence[int] | None = None,
        scan_output_axes: Sequence[int] | None = None,
        scan_output_directions: Sequence[int] | None = None,
    ) -> str: ...
    @overload
    def Scan(
        self,
        *initial_state_and_scan_inputs: Argument,
        outputs: Literal[2],
        body: GraphProto | None = None,
        num_scan_inputs: int | None = None,
        scan_input_axes: Sequence[int] | None = None,
        scan_input_directions: Sequence[int] | None = None,
        scan_output_axes: Sequence[int] | None = None,
        scan_output_directions: Sequence[int] | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def Scan(
        self,
        *initial_state_and_scan_inputs: Argument,
        outputs: Literal[3],
        body: GraphProto | None = None,
        num_scan_inputs: int | None = None,
        scan_input_axes: Sequence[int] | None = None,
        scan_input_directions: Sequence[int] | None = None,
        scan_output_axes: Sequence[int] | None = None,
        scan_output_directions: Sequence[int] | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def Scan(
        self,
        *initial_state_and_scan_inputs: Argument,
        outputs: int,
        body: GraphProto | None = None,
        num_scan_inputs: int | None = None,
        scan_input_axes: Sequence[int] | None = None,
        scan_input_directions: Sequence[int] | None = None,
        scan_output_axes: Sequence[int] | None = None,
        scan_output_directions: Sequence[int] | None = None,
    ) -> str | tuple[str, ...]: ...
    def ScatterElements(
        self,
        data: Argument,
        indices: Argument,
        updates: Argument,
        /,
        *,
        axis: int | None = None,
        reduction: str | None = None,
    ) -> str: ...
    def ScatterND(
        self,
        data: Argument,
        indices: Argument,
        updates: Argument,
        /,
        *,
        reduction: str | None = None,
    ) -> str: ...
    def Selu(self, X: Argument, /, *, alpha: float | None = None, gamma: float | None = None) -> str: ...
    def SequenceAt(self, input_sequence: Argument, position: Argument, /) -> str: ...
    def SequenceConstruct(self, *inputs: Argument) -> str: ...
    def SequenceEmpty(self, *, dtype: int | None = None) -> str: ...
    def SequenceErase(self, input_sequence: Argument, position: Argument = None, /) -> str: ...
    def SequenceInsert(self, input_sequence: Argument, tensor: Argument, position: Argument = None, /) -> str: ...
    def SequenceLength(self, input_sequence: Argument, /) -> str: ...
    @overload
    def SequenceMap(
        self,
        input_sequence: Argument,
        *additional_inputs: Argument,
        outputs: Literal[1] = 1,
        body: GraphProto | None = None,
    ) -> str: ...
    @overload
    def SequenceMap(
        self,
        input_sequence: Argument,
        *additional_inputs: Argument,
        outputs: Literal[2],
        body: GraphProto | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def SequenceMap(
        self,
        input_sequence: Argument,
        *additional_inputs: Argument,
        outputs: Literal[3],
        body: GraphProto | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def SequenceMap(
        self,
        input_sequence: Argument,
        *additional_inputs: Argument,
        outputs: int,
        body: GraphProto | None = None,
    ) -> str | tuple[str, ...]: ...
    def Shape(self, data: Argument, /, *, end: int | None = None, start: int | None = None) -> str: ...
    def Shrink(self, input: Argument, /, *, bias: float | None = None, lambd: float | None = None) -> str: ...
    def Sigmoid(self, X: Argument, /) -> str: ...
    def Sign(self, input: Argument, /) -> str: ...
    def Sin(self, input: Argument, /) -> str: ...
    def Sinh(self, input: Argument, /) -> str: ...
    def Size(self, data: Argument, /) -> str: ...
    def Slice(
        self,
        data: Argument,
        starts: Argument,
        ends: Argument,
        axes: Argument = None,
        steps: Argument = None,
        /,
    ) -> str: ...
    def Softmax(self, input: Argument, /, *, axis: int | None = None) -> str: ...
    @overload
    def SoftmaxCrossEntropyLoss(
        self,
        scores: Argument,
        labels: Argument,
        weights: Argument = None,
        /,
        *,
        outputs: Literal[1] = 1,
        ignore_index: int | None = None,
        reduction: str | None = None,
    ) -> str: ...
    @overload
    def SoftmaxCrossEntropyLoss(
        self,
        scores: Argument,
        labels: Argument,
        weights: Argument = None,
        /,
        *,
        outputs: Literal[2],
        ignore_index: int | None = None,
        reduction: str | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def SoftmaxCrossEntropyLoss(
        self,
        scores: Argument,
        labels: Argument,
        weights: Argument = None,
        /,
        *,
        outputs: Literal[3],
        ignore_index: int | None = None,
        reduction: str | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def SoftmaxCrossEntropyLoss(
        self,
        scores: Argument,
        labels: Argument,
        weights: Argument = None,
        /,
        *,
        outputs: int,
        ignore_index: int | None = None,
        reduction: str | None = None,
    ) -> str | tuple[str, ...]: ...
    def Softplus(self, X: Argument, /) -> str: ...
    def Softsign(self, input: Argument, /) -> str: ...
    def SpaceToDepth(self, input: Argument, /, *, blocksize: int | None = None, mode: str | None = None) -> str: ...
    @overload
    def Split(
        self,
        input: Argument,
        split: Argument = None,
        /,
        *,
        outputs: Literal[1] = 1,
        axis: int | None = None,
        num_outputs: int | None = None,
    ) -> str: ...
    @overload
    def Split(
        self,
        input: Argument,
        split: Argument = None,
        /,
        *,
        outputs: Literal[2],
        axis: int | None = None,
        num_outputs: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def Split(
        self,
        input: Argument,
        split: Argument = None,
        /,
        *,
        outputs: Literal[3],
        axis: int | None = None,
        num_outputs: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def Split(
        self,
        input: Argument,
        split: Argument = None,
        /,
        *,
        outputs: int,
        axis: int | None = None,
        num_outputs: int | None = None,
    ) -> str | tuple[str, ...]: ...
    def SplitToSequence(
        self,
        input: Argument,
        split: Argument = None,
        /,
        *,
        axis: int | None = None,
        keepdims: int | None = None,
    ) -> str: ...
    def Sqrt(self, X: Argument, /) -> str: ...
    def Squeeze(self, data: Argument, axes: Argument = None, /) -> str: ...
    def StringConcat(self, X: Argument, Y: Argument, /) -> str: ...
    def StringNormalizer(
        self,
        X: Argument,
        /,
        *,
        case_change_action: str | None = None,
        is_case_sensitive: int | None = None,
        locale: str | None = None,
        stopwords: Sequence[str] | None = None,
    ) -> str: ...
    @overload
    def StringSplit(
        self,
        X: Argument,
        /,
        *,
        outputs: Literal[1] = 1,
        delimiter: str | None = None,
        maxsplit: int | None = None,
    ) -> str: ...
    @overload
    def StringSplit(
        self,
        X: Argument,
        /,
        *,
        outputs: Literal[2],
        delimiter: str | None = None,
        maxsplit: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def StringSplit(
        self,
        X: Argument,
        /,
        *,
        outputs: Literal[3],
        delimiter: str | None = None,
        maxsplit: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def StringSplit(
        self,
        X: Argument,
        /,
        *,
        outputs: int,
        delimiter: str | None = None,
        maxsplit: int | None = None,
    ) -> str | tuple[str, ...]: ...
    def Sub(self, A: Argument, B: Argument, /) -> str: ...
    def Sum(self, *data_0: Argument) -> str: ...
    def SwiGLU(self, A: Argument, B: Argument, /, *, alpha: float | None = None) -> str: ...
    def Swish(self, X: Argument, /, *, alpha: float | None = None) -> str: ...
    def Tan(self, input: Argument, /) -> str: ...
    def Tanh(self, input: Argument, /) -> str: ...
    def TensorScatter(
        self,
        past_cache: Argument,
        update: Argument,
        write_indices: Argument = None,
        /,
        *,
        axis: int | None = None,
        mode: str | None = None,
    ) -> str: ...
    def TfIdfVectorizer(
        self,
        X: Argument,
        /,
        *,
        max_gram_length: int | None = None,
        max_skip_count: int | None = None,
        min_gram_length: int | None = None,
        mode: str | None = None,
        ngram_counts: Sequence[int] | None = None,
        ngram_indexes: Sequence[int] | None = None,
        pool_int64s: Sequence[int] | None = None,
        pool_strings: Sequence[str] | None = None,
        weights: Sequence[float] | None = None,
    ) -> str: ...
    def ThresholdedRelu(self, X: Argument, /, *, alpha: float | None = None) -> str: ...
    def Tile(self, input: Argument, repeats: Argument, /) -> str: ...
    @overload
    def TopK(
        self,
        X: Argument,
        K: Argument,
        /,
        *,
        outputs: Literal[1] = 1,
        axis: int | None = None,
        largest: int | None = None,
        sorted: int | None = None,
    ) -> str: ...
    @overload
    def TopK(
        self,
        X: Argument,
        K: Argument,
        /,
        *,
        outputs: Literal[2],
        axis: int | None = None,
        largest: int | None = None,
        sorted: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def TopK(
        self,
        X: Argument,
        K: Argument,
        /,
        *,
        outputs: Literal[3],
        axis: int | None = None,
        largest: int | None = None,
        sorted: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def TopK(
        self,
        X: Argument,
        K: Argument,
        /,
        *,
        outputs: int,
        axis: int | None = None,
        largest: int | None = None,
        sorted: int | None = None,
    ) -> str | tuple[str, ...]: ...
    def Transpose(self, data: Argument, /, *, perm: Sequence[int] | None = None) -> str: ...
    def Trilu(self, input: Argument, k: Argument = None, /, *, upper: int | None = None) -> str: ...
    @overload
    def Unique(
        self,
        X: Argument,
        /,
        *,
        outputs: Literal[1] = 1,
        axis: int | None = None,
        sorted: int | None = None,
    ) -> str: ...
    @overload
    def Unique(
        self,
        X: Argument,
        /,
        *,
        outputs: Literal[2],
        axis: int | None = None,
        sorted: int | None = None,
    ) -> tuple[str, str]: ...
    @overload
    def Unique(
        self,
        X: Argument,
        /,
        *,
        outputs: Literal[3],
        axis: int | None = None,
        sorted: int | None = None,
    ) -> tuple[str, str, str]: ...
    @overload
    def Unique(
        self,
        X: Argument,
        /,
        *,
        outputs: int,
        axis: int | None = None,
        sorted: int | None = None,
    ) -> str | tuple[str, ...]: ...
    def Unsqueeze(self, data: Argument, axes: Argument, /) -> str: ...
    def Where(self, condition: Argument, X: Argument, Y: Argument, /) -> str: ...
    def Xor(self, A: Argument, B: Argument, /) -> str: ...
