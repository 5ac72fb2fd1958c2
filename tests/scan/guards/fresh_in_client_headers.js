// guards: fresh
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { v4 as uuidv4 } from "uuid";

const server = new McpServer({ name: "shop", version: "1" });

class Client {
  headers() {
    return { Authorization: "x", "X-Request-Id": uuidv4() };
  }
  async post(path, data) {
    return fetch(`https://api${path}`, { method: "POST", headers: this.headers(), body: JSON.stringify(data) });
  }
}
const client = new Client();
server.tool("create_task", "Create", {}, async (args) => {
  await client.post("/tasks", args);
  return { content: [] };
});
