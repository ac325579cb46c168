"""The manifest of an OpenSSF model signing (``model.sig``): the hashes of a model's files. Imports no torch.

It is a sigstore bundle: a DSSE envelope around an in-toto statement, whose predicate lists the files with their hashes,
as the package model-signing 1.0 writes it. `signer.py` verifies the signature.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safe_loading._core.protocols import JsonObject
from safe_loading._core.report import Finding

from .faults import fault
from .files import not_contained
from .strict_json import try_json_object, try_parse

MANIFEST = "model.sig"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_ALGORITHMS = frozenset({"sha256", "sha384", "sha512", "blake2b"})
_SIGN_AGAIN = f"sign the model again, or remove {MANIFEST}"


class Manifest(NamedTuple):
    """The algorithm and the hash of each file that a manifest lists, by its name in the folder.

    ``ignored`` are the files and folders that its signer left out, and ``bundle`` is all that the file holds.
    """

    digests: Mapping[str, tuple[str, str]]
    ignored: frozenset[str]
    bundle: JsonObject


def read_manifest(folder: Path) -> Manifest | Finding | None:
    """Return the manifest of a folder, the finding that says why it cannot be read, or None where there is none."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    bundle = try_json_object(path)
    if isinstance(bundle, Finding):
        return bundle
    try:
        envelope = bundle["dsseEnvelope"]
        statement = try_parse(base64.b64decode(envelope["payload"], validate=True), f"{path}: its statement")
        if isinstance(statement, Finding):
            return statement
        digests = dict(_resources(folder, statement))
        ignored = frozenset(map(str, statement["predicate"]["serialization"].get("ignore_paths", ())))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"is no manifest of model-signing 1.0: {type(error).__name__}: {error}"
        return fault("manifest", path, message, _SIGN_AGAIN)
    return Manifest(digests, ignored, bundle)


def _resources(folder: Path, statement: JsonObject) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the name, the algorithm and the hash of each file; raise ValueError for a statement of another kind."""
    kinds = (statement.get("_type"), statement.get("predicateType"))
    if kinds != (_STATEMENT, _PREDICATE):
        raise ValueError(f"the statement is of the type {kinds}")
    predicate: dict[str, Any] = statement["predicate"]
    if predicate["serialization"]["method"] != "files":
        raise ValueError(f"files are hashed by {predicate['serialization']['method']!r}, and not whole")
    root = hashlib.sha256()
    for entry in predicate["resources"]:
        name, algorithm, digest = entry["name"], entry["algorithm"], entry["digest"]
        if algorithm not in _ALGORITHMS:
            raise ValueError(f"{name!r} has a hash by {algorithm!r}")
        if reason := not_contained(folder, name):
            raise ValueError(reason)
        root.update(bytes.fromhex(digest))
        yield name, (algorithm, digest.lower())
    if statement["subject"][0]["digest"]["sha256"] != root.hexdigest():
        raise ValueError("the hash over all hashes is another one")
