// A client of a policy server for Node, without any package: plays episodes of a small game by HTTP.
//
//     node http_client.mjs URL EPISODES [TOKEN]
//
// The game: a counter goes from 0 to 4, and each step pays what the counter was. Prints one line of JSON an episode.

import { randomBytes } from "node:crypto";

const [url, episodes, token] = process.argv.slice(2);
const session = `${url}/v1/sessions/node-${randomBytes(8).toString("hex")}`;
const headers = { "Headrace-Client": randomBytes(16).toString("hex"), "Content-Type": "application/json" };
if (token) headers.Authorization = `Bearer ${token}`;

// The same request again until it is answered: the server takes no step twice.
async function ask(method, address, body = {}, timeoutMs = 60_000) {
  const until = Date.now() + timeoutMs;
  for (;;) {
    try {
      const answer = await fetch(address, { method, headers, body: JSON.stringify(body) });
      const told = await answer.json();
      if (answer.ok) return told;
      if (!["not_yet", "no_place"].includes(told.error)) throw new Error(`${told.error}: ${told.message}`);
    } catch (error) {
      if (!(error instanceof TypeError) || Date.now() > until) throw error; // fetch's word for a lost connection
    }
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

async function play(name) {
  const episode = `${session}/episodes/${name}`;
  await ask("PUT", episode, { training_enabled: true });
  const actions = [];
  for (let counter = 0; counter < 4; counter++) {
    const step = { observation: [counter, 1], reward: counter ? counter - 1 : 0 };
    actions.push((await ask("PUT", `${episode}/steps/${counter}`, step)).action);
  }
  await ask("PUT", `${episode}/steps/4`, { observation: [4, 1], reward: 3, end: "terminated" });
  return actions;
}

await ask("PUT", session);
for (let number = 0; number < Number(episodes); number++) {
  const name = `node-${randomBytes(8).toString("hex")}`;
  console.log(JSON.stringify({ episode: name, number, actions: await play(name) }));
}
await ask("DELETE", session);
