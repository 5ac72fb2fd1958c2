// guards: key
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

async function request(path, { method = "GET", body, idempotencyKey } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (idempotencyKey) headers["Idempotency-Key"] = idempotencyKey;
  return fetch(`https://api${path}`, { method, headers, body: JSON.stringify(body) });
}
server.tool("refund", "Refund", {}, async ({ chargeId }) => {
  await request(`/charges/${chargeId}/refunds`, { method: "POST", body: {}, idempotencyKey: `refund-${chargeId}` });
  return { content: [] };
});
