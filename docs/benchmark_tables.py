"""The sections of reports/benchmarks.md: title, the file of results, and what its columns and goals are."""

from __future__ import annotations

BENCHMARKS = (
    (
        "Operators",
        "operators",
        "Forward and backward of each operator on ONNX Runtime with two threads against torch eager, at sizes that models have "
        '(`nox -s benchmarks_operators`, benchmarks/operator_cases.py). "forward ms" is the model alone: many of the rows '
        "that lose do so there, in kernels of ONNX Runtime that run in one thread or exchange axes. torch returns views for "
        "Flatten, Reshape, Squeeze, Unsqueeze, Identity and Dropout, where a runtime copies. "
        '"moved MB" is what all nodes read and write, "least MB" the inputs and results once. "bound ms" is how long the nodes '
        'must take: each the longer of its bytes at the rate of an Add and its operations at the rate of a MatMul, and "of '
        'bound" how near the measured time is. Goal: a geometric mean of at most 1.2, depthwise convolutions at most 1.5, '
        "memory at most 1.2 of torch's.",
    ),
    (
        "Operators that lose, and what else was measured",
        "operators_alternatives",
        "Each row of the table above that has a ratio above 2.5, here or on another machine, and other ways to write its "
        "gradient, in turn with what refgrad "
        'emits, forward and backward ("of refgrad\'s" below 1: the alternative is faster).',
    ),
    (
        "Operators on the interpreter",
        "operators_interpreter",
        "The same on the interpreter, whose kernels but for products run in one thread. Goal: at most 2.",
    ),
    (
        "Operators in both dialects",
        "operators_ort",
        'The same in dialect "ort" against dialect "onnx", both on onnxruntime-training-cpu 1.19.2: where the ratio is above '
        "1, plain operators beat ONNX Runtime's own gradient kernels.",
    ),
    (
        "Operators on a GPU",
        "operators_cuda",
        "The same rows on a GPU (`nox -s benchmarks_cuda`, benchmarks/on_device.py): ONNX Runtime with its inputs and outputs "
        "bound to memory of the device, without and with a CUDA graph, torch eager, and torch.compile of the forward function "
        "with the backward that it makes. All in float32 without TF32, as many calls as fit into a round before the benchmark "
        'waits for the device. "ratio" is ONNX Runtime against torch eager, "graph ratio" the same with a CUDA graph, '
        '"compiled ratio" ONNX Runtime without a graph against torch.compile. "on the CPU" are the nodes that ONNX Runtime '
        'computes there, "copies" those that it inserts to carry values over: with such nodes, or loops, it may refuse to make '
        "a graph. Errors are the largest against the interpreter in double precision, relative to a result's largest entry. "
        "An empty entry was refused or failed, and [the results](results/operators_cuda.json) say why. "
        "torch.compile is not asked for recurrences, whose steps it writes out.",
    ),
    (
        "Building the gradient",
        "build_time",
        "Chains of MatMul-Add-Relu-Add, against ONNX Runtime 1.19.2's builder. Goal: at most 0.5 from 1,000 nodes up, and the "
        "time per node at 100,000 within 2x of that at 1,000. refgrad spends nearly the same on every node, the builder more "
        'the larger the graph: the goal is missed at 1,000 nodes, and in dialect "ort", which writes two to three times as '
        "many nodes where the batch is unknown, as the builder does.",
    ),
    (
        "Forward and backward, against ONNX Runtime's own gradient graph",
        "run_time_builder",
        'On onnxruntime-training-cpu 1.19.2, for all weights. Goal: at most 1.02 in "ort", 1.15 in "onnx".',
    ),
    (
        "Forward and backward, against torch eager",
        "run_time_torch",
        "For the input and all weights, two threads, on stock onnxruntime and on the interpreter. The goal is beside each "
        "ratio. gpt2_small has 124 million weights in a file of their own and 64 tokens. In bert and gpt2 (4 layers of 256) "
        "70 % of the time of ONNX Runtime are matrix products, 5 GFLOP: matmul, one product of 1,024 by 1,024 matrices, "
        "says how fast each system is at them on the processor of this run. On another processor the same graphs took 0.43 "
        "(mlp), 0.62 (bert), 0.60 (gpt2) and 0.42 (gpt2_small) of torch's time. Of the interpreter's time for bert half are "
        "products, a fifth is Erf and Gelu in one thread.",
    ),
    (
        "Forward and backward on a GPU",
        "run_time_cuda",
        "For the input and all weights, which lie on the device; the columns are those of the operators on a GPU. The errors "
        "are relative to torch's gradients in double precision, in gpt2_small to ONNX Runtime's on the CPU.",
    ),
    (
        "The page of a walk",
        "walk_page",
        "`refgrad walk MODEL --html` in headless Chromium (benchmarks/walk_page.py). Goals: ResNet-18 below 5 MB, its first "
        "step within 2 s and a step within 60 ms; 2,000 nodes within 5 s.",
    ),
    (
        "The interpreter",
        "interpreter",
        "Against ONNX Runtime with two threads and against onnx.reference, which fails on BERT and GPT-2 (GatherElements); "
        'forward, and forward with the gradient of the input and all weights in dialect "onnx". The goal is beside each ratio.',
    ),
    (
        "Memory of the interpreter",
        "interpreter_memory",
        "The peak of a run against the values of the graph, weights and feeds that are alive at once. Goal: at most 1.3. A "
        "kernel's own scratch memory is a few MiB at most: it shows in the last column, without weights and feeds.",
    ),
    (
        "A cotangent of 0 that stays 0",
        "strong_zero",
        "`gradient(...)` with and without `strong_zero=True`, for the input and all parameters, on ONNX Runtime with "
        'two threads (benchmarks/strong_zero.py). "nodes" counts the main graph only. "guard nodes in bodies" counts the '
        "branches of the If after each sum of products. They do work only if the sum is NaN.",
    ),
    (
        "Memory of a gradient that computes values again",
        "recompute",
        "`gradient(..., recompute=)` for the input and all weights, in float32: a transformer of 48 layers (hidden 256, "
        "sequence 256, batch 2), a layer of attention to 2,048 tokens (hidden 512, 8 heads) and a Scan of 128 steps. The peak "
        "of a run does not count weights and feeds, but the "
        "gradients that it returns, 145 MiB in the transformer. Time is the processor's, with one thread. Ratios compare with "
        "a run that computes nothing again.",
    ),
    (
        "Memory that is predicted",
        "cost",
        "The peak that `refgrad.cost` predicts from shapes against the measured one, without weights and feeds and with the "
        "results: the bytes that Python allocates on the interpreter, and on ONNX Runtime the resident memory that the first "
        "run of a session adds, where a session before it has brought the code of the kernels into memory. "
        '"recompute" is the gradient with `recompute=True`. Goals: within 5 % on the interpreter, within 15 % on ONNX Runtime. '
        "The two rows of the small lstm miss them: it takes some ten KiB, most of them objects, which are not predicted.",
    ),
    (
        "Gradients within a memory budget",
        "cost_budget",
        '`gradient(..., memory="400 MiB")` of the transformer of 48 layers: the operations against those of the gradient '
        "that computes nothing again, and the measured peak. Goal: within the budget on both.",
    ),
    (
        "Memory of weights of 4 bits",
        "quantized_weights",
        "The gradient by the input of eight MatMulNBits of 2048 × 2048, against the same with float weights, which have 128 "
        "MiB: what a session of ONNX Runtime and three runs with 64 rows add to a process at its peak, and the processor's "
        "time of a run with one thread. The weights stay quantised; some rows at a time become floats, where they are used.",
    ),
    (
        "Memory of building a gradient",
        "memory",
        "Peak of `gradient()` beyond what the caller holds. Goal: at most 1.2 of the weights; under 100 MiB for a path.",
    ),
    (
        "Memory of a training beside frozen weights",
        "training_memory",
        "The peak of `refgrad train` with Adam and 32 samples per step, where the weights lie in a file beside the model: "
        "low-rank adapters of all weights, or the head alone, and the trained model written to a file "
        "(benchmarks/training_memory.py). The peak is the resident memory of the largest process of the command. Pages of the "
        "file that the runtime maps count in full, though other processes share them and the system can drop them. So do "
        'Python and the libraries, about 110 MiB. "predicted MiB" is what `refgrad.cost` predicts for a step: activations, '
        'trained weights and states, and data. "ratio" is (peak − predicted) / weights. '
        "Each run checks that only the trained weights differ in the result. Goal: at most 1.6.",
    ),
    (
        "Adapters beside weights of 4 bits",
        "qlora",
        "Ten steps of SGD with low-rank adapters on a language model of random weights, on ONNX Runtime: with the weights in "
        "blocks of 4 bits, with the same numbers in float32, and in torch with the numbers in float32 (benchmarks/qlora.py). "
        "Each training has a process of its own, and the weights lie in a file. The difference is the largest relative "
        "difference of the ten losses. Goal: 1e-4, and less memory than with float32.",
    ),
    (
        "Training in two processes",
        "many_processes",
        "Samples per second of `Training(step, processes=2)` on the two cores of one machine, and of one process, in turn, "
        "each with the threads that it chooses: a network of two convolutions on images of 32 × 32, and one of three layers of "
        "width 256, with Adam (benchmarks/many_processes.py). Where its kernels use both cores, so does one process. Weights "
        "and gradients go through pipes in every step.",
    ),
    (
        "Depth",
        "depth",
        "`gradient()` and the interpreter as a model gets ten times as deep: a chain of nodes, and a Scan and a Loop that make "
        "n steps, differentiated with respect to their start, a row per step and a weight of 64 by 64. Growth is the time of "
        "a row divided by the time of the row before it: of the run where there is one, else of `gradient()`. Goal: about 10, "
        "which is linear, and memory likewise: the gradient of the weight is no larger for more steps.",
    ),
    (
        "Weights of a loop",
        "loops",
        "The gradient of all weights of an LSTM of 100 steps, written as a Loop or as a Scan, against the model alone, called "
        'in turn. "not known" is a batch whose size the model does not tell. Goal for a batch of 1: a ratio of at most 4 on '
        "ONNX Runtime and 8 on the interpreter.",
    ),
    (
        "The interpreter on the node tests of onnx",
        "node_tests",
        "Against `onnx.reference`, both prepared beforehand, the median of runs in turn. Goal: none above 1.0. Most of these "
        "tests have few elements, so the call itself takes the time; "
        "[the results](results/node_tests.json) name those above 1.0.",
    ),
    (
        "The conformance suite",
        "conformance_rate",
        "The default matrix in float32: every operator in its newest version, both dialects, the interpreter and ONNX Runtime. "
        "Goal: under 600 s. The ratio is the cost of calling every builder, executor and oracle in another process, "
        "over a sample of the cases.",
    ),
    (
        "A step of training",
        "training",
        "The network of the onnxcustom notebook: 750 samples of 100 features, hidden layers of 50 and 10, batches of 15, "
        "momentum after Nesterov, float32, one thread for BLAS and one for onnxruntime. Time is the processor's for the "
        "thread, in turn within one run. "
        "What onnxruntime takes beyond the graph is what feeds, shuffles and reads the loss.",
    ),
    (
        "Training of torch's exports: time of a step",
        "training_exports_time",
        "All parameters, or the head alone, with momentum: `refgrad.training` on ONNX Runtime, torch eager with torch.optim, "
        "and onnxsim 0.8.1's `compile_training_loop`, each with the threads that it chooses, in a process of its own, in turn. "
        "Goals: below 1 of torch; at most 1 of onnxsim, on the models that it can differentiate, which it gets at opset 17.",
    ),
    (
        "Training of torch's exports: losses",
        "training_exports",
        "Ten steps of gradient descent with all parameters, on ONNX Runtime and in torch, from the same weights and data; the "
        "error is the largest relative difference of the losses.",
    ),
    (
        "A gradient in two parts",
        "split",
        "`refgrad.split` of all architectures of `examples/architectures.py`, by input and by weights: the forward and the "
        "backward part, one after the other, beside the joint gradient, on one thread of ONNX Runtime with "
        "inputs and outputs bound "
        "(benchmarks/split.py). What crosses, beside all the results of nodes that a backward part reads where nothing is "
        "chosen. Goal: at most 1.1 of the joint gradient.",
    ),
    (
        "Layers of torch",
        "torch_module",
        "`refgrad.torch.Module` forward and backward, by input and all parameters, on two threads: beside its two sessions "
        "called with values by `run_with_ort_values`, beside the same bound to their inputs and outputs, "
        "where Python does nothing, "
        "and beside torch eager (benchmarks/torch_module.py). Goals: 1.5 of the sessions, 1.0 of torch. ViT is a tiny one: "
        "what its call costs beside the sessions is the passage of 39 tensors each way.",
    ),
    (
        "Calls from JAX",
        "jax_calls",
        "A network of MatMul, Add and Relu as a function of JAX, and the same model run by an onnxruntime session alone, "
        "with the same options, in turn (benchmarks/jax_calls.py). A gradient by the weights is two runs: of the model, and "
        'of its gradient. "over ms" is the median of the differences. Goal: at most 0.3 ms over the session, under jit; what '
        "misses it copies half a million weights to each run, and their gradients back.",
    ),
    (
        "Gradients under JAX",
        "jax_exports",
        "jax.grad of all architectures of `examples/architectures.py`, by input and by weights, in float32 on ONNX Runtime: "
        "the largest error relative to the largest entry of each gradient, beside torch.autograd in double, and that of "
        "autograd in single precision (benchmarks/jax_exports.py). Goal: 1e-5.",
    ),
    (
        "Second derivatives under JAX",
        "jax_second",
        "A network of two layers with tanh as a model, and the same written in jax.numpy, both differentiated by JAX "
        "(benchmarks/jax_exports.py). Goals: 1e-5 in float32, 1e-10 in float64, relative to the largest entry.",
    ),
    (
        "Planted faults, located",
        "locating",
        "`refgrad compare` and `refgrad nan` on exports with planted faults of kernels, rules, a fusion, and NaN (benchmarks/"
        "locating.py). A fault is located where its nodes are named, and no more than two in all. The gradients built are "
        "those of a bisection.",
    ),
    (
        "Thirty kinds of faults, located",
        "locating_kinds",
        "`refgrad compare` with kernels, rules and contributions of values that are wrong in thirty ways, in places that are "
        "drawn, half of the runs with a second fault (benchmarks/locating_kinds.py). Healthy nodes are those that are named "
        "and that no fault touches. Goals: 95 % of the planted faults located, no healthy node named.",
    ),
    (
        "Real systems, compared",
        "pairs",
        "`refgrad compare` on exports of torch (`nox -s pairs`, benchmarks/pairs.py): refgrad's gradient on ONNX Runtime, or "
        "on the interpreter in the training wheel's environment, beside another system. A runtime runs refgrad's gradient; "
        '"autograd" is the runtime\'s own gradient of the model, as a recording; onnx-ad and the builders of the training '
        "wheel write gradients themselves. The numbers count gradients of the other system. ONNX Runtime 1.17 gets models with "
        "the IR version 9, and onnx2torch with opset 17, as onnx's version converter writes it, without allowzero. Pairs that "
        "were not measured have no row.",
    ),
    (
        "Finding a fault in a large model",
        "locating_scale",
        "BERT with twelve layers of 256, two texts of 64 tokens, all weights (benchmarks/locating_scale.py): seconds, peak "
        "memory of the process, and that beside one run of the gradient. A kernel, then a rule, is off by 0.1 %. Goals: 60 s, "
        "and 1.5 times the memory of one run.",
    ),
    ("Import", "import_time", "Goal: at most 0.1 s over `import onnx`."),
)
