#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the kvproxy authors
"""kvproxy: makes llama-server's prefix cache hit for agents that put clocks and ids in front of
their prompts.

One file, standard library only, Python 3.10 or newer. Copy it anywhere and run it:

    python kvproxy.py demo                                      see what it does; needs no server
    BACKEND_URL=http://127.0.0.1:8080 python kvproxy.py         serve on 127.0.0.1:1234
    python kvproxy.py --help                                    every command and setting

A prefix cache reuses a prompt only up to the first byte that differs from the last one. Agents
write message ids, clocks, git snapshots and moving context blocks near the front, so a local model
reads tens of thousands of tokens again on every turn. kvproxy forwards each request so that it
begins with what the server has already read:

client -> read -> parse -> scrub -> lift -> replay -> forward -> relay -> client |
| store        usage -> explain -> log, page, metrics

The sections below stand in that order: Configuration, Dialects, Scrub, Lift, Replay, Explain,
Relay, Server, Status, Commands. Scrub, lift, replay and explain touch no socket and no file:
payload in, payload and report out.

To use it from a program (importing starts nothing and reads no environment):

    from kvproxy import Config, Proxy, scrub
    with Proxy(Config(backend_url="http://127.0.0.1:8080", listen_port=0)) as proxy:
        print(proxy.url)
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import difflib
import errno
import hashlib
import html
import http
import http.client
import io
import ipaddress
import itertools
import json
import logging
import marshal
import os
import random
import re
import select
import signal
import socket
import socketserver
import stat
import statistics
import struct
import sys
import textwrap
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, cast

try:
    import ssl
except ImportError:  # a Python that was built without it: http backends only
    AGAIN: tuple[type[OSError], ...] = (BlockingIOError,)
else:
    AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

__version__ = "1.0.0"
__all__ = ["Config", "ConfigError", "Proxy", "Report", "scrub"]

Json = dict[str, Any]


# ==================================================================================================
# Configuration: one dataclass feeds the environment, --help, the README table and the check of
# values
# ==================================================================================================


class ConfigError(ValueError):
    """A setting has a value that cannot be used; the message names the variable, the value and what
    is allowed."""


def setting(default: Any, help: str, **check: Any) -> Any:
    """A Config field: `help` for --help and README; `check` is low/high, choices, or a kind (host,
    url, regex)."""
    return dataclasses.field(default=default, metadata={"help": help, **check})


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting, as a field here and as the environment variable of the same name in upper
    case.

    Raises ConfigError for a value out of range, an unknown choice, a bad URL or a pattern that does
    not compile."""

    listen_host: str = setting(
        "127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in", kind="host"
    )
    listen_port: int = setting(1234, "port to listen on; 0 takes any free one", low=0, high=65535)
    backend_url: str = setting(
        "",
        "the model server, http or https, a path prefix is kept; unset: the first of 127.0.0.1:8080, :9931, :12345"
        " that answers like a model server",
        kind="url",
    )
    scrub: bool = setting(
        True, "0 forwards every body as it came: a pure logger, the A of an A/B test"
    )
    strip_message_ids: str = setting(
        "1",
        "drop per-message ids from OpenClaw's metadata; system: in system prompts only",
        choices=("0", "1", "system"),
    )
    strip_timestamps: bool = setting(
        True, "drop the [Wed 2026-02-18 20:48 UTC] stamp at the start of user texts"
    )
    strip_billing: bool = setting(
        True, "drop Claude Code's x-anthropic-billing-header line from the system prompt"
    )
    strip_regex: tuple[str, ...] = setting(
        (),
        "what this pattern matches is removed from system and user text; more: STRIP_REGEX_2, _3, ...",
        kind="regex",
    )
    system_first: bool = setting(
        True, "merge system messages into one at the front; later ones become reminders"
    )
    lift: bool = setting(
        True,
        "move clocks, date lines and git snapshots from the system prompt to the newest user turn",
    )
    lift_regex: tuple[str, ...] = setting(
        (), "a line of the system prompt to lift as well; more: LIFT_REGEX_2, _3, ...", kind="regex"
    )
    replay: bool = setting(True, "send history again as it was sent first; LIFT needs it")
    replay_regex: tuple[str, ...] = setting(
        (),
        "text in user turns that comes and goes between requests; more: REPLAY_REGEX_2, _3, ...",
        kind="regex",
    )
    replay_mb: int = setting(
        64,
        "memory for replay in MB, and one to three times that for turns read before; the least recently used goes first",
        low=1,
        high=65536,
    )
    ledger_mb: int = setting(
        64, "memory for the prompts that explain compares with, in MB", low=1, high=65536
    )
    keep_requests: int = setting(
        50, "requests kept for the status page, with their bodies", low=0, high=10000
    )
    warn_reuse: float = setting(
        0.5, "warn when the hit rate of the last 20 requests falls below this", low=0, high=1
    )
    capture_file: str = setting(
        "", "append every request to this file as JSON lines (mode 0600, secrets replaced)"
    )
    capture_mb: int = setting(
        100, "size at which the capture is rotated, one old file is kept", low=1, high=1000000
    )
    warmup_file: str = setting(
        "", "remember the heads of recent conversations here and read them in after a start"
    )
    warmup_heads: int = setting(4, "how many heads are remembered", low=1, high=64)
    keepalive_seconds: int = setting(
        0, "repeat the newest head after this much idle time; 0: off", low=0, high=864000
    )
    connect_timeout: float = setting(
        5.0, "seconds to wait for a connection to the server", low=0.05, high=600
    )
    read_timeout: float = setting(
        3600.0, "seconds without a byte from the server before giving up", low=0.05, high=864000
    )
    header_timeout: float = setting(
        15.0, "seconds a client may take to send a request's head", low=0.05, high=3600
    )
    max_body_mb: int = setting(100, "largest request body in MB", low=1, high=65536)
    max_connections: int = setting(
        2048,
        "client connections at a time; idle and slow ones give way, else 503",
        low=1,
        high=100000,
    )
    allowed_hosts: str = setting(
        "", "more names that the Host header may carry, separated by commas"
    )
    log_level: str = setting(
        "info", "how much is logged", choices=("debug", "info", "warning", "error")
    )
    log_file: str = setting("", "append the log to this file; unset: stderr")

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check(item, item.name.upper(), getattr(self, item.name))
        url = urllib.parse.urlsplit(self.backend_url)
        port = url.port or (443 if url.scheme == "https" else 80)
        hosts = {url.hostname or "", self.listen_host.lower()}
        vague = hosts & {"localhost", "0.0.0.0", "::"}  # each stands for several addresses
        ours = len(hosts) == 1 or (
            vague and all(host in vague or is_loopback(host) for host in hosts)
        )
        if (
            ours and port == self.listen_port
        ):  # each request would come back until MAX_CONNECTIONS is reached
            raise ConfigError(
                f"BACKEND_URL={self.backend_url!r}: must not be kvproxy's own address; set LISTEN_PORT"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Config:
        """The settings found in `environ` (usually os.environ). An empty value counts as unset."""
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            name = item.name.upper()
            if item.metadata.get("kind") == "regex":
                values[item.name] = _patterns(item, environ)
            elif text := environ.get(name, "").strip():
                values[item.name] = _convert(item, text)
                _check(item, name, values[item.name], text)
        return cls(**values)

    @classmethod
    def table(cls) -> list[tuple[str, str, str]]:
        """(variable, default, meaning) of every setting, for --help and the README."""
        rows = []
        for item in dataclasses.fields(cls):
            default: Any = item.default
            text = (
                f"{default:g}" if isinstance(default, (int, float)) else default or ""
            )  # True is 1, () is empty
            rows.append((item.name.upper(), text, item.metadata["help"]))
        return rows


_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_TYPES = {
    bool: "0 or 1",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a tuple of texts",
}


def _convert(item: dataclasses.Field[Any], text: str) -> Any:
    """A variable's text in the type of its setting; as it is, where that cannot be."""
    if isinstance(item.default, bool):
        return _WORDS.get(text.lower(), text)
    if isinstance(item.default, (int, float)):
        with contextlib.suppress(ValueError):
            return type(item.default)(text)
    return text.lower() if "choices" in item.metadata else text


def _patterns(item: dataclasses.Field[Any], environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values of NAME, NAME_2, NAME_3, ... in the order of their numbers."""
    found = []
    for name, text in environ.items():
        match = re.fullmatch(item.name.upper() + r"(?:_([0-9]+))?", name)
        if match and text:
            _check(item, name, (text,), text)
            found.append((int(match[1] or 1), name, text))
    return tuple(text for _, _, text in sorted(found))


def _check(item: dataclasses.Field[Any], name: str, value: Any, given: str | None = None) -> None:
    """Raise ConfigError for a value that the setting does not allow; `given` is how it was
    written."""
    if fault := _fault(item, value):
        raise ConfigError(f"{name}={value if given is None else given!r}: {fault}")


def _fault(item: dataclasses.Field[Any], value: Any) -> str:
    """What is wrong with a setting's value, or nothing."""
    default: Any = item.default
    wanted, check, kind = type(default), item.metadata, item.metadata.get("kind")
    fits = (
        value in (0, 1)
        if wanted is bool
        else isinstance(value, (int, float) if wanted is float else wanted)
    )
    if not fits:
        return f"must be {_TYPES[wanted]}"
    if "low" in check and not check["low"] <= value <= check["high"]:  # NaN fails both comparisons
        return f"must be from {check['low']} to {check['high']}"
    if "choices" in check and value not in check["choices"]:
        return "must be one of " + ", ".join(check["choices"])
    if kind == "host" and not _is_host(value):
        return "must be an address or a host name"
    if kind == "url" and value and not _is_url(value):
        return "must be http://host[:port][/prefix] or https://..."
    for pattern in value if kind == "regex" else ():
        try:
            re.compile(pattern)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            return f"must be a Python regular expression: {error}"
    return ""


def _is_host(value: str) -> bool:
    with contextlib.suppress(UnicodeError):  # 127.0.0..1: connecting to it would raise this
        return bool(value.encode("idna")) and not re.search(r"[^\w.:%-]", value, re.ASCII)
    return False


def _is_url(value: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(value)
        named = (
            parts.scheme in ("http", "https") and parts.port != 0 and _is_host(parts.hostname or "")
        )
    except ValueError:  # a port that is no number, a bracket too few
        return False
    return named and "@" not in parts.netloc and not re.search(r"[^!-~]|[?#]", value)


# ==================================================================================================
# Dialects: four request shapes, one view (an ordered list of turns)
# ==================================================================================================


class Dialect(NamedTuple):
    """Where a request's prompt is. `system` and `turns` name keys of the body; `text` is the type
    of a new text part."""

    name: str
    system: str
    turns: str
    text: str
    edited: bool


DIALECTS = {
    "chat/completions": Dialect("chat", "", "messages", "text", True),
    "responses": Dialect("responses", "instructions", "input", "input_text", True),
    "messages": Dialect("messages", "system", "messages", "text", True),
    "completions": Dialect("completions", "", "prompt", "", False),
    "completion": Dialect("completions", "", "prompt", "", False),
}
# count_tokens (Anthropic) and input_tokens (llama-server) count what the other path would read, so
# they get its edits.
DIALECT_PATH = re.compile(
    r"/(?:v1/)?(chat/completions|responses|messages|completions?)(/count_tokens|/input_tokens)?/?",
    re.ASCII,
)
TEXT_PARTS = (
    "text",
    "input_text",
    "output_text",
)  # a tuple: what a client sends as its type need not be hashable
ROLES = {role: role for role in ("system", "user", "assistant", "tool", "reasoning")}
ROLES |= {"developer": "system", "function": "tool"}
ITEM_ROLES = {  # Responses items that are no messages
    "function_call": "assistant",
    "custom_tool_call": "assistant",
    "reasoning": "reasoning",
    "function_call_output": "tool",
    "custom_tool_call_output": "tool",
}


def dialect_of(path: str) -> tuple[Dialect | None, bool]:
    """The dialect of a request path (query and all), and whether the path only counts tokens."""
    found = DIALECT_PATH.fullmatch(path.split("?", 1)[0])
    return (DIALECTS[found[1]], bool(found[2])) if found else (None, False)


class Slot(NamedTuple):
    """A place in a turn that holds one text."""

    turn: Turn
    holder: Any
    key: Any

    def get(self) -> str:
        return self.holder[self.key]  # type: ignore[no-any-return]

    def set(self, text: str) -> None:
        self.holder[self.key] = text
        self.turn.changed()


@dataclasses.dataclass(slots=True, eq=False)
class Turn:
    """One entry of a prompt. `holder[key]` is its content; `item` its JSON object in the list, None
    for text beside it.

    Roles: system (and developer), user, assistant, tool, reasoning, other. An Anthropic user
    message that only carries tool results has the role tool.

    Requests that repeat a turn share it, with what was found out about it; so only an own() copy
    may be changed."""

    role: str
    holder: Json
    key: str
    item: Json | None
    raw: bytes | None = None  # the item as JSON
    counts: list[tuple[str, int]] | None = None  # what the scrubber took out of it
    mark: tuple[str | None, int] | None = (
        None  # for Replay: what it says, and its link in the chain
    )
    told: str | None = None  # for the ledger: all that the server reads of it

    def own(self) -> Turn:
        """A copy that may be changed."""
        if self.item is None:
            return self
        item = dict(self.item)
        if isinstance(content := item.get(self.key), list):
            item[self.key] = [dict(part) if isinstance(part, dict) else part for part in content]
        return Turn(self.role, item, self.key, item)

    def changed(self) -> None:
        """Forget what was found out about it."""
        self.raw = self.mark = self.told = None

    def refit(self, content: Any) -> None:
        """Replace the content as a whole."""
        self.holder[self.key] = content
        self.changed()

    def json(self) -> bytes:
        """The item as JSON: as it came, if nobody changed it."""
        if self.raw is None:
            self.raw = dump(self.item)
        return self.raw

    def slots(self) -> list[Slot]:
        """The texts that a person or the client wrote, in order; tool calls and tool results are
        not among them."""
        content = self.holder.get(self.key)
        if isinstance(content, str):
            return [Slot(self, self.holder, self.key)]
        found = []
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, str):
                found.append(Slot(self, content, index))
            elif isinstance(part, dict) and isinstance(part.get("text"), str):
                if part.get("type") in TEXT_PARTS:
                    found.append(Slot(self, part, "text"))
        return found

    def text(self) -> str:
        slots = self.slots()
        return slots[0].get() if len(slots) == 1 else "\n".join([slot.get() for slot in slots])

    def rest(self) -> str:
        """What the turn says beside its texts, each piece behind a separator: tool calls by id and
        name, results, images; not how a client spells them."""
        content, item = self.holder.get(self.key), self.item
        said: list[Any] = []
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and part.get("type") not in _UNSAID_PARTS:
                    said += (
                        [part.get("id"), part.get("name")]
                        if part.get("type") == "tool_use"
                        else [bare(part)]
                    )
        elif content is not None and not isinstance(content, str):
            said.append(content)
        if item is not None:
            keys = ("name",) if self.role == "user" else ("call_id", "tool_call_id")
            said += [item[key] for key in keys if item.get(key) is not None]
            calls = item.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                function = call.get("function") if isinstance(call, dict) else None
                said += (
                    [call.get("id"), function.get("name")] if isinstance(function, dict) else [call]
                )
        return "".join(
            [PIECE + (piece if isinstance(piece, str) else _sorted_json(piece)) for piece in said]
        )


PIECE = "\x1f"
_sorted_json = json.JSONEncoder(sort_keys=True).encode
_UNSAID_PARTS = (
    *TEXT_PARTS,
    "thinking",
    "redacted_thinking",
    "reasoning",
    "reasoning_text",
    "summary_text",
)


def bare(part: Json) -> Json:
    """A content part, item or tool without what llama-server does not read."""
    return {key: value for key, value in part.items() if key != "cache_control"}


@dataclasses.dataclass(slots=True)
class View:
    """A request body as turns. `head` is system text that stands beside the list; `turns` are the
    list's entries, which are only in `body` itself after store()."""

    body: Json
    dialect: Dialect
    head: list[Turn]
    turns: list[Turn]

    def all(self) -> list[Turn]:
        return self.head + self.turns

    def leading(self) -> int:
        """How many turns at the start of the list are system or developer messages."""
        return next(
            (i for i, turn in enumerate(self.turns) if turn.role != "system"), len(self.turns)
        )

    def system(self) -> list[Turn]:
        """The turns that make the system prompt."""
        return self.head + self.turns[: self.leading()]

    def store(self) -> None:
        """Write `turns` back into the body."""
        if not self.turns or self.turns[0].item is not None:
            self.body[self.dialect.turns] = [turn.item for turn in self.turns]

    def replace(self, turn: Turn, new: Turn) -> Turn:
        """Put a changed turn in a turn's place."""
        if new is not turn:
            self.turns[self.turns.index(turn)] = new
        return new

    def dump(self) -> bytes:
        """The body as JSON, with the turns that nobody changed in the bytes they came in."""
        key = self.dialect.turns
        if self.turns and self.turns[0].item is None:
            return dump(self.body)
        # The hole is unmistakable: parse() lets none through, and within a text the quotes before
        # it would be escaped.
        mark = b'"%s":' % key.encode()
        head, _, tail = dump({**self.body, key: HOLE}).partition(mark + b"-Infinity")
        return b"".join(
            (head, mark, b"[", b",".join([turn.json() for turn in self.turns]), b"]", tail)
        )


def turn_of(item: Json) -> Turn:
    """A turn from an entry of `messages` or `input`."""
    known, name = (ROLES, item["role"]) if "role" in item else (ITEM_ROLES, item.get("type"))
    role = known.get(str(name), "other")  # str: a client may send what cannot be hashed
    content = item.get("content")
    parts = content if role == "user" and isinstance(content, list) else []
    if parts and all(
        isinstance(part, dict) and part.get("type") == "tool_result" for part in parts
    ):
        role = "tool"
    return Turn(
        role, item, "output" if "output" in item and "content" not in item else "content", item
    )


def view_of(body: Any, dialect: Dialect) -> View | None:
    """The view of a parsed body, or None when its shape is not the dialect's (such a body is
    forwarded untouched)."""
    if not isinstance(body, dict):
        return None
    head = []
    if dialect.system and body.get(dialect.system):
        head = [Turn("system", body, dialect.system, None)]
        if not head[0].slots():
            return None
    items = body.get(dialect.turns)
    if isinstance(items, str) and dialect.turns in ("input", "prompt"):
        return View(body, dialect, head, [Turn("user", body, dialect.turns, None)])
    if not isinstance(items, list):
        return None
    if dialect.turns == "prompt":
        return View(body, dialect, head, [Turn("other", body, "prompt", None)])
    if not all(isinstance(item, dict) for item in items):
        return None
    return View(body, dialect, head, [turn_of(item) for item in items])


def guess_dialect(body: Json) -> Dialect:
    """The dialect that a body is most likely in, when no path tells."""
    if "input" in body:
        return DIALECTS["responses"]
    if "messages" not in body:
        return DIALECTS["completions"]
    return DIALECTS["messages" if "system" in body else "chat/completions"]


class Unreadable(ValueError):
    """The body is forwarded as it came; the message says why."""


def _pairs(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Unreadable("duplicate keys")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not abs(number) < float("inf"):  # NaN neither
        raise Unreadable(f"no finite number ({text[:20]})")
    return number


_FINITE: Json = {"parse_float": _finite, "parse_constant": _finite}
_STRICT: Json = {"object_pairs_hook": _pairs, **_FINITE}
_parse_at = json.JSONDecoder(**_STRICT).raw_decode
HOLE = float(
    "-inf"
)  # stands in a body where its turns were, as -Infinity; a client's own is refused


def _hole(name: str) -> float:
    return HOLE if name == "-Infinity" else _finite(name)


_parse_holed = json.JSONDecoder(**{**_STRICT, "parse_constant": _hole}).decode
LIST_START = {
    key: re.compile(rb'"%s":[ \t\r\n]*(\[[ \t\r\n]*(\{"\w+":))' % key.encode())
    for key in ("messages", "input")
}
ITEM_END = re.compile(rb"[ \t\r\n]*([,\]])[ \t\r\n]*")
PARSE_LIMIT = (
    32 << 20
)  # bytes; parsing takes several times a body's size, and no context window holds so much text


def parse(raw: bytes | bytearray) -> Json:
    """The JSON object in `raw`. Raises Unreadable for all that could not be written again with the
    same meaning."""
    if len(raw) > PARSE_LIMIT:
        raise Unreadable(f"longer than {PARSE_LIMIT >> 20} MB")
    try:
        body = json.loads(raw.decode("utf-8"), **_STRICT)
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8") from None
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"not JSON ({error})") from None
    if not isinstance(body, dict):
        raise Unreadable("not a JSON object")
    return body


def dump(body: Any) -> bytes:
    """Compact JSON. ASCII escapes are faster than UTF-8 and keep lone surrogates. Raises
    RecursionError."""
    return json.dumps(body, separators=(",", ":")).encode("ascii")


Bounds = list[tuple[int, int]]  # (how many turns stand before a place in a body, that place)


class Prefix(NamedTuple):
    """The beginning of a body's list: its bytes in pieces, each with the number of turns up to its
    end."""

    dialect: Dialect
    pieces: list[tuple[bytes, int]]
    turns: list[Turn]


class Reader:
    """Makes views of bodies, and remembers turns: each request brings its conversation's history
    again, so the same bytes need be parsed, scrubbed and written only once. The least recently used
    go first. Safe to use from many threads."""

    def __init__(self, scrubber: Scrubber | None, limit: int) -> None:
        """`limit`: bytes of JSON in each of two generations and in the prefixes; a turn takes twice
        to six times that."""
        self.scrubber, self.limit = scrubber, limit
        self.newer: dict[bytes, Turn] = {}  # by the bytes they were read from
        self.older: dict[bytes, Turn] = {}
        self.size = 0  # of `newer`
        self.prefixes: list[Prefix] = []  # of large bodies, the newest first
        self.short = 65536  # bytes; the turns of shorter bodies are looked up one by one

    def view(self, raw: bytes | bytearray, dialect: Dialect) -> View:
        """Raises Unreadable."""
        if dialect.edited and len(raw) <= PARSE_LIMIT:
            with contextlib.suppress(ValueError, RecursionError):
                return self.split(raw, dialect)
        view = view_of(parse(raw), dialect)
        if view is None:
            raise Unreadable("unknown shape")
        return view

    def split(self, raw: bytes | bytearray, dialect: Dialect) -> View:
        """The view of a body in the usual spelling: without line breaks, and each turn begins with
        the same member. Raises ValueError or RecursionError where that does not work out, or the
        body is not JSON."""
        found = LIST_START[dialect.turns].search(raw)
        if found is None:
            raise Unreadable("not the usual spelling")
        start, opening = found.start(1), found[2]
        turns, known = self.begin(raw, start, dialect)
        place = known[-1][1] if known else found.start(2)
        bounds, after = self.read(bytes(memoryview(raw)[place:]), opening, turns, dialect)
        text = f"{raw[:start].decode()}-Infinity{after}"
        body = _parse_holed(text)
        if (
            text.count("-Infinity") != 1
            or not isinstance(body, dict)
            or body.get(dialect.turns) is not HOLE
        ):
            raise Unreadable("not the usual spelling")
        view = view_of({**body, dialect.turns: []}, dialect)
        if view is None:
            raise Unreadable("unknown shape")
        view.turns = turns
        if len(raw) >= self.short:
            self.end(raw, start, view, known, [(count, place + at) for count, at in bounds])
        return view

    # --- turn by turn -----------------------------------------------------------------------------

    def read(
        self, data: bytes, opening: bytes, turns: list[Turn], dialect: Dialect
    ) -> tuple[Bounds, str]:
        """Append the turns that `data` begins with to `turns`. Returns where they begin, and what
        follows the list."""
        bounds, at, wasted = [], 0, 0
        while True:
            bounds.append((len(turns), at))
            end, comma = next_item(data, opening, at)
            first = not turns and not dialect.system
            turn = self.recall(data[at : end - comma], first) if comma else None
            if turn is not None:
                turns.append(turn)
                at = end
                continue
            item, raw, decoded = parse_item(data, at, end, opening)
            behind = ITEM_END.match(data, at + len(raw))
            wasted += decoded - len(raw)
            if behind is None or wasted > 4 * len(data):  # a parse of the whole costs no more
                raise Unreadable("not the usual spelling")
            turns.append(self.recall(raw, first) or self.turn(item, raw, first))
            at = behind.end()
            if behind[1] == b"]":
                return bounds, data[at:].decode()

    def recall(self, raw: bytes, first: bool) -> Turn | None:
        """The turn in these bytes, if it is known; but what is cut out of a system text depends on
        those before it."""
        turn = self.newer.get(raw)
        if turn is None and (turn := self.older.get(raw)) is not None:
            self.keep(raw, turn)
        return None if turn is None or (turn.role == "system" and not first) else turn

    def turn(self, item: Json, raw: bytes, first: bool) -> Turn:
        """A new turn, scrubbed and remembered where recall() may find it."""
        turn = turn_of(item)
        turn.raw = raw
        if turn.role != "system" or first:
            if turn.role in ("user", "system") and self.scrubber is not None:
                turn.counts = self.scrubber.edit(turn, True)
            self.keep(raw, turn)
        return turn

    def keep(self, raw: bytes, turn: Turn) -> None:
        size = len(raw) + 1000
        if size > self.limit >> 1:
            return  # all others would have to go
        if self.size + size > self.limit:
            self.older, self.newer, self.size = self.newer, {}, 0
        self.size += size
        self.newer[raw] = turn

    # --- the beginning of large bodies, as a whole ------------------------------------------------

    def begin(
        self, raw: bytes | bytearray, start: int, dialect: Dialect
    ) -> tuple[list[Turn], Bounds]:
        """The turns that the list at `start` has in common with an earlier one, and the bounds of
        the pieces they came in."""
        best: Bounds = []
        turns: list[Turn] = []
        for prefix in self.prefixes:
            bounds, at = [], start
            for piece, count in prefix.pieces if prefix.dialect is dialect else ():
                if not raw.startswith(piece, at):
                    break
                at += len(piece)
                bounds.append((count, at))
            if bounds[-1:] > best[-1:]:
                best, turns = bounds, prefix.turns[: bounds[-1][0]]
        return turns, best

    def end(
        self, raw: bytes | bytearray, start: int, view: View, known: Bounds, bounds: Bounds
    ) -> None:
        """Note the beginning of a body's list: up to its newest user turn, which may come in
        another form next time, and up to its last turn."""
        turns, last = view.turns, bounds[-1]
        newest = next((i for i in range(len(turns) - 1, 0, -1) if turns[i].role == "user"), 0)
        middle = max((bound for bound in known + bounds if 0 < bound[0] <= newest), default=last)
        if [middle, last] == known or last[0] == 0 or last[1] - start > self.limit:
            return
        if any(turn.role == "system" for turn in turns[0 if view.dialect.system else 1 :]):
            return  # see recall()
        data = memoryview(raw)
        pieces = [
            (bytes(data[start : middle[1]]), middle[0]),
            (bytes(data[middle[1] : last[1]]), last[0]),
        ]
        used, prefixes = last[1] - start, [Prefix(view.dialect, pieces, turns[: last[0]])]
        for other in self.prefixes[:7]:
            if not raw.startswith(other.pieces[0][0], start):  # else this one has taken its place
                used += sum(len(piece) for piece, _ in other.pieces)
                if used <= self.limit:
                    prefixes.append(other)
        self.prefixes = prefixes


def next_item(data: bytes, opening: bytes, at: int) -> tuple[int, int]:
    """Where the item behind the one at `at` may begin, and the length of the comma and space before
    it; else the end, and 0. An opening's first quote stands in no text, where it would be escaped;
    but it may stand within an item."""
    while (at := data.find(opening, at + 1)) >= 0:
        if data[at - 2 : at] == b"},":
            return at, 1
        if data[at - 3 : at] == b"}, ":
            return at, 2
    return len(data), 0


def parse_item(data: bytes, at: int, end: int, opening: bytes) -> tuple[Json, bytes, int]:
    """The JSON object at `at`, which most likely ends before `end`; its bytes, and how many were
    decoded to find it. Raises ValueError, RecursionError."""
    decoded = 0
    while True:
        text = data[at:end].decode()
        decoded += end - at
        try:
            item, length = _parse_at(text, 0)
        except json.JSONDecodeError:
            if end == len(data):
                raise
            end, _ = next_item(
                data, opening, at + 2 * (end - at)
            )  # doubled, all tries together cost little
            continue
        if not isinstance(item, dict):
            raise Unreadable("unknown shape")
        return item, text[:length].encode(), decoded


@dataclasses.dataclass
class Report:
    """What was done to one request, in counts; `note` says why a body was left alone."""

    items: int = 0
    ts_removed: int = 0
    msg_ids_removed: int = 0
    billing_removed: int = 0
    regex_removed: int = 0
    system_moved: int = 0
    lifted: int = 0
    replayed: int = 0
    dropped: int = 0
    tools_restored: int = 0
    items_modified: int = 0
    note: str = ""

    def edits(self) -> int:
        return (
            self.ts_removed + self.msg_ids_removed + self.billing_removed + self.regex_removed + self.system_moved
            + self.lifted + self.replayed + self.dropped + self.tools_restored
        )  # fmt: skip


# ==================================================================================================
# Scrub: rules that take out what never helps the model. Stateless: the same text in, the same text
# out
# ==================================================================================================

# --- OpenClaw's decorations at the start of a user text, parsed once by lead(); the rules below wor

_TIME = (
    r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?"
    r"(?: [A-Z]{2,5}(?:[+-]\d{1,2}(?::\d\d)?)?|Z)"
)
_CHANNEL = (  # an envelope's label begins with one of these; "[Meeting Thu 2026-05-07 ..." is somebody's own words
    r"(?:BlueBubbles|Discord|Feishu|Google Chat|GoogleChat|IRC|LINE|Matrix|Mattermost|MSTeams|Teams|Nextcloud Talk|"
    r"Nostr|Signal|Slack|Telegram|Tlon|Twitch|WebChat|WhatsApp|Zalo|iMessage)"
)
_EVENT = r"System(?: \(untrusted\))?:"
_LABEL = r"[A-Z][^\n:()\[\]]{1,80}(?: \((?:untrusted|trusted)[^)\n]{0,100}\):|: \u27e6openclaw:ctx\u27e7)"

LEADS = (  # (kind, pattern), tried in this order where a text begins, again and again
    # [Wed 2026-02-18 20:48 UTC] or [Matrix room:ops Thu 2026-05-07 08:01:33 GMT+1]. Older envelopes
    # without a weekday, [Signal Ann id:+1555 +4s 2026-11-29 18:14 UTC], name the sender, are stored
    # with the message, and never vary.
    ("stamp", rf"\[(?:{_CHANNEL}(?: [^\]\n]{{1,120}})? )?{_TIME}\](?: |(?=\n)|$)"),
    ("block", rf"{_LABEL} ?\n```(?:json)?\n(?P<json>.*?)\n```(?:\n+|$)"),
    (
        "context",
        r"(?:Conversation|Untrusted) context \((?:untrusted|metadata)[^\n]*\):\n(?:[^\n]+\n)+(?:\n|$)",
    ),
    ("current", r"Current message:\n(?:\[Replying to: [^\n]*\]\n)?#[^\s:]+ [^\n:]{1,120}: "),
    ("event", rf"{_EVENT} \[\d{{4}}-\d\d-\d\d [^\n]*(?:\n+{_EVENT} [^\n]*)*(?:\n+|$)"),
    ("runtime", r"OpenClaw runtime context for the (?:.*?<<<END_OPENCLAW_INTERNAL_CONTEXT>>>|.*)"),
    ("internal", r"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*?<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"),
    ("reminder", r"<system-reminder>.*?</system-reminder>"),
    ("environment", r"<environment_(?P<env>context|details)>.*?</environment_(?P=env)>"),
    ("reply", r"\[Replying to .*?\[/Replying\]"),
    (
        "line",
        r"(?:\[(?:media attached:?|from:|Forwarded from) [^\]\n]*\]|Delivery: [^\n]*)(?:\n+|$)",
    ),
)
LEAD = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in LEADS), re.DOTALL)
TAILS = (  # (kind, opening, ending) of decorations at the end of a text; the first whose ending fits
    ("reminder", "<system-reminder>", "</system-reminder>"),
    ("environment", "<environment_details>", "</environment_details>"),
    ("line", "\n", ""),
)
TAIL_LINE = re.compile(
    r"\[(?:message_id|slack message id|media attached)[: ][^\]]*\]\Z|Runtime: agent=.* \| "
)


