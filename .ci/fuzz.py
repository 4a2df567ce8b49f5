"""Fuzzes scrub, replay, inspect and the request reader for as long as it is told; a crash ends it
with the input.

    python .ci/fuzz.py [--seconds 600] [--seed 1] [--target edit|inspect|http]

With atheris installed and a target named, the inputs are guided by coverage; otherwise they are
mutations of seeds by a seeded generator. Whatever the input, nothing may raise but what a section's
docstring names, tool results and answers keep their words, and an edited body is JSON that a strict
reader takes."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import atheris
except ImportError:
    atheris = None
with atheris.instrument_imports() if atheris else contextlib.nullcontext():
    import kvproxy

STAMP = "[Wed 2026-02-18 20:48 UTC] "
BLOCK = 'Conversation info (untrusted metadata):\n```json\n{"message_id": "a-1", "sender": "ann"}\n```\n\n'
META = '## Inbound\n```json\n{"schema": "openclaw.inbound_meta.v1", "message_id": "x", "flags": {"a": [1]}}\n```\nToday\'s date is 2026-11-29.\n'
BODIES = (
    {"messages": [{"role": "system", "content": META}, {"role": "user", "content": BLOCK + STAMP + "hi"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": STAMP + "hi"}]},
                  {"role": "assistant", "content": "ok", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
                  {"role": "tool", "tool_call_id": "c", "content": "message_id"}, {"role": "system", "content": "late"}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {"message_id": 1}}}]},
    {"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "you"}],
     "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]}]},
    {"instructions": META, "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
                                     {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                                     {"type": "function_call_output", "call_id": "c", "output": "o"}]},
)  # fmt: skip
LOG = (
    b"0.01.234.567 I slot get_availabl: id  0 | task -1 | selected slot by LCP similarity, f_sim_best = 0.995 (> 0.100 thold)",
    b"slot update_slots: id  0 | task 3 | new prompt, n_ctx_slot = 4096, n_keep = 0, task.n_tokens = 900",
    b"slot print_timing: id  0 | task 3 | prompt eval time =     278.00 ms /    25 tokens ( 11.12 ms per token)",
)
HEADS = (
    b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nabcd",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"GET http://a/b?c HTTP/1.0\r\nX: y\r\n\r\n",
)
SEEDS = {
    "edit": [
        json.dumps(body, ensure_ascii=tight, separators=(",", ":") if tight else None).encode()
        for body in BODIES
        for tight in (True, False)
    ],
    "inspect": [
        *LOG,
        *(json.dumps({"path": "/v1/messages", "body": body}).encode() for body in BODIES),
    ],
    "http": list(HEADS),
}
EDITOR = kvproxy.Editor(kvproxy.Config())
BODIES_READER = kvproxy.Reader(1 << 20)
LARGE = 64_000  # bytes of the bodies that one piece of text fills
SECONDS = 1.0  # of CPU for any body
READER = kvproxy.LogReader(kvproxy.Config())


def strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in strings(part)]


def edit(data: bytes) -> None:
    """A body through parse, scrub, lift and replay, in every dialect."""
    for dialect in set(kvproxy.DIALECTS.values()):
        try:
            view = BODIES_READER.view(data, dialect)
        except kvproxy.Unreadable:
            continue
        fresh = kvproxy.view_of(kvproxy.parse(data), dialect)
        assert fresh is not None and [turn.role for turn in fresh.turns] == [
            turn.role for turn in view.turns
        ]
        kept = [
            text
            for turn in view.turns
            if turn.role in ("assistant", "tool")
            for text in strings(turn.item)
        ]
        begun = time.process_time()
        try:
            EDITOR.apply(view, kvproxy.Report())
        except kvproxy.Unreadable:
            continue
        assert time.process_time() - begun < SECONDS, "a body takes too long"
        text = view.dump()
        found = set(strings(json.loads(text)))
        assert all(piece in found for piece in kept), "an answer or a result lost its words"


def large(random_: random.Random) -> bytes:
    """A body with one text that repeats a piece of another one, again and again."""
    body = json.loads(random_.choice(SEEDS["edit"]))
    texts = [text for one in BODIES for text in strings(one) if len(text) > 3]
    text = random_.choice(texts)
    start = random_.randrange(len(text))
    piece = text[start : start + random_.randrange(1, 60)] + random_.choice(("", "\n", "\n\n", " "))
    holders = [turn for turn in body.get("messages", body.get("input", [])) if "content" in turn]
    turn = random_.choice(holders)
    turn["content"] = (
        text + "\n" + piece * (LARGE // len(piece)) + random_.choice(("", "\n" + text))
    )
    return json.dumps(body).encode()


def inspect(data: bytes) -> None:
    for line in data.split(b"\n"):
        READER.line(line)


class Packets(io.RawIOBase):
    """A file that gives at most `size` bytes at a time, as a Stream may, and raises at its end."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size = data, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.data:
            raise EOFError
        piece = self.data[: min(self.size, len(buffer))]
        buffer[: len(piece)] = piece
        self.data = self.data[len(piece) :]
        return len(piece)


