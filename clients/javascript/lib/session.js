// The actor's end of docs/protocol.md: a session that outlives its connections. What is played in it, and sent again after
// a reconnect, is the player's: local.js or remote.js. One event loop; it waits for messages, never for a frame on the screen.

import { WebSocketTransport } from './transport.js';

const RETRY_CODES = new Set(['hello_required', 'sequence_gap']);
const WELCOME_WAIT_MS = 2000;
const MAX_PAUSE_MS = 1000;
export const NOT_AWAITED = 'the action before has not come yet: await it';
const WATCH_MS = 200;
const LOGGED_ATTEMPTS = 4; // without an answer: about half a second

/** The gateway rejects this client, or cannot be reached: `code` is the gateway's, or `no_gateway`, `bad_weights`. */
export class ActorError extends Error {
  constructor(code, message) {
    super(`${code}: ${message}`);
    this.code = code;
  }
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Session {
  /** See `connect` in index.js. */
  constructor({ addresses, token, actorId, incarnation, inference, behaviour, offers, serverKey, giveUpAfterMs, log, onSettings }) {
    this.addresses = [].concat(addresses).filter((each) => /^(wss?|tcp):\/\//.test(each)); // another may be a place in a store
    if (!this.addresses.length) throw new ActorError('address', `${addresses} has no ws://host:port`);
    if (serverKey && serverKey.length !== 40) throw new ActorError('server_key', `${serverKey} has ${serverKey.length} characters, not 40`);
    this.hello = {
      kind: 'hello', protocol: 1, token, inference, client: 'shoal-javascript',
      actor_id: actorId || `game-${Math.random().toString(16).slice(2, 10)}`,
      incarnation: incarnation ?? Date.now(),
      ...(behaviour && { behaviour }),
      ...(offers && { offers }),
    };
    if (!Number.isSafeInteger(this.hello.incarnation)) throw new ActorError('incarnation', `${incarnation} is no integer up to 2^53 - 1`);
    Object.assign(this, { serverKey, giveUpAfterMs, log, onSettings });
    this.welcome = null; // the newest
    this.isWelcomed = false; // on this connection
    this.settings = {};
    this.settingsVersion = 0;
    this.finished = false; // the gateway has reported the end of the run
    this.error = null; // why the session has stopped
    this.reconnects = 0;
    this.bytesSent = 0; // over connections that have ended, and see `countBytes`
    this.isLeaving = false;
    this.attempts = 0;
    this.transport = null;
    this.waiters = new Set();
  }

  get spec() { return this.welcome.spec; }
  get runId() { return this.welcome?.run_id; }
  get actorId() { return this.hello.actor_id; }
  get isOver() { return this.isLeaving || this.finished || this.error !== null; }

  /** Bytes of the messages that were sent, over WebSocket. */
  countBytes() { return this.bytesSent + (this.transport?.bytesSent ?? 0); }

  async connect(player) {
    this.player = player;
    this.loop = this.keepConnected();
    await this.until(() => this.finished || player.isReady);
  }

  /** Wait `drainMs` for what is not acknowledged, say bye, disconnect. The page or program may go on without the run. */
  async leave(reason = 'done', drainMs = 2000) {
    if (!this.isOver && this.welcome) {
      let timer;
      const isLate = new Promise((resolve) => (timer = setTimeout(resolve, drainMs)));
      await Promise.race([this.until(() => this.finished || !this.player.isWaiting).catch(() => {}), isLate]);
      clearTimeout(timer); // it would keep a program alive
    }
    const mayPost = !this.isOver;
    this.isLeaving = true;
    if (mayPost) this.post({ kind: 'bye', reason });
    this.transport?.close(200);
    this.notify();
    await this.loop;
  }

  /** Resolves when `isReady` returns something true; rejects when the session stops. */
  until(isReady) {
    return new Promise((resolve, reject) => {
      const look = () => {
        if (this.error) reject(this.error);
        else if (isReady()) resolve();
        else if (this.isLeaving) reject(new ActorError('closed', 'the session is closed'));
        else return;
        this.waiters.delete(look);
      };
      this.waiters.add(look);
      look();
    });
  }

  notify() {
    if (this.isOver) this.player.release(this.error);
    for (const look of [...this.waiters]) look();
  }

  stop(error) {
    this.error ??= error;
    this.transport?.close();
    this.notify();
  }

  // -- connections --------------------------------------------------------------------------------------------

  async keepConnected() {
    let place = 0;
    let answeredAt = Date.now();
    while (!this.isOver) {
      if (this.attempts) await sleep(Math.min(MAX_PAUSE_MS, 50 * 2 ** (this.attempts - 1)));
      if (this.isOver) return;
      if (this.attempts++ === LOGGED_ATTEMPTS) this.log(`${this.addresses.join(' or ')} does not answer yet, and is tried again`);
      if (Date.now() - answeredAt > this.giveUpAfterMs * (this.welcome ? 5 : 1)) { // a cluster takes a minute to move a gateway
        const lost = `${this.addresses.join(' or ')} does not answer; ${this.player.describeLoss()}`;
        return this.stop(new ActorError('no_gateway', `${lost}; ${this.welcome ? 'it did before' : this.describeCause()}`));
      }
      try {
        if (await this.serve(this.addresses[place])) answeredAt = Date.now();
        else place = (place + 1) % this.addresses.length;
      } catch (error) {
        this.stop(error); // no such transport here, or an address that is none
      }
    }
  }

  describeCause() {
    if (this.problem) return this.problem;
    if (this.serverKey) return `if it is there, its server key is another than ${this.serverKey}, or it has none`;
    return 'if it prints a server key, it answers only actors that have it; a page also needs its origin among gateway.origins';
  }

  /** One connection, until it is lost. Returns whether a gateway is there: it has said welcome, or that its run begins. */
  async serve(address) {
    const Transport = address.startsWith('tcp') ? (await import('./zeromq.js')).ZeroMqTransport : WebSocketTransport;
    this.isWelcomed = this.isSuspect = this.isAnswered = false;
    this.pingedAt = 0;
    this.receivedAt = this.sentAt = Date.now();
    const watch = setInterval(() => this.watch(), WATCH_MS);
    try {
      const events = { onOpen: () => this.post(this.hello), onMessage: (header, frames) => this.receive(header, frames) };
      await new Promise((resolve) => (this.transport = new Transport(address, Object.assign(events, { onClose: resolve }), this.serverKey)));
      this.problem = events.problem ?? this.problem;
    } finally {
      clearInterval(watch);
      this.bytesSent += this.transport?.bytesSent ?? 0;
      this.transport = null;
    }
    this.isWelcomed = false;
    return this.isAnswered;
  }

  /**
   * Pings while it waits for an answer, and ends a connection without any. A timer that comes late, as in a hidden tab or
   * after a long step of the game, judges nothing before what has arrived was read: only a second look ends it.
   */
  watch() {
    const now = Date.now();
    const { heartbeat_s: heartbeat, timeout_s: timeout } = this.isWelcomed ? this.welcome : { timeout: 0 };
    const limitMs = this.isWelcomed ? timeout * 1000 : WELCOME_WAIT_MS;
    const since = this.isWelcomed ? this.pingedAt : this.receivedAt;
    if (since && now - since > limitMs) {
      if (this.isSuspect) return this.transport?.close();
      this.isSuspect = true;
    }
    if (!this.isWelcomed) return;
    const mustBeat = this.transport.needsHeartbeat && now - this.sentAt > heartbeat * 500;
    if (mustBeat || (!this.pingedAt && this.player.isWaiting && now - this.receivedAt > heartbeat * 1000)) {
      this.post({ kind: 'ping' });
      this.pingedAt ||= now;
    }
  }

  post(header, frames) {
    this.sentAt = Date.now();
    this.transport?.send(header, frames);
  }

  // -- messages -----------------------------------------------------------------------------------------------

  receive(message, frames) {
    this.receivedAt = Date.now();
    this.pingedAt = 0;
    this.isSuspect = false;
    try {
      if (message.kind === 'welcome') this.onWelcome(message);
      else if (message.kind === 'error') this.onError(message);
      else if (this.isWelcomed || message.kind === 'bye') this.onMessage(message, frames);
    } catch (error) {
      this.stop(error);
    }
    this.notify();
  }

  onWelcome(welcome) {
    const hasChanged = this.welcome !== null && this.welcome.run_id !== welcome.run_id;
    if (this.welcome) this.reconnects++;
    if (hasChanged) this.settingsVersion = -1; // those of another run have numbers of their own
    if (welcome.inference !== this.hello.inference && this.hello.inference === 'remote') throw new ActorError('no_remote_inference', 'the gateway is older');
    this.welcome = welcome;
    this.isWelcomed = this.isAnswered = true;
    this.applySettings({ version: welcome.settings_version ?? 0, values: welcome.settings ?? {} });
    this.player.onWelcome(hasChanged);
  }

  onMessage(message, frames) {
    if (message.kind === 'ping') this.post({ kind: 'pong', nonce: message.nonce ?? 0 });
    else if (message.kind === 'settings') this.applySettings(message);
    else if (message.kind === 'bye') {
      this.finished = Boolean(message.finished);
      this.isAnswered = true;
      if (!this.isWelcomed && this.problem !== message.reason) this.log(`${this.addresses.join(' or ')}: ${(this.problem = message.reason)}`);
      this.transport.close(); // what is retained: no gateway takes it after the end; otherwise it is sent again
    } else if (this.player.onMessage(message, frames)) this.attempts = 0; // an answer to what was played
  }

  applySettings({ version, values }) {
    if (version === this.settingsVersion) return;
    this.settings = values;
    this.settingsVersion = version;
    this.onSettings?.(values, version);
  }

  onError(error) {
    const { code, message, fatal } = error;
    if (fatal || (!this.isWelcomed && !RETRY_CODES.has(code))) return this.stop(new ActorError(code, message));
    if (RETRY_CODES.has(code)) return this.transport.close();
    if (!this.player.onError(error)) this.log(`the gateway answers ${code}: ${message}`);
  }
}