def lead(text: str) -> list[re.Match[str]]:
    """The decorations at the start of a user text, in order; a match's group names are the kinds of
    LEADS.

    At most one stamp counts: a second one was typed by the person.
    """
    found: list[re.Match[str]] = []
    at = len(text) - len(text.lstrip())
    while match := LEAD.match(text, at):
        if match["stamp"] is not None and any(one["stamp"] is not None for one in found):
            break
        found.append(match)
        at = match.end()
        while text.startswith("\n", at):
            at += 1
    return found


def only_lead(text: str) -> bool:
    """Whether a part of a user turn holds decorations alone, so that the next part begins what the
    person wrote."""
    spans = lead(text)
    return not text[spans[-1].end() if spans else 0 :].strip()


# --- JSON members taken out without touching the layout of what stays -----------------------------

ID_KEYS = frozenset(
    ("message_id", "message_id_full", "reply_to_id", "reply_to_id_full", "message_sid")
)
# In the system prompt these vary from turn to turn as well: who speaks in a group, and what was
# mentioned.
INBOUND_KEYS = ID_KEYS | {"sender_id", "flags"}
_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'


def nested(levels: int) -> str:
    """A pattern for a JSON object or array of so many levels. What is no string passes if it looks
    like numbers, words, commas and colons: it is enough to know where the value ends."""
    inner, loose = _STRING + (f"|{nested(levels - 1)}" if levels > 1 else ""), r"[\s\w.,:+-]*"
    return rf"[{{\[]{loose}(?:(?:{inner}){loose})*[}}\]]"


def member_of(keys: Iterable[str]) -> re.Pattern[str]:
    """A pattern for the members of those names, with the comma behind. In JSON, no string holds
    such bare quotes."""
    names = "|".join(sorted(keys))
    return re.compile(
        rf'"(?:{names})"\s*:\s*(?:{_STRING}|{nested(8)}|[\w.+-]+)(?P<space>\s*)(?P<comma>,\s*)?'
    )


NESTED = re.compile(nested(8))  # clients write three levels at most
ID_MEMBER, INBOUND_MEMBER = member_of(ID_KEYS), member_of(INBOUND_KEYS)


def drop_members(text: str, start: int, member: re.Pattern[str]) -> tuple[str, int, int]:
    """Take the members that `member` matches, at any depth, out of the JSON object or array at
    text[start].

    Returns (new value, end of the old value, members removed). The layout of what stays is kept,
    and no comma dangles. Where no such value ends, that is ("", start, 0)."""
    value = NESTED.match(text, start)
    if value is None:
        return "", start, 0
    kept, at, removed = "", start, 0
    for match in member.finditer(text, start, value.end()):
        kept += text[at : match.start()]
        at = match.end()
        removed += 1
        if not match["comma"]:  # the last member: the comma before it goes
            kept = kept.rstrip().removesuffix(",")
            at = match.end() if kept.endswith("{") else match.start("space")
    return kept + text[at : value.end()], value.end(), removed


# --- the rules' functions: a text and the decorations at its start in, cuts out -------------------


class Cut(NamedTuple):
    """text[start:end] becomes `put`, which has `removed` things less."""

    start: int
    end: int
    put: str
    removed: int


Lead = list[re.Match[str]]
INBOUND_SCHEMA = re.compile(r'"schema"\s*:\s*"openclaw\.inbound_meta\.')


def cut_inbound(text: str, _: Lead) -> Iterator[Cut]:
    """The per-turn keys of each openclaw.inbound_meta JSON object in a system prompt."""
    done = 0
    for mark in itertools.islice(INBOUND_SCHEMA.finditer(text), 16):  # clients write one
        start = mark.start()
        for _attempt in range(
            32
        ):  # the nearest brace whose object holds the mark: not one of `flags`, nor in a text
            start = text.rfind("{", done, start)
            if start < 0:
                break
            value, end, count = drop_members(text, start, INBOUND_MEMBER)
            if end > mark.start():
                done = end
                if count:
                    yield Cut(start, end, value, count)
                break


# A line that closes a text stays: clients store it with the message, it never varies, and tools to
# react or edit need it.
ID_LINE = re.compile(
    r"^\[(?:message_id: [^\]\n]{1,80}|slack message id: [^\]\n]{1,160})\]\n(?=\s*\S)\n*",
    re.MULTILINE,
)


def cut_block_ids(text: str, spans: Lead) -> Iterator[Cut]:
    """Id keys in the labelled JSON blocks at the start of a user text, and whole [message_id: ...]
    lines."""
    for start, end in [match.span("json") for match in spans if match["json"]]:
        value, stop, count = drop_members(text, start, ID_MEMBER)
        if stop == end and count:
            yield Cut(start, end, value, count)
    for line in ID_LINE.finditer(text):
        yield Cut(*line.span(), "", 1)


def cut_stamp(_: str, spans: Lead) -> Iterator[Cut]:
    """The time stamp at the start of a user text, or after OpenClaw's blocks."""
    for match in spans:
        if match["stamp"] is not None:
            yield Cut(*match.span(), "", 1)


BILLING = re.compile(
    r"(?:x-anthropic-billing-header: [^\n]*|\[Anthropic\] Claude Code v\S+ \([^()\n]*\))(?:\n+|\Z)"
)


def cut_billing(text: str, _: Lead) -> Iterator[Cut]:
    """Claude Code's attribution, at the very start."""
    if match := BILLING.match(text):
        yield Cut(*match.span(), "", 1)


class Rule(NamedTuple):
    """A row of the table."""

    on: Callable[[Config], bool]
    role: str  # whose texts it looks at
    first: bool  # only the first text of that role
    cuts: Callable[[str, Lead], Iterator[Cut]]
    counter: str  # the field of Report that counts its removals
    markers: tuple[str, ...]  # one of them must be in the text before any work is done


RULES = (
    # Claude Code's billing header; spares the same words anywhere but at the very start
    Rule(
        lambda c: c.strip_billing, "system", True, cut_billing, "billing_removed",
        ("x-anthropic-billing-header:", "[Anthropic] Claude Code v"),
    ),
    # ids in OpenClaw's inbound block; spares channel, provider, chat_id, which are stable in a
    # conversation
    Rule(
        lambda c: c.strip_message_ids != "0", "system", False, cut_inbound, "msg_ids_removed",
        ("openclaw.inbound_meta.",),
    ),
    # ids in user texts; spares JSON without OpenClaw's label, ids in running text
    Rule(
        lambda c: c.strip_message_ids == "1", "user", False, cut_block_ids, "msg_ids_removed",
        ("message_id", "reply_to_id", "message_sid", "slack message id"),
    ),
    # the time stamp; spares a stamp later in the text, a second stamp, other date forms
    Rule(lambda c: c.strip_timestamps, "user", False, cut_stamp, "ts_removed", (" 202", " 203")),
)  # fmt: skip


