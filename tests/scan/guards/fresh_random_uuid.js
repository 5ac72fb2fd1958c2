// guards: fresh
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

server.tool("pay", "Pay", {}, async ({ cents }) => {
  await fetch("https://bank/payments", { method: "POST", headers: { "Idempotency-Key": crypto.randomUUID() }, body: JSON.stringify({ cents }) });
  return { content: [] };
});
