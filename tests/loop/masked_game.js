// Three actions, of which one is allowed, or two: the others end this program. An episode has ten steps.
'use strict';

module.exports = class {
  spaces = { observation: [4], action: 3, masks: true };

  reset() {
    this.steps = 0;
    return this.observe();
  }

  observe() {
    this.mask = [0, 1, 2].map((action) => Number(action === this.steps % 3 || this.steps % 2 === 0));
    return [0, 0, 0, this.steps / 10];
  }

  step(action) {
    if (!this.mask[action]) throw new Error(`action ${action} is not allowed by ${this.mask}`);
    this.steps++;
    const terminated = this.steps === 10 && Math.random() < 0.5;
    return { observation: this.observe(), reward: action, terminated, truncated: this.steps === 10 && !terminated };
  }
};
