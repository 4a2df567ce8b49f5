#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the kvproxy authors
# /// script
# requires-python = ">=3.10"
# dependencies = []
# ///
"""kvproxy: makes llama-server's prefix cache hit for agents that put clocks and ids in front of
their prompts. Run it (--help shows more):

    python kvproxy.py demo                                 see what it does; needs no server
    python kvproxy.py BACKEND_URL=http://127.0.0.1:8080    serve on 127.0.0.1:1234

The cache reuses a prompt only up to the first byte that differs from the last one. So kvproxy
forwards prompts that begin with what the server has already read. From a program:

    with Proxy(Config(backend_url="http://127.0.0.1:8080", listen_port=0)) as proxy: ...
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("kvproxy needs Python 3.10 or newer. Try: uv run kvproxy.py")

import codecs
import copy
import difflib
import errno
import functools
import hashlib
import http.client
import ipaddress
import json
import logging.handlers
import math
import os
import re
import select
import shutil
import signal
import socket
import socketserver
import ssl
import struct
import textwrap
import time
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import Field, dataclass, field, fields, replace
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, count, groupby, islice, takewhile, zip_longest
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, NamedTuple, cast
from urllib.parse import SplitResult, unquote, urlsplit

UNPARSED = (ValueError, RecursionError)
AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
__version__ = "2.0.0"
__all__ = ["Config", "ConfigError", "Proxy", "Report", "scrub"]

Json = dict[str, Any]
Texts = dict[str, str]


# ====== Configuration: one dataclass ======


class ConfigError(ValueError):
    """The message says what is allowed."""


def setting(default: Any, help: str, *allowed: Any) -> Any:
    """A Config field. `allowed`: words, or the least and the largest number."""
    return field(default=default, metadata={"help": help, "allowed": allowed})


@dataclass(frozen=True)
class Config:
    """Every setting; its environment variable is its name in upper case. Raises ConfigError."""

    listen_host: str = setting("127.0.0.1", "0.0.0.0 lets other machines in")
    listen_port: int = setting(1234, "0 takes any free port", 0, 65535)
    backend_url: str = setting("", "unset: found on port 8080, 9931 or 12345")
    scrub: bool = setting(True, "0 edits nothing")
    strip_message_ids: str = setting("system", "drop OpenClaw's ids; 1: all", "0", "1", "system")
    strip_timestamps: str = setting("auto", "drop time stamps; auto: if REPLAY=0", "auto", "0", "1")
    strip_billing: bool = setting(True, "drop Claude Code's billing header")
    strip_regex: tuple[str, ...] = setting((), "cut out of system, user; more: STRIP_REGEX_2, ...")
    system_first: bool = setting(True, "one system text, at the front")
    lift: bool = setting(True, "move what varies from system to the newest turn")
    learn: bool = setting(True, "find what varies by comparing requests")
    lift_regex: tuple[str, ...] = setting((), "lift lines like this; more: LIFT_REGEX_2, ...")
    replay: bool = setting(True, "send history as it was sent first; LIFT needs it")
    replay_regex: tuple[str, ...] = setting((), "what comes and goes; more: REPLAY_REGEX_2, ...")
    replay_mb: int = setting(64, "MB for replay, and as many for turns", 1, 65536)
    ledger_mb: int = setting(64, "MB for prompts to compare with", 1, 65536)
    keep_requests: int = setting(50, "requests on the status page", 0, 10000)
    warn_reuse: float = setting(0.5, "warn below this hit rate of 20 requests", 0, 1)
    capture_file: str = setting("", "append requests to this file, no secrets")
    capture_mb: int = setting(100, "MB at which it is rotated", 1, 1000000)
    warmup_file: str = setting("", "remember heads here for the next start")
    warmup_heads: int = setting(4, "how many heads", 1, 64)
    keepalive_seconds: int = setting(0, "idle seconds until a head is sent", 0, 864000)
    prefill_ahead: str = setting("auto", "read the next prompt in idle time", "auto", "0", "1")
    prefill_ahead_seconds: float = setting(0.5, "idle seconds before that", 0.05, 3600)
    connect_timeout: float = setting(5.0, "seconds for a connection", 0.05, 600)
    read_timeout: float = setting(3600.0, "seconds without a byte from the server", 0.05, 864000)
    header_timeout: float = setting(15.0, "seconds for a request's head", 0.05, 3600)
    max_body_mb: int = setting(100, "largest request body in MB", 1, 65536)
    max_connections: int = setting(2048, "clients at a time; idle ones give way", 1, 100000)
    allowed_hosts: str = setting("", "more Host names, between commas")
    log_level: str = setting("info", "verbosity", "debug", "info", "warning", "error")
    log_file: str = setting("", "append the log to this file; unset: stderr")

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, _checked(item, value))
            except (ValueError, TypeError, re.error, OverflowError, RecursionError) as error:
                raise ConfigError(f"{item.name.upper()}={value!r}: {error}") from None
        url = urlsplit(self.backend_url)
        port = url.port or (443 if url.scheme == "https" else 80)
        hosts = {url.hostname, self.listen_host.lower()}
        local = hosts <= {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"}
        if port == self.listen_port and (local or len(hosts) == 1):
            raise ConfigError(f"BACKEND_URL={self.backend_url!r}: own address; set LISTEN_PORT")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Config:
        """An empty value counts as unset."""
        values: Json = {}
        for name in sorted(environ, key=lambda name: (len(name), name)):  # ..., _9, _10
            item, text = setting_of(name), environ[name]
            if item and text.strip():
                pattern = item.default == ()
                values[item.name] = (*values.get(item.name, ()), text) if pattern else text.strip()
        return cls(**values)

    @classmethod
    def table(cls) -> list[tuple[str, str, str]]:
        """(variable, default, meaning) of each, for --help and the README."""
        rows = []
        for item in fields(cls):
            default: Any = "" if item.default == () else item.default
            shown = default if isinstance(default, str) else f"{default:g}"
            rows.append((item.name.upper(), shown, item.metadata["help"]))
        return rows


_NAME = r"[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
_IPV6 = r"[0-9a-fA-F.]*:[0-9a-fA-F:.]*(?:%\w+)?"
_PORT = r"(?::([1-9]\d{0,4}))?"
URL = re.compile(rf"(https?://)?(?:{_NAME}|\[{_IPV6}\]){_PORT}(?:/[!\"$->@-~]*)?", re.ASCII)
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_TYPES = {bool: "0 or 1", int: "a whole number", float: "a number"}


def setting_of(variable: str) -> Field[Any] | None:
    """The setting of an environment variable: NAME; for a pattern also NAME_2, ..."""
    name = re.sub(r"(?<=_REGEX)_[0-9]+\Z", "", variable)
    return Config.__dataclass_fields__.get(name.lower()) if name.isupper() else None


def misspelt(environ: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(variable, setting) where a setting was most likely meant."""
    names = [item.name.upper() for item in fields(Config)]
    for variable in environ:
        bare = variable.upper().removeprefix("KVPROXY_")
        for name in difflib.get_close_matches(bare, names, 1, 0.8):
            if abs(len(name) - len(bare)) <= 1 and not setting_of(variable):
                yield variable, name


def _checked(item: Field[Any], value: Any) -> Any:
    """A setting's value, which may come as text. The error tells what is allowed."""
    kind: Any = type(item.default)
    allowed = item.metadata["allowed"]
    if kind is bool and str(value).lower() in _ON + _OFF:
        value = str(value).lower() in _ON
    elif kind in (int, float):
        with suppress(ValueError):
            value = kind(str(value))
    if type(value) is not kind:
        raise ValueError(f"must be {_TYPES.get(kind, 'text')}")
    for pattern in value if kind is tuple else ():
        re.compile(pattern)
    if kind is str and allowed:
        value = value.lower()
        if value not in allowed:
            raise ValueError("must be one of " + ", ".join(allowed))
    elif allowed and not allowed[0] <= value <= allowed[1]:  # NaN fails both comparisons
        raise ValueError(f"must be from {allowed[0]} to {allowed[1]}")
    elif item.name == "listen_host" and not re.fullmatch(f"{_NAME}|{_IPV6}", value, re.ASCII):
        raise ValueError("must be an address or a host name")
    elif item.name == "backend_url" and value:
        url = URL.fullmatch(value)
        if not url or not any(url.groups()) or int(url[2] or 80) > 65535:
            raise ValueError("must be http://host[:port][/prefix] or https://...")
        value = value if url[1] else "http://" + value
    return value


# ====== Dialects: four request shapes, one view ======


class Dialect(NamedTuple):
    name: str
    system: str  # key of the system text, if any
    turns: str  # key of the list
    edited: bool


DIALECTS = {
    "chat/completions": Dialect("chat", "", "messages", True),
    "responses": Dialect("responses", "instructions", "input", True),
    "messages": Dialect("messages", "system", "messages", True),
    "completions": Dialect("completions", "", "prompt", False),
    "completion": Dialect("completions", "", "prompt", False),
}
DIALECT_PATH = re.compile(
    r"/(?:v1/)?(chat/completions|responses|messages|completions?)(/(?:count|input)_tokens)?/?"
)
TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = {role: role for role in ("system", "user", "assistant", "tool", "reasoning")}
ROLES |= dict.fromkeys(("function_call", "custom_tool_call"), "assistant")  # Responses items
ROLES |= dict.fromkeys(("function", "function_call_output", "custom_tool_call_output"), "tool")
ROLES["developer"] = "system"


def dialect_of(path: str) -> tuple[Dialect | None, bool]:
    """A path's dialect, and whether it only counts tokens."""
    found = DIALECT_PATH.fullmatch(path.split("?", 1)[0])
    return (DIALECTS[found[1]], bool(found[2])) if found else (None, False)


class Slot(NamedTuple):
    """Where a turn holds a text."""

    turn: Turn
    holder: Any
    key: Any

    def get(self) -> str:
        return str(self.holder[self.key])

    def set(self, text: Any) -> None:
        self.holder[self.key] = text
        self.turn.raw = self.turn.said = self.turn.told = None


@dataclass(slots=True, eq=False)
class Turn:
    """One entry of a prompt. Requests share turns: only an own() copy may be edited."""

    role: str  # one of ROLES, or other
    holder: Json
    key: str  # holder[key] is the content
    item: Json | None  # None for text beside the list
    raw: bytes | None = None  # the item as JSON, as it came
    said: Said | None = None
    told: str | None = None
    stripped: Any = None  # see Scrubber.apply()

    def own(self) -> Turn:
        """A copy to edit; of text beside the list, the turn itself with parts to edit."""
        item = dict(self.item) if self.item is not None else self.holder
        if isinstance(content := item.get(self.key), list):
            item[self.key] = [copy.copy(part) for part in content]
        return self if self.item is None else Turn(self.role, item, self.key, item)

    def json(self) -> bytes:
        if self.raw is None:
            self.raw = dump(self.item)
        return self.raw

    def slots(self) -> list[Slot]:
        """What a person or the client wrote, not calls and their results."""
        content = self.holder.get(self.key)
        found = [Slot(self, self.holder, self.key)] if isinstance(content, str) else []
        for index, part in enumerate(listed(content)):
            if isinstance(part, str):
                found.append(Slot(self, content, index))
            elif members(part).get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
                found.append(Slot(self, part, "text"))
        return found

    def text(self) -> str:
        content = self.holder.get(self.key)
        if isinstance(content, str):
            return content
        return "\n".join([slot.get() for slot in self.slots()])


@dataclass(slots=True)
class View:
    body: Json
    dialect: Dialect
    head: list[Turn]  # system text beside the list
    turns: list[Turn]

    def leading(self) -> int:
        """How many system messages the list begins with."""
        for place, turn in enumerate(self.turns):
            if turn.role != "system":
                return place
        return len(self.turns)

    def system(self) -> list[Turn]:
        return self.head + self.turns[: self.leading()]

    def system_texts(self) -> list[str]:
        return [turn.text() for turn in self.system()]

    def dump(self) -> bytes:
        """As JSON, with the turns that nobody changed in the bytes they came in."""
        if self.turns and self.turns[0].item is None:
            return dump(self.body)
        turns = b",".join([turn.json() for turn in self.turns])
        front, end = dump({**self.body, self.dialect.turns: HOLE}).split(dump(HOLE))
        return b"".join((front, b"[", turns, b"]", end))


def turn_of(item: Json) -> Turn:
    """A turn of an item. An Anthropic user message of tool results has role tool."""
    role = ROLES.get(str(item.get("role", item.get("type"))), "other")
    parts = listed(item.get("content"))
    check_limit("parts of a turn", len(parts))
    types = {str(members(part).get("type")) for part in parts}
    if role == "user" and types == {"tool_result"}:
        role = "tool"
    key = "output" if "output" in item and "content" not in item else "content"
    return Turn(role, item, key, item)


def view_of(body: Any, dialect: Dialect) -> View:
    """The view of a parsed body. Raises Unreadable for an unknown shape."""
    body = members(body)
    items, beside = body.get(dialect.turns), dialect.system and body.get(dialect.system)
    head = [Turn("system", body, dialect.system, None)] if beside else []
    prompt = isinstance(items, list) and dialect.turns == "prompt"
    if prompt or (isinstance(items, str) and dialect.turns != "messages"):
        turns = [Turn("user", body, dialect.turns, None)]
    elif isinstance(items, list) and all(isinstance(item, dict) for item in items):
        turns = [turn_of(item) for item in items]
    else:
        raise Unreadable("unknown shape")
    if not all(turn.slots() for turn in head):
        raise Unreadable("unknown shape")
    return View(body, dialect, head, turns)


def goes_on_elsewhere(view: View) -> bool:
    """Whether the server holds a part of the prompt."""
    if view.dialect.name != "responses":
        return False
    stored = view.body.get("previous_response_id") or view.body.get("conversation")
    types = [members(turn.item).get("type") for turn in view.turns]
    return bool(stored or "item_reference" in types)


class Unreadable(ValueError):
    """Why a body is forwarded as it came."""


def _pairs(pairs: list[tuple[str, Any]]) -> Json:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("duplicate keys")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("a number that is not finite")
    return number


_strict = json.JSONDecoder(object_pairs_hook=_pairs, parse_float=_finite, parse_constant=_finite)
_compact_json = json.JSONEncoder(separators=(",", ":")).encode
_sorted_json = json.JSONEncoder(sort_keys=True).encode
PARSE_LIMIT = 32 << 20  # bytes
HOLE = uuid.uuid4().hex  # stands for a body's turns
LIST_START = rb'"%s":\s*\[\s*'
ITEM_END = re.compile(rb"[ \t\r\n]*(?:(,)[ \t\r\n]*|\])")


def parse(raw: bytes | bytearray) -> Json:
    """A JSON object. Raises Unreadable if it could not be written again as it means."""
    if len(raw) > PARSE_LIMIT:
        raise Unreadable("longer than 32 MB")
    try:
        body = _strict.decode(raw.decode())
    except UNPARSED as error:
        raise Unreadable(f"not readable as JSON ({error})") from None
    if not isinstance(body, dict):
        raise Unreadable("not a JSON object")
    return body


def dump(body: Any) -> bytes:
    """Compact JSON. ASCII escapes are faster than UTF-8 and keep lone surrogates."""
    return _compact_json(body).encode("ascii")


def bare(part: Json) -> Json:
    """Without what llama-server does not read."""
    return {key: value for key, value in part.items() if key != "cache_control"}


class Reader:
    """Reads bodies, and remembers turns: each request brings its history again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # bytes that the turns may take
        self.beside: tuple[bytes, Json] = b"", {}  # what stood beside the last turns
        self.forget()

    def forget(self) -> None:
        self.size = 0
        self.known: dict[bytes, Turn] = {}  # by their first 160 bytes
        self.followers: dict[Turn | None, tuple[bytes, Turn]] = {}  # by the turn in front

    def view(self, raw: bytes | bytearray, dialect: Dialect) -> View:
        """The view of a body. Raises Unreadable."""
        with suppress(*UNPARSED):  # then it is parsed as a whole
            return self.read(bytes(raw), dialect)
        return view_of(parse(raw), dialect)

    def read(self, raw: bytes, dialect: Dialect) -> View:
        """Turn by turn. Raises ValueError where that is not possible."""
        key, turns, before = dialect.turns, list[Turn](), None
        start = re.search(LIST_START % key.encode(), raw)
        if start is None or not dialect.edited or len(raw) > PARSE_LIMIT:
            raise ValueError
        at = start.end()
        while True:
            while follower := self.followers.get(before):
                comma, turn = follower
                expected = turn.json() + comma
                if not raw.startswith(expected, at):
                    break
                turns.append(turn)
                before, at = turn, at + len(expected)
            turn = self.turn_at(raw, at)
            turns.append(turn)
            border = ITEM_END.match(raw, at + len(turn.json()))
            if border is None or len(turns) > LIMITS["turns"]:
                raise ValueError
            at = border.end()
            if not border[1]:
                break
            self.followers[before] = border[0], turn
            before = turn
        rest = raw[: start.end()] + dump(HOLE) + raw[at - 1 :]
        known, body = self.beside
        if known != rest:
            body = parse(rest)
            self.beside = rest, body
        if body.get(key) != [HOLE]:  # another object's list
            raise ValueError
        view = view_of({**body, key: []}, dialect)
        view.turns = turns
        return view

    def turn_at(self, raw: bytes, at: int) -> Turn:
        """The turn that begins at a place. Raises ValueError."""
        start = raw[at : at + 160]
        known = self.known.get(start)
        if known and raw.startswith(known.json(), at):
            return known
        if not start.startswith(b"{"):
            raise ValueError
        for size in (1 << 13, 1 << 17, 1 << 21, PARSE_LIMIT):  # most are short
            text, _ = codecs.utf_8_decode(raw[at : at + size], "strict", False)
            with suppress(ValueError):
                parsed, end = _strict.raw_decode(text)
                break
        else:
            raise ValueError
        turn = turn_of(parsed)
        turn.raw = text[:end].encode()
        cost = 2000 + 2 * len(turn.raw) + sys.getsizeof(text[:end])  # bytes, roughly
        if turn.role == "system":
            cost *= 2  # Turn.stripped is as long
        if cost > self.limit:
            raise ValueError
        if self.size + cost > self.limit:  # a full memory starts anew
            self.forget()
        self.size += cost
        self.known[start] = turn
        return turn


@dataclass
class Report:
    """What was done to a request; `note` says why it was left alone."""

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
        counts = {**vars(self), "items": 0, "items_modified": 0, "note": 0}
        return sum(counts.values())


# ====== Scrub: take out what never helps the model ======

LIMITS = {"turns": 8000, "parts of a turn": 500, "tools": 2000, "decorations of a text": 256}
LONG_PROMPT = 2000  # characters: less is read again in no time
Span = tuple[int, int]  # start and end


def check_limit(what: str, count: int) -> None:
    """Raise Unreadable for more than any agent sends."""
    if count > LIMITS[what]:
        raise Unreadable(f"too many {what}")


def without(text: str, spans: list[Span]) -> str:
    """A text without parts of it, which may overlap."""
    kept, at = [], 0
    for start, end in sorted(spans):
        kept.append(text[at:start])
        at = max(at, end)
    return "".join([*kept, text[at:]])


_ZONED = r"(?: [A-Z]{2,5}(?:[+-]\d{1,2}(?::\d\d)?)?|Z)"
_CHANNEL = (  # "[Meeting Thu 2026-05-07 ..." is a person's words
    r"(?:BlueBubbles|Discord|Feishu|Google ?Chat|IRC|LINE|Matrix|Mattermost|MSTeams|Teams"
    r"|Nextcloud Talk|Nostr|Signal|Slack|Telegram|Tlon|Twitch|WebChat|WhatsApp|Zalo|iMessage)"
)
_DAYTIME = r"[A-Z][a-z]{2} \d{4}-\d\d-\d\d[ T][\d:]{5,8}"
_STAMP = rf"\[(?:{_CHANNEL}(?: [^\]\n]{{1,120}})? )?{_DAYTIME}{_ZONED}\](?: |(?=\n)|\Z)"
_TRUST = r"(?: \((?:un)?trusted[^)\n]{0,100}\):|: \u27e6openclaw:ctx\u27e7)"
_CONTEXT = r"(?:Conversation|Untrusted) context \((?:untrusted|metadata)[^\n]*\):\n(?=[^\n])"
_INNER_END = "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
LEADS = (  # in front of a user text: kind, beginning, end
    ("stamp", _STAMP, ""),
    ("block", rf"[A-Z][^\n:()\[\]]{{1,80}}{_TRUST} ?\n```(?:json)?\n", r"\n```(?=\n|\Z)"),
    ("context", _CONTEXT, r"\n(?:\n|\Z)"),
    ("current", r"Current message:\n(?:\[Replying to: [^\n]*\]\n)?#[^\s:]+ [^\n:]{1,120}: ", ""),
    ("event", r"System: \[\d{4}-\d\d-\d\d [^\n]*(?:\n+System: [^\n]*)*", ""),
    ("runtime", "OpenClaw runtime context for the ", rf"{_INNER_END}|\Z"),
    ("internal", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", _INNER_END),
    ("reminder", "<system-reminder>", "</system-reminder>"),
    ("reply", r"\[Replying to ", r"\[/Replying\]"),
    ("line", r"(?:\[(?:media attached|from|Forwarded from)\b[^\]\n]*\]|Delivery: .*)(?=\n|\Z)", ""),
    ("environment", "<environment_(?:context|details)>", "</environment_(?:context|details)>"),
)
LEAD = re.compile("|".join(f"({opening})" for _, opening, _ in LEADS))
TAILS = (  # behind it
    ("reminder", "<system-reminder>", "</system-reminder>"),
    ("environment", "<environment_details>", "</environment_details>"),
    ("line", "\n", ""),
)
OPENCLAW = re.compile(  # what only its system prompt says
    r'(?m)"openclaw\.inbound_meta\.|^Runtime: agent=|^<!-- /?openclaw:'
    r"|running inside (?:OpenClaw|Clawdbot|Moltbot)\b"
)
PASTED = re.compile(rf"(?:[^\n]*\n)?{_STAMP}")  # behind a stamp: a person pasted a log
TAIL_LINE = re.compile(r"\[(?:message_id|media attached): [^\]\n]*\]\Z|Runtime: agent=.* \| ")


def lead(text: str) -> tuple[list[Decoration], int]:
    """The decorations (kind, text) at the start of a user text, and where they end."""
    found: list[Decoration] = []
    at = len(text) - len(text.lstrip())
    while opening := LEAD.match(text, at):
        kind, _, ending = LEADS[(opening.lastindex or 1) - 1]
        closing = re.compile(rf"(?:{ending})\n*").search(text, opening.end())
        if closing is None or (kind == "stamp" and kind in dict(found)):
            break  # the person typed a second stamp
        found.append((kind, text[at : closing.end()].strip()))
        check_limit("decorations of a text", len(found))
        at = closing.end()
    return found, at if found else 0


def member(name: str) -> re.Pattern[str]:
    """A member of a JSON object, and one comma; its value is plain or an object of such values."""
    string = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    value = rf'{string}|[\w.+-]+|\{{(?:[^{{}}"]*{string})*[^{{}}"]*\}}'
    whole = rf'"(?:{name})"\s*:\s*(?:{value})'
    return re.compile(rf",\s*{whole}|(?<!\\){whole}(?:\s*,\s*)?")


IDS = member("(?:message|reply_to)_id(?:_full)?")
INBOUND = re.compile(r'```(?:json)?\n\{[^{}`]*"schema"\s*:\s*"openclaw\.inbound_meta\.[^`]*')
BILLING = re.compile(r"\Ax-anthropic-billing-header: [^\n]*\n*")


def inbound_members(text: str, pattern: re.Pattern[str]) -> list[Span]:
    blocks = INBOUND.finditer(text) if '"openclaw.inbound_meta.' in text else ()
    return [one.span() for block in blocks for one in pattern.finditer(text, *block.span())]


class Scrubber:
    def __init__(self, config: Config) -> None:
        self.billing, self.ids = config.strip_billing, config.strip_message_ids
        stamps = config.strip_timestamps
        self.stamps = stamps == "1" or (stamps == "auto" and not config.replay)
        self.patterns = [re.compile(pattern) for pattern in config.strip_regex]

    def apply(self, view: View, report: Report) -> None:
        """Edit a view, in place. Raises Unreadable."""
        report.items = len(view.turns)
        check_limit("turns", report.items)
        check_limit("tools", len(listed(view.body.get("tools"))))
        stamps = self.stamps and any(map(OPENCLAW.search, view.system_texts()))
        users, at = self.patterns or self.ids == "1" or stamps, 0
        for turn in view.head + view.turns:
            if turn.role != "system" and not (turn.role == "user" and users):
                continue
            found = turn.stripped
            if found is None or found[0] is not self:
                found = self, *self.stripped(turn, stamps)
                turn.stripped = found if turn.item and turn.role == "system" else None
            _, edited, counts = found
            if edited is not None:
                for name, count in vars(counts).items():
                    setattr(report, name, getattr(report, name) + count)
                at = put_back(view, turn, edited, at)

    def stripped(self, turn: Turn, stamps: bool) -> tuple[Turn | None, Report]:
        """A turn without what the rules take out, None if that is nothing, and what it was."""
        texts, counts = [slot.get() for slot in turn.slots()], Report(items_modified=1)
        stripped = self.strip(turn.role, texts, stamps, counts)
        if stripped == texts:
            return None, counts
        edited = turn.own()
        for slot, text in zip(edited.slots(), stripped, strict=True):
            slot.set(text)
        return edited, counts

    def strip(self, role: str, texts: list[str], stamps: bool, report: Report) -> list[str]:
        """The texts of a turn without what the rules take out."""
        stripped, decorated = list[str](), True  # what follows a person's words was pasted
        for text in texts:
            if role == "system":
                text, headers = BILLING.subn("", text) if self.billing else (text, 0)
                ids = inbound_members(text, IDS) if self.ids != "0" else []
                report.billing_removed += headers
                report.msg_ids_removed += len(ids)
                text = without(text, ids)
            elif decorated:
                text, decorated = self.strip_decorations(text, stamps, report)
            for pattern in self.patterns:
                whole, text = text, pattern.sub("", text)
                report.regex_removed += text != whole
            stripped.append(text)
        return stripped

    def strip_decorations(self, text: str, stamps: bool, report: Report) -> tuple[str, bool]:
        """A user text without ids and stamp in front of its words, and whether it has no words."""
        spans, at = list[Span](), 0
        leads, end = lead(text)
        for kind, block in leads:
            start = text.index(block, at)
            at = start + len(block)
            if kind == "block" and self.ids == "1":
                ids = [one.span() for one in IDS.finditer(text, start, at)]
                report.msg_ids_removed += len(ids)
                spans += ids
            elif kind == "stamp" and stamps:
                at += text[at : at + 1] == " "
                if not PASTED.match(text, at):
                    report.ts_removed += 1
                    spans.append((start, at))
        return without(text, spans), not text[end:].strip()


def remember(memo: dict[Any, Any], key: Any, value: Any, most: int = 4096) -> None:
    """Keep a result; a full memo starts anew."""
    if len(memo) >= most:
        memo.clear()
    memo[key] = value


def put_back(view: View, turn: Turn, edited: Turn, at: int = 0) -> int:
    """Put an edited turn in its place, from `at` on, and return that; a system message without
    empty texts."""
    content = edited.holder.get(edited.key)
    parts = listed(content) or [content]
    said = [str(members(part).get("text", part)).strip() for part in parts]
    kept = [part for part, text in zip(parts, said, strict=True) if text or turn.role == "user"]
    if kept and parts is content:
        edited.holder[edited.key] = kept
    if turn.item is not None:
        at = view.turns.index(turn, at)
        view.turns[at : at + 1] = [edited] if kept or len(view.turns) == 1 else []
    elif not kept:
        view.head = []
        del view.body[turn.key]
    return at


def reminder(text: str) -> str:
    escaped = text.strip().replace("</system-reminder", "&lt;/system-reminder")
    return f"<system-reminder>\n{escaped}\n</system-reminder>"


def pays(view: View) -> bool:
    """Whether its front is long enough to care for."""
    return bool(view.body.get("tools")) or sum(map(len, view.system_texts())) >= LONG_PROMPT


def system_first(view: View, report: Report) -> None:
    """One system text, at the front: templates such as Qwen's refuse others. What may be said for
    one turn only becomes a reminder in the user turn beside it, or behind a call's results."""
    systems = [turn for turn in view.turns if turn.role == "system"]
    if not systems or (systems == view.turns[:1] and not view.head):
        return
    for turn in view.head + systems:
        if (turn.item or {}).get("name") or other_content(turn) or not turn.slots():
            return  # an example, or an unknown shape
    front, kept, waiting = for_the_front(view), list[Turn](), list[Turn]()
    staying = Counter(front)  # equal messages are one turn
    report.system_moved += len(systems) - (view.turns[0].role == "system" and not view.head)
    for turn in view.turns:
        if turn.role == "system":
            staying[turn] -= 1
            waiting += [turn] if staying[turn] < 0 else []
            continue
        result = turn.role == "tool" and kept and kept[-1].role in ("assistant", "tool")
        if waiting and not result:
            turn = turn.own()
            remind(waiting, kept, turn)
            waiting = []
        kept.append(turn)
    if waiting:
        remind(waiting, kept)
    if front:
        first = front[0].own()
        last = first.slots()[-1]
        last.set("\n\n".join([last.get(), *[turn.text() for turn in front[1:]]]))
        if not view.head:
            kept.insert(0, first)
    view.turns = kept


