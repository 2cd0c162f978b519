// An agent with the stock client of OpenAI, and no code of Shoal's: it answers, checks itself, and prints the result.
//
//     npm install openai
//     shoal run agents model=smollm env=reasoning_gym:chain_sum "agent=node clients/agents/agent.mjs" --agents 8
//
// A driver starts it for each episode. OPENAI_BASE_URL and OPENAI_API_KEY, which the client reads, are those of the
// episode's session, and SHOAL_TASK is its task. The last line that it prints is graded. docs/agents.md has the rest.

import OpenAI from 'openai';

const client = new OpenAI();
const { messages } = JSON.parse(process.env.SHOAL_TASK);

const first = await client.chat.completions.create({ model: 'policy', messages, max_tokens: 128 });
const check = { role: 'user', content: 'Check that. Then write the final answer alone, as <answer>...</answer>.' };
const checked = [...messages, first.choices[0].message, check];

const second = await client.chat.completions.create({ model: 'policy', messages: checked, max_tokens: 64 });
console.log((second.choices[0].message.content ?? '').replace(/\s+/g, ' '));
