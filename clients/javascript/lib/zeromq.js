// How messages travel over ZeroMQ, in Node alone: its packages are `zeromq` and `@msgpack/msgpack`. See transport.js.

import { decode, encode } from '@msgpack/msgpack';
import zmq from 'zeromq';

export class ZeroMqTransport {
  needsHeartbeat = true; // without a message the gateway ends the session

  /** serverKey: the gateway's CURVE key, where it prints one */
  constructor(address, events, serverKey) {
    this.events = events;
    const curve = serverKey ? zmq.curveKeyPair() : null;
    this.socket = new zmq.Dealer({
      sendHighWaterMark: 0, // `send_limit` bounds it; `send` then never waits
      receiveHighWaterMark: 0,
      ipv6: (address.match(/:/g) || []).length > 2,
      ...(curve && { curveServerKey: serverKey, curvePublicKey: curve.publicKey, curveSecretKey: curve.secretKey }),
    });
    for (const kind of ['protocol', 'auth', 'other']) {
      this.socket.events.on(`handshake:error:${kind}`, () => (events.problem = `the encrypted handshake fails (${kind}): is the server key right?`));
    }
    this.socket.connect(address);
    queueMicrotask(() => {
      this.events?.onOpen(); // ZeroMQ retains what is sent before the connection stands
      this.receive();
    });
  }

  async receive() {
    try {
      for (;;) {
        const [header, ...frames] = await this.socket.receive();
        this.events?.onMessage(decode(header), frames);
      }
    } catch (error) {
      if (this.events) throw error; // otherwise: of the socket that this client closed
    }
  }

  send(header, frames = []) {
    this.socket.send([encode(header), ...frames]).catch(() => this.close());
  }

  /** Idempotent. lingerMs: for what was sent before to leave */
  close(lingerMs = 0) {
    const { events } = this;
    this.events = null;
    if (!events) return;
    this.socket.linger = lingerMs;
    this.socket.close();
    events.onClose();
  }
}
