// guards: unique
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { Pool } from "pg";

const server = new McpServer({ name: "shop", version: "1" });

const pool = new Pool();
server.tool("add_order", "Add", {}, async ({ id }) => {
  await pool.query("INSERT INTO orders (id) SELECT $1 WHERE NOT EXISTS (SELECT 1 FROM orders WHERE id = $1)", [id]);
  return { content: [] };
});
