"""Side by side, on loopback: kvproxy, nginx, a FastAPI + httpx proxy, and no proxy at all
("direct").

pip install uvloop fastapi uvicorn httpx httptools      # and nginx, if it is to take part python
.ci/bench.py [--parts ttfb,stream,paced,rate,idle,big,soak] [--targets direct,nginx,fastapi,kvproxy]
[--runs 5] [--json FILE] [--kvproxy "python kvproxy.py"]

It starts a fake SSE backend and the targets on free ports, takes the targets in turn within every
run, and stops all of them at the end. It prints medians over the runs, then each goal with the
median of the per-run values. What is missing (uvloop, FastAPI, nginx, kvproxy.py) is left out with
a notice. Exit status 1: a goal was missed or a target failed.

ttfb    ms from sending a chat body to its first event, kept-alive connection, 4 KB to 8 MB; every
sample has a new last turn. clean-*: 1 MB with nothing to scrub; kvproxy is a new process, which has
seen one empty chat before "first"; "again" are the next samples to the same process stream  16 and
64 streams as fast as they go: events/s, slowest stream over mean paced   256 streams at 30
events/s: delay of the events, streams that got less than half of theirs rate    requests/s, 4 KB
bodies, JSON answers, kept-alive, 1 and 32 clients idle    1,000 open streams in which nothing
flows: memory (before: what earlier parts left; run it alone for a fresh process), s to open, s
until the backend is rid of them big     (once) one 100 MiB body: peak and final RSS soak    (once)
50,000 requests, 512 different bodies in turn, half of them streamed: RSS after 5,000 and at the end

Load, proxy and backend share the machine's cores: compare columns, not figures from elsewhere.
After each part it says how much CPU other programs used meanwhile: with more than 0.1 or 0.2 cores
do not trust the figures. Memory is read from /proc (Linux). All parts with 5 runs take 12 to 15
minutes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from bench_tools import (
    Body,
    Fetcher,
    Line,
    close,
    cpu_seconds,
    family,
    memory,
    open_streams,
    post,
    run_loop,
)

HERE = Path(__file__).resolve().parent
PARTS = ["ttfb", "stream", "paced", "rate", "idle", "big", "soak"]
TARGETS = ["direct", "nginx", "fastapi", "kvproxy"]
MIB = 1 << 20
SIZES = {
    "4KB": (4096, 40),
    "64KB": (65536, 30),
    "1MB": (MIB, 12),
    "8MB": (8 * MIB, 5),
}  # bytes, samples per run

Times = dict[str, dict[str, list[float]]]  # cell: {target: ms}

# ---------------------------------------------------------------- Targets and parts


class Bench:
    def __init__(self, kvproxy: str) -> None:
        self.kvproxy, self.folder = shlex.split(kvproxy), tempfile.mkdtemp(prefix="bench-")
        self.ports: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen] = {}
        self.results: dict[
            tuple[str, str, str], dict[int, float]
        ] = {}  # (cell, target, metric): {run: value}
        self.failures: list[str] = []
        self.run, self.count = 0, 0

    # -- starting and stopping

    def start(self, name: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        backend, env = f"127.0.0.1:{self.ports.get('direct')}", dict(os.environ)
        if name == "direct":
            command = [sys.executable, str(HERE / "bench_tools.py"), str(port)]
        elif name == "nginx":
            command = [
                shutil.which("nginx") or "/usr/sbin/nginx",
                "-p",
                self.folder,
                "-c",
                self.nginx_config(port, backend),
                "-e",
                "stderr",
            ]
        elif name == "fastapi":
            env["UPSTREAM"] = "http://" + backend
            options = [
                "--app-dir",
                str(HERE),
                "--log-level",
                "warning",
                "--no-access-log",
                "--timeout-keep-alive",
                "60",
            ]
            command = [
                sys.executable,
                "-m",
                "uvicorn",
                "bench_fastapi:app",
                "--port",
                str(port),
                *options,
            ]
        else:
            settings = {
                "LISTEN_HOST": "127.0.0.1",
                "LISTEN_PORT": str(port),
                "BACKEND_URL": "http://" + backend,
            }
            env.update(settings, LOG_LEVEL="warning")
            command = self.kvproxy
        log = Path(self.folder, name + ".log")
        with log.open("wb") as out:
            self.processes[name] = subprocess.Popen(
                command, env=env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self.processes[name].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                self.ports[name] = port
                return
            time.sleep(0.02)
        status = self.processes[name].poll()
        self.stop(name)
        raise RuntimeError(
            f"did not start (exit status {status}) {log.read_text(errors='replace')[-500:]}"
        )

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def nginx_config(self, port: int, backend: str) -> str:
        temp = "".join(
            f"{k}_temp_path tmp-{k};" for k in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        text = f"""
            {"user root;" if os.geteuid() == 0 else ""} worker_processes 1; daemon off; pid nginx.pid;
            events {{ worker_connections 8000; }}
            http {{ access_log off; {temp} client_max_body_size 200m; keepalive_requests 10000000;
                upstream backend {{ server {backend}; keepalive 256; keepalive_requests 10000000; }}
                server {{ listen 127.0.0.1:{port} backlog=4096;
                    location / {{ proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection "";
                        proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 1h; }} }} }}"""
        path = Path(self.folder, "nginx.conf")
        path.write_text(text)
        return str(path)

    def close(self) -> None:
        for name in list(self.processes):
            self.stop(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- helpers of the parts

    def record(self, cell: str, target: str, **values: float) -> None:
        for metric, value in values.items():
            self.results.setdefault((cell, target, metric), {})[self.run] = value
        print(
            f"run {self.run + 1}  {cell:12} {target:8}",
            *(f"{k}={v:.6g}" for k, v in values.items()),
            flush=True,
        )

    def value(self, run: int, *key: str) -> float:
        return self.results[key[0], key[1], key[2]][run]

    def turns(self, proxies_only: bool = False) -> list[str]:
        """The targets, each run beginning with another one."""
        names = [
            name
            for name in TARGETS
            if name in self.ports and not (proxies_only and name == "direct")
        ]
        at = self.run % len(names)
        return names[at:] + names[:at]

    @contextlib.contextmanager
    def guard(self, cell: str, target: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, asyncio.TimeoutError) as error:
            self.failures.append(
                f"run {self.run + 1} {cell} {target}: {type(error).__name__} {error}"
            )
            print("FAILED", self.failures[-1], flush=True)

    def requests(self, count: int, model: str) -> list[bytes]:
        bodies = [Body(4096, model, seed) for seed in range(8)]
        return [bodies[i % 8].request(i) for i in range(count)]

    async def drained(self) -> float:
        """Seconds until the backend has no open stream."""
        begin, connection = (
            time.monotonic(),
            http.client.HTTPConnection("127.0.0.1", self.ports["direct"], timeout=10),
        )
        while time.monotonic() - begin < 15:
            connection.request("GET", "/")
            if not json.loads(connection.getresponse().read())["streams"]:
                connection.close()
                return time.monotonic() - begin
            await asyncio.sleep(0.01)
        raise TimeoutError("streams still open at the backend 15 s after their clients left")

    def time_events(
        self, times: Times, cell: str, lines: dict[str, Line], body: Body, count: int
    ) -> None:
        for _ in range(count):
            self.count += 1
            request = body.request(self.count)
            for target in self.turns():
                with self.guard(cell, target):
                    times[cell][target].append(lines[target].first_event(request))

    @staticmethod
    async def fetch_all(
        port: int, clients: int, requests: Iterator[bytes], seconds: float = 600
    ) -> float:
        """Answers per second, until the requests or the seconds are used up."""
        loop, begin, count = asyncio.get_running_loop(), time.perf_counter(), 0

        async def client() -> None:
            nonlocal count
            line: Fetcher | None = None
            for request in requests:
                if line is None or line.transport.is_closing():
                    _, line = await loop.create_connection(Fetcher, "127.0.0.1", port)
                await line.fetch(request)
                count += 1
                if time.perf_counter() - begin > seconds:
                    break
            if line:
                line.transport.abort()

        await asyncio.wait_for(asyncio.gather(*(client() for _ in range(clients))), seconds + 30)
        return count / (time.perf_counter() - begin)

    # -- the parts

    async def ttfb(self) -> None:
        lines = {target: Line(self.ports[target]) for target in self.turns()}
        times: Times = defaultdict(lambda: defaultdict(list))
        for name, (size, count) in SIZES.items():
            body = Body(size, "bench-n1-g0", self.run)
            self.time_events(
                defaultdict(lambda: defaultdict(list)), name, lines, body, 2
            )  # warm-up
            self.time_events(times, name, lines, body, count)
        body = Body(MIB, "bench-n1-g0", self.run, clean=True)
        for _ in range(5):
            try:
                if "kvproxy" in lines:
                    self.start("fresh")
                    lines["kvproxy"] = Line(self.ports["fresh"])
                    await asyncio.sleep(0.3)
                for line in lines.values():
                    line.first_event(post(b'{"model":"bench-n1-g0","stream":true,"messages":[]}'))
                self.time_events(times, "clean-first", lines, body, 1)
                self.time_events(times, "clean-again", lines, body, 4)
            finally:
                if "fresh" in self.processes:
                    self.stop("fresh")
        for cell, by_target in times.items():
            for target, values in by_target.items():
                self.record(cell, target, ms=median(values))

    async def stream(self) -> None:
        for count in (16, 64):
            for target in self.turns():
                with self.guard(f"stream-{count}", target):
                    streams = await open_streams(
                        self.ports[target], self.requests(count, "bench-n1000000000-g0"), 16
                    )
                    await asyncio.sleep(0.3)
                    begin, before = time.perf_counter(), [s.events for s in streams]
                    await asyncio.sleep(2)
                    events = [s.events - n for s, n in zip(streams, before, strict=True)]
                    rate = sum(events) / (time.perf_counter() - begin)
                    slowest = min(events) * count / max(1, sum(events))
                    close(streams)
                    await self.drained()
                    self.record(f"stream-{count}", target, events_s=rate, slowest=slowest)

    async def paced(self) -> None:
        for target in self.turns():
            with self.guard("paced-256", target):
                streams = await open_streams(
                    self.ports[target], self.requests(256, "bench-n1000000000-g33333"), 8
                )
                await asyncio.sleep(0.5)
                for follower in streams:
                    follower.carry, follower.delays = b"", []
                await asyncio.sleep(5)
                taken = [follower.delays or [] for follower in streams]
                close(streams)
                await self.drained()
                delays = sorted(delay / 1e6 for one in taken for delay in one) or [0.0]
                p50, p99 = median(delays), delays[len(delays) * 99 // 100]
                starved = sum(len(one) < 5 * 30 / 2 for one in taken)
                self.record("paced-256", target, p50_ms=p50, p99_ms=p99, starved=starved)

    async def rate(self) -> None:
        requests = self.requests(512, "bench-json")
        for clients in (1, 32):
            for target in self.turns():
                with self.guard(f"rate-{clients}", target):
                    rate = await self.fetch_all(self.ports[target], clients, cycle(requests), 2)
                    self.record(f"rate-{clients}", target, req_s=rate)

    async def idle(self) -> None:
        for target in self.turns():
            with self.guard("idle-1000", target):
                pid = self.processes[target].pid
                before, requests = memory(pid), self.requests(1000, "bench-n2-g3600000000")
                begin = time.perf_counter()
                streams = await open_streams(self.ports[target], requests, 100)
                opened = time.perf_counter() - begin
                await asyncio.sleep(1)
                rss, pss = memory(pid), memory(pid, "Pss")
                close(streams)
                gone = await self.drained()
                self.record(
                    "idle-1000", target, open_s=opened, gone_s=gone, before=before, rss=rss, pss=pss
                )

    async def big(self) -> None:
        request = Body(100 * MIB, "bench-n1-g0").request(0)
        for target in self.turns(proxies_only=True):
            with self.guard("big-100MiB", target):
                pid = self.processes[target].pid
                before = memory(pid)
                for member in family(pid):
                    Path(f"/proc/{member}/clear_refs").write_text("5")  # the peak counts from here
                ms = Line(self.ports[target]).first_event(request)
                peak = memory(pid, "VmHWM", "status")
                await asyncio.sleep(3)
                self.record(
                    "big-100MiB", target, before=before, peak=peak, after=memory(pid), ms=ms
                )

    async def soak(self) -> None:
        pairs = zip(
            self.requests(256, "bench-json"), self.requests(256, "bench-n5-g0"), strict=True
        )
        requests = cycle([request for pair in pairs for request in pair])
        for target in self.turns(proxies_only=True):
            with self.guard("soak", target):
                port, pid = self.ports[target], self.processes[target].pid
                await self.fetch_all(port, 16, islice(requests, 5000))
                early = memory(pid)
                rate = await self.fetch_all(port, 16, islice(requests, 45000))
                self.record("soak", target, rss_5000=early, rss_end=memory(pid), req_s=rate)


# ---------------------------------------------------------------- Goals and output

Get = Callable[[str, str, str], float]  # (cell, target, metric) -> value in one run


def goals() -> Iterator[tuple[str, str, float, Callable[[Get], float]]]:
    """(what, "<=" or ">=", limit, its value in one run)"""

    def added(get: Get, cell: str, target: str = "kvproxy") -> float:
        return get(cell, target, "ms") - get(cell, "direct", "ms")

    def share(cell: str) -> Callable[[Get], float]:
        return lambda get: added(get, cell) / added(get, cell, "fastapi")

    def over(cell: str, metric: str, other: str) -> Callable[[Get], float]:
        return lambda get: get(cell, "kvproxy", metric) / get(cell, other, metric)

    def own(cell: str, metric: str) -> Callable[[Get], float]:
        return lambda get: get(cell, "kvproxy", metric)

    for cell in SIZES:
        yield f"ttfb {cell}: added, over fastapi's", "<=", 0.5, share(cell)
    for cell in ("clean-first", "clean-again"):
        yield f"ttfb {cell} 1MB: added ms", "<=", 2, partial(added, cell=cell)
        yield f"ttfb {cell} 1MB: added, over fastapi's", "<=", 0.1, share(cell)
    for cell in ("stream-16", "stream-64"):
        yield f"{cell}: events/s over fastapi's", ">=", 2, over(cell, "events_s", "fastapi")
        yield f"{cell}: events/s over nginx's", ">=", 0.6, over(cell, "events_s", "nginx")
        yield f"{cell}: slowest stream over mean", ">=", 0.5, own(cell, "slowest")
    p99 = "paced-256: p99 ms added to direct"
    yield (
        p99,
        "<=",
        2,
        lambda get: get("paced-256", "kvproxy", "p99_ms") - get("paced-256", "direct", "p99_ms"),
    )
    yield "paced-256: starved streams", "<=", 0, own("paced-256", "starved")
    yield "rate-1: requests/s over fastapi's", ">=", 2, over("rate-1", "req_s", "fastapi")
    yield "rate-32: requests/s over fastapi's", ">=", 4, over("rate-32", "req_s", "fastapi")
    yield "idle-1000: RSS MiB", "<=", 150, own("idle-1000", "rss")
    yield "idle-1000: s to open", "<=", 2, own("idle-1000", "open_s")
    yield "idle-1000: s until the backend is free", "<=", 2, own("idle-1000", "gone_s")
    yield "big: peak RSS over body", "<=", 5, lambda get: get("big-100MiB", "kvproxy", "peak") / 100
    kept = own("big-100MiB", "after"), own("big-100MiB", "before")
    yield "big: RSS kept over body", "<=", 0.5, lambda get: (kept[0](get) - kept[1](get)) / 100
    growth = own("soak", "rss_end"), own("soak", "rss_5000")
    yield (
        "soak: RSS at the end over RSS after 5,000",
        "<=",
        1.1,
        lambda get: growth[0](get) / growth[1](get),
    )


def report(bench: Bench, file: str | None) -> bool:
    targets = [name for name in TARGETS if name in bench.ports]
    rows: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for (cell, target, metric), values in bench.results.items():
        rows[cell, metric][target] = median(values.values())
    print("\nmedians".ljust(25), *(name.rjust(10) for name in targets))
    for (cell, metric), row in rows.items():
        cells = (
            f"{row[n]:.4g}" if row.get(n, 1e9) < 1e4 else f"{row[n]:.0f}" if n in row else "-"
            for n in targets
        )
        print(f"{cell} {metric}".ljust(24), *(text.rjust(10) for text in cells))
    print("\ngoal".ljust(50), "median".rjust(8), "limit".rjust(8), "  range over the runs")
    verdicts = []
    for what, sense, limit, function in goals():
        found: list[float] = []
        for run in range(bench.run + 1):
            with contextlib.suppress(KeyError):
                found.append(function(partial(bench.value, run)))
        if found:
            value = median(found)
            met = value <= limit if sense == "<=" else value >= limit
            verdicts.append(
                {
                    "goal": what,
                    "sense": sense,
                    "limit": limit,
                    "value": value,
                    "met": met,
                    "runs": found,
                }
            )
            spread = f"{min(found):.3g} .. {max(found):.3g}"
            print(
                what.ljust(49),
                f"{value:8.3g}",
                f"{sense} {limit}".rjust(8),
                " ok    " if met else " MISSED",
                spread,
            )
    for line in bench.failures:
        print("FAILED", line)
    if file:
        # cell, target, metric, and a value per run
        flat = [[*key, *values.values()] for key, values in bench.results.items()]
        Path(file).write_text(
            json.dumps({"results": flat, "goals": verdicts, "failures": bench.failures}, indent=1)
        )
    return not bench.failures and all(verdict["met"] for verdict in verdicts)


async def measure(bench: Bench, parts: list[str], runs: int) -> None:
    for bench.run in range(runs):
        for part in parts:
            if bench.run == 0 or part not in ("big", "soak"):
                begin, before = time.monotonic(), cpu_seconds()
                with bench.guard(part, "(whole part)"):
                    await asyncio.wait_for(getattr(bench, part)(), 900)
                busy, ours = (b - a for a, b in zip(before, cpu_seconds(), strict=True))
                others = max(0.0, busy - ours) / (time.monotonic() - begin)
                print(
                    f"run {bench.run + 1}  {part}: {others:.2f} cores were used by other programs",
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--kvproxy", default=shlex.join([sys.executable, str(HERE.parent / "kvproxy.py")])
    )
    options = parser.parse_args()
    parts, wanted = options.parts.split(","), options.targets.split(",")
    if set(parts) - set(PARTS) or set(wanted) - set(TARGETS):
        parser.error(f"parts are {','.join(PARTS)}; targets are {','.join(TARGETS)}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if 0 < hard < 20000 else 20000, hard))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bench = Bench(options.kvproxy)
    try:
        bench.start("direct")
        for target in TARGETS[1:]:
            if target in wanted:
                try:
                    bench.start(target)
                except (OSError, RuntimeError) as error:
                    print(f"{target} is left out: {error}", flush=True)
        run_loop(measure(bench, parts, options.runs))
    except KeyboardInterrupt:
        print("stopped; what was measured so far:")
    finally:
        bench.close()
    return 0 if report(bench, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
