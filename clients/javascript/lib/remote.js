// Episodes with the policy at the gateway: an observation goes there, an action comes back. Observations that are sent in
// one turn of the event loop, of several agents, travel in one message.

import { ActorError, NOT_AWAITED } from './session.js';
import { maskSize, packTensor, requireStep, unpackTensor } from './segments.js';

const LOST_REASONS = new Set(['unknown_episode', 'ended_episode', 'failed']);
const MAX_ROWS = 4096; // of a message
const TERMINATED = 1, TRUNCATED = 2, SUCCESS_KNOWN = 4, SUCCESS = 8;

export class RemotePlayer {
  constructor(session) {
    this.session = session;
    this.episodes = new Map(); // by agent
    this.numBegun = 0;
    this.unanswered = new Map(); // by number of the episode
    this.batch = []; // to be sent in this turn
    this.sendsRows = true; // until the gateway knows no `acts`
    this.version = 0; // of the weights that chose the newest action
  }

  get isReady() { return this.session.welcome !== null; }
  get isWaiting() { return this.unanswered.size > 0; }
  describeLoss() { return `${this.unanswered.size} actions have not come`; }

  begin(agent) {
    this.episodes.set(agent, { number: null, step: 0, total: 0, isAssisted: false, settings: this.session.settingsVersion });
  }

  /** Resolves to the action; null after the end of the episode, or of the run. */
  async act(agent, observation, reward = 0, { mask, taken, terminated = false, truncated = false, success } = {}) {
    const { spec, isOver, error } = this.session;
    if (error) throw error;
    if (isOver) return null;
    const episode = this.episodes.get(agent);
    if (!episode) throw new Error(`agent ${agent}: begin an episode first`);
    if (this.unanswered.has(episode.number)) throw new Error(`agent ${agent}: ${NOT_AWAITED}`);
    requireStep(spec, agent, observation, reward, { mask, taken, terminated });
    const size = maskSize(spec);
    if (size && !mask && !terminated) throw new ActorError('invalid', `mask of agent ${agent}: is missing, and this run has action masks`);
    const hasEnded = terminated || truncated;
    if (hasEnded) this.episodes.delete(agent);
    const frame = packTensor('observation', spec.observation.dtype, spec.observation.shape ?? [], observation);
    const maskFrame = size ? Uint8Array.from(terminated ? Array(size).fill(1) : mask, Number) : null;
    const flags = (terminated ? TERMINATED : truncated ? TRUNCATED : 0) | (hasEnded && success !== undefined ? SUCCESS_KNOWN | (success ? SUCCESS : 0) : 0);
    episode.number ??= this.numBegun++; // here, since episodes begin in the order of their numbers
    const { total } = episode;
    if (episode.step) {
      episode.total += reward;
      episode.isAssisted ||= taken !== undefined;
    }
    for (;;) {
      const { number, step, settings, isAssisted } = episode; // at step 0, any `taken` says that a person has acted
      const asked = step ? { reward, taken } : { reward: episode.total, taken: isAssisted ? 0 : undefined };
      const answer = await this.ask({ number, step, frame, maskFrame, flags, settings, ...asked });
      const isLost = LOST_REASONS.has(answer?.reason);
      if (answer?.reason && !isLost) { // the agent may say it once more
        episode.total = total;
        if (!this.episodes.has(agent)) this.episodes.set(agent, episode);
        throw new ActorError(answer.reason, `agent ${agent}: ${answer.detail || 'the gateway took no step'}`);
      }
      if (!answer || hasEnded) return null; // an episode that the gateway has lost is over, too
      if (!isLost) {
        episode.step++;
        this.version = answer.version;
        return answer.action;
      }
      Object.assign(episode, { number: this.numBegun++, step: 0 }); // it has restarted, or the game paused long: go on under a new number
    }
  }

  /** Resolves to the answer; null when the run ends before. */
  ask(asked) {
    return new Promise((resolve, reject) => {
      this.unanswered.set(asked.number, Object.assign(asked, { resolve, reject }));
      this.batch.push(asked);
      if (this.batch.length === 1) this.flushAfter(0);
    });
  }

