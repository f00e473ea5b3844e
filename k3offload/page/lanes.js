"use strict";
// Two pictures: lanes over the last seconds, and the experts of all layers.  They know numbers and
// colours of the style sheet, and nothing of where numbers come from.

const still = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

/** A canvas with one unit per pixel of the style sheet, sharp on any screen. */
function sheet(canvas) {
  const sharp = window.devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  const [w, h] = [Math.round(width * sharp), Math.round(height * sharp)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const pen = canvas.getContext("2d");
  pen.setTransform(sharp, 0, 0, sharp, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Lanes that move on by whole bins, a little behind the present, so that they do not stutter. */
class Lanes {
  constructor(canvas) {
    this.canvas = canvas;
    this.shown = 10; // seconds
    this.lanes = null;
    this.skew = null; // the server's clock less ours
    this.drawn = 0;
  }

  take(lanes) {
    const skew = lanes.end - performance.now() / 1000;
    const off = this.skew === null ? Infinity : Math.abs(skew - this.skew);
    this.skew = off > 1 ? skew : this.skew + 0.1 * (skew - this.skew);
    this.lanes = lanes;
    this.draw();
  }

  /** Called for every frame; most of them change nothing. */
  frame() {
    if (!this.lanes || still.matches) return;
    const bin = Math.floor(this.right() / this.lanes.bin);
    if (bin !== this.drawn) this.draw();
  }

  right() {
    if (still.matches) return this.lanes.end;
    return Math.min(this.lanes.end, performance.now() / 1000 + this.skew - 0.6);
  }

  draw() {
    const { pen, width, height } = sheet(this.canvas);
    if (!this.lanes) return;
    const { bin, end } = this.lanes;
    const last = Math.floor(this.right() / bin);
    this.drawn = last;
    const names = ["disk", ...(this.lanes.copy ? ["copy"] : []), "compute"];
    const [left, step] = [62, height / names.length];
    const wide = (width - left) / (this.shown / bin);
    pen.font = getComputedStyle(this.canvas).font;
    pen.textBaseline = "middle";
    names.forEach((name, row) => {
      const foot = Math.round((row + 1) * step) - 5;
      pen.fillStyle = colour("soft");
      pen.fillText(name, 0, foot - (step - 10) / 2);
      pen.fillStyle = colour("rule");
      pen.fillRect(left, foot, width - left, 1);
      const late = Math.round(end / bin) - last; // bins that are known and not yet shown
      for (const [series, shade] of this.layers(name)) {
        this.bars(pen, this.lanes[series], late, { shade, left, wide, foot, tall: step - 12, width });
      }
    });
  }

  /** What is drawn in a lane, the farthest first. */
  layers(name) {
    if (name === "disk") return [["ahead", "ahead"], ["asked_for", "disk"]];
    if (name === "copy") return [["copy", "copy"]];
    return [["both", "waiting"], ["compute", "compute"]];
  }

  bars(pen, values, late, { shade, left, wide, foot, tall, width }) {
    const { compute, waiting } = this.lanes;
    const some = values || compute.map((n, i) => Math.min(100, n + waiting[i]));
    pen.fillStyle = colour(shade);
    const count = Math.round(this.shown / this.lanes.bin);
    for (let i = 0; i < count; i += 1) {
      const value = some[some.length - 1 - late - i] || 0;
      if (!value) continue;
      const [x, to] = [Math.round(width - (i + 1) * wide), Math.round(width - i * wide)];
      const h = Math.max(1, (value / 100) * tall);
      if (x >= left) pen.fillRect(x, foot - h, to - x, h);
    }
  }
}

/** base64 -> its bits, a Uint8Array of 0 and 1. */
function bits(packed, count) {
  const bytes = atob(packed);
  const found = new Uint8Array(count);
  for (let i = 0; i < count; i += 1) found[i] = (bytes.charCodeAt(i >> 3) >> (7 - (i & 7))) & 1;
  return found;
}

/** Experts across, layers downwards; what was used or read a moment ago glows for a while. */
class Heat {
  constructor(canvas) {
    this.canvas = canvas;
    this.picture = document.createElement("canvas"); // one pixel for each place
    this.rows = this.columns = 0;
  }

  shape(layers, experts) {
    this.layers = layers;
    [this.rows, this.columns] = [layers.length, experts];
    const n = this.rows * this.columns;
    this.ram = this.gpu = null;
    this.used = new Float32Array(n);
    this.read = new Float32Array(n);
    const ratio = experts / (this.rows || 1) / 4;
    this.canvas.style.aspectRatio = String(Math.min(2, Math.max(1.4, ratio)));
  }

  take(resident, asked) {
    const n = this.rows * this.columns;
    if (!n) return;
    const ram = bits(resident.ram || "", n);
    const gpu = resident.device ? bits(resident.device, n) : new Uint8Array(n);
    const now = bits(asked, n);
    for (let i = 0; i < n; i += 1) {
      const came = this.ram && ram[i] && !this.ram[i];
      const passed = now[i] && !ram[i] && !gpu[i]; // read, used, and gone again
      this.used[i] = now[i] ? 1 : this.used[i] * 0.6;
      this.read[i] = came || passed ? 1 : this.read[i] * 0.6;
    }
    [this.ram, this.gpu] = [ram, gpu];
    this.draw();
  }

  /** Where there are more experts than places for them, a place is as dark as the part of its
      experts that are resident; small parts are to be seen too, hence the root.  The last thing
      that happened to one of them glows above that. */
  draw() {
    const { pen, width, height } = sheet(this.canvas);
    if (!this.ram || !width) return;
    const each = Math.ceil((2 * this.columns) / width); // experts of a place
    const across = Math.ceil(this.columns / each);
    [this.picture.width, this.picture.height] = [across, this.rows];
    const inner = this.picture.getContext("2d");
    const image = inner.createImageData(across, this.rows);
    const [empty, ram, gpu, used, read] =
      ["empty", "ram", "gpu", "compute", "disk"].map((name) => rgb(colour(name)));
    for (let at = 0; at < across * this.rows; at += 1) {
      const row = Math.floor(at / across);
      const begin = row * this.columns + (at % across) * each;
      const end = Math.min(begin + each, (row + 1) * this.columns);
      let [here, there, hit, came] = [0, 0, 0, 0];
      for (let i = begin; i < end; i += 1) {
        here += this.ram[i];
        there += this.gpu[i];
        hit = Math.max(hit, this.used[i]);
        came = Math.max(came, this.read[i]);
      }
      const [glow, strong] = came >= hit ? [read, came] : [used, hit];
      const [a, b] = [Math.sqrt(here / (end - begin)), Math.sqrt(there / (end - begin))];
      for (let c = 0; c < 3; c += 1) {
        let shade = empty[c] + (ram[c] - empty[c]) * a;
        shade += (gpu[c] - shade) * b;
        image.data[4 * at + c] = shade + (glow[c] - shade) * (strong > 0.3 ? strong : 0);
      }
      image.data[4 * at + 3] = 255;
    }
    inner.putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.picture, 0, 0, width, height);
    if (!this.cursor) return;
    const [w, h] = [width / this.columns, height / this.rows];
    pen.strokeStyle = colour("ink");
    pen.strokeRect(this.cursor.expert * w - 1, this.cursor.row * h - 1, w + 2, h + 2);
  }

  /** Point at a cell, or at none; returns what there is to say about it. */
  point(row, expert) {
    this.cursor = row === null ? null : {
      row: Math.min(this.rows - 1, Math.max(0, row)),
      expert: Math.min(this.columns - 1, Math.max(0, expert)),
    };
    this.draw();
    if (!this.cursor || !this.ram) return "";
    const i = this.cursor.row * this.columns + this.cursor.expert;
    const where = this.gpu[i] ? "on the GPU" : this.ram[i] ? "in RAM" : "on disk alone";
    let inRow = 0;
    for (let e = 0; e < this.columns; e += 1) {
      const at = this.cursor.row * this.columns + e;
      inRow += this.ram[at] || this.gpu[at];
    }
    return `Layer ${this.layers[this.cursor.row]}, expert ${this.cursor.expert}: ${where}. ` +
      `${whole(inRow)} of ${whole(this.columns)} of this layer are resident.`;
  }
}

/** #rrggbb -> three numbers. */
function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}
