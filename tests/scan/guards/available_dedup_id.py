# guards: available
from mcp.server.fastmcp import FastMCP
import boto3

mcp = FastMCP("shop")


class Queue:
    def __init__(self):
        self.sqs = boto3.client("sqs")

    def send(self, body, deduplication_id=None):
        extra = {}
        if deduplication_id:
            extra["MessageDeduplicationId"] = deduplication_id
        self.sqs.send_message(QueueUrl="q", MessageBody=body, **extra)


queue = Queue()


@mcp.tool()
def notify(text: str) -> str:
    queue.send(text)
    return "sent"
