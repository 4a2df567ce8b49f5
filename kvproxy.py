#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
# Copyright (c) 2026 the kvproxy authors
"""kvproxy: makes llama-server's prefix cache hit for agents that put clocks and ids in front of their prompts.

One file, standard library only, Python 3.10 or newer. Copy it anywhere and run it:

    python kvproxy.py demo                                      see what it does; needs no server
    BACKEND_URL=http://127.0.0.1:8080 python kvproxy.py         serve on 127.0.0.1:1234
    python kvproxy.py --help                                    every command and setting

A prefix cache reuses a prompt only up to the first byte that differs from the last one. Agents write message ids,
clocks, git snapshots and moving context blocks near the front, so a local model reads tens of thousands of tokens
again on every turn. kvproxy forwards each request so that it begins with what the server has already read:

    client -> read -> parse -> scrub -> lift -> replay -> forward -> relay -> client
                                                    |                  |
                                                  store        usage -> explain -> log, page, metrics

The sections below stand in that order: Configuration, Dialects, Scrub, Lift, Replay, Explain, Relay, Server, Status,
Commands. Scrub, lift, replay and explain are pure: payload in, payload and report out. Sockets are in Relay alone.

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
import http.client
import ipaddress
import itertools
import json
import logging
import os
import re
import select
import signal
import socket
import socketserver
import statistics
import struct
import sys
import textwrap
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, NamedTuple

__version__ = "1.0.0"
__all__ = ["Config", "ConfigError", "Proxy", "Report", "scrub"]

Json = dict[str, Any]


# ======================================================================================================================
# Configuration: one dataclass feeds the environment, --help, the README table and the check of values
# ======================================================================================================================


class ConfigError(ValueError):
    """A setting has a value that cannot be used; the message names the variable, the value and what is allowed."""


def setting(default: Any, help: str, **check: Any) -> Any:
    """A Config field: `help` for --help and README; `check` holds low/high (numbers), choices, or kind (url, regex)."""
    return dataclasses.field(default=default, metadata={"help": help, **check})


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting, as a field here and as the environment variable of the same name in upper case.

    Raises ConfigError for a value out of range, an unknown choice, a bad URL or a pattern that does not compile.
    """

    listen_host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in")
    listen_port: int = setting(1234, "port to listen on; 0 takes any free one", low=0, high=65535)
    backend_url: str = setting(
        "",
        "the model server, http or https, a path prefix is kept; unset: the first of 127.0.0.1:8080, :9931, :12345"
        " that answers like a model server",
        kind="url",
    )
    scrub: bool = setting(True, "0 forwards every body as it came: a pure logger, the A of an A/B test")
    strip_message_ids: str = setting(
        "1",
        "drop per-message ids from OpenClaw's metadata; system: in system prompts only",
        choices=("0", "1", "system"),
    )
    strip_timestamps: bool = setting(True, "drop the [Wed 2026-02-18 20:48 UTC] stamp at the start of user texts")
    strip_billing: bool = setting(True, "drop Claude Code's x-anthropic-billing-header line from the system prompt")
    strip_regex: tuple[str, ...] = setting(
        (), "what this pattern matches is removed from system and user text; more: STRIP_REGEX_2, _3, ...", kind="regex"
    )
    system_first: bool = setting(True, "merge system messages into one at the front; later ones become reminders")
    lift: bool = setting(
        True, "move clocks, date lines and git snapshots from the system prompt to the newest user turn"
    )
    lift_regex: tuple[str, ...] = setting(
        (), "a line of the system prompt to lift as well; more: LIFT_REGEX_2, _3, ...", kind="regex"
    )
    replay: bool = setting(True, "send history again as it was sent first; LIFT needs it")
    replay_regex: tuple[str, ...] = setting(
        (), "text in user turns that comes and goes between requests; more: REPLAY_REGEX_2, _3, ...", kind="regex"
    )
    replay_mb: int = setting(64, "memory for replay in MB; the least recently used goes first", low=1, high=65536)
    ledger_mb: int = setting(64, "memory for the prompts that explain compares with, in MB", low=1, high=65536)
    keep_requests: int = setting(50, "requests kept for the status page, with their bodies", low=0, high=10000)
    warn_reuse: float = setting(0.5, "warn when the hit rate of the last 20 requests falls below this", low=0, high=1)
    capture_file: str = setting("", "append every request to this file as JSON lines (mode 0600, secrets replaced)")
    capture_mb: int = setting(100, "size at which the capture is rotated, one old file is kept", low=1, high=1000000)
    warmup_file: str = setting("", "remember the heads of recent conversations here and read them in after a start")
    warmup_heads: int = setting(4, "how many heads are remembered", low=1, high=64)
    keepalive_seconds: int = setting(0, "repeat the newest head after this much idle time; 0: off", low=0, high=864000)
    connect_timeout: float = setting(5.0, "seconds to wait for a connection to the server", low=0.05, high=600)
    read_timeout: float = setting(
        3600.0, "seconds without a byte from the server before giving up", low=0.05, high=864000
    )
    header_timeout: float = setting(15.0, "seconds a client may take to send a request's head", low=0.05, high=3600)
    max_body_mb: int = setting(100, "largest request body in MB", low=1, high=65536)
    max_connections: int = setting(2048, "client connections at a time; more are answered with 503", low=1, high=100000)
    allowed_hosts: str = setting("", "more names that the Host header may carry, separated by commas")
    log_level: str = setting("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    log_file: str = setting("", "append the log to this file; unset: stderr")

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            fault = _fault(item, getattr(self, item.name))
            if fault:
                raise ConfigError(f"{item.name.upper()}={getattr(self, item.name)!r}: {fault}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Config:
        """The settings found in `environ` (usually os.environ). An empty value counts as unset."""
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            name = item.name.upper()
            if item.metadata.get("kind") == "regex":
                values[item.name] = _numbered(environ, name)
            elif environ.get(name, "").strip():
                values[item.name] = _convert(name, environ[name].strip(), item.default)
        return cls(**values)

    @classmethod
    def table(cls) -> list[tuple[str, str, str]]:
        """(variable, default, meaning) of every setting, for --help and the README."""
        rows = []
        for item in dataclasses.fields(cls):
            default = item.default
            text = ("1" if default else "0") if isinstance(default, bool) else "" if default == () else str(default)
            rows.append((item.name.upper(), text.removesuffix(".0"), item.metadata["help"]))
        return rows


def _numbered(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    """NAME, NAME_2, NAME_3, ... in the order of their numbers."""
    found = []
    for key, value in environ.items():
        number = key[len(name) + 1 :] if key.startswith(name + "_") else "1" if key == name else ""
        if number.isascii() and number.isdigit() and value:
            found.append((int(number), value))
    return tuple(value for _, value in sorted(found))


def _convert(name: str, text: str, default: Any) -> Any:
    """A variable's text in the type of its default."""
    if isinstance(default, bool):
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{name}={text!r}: must be 0 or 1")
    if isinstance(default, (int, float)):
        try:
            return type(default)(text)
        except ValueError:
            kind = "a whole number" if isinstance(default, int) else "a number"
            raise ConfigError(f"{name}={text!r}: must be {kind}") from None
    return text


def _fault(item: dataclasses.Field[Any], value: Any) -> str:
    """What is wrong with a setting's value, or nothing."""
    check = item.metadata
    if "low" in check and not check["low"] <= value <= check["high"]:  # NaN fails both comparisons
        return f"must be from {check['low']} to {check['high']}"
    if "choices" in check and value not in check["choices"]:
        return "must be one of " + ", ".join(check["choices"])
    if check.get("kind") == "url" and value:
        return _url_fault(value)
    if check.get("kind") == "regex":
        for pattern in value:
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                return f"must be a Python regular expression: {error}"
    return ""


def _url_fault(value: str) -> str:
    wanted = "must be http://host[:port][/prefix] or https://..."
    try:
        parts = urllib.parse.urlsplit(value)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        return wanted
    if not good or parts.query or parts.fragment or parts.username or not value.isascii() or re.search(r"\s", value):
        return wanted
    return ""


# ======================================================================================================================
# Dialects: four request shapes, one view (an ordered list of turns)
# ======================================================================================================================


class Dialect(NamedTuple):
    """Where a request's prompt is. `system` and `turns` name keys of the body; `text` is the type of a new text part."""

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
# count_tokens (Anthropic) and input_tokens (llama-server) count what the other path would read, so they get its edits.
DIALECT_PATH = re.compile(
    r"/(?:v1/)?(chat/completions|responses|messages|completions?)(/count_tokens|/input_tokens)?/?", re.ASCII
)
TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
SYSTEM_ROLES = frozenset(("system", "developer"))
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
    """A place in the body that holds one text."""

    holder: Any
    key: Any

    def get(self) -> str:
        return self.holder[self.key]  # type: ignore[no-any-return]

    def set(self, text: str) -> None:
        self.holder[self.key] = text


class Turn:
    """One entry of a prompt. `holder[key]` is its content; `item` its JSON object in the list, None for text beside it.

    Roles: system (and developer), user, assistant, tool, reasoning, other. An Anthropic user message that only carries
    tool results has the role tool.
    """

    __slots__ = ("found", "holder", "item", "key", "role")

    def __init__(self, role: str, holder: Json, key: str, item: Json | None) -> None:
        self.role, self.holder, self.key, self.item = role, holder, key, item
        self.found: list[Slot] | None = None

    def slots(self) -> list[Slot]:
        """The texts that a person or the client wrote, in order; tool calls and tool results are not among them."""
        if self.found is None:
            content = self.holder.get(self.key)
            self.found = [Slot(self.holder, self.key)] if isinstance(content, str) else []
            for index, part in enumerate(content if isinstance(content, list) else ()):
                if isinstance(part, str):
                    self.found.append(Slot(content, index))
                elif isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
                    self.found.append(Slot(part, "text"))
        return self.found

    def text(self) -> str:
        slots = self.slots()
        return slots[0].get() if len(slots) == 1 else "\n".join([slot.get() for slot in slots])

    def rest(self) -> str:
        """What the turn says beside its texts, each piece behind a separator: tool calls by id and name, results,
        images; not how a client spells them."""
        content, item = self.holder.get(self.key), self.item
        said: list[Any] = []
        if isinstance(content, list):
            said += [bare(p) for p in content if isinstance(p, dict) and p.get("type") not in _UNSAID_PARTS]
        elif content is not None and not isinstance(content, str):
            said.append(content)
        if item is not None:
            said += [item[key] for key in ("call_id", "tool_call_id") if key in item]
            calls = item.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                function = call.get("function") if isinstance(call, dict) else None
                said += [call.get("id"), function.get("name")] if isinstance(function, dict) else [call]
        return "".join([PIECE + (piece if isinstance(piece, str) else _sorted_json(piece)) for piece in said])


PIECE = "\x1f"
_sorted_json = json.JSONEncoder(sort_keys=True).encode
_UNSAID_PARTS = TEXT_PARTS | {"thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"}


def bare(part: Json) -> Json:
    """A content part without what llama-server does not read (cache_control) or clients spell anew (a call's input)."""
    dropped = ("cache_control", "input") if part.get("type") == "tool_use" else ("cache_control",)
    return {key: value for key, value in part.items() if key not in dropped}


class View:
    """A request body as turns. `head` is system text that stands beside the list; `turns` are the list's entries."""

    __slots__ = ("body", "dialect", "head", "turns")

    def __init__(self, body: Json, dialect: Dialect, head: list[Turn], turns: list[Turn]) -> None:
        self.body, self.dialect, self.head, self.turns = body, dialect, head, turns

    def all(self) -> list[Turn]:
        return self.head + self.turns

    def leading(self) -> int:
        """How many turns at the start of the list are system or developer messages."""
        count = 0
        while count < len(self.turns) and self.turns[count].role == "system":
            count += 1
        return count

    def system(self) -> list[Turn]:
        """The turns that make the system prompt."""
        return self.head + self.turns[: self.leading()]

    def store(self) -> None:
        """Write `turns` back into the body after turns were added, replaced or taken out."""
        items = [turn.item for turn in self.turns]
        if None not in items:
            self.body[self.dialect.turns] = items


def turn_of(item: Json) -> Turn:
    """A turn from an entry of `messages` or `input`."""
    role = item.get("role") if "role" in item else ITEM_ROLES.get(str(item.get("type")), "other")
    if role in SYSTEM_ROLES:
        role = "system"
    elif role == "function":
        role = "tool"
    elif role not in ("user", "assistant", "tool", "reasoning"):
        role = "other"
    content = item.get("content")
    parts = content if role == "user" and isinstance(content, list) else []
    if parts and all(isinstance(part, dict) and part.get("type") == "tool_result" for part in parts):
        role = "tool"
    return Turn(role, item, "output" if "output" in item and "content" not in item else "content", item)


def view_of(body: Any, dialect: Dialect) -> View | None:
    """The view of a parsed body, or None when its shape is not the dialect's (such a body is forwarded untouched)."""
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
    if dialect.turns == "prompt":
        return View(body, dialect, head, [Turn("other", body, "prompt", None)]) if isinstance(items, list) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return None
    return View(body, dialect, head, [turn_of(item) for item in items])


def guess_dialect(body: Json) -> Dialect:
    """The dialect that a body is most likely in, when no path tells."""
    if "input" in body:
        return DIALECTS["responses"]
    if "messages" not in body:
        return DIALECTS["completions"]
    return DIALECTS[
        "messages" if "system" in body or "max_tokens" in body and "stop" not in body else "chat/completions"
    ]


class Unreadable(ValueError):
    """The body is forwarded as it came; the message says why."""


def _pairs(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Unreadable("duplicate keys")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise Unreadable("a number too large for a float")
    return number


def _constant(text: str) -> float:
    raise Unreadable(f"{text} is not JSON")


PARSE_LIMIT = 32 << 20  # bytes; parsing takes several times a body's size, and no context window holds so much text


def parse(raw: bytes | bytearray) -> Json:
    """The JSON object in `raw`. Raises Unreadable for all that could not be written again with the same meaning."""
    if len(raw) > PARSE_LIMIT:
        raise Unreadable(f"longer than {PARSE_LIMIT >> 20} MB")
    try:
        text = raw.decode("utf-8")
        body = json.loads(text, object_pairs_hook=_pairs, parse_float=_finite, parse_constant=_constant)
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
    """JSON bytes as a JavaScript client writes them; ASCII escapes are faster and keep lone surrogates."""
    try:
        return json.dumps(body, separators=(",", ":")).encode("ascii")
    except RecursionError:
        raise Unreadable("nested too deeply") from None


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


# ======================================================================================================================
# Scrub: rules that take out what never helps the model. Stateless: the same text in, the same text out
# ======================================================================================================================

# --- OpenClaw's decorations at the start of a user text, parsed once by lead(); the rules below work on its spans -----

_ZONE = r"(?: [A-Z]{2,5}(?:[+-]\d{1,2}(?::\d\d)?)?|Z)"
_WEEKDAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_TIME = r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?" + _ZONE
_CHANNEL = (  # an envelope's label begins with one of these; "[Meeting Thu 2026-05-07 ..." is somebody's own words
    r"(?:BlueBubbles|Discord|Feishu|Google Chat|GoogleChat|IRC|LINE|Matrix|Mattermost|MSTeams|Teams|Nextcloud Talk|"
    r"Nostr|Signal|Slack|Telegram|Tlon|Twitch|WebChat|WhatsApp|Zalo|iMessage)"
)
_EVENT = r"System(?: \(untrusted\))?:"
_LABEL = r"[A-Z][^\n:()\[\]]{1,80}(?: \((?:untrusted|trusted)[^)\n]{0,100}\):|: \u27e6openclaw:ctx\u27e7)"

LEADS = (  # (kind, pattern), tried in this order where a text begins, again and again
    # [Wed 2026-02-18 20:48 UTC] or [Matrix room:ops Thu 2026-05-07 08:01:33 GMT+1]. Older envelopes without a weekday,
    # [Signal Ann id:+1555 +4s 2026-11-29 18:14 UTC], name the sender, are stored with the message, and never vary.
    ("stamp", rf"\[(?:{_CHANNEL}(?: [^\]\n]{{1,120}})? )?{_WEEKDAY} {_TIME}\](?: |(?=\n)|$)"),
    ("block", rf"{_LABEL} ?\n```(?:json)?\n(?P<json>.*?)\n```(?:\n+|$)"),
    ("context", r"(?:Conversation|Untrusted) context \((?:untrusted|metadata)[^\n]*\):\n(?:[^\n]+\n)+(?:\n|$)"),
    ("current", r"Current message:\n(?:\[Replying to: [^\n]*\]\n)?#[^\s:]+ [^\n:]{1,120}: "),
    ("event", rf"{_EVENT} \[\d{{4}}-\d\d-\d\d [^\n]*(?:\n+{_EVENT} [^\n]*)*(?:\n+|$)"),
    ("runtime", r"OpenClaw runtime context for the (?:.*?<<<END_OPENCLAW_INTERNAL_CONTEXT>>>|.*)(?:\n+|$)"),
    ("internal", r"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*?<<<END_OPENCLAW_INTERNAL_CONTEXT>>>(?:\n+|$)"),
    ("reminder", r"<system-reminder>.*?</system-reminder>(?:\n+|$)"),
    ("environment", r"<environment_(?P<env>context|details)>.*?</environment_(?P=env)>(?:\n+|$)"),
    ("reply", r"\[Replying to (?:[^\n]*\n)?.*?\[/Replying\](?:\n+|$)"),
    ("line", r"(?:\[(?:media attached|from:|Forwarded from) [^\]\n]*\]|Delivery: [^\n]*)(?:\n+|$)"),
)
LEAD = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in LEADS), re.DOTALL)
TAIL = re.compile(
    r"\n+(?:\[(?:message_id|slack message id|media attached)[: ][^\]\n]*\]|Runtime: agent=[^\n]* \| [^\n]*|"
    r"<system-reminder>(?:(?!<system-reminder>).)*</system-reminder>|"
    r"<environment_details>(?:(?!<environment_details>).)*</environment_details>)\s*\Z",
    re.DOTALL,
)


def lead(text: str) -> list[re.Match[str]]:
    """The decorations at the start of a user text, in order; a match's group names are the kinds of LEADS.

    At most one stamp counts: a second one was typed by the person.
    """
    found: list[re.Match[str]] = []
    at = len(text) - len(text.lstrip())
    stamped = False
    while at < len(text) and (text[at] in "[<" or "A" <= text[at] <= "Z"):  # no decoration begins otherwise
        match = LEAD.match(text, at)
        if match is None or (stamped and match["stamp"] is not None):
            break
        stamped = stamped or match["stamp"] is not None
        found.append(match)
        at = match.end()
        while at < len(text) and text[at] == "\n":
            at += 1
    return found


# --- JSON members taken out without touching the layout of what stays --------------------------------------------------

ID_KEYS = frozenset(("message_id", "message_id_full", "reply_to_id", "reply_to_id_full", "message_sid"))
# In the system prompt these vary from turn to turn as well: who speaks in a group, and what was mentioned.
INBOUND_KEYS = ID_KEYS | {"sender_id", "flags"}
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def drop_members(text: str, start: int, keys: frozenset[str], deep: bool) -> tuple[str, int, int]:
    """Take members named in `keys` out of the JSON object or array that begins at text[start].

    Returns (new value, end of the old value, members removed). Separators and indentation of the members that stay are
    kept, so no comma dangles. Raises ValueError when the brackets do not match.
    """
    opener = text[start]
    closer = {"{": "}", "[": "]"}[opener]
    members: list[tuple[int, str, bool]] = []  # start, text, kept
    ends: list[int] = []
    begin, piece, name, at, removed, last = -1, start, None, start + 1, 0, start + 1
    parts: list[str] = []
    while True:
        token = TOKEN.search(text, at)
        if token is None:
            raise ValueError("no end")
        word, at = token.group(), token.end()
        if word == closer or word == ",":
            if begin >= 0:
                parts.append(text[piece:last])
                drop = opener == "{" and name in keys
                members.append((begin, "".join(parts), not drop))
                ends.append(last)
                removed += drop
                begin, name, parts = -1, None, []
            if word == closer:
                break
            continue
        if word in "}]":
            raise ValueError("brackets do not match")
        if begin < 0:
            begin = piece = token.start()
            if word[0] == '"' and opener == "{":
                name = word[1:-1]
        if word in "{[":
            value, last, count = drop_members(
                text, token.start(), keys if deep and name not in keys else frozenset(), deep
            )
            parts += [text[piece : token.start()], value]
            piece, at, removed = last, last, removed + count
        else:
            last = at
    if not removed:
        return text[start:at], at, 0
    kept = [index for index, member in enumerate(members) if member[2]]
    if not kept:
        return opener + closer, at, removed
    out = [text[start : members[0][0]]]
    for place, index in enumerate(kept):
        if place:
            out.append(text[ends[index - 1] : members[index][0]])
        out.append(members[index][1])
    out.append(text[ends[-1] : at])
    return "".join(out), at, removed


# --- the rules' functions: a text and the decorations at its start in, cuts out ----------------------------------------


class Cut(NamedTuple):
    """text[start:end] becomes `put`; `count` removals."""

    start: int
    end: int
    put: str
    removed: int


Lead = list[re.Match[str]]


def cut_inbound(text: str, _: Lead) -> Iterator[Cut]:
    """The per-turn keys of each openclaw.inbound_meta JSON object in a system prompt."""
    at = 0
    while (mark := text.find('"openclaw.inbound_meta.', at)) >= 0:
        at, start = mark + 1, mark
        for _attempt in range(32):  # the object's own brace is the nearest one whose object reaches beyond the mark
            start = text.rfind("{", 0, start)
            try:
                value, end, count = drop_members(text, start, INBOUND_KEYS, False) if start >= 0 else ("", 0, -1)
            except (ValueError, RecursionError):
                break
            if count < 0 or end > mark:
                if count > 0:
                    yield Cut(start, end, value, count)
                at = max(at, end)
                break


def cut_block_ids(text: str, spans: Lead) -> Iterator[Cut]:
    """Id keys in the labelled JSON blocks at the start of a user text, and whole [message_id: ...] lines."""
    for match in spans:
        start, end = match.span("json")
        if start >= 0 and text[start : start + 1] in ("{", "["):
            with contextlib.suppress(ValueError, RecursionError):
                value, stop, count = drop_members(text, start, ID_KEYS, True)
                if stop == end and count:
                    yield Cut(start, end, value, count)
    for line in ID_LINE.finditer(text) if "message_id: " in text or "[slack message id: " in text else ():
        yield Cut(*line.span(), "", 1)


# A line that closes a text stays: clients store it with the message, it never varies, and tools to react or edit need it.
ID_LINE = re.compile(
    r"^\[(?:message_id: [^\]\n]{1,80}|slack message id: [^\]\n]{1,160})\]\n+(?=.)", re.MULTILINE | re.DOTALL
)


def cut_stamp(text: str, spans: Lead) -> Iterator[Cut]:
    """The time stamp at the start of a user text, or after OpenClaw's blocks."""
    for match in spans:
        if match["stamp"] is not None:
            yield Cut(*match.span(), "", 1)


BILLING = re.compile(r"(?:x-anthropic-billing-header: [^\n]*|\[Anthropic\] Claude Code v\S+ \([^()\n]*\))(?:\n+|\Z)")


def cut_billing(text: str, _: Lead) -> Iterator[Cut]:
    """Claude Code's attribution, at the very start."""
    if match := BILLING.match(text):
        yield Cut(*match.span(), "", 1)


class Rule(NamedTuple):
    """A row of the table: which texts it looks at, and what it must leave alone."""

    name: str
    on: Callable[[Config], bool]
    markers: tuple[str, ...]  # one of them must be in the text (and so in the body's bytes) before any work is done
    role: str
    first: bool  # only the first text of that role
    cuts: Callable[[str, Lead], Iterator[Cut]]
    counter: str  # the field of Report that counts its removals
    spares: str


RULES = (
    Rule(
        "billing header", lambda c: c.strip_billing, ("x-anthropic-billing-header:", "[Anthropic] Claude Code v"),
        "system", True, cut_billing, "billing_removed", "the same words anywhere but at the very start",
    ),
    Rule(
        "ids in the inbound block", lambda c: c.strip_message_ids != "0", ("openclaw.inbound_meta.",),
        "system", False, cut_inbound, "msg_ids_removed", "channel, provider, chat_id: stable in a conversation",
    ),
    Rule(
        "ids in user blocks", lambda c: c.strip_message_ids == "1", ("message_id", "reply_to_id", "slack message id"),
        "user", False, cut_block_ids, "msg_ids_removed", "JSON without OpenClaw's label, ids in running text",
    ),
    Rule(
        "time stamp", lambda c: c.strip_timestamps, (" 202", " 203"),
        "user", False, cut_stamp, "ts_removed", "a stamp later in the text, a second stamp, other date forms",
    ),
)  # fmt: skip


class Scrubber:
    """The rules that a configuration switches on, with the user's patterns compiled."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rules = [rule for rule in RULES if rule.on(config)]
        self.patterns = [re.compile(pattern) for pattern in config.strip_regex]
        self.memo: dict[tuple[str, str, bool], tuple[str, list[tuple[str, int]]]] = {}

    def may_edit(self, raw: bytes | bytearray, role: str = "", start: int = 0) -> bool:
        """Whether a rule (for `role`) finds its marker in a body's bytes; without one, no rule would change it."""
        markers = {marker for rule in self.rules if role in ("", rule.role) for marker in rule.markers}
        return bool(self.patterns) or any(raw.find(marker.encode(), start) >= 0 for marker in sorted(markers))

    def apply(self, view: View, report: Report) -> None:
        """Run the table over a view, in place, then put the system text first."""
        report.items = len(view.turns)
        seen_system = False
        for turn in view.all():
            if turn.role not in ("system", "user"):
                continue
            changed = False
            for slot in turn.slots():
                changed |= self.edit(slot, turn.role, not seen_system, report)
                seen_system = seen_system or turn.role == "system"
            if turn.item is not None and self.config.strip_message_ids == "1" and "role" in turn.item:
                for key in ID_KEYS & turn.item.keys():  # beside role and content; never in a schema, argument or result
                    del turn.item[key]
                    report.msg_ids_removed += 1
                    changed = True
            report.items_modified += changed
        if report.billing_removed:
            drop_empty_first(view)
        if self.config.system_first and needs_system_first(view):
            system_first(view, report)

    def edit(self, slot: Slot, role: str, first: bool, report: Report) -> bool:
        """Edit one text; whether it changed. History comes again with every request, so results are remembered."""
        old = slot.get()
        key = (old, role, first)
        known = self.memo.get(key)
        if known is None:
            known = self.cut(old, role, first)
            if len(old) <= MEMO_TEXT:
                remember(self.memo, key, known)
        text, counts = known
        for counter, count in counts:
            setattr(report, counter, getattr(report, counter) + count)
        if text == old:
            return False
        slot.set(text)
        return True

    def cut(self, text: str, role: str, first: bool) -> tuple[str, list[tuple[str, int]]]:
        """The text after all rules, and what to count."""
        due = [rule for rule in self.rules if rule.role == role and any(marker in text for marker in rule.markers)]
        spans = lead(text) if due and role == "user" else []
        cuts: list[Cut] = []
        counts = []
        for rule in due:
            found = list(rule.cuts(text, spans)) if first or not rule.first else []
            cuts += found
            counts.append((rule.counter, sum(cut.removed for cut in found)))
        for cut in sorted(cuts, reverse=True):
            text = text[: cut.start] + cut.put + text[cut.end :]
        for pattern in self.patterns:
            text, count = pattern.subn("", text)
            counts.append(("regex_removed", count))
        return text, [pair for pair in counts if pair[1]]


MEMO_TEXT, MEMO_SIZE = 4096, 4096  # longest text remembered, in characters; texts remembered


def remember(memo: dict[Any, Any], key: Any, value: Any, most: int = MEMO_SIZE) -> None:
    """Keep a result; a full memo starts anew, which costs one slow request."""
    if len(memo) >= most:
        memo.clear()
    memo[key] = value


def drop_empty_first(view: View) -> None:
    """Take out a first system block or message that the billing rule left empty."""
    turn = next(turn for turn in view.all() if turn.role == "system")
    content = turn.holder.get(turn.key)
    if isinstance(content, list) and len(content) > 1:
        if turn.slots()[0].get() == "":
            del content[0]
            turn.found = None
    elif turn.text() == "" and turn.item is None:
        del turn.holder[turn.key]
        view.head.remove(turn)
    elif turn.text() == "" and len(view.turns) > 1:
        view.turns.remove(turn)
        view.store()


# --- roles: the system text comes first ---------------------------------------------------------------------------------


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text.strip()}\n</system-reminder>"


def add_text(view: View, turn: Turn, text: str) -> bool:
    """Append a text to a turn: to its string, or as a part of its own."""
    content, turn.found = turn.holder.get(turn.key), None
    if isinstance(content, str):
        turn.holder[turn.key] = content + "\n\n" + text if content else text
    elif isinstance(content, list):
        content.append({"type": view.dialect.text, "text": text})
    else:
        return False
    return True


def system_first(view: View, report: Report) -> None:
    """One system text, at the front.

    Chat templates such as Qwen's refuse a system message anywhere else ("System message must be at the beginning"), and
    a block behind the first user text cannot be shared by the next conversation. So leading ones are merged; the first
    one before any answer moves up to them; later ones become a reminder in the user turn before them (else after them),
    which depends on nothing that a later request could change.
    """
    moved: list[Turn] = []
    turns = list(view.turns)
    count = view.leading()
    base = view.head[0] if view.head else turns[0] if count else None
    merge = turns[0 if view.head else 1 : count]
    answered = next((i for i, turn in enumerate(turns) if turn.role in ("assistant", "tool")), len(turns))
    hoist = next((turn for turn in turns[count:answered] if turn.role == "system"), None)
    if not all(turn.slots() for turn in turns if turn.role == "system"):
        return  # a system message without text: an unknown shape
    for turn in [*merge, *([hoist] if hoist else [])]:
        if base is None:
            if view.dialect.system:
                view.body[view.dialect.system] = turn.text()
                base = Turn("system", view.body, view.dialect.system, None)
                view.head.append(base)
            else:
                base = turn
                turns.remove(turn)
                turns.insert(0, turn)
                report.system_moved += 1
                continue
        else:
            last = base.slots()[-1]
            last.set(last.get() + "\n\n" + turn.text())
        moved.append(turn)
    if moved:
        turns = [turn for turn in turns if not any(turn is gone for gone in moved)]
        report.system_moved += len(moved)
    start = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    kept = turns[:start]
    for index in range(start, len(turns)):
        turn = turns[index]
        if turn.role == "system":
            report.system_moved += 1
            text = reminder(turn.text())
            before = kept[-1] if kept else None
            after = turns[index + 1] if index + 1 < len(turns) else None
            carries_user = before is not None and before.item is not None and before.item.get("role") == "user"
            if before is not None and before.item is not None and carries_user and add_text(view, before, text):
                before.role = turn_of(before.item).role
                continue
            if after is not None and after.role == "user" and after.slots():
                slot = after.slots()[0]
                slot.set(text + "\n\n" + slot.get())
                continue
            turn = turn_of(
                {**{k: v for k, v in (turn.item or {}).items() if k == "type"}, "role": "user", "content": text}
            )
        kept.append(turn)
    view.turns = kept
    view.store()


def needs_system_first(view: View) -> bool:
    places = [index for index, turn in enumerate(view.turns) if turn.role == "system"]
    return len(places) + len(view.head) > 1 or bool(places and places[0] > 0)


def scrub(payload: Json, config: Config | None = None, dialect: str | None = None) -> tuple[Json, Report]:
    """A scrubbed copy of a request body, and what was removed; `payload` itself is not changed.

    `dialect` is chat, responses, messages or completions; without it the body's shape decides. This is the stateless
    half of kvproxy (rules and SYSTEM_FIRST). A body of unknown shape comes back equal, with `report.note` set.
    """
    config = config or Config()
    report = Report()
    named = {row.name: row for row in DIALECTS.values()}
    if dialect is not None and dialect not in named:
        raise ValueError(f"dialect={dialect!r}: must be one of {', '.join(named)}")
    body = copy.deepcopy(payload)
    view = view_of(body, named[dialect] if dialect else guess_dialect(body)) if isinstance(body, dict) else None
    if view is None:
        report.note = "unknown shape"
        return body, report
    if config.scrub and view.dialect.edited:
        Scrubber(config).apply(view, report)
    return body, report


# ======================================================================================================================
# Lift: what varies in the system prompt moves to the newest user turn, so that every conversation shares its front
# ======================================================================================================================


class Lift(NamedTuple):
    """A shape that a client writes into its system prompt, at the start of a line, and what it must not match."""

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
    _lift(
        "OpenClaw 6.11-8.1", "sessionId=", r"^Runtime: agent=[^\n]* \| sessionId=[0-9a-f-]{36}[^\n]*(?:\n|\Z)",
        "the runtime line without a session id, which is stable",
    ),
    _lift(
        "OpenClaw 9.6", "sessions_list", r"^## \w+ Sessions\n[^\n]*\bsessions_list\b[^\n]*\n(?:- agent:[^\n]*(?:\n|\Z))+",
        "the same words without a list of sessions",
    ),
    _lift(
        "Claude Code to 2.1.2xx", "gitStatus: ",
        rf"^gitStatus: [^\n]*\n(?:\n|Current branch: [^\n]*\n|Main branch [^\n]*\n|Git user: [^\n]*\n)*"
        rf"(?:Status:\n(?:[^\n]+\n)*\n?)?(?:Recent commits:\n{_COMMITS})?",
        "`# gitStatus` in a user reminder, git advice in tool descriptions",
    ),
    _lift(
        "Claude Code, Vibe, Home Assistant", "oday's date is ",
        rf"^(?:Current time is [\d:]{{4,8}}(?: ?[AP]M)?\. )?Today's date is {_DATE}\.?(?: \([A-Z][a-z]+\)\.?)?[ ]*(?:\n|\Z)",
        "`The date has changed. Today's date is now ...`, which is part of the story",
    ),
    _lift(
        "opencode, Kilo, Continue", "Today's date: ", rf"^[ \t]*Today's date: {_DATE}[ \t]*(?:\n|\Z)",
        "`Today's date:` without a date behind it",
    ),
    _lift(
        "Qwen Code", "git: ", r"^git: (?:Current branch|Status|Recent commits)[^\n]*\n(?:git: [^\n]*(?:\n|\Z))*",
        "`git:` in running text or advice on commands",
    ),
    _lift(
        "Continue", '="gitStatus">', r'^<context \w+="gitStatus">(?:(?!</context>)[\s\S])*</context>[ ]*(?:\n|\Z)',
        "other <context> blocks: rules and project files are stable",
    ),
    _lift(
        "Vibe, hermes", "Recent commits:",
        rf"^(?:Current branch: [^\n]*\n\n?)?(?:Main branch [^\n]*\n\n?)?(?:(?:Git )?[Ss]tatus: ?[^\n]*\n(?:[ MADRCU?!]{{1,2}} "
        rf"[^\n]+\n)*\n?)?Recent commits:\n{_COMMITS}",
        "`Recent commits` without commit lines",
    ),
    _lift(
        "hermes", "Conversation started: ", rf"^Conversation started: {_DATE}[^\n]*(?:\n|\Z)",
        "`Conversation started` without a date",
    ),
    _lift(
        "OpenHands, AnythingLLM, goose", "<CURRENT_DATETIME>|<current-time>|<current_datetime>|<current_time>",
        r"^<(?P<tag>CURRENT_DATETIME|current-time|current_datetime|current_time)>[^<]{0,200}</(?P=tag)>[ ]*(?:\n|\Z)",
        "the tag in the middle of a line",
    ),
    _lift(
        "Copilot CLI", "Session ", r"^Session \w+: [^\n]*/[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}[ ]*(?:\n|\Z)",
        "paths without a session's uuid: working directories are stable",
    ),
    _lift(
        "Open WebUI, AnythingLLM, Home Assistant, goose", "urrent ",
        rf"^(?:The )?[Cc]urrent (?:date|time|date and time|datetime)(?: is|:) (?:{_DATE}|[\d:]{{4,8}})[^\n]{{0,40}}(?:\n|\Z)",
        "a longer sentence that only mentions the current date",
    ),
)  # fmt: skip


