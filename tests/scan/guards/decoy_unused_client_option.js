// guards: none
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

export function withKey(idempotencyKey) {
  return { headers: { "Idempotency-Key": idempotencyKey } };
}
server.tool("pay", "Pay", {}, async ({ cents }) => {
  await fetch("https://bank/payments", { method: "POST", body: JSON.stringify({ cents }) });
  return { content: [] };
});
