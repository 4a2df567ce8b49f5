#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the kvproxy authors
# /// script
# requires-python = ">=3.10"
# dependencies = []
# ///
"""kvproxy: makes llama-server's prefix cache hit for agents that put clocks and ids in front of
their prompts. One file, standard library only. Copy it anywhere and run it (--help shows more):

    python kvproxy.py demo                                 see what it does; needs no server
    python kvproxy.py BACKEND_URL=http://127.0.0.1:8080    serve on 127.0.0.1:1234

A prefix cache reuses a prompt only up to the first byte that differs from the last one. Agents
write ids, clocks and moving blocks near the front, so that a local model reads tens of thousands of
tokens again on every turn. kvproxy forwards what begins with what the server has already read:

    client -> read -> parse -> scrub -> lift -> replay -> forward -> relay -> client
                                                              usage -> explain -> log, page

The sections stand in that order. To use it from a program (importing starts nothing):

    from kvproxy import Config, Proxy, scrub
    with Proxy(Config(backend_url="http://127.0.0.1:8080", listen_port=0)) as proxy:
        print(proxy.url)
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - all of the file parses in 3.8, to tell this
    sys.exit("kvproxy needs Python 3.10 or newer. Try python3.12, or: uv run kvproxy.py")

import bisect
import codecs
import collections
import contextlib
import copy
import dataclasses
import difflib
import errno
import functools
import hashlib
import html
import http.client
import io
import ipaddress
import itertools
import json
import logging.handlers
import math
import os
import random
import re
import select
import shutil
import signal
import socket
import socketserver
import stat
import struct
import textwrap
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, cast

try:
    import ssl
except ImportError:  # a Python that was built without it: http backends only
    AGAIN: tuple[type[OSError], ...] = (BlockingIOError,)
else:
    AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

__version__ = "2.0.0"
__all__ = ["Config", "ConfigError", "Proxy", "Report", "scrub"]

Json = dict[str, Any]


# ==================================================================================================
# Configuration: one dataclass feeds the environment, --help and the check of values
# ==================================================================================================


class ConfigError(ValueError):
    """A setting has a value that cannot be used; the message says which, and what is allowed."""


def setting(default: Any, help: str, *allowed: Any) -> Any:
    """A Config field. `allowed`: some words, or the least and the largest number."""
    return dataclasses.field(default=default, metadata={"help": help, "allowed": allowed})


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting; the environment variable of the same name is in upper case. Raises ConfigError
    for a value that is not allowed: Config(listen_port=1235), Config.from_env(os.environ)."""

    listen_host: str = setting("127.0.0.1", "address; 0.0.0.0 lets other machines in")
    listen_port: int = setting(1234, "port to listen on; 0 takes any free one", 0, 65535)
    backend_url: str = setting("", "server; unset: what answers on 127.0.0.1:8080, :9931 or :12345")
    scrub: bool = setting(True, "0 forwards every body as it came: a pure logger")
    strip_message_ids: str = setting("system", "drop OpenClaw's ids; 1: all", "0", "1", "system")
    strip_timestamps: str = setting("auto", "drop time stamps; auto: if REPLAY=0", "auto", "0", "1")
    strip_billing: bool = setting(True, "drop Claude Code's billing header from the system prompt")
    strip_regex: tuple[str, ...] = setting((), "remove this from system and user")
    system_first: bool = setting(True, "one system text in front; later ones become reminders")
    lift: bool = setting(True, "move clocks, dates and git status from system to the newest turn")
    learn: bool = setting(True, "find what varies by comparing requests; 0: by names alone")
    lift_regex: tuple[str, ...] = setting((), "a line of the system prompt to lift")
    replay: bool = setting(True, "send history again as it was sent first; LIFT needs it")
    replay_regex: tuple[str, ...] = setting((), "what comes and goes in user turns")
    replay_mb: int = setting(64, "MB for replay, and as many for turns read before", 1, 65536)
    ledger_mb: int = setting(64, "MB for the prompts that explain compares with", 1, 65536)
    keep_requests: int = setting(50, "requests kept for the status page, with bodies", 0, 10000)
    warn_reuse: float = setting(0.5, "warn below this hit rate of the last 20 requests", 0, 1)
    capture_file: str = setting("", "append every request to this file (JSON lines, no secrets)")
    capture_mb: int = setting(100, "MB at which it is rotated; one old one is kept", 1, 1000000)
    warmup_file: str = setting("", "remember recent heads here, and read them in after a start")
    warmup_heads: int = setting(4, "how many heads are remembered", 1, 64)
    keepalive_seconds: int = setting(0, "idle seconds until the newest head is sent", 0, 864000)
    prefill_ahead: str = setting("auto", "have the next prompt read in idle time", "auto", "0", "1")
    prefill_ahead_seconds: float = setting(0.5, "idle seconds before that", 0.05, 3600)
    connect_timeout: float = setting(5.0, "seconds to wait for a connection", 0.05, 600)
    read_timeout: float = setting(3600.0, "seconds without a byte from the server", 0.05, 864000)
    header_timeout: float = setting(15.0, "seconds for a request's head", 0.05, 3600)
    max_body_mb: int = setting(100, "largest request body in MB", 1, 65536)
    max_connections: int = setting(2048, "clients at a time; idle ones give way", 1, 100000)
    allowed_hosts: str = setting("", "more names that the Host header may carry, between commas")
    log_level: str = setting("info", "verbosity", "debug", "info", "warning", "error")
    log_file: str = setting("", "append the log to this file (mode 0600); unset: stderr")

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, _checked(item, value))
            except (ValueError, TypeError, re.error, OverflowError, RecursionError) as error:
                raise ConfigError(f"{item.name.upper()}={value!r}: {error}") from None
        url = urllib.parse.urlsplit(self.backend_url)
        port = url.port or (443 if url.scheme == "https" else 80)
        hosts = {url.hostname or "", self.listen_host.lower()}
        here = hosts <= {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"}
        if port == self.listen_port and (here or len(hosts) == 1):
            fault = "must not be kvproxy's own address; set LISTEN_PORT"
            raise ConfigError(f"BACKEND_URL={self.backend_url!r}: {fault}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Config:
        """The settings found in `environ` (usually os.environ). An empty value counts as unset."""
        values: dict[str, Any] = {}
        for name in sorted(environ, key=lambda name: (len(name), name)):  # ..., _9, _10
            item, text = setting_of(name), environ[name]
            if item and text.strip():
                pattern = item.default == ()
                values[item.name] = (*values.get(item.name, ()), text) if pattern else text.strip()
        return cls(**values)

    @classmethod
    def table(cls) -> list[tuple[str, str, str]]:
        """(variable, default, meaning) of every setting, for --help and the README."""
        rows = []
        for item in dataclasses.fields(cls):
            name, default, about = item.name.upper(), item.default, item.metadata["help"]
            if default == ():
                default, about = "", f"{about}; more: {name}_2, _3, ..."
            rows.append((name, default if type(default) is str else f"{default:g}", about))
        return rows


VARIABLE = re.compile("([A-Z_]+?)(_[0-9]+)?")
_NAME = r"[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
_IPV6 = r"[0-9a-fA-F.]*:[0-9a-fA-F:.]*(?:%\w+)?"
IS_HOST = re.compile(rf"{_NAME}|{_IPV6}", re.ASCII)
URL = re.compile(
    rf"(https?://)?(?:{_NAME}|\[{_IPV6}\])(?::([1-9]\d{{0,4}}))?(?:/[!\"$->@-~]*)?", re.ASCII
)
_WORDS = dict.fromkeys(("1", "true", "yes", "on"), True)
_WORDS |= dict.fromkeys(("0", "false", "no", "off"), False)
_TYPES = {bool: "0 or 1", int: "a whole number", float: "a number", str: "a text", tuple: "texts"}


def setting_of(variable: str) -> dataclasses.Field[Any] | None:
    """The setting that an environment variable is for: NAME, or of a pattern NAME_2, NAME_3, ..."""
    match = VARIABLE.fullmatch(variable)
    item = Config.__dataclass_fields__.get(match[1].lower()) if match else None
    return item if item and match and (not match[2] or item.default == ()) else None


def misspelt(environ: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(variable, setting) of variables that were most likely meant to be a setting: a letter is
    missing, too many, another or in the wrong place."""
    names = [item.name.upper() for item in dataclasses.fields(Config)]
    for variable in environ:
        bare = variable.upper().removeprefix("KVPROXY_")
        for name in names if not setting_of(variable) else ():
            if abs(len(name) - len(bare)) <= 1:
                likeness = difflib.SequenceMatcher(None, bare, name).ratio()
                if likeness >= 1 - 1 / len(name):
                    yield variable, name


def _checked(item: dataclasses.Field[Any], value: Any) -> Any:
    """A setting's value, which may be given as text. Raises an error that tells what is allowed."""
    kind: Any = type(item.default)
    allowed = item.metadata["allowed"]
    try:
        if kind is bool:
            value = _WORDS[str(value).lower()]
        elif kind in (int, float):
            value = kind(str(value))
        elif not isinstance(value, kind):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"must be {_TYPES[kind]}") from None
    if kind is tuple:
        for pattern in value:
            re.compile(pattern)
    elif kind is str and allowed:
        value = value.lower()
        if value not in allowed:
            raise ValueError("must be one of " + ", ".join(allowed))
    elif allowed and not allowed[0] <= value <= allowed[1]:  # NaN fails both comparisons
        raise ValueError(f"must be from {allowed[0]} to {allowed[1]}")
    elif item.name == "listen_host" and not IS_HOST.fullmatch(value):
        raise ValueError("must be an address or a host name")
    elif item.name == "backend_url" and value:
        found = URL.fullmatch(value)
        if not found or not any(found.groups()) or int(found[2] or 80) > 65535:
            raise ValueError("must be http://host[:port][/prefix] or https://...")
        value = value if found[1] else "http://" + value
    return value


# ==================================================================================================
# Dialects: four request shapes, one view (an ordered list of turns)
# ==================================================================================================


class Dialect(NamedTuple):
    """A request's shape: the body's keys for system text and turns, the type of a text part."""

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
# count_tokens (Anthropic) and input_tokens (llama-server) count what the other path would read.
DIALECT_PATH = re.compile(
    r"/(?:v1/)?(chat/completions|responses|messages|completions?)(/(?:count|input)_tokens)?/?"
)
TEXT_PARTS = ("text", "input_text", "output_text")  # a tuple: a client's type may be unhashable
UNSAID_PARTS = (*TEXT_PARTS, "thinking", "redacted_thinking",
                "reasoning", "reasoning_text", "summary_text")  # fmt: skip
ROLES = {role: role for role in ("system", "user", "assistant", "tool", "reasoning")}
ROLES |= {"developer": "system", "function": "tool", "function_call": "assistant"}
ROLES |= {"function_call_output": "tool", "custom_tool_call": "assistant"}  # Responses items
ROLES |= {"custom_tool_call_output": "tool"}


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

    def set(self, text: Any) -> None:
        """Replace it, and forget what was found out about the turn."""
        self.holder[self.key], turn = text, self.turn
        turn.raw = turn.scrubbed = turn.said = turn.told = None


@dataclasses.dataclass(slots=True, eq=False)
class Turn:
    """One entry of a prompt: its content `holder[key]`, its JSON object in the list `item`, or
    None for text beside it. Requests share turns, with what was found out, so edit own() copies
    only."""

    role: str  # system (developer, too), user, assistant, tool, reasoning, other
    holder: Json
    key: str
    item: Json | None
    raw: bytes | None = None  # the item as JSON
    scrubbed: tuple[bool, Turn | None, collections.Counter[str]] | None = None  # see Scrubber
    said: Said | None = None  # for Replay
    told: str | None = None  # for the ledger: all that the server reads of it

    def own(self) -> Turn:
        """A copy that may be edited."""
        if self.item is None:
            return self
        item = dict(self.item)
        if isinstance(content := item.get(self.key), list):
            item[self.key] = [dict(part) if isinstance(part, dict) else part for part in content]
        return Turn(self.role, item, self.key, item)

    def refit(self, content: Any) -> None:
        """Replace the content as a whole."""
        Slot(self, self.holder, self.key).set(content)

    def json(self) -> bytes:
        """The item as JSON: as it came, if nobody changed it."""
        if self.raw is None:
            self.raw = dump(self.item)
        return self.raw

    def slots(self) -> list[Slot]:
        """The texts that a person or the client wrote, not tool calls and their results."""
        content = self.holder.get(self.key)
        if isinstance(content, str):
            return [Slot(self, self.holder, self.key)]
        found = []
        for index, part in enumerate(listed(content)):
            if isinstance(part, str):
                found.append(Slot(self, content, index))
            elif members(part).get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
                found.append(Slot(self, part, "text"))
        return found

    def text(self) -> str:
        return "\n".join([slot.get() for slot in self.slots()])


@dataclasses.dataclass(slots=True)
class View:
    """A request body as turns. `head` is system text beside the list; `turns` are the list's
    entries as they are now, `body` has them as they came."""

    body: Json
    dialect: Dialect
    head: list[Turn]
    turns: list[Turn]

    def leading(self) -> int:
        """How many turns at the start of the list are system messages."""
        for count, turn in enumerate(self.turns):
            if turn.role != "system":
                return count
        return len(self.turns)

    def system(self) -> list[Turn]:
        """The turns that make the system prompt."""
        return self.head + self.turns[: self.leading()]

    def replace(self, turn: Turn, new: Turn) -> Turn:
        """Put a changed turn in a turn's place."""
        if new is not turn:
            self.turns[self.turns.index(turn)] = new
        return new

    def dump(self) -> bytes:
        """The body as JSON, with the turns that nobody changed in the bytes they came in."""
        if self.turns and self.turns[0].item is None:
            return dump(self.body)
        turns = b",".join([turn.json() for turn in self.turns])
        front, end = dump({**self.body, self.dialect.turns: HOLE}).split(b'"%s"' % HOLE.encode())
        return b"".join((front, b"[", turns, b"]", end))


def turn_of(item: Json) -> Turn:
    """A turn from an entry of `messages` or `input`. An Anthropic user message that only carries
    tool results has the role tool. Raises Unreadable."""
    name, parts = item["role"] if "role" in item else item.get("type"), listed(item.get("content"))
    role = ROLES.get(str(name), "other")  # str: a client may send what cannot be hashed
    check_limit("parts of a turn", len(parts))
    if parts and role == "user":
        results = all(members(part).get("type") == "tool_result" for part in parts)
        role = "tool" if results else role
    key = "output" if "output" in item and "content" not in item else "content"
    return Turn(role, item, key, item)


def view_of(body: Any, dialect: Dialect) -> View:
    """The view of a parsed body. Raises Unreadable when its shape is not the dialect's."""
    body = members(body)
    items, head = body.get(dialect.turns), []
    if dialect.system and body.get(dialect.system):
        head = [Turn("system", body, dialect.system, None)]
    if isinstance(items, str) and dialect.turns != "messages":
        turns = [Turn("user", body, dialect.turns, None)]
    elif isinstance(items, list) and dialect.turns == "prompt":
        turns = [Turn("other", body, "prompt", None)]
    elif isinstance(items, list) and all(isinstance(item, dict) for item in items):
        turns = [turn_of(item) for item in items]
    else:
        turns = None
    if turns is None or not all(turn.slots() for turn in head):
        raise Unreadable("unknown shape")
    return View(body, dialect, head, turns)


def goes_on_elsewhere(view: View) -> bool:
    """Whether the server holds a part of the prompt: a stored response, or items by reference."""
    if view.dialect.name != "responses":
        return False
    stored = view.body.get("previous_response_id") or view.body.get("conversation")
    return bool(stored) or any(
        (turn.item or {}).get("type") == "item_reference" for turn in view.turns
    )


def guess_dialect(body: Any) -> Dialect:
    """The dialect that a body is most likely in, when no path tells."""
    keys = members(body)
    if "messages" in keys:
        return DIALECTS["messages" if "system" in keys else "chat/completions"]
    return DIALECTS["responses" if "input" in keys else "completions"]


class Unreadable(ValueError):
    """The body is forwarded as it came; the message says why."""


def _pairs(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Unreadable("duplicate keys")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Unreadable(f"no finite number ({text[:20]})")
    return number


_FINITE: Json = {"parse_float": _finite, "parse_constant": _finite}
_strict = json.JSONDecoder(object_pairs_hook=_pairs, **_FINITE)
_parse_at = _strict.raw_decode
_compact_json = json.JSONEncoder(separators=(",", ":")).encode
_sorted_json = json.JSONEncoder(sort_keys=True).encode
PARSE_LIMIT = 32 << 20  # bytes; parsing takes several times that, and no model reads so much


def parse(raw: bytes | bytearray | str) -> Json:
    """The JSON object in `raw`. Raises Unreadable for all that could not be written again with the
    same meaning."""
    if len(raw) > PARSE_LIMIT:
        raise Unreadable(f"longer than {PARSE_LIMIT >> 20} MB")
    try:
        body = _strict.decode(raw if isinstance(raw, str) else raw.decode())
    except Unreadable:
        raise
    except (ValueError, RecursionError) as error:
        why = {UnicodeDecodeError: "not UTF-8", RecursionError: "nested too deeply"}
        raise Unreadable(why.get(type(error), f"not JSON ({error})")) from None
    if not isinstance(body, dict):
        raise Unreadable("not a JSON object")
    return body


def dump(body: Any) -> bytes:
    """Compact JSON. ASCII escapes are faster than UTF-8 and keep lone surrogates."""
    return _compact_json(body).encode("ascii")


def bare(part: Json) -> Json:
    """A content part, item or tool without what llama-server does not read."""
    return {key: value for key, value in part.items() if key != "cache_control"}


HOLE = uuid.uuid4().hex  # stands in a body where its turns were; nobody can have written it
LIST_START = {
    key: re.compile(rb'"%s":[ \t\r\n]*\[[ \t\r\n]*(?=(\{"\w+": ?))' % key.encode())
    for key in ("messages", "input")
}
ITEM_END = re.compile(rb"[ \t\r\n]*([,\]])[ \t\r\n]*")
Known = tuple[bytes, Turn]  # a turn behind the bytes in which it came


class Reader:
    """Makes views of bodies, and remembers turns by their bytes: each request brings its
    conversation's history again, which need be parsed only once. Safe to use from many threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes that the turns may take
        self.forget()

    def forget(self) -> None:
        """Start anew, which costs one slow request."""
        self.known: dict[bytes, Known] = {}  # by the bytes they were read from
        self.followers: dict[int, tuple[Known, bytes]] = {}  # by the id() of the turn in front
        self.bodies: dict[bytes, Json] = {}  # what stands beside the turns, by its bytes
        self.size = 0  # bytes that the turns take, roughly

    def view(self, raw: bytes | bytearray, dialect: Dialect) -> View:
        """The view of a body. Raises Unreadable."""
        with contextlib.suppress(ValueError, RecursionError):  # then it is parsed as a whole
            if dialect.edited and len(raw) <= PARSE_LIMIT:
                return self.split(raw, dialect)
        return view_of(parse(raw), dialect)

    def split(self, raw: bytes | bytearray, dialect: Dialect) -> View:
        """The view of a body, read turn by turn. Raises ValueError or RecursionError where that
        does not work out."""
        key = dialect.turns
        found = LIST_START[key].search(raw)
        if found is None:
            raise Unreadable("not the usual spelling")
        turns, end = self.read(raw, found.end(), found[1])
        rest = b'%s"%s":"%s"%s' % (raw[: found.start()], key.encode(), HOLE.encode(), raw[end:])
        body = self.bodies.get(rest)
        if body is None:
            body = parse(rest)
            if len(rest) <= 1 << 18:
                remember(self.bodies, rest, body, 16)
        if body.get(key) != HOLE:
            raise Unreadable("the list is another's")
        body = {**body, key: []}
        if isinstance(body.get(dialect.system), list):  # its texts may be edited
            body[dialect.system] = copy.deepcopy(body[dialect.system])
        view = view_of(body, dialect)
        view.turns = turns
        return view

    def read(self, raw: bytes | bytearray, at: int, opening: bytes) -> tuple[list[Turn], int]:
        """The turns of the list whose first one is at `at`, and where the list ends. What came
        behind a turn before is tried first. Else a turn is looked for up to the next `opening`,
        with which each begins, as a rule; only what is new is decoded and parsed."""
        border = (b"}, " if opening.endswith(b" ") else b"},") + opening
        turns: list[Turn] = []
        before = 0
        text, place, text_end = "", 0, at  # what was decoded, up to where in `raw`
        while True:
            while at >= text_end and (follower := self.followers.get(before)):
                (item, turn), comma = follower
                end = at + len(item)
                if not (raw.startswith(item, at) and raw.startswith(comma, end)):
                    break
                turns.append(turn)
                before = id(turn)
                at = end + len(comma)
            check_limit("turns", len(turns))
            if at >= text_end:
                text, place, text_end = "", 0, raw.find(border, at) + 1 or len(raw)
            found = None if text else self.known.get(bytes(raw[at:text_end]))
            if found is None:
                text = text or raw[at:text_end].decode()
                try:
                    parsed, stop = _parse_at(text, place)
                except ValueError:  # it holds a list of its own with this opening
                    text, place, text_end = raw[at:].decode(), 0, len(raw)
                    parsed, stop = _parse_at(text, 0)
                found = self.turn(parsed, text[place:stop].encode())
                place = stop
            turns.append(found[1])
            end = at + len(found[0])
            comma_or_end = ITEM_END.match(raw, end)
            if comma_or_end is None:
                raise Unreadable("not the usual spelling")
            at = comma_or_end.end()
            if comma_or_end[1] == b"]":
                return turns, at
            if found[0] in self.known:
                self.followers[before] = found, bytes(raw[end:at])
            before = id(found[1])
            place += at - end

    def turn(self, item: Any, raw: bytes) -> Known:
        """The turn with these bytes, and they."""
        if not isinstance(item, dict):
            raise Unreadable("unknown shape")
        if known := self.known.get(raw):
            return known
        turn, size = turn_of(item), 1500 + 3 * len(raw)
        turn.raw = raw
        if size <= self.limit:
            if self.size + size > self.limit:
                self.forget()
            self.known[raw] = raw, turn
            self.size += size
        return raw, turn


@dataclasses.dataclass
class Report:
    """What was done to one request: numbers of turns (items, items_modified), of texts taken out,
    moved, lifted, sent again or left out; `note` says why a body was left alone."""

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
        about = ("items", "items_modified", "note")
        return sum(number for name, number in vars(self).items() if name not in about)


# ==================================================================================================
# Scrub: rules that take out what never helps the model. The same text in, the same text out
# ==================================================================================================

# More of it than any agent sends: such a body is forwarded as it came.
LIMITS = {"turns": 8000, "parts of a turn": 500, "tools": 2000, "decorations of a text": 256}


def check_limit(what: str, count: int) -> None:
    """Raise Unreadable if there are more than LIMITS allows."""
    if count > LIMITS[what]:
        raise Unreadable(f"too many {what}")


Span = tuple[int, int]  # from the first character to the one behind the last


def without(text: str, spans: list[Span]) -> str:
    """A text without some parts of it; those may overlap."""
    kept, at = [], 0
    for start, end in sorted(spans):
        kept.append(text[at:start])
        at = max(at, end)
    return "".join([*kept, text[at:]])


# --- decorations: what clients put in front of a user text, and behind it -------------------------

_TIME = (
    r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?"
    r"(?: [A-Z]{2,5}(?:[+-]\d{1,2}(?::\d\d)?)?|Z)"
)
_CHANNEL = (  # begins an envelope's label; "[Meeting Thu 2026-05-07 ..." is somebody's own words
    r"(?:BlueBubbles|Discord|Feishu|Google ?Chat|IRC|LINE|Matrix|Mattermost|MSTeams|Teams"
    r"|Nextcloud Talk|Nostr|Signal|Slack|Telegram|Tlon|Twitch|WebChat|WhatsApp|Zalo|iMessage)"
)
# [Wed 2026-02-18 20:48 UTC] or [Matrix room:ops Thu 2026-05-07 08:01:33 GMT+1]. Older envelopes
# without a weekday name the sender, are stored with the message, and never vary.
_STAMP = rf"\[(?:{_CHANNEL}(?: [^\]\n]{{1,120}})? )?{_TIME}\](?: |(?=\n)|\Z)"
_TRUST = r"(?: \((?:untrusted|trusted)[^)\n]{0,100}\):|: \u27e6openclaw:ctx\u27e7)"
_BLOCK = rf"[A-Z][^\n:()\[\]]{{1,80}}{_TRUST} ?\n```(?:json)?\n"
_CONTEXT = r"(?:Conversation|Untrusted) context \((?:untrusted|metadata)[^\n]*\):\n(?=[^\n])"
_REPLIED = r"Current message:\n(?:\[Replying to: [^\n]*\]\n)?#[^\s:]+ [^\n:]{1,120}: "
_EVENT = r"System(?: \(untrusted\))?:"
_EVENTS = rf"{_EVENT} \[\d{{4}}-\d\d-\d\d [^\n]*(?:\n+{_EVENT} [^\n]*)*"
_INNER_END = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"

LEADS = (  # (kind, how it begins, how it ends; nothing: where the beginning does)
    ("stamp", _STAMP, ""),
    ("block", _BLOCK, r"\n```(?=\n|\Z)"),
    ("context", _CONTEXT, r"\n(?:\n|\Z)"),
    ("current", _REPLIED, ""),
    ("event", _EVENTS, ""),
    ("runtime", "OpenClaw runtime context for the ", rf"{_INNER_END}|\Z"),
    ("internal", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", _INNER_END),
    ("reminder", "<system-reminder>", "</system-reminder>"),
    ("environment", "<environment_context>", "</environment_context>"),
    ("environment", "<environment_details>", "</environment_details>"),
    ("reply", r"\[Replying to ", r"\[/Replying\]"),
    ("line", r"\[(?:media attached:?|from:|Forwarded from) [^\]\n]*\](?=\n|\Z)", ""),
    ("line", r"Delivery: [^\n]*", ""),
)
LEAD = re.compile("|".join(f"({opening})" for _, opening, _ in LEADS))
LEAD_ENDS = [re.compile(ending) for _, _, ending in LEADS]
TAILS = (  # (kind, how it begins, how it ends); the first whose ending fits
    ("reminder", "<system-reminder>", "</system-reminder>"),
    ("environment", "<environment_details>", "</environment_details>"),
    ("line", "\n", ""),
)
TAIL_LINE = re.compile(
    r"\[(?:message_id|slack message id|media attached)[: ][^\]\n]*\]\Z|Runtime: agent=[^\n]* \| "
)


class Lead(NamedTuple):
    """A decoration at the start of a user text, with the newlines behind it."""

    kind: str
    start: int
    inner: int  # where its content begins
    end: int


def lead(text: str) -> list[Lead]:
    """The decorations at the start of a user text, in order; a second stamp was typed by the
    person. Raises Unreadable."""
    found: list[Lead] = []
    at = len(text) - len(text.lstrip())
    while opening := LEAD.match(text, at):
        row = (opening.lastindex or 0) - 1
        kind, closing = LEADS[row][0], LEAD_ENDS[row].search(text, opening.end())
        if closing is None or (kind == "stamp" and any(one.kind == kind for one in found)):
            break
        end = closing.end()
        while text.startswith("\n", end):
            end += 1
        found.append(Lead(kind, at, opening.end(), end))
        check_limit("decorations of a text", len(found))
        at = end
    return found


# --- ids, stamps, billing headers -----------------------------------------------------------------

_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'


def member(name: str) -> re.Pattern[str]:
    """A member of a JSON object; its value is plain, or an object of plain values."""
    values = rf'{_STRING}|[\w.+-]+|\{{(?:[^{{}}"]*{_STRING})*[^{{}}"]*\}}'
    return re.compile(rf'(?<!\\)"(?:{name})"\s*:\s*(?:{values})')


IDS = member("(?:message|reply_to)_id(?:_full)?|message_sid")
COMMA = re.compile(r"\s*,\s*")
INBOUND = re.compile(r'```(?:json)?\n\{[^{}`]*"schema"\s*:\s*"openclaw\.inbound_meta\.[^`]*')
LOG = re.compile(rf"(?:[^\n]*\n)?{_STAMP}")  # what follows a stamp that a person pasted
BILLING = re.compile(
    r"(?:x-anthropic-billing-header: [^\n]*|\[Anthropic\] Claude Code v\S+ \([^()\n]*\))(?:\n+|\Z)"
)
OPENCLAW = re.compile(  # what only its system prompt says
    r'(?m)"openclaw\.inbound_meta\.|^Runtime: agent=|^<!-- /?openclaw:'
    r"|running inside (?:OpenClaw|Clawdbot|Moltbot)\b"
)


def member_spans(text: str, pattern: re.Pattern[str], start: int, end: int) -> list[Span]:
    """Where such members stand; each with a comma, so that none dangles when they are cut."""
    spans: list[Span] = []
    for found in pattern.finditer(text, start, end):
        begin, stop = found.span()
        if comma := COMMA.match(text, stop):
            stop = comma.end()
        else:  # the one that is the last then loses its comma
            for before in reversed(spans):
                if before[1] != begin:
                    break
                begin = before[0]
            while text[begin - 1] in " \t\r\n,":
                begin -= 1
        spans.append((begin, stop))
    return spans


def inbound_members(text: str, pattern: re.Pattern[str]) -> list[Span]:
    """Members of OpenClaw's inbound object in a system prompt."""
    blocks = INBOUND.finditer(text)
    return [span for block in blocks for span in member_spans(text, pattern, *block.span())]


class Scrubber:
    """The rules that a configuration switches on, with the user's patterns compiled."""

    def __init__(self, config: Config) -> None:
        ids, stamps = config.strip_message_ids, config.strip_timestamps
        self.billing, self.system_ids, self.user_ids = config.strip_billing, ids != "0", ids == "1"
        self.stamps = stamps == "1" or (stamps == "auto" and not config.replay)
        self.patterns = [re.compile(pattern) for pattern in config.strip_regex]

    def apply(self, view: View, report: Report) -> None:
        """Edit a view, in place. Raises Unreadable for a body beyond LIMITS."""
        report.items = len(view.turns)
        check_limit("turns", len(view.turns))
        check_limit("tools", len(listed(view.body.get("tools"))))
        stamps = self.stamps and any(OPENCLAW.search(turn.text()) for turn in view.system())
        view.head = [self.edit(turn, stamps, report) for turn in view.head]
        view.turns = [
            self.edit(turn, stamps, report) if turn.role in ("system", "user") else turn
            for turn in view.turns
        ]
        for turn in view.system() if report.billing_removed else ():
            drop_empty(view, turn)

    def edit(self, turn: Turn, stamps: bool, report: Report) -> Turn:
        """A turn without what the rules take out; remembered with the turn."""
        if turn.scrubbed is None or turn.scrubbed[0] != stamps:
            turn.scrubbed = (stamps, *self.strip(turn, stamps))
        _, edited, counts = turn.scrubbed
        for name, number in counts.items():
            setattr(report, name, getattr(report, name) + number)
        report.items_modified += bool(counts)
        return edited or turn

    def strip(self, turn: Turn, stamps: bool) -> tuple[Turn | None, collections.Counter[str]]:
        """Run the rules over a turn; a text beside the list is edited in place."""
        edited, counts = turn.own(), collections.Counter[str]()
        begun = False  # the person's words: what follows them was pasted or attached
        for slot in edited.slots():
            text = slot.get()
            ids: list[Span] = []
            others: list[Span] = []
            if turn.role == "system":
                ids = inbound_members(text, IDS) if self.system_ids else []
                if self.billing and (header := BILLING.match(text)):
                    others = [header.span()]
                    counts["billing_removed"] += 1
            elif not begun:
                leads = lead(text)
                for one in leads:
                    if one.kind == "block" and self.user_ids:
                        ids += member_spans(text, IDS, one.inner, one.end)
                    elif one.kind == "stamp" and stamps and not LOG.match(text, one.inner):
                        others = [(one.start, one.inner)]
                        counts["ts_removed"] += 1
                begun = bool(text[leads[-1].end if leads else 0 :].strip())
            counts["msg_ids_removed"] += len(ids)
            left = without(text, ids + others)
            for pattern in self.patterns:
                whole, left = left, pattern.sub("", left)
                counts["regex_removed"] += left != whole
            if left != text:
                slot.set(left)
        counts = +counts
        return (edited if counts and edited is not turn else None), counts


def remember(memo: dict[Any, Any], key: Any, value: Any, most: int = 4096) -> None:
    """Keep a result; a full memo starts anew, which costs one slow request."""
    if len(memo) >= most:
        memo.clear()
    memo[key] = value


def drop_empty(view: View, turn: Turn) -> None:
    """Take the texts that edits left empty out of a turn of the system prompt; and the turn, when
    nothing else is in it."""
    content = turn.holder.get(turn.key)
    parts = content if isinstance(content, list) else [content]
    kept = [part for part in parts if str(members(part).get("text", part)).strip()]
    if len(kept) == len(parts):
        return
    if kept:
        view.replace(turn, turn.own()).refit(kept)
    elif turn.item is None:
        del turn.holder[turn.key]
        view.head.remove(turn)
    elif len(view.turns) > 1:
        view.turns.remove(turn)


# --- roles: the system text comes first -----------------------------------------------------------

END_OF_REMINDER = re.compile(r"</(?=system-reminder)")
KNOWN_TO_STAY = re.compile(r"# Environment\b")  # Claude Code's second system message
LONG_PROMPT = 2000  # characters of system text: less is read again in no time


def reminder(text: str) -> str:
    """A text as clients tell the model something beside what the user says."""
    return f"<system-reminder>\n{END_OF_REMINDER.sub('&lt;/', text.strip())}\n</system-reminder>"


def pays(view: View) -> bool:
    """Whether a request's front is long enough to care for."""
    size = sum([len(turn.text()) for turn in view.system()])
    return bool(view.body.get("tools")) or size >= LONG_PROMPT


def system_first(
    view: View, report: Report, stays: Callable[[Turn], bool] = lambda turn: False
) -> None:
    """One system text, at the front.

    Chat templates such as Qwen's refuse a system message anywhere else ("System message must be at
    the beginning"). So leading ones are merged, and so is the first one before any answer if it is
    known to stay: at the front every conversation shares it. Later ones become reminders in the
    user turns beside them, or behind the results that they stand in front of; so do short leading
    ones behind a long prompt, because what is said for one turn may not change the front. Messages
    with a name are examples and stay as they are."""
    systems = [turn for turn in view.turns if turn.role == "system"]
    if not systems or (systems == view.turns[:1] and not view.head):
        return  # in order
    named = any((turn.item or {}).get("name") or beside_texts(turn)[0] for turn in systems)
    if named or not all(turn.slots() for turn in view.head + systems):
        return  # examples, or an unknown shape
    front, kept, waiting = list(view.head), list[Turn](), list[Turn]()
    leading = early = True  # no other message, and neither answer nor later system message came
    cares = pays(view)
    for turn in [*view.turns, None]:
        role = turn.role if turn is not None else ""
        if turn is not None and role == "system":
            long, known = len(turn.text()) >= LONG_PROMPT, KNOWN_TO_STAY.match(turn.text())
            if leading:
                stay = known or long or not cares or not front
            else:
                stay = early and (known or (long and stays(turn)))
                early = False
            (front if stay else waiting).append(turn)
            continue
        leading, early = False, early and role not in ("assistant", "tool")
        if waiting and not (role == "tool" and kept and kept[-1].role in ("assistant", "tool")):
            report.system_moved += len(waiting)
            turn = remind(view, waiting, kept, turn)
            waiting = []
        if turn is not None:
            kept.append(turn)
    report.system_moved += len(front) - (1 if view.turns[0] in systems else len(view.head))
    if front and not view.head:
        first = front[0].own()
        if view.dialect.system and view.turns[0] not in systems:
            view.body[view.dialect.system] = first.text()
            view.head.append(Turn("system", view.body, view.dialect.system, None))
        else:
            kept.insert(0, first)
    if front[1:]:
        last = (view.head or kept)[0].slots()[-1]
        last.set("\n\n".join([last.get(), *[turn.text() for turn in front[1:]]]))
    view.turns = kept


def remind(view: View, systems: list[Turn], before: list[Turn], turn: Turn | None) -> Turn | None:
    """Say what system messages say in the user turn behind them, which is returned; else at the end
    of the one before, else in a message of its own."""
    text = "\n\n".join([reminder(one.text()) for one in systems])
    if turn is not None and turn.role == "user" and turn.slots():
        turn = turn.own()
        slot = turn.slots()[0]
        slot.set(text + "\n\n" + slot.get())
        return turn
    item = dict(before[-1].item or {}) if before else {}
    content = item.get("content") if item.get("role") == "user" else None
    if isinstance(content, list):
        item["content"] = [*content, {"type": view.dialect.text, "text": text}]
        before[-1] = turn_of(item)
    elif isinstance(content, str):
        item["content"] = f"{content}\n\n{text}" if content else text
        before[-1] = turn_of(item)
    else:
        before.append(turn_of({**(systems[-1].item or {}), "role": "user", "content": text}))
    return turn


def scrub(
    payload: Json, config: Config | None = None, dialect: str | None = None
) -> tuple[Json, Report]:
    """A scrubbed copy of a request body, and what was removed: the stateless half of kvproxy (rules
    and SYSTEM_FIRST). A body of unknown shape comes back equal, with `report.note` set. `dialect`
    is chat, responses, messages or completions; without it the body's shape decides. Raises
    ValueError for another one.

        body, report = scrub(body, Config(strip_message_ids="1"))"""
    config, report = config or Config(), Report()
    named = {row.name: row for row in DIALECTS.values()}
    if dialect is not None and dialect not in named:
        raise ValueError(f"dialect={dialect!r}: must be one of {', '.join(named)}")
    try:
        body = copy.deepcopy(payload)
        view = view_of(body, named[dialect] if dialect else guess_dialect(body))
        if config.scrub and view.dialect.edited:
            Scrubber(config).apply(view, report)
            if config.system_first:
                system_first(view, report)
            body = json.loads(view.dump())
    except RecursionError:
        return payload, Report(note="nested too deeply")
    except Unreadable as error:
        return payload, Report(note=str(error))
    return body, report


# ==================================================================================================
# Lift: what varies in the system prompt moves to the newest user turn, so that every conversation
# shares its front
# ==================================================================================================

Piece = tuple[list[Span], str]  # what one row found: where it stands, and what it says


class Lift(NamedTuple):
    """Something that a client writes into its system prompt and that varies. A row counts only
    where it finds one piece outside of fences, or one that fills its fence."""

    label: str  # a short name that stays the same: who writes it, and what it is
    find: Callable[[str], Iterable[Piece]]
    fenced: bool = False  # counts inside of fences, too


# 2026-12-01; 12/1/2026; December 1, 2026; Tue Dec 01 2026; Tuesday, December 1, 2026
_DATE = (
    r"(?:\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{4}"
    r"|(?:[A-Z][a-z]{2,8},? )?[A-Z][a-z]{2,8} \d{1,2},? \d{4})"
)
_HOURS = r"\d{1,2}:\d\d(?::\d\d(?:\.\d{1,9})?)?(?: ?[AP]M)?"
_ZONE = (
    r"(?: ?(?:\([A-Z][\w ,:/+-]{1,40}\)|Z|[A-Z]{2,5}(?:[+-]\d[\d:]{0,4})?|[+-]\d\d:?\d\d"
    r"|[A-Z][a-z]{1,20}/\w{1,30}))"
)
_MOMENT = rf"(?:{_DATE}(?:(?:T|,? |,? at ){_HOURS})?|{_HOURS}){_ZONE}{{0,2}}\.?"
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_CLOCK = (
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d[:\d.]*)?|\b\d{1,2}:\d\d[:\d.]*(?: ?[AaPp][Mm])?"
    rf"|\b1[6-9]\d{{8}}(?:\d{{3}})?\b|\b{_DAY}\b|\b(?:{_DAY},? )?{_MONTH} \d{{1,2}}(?:,? \d{{4}})?"
    rf"|\b\d{{1,2}}\.? {_MONTH} \d{{4}}"
)


def lines(label: str, marker: str, pattern: str) -> Lift:
    """A row for whole lines that `pattern` matches; the marker stands in the first of them."""
    compiled = re.compile(rf"(?:{pattern})[ \t]*(?:\n|\Z)")

    def find(text: str) -> Iterator[Piece]:
        at = 0
        while (at := text.find(marker, at)) >= 0:
            match = compiled.match(text, text.rfind("\n", 0, at) + 1)
            if match:
                yield [match.span()], match[0].strip()
            at = match.end() if match else text.find("\n", at) + 1 or len(text)

    return Lift(label, find)


def inbound_member(name: str) -> Lift:
    """A row for a member of OpenClaw's inbound object."""
    pattern = member(name)

    def find(text: str) -> Iterator[Piece]:
        for span in inbound_members(text, pattern):
            yield [span], text[slice(*span)].strip(" \t\r\n,")

    return Lift(f"OpenClaw: {name}", find, fenced=True)


_FILE = r"(?:\(?clean\)?(?=\n|\Z)|(?:[MADRCTU?!][ MADRCTU?!]?| [MADRCTU?!]) [^\n]+)"
_GIT = (  # parts of a snapshot of git
    r"(?:(?:- )?Current branch: [^\n]*|- Branch: [^\n]*|(?:- )?Main branch [^\n]*"
    rf"|Git user: [^\n]*|(?:- )?(?:Git )?[Ss]tatus: ?[^\n]*(?:\n{_FILE})*"
    r"|(?:- )?Recent commits:(?:\n {0,4}[0-9a-f]{7,40} [^\n]*)+)"
)
GIT_SNAPSHOT = re.compile(rf"^{_GIT}(?:\n+{_GIT})*\n?", re.MULTILINE)


def git_snapshot(label: str, *needed: str) -> Lift:
    """A row for a snapshot of git that has the parts that are needed."""

    def find(text: str) -> Iterator[Piece]:
        if all(part in text for part in needed):
            for match in GIT_SNAPSHOT.finditer(text):
                if all(part in match[0] for part in needed):
                    yield [match.span()], match[0].strip()

    return Lift(label, find)


LIFTS = (
    lines("OpenClaw: Current date", "urrent ", rf"Current date: {_DATE}"),
    lines("OpenClaw: runtime", "| sessionId=",
          r"Runtime: agent=[^\n]* \| sessionId=[0-9a-f-]{36}[^\n]*"),
    lines("OpenClaw: sessions", " Sessions\n",
          r"## \w+ Sessions\n(?=[^\n]*\bsessions_list\b)[^\n]+(?:\n- agent:[^\n]*)+"),
    inbound_member("sender_id"),
    inbound_member("flags"),
    lines("Claude Code: git status", "gitStatus: ",
          rf"gitStatus: [^\n]*(?:\n+(?:Status: ?[^\n]*(?:\n[^\n<`~][^\n]*)*|{_GIT}))*"),
    lines("Claude Code, Vibe, Home Assistant: Today's date", "Today's date",
          rf"(?:Current time is {_HOURS}\. )?Today's date is {_DATE}\.?(?: \([A-Z][a-z]+\)\.?)?"),
    lines("opencode, Kilo, Continue, Crush: Today's date", "Today's date",
          rf"[ \t]*Today's date: {_DATE}"),
    lines("Qwen Code: git status", "Current branch: ",
          r"git: Current branch: [^\n]*(?:\ngit: [^\n]*)*"),
    lines("Continue: git status", "gitStatus",
          r'<context \w+="gitStatus">[^<]*(?:<(?!/?context)[^<]*)*</context>'),
    git_snapshot("Vibe, hermes: git status", "Recent commits:"),
    git_snapshot("Crush: git status", "Current branch: ", "tatus:"),
    lines("hermes: Conversation started", "Conversation started: ",
          rf"Conversation started: {_MOMENT}"),
    lines("OpenHands: current time", "<CURRENT_DATETIME>",
          r"<CURRENT_DATETIME>[^<]{0,200}</CURRENT_DATETIME>"),
    lines("AnythingLLM, goose: current time", "<current",
          r"<(current[-_]time|current_datetime)>[^<]{0,200}</\1>"),
    lines("Copilot CLI: session", "Session ", rf"Session \w+: [^\n]*/{_UUID}"),
    *(
        lines(f"Open WebUI, goose: Current {name}", "urrent ",
              rf"(?:The )?[Cc]urrent {name}(?: is|:) {_MOMENT}")
        for name in ("date", "time", "date and time", "datetime")
    ),
)  # fmt: skip


def own_lift(pattern: str) -> Lift:
    """The row of a LIFT_REGEX: the lines that its matches touch are one piece."""
    compiled = re.compile(pattern, re.MULTILINE)

    def find(text: str) -> Iterator[Piece]:
        spans: list[Span] = []
        done = 0  # all up to here is in `spans`, or not touched
        for match in compiled.finditer(text):
            if match[0] and match.end() > done:
                start = text.rfind("\n", done, max(done, match.start())) + 1 or done
                done = text.find("\n", match.end() - 1) + 1 or len(text)
                spans.append((start, done))
        if found := "".join(text[start:end] for start, end in spans).strip():
            yield spans, found

    return Lift(f"LIFT_REGEX: {pattern}", find, fenced=True)


FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})([^\n]*)", re.MULTILINE)


