// How messages travel over WebSocket: a binary message has a header, which is JSON, and frames. `zeromq.js` is the other
// transport, for Node alone. A transport calls `onOpen()`, `onMessage(header, frames)`, and once `onClose()`.

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** One binary message. header: an object; frames: Uint8Arrays */
export function joinFrames(header, frames = []) {
  const parts = [encoder.encode(JSON.stringify(header)), ...frames];
  const bytes = new Uint8Array(parts.reduce((total, part) => total + 4 + part.byteLength, 0));
  const view = new DataView(bytes.buffer);
  let at = 0;
  for (const part of parts) {
    view.setUint32(at, part.byteLength, true);
    bytes.set(part, at + 4);
    at += 4 + part.byteLength;
  }
  return bytes;
}

/** [header, frames] of a binary message, an ArrayBuffer; the frames are views of it. */
export function splitFrames(buffer) {
  const view = new DataView(buffer);
  const parts = [];
  for (let at = 0; at < buffer.byteLength; ) {
    const size = view.getUint32(at, true);
    parts.push(new Uint8Array(buffer, at + 4, size));
    at += 4 + size;
  }
  return [JSON.parse(decoder.decode(parts[0])), parts.slice(1)];
}

export class WebSocketTransport {
  needsHeartbeat = false; // the library answers the gateway's pings, in a hidden tab too

  constructor(address, events) {
    if (!globalThis.WebSocket) throw new Error('no WebSocket: use Node.js 22 or newer, or `node --experimental-websocket` from 20.11 on');
    this.events = events;
    this.bytesSent = 0;
    this.socket = new WebSocket(address);
    this.socket.binaryType = 'arraybuffer';
    this.socket.onopen = () => this.events?.onOpen();
    this.socket.onmessage = ({ data }) => this.events?.onMessage(...splitFrames(data));
    this.socket.onclose = this.socket.onerror = () => this.close(); // Node 20 has no `close` after a connection that fails
  }

  send(header, frames) {
    if (this.socket.readyState !== 1) return; // `onclose` follows, and what is unanswered is sent again
    const message = joinFrames(header, frames);
    this.bytesSent += message.byteLength;
    this.socket.send(message);
  }

  /** Idempotent; what was sent before still leaves. */
  close() {
    const { events } = this;
    this.events = null;
    if (!events) return;
    this.socket.close(1000);
    events.onClose();
  }
}