class Scrubber:
    """The rules that a configuration switches on, with the user's patterns compiled."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rules = [rule for rule in RULES if rule.on(config)]
        self.patterns = [re.compile(pattern) for pattern in config.strip_regex]

    def apply(self, view: View, report: Report) -> None:
        """Run the table over a view, in place, then put the system text first."""
        report.items = len(view.turns)
        seen_system = False
        for turn in view.all():
            if turn.role not in ("system", "user"):
                continue
            if turn.counts is None:
                turn.counts = self.edit(turn, not seen_system)
            seen_system = seen_system or (turn.role == "system" and bool(turn.slots()))
            for counter, count in turn.counts:
                setattr(report, counter, getattr(report, counter) + count)
            report.items_modified += bool(turn.counts)
        if report.billing_removed:
            drop_empty_first(view)
        if self.config.system_first:
            system_first(view, report)

    def edit(self, turn: Turn, first: bool) -> list[tuple[str, int]]:
        """Edit a turn, in place; what to count. `first`: no other system text stands before this
        one."""
        counts, slots, user = [], turn.slots(), turn.role == "user"
        first = first or user
        for slot in slots:
            before = slot.get()
            text, removed = self.cut(before, turn.role, first)
            if text != before:
                slot.set(text)
            counts += removed
            first = first and user and slot is not slots[-1] and only_lead(before)
        if turn.item is not None and self.config.strip_message_ids == "1" and "role" in turn.item:
            for key in (
                ID_KEYS & turn.item.keys()
            ):  # beside role and content; never in a schema, argument or result
                del turn.item[key]
                turn.changed()
                counts.append(("msg_ids_removed", 1))
        return counts

    def cut(self, text: str, role: str, first: bool) -> tuple[str, list[tuple[str, int]]]:
        """The text after all rules, and what to count."""
        due = [
            rule for rule in self.rules
            if rule.role == role and (first or not rule.first) and any(marker in text for marker in rule.markers)
        ]  # fmt: skip
        spans = lead(text) if due and role == "user" and first else []
        found = [(cut, rule.counter) for rule in due for cut in rule.cuts(text, spans)]
        for cut, _ in sorted(
            found, reverse=True
        ):  # they do not overlap: no line of its own stands inside valid JSON
            text = text[: cut.start] + cut.put + text[cut.end :]
        counts = [(counter, cut.removed) for cut, counter in found]
        for pattern in self.patterns:
            if matches := sum(bool(match.group()) for match in pattern.finditer(text)):
                text = pattern.sub("", text)
                counts.append(("regex_removed", matches))
        return text, counts


def remember(memo: dict[Any, Any], key: Any, value: Any, most: int = 4096) -> None:
    """Keep a result; a full memo starts anew, which costs one slow request."""
    if len(memo) >= most:
        memo.clear()
    memo[key] = value


def drop_empty_first(view: View) -> None:
    """Take out a first system block or message that the billing rule left empty."""
    turn = next(turn for turn in view.all() if turn.role == "system" and turn.slots())
    content, slot = turn.holder.get(turn.key), turn.slots()[0]
    if slot.get():
        return
    if isinstance(content, list) and len(content) > 1:
        kept = [part for part in content if part is not slot.holder and part != ""]
        view.replace(turn, turn.own()).refit(kept)
    elif turn.item is None:
        del turn.holder[turn.key]
        view.head.remove(turn)
    elif len(view.turns) > 1:
        view.turns.remove(turn)


# --- roles: the system text comes first -----------------------------------------------------------


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text.strip()}\n</system-reminder>"


def add_text(view: View, turn: Turn, text: str) -> bool:
    """Append a text to a turn: to its string, or as a part of its own."""
    content = turn.holder.get(turn.key)
    if isinstance(content, str):
        turn.refit(content + "\n\n" + text if content else text)
    elif isinstance(content, list):
        turn.refit([*content, {"type": view.dialect.text, "text": text}])
    else:
        return False
    return True


def system_first(view: View, report: Report) -> None:
    """One system text, at the front.

    Chat templates such as Qwen's refuse a system message anywhere else ("System message must be at
    the beginning"), and a block behind the first user text cannot be shared by the next
    conversation. So leading ones are merged; the first one before any answer moves up to them;
    later ones become a reminder in the user turn before them (else after them), which depends on
    nothing that a later request could change."""
    systems = [turn for turn in view.turns if turn.role == "system"]
    if not systems or (systems == view.turns[:1] and not view.head):
        return  # in order
    if not all(turn.slots() for turn in view.head + systems) or any(
        turn.rest() for turn in systems
    ):
        return  # a system message without text, or with more than text: an unknown shape
    count = view.leading()
    answered = next(
        (i for i, turn in enumerate(view.turns) if turn.role in ("assistant", "tool")),
        len(view.turns),
    )
    hoisted = [turn for turn in view.turns[count:answered] if turn.role == "system"][:1]
    front = view.turns[:count] + hoisted
    turns = [turn for turn in view.turns[count:] if turn not in hoisted]
    report.system_moved += len(front) - (
        count > 0 and not view.head
    )  # a first message stays where it is
    if front and not view.head:
        base, *front = [front[0].own(), *front[1:]]
        if view.dialect.system and not count:
            view.body[view.dialect.system] = base.text()
            view.head.append(Turn("system", view.body, view.dialect.system, None))
        else:
            turns.insert(0, base)
    if front:
        last = (view.head or turns)[0].slots()[-1]
        last.set("\n\n".join([last.get(), *(turn.text() for turn in front)]))
    kept: list[Turn] = []
    for index, turn in enumerate(turns):
        if turn.role != "system" or index == 0:
            kept.append(turn)
            continue
        report.system_moved += 1
        text = reminder(turn.text())
        before, after = kept[-1].own(), turns[index + 1] if index + 1 < len(turns) else None
        if before.item and before.item.get("role") == "user" and add_text(view, before, text):
            kept[-1] = turn_of(before.item)
        elif after is not None and after.role == "user" and after.slots():
            turns[index + 1] = after.own()
            slot = turns[index + 1].slots()[0]
            slot.set(text + "\n\n" + slot.get())
        else:
            kind = {"type": "message"} if turn.item and "type" in turn.item else {}
            kept.append(turn_of({**kind, "role": "user", "content": text}))
    view.turns = kept


def scrub(
    payload: Json, config: Config | None = None, dialect: str | None = None
) -> tuple[Json, Report]:
    """A scrubbed copy of a request body, and what was removed; `payload` itself is not changed.

    `dialect` is chat, responses, messages or completions; without it the body's shape decides. This
    is the stateless half of kvproxy (rules and SYSTEM_FIRST). A body of unknown shape comes back
    equal, with `report.note` set."""
    config, report = config or Config(), Report()
    named = {row.name: row for row in DIALECTS.values()}
    if dialect is not None and dialect not in named:
        raise ValueError(f"dialect={dialect!r}: must be one of {', '.join(named)}")
    try:
        body = copy.deepcopy(payload)
    except RecursionError:
        return payload, Report(note="nested too deeply")
    view = (
        view_of(body, named[dialect] if dialect else guess_dialect(body))
        if isinstance(body, dict)
        else None
    )
    if view is None:
        report.note = "unknown shape"
    elif config.scrub and view.dialect.edited:
        Scrubber(config).apply(view, report)
        view.store()
    return body, report


# ==================================================================================================
# Lift: what varies in the system prompt moves to the newest user turn, so that every conversation
# shares its front
# ==================================================================================================


class Lift(NamedTuple):
    """A shape that a client writes into its system prompt, at the start of a line, and what it must
    not match."""

    client: str
    markers: tuple[str, ...]  # one must be in the text before the pattern is tried
    pattern: re.Pattern[str]
    spares: str

    def find(self, text: str) -> list[re.Match[str]]:
        if not any(marker in text for marker in self.markers):
            return []
        return [match for match in self.pattern.finditer(text) if match.group().strip()]


_DATE = r"(?:\d{4}-\d\d-\d\d|[A-Z][a-z]{2,8},? [A-Z][a-z]{2,8} \d{1,2},? \d{4}|[A-Z][a-z]{2,8} \d{1,2},? \d{4})"
_COMMITS = r"(?:[0-9a-f]{7,40} [^\n]*(?:\n|\Z))+"


def _lift(client: str, markers: str, pattern: str, spares: str) -> Lift:
    return Lift(client, tuple(markers.split("|")), re.compile(pattern, re.MULTILINE), spares)


LIFTS = (
    _lift("OpenClaw", "Current date: ", rf"^Current date: {_DATE}(?:\n|\Z)", "`Current date` inside a sentence"),
    _lift("OpenClaw 6.11-8.1", "sessionId=", r"^Runtime: agent=[^\n]* \| sessionId=[0-9a-f-]{36}[^\n]*(?:\n|\Z)",
          "the runtime line without a session id, which is stable"),
    _lift("OpenClaw 9.6", "sessions_list",
          r"^## \w+ Sessions\n[^\n]*\bsessions_list\b[^\n]*\n(?:- agent:[^\n]*(?:\n|\Z))+",
          "the same words without a list of sessions"),
    _lift("Claude Code to 2.1.2xx", "gitStatus: ",
          rf"^gitStatus: [^\n]*(?:\n|\Z)(?:\n|(?:Current branch: |Main branch |Git user: )[^\n]*(?:\n|\Z))*"
          rf"(?:Status:\n(?:[^\n<][^\n]*(?:\n|\Z))*\n?)?(?:Recent commits:\n{_COMMITS})?",
          "`# gitStatus` in a user reminder, git advice in tool descriptions"),
    _lift("Claude Code, Vibe, Home Assistant", "oday's date is ",
          rf"^(?:Current time is [\d:]{{4,8}}(?: ?[AP]M)?\. )?"
          rf"Today's date is {_DATE}\.?(?: \([A-Z][a-z]+\)\.?)?[ ]*(?:\n|\Z)",
          "`The date has changed. Today's date is now ...`, which is part of the story"),
    _lift("opencode, Kilo, Continue", "Today's date: ", rf"^[ \t]*Today's date: {_DATE}[ \t]*(?:\n|\Z)",
          "`Today's date:` without a date behind it"),
    _lift("Qwen Code", "git: ", r"^git: (?:Current branch|Status|Recent commits)[^\n]*\n(?:git: [^\n]*(?:\n|\Z))*",
          "`git:` in running text or advice on commands"),
    _lift("Continue", '="gitStatus">', r'^<context \w+="gitStatus">(?:(?!</?context)[\s\S])*</context>[ ]*(?:\n|\Z)',
          "other <context> blocks: rules and project files are stable"),
    _lift("Vibe, hermes", "Recent commits:",
          rf"^(?:Current branch: [^\n]*\n\n?)?(?:Main branch [^\n]*\n\n?)?"
          rf"(?:(?:Git )?[Ss]tatus: ?[^\n]*\n(?:[ MADRCU?!]{{1,2}} [^\n]+\n)*\n?)?Recent commits:\n{_COMMITS}",
          "`Recent commits` without commit lines"),
    _lift("hermes", "Conversation started: ", rf"^Conversation started: {_DATE}[^\n]*(?:\n|\Z)",
          "`Conversation started` without a date"),
    _lift("OpenHands, AnythingLLM, goose", "<CURRENT_DATETIME>|<current-time>|<current_datetime>|<current_time>",
          r"^<(?P<tag>CURRENT_DATETIME|current-time|current_datetime|current_time)>[^<]{0,200}</(?P=tag)>[ ]*(?:\n|\Z)",
          "the tag in the middle of a line"),
    _lift("Copilot CLI", "Session ", r"^Session \w+: [^\n]*/[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}[ ]*(?:\n|\Z)",
          "paths without a session's uuid: working directories are stable"),
    _lift("Open WebUI, AnythingLLM, Home Assistant, goose", "urrent ",
          rf"^(?:The )?[Cc]urrent (?:date|time|date and time|datetime)(?: is|:) (?:{_DATE}|[\d:]{{4,8}})"
          r"(?:(?!, [a-z]| [a-z]+ [a-z])[^\n]){0,40}(?:\n|\Z)",
          "a longer sentence that only mentions the current date"),
)  # fmt: skip


Lifted = tuple[Lift, str]  # a text taken out of the system prompt, behind the row that found it


def lift_text(text: str, rows: Iterable[Lift]) -> tuple[str, list[Lifted]]:
    """A system text without its volatile parts, and those parts."""
    found: list[Lifted] = []
    for row in rows:
        matches = row.find(text)
        found += [(row, match.group().strip()) for match in matches]
        for match in reversed(matches):
            text = text[: match.start()] + text[match.end() :]
    return text, found


def lift(view: View, replay: Replay) -> list[Lifted]:
    """Cut volatile texts out of the system prompt, in place, and return them; unless nobody speaks,
    and so there is no turn to set them down in."""
    found: list[Lifted] = []
    if replay.rows and any(replay.speaks(turn) for turn in view.turns):
        for turn in view.system():
            cut = [replay.lift_text(slot.get()) for slot in turn.slots()]
            if any(pieces for _, pieces in cut):
                turn = view.replace(turn, turn.own())
                for slot, (text, pieces) in zip(turn.slots(), cut, strict=True):
                    slot.set(text)
                    found += pieces
    return found


# ==================================================================================================
# Replay: history is sent again as it was sent
# ==================================================================================================

# A request becomes units: a turn, and the carriers behind it (messages that are decoration only). A
# unit's key is a hash of all that was said up to it, without decorations; under it stand the
# versions in which the unit was forwarded. The steps of Replay.apply(), in order: tools, history
# (which versions are this conversation's), restore (put them in place), drop_repeated (carriers
# that say nothing new), set_down (lifted text), learn (remember what is new).

# The kinds of decoration that carriers are made of. Of the others alone there is none: a person may
# have typed them.
CARRIED = frozenset(("block", "context", "event", "runtime", "internal", "reminder", "environment"))
Decoration = tuple[str, str]  # kind, text


def undress(text: str) -> tuple[list[Decoration], str]:
    """The decorations at both ends of a user text, and what stands between them."""
    matches = lead(text)
    found = [(str(match.lastgroup), match.group().strip()) for match in matches]
    text = text[matches[-1].end() if matches else 0 :].rstrip()
    while text:
        kind, opening, _ = next(row for row in TAILS if text.endswith(row[2]))
        at = text.rfind(opening) + (kind == "line")
        if at < 1 or text[at - 1] != "\n" or (kind == "line" and not TAIL_LINE.match(text, at)):
            break
        found.append((kind, text[at:]))
        text = text[:at].rstrip()
    return found, text


def decorations(turn: Turn) -> list[Decoration]:
    """The decorations in a user turn."""
    return [piece for slot in turn.slots() for piece in undress(slot.get())[0]]


def carried(turn: Turn) -> Decoration:
    """A carrier as one decoration."""
    return next(iter(decorations(turn)), ("",))[0], turn.text().strip()


def digest(*parts: str | bytes) -> bytes:
    """A short hash of some texts, the same in every process."""
    data = [
        part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts
    ]
    return hashlib.blake2b(b"\0".join(data), digest_size=12).digest()


class Unit:
    """A turn, what it says, its key in the chain, and the carriers behind it. The first one stands
    for the head."""

    __slots__ = ("carriers", "changed", "key", "said", "turn", "version")

    def __init__(self, turn: Turn, said: str, key: int) -> None:
        self.turn, self.said, self.key = turn, said, key
        self.carriers: list[Turn] = []
        self.version: Version | None = None  # as it was forwarded before
        self.changed = False  # by us: text was set down in it, or a carrier dropped


@dataclasses.dataclass(slots=True, eq=False)
class Version:
    """A unit as it was forwarded once. `own` is its turn (None: as it comes), `parent` the serial
    of the version before.

    `answers` tell conversations apart that say the same: the key of an answer that a client went on
    from, or how one began that nobody went on from yet ('' while that is not known). `now` has
    hashes: of a decoration that the client rewrote in history, and of what was set down for it
    last."""

    own: Turn | None
    carriers: list[Turn]
    parent: int
    serial: int
    answers: list[int | str] = dataclasses.field(default_factory=list)
    now: dict[int, int] = dataclasses.field(default_factory=dict)

    def form(self) -> tuple[int, Json | None, list[Json | None]]:
        return (
            self.parent,
            self.own.item if self.own else None,
            [turn.item for turn in self.carriers],
        )

    def size(self) -> int:
        """Bytes, roughly."""
        return 1200 + 3 * sum(len(turn.json()) for turn in [self.own, *self.carriers] if turn)

    def expect(self, answer: int | str) -> None:
        """Wait for an answer; of keys and of beginnings the last eight are kept."""
        alike = [one for one in self.answers if isinstance(one, type(answer))]
        if len(alike) > 7:
            self.answers.remove(alike[0])
        self.answers.append(answer)

    def goes_on(self, answer: Unit, strict: bool) -> bool | None:
        """Whether a conversation that went on with `answer` may be this version's; None when that
        cannot be told."""
        if answer.key in self.answers:
            return True
        found = [agrees(hint, answer.said) for hint in self.answers if isinstance(hint, str)]
        return True if True in found else None if None in found or (found and not strict) else False

    def claim(self, answer: Unit) -> bool:
        """Note an answer that a client went on from. True if it is what the server was heard to
        say."""
        known, likely, foreseen = answer.key in self.answers, "", False
        hints = [hint for hint in self.answers if isinstance(hint, str)]
        if hints:
            likely = min(
                hints, key=lambda hint: (True, None, False).index(agrees(hint, answer.said))
            )
            foreseen = bool(agrees(likely, answer.said))
            if foreseen or not known:
                self.answers.remove(likely)
        if not known:
            self.expect(answer.key)
        return foreseen and len(likely) > 8


class Store:
    """What is remembered, bounded, least recently used out first. Use it under `lock`.

    Versions by a unit's key, tools as JSON by name, and orders of tools.
    """

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self.limit, self.size = limit, 0  # bytes
        self.entries: collections.OrderedDict[int | bytes, tuple[Any, int]] = (
            collections.OrderedDict()
        )

    def get(self, key: int | bytes) -> Any:
        """What was put there, or None. It is used now."""
        if key not in self.entries:
            return None
        self.entries.move_to_end(key)
        return self.entries[key][0]

    def put(self, key: int | bytes, value: Any, size: int) -> None:
        """Forgetting costs one miss; what takes more than half of the room is not worth all the
        others."""
        self.size -= self.entries.pop(key, (None, 0))[1]
        if size <= self.limit >> 1:
            self.entries[key] = value, size
            self.size += size
        while self.size > self.limit:
            self.size -= self.entries.popitem(last=False)[1][1]


@dataclasses.dataclass
class Trace:
    """Where a request stands among conversations: for explain, and to note the answer when it
    comes."""

    conversation: str = ""
    newest: list[Version] = dataclasses.field(default_factory=list)


class Replay:
    """Restores what a client took out of, or rewrote in, its history. One per Proxy; safe to use
    from many threads."""

    def __init__(self, config: Config) -> None:
        self.store = Store(config.replay_mb << 20)
        self.serials = itertools.count(1)
        self.patterns = [re.compile(pattern) for pattern in config.replay_regex]
        own = tuple(
            Lift("yours", ("",), re.compile(pattern, re.MULTILINE), "")
            for pattern in config.lift_regex
        )
        self.rows = LIFTS + own if config.lift else ()
        self.lifts: dict[str, tuple[str, list[Lifted]]] = {}
        self.echoes: dict[
            int, None
        ] = {}  # heads of conversations whose clients send answers back as they were

    def lift_text(self, text: str) -> tuple[str, list[Lifted]]:
        """lift_text() with a memory: conversations share their system prompts."""
        known = self.lifts.get(text)
        if known is None:
            known = lift_text(text, self.rows)
            if len(text) <= self.store.limit >> 9:
                remember(self.lifts, text, known, 16)
        return known

    # --- what turns say: units and their keys -----------------------------------------------------

    def mask(self, text: str) -> str:
        """A user text without the decorations that clients add to the newest turn and take from
        history."""
        text = undress(text)[1]
        for pattern in self.patterns:
            text = pattern.sub("", text)
        return text.strip()

    def said(self, turn: Turn) -> str | None:
        """What a turn says without decorations; None when it is a carrier, which says nothing
        else."""
        if turn.role != "user":
            return turn.text().strip() + turn.rest()
        said = (
            "\n".join(filter(None, [self.mask(slot.get()) for slot in turn.slots()])) + turn.rest()
        )
        plain = turn.text().strip()
        if not said and plain and turn.item is not None:
            kinds = {kind for kind, _ in decorations(turn)}
            if kinds & CARRIED or not kinds:  # not kinds: a user's pattern matched
                return None
        return said or plain

    def link(self, turn: Turn) -> tuple[str | None, int]:
        """said(), and what the turn adds to the chain of keys; both remembered with the turn."""
        if turn.mark is None:
            said = self.said(turn)
            # Results of tools in a user message, too, which come with a reminder or without.
            user = turn.item is not None and turn.item.get("role") == "user"
            turn.mark = said, hash(("user" if user else turn.role, said))
        return turn.mark

    def speaks(self, turn: Turn) -> bool:
        """Whether a person speaks in a turn: it is no carrier, and has more than results of
        tools."""
        content = turn.holder.get(turn.key)
        if turn.role != "user" or not isinstance(content, (str, list)):
            return False
        if any(
            isinstance(part, dict) and part.get("type") == "tool_result" for part in listed(content)
        ):
            return any(self.mask(slot.get()) for slot in turn.slots())
        return bool(self.link(turn)[0])

    def units(self, view: View) -> list[Unit]:
        """The head, and the turns behind the system prompt, as units with chained keys."""
        for (
            turn
        ) in view.system():  # not by hash(): a conversation's name is the same in every process
            if turn.mark is None:
                turn.mark = None, int.from_bytes(digest(turn.text()), "big")
        key = int.from_bytes(
            digest(view.dialect.name, *(str(turn.mark) for turn in view.system())), "big"
        )
        units = [Unit(Turn("head", {}, "", None), "", key)]
        for turn in view.turns[view.leading() :]:
            if turn.role == "reasoning":  # clients drop reasoning at will: the chain passes it by
                units.append(Unit(turn, "", hash((key, turn.role))))
                continue
            said, link = turn.mark or self.link(turn)
            if said is None:
                units[-1].carriers.append(turn)
            else:
                key = hash((key, link))
                units.append(Unit(turn, said, key))
        return units

    def conversation(self, view: View, units: list[Unit] | None = None) -> str:
        """A hash of what a conversation's requests have in common: the system prompt and the first
        user text, masked."""
        units = units or self.units(view)
        first = next((unit.said for unit in units if unit.turn.role == "user"), "")
        return digest(str(units[0].key), first).hex()

    # --- a request --------------------------------------------------------------------------------

    def apply(self, view: View, lifted: list[Lifted], report: Report, learn: bool = True) -> Trace:
        """Replace history with what was sent, drop carriers that are there already, set lifted text
        down. In place.

        `learn` is False for requests that only count tokens.
        """
        units = self.units(view)
        trace = Trace(self.conversation(view, units))
        last = next(
            (i for i in range(len(units) - 1, 0, -1) if units[i].turn.role == "assistant"), 0
        )
        with self.store.lock:
            self.tools(view, trace.conversation, last > 0, report, learn)
            self.history(units, last, learn)
            moved = restore(units, report)
            drop_repeated(units, last, report)
            moved = self.set_down(view, units, last, lifted, moved, report)
            view.turns = view.turns[: view.leading()] + flat(units)
            if learn:
                trace.newest = self.learn(units, last)
                for one in moved:
                    one.note()
        return trace

    def history(self, units: list[Unit], last: int, learn: bool) -> None:
        """Find the stored version of each unit of history (those before the last answer), where one
        is beyond doubt.

        The last one that is known is told by the answer behind it; those before it are its parents,
        and no others."""
        if not any(unit.key in self.store.entries for unit in units[:last]):
            return  # the usual case with clients that rewrite nothing
        later: Version | None = None  # the nearest known one behind the unit
        answer: Unit | None = None  # the assistant turn right behind the unit
        newest = True  # the unit was the newest one in the last request, if that went through here
        for index in range(last - 1, -1, -1):
            unit, behind = units[index], units[index + 1].turn.role
            if behind == "assistant":
                answer = units[index + 1]
            elif behind in ("user", "tool", "system"):
                answer, newest = None, False
            known: list[Version] = self.store.get(unit.key) or []
            if later is not None:
                unit.version = next(
                    (version for version in known if version.serial == later.parent), None
                )
            elif answer is not None:
                unit.version = pick(known, answer, units[0].key in self.echoes, not newest)
            if unit.version is not None:
                later = unit.version
                known.remove(later)
                known.append(later)  # the most recently used
                if learn and answer is not None and later.claim(answer):
                    remember(self.echoes, units[0].key, None)

    def set_down(
        self,
        view: View,
        units: list[Unit],
        last: int,
        lifted: list[Lifted],
        moved: list[Moved],
        report: Report,
    ) -> list[Moved]:
        """Put lifted text, and decorations that the client rewrote in history, in front of the
        newest user text, unless the conversation's newest of their kind is equal. Returns the
        decorations that are there now.

        In a tool loop that text is history: what changed waits for the next user turn, unless
        nothing is known yet."""
        report.lifted += len(lifted)
        taker = next((i for i in range(len(units) - 1, -1, -1) if self.speaks(units[i].turn)), 0)
        waits = taker < last and any(unit.version for unit in units)
        if not taker or waits or not (lifted or moved):
            return []
        texts = texts_of([turn for turn in flat(units) if turn.role == "user"])
        due = []
        for row in dict.fromkeys(row for row, _ in lifted):
            pieces = [text for one, text in lifted if one is row]
            standing = next((hits for text in reversed(texts) if (hits := row.find(text))), [])
            if not {match.group().strip() for match in standing}.issuperset(pieces):
                due += pieces
        moved = [one for one in moved if one.due(texts)]
        report.lifted += len(moved)
        if due or moved:
            turn = units[taker].turn = units[taker].turn.own()
            units[taker].changed = True
            text = "\n\n".join(
                ([reminder("\n\n".join(due))] if due else []) + [one.now for one in moved]
            )
            slots = turn.slots()
            if slots:
                slot = next((slot for slot in reversed(slots) if self.mask(slot.get())), slots[0])
                slot.set(text + "\n\n" + slot.get())
            else:
                turn.refit([{"type": view.dialect.text, "text": text}, *turn.holder[turn.key]])
        return moved

    def learn(self, units: list[Unit], last: int) -> list[Version]:
        """Remember the units after the last answer, and one that was dressed before it, as they are
        forwarded now; but of tool results only those that have or had carriers, and the last one,
        whose answer tells the conversation."""
        parent = 0
        newest: list[Version] = []  # the one that the answer will tell
        for index, unit in enumerate(units):
            turn = unit.turn
            ends = turn.role == "user" or (
                index == len(units) - 1 and turn.role not in ("head", "reasoning")
            )
            if (index >= last and (ends or unit.carriers)) or unit.changed:
                dressed = turn.role == "user" and turn.text().strip() + turn.rest() != unit.said
                carriers = [stored(carrier) for carrier in unit.carriers]
                version = Version(
                    stored(turn) if dressed else None, carriers, parent, next(self.serials)
                )
                known: list[Version] = self.store.get(unit.key) or []
                same = next((one for one in known if one.form() == version.form()), None)
                if same is None:
                    known = [*known[-63:], version]
                    while (
                        size := sum(one.size() for one in known)
                    ) > self.store.limit >> 1 and len(known) > 1:
                        del known[0]
                    self.store.put(unit.key, known, size)
                unit.version = same or version
                if index < last:
                    unit.version.claim(
                        next(one for one in units[index:] if one.turn.role == "assistant")
                    )
            if unit.version is not None:
                parent, newest = unit.version.serial, [unit.version]
        for version in newest:
            version.expect("")
        return newest

    def answered(self, trace: Trace, hint: str | None) -> None:
        """Note how the answer to a request began ('': unknown; None: there was none), so that its
        turn can be told from others with the same words."""
        with self.store.lock:
            for version in trace.newest if hint != "" else ():
                if "" in version.answers:
                    at = version.answers.index("")
                    version.answers[at : at + 1] = [hint[:HINT]] if hint else []

    # --- tools: first-seen form, first-seen order -------------------------------------------------

    def tools(
        self, view: View, conversation: str, follows: bool, report: Report, learn: bool
    ) -> None:
        """Send a tool that differs from an earlier one in key order only as it was sent then, and
        keep the order.

        `follows`: the conversation has an answer already, so that tools that are new to it go to
        the end."""
        tools, store = view.body.get("tools"), self.store
        if (
            not isinstance(tools, list)
            or not tools
            or not all(isinstance(tool, dict) for tool in tools)
        ):
            return
        try:
            listing = hash(
                marshal.dumps(tools, 0)
            )  # the fastest spelling that shows the order of keys
        except ValueError:
            raise Unreadable("nested too deeply") from None
        talk = digest(b"talk", conversation)
        wanted, *order = store.get(listing) or [b""]  # of a list that needed no change
        if order:
            for key in (wanted, *order):
                store.get(key)  # they are in use
        else:
            names = [digest(_sorted_json(bare(tool))) for tool in tools]
            if len(set(names)) != len(names):
                return
            forms = [json.dumps(bare(tool)) for tool in tools]
            first = {name: store.get(name) or form for name, form in zip(names, forms, strict=True)}
            wanted = digest(b"set", *sorted(names))
            order = store.get(wanted) or []
            if not order:
                before = (store.get(talk) if follows else None) or []
                added = [name for name in names if name not in before]
                order = before + added if set(before) <= set(names) else names
            if order != names or list(first.values()) != forms:
                view.body["tools"] = [json.loads(first[name]) for name in order]
                report.tools_restored += 1
            elif learn:
                store.put(listing, [wanted, *order], 200 + 40 * len(order))
            if learn:
                for name, form in first.items():
                    if store.get(name) is None:
                        store.put(name, form, 300 + len(form))
                store.put(wanted, order, 200 + 40 * len(order))
        if learn:
            store.put(talk, order, 200 + 40 * len(order))


def flat(units: list[Unit]) -> list[Turn]:
    """The units' turns in order, without the head, which is none."""
    return [turn for unit in units for turn in (unit.turn, *unit.carriers)][1:]


def texts_of(turns: list[Turn]) -> list[str]:
    return [slot.get() for turn in turns for slot in turn.slots()]


class Moved(NamedTuple):
    """A decoration in history that reads `now` what the stored version has as `before` ('': not at
    all)."""

    version: Version
    before: str
    now: str

    def due(self, texts: list[str]) -> bool:
        """Whether the conversation's user `texts` say something else, so that it has to be set down
        again."""
        if self.before and self.version.now.get(hash(self.before), hash(self.before)) != hash(
            self.now
        ):
            return True
        return self.before != self.now and not any(self.now in text for text in texts)

    def note(self) -> None:
        if self.before:
            remember(self.version.now, hash(self.before), hash(self.now), 8)


def restore(units: list[Unit], report: Report) -> list[Moved]:
    """Put the stored form of each known unit in its place; returns what the client has rewritten
    there since."""
    moved: list[Moved] = []
    standing = {
        turn.text().strip() for unit in units if unit.version for turn in unit.version.carriers
    }
    for unit in units:
        version = unit.version
        if version is None:
            continue
        own = version.own or unit.turn
        now = decorations(unit.turn) if version.own else []
        was = decorations(own) if now else []
        if any(piece[0] == "event" and piece not in was for piece in now):
            continue  # it tells something new
        if unit.carriers:
            was += [carried(turn) for turn in version.carriers]
            now += [carried(turn) for turn in unit.carriers]
        found = rewritten(version, was, now)
        moved += found
        gone = {one.now for one in found if one.before}
        more = [
            turn
            for turn in unit.carriers
            if turn.text().strip() not in standing and turn.text().strip() not in gone
        ]
        carriers = version.carriers + more
        if texts_of([own, *carriers]) != texts_of([unit.turn, *unit.carriers]):
            unit.turn, unit.carriers = own, carriers
            report.replayed += 1
    return moved


def rewritten(version: Version, was: list[Decoration], now: list[Decoration]) -> list[Moved]:
    """Reminders and environment blocks, each with the one of its kind in the stored version that it
    has the most in common with."""
    gone = [piece for piece in was if piece not in now]
    found = []
    for kind, text in now:
        if kind in ("reminder", "environment"):
            before = text
            if (kind, text) not in was:
                alike = [old for of, old in gone if of == kind]
                before = max(alike, key=lambda old: common_prefix(text, old), default="")
                gone = [piece for piece in gone if piece[1] != before]
            found.append(Moved(version, before, text))
    return found


def drop_repeated(units: list[Unit], last: int, report: Report) -> None:
    """Take out a carrier after the last answer that says what the newest one of its kind before it
    said.

    A request may not end with the answer itself, which would ask the model to continue it: then
    carriers stay."""
    newest: dict[str, str] = {}
    for index, unit in enumerate(units):
        if not unit.carriers:
            continue
        kept = []
        for carrier in unit.carriers:
            kind, text = carried(carrier)
            if kind in ("event", "runtime", ""):  # of which there are several
                kind = text[:48] if kind == "runtime" else text.split("\n", 1)[0]
            if 0 < last <= index and len(units) > last + 1 and newest.get(kind) == text:
                report.dropped += 1
                unit.changed = True
            else:
                newest[kind] = text
                kept.append(carrier)
        unit.carriers = kept


def pick(known: list[Version], answer: Unit, strict: bool, sure: bool) -> Version | None:
    """Which of several versions of a turn belongs to a conversation that went on with `answer`;
    None when in doubt.

    `strict`: this client sends answers back as the server gave them, so one that does not agree is
    another conversation's. `sure`: only one that does agree will do."""
    found = [(version, version.goes_on(answer, strict)) for version in known]
    likely = [version for version, yes in found if yes]
    maybe = [version for version, yes in found if yes is None]
    if (
        likely
    ):  # another one, whose answer is not known yet, may have been answered in the same words
        likely += [version for version in maybe if "" in version.answers]
    elif not sure:
        likely = maybe
    return likely[0] if len(likely) == 1 else None


HINT = 120  # characters of an answer that are kept to know it again


def agrees(hint: str, answer: str) -> bool | None:
    """Whether an assistant turn is the answer that began with `hint` (its words, or the id of its
    first tool call); None when that cannot be told: clients cut, trim and mark answers."""
    words = answer.partition(PIECE)[0]
    if hint and (
        words == hint
        or PIECE + hint + PIECE in answer + PIECE
        or len(hint) > 31
        and words.startswith(hint)
    ):
        return True
    a, b = ("".join(filter(str.isalnum, text[:2000])) for text in (hint, words))
    return (
        None
        if not a or not b or hint[0] == "<" or b[:16] in a or a[:16] in b or a[-16:] in b
        else False
    )


def stored(turn: Turn) -> Turn:
    """A turn as it is kept for replay: without cache_control, which moves from turn to turn and may
    not pile up."""
    item = bare(turn.item or {"role": "user", "content": turn.text()})
    if isinstance(content := item.get("content"), list):
        item["content"] = [bare(part) if isinstance(part, dict) else part for part in content]
    return turn_of(item)


# ==================================================================================================
# Explain: how much of a prompt was reused, and why not more
# ==================================================================================================


@dataclasses.dataclass
class Usage:
    """What the server reported of one answer; None where it did not (never 0 for unknown). Tokens,
    milliseconds."""

    prompt: int | None = None
    cached: int | None = None
    prompt_ms: float | None = None
    output: int | None = None

    def read(self) -> int | None:
        """Prompt tokens that the server had to read."""
        return (
            self.prompt - self.cached
            if self.prompt is not None and self.cached is not None
            else None
        )


USAGE_KEYS = {  # what a server calls a number: in `usage`, its details, `timings` or beside them -> what it is
    **dict.fromkeys(("prompt_tokens", "tokens_evaluated"), "prompt"),
    **dict.fromkeys(("cached_tokens", "prompt_cache_hit_tokens"), "cached"),
    **dict.fromkeys(("completion_tokens", "output_tokens", "predicted_n"), "output"),
    "input_tokens": "input",  # in /v1/messages only what was not cached
    "cache_read_input_tokens": "cache_read",
    "cache_creation_input_tokens": "cache_write",
    **{
        name: name for name in ("cache_n", "prompt_n", "prompt_ms")
    },  # llama.cpp's result_timings::to_json
}
# A quoted key followed by a colon cannot stand inside a JSON string, so the search needs no parse
# of the whole.
NUMBERS = [
    re.compile(rf'"({key})"\s*:\s*(?=[{{\d])') for key in ("usage", "timings", "tokens_evaluated")
]
BRACKETS = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]'
)  # and strings, whose brackets do not count
value_at = json.JSONDecoder().raw_decode


def usage_of(*windows: bytes) -> Usage:
    """The cache numbers in an answer (SSE or JSON; llama-server, LM Studio and others).

    The last window reaches to the end of the answer; of one before it, its start, only whole SSE
    lines count."""
    found: dict[str, float] = {}
    windows = tuple(window for window in windows if window)
    for window in windows:
        text = window.decode("latin-1")  # all that matters is ASCII
        streamed = text.startswith("data:") or "\ndata:" in text
        for pattern in NUMBERS:
            matches = list(pattern.finditer(text))
            for match in (
                matches[:4] + matches[4:][-8:]
            ):  # servers that report in every event report running totals
                end = text.find("\n", match.end()) if streamed else -1
                if end < 0 and window is not windows[-1]:
                    continue  # cut off
                with contextlib.suppress(ValueError, RecursionError):
                    value, rest = value_at(text, match.end())
                    if outermost(BRACKETS.findall(text, rest, end if end >= 0 else len(text))):
                        read_numbers(found, {match[1]: value})
    return settled(found)


def outermost(rest: list[str]) -> bool:
    """Whether what stands before these brackets is a member of an answer, or of the one object in
    an event: in a list, or deeper, the model wrote it (a tool call's input is no string in
    /v1/messages)."""
    opened = closed = 0
    for token in rest:
        if token in ("{", "["):
            opened += 1
        elif token in ("}", "]") and opened:
            opened -= 1
        elif token == "]":
            return False
        elif token == "}":
            closed += 1
    return closed in (1, 2)


def read_numbers(found: dict[str, float], numbers: Json) -> None:
    """Enter the numbers of a usage or timings object, and of those in it, into `found`."""
    for key, number in numbers.items():
        if (
            key in USAGE_KEYS and type(number) in (int, float) and 0 <= number < 1e15
        ):  # no bool, NaN or infinity
            found[USAGE_KEYS[key]] = number
        elif isinstance(number, dict):
            read_numbers(found, number)


def settled(found: dict[str, float]) -> Usage:
    """What follows from the numbers that were found; what does not stays None."""
    prompt, cached = found.get("prompt"), found.get("cached")
    if "input" in found:
        prompt = found["input"] + found.get("cache_read", 0) + found.get("cache_write", 0)
        cached = found.get("cache_read", cached)
    if "prompt_n" in found:
        if "cache_n" in found:
            prompt, cached = found["prompt_n"] + found["cache_n"], found["cache_n"]
        elif cached is None and prompt is not None and prompt >= found["prompt_n"]:
            cached = (
                prompt - found["prompt_n"]
            )  # before cache_n: prompt_n was already what had to be read
    if cached is not None and prompt is not None:
        cached = min(cached, prompt)
    prompt, cached, output = (
        None if number is None else int(number) for number in (prompt, cached, found.get("output"))
    )
    return Usage(prompt, cached, found.get("prompt_ms"), output)


_PLAIN = (None, "text", "text_delta", "output_text")
HINT_KEYS = {  # what leads to the words and calls of an answer -> types of objects in which it is a string of words
    **dict.fromkeys(("tool_calls", "content_block", "item", "choices", "message", "output"), ()),
    "delta": ("response.output_text.delta",),
    "content": _PLAIN,
    "text": _PLAIN,
}


def hint_of(window: bytes) -> str:
    """How an answer begins: its first words, or the id of its first tool call; '' when the bytes do
    not tell."""
    words = ""
    with contextlib.suppress(ValueError, RecursionError):
        for text in [line[5:] for line in window.split(b"\n") if line.startswith(b"data:")] or [
            window
        ]:
            for piece, call in hint_parts(json.loads(text)):
                if call and not words.strip():
                    return call
                words += piece
            if len(words) > 200:  # more are not compared
                break
    return words.strip()[:400]


def hint_parts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(text, tool call id) pieces in an answer, streamed or whole, in any dialect; `key` is what
    leads to `value`."""
    for part in listed(value):
        yield from hint_parts(part, key)
    if not isinstance(value, dict):
        return
    kind = value.get("type")
    if kind in ("tool_use", "function_call") or key == "tool_calls":
        yield "", str(value.get("call_id") or value.get("id") or "")
    elif not str(kind).endswith(".done"):  # such an event says again what has been said
        for name in [name for name in HINT_KEYS if name in value]:
            part = value[name]
            if not isinstance(part, str):
                yield from hint_parts(part, name)
            elif kind in HINT_KEYS[name]:
                yield part, ""


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class Segment(NamedTuple):
    """A piece of a prompt as the server reads it: `where` names it for people."""

    where: str
    text: str


BASE64 = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{2048,}={0,2}")


def segments_of(view: View) -> list[Segment]:
    """The prompt in the order system, tools, turns; without reasoning, which clients and chat
    templates drop at will."""
    found = [Segment("system", turn.text()) for turn in view.system()]
    for tool in listed(view.body.get("tools")):
        found.append(
            Segment(
                f"tool {tool_name(tool)}",
                json.dumps(bare(tool) if isinstance(tool, dict) else tool),
            )
        )
    turns = [turn for turn in view.turns[view.leading() :] if turn.role != "reasoning"]
    for number, turn in enumerate(turns, 1):
        role = "prompt" if view.dialect.turns == "prompt" else turn.role
        if turn.told is None:
            turn.told = said(turn)
        found.append(Segment(f"turn {number} ({role})", turn.told))
    return found


def said(turn: Turn) -> str:
    """All that the server reads of a turn: texts, and its calls, results and images as JSON."""
    content, item = turn.holder.get(turn.key), turn.item or {}
    rest: list[Any] = [] if isinstance(content, (str, list)) else [content]
    rest += [
        part
        for part in listed(content)
        if isinstance(part, dict) and part.get("type") not in _UNSAID_PARTS
    ]
    rest += [
        item.get(key)
        for key in ("name", "arguments", "input", "tool_calls", "call_id", "tool_call_id")
    ]
    return "\n".join(
        filter(None, [turn.text(), *(spelled(part) for part in rest if part is not None)])
    )


def spelled(value: Any) -> str:
    """A call or result as text. Arguments in any spelling are equal to the server, which parses
    them; an image's bytes stand for few tokens, and are replaced by a hash."""
    if isinstance(value, list):
        return "\n".join(map(spelled, value))
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(json.loads(value)) if value[:1] == "{" else value
        return value
    if isinstance(value, dict):
        value, function = bare(value), members(value.get("function"))
        if isinstance(function.get("arguments"), str):
            value["function"] = {**function, "arguments": spelled(function["arguments"])}
    text = json.dumps(value)
    return (
        BASE64.sub(lambda match: "#" + digest(match[0]).hex(), text) if len(text) > 2048 else text
    )


