"""Prints the README's command of a name, so that what CI runs is what the README says.

    bash -euxc "$(python scripts/readme_command.py main)"

A command is the bash block that follows the line `<!-- command: NAME -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def command(name: str, text: str) -> str:
    """The bash block of that name. Raises SystemExit, naming what there is, if there is none."""
    blocks = dict(re.findall(r"<!-- command: (\w+) -->\s*```bash\n(.*?)```", text, re.DOTALL))
    if name not in blocks:
        sys.exit(f"README.md has no command {name!r}; it has: {', '.join(blocks) or 'none'}")
    return blocks[name]


if __name__ == "__main__":
    print(command(sys.argv[1], README.read_text(encoding="utf-8")), end="")
