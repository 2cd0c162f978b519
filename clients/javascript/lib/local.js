// Episodes with the policy in this program: weights come from the gateway, experience goes there as segments. Each is
// retained until its ack.

import { MlpPolicy, parseSafetensors } from './policy.js';
import { SegmentBuilder, requireStep } from './segments.js';
import { ActorError, NOT_AWAITED } from './session.js';

const DISCARD_CODES = new Set(['malformed', 'too_large']);
const MAX_HEADER_BYTES = 65536;
const STEPS_A_TURN = 128; // then messages are let in

/** Resolves in a later turn of the event loop; at once in a hidden tab, too, where timers and frames wait. */
const nextTurn = globalThis.setImmediate
  ? () => new Promise((resolve) => setImmediate(resolve))
  : (() => {
    const { port1, port2 } = new MessageChannel();
    const waiting = [];
    port1.onmessage = () => waiting.shift()();
    return () => new Promise((resolve) => {
      waiting.push(resolve);
      port2.postMessage(0);
    });
  })();

export class LocalPlayer {
  /** onWeights(version): newer weights act from now on */
  constructor(session, onWeights) {
    this.session = session;
    this.onWeights = onWeights;
    this.episodes = new Map(); // by agent
    this.isDemonstrator = Boolean(session.hello.behaviour); // another than the policy acts
    this.policy = null;
    this.numSteps = 0;
    this.acknowledged = { accepted: 0, dropped: 0, duplicate: 0 };
    this.drops = {}; // discarded segments by reason, or by the error that named them
    this.retained = []; // segments without an ack, the oldest first; a prefix of them is in flight
    this.firstSeq = 0;
    this.numSent = 0;
    this.sendLimit = 0;
  }

  get isReady() { return this.session.welcome !== null && this.acts; }
  get acts() { return this.policy !== null || this.isDemonstrator; }
  get isWaiting() { return this.retained.length > 0; }
  get version() { return this.policy?.version ?? 0; }
  describeLoss() { return `${this.retained.length} segments are lost`; }
  release() {} // what waits here looks by itself

  begin(agent) {
    const builder = this.episodes.get(agent)?.builder ?? null;
    this.episodes.set(agent, { builder, choice: null, total: 0, length: 0, who: '', isAssisted: false, settings: this.session.settingsVersion });
  }

  /** The action, or a promise of it while the learner is busy; null after the end of the episode, or of the run, and of a demonstrator. */
  act(agent, observation, reward = 0, options = {}) {
    const { session } = this;
    if (session.error) throw session.error;
    if (session.isOver) return null;
    const episode = this.episodes.get(agent);
    if (!episode || episode.isOver) throw new Error(`agent ${agent}: begin an episode first`);
    if (episode.isAsked && !this.isDemonstrator) throw new Error(`agent ${agent}: ${NOT_AWAITED}`);
    requireStep(session.spec, agent, observation, reward, options);
    this.record(episode, observation, reward, options);
    episode.isAsked = true;
    const choose = () => {
      episode.isAsked = false;
      return options.terminated || options.truncated || session.isOver ? null : this.choose(episode, observation, options.mask);
    };
    if (++this.numSteps % STEPS_A_TURN && this.numSent === this.retained.length && this.acts) return choose();
    return this.wait().then(choose);
  }

  async wait() {
    await nextTurn();
    await this.session.until(() => this.session.isOver || (this.acts && this.numSent === this.retained.length));
  }

  record(episode, observation, reward, { mask, taken, terminated = false, truncated = false, success }) {
    const { spec } = this.session;
    if (episode.builder?.spec !== spec) { // the first episode, or a reconnect, perhaps to another run
      const isSame = episode.builder && episode.runId === this.session.runId;
      if (isSame) episode.builder.spec = spec;
      else {
        episode.builder = new SegmentBuilder(spec);
        episode.choice = null;
      }
    }
    episode.runId = this.session.runId;
    episode.isOver = terminated || truncated;
    if (episode.choice === null) return episode.builder.begin(observation, mask);
    if (this.isDemonstrator && taken === undefined) throw new Error(`give \`taken\`, the action of the step before: in this session ${this.session.hello.behaviour} acts`);
    const who = taken === undefined || this.isDemonstrator ? '' : 'human'; // for a time, in an episode of the policy
    if (who !== episode.who && episode.hasUnsent) this.sendEpisode(episode, {});
    episode.who = who;
    episode.isAssisted ||= who !== '';
    episode.total += reward;
    episode.length++;
    episode.hasUnsent = true;
    const choice = taken === undefined ? episode.choice : { ...episode.choice, action: taken };
    const isFull = episode.builder.step(choice, reward, observation, terminated ? null : mask);
    if (terminated || truncated || isFull) this.sendEpisode(episode, { terminated, truncated: truncated && !terminated, success });
  }