def for_the_front(view: View) -> list[Turn]:
    """The turns that make the system text: leading ones, no short ones behind a long prompt, and
    the first later one if it is known to stay and no answer came before."""
    front, later = view.system(), view.turns[view.leading() :]
    if pays(view):
        front[1:] = [turn for turn in front[1:] if len(turn.text()) >= LONG_PROMPT or stays(turn)]
    said = [turn for turn in later if turn.role in ("system", "assistant", "tool")]
    return front + [turn for turn in said[:1] if stays(turn)]


def stays(turn: Turn) -> bool:
    """Whether it is known to stay: Claude Code's second system message."""
    return turn.role == "system" and turn.text().startswith("# Environment\n")


def remind(systems: list[Turn], before: list[Turn], turn: Turn | None = None) -> None:
    """Say what system messages say in the user turn behind or before them, or in a new one."""
    text = "\n\n".join([reminder(one.text()) for one in systems])
    if turn and turn.role == "user" and turn.slots():
        slot = turn.slots()[0]
        slot.set(f"{text}\n\n{slot.get()}")
    elif before and before[-1].role == "user" and before[-1].slots():
        before[-1] = before[-1].own()
        slot = before[-1].slots()[-1]
        slot.set(f"{slot.get()}\n\n{text}")
    else:
        before.append(turn_of({**(systems[-1].item or {}), "role": "user", "content": text}))


def scrub(
    payload: Json, config: Config | None = None, dialect: str | None = None
) -> tuple[Json, Report]:
    """A scrubbed copy of a request body, and what was removed; `report.note` says why it is equal.
    `dialect`: chat, responses, messages or completions; without it the body's shape decides."""
    config, report, keys = config or Config(), Report(), members(payload)
    rows = {row.name: row for row in DIALECTS.values()}
    if dialect is None and "messages" in keys:
        dialect = "messages" if "system" in keys else "chat"
    elif dialect is None:
        dialect = "responses" if "input" in keys else "completions"
    if dialect not in rows:
        raise ValueError(f"dialect={dialect!r}: must be one of {', '.join(rows)}")
    try:
        view = view_of(copy.deepcopy(payload), rows[dialect])
        if config.scrub and view.dialect.edited:
            Scrubber(config).apply(view, report)
            if config.system_first:
                system_first(view, report)
        return json.loads(view.dump()), report
    except (RecursionError, Unreadable) as error:
        return payload, Report(note=str(error))


# ====== Lift: what varies in the system prompt moves to the newest user turn ======

Piece = tuple[list[Span], str]  # where it stands, and what it says


class Lift(NamedTuple):
    """What varies in system prompts; a piece counts alone, outside of fences or filling one."""

    label: str  # whose it is, and what
    find: Callable[[str], Iterable[Piece]]
    fenced: bool = False  # counts in fences as well


# 2026-12-01; 12/1/2026; Tue Dec 01 2026; Tuesday, December 1, 2026
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
_FILE = r"(?:\(?clean\)?(?=\n|\Z)|(?:[MADRCTU?!][ MADRCTU?!]?| [MADRCTU?!]) [^\n]+)"
_GIT = (
    r"(?:(?:- )?Current branch: [^\n]*|- Branch: [^\n]*|(?:- )?Main branch [^\n]*"
    rf"|Git user: [^\n]*|(?:- )?(?:Git )?[Ss]tatus: ?[^\n]*(?:\n{_FILE})*"
    r"|(?:- )?Recent commits:(?:\n {0,4}[0-9a-f]{7,40} [^\n]*)+)"
)


def lines(label: str, pattern: str, *markers: str) -> Lift:
    compiled = re.compile(rf"(?m)^(?:{pattern})[ \t]*(?:\n|\Z)")

    def find(text: str) -> Iterator[Piece]:
        if all(marker in text for marker in markers):
            for match in compiled.finditer(text):
                if all(marker in match[0] for marker in markers):
                    yield [match.span()], match[0].strip()

    return Lift(label, find)


def inbound_member(name: str) -> Lift:
    pattern = member(name)

    def find(text: str) -> Iterator[Piece]:
        for span in inbound_members(text, pattern):
            yield [span], text[slice(*span)].strip(" \t\r\n,")

    return Lift(f"OpenClaw: {name}", find, fenced=True)