def fences(text: str) -> list[tuple[int, int, int]]:
    """Where a text's fenced blocks begin and end, and how many characters each holds."""
    found: list[tuple[int, int, int]] = []
    opening: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        mark, more = fence.groups()
        if opening is None:
            if "`" not in more:  # else it is code inside of a line
                opening = fence
        elif mark.startswith(opening[1]) and not more.strip():
            start, end = opening.end(), fence.start()
            found.append((start, end, len(text[start:end].strip())))
            opening = None
    return found


def counting(text: str, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Those pieces that do not stand in a fence together with other text."""
    inside: list[tuple[int, int, int]] | None = None
    for spans, said in pieces:
        if inside is None:
            inside = fences(text)
        at = bisect.bisect_right(inside, spans[0][0], key=lambda fence: fence[1])
        start, _, size = inside[at] if at < len(inside) else (len(text), 0, 0)
        if spans[0][0] < start or len(said) == size:
            yield spans, said


Lifted = tuple[str, str]  # a text taken out of the system prompt, behind the label of its row


def lift_text(text: str, rows: Iterable[Lift]) -> tuple[str, list[Lifted]]:
    """A system text without its volatile parts, and those parts."""
    found: list[Lifted] = []
    for row in rows:
        pieces = row.find(text) if row.fenced else counting(text, row.find(text))
        some = list(itertools.islice(pieces, 2))
        if len(some) == 1:
            spans, said = some[0]
            found.append((row.label, said))
            text = without(text, spans)
    return text, found


# --- what was seen to vary ------------------------------------------------------------------------

SENTENCE = re.compile(r"[^\n]*?[.!?](?= )|[^\n]+")  # of a line, or what is left of the line
SURE = re.compile(  # values that vary by themselves
    rf"{_CLOCK}|\b{_UUID}\b|\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{{7,64}}\b|\d{{6,}}"
    r"|\b(?=[a-z_]*[\dA-Z])(?=[A-Z_]*[\da-z])(?=[A-Za-z_]*\d)\w{12,}|\btmp\w{6,10}\b",
)
MAY_VARY = re.compile(r"\d|day\b")  # else there is no such value
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
LISTED = re.compile(  # a line of a listing: of a tree, of files, of git status, of ls, of git log
    r"[ \t|`+\u2502]*(?:[\u251c\u2514]|[|`+]-- )|\?\? \S+\Z"
    r"|(?:[MADRCTU!][ MADRCTU]?|[ ][MADRCTU]) \S*[./]\S*\Z|[-dl][rwx-]{9}"
    r"|(?=[a-f]*\d)[0-9a-f]{7,12} \S|[ \t]*(?:[-*] )?[\w./~-]{1,200}(?:\.[A-Za-z]\w{0,7}|/)\Z"
)
LEARNED = "learned: "  # begins the labels of what was seen to vary
LEARNED_SHAPES = 64
LEARNED_BLOCK = 4096  # characters
LEARNED_TEXT = 1 << 18  # characters of a system text; longer ones are not compared


class Shape(NamedTuple):
    """What was seen to vary: a sentence or line of this form (values are `#`), or else whatever
    stands between two lines."""

    form: str = ""
    after: str = ""
    before: str = ""

    def name(self) -> str:
        if self.form:
            return f"{LEARNED}{self.form.strip()}"
        return f"{LEARNED}block between {self.after!r} and {self.before!r}"

    def pattern(self) -> str:
        """A LIFT_REGEX for it."""
        if self.form:
            return ".+".join(map(re.escape, self.form.strip().split("#")))
        return rf"(?s)(?<={re.escape(self.after)}\n).*?(?=\n{re.escape(self.before)})"

    def row(self) -> Lift:
        return Lift(self.name(), self.said if self.form else self.block)

    def said(self, text: str) -> Iterator[Piece]:
        """The lines and sentences of this form."""
        marker, at = max(self.form.split("#"), key=len), 0
        for _ in range(8):
            if (at := text.find(marker, at)) < 0:
                return
            start, at = text.rfind("\n", 0, at) + 1, text.find("\n", at) + 1 or len(text)
            line = text[start:at].rstrip("\n")
            if len(line) > LEARNED_BLOCK:
                continue
            if form_of(line) == self.form:
                yield [(start, at)], line.strip()
                continue
            for one in SENTENCE.finditer(line):
                if form_of(one[0]) == self.form:
                    space = one.start() == 0  # the others begin with theirs
                    yield [(start + one.start(), start + one.end() + space)], one[0].strip()

    def block(self, text: str) -> Iterator[Piece]:
        """The lines between the two, if those stand there once; told behind the one in front."""
        padded = f"\n{text}\n"  # so that each line has a newline at both ends
        if padded.count(f"\n{self.after}\n") != 1:
            return
        start = padded.index(f"\n{self.after}\n") + len(self.after) + 1
        end = padded.find(f"\n{self.before}\n", start) if self.before else len(text)
        block = text[start:end].strip("\n")
        if end < 0 or not block.strip() or end - start > LEARNED_BLOCK:
            return
        heading = self.after.strip() if len(self.after) <= 120 else ""
        yield [(start, end)], f"{heading}\n{block}".strip("\n")


def lines_of(text: str) -> list[str]:
    """Its lines, without empty ones."""
    return [line for line in text.split("\n") if line.strip()]


def sure_form(text: str) -> str:
    """A text with # for each value that varies by itself: a clock, an id, a long number."""
    return SURE.sub("#", text) if MAY_VARY.search(text) else text


def form_of(text: str) -> str:
    """A text with # for each number as well."""
    return NUMBER.sub("#", sure_form(text))


def changed_form(old: str, new: str) -> str:
    """The form of the one sentence in which two lines of one form differ, else of the line."""
    before, after = SENTENCE.findall(old), SENTENCE.findall(new)
    if len(before) == len(after):
        differ = [new for old, new in zip(before, after, strict=True) if old != new]
        if len(differ) == 1:
            return form_of(differ[0])
    return form_of(new)


def changes(old: list[str], new: list[str]) -> Iterator[tuple[int, int, list[str]]]:
    """Where a text, given as lines, differs from an older one: from and to which line, and what
    stood there before. Around it are lines that stand once in both."""
    counts, others = collections.Counter(new), collections.Counter(old)
    places = {line: at for at, line in enumerate(old) if others[line] == counts[line] == 1}
    left = right = -1  # the places of the last line that stays
    for at, line in enumerate([*new, ""]):
        place = places.get(line, -1) if at < len(new) else len(old)
        if place > left:  # else it is new, or has moved
            if old[left + 1 : place] != new[right + 1 : at]:
                yield right + 1, at, old[left + 1 : place]
            left, right = place, at


class Learner:
    """Finds what varies in system prompts by comparing each with the closest before it."""

    def __init__(self, rows: tuple[Lift, ...]) -> None:
        self.table = self.rows = rows
        self.shapes: dict[Shape, None] = {}
        self.news: collections.deque[Shape] = collections.deque(maxlen=LEARNED_SHAPES)  # untold
        self.texts: dict[str, list[str]] = {}  # by the text, its lines
        self.seen: dict[Any, frozenset[int]] = {}  # the values that something had, hashed
        self.values: dict[str, int] = {}  # of shapes by their labels, hashed
        self.misses: collections.Counter[str] = collections.Counter()  # that lifting them saved
        self.lock = threading.Lock()

    def tell(self, label: str, text: str) -> None:
        """Note the value that a shape has in a request: each new one would have been a miss."""
        with self.lock:
            self.misses[label] += label in self.values and self.values[label] != hash(text)
            self.values[label] = hash(text)

    def add(self, shapes: Iterable[Shape]) -> None:
        """Lift these from now on."""
        with self.lock:
            for shape in shapes:
                if len(self.shapes) < LEARNED_SHAPES and shape not in self.shapes:
                    self.shapes[shape] = None
                    self.news.append(shape)
            self.rows = self.table + tuple(shape.row() for shape in self.shapes)

    def read(self, rest: str) -> None:
        """Learn what varies between a system text, after all lifts, and the closest before it."""
        if rest in self.texts or len(rest) > LEARNED_TEXT:
            return
        mine, others = lines_of(rest), list(self.texts.values())
        own = set(mine)
        closest = max(others, key=lambda lines: len(own.intersection(lines)), default=[])
        alike = 2 * len(own.difference(closest)) <= len(mine)
        if not alike and len(rest) <= LEARNED_BLOCK:
            alike = list(map(form_of, mine)) == list(map(form_of, closest))
        differing = list(changes(closest, mine)) if closest and alike else []
        # Many small changes are as much as a large one.
        sizes = [500 + sum(map(len, gone + mine[at:end])) for at, end, gone in differing]
        if sum(sizes) > 4 * LEARNED_BLOCK:
            differing = []
        shapes = [shape for change in differing for shape in self.judge(mine, *change)]
        found = [shape for shape in shapes if lift_text(rest, [shape.row()])[1]]
        known = [*self.texts, rest]
        if found:
            self.add(found)
            more = [shape.row() for shape in found if shape in self.shapes]
            known = [lift_text(text, more)[0] for text in known]  # they differ no more
        self.texts = {text: self.texts.get(text) or lines_of(text) for text in known[-16:]}

    def judge(self, lines: list[str], at: int, end: int, gone: list[str]) -> list[Shape]:
        """What of a change varies: values that do by themselves, and listings, are known at once;
        numbers, and blocks of any kind, when they had three values."""
        new = lines[at:end]
        pairs: list[tuple[str, str]] = []
        if len(gone) == len(new):
            pairs = [one for one in zip(gone, new, strict=True) if one[0] != one[1]]
        if pairs and all(form_of(old) == form_of(now) for old, now in pairs):
            sure = any(sure_form(old) == sure_form(now) for old, now in pairs)
            shapes = [Shape(changed_form(*pair)) for pair in pairs]
            if all(re.search(r"[^\W\d_]{3}", shape.form) for shape in shapes):
                named = zip(shapes, pairs, strict=True)
                return [shape for shape, pair in named if sure or self.varies(shape, *pair)]
        else:
            sure = any(map(LISTED.match, gone + new))
        place = self.borders(lines, at - 1, end)
        varies = place and (sure or self.varies(place, tuple(gone), tuple(new)))
        return [place] if place and varies else []

    def varies(self, shape: Shape, old: Any, new: Any) -> bool:
        """Whether something had three values by now: two may be two modes of a client."""
        values = self.seen.get(shape, frozenset()) | {hash(old), hash(new)}
        remember(self.seen, shape, values)
        return len(values) > 2

    def borders(self, lines: list[str], start: int, end: int) -> Shape | None:
        """The block that a change is in, between two lines that stand once and list nothing."""
        counts = collections.Counter(lines)
        while start >= 0 and (LISTED.match(lines[start]) or counts[lines[start]] > 1):
            start -= 1
        while end < len(lines) and (LISTED.match(lines[end]) or counts[lines[end]] > 1):
            end += 1
        if start < 0 or sum(map(len, lines[start + 1 : end])) > LEARNED_BLOCK:
            return None
        return Shape("", lines[start], lines[end] if end < len(lines) else "")


class Lifter:
    """Cuts volatile texts out of system prompts: by the table, by LIFT_REGEX, by what it learns."""

    def __init__(self, config: Config) -> None:
        own = tuple(own_lift(pattern) for pattern in config.lift_regex)
        self.learner = Learner(LIFTS + own if config.lift else ())
        self.learns = config.lift and config.learn
        self.known: dict[Any, tuple[str, list[Lifted]]] = {}
        self.begun: dict[int, tuple[tuple[Lift, ...], int]] = {}  # see cut_all()

    def cut(self, text: str, rows: tuple[Lift, ...]) -> tuple[str, list[Lifted]]:
        """lift_text() with a memory: conversations share their system prompts."""
        known = self.known.get((text, rows))
        if known is None:
            known = lift_text(text, rows)
            if len(text) <= 1 << 17:
                remember(self.known, (text, rows), known, 16)
        return known

    def cut_all(self, texts: list[str], conversation: int) -> list[tuple[str, list[Lifted]]]:
        """The system texts of a conversation, each cut. It keeps the rows that it began with while
        they lead to the prompt that was sent before; else it is read anew anyway."""
        rows, sent = self.begun.get(conversation, (self.learner.rows, 0))
        cut = [self.cut(text, rows) for text in texts]
        if self.learns and sent != hash(tuple([rest for rest, _ in cut])):
            for text in texts:
                self.learner.read(self.cut(text, self.learner.rows)[0])
            rows = self.learner.rows
            cut = [self.cut(text, rows) for text in texts]
            remember(self.begun, conversation, (rows, hash(tuple([rest for rest, _ in cut]))))
        return cut

    def lift(self, view: View, conversation: int) -> list[Lifted]:
        """Cut volatile texts out of the system prompt, in place, and return them, where it pays."""
        if not pays(view):
            return []
        turns = [turn for turn in view.system() if turn.slots()]
        texts = [slot.get() for turn in turns for slot in turn.slots()]
        cut = iter(self.cut_all(texts, conversation))
        found: dict[str, str] = {}
        for turn in turns:
            count, own = len(found), turn.own()
            for slot, (text, pieces) in zip(own.slots(), cut, strict=False):
                if found.keys().isdisjoint(label for label, _ in pieces):
                    slot.set(text)  # else another part has such a line, and this one stays
                    found.update(pieces)
            if len(found) > count:
                drop_empty(view, view.replace(turn, own))
        for label, text in found.items():
            if label.startswith(LEARNED):
                self.learner.tell(label, text)
        return list(found.items())


# ==================================================================================================
# Replay: history is sent again as it was sent
# ==================================================================================================

# A request becomes units: a user turn, an answer (the assistant's turns in a row), a batch of tool
# results; to each belong the carriers behind it (messages that are decoration only). Of each line
# of requests the last one is recorded: what its units said, how they were forwarded, and the answer
# that the server was heard to give. A request that goes on from a record has its units restored,
# one by one, up to the first that its client really changed. Then what was lifted is set down,
# unless the prompt says it already.

# Carriers are made of these decorations. Of the others alone a person may have typed a message.
CARRIED = frozenset(
    ("block", "context", "event", "runtime", "internal", "reminder", "environment", "yours",
     "tagged")
)  # fmt: skip
MOVED = frozenset(("runtime", "internal", "context"))  # carriers that OpenClaw moves to the end
SPEAKERS = frozenset(("block", "context", "current", "reply", "line"))  # they tell who speaks
REWRITABLE = frozenset(("reminder", "environment"))  # what a client rewrites in its first message
REWRITTEN = "first "  # begins the labels of those
PERSONAL = frozenset(("OpenClaw: sender_id", "OpenClaw: flags"))  # of the newest message
ALIKE = 1000  # characters that no two conversations begin with by chance
SLACK = 16000  # bytes that restored text may add to a prompt, beside as many as the prompt has
SAME_PLACE = 64  # lines that are remembered for one place in a history
MOST_COMPARED = 256  # records that are held against a request
NUMBERED = re.compile(r"[A-Za-z]*\d{0,4}")  # an id that another conversation may have as well
LONG_ANSWER = 32  # letters by which the beginning or the end of an answer is known again

Decoration = tuple[str, str]  # kind, text


def undress(text: str) -> tuple[list[Decoration], str]:
    """The decorations at both ends of a user text, and what stands between them."""
    leads = lead(text)
    found = [(one.kind, text[one.start : one.end].strip()) for one in leads]
    start = leads[-1].end if leads else 0
    end = text_end(text, start, len(text))
    while end > start:
        kind, opening, _ = next(row for row in TAILS if text.endswith(row[2], start, end))
        at = text.rfind(opening, start, end) + (kind == "line")
        if at <= start or text[at - 1] != "\n":
            break
        if kind == "line" and not TAIL_LINE.match(text, at, end):
            break
        found.append((kind, text[at:end]))
        check_limit("decorations of a text", len(found))
        end = text_end(text, start, at)
    return found, text[start:end]


# What a program may have written at an end of a user text, though nobody described it: a block in
# a tag, under a label in brackets, or of labelled JSON; a time in brackets; labelled lines with a
# time. It counts as a part of the text everywhere but where a client takes it out of its history,
# or puts a time in.
PROGRAM_BLOCK = 8192  # characters, at most
MOST_PROGRAMS = 8  # of one text
_LABEL = r"\[[^\[\]\n]{2,200}\]"
_TIME_LABEL = rf"\[(?=[^\]\n]{{0,120}}?(?:{_CLOCK}))[^\[\]\n]{{1,120}}\]"
_NAMED = r"[A-Z][\w .,&/()-]{1,40}: "
_TIMED_LINES = (
    rf"{_NAMED}(?=[^\n]{{0,120}}?(?:{_CLOCK}))[^\n]{{1,200}}(?:\n{_NAMED}[^\n]{{1,200}}){{0,19}}"
)
PROGRAMS = (  # how a block begins, and how it ends
    (r"<(?P<tag>[A-Za-z][\w.:-]{1,60})(?: [^<>\n]{0,200})?>", "</(?P=tag)>"),
    (r"[^\n`{}]{1,200}:\n```(?:json)?\n(?=[\[{])", r"\n```"),
    (r"\[(?P<label>[\w -]{2,60})(?:[^\w\[\]\n -][^\[\]\n]{0,200})?\]\n", r"\n\[/(?P=label)\]"),
)
PROGRAM_LEAD = re.compile("|".join((
    *(rf"{opening}(?s:.{{0,{PROGRAM_BLOCK}}}?){closing}" for opening, closing in PROGRAMS),
    rf"{_TIMED_LINES}(?=\n\n|\Z)",
    rf"{_TIME_LABEL}(?=[ \n]|\Z)",
    r"\[[^\[\]\n]{1,100}: [^\[\]\n]{1,100}\](?=\n|\Z)",
    rf"{_LABEL}\n(?s:.{{0,{PROGRAM_BLOCK}}}?)(?=\n\n)",
)))  # fmt: skip
PROGRAM_TAIL = re.compile("|".join((
    *(rf"{opening}(?s:.*){closing}\Z" for opening, closing in PROGRAMS),
    rf"{_LABEL}\n\{{(?s:.*)\}}\Z",
    rf"{_TIME_LABEL}\Z",
    rf"(?<=\n\n)(?:{_TIMED_LINES}|{_LABEL}(?:\n[^\n]+)*)\Z",
)))  # fmt: skip
TAIL_START = re.compile(r"\n(?=<[A-Za-z]|\[|[^\n`{}]{1,200}:\n```)")


def program_tail(text: str) -> re.Match[str] | None:
    """The block at the end of a text that a program may have written."""
    window = max(0, len(text) - PROGRAM_BLOCK)
    starts = [at + 2] if (at := text.rfind("\n\n", window)) >= 0 else []
    if text.endswith((">", "}", "`", "]")):
        starts += [one.end() for one in TAIL_START.finditer(text, window)][-8:]
    return next(filter(None, (PROGRAM_TAIL.match(text, at) for at in reversed(starts))), None)


def strip_programs(text: str) -> tuple[list[Decoration], str]:
    """undress() that takes what a program may have written for a decoration as well: tagged where
    a message of nothing else is most likely no person's."""
    found: list[Decoration] = []
    for _ in range(MOST_PROGRAMS):
        words = text.strip()
        block = PROGRAM_LEAD.match(words) or program_tail(words)
        if block is None:
            break
        named = block["tag"] is not None and not block["tag"].isalnum()
        found.append(("tagged" if named else "program", block[0].strip()))
        more, text = undress(words[: block.start()] + words[block.end() :])  # one of them is empty
        found += more
    return found, text


def text_end(text: str, start: int, end: int) -> int:
    """Where text[start:end] ends without the space behind it."""
    while end > start and text[end - 1].isspace():
        end -= 1
    return end


def digest(*parts: str | bytes) -> bytes:
    """A short hash of some texts, the same in every process."""
    data = [
        one if isinstance(one, bytes) else one.encode("utf-8", "surrogatepass") for one in parts
    ]
    return hashlib.blake2b(b"\0".join(data), digest_size=12).digest()


class Said(NamedTuple):
    """What a turn says. The hashes hold within this process."""

    words: int  # without decorations, reasoning, and the spelling of ids; 0: it says nothing
    whole: int  # with decorations and arguments
    blocks: tuple[Decoration, ...] = ()
    carrier: bool = False  # nothing but decorations
    speaks: bool = False  # somebody's words, before which lifted text can be set down
    opening: bytes = b""  # digest of the words, the same in every process
    calls: tuple[Call, ...] = ()


SILENT = Said(0, 0)
NOTHING: dict[str, str] = {}


class Unit:
    """A user turn, an answer, or a batch of tool results, and the carriers behind it. The first
    unit of a request has only carriers: those in front of everything else."""

    inserted = NOTHING  # what kvproxy set down in it, by label
    dropped = False  # a carrier of it is not sent
    answer: tuple[str, frozenset[str]] | None = None  # see spoken

    def __init__(self, role: str, turns: list[Turn], said: list[Said]) -> None:
        self.role = role
        self.turns = turns  # and carriers
        self.said = said
        self.stored: Stored | None = None  # as it was sent before
        first = said[0] if said else SILENT
        self.words, self.whole, self.calls = first.words, first.whole, first.calls

    def complete(self, role: str) -> list[Unit]:
        """Sum up what it says, in front of a turn of that role. Carriers between two answers were
        answered: they become units of their own, in which somebody speaks."""
        parted = []
        asked = role == "assistant" and self.role in ("assistant", "head")
        while asked and self.said and self.said[-1].carrier:
            said = self.said.pop()
            said = Said(said.whole, said.whole, speaks=True, opening=said.opening)
            parted.append(Unit("user", [self.turns.pop()], [said]))
        words = [one.words for one in self.said if one.words]
        if len(words) > 1:  # the results of a batch say the same in any order
            words = [hash((self.role, *(sorted(words) if self.role == "tool" else words)))]
        self.words = words[0] if words else 0
        whole = [one.whole for one in self.said]
        self.whole = whole[0] if len(whole) == 1 else hash((self.role, *whole))
        self.calls = tuple([call for one in self.said for call in one.calls])
        return parted[::-1]

    def blocks(self) -> list[Decoration]:
        """Its decorations, in order."""
        return [block for one in self.said for block in one.blocks]

    def speaks(self) -> bool:
        return any(one.speaks for one in self.said)

    def by_user(self) -> bool:
        """Whether it is a user's message; in /v1/messages, results of tools are one as well."""
        item = self.turns[0].item if self.turns else None
        return self.role == "user" or (item is not None and item.get("role") == "user")

    def fixed(self) -> int:
        """How many of its turns are never restored: answers and results, but not the carriers."""
        return 0 if self.by_user() else sum([not one.carrier for one in self.said])

    @property
    def spoken(self) -> tuple[str, frozenset[str]]:
        """The letters of an answer, and the ids of its calls."""
        if self.answer is None:  # cached_property has one lock for all, up to Python 3.11
            texts = [turn.text() for turn in self.turns if turn.role == "assistant"]
            ids = frozenset([plain(ident) for ident, _ in self.calls])
            self.answer = letters("\n".join(texts)), ids
        return self.answer


def opening_of(units: list[Unit]) -> bytes:
    """A digest of the first user's words, the same in every process."""
    return next((unit.said[0].opening for unit in units if unit.role == "user"), b"")


class History:
    """The units of a request, and the places in it that the rules speak of; 0: there is none."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.first = next((at for at, unit in enumerate(units) if unit.role == "user"), 0)
        self.last = 0  # answer
        self.target = 0  # the newest user turn in which somebody speaks
        self.newest = 0  # the answer that precedes it: what is behind that is new
        for at in range(len(units) - 1, 0, -1):
            if units[at].role == "assistant":
                self.last = self.last or at
                if self.target:
                    self.newest = at
                    break
            elif not self.target and units[at].speaks():
                self.target = at
        behind = [block for unit in units[self.last :] for block in unit.blocks()]
        self.moved = MOVED.intersection(kinds_of(behind))  # kinds of carriers behind that


class Stored(NamedTuple):
    """A unit as it was forwarded. Turns (but fixed ones) are kept only where they differ from the
    client's, or may be restored later."""

    words: int
    whole: int
    blocks: tuple[Decoration, ...] = ()  # as they were sent
    came: tuple[Decoration, ...] = ()  # as the client had them last
    turns: list[Turn] | None = None
    inserted: dict[str, str] = NOTHING
    calls: tuple[Call, ...] = ()  # of tool calls or results, as they were sent first
    heard: bool = False  # an answer that the server was heard to give at this place
    private: bool = False  # what was sent says more than another conversation may be told

    def form(self) -> object:
        """What is restored, so that two records can be compared."""
        return [turn.json() for turn in self.turns or ()], self.calls


class Heard(NamedTuple):
    """What the server was heard to say: letters and digits at its beginning and its end, and the
    ids of its tool calls. `complete`: the beginning is all of it."""

    opening: str = ""
    closing: str = ""
    calls: frozenset[str] = frozenset()
    complete: bool = False


UNREAD = Heard()  # there was an answer, but it could not be read
ANY = Heard("*")  # a capture holds no answers: what the client says next was the answer


@dataclasses.dataclass(slots=True, eq=False)
class Line:
    """A line of requests: its last one, the places that lead to it, and the bytes it takes."""

    record: Record | None = None
    places: list[int] = dataclasses.field(default_factory=list)
    size: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """A request as it was forwarded, and the answer to it."""

    conversation: str
    newest: int  # place of the answer before the newest user turn
    line: Line  # which it belongs to, or did
    units: list[Stored] = dataclasses.field(default_factory=list)
    kept: list[int] = dataclasses.field(default_factory=list)  # places of those with turns
    answer: Heard | None = None  # none yet, or an error
    tap: Tap | None = None  # what has been relayed of an answer on its way
    relayed: tuple[tuple[bytes, bytes], Heard] = (b"", b""), UNREAD  # as read last

    def heard(self) -> Heard | None:
        """What the client can have heard by now."""
        tap = self.tap
        if tap is None:
            return self.answer
        windows = tap.windows()
        if self.relayed[0] != windows:  # more of it came
            self.relayed = windows, heard_answer(answer_events(*windows))
        return self.relayed[1]


class Lines:
    """Lines by the places in histories where their requests ended; the least recently used go
    first. The lock is held for single steps, not for work that grows with a request."""

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self.limit, self.size = limit, 0  # bytes
        self.by_place: dict[int, list[Line]] = {}
        self.used: collections.OrderedDict[Line, None] = collections.OrderedDict()

    def put(self, record: Record, place: int, size: int) -> None:
        """Let its line lead to a record, which ends at `place` and takes `size` bytes."""
        line = record.line
        with self.lock:
            line.record = record
            lines = self.by_place.setdefault(place, [])
            if line not in lines:
                lines.append(line)
                line.places.append(place)
                del lines[:-SAME_PLACE]
            self.size += size - line.size
            line.size = size
            self.used[line] = None
            self.used.move_to_end(line)
        while self.size > self.limit and self.used:
            self.drop(next(iter(self.used)))

    def drop(self, line: Line) -> None:
        """Forget a line: its client's next request is read anew."""
        with self.lock:
            if line not in self.used:
                return
            del self.used[line]
            self.size -= line.size
            line.record = None
        for place in line.places:
            with self.lock:
                lines = [one for one in self.by_place.get(place, ()) if one is not line]
                if lines:
                    self.by_place[place] = lines
                else:
                    self.by_place.pop(place, None)


class Asker(NamedTuple):
    """Whose request it is, how many bytes it has, and whether anything is learned from it."""

    client: bytes = b""
    size: int = 1 << 62
    learn: bool = True


ANYBODY = Asker()


class Match(NamedTuple):
    """The record that a request goes on from, and how many units they have in common; whether the
    one behind is an answer that the server was heard to give."""

    depth: int = 0
    record: Record | None = None
    answered: bool = False


@dataclasses.dataclass
class Trace:
    """Where a request stands among conversations: for explain, and to note the answer."""

    conversation: str = ""
    record: Record | None = None
    whose: int = 0  # a hash of the client and the dialect
    opening: bytes = b""  # a hash of the first user's words


class Replay:
    """Restores what a client took out of its history, and sets down what was lifted. Safe to use
    from many threads; nothing of one client reaches another."""

    def __init__(self, config: Config) -> None:
        self.lines = Lines(config.replay_mb << 20)
        self.tools = Tools(config.replay_mb << 17)
        self.patterns = [re.compile(pattern) for pattern in config.replay_regex]
        self.learns = config.learn
        self.roles: dict[int, bool] = {}  # see stays()
        self.names: dict[int, str] = {}  # conversations by their answers

    def size(self) -> int:
        """Bytes held, roughly."""
        return self.lines.size + self.tools.size

    def stays(self, view: View, turn: Turn, client: bytes) -> bool:
        """Whether a system message behind the first user text was seen to stay in a history, before
        this conversation began."""
        first = next((one for one in view.turns if one.role == "user"), turn)
        seen = hash((client, view.dialect.name, turn.text()))
        begun = hash((seen, first.text(), *[one.text() for one in view.system()]))
        if begun not in self.roles:
            remember(self.roles, begun, seen in self.roles)
        if any(one.role == "assistant" for one in view.turns):
            remember(self.roles, seen, True)
        return self.roles.get(begun, False)

    def said(self, turn: Turn) -> Said:
        """What a turn says; remembered with the turn."""
        if turn.said is None:
            turn.said = self.read(turn)
        return turn.said

    def read(self, turn: Turn) -> Said:
        if turn.role == "reasoning":
            return SILENT
        fields = call_fields(turn.item or {})
        calls = tuple([one.call() for one in fields])
        beside, more = beside_texts(turn, fields)
        plain_text = turn.text().strip()
        if turn.item is not None and turn.item.get("role") != "user":
            said = hash((turn.role, plain_text, *beside))
            return Said(said, said, calls=calls)
        undressed = [self.undress(slot.get()) for slot in turn.slots()]
        blocks = [block for found, _ in undressed for block in found]
        text = "\n".join([words for _, words in undressed if words])
        carrier = False
        if plain_text and not text and not beside:
            carrier = turn.item is not None and any(kind in CARRIED for kind, _ in blocks)
            if not carrier:  # a person may have typed it
                text, blocks = plain_text, []
        words = hash(("user", text, *sorted(beside))) if text or beside else 0
        whole = hash(("user", plain_text, *beside))
        return Said(words, whole, tuple(blocks), carrier, bool(text) or more, digest(text), calls)

    def undress(self, text: str) -> tuple[list[Decoration], str]:
        """undress() that knows the user's own decorations as well, and finds those of programs."""
        blocks, words = undress(text)
        for pattern in self.patterns:
            found = [match[0].strip() for match in pattern.finditer(words)]
            if any(found):
                more, words = undress(pattern.sub("", words).strip())
                blocks = [*blocks, *[("yours", one) for one in found if one], *more]
        if self.learns:
            more, words = strip_programs(words)
            blocks = [*blocks, *more]
        return blocks, words.strip()

    def units(self, view: View) -> list[Unit]:
        """The turns behind the system prompt as units; the first one for what precedes them."""
        units = [unit := Unit("head", [], [])]
        grown = carried = False  # the unit has more than its first turn, and ends with a carrier
        for turn in view.turns[view.leading() :]:
            role = "assistant" if turn.role == "reasoning" else turn.role
            said = turn.said or self.said(turn)
            if said.carrier or (unit.role == role != "user" and not carried):
                unit.turns.append(turn)
                unit.said.append(said)
                grown, carried = True, said.carrier
                continue
            if grown:
                units += unit.complete(role)
            units.append(unit := Unit(role, [turn], [said]))
            grown = carried = False
        return units + unit.complete("assistant")

    def conversation(self, view: View, opening: bytes | None = None) -> str:
        """A conversation's name, from its system prompt and the first user's words."""
        opening = opening_of(self.units(view)) if opening is None else opening
        return digest(view.dialect.name, *[turn.text() for turn in view.system()], opening).hex()

    def name(self, view: View, trace: Trace, units: list[Unit]) -> str:
        """conversation(), but one whose front was rewritten is known by the first answer that it
        has, and what that was said to."""
        first = next((unit for unit in units if unit.role == "assistant"), None)
        said = first.spoken if first is not None else ()
        for key in ((trace.whose, trace.opening, *said), (trace.whose, *said)) if said else ():
            if known := self.names.get(hash(key)):
                return known
        return self.conversation(view, trace.opening)

    def answered(self, trace: Trace, answer: Heard) -> None:
        """Note which conversation an answer belongs to. By itself it tells that, unless others may
        get the same: a few words, or calls with ids that are names and numbers."""
        if not answer.complete:
            return
        said = answer.opening, answer.calls
        remember(self.names, hash((trace.whose, trace.opening, *said)), trace.conversation)
        random_ids = any(not NUMBERED.fullmatch(call) for call in answer.calls)
        if random_ids or len(answer.opening) >= LONG_ANSWER:
            remember(self.names, hash((trace.whose, *said)), trace.conversation)

    def apply(
        self, view: View, history: History, lifted: list[Lifted], report: Report, asker: Asker
    ) -> Trace:
        """Restore history, set lifted text down, drop carriers that stand there already."""
        units = history.units
        whose = hash((asker.client, view.dialect.name))
        place = hash((whose, *[turn.text() for turn in view.system()]))
        places = [place := hash((place, unit.words)) for unit in units]
        match = self.find(history, places, asker.learn)
        kept: list[int] = []
        if match.record is not None:
            for unit, stored in zip(units[: match.depth], match.record.units, strict=False):
                unit.stored = stored
            kept = [at for at in match.record.kept if at < match.depth]
            if sum([restored_bytes(units[at]) for at in kept]) > asker.size + SLACK:
                if asker.learn:
                    self.lines.drop(match.record.line)
                match, kept = Match(), []
        trace = Trace(whose=whose, opening=opening_of(units))
        record = match.record
        trace.conversation = record.conversation if record else self.name(view, trace, units)
        report.tools_restored += self.tools.apply(view, asker)
        depth, pending = settle_insertions(history, match.depth, kept, dict(lifted))
        for unit in units[depth:]:
            unit.stored = None  # it goes as it came
        for unit in units[:depth]:
            known = unit.stored
            if known and (known.turns is not None or known.calls != unit.calls):
                report.replayed += restore(unit, known)
        report.lifted += len(lifted)
        if pending:
            insert_lifted(view, history, depth, pending)
        self.drop_moved(history, report)
        view.turns = view.turns[: view.leading()]
        for unit in units:
            view.turns += unit.turns
        if asker.learn:
            self.learn(trace, history, places, match)
        return trace

    def find(self, history: History, places: list[int], learn: bool) -> Match:
        """The record that agrees the furthest. Where several do, and would send different text,
        nothing is restored from there on."""
        units = history.units
        best = (0, 0)
        found: list[tuple[tuple[int, int], Record]] = []
        edited: list[tuple[int, Line]] = []
        for at in range(len(units) - 1, 0, -1):
            if at <= best[0]:
                break
            if units[at].role != "assistant":
                continue
            for line in self.lines.by_place.get(places[at - 1], [])[::-1]:  # the newest first
                record = line.record
                if record is not None and len(found) < MOST_COMPARED:
                    evidence = agreement(record, units[at], at)
                    depth = reach_of(history, record, at, evidence)
                    reach = (depth, evidence if depth == at else 0)
                    found.append((reach, record))
                    best = max(best, reach)
                    if evidence == 2 and depth < at:
                        edited.append((at, line))
        depth, evidence = best
        for at, line in edited:
            if at > depth and learn:
                self.lines.drop(line)  # the client has changed what it holds
        rivals = [one for one in found if one[0] in (best, (depth, 1))]
        if not depth or evidence == 1:
            return Match()
        record = next(record for reach, record in rivals if reach == best)
        common = depth
        for _, other in rivals:
            for at in range(common if other is not record else 0):
                mine, theirs = record.units[at], other.units[at]
                if mine is not theirs and mine != theirs and mine.form() != theirs.form():
                    common = at
                    break
        while 0 < common < len(units) and units[common].role != "assistant" and units[common].calls:
            common -= 1  # results go with their calls
        if not common:
            return Match()
        return Match(common, record, common == depth and evidence == 2)

    def drop_moved(self, history: History, report: Report) -> None:
        """Take out a carrier behind the last answer that says what the one of its kind before it
        says: OpenClaw moves them along."""
        if not (history.last and history.moved):
            return
        standing: dict[str, str] = {}
        for at, unit in enumerate(history.units):
            kept = []
            for turn in unit.turns:
                said, text = self.said(turn), turn.text().strip()
                kind = said.blocks[0][0] if said.carrier else ""
                if kind in MOVED and at >= history.last and standing.get(kind) == text:
                    unit.dropped = True
                    report.dropped += 1
                else:
                    standing[kind] = text
                    kept.append(turn)
            unit.turns = kept

    def learn(self, trace: Trace, history: History, places: list[int], match: Match) -> None:
        """Record a request as it is forwarded."""
        units = history.units
        if units[-1].role == "assistant":  # the client has begun the answer
            units = units[:-1]
        record = trace.record = Record(trace.conversation, history.newest, Line())
        known = match.record
        if known and known.line.record is known and match.depth == len(known.units):
            record.line = known.line  # it goes on; else it branches off
        size = 500 + 150 * len(units)
        before = known.units[: match.depth] if known else []
        for at, unit in enumerate(units):
            old = unit.stored
            if old is not None and old.turns is None and old.whole == unit.whole:
                record.units.append(old)  # the usual case, in long histories
                continue
            answered = match.answered and at == match.depth
            heard = before[at].heard if at < len(before) else answered
            stored = store(history, at, heard)
            record.units.append(stored)
            if stored.turns is not None:
                record.kept.append(at)
                size += 3 * sum([len(turn.json()) for turn in stored.turns])
        if size <= self.lines.limit >> 1:
            self.lines.put(record, places[len(units) - 1], size)
        elif known:
            self.lines.drop(known.line)


def store(history: History, at: int, heard: bool) -> Stored:
    """How a unit is recorded."""
    unit, first = history.units[at], history.units[history.first]
    old, came = unit.stored, tuple(unit.blocks())
    keep = at >= history.newest or unit is first  # they may have to be restored, though unchanged
    if old is not None and old.whole != unit.whole:
        return old._replace(whole=unit.whole, came=came, heard=heard, private=True)
    if old is not None:
        settled = not (keep or old.blocks or old.inserted)
        return old._replace(turns=None) if settled else old
    private = not PERSONAL.isdisjoint(unit.inserted)
    if not all(map(is_time, unit.inserted.values())):
        private = private or sum([len(turn.text()) for turn in first.turns]) < ALIKE
    turns = [storable(turn) for turn in unit.turns[unit.fixed() :]]
    restorable = unit.inserted or unit.dropped or (turns and (keep or came))
    kept = turns if restorable else None
    return Stored(
        unit.words, unit.whole, came, came, kept, unit.inserted, unit.calls, heard, private
    )


def reach_of(history: History, record: Record, at: int, evidence: int) -> int:
    """How many units before the answer at `at` a record can restore. Without evidence, see
    agreement(), only those that came as they came before, unless what was sent is private."""
    heard, end = 0, at
    for place, stored in enumerate(record.units[:at]):
        unit = history.units[place]
        if unit.whole != stored.whole and not fits(history, stored, place, record.newest):
            end = place
            break
        if stored.heard:
            heard = place
    if end == at and evidence:
        return at
    for place, stored in enumerate(record.units[heard:end], heard):
        if stored.private or stored.whole != history.units[place].whole:
            return place
    return end


def fits(history: History, stored: Stored, place: int, newest: int) -> bool:
    """Whether a unit is what was sent, with its decorations left as they were, taken out when it
    stopped being the newest, or rewritten in the first message. What was new in the record began
    behind the place `newest`."""
    blocks = history.units[place].blocks()
    mine = collections.Counter([text for _, text in blocks])
    sent = collections.Counter([text for _, text in stored.blocks])
    if mine in (sent, collections.Counter([text for _, text in stored.came])):
        return True  # in another order or shape
    if place >= newest:  # a client may add to its history when a message came
        told = "\n".join(sent)
        for text in mine - sent:
            if MESSAGE_TIME.fullmatch(text) and all(date in told for date in DATE.findall(text)):
                del mine[text]
    if not mine <= sent:
        return place == history.first and rewritten(history, stored)
    if place < newest:
        return False  # once history, it has been settled
    if place < history.newest:
        return True
    return all(kind in history.moved for kind, text in stored.blocks if text in sent - mine)


def rewritten(history: History, stored: Stored) -> bool:
    """Whether the first message has blocks with other texts, which can be set down elsewhere:
    nothing was withdrawn, nobody's words are among them, no later message says something newer."""
    blocks, before = history.units[history.first].blocks(), stored.came
    if kinds_of(blocks) != kinds_of(before):
        return False
    speaker = kinds_of(history.units[history.target].blocks())
    if not SPEAKERS.isdisjoint(kinds_of(blocks) + speaker):
        return False
    later = [block for unit in history.units[history.first + 1 :] for block in unit.blocks()]
    for (kind, now), (_, old) in zip(blocks, before, strict=True):
        if now == old:
            continue
        rivals = [text for one, text in later if one == kind]
        heading = old.splitlines()[1:2]  # behind the tag
        changed = set(old.splitlines()) ^ set(now.splitlines())
        newer = rivals if kind == "environment" else says_anew([*heading, *changed], rivals)
        if kind not in REWRITABLE or newer or withdraws(old, now):
            return False
    return True


def kinds_of(blocks: Iterable[Decoration]) -> list[str]:
    return [kind for kind, _ in blocks]


def restored_bytes(unit: Unit) -> int:
    """How many bytes restoring a unit adds to a request."""
    if unit.stored is None or unit.stored.turns is None:
        return 0
    sent, came = unit.stored.turns, unit.turns[unit.fixed() :]
    return sum([len(turn.json()) for turn in sent]) - sum([len(turn.json()) for turn in came])


def restore(unit: Unit, stored: Stored) -> bool:
    """Put a unit's stored form in its place; whether that changed anything."""
    changed = bool(stored.calls) and respell(unit, stored.calls)
    if stored.turns is None:
        return changed
    came = unit.turns[(fixed := unit.fixed()) :]
    sent = [turn.item for turn in stored.turns]
    if came == stored.turns or sent == [storable(turn).item for turn in came]:
        return changed
    unit.turns[fixed:] = stored.turns
    return True


def storable(turn: Turn) -> Turn:
    """A turn as it is kept: without cache_control, which moves from turn to turn."""
    item = bare(turn.item or {"role": "user", "content": turn.text()})
    if isinstance(content := item.get("content"), list):
        item["content"] = [bare(part) if isinstance(part, dict) else part for part in content]
    return turn if item == turn.item else turn_of(item)


# --- lifted text ----------------------------------------------------------------------------------

DATE = re.compile(r"\d{4}-\d\d-\d\d")
MESSAGE_TIME = re.compile(
    r"\[(?:(?:[A-Za-z]{1,20} ){0,2}(?:[Tt]ime|[Dd]ate|[Ss]ent|[Rr]eceived)(?: at)?:? )?"
    r"\d{4}-\d\d-\d\d[T \d:.Z+-]{0,30}\]"
)
CLOCK_TIME = re.compile(_HOURS, re.IGNORECASE)
ANY_TIME = re.compile(_CLOCK)


def is_time(text: str) -> bool:
    """Whether a lifted text is a line with a date or a clock."""
    return len(text) < 120 and "\n" not in text and ANY_TIME.search(text) is not None


def about(line: str) -> str:
    """What a line is about: what stands before a colon, else all but its values."""
    return form_of(line).partition(":")[0].strip()


LISTING = re.compile(rf"{LISTED.pattern}|\s*(?:[-*+`~]|\d+[.)]|\Z)")  # of any kind


def about_block(line: str) -> str | None:
    """about() for a block that was seen to vary, where lines without a colon may say anything, and
    those of listings (None) come and go."""
    if LISTING.match(line):
        return None
    return about(line) if ":" in line else ""


def withdraws(before: str, after: str, label: Callable[[str], str | None] = about) -> bool:
    """Whether a text has nothing in the place of a line that it had, which may not stand on: no
    other line with its `label`."""
    old, new = collections.Counter(before.splitlines()), collections.Counter(after.splitlines())
    gone = collections.Counter(map(label, (old - new).elements()))
    gone.pop(None, 0)
    return not gone <= collections.Counter(map(label, (new - old).elements()))


def settle_insertions(
    history: History, depth: int, kept: list[int], lifted: dict[str, str]
) -> tuple[int, dict[str, str]]:
    """How many of the `depth` units may be restored, and what has then to be set down, by label, so
    that the newest value of each stands last.

    What the client no longer has must not stand on: from the unit that holds it on, its own form
    goes. So does the newest user turn if answers stand behind it (a tool loop) and something new
    has to be set down; only a clock time may wait. `kept`: places where something may stand.
    """
    wanted, standing, since = dict(lifted), dict[str, str](), dict[str, int]()
    first = history.units[history.first]
    if first.stored is not None and history.first < depth:
        for number, (kind, now) in enumerate(first.blocks()):
            if kind in REWRITABLE:
                label = f"{REWRITTEN}{number}"
                wanted[label], since[label] = now, history.first
                standing[label] = now if (kind, now) in first.stored.blocks else ""
    for at in kept:
        stored = history.units[at].stored
        for label, text in stored.inserted.items() if stored and at < depth else ():
            standing[label] = text
            since.setdefault(label, at)
    gone = [
        since[label]
        for label, text in standing.items()
        if label not in wanted
        or (label.startswith(LEARNED) and withdraws(text, wanted[label], about_block))
    ]
    if gone:
        return settle_insertions(history, min(gone), kept, lifted)
    pending = {label: text for label, text in wanted.items() if standing.get(label) != text}
    if not pending or history.target >= depth:
        return depth, pending
    but_clocks = [
        label in standing and CLOCK_TIME.sub("", standing[label]) == CLOCK_TIME.sub("", text)
        for label, text in pending.items()
    ]
    if all(but_clocks):
        return depth, {}
    return settle_insertions(history, history.target, kept, lifted)


def insert_lifted(view: View, history: History, depth: int, pending: dict[str, str]) -> None:
    """Put texts in front of what is said in the newest user turn; where nothing of the prompt has
    been read, in the first one. What is said behind them may be newer: so they stand in front of a
    decoration that says something of the kind."""
    place = next(at for at, unit in enumerate(history.units) if unit.speaks())
    if depth > place or not PERSONAL.isdisjoint(pending):
        place = history.target
    unit = history.units[place]
    unit.inserted = pending
    lifted = [text for label, text in pending.items() if not label.startswith(REWRITTEN)]
    pieces = [reminder("\n\n".join(lifted))] if lifted else []
    pieces += [text for label, text in pending.items() if label.startswith(REWRITTEN)]
    text = "\n\n".join(pieces)
    at = max(at for at, said in enumerate(unit.said) if said.speaks)
    turn = unit.turns[at] = unit.turns[at].own()
    slots = turn.slots()
    if not slots:
        turn.refit([{"type": view.dialect.text, "text": text}, *turn.holder[turn.key]])
        return
    newer = says_anew(pending.values(), [block for _, block in unit.blocks()])
    spoken = [slot for slot in slots if undress(slot.get())[1].strip()]
    slot = slots[0] if newer or not spoken else spoken[-1]
    slot.set(text + "\n\n" + slot.get())


def says_anew(texts: Iterable[str], decorations: list[str]) -> bool:
    """Whether decorations say something of the kind of lifted texts."""
    told = "\n".join(decorations).splitlines()
    lifted = "\n".join(texts).splitlines()
    dated = [line for line in told if "date" in line or "time" in line]
    if any(map(is_time, lifted)) and any(map(ANY_TIME.search, dated)):
        return True
    return not set(map(about, told)).isdisjoint({*map(about, lifted)} - {""})


class Editor:
    """All edits of a request's body, in order: scrub, roles, lift, replay."""

    def __init__(self, config: Config) -> None:
        self.config, self.scrubber, self.lifter = config, Scrubber(config), Lifter(config)
        self.replay = Replay(config)

    def apply(self, view: View, report: Report, asker: Asker = ANYBODY) -> Trace:
        """Edit a view in place. Raises Unreadable."""
        config, replay = self.config, self.replay
        report.items = len(view.turns)
        if not (config.scrub and view.dialect.edited):
            return Trace(replay.conversation(view))
        if goes_on_elsewhere(view):
            report.note = "it goes on from what the server has stored"
            return Trace(replay.conversation(view))
        self.scrubber.apply(view, report)
        if config.system_first:
            seen = replay.stays if config.replay else lambda *_: False
            system_first(view, report, lambda turn: seen(view, turn, asker.client))
        if not config.replay:
            return Trace(replay.conversation(view))
        history, lifted = History(replay.units(view)), list[Lifted]()
        if history.target:  # else it could not be set down
            first = history.units[history.first].words
            lifted = self.lifter.lift(view, hash((asker.client, view.dialect.name, first)))
        trace = replay.apply(view, history, lifted, report, asker)
        report.items_modified += report.replayed + bool(report.lifted or report.system_moved)
        return trace


# --- answers, calls and results -------------------------------------------------------------------

Call = tuple[str, str]  # id, name
NOT_LETTERS = re.compile(r"[\W_]+")


def plain(name: Any) -> str:
    """An id without punctuation, which some clients change."""
    return NOT_LETTERS.sub("", name) if isinstance(name, str) else ""


def letters(text: str) -> str:
    """What an answer is known by: its letters and digits without what the model thought."""
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    elif "<think>" in text:
        text = text.partition("<think>")[0]
    return NOT_LETTERS.sub("", text) or text.strip()


def agreement(record: Record, unit: Unit, at: int) -> int:
    """Whether a unit is the answer that the server was heard to give behind the first `at` units of
    a record (2: yes, 0: no, 1: it could not be read); a long one by its beginning or its end."""
    if len(record.units) > at:
        return 2 if record.units[at].heard and record.units[at].words == unit.words else 0
    answer = record.heard()
    if answer is None or len(record.units) < at:
        return 0
    if answer is ANY or answer is UNREAD:
        return 2 if answer is ANY else 1
    said, calls = unit.spoken
    if answer.calls or calls:
        part = not answer.complete and bool(calls & answer.calls)
        return 2 if calls == answer.calls or part else 0
    if answer.complete and said == answer.opening:
        return 2 if said else 0
    for heard in (answer.opening, answer.closing):
        if min(len(heard), len(said)) >= LONG_ANSWER:
            longer, shorter = (heard, said) if len(heard) > len(said) else (said, heard)
            if longer.startswith(shorter) or longer.endswith(shorter):
                return 2
    return 0


CALL_PARTS = ("tool_use", "tool_result")


class CallField(NamedTuple):
    """Where an object says which call it is about."""

    holder: Json
    key: str  # of the id
    named: Json | None  # has the name, or would
    said: str  # the call's arguments, or its result

    def call(self) -> Call:
        return str(self.holder.get(self.key)), str(members(self.named).get("name") or "")


def call_fields(item: Json) -> list[CallField]:
    """The places of an item that hold ids of calls, in order."""
    found = []
    for call in filter(members, listed(item.get("tool_calls"))):
        function = members(call.get("function"))
        found.append(CallField(call, "id", function, canonical(function.get("arguments"))))
    for part in map(members, listed(item.get("content"))):
        if part.get("type") == "tool_use":
            found.append(CallField(part, "id", part, canonical(part.get("input"))))
        elif part.get("type") == "tool_result":
            found.append(CallField(part, "tool_use_id", None, canonical(part.get("content"))))
    if "tool_call_id" in item:
        found.append(CallField(item, "tool_call_id", item, ""))
    elif "call_id" in item:
        named = item if str(item.get("type")).endswith("_call") else None
        said = canonical(item.get("arguments", item.get("input")))
        found.append(CallField(item, "call_id", named, said))
    return found


def canonical(value: Any) -> str:
    """A call's arguments, or a result, in one spelling."""
    if isinstance(value, dict):
        return _sorted_json(value)
    texts = []
    for part in value if isinstance(value, list) else [value]:
        text = part.get("text") if members(part).get("type") == "text" else part
        texts.append(text if isinstance(text, str) else _sorted_json(text))
    said = "\n".join(texts)
    if said[:1] == "{":
        with contextlib.suppress(ValueError, RecursionError):
            return _sorted_json(json.loads(said))
    return said


def beside_texts(turn: Turn, fields: Iterable[CallField] = ()) -> tuple[list[int], bool]:
    """Hashes of what a turn says beside its texts (`fields`: its calls and results), and whether
    more is among it: images, a name."""
    item, content = turn.item or {}, turn.holder.get(turn.key)
    said = [hash((plain(one.holder.get(one.key)), one.said)) for one in fields]
    count = len(said)
    for part in map(members, content if isinstance(content, list) else [content]):
        if part and part.get("type") not in UNSAID_PARTS + CALL_PARTS:
            said.append(hash(_sorted_json(bare(part))))
    if turn.role == "user" and "name" in item:
        said.append(hash(str(item["name"])))
    return said, len(said) > count


def respell(unit: Unit, first: tuple[Call, ...]) -> bool:
    """Give calls or results the ids, names and order of the first time; whether they changed."""
    spelled = {plain(ident): (ident, name) for ident, name in first}
    mine = sorted([plain(ident) for ident, _ in unit.calls])
    if unit.calls == first or len(spelled) != len(first) or mine != sorted(spelled):
        return False
    rank = {ident: place for place, ident in enumerate(spelled)}
    last = len(rank)
    turns: list[tuple[int, Turn]] = []
    for turn in unit.turns:
        item = copy.deepcopy(turn.item or {})
        fields = call_fields(item)
        for holder, key, named, _ in fields:
            holder[key], name = spelled[plain(str(holder.get(key)))]
            if named is not None and named.get("name", "") != name:
                named.pop("name", None)
                if name:
                    named["name"] = name
        parts = listed(item.get("content"))
        parts.sort(key=lambda part: rank.get(plain(members(part).get("tool_use_id")), last))
        place = min([last, *[rank[plain(one.call()[0])] for one in fields]])
        turns.append((place, turn_of(item) if fields else turn))
    if unit.role == "tool":
        turns.sort(key=lambda one: one[0])
    unit.turns = [turn for _, turn in turns]
    return True


# --- tools: first-seen form, first-seen order -----------------------------------------------------


class Tools:
    """The forms and the order in which tools were sent first. Bounded; safe for many threads."""

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self.limit, self.size = limit, 0  # bytes
        self.ranks = itertools.count()
        self.known: collections.OrderedDict[int, tuple[int, str]] = collections.OrderedDict()
        self.forms: dict[int, tuple[Any, dict[int, str]]] = {}  # see read()

    def first(self, asker: Asker, name: int, form: str) -> tuple[int, str]:
        """The rank and the form of a tool when a client, or else the warm-up, sent it first."""
        places = [hash((client, name)) for client in (asker.client, ANYBODY.client)]
        with self.lock:
            for place in places:
                if place in self.known:
                    self.known.move_to_end(place)
                    return self.known[place]
            new = next(self.ranks), form
            if asker.learn and len(form) <= self.limit >> 1:
                self.known[places[0]] = new
                self.size += 300 + len(form)
            while self.size > self.limit:
                self.size -= 300 + len(self.known.popitem(last=False)[1][1])
        return new

    def read(self, tools: list[Json]) -> dict[int, str]:
        """The JSON of each tool, by a hash of what it says; the Reader's lists are shared."""
        known = self.forms.get(id(tools))
        if known is None or known[0] is not tools:
            bared = map(bare, tools)
            known = tools, {hash(_sorted_json(tool)): json.dumps(tool) for tool in bared}
            if sum(map(len, known[1].values())) <= 1 << 18:
                remember(self.forms, id(tools), known, 16)
        return known[1]

    def apply(self, view: View, asker: Asker) -> bool:
        """Send tools in the form and order in which they were sent first, new ones at the end;
        whether that changed anything."""
        tools = view.body.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            return False
        forms = self.read(tools)
        if len(forms) != len(tools):
            return False  # one stands there twice
        first = sorted([self.first(asker, name, form) for name, form in forms.items()])
        sent = [form for _, form in first]
        if sent == list(forms.values()):
            return False
        view.body["tools"] = list(map(json.loads, sent))
        return True


# ==================================================================================================
# Explain: how much of a prompt was reused, and why not more
# ==================================================================================================


@dataclasses.dataclass
class Usage:
    """What the server reported of an answer, in tokens and ms; None (never 0) where it did not."""

    prompt: int | None = None
    cached: int | None = None
    prompt_ms: float | None = None
    output: int | None = None

    def read(self) -> int | None:
        """Prompt tokens that the server had to read."""
        if self.prompt is None or self.cached is None:
            return None
        return self.prompt - self.cached


# What a server calls a number, in `usage`, its details, `timings` or beside them -> what it is.
USAGE_KEYS = {
    "prompt_tokens": "prompt", "tokens_evaluated": "prompt", "cached_tokens": "cached",
    "prompt_cache_hit_tokens": "cached", "completion_tokens": "output", "output_tokens": "output",
    "predicted_n": "output", "cache_n": "cache_n", "prompt_n": "prompt_n", "prompt_ms": "prompt_ms",
    # Anthropic's: input_tokens are only what was not cached.
    "input_tokens": "input", "cache_read_input_tokens": "cache_read",
    "cache_creation_input_tokens": "cache_write",
}  # fmt: skip
USAGE_NAMES = {"usage", "timings", "tokens_evaluated"}
USAGE_MEMBER = re.compile(r'"(usage|timings|tokens_evaluated)"\s*:\s*')


def answer_events(first: bytes, last: bytes = b"") -> list[list[Json]]:
    """The events in an answer's first bytes, and in its last ones if it is longer; without streams
    there is one. Of an event whose beginning is cut off, its numbers."""
    streamed = first.startswith((b"data:", b"event:", b":")) or b"\ndata:" in first
    windows = []
    for window in filter(None, (first, last)):
        text, events = window.decode("utf-8", "replace"), list[Json]()
        for one in text.split("\n") if streamed else [text]:
            if "{" in one:
                try:
                    events.append(members(json.loads(one.removeprefix("data:"))))
                except (ValueError, RecursionError):
                    if window is (last or first):
                        events.append(numbers_at_end(one))
        windows.append(events)
    return windows


def numbers_at_end(text: str) -> Json:
    """The last members with numbers of a JSON object that is cut off."""
    found: Json = {}
    for member in list(USAGE_MEMBER.finditer(text))[-2:]:
        with suppress(ValueError, RecursionError):
            found[member[1]] = json.JSONDecoder().raw_decode(text, member.end())[0]
    return found


def usage_of(windows: list[list[Json]]) -> Usage:
    """The cache numbers in the events of an answer (llama-server, LM Studio, others)."""
    found: Json = {}
    for event in itertools.chain(*windows):
        for part in (event, members(event.get("response")), members(event.get("message"))):
            for name in USAGE_NAMES.intersection(part):
                read_numbers(found, name, part[name])
    prompt, cached, read = found.get("prompt"), found.get("cached"), found.get("prompt_n")
    if "input" in found:
        cached = found.get("cache_read", cached)
        whole = found["input"] + found.get("cache_read", 0) + found.get("cache_write", 0)
        prompt = max(whole, prompt or 0)  # some servers say 0 here, and the truth beside it
    if read is not None and "cache_n" in found:
        prompt, cached = read + found["cache_n"], found["cache_n"]
    elif read is not None and cached is None and prompt is not None and prompt >= read:
        cached = prompt - read  # a llama-server without cache_n
    if prompt is not None and cached is not None:
        cached = min(cached, prompt)
    return Usage(prompt, cached, found.get("prompt_ms"), found.get("output"))


def read_numbers(found: Json, key: str, value: Any) -> None:
    """Enter a number, or those of a usage or timings object, into `found`."""
    if isinstance(value, dict):
        for name, number in value.items():
            read_numbers(found, name, number)
    elif key in USAGE_KEYS and type(value) in (int, float) and 0 <= value < 1e15:
        found[USAGE_KEYS[key]] = value if key == "prompt_ms" else int(value)


# What leads to the words and calls of an answer, and the types of objects that hold words.
ANSWER_KEYS = ("choices", "message", "delta", "content", "content_block", "text", "tool_calls",
               "item", "output")  # fmt: skip
WORD_TYPES = (None, "text", "text_delta", "output_text", "response.output_text.delta")


def heard_answer(windows: list[list[Json]]) -> Heard:
    """What an answer says, by the events of its beginning and, if it is long, of its end."""
    said = [list(answer_parts(events)) for events in windows]
    texts = [letters("".join(text for text, _ in parts)) for parts in said]
    calls = {plain(call) for _, call in itertools.chain(*said)} - {""}
    if not calls and not any(texts):
        return UNREAD
    return Heard(texts[0], texts[-1], frozenset(calls), len(texts) == 1)


def answer_parts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(text, tool call id) pieces in an answer of any dialect; `key` is what leads to `value`."""
    for part in listed(value):
        yield from answer_parts(part, key)
    if not isinstance(value, dict):
        return
    kind = value.get("type")
    if kind in ("tool_use", "function_call") or key == "tool_calls":
        yield "", str(value.get("call_id") or value.get("id") or "")
    elif not str(kind).endswith(".done"):  # such an event says again what has been said
        for name in [name for name in ANSWER_KEYS if name in value]:
            part = value[name]
            if not isinstance(part, str):
                yield from answer_parts(part, name)
            elif kind in WORD_TYPES and name != "message":  # that is an error's
                yield part, ""


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# --- a prompt as text -----------------------------------------------------------------------------

BASE64 = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{2048,}={0,2}")
REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
# What of an item, part, call or result the server reads, in this order.
SAID_KEYS = ("call_id", "tool_call_id", "tool_use_id", "name", "function", "content", "output",
             "arguments", "input", "tool_calls")  # fmt: skip


def part_text(value: Any) -> str:
    """All that the server reads of an item, a part, a call or a result: ids, names and texts,
    without reasoning. Arguments are equal in any spelling: the server parses them. An image's bytes
    stand for few tokens, and are replaced by a hash."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.dumps(json.loads(value)) if value[:1] == "{" else value
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(part_text, value)))
    if not isinstance(value, dict):
        return "" if value is None else json.dumps(value)
    kind = value.get("type")
    if kind in UNSAID_PARTS:
        return str(value.get("text") or "") if kind in TEXT_PARTS else ""
    keys = [key for key in SAID_KEYS if key in value]
    if not keys:
        return BASE64.sub(lambda match: "#" + digest(match[0]).hex(), json.dumps(bare(value)))
    pieces = [plain(value["id"])] if "id" in value and tool_name(value) != "?" else []
    pieces += [plain(value[key]) if key.endswith("id") else part_text(value[key]) for key in keys]
    return "\n".join(filter(None, pieces))


