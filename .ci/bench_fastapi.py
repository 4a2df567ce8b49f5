"""What bench.py compares kvproxy with: a plain FastAPI + httpx proxy that parses, scrubs, and
streams.

One shared client, literal-led regular expressions, raw bytes passed on as they come: a good example
of its kind. UPSTREAM=http://127.0.0.1:8080 uvicorn bench_fastapi:app"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

STAMP = re.compile(r"\[[A-Z][a-z]{2} \d{4}-\d{2}-\d{2} \d{2}:\d{2}(?::\d{2})? [^\]\s]{1,12}\] ?")
IDENTIFIER = re.compile(r'"message_id" ?: ?"[^"]*",?\s*')

app = FastAPI()
client = httpx.AsyncClient(
    base_url=os.environ["UPSTREAM"],
    timeout=None,
    trust_env=False,
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=512, keepalive_expiry=4),
)


def scrub_text(text: str) -> str:
    return STAMP.sub("", IDENTIFIER.sub("", text))


def scrub(body: Any) -> Any:
    """Remove message ids and time stamps from the texts of system, developer and user messages, in
    place."""
    for message in body.get("messages", []):
        message.pop("message_id", None)
        if message.get("role") not in ("system", "developer", "user"):
            continue
        content = message.get("content")
        if isinstance(content, str):
            message["content"] = scrub_text(content)
        elif isinstance(content, list):
            for part in content:
                if isinstance(part.get("text"), str):
                    part["text"] = scrub_text(part["text"])
    return body


@app.post("/v1/chat/completions")
async def chat(request: Request) -> Response:
    body = scrub(await request.json())
    upstream = client.build_request("POST", "/v1/chat/completions", json=body)
    answer = await client.send(upstream, stream=True)
    kind = answer.headers.get("content-type")
    if not body.get("stream"):
        content = await answer.aread()
        return Response(content, answer.status_code, media_type=kind)

    async def relay() -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:
            await answer.aclose()

    return StreamingResponse(relay(), answer.status_code, media_type=kind)


@app.get("/{path:path}")
async def other(path: str) -> Response:
    answer = await client.get("/" + path)
    return Response(
        answer.content, answer.status_code, media_type=answer.headers.get("content-type")
    )
