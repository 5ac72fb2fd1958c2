# guards: check
from mcp.server.fastmcp import FastMCP
import subprocess

mcp = FastMCP("shop")


class Miner:
    def __init__(self):
        self.process = None

    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def start(self):
        self.process = subprocess.Popen(["miner", "start"])


miner = Miner()


@mcp.tool()
def start_miner() -> str:
    if miner.is_running():
        return "running"
    miner.start()
    return "started"
