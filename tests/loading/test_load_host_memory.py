"""The base stays mapped from its file, which all ranks of a node share: a load adds the adapter and little else."""

from __future__ import annotations

from pathlib import Path

from models import save_adapter, save_llama
from rank_server import RankServer

MiB = 1 << 20
SCRIPT = """
import gc, sys
from pathlib import Path
from safe_loading import load_peft_on_rank

def private():
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Private_Dirty"))

warm = load_peft_on_rank(sys.argv[1], sys.argv[3])  # imports and first calls keep memory that no later load takes
before = private()
model = load_peft_on_rank(sys.argv[2], sys.argv[4])
grown = private() - before
report(grown=grown, base=model.load_report.parts[0].bytes, adapter=model.load_report.parts[1].bytes)
"""


def test_the_base_costs_no_private_memory(rank_server: RankServer, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8000, "num_hidden_layers": 4}
    small, large = save_llama(tmp_path / "small"), save_llama(tmp_path / "large", **sizes)
    arguments = [small, large, save_adapter(tmp_path / "one", small), save_adapter(tmp_path / "two", large)]
    (facts,) = rank_server.run_alone(SCRIPT, args=arguments, timeout=180).found
    assert facts["base"] > 80 * MiB
    assert facts["grown"] <= facts["adapter"] + 10 * MiB