def lift_rows(config: Config) -> tuple[Lift, ...]:
    """The table and the user's own patterns."""
    if not config.lift:
        return ()
    return LIFTS + tuple(Lift("yours", ("",), re.compile(pattern, re.MULTILINE), "") for pattern in config.lift_regex)


class Lifted(NamedTuple):
    """A text taken out of the system prompt, and the row that found it."""

    row: Lift
    text: str


def lift_text(text: str, rows: Iterable[Lift]) -> tuple[str, list[Lifted]]:
    """A system text without its volatile parts, and those parts."""
    found: list[Lifted] = []
    for row in rows:
        for match in reversed(row.find(text)):
            found.append(Lifted(row, match.group().strip()))
            text = text[: match.start()] + text[match.end() :]
    return text, found


def lift(view: View, cut: Callable[[str], tuple[str, list[Lifted]]]) -> list[Lifted]:
    """Cut volatile texts out of the system prompt, in place, and return them. `cut` is lift_text with its rows."""
    found: list[Lifted] = []
    if any(turn.role == "user" and turn.slots() for turn in view.turns):  # else there is nowhere to set them down
        for slot in [slot for turn in view.system() for slot in turn.slots()]:
            text, pieces = cut(slot.get())
            if pieces:
                slot.set(text)
                found += pieces
    return found


# ======================================================================================================================
# Replay: history is sent again as it was sent
# ======================================================================================================================


def mask(text: str, patterns: Iterable[re.Pattern[str]] = ()) -> str:
    """A user text without the decorations that clients add to the newest turn and take from history."""
    matches = lead(text)
    if matches:
        text = text[matches[-1].end() :]
    text = text.rstrip()
    while text.endswith(("]", ">")) or "\nRuntime: agent=" in text:
        shorter = TAIL.sub("", text)
        if shorter == text:
            break
        text = shorter
    for pattern in patterns:
        text = pattern.sub("", text)
    return text.strip()


def digest(*parts: str | bytes) -> bytes:
    """A short hash of some texts."""
    data = [part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts]
    return hashlib.blake2b(b"\0".join(data), digest_size=12).digest()


class Unit:
    """A turn, the carriers behind it, and its key in the chain. The first unit has no turn: it stands for the head."""

    __slots__ = ("carriers", "key", "said", "turn")

    def __init__(self, turn: Turn | None, said: str, key: bytes) -> None:
        self.turn, self.said, self.key = turn, said, key
        self.carriers: list[Turn] = []

    def role(self) -> str:
        return self.turn.role if self.turn else "head"


class Version:
    """A unit as it was forwarded once: `items` are JSON objects (own turn first, None: as it comes), `head` the system
    prompt it stood under, `claims` the answers that followed it, `parent` the (key, serial) of the one before it."""

    __slots__ = ("claims", "head", "hint", "items", "parent", "pending", "serial", "size")

    def __init__(self, items: list[Json | None], head: bytes, parent: tuple[bytes, int] | None, serial: int) -> None:
        self.items, self.head, self.parent, self.serial = items, head, parent, serial
        self.claims: set[bytes] = set()
        self.pending, self.hint = True, ""
        self.size = 400 + sum(2 * len(dump(item)) for item in items if item)

    def decorated(self) -> bool:
        return self.items != [None]


class Store:
    """What was forwarded, by chain key; bounded, least recently used out first. Use it under `lock`."""

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self.limit, self.size, self.serial, self.decorated = limit, 0, 0, 0
        self.versions: collections.OrderedDict[bytes, list[Version]] = collections.OrderedDict()
        self.tools: collections.OrderedDict[bytes, str] = collections.OrderedDict()  # first-seen spelling
        self.spelled: dict[str, bytes] = {}
        self.clean: collections.deque[tuple[bytes, list[bytes]]] = collections.deque(maxlen=8)
        self.orders: collections.OrderedDict[bytes, list[bytes]] = collections.OrderedDict()

    def find(self, key: bytes) -> list[Version]:
        found = self.versions.get(key)
        if found is None:
            return []
        self.versions.move_to_end(key)
        return found

    def add(self, key: bytes, version: Version) -> Version:
        """Remember a version; one that is equal already is taken instead, and waits for an answer again."""
        known = self.versions.setdefault(key, [])
        self.versions.move_to_end(key)
        for old in known:
            if old.head == version.head and old.items == version.items:
                known.remove(old)
                known.append(old)
                old.pending, old.parent = True, version.parent
                return old
        known.append(version)
        self.account(version, 1)
        if len(known) > 32:
            self.account(known.pop(0), -1)
        return version

    def clean_tools(self, raw: bytes | bytearray) -> list[bytes] | None:
        """The order of a body's tools when their very bytes were sent before and needed no change."""
        at = raw.find(b'"tools":')
        return next((order for known, order in self.clean if at >= 0 and raw.startswith(known, at)), None)

    def add_clean(self, raw: bytes | bytearray, order: list[bytes]) -> None:
        at = raw.find(b'"tools":')
        if at >= 0:
            with contextlib.suppress(ValueError):
                text = bytes(raw[at + 8 :]).decode("utf-8")
                _, end = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
                self.clean.append((bytes(raw[at : at + 8 + len(text[:end].encode())]), order))

    def add_tools(self, forms: Mapping[bytes, str], orders: Mapping[bytes, list[bytes]]) -> None:
        """Remember tools in the spelling seen first, and the order of a set (or a conversation's) in the order sent."""
        for name, text in forms.items():
            if name not in self.tools:
                self.tools[name] = text
                self.spelled[text] = name
                self.size += 300 + len(text)
            self.tools.move_to_end(name)
        for key, order in orders.items():
            self.size += 200 + 40 * len(order) - (200 + 40 * len(self.orders.get(key, ())) if key in self.orders else 0)
            self.orders[key] = order
            self.orders.move_to_end(key)

    def trim(self) -> None:
        """Forget what was not used for longest until the limit holds; forgetting costs one miss."""
        while self.size > self.limit or len(self.tools) > 4096 or len(self.orders) > 4096:
            if len(self.orders) > (4096 if self.versions else 0):
                self.size -= 200 + 40 * len(self.orders.popitem(last=False)[1])
            elif len(self.tools) > (4096 if self.versions else 0):
                text = self.tools.popitem(last=False)[1]
                del self.spelled[text]
                self.size -= 300 + len(text)
            elif self.versions:
                for version in self.versions.popitem(last=False)[1]:
                    self.account(version, -1)
            else:
                break

    def idle(self) -> bool:
        """Nothing is stored that could change a request."""
        return not self.decorated

    def account(self, version: Version, sign: int) -> None:
        self.size += sign * version.size
        self.decorated += sign * version.decorated()


