// A TypeScript SDK's client in front of one command: node client.cjs MODULES SDK MODE GATES COMMAND…
// SDK: `1` is @modelcontextprotocol/sdk, `2` @modelcontextprotocol/client. Prints what it was told.
const fs = require("node:fs");
const path = require("node:path");
const { createRequire } = require("node:module");

const [modules, sdk, mode, gates, command, ...args] = process.argv.slice(2);
const from = createRequire(path.join(modules, "x.js"));
const one = "@modelcontextprotocol/sdk";
const two = "@modelcontextprotocol/client";
const { Client } = from(sdk === "1" ? `${one}/client/index.js` : two);
const { StdioClientTransport } = from(sdk === "1" ? `${one}/client/stdio.js` : `${two}/stdio`);

const options = { capabilities: { elicitation: {} } };
if (mode === "modern") options.versionNegotiation = { mode: { pin: "2026-07-28" } };
if (mode === "auto") options.versionNegotiation = { mode: "auto" };
const client = new Client({ name: "client", version: "1" }, options);
let asked = 0;
const answer = async () => ({ action: "accept", content: { sure: (asked += 1) > 0 } });
if (sdk === "1") {
  const { ElicitRequestSchema } = from(`${one}/types.js`);
  client.setRequestHandler(ElicitRequestSchema, answer);
} else {
  client.setRequestHandler("elicitation/create", answer);
}

const call = (name, args, options) =>
  sdk === "1"
    ? client.callTool({ name, arguments: args }, undefined, options)
    : client.callTool({ name, arguments: args }, options);
const open = (gate) => fs.writeFileSync(path.join(gates, gate), "");

async function main() {
  const said = {};
  await client.connect(new StdioClientTransport({ command, args, env: process.env }));
  said.tools = (await client.listTools()).tools.map((tool) => tool.name).sort();
  said.resource = (await client.readResource({ uri: "charges://all" })).contents[0].text;
  said.prompt = (await client.getPrompt({ name: "refund", arguments: { order: "o1" } })).messages;
  const charge = () => call("charge", { order: "o1", cents: 10 });
  said.charges = await Promise.all(Array.from({ length: 12 }, charge));
  said.again = await charge();
  said.declined = [await call("declined", { order: "o1" }), await call("declined", { order: "o1" })];
  said.looks = [await call("look", {}), await call("look", {})];
  said.confirmed = await call("confirmed", { order: "o1" });
  said.asked = asked;

  const progress = [];
  const giveUp = new AbortController();
  const slow = call("slow", { order: "given-up" }, {
    signal: giveUp.signal,
    onprogress: (step) => { progress.push(step.progress); giveUp.abort(); },
  });
  said.givenUp = await slow.then(() => "answered", () => "gave up");
  said.progress = progress;
  const retry = call("slow", { order: "given-up" });
  open("given-up");
  said.retry = await retry;
  await client.close();
  console.log(JSON.stringify(said));
}

main().catch((error) => { console.error(error); process.exit(1); });
