#!/usr/bin/env node
'use strict';
// An actor of a run, as a command: `node actor.js --help`.

const { readFileSync } = require('node:fs');
const { homedir } = require('node:os');
const { join, resolve } = require('node:path');
const { parseArgs } = require('node:util');

const USAGE = `usage: node actor.js --connect ADDRESS [options]

Plays a game with the policy of a run, and sends the experience to its gateway, until the run is over.

  --connect ADDRESS        the gateway: tcp://host:port, as the job prints it; with | between, all that it may have
  --game FILE              a module that exports the game's class (default: games/catch.js): \`numActions\`, reset(), step(action)
  --actor-id NAME          unique in the run (default: host name, process id and a random number)
  --incarnation N          larger than in the actor's earlier starts (default: the time in milliseconds); where the clock has
                           gone back, one above that in the error stale_incarnation
  --server-key=KEY         the gateway's CURVE public key, when the job prints one; it may begin with a dash
  --inference local|remote where the policy runs: here (default), or at the gateway, which gets each observation
  --give-up-after SECONDS  without an answer of a gateway (default: 60); five times as long once it has answered
  --help                   this text

The token is $SHOAL_TOKEN, or the file \`token\` in $SHOAL_HOME (default ~/.shoal).`;

async function main() {
  const { values } = parseArgs({
    options: {
      connect: { type: 'string' },
      game: { type: 'string', default: join(__dirname, 'games', 'catch.js') },
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
  if (!values.connect) throw new Error('--connect tcp://host:port is missing: the job prints it');
  const { ActorClient, play, playRemotely } = require('./lib'); // here: the help needs no packages
  const home = process.env.SHOAL_HOME || join(homedir(), '.shoal');
  const token = process.env.SHOAL_TOKEN || readFileSync(join(home, 'token'), 'utf8').trim();
  const Game = require(resolve(values.game));
  const client = new ActorClient({
    address: values.connect, token, actorId: values['actor-id'], serverKey: values['server-key'],
    incarnation: values.incarnation === undefined ? undefined : BigInt(values.incarnation),
    giveUpAfterMs: 1000 * Number(values['give-up-after']), inference: values.inference,
  });
  for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => client.close('interrupted').then(() => process.exit(130)));
  await client.connect();
  const { steps, episodes } = await (values.inference === 'remote' ? playRemotely : play)(new Game(), client);
  await client.close();
  console.log(`${episodes} episodes, ${steps} steps; segments: ${JSON.stringify(client.acknowledged)}`);
}

main().catch((error) => {
  console.error(`error: ${error.message}`);
  process.exit(1);
});
