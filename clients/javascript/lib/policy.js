// Weights and acting: safetensors, and the policy `mlp_categorical` of docs/protocol.md, on Float32Array.

const READERS = {
  F32: (view, at) => view.getFloat32(at, true),
  F64: (view, at) => view.getFloat64(at, true),
};
const SIZES = { F32: 4, F64: 8 };

/** Map of name to {shape, data: Float32Array}. Throws on a file that is cut short, or of another dtype. */
export function parseSafetensors(payload) {
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
export class MlpPolicy {
  /** spec: the policy spec of `welcome`; random: a function that returns a number in [0, 1) */
  constructor(spec, random = Math.random) {
    if (spec.kind !== 'mlp_categorical') throw new Error(`no policy of kind ${spec.kind} runs here: connect with inference: 'remote'`);
    if (!['tanh', 'relu'].includes(spec.activation)) throw new Error(`this client has no activation ${spec.activation}`);
    this.spec = spec;
    this.random = random;
    this.version = 0;
    this.layers = [];
  }

  /** Apply a version completely, or not at all; `weights` has it then. */
  load(version, tensors) {
    const layers = this.spec.layers.map(([weightName, biasName]) => {
      const weight = tensors.get(weightName);
      const bias = tensors.get(biasName);
      if (!weight || !bias) throw new Error(`version ${version} has no ${weight ? biasName : weightName}`);
      const [numOutputs, numInputs] = weight.shape;
      return { weight: weight.data, bias: bias.data, numInputs, outputs: new Float32Array(numOutputs) };
    });
    this.layers = layers;
    this.weights = tensors;
    this.version = version;
  }

  /** The last layer's outputs for flat numbers; the next call overwrites them. */
  computeLogits(observation) {
    const activate = this.spec.activation === 'tanh' ? Math.tanh : (sum) => (sum > 0 ? sum : 0);
    let inputs = observation;
    for (let layer = 0; layer < this.layers.length; layer++) {
      const { weight, bias, numInputs, outputs } = this.layers[layer];
      const isLast = layer === this.layers.length - 1;
      if (inputs.length !== numInputs) throw new Error(`the policy takes ${numInputs} numbers, not ${inputs.length}`);
      for (let row = 0, at = 0; row < outputs.length; row++) {
        let sum = bias[row];
        for (let column = 0; column < numInputs; column++, at++) sum += weight[at] * inputs[column];
        outputs[row] = isLast ? sum : activate(sum);
      }
      inputs = outputs;
    }
    return inputs;
  }

  /** Natural logarithms of the probabilities of all actions; -Infinity where `mask` has a 0. */
  logProbabilities(observation, mask = null) {
    const logs = Array.from(this.computeLogits(observation), (logit, action) => (mask && !mask[action] ? -Infinity : logit));
    const highest = Math.max(...logs);
    if (highest === -Infinity) throw new Error('the mask allows no action');
    let total = 0;
    for (const logit of logs) total += Math.exp(logit - highest);
    const shift = highest + Math.log(total);
    for (let action = 0; action < logs.length; action++) logs[action] -= shift;
    return logs;
  }

  /** A sampled action with its log-probability. mask: in a run with action masks, 1 for each allowed action, else 0 */
  act(observation, mask = null) {
    const logs = this.logProbabilities(observation, mask);
    let rest = this.random();
    let chosen = -1;
    for (let action = 0; action < logs.length && rest >= 0; action++) {
      if (logs[action] === -Infinity) continue;
      chosen = action; // the last one where rounding leaves a rest
      rest -= Math.exp(logs[action]);
    }
    return { action: chosen, logProbability: Math.min(0, logs[chosen]) };
  }

  /** The most probable action. */
  choose(observation, mask = null) {
    const logs = this.logProbabilities(observation, mask);
    return logs.indexOf(Math.max(...logs));
  }
}
