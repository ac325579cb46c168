"""Thirty mistakes of merges and more, each made once and named by `verify_merge`, with the tensors that it is in."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Made, save_adapter, save_llama, save_tokenizer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_verify_merge import LINEAR, Tensors, codes, rewritten, tensors_of
from test_verify_merge_layouts import Moe, apart, moe  # noqa: F401  # a fixture
from transformers import AutoModelForCausalLM

from safe_loading import merge_lora_checkpoint, verify_merge

Q, UP, GATE = "model.layers.1.self_attn.q_proj.weight", "mlp.up_proj.weight", "mlp.gate_proj.weight"
DOWN, EMBED, HEAD = "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
BIAS = Q.replace("weight", "bias")


class Setting:
    """A base, an adapter, their right merge, and a copy of that in which a mistake is made."""

    def __init__(self, base: Path, adapter: Path, folder: Path) -> None:
        self.base, self.adapter, self.folder = base, adapter, folder
        self.wrong = folder / "wrong"
        merge_lora_checkpoint(base, adapter, folder / "right")
        self.right, self.before = tensors_of(folder / "right"), tensors_of(base)

    @cached_property
    def exact(self) -> Tensors:
        """The right merge in float64."""
        merge_lora_checkpoint(self.base, self.adapter, self.folder / "exact", dtype=torch.float64)
        return tensors_of(self.folder / "exact")

    def write(self, changed: Tensors, without: Iterable[str] = ()) -> set[str]:
        """Write the right merge with other tensors; the names of those that differ."""
        tensors = {name: t for name, t in {**self.right, **changed}.items() if name not in without}
        rewritten(self.folder / "right", self.wrong, tensors)
        alike = {n for n, t in tensors.items() if n in self.right and torch.equal(t, self.right[n])}
        return {*tensors, *self.right} - alike

    def copied(self) -> Path:
        """The right merge as it is, in its shards, to be changed."""
        return Path(shutil.copytree(self.folder / "right", self.wrong))

    def update(
        self, change: Callable[[torch.Tensor], torch.Tensor], *names: str, of: Tensors | None = None
    ) -> set[str]:
        """Write a merge with another update in some tensors, or in all that have one."""
        exact = of or self.exact
        names = names or tuple(n for n, t in self.before.items() if not torch.equal(t.double(), self.exact[n]))
        before = {name: self.before[name].double() for name in names}
        return self.write({n: (b + change(exact[n] - b)).to(self.before[n].dtype) for n, b in before.items()})


def flipped(weight: torch.Tensor) -> torch.Tensor:
    bits = weight.clone().view(torch.int16)
    bits[3, 5] ^= 1 << 9
    return bits.view(weight.dtype)


def with_value(weight: torch.Tensor, value: float) -> torch.Tensor:
    weight = weight.clone()
    weight[0, 0] = value
    return weight


def of_another_adapter(of: Setting) -> set[str]:
    """The update of the adapter of another run."""
    return of.update(lambda update: update, of=another(of)[0])


def another(of: Setting) -> tuple[Tensors, Path]:
    shutil.copytree(of.adapter, of.folder / "other adapter")
    file = of.folder / "other adapter" / "adapter_model.safetensors"
    torch.manual_seed(5)
    from safetensors.torch import save_file

    save_file({n: t + 0.1 * torch.randn_like(t) for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    merge_lora_checkpoint(of.base, of.folder / "other adapter", of.folder / "other")
    return tensors_of(of.folder / "other"), of.folder / "other"


def with_a_shard_of(of: Setting, folder: Path) -> set[str]:
    """A merge of which one shard is that of another folder."""
    shard = sorted(of.copied().glob("model-*.safetensors"))[1].name
    shutil.copyfile(folder / shard, of.wrong / shard)
    return {name for name, t in load_file(of.wrong / shard).items() if not torch.equal(t, of.right[name])}


def through_float16(of: Setting) -> set[str]:
    return of.write({name: tensor.half().float() for name, tensor in of.right.items()})


def with_a_stale_index(of: Setting) -> set[str]:
    index = of.copied() / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    first, *_, last = sorted(set(document["weight_map"].values()))
    document["weight_map"][HEAD] = first if document["weight_map"][HEAD] != first else last
    index.write_text(json.dumps(document))
    return {HEAD}


def with_config(of: Setting, **changed: object) -> set[str]:
    path = of.copied() / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return set()


def with_config_of_the_base(of: Setting) -> set[str]:
    shutil.copyfile(of.base / "config.json", of.copied() / "config.json")
    return set()


def with_tokenizer_of_the_base(of: Setting) -> set[str]:
    shutil.copyfile(of.base / "tokenizer_config.json", of.copied() / "tokenizer_config.json")
    return set()


def without_magnitude(of: Setting) -> set[str]:
    """The sum of the weight and the LoRA of a DoRA."""
    factors, wrong = load_file(of.adapter / "adapter_model.safetensors"), {}
    for name, weight in of.before.items():
        module = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{module}A.weight" in factors:
            a, b = factors[f"{module}A.weight"].double(), factors[f"{module}B.weight"].double()
            wrong[name] = (weight.double() + 2 * b @ a).to(weight.dtype)
    return of.write(wrong)


def swapped(of: Setting, one: str, other: str) -> set[str]:
    return of.write({one: of.right[other], other: of.right[one]})


def of_an_expert(tensors: Tensors, expert: int, source: int) -> Tensors:
    """The tensors of one expert, taken from another expert's."""
    return {apart(1, expert, part): tensors[apart(1, source, part)] for part in ("gate", "up", "down")}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One mistake: the codes of its findings, the verdict on its tensors, and who makes it and names the tensors."""

    codes: set[str]
    verdict: str
    make: Callable[[Setting], set[str]]
    lora: dict[str, Any] = dataclasses.field(default_factory=lambda: LINEAR)
    llama: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    base: str = "llama"


ABSENT, SCALED, DIFFER = {"update-absent"}, {"update-scaled"}, {"values-differ"}
TIED = {"tie_word_embeddings": True}
MISTAKES: dict[str, Mistake] = {
    # The thirty of the list, in its order.
    "the update dropped": Mistake(ABSENT, "base", lambda of: of.update(torch.zeros_like)),
    "one layer dropped": Mistake(
        ABSENT, "base", lambda of: of.write({n: t for n, t in of.before.items() if ".layers.1." in n})
    ),
    "doubled": Mistake({"update-twice"}, "twice", lambda of: of.update(lambda u: 2 * u)),
    "transposed": Mistake({"update-transposed"}, "transposed", lambda of: of.update(torch.t, Q)),
    "without alpha over r": Mistake(SCALED, "scaled", lambda of: of.update(lambda u: u / 2)),
    "alpha over r in the place of rsLoRA": Mistake(
        SCALED, "scaled", lambda of: of.update(lambda u: u / 2), {**LINEAR, "use_rslora": True}
    ),
    "the wrong sign": Mistake(SCALED, "scaled", lambda of: of.update(torch.neg)),
    "another adapter": Mistake(DIFFER, "other", of_another_adapter),
    "the base unchanged": Mistake(ABSENT, "base", lambda of: of.write(of.before)),
    "a rank pattern that was not heeded": Mistake(
        SCALED,
        "scaled",
        lambda of: of.update(lambda u: u / 2, *(n for n in of.before if n.endswith("q_proj.weight"))),
        {**LINEAR, "rank_pattern": {"q_proj": 2}},
    ),
    "one expert missing": Mistake(
        {"merged-missing"},
        "missing",
        lambda of: of.write({}, of_an_expert(of.right, 2, 2)),
        base="experts",
    ),
    "experts permuted": Mistake(
        {"values-swapped"},
        "swapped",
        lambda of: of.write({**of_an_expert(of.right, 1, 2), **of_an_expert(of.right, 2, 1)}),
        base="experts",
    ),
    "gate and up swapped": Mistake(
        {"values-swapped"}, "swapped", lambda of: swapped(of, f"model.layers.0.{GATE}", f"model.layers.0.{UP}")
    ),
    "a tie broken": Mistake(
        {"values-differ"}, "other", lambda of: of.write({HEAD: of.before[EMBED] * 1.5}), llama=TIED
    ),
    "a tied weight merged twice": Mistake(
        {"update-twice"},
        "twice",
        lambda of: of.update(lambda u: 2 * u, EMBED),
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        TIED,
    ),
    "the head forgotten": Mistake(
        ABSENT, "base", lambda of: of.write({HEAD: of.before[HEAD]}), {"target_modules": ["q_proj", "lm_head"]}
    ),
    "a bias forgotten": Mistake(
        ABSENT,
        "base",
        lambda of: of.write({BIAS: of.before[BIAS]}),
        {"bias": "lora_only", "dtype": torch.bfloat16},
        {"attention_bias": True},
    ),
    "a saved module forgotten": Mistake(
        ABSENT,
        "base",
        lambda of: of.write({HEAD: of.before[HEAD]}),
        {"modules_to_save": ["lm_head"], "dtype": torch.bfloat16},
    ),
    "DoRA without its magnitude": Mistake(DIFFER, "other", without_magnitude, {**LINEAR, "use_dora": True}),
    "a stale shard": Mistake(ABSENT, "base", lambda of: with_a_shard_of(of, of.base)),
    "a shard of another run": Mistake(DIFFER, "other", lambda of: with_a_shard_of(of, another(of)[1])),
    "through float16 and back": Mistake({"values-narrowed"}, "narrowed", through_float16, dtype=torch.float32),
    "NaN": Mistake({"merged-not-finite"}, "not finite", lambda of: of.write({Q: with_value(of.right[Q], math.nan)})),
    "embeddings cut": Mistake({"merged-shape"}, "shape", lambda of: of.write({EMBED: of.right[EMBED][:-1]})),
    "rows of the vocabulary swapped": Mistake(
        {"values-swapped"},
        "swapped",
        lambda of: of.write({EMBED: of.right[EMBED][[0, 2, 1, *range(3, len(of.right[EMBED]))]]}),
    ),
    "the config of the base": Mistake({"merged-config"}, "", with_config_of_the_base, base="resized"),
    "quantization_config left": Mistake(
        {"quantization-left-over"},
        "",
        lambda of: with_config(of, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ),
    "the tokenizer of the base": Mistake(
        {"merged-tokenizer-of-base"}, "", with_tokenizer_of_the_base, base="with a tokenizer"
    ),
    "a stale index": Mistake(
        {"tensor-missing", "stray-shard", "total-size", "merged-missing"}, "missing", with_a_stale_index
    ),
    "one bit flipped": Mistake(DIFFER, "other", lambda of: of.write({Q: flipped(of.right[Q])})),
    # And more.
    "one weight dropped": Mistake(ABSENT, "base", lambda of: of.write({Q: of.before[Q]})),
    "one weight doubled": Mistake({"update-twice"}, "twice", lambda of: of.update(lambda u: 2 * u, Q)),
    "one expert dropped": Mistake(ABSENT, "base", lambda of: of.write(of_an_expert(of.before, 2, 2)), base="experts"),
    "alpha over the root of r in the place of r": Mistake(
        SCALED, "scaled", lambda of: of.update(lambda u: u * math.sqrt(2))
    ),
    "a factor of 1.1": Mistake(SCALED, "scaled", lambda of: of.update(lambda u: 1.1 * u)),
    "infinity": Mistake(
        {"merged-not-finite"}, "not finite", lambda of: of.write({Q: with_value(of.right[Q], math.inf)})
    ),
    "one bit of a copied tensor flipped": Mistake(
        DIFFER, "other", lambda of: of.write({EMBED: flipped(of.right[EMBED])})
    ),
    "noise": Mistake(
        DIFFER,
        "other",
        lambda of: of.write({DOWN: of.right[DOWN] + 0.01 * torch.randn(of.right[DOWN].shape).bfloat16()}),
    ),
}
WARNINGS = {"values-narrowed", "merged-tokenizer-of-base"}


def resized(made: Made, folder: Path) -> tuple[Path, Path]:
    """A base, and an adapter that was trained with three more words."""
    base = made.llama(torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(str(folder / "adapter"))
    return base, folder / "adapter"


def with_a_tokenizer(made: Made, folder: Path) -> tuple[Path, Path]:
    """A base and an adapter with a tokenizer each, of which the adapter's has a chat template."""
    base = made.llama(torch.bfloat16)
    adapter = made.adapter(base, **LINEAR)
    base, adapter = (Path(shutil.copytree(one, folder / name)) for one, name in ((base, "base"), (adapter, "adapter")))
    for one in (base, adapter):
        save_tokenizer(one)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (adapter / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ messages }}"}))
    return base, adapter


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(made: Made, tmp_path: Path, request: pytest.FixtureRequest, mistake: str) -> None:
    torch.manual_seed(0)
    wrong = MISTAKES[mistake]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if wrong.base == "experts":
            experts: Moe = request.getfixturevalue("moe")
            base, adapter = experts.folder / "apart", experts.adapter
        elif wrong.base == "resized":
            base, adapter = resized(made, tmp_path)
        elif wrong.base == "with a tokenizer":
            base, adapter = with_a_tokenizer(made, tmp_path)
        else:
            base = made.llama(wrong.dtype, **wrong.llama)
            adapter = made.adapter(base, **wrong.lora)
    setting = Setting(base, adapter, tmp_path)
    right = verify_merge(base, adapter, tmp_path / "right")
    assert right.ok, str(right)
    assert not codes(right), str(right)
    names = wrong.make(setting)
    check = verify_merge(base, adapter, setting.wrong)
    assert codes(check) == wrong.codes, str(check)
    assert {tensor.name for tensor in check.of(wrong.verdict)} == names, str(check)
    assert check.ok == (wrong.codes <= WARNINGS)


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A right merge of a base with a chat template."""
    folder = tmp_path_factory.mktemp("alike")
    base = save_llama(folder / "base", torch.bfloat16)
    save_tokenizer(base)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    return Setting(base, save_adapter(folder / "adapter", base), folder)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("architectures", ["LlamaModel"]),
        ("tie_word_embeddings", True),
        ("rope_parameters", {"rope_theta": 7.0, "rope_type": "default"}),
        ("rms_norm_eps", 0.1),
        ("num_hidden_layers", 1),
        ("num_attention_heads", 8),
        ("hidden_act", "gelu"),
        ("intermediate_size", None),  # absent, so that the class takes its default
    ],
)
def test_a_config_that_builds_another_model_is_named(alike: Setting, tmp_path: Path, entry: str, value: Any) -> None:
    merged = Path(shutil.copytree(alike.folder / "right", tmp_path / "merged"))
    config = {**json.loads((merged / "config.json").read_text()), entry: value}
    (merged / "config.json").write_text(json.dumps({key: own for key, own in config.items() if own is not None}))
    check = verify_merge(alike.base, alike.adapter, merged)
    assert not check.ok
    (finding,) = (finding for finding in check.findings if finding.code == "merged-config")
    assert entry in finding.message
    assert " and should be " in finding.message


def test_a_config_that_builds_the_same_model_is_no_mistake(alike: Setting, tmp_path: Path) -> None:
    merged = Path(shutil.copytree(alike.folder / "right", tmp_path / "merged"))
    config = json.loads((merged / "config.json").read_text())
    base = config.pop("rope_parameters")["rope_theta"]
    # As transformers 4 wrote it, with what programs of training add.
    added = {"rope_theta": base, "torch_dtype": config.pop("dtype"), "use_cache": False, "pad_token_id": 0}
    more = {"unsloth_version": "2026.1", "transformers_version": "4.57.0", "max_position_embeddings": 4096}
    (merged / "config.json").write_text(json.dumps({**config, **added, **more}))
    check = verify_merge(alike.base, alike.adapter, merged)
    assert check.ok, str(check)
    assert not codes(check), str(check)


def test_the_class_of_the_type_is_right_where_transformers_lacks_the_bases(alike: Setting, tmp_path: Path) -> None:
    base = shutil.copytree(alike.base, tmp_path / "base")
    merged = shutil.copytree(alike.folder / "right", tmp_path / "merged")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForMyHead"]}))
    check = verify_merge(base, alike.adapter, merged)
    assert check.ok, str(check)


def test_a_chat_template_that_was_lost_is_named(alike: Setting, tmp_path: Path) -> None:
    merged = Path(shutil.copytree(alike.folder / "right", tmp_path / "merged"))
    (merged / "chat_template.jinja").unlink()
    check = verify_merge(alike.base, alike.adapter, merged)
    assert codes(check) == {"merged-files-lost"}
    assert "chat_template.jinja of the base or the adapter is not there" in check.findings[0].message
    settings = json.loads((merged / "tokenizer_config.json").read_text())  # where transformers 4 wrote it
    (merged / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ messages }}"}))
    assert not codes(verify_merge(alike.base, alike.adapter, merged))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A right merge of a base with a generation config, a chat template and a processor."""
    folder = tmp_path_factory.mktemp("chatty")
    base = save_llama(folder / "base", torch.bfloat16)
    save_tokenizer(base)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    generation = {"eos_token_id": [2, 3], "temperature": 0.6, "do_sample": True, "transformers_version": "4.40.0"}
    (base / "generation_config.json").write_text(json.dumps(generation))
    processor = {"image_mean": [0.5, 0.5], "size": {"height": 224}, "image_processor_type": "CLIPImageProcessor"}
    (base / "preprocessor_config.json").write_text(json.dumps(processor))
    return Setting(base, save_adapter(folder / "adapter", base), folder)


CHANGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "one of the ids that end an answer": ("generation_config.json", {"eos_token_id": 2}, "eos_token_id is [2]"),
    "sampling": ("generation_config.json", {"temperature": 1.3}, "temperature is 1.3 and should be 0.6"),
    "sampling that was lost": ("generation_config.json", {"temperature": None, "do_sample": None}, "do_sample is"),
    "the mean of images": ("preprocessor_config.json", {"image_mean": [0.4, 0.5]}, "image_mean is [0.4, 0.5]"),
    "the size of images": ("preprocessor_config.json", {"size": {"height": 336}}, "size.height is 336"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_file_beside_the_weights_that_changed_is_named(chatty: Setting, tmp_path: Path, change: str) -> None:
    file, entries, said = CHANGED[change]
    merged = Path(shutil.copytree(chatty.folder / "right", tmp_path / "merged"))
    document = {**json.loads((merged / file).read_text()), **entries}
    (merged / file).write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
    check = verify_merge(chatty.base, chatty.adapter, merged)
    assert codes(check) == {"merged-files-changed"}, str(check)
    assert check.ok
    assert f"{file}: {said}" in check.findings[0].message
    assert check.findings[0].fix is not None
    assert check.findings[0].fix.startswith("copy the files of the base or the adapter")
    source = next(folder for folder in (chatty.adapter, chatty.base) if (folder / file).is_file())
    shutil.copy(source / file, merged / file)
    assert codes(verify_merge(chatty.base, chatty.adapter, merged)) == set()


def test_a_chat_template_that_changed_is_named_wherever_it_is(chatty: Setting, tmp_path: Path) -> None:
    merged = Path(shutil.copytree(chatty.folder / "right", tmp_path / "merged"))
    (merged / "chat_template.jinja").unlink()
    settings = json.loads((merged / "tokenizer_config.json").read_text())
    for template, expected in (("{{ messages }}\n", set()), ("{{ messages[0] }}", {"merged-files-changed"})):
        (merged / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        assert codes(verify_merge(chatty.base, chatty.adapter, merged)) == expected


def test_what_engines_write_in_their_own_form_is_no_change(chatty: Setting, tmp_path: Path) -> None:
    merged = Path(shutil.copytree(chatty.folder / "right", tmp_path / "merged"))
    AutoModelForCausalLM.from_pretrained(merged, dtype="auto").save_pretrained(tmp_path / "again")
    document = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    more = {"max_length": 4096, "pad_token_id": 0, "use_cache": False, "eos_token_id": [3, 2]}
    (merged / "generation_config.json").write_text(json.dumps({**document, **more}))
    processor = json.loads((merged / "preprocessor_config.json").read_text())
    more = {"image_processor_type": "CLIPImageProcessorFast", "processor_class": "CLIPProcessor", "do_pad": None}
    (merged / "preprocessor_config.json").write_text(json.dumps({**processor, **more, "size": 224}, indent=1))
    check = verify_merge(chatty.base, chatty.adapter, merged)
    assert not codes(check), str(check)
