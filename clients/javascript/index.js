// A game joins a run: in a browser or in Node, from one source, without packages. See docs/games/browser.md.

import { LocalPlayer } from './lib/local.js';
import { RemotePlayer } from './lib/remote.js';
import { ActorError, Session } from './lib/session.js';

export { LocalPlayer } from './lib/local.js';
export { MlpPolicy, parseSafetensors } from './lib/policy.js';
export { SegmentBuilder } from './lib/segments.js';
export { ActorError } from './lib/session.js';

/**
 * Join a run; resolves when its policy can act. Rejects with ActorError.
 *
 * addresses: `ws://host:port`, `wss://…`, or a list of all that the gateway may have; in Node also `tcp://…`, of ZeroMQ
 * token: the gateway's access token
 * options:
 *   actorId        unique in the run; the same after a restart
 *   inference      'local': the policy runs here; 'remote': at the gateway
 *   behaviour      who acts, where it is not the run's policy: 'human', for instance; then `act` gets what was `taken`
 *   offers         the game's spaces, as {observation: [4], action: 3}: the gateway compares them with the run's; an
 *                  action of numbers and choices is [{low: -1, high: 1}, 2]
 *   onSettings     called with (values, version): at the welcome, and when they change
 *   onWeights      called with the version that acts from now on; with 'local' alone
 *   incarnation    grows with every start of the same actorId; by default the time in milliseconds
 *   giveUpAfterMs  how long no gateway may answer; five times as long once it has answered
 *   serverKey      the gateway's CURVE key, for `tcp://`
 *   log            called with a line of text
 */
export async function connect(addresses, token, options = {}) {
  const run = new Run(addresses, token, options);
  await run.connect(run.player);
  return run;
}

export class Run extends Session {
  constructor(addresses, token, { inference = 'local', giveUpAfterMs = 60000, log = console.error, onWeights, ...options } = {}) {
    super({ addresses, token, inference, giveUpAfterMs, log, ...options });
    this.player = inference === 'remote' ? new RemotePlayer(this) : new LocalPlayer(this, onWeights);
    this.choices = readChoices(options.offers);
  }

  /** The version of the weights that act now. */
  get version() { return this.player.version; }

  /** An agent's episode begins. agent: a name or number, of any kind */
  begin(agent) {
    this.player.begin(agent);
  }

  /**
   * The action for an observation (flat numbers in C order), or a promise of it: `await` it. reward: of the step before.
   * Null when the run has ended or was left, and with `behaviour`, where no policy acts (with `inference: 'remote'` it says what it
   * would do). options: `mask`, 1 for each allowed action, in a run with action masks; `taken`, the action of the step
   * before, where another than the answer was taken.
   */
  act(agent, observation, reward = 0, options = {}) {
    const { choices, player } = this;
    if (!choices) return player.act(agent, observation, reward, options);
    const taken = options.taken && choices.map((count, i) => options.taken[i] + (count ? 0.5 : 0));
    return Promise.resolve(player.act(agent, observation, reward, { ...options, taken })).then((action) => action && cutChoices(action, choices));
  }

  /** The episode has ended with this observation. options: `truncated`, where it was cut off; `success`, `taken` */
  async end(agent, observation, reward = 0, { truncated = false, ...options } = {}) {
    await this.act(agent, observation, reward, { ...options, truncated, terminated: !truncated });
  }
}

/** How many choices each number of an action has that has both numbers (0) and choices; else null. */
function readChoices(offers) {
  const form = offers?.action;
  if (!Array.isArray(form) || !form.some((each) => typeof each === 'object')) return null;
  return form.map((each) => (typeof each === 'object' ? 0 : each));
}

/** A choice among numbers is the whole part of the policy's number. */
function cutChoices(action, choices) {
  return choices.map((count, i) => (count ? Math.min(count - 1, Math.floor(action[i])) : action[i]));
}

/**
 * A recorded episode in place of a run: it has `begin`, `act` and `end`, and `act` gives the recorded actions of one agent.
 *
 * text: the JSON of `shoal episodes RUN --export NAME`; onSettings: called with the settings that the episode was played with;
 * offers: as of `connect`.
 * `finished` is true after its end, `divergedAt` the first step whose observation is not the recorded one, or null.
 */
export function replay(text, { onSettings, offers, log = console.error } = {}) {
  const choices = readChoices(offers);
  const episode = typeof text === 'string' ? JSON.parse(text) : text;
  if (episode?.kind !== 'episode' || episode.format !== 1) throw new ActorError('no_episode', 'this is not what `shoal episodes RUN --export NAME` prints');
  const run = { episode, settings: episode.settings, finished: false, divergedAt: null, step: 0 };
  const compare = (agent, observation) => {
    if ((run.agent ??= agent) !== agent) throw new ActorError('no_episode', `agent ${agent}: the episode is of one agent, which ${run.agent} is`);
    const recorded = episode.observations[run.step] ?? [];
    const differs = observation.length !== recorded.length || recorded.some((each, i) => !(Math.abs(each - observation[i]) <= 1e-5 * Math.max(1, Math.abs(each))));
    if (!differs || run.divergedAt !== null) return;
    run.divergedAt = run.step;
    log(`step ${run.step}: the observation is [${Array.from(observation)}], and [${recorded}] was recorded: the game goes another way`);
  };
  onSettings?.(run.settings, episode.settings_version);
  return Object.assign(run, {
    begin() {},
    async act(agent, observation) {
      if (!run.finished) compare(agent, observation);
      run.finished ||= run.step >= episode.actions.length;
      if (run.finished) return null;
      const action = episode.actions[run.step++];
      return choices ? cutChoices(action, choices) : action;
    },
    async end(agent, observation) {
      compare(agent, observation);
      run.finished = true;
    },
    async leave() { run.finished = true; },
  });
}
