'use strict';
// Play a game's episodes until the run ends: the ready loop, for a game that can be stepped.

const { MlpPolicy, parseSafetensors } = require('./policy');
const { SegmentBuilder, maskSize, packTensor } = require('./segment_builder');

/**
 * client: connected. game: reset() returns an observation, step(action) {observation, reward, terminated, truncated};
 * an observation is an array of numbers. `numActions` is how many actions it has, where an action is one number. In a run with action masks `mask` is that of the newest observation: an array with
 * 1 for each allowed action, and 0 for the others. Resolves to {steps, episodes} at the end of the run, or after `maxSteps`.
 */
async function play(game, client, { maxSteps = Infinity } = {}) {
  let steps = 0;
  let episodes = 0;
  while (!client.finished && steps < maxSteps) {
    const run = client.runId;
    requireGame(game, client.spec);
    const policy = new MlpPolicy(client.spec.policy);
    const builder = new SegmentBuilder(client.spec);
    let observation = null; // of the running episode
    while (client.runId === run && steps < maxSteps) {
      const newer = policy.version ? client.weights : await client.waitForWeights();
      if (client.finished) return { steps, episodes };
      if (newer && newer.version > policy.version) policy.load(newer.version, parseSafetensors(newer.payload));
      if (!observation) builder.begin((observation = game.reset()), readMask(game, client.spec));
      const choice = policy.act(observation, readMask(game, client.spec));
      const outcome = game.step(choice.action);
      const segment = builder.step(choice, policy.version, outcome, readMask(game, client.spec));
      const hasEnded = Boolean(outcome.terminated || outcome.truncated);
      observation = hasEnded ? null : outcome.observation;
      steps++;
      episodes += Number(hasEnded);
      if (segment && !(await client.send(segment))) break; // the run has ended or changed
      if (steps % 64 === 0) await new Promise(setImmediate); // let messages in
    }
  }
  return { steps, episodes };
}

/** Throws unless the game has the run's actions: one of another game would go unnoticed. */
function requireGame(game, { action }) {
  if (action.shape?.length || action.dtype.startsWith('float')) return;
  const wanted = Number(action.high) + 1;
  if (game.numActions === undefined) throw new Error(`the game declares no numActions: this run has ${wanted} actions`);
  if (game.numActions !== wanted) throw new Error(`the game has numActions = ${game.numActions}, and this run ${wanted} actions`);
}

/** The mask of the game's newest observation, as an array; null in a run without. */
function readMask(game, spec) {
  if (!maskSize(spec)) return null;
  if (!game.mask) throw new Error('this run has action masks, and the game has no `mask`');
  return Array.from(game.mask, Number);
}

/** The same with `inference: 'remote'`: the gateway computes the policy, and any policy that it knows will do. */
async function playRemotely(game, client, { maxSteps = Infinity } = {}) {
  let steps = 0;
  let episodes = 0;
  let number = -1;
  while (!client.finished && steps < maxSteps) {
    requireGame(game, client.spec);
    let observation = game.reset();
    let outcome = { reward: 0 };
    let step = 0;
    let total = 0;
    number++;
    for (;;) {
      const { reward, terminated = false, truncated = false } = outcome;
      const frame = packTensor('observation', client.spec.observation.dtype, client.spec.observation.shape, Array.from(observation)).frame;
      const header = { episode: number, step, reward, terminated, truncated: truncated && !terminated };
      const answer = await client.act(header, frame, packMask(game, client.spec, terminated));
      if (client.finished) return { steps, episodes };
      if (terminated || truncated) break; // an episode that the gateway has lost is over, too
      if (!answer || ['unknown_episode', 'ended_episode', 'failed'].includes(answer.reason)) {
        [number, step, outcome] = [number + 1, 0, { reward: total }]; // the gateway has restarted: go on under a new number
        continue;
      }
      if (answer.reason) throw new Error(`the gateway took no step: ${answer.reason}`);
      outcome = game.step(typeof answer.action === 'bigint' ? Number(answer.action) : answer.action);
      observation = outcome.observation;
      total += outcome.reward;
      step++;
      steps++;
    }
    episodes++;
  }
  return { steps, episodes };
}

/** The frame of the newest observation's mask, all 1 in a terminal state; null in a run without. */
function packMask(game, spec, terminated) {
  const size = maskSize(spec);
  if (!size) return null;
  return packTensor('mask', 'bool', [size], terminated ? Array(size).fill(1) : readMask(game, spec)).frame;
}

module.exports = { play, playRemotely };
