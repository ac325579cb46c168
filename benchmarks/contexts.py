"""Which cards hold a CUDA context of which rank after a base and an adapter were loaded, as a table and a picture.

Four ranks, each with a card of its own, load a base and then an adapter onto it: by the calls of transformers and peft,
and by ``load_peft_on_rank``. It needs four CUDA devices, real or those of tests/simulated_cuda: run it in the
environment that make_venv.py makes there. Elsewhere it says so and ends with status 75.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import CANNOT_RUN, ENVIRONMENT, headline, options, spawn, table, write_json
from _recorded import record
from _timeline import WIDTH, label, picture

os.environ.update(ENVIRONMENT)

RANKS = 4
METHODS = {"plain": "from_pretrained, PeftModel.from_pretrained", "ours": "load_peft_on_rank"}
OWN, STRAY = "#2f81f7", "#e5534b"
_LINE, _BOX, _LEFT, _GAP = 20, 64, 60, 24


def draw(contexts: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """Return a picture: for each method and card a box for each rank that has a context there.

    Args:
        contexts: For each method and rank the cards that hold a context of that rank's process.
    """
    parts = [label(0, 14, f"Contexts on {RANKS} cards after {RANKS} ranks loaded a base and an adapter", weight=600)]
    top = 2 * _LINE
    for method, name in METHODS.items():
        parts.append(label(0, top + 14, name))
        top += _LINE + 6
        for card in range(RANKS):
            ranks = [rank for rank, cards in enumerate(contexts[method]) if card in cards]
            parts.append(label(0, top + 14, f"card {card}"))
            parts += [shape for place, rank in enumerate(ranks) for shape in _box(place, rank, card, top)]
            stray = len([rank for rank in ranks if rank != card])
            parts.append(label(WIDTH, top + 14, f"{stray} stray" if stray else "none stray", end=True))
            top += _LINE + 6
        top += _GAP - 6
    return picture(parts, top - _GAP)


def _box(place: int, rank: int, card: int, top: int) -> list[str]:
    x = _LEFT + place * (_BOX + 4)
    fill = OWN if rank == card else STRAY
    shape = f'<rect x="{x}" y="{top}" width="{_BOX}" height="{_LINE}" rx="2" fill="{fill}" fill-opacity=".3" '
    return [f'{shape}stroke="{fill}"/>', label(x + _BOX / 2, top + 14, f"rank {rank}", middle=True)]


def child(spec: Mapping[str, Any]) -> list[int]:
    """Load on one rank, and return the cards that hold a context of this process."""
    import peft
    import torch
    import transformers

    import safe_loading

    folder, rank = Path(spec["folder"]), spec["rank"]
    if spec["method"] == "plain":
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", device_map={"": rank})
        peft.PeftModel.from_pretrained(model, folder / "adapter")
    else:
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS))
        safe_loading.load_peft_on_rank(folder / "base", folder / "adapter")
    has_context: Callable[[int], bool] = vars(torch._C)["_cuda_hasPrimaryContext"]  # torch's stubs leave it out
    return [card for card in range(RANKS) if has_context(card)]


def _make(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM
    from wrap_fsdp import make_checkpoint

    make_checkpoint(folder / "base", 64, 2, 512)
    base: Any = LlamaForCausalLM.from_pretrained(folder / "base")
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).save_pretrained(
        str(folder / "adapter")
    )


def main() -> int:
    """Load, print and draw."""
    arguments = options(__doc__, "the same, and no picture is written").parse_args()
    import torch

    if torch.cuda.device_count() < RANKS:
        print(f"needs {RANKS} CUDA devices: run it in the environment of tests/simulated_cuda/make_venv.py")
        return CANNOT_RUN
    contexts: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory(prefix="contexts-") as name:
        _make(Path(name))
        for method in METHODS:
            specs = [{"method": method, "rank": rank, "folder": name} for rank in range(RANKS)]
            contexts[method] = spawn([__file__], specs, {"OMP_NUM_THREADS": "1"}, 600)
    print(headline())
    rows = [(METHODS[method], *(str(cards) for cards in ranks)) for method, ranks in contexts.items()]
    print(table("cards with a context of", ("", *(f"rank {rank}" for rank in range(RANKS))), rows))
    facts = {"headline": headline(), "contexts": contexts}
    if not arguments.quick:
        record("contexts", facts, lambda _: {"contexts.svg": draw(contexts)})
    write_json(arguments.json, facts)
    return 0


if __name__ == "__main__":
    if sys.argv[-1].startswith("{"):
        given = json.loads(sys.argv[-1])
        Path(given["result"]).write_text(json.dumps(child(given)))
    else:
        sys.exit(main())
