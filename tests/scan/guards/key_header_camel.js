// guards: key
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";

const server = new McpServer({ name: "shop", version: "1" });

server.registerTool("charge", { description: "Charge" }, async ({ orderId, cents }) => {
  const response = await fetch("https://pay/charges", {
    method: "POST",
    headers: { "Idempotency-Key": `charge-${orderId}` },
    body: JSON.stringify({ cents }),
  });
  return { content: [{ type: "text", text: await response.text() }] };
});
