'use strict';
// The actor's end of docs/protocol.md: connect, pull weights, send segments, and recover from any fault. It retains each
// segment until its ack. One event loop: a game that computes longer than `timeout_s` without awaiting is reconnected.

const { createHash, randomBytes } = require('node:crypto');
const { hostname } = require('node:os');
const { decode, encode } = require('@msgpack/msgpack');
const zmq = require('zeromq');

const RETRY_CODES = new Set(['hello_required', 'sequence_gap']);
const DISCARD_CODES = new Set(['malformed', 'too_large']);
const WELCOME_WAIT_MS = 2000;
const MAX_PAUSE_MS = 1000;
const MAX_HEADER_BYTES = 65536;

/** The gateway rejects this client, or cannot be reached: `code` is the gateway's, or `no_gateway`, `bad_weights`. */
class ActorError extends Error {
  constructor(code, message) {
    super(`${code}: ${message}`);
    this.code = code;
  }
}

/** An int of the protocol: with `useBigInt64` a number of 2^32 or more would be encoded as a float. */
const toInt = (value) => (Number.isInteger(value) && Math.abs(value) >= 2 ** 31 ? BigInt(value) : value);
const pack = (header) => encode(header, { useBigInt64: true });
const unpack = (frame) => decode(frame, { useBigInt64: true });
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

class ActorClient {
  /**
   * address: tcp://host:port, as the job prints it, or all that the gateway may have, with | between: each attempt takes the next
   * token: the gateway's access token
   * actorId: unique in the run                         serverKey: the gateway's CURVE key, where it prints one
   * incarnation: grows with every start of the same actorId (number or BigInt); by default the time in milliseconds
   * giveUpAfterMs: how long no gateway may answer      log: called with a line of text
   * inference: 'local', or 'remote': `act` in place of weights and segments
   */
  constructor({ address, token, actorId, incarnation, serverKey, giveUpAfterMs = 60000, log = console.error, inference = 'local' }) {
    if (serverKey && serverKey.length !== 40) throw new ActorError('server_key', `${serverKey} has ${serverKey.length} characters, not 40`);
    this.addresses = address.split('|').filter((each) => each.startsWith('tcp://')); // another may be a place in a store
    if (!this.addresses.length) throw new ActorError('address', `${address} has no tcp://host:port`);
    Object.assign(this, { address: this.addresses[0], token, serverKey, giveUpAfterMs, log, inference });
    this.unanswered = new Map(); // by episode: the `act` whose answer has not come, {header, frame, answer}
    this.actorId = actorId || `${hostname().slice(0, 40)}-${process.pid}-${randomBytes(3).toString('hex')}`;
    this.incarnation = incarnation ?? Date.now();
    this.welcome = null;
    this.weights = null; // {version, payload}
    this.finished = false; // the gateway has reported the end of the run
    this.error = null; // why the client has stopped
    this.reconnects = 0;
    this.acknowledged = { accepted: 0, dropped: 0, duplicate: 0 };
    this.drops = {}; // discarded segments by reason, or by the error that named them
    this.retained = []; // segments without an ack, the oldest first; a prefix of them is in flight
    this.firstSeq = 0;
    this.numSent = 0;
    this.sendLimit = 0;
    this.attempts = 0;
    this.socket = null;
    this.isClosing = false;
    this.waiters = new Set();
  }

  get spec() { return this.welcome.spec; }
  get runId() { return this.welcome?.run_id; }
  get nextSeq() { return this.firstSeq + this.retained.length; }

  // -- for the game -------------------------------------------------------------------------------------------

  /** Say hello; resolves to the experience spec. Rejects with ActorError. */
  async connect() {
    this.loop = this.keepConnected();
    await this.until(() => this.welcome);
    return this.spec;
  }

  /** Resolves to {version, payload} newer than `than`; null when the run ends before. */
  async waitForWeights(than = 0) {
    await this.until(() => this.finished || this.weights?.version > than);
    return this.weights?.version > than ? this.weights : null;
  }

  /** Send a segment of SegmentBuilder; waits for credit. Resolves to false when the run has ended or changed meanwhile. */
  async send(segment) {
    const size = pack({ ...segment.header, kind: 'segment', seq: toInt(2 ** 53) }).length;
    const total = segment.frames.reduce((sum, frame) => sum + frame.length, size);
    if (size > MAX_HEADER_BYTES || total > this.welcome.max_message_bytes) {
      throw new ActorError('too_large', `a segment of ${total} bytes; the gateway takes ${this.welcome.max_message_bytes}`);
    }
    const run = this.runId;
    await this.until(() => this.finished || this.runId !== run || this.nextSeq < this.sendLimit);
    if (this.finished || this.runId !== run) return false;
    this.retained.push(segment);
    this.sendRetained();
    return true;
  }

