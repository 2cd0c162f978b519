// A policy of Shoal in JavaScript, for browsers and Node: one file, no package. Apache License 2.0.
//
//   const policy = new Policy(await (await fetch('policy.json')).json());
//   policy.reset();                                  // where an episode begins
//   const action = policy.act(observation);          // a number of a Discrete, else an array in C order
const MASKED = -1e9; // the output of a choice that is not allowed

function readFloats(text) {
  const view = new DataView(Uint8Array.from(atob(text), (each) => each.charCodeAt(0)).buffer);
  return Float32Array.from({ length: view.byteLength / 4 }, (_, index) => view.getFloat32(4 * index, true));
}

function multiply(weight, bias, x, outputs) { // weight: [inputs, outputs]
  const rows = outputs.length, columns = weight.length / rows;
  for (let row = 0; row < rows; row++) {
    let sum = bias[row];
    for (let column = 0, at = row; column < columns; column++, at += rows) sum += weight[at] * x[column];
    outputs[row] = sum;
  }
}

const sigmoid = (x) => 0.5 + 0.5 * Math.tanh(0.5 * x);

export class Policy {
  /** json: the content of policy.json; random: a function that gives a number in [0, 1) */
  constructor(json, random = Math.random) {
    if (json.format !== 1) throw new Error(`policy.json: its format is ${json.format}, this file reads 1`);
    if (json.unsupported) throw new Error(`policy.json: ${json.unsupported}: run policy.onnx`);
    const sampled = json.action === 'sampled'; // or the best action is taken
    Object.assign(this, { spec: json, random, sampled });
    this.layers = json.layers.map(({ layer: kind, activation, ...texts }) => {
      const tensors = ['weight', 'bias', 'weight_h', 'bias_h'].map((each) => readFloats(texts[each]));
      const [weight, bias, weightH, biasH] = tensors;
      const [outputs, fromH] = [bias, biasH].map((each) => new Float32Array(each.length));
      return { kind, activation, weight, bias, weightH, biasH, outputs, fromH };
    });
    this.reset();
  }

  /** The same policy for another agent, which has its own state. */
  copy() {
    const other = Object.assign(Object.create(Policy.prototype), this);
    other.reset();
    return other;
  }

  /** The next observation begins an episode. */
  reset() {
    this.state = new Float32Array(this.spec.state_size);
  }

  /** The action at an observation, which is flat. mask: of each choice whether it is allowed */
  act(observation, mask = []) {
    const { action_low: low, action_sizes: sizes, action_shape: shape, observation_size, mask_size } = this.spec;
    const found = `${observation.length} and ${mask.length}`, wanted = `${observation_size} and ${mask_size}`;
    if (found !== wanted) throw new Error(`observation and mask: ${found} numbers, expected ${wanted}`);
    const outputs = this.compute(observation);
    if (low.length) return this.bound(outputs);
    this.outputs = outputs.map((each, index) => (mask_size && !mask[index] ? MASKED : each));
    let begin = 0;
    const action = sizes.map((each) => this.choose(this.outputs.subarray(begin, (begin += each))));
    return shape.length ? action : action[0];
  }

  compute(x) {
    for (const layer of this.layers) {
      multiply(layer.weight, layer.bias, x, layer.outputs);
      x = layer.kind === 'linear' ? layer.outputs : this.advance(layer);
      if (layer.activation === 'tanh') for (let i = 0; i < x.length; i++) x[i] = Math.tanh(x[i]);
      if (layer.activation === 'relu') for (let i = 0; i < x.length; i++) x[i] = Math.max(0, x[i]);
    }
    return x;
  }

  advance({ kind, weightH, biasH, outputs: x, fromH: h }) { // the gates are in torch's order
    const size = x.length / (kind === 'gru' ? 3 : 4), { state } = this;
    multiply(weightH, biasH, state.subarray(0, size), h);
    for (let i = 0, j = size, k = 2 * size, l = 3 * size; i < size; i++, j++, k++, l++) {
      const first = sigmoid(x[i] + h[i]), second = sigmoid(x[j] + h[j]);
      const next = Math.tanh(x[k] + (kind === 'gru' ? first : 1) * h[k]);
      if (kind === 'gru') {
        state[i] = next + second * (state[i] - next);
      } else {
        state[j] = second * state[j] + first * next;
        state[i] = sigmoid(x[l] + h[l]) * Math.tanh(state[j]);
      }
    }
    return state.slice(0, size);
  }

  choose(outputs) {
    const isDrawn = this.sampled && this.spec.kind !== 'epsilon_greedy'; // Gumbel's noise makes the largest a sample
    const scores = Array.from(outputs, (each) => (isDrawn ? each - Math.log(1e-30 - Math.log(this.random())) : each));
    const highest = Math.max(...scores);
    if (!(highest > MASKED / 2)) throw new Error('the mask allows no choice, or a number is NaN');
    return scores.indexOf(highest);
  }

  bound(outputs) { // between low and high, by tanh
    const { action_low: low, action_high: high } = this.spec;
    const clip = (x, least, most) => Math.min(most, Math.max(least, x));
    this.outputs = outputs.map((each, index) => (index < low.length ? each : clip(each, -20, 2)));
    const drawNoise = () => Math.sqrt(-2 * Math.log(1 - this.random())) * Math.cos(2 * Math.PI * this.random());
    return low.map((least, i) => {
      const u = this.outputs[i] + (this.sampled ? Math.exp(this.outputs[low.length + i]) * drawNoise() : 0);
      return clip((least + high[i]) / 2 + ((high[i] - least) / 2) * Math.tanh(u), least, high[i]);
    });
  }
}
