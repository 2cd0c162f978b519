// The page: you play Catch by keyboard, eight copies learn beside you, and at the end the champion plays.

import { MlpPolicy, connect } from '../index.js';
import { Catch } from '../catch/catch.js';

const STEP_MS = 220; // of the game that is shown large
const find = (id) => document.getElementById(id);
const [PLAYER, SCORE] = ['player', 'score'].map((id) => find(id).textContent);
const token = decodeURIComponent(location.hash.slice(1)) || prompt('The token of the run, from ~/.shoal/token:') || '';
history.replaceState(null, '', location.pathname); // out of sight

// -- you, or the champion -------------------------------------------------------------------------------------

const mine = new Catch();
let held = 1; // the action, left, stay or right, of a key or finger that is down
let pressed = 1; // since the last step, though it may be up again
let isPlayed = false; // this episode, by you: what falls while you are away is no lesson
let meanOfCopies = 0;
let champion = null;
let isChampionPlaying = false;
let lesson = null; // a session in which you show how
let outcome = { observation: mine.reset(), reward: 0 };
let total = 0;
const totals = [];

const ACTIONS = { ArrowLeft: 0, ArrowRight: 2 };
addEventListener('keydown', (event) => {
  if (!(event.key in ACTIONS) || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault(); // or the slider moves, too
  press(ACTIONS[event.key]);
});
addEventListener('keyup', ({ key }) => { if (ACTIONS[key] === held) held = 1; });
find('you').onpointerdown = ({ offsetX, target }) => press(offsetX < target.clientWidth / 2 ? 0 : 2);
for (const kind of ['pointerup', 'pointercancel', 'blur']) addEventListener(kind, () => (held = 1));

function press(action) {
  held = pressed = action;
  isPlayed = true;
}

setInterval(() => {
  const action = isChampionPlaying ? champion.choose(outcome.observation) : pressed;
  pressed = held;
  outcome = mine.step(action);
  total += outcome.reward;
  if (lesson && !lesson.isOver && !isChampionPlaying) teach(action);
  if (outcome.terminated) {
    totals.push(total);
    const mean = totals.reduce((sum, each) => sum + each, 0) / totals.length;
    find('score').textContent = `Episode ${totals.length}: ${total} of 5, mean ${mean.toFixed(1)}`;
    [total, outcome] = [0, { observation: mine.reset(), reward: 0 }];
    beginLesson();
  }
  mine.draw(find('you'));
}, STEP_MS);

/** An episode begins; the one before is forgotten if it has not ended in `teach`. */
function beginLesson() {
  isPlayed = false;
  if (!lesson || lesson.isOver) return;
  lesson.begin('you');
  lesson.act('you', outcome.observation);
}

/** What you did is a demonstration: it does not count as the policy's. A bad one would be learnt as a good one is. */
function teach(taken) {
  if (!outcome.terminated) lesson.act('you', outcome.observation, outcome.reward, { taken });
  else if (isPlayed && total > Math.max(0, meanOfCopies)) lesson.end('you', outcome.observation, outcome.reward, { taken });
}

find('champion').onclick = () => {
  isChampionPlaying = !isChampionPlaying;
  [totals.length, total, outcome] = [0, 0, { observation: mine.reset(), reward: 0 }];
  beginLesson();
  find('champion').textContent = isChampionPlaying ? 'Play yourself' : 'Watch the champion';
  find('player').textContent = isChampionPlaying ? `The champion plays: version ${champion.version}.` : PLAYER;
  find('score').textContent = SCORE;
};

// -- the copies -----------------------------------------------------------------------------------------------

const canvases = Array.from({ length: 8 }, () => Object.assign(document.createElement('canvas'), { width: 120, height: 144 }));
find('copies').append(...canvases);
const copies = new Worker(new URL('copies.js', import.meta.url), { type: 'module' });
let curve = []; // [steps, mean return]
const painter = new Catch();
let rated = { steps: 0, at: performance.now() };

copies.onmessage = ({ data }) => {
  if (data.error) return (find('news').textContent = `The copies stopped: ${data.error}`);
  if (data.champion) return crown(data.champion);
  data.fields.forEach((field, copy) => Object.assign(painter, field).draw(canvases[copy]));
  find('version').textContent = data.version;
  find('return').textContent = data.mean === null ? '–' : data.mean.toFixed(2);
  find('episodes').textContent = data.episodes.toLocaleString();
  find('steps').textContent = data.steps.toLocaleString();
  find('news').textContent = data.isConnected ? 'The copies learn, also from you while you are ahead.' : 'The run does not answer. Trying again …';
  meanOfCopies = data.mean;
  const now = performance.now();
  if (now - rated.at > 1000) {
    find('rate').textContent = `${Math.round((1000 * (data.steps - rated.steps)) / (now - rated.at)).toLocaleString()} steps a second`;
    rated = { steps: data.steps, at: now };
  }
  if (data.mean !== null && (!curve.length || data.steps > curve.at(-1)[0])) drawCurve(data);
};

function drawCurve({ steps, mean }) {
  if (curve.push([steps, mean]) > 1000) curve = curve.filter((_, place) => place % 2);
  const canvas = find('curve');
  const context = canvas.getContext('2d');
  const place = ([x, y]) => [12 + ((canvas.width - 24) * x) / steps, canvas.height - 12 - ((canvas.height - 24) * (y + 5)) / 10];
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.strokeStyle = '#ddd';
  context.fillStyle = '#667';
  context.beginPath();
  for (const y of [-5, 0, 5]) {
    context.fillText(y, 0, place([0, y])[1] + 3);
    context.moveTo(12, place([0, y])[1]);
    context.lineTo(canvas.width - 10, place([0, y])[1]);
  }
  context.stroke();
  context.strokeStyle = '#2563a8';
  context.lineWidth = 2;
  context.beginPath();
  curve.forEach((point) => context.lineTo(...place(point)));
  context.stroke();
}

function crown({ version, spec, weights }) {
  champion = new MlpPolicy(spec);
  champion.load(version, weights);
  find('champion').disabled = false;
  find('champion').click();
  find('news').textContent = `The run is over: this is its newest version, ${version}.`;
}

find('speed').oninput = ({ target }) => {
  const value = Number(target.value);
  copies.postMessage({ stepsPerSecond: value === Number(target.max) ? Infinity : 10 ** value });
};

let address = '';
while (!address) { // the run starts
  address = await fetch('/address').then((answer) => answer.text()).catch(() => (find('news').textContent = 'The run has ended.', ''));
  if (!address) await new Promise((resolve) => setTimeout(resolve, 300));
}
copies.postMessage({ address, token });
lesson = await connect(address, token, { behaviour: 'human', actorId: 'you', offers: mine.spaces }).catch(() => null); // the copies say why
[total, outcome] = [0, { observation: mine.reset(), reward: 0 }];
beginLesson();
