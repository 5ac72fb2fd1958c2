// guards: check
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

server.tool("create_customer", "Create", {}, async ({ email }) => {
  const existing = await (await fetch(`https://crm/customers?email=${email}`)).json();
  if (existing.length) return { content: [{ type: "text", text: "exists" }] };
  await fetch("https://crm/customers", { method: "POST", body: JSON.stringify({ email }) });
  return { content: [] };
});
