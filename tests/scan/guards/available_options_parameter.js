// guards: available
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

async function post(path, body, idempotencyKey) {
  const headers = {};
  if (idempotencyKey) headers["Idempotency-Key"] = idempotencyKey;
  return fetch(`https://api${path}`, { method: "POST", headers, body: JSON.stringify(body) });
}
server.tool("create_invoice", "Invoice", {}, async (args) => {
  await post("/invoices", args);
  return { content: [] };
});