def text_size(text: str) -> int:
    """About the bytes that a string takes in memory."""
    return 120 + len(text) * (1 if text.isascii() else 3)


def alike(a: str, b: str) -> bool:
    """Whether two texts are versions of one: half of the longer one is common at the start and the
    end, or in lines."""
    prefix, wanted = common_prefix(a, b), max(len(a), len(b)) / 2
    if prefix + common_prefix(a[prefix:][::-1], b[prefix:][::-1]) > wanted:
        return True
    lines = collections.Counter(a.splitlines()) & collections.Counter(b.splitlines())
    return sum(len(line) * count for line, count in lines.items()) > wanted


def tool_name(tool: Any) -> str:
    name = (members(members(tool).get("function")) or members(tool)).get("name")
    return (
        re.sub(r"[^!-~]", "?", name[:80]) if isinstance(name, str) else "?"
    )  # it stands in the log


def common_prefix(a: str, b: str) -> int:
    """Length of the common prefix, by halves: comparing slices is faster than comparing
    characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_CLOCK = (
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d[:\d.]*)?|\b\d{1,2}:\d\d[:\d.]*(?: ?[AaPp][Mm])?|\b1[6-9]\d{8}(?:\d{3})?\b"
    rf"|\b{_DAY}\b|\b(?:{_DAY},? )?{_MONTH} \d{{1,2}}(?:,? \d{{4}})?|\b\d{{1,2}}\.? {_MONTH} \d{{4}}"
)
KINDS = (  # what a differing span looks like, most telling first
    ("clock", _CLOCK),
    ("uuid", r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-\w{4}-\w{4}-\w{12}\b"),
    ("path", r"(?:\b[A-Za-z]:|~|\.{1,2})?[\\/][\w.~-]+(?:[\\/][\w.~-]*)+"),
    ("hash", r"\b[0-9a-f]{5,}\b|\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{12,}\b"),
    ("counter", r"\d+(?:[.,]\d+)*"),
)


def kind_of(before: str, after: str, at: int) -> str:
    """What the texts look like where they part: clock, uuid, path, hash, counter, removed, added or
    text."""
    if at >= len(after):
        return "removed"
    if at >= len(before):
        return "added"
    start = max(before.rfind("\n", 0, at) + 1, at - 80)
    for name, pattern in KINDS:
        words = []
        for text in (before, after):
            hits = re.finditer(pattern, text[start : at + 80])
            words.append(
                next((hit.group() for hit in hits if hit.start() <= at - start <= hit.end()), "")
            )
        if all(words) and not (name == "hash" and "".join(words).isdigit()):
            return name
    return "text"


def around(text: str, at: int) -> str:
    """The line, or a piece of it, where two texts part."""
    end = text.find("\n", at + 1)
    return text[
        max(text.rfind("\n", 0, at) + 1, at - 30) : min(end if end >= 0 else len(text), at + 40)
    ]


@dataclasses.dataclass
class Verdict:
    """What became of one prompt. `share` is the part (0 to 1, by characters) that an earlier prompt
    began with."""

    name: str = "cold"
    share: float = 0.0
    where: str = ""
    kind: str = ""
    before: str = ""
    after: str = ""
    advice: str = ""
    side: str = ""
    taken: bool = False  # another conversation sent something since the earlier prompt
    away: bool = False  # the server was away since then

    def line(self) -> str:
        """The second log line, for a prompt that was not reused; '' when there is nothing to
        say."""
        if self.name == "rewritten" and self.kind in ("taken out", "put in"):
            return f"{self.where} was {self.kind}: {self.before or self.after!r}"
        if self.name == "rewritten":
            return f"changed in {self.where}, {self.kind}: {self.before!r} -> {self.after!r}"
        return self.advice if self.name == "lost" else ""


VERDICTS = {
    "cold": "nothing like it was sent before",
    "extended": "begins with an earlier prompt, and the server reused it",
    "rewritten": "the client changed earlier content",
    "lost": "begins with an earlier prompt, but the server had forgotten it",
    "new branch": "shares its beginning with another conversation",
    "not reported": "the server gave no cache numbers",
}

ADVICE = {
    "taken": "another conversation was served in between and took the slot: start llama-server with -np 4 -sps 0.6, or"
    " give it more --cache-ram",
    "away": "the server was away in between (restart or crash): WARMUP_FILE reads the prompts in again after a start",
    "idle": "nothing was sent for {minutes} minutes: the server may unload when idle (--sleep-idle-seconds);"
    " KEEPALIVE_SECONDS prevents that",
    "checkpoint": "the server kept nothing of it: it was restarted, or its host cache is off (--cache-ram 0), or the model"
    " is a hybrid, recurrent or sliding-window one without a checkpoint there (--ctx-checkpoints, --swa-full)",
    "partly": "the server kept only a part of it: a slot's context may be smaller than the conversation (-c, -np), the"
    " last checkpoint may lie further back (--ctx-checkpoints), or the chat template drops old reasoning",
}


class Prompt:
    """A prompt as it was forwarded, segment by segment: names, texts, and `chain`, hashes of all up
    to each of them; `end` is one of all and that nothing follows. `first` is the place of the first
    turn."""

    __slots__ = ("chain", "conversation", "end", "first", "names", "texts", "time")

    def __init__(self, segments: list[Segment], conversation: str, now: float) -> None:
        self.conversation, self.time = conversation, now
        self.names = [segment.where for segment in segments]
        self.texts = [segment.text for segment in segments]
        self.first = next(
            (i for i, name in enumerate(self.names) if name.startswith("turn ")), len(self.names)
        )
        self.chain = list(
            itertools.accumulate(segments, lambda link, segment: hash((link, segment)), initial=0)
        )[1:]
        self.end = hash((*self.chain[-1:], "end"))

    def opening(self) -> str:
        """The first turn's text."""
        return self.texts[self.first] if self.first < len(self.texts) else ""

    def tools(self) -> list[str]:
        return [name[5:] for name in self.names if name.startswith("tool ")]

    def at(self, depth: int, where: str) -> str:
        """The text of a segment, if it is one of that name: a role's marks stand in front of every
        text."""
        return self.texts[depth] if self.names[depth : depth + 1] == [where] else ""

    def shares(self, other: Prompt, depth: int) -> bool:
        """Whether the first `depth` segments are those of another prompt."""
        return not depth or self.chain[depth - 1 : depth] == [other.chain[depth - 1]]


class Ledger:
    """The last prompts, and what they had in common. Equal beginnings are held once; bounded,
    oldest out first."""

    MOST = 2048  # prompts: more conversations than that are not in flight, whatever memory they would fit in

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self.limit, self.size = limit, 0
        self.entries: collections.OrderedDict[int, Prompt] = collections.OrderedDict()
        self.index: dict[
            int, int
        ] = {}  # chain up to a segment, or end -> the newest entry that has it
        self.latest: dict[str, int] = {}  # conversation -> its newest entry
        self.count = 0  # of all prompts judged; the newest entry's number

    def judge(
        self,
        segments: list[Segment],
        conversation: str,
        side: str = "",
        now: float = 0.0,
        lost_at: float = -1.0,
    ) -> Verdict:
        """Compare a prompt with those before it, then remember it. What the server says comes
        later, in settle().

        `lost_at` is when the server was last found away, on the clock of `now`.
        """
        prompt = Prompt(segments, conversation, now)
        with self.lock:
            verdict = self.compare(prompt, side, lost_at)
            self.remember(prompt)
        return verdict

    def compare(self, prompt: Prompt, side: str, lost_at: float) -> Verdict:
        """Find the stored prompt with the longest common prefix, and say where they part and
        why."""
        chain, names, texts = prompt.chain, prompt.names, prompt.texts
        if not self.entries or not chain:
            return Verdict(side=side)
        total = sum(map(len, texts)) or 1
        depth = next((i for i in range(len(chain), 0, -1) if chain[i - 1] in self.index), 0)
        same = sum(map(len, texts[:depth]))
        entry = self.counterpart(prompt, depth)
        newer = itertools.takewhile(
            lambda other: other is not entry, reversed(self.entries.values())
        )
        taken = any(other.conversation != prompt.conversation for other in newer)
        verdict = Verdict(
            "extended", same / total, side=side, taken=taken, away=entry.time < lost_at
        )
        if depth and (depth == len(chain) or hash((chain[depth - 1], "end")) in self.index):
            return verdict
        old, new = entry.at(depth, names[depth]), texts[depth]
        verdict.share = (same + common_prefix(old, new)) / total
        if old and new.startswith(old) and names[depth].endswith("(prompt)"):
            return verdict
        locate_change(verdict, entry, prompt, depth)
        goes_on = any("(assistant)" in name for name in names[max(depth, prompt.first) :])
        if depth < prompt.first:
            ours = goes_on and entry.opening() == prompt.opening()
            rewritten = (
                ours
                or verdict.kind == "tool order"
                or (verdict.kind != "tools changed" and alike(old, new))
            )
        else:
            rewritten = goes_on and (
                depth > prompt.first or entry.conversation == prompt.conversation
            )
        if rewritten and not side:  # a side request has a prompt of its own: no fault
            verdict.name = "rewritten"
        else:
            verdict.name = "cold" if verdict.share < 0.05 else "new branch"
        return verdict

    def counterpart(self, prompt: Prompt, depth: int) -> Prompt:
        """The entry to compare with, of those that have most in common: this conversation's newest,
        else one with the same tools, that opens with the same words, that agrees to the furthest
        line. Only the newest are looked at."""
        own = self.entries.get(self.latest.get(prompt.conversation, 0))
        if own is not None and own.shares(prompt, depth):
            return own
        newest = itertools.islice(reversed(self.entries.values()), 32)
        fitting = [entry for entry in newest if entry.shares(prompt, depth)]
        if depth == len(prompt.chain) or not fitting:
            return self.entries[self.index[prompt.chain[depth - 1]]]
        head, opening, new = prompt.names[: prompt.first], prompt.opening(), prompt.texts[depth]

        def agreement(entry: Prompt) -> tuple[bool, bool, int]:
            prefix = common_prefix(entry.at(depth, prompt.names[depth]), new)
            return (
                entry.names[: prompt.first] == head,
                entry.opening() == opening,
                new.rfind("\n", 0, prefix),
            )

        return max(fitting, key=agreement)

    def remember(self, prompt: Prompt) -> None:
        self.count += 1
        for place, link in enumerate(prompt.chain):
            if link in self.index:
                prompt.texts[place] = self.entries[self.index[link]].texts[
                    place
                ]  # the string that is held already
            else:
                self.size += text_size(prompt.texts[place])
            self.index[link] = self.count
        self.index[prompt.end] = self.latest[prompt.conversation] = self.count
        self.entries[self.count] = prompt
        self.size += 300 * len(prompt.chain)
        while (self.size > self.limit or len(self.entries) > self.MOST) and len(self.entries) > 1:
            self.forget()

    def forget(self) -> None:
        """Drop the oldest entry, and what no newer one has."""
        number, entry = self.entries.popitem(last=False)
        self.size -= 300 * len(entry.chain)
        for place, link in enumerate(entry.chain):
            if self.index[link] == number:
                del self.index[link]
                self.size -= text_size(entry.texts[place])
        if self.index[entry.end] == number:
            del self.index[entry.end]
        if self.latest[entry.conversation] == number:
            del self.latest[entry.conversation]


def locate_change(verdict: Verdict, entry: Prompt, prompt: Prompt, depth: int) -> None:
    """Say where a prompt parts from an earlier one with `depth` segments in common, and what the
    change looks like."""
    name, new = prompt.names[depth], prompt.texts[depth]
    old_name, old = (
        (entry.names[depth], entry.texts[depth]) if depth < len(entry.names) else ("", "")
    )
    was, now = entry.tools(), prompt.tools()
    turns = name.startswith("turn ") and old
    answers = "(assistant)" in name and "(assistant)" not in old_name
    verdict.where = name
    if was != now and "tool " in (name[:5], old_name[:5]):
        verdict.where, verdict.kind = "tools", "tools changed"
        sides = [tool for tool in was if tool not in now], [tool for tool in now if tool not in was]
        if sorted(was) == sorted(now):
            start = len(os.path.commonprefix([was, now]))
            verdict.kind, sides = "tool order", (was[start:], now[start:])
        verdict.before, verdict.after = (", ".join(side[:3])[:80] for side in sides)
    elif turns and (answers or new in entry.texts[depth + 1 : depth + 4]):
        verdict.where, verdict.kind, verdict.before = old_name, "taken out", around(old, 0)
    elif turns and old in prompt.texts[depth + 1 : depth + 4]:
        verdict.kind, verdict.after = "put in", around(new, 0)
    else:
        at = common_prefix(old, new)
        verdict.kind, verdict.before, verdict.after = (
            kind_of(old, new, at),
            around(old, at),
            around(new, at),
        )


def settle(verdict: Verdict, usage: Usage, idle_seconds: float = 0.0) -> None:
    """Weigh what the ledger predicted against what the server says it reused. Changes `verdict`."""
    if usage.cached is None or not usage.prompt:
        if verdict.name == "extended":
            verdict.name = "not reported"
        return
    expected = verdict.share * usage.prompt
    if usage.cached > max(0.9 * usage.prompt, expected + 0.2 * usage.prompt):
        verdict.name = "extended"  # the change did not reach the prompt, or the server had read this one before
    if verdict.side or verdict.name not in ("extended", "new branch") or verdict.share < 0.5:
        return
    if usage.cached < 0.75 * expected and expected - usage.cached >= 64:
        causes = {
            "away": verdict.away,
            "taken": verdict.taken,
            "idle": idle_seconds > 300,
            "checkpoint": usage.cached < 0.05 * usage.prompt,
            "partly": True,
        }
        verdict.name, verdict.kind = "lost", next(cause for cause, fits in causes.items() if fits)
        verdict.advice = ADVICE[verdict.kind].format(minutes=round(idle_seconds / 60))


SIDE_SHAPES = re.compile(  # in the last turn, or in the system prompt of a request that nobody has answered yet
    r"(?P<title>\b(?:generate|write|create|produce|give)\b[^\n]{0,80}\btitle\b|\btitle generator\b)"
    r"|(?P<suggestion>\b(?:suggest|predict)\b[^\n]{0,80}\b(?:next|follow-up)\b)"
    r"|(?P<summary>\bsummar(?:y|ize|ise)\b[^\n]{0,80}\b(?:conversation|session)\b)"
)
SIDE_WORDS = ("title", "suggest", "predict", "summar")  # one must be there before the slow search


def side_of(body: Json, headers: Mapping[str, str], view: View) -> str:
    """The name of a request that a client sends beside the conversation (title, suggestion,
    sub-agent); '' for others.

    Such requests have prompts of their own; that they share little is no fault.
    """
    if headers.get("x-claude-code-agent-id"):
        return "sub-agent"
    if "thread_title" in str(body.get("client_metadata") or ""):
        return "title"
    if body.get("tools"):
        return ""
    if "'title': {" in str(
        body.get("output_config") or body.get("text")
    ):  # a property; every schema may have a title
        return "title"
    turns = view.turns[-1:]
    if not any(turn.role == "assistant" for turn in view.turns):
        turns = view.system()[:1] + turns
    for text in [turn.text()[:2000].lower() for turn in turns]:
        if any(word in text for word in SIDE_WORDS) and (match := SIDE_SHAPES.search(text)):
            return str(match.lastgroup)
    return ""


# ==================================================================================================
# Relay: HTTP on both sides, with http.server and http.client. The only section that touches sockets
# of requests. What the library does right is the library's; each override says what it mends
# ==================================================================================================

HEAD_LIMIT = 65536  # bytes of a request's or response's head
HEADER_LIMIT = 100  # header lines; llama-server has the same limit
CHUNK_LINE_LIMIT = 8192  # bytes of the line that tells a chunk's size
INTERIM_LIMIT = 64  # answers like 100 and 103 before the final one
BUFFER = 8192  # bytes; with the library's own sizes an idle stream takes 75 KB and more
PIECE_BYTES = 65536  # bytes of a body that are passed on at a time
BODY_SECONDS = 60.0  # a request's body may take this long for each MB, and in all at least this
SEND_SECONDS = 300.0  # a client may leave an answer unread this long: then its slot is freed
KEEP_SECONDS = 120.0  # a client's connection may stay open this long between requests
REUSE_SECONDS = 4.0  # llama-server closes a connection after 5 idle seconds
QUIET_SECONDS = 0.02  # the server is silent this long: the model works, there is time to explain
LINGER_SECONDS = 2.0  # a client gets to read an error while it is still sending
DRAIN_SECONDS = 10.0  # streams get this long to end when the proxy stops
TAP_BYTES = 65536  # of an answer's end (and a quarter of its start), kept to read the usage from

# RFC 9110 section 7.6.1; with the names that Connection lists. Authorization is end to end.
HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("proxy-connection", "proxy-authenticate", "proxy-authorization"),
    )
)
WRITTEN_ANEW = HOP_BY_HOP | {"host", "expect", "content-length", "x-kvproxy-conversation"}
CHUNKED_DROPS = HOP_BY_HOP | {"content-length"}

TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
REQUEST_LINE = re.compile(rb"(%s) ([\x21-\x7e\x80-\xff]+) HTTP/(\d)\.(\d)\r?\n" % TOKEN)
STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: ([\t\x20-\x7e\x80-\xff]*))?\r?\n")
FIELD_LINE = re.compile(rb"(%s):([\t\x20-\x7e\x80-\xff]*)\r?\n" % TOKEN)
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\x00]*)?\r\n")
TRAILER_LINE = re.compile(rb"%s:[\t\x20-\x7e\x80-\xff]*\r\n" % TOKEN)
HEAD_END = re.compile(rb"\n\r?\n")
LENGTH = re.compile(r"[0-9]{1,19}")
KEPT_FOR = re.compile(r"timeout=([0-9]{1,6})")
TOKEN_BYTES = re.compile(TOKEN)

Headers = list[tuple[bytes, bytes]]
Piece = tuple[bytes, bytes, bool]  # as received, the payload in it, whether the body ends with it


class BadMessage(http.client.HTTPException):
    """A message that is not HTTP/1.x as RFC 9112 has it; the text says where."""


class TooLong(BadMessage):
    """A head or a line that is longer than its limit."""


class BodyTooLong(Exception):
    """A body that is longer than its limit."""


class Refused(Exception):
    """The proxy answers by itself: `status`, and a sentence that says what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientGone(Exception):
    """The client hung up, or stopped reading."""


class BrokenOff(Exception):
    """The answer cannot be completed; the client must be able to see that."""


class Answered(Exception):
    """The server answers before it has read the whole request."""


# --- waiting for sockets --------------------------------------------------------------------------

READ, WRITE = getattr(select, "POLLIN", 1), getattr(select, "POLLOUT", 4)
HUNG_UP = getattr(select, "POLLRDHUP", 0)  # Linux tells of a hang-up behind unread bytes


class SelectPoll:
    """select.poll for Windows. `selectors` would do for both, but has no POLLRDHUP; select.select
    itself takes no descriptor above 1023 elsewhere."""

    def __init__(self) -> None:
        self.wanted: dict[int, int] = {}

    def register(self, sock: socket.socket, events: int) -> None:
        self.wanted[sock.fileno()] = events

    modify = register

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        reads = [descriptor for descriptor, events in self.wanted.items() if events & READ]
        writes = [descriptor for descriptor, events in self.wanted.items() if events & WRITE]
        if not reads and not writes:  # Windows does not take three empty lists
            time.sleep(milliseconds / 1000)
        else:
            reads, writes, _ = select.select(reads, writes, [], milliseconds / 1000)
        ready = {*reads, *writes}
        return [(one, READ * (one in reads) | WRITE * (one in writes)) for one in ready]


Poll: Any = getattr(select, "poll", SelectPoll)


def poll_one(sock: socket.socket, events: int, seconds: float) -> int:
    """Wait for a socket; the events that came, 0 when none did."""
    poller = Poll()
    poller.register(sock, events)
    found = poller.poll(1000 * max(0.0, seconds))
    return found[0][1] if found else 0


def never_wait(events: int) -> None:
    """The `wait` of a stream that nobody reads from."""
    raise BlockingIOError


class Stream(io.RawIOBase):
    """A connected socket as a file that calls `wait(events)` where it would block.

    That is what lets the relay wait for both of its sockets at once. It stands in for the socket
    in http.server (makefile) and in http.client (makefile, sendall, close). A TLS socket is always
    tried first: it may hold bytes that the system knows nothing of. `gone` is the kind of exception
    that a broken connection raises."""

    def __init__(
        self, sock: socket.socket, wait: Callable[[int], None], gone: type[Exception]
    ) -> None:
        self.sock, self.wait, self.gone = sock, wait, gone
        self.received = 0  # bytes; whoever cares sets it to 0
        self.ahead = bytearray()  # bytes read before anyone asked for them
        self.tls = hasattr(sock, "pending")
        self.drained = False  # the last read has emptied the socket
        sock.setblocking(False)

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.sock.fileno()

    def readinto(self, buffer: Any) -> int:
        if self.ahead:
            size = min(len(buffer), len(self.ahead))
            buffer[:size] = self.ahead[:size]
            del self.ahead[:size]
            return size
        if self.drained:  # asking it would cost a system call and perhaps a switch of threads
            self.wait(READ)
        while True:
            try:
                size = self.sock.recv_into(buffer)
            except AGAIN:
                self.wait(READ)
            except OSError as error:
                raise self.gone(str(error)) from None
            else:
                self.received += size
                self.drained = size < len(buffer) and not self.tls
                return size

    def write(self, data: Any) -> int:
        while True:
            try:
                return self.sock.send(data)
            except AGAIN:
                self.wait(WRITE)
            except OSError as error:
                raise self.gone(str(error)) from None

    def sendall(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.write(rest) :]

    def makefile(self, mode: str, size: int = BUFFER) -> Any:
        return io.BufferedWriter(self, size) if mode == "wb" else io.BufferedReader(self, size)

    def flush(self) -> None:
        """Nothing is buffered here; http.client flushes its files after it closed the socket."""

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(OSError):  # wakes threads that wait on it; close() does not
                self.sock.shutdown(socket.SHUT_RDWR)
            self.sock.close()
        super().close()


# --- reading messages -----------------------------------------------------------------------------


def read_line(file: Any, limit: int) -> bytes:
    """A line with its end. Raises TooLong, and EOFError when the file ends before the line does."""
    line: bytes = file.readline(limit + 1)
    if len(line) > limit:
        raise TooLong("a line is too long")
    if line[-1:] != b"\n":
        raise EOFError("the connection ended in the middle of a line")
    return line


class Fields(http.client.HTTPMessage):
    """Headers, case and order kept, with an index: the library's look-ups go through all lines each
    time, and a request needs two dozen."""

    def __init__(self) -> None:
        super().__init__()
        self.index: dict[str, list[str]] = {}

    def set_raw(self, name: str, value: str) -> None:
        super().set_raw(name, value)
        self.index.setdefault(name.lower(), []).append(value)

    def all(self, name: str) -> list[str]:
        """The values of all lines with this (lower-case) name."""
        return self.index.get(name, [])

    def members(self, name: str) -> list[str]:
        """The members of a header that is a list, over all of its lines, in lower case."""
        return [member.strip().lower() for value in self.all(name) for member in value.split(",")]


def read_headers(file: Any, limit: int = HEAD_LIMIT) -> Fields:
    """Header lines (RFC 9112 section 5) up to the blank line, case and order kept.

    http.client.parse_headers() splits lines at a bare CR as well, drops all that stands behind a
    line without a colon, keeps folded lines, and takes more than twice as long."""
    headers, count = Fields(), 0
    while (line := read_line(file, limit)) not in (b"\r\n", b"\n"):
        limit -= len(line)
        found = FIELD_LINE.fullmatch(line)
        if not found:  # also a NUL, a space before the colon
            raise BadMessage("bad header line")
        headers.set_raw(found[1].decode(), found[2].strip(b" \t").decode("latin-1"))
        count += 1
        if count > HEADER_LIMIT:
            raise TooLong("too many header lines")
    return headers


def end_to_end(headers: Fields, drop: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The headers that a proxy passes on: without `drop` and what Connection names.

    Connection cannot name Content-Length: without it the body would be taken for the next
    message."""
    drop |= set(headers.members("connection")) - {"content-length"}
    return (item for item in headers.raw_items() if item[0].lower() not in drop)


def body_length(headers: Fields) -> int | None:
    """Content-Length, None when there is none. Raises BadMessage unless all values are equal plain
    numbers: int() takes +5 and 1_0 as well, and of two lengths the library takes the first."""
    values = headers.all("content-length")
    if not values:
        return None
    if len(set(values)) > 1 or not LENGTH.fullmatch(values[0]):
        raise BadMessage("bad Content-Length")
    return int(values[0])


def read_chunks(file: Any, limit: float = float("inf")) -> Iterator[Piece]:
    """A chunked body (RFC 9112 section 7.1) as it comes, at most `limit` bytes of payload.

    Raises BadMessage, BodyTooLong and EOFError. HTTPResponse takes +2, 0x2 and 1_0 for sizes, does
    not look at what ends a chunk, and takes the connection's end for the end of the trailers."""
    while True:
        line = file.readline(CHUNK_LINE_LIMIT)
        found = CHUNK_LINE.fullmatch(line)
        if not found:
            if line[-1:] != b"\n" and len(line) < CHUNK_LINE_LIMIT:
                raise EOFError("the connection ended before a chunk")
            raise BadMessage("bad chunk size")
        size = int(found[1], 16)
        if not size:
            break
        limit -= size
        if limit < 0:
            raise BodyTooLong
        left, end = size + 2, b""  # a line end follows the payload
        while left:
            data = file.read1(min(left, PIECE_BYTES))
            if not data:
                raise EOFError("the connection ended in the middle of a chunk")
            payload = data[: max(0, left - 2)]
            left -= len(data)
            end = (end + data[-2:])[-2:]
            if not left and end != b"\r\n":
                raise BadMessage("a chunk is longer than its size")
            yield line + data, payload, False
            line = b""
    trailer, room = b"", HEAD_LIMIT
    while trailer != b"\r\n":
        trailer = read_line(file, room)
        if trailer != b"\r\n" and not TRAILER_LINE.fullmatch(trailer):
            raise BadMessage("bad trailer")
        line += trailer
        room -= len(trailer)
    yield line, b"", True