  /** Send the steps that are not sent yet. */
  sendEpisode(episode, end) {
    const { who, isAssisted, settings } = episode;
    episode.hasUnsent = false;
    this.send(episode.builder.pack(end, episode.total, episode.length, {
      isDemonstration: this.isDemonstrator || who !== '',
      ...(who && { behaviour: who }),
      ...(isAssisted && { assisted: true }),
      ...(settings && { settings }),
    }));
  }

  choose(episode, observation, mask) {
    if (this.isDemonstrator) {
      episode.choice = { logProbability: 0, version: 0 };
      return null;
    }
    episode.choice = { ...this.policy.act(observation, mask), version: this.policy.version };
    return episode.choice.action;
  }

  /** Retain a segment, and send it when the credit allows. */
  send(segment) {
    const size = JSON.stringify(segment.header).length + 60;
    const total = segment.frames.reduce((sum, frame) => sum + frame.byteLength, size);
    if (size > MAX_HEADER_BYTES || total > this.session.welcome.max_message_bytes) {
      throw new ActorError('too_large', `a segment of ${total} bytes; the gateway takes ${this.session.welcome.max_message_bytes}`);
    }
    this.retained.push(segment);
    this.sendRetained();
  }

  sendRetained() {
    while (this.session.isWelcomed && this.numSent < this.retained.length && this.firstSeq + this.numSent < this.sendLimit) {
      const { header, frames } = this.retained[this.numSent];
      this.session.post({ kind: 'segment', seq: this.firstSeq + this.numSent, ...header }, frames);
      this.numSent++;
    }
  }

  onWelcome(hasChanged) {
    const { welcome } = this.session;
    if (hasChanged) {
      this.retained = [];
      this.policy = null;
    }
    this.retained.splice(0, Math.max(0, welcome.next_seq - this.firstSeq));
    this.firstSeq = welcome.next_seq;
    this.numSent = 0;
    this.sendLimit = welcome.send_limit;
    if (!this.isDemonstrator) this.session.post({ kind: 'pull', newer_than: this.version });
    this.sendRetained();
  }

  /** Returns whether it is an answer to what was played. */
  onMessage(message, frames) {
    if (message.kind === 'weights') this.onPayload(message, frames[0]).catch((error) => this.session.stop(error));
    else if (message.kind === 'credit') this.raiseLimit(message.send_limit);
    else if (message.kind === 'ack') this.onAck(message);
    return message.kind === 'ack';
  }

  onAck(ack) {
    this.acknowledged[ack.status] = (this.acknowledged[ack.status] ?? 0) + 1;
    if (ack.status === 'dropped') this.countDrop(ack.reason, `segment ${ack.seq}: ${ack.detail}`);
    const settled = Math.max(0, Math.min(this.retained.length, ack.seq + 1 - this.firstSeq));
    this.retained.splice(0, settled);
    this.firstSeq += settled;
    this.numSent = Math.max(0, this.numSent - settled);
    this.raiseLimit(ack.send_limit);
  }

  raiseLimit(limit) {
    this.sendLimit = Math.max(this.sendLimit, limit);
    this.sendRetained();
  }

  async onPayload({ version, sha256 }, payload) {
    const { session } = this;
    const { runId } = session;
    if (globalThis.crypto?.subtle) { // a page over plain http from another host has none
      const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', payload));
      const hexadecimal = Array.from(digest, (byte) => byte.toString(16).padStart(2, '0')).join('');
      if (hexadecimal !== sha256) throw new ActorError('bad_weights', `version ${version} does not match its sha256`);
    }
    if (session.runId !== runId || version <= this.version) return; // of a run or a connection before
    const policy = this.policy ?? new MlpPolicy(session.spec.policy);
    policy.load(version, parseSafetensors(payload));
    this.policy = policy;
    session.post({ kind: 'pull', newer_than: version });
    this.onWeights?.(version);
    session.notify();
  }

  /** Returns whether the error is settled. */
  onError({ code, message, seq }) {
    const position = seq == null ? -1 : seq - this.firstSeq;
    if (!DISCARD_CODES.has(code) || position < 0 || position >= this.retained.length) return false;
    this.retained.splice(position, 1);
    this.countDrop(code, message);
    this.session.transport.close(); // the next welcome numbers those behind it anew
    return true;
  }

  countDrop(reason, detail) {
    if (!(reason in this.drops)) this.session.log(`the gateway dropped a segment (${reason}: ${detail})`);
    this.drops[reason] = (this.drops[reason] ?? 0) + 1;
  }
}
