"""Phonemes of Japanese text in kana, in Kokoro's symbols.

Kana determine the sound of a word, so a table is enough. Kanji do not, and are refused by name: no
package for their readings with a permissive licence is small enough to be a dependency. Words are
separated by spaces, as in books for children; the particles は and へ stand alone.
"""

from __future__ import annotations

import re
import unicodedata

from ..base.errors import InvalidRequest

_VOWELS = "aiɯeo"
_SMALL = dict(zip("ぁぃぅぇぉゃゅょ", "a i ɯ e o a ɨ o".split(), strict=True))  # noqa: SIM905
"""Small kana → vowel that replaces the preceding one."""
_ROWS = """\
 あいうえお
k かきくけこ
ɡ がぎぐげご
s さ・・せそ
ʣ ざ・・ぜぞ
t た・・てと
d だ・・でど
n な・ぬねの
h は・・へほ
b ばびぶべぼ
p ぱぴぷぺぽ
m まみむめも
j や・ゆ・よ
ɾ らりるれろ
v ・・ゔ・・"""
"""Consonants, each with the kana of a, i, u, e, o."""
_OTHERS = "し ɕi じ ʥi ち ʨi ぢ ʥi に ɲi ひ çi す sɨ ず zɨ つ ʦɨ づ zɨ ふ ɸɯ わ βa ゐ i ゑ e を o"
"""Kana that differ from their rows."""
_SOFT = "kɡbpmɾ"
"""Consonants that are palatal before i."""
_PALATAL = "ɕʥʨɲç"
_ROUND = "うくぐ"
"""Kana that are a rounded consonant before a small vowel."""
_MARKS = str.maketrans("。、！？「」『』：；（）・…〜—", ".,!?“”“”:;()\u3000…——")
_NASALS = (("m", "mpb"), ("ŋ", "kɡ"), ("ɲ", "ɲʨʥ"), ("n", "ntdɾz"))
"""Sounds of ん, each with the consonants that it precedes; otherwise ɴ."""
_SPOKEN = {"は": "わ", "へ": "え", "こんにちは": "こんにちわ", "こんばんは": "こんばんわ"}
"""Words that sound different from their kana."""
_DIGITS = "ゼロ いち に さん よん ご ろく なな はち きゅう".split()  # noqa: SIM905
_TENS = ("", "じゅう", "ひゃく", "せん")
_UNITS = ("", "まん", "おく", "ちょう")
_SHIFTED = {
    "さんひゃく": "さんびゃく",
    "ろくひゃく": "ろっぴゃく",
    "はちひゃく": "はっぴゃく",
    "さんせん": "さんぜん",
    "はちせん": "はっせん",
    "いちちょう": "いっちょう",
    "はちちょう": "はっちょう",
    "じゅうちょう": "じゅっちょう",
}
"""Parts of numbers that change when they meet."""
_NUMBER = re.compile(r"(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.(\d+))?")
_MOST_DIGITS = 16


def _table() -> dict[str, tuple[str, str]]:
    """Return the consonant and the vowel of each kana."""
    found: dict[str, tuple[str, str]] = {}
    for row in _ROWS.splitlines():
        consonant, kana = row.split(" ")
        for vowel, one in zip(_VOWELS, kana, strict=True):
            soft = "ʲ" if vowel == "i" and consonant in _SOFT and consonant else ""
            found[one] = consonant + soft, vowel
    words = iter(_OTHERS.split())
    for one, sound in zip(words, words, strict=True):
        found[one] = sound[:-1], sound[-1]
    del found["・"]
    return found


_TABLE = _table()


def kana_phonemes(text: str) -> str:
    """Return the phonemes of a text in kana, with its marks and spaces.

    Numbers of up to 16 digits are read. Raises `InvalidRequest` naming characters without a
    reading.
    """
    text = _NUMBER.sub(_number, unicodedata.normalize("NFKC", text))
    text = "".join(_hiragana(one) for one in text).translate(_MARKS)
    words = re.split(r"(\s+|[^\w\u3099-\u309cー]+)", text)
    found = "".join(_word(_SPOKEN.get(word, word)) for word in words)
    return re.sub(r"\s+", " ", found).strip()


