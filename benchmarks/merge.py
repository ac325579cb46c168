"""Both merges in one run: in memory next to peft, and from disk to disk next to load-merge-save and ``cp``.

Options before ``--disk`` go to benchmarks/merge_inplace.py, those after it to benchmarks/merge_checkpoint.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(argv: list[str]) -> int:
    """Run both, one after the other, and return the first status that is not 0."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    cut = argv.index("--disk") if "--disk" in argv else len(argv)
    memory, disk = argv[:cut], argv[cut + 1 :]
    if "--quick" in memory and "--quick" not in disk:
        disk = ["--quick", *disk]
    codes = [
        subprocess.run([sys.executable, HERE / script, *options], check=False).returncode
        for script, options in (("merge_inplace.py", memory), ("merge_checkpoint.py", disk))
    ]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
