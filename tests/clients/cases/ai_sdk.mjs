// Vercel's AI SDK.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const URL = process.argv[2], WORD = "planet", REVERSED = "tenalp";
const server = createOpenAICompatible({
  name: "weft", baseURL: `${URL}/v1`, apiKey: "none", supportsStructuredOutputs: true,
});
const ASK = { role: "user", content: WORD };
const OPTIONS = { model: server("reverse"), temperature: 0, maxOutputTokens: 400, maxRetries: 0 };
const paint = z.object({ color: z.enum(["red", "green"]), coats: z.number().int().min(1).max(9) });

function check(found, wanted) {
  if (found !== wanted) throw new Error(`${JSON.stringify(found)} is not ${JSON.stringify(wanted)}`);
}

const cases = {
  async one() {
    check((await generateText({ ...OPTIONS, messages: [ASK] })).text, REVERSED);
  },
  async turns() {
    const messages = [ASK];
    for (let i = 0; i < 3; i++) {
      const { response } = await generateText({ ...OPTIONS, messages });
      messages.push(...response.messages, ASK);
    }
  },
  async stream() {
    let text = "";
    for await (const part of streamText({ ...OPTIONS, messages: [ASK] }).textStream) text += part;
    check(text, REVERSED);
  },
  async tools() {
    const tools = { paint: tool({ description: "Paint a wall.", inputSchema: paint, execute: async () => "done" }) };
    const asked = { ...OPTIONS, tools, toolChoice: "required", messages: [ASK] };
    const { toolCalls, response } = await generateText(asked);
    check(toolCalls.length, 1);
    paint.parse(toolCalls[0].input);
    await generateText({ ...OPTIONS, tools, messages: [ASK, ...response.messages] });
  },
  async forms() {
    paint.parse((await generateObject({ ...OPTIONS, schema: paint, messages: [ASK] })).object);
  },
};

const results = {};
for (const [name, work] of Object.entries(cases)) {
  try {
    await work();
    results[name] = true;
  } catch (error) {
    console.error(`--- ${name}`, error);
    results[name] = false;
  }
}
console.log(JSON.stringify(results));
