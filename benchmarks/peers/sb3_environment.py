"""Stable-Baselines3 in an environment of its own, made when it is first asked for."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_once = threading.Lock()


def sb3_python() -> Path:
    """The Python of an environment with Stable-Baselines3, which shares torch and Gymnasium with ours."""
    folder = ROOT / "build" / "sb3"
    python = folder / "bin" / "python"
    with _once:
        if not (folder / ".installed").exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            site = next(folder.glob("lib/python*/site-packages"))
            shared = [entry for entry in sys.path if entry.endswith("site-packages")]
            (site / "ours.pth").write_text("\n".join(shared) + "\n")
            install = [python, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run(
                [*install, "stable-baselines3==2.9.2", "pandas", "python-dateutil", "pytz", "six"], check=True
            )
            (folder / ".installed").touch()
    return python
