// guards: unique
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import mysql from "mysql2/promise";

const server = new McpServer({ name: "shop", version: "1" });

const pool = mysql.createPool({});
server.tool("add_order", "Add", {}, async ({ id }) => {
  await pool.query("INSERT INTO orders (id) VALUES (?) ON DUPLICATE KEY UPDATE id = id", [id]);
  return { content: [] };
});
