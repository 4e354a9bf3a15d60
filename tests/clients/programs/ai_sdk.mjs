// The Vercel AI SDK against a scripted server: URL MODEL. Prints what it got as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "pdserve", baseURL: url, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const models = { responses: openai.responses(name), chat: openai.chat(name), compatible: compatible(name) };
const found = {};
for (const [kind, model] of Object.entries(models)) {
  const called = [];
  const add = tool({
    description: "Adds two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => { called.push([a, b]); return a + b; },
  });
  const asked = {
    model, tools: { add }, stopWhen: stepCountIs(4), maxRetries: 0,
    output: Output.object({ schema: z.object({ total: z.number().int() }) }),
    providerOptions: {
      openai: kind === "responses"
        ? { store: false, reasoningEffort: "low", reasoningSummary: "auto", textVerbosity: "low",
            include: ["reasoning.encrypted_content"] }
        : {},
    },
  };
  const messages = [{ role: "user", content: "2 + 3?" }];
  const done = await generateText({ ...asked, messages });
  const again = await generateText({
    ...asked, messages: [...messages, ...done.response.messages, { role: "user", content: "And again?" }],
  });
  const stream = streamText({ ...asked, messages, onError: ({ error }) => { throw error; } });
  await stream.consumeStream();
  const object = await generateObject({ model, schema: z.object({ total: z.number() }), prompt: "2 + 3?", maxRetries: 0 });
  found[kind] = [done.output.total, again.output.total, (await stream.output).total, object.object.total, called];
}
console.log(JSON.stringify(found));
