"""What kvproxy itself costs, on loopback, beside the same requests without it.

    python .ci/bench.py [--seconds 5] [--kvproxy kvproxy.py]

A fake server answers at once: one client asks with a new last turn in each request, then for a path
that kvproxy does not read; then 16 streams have an event each millisecond. Prints requests or
events a second, and the CPU time that the proxy took for one. Compare two versions of kvproxy.py in turn, on a machine that does nothing else; the
figures of two machines say nothing about each other. Linux only (/proc)."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"token"}}],"object":"chunk"}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWER = (
    b'{"choices":[{"message":{"role":"assistant","content":"ok"}}],"usage":{"prompt_tokens":9}}'
)


async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The fake server's side of a connection: a stream without an end, or JSON answers."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        if b'"stream":true' in body:
            writer.write(STREAM)
            while True:
                writer.write(CHUNK)
                await writer.drain()
                await asyncio.sleep(0.001)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)


async def serve(port: int) -> None:
    """The fake server, which says nothing about clients that leave."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with await asyncio.start_server(serve_one, "127.0.0.1", port) as server:
        await server.serve_forever()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def request(number: int, stream: bool, path: str = "/v1/chat/completions") -> bytes:
    """A chat request of about 4 KB, as bytes."""
    turns = [{"role": "system", "content": "You are a helpful assistant. " * 100}]
    turns.append({"role": "user", "content": f"Question {number}: " + "what is this? " * 50})
    body = json.dumps({"model": "m", "stream": stream, "messages": turns}, separators=(",", ":"))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def ask_on(path: str, port: int, until: float) -> int:
    """How many answers one client gets."""
    count = 0
    with socket.create_connection(("127.0.0.1", port)) as sock:
        while time.monotonic() < until:
            sock.sendall(request(count, False, path))
            answer = b""
            while ANSWER[-20:] not in answer:
                answer += sock.recv(65536)
            count += 1
    return count


def stream_on(port: int, until: float, counts: list[int]) -> None:
    """Add the events that one client gets."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(request(0, True))
        size = 0
        while time.monotonic() < until:
            size += len(sock.recv(65536))
    counts.append(size // len(CHUNK))


def stream_all(port: int, until: float) -> int:
    """How many events all streams get together."""
    counts: list[int] = []
    threads = [threading.Thread(target=stream_on, args=(port, until, counts)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--kvproxy", default=str(Path(__file__).parent.parent / "kvproxy.py"))
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return asyncio.run(serve(args.serve))
    server, proxy = free_port(), free_port()
    words = [f"BACKEND_URL=127.0.0.1:{server}", f"LISTEN_PORT={proxy}", "LOG_LEVEL=warning"]
    processes = [
        subprocess.Popen([sys.executable, __file__, "--serve", str(server)]),
        subprocess.Popen([sys.executable, args.kvproxy, *words], stderr=subprocess.DEVNULL),
    ]
    try:
        time.sleep(1.5)
        parts = {
            "prompts": functools.partial(ask_on, "/v1/chat/completions"),
            "other requests": functools.partial(ask_on, "/tokenize"),
            "events": stream_all,
        }
        for name, play in parts.items():
            straight = play(server, time.monotonic() + args.seconds) / args.seconds
            before = cpu_seconds(processes[1].pid)
            count = play(proxy, time.monotonic() + args.seconds)
            cost = 1e6 * (cpu_seconds(processes[1].pid) - before) / count
            rate = count / args.seconds
            print(
                f"{name}: straight {straight:,.0f}/s, kvproxy {rate:,.0f}/s, {cost:.0f} us of CPU"
            )
    finally:
        for process in processes:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
