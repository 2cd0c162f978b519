#!/usr/bin/env node
// An actor of a run, as a command: `node actor.js --help`.

import { randomBytes } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { homedir, hostname } from 'node:os';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';
import { connect } from './index.js';

const USAGE = `usage: node actor.js --connect ADDRESS [options]

Plays a game with the policy of a run, and sends the experience to its gateway, until the run is over.
Node.js 22 or newer has WebSocket; from 20.11 on: node --experimental-websocket actor.js ...

  --connect ADDRESS        the gateway: ws://host:port, or with ZeroMQ tcp://host:port, as the job prints it; with | between,
                           all that it may have
  --game FILE              a module that exports the game's class (default: catch/catch.js): \`spaces\`, reset(), step(action)
  --actor-id NAME          unique in the run (default: host name, process id and a random number)
  --incarnation N          larger than in the actor's earlier starts (default: the time in milliseconds); where the clock has
                           gone back, one above that in the error stale_incarnation
  --server-key=KEY         the CURVE public key of tcp://, when the job prints one; it may begin with a dash
  --inference local|remote where the policy runs: here (default), or at the gateway, which gets each observation
  --give-up-after SECONDS  without an answer of a gateway (default: 60); five times as long once it has answered
  --help                   this text

The token is $SHOAL_TOKEN, or the file \`token\` in $SHOAL_HOME (default ~/.shoal).`;

async function main() {
  const { values } = parseArgs({
    options: {
      connect: { type: 'string' },
      game: { type: 'string', default: join(import.meta.dirname, 'catch', 'catch.js') },
      'actor-id': { type: 'string' },
      incarnation: { type: 'string' },
      'server-key': { type: 'string' },
      inference: { type: 'string', default: 'local' },
      'give-up-after': { type: 'string', default: '60' },
      help: { type: 'boolean', short: 'h', default: false },
    },
  });
  if (values.help) return console.log(USAGE);
  for (const [option, form] of [['incarnation', /^\d+$/], ['give-up-after', /^\d+(\.\d+)?$/], ['inference', /^(local|remote)$/]]) {
    if (values[option] !== undefined && !form.test(values[option])) throw new Error(`--${option} ${values[option]}: see --help`);
  }
  if (!values.connect) throw new Error('--connect ws://host:port is missing: the job prints it');
  const home = process.env.SHOAL_HOME || join(homedir(), '.shoal');
  const token = process.env.SHOAL_TOKEN || readFileSync(join(home, 'token'), 'utf8').trim();
  const { default: Game } = await import(pathToFileURL(resolve(values.game)));
  const game = new Game();
  if (!game.spaces) throw new Error(`${values.game}: the game has no \`spaces\`, as { observation: [4], action: 3 }`);
  const run = await connect(values.connect.split('|'), token, {
    actorId: values['actor-id'] ?? `${hostname().slice(0, 40)}-${process.pid}-${randomBytes(3).toString('hex')}`,
    incarnation: values.incarnation === undefined ? undefined : Number(values.incarnation),
    offers: game.spaces, serverKey: values['server-key'], giveUpAfterMs: 1000 * Number(values['give-up-after']), inference: values.inference,
  });
  for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => run.leave('interrupted').then(() => process.exit(130)));
  const { steps, episodes } = await play(run, game);
  await run.leave();
  const { acknowledged } = run.player;
  console.log(`${episodes} episodes, ${steps} steps${acknowledged ? `; segments: ${JSON.stringify(acknowledged)}` : ''}`);
}

/**
 * Play episodes until the run ends. game: reset() returns an observation, an array of numbers; step(action) returns
 * {observation, reward, terminated, truncated}. In a run with action masks `mask` is that of the newest observation: an array
 * with 1 for each allowed action, else 0.
 */
async function play(run, game) {
  const played = { steps: 0, episodes: 0 };
  while (!run.finished) {
    let outcome = { observation: game.reset(), reward: 0 };
    run.begin('game');
    while (!outcome.terminated && !outcome.truncated) {
      const action = await run.act('game', outcome.observation, outcome.reward, { mask: game.mask });
      if (action === null) return played;
      outcome = game.step(action);
      played.steps++;
    }
    await run.end('game', outcome.observation, outcome.reward, { truncated: !outcome.terminated, mask: game.mask });
    played.episodes++;
  }
  return played;
}

main().catch((error) => {
  console.error(`error: ${error.message}`);
  process.exit(1);
});