def told_of(turn: Turn) -> str:
    """All that the server reads of a turn; remembered with it."""
    if turn.told is None:
        turn.told = part_text(turn.holder.get(turn.key) if turn.item is None else turn.item)
    return turn.told


def tool_name(tool: Any) -> str:
    """A tool's or a call's name for people, '?' where it has none."""
    name = (members(members(tool).get("function")) or members(tool)).get("name")
    return re.sub(r"[^!-~]", "?", name[:80]) if isinstance(name, str) else "?"


Segment = tuple[str, str]  # its name for people, and its text


class Prompt:
    """A prompt as it was forwarded, in the segments that the server reads: system, tools, turns.

    Reasoning is no segment, since clients and templates drop it at will. `head` is a hash of all
    before the turns, `turns` has one of all turns up to each. `time` is on any clock; `sent` is the
    prompt as it came, if it was edited. The last three members are known when the request ends."""

    def __init__(
        self, view: View, talk: str = "", side: str = "", now: float = 0, sent: Prompt | None = None
    ) -> None:
        self.conversation, self.side, self.time, self.sent = talk, side, now, sent
        self.segments = [("system", turn.text()) for turn in view.system()]
        self.system = "\n".join([text for _, text in self.segments])
        self.tools = list[str]()
        for tool in listed(view.body.get("tools")):
            self.tools.append(tool_name(tool))
            text = json.dumps(bare(tool) if members(tool) else tool)
            self.segments.append((f"tool {self.tools[-1]}", text))
        self.first = len(self.segments)  # place of the first turn
        self.reasoning = set[int]()  # numbers of the turns with which reasoning was sent
        self.answers = number = link = 0  # how many turns there are up to the last answer
        self.head, self.turns = hash(tuple(self.segments)), list[int]()
        turns = view.turns[view.leading() :]
        for turn in turns:
            if turn.role == "reasoning":
                self.reasoning.add(number + 1)
                continue
            number += 1
            if turn.role == "assistant" and turn.item:
                kinds = [members(part).get("type") for part in listed(turn.item.get("content"))]
                thought = any(kind in REASONING_PARTS for kind in kinds)
                if thought or turn.item.get("reasoning_content"):
                    self.reasoning.add(number)
            role = "prompt" if view.dialect.turns == "prompt" else turn.role
            self.segments.append((f"turn {number} ({role})", told_of(turn)))
            self.turns.append(link := hash((link, self.segments[-1])))
            if role == "assistant":
                self.answers = number
        self.size = sum([len(text) for _, text in self.segments])  # in characters
        held = self.segments + (sent.segments if sent is not None else [])
        texts = {id(text): text for _, text in held}
        self.memory = 370 * len(held) + sum(map(sys.getsizeof, texts.values()))  # in bytes
        self.step = ""  # what it is for, so that no long read alarms anybody
        if view.dialect.edited and turns:
            later = "tool step" if turns[-1].role == "tool" else "user turn"
            self.step = side or (later if self.answers else "first prompt")
        self.tokens: int | None = None
        self.number, self.first_pace = 0, 0.0  # see tell_pace()

    def at(self, place: int) -> Segment:
        """The segment at a place; an empty one behind the last."""
        return self.segments[place] if place < len(self.segments) else ("", "")

    def has_turns_of(self, base: Prompt) -> bool:
        """Whether its turns begin with all turns of another prompt."""
        count = len(base.turns)
        if self.turns[count - 1 : count] == base.turns[-1:]:
            return True
        (name, text), (base_name, base_text) = self.at(self.first), base.at(base.first)
        return name == base_name == "turn 1 (prompt)" and text.startswith(base_text)

    def goes_on(self, base: Prompt) -> bool:
        """Whether it begins with the whole of another prompt."""
        return self.head == base.head and self.has_turns_of(base)

    def depth(self, other: Prompt) -> int:
        """The number of segments that it begins with as another prompt does."""
        if self.head == other.head:
            return self.first + common_prefix(self.turns, other.turns)
        return common_prefix(self.segments[: self.first], other.segments[: other.first])

    def common(self, other: Prompt) -> int:
        """Characters that it begins with as another prompt does."""
        depth = self.depth(other)
        if depth == len(other.segments):
            return other.size
        (name, text), (other_name, other_text) = self.at(depth), other.at(depth)
        more = common_prefix(text, other_text) if name == other_name else 0
        return sum([len(text) for _, text in self.segments[:depth]]) + more


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common prefix, by halves: comparing slices is faster than comparing items."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def alike(a: str, b: str) -> bool:
    """Whether half of the longer text is common: its start and end, or its lines."""
    if a == b or 2 * min(len(a), len(b)) <= max(len(a), len(b)):
        return a == b
    a, b = a[:65536], b[:65536]
    prefix, wanted = common_prefix(a, b), max(len(a), len(b)) / 2
    if prefix + common_prefix(a[prefix:][::-1], b[prefix:][::-1]) > wanted:
        return True
    return sum(map(len, set(a.splitlines()) & set(b.splitlines()))) > wanted


