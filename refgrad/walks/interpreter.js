// The operators of a gradient model, in float64. A tensor is {dims, data, kind}: kind is "f" (float), "i" (integer) or "b" (bool).
// What sums products is written as a loop that visits every product; the page asks the same loop which products made an element.

const Interpreter = (() => {
  const count = dims => dims.reduce((product, size) => product * size, 1);
  const tensor = (dims, data, kind = "f") => ({ dims, data, kind });
  const filled = (dims, value = 0, kind = "f") => tensor(dims, new Float64Array(count(dims)).fill(value), kind);
  const vector = values => tensor([values.length], Float64Array.from(values), "i");
  const list = one => Array.from(one.data);
  const isGiven = one => one !== undefined && one !== null;
  const fail = text => { throw new Error(text); };

  function stridesOf(dims) {
    const strides = new Array(dims.length);
    for (let axis = dims.length - 1, step = 1; axis >= 0; axis--) {
      strides[axis] = step;
      step *= dims[axis];
    }
    return strides;
  }
  function indexOf(flat, dims) {
    const index = new Array(dims.length);
    for (let axis = dims.length - 1; axis >= 0; axis--) {
      index[axis] = flat % dims[axis];
      flat = Math.floor(flat / dims[axis]);
    }
    return index;
  }
  const flatOf = (index, strides) => index.reduce((sum, at, axis) => sum + at * strides[axis], 0);
  const axisOf = (axis, rank) => (axis < 0 ? axis + rank : axis);
  function picked(index, size) {
    if (!(index >= -size && index < size)) fail(`the index ${index} is not one of ${size}`);
    return axisOf(index, size);
  }

  function broadcastDims(all) {
    const rank = Math.max(0, ...all.map(dims => dims.length));
    return Array.from({ length: rank }, (_, axis) => {
      const sizes = all.map(dims => dims[axis - rank + dims.length] ?? 1);
      const size = sizes.includes(0) ? 0 : Math.max(...sizes);
      if (sizes.some(one => one !== 1 && one !== size)) fail(`the shapes ${all.map(dims => `[${dims}]`).join(" and ")} do not broadcast`);
      return size;
    });
  }
  // The strides with which a tensor is read as if it had been broadcast to `dims`
  function broadcastStrides(from, dims) {
    const strides = stridesOf(from), shift = dims.length - from.length;
    return dims.map((_, axis) => (axis < shift || from[axis - shift] === 1 ? 0 : strides[axis - shift]));
  }
  const broadcastFlat = (flat, from, dims) => flatOf(indexOf(flat, dims), broadcastStrides(from, dims));
  const same = (a, b) => a.length === b.length && a.every((size, axis) => size === b[axis]);

  function elementwise(compute, inputs, kind) {
    const dims = broadcastDims(inputs.map(one => one.dims));
    const out = filled(dims, 0, kind ?? inputs[inputs.length - 1].kind);
    const plain = inputs.every(one => same(one.dims, dims));
    const steps = plain ? null : inputs.map(one => broadcastStrides(one.dims, dims));
    for (let flat = 0; flat < out.data.length; flat++) {
      const index = plain ? null : indexOf(flat, dims);
      out.data[flat] = compute(...inputs.map((one, k) => one.data[plain ? flat : flatOf(index, steps[k])]));
    }
    return out;
  }
  // A new tensor of `dims` each element of which is that of `input` at `source(index)`; below 0 it is `otherwise`
  function moved(input, dims, source, otherwise = 0) {
    const out = filled(dims, 0, input.kind);
    for (let flat = 0; flat < out.data.length; flat++) {
      const from = source(indexOf(flat, dims));
      out.data[flat] = from < 0 ? otherwise : input.data[from];
    }
    return out;
  }

  // https://dlmf.nist.gov/7.6.E1 for small arguments, https://dlmf.nist.gov/7.9.E3 (a continued fraction) for large ones
  function erf(x) {
    const size = Math.abs(x);
    if (size > 6) return Math.sign(x);
    if (size < 2.5) {
      let term = x, sum = x;
      for (let n = 1; Math.abs(term) > 1e-17 * Math.abs(sum) && n < 200; n++) {
        term *= (-x * x) / n;
        sum += term / (2 * n + 1);
      }
      return (2 / Math.sqrt(Math.PI)) * sum;
    }
    let fraction = 0;
    for (let n = 60; n >= 1; n--) fraction = n / 2 / (size + fraction);
    return Math.sign(x) * (1 - Math.exp(-size * size) / (Math.sqrt(Math.PI) * (size + fraction)));
  }
  const EPSILON = Math.fround(1e-5); // an attribute is a float32
  const even = x => {
    const down = Math.floor(x), rest = x - down;
    return rest < 0.5 ? down : rest > 0.5 ? down + 1 : down % 2 === 0 ? down : down + 1;
  };
  const sigmoid = x => (x >= 0 ? 1 / (1 + Math.exp(-x)) : Math.exp(x) / (1 + Math.exp(x)));
  const softplus = x => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));
  const tanhGelu = x => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));

  const UNARY = {
    Abs: Math.abs, Neg: x => -x, Exp: Math.exp, Log: Math.log, Sqrt: Math.sqrt, Reciprocal: x => 1 / x, Sigmoid: sigmoid, Tanh: Math.tanh,
    Relu: x => (x > 0 ? x : x * 0), Sin: Math.sin, Cos: Math.cos, Tan: Math.tan, Asin: Math.asin, Acos: Math.acos, Atan: Math.atan,
    Sinh: Math.sinh, Cosh: Math.cosh, Asinh: Math.asinh, Acosh: Math.acosh, Atanh: Math.atanh, Softplus: softplus,
    Softsign: x => x / (1 + Math.abs(x)), Erf: erf, Floor: Math.floor, Ceil: Math.ceil, Round: even, Sign: Math.sign,
    Identity: x => x, HardSwish: x => x * Math.max(0, Math.min(1, x / 6 + 0.5)), Mish: x => x * Math.tanh(softplus(x)),
    Not: x => Number(!x), IsNaN: x => Number(Number.isNaN(x)),
    Elu: (x, { alpha = 1 }) => (x > 0 ? x : alpha * Math.expm1(x)), LeakyRelu: (x, { alpha = Math.fround(0.01) }) => (x >= 0 ? x : alpha * x),
    Selu: (x, { alpha = Math.fround(1.67326319217681884765625), gamma = Math.fround(1.05070102214813232421875) }) => gamma * (x > 0 ? x : alpha * Math.expm1(x)),
    Celu: (x, { alpha = 1 }) => Math.max(0, x) + Math.min(0, alpha * Math.expm1(x / alpha)),
    HardSigmoid: (x, { alpha = Math.fround(0.2), beta = 0.5 }) => Math.max(0, Math.min(1, alpha * x + beta)),
    ThresholdedRelu: (x, { alpha = 1 }) => (x > alpha ? x : 0),
    Gelu: (x, { approximate = "none" }) => (approximate === "tanh" ? tanhGelu(x) : 0.5 * x * (1 + erf(x / Math.SQRT2))),
    Swish: (x, { alpha = 1 }) => x * sigmoid(alpha * x), Shrink: (x, { bias = 0, lambd = 0.5 }) => (x < -lambd ? x + bias : x > lambd ? x - bias : 0),
    IsInf: (x, { detect_negative = 1, detect_positive = 1 }) => Number((x === Infinity && detect_positive) || (x === -Infinity && detect_negative)),
  };
  const BINARY = {
    Add: (a, b) => a + b, Sub: (a, b) => a - b, Mul: (a, b) => a * b, Div: (a, b) => a / b, Pow: (a, b) => a ** b,
    PRelu: (x, slope) => (x >= 0 ? x : slope * x),
  };
  const COMPARISONS = {
    Equal: (a, b) => a === b, Less: (a, b) => a < b, LessOrEqual: (a, b) => a <= b, Greater: (a, b) => a > b, GreaterOrEqual: (a, b) => a >= b,
    And: (a, b) => a && b, Or: (a, b) => a || b, Xor: (a, b) => Boolean(a) !== Boolean(b),
  };
  const VARIADIC = {
    Max: (...all) => (all.some(Number.isNaN) ? NaN : Math.max(...all)), Min: (...all) => (all.some(Number.isNaN) ? NaN : Math.min(...all)),
    Sum: (...all) => all.reduce((a, b) => a + b, 0), Mean: (...all) => all.reduce((a, b) => a + b, 0) / all.length,
  };

  // Sums of products. Each loop calls visit(output element, [element of each input, or -1], factor); `shape` is that of the output.
  const CONTRACTIONS = {
    MatMul([A, B]) {
      const a = A.dims.length === 1 ? [1, A.dims[0]] : A.dims, b = B.dims.length === 1 ? [B.dims[0], 1] : B.dims;
      const [rows, inner] = a.slice(-2), [, columns] = b.slice(-2);
      if (b.at(-2) !== inner) fail(`the shapes [${A.dims}] and [${B.dims}] cannot be multiplied`);
      const batch = broadcastDims([a.slice(0, -2), b.slice(0, -2)]);
      const shape = [...batch, ...(A.dims.length === 1 ? [] : [rows]), ...(B.dims.length === 1 ? [] : [columns])];
      return {
        shape,
        loop(visit) {
          for (let k = 0; k < count(batch); k++) {
            const left = broadcastFlat(k, a.slice(0, -2), batch) * rows * inner, right = broadcastFlat(k, b.slice(0, -2), batch) * inner * columns;
            for (let i = 0; i < rows; i++)
              for (let j = 0; j < columns; j++)
                for (let m = 0; m < inner; m++) visit((k * rows + i) * columns + j, [left + i * inner + m, right + m * columns + j], 1);
          }
        },
      };
    },
    Gemm([A, B, C], { alpha = 1, beta = 1, transA = 0, transB = 0 }) {
      const [rows, inner] = transA ? [A.dims[1], A.dims[0]] : A.dims, columns = transB ? B.dims[0] : B.dims[1];
      return {
        shape: [rows, columns],
        loop(visit) {
          for (let i = 0; i < rows; i++)
            for (let j = 0; j < columns; j++) {
              for (let m = 0; m < inner; m++)
                visit(i * columns + j, [transA ? m * rows + i : i * inner + m, transB ? j * inner + m : m * columns + j, -1], alpha);
              if (isGiven(C) && beta !== 0) visit(i * columns + j, [-1, -1, broadcastFlat(i * columns + j, C.dims, [rows, columns])], beta);
            }
        },
      };
    },
    Einsum(inputs, { equation }) {
      const [left, right] = equation.replaceAll(" ", "").split("->"), each = left.split(","), sizes = new Map();
      if (equation.includes(".")) fail("an Einsum with …");
      each.forEach((letters, k) => [...letters].forEach((letter, axis) => (sizes.get(letter) ?? 1) === 1 && sizes.set(letter, inputs[k].dims[axis])));
      const once = [...sizes.keys()].filter(letter => left.split(letter).length === 2).sort().join(""), out = right ?? once;
      const letters = [...sizes.keys()], dims = letters.map(letter => sizes.get(letter)), shape = [...out].map(letter => sizes.get(letter));
      const stepsFor = (names, own) => letters.map(letter => [...names].reduce((sum, one, axis) => sum + (one === letter && own[axis] !== 1 ? stridesOf(own)[axis] : 0), 0));
      const outSteps = stepsFor(out, shape), steps = each.map((names, k) => stepsFor(names, inputs[k].dims));
      return {
        shape,
        loop(visit) {
          for (let flat = 0; flat < count(dims); flat++) {
            const index = indexOf(flat, dims);
            visit(flatOf(index, outSteps), steps.map(one => flatOf(index, one)), 1);
          }
        },
      };
    },
    ReduceSum: (inputs, attributes) => reduction(inputs, attributes, () => 1),
    ReduceMean: (inputs, attributes) => reduction(inputs, attributes, number => 1 / number),
    Conv([X, W, B], attributes) {
      const { kernel, strides, dilations, group, before, sizes } = windows(X.dims, W.dims.slice(2), attributes);
      const [N, C] = X.dims, [M] = W.dims, perGroup = C / group, mPerGroup = M / group, spots = count(sizes), taps = count(kernel);
      return {
        shape: [N, M, ...sizes],
        loop(visit) {
          for (let n = 0; n < N; n++)
            for (let m = 0; m < M; m++)
              for (let spot = 0; spot < spots; spot++) {
                const out = (n * M + m) * spots + spot, at = indexOf(spot, sizes);
                for (let tap = 0; tap < taps; tap++) {
                  const inside = place(at, indexOf(tap, kernel), strides, dilations, before, X.dims.slice(2));
                  if (inside < 0) continue;
                  for (let c = 0; c < perGroup; c++)
                    visit(out, [(n * C + Math.floor(m / mPerGroup) * perGroup + c) * count(X.dims.slice(2)) + inside, (m * perGroup + c) * taps + tap, -1], 1);
                }
                if (isGiven(B)) visit(out, [-1, -1, m], 1);
              }
        },
      };
    },
    ConvTranspose([X, W, B], attributes) {
      const rank = X.dims.length - 2, kernel = W.dims.slice(2), { group = 1 } = attributes;
      const given = (name, value) => attributes[name] ?? new Array(rank).fill(value);
      const strides = given("strides", 1), dilations = given("dilations", 1), pads = attributes.pads ?? new Array(2 * rank).fill(0), extra = given("output_padding", 0);
      if ((attributes.auto_pad ?? "NOTSET") !== "NOTSET") fail("auto_pad of ConvTranspose");
      const natural = kernel.map((size, axis) => strides[axis] * (X.dims[axis + 2] - 1) + extra[axis] + (size - 1) * dilations[axis] + 1);
      let before = pads.slice(0, rank), sizes = natural.map((size, axis) => size - pads[axis] - pads[axis + rank]);
      if (attributes.output_shape) {
        sizes = attributes.output_shape.slice(-rank);
        before = natural.map((size, axis) => Math.floor((size - sizes[axis]) / 2));
      }
      const [N, C] = X.dims, perGroup = W.dims[1], cPerGroup = C / group, M = perGroup * group, spots = count(sizes), taps = count(kernel), inner = X.dims.slice(2);
      const steps = stridesOf(sizes);
      return {
        shape: [N, M, ...sizes],
        loop(visit) {
          for (let n = 0; n < N; n++)
            for (let c = 0; c < C; c++)
              for (let spot = 0; spot < count(inner); spot++) {
                const at = indexOf(spot, inner);
                for (let tap = 0; tap < taps; tap++) {
                  const to = indexOf(tap, kernel).map((k, axis) => at[axis] * strides[axis] + k * dilations[axis] - before[axis]);
                  if (to.some((one, axis) => one < 0 || one >= sizes[axis])) continue;
                  for (let m = 0; m < perGroup; m++)
                    visit((n * M + Math.floor(c / cPerGroup) * perGroup + m) * spots + flatOf(to, steps), [(n * C + c) * count(inner) + spot, (c * perGroup + m) * taps + tap, -1], 1);
                }
              }
          if (isGiven(B))
            for (let out = 0; out < N * M * spots; out++) visit(out, [-1, -1, Math.floor(out / spots) % M], 1);
        },
      };
    },
    Col2Im([X, image, block], attributes) {
      const sizes = list(image), kernel = list(block), [N] = X.dims, taps = count(kernel), C = X.dims[1] / taps, spots = X.dims[2], area = count(sizes);
      const { strides, dilations, before, sizes: grid } = windows([1, 1, ...sizes], kernel, attributes);
      if (count(grid) !== spots) fail("Col2Im of another number of blocks");
      return {
        shape: [N, C, ...sizes],
        loop(visit) {
          for (let plane = 0; plane < N * C; plane++)
            for (let tap = 0; tap < taps; tap++)
              for (let spot = 0; spot < spots; spot++) {
                const inside = place(indexOf(spot, grid), indexOf(tap, kernel), strides, dilations, before, sizes);
                if (inside >= 0) visit(plane * area + inside, [(plane * taps + tap) * spots + spot, -1, -1], 1);
              }
        },
      };
    },
    ScatterElements([data, indices, updates], { axis = 0, reduction: how = "none" }) {
      if (how !== "add") return null;
      const along = axisOf(axis, data.dims.length), steps = stridesOf(data.dims);
      return {
        shape: data.dims,
        loop(visit) {
          for (let out = 0; out < data.data.length; out++) visit(out, [out, -1, -1], 1);
          for (let flat = 0; flat < indices.data.length; flat++) {
            const to = indexOf(flat, indices.dims);
            to[along] = axisOf(indices.data[flat], data.dims[along]);
            visit(flatOf(to, steps), [-1, -1, flat], 1);
          }
        },
      };
    },
    ScatterND([data, indices, updates], { reduction: how = "none" }) {
      if (how !== "add") return null;
      return {
        shape: data.dims,
        loop(visit) {
          for (let out = 0; out < data.data.length; out++) visit(out, [out, -1, -1], 1);
          scatteredRows(data, indices, (to, from) => visit(to, [-1, -1, from], 1));
        },
      };
    },
  };
  function scatteredRows(data, indices, visit) {
    const depth = indices.dims.at(-1), rows = count(indices.dims.slice(0, -1)), width = count(data.dims.slice(depth)), steps = stridesOf(data.dims);
    for (let row = 0; row < rows; row++) {
      let start = 0;
      for (let k = 0; k < depth; k++) start += axisOf(indices.data[row * depth + k], data.dims[k]) * steps[k];
      for (let k = 0; k < width; k++) visit(start + k, row * width + k);
    }
  }
  function contracted(operator, inputs, attributes) {
    const found = CONTRACTIONS[operator](inputs, attributes);
    if (!found) return null;
    const out = filled(found.shape, 0, inputs[0].kind);
    found.loop((to, from, factor) => {
      let product = factor;
      for (let k = 0; k < from.length; k++) if (from[k] >= 0) product *= inputs[k].data[from[k]];
      out.data[to] += product;
    });
    return out;
  }

  function axesOf([X, axes], attributes) {
    const given = isGiven(axes) ? list(axes) : attributes.axes;
    if (given === undefined || given.length === 0) return attributes.noop_with_empty_axes ? [] : X.dims.map((_, axis) => axis);
    return given.map(axis => axisOf(axis, X.dims.length));
  }
  function reducedShape(inputs, attributes) {
    const [X] = inputs, axes = axesOf(inputs, attributes), kept = X.dims.map((size, axis) => (axes.includes(axis) ? 1 : size));
    return { axes, kept, shape: (attributes.keepdims ?? 1) ? kept : X.dims.filter((_, axis) => !axes.includes(axis)) };
  }
  function reduction(inputs, attributes, factorOf) {
    const [X] = inputs, { axes, kept, shape } = reducedShape(inputs, attributes);
    const factor = factorOf(axes.reduce((product, axis) => product * X.dims[axis], 1));
    return {
      shape,
      loop(visit) {
        for (let flat = 0; flat < X.data.length; flat++) visit(broadcastFlat(flat, kept, X.dims), [flat, -1], factor);
      },
    };
  }
  function reduced(start, step, end = x => x) {
    return (inputs, attributes) => {
      const [X] = inputs, { kept, shape } = reducedShape(inputs, attributes), out = filled(shape, start, X.kind);
      for (let flat = 0; flat < X.data.length; flat++) {
        const to = broadcastFlat(flat, kept, X.dims);
        out.data[to] = step(out.data[to], X.data[flat]);
      }
      return [tensor(shape, out.data.map(end), X.kind)];
    };
  }
  const larger = (a, b) => (Number.isNaN(a) || Number.isNaN(b) ? NaN : Math.max(a, b));
  const smaller = (a, b) => (Number.isNaN(a) || Number.isNaN(b) ? NaN : Math.min(a, b));

  function windows(dims, kernel, attributes) {
    const rank = kernel.length, input = dims.slice(2), given = (name, value) => attributes[name] ?? new Array(rank).fill(value);
    const strides = given("strides", 1), dilations = given("dilations", 1), group = attributes.group ?? 1, how = attributes.auto_pad ?? "NOTSET";
    let pads = attributes.pads ?? new Array(2 * rank).fill(0);
    const reach = kernel.map((size, axis) => (size - 1) * dilations[axis] + 1);
    if (how.startsWith("SAME")) {
      const total = input.map((size, axis) => Math.max(0, (Math.ceil(size / strides[axis]) - 1) * strides[axis] + reach[axis] - size));
      const less = total.map(size => Math.floor(size / 2)), more = total.map((size, axis) => size - less[axis]);
      pads = how === "SAME_UPPER" ? [...less, ...more] : [...more, ...less];
    } else if (how === "VALID") pads = new Array(2 * rank).fill(0);
    const sizes = input.map((size, axis) => {
      const exact = (size + pads[axis] + pads[axis + rank] - reach[axis]) / strides[axis] + 1;
      if (!attributes.ceil_mode) return Math.floor(exact);
      const up = Math.ceil(exact); // the last window begins inside the input or its first padding
      return (up - 1) * strides[axis] >= size + pads[axis] ? up - 1 : up;
    });
    return { kernel, strides, dilations, group, before: pads.slice(0, rank), after: pads.slice(rank), sizes };
  }
  // The element that a tap of a window reads, -1 in the padding
  function place(at, tap, strides, dilations, before, input) {
    let flat = 0;
    for (let axis = 0; axis < input.length; axis++) {
      const position = at[axis] * strides[axis] + tap[axis] * dilations[axis] - before[axis];
      if (position < 0 || position >= input[axis]) return -1;
      flat = flat * input[axis] + position;
    }
    return flat;
  }
  function pooled(X, attributes, start, step, end) {
    const { kernel, strides, dilations, before, after, sizes } = windows(X.dims, attributes.kernel_shape, attributes);
    const input = X.dims.slice(2), planes = X.dims[0] * X.dims[1], spots = count(sizes), area = count(input), out = filled([X.dims[0], X.dims[1], ...sizes]);
    const indices = filled(out.dims, 0, "i");
    for (let plane = 0; plane < planes; plane++)
      for (let spot = 0; spot < spots; spot++) {
        const at = indexOf(spot, sizes);
        let value = start, best = -1, seen = 0, padded = 0;
        for (let tap = 0; tap < count(kernel); tap++) {
          const taps = indexOf(tap, kernel), inside = place(at, taps, strides, dilations, before, input);
          const within = taps.every((k, axis) => at[axis] * strides[axis] + k * dilations[axis] - before[axis] < input[axis] + after[axis]);
          if (within) padded++;
          if (inside < 0) continue;
          seen++;
          const next = step(value, X.data[plane * area + inside]);
          if (best < 0 || next !== value) best = plane * area + inside;
          value = next;
        }
        out.data[plane * spots + spot] = end(value, seen, padded);
        indices.data[plane * spots + spot] = best;
      }
    return [out, indices];
  }

  function softmaxed(X, axis, after) {
    const along = axisOf(axis ?? -1, X.dims.length), inner = count(X.dims.slice(along + 1)), size = X.dims[along] ?? 1, out = filled(X.dims);
    for (let row = 0; row < X.data.length / Math.max(size, 1); row++) {
      const start = Math.floor(row / inner) * inner * size + (row % inner);
      let most = -Infinity, total = 0;
      for (let k = 0; k < size; k++) most = Math.max(most, X.data[start + k * inner]);
      for (let k = 0; k < size; k++) total += Math.exp(X.data[start + k * inner] - most);
      for (let k = 0; k < size; k++) out.data[start + k * inner] = after(X.data[start + k * inner] - most, total);
    }
    return out;
  }
  const softmax = (X, axis) => softmaxed(X, axis, (x, total) => Math.exp(x) / total);
  const logSoftmax = (X, axis) => softmaxed(X, axis, (x, total) => x - Math.log(total));
  function likelihood(logs, labels, weight, { reduction: how = "mean", ignore_index }) {
    const [N, C] = logs.dims, spots = count(logs.dims.slice(2)), losses = filled(labels.dims);
    let total = 0;
    for (let k = 0; k < labels.data.length; k++) {
      const label = labels.data[k];
      if (label === ignore_index) continue;
      if (label < 0 || label >= C) fail(`the label ${label} is not one of ${C} classes`);
      const each = isGiven(weight) ? weight.data[label] : 1;
      total += each;
      losses.data[k] = -each * logs.data[(Math.floor(k / spots) * C + label) * spots + (k % spots)];
    }
    if (how === "none") return losses;
    const sum = losses.data.reduce((a, b) => a + b, 0);
    return tensor([], Float64Array.of(how === "sum" ? sum : sum / total));
  }

  const transposed = (X, perm) => {
    const order = perm ?? X.dims.map((_, axis) => X.dims.length - 1 - axis), steps = stridesOf(X.dims);
    return moved(X, order.map(axis => X.dims[axis]), index => order.reduce((sum, axis, k) => sum + index[k] * steps[axis], 0));
  };
  const reshaped = (X, dims) => (count(dims) === X.data.length ? tensor(dims, X.data, X.kind) : fail(`[${X.dims}] cannot have the shape [${dims}]`));
  const expanded = (X, dims) => {
    const to = broadcastDims([X.dims, dims]), steps = broadcastStrides(X.dims, to);
    return moved(X, to, index => flatOf(index, steps));
  };
  const KINDS = { 1: "f", 10: "f", 11: "f", 16: "f", 2: "i", 3: "i", 4: "i", 5: "i", 6: "i", 7: "i", 12: "i", 13: "i", 9: "b" };

  const OTHERS = {
    Where: ([C, X, Y]) => [elementwise((c, x, y) => (c ? x : y), [C, X, Y], X.kind)],
    Clip: ([X, low, high]) => [elementwise(x => Math.min(Math.max(x, isGiven(low) ? low.data[0] : -Infinity), isGiven(high) ? high.data[0] : Infinity), [X])],
    Mod: ([A, B], { fmod = 0 }) => [elementwise((a, b) => (fmod ? a % b : a - b * Math.floor(a / b)), [A, B])],
    Cast: ([X], { to }) => {
      const kind = KINDS[to] ?? fail(`a cast to type ${to}`);
      return [elementwise(x => (kind === "b" ? Number(x !== 0) : kind === "i" ? Math.trunc(x) : x), [X], kind)];
    },
    CastLike: ([X, like]) => [elementwise(x => (like.kind === "b" ? Number(x !== 0) : like.kind === "i" ? Math.trunc(x) : x), [X], like.kind)],
    ReduceMax: reduced(-Infinity, larger), ReduceMin: reduced(Infinity, smaller), ReduceProd: reduced(1, (a, b) => a * b),
    ReduceSumSquare: reduced(0, (a, b) => a + b * b), ReduceL1: reduced(0, (a, b) => a + Math.abs(b)), ReduceL2: reduced(0, (a, b) => a + b * b, Math.sqrt),
    ReduceLogSum: reduced(0, (a, b) => a + b, Math.log),
    ReduceLogSumExp: (inputs, attributes) => {
      const most = OTHERS.ReduceMax(inputs, { ...attributes, keepdims: 1 })[0];
      const base = elementwise(m => (Number.isFinite(m) ? m : 0), [most]), shifted = elementwise((x, m) => Math.exp(x - m), [inputs[0], base]);
      const sum = contracted("ReduceSum", [shifted, inputs[1]], attributes);
      return [tensor(sum.dims, sum.data.map((x, k) => Math.log(x) + base.data[k]))];
    },
    ArgMax: (inputs, attributes) => best(inputs, attributes, (a, b) => a > b), ArgMin: (inputs, attributes) => best(inputs, attributes, (a, b) => a < b),
    Softmax: ([X], { axis }) => [softmax(X, axis)], LogSoftmax: ([X], { axis }) => [logSoftmax(X, axis)],
    SoftmaxCrossEntropyLoss: ([scores, labels, weights], attributes) => {
      const logs = logSoftmax(scores, 1);
      return [likelihood(logs, labels, weights, attributes), logs];
    },
    NegativeLogLikelihoodLoss: ([logs, labels, weights], attributes) => [likelihood(logs, labels, weights, attributes)],
    Reshape: ([X, shape], { allowzero = 0 }) => {
      const dims = list(shape).map((size, axis) => (size === 0 && !allowzero ? X.dims[axis] : size));
      const open = dims.indexOf(-1);
      if (open >= 0) dims[open] = X.data.length / -count(dims);
      return [reshaped(X, dims)];
    },
    Transpose: ([X], { perm }) => [transposed(X, perm)],
    Expand: ([X, shape]) => [expanded(X, list(shape))],
    Unsqueeze: ([X, axes], attributes) => {
      const given = isGiven(axes) ? list(axes) : attributes.axes, rank = X.dims.length + given.length, at = given.map(axis => axisOf(axis, rank)), rest = [...X.dims];
      return [reshaped(X, Array.from({ length: rank }, (_, axis) => (at.includes(axis) ? 1 : rest.shift())))];
    },
    Squeeze: ([X, axes], attributes) => {
      const given = isGiven(axes) ? list(axes) : attributes.axes, at = given?.map(axis => axisOf(axis, X.dims.length));
      return [reshaped(X, X.dims.filter((size, axis) => (at ? !at.includes(axis) : size !== 1)))];
    },
    Flatten: ([X], { axis = 1 }) => {
      const at = axisOf(axis, X.dims.length);
      return [reshaped(X, [count(X.dims.slice(0, at)), count(X.dims.slice(at))])];
    },
    Concat: (inputs, { axis }) => {
      const along = axisOf(axis, inputs[0].dims.length), dims = [...inputs[0].dims];
      dims[along] = inputs.reduce((sum, one) => sum + one.dims[along], 0);
      const out = filled(dims, 0, inputs[0].kind), steps = stridesOf(dims);
      let start = 0;
      for (const one of inputs) {
        for (let flat = 0; flat < one.data.length; flat++) {
          const index = indexOf(flat, one.dims);
          index[along] += start;
          out.data[flatOf(index, steps)] = one.data[flat];
        }
        start += one.dims[along];
      }
      return [out];
    },
    Split: ([X, split], { axis = 0, num_outputs }, outputs) => {
      const along = axisOf(axis, X.dims.length), parts = num_outputs ?? outputs, each = Math.ceil(X.dims[along] / parts);
      const sizes = isGiven(split) ? list(split) : Array.from({ length: parts }, (_, k) => Math.min(each, X.dims[along] - k * each)), steps = stridesOf(X.dims);
      let start = 0;
      return sizes.map(size => {
        const from = start;
        start += size;
        return moved(X, X.dims.map((old, k) => (k === along ? size : old)), index => flatOf(index, steps) + from * steps[along]);
      });
    },
    Slice: ([X, starts, ends, axes, steps]) => {
      const at = isGiven(axes) ? list(axes).map(axis => axisOf(axis, X.dims.length)) : list(starts).map((_, k) => k), dims = [...X.dims], first = X.dims.map(() => 0), by = X.dims.map(() => 1), strides = stridesOf(X.dims);
      at.forEach((axis, k) => {
        const size = X.dims[axis], step = isGiven(steps) ? steps.data[k] : 1, clamp = (value, low, high) => Math.min(Math.max(value < 0 ? value + size : value, low), high);
        const begin = step > 0 ? clamp(starts.data[k], 0, size) : clamp(starts.data[k], 0, size - 1), end = step > 0 ? clamp(ends.data[k], 0, size) : clamp(ends.data[k], -1, size - 1);
        [first[axis], by[axis], dims[axis]] = [begin, step, Math.max(0, Math.ceil((end - begin) / step))];
      });
      return [moved(X, dims, index => index.reduce((sum, k, axis) => sum + (first[axis] + k * by[axis]) * strides[axis], 0))];
    },
    Gather: ([X, indices], { axis = 0 }) => {
      const along = axisOf(axis, X.dims.length), rank = indices.dims.length, steps = stridesOf(X.dims), inner = stridesOf(indices.dims);
      return [moved(X, [...X.dims.slice(0, along), ...indices.dims, ...X.dims.slice(along + 1)], index => {
        const from = picked(indices.data[flatOf(index.slice(along, along + rank), inner)], X.dims[along]);
        return flatOf([...index.slice(0, along), from, ...index.slice(along + rank)], steps);
      })];
    },
    GatherElements: ([X, indices], { axis = 0 }) => {
      const along = axisOf(axis, X.dims.length), steps = stridesOf(X.dims), inner = stridesOf(indices.dims);
      return [moved(X, indices.dims, index => {
        const from = [...index];
        from[along] = picked(indices.data[flatOf(index, inner)], X.dims[along]);
        return flatOf(from, steps);
      })];
    },
    ScatterElements: ([data, indices, updates], attributes) => {
      const sum = contracted("ScatterElements", [data, indices, updates], attributes);
      if (sum) return [sum];
      if ((attributes.reduction ?? "none") !== "none") fail(`the reduction ${attributes.reduction} of ScatterElements`);
      const out = tensor(data.dims, data.data.slice(), data.kind), along = axisOf(attributes.axis ?? 0, data.dims.length), steps = stridesOf(data.dims);
      for (let flat = 0; flat < indices.data.length; flat++) {
        const to = indexOf(flat, indices.dims);
        to[along] = axisOf(indices.data[flat], data.dims[along]);
        out.data[flatOf(to, steps)] = updates.data[flat];
      }
      return [out];
    },
    ScatterND: ([data, indices, updates], attributes) => {
      const sum = contracted("ScatterND", [data, indices, updates], attributes);
      if (sum) return [sum];
      if ((attributes.reduction ?? "none") !== "none") fail(`the reduction ${attributes.reduction} of ScatterND`);
      const out = tensor(data.dims, data.data.slice(), data.kind);
      scatteredRows(data, indices, (to, from) => { out.data[to] = updates.data[from]; });
      return [out];
    },
    OneHot: ([indices, depth, values], { axis = -1 }) => {
      const size = depth.data[0], rank = indices.dims.length + 1, along = axisOf(axis, rank), dims = [...indices.dims.slice(0, along), size, ...indices.dims.slice(along)], inner = stridesOf(indices.dims);
      const out = filled(dims, 0, values.kind);
      for (let flat = 0; flat < out.data.length; flat++) {
        const index = indexOf(flat, dims), wanted = indices.data[flatOf(index.filter((_, k) => k !== along), inner)];
        out.data[flat] = values.data[axisOf(wanted, size) === index[along] ? 1 : 0];
      }
      return [out];
    },
    Shape: ([X], { start = 0, end }) => [vector(X.dims.slice(start, end))],
    Size: ([X]) => [tensor([], Float64Array.of(X.data.length), "i")],
    Constant: (_, attributes) => [attributes.value ?? scalarConstant(attributes)],
    ConstantOfShape: ([shape], { value }) => [filled(list(shape), value ? value.data[0] : 0, value?.kind ?? "f")],
    Range: ([start, limit, delta]) => {
      const size = Math.max(0, Math.ceil((limit.data[0] - start.data[0]) / delta.data[0]));
      return [tensor([size], Float64Array.from({ length: size }, (_, k) => start.data[0] + k * delta.data[0]), start.kind)];
    },
    Tile: ([X, repeats]) => {
      const steps = stridesOf(X.dims);
      return [moved(X, X.dims.map((size, axis) => size * repeats.data[axis]), index => index.reduce((sum, k, axis) => sum + (k % X.dims[axis]) * steps[axis], 0))];
    },
    Pad: ([X, pads, value, axes], { mode = "constant" }) => {
      if (mode !== "constant") fail(`the mode ${mode} of Pad`);
      const at = isGiven(axes) ? list(axes).map(axis => axisOf(axis, X.dims.length)) : X.dims.map((_, axis) => axis), before = X.dims.map(() => 0), dims = [...X.dims], steps = stridesOf(X.dims);
      at.forEach((axis, k) => {
        before[axis] = pads.data[k];
        dims[axis] += pads.data[k] + pads.data[k + at.length];
      });
      return [moved(X, dims, index => {
        const from = index.map((k, axis) => k - before[axis]);
        return from.some((k, axis) => k < 0 || k >= X.dims[axis]) ? -1 : flatOf(from, steps);
      }, isGiven(value) ? value.data[0] : 0)];
    },
    Trilu: ([X, k], { upper = 1 }) => {
      const shift = isGiven(k) ? k.data[0] : 0, steps = stridesOf(X.dims);
      return [moved(X, X.dims, index => {
        const [row, column] = index.slice(-2);
        return (upper ? column - row >= shift : column - row <= shift) ? flatOf(index, steps) : -1;
      })];
    },
    CumSum: ([X, axis], { exclusive = 0, reverse = 0 }) => {
      const along = axisOf(axis.data[0], X.dims.length), step = stridesOf(X.dims)[along], size = X.dims[along], out = filled(X.dims, 0, X.kind);
      for (let flat = 0; flat < X.data.length; flat++) {
        const at = Math.floor(flat / step) % size;
        for (let k = 0; k < size; k++)
          if (reverse ? (exclusive ? k > at : k >= at) : exclusive ? k < at : k <= at) out.data[flat] += X.data[flat + (k - at) * step];
      }
      return [out];
    },
    MaxPool: ([X], attributes) => {
      if (attributes.storage_order) fail("column-major indices of MaxPool");
      return pooled(X, attributes, -Infinity, larger, value => value);
    },
    AveragePool: ([X], attributes) => [pooled(X, attributes, 0, (a, b) => a + b, (value, seen, padded) => value / (attributes.count_include_pad ? padded : seen))[0]],
    GlobalAveragePool: ([X]) => [contracted("ReduceMean", [X], { axes: X.dims.map((_, axis) => axis).slice(2) })],
    GlobalMaxPool: ([X]) => OTHERS.ReduceMax([X], { axes: X.dims.map((_, axis) => axis).slice(2) }),
    LayerNormalization: ([X, scale, bias], { axis = -1, epsilon = EPSILON }) => {
      const axes = X.dims.map((_, k) => k).slice(axisOf(axis, X.dims.length));
      const mean = contracted("ReduceMean", [X], { axes }), off = elementwise((x, m) => x - m, [X, mean]);
      const variance = contracted("ReduceMean", [elementwise(x => x * x, [off])], { axes }), inverse = elementwise(v => 1 / Math.sqrt(v + epsilon), [variance]);
      const scaled = elementwise((x, i, s) => x * i * s, [off, inverse, scale]);
      return [isGiven(bias) ? elementwise((x, b) => x + b, [scaled, bias]) : scaled, mean, inverse];
    },
    Dropout: ([X, ratio, training]) => (isGiven(training) && training.data[0] ? fail("Dropout that trains") : [X, filled(X.dims, 1, "b")]),
    BatchNormalization: ([X, scale, bias, mean, variance], { epsilon = EPSILON, training_mode = 0 }) => {
      if (training_mode) fail("BatchNormalization that trains");
      const [s, b, m, v] = [scale, bias, mean, variance].map(one => reshaped(one, [one.dims[0], ...X.dims.slice(2).map(() => 1)]));
      return [elementwise((x, s1, b1, m1, v1) => ((x - m1) / Math.sqrt(v1 + epsilon)) * s1 + b1, [X, s, b, m, v])];
    },
    NonZero: ([X]) => {
      const found = Array.from(X.data.keys()).filter(flat => X.data[flat] !== 0).map(flat => indexOf(flat, X.dims)), rank = Math.max(1, X.dims.length);
      return [tensor([rank, found.length], Float64Array.from({ length: rank * found.length }, (_, k) => found[k % found.length][Math.floor(k / found.length)] ?? 0), "i")];
    },
    GatherND: ([X, indices], { batch_dims = 0 }) => {
      if (batch_dims) fail("batches of GatherND");
      const depth = indices.dims.at(-1), rank = indices.dims.length - 1, steps = stridesOf(X.dims);
      return [moved(X, [...indices.dims.slice(0, -1), ...X.dims.slice(depth)], index => {
        const row = flatOf(index.slice(0, rank), stridesOf(indices.dims.slice(0, -1)));
        const from = Array.from({ length: depth }, (_, k) => picked(indices.data[row * depth + k], X.dims[k]));
        return flatOf([...from, ...index.slice(rank)], steps);
      })];
    },
    EyeLike: ([X], { dtype, k = 0 }) => [moved(filled([1], 1, KINDS[dtype] ?? X.kind), X.dims, ([row, column]) => (column - row === k ? 0 : -1))],
  };
  function scalarConstant(attributes) {
    if ("value_float" in attributes) return tensor([], Float64Array.of(attributes.value_float));
    if ("value_int" in attributes) return tensor([], Float64Array.of(attributes.value_int), "i");
    if ("value_floats" in attributes) return tensor([attributes.value_floats.length], Float64Array.from(attributes.value_floats));
    return "value_ints" in attributes ? vector(attributes.value_ints) : fail("a constant that is no number");
  }
  function best(inputs, { axis = 0, keepdims = 1, select_last_index = 0 }, better) {
    const [X] = inputs, along = axisOf(axis, X.dims.length), { kept, shape } = reducedShape([X], { axes: [along], keepdims }), out = filled(shape, 0, "i"), value = new Float64Array(out.data.length).fill(NaN);
    for (let flat = 0; flat < X.data.length; flat++) {
      const to = broadcastFlat(flat, kept, X.dims), one = X.data[flat];
      if (Number.isNaN(value[to]) || better(one, value[to]) || (select_last_index && one === value[to])) {
        value[to] = one;
        out.data[to] = indexOf(flat, X.dims)[along];
      }
    }
    return [out];
  }

  const knows = node => !node.domain && !node.body
    && [UNARY, BINARY, COMPARISONS, VARIADIC, CONTRACTIONS, OTHERS].some(table => Object.hasOwn(table, node.operator));

  function apply(node, inputs) {
    const { operator, attributes } = node;
    if (Object.hasOwn(UNARY, operator)) return [elementwise(x => UNARY[operator](x, attributes), [inputs[0]], ["Not", "IsNaN", "IsInf"].includes(operator) ? "b" : undefined)];
    if (Object.hasOwn(BINARY, operator)) {
      const [A, B] = inputs, isWhole = A.kind === "i" && operator === "Div";
      return [elementwise(isWhole ? (a, b) => Math.trunc(a / b) : BINARY[operator], [A, B], A.kind)];
    }
    if (Object.hasOwn(COMPARISONS, operator)) return [elementwise((a, b) => Number(COMPARISONS[operator](a, b)), inputs, "b")];
    if (Object.hasOwn(VARIADIC, operator)) return [elementwise(VARIADIC[operator], inputs)];
    if (Object.hasOwn(OTHERS, operator)) return OTHERS[operator](inputs, attributes, node.outputs.length);
    return [contracted(operator, inputs, attributes)];
  }

  // Run `nodes` in their order on `known`, a Map from names to tensors. What `fixed` has stays as it is there.
  function run(nodes, known, fixed = new Map()) {
    const values = new Map(known);
    for (const [name, value] of fixed) values.set(name, value);
    for (const node of nodes) {
      const inputs = node.inputs.map(name => (name ? values.get(name) ?? fail(`${name} is not known`) : undefined));
      apply(node, inputs).forEach((value, k) => {
        const name = node.outputs[k];
        if (name && !fixed.has(name)) values.set(name, value);
      });
    }
    return values;
  }

  // What made an element of an output of `node`: {move: [input, element]}, {sum: [{from: [[input, element]], factor}]} or {of: [[input, element]]}
  const MOVES = new Set(["Transpose", "Expand", "Split", "Slice", "Gather", "GatherElements", "Tile", "Pad", "Trilu"]);
  const SAME_PLACE = new Set(["Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"]);
  const FEW = 1 << 16; // elements of what is searched
  // The elements of a tensor that differ from one at most in their place along an axis
  function along(flat, dims, axis) {
    const at = axis < 0 ? axis + dims.length : axis, stride = stridesOf(dims)[at], first = flat - (Math.floor(flat / stride) % dims[at]) * stride;
    return Array.from({ length: dims[at] }, (_, k) => first + k * stride);
  }
  function terms(node, output, flat, shapes, inputs) {
    const { operator, attributes } = node, dims = shapes.output;
    const isElementwise = [UNARY, BINARY, COMPARISONS, VARIADIC].some(table => Object.hasOwn(table, operator)) || ["Where", "Clip", "Cast"].includes(operator);
    if (node.domain || node.body) return {};
    if (SAME_PLACE.has(operator)) return { move: [0, flat] };
    if (isElementwise) return { of: shapes.inputs.map((from, k) => [k, from ? broadcastFlat(flat, from, dims) : -1]).filter(([, at]) => at >= 0) };
    if (operator === "Softmax" || operator === "LogSoftmax") return { of: along(flat, dims, attributes.axis ?? -1).map(at => [0, at]) };
    const isSmall = count(dims) <= FEW && shapes.inputs.every(from => !from || count(from) <= FEW);
    if (!isSmall) return {};
    const marked = shapes.inputs.map((from, k) => (from && !inputs[k] ? filled(from) : inputs[k]));
    if (operator === "Concat") {
      let start = 0;
      const places = marked.map(one => {
        const at = tensor(one.dims, Float64Array.from(one.data, (_, k) => start + k), "i");
        start += one.data.length;
        return at;
      });
      let at = OTHERS.Concat(places, attributes)[0].data[flat], k = 0;
      while (at >= marked[k].data.length) at -= marked[k++].data.length;
      return { move: [k, at] };
    }
    if (MOVES.has(operator)) {
      const places = tensor(marked[0].dims, Float64Array.from(marked[0].data, (_, k) => k), "i");
      const rest = operator === "Pad" ? [places, marked[1], tensor([], Float64Array.of(-1)), marked[3]] : [places, ...marked.slice(1)];
      if (operator === "Trilu") places.data.forEach((_, k) => { places.data[k] += 1; });
      let at = apply({ ...node, attributes }, rest)[output].data[flat];
      if (operator === "Trilu") at -= 1;
      return at < 0 ? { sum: [] } : { move: [0, at] };
    }
    const found = Object.hasOwn(CONTRACTIONS, operator) ? CONTRACTIONS[operator](marked, attributes) : null;
    if (!found) return {};
    const sum = [];
    found.loop((to, from, factor) => {
      if (to === flat) sum.push({ from: from.map((at, k) => [k, at]).filter(([, at]) => at >= 0), factor });
    });
    return { sum };
  }

  return { apply, broadcastFlat, count, elementwise, expanded, filled, indexOf, knows, logSoftmax, reshaped, run, same, sigmoid, softmax, stridesOf, tensor, terms, transposed, contracted, erf };
})();
if (typeof module !== "undefined") module.exports = Interpreter;