def _hiragana(one: str) -> str:
    return chr(ord(one) - 0x60) if "ァ" <= one <= "ヶ" else one


def _number(found: re.Match[str]) -> str:
    digits, decimals = found[1].replace(",", ""), found[2]
    if not digits.isascii() or len(digits.lstrip("0")) > _MOST_DIGITS:
        raise InvalidRequest(
            f"the number {found[0]:.40} is not read; allowed are {_MOST_DIGITS} digits",
            param="input",
        )
    said = _integer(int(digits)) or _DIGITS[0]
    if decimals:
        said += " てん " + "".join(_DIGITS[int(one)] for one in decimals)
    return f" {said} "


def _integer(number: int) -> str:
    said = ""
    for place, unit in reversed(list(enumerate(_UNITS))):
        four = number // 10_000**place % 10_000
        if not four:
            continue
        part = ""
        for ten, word in reversed(list(enumerate(_TENS))):
            digit = four // 10**ten % 10
            if digit:
                part += _met(_DIGITS[digit] if digit > 1 or not ten else "", word)
        said += _met(part, unit)
    return said


def _met(part: str, word: str) -> str:
    """Join two parts of a number; the last sounds may change."""
    both = part + word
    for before, after in _SHIFTED.items():
        if both.endswith(before):
            return both.removesuffix(before) + after
    return both


def _word(word: str) -> str:
    said, at = "", 0
    while at < len(word):
        one, after = word[at], word[at + 1 : at + 2]
        if after in _SMALL and after and one in _TABLE:
            sound = _joined(one, after)
            at += 1
        elif one in _TABLE:
            sound = "".join(_TABLE[one])
        elif one in _SMALL:
            sound = _SMALL[one]
        elif one == "ん":
            sound = _nasal(_start(word, at + 1))
        elif one == "っ":
            sound = "ʔ" if after else ""
        elif one == "ー":
            sound = "ː" if said else ""
        elif one.isspace() or not one.isalnum():
            sound = one
        else:
            kind = "kanji" if unicodedata.name(one, "").startswith("CJK") else "it"
            raise InvalidRequest(
                f"{one!r} of {word[:20]!r} has no reading here: this voice reads kana and numbers, "
                f"and {kind} must be written in kana; or send phonemes",
                param="input",
            )
        said += "ː" if _lengthens(said, one, sound) else sound
        at += 1
    return said


def _joined(one: str, small: str) -> str:
    """Return the sound of a kana followed by a small one: きゃ, ファ, ティ."""
    consonant = _TABLE[one][0]
    new = _SMALL[small]
    glides = small in "ゃゅょ"
    if one in _ROUND and not glides:
        return ("β" if one == "う" else consonant + "ᵝ") + new
    if one == "い":
        return "j" + new
    if consonant and consonant[-1] not in "ʲ" + _PALATAL and (glides or new == "i"):
        consonant = "bʲ" if one == "ゔ" and glides else consonant + "ʲ"
    return consonant + new


def _start(word: str, at: int) -> str:
    """Return the first symbol after a place in a word."""
    one = word[at : at + 1]
    return _TABLE[one][0][:1] if one in _TABLE else ""


def _nasal(follows: str) -> str:
    return next((sound for sound, before in _NASALS if follows and follows in before), "ɴ")


def _lengthens(said: str, one: str, sound: str) -> bool:
    """Return whether a vowel lengthens the preceding one: せんせい, くうき, こうえん, おおい."""
    before = said[-1:]
    pairs = {"ɯ": "oɯɨ", "i": "e", "o": "o", "e": "e", "a": "a"}
    return one in "あいうえお" and sound in pairs and before != "" and before in pairs[sound]
