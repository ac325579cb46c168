"""Loads folders whose configs hypothesis wrote, in a process of its own: what it opens, imports, fetches and takes.

``python config_fuzz.py FOLDER SEED EXAMPLES`` tries so many configs from a seed, and prints a line with the config for
each that did what no config may make the engines do. The names of the fields are those that the installed peft and
transformers declare, so that new ones are tried on the day they appear.

The process is not offline: an audit hook refuses each connection, and notes it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import os
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

CPU_SECONDS, SECONDS = 40, 400  # for one call; the slowest takes a second
BYTES = 24 << 30  # of addresses, most of which the engines reserve and never touch
GROWTH = 3 << 29  # of memory in use, over all configs
STARTED, ENDED = "fuzz.started", "fuzz.ended"  # files that are looked for around the examples, for a tracer to see
NEVER_IMPORTED = ("eviL_module", "antigravity", "turtledemo", "idlelib")


def hostile(outside: Path) -> list[Any]:
    """What a field may become: what would be opened, fetched, imported, matched or built."""
    return [
        *(None, True, False, 0, -1, 1, 7, 0.5, 1e308, 2**31, 2**63, 10**9, 10**18, 10**40, 10**400),
        *("", "x", "all", "none", "../x", "who/what", "who/what@main:run", "paged|who/what", "a" * 5000),
        *NEVER_IMPORTED,
        *("hf-hub:who/what", "https://localhost:9/x", "flash_attention_2", "pissa_niter_1000000000", "numpy.float32"),
        *(str(outside / name) for name in ("fifo", "pickle.bin", "file.safetensors", "")),
        *("(", "*", "(.*)*x", r"([a-z_.0-9]+)+!", ".*.*.*.*.*!", r"(\w+\.?)+!", "q_proj", "EXACT_SOURCE_TASK", "TEXT"),
        *([], {}, [None], [[]], [[0, 10**9]], ["(.*)*x"], [r"([a-z_.0-9]+)+!", "q_proj"], list(range(50_000))),
        *({"": 0}, {"q_proj": -1}, {"q_proj": 10**9}, {r"(\w+\.?)+!": 4}, {"": "who/what"}, {"default": "who/what"}),
        *({"model_type": "llama"}, {"model_type": "eviL_module"}, {"rope_type": "yarn", "factor": -1}, [2, 10**9]),
        [f"layers.{number}.q_proj" for number in range(30_000)],
    ]


class Watch:
    """What the process opens outside, imports and connects to, as the interpreter tells its audit hooks."""

    def __init__(self, outside: Path) -> None:
        self.outside, self.seen = str(outside), []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        first = str(arguments[0]) if arguments else ""
        if event in ("open", "os.listdir", "os.scandir") and first.startswith(self.outside):
            self.seen.append(f"{event} {first}")
        if event == "import" and first.startswith(NEVER_IMPORTED):
            self.seen.append(f"{event} {first}")
        if event == "subprocess.Popen" and arguments[1] == ["ninja", "--version"]:
            return  # RWKV asks whether its kernel could be built, whatever its config says
        if event in ("socket.connect", "socket.getaddrinfo", "os.system", "os.exec", "subprocess.Popen"):
            self.seen.append(f"{event} {arguments}")
            raise PermissionError(f"{event} is not allowed here")


def fields_of(kind: Any) -> list[str]:
    """The names that a config class declares."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "kwargs")]


