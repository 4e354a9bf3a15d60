// Anthropic's client for Node against a scripted server: URL MODEL. Prints what it got as JSON.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
const add = {
  name: "add",
  description: "Adds two numbers.",
  input_schema: {
    type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"],
  },
};
const user = [{ role: "user", content: "2 + 3?" }];
const asked = { model, max_tokens: 400, tools: [add], system: "You add." };

async function loop(ask) {
  const messages = [...user], calls = [];
  for (;;) {
    const found = await ask(messages);
    messages.push({ role: "assistant", content: found.content });
    if (found.stop_reason !== "tool_use") {
      return { text: found.content[0].text, stop: found.stop_reason, calls };
    }
    const content = [];
    for (const block of found.content) {
      if (block.type !== "tool_use") continue;
      const { a, b } = block.input;
      calls.push([a, b]);
      content.push({ type: "tool_result", tool_use_id: block.id, content: String(a + b) });
    }
    messages.push({ role: "user", content });
  }
}

async function error(fields) {
  try {
    await client.messages.create({ max_tokens: 4, ...fields });
  } catch (found) {
    return [found.status, found.error.error.type];
  }
  throw new Error("no error");
}

const made = [];
const tool = betaZodTool({
  name: "add",
  description: "Adds two numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  run: ({ a, b }) => { made.push([a, b]); return String(a + b); },
});
const last = await client.beta.messages.toolRunner({ model, max_tokens: 400, tools: [tool], messages: user });
const image = { type: "image", source: { type: "base64", media_type: "image/png", data: "AAAA" } };
const models = [];
for await (const one of client.models.list()) models.push(one.id);
const found = {
  create: await loop((messages) => client.messages.create({ ...asked, messages })),
  stream: await loop((messages) => client.messages.stream({ ...asked, messages }).finalMessage()),
  runner: { text: last.content[0].text, stop: last.stop_reason, calls: made },
  models,
  count: (await client.messages.countTokens({ model, messages: user, tools: [add] })).input_tokens,
  errors: {
    model: await error({ model: "other", messages: user }),
    image: await error({ model, messages: [{ role: "user", content: [image] }] }),
  },
};
console.log(JSON.stringify(found));
