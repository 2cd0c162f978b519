// Catch in a page joins a run, and plays until the run is over. What joins is between the two lines.

import { connect } from '../index.js';
import { Catch } from './catch.js';

const query = new URLSearchParams(location.search);
const text = document.getElementById('text');
const played = (globalThis.played = { steps: 0, episodes: 0, run: null }); // for tests and benchmarks

async function play(run, agent) {
  const game = new Catch();
  if (agent === 0) draw(game);
  while (!run.finished) {
    let outcome = { observation: game.reset(), reward: 0, terminated: false };
    // ---------------------------------------------------------------------------------------------------------
    run.begin(agent);
    while (!outcome.terminated) {
      const action = await run.act(agent, outcome.observation, outcome.reward);
      if (action === null) return;
      outcome = game.step(action);
      played.steps++;
    }
    await run.end(agent, outcome.observation, outcome.reward);
    // ---------------------------------------------------------------------------------------------------------
    played.episodes++;
  }
}

/** The screen follows the game, and never holds it: a hidden tab draws nothing, and plays on. */
function draw(game) {
  if (game.row !== undefined) game.draw(document.getElementById('field'));
  text.textContent = `${played.run.version} versions, ${played.steps} steps, ${played.episodes} episodes`;
  requestAnimationFrame(() => draw(game));
}

if (query.has('address')) {
  try {
    const agents = Array.from({ length: Number(query.get('agents') ?? 1) }, (_, agent) => agent);
    played.run = await connect(query.getAll('address'), decodeURIComponent(location.hash.slice(1)), {
      inference: query.get('inference') ?? 'local', actorId: query.get('actor') ?? undefined,
    });
    await Promise.all(agents.map((agent) => play(played.run, agent)));
    document.title = 'the run is over';
  } catch (error) {
    document.title = text.textContent = `error: ${error.message}`;
  }
}
