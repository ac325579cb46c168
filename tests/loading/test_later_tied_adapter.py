"""A later adapter with ensure_weight_tying: peft ties for the first one alone, and ours says so instead of a guess."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_models import logits, state, two_steps
from models import save_adapter, save_llama

from safe_loading import AdapterError, load_adapter_on_rank, load_peft_on_rank


@pytest.mark.parametrize(
    "config", [{"target_modules": ["q_proj", "embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}]
)
def test_it_is_refused_and_loads_onto_a_base_of_its_own(tmp_path: Path, config: dict[str, Any]) -> None:
    base = save_llama(tmp_path / "base", tie_word_embeddings=True)
    options = {"target_modules": ["q_proj"], "ensure_weight_tying": True, **config}
    first = save_adapter(tmp_path / "first", base, **options)
    second = save_adapter(tmp_path / "second", base, seed=1, **options)
    with_peft = two_steps(first, base)
    with_peft.load_adapter(str(second), "second", autocast_adapter_dtype=False)
    with_peft.set_adapter("second")
    truth = logits(two_steps(second, base))
    assert not torch.equal(logits(with_peft), truth), "peft can: load it too"
    model = load_peft_on_rank(base, first)
    before = state(model)
    with pytest.raises(AdapterError, match=r"ties 'lm_head' for the first adapter of a model alone") as refused:
        load_adapter_on_rank(model, second, "second")
    assert all("load it onto a base of its own" in problem for problem in refused.value.problems)
    assert state(model) == before
    assert torch.equal(logits(load_peft_on_rank(base, second)), truth)  # the advice
