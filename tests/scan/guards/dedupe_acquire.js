// guards: dedupe
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { Claims } from "claims";

const server = new McpServer({ name: "shop", version: "1" });

const claims = new Claims();
server.tool("pay", "Pay", {}, async ({ orderId }) => {
  if (!(await claims.tryAcquire(orderId))) return { content: [] };
  await fetch("https://bank/payments", { method: "POST", body: JSON.stringify({ orderId }) });
  return { content: [] };
});
