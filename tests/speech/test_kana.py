"""Phonemes of kana, as misaki 0.7.4 has them, with which Kokoro's Japanese voices were trained."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvalidRequest
from headrace.speech.kana import kana_phonemes


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("こんにちは。", "koɲɲiʨiβa."),
        ("きょう は いい てんき です ね！", "kʲoː βa ii teŋkʲi desɨ ne!"),
        ("せんせい、くうき、おおい、こうえん", "seɴseː,kɯːkʲi,oːi,koːeɴ"),
        ("がっこう しんぶん ほんや さんねん", "ɡaʔkoː ɕimbɯɴ hoɴja sanneɴ"),
        ("パーティー ジェット ウィーン クォーター", "paːtʲiː ʥeʔto βiːɴ kᵝoːtaː"),
        ("ふゅ でゅ つぁ ヴァ いぇ しゃ", "ɸʲɨ dʲɨ ʦa va je ɕa"),
        ("ﾃｽﾄ", "tesɨto"),
        ("「はい」", "“hai”"),
        ("300 と 8,600", "sambʲakɯ to haʔsenɾoʔpʲakɯ"),
        ("0.5", "ʣeɾo teɴ ɡo"),
        ("1, 2,3", "iʨi , ɲi , saɴ"),
        ("10000000000000000", None),
        ("漢字", None),
        ("ABC", None),
        ("😀", "😀"),
    ],
)
def test_phonemes(text: str, found: str | None) -> None:
    if found is None:
        with pytest.raises(InvalidRequest) as wrong:
            kana_phonemes(text)
        assert wrong.value.param == "input"
    else:
        assert kana_phonemes(text) == found
