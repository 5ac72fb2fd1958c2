// guards: dedupe
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

const seen = new Set();
server.tool("pay", "Pay", {}, async ({ orderId }) => {
  if (seen.has(orderId)) return { content: [] };
  seen.add(orderId);
  await fetch("https://bank/payments", { method: "POST", body: JSON.stringify({ orderId }) });
  return { content: [] };
});
