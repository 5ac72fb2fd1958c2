"""Which tools of an MCP server could fire twice: evidence read from source, never a verdict.

It stands alone: nothing here imports the fence, and nothing here runs what it reads.
"""