def read_request(data: bytes, size: int) -> tuple[object, ...]:
    """What the relay makes of a request with a chunked body."""
    relay = kvproxy.Relay.__new__(kvproxy.Relay)  # without a socket
    relay.rfile = io.BufferedReader(Packets(data, size))
    relay.config = kvproxy.Config()
    relay.proxy = types.SimpleNamespace(loopback_only=False)
    body = b""
    try:
        request = relay.read_request()
        for _, payload in kvproxy.read_chunks(relay.rfile, float("inf")):
            body += payload
    except (kvproxy.Refused, EOFError) as refused:
        return (type(refused),)
    return (request.method, request.path, list(request.headers.raw_items()), body)


def http(data: bytes) -> None:
    """A request's head and a chunked body, whole and byte by byte."""
    whole, dripped = read_request(data, max(1, len(data))), read_request(data, 1)
    assert whole == dripped, "a request depends on where it is cut"


TARGETS: dict[str, Callable[[bytes], None]] = {"edit": edit, "inspect": inspect, "http": http}


def mutate(random_: random.Random, seeds: list[bytes]) -> bytes:
    data = bytearray(random_.choice(seeds))
    for _ in range(random_.randrange(1, 8)):
        at, size = random_.randrange(len(data) + 1), random_.randrange(1, 12)
        other = random_.choice(seeds)
        start = random_.randrange(len(other))
        piece = (other[start : start + size], random_.randbytes(size), data[at : at + size] * 2)[
            random_.randrange(3)
        ]
        data[at : at + random_.choice((0, len(piece)))] = piece
    return bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=list(TARGETS))
    args = parser.parse_args()
    names = [args.target] if args.target else list(TARGETS)
    if atheris is not None and args.target:
        corpus = Path(tempfile.mkdtemp(prefix="kvproxy-fuzz-"))
        for number, data in enumerate(SEEDS[args.target]):
            (corpus / str(number)).write_bytes(data)
        options = [
            sys.argv[0],
            f"-max_total_time={args.seconds:.0f}",
            "-max_len=20000",
            "-rss_limit_mb=4096",
            str(corpus),
        ]
        atheris.Setup(options, lambda data: TARGETS[args.target](data))
        atheris.Fuzz()
    generator, until, count = random.Random(args.seed), time.monotonic() + args.seconds, 0
    while time.monotonic() < until:
        name = names[count % len(names)]
        data = mutate(generator, SEEDS[name])
        if name == "edit" and count % 30 == 0:
            data = large(generator)
        try:
            TARGETS[name](data)
        except BaseException:
            print(f"{name} fails on {data!r}", file=sys.stderr)
            raise
        count += 1
    print(f"{count} inputs to {', '.join(names)}, no crash")
    return 0


if __name__ == "__main__":
    sys.exit(main())
