"""The fence in front of HTTP services: the `Idempotency-Key` header, honoured.

`asgi.IdempotencyMiddleware` (no dependency) and `aiohttp.setup` (extra `aiohttp`) follow the rules
of `idempotency`.
"""
