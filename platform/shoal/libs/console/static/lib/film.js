// A film that one can stop and go through by hand. Where the browser cannot take it apart it is a picture that moves.
import { h } from "./dom.js";

/** `label`: of its controls. `onseek(share)`: somebody has moved it, 0 to 1. */
export class Film {
  constructor(url, label, { onseek = () => {} } = {}) {
    this.url = url;
    this.turn = 0;
    this.canvas = h("canvas", { role: "img", "aria-label": label, onclick: () => this.toggle() });
    this.button = h("button", { type: "button", onclick: () => this.toggle() }, "Play");
    this.bar = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": `Place in ${label}`, oninput: () => {
      this.pause();
      this.show(Number(this.bar.value));
      onseek(this.bar.value / (Number(this.bar.max) || 1));
    } });
    this.element = h("div", { class: "film" }, this.canvas, h("div", { class: "row" }, this.button, this.bar));
  }

  /** Loads it and shows its first picture. */
  async load() {
    if (!("ImageDecoder" in window)) {
      this.element.replaceChildren(h("img", { src: this.url, alt: this.canvas.getAttribute("aria-label") }));
      return;
    }
    const answer = await fetch(this.url);
    if (!answer.ok) throw new Error((await answer.json()).error);
    this.decoder = new ImageDecoder({ data: await answer.arrayBuffer(), type: "image/webp" });
    await Promise.all([this.decoder.tracks.ready, this.decoder.completed]);
    this.bar.max = this.decoder.tracks.selectedTrack.frameCount - 1;
    await this.show(0);
  }

  /** Draws a picture; returns how many milliseconds it lasts. */
  async show(index) {
    const own = ++this.turn;
    const { image } = await this.decoder.decode({ frameIndex: index });
    if (own === this.turn) {
      if (this.canvas.width !== image.displayWidth) Object.assign(this.canvas, { width: image.displayWidth, height: image.displayHeight });
      this.canvas.getContext("2d").drawImage(image, 0, 0);
      this.bar.value = index;
    }
    const lasts = image.duration / 1000;
    image.close();
    return lasts;
  }

  /** Moves to a part of its length, 0 to 1. */
  async seek(share) {
    if (!this.decoder) return;
    this.pause();
    await this.show(Math.round(share * this.bar.max));
  }

  toggle() { return this.playing ? this.pause() : this.play(); }

  pause() {
    this.playing = null;
    this.button.textContent = "Play";
  }

  async play() {
    if (!this.decoder) return;
    const own = this.playing = {};
    this.button.textContent = "Pause";
    let index = Number(this.bar.value) >= Number(this.bar.max) ? 0 : Number(this.bar.value), at = performance.now();
    while (this.playing === own && this.canvas.isConnected) {
      at = Math.max(at + await this.show(index), performance.now());
      if (index >= Number(this.bar.max)) break;
      await new Promise((resolve) => { setTimeout(resolve, at - performance.now()); });
      index += 1;
    }
    if (this.playing === own) this.pause();
  }

  close() {
    this.pause();
    this.decoder?.close();
    this.decoder = null;
  }
}