KINDS = (  # what a differing span looks like, most telling first
    ("clock", _CLOCK),
    ("uuid", r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-\w{4}-\w{4}-\w{12}\b"),
    ("path", r"(?:\b[A-Za-z]:|~|\.{1,2})?[\\/][\w.~-]+(?:[\\/][\w.~-]*)+"),
    ("hash", r"\b[0-9a-f]{5,}\b|(?<![\w-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{12,}"),
    ("counter", r"\d+(?:[.,]\d+)*"),
    ("id", r"\b\w*\d\w*"),
)
VOLATILE = ("clock", "uuid", "hash", "counter", "path", "id", "tool order")


def kind_of(before: str, after: str, at: int) -> str:
    """What the texts look like where they part: one of KINDS, removed, added or text."""
    if at >= len(after.rstrip()) or at >= len(before.rstrip()):
        return "removed" if at >= len(after.rstrip()) else "added"
    start = max(before.rfind("\n", 0, at) + 1, at - 80)
    for name, pattern in KINDS:
        hits = [re.finditer(pattern, text[start : at + 80]) for text in (before, after)]
        there = [[hit[0] for hit in one if hit.start() <= at - start <= hit.end()] for one in hits]
        if all(there) and not (name == "hash" and "".join(one[0] for one in there).isdigit()):
            return name
    return "text"


def around(text: str, at: int) -> str:
    """The line, or a piece of it, where two texts part."""
    start = max(text.rfind("\n", 0, at) + 1, at - 30)
    end = text.find("\n", at + 1)
    return text[start : min(end if end >= 0 else len(text), at + 40)]


# --- verdicts -------------------------------------------------------------------------------------

LOOKED_AT = 8  # the newest of other conversations, which may be this one under another name
COMPARED = 32  # the newest of a conversation, or of all
LOOKED_THROUGH = 256  # prompts, the newest, for those of a conversation
VERDICTS = {
    "cold": "nothing like it was sent before",
    "extended": "goes on from this conversation's last prompt, and the server reused it",
    "rewritten": "the client changed earlier content",
    "template": "the client did its part, but the chat template renders old turns in another way",
    "lost": "the client did its part, but the server had forgotten it",
    "new branch": "shares its beginning with another conversation, or with an older prompt",
    "not reported": "the server gave no cache numbers",
}


@dataclasses.dataclass
class Verdict:
    """What became of one prompt.

    `share` is the part (0 to 1, by characters) that an earlier prompt began with; `expected` the
    tokens that should have been reused, None where nothing tells; `base` the number of the request
    that this one goes on from, 0: none. `cure` is a setting, ready to copy."""

    name: str = "cold"
    share: float = 0.0
    where: str = ""
    kind: str = ""
    before: str = ""
    after: str = ""
    advice: str = ""
    cure: str = ""
    side: str = ""
    step: str = ""
    base: int = 0
    expected: int | None = None

    def title(self) -> str:
        """The name, and what kind of request it is about."""
        return self.name + (f" ({self.step})" if self.step else "")

    def line(self) -> str:
        """The second log line, for a prompt that was not reused; '' if there is nothing to say."""
        if self.name == "new branch" and self.kind in ("regenerated", "edited"):
            return f"goes on from an older prompt than the newest one ({self.kind})"
        if self.name != "rewritten" or self.kind == "reasoning":
            return self.advice
        told = f"changed in {self.where}, {self.kind}: {self.before!r} -> {self.after!r}"
        if self.kind in ("taken out", "put in"):
            told = f"{self.where} was {self.kind}: {self.before or self.after!r}"
        return f"{told}; {self.remedy()}".rstrip("; ")

    def remedy(self) -> str:
        """What helps."""
        return f"{self.advice} {self.cure}".strip()


@dataclasses.dataclass
class Case:
    """A prompt under judgement, until the server's numbers are known.

    `base` is this conversation's prompt that it goes on from (`whole`) or was made from; `between`
    are the prompts that the server got since the one that it was compared with."""

    verdict: Verdict
    prompt: Prompt
    base: Prompt | None = None
    whole: bool = False
    between: list[Prompt] = dataclasses.field(default_factory=list)
    texts: tuple[str, str] = ("", "")  # of the place where they part, before and now
    place: int = 0  # of the segment where they part
    learned: list[Shape] = dataclasses.field(default_factory=list)  # all that varied there
    straight: float = 0.0  # the part of it that would be reused without kvproxy
    moved: bool = False  # by kvproxy itself: the client's messages only went on
    away: bool = False  # the server was away since then
    idle: float = 0.0  # seconds without a request before it
    ahead: int | None = None  # tokens of it that were read before it came
    slots: int | None = None  # that the server has, if it was asked
    first_byte: float = 0.0  # seconds until a stream began; 0: not known


class Ledger:
    """The last prompts, and what they have in common. Bounded, oldest out first."""

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self.limit, self.size = limit, 0  # bytes
        self.entries: collections.deque[Prompt] = collections.deque()
        self.count = 0  # of all prompts judged

    def judge(self, prompt: Prompt, lost_at: float = -1.0, shapes: Iterable[Shape] = ()) -> Case:
        """Compare a prompt with those before it, and remember it; settle() comes later. `lost_at`:
        when the server was last away, on the prompts' clock; `shapes`: what was learned."""
        with self.lock:
            stored = list(itertools.islice(reversed(self.entries), LOOKED_THROUGH))
            self.entries.append(prompt)
            self.count, self.size = self.count + 1, self.size + prompt.memory
            while self.size > self.limit and len(self.entries) > 1:
                self.size -= self.entries.popleft().memory
        verdict = Verdict(side=prompt.side, step=prompt.step)
        case = Case(verdict, prompt)
        if not stored or not prompt.segments:
            return case
        case.base = previous(prompt, stored)
        base = case.base
        if base is None:  # of other conversations the closest one, rather one with the same tools
            like = [one for one in stored if one.head == prompt.head] or stored
            rank = {one: (one.tools == prompt.tools, prompt.common(one)) for one in like[:COMPARED]}
            base = max(rank, key=rank.__getitem__)
        newer = stored[: stored.index(base)]
        case.between, case.away = newer[:COMPARED], base.time < lost_at
        case.whole = case.base is not None and prompt.goes_on(base)
        others = {base} if case.whole else {base, *stored[:LOOKED_AT]}
        verdict.share = max(map(prompt.common, others)) / (prompt.size or 1)
        sent = prompt.sent or prompt
        case.straight = max(sent.common(one.sent or one) for one in others) / (sent.size or 1)
        talks = [(one.conversation, one.head) for one in newer if not one.side]
        if not case.whole:
            judge_change(case, base, shapes)
        elif prompt.side or (base.conversation, base.head) not in talks:
            verdict.name = "extended"
        else:
            same = len(prompt.turns) == len(base.turns)
            verdict.name, verdict.kind = "new branch", "regenerated" if same else "edited"
        return case


def previous(prompt: Prompt, stored: list[Prompt]) -> Prompt | None:
    """The prompt of the same conversation that this one goes on from, or was made from by a change
    of its history; what stands before the turns does not count. One whose last message alone was
    put in another way (a branch, a question beside the conversation) is passed over."""
    talk, side = prompt.conversation, prompt.side
    named = [one for one in stored if one.conversation == talk and (side or not one.side)]
    own = named[:COMPARED]
    near = [one for one in stored[:LOOKED_AT] if one.conversation != talk and not one.side]
    best, reached = None, -1
    for one in own + near:  # its name may have changed
        whole = prompt.has_turns_of(one)
        depth = len(one.turns) if whole else common_prefix(prompt.turns, one.turns)
        if depth < reached or not (whole or prompt.answers > depth):
            continue
        tie = best if depth == reached else None
        if tie and (not whole or tie.head == prompt.head):
            continue
        if tie and prompt.common(one) <= prompt.common(tie):
            continue
        if one.conversation == talk or looks_alike(prompt, one):
            best, reached = one, depth
    newest = max(own[:1] + near[:1], key=lambda one: one.time, default=best)
    if best is None or newest is None or newest is best:
        return best
    # It was made from the newest one if the last message of that is history now.
    history = prompt.segments[prompt.first + reached : prompt.first + prompt.answers]
    made = newest.segments[-1][1] in [text for _, text in history]
    return newest if made and (newest.conversation == talk or looks_alike(prompt, newest)) else best


def looks_alike(prompt: Prompt, one: Prompt) -> bool:
    """Whether a prompt of another name seems to be of the same conversation."""
    (name, opening), first = prompt.at(prompt.first), one.at(one.first)[1]
    if name.endswith("(prompt)"):
        return prompt.goes_on(one)
    if prompt.side or one.side or not one.turns or not prompt.answers:
        return False
    if not (first in opening or opening in first or alike(first, opening)):
        said = {text for _, text in prompt.segments[prompt.first :] if len(text) > 20}
        if said.isdisjoint([text for _, text in one.segments[one.first :]]):
            return False
    return alike(one.system, prompt.system)


def judge_change(case: Case, base: Prompt, shapes: Iterable[Shape]) -> None:
    """Name what became of a prompt that does not go on from an earlier one."""
    verdict, prompt = case.verdict, case.prompt
    locate_change(case, base, shapes)
    place, same_talk = verdict.where.partition(" ")[0], case.base is not None
    sent, base_sent = prompt.sent or prompt, base.sent or base
    if same_talk and sent.has_turns_of(base_sent):
        case.moved = place == "turn" or sent.head == base_sent.head
    goes_on = same_talk and (place == "turn" or prompt.answers > 0)
    volatile = place != "turn" and (verdict.kind in VOLATILE or case.learned != [])
    same_agent = place != "system" or alike(base.system, prompt.system)
    if same_agent and (goes_on or volatile) and not prompt.side:
        verdict.name = "rewritten"  # a side request has a prompt of its own: no fault
    else:
        verdict.name = "cold" if verdict.share < 0.05 else "new branch"


def locate_change(case: Case, base: Prompt, shapes: Iterable[Shape]) -> None:
    """Say where a prompt parts from an earlier one, and what the change looks like."""
    verdict, prompt = case.verdict, case.prompt
    case.place = depth = prompt.depth(base)
    (old_name, old), (name, new) = base.at(depth), prompt.at(depth)
    verdict.where = name or old_name
    if base.system != prompt.system:
        verdict.where = "system"
        old, new = system_change(case, base, shapes)
    elif base.tools != prompt.tools:
        same = sorted(base.tools) == sorted(prompt.tools)
        verdict.where, verdict.kind = "tools", "tool order" if same else "tools changed"
        old, new = ", ".join(base.tools), ", ".join(prompt.tools)
    elif case.base is None and depth >= prompt.first:
        return  # the first words of another conversation
    else:
        verdict.kind = moved_text(base, prompt, depth)
        if verdict.kind == "taken out":
            verdict.where, new = old_name, ""
        elif verdict.kind == "put in":
            old = ""
    case.texts = old, new
    at = common_prefix(old, new)
    verdict.kind = verdict.kind or kind_of(old, new, at)
    verdict.before, verdict.after = around(old, at), around(new, at)


def system_change(case: Case, base: Prompt, shapes: Iterable[Shape]) -> tuple[str, str]:
    """The system texts that differ; or the two values of what was learned from this very prompt."""
    prompt, known = case.prompt, {shape.name(): shape for shape in shapes}
    rows = [shape.row() for shape in known.values()]
    left, pieces = lift_text(base.system, rows)
    if left != prompt.system:
        return left, prompt.system  # something else changed as well
    case.learned = [known[label] for label, _ in pieces]
    now = dict(lift_text((prompt.sent or prompt).system, rows)[1])
    label, value = next((one for one in pieces if one[1] != now.get(one[0])), pieces[0])
    return value, now.get(label, "")


def moved_text(base: Prompt, prompt: Prompt, depth: int) -> str:
    """How a text has moved at the place where two prompts part; '' if it has not."""
    (old_name, old), (name, new) = base.at(depth), prompt.at(depth)
    later, earlier = stands_behind(new, base, depth), stands_behind(old, prompt, depth)
    if later and earlier:
        return "another order"
    answer = "(assistant)" in name and "(assistant)" not in old_name
    if old and (later or answer or not name):
        return "taken out"
    if new and earlier:
        return "put in"
    if sorted(old.split()) != sorted(new.split()):
        return ""
    if "(tool)" in name and "(tool)" not in old_name:
        return "moved into the result"
    return "another form" if old.split() == new.split() else "another order"


def stands_behind(text: str, prompt: Prompt, depth: int) -> bool:
    """Whether a text stands behind a place; a word or two only if close to it."""
    behind = prompt.segments[depth + 1 : depth + 4 if len(text) <= 20 else None]
    return text != "" and any(text == other for _, other in behind)


# --- cures: a setting, ready to copy, tried on the two texts at hand ------------------------------

CURE_LINES = 4  # of a system prompt that one cure covers


def tell_cure(case: Case, config: Config) -> None:
    """Name the setting that would have kept a rewritten prompt the same, if there is one."""
    verdict, name, pattern, price = case.verdict, "LIFT_REGEX", "", ""
    system, user = verdict.where == "system", "(user)" in verdict.where
    if not system and not user and verdict.kind != "tool order":
        return
    for switch in ("scrub", "replay", "lift") if system else ("scrub", "replay"):
        if not getattr(config, switch):
            verdict.cure = f"{switch.upper()}=1, which is off"
            return
    if case.learned:
        pattern = "|".join([shape.pattern() for shape in case.learned])
        price = "learned: it is lifted from now on; from the first request on with"
    elif system:
        pattern = lines_pattern(*case.texts)
    elif user:
        name, pattern = "REPLAY_REGEX", block_pattern(*case.texts)
        if pattern and not replayable(case, pattern):
            name, pattern = "STRIP_REGEX", strip_pattern(case, pattern)
            price = "this cures it, but the model sees it no more:"
    if line := setting_line(config, name, pattern):
        verdict.advice, verdict.cure = price, line


def setting_line(config: Config, name: str, pattern: str) -> str:
    """A pattern as a setting, ready to copy: NAME='...', or NAME_2 if there is one. '' if that is
    set already."""
    pattern, known = re.sub(r"\\([ #&~-])", r"\1", pattern), getattr(config, name.lower())
    if not pattern or pattern in known:
        return ""
    quote = '"' if "'" in pattern else "'"
    number = f"_{len(known) + 1}" if known else ""
    return f"{name}{number}={quote}{pattern}{quote}"


def without_block(pattern: str, text: str) -> str:
    """A text without a block, unless that begins so often that looking for its ends takes long."""
    opening = pattern.partition(".*?")[0]
    many = sum(1 for _ in re.finditer(opening, text)) > 64
    return text if many else re.sub(pattern, "", text)


def replayable(case: Case, pattern: str) -> bool:
    """Whether REPLAY_REGEX would restore a block: it stood in the newest message, and is gone now
    that another one was answered and spoken behind it."""
    spoken = []
    for prompt in (case.base, case.prompt):
        behind = iter(prompt.segments[case.place :] if prompt is not None else ())
        answered = any("(assistant)" in name for name, _ in behind)  # leaves what follows it
        said = [text for name, text in behind if "(user)" in name]
        words = [text for text in said if without_block(pattern, text).strip()]
        spoken.append(answered and words != [])
    now = case.texts[1]
    return spoken == [False, True] and now == without_block(pattern, now)


def strip_pattern(case: Case, pattern: str) -> str:
    """A pattern without which the two texts are the same, and no message is empty, or ''."""
    segments = case.prompt.segments + (case.base.segments if case.base is not None else [])
    said = [text for name, text in segments if "(user)" in name]
    if all(without_block(pattern, text).strip() for text in said):
        for form in (pattern, rf"{pattern}\s*", rf"(?s)\s*{pattern[4:]}"):
            if len({without_block(form, text) for text in case.texts}) == 1:
                return form
    return ""


def varying(text: str) -> str:
    """A pattern for a piece of a line: numbers and names of days and months may vary."""
    pattern = re.sub(rf"\b(?:{_DAY}|{_MONTH})\b", r"\\w+", re.escape(text))
    return re.sub(r"\d+", r"\\d+", pattern)


def lines_pattern(old: str, new: str) -> str:
    """A pattern of whole lines, each there once, without which two system texts are equal."""
    pairs = zip(old.split("\n"), new.split("\n"), strict=False)
    patterns, texts = [], [old, new]
    for was, now in [(was, now) for was, now in pairs if was != now][:CURE_LINES]:
        label = re.split(r"\d", was[: common_prefix(was, now)])[0]
        label = label[: label.rfind(" ") + 1] or label
        named = len(re.findall("[A-Za-z]", label)) > 2
        pattern = f"^{varying(label)}.*$" if named else f"^{varying(was)}$"
        if any(len(re.findall(pattern, text, re.MULTILINE)) != 1 for text in (old, new)):
            return ""
        patterns.append(pattern)
        texts = [re.sub(pattern, "", text, flags=re.MULTILINE) for text in texts]
    return "|".join(patterns) if texts[0] == texts[1] else ""


def block_pattern(old: str, new: str) -> str:
    """A pattern of a block without which two user texts are equal."""
    prefix = common_prefix(old, new)
    suffix = common_prefix(old[prefix:][::-1], new[prefix:][::-1])
    for text in (old, new):  # the paragraphs around the change
        start = text.rfind("\n\n", 0, prefix + 2) + 1
        end = text.find("\n\n", max(start, len(text) - suffix - 2))
        block = text[start : end if end >= 0 else None].strip()
        line = block.split("\n")[0]
        typed = line == block and line[:1] not in ("<", "[")  # by a person, it may be
        reminder = line.startswith("<system-reminder")  # so clients, and kvproxy, tell many things
        if typed or reminder or len(line) > 300 or not re.search("[A-Za-z]{3}", line):
            continue
        opening = varying(re.sub(r"^(\W*[\w -]*[>:\]]?).*", r"\1", line))
        tags = re.findall(r"(?m)(?:</|\[/)[\w .-]{1,80}[>\]]$", block)[-1:]
        for closing in (*map(varying, tags), r"(?:\n\n|\Z)", r"(?:\n|\Z)"):
            pattern = f"(?s){opening}.*?{closing}"
            left = {undress(without_block(pattern, one).strip())[1].strip() for one in (old, new)}
            if len(left) == 1 and (left != {""} or "" in (old, new)):
                return pattern
    return ""


# --- what the server says -------------------------------------------------------------------------


def missing_tokens(case: Case, usage: Usage) -> int:
    """How many tokens too few were reused; 0 where that is little or unknown."""
    verdict, base = case.verdict, case.base
    if usage.cached is None or not usage.prompt:
        return 0
    exact = case.ahead or (base.tokens if base is not None and case.whole else None)
    verdict.expected = round(verdict.share * usage.prompt) if exact is None else exact
    missing = verdict.expected - usage.cached
    little = max(64, verdict.expected * (0.25 if exact is None else 0.01))
    due = verdict.name in ("extended", "new branch") and verdict.share >= 0.5 and not verdict.side
    return missing if due and missing >= little else 0


def settle(case: Case, usage: Usage, config: Config) -> None:
    """Weigh a verdict against what the server says it reused."""
    verdict, base = case.verdict, case.base
    case.prompt.tokens = usage.prompt
    verdict.base = base.number if base is not None else 0
    if usage.cached is None or not usage.prompt:
        verdict.name = "not reported" if verdict.name == "extended" else verdict.name
        tell_pace(case, 1_000_000 * case.first_byte / (case.prompt.size or 1))
    elif missing_tokens(case, usage):
        explain_loss(case, usage, config)
    elif usage.cached > max(0.9 * usage.prompt, (verdict.expected or 0) + 0.2 * usage.prompt):
        verdict.name = "extended"  # the change did not reach the prompt, or it was read before
    if verdict.name == "rewritten" and case.moved:
        verdict.advice = "by kvproxy itself; the client's messages only went on"
    elif verdict.name == "rewritten" and verdict.kind != "reasoning":
        tell_cure(case, config)


def tell_pace(case: Case, pace: float) -> None:
    """Tell the ms for each 1,000 characters beside those of the conversation's first request."""
    first = case.base.first_pace if case.base is not None else 0
    case.prompt.first_pace = first or pace
    if first and pace:
        told = f"{pace:.0f} ms to the first byte for each 1,000 characters, after {first:.0f}"
        case.verdict.advice = f"{told} in this conversation's first request"


def explain_loss(case: Case, usage: Usage, config: Config) -> None:
    """Say why a prompt that goes on from another was not reused."""
    verdict, base, prompt = case.verdict, case.base or case.prompt, case.prompt
    cached, expected, total = usage.cached or 0, verdict.expected or 0, usage.prompt or 1
    dropped = sorted(base.reasoning - prompt.reasoning) if case.whole else []
    if dropped:
        verdict.name, verdict.kind = "rewritten", "reasoning"
        verdict.where = f"turn{'s' * (len(dropped) > 1)} {' and '.join(map(str, dropped[:4]))}"
        verdict.advice = f"the client sends the reasoning of {verdict.where} no longer"
        return
    if case.away:
        cause = "away"
    elif case.between:
        cause = "taken"
    elif case.idle > 300:
        cause = "idle"
    else:
        cause = "not all kept" if cached >= 0.05 * total else "checkpoint"
    why = advice(cause, config).format(minutes=round(case.idle / 60))
    if cause == "taken":
        why = who_took_it(case, base, expected / total)
    verdict.name, verdict.kind = "lost", cause
    verdict.advice = f"{cached:,} of {expected:,} tokens were still there: {why}"
    loop = base.step == "tool step" or base.reasoning
    if prompt.step == "user turn" and loop and cause != "away":
        verdict.advice += OR_TEMPLATE


def who_took_it(case: Case, base: Prompt, due: float) -> str:
    """Who got a prompt's slot, and what would have kept it; `due`: the share that was to be reused.

    llama-server gives a request the idle slot whose content makes up more than -sps (0.1 unless
    set) of its prompt (server-context.cpp, get_available_slot)."""
    shares = {one: one.common(base) / (one.size or 1) for one in case.between}
    other = max(shares, key=shares.__getitem__)
    share, size = shares[other], other.tokens or other.size // 4
    same = other.conversation == base.conversation
    who = "a request of the same chat in another form" if same else "another conversation"
    who = f"a {other.side} request" if other.side else who
    if share <= 0.1:
        return f"{who} {ADVICE['taken']}"
    wanted = math.ceil(100 * share + 1) / 100
    several = "several slots" if wanted < due else "no -sps"
    helps = {None: ("one slot", several), 1: ("one slot",)}.get(case.slots, (several,))
    told = "; ".join([ADVICE[name] for name in helps]).format(wanted=wanted)
    shared = f"which shares {round(share * size):,} of its {size:,} tokens ({share:.2f})"
    return f"{who} came in between, {shared} and so was given this slot: {told}"


# What happened -> why or what helps | a setting that helps | how; what is set is not named.
_KINDS = "the model is hybrid, recurrent or sliding-window"
ADVICE = {
    "away": "the server was away in between (restart or crash)"
    "|warmup_file|WARMUP_FILE has it read the prompts in again after a start",
    "taken": "came in between: more slots (-np) or a larger host cache (--cache-ram) keep both",
    "one slot": "with one slot, -np 2 gives each its own, if memory allows",
    "several slots": "with several, -sps {wanted:.2f} keeps them apart, but new chats start cold",
    "no -sps": "no -sps keeps two apart that have so much in common",
    "idle": "nothing was sent for {minutes} minutes, and the server may unload when idle"
    " (--sleep-idle-seconds)|keepalive_seconds|KEEPALIVE_SECONDS prevents that",
    "checkpoint": f"the server was restarted, its host cache is off (--cache-ram 0), or {_KINDS}"
    " without a checkpoint there (--ctx-checkpoints, --swa-full)",
    "not all kept": f"{_KINDS}, and its last checkpoint lies further back (--ctx-checkpoints)",
    "template": "a template that keeps old turns as they were (--chat-template-file)"
    " helps|prefill_ahead|PREFILL_AHEAD=1 has them read while the person reads",
    "rewritten": "have the client keep it as it was, where it can",
    # of server logs
    "full re-processing": f"{_KINDS}, without a checkpoint before the change (--ctx-checkpoints)",
    "no similar slot": "a new conversation, or another one took its slot: -np or --cache-ram helps",
    "low similarity": "the start of the prompt changes, or another conversation took the slot",
    "slot cut": "prompts change in the middle, or conversations that begin alike take a slot from"
    " each other: -sps above sim keeps those apart, but new chats start cold",
    # of `check`
    "no slots": "the server does not tell whether its cache is on (perhaps to an API_KEY): a run of"
    " `python kvproxy.py bench` shows it",
    "no cache": "cache_prompt is off: remove --no-cache-prompt, or nothing is ever reused",
    "one for all": "one slot: a title or sub-agent request takes it, and the conversation must come"
    " back from the host cache (leave --cache-ram on); -np 2 takes memory, and gives each its own",
    "short context": "{context:,} tokens of context a slot is less than agents send"
    " (16,000-60,000): raise -c or lower -np",
    "no fault": "nothing in its settings hurts the cache, as far as it tells",
}  # fmt: skip
# Templates drop reasoning when a user speaks. Until the server tells how it renders both prompts:
OR_TEMPLATE = "; or else the chat template renders old turns in another way now"


def advice(cause: str, config: Config) -> str:
    """An entry of ADVICE, without a setting that is set."""
    told, setting, how = (ADVICE[cause] + "||").split("|")[:3]
    return told if getattr(config, setting, True) not in ("", 0, "0") else f"{told}; {how}"


# In the last turn, or in the system prompt of a request that nobody has answered yet.
SIDE_WORDS = ("title", "tags", "quer", "autocompletion", "next", "follow-up", "summar")
SIDE_SHAPES = re.compile(
    r"(?P<title>\b(?:generate|write|create|produce|give)\b[^\n]{0,80}\btitle\b|\btitle generator\b)"
    r"|(?P<tags>\bgenerate\b[^\n]{0,80}\btags\b)"
    r"|(?P<queries>\bgenerat(?:e|ing)\b[^\n]{0,80}\bquer(?:y|ies)\b)"
    r"|(?P<completion>\bautocompletion (?:system|task)\b)"
    r"|(?P<suggestion>\b(?:suggest|predict)\b[^\n]{0,80}\b(?:next|follow-ups?)\b)"
    r"|(?P<summary>\bsummar(?:y|ize|ise)\b[^\n]{0,80}\b(?:conversation|session)\b)"
)


def side_of(view: View, agent: str) -> str:
    """The name of a request that a client sends beside the conversation (title, suggestion,
    sub-agent), which has a prompt of its own; '' for others. `agent`: a sub-agent's id."""
    body, turns = view.body, view.turns[-1:]
    if agent:
        return "sub-agent"
    wanted = members(members(body.get("output_config") or body.get("text")).get("format"))
    titled = "title" in members(members(wanted.get("schema")).get("properties"))
    if titled or "thread_title" in str(body.get("client_metadata")):  # Codex says so
        return "title"
    if body.get("tools"):
        return ""
    if not any(turn.role == "assistant" for turn in view.turns):
        turns = view.system()[:1] + turns
    for turn in turns:
        text = turn.text()[:2000].lower()
        match = any(word in text for word in SIDE_WORDS) and SIDE_SHAPES.search(text)
        if match:
            return str(match.lastgroup)
    return ""


SAVED_BY = (
    "Counted are only tokens that would not have been reused without kvproxy, as far as the prompts"
    " that came tell, at the speed at which the server reads 512 tokens and more."
)
IDLE_WAIT = 5.0  # seconds that a request is explained later when the server can be asked then
ANSWER_START = 80  # characters that a template puts behind the last turn, for the answer to come


def chat_of(view: View) -> Json:
    """A Messages or Responses body as the chat that llama-server makes of it: /apply-template takes
    no other."""
    messages: list[Json] = [{"role": "system", "content": turn.text()} for turn in view.head]
    for turn in view.turns:
        item, said, made = turn.item or {}, turn.text(), list[Json]()
        for call in call_fields(item):
            ident = call.holder.get(call.key)
            if call.named is not None:
                function = {"name": call.named.get("name"), "arguments": call.said}
                made.append({"type": "function", "id": ident, "function": function})
            else:
                result = said if turn.key == "output" else call.said
                messages.append({"role": "tool", "tool_call_id": ident, "content": result})
        parts = [*listed(item.get("content")), *listed(item.get("summary"))]
        parts = [part for part in map(members, parts) if part.get("type") in THOUGHTS]
        thought = "".join(str(part.get("thinking") or part.get("text") or "") for part in parts)
        role = "assistant" if turn.role == "reasoning" else turn.role
        if role == "tool" or not (said or made or thought):
            continue
        if role != "assistant" or not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": ""})
        last = messages[-1]  # an answer may have several items
        last["content"] += said
        if made:
            last["tool_calls"] = [*last.get("tool_calls", ()), *made]
        if thought:
            last["reasoning_content"] = last.get("reasoning_content", "") + thought
    tools = [
        {"type": "function", "function": {"parameters": one.get("input_schema"), **bare(one)}}
        for one in map(members, listed(view.body.get("tools")))
    ]
    kept = {key: value for key, value in view.body.items() if key in FOR_TEMPLATES}
    return {**kept, "messages": messages, **({"tools": tools} if tools else {})}


THOUGHTS = ("thinking", "reasoning_text", "summary_text")  # types of parts
FOR_TEMPLATES = ("chat_template_kwargs", "reasoning_effort")


def rendered_otherwise(verdict: Verdict, base: Prompt, before: str, now: str) -> None:
    """Give the verdict `template` if a server renders old turns in another way than before.
    `before` is what it makes of `base`, `now` of the prompt that goes on from it."""
    at = common_prefix(before, now)
    if not before or not now or len(before) - at <= ANSWER_START:
        return
    place = 0
    for number, (_, text) in enumerate(base.segments[base.first :], base.first + 1):
        found = before.find(text.strip()[:60], place, at)
        if found >= 0:
            verdict.where, place = base.at(number)[0], found
    verdict.name = verdict.kind = "template"
    verdict.before, verdict.after = around(before, at), around(now, at)


def weights_of(
    segments: list[Segment], tokens: int | None, count: Callable[[str], int | None] | None = None
) -> Json:
    """Where the tokens of a prompt go: system, tools with the five largest, turns. `count` has the
    server count a text's tokens; without it they are estimated from the characters."""
    tools = [(name[5:], text) for name, text in segments if name.startswith("tool ")]
    largest = sorted(tools, key=lambda tool: len(tool[1]), reverse=True)[:5]
    names = "system", "tools", "turns"
    parts = [
        "\n".join([text for name, text in segments if name.startswith(kind.rstrip("s"))])
        for kind in names
    ] + [text for _, text in largest]
    numbers = list[int | None]()
    for part in parts:
        numbers.append(count(part) if count is not None and None not in numbers else None)
    estimated = None in numbers
    if estimated:
        size = sum(map(len, parts[:3])) or 1
        numbers = [round(len(part) * (tokens or size / 4) / size) for part in parts]
    row: Json = dict(zip(names, numbers, strict=False))
    of_tools = dict(zip([name for name, _ in largest], numbers[3:], strict=True))
    return row | {"estimated": estimated, "largest tools": of_tools}


# ==================================================================================================
# Relay: HTTP on both sides, with http.server and http.client. The only section that touches sockets
# of requests. What the library does right is the library's; each override says what it mends
# ==================================================================================================

HEAD_LIMIT = 65536  # bytes of a head
HEADER_LIMIT = 100  # header lines, as in llama-server
CHUNK_LINE_LIMIT = 8192  # bytes of the line that tells a chunk's size
INTERIM_LIMIT = 64  # answers like 100 and 103 before the final one
BUFFER = 8192  # bytes for a client, half of it for the server: each idle stream holds both
PIECE_BYTES = 65536  # bytes of a body that are passed on at a time
BODY_SECONDS = 60.0  # for each MB of a request's body, and at least
SEND_SECONDS = 300.0  # a client may leave an answer unread this long: then its slot is freed
KEEP_SECONDS = 120.0  # a client's connection may stay open this long between requests
ALONE_SECONDS = 0.5  # a client that hangs up during a stream may go unnoticed this long
QUIET_SECONDS = 0.02  # the server is silent this long: the model works, there is time to explain
LINGER_SECONDS = 2.0  # a client gets to read an error while it is still sending
DRAIN_SECONDS = 10.0  # streams get this long to end when the proxy stops
TAP_BYTES = 65536  # of an answer's end (and a quarter of its start), kept to read the usage from

# RFC 9110 section 7.6.1. Authorization is end to end.
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
HOP_BY_HOP |= {"proxy-connection", "proxy-authenticate", "proxy-authorization"}
WRITTEN_ANEW = {"host", "expect", "content-length", "x-kvproxy-conversation"}

TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
TOKEN_START = re.compile(TOKEN)
REQUEST_LINE = re.compile(rb"(%s) ([\x21-\x7e\x80-\xff]+) HTTP/(\d)\.(\d)\r?\n" % TOKEN)
STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-9]\d\d)(?: ([\t\x20-\x7e\x80-\xff]*))?\r?\n")
FIELD_LINE = re.compile(rb"(%s):([\t\x20-\x7e\x80-\xff]*)\r?\n" % TOKEN)
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\x00]*)?\r\n")
TRAILER_LINE = re.compile(rb"(?:%s:[\t\x20-\x7e\x80-\xff]*)?\r\n" % TOKEN)
HEAD_END = re.compile(rb"\n\r?\n")
LENGTH = re.compile(r"[0-9]{1,19}")

