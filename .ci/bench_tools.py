"""What bench.py needs besides the targets: a fast fake backend, invented chat bodies, clients,
/proc.

python bench_tools.py PORT serves, on 127.0.0.1, SSE streams and JSON answers. The model name in the
body says which: bench-n<events>-g<microseconds between them>, or bench-json. GET anything:
{"streams": <streams now open>}."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

try:
    import uvloop

    run_loop: Callable = uvloop.run
except ImportError:
    run_loop = asyncio.run

# ---------------------------------------------------------------- The backend

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
EVENT = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":"<%020d>"}}],"created":1771447680,'
    b'"id":"chatcmpl-bench","model":"bench","system_fingerprint":"b1-bench","object":"chat.completion.chunk"}\n\n'
)
ANSWER = (
    b'{"choices":[{"finish_reason":"stop","index":0,"message":{"role":"assistant","content":"ok"}}],"object":'
    b'"chat.completion","usage":{"completion_tokens":1,"prompt_tokens":900,"total_tokens":901,'
    b'"prompt_tokens_details":{"cached_tokens":800}},"timings":{"cache_n":800,"prompt_n":100,"prompt_ms":31.5}}'
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_END = chunk(
    b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"object":"chat.completion.chunk",'
    b'"timings":{"cache_n":800,"prompt_n":100,"prompt_ms":31.5}}\n\n'
) + chunk(b"data: [DONE]\n\n")
STREAM_END += b"0\r\n\r\n"
FAST_EVENT = chunk(EVENT % 0)


class Backend(asyncio.Protocol):
    """One connection of the fake server. Bodies are counted, not kept."""

    streams: ClassVar[set[Backend]] = set()
    timer: asyncio.Handle | None = None

    def connection_made(self, transport) -> None:
        self.transport, self.loop = transport, asyncio.get_running_loop()
        self.head, self.start, self.left, self.paused = b"", b"", -1, False

    def connection_lost(self, exc) -> None:
        self.streams.discard(self)

    def data_received(self, data: bytes) -> None:
        if self.left < 0:
            self.head += data
            head, end, data = self.head.partition(b"\r\n\r\n")
            if not end:
                return
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            self.left, self.start = int(length[1]) if length else 0, b""
        if len(self.start) < 200:
            self.start += data[:200]
        self.left -= len(data)
        if self.left <= 0:
            is_get, self.head, self.left = self.head.startswith(b"GET"), b"", -1
            self.answer(is_get)

    def answer(self, is_get: bool) -> None:
        script = re.search(rb"bench-n(\d+)-g(\d+)", self.start)
        if is_get or not script:
            body = b'{"streams":%d}' % len(self.streams) if is_get else ANSWER
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(body)
            )
            self.transport.write(head + body)
            return
        self.todo, self.gap, self.sent, self.began = (
            int(script[1]),
            int(script[2]) / 1e6,
            0,
            self.loop.time(),
        )
        self.streams.add(self)
        self.transport.write(STREAM_HEAD)
        self.tick()

    def tick(self) -> None:
        self.timer = None
        if self not in self.streams:
            return
        if self.sent >= self.todo:
            self.streams.discard(self)
            self.transport.write(STREAM_END)
            return
        self.transport.write(chunk(EVENT % time.monotonic_ns()) if self.gap else FAST_EVENT)
        self.sent += 1
        if not self.paused:
            when = self.began + self.sent * self.gap
            self.timer = (
                self.loop.call_at(when, self.tick) if self.gap else self.loop.call_soon(self.tick)
            )

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self in self.streams and self.timer is None:
            self.tick()


async def serve_backend(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(
        Backend, "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


# ---------------------------------------------------------------- Bodies

PROSE = (
    "the build of parser seven fails on line 42 because a token is read twice so check which branch keeps it open and "
    'write more tests Grüße naïve 東京 тест 🙂 path/to/module.py return value list of "names" {braces} back\\slash'
)
META = 'Conversation info (untrusted metadata):\n```json\n{\n  "message_id": "%d",\n  "sender": "someone"\n}\n```\n\n'
INBOUND = '```json\n{\n  "schema": "openclaw.inbound_meta.v1",\n  "message_id": "%d",\n  "channel": "signal"\n}\n```\n'


class Body:
    """An invented agent conversation of exactly `size` bytes; request(i) is an HTTP request whose
    last turn names i."""

    def __init__(self, size: int, model: str, seed: int = 0, clean: bool = False) -> None:
        self.rnd, self.clean = random.Random(seed), clean
        share = max(150, min(size // 400, 100_000))  # bytes of one text
        words = PROSE.split(" ")
        self.pool = "".join(
            self.rnd.choice(words) + self.rnd.choice("    \n") for _ in range(60 + share // 2)
        )
        inbound = "" if clean else "\n## Inbound context\n" + INBOUND % self.rnd.getrandbits(40)
        tools = [self.tool(n) for n in range(20 if size >= 65536 else 2)]
        messages = [
            {
                "role": "system",
                "content": f"You are a careful assistant. {self.text(share)}{inbound}Be brief.",
            }
        ]
        fields = {
            "model": model,
            "stream": model != "bench-json",
            "messages": messages,
            "tools": tools,
        }
        last = {"role": "user", "content": self.stamped("Turn %012d: PAD")}
        used = len(self.dump(fields)) + len(self.dump(last)) + 20
        while True:
            more = self.exchange(len(messages), share)
            used += len(self.dump(more)) - 1
            if used > size:
                break
            messages += more
        messages.append(last)
        raw = self.dump(fields).replace(b"%012d", b"0" * 12)
        head, tail = raw.replace(b"PAD", b"p" * (size - len(raw) + 3)).split(b"Turn 000000000000")
        self.parts = (head + b"Turn ", tail)
        if clean:
            assert not re.search(rb" 202|message_id|\(untrusted|openclaw", head + tail)

    @staticmethod
    def dump(value: object) -> bytes:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def text(self, length: int) -> str:
        at = self.rnd.randrange(60)
        return self.pool[at : at + length]

    def stamped(self, text: str) -> str:
        if self.clean:
            return text
        return f"{META % self.rnd.getrandbits(40)}[Wed 2026-02-18 20:{self.rnd.randrange(10, 60)} UTC] {text}"

    def tool(self, n: int) -> dict:
        fields = {"path": {"type": "string"}, "limit": {"type": "number", "default": 0.5}}
        schema = {"type": "object", "properties": fields, "required": ["path"]}
        return {
            "type": "function",
            "function": {"name": f"tool{n}", "description": self.text(200), "parameters": schema},
        }

    def exchange(self, n: int, share: int) -> list[dict]:
        """A user turn, a tool call, its result, an answer."""
        said = self.stamped(self.text(share))
        call = {"name": "tool1", "arguments": json.dumps({"path": f"src/{n}.py", "limit": 0.5})}
        return [
            {"role": "user", "content": said if n % 8 == 1 else [{"type": "text", "text": said}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call{n}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call{n}", "content": self.text(share)},
            {"role": "assistant", "content": self.text(share)},
        ]

    def request(self, i: int) -> bytes:
        return post(b"%b%012d%b" % (self.parts[0], i, self.parts[1]))


def post(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


# ---------------------------------------------------------------- Clients


class Line:
    """A blocking connection for timing one request at a time."""

    def __init__(self, port: int) -> None:
        self.port, self.sock = port, socket.create_connection(("127.0.0.1", port), 10)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.settimeout(120)

    def first_event(self, request: bytes) -> float:
        """ms until the first event; reads the stream to its end. A connection closed before the
        answer is renewed."""
        for again in (True, False):
            begin, first, data = time.perf_counter(), 0.0, b""
            try:
                self.sock.sendall(request)
                while not data.endswith(b"0\r\n\r\n"):
                    piece = self.sock.recv(65536)
                    data += piece
                    if not first and b"data:" in data:
                        first = time.perf_counter() - begin
                    if not piece or not b"HTTP/1.1 200".startswith(data[:12]):
                        raise ConnectionError(f"answer: {data[:80]!r}")
                return first * 1000
            except ConnectionError:
                if not again or data:
                    raise
                self.sock.close()
                self.__init__(self.port)  # type: ignore[misc]
        raise AssertionError


class Fetcher(asyncio.Protocol):
    """A kept-alive connection that fetches whole answers."""

    done: asyncio.Future

    def connection_made(self, transport) -> None:
        self.transport = transport

    def fetch(self, request: bytes) -> asyncio.Future:
        self.data, self.done = b"", asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        if not end or self.done.done():
            return
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n"):
            if head.startswith(b"HTTP/1.1 200"):
                self.done.set_result(None)
            else:
                self.done.set_exception(ConnectionError(f"answer: {head[:60]!r}"))

    def connection_lost(self, exc) -> None:
        if hasattr(self, "done") and not self.done.done():
            self.done.set_exception(ConnectionError("connection closed"))


class Follower(asyncio.Protocol):
    """A connection that counts the events of one stream, and takes the age of each if `delays` is a
    list."""

    delays: list[int] | None = None
    carry = b""

    def __init__(self, request: bytes) -> None:
        self.request, self.events = request, 0
        self.opened: asyncio.Future = asyncio.get_running_loop().create_future()

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        new = data.count(b'"delta"')
        self.events += new
        if not self.opened.done():
            if not data.startswith(b"HTTP/1.1 200") and not self.carry:
                self.opened.set_exception(ConnectionError(f"answer: {data[:60]!r}"))
            elif new:
                self.opened.set_result(None)
            self.carry = b"-"
        if self.delays is not None:
            now, end, data = time.monotonic_ns(), 0, self.carry + data
            for stamp in re.finditer(rb"<(\d{20})>", data):
                self.delays.append(now - int(stamp[1]))
                end = stamp.end()
            self.carry = data[end:][-21:]

    def connection_lost(self, exc) -> None:
        if not self.opened.done():
            self.opened.set_exception(ConnectionError("connection closed"))


async def open_streams(port: int, requests: list[bytes], batch: int) -> list[Follower]:
    """Open streams, `batch` at a time, each until its first event. Any failure ends the cell."""
    loop, out = asyncio.get_running_loop(), list[Follower]()
    try:
        for at in range(0, len(requests), batch):
            some = [partial(Follower, request) for request in requests[at : at + batch]]
            jobs = [loop.create_connection(factory, "127.0.0.1", port) for factory in some]
            new = [protocol for _, protocol in await asyncio.gather(*jobs)]
            out += new
            await asyncio.wait_for(asyncio.gather(*(f.opened for f in new)), 30)
        return out
    except BaseException:
        close(out)
        raise


def close(followers: list[Follower]) -> None:
    for follower in followers:
        follower.transport.abort()


# ---------------------------------------------------------------- What /proc tells (Linux)


def family(pid: int) -> list[int]:
    out = [pid]
    for parent in out:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                out += map(int, path.read_text().split())
    return out


def memory(pid: int, field: str = "Rss", file: str = "smaps_rollup") -> float:
    """MiB of a process and its children; field Rss or Pss, or VmHWM in the file status."""
    total = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            found = re.search(rf"(?m)^{field}:\s+(\d+)", Path(f"/proc/{member}/{file}").read_text())
            total += int(found[1]) if found else 0
    return total / 1024


def cpu_seconds() -> tuple[float, float]:
    """CPU time used so far by the whole machine, and by this process with all it started."""
    ticks, ours = list(map(int, Path("/proc/stat").read_text().split()[1:9])), 0
    for member in family(os.getpid()):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ours += sum(map(int, fields[11:15] if member == os.getpid() else fields[11:13]))
    hertz = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / hertz, ours / hertz


if __name__ == "__main__":
    run_loop(serve_backend(int(sys.argv[1])))
