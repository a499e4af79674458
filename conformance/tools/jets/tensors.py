"""The special points of norms, normalizations, windows, matrices, losses, sampling, attention and recurrences."""

from __future__ import annotations

from refgrad.conformance.tools.jets.point import SpecialPoint, at, each, single

TENSORS: tuple[SpecialPoint, ...] = (
    # Softmax, norms, normalizations.
    *each("Softmax LogSoftmax", "equal elements", (2.0, 2.0, 2.0)),
    *each("Softmax LogSoftmax", "one element", ((1.0,), (0.0,))),
    *each("Softmax LogSoftmax", "one element far away", (0.0, 1.0, -300.0)),
    *(at("LpNormalization", f"x = 0, p = {p}", (0.0, 0.0), p=p, row="x = 0") for p in (1, 2)),
    *(
        at("LpNormalization", f"an element is 0, p = {p}", (0.0, 1.0), p=p, row=f"p = {p}, an element is 0")
        for p in (1, 2)
    ),
    at("LpNormalization", "one element, p = 2", ((3.0,), (-2.0,)), p=2),
    at("LpNormalization", "one of two rows is 0", ((0.0, 0.0), (3.0, 4.0)), p=2, row="x = 0"),
    *(at("GlobalLpPool", f"x = 0, p = {p}", (((0.0, 0.0),),), p=p, row="x = 0") for p in (1, 2, 3, 4)),
    *(
        at("GlobalLpPool", f"an element is 0, p = {p}", (((0.0, 2.0, -1.0),),), p=p, row=f"p = {p}, an element is 0")
        for p in (1, 2, 3, 4)
    ),
    *(
        at("LpPool", f"a window is 0, p = {p}", (((0.0, 0.0, 0.0),),), kernel_shape=[3], p=p, row="a window is 0")
        for p in (1, 2, 3, 4)
    ),
    *(
        at(
            "LpPool",
            f"an element is 0, p = {p}",
            (((0.0, 2.0, -1.0),),),
            kernel_shape=[2],
            p=p,
            row=f"p = {p}, an element is 0",
        )
        for p in (1, 2, 3, 4)
    ),
    at("LayerNormalization", "a constant row", ((2.0, 2.0, 2.0),), (1.0, 0.0, 2.0), (0.0, 1.0, 0.0)),
    at(
        "LayerNormalization",
        "a constant row, ε = 0.5",
        ((2.0, 2.0, 2.0),),
        (1.0, 0.0, 2.0),
        (0.0, 1.0, 0.0),
        epsilon=0.5,
    ),
    at("LayerNormalization", "a constant row, ε = 0", ((2.0, 2.0, 2.0),), (1.0, 0.0, 2.0), epsilon=0.0),
    at("LayerNormalization", "one element", ((2.0,), (3.0,)), (1.5,), epsilon=0.5),
    at("RMSNormalization", "a row is 0", ((0.0, 0.0),), (1.0, 2.0), epsilon=0.5),
    at("RMSNormalization", "a row is 0, ε = 0", ((0.0, 0.0),), (1.0, 2.0), epsilon=0.0),
    at("RMSNormalization", "an element is 0, ε = 0", ((0.0, 3.0),), (0.0, 2.0), epsilon=0.0),
    at("InstanceNormalization", "a constant channel", (((2.0, 2.0),),), (1.5,), (0.5,), epsilon=0.5),
    at("InstanceNormalization", "a constant channel, ε = 0", (((2.0, 2.0),),), (1.5,), (0.5,), epsilon=0.0),
    at(
        "GroupNormalization", "a constant group", (((2.0,), (2.0,)),), (1.5, 0.0), (0.5, 1.0), epsilon=0.5, num_groups=1
    ),
    at(
        "GroupNormalization",
        "a constant group, ε = 0",
        (((2.0,), (2.0,)),),
        (1.5, 0.0),
        (0.5, 1.0),
        epsilon=0.0,
        num_groups=1,
    ),
    at("BatchNormalization", "the variance is 0", (((1.0, 2.0),),), (1.5,), (0.5,), (1.0,), (0.0,), epsilon=0.5),
    at("BatchNormalization", "the variance is 0, ε = 0", (((1.0, 2.0),),), (1.5,), (0.5,), (1.0,), (0.0,), epsilon=0.0),
    at("BatchNormalization", "x is the mean", (((1.0, 2.0),),), (1.5,), (0.5,), (1.0,), (2.0,)),
    at(
        "BatchNormalization",
        "trained on a constant channel",
        (((2.0, 2.0),),),
        (1.5,),
        (0.5,),
        (1.0,),
        (2.0,),
        epsilon=0.5,
        training_mode=1,
        outputs=3,
    ),
    at("MeanVarianceNormalization", "a constant channel", (((2.0, 2.0),), ((2.0, 2.0),)), axes=[0, 2]),
    at("LRN", "x = 0", (((0.0,), (0.0,), (1.0,)),), size=3, alpha=0.75),
    at("LRN", "x = 0, bias = 0", (((0.0,), (0.0,)),), size=3, alpha=0.75, bias=0.0),
    at("LRN", "β = 0", (((0.0,), (1.0,)),), size=3, beta=0.0),
    at("LRN", "β = 1", (((0.0,), (1.0,)),), size=3, beta=1.0),
    # Windows and choices.
    at("MaxPool", "two elements of a window are the largest", (((1.0, 1.0, 0.0),),), kernel_shape=[3]),
    at("MaxPool", "no tie", (((1.0, 3.0, 0.0),),), kernel_shape=[2]),
    at("GlobalMaxPool", "two elements of a channel are the largest", (((1.0, 0.0, 1.0),),)),
    at("AveragePool", "x = 0", (((0.0, 0.0, 0.0),),), kernel_shape=[2]),
    at("GlobalAveragePool", "x = 0", (((0.0, 0.0),),)),
    at("TopK", "two elements are the largest", (1.0, 1.0, 0.0), (1,), outputs=2),
    at("TopK", "both of two that are equal", (1.0, 1.0, 0.0), (2,), outputs=2, row="two elements are the largest"),
    *(
        at(
            "ScatterElements",
            f"updates and data are equal, {r}",
            (1.0, 5.0),
            (0, 0),
            (1.0, 1.0),
            reduction=r,
            row="updates and data are the largest",
        )
        for r in ("max", "min", "add")
    ),
    *(at("ScatterElements", f"zeros, {r}", (0.0, 5.0), (0, 0), (0.0, 2.0), reduction=r) for r in ("mul",)),
    at("ScatterElements", "a zero, mul", (2.0, 5.0), (0, 0), (0.0, 3.0), reduction="mul"),
    *(
        at(
            "ScatterND",
            f"updates and data are equal, {r}",
            (1.0, 5.0),
            ((0,), (0,)),
            (1.0, 1.0),
            reduction=r,
            row="updates and data are the smallest",
        )
        for r in ("max", "min", "add")
    ),
    at("ScatterND", "zeros, mul", (0.0, 5.0), ((0,), (0,)), (0.0, 2.0), reduction="mul"),
    at("ScatterND", "three zeros, mul", (0.0, 5.0), ((0,), (0,)), (0.0, 0.0), reduction="mul"),
    # Matrices.
    at("Det", "rank 1 of 2", ((1.0, 2.0), (2.0, 4.0))),
    at("Det", "the zero matrix", ((0.0, 0.0), (0.0, 0.0))),
    at("Det", "rank 2 of 3", ((1.0, 2.0, 3.0), (2.0, 4.0, 6.0), (1.0, 0.0, 1.0))),
    at("Det", "rank 1 of 3", ((1.0, 2.0, 3.0), (2.0, 4.0, 6.0), (3.0, 6.0, 9.0))),
    at("Det", "the zero matrix of 3", ((0.0,) * 3,) * 3),
    at("Det", "regular", ((1.0, 2.0), (3.0, 4.0))),
    at("com.microsoft.Inverse", "regular with zeros", ((1.0, 0.0), (0.0, 2.0))),
    *each("MatMul", "zeros", ((0.0, 0.0),), ((0.0,), (0.0,))),
    at("Gemm", "zeros", ((0.0, 0.0),), ((0.0,), (0.0,)), ((0.0,),)),
    at("Einsum", "zeros", (0.0, 0.0), (0.0, 0.0), equation="i,i->"),
    at("Einsum", "three factors, zeros", (0.0, 1.0), (0.0, 0.0), (0.0, 2.0), equation="i,i,i->"),
    at("Conv", "zeros", (((0.0, 0.0),),), (((0.0,),),), (0.0,)),
    at("ConvTranspose", "zeros", (((0.0, 0.0),),), (((0.0,),),), (0.0,)),
    # Losses.
    at("SoftmaxCrossEntropyLoss", "equal scores", ((2.0, 2.0, 2.0), (0.0, 0.0, 0.0)), (0, 2)),
    at("SoftmaxCrossEntropyLoss", "one of two is ignored", ((2.0, 2.0), (0.0, 0.0)), (0, 1), ignore_index=1),
    at("SoftmaxCrossEntropyLoss", "weights, one 0", ((2.0, 2.0), (0.0, 0.0)), (0, 1), (0.0, 2.0)),
    at("SoftmaxCrossEntropyLoss", "with log_prob", ((2.0, 2.0), (0.0, 0.0)), (0, 1), outputs=2),
    *(
        at("SoftmaxCrossEntropyLoss", f"reduction {r}", ((2.0, 2.0), (0.0, 1.0)), (0, 1), reduction=r)
        for r in ("sum", "none")
    ),
    at("NegativeLogLikelihoodLoss", "zeros", ((0.0, 0.0), (0.0, 0.0)), (0, 1)),
    at("NegativeLogLikelihoodLoss", "weights, one 0", ((0.0, 0.0), (0.0, 0.0)), (0, 1), (0.0, 2.0)),
    # Activations of ONNX Runtime.
    *each("com.microsoft.Gelu com.microsoft.FastGelu com.microsoft.QuickGelu", "x = 0", 0.0),
    at("com.microsoft.BiasGelu", "x = −bias", (1.0,), (-1.0,)),
    at("com.microsoft.FastGelu", "x = −bias", (1.0,), (-1.0,)),
    at("SwiGLU", "gate 0", (0.0, 2.0), (3.0, 0.0)),
    # Sampling.
    at("GridSample", "a point lies on a pixel", ((((1.0, 2.0, 4.0),),),), ((((0.0, 0.0),),),)),
    at(
        "GridSample",
        "a point lies on the border",
        ((((1.0, 2.0, 4.0),),),),
        ((((-1.0, 0.0), (1.0, 0.0)),),),
        padding_mode="border",
        align_corners=1,
    ),
    at("GridSample", "a point lies between pixels", ((((1.0, 2.0, 4.0),),),), ((((0.25, 0.125),),),)),
    # Attention and recurrences.
    at(
        "Attention",
        "zeros",
        (((0.0,), (0.0,)),),
        (((0.0,), (0.0,)),),
        (((0.0,), (0.0,)),),
        q_num_heads=1,
        kv_num_heads=1,
    ),
    at(
        "Attention",
        "softcap, zeros",
        (((0.0,), (0.0,)),),
        (((0.0,), (0.0,)),),
        (((0.0,), (1.0,)),),
        q_num_heads=1,
        kv_num_heads=1,
        softcap=2.0,
    ),
    at(
        "Attention",
        "causal",
        (((0.0,), (1.0,)),),
        (((0.0,), (1.0,)),),
        (((0.0,), (1.0,)),),
        q_num_heads=1,
        kv_num_heads=1,
        is_causal=1,
    ),
    at("RNN", "zeros", (((0.0,),),), (((0.0,),),), (((0.0,),),), hidden_size=1, outputs=2),
    at("GRU", "zeros", (((0.0,),),), (((0.0,),) * 3,), (((0.0,),) * 3,), hidden_size=1, outputs=2),
    at("LSTM", "zeros", (((0.0,),),), (((0.0,),) * 4,), (((0.0,),) * 4,), hidden_size=1, outputs=3),
    # Pieces of polynomials.
    at(
        "GridSample",
        "cubic, a point lies on a pixel",
        ((((1.0, 2.0, 4.0, 3.0, 1.0),) * 2,),),
        ((((0.0, 0.25),),),),
        mode="cubic",
        sampled=True,
    ),
    at(
        "GridSample",
        "reflected at the border",
        ((((1.0, 2.0, 4.0),) * 2,),),
        ((((1.0, 0.25),),),),
        padding_mode="reflection",
        align_corners=1,
        sampled=True,
    ),
    at(
        "GridSample",
        "the nearest pixel",
        ((((1.0, 2.0, 4.0),) * 2,),),
        ((((0.25, 0.25),),),),
        mode="nearest",
        sampled=True,
    ),
    at(
        "RoiAlign",
        "a roi of no size",
        ((((0.0, 2.0, 4.0),) * 3,),),
        ((1.0, 1.0, 1.0, 1.0),),
        (0,),
        output_height=1,
        output_width=1,
        sampled=True,
    ),
    at(
        "RoiAlign",
        "a point lies on a pixel",
        ((((0.0, 2.0, 7.0),) * 3,),),
        ((0.0, 0.0, 2.0, 2.0),),
        (0,),
        output_height=1,
        output_width=1,
        sampling_ratio=1,
        coordinate_transformation_mode="output_half_pixel",
        sampled=True,
    ),
    at(
        "MaxRoiPool",
        "two pixels of a bin are the largest",
        ((((1.0, 0.0, 1.0),),),),
        ((0.0, 0.0, 0.0, 2.0, 0.0),),
        pooled_shape=[1, 1],
        sampled=True,
        wrt=("X",),
    ),
    at(
        "DeformConv",
        "the offset is 0",
        ((((1.0, 2.0, 4.0),) * 3,),),
        ((((2.0,),),),),
        ((((0.0,) * 3,) * 3,) * 2,),
        sampled=True,
    ),
    at(
        "DeformConv",
        "the offset is 1/4",
        ((((1.0, 2.0, 4.0),) * 3,),),
        ((((2.0,),),),),
        ((((0.25,) * 3,) * 3,) * 2,),
        sampled=True,
    ),
    at(
        "Resize",
        "a point lies on an element",
        ((1.0, 2.0, 4.0),),
        None,
        single(1, 1),
        mode="linear",
        sampled=True,
        wrt=("X",),
    ),
    at(
        "Resize",
        "the crop ends at the border",
        ((1.0, 2.0, 4.0),),
        (0.0, 0.0, 1.0, 1.0),
        single(1, 1),
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        sampled=True,
        wrt=("X", "roi"),
    ),
    at("Resize", "zeros, cubic", ((0.0, 0.0, 0.0, 0.0),), None, single(1, 1.5), mode="cubic", sampled=True, wrt=("X",)),
    # Squares of norms: what the norm lacks, its square has.
    at("ReduceL2", "the square, the norm is 0", (0.0, 0.0), squared=True),
    at("GlobalLpPool", "the square, x = 0, p = 2", (((0.0, 0.0),),), squared=True),
    at("LpPool", "the square, a window is 0, p = 2", (((0.0, 0.0, 0.0),),), kernel_shape=[3], squared=True),
)
