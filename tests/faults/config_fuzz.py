"""Loads folders whose configs were changed at random, in a process of its own: what it opens, imports and takes.

``python config_fuzz.py FOLDER FIRST LAST`` tries the seeds from FIRST to LAST, and prints a line with the config
for each that did what no config may make the engines do. The names of the fields are those that the installed peft and
transformers declare.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 30  # for one call; the slowest takes a second
BYTES = 24 << 30  # of addresses, most of which the engines reserve and never touch
GROWTH = 1 << 30  # of memory in use, over all seeds
METHODS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"target_modules": ["q_proj", "v_proj"]},
    "AdaLoraConfig": {"target_modules": ["q_proj"], "total_step": 10},
    "LoHaConfig": {"target_modules": ["q_proj"]},
    "LoKrConfig": {"target_modules": ["q_proj"]},
    "IA3Config": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "VeraConfig": {"target_modules": ["q_proj"]},
    "OFTConfig": {"target_modules": ["q_proj"]},
    "FourierFTConfig": {"target_modules": ["q_proj"], "n_frequency": 8},
    "PromptTuningConfig": {"num_virtual_tokens": 3},
    "MultitaskPromptTuningConfig": {"num_virtual_tokens": 3, "num_tasks": 2},
    "PrefixTuningConfig": {"num_virtual_tokens": 3},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
}
MODELS = ("llama", "gpt2", "mixtral", "qwen3_5", "t5", "deepseek_v3", "gemma3", "bert", "mamba2", "whisper")


def values(outside: Path) -> list[Any]:
    """What a field may become: what would be opened, fetched, imported, matched or built."""
    return [
        *(None, True, False, 0, -1, 1, 7, 0.5, 1e308, 2**31, 2**63, 10**9, 10**18, 10**40, 10**400),
        *("", "x", "all", "none", "../x", "who/what", "who/what@main:run", "paged|who/what", "eviL_module", "a" * 5000),
        *(str(outside / "fifo"), str(outside / "pickle.bin"), str(outside / "file.safetensors"), str(outside)),
        *("(", "*", "(.*)*x", r"([a-z_.0-9]+)+!", ".*.*.*.*.*!", r"(\w+\.?)+!", "q_proj", "EXACT_SOURCE_TASK", "TEXT"),
        *([], {}, [None], [[]], [[0, 10**9]], ["(.*)*x"], [r"([a-z_.0-9]+)+!", "q_proj"], list(range(50_000))),
        *(
            {"": 0},
            {"q_proj": -1},
            {"q_proj": 10**9},
            {r"(\w+\.?)+!": 4},
            {"": "who/what"},
            {"text_config": "who/what"},
        ),
        *({"quant_method": "zzz"}, {"quant_method": "fp8", "modules_to_not_convert": [r"(\w+\.?)+!"]}),
        [f"layers.{number}.q_proj" for number in range(30_000)],
    ]


class Watch:
    """What the process opens outside, imports and connects to, as the interpreter tells its audit hooks."""

    def __init__(self, outside: Path) -> None:
        self.outside, self.seen = str(outside), []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        first = str(arguments[0]) if arguments else ""
        bad = event in ("socket.connect", "socket.getaddrinfo", "os.system", "subprocess.Popen")
        bad |= event in ("open", "os.listdir", "os.scandir") and first.startswith(self.outside)
        bad |= event == "import" and "eviL" in first
        if bad:
            self.seen.append(f"{event} {first}")


def fields_of(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def prepare(root: Path) -> tuple[Path, dict[str, Path], list[str]]:
    """Save a base and an adapter of each method, and return them with the names of the fields of configs of models."""
    import peft
    from models import save_llama
    from transformers import AutoModelForCausalLM, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    outside = root / "outside"
    outside.mkdir()
    os.mkfifo(outside / "fifo")
    for name in ("pickle.bin", "file.safetensors"):
        (outside / name).write_bytes(b"\x80\x04\x95")
    base = save_llama(root / "base")
    adapters = {}
    for name, options in METHODS.items():
        config = getattr(peft, name)(task_type="CAUSAL_LM", **options)
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(root / name)
        adapters[name] = root / name
    names = {
        name for model in MODELS for name in (*fields_of(CONFIG_MAPPING[model]), *CONFIG_MAPPING[model]().to_dict())
    }
    names |= {*fields_of(PreTrainedConfig), "_attn_implementation", "_experts_implementation", "transformers_weights"}
    names |= {"quantization_config", "compression_config", "auto_map", "use_kernels", "kernel_config", "text_config"}
    return base, adapters, sorted(names)


def changed(source: Path, folder: Path, file: str, names: list[str], chance: random.Random, outside: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    document = json.loads((folder / file).read_text())
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        document[chance.choice(names)] = chance.choice(values(outside))
    (folder / file).write_text(json.dumps(document))


def overdue(*_: object) -> None:
    raise TimeoutError(f"no answer after {SECONDS} seconds")


def complaint(call: Callable[[], object]) -> str | None:
    """Return what a call did that no call may do."""
    from safe_loading import SafeLoadingError

    signal.alarm(SECONDS)
    try:
        call()
    except SafeLoadingError:
        return None
    except BaseException as error:  # MemoryError, TimeoutError and whatever an engine raises
        return f"{type(error).__name__}: {error}"[:400]
    finally:
        signal.alarm(0)
    return None


def main(root: Path, first: int, last: int) -> None:
    """Try the seeds."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    from safe_loading import check_checkpoint, load_peft_on_rank, meta_model

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    base, adapters, names = prepare(root)
    lora = adapters["LoraConfig"]
    plain = AutoModelForCausalLM.from_pretrained(base)
    load_peft_on_rank(lora, base)  # what is imported and opened once
    meta_model(base)
    signal.signal(signal.SIGALRM, overdue)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    watch = Watch(root / "outside")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    folder = root / "case"
    for seed in range(first, last):
        chance = random.Random(seed)
        calls: list[Callable[[], object]]
        if chance.random() < 0.6:
            name = chance.choice(list(METHODS))
            own, file = fields_of(getattr(peft, name)), "adapter_config.json"
            changed(adapters[name], folder, file, own, chance, root / "outside")
            target, trainable = (base, True) if chance.random() < 0.5 else (copy.deepcopy(plain), False)
            calls = [functools.partial(load_peft_on_rank, folder, target, is_trainable=trainable)]
        else:
            file = "config.json"
            changed(base, folder, file, names, chance, root / "outside")
            calls = [functools.partial(meta_model, folder), functools.partial(load_peft_on_rank, lora, folder)]
        every = [complaint(call) for call in (functools.partial(check_checkpoint, folder), *calls)]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        said = [*filter(None, every), *watch.seen, *([f"{grown} bytes more in use"] if grown > GROWTH else [])]
        watch.seen.clear()
        if said:
            line = {"seed": seed, "said": said, "config": (folder / file).read_text()[:1500]}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    sys.stdout.write("done\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