@dataclasses.dataclass
class Trace:
    """Where a request stands among conversations: for explain, and to note the answer when it comes."""

    conversation: str = ""
    newest: list[Version] = dataclasses.field(default_factory=list)


class Replay:
    """Restores what a client took out of, or rewrote in, its history. One per Proxy; safe to use from many threads."""

    def __init__(self, config: Config) -> None:
        self.store = Store(config.replay_mb << 20)
        self.patterns = [re.compile(pattern) for pattern in config.replay_regex]
        self.rows = lift_rows(config)
        self.masks: dict[str, str] = {}
        self.cuts: dict[str, tuple[str, list[Lifted]]] = {}

    def lift_text(self, text: str) -> tuple[str, list[Lifted]]:
        """lift_text() with a memory: conversations share their system prompts."""
        known = self.cuts.get(text)
        if known is None:
            known = lift_text(text, self.rows)
            remember(self.cuts, text, known, 16)
        return known

    def mask(self, text: str) -> str:
        """mask() with a memory: history comes again with every request."""
        masked = self.masks.get(text)
        if masked is None:
            masked = mask(text, self.patterns)
            if len(text) <= MEMO_TEXT:
                remember(self.masks, text, masked)
        return masked

    def units(self, view: View, turns: list[Turn]) -> list[Unit]:
        """The turns behind the system prompt as units with chained keys."""
        chain = hashlib.blake2b(view.dialect.name.encode(), digest_size=12)
        units = [Unit(None, "", chain.digest())]
        for turn in turns:
            role = turn.role
            if role == "user":
                texts = [self.mask(slot.get()) for slot in turn.slots()]
                said = "\n".join([text for text in texts if text]) + turn.rest()
                if not said and turn.item is not None and texts:
                    units[-1].carriers.append(turn)
                    continue
            elif role == "reasoning":  # clients drop reasoning at will: the chain passes it by
                units.append(Unit(turn, "", digest(chain.digest(), role)))
                continue
            else:
                said = turn.text().strip() + turn.rest()
            chain.update(b"\0%s\0" % role.encode())
            chain.update(said.encode("utf-8", "surrogatepass"))
            units.append(Unit(turn, said, chain.digest()))
        return units

    def apply(
        self, view: View, lifted: list[Lifted], report: Report, raw: bytes | bytearray = b"", learn: bool = True
    ) -> Trace:
        """Replace history with what was sent, drop carriers that are there already, set lifted text down. In place.

        `raw` is the body as received: tools whose bytes are known need no look. `learn` is False for requests that
        only count tokens.
        """
        start = view.leading()
        units = self.units(view, view.turns[start:])
        head = digest(*(turn.text() for turn in view.system()))
        first = next((unit.said for unit in units if unit.role() == "user"), "")
        trace = Trace(digest(view.dialect.name, head, first).hex())
        last = max((i for i, unit in enumerate(units) if unit.role() == "assistant"), default=0)
        with self.store.lock:
            self.tools(view, units, report, raw, learn)
            path = self.history(units, last, head)
            restore(units, path, report)
            drop_repeated(units, last, report)
            late = set_down(units, last, lifted, report)
            view.turns = view.turns[:start] + flat(units)
            view.store()
            if learn:
                self.learn(units, last, late, path, head, trace)
                self.store.trim()
        return trace

    def history(self, units: list[Unit], last: int, head: bytes) -> dict[int, Version]:
        """The stored version of each unit of history (those before the last answer), where one is beyond doubt."""
        path: dict[int, Version] = {}
        parent: tuple[bytes, int] | None = None
        answer = ""
        for index in range(last - 1, -1, -1):
            if units[index + 1].role() == "assistant":
                answer = units[index + 1].said
            known = self.store.find(units[index].key)
            if not known:
                continue
            claim = digest(answer)
            if path:  # a later unit is known: its parent tells which version stood here, or that none did
                version = next((v for v in known if parent == (units[index].key, v.serial)), None)
            else:
                version = pick(known, head, claim, answer)
            if version is not None:
                version.claims.add(claim)
                version.pending = False
                path[index] = version
                parent = version.parent
        return path

    def learn(
        self, units: list[Unit], last: int, late: int | None, path: dict[int, Version], head: bytes, trace: Trace
    ) -> None:
        """Remember the units after the last answer as they are forwarded now, and `late`, one that changed before it."""
        for index in ([late] if late is not None else []) + list(range(last, len(units))):
            unit = units[index]
            if unit.role() != "user" and not unit.carriers:
                continue
            before = max((i for i in path if i < index), default=None)
            parent = (units[before].key, path[before].serial) if before is not None else None
            own = None  # stands for "as it comes"
            turn = unit.turn if unit.role() == "user" else None
            if turn is not None and turn.item is not None and turn.text().strip() + turn.rest() != unit.said:
                own = stored_item(turn.item)
            items = [own, *(stored_item(turn.item) for turn in unit.carriers if turn.item is not None)]
            self.store.serial += 1
            path[index] = version = self.store.add(unit.key, Version(items, head, parent, self.store.serial))
            trace.newest.append(version)
            if index < last:
                version.pending = False
                version.claims.add(digest(next(u.said for u in units[index:] if u.role() == "assistant")))

    # --- tools: first-seen form, first-seen order ----------------------------------------------------------------------

    def tools(self, view: View, units: list[Unit], report: Report, raw: bytes | bytearray, learn: bool) -> None:
        """Send a tool that differs from an earlier one in key order only as it was sent then, and keep the order."""
        tools, store = view.body.get("tools"), self.store
        if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
            return
        talk = digest(b"talk", units[0].key, next((unit.key for unit in units if unit.role() == "user"), b""))
        clean = store.clean_tools(raw)
        if clean is not None:
            if learn:
                store.add_tools({}, {talk: clean})
            return
        spelled = [json.dumps(bare(tool)) for tool in tools]
        names = [store.spelled.get(text) or digest(_sorted_json(json.loads(text))) for text in spelled]
        if len(set(names)) != len(names):
            return
        by_name = dict(zip(names, zip(tools, spelled, strict=True), strict=True))
        wanted = digest(b"set", *sorted(names))
        order = store.orders.get(wanted, names)
        if wanted not in store.orders and any(unit.role() == "assistant" for unit in units):
            before = store.orders.get(talk, [])
            if before and set(before) < set(names):  # tools were added in the middle of a conversation
                order = before + [name for name in names if name not in set(before)]
        if order != names or any(name in store.tools and store.tools[name] != by_name[name][1] for name in order):
            forms = [json.loads(store.tools[name]) if name in store.tools else by_name[name][0] for name in order]
            view.body["tools"] = forms
            report.tools_restored += 1
        elif learn:
            store.add_clean(raw, order)
        if learn:
            store.add_tools({name: text for name, (_, text) in by_name.items()}, {wanted: order, talk: order})

    def answered(self, trace: Trace, hint: str) -> None:
        """Note how the answer to a request began, so that its turn can be told from others with the same words."""
        if hint:
            with self.store.lock:
                for version in trace.newest:
                    version.hint = hint


def flat(units: Iterable[Unit]) -> list[Turn]:
    return [turn for unit in units for turn in (unit.turn, *unit.carriers) if turn is not None]


def restore(units: list[Unit], path: Mapping[int, Version], report: Report) -> None:
    """Put the stored form of each known unit in its place."""
    for index, version in path.items():
        unit, own = units[index], version.items[0]
        carriers = [turn_of(item) for item in version.items[1:] if item is not None]
        kinds = {turn.text().split("\n", 1)[0] for turn in carriers}
        carriers += [turn for turn in unit.carriers if turn.text().split("\n", 1)[0] not in kinds]  # news, not moved
        changed = [turn.text() for turn in carriers] != [turn.text() for turn in unit.carriers]
        if unit.turn is not None and own is not None and not same_item(own, unit.turn.item):
            unit.turn, changed = turn_of(own), True
        if changed and version.decorated():
            unit.carriers = carriers
            report.replayed += 1


def drop_repeated(units: list[Unit], last: int, report: Report) -> None:
    """Take out a carrier after the last answer that says what the newest one of its kind before it said.

    A request may not end with the answer itself, which would ask the model to continue it: then carriers stay.
    """
    newest: dict[str, str] = {}  # by first line
    for index, unit in enumerate(units):
        kept = []
        for carrier in unit.carriers:
            text = carrier.text().strip()
            kind = text.split("\n", 1)[0]
            if 0 < last <= index and len(units) > last + 1 and newest.get(kind) == text:
                report.dropped += 1
            else:
                newest[kind] = text
                kept.append(carrier)
        unit.carriers = kept


def set_down(units: list[Unit], last: int, lifted: list[Lifted], report: Report) -> int | None:
    """Put lifted text in front of the newest user text, unless the conversation's newest of its kind is equal.

    Returns the index of a unit of history when the text had to go there: a tool loop whose beginning is not known.
    """
    if not lifted:
        return None
    report.lifted += len(lifted)
    texts = [slot.get() for turn in flat(units) if turn.role == "user" for slot in turn.slots()]
    due, said_before = [], False
    for piece in lifted:
        said = None
        for text in reversed(texts):
            if hits := piece.row.find(text):
                said = hits[-1].group().strip()
                break
        said_before = said_before or said is not None
        if said != piece.text:
            due.append(piece.text)
    takers = [
        i for i, unit in enumerate(units) if unit.role() == "user" and unit.turn is not None and unit.turn.slots()
    ]
    if not due or not takers or (takers[-1] < last and said_before):
        return None  # in a tool loop a changed value waits for the next user turn
    turn = units[takers[-1]].turn
    assert turn is not None
    if takers[-1] < last and turn.item is not None:
        units[takers[-1]].turn = turn = turn_of(copy.deepcopy(turn.item))  # it may be the store's own
    slot = turn.slots()[-1]
    slot.set(reminder("\n".join(due)) + "\n\n" + slot.get())
    return takers[-1] if takers[-1] < last else None


def pick(known: list[Version], head: bytes, claim: bytes, answer: str) -> Version | None:
    """Which of several versions of a turn belongs to a conversation that went on with `answer`; None when in doubt."""
    same = [version for version in known if version.head == head] or known
    matched = [v for v in same if claim in v.claims or (v.pending and v.hint and agrees(v.hint, answer))]
    if matched:
        return matched[-1]
    waiting = [version for version in same if version.pending]
    return waiting[0] if len(waiting) == 1 else None


def agrees(hint: str, answer: str) -> bool:
    """Whether an assistant turn is the answer that began with `hint` (its words, or the id of its first tool call)."""
    return answer.startswith(hint) or PIECE + hint in answer


def stored_item(item: Json) -> Json:
    """An item as it is kept for replay: without cache_control, which moves from turn to turn and may not pile up."""
    item = bare(item)
    content = item.get("content")
    if isinstance(content, list) and any(isinstance(part, dict) and "cache_control" in part for part in content):
        item["content"] = [
            {k: v for k, v in p.items() if k != "cache_control"} if isinstance(p, dict) else p for p in content
        ]
    return item


def same_item(stored: Json, item: Json | None) -> bool:
    """Whether two items read the same to the server: cache_control, and string or one-part form, do not count."""
    if item is None:
        return True
    a, b = turn_of(stored), turn_of(item)
    return [slot.get() for slot in a.slots()] == [slot.get() for slot in b.slots()] and a.rest() == b.rest()


# ======================================================================================================================
# Explain: how much of a prompt was reused, and why not more
# ======================================================================================================================


@dataclasses.dataclass
class Usage:
    """What the server reported of one answer; None where it did not (never 0 for unknown). Tokens, milliseconds."""

    prompt: int | None = None
    cached: int | None = None
    prompt_ms: float | None = None
    output: int | None = None

    def read(self) -> int | None:
        """Prompt tokens that the server had to read."""
        return self.prompt - self.cached if self.prompt is not None and self.cached is not None else None


USAGE_PATHS = (  # where a server puts a number: (field, path in the JSON object after "usage": or "timings":)
    ("prompt", "usage", ("prompt_tokens",)),
    ("cached", "usage", ("prompt_tokens_details", "cached_tokens")),  # chat, completions: llama-server, LM Studio, vLLM
    ("cached", "usage", ("prompt_cache_hit_tokens",)),
    ("cached", "usage", ("input_tokens_details", "cached_tokens")),  # responses
    ("cached", "usage", ("cache_read_input_tokens",)),  # messages
    ("output", "usage", ("completion_tokens",)),
    ("output", "usage", ("output_tokens",)),
    ("cached", "timings", ("cache_n",)),  # llama.cpp tools/server/server-task.cpp, result_timings::to_json
    ("prompt_ms", "timings", ("prompt_ms",)),
    ("output", "timings", ("predicted_n",)),
)


def usage_of(*windows: bytes) -> Usage:
    """The cache numbers in an answer, from its first and last bytes (SSE or JSON; llama-server, LM Studio and others).

    A quoted key followed by a colon cannot stand inside a JSON string, so the search needs no parse of the whole. The
    last object of a kind in a window counts: servers that report in every event report running totals.
    """
    usage = Usage()
    for window in windows:
        for kind in ("usage", "timings"):
            end = len(window)
            while (at := window.rfind(b'"%s"' % kind.encode(), 0, end)) >= 0:
                end = at
                with contextlib.suppress(ValueError, RecursionError):
                    text = window[at + len(kind) + 2 : at + 4096].decode("utf-8", "replace").lstrip()
                    value = _decoder.raw_decode(text[1:].lstrip())[0] if text[:1] == ":" else None
                    if isinstance(value, dict):
                        read_usage(usage, kind, value)
                        break
    return usage


_decoder = json.JSONDecoder()


def read_usage(usage: Usage, kind: str, value: Json) -> None:
    for field, where, path in USAGE_PATHS:
        found: Any = value if where == kind else None
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, (int, float)) and not isinstance(found, bool) and found >= 0:
            setattr(usage, field, found if field == "prompt_ms" else int(found))
    if kind == "timings" and isinstance(value.get("prompt_n"), int) and isinstance(value.get("cache_n"), int):
        usage.prompt = value["prompt_n"] + value["cache_n"]
    if kind == "usage" and isinstance(value.get("input_tokens"), int):
        usage.prompt = value["input_tokens"]
        if "cache_read_input_tokens" in value or "cache_creation_input_tokens" in value:
            # Anthropic: input_tokens is only what was not cached
            more = (value.get("cache_read_input_tokens"), value.get("cache_creation_input_tokens"))
            usage.prompt += sum(number for number in more if isinstance(number, int))


def hint_of(window: bytes) -> str:
    """How an answer begins: its first words, or the id of its first tool call; '' when the bytes do not tell."""
    words, begun = "", 0
    objects = [line[5:] for line in window.split(b"\n") if line.startswith(b"data:")] or [window]
    for text in objects:
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            break
        for piece, call in hint_parts(event):
            if call and not words.strip():
                return call
            words += piece
            begun += 1
        if len(words) > 400:
            break
    return words.strip()[:400]


def hint_parts(event: Any) -> Iterator[tuple[str, str]]:
    """(text, tool call id) pieces in one JSON object of an answer, streamed or whole, in any dialect."""
    if not isinstance(event, dict):
        return
    pieces: list[Any] = [event.get("content_block"), event.get("delta"), event.get("item")]
    for choice in event.get("choices") or ():
        pieces += [choice.get("delta"), choice.get("message")] if isinstance(choice, dict) else []
    for key in ("content", "output"):
        pieces += event[key] if isinstance(event.get(key), list) else []
    for piece in pieces:
        if isinstance(piece, str):
            if event.get("type") == "response.output_text.delta":
                yield piece, ""
        elif isinstance(piece, dict):
            for call in piece.get("tool_calls") or ():
                if isinstance(call, dict) and isinstance(call.get("id"), str):
                    yield "", call["id"]
            if piece.get("type") in ("tool_use", "function_call"):
                yield "", str(piece.get("call_id") or piece.get("id") or "")
            for key in ("content", "text"):
                if isinstance(piece.get(key), str) and piece.get("type") in (None, "text", "text_delta", "output_text"):
                    yield piece[key], ""
            if isinstance(piece.get("content"), list) and piece.get("type") == "message" and "item" not in event:
                for part in piece["content"]:
                    if isinstance(part, dict) and isinstance(part.get("text"), str):
                        yield part["text"], ""


class Segment(NamedTuple):
    """A piece of a prompt as the server reads it: `where` names it for people."""

    where: str
    text: str


def segments_of(view: View) -> list[Segment]:
    """The prompt in the order system, tools, turns."""
    start = view.leading()
    found = [Segment("system", turn.text()) for turn in view.system()]
    tools = view.body.get("tools")
    if isinstance(tools, list):
        found += [Segment(f"tool {tool_name(tool)}", json.dumps(tool)) for tool in tools]
    for number, turn in enumerate(view.turns[start:], 1):
        text, rest = turn.text(), turn.rest()
        said = [text] if text else []
        if rest:
            item = turn.item or {}
            said += [rest, *(dump(item[key]).decode() for key in ("tool_calls", "arguments", "name") if key in item)]
        found.append(Segment(f"turn {number} ({turn.role})", "\n".join(said)))
    return found


def first_turn(segments: list[Segment]) -> int:
    return next((i for i, segment in enumerate(segments) if segment.where.startswith("turn ")), len(segments))


def opening_of(segments: list[Segment]) -> str:
    """The first turn's text."""
    at = first_turn(segments)
    return segments[at].text if at < len(segments) else ""


def text_size(text: str) -> int:
    """About the bytes that a string takes in memory."""
    return 120 + len(text) * (1 if text.isascii() else 3)


def tooled(names: Iterable[str]) -> bool:
    return any(name.startswith("tool ") for name in names)


def alike(a: str, b: str) -> bool:
    """Whether two texts are versions of one: half of the longer one is common at the start and the end."""
    prefix = common_prefix(a, b)
    suffix = common_prefix(a[prefix:][::-1], b[prefix:][::-1])
    return prefix + suffix > max(len(a), len(b)) / 2


def tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = (function if isinstance(function, dict) else tool if isinstance(tool, dict) else {}).get("name")
    return name if isinstance(name, str) else "?"