Headers = list[tuple[bytes, bytes]]
Url = urllib.parse.SplitResult
Part = tuple[bytes, bytes]  # of a body: as received, and the payload in it


class BadMessage(http.client.HTTPException):
    """A message that is not HTTP/1.x as RFC 9112 has it."""


class TooLong(BadMessage):
    """A head or a line that is longer than its limit."""


class Refused(Exception):
    """The proxy answers by itself: (status, a sentence that says what to do)."""


class ClientGone(Exception):
    """The client hung up, or stopped reading."""


class BrokenOff(Exception):
    """The answer cannot be completed; the client must be able to see that."""


class Answered(Exception):
    """The server answers before it has read the whole request."""


# --- sockets --------------------------------------------------------------------------------------

READ, WRITE = getattr(select, "POLLIN", 1), getattr(select, "POLLOUT", 4)
HUNG_UP = getattr(select, "POLLRDHUP", 0)  # Linux tells of a hang-up behind unread bytes
SILENCE = struct.pack("ll", 0, 250_000)  # a `struct timeval` of a quarter of a second


class Poller:
    """Waits for events of sockets. `selectors` has no POLLRDHUP; select() takes no descriptor above
    1023 on Unix."""

    def __init__(self) -> None:
        self.wanted: dict[int, int] = {}
        self.poll: Any = None

    def wait(self, wanted: dict[int, int], seconds: float) -> dict[int, int]:
        """The events that come of those that are wanted (by descriptor)."""
        if not hasattr(select, "poll"):
            return self.select(wanted, max(0.0, seconds))
        if wanted != self.wanted:  # made anew only then: a stream waits for the same ones each time
            self.wanted, self.poll = wanted, select.poll()
            for descriptor, events in wanted.items():
                self.poll.register(descriptor, events)
        return dict(self.poll.poll(1000 * max(0.0, seconds)))

    @staticmethod
    def select(wanted: dict[int, int], seconds: float) -> dict[int, int]:
        """For Windows."""
        reads = [descriptor for descriptor, events in wanted.items() if events & READ]
        writes = [descriptor for descriptor, events in wanted.items() if events & WRITE]
        if not reads and not writes:  # it does not take three empty lists
            time.sleep(seconds)
            return {}
        reads, writes, _ = select.select(reads, writes, [], seconds)
        return {one: READ * (one in reads) | WRITE * (one in writes) for one in {*reads, *writes}}


def never_wait(events: int) -> None:
    """The `wait` of a stream that nobody reads from."""
    raise BlockingIOError


