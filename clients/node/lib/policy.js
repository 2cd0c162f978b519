'use strict';
// Weights and acting: safetensors, and the policy `mlp_categorical` of docs/protocol.md, on Float32Array.

const READERS = {
  F32: (view, at) => view.getFloat32(at, true),
  F64: (view, at) => view.getFloat64(at, true),
};
const SIZES = { F32: 4, F64: 8 };

/** Map of name to {shape, data: Float32Array}. Throws on a file that is cut short, or of another dtype. */
function parseSafetensors(payload) {
  const view = new DataView(payload.buffer, payload.byteOffset, payload.byteLength);
  const headerBytes = Number(view.getBigUint64(0, true));
  const index = JSON.parse(new TextDecoder().decode(payload.subarray(8, 8 + headerBytes)));
  const tensors = new Map();
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(index)) {
    if (name === '__metadata__' || !(dtype in READERS)) continue; // a policy's tensors are floats
    const length = shape.reduce((product, size) => product * size, 1);
    if (end - begin !== length * SIZES[dtype]) throw new Error(`safetensors: ${name} does not have ${length} elements`);
    const first = 8 + headerBytes + begin;
    const read = READERS[dtype];
    tensors.set(name, { shape, data: Float32Array.from({ length }, (_, i) => read(view, first + i * SIZES[dtype])) });
  }
  return tensors;
}

/** The policy of a run: `load` weights, then `act`. */
class MlpPolicy {
  /** spec: the policy spec of `welcome`; random: a function that returns a number in [0, 1) */
  constructor(spec, random = Math.random) {
    if (spec.kind !== 'mlp_categorical') throw new Error(`this client cannot act by a policy of kind ${spec.kind}`);
    if (!['tanh', 'relu'].includes(spec.activation)) throw new Error(`this client has no activation ${spec.activation}`);
    this.spec = spec;
    this.random = random;
    this.version = 0;
    this.layers = [];
  }

  /** Apply a version completely, or not at all. */
  load(version, tensors) {
    const layers = this.spec.layers.map(([weightName, biasName]) => {
      const weight = tensors.get(weightName);
      const bias = tensors.get(biasName);
      if (!weight || !bias) throw new Error(`version ${version} has no ${weight ? biasName : weightName}`);
      const [numOutputs, numInputs] = weight.shape;
      return { weight: weight.data, bias: bias.data, numOutputs, numInputs };
    });
    this.layers = layers;
    this.version = version;
  }

  /** Natural logarithms of the probabilities of all actions, as numbers; -Infinity where `mask` has a 0. */
  logProbabilities(observation, mask = null) {
    let hidden = Float32Array.from(observation);
    this.layers.forEach(({ weight, bias, numOutputs, numInputs }, layer) => {
      if (hidden.length !== numInputs) throw new Error(`the policy takes ${numInputs} numbers, not ${hidden.length}`);
      const next = new Float32Array(numOutputs);
      for (let row = 0; row < numOutputs; row++) {
        let sum = bias[row];
        for (let column = 0; column < numInputs; column++) sum += weight[row * numInputs + column] * hidden[column];
        next[row] = layer === this.layers.length - 1 ? sum : this.activate(sum);
      }
      hidden = next;
    });
    const logits = Array.from(hidden, (logit, i) => (mask && !mask[i] ? -Infinity : logit));
    const highest = Math.max(...logits);
    const total = Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - highest), 0));
    return logits.map((logit) => logit - highest - total);
  }

  activate(sum) {
    return this.spec.activation === 'tanh' ? Math.tanh(sum) : Math.max(0, sum);
  }

  /** A sampled action with its log-probability. mask: in a run with action masks, 1 for each allowed action, else 0 */
  act(observation, mask = null) {
    const logs = this.logProbabilities(observation, mask);
    const allowed = logs.map((_, action) => action).filter((action) => logs[action] > -Infinity);
    if (!allowed.length) throw new Error('the mask allows no action');
    let rest = this.random();
    let place = 0;
    while (place < allowed.length - 1 && (rest -= Math.exp(logs[allowed[place]])) >= 0) place++;
    return { action: allowed[place], logProbability: Math.min(0, logs[allowed[place]]) };
  }
}

module.exports = { MlpPolicy, parseSafetensors };