def common_prefix(a: str, b: str) -> int:
    """Length of the common prefix, by halves: comparing slices is faster than comparing characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


KINDS = (  # what a differing span looks like, most telling first
    ("clock", re.compile(r"\d{1,2}:\d\d(?::\d\d)?|\d{4}-\d\d-\d\d|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\b|\b1[6-9]\d{8,11}\b")),
    ("uuid", re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){2}")),
    ("path", re.compile(r"(?:[A-Za-z]:)?[\\/][\w.~-]+[\\/]")),
    ("hash", re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9]*[a-f])[0-9a-f]{5,}\b")),
    ("counter", re.compile(r"\d+")),
)  # fmt: skip


def kind_of(before: str, after: str, at: int) -> str:
    """What the texts look like where they part: clock, uuid, path, hash, counter, removed, added or text."""
    words = []
    for text in (before, after):
        start = max(text.rfind(stop, 0, at) for stop in " \n\t\"'") + 1
        ends = [end for stop in " \n\t\"'" if (end := text.find(stop, at)) >= 0]
        words.append(text[max(start, at - 60) : min(min(ends, default=len(text)), at + 60)])
    if at >= len(after):
        return "removed"
    if at >= len(before):
        return "added"
    for name, pattern in KINDS:
        if all(pattern.search(word) for word in words):
            return name
    return "text"


@dataclasses.dataclass
class Verdict:
    """What became of one prompt. `share` is the part (0 to 1, by characters) that an earlier prompt began with."""

    name: str = "cold"
    share: float = 0.0
    where: str = ""
    kind: str = ""
    before: str = ""
    after: str = ""
    advice: str = ""
    side: str = ""
    since: list[str] = dataclasses.field(default_factory=list)  # conversations served between the earlier one and this

    def line(self) -> str:
        """The second log line, for a prompt that was not reused; '' when there is nothing to say."""
        if self.name == "rewritten":
            return f"changed in {self.where} ({self.kind}): {self.before!r} -> {self.after!r}"
        return self.advice


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
    "checkpoint": "the server kept nothing of it: hybrid, recurrent and sliding-window models need a checkpoint near the"
    " change (--ctx-checkpoints, --swa-full), and --cache-ram 0 turns the host cache off",
    "partly": "the server kept only a part of it: a slot's context may be smaller than the conversation (-c, -np)",
}


class Entry:
    """A prompt as it was forwarded; `chain` holds a hash of all up to each segment, `opening` is the first turn."""

    __slots__ = ("chain", "conversation", "names", "opening", "texts")

    def __init__(self, conversation: str, segments: list[Segment], texts: list[str], chain: list[int]) -> None:
        self.conversation, self.texts, self.chain = conversation, texts, chain
        self.names = [segment.where for segment in segments]
        self.opening = opening_of(segments)


class Ledger:
    """The last prompts, and what they had in common. Equal texts are held once; bounded, oldest out first."""

    def __init__(self, limit: int) -> None:
        self.lock = threading.Lock()
        self.limit, self.size = limit, 0
        self.entries: collections.OrderedDict[int, Entry] = collections.OrderedDict()
        self.texts: dict[str, list[Any]] = {}  # text -> [the string that all share, users]
        self.index: dict[int, int] = {}  # chain up to a segment -> the newest entry that has it
        self.ends: collections.Counter[int] = collections.Counter()
        self.latest: dict[str, int] = {}  # conversation -> its newest entry
        self.count = 0
        self.away = 0.0  # when the backend was last found away

    def judge(self, segments: list[Segment], conversation: str, side: str = "") -> Verdict:
        """Compare a prompt with those before it, then remember it. What the server says comes later, in settle()."""
        chain, last = [], 0
        for segment in segments:
            last = hash((last, segment))
            chain.append(last)
        with self.lock:
            verdict = self.compare(segments, chain, conversation)
            verdict.side = side
            self.remember(conversation, segments, chain)
        return verdict

    def compare(self, segments: list[Segment], chain: list[int], conversation: str) -> Verdict:
        """Find the stored prompt with the longest common prefix, and say where they part and why."""
        if not self.entries or not segments:
            return Verdict()
        total = sum(len(segment.text) for segment in segments) or 1
        depth = next((i for i in range(len(chain), 0, -1) if chain[i - 1] in self.index), 0)
        same = sum(len(segment.text) for segment in segments[:depth])
        entry = self.counterpart(segments, chain, depth, conversation)
        verdict = Verdict("extended", same / total)
        newer = itertools.takewhile(lambda other: other is not entry, reversed(self.entries.values()))
        verdict.since = [other.conversation for other in itertools.islice(newer, 64)]
        if depth and (depth == len(chain) or self.ends[chain[depth - 1]]):
            return verdict
        old = entry.texts[depth] if depth < len(entry.texts) else ""
        new, names, opening = segments[depth].text, [segment.where for segment in segments], first_turn(segments)
        at = common_prefix(old, new)
        verdict.share = (same + at) / total
        verdict.where, verdict.kind = names[depth], kind_of(old, new, at)
        start = max(0, at - 20)
        verdict.before, verdict.after = old[start : at + 40], new[start : at + 40]
        if names[depth].startswith("tool "):
            tools = [[name for name in side if name.startswith("tool ")] for side in (entry.names, names)]
            if tools[0] != tools[1]:
                verdict.kind = "tool order" if sorted(tools[0]) == sorted(tools[1]) else "tools"
        if depth < opening:
            ours = entry.opening == opening_of(segments) and tooled(entry.names) == tooled(names)
            rewritten = ours or alike(old, new)
            verdict.name = "rewritten" if rewritten else "cold" if verdict.share < 0.05 else "new branch"
        else:
            history = any("(assistant)" in name for name in names[depth + 1 :])
            known = depth > opening or entry.conversation == conversation
            verdict.name = "rewritten" if history and known else "new branch"
        return verdict

    def counterpart(self, segments: list[Segment], chain: list[int], depth: int, conversation: str) -> Entry:
        """The entry to compare with: the newest of this conversation if none has more in common, else that one."""
        link = chain[depth - 1] if depth else 0
        own = self.entries.get(self.latest.get(conversation, 0))
        if own is not None and (not depth or link in own.chain):
            return own
        if depth:
            return self.entries[self.index[link]]
        talk = opening_of(segments)
        newest = list(itertools.islice(reversed(self.entries.values()), 16))
        return next((entry for entry in newest if entry.opening == talk), newest[0])

    def remember(self, conversation: str, segments: list[Segment], chain: list[int]) -> None:
        self.count += 1
        texts = []
        for segment in segments:
            held = self.texts.setdefault(segment.text, [segment.text, 0])
            held[1] += 1
            if held[1] == 1:
                self.size += text_size(segment.text)
            texts.append(held[0])  # the one string that all prompts share
        self.entries[self.count] = Entry(conversation, segments, texts, chain)
        self.latest[conversation] = self.count
        self.size += 300 * len(chain)
        for link in chain:
            self.index[link] = self.count
        if chain:
            self.ends[chain[-1]] += 1
        while self.size > self.limit and len(self.entries) > 1:
            self.forget()

    def forget(self) -> None:
        number, entry = self.entries.popitem(last=False)
        self.size -= 300 * len(entry.chain)
        if self.latest.get(entry.conversation) == number:
            del self.latest[entry.conversation]
        for text in entry.texts:
            held = self.texts[text]
            held[1] -= 1
            if not held[1]:
                self.size -= text_size(text)
                del self.texts[text]
        for link in entry.chain:
            if self.index.get(link) == number:
                del self.index[link]
        if entry.chain:
            self.ends[entry.chain[-1]] -= 1
            if not self.ends[entry.chain[-1]]:
                del self.ends[entry.chain[-1]]


def settle(verdict: Verdict, usage: Usage, conversation: str, idle_seconds: float, was_away: bool) -> None:
    """Weigh what the ledger predicted against what the server says it reused. Changes `verdict`."""
    if usage.cached is None or not usage.prompt:
        if verdict.name == "extended":
            verdict.name = "not reported"
        return
    missing = verdict.share * usage.prompt - usage.cached
    if (
        verdict.name not in ("extended", "new branch")
        or usage.cached >= 0.6 * verdict.share * usage.prompt
        or missing < 64
    ):
        return
    if verdict.name == "new branch" and verdict.share < 0.5:
        return
    verdict.name = "lost"
    others = [name for name in verdict.since if name != conversation]
    cause = (
        "away" if was_away else "taken" if others else "idle" if idle_seconds > 300
        else "checkpoint" if usage.cached < 0.05 * usage.prompt else "partly"
    )  # fmt: skip
    verdict.advice = ADVICE[cause].format(minutes=round(idle_seconds / 60))


SIDE_SHAPES = (  # (name, words to look for first, a pattern) for the last turn or the system prompt, in lower case
    (
        "title",
        ("title",),
        re.compile(r"\b(?:generate|write|create|produce|give)\b[^\n]{0,80}\btitle\b|\btitle generator\b"),
    ),
    ("suggestion", ("suggest", "predict"), re.compile(r"\b(?:suggest|predict)\b[^\n]{0,80}\b(?:next|follow-up)\b")),
    ("summary", ("summar",), re.compile(r"\bsummar(?:y|ize|ise)\b[^\n]{0,80}\b(?:conversation|session)\b")),
)


def side_of(body: Json, headers: Mapping[str, str], view: View) -> str:
    """The name of a request that a client sends beside the conversation (title, suggestion, sub-agent); '' for others.

    Such requests have prompts of their own; that they share little is no fault.
    """
    if headers.get("x-claude-code-agent-id"):
        return "sub-agent"
    metadata = body.get("client_metadata")
    if isinstance(metadata, dict) and "thread_title" in json.dumps(metadata):
        return "title"
    if "title" in json.dumps((body.get("output_config") or body.get("text") or {}) if not body.get("tools") else {}):
        return "title"
    if body.get("tools"):
        return ""
    texts = [turn.text()[:4000].lower() for turn in (*view.system()[:1], *view.turns[-1:])]
    for name, words, pattern in SIDE_SHAPES:
        if any(pattern.search(text) for text in texts if any(word in text for word in words)):
            return name
    return ""


# ======================================================================================================================
# Relay: HTTP on both sides. The only section that touches sockets of requests
# ======================================================================================================================

HEAD_LIMIT = 65536  # bytes of a request's or response's head
HEADER_LIMIT = 100  # header lines; llama-server has the same limit
BODY_IDLE = 60.0  # seconds without a byte of a request body
SEND_LIMIT = 300.0  # seconds a client may leave one piece of an answer unread: then its slot is freed
KEEP_IDLE = 120.0  # seconds a client's connection may stay open between requests
REUSE_SECONDS = 4.0  # llama-server closes a connection after 5 idle seconds
QUIET_SECONDS = 0.02  # the server is silent this long: the model is working, and there is time to explain
DRAIN_SECONDS = 10.0  # what streams get to end when the proxy stops
TAP_BYTES = 65536  # of the end (and a quarter of the start) of an answer, kept to read the usage from

# RFC 9110 section 7.6.1; with the names that Connection lists. Authorization is end to end and stays.
HOP_BY_HOP = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade proxy-connection proxy-authenticate"
    b" proxy-authorization".split()
)
TOKEN_BYTES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
FIELD_LINE = re.compile(rb"(%s):([\t\x20-\x7e\x80-\xff]*)" % TOKEN_BYTES.pattern)
LENGTH = re.compile(rb"[0-9]{1,19}")
Headers = list[tuple[bytes, bytes]]


class BadHead(ValueError):
    """A head that is not HTTP/1.x as RFC 9112 has it; the message says where."""


class Refused(Exception):
    """The proxy answers by itself: `status`, and a sentence that says what to do."""

    def __init__(self, status: int, message: str, headers: Headers | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or []


class ClientGone(Exception):
    """The client hung up, or stopped reading."""


class BrokenOff(Exception):
    """The answer cannot be completed; the client must be able to see that."""


class Fields(Headers):
    """Header lines in order, case kept, with a look-up by lower-case name."""

    def __init__(self, pairs: Headers) -> None:
        super().__init__(pairs)
        self.by_name: dict[bytes, list[bytes]] = {}
        for name, value in pairs:
            self.by_name.setdefault(name.lower(), []).append(value)

    def all(self, name: bytes) -> list[bytes]:
        return self.by_name.get(name, [])


def parse_fields(lines: list[bytes]) -> Fields:
    """Header lines as (name, value) pairs (RFC 9112 section 5). Raises BadHead."""
    if len(lines) > HEADER_LIMIT:
        raise BadHead("too many header lines")
    fields = []
    for line in lines:
        found = FIELD_LINE.fullmatch(line)
        if not found:
            raise BadHead("bad header line")  # also a bare CR, a NUL, a folded line, a space before the colon
        fields.append((found[1], found[2].strip(b" \t")))
    return Fields(fields)


def end_to_end(headers: Fields, *drop: bytes) -> Headers:
    """The headers that a proxy passes on: without hop-by-hop ones, those that Connection names, and `drop`."""
    listed = {token.strip().lower() for value in headers.all(b"connection") for token in value.split(b",")}
    gone = HOP_BY_HOP | listed | set(drop)
    return [(name, value) for name, value in headers if name.lower() not in gone]


def body_length(headers: Fields) -> int | None:
    """Content-Length, None when there is none. Raises BadHead unless all values are equal plain numbers."""
    found = set(headers.all(b"content-length"))
    if not found:
        return None
    length = found.pop()
    if found or not LENGTH.fullmatch(length):
        raise BadHead("bad Content-Length")
    return int(length)


class Chunks:
    """The chunked coding (RFC 9112 section 7.1) as a state machine: bytes may be cut anywhere. Raises BadHead."""

    __slots__ = ("done", "left", "line", "state", "trailers")
    SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n\x00]*)?\r")

    def __init__(self, left: int = 0, state: str = "size", line: bytes = b"") -> None:
        self.left, self.state, self.line = left, state, line
        self.done, self.trailers = False, 0

    def feed(self, data: bytes, out: list[bytes] | None = None) -> int:
        """Take bytes in; append payload to `out`. Returns how many belong to the message (less than all: it is done)."""
        at, size = 0, len(data)
        while at < size and not self.done:
            if self.left:
                end = min(size, at + self.left)
                if out is not None:
                    out.append(data[at:end])
                self.left -= end - at
                at = end
                continue
            stop = data.find(b"\n", at)
            if stop < 0:
                self.line += data[at:]
                if len(self.line) > 8192:
                    raise BadHead("endless chunk line")
                return size
            line = self.line + data[at:stop] if self.line else data[at:stop]
            self.line, at = b"", stop + 1
            if self.state == "size":
                found = self.SIZE.fullmatch(line)
                if not found:
                    raise BadHead("bad chunk size")
                self.left = int(found[1], 16)
                self.state = "data" if self.left else "trailer"
            elif self.state == "data":
                if line != b"\r":
                    raise BadHead("chunk longer than its size")
                self.state = "size"
            elif line == b"\r":
                self.done = True
            else:
                self.trailers += len(line)
                if self.trailers > HEAD_LIMIT:
                    raise BadHead("endless trailers")
        return at


class Wire:
    """A connected socket and the bytes read ahead from it. Its socket has a time-out, so no call blocks for ever."""

    __slots__ = ("buf", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.buf = sock, bytearray()

    def recv(self, size: int = 65536) -> bytes:
        """Bytes read ahead, else what the socket has; b'' at the end."""
        if self.buf:
            data = bytes(self.buf[:size])
            del self.buf[:size]
            return data
        return self.sock.recv(size)

    def fill(self, seconds: float) -> bool:
        """Read more into `buf`. False at the end of the stream; raises TimeoutError."""
        if seconds <= 0 or not readable(self.sock, seconds):
            raise TimeoutError
        data = self.sock.recv(65536)
        self.buf += data
        return bool(data)

    def close(self, abort: bool = False) -> None:
        """Close for good. `abort` sends RST, the only sign of a cut that a client without framing can see."""
        with contextlib.suppress(OSError):
            if abort:
                self.sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
                )
            else:
                self.sock.shutdown(socket.SHUT_RDWR)  # wakes threads that wait on it; close() alone does not
        with contextlib.suppress(OSError):
            self.sock.close()


def readable(sock: socket.socket, seconds: float) -> bool:
    """Wait for bytes (or the end). poll() where there is one: select() cannot take descriptors above 1023."""
    if getattr(sock, "pending", None) and sock.pending():  # type: ignore[attr-defined]
        return True  # TLS has decrypted bytes already
    try:
        if hasattr(select, "poll"):
            poller = select.poll()
            poller.register(sock, select.POLLIN)
            return bool(poller.poll(seconds * 1000))
        return bool(select.select([sock], [], [], seconds)[0])
    except (OSError, ValueError):
        return True  # closed by another thread: the next recv says so


class Pair:
    """Waits for the upstream and watches the client meanwhile, so that a client that hangs up frees the model at once.

    Peeking tells a client's end from pipelined bytes; once such bytes are there, only a hang-up is watched for, where
    the system can tell (POLLRDHUP: Linux). A half-closed client counts as gone, as it does for llama-server itself.
    """

    __slots__ = ("client", "poller", "tls", "upstream", "watching")
    GONE = getattr(select, "POLLRDHUP", 0)

    def __init__(self, client: socket.socket, upstream: socket.socket) -> None:
        self.client, self.upstream, self.watching = client, upstream, True
        self.tls = hasattr(upstream, "pending")
        self.poller = select.poll() if hasattr(select, "poll") else None
        if self.poller:
            self.poller.register(client, select.POLLIN | self.GONE)
            self.poller.register(upstream, select.POLLIN)

    def wait(self, seconds: float, writing: bool = False) -> str:
        """'read' or 'write' (the upstream is ready), or 'timeout'. Raises ClientGone."""
        if self.tls and not writing and self.upstream.pending():  # type: ignore[attr-defined]
            return "read"
        until = time.monotonic() + seconds
        while True:
            client, up_read, up_write = self.events(max(0.0, until - time.monotonic()), writing)
            if client:
                self.look()
            if up_read:
                return "read"
            if up_write:
                return "write"
            if time.monotonic() >= until:
                return "timeout"

    def events(self, seconds: float, writing: bool) -> tuple[bool, bool, bool]:
        client = read = write = False
        if self.poller:
            if writing:  # TLS has messages of its own to read: they are no early answer
                self.poller.modify(self.upstream, select.POLLOUT | (0 if self.tls else select.POLLIN))
            number = self.client.fileno()
            for fd, event in self.poller.poll(seconds * 1000):
                if fd == number:
                    client = True
                    if event & (self.GONE | select.POLLHUP | select.POLLERR | select.POLLNVAL):
                        raise ClientGone
                else:
                    read = read or bool(event & ~select.POLLOUT)
                    write = write or bool(event & select.POLLOUT)
            if writing:
                self.poller.modify(self.upstream, select.POLLIN)
        else:
            ends = [self.upstream, self.client] if self.watching else [self.upstream]
            reads, writes, _ = select.select(ends, [self.upstream] if writing else [], [], seconds)
            client, read, write = self.client in reads, self.upstream in reads, bool(writes)
        return client, read, write

    def look(self) -> None:
        try:
            if not self.client.recv(1, socket.MSG_PEEK):
                raise ClientGone
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            raise ClientGone from None
        self.watching = False  # pipelined bytes: a level-triggered poll would spin on them
        if self.poller:
            self.poller.modify(self.client, self.GONE)


@dataclasses.dataclass
class Request:
    """A request's head, as received."""

    method: str
    target: bytes
    version: bytes
    headers: Fields

    @property
    def path(self) -> str:
        return self.target.decode("latin-1")

    def get(self, name: str) -> str:
        found = self.headers.all(name.encode())
        return found[0].decode("latin-1") if found else ""

    def keep_alive(self) -> bool:
        tokens = b",".join(self.headers.all(b"connection")).lower()
        return self.version == b"HTTP/1.1" and b"close" not in [token.strip() for token in tokens.split(b",")]


@dataclasses.dataclass
class Response:
    """A response's head; `framing` tells how its body ends: none, length, chunked or close (RFC 9112 section 6.3)."""

    status: int
    reason: bytes
    headers: Fields
    framing: str
    length: int = 0


def split_head(raw: bytes | bytearray) -> tuple[bytes, list[bytes], int] | None:
    """(first line, header lines, bytes used), or None while the head is not complete."""
    end = re.search(rb"\r?\n\r?\n", raw)
    if end is None:
        return None
    lines = re.split(rb"\r?\n", bytes(raw[: end.start()]))
    return lines[0], lines[1:], end.end()


def parse_request(line: bytes, lines: list[bytes]) -> Request:
    """Raises Refused for what a server must refuse (RFC 9112 sections 3 and 6.3: smuggling shapes among it)."""
    match = re.fullmatch(rb"(%s) ([\x21-\x7e\x80-\xff]+) (HTTP/(\d)\.\d)" % TOKEN_BYTES.pattern, line)
    if not match:
        raise Refused(400, "This is not an HTTP request line.")
    if match[4] != b"1":
        raise Refused(
            505, "Only HTTP/1.0 and HTTP/1.1 are spoken here; the address may need http:// instead of https://."
        )
    try:
        headers = parse_fields(lines)
        length = body_length(headers)
    except BadHead as error:
        status = 431 if "too many" in str(error) else 400
        raise Refused(status, f"The request's head cannot be read: {error}.") from None
    request = Request(match[1].decode(), match[2], b"HTTP/1.0" if match[3] == b"HTTP/1.0" else b"HTTP/1.1", headers)
    coding = headers.all(b"transfer-encoding")
    if coding and (length is not None or request.version == b"HTTP/1.0"):
        raise Refused(400, "Content-Length and Transfer-Encoding in one request.")
    if coding and [value.lower() for value in coding] != [b"chunked"]:
        raise Refused(501, "The only Transfer-Encoding that is understood is chunked.")
    hosts = headers.all(b"host")
    if len(hosts) > 1 or (not hosts and request.version == b"HTTP/1.1"):
        raise Refused(400, "A request needs one Host header.")
    target = request.target
    if request.method == "CONNECT":
        raise Refused(405, "This is no forward proxy: set it as the base URL of the API, not as HTTP_PROXY.")
    absolute = re.match(rb"(?i)https?://[^/?#]*", target)
    if absolute:
        request.target = target[absolute.end() :] or b"/"
        if request.target[:1] == b"?":
            request.target = b"/" + request.target
    elif target[:1] != b"/" and not (target == b"*" and request.method == "OPTIONS"):
        raise Refused(400, "The request's target must be a path.")
    return request


def parse_response(line: bytes, lines: list[bytes], method: str) -> Response:
    """Raises BadHead when a client could be misled about where the body ends."""
    match = re.fullmatch(rb"HTTP/1\.[01] ([1-9]\d\d)(?: ([\t\x20-\x7e\x80-\xff]*))?", line)
    if not match:
        raise BadHead("bad status line")
    status, headers = int(match[1]), parse_fields(lines)
    response = Response(status, match[2] or b"", headers, "close")
    coding = b",".join(headers.all(b"transfer-encoding")).strip().lower()
    length = body_length(headers) if not coding else None
    if method == "HEAD" or status in (204, 304) or status < 200:
        response.framing = "none"
    elif coding:
        if coding != b"chunked":
            raise BadHead("unknown Transfer-Encoding")
        response.framing = "chunked"
        response.headers = Fields([(k, v) for k, v in headers if k.lower() != b"content-length"])
    elif length is not None:
        response.framing, response.length = "length", length
    return response


