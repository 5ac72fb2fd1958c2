// guards: available
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

class Client {
  async charge(amount, idempotencyKey = undefined) {
    return fetch("https://pay/charges", {
      method: "POST",
      headers: idempotencyKey ? { "Idempotency-Key": idempotencyKey } : {},
      body: JSON.stringify({ amount }),
    });
  }
}
const client = new Client();
server.tool("charge", "Charge", {}, async ({ amount }) => {
  await client.charge(amount);
  return { content: [] };
});
