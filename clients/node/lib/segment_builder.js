'use strict';
// Steps of one episode become segments: header fields and little-endian frames, as docs/protocol.md: Experience has them.

const WRITERS = {
  float32: [4, (view, at, value) => view.setFloat32(at, value, true)],
  float64: [8, (view, at, value) => view.setFloat64(at, value, true)],
  int8: [1, (view, at, value) => view.setInt8(at, value)],
  int16: [2, (view, at, value) => view.setInt16(at, value, true)],
  int32: [4, (view, at, value) => view.setInt32(at, value, true)],
  int64: [8, (view, at, value) => view.setBigInt64(at, BigInt(value), true)],
  uint8: [1, (view, at, value) => view.setUint8(at, value)],
  uint16: [2, (view, at, value) => view.setUint16(at, value, true)],
  uint32: [4, (view, at, value) => view.setUint32(at, value, true)],
  uint64: [8, (view, at, value) => view.setBigUint64(at, BigInt(value), true)],
  bool: [1, (view, at, value) => view.setUint8(at, value ? 1 : 0)],
};

/** {header, frame} of a tensor; `values` are flat, in C order. Throws when their number is not that of the shape. */
function packTensor(name, dtype, shape, values) {
  if (!(dtype in WRITERS)) throw new Error(`${name}: this client cannot send ${dtype}`);
  const length = shape.reduce((product, size) => product * size, 1);
  if (values.length !== length) throw new Error(`${name} has ${values.length} values, not ${length}`);
  const [size, write] = WRITERS[dtype];
  const frame = Buffer.alloc(length * size);
  const view = new DataView(frame.buffer, frame.byteOffset, frame.byteLength);
  values.forEach((value, i) => write(view, i * size, value));
  return { header: { name, dtype, shape }, frame };
}

/** The number of choices in an action mask; 0 in a run without masks. */
function maskSize(spec) {
  return (spec.extras ?? []).find(({ name }) => name === 'masks')?.tensor.shape[0] ?? 0;
}

/** Collects the steps of one episode after another. */
class SegmentBuilder {
  /** spec: the experience spec of `welcome` */
  constructor(spec) {
    this.spec = spec;
    this.maskSize = maskSize(spec);
    const unknown = (spec.extras ?? []).map(({ name }) => name).filter((name) => name !== 'masks');
    if (unknown.length) throw new Error(`this client cannot send ${unknown.join(', ')} with its segments`);
  }

  /** An episode begins with this observation (flat numbers in C order), and its mask in a run with action masks. */
  begin(observation, mask = null) {
    this.episodeReturn = 0;
    this.episodeLength = 0;
    this.restart(Array.from(observation), mask);
  }

  restart(observation, mask) {
    this.observations = [observation];
    this.masks = [mask];
    this.actions = [];
    this.rewards = [];
    this.logProbabilities = [];
    this.versions = [];
  }

  /** Add a step; returns a segment when it is full or the episode has ended, otherwise null. */
  step({ action, logProbability }, version, { observation, reward, terminated = false, truncated = false }, mask = null) {
    this.observations.push(Array.from(observation));
    this.masks.push(mask);
    this.actions.push(action);
    this.rewards.push(reward);
    this.logProbabilities.push(logProbability);
    this.versions.push(version);
    this.episodeReturn += reward;
    this.episodeLength += 1;
    const hasEnded = terminated || truncated;
    if (!hasEnded && this.actions.length < this.spec.segment_length) return null;
    const segment = this.pack(terminated, truncated && !terminated);
    this.restart(this.observations.at(-1), mask);
    return segment;
  }

  pack(terminated, truncated) {
    const length = this.actions.length;
    const { observation, action } = this.spec;
    const tensors = [
      packTensor('observations', observation.dtype, [length + 1, ...observation.shape], this.observations.flat()),
      packTensor('actions', action.dtype, [length, ...action.shape], this.actions.flat()),
      packTensor('rewards', 'float32', [length], this.rewards),
      packTensor('log_probabilities', 'float32', [length], this.logProbabilities),
      packTensor('versions', 'int64', [length], this.versions),
    ];
    const hasEnded = terminated || truncated;
    if (this.maskSize) {
      if (terminated) this.masks[length] = Array(this.maskSize).fill(1); // no action could follow
      tensors.push(packTensor('masks', 'bool', [length + 1, this.maskSize], this.masks.flat()));
    }
    return {
      header: {
        tensors: tensors.map(({ header }) => header),
        terminated,
        truncated,
        episode_return: hasEnded ? this.episodeReturn : null,
        episode_length: hasEnded ? this.episodeLength : null,
      },
      frames: tensors.map(({ frame }) => frame),
    };
  }
}

module.exports = { SegmentBuilder, maskSize, packTensor };