class Upstream:
    """A connection to the backend. http.client connects (and does TLS); heads and bodies are read here, because
    http.client takes 103 for the answer, splits headers at a bare CR and hides a body that was cut short."""

    __slots__ = ("dirty", "expires", "wire")

    def __init__(self, url: urllib.parse.SplitResult, timeout: float, last_good: dict[str, str]) -> None:
        host = url.hostname or ""
        # Windows resolves localhost to ::1 first and waits 2 s for a server that listens on 127.0.0.1 only.
        hosts = [last_good.get(host, "127.0.0.1"), "127.0.0.1", "::1"] if host == "localhost" else [host]
        fault: OSError = OSError("no address")
        for name in dict.fromkeys(hosts):
            kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
            connection = kind(name, url.port, timeout=timeout)
            try:
                connection.connect()
            except OSError as error:
                fault = error
                continue
            last_good[host] = name
            connection.sock.settimeout(SEND_LIMIT)
            self.wire = Wire(connection.sock)
            self.expires, self.dirty = 0.0, False  # dirty: it was not sent a whole request
            return
        raise fault

    def fresh(self) -> bool:
        """Whether an idle connection may carry another request: not too old, and the server has not closed it."""
        return time.monotonic() < self.expires and not self.wire.buf and not readable(self.wire.sock, 0)


class Pool:
    """Idle connections to the backend, the newest used first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: list[Upstream] = []

    def take(self) -> Upstream | None:
        with self.lock:
            stale, self.idle = self.idle, []
            while stale:
                upstream = stale.pop()
                if upstream.fresh():
                    self.idle = [other for other in stale if time.monotonic() < other.expires]
                    for other in stale:
                        if other not in self.idle:
                            other.wire.close()
                    return upstream
                upstream.wire.close()
        return None

    def give(self, upstream: Upstream, headers: Fields) -> None:
        """Keep a connection whose answer was read to its end, as long as the server says (Keep-Alive: timeout)."""
        hint = re.search(rb"timeout=(\d{1,6})", b",".join(headers.all(b"keep-alive")))
        seconds = min(REUSE_SECONDS, int(hint[1]) - 1.0) if hint else REUSE_SECONDS
        tokens = b",".join(headers.all(b"connection")).lower()
        if b"close" in tokens or seconds <= 0 or upstream.dirty or upstream.wire.buf:
            upstream.wire.close()
            return
        upstream.expires = time.monotonic() + seconds
        with self.lock:
            self.idle.append(upstream)
            if len(self.idle) > 256:
                self.idle.pop(0).wire.close()

    def close(self) -> None:
        with self.lock:
            while self.idle:
                self.idle.pop().wire.close()


class Tap:
    """Keeps the first and the last bytes of an answer as it passes, to read the usage from. Costs one append an event."""

    __slots__ = ("chunked", "first", "recent", "size", "total")

    def __init__(self, chunked: bool) -> None:
        self.chunked, self.total, self.size = chunked, 0, 0
        self.first = bytearray()
        self.recent: collections.deque[tuple[int, str, bytes, bytes]] = collections.deque()

    def add(self, data: bytes, chunks: Chunks | None) -> None:
        """`chunks` is the state before `data`."""
        self.total += len(data)
        if len(self.first) < TAP_BYTES // 4:
            self.first += data
        state = (chunks.left, chunks.state, chunks.line, data) if chunks else (0, "", b"", data)
        self.recent.append(state)
        self.size += len(data)
        while self.size - len(self.recent[0][3]) >= TAP_BYTES:
            self.size -= len(self.recent.popleft()[3])

    def windows(self) -> tuple[bytes, bytes]:
        """Payload at the start and at the end of the answer."""
        if not self.recent:
            return b"", b""
        if not self.chunked:
            whole = self.total == len(self.first)
            return bytes(self.first), b"" if whole else b"".join(entry[3] for entry in self.recent)
        found = []
        tail = b"".join(entry[3] for entry in self.recent)
        for chunks, data in ((Chunks(), bytes(self.first)), (Chunks(*self.recent[0][:3]), tail)):
            out: list[bytes] = []
            with contextlib.suppress(BadHead):
                chunks.feed(data, out)
            found.append(b"".join(out))
            if self.total == len(self.first):
                return found[0], b""  # all of it is there
        return found[0], found[1]


def error_body(path: str, status: int, message: str) -> bytes:
    """An error object in the style of the dialect's API, so that SDKs raise what their users know."""
    dialect, _ = dialect_of(path)
    kind = {400: "invalid_request_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
            429: "rate_limit_error", 503: "overloaded_error"}.get(status, "invalid_request_error" if status < 500 else "api_error")  # fmt: skip
    if dialect is not None and dialect.name == "messages":
        return dump({"type": "error", "error": {"type": kind, "message": message}})
    return dump({"error": {"message": message, "type": kind, "code": status}})


class Relay(BaseHTTPRequestHandler):
    """One client connection: reads requests, forwards them, relays the answers."""

    server: Server
    wire: Wire

    # --- the life of a connection -----------------------------------------------------------------------------------

    def setup(self) -> None:
        self.proxy = self.server.proxy
        self.wire = Wire(self.request)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request.settimeout(SEND_LIMIT)
        self.close_connection = False
        self.served = 0
        self.linger = False
        self.abort = False

    def handle(self) -> None:
        while not self.close_connection and not self.proxy.stopping:
            self.handle_one_request()

    def finish(self) -> None:
        if self.linger:  # the client may still be sending: closing now would reset our answer away (RFC 9112 9.6)
            with contextlib.suppress(OSError):
                self.request.shutdown(socket.SHUT_WR)
                until = time.monotonic() + 2
                while (left := until - time.monotonic()) > 0 and readable(self.request, left):
                    if not self.request.recv(65536):
                        break
        self.wire.close(self.abort)

    def handle_one_request(self) -> None:
        path = "/"
        try:
            request = self.read_head()
            if request is None:
                self.close_connection = True
                return
            path = request.path
            self.close_connection = not request.keep_alive()
            self.server.busy(self, True)
            self.serve(request)
        except Refused as refused:
            self.close_connection = self.linger = True
            body = error_body(path, refused.status, str(refused))
            with contextlib.suppress(OSError):
                self.respond(refused.status, body, refused.headers)
            self.proxy.log.info("refused | status=%d | %s", refused.status, refused)
        except BrokenOff as cut:
            self.close_connection = True
            self.proxy.log.warning("%s %s | answer cut: %s", self.command, path.split("?")[0], cut)
        except (ClientGone, OSError):
            self.close_connection = True
        finally:
            self.server.busy(self, False)

    def read_head(self) -> Request | None:
        """The next request's head; None when the client has no more."""
        wire, begun = self.wire, 0.0
        limit = self.proxy.config.header_timeout
        idle = time.monotonic() + (KEEP_IDLE if self.served else limit)
        self.served += 1
        while True:
            while wire.buf[:2] == b"\r\n" or wire.buf[:1] == b"\n":  # RFC 9112 section 2.2
                del wire.buf[: 1 if wire.buf[:1] == b"\n" else 2]
            if wire.buf:
                begun = begun or time.monotonic()
                head = split_head(wire.buf)
                if head is not None and head[2] <= HEAD_LIMIT:
                    del wire.buf[: head[2]]
                    request = parse_request(head[0], head[1])
                    self.command = request.method
                    return request
                if len(wire.buf) > HEAD_LIMIT:
                    raise Refused(431 if b"\n" in wire.buf[:HEAD_LIMIT] else 414, "The request's head is too long.")
                if not TOKEN_BYTES.match(wire.buf):
                    raise Refused(400, "This is not HTTP; the address may need http:// instead of https://.")
            try:
                if not wire.fill((begun + limit if begun else idle) - time.monotonic()):
                    return None
            except TimeoutError:
                if begun:
                    raise Refused(408, "The request's head took too long.") from None
                return None

    def respond(self, status: int, body: bytes, headers: Headers | None = None, kind: str = "application/json") -> None:
        """An answer of the proxy's own, in one write."""
        reason = self.responses.get(status, ("", ""))[0]
        lines = [b"HTTP/1.1 %d %s" % (status, str(reason).encode()), b"Content-Type: " + kind.encode()]
        lines += [b"Content-Length: %d" % len(body), b"Cache-Control: no-store"]
        lines += [name + b": " + value for name, value in headers or []]
        if self.close_connection:
            lines.append(b"Connection: close")
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        self.request.sendall(head if self.command == "HEAD" else head + body)

    # --- one request ------------------------------------------------------------------------------------------------

    def serve(self, request: Request) -> None:
        self.check_host(request)
        path = request.path.split("?", 1)[0]
        if path == "/kvproxy" or path.startswith("/kvproxy/"):
            self.read_body(request)
            answer = self.proxy.pages.answer(request, self.client_address[0])
            self.respond(*answer)
            return
        dialect, counting = dialect_of(path)
        exchange = Exchange(request, dialect, counting)
        self.proxy.busy(1)
        try:
            if dialect is not None and request.method == "POST":
                exchange.received = self.read_body(request)
                if not request.get("content-encoding"):
                    self.proxy.prepare(exchange)
                else:
                    exchange.report.note = "compressed"
                    exchange.forwarded = exchange.received
            elif request.headers.all(b"transfer-encoding"):
                exchange.received = exchange.forwarded = self.read_body(request)
            self.forward(exchange)
        except (ClientGone, ConnectionError) as error:
            exchange.fault = exchange.fault or "client left"
            raise ClientGone from error
        except Refused as refused:
            exchange.status, exchange.fault = refused.status, str(refused)
            raise
        except BrokenOff as cut:
            exchange.fault = f"cut: {cut}"
            raise
        finally:
            self.proxy.busy(-1)
            self.proxy.finished(exchange)

    def check_host(self, request: Request) -> None:
        """A web page that had its name resolve to this machine (DNS rebinding) sends its own name as Host."""
        host = request.get("host")
        if self.proxy.loopback_only and host and not self.proxy.known_host(host):
            raise Refused(403, f"The Host {host[:80]!r} is not known here; add it to ALLOWED_HOSTS if it is yours.")

    def read_body(self, request: Request) -> bytes | bytearray:
        """The whole body, within MAX_BODY_MB."""
        limit = self.proxy.config.max_body_mb << 20
        length = body_length(request.headers)
        if length is not None and length > limit:
            raise Refused(413, f"The body has {length} bytes; MAX_BODY_MB allows {limit}.")
        chunks = Chunks() if request.headers.all(b"transfer-encoding") else None
        if chunks is None and not length:
            return b""
        self.expect(request)
        if chunks is None:
            body = bytearray(self.wire.buf[:length])
            del self.wire.buf[:length]
            while len(body) < (length or 0):
                body += self.receive(min(1 << 20, (length or 0) - len(body)))
            return body
        body, out = bytearray(), list[bytes]()
        while not chunks.done:
            if not self.wire.buf:
                self.wire.buf += self.receive(65536)
            try:
                used = chunks.feed(bytes(self.wire.buf), out)
            except BadHead as error:
                raise Refused(400, f"The chunked body cannot be read: {error}.") from None
            del self.wire.buf[:used]
            body += b"".join(out)
            out.clear()
            if len(body) + chunks.left > limit:
                raise Refused(413, f"The body has more bytes than MAX_BODY_MB allows ({limit}).")
        return body

    def expect(self, request: Request) -> None:
        """RFC 9110 section 10.1.1: ask for the body only now, when nothing speaks against it."""
        if request.get("expect").lower() == "100-continue" and request.version == b"HTTP/1.1" and not self.wire.buf:
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    def receive(self, size: int) -> bytes:
        """Some bytes of a request's body. Raises ClientGone at an early end, Refused when none come for a minute."""
        if not readable(self.request, BODY_IDLE):
            raise Refused(408, "No byte of the request's body came for a minute.")
        data: bytes = self.request.recv(size)
        if not data:
            raise ClientGone
        return data

    # --- forwarding -------------------------------------------------------------------------------------------------

    def forward(self, exchange: Exchange) -> None:
        """Send the request on and relay the answer. A request is repeated only when it went out on a connection used
        before and nothing came back: the server had closed it (RFC 9112 section 9.3.1)."""
        request = exchange.request
        streamed = body_length(request.headers) if exchange.forwarded is None else None
        if streamed is not None and streamed > self.proxy.config.max_body_mb << 20:
            raise Refused(
                413, f"The body has {streamed} bytes; MAX_BODY_MB allows {self.proxy.config.max_body_mb << 20}."
            )
        head = self.request_head(exchange)
        upstream = self.proxy.backend.pool.take() if not streamed else None
        if upstream is not None:
            try:
                response = self.exchange_heads(exchange, upstream, head, 0)
                self.relay(exchange, upstream, response)
                return
            except Stale:
                pass
        upstream = self.connect()
        try:
            response = self.exchange_heads(exchange, upstream, self.request_head(exchange), streamed or 0)
        except Stale as stale:
            self.proxy.backend.lost()
            raise Refused(
                502, f"The model server at {self.proxy.backend.name()} closed the connection: {stale}."
            ) from None
        self.relay(exchange, upstream, response)

    def connect(self) -> Upstream:
        backend = self.proxy.backend
        try:
            return backend.connect()
        except OSError as error:
            backend.lost()
            message = (
                f"The model server at {backend.name()} cannot be reached ({error}). Is it running, and is BACKEND_URL"
                " right? llama-server listens on 9931 (newer) or 8080 (older), LM Studio on 1234."
            )
            raise Refused(504 if isinstance(error, TimeoutError) else 502, message) from None

    def request_head(self, exchange: Exchange) -> bytes:
        """The head as it goes upstream: line, Host, the client's own headers in order, and the body's length."""
        request, backend = exchange.request, self.proxy.backend
        drop = [b"host", b"expect", b"x-kvproxy-conversation"]
        if exchange.forwarded is not None:
            drop.append(b"content-length")
        lines = [b"%s %s HTTP/1.1" % (request.method.encode(), backend.target(request.target))]
        lines.append(b"Host: " + backend.authority())
        lines += [name + b": " + value for name, value in end_to_end(request.headers, *drop)]
        if exchange.trace.conversation:
            lines.append(b"X-KVProxy-Conversation: " + exchange.trace.conversation.encode())
        if exchange.forwarded is not None and (exchange.forwarded or body_length(request.headers) is not None):
            lines.append(b"Content-Length: %d" % len(exchange.forwarded))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def exchange_heads(self, exchange: Exchange, upstream: Upstream, head: bytes, streamed: int) -> Response:
        """Send a request and read the answer's head. Raises Stale when the connection turns out to be closed."""
        wire = upstream.wire
        pair = Pair(self.request, wire.sock)
        exchange.pair = pair
        try:
            body = exchange.forwarded or b""
            try:
                if len(body) < 65536:
                    upstream.dirty = not self.send(pair, head + body)
                else:
                    upstream.dirty = not (self.send(pair, head) and self.send(pair, body))
                if streamed:
                    self.expect(exchange.request)
                    self.stream_body(pair, streamed)
            except (ConnectionError, TimeoutError):
                upstream.dirty = True
                if isinstance(sys.exc_info()[1], TimeoutError):
                    raise Refused(504, "The model server does not take the request's body.") from None
                # it may have answered before it closed (413, 401): read that
            exchange.sent = time.monotonic()
            return self.response_head(exchange, upstream, pair)
        except BaseException:
            wire.close()
            raise

    def send(self, pair: Pair, data: bytes | bytearray) -> bool:
        """Send upstream; False when the server answered before it had read everything."""
        view, at = memoryview(data), 0
        with contextlib.suppress(BlockingIOError):
            at = pair.upstream.send(view)
        while at < len(view):
            state = pair.wait(self.proxy.config.read_timeout, writing=True)
            if state == "timeout":
                raise TimeoutError
            if state == "read":
                return False
            at += pair.upstream.send(view[at : at + (1 << 20)])
        return True

    def stream_body(self, pair: Pair, length: int) -> None:
        """Pass a body on as it comes."""
        while length > 0:
            data = bytes(self.wire.buf[:length])
            del self.wire.buf[: len(data)]
            data = data or self.receive(min(1 << 18, length))
            length -= len(data)
            pair.upstream.sendall(data)

    def response_head(self, exchange: Exchange, upstream: Upstream, pair: Pair) -> Response:
        """The final response's head; interim ones (100, 103: RFC 9110 section 15.2) are passed over."""
        wire, config = upstream.wire, self.proxy.config
        for _ in range(64):
            while (head := split_head(wire.buf)) is None:
                if len(wire.buf) > HEAD_LIMIT:
                    raise Refused(502, "The model server's answer has an endless head.")
                state = pair.wait(min(QUIET_SECONDS, config.read_timeout))
                if state == "timeout":
                    self.proxy.quiet(exchange)
                    state = pair.wait(config.read_timeout)
                if state == "timeout":
                    raise Refused(504, f"The model server sent nothing for {config.read_timeout:g} s (READ_TIMEOUT).")
                try:
                    data = wire.sock.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    raise Stale("no answer" if not wire.buf else "its answer broke off in the head")
                wire.buf += data
            del wire.buf[: head[2]]
            try:
                response = parse_response(head[0], head[1], exchange.request.method)
            except BadHead as error:
                raise Refused(502, f"The model server's answer is not HTTP: {error}.") from None
            if response.status >= 200 or response.status == 101:
                return response
        raise Refused(502, "The model server sent interim answers without end.")

    # --- relaying ---------------------------------------------------------------------------------------------------

    def relay(self, exchange: Exchange, upstream: Upstream, response: Response) -> None:
        """Pass the answer on as it comes, byte for byte. Raises BrokenOff when the upstream breaks off."""
        exchange.status = response.status
        exchange.begun = time.monotonic()
        old = exchange.request.version == b"HTTP/1.0"
        if old or response.status == 101:
            self.close_connection = True
        headers = end_to_end(response.headers)
        if response.framing in ("chunked", "close") and not old:
            headers.append((b"Transfer-Encoding", b"chunked"))
        headers += self.proxy.diagnosis(exchange)
        if self.close_connection:
            headers.append((b"Connection", b"close"))
        lines = [b"HTTP/1.1 %d %s" % (response.status, response.reason), *(k + b": " + v for k, v in headers)]
        exchange.tap = Tap(response.framing == "chunked")
        whole = False
        try:
            self.pump(exchange, upstream, response, b"\r\n".join(lines) + b"\r\n\r\n", old)
            whole = True
        except BrokenOff:
            # Without framing a plain close looks like the end; RST does not (and a chunked client lacks its last chunk).
            self.abort = old or response.framing == "close"
            raise
        except TimeoutError:
            raise ClientGone from None
        finally:
            if whole and response.framing != "close":
                self.proxy.backend.pool.give(upstream, response.headers)
            else:
                upstream.wire.close()

    def pump(self, exchange: Exchange, upstream: Upstream, response: Response, head: bytes, old: bool) -> None:
        wire, client, pair, tap = upstream.wire, self.request, exchange.pair, exchange.tap
        assert pair is not None and tap is not None
        timeout, framing, left = self.proxy.config.read_timeout, response.framing, response.length
        chunks = Chunks() if framing == "chunked" else None
        encoded = bool(response.headers.all(b"content-encoding"))
        if framing == "none" or (framing == "length" and not left):
            client.sendall(head)
            return
        pending = head  # goes out with the first bytes of the body when those are here already: one write, one packet
        while True:
            if not wire.buf:
                if pending and pair.wait(0) != "read":
                    client.sendall(pending)
                    pending = b""
                if pair.wait(timeout) == "timeout":
                    raise BrokenOff(f"nothing came for {timeout:g} s (READ_TIMEOUT)")
            try:
                data = wire.recv()
            except OSError as error:
                raise BrokenOff(f"the server's connection broke ({error})") from None
            if not data:
                if framing == "close":
                    client.sendall(pending + (b"" if old else b"0\r\n\r\n"))
                    return
                if pending:
                    client.sendall(pending)
                raise BrokenOff("the server closed the connection in the middle of its answer")
            if not encoded:
                tap.add(data, chunks)
            done = False
            if chunks is not None:
                out: list[bytes] | None = [] if old else None
                try:
                    used = chunks.feed(data, out)
                except BadHead as error:
                    raise BrokenOff(f"the server's chunks cannot be read ({error})") from None
                data = b"".join(out) if out is not None else data if used == len(data) else data[:used]
                done = chunks.done
            elif framing == "length":
                data = data[:left]
                left -= len(data)
                done = not left
            elif not old:
                data = b"%x\r\n%s\r\n" % (len(data), data)
            client.sendall(pending + data if pending else data)
            pending = b""
            if done:
                return

    def log_message(self, format: str, *args: Any) -> None:
        """The base class would print the request line, query and all; Proxy logs instead."""


class Stale(Exception):
    """A kept connection was closed by the server before it answered."""


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
        self.deferred = False  # forwarded without a parse; learned from later
        self.report, self.trace = Report(), Trace()
        self.verdict: Verdict | None = None
        self.idle = 0.0
        self.was_away = False
        self.explained = False
        self.usage = Usage()
        self.status, self.fault = 0, ""
        self.stream = False
        self.pair: Pair | None = None
        self.tap: Tap | None = None


# ======================================================================================================================
# Server: the backend, the listening socket, and Proxy, which everything hangs on
# ======================================================================================================================

