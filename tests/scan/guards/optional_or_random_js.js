// guards: optional
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { randomUUID } from "node:crypto";

const server = new McpServer({ name: "shop", version: "1" });

server.tool("pay", "Pay", {}, async ({ cents, idempotencyKey }) => {
  const key = idempotencyKey ?? randomUUID();
  await fetch("https://bank/payments", { method: "POST", headers: { "Idempotency-Key": key }, body: JSON.stringify({ cents }) });
  return { content: [] };
});
