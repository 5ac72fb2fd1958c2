// guards: fresh
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { nanoid } from "nanoid";
import { Payments } from "payments-sdk";

const server = new McpServer({ name: "shop", version: "1" });

const client = new Payments({});
server.tool("pay", "Pay", {}, async ({ amount }) => {
  await client.payments.create({ amount, idempotencyKey: nanoid() });
  return { content: [] };
});