CANDIDATES = ("http://127.0.0.1:8080", "http://127.0.0.1:9931", "http://127.0.0.1:12345")


class Backend:
    """Where the model server is. With BACKEND_URL unset it is looked for again whenever it is not there."""

    def __init__(self, config: Config) -> None:
        self.config, self.pool = config, Pool()
        self.url = urllib.parse.urlsplit(config.backend_url) if config.backend_url else None
        self.last_good: dict[str, str] = {}
        self.lost_at = self.looked_at = 0.0
        self.looking = threading.Lock()

    def name(self) -> str:
        return self.url.geturl() if self.url else " or ".join(CANDIDATES)

    def locate(self) -> urllib.parse.SplitResult:
        """The server's URL. Raises OSError when none is set and none answers."""
        if self.url is None:
            with self.looking:
                if self.url is None and time.monotonic() - self.looked_at > 1:
                    own = f":{self.config.listen_port}"
                    found = (url for url in CANDIDATES if not url.endswith(own) and self.looks_like_models(url))
                    found_url = next(found, None)
                    self.url = urllib.parse.urlsplit(found_url) if found_url else None
                    self.looked_at = 0.0 if self.url else time.monotonic()
        if self.url is None:
            raise ConnectionRefusedError("no server answers there")
        return self.url

    def looks_like_models(self, url: str) -> bool:
        status, value = fetch(urllib.parse.urlsplit(url), "/v1/models", 1.0)
        return status > 0 and isinstance(value, dict) and any(key in value for key in ("data", "models", "error"))

    def connect(self) -> Upstream:
        """A new connection. Raises OSError."""
        return Upstream(self.locate(), self.config.connect_timeout, self.last_good)

    def lost(self) -> None:
        """Note that the server was away."""
        self.lost_at = time.monotonic()
        self.pool.close()
        if not self.config.backend_url:
            self.url, self.looked_at = None, 0.0

    def authority(self) -> bytes:
        assert self.url is not None
        return self.url.netloc.encode()

    def target(self, target: bytes) -> bytes:
        """A request target under the URL's path prefix; a prefix that ends in /v1 is not doubled."""
        self.locate()
        assert self.url is not None
        prefix = self.url.path.rstrip("/").encode()
        if target == b"*" or not prefix:
            return target
        if prefix.endswith(b"/v1") and re.match(rb"/v1(?:[/?]|$)", target):
            prefix = prefix[:-3]
        return prefix + target

    def ask(self, path: str, timeout: float = 3.0) -> tuple[int, Any]:
        """(status, parsed JSON or text) of a GET; (0, reason) when it cannot be reached."""
        try:
            return fetch(self.locate(), self.target(path.encode()).decode(), timeout)
        except OSError as error:
            return 0, str(error)

    def describe(self) -> Json:
        """Product, build, model, slots and context, as far as the server tells; {} when it does not answer."""
        found: Json = {}
        status, props = self.ask("/props")
        if status == 200 and isinstance(props, dict):
            found["product"] = "llama-server"
            settings = props.get("default_generation_settings")
            context = settings.get("n_ctx") if isinstance(settings, dict) else None
            found.update(build=props.get("build_info"), slots=props.get("total_slots"), context=context)
            path = props.get("model_path")
            if isinstance(path, str) and path:
                found["model"] = re.split(r"[\\/]", path)[-1]
        status, models = self.ask("/v1/models")
        if status:
            found.setdefault("product", "a model server")
            rows = models.get("data") if isinstance(models, dict) else None
            if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                found.setdefault("model", rows[0].get("id"))
                owner = rows[0].get("owned_by")
                if owner == "llamacpp":
                    found["product"] = "llama-server"
                elif found["product"] == "a model server" and isinstance(owner, str):
                    found["product"] = "LM Studio" if owner == "organization_owner" else f"a server of {owner}"
        if status not in (0, 200):
            found["state"] = f"it answers {status} to /v1/models" + (
                " (loading, or a key is needed)" if status in (401, 503) else ""
            )
        return {key: value for key, value in found.items() if value is not None}


def fetch(url: urllib.parse.SplitResult, path: str, timeout: float) -> tuple[int, Any]:
    """(status, parsed JSON or text) of one GET; (0, reason) when it fails."""
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=timeout)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        response = connection.getresponse()
        text = response.read(1 << 20).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, str(error) or type(error).__name__
    finally:
        connection.close()
    with contextlib.suppress(ValueError, RecursionError):
        return response.status, json.loads(text)
    return response.status, text


class Server(socketserver.ThreadingMixIn, HTTPServer):
    """A thread for each connection, up to MAX_CONNECTIONS."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024  # with 5, the default, a burst of clients waits for SYN retransmits of 1, 3, 7 s
    allow_reuse_address = os.name != "nt"  # on Windows it would let two servers share a port

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.open: dict[socket.socket, bool] = {}  # connection -> a request is being served
        self.guard = threading.Lock()
        host, port = proxy.config.listen_host, proxy.config.listen_port
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Relay)

    def server_bind(self) -> None:
        if os.name == "nt" and hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        socketserver.TCPServer.server_bind(self)  # HTTPServer's asks DNS for the host's name, which can take seconds

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(0.05)  # socketserver would try again at once and burn a core
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.guard:
            full = len(self.open) >= self.proxy.config.max_connections
            if not full:
                self.open[request] = False
        if not full:
            try:
                super().process_request(request, client_address)
                return
            except RuntimeError:  # can't start new thread
                with self.guard:
                    self.open.pop(request, None)
        body = error_body("/", 503, "Too many connections (MAX_CONNECTIONS); try again in a second.")
        head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
        with contextlib.suppress(OSError):
            request.settimeout(1)
            request.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            request.shutdown(socket.SHUT_WR)
            if readable(request, 0.2):
                request.recv(65536)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.guard:
                self.open.pop(request, None)

    def busy(self, relay: Relay, value: bool) -> None:
        with self.guard:
            if relay.request in self.open:
                self.open[relay.request] = value

    def hang_up(self, everything: bool) -> int:
        """End idle connections, or all; returns how many are still busy."""
        with self.guard:
            for connection, busy in self.open.items():
                if everything or not busy:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
            return sum(self.open.values())

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
        self.replay = Replay(self.config)
        self.ledger = Ledger(self.config.ledger_mb << 20)
        self.metrics = Metrics(self.config)
        self.pages = Pages(self)
        self.capture = Capture(self.config, self.log)
        self.warmup = Warmup(self)
        self.server: Server | None = None
        self.stopping = False
        self.running, self.last_end = 0, time.monotonic()
        self.guard = threading.Lock()
        self.allowed = {name.strip().lower() for name in self.config.allowed_hosts.split(",") if name.strip()}
        self.loopback_only = is_loopback(self.config.listen_host)

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> Proxy:
        """Listen and serve in the background. Raises OSError when the address is taken."""
        self.server = Server(self)
        self.stopping = False
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.2}, name="kvproxy", daemon=True
        )
        self.thread.start()
        self.warmup.start()
        return self

    def stop(self, grace: float = DRAIN_SECONDS) -> None:
        """Take no more connections, let answers end for `grace` seconds, then close everything."""
        server, self.server = self.server, None
        if server is None:
            return
        self.stopping = True
        self.warmup.stop()
        server.shutdown()
        server.server_close()
        until = time.monotonic() + grace
        while server.hang_up(False) and time.monotonic() < until:
            time.sleep(0.02)
        server.hang_up(True)
        self.thread.join(5)
        self.backend.pool.close()
        self.capture.close()

    def __enter__(self) -> Proxy:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop(0 if _[0] else DRAIN_SECONDS)

    @property
    def url(self) -> str:
        """http://host:port, with the port that was really taken."""
        if self.server is None:
            raise RuntimeError("the proxy is not running")
        host, port = self.server.server_address[:2]
        name = str(host)
        shown = "127.0.0.1" if name == "0.0.0.0" else "[::1]" if name == "::" else f"[{name}]" if ":" in name else name
        return f"http://{shown}:{port}"

    def known_host(self, host: str) -> bool:
        """Whether a Host header can be this machine's: an IP address, a name that public DNS cannot hold, or a set one."""
        name = urllib.parse.urlsplit("//" + host).hostname or "" if "@" not in host else ""
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.strip("[]"))
            return True
        private = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
        return bool(name) and ("." not in name or name.endswith(private) or name in self.allowed)

    # --- before a request is forwarded ----------------------------------------------------------------------------------

    def prepare(self, exchange: Exchange) -> None:
        """Edit a request's body. Whatever goes wrong, the body is forwarded as it came."""
        raw = exchange.received
        assert raw is not None
        exchange.forwarded = raw
        try:
            self.edit(exchange, raw)
        except Unreadable as error:
            exchange.report = Report(note=str(error))
        except Exception:
            exchange.report, exchange.view = Report(note="internal error"), None
            self.log.exception("a body could not be edited and was forwarded as it came")

    def edit(self, exchange: Exchange, raw: bytes | bytearray) -> None:
        config, dialect, report = self.config, exchange.dialect, exchange.report
        assert dialect is not None
        if len(raw) > 65536 and config.scrub and dialect.edited and config.replay and self.is_clean(exchange, raw):
            exchange.deferred = True
            return
        view = view_of(parse(raw), dialect)
        if view is None:
            raise Unreadable("unknown shape")
        exchange.stream = bool(view.body.get("stream"))
        report.items = len(view.turns)
        if config.scrub and dialect.edited:
            self.scrubber.apply(view, report)
        if config.scrub and dialect.edited and config.replay:
            lifted = lift(view, self.replay.lift_text)
            exchange.trace = self.replay.apply(view, lifted, report, raw, learn=not exchange.counting)
            report.items_modified += report.replayed + bool(report.lifted or report.system_moved)
        else:
            exchange.trace = Trace(conversation_of(view))
        exchange.view = view
        if report.edits():
            exchange.forwarded = dump(view.body)

    def is_clean(self, exchange: Exchange, raw: bytes | bytearray) -> bool:
        """Whether a large body surely needs no edit: nothing is stored, and no marker stands in it. Only its beginning
        is parsed; the rest is learned from while the model works."""
        dialect, store = exchange.dialect, self.replay.store
        assert dialect is not None
        answer = raw.find(b'"role":"assistant"') if store.idle() and dialect.turns == "messages" else -1
        cut = raw.rfind(b"{", 0, answer)
        if cut < 0 or raw.find(b'"system":', cut) >= 0 or self.scrubber.may_edit(raw, "user", cut):
            return False
        if store.tools and b'"tools"' in raw and store.clean_tools(raw) is None:
            return False
        roles = (b'"role":"system"', b'"role":"developer"', b'"role": ') if self.config.system_first else ()
        if any(raw.find(marker, cut) >= 0 for marker in roles):
            return False
        try:
            body = parse(bytes(raw[:cut]).rstrip(b", \n\r\t") + b"]}")
        except Unreadable:
            return False
        view, report = view_of(body, dialect), Report()
        if view is None:
            return False
        self.scrubber.apply(view, report)
        if report.edits() or lift(view, self.replay.lift_text):
            return False
        exchange.trace = Trace(conversation_of(view))
        exchange.stream = b'"stream":true' in raw[:4096] or b'"stream":true' in raw[-4096:]
        return True

    # --- while the model works ------------------------------------------------------------------------------------------

    def quiet(self, exchange: Exchange) -> None:
        """Learn from a request and explain it. Called once, when the server is silent or has answered."""
        if exchange.explained or exchange.dialect is None or exchange.counting:
            return
        exchange.explained = True
        try:
            if exchange.deferred:
                self.learn_late(exchange)
            view = exchange.view
            if view is not None:
                headers = {
                    name.decode("latin-1").lower(): value.decode("latin-1") for name, value in exchange.request.headers
                }
                side = side_of(view.body, headers, view)
                exchange.idle = exchange.started - self.last_end
                exchange.was_away = self.backend.lost_at > 0 and self.backend.lost_at > self.ledger.away
                self.ledger.away = self.backend.lost_at
                exchange.verdict = self.ledger.judge(segments_of(view), exchange.trace.conversation, side)
        except Exception:
            self.log.exception("a request could not be explained")

    def learn_late(self, exchange: Exchange) -> None:
        raw, dialect = exchange.received, exchange.dialect
        assert raw is not None and dialect is not None
        view = view_of(parse(raw), dialect)
        if view is None:
            return
        exchange.report.items = len(view.turns)
        exchange.trace = self.replay.apply(view, [], Report(), raw)
        exchange.view = view

    def diagnosis(self, exchange: Exchange) -> Headers:
        """The response headers for a request that has X-Cache-Diagnostic: true."""
        if exchange.request.get("x-cache-diagnostic").strip().lower() != "true":
            return []
        self.quiet(exchange)
        report, verdict = exchange.report, exchange.verdict
        removed = {"ts": report.ts_removed, "ids": report.msg_ids_removed, "billing": report.billing_removed,
                   "regex": report.regex_removed, "lifted": report.lifted, "dropped": report.dropped}  # fmt: skip
        told = " ".join(f"{name}={count}" for name, count in removed.items())
        fields = [("Removed", told), ("Replayed", str(report.replayed))]
        if verdict is not None:
            fields += [("Prefix", f"{verdict.share:.3f}"), ("Verdict", verdict.name)]
        return [(b"X-KVProxy-" + name.encode(), value.encode()) for name, value in fields]

    def busy(self, change: int) -> None:
        with self.guard:
            self.running += change
            if change < 0:
                self.last_end = time.monotonic()
        if change > 0:
            self.warmup.interrupt()

    def finished(self, exchange: Exchange) -> None:
        """Read the usage, settle the verdict, write log, page, metrics and capture."""
        exchange.ended = time.monotonic()
        try:
            self.quiet(exchange)
            if exchange.tap is not None and exchange.dialect is not None:
                first, last = exchange.tap.windows()
                exchange.usage = usage_of(first, last) if exchange.status == 200 else Usage()
                if exchange.trace.newest:
                    self.replay.answered(exchange.trace, hint_of(first))
            exchange.tap = exchange.pair = None
            verdict = exchange.verdict
            if verdict is not None and exchange.status == 200:
                settle(verdict, exchange.usage, exchange.trace.conversation, exchange.idle, exchange.was_away)
                self.warmup.remember(exchange)
            elif exchange.status != 200:
                exchange.verdict = None
            exchange.view = None
            exchange.trace.newest = []
            self.capture.write(exchange)
            warning = self.metrics.count(exchange)
            self.write_log(exchange, warning)
        except Exception:
            self.log.exception("a finished request could not be recorded")

    def write_log(self, exchange: Exchange, warning: str) -> None:
        if not self.log.isEnabledFor(logging.WARNING if warning else logging.INFO):
            return
        lines = log_lines(exchange)
        self.log.info("%s", lines[0])
        for line in lines[1:]:
            self.log.info("    %s", line)
        if warning:
            self.log.warning("%s", warning)


def conversation_of(view: View) -> str:
    """The conversation's hash, for a request that does not pass through replay."""
    head = digest(*(turn.text() for turn in view.system()))
    users = (mask(turn.text()) + turn.rest() for turn in view.turns if turn.role == "user")
    return digest(view.dialect.name, head, next((said for said in users if said), "")).hex()


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def log_lines(exchange: Exchange) -> list[str]:
    """The log of one request: the line, and a second one when a prompt was not reused for a reason."""
    request, report, usage, verdict = exchange.request, exchange.report, exchange.usage, exchange.verdict
    parts = [f"{request.method} {request.path.split('?')[0]}"]
    if exchange.dialect is not None and request.method == "POST":
        parts += [
            f"items={report.items}",
            f"ts_removed={report.ts_removed}",
            f"msg_ids_removed={report.msg_ids_removed}",
        ]
        parts += [f"items_modified={report.items_modified}", f"stream={exchange.stream}"]
        named = ("billing_removed", "regex_removed", "system_moved", "lifted", "replayed", "dropped", "tools_restored")
        parts += [f"{name}={count}" for name in named if (count := getattr(report, name))]
        if usage.cached is not None and usage.prompt:
            parts.append(f"reused={usage.cached}/{usage.prompt} ({100 * usage.cached / usage.prompt:.1f}%)")
        elif exchange.status == 200 and not exchange.counting:
            parts.append("reused=not reported")
        if usage.prompt_ms is not None:
            parts.append(f"prompt_ms={usage.prompt_ms:.0f}")
        if verdict is not None:
            parts.append(verdict.name + (f" ({verdict.side})" if verdict.side else ""))
        if report.note:
            parts.append(f"forwarded as it came: {report.note}")
    if exchange.status != 200 or exchange.dialect is None:
        parts.append(f"status={exchange.status or '-'}")
    if exchange.fault:
        parts.append(exchange.fault)
    lines = [" | ".join(parts)]
    if verdict is not None and verdict.line() and not verdict.side:
        lines.append(verdict.line())
    return lines


class Metrics:
    """Counters, the last requests, and the running hit rate."""

    KEEP_BYTES = 64 << 20  # of the bodies kept for the status page

    def __init__(self, config: Config) -> None:
        self.config, self.guard = config, threading.Lock()
        self.recent: collections.deque[Exchange] = collections.deque(maxlen=max(1, config.keep_requests))
        self.window: collections.deque[tuple[int, int, str]] = collections.deque(maxlen=20)
        self.points: collections.deque[tuple[float, float, str]] = collections.deque(maxlen=200)
        self.rates: collections.deque[float] = collections.deque(maxlen=50)  # measured ms per prompt token
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.number, self.kept, self.saved = 0, 0, 0.0
        self.warned = False
        self.since = time.time()

    def ms_per_token(self) -> float | None:
        return statistics.median(self.rates) if self.rates else None

    def count(self, exchange: Exchange) -> str:
        """Enter a finished request; returns a warning to log, or ''."""
        usage, verdict, report = exchange.usage, exchange.verdict, exchange.report
        with self.guard:
            self.number += 1
            exchange.number = self.number
            self.counts["requests", str(exchange.status)] += 1
            if report.edits():
                for name, number in vars(report).items():
                    if name not in ("items", "items_modified", "note"):
                        self.counts["edits", name] += number
            if report.note:
                self.counts["untouched", report.note.split(" (")[0]] += 1
            if exchange.dialect is None:
                return ""
            if self.config.keep_requests:
                self.keep(exchange)
            if verdict is None:
                return ""
            self.counts["verdicts", verdict.name] += 1
            if usage.prompt is None or usage.cached is None:
                return ""
            read = usage.prompt - usage.cached
            self.counts["tokens", "reused"] += usage.cached
            self.counts["tokens", "read"] += read
            if usage.prompt_ms is not None and read >= 32:
                self.rates.append(usage.prompt_ms / read)
            rate = self.ms_per_token()
            if rate is not None:
                self.saved += usage.cached * rate / 1000
            self.points.append((exchange.time, usage.cached / max(1, usage.prompt), verdict.name))
            if verdict.side:
                return ""
            self.window.append((usage.cached, usage.prompt, verdict.name))
            return self.warning()

    def hit_rate(self) -> float | None:
        """Share of prompt tokens reused over the last 20 requests that told."""
        total = sum(prompt for _, prompt, _ in self.window)
        return sum(cached for cached, _, _ in self.window) / total if total else None

    def warning(self) -> str:
        rate = self.hit_rate()
        if rate is None or len(self.window) < 20 or rate >= self.config.warn_reuse:
            self.warned = self.warned and rate is not None and rate < self.config.warn_reuse
            return ""
        if self.warned:
            return ""
        self.warned = True
        causes = collections.Counter(name for _, _, name in self.window if name != "extended")
        cause = causes.most_common(1)[0][0] if causes else "extended"
        return f"only {100 * rate:.0f}% of the last 20 prompts was reused; most often: {cause} ({VERDICTS[cause]})"

    def keep(self, exchange: Exchange) -> None:
        def size(one: Exchange) -> int:
            return len(one.received or b"") + (0 if one.forwarded is one.received else len(one.forwarded or b""))

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
    """CAPTURE_FILE: every request as a JSON line. Trouble with the file ends the capture, never the proxy."""

    SECRET = re.compile(r"(?i)authorization|cookie|api-?key|token|secret|password")

    def __init__(self, config: Config, log: logging.Logger) -> None:
        self.path, self.limit, self.log = config.capture_file, config.capture_mb << 20, log
        self.guard = threading.Lock()
        self.file: Any = None

    def write(self, exchange: Exchange) -> None:
        if not self.path or exchange.received is None:
            return
        request = exchange.request
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in request.headers}
        row: Json = {
            "method": request.method,
            "path": re.sub(r"(?i)([?&][^=&]*(?:key|token|secret)[^=&]*=)[^&]*", r"\1***", request.path),
            "time": exchange.time,
            "headers": {name: "***" if self.SECRET.search(name) else value for name, value in headers.items()},
            "status": exchange.status,
            "report": dataclasses.asdict(exchange.report),
            "usage": dataclasses.asdict(exchange.usage),
            "verdict": exchange.verdict.name if exchange.verdict else None,
        }
        try:
            row["body"] = json.loads(exchange.received)
        except (ValueError, RecursionError):
            row["text"] = exchange.received.decode("utf-8", "replace")
        try:
            line = json.dumps(row, separators=(",", ":")) + "\n"
            with self.guard:
                if self.path:
                    self.append(line)
        except (OSError, RecursionError) as error:
            self.log.warning("capture stopped: %s cannot be written (%s)", self.path, error)
            self.path = ""

    def append(self, line: str) -> None:
        if self.file is None:
            self.file = open_private(self.path, os.O_APPEND)
        if self.file.tell() and self.file.tell() + len(line) > self.limit:
            self.file.close()
            os.replace(self.path, self.path + ".1")
            self.file = open_private(self.path, os.O_APPEND)
        self.file.write(line)
        self.file.flush()

    def close(self) -> None:
        with self.guard, contextlib.suppress(OSError):
            if self.file is not None:
                self.file.close()
            self.file = None


