"""Runs a script on the simulated accelerator: ``python prelude.py SCRIPT [ARGUMENTS...]``.

The accelerator is imported before the script's first line, since peft, accelerate and transformers look for it once, as
they are imported. The script finds one more name: ``report(obj)`` hands its facts, as JSON, to whoever started it.
Several reports, each a dict, make one. Under torchrun each rank has a report of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch_npu  # noqa: F401 - see above

_facts: Any = None


def report(obj: Any) -> None:
    """Hand `obj` to the test that started this script."""
    global _facts
    if _facts is None:
        _facts = obj
    elif not isinstance(_facts, dict) or not isinstance(obj, dict):
        raise TypeError("only dicts can be reported more than once")
    elif twice := sorted(_facts.keys() & obj.keys()):
        raise KeyError(f"reported twice: {twice}")
    else:
        _facts.update(obj)
    path = Path(os.environ["SIMDEV_REPORT"].format(rank=os.environ.get("RANK", "0")))
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(_facts))
    scratch.replace(path)


def main() -> None:
    script = sys.argv[1]
    del sys.argv[0]
    code = compile(Path(script).read_text(), script, "exec")
    # The script is __main__, as it would be without the prelude: what it pickles or starts finds its names.
    module = sys.modules["__main__"]
    module.__dict__.update({"__file__": script, "report": report})
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
