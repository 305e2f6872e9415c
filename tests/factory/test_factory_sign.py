"""Envelopes, keys and bills of materials, without a model; also with the oldest packages that
`pyproject.toml` allows (`.ci/lowest`)."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from headrace.base.errors import OptionError, PackageAbsent, Untrusted
from headrace.factory.key import canonical
from headrace.factory.revoke import trusted
from headrace.factory.sbom import LOCK as LOCK_FILE
from headrace.factory.sbom import bill, locked
from headrace.factory.sign import MOST_BYTES, STATEMENT, Trust, opened, sign, signer
from headrace.factory.spdx import spdx

WORDS = {"_type": STATEMENT, "subject": [], "predicateType": "urn:test", "predicate": {"a": 1}}


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def test_what_was_signed_is_read(cache: str) -> None:
    data = sign(WORDS, signer(None, cache))
    assert opened(data, trusted(None, cache)) == WORDS
    assert sign(WORDS, signer(None, cache)) == data, "Ed25519 signs the same the same way"


def test_no_byte_of_an_envelope_can_change(cache: str) -> None:
    data, keys = sign(WORDS, signer(None, cache)), trusted(None, cache)
    for place in range(len(data)):
        with pytest.raises(Untrusted):
            opened(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], keys)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000, b" " * (MOST_BYTES + 1)],
    ids=["empty", "list", "null", "object", "bytes", "deep", "large"],
)
def test_what_is_no_envelope_is_refused(cache: str, data: bytes) -> None:
    signer(None, cache)
    with pytest.raises(Untrusted):
        opened(data, trusted(None, cache))


def test_another_spelling_of_an_envelope_is_refused(cache: str) -> None:
    data, keys = sign(WORDS, signer(None, cache)), trusted(None, cache)
    document = json.loads(data)
    more = {**document, "more": 1}
    for wrong in (data + b"\n", b" " + data, json.dumps(document).encode(), canonical(more)):
        with pytest.raises(Untrusted, match="not as it was written"):
            opened(wrong, keys)


def test_a_payload_of_another_type_is_refused(cache: str) -> None:
    data, keys = sign(WORDS, signer(None, cache)), trusted(None, cache)
    with pytest.raises(Untrusted, match="text/plain"):
        opened(canonical({**json.loads(data), "payloadType": "text/plain"}), keys)


def test_another_payload_under_the_signature_is_refused(cache: str) -> None:
    data, keys = sign(WORDS, signer(None, cache)), trusted(None, cache)
    payload = base64.b64encode(canonical({**WORDS, "predicate": {"a": 2}})).decode()
    with pytest.raises(Untrusted, match="does not match what is signed"):
        opened(canonical({**json.loads(data), "payload": payload}), keys)


def test_a_statement_of_another_version_is_refused(cache: str) -> None:
    data = sign({**WORDS, "_type": "https://in-toto.io/Statement/v0.1"}, signer(None, cache))
    with pytest.raises(Untrusted, match="no in-toto statement"):
        opened(data, trusted(None, cache))


def test_a_strangers_key_is_not_believed(cache: str, tmp_path: Path) -> None:
    signer(None, cache)
    data = sign(WORDS, signer(None, str(tmp_path / "other")))
    with pytest.raises(Untrusted, match="not trusted here"):
        opened(data, trusted(None, cache))
    with pytest.raises(Untrusted, match="not trusted here"):
        opened(data, Trust())
    assert opened(data, trusted(None, str(tmp_path / "other"))) == WORDS


def test_the_own_key_is_its_owners_alone_and_stays(cache: str) -> None:
    first = signer(None, cache)
    key = Path(cache) / "factory" / "key.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    assert signer(key, cache).public_key == first.public_key
    assert signer(None, cache).public_key == first.public_key


def test_either_half_of_a_key_says_whom_to_believe(cache: str) -> None:
    data = sign(WORDS, signer(None, cache))
    (public,) = (Path(cache) / "factory" / "trusted").iterdir()
    for half in (Path(cache) / "factory" / "key.pem", public):
        assert opened(data, trusted(half)) == WORDS


def pem(key: Any) -> bytes:
    found: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return found


def test_a_users_own_key_signs(cache: str, tmp_path: Path) -> None:
    path = tmp_path / "own.pem"
    path.write_bytes(pem(Ed25519PrivateKey.generate()))
    data = sign(WORDS, signer(path, cache))
    assert opened(data, trusted(None, cache)) == WORDS
    assert not (Path(cache) / "factory" / "key.pem").exists()


def test_what_is_no_key_is_refused_by_its_path(cache: str, tmp_path: Path) -> None:
    wrong, rsa = tmp_path / "wrong.pem", tmp_path / "rsa.pem"
    wrong.write_text("no key")
    rsa.write_bytes(pem(generate_private_key(65537, 2048)))
    with pytest.raises(OptionError, match=r"wrong\.pem holds no private key"):
        signer(wrong, cache)
    with pytest.raises(OptionError, match=r"rsa\.pem holds no Ed25519 key"):
        signer(rsa, cache)
    with pytest.raises(OptionError, match=r"absent\.pem holds no private key"):
        signer(tmp_path / "absent.pem", cache)
    with pytest.raises(OptionError, match=r"wrong\.pem holds no key"):
        trusted(wrong)


LOCK = "a==1 \\\n    --hash=sha256:" + "0" * 64 + "\nb==2 ; sys_platform == 'win32'\n"
LOCK += "c==3 ; platform_machine == 'x86_64' \\\nd==4 ; platform_machine == 'aarch64'\n"
PINS = locked(LOCK, "x86_64")
MODEL = {
    "name": "m",
    "licence": "Apache-2.0",
    "files": [{"path": "w", "digest": "sha256:" + "1" * 64}],
}


def test_a_bill_lists_the_pins_that_the_image_has() -> None:
    assert PINS == [("a", "1", ["0" * 64]), ("c", "3", [])]
    assert [name for name, *_ in locked(LOCK, "aarch64")] == ["a", "d"]
    document = json.loads(bill(MODEL, PINS))
    assert document["specVersion"] == "1.6"
    names = {one["name"]: one for one in document["components"]}
    assert set(names) == {"m", "a", "c"}
    assert names["a"]["purl"] == "pkg:pypi/a@1"
    assert names["m"]["type"] == "machine-learning-model"
    assert names["m"]["components"][0]["hashes"][0]["content"] == "1" * 64


def test_a_bill_has_no_time_and_the_same_bytes_twice() -> None:
    assert bill(MODEL, PINS) == bill(MODEL, PINS)
    assert "timestamp" not in json.loads(bill(MODEL, PINS))["metadata"]
    assert bill(MODEL, PINS) != bill({**MODEL, "name": "n"}, PINS)


def test_a_bill_is_valid_by_the_schema() -> None:
    """CycloneDX 1.6 by the schema that its library carries, for the lock that is shipped."""
    # Here, since it makes a grammar of RFC 3987 as it is imported: a second of every worker.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    strict = JsonStrictValidator(SchemaVersion.V1_6)
    text = bill(MODEL, locked(LOCK_FILE.read_text(), "x86_64")).decode()
    assert strict.validate_str(text) is None
    assert strict.validate_str(text.replace('"file"', '"fyle"', 1)) is not None


# Without the extra


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_same_bill_is_valid_spdx() -> None:
    parser = pytest.importorskip("spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser")
    validation = pytest.importorskip("spdx_tools.spdx.validation.document_validator")
    pins = [("Some-Package", "1.0", ["0" * 64]), ("other", "2.1.post1", [])]
    of = [{"path": "w/model.gguf", "digest": "sha256:" + "2" * 64, "size": 7}]
    files = [{"path": "model-q4_k.gguf", "digest": "sha256:" + "1" * 64, "size": 3}]
    model = {"name": "org/Model 1", "licence": "Apache-2.0", "files": files}
    for each in (model, {**model, "quantised": {"to": "q4_k", "of": of}, "licence": None}):
        text = spdx(each, pins)
        assert text == spdx(each, pins)
        document = parser.JsonLikeDictParser().parse(json.loads(text))
        assert [
            found.validation_message for found in validation.validate_full_spdx_document(document)
        ] == []
        held = {package.name: package for package in document.packages}
        assert held["Some-Package"].external_references[0].locator == "pkg:pypi/some-package@1.0"
        assert held["model-q4_k.gguf"].checksums[0].value == "1" * 64
        assert ("before-w/model.gguf" in held) == ("quantised" in each)


@pytest.mark.parametrize("package", ["securesystemslib", "cryptography", "cyclonedx", "packageurl"])
def test_a_missing_package_is_named_with_what_installs_it(package: str) -> None:
    done = python(
        f"import sys; sys.modules[{package!r}] = None; "
        "sys.argv = ['headrace', 'factory', 'build', 'x']; "
        "from headrace.cli.main import main; main()"
    )
    assert done.returncode == PackageAbsent.exit_code, done.stderr
    assert done.stderr.startswith(f"error: the factory needs {package}")
    assert f"pip install {package}" in done.stderr


@pytest.mark.parametrize("module", ["headrace.cli.main", "headrace.cli.serve"])
def test_starts_do_without_the_factorys_imports(module: str) -> None:
    done = python(f"import {module}, sys; print(*sys.modules)")
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "headrace" in loaded
    assert not loaded & {"securesystemslib", "cyclonedx", "packageurl"}
    assert "headrace.factory" not in done.stdout
