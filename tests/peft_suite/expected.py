"""Why a case of peft's tests differs with our calls: patterns of its id or its error, and the reason.

docs/methods.md lists those that were met, by the record of the last run.
"""

from __future__ import annotations

import re

# (pattern of the case's id, pattern of its error, reason); the first that matches both is the reason.
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "",
        r"(OPTForCausalLM|Sequential|MLP) that has adapters already",
        "the base still has the layers of an adapter: refused, where peft puts new layers around them",
    ),
    (
        "test_load_pissa_olora_with_other_adapter_warns",
        "",
        "a start that changes the base under another adapter is refused, or a finding, where peft warns",
    ),
    (
        "missing_keys_warning|missing_theta_d_key_warns",
        "AdapterError|DID NOT WARN",
        "a tensor that the file lacks is refused, where peft warns",
    ),
    (
        "test_hotswap_(missing_key_works|works_different_ranks_alphas)",
        "the loaded adapter has",
        "a hot swap overwrites in place: a larger rank, or other layers, are refused, where peft replaces the tensors",
    ),
    (
        "test_hotswap_extra_key_raises",
        "the loaded adapter has no such tensor",
        "a hot swap of other layers is an AdapterError, for which the test expects peft's RuntimeError",
    ),
    (
        "test_load_resized_embedding_ignore_mismatched_sizes",
        "AdapterError",
        "a shape that does not fit is an AdapterError, for which the test expects torch's RuntimeError",
    ),
    (
        "merge",
        "NaNs detected in the merged weights",
        "the test looks for the words of peft's error about NaN; MergeError is a ValueError too, and names the layers",
    ),
    (
        "overlapping_token_indices_merging",
        "undefined merging behavior",
        "the test looks in a shortened text for the words that end peft's error, which MergeError repeats",
    ),
    (
        "test_explicit_flux2_shadow_checkpoint",
        "shadow_model names another model",
        "an adapter that names another model by a path is refused",
    ),
    (
        "tie_word_embeddings_config|test_warn_for_tied_embeddings_merge",
        "(?i)warn",
        "the test looks for a warning about tie_word_embeddings, which is the finding no-longer-tied here",
    ),
    (
        "",
        "peft's OFT of a convolution with kernel_size",
        "the test's pictures are of the size of the kernel; on larger ones peft's merge of OFT is wrong: refused",
    ),
    (
        "(?i)shadow",
        "MergeError",
        "the test looks for NotImplementedError, where MergeError says that ShadowPEFT cannot be merged",
    ),
)


def reasons() -> set[str]:
    """Return all of them."""
    return {reason for _, _, reason in _REASONS}


def reason_for(case: str, error: str) -> str:
    """Return why a case differs; empty when nothing says so."""
    return next((reason for ids, errors, reason in _REASONS if re.search(ids, case) and re.search(errors, error)), "")
