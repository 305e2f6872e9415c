// In the thread of sound: a tenth of a second of samples at a time, in 16 bits.

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.samples = new Int16Array(2400);
    this.count = 0;
  }

  process([input]) {
    for (const sample of input[0] ?? []) {
      this.samples[this.count++] = Math.max(-1, Math.min(1, sample)) * 32767;
      if (this.count === this.samples.length) {
        this.port.postMessage(this.samples.slice().buffer);
        this.count = 0;
      }
    }
    return true;
  }
}

registerProcessor("capture", Capture);
