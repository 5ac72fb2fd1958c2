// guards: none
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

server.tool("pay", "Pay", {}, async ({ cents }) => {
  // headers: { "Idempotency-Key": orderId }
  await fetch("https://bank/payments", { method: "POST", body: JSON.stringify({ cents }) });
  return { content: [] };
});
