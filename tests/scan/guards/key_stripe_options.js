// guards: key
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import Stripe from "stripe";

const server = new McpServer({ name: "shop", version: "1" });

const stripe = new Stripe(process.env.KEY);
server.tool("pay", "Pay", {}, async ({ orderId, amount }) => {
  const intent = await stripe.paymentIntents.create({ amount, currency: "eur" }, { idempotencyKey: `order-${orderId}` });
  return { content: [{ type: "text", text: intent.id }] };
});