def open_private(path: str, flag: int) -> Any:
    """A text file to write that only its owner may read. Raises OSError."""
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600), "a" if flag & os.O_APPEND else "w", encoding="ascii"
    )


class Warmup:
    """Remembers the heads of recent conversations and has the server read them before the first real turn needs them."""

    FIRST_WAIT, AWAY_WAIT = 1.0, 5.0

    def __init__(self, proxy: Proxy) -> None:
        self.proxy, self.config = proxy, proxy.config
        self.heads: collections.OrderedDict[str, Json] = collections.OrderedDict()  # newest last
        self.guard = threading.Lock()
        self.wake, self.over = threading.Event(), threading.Event()
        self.current: Wire | None = None
        self.state = "off"
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
        self.wake.set()
        self.interrupt()
        if self.thread is not None:
            self.thread.join(5)

    def load(self) -> None:
        if not self.config.warmup_file:
            return
        try:
            with open(self.config.warmup_file, encoding="ascii") as file:
                rows = json.load(file)
            heads = {key: row for key, row in rows.items() if isinstance(row, dict) and {"path", "body"} <= row.keys()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            self.proxy.log.warning("WARMUP_FILE cannot be read (%s); it starts anew", error)
            return
        self.heads.update(list(heads.items())[-self.config.warmup_heads :])

    def remember(self, exchange: Exchange) -> None:
        """Keep the head (system, tools, model) of a request that was answered."""
        view, verdict = exchange.view, exchange.verdict
        if not self.enabled() or view is None or verdict is None or verdict.side or exchange.counting:
            return
        if not view.dialect.edited or not view.system():
            return
        keep: Json = {
            k: view.body[k] for k in ("model", "system", "instructions", "tools", "tool_choice") if k in view.body
        }
        systems = [turn.item for turn in view.turns[: view.leading()]]
        user: Json = {"role": "user", "content": "."}
        body: Json = {**keep, view.dialect.turns: [*systems, user], "stream": False}
        body["max_output_tokens" if view.dialect.name == "responses" else "max_tokens"] = 1
        if body.get("tool_choice") not in (None, "auto", "none"):
            del body["tool_choice"]
        key = digest(dump(body)).hex()
        with self.guard:
            new = key not in self.heads
            self.heads[key] = {"path": exchange.request.path.split("?")[0], "body": body}
            self.heads.move_to_end(key)
            while len(self.heads) > self.config.warmup_heads:
                self.heads.popitem(last=False)
            rows = dict(self.heads)
        if new and self.config.warmup_file:
            self.save(rows)

    def save(self, rows: Mapping[str, Json]) -> None:
        temporary = f"{self.config.warmup_file}.{os.getpid()}.tmp"
        try:
            with open_private(temporary, os.O_TRUNC) as file:
                json.dump(rows, file)
            os.replace(temporary, self.config.warmup_file)
        except OSError as error:
            self.proxy.log.warning("WARMUP_FILE cannot be written (%s)", error)

    def interrupt(self) -> None:
        """A client's request goes first: give the model up at once."""
        wire = self.current
        if wire is not None:
            wire.close()

    def run(self) -> None:
        """Warm up after a start and after the backend was away; repeat the newest head while idle, if that is wanted."""
        due, wait, lost_at = bool(self.config.warmup_file), self.FIRST_WAIT, self.proxy.backend.lost_at
        while not self.over.is_set():
            self.wake.wait(wait)
            self.wake.clear()
            if self.over.is_set():
                return
            wait = min(self.AWAY_WAIT, self.config.keepalive_seconds or self.AWAY_WAIT)
            if self.proxy.backend.lost_at != lost_at:
                lost_at, due = self.proxy.backend.lost_at, bool(self.config.warmup_file)
            with self.guard:
                heads = list(self.heads.values())
            if self.proxy.running or not heads:
                continue
            if due:
                due = not self.read(heads)
            elif (
                self.config.keepalive_seconds
                and time.monotonic() - self.proxy.last_end >= self.config.keepalive_seconds
            ):
                self.read(heads[-1:])

    def read(self, heads: list[Json]) -> bool:
        """Send each head with one output token. False when the server is not ready, or a client came in between."""
        if self.proxy.backend.ask("/health", 2.0)[0] not in (200, 404):
            return False
        for number, head in enumerate(heads, 1):
            self.state = f"reading head {number} of {len(heads)}"
            started = time.monotonic()
            if self.proxy.running or self.over.is_set() or not self.send(head):
                self.state = "interrupted"
                return False
            self.proxy.log.info("warm-up | head %d of %d | %.1f s", number, len(heads), time.monotonic() - started)
        self.state = "warm"
        self.proxy.last_end = time.monotonic()
        return True

    def send(self, head: Json) -> bool:
        backend, body = self.proxy.backend, dump(head["body"])
        try:
            upstream = backend.connect()
            self.current = upstream.wire
            if self.proxy.running:  # a client came before the connection could be interrupted
                return False
            request = (
                b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                % (backend.target(head["path"].encode()), backend.authority(), len(body))
            )
            upstream.wire.sock.sendall(request + body)
            upstream.wire.sock.settimeout(self.config.read_timeout)
            answer = b""
            while data := upstream.wire.sock.recv(65536):
                answer = (answer + data)[:64]
            return answer.startswith(b"HTTP/1.1 200")
        except OSError:
            return False
        finally:
            wire, self.current = self.current, None
            if wire is not None:
                wire.close()


# ======================================================================================================================
# Status: the proxy's own endpoints, under /kvproxy
# ======================================================================================================================

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>kvproxy</title><style nonce="{nonce}">
:root {{ color-scheme: light dark; --ink: #1c2127; --soft: #5c6773; --line: #d5dae0; --back: #fff; --good: #1a7f4b;
  --bad: #b3261e; --fair: #8a5a00; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e9ec; --soft: #9aa5b1; --line: #39424c; --back: #14181c;
  --good: #4cc38a; --bad: #ff8f85; --fair: #e5b567; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 0 auto; padding: 1rem;
  max-width: 60rem; }}
h1 {{ font-size: 1.1rem; margin: 0; color: var(--soft); font-weight: 600 }} h2 {{ font-size: 1.05rem; margin: 2rem 0 .5rem }}
.state {{ font-size: 1.6rem; font-weight: 650; margin: .4rem 0; line-height: 1.25 }}
.good {{ color: var(--good) }} .bad {{ color: var(--bad) }} .fair {{ color: var(--fair) }} .soft {{ color: var(--soft) }}
dl {{ display: flex; flex-wrap: wrap; gap: .6rem 2rem; margin: 1rem 0 }} dt {{ color: var(--soft); font-size: .85rem }}
dd {{ margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums }}
svg {{ width: 100%; height: 9rem; display: block }} svg text {{ fill: var(--soft); font-size: 11px }}
svg line {{ stroke: var(--line) }} .bar {{ fill: var(--good) }} .bar.low {{ fill: var(--bad) }}
ol, ul {{ list-style: none; padding: 0; margin: 0 }} li {{ border-top: 1px solid var(--line); padding: .5rem 0 }}
li p {{ margin: 0; overflow-wrap: anywhere }} code {{ font-size: .88em; overflow-wrap: anywhere }}
a {{ color: inherit }} a:focus-visible, summary:focus-visible {{ outline: 2px solid var(--good); outline-offset: 2px }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem }} td {{ border-top: 1px solid var(--line);
  padding: .25rem .5rem .25rem 0; overflow-wrap: anywhere; vertical-align: top }}
</style></head><body><header><h1>kvproxy {version}</h1></header><main id="main" aria-live="polite">{main}</main>
<details><summary>Settings in force</summary><table>{settings}</table></details>
<script nonce="{nonce}">
setInterval(async () => {{
  const box = document.getElementById("main");
  if (document.hidden || box.contains(document.activeElement) || String(getSelection())) return;
  try {{
    const page = new DOMParser().parseFromString(await (await fetch("/kvproxy")).text(), "text/html");
    const news = page.getElementById("main");
    if (news && news.innerHTML !== box.innerHTML) box.innerHTML = news.innerHTML;
  }} catch (error) {{ /* the proxy is away: what stands here stays */ }}
}}, 3000);
</script></body></html>
"""

METRIC_HELP = (  # (name, type, help); rows come from Pages.metrics
    ("kvproxy_requests_total", "counter", "Requests forwarded, by the status of their answers."),
    ("kvproxy_verdicts_total", "counter", "Prompts by what became of them."),
    ("kvproxy_edits_total", "counter", "Edits made to requests, by kind."),
    ("kvproxy_untouched_total", "counter", "Bodies forwarded as they came, by reason."),
    ("kvproxy_prompt_tokens_total", "counter", "Prompt tokens as the server reported them, reused or read."),
    ("kvproxy_saved_seconds_total", "counter", "Estimated seconds of prompt reading that reuse saved."),
    ("kvproxy_hit_ratio", "gauge", "Share of prompt tokens reused over the last 20 requests."),
    ("kvproxy_running_requests", "gauge", "Requests being served."),
    ("kvproxy_replay_bytes", "gauge", "Memory held for replay."),
    ("kvproxy_ledger_bytes", "gauge", "Memory held for explanations."),
    ("kvproxy_start_time_seconds", "gauge", "When the proxy started, in seconds since the epoch."),
)

Answer = tuple[int, bytes, Headers, str]


class Pages:
    """Answers under /kvproxy. Prompt text goes to this machine only, and never to a page of another site."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    def answer(self, request: Request, peer: str) -> Answer:
        """(status, body, headers, content type)."""
        path = urllib.parse.urlsplit(request.path).path.rstrip("/")
        if request.method not in ("GET", "HEAD"):
            return self.json(405, {"error": {"message": "Only GET and HEAD."}}, [(b"Allow", b"GET, HEAD")])
        if not self.proxy.known_host(request.get("host")):
            return self.json(403, {"error": {"message": "This Host is not known here; see ALLOWED_HOSTS."}})
        if path == "/kvproxy/health":
            return self.json(200, {"status": "ok", "version": __version__, "warmup": self.proxy.warmup.state})
        if path == "/kvproxy/metrics":
            return 200, self.metrics().encode(), [], "text/plain; version=0.0.4; charset=utf-8"
        if not is_loopback(peer) or not self.same_site(request):
            return self.json(403, {"error": {"message": "Prompts are shown on this machine only."}})
        if path == "/kvproxy":
            return self.page()
        if path == "/kvproxy/requests":
            with self.proxy.metrics.guard:
                rows = [self.row(exchange) for exchange in reversed(self.proxy.metrics.recent)]
            return self.json(200, {"requests": rows})
        number = path.removeprefix("/kvproxy/requests/")
        with self.proxy.metrics.guard:
            found = next((one for one in self.proxy.metrics.recent if str(one.number) == number), None)
        if found is None:
            return self.json(404, {"error": {"message": "There is no such page."}})
        return self.json(200, self.detail(found))

    def same_site(self, request: Request) -> bool:
        origin = request.get("origin")
        return request.get("sec-fetch-site") in ("", "none", "same-origin") and (
            not origin or urllib.parse.urlsplit(origin).netloc == request.get("host")
        )

    def json(self, status: int, value: Json, headers: Headers | None = None) -> Answer:
        body = json.dumps(value, indent=1).encode()
        return status, body, [(b"X-Content-Type-Options", b"nosniff"), *(headers or [])], "application/json"

    def row(self, exchange: Exchange) -> Json:
        """A request in numbers."""
        verdict, usage = exchange.verdict, exchange.usage
        return {
            "number": exchange.number,
            "time": exchange.time,
            "method": exchange.request.method,
            "path": exchange.request.path.split("?")[0],
            "status": exchange.status,
            "fault": exchange.fault or None,
            "conversation": exchange.trace.conversation or None,
            "report": dataclasses.asdict(exchange.report),
            "usage": {**dataclasses.asdict(usage), "read": usage.read()},
            "verdict": dataclasses.asdict(verdict) if verdict else None,
            "first_byte_ms": round(1000 * (exchange.begun - exchange.started), 1) if exchange.begun else None,
            "total_ms": round(1000 * (exchange.ended - exchange.started), 1),
        }

    def detail(self, exchange: Exchange) -> Json:
        """A request with its body as received and as forwarded, and what differs."""
        row = self.row(exchange)
        for name, raw in (("received", exchange.received), ("forwarded", exchange.forwarded)):
            row[name] = None if raw is None else raw.decode("utf-8", "replace")
        if exchange.received is None:
            row["note"] = "the bodies were dropped to save memory"
            return row
        row["diff"] = []
        if exchange.forwarded is not exchange.received:
            with contextlib.suppress(ValueError, RecursionError):
                texts = [
                    json.dumps(json.loads(raw or b"null"), indent=1, ensure_ascii=False)
                    .replace("\\n", "\n")
                    .splitlines()
                    for raw in (exchange.received, exchange.forwarded)
                ]
                diff = difflib.unified_diff(texts[0], texts[1], "received", "forwarded", lineterm="", n=2)
                row["diff"] = list(diff)
        return row

    def metrics(self) -> str:
        """Prometheus text format."""
        metrics, proxy = self.proxy.metrics, self.proxy
        rows: dict[str, list[tuple[str, float]]] = collections.defaultdict(list)
        names: dict[str, tuple[str, str]] = {
            "requests": ("kvproxy_requests_total", "status"),
            "verdicts": ("kvproxy_verdicts_total", "verdict"),
            "edits": ("kvproxy_edits_total", "kind"),
            "untouched": ("kvproxy_untouched_total", "reason"),
            "tokens": ("kvproxy_prompt_tokens_total", "state"),
        }
        with metrics.guard:
            for (group, value), count in sorted(metrics.counts.items()):
                name, label = names[group]
                rows[name].append((f'{{{label}="{value}"}}', count))
            rate = metrics.hit_rate()
            rows["kvproxy_saved_seconds_total"].append(("", metrics.saved))
        if rate is not None:
            rows["kvproxy_hit_ratio"].append(("", rate))
        rows["kvproxy_running_requests"].append(("", proxy.running))
        rows["kvproxy_replay_bytes"].append(("", proxy.replay.store.size))
        rows["kvproxy_ledger_bytes"].append(("", proxy.ledger.size))
        rows["kvproxy_start_time_seconds"].append(("", metrics.since))
        lines = []
        for name, kind, text in METRIC_HELP:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{labels} {value!r}" for labels, value in rows[name]]
        return "\n".join(lines) + "\n"

    # --- the page -----------------------------------------------------------------------------------------------------

    def page(self) -> Answer:
        nonce = uuid.uuid4().hex
        settings = "".join(
            f"<tr><td><code>{name}</code></td><td><code>{html.escape(str(getattr(self.proxy.config, name.lower())))}</code>"
            f"</td><td>{html.escape(text)}</td></tr>"
            for name, _, text in Config.table()
        )
        with self.proxy.metrics.guard:
            body = PAGE.format(nonce=nonce, version=__version__, main=self.main(), settings=settings)
        policy = f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'"
        headers = [
            (b"Content-Security-Policy", (policy + "; frame-ancestors 'none'; base-uri 'none'").encode()),
            (b"X-Content-Type-Options", b"nosniff"),
            (b"Referrer-Policy", b"no-referrer"),
        ]
        return 200, body.encode(), headers, "text/html; charset=utf-8"

    def main(self) -> str:
        """The part of the page that changes."""
        metrics, proxy = self.proxy.metrics, self.proxy
        rate, counts = metrics.hit_rate(), metrics.counts
        reused, read = counts["tokens", "reused"], counts["tokens", "read"]
        if rate is None:
            state, tone = "No prompt measured yet", "fair"
            hint = "Point your agent at this address; what the server reports shows up here."
        elif rate >= proxy.config.warn_reuse:
            state, tone = f"The cache works: {100 * rate:.0f}% of the recent prompts was reused", "good"
            hint = ""
        else:
            state, tone = f"The cache misses: only {100 * rate:.0f}% of the recent prompts was reused", "bad"
            causes = collections.Counter(name for _, _, name in metrics.window if name != "extended")
            hint = f"Most often: {VERDICTS[causes.most_common(1)[0][0]]}." if causes else ""
        facts = [
            ("tokens reused", f"{reused:,}"),
            ("tokens read", f"{read:,}"),
            ("time saved, about", duration(metrics.saved)),
            ("requests", f"{metrics.number:,}"),
            ("running", str(proxy.running)),
            ("server", html.escape(proxy.backend.name())),
        ]
        if proxy.warmup.enabled():
            facts.append(("warm-up", html.escape(proxy.warmup.state)))
        items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
        rows = "".join(self.item(exchange) for exchange in reversed(metrics.recent)) or "<li>None yet.</li>"
        return (
            f'<p class="state {tone}">{html.escape(state)}</p><p class="soft">{html.escape(hint)}</p><dl>{items}</dl>'
            f"<h2>Reuse per request</h2>{self.chart()}<h2>Last requests</h2><ol>{rows}</ol>"
        )

    def chart(self) -> str:
        """Bars, oldest left; a label tells screen readers what they show."""
        points = list(self.proxy.metrics.points)[-60:]
        if not points:
            return '<p class="soft">Nothing to show yet.</p>'
        step = 600 / max(20, len(points))
        bars = "".join(
            f'<rect class="bar{" low" if share < 0.5 else ""}" x="{40 + i * step:.1f}" y="{110 - 100 * share:.1f}"'
            f' width="{step * 0.8:.1f}" height="{max(1.5, 100 * share):.1f}"><title>{time.strftime("%H:%M:%S", time.localtime(when))}'
            f" {100 * share:.0f}% {name}</title></rect>"
            for i, (when, share, name) in enumerate(points)
        )
        grid = "".join(
            f'<line x1="38" x2="640" y1="{y}" y2="{y}"/><text x="34" y="{y + 4}" text-anchor="end">{label}</text>'
            for y, label in ((10, "100%"), (60, "50%"), (110, "0"))
        )
        mean = sum(share for _, share, _ in points) / len(points)
        clock = (
            time.strftime("%H:%M", time.localtime(points[0][0])),
            time.strftime("%H:%M", time.localtime(points[-1][0])),
        )
        return (
            f'<svg viewBox="0 0 640 128" preserveAspectRatio="none" role="img" aria-label="Share of the prompt reused in the'
            f' last {len(points)} requests, {100 * mean:.0f}% on average">{grid}{bars}<text x="40" y="125">{clock[0]}</text>'
            f'<text x="640" y="125" text-anchor="end">{clock[1]}</text></svg>'
        )

    def item(self, exchange: Exchange) -> str:
        usage, verdict = exchange.usage, exchange.verdict
        told = "not reported"
        if usage.cached is not None and usage.prompt:
            told = f"{100 * usage.cached / usage.prompt:.0f}% of {usage.prompt:,} tokens reused"
        if exchange.status != 200:
            told = f"status {exchange.status}" if exchange.status else exchange.fault or "no answer"
        words, tone = "", "soft"
        if verdict is not None:
            tone = {"extended": "good", "rewritten": "bad", "lost": "bad"}.get(verdict.name, "soft")
            words = f"{verdict.name}: {VERDICTS[verdict.name]}" + (f" ({verdict.side} request)" if verdict.side else "")
        when = time.strftime("%H:%M:%S", time.localtime(exchange.time))
        line = f'<p class="soft">{html.escape(verdict.line())}</p>' if verdict and verdict.line() else ""
        path = html.escape(exchange.request.path.split("?")[0])
        return (
            f'<li><p><a href="/kvproxy/requests/{exchange.number}">{when}</a> <code>{path}</code> {html.escape(told)}</p>'
            f'<p class="{tone}">{html.escape(words)}</p>{line}</li>'
        )


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


# ======================================================================================================================
# Commands: demo, bench, inspect, check
# ======================================================================================================================

# --- an OpenClaw-shaped conversation, for demo and bench ---------------------------------------------------------------

WORDS = ("box", "reads", "file", "writes", "patch", "server", "tests", "fail", "look", "line", "again", "with", "its")


