"""FSDP settings that accelerate has and a wrap by hand lacks: accelerate leaves a wrapped model alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

from safe_loading._core.report import Finding


def accelerate_findings(
    version: int, computes_in: object, environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Return findings about the FSDP variables that ``accelerate launch`` and TrainingArguments set.

    ``computes_in`` is the dtype of the policy that the model is wrapped with; None where it has none.
    """
    findings = []
    told = environment.get("FSDP_VERSION")
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true" and told in ("1", "2") and int(told) != version:
        findings.append(
            Finding(
                "accelerate-other-version",
                "warning",
                "FSDP_VERSION",
                f"accelerate was told FSDP{told}, and the model is wrapped by FSDP{version}: its prepare will fail.",
                f"pass version={told}, or launch with --fsdp_version {version}.",
            )
        )
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision in ("bf16", "fp16") and computes_in is None:
        findings.append(
            Finding(
                "accelerate-precision-ignored",
                "warning",
                "ACCELERATE_MIXED_PRECISION",
                f"accelerate was told {precision}, and a model that is wrapped already computes in its own dtype.",
                f"pass mp_policy=torch.{'bfloat16' if precision == 'bf16' else 'float16'}, or use "
                f"load_at_prepare, which wraps as accelerate was told.",
            )
        )
    return findings
