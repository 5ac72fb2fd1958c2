// guards: key
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { BillingClient } from "billing-sdk";
import { createHash } from "node:crypto";

const server = new McpServer({ name: "shop", version: "1" });

const client = new BillingClient({});
server.tool("create_bill", "Bill", {}, async ({ orderId }) => {
  await client.createBill({ orderId, clientRequestToken: createHash("sha256").update(orderId).digest("hex") });
  return { content: [] };
});