  /** The session is over: no further answer comes. */
  release(error) {
    for (const { resolve, reject } of this.unanswered.values()) error ? reject(error) : resolve(null);
    this.unanswered.clear();
  }

  /** Send when no further agent has come: those whose actions came together ask together. */
  flushAfter(count) {
    if (this.batch.length > count) queueMicrotask(() => this.flushAfter(Math.max(count + 1, this.batch.length)));
    else this.flush();
  }

  flush() {
    const batch = this.batch.splice(0);
    if (!this.session.isWelcomed || !batch.length) return; // `onWelcome` sends what is unanswered
    const rows = this.sendsRows && batch.length > 1 ? batch.filter(({ taken }) => taken === undefined) : [];
    for (let row = 0; row < rows.length; row += MAX_ROWS) this.postRows(rows.slice(row, row + MAX_ROWS));
    for (const each of rows.length ? batch.filter(({ taken }) => taken !== undefined) : batch) this.postAct(each);
  }

  postAct({ number, step, reward, frame, maskFrame, flags, taken, settings }) {
    const header = {
      kind: 'act', episode: number, step, reward, terminated: Boolean(flags & TERMINATED), truncated: Boolean(flags & TRUNCATED),
      ...(flags & SUCCESS_KNOWN && { success: Boolean(flags & SUCCESS) }),
      ...(taken !== undefined && { taken }),
      ...(step === 0 && settings && { settings }),
    };
    this.session.post(header, maskFrame ? [frame, maskFrame] : [frame]);
  }

  postRows(rows) {
    const join = (frames) => {
      const bytes = new Uint8Array(frames.length * frames[0].byteLength);
      frames.forEach((each, row) => bytes.set(each, row * each.byteLength));
      return bytes;
    };
    const header = { kind: 'acts', episodes: rows.map(({ number }) => number), steps: rows.map(({ step }) => step) };
    if (rows.some(({ settings }) => settings)) header.settings = rows.map(({ settings }) => settings);
    const frames = [
      join(rows.map(({ frame }) => frame)),
      new Uint8Array(Float32Array.from(rows, ({ reward }) => reward).buffer),
      Uint8Array.from(rows, ({ flags }) => flags),
    ];
    if (rows[0].maskFrame) frames.push(join(rows.map(({ maskFrame }) => maskFrame)));
    this.session.post(header, frames);
  }

  onWelcome() { // also of another run, which does not know the episodes: they go on under new numbers
    this.batch = [...this.unanswered.values()];
    this.flush();
  }

  /** Returns whether it is an answer to what was played. */
  onMessage(message, frames) {
    if (message.kind === 'action') this.answer(message.episode, message.step, message);
    else if (message.kind === 'actions') this.onActions(message, frames);
    else return false;
    return true;
  }

  onActions({ episodes, steps, version, refused = [], ended = [] }, frames) {
    const { action } = this.session.spec;
    const values = episodes.length ? unpackTensor(action.dtype, frames[0]) : [];
    const size = values.length / (episodes.length || 1);
    episodes.forEach((number, row) => {
      const chosen = action.shape?.length ? values.slice(row * size, (row + 1) * size) : values[row];
      this.answer(number, steps[row], { action: chosen, version, reason: '' });
    });
    for (const each of refused) this.answer(each.episode, each.step, { ...each, action: null });
    for (const number of ended) this.answer(number, this.unanswered.get(number)?.step, { action: null, reason: '' });
  }

  answer(number, step, answer) {
    const asked = this.unanswered.get(number);
    if (!asked || asked.step !== step) return;
    this.unanswered.delete(number);
    asked.resolve(answer);
  }

  /** Returns whether the error is settled. */
  onError({ code, message }) {
    if (code === 'unknown_kind' && this.sendsRows) {
      this.sendsRows = false; // an older gateway
      this.onWelcome();
      return true;
    }
    if (code === 'malformed' || code === 'too_large') throw new ActorError(code, message); // its answer would never come
    return false;
  }
}