LIFTS = (
    lines("OpenClaw: runtime", r"Runtime: agent=[^\n]* \| sessionId=[0-9a-f-]{36}[^\n]*",
          "| sessionId="),
    lines("OpenClaw: sessions",
          r"## \w+ Sessions\n(?=[^\n]*\bsessions_list\b)[^\n]+(?:\n- agent:[^\n]*)+",
          " Sessions\n"),
    inbound_member("sender_id"),
    inbound_member("flags"),
    lines("Claude Code: git status",
          rf"gitStatus: [^\n]*(?:\n+(?:Status: ?[^\n]*(?:\n[^\n<`~][^\n]*)*|{_GIT}))*",
          "gitStatus: "),
    lines("Claude Code, opencode: Today's date",
          rf"[ \t]*(?:Current time is {_HOURS}\. )?Today's date(?: is|:) {_DATE}\.?"
          r"(?: \([A-Z][a-z]+\)\.?)?", "Today's date"),
    lines("Qwen Code: git status", r"git: Current branch: [^\n]*(?:\ngit: [^\n]*)*",
          "Current branch: "),
    lines("Continue: git status",
          r'<context \w+="gitStatus">[^<]*(?:<(?!/?context)[^<]*)*</context>', "gitStatus"),
    lines("Vibe, hermes: git status", rf"{_GIT}(?:\n+{_GIT})*", "Recent commits:"),
    lines("Crush: git status", rf"{_GIT}(?:\n+{_GIT})*", "Current branch: ", "tatus:"),
    lines("Copilot CLI: session", rf"Session \w+: [^\n]*/{_UUID}", "Session "),
    *(
        lines(f"OpenClaw, Open WebUI: Current {name}",
              rf"(?:The )?[Cc]urrent {name}(?: is|:) {_MOMENT}", f"urrent {name}")
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
        if found := "".join([text[start:end] for start, end in spans]).strip():
            yield spans, found

    return Lift(f"LIFT_REGEX: {pattern}", find, fenced=True)


FENCE = re.compile(r"(?m)^[ \t]*(?:`{3,}(?![^\n]*`)|~{3,})")


def fenced(text: str, spans: list[Span], said: str) -> bool:
    """Whether a piece stands in a fence together with other text."""
    span = spans[0]
    before = list(FENCE.finditer(text, 0, span[0]))
    if len(before) % 2 == 0:
        return False
    start = text.find("\n", before[-1].end())
    end = FENCE.search(text, span[1])
    return text[start : end.start() if end else len(text)].strip() != said


Lifted = tuple[str, str]  # label of a row, text
Cut = tuple[str, list[Lifted]]


def lift_text(text: str, rows: Iterable[Lift]) -> Cut:
    """A system text without its volatile parts, and those."""
    found: list[Lifted] = []
    for row in rows:
        pieces = list(islice(row.find(text), 16))
        if not row.fenced:
            pieces = [piece for piece in pieces if not fenced(text, *piece)]
        if len(pieces) == 1:
            spans, said = pieces[0]
            found.append((row.label, said))
            text = without(text, spans)
    return text, found


SURE = re.compile(  # values that vary by themselves
    rf"{_CLOCK}|\b{_UUID}\b|\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{{7,64}}\b|\d{{6,}}"
    r"|\b(?=[a-z_]*[\dA-Z])(?=[A-Z_]*[\da-z])(?=[A-Za-z_]*\d)\w{12,}|\btmp\w{6,10}\b",
)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
LISTED = re.compile(  # a line of a tree, a list of files, git status, ls, git log
    r"[ \t|`+\u2502]*(?:[\u251c\u2514]|[|`+]-- )|\?\? \S+\Z"
    r"|(?:[MADRCTU!][ MADRCTU]?|[ ][MADRCTU]) \S*[./]\S*\Z|[-dl][rwx-]{9}"
    r"|(?=[a-f]*\d)[0-9a-f]{7,12} \S|[ \t]*(?:[-*] )?[\w./~-]{1,200}(?:\.[A-Za-z]\w{0,7}|/)\Z"
)
LEARNED = "learned: "  # begins the labels of what was learned
LEARNED_SHAPES = 64
LEARNED_LINE = 400  # a longer line says more than its value
LEARNED_BLOCK = 4096
LEARNED_TEXT = 1 << 18  # longer system texts are not compared


class Shape(NamedTuple):
    """What was seen to vary: a line of this form (values are `#`), or what is between two lines."""

    form: str = ""
    after: str = ""
    before: str = ""

    def name(self) -> str:
        place = f"block between {self.after!r} and {self.before!r}"
        return LEARNED + (self.form.strip() or place)

    def pattern(self) -> str:
        """A LIFT_REGEX for it."""
        if self.form:
            return ".+".join(map(re.escape, self.form.strip().split("#")))
        return rf"(?s)(?<={re.escape(self.after)}\n).*?(?=\n{re.escape(self.before)})"

    def row(self) -> Lift:
        return Lift(self.name(), self.line if self.form else self.block)

    def line(self, text: str) -> Iterator[Piece]:
        marker, at = max(self.form.split("#"), key=len), 0
        for line in text.split("\n"):
            start, at = at, at + len(line) + 1
            if marker in line and len(line) <= LEARNED_LINE and form_of(line) == self.form:
                yield [(start, at)], line.strip()

    def block(self, text: str) -> Iterator[Piece]:
        padded = f"\n{text}\n"
        start = padded.find(f"\n{self.after}\n") + len(self.after) + 1
        end = padded.find(f"\n{self.before}\n", start) if self.before else len(text)
        block = text[start:end].strip("\n")
        once = padded.count(f"\n{self.after}\n") == 1 and end - start <= LEARNED_BLOCK
        if once and end >= 0 and block.strip():
            heading = self.after.strip() if len(self.after) <= 120 else ""
            yield [(start, end)], f"{heading}\n{block}".strip("\n")


def lines_of(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


def form_of(text: str) -> str:
    """A text with # for each value that varies by itself, and for each number."""
    return NUMBER.sub("#", SURE.sub("#", text))


Change = tuple[int, int, list[str]]  # from and to which line, what stood there before


def changes(old: list[str], new: list[str]) -> Iterator[Change]:
    """Where lines differ from older ones, between lines that stand once in both."""
    counts, others = Counter(new), Counter(old)
    places = {line: at for at, line in enumerate(old) if others[line] == counts[line] == 1}
    left = right = -1  # the places of the last line that stays
    for at, place in enumerate([*[places.get(line, -1) for line in new], len(old)]):
        if place > left:
            if old[left + 1 : place] != new[right + 1 : at]:
                yield right + 1, at, old[left + 1 : place]
            left, right = place, at


class Learner:
    """Finds what varies in system prompts by comparing each with the closest before it."""

    def __init__(self, rows: tuple[Lift, ...]) -> None:
        self.table = self.rows = rows
        self.shapes: dict[Shape, None] = {}
        self.news: deque[Shape] = deque(maxlen=LEARNED_SHAPES)  # untold
        self.texts: deque[list[str]] = deque(maxlen=16)
        self.seen: dict[Shape, frozenset[int]] = {}  # the values that something had, hashed
        self.lock = Lock()

    def add(self, shapes: Iterable[Shape]) -> None:
        with self.lock:
            for shape in shapes:
                if len(self.shapes) < LEARNED_SHAPES and shape not in self.shapes:
                    self.shapes[shape] = None
                    self.news.append(shape)
            self.rows = self.table + tuple([shape.row() for shape in self.shapes])

    def read(self, rest: str) -> None:
        """Learn from a system text, after all lifts, and the closest before it."""
        mine = lines_of(rest)
        if len(rest) > LEARNED_TEXT or mine in self.texts:
            return
        own = set(mine)
        closest = max(list(self.texts), key=lambda lines: len(own.intersection(lines)), default=[])
        differing = list(changes(closest, mine))
        sizes = [500 + sum(map(len, gone + mine[at:end])) for at, end, gone in differing]
        if 2 * len(own.difference(closest)) <= len(mine) and sum(sizes) <= 4 * LEARNED_BLOCK:
            shapes = [shape for change in differing for shape in self.judge(mine, *change)]
            if found := [shape for shape in shapes if lift_text(rest, [shape.row()])[1]]:
                self.add(found)
                self.texts.clear()
                mine = lines_of(lift_text(rest, self.rows)[0])
        self.texts.append(mine)

    def judge(self, lines: list[str], at: int, end: int, gone: list[str]) -> list[Shape]:
        """What of a change varies; numbers and blocks only when they had three values."""
        new = lines[at:end]
        sure = any(map(LISTED.match, gone + new))
        if list(map(form_of, gone)) == list(map(form_of, new)):
            pairs = [pair for pair in zip(gone, new, strict=True) if pair[0] != pair[1]]
            sure = any(SURE.sub("#", old) == SURE.sub("#", now) for old, now in pairs)
            if all(re.search(r"[^\W\d_]{3}", form_of(now)) for _, now in pairs):
                found = [(Shape(form_of(now)), old, now) for old, now in pairs]
                return [one[0] for one in found if sure or self.varies(*one)]
        block = self.block_around(lines, at - 1, end)
        return [block] if block and (sure or self.varies(block, tuple(gone), tuple(new))) else []

    def varies(self, shape: Shape, old: object, new: object) -> bool:
        """Whether something had three values: two may be two modes."""
        values = self.seen.get(shape, frozenset()) | {hash(old), hash(new)}
        remember(self.seen, shape, values)
        return len(values) > 2

    def block_around(self, lines: list[str], start: int, end: int) -> Shape | None:
        """The block between two lines that stand once and list nothing."""
        counts = Counter(lines)
        while start >= 0 and (LISTED.match(lines[start]) or counts[lines[start]] > 1):
            start -= 1
        while end < len(lines) and (LISTED.match(lines[end]) or counts[lines[end]] > 1):
            end += 1
        size = sum(map(len, lines[start + 1 : end]))
        before = lines[end] if end < len(lines) else ""
        return Shape("", lines[start], before) if start >= 0 and size <= LEARNED_BLOCK else None


class Lifter:
    def __init__(self, config: Config) -> None:
        own = tuple(own_lift(pattern) for pattern in config.lift_regex)
        self.learner = Learner(LIFTS + own if config.lift else ())
        self.learns = config.lift and config.learn
        self.begun = Bounded(config.replay_mb << 18)  # rows, texts and cuts of conversations

    def cut(self, texts: list[str], conversation: int) -> list[Cut]:
        """The system texts, each cut: by the rows that the conversation began with, while they lead
        to what was sent before."""
        rows, before, cut = self.begun.get(conversation) or (self.learner.rows, [], [])
        if texts == before:
            return cut
        sent = [rest for rest, _ in cut]
        cut = [lift_text(text, rows) for text in texts]
        if self.learns and sent != [rest for rest, _ in cut]:
            for text in texts:
                self.learner.read(lift_text(text, self.learner.rows)[0])
            rows = self.learner.rows
            cut = [lift_text(text, rows) for text in texts]
        self.begun.put(conversation, (rows, texts, cut), 2 * sum(map(sys.getsizeof, texts)))
        return cut

    def lift(self, view: View, conversation: int) -> Texts:
        """Cut volatile texts out of the system prompt, where it pays, and return them."""
        if not pays(view):
            return {}
        turns = [turn for turn in view.system() if turn.slots()]
        texts = [slot.get() for turn in turns for slot in turn.slots()]
        cut = iter(self.cut(texts, conversation))
        found: Texts = {}
        for turn in turns:
            count, own = len(found), turn.own()
            for slot, (text, pieces) in zip(own.slots(), cut, strict=False):
                if found.keys().isdisjoint([label for label, _ in pieces]):
                    slot.set(text)  # else another part has such a line
                    found.update(pieces)
            if len(found) > count:
                put_back(view, turn, own)
        return found


# ====== Replay: history is sent again as it was sent ======

# Of each line of requests the last one is recorded. A request that goes on from it has its units
# restored up to the first that its client really changed. Then what was lifted is set down.

# Carriers, messages of decorations only, have these. A person may have typed the others alone.
CARRIED = {"block", "context", "event", "runtime", "internal", "reminder", "environment",
           "yours", "tagged"}  # fmt: skip
MOVED = {"runtime", "internal", "context"}  # carriers that OpenClaw moves to the end
SPEAKERS = {"block", "context", "current", "reply", "line"}  # they tell who speaks
REWRITABLE = {"reminder", "environment"}  # what a client may rewrite in its first message
REWRITTEN = "first "  # begins the labels of those
PERSONAL = {"OpenClaw: sender_id", "OpenClaw: flags"}  # of the newest message
SLACK = 16000  # bytes that restored text may add to a prompt, beside as many as came
SAME_PLACE = 64  # lines at one place in a history
MOST_PLACES = 1 << 14
MOST_COMPARED = 256  # held against a request
LONG_ANSWER = 32  # letters by which an answer is known

Decoration = tuple[str, str]  # kind, text


def undress(text: str) -> tuple[list[Decoration], str]:
    """The decorations at both ends of a user text, and what stands between them."""
    found, start = lead(text)
    words = text[start:].rstrip()
    while words:
        kind, opening, _ = next(row for row in TAILS if words.endswith(row[2]))
        at = words.rfind(opening) + (kind == "line")
        stands = at > 0 and words[at - 1] == "\n"
        if not stands or (kind == "line" and not TAIL_LINE.match(words, at)):
            break
        found.append((kind, words[at:]))
        check_limit("decorations of a text", len(found))
        words = words[:at].rstrip()
    return found, words


PROGRAM_BLOCK = 8192  # characters, at most
_BODY = rf"(?s:.{{0,{PROGRAM_BLOCK}}}?)"
_TIMED = rf"(?=[^\n]{{0,120}}?(?:{_CLOCK}))"
_NAMED = r"[A-Z][\w .,&/()-]{1,40}: "
PROGRAM = re.compile("|".join((
    rf"<(?P<tag>[A-Za-z][\w.:-]{{1,60}})(?: [^<>\n]{{0,200}})?>{_BODY}</(?P=tag)>",
    rf"[^\n`{{}}]{{1,200}}:\n```(?:json)?\n(?=[\[{{]){_BODY}\n```",  # labelled JSON
    rf"{_NAMED}{_TIMED}[^\n]{{1,200}}(?:\n{_NAMED}[^\n]{{1,200}}){{0,19}}(?=\n\n|\Z)",
    rf"\[{_TIMED}[^\[\]\n]{{1,120}}\](?=[ \n]|\Z)",
    r"\[[^\[\]\n]{2,200}\](?:\n[^\n]{1,400}){1,20}(?=\n\n|\Z)",
)))  # fmt: skip
TAIL_START = re.compile(r"\n(?:\n|(?=<[A-Za-z]|\[|[^\n`{}]{1,200}:\n```))")


def program_block(text: str) -> re.Match[str] | None:
    """What a program may have written at either end of a text."""
    starts = [found.end() for found in TAIL_START.finditer(text, max(0, len(text) - PROGRAM_BLOCK))]
    blocks = [PROGRAM.match(text), *(PROGRAM.fullmatch(text, at) for at in starts[:-9:-1])]
    return next(filter(None, blocks), None)


def strip_programs(text: str) -> tuple[list[Decoration], str]:
    found: list[Decoration] = []
    while len(found) < 8 and (block := program_block(words := text.strip())):
        tagged = block["tag"] and not block["tag"].isalnum()  # hardly a person's
        found.append(("tagged" if tagged else "program", block[0].strip()))
        more, text = undress(words[: block.start()] + words[block.end() :])
        found += more
    return found, text


def digest(*parts: str | bytes) -> bytes:
    texts = [one.encode("utf-8", "surrogatepass") if isinstance(one, str) else one for one in parts]
    return hashlib.blake2b(b"\0".join(texts), digest_size=12).digest()


class Said(NamedTuple):
    words: bytes = b""  # without decorations, reasoning, and the spelling of ids
    whole: bytes = b""
    blocks: tuple[Decoration, ...] = ()
    carrier: bool = False  # nothing but decorations
    speaks: bool = False  # somebody's words, before which lifted text can be set down
    calls: tuple[Call, ...] = ()


SILENT = Said()


def together(role: str, said: list[Said]) -> Said:
    """What some turns say as one unit; the results of a batch say the same in any order."""
    words = [one.words for one in said if one.words]
    words = sorted(words) if role == "tool" else words
    both = digest(*words) if len(words) > 1 else b"".join(words)
    whole = digest(*[one.whole for one in said])
    blocks = tuple([block for one in said for block in one.blocks])
    calls = tuple([call for one in said for call in one.calls])
    return Said(both, whole, blocks, False, any(one.speaks for one in said), calls)


class Unit:
    """A user turn, an answer (the assistant's turns in a row) or a batch of tool results, and the
    carriers behind it. A request's first unit has nothing but carriers."""

    stored: Unit | None = None  # as it was sent before
    inserted: Mapping[str, str] = {}  # what was set down in it, by label
    dropped = False  # a carrier of it is not sent
    kept: list[Turn] | None = None  # as sent, but for fixed() turns
    heard = False  # an answer that the server was heard to give here
    private = False  # what was sent says more than what came
    form = 0  # see Record
    spoken: tuple[str, frozenset[str]] | None = None  # while its request is edited

    def __init__(self, role: str, turns: list[Turn]) -> None:
        self.role, self.turns = role, turns
        said = [turn.said or SILENT for turn in turns]
        says = said[0] if len(said) == 1 else together(role, said)
        if role == "user" and says.carrier:  # alone, it is what was answered
            says = Said(says.whole, says.whole, speaks=True)
        self.words, self.whole, self.blocks, _, self.speaks, self.calls = says
        self.came = self.blocks  # as the client had them last; so is `whole`

    def fixed(self) -> int:
        """How many of its turns are never restored: answers and results."""
        item = self.turns[0].item if self.turns else None
        if self.role == "user" or members(item).get("role") == "user":  # as in /v1/messages
            return 0
        return sum(1 for turn in self.turns if not (turn.said and turn.said.carrier))

    def sent(self) -> object:
        return tuple([turn.json() for turn in self.kept or ()]), self.calls


class History:
    """The units of a request, and places among them; 0: there is none."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = units
        self.answers = [at for at, unit in enumerate(units) if unit.role == "assistant"]
        self.last = max(self.answers, default=0)
        self.first = next((unit for unit in units if unit.role == "user"), units[0])
        self.opening = self.first.words or self.first.whole
        self.target = max([at for at, unit in enumerate(units) if unit.speaks], default=0)
        # What is behind the answer that precedes the newest words is new.
        self.newest = max([at for at in self.answers if at < self.target], default=0)
        behind = units[self.last :] if self.last else []
        self.moved = MOVED & {kind for unit in behind for kind, _ in unit.blocks}


class Heard(NamedTuple):
    opening: str = ""  # its letters
    closing: str = ""
    calls: frozenset[str] = frozenset()  # their ids
    complete: bool = False  # the opening is all of it


UNREAD = Heard()
ANY = Heard("*")  # in a capture: what the client says next was the answer


@dataclass(slots=True, eq=False)
class Record:
    """A request as it was forwarded, and the answer to it."""

    conversation: str
    newest: int  # place of the answer before the newest user turn
    line: int  # the number of its line of requests
    units: list[Unit] = field(default_factory=list)
    answer: Heard | None = None  # none yet, or an error
    tap: Tap | None = None  # what was relayed of an answer on its way
    place: int = 0  # where it ends, if its line begins with it
    form: int = 0  # a hash of all that is restored
    shared: bool = False  # by several conversations

    def heard(self) -> Heard | None:
        tap = self.tap
        if tap is None:
            return self.answer
        size, heard = tap.heard
        if size != len(tap.data) or tap.cut:
            size, heard = len(tap.data), heard_answer(answer_events(*tap.windows()))
            tap.heard = size, heard
        return heard


class Bounded:
    """Values of so many bytes by their keys; the least recently used go first."""

    def __init__(self, limit: int) -> None:
        self.lock = Lock()
        self.limit, self.size = limit, 0
        self.values = OrderedDict[int, tuple[Any, int]]()

    def get(self, key: int) -> Any:
        try:  # without the lock, for which many threads would wait
            self.values.move_to_end(key)
            return self.values[key][0]
        except KeyError:
            return None

    def drop(self, key: int) -> None:
        self.put(key, None, 100)  # else it seems forgotten

    def put(self, key: int, value: Any, size: int) -> None:
        with self.lock:
            gone = [self.values.pop(key, (None, 0))]  # is freed without the lock
            if size <= self.limit >> 1:
                self.values[key] = value, size
                self.size += size
            self.size -= gone[0][1]
            while self.size > self.limit:
                gone.append(self.values.popitem(last=False)[1])
                self.size -= gone[-1][1]


class Asker(NamedTuple):
    """Whose request it is, its bytes, and whether it is learned from."""

    client: bytes = b""
    size: int = 1 << 62
    learn: bool = True


ANYBODY = Asker()


@dataclass
class Trace:
    conversation: str = ""
    record: Record | None = None
    whose: int = 0  # a hash of the client and the dialect
    opening: bytes = b""  # a digest of the first user's words

    def key(self, words: str, calls: frozenset[str]) -> int:
        """An answer, with the first question if it is short, tells its conversation."""
        opening = b"" if len(words) >= LONG_ANSWER else self.opening
        return hash((self.whose, opening, words, calls))


class Replay:
    def __init__(self, config: Config) -> None:
        self.lines = Bounded(config.replay_mb << 20)
        self.by_place: dict[int, list[int]] = {}  # lines whose requests ended there
        self.numbers = count()
        self.tools = Tools(config.replay_mb << 17)
        self.patterns = [re.compile(pattern) for pattern in config.replay_regex]
        self.learns = config.learn
        self.names: dict[int, str] = {}  # conversations by their answers

    def said(self, turn: Turn) -> Said:
        if turn.said is None:
            turn.said = SILENT if turn.role == "reasoning" else self.read(turn)
        return turn.said

    def read(self, turn: Turn) -> Said:
        item, told = turn.item or {}, turn.text().strip()
        named, others = call_fields(item), other_content(turn)
        calls = tuple([one.call() for one in named])
        beside = sorted([f"{plain(one.call()[0])} {one.said}" for one in named]) + others
        whole = digest(turn.role, told, *beside)
        if item and item.get("role") != "user":
            return Said(whole, whole, calls=calls)
        undressed = [self.undress(slot.get()) for slot in turn.slots()]
        blocks = [block for found, _ in undressed for block in found]
        words = "\n".join([words for _, words in undressed if words])
        alone = bool(told) and not words and not beside
        carrier = alone and bool(item) and any(kind in CARRIED for kind, _ in blocks)
        if alone and not carrier:  # a person may have typed it
            words, blocks = told, []
        said = digest("user", words, *beside) if words or beside else b""
        speaks = bool(undressed and (words or others))
        return Said(said, whole, tuple(blocks), carrier, speaks, calls)

    def undress(self, text: str) -> tuple[list[Decoration], str]:
        """undress() that also finds what REPLAY_REGEX or programs wrote."""
        blocks, words = undress(text)
        for pattern in self.patterns:
            found = [("yours", match[0].strip()) for match in pattern.finditer(words) if match[0]]
            if found:
                more, words = undress(pattern.sub("", words).strip())
                blocks += found + more
        more, words = strip_programs(words) if self.learns else ([], words)
        return blocks + more, words.strip()

    def units(self, view: View) -> list[Unit]:
        groups: list[tuple[str, list[Turn]]] = [("head", [])]
        carriers: list[Turn] = []
        for turn in [*view.turns[view.leading() :], None]:
            if turn is not None and (turn.said or self.said(turn)).carrier:
                carriers.append(turn)
                continue
            role = "assistant" if turn is None or turn.role == "reasoning" else turn.role
            before, turns = groups[-1]
            if role == "assistant" and before in ("head", "assistant"):
                groups += [("user", [one]) for one in carriers]
            else:
                turns += carriers
            if turn is not None and (carriers or before != role or role == "user"):
                groups.append((role, [turn]))
            elif turn is not None:
                turns.append(turn)
            carriers = []
        return [Unit(*group) for group in groups]

    def conversation(self, view: View, opening: bytes = b"") -> str:
        """Its name, from the system prompt and the `opening`, the first user's words."""
        opening = opening or History(self.units(view)).opening
        return digest(view.dialect.name, *view.system_texts(), opening).hex()

    def settle(self, trace: Trace, record: Record, answer: Heard | None) -> None:
        """Note an answer, and whose it is, should the conversation's front be rewritten. Of equal
        requests with equal answers one is kept."""
        record.answer, record.tap = answer, None
        if answer and answer.complete:
            remember(self.names, trace.key(answer.opening, answer.calls), trace.conversation)
        same = record.form, None, answer
        with self.lines.lock:
            lines = self.by_place.get(record.place, [])
            held = [self.lines.values.get(line, (None,))[0] for line in lines]
            twins = [one for one in held if one and (one.form, one.tap, one.answer) == same]
            if record not in twins or len(twins) < 2:
                return
            twins.remove(record)
            twin = twins[0]
            twin.shared = True
            others = [line for line in lines if line not in (twin.line, record.line)]
            self.by_place[record.place] = [*others, twin.line]
            self.lines.get(twin.line)
        self.lines.drop(record.line)

    def apply(
        self, view: View, history: History, lifted: Texts, report: Report, asker: Asker
    ) -> Trace:
        units = history.units
        whose = hash((asker.client, view.dialect.name))
        place = hash((whose, *view.system_texts()))
        places = [place := hash((place, unit.words)) for unit in units]
        depth, known = self.find(history, places, asker.learn)
        added = 0
        for unit, stored in zip(units[:depth], known.units if known else [], strict=False):
            unit.stored = stored
            if stored.kept:
                added += size_of(stored.kept) - size_of(unit.turns[unit.fixed() :])
        if known and added > asker.size + SLACK:
            if asker.learn and not known.shared:
                self.lines.drop(known.line)
            depth, known = 0, None
        trace = Trace(whose=whose, opening=history.opening)
        first = units[history.answers[0]] if history.answers else Unit("", [])
        name = known.conversation if known else self.names.get(trace.key(*spoken(first)))
        trace.conversation = name or self.conversation(view, history.opening)
        report.tools_restored += self.tools.apply(view, asker)
        kept, pending = settle_insertions(history, depth, lifted)
        for at, unit in enumerate(units):
            if at >= kept:
                unit.stored = None  # it goes as it came
            elif (old := unit.stored) and (old.kept is not None or old.calls != unit.calls):
                report.replayed += restore(unit, old)
        report.lifted += len(lifted)
        if pending:
            insert_lifted(history, kept, pending)
        if history.moved:
            self.drop_moved(history, report)
        view.turns = view.turns[: view.leading()]
        for unit in units:
            view.turns += unit.turns
        if asker.learn:
            self.learn(trace, history, places, depth, known)
        return trace

    def find(self, history: History, places: list[int], learn: bool) -> tuple[int, Record | None]:
        """How many units may be restored, and from which record: as far as all that agree would
        send the same."""
        units, best, left = history.units, (0, 0), MOST_COMPARED
        found: list[tuple[tuple[int, int], Record]] = []
        for at in reversed(history.answers):
            if at <= best[0]:
                break
            edited = []
            lines = self.by_place.get(places[at - 1], [])[::-1]
            records = list(map(self.lines.values.get, lines))[:left]
            left -= len(records)
            known = [one[0] for one in records if one and one[0]]
            ranked = [(agreement(one, units[at], at), one) for one in known]
            for evidence, record in sorted(ranked, key=lambda one: -one[0]):
                if best == (at, 1) or best > (at, 1 + evidence):
                    break
                depth = reach_of(history, record, at, evidence)
                found.append(((depth, evidence if depth == at else 0), record))
                best = max(best, found[-1][0])
                if evidence == 2 and depth < at:
                    edited.append(record.line)
            for line in edited if best[0] < at and learn else ():
                self.lines.drop(line)  # the client has changed what it holds
            if best[0] == at and None in records:
                return 0, None  # what is gone may agree
        depth, evidence = best
        if not depth or evidence == 1:
            return 0, None
        record = next(record for reach, record in found if reach == best)
        rivals = [one for reach, one in found if reach in (best, (depth, 1)) and one is not record]
        for at, unit in enumerate(record.units[:depth] if rivals else ()):
            sent = unit.sent()
            if any(one.units[at].sent() != sent for one in rivals if one.units[at] is not unit):
                depth = at
                break
        while 0 < depth < len(units) and units[depth].role != "assistant" and units[depth].calls:
            depth -= 1  # results go with their calls
        return (depth, record) if depth else (0, None)

    def drop_moved(self, history: History, report: Report) -> None:
        standing: dict[str, bytes] = {}
        for at, unit in enumerate(history.units):
            for turn in list(unit.turns):
                said = self.said(turn)
                kind = said.blocks[0][0] if said.carrier else ""
                if kind in MOVED and at >= history.last and standing.get(kind) == said.whole:
                    unit.turns.remove(turn)
                    unit.dropped = True
                    report.dropped += 1
                standing[kind] = said.whole

    def learn(
        self, trace: Trace, history: History, places: list[int], depth: int, known: Record | None
    ) -> None:
        units = history.units
        if units[-1].role == "assistant":  # the client has begun the answer
            units = units[:-1]
        goes_on = known and self.lines.get(known.line) is known and depth == len(known.units)
        goes_on = goes_on and known and not known.shared
        line = known.line if known and goes_on else next(self.numbers)  # else it branches off
        record = trace.record = Record(trace.conversation, history.newest, line)
        form, place = hash((trace.conversation, history.newest)), places[len(units) - 1]
        record.place = 0 if goes_on else place
        size = 4000 + 400 * len(units)  # with an answer of usual length
        for at, unit in enumerate(units):
            sent = unit.stored or unit
            if sent is unit:
                unit.heard = known is not None and at <= depth and agreement(known, unit, at) == 2
                keep(unit)
            elif sent.whole != unit.whole:
                sent = copy.copy(sent)
                sent.whole, sent.came, sent.private = unit.whole, unit.blocks, True
                sent.form = hash((sent.form, unit.whole))
            form = hash((form, sent.form))
            record.units.append(sent)
            if sent.kept:
                size += 3 * size_of(sent.kept)
        record.form = form
        self.lines.put(line, record, size)
        with self.lines.lock:
            others = [one for one in self.by_place.pop(place, ()) if one != line]
            self.by_place[place] = [*others, line][-SAME_PLACE:]
            if len(self.by_place) > MOST_PLACES:
                del self.by_place[next(iter(self.by_place))]


def keep(unit: Unit) -> None:
    if unit.inserted or unit.dropped or unit.blocks:
        unit.kept = [storable(turn) for turn in unit.turns[unit.fixed() :]]
    unit.private = not PERSONAL.isdisjoint(unit.inserted)
    inserted = tuple(unit.inserted.items())
    unit.form = hash((unit.whole, unit.sent(), inserted, unit.dropped, unit.heard))
    unit.turns, unit.spoken = [], None


def storable(turn: Turn) -> Turn:
    item = bare(turn.item or {"role": "user", "content": turn.text()})
    if isinstance(content := item.get("content"), list):
        item["content"] = [bare(part) if isinstance(part, dict) else part for part in content]
    return turn if item == turn.item else turn_of(item)


def size_of(turns: list[Turn]) -> int:
    return sum([len(turn.json()) for turn in turns])


def reach_of(history: History, record: Record, at: int, evidence: int) -> int:
    """How many units before the answer at `at` a record restores; without evidence only those
    before one that was heard, and what came as before."""
    depth, alike = 0, True
    for place, stored in enumerate(record.units[:at]):
        unit = history.units[place]
        if unit.whole != stored.whole and not fits(history, stored, place, record.newest):
            return depth
        alike = stored.heard or (alike and unit.whole == stored.whole and not stored.private)
        if alike:
            depth = place + 1
    return at if evidence else depth


def fits(history: History, stored: Unit, place: int, newest: int) -> bool:
    """Whether a unit is what was sent, with its decorations as they were, or taken out when it
    stopped being the `newest`."""
    came = Counter(history.units[place].blocks)
    sent = Counter(stored.blocks)
    if came == sent:
        return True
    if place >= newest:  # a client may add to its history when a message came
        told = "\n".join([text for _, text in stored.blocks])
        for block in came - sent:
            time = MESSAGE_TIME.fullmatch(block[1])
            if time and time[1] in told:
                del came[block]
    if not came <= sent and history.units[place] is history.first:
        return rewritten(history, stored)
    if not came <= sent or place < newest:
        return False  # once history, it has been settled
    return place < history.newest or all(kind in history.moved for kind, _ in sent - came)


def rewritten(history: History, stored: Unit) -> bool:
    """Whether the first message has other reminders that can be set down anew: nobody speaks in
    them, nothing was withdrawn, and no later message is newer."""
    blocks, place = history.first.blocks, history.units.index(history.first)
    kinds = [kind for kind, _ in blocks]
    speakers = [kind for kind, _ in history.units[history.target].blocks]
    if kinds != [kind for kind, _ in stored.came] or SPEAKERS.intersection(kinds + speakers):
        return False
    later = [text for unit in history.units[place + 1 :] for _, text in unit.blocks]
    newer = topics("\n".join(later))
    for (kind, now), (_, old) in zip(blocks, stored.came, strict=True):
        kept = topics(old, True) <= topics(now, True) and not topics(now) & newer
        if now != old and (kind not in REWRITABLE or not kept):
            return False
    return True


def restore(unit: Unit, stored: Unit) -> bool:
    """Put its stored form in its place; whether that changed anything."""
    changed = bool(stored.calls) and respell(unit, stored.calls)
    came = [storable(turn).item for turn in unit.turns[unit.fixed() :]]
    if stored.kept is None or [turn.item for turn in stored.kept] == came:
        return changed
    unit.turns[unit.fixed() :] = stored.kept
    return True


MESSAGE_TIME = re.compile(r"\[(?:[\w ]{0,30}[Tt]ime: )?(\d{4}-\d\d-\d\d)[T \d:.Z+-]{0,30}\]")
CLOCK_TIME = re.compile(_HOURS, re.IGNORECASE)
ANY_TIME = re.compile(_CLOCK)


def topics(text: str, other: bool = False) -> Counter[str]:
    """What lines are about, without listings and tags: what stands before a colon. `other` lines
    count as they are, or as ""."""
    lines = [line for line in lines_of(text) if line[0] != "<" and not LISTED.match(line)]
    labelled = [form_of(line).split(":") for line in lines]
    return Counter([one[0].strip() if one[1:] or other else "" for one in labelled])


def settle_insertions(history: History, depth: int, lifted: Texts) -> tuple[int, Texts]:
    """How many of `depth` units may be restored, and what is set down, so that the newest value
    stands last: none that the client no longer has, and in a tool loop only a clock may wait."""
    while True:
        wanted, standing, since = lifted.copy(), Texts(), dict[str, int]()
        first, place = history.first, history.units.index(history.first)
        if first.stored and place < depth:
            for number, (kind, now) in enumerate(first.blocks):
                if kind in REWRITABLE:
                    label = f"{REWRITTEN}{number}"
                    wanted[label], since[label] = now, place
                    standing[label] = now if (kind, now) in first.stored.blocks else ""
        for at, unit in enumerate(history.units[:depth]):
            if unit.stored and unit.stored.inserted:
                standing.update(unit.stored.inserted)
                since = {**dict.fromkeys(unit.stored.inserted, at), **since}
        gone = []
        for label, text in standing.items():
            told = topics(text if label.startswith((LEARNED, REWRITTEN)) else "")
            if label not in wanted or not told <= topics(wanted[label]):
                gone.append(since[label])
        if gone:
            depth = min(gone)
            continue
        pending = {label: text for label, text in wanted.items() if standing.get(label) != text}
        if not pending or history.target >= depth:
            return depth, pending
        but_clock = {label: CLOCK_TIME.sub("", text) for label, text in standing.items()}
        if all(CLOCK_TIME.sub("", pending[label]) == but_clock.get(label) for label in pending):
            return depth, {}
        depth = history.target


def insert_lifted(history: History, depth: int, pending: Texts) -> None:
    """Put texts in front of the newest user's words, or of the first's if no history is known; and
    of decorations that may tell something newer."""
    place = next(at for at, unit in enumerate(history.units) if unit.speaks)
    if depth > place or not PERSONAL.isdisjoint(pending):
        place = history.target
    unit = history.units[place]
    unit.inserted = pending
    lifted = [text for label, text in pending.items() if not label.startswith(REWRITTEN)]
    pieces = [reminder("\n\n".join(lifted))] if lifted else []
    pieces += [text for label, text in pending.items() if label.startswith(REWRITTEN)]
    text = "\n\n".join(pieces)
    turn = unit.turns[0] = unit.turns[0].own()
    slots = turn.slots()
    told = "\n".join([block for _, block in unit.blocks])
    dated = ANY_TIME.search(told) and ANY_TIME.search(text)
    newer = dated or (topics(told) & topics(text)).keys() - {""}
    spoken = [slot for slot in slots if undress(slot.get())[1].strip()]
    slot = slots[0] if newer or not spoken else spoken[-1]
    slot.set(f"{text}\n\n{slot.get()}")


class Editor:
    def __init__(self, config: Config) -> None:
        self.config, self.scrubber, self.lifter = config, Scrubber(config), Lifter(config)
        self.replay = Replay(config)

    def apply(self, view: View, report: Report, asker: Asker = ANYBODY) -> Trace:
        """Edit a view in place. Raises Unreadable."""
        config, replay = self.config, self.replay
        report.items = len(view.turns)
        edited = config.scrub and view.dialect.edited
        if edited and goes_on_elsewhere(view):
            report.note = "it goes on from what the server has stored"
            edited = False
        if edited:
            self.scrubber.apply(view, report)
            if config.system_first:
                system_first(view, report)
        if not (edited and config.replay):
            return Trace(replay.conversation(view))
        history, lifted = History(replay.units(view)), Texts()
        if history.target:  # else it could not be set down
            talk = hash((asker.client, view.dialect.name, history.opening))
            lifted = self.lifter.lift(view, talk)
        trace = replay.apply(view, history, lifted, report, asker)
        report.items_modified += report.replayed + bool(report.lifted or report.system_moved)
        return trace


Call = tuple[str, str]  # id, name
NOT_LETTERS = re.compile(r"[\W_]+")


def plain(name: Any) -> str:
    return NOT_LETTERS.sub("", name) if isinstance(name, str) else ""


def letters(text: str) -> str:
    """What an answer is known by: its letters and digits without what the model thought."""
    if "</think>" in text:
        text = text.rpartition("</think>")[2]
    elif "<think>" in text:
        text = text.partition("<think>")[0]
    return NOT_LETTERS.sub("", text) or text.strip()


def spoken(unit: Unit) -> tuple[str, frozenset[str]]:
    if unit.spoken is None:
        said = "\n".join([turn.text() for turn in unit.turns if turn.role == "assistant"])
        unit.spoken = letters(said), frozenset([plain(ident) for ident, _ in unit.calls])
    return unit.spoken


def agreement(record: Record, unit: Unit, at: int) -> int:
    """Whether a unit is the answer that was heard behind `at` units of a record (2: yes, 0: no, 1:
    it was unread); a long one is known by its beginning or its end."""
    if len(record.units) > at:
        return 2 if record.units[at].heard and record.units[at].words == unit.words else 0
    answer = record.heard()
    if answer is None or len(record.units) < at:
        return 0
    if answer is ANY or answer is UNREAD:
        return 2 if answer is ANY else 1
    said, calls = spoken(unit)
    if answer.calls or calls:
        part = calls & answer.calls if not answer.complete else None
        return 2 if part or calls == answer.calls else 0
    if answer.complete and said == answer.opening:
        return 2 if said else 0
    for one in (answer.opening, answer.closing):
        shorter, longer = sorted((one, said), key=len)
        if len(shorter) >= LONG_ANSWER and (longer.startswith(shorter) or longer.endswith(shorter)):
            return 2
    return 0


class CallField(NamedTuple):
    """An object that says which call it is, or is about."""

    holder: Json
    key: str  # of the id
    named: Json | None  # has the call's name
    said: str  # its arguments, or its result

    def call(self) -> Call:
        return str(self.holder.get(self.key)), str(members(self.named).get("name") or "")


def call_fields(item: Json) -> list[CallField]:
    found = []
    parts = [*listed(item.get("tool_calls")), *listed(item.get("content")), item]
    for part in filter(members, parts):
        kind = str(part.get("type"))
        key = next((key for key in ("tool_call_id", "call_id", "tool_use_id") if key in part), "id")
        if key != "id" or "function" in part or kind == "tool_use":
            function = members(part.get("function")) or part
            said = function.get("arguments", function.get("input"))
            said = part.get("content") if key == "tool_use_id" else said
            named = None if kind.endswith(("_result", "_output")) else function
            found.append(CallField(part, key, named, canonical(said)))
    return found


def canonical(value: Any) -> str:
    """A call's arguments, or a result, in one spelling."""
    if isinstance(value, list):
        parts = map(members, value)
        value = "\n".join([str(part.get("text") or _sorted_json(part)) for part in parts])
    if isinstance(value, str) and value[:1] == "{":
        with suppress(*UNPARSED):
            value = json.loads(value)
    return value if isinstance(value, str) else _sorted_json(value)


def other_content(turn: Turn) -> list[str]:
    """What a turn says beside its texts, calls and results: images, a user's name."""
    unsaid = (*UNSAID_PARTS, "tool_use", "tool_result")
    content = turn.holder.get(turn.key)
    parts = [part for part in listed(content) or [content] if members(part)]
    found = [_sorted_json(bare(part)) for part in parts if part.get("type") not in unsaid]
    name = (turn.item or {}).get("name") if turn.role == "user" else None
    return [*found, str(name)] if name else found


def respell(unit: Unit, first: tuple[Call, ...]) -> bool:
    """Give calls or results their first ids, names and order; whether that changed anything."""
    spelled = {plain(ident): (ident, name) for ident, name in first}
    if unit.calls == first or sorted(spelled) != sorted([plain(ident) for ident, _ in unit.calls]):
        return False
    places = {ident: place for place, ident in enumerate(spelled)}
    ranked: list[tuple[int, Turn]] = []
    for turn in unit.turns:
        item = copy.deepcopy(turn.item or {})
        found = call_fields(item)
        rank = min([places[plain(one.call()[0])] for one in found], default=len(places))
        for holder, key, named, _ in found:
            holder[key], name = spelled[plain(holder.get(key))]
            if named is not None and name:
                named["name"] = name
            elif named is not None:
                named.pop("name", None)
        listed(item.get("content")).sort(
            key=lambda part: places.get(plain(members(part).get("tool_use_id")), len(places))
        )
        ranked.append((rank, turn_of(item) if found else turn))
    if unit.role == "tool":
        ranked.sort(key=lambda one: one[0])
    unit.turns = [turn for _, turn in ranked]
    return True


class Tools:
    """The forms and the order in which a client sent tools first."""

    def __init__(self, limit: int) -> None:
        self.known = Bounded(limit)  # by client and tool: (rank, form)
        self.ranks = count()
        self.last: tuple[Any, dict[int, str]] = None, {}  # tools as read last

    def first(self, asker: Asker, name: int, form: str) -> tuple[int, str]:
        """Rank and form of a tool when the client, or the warm-up, sent it first."""
        mine, warm = hash((asker.client, name)), hash((ANYBODY.client, name))
        known: tuple[int, str] | None = self.known.get(mine) or self.known.get(warm)
        first = known or (next(self.ranks), form)
        if asker.learn and not known:
            self.known.put(mine, first, 300 + len(form))
        return first

    def apply(self, view: View, asker: Asker) -> bool:
        """Send tools as they were sent first, new ones last; whether that changed anything."""
        tools = view.body.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            return False
        last, forms = self.last
        if last is not tools:  # the Reader's lists are shared
            forms = {hash(_sorted_json(tool)): json.dumps(tool) for tool in map(bare, tools)}
            self.last = tools, forms
        if len(forms) != len(tools):
            return False  # one stands there twice
        first = sorted([self.first(asker, name, form) for name, form in forms.items()])
        sent = [form for _, form in first]
        if sent == list(forms.values()):
            return False
        view.body["tools"] = list(map(json.loads, sent))
        return True


# ====== Explain: how much of a prompt was reused, and why not more ======


@dataclass
class Usage:
    """What the server reported, in tokens and ms; None (never 0) where it did not."""

    prompt: int | None = None
    cached: int | None = None
    prompt_ms: float | None = None

    def read(self) -> int | None:
        """Prompt tokens that the server had to read."""
        return None if self.prompt is None or self.cached is None else self.prompt - self.cached


# A server's name of a number -> what it is. Anthropic's input_tokens were not cached.
USAGE_KEYS = {
    "prompt_tokens": "prompt", "tokens_evaluated": "prompt", "input_tokens": "input",
    "cached_tokens": "cached", "prompt_cache_hit_tokens": "cached",
    "cache_read_input_tokens": "cache_read", "cache_creation_input_tokens": "cache_write",
    "cache_n": "cache_n", "prompt_n": "prompt_n", "prompt_ms": "prompt_ms",
    "prompt": "prompt", "cached": "cached",  # in kvproxy's captures
}  # fmt: skip
USAGE_MEMBER = re.compile(r'"(usage|timings|tokens_evaluated)"\s*:\s*')


def answer_events(first: bytes, last: bytes = b"") -> list[list[Json]]:
    """The events in an answer's first and last bytes."""
    streamed = first.startswith((b"data:", b"event:", b":")) or b"\ndata:" in first
    windows = []
    for window in filter(None, (first, last)):
        text, at_end = window.decode("utf-8", "replace"), window is (last or first)
        lines = text.split("\n") if streamed else [text]
        windows.append([event_of(line, at_end) for line in lines if "{" in line])
    return windows


def event_of(line: str, at_end: bool) -> Json:
    """The event in a line; at the end the numbers of one whose beginning is cut off."""
    with suppress(*UNPARSED):
        return members(json.loads(line.removeprefix("data:")))
    found: Json = {}
    for member in list(USAGE_MEMBER.finditer(line))[-2:] if at_end else ():
        with suppress(*UNPARSED):
            found[member[1]] = json.JSONDecoder().raw_decode(line, member.end())[0]
    return found


def usage_of(windows: list[list[Json]]) -> Usage:
    found: Json = {}
    for event in chain(*windows):
        for part in (event, members(event.get("response")), members(event.get("message"))):
            usage, timings = members(part.get("usage")), members(part.get("timings"))
            for numbers in (part, usage, *map(members, usage.values()), timings):
                for key in filter(USAGE_KEYS.get, numbers):
                    value = numbers[key]
                    if type(value) in (int, float) and 0 <= value < 1e15:
                        found[USAGE_KEYS[key]] = value if key == "prompt_ms" else int(value)
    prompt, cached, read = found.get("prompt"), found.get("cached"), found.get("prompt_n")
    if "input" in found:
        cached = found.get("cache_read", cached)
        whole = found["input"] + found.get("cache_read", 0) + found.get("cache_write", 0)
        prompt = max(whole, prompt or 0)  # some say 0 here, and the truth beside it
    if read is not None and "cache_n" in found:
        prompt, cached = read + found["cache_n"], found["cache_n"]
    elif read is not None and cached is None and prompt is not None and prompt >= read:
        cached = prompt - read  # a llama-server without cache_n
    if prompt is not None and cached is not None:
        cached = min(cached, prompt)
    return Usage(prompt, cached, found.get("prompt_ms"))


# What leads to an answer's words and calls; the types of objects with words.
ANSWER_KEYS = ("choices", "message", "delta", "content", "content_block", "text", "tool_calls",
               "item", "output")  # fmt: skip
WORD_TYPES = (None, "text", "text_delta", "output_text", "response.output_text.delta")


def heard_answer(windows: list[list[Json]]) -> Heard:
    said = [list(answer_parts(events)) for events in windows]
    texts = [letters("".join([text for text, _ in parts])) for parts in said]
    calls = {plain(call) for _, call in chain(*said)} - {""}
    if not calls and not any(texts):
        return UNREAD
    return Heard(texts[0], texts[-1], frozenset(calls), len(texts) == 1)


def answer_parts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(text, tool call id) pieces of any answer; `key` leads to `value`."""
    for part in listed(value):
        yield from answer_parts(part, key)
    if not isinstance(value, dict):
        return
    kind = value.get("type")
    if kind in ("tool_use", "function_call") or key == "tool_calls":
        yield "", str(value.get("call_id") or value.get("id") or "")
    elif not str(kind).endswith(".done"):  # it repeats what has been said
        for name in [name for name in ANSWER_KEYS if name in value]:
            part = value[name]
            if not isinstance(part, str):
                yield from answer_parts(part, name)
            elif kind in WORD_TYPES and name != "message":  # that is an error's
                yield part, ""


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


BASE64 = re.compile(r"(?<![\w+/-])[\w+/-]{2048,}={0,2}")
THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text")
UNSAID_PARTS = TEXT_PARTS + THOUGHT_PARTS
# What the server reads of an item, in this order.
SAID_KEYS = ("call_id", "tool_call_id", "tool_use_id", "name", "function", "content", "output",
             "arguments", "input", "tool_calls")  # fmt: skip


def part_text(value: Any) -> str:
    """What the server reads of an item, without reasoning; image bytes are a hash."""
    if isinstance(value, str):
        with suppress(*UNPARSED):
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
    if turn.told is None:
        turn.told = part_text(turn.holder.get(turn.key) if turn.item is None else turn.item)
    return turn.told


def tool_name(tool: Any) -> str:
    name = (members(members(tool).get("function")) or members(tool)).get("name")
    return re.sub(r"[^!-~]", "?", name[:80]) if isinstance(name, str) else "?"


Segment = tuple[str, str]  # name and text


class Prompt:
    """A prompt as forwarded, without reasoning, which clients drop at will. `head` is a hash of its
    `front` (system, tools), `turns` has one of all turns up to each; `sent` is it as it came."""

    tokens: int | None = None  # known when the request ends
    number, first_pace = 0, 0.0

    def __init__(
        self, view: View, talk: str = "", side: str = "", now: float = 0, sent: Prompt | None = None
    ) -> None:
        self.conversation, self.side, self.time, self.sent = talk, side, now, sent
        self.front, self.said = [("system", text) for text in view.system_texts()], list[Segment]()
        self.system = "\n".join([text for _, text in self.front])
        tools = listed(view.body.get("tools"))
        self.tools = list(map(tool_name, tools))
        for name, tool in zip(self.tools, tools, strict=True):
            self.front.append((f"tool {name}", json.dumps(bare(tool) if members(tool) else tool)))
        self.head, self.turns, link = hash(tuple(self.front)), list[int](), 0
        self.reasoning = set[int]()  # numbers of turns with it
        self.answers = 0  # turns up to the last answer
        turns = view.turns[view.leading() :]
        for turn in turns:
            item, role, number = turn.item or {}, turn.role, len(self.turns) + 1
            kinds = [role, *[members(one).get("type") for one in listed(item.get("content"))]]
            if item.get("reasoning_content") or [kind for kind in kinds if kind in THOUGHT_PARTS]:
                self.reasoning.add(number)
            if role != "reasoning":
                name = "prompt" if view.dialect.turns == "prompt" else role
                self.said.append((f"turn {number} ({name})", told_of(turn)))
                self.turns.append(link := hash((link, self.said[-1])))
            if role == "assistant":
                self.answers = number
        self.segments = self.front + self.said
        self.size = sum([len(text) for _, text in self.segments])  # in characters
        self.memory = sum([370 + sys.getsizeof(text) for _, text in self.segments])  # in bytes
        self.memory += sent.memory if sent is not None else 0
        self.step = ""
        if view.dialect.edited and turns:
            later = "tool step" if turns[-1].role == "tool" else "user turn"
            self.step = side or (later if self.answers else "first prompt")

    def at(self, place: int) -> Segment:
        return self.segments[place] if place < len(self.segments) else ("", "")

    def common_turns(self, base: Prompt) -> int:
        count = len(base.turns)
        whole = self.turns[count - 1 : count] == base.turns[-1:]
        return count if whole else common_prefix(self.turns, base.turns)

    def depth(self, base: Prompt) -> int:
        if self.head == base.head:
            return len(self.front) + self.common_turns(base)
        return common_prefix(self.front, base.front)

    def goes_on(self, base: Prompt) -> bool:
        return self.depth(base) == len(base.segments)

    def common(self, base: Prompt) -> int:
        """How many characters are common at the beginning."""
        depth = self.depth(base)
        if depth == len(base.segments):
            return base.size
        (name, text), (base_name, base_text) = self.at(depth), base.at(depth)
        more = common_prefix(text, base_text) if name == base_name else 0
        return sum([len(text) for _, text in self.segments[:depth]]) + more


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common prefix. Slices are compared faster than items."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def alike(a: str, b: str) -> bool:
    """Whether half of the longer text is common: its ends, or its lines."""
    if a == b or 2 * min(len(a), len(b)) <= max(len(a), len(b)):
        return a == b
    prefix = common_prefix(a, b)
    ends = prefix + common_prefix(a[prefix:][::-1], b[prefix:][::-1])
    lines = sum(map(len, set(a.splitlines()) & set(b.splitlines())))
    return 2 * max(ends, lines) > max(len(a), len(b))


KINDS = {"clock": _CLOCK, "number": r"(?<![\w-])[\w-]*?\d[\w-]*"}


def kind_of(before: str, after: str, at: int) -> str:
    if at >= len(after.rstrip()):
        return "removed"
    for name, pattern in KINDS.items():
        if re.sub(pattern, "", around(before, at)) == re.sub(pattern, "", around(after, at)):
            return name
    return "text"


def around(text: str, at: int) -> str:
    start, end = max(text.rfind("\n", 0, at) + 1, at - 30), text.find("\n", at + 1, at + 40)
    return text[start : end if end >= 0 else at + 40]


NEWEST, COMPARED = 8, 64  # prompts of other conversations, and of all
VERDICTS = {
    "cold": "nothing like it was sent before",
    "extended": "goes on from this conversation's last prompt",
    "rewritten": "the client changed earlier content",
    "template": "the chat template renders old turns in another way",
    "lost": "the server had forgotten it",
    "new branch": "begins as another conversation or an older prompt",
    "not reported": "the server gave no cache numbers",
}


@dataclass
class Verdict:
    """What became of a prompt. `base`: the request before; `expected`: tokens to be reused."""

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
        return f"{self.name} ({self.step})" if self.step else self.name

    def line(self) -> str:
        """The second log line; '' if there is nothing to say."""
        if self.name != "rewritten" or self.kind == "reasoning":
            return self.advice
        told = f"changed in {self.where}, {self.kind}: {self.before!r} -> {self.after!r}"
        if self.kind in ("taken out", "put in"):
            told = f"{self.where} was {self.kind}: {self.before or self.after!r}"
        return f"{told}; {self.advice} {self.cure}".replace(";  ", "; ").rstrip("; ")


@dataclass
class Case:
    """A prompt, and `near`, which it was compared with: its `base` if of the same conversation."""

    verdict: Verdict
    prompt: Prompt
    near: Prompt | None = None
    base: Prompt | None = None
    whole: bool = False  # it goes on from `base`
    between: Sequence[Prompt] = ()  # since then
    texts: tuple[str, str] = ("", "")  # where they part
    straight: float = 0.0  # the share without kvproxy
    moved: bool = False  # by kvproxy itself
    away: bool = False  # the server was, since then
    idle: float = 0.0  # seconds before it
    ahead: int | None = None  # tokens of it that were read before
    first_byte: float = 0.0  # seconds until a stream began


class Ledger:
    """The last prompts; the oldest go first."""

    def __init__(self, limit: int) -> None:
        self.lock = Lock()
        self.limit, self.size = limit, 0  # bytes
        self.entries: deque[Prompt] = deque()
        self.count = 0  # of all prompts judged

    def judge(self, prompt: Prompt, lost_at: float = -1.0) -> Case:
        """Compare a prompt with those before it. `lost_at`: when the server was last away."""
        with self.lock:
            stored = list(islice(reversed(self.entries), COMPARED))
            self.entries.append(prompt)
            self.count, self.size = self.count + 1, self.size + prompt.memory
            while self.size > self.limit and len(self.entries) > 1:
                self.size -= self.entries.popleft().memory
        case = Case(verdict := Verdict(side=prompt.side, step=prompt.step), prompt)
        if not stored or not prompt.segments:
            return case
        case.base = near = previous(prompt, stored)
        if near is None:
            like = [one for one in stored if one.head == prompt.head] or stored
            near = max(like, key=lambda one: (one.tools == prompt.tools, prompt.common(one)))
        case.near, case.away = near, near.time < lost_at
        case.between = newer = stored[: stored.index(near)]
        case.whole = case.base is not None and prompt.goes_on(near)
        sent, others = prompt.sent or prompt, [near] if case.whole else [near, *stored[:NEWEST]]
        verdict.share = max(map(prompt.common, others)) / (prompt.size or 1)
        case.straight = max(sent.common(one.sent or one) for one in others) / (sent.size or 1)
        ours = [one.head for one in newer if one.conversation == near.conversation and not one.side]
        if not case.whole:
            judge_change(case, near)
        elif prompt.side or near.head not in ours:
            verdict.name = "extended"
        else:
            verdict.name = "new branch"
            verdict.advice = "goes on from an older prompt than the newest one"
        return case


def previous(prompt: Prompt, stored: list[Prompt]) -> Prompt | None:
    """The newest prompt of the same conversation with the most turns in common."""
    best, reached = None, -1
    near = [one for one in stored if one.conversation == prompt.conversation] + stored[:NEWEST]
    for one in near:
        if len(one.turns) > reached:
            depth = prompt.common_turns(one)
            fits = depth == len(one.turns) or depth < prompt.answers
            if depth > reached and fits and same_talk(prompt, one):
                best, reached = one, depth
    if best is None:
        return None
    # Or a newer one, if its last message is history now.
    history = {text for _, text in prompt.said[reached : prompt.answers]}
    for one in stored[: stored.index(best)]:
        if one in near and one.turns and one.said[-1][1] in history and same_talk(prompt, one):
            return one
    return best


def same_talk(prompt: Prompt, one: Prompt) -> bool:
    """Whether one is of the same conversation, perhaps under another name."""
    if one.conversation == prompt.conversation:
        return bool(prompt.side or not one.side)
    if not prompt.answers or not one.turns or prompt.side or one.side:
        return False
    (_, opening), (_, first) = prompt.said[0], one.said[0]
    repeated = {text for _, text in prompt.said} & {text for _, text in one.said}
    similar = any(len(text) > 20 for text in repeated) or first in opening or opening in first
    return (similar or alike(first, opening)) and alike(one.system, prompt.system)


def judge_change(case: Case, base: Prompt) -> None:
    verdict, prompt, same_talk = case.verdict, case.prompt, case.base is not None
    sent, base_sent = prompt.sent or prompt, base.sent or base
    in_turns, place = base.head == prompt.head, prompt.depth(base)
    (old_name, old), (name, new) = base.at(place), prompt.at(place)
    verdict.where = name or old_name
    if base.system != prompt.system:
        verdict.where, old, new = "system", base_sent.system, sent.system
        if old == new:
            old, new = base.system, prompt.system
    elif base.tools != prompt.tools:
        same = sorted(base.tools) == sorted(prompt.tools)
        verdict.where, verdict.kind = "tools", "tool order" if same else "tools changed"
        old, new = ", ".join(base.tools), ", ".join(prompt.tools)
    else:
        earlier = old in [text for _, text in prompt.segments[place + 1 :]]
        later = new in [text for _, text in base.segments[place + 1 :]]
        answered = "(assistant)" in name and "(assistant)" not in old_name
        if later and earlier:
            verdict.kind = "another order"
        elif old and (later or answered or not name):
            verdict.where, verdict.kind, new = old_name, "taken out", ""
        elif new and earlier:
            verdict.kind, old = "put in", ""
    if same_talk or not in_turns:  # else they are the first words of another conversation
        at = common_prefix(old, new)
        verdict.kind = verdict.kind or kind_of(old, new, at)
        verdict.before, verdict.after, case.texts = around(old, at), around(new, at), (old, new)
    went_on = sent.common_turns(base_sent) == len(base_sent.turns)
    case.moved = went_on and (in_turns or sent.head == base_sent.head)
    changed = same_talk and (in_turns or prompt.answers > 0)
    varies = not in_turns and verdict.kind in (*KINDS, "tool order")
    same_agent = verdict.where != "system" or alike(base.system, prompt.system)
    if same_agent and (changed or varies) and not prompt.side:
        verdict.name = "rewritten"
    else:
        verdict.name = "cold" if verdict.share < 0.05 else "new branch"


def tell_cure(case: Case, config: Config) -> None:
    verdict = case.verdict
    off = [switch for switch in ("scrub", "replay", "lift") if not getattr(config, switch)]
    verdict.cure = next((f"{one.upper()}=1" for one in off if cures(case, config, one, True)), "")
    line = lines_pattern(*case.texts) if verdict.where == "system" else ""
    block = block_pattern(case) if "(user)" in verdict.where else ""
    strip = block and rf"{block}\s*"
    for name, pattern in (("LIFT_REGEX", line), ("REPLAY_REGEX", block), ("STRIP_REGEX", strip)):
        setting, known = setting_line(config, name, pattern), getattr(config, name.lower())
        if setting and not verdict.cure and cures(case, config, name.lower(), (*known, pattern)):
            price = "this cures it, but hides it from the model:" * (name == "STRIP_REGEX")
            verdict.cure, verdict.advice = setting, price


def cures(case: Case, config: Config, name: str, value: Any) -> bool:
    """Whether with a setting a prompt, as it came, goes on from the other."""
    editor, prompts = Editor(replace(config, **{name: value})), list[Prompt]()
    for prompt in (case.near or case.prompt, case.prompt):
        came = prompt.sent or prompt
        items = [{"role": "system", "content": came.system}]
        for place, text in came.said:
            items.append({"role": place.split("(")[1][:-1], "content": text})
        view = view_of({"messages": items, "tools": came.tools}, DIALECTS["chat/completions"])
        trace = editor.apply(view, Report())
        if trace.record is not None:
            trace.record.answer = ANY
        prompts.append(Prompt(view))
    before, now = prompts
    goes_on = now.goes_on(before) if case.base is not None else now.head == before.head
    return goes_on and all(text.strip() for _, text in now.said)


def setting_line(config: Config, name: str, pattern: str) -> str:
    """A pattern as a setting, ready to copy; '' if it is set."""
    pattern, known = re.sub(r"\\([ #&~-])", r"\1", pattern), getattr(config, name.lower())
    if not pattern or pattern in known:
        return ""
    quote, number = '"' if "'" in pattern else "'", f"_{len(known) + 1}" if known else ""
    return f"{name}{number}={quote}{pattern}{quote}"


def lines_pattern(old: str, new: str) -> str:
    """A pattern of the lines in which system texts differ; at most 4, each unique."""
    pairs = zip(old.split("\n"), new.split("\n"), strict=False)
    patterns = list[str]()
    for was, now in [pair for pair in pairs if pair[0] != pair[1]][:5]:
        label = re.split(r"\d", was[: common_prefix(was, now)])[0]
        patterns.append(f"^{re.escape(label[: label.rfind(' ') + 1] or label)}.*$")
        if any(len(re.findall(patterns[-1], text, re.MULTILINE)) != 1 for text in (old, new)):
            return ""
    return "|".join(patterns) if len(patterns) < 5 else ""


def block_pattern(case: Case) -> str:
    """A pattern of the paragraphs that changed in a user text."""
    old, new = case.texts
    prefix, text = common_prefix(old, new), max(old, new, key=len)
    suffix = common_prefix(old[prefix:][::-1], new[prefix:][::-1])
    start = text.rfind("\n\n", 0, prefix + 2) + 1
    end = text.find("\n\n", max(start, len(text) - suffix - 2))
    block = text[start : end if end >= 0 else None].strip()
    named = re.match(r"\W*[A-Za-z][A-Za-z _-]{2,80}[>:\]]?", block)
    # A person may have typed a line without a mark.
    if not named or block.startswith("<system-reminder") or not re.search(r"\n|^[<[]", block):
        return ""
    closing = re.findall(r"(?m)(?:</|\[/)[\w .-]{1,80}[>\]]$", block)
    ending = re.escape(closing[-1]) if closing else r"(?:\n\n|\Z)"
    said = case.prompt.said + (case.near or case.prompt).said
    often = sum([text.count(named[0]) for _, text in said]) > 64  # to find all ends takes long
    return "" if often else f"(?s){re.escape(named[0])}.*?{ending}"


def missing_tokens(case: Case, usage: Usage) -> int:
    """How many tokens too few were reused; 0 if little or unknown."""
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
    verdict, base, prompt = case.verdict, case.base, case.prompt
    prompt.tokens, verdict.base = usage.prompt, base.number if base is not None else 0
    if usage.cached is None or not usage.prompt:
        verdict.name = "not reported" if verdict.name == "extended" else verdict.name
        pace = 1_000_000 * case.first_byte / (prompt.size or 1)
        first = base.first_pace if base is not None else 0
        prompt.first_pace = first or pace
        if first and pace:
            told = f"{pace:.0f} ms to the first byte for each 1,000 characters, after {first:.0f}"
            verdict.advice = f"{told} in this conversation's first request"
    elif missing_tokens(case, usage):
        explain_loss(case, usage, config)
    elif usage.cached > max(0.9 * usage.prompt, (verdict.expected or 0) + 0.2 * usage.prompt):
        verdict.name = "extended"  # the change did not reach the prompt
    if verdict.name == "rewritten" and case.moved:
        verdict.advice = "by kvproxy itself; the client's messages only went on"
    elif verdict.name == "rewritten" and verdict.kind != "reasoning":
        with suppress(Unreadable):  # SCRUB=0, beyond LIMITS
            tell_cure(case, config)


def explain_loss(case: Case, usage: Usage, config: Config) -> None:
    verdict, base = case.verdict, case.base or case.prompt
    dropped = sorted(base.reasoning - case.prompt.reasoning)
    if dropped and case.whole:
        verdict.name, verdict.kind = "rewritten", "reasoning"
        verdict.where = f"turn {' and '.join(map(str, dropped[:4]))}"
        verdict.advice = f"the client sends the reasoning of {verdict.where} no longer"
        return
    cause = "idle" if case.idle > 300 else "not all kept"
    cause = "away" if case.away else "taken" if case.between else cause
    cached, expected, total = usage.cached or 0, verdict.expected or 0, usage.prompt or 1
    why = who_took_it(case, base, expected / total) if cause == "taken" else advice(cause, config)
    verdict.name, verdict.kind = "lost", cause
    verdict.advice = f"{cached:,} of {expected:,} tokens were still there: {why}"


def who_took_it(case: Case, base: Prompt, due: float) -> str:
    """Who got the slot, and what helps; `due`: the share to be reused."""
    other = max(case.between, key=lambda one: one.common(base) / (one.size or 1))
    share, size = other.common(base) / (other.size or 1), other.tokens or other.size // 4
    same = other.conversation == base.conversation
    who = "a request of the same chat in another form" if same else "another conversation"
    who = f"a {other.side} request" if other.side else who
    if share <= 0.1:  # -sps, unless it is set
        return f"{who} {ADVICE['taken']}"
    wanted, shared = math.ceil(100 * share + 1) / 100, round(share * size)
    helps = f"-np 2 or more with -sps {wanted:.2f} keeps them apart, but new chats start cold"
    helps = helps if wanted < due else "no -sps keeps them apart"
    shares = f"shares {shared:,} of its {size:,} tokens ({share:.2f})"
    return f"{who} came in between, which {shares} and took this slot: {helps}"


# Cause -> why or what helps | a setting, unless it is set | how it helps.
_CHECKPOINT = (
    "the model is hybrid, recurrent or sliding-window, without a checkpoint there"
    " (--ctx-checkpoints)"
)
ADVICE = {
    "away": "the server was away|warmup_file|WARMUP_FILE has it read prompts after a start",
    "taken": "came in between: -np or a larger --cache-ram keeps both",
    "idle": "an idle server may unload|keepalive_seconds|KEEPALIVE_SECONDS prevents that",
    "not all kept": "the server was restarted, its cache is off (--cache-ram 0), the template"
    f" renders old turns otherwise, or {_CHECKPOINT}",
    "template": "a template that keeps old turns (--chat-template-file) helps"
    "|prefill_ahead|PREFILL_AHEAD=1 has them read while the person reads",
    "full re-processing": _CHECKPOINT,
    "no similar slot": "it is new, or another took its slot (-np, --cache-ram)",
    "low similarity": "its start changes, or another took its slot",
    "slot cut": "conversations share a slot (a higher -sps), or prompts change",
}


def advice(cause: str, config: Config) -> str:
    told, setting, how = (ADVICE[cause] + "||").split("|")[:3]
    return told if getattr(config, setting, True) not in ("", 0, "0") else f"{told}; {how}"


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
    """The name of a request beside the conversation, or ''. `agent`: a sub-agent's id."""
    turns = view.turns[-1:]
    if agent or view.body.get("tools"):
        return "sub-agent" if agent else ""
    if not any(turn.role == "assistant" for turn in view.turns):
        turns = view.system()[:1] + turns
    text = "\n".join([turn.text()[:2000] for turn in turns]).lower()
    found = any(word in text for word in SIDE_WORDS) and SIDE_SHAPES.search(text)
    return str(found.lastgroup) if found else ""


ANSWER_START = 80  # characters behind the last turn


def rendered_otherwise(verdict: Verdict, base: Prompt, before: str, now: str) -> None:
    """Give the verdict `template` if a server renders the turns of `base` otherwise now."""
    at, place = common_prefix(before, now), 0
    if len(before) - at > ANSWER_START:
        for number, (_, text) in enumerate(base.said, len(base.front) + 1):
            found = before.find(text.strip()[:60], place, at)
            if found >= 0:
                verdict.where, place = base.at(number)[0], found
        verdict.name = verdict.kind = "template"
        verdict.before, verdict.after = around(before, at), around(now, at)


def weights_of(
    segments: list[Segment], tokens: int | None, count: Callable[[str], int | None]
) -> Json:
    """Where the tokens of a prompt go: system, tools with the five largest, turns. What the server
    does not `count` is estimated from the characters."""
    parts: dict[str, list[str]] = {"system": [], "tool": [], "turn": []}
    for name, text in segments:
        parts[name.partition(" ")[0]].append(text)
    tools = [(name[5:], text) for name, text in segments if name.startswith("tool ")]
    largest = sorted(tools, key=lambda tool: -len(tool[1]))[:5]
    texts = [*map("\n".join, parts.values()), *[text for _, text in largest]]
    numbers = list(takewhile(lambda n: n is not None, map(count, texts)))
    estimated = len(numbers) < len(texts)
    if estimated:
        rate = (tokens or 0) / (sum(map(len, texts[:3])) or 1) or 0.25
        numbers = [round(rate * len(text)) for text in texts]
    row: Json = dict(zip(("system", "tools", "turns"), numbers, strict=False))
    of_tools = dict(zip([name for name, _ in largest], numbers[3:], strict=True))
    return {**row, "estimated": estimated, "largest tools": of_tools}


# ====== Relay: http.server and http.client; each override says what it mends ======

HEAD_LIMIT = 65536  # bytes of a head, or of a line in a body
HEADER_LIMIT = 100  # header lines, as in llama-server
PIECE_BYTES = 65536  # bytes of a body at a time
PIECE_SECONDS, PIECE_DELAY = 90e-6, 0.005  # a fast stream waits: for each request; at most
BODY_SECONDS = 60.0  # for each MB of a request's body, and at least
SEND_SECONDS = 300.0  # an answer may stay unread
KEEP_SECONDS = 120.0  # between the requests of a client
QUIET_SECONDS = 0.02  # of silence: there is time to explain
LINGER_SECONDS = 2.0  # for a client that is still sending
DRAIN_SECONDS = 10.0  # streams get this long when the proxy stops
TAP_BYTES = 65536  # of an answer's end; a quarter of its start

# RFC 9110 section 7.6.1. Authorization is end to end.
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
HOP_BY_HOP |= {"proxy-connection", "proxy-authenticate", "proxy-authorization"}
WRITTEN_ANEW = {"host", "expect", "content-length", "x-kvproxy-conversation"}

TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
REQUEST_LINE = re.compile(rf"({TOKEN}) ([\x21-\x7e\x80-\xff]+) HTTP/([0-9])\.([0-9])\r?\n")
STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-9]\d\d)(?: ([\t\x20-\x7e\x80-\xff]*))?\r?\n")
FINAL_STATUS = re.compile(rb"(?m)^HTTP/1\.[01] [2-9]")
FIELD_LINE = re.compile(rf"({TOKEN}):([\t\x20-\x7e\x80-\xff]*)\r?\n")
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\x00]*)?\r\n")
LENGTH = re.compile(r"[0-9]{1,19}")

