"""Forms of ONNX Runtime's operators that a gradient refuses when it is built, by the input or the attribute that is wrong."""

from __future__ import annotations

import pytest
from onnx import ModelProto, parser

import refgrad
from refgrad.errors import NoGradientError, RefgradError

pytestmark = [pytest.mark.stock, pytest.mark.filterwarnings("ignore::refgrad.errors.ModelWarning")]

MULTI = "y = com.microsoft.MultiHeadAttention <num_heads = {0}> (q, k, k, {1})"
STATES = "float[2,3,8] q, float[2,4,8] k"
OF_SELF = "y = com.microsoft.Attention <num_heads = {0}{1}> (x, w{2})"
SELF = "float[2,3,6] x, float[6,24] w"
GROUPED = "y = com.microsoft.GroupQueryAttention <num_heads = {0}, kv_num_heads = 2{1}> (q, k, k, {2}s, t{3})"
GROUPS = "float[2,3,64] q, float[2,3,32] k, int32[2] s, int32[1] t"
EXPERTS = "y = com.microsoft.MoE <k = {0}> (x, r, a, {1}, b)"
ROUTED = "float[4,6] x, float[3,8,6] a, float[3,6,8] b"
CODED = "y = com.microsoft.QMoE <k = 1{0}> (x, r, c, s, , c, u)"
CODES = "float[4,16] x, float[4,3] r, uint8[3,16,8] c, float[3,16] u"
GATHER = "y = com.microsoft.GatherBlockQuantized <block_size = 16{0}> (d, i, s)"
WINDOW = "y = com.microsoft.{0} <{1}> (x, w)"
IMAGES = "float[2,6,6,4] x, float[4,4,3,3] w"
LINEAR = (
    'y, z = com.microsoft.LinearAttention <q_num_heads = {0}, kv_num_heads = {1}, update_rule = "linear"> (x, x, x)'
)
REFUSED = [
    (MULTI.format(3, ""), STATES, r"num_heads=3 does not divide query, which has 8 columns"),
    (MULTI.format(2, ", , b"), f"{STATES}, float[1,1,1,4] b", r"attention_bias has .*; it is \[1 or 2, 1 or 2, 3, 4\]"),
    (MULTI.format(2, ", , b"), f"{STATES}, float[3,4] b", r"attention_bias has the shape \[3, 4\]"),
    (MULTI.format(2, ", m"), f"{STATES}, int32[2,1] m", r"key_padding_mask has the shape \[2, 1\]; it is \[2, 4\]"),
    (MULTI.format(2, ", m"), f"{STATES}, int32[5] m", r"key_padding_mask has the shape \[5\]; it is \[2\] or \[8\]"),
    (MULTI.format(2, ", , , p"), f"{STATES}, float[2,2,5,4] p", "it needs past_key and past_value, or neither"),
    (OF_SELF.format(5, "", ""), SELF, "num_heads=5 does not divide a part of weights, which has 8 columns"),
    (OF_SELF.format(2, ", qkv_hidden_sizes = [8, 8, 9]", ""), SELF, r"\[8, 8, 9\]; it has three .* 24 columns"),
    (OF_SELF.format(2, ", qkv_hidden_sizes = [8, 8]", ""), SELF, r"qkv_hidden_sizes is \[8, 8\]; it has three sizes"),
    (OF_SELF.format(2, ", do_rotary = 1, rotary_embedding_dim = 64", ""), SELF, "64 elements of heads of 4"),
    (OF_SELF.format(2, "", ", , m"), f"{SELF}, int32[1,3] m", r"mask_index has the shape \[1, 3\]; it is \[2, 3\]"),
    (OF_SELF.format(2, "", ", , m"), f"{SELF}, int32[5] m", r"mask_index has .*; it is \[2\] or \[4\] or \[8\]"),
    (OF_SELF.format(2, "", ", , , p"), f"{SELF}, float[3,2,2,4,4] p", r"past has .*; it is \[2, 2, 2, \?, 4\]"),
    (GROUPED.format(6, "", ", , ", ""), GROUPS, "num_heads=6 does not divide query"),
    (
        GROUPED.format(4, ", sliding_window_cache = 1, local_window_size = 9", "p, p, ", ""),
        f"{GROUPS}, float[2,2,4,16] p",
        "local_window_size is 9; with sliding_window_cache=1 it is from 1 to 4",
    ),
    (GROUPED.format(4, "", ", , ", ", , , , b"), f"{GROUPS}, float[1,1,1,3] b", "attention_bias has the shape"),
    (GROUPED.format(4, "", ", , ", ", , , , , h"), f"{GROUPS}, float[3] h", r"head_sink has .*; it is \[4\]"),
    (GROUPED.format(4, ", do_rotary = 1", ", , ", ", c, c"), f"{GROUPS}, float[9,16] c", "cos_cache has 16 columns"),
    (
        "t = Constant <value = int32[1] {7}> ()  " + GROUPED.format(4, "", "p, p, ", ""),
        f"{GROUPS.replace(', int32[1] t', '')}, float[2,2,4,16] p",
        "2 samples bring 3 queries each to a past, and total_sequence_length is 7; give query_seqlens",
    ),
    (
        "n = Constant <value = int32[1] {9}> ()  " + MULTI.format(2, ", , , p, p, n"),
        "float[2,1,8] q, float[2,1,8] k, float[2,2,6,4] p",
        "past_sequence_length is 9; it is 0 to 5",
    ),
    (EXPERTS.format(4, ""), f"{ROUTED}, float[4,3] r", "k=4: a token chooses .* up to the 3 experts"),
    (EXPERTS.format(2**62, ""), f"{ROUTED}, float[n,e] r", "k=4611686018427387904: a token chooses"),
    (EXPERTS.format(1, ""), f"{ROUTED}, float[4,5] r", r"fc2_experts_weights has .*; it is \[5, 6, 8\]"),
    (EXPERTS.format(1, ""), f"{ROUTED}, float[3,3] r", r"router_probs has the shape \[3, 3\]; it is \[4, 3\]"),
    (EXPERTS.format(1, "v"), f"{ROUTED}, float[4,3] r, float[3,1] v", r"fc1_experts_bias has .*; it is \[3, 8\]"),
    (CODED.format(""), f"{CODES}, float[3,1] s", r"fc1_scales has the shape \[3, 1\]; with 4 bits it is \[3, 16\]"),
    (CODED.format(", block_size = 3"), f"{CODES}, float[3,16] s", "block_size is 3; it is a power of 2"),
    (CODED.format(", block_size = 32"), f"{CODES}, float[3,16] s", "rows of 16; 4 bits and block_size=32 do not"),
    (CODED.format(", expert_weight_bits = 8"), f"{CODES}, float[3,16] s", "with 8 bits it is"),
    (GATHER.format(""), "uint8[5,20] d, int64[2] i, float[1,3] s", r"scales has .*; with block_size=16 it is \[5, 3\]"),
    (GATHER.format(", gather_axis = 5"), "int4[5,40] d, int64[2] i, float[5,3] s", "gather_axis is 5; data has 2 axes"),
    (WINDOW.format("NhwcConv", "strides = [1, 1, 1]"), IMAGES, r"strides is \[1, 1, 1\]; .* rank 4 it has 2 numbers"),
    (WINDOW.format("NhwcFusedConv", "kernel_shape = [3]"), IMAGES, r"kernel_shape is \[3\]"),
    (WINDOW.format("ConvTransposeWithDynamicPads", "dilations = [1]"), IMAGES, r"dilations is \[1\]"),
    (LINEAR.format(3, 3), "float[2,3,8] x", "q_num_heads=3 does not divide query"),
    (LINEAR.format(2, 2**40), "float[2,3,n] x", "kv_num_heads is 1099511627776; it is from 1 to 2147483647"),
    (
        "y = com.microsoft.MatMulBnb4 <K = 21, N = 9, block_size = 0, quant_type = 1> (x, c, s)",
        "float[2,21] x, uint8[95] c, float[12] s",
        "block_size is 0; it is a power of 2 from 16 on",
    ),
    (
        "y = com.microsoft.MatMulNBits <K = 40, N = 5, bits = 4, block_size = 16> (x, c, s)",
        "float[3,39] x, uint8[5,3,8] c, float[5,3] s",
        r"A has the shape \[3, 39\]; with K=40 it is \[\?, 40\]",
    ),
    (
        f"y = com.microsoft.MatMulNBits <K = {2**63 - 1}, N = 5, bits = 4, block_size = 16> (x, c, s)",
        "float[a,b] x, uint8[c,d,e] c, float[g,h] s",
        "N is 5 and K is 9223372036854775807; both are from 1 to 2147483647",
    ),
    ("y = SimplifiedLayerNormalization <axis = 5> (x, w)", "float[2,3] x, float[3] w", "axis is 5; X has 2 axes"),
    (
        "y = com.microsoft.HyperConnectionPreMix <num_branches = 200000000> (x, w)",
        "float x, float[3] w",
        "streams is of rank 0; with num_branches=200000000 it has more axes",
    ),
    (
        "y, z = com.microsoft.CausalConvWithState <state_window = 2> (x, w)",
        "float[2,3] x, float[3,1,4] w",
        "its input is of rank 2; it has 3 axes",
    ),
    (
        "y = com.microsoft.GatedDeltaNetStateReplay (x, x, z, m)",
        "float[9] x, float z, int64[11] m",
        r"destination_backing has the shape \[\]; it is \[\?\]",
    ),
]


def model(body: str, inputs: str) -> ModelProto:
    imports = '["" : 21, "com.microsoft" : 1]'
    return parser.parse_model(
        f"<ir_version: 10, opset_import: {imports}> g ({inputs}) => (float[o,p,q] y) {{ {body} }}"
    )


@pytest.mark.parametrize(("body", "inputs", "said"), REFUSED)
def test_what_is_declared_wrong_is_refused_when_the_gradient_is_built(body: str, inputs: str, said: str) -> None:
    with pytest.raises(RefgradError, match=said):
        refgrad.gradient(model(body, inputs))


def test_sizes_that_are_not_declared_are_left_alone() -> None:
    refgrad.gradient(model(MULTI.format(2, ", , b"), "float[a,b,c] q, float[d,e,f] k, float[g,h,i,j] b"))


def test_keys_and_values_of_different_sizes_have_no_present() -> None:
    body = "y, p = com.microsoft.Attention <num_heads = 2, qkv_hidden_sizes = [8, 8, 10]> (x, w)"
    with pytest.raises(NoGradientError, match="its output present is not computed; leave it out"):
        refgrad.gradient(model(body, "float[2,3,6] x, float[6,26] w"))
