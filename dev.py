#!/usr/bin/env python3
"""Set up a clone and run something in it. Needs only Python 3.10 or newer; everything else goes into .venv.

python3 dev.py demo              the main job on this machine, with a report
python3 dev.py test [ARGS...]    the whole test suite; ARGS go to pytest
python3 dev.py setup             only set up
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "omnigemm-setup"
# The version that the CPU record was measured with; any torch >= 2.8 works.
TORCH = "torch==2.13.0"


def say(text: str) -> None:
    print(f"dev.py: {text}", file=sys.stderr, flush=True)


def fingerprint() -> str:
    """What the environment was made from: it is made again when this changes."""
    parts = (sys.version.encode(), TORCH.encode(), (ROOT / "pyproject.toml").read_bytes(), str(ROOT).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        sys.exit(f"dev.py: '{' '.join(command[1:])}' failed; see its message above")


def setup() -> None:
    wanted = fingerprint()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return
    say("creating .venv")
    try:
        venv.create(VENV, with_pip=True, clear=True)
    except subprocess.CalledProcessError:
        sys.exit("dev.py: this Python cannot create virtual environments; on Debian, install python3-venv")
    say(f"installing {TORCH} (about a minute)")
    pip(TORCH)
    say("installing omnigemm with its test tools")
    pip("--editable", ".[test]")
    STAMP.write_text(wanted)


def main() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 - this file is what an older Python gets to see first
        sys.exit(f"dev.py: this is Python {sys.version.split()[0]}, expected 3.10 or newer")
    command, arguments = (sys.argv[1] if len(sys.argv) > 1 else "help"), sys.argv[2:]
    modules = {"demo": ["omnigemm", "demo"], "test": ["pytest"], "setup": None}
    if command not in modules:
        print(__doc__)
        return 0 if command in ("help", "-h", "--help") else 2
    setup()
    module = modules[command]
    return 0 if module is None else subprocess.run([str(PYTHON), "-m", *module, *arguments], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