Headers = list[tuple[str, str]]
Url = SplitResult
Part = tuple[bytes, bytes]  # of a body: as received, and its payload


class Refused(Exception):
    """The proxy answers by itself: (status, what to do)."""


class BadMessage(Refused):
    """A message that is not HTTP/1.x as RFC 9112 has it."""


class ClientGone(Exception):
    """The client hung up, or does not read."""


READ, WRITE = 1, 4  # as POLLIN and POLLOUT
ENDED = getattr(select, "POLLRDHUP", 0)  # the other side sends no more; Linux


def poll(wanted: dict[int, int], seconds: float) -> dict[int, int]:
    """The events that come in time of those that are wanted, by descriptor. select() takes none
    above 1023, but on Windows."""
    seconds = max(0.0, seconds)
    if hasattr(select, "poll"):
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        return dict(poller.poll(1000 * seconds))
    reads = [one for one, events in wanted.items() if events & READ]
    writes = [one for one, events in wanted.items() if events & WRITE]
    reads, writes, _ = select.select(reads, writes, list(wanted), seconds)  # not three empty lists
    return {one: READ * (one in reads) | WRITE * (one in writes) for one in {*reads, *writes}}


def never_wait(events: int) -> None:
    """The `wait` of a stream that nobody reads from."""
    raise BlockingIOError


