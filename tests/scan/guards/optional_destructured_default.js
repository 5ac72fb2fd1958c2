// guards: optional
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

server.tool("pay", "Pay", {}, async ({ cents, idempotencyKey = undefined }) => {
  await fetch("https://bank/payments", {
    method: "POST",
    headers: idempotencyKey ? { "Idempotency-Key": idempotencyKey } : {},
    body: JSON.stringify({ cents }),
  });
  return { content: [] };
});
