// guards: none
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

const processedUpdate = (update) => Object.keys(update).length;
server.tool("create_item", "Create", {}, async ({ update }) => {
  const cleaned = processedUpdate(update);
  if (!cleaned || typeof update !== "object") return { content: [] };
  await fetch("https://shop/items", { method: "POST", body: JSON.stringify(update) });
  return { content: [] };
});
