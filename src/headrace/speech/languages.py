"""English names of the languages that Whisper knows, by code (OpenAI's answers have the names)."""

from __future__ import annotations

from collections.abc import Iterable

_TABLE = """
en english zh chinese de german es spanish ru russian ko korean fr french ja japanese pt portuguese
tr turkish pl polish ca catalan nl dutch ar arabic sv swedish it italian id indonesian hi hindi
fi finnish vi vietnamese he hebrew uk ukrainian el greek ms malay cs czech ro romanian da danish
hu hungarian ta tamil no norwegian th thai ur urdu hr croatian bg bulgarian lt lithuanian la latin
mi maori ml malayalam cy welsh sk slovak te telugu fa persian lv latvian bn bengali sr serbian
az azerbaijani sl slovenian kn kannada et estonian mk macedonian br breton eu basque is icelandic
hy armenian ne nepali mn mongolian bs bosnian kk kazakh sq albanian sw swahili gl galician
mr marathi pa punjabi si sinhala km khmer sn shona yo yoruba so somali af afrikaans oc occitan
ka georgian be belarusian tg tajik sd sindhi gu gujarati am amharic yi yiddish lo lao uz uzbek
fo faroese ps pashto tk turkmen nn nynorsk mt maltese sa sanskrit lb luxembourgish my myanmar
bo tibetan tl tagalog mg malagasy as assamese tt tatar haw hawaiian ln lingala ha hausa ba bashkir
jw javanese su sundanese yue cantonese
"""
_MORE = """
my burmese ca valencian nl flemish ht haitian lb letzeburgesch ps pushto pa panjabi ro moldovan
si sinhalese es castilian zh mandarin
"""
"""Further names, as OpenAI's command line has them."""
_WORDS = _TABLE.split()
NAMES = dict(zip(_WORDS[::2], _WORDS[1::2], strict=True))
_CODES = {name: code for code, name in NAMES.items()}
_CODES |= dict(zip(_MORE.split()[1::2], _MORE.split()[::2], strict=True))


def code_of(language: str) -> str:
    """Return the code of a language code or English name, in any case; else its part before "-"."""
    plain = language.strip().lower()
    return _CODES.get(plain, plain.partition("-")[0])


def language_names(codes: Iterable[str]) -> set[str]:
    """Return the codes and the English names of these languages."""
    known = set(codes)
    return known | {name for name, code in _CODES.items() if code in known}


def name_of(code: str) -> str:
    return NAMES.get(code, code)
