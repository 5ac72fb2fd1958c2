# guards: key
from mcp.server.fastmcp import FastMCP
import boto3

mcp = FastMCP("shop")


@mcp.tool()
def enqueue(order_id: str) -> str:
    sqs = boto3.client("sqs")
    sqs.send_message(
        QueueUrl="q", MessageBody=order_id, MessageDeduplicationId=order_id, MessageGroupId="g"
    )
    return "queued"
