"""Patterns of configs: those that people publish are matched, and those that never end are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from safe_loading._checkpoint.adapter_config import adapter_config_faults
from safe_loading._checkpoint.adapter_patterns import pattern_problems
from safe_loading._checkpoint.pattern_cost import find_costly, shapes_of
from safe_loading._checkpoint.pattern_limits import MOST_STEPS

LEAVES = [
    *("self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"),
    *("mlp.up_proj", "mlp.down_proj", "mlp", "mlp.act_fn", "mlp.experts.127.down_proj", "post_attention_layernorm"),
]
MODULES = [
    "model",
    "model.embed_tokens",
    "lm_head",
    "base_model.model.score",
    *(
        f"{tower}.layers.{n}.{leaf}"
        for n in (0, 7, 61)
        for leaf in LEAVES
        for tower in ("model", "model.language_model")
    ),
    *(f"model.visual.blocks.{n}.{leaf}" for n in (0, 31) for leaf in ("attn.qkv", "attn.proj", "mlp.linear_fc1")),
    *(f"vision_tower.vision_model.encoder.layers.{n}.self_attn.out_proj" for n in range(27)),
    *(f"decoder.block.{n}.layer.1.EncDecAttention.q" for n in range(24)),
    *(f"roberta.encoder.layer.{n}.attention.self.query" for n in range(12)),
    *(f"single_transformer_blocks.{n}.attn.to_out" for n in range(38)),
]
SHAPES = shapes_of(MODULES)
LEAF_NAMES = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"

# What adapters on the hub and in the documentation and the tests of peft, unsloth, ms-swift, diffusers, LLaVA and
# others have as target_modules, exclude_modules or keys of their patterns.
PUBLISHED = [
    "all-linear",
    "model.layers",
    r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    r".*\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
    r".*\.(q_proj|v_proj)$",
    r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$",
    r".*vision_tower.*\.(q_proj|k_proj|v_proj|out_proj)$",
    r"^(?!.*visual).*(?:o_proj|up_proj|v_proj|down_proj|k_proj|q_proj|gate_proj).*",
    r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*",
    r"^(model(?=\.).*\.(k_proj|up_proj|v_proj|down_proj|gate_proj|o_proj|q_proj))$",
    r"^(model\.language_model(?=\.).*\.(in_proj_z|in_proj_qkv|in_proj_b|out_proj|up_proj|down_proj|v_proj|q_proj))$",
    r"(.*(model.text_model).*(down_proj|gate_proj|up_proj|k_proj|q_proj|v_proj|o_proj).*$|.*(custom_text_proj).*$)",
    r"model\.layers\.[0-3]\.(self_attn|mlp)\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
    r"roberta\.encoder\.layer\.\d+\.(attention\.self\.(query|key|value)|(attention\.output\.dense)|(output\.dense))",
    r".*visual\.transformer\.resblocks\.\d+\.(attn\.out_proj|mlp\.c_fc|mlp\.c_proj)",
    r"^blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(fc1|fc2))$",
    r".*multi_modal_projector.*linear.*",
    r"transformer.blocks.*\.(Wqkv|out_proj)",
    r".*\.attn\.to_[qkv]|single_transformer_blocks\..*\.attn\.to_out|transformer_blocks\..*\.attn\.to_out\.0",
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    rf"(?:qkv|proj|linear_fc1|linear_fc2|out_proj|in_proj_qkv|in_proj_z|{LEAF_NAMES}).*?)|(?:\bmodel\.layers\.[\d]{{1,}}"
    rf"\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:{LEAF_NAMES})))",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mixer|mlp|feed_forward|ffn|dense|mixer).*?\."
    r"(?:q_proj|v_proj|o_proj))|(?:\bmodel\.layers\.[\d]{1,}(?!.*\.experts\.\d)\..*?(?:self_attn|attention|mlp).*?)",
    "^(?:" + "|".join(re.escape(f"model.layers.{n}.self_attn.{leaf}") for n in range(80) for leaf in "qkvo") + ")$",
    r"(?:[^.]+\.)*q_proj",
    r"(.*\.)*q_proj",
    r"(?i).*\.(Q|K|V)_PROJ",
    r"(?<!vision_)model\..*q_proj",
    "l1.*",
]
KEYS = [
    "q_proj",
    r"model\.layers\.\d+\.mlp\..*",
    "^model.decoder.layers.0.encoder_attn.k_proj",
    "language_model(?=\\.).*up_proj",
]


@pytest.mark.parametrize("pattern", PUBLISHED, ids=range(len(PUBLISHED)))
def test_what_people_publish_is_matched(pattern: str) -> None:
    for field in ("target_modules", "exclude_modules", "feedforward_modules"):
        assert pattern_problems({field: pattern}, MODULES) == []


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern", "block_size_pattern", "n_frequency_pattern"])
def test_keys_that_people_publish_are_matched(field: str) -> None:
    assert pattern_problems({field: dict.fromkeys(KEYS, 4)}, MODULES) == []
    every = {f"model.layers.{n}.{leaf}": 4 for n in range(80) for leaf in LEAVES[1:8]}  # one for each module
    assert pattern_problems({field: every}, MODULES) == []
    assert (
        pattern_problems(
            {"layers_pattern": ["layers", "h", "blocks"], "modules_to_save": ["lm_head", "score"]}, MODULES
        )
        == []
    )


@pytest.mark.parametrize(
    "pattern",
    [
        r"([a-z_.0-9]+)+!",
        r"(\w+\.?)+!",
        r"(.|.)*!",
        r"(a|b|ab|[^x]|\w)+!",
        r".*.*.*.*!",
        r"(?=(\w|\.|\w\w)+!)model",
        r"(?i)(?:[A-Z_.]+\d*)+!",
        r"model(.|\w)(?:(.|\w)(.|\w)){20}!",
        r"(?:.*?.+?){9}!",
    ],
)
def test_what_never_ends_is_not(pattern: str) -> None:
    (problem,) = pattern_problems({"target_modules": pattern}, MODULES)
    assert f"takes more than {MOST_STEPS} steps" in problem


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(.*)*x", "can be empty"),
        ("(a?|b*)+", "can be empty"),
        ("(?:a?){200000}", "repeats a part 200000 times"),
        ("((a{1,100}){1,100}){1,100}", "more than 100000 parts"),
        (r"(\w+) \1", "a reference to a group"),
        (r"(a)?(?(1)b|c)", "a condition"),
        (r"(?<=(a|a)(a|a))b", "looks behind"),
        ("(?i)" + "[\x00-\U0010ffff]" * 4, "ignores the case"),
        ("*.q_proj", "not a valid regular expression"),
        ("(" * 5000, "not a valid regular expression"),
        ("(?:x?){2000}", "can be empty"),
    ],
)
def test_what_cannot_be_counted_is_refused_without_a_count(pattern: str, words: str) -> None:
    costly = find_costly({pattern: 1}, ["xmodel"], most=MOST_STEPS)
    assert costly is not None
    assert words in costly.why


@pytest.mark.parametrize(
    ("pattern", "name", "ways"),
    [
        # in each row the ways to each place, from the start to the end of the name
        ("abc", "abc", 1 + 1 + 1 + 0),
        ("abc", "abx", 1 + 1 + 1),
        (".*x", "aaaa", 2 * 5),  # before each character: go on, or take the x
        ("(a|ab)*c", "aba", 2 + 3 + 2 + 3),  # re reads it as (a(|b))*c
        ("(a|ab|b)*c", "ab", 4 + (4 + 1) + 2 * 4),
        ("a{2,3}", "aaaa", 1 + 1 + 1 + 0),
    ],
)
def test_the_count_is_the_number_of_ways(pattern: str, name: str, ways: int) -> None:
    assert find_costly({pattern: 1}, [name], most=ways + 1) is None
    assert find_costly({pattern: 1}, [name], most=ways) is not None


def test_the_steps_of_all_patterns_of_a_field_add_up() -> None:
    assert find_costly({".*a.*b.*!": 1}, SHAPES, most=1_000) is None
    assert find_costly({f".*{n}.*b.*!": 1 for n in "acdefghi"}, SHAPES, most=1_000) is not None
    assert find_costly({".*a.*b.*!": 8}, SHAPES, most=1_000) is not None


def test_a_digit_stands_for_every_digit() -> None:
    assert shapes_of(["layers.0.q", "layers.7.q", "layers.12.q"]) == ("layers.0.q", "layers.00.q")
    assert find_costly({"(7|77)+!": 1}, ["0" * 30], most=MOST_STEPS) is not None


def test_the_names_in_the_file_count_too(tmp_path: Path) -> None:
    config = {"target_modules": "(a+)+!"}
    assert adapter_config_faults(tmp_path, config, {"base_model.model.layers.0.q_proj.lora_A.weight": (4, 4)}) == []
    (fault,) = adapter_config_faults(tmp_path, config, {f"base_model.model.{40 * chr(97)}.lora_A.weight": (4, 4)})
    assert fault.code == "config-pattern"


def test_the_fix_that_the_fault_names_works(tmp_path: Path) -> None:
    (fault,) = adapter_config_faults(tmp_path, {"target_modules": r"(\w+\.?)+_proj!"}, {})
    assert "name the modules in a list, or write the pattern with fewer wildcards" in fault.fix
    for better in (["q_proj", "v_proj"], r".*\.\w+_proj"):
        assert adapter_config_faults(tmp_path, {"target_modules": better}, {}) == []


def test_ranks_that_adalora_found_are_no_patterns() -> None:
    config = {"peft_type": "ADALORA", "rank_pattern": {f"layers.{n}.lora_E": [True] for n in range(5000)}}
    assert pattern_problems(config, MODULES) == []
    assert pattern_problems({**config, "peft_type": "LORA"}, MODULES) != []
