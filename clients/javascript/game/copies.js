// Eight copies of the game learn in a worker, so that the page stays smooth. One connection has them all as its agents.

import { connect } from '../index.js';
import { Catch } from '../catch/catch.js';

const NUM_COPIES = 8;
const SHOW_MS = 50;
const MEAN_OF = 100; // episodes
const CATCH_UP_MS = 100; // of the time in which it could not keep the speed
const games = Array.from({ length: NUM_COPIES }, () => new Catch());
const returns = []; // of the newest episodes
let stepsPerSecond = 100; // of each copy; Infinity: as fast as it goes
let steps = 0, episodes = 0, run = null;

onmessage = async ({ data }) => {
  if (data.stepsPerSecond) return (stepsPerSecond = data.stepsPerSecond);
  try {
    run = await connect(data.address, data.token, { offers: games[0].spaces, onWeights: () => run && show() });
    const shown = setInterval(show, SHOW_MS);
    await Promise.all(games.map(play));
    clearInterval(shown);
    show();
    const { version, spec, weights } = run.player.policy;
    postMessage({ champion: { version, spec, weights } });
  } catch (error) {
    postMessage({ error: error.message });
  }
};

async function play(game, agent) {
  for (let due = performance.now(); !run.finished; ) {
    let outcome = { observation: game.reset(), reward: 0 };
    let total = 0;
    run.begin(agent);
    while (!outcome.terminated) {
      const action = await run.act(agent, outcome.observation, outcome.reward);
      if (action === null) return;
      outcome = game.step(action);
      total += outcome.reward;
      steps++;
      const now = performance.now();
      due = Math.max(due + 1000 / stepsPerSecond, now - CATCH_UP_MS);
      if (due > now + 4) await new Promise((resolve) => setTimeout(resolve, due - now));
    }
    await run.end(agent, outcome.observation, outcome.reward);
    episodes++;
    returns.push(total);
    if (returns.length > MEAN_OF) returns.shift();
  }
}

function show() {
  const fields = games.map(({ row, column, basket }) => ({ row, column, basket }));
  const mean = returns.length ? returns.reduce((sum, each) => sum + each, 0) / returns.length : null;
  postMessage({ fields, mean, steps, episodes, version: run.version, isConnected: run.isWelcomed });
}
