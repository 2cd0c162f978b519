// Tensors become little-endian frames, and steps of one episode segments, as docs/protocol.md: Experience has them. All
// machines that run JavaScript are little-endian.

import { ActorError } from './session.js';

const LARGEST = 3.4028234663852886e38; // of float32, in which the learner computes
const REWARD = { dtype: 'float64', shape: [] };
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int8: Int8Array, int16: Int16Array, int32: Int32Array, int64: BigInt64Array,
  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array, bool: Uint8Array,
};

function getArray(name, dtype) {
  if (!(dtype in ARRAYS)) throw new Error(`${name}: this client cannot send ${dtype}`);
  return ARRAYS[dtype];
}

/**
 * Throw an ActorError where an agent's step has what cannot be sent: a number that is none, is not finite, or is not of the
 * run's dtype; or too many or too few. It names field and position, nothing is sent, and the other agents go on.
 */
export function requireStep(spec, agent, observation, reward, { mask, taken, terminated = false }) {
  requireNumbers(agent, 'observation', spec.observation, observation);
  requireNumbers(agent, 'reward', REWARD, reward);
  if (taken !== undefined) requireNumbers(agent, 'taken', spec.action, taken);
  const size = maskSize(spec);
  if (size && mask && !terminated) requireNumbers(agent, 'mask', { dtype: 'bool', shape: [size] }, mask);
}

function requireNumbers(agent, field, { dtype, shape = [] }, values) {
  const isList = typeof values === 'object' && values !== null;
  const numbers = isList ? values : [values];
  const size = shape.reduce((product, each) => product * each, 1);
  if (numbers.length !== size) throw new ActorError('invalid', `${field} of agent ${agent}: ${numbers.length} numbers, expected ${size}`);
  const holder = dtype.startsWith('float') ? null : new (getArray(field, dtype))(1);
  for (let i = 0; i < size; i++) {
    const problem = findProblem(numbers[i], dtype, holder);
    if (problem) throw new ActorError('invalid', `${field}${isList ? `[${i}]` : ''} of agent ${agent}: ${problem}`);
  }
}

function findProblem(value, dtype, holder) {
  if (!['number', 'bigint', 'boolean'].includes(typeof value)) return 'no number';
  if (Number.isNaN(value)) return 'NaN';
  if (!(Math.abs(Number(value)) <= LARGEST)) return 'infinite in float32';
  if (!holder) return '';
  if (Number.isInteger(Number(value))) holder[0] = isBig(holder.constructor) ? BigInt(value) : Number(value);
  const isOther = Number(holder[0]) !== Number(value) || (dtype === 'bool' && value > 1);
  return isOther ? `${value} is no ${dtype}` : '';
}

const isBig = (Type) => Type === BigInt64Array || Type === BigUint64Array;
const toBytes = (array, length) => new Uint8Array(array.slice(0, length).buffer);

/** The frame of a tensor; `values` are flat, in C order, or a number, and fit it. */
export function packTensor(name, dtype, shape, values) {
  const row = new Rows(name, dtype, shape, 1);
  row.set(0, values);
  return row.pack(1).frame;
}

/** The numbers of a frame. */
export function unpackTensor(dtype, frame) {
  const Type = getArray('action', dtype);
  const array = new Type(frame.slice().buffer); // copied: a frame begins at any address
  return Array.from(array, Number);
}

/** The number of choices in an action mask; 0 in a run without masks. */
export function maskSize(spec) {
  return (spec.extras ?? []).find(({ name }) => name === 'masks')?.tensor.shape[0] ?? 0;
}

/** Rows of one tensor, up to a number of them. */
class Rows {
  constructor(name, dtype, shape, capacity) {
    const Type = getArray(name, dtype);
    this.size = shape.reduce((product, size) => product * size, 1);
    Object.assign(this, { name, dtype, shape, convert: isBig(Type) ? BigInt : Number });
    this.array = new Type(capacity * this.size);
  }

  set(row, values) {
    const numbers = typeof values === 'object' ? values : [values];
    if (numbers.length !== this.size) throw new Error(`${this.name} has ${numbers.length} values, not ${this.size}`);
    for (let i = 0, at = row * this.size; i < this.size; i++, at++) this.array[at] = this.convert(numbers[i]);
  }

  pack(length) {
    return { header: { name: this.name, dtype: this.dtype, shape: [length, ...this.shape] }, frame: toBytes(this.array, length * this.size) };
  }
}

/** Collects the steps of one agent's episodes. */
export class SegmentBuilder {
  /** spec: the experience spec of `welcome` */
  constructor(spec) {
    const { observation, action, segment_length: capacity } = spec;
    const unknown = (spec.extras ?? []).map(({ name }) => name).filter((name) => name !== 'masks');
    if (unknown.length) throw new Error(`this client cannot send ${unknown.join(', ')} with its segments`);
    this.spec = spec;
    this.capacity = capacity;
    this.maskSize = maskSize(spec);
    this.observations = new Rows('observations', observation.dtype, observation.shape ?? [], capacity + 1);
    this.actions = new Rows('actions', action.dtype, action.shape ?? [], capacity);
    this.rewards = new Rows('rewards', 'float32', [], capacity);
    this.logProbabilities = new Rows('log_probabilities', 'float32', [], capacity);
    this.versions = new Rows('versions', 'int64', [], capacity);
    this.masks = this.maskSize ? new Rows('masks', 'bool', [this.maskSize], capacity + 1) : null;
  }

  /** An episode begins with this observation (flat numbers in C order), and its mask in a run with action masks. */
  begin(observation, mask = null) {
    this.length = 0;
    this.isPacked = false;
    this.setObservation(0, observation, mask);
  }

  /** Add a step: the choice {action, logProbability, version} led to the reward and the observation. Returns whether it is full. */
  step({ action, logProbability, version }, reward, observation, mask = null) {
    if (this.isPacked) { // goes on where the one before ended
      this.isPacked = false;
      this.length = 0;
      this.setObservation(0, this.last.observation, this.last.mask);
    }
    const row = this.length++;
    this.actions.set(row, action);
    this.rewards.set(row, reward);
    this.logProbabilities.set(row, logProbability);
    this.versions.set(row, version);
    this.setObservation(this.length, observation, mask);
    return this.length === this.capacity;
  }

  setObservation(row, observation, mask) {
    this.observations.set(row, observation);
    this.masks?.set(row, mask ?? Array(this.maskSize).fill(1)); // in a terminal state no action could follow
    this.last = { observation, mask };
  }

  /** The segment {header, frames} of the steps so far. end: {terminated, truncated, success}; fields: further ones of the header */
  pack({ terminated, truncated, success }, episodeReturn, episodeLength, { isDemonstration = false, ...fields } = {}) {
    const { length } = this;
    const hasEnded = terminated || truncated;
    this.isPacked = true;
    const tensors = [this.observations.pack(length + 1), this.actions.pack(length), this.rewards.pack(length)];
    if (!isDemonstration) tensors.push(this.logProbabilities.pack(length), this.versions.pack(length));
    if (this.masks) tensors.push(this.masks.pack(length + 1));
    const header = {
      tensors: tensors.map(({ header }) => header),
      ...(terminated && { terminated }),
      ...(truncated && { truncated }),
      ...(hasEnded && { episode_return: episodeReturn, episode_length: episodeLength }),
      ...(hasEnded && success !== undefined && { success: Boolean(success) }),
      ...fields,
    };
    return { header, frames: tensors.map(({ frame }) => frame) };
  }
}
