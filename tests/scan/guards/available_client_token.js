// guards: available
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

class Jobs {
  async start(name, clientToken) {
    const body = { name };
    if (clientToken) body.clientToken = clientToken;
    return fetch("https://jobs/jobs", { method: "POST", body: JSON.stringify(body) });
  }
}
const jobs = new Jobs();
server.tool("create_job", "Job", {}, async ({ name }) => {
  await jobs.start(name);
  return { content: [] };
});