class Sources:
    """Good folders to change, each made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        from adapter_methods import METHODS
        from models import save_llama
        from tiny_models import causal_lm_classes, image_text_classes
        from transformers import GenerationConfig, PreTrainedConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

        self.root, self.methods = root, METHODS
        self.outside = root / "outside"
        self.outside.mkdir()
        os.mkfifo(self.outside / "fifo")
        for name in ("pickle.bin", "file.safetensors"):
            (self.outside / name).write_bytes(b"\x80\x04\x95")
        self.base = save_llama(root / "base")
        self.classes = [*causal_lm_classes(), *image_text_classes()]
        self.quantizers = {name: fields_of(kind) for name, kind in AUTO_QUANTIZATION_CONFIG_MAPPING.items()}
        self.of_generation = sorted(GenerationConfig().to_dict())
        common = {*fields_of(PreTrainedConfig), *PreTrainedConfig().to_dict(), "auto_map", "backbone", "architecture"}
        common |= {"_attn_implementation", "_experts_implementation", "transformers_weights", "use_kernels"}
        self.common = sorted(common | {"quantization_config", "compression_config", "kernel_config", "text_config"})
        self.of_any_model = sorted({name for kind in CONFIG_MAPPING.values() for name in fields_of(kind)})

    @functools.cache  # noqa: B019  # it lives as long as the process
    def adapter(self, method: str) -> Path:
        from adapter_methods import save_trained

        return save_trained(self.methods[method], self.base, self.root / "adapters" / method.replace(" ", "-"))

    @functools.cache  # noqa: B019  # it lives as long as the process
    def architecture(self, name: str) -> Path:
        """A folder with the config of a class, without weights."""
        from tiny_models import tiny_config

        config = tiny_config(name)
        config.architectures = [name]
        config.save_pretrained(self.root / "architectures" / name)
        return self.root / "architectures" / name


@dataclasses.dataclass(frozen=True)
class Case:
    """A good folder, the file in it that is changed, and what its fields become; a path of keys names each."""

    kind: str  # "adapter", "base" or "architecture"
    source: str  # the method or the class
    file: str
    changes: Mapping[tuple[str, ...], Any]


def cases(sources: Sources) -> st.SearchStrategy[Case]:
    """Cases of every kind."""
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    made = st.recursive(scalars | st.text(max_size=20), lambda inner: st.lists(inner, max_size=3), max_leaves=5)
    values = st.sampled_from(hostile(sources.outside)) | made

    def change(names: list[str], within: tuple[str, ...] = ()) -> st.SearchStrategy[dict[tuple[str, ...], Any]]:
        return st.dictionaries(st.sampled_from(names).map(lambda name: (*within, name)), values, min_size=1, max_size=4)

    def adapter(method: str) -> st.SearchStrategy[Case]:
        import peft

        names = [*fields_of(getattr(peft, sources.methods[method].config)), "runtime_config"]
        return st.builds(Case, st.just("adapter"), st.just(method), st.just("adapter_config.json"), change(names))

    def architecture(name: str) -> st.SearchStrategy[Case]:
        document = json.loads((sources.architecture(name) / "config.json").read_text())
        inner = [change(sorted(value), (key,)) for key, value in document.items() if value and isinstance(value, dict)]
        changes = st.one_of(change([*document, *sources.common]), *inner)
        return st.builds(Case, st.just("architecture"), st.just(name), st.just("config.json"), changes)

    def quantized(method: str) -> st.SearchStrategy[dict[tuple[str, ...], Any]]:
        within = ("quantization_config",)
        fields = change(sources.quantizers[method] or ["x"], within)
        return fields.map(lambda changes: {(*within, "quant_method"): method, **changes})

    of_base = st.one_of(
        change(sources.common),
        change(sources.of_any_model),
        st.sampled_from(sorted(sources.quantizers)).flatmap(quantized),
    )
    return st.one_of(
        st.sampled_from(sorted(sources.methods)).flatmap(adapter),
        st.builds(Case, st.just("base"), st.just(""), st.just("config.json"), of_base),
        st.sampled_from(sources.classes).flatmap(architecture),
        st.builds(Case, st.just("base"), st.just(""), st.just("generation_config.json"), change(sources.of_generation)),
    )


def write(case: Case, source: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    path = folder / case.file
    document = json.loads(path.read_text()) if path.exists() else {}
    for (*outer, last), value in case.changes.items():
        part = document
        for key in outer:
            part = part.setdefault(key, {})
        part[last] = value
    path.write_text(json.dumps(document))


def overdue(*_: object) -> None:
    raise TimeoutError(f"no answer after {CPU_SECONDS} seconds of CPU time, or {SECONDS} seconds")


def complaint(call: Callable[[], object]) -> str | None:
    """Return what a call did that no call may do."""
    from safe_loading import SafeLoadingError

    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.alarm(SECONDS)
    try:
        call()
    except SafeLoadingError as error:
        timed_out = isinstance(error.__cause__, TimeoutError)
        return str(error)[:400] if timed_out else None
    except BaseException as error:  # MemoryError, TimeoutError and whatever an engine raises
        return f"{type(error).__name__}: {error}"[:400]
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


class Loads:
    """Calls the verbs with each case, and collects what they did that none may do."""

    def __init__(self, sources: Sources) -> None:
        from transformers import AutoModelForCausalLM

        self.sources, self.folder = sources, sources.root / "case"
        self.lora = sources.adapter("LoRA")
        self.plain = AutoModelForCausalLM.from_pretrained(sources.base)
        self.watch = Watch(sources.outside)
        self.before = self.memory()

    @staticmethod
    def memory() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def calls(self, case: Case) -> list[Callable[[], object]]:
        from safe_loading import check_checkpoint, load_peft_on_rank, meta_model

        check, folder = functools.partial(check_checkpoint, self.folder), self.folder
        if case.kind == "adapter":
            load = functools.partial(load_peft_on_rank, folder)
            onto_model = functools.partial(load, copy.deepcopy(self.plain), is_trainable=True)
            return [check, functools.partial(load, self.sources.base), onto_model]
        on_meta = functools.partial(meta_model, folder)
        if case.kind == "architecture":
            return [check, on_meta]
        return [check, on_meta, functools.partial(load_peft_on_rank, self.lora, folder)]

    def said_by(self, case: Case) -> list[str]:
        good = {"adapter": self.sources.adapter, "architecture": self.sources.architecture}.get(case.kind)
        write(case, good(case.source) if good else self.sources.base, self.folder)
        self.watch.seen.clear()
        said = [*filter(None, map(complaint, self.calls(case))), *self.watch.seen]
        grown = self.memory() - self.before
        if grown > GROWTH:
            self.before = self.memory()  # each config is blamed once
            said.append(f"{grown} bytes more in use")
        return said


def main(root: Path, seed: int, examples: int) -> None:
    """Try the cases of a seed."""
    import torch

    from safe_loading import load_peft_on_rank, meta_model

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sources = Sources(root)
    load_peft_on_rank(sources.base, sources.adapter("LoRA"))  # what is imported and opened once
    meta_model(sources.base)
    loads = Loads(sources)
    signal.signal(signal.SIGALRM, overdue)
    signal.signal(signal.SIGPROF, overdue)
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    tried = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
        report_multiple_bugs=False,
    )
    @hypothesis.given(cases(sources))
    def every_case(case: Case) -> None:
        nonlocal tried
        tried += 1
        said = loads.said_by(case)
        if said:
            changes = {".".join(path): value for path, value in case.changes.items()}
            line = {"said": said, "kind": case.kind, "source": case.source, "changes": repr(changes)[:1500]}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    _mark(root / STARTED)
    every_case()
    _mark(root / ENDED)
    sys.stdout.write(f"tried {tried}\n")


def _mark(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.open()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
