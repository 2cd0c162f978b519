'use strict';
// Four numbers, two actions, no end: what fits the setting of the tests.

module.exports = class {
  spaces = { observation: [4], action: 2 };

  reset() { return [0, 0, 0, 0]; }

  step() { return { observation: [0, 0, 0, 1], reward: 1, terminated: false, truncated: false }; }
};