def filler(count: int, seed: int) -> str:
    """About `count` tokens of words in an order that `seed` decides."""
    state, out = seed * 2654435761 % (1 << 32), []
    for number in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        out.append(WORDS[state // 65536 % len(WORDS)] + ("." if number % 12 == 11 else ""))
    return " ".join(out)


def agent_turns(tokens: int, turns: int, mark: str) -> Iterator[tuple[Json, Callable[[str], None]]]:
    """Requests of an OpenClaw 2026.2-shaped agent: ids and a stamp that change on every turn, the head marked `mark`.

    Yields (body, answer): call answer(text) with the model's words before taking the next one.
    """
    history: list[Json] = []
    body_text = filler(max(50, tokens - 200), 7)
    for turn in range(1, turns + 1):
        ident = str(uuid.uuid4())
        meta = {"schema": "openclaw.inbound_meta.v1", "message_id": ident, "sender_id": "user-1", "channel": "webchat"}
        block = f"## Inbound Context (trusted metadata)\n```json\n{json.dumps(meta, indent=2)}\n```\n"
        system = f"You are a helpful agent ({mark}).\n{block}# Project Context\n{body_text}"
        info = json.dumps({"message_id": ident, "sender": "user-1"}, indent=2)
        stamp = time.strftime("[%a %Y-%m-%d %H:%M UTC]", time.gmtime(1771447680 + 61 * turn))
        words = f"Question {turn}: {filler(20, turn)}"
        history.append(
            {
                "role": "user",
                "content": f"Conversation info (untrusted metadata):\n```json\n{info}\n```\n\n{stamp} {words}",
            }
        )
        messages = [{"role": "system", "content": system}, *copy.deepcopy(history)]
        yield (
            {"model": "local", "messages": messages, "stream": True, "max_tokens": 16, "temperature": 0},
            lambda text: history.append({"role": "assistant", "content": text or "ok"}),
        )


def ask(url: str, body: Json, timeout: float) -> tuple[str, Usage, float]:
    """(answer, usage, ms to the first byte) of one streamed chat request. Raises OSError or ValueError."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    try:
        started = time.monotonic()
        headers = {"Content-Type": "application/json"}
        if os.environ.get("API_KEY"):
            headers["Authorization"] = "Bearer " + os.environ["API_KEY"]
        connection.request("POST", parts.path.rstrip("/") + "/v1/chat/completions", dump(body), headers)
        response = connection.getresponse()
        data = response.read1(65536)
        first = 1000 * (time.monotonic() - started)
        if response.status == 200:
            while more := response.read1(65536):
                data += more
        if response.status != 200:
            raise ValueError(f"the server answered {response.status}: {data[:200].decode('utf-8', 'replace')}")
    finally:
        connection.close()
    text = hint_of(data)
    return text, usage_of(data), first


def play(url: str, tokens: int, turns: int, mark: str, timeout: float, progress: Callable[[str], None]) -> list[Json]:
    """Play the conversation against `url`; a row per turn."""
    rows = []
    for number, (body, answer) in enumerate(agent_turns(tokens, turns, mark), 1):
        text, usage, first = ask(url, body, timeout)
        answer(text)
        ms = usage.prompt_ms if usage.prompt_ms is not None else first
        rows.append(
            {"turn": number, "prompt": usage.prompt, "read": usage.read(), "reused": usage.cached, "ms": round(ms, 1)}
        )
        progress(f"turn {number} of {turns}: {ms:,.0f} ms")
    return rows


def side_by_side(straight: list[Json], through: list[Json]) -> str:
    """Both runs as one table, with the ratio from the second turn on."""
    lines = [
        f"{'':5} | {'straight':^35} | {'through kvproxy':^35}",
        f"{'turn':>5} | " + " | ".join([f"{'prompt':>8} {'read':>8} {'reused':>8} {'ms':>8}"] * 2),
    ]
    lines.append("-" * len(lines[1]))
    for a, b in zip(straight, through, strict=True):
        cells = [
            " ".join(
                f"{'-' if row[key] is None else format(row[key], ',.0f'):>8}"
                for key in ("prompt", "read", "reused", "ms")
            )
            for row in (a, b)
        ]
        lines.append(f"{a['turn']:>5} | " + " | ".join(cells))
    ratio = ratio_of(straight, through)
    if ratio is not None:
        lines.append("")
        lines.append(f"From the second turn on the prompt is ready {ratio:.1f} times as fast.")
    return "\n".join(lines)


def ratio_of(straight: list[Json], through: list[Json]) -> float | None:
    """Prompt time without over with, from the second turn on."""
    before, after = (sum(row["ms"] for row in rows[1:]) for rows in (straight, through))
    return before / after if after else None


class SimulatedServer(BaseHTTPRequestHandler):
    """A stand-in for llama-server: one slot whose cache is the longest common prefix in words, read at MS a word."""

    MS = 0.02
    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = "\n".join(f"{message['role']}: {message['content']}" for message in body["messages"]).split()
        old = self.server.slot
        cached = next(
            (i for i, (a, b) in enumerate(zip(old, words, strict=False)) if a != b), min(len(old), len(words))
        )
        self.server.slot = words
        read = max(1, len(words) - cached)
        time.sleep(read * self.MS / 1000)
        timings = {"cache_n": len(words) - read, "prompt_n": read, "prompt_ms": read * self.MS, "predicted_n": 2}
        events: list[Json] = [
            {"choices": [{"index": 0, "delta": {"content": word}}]} for word in ("Noted,", " thanks.")
        ]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": timings})
        data = b"".join(b"data: " + dump(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class SimulatedHost(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        self.slot: list[str] = []
        super().__init__(("127.0.0.1", 0), SimulatedServer)


def command_demo(args: argparse.Namespace, config: Config) -> int:
    """Play a conversation against a simulated server, straight and through a real proxy."""
    server = SimulatedHost()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        straight = play(url, args.tokens, args.turns, "demo", 60, lambda line: None)
        server.slot = []
        with Proxy(Config(backend_url=url, listen_port=0, log_level="error")) as proxy:
            through = play(proxy.url, args.tokens, args.turns, "demo", 60, lambda line: None)
    finally:
        server.shutdown()
        server.server_close()
    if args.json:
        print(
            json.dumps(
                {"simulated": True, "straight": straight, "through": through, "ratio": ratio_of(straight, through)}
            )
        )
        return 0
    print("An OpenClaw-shaped conversation. The server is SIMULATED: it counts words as tokens and takes")
    print(f"{SimulatedServer.MS:g} ms for each that it has to read. The proxy is the real one.\n")
    print(side_by_side(straight, through))
    print("\nWith your own server:  BACKEND_URL=http://127.0.0.1:8080 python kvproxy.py bench")
    return 0


def command_bench(args: argparse.Namespace, config: Config) -> int:
    """The same conversation against BACKEND_URL."""
    backend = Backend(config)
    try:
        url = backend.locate()
        backend.connect().wire.close()
    except OSError as error:
        print(f"No model server answers at {backend.name()} ({error}). Set BACKEND_URL.", file=sys.stderr)
        return 1
    quiet = args.json
    note = (lambda line: None) if quiet else (lambda line: print("  " + line, flush=True))
    mark = uuid.uuid4().hex[:12]
    if not quiet:
        print(
            f"{args.turns} turns of about {args.tokens:,} tokens against {url.geturl()}, first straight, then through kvproxy."
        )
        print(f"Straight, every turn reads the whole prompt: {args.turns} times what one cold prompt takes.\n")
    try:
        straight = play(url.geturl(), args.tokens, args.turns, mark + "a", config.read_timeout, note)
        with Proxy(dataclasses.replace(config, backend_url=url.geturl(), listen_host="127.0.0.1", listen_port=0,
                                       warmup_file="", capture_file="", log_level="error")) as proxy:  # fmt: skip
            if not quiet:
                print()
            through = play(proxy.url, args.tokens, args.turns, mark + "b", config.read_timeout, note)
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"The run broke off: {error}", file=sys.stderr)
        return 1
    if quiet:
        print(
            json.dumps(
                {"simulated": False, "straight": straight, "through": through, "ratio": ratio_of(straight, through)}
            )
        )
    else:
        print("\n" + side_by_side(straight, through))
    return 0


def command_check(args: argparse.Namespace, config: Config) -> int:
    """Tell what the backend is, and what in its settings hurts the cache."""
    backend = Backend(config)
    found = backend.describe()
    if not found:
        print(f"No model server answers at {backend.name()}.")
        print(
            "Is it running? llama-server listens on 9931 (newer) or 8080 (older), LM Studio on 1234. Set BACKEND_URL."
        )
        return 1
    print(f"{backend.name()}: " + ", ".join(f"{name} {value}" for name, value in found.items()))
    advice = []
    slots, context = found.get("slots"), found.get("context")
    status, rows = backend.ask("/slots")
    if status == 200 and isinstance(rows, list):
        params = [row["params"] for row in rows if isinstance(row, dict) and isinstance(row.get("params"), dict)]
        if any(row.get("cache_prompt") is False for row in params):
            advice.append("cache_prompt is off: remove --no-cache-prompt, or nothing is ever reused.")
        else:
            print(
                f"prompt cache: on, as far as /slots tells; {sum(bool(r.get('is_processing')) for r in rows)} slots busy"
            )
    else:
        print("prompt cache: the server does not tell (/slots is off); one bench run shows it: python kvproxy.py bench")
    if isinstance(slots, int) and slots == 1:
        advice.append("One slot: a title or sub-agent request takes it, and the conversation must come back from the host cache."
                      " -np 4 -sps 0.6 keeps conversations apart; leave --cache-ram on.")  # fmt: skip
    elif isinstance(slots, int):
        advice.append(
            "With several slots, -sps 0.6 keeps conversations that share a system prompt from evicting each other."
        )
    if isinstance(context, int) and context < 32768:
        advice.append(
            f"{context:,} tokens of context a slot is less than agents send (16,000-60,000): raise -c, or lower -np."
        )
    for line in advice:
        print(textwrap.fill(line, 100, initial_indent="- ", subsequent_indent="  "))
    return 0


# --- inspect: captures and llama-server logs ----------------------------------------------------------------------------

LOG_SHAPES = tuple(  # what a llama-server log line tells: (name, pattern); old and new wordings
    (name, re.compile(pattern))
    for name, pattern in (
        (
            "slot",
            r"selected slot by LCP similarity, (?:f_)?sim_best = (?P<sim>[\d.]+)[^,]*(?:, f_keep = (?P<keep>[\d.]+))?",
        ),
        ("lru", r"selected slot by LRU"),
        ("prompt", r"new prompt, n_ctx_slot = (?P<context>\d+).*?(?:task\.n_tokens|n_prompt_tokens) = (?P<tokens>\d+)"),
        (
            "cached",
            r"(?:cached n_tokens|kv cache rm|n_tokens|n_past) = (?P<cached>\d+), (?:memory_seq_rm|progress|new tokens)",
        ),
        ("full", r"[Ff]orcing full prompt re-processing(?P<why> due to [^(\n]*)?"),
        ("checkpoint", r"(?P<what>created|restored|erased invalidated) context checkpoint"),
        ("eval", r"prompt eval(?: time)?\s*[=:]\s*(?P<ms>[\d.]+) ?ms\s*[/,]\s*(?P<read>\d+) tokens"),
        ("cancel", r"cancel task"),
    )
)
LOG_SLOT = re.compile(r"(?:\bid +|slot )(?P<slot>\d+) ?(?:\||:)(?: *task +(?P<task>-?\d+))?")


def command_inspect(args: argparse.Namespace, config: Config) -> int:
    """What changed between requests, from a capture or a llama-server log."""
    rows: list[Json] = []
    wasted: collections.Counter[str] = collections.Counter()
    times: collections.Counter[str] = collections.Counter()
    try:
        size = os.path.getsize(args.file)
        with open(args.file, "rb") as file:
            reader = LogReader(config)
            shown = time.monotonic()
            while line := file.readline(PARSE_LIMIT):
                row = reader.line(line)
                if row is not None:
                    rows.append(row)
                if time.monotonic() - shown > 1 and size and sys.stderr.isatty():
                    print(f"\r{100 * file.tell() // size}%", end="", file=sys.stderr, flush=True)
                    shown = time.monotonic()
            rows += reader.end()
    except OSError as error:
        print(f"{args.file} cannot be read: {error}", file=sys.stderr)
        return 1
    for row in rows:
        if row["cause"]:
            wasted[row["cause"]] += row["wasted"]
            times[row["cause"]] += 1
    told = [
        {"cause": cause, "requests": times[cause], "tokens": tokens, "advice": inspect_advice(cause)}
        for cause, tokens in wasted.most_common()
    ]
    if args.json:
        print(json.dumps({"requests": rows, "findings": told}, indent=1))
        return 0
    if not rows:
        print("No request was recognised: neither a capture (JSON lines) nor a llama-server log with -lv 4.")
        return 1
    print(f"{'#':>4} {'request':28} {'prompt':>9} {'read':>9} {'sim':>6} {'keep':>6}  what happened")
    for number, row in enumerate(rows, 1):
        cells = [f"{'-' if row[key] is None else format(row[key], ',')}" for key in ("tokens", "read")]
        marks = [f"{'-' if row[key] is None else format(row[key], '.3f')}" for key in ("sim", "keep")]
        print(
            f"{number:>4} {row['name'][:28]:28} {cells[0]:>9} {cells[1]:>9} {marks[0]:>6} {marks[1]:>6}  {row['what']}"
        )
    print("\nFindings, most tokens wasted first:" if told else "\nNothing was wasted.")
    for found in told:
        text = f"{found['cause']}: {found['requests']} requests, about {found['tokens']:,} tokens. {found['advice']}"
        print(textwrap.fill(text, 110, initial_indent="- ", subsequent_indent="  "))
    return 0


INSPECT_ADVICE = {
    "system": "kvproxy scrubs or lifts the shapes it knows; for others set LIFT_REGEX (keeps the text) or STRIP_REGEX.",
    "tool order": "kvproxy keeps the first-seen order.",
    "tools": "Tools came or went; kvproxy puts new ones last. Freeze the tool list if you can.",
    "turn": "History was changed; kvproxy replays decorations. Real edits and compaction cost one miss.",
    "forced": ADVICE["checkpoint"],
    "another slot": ADVICE["taken"],
    "low similarity": "The prompt differs near its start: send it through kvproxy, capture (CAPTURE_FILE) and inspect that.",
}


def inspect_advice(cause: str) -> str:
    return next((text for name, text in INSPECT_ADVICE.items() if name in cause), "")


class LogReader:
    """Reads a capture or a server log line by line; a row per request comes out when it is complete."""

    def __init__(self, config: Config) -> None:
        self.ledger = Ledger(config.ledger_mb << 20)
        self.tasks: dict[str, Json] = {}

    def line(self, raw: bytes) -> Json | None:
        if raw.lstrip()[:1] == b"{":
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(raw)
                if isinstance(row, dict) and isinstance(row.get("body"), dict) and isinstance(row.get("path"), str):
                    return self.captured(row)
        return self.logged(raw.decode("utf-8", "replace"))

    def captured(self, row: Json) -> Json | None:
        dialect, counting = dialect_of(row["path"])
        view = view_of(row["body"], dialect) if dialect is not None and not counting else None
        if view is None:
            return None
        segments = segments_of(view)
        headers = (
            {str(k).lower(): str(v) for k, v in (row.get("headers") or {}).items()}
            if isinstance(row.get("headers"), dict)
            else {}
        )
        verdict = self.ledger.judge(segments, conversation_of(view), side_of(view.body, headers, view))
        tokens = sum(len(segment.text) for segment in segments) // 4
        read = round(tokens * (1 - verdict.share))
        usage = row.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("prompt"), int) and isinstance(usage.get("cached"), int):
            tokens, read = usage["prompt"], usage["prompt"] - usage["cached"]
        cause = ""
        if verdict.name == "rewritten" and not verdict.side:
            place = verdict.where.split(" ")[0]
            cause = verdict.kind if verdict.kind in ("tool order", "tools") else f"{place}: {verdict.kind}"
        what = verdict.name + (f" ({verdict.side})" if verdict.side else "")
        if verdict.line():
            what += ", " + verdict.line()
        return {
            "name": f"{row['path'].split('?')[0]} {len(view.turns)} items", "tokens": tokens, "read": read, "sim": round(verdict.share, 3),
            "keep": None, "ms": None, "what": what, "cause": cause, "wasted": read if cause else 0,
        }  # fmt: skip

    def logged(self, text: str) -> Json | None:
        """A line of llama-server's log; what stands in front of it (docker, journal, router) does not matter."""
        name, match = next(((name, hit) for name, shape in LOG_SHAPES if (hit := shape.search(text))), ("", None))
        if match is None:
            return None
        found = LOG_SLOT.search(text[: match.start()])
        slot = found["slot"] if found else "?"
        done = None
        if (
            name in ("slot", "lru", "prompt")
            and self.tasks.get(slot, {}).get("tokens") is not None
            and name != "prompt"
        ):
            done = self.close(slot)
        task = self.tasks.setdefault(slot, {"forced": "", "lru": False, "tokens": None, "cached": None, "sim": None, "keep": None, "read": None, "ms": None, "cancelled": False})  # fmt: skip
        if name == "slot":
            task["sim"] = float(match["sim"])
            task["keep"] = float(match["keep"]) if match["keep"] else None
        elif name == "lru":
            task["lru"] = True
        elif name == "prompt":
            task["tokens"] = int(match["tokens"])
        elif name == "cached" and task["cached"] is None:
            task["cached"] = int(match["cached"])
        elif name == "full":
            task["forced"] = (match["why"] or " (no reason given)").strip()
        elif name == "cancel":
            task["cancelled"] = True
        elif name == "eval":
            task["ms"], task["read"] = float(match["ms"]), int(match["read"])
            if done is None:
                return self.close(slot)
        return done

    def close(self, slot: str) -> Json:
        task = self.tasks.pop(slot)
        tokens, read = task["tokens"], task["read"]
        if read is None and tokens is not None and task["cached"] is not None:
            read = tokens - task["cached"]
        if tokens is None and read is not None and task["cached"] is not None:
            tokens = read + task["cached"]
        cause, what = "", "reused" if tokens and read is not None and read < tokens / 2 else "read"
        if task["forced"]:
            cause, what = "forced re-processing", f"full re-processing {task['forced']}"
        elif task["sim"] is not None and task["sim"] < 0.5 and (tokens or 0) > 512:
            cause, what = "low similarity", "the prompt has little in common with the slot's"
        elif task["lru"] and (tokens or 0) > 512:
            what = "no similar slot: the least recently used one was taken (a first turn, or another slot was evicted)"
        if task["cancelled"]:
            what += ", cancelled"
        return {
            "name": f"slot {slot}", "tokens": tokens, "read": read, "sim": task["sim"], "keep": task["keep"], "ms": task["ms"],
            "what": what, "cause": cause, "wasted": (read or 0) if cause else 0,
        }  # fmt: skip

    def end(self) -> list[Json]:
        return [self.close(slot) for slot in list(self.tasks) if self.tasks[slot]["tokens"] is not None]


# --- main ---------------------------------------------------------------------------------------------------------------


def command_serve(args: argparse.Namespace, config: Config) -> int:
    """Listen until Ctrl-C or SIGTERM, then let answers end."""
    proxy = Proxy(config)
    handler: logging.Handler = logging.StreamHandler()
    if config.log_file:
        try:
            handler = logging.FileHandler(config.log_file, encoding="utf-8")
        except OSError as error:
            print(f"LOG_FILE={config.log_file!r}: cannot be written ({error})", file=sys.stderr)
            return 2
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    proxy.log.addHandler(handler)
    try:
        proxy.start()
    except OSError as error:
        print(
            f"Port {config.listen_port} on {config.listen_host} cannot be used: {error}. Set LISTEN_PORT.",
            file=sys.stderr,
        )
        return 1
    over = threading.Event()
    for name in ("SIGTERM", "SIGBREAK"):  # Windows has no SIGTERM to speak of, Unix no SIGBREAK
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: over.set())
    proxy.log.info("kvproxy %s listens on %s (status page: %s/kvproxy)", __version__, proxy.url, proxy.url)
    found = proxy.backend.describe()
    if found:
        proxy.log.info(
            "backend %s: %s", proxy.backend.name(), ", ".join(f"{key} {value}" for key, value in found.items())
        )
    else:
        proxy.log.warning(
            "backend: none answers yet at %s. Is it running, is BACKEND_URL right? llama-server listens on 9931 (newer) or"
            " 8080 (older), LM Studio on 1234. It is looked for again on every request.",
            proxy.backend.name(),
        )
    try:
        while not over.wait(0.5):
            pass
    except KeyboardInterrupt:
        pass
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
    commands.add_parser("serve", help="listen and forward (the default)").set_defaults(run=command_serve)
    for name, run, tokens, text in (
        ("demo", command_demo, 6000, "show the effect on a simulated server; needs nothing"),
        ("bench", command_bench, 16000, "measure the effect on the server at BACKEND_URL"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "--tokens", type=positive, default=tokens, help="tokens of the system prompt [%(default)s]"
        )
        command.add_argument("--turns", type=positive, default=5, help="turns of the conversation [%(default)s]")
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=run)
    command = commands.add_parser("inspect", help="explain a capture or a llama-server log")
    command.add_argument("file", metavar="FILE")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=command_inspect)
    commands.add_parser("check", help="tell what the backend is and what hurts its cache").set_defaults(
        run=command_check
    )
    parser.set_defaults(run=command_serve)
    return parser


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        config = Config.from_env(os.environ)
    except ConfigError as error:
        print(f"kvproxy: {error}", file=sys.stderr)
        return 2
    try:
        return int(args.run(args, config))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
