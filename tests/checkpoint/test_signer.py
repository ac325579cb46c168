"""Who signed a model: keys and certificates as model-signing takes them, and folders that somebody changed.

Skipped where the extra ``signing`` is not installed; .ci/run installs it in its last stage.
"""

from __future__ import annotations

import base64
import datetime
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faults.checkpoints import write_model

from safe_loading import ArgumentError, CheckpointReport, EngineError, check_checkpoint
from safe_loading.__main__ import main

try:
    import model_signing.signing
    import model_signing.verifying
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
except ImportError as error:
    absent = f"the extra signing is not installed: {error}"
else:
    absent = ""
installed = pytest.mark.skipif(bool(absent), reason=absent)


class Keys(NamedTuple):
    private: Path
    public: Path


def write_keys(folder: Path, name: str, curve: Any = None) -> Keys:
    key = ec.generate_private_key(curve or ec.SECP256R1())
    return _write_keys(folder, name, key)


def _write_keys(folder: Path, name: str, key: Any) -> Keys:
    keys = Keys(folder / f"{name}.key", folder / f"{name}.pub")
    pem = serialization.Encoding.PEM
    keys.private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    keys.public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return keys


def write_certificate(folder: Path, name: str, keys: Keys, issuer: tuple[str, Keys], *, signs: bool) -> Path:
    """A certificate of ``keys``, issued by another name with its keys, which may sign code or issue certificates."""
    key, by = (serialization.load_pem_private_key(each.private.read_bytes(), None) for each in (keys, issuer[1]))
    subject, authority = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in (name, issuer[0]))
    now = datetime.datetime.now(datetime.timezone.utc)
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    made = (
        x509.CertificateBuilder(subject_name=subject, issuer_name=authority, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=not signs, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=signs, key_cert_sign=not signs, crl_sign=False, decipher_only=False, **usage
            ),
            critical=True,
        )
        .sign(by, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return path


def sign(model: Path, keys: Keys, *left_out: str) -> Path:
    """Sign a folder as the command `model_signing sign key` does."""
    config = model_signing.signing.Config().use_elliptic_key_signer(private_key=keys.private)
    hashing = model_signing.hashing.Config().set_ignored_paths(paths=["model.sig", *left_out])
    config.set_hashing_config(hashing).sign(model, model / "model.sig")
    return model


def signed_model(folder: Path, keys: Keys) -> Path:
    return sign(
        write_model(folder / "signed", {"model-1.safetensors": {"a": 4}, "model-2.safetensors": {"b": 2}}), keys
    )


def check(folder: Path, signed_by: Path) -> CheckpointReport:
    return check_checkpoint(folder, headers=True, signed_by=signed_by)


def codes(report: CheckpointReport) -> list[str]:
    assert report.ok == all(finding.severity != "error" for finding in report.findings)
    return [finding.code for finding in report.findings]


@installed
@pytest.mark.parametrize("curve", ["SECP256R1", "SECP384R1", "SECP521R1"])
def test_the_key_that_signed_is_said(tmp_path: Path, curve: str, capsys: pytest.CaptureFixture[str]) -> None:
    keys = write_keys(tmp_path, "publisher", getattr(ec, curve)())
    model = signed_model(tmp_path, keys)
    report = check(model, keys.public)
    assert codes(report) == ["signature-verified"]
    assert report.ok
    assert report.hashed == 4
    assert str(keys.public) in report.findings[0].message
    assert main(["check", "--headers", "--json", "--signed-by", str(keys.public), str(model)]) == 0
    assert json.loads(capsys.readouterr().out)["hashed"] == 4
    assert codes(check_checkpoint(model, headers=True, hashes=True)) == ["signature-not-verified"]


@installed
def test_another_key_is_an_error_and_the_publishers_own_is_passed(tmp_path: Path) -> None:
    keys, other = write_keys(tmp_path, "publisher"), write_keys(tmp_path, "other")
    model = signed_model(tmp_path, keys)
    report = check(model, other.public)
    assert codes(report) == ["signature-differs"]
    assert "Key mismatch" in report.findings[0].message
    assert main(["check", "--headers", "--signed-by", str(other.public), str(model)]) == 1
    assert check(model, keys.public).ok


@installed
def test_a_changed_payload_is_an_error_though_its_hashes_fit(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "publisher")
    model = signed_model(tmp_path, keys)
    forged = write_model(tmp_path / "forged", {"model-1.safetensors": {"a": 5}, "model-2.safetensors": {"b": 2}})
    sign(forged, write_keys(tmp_path, "me"))
    bundle, mine = (json.loads((each / "model.sig").read_text()) for each in (model, forged))
    whole = json.dumps(bundle)
    genuine = dict(bundle["dsseEnvelope"])
    bundle["dsseEnvelope"]["payload"] = mine["dsseEnvelope"]["payload"]
    (forged / "model.sig").write_text(json.dumps(bundle))
    assert codes(check(forged, keys.public)) == ["signature-differs"]
    # the hint says which key it is; it is not signed, and decides nothing
    mine["verificationMaterial"] = bundle["verificationMaterial"]
    (forged / "model.sig").write_text(json.dumps(mine))
    assert codes(check(forged, keys.public)) == ["signature-differs"]
    # two envelopes, in two spellings of which model-signing's reader knows both: what was verified is what is compared
    for names in (("dsseEnvelope", "dsse_envelope"), ("dsse_envelope", "dsseEnvelope")):
        both = {"mediaType": bundle["mediaType"], "verificationMaterial": bundle["verificationMaterial"]}
        both |= {names[0]: mine["dsseEnvelope"], names[1]: genuine}
        (forged / "model.sig").write_text(json.dumps(both))
        assert not check(forged, keys.public).ok
    (forged / "model.sig").write_text(whole)
    assert set(codes(check(forged, keys.public))) == {"signature-verified", "hash-differs"}
    shutil.copytree(model, forged, dirs_exist_ok=True)  # what a download again does
    assert check(forged, keys.public).ok


@installed
def test_files_that_nobody_signed_are_errors_until_they_are_removed_or_signed(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "publisher")
    model = signed_model(tmp_path, keys)
    (model / "notes.txt").write_text("mine")
    report = check(model, keys.public)
    assert {"not-signed", "signature-verified"} <= set(codes(report))
    assert "'notes.txt'" in str(report)
    (model / "notes.txt").unlink()
    assert check(model, keys.public).ok
    (model / "notes.txt").write_text("mine")
    assert check(sign(model, keys), keys.public).ok
    (model / "logs").mkdir()
    (model / "logs" / "run.txt").write_text("left out by the signer")
    assert not check(model, keys.public).ok
    assert check(sign(model, keys, "logs"), keys.public).ok
    assert check(model / "model-1.safetensors", keys.public).ok
    assert not check(write_model(tmp_path / "plain", {"model-1.safetensors": {"a": 4}}), keys.public).ok


@installed
def test_certificates_vouch_for_who_signed(tmp_path: Path) -> None:
    root, leaf, other = (write_keys(tmp_path, name) for name in ("root", "leaf", "other"))
    roots = write_certificate(tmp_path, "root", root, ("root", root), signs=False)
    certificate = write_certificate(tmp_path, "leaf", leaf, ("root", root), signs=True)
    strange = write_certificate(tmp_path, "other", other, ("other", other), signs=False)
    model = write_model(tmp_path / "signed", {"model-1.safetensors": {"a": 4}})
    model_signing.signing.Config().use_certificate_signer(
        private_key=leaf.private, signing_certificate=certificate, certificate_chain=[roots]
    ).sign(model, model / "model.sig")
    report = check(model, roots)
    assert codes(report) == ["signature-verified"]
    assert codes(check(model, strange)) == ["signature-differs"]
    assert codes(check(model, leaf.public)) == ["signature-differs"]  # signed by a certificate, not by a key alone
    assert codes(check(sign(model, leaf), roots)) == ["signature-differs"]


@installed
def test_model_signing_says_the_same_of_every_folder(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, "publisher")
    model = signed_model(tmp_path, keys)

    def alone() -> bool:
        verification = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=keys.public)
        try:
            verification.set_hashing_config(
                model_signing.hashing.Config().set_ignored_paths(paths=["model.sig"])
            ).verify(model, model / "model.sig")
        except ValueError:
            return False
        return True

    assert check(model, keys.public).ok
    assert alone()
    for name in ("config.json", "model-1.safetensors"):
        whole = (model / name).read_bytes()
        (model / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert not check(model, keys.public).ok
        assert not alone()
        (model / name).unlink()
        assert not check(model, keys.public).ok
        assert not alone()
        (model / name).write_bytes(whole)
    assert check(model, keys.public).ok


@installed
def test_a_signature_without_a_hint_is_verified_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = write_keys(tmp_path, "publisher")
    model = signed_model(tmp_path, keys)
    bundle = json.loads((model / "model.sig").read_text())
    del bundle["verificationMaterial"]["publicKey"]["hint"]  # as model-signing 1.0 wrote it
    (model / "model.sig").write_text(json.dumps(bundle))
    assert check(model, keys.public).ok
    assert not capsys.readouterr().out
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(b"0" * 70).decode()
    (model / "model.sig").write_text(json.dumps(bundle))
    assert codes(check(model, keys.public)) == ["signature-differs"]


@installed
def test_what_is_no_key_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import rsa

    keys = write_keys(tmp_path, "publisher")
    model = signed_model(tmp_path, keys)
    (tmp_path / "text").write_text("-----BEGIN CERTIFICATE-----\nnone\n")
    refused = [keys.private, model / "config.json", tmp_path / "text"]
    refused += [_write_keys(tmp_path, "rsa", rsa.generate_private_key(65537, 2048)).public]
    for path in refused:
        with pytest.raises(ArgumentError, match="P-256"):
            check(model, path)
    assert check(model, keys.public).ok


def test_an_identity_is_no_path(tmp_path: Path) -> None:
    for text in ("name@example.org", str(tmp_path), "a\0b"):
        with pytest.raises(ArgumentError, match=r"model_signing verify sigstore"):
            check_checkpoint(tmp_path, signed_by=text)
    with pytest.raises(ArgumentError, match="signed_by="):
        check_checkpoint(tmp_path, signed_by="")


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_signing.verifying", None)
    (tmp_path / "key.pub").write_text("-----BEGIN PUBLIC KEY-----")
    with pytest.raises(EngineError, match=r"pip install 'safe-loading\[signing\]'"):
        check_checkpoint(tmp_path, signed_by=tmp_path / "key.pub")