class Stream(io.RawIOBase):
    """A connected socket as a file that calls `wait(events)` where it would block, so that the
    relay can wait for both of its sockets at once. It stands in for the socket in the library.

    `gone` is the exception that a broken connection raises."""

    def __init__(
        self, sock: socket.socket, wait: Callable[[int], None], gone: type[Exception]
    ) -> None:
        self.sock, self.wait, self.gone = sock, wait, gone
        self.descriptor = sock.fileno()
        self.received = 0  # bytes
        self.ahead = bytearray()  # bytes read before anyone asked for them
        self.drained = False  # the last read has emptied the socket
        self.alone_until = 0.0  # on the monotonic clock
        sock.setblocking(False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.ahead:
            size = min(len(buffer), len(self.ahead))
            buffer[:size] = self.ahead[:size]
            del self.ahead[:size]
            return size
        if (
            self.drained and time.monotonic() > self.alone_until
        ):  # asking it would cost a system call and perhaps a switch of threads
            self.wait(READ)
        size = self.attempt(self.sock.recv_into, buffer, READ)
        self.received += size
        # With TLS the socket may hold bytes that the system knows nothing of.
        self.drained = size < len(buffer) and not hasattr(self.sock, "pending")
        return size

    def read_alone(self, alone: bool = True) -> None:
        """Let reads wait in the system instead of calling `wait`, until it is silent for a quarter
        of a second, and for half a second at most. That saves a system call and a switch of threads
        for each event of a stream; with 256 of them Python's lock is what all wait for."""
        self.alone_until = time.monotonic() + ALONE_SECONDS if alone else 0.0
        if alone is not self.sock.getblocking():
            self.sock.setblocking(alone)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, SILENCE)

    def attempt(self, call: Callable[[Any], int], data: Any, events: int) -> int:
        while True:
            try:
                return call(data)
            except AGAIN:
                self.wait(events)
            except OSError as error:
                raise self.gone(str(error)) from None

    def sendall(self, data: Any) -> None:
        while data:
            sent = self.attempt(self.sock.send, data, WRITE)
            data = memoryview(data)[sent:] if sent < len(data) else b""

    def makefile(self, mode: str, size: int = BUFFER // 2) -> Any:
        return io.BufferedReader(self, size)

    def flush(self) -> None:
        """Nothing is buffered; http.client flushes files after it closed the socket."""

    def close(self) -> None:
        if not self.closed:
            with suppress(OSError):  # wakes threads that wait on it; close() does not
                self.sock.shutdown(socket.SHUT_RDWR)
            self.sock.close()
        super().close()


# --- reading messages -----------------------------------------------------------------------------


def read_line(file: Any, limit: int) -> bytes:
    """A line with its end. Raises TooLong, and EOFError when the file ends before."""
    line: bytes = file.readline(limit + 1)
    if len(line) > limit:
        raise TooLong("a line is too long")
    if line[-1:] != b"\n":
        raise EOFError("the connection ended in the middle of a line")
    return line


class Fields(http.client.HTTPMessage):
    """Headers with an index: the library's look-ups go through all lines each time."""

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
        """The members of a header that is a list, in lower case."""
        return [member.strip().lower() for value in self.all(name) for member in value.split(",")]

    def end_to_end(self, *drop: str) -> Iterator[tuple[str, str]]:
        """The headers that a proxy passes on, without `drop`. Connection may list more, but not
        Content-Length: without it the body would be taken for the next message."""
        listed = set(self.members("connection")) - {"content-length"}
        dropped = HOP_BY_HOP.union(drop, listed)
        return (item for item in self.raw_items() if item[0].lower() not in dropped)

    def body_length(self) -> int | None:
        """Content-Length. Raises BadMessage unless all values are equal plain numbers: int() takes
        +5 and 1_0 as well, and of two lengths the library takes the first."""
        values = self.all("content-length")
        if len(set(values)) > 1 or not all(map(LENGTH.fullmatch, values)):
            raise BadMessage("bad Content-Length")
        return int(values[0]) if values else None


def read_headers(file: Any, limit: int = HEAD_LIMIT) -> Fields:
    """Header lines (RFC 9112 section 5) up to the blank line. parse_headers() of the library splits
    them at a bare CR as well, drops all that stands behind a line without a colon, keeps folded
    ones, and takes more than twice as long."""
    headers = Fields()
    whole = HEAD_END.search(b"\n" + file.peek())  # as a rule it is there
    lines = iter(file.read(whole.end() - 1).splitlines(True) if whole else ())
    while (line := next(lines, b"") or read_line(file, limit)) not in (b"\r\n", b"\n"):
        limit -= len(line)
        if len(headers) >= HEADER_LIMIT:
            raise TooLong("too many header lines")
        found = FIELD_LINE.fullmatch(line)
        if not found:  # also a NUL, a space before the colon
            raise BadMessage("bad header line")
        headers.set_raw(found[1].decode(), found[2].strip(b" \t").decode("latin-1"))
    return headers


def whole_chunks(block: bytes) -> tuple[bytes, int]:
    """The payload of the chunks that stand whole at a block's start, and how many bytes they have,
    framing and all. The last chunk, which has size 0, is none of them."""
    payload, at = b"", 0
    while found := CHUNK_LINE.match(block, at):
        start = found.end()
        end = start + int(found[1], 16)
        if end == start or block[end : end + 2] != b"\r\n":
            break
        payload += block[start:end]
        at = end + 2
    return payload, at


def read_chunks(file: Any, limit: float = float("inf")) -> Iterator[Part]:
    """A chunked body (RFC 9112 section 7.1) as it comes. Raises BadMessage, EOFError and, for more
    than `limit` bytes, Refused. HTTPResponse takes +2, 0x2 and 1_0 for sizes, does not look at what
    ends a chunk, and takes the connection's end for the end of the trailers."""
    total = 0
    while True:
        payload, size = whole_chunks(file.peek())
        if size:  # an event of a stream is a chunk as a rule, and comes at once
            total += len(payload)
            if total > limit:
                raise Refused(413, TOO_LONG % limit)
            yield file.read(size), payload
            continue
        line = read_line(file, CHUNK_LINE_LIMIT)
        found = CHUNK_LINE.fullmatch(line)
        if not found:
            raise BadMessage("bad chunk size")
        left = int(found[1], 16)
        if not left:
            break
        total += left
        if total > limit:
            raise Refused(413, TOO_LONG % limit)
        while left:
            data = file.read1(min(left, PIECE_BYTES))
            if not data:
                raise EOFError("the connection ended in the middle of a chunk")
            left -= len(data)
            end = b"" if left else read_line(file, 2)
            if end not in (b"", b"\r\n"):
                raise BadMessage("a chunk is longer than its size")
            yield line + data + end, data
            line = b""
    while line[-4:] != b"\r\n\r\n":
        trailer = read_line(file, HEAD_LIMIT - len(line))
        if not TRAILER_LINE.fullmatch(trailer):
            raise BadMessage("bad trailer")
        line += trailer
    yield line, b""


def read_plain(file: Any, left: int) -> Iterator[Part]:
    """A body of that length as it comes. Raises EOFError if it is cut: read1() of HTTPResponse
    hides that."""
    while left:
        data = file.read1(min(left, PIECE_BYTES))
        if not data:
            raise EOFError("the connection ended before the body did")
        left -= len(data)
        yield data, data


@dataclasses.dataclass
class Request:
    """A request's head, as received, but for an absolute target: that is a path."""

    method: str
    path: str  # with the query; a character for each byte
    headers: Fields
    old: bool = False  # HTTP/1.0
    length: int | None = None  # Content-Length
    chunked: bool = False

    def get(self, name: str) -> str:
        """The value of a header (in lower case), the first one if there are several, or ''."""
        values = self.headers.index.get(name)
        return values[0] if values else ""


# --- the model server's side ----------------------------------------------------------------------


class Response(http.client.HTTPResponse):
    """An answer of the model server."""

    _method: str  # of the request
    fp: Any  # a BufferedReader on the connection's Stream
    headers: Fields
    length: int | None
    keeps: bool  # the connection may be used again

    def begin(self) -> None:
        """Read the head of the final answer, and how its body ends (RFC 9112 section 6.3): it is
        `chunked`, has a `length`, or ends when the connection does.

        The library takes 103 for the answer (RFC 9110 section 15.2), and has no strict parser."""
        for _ in range(INTERIM_LIMIT):
            line = read_line(self.fp, HEAD_LIMIT)
            match = STATUS_LINE.fullmatch(line)
            if not match:
                raise BadMessage("bad status line")
            headers = self.headers = read_headers(self.fp, HEAD_LIMIT - len(line))
            self.status, reason = int(match[1]), match[2] or b""
            if self.status >= 200 or self.status == 101:
                break
        if self.status < 200:
            raise BadMessage("it switches to another protocol, or has no final answer")
        self.reason = reason.decode("latin-1")
        coding = ",".join(headers.all("transfer-encoding")).strip().lower()
        self.chunked = False
        self.length = None if coding else headers.body_length()
        if self._method == "HEAD" or self.status in (204, 304):
            self.length = 0
        elif coding not in ("", "chunked"):
            raise BadMessage("unknown Transfer-Encoding")
        else:
            self.chunked = bool(coding)
        self.will_close = False  # else getresponse() would close the socket
        framed = self.chunked or self.length is not None
        closes = "close" in headers.members("connection") or line.startswith(b"HTTP/1.0")
        self.keeps = framed and not closes

    def release(self) -> bool:
        """Let go of the connection, at the end of the body; whether it can be used again."""
        reader, self.fp = self.fp, None
        reader.raw.wait = never_wait
        reader.raw.read_alone(False)
        with suppress(ConnectionError):
            try:
                reader.peek(1)
            except BlockingIOError:  # nothing came that nobody asked for
                reader.detach()  # else it would close the connection
                return self.keeps
        return False

    def pieces(self) -> Iterator[Part]:
        """The body as it comes; coded in chunks where only closing tells its end."""
        if self.chunked:
            yield from read_chunks(self.fp)
        elif self.length is not None:
            yield from read_plain(self.fp, self.length)
        else:
            while data := self.fp.read1(PIECE_BYTES):
                yield b"%x\r\n%s\r\n" % (len(data), data), data
            yield b"0\r\n\r\n", b""


class Upstream(http.client.HTTPConnection):
    """A connection to the model server."""

    response_class = Response
    auto_open = 0  # a connection that was closed is not opened again unasked
    sock: Any  # a Stream, once it is connected
    _buffer: list[bytes]
    _HTTPConnection__response: Any

    def __init__(self, url: Url, host: str, timeout: float, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, url.port or (443 if tls else 80), timeout)
        self.url, self.tls = url, tls
        self.kept = self.unfinished = False  # after an answer; a request was not sent whole

    def connect(self) -> None:
        """As in the library, whose HTTPSConnection is another class; but nothing blocks later."""
        super().connect()
        if self.tls is not None:
            self.sock = self.tls.wrap_socket(self.sock, server_hostname=self.host)
        self.sock = Stream(self.sock, never_wait, ConnectionError)

    def _encode_request(self, request: str) -> bytes:
        """The library's targets are ASCII only."""
        return request.encode("latin-1")

    def _send_output(self, message_body: Any = None, encode_chunked: bool = False) -> None:
        """The library sends head and body apart, and the server wakes up twice."""
        head, body = b"\r\n".join([*self._buffer, b"", b""]), message_body or b""
        self._buffer.clear()
        if len(body) <= PIECE_BYTES:
            head, body = head + body, b""
        self.send(head)
        self.send(body)

    def answered(self) -> bool:
        """Read ahead: whether the final answer has begun, or the connection has ended."""
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


class Tap:
    """The first and the last bytes of an answer, to read the usage from; if wanted, the whole."""

    __slots__ = ("first", "last", "whole")

    def __init__(self) -> None:
        self.first, self.last = b"", bytearray()
        self.whole: bytearray | None = None

    def add(self, data: bytes) -> None:
        self.last += data
        if self.whole is not None:
            self.whole += data
            if len(self.whole) > AHEAD_BYTES:
                self.whole = None
        if len(self.last) > 2 * TAP_BYTES:
            self.first = self.first or bytes(self.last[: TAP_BYTES // 4])
            del self.last[:-TAP_BYTES]

    def windows(self) -> tuple[bytes, bytes]:
        """(start, end) of the answer; of a short one (all of it, b"")."""
        return (self.first, bytes(self.last)) if self.first else (bytes(self.last), b"")


# --- the client's side ----------------------------------------------------------------------------

TOO_LONG = "The body is longer than MAX_BODY_MB allows (%d bytes)."
ERROR_KINDS = {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}


def error_body(path: str, status: int, message: str) -> bytes:
    """An error object in the style of the dialect's API: SDKs raise what their users know."""
    dialect, _ = dialect_of(path.partition("?")[0])
    kind = ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if dialect is not None and dialect.name == "messages":
        return dump({"type": "error", "error": {"type": kind, "message": message}})
    return dump({"error": {"message": message, "type": kind, "code": status}})


class Relay(BaseHTTPRequestHandler):
    """One client connection: reads requests, forwards them, relays the answers."""

    server: Server
    protocol_version = default_request_version = "HTTP/1.1"
    rbufsize = BUFFER
    rfile: Any
    _headers_buffer: list[bytes | bytearray]

    # --- the life of a connection -----------------------------------------------------------------

    def setup(self) -> None:
        self.proxy, self.socket = self.server.proxy, self.request
        self.config = self.proxy.config
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request = Stream(self.socket, self.wait_for_client, ClientGone)
        self.poller = Poller()
        super().setup()  # makes rfile and wfile of it
        self.upstream: Any = None  # an Upstream, while a request is served
        self.kept: Any = None  # an Upstream, between two requests
        self.exchange: Any = None  # an Exchange, likewise
        self.patience = self.config.header_timeout  # seconds until the next request
        self.limit = self.config.max_body_mb << 20
        self.until = 0.0  # on the monotonic clock: the client has to send by then
        self.linger = False  # the client is still sending
        self.abort = False
        self.host = ""  # the last Host that was found to be known
        self._headers_buffer = []

    def handle_one_request(self) -> None:
        """Serve the next request, if one comes in time.

        In the library each read has a time-out of its own, so that a head may take for ever; only
        methods with a do_ function exist, and errors are HTML pages."""
        self.command, self.path, self.request_version = "", "/", self.protocol_version
        self.close_connection, status, fault = True, 0, ""
        self.watched = READ | HUNG_UP  # events of the client, while the server is waited for
        self.held = 0  # bytes of the request's body
        self.server.waiting[self.socket] = None
        try:
            if self.proxy.server is not None and self.read_head():
                self.serve(self.head)
        except Refused as refused:
            self.close_connection = self.linger = True
            status, fault = refused.args
            if self.exchange is None:  # else it has a line of its own
                self.proxy.log.info("refused | status=%d | %s", status, fault)
            with suppress(ClientGone):
                self.respond(status, error_body(self.path, status, fault))
        except BrokenOff as cut:
            self.close_connection, fault = True, f"cut: {cut}"
        except (ClientGone, OSError, EOFError):
            self.close_connection, fault = True, "client left"
        finally:
            self.server.waiting.pop(self.socket, None)
            self.server.hold(-self.held)
            exchange, self.exchange, self.upstream = self.exchange, None, None
            if exchange is not None:
                exchange.status, exchange.fault = status or exchange.status, fault
                self.proxy.finished(exchange)

    def finish(self) -> None:
        """Close; after unread bytes that would be a reset, and lose the answer (RFC 9112 9.6)."""
        with suppress(ClientGone, OSError):
            if self.abort:  # RST is the only sign of a cut that a client without framing can see
                option = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
                self.socket.close()
            self.socket.shutdown(socket.SHUT_WR)
            end = time.monotonic() + LINGER_SECONDS
            self.until = end if self.linger else 0.0
            while self.rfile.read1(PIECE_BYTES) and time.monotonic() < end:
                pass
        if self.kept is not None:
            self.kept.close()
        self.request.wait = never_wait  # it refers to this handler, which refers to it
        for file in (self.wfile, self.rfile):  # as in the library, but for ClientGone
            with suppress(ClientGone, OSError):
                file.close()

    # --- waiting ----------------------------------------------------------------------------------

    def wait_for_client(self, events: int) -> None:
        """Raises TimeoutError when it does not send in time, ClientGone when it does not read, and
        Answered when the server answers already."""
        client = self.request.descriptor
        if events == WRITE:
            if not self.poller.wait({client: WRITE}, SEND_SECONDS):
                raise ClientGone("it does not read its answer")
            return
        wanted, upstream = {client: READ}, self.upstream or self.kept
        if upstream is not None:
            wanted[upstream.sock.descriptor] = READ
        found = self.poller.wait(wanted, self.until - time.monotonic())
        if not found:
            raise TimeoutError
        if client not in found and upstream is self.kept:
            upstream.close()  # the server closes what is idle
            self.kept = None
        elif client not in found and upstream.answered():
            raise Answered

    def wait_for_server(self, events: int) -> None:
        """Raises TimeoutError, ClientGone, and Answered before the whole request was sent."""
        if self._headers_buffer:  # of an answer whose body lets wait for itself
            self.flush_headers()
        happened, seconds = 0, self.config.read_timeout
        if not self.exchange.explained:
            happened = self.watch(events, min(QUIET_SECONDS, seconds))
            if not happened:
                self.proxy.explain(self.exchange)
        happened = happened or self.watch(events, seconds)
        if not happened:
            raise TimeoutError(f"nothing came for {seconds:g} s (READ_TIMEOUT)")
        if events == READ and self.exchange.explained and HUNG_UP and self.upstream.tls is None:
            self.upstream.sock.read_alone()  # on Linux; elsewhere it was not tried
        if events == WRITE and happened & ~WRITE and self.upstream.answered():
            raise Answered

    def watch(self, events: int, seconds: float) -> int:
        """What happens on the server's socket, if there is one, in so many seconds; 0: nothing.
        Raises ClientGone when the client hangs up, or half of it, as for llama-server itself."""
        client, until = self.request.descriptor, time.monotonic() + seconds
        while True:
            wanted = {client: self.watched}
            if self.upstream is not None:
                wanted[self.upstream.sock.descriptor] = events | READ
            found = self.poller.wait(wanted, until - time.monotonic())
            hint = found.pop(client, 0)
            if hint & ~READ:
                raise ClientGone
            if hint:  # pipelined bytes, or its end
                try:
                    if not self.socket.recv(1, socket.MSG_PEEK):
                        raise ClientGone
                    self.watched = HUNG_UP  # else poll() would tell of these bytes again and again
                except BlockingIOError:
                    pass
                except OSError:
                    raise ClientGone from None
            for happened in found.values():
                return happened
            if not hint:
                return 0

    # --- reading a request ------------------------------------------------------------------------

    def read_head(self) -> bool:
        """Wait for a request; False when no more come."""
        self.until = time.monotonic() + self.patience
        try:
            for _ in range(64):  # blank lines (RFC 9112 section 2.2)
                start = self.rfile.peek(1)[:1]
                if start not in (b"\r", b"\n"):
                    break
                self.rfile.read(1)
        except TimeoutError:
            return False
        if not start:
            return False
        if not TOKEN_START.match(start):
            raise Refused(400, "This is not HTTP; the address may need http://, not https://.")
        self.until = time.monotonic() + self.config.header_timeout
        self.patience = KEEP_SECONDS
        try:
            self.raw_requestline = read_line(self.rfile, HEAD_LIMIT)
            return self.parse_request()
        except TimeoutError:
            raise Refused(408, "The request's head took too long.") from None
        except TooLong:
            raise Refused(414, "The request's first line is too long.") from None

    def parse_request(self) -> bool:
        """Read a head. Raises Refused for what a server must refuse (RFC 9112 sections 3 and 6.3).

        The library splits the first line at any white space, makes /x of //x, and sees
        `Connection: close` only where it stands alone."""
        line = self.raw_requestline
        words = line.decode("latin-1").split(" ")
        self.command, self.path = words[0], words[1] if words[1:] else "/"  # to word an error
        match = REQUEST_LINE.fullmatch(line)
        if not match:
            raise Refused(400, "This is not an HTTP request line.")
        if match[3] != b"1":
            raise Refused(505, "Only HTTP/1.0 and HTTP/1.1 are spoken here.")
        old = match[4] == b"0"
        self.request_version = "HTTP/1.0" if old else "HTTP/1.1"
        try:
            headers = self.headers = read_headers(self.rfile, HEAD_LIMIT - len(line))
            length = headers.body_length()
        except BadMessage as error:
            status = 431 if isinstance(error, TooLong) else 400
            raise Refused(status, f"The request's head cannot be read: {error}.") from None
        if absolute := re.match("(?i)https?://[^/?#]*", self.path):
            self.path = "/" + self.path[absolute.end() :].removeprefix("/")
        coding = [value.lower() for value in headers.all("transfer-encoding")]
        no_path = self.path[0] != "/" and (self.command, self.path) != ("OPTIONS", "*")
        # Which of two is true cannot be told.
        twice = any(len(headers.all(name)) > 1 for name in ("host", "origin", "sec-fetch-site"))
        for wrong, status, text in (
            (coding and (length is not None or old), 400, "Content-Length and Transfer-Encoding."),
            (coding not in ([], ["chunked"]), 501, "The only Transfer-Encoding here is chunked."),
            (not headers.all("host") and not old, 400, "A request needs a Host header."),
            (twice, 400, "A request can have one Host, Origin and Sec-Fetch-Site header only."),
            (self.command == "CONNECT", 405, "Set this address as base URL, not as HTTP_PROXY."),
            (no_path, 400, "The request's target must be a path."),
        ):
            if wrong:
                raise Refused(status, text)
        self.close_connection = old or "close" in headers.members("connection")
        self.head = Request(self.command, self.path, headers, old, length, bool(coding))
        return True

    def check(self, request: Request) -> None:
        """Refuse long bodies, and what pages of other sites send, as far as browsers let them."""
        if (request.length or 0) > self.limit:
            raise Refused(413, TOO_LONG % self.limit)
        host = request.get("host")
        if self.proxy.loopback_only and host and host != self.host:
            if not self.proxy.known_host(host):
                # The page had its own name resolve to this machine (DNS rebinding).
                raise Refused(403, f"The Host {host[:80]!r} is not known here; see ALLOWED_HOSTS.")
            self.host = host
        scheme, _, place = request.get("origin").lower().partition("://")
        foreign = scheme in ("http", "https") and place != host.lower()
        foreign = foreign or request.get("sec-fetch-site").lower() == "cross-site"
        # For JSON a browser asks first (CORS preflight), and the server's answer decides.
        kind = request.get("content-type").partition(";")[0].strip().lower()
        if foreign and request.method == "POST" and kind != "application/json":
            raise Refused(403, "A web page of another site may only send application/json here.")

    def body(self, request: Request) -> Iterator[bytes]:
        """A request's body as it comes, in its time; that of whoever takes it is not counted."""
        if request.get("expect").lower() == "100-continue" and not request.old:
            self.until = 0.0
            try:
                self.rfile.peek(1)  # the body may be here already
            except TimeoutError:  # ask for it now, when nothing speaks against it
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        pieces = read_plain(self.rfile, request.length or 0)
        if request.chunked:
            pieces = read_chunks(self.rfile, self.limit)
        size, end = 0, time.monotonic() + BODY_SECONDS
        self.until = end
        try:
            for _, data in pieces:
                size += len(data)
                asked = time.monotonic()
                yield data
                now = time.monotonic()
                end += now - asked
                more = BODY_SECONDS * max(0.0, size / (1 << 20) - 1)
                self.until = min(now + BODY_SECONDS, end + more)
        except BadMessage as error:
            raise Refused(400, f"The chunked body cannot be read: {error}.") from None
        except TimeoutError:
            text = f"The body took too long: {BODY_SECONDS:g} s for each MB are allowed."
            raise Refused(408, text) from None
        except EOFError:
            raise ClientGone from None

    def read_body(self, request: Request) -> bytearray:
        """The whole body, counted until the request has ended."""
        body = bytearray()
        for data in self.body(request) if request.length or request.chunked else ():
            body += data
            self.held += len(data)
            if not self.server.hold(len(data)):
                raise Refused(503, "All bodies together take too much memory; try again soon.")
        self.server.waiting.pop(self.socket, None)
        return body

    # --- one request ------------------------------------------------------------------------------

    def serve(self, request: Request) -> None:
        self.check(request)
        path = request.path.partition("?")[0]
        if path == "/kvproxy" or path.startswith("/kvproxy/"):
            self.read_body(request)
            self.respond(*self.proxy.pages.answer(request, self.client_address[0]))
            return
        exchange = self.exchange = Exchange(request, *dialect_of(path), self.client_address[0])
        self.proxy.active[exchange] = None
        if exchange.dialect is not None and request.method == "POST":
            exchange.received = exchange.forwarded = self.read_body(request)
            if not request.get("content-encoding"):
                self.proxy.prepare(exchange)
            else:
                exchange.report.note = "compressed"
        elif request.chunked:
            exchange.received = exchange.forwarded = self.read_body(request)
        self.proxy.warmup.hold(exchange, self.watch)
        self.forward(exchange)

    def respond(
        self,
        status: int,
        body: bytes | bytearray,
        headers: Iterable[tuple[bytes, bytes]] = (),
        kind: str = "application/json",
    ) -> None:
        """An answer of the proxy's own. send_response() would add Server and Date."""
        self._headers_buffer = []  # of an answer that was begun, and gives way to this one
        self.send_response_only(status)
        told = [("Content-Type", kind), ("Content-Length", str(len(body)))]
        told += [("Cache-Control", "no-store"), *((n.decode(), v.decode()) for n, v in headers)]
        told += [("Retry-After", "1")] * (status == 503)
        told += [("Connection", "close")] * self.close_connection
        for item in told:
            self.send_header(*item)
        self.end_headers()
        if self.command != "HEAD":
            self._headers_buffer.append(body)
        self.flush_headers()

    def end_headers(self) -> None:
        """The library sends a head at once. Here the first bytes of the body go with it, or turn
        out to be unreadable: then the answer is a 502."""
        self._headers_buffer.append(b"\r\n")

    def forward(self, exchange: Exchange) -> None:
        """Send the request on and relay the answer, over the connection of the client's last
        request while the server keeps that open. It is repeated only where nothing came back on
        such a one, because the server has just closed it (RFC 9112 section 9.3.1)."""
        backend, kept = self.proxy.backend, self.kept
        self.kept = None
        if kept is not None:
            passes = exchange.forwarded is None and exchange.request.length  # it goes out once
            if passes or kept.url is not backend.url:
                kept.close()
            else:
                with suppress(http.client.RemoteDisconnected):
                    return self.forward_over(kept, exchange)
        try:
            upstream = backend.connect()
        except OSError as error:
            backend.lost()
            status = 504 if isinstance(error, TimeoutError) else 502
            text = f"The model server at {backend.name()} cannot be reached ({error})."
            text += f" Is it running, and is BACKEND_URL right? {USUAL_PORTS}"
            raise Refused(status, text) from None
        return self.forward_over(upstream, exchange)

    def forward_over(self, upstream: Upstream, exchange: Exchange) -> None:
        """Raises RemoteDisconnected where nothing comes back on a connection that was kept."""
        self.upstream = upstream
        try:
            response = self.ask(upstream, exchange)
            self.relay(response, exchange)
            if not upstream.unfinished and response.release():
                self.kept, upstream.kept = upstream, True
                upstream._HTTPConnection__response = None  # the library lets go of it later
        finally:
            self.upstream = None
            if self.kept is not upstream:
                upstream.close()

    def ask(self, upstream: Upstream, exchange: Exchange) -> Response:
        """Send a request and read the answer's head. Raises Refused."""
        backend, stream = self.proxy.backend, upstream.sock
        stream.wait, stream.received = self.wait_for_server, 0
        try:
            # The client may have left by now; or the server, or it sent what nobody asked for.
            if self.watch(READ, 0) and upstream.kept:
                raise EOFError
            self.send_request(upstream, exchange)
            exchange.sent = time.monotonic()
            return cast(Response, upstream.getresponse())
        except TimeoutError as late:
            raise Refused(504, f"The model server does not answer: {late}.") from None
        except BadMessage as bad:
            raise Refused(502, f"The model server's answer is not HTTP: {bad}.") from None
        except (ConnectionError, EOFError):
            if not stream.received and upstream.kept:
                raise http.client.RemoteDisconnected("") from None
            if not stream.received:
                backend.lost()
            text = f"The model server at {backend.name()} closed the connection without an answer"
            raise Refused(502, f"{text}; its log may say why.") from None

    def send_request(self, upstream: Upstream, exchange: Exchange) -> None:
        request, body = exchange.request, exchange.forwarded
        passes = body is None and request.length  # as it comes
        target = under(upstream.url, request.path)
        try:
            upstream.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
            upstream.putheader("Host", upstream.url.netloc)
            for name, value in request.headers.end_to_end(*WRITTEN_ANEW):
                upstream.putheader(name, value)
            if exchange.trace.conversation:
                upstream.putheader("X-KVProxy-Conversation", exchange.trace.conversation)
            if request.chunked or request.length is not None:
                length = request.length if body is None else len(body)
                upstream.putheader("Content-Length", str(length))
            upstream.endheaders(body)
            for data in self.body(request) if passes else ():
                upstream.send(data)
        except (Answered, ConnectionError):  # an early answer (413, 401), or one before the close
            upstream.unfinished = True
            if passes:  # the rest must not become the next request
                self.close_connection = self.linger = True
        self.server.waiting.pop(self.socket, None)

    def relay(self, response: Response, exchange: Exchange) -> None:
        """Pass the answer on as it comes, byte for byte. Raises BrokenOff."""
        exchange.status = response.status
        old, by_length = exchange.request.old, response.length is not None
        self.close_connection |= old or self.proxy.server is None
        if response.headers.all("content-encoding"):
            exchange.tap = None
        self.send_response_only(response.status, response.reason)
        for item in response.headers.end_to_end(*["content-length"] * response.chunked):
            self.send_header(*item)
        if not by_length and not old:
            self.send_header("Transfer-Encoding", "chunked")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        try:
            for received, payload in response.pieces():
                # llama-server sends the head before it reads the prompt.
                exchange.begun = exchange.begun or time.monotonic()
                if exchange.tap is not None:
                    exchange.tap.add(payload)
                if self._headers_buffer:
                    self._headers_buffer.append(payload if old else received)
                    self.flush_headers()
                else:
                    self.request.sendall(payload if old else received)
            self.flush_headers()
        except (TimeoutError, EOFError, ConnectionError, BadMessage) as fault:
            if self._headers_buffer:  # nothing was sent yet
                raise Refused(502, f"The model server's answer is broken: {fault}.") from None
            # Without framing a plain close looks like the end; RST does not.
            self.abort = old and not by_length
            raise BrokenOff(str(fault)) from None


class Exchange:
    """One request on its way, and what is remembered of it afterwards."""

    def __init__(
        self, request: Request, dialect: Dialect | None, counting: bool, address: str = ""
    ) -> None:
        self.request, self.dialect, self.counting = request, dialect, counting
        self.address = address  # of the client, without the port
        self.client = b""  # a hash of who sent it
        self.number = 0
        self.time, self.started = time.time(), time.monotonic()
        self.sent = self.begun = self.ended = 0.0  # begun: the first byte behind the answer's head
        self.received: bytes | bytearray | None = None
        self.forwarded: bytes | bytearray | None = None
        self.view: View | None = None
        self.report, self.trace = Report(), Trace()
        self.case: Case | None = None  # until the verdict is known
        self.verdict: Verdict | None = None
        self.straight = 0.0  # the part of it that would be reused without kvproxy
        self.ahead: int | None = None  # tokens of it that were read before it came
        self.explained = self.missed = False  # missed: too little of it was reused
        self.usage = Usage()
        self.status, self.fault = 0, ""
        self.error = self.answer = ""  # what the server said, in part
        self.model, self.stream = "", False
        self.tap: Tap | None = Tap()

    def size(self) -> int:
        """Bytes of the bodies."""
        same = self.forwarded is self.received
        return len(self.received or b"") + (0 if same else len(self.forwarded or b""))


# ==================================================================================================
# Server: the backend, the listening socket, and Proxy, which everything hangs on
# ==================================================================================================

CANDIDATES = ("http://127.0.0.1:8080", "http://127.0.0.1:9931", "http://127.0.0.1:12345")
USUAL_PORTS = "llama-server listens on 9931 (newer) or 8080 (older), LM Studio on 1234."
HOST = re.compile(r"([a-z0-9._-]{1,255}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
LLAMA = "llamacpp"
# owned_by in /v1/models -> product
OWNERS = {LLAMA: "llama-server", "organization_owner": "LM Studio", "llama-swap": "llama-swap"}


class Backend:
    """Where the model server is; with BACKEND_URL unset it is looked for."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.keys: dict[str, str] = {}  # for `check`
        self.url = urllib.parse.urlsplit(config.backend_url) if config.backend_url else None
        self.lost_at = 0.0  # on the monotonic clock
        self.away = False  # as the last request had it
        self.known: Json = {}  # what it told of itself
        self.owner = ""  # owned_by in /v1/models
        self.tls = None  # takes 20 ms to build
        if self.url and self.url.scheme == "https":
            self.tls = ssl.create_default_context()

    def name(self) -> str:
        return self.url.geturl() if self.url else " or ".join(CANDIDATES)

    def locate(self) -> Url:
        """The server's URL. Raises OSError when none is set and none answers."""
        if self.url:
            return self.url
        for url in map(urllib.parse.urlsplit, CANDIDATES):
            if url.port != self.config.listen_port:  # that is this proxy
                there = copy.copy(self)
                there.url = url
                told = members(there.ask("/v1/models", 1.0)[1])
                if told.keys() & {"data", "models", "error"}:
                    self.url = url
                    return url
        raise ConnectionRefusedError("no server answers there")

    def connect(self) -> Upstream:
        """A new connection. Raises OSError."""
        url = self.locate()
        upstream = Upstream(url, url.hostname or "", self.config.connect_timeout, self.tls)
        if upstream.host == "localhost" and self.tls is None:
            upstream.host = "127.0.0.1"  # Windows would try ::1 first, for 2 s
        upstream.connect()
        return upstream

    def lost(self) -> None:
        self.lost_at, self.away, self.known = time.monotonic(), True, {}
        if not self.config.backend_url:
            self.url = None

    def ask(
        self,
        path: str,
        timeout: float = 3.0,
        body: Any = None,
        keys: dict[str, str] | None = None,
        opened: Callable[[socket.socket], None] = lambda sock: None,
    ) -> tuple[int, Any]:
        """(status, parsed JSON or text) of a GET, or of a POST with a body; (0, reason) without."""
        headers = {"Content-Type": "application/json", **(self.keys if keys is None else keys)}
        try:
            url = self.locate()
            secure = url.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            with contextlib.closing(kind(url.hostname or "", url.port, timeout=timeout)) as link:
                link.connect()
                opened(link.sock)
                link.request("GET" if body is None else "POST", under(url, path), body, headers)
                response = link.getresponse()
                text = response.read(8 << 20).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return 0, str(error)
        with suppress(ValueError, RecursionError):
            return response.status, json.loads(text)
        return response.status, text

    def describe(self, timeout: float = 3.0) -> Json:
        """What the server tells of itself; {} without an answer."""
        props = members(self.ask("/props", timeout)[1])
        status, answer = self.ask("/v1/models", timeout)
        model = members(next(iter(listed(members(answer).get("data"))), None))
        self.owner = str(model.get("owned_by") or self.owner)
        path = str(props.get("model_path") or "")
        found = {
            "product": OWNERS.get(self.owner, self.owner or "a model server"),
            "build": props.get("build_info"),
            "slots": props.get("total_slots"),
            "context": members(props.get("default_generation_settings")).get("n_ctx"),
            "model": re.split(r"[\\/]", path)[-1] or model.get("id"),
            "state": "" if status == 200 else f"it answers {status}",
        }
        self.known = {name: value for name, value in found.items() if value and status}
        return self.known


def members(value: Any) -> Json:
    """Those of a JSON object; none of any other value."""
    return value if isinstance(value, dict) else {}


def described(found: Json) -> str:
    plain = ("product", "state")
    return ", ".join(f"{n}" if key in plain else f"{key} {n}" for key, n in found.items())


def under(url: Url, target: str) -> str:
    """A request target under a URL's path, whose /v1 at the end stands in the target."""
    return url.path.rstrip("/").removesuffix("/v1") + target


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class Server(ThreadingHTTPServer):
    """A thread for each connection, up to MAX_CONNECTIONS."""

    request_queue_size = 1024  # with 5, a burst waits for SYN retransmits of 1, 3, 7 s
    allow_reuse_address = os.name != "nt"  # on Windows two servers could share a port

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.open: set[socket.socket] = set()
        # whose clients have to send; oldest first
        self.waiting = collections.OrderedDict[socket.socket, None]()
        self.guard = threading.Lock()
        self.held = 0  # bytes of bodies in memory
        self.most_held = max(512 << 20, 4 * proxy.config.max_body_mb << 20)
        self.most_open = proxy.config.max_connections
        with suppress(ImportError):  # not on Windows
            import resource

            descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            self.most_open = min(self.most_open, descriptors // 2 - 32)  # two for each
        host, port = proxy.config.listen_host, proxy.config.listen_port
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Relay)

    def server_bind(self) -> None:
        """The library's asks DNS for this machine's name."""
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS):
                self.make_room()
                time.sleep(0.05)  # socketserver would try again at once
            raise

    def hold(self, size: int) -> bool:
        """Count bytes of bodies in memory; whether there may be so many."""
        with self.guard:
            self.held += size
            return self.held <= self.most_held

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.open) < self.most_open or self.make_room():
            self.open.add(request)
            with suppress(RuntimeError):  # can't start new thread
                return super().process_request(request, client_address)
        body = error_body("/", 503, "Too many connections (MAX_CONNECTIONS); try again soon.")
        head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        head += b"Retry-After: 1\r\nConnection: close\r\n\r\n"
        with suppress(OSError):
            request.settimeout(0.2)
            request.sendall(head + body)
            request.shutdown(socket.SHUT_WR)
            request.recv(65536)  # unread bytes would turn the close into a reset
        self.shutdown_request(request)

    def make_room(self) -> bool:
        """End the connection whose client has to send, for longest."""
        with suppress(KeyError, OSError):
            oldest, _ = self.waiting.popitem(last=False)
            self.open.discard(oldest)
            oldest.shutdown(socket.SHUT_RDWR)
            return True
        return False

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.proxy.log.exception("a connection failed")


CONTEXT_FULL = re.compile(rb"exceed[a-z_ ]{,30}context|context[ _](?:size|length)")
AGENT_ID = "x-claude-code-agent-id"  # of a sub-agent
CLIENT_HEADERS = ("authorization", "x-api-key", "api-key", "x-forwarded-for", "forwarded")
ERROR_SHOWN, ANSWER_SHOWN = 200, 500  # characters


class Proxy:
    """A running kvproxy: a context manager, or call start() and stop(). Everything hangs on it, so
    several can live in one process. The file's first lines have an example.

    Raises OSError when the address is taken, ConfigError when a file cannot be written."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config = config or Config()
        self.log = logging.Logger("kvproxy", config.log_level.upper())  # noqa: LOG001
        self.backend, self.editor = Backend(config), Editor(config)
        self.replay = self.editor.replay
        self.reader = Reader(config.replay_mb << 20)
        self.ledger = Ledger(config.ledger_mb << 20)
        self.metrics, self.pages = Metrics(config), Pages(self)
        self.capture: PrivateFile | None = None
        self.warmup = Warmup(self)
        self.server: Server | None = None
        self.life = threading.Lock()
        self.active = dict[Exchange, None]()  # requests being served; oldest first
        self.last_end = time.monotonic()
        self.unexplained = list[Exchange]()  # to be recorded when the server is idle
        self.allowed = set(re.split(r"[,\s]+", config.allowed_hosts.lower()))
        self.loopback_only = is_loopback(config.listen_host)

    def start(self) -> Proxy:
        """Listen and serve in the background; nothing if it does already."""
        path, size = self.config.capture_file, self.config.capture_mb << 20
        with self.life:
            if self.server is not None:
                return self
            if path:
                self.capture = PrivateFile("CAPTURE_FILE", path, self.log.warning, size)
            with stops_the_start("WARMUP_FILE", self.config.warmup_file):
                self.warmup.load()
            self.server = Server(self)
            self.warmup.start()
            serve = self.server.serve_forever
            threading.Thread(target=serve, args=(0.2,), name="kvproxy", daemon=True).start()
        return self

    def stop(self, grace: float = DRAIN_SECONDS) -> None:
        """Take no more connections, let answers end for `grace` seconds, then close everything."""
        server, self.server = self.server, None
        if server is None:
            return
        self.warmup.stop()
        with suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)  # wakes its thread, on Linux
        server.shutdown()
        server.server_close()
        for everything, seconds in ((False, grace), (True, 2.0)):
            until = time.monotonic() + seconds
            while server.open and time.monotonic() < until:
                for connection in list(server.open if everything else server.waiting):
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                time.sleep(0.001)
        for exchange in self.unexplained:
            self.record(exchange)
        with suppress(OSError):
            if self.capture:
                self.capture.close()

    def __enter__(self) -> Proxy:  # noqa: PYI034
        return self.start()

    def __exit__(self, fault: object, *_: object) -> None:
        self.stop(0 if fault else DRAIN_SECONDS)

    @property
    def url(self) -> str:
        """http://host:port, with the port that was really taken."""
        if self.server is None:
            raise RuntimeError("the proxy is not running")
        return url_of(str(self.server.server_address[0]), self.server.server_address[1])

    @property
    def running(self) -> int:
        return len(self.active)

    def known_host(self, host: str) -> bool:
        """Whether a Host can be this machine; public DNS cannot hold some names."""
        match = HOST.fullmatch(host.lower())
        name = match[1].strip("[]") if match else ""
        private = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
        local = name.endswith(private) or not re.search(r"[.:]", name)
        return bool(name and (local or name in self.allowed or address_of(name)))

    def prepare(self, exchange: Exchange) -> None:
        """Edit a request's body. Whatever goes wrong, the body is forwarded as it came."""
        raw, dialect, request = exchange.received, exchange.dialect, exchange.request
        assert raw is not None and dialect
        try:
            view = self.reader.view(raw, dialect)
            exchange.stream = bool(view.body.get("stream"))
            exchange.model = visible(str(view.body.get("model") or "")[:80])
            # Nobody's text may reach anybody else's prompt.
            exchange.client = digest(exchange.address, *map(request.get, CLIENT_HEADERS))
            asker = Asker(exchange.client, len(raw), not exchange.counting)
            exchange.trace = trace = self.editor.apply(view, exchange.report, asker)
            if trace.record:
                trace.record.tap = exchange.tap
            if exchange.report.edits():
                exchange.forwarded = view.dump()
            exchange.view = view
        except (Unreadable, RecursionError) as error:
            exchange.report = Report(note=str(error))
        except Exception:
            exchange.report = Report(note="internal error")
            self.log.exception("a body could not be edited and was forwarded as it came")

    def explain(self, exchange: Exchange) -> None:
        """Compare a request with those before it, once."""
        view, received, explained = exchange.view, exchange.received, exchange.explained
        exchange.explained = True
        if not view or received is None or exchange.counting or explained:
            return
        try:
            original = None
            if exchange.forwarded is not received:
                original = Prompt(self.reader.view(received, view.dialect))
            side = side_of(view, exchange.request.get(AGENT_ID))
            prompt = Prompt(view, exchange.trace.conversation, side, time.monotonic(), original)
            shapes = list(self.editor.lifter.learner.shapes)
            exchange.case = case = self.ledger.judge(prompt, self.backend.lost_at, shapes)
            case.idle, case.ahead = exchange.started - self.last_end, exchange.ahead
            exchange.verdict, exchange.straight = case.verdict, case.straight
        except RecursionError:  # no server reads what is nested so deeply
            pass
        except Exception:
            self.log.exception("a request could not be explained")

    def finished(self, exchange: Exchange) -> None:
        """Record a request; one that was lost when the server is idle and can be asked why."""
        exchange.ended = self.last_end = time.monotonic()
        self.active.pop(exchange, None)
        if exchange.begun and self.backend.away:
            self.log.info("backend found: %s answers", self.backend.name())
            self.backend.away = False
        try:
            self.settle(exchange)
            case = exchange.case
            if case and missing_tokens(case, exchange.usage) and not self.unexplained:
                self.unexplained.append(exchange)
            else:
                self.record(exchange)
        except Exception:
            self.log.exception("a finished request could not be recorded")

    def settle(self, exchange: Exchange) -> None:
        """Read an answer's beginning and end, and let go of what is needed no longer."""
        tap, trace, view = exchange.tap, exchange.trace, exchange.view
        first, last = tap.windows() if tap else (b"", b"")
        events = answer_events(first, last) if exchange.status == 200 and exchange.dialect else []
        error = first if exchange.status >= 400 else b""
        for event in itertools.chain(*events):
            if event.get("error"):  # in the middle of a stream
                error = dump(event)
        answered = exchange.status == 200 and not error
        if answered or (exchange.sent and not exchange.status):  # or the client left
            self.explain(exchange)
        elif exchange.status == 503:  # llama-server: loading its model
            self.backend.lost_at = exchange.ended
        if answered:
            exchange.usage = usage_of(events)
            said = [text for text, _ in answer_parts(events[:1])]
            exchange.answer = "".join(said)[:ANSWER_SHOWN]
        else:
            exchange.error = error_text(error, exchange.request)
            exchange.verdict = exchange.case = None
        if record := trace.record:
            record.answer, record.tap = heard_answer(events) if answered else None, None
            if record.answer:
                self.replay.answered(trace, record.answer)
            if exchange.status in (200, 400) and CONTEXT_FULL.search(error):
                self.replay.lines.drop(record.line)
        if exchange.verdict and view:
            if not exchange.verdict.side:
                self.warmup.remember(exchange, view)
            self.warmup.plan(exchange, view, exchange.verdict.side)
        exchange.tap = exchange.view = None
        exchange.trace = Trace(trace.conversation)

    def explain_lost(self) -> None:
        """Record lost requests, once the server is idle or they have waited for that."""
        while self.unexplained:
            if self.running and time.monotonic() - self.unexplained[0].ended < IDLE_WAIT:
                return
            self.record(self.unexplained.pop(0), idle=not self.running)

    def record(self, exchange: Exchange, idle: bool = False) -> None:
        """Settle a verdict, for which an idle server is asked; write page, log and capture."""
        case, exchange.case = exchange.case, None
        if case:
            case.slots = self.backend.describe().get("slots") if idle else None
            if exchange.stream and exchange.begun:
                case.first_byte = exchange.begun - exchange.sent
            settle(case, exchange.usage, self.config)
            if idle and case.verdict.name == "lost":
                self.ask_template(exchange, case)
            self.warmup.notice(exchange, case)
        if self.capture and exchange.received is not None:
            row = json.dumps(capture_row(exchange))
            self.capture.handle(logging.makeLogRecord({"msg": row}))
        level = logging.WARNING if exchange.error or exchange.status >= 500 else logging.INFO
        news = self.editor.lifter.learner.news
        with self.metrics.guard:  # which keeps the lines of a request together
            warning = self.metrics.count(exchange)
            while news:
                told = learned(news.popleft(), self.config)
                self.log.info("learned: %s; to fix it: %s", *told)
            for line in log_lines(exchange) if self.log.isEnabledFor(level) else ():
                self.log.log(level, "%s", line, extra={"request": f"#{exchange.number} "})
        if warning:
            self.log.warning("%s", warning)
        if case:
            case.prompt.number = exchange.number

    def ask_template(self, exchange: Exchange, case: Case) -> None:
        """Whether the server renders old turns otherwise now, and so had to read them again."""
        verdict, base, dialect = case.verdict, case.base, exchange.dialect
        if not base or not case.whole or not dialect or not dialect.edited:
            return
        before = [one for one in list(self.metrics.recent) if one.number == base.number]
        prompts = list[str]()
        for one in (*before, exchange):
            body = one.forwarded or b""
            if dialect.name != "chat":
                body = dump(chat_of(view_of(parse(body), dialect)))
            answer = self.backend.ask("/apply-template", 3.0, body, keys_of(exchange.request))[1]
            prompts.append(str(members(answer).get("prompt") or ""))
        if len(prompts) == 2 and all(prompts):
            rendered_otherwise(verdict, base, *prompts)
            verdict.advice = verdict.advice.replace(OR_TEMPLATE, "")
        if verdict.name == "template":
            verdict.advice = (
                f"the chat template renders {verdict.where} otherwise than before"
                f" ({verdict.before!r} -> {verdict.after!r}), so {exchange.usage.cached:,} of"
                f" {verdict.expected:,} tokens were reused: {advice('template', self.config)}"
            )


def url_of(host: str, port: int) -> str:
    """How this machine reaches what listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def keys_of(request: Request) -> dict[str, str]:
    """The headers that let a client in."""
    return {name: key for name in ("authorization", "x-api-key") if (key := request.get(name))}


def address_of(host: str) -> Any:
    """The IP address that a text is; None of any other."""
    with suppress(ValueError):
        address = ipaddress.ip_address(host.split("%")[0])
        return getattr(address, "ipv4_mapped", None) or address
    return None


def is_loopback(host: str) -> bool:
    address = address_of(host)
    return host == "localhost" or bool(address and address.is_loopback)


def visible(text: str) -> str:
    """A text without control characters, which a terminal would obey."""
    return "".join([one if one.isprintable() else ascii(one)[1:-1] for one in text])


def printable(path: str) -> str:
    """A path without what may hold a key."""
    return visible(re.split("[?;]", path)[0])


def error_text(answer: bytes, request: Request) -> str:
    """The beginning of a server's error, without the request's keys, which some servers quote."""
    text = answer.decode("utf-8", "replace")
    with suppress(ValueError, RecursionError):
        error = members(json.loads(text)).get("error")
        text = str(members(error).get("message") or error or text)
    keys = " ".join(map(request.get, CLIENT_HEADERS[:3])).split()
    for key in keys + re.findall("=([^&;=]+)", request.path):
        text = text.replace(key, "***") if len(key) > 6 else text
    return visible(" ".join(text[: 8 * ERROR_SHOWN].split()))[:ERROR_SHOWN]


def learned(shape: Shape, config: Config) -> tuple[str, str]:
    name = visible(shape.name().removeprefix(LEARNED))[:ERROR_SHOWN]
    name = f'line "{name}"' if shape.form else name
    setting = setting_line(config, "LIFT_REGEX", visible(shape.pattern()))
    return f"system {name} varies, lifted", setting


def log_lines(exchange: Exchange) -> list[str]:
    """The log of one request: a line, and another one when a prompt was not reused for a reason.
    Scripts read its first fields."""
    request, usage, verdict = exchange.request, exchange.usage, exchange.verdict
    parts = [f"{request.method} {printable(request.path)}"]
    prompt = bool(exchange.dialect) and request.method == "POST"
    if prompt:
        counts = vars(exchange.report)
        first = ("items", "ts_removed", "msg_ids_removed", "items_modified")
        told = {name: counts[name] for name in first} | {"stream": exchange.stream}
        told |= {name: count for name, count in counts.items() if count and name != "note"}
        if usage.cached is not None and usage.prompt:
            told["reused"] = f"{usage.cached}/{usage.prompt} ({usage.cached / usage.prompt:.1%})"
        elif exchange.status == 200 and not exchange.counting:
            told["reused"] = "not reported"
        if usage.prompt_ms is not None:
            told["prompt_ms"] = round(usage.prompt_ms)
        if exchange.model:
            told["model"] = exchange.model
        told["ms"] = round(1000 * (exchange.ended - exchange.started))
        parts += [f"{name}={value}" for name, value in told.items()]
        parts.append(verdict.title() if verdict else "")
        parts.append(counts["note"] and f"forwarded as it came: {counts['note']}")
    if exchange.status != 200 or not prompt:
        parts.append(f"status={exchange.status or '-'}")
    lines = [" | ".join(filter(None, [*parts, exchange.error, exchange.fault]))]
    if verdict and not verdict.side and verdict.line():
        lines.append("    " + verdict.line())
    return lines


def reused_share(prompts: Sequence[Any]) -> float | None:
    total = sum(one.usage.prompt for one in prompts)
    return sum(one.usage.cached for one in prompts) / total if total else None


class Metrics:
    """Counters, the last requests, and the running hit rate."""

    KEEP_BYTES = 32 << 20  # of the bodies kept for the status page

    def __init__(self, config: Config) -> None:
        self.config, self.guard = config, threading.Lock()
        self.recent = collections.deque[Exchange]()
        self.kept = 0  # bytes of their bodies
        self.window = collections.deque[Any](maxlen=20)  # exchanges whose reuse was reported
        self.failure: tuple[int, str, str] | None = None  # of the last prompt
        # (name, label) -> number
        self.counts: dict[tuple[str, str], float] = collections.defaultdict(int)
        self.counts["build_info", f'version="{__version__}"'] = 1
        self.number = self.judged = self.reported = 0  # requests; with a verdict; with numbers
        self.long_ms = self.long_tokens = 0.0  # of all long reads
        self.warned = False

    def count(self, exchange: Exchange) -> str:
        """Enter a finished request; returns a warning to log, or ''. The caller has the guard."""
        counts, verdict, usage = self.counts, exchange.verdict, exchange.usage
        self.number += 1
        exchange.number = self.number
        counts["requests_total", f'status="{exchange.status}"'] += 1
        if exchange.dialect or exchange.error:
            self.keep(exchange)
        if exchange.dialect and not exchange.counting:
            told = exchange.status, exchange.error, exchange.fault
            failed = told[1] or told[0] >= 400 or told[2].startswith("cut")
            self.failure = told if failed else None
            if exchange.begun:
                counts["first_bytes_total", ""] += 1
                counts["first_byte_seconds_total", ""] += exchange.begun - exchange.started
        if not verdict:
            return ""
        self.judged += 1
        counts["verdicts_total", f'verdict="{verdict.name}"'] += 1
        prompt, cached, read = usage.prompt, usage.cached, usage.read()
        if prompt is None or cached is None or read is None:
            return ""
        self.reported += 1
        counts["prompt_tokens_total", 'state="reused"'] += cached
        counts["prompt_tokens_total", 'state="read"'] += read
        if usage.prompt_ms is not None and read >= 512:  # fewer take longer for each
            self.long_ms += usage.prompt_ms
            self.long_tokens += read
        saved = cached - round(exchange.straight * prompt)
        if self.long_tokens and saved >= 64:
            counts["saved_seconds_total", ""] += saved * self.long_ms / self.long_tokens / 1000
        if verdict.side:
            return ""
        exchange.missed = verdict.name in MISSES and cached < self.config.warn_reuse * prompt
        self.window.append(exchange)
        rate = reused_share(self.window)
        if rate is None or rate >= self.config.warn_reuse:
            self.warned = False
        elif not self.warned and len(self.window) == 20:  # once, until it has recovered
            self.warned = True
            return f"only {int(100 * rate)}% of the last 20 prompts was reused; {self.cause()}"
        return ""

    def cause(self) -> str:
        """The most frequent fault of the window."""
        names = [one.verdict.name for one in self.window]
        faults = [name for name in names if name not in ("extended", "cold")]
        name, count = collections.Counter(faults or names).most_common(1)[0]
        return f"most often ({count} of {len(names)}): {name}, {VERDICTS[name]}"

    def keep(self, exchange: Exchange) -> None:
        """Keep a request for the page; the oldest go when all take too much."""
        self.recent.append(exchange)
        self.kept += exchange.size()
        while len(self.recent) > self.config.keep_requests or self.kept > self.KEEP_BYTES:
            oldest = self.recent.popleft()
            self.kept -= oldest.size()
            oldest.received = oldest.forwarded = None


# --- files ----------------------------------------------------------------------------------------

# Names (of headers, in addresses, in bodies beside the prompt) whose values are not written down.
SECRET_NAME = re.compile(
    r"(?i)auth(?!ors?(?![a-z]))|cookie|(?<!cache_)key(?!_values)|token(?!s|i|_ids)|secret|passw"
    r"|passphrase|credential|signature|session"
    r"|(?<![a-z])(?:pass|pwd|jwt|sig|code|pat|access|bearer)(?![a-z])"
)
PROMPT_MEMBERS = ("messages", "input", "prompt", "system", "instructions", "function", "parameters",
                  "input_schema", "schema")  # fmt: skip


def without_secrets(address: str) -> str:
    """An address; its path and the parts of its query end where a secret's value begins."""
    path, mark, query = address.partition("?")
    return cut_secret(path) + mark + "&".join(map(cut_secret, query.split("&")))


def cut_secret(text: str) -> str:
    names = text.split("=")[:-1]
    for number, name in enumerate(names, 1):
        name = re.split(r"[;/?&\s]", name)[-1]
        if SECRET_NAME.search(urllib.parse.unquote(name)):
            return "=".join(names[:number]) + "=***"
    return text


def without_secret_members(body: Json) -> Json:
    """A parsed body, changed in place: no secrets beside the prompt."""
    waiting: list[Any] = [body]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        for name, member in value.items() if isinstance(value, dict) else ():
            if SECRET_NAME.search(name[-64:]) and member is not None:
                value[name] = "***"
            elif name not in PROMPT_MEMBERS:
                waiting.append(member)
    return body


def capture_row(exchange: Exchange) -> Json:
    """A finished request for CAPTURE_FILE, without secrets; of a body that is no JSON the size."""
    request, received = exchange.request, exchange.received or b""
    headers = dict[str, str]()
    for name, value in request.headers.raw_items():
        headers[name] = "***" if SECRET_NAME.search(name) else without_secrets(value)
    row = {**row_of(exchange), "path": without_secrets(request.path), "headers": headers}
    row |= {"verdict": exchange.verdict and exchange.verdict.name, "bytes": len(received)}
    with suppress(ValueError, RecursionError):
        row["body"] = without_secret_members(parse(received))
    return row


def open_private(path: str, mode: str) -> Any:
    """A text file to write that only its owner may read. Raises OSError."""
    private = functools.partial(os.open, mode=0o600)
    file = open(  # noqa: SIM115 - the caller closes it
        path, mode, encoding="utf-8", errors="backslashreplace", newline="\n", opener=private
    )
    if hasattr(os, "fchmod") and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        with suppress(OSError):
            os.fchmod(file.fileno(), 0o600)
    return file


@contextlib.contextmanager
def stops_the_start(setting: str, path: str) -> Iterator[None]:
    """A file of a setting that cannot be used raises ConfigError."""
    try:
        yield
    except OSError as error:
        why = f"cannot be written ({error.strerror or error})"
        advice = "name a file in a folder that you may write to"
        raise ConfigError(f"{setting}={path!r}: {why}; {advice}") from None


class PrivateFile(logging.handlers.WatchedFileHandler):
    """LOG_FILE or CAPTURE_FILE, opened anew after a rename; at its limit it becomes FILE.1. A
    full disk costs one line, not one for each record. Raises ConfigError."""

    def __init__(
        self, setting: str, path: str, tell: Callable[[str], Any], limit: float = math.inf
    ) -> None:
        self.setting, self.tell, self.limit = setting, tell, limit  # in bytes
        self.told = False
        with stops_the_start(setting, path):
            super().__init__(os.path.expanduser(path))

    def _open(self) -> Any:
        file = open_private(self.baseFilename, "a")
        if os.fstat(file.fileno()).st_size:
            with open(self.baseFilename, "rb") as written:
                written.seek(-1, os.SEEK_END)
                if written.read() != b"\n":  # half a line, after a crash or a full disk
                    file.write("\n")
        return file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.stream and self.limit < math.inf:
                size = os.fstat(self.stream.fileno()).st_size
                if size and size + len(self.format(record)) >= self.limit:
                    self.stream.close()
                    self.stream = cast(Any, None)
                    os.replace(self.baseFilename, self.baseFilename + ".1")
            super().emit(record)
        except OSError:  # it could not be opened anew
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        fault = sys.exc_info()[1]
        if not isinstance(fault, OSError):
            super().handleError(record)
        elif not self.told:
            self.told = True
            with suppress(OSError):
                self.tell(f"{self.setting}: {self.baseFilename} cannot be written: {fault}")


FRONT_MEMBERS = ("model", "system", "instructions", "tools", "tool_choice", "parallel_tool_calls",
                 "reasoning", "reasoning_effort", "chat_template_kwargs")  # fmt: skip
AHEAD_BYTES = 4 << 20  # longer prompts and answers are not kept to be read ahead
TALKS = 8  # conversations whose newest prompt is kept
WRONG_TOKENS = 1000  # read ahead for nothing; after two such predictions in a row it is given up
# How an answer ends that is whole, and calls no tool.
WHOLE = {"chat": "stop", "messages": "end_turn", "responses": "completed"}


def front_members(body: Json) -> Json:
    """What stands in front of the turns in a prompt, or decides how they are written."""
    front = {name: body[name] for name in FRONT_MEMBERS if name in body}
    if front.get("tool_choice") not in (None, "auto", "none"):
        del front["tool_choice"]  # a forced call has no place in a request that is not answered
    return front


def read_form(view: View) -> tuple[Json, list[tuple[str, str]]]:
    """Front and turns of a prompt, the same for all that the server reads alike."""
    front = front_members(view.body)
    front.pop("instructions", None)
    front["system"] = [turn.text() for turn in view.head]
    front["tools"] = [bare(tool) if members(tool) else tool for tool in listed(front.get("tools"))]
    return front, [(turn.role, told_of(turn).rstrip()) for turn in view.turns]


def echo_of(answer: bytes, dialect: Dialect, reasons: bool, parts: bool) -> list[Turn]:
    """The turns with which a client will repeat an answer; none for one that cannot be told.
    Clients may send `reasons` back, and texts as lists of `parts`."""
    events = [event for window in answer_events(answer, b"") for event in window]
    end = None
    output: list[Json] = []  # blocks or items of the answer
    if dialect.name == "chat":
        choices = [members(one) for event in events for one in listed(event.get("choices"))]
        deltas = [members(one.get("delta") or one.get("message")) for one in choices]
        if any(one.get("tool_calls") or listed(one.get("content")) for one in deltas):
            return []
        if any(one.get("index") for one in choices):
            return []
        ends = [one["finish_reason"] for one in choices if one.get("finish_reason")]
        end = ends[-1] if ends else None
        said, thought = (
            "".join(str(one.get(key) or "") for one in deltas)
            for key in ("content", "reasoning_content")
        )
        content = [{"type": "text", "text": said}] if parts else said
        items: list[Json] = [{"role": "assistant", "content": content}]
        if reasons and thought:
            items[0]["reasoning_content"] = thought
    elif dialect.name == "messages":
        blocks = dict[str, Json]()
        for event in events:
            index, delta = str(event.get("index")), members(event.get("delta"))
            end = event.get("stop_reason") or delta.get("stop_reason") or end
            whole = enumerate(listed(event.get("content")))  # an answer that was not streamed
            blocks |= {str(number): members(block) for number, block in whole}
            if "content_block" in event:
                blocks[index] = members(event["content_block"])
            for key in ("text", "thinking", "signature"):
                if index in blocks and key in delta:
                    blocks[index][key] = str(blocks[index].get(key) or "") + str(delta[key])
        output = list(blocks.values())
        kept = [block for block in output if reasons or block.get("type") == "text"]
        items = [{"role": "assistant", "content": kept}]
    else:
        responses = [members(event.get("response") or event) for event in events]
        last = next((one for one in reversed(responses) if one.get("output")), {})
        end, output = last.get("status"), list(map(members, listed(last.get("output"))))
        said_items = (one for one in output if one.get("content"))
        items = [one for one in said_items if reasons or one.get("type") == "message"]
    turns = list(map(turn_of, items))
    speaks = any(turn.role == "assistant" and turn.text().strip() for turn in turns)
    no_calls = {str(one.get("type")) for one in output} <= {"text", "message", *REASONING_PARTS}
    return turns if speaks and no_calls and end == WHOLE[dialect.name] else []


@dataclasses.dataclass
class Agent:
    """What was seen of the clients with one User-Agent."""

    name: str
    helps: bool = False  # it was seen that reading ahead would have helped
    wrong: int = 0  # predictions in a row that cost WRONG_TOKENS
    reasons: bool = False  # they sent reasoning back
    parts: bool = False  # they sent answers as lists of parts


@dataclasses.dataclass(eq=False)
class Prefill:
    """A prompt to be read before a client's request begins with it: a head, or a conversation."""

    path: str
    view: View  # as it was forwarded
    keys: dict[str, str] | None = None  # None: the newest client's
    agent: Agent = dataclasses.field(default_factory=lambda: Agent(""))
    answer: bytes = b""  # until it stands in `view`
    due: bool = True  # to be read
    closed: bool = False  # was read, or given up
    sock: socket.socket | None = None
    waiting: set[Exchange] = dataclasses.field(default_factory=set)  # what is held for it
    usage: Usage = dataclasses.field(default_factory=Usage)
    idle_tokens: int = 0

    def body(self) -> bytes:
        """One token is wanted, which nobody reads. Behind the prompt stands a placeholder: many
        templates render the last turns in another way until a user has spoken."""
        body = {**front_members(self.view.body), "stream": False}
        body["max_output_tokens" if self.view.dialect.name == "responses" else "max_tokens"] = 1
        placeholder = turn_of({"role": "user", "content": "."})
        return View(body, self.view.dialect, [], [*self.view.turns, placeholder]).dump()

    def opened(self, sock: socket.socket) -> None:
        self.sock = sock
        if self.closed:
            raise ConnectionAbortedError("given up before there was a connection")

    def close(self) -> None:
        """Give it up. The thread that waits for the answer wakes, and closes the connection."""
        self.closed = True
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def begins(self, path: str, view: View) -> bool:
        """Whether a request, as it is forwarded, begins with this prompt."""
        if path == self.path:
            with suppress(RecursionError):  # nested deeply
                front, turns = read_form(self.view)
                other_front, other_turns = read_form(view)
                return front == other_front and turns == other_turns[: len(turns)]
        return False

    def add_answer(self) -> bool:
        """Put the answer, as the client will repeat it, behind the prompt; False if unknown."""
        answer, self.answer = self.answer, b""
        if answers := [turn for turn in self.view.turns if turn.role == "assistant"]:
            self.agent.reasons = bool(Prompt(self.view).reasoning)
            self.agent.parts = any(isinstance(turn.holder.get(turn.key), list) for turn in answers)
        echo = echo_of(answer, self.view.dialect, self.agent.reasons, self.agent.parts)
        self.view = dataclasses.replace(self.view, turns=[*self.view.turns, *echo])
        return bool(echo)


class Warmup:
    """Has the server read heads after a start, the newest one to keep it warm, and after an answer
    what the next prompt begins with. One thread does it, while no request is running."""

    LOOK = 0.1  # seconds between two looks at what is due
    FIRST_WAIT = 1.0  # seconds of quiet before a head is read
    AWAY_WAIT = 5.0  # seconds between two looks at a server that is away
    NOT_READY = (0, 502, 503, 504)
    HOLD_LOOK = 0.02  # seconds between two looks at a prefill that a request waits for

    def __init__(self, proxy: Proxy) -> None:
        self.proxy, self.config = proxy, proxy.config
        self.path = os.path.expanduser(self.config.warmup_file)
        self.enabled = bool(self.path or self.config.keepalive_seconds)
        self.heads: dict[str, Prefill] = {}  # newest last
        # (conversation, client) -> its newest prompt, newest last
        self.talks: dict[tuple[str, bytes], Prefill] = {}
        self.agents: dict[str, Agent] = {}
        self.prefill: Prefill | None = None  # the one that is under way
        self.written: tuple[str, list[Shape]] = "", []  # newest head and shapes in the file
        self.guard = threading.Lock()  # of all these
        self.writing = threading.Lock()  # the file; requests on their way need the other one
        self.lost_at = proxy.backend.lost_at
        self.keys: dict[str, str] = {}  # the newest client's
        self.state = "waiting" if self.enabled else "off"
        self.next_try = 0.0  # of a server that was away, or refused the keys
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        self.over.clear()
        self.thread = threading.Thread(target=self.run, name="kvproxy-warmup", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread, in the middle of a prefill as well."""
        self.over.set()
        with self.guard:
            prefill = self.prefill
        if prefill is not None:
            prefill.close()
        if self.thread is not None:
            self.thread.join(5)

    def run(self) -> None:
        while not self.over.wait(self.LOOK):
            try:
                self.proxy.explain_lost()
                self.step()
            except Exception:
                self.proxy.log.exception("warm-up failed")

    def step(self) -> None:
        """Have the server read what is due, if nothing else is going on."""
        now = time.monotonic()
        idle = now - self.proxy.last_end
        with self.guard:
            talk = next((talk for talk in self.talks.values() if talk.due), None)
        if self.proxy.running:
            return
        if talk is not None and idle >= self.config.prefill_ahead_seconds:
            talk.due = False  # what fails is not tried again
            if not talk.answer or talk.add_answer():
                self.send(talk, f"read ahead | {talk.agent.name}")
        elif idle >= self.FIRST_WAIT and now >= self.next_try:  # else an agent runs its tools
            self.warm(idle)

    def send(self, prefill: Prefill, name: str) -> int:
        """Have the server read a prompt; returns the status, 0 without an answer."""
        with self.guard:
            prefill.usage = Usage()
            prefill.closed = bool(self.proxy.running) or self.over.is_set()
            if prefill.closed:
                return 0
            self.prefill = prefill  # a request that comes from now on finds it, see hold()
        told, started, status = "interrupted", time.monotonic(), 0
        try:
            keys = self.keys if prefill.keys is None else prefill.keys
            question = prefill.path, self.config.read_timeout, prefill.body(), keys
            status, answer = self.proxy.backend.ask(*question, prefill.opened)
            if status:
                told = f"the server answers {status}"
            if status == 200:
                prefill.usage = usage_of([[members(answer)]])
                told = f"tokens read: {read_of(prefill.usage)}"
        finally:
            self.prefill, prefill.sock, prefill.closed = None, None, True
        read = prefill.usage.read() or 0
        prefill.idle_tokens += read
        with self.proxy.metrics.guard:
            self.proxy.metrics.counts["idle_tokens_total", ""] += read
        self.proxy.log.info("%s | %.1f s | %s", name, time.monotonic() - started, told)
        return status

    def hold(self, exchange: Exchange, watch: Callable[[int, float], int]) -> None:
        """Called before a request is forwarded. If it begins with what the server is reading, it
        waits for that: the server would notice a cancel late, and read it all in another slot. Any
        other ends the prefill, unless a client waits for it. `watch` may raise ClientGone."""
        view, path = exchange.view, exchange.request.path.partition("?")[0]
        if exchange.counting or exchange.request.method in ("GET", "HEAD", "OPTIONS"):
            return
        with self.guard:
            prefill = self.prefill
        if prefill is not None and view is not None and prefill.begins(path, view):
            until = time.monotonic() + self.config.read_timeout
            prefill.waiting.add(exchange)
            try:
                while not prefill.closed and time.monotonic() < until:
                    watch(0, self.HOLD_LOOK)
            finally:
                prefill.waiting.discard(exchange)
        if prefill is not None and not prefill.waiting:
            prefill.close()
        if view is not None:
            self.follow(exchange, view, path)

    def load(self) -> None:
        """Read the heads of earlier runs. Raises OSError when the file cannot be written."""
        replay, lifter = self.proxy.replay, self.proxy.editor.lifter
        if not self.path:
            return
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise OSError("it is no plain file")
        try:
            with open(self.path, encoding="ascii") as file:
                heads = json.load(file)
            shapes = [Shape(*map(str, row)) for row in heads.pop("learned", ())]
            if lifter.learns:
                lifter.learner.add(shapes)
                lifter.learner.news.clear()  # they were told when they were new
            for key, head in list(heads.items())[-self.config.warmup_heads :]:
                view = view_of(head["body"], cast(Dialect, dialect_of(head["path"])[0]))
                del view.turns[view.leading() :]  # a placeholder, in older files
                if self.config.scrub and self.config.replay:
                    replay.tools.apply(view, ANYBODY)
                self.heads[key] = Prefill(head["path"], view_of(parse(view.dump()), view.dialect))
        except FileNotFoundError:  # none yet
            pass
        except Exception as error:  # noqa: BLE001 - whatever somebody has written there
            text = "WARMUP_FILE=%r cannot be read and starts anew: %r"
            self.proxy.log.warning(text, self.path, error)
        open_private(self.path + ".tmp", "w").close()
        os.unlink(self.path + ".tmp")

    def remember(self, exchange: Exchange, view: View) -> None:
        """Keep the head of a request that was answered."""
        if not self.enabled or not view.dialect.edited or not view.system():
            return
        self.keys, self.next_try = keys_of(exchange.request), 0.0
        path = exchange.request.path.partition("?")[0]
        front = View(front_members(view.body), view.dialect, [], view.turns[: view.leading()])
        body = front.dump()  # the turns of the view would keep all of the request in memory
        head = Prefill(path, view_of(parse(body), view.dialect), due=False)
        key = digest(path, body).hex()
        written = key, list(self.proxy.editor.lifter.learner.shapes)
        with self.guard:
            self.heads.pop(key, None)
            self.heads[key] = head
            if len(self.heads) > self.config.warmup_heads:
                del self.heads[next(iter(self.heads))]
        with self.writing:
            if written != self.written and self.path:
                self.written = written
                self.write(written[1])

    def write(self, shapes: list[Shape]) -> None:
        """Write the file, whole or not at all."""
        with self.guard:
            kept = dict(self.heads)
        heads = {key: {"path": one.path, "body": one.view.body} for key, one in kept.items()}
        learned = {"learned": shapes} if shapes else {}
        name = self.path + ".tmp"
        try:
            with open_private(name, "w") as file:
                json.dump({**heads, **learned}, file)
            os.replace(name, self.path)
        except OSError as error:
            text = "WARMUP_FILE=%r cannot be written any more: %s"
            self.proxy.log.warning(text, self.path, error)
            self.path = ""
            with suppress(OSError):
                os.unlink(name)

    def warm(self, idle: float) -> None:
        """Read heads after a start and after the backend was away; keep the newest one warm."""
        backend, keepalive = self.proxy.backend, self.config.keepalive_seconds
        with self.guard:
            heads = list(self.heads.values())
        if backend.lost_at != self.lost_at and self.path:
            for head in heads:
                head.due = True
        self.lost_at = backend.lost_at
        due = [head for head in heads if head.due]
        if not due and keepalive and idle >= keepalive:
            due = heads[-1:]
        if not due:
            return  # a server that has nothing to read is not asked anything
        if backend.ask("/health", 4.0)[0] in self.NOT_READY:
            backend.lost()
            self.state = "the server is away"
            self.next_try = time.monotonic() + self.AWAY_WAIT
            return
        for number, head in enumerate(due, 1):
            self.state = f"head {number} of {len(due)}"
            status = self.send(head, f"warm-up | {self.state}")
            self.state = {200: "warm", 0: "interrupted"}.get(status, f"the server answers {status}")
            if status in (401, 403):
                self.next_try = math.inf  # until a client brings keys
                return
            if status in self.NOT_READY:
                self.next_try = time.monotonic() + self.AWAY_WAIT
                return
            head.due, self.proxy.last_end = False, time.monotonic()

    def agent(self, request: Request) -> Agent:
        key = request.get("user-agent")
        with self.guard:
            if key not in self.agents:
                name = visible(key[:60]) or "clients without a name"
                remember(self.agents, key, Agent(name), 256)
            return self.agents[key]

    def reads_ahead(self, agent: Agent) -> bool:
        """Whether prompts of such clients are read ahead."""
        mode = self.config.prefill_ahead
        seen = mode == "auto" and agent.helps and self.proxy.backend.owner == LLAMA
        return bool(mode == "1" or seen) and self.config.scrub and agent.wrong < 2

    def notice(self, exchange: Exchange, case: Case) -> None:
        """Note that reading ahead would have helped; with `auto` that is when it begins."""
        kind, owner = case.verdict.kind, self.proxy.backend.owner
        agent = self.agent(exchange.request)
        side = kind == "taken" and any(one.side for one in case.between)
        found = self.config.prefill_ahead == "auto" and owner and (kind == "template" or side)
        if found and not agent.helps:
            agent.helps = True
            on = "on" if owner == LLAMA else "off, since the server is no llama.cpp,"
            why = "a side request takes the slot" if side else "the chat template changes old turns"
            self.proxy.log.info("read ahead | %s for %s: %s", on, agent.name, why)

    def told(self) -> str:
        """For whom it is on, for the page; '' where nothing came up."""
        agents = list(self.agents.values())
        told = [one.name for one in agents if self.reads_ahead(one)]
        told += [f"given up for {one.name}" for one in agents if one.wrong > 1]
        helps = any(one.helps for one in agents) and not told
        return "off: the server is no llama.cpp" if helps else ", ".join(told)

    def follow(self, exchange: Exchange, view: View, path: str) -> None:
        """Before a request is forwarded: whether it begins with what was read ahead."""
        agent, sub_agent = self.agent(exchange.request), exchange.request.get(AGENT_ID)
        if not self.reads_ahead(agent) or side_of(view, sub_agent):
            return
        with self.guard:
            talk = self.talks.pop((exchange.trace.conversation, exchange.client), None)
        if talk is not None and talk.closed and talk.begins(path, view):
            agent.wrong, exchange.ahead = 0, talk.usage.prompt
        elif talk is not None and talk.idle_tokens > WRONG_TOKENS:
            agent.wrong += 1
            if agent.wrong > 1:
                text = "read ahead | given up for %s: other prompts came than were predicted"
                self.proxy.log.info(text, agent.name)
        if view.dialect.edited and exchange.tap is not None:
            exchange.tap.whole = bytearray()

    def plan(self, exchange: Exchange, view: View, side: str) -> None:
        """After an answer: read what follows; after a side request, read it again."""
        tap, agent, client = exchange.tap, self.agent(exchange.request), exchange.client
        if not self.reads_ahead(agent):
            return
        fit = len(exchange.forwarded or b"") <= AHEAD_BYTES and not goes_on_elsewhere(view)
        fit = fit and all(turn.item and turn.role != "assistant" for turn in view.turns[-1:])
        fit = fit and view.body.get("n") in (None, 1) and not exchange.fault
        with self.guard:
            if side:
                mine = [talk for (_, whose), talk in self.talks.items() if whose == client]
                for talk in mine[-1:]:
                    talk.due = True
            elif fit and tap is not None and tap.whole:
                path, keys = exchange.request.path.partition("?")[0], keys_of(exchange.request)
                name = exchange.trace.conversation
                keys["X-KVProxy-Conversation"] = name  # to the same server, if there are several
                self.talks[name, client] = Prefill(path, view, keys, agent, bytes(tap.whole))
                if len(self.talks) > TALKS:
                    del self.talks[next(iter(self.talks))]

    def rest(self) -> None:
        """Wait until what follows an answer that just came has been read ahead."""
        until = time.monotonic() + 2 + self.config.prefill_ahead_seconds
        while self.prefill or time.monotonic() < until:
            if any(one.closed and not one.due for one in list(self.talks.values())):
                return
            time.sleep(0.01)


# ==================================================================================================
# Status: the proxy's own endpoints, under /kvproxy
# ==================================================================================================

# A page is complete without its script, which renews <main>.
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>%(title)s - kvproxy</title><link rel="icon" href="data:,"><style nonce="%(nonce)s">
:root { color-scheme: light dark; --soft: light-dark(#56616d, #a3adb8) }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 60rem;
  color: light-dark(#1c2127, #e6e9ec); background: light-dark(#fff, #14181c);
  overflow-wrap: anywhere; font-variant-numeric: tabular-nums }
h1 { font-size: 1rem } h1 a { color: var(--soft) } h2 { font-size: 1.2rem; margin: 1.6rem 0 .3rem }
h3 { font-size: .9rem; color: var(--soft); margin: 1rem 0 0 } p, dd, ol { margin: 0; padding: 0 }
a { color: inherit } .state { font-size: 1.6rem; font-weight: 650; line-height: 1.25 }
.soft, dt { color: var(--soft) } .good, .add { color: light-dark(#1a7f4b, #4cc38a) }
.bad, .del { color: light-dark(#b3261e, #ff8f85) } .fair { color: light-dark(#7d5200, #e5b567) }
dt, code, button { font-size: .85rem } pre { white-space: pre-wrap; font-size: .85rem }
dl { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem } dd { font-size: 1.25rem }
li { list-style: none; border-top: 1px solid var(--soft); padding: .5rem 0 }
.row { display: flex; flex-wrap: wrap; gap: 0 .8rem } summary { margin-top: 1rem }
</style></head><body><header><h1><a href="/kvproxy">kvproxy %(version)s</a></h1></header>
<main>%(main)s</main><footer>%(foot)s</footer>
<script nonce="%(nonce)s">
addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "copied";
  } catch (error) {
    getSelection().selectAllChildren(button.previousElementSibling);
    button.textContent = "press Ctrl+C";
  }
});
const main = document.querySelector("main");
const named = (one) => one.getAttribute("href") || one.dataset.copy;
if (document.getElementById("state")) setInterval(async () => {
  if (document.hidden || String(getSelection())) return;
  const focus = named(document.activeElement);
  try {
    const answer = await fetch("/kvproxy");
    if (!answer.ok) throw answer.status;
    const text = await answer.text();  // the head has another nonce, and is left out
    const news = text.slice(text.indexOf("<main>") + 6, text.indexOf("</main>"));
    if (news !== main.shown) main.innerHTML = main.shown = news;
  } catch (error) {
    document.getElementById("state").textContent = main.shown =
      "kvproxy does not answer; this is what it told last";
    document.getElementById("state").className = "state bad";
  }
  const again = [...main.querySelectorAll("a, button")].find((one) => named(one) === focus);
  if (again) again.focus({ preventScroll: true });
  document.title = document.getElementById("state").textContent + " - kvproxy";
}, 3000);
</script></body></html>
"""
JSON_LINK = '<p class="soft"><a href="{0}">{1} as JSON</a></p>'
ITEM = '<li><p class="row">{0}</p>{1}</li>'
COPY = '<code>{0}</code> <button type="button" data-copy="{0}">copy</button>'
DETAILS = "<details><summary>{0}</summary><pre>{1}</pre></details>"

# of verdicts; all others are neither
TONES = {"extended": "good", "rewritten": "bad", "lost": "bad", "template": "fair"}
MISSES = ("rewritten", "lost", "template")

# Headers with which a web server in front tells that a request is somebody else's.
FORWARDED = re.compile(r"(?i)(?:forwarded|x-forwarded-.*|x-real-ip|via)\Z")

Answer = tuple[int, bytes | bytearray, Headers, str]


class Pages:
    """Answers under /kvproxy. Prompts are for this machine only, and no other site's page."""

    SHOWN = 20  # requests on the page; all that are kept stand in /kvproxy/requests
    HEADERS: Headers = [(b"X-Content-Type-Options", b"nosniff")]  # noqa: RUF012

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
            health = {"status": "ok", "version": __version__, "warmup": self.proxy.warmup.state}
            return self.json(200, health)
        if path == "/kvproxy/metrics":
            return 200, self.metrics().encode(), [], "text/plain; version=0.0.4; charset=utf-8"
        origin, site = request.get("origin"), request.get("sec-fetch-site")
        ours = not origin or origin.partition("://")[2] == request.get("host")
        same_site = ours and site in ("", "none", "same-origin")  # as browsers tell
        here = is_loopback(peer) or peer == self.proxy.config.listen_host
        near = here and not any(map(FORWARDED.match, request.headers.keys()))
        if path == "/kvproxy" and same_site:
            return self.page(near, request.get("x-forwarded-host") or request.get("host"))
        if not (near and same_site):
            why = "Prompts are shown on this machine only, and not through a web server."
            return self.error(403, why)
        with self.proxy.metrics.guard:
            recent = list(reversed(self.proxy.metrics.recent))
        if path == "/kvproxy/requests":
            return self.json(200, {"requests": [row_of(exchange) for exchange in recent]})
        wanted = request.get("accept")
        if "application/json" in wanted and "text/html" not in wanted:
            path = path.removesuffix(".json") + ".json"
        for exchange in map(copy.copy, recent):  # the bodies may be let go of meanwhile
            if path == f"/kvproxy/requests/{exchange.number}":
                return self.request_page(exchange)
            if path == f"/kvproxy/requests/{exchange.number}.json":
                return self.detail(exchange)
        return self.error(404, "There is no such page.")

    def json(self, status: int, value: Json, *headers: tuple[bytes, bytes]) -> Answer:
        body = json.dumps(value, indent=1).encode()
        return status, body, [*self.HEADERS, *headers], "application/json"

    def error(self, status: int, message: str, *headers: tuple[bytes, bytes]) -> Answer:
        return self.json(status, {"error": {"message": message}}, *headers)

    def metrics(self) -> str:
        """Prometheus text format."""
        proxy, metrics, lines = self.proxy, self.proxy.metrics, list[str]()
        with metrics.guard:
            values = dict(metrics.counts)
            rate = reused_share(metrics.window)
        if rate is not None:
            values["hit_ratio", ""] = rate
        if proxy.backend.away is not None:
            values["backend_up", ""] = int(not proxy.backend.away)
        values["running_requests", ""] = proxy.running
        values["learned_shapes", ""] = len(proxy.editor.lifter.learner.shapes)
        for name in sorted({name for name, _ in values}):
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# TYPE kvproxy_{name} {kind}")
            for (of, value), number in sorted(values.items()):
                if of == name:
                    labels = f"{{{value}}}" if value else ""
                    lines.append(f"kvproxy_{name}{labels} {number}")
        return "\n".join(lines) + "\n"

    def compared(self, exchange: Exchange) -> Json:
        """A request with what kvproxy changed in it, and where its tokens go."""
        row: Json = {**row_of(exchange), "answer": exchange.answer, "diff": []}
        prompts = list[list[Segment]]()
        with suppress(Unreadable, RecursionError):
            for raw in (exchange.received, exchange.forwarded):
                if raw is not None and exchange.dialect is not None and comparable(raw):
                    prompts.append(Prompt(view_of(parse(raw), exchange.dialect)).segments)

        def count(text: str) -> int | None:
            body, keys = dump({"content": text}), keys_of(exchange.request)
            answer = self.proxy.backend.ask("/tokenize", 3.0, body, keys)[1]
            tokens = members(answer).get("tokens")
            return len(tokens) if isinstance(tokens, list) else None

        if len(prompts) == 2:
            idle = not self.proxy.running
            tokens = exchange.usage.prompt
            row["where it goes"] = weights_of(prompts[1], tokens, count if idle else None)
            row["diff"] = difference(*prompts)
        return row

    def detail(self, exchange: Exchange) -> Answer:
        """A request with its bodies, in at most ten times their memory."""
        row = json.dumps(self.compared(exchange), ensure_ascii=False)[:-1]
        body = bytearray(row.encode("utf-8", "backslashreplace"))
        del row
        for name in ("received", "forwarded"):
            raw = getattr(exchange, name)
            text = None if raw is None else raw.decode("utf-8", "replace")
            body += f', "{name}": '.encode() + json.dumps(text, ensure_ascii=False).encode()
        body += b"}"
        return 200, body, self.HEADERS, "application/json"

    def html(self, title: str, main: str, foot: str) -> Answer:
        """A page with this HTML."""
        nonce = uuid.uuid4().hex
        policy = (
            f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}';"
            " connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
        )
        headers = [*self.HEADERS, (b"Content-Security-Policy", policy.encode())]
        headers.append((b"Referrer-Policy", b"no-referrer"))
        parts = {"title": html.escape(title), "main": main, "foot": foot}
        parts |= {"nonce": nonce, "version": __version__}
        return 200, (PAGE % parts).encode("utf-8", "replace"), headers, "text/html; charset=utf-8"

    def page(self, near: bool = True, host: str = "") -> Answer:
        """The page; without words of prompts unless `near`. `host`: how it was reached."""
        proxy, metrics, config = self.proxy, self.proxy.metrics, self.proxy.config
        if not proxy.running and not proxy.backend.describe(1.0):
            proxy.backend.lost()
        requests = [one for one in list(proxy.active)[::-1] if one.dialect is not None]
        with metrics.guard:
            state, tone, hint, cure = self.headline(near, host)
            requests += itertools.islice(reversed(metrics.recent), self.SHOWN)
        none = "None yet." if config.keep_requests else "None are kept (KEEP_REQUESTS=0)."
        settings = {name.upper(): value for name, value in vars(config).items()}
        about = {name: text for name, _, text in Config.table()}
        off = [name for name, value in settings.items() if value is False or value == "0"]
        off = [f"{name}=0 ({about[name]})" for name in off]
        if near:
            told = "\n".join(f"{name} = {value}" for name, value in settings.items())
            more = JSON_LINK.format("/kvproxy/requests", "All that are kept")
            more += DETAILS.format("Settings in force", html.escape(told))
        else:
            found, there = HOST.fullmatch(host.lower()), proxy.url.removeprefix("http://")
            name = found[1].strip("[]") if found else "THAT-MACHINE"
            name = "THAT-MACHINE" if is_loopback(name) else name  # a web server's own name for it
            port = there.rpartition(":")[2]
            line = COPY.format(html.escape(f"ssh -L {port}:{there} {name}"))
            more = tag("h2", "Prompts are shown on that machine only")
            more += f"<p>From here: {line}, then open http://127.0.0.1:{port}/kvproxy</p>"
        main = [
            tag("p", f"Switched off: {', '.join(off)}.", "fair") if off else "",
            f'<p id="state" role="status" class="state {tone}">{html.escape(state)}</p>',
            f'<div id="hint">{tag("p", hint, "soft")}{copied(cure)}</div>{self.facts()}',
            tag("h2", "Last requests") + (self.rows(requests, near) or tag("p", none)),
            self.learned() if near else "",
        ]
        return self.html(state, "".join(main), more)

    def request_page(self, exchange: Exchange) -> Answer:
        """A request for people."""
        row, title = self.compared(exchange), f"Request {exchange.number}"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(exchange.time))
        facts = {"sent": when, **facts_of(exchange)}
        main = [tag("p", title, "state"), defined(facts), verdict_html(exchange)]
        if "where it goes" in row:
            weights = row["where it goes"]
            told = {name: f"{weights[name]:,}" for name in ("system", "tools", "turns")}
            told |= {f"tool {name}": f"{n:,}" for name, n in weights["largest tools"].items()}
            estimated = ", estimated" if weights["estimated"] else ""
            main += [tag("h2", f"Where its tokens go{estimated}"), defined(told)]
        changed = "\n".join(map(diff_line, row["diff"])) or "Nothing."
        main += [tag("h2", "What kvproxy changed in the prompt"), f"<pre>{changed}</pre>"]
        if exchange.answer:
            main += [tag("h2", "The answer begins"), tag("pre", exchange.answer)]
        for name, body in (("Received", exchange.received), ("Forwarded", exchange.forwarded)):
            size = "no longer kept" if body is None else f"{len(body):,} bytes"
            text = html.escape((body or b"")[:BODY_SHOWN].decode("utf-8", "replace"), False)
            text += "\n..." if len(body or b"") > BODY_SHOWN else ""
            main.append(DETAILS.format(f"{name}: {size}", text))
        more = JSON_LINK.format(f"/kvproxy/requests/{exchange.number}.json", "All of it")
        return self.html(title, "".join(main), more)

    def headline(self, near: bool, host: str) -> tuple[str, str, str, str]:
        """What a person wants to know first, its tone, why it is so, and what to copy. Words of a
        prompt are for this machine only; others reach it as `host`."""
        metrics, least = self.proxy.metrics, self.proxy.config.warn_reuse
        known, server = self.proxy.backend.known, self.server()
        if metrics.failure is not None:
            status, error, fault = metrics.failure
            told = (error or fault) if near else ""
            if status < 400:
                return "The last answer broke off", "bad", told, ""
            if status not in (502, 503, 504) or (error and status != 503):
                return f"The last request failed ({status})", "bad", told, ""
            if known and "state" not in known:
                return "The model server answers again", "fair", server, ""
            words = "is not ready" if status == 503 else "does not answer"
            return f"The model server {words} ({status})", "bad", told, ""
        if not metrics.window:
            if metrics.judged and not metrics.reported:
                return "The server does not report what it reused", "fair", "", ""
            if self.proxy.running:
                return "The first prompt is being read", "fair", f"By {server}.", ""
            there = f"No model server answers at {server}. {USUAL_PORTS}"
            there = f"The model server answers at {server}." if known else there
            hint = f"{there} Give your agent this address instead (Claude Code: without /v1):"
            url = self.proxy.url if near or not host else f"http://{host}"
            return "No prompt yet", "fair", hint, f"{url}/v1"
        judged = [one for one in metrics.window if one.verdict.step != "first prompt"]
        judged = [one for one in judged if one.verdict.name != "cold"]
        firsts = counted(len(metrics.window) - len(judged), "first prompt")
        if not judged:
            hint = "Nothing can be reused until a conversation goes on."
            return f"{firsts}, nothing to reuse so far", "fair", hint, ""
        talk = metrics.window[-1].trace.conversation
        newest = [one for one in judged if one.trace.conversation == talk] or judged
        rate = reused_share(newest) or 0.0
        misses = len(list(itertools.takewhile(lambda one: one.missed, reversed(judged))))
        if rate >= least and misses < 3:
            hint = f"Share of prompt tokens in {counted(len(newest), 'prompt')} of the newest"
            hint += f" conversation; {firsts} not counted."
            return f"The cache works: {int(100 * rate)}% reused", "good", hint, ""
        state = f"The cache misses: only {int(100 * rate)}% reused"
        if misses >= 3:
            names = ", ".join(dict.fromkeys(one.verdict.name for one in judged[-misses:]))
            state = f"The last {misses} prompts were read again: {names}"
        hint = f"{metrics.cause().capitalize()}."
        missed = [one.verdict for one in judged if one.missed and one.verdict.line()]
        if not missed or not near:
            return state, "bad", hint, ""
        return state, "bad", f"{hint} Last: {spoken_line(missed[-1])}", missed[-1].cure

    def server(self) -> str:
        """Where the model server is, and what it told of itself."""
        known = described(self.proxy.backend.known)
        return self.proxy.backend.name() + (f": {known}" if known else "")

    def facts(self) -> str:
        metrics, warmup = self.proxy.metrics, self.proxy.warmup
        counts, tokens = metrics.counts, "prompt_tokens_total"
        reused, read = counts[tokens, 'state="reused"'], counts[tokens, 'state="read"']
        saved, idle = counts["saved_seconds_total", ""], counts["idle_tokens_total", ""]
        unknown = "" if metrics.reported else "not reported" if metrics.judged else "-"
        facts = {
            "tokens reused": unknown or f"{reused:,}",
            "tokens read": unknown or f"{read:,}",
            "time saved, about": duration(saved) if metrics.long_tokens else "-",
            "requests": f"{metrics.number:,}",
            "running now": str(self.proxy.running),
            "server": self.server(),
            "warm-up": warmup.state if warmup.enabled else "",
            "read ahead": warmup.told(),
            "tokens read in idle time": f"{idle:,}" if idle else "",
        }
        return defined(facts) + (tag("p", f"Time saved: {SAVED_BY}", "soft") if saved else "")

    def learned(self) -> str:
        """What was seen to vary, as HTML."""
        rows, learner = "", self.proxy.editor.lifter.learner
        for shape in list(learner.shapes):
            words, setting = learned(shape, self.proxy.config)
            if saved := learner.misses[shape.name()]:
                words += f"; saved {counted(saved, 'long read')}"
            rows += ITEM.format(html.escape(words), copied(setting))
        return f"<h2>Learned</h2><ol>{rows}</ol>" if rows else ""

    def rows(self, requests: list[Exchange], near: bool) -> str:
        """Requests, newest first, those of a conversation together, as HTML."""
        groups: dict[str, list[Exchange]] = {}
        for one in requests:
            name = one.trace.conversation[:8]
            title = f"Conversation {name}" if name else "Other requests"
            groups.setdefault(title if one.number else "Running now", []).append(one)
        told = ""
        for title, group in groups.items():
            rows = "".join(self.item(one, near) for one in group)
            told += f"<h3>{title}: {counted(len(group), 'request')}</h3><ol>{rows}</ol>"
        return told

    def item(self, exchange: Exchange, near: bool) -> str:
        """A request in the list, as HTML; one without a number is being served."""
        number = exchange.number
        start = tag("b", "is answered" if exchange.begun else "waits for the server")
        if number:
            when = time.strftime("%H:%M:%S", time.localtime(exchange.time))
            start = f"#{number} <time>{when}</time>"
        if number and near:
            start = f'<a href="/kvproxy/requests/{number}">{start}</a>'
        spans = "".join(tag("span", fact) for fact in facts_of(exchange).values())
        return ITEM.format(start + spans, verdict_html(exchange, near) if number else "")


def facts_of(exchange: Exchange) -> dict[str, str]:
    """What stands in a request's row and on its page."""
    usage, start = exchange.usage, exchange.started
    told = f"{read_of(usage)} tokens read"
    if not exchange.number:
        told = f"for {duration(time.monotonic() - start)}"
    elif exchange.status != 200:
        told = f"status {exchange.status}" if exchange.status else exchange.fault
    elif exchange.counting:
        told = "counts tokens"
    elif usage.read() is None:
        told = "reuse not reported"
    ends = {"first byte": exchange.begun, "all": exchange.ended} if exchange.number else {}
    times = [f"{name} {duration(at - start)}" for name, at in ends.items() if at]
    facts = {"prompt": told, "time": ", ".join(times), "client": client_of(exchange)}
    return {**facts, "model": exchange.model, "path": printable(exchange.request.path)}


def row_of(exchange: Exchange) -> Json:
    """A request in numbers."""
    request, verdict, usage = exchange.request, exchange.verdict, exchange.usage
    row: Json = {"number": exchange.number, "time": exchange.time, "method": request.method}
    row |= {"path": printable(request.path), "status": exchange.status}
    row |= {"fault": exchange.fault or None, "error": exchange.error or None}
    row |= {"client": client_of(exchange), "model": exchange.model or None}
    row |= {"report": vars(exchange.report), "conversation": exchange.trace.conversation or None}
    row |= {"usage": {**vars(usage), "read": usage.read()}, "verdict": verdict and vars(verdict)}
    for name, at in (("first_byte_ms", exchange.begun), ("total_ms", exchange.ended)):
        row[name] = round(1000 * (at - exchange.started), 1) if at else None
    return row


def verdict_html(exchange: Exchange, near: bool = True) -> str:
    """What became of a request, why, and what cures it, as HTML."""
    verdict, told = exchange.verdict, exchange.error or exchange.fault
    found = tag("p", told, "bad") if near and told else ""
    if verdict is not None:
        kind = f"{verdict.side} request" if verdict.side else verdict.step or "prompt"
        name = tag("b", verdict.name, TONES.get(verdict.name, ""))
        found += f"<p>{name} ({kind}): {VERDICTS[verdict.name]}</p>"
        if near and verdict.line():
            found += tag("p", spoken_line(verdict), "soft") + copied(verdict.cure)
    return found


def tag(name: str, text: str, kind: str = "") -> str:
    """An HTML element with a text; nothing for no text."""
    kind = f' class="{kind}"' if kind else ""
    return f"<{name}{kind}>{html.escape(text)}</{name}>" if text else ""


def defined(facts: dict[str, str]) -> str:
    """Names and values, where there is one, as an HTML list."""
    pairs = [
        f"<div>{tag('dt', name)}{tag('dd', told)}</div>" for name, told in facts.items() if told
    ]
    return f"<dl>{''.join(pairs)}</dl>"


def copied(setting: str) -> str:
    """A setting with a button that copies it, as HTML."""
    return f"<p>{COPY.format(html.escape(setting.partition(', which')[0]))}</p>" if setting else ""


def spoken_line(verdict: Verdict) -> str:
    """A verdict's line without the cure, which stands beside it."""
    return verdict.line().removesuffix(verdict.cure).rstrip("; ")


def client_of(exchange: Exchange) -> str:
    """The program that sent a request."""
    return visible(exchange.request.get("user-agent").partition(" ")[0])[:60] or "-"


def read_of(usage: Usage) -> str:
    """How many tokens of a prompt had to be read."""
    return "-" if usage.read() is None else f"{usage.read():,} of {usage.prompt:,}"


def diff_line(line: str) -> str:
    """A line of a unified diff as HTML; what stays is not shown at length."""
    kind = {"+": "add", "-": "del", "@": "soft"}.get(line[:1], "")
    return tag("span", line, kind) if kind else html.escape(line[:STAYS_SHOWN])


STAYS_SHOWN = 160  # characters
BODY_SHOWN = 100_000  # bytes of a body on a request's page
DIFF_BYTES = 1 << 20  # longer bodies are not compared
DIFF_LINES = 5000  # longer segments are not compared


def comparable(raw: bytes | bytearray) -> bool:
    """Whether a body is short, and would take only a few times its size when it is parsed."""
    values = 240 * raw.count(b"{") + 90 * raw.count(b"[") + 40 * raw.count(b",")
    return len(raw) <= DIFF_BYTES and (values < 10_000 or values <= 8 * len(raw))


def difference(before: list[Segment], after: list[Segment]) -> list[str]:
    """A unified diff of two prompts, segment by segment."""
    found, places = list[str](), list[tuple[int, int, int, int]]()
    was, now = ([text for _, text in prompt] for prompt in (before, after))
    for tag, low, high, new_low, new_high in difflib.SequenceMatcher(None, was, now).get_opcodes():
        if tag == "replace" and high - low == new_high - new_low:
            more = new_low - low
            places += [(at, at + 1, at + more, at + more + 1) for at in range(low, high)]
        elif tag != "equal":
            places.append((low, high, new_low, new_high))
    for low, high, new_low, new_high in places:
        names = [name for name, _ in (*before[low:high], *after[new_low:new_high])]
        old = [line for text in was[low:high] for line in text.split("\n")]
        new = [line for text in now[new_low:new_high] for line in text.split("\n")]
        if max(len(old), len(new)) > DIFF_LINES:
            found.append(f"{names[0]}: too long for a diff")
        else:
            found += difflib.unified_diff(old, new, names[0], names[-1], n=2, lineterm="")
    return found


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

WORDS = ("box", "reads", "file", "writes", "patch", "server", "tests", "fail", "look", "line")


def filler(count: int, seed: int) -> str:
    """`count` words of about a token each, in an order that `seed` decides."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def play(
    name: str, url: str, args: Words, timeout: float, rest: Callable[[], None] | None = None
) -> list[Json]:
    """Play an agent shaped like OpenClaw 2026.2 against a server; a row of numbers for each turn.

    Ids and a stamp change on every turn. A mark at the front keeps runs apart in the server's
    cache. With `rest` each turn has a tool step, and ends with a call of it. Raises OSError."""
    rows, turns, system = list[Json](), list[Json](), {"role": "system", "content": ""}
    mark, project = uuid.uuid4().hex[:12], filler(max(50, args.tokens - 200), 7)
    headers = {"User-Agent": f"kvproxy/{__version__}", **bearer(os.environ.get("API_KEY", ""))}

    def ask(tokens: int) -> Json:
        body = {"model": "local", "messages": [system, *turns], "max_tokens": tokens}
        server, data = Backend(Config(backend_url=url)), dump({**body, "temperature": 0})
        status, answer = server.ask("/v1/chat/completions", timeout, data, headers)
        if status != 200:
            raise OSError(f"status {status}: " * (status > 0) + " ".join(str(answer)[:200].split()))
        return members(answer)

    for turn in range(1, args.turns + 1):
        ids = {"message_id": str(uuid.uuid4()), "sender_id": "user-1"}
        meta = json.dumps({"schema": "openclaw.inbound_meta.v1", **ids}, indent=2)
        block = f"## Inbound Context (trusted metadata)\n```json\n{meta}\n```\n"
        system["content"] = f"You are helpful ({mark}).\n{block}# Project Context\n{project}"
        stamp = time.strftime("[%a %Y-%m-%d %H:%M UTC]", time.gmtime(1771447680 + 61 * turn))
        info = f"Conversation info (untrusted metadata):\n```json\n{json.dumps(ids)}\n```\n\n"
        text = f"{info}{stamp} Question {turn}: {filler(20, turn)}"
        turns.append({"role": "user", "content": text})
        begun = time.monotonic()
        answer = ask(8)
        usage, ms = usage_of([[answer]]), 1000 * (time.monotonic() - begun)
        if rest is not None:
            call = {"name": "look", "arguments": json.dumps({"path": f"file{turn}"})}
            calls = [{"id": f"call_{turn}", "type": "function", "function": call}]
            thought = {"reasoning_content": filler(100, turn), "content": "", "tool_calls": calls}
            result = {"role": "tool", "tool_call_id": f"call_{turn}", "content": filler(600, turn)}
            turns += [{"role": "assistant", **thought}, result]
            answer = ask(1024)
            rest()
        choice = members(next(iter(listed(answer.get("choices"))), None))
        said = members(choice.get("message"))
        turns.append(said if said.get("content") else {"role": "assistant", "content": "ok"})
        row = {"turn": turn, "prompt": usage.prompt, "read": usage.read()}
        rows.append({**row, "ms": round(usage.prompt_ms or ms, 1)})
        cells = ["-" if cell is None else f"{cell:,.0f}" for cell in rows[-1].values()]
        print(BENCH_ROW.format(name, *cells))
        if (name, turn, args.command) == ("straight", 1, "bench"):
            left = duration(rows[0]["ms"] / 1000 * args.turns)  # and one turn through kvproxy
            print(f"At this pace, about {left} more.")
    return rows


BENCH_ROW = "{:16} {:>5} {:>9} {:>9} {:>9}"
BENCH = """{0.turns} turns of about {0.tokens:,} tokens against {1}, first straight, then
through kvproxy. Straight, every turn reads the whole prompt; through kvproxy, only the
first should: {2:,} tokens, {3} on a server that reads 400 a second.
"""
BENCH_AHEAD = """{0.turns} turns with a tool step, behind about {0.tokens:,} tokens, against {1}:
first with PREFILL_AHEAD=0, then with 1. What is read when a person speaks.
"""


def compare(args: Words, config: Config, name: str, then: str) -> None:
    """Play, tell what was measured and what to do next; with --json tables go to stderr. Raises
    OSError."""
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        found = measure(args, config, name)
        print(then)
    if args.json:
        print(json.dumps(found))


def measure(args: Words, config: Config, name: str) -> Json:
    """Play against config.backend_url, straight and then through kvproxy. Raises OSError."""
    total = args.tokens * (args.turns + 1)
    print((BENCH_AHEAD if args.ahead else BENCH).format(args, name, total, duration(total / 400)))
    print(BENCH_ROW.format("", "turn", "prompt", "read", "ms"))
    quiet: Json = {"warmup_file": "", "capture_file": "", "keepalive_seconds": 0}
    quiet |= {"listen_host": "127.0.0.1", "listen_port": 0, "log_level": "error"}

    def through_kvproxy(name: str, ahead: str) -> list[Json]:
        with Proxy(dataclasses.replace(config, **quiet, prefill_ahead=ahead)) as proxy:
            rest = proxy.warmup.rest if args.ahead else None
            return play(name, proxy.url, args, config.read_timeout, rest)

    if args.ahead:
        runs = through_kvproxy("not ahead", "0"), through_kvproxy("read ahead", "1")
    else:
        straight = play("straight", config.backend_url, args, config.read_timeout)
        runs = straight, through_kvproxy("through kvproxy", "0")
    before, after = (sum(row["ms"] for row in rows[1:]) for rows in runs)
    ratio = before / after if after else None
    if ratio is not None:
        print(f"\nFrom the second turn on the prompt is ready {ratio:.1f} times as fast.")
    told = {"simulated": args.command == "demo", "straight": runs[0], "through": runs[1]}
    return {**told, "ratio": ratio}


def next_steps(config: Config, url: str) -> str:
    """What to do after a demo or a bench, to be copied; the same in every shell."""
    words = [os.path.basename(sys.executable or "python").removesuffix(".exe"), __file__]
    words = [f'"{word}"' if " " in word else word for word in words] + [f"BACKEND_URL={url}"]
    port = config.listen_port or 1234
    port += urllib.parse.urlsplit(url).port == port
    if port != 1234:
        words.append(f"LISTEN_PORT={port}")
    page = f"http://127.0.0.1:{port}"
    return (
        f"\nWhat to do next:\n  {' '.join(words)}\n\nThen give your agent {page}/v1 (Claude Code:"
        f" {page})\ninstead of the server's address, and open {page}/kvproxy"
    )


class SimulatedServer(BaseHTTPRequestHandler):
    """A stand-in for llama-server: one slot, whose cache is the longest common prefix in words."""

    slot: list[str] = []  # noqa: RUF012 - of the class

    def do_POST(self) -> None:
        words = str(json.loads(self.rfile.read(int(self.headers["Content-Length"])))).split()
        cached = min(common_prefix(self.slot, words), len(words) - 1)
        SimulatedServer.slot, ms = words, 0.02 * (len(words) - cached)
        time.sleep(ms / 1000)
        timings = {"cache_n": cached, "prompt_n": len(words) - cached, "prompt_ms": ms}
        message = {"role": "assistant", "content": "Noted, thanks."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(dump({"choices": [choice], "timings": timings}))

    def log_message(self, format: str, *args: Any) -> None:
        pass


def command_demo(args: Words, config: Config) -> int:
    """Play a conversation against a simulated server, straight and through a real proxy."""
    # HTTPServer would ask DNS for this machine's name
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), SimulatedServer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            then = next_steps(config, config.backend_url or CANDIDATES[0])
            then += "\nTo measure your own server first, put `bench` behind that line."
            compare(args, Config(backend_url=url), "a SIMULATED server (50 words a ms)", then)
        finally:
            server.shutdown()
    return 0


def command_bench(args: Words, config: Config) -> int:
    """The same conversation against BACKEND_URL."""
    backend = Backend(config)
    try:
        url = backend.locate().geturl()
        backend.connect().close()
    except OSError as error:
        return failed(f"No model server answers at {backend.name()} ({error}). Set BACKEND_URL.")
    try:
        config = dataclasses.replace(config, backend_url=url)
        compare(args, config, url, next_steps(config, url))
    except OSError as error:
        hint = " Try a smaller --tokens, or raise -c of the server."
        more = hint if CONTEXT_FULL.search(str(error).encode()) else ""
        return failed(f"The run broke off: {error}{more}")
    return 0


def failed(why: str) -> int:
    """Tell why a command ends, which has this exit code."""
    print(why, file=sys.stderr)
    return 1


def command_check(args: Words, config: Config) -> int:
    """Tell what the backend is, and what in its settings hurts the cache."""
    backend = Backend(config)
    backend.keys = bearer(os.environ.get("API_KEY", ""))
    found = backend.describe()
    if not found:
        print(f"No model server answers at {backend.name()}.")
        print(f"Is it running? {USUAL_PORTS} Set BACKEND_URL.")
        return 1
    print(f"{backend.name()}: {described(found)}")
    if "state" in found:
        wants_key = re.search("40[13]", found["state"])
        print("Set API_KEY and try again." if wants_key else "Try again when it is ready.")
        return 1
    slots, context = backend.ask("/slots")[1], found.get("context")
    params = [members(members(slot).get("params")) for slot in listed(slots)]
    faults = {
        "no slots": not isinstance(slots, list),
        "no cache": any(one.get("cache_prompt") is False for one in params),
        "one for all": found.get("slots") == 1,
        "short context": isinstance(context, int) and context < 32768,
    }
    for name in [name for name, there in faults.items() if there] or ["no fault"]:
        text = ADVICE[name].format(context=context)
        print(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  "))
    return 0


# --- inspect: captures and llama-server logs ------------------------------------------------------

LOG_SHAPES = [  # what a server's log line tells; llama.cpp old and new, ik_llama.cpp
    (name, re.compile(pattern))
    for name, pattern in (row.split(None, 1) for row in r"""
slot    by \w+ similarity.{,80}?\b(?:f_)?sim\w{,9} = (?P<sim>[\d.]+)(?:.*f_keep = (?P<keep>[\d.]+))?
slot    selected slot by (?P<lru>LRU)
slot    slot is processing (?P<begins>task)
prompt  new prompt, n_ctx_slot.{,80}?(?:task\.n_tokens|n_prompt_tokens) = (?P<tokens>\d+)
counts  (?:n_past|n_tokens) = (?P<cached>\d+), new[ _]tokens = (?P<read>\d+)
cached  (?:n_past|n_tokens) = (?P<cached>\d+), memory_seq_rm
cached  kv cache rm \[p0, end\).{,120}?\bp0=(?P<cached>\d+)
cached  kv cache rm \[(?P<cached>\d+), end\)
full    [Ff]orcing full prompt (?P<forced>re-processing(?: due to [^(\n]*)?)
eval    prompt eval(?: time)?\s*[=:]\s*(?P<ms>[\d.]+) ?ms\s*[/,]\s*(?P<read>\d+) tokens
start   server is listening on|loading model""".strip().splitlines())
]  # fmt: skip
LOG_SLOT = re.compile(r"(?:\bid +|slot )(\d+) ?(?:\||:)|id_slot=(\d+)")
LOG_PORT = re.compile(r"(?:^|[\s\"])\[(\d{2,5})\] ")  # a router's, in front of its servers' lines
LOG_TYPES = {"sim": float, "keep": float, "ms": float, "lru": str, "forced": str, "begins": str}
LOG_LINE = 16384  # bytes; longer lines are no log lines
INSPECT_LINE = "{:>4} {:28} {:>9} {:>9} {:>6} {:>6}  {}"
INSPECT_HEAD = INSPECT_LINE.format("#", "request", "prompt", "read", "sim", "keep", "what happened")
INSPECT_END = (
    "prompt, read: tokens (of a request with ~ by its text); sim: share of the prompt that an"
    " earlier one began with; keep: share of the slot's old content that stayed."
)
STRAIGHT = (
    "If these requests did not come through kvproxy, put it in front of the server first: it cures"
    " most of this, and says of the rest what it is."
)
# None: not known; `cause` names what was wrong, `cured` says whether kvproxy mends that.
INSPECT_ROW: Json = {"name": "", "what": "", "cause": "", "cure": "", "estimated": False}
INSPECT_ROW |= dict.fromkeys(("tokens", "read", "sim", "keep", "ms", "cured"))


def command_inspect(args: Words, config: Config) -> int:
    """What changed between requests, from a capture or a llama-server log."""
    try:
        path = os.path.expanduser(args.file)
        file = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
    except OSError as error:
        return failed(f"{args.file} cannot be read: {error.strerror or error}")
    number, reader, findings = 0, LogReader(config), dict[str, Json]()
    if args.json:
        print('{"requests": [')
    with file:
        for number, row in enumerate(reader.rows(file), 1):
            if args.json:
                print("," * (number > 1) + visible(json.dumps(row)))
            else:
                print(f"{INSPECT_HEAD}\n" * (number == 1) + visible(in_columns(number, row)))
            if row["cause"]:
                new = {"cause": row["cause"], "requests": 0, "tokens": 0, "cured": 0}
                new |= {"example": row["what"], "advice": row["cure"]}
                found = findings.setdefault(row["cause"], new)
                found["requests"] += 1
                found["tokens"] += row["read"] or 0
                found["cured"] += bool(row["cured"])
    told = sorted(findings.values(), key=lambda found: found["tokens"], reverse=True)
    for found in told:
        found["advice"] = finding_advice(found, config)
    if args.json:
        print('], "findings": ' + visible(json.dumps(told)) + "}")
        return 0
    if not number:
        print("No request was recognised: neither a capture (JSON lines) nor a log (-lv 4).")
        return 1
    lines = ["Findings, most tokens wasted first:"] if told else ["Nothing was wasted."]
    lines += [STRAIGHT] * (bool(told) and not reader.ledger.count)
    for found in told:
        waste = f"{counted(found['requests'], 'request')}, about {found['tokens']:,} tokens read."
        lines.append(visible(f"- {found['cause']}: {waste} {found['advice']}"))
    for text in ("", INSPECT_END, "", *lines):
        print(textwrap.fill(text, 110, subsequent_indent="  " * text.startswith("- ")))
    return 0


def finding_advice(found: Json, config: Config) -> str:
    """What to do about a finding, whose `advice` is that of its first request."""
    if found["cured"] == found["requests"]:
        return "kvproxy cures this: send the requests through it."
    known = found["cause"] if found["cause"] in ADVICE else "rewritten"
    text = found["advice"] or advice(known, config)
    text = text[0].upper() + text[1:] + "." * ("_REGEX=" not in text)
    return f"kvproxy cures {found['cured']} of them. {text}" if found["cured"] else text


def in_columns(number: int, row: Json) -> str:
    forms = {"tokens": "{:,}", "read": "{:,}", "sim": "{:.3f}", "keep": "{:.3f}"}
    cells = [form.format(row[key]) if row[key] is not None else "-" for key, form in forms.items()]
    name = row["name"][:27] + "~" * row["estimated"]
    return INSPECT_LINE.format(number, name, *cells, row["what"])


class LogReader:
    """Reads a capture or a server's log by the line; a row comes out for each request."""

    def __init__(self, config: Config) -> None:
        self.config, limit = config, config.ledger_mb << 20
        self.ledger = Ledger(limit)  # of prompts as captured
        self.cured = Ledger(limit)  # and as kvproxy would have sent them
        self.editor = Editor(config)
        self.ended, self.lost_at = 0.0, -1.0
        self.tasks: dict[str, Json] = {}  # what is known of the task of each port and slot
        self.slots: dict[str, str] = {}  # the slot that a port's log spoke of last
        self.longest: dict[str, int] = {}  # the longest prompt of a port since its server's start

    def rows(self, file: Any) -> Iterator[Json]:
        """The rows of a file, one by one."""
        lines = file
        if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # PowerShell's >
            lines = codecs.EncodedFile(file, "utf-8", "utf-16", "replace")
        while line := lines.readline(PARSE_LIMIT):
            yield from self.line(line)
        yield from self.end()

    def line(self, raw: bytes) -> list[Json]:
        """The rows that a line completes; none for a line of anything else."""
        try:
            row = members(json.loads(raw, **_FINITE)) if raw.lstrip()[:1] == b"{" else {}
            if "body" in row and isinstance(row.get("path"), str):
                return self.captured(row)
            return self.logged(raw.decode("utf-8", "replace")) if len(raw) <= LOG_LINE else []
        except (ValueError, RecursionError, OverflowError):
            return []  # half a line, too deep, or a number that is none

    def captured(self, row: Json) -> list[Json]:
        """The row of a captured request."""
        dialect, counting = dialect_of(row["path"])
        if dialect is None or counting:
            return []
        body = row["body"]
        view = view_of(json.loads(body) if isinstance(body, str) else body, dialect)
        now = row["time"] if isinstance(row.get("time"), (int, float)) else 0.0
        path, status = row["path"].split("?")[0].removeprefix("/v1"), row.get("status", 200)
        found = {**INSPECT_ROW, "name": f"{path[1:]}, {len(view.turns)} items"}
        if status not in (0, 200):
            self.lost_at = now if status in (502, 503, 504) else self.lost_at
            return [{**found, "what": f"status {status}"}]
        headers = {key.lower(): value for key, value in members(row.get("headers")).items()}
        side = side_of(view, headers.get(AGENT_ID, ""))
        prompt = Prompt(view, self.editor.replay.conversation(view), side, now)
        case = self.ledger.judge(prompt, self.lost_at)
        case.idle, self.ended = (now - self.ended if self.ended else 0.0), now
        verdict, prompt.number = case.verdict, self.ledger.count
        told = {key: n for key, n in members(row.get("usage")).items() if type(n) in (int, float)}
        usage = Usage(told.get("prompt"), told.get("cached"), told.get("prompt_ms"))
        settle(case, usage, self.config)
        if estimated := usage.read() is None:
            usage.prompt = prompt.size // 4
            usage.cached = round(usage.prompt * verdict.share)
            verdict.name = "extended" if verdict.name == "not reported" else verdict.name
        trace = self.editor.apply(view, Report())  # changes the view
        if trace.record is not None:
            trace.record.answer = ANY
        as_sent = self.cured.judge(Prompt(view, trace.conversation, side)).verdict
        changed = verdict.name == "rewritten" and verdict.kind != "reasoning"
        cured = changed and as_sent.name == "extended"
        if cured:
            verdict.advice = verdict.cure = ""
        line = verdict.line()
        found |= {"what": f"{verdict.title()}: {line}" if line else verdict.title()}
        found |= {"sim": round(verdict.share, 3), "estimated": estimated, "ms": usage.prompt_ms}
        found |= {"tokens": usage.prompt, "read": usage.read()}
        if line and not prompt.side and verdict.name in ("rewritten", "lost"):
            found |= {"cause": cause_of(verdict), "cured": cured, "cure": verdict.remedy()}
        return [found]

    def logged(self, text: str) -> list[Json]:
        """A line of llama-server's log, whatever docker, a journal or a router put in front."""
        found, slot = LOG_PORT.search(text[:200]), LOG_SLOT.search(text)
        port = f"port {found[1]} " if found else ""
        if slot:
            self.slots[port] = f"slot {slot[1] or slot[2]}"
        hits = ((kind, hit) for kind, shape in LOG_SHAPES if (hit := shape.search(text)))
        kind, match = next(hits, ("", None))
        if match is None or kind == "start":
            return self.end(port) if kind else []
        name, done = port + self.slots.get(port, "slot ?"), list[Json]()
        if kind in ("slot", "prompt", "counts") and "tokens" in self.tasks.get(name, ()):
            done = self.finish(name)  # the next task begins
        task = self.tasks.setdefault(name, {"port": port})
        for key, value in match.groupdict().items():
            if value and (kind in ("eval", "slot") or key not in task):
                task[key] = LOG_TYPES.get(key, int)(value)
        if kind == "counts" or (kind == "eval" and "tokens" not in task and "cached" in task):
            task["tokens"] = task["cached"] + task["read"]
        return [*done, *self.finish(name)] if kind == "eval" else done

    def end(self, port: str = "") -> list[Json]:
        """The rows of tasks that no line ends: the log stops, or a port's server starts anew."""
        names = [name for name in self.tasks if name.startswith(port)]
        rows = [row for name in names for row in self.finish(name)]
        self.longest.pop(port, None)
        return rows

    def finish(self, name: str) -> list[Json]:
        """The row of a slot's task, if a prompt was seen."""
        task = self.tasks.pop(name)
        tokens, read, sim, keep = (task.get(key) for key in ("tokens", "read", "sim", "keep"))
        if tokens is None and read is None:
            return []
        if read is None and "cached" in task:
            read = tokens - task["cached"]
        size, longest = tokens or read or 0, self.longest.get(task["port"], 0)
        self.longest[task["port"]] = max(size, longest)
        mostly = size > 512 and read is not None and tokens is not None and 2 * read > tokens
        low = sim is None or sim < 0.5
        cause, what = "", "read" if tokens is None or read == tokens else "reused"
        if "forced" in task and "lru" not in task:
            cause, what = "full re-processing", f"full {task['forced'].strip()}"
        elif mostly and low and size > 2 * longest:
            what = "first prompt of its length"
        elif mostly:
            cause = "low similarity" if low else "not all kept"
            what = cause = "no similar slot" if sim is None else cause
        elif keep is not None and keep < 0.9 and size * (1 - keep) > 64:
            what = cause = "slot cut"
        numbers = {"tokens": tokens, "read": read, "sim": sim, "keep": keep, "ms": task.get("ms")}
        return [{**INSPECT_ROW, **numbers, "name": name, "cause": cause, "what": what}]


def cause_of(verdict: Verdict) -> str:
    """A name for a fault: the place, and the words before what changes."""
    if verdict.name == "lost":
        return f"lost, {verdict.kind}"
    text = verdict.before or verdict.after
    if verdict.before and verdict.after:
        text = text[: common_prefix(verdict.before, verdict.after)]
    label = re.sub(r"\d+", "#", re.sub(r"[\w.:+-]*$", "", text))[-24:].strip()
    place = "turn" if verdict.where.startswith("turn") else verdict.where
    named = place != "tools" and re.search(r"\w", label)
    return f"{place}, {verdict.kind}" + (f": {label!r}" if named else "")


# --- main -----------------------------------------------------------------------------------------


def command_serve(args: Words, config: Config) -> int:
    """Listen until Ctrl-C or SIGTERM, then let answers end."""
    proxy = Proxy(config)
    handler: logging.Handler = logging.StreamHandler()
    if config.log_file:
        tell = functools.partial(print, "kvproxy:", file=sys.stderr)
        handler = PrivateFile("LOG_FILE", config.log_file, tell)
    form = "%(asctime)s %(levelname)s %(request)s%(message)s"
    handler.setFormatter(logging.Formatter(form, defaults={"request": ""}))
    proxy.log.addHandler(handler)
    try:
        proxy.start()
    except OSError as error:
        why = f"cannot be used: {error.strerror or error}. {taken_by(config)}"
        return failed(f"Port {config.listen_port} on {config.listen_host} {why}")
    for name, wanted in misspelt(os.environ):
        proxy.log.warning(MISSPELT, name, wanted)
    running = threading.Lock()  # KeyboardInterrupt would be lost where Python ignores exceptions
    running.acquire()

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.default_int_handler)  # a second one does not wait for answers
        if running.locked():
            running.release()

    for name in ("SIGINT", "SIGTERM", "SIGBREAK"):  # Windows has no SIGTERM, Unix no SIGBREAK
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    proxy.log.info(
        "kvproxy %s listens on %s (status page: %s/kvproxy)", __version__, proxy.url, proxy.url
    )
    if found := proxy.backend.describe():
        proxy.log.info("backend %s: %s", proxy.backend.name(), described(found))
    else:
        proxy.backend.lost()
        told = f"Is it running, is BACKEND_URL right? {USUAL_PORTS} Requests look for it again."
        proxy.log.warning("backend: none answers yet at %s. %s", proxy.backend.name(), told)
    while not running.acquire(timeout=0.5):
        pass  # Windows runs the handlers between the waits only
    proxy.log.info("stopping: answers in progress may end (%d s)", DRAIN_SECONDS)
    proxy.stop()
    return 0


MISSPELT = "the variable %s is no setting: is %s meant?"


def taken_by(config: Config) -> str:
    """What to do about a port that something else has."""
    url, there = url_of(config.listen_host, config.listen_port), Backend(config)
    there.url = urllib.parse.urlsplit(url)
    if "warmup" in members(there.ask("/kvproxy/health")[1]):
        return f"kvproxy runs there already: {url}/kvproxy"
    owner = there.describe().get("product")
    if owner in OWNERS.values():
        line = f"python kvproxy.py BACKEND_URL={url} LISTEN_PORT={config.listen_port + 1}"
        return f"{owner} has it. Put kvproxy in front of it: {line}"
    return "Set LISTEN_PORT or LISTEN_HOST."


COMMANDS = {
    "serve": (command_serve, "listen and forward (the default)"),
    "demo": (command_demo, "show the effect on a simulated server; needs nothing"),
    "bench": (command_bench, "measure the effect on the server at BACKEND_URL (API_KEY: its key)"),
    "inspect": (command_inspect, "explain a capture or a llama-server log: FILE; - reads stdin"),
    "check": (command_check, "tell what the backend is, what hurts its cache (API_KEY: its key)"),
}
OPTIONS = {
    "--json": "demo, bench and inspect print JSON",
    "--ahead": "bench shows what PREFILL_AHEAD=1 gains",
    "--tokens": "demo and bench: length of the prompt [6000; bench: 16000]",
    "--turns": "demo and bench: turns of the conversation [5]",
    "--version": "print the version",
    "--help": "print this",
}


@dataclasses.dataclass
class Words:
    """A command line."""

    command: str = ""
    file: str = ""
    tokens: int = 0
    turns: int = 5
    json: bool = False
    ahead: bool = False
    settings: dict[str, str] = dataclasses.field(default_factory=dict)


def read_words(words: Iterable[str]) -> Words:
    """The words of a command line, in any order. Raises ConfigError for one that means nothing."""
    args, left = Words(), iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if equals and setting_of(name.upper()):
            args.settings[name.upper()] = value
        elif name in ("--tokens", "--turns"):
            value = value if equals else next(left, "")
            if not re.fullmatch("[1-9][0-9]{,8}", value):
                raise ConfigError(f"{name}: must be at least 1")
            setattr(args, name[2:], int(value))
        elif word in ("--json", "--ahead"):
            setattr(args, word[2:], True)
        elif word in ("--help", "--version", "-h") or (word in COMMANDS and not args.command):
            args.command = word
        elif args.command == "inspect" and not args.file and not word.startswith("--"):
            args.file = word
        elif word in COMMANDS:
            raise ConfigError(f"one command at a time: {args.command} or {word}")
        else:
            raise ConfigError(f"{name} is no command, setting or option{nearest(name)}")
    if args.command == "inspect" and not args.file:
        raise ConfigError("inspect needs a FILE; - reads stdin")
    args.tokens = args.tokens or (6000 if args.command == "demo" else 16000)
    return args


def nearest(word: str) -> str:
    """The command or setting that a word is most like, as the end of a sentence."""
    setting, colon, value = word.partition(":")
    if colon and setting_of(setting.upper()):
        return f"; write {setting.upper()}={value}"
    if colon and URL.fullmatch(word):
        return f"; write BACKEND_URL={word}"
    names = {item.name.upper(): item.name.upper() + "=..." for item in dataclasses.fields(Config)}
    names |= {command.upper(): command for command in COMMANDS}
    name = word.strip("-").replace("-", "_").upper()
    parts = [setting for setting in names if name in (setting, *setting.split("_"))][:3]
    found = parts or difflib.get_close_matches(name, names, 2)
    told = " or ".join(names[one] for one in found)
    return (f"; nearest: {told}" if told else "") + "; --help lists all"


def usage_text() -> str:
    """What --help prints."""
    width = max(40, min(118, shutil.get_terminal_size().columns - 1))
    settings = {
        n: f"{text} [{default}]" if default else text for n, default, text in Config.table()
    }
    parts: dict[str, dict[str, str]] = {
        "commands": {name: text for name, (_, text) in COMMANDS.items()},
        "options": OPTIONS,
        "settings (environment variables, or words: LISTEN_PORT=1235)": settings,
    }
    lines = ["usage: kvproxy.py [NAME=VALUE ...] [COMMAND] [OPTION ...]"]
    for title, rows in parts.items():
        lines += ["", textwrap.fill(title + ":", width)]
        for name, text in rows.items():
            lines.append(textwrap.fill(f"  {name:21} {text}", width, subsequent_indent=" " * 24))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        # Texts may hold characters that its encoding does not have.
        reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        args = read_words(sys.argv[1:] if argv is None else argv)
        if args.command.startswith("-"):
            print(f"kvproxy {__version__}" if args.command == "--version" else usage_text())
            return 0
        run = COMMANDS[args.command or "serve"][0]
        for name, wanted in misspelt(os.environ) if run is not command_serve else ():
            print(MISSPELT % (name, wanted), file=sys.stderr)
        return run(args, Config.from_env({**os.environ, **args.settings}))
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
