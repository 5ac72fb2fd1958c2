// guards: dedupe
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

const processedOrders = new Map();
server.tool("pay", "Pay", {}, async ({ orderId }) => {
  if (processedOrders.has(orderId)) return processedOrders.get(orderId);
  const result = await fetch("https://bank/payments", { method: "POST", body: JSON.stringify({ orderId }) });
  processedOrders.set(orderId, { content: [{ type: "text", text: await result.text() }] });
  return processedOrders.get(orderId);
});