  /**
   * Send an observation (the frame of `packTensor`) and resolve to the gateway's `action` message; null when the run ends or
   * changes before. header: episode, step, reward, terminated, truncated, as docs/protocol.md has them; mask: the frame of its
   * mask, in a run with action masks.
   */
  async act(header, frame, mask = null) {
    const frames = mask ? [frame, mask] : [frame];
    const asked = { header: { kind: 'act', ...header, episode: toInt(header.episode) }, frames, answer: null };
    const run = this.runId;
    this.unanswered.set(header.episode, asked);
    if (this.isWelcomed) this.post(asked.header, frames);
    await this.until(() => this.finished || this.runId !== run || asked.answer);
    this.unanswered.delete(header.episode);
    return asked.answer;
  }

  /** Wait until every segment is acknowledged; false when that takes longer than `timeoutMs`. */
  async drain(timeoutMs) {
    const settled = this.until(() => this.finished || !this.retained.length).catch(() => {});
    let timer;
    await Promise.race([settled, new Promise((resolve) => (timer = setTimeout(resolve, timeoutMs)))]);
    clearTimeout(timer); // it would keep the process alive
    return !this.retained.length;
  }

  /** Wait for the open acks, say bye, disconnect. */
  async close(reason = 'done', drainMs = 2000) {
    if (this.isClosing) return;
    if (this.socket && !this.finished && !this.error) await this.drain(drainMs);
    this.isClosing = true;
    if (this.socket && !this.finished && !this.error) this.post({ kind: 'bye', reason });
    this.closeSocket(200);
    this.notify();
    await this.loop;
  }

  /** Resolves when `isReady` returns something true; rejects when the client stops. */
  until(isReady) {
    return new Promise((resolve, reject) => {
      const look = () => {
        if (this.error) reject(this.error);
        else if (isReady()) resolve();
        else if (this.isClosing) reject(new ActorError('closed', 'the client is closed'));
        else return;
        this.waiters.delete(look);
      };
      this.waiters.add(look);
      look();
    });
  }

  notify() {
    for (const look of [...this.waiters]) look();
  }

  stop(error) {
    this.error ??= error;
    this.closeSocket(0);
    this.notify();
  }

  // -- connection ---------------------------------------------------------------------------------------------

  async keepConnected() {
    let lostAt = Date.now();
    while (!this.isClosing && !this.finished && !this.error) {
      if (this.attempts) await sleep(Math.min(MAX_PAUSE_MS, 50 * 2 ** (this.attempts - 1)));
      this.attempts++;
      if (this.isClosing) return;
      if (Date.now() - lostAt > this.giveUpAfterMs * (this.welcome ? 5 : 1)) { // a cluster takes a minute to move a gateway
        const lost = `${this.addresses.join(' or ')} does not answer; ${this.retained.length} segments are lost`;
        return this.stop(new ActorError('no_gateway', `${lost}; ${this.welcome ? 'it did before' : this.describeKeyCause()}`));
      }
      if (await this.serveSession()) lostAt = Date.now();
      else this.address = this.addresses[(this.addresses.indexOf(this.address) + 1) % this.addresses.length];
    }
  }

  /** Why a gateway that is there may not answer: CURVE fails in silence. */
  describeKeyCause() {
    if (this.handshakeFailure) return `the encrypted handshake fails (${this.handshakeFailure}): is the server key right?`;
    if (this.serverKey) return `if it is there, its server key is another than ${this.serverKey}, or it has none`;
    return 'if it prints a server key, it answers only actors that have it (--server-key)';
  }

  /** One connection, until it is lost. Returns whether the gateway has welcomed it. */
  async serveSession() {
    const socket = (this.socket = this.openSocket());
    this.isWelcomed = false;
    this.receivedAt = this.beatAt = Date.now();
    this.post({
      kind: 'hello', protocol: 1, token: this.token, actor_id: this.actorId, incarnation: toInt(this.incarnation), client: 'shoal-node',
      inference: this.inference,
    });
    const beat = setInterval(() => this.keepAlive(), 100);
    try {
      while (this.socket === socket) this.receive(await socket.receive());
    } catch (error) {
      if (this.socket === socket) this.stop(error); // of a message; a socket that this client closed is no error
    } finally {
      clearInterval(beat);
    }
    return this.isWelcomed;
  }

  openSocket() {
    const curve = this.serverKey ? zmq.curveKeyPair() : null;
    const socket = new zmq.Dealer({
      sendHighWaterMark: 0, // `send_limit` bounds it; `send` then never waits
      receiveHighWaterMark: 0,
      ipv6: (this.address.match(/:/g) || []).length > 2,
      ...(curve && { curveServerKey: this.serverKey, curvePublicKey: curve.publicKey, curveSecretKey: curve.secretKey }),
    });
    for (const kind of ['protocol', 'auth', 'other']) {
      socket.events.on(`handshake:error:${kind}`, () => (this.handshakeFailure = kind));
    }
    socket.connect(this.address);
    return socket;
  }

  closeSocket(linger) {
    const socket = this.socket;
    this.socket = null;
    if (!socket) return;
    socket.linger = linger;
    socket.close();
  }

