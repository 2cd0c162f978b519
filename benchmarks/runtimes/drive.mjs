// node drive.mjs DECISIONS FOLDER...: of each exported folder the largest difference from its vectors, and the
// microseconds of a decision.
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const [decisions, ...folders] = process.argv.slice(2);
const { Policy } = await import(pathToFileURL(`${folders[0]}/policy.mjs`));
for (const folder of folders) {
  const [json, vectors] = ['policy', 'vectors'].map((name) => JSON.parse(readFileSync(`${folder}/${name}.json`)));
  const policy = new Policy(json).copy();
  let largest = 0;
  for (const vector of vectors) {
    for (const sampled of [false, true]) {
      let drawn = 0;
      policy.reset();
      if (!vector.reset) policy.state.set(vector.state);
      Object.assign(policy, { sampled, random: () => vector.uniforms[drawn++] });
      const action = [policy.act(vector.observation, vector.mask)].flat();
      const found = [...action, ...policy.outputs, ...policy.state];
      const wanted = [...(sampled ? vector.sampled : vector.action), ...vector.outputs, ...vector.next_state];
      wanted.forEach((each, index) => {
        const scale = Math.max(1, Math.abs(each), (json.action_high[index] ?? 0) - (json.action_low[index] ?? 0));
        largest = Math.max(largest, Math.abs(found[index] - each) / scale);
      });
    }
  }
  policy.sampled = false;
  const began = performance.now();
  for (let index = 0; index < decisions; index++) policy.act(vectors[0].observation, vectors[0].mask);
  console.log(largest, (1000 * (performance.now() - began)) / decisions);
}
