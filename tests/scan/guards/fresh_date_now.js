// guards: fresh
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

server.tool("pay", "Pay", {}, async ({ amount }) => {
  const requestId = `req-${Date.now()}-${Math.random()}`;
  await fetch("https://bank/payments", { method: "POST", body: JSON.stringify({ amount, clientRequestId: requestId }) });
  return { content: [] };
});