  /** Every 100 ms: pings, and the end of a session in which the gateway is silent. */
  keepAlive() {
    const now = Date.now();
    const isLate = now - this.beatAt > 1000; // the game has held the event loop: read what has arrived before judging
    this.beatAt = now;
    if (isLate) this.receivedAt = Math.max(this.receivedAt, now - (this.isWelcomed ? this.welcome.heartbeat_s * 1000 : 0));
    const silentMs = now - this.receivedAt;
    if (!this.isWelcomed) {
      if (silentMs > WELCOME_WAIT_MS) this.closeSocket(0);
      return;
    }
    const heartbeatMs = this.welcome.heartbeat_s * 1000;
    if (silentMs > this.welcome.timeout_s * 1000) this.closeSocket(0);
    else if (now - this.sentAt > heartbeatMs / 2) this.post({ kind: 'ping' });
  }

  post(header, frames = []) {
    const { socket } = this;
    if (!socket) return;
    this.sentAt = Date.now();
    socket.send([pack(header), ...frames]).catch((error) => this.socket === socket && this.stop(error));
  }

  // -- messages -----------------------------------------------------------------------------------------------

  receive([head, ...frames]) {
    const message = unpack(head);
    this.receivedAt = Date.now();
    if (message.kind === 'welcome') this.begin(message);
    else if (message.kind === 'error') this.onError(message);
    else if (this.isWelcomed) this.onMessage(message, frames);
    this.notify();
  }

  begin(welcome) {
    const changed = this.welcome && this.welcome.run_id !== welcome.run_id;
    if (this.welcome) this.reconnects++;
    this.welcome = welcome;
    this.isWelcomed = true;
    if (changed) {
      this.retained = [];
      this.weights = null;
    }
    if (this.inference === 'remote') {
      if (welcome.inference !== 'remote') return this.stop(new ActorError('no_remote_inference', 'the gateway is older'));
      if (!changed) for (const { header, frames } of this.unanswered.values()) this.post(header, frames);
      return;
    }
    const nextSeq = Number(welcome.next_seq);
    this.retained.splice(0, Math.max(0, nextSeq - this.firstSeq));
    this.firstSeq = nextSeq;
    this.numSent = 0;
    this.sendLimit = Number(welcome.send_limit);
    this.post({ kind: 'pull', newer_than: toInt(this.weights?.version ?? 0) });
    this.sendRetained();
  }

  onMessage(message, frames) {
    if (message.kind === 'ack') this.onAck(message);
    else if (message.kind === 'credit') this.raiseLimit(message.send_limit);
    else if (message.kind === 'weights') this.onWeights(message, frames[0]);
    else if (message.kind === 'ping') this.post({ kind: 'pong', nonce: toInt(message.nonce ?? 0) });
    else if (message.kind === 'action') {
      const asked = this.unanswered.get(Number(message.episode));
      if (asked && Number(asked.header.step) === Number(message.step)) asked.answer = message;
      this.attempts = 0;
    } else if (message.kind === 'bye') {
      this.finished = Boolean(message.finished);
      this.closeSocket(0); // what is retained: no gateway takes it after the end; otherwise it is sent again
    }
  }

  onAck(ack) {
    this.attempts = 0;
    this.acknowledged[ack.status] = (this.acknowledged[ack.status] ?? 0) + 1;
    if (ack.status === 'dropped') this.countDrop(ack.reason, `segment ${ack.seq}: ${ack.detail}`);
    const settled = Math.max(0, Math.min(this.retained.length, Number(ack.seq) + 1 - this.firstSeq));
    this.retained.splice(0, settled);
    this.firstSeq += settled;
    this.numSent = Math.max(0, this.numSent - settled);
    this.raiseLimit(ack.send_limit);
  }

  onWeights({ version, sha256 }, payload) {
    if (createHash('sha256').update(payload).digest('hex') !== sha256) {
      return this.stop(new ActorError('bad_weights', `version ${version} does not match its sha256`));
    }
    this.weights = { version: Number(version), payload };
    this.post({ kind: 'pull', newer_than: version });
  }

  onError({ code, message, fatal, seq }) {
    if (fatal || (!this.isWelcomed && !RETRY_CODES.has(code))) return this.stop(new ActorError(code, message));
    if (RETRY_CODES.has(code)) return this.closeSocket(0);
    this.log(`the gateway answers ${code}: ${message}`);
    const position = seq == null ? -1 : Number(seq) - this.firstSeq;
    if (!DISCARD_CODES.has(code) || position < 0 || position >= this.retained.length) return;
    this.retained.splice(position, 1);
    this.countDrop(code, message);
    this.closeSocket(0); // the next welcome numbers those behind it anew
  }

  countDrop(reason, detail) {
    if (!(reason in this.drops)) this.log(`the gateway dropped a segment (${reason}: ${detail})`);
    this.drops[reason] = (this.drops[reason] ?? 0) + 1;
  }

  raiseLimit(limit) {
    this.sendLimit = Math.max(this.sendLimit, Number(limit));
    this.sendRetained();
  }

  sendRetained() {
    while (this.socket && this.isWelcomed && this.numSent < this.retained.length && this.firstSeq + this.numSent < this.sendLimit) {
      const { header, frames } = this.retained[this.numSent];
      this.post({ ...header, kind: 'segment', seq: toInt(this.firstSeq + this.numSent) }, frames);
      this.numSent++;
    }
  }
}

module.exports = { ActorClient, ActorError };
