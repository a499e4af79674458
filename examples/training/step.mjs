// Train in JavaScript: a step model of refgrad (refgrad training-model) on onnxruntime-web, or onnxruntime-node.
// node step.mjs STEP.onnx RUN.json, where RUN.json has what the first step is fed, the batches, and which output follows which input.

import { readFileSync } from "node:fs";
import * as ort from "onnxruntime-web";

const ARRAYS = { float32: Float32Array, float64: Float64Array, int32: Int32Array };

function tensor({ type, dims, data }) {
  const values = type === "int64" ? BigInt64Array.from(data.map(BigInt)) : ARRAYS[type].from(data);
  return new ort.Tensor(type, values, dims);
}

const tensors = (described) => Object.fromEntries(Object.entries(described).map(([name, one]) => [name, tensor(one)]));

ort.env.wasm.numThreads = 1;
const [path, description] = process.argv.slice(2);
const run = JSON.parse(readFileSync(description, "utf8"));
const session = await ort.InferenceSession.create(new Uint8Array(readFileSync(path)));
let state = tensors(run.state);
const losses = [];
for (const batch of run.batches) {
  const results = await session.run({ ...state, ...tensors(batch) });
  losses.push(results[run.loss].data[0]);
  state = Object.fromEntries(Object.entries(run.next).map(([name, output]) => [name, results[output]]));
}
const weights = Object.fromEntries(Object.entries(state).map(([name, value]) => [name, Array.from(value.data, Number)]));
console.log(JSON.stringify({ losses, state: weights }));
