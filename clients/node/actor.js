#!/usr/bin/env node
'use strict';
// An actor of a run: node actor.js --connect tcp://host:port [--game FILE] [--actor-id NAME] [--server-key KEY]
//     [--inference remote] [--give-up-after SECONDS]
// The token is read from SHOAL_TOKEN, or from ~/.shoal/token.

const { readFileSync } = require('node:fs');
const { homedir } = require('node:os');
const { join, resolve } = require('node:path');
const { parseArgs } = require('node:util');
const { ActorClient, play, playRemotely } = require('./lib');

async function main() {
  const { values } = parseArgs({
    options: {
      connect: { type: 'string' },
      game: { type: 'string', default: join(__dirname, 'games', 'catch.js') },
      'actor-id': { type: 'string' },
      'server-key': { type: 'string' },
      inference: { type: 'string', default: 'local' },
      'give-up-after': { type: 'string', default: '60' },
    },
  });
  if (!values.connect) throw new Error('--connect tcp://host:port is missing: the job prints it');
  const home = process.env.SHOAL_HOME || join(homedir(), '.shoal');
  const token = process.env.SHOAL_TOKEN || readFileSync(join(home, 'token'), 'utf8').trim();
  const Game = require(resolve(values.game));
  const client = new ActorClient({
    address: values.connect, token, actorId: values['actor-id'], serverKey: values['server-key'],
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