@dataclasses.dataclass
class Request:
    """A request's head, as received, but for an absolute target: that has become a path."""

    method: str
    path: str  # with the query; a character for each byte
    headers: Fields
    old: bool = False  # HTTP/1.0
    length: int | None = None  # Content-Length
    chunked: bool = False

    @property
    def target(self) -> bytes:
        return self.path.encode("latin-1")

    def get(self, name: str) -> str:
        """A header's value, the first one if there are several, or ''."""
        return next(iter(self.headers.all(name.lower())), "")


def from_other_site(request: Request) -> bool:
    """Whether a browser says that a page of another site sends this."""
    scheme, _, place = request.get("origin").lower().partition("://")
    foreign = scheme in ("http", "https") and place != request.get("host").lower()
    return foreign or request.get("sec-fetch-site").lower() == "cross-site"


class Response(http.client.HTTPResponse):
    """An answer of the model server."""

    _method: str  # of the request
    fp: Any  # a BufferedReader on the connection's Stream, until release()
    headers: Fields
    length: int | None

    def begin(self) -> None:
        """Read the head of the final answer; interim ones (RFC 9110 section 15.2) are dropped.

        The library takes 103 for the answer, and has no strict parser."""
        for _ in range(INTERIM_LIMIT):
            line = read_line(self.fp, HEAD_LIMIT)
            match = STATUS_LINE.fullmatch(line)
            if not match:
                raise BadMessage("bad status line")
            self.headers = self.msg = read_headers(self.fp, HEAD_LIMIT - len(line))
            self.status = self.code = int(match[2])
            if self.status == 101:
                raise BadMessage("it switches to another protocol unasked")
            if self.status >= 200:
                break
        else:
            raise BadMessage("interim answers without end")
        self.version = 10 + int(match[1])
        self.reason = (match[3] or b"").decode("latin-1")
        self.set_framing()

    def set_framing(self) -> None:
        """How the body ends (RFC 9112 section 6.3): `chunked`, or `length`; None: by closing."""
        coding = ",".join(self.headers.all("transfer-encoding")).strip().lower()
        self.chunked = False
        self.length = None if coding else body_length(self.headers)
        if self._method == "HEAD" or self.status in (204, 304):
            self.length = 0
        elif coding:
            if coding != "chunked":
                raise BadMessage("unknown Transfer-Encoding")
            self.chunked = True
        ended_by_close = not self.chunked and self.length is None
        closes = "close" in self.headers.members("connection")
        self.closing = self.version == 10 or closes or ended_by_close
        # llama-server says keep-alive and closes the connection after a streamed answer.
        kind, server = "".join(self.headers.all("content-type")), self.headers.all("server")
        self.closing |= kind.startswith("text/event-stream") and server == ["llama.cpp"]
        self.will_close = False  # else getresponse() would close the socket

    def pieces(self) -> Iterator[Piece]:
        """The body as it comes; where only closing tells its end, coded in chunks."""
        return read_chunks(self.fp) if self.chunked else self.plain_pieces()

    def plain_pieces(self) -> Iterator[Piece]:
        """Raises EOFError when the body is cut: the library's read1() hides that."""
        if self.length is None:
            while data := self.fp.read1(PIECE_BYTES):
                yield b"%x\r\n%s\r\n" % (len(data), data), data, False
            yield b"0\r\n\r\n", b"", True
        elif not self.length:
            yield b"", b"", True
        else:
            while self.length:
                data = self.fp.read1(min(self.length, PIECE_BYTES))
                if not data:
                    raise EOFError("the connection ended before the body did")
                self.length -= len(data)
                yield data, data, not self.length

    def release(self) -> bool:
        """Let go of the connection, at the end of the body; False if it cannot be used again: there
        are bytes that nobody asked for, or its end."""
        reader, self.fp = self.fp, None
        try:
            reader.peek(1)
        except BlockingIOError:
            reader.detach()  # else it would close the connection
            return True
        except ConnectionError:
            pass
        return False


