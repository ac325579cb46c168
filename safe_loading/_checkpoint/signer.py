"""Who signed a model (``model.sig``): verified by model-signing, with a key that the user names. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from safe_loading._core.paths import path_text
from safe_loading._core.report import Finding
from safe_loading.errors import ArgumentError, EngineError

from .faults import fault, listed, note
from .signing_manifest import MANIFEST, Manifest

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_AGAIN = f"download the folder with its {MANIFEST} again, or ask who published it for the key that signed it"


class Signer(NamedTuple):
    """Who must have signed: the words for it, and model-signing's configuration of the verification."""

    name: str
    verification: Any


def signer_of(signed_by: str | os.PathLike[str]) -> Signer:
    """Return the signer whose public key, or whose certificates of origin, are in a file.

    Raises:
        ArgumentError: The file cannot be read, or is neither of both.
        EngineError: model-signing is not installed.
    """
    path = Path(path_text(signed_by, "signed_by")).expanduser()
    kinds = "a public key (P-256, P-384 or P-521) or certificates, in PEM"
    try:
        is_chain = _CERTIFICATE in path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ArgumentError(
            f"signed_by={str(path)!r} is no file that can be read: {error}. Pass the path of {kinds}. An identity of "
            "sigstore is verified by `model_signing verify sigstore`, which needs the network."
        ) from error
    try:
        verification = import_module("model_signing.verifying").Config()
    except ImportError as error:  # model-signing 1.1 does not declare pyOpenSSL, which it imports
        raise EngineError(
            f"signed_by= needs the package model-signing ({error}). Run: pip install 'safe-loading[signing]'"
        ) from error
    try:
        if is_chain:
            verification.use_certificate_verifier(certificate_chain=[path])
        else:
            verification.use_elliptic_key_verifier(public_key=path)
    except Exception as error:  # cryptography raises errors of many kinds for what it cannot read
        raise ArgumentError(
            f"signed_by={str(path)!r} is no file with {kinds}: {type(error).__name__}: {error}."
        ) from error
    return Signer(f"a certificate of {str(path)!r}" if is_chain else f"the key of {str(path)!r}", verification)


def signature_findings(folder: Path, names: list[str], manifest: Manifest | None, signer: Signer) -> Iterator[Finding]:
    """Yield whether the hashes of a manifest are signed by a signer, and which files they do not cover."""
    path = folder / MANIFEST
    if manifest is None:
        yield fault("not-found", path, f"there is no such file, so nothing is signed by {signer.name}", _AGAIN)
        return
    try:
        _verify(folder, manifest, signer)
    except Exception as error:  # of a bundle that somebody made up, model-signing raises errors of any kind
        message = f"its signature is not by {signer.name}: {type(error).__name__}: {error}".rstrip(": ")
        yield fault("signature-differs", path, message, _AGAIN)
        return
    message = f"its signature is by {signer.name}, as model-signing verified"
    yield note("info", "signature-verified", path, message, "nothing has to be done")
    if unsigned := [name for name in names if name not in manifest.digests and not _is_ignored(name, manifest)]:
        message = f"files that {MANIFEST} does not list, so nobody signed them: {listed(unsigned)}"
        yield fault("not-signed", folder, message, "remove them, or have the model signed again with them")


def _is_ignored(name: str, manifest: Manifest) -> bool:
    """Return whether the signer left out a file or one of its folders, by the signed statement itself."""
    path = PurePosixPath(name)
    return any(each.as_posix() in manifest.ignored for each in (path, *path.parents))


def _verify(folder: Path, manifest: Manifest, signer: Signer) -> None:
    """Let model-signing verify the signature, and that the signed hashes are those that files are compared with.

    It would hash the files, too, after the signature. In the place of its hashes it gets those of the manifest, so that
    every file is read once, by `published_hashes.py`.
    """
    verification = signer.verification.set_hashing_config(_AsListed(manifest.digests))
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(sys.stderr):  # it prints warnings
        bundle = Path(temporary) / MANIFEST  # what was read once: the file itself may be another one by now
        bundle.write_text(json.dumps(manifest.bundle), encoding="utf-8")
        verification.verify(folder, bundle)


class _AsListed:
    """A ``model_signing.hashing.Config`` that hashes nothing: it answers with the hashes of a manifest."""

    def __init__(self, digests: Mapping[str, tuple[str, str]]) -> None:
        self._digests = digests

    def add_ignored_paths(self, **_: object) -> None:
        """Do nothing, since no folder is searched."""

    def hash(self, folder: Path, **_: object) -> object:
        """Return the hashes in the type of model-signing, which compares them with those that were signed."""
        manifest, hashing = import_module("model_signing.manifest"), import_module("model_signing._hashing.hashing")
        kind = manifest.SerializationType.from_args({"method": "files", "hash_type": "", "allow_symlinks": False})
        entries = [(name, hashing.Digest(by, bytes.fromhex(digest))) for name, (by, digest) in self._digests.items()]
        return manifest.Manifest(folder.name, [kind.new_item(*entry) for entry in entries], kind)