class Stream:
    """A connected socket as a file; without a buffer while nothing comes. It calls `wait(events)`
    before it reads, and where it would block. `ends`: exceptions for a broken connection, and for
    its end."""

    def __init__(self, sock: socket.socket, wait: Any, *ends: type[Exception]) -> None:
        self.sock, self.wait = sock, wait
        self.broken, self.ended = ends
        self.descriptor = sock.fileno()
        self.ahead = bytearray()  # what came and was not asked for yet
        sock.setblocking(False)

    def attempt(self, call: Callable[[Any], Any], data: Any, events: int) -> Any:
        while True:
            try:
                return call(data)
            except AGAIN:
                self.wait(events)
            except OSError as error:
                raise self.broken(str(error)) from None

    def fill(self) -> None:
        self.wait(READ)
        data = self.attempt(self.sock.recv, PIECE_BYTES, READ)
        if not data:
            raise self.ended("the connection ended")
        self.ahead += data

    def take(self, size: int) -> bytes:
        data = bytes(self.ahead[:size])
        del self.ahead[:size]
        return data

    def peek(self) -> int:
        """The next byte."""
        if not self.ahead:
            self.fill()
        return self.ahead[0]

    def read1(self, size: int) -> bytes:
        self.peek()
        return self.take(size)

    def readline(self, limit: int, status: int = 431) -> bytes:
        while (end := self.ahead.find(b"\n", 0, limit)) < 0:
            if len(self.ahead) >= limit:
                raise BadMessage(status, "A line of the head is too long")
            self.fill()
        return self.take(end + 1)

    def read_ahead(self) -> bool:
        """Take in what has come; False when the connection has ended."""
        try:
            data = self.sock.recv(PIECE_BYTES)
        except AGAIN:
            return True
        except OSError:
            return False
        self.ahead += data
        return bool(data)

    def sendall(self, data: Any) -> None:
        while data:
            sent = self.attempt(self.sock.send, data, WRITE)
            data = memoryview(data)[sent:] if sent < len(data) else b""

    def makefile(self, *_: object) -> Stream:
        return self

    def flush(self) -> None:
        """HTTPResponse asks for it."""

    def close(self) -> None:
        self.sock.close()


class Fields:
    """Headers with an index: HTTPMessage of the library searches all of them each time."""

    def __init__(self, lines: Headers) -> None:
        self.lines, self.index = lines, dict[str, list[str]]()
        for name, value in lines:
            self.index.setdefault(name.lower(), []).append(value)

    def all(self, name: str) -> list[str]:
        """The values of a header, given in lower case."""
        return self.index.get(name, [])

    def members(self, name: str) -> list[str]:
        """The members of a header that is a list, in lower case."""
        values = self.all(name)
        return [one.strip(" \t").lower() for value in values for one in value.split(",")]

    def end_to_end(self, drop: Collection[str]) -> list[str]:
        """The lines to pass on, without `drop` and what Connection lists: but with the length, else
        a body would be the next message."""
        dropped = HOP_BY_HOP.union(drop, set(self.members("connection")) - {"content-length"})
        return [f"{one}: {value}" for one, value in self.lines if one.lower() not in dropped]

    def framing(self) -> tuple[bool, int | None]:
        """Whether a body comes in chunks, and Content-Length: int() takes +5 and 1_0 too, and the
        library the first of two lengths."""
        coding, lengths = self.members("transfer-encoding"), self.all("content-length")
        if coding not in ([], ["chunked"]):
            raise BadMessage(501, "Transfer-Encoding can be chunked only")
        if len(set(lengths)) > 1 or not all(map(LENGTH.fullmatch, lengths)):
            raise BadMessage(400, "Content-Length is not one number")
        return bool(coding), int(lengths[0]) if lengths else None


def read_headers(file: Any, limit: int) -> Fields:
    """Header lines (RFC 9112 section 5). parse_headers() of the library splits them at a bare CR
    too, and drops all behind a line without a colon."""
    found: Headers = []
    while (line := file.readline(limit)) not in (b"\r\n", b"\n"):
        limit -= len(line)
        match = FIELD_LINE.fullmatch(line.decode("latin-1"))
        if not match:
            raise BadMessage(400, "A header line is malformed")
        found.append((match[1], match[2].strip(" \t")))
        if len(found) > HEADER_LIMIT:
            raise BadMessage(431, "There are too many header lines")
    return Fields(found)


def whole_chunks(data: bytearray) -> Part:
    """The whole chunks at a buffer's start, but for the last."""
    at, payloads = 0, list[bytearray]()
    while line := CHUNK_LINE.match(data, at):
        start, end = line.end(), line.end() + int(line[1], 16)
        if start == end or data[end : end + 2] != b"\r\n":
            break
        payloads.append(data[start:end])
        at = end + 2
    return bytes(data[:at]), b"".join(payloads)


def read_chunks(file: Any, limit: float) -> Iterator[Part]:
    """A chunked body (RFC 9112 section 7.1). HTTPResponse takes +2, 0x2 and 1_0 for sizes, does not
    look at what ends a chunk, and takes the connection's end for that of the trailers."""
    size = -1
    while size:
        file.peek()
        whole, payload = whole_chunks(file.ahead)
        size = left = len(payload)
        if not whole:
            line = file.readline(HEAD_LIMIT)
            found = CHUNK_LINE.fullmatch(line)
            if not found:
                raise BadMessage(400, "A chunk's size is malformed")
            size = left = int(found[1], 16)
        limit -= size
        if limit < 0:
            raise Refused(413, TOO_LONG)
        if whole:
            del file.ahead[: len(whole)]
            yield whole, payload
            continue
        while left:
            data = file.read1(min(left, PIECE_BYTES))
            left -= len(data)
            end = b"" if left else file.readline(2, 400)
            if end not in (b"", b"\r\n"):
                raise BadMessage(400, "A chunk is longer than its size")
            yield line + data + end, data
            line = b""
    trailer = line
    while trailer != b"\r\n":
        trailer = file.readline(HEAD_LIMIT - len(line))
        if trailer != b"\r\n" and not FIELD_LINE.fullmatch(trailer.decode("latin-1")):
            raise BadMessage(400, "A trailer is malformed")
        line += trailer
    yield line, b""


def body_parts(file: Any, chunked: bool, left: int | None, limit: float = 1e99) -> Iterator[Part]:
    """A body as it comes. read1() of HTTPResponse hides that one was cut."""
    if chunked:
        yield from read_chunks(file, limit)
    elif left is not None:
        while left:
            data = file.read1(min(left, PIECE_BYTES))
            left -= len(data)
            yield data, data
    else:
        with suppress(EOFError):
            while data := file.read1(PIECE_BYTES):
                yield b"%x\r\n%s\r\n" % (len(data), data), data
        yield b"0\r\n\r\n", b""


@dataclass
class Request:
    """A request's head, as received."""

    method: str
    path: str  # with the query; a character for each byte
    headers: Fields
    old: bool = False  # HTTP/1.0
    length: int | None = None  # Content-Length
    chunked: bool = False

    def get(self, name: str) -> str:
        """The first value of a header, or ''."""
        return (self.headers.all(name) or ("",))[0]


class Response(http.client.HTTPResponse):
    _method: str  # of the request
    fp: Any  # the connection's Stream
    headers: Any  # Fields
    keeps: bool  # the connection may be used again

    def begin(self) -> None:
        """Read the final answer's head (RFC 9112 section 6.3). The library takes 103 for it (RFC
        9110 section 15.2), and its parser is not strict."""
        try:
            self.fp.peek()
        except (ConnectionError, EOFError):
            raise http.client.RemoteDisconnected("its log may say why") from None
        for _ in range(64):  # with some like 100 and 103
            line = self.fp.readline(HEAD_LIMIT)
            match = STATUS_LINE.fullmatch(line)
            if not match:
                raise BadMessage(400, "The status line is malformed")
            headers = self.headers = read_headers(self.fp, HEAD_LIMIT - len(line))
            self.status, self.reason = int(match[1]), (match[2] or b"").decode("latin-1")
            if self.status >= 200 or self.status == 101:
                break
        if self.status < 200:
            raise BadMessage(400, "It has no final answer")
        self.chunked, self.length = headers.framing()
        if self._method == "HEAD" or self.status in (204, 304):
            self.chunked, self.length = False, 0
        elif self.chunked:
            self.length = None
        closes = "close" in headers.members("connection") or line.startswith(b"HTTP/1.0")
        self.keeps = (self.chunked or self.length is not None) and not closes

    def release(self) -> bool:
        """Let go of the connection; False unless it can be used again."""
        stream, self.fp = self.fp, None  # else it would close the connection
        stream.wait = never_wait
        return self.keeps and not stream.ahead  # something came that nobody asked for


class Upstream(http.client.HTTPConnection):
    """A connection to the model server. request() of the library takes ASCII targets only, and
    sends head and body apart: the server wakes up twice."""

    sock: Any  # a Stream

    def __init__(self, url: Url, host: str, timeout: float, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, url.port or (443 if tls else 80), timeout)
        self.url, self.tls = url, tls

    def connect(self) -> None:
        """HTTPSConnection of the library is another class."""
        super().connect()
        if self.tls is not None:
            self.sock = self.tls.wrap_socket(self.sock, server_hostname=self.host)
        self.sock = Stream(self.sock, never_wait, ConnectionError, EOFError)

    def look_for_answer(self) -> None:
        """Raises ConnectionError when the final answer or the end of the connection came."""
        ended, ahead = not self.sock.read_ahead(), self.sock.ahead
        if ended or FINAL_STATUS.search(ahead) or len(ahead) > HEAD_LIMIT:
            raise ConnectionError("it answers before it has the whole request")


