// guards: none
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { Bank } from "bank-sdk";

const server = new McpServer({ name: "shop", version: "1" });

const bank = new Bank();
let connected = false;
export function connect() { connected = true; }
server.tool("pay", "Pay", {}, async ({ cents }) => {
  if (!connected) throw new Error("not connected");
  await bank.payments.create({ cents });
  return { content: [] };
});
