// guards: check
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { Database } from "database-sdk";

const server = new McpServer({ name: "shop", version: "1" });

const db = new Database();
server.tool("create_user", "Create", {}, async ({ email }) => {
  const user = await db.users.findOne({ email });
  if (user) throw new Error("user already registered");
  await db.users.insertOne({ email });
  return { content: [] };
});