class Upstream(http.client.HTTPConnection):
    """A connection to the model server."""

    response_class = Response
    auto_open = 0  # a connection that was closed is not opened again unasked
    sock: Any  # a Stream, once it is connected

    def __init__(
        self, url: urllib.parse.SplitResult, host: str, timeout: float, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(host, url.port or (443 if tls else 80), timeout)
        self.url, self.tls = url, tls
        self.expires = 0.0  # on the monotonic clock; 0: not used yet
        self.unfinished = False  # a request was not sent whole
        self.small_body: bytes | bytearray = b""  # goes with its head

    def connect(self) -> None:
        """As in the library, whose HTTPSConnection is another class, but not to block later."""
        super().connect()
        if self.tls is not None:
            self.sock = self.tls.wrap_socket(self.sock, server_hostname=self.host)
        self.sock = Stream(self.sock, never_wait, ConnectionError)

    def _encode_request(self, request: str) -> bytes:
        """The library's targets are ASCII only; here the client's bytes pass as they are."""
        return request.encode("latin-1")

    def endheaders(self, message_body: Any = None, *, encode_chunked: bool = False) -> None:
        """The library sends a head by itself, and the server wakes up twice. Here a small body goes
        with it, in one packet."""
        if message_body and len(message_body) <= PIECE_BYTES:
            self.small_body, message_body = message_body, None
        super().endheaders(message_body, encode_chunked=encode_chunked)

    def send(self, data: Any) -> None:
        if self.small_body:
            data, self.small_body = data + self.small_body, b""
        super().send(data)

    def answered(self) -> bool:
        """Read ahead while the request is still being sent: whether the final answer has begun, or
        the connection has ended."""
        stream = self.sock
        try:
            data = stream.sock.recv(PIECE_BYTES)
        except AGAIN:
            return False
        except OSError:
            return True
        stream.ahead += data
        stream.received += len(data)
        heads = HEAD_END.split(stream.ahead)
        final = any(len(head) > 9 and head[9:10] != b"1" for head in heads)  # "HTTP/1.1 1.."
        return final or not data or len(stream.ahead) > HEAD_LIMIT


class Pool:
    """Idle connections to the backend, the newest used first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[Upstream] = []

    def take(self) -> Upstream | None:
        """The newest; the caller must see whether the server has closed it."""
        with self.lock:
            upstream = self.idle.pop() if self.idle else None
        if upstream is None or time.monotonic() < upstream.expires:
            return upstream
        upstream.close()
        return None

    def give(self, upstream: Upstream, response: Response) -> None:
        """Keep a connection whose answer was read to its end, as long as the server says
        (Keep-Alive: timeout)."""
        seconds = REUSE_SECONDS
        if told := KEPT_FOR.search(",".join(response.headers.all("keep-alive"))):
            seconds = min(seconds, int(told[1]) - 1.0)
        upstream.sock.wait = never_wait
        if response.closing or seconds <= 0 or upstream.unfinished or not response.release():
            upstream.close()
            return
        upstream.expires = time.monotonic() + seconds
        with self.lock:
            self.idle.append(upstream)
            oldest = self.idle.pop(0) if len(self.idle) > 256 else None
        if oldest is not None:
            oldest.close()

    def close(self, until: float = float("inf")) -> None:
        """Close the connections that may not be used after that time; without one, all."""
        with self.lock:
            old = [upstream for upstream in self.idle if upstream.expires <= until]
            self.idle = [upstream for upstream in self.idle if upstream.expires > until]
        for upstream in old:
            upstream.close()


class Tap:
    """Keeps the first and the last bytes of an answer as it passes, to read the usage from."""

    __slots__ = ("first", "last")

    def __init__(self) -> None:
        self.first, self.last = b"", bytearray()

    def add(self, data: bytes) -> None:
        self.last += data
        if len(self.last) > 2 * TAP_BYTES:
            self.first = self.first or bytes(self.last[: TAP_BYTES // 4])
            del self.last[:-TAP_BYTES]

    def windows(self) -> tuple[bytes, bytes]:
        """The start and the end of the answer; a short one whole, and b''."""
        return (self.first, bytes(self.last)) if self.first else (bytes(self.last), b"")


ERROR_KINDS = {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}


def error_body(path: str, status: int, message: str) -> bytes:
    """An error object in the style of the dialect's API, so that SDKs raise what their users
    know."""
    dialect, _ = dialect_of(path.partition("?")[0])
    kind = ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if dialect is not None and dialect.name == "messages":
        return dump({"type": "error", "error": {"type": kind, "message": message}})
    return dump({"error": {"message": message, "type": kind, "code": status}})


class Relay(BaseHTTPRequestHandler):
    """One client connection: reads requests, forwards them, relays the answers."""

    server: Server
    protocol_version = default_request_version = "HTTP/1.1"
    rbufsize = wbufsize = BUFFER // 2
    rfile: Any
    _headers_buffer: list[bytes]

    # --- the life of a connection -----------------------------------------------------------------

    def setup(self) -> None:
        self.proxy, self.socket = self.server.proxy, self.request
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request = Stream(self.socket, self.wait_for_client, ClientGone)
        super().setup()  # makes rfile and wfile of it
        self.upstream: Any = None  # an Upstream, while a request is served
        self.exchange: Any = None  # an Exchange, likewise
        self.poller = Poll()  # of both sockets
        self.poller.register(self.socket, READ | HUNG_UP)
        self.watched = READ | HUNG_UP
        self.patience = self.proxy.config.header_timeout  # seconds until the next request
        self.until = 0.0  # on the monotonic clock: the client has to send by then
        self.in_body = False  # what it has to send is a request's body
        self.linger = False  # the client is still sending
        self.abort = False
        self.explained = False  # this request, while the model works
        self.held = 0  # bytes of its body
        self._headers_buffer = []

    def handle_one_request(self) -> None:
        """Serve the next request, if one comes in time.

        In the library each read has a time-out of its own, so that a head may take for ever; only
        methods with a do_ function exist, and errors are HTML pages."""
        self.command, self.path, self.request_version = "", "/", self.protocol_version
        self.server.waiting[self.socket] = None
        try:
            if self.proxy.stopping or not self.read_head():
                self.close_connection = True
                return
            self.server.busy.add(self.socket)
            self.serve(self.head)
        except Refused as refused:
            self.close_connection = self.linger = True
            with contextlib.suppress(ClientGone):
                self.send_error(refused.status, str(refused))
            self.proxy.log.info("refused | status=%d | %s", refused.status, refused)
        except BrokenOff as cut:
            self.close_connection = True
            self.proxy.log.warning(
                "%s %s | answer cut: %s", self.command, printable(self.path), cut
            )
        except (ClientGone, OSError, EOFError):
            self.close_connection = True
        finally:
            self.server.waiting.pop(self.socket, None)
            self.server.busy.discard(self.socket)
            self.server.hold(-self.held)
            self.held = 0

    def finish(self) -> None:
        """Close. Unread bytes of the client would turn that into a reset, and its answer would be
        lost (RFC 9112 9.6)."""
        with contextlib.suppress(ClientGone, OSError):
            if self.abort:  # RST is the only sign of a cut that a client without framing can see
                option = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
                self.socket.close()
            self.flush()
            self.socket.shutdown(socket.SHUT_WR)
            end = time.monotonic() + LINGER_SECONDS
            self.until, self.in_body = end if self.linger else 0.0, False
            while self.rfile.read1(PIECE_BYTES) and time.monotonic() < end:
                pass
        self.request.wait = never_wait  # it refers to this handler, which refers to it
        for file in (self.wfile, self.rfile):  # as in the library, but for ClientGone
            with contextlib.suppress(ClientGone, OSError):
                file.close()

    # --- waiting ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what is ready for the client."""
        self.flush_headers()
        self.wfile.flush()

    def wait_for_client(self, events: int) -> None:
        """Its stream would block. Raises TimeoutError when it does not send in time, ClientGone
        when it does not read, Answered when the server's answer comes before the whole request."""
        if events == WRITE:
            if not poll_one(self.socket, WRITE, SEND_SECONDS):
                raise ClientGone("it does not read its answer")
            return
        self.flush()
        left = self.until - time.monotonic()
        if self.in_body:
            more = BODY_SECONDS * max(0.0, self.request.received / (1 << 20) - 1)
            left = min(BODY_SECONDS, left + more)
        if self.upstream is None:
            if not poll_one(self.socket, READ, left):
                raise TimeoutError
            return
        self.watch(READ | HUNG_UP)
        found = dict(self.poller.poll(1000 * max(0.0, left)))
        if not found:
            raise TimeoutError
        if self.socket.fileno() not in found and self.upstream.answered():
            raise Answered

    def wait_for_server(self, events: int) -> None:
        """Its stream would block. Raises TimeoutError, ClientGone when the client hangs up, and
        Answered when the server answers what it has not read yet."""
        if self._headers_buffer:
            self.flush_headers()
        self.wfile.flush()
        if events == WRITE:
            self.poller.modify(self.upstream.sock, READ | WRITE)
        happened, seconds = 0, self.proxy.config.read_timeout
        if not self.explained:
            happened = self.server_events(min(QUIET_SECONDS, seconds))
            if not happened:
                self.explained = True
                self.proxy.quiet(self.exchange)
        happened = happened or self.server_events(seconds)
        if not happened:
            raise TimeoutError(f"nothing came for {seconds:g} s (READ_TIMEOUT)")
        if events == WRITE:
            self.poller.modify(self.upstream.sock, READ)
            if happened & ~WRITE and self.upstream.answered():
                raise Answered

    def server_events(self, seconds: float) -> int:
        """What has happened on the server's socket, 0 when nothing did. Watches the client."""
        while found := self.poller.poll(1000 * seconds):
            if found == self.readable:  # as a rule
                return READ
            events = dict(found)
            happened: int = events.pop(self.readable[0][0], 0)
            for hint in events.values():
                self.check_client(hint)
            if happened:
                return happened
        return 0

    def watch_client(self, seconds: float = 0.0) -> None:
        """Wait so long; raises ClientGone as soon as the client hangs up."""
        until = time.monotonic() + seconds
        while events := poll_one(self.socket, self.watched, until - time.monotonic()):
            self.check_client(events)

    def watch(self, events: int) -> None:
        """Which events of the client are looked for while the server is waited for."""
        self.watched = events
        self.poller.modify(self.socket, events)

    def check_client(self, events: int) -> None:
        """Tell pipelined bytes from a client that has hung up. A half-closed one counts as gone,
        as it does for llama-server itself."""
        if events & ~READ:
            raise ClientGone
        if not events:
            return
        try:
            if not self.socket.recv(1, socket.MSG_PEEK):
                raise ClientGone
        except BlockingIOError:
            return
        except OSError:
            raise ClientGone from None
        self.watch(HUNG_UP)  # else poll() would tell of these bytes again and again

    # --- reading a request ------------------------------------------------------------------------

    def read_head(self) -> bool:
        """Wait for a request and read its head; False when no more come."""
        self.until, self.in_body = time.monotonic() + self.patience, False
        try:
            start = self.rfile.peek(1)[:1]
            blank = 0
            while start in (b"\r", b"\n") and blank < 64:  # RFC 9112 section 2.2
                blank += len(self.rfile.read(1))
                start = self.rfile.peek(1)[:1]
        except TimeoutError:
            return False
        if not start:
            return False
        if not TOKEN_BYTES.match(start):
            raise Refused(
                400, "This is not HTTP; the address may need http:// instead of https://."
            )
        self.until = time.monotonic() + self.proxy.config.header_timeout
        self.patience = KEEP_SECONDS
        try:
            self.raw_requestline = read_line(self.rfile, HEAD_LIMIT)
            return self.parse_request()
        except TimeoutError:
            raise Refused(408, "The request's head took too long.") from None
        except TooLong:
            raise Refused(414, "The request's first line is too long.") from None

    def parse_request(self) -> bool:
        """Read a head strictly. Raises Refused for what a server must refuse (RFC 9112 sections 3
        and 6.3: smuggling shapes among it).

        The library splits the first line at any white space, makes /x of //x, reads the headers
        with parse_headers(), and sees `Connection: close` only where it stands alone."""
        line = self.raw_requestline
        words = line.decode("latin-1").split(" ")
        self.command, self.path = words[0], words[1] if words[1:] else "/"  # to word an error
        match = REQUEST_LINE.fullmatch(line)
        if not match:
            raise Refused(400, "This is not an HTTP request line.")
        if match[3] != b"1":
            raise Refused(
                505,
                "Only HTTP/1.0 and HTTP/1.1 are spoken here; the address may need http:// instead"
                " of https://.",
            )
        self.request_version = "HTTP/1.0" if match[4] == b"0" else "HTTP/1.1"
        old = match[4] == b"0"
        try:
            headers = self.headers = read_headers(self.rfile, HEAD_LIMIT - len(line))
            length = body_length(headers)
        except BadMessage as error:
            status = 431 if isinstance(error, TooLong) else 400
            raise Refused(status, f"The request's head cannot be read: {error}.") from None
        coding = headers.all("transfer-encoding")
        if coding and (length is not None or old):
            raise Refused(400, "Content-Length and Transfer-Encoding in one request.")
        if coding and [value.lower() for value in coding] != ["chunked"]:
            raise Refused(501, "The only Transfer-Encoding that is understood is chunked.")
        hosts = len(headers.all("host"))
        if hosts > 1 or (not hosts and not old):
            raise Refused(400, "A request needs one Host header.")
        for name in ("Origin", "Sec-Fetch-Site"):  # which of two is true cannot be told
            if len(headers.all(name.lower())) > 1:
                raise Refused(400, f"A request can have one {name} header only.")
        self.path = self.origin_form(self.path)
        self.close_connection = old or "close" in headers.members("connection")
        self.head = Request(self.command, self.path, headers, old, length, bool(coding))
        return True

    def origin_form(self, target: str) -> str:
        """The path of a request's target. Raises Refused for one that a server has no answer to."""
        if self.command == "CONNECT":
            raise Refused(
                405,
                "This is no forward proxy: set it as the base URL of the API, not as HTTP_PROXY.",
            )
        if target[:1] != "/" and (absolute := re.match("(?i)https?://[^/?#]*", target)):
            target = target[absolute.end() :]
            target = target if target[:1] == "/" else "/" + target
        if target[:1] != "/" and not (target == "*" and self.command == "OPTIONS"):
            raise Refused(400, "The request's target must be a path.")
        return target

    def check_length(self, length: int) -> None:
        limit = self.proxy.config.max_body_mb << 20
        if length > limit:
            raise Refused(413, f"The body is longer than MAX_BODY_MB allows ({limit} bytes).")

    def begin_body(self, request: Request) -> None:
        """Let a request's body come. If the client waits to be asked for it (RFC 9110 section
        10.1.1), that is done only now, when nothing speaks against it."""
        self.request.received, self.in_body = 0, True
        if request.get("expect").lower() == "100-continue" and not request.old:
            self.until = 0.0
            try:
                self.rfile.peek(1)  # it may be here already
            except TimeoutError:
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.until = time.monotonic() + BODY_SECONDS

    def receive(self, size: int) -> bytes:
        """Some bytes of a request's body. Raises ClientGone at an early end."""
        data: bytes = self.rfile.read1(size)
        if not data:
            raise ClientGone
        return data

    def read_body(self, request: Request) -> bytes | bytearray:
        """The whole body, within MAX_BODY_MB."""
        length, limit = request.length or 0, self.proxy.config.max_body_mb << 20
        if length > limit:
            raise self.too_long()
        body = bytearray()
        if not length and not request.chunked:
            return body
        self.begin_body(request)
        try:
            for _, payload, _ in read_chunks(self.rfile, limit) if request.chunked else ():
                body += payload
                self.hold(len(payload))
            while len(body) < length:
                data = self.receive(min(1 << 20, length - len(body)))
                body += data
                self.hold(len(data))
        except BodyTooLong:
            raise self.too_long() from None
        except BadMessage as error:
            raise Refused(400, f"The chunked body cannot be read: {error}.") from None
        except TimeoutError:
            raise self.too_slow() from None
        except EOFError:
            raise ClientGone from None
        self.server.waiting.pop(self.socket, None)
        return body

    def hold(self, size: int) -> None:
        """Count bytes of a body that stay in memory until the request has ended."""
        self.held += size
        if not self.server.hold(size):
            raise Refused(503, "The bodies of all requests take too much memory; try again soon.")

    def too_long(self) -> Refused:
        limit = self.proxy.config.max_body_mb << 20
        return Refused(413, f"The body is longer than MAX_BODY_MB allows ({limit} bytes).")

    def too_slow(self) -> Refused:
        return Refused(408, f"The body took too long: {BODY_SECONDS:g} s for each MB are allowed.")

    # --- one request ------------------------------------------------------------------------------

    def serve(self, request: Request) -> None:
        self.check_origin(request)
        path = request.path.partition("?")[0]
        if path == "/kvproxy" or path.startswith("/kvproxy/"):
            self.read_body(request)
            self.respond(*self.proxy.pages.answer(request, self.client_address[0]))
            return
        exchange = self.exchange = Exchange(request, *dialect_of(path))
        self.explained = False
        self.watch(READ | HUNG_UP)
        self.proxy.busy(1)
        try:
            if exchange.dialect is not None and request.method == "POST":
                exchange.received = self.read_body(request)
                if not request.get("content-encoding"):
                    self.proxy.prepare(exchange)
                else:
                    exchange.report.note = "compressed"
                    exchange.forwarded = exchange.received
            elif request.chunked:
                exchange.received = exchange.forwarded = self.read_body(request)
            elif (request.length or 0) > self.proxy.config.max_body_mb << 20:
                raise self.too_long()
            self.forward(exchange)
        except Refused as refused:
            exchange.status, exchange.fault = refused.status, str(refused)
            raise
        except BrokenOff as cut:
            exchange.fault = f"cut: {cut}"
            raise
        except (ClientGone, OSError):
            exchange.fault = "client left"
            raise
        finally:
            self.upstream = self.exchange = None
            self.proxy.busy(-1)
            self.proxy.finished(exchange)

    def check_origin(self, request: Request) -> None:
        """Keep web pages of other sites out, as far as browsers do not do that themselves."""
        host = request.get("host")
        if self.proxy.loopback_only and host and not self.proxy.known_host(host):
            # The page had its own name resolve to this machine (DNS rebinding).
            raise Refused(
                403,
                f"The Host {host[:80]!r} is not known here; add it to ALLOWED_HOSTS if it is yours.",
            )
        if request.method != "POST" or not from_other_site(request):
            return
        # For JSON a browser asks first (CORS preflight), and the server's answer decides.
        kind = request.get("content-type").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(
                403, "A web page of another site may only send application/json to this server."
            )

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The library's errors are HTML pages; these are what clients of the API understand."""
        self.respond(code, error_body(self.path, code, message or ""))

    def respond(
        self,
        status: int,
        body: bytes,
        headers: Iterable[tuple[bytes, bytes]] = (),
        kind: str = "application/json",
    ) -> None:
        """An answer of the proxy's own. send_response() would add Server and Date."""
        self._headers_buffer = []  # of an answer that was begun, and gives way to this one
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in headers:
            self.send_header(name.decode(), value.decode("latin-1"))
        if status == 503:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.flush_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.flush()

    def end_headers(self) -> None:
        """The library sends a head at once. Here it waits for the first bytes of the body, which
        go with it in one packet, or turn out to be unreadable: then the answer is a 502."""
        self._headers_buffer.append(b"\r\n")

    def flush_headers(self) -> None:
        if self._headers_buffer:
            super().flush_headers()

    # --- forwarding -------------------------------------------------------------------------------

    def forward(self, exchange: Exchange) -> None:
        """Send the request on and relay the answer. A request is repeated only when it went out on
        a connection used before and nothing came back: the server had closed it (RFC 9112 section
        9.3.1)."""
        backend = self.proxy.backend
        streamed = exchange.request.length or 0 if exchange.forwarded is None else 0
        response = None
        upstream = None if streamed else backend.pool.take()
        if upstream is not None:
            with contextlib.suppress(http.client.RemoteDisconnected):
                response = self.ask(exchange, upstream, 0)
        if upstream is None or response is None:
            upstream = self.connect()
            try:
                response = self.ask(exchange, upstream, streamed)
            except http.client.RemoteDisconnected:
                backend.lost()
                message = "closed the connection without an answer; its log may say why."
                raise Refused(502, f"The model server at {backend.name()} {message}") from None
        self.relay(exchange, upstream, response)

    def connect(self) -> Upstream:
        """A new connection to the server. Raises Refused."""
        backend = self.proxy.backend
        try:
            return backend.connect()
        except OSError as error:
            backend.lost()
            status = 504 if isinstance(error, TimeoutError) else 502
            raise Refused(
                status,
                f"The model server at {backend.name()} cannot be reached ({error}). Is it running,"
                f" and is BACKEND_URL right? {USUAL_PORTS}",
            ) from None

    def ask(self, exchange: Exchange, upstream: Upstream, streamed: int) -> Response:
        """Send a request and read the answer's head; `streamed`: bytes of the body that are passed
        on as they come. Raises RemoteDisconnected when the server closes without a byte."""
        stream = upstream.sock
        stream.wait, stream.received = self.wait_for_server, 0
        self.upstream, self.poller = upstream, Poll()
        self.poller.register(stream, READ)
        self.readable = [(stream.fileno(), READ)]
        self.poller.register(self.socket, READ | HUNG_UP)
        self.watched = READ | HUNG_UP
        try:
            # The client may have left by now, and what an idle connection has is its end.
            if self.server_events(0) and upstream.expires:
                raise ConnectionResetError
            self.send_request(exchange, upstream, streamed)
            exchange.sent = time.monotonic()
            return cast(Response, upstream.getresponse())
        except BaseException as fault:
            upstream.close()
            if isinstance(fault, TimeoutError):
                raise Refused(504, f"The model server does not answer: {fault}.") from None
            if isinstance(fault, BadMessage):
                raise Refused(502, f"The model server's answer is not HTTP: {fault}.") from None
            if isinstance(fault, (ConnectionError, EOFError)):
                if not stream.received:
                    raise http.client.RemoteDisconnected("") from None
                raise Refused(  # it is not repeated: the server may have run it
                    502, "The model server closed the connection in the head of its answer."
                ) from None
            raise

    def send_request(self, exchange: Exchange, upstream: Upstream, streamed: int) -> None:
        """Line, Host, the client's own headers in order, the body's length, the body."""
        request, body = exchange.request, exchange.forwarded
        target = under(upstream.url, request.target).decode("latin-1")
        upstream.unfinished = True
        try:
            upstream.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
            upstream.putheader("Host", upstream.url.netloc)
            for name, value in end_to_end(request.headers, WRITTEN_ANEW):
                upstream.putheader(name, value)
            if exchange.trace.conversation:
                upstream.putheader("X-KVProxy-Conversation", exchange.trace.conversation)
            if request.chunked or request.length is not None:
                length = request.length or 0 if body is None else len(body)
                upstream.putheader("Content-Length", str(length))
            upstream.endheaders(body)
            if streamed:
                self.pass_body(request, upstream, streamed)
            upstream.unfinished = False
        except (Answered, ConnectionError):
            pass  # an early answer (413, 401), or one that stands before the close
        if streamed and upstream.unfinished:
            # What is left of the body must not be taken for the next request.
            self.close_connection = self.linger = True
        self.server.waiting.pop(self.socket, None)

    def pass_body(self, request: Request, upstream: Upstream, length: int) -> None:
        """Pass a body on as it comes."""
        self.begin_body(request)
        while length:
            try:
                data = self.receive(min(1 << 18, length))
            except TimeoutError:
                raise self.too_slow() from None
            length -= len(data)
            begun = time.monotonic()
            upstream.send(data)
            self.until += time.monotonic() - begun  # the server's time is not the client's
        self.watch(READ | HUNG_UP)

    # --- relaying ---------------------------------------------------------------------------------

    def relay(self, exchange: Exchange, upstream: Upstream, response: Response) -> None:
        """Pass the answer on as it comes, byte for byte. Raises BrokenOff when the server breaks
        off."""
        exchange.status, exchange.begun = response.status, time.monotonic()
        old = exchange.request.old
        by_length = response.length is not None
        self.close_connection |= old or self.proxy.stopping
        self.send_response_only(response.status, response.reason)
        drop = CHUNKED_DROPS if response.chunked else HOP_BY_HOP
        for name, value in end_to_end(response.headers, drop):
            self.send_header(name, value)
        if not by_length and not old:
            self.send_header("Transfer-Encoding", "chunked")
        for line in self.proxy.diagnosis(exchange):
            name, _, value = line.decode().partition(": ")
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if exchange.dialect is not None and not response.headers.all("content-encoding"):
            exchange.tap = Tap()
        try:
            self.pump(exchange, response)
        except BaseException as fault:
            upstream.close()
            if not isinstance(fault, (TimeoutError, EOFError, ConnectionError, BadMessage)):
                raise
            if self._headers_buffer:  # nothing was sent yet
                raise Refused(502, f"The model server's answer is broken: {fault}.") from None
            # Without framing a plain close looks like the end; RST does not.
            self.abort = old and not by_length
            raise BrokenOff(str(fault)) from None
        self.proxy.backend.pool.give(upstream, response)

    def pump(self, exchange: Exchange, response: Response) -> None:
        """Send the client an answer's body, with its head in front."""
        tap, old = exchange.tap, exchange.request.old
        for received, payload, last in response.pieces():
            if tap is not None:
                tap.add(payload)
            if last:
                self.proxy.heard(exchange)
            if self._headers_buffer:
                self.flush_headers()
            self.wfile.write(payload if old else received)
        self.flush()


class Exchange:
    """One request on its way, and what is remembered of it afterwards."""

    def __init__(self, request: Request, dialect: Dialect | None, counting: bool) -> None:
        self.request, self.dialect, self.counting = request, dialect, counting
        self.number = 0
        self.time, self.started = time.time(), time.monotonic()
        self.sent = self.begun = self.ended = 0.0
        self.received: bytes | bytearray | None = None
        self.forwarded: bytes | bytearray | None = None
        self.view: View | None = None
        self.report, self.trace = Report(), Trace()
        self.verdict: Verdict | None = None
        self.idle = 0.0
        self.explained = False
        self.heard = False
        self.usage = Usage()
        self.status, self.fault = 0, ""
        self.stream = False
        self.tap: Tap | None = None


# ==================================================================================================
# Server: the backend, the listening socket, and Proxy, which everything hangs on
# ==================================================================================================

CANDIDATES = ("http://127.0.0.1:8080", "http://127.0.0.1:9931", "http://127.0.0.1:12345")
HOST = re.compile(r"([a-z0-9._-]{1,255}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
USUAL_PORTS = "llama-server listens on 9931 (newer) or 8080 (older), LM Studio on 1234."
OWNERS = {
    "llamacpp": "llama-server",
    "organization_owner": "LM Studio",
}  # owned_by in /v1/models -> product


class Backend:
    """Where the model server is. With BACKEND_URL unset it is looked for again whenever it is not
    there."""

    def __init__(self, config: Config) -> None:
        self.config, self.pool = config, Pool()
        self.key = ""  # for the questions that `check` asks; clients bring their own
        self.url = urllib.parse.urlsplit(config.backend_url) if config.backend_url else None
        self.last_good: dict[str, str] = {}  # host name -> the address that took a connection last
        self.lost_at = self.next_look = 0.0  # on the monotonic clock
        self.looking = threading.Lock()
        self.tls = None  # one for all connections; http.client would build one for each
        if self.url and self.url.scheme == "https":
            self.tls = ssl.create_default_context()
            self.tls.set_alpn_protocols(["http/1.1"])

    def name(self) -> str:
        url = self.url
        return url.geturl() if url else " or ".join(CANDIDATES)

    def locate(self) -> urllib.parse.SplitResult:
        """The server's URL. Raises OSError when none is set and none answers."""
        url = self.url  # read once: lost() in another thread may clear it
        if url is None:
            with self.looking:
                url = self.url = self.url or self.look()
        if url is None:
            raise ConnectionRefusedError("no server answers there")
        return url

    def look(self) -> urllib.parse.SplitResult | None:
        """The first candidate that answers like a model server. One look a second serves all who
        wait: a candidate that hangs takes a second."""
        if time.monotonic() < self.next_look:
            return None
        for url in map(urllib.parse.urlsplit, CANDIDATES):
            if url.port != self.config.listen_port:  # that is this proxy
                _, answer = fetch(url, "/v1/models", 1.0)
                if any(key in members(answer) for key in ("data", "models", "error")):
                    return url
        self.next_look = time.monotonic() + 1
        return None

    def connect(self) -> Upstream:
        """A new connection. Raises OSError.

        Windows resolves localhost to ::1 first and waits 2 s for a server that listens on 127.0.0.1
        only. With TLS the name stays: the certificate has it."""
        url = self.locate()
        host = url.hostname or ""
        several = host == "localhost" and url.scheme == "http"
        names = [self.last_good.get(host, "127.0.0.1"), "127.0.0.1", "::1"] if several else [host]
        faults = []
        for name in dict.fromkeys(names):
            upstream = Upstream(url, name, self.config.connect_timeout, self.tls)
            try:
                upstream.connect()
            except OSError as error:
                faults.append(error)
                upstream.close()
            else:
                self.last_good[host] = name
                return upstream
        raise faults[0]

    def lost(self) -> None:
        """Note that the server was away."""
        self.lost_at = time.monotonic()
        self.pool.close()
        if not self.config.backend_url:
            self.url = None

    def ask(self, path: str, timeout: float = 3.0) -> tuple[int, Any]:
        """(status, parsed JSON or text) of a GET; (0, reason) when it cannot be reached."""
        try:
            return fetch(self.locate(), path, timeout, self.key)
        except OSError as error:
            return 0, str(error)

    def describe(self) -> Json:
        """Product, build, model, slots and context, as far as the server tells; {} when it does not
        answer."""
        found: Json = {}
        status, props = self.ask("/props")
        if (
            status == 200 and isinstance(props, dict) and "error" not in props
        ):  # LM Studio says 200 to any path
            context = members(props.get("default_generation_settings")).get("n_ctx")
            found.update(
                product="llama-server",
                build=props.get("build_info"),
                slots=props.get("total_slots"),
            )
            found.update(
                context=context, model=re.split(r"[\\/]", str(props.get("model_path") or ""))[-1]
            )
        status, models = self.ask("/v1/models")
        if status:
            model = members(next(iter(listed(members(models).get("data"))), None))
            owner = str(model.get("owned_by") or "")
            found.setdefault(
                "product",
                OWNERS.get(owner) or (f"a server of {owner}" if owner else "a model server"),
            )
            found["model"] = found.get("model") or model.get("id")
        if status not in (0, 200):
            states = {
                401: "it wants an API key",
                403: "it wants another API key",
                503: "it is loading its model",
            }
            found["state"] = states.get(status, f"it answers {status} to /v1/models")
        return {key: value for key, value in found.items() if value not in (None, "")}


def members(value: Any) -> Json:
    """The members of a JSON object; none of any other value."""
    return value if isinstance(value, dict) else {}


def described(found: Json) -> str:
    """What describe() found, for people."""
    return ", ".join(
        f"{value}" if key in ("product", "state") else f"{key} {value}"
        for key, value in found.items()
    )


def http_connection(
    url: urllib.parse.SplitResult, timeout: float, host: str = "", tls: Any = None
) -> http.client.HTTPConnection:
    """`host`: one of the addresses of the URL's host; `tls`: an ssl.SSLContext, which takes 20 ms
    to build."""
    host = host or url.hostname or ""
    if url.scheme == "https":
        return http.client.HTTPSConnection(host, url.port, timeout=timeout, context=tls)
    return http.client.HTTPConnection(host, url.port, timeout=timeout)


def under(url: urllib.parse.SplitResult, target: bytes) -> bytes:
    """A request target under a URL's path prefix; a prefix that ends in /v1 is not doubled."""
    prefix = url.path.rstrip("/").encode()
    if target == b"*" or not prefix:
        return target
    if prefix.endswith(b"/v1") and re.match(rb"/v1(?:[/?]|$)", target):
        prefix = prefix[:-3]
    return prefix + target


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def fetch(
    url: urllib.parse.SplitResult, path: str, timeout: float, key: str = ""
) -> tuple[int, Any]:
    """(status, parsed JSON or text) of one GET under a URL's path prefix; (0, reason) when it
    fails."""
    try:
        with contextlib.closing(http_connection(url, timeout)) as connection:
            connection.request("GET", under(url, path.encode()).decode(), headers=bearer(key))
            response = connection.getresponse()
            text = response.read(1 << 20).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, str(error) or type(error).__name__
    with contextlib.suppress(ValueError, RecursionError):
        return response.status, json.loads(text)
    return response.status, text


def descriptors() -> int:
    """How many sockets and files this process may have open."""
    try:
        import resource
    except ImportError:  # Windows sets no limit that matters here
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class Server(ThreadingHTTPServer):
    """A thread for each connection, up to MAX_CONNECTIONS."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024  # with 5, a burst of clients waits for SYN retransmits of 1, 3, 7 s
    allow_reuse_address = os.name != "nt"  # on Windows it would let two servers share a port

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        # add, discard, pop, list() and len() need no lock
        self.open: set[socket.socket] = set()
        self.busy: set[socket.socket] = set()  # those with a request being served
        self.waiting: dict[socket.socket, None] = {}  # whose clients have to send, oldest first
        self.guard = threading.Lock()
        self.held = 0  # bytes of bodies in memory
        self.most_held = max(512 << 20, 4 * proxy.config.max_body_mb << 20)
        self.most_open = min(proxy.config.max_connections, descriptors() // 2 - 32)  # two for each
        host, port = proxy.config.listen_host, proxy.config.listen_port
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Relay)

    def server_bind(self) -> None:
        """The library's asks DNS for this machine's name, which may take a minute."""
        if os.name == "nt" and hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self.make_room()
                time.sleep(0.05)  # socketserver would try again at once and burn a core
            raise

    def service_actions(self) -> None:
        """Called a few times a second."""
        self.proxy.backend.pool.close(time.monotonic())

    def hold(self, size: int) -> bool:
        """Add to the bytes of bodies in memory; whether they may be so many."""
        with self.guard:
            self.held += size
            return self.held <= self.most_held

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.open) < self.most_open or self.make_room():
            self.open.add(request)
            with contextlib.suppress(RuntimeError):  # can't start new thread
                return super().process_request(request, client_address)
        body = error_body(
            "/", 503, "Too many connections (MAX_CONNECTIONS); try again in a second."
        )
        head = (
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            b"Retry-After: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        with contextlib.suppress(OSError):
            request.settimeout(1)
            request.sendall(head + body)
            request.shutdown(socket.SHUT_WR)
            request.settimeout(0.2)
            request.recv(65536)  # unread bytes would turn the close into a reset
        self.shutdown_request(request)

    def make_room(self) -> bool:
        """End the connection that has been idle, or sending its request, for longest."""
        with contextlib.suppress(StopIteration, RuntimeError):  # another thread changes `waiting`
            oldest = next(iter(self.waiting))
            del self.waiting[oldest]
            self.open.discard(oldest)
            oldest.shutdown(socket.SHUT_RDWR)
            return True
        return False

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def hang_up(self, everything: bool) -> int:
        """End idle connections, or all; returns how many are still busy."""
        for connection in list(self.open):
            if everything or connection not in self.busy:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        return len(self.busy)

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.proxy.log.error("a connection failed", exc_info=sys.exc_info())


class Proxy:
    """A running kvproxy. Everything hangs on it, so several can live in one process.

    Use it as a context manager, or call start() and stop() from any thread. `url` is its base URL.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self.log = logging.Logger("kvproxy", self.config.log_level.upper())  # noqa: LOG001 - no global state
        self.backend = Backend(self.config)
        self.scrubber = Scrubber(self.config)
        self.reader = Reader(
            self.scrubber if self.config.scrub else None, self.config.replay_mb << 17
        )
        self.replay = Replay(self.config)
        self.ledger = Ledger(self.config.ledger_mb << 20)
        self.metrics = Metrics(self.config)
        self.pages = Pages(self)
        self.capture = Capture(self.config, self.log)
        self.warmup = Warmup(self)
        self.server: Server | None = None
        self.stopping = False
        self.running, self.last_end = 0, time.monotonic()
        self.guard, self.life = threading.Lock(), threading.Lock()
        self.allowed = {
            name.strip().lower() for name in self.config.allowed_hosts.split(",") if name.strip()
        }
        self.loopback_only = is_loopback(self.config.listen_host)

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> Proxy:
        """Listen and serve in the background; nothing if it does already. Raises OSError when the
        address is taken."""
        with self.life:
            if self.server is not None:
                return self
            self.server = Server(self)
            self.stopping = False
            self.warmup.start()  # first: a request that is served may write the file that it reads
            self.thread = threading.Thread(
                target=self.server.serve_forever, args=(0.2,), name="kvproxy", daemon=True
            )
            self.thread.start()
        return self

    def stop(self, grace: float = DRAIN_SECONDS) -> None:
        """Take no more connections, let answers end for `grace` seconds, then close everything."""
        with self.life:
            server, self.server = self.server, None
            if server is None:
                return
            self.stopping = True
            self.warmup.stop()
            with contextlib.suppress(OSError):
                server.socket.shutdown(
                    socket.SHUT_RDWR
                )  # wakes the thread that waits in it, on Linux
            server.shutdown()
            server.server_close()
            until = time.monotonic() + grace
            while server.hang_up(False) and time.monotonic() < until:
                time.sleep(0.02)
            server.hang_up(True)
            until = time.monotonic() + 2
            while server.open and time.monotonic() < until:
                time.sleep(0.005)
            self.thread.join(5)
            self.backend.pool.close()
            self.capture.close()

    def __enter__(self) -> Proxy:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self.start()

    def __exit__(self, fault: object, *_: object) -> None:
        self.stop(0 if fault else DRAIN_SECONDS)

    @property
    def url(self) -> str:
        """http://host:port, with the port that was really taken."""
        if self.server is None:
            raise RuntimeError("the proxy is not running")
        host, port = str(self.server.server_address[0]), self.server.server_address[1]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def known_host(self, host: str) -> bool:
        """Whether a Host header can be this machine's: an IP address, a name that public DNS cannot
        hold, or a set one."""
        match = HOST.fullmatch(host.lower())
        if not match:
            return False
        name = match[1].strip("[]")
        private = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
        local = name.endswith(private) or not re.search(r"[.:]", name)
        return local or name in self.allowed or address_of(name) is not None

    # --- before a request is forwarded ------------------------------------------------------------

    def prepare(self, exchange: Exchange) -> None:
        """Edit a request's body. Whatever goes wrong, the body is forwarded as it came."""
        raw = exchange.received
        assert raw is not None
        exchange.forwarded = raw
        try:
            self.edit(exchange, raw)
        except Unreadable as error:
            exchange.report, exchange.view = Report(note=str(error)), None
        except RecursionError:  # what was parsed may be too deep for what comes after it
            exchange.report, exchange.view = Report(note="nested too deeply"), None
        except Exception:
            exchange.report, exchange.view = Report(note="internal error"), None
            self.log.exception("a body could not be edited and was forwarded as it came")

    def edit(self, exchange: Exchange, raw: bytes | bytearray) -> None:
        dialect, report = exchange.dialect, exchange.report
        assert dialect is not None
        scrubs = self.config.scrub and dialect.edited
        replays = scrubs and self.config.replay
        view = self.reader.view(raw, dialect)
        exchange.stream = bool(view.body.get("stream"))
        report.items = len(view.turns)
        if scrubs:
            self.scrubber.apply(view, report)
        if replays:
            lifted = lift(view, self.replay)
            exchange.trace = self.replay.apply(view, lifted, report, learn=not exchange.counting)
            report.items_modified += report.replayed + bool(report.lifted or report.system_moved)
        else:
            exchange.trace = Trace(self.replay.conversation(view))
        exchange.view = view
        if report.edits():
            exchange.forwarded = view.dump()

    # --- while the model works --------------------------------------------------------------------

    def quiet(self, exchange: Exchange) -> None:
        """Learn from a request and explain it. Called once, when the server is silent or has
        answered."""
        view = exchange.view
        if view is None or exchange.counting or exchange.explained:
            return
        exchange.explained = True
        agent = "x-claude-code-agent-id"
        try:
            side = side_of(view.body, {agent: exchange.request.get(agent)}, view)
            exchange.idle = exchange.started - self.last_end
            talk, now = exchange.trace.conversation, time.monotonic()
            exchange.verdict = self.ledger.judge(
                segments_of(view), talk, side, now, self.backend.lost_at
            )
        except Exception:
            self.log.exception("a request could not be explained")

    def diagnosis(self, exchange: Exchange) -> list[bytes]:
        """The response header lines for a request that has X-Cache-Diagnostic: true."""
        if exchange.request.get("x-cache-diagnostic").strip().lower() != "true":
            return []
        self.quiet(exchange)
        report, verdict = exchange.report, exchange.verdict
        told = (
            f"ts={report.ts_removed} ids={report.msg_ids_removed} billing={report.billing_removed}"
        )
        told += f" regex={report.regex_removed} lifted={report.lifted} dropped={report.dropped}"
        fields: Json = {"Removed": told, "Replayed": report.replayed}
        if verdict is not None:
            fields.update(Prefix=f"{verdict.share:.3f}", Verdict=verdict.name)
        return [f"X-KVProxy-{name}: {value}".encode() for name, value in fields.items()]

    def busy(self, change: int) -> None:
        """Count a request in (1) or out (-1)."""
        with self.guard:
            self.running += change
            if change < 0:
                self.last_end = time.monotonic()
        if change > 0:
            self.warmup.interrupt()

    def heard(self, exchange: Exchange) -> None:
        """Write down what was answered. Called before the client gets the answer's last bytes, so
        that this is known when its next request comes."""
        if exchange.heard:
            return
        exchange.heard = True
        try:
            if exchange.trace.newest:
                answered = exchange.status == 200
                first = exchange.tap.windows()[0] if exchange.tap and answered else b""
                self.replay.answered(exchange.trace, hint_of(first) if answered else None)
        except Exception:
            self.log.exception("an answer could not be recorded")

    def finished(self, exchange: Exchange) -> None:
        """Read the usage, settle the verdict, write log, page, metrics and capture."""
        exchange.ended = time.monotonic()
        answered = exchange.status == 200
        try:
            if (
                answered or not exchange.status
            ):  # 0: the client left; the server may have read the prompt
                self.quiet(exchange)
            elif exchange.status == 503:  # llama-server: loading its model
                self.backend.lost_at = exchange.ended
            first, last = (
                exchange.tap.windows() if exchange.tap is not None and answered else (b"", b"")
            )
            exchange.usage = usage_of(first, last)
            self.heard(exchange)
            if not answered:
                exchange.verdict = None
            elif exchange.verdict is not None:
                settle(exchange.verdict, exchange.usage, exchange.idle)
                self.warmup.remember(exchange)
            exchange.tap, exchange.view, exchange.trace.newest = None, None, []
            self.capture.write(exchange)
            warning = self.metrics.count(exchange)
            if self.log.isEnabledFor(logging.INFO):
                for line in log_lines(exchange):
                    self.log.info("%s", line)
            if warning:
                self.log.warning("%s", warning)
        except Exception:
            self.log.exception("a finished request could not be recorded")


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a text is; None of any other."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.split("%")[0])
        return getattr(address, "ipv4_mapped", None) or address
    return None


def is_loopback(host: str) -> bool:
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def printable(path: str) -> str:
    """A request's path for the log: without the query, which may hold a key, and without control
    characters."""
    return path.split("?")[0].encode("ascii", "backslashreplace").decode()


def log_lines(exchange: Exchange) -> list[str]:
    """The log of one request: the line, and a second one when a prompt was not reused for a
    reason."""
    request, report, usage, verdict = (
        exchange.request,
        exchange.report,
        exchange.usage,
        exchange.verdict,
    )
    parts = [f"{request.method} {printable(request.path)}"]
    if exchange.dialect is not None and request.method == "POST":
        always = (
            "items",
            "ts_removed",
            "msg_ids_removed",
            "items_modified",
        )  # the original's line, which scripts read
        counts = {name: count for name, count in vars(report).items() if name != "note"}
        parts += [f"{name}={counts.pop(name)}" for name in always]
        parts += [
            f"stream={exchange.stream}",
            *(f"{name}={count}" for name, count in counts.items() if count),
        ]
        if usage.cached is not None and usage.prompt:
            parts.append(
                f"reused={usage.cached}/{usage.prompt} ({100 * usage.cached / usage.prompt:.1f}%)"
            )
        elif exchange.status == 200 and not exchange.counting:
            parts.append("reused=not reported")
        if usage.prompt_ms is not None:
            parts.append(f"prompt_ms={usage.prompt_ms:.0f}")
        if verdict is not None:
            parts.append(verdict.name + (f" ({verdict.side})" if verdict.side else ""))
        if report.note:
            parts.append(f"forwarded as it came: {report.note}")
    if exchange.status != 200 or len(parts) == 1:
        parts.append(f"status={exchange.status or '-'}")
    if exchange.fault:
        parts.append(exchange.fault)
    lines = [" | ".join(parts)]
    if verdict is not None and verdict.line() and not verdict.side:
        lines.append("    " + verdict.line())
    return lines


class Metrics:
    """Counters, the last requests, and the running hit rate."""

    KEEP_BYTES = 64 << 20  # of the bodies kept for the status page

    def __init__(self, config: Config) -> None:
        self.config, self.guard = config, threading.Lock()
        self.recent: collections.deque[Exchange] = collections.deque(maxlen=config.keep_requests)
        self.window: collections.deque[tuple[int, int, str]] = collections.deque(
            maxlen=20
        )  # cached, prompt, verdict
        self.points: collections.deque[tuple[float, float, str]] = collections.deque(
            maxlen=60
        )  # time, share, verdict
        self.rates: collections.deque[float] = collections.deque(
            maxlen=50
        )  # measured ms per prompt token
        self.counts: collections.Counter[tuple[str, str]] = (
            collections.Counter()
        )  # (label in METRIC_HELP, its value)
        self.number = self.judged = 0  # of all requests; of those with a verdict
        self.kept = 0  # bytes of the bodies in `recent`
        self.saved = 0.0  # seconds
        self.warned = False
        self.since = time.time()

    def count(self, exchange: Exchange) -> str:
        """Enter a finished request; returns a warning to log, or ''."""
        usage, verdict, report = exchange.usage, exchange.verdict, exchange.report
        with self.guard:
            self.number += 1
            exchange.number = self.number
            self.counts["status", str(exchange.status)] += 1
            if report.edits():
                for name, number in vars(report).items():
                    if number and name not in ("items", "items_modified", "note"):
                        self.counts["kind", name] += number
            if report.note:
                self.counts["reason", report.note.split(" (")[0]] += 1
            if exchange.dialect is not None and self.config.keep_requests:
                self.keep(exchange)
            if verdict is None:
                return ""
            self.judged += 1
            self.counts["verdict", verdict.name] += 1
            if usage.prompt is None or usage.cached is None:
                return ""
            read, ms = usage.prompt - usage.cached, usage.prompt_ms
            self.counts["state", "reused"] += usage.cached
            self.counts["state", "read"] += read
            if (
                ms is None and exchange.stream and exchange.begun
            ):  # the first event comes when the prompt is read
                ms = 1000 * (exchange.begun - exchange.sent)
            if ms is not None and read >= 32:
                self.rates.append(ms / read)
            if self.rates:
                self.saved += usage.cached * statistics.median(self.rates) / 1000
            name = f"{verdict.name} ({verdict.side})" if verdict.side else verdict.name
            self.points.append((exchange.time, usage.cached / max(1, usage.prompt), name))
            if verdict.side:
                return ""
            self.window.append((usage.cached, usage.prompt, verdict.name))
            return self.warning()

    def hit_rate(self) -> float | None:
        """Share of prompt tokens reused over the last 20 requests that told."""
        total = sum(prompt for _, prompt, _ in self.window)
        return sum(cached for cached, _, _ in self.window) / total if total else None

    def warning(self) -> str:
        """What to warn of when the hit rate falls below WARN_REUSE; '' until it has recovered and
        falls again."""
        rate = self.hit_rate()
        if rate is None or rate >= self.config.warn_reuse:
            self.warned = False
        elif not self.warned and len(self.window) == 20:
            self.warned = True
            return f"only {int(100 * rate)}% of the last 20 prompts was reused; {self.cause()}"
        return ""

    def cause(self, *spared: str) -> str:
        """The most frequent reason why the requests of the window were not reused; `spared`
        verdicts are none."""
        names = [name for _, _, name in self.window]
        faults = [name for name in names if name not in ("extended", *spared)]
        name, count = collections.Counter(faults or names).most_common(1)[0]
        return f"most often ({count} of {len(names)}): {name}, {VERDICTS[name]}"

    def keep(self, exchange: Exchange) -> None:
        """Keep a request for the page; the bodies of the oldest are let go when all take too much
        memory."""

        def size(one: Exchange) -> int:
            return len(one.received or b"") + (
                0 if one.forwarded is one.received else len(one.forwarded or b"")
            )

        if len(self.recent) == self.recent.maxlen:
            self.kept -= size(self.recent[0])
        self.recent.append(exchange)
        self.kept += size(exchange)
        for old in self.recent:
            if self.kept <= self.KEEP_BYTES:
                break
            self.kept -= size(old)
            old.received = old.forwarded = None


class Capture:
    """CAPTURE_FILE: every request as a JSON line. Trouble with the file ends the capture, never the
    proxy."""

    SECRET = re.compile(r"(?i)auth|cookie|key|token|secret|password|credential|signature")

    def __init__(self, config: Config, log: logging.Logger) -> None:
        self.path, self.limit, self.log = config.capture_file, config.capture_mb << 20, log
        self.guard = threading.RLock()  # close() takes it within write()
        self.file: Any = None
        self.size = 0

    def write(self, exchange: Exchange) -> None:
        if not self.path or exchange.received is None:
            return
        line = self.line(exchange, exchange.received)
        with self.guard:
            try:
                if self.path:
                    self.append(line)
            except OSError as error:
                self.log.warning("capture stopped: %s cannot be written (%s)", self.path, error)
                self.path = ""
                self.close()

    def line(self, exchange: Exchange, received: bytes | bytearray) -> str:
        """The row of a request: its body as JSON if that loses nothing, else as text."""
        names = [(name, value) for name, value in exchange.request.headers.raw_items()]
        row: Json = {
            "method": exchange.request.method,
            "path": re.sub(r"(?<=[?&])([^=&]*)=[^&]*", self.without_secret, exchange.request.path),
            "time": exchange.time,
            "headers": {
                name: "***" if self.SECRET.search(name) else value for name, value in names
            },
            "status": exchange.status,
            "report": vars(exchange.report),
            "usage": vars(exchange.usage),
            "verdict": exchange.verdict.name if exchange.verdict else None,
        }
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps({**row, "body": parse(received)}, separators=(",", ":")) + "\n"
        return (
            json.dumps({**row, "text": received.decode("utf-8", "replace")}, separators=(",", ":"))
            + "\n"
        )

    def without_secret(self, member: re.Match[str]) -> str:
        """A member of a query; the value of a key, a token and their like is not told."""
        return (
            f"{member[1]}=***" if self.SECRET.search(urllib.parse.unquote(member[1])) else member[0]
        )

    def append(self, line: str) -> None:
        while self.file is None or (self.size and self.size + len(line) > self.limit):
            if self.file is not None:
                self.close()
                os.replace(self.path, self.path + ".1")
            self.file = open_private(self.path, os.O_APPEND)
            self.size = os.fstat(self.file.fileno()).st_size
        self.file.write(line)
        self.file.flush()
        self.size += len(line)

    def close(self) -> None:
        with self.guard, contextlib.suppress(OSError):
            file, self.file = self.file, None
            if file is not None:
                file.close()


def open_private(path: str, flag: int) -> Any:
    """A text file to write that only its owner may read, also one that was there already. Raises
    OSError."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    if hasattr(os, "fchmod") and stat.S_ISREG(os.fstat(number).st_mode):
        with contextlib.suppress(OSError):
            os.fchmod(number, 0o600)
    return os.fdopen(number, "a" if flag & os.O_APPEND else "w", encoding="ascii")


class Warmup:
    """Remembers the heads of recent conversations and has the server read them before the first
    real turn needs them."""

    FIRST_WAIT, AWAY_WAIT = (
        1.0,
        5.0,
    )  # seconds of quiet before the first try, and between looks at the server
    NOT_READY = (0, 502, 503, 504)
    KEPT = ("model", "system", "instructions", "tools", "tool_choice", "parallel_tool_calls", "reasoning",
            "reasoning_effort", "chat_template_kwargs")  # fmt: skip

    def __init__(self, proxy: Proxy) -> None:
        self.proxy, self.config = proxy, proxy.config
        self.heads: dict[str, Json] = {}  # newest last
        self.due: dict[str, Json] = {}  # those that the server has yet to read
        self.guard = threading.Lock()  # of both, and of the file
        self.lost_at = proxy.backend.lost_at
        self.over = threading.Event()
        self.current: socket.socket | None = None
        self.keys: dict[str, str] = {}  # the newest client's API key, in memory only
        self.refused: dict[str, str] | None = None  # keys that the server did not take
        self.state, self.warned = "off", False
        self.thread: threading.Thread | None = None

    def enabled(self) -> bool:
        return bool(self.config.warmup_file or self.config.keepalive_seconds)

    def start(self) -> None:
        self.over.clear()
        if self.enabled():
            self.load()
            self.state = "waiting"
            self.thread = threading.Thread(target=self.run, name="kvproxy-warmup", daemon=True)
            self.thread.start()

    def stop(self) -> None:
        self.over.set()
        self.interrupt()
        if self.thread is not None:
            self.thread.join(5)

    # --- the heads and their file -----------------------------------------------------------------

    def load(self) -> None:
        """Read the heads of earlier runs. Their tools are the first-seen ones from now on, so that
        new ones match."""
        path, replay = self.config.warmup_file, self.proxy.replay
        try:
            with open(path, encoding="ascii") as file:
                heads = json.load(file)
            for key, head in heads.items():
                dialect, counting = dialect_of(head["path"])
                view = (
                    view_of(head["body"], dialect) if dialect is not None and not counting else None
                )
                if view is None:
                    raise ValueError(f"{key[:80]!r} is no head")
                if self.config.scrub and self.config.replay:
                    with replay.store.lock:
                        replay.tools(view, replay.conversation(view), False, Report(), True)
                self.keep(key, head)
        except FileNotFoundError:  # none yet, or none wanted
            pass
        except (
            OSError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            self.warn(f"WARMUP_FILE={path!r} cannot be read and starts anew: {error}")
        self.due = dict(self.heads)

    def keep(self, key: str, head: Json) -> None:
        """Make a head the newest one; the least recently used one may go."""
        self.heads.pop(key, None)
        self.heads[key] = head
        if len(self.heads) > self.config.warmup_heads:
            oldest = next(iter(self.heads))
            del self.heads[oldest]
            self.due.pop(oldest, None)

    def remember(self, exchange: Exchange) -> None:
        """Keep the head (system, tools, model) of a request that was answered."""
        view, verdict = exchange.view, exchange.verdict
        if not self.enabled() or view is None or verdict is None or verdict.side:
            return
        if not view.dialect.edited or not view.system():
            return
        body: Json = {name: view.body[name] for name in self.KEPT if name in view.body}
        systems = [turn.item for turn in view.turns[: view.leading()]]
        body.update(
            {view.dialect.turns: [*systems, {"role": "user", "content": "."}], "stream": False}
        )
        body["max_output_tokens" if view.dialect.name == "responses" else "max_tokens"] = 1
        if body.get("tool_choice") not in (None, "auto", "none"):
            del body["tool_choice"]
        key = digest(view.dialect.name, dump(body)).hex()
        self.keys = {
            name: found
            for name in ("authorization", "x-api-key")
            if (found := exchange.request.get(name))
        }
        with self.guard:
            newest = next(reversed(self.heads), None)
            self.keep(key, {"path": exchange.request.path.split("?")[0], "body": body})
            self.due.pop(key, None)  # the client itself had it read
            if key != newest and self.config.warmup_file:
                self.save()

    def save(self) -> None:
        """Write the file, whole or not at all. Called with the guard held."""
        path = self.config.warmup_file
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            with open_private(temporary, os.O_EXCL) as file:
                file.write(json.dumps(self.heads))  # json.dump would not use the C encoder
            os.replace(temporary, path)
        except OSError as error:
            self.warn(f"WARMUP_FILE={path!r} cannot be written: {error}")

    def warn(self, text: str) -> None:
        """Trouble with the file is told once."""
        if not self.warned:
            self.proxy.log.warning("%s", text)
        self.warned = True

    # --- the work ---------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """A client's request goes first: give the model up at once. The thread that reads closes
        the socket."""
        sock = self.current
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        wait = self.FIRST_WAIT
        while not self.over.wait(wait):
            try:
                self.step()
            except Exception:
                self.proxy.log.exception("warm-up failed")
            wait = min(self.AWAY_WAIT, self.config.keepalive_seconds or self.AWAY_WAIT)

    def step(self) -> None:
        """Warm up after a start and after the backend was away; repeat the newest head while idle,
        if that is wanted."""
        backend, keepalive = self.proxy.backend, self.config.keepalive_seconds
        idle = time.monotonic() - self.proxy.last_end
        if self.proxy.running or idle < self.FIRST_WAIT or not self.heads:
            return  # an agent that runs its tools is not idle
        with self.guard:
            if backend.lost_at != self.lost_at:
                self.lost_at = backend.lost_at
                self.due, self.refused = dict(self.heads) if self.config.warmup_file else {}, None
            heads = list(self.due.items())
            if not heads and keepalive and idle >= keepalive:
                heads = list(self.heads.items())[-1:]
        if not heads or self.keys == self.refused:
            return  # a server that has nothing to read is not asked anything
        if backend.ask("/health", 4.0)[0] in self.NOT_READY:
            backend.lost()
            self.state = "the server is away"
            return
        for number, (key, head) in enumerate(heads, 1):
            started = time.monotonic()
            self.state = name = f"head {number} of {len(heads)}"
            status = self.send(head)
            ended = time.monotonic()
            self.state = {200: "warm", 0: "interrupted"}.get(status, f"the server answers {status}")
            self.proxy.log.info("warm-up | %s | %.1f s | %s", name, ended - started, self.state)
            if status in (401, 403):  # after a start there is no key until a client brings one
                self.refused = self.keys
            if status in (401, 403, *self.NOT_READY):
                return
            self.proxy.last_end = ended
            with self.guard:
                self.due.pop(key, None)

    def send(self, head: Json) -> int:
        """Have the server read a head; returns the status, 0 without an answer."""
        try:
            url, tls = self.proxy.backend.locate(), self.proxy.backend.tls
            with contextlib.closing(
                http_connection(url, self.config.connect_timeout, tls=tls)
            ) as connection:
                connection.connect()
                connection.sock.settimeout(self.config.read_timeout)
                self.current = connection.sock
                if self.proxy.running or self.over.is_set():  # it came before it could interrupt
                    return 0
                headers = {"Content-Type": "application/json", **self.keys}
                connection.request(
                    "POST", under(url, head["path"].encode()).decode(), dump(head["body"]), headers
                )
                response = connection.getresponse()
                response.read()
                return response.status
        except (OSError, ValueError, http.client.HTTPException):
            return 0
        finally:
            self.current = None


# ==================================================================================================
# Status: the proxy's own endpoints, under /kvproxy
# ==================================================================================================

# The page is complete without its script, which only renews the elements of <main> that have an id.
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>%(state)s - kvproxy</title><link rel="icon" href="data:,"><style nonce="%(nonce)s">
:root { color-scheme: light dark; --ink: #1c2127; --soft: #56616d; --line: #d5dae0; --back: #fff; --good: #1a7f4b;
  --bad: #b3261e; --fair: #7d5200; --rest: #8b96a3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #a3adb8; --line: #39424c; --back: #14181c;
  --good: #4cc38a; --bad: #ff8f85; --fair: #e5b567; --rest: #74808d; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 0 auto; padding: 1rem;
  max-width: 60rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums }
h1 { font-size: 1rem; margin: 0; color: var(--soft); font-weight: 600 }
h2, summary { font-size: 1.05rem; font-weight: 650; margin: 2rem 0 .6rem } summary { cursor: pointer }
p, dd, ol { margin: 0; padding: 0 } a { color: inherit } code { font-size: .88em } b { font-weight: 600 }
.state { font-size: 1.6rem; font-weight: 650; margin: .3rem 0; line-height: 1.25 }
.good { color: var(--good) } .bad { color: var(--bad) } .fair { color: var(--fair) } .soft { color: var(--soft) }
dl { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin: 1.2rem 0 0 } dd { font-size: 1.25rem }
dt, .key, .chart { font-size: .85rem; color: var(--soft) }
.chart { display: grid; grid-template-columns: auto 1fr; gap: .2rem .6rem; margin-bottom: .4rem }
.scale { display: flex; flex-direction: column; justify-content: space-between; text-align: right; line-height: 1;
  margin: -.4em 0 }
svg { width: 100%%; height: 9rem } line { stroke: var(--line); vector-effect: non-scaling-stroke }
rect { fill: var(--rest) } rect.good { fill: var(--good) } rect.bad { fill: var(--bad) }
li { list-style: none; border-top: 1px solid var(--line); padding: .5rem 0 }
li p:first-child { display: flex; flex-wrap: wrap; gap: 0 .8rem }
</style></head><body><header><h1>kvproxy %(version)s</h1></header><main>
<p id="state" role="status" class="state %(tone)s">%(state)s</p>
<p id="hint" class="soft">%(hint)s</p><dl id="facts">%(facts)s</dl>
<h2>Reuse per request</h2><div id="chart">%(chart)s</div>
<p class="key"><b class="good">Green</b>: extended. <b class="bad">Red</b>: rewritten or lost. Grey: first prompts,
branches and side requests.</p>
<h2>Last requests</h2><ol id="requests">%(rows)s</ol>
<p class="key"><a href="/kvproxy/requests">All that are kept, as JSON</a></p></main>
<details><summary>Settings in force</summary><ol>%(settings)s</ol></details>
<script nonce="%(nonce)s">
setInterval(async () => {
  if (document.hidden || String(getSelection())) return;
  try {
    const answer = await fetch("/kvproxy");
    if (!answer.ok) throw answer.status;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("main > [id]")) {
      const news = page.getElementById(part.id);
      if (part.contains(document.activeElement)) continue;
      part.className = news.className;
      if (news.innerHTML !== part.innerHTML) part.innerHTML = news.innerHTML;
    }
    document.title = page.title;
  } catch (error) {
    const state = document.getElementById("state");
    document.title = state.textContent = "kvproxy does not answer; this is what it told last";
    state.className = "state bad";
  }
}, 3000);
</script></body></html>
"""

TONES = {
    "extended": "good",
    "rewritten": "bad",
    "lost": "bad",
}  # of verdicts; all others are neither

METRIC_HELP: tuple[tuple[str, str | Callable[[Proxy], float | None], str], ...] = (
    # (name, the label under which Metrics.counts holds its values or what gives its value, help)
    ("kvproxy_requests_total", "status", "Requests forwarded, by the status of their answers."),
    ("kvproxy_verdicts_total", "verdict", "Prompts by what became of them."),
    ("kvproxy_edits_total", "kind", "Edits made to requests, by kind."),
    ("kvproxy_untouched_total", "reason", "Bodies forwarded as they came, by reason."),
    (
        "kvproxy_prompt_tokens_total",
        "state",
        "Prompt tokens as the server reported them, reused or read.",
    ),
    (
        "kvproxy_saved_seconds_total",
        lambda on: on.metrics.saved,
        "Estimated seconds of reading that reuse saved.",
    ),
    (
        "kvproxy_hit_ratio",
        lambda on: on.metrics.hit_rate(),
        "Share of prompt tokens reused over the last 20 requests.",
    ),
    ("kvproxy_running_requests", lambda on: on.running, "Requests being served."),
    ("kvproxy_replay_bytes", lambda on: on.replay.store.size, "Memory held for replay."),
    ("kvproxy_ledger_bytes", lambda on: on.ledger.size, "Memory held for explanations."),
    (
        "kvproxy_start_time_seconds",
        lambda on: on.metrics.since,
        "When the proxy started, in seconds since the epoch.",
    ),
)

Answer = tuple[int, bytes, Headers, str]


class Pages:
    """Answers under /kvproxy. Prompt text goes to this machine only, and never to a page of another site."""

    SHOWN = 20  # requests on the page; all that are kept stand in /kvproxy/requests
    DIFF_LINES = 20000  # difflib takes long for more

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    def answer(self, request: Request, peer: str) -> Answer:
        """(status, body, headers, content type) for a request that came from the address `peer`."""
        path = request.path.partition("?")[0].rstrip("/")
        if request.method not in ("GET", "HEAD"):
            return self.error(405, "Only GET and HEAD.", (b"Allow", b"GET, HEAD"))
        if not self.proxy.known_host(request.get("host")):
            return self.error(403, "This Host is not known here; see ALLOWED_HOSTS.")
        if path == "/kvproxy/health":
            return self.json(
                200, {"status": "ok", "version": __version__, "warmup": self.proxy.warmup.state}
            )
        if path == "/kvproxy/metrics":
            return 200, self.metrics().encode(), [], "text/plain; version=0.0.4; charset=utf-8"
        if not is_loopback(peer) or not self.same_site(request):
            return self.error(403, "Prompts are shown on this machine only.")
        if path == "/kvproxy":
            return self.page()
        with self.proxy.metrics.guard:
            kept = {
                f"/kvproxy/requests/{exchange.number}": exchange
                for exchange in self.proxy.metrics.recent
            }
        if path == "/kvproxy/requests":
            return self.json(
                200, {"requests": [self.row(exchange) for exchange in reversed(kept.values())]}
            )
        if path in kept:
            return self.json(200, self.detail(kept[path]))
        return self.error(404, "There is no such page.")

    def same_site(self, request: Request) -> bool:
        """Whether no page of another site asks: browsers tell where a request comes from."""
        origin = request.get("origin")
        ours = not origin or origin.partition("://")[2] == request.get("host")
        return ours and request.get("sec-fetch-site") in ("", "none", "same-origin")

    def json(self, status: int, value: Json, *headers: tuple[bytes, bytes]) -> Answer:
        body = json.dumps(value, indent=1).encode()
        return status, body, [(b"X-Content-Type-Options", b"nosniff"), *headers], "application/json"

    def error(self, status: int, message: str, *headers: tuple[bytes, bytes]) -> Answer:
        return self.json(status, {"error": {"message": message}}, *headers)

    def row(self, exchange: Exchange) -> Json:
        """A request in numbers."""
        verdict, usage = exchange.verdict, exchange.usage
        return {
            "number": exchange.number,
            "time": exchange.time,
            "method": exchange.request.method,
            "path": printable(exchange.request.path),
            "status": exchange.status,
            "fault": exchange.fault or None,
            "conversation": exchange.trace.conversation or None,
            "report": dataclasses.asdict(exchange.report),
            "usage": {**dataclasses.asdict(usage), "read": usage.read()},
            "verdict": dataclasses.asdict(verdict) if verdict else None,
            "first_byte_ms": round(1000 * (exchange.begun - exchange.started), 1)
            if exchange.begun
            else None,
            "total_ms": round(1000 * (exchange.ended - exchange.started), 1),
        }

    def detail(self, exchange: Exchange) -> Json:
        """A request with its body as received and as forwarded, and what differs."""
        row = {**self.row(exchange), "received": None, "forwarded": None}
        received, forwarded = (
            exchange.received,
            exchange.forwarded,
        )  # another thread may let go of them
        if received is None or forwarded is None:
            return {**row, "note": "the bodies were dropped to save memory"}
        row["received"], row["forwarded"] = (
            raw.decode("utf-8", "replace") for raw in (received, forwarded)
        )
        row["diff"] = []
        if forwarded is received:
            return row
        with contextlib.suppress(
            RecursionError
        ):  # both are JSON; with an indent, dumps goes less deep than parse()
            before, after = (
                json.dumps(json.loads(raw), indent=1, ensure_ascii=False)
                .replace("\\n", "\n")
                .splitlines()
                for raw in (received, forwarded)
            )
            if max(len(before), len(after)) > self.DIFF_LINES:
                row["note"] = "the bodies are too long for a diff"
            else:
                row["diff"] = list(
                    difflib.unified_diff(before, after, "received", "forwarded", lineterm="", n=2)
                )
        return row

    def metrics(self) -> str:
        """Prometheus text format."""
        lines = []
        with self.proxy.metrics.guard:
            counts = sorted(self.proxy.metrics.counts.items())
            for name, source, text in METRIC_HELP:
                kind = "counter" if name.endswith("_total") else "gauge"
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
                if isinstance(source, str):
                    lines += [
                        f'{name}{{{label}="{of}"}} {count}'
                        for (label, of), count in counts
                        if label == source
                    ]
                elif (value := source(self.proxy)) is not None:
                    lines.append(f"{name} {value}")
        return "\n".join(lines) + "\n"

    # --- the page ---------------------------------------------------------------------------------

    def page(self) -> Answer:
        nonce, metrics = uuid.uuid4().hex, self.proxy.metrics
        with metrics.guard:
            state, tone, hint = map(html.escape, self.state())
            parts = {
                "state": state,
                "tone": tone,
                "hint": hint,
                "facts": self.facts(),
                "chart": self.chart(),
            }
            rows = "".join(map(self.item, itertools.islice(reversed(metrics.recent), self.SHOWN)))
        none = (
            "<li>None yet.</li>"
            if self.proxy.config.keep_requests
            else "<li>None are kept (KEEP_REQUESTS=0).</li>"
        )
        parts |= {
            "rows": rows or none,
            "settings": self.settings(),
            "nonce": nonce,
            "version": __version__,
        }
        policy = f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self';"
        policy += " img-src data:; frame-ancestors 'none'; base-uri 'none'"
        headers = [
            (b"Content-Security-Policy", policy.encode()),
            (b"X-Content-Type-Options", b"nosniff"),
        ]
        headers.append((b"Referrer-Policy", b"no-referrer"))
        return 200, (PAGE % parts).encode("utf-8", "replace"), headers, "text/html; charset=utf-8"

    def state(self) -> tuple[str, str, str]:
        """What a person wants to know first, its tone, and what explains it."""
        metrics = self.proxy.metrics
        last = metrics.recent[-1] if metrics.recent else None
        if last is not None and last.status in (502, 503, 504):
            words = "is not ready" if last.status == 503 else "does not answer"
            return (
                f"The model server {words} ({last.status})",
                "bad",
                last.fault or "It may be loading its model.",
            )
        verdicts = [one.verdict for one in metrics.recent if one.verdict and not one.verdict.side]
        if metrics.judged and not metrics.points:
            share = statistics.mean([verdict.share for verdict in verdicts] or [0])
            hint = f"By their text, {100 * share:.0f}% of the last prompts could be reused."
            return "The server does not report what it reused", "fair", hint if verdicts else ""
        if not metrics.window:
            return (
                "No prompt yet",
                "fair",
                "Set your agent's base URL to this address and send something.",
            )
        window = [(cached, prompt) for cached, prompt, name in metrics.window if name != "cold"]
        firsts = counted(len(metrics.window) - len(window), "first prompt")
        if not window:
            return (
                f"{firsts}, nothing to reuse so far",
                "fair",
                "Nothing can be reused until a conversation goes on.",
            )
        rate = sum(cached for cached, _ in window) / max(1, sum(prompt for _, prompt in window))
        left_out = f"; {firsts} not counted" if len(window) < len(metrics.window) else ""
        hint = f"Share of prompt tokens reused in the last {counted(len(window), 'request')}{left_out}."
        if rate >= self.proxy.config.warn_reuse:
            return f"The cache works: {int(100 * rate)}% reused", "good", hint
        example = next(
            (f" Last: {verdict.line()}" for verdict in reversed(verdicts) if verdict.line()), ""
        )
        hint = f"{hint} {metrics.cause('cold').capitalize()}.{example}"
        return f"The cache misses: only {int(100 * rate)}% reused", "bad", hint

    def facts(self) -> str:
        metrics, proxy = self.proxy.metrics, self.proxy
        reused, read = metrics.counts["state", "reused"], metrics.counts["state", "read"]
        unknown = "" if reused + read else "not reported" if metrics.judged else "-"
        facts = {
            "tokens reused": unknown or f"{reused:,}",
            "tokens read": unknown or f"{read:,}",
            "time saved, about": duration(metrics.saved) if metrics.rates else "-",
            "requests": f"{metrics.number:,}",
            "running now": str(proxy.running),
            "server": proxy.backend.name(),
        }
        if proxy.warmup.enabled():
            facts["warm-up"] = proxy.warmup.state
        return "".join(
            f"<div><dt>{name}</dt><dd>{html.escape(value)}</dd></div>"
            for name, value in facts.items()
        )

    def chart(self) -> str:
        """Bars, and a label that tells screen readers what they show. Text stands beside the
        drawing, which stretches."""
        points = self.proxy.metrics.points
        if not points:
            reason = (
                "The server reports no numbers."
                if self.proxy.metrics.judged
                else "Nothing to show yet."
            )
            return f'<p class="soft">{reason}</p>'
        bars = ""
        for place, (when, share, name) in enumerate(points):
            height = max(2, 100 * share)  # a miss is seen, too
            bars += (
                f'<rect class="{TONES.get(name, "")}" x="{place}.1" y="{100 - height:.1f}" width=".8" height="{height:.1f}">'
                f"<title>{clock(when)}: {100 * share:.0f}%, {name}</title></rect>"
            )
        mean = statistics.mean(share for _, share, _ in points)
        last = counted(len(points), "request")
        return (
            '<div class="chart"><div class="scale" aria-hidden="true"><span>100%</span><span>50%</span><span>0%</span></div>'
            f'<svg viewBox="0 0 {max(20, len(points))} 100" preserveAspectRatio="none" role="img"'
            f' aria-label="Share of the prompt reused in the last {last}: {100 * mean:.0f}% on average">'
            '<line x2="100%" y1="0" y2="0"/><line x2="100%" y1="50" y2="50"/><line x2="100%" y1="100" y2="100"/>'
            f"{bars}</svg><span></span><span>{clock(points[0][0])} to {clock(points[-1][0])}, newest last</span></div>"
        )

    def item(self, exchange: Exchange) -> str:
        """A request in the list."""
        usage, verdict = exchange.usage, exchange.verdict
        if exchange.status != 200:
            told = f"status {exchange.status}" if exchange.status else exchange.fault or "no answer"
        elif exchange.counting:
            told = "counts tokens"
        elif usage.cached is None or not usage.prompt:
            told = "reuse not reported"
        else:
            told = f"{100 * usage.cached // usage.prompt}% of {usage.prompt:,} tokens reused"
        words = ""
        if verdict is not None:
            side, tone = (
                f" ({verdict.side} request)" if verdict.side else "",
                TONES.get(verdict.name, ""),
            )
            words = f'<p><b class="{tone}">{verdict.name}</b>{side}: {VERDICTS[verdict.name]}</p>'
            words += f'<p class="soft">{html.escape(verdict.line())}</p>' if verdict.line() else ""
        return (
            f'<li><p><a href="/kvproxy/requests/{exchange.number}" aria-label="Request {exchange.number}"><time>'
            f"{clock(exchange.time)}</time></a><span>{html.escape(told)}</span>"
            f"<code>{html.escape(printable(exchange.request.path))}</code></p>{words}</li>"
        )

    def settings(self) -> str:
        rows = ""
        for name, _, meaning in Config.table():
            value = getattr(self.proxy.config, name.lower())
            value = (
                "  ".join(value)
                if isinstance(value, tuple)
                else int(value)
                if isinstance(value, bool)
                else value
            )
            rows += f"<li><p><code>{name}</code><code>{html.escape(str(value))}</code></p>"
            rows += f'<p class="soft">{html.escape(meaning)}</p></li>'
        return rows


def clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


# ==================================================================================================
# Commands: demo, bench, check, inspect, serve
# ==================================================================================================

# --- an OpenClaw-shaped conversation, for demo and bench ------------------------------------------

WORDS = (
    "box",
    "reads",
    "file",
    "writes",
    "patch",
    "server",
    "tests",
    "fail",
    "look",
    "line",
    "again",
    "with",
    "its",
)


def filler(count: int, seed: int) -> str:
    """`count` words of about a token each, in an order that `seed` decides."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def ask(url: urllib.parse.SplitResult, body: Json, timeout: float) -> tuple[str, Usage, float]:
    """(answer, usage, ms to the first byte) of a streamed chat request. Raises OSError, ValueError
    or HTTPException."""
    with contextlib.closing(http_connection(url, timeout)) as connection:
        started = time.monotonic()
        headers = {"Content-Type": "application/json", **bearer(os.environ.get("API_KEY", ""))}
        connection.request(
            "POST", under(url, b"/v1/chat/completions").decode(), dump(body), headers
        )
        response = connection.getresponse()
        data = response.read1(65536)
        first = 1000 * (time.monotonic() - started)
        data += response.read()
    if response.status != 200:
        told = " ".join(data[:200].decode("utf-8", "replace").split())
        raise ValueError(f"the server answered {response.status}: {told}")
    return hint_of(data), usage_of(data), first


def play(
    url: str, tokens: int, turns: int, mark: str, timeout: float, say: Callable[[str], None]
) -> list[Json]:
    """Play an agent shaped like OpenClaw 2026.2 against `url`, with ids and a stamp that change on
    every turn.

    `mark` stands at the front of the prompt, so that runs with different marks share nothing.
    Returns a row per turn. Raises what ask() raises."""
    rows: list[Json] = []
    history: list[Json] = []
    project = filler(max(50, tokens - 200), 7)
    for turn in range(1, turns + 1):
        ident = str(uuid.uuid4())
        meta = {
            "schema": "openclaw.inbound_meta.v1",
            "message_id": ident,
            "sender_id": "user-1",
            "channel": "webchat",
        }
        block = (
            f"## Inbound Context (trusted metadata)\n```json\n{json.dumps(meta, indent=2)}\n```\n"
        )
        system = f"You are a helpful agent ({mark}).\n{block}# Project Context\n{project}"
        info = json.dumps({"message_id": ident, "sender": "user-1"}, indent=2)
        stamp = time.strftime("[%a %Y-%m-%d %H:%M UTC]", time.gmtime(1771447680 + 61 * turn))
        question = f"{stamp} Question {turn}: {filler(20, turn)}"
        text = f"Conversation info (untrusted metadata):\n```json\n{info}\n```\n\n{question}"
        history.append({"role": "user", "content": text})
        messages = [{"role": "system", "content": system}, *history]
        body = {
            "model": "local",
            "messages": messages,
            "stream": True,
            "max_tokens": 16,
            "temperature": 0,
        }
        answer, usage, first = ask(urllib.parse.urlsplit(url), body, timeout)
        history.append({"role": "assistant", "content": answer or "ok"})
        ms = round(first if usage.prompt_ms is None else usage.prompt_ms, 1)
        rows.append(
            {
                "turn": turn,
                "prompt": usage.prompt,
                "read": usage.read(),
                "reused": usage.cached,
                "ms": ms,
            }
        )
        say(f"  turn {turn} of {turns}: {ms:,.0f} ms")
    return rows


def compare(
    args: argparse.Namespace, config: Config, simulated: bool, say: Callable[[str], None]
) -> None:
    """Play against config.backend_url, straight and then through a proxy with these settings, and
    print both runs."""
    mark, timeout = uuid.uuid4().hex[:12], config.read_timeout
    straight = play(config.backend_url, args.tokens, args.turns, mark + "a", timeout, say)
    say("")
    quiet: Json = {
        "warmup_file": "",
        "keepalive_seconds": 0,
        "capture_file": "",
        "log_level": "error",
    }
    with Proxy(
        dataclasses.replace(config, listen_host="127.0.0.1", listen_port=0, **quiet)
    ) as proxy:
        through = play(proxy.url, args.tokens, args.turns, mark + "b", timeout, say)
    before, after = (sum(row["ms"] for row in rows[1:]) for rows in (straight, through))
    ratio = before / after if after else None
    if args.json:
        print(
            json.dumps(
                {"simulated": simulated, "straight": straight, "through": through, "ratio": ratio}
            )
        )
        return
    columns = ("prompt", "read", "reused", "ms")
    heads = f"{'turn':>5} | " + " | ".join([" ".join(f"{name:>8}" for name in columns)] * 2)
    print(f"\n{'':5} | {'straight':^35} | {'through kvproxy':^35}\n{heads}\n{'-' * len(heads)}")
    for pair in zip(straight, through, strict=True):
        cells = [
            ["-" if row[name] is None else f"{row[name]:,.0f}" for name in columns] for row in pair
        ]
        print(
            f"{pair[0]['turn']:>5} | "
            + " | ".join(" ".join(f"{cell:>8}" for cell in half) for half in cells)
        )
    if ratio is not None:
        print(f"\nFrom the second turn on the prompt is ready {ratio:.1f} times as fast.")


class SimulatedServer(BaseHTTPRequestHandler):
    """A stand-in for llama-server: one slot whose cache is the longest common prefix in words, read
    at MS a word."""

    MS = 0.02
    server: SimulatedHost

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = "\n".join(
            f"{message['role']}: {message['content']}" for message in body["messages"]
        )
        cached = len(prompt[: common_prefix(self.server.slot, prompt)].split())
        read = max(1, len(prompt.split()) - cached)
        self.server.slot = prompt
        time.sleep(read * self.MS / 1000)
        timings = {
            "cache_n": cached,
            "prompt_n": read,
            "prompt_ms": read * self.MS,
            "predicted_n": 2,
        }
        answer = {"choices": [{"index": 0, "delta": {"content": "Noted, thanks."}}]}
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": timings}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(
            b"data: " + dump(answer) + b"\n\ndata: " + dump(end) + b"\n\ndata: [DONE]\n\n"
        )

    def log_message(self, format: str, *args: Any) -> None:
        pass


class SimulatedHost(
    socketserver.ThreadingTCPServer
):  # HTTPServer would ask DNS for this machine's name
    daemon_threads = True
    slot = ""


def command_demo(args: argparse.Namespace, config: Config) -> int:
    """Play a conversation against a simulated server, straight and through a real proxy."""
    if not args.json:
        print(
            "An OpenClaw-shaped conversation. The server is SIMULATED: it counts words as tokens and takes"
        )
        print(f"{SimulatedServer.MS:g} ms for each that it has to read. The proxy is the real one.")
    with SimulatedHost(("127.0.0.1", 0), SimulatedServer) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        try:
            compare(
                args,
                Config(backend_url=f"http://127.0.0.1:{server.server_address[1]}"),
                True,
                lambda line: None,
            )
        finally:
            server.shutdown()
    if not args.json:
        print("\nWith your own server:  BACKEND_URL=http://127.0.0.1:8080 python kvproxy.py bench")
    return 0


def command_bench(args: argparse.Namespace, config: Config) -> int:
    """The same conversation against BACKEND_URL."""
    say: Callable[[str], None] = (lambda line: None) if args.json else print
    backend = Backend(config)
    try:
        url = backend.locate().geturl()
        backend.connect().close()
    except OSError as error:
        print(
            f"No model server answers at {backend.name()} ({error}). Set BACKEND_URL.",
            file=sys.stderr,
        )
        return 1
    total = args.tokens * (args.turns + 1)
    say(
        f"{args.turns} turns of about {args.tokens:,} tokens against {url}, first straight, then through kvproxy."
    )
    say(
        f"Straight, every turn reads the whole prompt; through kvproxy, only the first should: {total:,} tokens."
    )
    say(f"That takes {duration(total / 400)} on a server that reads 400 tokens a second.\n")
    try:
        compare(args, dataclasses.replace(config, backend_url=url), False, say)
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"The run broke off: {error}", file=sys.stderr)
        return 1
    return 0


def command_check(args: argparse.Namespace, config: Config) -> int:
    """Tell what the backend is, and what in its settings hurts the cache."""
    backend = Backend(config)
    backend.key = os.environ.get("API_KEY", "")
    found = backend.describe()
    if not found:
        print(
            f"No model server answers at {backend.name()}.\nIs it running? {USUAL_PORTS} Set BACKEND_URL."
        )
        return 1
    print(f"{backend.name()}: {described(found)}")
    if "state" in found:
        print(
            "Set API_KEY and try again."
            if "key" in found["state"]
            else "Try again when it is ready."
        )
        return 1
    advice = []
    status, rows = backend.ask("/slots")
    if status != 200 or not isinstance(rows, list):
        reason = (
            "it wants an API key for that (API_KEY)" if status in (401, 403) else "it has no /slots"
        )
        print(
            f"prompt cache: the server does not tell, {reason}; a run of `python kvproxy.py bench` shows it"
        )
    elif any(members(members(row).get("params")).get("cache_prompt") is False for row in rows):
        advice.append("cache_prompt is off: remove --no-cache-prompt, or nothing is ever reused.")
    else:
        print("prompt cache: on, as far as /slots tells")
    slots, context = found.get("slots"), found.get("context")
    if slots == 1:
        advice.append("One slot: a title or sub-agent request takes it, and the conversation must come back from the host"
                      " cache. -np 4 -sps 0.6 keeps conversations apart; leave --cache-ram on.")  # fmt: skip
    elif slots is not None:
        advice.append(
            "With several slots, -sps 0.6 keeps those that share a system prompt from evicting each other."
        )
    if isinstance(context, int) and context < 32768:
        few = f"{context:,} tokens of context a slot is less than agents send (16,000-60,000)"
        advice.append(f"{few}: raise -c or lower -np.")
    for line in advice:
        print(textwrap.fill(line, 100, initial_indent="- ", subsequent_indent="  "))
    return 0


# --- inspect: captures and llama-server logs ------------------------------------------------------

LOG_SHAPES = tuple(  # what a llama-server log line tells: (name, pattern); old and new wordings
    (name, re.compile(pattern))
    for name, pattern in (
        (
            "slot",
            r"slot by \w+ similarity.*?\b(?:f_)?sim\w* = (?P<sim>[\d.]+)(?:.*?\bf_keep = (?P<keep>[\d.]+))?",
        ),
        ("slot", r"selected slot by (?P<lru>LRU)"),
        (
            "prompt",
            r"new prompt, n_ctx_slot = \d+.*?(?:task\.n_tokens|n_prompt_tokens) = (?P<tokens>\d+)",
        ),
        ("counts", r"(?:n_past|n_tokens) = (?P<cached>\d+), new[ _]tokens = (?P<read>\d+)"),
        ("cached", r"(?:n_past|n_tokens) = (?P<cached>\d+), memory_seq_rm"),
        ("cached", r"kv cache rm \[(?P<cached>\d+), end\)"),
        ("full", r"[Ff]orcing full prompt (?P<forced>re-processing(?: due to [^(\n]*)?)"),
        (
            "eval",
            r"prompt eval(?: time)?\s*[=:]\s*(?P<ms>[\d.]+) ?ms\s*[/,]\s*(?P<read>\d+) tokens",
        ),
        ("cancel", r"cancel task, id_task = (?P<cancelled>\d+)"),
        ("start", r"server is listening on|loading model"),
    )
)
LOG_SLOT = re.compile(r"(?:\bid +|slot )(?P<slot>\d+) ?(?:\||:)(?: *task +(?P<task>\d+))?")
LOG_TYPES: dict[str, type] = {
    "lru": str,
    "forced": str,
    "sim": float,
    "keep": float,
    "ms": float,
}  # all others: int
LOG_LINE = 16384  # bytes; longer lines are no log lines
INSPECT_LINE = "{:>4} {:28} {:>9} {:>9} {:>6} {:>6}  {}"
INSPECT_HEAD = INSPECT_LINE.format("#", "request", "prompt", "read", "sim", "keep", "what happened")
INSPECT_LEGEND = (
    "prompt, read: tokens, and how many of them the server read (~: not reported, estimated from the text); sim: the share"
    " of the prompt that an earlier one began with; keep: the share of the slot's old content that stayed."
)
INSPECT_ADVICE = {  # the beginning of a cause -> what to do about it; `lost` brings its own
    "system": "For a shape that kvproxy does not know, LIFT_REGEX moves the text to the newest turn, STRIP_REGEX drops it.",
    "tools": "Tools came, went or changed: keep the list the same for the length of a conversation.",
    "tool ": "A tool's description changed: keep it the same for the length of a conversation.",
    "turn": "The client edits its own history (compaction and real edits cost one miss). Hybrid, recurrent and"
    " sliding-window models may read the whole prompt again.",
    "full re-processing": "The model is a hybrid, recurrent or sliding-window one, and there was no checkpoint in front of"
    " the change: --ctx-checkpoints, --swa-full.",
    "not kept": ADVICE["partly"][0].upper() + ADVICE["partly"][1:] + ".",
    "no similar slot": "A new conversation, or its slot was taken by another one: -np 4 -sps 0.6, more --cache-ram. If it"
    " is the same conversation every time, something near its start changes: capture it (CAPTURE_FILE) and inspect that.",
    "low similarity": "Something near the start of the prompt changes, or conversations share a slot (-np 4 -sps 0.6):"
    " send it through kvproxy, capture it (CAPTURE_FILE) and inspect that.",
}
INSPECT_ROW: Json = {  # None: not known; `cause` names what was wrong, `cured` says whether kvproxy mends that
    **dict.fromkeys(("name", "tokens", "read", "sim", "keep", "ms", "what", "cured")),
    "estimated": False,
    "cause": "",
}


def command_inspect(args: argparse.Namespace, config: Config) -> int:
    """What changed between requests, from a capture or a llama-server log."""
    try:
        file = sys.stdin.buffer if args.file == "-" else open(args.file, "rb")  # noqa: SIM115 - closed below
        size = 0 if args.file == "-" else os.path.getsize(args.file)
    except OSError as error:
        print(f"{args.file} cannot be read: {error.strerror or error}", file=sys.stderr)
        return 1
    findings: dict[str, Json] = {}
    number = 0  # of the last row
    if args.json:
        print('{"requests": [', end="")
    with file:
        for number, row in enumerate(inspect_rows(file, size, LogReader(config)), 1):
            if args.json:
                print(("," if number > 1 else "") + "\n" + json.dumps(row), end="")
            else:
                print((INSPECT_HEAD + "\n" if number == 1 else "") + inspect_line(number, row))
            if row["cause"]:
                new = {
                    "cause": row["cause"],
                    "requests": 0,
                    "tokens": 0,
                    "cured": 0,
                    "example": row["what"],
                }
                found = findings.setdefault(row["cause"], new)
                found["requests"] += 1
                found["tokens"] += row["read"] or 0
                found["cured"] += bool(row["cured"])
    told = sorted(findings.values(), key=lambda found: found["tokens"], reverse=True)
    for found in told:
        found["advice"] = inspect_advice(found)
    if args.json:
        print('\n], "findings": ' + json.dumps(told, indent=1) + "}")
        return 0
    if not number:
        print(
            "No request was recognised: this is neither a capture (JSON lines) nor a llama-server log (-lv 4)."
        )
        return 1
    print("\n" + textwrap.fill(INSPECT_LEGEND, 110))
    print("\nFindings, most tokens wasted first:" if told else "\nNothing was wasted.")
    for found in told:
        waste = (
            f"{counted(found['requests'], 'request')}, about {found['tokens']:,} tokens read again."
        )
        text = f"{found['cause']}: {waste} {found['advice']}"
        print(textwrap.fill(text, 110, initial_indent="- ", subsequent_indent="  "))
    return 0


def inspect_rows(file: Any, size: int, reader: LogReader) -> Iterator[Json]:
    """The rows of a file, one by one; progress goes to stderr when a person looks. `size` is in
    bytes, 0: not known."""
    shown = time.monotonic()
    while line := file.readline(PARSE_LIMIT):
        yield from reader.line(line)
        if size and time.monotonic() - shown > 1 and sys.stderr.isatty():
            print(f"{100 * file.tell() // size}%\r", end="", file=sys.stderr, flush=True)
            shown = time.monotonic()
    yield from reader.end()


def inspect_line(number: int, row: Json) -> str:
    mark = "~" if row["estimated"] else ""
    tokens, read = (
        "-" if row[key] is None else f"{mark}{row[key]:,}" for key in ("tokens", "read")
    )
    sim, keep = ("-" if row[key] is None else f"{row[key]:.3f}" for key in ("sim", "keep"))
    return INSPECT_LINE.format(number, row["name"][:28], tokens, read, sim, keep, row["what"])


def inspect_advice(found: Json) -> str:
    """What to do about a finding."""
    if found["cause"].startswith("lost"):
        return str(found["example"]).partition(": ")[2] + "."
    if found["cured"] == found["requests"]:
        return "kvproxy cures this: nothing to do but to send the requests through it."
    advice = next(text for name, text in INSPECT_ADVICE.items() if found["cause"].startswith(name))
    return (f"kvproxy cures {found['cured']} of them. " if found["cured"] else "") + advice


class LogReader:
    """Reads a capture or a server log line by line; a row per request comes out when it is
    complete."""

    def __init__(self, config: Config) -> None:
        limit = config.ledger_mb << 20
        self.ledger, self.cured = (
            Ledger(limit),
            Ledger(limit),
        )  # as captured, and as kvproxy would have sent it
        self.scrubber, self.replay = Scrubber(config), Replay(config)
        self.ended, self.lost_at = 0.0, -1.0
        self.tasks: dict[str, Json] = {}  # slot -> what is known of the task in it
        self.slot, self.longest = (
            "?",
            0,
        )  # the slot that the log spoke of last; the longest prompt since a start

    def line(self, raw: bytes) -> list[Json]:
        """The rows that a line completes; none for anything that is neither a capture's nor a log's
        line."""
        try:
            row = members(json.loads(raw, **_FINITE)) if raw.lstrip()[:1] == b"{" else {}
            if "body" in row and isinstance(row.get("path"), str):
                return self.captured(row)
            return self.logged(raw.decode("utf-8", "replace")) if len(raw) <= LOG_LINE else []
        except (ValueError, RecursionError, OverflowError):
            return []  # half a line, too deep, or a number that is none

    # --- captures ---------------------------------------------------------------------------------

    def captured(self, row: Json) -> list[Json]:
        dialect, counting = dialect_of(row["path"])
        body = json.loads(row["body"]) if isinstance(row["body"], str) else row["body"]
        view = view_of(body, dialect) if dialect is not None and not counting else None
        if view is None:
            return []
        now = row["time"] if isinstance(row.get("time"), (int, float)) else 0.0
        status = row.get("status", 200)
        name = f"{row['path'].split('?')[0].removeprefix('/v1')[1:]}, {len(view.turns)} items"
        if status not in (0, 200):
            self.lost_at = now if status in (502, 503, 504) else self.lost_at
            return [dict(INSPECT_ROW, name=name, what=f"status {status}")]
        headers = {
            str(key).lower(): str(value) for key, value in members(row.get("headers")).items()
        }
        side = side_of(view.body, headers, view)
        segments = segments_of(view)
        verdict = self.ledger.judge(
            segments, self.replay.conversation(view), side, now, self.lost_at
        )
        told: Json = {
            key: n for key, n in members(row.get("usage")).items() if isinstance(n, (int, float))
        }
        usage = Usage(told.get("prompt"), told.get("cached"), told.get("prompt_ms"))
        if estimated := usage.read() is None:
            usage.prompt = sum(len(segment.text) for segment in segments) // 4
            usage.cached = round(usage.prompt * verdict.share)
        else:
            settle(verdict, usage, now - self.ended if self.ended else 0.0)
        self.ended = now
        line, cured = verdict.line(), self.cure(view, side).name != "rewritten"
        what = verdict.name + (f" ({side})" if side else "") + (f": {line}" if line else "")
        found = dict(
            INSPECT_ROW, name=name, what=what, sim=round(verdict.share, 3), ms=usage.prompt_ms
        )
        found.update(tokens=usage.prompt, read=usage.read(), estimated=estimated)
        if line and not side:
            found.update(cause=cause_of(verdict), cured=cured and verdict.name == "rewritten")
        return [found]

    def cure(self, view: View, side: str) -> Verdict:
        """What the verdict would be on the prompt as kvproxy sends it. Changes the view."""
        if view.dialect.edited:
            report = Report()
            self.scrubber.apply(view, report)
            self.replay.apply(view, lift(view, self.replay), report)
        return self.cured.judge(segments_of(view), self.replay.conversation(view), side)

    # --- logs -------------------------------------------------------------------------------------

    def logged(self, text: str) -> list[Json]:
        """A line of llama-server's log; what stands in front of it (docker, journal, router) does
        not matter."""
        found = LOG_SLOT.search(text)
        if found:
            self.slot = found["slot"]
        name, match = next(
            ((name, hit) for name, shape in LOG_SHAPES if (hit := shape.search(text))), ("", None)
        )
        if match is None:
            return []
        if name == "start":
            return self.end()
        if name == "cancel":
            slots = [
                slot for slot, task in self.tasks.items() if task.get("task") == match["cancelled"]
            ]
            return [self.close(slot, ", cancelled") for slot in slots]
        task, done = self.tasks.get(self.slot, {}), []
        known = "tokens" in task
        if name == "slot" or (
            known and name in ("prompt", "counts")
        ):  # the slot's next task begins
            done = [self.close(self.slot)] if known else []
            task = {}
        self.tasks[self.slot] = task
        if found and found["task"]:
            task["task"] = found["task"]
        for key, value in match.groupdict().items():
            if value and (name == "eval" or key not in task):
                task[key] = LOG_TYPES.get(key, int)(value)
        if name == "counts":
            task["tokens"] = task["cached"] + task["read"]
        return [*done, self.close(self.slot)] if name == "eval" else done

    def close(self, slot: str, suffix: str = "") -> Json:
        """The row of a slot's task."""
        task = self.tasks.pop(slot)
        tokens, read, cached, sim, keep = (
            task.get(key) for key in ("tokens", "read", "cached", "sim", "keep")
        )
        if read is None and tokens is not None and cached is not None:
            read = tokens - cached
        size = tokens or read or 0
        first, self.longest = size > 2 * self.longest, max(size, self.longest)
        cause, what = "", "read" if tokens is None else "reused"
        if "forced" in task and "lru" not in task:
            cause, what = "full re-processing", f"full {task['forced'].strip()}"
        elif size > 512 and read is not None and tokens is not None and 2 * read > tokens:
            if sim is not None and sim >= 0.5:
                cause, what = "not kept", "the slot held a similar prompt, but most was read again"
            elif sim is not None:
                cause, what = "low similarity", "little in common with what the slot held"
            elif first:
                what = "first prompt of its length"
            else:
                cause, what = "no similar slot", "no slot held a similar prompt"
        if keep is not None and keep < 0.5 and sim is not None and sim >= 0.5:
            what += ", and most of what the slot held was thrown away (-sps 0.6)"
        row = dict(INSPECT_ROW, name=f"slot {slot}", what=what + suffix, cause=cause)
        return row | {
            "tokens": tokens,
            "read": read,
            "sim": sim,
            "keep": keep,
            "ms": task.get("ms"),
        }

    def end(self) -> list[Json]:
        """The rows of tasks that no line will end: the log stops here, or the server was started
        anew."""
        done = [self.close(slot) for slot, task in list(self.tasks.items()) if "tokens" in task]
        self.tasks.clear()
        self.longest = 0
        return done


def cause_of(verdict: Verdict) -> str:
    """A name that the same fault has on every request: the place, and the words before what
    changes."""
    if verdict.name == "lost":
        return f"lost, {verdict.kind}"
    place = "turn" if verdict.where.startswith("turn ") else verdict.where
    if verdict.kind in ("taken out", "put in"):
        start = re.sub(r"\d+", "#", (verdict.before or verdict.after)[:40])
        return f"{place} {verdict.kind}: {start!r}"
    label = verdict.before[: common_prefix(verdict.before, verdict.after)]
    label = re.sub(r"\d+", "#", re.sub(r"[\w.:+-]*$", "", label))[-24:].strip()
    return f"{place}, {verdict.kind}" + (f" after {label!r}" if re.search(r"\w", label) else "")


# --- main -----------------------------------------------------------------------------------------


def command_serve(args: argparse.Namespace, config: Config) -> int:
    """Listen until Ctrl-C or SIGTERM, then let answers end."""
    proxy = Proxy(config)
    try:
        handler = (
            logging.FileHandler(config.log_file, encoding="utf-8")
            if config.log_file
            else logging.StreamHandler()
        )
    except OSError as error:
        raise ConfigError(f"LOG_FILE={config.log_file!r}: cannot be written ({error})") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    proxy.log.addHandler(handler)
    try:
        proxy.start()
    except OSError as error:
        where = f"Port {config.listen_port} on {config.listen_host}"
        print(f"{where} cannot be used: {error}. Set LISTEN_PORT or LISTEN_HOST.", file=sys.stderr)
        return 1
    with contextlib.suppress(KeyboardInterrupt):
        for name in ("SIGTERM", "SIGBREAK"):  # Windows has no SIGTERM to speak of, Unix no SIGBREAK
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.default_int_handler)
        proxy.log.info(
            "kvproxy %s listens on %s (status page: %s/kvproxy)", __version__, proxy.url, proxy.url
        )
        if found := proxy.backend.describe():
            proxy.log.info("backend %s: %s", proxy.backend.name(), described(found))
        else:
            advice = f"Is it running, is BACKEND_URL right? {USUAL_PORTS} It is looked for again when requests come."
            proxy.log.warning("backend: none answers yet at %s. %s", proxy.backend.name(), advice)
        while True:
            time.sleep(0.5)  # Windows runs the SIGBREAK handler between sleeps only
    proxy.log.info("stopping: answers in progress may end (%d s)", DRAIN_SECONDS)
    proxy.stop()
    return 0


def build_parser() -> argparse.ArgumentParser:
    lines = ["settings (environment variables):"]
    for name, default, text in Config.table():
        first = f"  {name:18} {text}" + (f" [{default}]" if default else "")
        lines.append(textwrap.fill(first, 118, subsequent_indent=" " * 21))
    parser = argparse.ArgumentParser(
        prog="kvproxy.py",
        description="Makes llama-server's prefix cache hit for agents that put clocks and ids in front of their prompts.",
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvproxy {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parser.set_defaults(run=command_serve)
    for name, run, text in (
        ("serve", command_serve, "listen and forward (the default)"),
        ("demo", command_demo, "show the effect on a simulated server; needs nothing"),
        (
            "bench",
            command_bench,
            "measure the effect on the server at BACKEND_URL (API_KEY: its key)",
        ),
        ("inspect", command_inspect, "explain a capture or a llama-server log"),
        (
            "check",
            command_check,
            "tell what the backend is and what hurts its cache (API_KEY: its key)",
        ),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        if name == "inspect":
            command.add_argument("file", metavar="FILE", help="- reads stdin")
        if name in ("demo", "bench"):
            tokens = 6000 if name == "demo" else 16000
            command.add_argument(
                "--tokens", type=positive, default=tokens, help="length of the prompt [%(default)s]"
            )
            command.add_argument(
                "--turns", type=positive, default=5, help="turns of the conversation [%(default)s]"
            )
        if name in ("demo", "bench", "inspect"):
            command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    if reconfigure := getattr(
        sys.stdout, "reconfigure", None
    ):  # texts may hold what its encoding does not
        reconfigure(errors="backslashreplace", line_buffering=True)
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args, Config.from_env(os.environ)))
    except ConfigError as error:
        print(f"kvproxy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout has seen enough: `inspect FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