class Tap:
    """The start and the end of an answer, for its usage; if wanted, the whole."""

    def __init__(self) -> None:
        self.data, self.cut = bytearray(), False  # without its middle
        self.whole: bytearray | None = None
        self.heard = 0, UNREAD  # what so many bytes say

    def add(self, data: bytes) -> None:
        self.data += data
        if self.whole is not None:
            self.whole += data
            if len(self.whole) > AHEAD_BYTES:
                self.whole = None
        if len(self.data) > 2 * TAP_BYTES:
            self.cut = True
            del self.data[TAP_BYTES // 4 : -TAP_BYTES]

    def windows(self) -> tuple[bytes, bytes]:
        """(start, end) of the answer; of a short one (all of it, b"")."""
        first = TAP_BYTES // 4 if self.cut else len(self.data)
        return bytes(self.data[:first]), bytes(self.data[first:])


ERROR_KINDS = {403: "permission_error", 413: "request_too_large", 503: "overloaded_error"}
FOREIGN = "Pages of other sites may send application/json only"
TOO_LONG = "The body is longer than MAX_BODY_MB allows"


def error_body(status: int, message: str) -> bytes:
    """As the SDKs of OpenAI and of Anthropic expect it."""
    kind = ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return dump({"type": "error", "error": {"message": message, "type": kind, "code": status}})


class Relay(BaseHTTPRequestHandler):
    """A client's connection."""

    server: Server
    protocol_version = request_version = "HTTP/1.1"
    rfile: Any  # a Stream
    _headers_buffer: list[bytes]  # what is to be sent next
    upstream: Any = None  # an Upstream, while a request is served
    kept: Any = None  # an Upstream, between two requests
    exchange: Any = None  # an Exchange, likewise
    until = 0.0  # the client has to send by then
    abort = False  # only a reset shows that an answer was cut
    linger = False  # the client is still sending
    due = 0.0  # a fast stream's next piece
    core: Any = None  # its thread's only one

    def setup(self) -> None:
        self.proxy, self.socket = self.server.proxy, self.request
        self.config = self.proxy.config
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request = Stream(self.socket, self.wait_for_client, ClientGone, ClientGone)
        self._headers_buffer = []
        self.until = monotonic() + self.config.header_timeout
        super().setup()

    def handle_one_request(self) -> None:
        """In the library a head may take for ever (each read has a time-out of its own), methods
        need a do_ function, and errors are HTML pages."""
        self.command = ""
        self.close_connection, status, fault = True, 0, ""
        self.held = 0  # bytes of the request's body
        self.server.place(self)
        self.server.waiting[self.socket] = False
        try:
            if self.proxy.server is not None and (request := self.read_request()):
                self.server.waiting[self.socket] = True
                fault = self.serve(request)
        except Refused as refused:
            self.close_connection = self.linger = True
            status, fault = refused.args[0], f"{refused.args[1]}."
            if self.exchange is None:  # else it has a line of its own
                self.proxy.log.info("refused | status=%d | %s", status, fault)
            with suppress(ClientGone):
                body = error_body(status, fault)
                headers = [("Retry-After", "1")] * (status == 503)
                self.respond((status, body, headers, "application/json"))
        except (ClientGone, OSError):
            self.close_connection, fault = True, "client left"
        finally:
            self.server.waiting.pop(self.socket, None)
            self.server.hold(-self.held)
            exchange, self.exchange = self.exchange, None
            if exchange is not None:
                exchange.status, exchange.fault = status or exchange.status, fault
                self.proxy.finished(exchange)
            self.until = monotonic() + KEEP_SECONDS

    def finish(self) -> None:
        """Close; after unread bytes that would be a reset, and lose the answer (RFC 9112 9.6)."""
        with suppress(ClientGone, Refused, OSError):
            if self.abort:
                option = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
                self.socket.close()
            self.socket.shutdown(socket.SHUT_WR)
            self.server.waiting[self.socket] = False
            end = monotonic() + LINGER_SECONDS
            self.until = end if self.linger else 0.0
            while self.rfile.read1(PIECE_BYTES) and monotonic() < end:
                pass
        self.server.waiting.pop(self.socket, None)
        if self.kept is not None:
            self.kept.close()
        self.request.wait = never_wait  # else a reference cycle
        super().finish()

    def wait_for_client(self, events: int) -> None:
        """Raises Refused when it is slow, ClientGone when it does not read, and ConnectionError
        when the server answers already."""
        server, wanted = self.upstream or self.kept, {self.request.descriptor: events}
        if events == WRITE:
            if not poll(wanted, SEND_SECONDS):
                raise ClientGone
            return
        if server is not None:
            wanted[server.sock.descriptor] = READ
        found = poll(wanted, self.until - monotonic())
        if not found:
            raise Refused(408, "Too slow; a body has a minute for each MB")
        if server is not None and server.sock.descriptor in found:
            if server is not self.kept:
                server.look_for_answer()
            else:  # it closes what is idle
                server.close()
                self.kept = None

    def wait_for_server(self, events: int) -> None:
        """Send what there is of the answer, and wait for more; a fast stream waits longer. Raises
        TimeoutError."""
        if self._headers_buffer:
            self.flush_headers()
        exchange = self.exchange
        if exchange.explained or not self.watch(events, QUIET_SECONDS):
            self.proxy.explain(exchange)
            if not self.watch(events, self.config.read_timeout):
                raise TimeoutError("nothing came within READ_TIMEOUT")
        if exchange.begun and exchange.stream and self.upstream.tls is None:
            if (early := self.due - monotonic()) > 0:
                time.sleep(early)
            self.due = monotonic() + min(PIECE_DELAY, PIECE_SECONDS * self.proxy.running)

    def watch(self, events: int, seconds: float) -> int:
        """What happens on the server's socket, if there is one; 0: nothing in so many seconds.
        Raises ClientGone when the client hangs up, or half of it, as for llama-server itself."""
        client = self.request
        while True:
            room = len(client.ahead) < HEAD_LIMIT  # for pipelined requests
            wanted = {client.descriptor: READ if room else ENDED}
            if self.upstream is not None:
                wanted[self.upstream.sock.descriptor] = events | READ
            found = poll(wanted, seconds)
            more = found.pop(client.descriptor, 0)
            if more and not (room and client.read_ahead()):
                raise ClientGone
            for happened in found.values():
                if events == WRITE and happened & ~WRITE:
                    self.upstream.look_for_answer()
                return happened
            if not more:
                return 0

    def read_request(self) -> Request | None:
        """The next head (RFC 9112 sections 3 and 6.3), or None. The library splits the first line
        at any white space, makes /x of //x, and overlooks `Connection: close, x`."""
        try:
            while (start := self.rfile.peek()) in b"\r\n":
                self.rfile.take(1)
        except Refused:  # nothing came
            return None
        if not re.match(TOKEN, chr(start)):
            raise Refused(400, "This is not HTTP; the address may need http://, not https://")
        self.until = monotonic() + self.config.header_timeout
        line = self.rfile.readline(HEAD_LIMIT, 414)
        match = REQUEST_LINE.fullmatch(line.decode("latin-1"))
        if not match:
            raise Refused(400, "This is no HTTP/1.1 request line")
        method, path, old = match[1], match[2], match[4] == "0"
        if absolute := re.match("(?i)https?://[^/?#]*", path):
            path = "/" + path[absolute.end() :].removeprefix("/")
        self.command = method
        headers = read_headers(self.rfile, HEAD_LIMIT - len(line))
        chunked, length = headers.framing()
        self.close_connection = old or "close" in headers.members("connection")
        request = Request(method, path, headers, old, length, chunked)
        twice = any(len(headers.all(name)) > 1 for name in ("host", "origin", "sec-fetch-site"))
        host = request.get("host")
        scheme, _, place = request.get("origin").lower().partition("://")
        foreign = scheme in ("http", "https") and place != host.lower()
        foreign = foreign or request.get("sec-fetch-site").lower() == "cross-site"
        # For JSON a browser asks first (CORS preflight).
        kind = request.get("content-type").partition(";")[0].strip().lower()
        unknown = host and self.proxy.loopback_only and not self.proxy.known_host(host)
        for wrong, status, text in (
            (match[3] != "1", 505, "Only HTTP/1.0 and HTTP/1.1 are spoken here"),
            (chunked and (length is not None or old), 400, "Content-Length and Transfer-Encoding"),
            (not (old or headers.all("host")), 400, "A request needs a Host header"),
            (twice, 400, "Host, Origin and Sec-Fetch-Site can stand there once"),
            (method == "CONNECT", 405, "Set this address as base URL, not as HTTP_PROXY"),
            (path[0] != "/" and (method, path) != ("OPTIONS", "*"), 400, "The target is no path"),
            ((length or 0) > self.config.max_body_mb << 20, 413, TOO_LONG),
            # The page had its own name resolve to this machine (DNS rebinding).
            (unknown, 403, "Unknown Host; see ALLOWED_HOSTS"),
            (foreign and method == "POST" and kind != "application/json", 403, FOREIGN),
        ):
            if wrong:
                raise Refused(status, text)
        return request

    def body(self, request: Request) -> Iterator[bytes]:
        """A request's body as it comes, in its time."""
        if not request.chunked and not request.length:
            return
        if request.get("expect").lower() == "100-continue" and not request.old:
            self.until = 0.0
            try:
                self.rfile.peek()  # the body may be here already
            except Refused:
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.until = monotonic() + BODY_SECONDS
        limit = self.config.max_body_mb << 20
        for _, data in body_parts(self.rfile, request.chunked, request.length or 0, limit):
            yield data
            self.until += BODY_SECONDS * len(data) / (1 << 20)

    def read_body(self, request: Request) -> bytearray:
        body = bytearray()
        for data in self.body(request):
            body += data
            self.held += len(data)
            if not self.server.hold(len(data)):
                raise Refused(503, "All bodies together take too much memory")
        self.server.waiting.pop(self.socket, None)
        return body

    def serve(self, request: Request) -> str:
        """Answer a request; returns what went wrong, or ''."""
        if re.match(r"/kvproxy([/?]|\Z)", request.path):
            self.read_body(request)
            self.respond(self.proxy.pages.answer(request, self.client_address[0]))
            return ""
        exchange = self.exchange = Exchange(request, self.client_address[0])
        self.proxy.active[exchange] = None
        prompt = exchange.dialect is not None and request.method == "POST"
        exchange.passes = bool(request.length) and not prompt
        if prompt or request.chunked:
            exchange.received = exchange.forwarded = self.read_body(request)
        if prompt and request.get("content-encoding"):
            exchange.report.note = "compressed"
        elif prompt:
            self.proxy.prepare(exchange)
        self.proxy.warmup.hold(exchange, self.watch)
        return self.forward(exchange)

    def begin_answer(self, status: int, reason: str | None, lines: list[str]) -> None:
        """Make an answer's head. It goes with the first bytes of the body: these may be bad."""
        if self.close_connection:
            lines.append("Connection: close")
        self._headers_buffer = []
        self.send_response_only(status, reason)  # send_response() would add Server and Date
        self._headers_buffer.append("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def respond(self, answer: Answer) -> None:
        status, body, headers, kind = answer
        lines = [f"Content-Type: {kind}", f"Content-Length: {len(body)}", "Cache-Control: no-store"]
        lines += map(": ".join, headers)
        self.begin_answer(status, None, lines)
        if self.command != "HEAD":
            self._headers_buffer.append(bytes(body))
        self.flush_headers()

    def forward(self, exchange: Exchange) -> str:
        """Send the request on and relay the answer; returns why that was cut, or ''. It is repeated
        only where nothing came on a used connection (RFC 9112 section 9.3.1)."""
        backend = self.proxy.backend
        upstream, self.kept = self.kept, None
        if upstream is not None and (
            exchange.passes or not upstream.sock.read_ahead() or upstream.sock.ahead
        ):  # it ended, or unasked bytes came
            upstream.close()
            upstream = None
        reused = upstream is not None
        try:
            upstream = self.upstream = upstream or backend.connect()
            upstream.sock.wait = self.wait_for_server
            if not reused:
                self.watch(READ, 0)  # the client may have left by now
            whole = self.send_request(upstream, exchange)
            response = Response(upstream.sock, method=exchange.request.method)
            response.begin()
            self.relay(response, exchange)
            if response.release() and whole:
                self.kept = upstream
            return ""
        except (OSError, EOFError, BadMessage) as fault:
            if exchange.begun or (exchange.status and not self._headers_buffer):
                self.close_connection = True
                self.flush_headers()
                return f"cut: {fault.args[-1]}"
            silent = upstream is None or isinstance(fault, http.client.RemoteDisconnected)
            if not (silent and reused) or exchange.passes:
                status = 504 if isinstance(fault, TimeoutError) else 502
                text = f"No answer from the model server at {backend.name()} ({fault.args[-1]})"
                if silent:
                    backend.lost()
                    text += f". Is it running? {USUAL_PORTS} Set BACKEND_URL to its address"
                raise Refused(status, text) from None
        finally:
            self.upstream = None
            if upstream is not None and upstream is not self.kept:
                upstream.close()
        return self.forward(exchange)

    def send_request(self, upstream: Upstream, exchange: Exchange) -> bool:
        """Returns False when the server answers before it has the whole request."""
        request, body = exchange.request, exchange.forwarded
        lines = [f"{request.method} {under(upstream.url, request.path)} HTTP/1.1"]
        lines += [f"Host: {upstream.url.netloc}", *request.headers.end_to_end(WRITTEN_ANEW)]
        if exchange.trace.conversation:
            lines.append(f"X-KVProxy-Conversation: {exchange.trace.conversation}")
        if request.chunked or request.length is not None:
            lines.append(f"Content-Length: {request.length if body is None else len(body)}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        whole = True
        try:
            upstream.send(head + (body or b""))
            for data in self.body(request) if exchange.passes else ():
                upstream.send(data)
        except ConnectionError:  # an early answer (413, 401), or one before the close
            whole = False
            if exchange.passes:  # the rest is no request
                self.close_connection = self.linger = True
        self.server.waiting.pop(self.socket, None)
        exchange.sent = monotonic()
        return whole

    def relay(self, response: Response, exchange: Exchange) -> None:
        """Pass the answer on as it comes, byte for byte."""
        self.proxy.found()
        exchange.status = response.status
        old, by_length = exchange.request.old, response.length is not None
        self.close_connection |= old or self.proxy.server is None
        self.abort = old and not by_length  # a close would look like its end
        if response.headers.all("content-encoding"):
            exchange.tap = None
        lines = response.headers.end_to_end(() if by_length else ("content-length",))
        lines += map(": ".join, self.proxy.diagnosis(exchange).items())
        if not by_length and not old:
            lines.append("Transfer-Encoding: chunked")
        self.begin_answer(response.status, response.reason, lines)
        response.headers = None  # a stream may last
        for received, payload in body_parts(response.fp, response.chunked, response.length):
            exchange.begun = exchange.begun or monotonic()
            if exchange.tap is not None:
                exchange.tap.add(payload)
            self._headers_buffer.append(payload if old else received)  # wait_for_server() sends it
        self.flush_headers()
        self.abort = False


class Exchange:
    """A request on its way, and what is remembered of it."""

    client = b""  # a hash of who sent it
    number = 0
    sent = ended = 0.0
    begun = 0.0  # the first byte of the answer's body: the prompt was read
    received: bytes | bytearray | None = None
    forwarded: bytes | bytearray | None = None
    came: View | None = None
    view: View | None = None
    case: Case | None = None  # until the verdict is known
    verdict: Verdict | None = None
    missed = False  # too little of it was reused
    straight = 0.0  # the part that would be reused without kvproxy
    ahead: int | None = None  # tokens that were read before it came
    explained = False
    usage = Usage()
    status, fault = 0, ""
    error = answer = ""  # what the server said, in part
    model, stream = "", False
    side = ""  # see side_of()
    passes = False  # its body goes out as it comes, only once
    tap: Tap | None

    def __init__(self, request: Request, address: str = "") -> None:
        self.request, self.address = request, address  # of the client
        self.dialect, self.counting = dialect_of(request.path)
        self.time, self.started = time.time(), monotonic()
        self.report, self.trace, self.tap = Report(), Trace(), Tap()

    def size(self) -> int:
        same = self.forwarded is self.received
        return len(self.received or b"") + (0 if same else len(self.forwarded or b""))


# ====== Server: the backend, the listening socket, and Proxy, which everything hangs on ======

CANDIDATES = ("http://127.0.0.1:8080", "http://127.0.0.1:9931", "http://127.0.0.1:12345")
USUAL_PORTS = "llama-server listens on 9931 (newer) or 8080 (older), LM Studio on 1234."
HOST = re.compile(r"([a-z0-9._-]{1,255}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
LLAMA = "llama-server"
# owned_by in /v1/models -> product
OWNERS = {"llamacpp": LLAMA, "organization_owner": "LM Studio", "llama-swap": "llama-swap"}
# status of /v1/models -> what that means
STATES = {401: "it wants an API key", 403: "it wants another key", 503: "it is loading its model"}


class Backend:
    """Where the model server is; with BACKEND_URL unset it is looked for."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.url = urlsplit(config.backend_url) if config.backend_url else None
        self.lost_at = self.next_look = 0.0
        self.away: bool | None = None  # as the last request had it
        self.known: Json = {}  # what it told of itself
        self.tls = None
        if self.url and self.url.scheme == "https":
            self.tls = ssl.create_default_context()

    def name(self) -> str:
        return self.url.geturl() if self.url else " or ".join(CANDIDATES)

    def locate(self) -> Url:
        """The server's URL. Raises OSError when none is set and none answers."""
        if self.url:
            return self.url
        for url in map(urlsplit, CANDIDATES):
            if url.port != self.config.listen_port:  # that is this proxy
                there = copy.copy(self)
                there.url = url
                answer = members(there.ask("/v1/models", 1.0)[1])
                if answer.keys() & {"data", "models", "error"}:
                    self.url = url
                    return url
        raise ConnectionRefusedError("no server answers there")

    def connect(self) -> Upstream:
        url = self.locate()
        upstream = Upstream(url, url.hostname or "", self.config.connect_timeout, self.tls)
        if upstream.host == "localhost" and self.tls is None:
            upstream.host = "127.0.0.1"  # Windows would try ::1 first, for 2 s
        upstream.connect()
        return upstream

    def lost(self) -> None:
        self.lost_at, self.away, self.known = monotonic(), True, {}
        if not self.config.backend_url:
            self.url = None

    def look(self) -> None:
        """See whether it is there; one that was is asked each 10 seconds at most."""
        now = monotonic()
        if not self.known or now >= self.next_look:
            self.next_look = now + 10
            if not self.describe(1.0):
                self.lost()

    def ask(
        self,
        path: str,
        timeout: float = 3.0,
        body: bytes | None = None,
        keys: Texts | None = None,
        prefill: Prefill | None = None,
    ) -> tuple[int, Any]:
        """(status, parsed JSON or text) of a GET, or of a POST with a body; (0, reason) without."""
        headers = {"Content-Type": "application/json", **(keys or {})}
        try:
            url = self.locate()
            secure = url.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            with closing(kind(url.hostname or "", url.port, timeout=timeout)) as link:
                link.connect()
                if prefill:
                    prefill.sock = link.sock
                if prefill and prefill.given_up:
                    return 0, "given up"
                link.request("GET" if body is None else "POST", under(url, path), body, headers)
                response = link.getresponse()
                text = response.read(8 << 20).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return 0, str(error)
        with suppress(*UNPARSED):
            return response.status, json.loads(text)
        return response.status, text

    def describe(self, timeout: float = 3.0, keys: Texts | None = None) -> Json:
        """What the server tells of itself; {} without an answer."""
        status, answer = self.ask("/v1/models", timeout, None, keys)
        props = members(self.ask("/props", timeout, None, keys)[1]) if status else {}
        model = members(next(iter(listed(members(answer).get("data"))), None))
        owner = str(model.get("owned_by") or "a model server")
        has_props = props and "error" not in props  # LM Studio says 200 to any path
        product = LLAMA if has_props else OWNERS.get(owner, owner)
        context = members(props.get("default_generation_settings")).get("n_ctx")
        if product == "LM Studio":
            models = listed(members(self.ask("/api/v0/models", timeout)[1]).get("data"))
            loaded = [one for one in map(members, models) if one.get("state") == "loaded"]
            model = next((one for one in loaded if one.get("type") != "embeddings"), model)
            context = model.get("loaded_context_length")
        path = str(props.get("model_path") or "")
        found = {
            "product": product,
            "build": props.get("build_info"),
            "slots": props.get("total_slots"),
            "context": context,
            "model": re.split(r"[\\/]", path)[-1] or model.get("id"),
            "state": "" if status == 200 else STATES.get(status, f"it answers {status}"),
        }
        self.known = {name: value for name, value in found.items() if value and status}
        return self.known


def hang_up(sock: Any) -> None:
    with suppress(OSError, AttributeError):  # it is closed, or None
        sock.shutdown(socket.SHUT_RDWR)


def members(value: Any) -> Json:
    """Those of a JSON object; none of any other value."""
    return value if isinstance(value, dict) else {}


def described(found: Json) -> str:
    plain = ("product", "state")
    return ", ".join(f"{n}" if key in plain else f"{key} {n}" for key, n in found.items())


def under(url: Url, target: str) -> str:
    """A request target under a URL's path, whose /v1 at the end stands in the target."""
    return url.path.rstrip("/").removesuffix("/v1") + target


def api_key() -> Texts:
    key = os.environ.get("API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


CROWD = 16  # connections


class Server(ThreadingHTTPServer):
    request_queue_size = 1024  # with 5, a burst waits for SYN retransmits of 1, 3, 7 s
    allow_reuse_address = os.name != "nt"  # on Windows two servers could share a port

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.open: set[socket.socket] = set()
        # whose clients have to send, oldest first -> whether in a request
        self.waiting = OrderedDict[socket.socket, bool]()
        self.cores: set[int] = getattr(os, "sched_getaffinity", lambda _: set())(0)
        self.core: set[int] | None = None  # of a crowd
        self.guard = Lock()
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

    def server_bind(self) -> None:  # the library's asks DNS
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        socketserver.TCPServer.server_bind(self)

    def hold(self, size: int) -> bool:
        """Count bytes of bodies in memory; whether there may be so many."""
        with self.guard:
            self.held += size
            return self.held <= self.most_held

    def place(self, relay: Relay) -> None:
        """Let many connections' threads share a core (Linux): to hand the interpreter to another
        core costs more than most of their work."""
        crowd, core = len(self.open) > CROWD, self.core
        with suppress(Exception):  # else anywhere
            if crowd and not core:
                with open("/proc/thread-self/stat", "rb") as file:
                    core = {int(file.read().rpartition(b") ")[2].split()[36])}
            core = self.core = core if crowd else None
            if relay.core != core:
                os.sched_setaffinity(0, core or self.cores)
                relay.core = core

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self.make_room()
                time.sleep(0.05)  # else socketserver burns a core
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.open) < self.most_open or self.make_room():
            self.open.add(request)
            with suppress(RuntimeError):  # can't start new thread
                return super().process_request(request, client_address)
        body = error_body(503, "Too many connections (MAX_CONNECTIONS).")
        head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: %d\r\nRetry-After: 1\r\nConnection: close\r\n\r\n" % len(body)
        with suppress(OSError):
            request.settimeout(0.2)
            request.sendall(head + body)
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
ERROR_SHOWN, ANSWER_SHOWN = 200, 500
CONTEXT_ADVICE = " (kvproxy: raise -c, lower -np, or let the agent compact earlier)"


class Proxy:
    """A running kvproxy: a context manager, or call start() and stop().

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
        self.life, self.telling = Lock(), Lock()  # of start(); of the log
        self.active = dict[Exchange, None]()  # requests being served; oldest first
        self.last_end = monotonic()
        self.allowed = set(re.split(r"[,\s]+", config.allowed_hosts.lower()))
        self.loopback_only = is_loopback(config.listen_host)

    def start(self) -> Proxy:
        """Listen and serve in the background; nothing if it does already."""
        config, tell = self.config, self.log.warning
        with self.life:
            if self.server is not None:
                return self
            if path := config.capture_file:
                self.capture = PrivateFile("CAPTURE_FILE", path, tell, config.capture_mb << 20)
            with stops_the_start("WARMUP_FILE", config.warmup_file):
                self.warmup.load()
            self.server = Server(self)
            self.warmup.start()
            serve = self.server.serve_forever
            Thread(target=serve, args=(0.2,), name="kvproxy", daemon=True).start()
        return self

    def stop(self, grace: float = DRAIN_SECONDS) -> None:
        """Take no more connections, let answers end for `grace` seconds, then close everything."""
        server, self.server = self.server, None
        if server is None:
            return
        self.warmup.stop()
        hang_up(server.socket)  # wakes its thread, on Linux
        server.shutdown()
        server.server_close()
        until = monotonic() + grace
        while server.open and (now := monotonic()) < until + 2:
            idle = [one for one, begun in list(server.waiting.items()) if not begun]
            for connection in idle if now < until else list(server.open):
                hang_up(connection)
            time.sleep(0.001)
        with suppress(OSError):
            if self.capture:
                self.capture.close()

    def __enter__(self) -> Proxy:  # noqa: PYI034
        return self.start()

    def __exit__(self, fault: object, *_: object) -> None:
        self.stop(0 if fault else DRAIN_SECONDS)

    @property
    def url(self) -> str:
        """http://host:port, with the port that was taken."""
        if self.server is None:
            raise RuntimeError("the proxy is not running")
        return url_of(*map(str, self.server.server_address[:2]))

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
            came = exchange.came = view_of({**view.body}, dialect)
            came.turns = came.turns or view.turns[:]
            exchange.stream = bool(view.body.get("stream"))
            exchange.model = visible(str(view.body.get("model") or "")[:80])
            # Nobody's text may reach anybody else's prompt.
            exchange.client = digest(exchange.address, *map(request.get, CLIENT_HEADERS))
            exchange.side = side_of(view, request.get(AGENT_ID))
            asker = Asker(exchange.client, len(raw), not exchange.counting)
            exchange.trace = trace = self.editor.apply(view, exchange.report, asker)
            if trace.record:
                trace.record.tap = exchange.tap
            if exchange.report.edits():
                exchange.forwarded = view.dump()
            exchange.view = view
        except Unreadable as error:
            exchange.report = Report(note=str(error))
        except RecursionError:
            exchange.report = Report(note="nested too deeply")
        except Exception:
            exchange.report = Report(note="internal error")
            self.log.exception("a body could not be edited")

    def explain(self, exchange: Exchange) -> None:
        """Compare a request with those before it, once."""
        view, came, explained = exchange.view, exchange.came, exchange.explained
        exchange.explained, exchange.came = True, None
        if not view or not came or exchange.counting or explained:
            return
        try:
            edited = exchange.forwarded is not exchange.received
            original = Prompt(came) if edited else None
            talk, now = exchange.trace.conversation, monotonic()
            prompt = Prompt(view, talk, exchange.side, now, original)
            exchange.case = case = self.ledger.judge(prompt, self.backend.lost_at)
            case.idle, case.ahead = exchange.started - self.last_end, exchange.ahead
            exchange.verdict, exchange.straight = case.verdict, case.straight
        except RecursionError:
            pass  # no server reads what is nested so deeply
        except Exception:
            self.log.exception("a request could not be explained")

    def diagnosis(self, exchange: Exchange) -> Texts:
        if exchange.request.get("x-cache-diagnostic") != "true":
            return {}
        self.explain(exchange)
        counts, verdict = vars(exchange.report), exchange.verdict
        removed = [f"{name}={count}" for name, count in counts.items() if name != "note"]
        told = {"Removed": " ".join(removed), "Replayed": str(exchange.report.replayed)}
        if verdict is not None:
            told |= {"Prefix": f"{verdict.share:.3f}", "Verdict": verdict.name}
        return {f"X-KVProxy-{name}": value for name, value in told.items()}

    def found(self) -> None:
        if self.backend.away:
            self.log.info("backend found: %s answers", self.backend.name())
        self.backend.away = False

    def finished(self, exchange: Exchange) -> None:
        exchange.ended = self.last_end = monotonic()
        self.active.pop(exchange, None)
        try:
            self.settle(exchange)
            self.record(exchange)
        except Exception:
            self.log.exception("a finished request could not be recorded")

    def settle(self, exchange: Exchange) -> None:
        """Read an answer's beginning and end, and let go of what is needed no longer."""
        tap, trace, view = exchange.tap, exchange.trace, exchange.view
        first, last = tap.windows() if tap else (b"", b"")
        events = answer_events(first, last) if exchange.status == 200 and exchange.dialect else []
        error = first if exchange.status >= 400 else b""
        for event in chain(*events):
            if event.get("error"):  # in the middle of a stream
                error = dump(event)
        answered = exchange.status == 200 and not error
        if answered or (exchange.sent and not exchange.status):  # or the client left
            self.explain(exchange)
        elif exchange.status == 503:  # llama-server: loading its model
            self.backend.lost_at = exchange.ended
        if answered:
            exchange.usage = usage_of(events)
            exchange.answer = "".join([one for one, _ in answer_parts(events[:1])])[:ANSWER_SHOWN]
        else:
            exchange.error = error_text(error, exchange.request)
            exchange.verdict = exchange.case = None
        full = exchange.status in (200, 400) and CONTEXT_FULL.search(error)
        exchange.error += CONTEXT_ADVICE * bool(full)
        if record := trace.record:
            self.replay.settle(trace, record, heard_answer(events) if answered else None)
            if full:
                self.replay.lines.drop(record.line)
        if exchange.verdict and view:
            if not exchange.verdict.side:
                self.warmup.remember(exchange, view)
            self.warmup.plan(exchange, view, exchange.verdict.side)
        exchange.tap = exchange.view = exchange.came = None
        exchange.trace = Trace(trace.conversation)

    def record(self, exchange: Exchange) -> None:
        """Settle a verdict, for which an idle server is asked; write page, log and capture."""
        case, exchange.case = exchange.case, None
        if case:
            ask = missing_tokens(case, exchange.usage) and not self.running
            if ask and not self.backend.known:
                self.backend.describe(1.0)
            if exchange.stream and exchange.begun:
                case.first_byte = exchange.begun - exchange.sent
            settle(case, exchange.usage, self.config)
            if ask and case.verdict.name == "lost":
                self.ask_template(exchange, case)
            self.warmup.notice(exchange, case)
        if self.capture and exchange.received is not None:
            row = json.dumps(capture_row(exchange))
            self.capture.handle(logging.makeLogRecord({"msg": row}))
        with self.metrics.guard:
            warning = self.metrics.count(exchange)
        if case:
            case.prompt.number = exchange.number
        level = logging.WARNING if exchange.error or exchange.status >= 500 else logging.INFO
        news = self.editor.lifter.learner.news
        with self.telling:  # a request's lines stay together
            while news:
                told = learned(news.popleft(), self.config)
                self.log.info("learned: %s; to fix it: %s", *told)
            for line in log_lines(exchange) if self.log.isEnabledFor(level) else ():
                self.log.log(level, "%s", line, extra={"request": f"#{exchange.number} "})
            if warning:
                self.log.warning("%s", warning)

    def ask_template(self, exchange: Exchange, case: Case) -> None:
        """Whether the server renders old turns otherwise now, and so had to read them again."""
        verdict, base, dialect = case.verdict, case.base, exchange.dialect
        if not base or not case.whole or not dialect or dialect.name != "chat":
            return  # /apply-template takes chats only
        before = [one for one in list(self.metrics.recent) if one.number == base.number]
        prompts, keys = list[str](), keys_of(exchange.request)
        for one in (*before, exchange):
            body = bytes(one.forwarded or b"")
            answer = self.backend.ask("/apply-template", 1.0, body, keys)[1]
            prompts.append(str(members(answer).get("prompt") or ""))
        if len(prompts) == 2 and all(prompts):
            rendered_otherwise(verdict, base, *prompts)
        if verdict.name == "template":
            verdict.advice = (
                f"the chat template renders {verdict.where} otherwise than before"
                f" ({verdict.before!r} -> {verdict.after!r}), so {exchange.usage.cached:,} of"
                f" {verdict.expected:,} tokens were reused: {advice('template', self.config)}"
            )


def url_of(host: str, port: str) -> str:
    """How this machine reaches what listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def keys_of(request: Request) -> Texts:
    return {name: key for name in ("authorization", "x-api-key") if (key := request.get(name))}


@functools.lru_cache(64)
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
    with suppress(*UNPARSED):
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
    """The log of one request. Scripts read its first fields."""
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
    total = sum([one.usage.prompt for one in prompts])
    return sum([one.usage.cached for one in prompts]) / total if total else None


REUSED, READ_ANEW = 'state="reused"', 'state="read"'  # labels of prompt_tokens_total


class Metrics:
    KEEP_BYTES = 32 << 20  # of bodies for the status page

    def __init__(self, config: Config) -> None:
        self.config, self.guard = config, Lock()
        self.recent = deque[Exchange]()
        self.kept = 0  # bytes of their bodies
        self.window = deque[Any](maxlen=20)  # exchanges whose reuse was reported
        self.failure: tuple[int, str, str] | None = None  # of the last prompt
        # (name, label) -> number
        self.counts: dict[tuple[str, str], float] = defaultdict(int)
        self.counts["build_info", f'version="{__version__}"'] = 1
        self.number = self.judged = self.reported = 0  # requests; with a verdict; with numbers
        self.long_ms = self.long_tokens = 0.0  # of all long reads
        self.warned = False

    def count(self, exchange: Exchange) -> str:
        """Enter a finished request; returns a warning to log, or ''. The caller has the guard."""
        counts, report = self.counts, exchange.report
        verdict, usage = exchange.verdict, exchange.usage
        self.number += 1
        exchange.number = self.number
        counts["requests_total", f'status="{exchange.status}"'] += 1
        for name, number in vars(report).items():
            if number and name not in ("items", "items_modified", "note"):
                counts["edits_total", f'kind="{name}"'] += number
        if report.note:
            reason = report.note.partition(" (")[0]
            counts["untouched_total", f'reason="{reason}"'] += 1
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
        counts["prompt_tokens_total", REUSED] += cached
        counts["prompt_tokens_total", READ_ANEW] += read
        ms = usage.prompt_ms
        if ms is None and exchange.stream and exchange.begun:
            ms = 1000 * (exchange.begun - exchange.sent)  # it begins when the prompt is read
        if ms is not None and read >= 512:  # fewer take longer for each
            self.long_ms += ms
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
        names = [one.verdict.name for one in self.window]
        faults = [name for name in names if name not in ("extended", "cold")]
        name, count = Counter(faults or names).most_common(1)[0]
        return f"most often ({count} of {len(names)}): {name}, {VERDICTS[name]}"

    def keep(self, exchange: Exchange) -> None:
        """Keep a request for the page; the oldest go when all take too much."""
        self.recent.append(exchange)
        self.kept += exchange.size()
        while len(self.recent) > self.config.keep_requests or self.kept > self.KEEP_BYTES:
            oldest = self.recent.popleft()
            self.kept -= oldest.size()
            oldest.received = oldest.forwarded = None


# Their values are not written down.
SECRET_NAME = re.compile(
    r"(?i)auth(?!ors?(?![a-z]))|cookie|(?<!cache_)key(?!_values)|token(?!s|i|_ids)|secret|passw"
    r"|passphrase|credential|signature|session"
    r"|(?<![a-z])(?:pass|pwd|jwt|sig|code|pat|access|bearer)(?![a-z])"
)
PROMPT_MEMBERS = ("messages", "input", "prompt", "system", "instructions", "function", "parameters",
                  "input_schema", "schema")  # fmt: skip


def without_secrets(value: Any, name: str = "") -> Any:
    """A member of a parsed body. What a prompt holds stays."""
    if value is not None and SECRET_NAME.search(name[-64:]):
        return "***"
    if name in PROMPT_MEMBERS:
        return value
    if isinstance(value, dict):
        return {key: without_secrets(member, key) for key, member in value.items()}
    if isinstance(value, list):
        return [without_secrets(member) for member in value]
    return value


def capture_row(exchange: Exchange) -> Json:
    headers, received = Texts(), exchange.received or b""
    for name, value in exchange.request.headers.lines:
        address = unquote(value) if "=" in value else ""
        headers[name] = "***" if SECRET_NAME.search(f"{name} {address}") else value
    row = {**row_of(exchange), "headers": headers, "bytes": len(received)}
    with suppress(*UNPARSED):
        row["body"] = without_secrets(parse(received))
    return row


def open_private(path: str, mode: str) -> Any:
    """A text file to write that only its owner may read. Raises OSError."""
    if os.path.isfile(path):
        with suppress(OSError):
            os.chmod(path, 0o600)
    private = functools.partial(os.open, mode=0o600)
    return open(path, mode, encoding="utf-8", errors="backslashreplace", opener=private)


@contextmanager
def stops_the_start(setting: str, path: str) -> Iterator[None]:
    """A file of a setting that cannot be used raises ConfigError."""
    try:
        yield
    except OSError as error:
        why = f"{setting}={path!r}: cannot be written ({error.strerror or error})"
        raise ConfigError(f"{why}; name a file in a folder that you may write to") from None


class PrivateFile(logging.handlers.WatchedFileHandler):
    """LOG_FILE or CAPTURE_FILE, opened anew after a rename; behind its limit it becomes FILE.1. A
    full disk is told once. Raises ConfigError."""

    def __init__(
        self, setting: str, path: str, tell: Callable[[str], Any], limit: float = math.inf
    ) -> None:
        self.setting, self.tell, self.limit = setting, tell, limit  # in bytes
        with stops_the_start(setting, path):
            super().__init__(os.path.expanduser(path))

    def _open(self) -> Any:
        return open_private(self.baseFilename, "a")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.stream and os.fstat(self.stream.fileno()).st_size >= self.limit:
                self.close()  # Windows renames no open file
                os.replace(self.baseFilename, self.baseFilename + ".1")
            super().emit(record)
        except OSError:  # it could not be opened anew
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        tell, self.tell = self.tell, lambda text: None
        with suppress(OSError):
            tell(f"{self.setting}: {self.baseFilename} cannot be written: {sys.exc_info()[1]}")
            self.close()  # drops what could not be written


# --- prompts that the server reads in idle time ---

# What stands in front of a prompt's turns, or decides how they are written.
FRONT_MEMBERS = ("model", "system", "instructions", "tools", "parallel_tool_calls", "reasoning",
                 "reasoning_effort", "chat_template_kwargs")  # fmt: skip
AHEAD_BYTES = 4 << 20  # longer prompts and answers are not read ahead
WRONG_TOKENS = 1000  # read for nothing; given up after two in a row
END = re.compile(r'"(?:finish_reason|stop_reason|status)": ?"(\w+)"')
ENDS = {"stop", "end_turn", "completed", "in_progress"}  # of whole answers without tool calls
THOUGHT = re.compile(r'"reasoning_content": ?("(?:[^"\\]|\\.)*")')


def front_members(body: Json) -> Json:
    return {name: body[name] for name in FRONT_MEMBERS if name in body}


def read_form(view: View) -> list[Any]:
    """Front and turns of a prompt, the same for all that the server reads alike."""
    turns = [turn for turn in view.turns if turn.role != "reasoning"]
    return [front_members(view.body), *[(turn.role, told_of(turn).rstrip()) for turn in turns]]


@dataclass(eq=False)
class Prefill:
    """A prompt to be read before a client's request begins with it: a head, or a conversation."""

    path: str
    view: View  # as it was forwarded
    read_at: float = 0.0  # 0: never
    whose: tuple[str, bytes] = "", b""  # conversation and client
    keys: Texts | None = None  # None: the newest client's
    answer: bytes = b""  # until it stands in `view`
    sock: socket.socket | None = None
    given_up: bool = False  # while it was read
    waiting: set[Exchange] = field(default_factory=set)  # what is held for it
    usage: Usage = field(default_factory=Usage)

    def add_answer(self) -> bool:
        """Put the answer, as the client will repeat it, behind the prompt; False if unknown."""
        if not self.answer:
            return True
        view, answer = self.view, self.answer.decode("utf-8", "replace")
        said, ends = list(answer_parts(answer_events(self.answer))), END.findall(answer)
        text, calls = "".join(words for words, _ in said), any(call for _, call in said)
        if calls or not text.strip() or not ends or not ENDS.issuperset(ends):
            return False
        item: Json = {"role": "assistant", "content": text}
        if view.dialect.name != "chat":
            kind = "output_text" if view.dialect.name == "responses" else "text"
            item["content"] = [{"type": kind, "text": text}]
        elif Prompt(view).reasoning:  # the client sends it back
            item["reasoning_content"] = "".join(map(json.loads, THOUGHT.findall(answer)))
        self.view, self.answer = replace(view, turns=[*view.turns, turn_of(item)]), b""
        return True

    def body(self) -> bytes:
        """One token is wanted, which nobody reads. Behind the prompt stands a placeholder: many
        templates render the last turns in another way until a user has spoken."""
        view = self.view
        body = {**front_members(view.body), "stream": False}
        body["max_output_tokens" if view.dialect.name == "responses" else "max_tokens"] = 1
        placeholder = turn_of({"role": "user", "content": "."})
        return View(body, view.dialect, [], [*view.turns, placeholder]).dump()

    def give_up(self) -> None:
        self.given_up = True
        hang_up(self.sock)

    def begins(self, path: str, view: View) -> bool:
        """Whether a request, as it is forwarded, begins with this prompt."""
        with suppress(RecursionError):  # nested deeply
            ours, theirs = read_form(self.view), read_form(view)
            return path == self.path and theirs[: len(ours)] == ours
        return False


class Warmup:
    """Has the server read heads after a start, the newest one to keep it warm, and after an answer
    what the next prompt begins with. One thread does it, while nothing runs."""

    FIRST_WAIT = 1.0  # seconds of quiet before a head is read
    AWAY_WAIT = 5.0  # seconds between looks at a server that is away

    def __init__(self, proxy: Proxy) -> None:
        self.proxy, self.config = proxy, proxy.config
        self.path = os.path.expanduser(self.config.warmup_file)
        self.enabled = bool(self.path or self.config.keepalive_seconds)
        self.mode = self.config.prefill_ahead if self.config.scrub else "0"
        self.heads: dict[str, Prefill] = {}  # newest last
        self.talk: Prefill | None = None  # of the newest conversation
        self.wrong: dict[str, int] = {}  # program -> wrong predictions in a row
        self.prefill: Prefill | None = None  # the one that is being read
        self.guard = Lock()
        self.written: tuple[list[str], list[Shape]] = [], []  # heads and shapes in the file
        self.keys: Texts = {}  # the newest client's
        self.state = "waiting" if self.enabled else "off"
        self.next_try = 0.0  # of heads, after a failure
        self.over = Event()

    def start(self) -> None:
        self.over.clear()
        self.thread = Thread(target=self.run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.over.set()
        with self.guard:
            if self.prefill:
                self.prefill.give_up()
        self.thread.join(5)
        self.save()

    def run(self) -> None:
        while not self.over.wait(0.1):
            try:
                self.save()
                self.step()
            except Exception:
                self.proxy.log.exception("warm-up failed")

    def step(self) -> None:
        now = monotonic()
        idle = now - self.proxy.last_end
        heads, talk = list(self.heads.values()), self.talk
        due = [head for head in heads if head.read_at <= self.proxy.backend.lost_at]
        if keepalive := self.config.keepalive_seconds:
            due += [one for one in heads[-1:] if min(idle, now - one.read_at) >= keepalive]
        if self.proxy.running:
            return
        if talk and not talk.read_at and idle >= self.config.prefill_ahead_seconds:
            talk.read_at = now  # what fails is not tried again
            if talk.add_answer():
                self.send(talk, "read ahead")
        elif due and idle >= self.FIRST_WAIT and now >= self.next_try:
            self.state = "reading"
            status, told = self.send(due[0], "warm-up")
            self.state = "warm" if status == 200 else told
            if status in (0, 502, 503, 504):
                self.next_try = monotonic() + self.AWAY_WAIT
            elif status in (401, 403):
                self.next_try = math.inf  # until a client brings keys
            else:
                due[0].read_at = monotonic()

    def send(self, prefill: Prefill, name: str) -> tuple[int, str]:
        """Have the server read a prompt; returns the status (0: no answer), and what to tell."""
        with self.guard:
            prefill.given_up, prefill.usage = False, Usage()
            if self.proxy.running or self.over.is_set():
                return 0, "interrupted"
            self.prefill = prefill  # hold() finds it from now on
        started, backend, counts = monotonic(), self.proxy.backend, self.proxy.metrics.counts
        keys, seconds = prefill.keys or self.keys, self.config.read_timeout
        try:
            status, answer = backend.ask(prefill.path, seconds, prefill.body(), keys, prefill)
            prefill.usage = usage_of([[members(answer)]])
        finally:
            self.prefill = prefill.sock = None
        told = f"the server answers {status}" if status else "interrupted"
        if status == 200:
            told = f"tokens read: {read_of(prefill.usage)}"
        elif not status and not prefill.given_up:
            backend.lost()
            told = "the server is away"
        counts["idle_tokens_total", ""] += prefill.usage.read() or 0
        self.proxy.log.info("%s | %.1f s | %s", name, monotonic() - started, told)
        return status, told

    def hold(self, exchange: Exchange, watch: Callable[[int, float], int]) -> None:
        """Have a request that begins with what the server is reading wait for that; any other ends
        it, unless a client waits. `watch` may raise ClientGone."""
        view, path = exchange.view, exchange.request.path.partition("?")[0]
        if exchange.counting or exchange.request.method in ("GET", "HEAD", "OPTIONS"):
            return
        with self.guard:
            prefill = self.prefill
        if prefill and view and prefill.begins(path, view):
            prefill.waiting.add(exchange)
            try:
                while self.prefill is prefill:  # READ_TIMEOUT at most
                    watch(0, 0.02)
            finally:
                prefill.waiting.discard(exchange)
        if prefill and not prefill.waiting:
            prefill.give_up()
        if view and not exchange.side:
            self.follow(exchange, view, path)

    def follow(self, exchange: Exchange, view: View, path: str) -> None:
        """See whether a request begins with what was read ahead, and have its answer kept."""
        client, tap, talk = client_of(exchange), exchange.tap, self.talk
        if self.mode == "1" and client not in self.wrong:
            remember(self.wrong, client, 0, 256)
        wrong = self.wrong.get(client, 2)
        if wrong > 1 or tap is None:
            return
        if talk and talk.whose == (exchange.trace.conversation, exchange.client):
            self.talk = None
            if talk.begins(path, view):
                wrong, exchange.ahead = 0, talk.usage.prompt
            elif (talk.usage.read() or 0) > WRONG_TOKENS:
                wrong += 1
                self.proxy.log.info("read ahead | %s sent another prompt", client)
        self.wrong[client] = wrong
        tap.whole = bytearray() if wrong < 2 else None

    def plan(self, exchange: Exchange, view: View, side: str) -> None:
        """After an answer: read what follows; after a side request, read it again."""
        name, tap = exchange.trace.conversation, exchange.tap
        if side:
            if self.talk and self.talk.whose[1] == exchange.client:
                self.talk.read_at = 0.0
            return
        fit = len(exchange.forwarded or b"") <= AHEAD_BYTES and not goes_on_elsewhere(view)
        fit = fit and all(turn.item and turn.role != "assistant" for turn in view.turns[-1:])
        fit = fit and view.body.get("n") in (None, 1) and not exchange.fault
        if fit and tap and tap.whole:
            path, keys = exchange.request.path.partition("?")[0], keys_of(exchange.request)
            keys["X-KVProxy-Conversation"] = name  # to the same server, if there are several
            whose = name, exchange.client
            self.talk = Prefill(path, view, 0.0, whose, keys, bytes(tap.whole))

    def notice(self, exchange: Exchange, case: Case) -> None:
        kind = case.verdict.kind
        llama = self.proxy.backend.known.get("product") == LLAMA
        side = kind == "taken" and any(one.side for one in case.between)
        helps = self.mode == "auto" and llama and (side or kind == "template")
        if helps and (client := client_of(exchange)) not in self.wrong:
            remember(self.wrong, client, 0, 256)
            why = "a side request" if side else "the template"
            self.proxy.log.info("read ahead | on for %s, because of %s", client, why)

    def load(self) -> None:
        """Read the heads of earlier runs. Raises OSError when the file cannot be written."""
        lifter, config = self.proxy.editor.lifter, self.config
        if not self.path:
            return
        open_private(self.path + ".tmp", "w").close()
        os.unlink(self.path + ".tmp")
        if not os.path.exists(self.path):
            return
        if not os.path.isfile(self.path):
            raise OSError("it is no plain file")
        try:
            with open(self.path, encoding="ascii") as file:
                heads = json.load(file)
            shapes = [Shape(*map(str, row)) for row in heads.pop("learned", ())]
            if lifter.learns:
                lifter.learner.add(shapes)
                lifter.learner.news.clear()  # they were told when they were new
            for key, head in list(heads.items())[-config.warmup_heads :]:
                view = view_of(head["body"], cast(Dialect, dialect_of(head["path"])[0]))
                if config.scrub and config.replay:
                    self.proxy.replay.tools.apply(view, ANYBODY)
                self.heads[key] = Prefill(head["path"], view)
        except Exception as error:  # noqa: BLE001 - whatever was written
            text = "WARMUP_FILE=%r cannot be read and starts anew: %r"
            self.proxy.log.warning(text, self.path, error)

    def remember(self, exchange: Exchange, view: View) -> None:
        if not self.enabled or not view.system():
            return
        self.keys, self.next_try = keys_of(exchange.request), 0.0
        path = exchange.request.path.partition("?")[0]
        front = View(front_members(view.body), view.dialect, [], view.turns[: view.leading()])
        body = front.dump()  # the view's turns would keep the whole request
        head = Prefill(path, view_of(parse(body), view.dialect), monotonic())
        key = digest(path, body).hex()
        with self.guard:
            self.heads.pop(key, None)
            self.heads[key] = head
            if len(self.heads) > self.config.warmup_heads:
                del self.heads[next(iter(self.heads))]

    def save(self) -> None:
        """Write the file if anything is new: whole, or not at all."""
        shapes, kept = list(self.proxy.editor.lifter.learner.shapes), Json()
        for key, head in self.heads.copy().items():
            kept[key] = {"path": head.path, "body": head.view.body}
        if not self.path or self.written == (list(kept), shapes):
            return
        self.written, name = (list(kept), shapes), self.path + ".tmp"
        if shapes:
            kept["learned"] = shapes
        try:
            with open_private(name, "w") as file:
                json.dump(kept, file)
            os.replace(name, self.path)
        except OSError as error:
            self.proxy.log.warning("WARMUP_FILE=%r cannot be written: %s", self.path, error)
            self.path = ""
            with suppress(OSError):
                os.unlink(name)


# ====== Status: the proxy's own endpoints, under /kvproxy ======

PAGE = """<!doctype html>
<html lang="en"><meta name="viewport" content="width=device-width">
<title>%(title)s - kvproxy</title><link rel="icon" href="data:,"><style nonce="%(nonce)s">
:root { color-scheme: light dark; font: 16px/1.5 system-ui; overflow-wrap: anywhere }
body { margin: auto; padding: 1rem; max-width: 60rem } a { color: inherit }
h1 { font-size: 1rem } p, dd, ul, pre { margin: 0; padding: 0 } pre { white-space: pre-wrap }
.state { font-size: 1.6rem; font-weight: 650 }
h1, h3, dt, .soft { color: light-dark(#56616d, #a3adb8) }
.good { color: light-dark(#1a7f4b, #4cc38a) } .fair { color: light-dark(#7d5200, #e5b567) }
.bad { color: light-dark(#b3261e, #ff8f85) } li { list-style: none; border-top: 1px solid }
dl, .row { display: flex; flex-wrap: wrap; gap: 0 1rem }
</style><header><h1><a href="/kvproxy">kvproxy %(version)s</a></h1></header>
<main>%(main)s</main><footer>%(foot)s</footer>
<script nonce="%(nonce)s">
addEventListener("click", async ({ target }) => {
  if (target.tagName !== "BUTTON") return;
  const code = target.previousElementSibling;
  getSelection().selectAllChildren(code);
  await navigator.clipboard.writeText(code.textContent);
  getSelection().empty();
  target.textContent = "copied";
});
const main = document.querySelector("main");
if (document.getElementById("state")) setInterval(async () => {
  if (document.hidden || String(getSelection())) return;
  const answer = await fetch("/kvproxy").then((one) => one.text()).catch(String);
  const news = answer.split(/<.?main>/)[1]
    || '<p id="state" class="state bad">kvproxy does not answer</p>';
  const focus = document.activeElement.parentElement?.outerHTML;
  if (news !== main.shown) main.innerHTML = main.shown = news;
  const again = [...main.querySelectorAll("p")].find((one) => one.outerHTML === focus);
  again?.querySelector("a, button").focus({ preventScroll: true });
}, 3000);
</script>
"""
POLICY = (
    "default-src 'none'; style-src 'nonce-%(nonce)s'; script-src 'nonce-%(nonce)s';"
    " connect-src 'self'; img-src data:; frame-ancestors 'none'"
)
SAFE: Headers = [("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer")]
JSON_LINK = '<p><a href="{0}">All as JSON</a></p>'
ITEM = '<li><p class="row">{0}</p>{1}</li>'
DETAILS = "<details><summary>{0}</summary><pre>{1}</pre></details>"
TONES = {"extended": "good", "rewritten": "bad", "lost": "bad", "template": "fair"}
MISSES = ("rewritten", "lost", "template")
LINES = {"+": "good", "-": "bad", "@": "soft"}

# of a web server in front
FORWARDED = re.compile(r"(?i)(?:forwarded|x-forwarded-.*|x-real-ip|via)\Z")

Answer = tuple[int, bytes | bytearray, Headers, str]


class Pages:
    """Answers under /kvproxy. Prompts are for this machine only, and no other site's page."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    def answer(self, request: Request, peer: str) -> Answer:
        """To a request that came from the address `peer`."""
        path, get = request.path.partition("?")[0].rstrip("/"), request.get
        if request.method not in ("GET", "HEAD"):
            return self.error(405, "Only GET and HEAD.", ("Allow", "GET, HEAD"))
        if not self.proxy.known_host(get("host")):
            return self.error(403, "Unknown Host; see ALLOWED_HOSTS.")
        if path == "/kvproxy/health":
            state = self.proxy.warmup.state
            return self.json(200, {"status": "ok", "version": __version__, "warmup": state})
        if path == "/kvproxy/metrics":
            return 200, self.metrics().encode(), SAFE, "text/plain; version=0.0.4; charset=utf-8"
        ours = not get("origin") or get("origin").partition("://")[2] == get("host")
        same_site = ours and get("sec-fetch-site") in ("", "none", "same-origin")
        here = is_loopback(peer) or peer == self.proxy.config.listen_host
        near = here and not any(map(FORWARDED.match, request.headers.index))
        if path == "/kvproxy" and same_site:
            return self.page(near)
        if not (near and same_site):
            return self.error(403, "Prompts are for this machine only, not through a web server.")
        with self.proxy.metrics.guard:
            recent = list(reversed(self.proxy.metrics.recent))
        if path == "/kvproxy/requests":
            return self.json(200, {"requests": [row_of(exchange) for exchange in recent]})
        for exchange in map(copy.copy, recent):  # the bodies may be let go of meanwhile
            if path.removesuffix(".json") == f"/kvproxy/requests/{exchange.number}":
                if path.endswith(".json"):
                    return self.json(200, self.compared(exchange))
                return self.request_page(exchange)
        return self.error(404, "No such page.")

    def json(self, status: int, value: Json, *headers: tuple[str, str]) -> Answer:
        body = bytearray()  # takes less memory than dumps()
        for piece in json.JSONEncoder(ensure_ascii=False, indent=1).iterencode(value):
            body += piece.encode("utf-8", "backslashreplace")
        return status, body, [*SAFE, *headers], "application/json"

    def error(self, status: int, message: str, *headers: tuple[str, str]) -> Answer:
        return self.json(status, {"error": {"message": message}}, *headers)

    def metrics(self) -> str:
        proxy, metrics, lines = self.proxy, self.proxy.metrics, list[str]()
        with metrics.guard:
            values, rate = dict(metrics.counts), reused_share(metrics.window)
        if rate is not None:
            values["hit_ratio", ""] = rate
        values["backend_up", ""] = int(not proxy.backend.away)
        values["running_requests", ""] = proxy.running
        values["learned_shapes", ""] = len(proxy.editor.lifter.learner.shapes)
        for name, samples in groupby(sorted(values), lambda sample: sample[0]):
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# TYPE kvproxy_{name} {kind}")
            for sample in samples:
                labels = f"{{{sample[1]}}}" if sample[1] else ""
                lines.append(f"kvproxy_{name}{labels} {values[sample]}")
        return "\n".join(lines) + "\n"

    def compared(self, exchange: Exchange) -> Json:
        """A request with its bodies and what kvproxy changed, in ten times their memory."""
        dialect, prompts = exchange.dialect, list[list[Segment]]()
        row: Json = {**row_of(exchange), "answer": exchange.answer, "diff": []}
        for name in ("received", "forwarded"):
            raw = getattr(exchange, name) or b"(not kept)"
            row[name] = raw.decode("utf-8", "replace")
            values = 240 * raw.count(b"{") + 90 * raw.count(b"[") + 40 * raw.count(b",")
            if dialect and len(raw) <= DIFF_BYTES and values <= max(10_000, 8 * len(raw)):
                with suppress(Unreadable, RecursionError):
                    prompts.append(Prompt(view_of(parse(raw), dialect)).segments)

        def count(text: str) -> int | None:
            if self.proxy.running:
                return None
            keys, question = keys_of(exchange.request), dump({"content": text})
            answer = self.proxy.backend.ask("/tokenize", 3.0, question, keys)[1]
            tokens = members(answer).get("tokens")
            return len(tokens) if isinstance(tokens, list) else None

        if len(prompts) == 2:
            row["where it goes"] = weights_of(prompts[1], exchange.usage.prompt, count)
            row["diff"] = difference(*prompts)
        return row

    def html(self, title: str, main: list[str], foot: str) -> Answer:
        parts = {"title": escape(title), "main": "".join(main), "foot": foot}
        parts |= {"nonce": uuid.uuid4().hex, "version": __version__}
        headers = [*SAFE, ("Content-Security-Policy", POLICY % parts)]
        return 200, (PAGE % parts).encode("utf-8", "replace"), headers, "text/html; charset=utf-8"

    def page(self, near: bool) -> Answer:
        proxy, metrics = self.proxy, self.proxy.metrics
        if not proxy.running:
            proxy.backend.look()
        requests = [one for one in list(proxy.active)[::-1] if one.dialect is not None]
        with metrics.guard:
            state, tone, hint = self.headline(near)
            requests += islice(reversed(metrics.recent), 20)
        settings = {name.upper(): value for name, value in vars(proxy.config).items()}
        off = [f"{name}=0" for name, value in settings.items() if value is False or value == "0"]
        main = [
            tag("p", f"Switched off: {', '.join(off)}.", "fair") if off else "",
            f'<p id="state" role="status" class="state {tone}">{escape(state)}</p>',
            f"{hint}{self.facts()}<h2>Last requests</h2>",
            self.rows(requests, near) or "None.",
        ]
        if near:
            told = "\n".join(f"{name} = {value}" for name, value in settings.items())
            more = DETAILS.format("Settings in force", escape(told))
            main.append(self.learned())
            return self.html("Status", main, JSON_LINK.format("/kvproxy/requests") + more)
        there = proxy.url.removeprefix("http://")
        port = there.rpartition(":")[2]
        more = copied(f"ssh -L {port}:{there} THAT-MACHINE")
        told = f"Prompts are shown on that machine only: {more}Then open"
        return self.html("Status", main, f"{told} http://127.0.0.1:{port}/kvproxy.")

    def request_page(self, exchange: Exchange) -> Answer:
        row, title = self.compared(exchange), f"Request {exchange.number}"
        main = [tag("p", title, "state"), f"<ul>{self.row(exchange, True)}</ul>"]
        weights = json.dumps(row.get("where it goes"), indent=1)
        main += [tag("h2", "Where its tokens go"), tag("pre", weights)]
        main += [tag("h2", "What kvproxy changed")]
        main += [tag("pre", line[:BODY_SHOWN], LINES.get(line[0], "")) for line in row["diff"]]
        main += [tag("h2", "The answer begins"), tag("pre", exchange.answer or "-")]
        for name in ("received", "forwarded"):
            shown = escape(row[name][:BODY_SHOWN], False)
            main.append(DETAILS.format(f"{name}: {len(row[name]):,} characters", shown))
        more = JSON_LINK.format(f"/kvproxy/requests/{exchange.number}.json")
        return self.html(title, main, more)

    def headline(self, near: bool) -> tuple[str, str, str]:
        """What a person wants to know first, its tone, and as HTML the cause and what helps."""
        metrics, known = self.proxy.metrics, self.proxy.backend.known
        if metrics.failure is not None:
            status, error, fault = metrics.failure
            told = tag("p", error or fault, "soft") if near else ""
            if status == 503 or (status in (502, 504) and not error):
                if known and "state" not in known:
                    return "The model server answers again", "fair", ""
                return f"The model server does not answer ({status})", "bad", told
            state = f"The last request failed ({status})"
            return state if status >= 400 else "The last answer broke off", "bad", told
        judged = [one for one in metrics.window if one.verdict.step != "first prompt"]
        judged = [one for one in judged if one.verdict.name != "cold"]
        if not judged:
            state = "Only first prompts so far" if metrics.window else "No prompt yet"
            if metrics.judged and not metrics.reported:
                state = "The server does not report what it reused"
            name = self.proxy.backend.name()
            there = f"No model server answers at {name}. {USUAL_PORTS}"
            there = f"The model server answers at {name}." if known else there
            url = self.proxy.url if near else self.proxy.url.replace("127.0.0.1", "THAT-MACHINE")
            return state, "fair", tag("p", f"{there} Address for agents:") + copied(f"{url}/v1")
        talk = metrics.window[-1].trace.conversation
        newest = [one for one in judged if one.trace.conversation == talk] or judged
        rate = reused_share(newest) or 0.0
        misses = len(list(takewhile(lambda one: one.missed, reversed(judged))))
        if rate >= self.proxy.config.warn_reuse and misses < 3:
            return f"The cache works: {int(100 * rate)}% reused", "good", ""
        state = f"The cache misses: only {int(100 * rate)}% reused"
        if misses >= 3:
            names = ", ".join(dict.fromkeys(one.verdict.name for one in judged[-misses:]))
            state = f"The last {misses} prompts were read again: {names}"
        missed = [cause_html(one.verdict) for one in judged if near and one.missed]
        hint = tag("p", f"{metrics.cause().capitalize()}.")
        return state, "bad", hint + "".join(missed[-1:])

    def facts(self) -> str:
        counts, backend, warmup = self.proxy.metrics.counts, self.proxy.backend, self.proxy.warmup
        programs = warmup.wrong.copy().items()
        saved = counts["saved_seconds_total", ""]
        facts = {
            "tokens reused": f"{counts['prompt_tokens_total', REUSED]:,}",
            "tokens read": f"{counts['prompt_tokens_total', READ_ANEW]:,}",
            "time saved, about": duration(saved) if saved else "",
            "server": f"{backend.name()} {described(backend.known)}",
            "warm-up": warmup.state if warmup.enabled else "",
            "read ahead": ", ".join(name for name, wrong in programs if wrong < 2),
        }
        pairs = [tag("dt", name) + tag("dd", told) for name, told in facts.items() if told]
        return f"<dl><div>{'</div><div>'.join(pairs)}</div></dl>"

    def learned(self) -> str:
        rows = ""
        for shape in list(self.proxy.editor.lifter.learner.shapes):
            words, setting = learned(shape, self.proxy.config)
            rows += ITEM.format(escape(words), copied(setting))
        return f"<h2>Learned</h2><ul>{rows}</ul>" if rows else ""

    def rows(self, requests: list[Exchange], near: bool) -> str:
        groups: Texts = {}
        for one in requests:
            name = one.trace.conversation[:8]
            title = f"Conversation {name}" if name else "Other requests"
            groups[title] = groups.get(title, "") + self.row(one, near)
        return "".join(tag("h3", title) + f"<ul>{group}</ul>" for title, group in groups.items())

    def row(self, exchange: Exchange, near: bool) -> str:
        """A request in the list, as HTML; one without a number is being served."""
        number, start = exchange.number, exchange.started
        facts = [f"tokens read: {read_of(exchange.usage)}", client_of(exchange), exchange.model]
        if exchange.status != 200:
            facts[0] = f"status {exchange.status or '-'}"
        if not number:
            facts[0] = f"running for {duration(monotonic() - start)}"
        for name, at in (("first byte", exchange.begun), ("all", exchange.ended)):
            facts += [f"{name} {duration(at - start)}"] if at else []
        title = time.strftime(f"#{number} %Y-%m-%d %H:%M:%S", time.localtime(exchange.time))
        link = f'<a href="/kvproxy/requests/{number}">{title}</a>' if near else title
        spans = link * bool(number) + "".join(tag("span", fact) for fact in facts)
        return ITEM.format(spans, verdict_html(exchange, near) if number else "")


def row_of(exchange: Exchange) -> Json:
    verdict, usage = exchange.verdict, exchange.usage
    names = ("number", "time", "status", "fault", "error", "model")
    row: Json = {name: getattr(exchange, name) or None for name in names}
    row |= {"method": exchange.request.method, "path": printable(exchange.request.path)}
    row |= {"client": client_of(exchange), "conversation": exchange.trace.conversation or None}
    row |= {"report": vars(exchange.report), "verdict": verdict and vars(verdict)}
    row["usage"] = {**vars(usage), "read": usage.read()}
    for name, at in (("first_byte_ms", exchange.begun), ("total_ms", exchange.ended)):
        row[name] = round(1000 * (at - exchange.started), 1) if at else None
    return row


def verdict_html(exchange: Exchange, near: bool) -> str:
    verdict = exchange.verdict
    found = tag("p", exchange.error or exchange.fault, "bad") if near else ""
    if verdict is not None:
        kind = f"{verdict.side} request" if verdict.side else verdict.step or "prompt"
        name = tag("b", verdict.name, TONES.get(verdict.name, ""))
        found += f"<p>{name} ({kind}): {VERDICTS[verdict.name]}</p>"
        found += cause_html(verdict) if near else ""
    return found


def cause_html(verdict: Verdict) -> str:
    line = verdict.line().removesuffix(verdict.cure).rstrip("; ")
    return tag("p", line, "soft") + copied(verdict.cure if line else "")


def tag(name: str, text: str, kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f"<{name}{kind}>{escape(text)}</{name}>" if text else ""


def copied(setting: str) -> str:
    found = f'<p><code>{escape(setting)}</code> <button type="button">copy</button></p>'
    return found if setting else ""


def client_of(exchange: Exchange) -> str:
    return visible(exchange.request.get("user-agent").partition(" ")[0])[:60] or "-"


def read_of(usage: Usage) -> str:
    return "not told" if usage.read() is None else f"{usage.read():,} of {usage.prompt:,}"


BODY_SHOWN = 100_000  # characters of a body or line, on a page
DIFF_BYTES = 1 << 20  # longer bodies are not compared
DIFF_LINES = 5000  # longer segments are not compared


def difference(before: list[Segment], after: list[Segment]) -> list[str]:
    """A unified diff of the segments that stand in one of two prompts only."""
    found = list[str]()
    same = {text for _, text in before} & {text for _, text in after}
    changed = ([one for one in prompt if one[1] not in same] for prompt in (before, after))
    for (name, old), (new_name, new) in zip_longest(*changed, fillvalue=("nothing", "")):
        lines = old.split("\n"), new.split("\n")
        if max(map(len, lines)) > DIFF_LINES:
            found.append(f"{name}: too long for a diff")
        else:
            found += difflib.unified_diff(*lines, name, new_name, n=2, lineterm="")
    return found


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


# ====== Commands: demo, bench, check, inspect, serve ======


def play(name: str, config: Config, args: Words, warmup: Warmup | None = None) -> list[float]:
    """Play an agent like OpenClaw; returns the ms of its prompts. --ahead: with tool steps."""
    run, project = uuid.uuid4().hex, "box reads file patch " * (args.tokens // 4)
    server, turns, times = model_server(config), list[Json](), list[float]()
    keys = {"User-Agent": "kvproxy", **api_key()}

    def ask(tokens: int) -> Json:
        messages = [{"role": "system", "content": system}, *turns]
        body: Json = {"model": "local", "messages": messages, "max_tokens": tokens, "stop": " "}
        body["chat_template_kwargs"] = {"enable_thinking": False}
        status, answer = server.ask("/v1/chat/completions", config.read_timeout, dump(body), keys)
        if status != 200:
            raise OSError(f"The run broke off: {status or ''} {str(answer)[:200]}")
        return members(answer)

    for turn in range(1, args.turns + 1):
        ids = {"schema": "openclaw.inbound_meta.v1", "message_id": str(uuid.uuid4())}
        block = f"## Inbound Context (trusted metadata)\n```json\n{json.dumps(ids, indent=2)}\n```"
        system = f"You are helpful ({run}).\n{block}\n# Project Context\n{project}"
        text = f"[Wed 2026-02-18 20:{turn % 60:02} UTC] Question {turn}, please."
        turns.append({"role": "user", "content": text})
        begun = monotonic()
        answer = ask(8)
        usage, ms = usage_of([[answer]]), 1000 * (monotonic() - begun)
        if args.ahead:
            look = {"name": "look", "arguments": "{}"}
            calls = [{"id": f"call_{turn}", "type": "function", "function": look}]
            thought = {"reasoning_content": project[:600], "content": "", "tool_calls": calls}
            result = {"tool_call_id": f"call_{turn}", "content": project[:3000]}
            turns += [{"role": "assistant", **thought}, {"role": "tool", **result}]
            answer = ask(1024)
        until = monotonic() + 3  # as long as a person reads, at least
        while warmup and (warmup.prefill or monotonic() < until):
            time.sleep(0.01)
        text = "".join(words for words, _ in answer_parts(answer))
        turns.append({"role": "assistant", "content": text or "ok"})
        times.append(usage.prompt_ms or ms)
        print(f"{name}, turn {turn}: {read_of(usage)} tokens read, {times[-1]:,.0f} ms")
    return times


def compare(args: Words, config: Config, name: str, url: str) -> int:
    """Play in two ways; `url`: of the user's server. Raises OSError."""
    print(f"{args.turns} turns of about {args.tokens:,} tokens against {name}:\n")
    ways = {"not ahead": "0", "read ahead": "1"} if args.ahead else {"through kvproxy": "0"}
    runs = [] if args.ahead else [play("straight", config, args)]
    quiet = Config(backend_url=config.backend_url, listen_port=0, log_level="error")
    for way, ahead in ways.items():
        with Proxy(replace(quiet, prefill_ahead=ahead)) as proxy:
            there, warmup = replace(config, backend_url=proxy.url), proxy.warmup
            runs.append(play(way, there, args, warmup if ahead == "1" else None))
    before, after = (sum(times[1:]) for times in runs)
    if after:
        print(f"\nThe prompts of turn 2 and later: {before / after:.1f} times as fast.")
    print(next_steps(config, url))
    return 0


def next_steps(config: Config, url: str) -> str:
    """How to put kvproxy in front of a server, in any shell."""
    port = config.listen_port or 1234
    port += urlsplit(url).port == port
    python = os.path.basename(sys.executable or "python").removesuffix(".exe")
    there = f"http://127.0.0.1:{port}"
    return (
        f'\nWhat to do next:\n  {python} "{__file__}" BACKEND_URL={url} LISTEN_PORT={port}\n\n'
        f"Then give your agent {there}/v1 and open {there}/kvproxy"
    )


class SimulatedServer(BaseHTTPRequestHandler):
    """A llama-server of one slot, which caches the last prompt, in words."""

    slot: Sequence[str] = ()

    def do_POST(self) -> None:
        words = str(json.loads(self.rfile.read(int(self.headers["Content-Length"])))).split()
        cached = min(common_prefix(self.slot, words), len(words) - 1)
        SimulatedServer.slot, ms = words, 0.02 * (len(words) - cached)
        time.sleep(ms / 1000)
        timings = {"cache_n": cached, "prompt_n": len(words) - cached, "prompt_ms": ms}
        message = {"role": "assistant", "content": "Noted, thanks."}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(dump({"choices": [{"message": message}], "timings": timings}))

    def log_message(self, format: str, *args: Any) -> None:
        pass


def command_demo(args: Words, config: Config) -> int:
    # HTTPServer would ask DNS
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), SimulatedServer) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        there = f"http://127.0.0.1:{server.server_address[1]}"
        simulated = replace(config, backend_url=there)
        url = config.backend_url or CANDIDATES[0]
        code = compare(args, simulated, "a SIMULATED server (50 words a ms)", url)
        server.shutdown()
    return code


def command_bench(args: Words, config: Config) -> int:
    url = model_server(config).name()
    return compare(args, replace(config, backend_url=url), url, url)


def model_server(config: Config) -> Backend:
    """The backend, asked what it is. Raises OSError."""
    backend = Backend(config)
    if not backend.describe(3.0, api_key()):
        raise OSError(f"No model server answers at {backend.name()}. {USUAL_PORTS}")
    return backend


def command_check(args: Words, config: Config) -> int:
    backend = model_server(config)
    found = backend.known
    print(f"{backend.name()}: {described(found)}")
    slots, context = backend.ask("/slots", 3.0, None, api_key())[1], found.get("context")
    short = isinstance(context, int) and context < 32768
    faults = {
        "It does not tell whether its cache is on: try `bench`.": not isinstance(slots, list),
        "cache_prompt is off: remove --no-cache-prompt.": "'cache_prompt': False" in str(slots),
        "A title request takes its only slot: -np 2 gives it another.": found.get("slots") == 1,
        "Agents send 16,000-60,000 tokens, more than fit: raise -c or lower -np.": short,
    }
    told = [f"- {advice}" for advice, fault in faults.items() if fault]
    print("\n".join(told or ["- Nothing that it tells of hurts the cache."]))
    return 0


def failed(why: str) -> int:
    """Tell why a command ends, which has this exit code."""
    print(why, file=sys.stderr)
    return 1


# --- inspect: captures and llama-server logs ---

LOG_SHAPES = [  # what a server's log line tells; llama.cpp and ik_llama.cpp
    (name, re.compile(pattern))
    for name, pattern in (row.split(None, 1) for row in r"""
slot    by \w+ similarity.{,80}?\b(?:f_)?sim\w{,9} = (?P<sim>[\d.]+)(?:.*f_keep = (?P<keep>[\d.]+))?
slot    selected slot by (?P<lru>LRU)
slot    slot is processing task
prompt  new prompt, n_ctx_slot.{,80}?(?:task\.n_tokens|n_prompt_tokens) = (?P<tokens>\d+)
cached  (?:n_past|n_tokens) = (?P<cached>\d+), memory_seq_rm
cached  kv cache rm \[p0, end\).{,120}?\bp0=(?P<cached>\d+)
full    [Ff]orcing full prompt (?P<forced>re-processing(?: due to [^(\n]*)?)
eval    prompt eval(?: time)?\s*[=:]\s*(?P<ms>[\d.]+) ?ms\s*[/,]\s*(?P<read>\d+) tokens
""".strip().splitlines())
]  # fmt: skip
LOG_SLOT = re.compile(r"(?:\bid +|slot )(\d+) ?(?:\||:)|id_slot=(\d+)")
LOG_PORT = re.compile(r"(?:^|[\s\"])\[(\d{2,5})\] ")  # a router's
# sim: share that an earlier one began with; keep: share of the slot that stayed
INSPECT_FACTS = ("tokens", "read", "sim", "keep")
# None: not known
INSPECT_ROW: Json = {"name": "", "what": "", "cause": "", "cure": "", "estimated": False}
INSPECT_ROW |= dict.fromkeys((*INSPECT_FACTS, "ms", "cured"))


def command_inspect(args: Words, config: Config) -> int:
    path = os.path.expanduser(args.file)
    file = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
    number, reader, findings = 0, LogReader(config), dict[str, Json]()
    if args.json:
        print('{"requests": [')
    with file:
        for number, row in enumerate(reader.rows(file), 1):
            facts = [f"{key} {row[key]:,}" for key in INSPECT_FACTS if row[key] is not None]
            told = f"{number} {row['name']}: {', '.join(facts)}: {row['what']}"
            print(visible("," * (number > 1) + json.dumps(row) if args.json else told))
            if row["cause"]:
                new = {"cause": row["cause"], "requests": 0, "tokens": 0, "cured": 0}
                new["advice"] = row["cure"]
                found = findings.setdefault(row["cause"], new)
                found["requests"] += 1
                found["tokens"] += row["read"] or 0
                found["cured"] += bool(row["cured"])
    wasted = sorted(findings.values(), key=lambda found: -found["tokens"])
    for found in wasted:
        if found["cured"] == found["requests"]:
            found["advice"] = "kvproxy cures this: send the requests through it."
    if args.json:
        print('], "findings": ' + visible(json.dumps(wasted)) + "}")
        return 0
    if not number:
        return failed("No request was recognised: no capture (JSON lines), no log (-lv 4).")
    print("Findings, most tokens wasted first:" if wasted else "Nothing was wasted.")
    for found in wasted:
        told = f"- {found['cause']}: requests {found['requests']}, tokens {found['tokens']:,}."
        print(visible(f"{told} {found['advice']}"))
    return 0


class LogReader:
    """Reads a capture or a server's log; a row comes out for each request."""

    def __init__(self, config: Config) -> None:
        self.config, self.editor, limit = config, Editor(config), config.ledger_mb << 20
        self.ledger, self.cured = Ledger(limit), Ledger(limit)  # as captured, as kvproxy sends it
        self.tasks: dict[str, Json] = {}  # what is known of each port's and slot's
        self.slots: Texts = {}  # that a port's log spoke of last
        self.longest: dict[str, int] = {}  # prompt of a port since its server's start

    def rows(self, file: Any) -> Iterator[Json]:
        utf16 = file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # PowerShell's >
        lines = codecs.EncodedFile(file, "utf-8", "utf-16", "replace") if utf16 else file
        while line := lines.readline(PARSE_LIMIT):
            yield from self.line(line)
        for name in list(self.tasks):
            yield from self.finish(name)

    def line(self, raw: bytes) -> list[Json]:
        try:
            row = members(_strict.decode(raw.decode())) if raw.lstrip()[:1] == b"{" else {}
            if "body" in row and isinstance(row.get("path"), str):
                return self.captured(row)
            return self.logged(raw.decode("utf-8", "replace")) if len(raw) <= 16384 else []
        except (*UNPARSED, OverflowError):
            return []  # half a line, too deep, or a number that is none

    def captured(self, row: Json) -> list[Json]:
        dialect, counting = dialect_of(row["path"])
        if dialect is None or counting:
            return []
        body, status = row["body"], row.get("status", 200)
        view = view_of(json.loads(body) if isinstance(body, str) else body, dialect)
        told = {**INSPECT_ROW, "name": f"{dialect.name}, {len(view.turns)} items"}
        if status not in (0, 200):
            return [{**told, "what": f"status {status}"}]
        side = side_of(view, members(row.get("headers")).get(AGENT_ID, ""))
        prompt = Prompt(view, self.editor.replay.conversation(view), side)
        trace = self.editor.apply(view, Report())  # changes the view
        if trace.record is not None:
            trace.record.answer = ANY
        as_sent = self.cured.judge(Prompt(view, trace.conversation, side)).verdict
        case, usage = self.ledger.judge(prompt), usage_of([[row]])
        verdict, prompt.number = case.verdict, self.ledger.count
        settle(case, usage, self.config)
        if usage.read() is None:
            told["estimated"], usage.prompt = True, prompt.size // 4
            usage.cached = round(usage.prompt * verdict.share)
            verdict.name = "extended" if verdict.name == "not reported" else verdict.name
        cured = verdict.name == "rewritten" and verdict.kind != "reasoning"
        cured, line = cured and as_sent.name == "extended", verdict.line()
        told |= {"what": verdict.title() + f": {line}" * bool(line), "ms": usage.prompt_ms}
        told |= {"tokens": usage.prompt, "read": usage.read(), "sim": round(verdict.share, 3)}
        if line and not side and verdict.name in ("rewritten", "lost"):
            told |= {"cause": cause_of(verdict), "cured": cured}
            told["cure"] = verdict.cure or verdict.advice
        return [told]

    def logged(self, text: str) -> list[Json]:
        """A line of llama-server's log, whatever docker or a journal put in front."""
        found, slot = LOG_PORT.search(text[:200]), LOG_SLOT.search(text)
        port = f"port {found[1]} " if found else ""
        if slot:
            self.slots[port] = f"slot {slot[1] or slot[2]}"
        hits = ((kind, hit) for kind, shape in LOG_SHAPES if (hit := shape.search(text)))
        kind, match = next(hits, ("", None))
        if match is None:
            return []
        name, rows = port + self.slots.get(port, "slot ?"), list[Json]()
        if kind in ("slot", "prompt") and "tokens" in self.tasks.get(name, ()):
            rows = self.finish(name)  # the next task begins
        task = self.tasks.setdefault(name, {"port": port})
        for key, value in match.groupdict().items():
            if value and (kind in ("eval", "slot") or key not in task):
                task[key] = json.loads(value) if value[0].isdigit() else value
        if kind != "eval":
            return rows
        if "tokens" not in task and "cached" in task:
            task["tokens"] = task["cached"] + task["read"]
        return self.finish(name)

    def finish(self, name: str) -> list[Json]:
        """The row of a slot's task, if a prompt was seen."""
        task = {**INSPECT_ROW, **self.tasks.pop(name), "name": name}
        tokens, read, sim, keep = (task[key] for key in INSPECT_FACTS)
        if read is None and tokens is not None and "cached" in task:
            read = task["read"] = tokens - task["cached"]
        size, longest = tokens or read or 0, self.longest.get(task["port"], 0)
        self.longest[task["port"]] = max(size, longest)
        what, cause = "read" if tokens is None or read == tokens else "reused", ""
        if "forced" in task and "lru" not in task:
            what, cause = f"full {task['forced'].strip()}", "full re-processing"
        elif tokens is not None and read is not None and size > 512 and 2 * read > tokens:
            what = cause = "no similar slot" if sim is None else "low similarity"
            if sim is not None and sim >= 0.5:
                what = cause = "not all kept"
            elif size > 2 * longest:
                what, cause = "first prompt of its length", ""
        elif keep is not None and keep < 0.9 and size * (1 - keep) > 64:
            what = cause = "slot cut"
        task |= {"what": what, "cause": cause, "cure": ADVICE.get(cause, "")}
        return [task] if size else []


def cause_of(verdict: Verdict) -> str:
    """A fault's place, and the words before what changes."""
    place = verdict.where.partition(" ")[0] if verdict.name == "rewritten" else verdict.name
    shared = verdict.before[: common_prefix(verdict.before, verdict.after)]
    label = re.split(r"\d", shared)[0][-24:].strip()
    return f"{place}, {verdict.kind}" + f": {label!r}" * (label != "" and place != "tools")


def command_serve(args: Words, config: Config) -> int:
    proxy = Proxy(config)
    log, handler = proxy.log, cast(logging.Handler, logging.StreamHandler())
    if config.log_file:
        handler = PrivateFile("LOG_FILE", config.log_file, failed)
    form = "%(asctime)s %(levelname)s %(request)s%(message)s"
    handler.setFormatter(logging.Formatter(form, defaults={"request": ""}))
    log.addHandler(handler)
    try:
        proxy.start()
    except OSError as error:
        where = f"Port {config.listen_port} on {config.listen_host} cannot be used"
        return failed(f"{where}: {error.strerror or error}. {taken_by(config)}")
    ended = list[int]()  # KeyboardInterrupt would be lost where Python ignores exceptions

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.default_int_handler)  # a second one does not wait for answers
        ended.append(number)

    for name in ("SIGINT", "SIGTERM", "SIGBREAK"):  # Windows has no SIGTERM, Unix no SIGBREAK
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    log.info("kvproxy %s listens on %s (page: %s/kvproxy)", __version__, proxy.url, proxy.url)
    if found := proxy.backend.describe():
        log.info("backend %s: %s", proxy.backend.name(), described(found))
    else:
        proxy.backend.lost()
        told = f"{proxy.backend.name()}. Is BACKEND_URL right? {USUAL_PORTS}"
        log.warning("backend: none answers yet at %s", told)
    while not ended:
        time.sleep(0.1)
    log.info("stopping: answers in progress may end (%d s)", DRAIN_SECONDS)
    proxy.stop()
    return 0


def taken_by(config: Config) -> str:
    """What to do about a port that something else has."""
    url = url_of(config.listen_host, str(config.listen_port))
    there = Backend(config)
    there.url = urlsplit(url)
    if "warmup" in members(there.ask("/kvproxy/health")[1]):
        return f"kvproxy runs there already: {url}/kvproxy"
    if (owner := there.describe().get("product")) in OWNERS.values():
        return f"{owner} has it.\n{next_steps(config, url)}"
    return "Set LISTEN_PORT or LISTEN_HOST."


COMMANDS = {
    "serve": (command_serve, "listen and forward (the default)"),
    "demo": (command_demo, "show the effect on a simulated server"),
    "bench": (command_bench, "measure the effect on BACKEND_URL (with API_KEY)"),
    "check": (command_check, "tell what hurts the cache of BACKEND_URL"),
    "inspect": (command_inspect, "explain a capture or llama-server log: FILE; - is stdin"),
}
OPTIONS = {
    "--json": "inspect prints JSON",
    "--ahead": "bench shows what PREFILL_AHEAD=1 gains",
    "--tokens": "demo and bench: tokens of the prompt [6000]",
    "--turns": "demo and bench: turns [5]",
    "--version": "print the version",
    "--help": "print this",
}


@dataclass
class Words:
    command: str = ""
    file: str = ""
    tokens: int = 6000
    turns: int = 5
    json: bool = False
    ahead: bool = False
    settings: Texts = field(default_factory=dict)


def read_words(words: Iterable[str]) -> Words:
    """The words of a command line, in any order. Raises ConfigError."""
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
        else:
            names = [*COMMANDS, *(f"{name.lower()}=" for name, _, _ in Config.table())]
            wanted = name.partition(":")[0].strip("-").replace("-", "_").lower()
            near = difflib.get_close_matches(wanted, names, 2, 0.5)
            near += ["backend_url="] * bool(":" in word and URL.fullmatch(word))
            told = f"nearest: {' or '.join(near)}" if near else "--help lists all"
            raise ConfigError(f"{name} means nothing here; {told}")
    if args.command == "inspect" and not args.file:
        raise ConfigError("inspect needs a FILE; - reads stdin")
    return args


def usage_text() -> str:
    width = max(40, min(118, shutil.get_terminal_size().columns - 1))
    rows = {name: text for name, (_, text) in COMMANDS.items()} | OPTIONS
    rows |= {n: text + f" [{default}]" * bool(default) for n, default, text in Config.table()}
    lines = ["usage: kvproxy.py [NAME=VALUE ...] [COMMAND] [OPTION ...]"]
    for name, text in rows.items():
        lines.append(textwrap.fill(f"  {name:21} {text}", width, subsequent_indent=" " * 24))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        args = read_words(sys.argv[1:] if argv is None else argv)
        if args.command.startswith("-"):
            print(f"kvproxy {__version__}" if args.command == "--version" else usage_text())
            return 0
        for name, wanted in misspelt(os.environ):
            failed(f"kvproxy: {name} is no setting: is {wanted} meant?")
        config = Config.from_env({**os.environ, **args.settings})
        return COMMANDS[args.command or "serve"][0](args, config)
    except ConfigError as error:
        return 1 + failed(f"kvproxy: {error}")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return failed(f"kvproxy: {error}")


if __name__ == "__main__":
    sys.exit(main())
