"""Writes the settings table and the checksum into README.md; a test fails when they are stale.

python .ci/update_readme.py
"""

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvproxy import Config


def fill(text: str, name: str, lines: list[str]) -> str:
    """Put `lines` between the comments <!-- name --> and <!-- /name -->."""
    block = "\n".join([f"<!-- {name} -->", *lines, f"<!-- /{name} -->"])
    found = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
    if not found.search(text):
        sys.exit(f"README.md has no place for {name}")
    return found.sub(lambda match: block, text)


readme = ROOT / "README.md"
rows = [f"| `{name}` | {default} | {meaning} |" for name, default, meaning in Config.table()]
digest = hashlib.sha256((ROOT / "kvproxy.py").read_bytes()).hexdigest()
text = readme.read_text(encoding="utf-8")
text = fill(text, "settings", ["| variable | default | meaning |", "|---|---|---|", *rows])
text = fill(text, "sha256", ["", f"    {digest}  kvproxy.py", ""])
readme.write_text(text, encoding="utf-8", newline="\n")
